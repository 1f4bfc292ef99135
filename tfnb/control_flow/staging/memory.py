"""Names of a staged loop that hold the same memory: as of each other, of tensors of outside, of what they held before.

Each name is a value of its own in the loop. What writes into one of several that share memory cannot be staged; what is
written after the loop is passed on to all, see `tfnb.recording.aliases`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from tfnb.control_flow.staging.statement import CannotStage, is_number
from tfnb.graph.node import leaves
from tfnb.recording import Recorder, Tensor
from tfnb.recording.aliases import Way, linked, outer, share, ways
from tfnb.recording.tensor import Base
from tfnb.recording.views import View, renewed_chain

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

    carried: what the turn was given. homes: what they look at.
    """

    def __init__(self, recorder: Recorder, carried: Sequence[Tensor], homes: Sequence[Home | None]) -> None:
        self.homes, self.outer = homes, outer(recorder)
        self.given = {tensor._family: place for place, tensor in enumerate(carried)}
        self.is_written = [tensor._family.version != 0 for tensor in carried]
        self.families = [set() if home is None else set(linked(home[0])) for home in homes]
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
            shares = others or outer or moved
            is_seen = read is None or read[place] or others or moved
            if shares and (self.is_written[place] or (is_seen and any(base in written for base in outer))):
                raise CannotStage(f"it gives {labels[place]} memory that another name holds, and writes into it")

    def share(
        self, recorder: Recorder, carried: Sequence[Tensor], before: Sequence[Any], turns: Tensor,
        places: Mapping[int, Tensor],
    ) -> None:  # fmt: skip
        """After the loop: say of its values whose memory they are.

        places: those of the last turn, for the tensors of the turn by their id.
        """
        was = [home_of(recorder, leaf) if isinstance(leaf, torch.Tensor) else None for leaf in before]
        firsts: dict[Base, int] = {}

        def taken() -> torch.Tensor:
            return turns > 0

        for place, (home, result) in enumerate(zip(self.homes, carried, strict=True)):
            if home is None:
                continue
            base, chain = home[0], renewed_chain(home[1], lambda leaf: places.get(id(leaf), leaf))
            kept = {self.given[each] for each in self.families[place] if each in self.given}
            if (mine := was[place]) is not None and place not in kept:
                share(recorder, result, *mine, taken, False)
            for at in kept:
                if (old := was[at]) is not None:
                    share(recorder, result, *old, None)
            if base in self.outer and base not in self.given:  # which has links of its own to others
                share(recorder, result, base, chain, taken)
                continue
            for each in self.families[place]:
                if each in self.outer and each not in self.given:
                    share(recorder, result, each, chain, None)
            if base in self.given:
                continue
            if base not in firsts:
                firsts[base] = place
                continue
            first = carried[firsts[base]]
            is_whole = not self.homes[firsts[base]][1]  # type: ignore[index]
            share(recorder, result, first._family, chain, taken if is_whole else None)
