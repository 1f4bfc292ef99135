"""Costs of recomputing a value, or of offloading it and back, both in bytes moved by kernels.

Measured with `tests/benchmarks/bench_swap.py --choices` on two cores (EPYC, torch 2.13, one thread), where other
programs ran too: 17 to 35 MB that move beside the iterations, to a file that fits into the system's cache, hold these
up by 0.2 to 0.4 nanoseconds for each byte. What is computed again takes 0.05 (sums, products) to 0.25 (tanh, sigmoid)
nanoseconds for each byte that `cost` says. So a byte that moves is worth 1 to 6 of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from tfnb.graph import Contents, Node, Ref, Spec
from tfnb.graph.node import map_leaves
from tfnb.graph.ops import COND, WHILE, WITH_GRADIENT, overload
from tfnb.graph.spec import Dim
from tfnb.memory.machine_rates import CPU, MachineRates
from tfnb.passes.liveness import NOMINAL, nominal

MOVED: Mapping[str, float] = {"cpu": 2 / CPU.link}
"""Of a device: how many bytes its kernels move in the time in which one byte goes to a spill file and comes back."""
MOVED_ELSEWHERE = 64.0
_FREE = frozenset({"tfnb.placeholder", "tfnb.constant", "tfnb.guard", WITH_GRADIENT})


class KernelWork(NamedTuple):
    """The work of one kernel: bytes of operands and results, and floating-point operations."""

    bytes: float
    flops: float


def moving(bytes: int, device: str) -> float:
    """The price of moving bytes out of a device and back."""
    return bytes * MOVED.get(device.partition(":")[0], MOVED_ELSEWHERE)


def computing(
    contents: Contents, sizes: Mapping[str, int], *, again: bool = True, nodes: Iterable[Node] | None = None,
    on: MachineRates = CPU,
) -> float:  # fmt: skip
    """The price of running the nodes: on a machine whose constants are of seconds, their seconds.

    again: once more, which is infinite if one does something else than compute; else for the first time. nodes: of the
    contents, by default all.
    """
    return sum(_started(node, contents, sizes, again, on) for node in (contents.nodes if nodes is None else nodes))


def _started(node: Node, contents: Contents, sizes: Mapping[str, int], again: bool, on: MachineRates) -> float:
    if node.op in _FREE:
        return 0.0
    if node.op == COND:
        return max(computing(node.attrs[side].contents, sizes, again=again, on=on) for side in ("then", "else"))
    if node.op == WHILE:
        parts = [part for part in (node.attrs["cond"], node.attrs["body"]) if part is not None]
        return NOMINAL * sum(computing(part.contents, sizes, again=again, on=on) for part in parts)
    if again:
        return on.start + cost(node, contents, sizes, on) if repeats(node) else inf
    return on.start + cost(node, contents, sizes, on) if is_kernel(node) else 0.0


def is_kernel(node: Node) -> bool:
    """Whether the node is a call of a torch op: no access to a Variable, and no bracket around nodes."""
    return node.op.count(".") > 1


def repeats(node: Node) -> bool:
    """Whether running the node a second time gives the same bits and does nothing else."""
    ours = node.op.startswith(("aten.", "tfnb.")) and is_kernel(node)
    return (ours or node.op == WITH_GRADIENT) and "update" not in node.tags


def cost(node: Node, contents: Contents, sizes: Mapping[str, int], on: MachineRates = CPU) -> float:
    """The price of the bytes that a node takes and makes, and of its arithmetic."""
    work = kernel_work(node, contents, sizes)
    return work.bytes / on.memory + work.flops / on.flops


def kernel_work(node: Node, contents: Contents, sizes: Mapping[str, int]) -> KernelWork:
    """The work of a node. Operations are counted for the ops that torch's flop counter knows, products above all."""

    def spec(ref: Ref) -> Spec:
        value = node.inputs[ref.input]
        return contents.by_id[value.node].outputs[value.index]

    def plain(leaf: object) -> Any:
        if isinstance(leaf, Dim):
            return leaf.evaluate({symbol: sizes.get(symbol, 1) for symbol in leaf.symbols})
        return _meta(spec(leaf), sizes) if isinstance(leaf, Ref) else leaf

    op = overload(node.op)
    specs = [*(spec(Ref(place)) for place in range(len(node.inputs))), *node.outputs]
    moved = sum(prod(nominal(s, sizes)) * s.dtype.itemsize for s in specs)
    count = flop_registry.get(op.overloadpacket)
    if count is None:
        return KernelWork(moved, 0)
    given = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given |= map_leaves(plain, node.attrs)
    args = [given.get(a.name) for a in op._schema.arguments if not a.kwarg_only]
    outs = tuple(_meta(output, sizes) for output in node.outputs)
    return KernelWork(moved, count(*args, out_val=outs[0] if len(outs) == 1 else outs))


def _meta(spec: Spec, sizes: Mapping[str, int]) -> torch.Tensor:
    return torch.empty(nominal(spec, sizes), dtype=spec.dtype, device="meta")
