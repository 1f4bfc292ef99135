"""`connect` and the connected `Cluster`: the blocking face of the engine.

While a cluster is connected its servers own the values of the variables that ran there. A variable moves to the servers
at its first use by a run or fit; `Cluster.pull` copies values to the notebook, and `Cluster.close` returns ownership.
The storages here are current after `pull`, in ``state_dict``, where a training stands still, at the end of `fit`, and
after `close`.
Work that Ctrl-C must not interrupt happens in the client's event loop, for which this thread only waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from distributed import Client, Security, deploy

from tfnb.cluster import connected
from tfnb.cluster.engine.engine import Engine
from tfnb.cluster.engine.members import Ahead, Mode, StepFeeds
from tfnb.cluster.engine.restarts import Restarts
from tfnb.cluster.members.adapting import Adapting
from tfnb.cluster.members.connection import ConnectProgress, DaskCluster, LocalWorkers, Requirements, Servers
from tfnb.cluster.members.deploy import find, start
from tfnb.cluster.members.farewell import Farewell
from tfnb.cluster.members.registered import Registration
from tfnb.cluster.members.supervisor import LOOK, Supervisor
from tfnb.cluster.notebook.card import Status
from tfnb.cluster.notebook.collections import head, in_chunks
from tfnb.cluster.notebook.overview import PATIENCE, Overview
from tfnb.cluster.notebook.pinned_values import PinnedValues
from tfnb.cluster.notebook.queue_homes import QueueHomes
from tfnb.cluster.notebook.restoring import brought
from tfnb.cluster.notebook.steps_there import Steps, batches
from tfnb.cluster.notebook.variables_there import VariablesThere, gives_way
from tfnb.cluster.notebook.waiting import SETTLE, EventLoopWaiter, ensure_no_look
from tfnb.cluster.recovery import KEPT, NOTEBOOK, BatchReplay, Recovery, RecoveryBudget, logged
from tfnb.cluster.wire.lossy import AS_THEY_ARE, LossyTransfers
from tfnb.cluster.wire.transport import ClientLink, parse_address, scheduler_address
from tfnb.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    ParameterServerLost,
    SchedulerLost,
    TfnbError,
    Unavailable,
    Unimplemented,
)  # fmt: skip
from tfnb.graph import Variable
from tfnb.graph.queue import Queue
from tfnb.passes import StepGraph
from tfnb.recording.marks.notes import user_level
from tfnb.state.batch_order import Arrays, Rows
from tfnb.state.chunks import ChunkedArray, like
from tfnb.state.queue_contents import QueueSnapshot, held_by, labelled
from tfnb.state.queue_machine import QueueMachine
from tfnb.state.queue_operations import machine_of
from tfnb.state.step_groups import StepGroup
from tfnb.state.steps_taken import AppliedSteps, SeenSteps
from tfnb.state.waits import check_timeout

SHOWN = 5  # lines of the status that tell who came and who left
ENDED_WITHIN = 5.0  # seconds that a training has to end where a server was lost
REPLACED_WITHIN = 20.0  # seconds that a recovery waits for as many workers as there were, if a nanny starts them
RECOVERED_WITHIN = 60.0  # seconds that a recovery may take


def connect(
    cluster: int | str | Path | Client | deploy.Cluster | None = None,
    *,
    ps: Servers | None = None,
    name: str | None = None,
    workers: int | None = None,
    resources: Mapping[str, float] | None = None,
    security: Security | None = None,
    insecure: bool = False,
    timeout: float = 120.0,
    threads: int | None = None,
    memory: str | int | None = None,
    dashboard: bool = False,
    lossy: Mapping[str, str | torch.dtype] | None = None,
) -> Cluster:
    """Run graphs on a Dask cluster from now on.

    cluster: a number n (a cluster of processes on this machine, n compute tasks plus ``ps`` servers, default one), a
    scheduler address or file, a Client, a cluster object, or nothing (Dask's default client, else a local cluster).
    Of a given cluster ``ps`` workers become servers (default one in four, at least one), the rest compute.
    ``ps="stages"``: each task is a parameter server, too, and the first ``fit(mode="pipeline")`` of a graph moves the
    Variables of each stage, with their optimizer slots, to its task, so that neither they nor their gradients travel;
    for other steps the tasks are ordinary servers. Losing a task is then losing a server. workers: so
    many are waited for, default ``ps + 1``, without ``ps`` one, for stages two; where ``ps`` leaves no compute task,
    half of them become servers, which hold the ``ps`` shards round robin. resources: only workers that Dask knows to
    have so much are taken, such as ``{"GPU": 1}``; workers that are started here have it. security:
    a `distributed.Security` for tls:// addresses. insecure: allow a plain address on another machine. timeout in
    seconds for everything; after two seconds it says which workers are up. Of a cluster that is started here, threads:
    of each worker (one); memory: the limit of each worker, bytes or text such as ``"2GB"``; dashboard: Dask's, whose
    address is in the status. lossy: floating numbers that cross in fewer bits, by class: ``{"gradients": "bfloat16"}``
    of those that tasks send to servers, ``"edges"`` of values that tasks send each other in a step over several of
    them; ``"bfloat16"``, ``"bfloat16_truncated"``, ``"float16"`` or ``"int8"``. Values of Variables, integers, sums of
    ``exact=True`` and checkpoints are never rounded. Raises Unavailable naming the address, InvalidArgument,
    InsecureAddress, VersionMismatch, DeadlineExceeded, FailedPrecondition for a worker whose task does
    not start; nothing is left running then.
    """
    if name is not None:
        raise Unimplemented("connect(name=...): re-attaching to the state of an earlier notebook is not there yet")
    check_timeout(timeout)
    formats = LossyTransfers.of(lossy)
    for notice in connected.notices:
        notice()  # the newest values of a cluster that was lost are those that go to the next one
    end = time.monotonic() + timeout
    wanted = Requirements(ps, workers, {} if resources is None else resources)
    where = find(cluster, wanted, security, insecure, timeout, LocalWorkers(threads, memory, dashboard))
    try:
        made = Cluster(where, max(0.1, end - time.monotonic()), formats)
    except BaseException:
        where.close()
        raise
    connected.connect(made)
    try:
        made._queues.begin()
    except BaseException:
        made.close()
        raise
    for line in made.news(0)[1]:
        where.progress.tell(line)
    return made


class Cluster:
    """A connected cluster; a context manager that closes the connection at its end.

    >>> with connect(2) as cluster:  # doctest: +SKIP
    ...     tfnb.run(train, feeds)
    """

    batches = staticmethod(batches)

    def __init__(self, where: DaskCluster, timeout: float, lossy: LossyTransfers = AS_THEY_ARE) -> None:
        self._where, self._lossy = where, lossy
        self.client = where.client
        self._link = ClientLink(self.client)
        self._adapting = Adapting(self.client)
        self._followers: list[Callable[[Status], object]] = []
        self.curve: Sequence[Mapping[str, float]] = ()  # watched values of the latest `fit`, as far as it is
        self._teller: asyncio.Task[None] | None = None
        self._recovering = threading.Lock()
        self._lost_at = 0.0  # when a server or the scheduler was lost
        self._begin(where.wanted, timeout)
        self._farewell = Farewell(self.client, self._client_closes)

    def _begin(self, wanted: Requirements, timeout: float) -> None:
        """Start tasks and servers on the present workers, under a new epoch."""
        progress, self._registered = self._where.progress, Registration(self.client)
        given = self.client, self._link, self._registered, wanted, self._adapting, timeout, progress
        handle = self._link.start(start, *given)
        tasks, servers, self._route = self._link.wait(handle, timeout + 5, "starting the tasks", progress.say)
        self._engine = Engine(self._link, tasks, servers, self._registered.epoch)
        self._engine.on_lost = self._lost
        self._workers = len({member.peer.addr for member in (*tasks, *servers)})  # with which it begins
        self._supervisor = Supervisor(self.client, self._engine, self._registered, self._where.wanted, self._adapting)
        self._link.wait(self._link.start(self._supervisor.start), timeout, "watching the workers")
        self._overview = Overview(self._engine, self.client)
        self._waiting = EventLoopWaiter(self._engine)
        self._do = self._waiting.do
        self._queues = QueueHomes(self._engine, self._link)
        self._variables = VariablesThere(self._engine, self._do, self._queues, self._supervisor.copied)
        about = self.client, self._engine, self._waiting, self._variables, self._queues
        self._steps = Steps(*about, is_staged=wanted.is_staged, lossy=self._lossy)

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
    def is_stalled(self) -> bool:
        """Whether everything waits for a server that does not answer, or for the recovery from the loss of one."""
        return bool(self._engine.peers.silent) or self._recovering.locked()

    @property
    def step(self) -> int:
        """Steps (asynchronous: batches) applied since connecting; for a lost cluster, as of the last pull."""
        return self._engine.step if self._engine.lost is None else self.pulled_step

    @property
    def pulled_step(self) -> int:
        """The step that the local storages show."""
        return self._variables.pulled_step

    def news(self, since: int) -> tuple[int, list[str]]:
        """Lines on members that joined or left, after the first ``since`` lines; and the total number of lines."""
        engine = self._engine
        return engine.said, list(engine.lines)[max(0, len(engine.lines) - (engine.said - since)) :]

    @property
    def dashboard_link(self) -> str:
        """Dask's dashboard, or an empty string where there is none."""
        if self._engine.is_closed or self.client.status != "running" or not self._where.dashboard:
            return ""
        return str(self.client.dashboard_link) if "dashboard" in self.client.scheduler_info()["services"] else ""

    def status(self) -> Status:
        """Tasks, servers, sizes and health, as text and as a card."""
        if not self._engine.is_closed and self._engine.lost is None:
            self._variables.drop_gone()
            self._do("status", 2 * PATIENCE + 1, self._overview.ask)
        return self._status()

    def _status(self) -> Status:
        """The same, of the last answers."""
        engine, address = self._engine, scheduler_address(self.client)
        if self._engine.is_closed or engine.lost is not None:
            self._overview.forget()
        shards = f", {len(engine.shards)} shards" if len(engine.shards) > len(engine.servers) else ""
        encryption = "encrypted" if parse_address(address)[0] in ("tls", "wss") else "plain"
        facts = (
            ("scheduler", f"{address} ({encryption}, {self._route})"),
            ("compute tasks", str(len(self.tasks))), ("parameter servers", f"{len(self.servers)}{shards}"),
            ("variables on servers", str(len(self._variables.held))), ("step", str(engine.step)),
            *([("speed", f"{rate:.1f} steps a second")] if (rate := self._overview.rate) else []),
            *([("lossy", str(self._lossy))] if any(self._lossy) else []),
        )  # fmt: skip
        details = (
            ("local values are of step", str(self.pulled_step)),
            *([("copy for a recovery", str(copy))] if (copy := self._variables.safety.newest) else []),
            ("epoch", str(engine.epoch)),
            ("members", str(self._registered)),
            ("restarts left", f"{engine.restarts.left(time.monotonic())} of {engine.restarts.most}"),
            ("lanes of the servers", self._overview.lanes() or "nothing moved"),
            ("dashboard", self.dashboard_link or "off"),
        )  # fmt: skip
        state = "closed" if self._engine.is_closed else "lost" if engine.lost else "connected"
        notes = tuple([engine.lost.message] if engine.lost else ())
        dead = sum(not member.may_answer for member in engine.places.values())
        if dead and not engine.lost:
            notes += (f"{dead} of {len(engine.places)} compute tasks are lost; the others go on",)
        notes += tuple(engine.lines)[-SHOWN:]
        rows = self._overview.rows(self._variables.held)
        return Status(f"Dask cluster, {state}", facts, rows, notes, details, self.curve, engine.step)

    def follow(self, tell: Callable[[Status], object]) -> None:
        """Call ``tell`` with the status twice a second in another thread, and a last time when the cluster is closed or
        lost.

        `%tfcluster --live` shows a card so.

        >>> with connect(2) as cluster:  # doctest: +SKIP
        ...     cluster.follow(print)
        ...     tfnb.fit(train, {x: images})
        """
        self._waiting.ensure_open()
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

    def run(self, step: StepGraph, tensors: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor | None]:
        """Run one step, on one task or on the tasks requested by its nodes; returns the fetched values: `Steps.run`."""
        with self._with_newest():
            return self._steps.run(step, tensors, **options)

    def train(
        self, step: StepGraph, source: Ahead | Iterable[StepFeeds | None], *, budget: RecoveryBudget | None = None,
        mode: Mode | str = "sync", timeout: float | None = None, begin: int = 0,
        changes: Callable[[], Mode | None] = lambda: None, **options: Any,
    ) -> Generator[StepGroup, None, None]:  # fmt: skip
        """Train data-parallel over the compute tasks: `Steps.train`.

        begin: so many steps of its arrays were taken before. budget: how often a lost server is replaced; not at all
        without one. An empty group tells each time what was ``lost``, and from which steps, ``kept``, training goes on.
        """
        replay, budget = (
            BatchReplay(source, AppliedSteps(begin)),
            RecoveryBudget(Restarts(most=0)) if budget is None else budget,
        )
        end = None if timeout is None else time.monotonic() + timeout

        def changed() -> Mode | None:
            nonlocal mode
            new = changes()
            mode = mode if new is None else new
            return new

        seen, failure = SeenSteps(), cast(BaseException | None, None)
        while failure is None:
            left = None if end is None else end - time.monotonic()
            about = {"mode": mode, "timeout": left, "changes": changed, "applied": replay.applied, **options}
            engine, recovery = self._engine, None
            try:
                with ExitStack() as stack:
                    if budget.restarts.most:
                        stack.enter_context(self._queues.journaled())
                    groups = stack.enter_context(closing(self._steps.train(step, replay.rest(), seen=seen, **about)))
                    for group in groups:
                        if group.kept is not None:
                            replay.keep(group.kept)
                        elif not group.steps:
                            replay.stood()
                        elif replay.nbytes + self._queues.nbytes > KEPT and budget.restarts.most:
                            self._variables.hurry()
                        yield group
                return
            except (ParameterServerLost, SchedulerLost, Cancelled, Aborted) as error:
                is_beside = self._engine is not engine and engine.lost is not None  # another thread recovered it
                if seen.now is None and isinstance(error, ParameterServerLost):
                    error.message += (
                        "\n  The training had not begun, and does not by itself: the values here lack steps before it, "
                        "and no process and no checkpoint holds newer ones."
                    )
                if seen.now is None or not (is_beside or isinstance(error, ParameterServerLost | SchedulerLost)):
                    raise
                try:
                    try:
                        files = bool(budget.restarts.most) and isinstance(error, ParameterServerLost)
                        self._recall(engine, error, files=files)
                    finally:
                        replay.keep(seen.now())
                    if isinstance(error, SchedulerLost):  # its workers leave, too
                        failure = error
                    elif not is_beside and isinstance(error, ParameterServerLost):
                        recovery = self.recover(error, budget, len(replay.applied), end)
                except (ParameterServerLost, KeyboardInterrupt) as stopped:
                    failure = stopped
            yield StepGroup(0, (), kept=replay.applied, lost=recovery or failure or "beside")
        raise failure

    def _recall(self, lost: Engine, error: TfnbError, *, files: bool) -> None:
        """Take the newest complete copy, if it is newer than the values here; the errors say so then.

        files: a checkpoint, too. Where the training does not go on, `fit` says which one is newer, and leaves it.
        """
        with self._recovering:
            if self._engine is lost and lost.lost is not None and not lost.is_closed:
                before = self._values_here()
                if self._variables.recall(files=files):
                    for one in (error, lost.lost):
                        one.message = one.message.replace(before, self._values_here())
                        one.details = self._details()
                for line in self._variables.passed_over:
                    error.message += f"\n  Passed over: {line}."

    @contextmanager
    def _with_newest(self) -> Iterator[None]:
        """A block: where it ends with the loss of a server, the values here are the newest that processes hold."""
        engine = self._engine
        try:
            yield
        except ParameterServerLost as error:
            self._newest(engine, error)
            raise

    def _newest(self, lost: Engine, error: TfnbError) -> None:
        """`_recall`, but for a training in progress: that chooses among copies and checkpoints by itself."""
        if not self._variables.training:
            self._recall(lost, error, files=False)

    def _notice(self) -> str:
        """What the next run here says of the loss of the cluster, with the values here as new as they can be."""
        if (error := self._engine.lost) is not None:
            self._newest(self._engine, error)
        return f"the cluster was lost: runs are here now, with the values of its step {self.pulled_step}"

    def recover(
        self, error: ParameterServerLost, budget: RecoveryBudget, kept: int, end: float | None = None
    ) -> Recovery:  # fmt: skip
        """Start tasks and servers again after the loss of a server. The values are those of the newest complete copy,
        of other processes or a checkpoint, else of the last pull.

        kept: steps of the training that these have seen. Where a server was lost with a queue of which nobody knows
        what it held, ``error`` is raised.
        """
        begin = time.monotonic()
        with self._recovering:
            lost = self._engine
            if lost.lost is None or lost.is_closing or lost.is_closed:
                raise error
            if names := ", ".join(self._queues.emptied):
                error.message += f"\n  Training does not go on by itself: nobody knows what queues {names} held."
                raise error
            age, gone = begin - self._variables.pulled_at, len(self._variables.unseen)
            copy, passed_over = self._variables.shown, tuple(self._variables.passed_over)
            undone = self._queues.undone
            step = kept + lost.step - self.pulled_step - gone
            budget.spend(error, step)
            self._leave_lost()
            seconds = RECOVERED_WITHIN if end is None else max(1.0, min(RECOVERED_WITHIN, end - time.monotonic()))
            try:
                self._begin_again(seconds)
            except TfnbError as failure:
                error.message += f"\n  No other could be started in its place: {failure}"
                raise error from failure
        first = error.message.partition("\n")[0].removesuffix(f" at step {lost.step}.")
        spent, left = time.monotonic() - begin, budget.restarts.left(time.monotonic())
        return logged(
            Recovery(
                time.time(), f"{type(error).__name__}: {first}", step, kept, gone, undone, age, spent, left,
                budget.restarts.most, budget.restarts.within, len(self.tasks), len(self.servers),
                *(("", NOTEBOOK) if copy is None else (copy.names, copy.source)), passed_over,
            )
        )  # fmt: skip

    def _leave_lost(self) -> None:
        """Nothing of the tasks and servers of the epoch that is over is used any more."""
        engine = self._engine
        with suppress(Exception):  # of whatever kind: others take its place
            stuck = self._link.wait(self._link.start_aside(engine.stuck), ENDED_WITHIN + SETTLE, "looking who answers")
            if addrs := [member.peer.addr for member in stuck if member.info.get("nanny")]:
                self.client.restart_workers(addrs, timeout=REPLACED_WITHIN, raise_for_error=False)
        with suppress(DeadlineExceeded):  # of an event loop that gets too little of its processor: it ends later
            what = "ending what was in progress"
            self._link.wait(self._link.start(engine.abandon, ENDED_WITHIN), ENDED_WITHIN + SETTLE, what)
        self._queues.end()
        self._link.post(self._supervisor.cancel)
        self._adapting.release()
        with suppress(TfnbError):
            self._link.start(self._registered.close)
        connected.notices.clear()
        self._variables.hooks.remove()
        for member in (*engine.tasks, *engine.servers):
            member.future.release()

    def _begin_again(self, seconds: float) -> None:
        """Start tasks and servers on as many workers as before or, if some do not come back, on the workers left."""
        before, step, wanted, end = self._engine, self.pulled_step, self._where.wanted, time.monotonic() + seconds
        members = (*before.servers, *before.places.values())
        is_replaced = any(member.info.get("nanny") for member in members)
        # the successor of a lost worker may have joined already: the two are one
        workers = max(self._workers, len({member.peer.addr for member in members if member.may_answer}))
        workers = min(workers, len({member.peer.addr for member in members}))
        self._where.progress = ConnectProgress()
        try:
            self._begin(wanted._replace(workers=workers), min(seconds, REPLACED_WITHIN) if is_replaced else 1.0)
        except (DeadlineExceeded, Unavailable):  # some do not come back, or one died or stopped meanwhile
            self._begin(wanted, max(1.0, end - time.monotonic()))
        engine = self._engine
        engine.step = self._variables.pulled_step = step
        engine.said, engine.lines, engine.restarts = before.said, before.lines, before.restarts
        engine.notes += before.notes
        connected.connect(self)
        self._queues.begin()
        if self._followers:
            self._link.post(self._begin_telling)

    def ahead(self, step: StepGraph, data: Ahead, begin: int = 0) -> Ahead | Iterator[StepFeeds | None]:
        """The input of `train`, made from arrays: `Steps.ahead`."""
        return self._steps.ahead(step, data, begin)

    def heads(self, data: Arrays) -> list[torch.Tensor]:
        """The rows of the first batch of arrays; of collections on the workers their first rows."""
        first = Rows([like(array) for array in data.arrays], data.order).batch(0)
        return [
            head(self.client, array, data.order.batch_size) if isinstance(array, ChunkedArray) else rows
            for array, rows in zip(data.arrays, first, strict=True)
        ]

    def in_chunks(self, data: object, timeout: float | None) -> Any:
        """Data for `ahead`: Dask collections are computed and kept on the workers; rows come here where this process
        drives steps.
        """
        if not isinstance(data, Mapping):
            return data
        self._waiting.ensure_open()
        return in_chunks(self.client, data, timeout)

    # -- variables ----------------------------------------------------------------------------------------------

    def pull(self) -> int:
        """Refresh the local storages (the modules' parameters) from the servers; returns the step they show.

        What was written here since the last pull is sent first. Where steps were taken since, the servers' values
        count, and a warning names the Variable.
        """
        self._waiting.ensure_open()
        self._variables.drop_gone()
        self._settle_writes()
        with self._with_newest():
            return self._variables.pull()

    @property
    def is_outdated(self) -> bool:
        """Whether servers have a newer value of some Variable than the storages here."""
        return bool(self._variables.held.stale)

    def show(self, tensors: Collection[int] | None, reader: str, patience: float | None = None) -> bool:
        """Refresh the local storages before these tensors (by id), or all, are read; returns whether with a warning.

        reader: of the tensors, for the warning. patience: seconds after which the reader takes the values here.

        With a server lost the storages show the newest values that processes hold; in the event loop, which cannot wait
        for itself, the last pulled ones.
        """
        engine, why = self._engine, ""
        if engine.is_closing or engine.is_closed:  # which brings the values home
            return False
        if self._waiting.is_here:
            why = "a follower of the cluster cannot wait for the servers"
        else:
            try:
                self._variables.show(tensors, patience)
            except TfnbError as error:
                if engine.lost is not None:
                    self._newest(engine, error)
                elif patience is None or not isinstance(error, DeadlineExceeded):
                    raise
                why = error.message
        if why:
            text = f"{reader} has the values here, of step {self.pulled_step}: {why}"
            warnings.warn(text, stacklevel=user_level(None))
        return bool(why)

    def _settle_writes(self) -> None:
        self._engine.notes += map(gives_way, self._variables.sent_but_behind())
        self._waiting.say_notes()

    def cut(
        self, variables: Mapping[str, Variable], queues: Iterable[Queue], *, pins: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[Queue, QueueSnapshot], int, PinnedValues | None]:
        """Copies of values by label and of queue contents, all at one step even in mid-training, and the step.

        A Variable that no step here has used yet has its value in this process. pins: values of the others stay on the
        servers, as pinned values, which these can write to a checkpoint.
        """
        self._waiting.ensure_open()
        there = {label: variable for label, variable in variables.items() if variable in self._variables.held}
        self._variables.send(one for one in there.values() if one.key not in self._variables.held.stale)
        here = {label: variable.value() for label, variable in variables.items() if label not in there}
        at, own = self._sorted(queues)
        pinned: PinnedValues | None = None
        if pins and there:
            pinned, step, found = self._do("pinning variables", None, self._variables.pinned, there, at)
        else:
            asked = list(there.values())
            values, step, found = self._do("reading variables and queues", None, self._variables.values, asked, at)
            here |= {label: values[one.key].to(one.spec.device) for label, one in there.items()}
        held = {queue: QueueSnapshot(*found[key]) for queue, (_, key) in at.items()}
        held |= {own[label]: one for label, one in held_by(own).items()}
        return here, held, step, pinned

    def _sorted(self, queues: Iterable[Queue]) -> tuple[dict[Queue, tuple[int, str]], dict[str, Queue]]:
        """Shard and key of queues on servers, and by label the local queues, refused by their servers."""
        if machines := {queue: machine_of(queue) for queue in queues}:
            self._do("waiting for queues", None, self._queues.there)
        here = [queue for queue in machines if isinstance(queue.machine, QueueMachine)]
        return self._queues.places(queue for queue in machines if queue not in here), labelled(here)

    @contextmanager
    def restoring(
        self, values: Mapping[Variable, torch.Tensor], held: Mapping[Queue, QueueSnapshot]
    ) -> Iterator[Callable[[], None]]:
        """A block with a function that restores Variables and queues, all or none; nothing changes until its call."""
        self._waiting.ensure_open()
        with self._steps.placing:
            at, own = self._sorted(held)
            bringing = brought(self._variables, values, held, at, own)
            with bringing as become, self._waiting.turn("the restore changed nothing: it"):
                yield become

    # -- the end --------------------------------------------------------------------------------------------------

    def _lost(self, error: TfnbError) -> None:
        """A server is gone (called in the event loop): the notebook goes on with the last pulled values."""
        self._lost_at = time.monotonic()
        self._variables.leave()
        self._queues.lost(error)
        error.message = (
            f"{error.message}\n  {self._values_here()}\n"
            "  The notebook goes on without the cluster; tfnb.connect(...) makes another."
        )
        error.details = self._details()
        self._variables.release()
        self._steps.forget()
        if connected.connected() is self:
            connected.notices.append(self._notice)
        connected.disconnect(self)

    def _details(self) -> dict[str, int]:
        return {"pulled_step": self.pulled_step, "lost_steps": max(0, self._engine.step - self.pulled_step)}

    def _values_here(self) -> str:
        """The values in the storages here after a loss: from where, of which step, and how old they were then."""
        there, missing = self._variables, self._details()["lost_steps"]
        tell = f"{missing} later steps are gone" if missing else "no later one was known here"
        age = max(0.0, self._lost_at - there.pulled_at)
        what = there.shown.source if there.shown else "the last pulled values"
        return f"The local variables hold {what}, of step {there.pulled_step}, {age:.1f} s old: {tell}."

    def close(self, timeout: float = 30.0) -> None:
        """Bring the values home and close everything opened by `connect`; harmless if repeated.

        With a server, the scheduler or the client lost the last pulled values stay, and a warning says of which step
        they are. A client that the user closes first brings the values home by itself.
        """
        ensure_no_look("close")
        is_known = self._engine.is_closed or self._waiting.is_loss_told
        try:
            if self._engine.lost is None and not self._engine.is_closed:
                self._engine.begin_closing()
                self._do("close", timeout, self._leave, timeout)
        except Unavailable:
            self._engine.lose_scheduler()  # unless a server was
        finally:
            if (lost := self._engine.lost) is not None:
                self._newest(self._engine, lost)
                if not is_known:
                    warnings.warn(f"closed without the last values: {lost}", stacklevel=2)
            self._end()
            self._where.close()

    async def _client_closes(self) -> None:
        """Close the cluster when the user closes the Dask client first, while connections stand. In the event loop."""
        if self._engine.lost is None:
            self._engine.begin_closing()
            with suppress(TfnbError, TimeoutError, OSError):
                await asyncio.wait_for(self._leave(SETTLE), SETTLE)
                if self._engine.lost is None:
                    self._end()
                    text = "the Dask client was closed: the values came home, and runs are here now"
                    connected.notices.append(lambda: text)
                    return
            self._engine.lose_scheduler()

    def _end(self) -> None:
        """End everything local, without calls to members, after any kind of close."""
        if self._engine.is_closed:
            return
        self._waiting.say_notes()
        self._engine.is_closed = True
        if self._teller is not None:
            self._link.post(self._teller.cancel)
        self._tell()
        self._farewell.cancel()
        self._queues.end()
        self._link.post(self._supervisor.cancel)
        self._adapting.release()
        if not self._where.closers:  # else the client goes, and with it the entry
            with suppress(TfnbError):
                self._link.start(self._registered.close)
        connected.notices.clear()  # whoever closes it knows
        self._variables.release()
        self._variables.hooks.remove()
        self._steps.forget()
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
