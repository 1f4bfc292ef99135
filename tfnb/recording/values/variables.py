"""Parameters and buffers as Variables: one per object, found again by identity."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.errors import FailedPrecondition, InvalidArgument
from tfnb.graph import Variable

_known: dict[int, tuple[weakref.ref[torch.Tensor], Variable]] = {}
_places = WeakIdKeyDictionary()  # module -> {attribute: the Variable of what it holds there}


def known(tensor: torch.Tensor) -> Variable | None:
    """The Variable of this very tensor object, if the Variable has not moved on to another tensor."""
    entry = _known.get(id(tensor))
    if entry is None or entry[0]() is not tensor:
        return None
    return entry[1] if entry[1].held is None or entry[1].held.tensor() is tensor else None


def variable(source: object, *, name: str | None = None, trainable: bool | None = None) -> Variable:
    """The Variable of a Parameter or buffer (or of itself).

    One Variable per object, so tied weights are one. It shares the module's storage, and once it was met inside a
    module it follows what that module holds in its place. trainable: by default as ``requires_grad`` says. Raises
    InvalidArgument for what is no tensor.

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
        found = _replaced(source) or Variable.of(source, name=name or "Variable", trainable=trainable)
        _remember(source, found)
    elif name and found.name == "Variable":
        found.name = name  # first met by itself, now met inside its module
    return found


def held(tensor: torch.Tensor, places: Iterable[tuple[torch.nn.Module, str]], name: str | None) -> Variable:
    """The Variable of a tensor held by modules: the Variable of the tensor held there before, if the spec is
    the same.
    """
    places = list(places)
    found = known(tensor)
    for module, attribute in places if found is None else ():
        before = _places.get(module, {}).get(attribute)
        if before is not None and _is_of(before, tensor):
            _remember(tensor, found := before)
            break
    if found is None:
        _remember(tensor, found := Variable.of(tensor, name=name or "Variable"))
    if name and found.name == "Variable":
        found.name = name
    for module, attribute in places:
        if found.held is not None:
            found.held.by(module, attribute)
        _places.setdefault(module, {})[attribute] = found
    return found


def _remember(tensor: torch.Tensor, found: Variable) -> None:
    key = id(tensor)
    _known[key] = (weakref.ref(tensor, lambda _: _known.pop(key, None)), found)


def _replaced(tensor: torch.Tensor) -> Variable | None:
    """The Variable of a module that holds this object in the place of another."""
    variables = (v for table in list(_places.values()) for v in list(table.values()))
    return next((v for v in variables if _is_of(v, tensor)), None)


def _is_of(var: Variable, tensor: torch.Tensor) -> bool:
    if tuple(tensor.shape) != var.shape or tensor.dtype != var.dtype:
        return False
    try:
        return var.held is not None and var.held.tensor() is tensor
    except FailedPrecondition:  # what was shared is shared no more
        return False
