"""Lists that a loop of the graph appends to: after the loop they are stacked tensors, with a row for each element.

While the body of the loop is recorded the list holds a `Growing`: to read it there is an error, which says to use a
TensorArray. After the loop it holds an `Appended`. ``torch.stack``, ``torch.cat``, ``len``, ``for``, ``[i]`` and
``[a:b]`` of it are part of the graph; all else gets the elements of the samples, with a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.staging.alias_analysis import Bases, bases_of
from tfnb.control_flow.staging.statement import (
    Slot,
    as_number,
    is_number,
    is_value,
    kind,
    status,
    tensor_of,
)
from tfnb.control_flow.staging.unset import Undefined, UndefinedReturnValue
from tfnb.control_flow.staging.user_frames import user_frame, user_line
from tfnb.control_flow.structure import recorder_if_open
from tfnb.errors import Unsupported
from tfnb.recording import Recorder
from tfnb.recording.writes.aliases import REFUSED


class Growing:
    """What a list holds while the body of a loop that appends to it is recorded."""

    def __getattr__(self, name: str) -> Any:
        raise _is_read()

    def __iter__(self) -> Iterator[Any]:
        raise _is_read()


def _is_read() -> Unsupported:
    recorder = recorder_if_open()
    return Unsupported(
        f"a loop reads a list that it appends to{'' if recorder is None else recorder.tape.at()}\n  use a "
        "tfnb.TensorArray in place of the list: `a = tfnb.TensorArray(n)` before the loop, `a = a.write(i, value)` and "
        "`a.read(i - 1)` inside of it, `a.stack()` after it", details=REFUSED,
    )  # fmt: skip


@dataclass(eq=False)
class Appended:
    """The elements that a loop appended, as rows: ``leaves`` of the nested structure that one element is."""

    leaves: list[torch.Tensor]
    form: TreeSpec
    numbers: list[bool]
    place: str

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(
            f"a list that the loop of {self.place} appends to has as many elements as a run has iterations: code that "
            "is not staged cannot take it; torch.stack, torch.cat, len, for, [i] and [a:b] of staged code can"
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


# -- while the loop is recorded ---------------------------------------------------------------------------------------


@dataclass
class Growth:
    """What the body of one loop appends to lists of outside; it stands in a body that made these containers, if any.

    rooms: of each list, what an iteration appends and whether it does; it may do so once, in a branch or not.
    """

    around: list[Any] | None
    depth: int = 0
    level: int = 0  # where `status.bodies` has the body
    lists: list[list[Any]] = field(default_factory=list)
    rooms: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Around the body: lists that it appends to cannot be looked at."""
        self.depth, self.level = status.depth, len(status.bodies) - 1
        marked = list(self.lists)
        for each in marked:
            each.append(Growing())
        self.rooms = [{"is kept": False, "row": UndefinedReturnValue()} for _ in marked]
        status.made += self.rooms  # branches carry what they set there
        outer, status.growth = status.growth, self
        try:
            yield
        finally:
            status.growth = outer
            for each in marked:
                del each[-1]

    def add(self, owner: list[Any], value: Any) -> None:
        """One element; a list that is met for the first time is marked when the body is recorded again."""
        if status.depth > self.depth and any(owner is each for made in status.bodies[self.level :] for each in made):
            raise CannotStage(f"append() in a list that was made outside of it, at {user_line()}")
        place = self._place(owner)
        if place >= len(self.rooms):
            return
        room = self.rooms[place]
        if room["is kept"] is not False:
            raise CannotStage(
                f"{user_line()} is the second append() to its list in one iteration: append both at once, as one "
                "tensor (`torch.stack`, and `flatten(0, 1)` after the loop), or use two lists"
            )
        for key, new in (("is kept", True), ("row", value)):
            slot = Slot(room, key, is_item=True)
            if status.depth > self.depth and not slot.is_settled:
                status.met.append((slot, slot.value))
            slot.value = new

    def _place(self, owner: list[Any]) -> int:
        found = next((i for i, each in enumerate(self.lists) if each is owner), None)
        if found is not None:
            return found
        if self.around is not None and all(owner is not other for other in self.around):
            raise CannotStage(
                f"append() in a loop inside of another, to a list that was made outside of both, at {user_line()}: "
                "make the list in the outer loop, and append its torch.stack() there"
            )
        self.lists.append(owner)
        return len(self.lists) - 1

    @property
    def is_new(self) -> bool:
        """Whether the body has to be recorded again, with its lists marked."""
        return len(self.rooms) < len(self.lists)

    def rows(self, recorder: Recorder, check: Callable[[Bases], None]) -> list[torch.Tensor]:
        """What an iteration gives for all lists: their elements, leaf by leaf. check: raises for what loops write."""
        self.forms: list[tuple[TreeSpec, list[bool], bool]] = []  # and whether each iteration appends
        self.bases: list[list[Bases]] = []  # of each list and leaf
        found: list[torch.Tensor] = []
        for room in self.rooms:
            if room["is kept"] is False or isinstance(room["row"], Undefined):
                raise CannotStage("append() is called in some of its iterations only")
            leaves, form = tree_flatten(room["row"])
            for leaf in leaves:
                if not is_value(leaf):
                    raise CannotStage(f"append() is called with {kind(leaf)}")
            numbers = [is_number(leaf) or not isinstance(leaf, torch.Tensor) for leaf in leaves]
            self.forms.append((form, numbers, room["is kept"] is True))
            self.bases.append([bases_of(recorder, leaf) for leaf in leaves])
            for bases in self.bases[-1]:
                check(bases)
            found += (tensor_of(recorder, leaf) for leaf in leaves)
            if room["is kept"] is not True:
                found.append(tensor_of(recorder, room["is kept"]))
        return found

    def finish(self, rows: Sequence[torch.Tensor], place: str, share: Callable[[Any, Bases], None]) -> None:
        """After the loop: its rows, at the end of the lists. share: says whose memory they may have."""
        left = iter(rows)
        for owner, (form, numbers, is_always), bases in zip(self.lists, self.forms, self.bases, strict=True):
            leaves = [next(left) for _ in numbers]
            if not is_always:
                is_kept = next(left)
                leaves = [leaf[is_kept] for leaf in leaves]
            for leaf, each in zip(leaves, bases, strict=True):
                share(leaf, each)
            owner.append(Appended(leaves, form, numbers, place))


