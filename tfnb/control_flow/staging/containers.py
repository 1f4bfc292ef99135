"""What staged bodies do to Python's objects: a list, dict or set of outside cannot follow what a run decides."""

from __future__ import annotations

import collections
from typing import Any

import torch

from tfnb.control_flow.staging.statement import CannotStage, status
from tfnb.control_flow.staging.unset import MISSING

CONTAINERS = (list, dict, set, bytearray, collections.deque)
CHANGES = frozenset({
    "append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update", "setdefault", "popitem", "add",
    "discard", "appendleft", "extendleft", "popleft", "rotate", "difference_update", "intersection_update",
    "symmetric_difference_update", "__setitem__", "__delitem__",
})  # fmt: skip


def made(container: Any) -> Any:
    """A list, dict or set that was just written down."""
    if status.depth:
        status.made.append(container)
    return container


def changed(owner: Any, name: str | None = None) -> Any:
    """An object of which an item, or the attribute ``name``, is about to be set or deleted."""
    if not status.depth or isinstance(owner, torch.Tensor):
        return owner
    if name is not None:
        status.attributes.append((owner, name, getattr(owner, name, MISSING)))
    elif isinstance(owner, CONTAINERS):
        refuse_change(owner, "an item is set")
    return owner


def is_own(container: Any) -> bool:
    """Whether it was made in the body that is being recorded, and may be changed there."""
    return any(container is other for other in status.made)


def refuse_change(owner: Any, how: str) -> None:
    """Raise CannotStage where a container of outside would be changed."""
    if not is_own(owner):
        raise CannotStage(f"{how} in a {type(owner).__name__} that was made outside of it")
