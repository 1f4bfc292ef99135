"""Memory of a step beside its values: Variables on its device, and the scratch that kernels of convolutions allocate.

No shape tells the scratch of a convolution (in float64 on the CPU nine times its output): each distinct one is run once
on zeros of its shapes, under torch's memory profiler, before the first step that has it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch

from tfnb.graph import Contents, Graph, Node, Ref, Spec, Variable
from tfnb.graph.node import map_leaves
from tfnb.graph.ops import overload
from tfnb.graph.spec import Dim
from tfnb.memory.profiler import torch_profiler
from tfnb.passes import LAID_OUT
from tfnb.passes.liveness import nominal

MEASURED = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
_LOCK = threading.Lock()  # torch has one profiler for each process
_RUNNING = (
    "a memory budget counts the scratch of convolutions, which torch.profiler measures before the first run of a step, "
    "and it is running already: run the step once before its block"
)


def state_bytes(graph: Graph) -> int:
    """Bytes of the Variables of a step on its device: the accelerator, if there is one, else the CPU."""
    found = {spec.device.partition(":")[0] for node in graph.nodes for spec in node.outputs}
    is_accelerated = bool(found - {"cpu", "meta"})
    return sum(
        variable_bytes(variable) for variable in graph.variables
        if (variable.spec.device.partition(":")[0] != "cpu") == is_accelerated
    )  # fmt: skip


def variable_bytes(variable: Variable) -> int:
    """Bytes of the value of a Variable."""
    return prod(variable.shape) * variable.dtype.itemsize


def scratch(node: Node, contents: Contents, sizes: Mapping[str, int]) -> int:
    """Bytes that the kernel of a node allocates beside its results; 0 for kernels that are not measured.

    Raises FailedPrecondition inside of torch's profiler, which measures.
    """
    if node.op not in MEASURED:
        return 0
    symbols = {symbol: sizes.get(symbol, 1) for symbol in (s for out in node.outputs for s in out.symbols)}

    def plain(leaf: object) -> Any:
        if isinstance(leaf, Ref):
            value = node.inputs[leaf.input]
            return _KernelOperand(contents.by_id[value.node].outputs[value.index], sizes, LAID_OUT in node.tags)
        return leaf.evaluate(symbols | dict(sizes)) if isinstance(leaf, Dim) else leaf

    given = map_leaves(plain, node.attrs)
    return _measured(node.op, _Arguments(given), torch.get_num_threads())


class _KernelOperand:
    """A tensor argument of a measured kernel: its shape, dtype, device and layout."""

    def __init__(self, spec: Spec, sizes: Mapping[str, int], is_laid_out: bool) -> None:
        self.shape, self.dtype, self.device = nominal(spec, sizes), spec.dtype, spec.device
        self.is_laid_out = is_laid_out and len(self.shape) == 4

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape}@{self.device}{self.is_laid_out}"

    def zeros(self) -> torch.Tensor:
        made = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return made.to(memory_format=torch.channels_last) if self.is_laid_out else made


class _Arguments:
    """The arguments of a kernel, equal if their text is."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given, self._text = given, repr(sorted(given.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Arguments) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(maxsize=4096)
def _measured(op: str, arguments: _Arguments, threads: int) -> int:
    """The most bytes that the kernel holds on its device, less the bytes of its results."""
    schema = overload(op)._schema
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given |= map_leaves(lambda leaf: leaf.zeros() if isinstance(leaf, _KernelOperand) else leaf, arguments.given)
    device = next(leaf.device for leaf in arguments.given.values() if isinstance(leaf, _KernelOperand)).partition(":")[
        0
    ]
    if device == "meta":
        return 0
    most, made = allocated(partial(overload(op), **given), device)
    return max(0, most - sum(x.untyped_storage().nbytes() for x in made))


def allocated(call: Any, device: str) -> tuple[int, list[torch.Tensor]]:
    """The most bytes that a call allocates on a device and holds at once, and the returned tensors."""
    with _LOCK, torch.no_grad(), torch_profiler(_RUNNING, profile_memory=True) as profile:
        results = call()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type().name.lower() == device:
            held += event.nbytes()
            most = max(most, held)
    return most, [x for x in (results if isinstance(results, tuple | list) else (results,)) if x is not None]
