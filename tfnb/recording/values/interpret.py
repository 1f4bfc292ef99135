"""Nodes computed on plain tensors, one after the other: the samples of a recording.

Subgraphs are run here as they stand, their sizes read off the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tfnb.errors import BranchChanged, CheckFailed, ResourceExhausted, ShapeError
from tfnb.graph import Dim, Guard, Node, Ref, Spec, Subgraph, Value, ops
from tfnb.graph.node import map_leaves, where
from tfnb.graph.op_facts import kernel, unbind
from tfnb.graph.ops import overload
from tfnb.graph.subgraph import row_places
from tfnb.kernels.control import call, while_loop
from tfnb.kernels.random import mix, seeded
from tfnb.recording.marks.held_interrupts import raise_held

Sizes = Callable[[Dim], Any]


def stream_seed(node: Node, graph_seed: int, run: int) -> int:
    """The seed of a random node in one run: a function of graph seed, owner, place among its random nodes, run."""
    return mix(graph_seed, node.owner.index if node.owner else 0, node.stream or 0, run)


def evaluate(node: Node, inputs: Sequence[Any], size: Sizes, seed: int, run: int = 0) -> tuple[torch.Tensor, ...]:
    """The outputs of one node on plain tensors; ``size`` gives the number that a symbolic argument is."""
    raise_held()

    def argument(leaf: object) -> Any:
        if isinstance(leaf, Ref):
            return inputs[leaf.input]
        return size(leaf) if isinstance(leaf, Dim) else leaf

    attrs = map_leaves(argument, node.attrs)
    with torch.no_grad():
        match node.op:
            case ops.COND:
                given = run_subgraph(chosen(attrs), attrs["operands"], seed, run)
                kinds = zip(given, node.outputs, attrs["shapes"], strict=True)
                out: Any = [absent(spec, shape) if t is None else t for t, spec, shape in kinds]
            case ops.WHILE:
                out = _loop(node, attrs, seed, run)
            case ops.CALL:
                out = _called(node, attrs, seed, run)
            case ops.WITH_GRADIENT:
                out = attrs["values"]
            case "tfnb.guard":
                held(node, attrs["value"])
                out = ()
            case _:
                out = _call(node, attrs, seed, run)
    return tuple(out) if isinstance(out, (list, tuple)) else (out,)


def _call(node: Node, attrs: Mapping[str, Any], seed: int, run: int) -> Any:
    op = overload(node.op)
    args, kwargs = unbind(op, dict(attrs))
    if node.stream is None:
        return kernel(op)(*args, **kwargs)
    device = torch.device(node.outputs[0].device)
    return seeded(kernel(op), stream_seed(node, seed, run), device, args, kwargs)


def _loop(node: Node, attrs: Mapping[str, Any], seed: int, run: int) -> list[torch.Tensor]:
    def function(part: Subgraph) -> Callable[..., Sequence[torch.Tensor]]:
        return lambda *args: run_subgraph(part, args[:-1], seed, args[-1])

    cond, body = attrs["cond"], attrs["body"]
    specs = [node.outputs[places[0]] for places in row_places(attrs)]
    rows = [(shape, spec.dtype, spec.device) for shape, spec in zip(attrs["rows"], specs, strict=True)]
    return while_loop(
        None if cond is None else function(cond), function(body), attrs["init"], attrs["xs"], attrs["captures"],
        limit=number(attrs["limit"]), rows=rows, reverse=attrs["reverse"], run=run,
        draws=body.draws or (cond is not None and cond.draws), replicas=attrs.get("replicas"),
    )  # fmt: skip


def _called(node: Node, attrs: Mapping[str, Any], seed: int, run: int) -> Sequence[torch.Tensor]:
    function, number = attrs["function"], mix(run, node.stream or 0)
    return call(
        function.name, function.limit, lambda *args: run_subgraph(function.body, args, seed, number),
        attrs["args"], lambda deep: too_deep(node, deep),
    )  # fmt: skip


def too_deep(node: Node, why: RecursionError) -> ResourceExhausted:
    """The user's error for a recursion that does not end."""
    return ResourceExhausted(f"{why}\n  at {node.source}", **node.where)


