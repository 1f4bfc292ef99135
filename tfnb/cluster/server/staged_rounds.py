"""Steps of `run` on a shard, in rounds that the notebook drives: staged, prepared, then committed or given up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfnb.cluster.server.objects import Objects
from tfnb.cluster.server.parts import PartWriter, StagedPart
from tfnb.cluster.wire.messages import Ok, Refusal, Request
from tfnb.errors import StepAborted


@dataclass
class Round:
    """One synchronous step in the making."""

    parts: dict[int, StagedPart] = field(default_factory=dict)
    workers: tuple[int, ...] = ()  # the prepared set
    write: Callable[[], None] | None = None  # the prepared write, with nothing fallible in it
    writes: tuple[str, ...] = ()
    opening: int = -1  # of the store, for that write
    version: int = -1  # of the shard, for that write

    @property
    def nbytes(self) -> int:
        """Bytes held by all parts."""
        return sum(part.nbytes for part in self.parts.values())


class StagedRounds:
    """The rounds of one shard. Over are the rounds up to ``floor``, and the later ones in ``over``."""

    def __init__(self, shard: PartWriter, objects: Objects) -> None:
        self._shard, self._objects = shard, objects
        objects.is_over = self.is_over
        self.floor = 0
        self.over: set[int] = set()
        self.staged: dict[int, Round] = {}
        self.methods: dict[str, Callable[[Request], Ok | Refusal]] = {
            "stage": self.stage, "prepare": self.prepare, "commit": self.commit, "keep": self.keep, "abort": self.abort,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(held.nbytes for held in self.staged.values())

    def is_over(self, number: int) -> bool:
        """Whether a round is over, and takes no more parts."""
        return number <= self.floor or number in self.over

    def stage(self, request: Request) -> Ok | Refusal:
        """Keep one worker's part until the round is committed or over."""
        number, worker = int(request.meta["round"]), int(request.meta["worker"])
        if (over := self._refused(number)) is not None:
            return over
        part = self._shard.part(request)
        if isinstance(part, Refusal):
            return part
        held = self.staged.get(number, Round())
        earlier = held.parts.get(worker)
        self._shard.afford(part.nbytes - (earlier.nbytes if earlier else 0))
        self.staged[number] = Round({**held.parts, worker: part})
        return Ok({"round": number})

    def prepare(self, request: Request) -> Ok | Refusal:
        """Compute the write of a commit with these workers; writes nothing."""
        number, workers = int(request.meta["round"]), tuple(map(int, request.meta["workers"]))
        if (over := self._refused(number)) is not None:
            return over
        self._ready(number, workers)
        return Ok({"round": number})

    def _ready(self, number: int, workers: tuple[int, ...]) -> Round:
        held = self.staged.get(number, Round())
        missing = [worker for worker in workers if worker not in held.parts]
        if missing or not workers:
            raise StepAborted(f"round {number} lacks the staged parts of workers {missing}")
        parts = [held.parts[worker] for worker in workers]
        is_old = held.version != self._shard.version and any(part.since is not None for part in parts)
        if held.write is None or held.workers != workers or held.opening != self._shard.opening or is_old:
            made = self._shard.prepared(parts)
            held.write, held.writes = made.write, made.keys
            held.workers, held.opening, held.version = workers, self._shard.opening, self._shard.version
        return held

    def commit(self, request: Request) -> Ok | Refusal:
        """Write the round with exactly these workers, in this order."""
        number, workers = int(request.meta["round"]), tuple(map(int, request.meta["workers"]))
        if (over := self._refused(number)) is not None:
            return over
        held = self._ready(number, workers)
        assert held.write is not None
        with self._shard.writing(held.writes):
            held.write()
        self._shard.step += 1
        self._objects.keep(number)
        self._end(request.meta)
        return self._shard.ack()

    def keep(self, request: Request) -> Ok:
        """End a round that was committed elsewhere: elements dequeued here do not come back."""
        self._objects.keep(int(request.meta["round"]))
        self._end(request.meta)
        return self._shard.ack()

    def abort(self, request: Request) -> Ok:
        """End a round, and all up to ``floor`` (by default the round itself); committed rounds stay committed."""
        self._end(request.meta)
        self._objects.abort([int(request.meta["round"])] if request.meta.get("moved") else ())
        return self._shard.ack()

    def _refused(self, number: int) -> Refusal | None:
        """The refusal of a round that is over; else None."""
        is_over = self.is_over(number)
        return Refusal("stale", f"round {number} is over; the last one was {self.floor}") if is_over else None

    def _end(self, meta: Mapping[str, Any]) -> None:
        number = int(meta["round"])
        self.floor = max(self.floor, int(meta.get("floor", number)))
        self.over = {other for other in {*self.over, number} if other > self.floor}
        self.staged = {other: held for other, held in self.staged.items() if not self.is_over(other)}
