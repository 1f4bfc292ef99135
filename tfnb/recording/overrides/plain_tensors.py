"""Methods of plain tensors that reach their memory: ``.data = ...``, ``numpy``, ``deepcopy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import Unsupported
from tfnb.recording.values.recording import inner_recording
from tfnb.recording.values.tensor import Tensor
from tfnb.recording.writes.in_place_calls import take_data

_set: Callable[..., None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _set_data(tensor: Any, new: Any) -> None:
    """``x.data = new``: other memory, which gradients do not see. Modules made here are converted for real."""
    rec = inner_recording()
    is_initial = is_lazy(tensor) or rec.is_unused(tensor)
    if not isinstance(new, torch.Tensor) or (is_initial and not isinstance(new, Tensor)):
        _set(tensor, new)
        return
    if tuple(new.shape) != tuple(tensor.shape) or new.dtype != tensor.dtype:
        raise Unsupported(
            f"inside a recording .data = ... cannot make a tensor of {tensor.dtype}{list(tensor.shape)} one of "
            f"{new.dtype}{list(new.shape)}: convert a module or tensor outside{rec.tape.at()}"
        )
    if new is not tensor:
        with rec.on():
            take_data(rec, tensor, new)


def _array(original: Callable[..., Any]) -> Callable[..., Any]:
    """The memory of a plain tensor as an array; torch would ask for a detached handle, and get a recorded one."""

    def to_numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        rec = inner_recording()
        with _disable_current_modes():
            return original(rec.outside.written(tensor), *args, **kwargs)

    return to_numpy


def _deepcopy(tensor: Any, memo: Any) -> Any:
    """A copy of a tensor of outside is a tensor of its own, with the values that it has here."""
    rec = inner_recording()
    if isinstance(tensor, Tensor | torch.nn.Parameter):
        return torch.Tensor.__deepcopy__(tensor, memo)
    with _disable_current_modes():
        copy = torch.Tensor.__deepcopy__(tensor, memo)
        written = rec.outside.written(tensor, "deepcopy()")
        if written is not tensor:
            copy.copy_(written)
    rec.born[copy] = True
    return copy


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.numpy: _array(torch.Tensor.numpy),
    torch.Tensor.__array__: _array(torch.Tensor.__array__),
    torch.Tensor.__deepcopy__: _deepcopy,
}
