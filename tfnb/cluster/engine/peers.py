"""Calls to tasks and servers, and failure detection: first by Dask's word, then by unanswered pings.

A call to shards is one message for each process, and keeps its identity when it is repeated. In the event loop, which
may be late itself (`Looks`): what it does not hear then proves nothing about a peer.

A silent member is waited for: until it answers again, until Dask says that it is dead, until its address refuses
connections, or until it was silent for `GIVEN_UP` seconds (60). While the cluster closes, or once another server is
lost, a silent server is dead after `SILENCE` seconds (4). Calls to a silent server go on, under their identities, when
it answers again. A task is silent, a suspect, after `SILENCE` seconds (4; of a successor that has computed nothing yet,
up to 60) and two pings without an answer: calls to it end, other tasks compute its rows (synchronous training begins a
new generation without it), and its late contributions are dropped. The supervisor waits for it, and it joins again as a
newcomer, or is given up after `GIVEN_UP` seconds (60).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from tfnb.cluster.engine.members import Member
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import plan as p
from tfnb.cluster.wire.asking import identified, messages, sent
from tfnb.cluster.wire.messages import GIVEN_UP, SILENCE, Ask, Failure, NotSent, Ok, Outcome, Refusal, Unknown
from tfnb.cluster.wire.transport import ClientLink

T = TypeVar("T")
Settled = Ok | Failure | e.ShardLost

LOOK = 0.05  # seconds between looks at who is alive
PATIENCE = 1.0  # seconds a call is out before its peers are pinged
PING = 1.5  # seconds that the first ping of a server has; the next one has twice as many, up to ten times
MISSES = 3  # refused connections in a row that are a death; one unanswered ping fewer makes a silent task a suspect
ON_TIME = 0.3  # of its looks that an event loop has to take to hear an answer: a new connection takes twenty turns
LATEST = 60.0  # seconds after which silence counts though this event loop is late


class Looks:
    """Counts how often this event loop ran during a block: every LOOK / 2 seconds unless the loop is late."""

    def __enter__(self) -> Looks:
        self._begin, self._count = time.monotonic(), 0
        self._looking = asyncio.create_task(self._look())
        return self

    def __exit__(self, *exc: object) -> None:
        self._end = time.monotonic()
        self._looking.cancel()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK / 2)
            self._count += 1

    @property
    def were_late(self) -> bool:
        """Whether the loop ran too seldom to hear an answer."""
        return self._count + 2 < ON_TIME * (self._end - self._begin) / (LOOK / 2)


@dataclass(slots=True)
class MemberWait:
    """A wait for a member that does not answer, since the instant ``begin``.

    ``silence``: seconds, without those in which this process stood still itself. ``refusals``: connections that its
    address refused, one after the other.
    """

    begin: float
    silence: float
    pings: int = 0
    refusals: int = 0
    is_said: bool = False

    async def pass_time(self, *calls: asyncio.Future[Any]) -> None:
        """Wait for calls, for a short time."""
        before = time.monotonic()
        await asyncio.wait(calls or {asyncio.create_task(asyncio.sleep(LOOK))}, timeout=LOOK)
        self.silence += min(time.monotonic() - before, 2 * LOOK)


def _waited_for(member: Member, silence: float) -> str:
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + GIVEN_UP - silence))
    meanwhile = ", and others compute its rows" * (not member.alive)
    return (
        f"{member.name} ({member.peer.addr}) has not answered for {silence:.0f} s; Dask lists its worker: "
        f"it is waited for until {until}{meanwhile}"
    )


class ClusterPeers:
    """The members of a cluster as the notebook calls them.

    tasks: also those that come later. servers: processes, of which one may hold several shards. ``shards``: the server
    of each. report: tells all that is in progress of an event. say: tells the user, in one line. ``silent``: servers
    that are waited for. ``is_closing``, or after the loss of another server: a silent server is dead after `SILENCE`
    seconds in place of `GIVEN_UP`.
    """

    def __init__(
        self, link: ClientLink, epoch: int, tasks: Sequence[Member], servers: Sequence[Member],
        report: Callable[[p.Event], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.link, self.epoch, self._report, self._say = link, epoch, report, say
        self.silent: set[Member] = set()
        self.is_closing = False
        self._waits: dict[Member, asyncio.Task[bool]] = {}  # for an answer of each server
        self.tasks, self.servers = list(tasks), list(servers)
        held = {shard: member for member in servers for shard in member.shards}
        self.shards = [held[shard] for shard in sorted(held)]

    # -- calls to shards -----------------------------------------------------------------------------------------

    async def settled(
        self, shard: int, method: str, meta: dict[str, Any], tensors: Sequence[torch.Tensor] = ()
    ) -> Settled:
        """A call to a shard, repeated under one identity until answered or until its server is dead."""
        (answer,) = await self.settled_on([Ask(shard, method, meta, tensors)])
        return answer

    async def settled_on(self, asks: Sequence[Ask]) -> list[Settled]:
        """`settled` for calls to several shards, with one message for each process."""
        return await self._by_process(asks, self._settled)

    async def tell(self, asks: Sequence[Ask], deadline: float) -> list[Outcome]:
        """Calls to shards, tried once, where their servers live."""

        async def told(member: Member, asks: Sequence[Ask]) -> list[Outcome]:
            if not member.alive:
                return [NotSent(f"{member.name} is gone")] * len(asks)
            send = partial(self.link.call, member.peer, epoch=self.epoch, deadline=deadline)
            return await sent(send, identified(asks, self.link))

        return await self._by_process(asks, told)

    async def _by_process(
        self, asks: Sequence[Ask], call: Callable[[Member, list[Ask]], Awaitable[Sequence[T]]]
    ) -> list[T]:
        """Group calls by process, make one ``call`` for each, and return the answers in the order of all calls."""
        of: dict[Member, list[int]] = {}
        for place, ask in enumerate(asks):
            of.setdefault(self.shards[ask.shard], []).append(place)
        ends = await asyncio.gather(*(call(member, [asks[i] for i in places]) for member, places in of.items()))
        found: dict[int, T] = {}
        for places, mine in zip(of.values(), ends, strict=True):
            found.update(zip(places, mine, strict=True))
        return [found[place] for place in range(len(asks))]

    async def _settled(self, member: Member, asks: Sequence[Ask]) -> list[Settled]:
        """Calls to the shards of one process."""
        found: dict[int, Ok | Failure] = {}
        left = dict(enumerate(identified(asks, self.link)))
        while left and member.alive:
            some = messages(list(left.values()), self.link.budget)[0]
            call = sent(partial(self.link.call, member.peer, epoch=self.epoch), some)
            died: list[Outcome] = [Unknown(f"{member.name} died", lost=True)] * len(some)
            outcomes = await self._unless_dead(member, call, died)
            for place, outcome in zip(list(left), outcomes, strict=False):
                match outcome:
                    case Ok() | Failure():
                        found[place] = outcome
                    case Refusal("stale" | "too-old" | "unknown-plan" | "protocol", message):
                        found[place] = Failure("StepAborted", message)
                    case Refusal("poisoned", message):
                        member.info["poisoned"] = message
                        member.lose()
                    case Refusal("fenced" | "unknown-task", message):
                        member.lose()
            left = {place: ask for place, ask in left.items() if place not in found}
            if any(isinstance(outcome, NotSent | Unknown) for outcome in outcomes) and not await self.verify(member):
                break
        if left:
            member.lose()
        return [found.get(place, e.ShardLost(ask.shard)) for place, ask in enumerate(asks)]

    async def unless_dead(self, member: Member, call: Awaitable[Outcome]) -> Outcome:
        """The call's outcome, or Unknown as soon as the peer is found dead."""
        return await self._unless_dead(member, call, Unknown(f"{member.name} died", lost=True))

    async def _unless_dead(self, member: Member, call: Awaitable[T], otherwise: T, *, is_ping: bool = False) -> T:
        """The result of a call, or ``otherwise`` as soon as the scheduler or pings report the peer as dead."""
        asked, died = asyncio.ensure_future(call), asyncio.ensure_future(self._death(member, is_ping))
        try:
            await asyncio.wait({asked, died}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else otherwise
        finally:
            asked.cancel()
            died.cancel()

    # -- who is alive ---------------------------------------------------------------------------------------------

    async def _death(self, member: Member, is_ping: bool) -> None:
        """Wait until a member is dead; a long wait for an answer other than a ping's sends pings."""
        since = time.monotonic()
        while member.alive and member.reported:
            await asyncio.sleep(LOOK / 2)
            if not is_ping and time.monotonic() - since > PATIENCE:
                await self.verify(member)
                since = time.monotonic()

    async def verify(self, member: Member) -> bool:
        """Whether a peer that a call failed to is alive: by the scheduler's word, then by pings.

        For a silent server it waits. A task that is silent is a suspect from then on.
        """
        if member in self.servers:
            return await self.answers_again(member)
        begin = time.monotonic()
        since = begin - self._silence(member, begin)
        missed = refusals = 0
        while member.is_there and refusals < MISSES:
            if missed >= MISSES - 1 and time.monotonic() - since >= member.patience:
                break
            if missed == 1:
                self._report(e.MissedPing(self.tasks.index(member)))
            self.link.confirm(member.peer.addr)  # the registry's entry is good: it may be dialled once more
            ping = self.link.call(member.peer, "ping", epoch=self.epoch)
            with Looks() as looks:
                answer: Outcome = await self._unless_dead(member, ping, Unknown(), is_ping=True)
            match answer:
                case Ok(meta={"incarnation": member.peer.incarnation}):
                    return True
                case Ok() | Refusal():  # of another process at this address
                    refusals = MISSES
                case _ if looks.were_late and time.monotonic() - begin < LATEST:
                    since = time.monotonic()
                case _:
                    missed += 1
                    refusals = refusals + 1 if await self.link.refuses(member.peer.addr) else 0
                    await asyncio.sleep(LOOK)  # the scheduler's word may be on its way
        if refusals >= MISSES or not member.reported:
            member.lose()
        else:
            member.fall_silent(since)
        self.link.suspect.add(member.peer.addr)
        return False

    def lost(self, task: int) -> e.TaskLoss | e.ShardLost:
        """The event that a task is lost, dead or silent; of one that holds shards the loss of these counts."""
        member = self.tasks[task]
        return e.ShardLost(member.shards[0]) if member.shards else e.TaskLoss(task, member.is_silent)

    def _silence(self, member: Member, now: float) -> float:
        """Seconds since a member's last answer; 0 if so many that nobody can have asked lately."""
        if member.silent_since:
            return now - member.silent_since
        silence = now - self.link.heard.get(member.peer.addr, 0.0)
        return silence if silence <= 2 * PATIENCE else 0.0

    async def answers_again(self, member: Member) -> bool:
        """Wait until a server, or a silent task, answers, or is dead: one wait for all that ask."""
        if member not in self._waits:
            self._waits[member] = waiting = asyncio.create_task(self._wait_for(member))
            waiting.add_done_callback(lambda _: self._waits.pop(member))
        return await asyncio.shield(self._waits[member])

    async def _wait_for(self, member: Member) -> bool:
        begin = time.monotonic()
        wait, limit = MemberWait(begin, self._silence(member, begin)), partial(self._limit, member)
        has_answered = False
        try:
            while not has_answered and member.may_answer and wait.refusals < MISSES and wait.silence < limit():
                match await self._pinged(member, wait):
                    case None:
                        has_answered = self._was_heard(member, wait)
                    case Ok(meta={"incarnation": member.peer.incarnation}):
                        has_answered = True
                    case Ok() | Refusal():  # of another process at this address
                        wait.refusals = MISSES
                    case _:
                        refuses = await self.link.refuses(member.peer.addr)
                        wait.refusals = wait.refusals + 1 if refuses else 0
                        await wait.pass_time()
        finally:
            self.silent.discard(member)
        if has_answered and member.may_answer:
            if wait.is_said and member.alive:
                self._say(f"{member.name} ({member.peer.addr}) answers again, after {wait.silence:.0f} s")
            return True
        if wait.silence >= limit() and member.alive:
            member.info.setdefault("poisoned", f"did not answer for {wait.silence:.0f} s")
        member.lose()
        self.link.suspect.add(member.peer.addr)
        return False

    @property
    def lost_shards(self) -> list[int]:
        """The shards whose servers are dead."""
        return [shard for shard, server in enumerate(self.shards) if not server.is_there]

    def _limit(self, member: Member) -> float:
        """Seconds of silence after which a member is dead; fewer when the cluster ends, but not for a suspect."""
        is_ending = self.is_closing or any(self.shards[shard] is not member for shard in self.lost_shards)
        return min(SILENCE, GIVEN_UP) if is_ending and member.alive else GIVEN_UP

    def _was_heard(self, member: Member, wait: MemberWait) -> bool:
        """Whether a member has answered another call since the wait began."""
        return self.link.heard.get(member.peer.addr, 0.0) > wait.begin

    async def _pinged(self, member: Member, wait: MemberWait) -> Outcome | None:
        """The outcome of one more ping; None if the member first answers another call, or is dead or given up."""
        self.link.confirm(member.peer.addr)  # the registry's entry is good: it may be dialled once more
        seconds = min(10 * PING, PING * 2**wait.pings)
        wait.pings += 1
        deadline = time.monotonic() + seconds
        asked = asyncio.ensure_future(self.link.call(member.peer, "ping", epoch=self.epoch, deadline=deadline))
        try:
            while not asked.done():
                await wait.pass_time(asked)
                if wait.silence >= PING and member.alive:
                    self.silent.add(member)
                if wait.silence >= SILENCE and not wait.is_said:
                    wait.is_said = True
                    self._say(_waited_for(member, wait.silence))
                if not member.may_answer or self._was_heard(member, wait) or wait.silence >= self._limit(member):
                    return None
            return asked.result()
        finally:
            asked.cancel()

    async def watch(self, queue: asyncio.Queue[p.Event]) -> None:
        """Report deaths, and ticks of the clock; when the work takes long, ping members without a recent answer."""
        begin = now = time.monotonic()
        pinged: dict[Member, float] = {}
        pings: dict[Member, asyncio.Task[bool]] = {}
        seen = {member for member in self.tasks if not member.alive}  # of a server that was lost before all hear, too
        try:
            while True:
                await asyncio.sleep(LOOK)
                before, now = now, time.monotonic()
                if now - before > PATIENCE / 2:  # this loop was late: answers that are here by now are heard first
                    begin = now
                for index, member in enumerate(self.tasks):
                    if member not in seen and not (member.alive and member.reported):
                        seen.add(member)
                        if not member.is_silent:
                            member.lose()
                        queue.put_nowait(self.lost(index))
                for member in self.servers:
                    if member not in seen and not (member.alive and member.reported):
                        seen.add(member)
                        member.lose()
                        for shard in member.shards:
                            queue.put_nowait(e.ShardLost(shard))
                queue.put_nowait(e.Tick())
                for member in {*self.tasks, *self.servers} - seen if now - begin > PATIENCE else ():
                    last = max(pinged.get(member, 0.0), self.link.heard.get(member.peer.addr, 0.0))
                    if now - last > PATIENCE and (member not in pings or pings[member].done()):
                        pinged[member] = now
                        pings[member] = asyncio.create_task(self.verify(member))
        finally:
            for ping in pings.values():
                ping.cancel()
