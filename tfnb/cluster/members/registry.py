"""The registry of the tfnb clusters on a Dask scheduler: a table, and the scheduler plugin that keeps the table.

Each cluster has an epoch, which no other one of this scheduler ever has, and a revision: who writes says which one it
read, and is refused where somebody wrote since. A write says what changed, so that a task that joins costs the same
however many there are. The plugin tells every notebook at once that a worker came or left, and with each answer whether
the Dask cluster is scaled adaptively.
"""

from __future__ import annotations

import time
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

TOPIC = "tfnb-members"  # of Dask's events
LATELY = 60.0  # seconds between two questions of adaptive scaling, at most: one by default


class ClusterTable:
    """Clusters by id: client, epoch, revision, each task's address, key, incarnation and shards, and the ``copy``.

    ``write`` is the id of the last write: one that is repeated, as its answer was lost, is told that it is written.
    The copy is the newest complete set of copies of the shards for a recovery: its id, step and bytes, and the task
    that holds each shard; empty while the notebook holds them.

    >>> table = ClusterTable()
    >>> table.open("a", "client-1")["epoch"], table.open("b", "client-2")["epoch"]
    (1, 2)
    >>> table.write("a", 0, "first", {"task:0": ["tcp://h:1", "k", 7, []]}, {"id": "1-3"})
    {'epoch': 1, 'revision': 1, 'is_written': True}
    >>> table.write("a", 0, "second", {"task:0": None}, {})["is_written"], table.read("a")["tasks"]["task:0"][2]
    (False, 7)
    >>> table.leave("client-1"), table.read("a"), list(table.clusters)
    (['a'], None, ['b'])
    """

    def __init__(self) -> None:
        self.clusters: dict[str, dict[str, Any]] = {}
        self.epochs = 0  # given so far

    def open(self, cluster: str, client: str) -> dict[str, Any]:
        """Enter a cluster; idempotent, so that a request whose answer was lost can be repeated."""
        if cluster not in self.clusters:
            self.epochs += 1
            self.clusters[cluster] = {
                "client": client, "epoch": self.epochs, "revision": 0, "write": "", "tasks": {}, "copy": {},
            }  # fmt: skip
        return self.clusters[cluster]

    def read(self, cluster: str) -> dict[str, Any] | None:
        """The entry of a cluster, None where there is none."""
        return self.clusters.get(cluster)

    def write(
        self, cluster: str, revision: int, write: str, tasks: dict[str, Any], copy: dict[str, Any],
        is_whole: bool = False,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Change a cluster's tasks, and replace its copy, if ``revision`` is current.

        tasks: those that changed, None for one that is gone; with ``is_whole`` there are no others. Returns the epoch,
        the revision and whether it is written; None for an unknown cluster.
        """
        entry = self.clusters.get(cluster)
        if entry is None:
            return None
        if entry["revision"] == revision:
            entry |= {"revision": revision + 1, "write": write, "copy": copy}
            if is_whole:
                entry["tasks"].clear()
            for name, task in tasks.items():
                if task is None:
                    entry["tasks"].pop(name, None)
                else:
                    entry["tasks"][name] = task
        return {"epoch": entry["epoch"], "revision": entry["revision"], "is_written": entry["write"] == write}

    def close(self, cluster: str) -> None:
        """Forget a cluster; harmless if repeated."""
        self.clusters.pop(cluster, None)

    def leave(self, client: str) -> list[str]:
        """Forget the clusters of a client that is gone."""
        gone = [cluster for cluster, entry in self.clusters.items() if entry["client"] == client]
        for cluster in gone:
            del self.clusters[cluster]
        return gone


class Registry(SchedulerPlugin):
    """The table on a scheduler: ``scheduler.tfnb_registry(method=, ...)`` calls its methods."""

    name = "tfnb-registry-4"  # of what it answers: another version has another table
    idempotent = True

    async def start(self, scheduler: Any) -> None:
        """Called by Dask."""
        self.table, self.scheduler = ClusterTable(), scheduler
        self.scaled = float("-inf")  # when somebody asked how many workers the scheduler needs
        self._target = scheduler.handlers["adaptive_target"]
        scheduler.handlers |= {"tfnb_registry": self.answer, "adaptive_target": self._adaptive_target}

    def _adaptive_target(self, **options: object) -> Any:
        self.scaled = time.monotonic()
        return self._target(**options)

    async def answer(self, method: str, **arguments: object) -> Any:
        """Answer a client's request; adds the number of clusters, and whether their workers are scaled adaptively."""
        if method not in ("open", "read", "write", "close"):
            raise ValueError(f"the registry has no method {method[:40]!r}")
        found = getattr(self.table, method)(**arguments)
        is_scaled = time.monotonic() - self.scaled < LATELY
        return {"entry": found, "clusters": len(self.table.clusters), "is_scaled": is_scaled}

    def add_worker(self, scheduler: object, worker: str) -> None:
        """Called by Dask."""
        self._tell(worker)

    def remove_worker(self, scheduler: object, worker: str, **_: object) -> None:
        """Called by Dask."""
        self._tell(worker)

    def remove_client(self, scheduler: object, client: str) -> None:
        """Called by Dask."""
        self.table.leave(client)

    def _tell(self, worker: str) -> None:
        if self.table.clusters:
            self.scheduler.log_event(TOPIC, {"worker": worker})
