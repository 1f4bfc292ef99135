"""Alias analysis of a staged loop: which names may hold the same memory, as each run decides.

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


def bases_of(recorder: Recorder, leaf: Any) -> Bases:
    """What a tensor looks at, and what may have the same memory; nothing for a number."""
    if not isinstance(leaf, torch.Tensor) or is_number(leaf):
        return frozenset()
    return frozenset(family(recorder.handle(leaf)._family))


def reason_of(st: Statement, label: str) -> str:
    """Which statement decides what memory a name has."""
    return f"the `{st.what}` of {st.place} decides what memory {label} has"


class LoopAliases:
    """Which names of a loop may hold the same memory.

    carried: what an iteration was given. held: the memory that each name had before the loop, and has after the
    iteration. rows: of the rows that the iteration was given, what has them.
    """

    def __init__(
        self, recorder: Recorder, carried: Sequence[Tensor], before: Sequence[Bases], after: Sequence[Bases],
        rows: Mapping[Base, Tensor],
    ) -> None:  # fmt: skip
        self.recorder, self.given = recorder, {tensor._family: place for place, tensor in enumerate(carried)}
        self.outer = outer(recorder) - self.given.keys()
        self.before, self.rows = before, rows
        self.new = [bases - self.given.keys() for bases in after]
        self.kept = [[self.given[base] for base in bases if base in self.given] for bases in after]
        self.reached = self._reached()
        self.pairs = self._pairs()

    def outside(self, bases: Iterable[Base]) -> set[Base]:
        """Those of outside of the loop; for a row, what has the rows."""
        return {self.rows[base]._family if base in self.rows else base for base in bases if self._is_outside(base)}

    def _is_outside(self, base: Base) -> bool:
        return base in self.rows or base in self.outer

    def _reached(self) -> list[set[Base]]:
        """The memory of outside that each name may hold after some iterations."""
        found = [self.outside(bases) for bases in self.new]
        for _ in found:  # as often as it takes at most
            for place, kept in enumerate(self.kept):
                for other in kept:
                    found[place] |= found[other] | self.before[other]
        return found

    def held(self, place: int) -> set[Base]:
        """The memory of outside that a name may hold before, between or after iterations."""
        return self.reached[place] | self.before[place]

    def _pairs(self) -> set[tuple[int, int]]:
        """The names that may hold the same memory between iterations."""
        places = range(len(self.new))
        found = {(i, j) for i in places for j in places if i != j and self.before[i] & self.before[j]}
        while True:
            more = {(i, j) for i in places for j in places if i != j and self._meet(i, j, found)}
            if more <= found:
                return found
            found |= more

    def _meet(self, i: int, j: int, found: set[tuple[int, int]]) -> bool:
        if self.new[i] & self.new[j]:
            return True
        if any(self.outside(self.new[a]) & self.held(k) for a, b in ((i, j), (j, i)) for k in self.kept[b]):
            return True
        return any(k == m or (k, m) in found for k in self.kept[i] for m in self.kept[j])

    def check(self, st: Statement, carried: Sequence[Tensor], written: Collection[Base], labels: Sequence[str]) -> None:
        """Raises Unsupported where an iteration writes into memory that another name may hold."""
        for place, tensor in enumerate(carried):
            others = self.reached[place] or any(place in pair for pair in self.pairs)
            if (others and tensor._family.version != 0) or not self.held(place).isdisjoint(written):
                self.refuse(st, labels[place])

    def refuse(self, st: Statement, label: str) -> None:
        """Raise Unsupported."""
        raise Unsupported(
            f"{st.place}: the `{st.what}` writes into memory that {label} may share with another name, as each run "
            f"decides\n  {ADVICE}", details=REFUSED,
        )  # fmt: skip

    def share(self, st: Statement, results: Sequence[Tensor], labels: Sequence[str]) -> None:
        """After the loop: say which of its values may have whose memory."""
        for place, result in enumerate(results):
            others = [results[j]._family for i, j in self.pairs if i == place and j < place]
            may_share(result, [*self.held(place), *others], reason_of(st, labels[place]))

    # -- what iterations append to lists -------------------------------------------------------------------------------

    def _later(self, bases: Collection[Base]) -> set[int]:
        """The names that hold, after this iteration or a later one, what these hold now."""
        found, left = set[int](), set(bases)
        while True:
            held = [bases | {base for base, at in self.given.items() if at in kept}
                    for bases, kept in zip(self.new, self.kept, strict=True)]  # fmt: skip
            more = {at for at, mine in enumerate(held) if at not in found and mine & left}
            if not more:
                return found
            found |= more
            left |= {base for base, at in self.given.items() if at in more}

    def check_element(self, st: Statement, bases: Bases, carried: Sequence[Tensor], written: Collection[Base]) -> None:
        """Raises Unsupported for an element that iterations write into: in Python it has what the last one wrote."""
        later = self._later(bases)
        if not bases.isdisjoint(written) or any(carried[at]._family.version for at in later):
            self.refuse(st, "an element that it appends")

    def share_elements(self, st: Statement, rows: Tensor, bases: Bases, results: Sequence[Tensor]) -> None:
        """After the loop: say whose memory the elements of a list may have."""
        found = self.outside(bases) | {results[at]._family for at in self._later(bases)}
        for at in (self.given[base] for base in bases if base in self.given):
            found |= self.held(at)
        may_share(rows, found, reason_of(st, "an element that it appends"))
