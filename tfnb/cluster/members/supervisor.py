"""Watches the workers of the Dask cluster, and makes a task on each new one while a notebook is connected.

The scheduler's registry says at once that a worker came or left. The list of workers is read then, and twice a second
without a word from it, so that no event can be missed and a scheduler that blocks plugins will do; more often while a
lost task has no successor. What changed is in the registry before it takes part, where that answers.
A worker that comes is a compute task, in the place of one that was lost if there is one. A worker with another version,
or without tfnb, is refused in one line, and training goes on without it.
A silent task keeps its name and its process while Dask lists its worker: when it answers again, what it still computes
is ended, and it joins as a newcomer. After `GIVEN_UP` seconds (60) of silence it is given up. If its worker has a
nanny, and a restart is left, it is told to end its process as soon as it hears, and the nanny starts another one. It
runs in the client's event loop, beside `engine`, which it tells who is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import chain, count
from typing import Any

from distributed import Client

from tfnb.cluster.engine.engine import Engine
from tfnb.cluster.engine.members import Member
from tfnb.cluster.members.adapting import Adapting
from tfnb.cluster.members.connection import Requirements
from tfnb.cluster.members.deploy import LOOK, WorkerGone, identities, joined
from tfnb.cluster.members.registered import Registration
from tfnb.cluster.wire.messages import Ok, Refusal
from tfnb.errors import Fenced, VersionMismatch

STARTS_WITHIN = 60.0  # seconds that a worker has for its task
SOON = 0.1  # seconds between two looks while the successor of a lost task is awaited, or a worker that was announced
SCALED_WITHIN = 10.0  # seconds in which adaptive scaling is noticed: it asks the scheduler once a second
ANNOUNCED = 2.0  # seconds that such a worker has to be running


class Supervisor:
    """Watches the workers of a connected cluster."""

    def __init__(
        self, client: Client, engine: Engine, registered: Registration, wanted: Requirements, adapting: Adapting
    ) -> None:  # fmt: skip
        self._wanted, self._adapting = wanted, adapting
        self._asks_until = 0.0  # whether workers are scaled adaptively, and nobody here would know
        self._client, self._engine, self._registered = client, engine, registered
        self._news = asyncio.Event()  # of the registry
        self._heard = 0.0  # when it came
        self._entering: set[Member] = set()  # tasks that take part as soon as the registry has them
        self._is_behind = False  # whether the registry may lack what changed
        self._refused: set[str] = set()  # addresses of workers, while they are there
        self._gone: set[Member] = set()  # whose leaving was said
        self._awaited: dict[Member, asyncio.Task[None]] = {}  # silent tasks
        self._ending: dict[Member, asyncio.Task[None]] = {}  # dead tasks whose workers live
        self._joining: dict[str, tuple[str, asyncio.Task[None]]] = {}  # name of a task -> where, and what makes it
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look from now on."""
        self._registered.heed(self._news.set)
        self._say_lifetimes(self._there())
        self._asks_until = 0.0 if self._adapting.is_known else time.monotonic() + SCALED_WITHIN
        await self._keep()
        self._watch = asyncio.create_task(self._watched())

    def cancel(self) -> None:
        """Stop watching, and cancel tasks in the making. In the event loop."""
        joining = [work for _, work in self._joining.values()]
        for work in (self._watch, *self._awaited.values(), *self._ending.values(), *joining):
            if work is not None:
                work.cancel()

    async def _sleep(self) -> None:
        """Wait for news of the registry, or for the next regular look."""
        is_soon = self._engine.comes or time.monotonic() < self._heard + ANNOUNCED
        with suppress(TimeoutError):
            async with asyncio.timeout(SOON if is_soon else LOOK):
                await self._news.wait()
                self._news.clear()
                self._heard = time.monotonic()

    async def _watched(self) -> None:
        while self._engine.lost is None:
            await self._sleep()
            if self._client.status != "running":
                if not self._engine.is_closing:  # else who closes knows, and brings the values home before
                    self._engine.lose_scheduler()
                return
            self._await_the_silent()
            with suppress(OSError, TimeoutError, RuntimeError, Fenced):  # the next look says what it was
                found = await identities(self._client)
                self._say_who_left()
                if self._is_behind:
                    await self._publish()
                self._end_the_lost()
                await self._keep()
                self._look([addr for addr, facts in found.items() if self._wanted.takes(facts)])

    async def copied(self, copy: dict[str, Any]) -> None:
        """Let the registry name the newest complete copies of the shards; later, where the scheduler is silent now."""
        self._registered.copy = copy
        if not self._engine.is_closing:
            with suppress(Fenced):  # the cluster ends
                await self._publish()

    def _say_who_left(self) -> None:
        engine, left = self._engine, list[Member]()
        for member in engine.places.values():
            if not member.may_answer and member not in self._gone:
                member.lose()
                self._gone.add(member)
                engine.bury(member)
                left.append(member)
        if left:
            names = ", ".join(f"{member.name} ({member.peer.addr})" for member in left)
            engine.say(f"{names} left at step {engine.step}: {self._width()}")
            self._is_behind = True

    async def _publish(self) -> None:
        """Write the present members to the registry; a fenced notebook's cluster ends.

        A scheduler that does not answer now is told at the next look.
        """
        try:
            await self._registered.publish(self._there)
            self._is_behind = False
        except (OSError, TimeoutError):
            self._is_behind = True
        except Fenced as error:
            if not self._engine.is_closing:  # else the entry is gone because it was closed
                self._engine.lose_entry(error)
            raise

    async def _keep(self) -> None:
        """Let adaptive scaling keep the present workers, or warn that adaptive scaling may close them."""
        silent = [member for member in self._engine.places.values() if member.is_silent]
        count = len({member.peer.addr for member in (*self._there(), *silent)})
        if self._adapting.hold(count):
            self._engine.say(f"Dask's adaptive scaling keeps {count} workers now, while the cluster is connected")
        elif time.monotonic() < self._asks_until and await self._registered.is_scaled():
            self._asks_until = 0.0
            self._engine.say(
                "Dask's adaptive scaling is on: it closes workers that compute no Dask tasks, also those of tasks and "
                f"servers. Where the cluster was made, call its adapt(minimum={count}, ...)"
            )

    def _say_lifetimes(self, members: Iterable[Member]) -> None:
        for member in members:
            if lifetime := member.info.get("lifetime"):
                who = f"{member.name} ({member.peer.addr})"
                end = "its values are lost then" if member.shards else "it leaves then"
                self._engine.say(f"the worker of {who} has a lifetime of {lifetime:g} s: {end}")

    def _there(self) -> list[Member]:
        engine = self._engine
        return [m for m in (*engine.servers, *engine.places.values(), *self._entering) if m.is_there]

    def _width(self) -> str:
        """``3 compute tasks``."""
        there = sum(member.is_there for member in self._engine.places.values())
        return f"{there} compute task{'s' if there != 1 else ''} now"

    def _await_the_silent(self) -> None:
        """Begin to await tasks that fell silent lately."""
        for member in self._engine.places.values():
            if member.is_silent and member not in self._awaited:
                self._engine.bury(member)
                self._is_behind = True
                self._awaited[member] = asyncio.create_task(self._await(member))

    async def _await(self, member: Member) -> None:
        """Let a silent task rejoin when answering again; returns without a rejoin if the task is given up."""
        engine = self._engine
        while engine.lost is None and await engine.peers.answers_again(member):
            after = f"{member.name} ({member.peer.addr}) answers again after {member.silence:.0f} s"
            with suppress(Fenced):  # the cluster ends
                if isinstance(await engine.reset(member), Ok) and await self._enter(member.successor()):
                    engine.say(f"{after} and joined at step {engine.step}: {self._width()}")
                    return
            await asyncio.sleep(SOON)

    async def _enter(self, member: Member) -> bool:
        """Let a task take part once registered; returns whether its worker has stayed until then."""
        self._entering.add(member)
        try:
            await self._publish()
            if member.is_there:
                self._engine.join(member)
            return member.is_there
        finally:
            self._entering.discard(member)

    def _end_the_lost(self) -> None:
        """Begin to end the processes of tasks that were found dead lately."""
        latest = {member.peer: member for member in self._engine.tasks}
        for member in latest.values():
            is_left_over = not (member.alive or member.silent_since) and member.reported and member.info.get("nanny")
            if is_left_over and member not in self._ending and member not in self._engine.servers:
                self._ending[member] = asyncio.create_task(self._end(member))

    async def _end(self, member: Member) -> None:
        """Tell a dead task to end its process, until the task hears or Dask finds the worker dead, too."""
        engine = self._engine
        if not engine.charge(member):
            engine.say(f"{member.name} ({member.peer.addr}) is given up: {engine.restarts}")
            return
        while member.reported and engine.lost is None and not isinstance(await engine.quit(member), Refusal):
            await asyncio.sleep(LOOK)

    def _look(self, found: Collection[str]) -> None:
        """Begin with the workers that are new. Where a task is that Dask knows, none is made."""
        engine = self._engine
        self._refused &= set(found)
        taken = {member.peer.addr for member in (*engine.tasks, *engine.servers) if member.reported}
        joining = {addr for addr, _ in self._joining.values()}
        for addr in found:
            if addr not in taken | joining | self._refused:
                name = self._vacancy()
                self._joining[name] = addr, asyncio.create_task(self._join(name, addr))

    def _vacancy(self) -> str:
        """The name of a task that is dead and not made again yet, or a new one."""
        places = self._engine.places
        names = chain(
            (name for name, member in places.items() if not member.may_answer),
            (name for name in map("task:{}".format, count()) if name not in places),
        )
        return next(name for name in names if name not in self._joining)

    async def _join(self, name: str, addr: str) -> None:
        """Make a task on a worker, and let the task take part."""
        engine, end = self._engine, time.monotonic() + STARTS_WITHIN
        try:
            member = await joined(
                self._client, engine.link, name, addr, self._wanted, engine.servers, engine.epoch, end
            )  # fmt: skip
            if not await self._enter(member):
                raise WorkerGone(f"the worker at {addr} left while its task was started")
        except WorkerGone:
            pass  # it is new again when it is back
        except Exception as error:  # also Dask's own: this worker is not used, and training goes on
            self._refused.add(addr)
            why = error.details["differs"] if isinstance(error, VersionMismatch) else str(error)
            engine.say(f"the worker at {addr} takes no part: {(why or type(error).__name__).splitlines()[0]}")
        else:
            self._say_lifetimes([member])
            engine.say(f"{name} ({addr}) joined at step {engine.step}: {self._width()}")
        finally:
            del self._joining[name]
