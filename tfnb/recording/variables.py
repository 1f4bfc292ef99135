"""Parameters and buffers as Variables: one per object, found again by identity."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tfnb.errors import InvalidArgument
from tfnb.graph import Variable

_known: dict[int, tuple[weakref.ref[torch.Tensor], Variable]] = {}


def known(tensor: torch.Tensor) -> Variable | None:
    """The Variable of this very tensor object, if it has one."""
    entry = _known.get(id(tensor))
    return entry[1] if entry is not None and entry[0]() is tensor else None


def variable(source: Any, *, name: str | None = None, trainable: bool | None = None) -> Variable:
    """The Variable of a Parameter or buffer (or of itself).

    One Variable per object, so tied weights are one. It shares the module's storage.

    >>> layer = torch.nn.Linear(2, 3)
    >>> v = variable(layer.weight)
    >>> v is variable(layer.weight), v.storage.data_ptr() == layer.weight.data_ptr()
    (True, True)
    """
    if isinstance(source, Variable):
        return source
    if not isinstance(source, torch.Tensor):
        raise InvalidArgument(f"a Parameter, buffer or Variable was expected, got {type(source).__name__}")
    found = known(source)
    if found is None:
        found = Variable.of(
            source, name=name or "Variable", trainable=source.requires_grad if trainable is None else trainable
        )
        key = id(source)
        _known[key] = (weakref.ref(source, lambda _: _known.pop(key, None)), found)
    elif name and found.name == "Variable":
        found.name = name  # first met by itself, now met inside its module
    return found
