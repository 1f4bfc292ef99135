"""What one shard keeps of a training: its rounds, or the clocks of its loops. Data only; `core` writes.

A synchronous training has rounds, which commit without the notebook.
Every worker contributes to round k and is answered with the values after it. A shard that has all parts has computed
the write and tells the first shard; when all are ready, that one writes and lets the others write. What it decided is
final: whoever reads a cut, or ends the training, asks it first and names its decision to the others.

With spare workers a shard tells the first one of each part that it has. The first workers whose parts are on all
shards make the round: the first shard names them to the others, which then compute. The other parts are dropped.

With bounded staleness each loop has a clock, the steps that it has applied, and reads only while it is no more steps
ahead of the slowest one than it may be. A loop that stands still leaves, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HOLD = 2.0  # seconds after which a hold ends by itself


@dataclass
class Turn:
    """One round in the making. ``wanted``: of how many workers it is made; ``chosen``: of which ones.

    The first shard alone knows ``holders``, the shards that have the part of a worker, and ``ready``, those that have
    computed their write. ``error``: why this shard could not.
    """

    parts: dict[int, Any] = field(default_factory=dict)  # worker -> Part
    wanted: int = 0
    chosen: tuple[int, ...] = ()
    holders: dict[int, set[int]] = field(default_factory=dict)
    error: Exception | None = None
    shards: tuple[int, ...] = ()
    write: Callable[[], None] | None = None
    writes: tuple[str, ...] = ()
    opening: int = -1  # of the store, for that write
    is_computed: bool = False
    sends: list[Any] = field(default_factory=list)  # to the other shards, when it is written
    ready: set[int] = field(default_factory=set)
    nbytes: int = 0  # of all parts

    def add(self, worker: int, part: Any, shards: tuple[int, ...], wanted: int) -> None:
        """The part of one worker, who had none."""
        self.parts[worker], self.shards, self.wanted = part, shards, wanted
        self.nbytes += part.nbytes

    def hold(self, worker: int, shard: int) -> list[int]:
        """A shard has the part of a worker; the workers of the round, where that one makes their number whole."""
        self.holders.setdefault(worker, set()).add(shard)
        if self.chosen or not self.shards:
            return []
        whole = sorted(worker for worker, held in self.holders.items() if held.issuperset(self.shards))
        return whole if len(whole) == self.wanted else []

    @property
    def is_decided(self) -> bool:
        """Whether every shard has computed its write."""
        return self.is_computed and self.ready.issuperset(self.shards)


@dataclass
class Course:
    """The rounds of one training. ``latest``: the last one written; ``floor``: those up to it are over.

    ``counted``: the last round in which each worker counted. ``clocks``: of loops that are at work; ``least``: where
    the slowest of them was when there was one; ``gone``: loops that were given up.
    """

    latest: int = 0
    counted: dict[int, int] = field(default_factory=dict)
    floor: int = 0
    clocks: dict[str, int] = field(default_factory=dict)
    least: int = 0
    gone: set[str] = field(default_factory=set)
    held_until: float = 0.0
    turns: dict[int, Turn] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that are staged."""
        return sum(turn.nbytes for turn in self.turns.values())

    def turn(self, number: int) -> Turn:
        """A round, begun if it was not."""
        return self.turns.setdefault(number, Turn())

    def enter(self, loop: str, clock: int) -> int:
        """A loop goes to work, not behind the others; its clock."""
        self.tick(loop, max(clock, self.least))
        return self.clocks[loop]

    def tick(self, loop: str, clock: int) -> None:
        """So many steps of a loop are applied."""
        self.clocks[loop] = clock
        self.least = max(self.least, min(self.clocks.values()))

    def leave(self, loop: str) -> None:
        """A loop stands still: nobody waits for it."""
        self.clocks.pop(loop, None)
        self.least = max(self.least, min(self.clocks.values(), default=0))

    def lead(self, loop: str) -> int:
        """Steps that a loop is ahead of the slowest one."""
        return self.clocks[loop] - min(self.clocks.values())

    def end(self, floor: int) -> None:
        """Rounds up to ``floor`` are over; what was staged for them is dropped."""
        self.floor = max(self.floor, floor)
        self.turns = {number: turn for number, turn in self.turns.items() if number > self.floor}
