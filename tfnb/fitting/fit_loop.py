"""fit: many steps over batches, with progress, watched values, and an interrupt that stops between two steps.

The loop is the session's callable over `tfnb.train.batches`; with a connected cluster the same batches go there.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import unwrap
from itertools import chain
from operator import is_not
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from tfnb.cluster.engine.members import Mode
from tfnb.cluster.engine.restarts import Restarts
from tfnb.cluster.recovery import Recovery, RecoveryBudget
from tfnb.errors import DeadlineExceeded, InvalidArgument, ParameterServerLost, SchedulerLost, ShapeError, TfnbError
from tfnb.execution.tiers.gain import ExpectedSteps
from tfnb.fitting.checkpoints import Checkpoints, saver_of
from tfnb.fitting.fit_display import front
from tfnb.fitting.fit_options import (
    begin,
    division_of,
    ensure_limits,
    exact_of,
    known_keys,
    look_at_means,
    mode_of,
    operations_of,
    warn_of_order,
    watched_by,
    whole_numbers,
)  # fmt: skip
from tfnb.fitting.minimization import minimized
from tfnb.fitting.outer_steps import ensure_no_outer, with_outer
from tfnb.graph.current import unrecorded
from tfnb.interrupts import handled
from tfnb.recording import user_code_ran
from tfnb.session import Session, default_session
from tfnb.session.divided_feeds import Division
from tfnb.session.structures import FeedKeys, Fetches, graph_of
from tfnb.state.batch_order import Arrays
from tfnb.state.chunks import is_collection
from tfnb.state.input_sources import Source
from tfnb.state.queue_elements import QueueElements
from tfnb.state.queues import TensorQueue
from tfnb.state.step_groups import StepGroup, StepReport
from tfnb.state.steps_taken import AppliedSteps, StepsHere, StepsThere
from tfnb.train.batches import Batch, Batches, Data, PassEnd, batches, is_single_pass, name_of
from tfnb.train.callbacks import Callback, Callbacks, Progress
from tfnb.train.metrics import Metrics
from tfnb.train.modes import TaskMode
from tfnb.train.sandblaster import Sandblaster
from tfnb.train.saver import Saver
from tfnb.widgets.curve import number, svg
from tfnb.widgets.escaping import xml

Taken = Generator[StepReport, None, None]

STANDS = StepReport((), ())  # tells that everything stands still
SHOWN_EVERY = 0.1  # seconds
NAMED = '; with check="nan" fit stops at the first such step and names the op and line'
_PLAIN = "generated code"  # needs no word
MINIMIZING = ("feeds", "steps", "batch_size", "watch", "callbacks", "timeout", "progress_after")  # with Sandblaster
NOT_MINIMIZING = (
    "epochs", "validation", "backup", "staleness", "resume", "check", "exact", "microbatches", "schedule", "replicas",
    "checkpoint", "checkpoint_every", "restarts", "memory_budget", "allow_plain_collectives",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of `fit`: numbers of steps and seconds, and the watched values.

    ``history`` has one entry for each epoch (pass over the data), also one that was cut short: ``epoch``, ``step`` (the
    last one of it), and for each watched value its mean over the epoch, weighted by rows; on a cluster ``unknown``, if
    a task or server was lost before it told the values of so many steps: the means are those of the others. ``curve``
    has them along the way: means over equal numbers of steps, at most 400 points. ``code``: which code ran the steps
    here at the end, why, and what compiling it cost. ``memory``: with a memory budget, the memory plan of the step with
    the largest batch, as text. ``stopped``: why it ended before all steps were taken; empty if they were.
    ``checkpoint``: the last file that was written of it.
    """

    steps: int
    history: list[dict[str, Any]]
    seconds: float
    curve: list[dict[str, Any]] = field(default_factory=list)
    code: str = ""
    stopped: str = ""
    checkpoint: Path | str | None = None
    memory: str = ""

    @property
    def summary(self) -> str:
        """How many steps in how many seconds."""
        rate = f", {number(self.steps / self.seconds)} steps/s" if self.seconds else ""
        unknown = sum(entry.get("unknown", 0) for entry in self.history)
        lost = f"watched values of {unknown} steps were lost with a task or server, the steps count" if unknown else ""
        return "; ".join(filter(None, [f"{self.steps} steps in {self.seconds:.2f} s{rate}", lost, self.stopped]))

    def __repr__(self) -> str:
        lines = [self.summary, *filter(None, [self.memory])]
        lines += ["  " + "  ".join(f"{k} {number(v)}" for k, v in entry.items()) for entry in self.history[-10:]]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{xml(name)}</th>" for name in (self.history[-1] if self.history else {}))
        cells = ("".join(f"<td>{xml(number(value))}</td>" for value in entry.values()) for entry in self.history[-10:])
        rows = "".join(f"<tr>{row}</tr>" for row in cells)
        names = [name for name in (self.curve[-1] if self.curve else {}) if name not in ("epoch", "step")]
        curves = "".join(
            f"<figure>{svg(name, [(p['step'], p[name]) for p in self.curve])}<figcaption>{xml(name)}</figcaption>"
            "</figure>"
            for name in names
        )
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        memory = f"<div>{xml(self.memory)}</div>" if self.memory else ""
        return f"<div>{xml(self.summary)}</div>{memory}{curves}{table}"


