"""Generated torch.fx code through inductor, for devices and for ops that have no form in C.

Compiles what `lower` generated, without the writes: forward and backward of a step together, which a
compiler of the model alone does not see. Uses torch._inductor (tried with torch 2.13), loaded when first used: it takes
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from tfnb.execution.lowering.checked_calls import Drawing
from tfnb.execution.lowering.control_flow_code import Loop
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.decompositions import decompositions
from tfnb.execution.tiers.interface import Forward, Request
from tfnb.execution.tiers.operand_checks import Kernel, OperandChecks, OperandRefused, raising
from tfnb.kernels.random import drawing_op

MOST_CALLS = 4000  # these take a processor two minutes, and nothing can end it here


class Inductor:
    """The tier: a step in one kernel."""

    name = "compiled"

    def made(self, request: Request) -> Forward | str:
        """The code for arguments of these very sizes: feeds, storages, the run's number."""
        program, args = request.program.undonated(), request.args
        if any(isinstance(node.target, Loop) for node in program.module.graph.nodes):
            return "it would be compiled iteration by iteration"
        if (count := _calls(program)) > MOST_CALLS:
            return f"{count:,} calls are too many to compile in this process, at most {MOST_CALLS:,}"
        graph, slots = _pure(program)
        draws = any(node.op == "placeholder" and node.name == "run" for node in graph.nodes)
        examples = (*args[:-1], torch.tensor(args[-1], device="cpu")) if draws else tuple(args[:-1])
        kernel = _kernel(fx.GraphModule(program.module, graph), examples)

        def forward(*given: Any) -> tuple[Any, ...]:
            outs = kernel([*given[:-1], torch.tensor(given[-1], device="cpu")] if draws else [*given[:-1]])
            return tuple([outs[place] if made else given[place] for made, place in slots])

        with suppress(OperandRefused):  # the first call loads what was compiled
            forward(*args)
        return forward


def _calls(program: Program) -> int:
    """How many calls its code has, those of a branch included."""
    own = sum(node.op == "call_function" for node in program.module.graph.nodes)
    return own + sum(map(_calls, program.inner))


def _kernel(module: fx.GraphModule, examples: Sequence[Any]) -> Kernel:
    """What inductor makes of a function of tensors, which takes them in a list."""
    from torch import _inductor  # listed exception: inductor takes seconds to load
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    here = all(example.is_cpu for example in examples if isinstance(example, torch.Tensor))
    # Channels last is what the session chose or not; inductor would lay all weights out anew in each step on the CPU.
    settings: dict[str, Any] = {"compile_threads": 1} | ({"layout_optimization": False} if here else {})
    with compile_lock, torch.no_grad(), _inductor.config.patch(settings):
        checks, table = OperandChecks(), decompositions(select_decomp_table())

        def function(*args: Any) -> Any:
            outs, flag = module(*args), checks.flag()
            return outs if flag is None else (*outs, flag)

        table = checks.over(table) if here else table
        traced = make_fx(function, table, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        made = compile_fx_inner(traced, list(examples))
    kernel = getattr(made, "current_callable", None) or made  # without what inductor does around a call
    return raising(kernel) if checks.changed else kernel


def _pure(program: Program) -> tuple[fx.Graph, list[tuple[bool, int]]]:
    """The program's graph with named random ops, returning only what it computes.

    The slots say where each of the program's outputs comes from: (True, place among the new outputs) or (False, place
    among the arguments).
    """
    graph, old = fx.Graph(), program.module.graph
    nodes: dict[fx.Node, fx.Node] = {}
    returned: Any = graph.graph_copy(old, nodes)  # a tuple, as lowering made it
    arguments = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    run = next(node for node in arguments if node.name == "run")
    for node in list(graph.nodes):
        if isinstance(node.target, Drawing):
            node.args = (run, list(node.target.place), *node.args[1:])
            node.target = drawing_op(node.target.op)
    results: dict[fx.Node, int] = {}
    slots = []
    for item in returned:
        if item in arguments:
            slots.append((False, arguments[item]))
        else:
            slots.append((True, results.setdefault(item, len(results))))
    graph.output(tuple(results))
    if not run.users:
        graph.erase_node(run)
    return graph, slots
