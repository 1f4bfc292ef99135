"""Statistics of a connected cluster, as rows and facts of its card.

Servers tell bytes and versions, and what they sent and received on each lane; tasks which code they run; Dask's
scheduler the memory of the workers. Rates are of the time since the reading before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distributed import Client

from tfnb.cluster.engine.engine import Engine, in_words
from tfnb.cluster.engine.members import Member
from tfnb.cluster.engine.pace import PaceFacts
from tfnb.cluster.members.deploy import identities
from tfnb.cluster.notebook.card import CardRow, size
from tfnb.cluster.notebook.holdings import Holdings

PATIENCE = 2.0  # seconds that servers and scheduler have for their answers
LEAST = 0.2  # seconds between two readings of which a rate is made
MOST = 5.0  # seconds after which a rate would say nothing about now


class Overview:
    """Polls the members of a cluster for statistics, and keeps the last answers."""

    def __init__(self, engine: Engine, client: Client) -> None:
        self._engine, self._client = engine, client
        self._stats: Mapping[int, Mapping[str, Any]] = {}  # of each shard
        self._workers: Mapping[str, Mapping[str, Any]] = {}  # by address
        self._facts: Mapping[str, Mapping[str, Any]] = {}  # of tasks, by their names
        self._moved: tuple[float, Counter[tuple[str, str]]] = (time.monotonic(), Counter())  # by server and lane
        self._rates: Mapping[str, float] = {}
        self._traffic: Mapping[str, float] = {}  # bytes a second of each server, by name
        self._exchanged = Counter[tuple[str, str]]()  # bytes by both ends
        self._links: Mapping[tuple[str, str], float] = {}  # bytes a second of the same
        self._stepped: tuple[float, int] = (time.monotonic(), engine.step)
        self.rate = 0.0  # steps a second

    async def ask(self) -> None:
        """Poll all members; a member that does not answer in time keeps its former statistics."""
        with suppress(OSError, TimeoutError, RuntimeError):  # the supervisor says that the scheduler is lost
            self._workers = await asyncio.wait_for(identities(self._client), PATIENCE)
        asked = self._engine.stats(PATIENCE), self._engine.task_facts(PATIENCE)
        self._stats, self._facts = await asyncio.gather(*asked)
        now, (before, then) = time.monotonic(), self._moved
        if now - before >= LEAST:
            step, (since, first) = self._engine.step, self._stepped
            self.rate, self._stepped = max(0, step - first) / (now - since), (now, step)
            moved = self._moves()
            rates = {each: max(0, moved[each] - then[each]) / (now - before) for each in moved}
            self._rates = _summed((lane, rate) for (_, lane), rate in rates.items())
            self._traffic = _summed((server, rate) for (server, _), rate in rates.items())
            exchanged = self._exchanges()
            grown = {link: exchanged[link] - self._exchanged[link] for link in exchanged}
            self._links = {link: max(0, more) / (now - before) for link, more in grown.items()}
            self._exchanged = exchanged
            if now - before > MOST:
                self.rate, self._traffic, self._links = 0.0, {}, dict.fromkeys(exchanged, 0.0)
            self._moved = (now, moved)

    def forget(self) -> None:
        """Nobody answers any more."""
        self._stats, self._workers, self._rates, self._facts = {}, {}, {}, {}
        self._traffic, self._links, self.rate = {}, {}, 0.0

    def _exchanges(self) -> Counter[tuple[str, str]]:
        """Bytes exchanged on direct connections, by task and server, and by two tasks in the order of their names.

        The successor of a lost one is at another address.
        """
        servers, tasks = (
            {member.peer.addr: member.name for member in members}
            for members in (self._engine.servers, self._engine.places.values())
        )
        found = Counter[tuple[str, str]]()
        for task, facts in self._facts.items():
            found.update({(task, servers[addr]): count for addr, count in facts["traffic"].items() if addr in servers})
            for addr, count in facts["posted"].items():
                if addr in tasks:
                    found[min(task, tasks[addr]), max(task, tasks[addr])] += count
        return found

    def _moves(self) -> Counter[tuple[str, str]]:
        """Bytes moved, by server and lane."""
        found = Counter[tuple[str, str]]()
        for server in self._engine.servers:
            for stat in [self._stats[shard] for shard in server.shards if shard in self._stats][:1]:  # of the process
                found.update({(server.name, lane): count for lane, count in stat["moved"].items()})
        return found

    def lanes(self) -> str:
        """``shared memory 1.2 GB (35.0 MB/s), sockets 20.0 MB (0 B/s)``."""
        moved = Counter[str]()
        for (_, lane), count in self._moves().items():
            moved[lane] += count
        return ", ".join(f"{lane} {size(moved[lane])} ({size(self._rates.get(lane, 0))}/s)" for lane in sorted(moved))

    def rows(self, held: Holdings) -> tuple[CardRow, ...]:
        """One for each task and server, with the Variables that servers hold."""
        contents = held.contents()
        members = dict.fromkeys((*self._engine.places.values(), *self._engine.servers))
        return tuple(self._row(member, contents) for member in members)

    def _row(self, member: Member, contents: Mapping[int, Sequence[tuple[str, int]]]) -> CardRow:
        state = "alive" if member.is_there else "silent" if member.is_silent else "lost"
        threads = member.info.get("threads", 1)
        work = [f"for {member.silence:.0f} s, and waited for"] if member.is_silent else []
        pace = member.pace.facts(time.monotonic())
        late = [f"{member.late} step{'s' if member.late != 1 else ''} too late to count"] if member.late else []
        work.append(", ".join(pace.words()))
        parts = [f"{threads} torch thread{'s' if threads != 1 else ''}", ", ".join(member.info.get("devices", ()))]
        if member.is_there and (worker := self._workers.get(member.peer.addr)):
            limit = f" of {size(worker['memory_limit'])}" if worker.get("memory_limit") else ""
            parts.append(f"memory {size(worker.get('metrics', {}).get('memory', 0))}{limit}")
        if stats := [self._stats[shard] for shard in member.shards if shard in self._stats]:
            budget, held = stats[0]["budget"], sum(stat["bytes"] for stat in stats)
            limit = f" of {size(budget)}" if budget else ""
            versions = ", ".join(str(stat["version"]) for stat in stats)
            parts += [in_words(member.shards)] if len(self._engine.shards) > len(self._engine.servers) else []
            count = sum(stat["variables"] for stat in stats)
            work.append(f"holds {count} variable{'s' if count != 1 else ''}, {size(held)}{limit}")
            parts.append(f"version{'s' if len(stats) > 1 else ''} {versions}")
        if member.is_there and (code := self._facts.get(member.name, {}).get("code")):
            parts.append(code)
        if member.is_there and member.copied:
            parts.append(f"holds {size(member.copied)} of copies for a recovery")
        work += late
        details = "; ".join(part for part in parts if part)
        mine = [each for shard in member.shards for each in contents.get(shard, ())]
        holds = tuple((name, size(count)) for name, count in sorted(mine, key=lambda each: -each[1]))
        traffic = f"{size(self._traffic[member.name])}/s" if self._traffic.get(member.name) else ""
        return CardRow(
            member.name, member.peer.addr, state, details, ", ".join(filter(None, work)), holds, traffic,
            _in_few_words(pace, member.late), None if pace.waits is None else 1 - pace.waits,
            tuple((to, rate, f"{size(rate)}/s") for (task, to), rate in self._links.items() if task == member.name),
            tuple(tuple(queue) for stat in stats for queue in stat["queues"]),
        )  # fmt: skip


def _in_few_words(pace: PaceFacts, late: int) -> tuple[str, ...]:
    """The lines of a task's box."""
    found = [f"step {pace.steps:,}" + (f" · {pace.rate:.1f}/s" if pace.rate is not None else "")] if pace.steps else []
    found += [f"waits {100 * pace.waits:.0f} %"] if pace.waits is not None else []
    found += [f"{pace.age:.1f} updates old"] if pace.age is not None else []
    found += [f"{late:,} too late"] if late else []
    return tuple(found)


def _summed(amounts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums by key."""
    found: dict[str, float] = {}
    for key, amount in amounts:
        found[key] = found.get(key, 0.0) + amount
    return found
