"""Copies of all shards at one step of a training, for the loss of a server: held by other processes, or in a file.

A copy is a checkpoint whose writer is a process instead of a file: the values of one step are pinned on all servers,
and each holder pulls those of its shards (`tfnb.cluster.tasks.held_copies`) while steps go on. The older set goes when
all shards of the new one are acknowledged. A holder that does not answer in time is given up, and another one chosen.
A checkpoint that was written meanwhile is a copy as well, of the Variables that are in the file.
In the event loop, but for `RecoveryCopies.refresh` and for checkpoints.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tfnb.cluster.engine.engine import Engine, Pins
from tfnb.cluster.engine.holders import Process, ServedShard, chosen, free_of
from tfnb.cluster.engine.members import Member
from tfnb.cluster.notebook.card import size
from tfnb.cluster.wire import sparse_values
from tfnb.cluster.wire.messages import Ok
from tfnb.cluster.wire.transport import BYTES_PER_SECOND
from tfnb.errors import NotFound, TfnbError
from tfnb.placement.placement import Homes
from tfnb.state import checkpoint

COST = 20.0  # times what a copy took pass until the next one, at least
WITHIN = 4.0  # seconds that a holder has for its copies, beside their bytes
FETCHED_WITHIN = 15.0  # seconds that it has to give a copy back: the training stands, and later steps are at stake


@dataclass(frozen=True, slots=True)
class CopySet:
    """Copies of all shards. ``homes``: of the Variables then. ``holders``: by shard. ``at``: when they were pinned."""

    number: int
    homes: Homes
    pins: Pins
    holders: Mapping[int, Member]
    at: float

    @property
    def names(self) -> str:
        """Names of the holders."""
        return " and ".join(sorted({member.name for member in self.holders.values()}))

    @property
    def variables(self) -> Collection[str]:
        """Keys of the Variables that are in it."""
        return self.homes.keys()

    @property
    def source(self) -> str:
        """Where the values are, in words."""
        return f"the copy held by {self.names}"

    @property
    def is_there(self) -> bool:
        """Whether all holders live, and answer."""
        return all(member.is_there for member in self.holders.values())

    def facts(self, epoch: int) -> dict[str, Any]:
        """The entry in the registry."""
        holders = {str(shard): member.name for shard, member in self.holders.items()}
        nbytes = sum(self.pins.nbytes.values())
        return {"id": f"{epoch}-{self.number}", "step": self.pins.step, "bytes": nbytes, "holders": holders}

    def __str__(self) -> str:
        where = {f"{member.name} ({member.host})" for member in self.holders.values()}
        nbytes, age = sum(self.pins.nbytes.values()), time.monotonic() - self.at
        return f"step {self.pins.step}, {size(nbytes)} held by {' and '.join(sorted(where))}, {age:.1f} s old"


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """A complete checkpoint on disk as a copy. ``labels``: of its Variables in the file, by key."""

    file: Path | str
    labels: Mapping[str, str]
    pins: Pins
    at: float

    @property
    def names(self) -> str:
        """Names of the holders: no task is one."""
        return ""

    @property
    def variables(self) -> Collection[str]:
        """Keys of the Variables that are in it."""
        return self.labels.keys()

    @property
    def source(self) -> str:
        """Where the values are, in words."""
        return f"the checkpoint {self.file}"

    def values(self) -> dict[str, torch.Tensor]:
        """The values by key of Variable, all bytes compared with their digests; raises as `checkpoint.load`."""
        found, _ = checkpoint.load(self.file)
        if missing := [label for label in self.labels.values() if label not in found]:
            raise NotFound(f"{self.file} lacks {missing[0]}: another training has written over it")
        return {key: found[label] for key, label in self.labels.items()}


class RecoveryCopies:
    """The copies of one cluster. ``newest``: the last complete set; ``is_current``: whether the last try made it.

    ``written``: the last checkpoint that was written on disk of values that servers held.

    wanted: the homes of all Variables, and the keys of their pieces by shard. publish: writes a set to the registry.
    """

    def __init__(
        self, engine: Engine, wanted: Callable[[], tuple[Homes, dict[int, list[str]]]],
        publish: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._engine, self._wanted, self._publish = engine, wanted, publish
        self.newest: CopySet | None = None
        self.written: CheckpointCopy | None = None
        self._numbers = itertools.count(1)
        self.is_current = self._is_on = self._is_copying = False
        self._due = 0.0
        self._missed: dict[Member, float] = {}  # when a holder did not answer in time, or refused

    # -- when a copy is made ----------------------------------------------------------------------------------------

    def refresh(self, every: float) -> None:
        """Begin a copy in the background, if one is due: after ``every`` seconds, or `COST` times what the last took.

        At once if a holder is gone; for the first time after half of that, so that pulls come between two copies. From
        the thread of the training.
        """
        if not self._is_on:
            self._is_on, self._due = True, time.monotonic() + every / 2
        newest = self.newest
        if newest is not None and not newest.is_there:
            self.newest, self.is_current, self._due = None, False, 0.0
        if time.monotonic() > self._due and not self._is_copying:
            self._engine.link.start_aside(self._copy, every)

    def hurry(self) -> None:
        """The next `refresh` begins a copy at once."""
        self._due = 0.0

    async def _copy(self, every: float) -> None:
        if self._is_copying:  # another training began it
            return
        begin, self._is_copying, is_made = time.monotonic(), True, False
        try:
            with suppress(TfnbError):  # of a server that is lost, or steps that went on in each try: soon again
                is_made = await self._renew()
        finally:
            now = time.monotonic()
            self.is_current, self._is_copying = is_made, False
            self._due = now + max(every, COST * (now - begin))

    async def _renew(self) -> bool:
        """Make a set; returns whether all of its shards are held."""
        engine, (homes, wanted) = self._engine, self._wanted()
        if not wanted or engine.has_ranks or not self._candidates(wanted)[0]:
            return False
        number, at = next(self._numbers), time.monotonic()
        pins = await engine.pin(wanted)
        try:
            holders = await self._hold(number, pins)
        finally:
            engine.unpin(pins)
        is_whole = engine.lost is None and self._is_on and holders.keys() == pins.keys.keys()
        if is_whole:
            self.newest = CopySet(number, homes, pins, holders, at)
        await self._told()
        return is_whole

    async def _told(self) -> None:
        """The registry names the newest set, and holders drop all others."""
        newest, engine = self.newest, self._engine
        if engine.lost is None and not engine.is_closing:
            await self._publish({} if newest is None else newest.facts(engine.epoch))
            await self._forget([] if newest is None else [newest.number])

    def end(self) -> None:
        """No training needs the copies any more."""
        had, self.newest, self.is_current, self._is_on = self.newest, None, False, False
        if had is not None:
            self._engine.link.start_aside(self._told)

    # -- who holds them -----------------------------------------------------------------------------------------------

    def _candidates(self, shards: Collection[int]) -> tuple[list[Member], set[Process]]:
        """The processes that may hold copies, and those that serve one of the shards."""
        engine = self._engine
        serving = {engine.shards[shard].process for shard in shards}
        heard = engine.link.heard
        found = [
            member for member in (*engine.places.values(), *engine.servers)
            if member.is_there and heard.get(member.peer.addr, 0.0) >= self._missed.get(member, 0.0)
        ]  # fmt: skip
        return [found[place] for place in free_of([member.process for member in found], serving)], serving

    async def _hold(self, number: int, pins: Pins) -> dict[int, Member]:
        """Let processes pull the pinned values; the holder of each shard that has one."""
        held: dict[int, Member] = {}
        while len(held) < len(pins.keys):
            left = {
                shard: ServedShard(self._engine.shards[shard].process, nbytes)
                for shard, nbytes in pins.nbytes.items() if shard not in held
            }  # fmt: skip
            free, serving = self._candidates(pins.keys)
            places = chosen(left, [member.process for member in free], serving)
            if not places or self._engine.lost is not None:
                break
            of: dict[Member, list[int]] = {}
            for shard, place in places.items():
                of.setdefault(free[place], []).append(shard)
            ends = await asyncio.gather(*(self._held_by(member, some, number, pins) for member, some in of.items()))
            for (member, some), is_held in zip(of.items(), ends, strict=True):
                if is_held:
                    held |= dict.fromkeys(some, member)
                else:
                    self._missed[member] = time.monotonic()
        return held

    async def _held_by(self, member: Member, shards: list[int], number: int, pins: Pins) -> bool:
        nbytes = sum(pins.nbytes[shard] for shard in shards)
        meta = {"copy": number, "pinned": pins.number, "shards": shards, "nbytes": nbytes}
        until, epoch = time.monotonic() + WITHIN + nbytes / BYTES_PER_SECOND, self._engine.epoch
        call = self._engine.link.call(member.peer, "copy_shards", meta, epoch=epoch, deadline=until)
        answer = await self._engine.peers.unless_dead(member, call)
        if isinstance(answer, Ok):
            member.copied = int(answer.meta["nbytes"])
        return isinstance(answer, Ok)

    async def _forget(self, keep: list[int]) -> None:
        """Let processes drop all other sets. One that does not hear drops them when it hears of the next one."""
        engine, until = self._engine, time.monotonic() + WITHIN
        holders = [member for member in (*engine.tasks, *engine.servers) if member.copied and member.is_there]
        calls = (
            engine.link.call(member.peer, "forget_copies", {"keep": keep}, epoch=engine.epoch, deadline=until)
            for member in holders
        )
        for member, answer in zip(holders, await asyncio.gather(*calls), strict=True):
            if isinstance(answer, Ok):
                member.copied = int(answer.meta["nbytes"])

    async def fetched(self, copy: CopySet) -> dict[str, torch.Tensor] | str:
        """The values of a set by key of piece, from its holders; or why one of them does not give its part."""
        engine, values = self._engine, dict[str, torch.Tensor]()
        for shard, member in copy.holders.items():
            meta, nbytes = {"copy": copy.number, "shard": shard}, copy.pins.nbytes[shard]
            until = time.monotonic() + FETCHED_WITHIN + nbytes / BYTES_PER_SECOND
            answer = await engine.link.call(member.peer, "shard_copy", meta, epoch=engine.epoch, deadline=until)
            if not isinstance(answer, Ok):
                return f"{member.name} ({member.peer.addr}) does not give shard {shard}: {answer.message}"
            values |= sparse_values.read(answer.meta["keys"], answer.meta["tables"], answer.tensors)
        return values
