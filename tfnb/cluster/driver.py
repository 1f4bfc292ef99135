"""`connect` and the connected `Cluster`: the blocking face of the engine.

While a cluster is connected its servers own the values of the variables that ran there: a variable moves when a run
or fit uses it for the first time, and comes home with `Cluster.pull` and `Cluster.close`. Whatever must not be cut by
Ctrl-C happens in the client's event loop; this thread only waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tfnb.cluster import connected
from tfnb.cluster.engine.engine import Engine
from tfnb.cluster.engine.members import MODES, Ahead, Batch, Mode
from tfnb.cluster.engine.single_steps import Turn
from tfnb.cluster.engine.sources import drawn_from
from tfnb.cluster.engine.training import Training
from tfnb.cluster.members.deploy import EPOCH, Place, Started, find, start
from tfnb.cluster.members.farewell import Farewell
from tfnb.cluster.members.supervisor import LOOK, Supervisor
from tfnb.cluster.modes.joins import join, joins
from tfnb.cluster.modes.leases import Offer
from tfnb.cluster.notebook.card import Status
from tfnb.cluster.notebook.collections import in_chunks, read
from tfnb.cluster.notebook.overview import PATIENCE, Overview
from tfnb.cluster.notebook.queue_homes import QueueHomes
from tfnb.cluster.notebook.restoring import brought
from tfnb.cluster.notebook.variables_there import VariablesThere, gives_way
from tfnb.cluster.tasks.programs import Placed, place
from tfnb.cluster.wire import envelope
from tfnb.cluster.wire.transport import ClientLink, parse_address, scheduler_address
from tfnb.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    OutOfRange,
    ParameterServerLost,
    TfnbError,
    Unavailable,
    Unimplemented,
)
from tfnb.graph import Variable
from tfnb.graph.queue import Queue
from tfnb.graph.variable_locks import PATIENCE as STEP
from tfnb.passes import StepGraph
from tfnb.placement.partition import split
from tfnb.placement.requests import asked, task_of
from tfnb.recording.marks.notes import user_level
from tfnb.state.batch_order import Rows
from tfnb.state.queue_contents import Held, held_by, labelled
from tfnb.state.queue_machine import QueueMachine
from tfnb.state.queue_operations import machine_of
from tfnb.state.step_groups import StepGroup, of_one

T = TypeVar("T")
See = Callable[[Sequence[Any]], None]

SETTLE = 15.0  # seconds that an interrupted step has to end
KEPT = 64  # placed programs
SHOWN = 5  # lines of the status that tell who came and who left
STANDS = StepGroup(0, ())  # tells that tasks stand still
AHEAD = 1 << 30  # bytes of arrays that are sent to every task before a training
_looks: ContextVar[bool] = ContextVar("looks", default=False)  # a step waits for this thread


def connect(
    cluster: Any = None, *, ps: int | None = None, name: str | None = None, security: Any = None,
    insecure: bool = False, timeout: float = 120.0, threads: int | None = None, memory: str | int | None = None,
    dashboard: bool = False,
) -> Cluster:  # fmt: skip
    """Run graphs on a Dask cluster from now on.

    cluster: a number n (a cluster of processes on this machine, n compute tasks plus ``ps`` servers, default one), a
    scheduler address or file, a Client, a cluster object, or nothing (Dask's default client, else a local cluster).
    Of a given cluster ``ps`` workers become servers (default one in four, at least one), the rest compute; where that
    leaves no compute task, half of the workers become servers, which hold the ``ps`` shards round robin. security:
    a `distributed.Security` for tls:// addresses. insecure: allow a plain address on another machine. timeout in
    seconds for everything; after two seconds it says which workers are up. Of a cluster that is started here, threads:
    of each worker (one); memory: the limit of each worker, bytes or text such as ``"2GB"``; dashboard: Dask's, whose
    address is in the status. Raises Unavailable naming the address,
    InvalidArgument, InsecureAddress, VersionMismatch, DeadlineExceeded; nothing is left running then.
    """
    if name is not None:
        raise Unimplemented("connect(name=...): re-attaching to the state of an earlier notebook is not there yet")
    end = time.monotonic() + timeout
    where = find(cluster, ps, security, insecure, timeout, Started(threads, memory, dashboard))
    try:
        made = Cluster(where, max(0.1, end - time.monotonic()))
    except BaseException:
        where.close()
        raise
    connected.connect(made)
    try:
        made._queues.begin()
    except BaseException:
        made.close()
        raise
    return made


def varying(step: StepGraph) -> list[bool]:
    """Which feeds of a step have an axis 0 that varies."""
    by_id = step.whole.contents.by_id
    shapes = (by_id[value.node].outputs[value.index].shape for value in step.feeds)
    return [bool(shape) and not isinstance(shape[0], int) for shape in shapes]


def batches(step: StepGraph, rows: Iterable[tuple[Sequence[torch.Tensor], int] | None]) -> Iterator[Batch | None]:
    """Batches of (tensors, run index): every feed with a varying axis 0 of the batch's length is divided.

    A None, at which tasks stand still, stays one.
    """
    varies, numbers = varying(step), itertools.count()
    for row in rows:
        if row is None:
            yield None
            continue
        (tensors, run_index), number = row, next(numbers)
        lengths = {len(t) for t, free in zip(tensors, varies, strict=True) if free}
        count = max(lengths, default=0)
        cut = tuple(free and len(t) == count for t, free in zip(tensors, varies, strict=True))
        if count == 0 and lengths:
            raise InvalidArgument(f"batch {number} of the data (from 0) has no rows: leave it out")
        yield Batch(tuple(tensors), run_index, count or None, cut, number)


class Cluster:
    """A connected cluster; a context manager that closes it.

    >>> with connect(2) as cluster:  # doctest: +SKIP
    ...     tfnb.run(train, feeds)
    """

    batches = staticmethod(batches)

    def __init__(self, where: Place, timeout: float) -> None:
        self._where = where
        self.client = where.client
        self._link = ClientLink(self.client)
        progress = where.progress
        handle = self._link.start(start, self.client, self._link, where.ps, where.workers, timeout, progress)
        tasks, servers, self._route = self._link.wait(handle, timeout + 5, "starting the tasks", progress.say)
        self._engine = Engine(self._link, tasks, servers, EPOCH)
        self._engine.on_lost = self._lost
        self._supervisor = Supervisor(self.client, self._engine)
        self._link.wait(self._link.start(self._supervisor.start), timeout, "watching the workers")
        self._overview = Overview(self._engine, self.client)
        self._followers: list[Callable[[Status], object]] = []
        self._teller: asyncio.Task[None] | None = None
        self._variables = VariablesThere(self._engine, self._do)
        self._queues = QueueHomes(self._engine, self._link)
        self._farewell = Farewell(self.client, self._client_closes)
        self._placed: OrderedDict[tuple[int, bool, bool], tuple[weakref.ref[StepGraph], Placed]] = OrderedDict()
        self._placing = threading.RLock()
        self._closed = False
        self._is_loss_told = False  # an error said that the cluster is lost

    # -- what is there --------------------------------------------------------------------------------------

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the live compute tasks."""
        return tuple(member.name for member in self._engine.places.values() if member.is_there)

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the live parameter servers."""
        return tuple(member.name for member in self._engine.servers if member.is_there)

    @property
    def step(self) -> int:
        """Steps (in asynchronous mode: batches) applied since it was connected."""
        return self._engine.step

    @property
    def pulled_step(self) -> int:
        """The step that the local storages show."""
        return self._variables.pulled_step

    def news(self, since: int) -> tuple[int, list[str]]:
        """Lines that tell who came and who left, after the first ``since`` of them; and how many there were."""
        engine = self._engine
        return engine.said, list(engine.lines)[max(0, len(engine.lines) - (engine.said - since)) :]

    @property
    def dashboard_link(self) -> str:
        """Dask's dashboard, or an empty string where there is none."""
        if self._closed or self.client.status != "running" or not self._where.dashboard:
            return ""
        return str(self.client.dashboard_link) if "dashboard" in self.client.scheduler_info()["services"] else ""

    def status(self) -> Status:
        """Tasks, servers, sizes and health, as text and as a card."""
        if not self._closed and self._engine.lost is None:
            self._variables.drop_gone()
            self._do("status", 2 * PATIENCE + 1, self._overview.ask)
        return self._status()

    def _status(self) -> Status:
        """The same, of the last answers."""
        engine, address = self._engine, scheduler_address(self.client)
        if self._closed or engine.lost is not None:
            self._overview.forget()
        shards = f", {len(engine.shards)} shards" if len(engine.shards) > len(engine.servers) else ""
        encryption = "encrypted" if parse_address(address)[0] in ("tls", "wss") else "plain"
        facts = (
            ("scheduler", f"{address} ({encryption}, {self._route})"),
            ("compute tasks", str(len(self.tasks))), ("parameter servers", f"{len(self.servers)}{shards}"),
            ("variables on servers", str(len(self._variables.held))), ("step", str(engine.step)),
            ("local values are of step", str(self.pulled_step)), ("epoch", str(engine.epoch)),
            ("members", f"read from the scheduler every {LOOK:g} s"),
            ("restarts left", f"{engine.restarts.left(time.monotonic())} of {engine.restarts.most}"),
            ("lanes of the servers", self._overview.lanes() or "nothing moved"),
            ("dashboard", self.dashboard_link or "off"),
        )  # fmt: skip
        state = "closed" if self._closed else "lost" if engine.lost else "connected"
        notes = tuple([engine.lost.message] if engine.lost else ())
        dead = sum(not member.is_there for member in engine.places.values())
        if dead and not engine.lost:
            notes += (f"{dead} of {len(engine.places)} compute tasks are lost; the others go on",)
        notes += tuple(engine.lines)[-SHOWN:]
        return Status(f"Dask cluster, {state}", facts, self._overview.rows(), notes)

    def follow(self, tell: Callable[[Status], object]) -> None:
        """Call ``tell`` with the status twice a second, in a thread of its own, and at last when it is closed or lost.

        `%tfcluster --live` shows a card so.

        >>> with connect(2) as cluster:  # doctest: +SKIP
        ...     cluster.follow(print)
        ...     tfnb.fit(train, {x: images})
        """
        self._ensure_open()
        self._followers.append(tell)
        if len(self._followers) == 1:
            self._link.post(self._begin_telling)

    def _begin_telling(self) -> None:
        self._teller = asyncio.create_task(self._telling())  # none of the calls that an interrupt waits for

    async def _telling(self) -> None:
        while self._engine.lost is None:
            await asyncio.sleep(LOOK)
            with suppress(TfnbError):  # of a server that is lost: the engine says so
                await self._overview.ask()
            self._tell()

    def _tell(self) -> None:
        for tell in tuple(self._followers):
            try:
                tell(self._status())
            except Exception as error:
                self._followers.remove(tell)
                self._engine.notes.append(f"a follower of the cluster failed: {type(error).__name__}: {error}")

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()

    def __repr__(self) -> str:
        return str(self.status())

    # -- running ----------------------------------------------------------------------------------------------

    def run(
        self, step: StepGraph, tensors: Sequence[torch.Tensor], *, timeout: float | None = None, run: int = 0,
        check: bool = False, see: See | None = None,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """One step on one task: the fetched values of ``step``; ``tensors`` in the order of its feeds.

        check: raise NonFinite where the step would give, or write, numbers that are not finite. see: gets the fetched
        values before anything is written; nothing is where it raises.
        """
        self._ensure_open()
        placed = self._place(step, parallel=False, check=check)
        self._variables.send(step.variables)
        queues = self._queues.used(placed.queues)
        try:
            values, _, _ = self._step(step, placed, Batch(tuple(tensors), run), timeout, "run", queues, see)
        except OutOfRange as error:
            error.__cause__ = self._queues.cause(placed.queues)
            raise
        return _picked(placed.fetched, values[0])

    def _step(
        self,
        step: StepGraph,
        placed: Placed,
        batch: Batch,
        timeout: float | None,
        what: str,
        queues: Sequence[tuple[int, str]] = (),
        see: See | None = None,
    ) -> tuple[list[list[Any]], list[int], list[Any]]:
        patience = None if timeout is None else timeout + 5
        before = self._engine.step

        def seen(values: list[list[Any]]) -> None:
            _looks.set(True)  # of this thread: its context is a copy
            if see is not None:
                see(_picked(placed.fetched, values[0]))

        looked = None if see is None else seen
        try:
            return self._do(what, patience, self._engine.single.run, placed, batch, timeout, queues, looked)
        finally:
            if self._engine.step != before:
                self._variables.outdated(step)

    def in_chunks(self, data: Any, timeout: float | None) -> Any:
        """Data for `ahead`: Dask collections are computed and kept on the workers, and never come here."""
        if not isinstance(data, Mapping):
            return data
        self._ensure_open()
        return in_chunks(self.client, data, timeout)

    def ahead(self, step: StepGraph, data: Ahead) -> Ahead | Iterator[Batch | None]:
        """What `train` takes, made of arrays in the order of its feeds: sent once, unless they are too large."""
        arrays = data.arrays
        fits = all(of or not array.dim() for of, array in zip(varying(step), arrays, strict=True))
        budgets = (member.info.get("budget") for member in self._engine.tasks)
        room = min([AHEAD, *(budget // 4 for budget in budgets if budget)])
        if fits and envelope.size([array for array in arrays if isinstance(array, torch.Tensor)]) <= room:
            return data
        return self._drawn(step, data)

    def _drawn(self, step: StepGraph, data: Ahead) -> Iterator[Batch | None]:
        """Batches that are made here."""
        rows = Rows([read(self.client, array) for array in data.arrays], data.order)

        def each() -> Iterator[tuple[Sequence[torch.Tensor], int] | None]:
            for at in range(data.total):
                if data.ends_pass(at):
                    yield None
                yield rows.batch(at), data.run(at)

        return batches(step, each())

    def train(
        self, step: StepGraph, source: Ahead | Iterable[Batch | None], *, mode: Mode | str = "sync",
        timeout: float | None = None, one_by_one: str = "", changes: Callable[[], Mode | None] = lambda: None,
        check: bool = False, see: See | None = None,
    ) -> Generator[StepGroup, None, None]:  # fmt: skip
        """Train data-parallel over the compute tasks; yields the fetched values of steps that are applied, in groups.

        sync: the rows of a batch are divided over the live tasks, gradients are averaged weighted by rows. With
        ``backup`` spare tasks a step is made of the first gradients that all servers have, and takes no later ones.
        async: each task works on whole batches of its own. bounded: likewise, at most ``staleness`` steps ahead of the
        slowest one. ``changes``: asked now and then for another mode to go on in. Tasks work ahead of what is yielded.
        Close the generator (or
        exhaust it): local storages then show the values of the last step, also after Ctrl-C. ``timeout``: seconds for
        all of it. ``one_by_one``: why the notebook has to see every step before the next one begins; each is a group of
        its own then. Asynchronous tasks end their steps in any order: a group has their numbers. ``check``: as of
        `run`. ``see``, too: then each step is taken by one task.

        Where there is a None among the batches, or a pass ends of data that says so, tasks stand still when everything
        before is applied: local storages show that, and an empty group tells it. They go on when the next one is asked
        for.
        """
        self._ensure_open()
        how = self._possible(Mode(mode) if isinstance(mode, str) else mode)
        end = None if timeout is None else time.monotonic() + timeout
        placed = self._place(step, parallel=see is None, check=check)
        one_by_one = "a breakpoint is set" if see is not None else one_by_one
        why = placed.why_whole or one_by_one or (placed.after and "a watched value shows the state after the step")
        if why and how != Mode():
            warnings.warn(f"mode={how} takes one step after the other: {why}", stacklevel=user_level(None))
        elif placed.why_whole and see is None:
            text = f"every step runs whole on one task, not in parallel: {placed.why_whole}"
            warnings.warn(text, stacklevel=user_level(None))
        is_stepwise = why or not placed.writes
        steps = (
            self._stepwise(step, placed, source, end, see)
            if is_stepwise
            else self._looping(step, placed, source, how, changes, end, timeout)
        )
        is_shown = False
        try:
            try:
                for group in steps:
                    yield group
                    if group.steps:  # where tasks stand still, storages show it, and what is written here goes there
                        self._variables.refresh()
            finally:
                steps.close()
            self._show()
            is_shown = True
        finally:
            if not is_shown and self._engine.lost is None:  # an error, or Ctrl-C at whatever instant, also in `_show`
                self._show()

    def _possible(self, mode: Mode) -> Mode:
        """The mode, if there are the tasks that it needs."""
        tasks = len(self.tasks)
        if mode.name not in MODES:
            raise Unimplemented(f"mode={mode.name!r}: this version trains with {' and '.join(map(repr, MODES))}")
        if mode.backup >= tasks > 0:
            raise InvalidArgument(
                f"backup={mode.backup} leaves no task to wait for: the cluster has {tasks} compute "
                f"task{'s' if tasks > 1 else ''}; {f'use at most {tasks - 1}, or ' if tasks > 1 else ''}connect more"
            )
        if tasks and (mode.replicas not in (0, tasks) or (mode.required > tasks and not mode.elastic)):
            asked = f"n={mode.replicas}" if mode.replicas else f"m={mode.required}"
            raise InvalidArgument(f"SyncReplicas asks for {asked} tasks, and the cluster has {tasks}: connect as many")
        return mode

    def _stepwise(
        self, step: StepGraph, placed: Placed, source: Ahead | Iterable[Batch | None], end: float | None,
        see: See | None,
    ) -> Generator[StepGroup, None, None]:  # fmt: skip
        """Every step driven from here, for what no loop of a task can do by itself."""
        ways = joins(step)
        self._variables.send(step.variables)
        if isinstance(source, Ahead):
            source = self._drawn(step, source)
        for batch in source:
            if batch is None:
                self._show()
                yield STANDS
                self._variables.send(step.variables)
                continue
            left = self._left(end)
            self._variables.send(step.variables, thorough=False)
            taken = batch if see is None else replace(batch, rows=None)
            values, rows_of, after = self._step(step, placed, taken, left, "a training step", see=see)
            parts = [_picked(placed.fetched, part) for part in values]
            joined = [join(way, [part[i] for part in parts], rows_of) for i, way in enumerate(ways)]
            for i, at in enumerate(placed.after_fetched):
                if at is not None:
                    joined[i] = after[at]
            yield of_one(joined, batch.number)

    def _left(self, end: float | None) -> float | None:
        """Seconds until ``end``; raises DeadlineExceeded when it is past."""
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise DeadlineExceeded(
                f"training did not end in time; variables are at step {self._engine.step}", step=self._engine.step
            )
        return left

    def _looping(
        self, step: StepGraph, placed: Placed, source: Ahead | Iterable[Batch | None], mode: Mode,
        changes: Callable[[], Mode | None], end: float | None, timeout: float | None,
    ) -> Generator[StepGroup, None, None]:  # fmt: skip
        """The tasks loop by themselves; from here they are lent pieces of the data ahead of need."""
        engine, held, left = self._engine, self._variables.held, self._left(end)
        self._variables.send(step.variables)
        self._variables.outdated(step)
        data, pieces = drawn_from(source, mode.name != "sync", engine.homes)
        training: Training = self._do("starting to train", None, engine.train, placed, mode, joins(step), data, left)

        def results(offers: list[Offer], drain: bool = False) -> Iterator[StepGroup]:
            patience = None if end is None else max(0.0, end - time.monotonic()) + SETTLE
            new = changes()
            how = None if new is None else self._possible(new)
            for group in self._do("training", patience, training.exchange, offers, pieces.is_spent, drain, how):
                yield group._replace(values=_picked(placed.fetched, group.values))

        try:
            while training.end is None:
                self._variables.outdated(step)
                self._variables.send(step.variables, thorough=False)
                machine, offers = training.machine, []
                for task in machine.takers:
                    size = machine.sizes.next(pieces.left, machine.parts)
                    piece = pieces.take(size, lambda: bool(held.written(step.variables, thorough=False)), task)
                    offers += [Offer(piece, task)] if piece else []
                    if pieces.held_back or pieces.stands or pieces.is_spent:
                        break
                if pieces.held_back or pieces.stands:  # held back: the user's iterator wrote a Variable
                    yield from results(offers, drain=True)
                    offers = []
                    if pieces.stands and training.end is None:
                        pieces.stands = False
                        self._show()
                        yield STANDS
                        self._variables.send(step.variables)
                        continue
                    self._variables.send(step.variables, thorough=False)
                yield from results(offers)
            yield from results([])
        finally:
            if training.end is None and engine.lost is None:
                self._do("ending the training", SETTLE, training.finish)
        told = self._link.start(engine.training_error, training, timeout)
        error = self._link.wait(told, SETTLE, "the end of the training")
        if error is not None:
            raise self._explained(error)

    # -- variables ----------------------------------------------------------------------------------------------

    def _place(self, step: StepGraph, *, parallel: bool, check: bool = False) -> Placed:
        """The plans of a step, with its variables on the servers."""
        with self._placing:
            self._variables.drop_gone()
            known = self._placed.get((id(step), parallel, check))
            if known is None or known[0]() is not step:
                task = task_of(asked(step.graph.nodes), [member.name for member in self._engine.tasks])
                cut = split(step, self._variables.homes_of(step), parallel=parallel, task=task)
                known = (weakref.ref(step), place(cut, check=check))
                self._placed[id(step), parallel, check] = known
                while len(self._placed) > KEPT:
                    self._placed.popitem(last=False)
            self._variables.adopt(step)
            return known[1]

    def pull(self) -> int:
        """Refresh the local storages (the modules' parameters) from the servers; returns the step they show.

        What was written here since the last pull is sent first. Where steps were taken since, the servers' values
        count, and a warning names the Variable.
        """
        self._ensure_open()
        self._variables.drop_gone()
        self._settle_writes()
        return self._variables.pull()

    def _settle_writes(self) -> None:
        self._engine.notes += map(gives_way, self._variables.sent_but_behind())
        self._say_notes()

    def _show(self) -> None:
        """The end of a training: storages show its last step, but for what the user wrote here meanwhile."""
        if self._engine.is_closing:  # another thread closes it, which brings the values home
            return
        self._ensure_open()
        self._variables.drop_gone()
        self._variables.pull(self._variables.sent_but_behind())

    def cut(
        self, variables: Iterable[Variable], queues: Iterable[Queue]
    ) -> tuple[dict[str, torch.Tensor], dict[Queue, Held], int]:
        """Copies of values by key, also in mid-training all of one step, what queues hold then, and that step.

        A Variable that no step here has used yet has its value in this process.
        """
        self._ensure_open()
        wanted = list(variables)
        there = [variable for variable in wanted if variable in self._variables.held]
        self._variables.send(variable for variable in there if variable.key not in self._variables.held.stale)
        here = {variable.key: variable.value() for variable in wanted if variable not in there}
        at, own = self._sorted(queues)
        values, step, found = self._do("reading variables and queues", None, self._variables.values, there, at)
        held = {queue: Held(*found[key]) for queue, (_, key) in at.items()}
        held |= {own[label]: one for label, one in held_by(own).items()}
        return here | {v.key: values[v.key].to(v.spec.device) for v in there}, held, step

    def _sorted(self, queues: Iterable[Queue]) -> tuple[dict[Queue, tuple[int, str]], dict[str, Queue]]:
        """Shard and key of queues on servers, and by label those that stayed here: their servers refused them."""
        if machines := {queue: machine_of(queue) for queue in queues}:
            self._do("waiting for queues", None, self._queues.there)
        here = [queue for queue in machines if isinstance(queue.machine, QueueMachine)]
        return self._queues.places(queue for queue in machines if queue not in here), labelled(here)

    @contextmanager
    def restoring(
        self, values: Mapping[Variable, torch.Tensor], held: Mapping[Queue, Held]
    ) -> Iterator[Callable[[], None]]:
        """A block in which a call lets Variables and queues be this, all or none; until then nothing is changed."""
        self._ensure_open()
        with self._placing:
            at, own = self._sorted(held)
            bringing = brought(self._variables, values, held, at, own)
            with bringing as become, self._turn("the restore changed nothing: it"):
                yield become

    @contextmanager
    def _turn(self, who: str) -> Iterator[None]:
        """A block beside which no step computes, but those that wait for queues. The wait for it can be interrupted."""
        turn, single = Turn(), self._engine.single
        what = f"{who} waits for a run of another thread, which"
        try:
            self._link.wait(self._link.start(single.take, turn), STEP, what, self._say_notes)
            yield
        finally:
            self._link.post(single.leave, turn)

    # -- the end --------------------------------------------------------------------------------------------------

    def _lost(self, error: TfnbError) -> None:
        """A server is gone (called in the event loop): the notebook goes on with the last pulled values."""
        self._queues.lost(error)
        step, missing = self.pulled_step, max(0, self._engine.step - self.pulled_step)
        tell = f"{missing} later steps are gone" if missing else "no later one was known here"
        error.message = (
            f"{error.message}\n  The local variables hold the last pulled values, of step {step}: {tell}.\n"
            "  The notebook goes on without the cluster; tfnb.connect(...) makes another."
        )
        error.details = {"pulled_step": step, "lost_steps": missing}
        self._variables.release()
        self._placed.clear()
        if connected.connected() is self:
            connected.notices.append(f"the cluster was lost: runs are here now, with the values of its step {step}")
        connected.disconnect(self)

    def close(self, timeout: float = 30.0) -> None:
        """Bring the values home and close what `connect` opened; harmless if repeated.

        With a server, the scheduler or the client lost the last pulled values stay, and a warning says of which step
        they are. A client that the user closes first brings the values home by itself.
        """
        _ensure_no_look("close")
        is_known = self._closed or self._is_loss_told
        try:
            if self._engine.lost is None and not self._closed:
                self._engine.is_closing = True
                self._do("close", timeout, self._leave, timeout)
        except Unavailable:
            self._engine.lose_scheduler()  # unless a server was
        finally:
            if self._engine.lost is not None and not is_known:
                warnings.warn(f"closed without the last values: {self._engine.lost}", stacklevel=2)
            self._end()
            self._where.close()

    async def _client_closes(self) -> None:
        """The user closes the Dask client first: what `close` does, while its connections stand. In the event loop."""
        if self._engine.lost is None:
            self._engine.is_closing = True
            with suppress(TfnbError, TimeoutError, OSError):
                await asyncio.wait_for(self._leave(SETTLE), SETTLE)
                if self._engine.lost is None:
                    self._end()
                    connected.notices.append("the Dask client was closed: the values came home, and runs are here now")
                    return
            self._engine.lose_scheduler()

    def _end(self) -> None:
        """Nothing is asked any more, whoever closed what."""
        if self._closed:
            return
        self._say_notes()
        self._closed = self._engine.is_closed = True
        if self._teller is not None:
            self._link.post(self._teller.cancel)
        self._tell()
        self._farewell.cancel()
        self._queues.end()
        self._link.post(self._supervisor.cancel)
        connected.notices.clear()  # whoever closes it knows
        self._variables.release()
        self._placed.clear()
        connected.disconnect(self)
        for member in (*self._engine.tasks, *self._engine.servers):
            member.future.release()

    async def _leave(self, timeout: float) -> None:
        await self._engine.settle(timeout / 2)
        await self._queues.bring_home()
        if len(self._variables.held):
            await self._variables.bring_home(self._variables.kept())

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- waiting --------------------------------------------------------------------------------------------------

    def _ensure_open(self) -> None:
        if self._closed:
            raise FailedPrecondition("this cluster is closed; tfnb.connect(...) makes another")
        if self._engine.lost is not None:
            raise self._explained(self._engine.lost)

    def _do(self, what: str, timeout: float | None, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Wait for the event loop to do it; an interrupt or a deadline here ends it there, at a step boundary."""
        _ensure_no_look(what)
        self._say_notes()
        try:
            return self._link.wait(self._link.start(function, *args), timeout, what, self._say_notes)
        except ParameterServerLost as error:
            raise self._explained(error) from None
        except TfnbError:
            raise
        except BaseException:
            self._settle()
            raise

    def _say_notes(self) -> None:
        with suppress(IndexError):  # none are left; other threads take some, too
            while True:
                warnings.warn(self._engine.notes.pop(0), stacklevel=user_level(None))

    def _settle(self) -> None:
        """End what is in progress, at a step boundary."""
        self._link.wait(self._link.start(self._engine.settle, SETTLE), SETTLE + 1, "ending the step")

    def _explained(self, error: TfnbError) -> TfnbError:
        """A fresh exception of the same error, so that tracebacks do not pile up."""
        self._is_loss_told = self._is_loss_told or self._engine.lost is not None
        fresh = type(error)(error.message)
        vars(fresh).update(vars(error))
        fresh.__notes__, fresh.__cause__ = list(getattr(error, "__notes__", ())), error.__cause__
        return fresh


def _ensure_no_look(what: str) -> None:
    if _looks.get():
        raise FailedPrecondition(
            f"the condition of a breakpoint asked the cluster for something ({what}), which waits for the condition: "
            "read what it compares with before the run, or fetch it"
        )


def _picked(places: Sequence[int | None], values: Sequence[Any]) -> list[Any]:
    return [None if place is None or not values else values[place] for place in places]