def number(limit: Any) -> int | None:
    """A limit of iterations as a number."""
    return int(limit) if isinstance(limit, torch.Tensor) else limit


def chosen(attrs: Mapping[str, Any]) -> Subgraph:
    """The branch of a cond that its predicate takes."""
    return attrs["then"] if attrs["pred"] else attrs["else"]


def run_subgraph(subgraph: Subgraph, inputs: Sequence[torch.Tensor], seed: int, run: int) -> list[Any]:
    """The outputs for these inputs; None for one that is absent."""
    contents = subgraph.contents
    values: dict[Value, torch.Tensor] = {}
    symbols: dict[str, int] = {}

    def meet(node: Node, outs: Sequence[Any]) -> None:  # None for what a mask of the op leaves out
        for index, (spec, tensor) in enumerate(zip(node.outputs, outs, strict=False)):
            values[node.value(index)] = tensor
            for wanted, found in zip(spec.shape, () if tensor is None else tensor.shape, strict=False):
                if isinstance(wanted, Dim) and wanted.is_symbol:
                    symbols.setdefault(wanted.expr, found)

    for value, tensor in zip(subgraph.inputs, inputs, strict=True):
        meet(contents.by_id[value.node], [tensor])
    for guard in contents.guards:
        sizes_hold(guard, symbols)
    for node in contents.nodes:
        if node.op == "tfnb.constant":
            meet(node, [node.attrs["value"]])
        elif node.op != "tfnb.placeholder":
            given = [values[v] for v in node.inputs]
            meet(node, evaluate(node, given, lambda dim: dim.evaluate(symbols), seed, run))
    return [None if value is None else values[value] for value in subgraph.outputs]


def absent(spec: Spec, sizes: Sequence[int]) -> torch.Tensor:
    """A stand-in for an unused output: the right shape, and hardly any memory."""
    return torch.zeros((), dtype=spec.dtype, device=spec.device).expand(list(sizes))


def sizes_hold(guard: Guard, symbols: Mapping[str, int]) -> None:
    """Raise ShapeError if a relation between the sizes inside a loop or branch does not hold."""
    if not Dim(guard.expr).evaluate(symbols):
        source = guard.source
        raise ShapeError(
            f"the recording relies on {guard.expr}, and in this run {dict(symbols)}"
            + (f"\n  at {source}" if source else ""),
            **where(source),
        )


def held(node: Node, value: torch.Tensor) -> None:
    """Raise BranchChanged if a value that Python took a branch on while recording is another one now."""
    outcome, source = node.attrs["outcome"], node.source
    if bool(value) == outcome:
        return
    raises, at = node.attrs.get("raises"), f"{source or node.name}{node.attrs.get('asked', '')}"
    if lacks := node.attrs.get("lacks"):
        raise BranchChanged(f"{lacks}\n  at {at}", **node.where)
    if state := node.attrs.get("state"):
        raise BranchChanged(
            f"the branch at {at} was recorded with {outcome}, and with what {state} holds now it is "
            f"{not outcome}: record again, and if it is taken at the first call alone, call the model once before",
            **node.where,
        )
    if raises is None:
        do = (
            node.attrs.get("because")
            or "use torch.where, stage the branch (@tfnb.autograph), or record again with such a sample"
        )
        raise BranchChanged(
            f"the branch at {at} was recorded with {outcome}, and in this run it is {not outcome}: {do}", **node.where
        )
    is_assert = raises.startswith("AssertionError") or (
        source is not None and source.text.lstrip().startswith("assert")
    )
    if is_assert:
        raise CheckFailed(f"{raises or 'AssertionError'}\n  at {at}", **node.where)
    raise BranchChanged(
        f"{raises or 'a check fails'}: with what this run is fed Python would raise here, and with the samples it did "
        f"not\n  at {at}", **node.where,
    )  # fmt: skip