@unrecorded
def fit(
    fetch: Fetches, data: Data, *, feeds: FeedKeys | None = None, epochs: int = 1, steps: int | None = None,
    batch_size: int | None = None, shuffle: bool = True, seed: int = 0, watch: Fetches | None = None,
    validation: Data | None = None, callbacks: Callback | Sequence[Callback] = (), mode: TaskMode | Mode = "sync",
    backup: int = 0, staleness: int | None = None, resume: bool | str | PathLike[str] = False,
    check: str | None = None, exact: bool | None = None, microbatches: int | Literal["auto"] | None = None,
    schedule: str | None = None, replicas: int = 1, checkpoint: str | PathLike[str] | Saver | None = None,
    checkpoint_every: float = 30.0, restarts: int = 5, timeout: float | None = None,
    progress_after: float = 2.0, memory_budget: int | str | None = None, allow_plain_collectives: bool = False,
) -> RunResult:  # fmt: skip
    """Run ``fetch`` once for each batch of ``data``. The page `notebooks/training.md` tells more of each argument.

    fetch: the training step, usually what ``minimize`` gave.
    data: ``{placeholder: array}`` with rows on axis 0 (torch, NumPy, pandas, Dask), a queue, or an iterable of batches.
    feeds: for the items of an iterable: ``(x, y)`` is fed by the parts of a tuple, ``{"image": x}`` by those of a dict.
    epochs: passes over the data.
    steps: so many steps in all, instead of ``epochs``.
    batch_size: rows of a step, 32 by default; where tasks divide a step, of all of them together.
    shuffle, seed: another order of the rows in each epoch; the same seed, the same orders.
    watch: scalars to follow, or a dict of names; by default the scalars among the fetches, ``()`` for none. validation:
    data over which the watched values are computed after each epoch, for the history: ``val_...``; arrays in batches of
    ``batch_size`` rows. callbacks: functions
    of a `tfnb.train.Progress` after each epoch, or objects with ``on_step`` or ``on_epoch``. mode: how the tasks of a
    connected cluster work together, below.
    backup: so many tasks are spare in mode ``"sync"``: no step waits for the slowest.
    staleness: so many steps at most is a task ahead of the slowest one in mode ``"bounded"``.
    resume: True goes on with the training that ended early here, a path with that of the file, or folder of files.
    check: ``"nan"`` stops at a step that would write NaN or infinite numbers, and names the op and line.
    exact: True: tasks sum in mid-step, so that any loss gives the step of one machine; None: if it is no mean; False:
    never. microbatches: ranges of rows into which a step is divided, computed one after the other, with one update;
    ``"auto"`` for a ``memory_budget``. schedule: of mode ``"pipeline"``: ``"1f1b"`` holds few activations, ``"gpipe"``
    those of all microbatches. replicas: so many copies of a pipeline share the microbatches of a step.
    checkpoint: a folder, its fsspec URL, or a `tfnb.train.Saver`, where the training is saved meanwhile and at its end.
    checkpoint_every: seconds.
    restarts: so often in ten minutes a training goes on by itself after a parameter server was lost.
    timeout: seconds for all of it.
    progress_after: seconds until progress is shown.
    memory_budget: bytes that a step may hold here, a number or text such as ``"2GB"``.
    allow_plain_collectives: gloo may sum, without encryption, on a cluster with TLS.

    Modes (without a cluster all but Sandblaster are one loop in this process); another call may have another one:

    ``"sync"``: tasks divide the rows of a step, and their gradients are averaged: the step of one machine for a loss
    that is a mean or a sum over rows, or over those that count (``exact`` for another loss).
    ``"async"``: each task takes steps of its own. ``"bounded"``: likewise, at most ``staleness`` steps ahead.
    ``"allreduce"``: as ``"sync"``, but tasks hold all Variables, and sum gradients among themselves.
    ``"pipeline"``: tasks that nodes ask for, by `tfnb.device`, are stages, and work on different ``microbatches``.
    `tfnb.train.SyncReplicas`: ``"sync"`` with spare tasks in other ways.
    `tfnb.train.LocalSGD`: tasks take steps on copies of the Variables, and average these after so many.
    `tfnb.train.Downpour`: ``"async"`` that pushes sums of gradients, and fetches Parameters, after so many steps.
    `tfnb.train.Sandblaster`: L-BFGS over all rows. ``fetch`` is the loss itself, ``steps`` iterations (20), and
    ``batch_size`` the rows of a portion (256); it takes ``feeds``, ``watch``, ``callbacks``, ``timeout`` and
    ``progress_after`` besides; all rows count in each evaluation, so ``shuffle`` and ``seed`` change nothing.

    Raises InvalidArgument or ShapeError for arrays and options that do not fit, before anything runs, and for a later
    item of an iterable when it comes; NotFound for a key that the graph lacks, FailedPrecondition for nothing to
    resume; DeadlineExceeded after ``timeout``; KeyboardInterrupt when interrupted. Variables are then at a whole number
    of steps.

    >>> import tfnb, torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(4, 2))
    ...     train = tfnb.train.SGD(0.1).minimize(layer(x).square().mean())
    >>> tfnb.fit(train, {x: torch.ones(8, 2)}, epochs=3, batch_size=4).steps
    6
    >>> tfnb.fit(train, {x: torch.ones(8, 2)}, batch_size=8, mode="pipeline", microbatches=4, replicas=2).steps
    1
    """
    __tracebackhide__ = True
    if isinstance(mode, Sandblaster):
        given, defaults = locals(), unwrap(fit).__kwdefaults__ or {}
        refused = {name: (given[name], defaults[name]) for name in NOT_MINIMIZING}
        return minimized(fit, fetch, data, mode, refused, **{name: given[name] for name in MINIMIZING})
    options = backup, staleness, allow_plain_collectives, schedule, replicas
    how = mode if isinstance(mode, Mode) else mode_of(mode, *options)  # a coordinator says its Mode itself
    exact, saver = exact_of(exact, how, microbatches), saver_of(checkpoint, checkpoint_every)
    ensure_limits(timeout, restarts, progress_after)
    session = default_session(graph_of(fetch))
    limited = session.limited(memory_budget)
    user_code_ran()
    how = with_outer(how, mode, session, fetch)
    names, watched = watched_by(watch, fetch, session)
    division = division_of(microbatches, session, how)
    with session.limited(memory_budget):
        session.ensure_limited(division)
    if session.cluster is not None:
        data = session.cluster.in_chunks(data, timeout)
    checked = _validation(session, validation, feeds, names, watched, division, batch_size)
    data = _elements_of(data, session)
    start = begin(session, resume)
    warn_of_order(data, start)
    reads = _source_of(data, session)
    source = batches(
        data, epochs=epochs, steps=steps, batch_size=batch_size, shuffle=shuffle, seed=seed, feeds=feeds, begin=start
    )
    shown = front(None if how.is_coordinated else source.total, session.graph.name)
    checkpoints = Checkpoints(session, saver, checkpoint_every, callbacks, start)
    run = _Run(
        source, Metrics(names, whole_numbers(names, watched, session)), shown, timeout, session,
        Callbacks(checkpoints.callbacks, is_noted=not how.is_coordinated), checked, start, reads, how, progress_after,
        checkpoints, RecoveryBudget(Restarts(most=restarts)),
    )  # fmt: skip
    waits = validation is not None or (run.callbacks.follow_epochs and (how.is_joint or how.is_coordinated))
    taken = _taken(_FitSteps(session, fetch, watched, source, check, division, exact), run, waits)
    try:
        with limited, _interrupts(run):
            return _trained(taken, run, steps, type(data).__name__)
    except KeyboardInterrupt:
        stopped = run.stopped()
    except BaseException as error:
        run.failed(error, is_kept=reads is not None or not isinstance(data, Iterator))
        raise
    finally:
        run.expected.announced = None
        session.state.settle(run.steps, is_over=run.is_over or how.is_coordinated)
    raise KeyboardInterrupt(stopped)


