"""Refuses changes of Python's objects in staged bodies: a list or dict of outside cannot follow a run's decision."""

from __future__ import annotations

import bisect
import collections
import heapq
import inspect
import operator
from collections.abc import Callable, Iterator
from types import FunctionType, MethodDescriptorType
from typing import Any

import torch

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.staging.lists import plain
from tfnb.control_flow.staging.statement import status
from tfnb.control_flow.staging.unset import MISSING, Undefined
from tfnb.control_flow.staging.user_frames import user_line
from tfnb.recording.values.recording import open_recording

CONTAINERS = (list, dict, set, bytearray, collections.deque)
CHANGES = frozenset({
    "append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update", "setdefault", "popitem", "add",
    "discard", "appendleft", "extendleft", "popleft", "rotate", "difference_update", "intersection_update",
    "symmetric_difference_update", "__setitem__", "__delitem__",
})  # fmt: skip


_OF_AUTOGRAD = frozenset({"grad", "requires_grad"})  # attributes of tensors that `tfnb.eager` follows


def made(container: object) -> Any:
    """A list, dict or set that was just written down."""
    if status.depth:
        status.made.append(container)
    return container


def changed(owner: object, name: str | None = None) -> Any:
    """Announce a change of an object's item, or of its attribute ``name``; returns the object."""
    if isinstance(owner, torch.Tensor):
        return owner
    if name is None:
        plain(owner)
        if status.depth:
            refuse_change(owner, "an item is set")
    elif status.depth and not is_followed(owner, name):
        _refuse_property(owner, name)
        status.attributes.append((owner, name, getattr(owner, name, MISSING)))
    return owner


def is_followed(owner: object, name: str) -> bool:
    """Whether the recording itself follows what an attribute is set to: of a tensor, or a module's buffer."""
    if name in _OF_AUTOGRAD and isinstance(owner, torch.Tensor):
        return True
    recording = open_recording()
    return recording is not None and bool(recording.buffers.follows(owner, name))


def _refuse_property(owner: object, name: str) -> None:
    if isinstance(inspect.getattr_static(type(owner), name, None), property):
        raise CannotStage(f"the property {name} of a {type(owner).__name__} is set")


class attribute:
    """A carried attribute, set only if its value differs, so that no change is reported otherwise."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    @property
    def carried(self) -> Any:
        """The attribute's value; `MISSING` where nothing has to be carried. Raises AttributeError if it has none."""
        return MISSING if is_followed(self.owner, self.name) else getattr(self.owner, self.name)

    @property
    def value(self) -> Any:
        """The value of an attribute that is carried; `MISSING` where there is none."""
        return getattr(self.owner, self.name, MISSING)

    @value.setter
    def value(self, new: object) -> None:
        if is_followed(self.owner, self.name):
            return
        old = self.value
        if status.depth:  # the body around the statement that carries it
            status.attributes.append((self.owner, self.name, old))
        if isinstance(new, Undefined):
            if old is not MISSING:
                delattr(self.owner, self.name)
        elif new is not old:
            _refuse_property(self.owner, self.name)
            setattr(self.owner, self.name, new)


def is_own(container: object) -> bool:
    """Whether a container was created in the body being recorded, and so may change there."""
    return any(container is other for other in status.made)


_INSTEAD = {
    "list": ": for more than one append() in each iteration of a loop, use a tfnb.TensorArray",
    "dict": ": carry what changes in names",
}


def refuse_change(owner: object, how: str) -> None:
    """Raise CannotStage where a container of outside would be changed."""
    if not is_own(owner):
        kind = type(owner).__name__
        raise CannotStage(f"{how} in a {kind} that was made outside of it, at {user_line()}{_INSTEAD.get(kind, '')}")


# -- functions that change what they are given ----------------------------------------------------------------------


def changing(function: object) -> Any:
    """The stand-in, within a staged body, for a function of Python's that changes an object; None for any other."""
    if isinstance(function, MethodDescriptorType):
        is_change = issubclass(function.__objclass__, CONTAINERS) and function.__name__ in CHANGES
        return _refusing(function, _container_changed) if is_change else None
    try:
        look = _CHANGING.get(function)
    except TypeError:  # not hashable
        return None
    return None if look is None else _refusing(function, look)


def _refusing(function: Any, look: Callable[..., None]) -> Callable[..., Any]:
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        look(owner, f"{function.__name__}()", *args)
        return function(owner, *args, **kwargs)

    return call


def _container_changed(owner: object, how: str, *rest: object) -> None:
    refuse_change(owner, how)


def _attribute_set(owner: object, how: str, name: str = "", *rest: object) -> None:
    changed(owner, name)


def _item_set(owner: object, how: str, *rest: object) -> None:
    if not isinstance(owner, torch.Tensor):
        refuse_change(owner, how)


def _advanced(items: object, how: str, *rest: object) -> None:
    if isinstance(items, Iterator):
        refuse_change(items, how)


def refuse_draw(called: str) -> None:
    """Raise CannotStage for a random draw in Python, which would repeat the same number in each iteration and run."""
    raise CannotStage(f"{called}() draws a number in Python, which is another one each time")


_CHANGING: dict[Any, Callable[..., None]] = {
    **dict.fromkeys((setattr, delattr, object.__setattr__, object.__delattr__), _attribute_set),
    **dict.fromkeys((operator.setitem, operator.delitem), _item_set),
    **dict.fromkeys(
        (heapq.heappush, heapq.heappop, heapq.heapify, heapq.heapreplace, heapq.heappushpop, bisect.insort,
         bisect.insort_left), _container_changed,
    ),
    next: _advanced,
}  # fmt: skip


def own_method(owner: object, name: str) -> FunctionType | None:
    """A method that a class of Python defines."""
    found = inspect.getattr_static(type(owner), name, None)
    return found if isinstance(found, FunctionType) else None
