"""Stand-ins for Parameters in the groups and attributes of an optimizer whose step a user wrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tfnb.recording.marks.user_code import is_of_program

Stands = Mapping[torch.Tensor, torch.Tensor]  # by Parameter


def exchanged(value: Any, stands: Stands, deep: int = 4) -> Any:
    """A value with stand-ins in the places of Parameters and of their ids; without any, the value itself.

    >>> p, q = torch.nn.Parameter(torch.ones(1)), torch.zeros(1)
    >>> exchanged({"slow": [p], id(p): 0.1}, {p: q}) == {"slow": [q], id(q): 0.1}
    True
    """
    if isinstance(value, torch.Tensor):
        return stands.get(value, value)
    if type(value) is int:
        return next((id(mine) for place, mine in stands.items() if id(place) == value), value)
    if not deep:
        return value
    inner = partial(exchanged, stands=stands, deep=deep - 1)
    if isinstance(value, dict):
        new = {inner(key): inner(each) for key, each in value.items()}
        return _like(value, new) if any(map(_differ, (*new, *new.values()), (*value, *value.values()))) else value
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        items = [*map(inner, value)]
        return _like(value, items) if any(map(_differ, items, value)) else value
    if isinstance(value, SimpleNamespace) or (is_of_program(type(value)) and hasattr(value, "__dict__")):
        own = exchanged(vars(value), stands, deep)
        if own is not vars(value):
            value = copy(value)
            vars(value).update(own)
    return value


def take_attributes(mine: torch.Tensor, place: torch.Tensor) -> None:
    """Give a stand-in the attributes that the program has set on a Parameter, such as ``p.lr_scale``."""
    for name, value in vars(place).items():
        if not hasattr(mine, name):
            setattr(mine, name, value)


def _differ(a: object, b: object) -> bool:
    return a is not b


def _like(value: Any, items: Any) -> Any:
    """A container of the same kind with other items."""
    if hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, (tuple, frozenset)):
        return type(value)(items)
    new = copy(value)
    new.clear()
    if isinstance(value, (dict, set)):
        new.update(items)
    else:
        new.extend(items)
    return new