def append_to(owner: list[Any]) -> Callable[[Any], None] | None:
    """How to append to a list of outside in a staged body; None where that cannot be."""
    return None if status.growth is None else partial(status.growth.add, owner)


# -- after the loop ---------------------------------------------------------------------------------------------------


def grown(items: Any) -> bool:
    """Whether a list or tuple has elements that a loop appended. Raises Unsupported inside of that loop."""
    if type(items) not in (list, tuple):
        return False
    if any(type(each) is Growing for each in items):
        raise _is_read()
    return any(type(each) is Appended for each in items)


def length(items: Any) -> Any:
    """``len(items)``."""
    return sum(each.count if type(each) is Appended else 1 for each in items)


def expanded(items: Any) -> list[Any]:
    """The elements that there are for the samples; a run must have as many."""
    found: list[Any] = []
    for each in items:
        found += [each.at(i) for i in range(int(each.count))] if type(each) is Appended else [each]
    return found


def plain(items: Any) -> Any:
    """What Python goes over: of such a list the elements of the samples, with a note."""
    if not grown(items):
        return items
    recorder = recorder_if_open()
    places = ", ".join(each.place for each in items if type(each) is Appended)
    note = (
        f"line {user_frame().f_lineno}: what goes over the list that the loop of {places} appends to stays Python: it "
        "takes as many elements as there are for the samples"
    )
    if recorder is not None and note not in recorder.tape.notes:
        recorder.tape.notes.append(note)
    return expanded(items)


def stack(tensors: Any, dim: int = 0) -> torch.Tensor:
    """``torch.stack`` of them."""
    rows = torch.cat([each.leaves[0] if type(each) is Appended else each[None] for each in tensors])
    return rows if dim == 0 else rows.movedim(0, dim)


def cat(tensors: Any, dim: int = 0) -> torch.Tensor:
    """``torch.cat`` of them."""

    def joined(rows: torch.Tensor) -> torch.Tensor:
        at = dim if dim >= 0 else rows.dim() - 1 + dim
        return rows.movedim(0, at).flatten(at, at + 1)

    return torch.cat([joined(each.leaves[0]) if type(each) is Appended else each for each in tensors], dim)


def item(items: Any, index: Any) -> Any:
    """``items[index]``."""
    is_place = isinstance(index, (int, torch.SymInt, torch.Tensor)) and not isinstance(index, bool)
    if len(items) == 1 and is_place:
        return items[0].at(index)
    if index in (0, -1):
        return items[index].at(index) if type(items[index]) is Appended else items[index]
    return plain(items)[index]


def part(items: Any, span: slice) -> Any:
    """``items[a:b:c]``."""
    if len(items) > 1 or (isinstance(span.step, int) and span.step < 0):
        return plain(items)[span]
    return type(items)([replace(items[0], leaves=[leaf[span] for leaf in items[0].leaves])])


def backwards(items: Any) -> Any:
    """``reversed(items)``."""
    if len(items) > 1:
        return reversed(plain(items))
    return [replace(items[0], leaves=[leaf.flip(0) for leaf in items[0].leaves])]
