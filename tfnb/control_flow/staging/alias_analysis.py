"""Alias analysis of a staged loop: names that may share memory, as each run decides.

Each name is a value of its own in the loop. So nothing may be written into memory that another name may hold: that is
an error, within the loop as well as after it, see `tfnb.recording.writes.aliases`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from tfnb.control_flow.staging.statement import Statement, is_number
from tfnb.errors import Unsupported
from tfnb.recording import Recorder, Tensor
from tfnb.recording.values.tensor import Base
from tfnb.recording.writes.aliases import ADVICE, REFUSED, family, may_share, outer

Bases = frozenset[Base]


def bases_of(recorder: Recorder, leaf: object) -> Bases:
    """The bases that a tensor may share memory with, its own included; none for a number."""
    if not isinstance(leaf, torch.Tensor) or is_number(leaf):
        return frozenset()
    return frozenset(family(recorder.handle(leaf)._family))


def reason_of(st: Statement, label: str) -> str:
    """Description of the statement that decides the memory of a name."""
    return f"the `{st.what}` of {st.place} decides what memory {label} has"


def merged(sets: Iterable[set[Any]]) -> list[set[Any]]:
    """Sets that have an element in common, as one."""
    groups: list[set[Any]] = []
    for each in sets:
        apart = [group for group in groups if group.isdisjoint(each)]
        groups = [*apart, each.union(*(group for group in groups if not group.isdisjoint(each)))]
    return groups


class LoopAliases:
    """Groups of names of a loop, and of tensors of outside, that may hold the same memory in some iteration.

    A name is its number among what is carried. carried: what an iteration was given. before, after: the memory that
    each name has before the loop, and after the iteration. rows: of the rows that the iteration was given, what has
    them.
    """

    def __init__(
        self, recorder: Recorder, carried: Sequence[Tensor], before: Sequence[Bases], after: Sequence[Bases],
        rows: Mapping[Base, Tensor],
    ) -> None:  # fmt: skip
        self.carried, self.rows = carried, rows
        self.given = {tensor._family: place for place, tensor in enumerate(carried)}
        self.outer = {*outer(recorder), *(stack._family for stack in rows.values())} - self.given.keys()
        self.after = list(map(self._members, after))
        groups = merged({at, *old, *new} for at, (old, new) in enumerate(zip(before, self.after, strict=True)))
        self.groups = [next(group for group in groups if place in group) for place in range(len(carried))]

    def _members(self, bases: Bases) -> set[Any]:
        """Memory as group members: carried names for given memory, and for rows their sequence."""
        return {self.rows[base]._family if base in self.rows else self.given.get(base, base) for base in bases}

    def _places(self, group: Iterable[Any]) -> list[int]:
        return [each for each in group if isinstance(each, int)]

    def check(self, st: Statement, written: Collection[Base], labels: Sequence[str]) -> None:
        """Raises Unsupported where an iteration writes into memory that another name may hold."""
        for place, group in enumerate(self.groups):
            names = self._places(group)
            is_shared = len(names) > 1 or not self.after[place].isdisjoint(self.outer)
            is_written = self.carried[place]._family.version != 0
            if (is_shared and is_written) or not group.isdisjoint(self.outer.intersection(written)):
                self.refuse(st, labels[place])

    def refuse(self, st: Statement, label: str) -> None:
        """Raise Unsupported."""
        raise Unsupported(
            f"{st.place}: the `{st.what}` writes into memory that {label} may share with another name, as each run "
            f"decides\n  {ADVICE}", details=REFUSED,
        )  # fmt: skip

    def share(self, st: Statement, results: Sequence[Tensor], labels: Sequence[str]) -> None:
        """After the loop: declare the values that may share memory."""
        for place, group in enumerate(self.groups):
            others = [results[other]._family for other in self._places(group) if other < place]
            may_share(results[place], [*group & self.outer, *others], reason_of(st, labels[place]))

    # -- what iterations append to lists -------------------------------------------------------------------------------

    def _group_of(self, bases: Bases) -> set[Any]:
        """All that may have this memory, in this iteration or another one."""
        members = self._members(bases)
        return members.union(*(group for group in self.groups if not group.isdisjoint(members)))

    def check_element(self, st: Statement, bases: Bases, written: Collection[Base]) -> None:
        """Raise Unsupported for an appended element that iterations write into: in Python it would show the
        last write.
        """
        names = self._places(self._group_of(bases))
        if not bases.isdisjoint(written) or any(self.carried[at]._family.version for at in names):
            self.refuse(st, "an element that it appends")

    def share_elements(self, st: Statement, rows: Tensor, bases: Bases, results: Sequence[Tensor]) -> None:
        """After the loop: say whose memory the elements of a list may have."""
        group = self._group_of(bases)
        found = [*group & self.outer, *(results[at]._family for at in self._places(group))]
        may_share(rows, found, reason_of(st, "an element that it appends"))
