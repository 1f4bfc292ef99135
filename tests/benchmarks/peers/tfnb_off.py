"""tfnb: the recorded graph through generated code, and variants. ``null`` programs pass nodes that compute nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import fx

import tfnb
from tests.benchmarks.peers import torch_ops
from tests.benchmarks.peers.serve import Step
from tests.benchmarks.peers.torch_ops import network, tensors
from tfnb.execution import lower
from tfnb.graph import Contents, Graph, Node, Ref, Spec, Value

SCALAR = Spec(torch.float32, ())


def loop(cell: Callable[..., Any], state: Any, xs: Any, time: int) -> Any:
    """The program's loop as a loop of the graph, which is unrolled otherwise."""
    return tfnb.fold(cell, state, xs)


VARIANTS: dict[str, dict[str, Any]] = {
    "tfnb_auto": {"compile": "auto"},  # as it is when nothing is said: compiled in the background where that is faster
    "tfnb_now": {"compile": "now"},  # the whole step compiled at its first run
    "tfnb_last": {"layout": "channels_last"},  # sums are rounded in another order
    "tfnb_loop_now": {"compile": "now", "ops": SimpleNamespace(**vars(torch_ops) | {"loop": loop})},
    "tfnb_loop": {"ops": SimpleNamespace(**vars(torch_ops) | {"loop": loop})},
}


def version() -> str:
    return f"tfnb on torch {torch.__version__}"


def build(
    task: dict[str, Any], weights: list[np.ndarray], data: list[np.ndarray], compile: str = "off", ops: Any = None,
    layout: str | None = None,
) -> Step:  # fmt: skip
    torch.set_num_threads(task["threads"])
    if task["program"].startswith("null"):
        return null(task["program"] == "null-chain", task["sizes"]["nodes"])
    net, batch = network(task, weights, ops), tensors(task, data)
    parameters = list(net.parameters())
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(sample, shape=tuple(sample.shape)) for sample in batch]
        loss = net(*fed)
        fetches: list[Any] = [loss]
        if task["mode"] == "step":
            fetches.append(tfnb.train.SGD(task["rate"]).minimize(loss))
        elif task["mode"] == "gradients":
            fetches += tfnb.gradients(loss, parameters)
    session = tfnb.Session(graph, compile=compile, layout=layout)
    if task["entry"] == "run":
        feeds = dict(zip(fed, batch, strict=True))
        return Step(lambda: session.run(loss, feeds), float)
    call = session.make_callable(fetches, fed)
    last: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        last.clear()  # gradients of the step before
        last.extend(call(*batch))
        return last[0]

    def state() -> list[np.ndarray]:
        return [a.detach().cpu().numpy() for a in (parameters if task["mode"] == "step" else last[1:])]

    return Step(run, float, state, len(graph.nodes), lambda: tfnb_tier(session), lambda: settled(session))


def tfnb_tier(session: tfnb.Session) -> str:
    """Which code runs."""
    return "; ".join(line.rpartition("]: ")[2] for line in session.status() if "]: " in line)


def settled(session: tfnb.Session) -> bool:
    """Whether compiled code was compared with generated code, or there will be none."""
    on_its_way = "; compiling", "not compared yet", "not captured yet", "not yet"
    status = [line.partition("]: ")[2].split(", ") for line in session.status()]
    return not any(
        code == "generated code" or part.endswith(on_its_way) for code, *more in status for part in (code, *more)
    )


def null(chain: bool, count: int) -> Step:
    """The lowered program of ``count`` additions, with a kernel that gives back its argument in the place of each.

    What is left is what the engine does for each node.
    """
    nodes = [Node(id=0, name="x", op="tfnb.placeholder", outputs=(SCALAR,))]
    for place in range(1, count + 1):
        attrs = {"self": Ref(0), "other": float(place)}  # all different: equal ones would be merged
        source = Value(place - 1 if chain else 0)
        nodes.append(Node(
            id=place, name=f"add{place}", op="aten.add.Tensor", outputs=(SCALAR,), inputs=(source,), attrs=attrs,
        ))  # fmt: skip
    fetches = [Value(count)] if chain else [Value(place) for place in range(1, count + 1)]
    module = lower(Graph("null", Contents(tuple(nodes))), fetches, [Value(0)]).module
    emptied = 0
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target, node.args, node.kwargs, emptied = operator.pos, node.args[:1], {}, emptied + 1
    assert emptied == count, f"{emptied} of {count} nodes are left after the passes"
    forward = fx.GraphModule(module, module.graph).forward
    return Step(lambda: forward(1, 0), lambda out: float(out[0]), nodes=count)