def _elements_of(data: Data, session: Session) -> Data:
    """The data, or the elements of a queue; the session keeps their position."""
    if not isinstance(data, TensorQueue):
        return data
    session.reads(data)
    return QueueElements(data)


def _source_of(data: Data, session: Session) -> Source | None:
    """The data if it is a Source; the session keeps the position of a Source."""
    if not isinstance(data, Source):
        return None
    if not isinstance(data, QueueElements):
        session.reads(data)
    return data


# -- the loop -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FitSteps:
    """The steps of one training: the fetched and the watched values, batches, and how a step is computed."""

    session: Session
    fetch: Fetches
    watched: tuple[Any, ...]
    source: Batches
    check: str | None
    division: Division
    exact: bool | None

    @property
    def fetches(self) -> tuple[Fetches, tuple[Any, ...]]:
        """Fetches of a step; in microbatches only operations, since other values have no mean."""
        fetch = self.fetch if self.division.is_whole else operations_of(self.fetch, self.session)
        return fetch, self.watched

    @property
    def is_looked_at(self) -> bool:
        """Whether a loss that is no mean over the rows of microbatches is looked for."""
        return not self.division.is_whole and self.exact is not False


def _taken(asked: _FitSteps, run: _Run, waits: bool) -> Taken:
    """The steps of a training: taken here, or by the tasks of the connected cluster.

    waits: whether tasks stand still after each epoch.
    """
    if asked.session.cluster is None:
        return _here(asked, run)

    def there(watched: tuple[Any, ...]) -> Taken:
        return _there(replace(asked, watched=watched), run, by_pass=waits)

    looks = asked.session.graph.attached.get("watch")  # of `tfnb.watch`
    return there(asked.watched) if looks is None else looks.followed(asked.watched, there)


