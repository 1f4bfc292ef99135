"""The state of a training on one shard: its rounds, or the clocks of its loops. Data only; `trainings` writes.

A synchronous training has rounds, which commit without the notebook.
Every worker contributes to round k and is answered with the values after the round. A shard with all parts computes its
write and tells the first shard; when all shards are ready, the first one writes and lets the others write. The first
shard's decision is final: a reader of a cut, and the end of a training, ask it first and pass its decision to the
others.

A round has places: the rows and the random stream of one part of its batch. Each shard keeps the first part that comes
for a place, and drops copies: the parts of a place are equal, whoever computes them, so all shards write the same. With
as many places as workers each worker has its own. With spare workers the first shard gives the places of the next round
away in the order in which workers come for them; later ones copy the place with the fewest workers, among equals the
one given away last. Who sends a copy while the part of another place is missing computes that one, so that no round
waits for the slowest workers.

With bounded staleness each loop has a clock, its number of applied steps, and reads only while its lead over the
slowest loop is within the bound. A loop that stands still leaves, and no loop waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HOLD = 2.0  # seconds after which a hold ends by itself


@dataclass
class OpenRound:
    """One round in the making. ``wanted``: number of its parts; ``owners``: by place, the worker whose part is kept.

    The first shard alone knows ``takers``, the place that it gave each worker, and ``ready``, the shards that have
    computed their write. ``error``: why this shard could not.
    """

    parts: dict[int, Any] = field(default_factory=dict)  # place -> Part
    owners: dict[int, int] = field(default_factory=dict)  # place -> worker
    takers: dict[int, int] = field(default_factory=dict)  # worker -> place
    given: Counter[int] = field(default_factory=Counter)  # place -> number of its takers
    untaken: int = 0  # no place below it is without a part and without a taker
    wanted: int = 0
    error: Exception | None = None
    shards: tuple[int, ...] = ()
    write: Callable[[], None] | None = None
    writes: tuple[str, ...] = ()
    opening: int = -1  # of the store, for that write
    is_computed: bool = False
    sends: list[Any] = field(default_factory=list)  # to the other shards, when it is written
    ready: set[int] = field(default_factory=set)
    nbytes: int = 0  # of all parts
    shown: tuple[int, ...] = ()  # feeds of the write whose averages a worker asks for
    averages: tuple[Any, ...] = ()  # these

    def add(self, place: int, worker: int, part: Any, shards: tuple[int, ...], wanted: int) -> None:
        """Add the part of a place without one."""
        self.parts[place], self.owners[place] = part, worker
        self._give(worker, place)
        self.shards, self.wanted = shards, wanted
        self.nbytes += part.nbytes

    def place_for(self, worker: int, places: int, before: int = -1) -> int:
        """The place, of so many, whose part a worker is to compute; ``before``: the place of the worker's last part.

        The worker's own place while its part is missing; else a place without a worker, ``before`` if possible; else a
        copy of the place with the fewest workers, among equals the one that was given away last.

        >>> turn = OpenRound()
        >>> [turn.place_for(worker, 2) for worker in (4, 5, 6, 4)]
        [0, 1, 1, 0]
        """
        mine = self.takers.get(worker)
        if mine is None or mine >= places or mine in self.parts:
            place = self._free_place(places, before)
            mine = self._copied(places) if place is None else place
            if mine is None:
                return self.takers.get(worker, 0)
            self._give(worker, mine, is_last=True)
        return mine

    def _give(self, worker: int, place: int, *, is_last: bool = False) -> None:
        """Note the place of a worker. is_last: whether the worker came for it after all others."""
        before = self.takers.pop(worker, None) if is_last else self.takers.get(worker)
        if before is not None:
            self.given[before] -= 1
            self.untaken = min(self.untaken, before)
        self.takers[worker] = place
        self.given[place] += 1

    def _free_place(self, places: int, before: int) -> int | None:
        """A place without a part and without a taker: ``before``, or else the first one. Each worker comes by here."""
        if 0 <= before < places and before not in self.parts and not self.given[before]:
            return before
        while self.untaken < places and (self.untaken in self.parts or self.given[self.untaken]):
            self.untaken += 1
        return self.untaken if self.untaken < places else None

    def _copied(self, places: int) -> int | None:
        """The place for a copy: all places without a part have takers. Only spare workers come by here."""
        missing = [place for place in range(places) if place not in self.parts]
        last = {place: at for at, place in enumerate(self.takers.values(), 1)}
        return min(missing, key=lambda place: (self.given[place], -last[place], place), default=None)

    @property
    def is_whole(self) -> bool:
        """Whether the parts of all places are here."""
        return 0 < self.wanted == len(self.parts)

    @property
    def is_decided(self) -> bool:
        """Whether every shard has computed its write."""
        return self.is_computed and self.ready.issuperset(self.shards)


@dataclass
class Course:
    """The rounds of one training. ``latest``: the last round written; ``floor``: rounds up to here are over.

    ``places``: number of a round's parts, unless the batch is too short. ``counted``: by worker, the last round with a
    part of this worker, and the part's place. ``clocks``: of loops at work; ``least``: the slowest loop's clock so far;
    ``at``: by clock, the number of loops there; ``gone``: loops that were given up.
    """

    latest: int = 0
    counted: dict[int, tuple[int, int]] = field(default_factory=dict)
    floor: int = 0
    places: int = 1
    clocks: dict[str, int] = field(default_factory=dict)
    at: Counter[int] = field(default_factory=Counter)
    least: int = 0
    gone: set[str] = field(default_factory=set)
    held_until: float = 0.0
    turns: dict[int, OpenRound] = field(default_factory=dict)
    averages: tuple[Any, ...] = ()  # that a worker asked for, of the last round that was written

    @property
    def nbytes(self) -> int:
        """Bytes of parts that are staged, and of averages that a worker asked for."""
        shown: int = sum(average.nbytes for average in self.averages)
        return shown + sum(turn.nbytes for turn in self.turns.values())

    def turn(self, number: int) -> OpenRound:
        """A round, opened if necessary."""
        if (found := self.turns.get(number)) is None:
            found = self.turns[number] = OpenRound()
        return found

    def place_for(self, worker: int) -> int:
        """The place of the next round whose part a worker is to compute."""
        _, before = self.counted.get(worker, (0, -1))
        return self.turn(max(self.latest, self.floor) + 1).place_for(worker, self.places, before)

    def enter(self, loop: str, clock: int) -> int:
        """Register a loop that goes to work, with a clock not below ``least``; returns the clock."""
        self.tick(loop, max(clock, self.least))
        return self.clocks[loop]

    def tick(self, loop: str, clock: int) -> bool:
        """Set the clock of a loop: its number of applied steps. Returns whether the slowest clock has changed."""
        before = self.slowest
        self._forget(loop)
        self.clocks[loop] = clock
        self.at[clock] += 1
        self.least = max(self.least, self.slowest)
        return self.slowest != before

    def leave(self, loop: str) -> None:
        """Remove the clock of a loop that stands still, so that no loop waits for this one."""
        self._forget(loop)
        self.least = max(self.least, self.slowest)

    @property
    def slowest(self) -> int:
        """The clock of the slowest loop at work; 0 without one."""
        return min(self.at, default=0)  # of the few clocks that there are, not of all loops

    def _forget(self, loop: str) -> None:
        clock = self.clocks.pop(loop, None)
        if clock is not None:
            self.at[clock] -= 1
            if not self.at[clock]:
                del self.at[clock]

    def lead(self, loop: str) -> int:
        """The lead of a loop over the slowest one, in steps."""
        return self.clocks[loop] - self.slowest

    def end(self, floor: int) -> None:
        """Close rounds up to ``floor``, and drop their staged parts."""
        self.floor = max(self.floor, floor)
        self.turns = {number: turn for number, turn in self.turns.items() if number > self.floor}
