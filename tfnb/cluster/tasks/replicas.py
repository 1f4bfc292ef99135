"""The loop of a rank: holds all Variables, all-reduces gradients with the other ranks, and applies the same update.

The servers own the Variables while the ranks do not train: at the begin of each piece the first rank pulls the values
that others have written meanwhile, and all ranks take them over (all values, when a generation begins). The ranks'
values are saved on the servers when the notebook asks one rank to: before anybody else reads or writes Variables, in a
cut, and at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tfnb.cluster.tasks.collectives import FORMS, Bucket, Group, Rendezvous, ensure_equal, formed
from tfnb.cluster.tasks.computing import Compute
from tfnb.cluster.tasks.pieces import PieceOrder, Share
from tfnb.cluster.tasks.programs import ComputeProgram, LateProgram, Push, ShardProgram, apart_from, keys_by_shard
from tfnb.cluster.tasks.resident import WHILE, Out, TrainingLoop, _AppliedPart, both
from tfnb.cluster.wire.messages import Ask, Failure, NotDone, Ok
from tfnb.errors import Cancelled
from tfnb.graph import Spec
from tfnb.kernels.random import REPLICA
from tfnb.passes.flow.merges import Weight
from tfnb.placement.placement import Piece, joined
from tfnb.state.batch_order import Rows

EVERY = 100  # steps after which ranks compare their values


class Replica(TrainingLoop):
    """One rank. ``updates``: by shard, the update that the server would apply."""

    def __init__(
        self,
        *about: Any,
        updates: Mapping[int, ShardProgram],
        meeting: Rendezvous,
        store: dist.TCPStore | None,
        here: str,
    ) -> None:
        self._updates, self._meeting = dict(sorted(updates.items())), meeting
        kinds = [kind for update in self._updates.values() for kind in update.kinds]
        specs = [spec for update in self._updates.values() for spec in update.feeds]
        weights: list[Weight] = []
        for update in self._updates.values():
            weights += [weight.at(range(len(weights), len(kinds))) for weight in update.weights]
        self._bucket = Bucket(kinds, specs, weights)
        self._group: Group | None = None
        self._forming = formed(meeting, here, store, lambda: self._is_wanted)
        self._entered = 0  # the piece whose begin it has taken part in
        self._latest: int | None = None  # the last round that is applied
        super().__init__(*about)
        updated = {shard: [*each.reads, *each.writes] for shard, each in self._updates.items()}
        self._keys = dict(sorted(both(self._reads, updated).items()))
        self._all = [key for found in self._keys.values() for key in found]
        self._values: dict[str, torch.Tensor] = {}
        self._versions = torch.full((len(self._all),), -1, dtype=torch.int64)

    def report(self, seen: int) -> Ok:
        """The report of every loop, with the last applied round."""
        told = super().report(seen)
        return Ok({**told.meta, "latest": self._latest}, told.tensors)

    async def save(self, number: int) -> Ok:
        """Stage the values of a standing rank on their servers, for the notebook to commit.

        Values written by others since the last piece began stay, even those written after this check: each staged value
        names the version that it replaces, and the server compares versions as it writes. The next piece takes them.
        """
        fresh, versions = await self._asked_for()
        since = dict(zip(self._all, versions.tolist(), strict=True))
        about = {"round": number, "worker": 0, "rows": 1, "run_index": 0, "plan": None}
        asks = []
        for shard, written in self._writes_there.items():
            if keys := [key for key in written if key not in fresh]:
                mine = {**about, "keys": keys, "since": [since[key] for key in keys]}
                asks.append(Ask(shard, "stage", mine, [self._values[key] for key in keys]))
        await self._host.ask(asks)
        return Ok({"shards": [ask.shard for ask in asks]})

    @property
    def _writes_there(self) -> dict[int, list[str]]:
        """Keys of all that a rank writes, by shard."""
        return {shard: list(update.writes) for shard, update in self._updates.items()}

    async def _enter(self) -> None:
        """Go to work, as soon as all ranks are there."""
        if self._group is None:
            forming = asyncio.wrap_future(self._forming)
            until = time.monotonic() + 2 * FORMS
            while not forming.done() and self._is_wanted and time.monotonic() < until:
                self._changed.clear()
                change = asyncio.ensure_future(self._changed.wait())
                news: set[asyncio.Future[Any]] = {forming, change}
                await asyncio.wait(news, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
            if not self._is_wanted:
                raise Cancelled("stopped before all ranks were there")
            if not forming.done():
                raise NotDone(Failure("Unavailable", "ranks did not meet in time", {"missed": True, "peer": "a rank"}))
            self._group = forming.result()
        self._has_stood = False

    async def _advance(self, given: PieceOrder, index: int) -> int:
        """Steps of a piece from ``index`` on, for a while; how far they came."""
        if given.number != self._entered:
            is_asked = self._meeting.rank == 0 or not self._values
            fresh, versions = await self._asked_for() if is_asked else ({}, self._versions)
            await self._host.computing.work(self._key, lambda compute: self._share_values(fresh, versions))
            self._entered = given.number
        return await self._host.computing.work(self._key, lambda compute: self._together(given, index, compute))

    async def _asked_for(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Values that servers hold in other versions than this rank, and the versions of all keys."""
        since = iter(self._versions.tolist())
        asks = [
            Ask(shard, "pull", {"keys": keys, "since": [next(since) for _ in keys]})
            for shard, keys in self._keys.items()
        ]
        fresh, versions = {}, []
        for ask, answer in zip(asks, await self._host.ask(asks), strict=True):
            tensors = iter(answer.tensors)
            for key, old, new in zip(ask.meta["keys"], ask.meta["since"], answer.meta["versions"], strict=True):
                versions.append(new)
                if old != new:
                    fresh[key] = next(tensors)
        return fresh, torch.tensor(versions, dtype=torch.int64)

    def _share_values(self, fresh: Mapping[str, torch.Tensor], versions: torch.Tensor) -> None:
        """In the compute thread: all ranks take over the server values that the first rank pulled."""
        group = self._group
        assert group is not None
        if not self._values:
            self._values = {key: fresh[key].clone(memory_format=torch.contiguous_format) for key in self._all}
            self._versions.copy_(versions)
        first = versions.clone()
        group.from_first([first])
        other = (first != self._versions).to(torch.int64)
        group.most(other)
        changed = [key for key, differs in zip(self._all, other.tolist(), strict=True) if differs]
        if self._meeting.rank == 0:
            for key in changed:
                self._values[key].copy_(fresh.get(key, self._values[key]))
        group.from_first([self._values[key] for key in changed])
        self._versions.copy_(first)

    def _together(self, given: PieceOrder, index: int, compute: Compute) -> int:
        """In the compute thread: one step after the other, for a while."""
        until = time.monotonic() + WHILE
        group, data = self._group, self._data
        assert group is not None and given.part is not None
        while index < given.count:
            share = compute(partial(given.share, index, data, given.part.place))
            begin = time.monotonic()
            try:
                out, pushes = self._gradients(given, index, share, compute)
            except Cancelled:
                raise
            except Exception:
                if group.size > 1:
                    self._bucket.clear(0)
                    group.sum(list(self._bucket.flats.values()))
                raise
            if group.size > 1:
                _summed(group, self._bucket)
            averages = self._bucket.values() if group.size > 1 else pushes
            before = self._before_late(share)
            self._update(averages, share, compute)
            self._latest = given.first + index
            late = self._late_program
            if late is not None and share.rows:  # the step is applied, and counts with or without their values
                out = [*out, *[None] * late.count]
            try:
                out = self._seen_late(given, index, share, before, averages, out, compute)
            finally:
                self._computed_for(time.monotonic() - begin)
                if share.rows:
                    self._log.append(_AppliedPart(given.number, index, share.place, share.parts, share.rows, out))
            index += 1
            if self._latest % EVERY == 0:
                ensure_equal(group, self._values, f"round {self._latest}")
            if time.monotonic() > until or not self._is_wanted:
                break
        return index

    def _gradients(
        self, given: PieceOrder, index: int, share: Share, compute: Compute
    ) -> tuple[Out, list[torch.Tensor]]:
        """This rank's fetches from its rows, and its contribution to the sum."""
        if not share.rows:
            self._bucket.clear(1)
            return [], []
        out, pushes = self._own(share, compute)
        brought = self._in_order(pushes)
        if self._meeting.size == 1:
            for push in pushes:
                replace(push, weights=()).ensure_finite(self._host.name)  # no other rank has weight
        else:
            whole = given.whole(index, self._data)
            self._bucket.fill(brought, share.rows / whole if whole else 1.0, is_first=share.place == 0)
        return out, brought

    def _own(self, share: Share, compute: Compute) -> tuple[Out, list[Push]]:
        """This rank's fetches and gradients from its rows."""
        out, pushes = compute(partial(self._program.run, share.feeds, self._values, share.run, self._host.name))
        return self._kept(out), pushes

    @property
    def _data(self) -> Rows | None:
        """The data that was sent ahead."""
        return None if self._ahead is None else self._ahead.data

    def _before_late(self, share: Share) -> dict[str, torch.Tensor]:
        """Copies of values for late fetches, taken before the update overwrites the originals in place."""
        if self._late_program is None or not share.rows or share.place:
            return {}
        keys = itertools.chain(*keys_by_shard(self._late_program.homes).values())
        return {key: self._values[key].clone() for key in keys}

    def _seen_late(
        self, given: PieceOrder, index: int, share: Share, before: Mapping[str, torch.Tensor],
        averages: Sequence[torch.Tensor], out: Out, compute: Compute,
    ) -> Out:  # fmt: skip
        """All fetches of an applied step, of which the late ones had no values yet in ``out``."""
        late = self._late_program
        if late is None or not share.rows or share.place:
            return out
        feeds = [(shard, at) for shard, update in self._updates.items() for at in range(len(update.kinds))]
        found = self._of_late(
            late, given, index, share, before, self._values, dict(zip(feeds, averages, strict=True)), compute
        )
        return [*out[: -late.count], *self._kept(found)] if late.count else out

    def _kept(self, out: Out) -> Out:
        """Fetched values, copied from memory of Variables and of the bucket, since the next step overwrites both."""
        return apart_from([*self._values.values(), *self._bucket.flats.values()], out)

    def _in_order(self, pushes: Sequence[Push]) -> list[torch.Tensor]:
        """The inputs of the updates, in the updates' order."""
        of = {push.shard: push for push in pushes}
        found: list[torch.Tensor] = []
        for shard, update in self._updates.items():
            found += update.fitting(of[shard].tensors)
        return found

    def _update(self, averages: Sequence[torch.Tensor], share: Share, compute: Compute) -> None:
        """Apply the averages: every update is computed before any is written."""
        run = share.run - share.place * REPLICA if share.rows else share.run
        rest = iter(averages)
        feeds = {shard: [next(rest) for _ in update.kinds] for shard, update in self._updates.items()}
        self._commit(self._updates, feeds, run, compute)

    def _commit(
        self, updates: Mapping[int, ShardProgram], feeds: Mapping[int, Sequence[torch.Tensor]], run: int,
        compute: Compute,
    ) -> None:  # fmt: skip
        """Make updates of these feeds, by shard."""
        begun = []
        for shard, update in updates.items():
            storages = [self._values[key] for key in update.reads]
            begun.append((update, compute(partial(update.compute, feeds[shard], storages, run))))
        for update, pending in begun:
            update.commit(pending)


