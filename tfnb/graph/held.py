"""The tensor object behind a Variable: a Parameter or buffer, and the modules that own the object.

A module may come to hold another object in its place (`load_state_dict(assign=True)`, `layer.weight = ...`): the
Variable goes with the module. Nothing here keeps a module or a tensor object alive.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tfnb.errors import FailedPrecondition
from tfnb.graph.current import is_recorded, recording

_STRIDED = torch.strided
_TABLES = "_parameters", "_buffers"


class TensorWatch(NamedTuple):
    """Condition under which a Variable's tensor is unchanged, in a form that compiled code can check.

    object: lives, and stands in each of ``places``: module, name of its table, name there. find: gives the same tensor
    again. All of it holds as long as `CHANGES` is what it was.
    """

    object: weakref.ref[torch.Tensor] | None = None
    places: tuple[tuple[weakref.ref[torch.nn.Module], str, str], ...] = ()
    find: Callable[[], torch.Tensor] | None = None

    def is_as(self, other: TensorWatch) -> bool:
        """Whether another one looks at the same."""
        return self.object is other.object and self.places == other.places and self.find is other.find


CHANGES = ctypes.c_int64()
"""How often a place was found where a module holds the tensor of a Variable."""


class TensorHolder:
    """Where the tensor of one Variable is found."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.places: tuple[tuple[weakref.ref[torch.nn.Module], str], ...] = ()
        self._only: tuple[weakref.ref[torch.nn.Module], str] | None = None  # the place, if there is one
        self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        self._object = weakref.ref(tensor)
        self._spare = tensor.detach()  # the values, should the object die
        self._seen: torch.Tensor | None = None  # the values, as they were last looked at
        self._wanted = tensor.requires_grad and tensor.is_leaf

    def by(self, module: torch.nn.Module, attribute: str) -> None:
        """The object is this attribute of this module."""
        if all(place() is not module or name != attribute for place, name in self.places):
            self.places = (*self.places, (weakref.ref(module), attribute))
            CHANGES.value += 1
            self._only = self.places[0] if len(self.places) == 1 else None

    def tensor(self) -> torch.Tensor | None:
        """The current tensor object; None if the object died. Raises FailedPrecondition where sharing modules
        hold two.
        """
        now: torch.Tensor | None = None
        for place, name in self.places:
            module = place()
            found = None if module is None else _held(module, name)
            if found is None or found is now or is_recorded(found):  # not there any more, or while a block lasts:
                continue  # the object itself goes on
            if now is not None:
                raise FailedPrecondition(
                    f"it was shared by several modules ({', '.join(n for _, n in self.places)}), which now hold "
                    "different tensors: tie them again, or record again"
                )
            now = found
        before = self._object()
        if now is None or now is before:
            return before
        self._hold(now)
        return now

    def wants_gradient(self) -> bool:
        """``requires_grad`` of the tensor, which users may set at any time; the last known value once the tensor died.

        What was computed, and a module holds in place of a buffer, is no leaf and is not trained.
        """
        tensor = self.tensor()
        if tensor is not None:
            self._wanted = tensor.requires_grad and tensor.is_leaf
        return self._wanted

    def is_buffer(self) -> bool:
        """Whether modules hold the object, and every module holds the object as a buffer."""
        modules = [(place(), name) for place, name in self.places]
        tables = [(module._parameters, module._buffers, name) for module, name in modules if module is not None]
        return bool(tables) and all(name in buffers and name not in own for own, buffers, name in tables)

    def is_of_batch_norm(self) -> bool:
        """Whether modules hold the object, and all of them as running statistics of batch norm."""
        modules = [module for place, _ in self.places if (module := place()) is not None]
        return self.is_buffer() and all(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in modules)

    def values(self) -> torch.Tensor:
        """The storage, not a copy; outside of recordings the same object until the tensor moves in memory."""
        seen, only = self._seen, self._only
        if seen is not None and only is not None:  # on the path of every step: as below, in few calls
            module, name, tensor = only[0](), only[1], self._object()
            table: Mapping[str, Any] = {} if module is None else module._parameters
            if tensor is not None and name in table and table[name] is tensor and _lies_as(tensor, seen):
                return seen
        tensor = self.tensor()
        if tensor is None:
            return self._spare
        seen = self._seen
        if seen is not None and _lies_as(tensor, seen):
            return seen
        found = tensor.detach()
        if recording() is None:  # there it is a recorded tensor
            self._seen = self._spare = found
        return found

    def watched(self) -> TensorWatch | None:
        """The condition under which `values` stays the same; None if no such check exists.

        They are as long as the object lives, lies in memory where it lies, and its places hold it.
        """
        tensor = self.tensor()
        if tensor is None:
            return None if any(place() is not None for place, _ in self.places) else TensorWatch()
        found = []
        for place, name in self.places:
            module = place()
            if module is None:
                continue
            table = next((t for t in _TABLES if vars(module).get(t, {}).get(name) is tensor), None)
            if table is None or type(module).__getattribute__ is not object.__getattribute__:
                return None
            found.append((place, table, name))
        return TensorWatch(self._object, tuple(found))


def overlap(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have an element of memory in common.

    >>> both = torch.zeros(2, 4)
    >>> overlap(both[:, ::2], both[:, 1::2]), overlap(both[0], both.t()), overlap(both[0], both[1])
    (False, True, False)
    """
    if tensor.layout is not _STRIDED or other.layout is not _STRIDED or not tensor.numel() or not other.numel():
        return False
    storage = tensor.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr() or not storage.data_ptr():
        return False
    (start, stop), (begin, end) = _extent(tensor), _extent(other)
    if stop <= begin or end <= start or tensor.dtype is not other.dtype:
        return max(start, begin) < min(stop, end)
    first = min(tensor.storage_offset(), other.storage_offset())
    taken = torch.zeros((max(stop, end) - min(start, begin)) // tensor.element_size(), dtype=torch.bool)
    taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its memory that a tensor lies in, gaps included."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (int(last) + 1) * tensor.element_size()


def _lies_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, seen in the same way."""
    return tensor.layout is _STRIDED and tensor.dtype is other.dtype and tensor.is_set_to(other)


def _held(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """A parameter or buffer of a module, also of a scripted one, whose tables are no dicts."""
    for table in (module._parameters, module._buffers):
        if name in table:
            return table[name]
    return None
