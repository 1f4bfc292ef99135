"""What a recording changes of the tensors of earlier recordings, so that one that fails leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import fields
from typing import Any

from tfnb.recording.values.tensor import Base, Tensor
from tfnb.recording.values.views import renewed_chain

_HANDLE = ("_entry", "_family", "_chain", "_seen")
BASE = tuple(field.name for field in fields(Base))

Thing = Tensor | Base
State = tuple[Any, ...]  # the entry first


def state(thing: Thing) -> State:
    """What a handle or base looks at."""
    return tuple(getattr(thing, name) for name in (BASE if isinstance(thing, Base) else _HANDLE))


def differs(thing: Thing, held: State) -> bool:
    """Whether a handle or base looks at something else than it did."""
    return _identity(state(thing)) != _identity(held)


def _identity(held: State) -> tuple[Any, ...]:
    return held[0].value, *(part if isinstance(part, (int, str)) else id(part) for part in held[1:])


def light(held: State) -> State:
    """A state that keeps no sample alive."""
    return (held[0].light(), *held[1:])


def renewed(held: State, ids: Container[int], renew: Callable[[Any], Any]) -> State:
    """A state with its sizes renewed, if a node of ``ids`` computes its entry."""
    entry, *rest = held
    if entry.value.node not in ids:
        return held
    rest = [renewed_chain(part, renew) if isinstance(part, tuple) else part for part in rest]
    return (entry.light(renew(entry.fake)), *rest)


def restore(thing: Thing, held: State) -> None:
    """Make a handle or base look at what it did."""
    if isinstance(thing, Tensor):
        thing.look_as_before(*held)
        return
    for name, value in zip(BASE, held, strict=True):
        setattr(thing, name, value)


class Journal:
    """The state of handles and bases before their first change."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Thing, State]] = {}

    def note(self, changing: Thing) -> None:
        """Called before a change; only the first call for an object counts."""
        if id(changing) not in self._before:
            self._before[id(changing)] = changing, state(changing)

    def __iter__(self) -> Iterator[tuple[Thing, State]]:
        """Each thing noted, with its state before."""
        return iter(self._before.values())

    def undo(self) -> None:
        """Put everything back, bases before the handles that look at them."""
        for thing, before in sorted(self, key=lambda noted: isinstance(noted[0], Tensor)):
            restore(thing, before)
