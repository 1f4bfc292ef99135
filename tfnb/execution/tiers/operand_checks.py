"""Operand checks of compiled code: operands that a kernel must not take are replaced, and a flag says so.

Inductor checks an index with an exception, or not at all, and divides integers as the processor does. An exception in
a loop of several threads ends the process, and so does an integer divided by zero. So compiled code on the CPU gets
indices that are clamped and divisors that are not zero, and one more output: whether any of them was changed. Where
it is set the other outputs are not used; generated code computes the step again and raises the error with its line.
Other devices report a bad operand when they are next waited for, and a flag would make each step wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten
Decompositions = dict[Any, Callable[..., Any]]
Given = Mapping[str, Any]


class OperandRefused(Exception):
    """Raised when compiled code met an invalid operand; generated code names the operand."""


class OperandChecks:
    """Operand checks of one function while traced: decompositions that note changed operands in ``changed``."""

    def __init__(self) -> None:
        self.changed: list[Tensor] = []
        self._inside = False

    def over(self, table: Mapping[Any, Callable[..., Any]]) -> Decompositions:
        """The decompositions of ``table``, and of each checked op one that checks first."""
        return {**table, **{op: self._checked(op, operands, table.get(op)) for op, operands in OPERANDS.items()}}

    def flag(self) -> Tensor | None:
        """Whether any operand was changed; None where none is checked."""
        return reduce(torch.logical_or, self.changed) if self.changed else None

    def note(self, changed: Tensor) -> None:
        """Whether an operand was changed elsewhere."""
        self.changed.append(changed)

    @contextmanager
    def inside(self) -> Iterator[Callable[[], Tensor | None]]:
        """Checks of a part that is traced as a separate function; yields its `flag`, to be returned by the part."""
        outside, self.changed = self.changed, []
        try:
            yield self.flag
        finally:
            self.changed = outside

    def _checked(
        self, op: OpOverload, operands: Callable[[Given], Given], theirs: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        names = [argument.name for argument in op._schema.arguments]

        def decomposed(*args: object, **kwargs: object) -> Any:
            if self._inside:  # operands were checked already
                return NotImplemented if theirs is None else theirs(*args, **kwargs)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            found = operands(given)
            for name, new in found.items():
                self._note(given[name], new)
            given |= found
            with self._in():
                return (theirs or op)(*[given[name] for name in names[: len(args)]], **{k: given[k] for k in kwargs})

        return decomposed

    def _note(self, old: Any, new: Any) -> None:
        pairs = zip(old, new, strict=True) if isinstance(new, list) else [(old, new)]
        self.changed += [(a != b).any() for a, b in pairs if a is not b]

    @contextmanager
    def _in(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


def _clamped(index: Tensor, size: int, *, wraps: bool = False) -> Tensor:
    """An index within an axis; ``wraps``: negative numbers count from the end."""
    return index.clamp(-size if wraps else 0, size - 1) if index.numel() else index


def _on_axis(name: str = "index", *, wraps: bool = False) -> Callable[[Given], Given]:
    def operands(given: Given) -> Given:
        x, dim = given["self"], given["dim"]
        return {name: _clamped(given[name], x.shape[dim] if x.dim() else 1, wraps=wraps)}

    return operands


def _each(given: Given) -> Given:
    """One index for each axis; masks are none, and None takes the whole axis."""
    found = [
        _clamped(index, size, wraps=True) if index is not None and index.dtype in (torch.int64, torch.int32) else index
        for index, size in zip(given["indices"], given["self"].shape, strict=False)
    ]
    return {"indices": found}


def _rows(given: Given) -> Given:
    return {"indices": _clamped(given["indices"], given["weight"].shape[0])}


def _gradient_rows(given: Given) -> Given:
    return {"indices": _clamped(given["indices"], given["num_weights"])}


def _flat(given: Given) -> Given:
    return {"index": _clamped(given["index"], given["self"].numel(), wraps=True)}


def _unpooled(given: Given) -> Given:
    return {"indices": _clamped(given["indices"], prod(given["output_size"]))}


def _divisor(given: Given) -> Given:
    x, y = given["self"], given["other"]
    if not isinstance(y, Tensor) or not (_is_whole(x) and _is_whole(y)) or given.get("rounding_mode", 0) is None:
        return {}
    return {"other": torch.where(y == 0, 1, y).to(y.dtype)}


def _is_whole(x: object) -> bool:
    """Whether an operand is an integer, or a tensor of integers."""
    return isinstance(x, int) if not isinstance(x, Tensor) else not (x.is_floating_point() or x.is_complex())


_axis = _on_axis()
OPERANDS: dict[OpOverload, Callable[[Given], Given]] = {
    aten.embedding.default: _rows,
    aten.embedding_dense_backward.default: _gradient_rows,
    aten.gather.default: _axis,
    aten.index_select.default: _axis,
    aten.index_add.default: _axis,
    aten.index_copy.default: _axis,
    aten.index_reduce.default: _axis,
    aten.index_fill.int_Scalar: _on_axis(wraps=True),
    aten.index_fill.int_Tensor: _on_axis(wraps=True),
    aten.scatter.src: _axis,
    aten.scatter.value: _axis,
    aten.scatter.reduce: _axis,
    aten.scatter.value_reduce: _axis,
    aten.scatter_add.default: _axis,
    aten.scatter_reduce.two: _axis,
    aten.index.Tensor: _each,
    aten._unsafe_index.Tensor: _each,
    aten.index_put.default: _each,
    aten._unsafe_index_put.default: _each,
    aten.take.default: _flat,
    aten.put.default: _flat,
    aten.max_unpool2d.default: _unpooled,
    aten.max_unpool3d.default: _unpooled,
    aten.div.Tensor_mode: _divisor,
    aten.floor_divide.default: _divisor,
    aten.remainder.Tensor: _divisor,
    aten.remainder.Scalar_Tensor: _divisor,
    aten.fmod.Tensor: _divisor,
}
"""For each op that is checked a function from its arguments to those that it shall take in their place."""
