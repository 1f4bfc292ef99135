"""Names of a staged loop that hold the same memory: as of each other, of tensors of outside, of what they held before.

Each name is a value of its own in the loop. What writes into one of several that share memory cannot be staged; what is
written after the loop is passed on to all, see `tfnb.recording.writes.aliases`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from tfnb.control_flow.staging.statement import CannotStage, is_number
from tfnb.graph.node import leaves
from tfnb.recording import Recorder, Tensor
from tfnb.recording.values.tensor import Base
from tfnb.recording.values.views import RowOfSome, View, renewed_chain
from tfnb.recording.writes.aliases import Test, Way, linked, outer, share, ways

Home = tuple[Base, tuple[View, ...]]


def home_of(recorder: Recorder, leaf: Any) -> Home | None:
    """What a tensor looks at, and how; None for a number."""
    if not isinstance(leaf, torch.Tensor) or is_number(leaf):
        return None
    handle = recorder.handle(leaf)
    return handle._family, handle._chain


def ways_of_made(recorder: Recorder, homes: Iterable[Home]) -> dict[Base, list[Way]]:
    """The homes made in the region that is being recorded: the ways to others, and to what is outside of it."""
    others = outer(recorder)
    made = dict.fromkeys(base for base, _ in homes if base not in others)
    return {base: list(ways(recorder, base, {*others, *made})) for base in made}


class Memory:
    """What the names of a loop look at after one turn.

    carried: what the turn was given. homes: what they look at; unsure: which may be of an earlier turn instead. stacks:
    of the rows that it was given, what has them. whole: whether the turns take all of those.
    """

    def __init__(
        self, recorder: Recorder, carried: Sequence[Tensor], homes: Sequence[Home | None], unsure: Collection[int],
        stacks: Mapping[Base, Tensor], *, whole: bool,
    ) -> None:  # fmt: skip
        self.homes, self.unsure, self.stacks, self.whole, self.outer = homes, unsure, stacks, whole, outer(recorder)
        self.given = {tensor._family: place for place, tensor in enumerate(carried)}
        self.is_written = [tensor._family.version != 0 for tensor in carried]
        self.families = [set() if home is None else set(linked(home[0])) for home in homes]
        self.stacked: list[tuple[Home, bool, Tensor]] = []  # rows that turns gave, of what, and whether that is all
        pairs = enumerate(homes)
        self.places = {at: made for at, home in pairs if home is not None and (made := self._places(recorder, *home))}

    def _places(self, recorder: Recorder, base: Base, chain: tuple[View, ...]) -> list[Tensor]:
        """Tensors of the turn that say which part of something of outside is looked at."""
        if base not in self.outer or base in self.given:
            return []
        found = [leaf for view in chain for leaf in leaves(view.attrs) if isinstance(leaf, Tensor)]
        return [leaf for leaf in found if leaf._family not in self.outer or leaf._family in self.given]

    def check(self, written: Collection[Base], labels: Sequence[str], read: Sequence[bool] | None) -> None:
        """Raise CannotStage where a turn after this one would write into what several names hold.

        read: of what the turn was given, whether it takes that; None for all.
        """
        for place, families in enumerate(self.families):
            others = [at for at, more in enumerate(self.families) if at != place and families & more]
            outer = [base for base in families if base in self.outer and base not in self.given]
            moved = [at for base, at in self.given.items() if base in families and at != place]
            shares = others or outer or moved or not families.isdisjoint(self.stacks)
            is_seen = read is None or read[place] or others or moved
            if shares and (self.is_written[place] or (is_seen and any(base in written for base in outer))):
                raise CannotStage(f"it gives {labels[place]} memory that another name holds, and writes into it")

    def later(self, families: Collection[Base]) -> set[int]:
        """The names that hold, after this turn or a later one, what these hold now."""
        found, left = set[int](), set(families)
        while True:
            more = {at for at, mine in enumerate(self.families) if at not in found and not mine.isdisjoint(left)}
            if not more:
                return found
            found |= more
            left |= {base for base, at in self.given.items() if at in more}

    def is_written_later(self, families: Collection[Base]) -> bool:
        """Whether a turn after this one writes into what these hold now."""
        return any(self.is_written[at] for at in self.later(families))

    def meets(self, homes: Sequence[Home | None]) -> bool:
        """Whether of tensors that each turn gives, two may be the same memory: of one turn or of several."""
        families = [set(linked(home[0])) for home in homes if home is not None]
        if any(not one.isdisjoint(other) for one, other in combinations(families, 2)):
            return True
        every = set[Base]().union(*families)
        later = self.later(every)
        return any(
            base in self.outer if base not in self.given else self.given[base] in later
            for base in every if base not in self.stacks
        )  # fmt: skip

    def share(
        self, recorder: Recorder, carried: Sequence[Tensor], before: Sequence[Any], turns: Tensor, taken: Test,
        places: Mapping[int, Tensor],
    ) -> None:  # fmt: skip
        """After the loop: say of its values whose memory they are.

        taken: whether there was a turn at all. places: those of the last one, for the tensors of the turn by their id.
        """
        was = [home_of(recorder, leaf) if isinstance(leaf, torch.Tensor) else None for leaf in before]
        firsts: dict[Base, int] = {}
        for place, (home, result) in enumerate(zip(self.homes, carried, strict=True)):
            if home is None:
                continue
            is_sure = place not in self.unsure
            base, chain = home[0], renewed_chain(home[1], lambda leaf: places.get(id(leaf), leaf))
            kept = {self.given[each] for each in self.families[place] if each in self.given}
            if (mine := was[place]) is not None and place not in kept:
                share(recorder, result, *mine, taken, False)
            for at in kept:
                if (old := was[at]) is not None:
                    share(recorder, result, *old, taken, is_sure=False)
            if base in self.outer and base not in self.given:  # which has links of its own to others
                share(recorder, result, base, chain, taken, is_sure=is_sure)
                continue
            for each in self.families[place]:
                if each in self.stacks:
                    stack = self.stacks[each]
                    looks = (*stack._chain, RowOfSome.at(-1 if self.whole else turns - 1), *chain)
                    share(recorder, result, stack._family, looks, taken, is_sure=is_sure and each is base)
                elif each in self.outer and each not in self.given:
                    share(recorder, result, each, chain, taken, is_sure=False)
            if base in self.given:
                continue
            self._share_with_others(recorder, carried, place, taken)
            if base not in firsts:
                firsts[base] = place
                continue
            first = carried[firsts[base]]
            is_whole = not self.homes[firsts[base]][1]  # type: ignore[index]
            is_sure &= is_whole and firsts[base] not in self.unsure
            share(recorder, result, first._family, chain, taken, is_sure=is_sure)

    def _share_with_others(self, recorder: Recorder, carried: Sequence[Tensor], place: int, taken: Test) -> None:
        """A name that holds what a branch of the turn gave, and those that may hold what that branch gave as well."""
        home = self.homes[place]
        for at, more in enumerate(self.families[:place]):
            other = self.homes[at]
            if home is not None and other is not None and home[0] is not other[0] and home[0] in more:
                share(recorder, carried[place], carried[at]._family, (), taken, is_sure=False)

    def share_rows(
        self, recorder: Recorder, rows: Tensor, home: Home, number: int | None, many: int, carried: Sequence[Tensor],
        before: Sequence[Any], taken: Test,
    ) -> None:  # fmt: skip
        """After the loop, of rows that its turns gave, each of which looked at ``home``: say whose memory they are.

        number: which it is of so many of one turn, on their second axis where it is not the only one; None where nobody
        knows how many turns gave one. taken: whether there was a turn.
        """
        base, chain = home
        is_one = number is not None and many == 1 and not chain  # the rows are what the turns looked at
        last: tuple[View, ...] = (RowOfSome.at(-1),)
        if many > 1:
            last = (View(torch.ops.aten.select.int, {"dim": 1, "index": number}), *last)
        families = set(linked(base))
        for place in self.later(families):
            if number is not None and not chain and self.homes[place] == home:
                share(recorder, carried[place], rows._family, last, taken)
            else:
                share(recorder, carried[place], rows._family, (), taken, is_sure=False)
        for each in families:
            if each in self.given:
                first = before[self.given[each]]
                mine = home_of(recorder, first) if isinstance(first, torch.Tensor) else None
                if mine is not None and is_one and each is base and not mine[1]:
                    share(recorder, recorder.handle(first), rows._family, (RowOfSome.at(0),), taken)
                elif mine is not None:
                    share(recorder, rows, *mine, taken, is_sure=False)
            elif each in self.stacks:
                stack = self.stacks[each]
                share(recorder, rows, stack._family, stack._chain, taken, is_sure=is_one and self.whole)
            elif each in self.outer:
                share(recorder, rows, each, (), taken, is_sure=False)
        for other, is_all, more in self.stacked:
            if not families.isdisjoint(linked(other[0])):
                share(recorder, rows, more._family, (), taken, is_sure=is_one and is_all and other == home)
        self.stacked.append((home, is_one, rows))