def _trained(taken: Taken, run: _Run, steps: int | None, data: str) -> RunResult:
    """Take the steps, until the last one or the end by a callback: the result. data: the name of its type."""
    __tracebackhide__ = True
    with closing(_by_epoch(taken, run)) as reports:
        for told in reports:
            run.stepped(told)
            if run.why_over is not None:
                reports.close()  # tasks end what they have begun
                break
        return run.finished(steps, data)


def _here(asked: _FitSteps, run: _Run) -> Taken:
    """Steps taken in this process, with a standstill after each epoch."""
    session, source, division, fetches = asked.session, asked.source, asked.division, asked.fetches
    keys: tuple[Any, ...] = ()
    call: Callable[..., Any] | None = None
    largest = 0
    for batch in source.parts if source.is_ours else _awaited(source.parts, run):
        if isinstance(batch, PassEnd):
            yield STANDS
            continue
        if call is None or len(keys) != len(batch.keys) or any(map(is_not, keys, batch.keys)):
            known_keys(session, batch.keys, named=not source.is_ours)
            keys = batch.keys
            call = session.make_callable(fetches, keys, check=asked.check, microbatches=division)
            if asked.is_looked_at:
                look_at_means(session, fetches, keys, batch.values, division)
            if division.is_whole and source.total is not None:
                run.announce(session.expected(fetches, keys), source.total)
            written = next(iter(session.written(fetches, keys)), None)
            run.code = partial(session.code, fetches, keys, microbatches=division)
        run.steps.begins(batch.position, written)
        values = call(*batch.values)[1]
        if batch.rows > largest:
            largest, run.plan = batch.rows, session.plan
        yield StepReport((batch.epoch,), (batch.rows,), values)


def _by_epoch(taken: Taken, run: _Run) -> Taken:
    """Reports split at epoch boundaries, without empty ones.

    ``run`` hears of the end of each: when everything stands still, else before the first step of the next one. Also of
    one whose steps were taken before, where its end was not.
    """
    __tracebackhide__ = True
    epoch = over = 0
    with closing(taken):
        for told in taken:
            epoch = epoch or run.begun
            for part in told.by_epoch():
                if epoch > over and (not part.epochs or part.epochs[0] > epoch):
                    over = epoch
                    run.epoch_over(epoch)
                    if run.why_over is not None:
                        return
                if part.epochs:
                    epoch = max(epoch, part.epochs[0])
                    yield part
    epoch = epoch or run.begun
    if epoch > over:
        run.epoch_over(epoch)


def _there(asked: _FitSteps, run: _Run, *, by_pass: bool) -> Taken:
    """Steps that the connected cluster takes, in groups; by_pass: its tasks stand still after each epoch."""
    options: dict[str, Any] = {"mode": run.mode, "changes": run.change, "timeout": run.left, "check": asked.check}
    options |= {"exact": asked.exact, "budget": run.budget, "division": asked.division}
    if asked.source.rows is not None and asked.source.total is not None:
        return _of_arrays(asked, asked.source.rows, asked.source.total, run, options | {"by_pass": by_pass})
    return _of_batches(asked, run, options, by_pass=by_pass)


