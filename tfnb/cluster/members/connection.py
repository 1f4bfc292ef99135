"""Inputs and results of `connect`: required workers, options of workers to start, the Dask client, the progress.

`deploy` finds or starts what is asked for. Whatever is no number of workers, no resource or no size of memory is
refused here, before anything is started.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from dask.utils import parse_bytes
from distributed import Client

from tfnb.errors import InvalidArgument

SAID_AFTER = 2.0  # seconds
Servers = int | Literal["stages"]
"""How many parameter servers, or one at each task for the Variables of its stage of a pipeline."""
STAGES = "stages"
TOO_FEW = "with ps='stages' each task is a stage of a pipeline and the server of its Variables, and a pipeline has two"


class ConnectProgress:
    """Prints the progress of connecting, if connecting takes longer than `SAID_AFTER` seconds.

    One thread finds, the one that waits says: a notebook shows it below the cell.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._found = self._said = ""

    def found(self, kind: str, up: Sequence[str], total: int) -> None:
        """Set the progress: the members in ``up``, of ``total``, are up."""
        names = f": {', '.join(up)}" if up else ""
        self.at(f"{len(up)} of {total} {kind} are up{names}")

    def at(self, text: str) -> None:
        """Set the progress text."""
        self._found = text

    def say(self) -> None:
        """Print the progress if changed since the last time."""
        if self._found != self._said and time.monotonic() - self._begin >= SAID_AFTER:
            self._said = self._found
            self.tell(self._found)

    def tell(self, line: str) -> None:
        """Print a line at once."""
        sys.stdout.write(f"connect: {line}\n")
        sys.stdout.flush()


class Requirements(NamedTuple):
    """The workers for `connect`: the servers, the number of workers to wait for, and the resources of each worker."""

    ps: Servers | None = None  # one in four
    workers: int | None = None  # servers and one compute task; of stages two
    resources: Mapping[str, float] = MappingProxyType({})

    def check(self) -> None:
        """Raise InvalidArgument for an invalid number of workers, or invalid resources."""
        if self.ps is not None and not self.is_staged and (type(self.ps) is not int or self.ps < 1):
            raise InvalidArgument(
                f"ps={self.ps!r}: the number of parameter servers is an integer from 1; ps='stages' makes each task "
                "the server of its stage of a pipeline"
            )
        if self.workers is not None and (type(self.workers) is not int or self.workers < 1):
            raise InvalidArgument(f"workers={self.workers!r}: the number of workers is an integer from 1")
        if self.is_staged and self.workers == 1:
            raise InvalidArgument(f"workers=1: {TOO_FEW}")
        if not isinstance(self.resources, Mapping) or not all(
            isinstance(name, str) and type(amount) in (int, float) and amount > 0
            for name, amount in self.resources.items()
        ):
            raise InvalidArgument(
                f"resources={self.resources!r}: names and amounts as Dask's workers have them, such as {{'GPU': 1}}"
            )

    @property
    def is_staged(self) -> bool:
        """Whether each task is a parameter server, too."""
        return self.ps == STAGES

    @property
    def least(self) -> int:
        """Workers that are waited for.

        >>> Requirements().least, Requirements(ps=2).least, Requirements(ps=2, workers=2).least
        (1, 3, 2)
        >>> Requirements(ps="stages").least
        2
        """
        servers = 1 if isinstance(self.ps, str) else self.ps or 0
        return self.workers or servers + 1

    def takes(self, facts: Mapping[str, Any]) -> bool:
        """Whether a worker has the resources.

        >>> wanted = Requirements(resources={"GPU": 1})
        >>> wanted.takes({"resources": {"GPU": 2.0}}), wanted.takes({})
        (True, False)
        """
        has = facts.get("resources") or {}
        return all(has.get(name, 0) >= amount for name, amount in self.resources.items())

    def __str__(self) -> str:
        return ", ".join(f"{name}={amount:g}" for name, amount in self.resources.items())


class LocalWorkers(NamedTuple):
    """Options of workers that `connect` starts: threads and memory of each, and Dask's dashboard."""

    threads: int | None = None  # one
    memory: str | int | None = None  # Dask's own rule: what the machine has, divided by its workers
    dashboard: bool = False

    def check(self) -> None:
        """Raise InvalidArgument for an invalid number of threads or memory size, or a dashboard without bokeh."""
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise InvalidArgument(f"threads={self.threads!r}: the threads of a worker are an integer from 1")
        try:
            parse_bytes(self.memory or 0)
        except (ValueError, TypeError, AttributeError):
            raise InvalidArgument(
                f"memory={self.memory!r}: the memory of a worker is a number of bytes, or text such as '2GB'"
            ) from None
        if self.dashboard and find_spec("bokeh") is None:
            raise InvalidArgument("the dashboard needs bokeh, which is not installed: pip install 'tfnb[dashboard]'")


AS_EVER = LocalWorkers()


@dataclass
class DaskCluster:
    """The Dask cluster of the tasks: a client, closers of resources opened by `connect`, and the required workers."""

    client: Client
    closers: list[Callable[[], Any]] = field(default_factory=list)
    dashboard: bool = True
    is_ours: bool = False  # started here
    wanted: Requirements = Requirements()  # noqa: RUF009  # it cannot change
    progress: ConnectProgress = field(default_factory=ConnectProgress)

    def close(self) -> None:
        """Close resources opened by `connect`; harmless if repeated."""
        while self.closers:
            self.closers.pop()()