class OuterProgram(NamedTuple):
    """An outer step: what it computes of differences, whose pieces these are, and its updates, by shard."""

    program: ComputeProgram
    updates: Mapping[int, ShardProgram]
    pieces: Sequence[tuple[Piece, ...]]


class LocalReplica(Replica):
    """A rank that takes steps on its own, and has the mean over ranks after ``every`` of them, and after each piece.

    With an ``outer`` step it goes from the values of the last meeting along their difference to that mean.
    Steps count when the ranks have met. Until then the values of the last meeting are kept: a rank that cannot go on
    goes back to them.
    """

    def __init__(self, *about: Any, every: int, outer: OuterProgram | None = None, **ranks: Any) -> None:
        self._every, self._outer = every, outer
        super().__init__(*about, **ranks)
        self._written = [key for update in self._updates.values() for key in update.writes]
        self._means: Bucket | None = None  # of all that is written
        self._met: list[torch.Tensor] = []  # values of the last meeting

    def _together(self, given: PieceOrder, index: int, compute: Compute) -> int:
        """In the compute thread: from meeting to meeting, for a while."""
        until = time.monotonic() + WHILE
        group = self._group
        assert group is not None
        while index < given.count:
            end = min(given.count, index + self._every - index % self._every)
            self._met = [self._values[key].clone() for key in self._written]
            try:
                steps = self._alone(given, index, end, compute)
            except BaseException as error:
                self._return()
                if group.size > 1 and not isinstance(error, Cancelled):
                    self._mean_bucket.clear(0)
                    group.sum(list(self._mean_bucket.flats.values()))
                raise
            if steps is None:
                break
            try:
                self._average(given, steps)
                if self._outer is not None:
                    self._step_on(self._outer, compute)
            except BaseException:
                self._return()
                raise
            before, self._latest = self._latest or 0, given.first + end - 1
            self._log += [part for part, _ in steps if part is not None]
            index = end
            if before // EVERY != self._latest // EVERY:
                ensure_equal(group, self._values, f"round {self._latest}")
            if time.monotonic() > until or not self._is_wanted:
                break
        return index

    def _alone(
        self, given: PieceOrder, index: int, end: int, compute: Compute
    ) -> list[tuple[_AppliedPart | None, int]] | None:
        """Steps of this rank, with its rows of each and those of all; None once nobody wants them."""
        assert given.part is not None
        steps: list[tuple[_AppliedPart | None, int]] = []
        for step in range(index, end):
            if not self._is_wanted:
                self._return()
                return None
            share = compute(partial(given.share, step, self._data, given.part.place))
            part, begin = None, time.monotonic()
            if share.rows:
                out, pushes = self._own(share, compute)
                for push in pushes:
                    push.ensure_finite(self._host.name)
                self._update(self._in_order([push.counted for push in pushes]), share, compute)
                part = _AppliedPart(given.number, step, share.place, share.parts, share.rows, out)
                self._computed_for(time.monotonic() - begin)
            steps.append((part, given.whole(step, self._data)))
        return steps

    def _average(self, given: PieceOrder, steps: Sequence[tuple[_AppliedPart | None, int]]) -> None:
        """Give all written Variables the mean over ranks, by the rows that each has computed."""
        group, bucket = self._group, self._mean_bucket
        assert group is not None and given.part is not None
        if group.size == 1:
            return
        own, rows = sum(part.rows for part, _ in steps if part is not None), sum(rows for _, rows in steps)
        if own:
            share = own / rows if rows else 1 / group.size  # batches without rows: each rank has all of them
            bucket.fill([self._values[key] for key in self._written], share, is_first=given.part.place == 0)
        else:
            bucket.clear(1)
        _summed(group, bucket)
        for key, mean in zip(self._written, bucket.values(), strict=True):
            self._values[key].copy_(mean)

    def _step_on(self, outer: OuterProgram, compute: Compute) -> None:
        """Take the outer step from the values of the last meeting; every rank computes the same."""
        met, differences = dict(zip(self._written, self._met, strict=True)), []
        for pieces in outer.pieces:
            differences.append(joined(pieces, met) - joined(pieces, self._values))
        for piece in itertools.chain(*outer.pieces):
            self._values[piece.key].copy_(met[piece.key])
        run = partial(outer.program.run, differences, self._values, 0, self._host.name)
        _, pushes = compute(run)
        self._commit(outer.updates, {push.shard: push.tensors for push in pushes}, 0, compute)

    @property
    def _writes_there(self) -> dict[int, list[str]]:
        found = super()._writes_there
        for shard, update in () if self._outer is None else self._outer.updates.items():
            found[shard] = list(dict.fromkeys([*found.get(shard, ()), *update.writes]))
        return found

    def _reads_with(self, late: LateProgram | None) -> dict[int, list[str]]:
        """Also what the outer step takes."""
        found = super()._reads_with(late)
        if self._outer is not None:
            found = both(found, self._outer.program.reads)
            found = both(found, {shard: list(update.reads) for shard, update in self._outer.updates.items()})
        return found

    @property
    def _mean_bucket(self) -> Bucket:
        if self._means is None:
            specs = [_precise(Spec.of(self._values[key])) for key in self._written]
            kinds = ["grad" if spec.dtype.is_floating_point else "value" for spec in specs]
            self._means = Bucket(kinds, specs)
        return self._means

    def _return(self) -> None:
        """Go back to the values of the last meeting."""
        for key, value in zip(self._written, self._met, strict=True):
            self._values[key].copy_(value)


def _precise(spec: Spec) -> Spec:
    """The spec that a value is averaged by: a single float32, such as the step of Adam, stays whole where all agree."""
    return replace(spec, dtype=torch.float64) if spec.dtype.is_floating_point and not spec.shape else spec


def _summed(group: Group, bucket: Bucket) -> None:
    """Sum a bucket over all ranks, which must all be ready."""
    group.sum(list(bucket.flats.values()))
    if not bucket.is_ready(group.size):
        raise NotDone(Failure(
            "Unavailable", "another rank could not take the step", {"missed": True, "peer": "another rank"}
        ))  # fmt: skip