def _of_batches(asked: _FitSteps, run: _Run, options: Mapping[str, Any], *, by_pass: bool) -> Taken:
    """Reports for batches that are drawn here."""
    each, session, fetches = _awaited(asked.source.parts, run), asked.session, asked.fetches
    first = next(each, None)
    if isinstance(first, PassEnd):  # the steps before were all of a pass
        if by_pass:
            yield STANDS
        first = next(each, None)
    if first is None:
        return
    assert isinstance(first, Batch)
    known_keys(session, first.keys, named=True)
    if asked.is_looked_at:
        look_at_means(session, fetches, first.keys, first.values, asked.division)
    run.steps.begins()
    begun: dict[int, Batch] = {}  # by number, without its values, until a copy of the Variables has seen its step

    def rows() -> Iterator[tuple[Any, ...] | None]:
        for batch in chain([first], each):
            if isinstance(batch, PassEnd):
                if by_pass:
                    yield None
                    run.steps.begins()
                continue
            if len(batch.keys) != len(first.keys) or any(map(is_not, first.keys, batch.keys)):
                asked, found = (", ".join(map(name_of, keys)) for keys in (first.keys, batch.keys))
                raise InvalidArgument(
                    "on a cluster every feed dict has the same keys in the same order: the first one has "
                    f"{asked}; another one has {found or 'none'}"
                )
            begun[run.steps.drawn(batch.position)] = batch._replace(values=())
            yield batch.values

    with closing(session.train(fetches, first.keys, rows(), **options)) as groups:
        for group in groups:
            if group.kept is not None:
                run.heed(group, lambda number: (begun[number].epoch, begun[number].rows))
                for number in [number for number in begun if number in group.kept and run.steps.is_told(number)]:
                    del begun[number]
            elif not group.steps:
                yield STANDS
            else:
                done = [first] * group.steps if group.numbers is None else [begun[number] for number in group.numbers]
                run.steps.told(group.numbers or ())
                yield _told([batch.epoch for batch in done], [batch.rows for batch in done], group)


def _of_arrays(asked: _FitSteps, rows: Arrays, total: int, run: _Run, options: Mapping[str, Any]) -> Taken:
    """Reports for arrays; tasks take their rows from these themselves."""
    session, fetches, keys = asked.session, asked.fetches, asked.source.keys
    if asked.is_looked_at and total:
        look_at_means(session, fetches, keys, session.cluster.heads(rows), asked.division)
    each, begun = rows.order.per_pass if options["by_pass"] else total, run.step
    if begun and not begun % each:  # the steps before were all of a pass
        yield STANDS
    run.steps.numbered_from(begun)
    run.steps.begins(min(each - begun % each, total - begun))

    def place(number: int) -> tuple[int, int]:
        epoch, start, stop = rows.order.place(number)
        return epoch, stop - start

    with closing(session.train(fetches, keys, (rows, total), begin=begun, **options)) as groups:
        for group in groups:
            if group.kept is not None:
                run.heed(group, place)
            elif not group.steps:
                yield STANDS
                begun += each - begun % each
                run.steps.begins(min(each, total - begun))
            else:
                run.steps.told(group.numbers or ())
                epochs, lengths = zip(*map(place, group.numbers or [0] * group.steps), strict=True)
                yield _told(epochs, lengths, group)


def _told(epochs: Sequence[int], rows: Sequence[int], group: StepGroup) -> StepReport:
    _, watched = group.values
    is_known = not any(value is None for value in watched)  # else a lost task told nobody of them
    return StepReport(epochs, rows, watched if is_known else (), group.numbers or ())


def _awaited(each: Iterator[Batch | PassEnd], run: _Run) -> Iterator[Batch | PassEnd]:
    """The user's data: an interrupt while waiting for data takes effect at once, since no step is half done."""
    while True:
        run.is_waiting = True
        run.stop_if_wanted()
        batch = next(each, None)
        run.is_waiting = False
        if batch is None:
            return
        yield batch


@dataclass
class _StepCounts:
    """Counts of the reported steps. ``numbers``: their numbers on a cluster."""

    metrics: Metrics
    step: int
    samples: int = 0
    numbers: AppliedSteps = field(default_factory=AppliedSteps)


