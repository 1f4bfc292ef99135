"""``x[i]`` and ``x[i:j]`` with a recorded number, truth value or size as index, kept dynamic; torch would fix the
index.

Each run picks. What is picked is a view as in torch: writes to it reach ``x``, and writes to ``x`` reach it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeGuard

import sympy
import torch

from tfnb.graph import Value
from tfnb.graph.node import Ref
from tfnb.kernels import spans  # noqa: F401  defines torch.ops.tfnb
from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Tensor, WholeNumbers
from tfnb.recording.values.views import View

_MASKS = (torch.bool, torch.uint8)
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
_END = torch.iinfo(torch.int64).max  # of a slice that names none

ops = torch.ops.tfnb


@override(Stage.FUNCTION, torch.Tensor.__getitem__)
def _get_item(rec: Recording, x: torch.Tensor, index: object) -> Any:
    """``x[index]``."""
    return torch.Tensor.__getitem__(*_looked(rec, x, index))


@override(Stage.FUNCTION, torch.Tensor.__setitem__)
def _set_item(rec: Recording, x: torch.Tensor, index: object, value: torch.Tensor | torch.types.Number) -> None:
    """``x[index] = value``."""
    torch.Tensor.__setitem__(*_looked(rec, x, index), value)


def _looked(rec: Recording, x: torch.Tensor, index: Any) -> tuple[Any, Any]:
    """``x`` and ``index`` with each recorded number or size as row 0 of the one row that it picks, each slice by
    recorded numbers as all of the rows that it picks, and each truth value as a mask of one element over an axis of its
    own."""
    items = [
        item.tensor().to(x.device) if isinstance(item, WholeNumbers) else _recorded(rec, item)
        for item in (index if isinstance(index, tuple) else [index])
    ]
    index = tuple(items) if isinstance(index, tuple) else items[0]
    if not any(_is_single(i) or _is_slice(i) for i in items) or _is_functorch(x):
        return x, index
    taken = [_axes(item) for item in items]
    rest = x.dim() - sum(taken)
    for place, item in enumerate(items):
        axis = sum(taken[:place]) + (rest if any(other is ... for other in items[:place]) else 0)
        if _is_slice(item):
            x, items[place] = _rows(rec, x, axis, _span(rec, item, x.shape[axis])), slice(None)
        elif _is_single(item):
            if _is_truth(item):
                x, items[place], taken[place] = x.unsqueeze(axis), item.reshape(1), 1
            else:
                x, items[place] = _rows(rec, x, axis, _row(rec, item, x.shape[axis])), 0
    return x, tuple(items)


def _recorded(rec: Recording, item: Any) -> Any:
    """The index; of a whole number in a tensor, such as a module's buffer, and of one at an end of a slice, the
    recorded number: torch would take the number that the tensor holds now.
    """
    if isinstance(item, slice):
        return slice(*(_recorded(rec, end) for end in (item.start, item.stop, item.step)))
    is_number = isinstance(item, torch.Tensor) and not isinstance(item, Tensor) and item.dim() == 0
    return rec.handle(item) if is_number and item.dtype in _WHOLE and not _is_functorch(item) else item


def _is_functorch(x: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def _is_whole(item: object) -> bool:
    return isinstance(item, Tensor) and item.dim() == 0 and item.dtype in _WHOLE


def _is_single(item: object) -> bool:
    return isinstance(item, torch.SymInt) or _is_whole(item) or _is_truth(item)


def _is_truth(item: object) -> bool:
    return isinstance(item, Tensor) and item.dim() == 0 and item.dtype in _MASKS


def _is_slice(item: object) -> TypeGuard[slice]:
    """Whether an index is a slice with recorded ends. Torch handles slices with a recorded step."""
    return isinstance(item, slice) and (_is_whole(item.start) or _is_whole(item.stop)) and not _is_whole(item.step)


def _axes(item: Any) -> int:
    """How many axes an item of an index takes."""
    if item is None or item is ... or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype in _MASKS
    return item.dim() if is_mask else 1


def _number(item: object) -> Any:
    """A number or size as a tensor."""
    return item if isinstance(item, torch.Tensor) else torch.ops.aten.scalar_tensor(item, dtype=torch.int64)


def _row(rec: Recording, item: object, size: int | torch.SymInt) -> Any:
    """The place of a number in an axis of so many rows: a number below 0 counts from the end."""
    number = _number(item)
    found = number if _said(rec, item).is_nonnegative else torch.where(number < 0, number + size, number)
    return found.reshape(1).long()


def _rows(rec: Recording, x: torch.Tensor, axis: int, rows: torch.Tensor) -> Tensor:
    """These rows, as a view."""
    rows = rows.to(x.device)
    view = View(torch.ops.aten.index_select.default, {"dim": axis, "index": rows}, 0, torch.is_grad_enabled())
    handle = rec.handle(x)
    entry = rec._entry(view.apply(handle))
    return rec._wrap(entry, handle._family, (*handle._chain, view))


# -- slices and ranges ----------------------------------------------------------------------------------------------


def _span(rec: Recording, item: slice, size: int | torch.SymInt) -> Any:
    """The rows that a slice picks of so many. ``[t:t + 1]`` is one row; the end of ``x`` may cut longer ones short."""
    start = 0 if item.start is None else item.start
    stop = _END if item.stop is None else item.stop
    if item.step in (None, 1) and sympy.expand(_said(rec, stop) - _said(rec, start)) == 1:
        if _said(rec, start).is_nonnegative:
            return _row(rec, start, size)
        return ops.index_single(_number(start), size)
    return ops.index_span(_number(start), _number(stop), 1 if item.step is None else item.step, size)


def _said(rec: Recording, number: object) -> sympy.Expr:
    """A number in terms of recorded ones that are no sum or product."""
    if isinstance(number, Tensor):
        return _of_value(rec, rec._entry(number).value)
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


_DEEP = 8  # sums of sums that are looked through
_ARITHMETIC: dict[str, Callable[..., sympy.Expr]] = {
    "aten.add.Tensor": operator.add, "aten.sub.Tensor": operator.sub, "aten.mul.Tensor": operator.mul,
}  # fmt: skip


def _of_value(rec: Recording, value: Value, deep: int = _DEEP) -> sympy.Expr:
    node = rec.tape.by_id.get(value.node)
    how = None if node is None else _ARITHMETIC.get(node.op)
    terms = {} if node is None else node.attrs
    known = terms.keys() == {"self", "other"} and all(isinstance(t, Ref) or type(t) is int for t in terms.values())
    if node is None or how is None or not known or not deep:
        natural = True if value in rec.tape.naturals else None
        return sympy.Symbol(f"v{value.node}_{value.index}", integer=True, nonnegative=natural)
    return how(*(_of_value(rec, node.inputs[t.input], deep - 1) if isinstance(t, Ref) else t for t in terms.values()))


@override(Stage.FUNCTION, torch.select, torch.Tensor.select)
def _select(rec: Recording, x: torch.Tensor, dim: int, index: object) -> Any:
    """torch.select of a recorded number."""
    index = _recorded(rec, index)
    if not _is_whole(index) or _is_functorch(x):
        return NotImplemented
    return torch.select(_rows(rec, x, dim % x.dim(), _row(rec, index, x.shape[dim])), dim, 0)


@override(Stage.FUNCTION, torch.narrow, torch.Tensor.narrow)
def _narrow(rec: Recording, x: torch.Tensor, dim: int, start: Any, length: Any) -> Any:
    """torch.narrow from a recorded number on."""
    start = _recorded(rec, start)
    if not _is_whole(start) or _is_functorch(x):
        return NotImplemented
    rows = _row(rec, start, x.shape[dim]) + torch.arange(length, device=start.device)
    return _rows(rec, x, dim % x.dim(), rows)


@override(Stage.FUNCTION, torch.arange)
def _arange(rec: Recording, *args: object, dtype: torch.dtype | None = None, **kwargs: object) -> Any:
    """torch.arange of recorded numbers."""
    words = ("start", "end", "step")
    named = {word: kwargs.pop(word) for word in words if word in kwargs}
    given = dict(zip(words if len(args) > 1 else ("end",), args, strict=False)) | named
    given = {word: _recorded(rec, number) for word, number in given.items()}
    whole = all(
        type(number) is int or isinstance(number, torch.SymInt) or _is_whole(number) for number in given.values()
    )
    if kwargs.keys() - {"device"} or not (whole and any(map(_is_whole, given.values()))):
        return NotImplemented
    numbers = (_number(given.get(word, usual)) for word, usual in zip(words, (0, None, 1), strict=True))
    return ops.index_range(*numbers).to(kwargs.get("device"), dtype or torch.int64)


@override(Stage.FUNCTION, torch.roll, torch.Tensor.roll)
def _roll(rec: Recording, x: torch.Tensor, shifts: Any, dims: Any = ()) -> Any:
    """torch.roll by recorded numbers."""
    steps, axes = (list(item) if isinstance(item, (tuple, list)) else [item] for item in (shifts, dims))
    steps = [_recorded(rec, step) for step in steps]
    if not any(map(_is_whole, steps)) or _is_functorch(x) or len(steps) != max(1, len(axes)):
        return NotImplemented  # torch says what is wrong
    found = x if axes else x.flatten()
    for step, axis in zip(steps, axes or [0], strict=True):
        size = found.shape[axis]
        places = (torch.arange(size, device=x.device) - step) % size
        found = torch.index_select(found, axis, places)
    return found.reshape(x.shape)
