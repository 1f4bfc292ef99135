"""Deadlocks on a cluster: tasks, servers and the notebook each know a part of the wait-for graph.

Tasks report their waiting steps with the later operations of each; after that servers report the attempts that still
wait. A step whose attempts all wait has stood still in between, so the report is a consistent snapshot. The notebook
adds its own calls, and `tfnb.state.waits` decides. Semantics S-67.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tfnb.cluster.queues.queues_there import Channels, QueueChannel, RemoteQueue
from tfnb.cluster.wire.messages import Failure, Ok, Outcome
from tfnb.errors import TfnbError
from tfnb.state.queue_machine import Attempt, QueueHost
from tfnb.state.waits import LOOK, NOTICE, WAITS, QueueOperation, Runner, wait_graph

ANSWER = 1.0  # seconds that a task or server has to say who waits
KINDS = ("enqueue", "dequeue", "close")
Id = tuple[str, int]  # of an attempt: its channel, and its number there


def _id(attempt: Attempt) -> Id | None:
    """The identity of an attempt waiting at a server; None if the attempt is over, or its queue is not remote."""
    machine = attempt.machine
    number = machine.channel.number_of(attempt) if isinstance(machine, RemoteQueue) else None
    return None if number is None or not isinstance(machine, RemoteQueue) else (machine.channel.id, number)


def who_waits(runners: Iterable[Runner], channels: Mapping[int, QueueChannel]) -> list[Any]:
    """Of each waiting runner of a task: pending attempts, later queue operations with the attempts before each, and the
    part.
    """
    shards = {channel: shard for shard, channel in channels.items()}
    found: list[Any] = []
    for runner in runners:
        with suppress(RuntimeError):  # it goes on just now
            attempts = [_id(attempt) for attempt in runner.attempts()]
            later = [
                [one.what, one.kind, shards.get(one.machine.channel), one.machine.key, list(map(_id, one.behind))]
                for one in runner.later() if isinstance(one.machine, RemoteQueue)
            ]  # fmt: skip
            part = runner.part()
            is_blocked = part is not None and runner.is_blocked and runner.inbox.empty()
            if (runner.is_idle or is_blocked) and None not in attempts:
                found.append([attempts, later, part])
    return found


@dataclass(eq=False)
class QueueUse:
    """A step in progress that uses queues (shard and key of each).

    parts: number of its tasks. round: its latest one; tell: receives the failure of a deadlock. waits: attempts awaited
    by the step, since when, and whether the user was told.
    """

    queues: Sequence[tuple[int, str]] = ()
    parts: int = 1
    round: int = -1
    tell: Callable[[Failure], None] = lambda failure: None
    waits: frozenset[Id] = frozenset()
    since: float = 0.0
    is_noticed: bool = False

    def wait(self, attempts: Iterable[Id], now: float) -> None:
        """Record the attempts that the step awaits; a change restarts the clock."""
        if self.waits != (waits := frozenset(attempts)):
            self.waits, self.since, self.is_noticed = waits, now, False


class Deadlocks:
    """Detects deadlocks while steps use queues. In the event loop.

    ask: reports of all tasks, and after these of all servers, within some seconds. notice: tells the user of a long
    wait. channels: of the notebook.
    """

    def __init__(
        self, ask: Callable[[float], Awaitable[tuple[Sequence[Outcome], Sequence[Outcome]]]],
        notice: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._ask, self._notice = ask, notice
        self.channels: Channels | None = None
        self._uses: set[QueueUse] = set()
        self._recent: set[QueueUse] = set()  # those since the last look began, also if they are over
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def use(self, queues: Sequence[tuple[int, str]], parts: int = 1) -> Iterator[QueueUse]:
        """Register a step that uses queues, on so many tasks, for the duration of the block."""
        use = QueueUse(queues, parts)
        if queues:
            self._uses.add(use)
            self._recent.add(use)
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch())
        try:
            yield use
        finally:
            self._uses.discard(use)

    async def _watch(self) -> None:
        try:
            while self._uses:
                await asyncio.sleep(LOOK)
                with suppress(TfnbError):
                    await self._look()
        finally:
            self._watching = None

    async def _look(self) -> None:
        self._recent = set(self._uses)
        steps, there = await self._ask(ANSWER)
        if self.channels is not None and all(isinstance(answer, Ok) for answer in there):
            waiting = [one for answer in steps if isinstance(answer, Ok) for one in answer.meta["waits"]]
            view = _View(self.channels, [answer.meta for answer in there if isinstance(answer, Ok)])
            runners = view.runners(waiting, self._recent)
            WAITS.look(list(runners), view.awake(WAITS.runners), view.past)
            for runner, use in runners.items():
                if runner.deadlock is not None:
                    error = runner.deadlock
                    use.tell(Failure(type(error).__name__, error.message, {"graph": error.details}))
                elif use.waits and not use.is_noticed and time.monotonic() - use.since >= NOTICE:
                    use.is_noticed = True
                    self._notice(f"still waiting:\n{wait_graph(runner.operations())}")


class _View:
    """Pending attempts as reported by servers: ``attempts``, and the ``rounds`` of each.

    past: by queue and kind of operation, the users so far.
    """

    def __init__(self, channels: Channels, there: Sequence[Mapping[str, Any]]) -> None:
        self._channels = channels
        self.attempts: dict[Id, Attempt] = {}
        self.rounds: dict[Id, int | None] = {}
        self.past: dict[QueueHost, Mapping[str, set[str]]] = {}
        behind: dict[Id, list[Id]] = {}
        for shard, meta in enumerate(there):
            for key, (level, past) in meta["queues"].items():
                if (machine := self._machine(shard, key)) is not None:
                    machine.heard(level)
                    earlier = machine.earlier
                    self.past[machine] = {kind: {*past[kind], *earlier.get(kind, ())} for kind in past}
            for name, number, key, kind, what, is_placed, followers, round_ in meta["open"]:
                if (machine := self._machine(shard, key)) is not None:
                    at = (str(name), int(number))
                    self.attempts[at] = self._attempt(shard, at, machine, kind, what, is_placed)
                    self.rounds[at], behind[at] = round_, [(str(name), int(other)) for other in followers]
        for at, followers in behind.items():
            if followers:
                self.attempts[at].followers = [self.attempts[one] for one in followers if one in self.attempts]

    def _machine(self, shard: int, key: str) -> RemoteQueue | None:
        return self._channels.to(shard).queues.get(key)

    def _attempt(self, shard: int, at: Id, machine: RemoteQueue, kind: Any, what: str, is_placed: bool) -> Attempt:
        """The attempt of this process, or a stand-in for a task's attempt."""
        channel = self._channels.to(shard)
        act = channel.open.get(at[1]) if at[0] == channel.id else None
        if act is not None and act.attempt is not None:
            return act.attempt
        attempt = Attempt(machine, kind, lambda attempt: None, what=what)
        attempt.is_placed = is_placed
        return attempt

    def runners(self, waiting: Iterable[Any], uses: Iterable[QueueUse]) -> dict[Runner, QueueUse]:
        """A runner for each step: pending attempts and later operations, or all possible operations if the step may be
        at work.
        """
        now, found = time.monotonic(), dict[Runner, QueueUse]()
        at_work = set(uses)  # those without a round, too, wait for a task to take them: they may do all that they do
        of_round = {use.round: use for use in at_work if use.round >= 0}
        for attempts, later, round_ in _steps(waiting, of_round):
            ids = [(str(name), int(number)) for name, number in attempts]
            round_ = round_ if round_ is not None or not ids else self.rounds.get(ids[0])
            use = None if round_ is None else of_round.pop(round_, None)
            operations = list(self._operations(later))
            if use is not None and self.attempts.keys() >= set(ids) and len(operations) == len(later):
                at_work.discard(use)
                held = [self.attempts[at] for at in ids]
                runner = Runner(attempts=_always(held), later=_always(operations), name=f"round {use.round}")
                runner.since = now
                use.wait(ids, now)
                found[runner] = use
        for use in at_work:
            use.wait((), now)
            machines = [machine for queue in use.queues if (machine := self._machine(*queue)) is not None]
            found[Runner(may=_always([(machine, kind) for machine in machines for kind in KINDS]))] = use
        return found

    def _operations(self, later: Iterable[Any]) -> Iterator[QueueOperation]:
        for what, kind, shard, key, behind in later:
            machine = None if shard is None else self._machine(shard, key)
            ids = [None if at is None else (str(at[0]), int(at[1])) for at in behind]
            if machine is not None and all(at in self.attempts for at in ids):
                yield QueueOperation(what, kind, machine, [self.attempts[at] for at in ids if at is not None])

    def awake(self, runners: Iterable[Runner]) -> list[Runner]:
        """Runners of this process with an attempt that may have ended at its server."""
        return [
            runner for runner in list(runners)
            if any(isinstance(one.machine, RemoteQueue) and _id(one) not in self.attempts for one in runner.attempts())
        ]  # fmt: skip


def _steps(waiting: Iterable[Any], uses: Mapping[int, QueueUse]) -> Iterator[tuple[list[Any], list[Any], int | None]]:
    """Of each waiting step: pending attempts, later operations, and the round (None for a step on one task).

    A step on several tasks waits once all parts wait and no message between them is in flight.
    """
    parts: dict[int, list[Any]] = {}
    for attempts, later, part in waiting:
        if part is None:
            yield attempts, later, None
        else:
            parts.setdefault(int(part[0]), []).append((attempts, later, int(part[1]), int(part[2])))
    for round_, found in parts.items():
        everywhere = round_ in uses and len(found) == uses[round_].parts
        if everywhere and sum(sent for *_, sent, _ in found) == sum(got for *_, got in found):
            yield [one for part in found for one in part[0]], [one for part in found for one in part[1]], round_


def _always(value: object) -> Callable[[], Any]:
    return lambda: value
