"""The measured calls of a generated step, as `tfnb.execution.tiers.gain` takes them: seconds, memory, and their kind.

Seconds are those of the processor in the thread that runs the step: whatever else the machine does meanwhile, which may
be a compiler, makes no call longer. The threads of a library compute as long as this one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from tfnb.execution.lowering.control_flow_code import Cond, Loop, RecursiveCall
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.gain import SLOW, CallCost, Gain, Kind, predicted
from tfnb.execution.tiers.native.exportable import obstacles
from tfnb.execution.tracing.live_memory import tensors
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import overload
from tfnb.kernels.optim import SGD_PRODUCT

CLOCK = 4e-7  # seconds of reading the clock, which are no part of a call
PRODUCTS = frozenset({SGD_PRODUCT})  # updates that multiply matrices
_REGIONS = (Loop, Cond, RecursiveCall)


class CallTimer(fx.Interpreter):
    """One run of a step, call by call, with the seconds, bytes and elements of each.

    Nothing is written for it: code with a clock around each call takes half a second to write for 3,000 calls.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # generated code computes a step that fails again, and says where
        self.calls: dict[fx.Node, tuple[float, int, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        start = time.thread_time()
        value = self.call_function(n.target, args, kwargs)  # type: ignore[arg-type]
        seconds = max(0.0, time.thread_time() - start - CLOCK)
        made = tensors(value)
        self.calls[n] = seconds, sum(x.nbytes for x in made), sum(x.numel() for x in made)
        return value


class StepProfile:
    """The calls of a step, timed while steps run: each has the least seconds of all turns."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.turns: list[dict[fx.Node, tuple[float, int, int]]] = []  # numbers alone: a timer holds feeds and results
        self.commits: list[float] = []  # seconds of the commits of the same steps

    def forward(self, *args: object) -> Sequence[Any]:
        """Computes a step as ``program.forward`` does, with a clock around each call."""
        timer = CallTimer(self.program.module)
        outs: Sequence[Any] = timer.run(*args)
        self.turns.append(timer.calls)
        return outs

    def gain(self, calls: Sequence[CallCost]) -> Gain:
        """The prediction for these calls. A commit that multiplies matrices is a call of a library, too.

        Compiled code writes Variables itself if all calls are part of it.
        """
        commit = min(self.commits)
        if any(op in PRODUCTS for op, *_ in self.program.updates):
            return predicted([*calls, CallCost("library", commit)])
        written = sum(variable.storage.nbytes for variable in self.program.writes if variable.initialized)
        return predicted(calls, commit, None if self.unfit else written)

    def calls(self, args: Sequence[Any]) -> list[CallCost]:
        """The calls, for arguments as in a run."""
        program, turns = self.program, self.turns
        graph = program.module.graph
        inputs = graph.find_nodes(op="placeholder")
        outside = {node: arg.nbytes for node, arg in zip(inputs, args, strict=True) if isinstance(arg, torch.Tensor)}
        for node in graph.find_nodes(op="get_attr"):
            outside[node] = getattr(program.module, str(node.target)).nbytes
        place = {node: at for at, node in enumerate(turns[0])}
        returned = {*graph.output_node().all_input_nodes}
        found: list[CallCost] = []
        for node in place:
            owner = program.node_of.get(node.name)
            op = "" if owner is None else owner.op
            seconds, (_, size, elements) = min(turn[node][0] for turn in turns), turns[-1][node]
            found.append(CallCost(
                kind_of(op, node, is_fit=node not in self.unfit), seconds, size,
                tuple(place[source] for source in node.all_input_nodes if source in place),
                sum(outside.pop(source, 0) for source in node.all_input_nodes), node in returned,
                SLOW.get(_packet(op), 0.0), elements,
            ))  # fmt: skip
        return found

    @cached_property
    def unfit(self) -> Mapping[fx.Node, str]:
        """The calls that stay generated code, and why."""
        return obstacles(self.program)


def kind_of(op: str, node: fx.Node, *, is_fit: bool) -> Kind:
    """The kind of a call. is_fit: whether it can be a part of compiled code."""
    if isinstance(node.target, _REGIONS):
        return "loop"
    if op.count(".") < 2:
        return "view"  # of results, and arithmetic of sizes
    known = facts_of(op)
    if not is_fit or known.is_random:  # draws are made before the compiled call
        return "library"
    if known.shares_memory or known.view_or_copy:
        return "view"
    is_counted = overload(op).overloadpacket in flop_registry
    return "fused" if not is_counted and (known.is_pointwise or known.fuses) else "library"


def _packet(op: str) -> str:
    """``tanh`` of ``aten.tanh.default``."""
    return op.split(".")[1] if op.count(".") > 1 else ""
