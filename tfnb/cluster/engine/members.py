"""The engine's inputs: tasks, the feeds of a step, data of a training. Data only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

from tfnb.cluster.engine.holders import Process
from tfnb.cluster.engine.pace import Pace
from tfnb.cluster.wire.messages import GIVEN_UP, SILENCE, Peer
from tfnb.graph import Variable
from tfnb.passes import StepGraph
from tfnb.state.batch_order import RowOrder
from tfnb.state.chunks import ChunkedArray


@dataclass(eq=False)
class Member:
    """A task or server as the notebook sees its state. ``future``: Dask's future, by which a dead worker is noticed.

    States: alive; silent (a suspect: it does not answer, gets no work, and is waited for); dead.
    """

    name: str
    peer: Peer
    future: Any
    info: dict[str, Any] = field(default_factory=dict)
    alive: bool = True
    lost_at: float = 0.0  # when it was found silent or dead
    silent_since: float = 0.0  # of a silent one, its last answer; 0 of all others
    patience: float = SILENCE  # seconds of silence after which it is a suspect
    shards: tuple[int, ...] = ()  # that it holds
    plans: set[str] = field(default_factory=set)
    is_charged: bool = False  # a restart of the budget was taken for it
    copied: int = 0  # bytes of copies of other processes' shards that it holds
    late: int = 0  # steps that it computed in vain: others were first
    pace: Pace = field(default_factory=Pace)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=32))  # that it computed for a step, lately

    @property
    def number(self) -> int:
        """The number by which a graph requests the task; its successor has the same."""
        return int(self.name.rpartition(":")[2])

    @property
    def host(self) -> str:
        """The host of the task's worker."""
        return urlsplit(self.peer.addr).hostname or self.peer.addr  # without distributed, which takes a second to load

    @property
    def process(self) -> Process:
        """The process of the task's worker."""
        return self.host, int(self.info.get("pid", 0))

    @property
    def reported(self) -> bool:
        """Whether the scheduler still knows the task's worker."""
        return self.future.status == "finished"

    @property
    def is_there(self) -> bool:
        """Whether the task can be given work."""
        return self.alive and self.reported

    @property
    def is_silent(self) -> bool:
        """Whether the task is a suspect: no answers, but Dask lists its worker, so the engine waits."""
        return self.silent_since > 0 and self.reported

    @property
    def may_answer(self) -> bool:
        """Whether the task is alive or silent, and not given up."""
        return self.is_there or self.is_silent

    @property
    def silence(self) -> float:
        """Seconds since a silent one answered."""
        return time.monotonic() - self.silent_since

    def fall_silent(self, since: float) -> None:
        """Mark the task as a suspect, without an answer since ``since``."""
        if self.alive:
            self.alive, self.lost_at, self.silent_since = False, time.monotonic(), since

    def lose(self) -> None:
        """Mark the task as dead; harmless if repeated."""
        if self.alive or self.silent_since:
            self.alive, self.lost_at, self.silent_since = False, time.monotonic(), 0.0

    def successor(self) -> Member:
        """The same task as a newcomer without registered plans; more patient if nothing was computed yet."""
        patience = SILENCE if self.seconds else min(GIVEN_UP, 2 * self.patience)
        return Member(self.name, self.peer, self.future, self.info, patience=patience, copied=self.copied)


@dataclass(frozen=True, slots=True)
class StepFeeds:
    """Feeds of one step, in the order of the program's feeds; ``split``: for each, whether axis 0 is the batch's
    ``rows``.

    ``number``: of the step among those of its training, from 0.
    """

    tensors: tuple[torch.Tensor, ...]
    run_index: int
    rows: int | None = None
    split: tuple[bool, ...] = ()
    number: int = 0

    def part(self, start: int, stop: int) -> list[torch.Tensor]:
        """The feeds of the worker that gets rows ``start`` to ``stop``."""
        if self.rows is None:
            return list(self.tensors)
        return [t[start:stop] if cut else t for t, cut in zip(self.tensors, self.split, strict=True)]


