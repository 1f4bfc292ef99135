"""``x[i]`` where ``i`` is one recorded number or truth value, or a size: torch would read it, and fix what it picks.

Each run picks. A row is a view as in torch: writes to it reach ``x``, and writes to ``x`` reach it.
"""

from __future__ import annotations

from typing import Any

import torch

from tfnb.graph import current
from tfnb.recording.tensor import Tensor
from tfnb.recording.views import View

_MASKS = (torch.bool, torch.uint8)
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)


def get_item(x: Any, index: Any) -> Any:
    """``x[index]``."""
    return torch.Tensor.__getitem__(*_looked(x, index))


def set_item(x: Any, index: Any, value: Any) -> None:
    """``x[index] = value``."""
    torch.Tensor.__setitem__(*_looked(x, index), value)


def _looked(x: Any, index: Any) -> tuple[Any, Any]:
    """``x`` and ``index`` with each recorded number or size as row 0 of the one row that it picks, and each truth value
    as a mask of one element over an axis of its own."""
    items = list(index) if isinstance(index, tuple) else [index]
    rec: Any = current.recording()
    if rec is None or not any(map(_is_single, items)) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x, index
    taken = [_axes(item) for item in items]
    rest = x.dim() - sum(taken)
    for place, item in enumerate(items):
        if not _is_single(item):
            continue
        axis = sum(taken[:place]) + (rest if any(other is ... for other in items[:place]) else 0)
        if isinstance(item, torch.SymInt):
            item = torch.ops.aten.scalar_tensor(item, dtype=torch.int64)
        if item.dtype in _MASKS:
            x, items[place], taken[place] = x.unsqueeze(axis), item.reshape(1), 1
        else:
            x, items[place] = _row(rec, x, axis, item), 0
    return x, tuple(items)


def _is_single(item: Any) -> bool:
    if isinstance(item, torch.SymInt):
        return True
    return isinstance(item, Tensor) and item.dim() == 0 and item.dtype in (*_MASKS, *_WHOLE)


def _axes(item: Any) -> int:
    """How many axes an item of an index takes."""
    if item is None or item is ... or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype in _MASKS
    return item.dim() if is_mask else 1


def _row(rec: Any, x: Any, axis: int, number: Tensor) -> Tensor:
    """The row as a view of length one."""
    row = torch.where(number < 0, number + x.shape[axis], number).reshape(1).long()
    view = View(torch.ops.aten.index_select.default, {"dim": axis, "index": row}, 0, torch.is_grad_enabled())
    handle = rec.handle(x)
    entry = rec._entry(view.apply(handle))
    return rec._wrap(entry, handle._family, (*handle._chain, view))
