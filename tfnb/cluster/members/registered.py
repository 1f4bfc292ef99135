"""A cluster's entry in the scheduler's registry, as its notebook sees it. Dask glue, in the client's event loop.

Without a registry, because a scheduler blocks plugins, all goes on: the epoch is 1, and who comes is seen by looking.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from distributed import Client
from distributed.protocol.pickle import dumps

from tfnb.cluster.engine.members import Member
from tfnb.cluster.members.registry import TOPIC, Registry
from tfnb.cluster.wire.transport import scheduler_of
from tfnb.errors import Fenced

PATIENCE = 10.0  # seconds that the scheduler has for an answer


class Registration:
    """The entry of one cluster. ``without``: why there is none, in a line.

    ``copy``: what the next `publish` says of the copies of the shards, see `ClusterTable`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.cluster = uuid.uuid4().hex[:8]
        self.epoch, self.revision, self.others = 1, 0, 0
        self.without, self._is_scaled = "", False
        self.copy: dict[str, Any] = {}
        self._written: dict[str, Any] | None = None  # tasks as the registry has them, where that is known
        self._heeds = False
        self._writing = asyncio.Lock()

    async def open(self) -> None:
        """Enter the cluster: from here on its epoch is known."""
        try:
            async with asyncio.timeout(PATIENCE):
                send = scheduler_of(self._client).register_scheduler_plugin
                await send(plugin=dumps(Registry()), name=Registry.name, idempotent=True)
            self._read(await self._ask("open", client=self._client.id))
        except Exception as error:  # of any kind: it runs there, in whatever version of tfnb that is
            await self.close()  # the answer may be all that was lost
            self.without = f"{type(error).__name__}: {error}".splitlines()[0]

    def heed(self, heard: Callable[[], object]) -> None:
        """Call ``heard`` when a worker comes or leaves."""
        if not self.without:
            self._client.subscribe_topic(TOPIC, lambda event: heard())
            self._heeds = True

    async def is_scaled(self) -> bool:
        """Whether something scales the Dask cluster adaptively, as far as the scheduler has noticed."""
        if not self.without:
            with suppress(OSError, TimeoutError):
                await self._ask("read")
        return self._is_scaled

    async def publish(self, members: Callable[[], Iterable[Member]]) -> None:
        """Write the cluster's tasks and copy to the registry. Raises Fenced if the entry is gone, or not ours."""
        if self.without:
            return
        async with self._writing:
            tasks = {m.name: (m.peer.addr, m.peer.key, m.peer.incarnation, m.shards) for m in members()}
            about = {"write": uuid.uuid4().hex[:8], "copy": self.copy}
            before, self._written = self._written, None  # until the scheduler answers
            for _ in range(2):  # an answer that was lost may have been written
                changed = _changed(before, tasks)
                entry = await self._ask(
                    "write", revision=self.revision, tasks=changed, is_whole=before is None, **about
                )
                if entry is None or entry["epoch"] != self.epoch:
                    break
                self._read(entry)
                if entry["is_written"]:
                    self._written = tasks
                    return
                before = None
        raise Fenced(
            f"cluster {self.cluster} is not this notebook's any more in the scheduler's registry: connect again"
        )

    async def close(self) -> None:
        """Forget the entry; the scheduler does so by itself where the client is gone."""
        if self.without:
            return
        with suppress(Exception):  # of a client that is closed, and hears nothing any more
            if self._heeds:
                self._client.unsubscribe_topic(TOPIC)
        with suppress(Exception):  # of a scheduler that is gone, as the entry is then
            await self._ask("close")

    def __str__(self) -> str:
        if self.without:
            return f"looked for, since the scheduler keeps no registry ({self.without})"
        others = f"; {self.others} more tfnb cluster{'s' * (self.others > 1)} there" if self.others else ""
        return f"told by the registry of the scheduler: cluster {self.cluster}, revision {self.revision}{others}"

    def _read(self, entry: dict[str, Any]) -> None:
        self.epoch, self.revision = int(entry["epoch"]), int(entry["revision"])

    async def _ask(self, method: str, **arguments: object) -> Any:
        async with asyncio.timeout(PATIENCE):
            answer = await scheduler_of(self._client).tfnb_registry(method=method, cluster=self.cluster, **arguments)
        self.others, self._is_scaled = int(answer["clusters"]) - 1, bool(answer["is_scaled"])
        return answer["entry"]


def _changed(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """The tasks that changed, None for one that is gone; all of them where it is not known what was before.

    >>> _changed({"task:0": 1, "task:1": 2}, {"task:1": 3, "task:2": 4}), _changed(None, {"task:1": 3})
    ({'task:1': 3, 'task:2': 4, 'task:0': None}, {'task:1': 3})
    """
    known = before or {}
    found = {name: task for name, task in now.items() if known.get(name) != task}
    return found | dict.fromkeys(known.keys() - now.keys())