class _Run:
    """Where one `fit` stands."""

    def __init__(
        self, source: Batches, metrics: Metrics, front: Any, timeout: float | None, session: Session,
        callbacks: Callbacks, validate: Callable[[_Run], dict[str, float]], begin: int, reads: Source | None,
        mode: Mode, shown_after: float, checkpoints: Checkpoints, budget: RecoveryBudget,
    ) -> None:  # fmt: skip
        self._session, self._begin, cluster = session, begin, session.cluster
        self._reads, self._shown_after = reads, shown_after
        self._counted = _StepCounts(metrics, begin)
        self._kept = _StepCounts(deepcopy(metrics), begin)  # of steps that no lost server takes back
        self._since: list[StepReport] = []  # later ones
        self._taken_back = AppliedSteps()
        self.budget = budget
        self.why_over: str | None = None  # a callback ended it
        self.mode = mode
        self._change: Mode | None = None  # a callback asked for it
        self.callbacks, self._validate, self._checkpoints = callbacks, validate, checkpoints
        self._validated: dict[int, dict[str, float]] = {}  # by epoch
        self.timeout = timeout
        self.cluster = cluster
        self._lines = 0 if cluster is None else cluster.news(0)[0]  # that tell who came and left, shown so far
        self.steps: Any = (  # that count
            StepsHere(begin, reads, session.runs)
            if cluster is None
            else StepsThere(begin, reads, session.runs, lambda: cluster.step, in_order=mode.is_joint)
        )
        session.state.went_on()
        inputs = self._inputs = session.state.inputs
        inputs.ended = inputs.ended if begin else 0
        inputs.training = self.steps
        is_past = source.total is not None and begin > source.total  # fewer steps are asked for than were taken
        self._source, self._is_open = source, begin != inputs.ended and not is_past
        self.is_over = False  # all steps were taken
        self.is_waiting = False  # for data
        self.is_wanted = False  # an interrupt
        self._front = front
        self.code: Callable[[], str] = str  # which code runs the steps
        self.expected = ExpectedSteps()  # of that code
        self.plan: object = None  # of memory, for the largest batch
        self._said = _PLAIN
        self._start = self._looked = time.perf_counter()
        self._warned = 0

    def stepped(self, told: StepReport) -> None:
        """More steps are done."""
        __tracebackhide__ = True
        self.steps.ends()
        if isinstance(self._reads, QueueElements) and (position := self.steps.applied.position) is not None:
            self._reads.counted(position)
        if self.callbacks.follow_steps:
            for one in told.one_by_one():
                self._count(one)
                named = one.named(self._metrics.names)
                progress = Progress(self.step, one.epochs[0], named, self._counted.samples)
                progress.again = any(number in self._taken_back for number in one.numbers)
                self._heed(self.callbacks.on_step(progress))
                if self.why_over is not None:
                    break
        else:
            self._count(told)
        now = time.perf_counter()
        if now >= self._checkpoints.due:
            self._checkpoints.take(now)
        if now - self._looked >= SHOWN_EVERY:
            self._looked = now
            self._look(now - self._start)
        self.stop_if_wanted()

    def announce(self, expected: ExpectedSteps, total: int) -> None:
        """Tell the code of the steps how many are to come, of so many in all."""
        self.expected.announced = None  # of other feeds
        self.expected, expected.announced = expected, lambda: max(0, total - self.step)

    @property
    def begun(self) -> int:
        """The epoch of the last step that was taken before, where its end is still to come; else 0."""
        return self._source.begun if self._is_open else 0

    @property
    def step(self) -> int:
        """Steps that were told."""
        return self._counted.step

    @property
    def _metrics(self) -> Metrics:
        return self._counted.metrics

    def _count(self, told: StepReport) -> None:
        counted = self._counted
        counted.step += len(told.epochs)
        counted.samples += sum(told.rows)
        counted.metrics.add(counted.step, told)
        if self.cluster is not None:
            counted.numbers.add(told.numbers)
            self._since.append(told)

    def heed(self, group: StepGroup, place: Callable[[int], tuple[int, int]]) -> None:
        """A copy of the Variables has seen some steps; or they are that copy, as a server was lost.

        place: epoch and rows of a step.
        """
        assert group.kept is not None
        self.steps.kept(group.kept)
        if all(number in group.kept for told in self._since for number in told.numbers):
            self._metrics.read()
            self._kept, self._since = deepcopy(self._counted), []
        if group.lost is not None:
            self._go_back(group.kept, place)
            self.steps.back_to(group.kept)
            if isinstance(group.lost, Recovery):
                self._say_recovered(group.lost)

    def _go_back(self, kept: AppliedSteps, place: Callable[[int], tuple[int, int]]) -> None:
        """Count only these steps: later steps are taken again, and values of unreported ones are unknown."""
        self._taken_back, self._counted = self._counted.numbers, deepcopy(self._kept)
        since, self._since = self._since, []
        for told in since:
            for one in told.one_by_one():
                if one.numbers and one.numbers[0] in kept:
                    self._count(one)
        numbers = self._counted.numbers
        untold = numbers.missing(range(max(kept.whole, 1 + max(kept.beyond, default=-1))))
        for at in (at for run in untold for at in run if at in kept):
            epoch, rows = place(at)
            self._count(StepReport((epoch,), (rows,), (), (at,)))

    def _say_recovered(self, recovery: Recovery) -> None:
        """Tell the user, in one block."""
        sys.stdout.write(f"{recovery}\n")
        sys.stdout.flush()
        self._front.say(f"recovered at step {self.step}")
        if self.cluster is not None:
            self._lines = self.cluster.news(self._lines)[0]

    def epoch_over(self, epoch: int) -> None:
        """End an epoch: collect its values, and call the callbacks."""
        __tracebackhide__ = True
        self._read()
        found: dict[str, float] | None = None
        while found is None:
            try:
                found = self._validate(self)
            except ParameterServerLost as error:  # tasks stand still, and the copy here has seen all steps
                if self.cluster is None:
                    raise
                self._say_recovered(self.cluster.recover(error, self.budget, self.step))
        if found:
            self._validated[epoch] = found
        self._metrics.over(epoch, self.step)
        progress = Progress(self.step, epoch, {**self._metrics.means_of(epoch), **found}, self._counted.samples)
        before, self._inputs.ended = self._inputs.ended, self.step  # a file that a callback writes is behind this end
        try:
            self.callbacks.on_epoch(progress)
        except BaseException:
            self._inputs.ended = before
            raise
        self._heed(progress)

    def _heed(self, progress: Progress) -> None:
        """Apply the requests of a callback, which may have changed recorded Python state."""
        user_code_ran()
        self.why_over = progress.stopped or self.why_over
        if progress.changed is not None:
            if isinstance(progress.changed[0], Sandblaster):
                raise InvalidArgument("Sandblaster minimizes a loss in a call of its own: fit(loss, data, mode=...)")
            new = mode_of(*progress.changed)
            ensure_no_outer(progress.changed[0])
            if self.mode.is_pipeline or new.is_pipeline:
                raise InvalidArgument(
                    f"a training in mode={str(self.mode)!r} does not go on in mode={str(new)!r}: a step of a pipeline "
                    "is another program; begin another training, fit(...) goes on with the Variables as they are"
                )
            self.mode = self._change = new

    def change(self) -> Mode | None:
        """The mode that a callback asked for last, once."""
        wanted, self._change = self._change, None
        return wanted

    @property
    def left(self) -> float | None:
        """Remaining seconds of the time limit."""
        return None if self.timeout is None else self.timeout - (time.perf_counter() - self._start)

    @property
    def _means(self) -> dict[str, float]:
        """The values of now, for people."""
        return {**self._metrics.means(), **self._validated.get(max(self._validated, default=0), {})}

    def _look(self, seconds: float) -> None:
        """Periodic work, a few times a second: metrics, display, deadline."""
        __tracebackhide__ = True
        self._read()
        self._say_who_came()
        if self.cluster is not None:
            self.cluster.curve = self._metrics.curve()
        if seconds >= self._shown_after:
            code = "; ".join(filter(None, [self.code(), self.memory]))
            if code and code != self._said:
                self._said = code
                self._front.say(code)
            rate, more = (self.step - self._begin) / seconds, self._checkpoints.text
            self._front.update(self.step, self._means, rate, self._metrics.curve, more)
        if self.timeout is not None and self.cluster is None and seconds > self.timeout:
            raise DeadlineExceeded(
                f"fit did not end within {self.timeout} s; variables are at step {self.step}", step=self.step
            )

    @property
    def memory(self) -> str:
        """The plan that keeps the memory budget, as text; empty without a budget."""
        return "" if self.plan is None else str(self.plan)

    def _say_who_came(self) -> None:
        if self.cluster is not None:
            self._lines, lines = self.cluster.news(self._lines)
            for line in lines:
                self._front.say(line)

    def _read(self) -> None:
        self._metrics.read()
        for bad in self._metrics.bad[self._warned :]:
            warnings.warn(f"{bad.name} is {bad.value} at step {bad.step}{NAMED}", stacklevel=_user_level())
        self._warned = len(self._metrics.bad)

    def stop_if_wanted(self) -> None:
        """Between two steps: grant the wish of an interrupt."""
        if self.is_wanted:
            raise KeyboardInterrupt

    def finished(self, asked: int | None, data: str) -> RunResult:
        """The end as planned, or that of ``data`` before so many steps as were asked for."""
        self._read()
        self._say_who_came()
        seconds = time.perf_counter() - self._start
        self._checkpoints.end()
        is_as_before = self._begin and self.step == self._begin  # a resumed one of which no step is left
        self.is_over = self.why_over is None and not is_as_before
        steps = (self.step if self.is_over else self.steps.applied.steps) - self._begin
        history = [entry | self._validated.get(entry["epoch"], {}) for entry in self._metrics.history]
        is_short = asked is not None and self.why_over is None and steps < asked - self._begin
        ended = f"{data} ended after {steps} of {asked} steps; a list or a DataLoader begins again" if is_short else ""
        result = RunResult(
            steps, history, seconds, self._metrics.curve(), self.code(), self.why_over or ended, self._checkpoints.last,
            self.memory,
        )  # fmt: skip
        self._finish(result.summary)
        return result

    def _finish(self, text: str) -> None:
        if self.cluster is not None:
            self.cluster.curve = self._metrics.curve()
        self._front.finish(text, self._means, self._metrics.curve)

    def stopped(self) -> str:
        """The end by an interrupt; says where the variables are."""
        step = self.steps.applied.steps
        with suppress(KeyboardInterrupt):
            self._checkpoints.end(last=self.cluster is None or not self.cluster.is_stalled)
        text = f"stopped at step {step}; variables are at step {step}"
        if self.steps.applied.is_whole and not self.mode.is_coordinated:
            text += "; the same call with resume=True goes on"
        self._finish(text)
        return text

    def failed(self, error: BaseException, *, is_kept: bool) -> None:
        """End by an error, with the step added to the error. is_kept: the batches of lost steps can be had again."""
        with suppress(KeyboardInterrupt):
            self._checkpoints.end(last=False)
        if isinstance(error, ParameterServerLost | SchedulerLost):
            error.message += self._goes_on() if is_kept and not self.mode.is_coordinated else ""
        self._finish(f"failed after step {self.step}: {type(error).__name__}")
        if self.steps.is_inside and not self.mode.is_coordinated:  # steps of a coordinator are portions
            error.add_note(f"in step {self.step + 1} of fit; variables are at step {self.steps.applied.steps}")
            if isinstance(error, TfnbError) and error.step is None:
                error.step = self.step + 1

    def _goes_on(self) -> str:
        """How the training goes on whose cluster was lost: from the values here, or a newer checkpoint."""
        taken, written = self.steps.applied, self._checkpoints.resumable
        from_here = taken.steps if taken.is_whole else 0
        self._session.state.went_on()
        if written is not None and written[0] > from_here:
            step, file = written
            self._session.state.fell_behind(file, taken.steps)
            return (
                f"\n  The same call with resume=True goes on from step {step}, of {file}, here or on another cluster; "
                "with that path in another process, too."
            )
        how = f"\n  The same call with resume=True goes on from step {from_here}, here or on another cluster."
        return how if from_here else ""


