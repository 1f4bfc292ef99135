"""Lists that a loop of the graph appends to: behind them stand tensors with a row for each turn.

The list stays the object that it is. While the loop's body is recorded it holds a `Growing`, which nobody may look at;
after the loop it holds an `Appended`, of which `elements` says what converted code may do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tfnb.control_flow.staging.memory import Home, Memory, home_of
from tfnb.control_flow.staging.statement import (
    CannotStage,
    Slot,
    as_number,
    is_number,
    is_value,
    kind,
    status,
    tensor_of,
)
from tfnb.control_flow.staging.unset import Undefined, UndefinedReturnValue
from tfnb.control_flow.structure import spec_of
from tfnb.errors import Unsupported
from tfnb.recording import Recorder
from tfnb.recording.values.tensor import Base
from tfnb.recording.writes.aliases import linked

_ROOMS = 8  # how often a turn may append to a list where branches do


class Growing:
    """What a list holds while the body of a loop that appends to it is recorded."""

    def __getattr__(self, name: str) -> Any:
        raise CannotStage("a list that it appends to is read inside of it")

    def __iter__(self) -> Iterator[Any]:
        raise CannotStage("a list that it appends to is read inside of it")


@dataclass(eq=False)
class Appended:
    """The elements that a loop appended, as rows: ``leaves`` of the nested structure that one element is."""

    leaves: list[torch.Tensor]
    form: TreeSpec
    numbers: list[bool]
    place: str

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(
            f"a list that the loop of {self.place} appends to has as many elements as a run has turns: code that is "
            "not staged cannot take it; torch.stack, torch.cat, len, for, [i] and [a:b] of staged code can"
        )

    @property
    def count(self) -> Any:
        """How many there are."""
        return self.leaves[0].shape[0]

    def one(self, rows: Sequence[Any]) -> Any:
        """An element, of the rows of its leaves."""
        pairs = zip(rows, self.numbers, strict=True)
        return tree_unflatten([as_number(row) if number else row for row, number in pairs], self.form)

    def at(self, index: Any) -> Any:
        """The element with this number."""
        return self.one([rows[index] for rows in self.leaves])


@dataclass
class Growth:
    """What the body of one loop appends to lists of outside; it stands in a body that made these containers, if any."""

    around: list[Any] | None
    depth: int = 0
    level: int = 0  # where `status.bodies` has the body
    lists: list[list[Any]] = field(default_factory=list)
    values: list[list[Any]] = field(default_factory=list)  # of each list: what one turn appends
    known: int = 0  # lists that are marked already
    chosen: dict[int, int] = field(default_factory=dict)  # lists to which branches append: how often a turn may do so
    rooms: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # of those: what each appends, and whether

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around the body: lists that it appends to cannot be looked at."""
        self.depth, self.known, self.level = status.depth, len(self.lists), len(status.bodies) - 1
        self.values = [[] for _ in self.lists]
        for each in self.lists:
            each.append(Growing())
        self.rooms = {
            place: [{"is kept": False, "row": UndefinedReturnValue()} for _ in range(count)]
            for place, count in self.chosen.items()
        }
        status.made += chain(*self.rooms.values())  # branches carry what they set there
        outer, status.growth = status.growth, self
        try:
            yield
        finally:
            status.growth = outer
            for each in self.lists[: self.known]:
                del each[-1]

    def add(self, owner: list[Any], value: Any) -> None:
        """One element; a list that is met for the first time is marked when the body is recorded again."""
        place = self._place(owner)
        if place not in self.chosen:
            self.values[place].append(value)
        elif (room := self._room(place)) is not None:
            room.update({"is kept": True, "row": value})

    def add_in_branch(self, owner: list[Any], value: Any) -> None:
        """The same in a branch of the body: an element in some turns."""
        if any(owner is each for made in status.bodies[self.level :] for each in made):
            raise CannotStage("append() in a list that was made outside of it")
        room = self._room(self._place(owner))
        if room is None:
            return
        for key, new in (("is kept", True), ("row", value)):
            slot = Slot(room, key, is_item=True)
            if not slot.is_settled:
                status.met.append((slot, slot.value))
            slot.value = new

    def _room(self, place: int) -> dict[str, Any] | None:
        """The first one that nothing was put into on this way; there is one when the body is recorded again."""
        rooms = self.rooms.get(place, [])
        found = next((room for room in rooms if room["is kept"] is False), None)
        if found is None and len(rooms) == _ROOMS:
            raise CannotStage(f"append() is called more than {_ROOMS} times in a turn, in branches")
        if found is None:
            self.chosen[place] = len(rooms) + 1
        return found

    def _place(self, owner: list[Any]) -> int:
        found = next((i for i, each in enumerate(self.lists) if each is owner), None)
        if found is not None:
            return found
        if self.around is not None and all(owner is not other for other in self.around):
            raise CannotStage("append() in a loop inside of another, to a list that was made outside of both")
        self.lists.append(owner)
        self.values.append([])
        return len(self.lists) - 1

    @property
    def is_new(self) -> bool:
        """Whether the body has to be recorded again, with its lists marked."""
        few = any(len(self.rooms.get(place, ())) < count for place, count in self.chosen.items())
        return few or self.known < len(self.lists)

    def rows(self, recorder: Recorder, written: Collection[Base], memory: Memory) -> list[torch.Tensor]:
        """What a turn gives for all lists: their elements, leaf by leaf. written: what is of before the turn."""
        self.forms: list[tuple[TreeSpec, list[bool], int]] = []
        self.homes: list[list[list[Home | None]]] = []  # of each list and leaf: what those of one turn look at
        found: list[torch.Tensor] = []
        for place, values in enumerate(self.values):
            if place in self.chosen:
                values = [room["row"] for room in self.rooms[place]]
            if not values or any(isinstance(value, Undefined) for value in values):
                raise CannotStage("append() is called in some of its turns only")
            flat = [tree_flatten(value) for value in values]
            leaves, form = flat[0]
            if any(other != form for _, other in flat) or not leaves:
                raise CannotStage("append() is called with elements of several structures")
            for leaf in (leaf for leaves, _ in flat for leaf in leaves):
                if not is_value(leaf):
                    raise CannotStage(f"append() is called with {kind(leaf)}")
            numbers = [is_number(leaf) or not isinstance(leaf, torch.Tensor) for leaf in leaves]
            self.forms.append((form, numbers, len(values)))
            self.homes.append([[home_of(recorder, row[at]) for row, _ in flat] for at in range(len(leaves))])
            for home in (home for column in self.homes[-1] for home in column if home is not None):
                _check(home, written, memory)
            for column in zip(*(leaves for leaves, _ in flat), strict=True):
                tensors = [tensor_of(recorder, leaf) for leaf in column]
                if len({(spec_of(t).dtype, spec_of(t).shape) for t in tensors}) > 1:
                    raise CannotStage("append() is called with elements of several shapes or dtypes")
                found.append(tensors[0] if len(tensors) == 1 else torch.stack(tuple(tensors)))
            if place in self.chosen:
                kept = [tensor_of(recorder, room["is kept"]) for room in self.rooms[place]]
                found.append(kept[0] if len(kept) == 1 else torch.stack(tuple(kept)))
        return found

    def finish(
        self, rows: Sequence[torch.Tensor], place: str,
        share: Callable[[torch.Tensor, Sequence[Home | None], bool], None],
    ) -> None:  # fmt: skip
        """After the loop: its rows, at the end of the lists. share: says whose memory they are, see `Memory`."""
        left = iter(rows)
        for at, (owner, (form, numbers, many)) in enumerate(zip(self.lists, self.forms, strict=True)):
            leaves = [next(left) for _ in numbers]
            if at in self.chosen:
                is_kept = next(left).flatten()
                leaves = [(leaf.flatten(0, 1) if many > 1 else leaf)[is_kept] for leaf in leaves]
            for leaf, homes in zip(leaves, self.homes[at], strict=True):
                share(leaf, homes, at in self.chosen)
            if many > 1 and at not in self.chosen:
                leaves = [leaf.flatten(0, 1) for leaf in leaves]
            owner.append(Appended(leaves, form, numbers, place))


def _check(home: Home, written: Collection[Base], memory: Memory) -> None:
    """Raise CannotStage for what turns write into: in Python an element is what they make of it in the end."""
    families = set(linked(home[0]))
    if not families.isdisjoint(written) or memory.is_written_later(families):
        raise CannotStage("append() is called with a tensor that its turns write into: append a clone() of it")


def append_to(owner: list[Any]) -> Callable[[Any], None] | None:
    """How to append to a list of outside in a staged body; None where that cannot be."""
    growth = status.growth
    if growth is None:
        return None
    return partial(growth.add if growth.depth == status.depth else growth.add_in_branch, owner)
