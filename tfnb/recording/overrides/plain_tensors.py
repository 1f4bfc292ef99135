"""Methods of plain tensors that reach their memory: ``.data = ...``, ``numpy``, ``deepcopy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import Unsupported
from tfnb.graph.spec import flows
from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Tensor
from tfnb.recording.writes.in_place_calls import take_data

_set: Callable[..., None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@override(Stage.FUNCTION, torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(rec: Recording, tensor: torch.Tensor, new: object) -> None:
    """``x.data = new``: replace the memory, unseen by gradients. Modules made inside the block are converted
    for real.
    """
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

    def to_numpy(rec: Recording, tensor: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if isinstance(tensor, Tensor):
            return NotImplemented
        if not flows(tensor.dtype) and (variable := rec.variable_of(tensor)) is not None:
            rec.tape.asked.setdefault(variable, rec.where())
        with _disable_current_modes():
            return original(rec.outside.written(tensor), *args, **kwargs)

    return to_numpy


@override(Stage.FUNCTION, torch.Tensor.__deepcopy__)
def _deepcopy(rec: Recording, tensor: Any, memo: Any) -> Any:
    """A deep copy of an outside tensor: an independent tensor with the tensor's value in this recording."""
    if isinstance(tensor, Tensor | torch.nn.Parameter):
        return NotImplemented
    with _disable_current_modes():
        copy = torch.Tensor.__deepcopy__(tensor, memo)
        written = rec.outside.written(tensor, "deepcopy()")
        if written is not tensor:
            copy.copy_(written)
    rec.born[copy] = True
    return copy


override(Stage.FUNCTION, torch.Tensor.numpy)(_array(torch.Tensor.numpy))
override(Stage.FUNCTION, torch.Tensor.tolist)(_array(torch.Tensor.tolist))
override(Stage.FUNCTION, torch.Tensor.__array__)(_array(torch.Tensor.__array__))