def _user_level() -> int:
    """The stacklevel that points a warning of the caller to the line that called `fit`, above its decorator."""
    frame, level, code = sys._getframe(1), 1, unwrap(fit).__code__
    while frame.f_back is not None and frame.f_code is not code:
        frame, level = frame.f_back, level + 1
    return level + 2


# -- interrupts -------------------------------------------------------------------------------------------------------


@contextmanager
def _interrupts(run: _Run) -> Iterator[None]:
    """Ctrl-C becomes a wish that is granted between two steps; a second one, or one in a wait, counts at once."""

    def wish(number: int, frame: FrameType | None) -> None:
        if run.is_waiting or run.is_wanted or (run.cluster is not None and run.cluster.is_stalled):
            raise KeyboardInterrupt
        run.is_wanted = True

    with handled(wish):
        yield
    run.stop_if_wanted()  # wished after the last step


# -- validation -------------------------------------------------------------------------------------------------------


def _validation(
    session: Session, data: Any, feeds: Any, names: Sequence[str], watched: tuple[Any, ...], division: Division,
    batch_size: int | None,
) -> Callable[[_Run], dict[str, float]]:  # fmt: skip
    """A function for the watched values over the validation data, by name; in packs if the training is."""
    if data is None:
        return lambda run: {}
    if not names:
        raise InvalidArgument("validation= computes the watched values over other data: name them, watch=loss")
    if not isinstance(data, Iterable):
        raise InvalidArgument(f"validation data is {{placeholder: array}} or an iterable, not {type(data).__name__}")
    if is_single_pass(data):
        raise InvalidArgument(
            f"validation data is iterated after each epoch, and {type(data).__name__} can be only once: pass a list, "
            "a DataLoader or {placeholder: array}"
        )

    arrays = data.values() if isinstance(data, Mapping) else ()
    if any(tuple(rows.shape[:1]) == (0,) for rows in arrays if hasattr(rows, "shape") and not is_collection(rows)):
        raise ShapeError(f"validation data for {', '.join(map(name_of, data))} has no rows")

    def values(run: _Run) -> dict[str, float]:
        metrics = Metrics(names)
        source = (
            batches(data, batch_size=batch_size, shuffle=False)
            if isinstance(data, Mapping)
            else batches(data, feeds=feeds, shuffle=False)
        )
        microbatches = 1 if session.memory_budget is None else division.microbatches
        for at, batch in enumerate(source.each, 1):
            if microbatches != 1:
                found = session.make_callable(watched, batch.keys, microbatches=microbatches)(*batch.values)
            else:
                found = session.without_writes(watched, dict(zip(batch.keys, batch.values, strict=True)))
            metrics.add(at, StepReport((1,), (batch.rows,), found))
            run.stop_if_wanted()
        metrics.read()
        return {f"val_{name}": value for name, value in metrics.means().items()}

    return values