@dataclass(frozen=True, slots=True)
class Ahead:
    """Data sent to the tasks once, before the first step, or read there: rows of arrays, in an order given by the seed.

    ``total``: steps. ``run``: from the number of a step to its run index, which seeds its random ops. ``by_pass``:
    tasks stand still after each pass over the data. ``more``: what is fed beside the rows of a step, made of these.
    """

    arrays: tuple[torch.Tensor | ChunkedArray, ...]
    order: RowOrder
    total: int
    run: Callable[[int], int]
    by_pass: bool = False
    more: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = lambda rows: ()

    def ends_pass(self, step: int) -> bool:
        """Whether tasks stand still before a step."""
        return self.by_pass and 0 < step < self.total and step % self.order.per_pass == 0


@dataclass(eq=False, slots=True)
class SentData:
    """A named data set on tasks, and the tasks that hold the data."""

    name: str
    members: set[Member] = field(default_factory=set)


class OuterStep(NamedTuple):
    """The step that replicas take where they meet; its feeds are differences of ``variables``, in their order."""

    step: StepGraph
    variables: tuple[Variable, ...]


class Mode(NamedTuple):
    """The mode of a training: a row of MODES, with the options of `tfnb.fit`.

    ``required``: the number of gradients in a step; 0: one of each task that is there, without the ``backup`` ones.
    ``replicas``: how many tasks it is meant for. ``elastic``: whether fewer than ``required`` ones go on. ``is_plain``:
    `allow_plain_collectives`. ``schedule``, ``pipelines``: of a pipeline, and how many replicas of it there are.
    ``n_fetch``, ``n_push``, ``warm_start``: of `tfnb.train.Downpour`. ``outer``: of `tfnb.train.LocalSGD`.
    """

    name: str = "sync"
    backup: int = 0
    staleness: int | None = None
    required: int = 0
    replicas: int = 0
    elastic: bool = True
    is_plain: bool = False  # whether ranks may sum in plain text on a cluster that encrypts
    schedule: str = ""
    pipelines: int = 1
    is_coordinated: bool = False  # whether the notebook holds no values meanwhile: it acts where tasks stand still
    every: int = 0  # steps of a rank between two meetings, where it takes them on its own; 0: it sums each step
    n_fetch: int = 1
    n_push: int = 1
    warm_start: int = 0
    is_warmth_measured: bool = False  # whether the others begin earlier, once gradients change little
    outer: OuterStep | None = None

    @property
    def is_joint(self) -> bool:
        """Whether all tasks make each step together."""
        return self.name in ("sync", "allreduce", "local", "pipeline")

    @property
    def has_ranks(self) -> bool:
        """Whether tasks hold the Variables while they train."""
        return self.name in ("allreduce", "local")

    @property
    def has_copies(self) -> bool:
        """Whether tasks make updates on copies of Variables and optimizer slots of their own."""
        return self.has_ranks or self.name == "downpour"

    @property
    def takes_local_steps(self) -> bool:
        """Whether tasks take steps that the servers, or other tasks, see later or in sums only."""
        return bool(self.every) or self.n_fetch > 1 or self.n_push > 1

    @property
    def is_pipeline(self) -> bool:
        """Whether each task is a stage of each step."""
        return self.name == "pipeline"

    @property
    def may_have_spare(self) -> bool:
        """Whether a step may be written without the part of a task."""
        return bool(self.backup or self.required)

    def __str__(self) -> str:
        options: dict[str, Any] = {"staleness": self.staleness} if self.staleness is not None else {}
        options |= {"backup": self.backup} if self.backup else {}
        options |= {"every": self.every} if self.every else {}
        options |= {"n_fetch": self.n_fetch, "n_push": self.n_push} if self.name == "downpour" else {}
        warm = "auto" if self.is_warmth_measured else self.warm_start
        options |= {"warm_start": warm} if warm else {}
        options |= {"schedule": self.schedule} if self.schedule else {}
        options |= {"replicas": self.pipelines} if self.pipelines > 1 else {}
        return " ".join([self.name, *(f"{name}={value}" for name, value in options.items())])


MODES = ("sync", "async", "bounded", "allreduce", "pipeline")
CLASSES = ("local", "downpour")  # modes that a user names by an object of `tfnb.train`
