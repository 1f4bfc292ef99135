"""The loop of a task that trains on a copy of its own, pushes gradients to servers, and fetches values now and then.

Of Variables that gradients read, such as Parameters, the servers' values count, and a task has a copy, replaced at each
fetch; likewise of those that the update only reads, such as a learning rate. Of Variables that the update alone writes,
such as optimizer slots, the servers have theirs, changed by pushes. A task has its own, which begin with the servers'
values, and which its local steps change; they are neither fetched nor pushed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch

from tfnb.cluster.tasks.computing import Compute
from tfnb.cluster.tasks.pieces import PieceOrder, Share
from tfnb.cluster.tasks.programs import LARGEST_CHANGE, LateProgram, Push, ShardProgram, apart_from, change_of
from tfnb.cluster.tasks.resident import TrainingLoop, _AppliedPart, _StepInFlight, _StepResult
from tfnb.cluster.wire.messages import Ask, Ok
from tfnb.errors import NonFinite

MEASURED = 5  # changes of gradients: the median of the last ones is told


class DownpourLoop(TrainingLoop):
    """Pushes the sum of the gradients of ``n_push`` steps, and fetches values after every ``n_fetch`` steps.

    Between two fetches a local step applies each gradient to the task's copy, by the same ``updates`` as the servers
    (by shard). Steps count when they are pushed: until then nobody else has seen anything of them.
    """

    def __init__(self, *about: Any, updates: Mapping[int, ShardProgram], n_fetch: int, n_push: int) -> None:
        self._updates, self._n_fetch, self._n_push = dict(sorted(updates.items())), n_fetch, n_push
        self._copies: dict[str, torch.Tensor] = {}  # by key, Variables that local steps have changed
        self._sums: dict[int, Push] = {}  # by shard, gradients that are not pushed yet
        self._unpushed: list[_AppliedPart] = []  # their steps
        self._age = 0  # steps since the last fetch
        self._is_fetching = False
        self._reference: tuple[Share, list[Push]] | None = None  # an earlier step, with its gradients
        self._has_pushed = False  # since then
        self._changes = deque[float](maxlen=MEASURED)
        super().__init__(*about)

    def _reads_with(self, late: LateProgram | None) -> dict[int, list[str]]:
        """All that is fetched: beside what gradients read, Variables that updates read and do not write."""
        found = {shard: list(keys) for shard, keys in super()._reads_with(late).items()}
        if self._n_fetch > 1:
            for shard, update in self._updates.items():
                known = found.setdefault(shard, [])
                known += [key for key in update.reads if key not in update.writes and key not in known]
        return found

    @cached_property
    def _slots(self) -> dict[int, list[str]]:
        """Keys, by shard, of Variables that are the task's own once its local steps begin."""
        if self._n_fetch == 1:
            return {}
        return {
            shard: [key for key in update.reads if key not in self._reads.get(shard, ())]
            for shard, update in self._updates.items()
        }

    # -- when it stands ---------------------------------------------------------------------------------------------

    async def _goes_on(self) -> bool:
        if self._unpushed and self._is_wanted:  # it stands where all gradients are pushed
            return True
        return await super()._goes_on()

    async def _enter(self) -> None:
        """Go to work: fetch if others wrote meanwhile, so that one task alone does the same however often it stands."""
        self._has_stood = False
        if not await self._is_overtaken():
            return
        self._age, self._is_fetching = 0, True
        await super()._enter()
        slots = {shard: [key for key in keys if key not in self._held] for shard, keys in self._slots.items()}
        about = {shard: {"keys": keys, "since": [-1] * len(keys)} for shard, keys in slots.items() if keys}
        await self._ask([Ask(shard, "pull", meta) for shard, meta in about.items()])

    async def _is_overtaken(self) -> bool:
        """Whether servers have writes of others since the last fetch."""
        if self._writes.keys() < {*self._asked}:
            return True
        answers = await self._host.ask([Ask(shard, "pull", {"keys": []}) for shard in self._asked])
        return any(
            answer.meta["version"] != self._writes[shard] for shard, answer in zip(self._asked, answers, strict=True)
        )

    # -- a step -----------------------------------------------------------------------------------------------------

    @property
    def _weights(self) -> dict[str, torch.Tensor]:
        return {**super()._weights, **self._copies}

    def _streamed(self, given: PieceOrder, index: int, done: _StepResult, compute: Compute) -> _StepInFlight:
        """In the compute thread: a local step, and the requests to servers that are due."""
        copies = self._copies.values()
        pushes = [replace(push, tensors=tuple(apart_from(copies, push.tensors))) for push in done.pushes]
        done = done._replace(out=apart_from(copies, done.out), pushes=pushes)
        return super()._streamed(given, index, done, compute)

    def _requests(self, given: PieceOrder, index: int, done: _StepResult, compute: Compute) -> list[Ask]:
        if given.measures and not self._age:
            self._measure(done, compute)
        self._add(done.pushes)
        self._age += 1
        self._is_fetching = self._age >= self._n_fetch
        if not self._is_fetching or any(self._slots.values()):  # slots have seen the gradient of each step
            self._step_alone(done, compute)
        if self._is_fetching:
            self._age = 0
        if not self._is_pushed_with(given, index):
            return self._asks("pull", {}, {}, None) if self._is_fetching else []
        self._has_pushed = True
        sums, self._sums = [*self._sums.values()], {}
        for push in sums:
            push.ensure_finite(self._host.name)
        asks = super()._requests(given, index, done._replace(pushes=sums), compute)
        if self._is_fetching:
            return asks
        return [ask._replace(meta={**ask.meta, "reads": [], "since": []}) for ask in asks if ask.method == "push"]

    def _measure(self, done: _StepResult, compute: Compute) -> None:
        """Compute how much the pushes since an earlier step have changed the gradients of its rows."""
        if self._reference is not None and not self._has_pushed:
            return
        if self._reference is not None:
            share, before = self._reference
            run = partial(self._program.run, share.feeds, self._weights, share.run, self._host.name)
            try:
                self._changes.append(change_of(before, compute(run)[1]))
            except NonFinite:  # of no step of the training
                self._changes.append(LARGEST_CHANGE)
            if len(self._changes) == self._changes.maxlen:
                self._change = median(self._changes)
        self._reference, self._has_pushed = (done.share, done.pushes) if done.share.rows else None, False

    def _operation(self, given: PieceOrder, index: int) -> int:
        return given.first + index // self._n_push

    def _is_pushed_with(self, given: PieceOrder, index: int) -> bool:
        """Whether a push is due after a step; a piece that is lent again begins where a push does."""
        return (index + 1) % self._n_push == 0 or index + 1 == given.count

    def _add(self, pushes: list[Push]) -> None:
        """Add the gradients of a step to those that are not pushed yet."""
        if self._n_push == 1:
            self._sums = {push.shard: push for push in pushes}
            return
        for push in pushes:
            before = self._sums.get(push.shard)
            kinds = self._updates[push.shard].kinds
            self._sums[push.shard] = push.counted if before is None else before.plus(push.counted, kinds)

    def _step_alone(self, done: _StepResult, compute: Compute) -> None:
        """Apply the gradients of a step to the task's own copy: every update is computed before any is written."""
        if not done.share.rows:
            return
        begun = []
        for push in done.pushes:
            update = self._updates[push.shard]
            feeds = update.fitting(push.counted.tensors)
            for key in update.writes:
                if key not in self._copies:
                    self._copies[key] = self._held[key][1].clone(memory_format=torch.contiguous_format)
            values = self._weights
            storages = [values[key] for key in update.reads]
            begun.append((update, compute(partial(update.compute, feeds, storages, done.share.run))))
        for update, pending in begun:
            update.commit(pending)

    def _applied(self, given: PieceOrder, index: int, done: _StepResult) -> None:
        """Log the steps of a push, once it is answered."""
        share = done.share
        self._unpushed.append(_AppliedPart(given.number, index, share.place, share.parts, share.rows, done.out))
        if self._is_pushed_with(given, index):
            self._log += self._unpushed
            self._unpushed = []

    # -- answers ----------------------------------------------------------------------------------------------------

    def _take(self, ask: Ask, answer: Ok) -> None:
        super()._take(ask, answer)
        for key in ask.meta["keys" if ask.method == "pull" else "reads"]:
            self._copies.pop(key, None)

    def _count_writes(self, ask: Ask, answer: Ok) -> None:
        before = self._writes.get(ask.shard)
        super()._count_writes(ask, answer)
        if not self._is_fetching and before is not None:  # the next push is of values from before this one
            self._writes[ask.shard] = before + 1
