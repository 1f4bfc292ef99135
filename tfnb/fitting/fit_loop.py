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
from dataclasses import dataclass, field
from functools import partial
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
from tfnb.escaping import xml
from tfnb.execution.tiers.gain import ExpectedSteps
from tfnb.fitting.checkpoints import Checkpoints, saver_of
from tfnb.fitting.fit_display import front
from tfnb.fitting.fit_options import (
    begin,
    division_of,
    exact_of,
    known_keys,
    look_at_means,
    mode_of,
    operations_of,
    watched_by,
)  # fmt: skip
from tfnb.fitting.minimization import minimized
from tfnb.fitting.outer_steps import ensure_no_outer, with_outer
from tfnb.interrupts import handled
from tfnb.recording import user_code_ran
from tfnb.session import Session, default_session
from tfnb.session.divided_feeds import Division
from tfnb.session.structures import FeedKeys, Fetches, graph_of
from tfnb.state.batch_order import Arrays
from tfnb.state.input_sources import Source
from tfnb.state.queue_elements import QueueElements
from tfnb.state.queues import TensorQueue
from tfnb.state.step_groups import StepGroup, StepReport
from tfnb.state.steps_taken import AppliedSteps, StepsHere, StepsThere
from tfnb.train.batches import Batch, Batches, Data, batches, is_single_pass, name_of
from tfnb.train.callbacks import Callback, Callbacks, Progress
from tfnb.train.metrics import Metrics
from tfnb.train.modes import TaskMode
from tfnb.train.sandblaster import Sandblaster
from tfnb.train.saver import Saver
from tfnb.widgets.curve import number, svg

Taken = Generator[StepReport, None, None]

STANDS = StepReport((), ())  # tells that everything stands still
SHOWN_EVERY = 0.1  # seconds
NAMED = '; with check="nan" fit stops at the first such step and names the op and line'
_PLAIN = "generated code"  # needs no word


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of `fit`: numbers of steps and seconds, and the watched values.

    ``history`` has one entry for each epoch (pass over the data), also one that was cut short: ``epoch``, ``step`` (the
    last one of it), and for each watched value its mean over the epoch, weighted by rows. ``curve`` has them along the
    way: means over equal numbers of steps, at most 400 points. ``code``: which code ran the steps here at the end, why,
    and what compiling it cost. ``memory``: with a memory budget, what of it the largest batch kept, and how.
    ``stopped``: why it ended before all steps were taken; empty if they were. ``checkpoint``: the last file that was
    written of it.
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
        return f"{self.steps} steps in {self.seconds:.2f} s{rate}{'; ' if self.stopped else ''}{self.stopped}"

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
    """Run ``fetch`` once for each batch of ``data``.

    fetch: usually what ``minimize`` gave. data: ``{placeholder: array}`` with rows on axis 0, or an iterable of feed
    dicts, or of other items such as those of a DataLoader: ``feeds=(x, y)`` says what the parts of a tuple are fed to,
    ``feeds={"image": x}`` those of a dict. The ``len`` of an iterable may raise, as that of a DataLoader over an
    IterableDataset does: progress then has no total. A `tfnb.Source` stands behind the batch of the last step that
    counts, which `Session.save` keeps, however much was drawn ahead; with asynchronous tasks a step after a gap does
    not count.
    An array is of torch, NumPy or pandas (float64 for a float32 placeholder is rounded batch by batch, with one note),
    or a Dask array, bag, dataframe or column of one: its chunks are computed and kept
    on the workers of a connected cluster, whose tasks read them there; without a cluster, up to 4 GiB are computed
    here. epochs: passes over the data. steps: so many steps in all instead. batch_size: rows of a step over all tasks
    (32). shuffle, seed: another order in each epoch, the same in each call. watch: scalars to follow, or a dict of
    names; by default the scalars among the fetches, ``()`` for none.

    validation: data in one of the forms of ``data``. After each epoch the watched values are computed over it, without
    updates; their means by rows stand in the history as ``val_...``. The tasks of a cluster stand still meanwhile.
    callbacks: functions that are called with a `tfnb.train.Progress` after each epoch, or objects with ``on_step`` or
    ``on_epoch``, such as `tfnb.train.EarlyStopping`. They may end the training: ``progress.stop()``. The tasks of a
    cluster tell their steps in groups, up to half a second late (stages that are servers, ``connect(ps="stages")``, a
    second), and what they have begun by then still counts. Between
    epochs they wait for what is called then in modes ``"sync"`` and ``"allreduce"``, so that a learning rate that it
    sets holds from the first step of the next epoch; in other modes, without validation data, an epoch is over when a
    step of the next one is told, and the rate holds from the first step that begins after that. An error in one ends
    the training between two steps.

    microbatches: each step divides its rows into so many consecutive ranges of nearly equal length (fewer where there
    are fewer rows, or where some would have fewer than the recording relies on, such as the one row that batch norm
    refuses), does one after the other, and updates once, so that it holds what one of them needs. Gradients are
    added up weighted by rows, or by what the loss divides by, as the tasks of a cluster with as many of them do it in
    mode ``"sync"``, with the same random numbers; a loss that is a mean or a sum over rows, or over what counts of
    them, trains as with the whole batch, and ``exact`` says whether one that is none is looked for. Watched numbers are
    weighted likewise, whole numbers are sums, maxima and minima, ``any`` and ``all`` those of all rows; one that this
    does not make right for rows that are looked at is told. Running statistics of batch norm move once for each
    microbatch, in order. On a cluster in mode ``"pipeline"`` alone. ``"auto"``, with a ``memory_budget``: the whole
    step if that keeps the budget, else in packs of layers with as many microbatches as keep it and are predicted
    quickest; the result tells how many, ``memory``.

    checkpoint: a folder, its fsspec URL, or a `tfnb.train.Saver`, which says what is kept (without one the newest
    five). Every ``checkpoint_every`` seconds, and where the training ends, is stopped or interrupted, all that
    `Session.save` writes is copied between two steps, and written by another thread. A file that cannot be written, as
    on a full disk, is a warning; it is tried again, less and less often. The end waits for the last file; Ctrl-C gives
    it up. What the folder holds must be of this training: ``resume=folder`` goes on from there.

    resume: True goes on with the training of this graph that was interrupted, failed or was stopped (one that lost its
    cluster with its last checkpoint, where that is newer than the values here), a path with the
    one that `Session.save` wrote there, which is restored first, and a folder of checkpoints with its newest one (a
    damaged one is an error that names the one before): the same call with the same data takes the steps that
    are left, with the batches that it would have taken. Arrays begin there at once; of other data that can be iterated
    again the batches before are drawn and dropped; a `tfnb.Source` and an iterator go on where they are. Steps and
    epochs in the history count on. It may go on here or on a cluster, wherever it was stopped; but where asynchronous
    tasks had applied steps out of order there is nothing to go on with.

    check: with ``"nan"`` each step is looked at, as `tfnb.run` does it: one that would give or write NaN or
    infinite numbers raises NonFinite, which names the op and line that made the first of them, and the Variables stay
    as they were before it. On a cluster the task whose rows these are says so; where asynchronous tasks write
    Variables on several servers, another server may have written its part of that step already.

    timeout, progress_after: seconds; the second says when progress begins to be shown. memory_budget: of the steps of
    this training, in bytes or text such as ``"2GB"``, as `Session` takes it, with microbatches in packs of layers (of a
    model made in `tfnb.mapped_memory` the process holds no more, validation included); not on a cluster.

    restarts: how often within ten minutes training on a cluster goes on by itself after a parameter server was lost; 0
    raises ParameterServerLost at once. Compute tasks hold copies of all values, on another host than the server where
    there is one, renewed every two seconds, less often where that takes more than a twentieth of the time. The
    notebook has a copy, too, for the loss of a server together with a task that held its values, or of the scheduler:
    renewed every two seconds, less often where that takes more than half a percent of a processor's time or one percent
    of the training's (of 50 MB about every ten seconds); four times as much while it is the only one, as with queues on
    servers, with a single worker or in mode ``"allreduce"``. Tasks and servers begin anew from the newest copy on the
    workers that are there, and all later steps are taken again. Each step counts once, in the values and in
    ``history``; a callback of steps hears of one that is taken again with ``progress.again``. What steps of `tfnb.run`
    wrote since the copy is gone; the block that is printed, and `tfnb.recovery_log`, say how many. Queues are copied,
    too: one that was on the lost server holds what it held, with what this process put and took since the copy, but
    without what steps of `tfnb.run` did to it. Where what was taken here followed from one of those steps, nobody knows
    what the queue held: training stops then.

    How the tasks of a connected cluster work together (here every mode is the same loop): ``mode="sync"`` divides the
    rows of a step over them and averages their gradients, by rows or by what the loss of each part divides by. That
    equals the run here for a loss that is a mean or a sum over rows, or a mean over what counts of them: targets that
    are not ignored, a mask, class or sample weights, a boolean index. exact: None looks at the structure of the loss,
    compares both on at most 64 rows before the first of these trainings of a recording, and warns of a loss that is
    none of these, such as a maximum, or terms with different divisors, with the line: it is trained as with True. False
    averages without a look. True is exact for any loss, and for batch norm: the tasks sum or gather in mid-step what
    depends on all rows, and the notebook takes one step after the other; each has the values of one machine, but for
    the order of sums.
    What else a step writes, such as the running statistics of batch norm or the rows that ``max_norm`` scales, is what
    the first task made of its rows. ``backup`` of the tasks are spare: they compute copies of the parts of a step, of
    which the first one counts, so that no step waits for the slowest tasks; each row counts once, and dropped copies
    are counted in the cluster's status. `tfnb.train.SyncReplicas` has more options of this.
    ``"async"``: each task takes steps of its own, one after the other; of Dask data whole chunks are shuffled, and rows
    within them, and a task takes those of its own worker first. ``"bounded"``: likewise, but a task begins a
    step only while it is at most ``staleness`` steps ahead of the slowest one. ``"allreduce"``: as ``"sync"``, but each
    task, a rank, holds all Variables and the state of the optimizer, sums gradients with the others by gloo, without
    the servers, and makes the same update; a learning rate that a callback sets holds from the next piece of steps,
    half a second, on. It goes on with the ranks that are left, or join. Its sums are not encrypted: a cluster
    with TLS takes it with ``allow_plain_collectives=True`` only. `tfnb.train.LocalSGD`: ranks that take steps on their
    own, and average their Variables after so many. `tfnb.train.Downpour`: asynchronous tasks that push sums of
    gradients, and fetch Parameters, after so many steps. ``"pipeline"``: the nodes of a step that ask for a
    task, `tfnb.device`, are a stage there; values go from stage to stage for one of the ``microbatches`` after the
    other, and the Variables have the bits of the same call in this process. schedule: ``"1f1b"``, where stage s of S
    works on S - s microbatches at a time, the least of them first, and holds the activations of no more; ``"gpipe"``
    does all of them forward, then backward, and holds all. replicas: so many copies of a pipeline of S stages work side
    by side, on ``replicas * S`` tasks: replica j does stage s at task ``j * S + s``, for the microbatches j,
    j + replicas, j + 2 * replicas ... of each batch. Gradients are added up over all of them and one update is made, at
    the servers, or with ``connect(ps="stages")`` at the tasks of the first replica. That is the step of one pipeline
    over as many microbatches, with the same random numbers, but for the order in which gradients are added; what
    microbatches write themselves, such as running statistics of batch norm, is what those of the first replica make of
    it. The same call in this process has the same bits. Another call may have another mode: it goes on with the
    variables and the state of the optimizer as they are. In the midst of a training a callback changes it:
    ``progress.change("async")``.

    `tfnb.train.Sandblaster`: minimize a loss over all rows by L-BFGS, whose vectors lie on the servers. ``fetch`` is
    the loss itself, a step is an iteration (20 unless ``steps`` says otherwise), which callbacks are called after, and
    ``batch_size`` the rows of a portion (256). Of the other options it takes ``feeds``, ``watch``, ``timeout`` and
    ``progress_after``.

    Raises InvalidArgument or ShapeError for data that does not fit, before anything runs; DeadlineExceeded after
    ``timeout``; KeyboardInterrupt when interrupted. Variables are then at a whole number of steps.

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
        refused = {
            "epochs": (epochs, 1), "validation": (validation, None), "backup": (backup, 0),
            "staleness": (staleness, None), "resume": (resume, False), "check": (check, None), "exact": (exact, None),
            "microbatches": (microbatches, None), "schedule": (schedule, None), "replicas": (replicas, 1),
            "checkpoint": (checkpoint, None), "restarts": (restarts, 5), "memory_budget": (memory_budget, None),
            "allow_plain_collectives": (allow_plain_collectives, False),
        }  # fmt: skip
        return minimized(
            fit, fetch, data, mode, refused, feeds=feeds, steps=steps, batch_size=batch_size, watch=watch,
            callbacks=callbacks, timeout=timeout, progress_after=progress_after,
        )  # fmt: skip
    options = backup, staleness, allow_plain_collectives, schedule, replicas
    how = mode if isinstance(mode, Mode) else mode_of(mode, *options)  # the first of a coordinator
    exact, saver = exact_of(exact, how, microbatches), saver_of(checkpoint, checkpoint_every)
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise InvalidArgument(f"timeout is in seconds, more than 0, not {timeout!r}")
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise InvalidArgument(f"restarts is how often a lost server is replaced, an int of at least 0: {restarts!r}")
    if isinstance(progress_after, bool) or not isinstance(progress_after, int | float) or not progress_after >= 0:
        raise InvalidArgument(f"progress_after is in seconds, 0 or more, not {progress_after!r}")
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
    checked = _validation(session, validation, feeds, names, watched, division)
    if isinstance(data, TensorQueue):
        session.reads(data)
        data = QueueElements(data)
    start = begin(session, resume)
    reads = data if isinstance(data, Source) else None
    if reads is not None and not isinstance(reads, QueueElements):
        session.reads(reads)
    source = batches(
        data, epochs=epochs, steps=steps, batch_size=batch_size, shuffle=shuffle, seed=seed, feeds=feeds, begin=start
    )
    shown = front(None if how.is_coordinated else source.total, session.graph.name)
    checkpoints = Checkpoints(session, saver, checkpoint_every, callbacks, start)
    run = _Run(
        Metrics(names), shown, timeout, session, Callbacks(checkpoints.callbacks), checked, start, reads, how,
        progress_after, checkpoints, RecoveryBudget(Restarts(most=restarts)),
    )  # fmt: skip
    if session.cluster is None:
        taken = _here(session, fetch, watched, source, run, check, division, exact=exact)
    else:

        def there(watched: tuple[Any, ...]) -> Taken:
            waits = validation is not None or (run.callbacks.follow_epochs and (how.is_joint or how.is_coordinated))
            return _there(session, fetch, watched, source, run, check, division, by_pass=waits, exact=exact)

        looks = session.graph.attached.get("watch")  # of `tfnb.watch`
        taken = there(watched) if looks is None else looks.followed(watched, there)
    try:
        with limited, _interrupts(run), closing(_by_epoch(taken, run)) as taken:
            for told in taken:
                run.stepped(told)
                if run.why_over is not None:
                    taken.close()  # tasks end what they have begun
                    break
            return run.finished(steps, type(data).__name__)
    except KeyboardInterrupt:
        stopped = run.stopped()
    except BaseException as error:
        run.failed(error, is_kept=reads is not None or not isinstance(data, Iterator))
        raise
    finally:
        run.expected.announced = None
        session.state.settle(run.steps, is_over=run.is_over or how.is_coordinated)
    raise KeyboardInterrupt(stopped)


# -- the loop -------------------------------------------------------------------------------------------------------


def _here(
    session: Session, fetch: Fetches, watched: tuple[Any, ...], source: Batches, run: _Run, check: str | None,
    division: Division, *, exact: bool | None,
) -> Taken:  # fmt: skip
    """Steps taken in this process, with a standstill after each epoch."""
    if not division.is_whole:
        fetch = operations_of(fetch, session)
    keys: tuple[Any, ...] = ()
    call: Callable[..., Any] | None = None
    epoch, largest = 1, 0
    for batch in source.each if source.is_ours else _awaited(source.each, run):
        if batch.epoch > epoch:
            yield STANDS
            epoch = batch.epoch
        if call is None or len(keys) != len(batch.keys) or any(map(is_not, keys, batch.keys)):
            known_keys(session, batch.keys, named=not source.is_ours)
            keys = batch.keys
            call = session.make_callable((fetch, watched), keys, check=check, microbatches=division)
            if not division.is_whole and exact is not False:
                look_at_means(session, (fetch, watched), keys, batch.values, division)
            if division.is_whole and source.total is not None:
                run.announce(session.expected((fetch, watched), keys), source.total)
            written = next(iter(session.written((fetch, watched), keys)), None)
            run.code = partial(session.code, (fetch, watched), keys, microbatches=division)
        run.steps.begins(batch.position, written)
        values = call(*batch.values)[1]
        if batch.rows > largest:
            largest, run.plan = batch.rows, session.plan
        yield StepReport((batch.epoch,), (batch.rows,), values)


def _by_epoch(taken: Taken, run: _Run) -> Taken:
    """Reports split at epoch boundaries, without empty ones.

    ``run`` hears of the end of each: when everything stands still, else before the first step of the next one.
    """
    __tracebackhide__ = True
    epoch = over = 0
    with closing(taken):
        for told in taken:
            for part in told.by_epoch():
                if epoch > over and (not part.epochs or part.epochs[0] > epoch):
                    over = epoch
                    run.epoch_over(epoch)
                    if run.why_over is not None:
                        return
                if part.epochs:
                    epoch = max(epoch, part.epochs[0])
                    yield part
    if epoch > over:
        run.epoch_over(epoch)


def _there(
    session: Session, fetch: Fetches, watched: tuple[Any, ...], source: Batches, run: _Run, check: str | None,
    division: Division, *, by_pass: bool, exact: bool | None,
) -> Taken:  # fmt: skip
    """Steps that the connected cluster takes, in groups; by_pass: its tasks stand still after each epoch."""
    options: dict[str, Any] = {"mode": run.mode, "changes": run.change, "timeout": run.left, "check": check}
    options |= {"exact": exact, "budget": run.budget, "division": division}
    is_looked_at = not division.is_whole and exact is not False
    if not division.is_whole:
        fetch = operations_of(fetch, session)
    if source.rows is not None and source.total is not None:
        options["by_pass"] = by_pass
        if is_looked_at and source.total:
            heads = session.cluster.heads(source.rows)
            look_at_means(session, (fetch, watched), source.keys, heads, division)
        yield from _of_arrays(session, (fetch, watched), source.keys, source.rows, source.total, run, options)
        return
    each = _awaited(source.each, run)
    first = next(each, None)
    if first is None:
        return
    known_keys(session, first.keys, named=True)
    if is_looked_at:
        look_at_means(session, (fetch, watched), first.keys, first.values, division)
    run.steps.begins()
    begun: dict[int, Batch] = {}  # by number, without its values, until a copy of the Variables has seen its step

    def rows() -> Iterator[tuple[Any, ...] | None]:
        epoch = first.epoch
        for batch in chain([first], each):
            if by_pass and batch.epoch > epoch:
                yield None
                run.steps.begins()
            epoch = batch.epoch
            if len(batch.keys) != len(first.keys) or any(map(is_not, first.keys, batch.keys)):
                asked, found = (", ".join(map(name_of, keys)) for keys in (first.keys, batch.keys))
                raise InvalidArgument(
                    "on a cluster every feed dict has the same keys in the same order: the first one has "
                    f"{asked}; another one has {found or 'none'}"
                )
            begun[run.steps.drawn(batch.position)] = batch._replace(values=())
            yield batch.values

    with closing(session.train((fetch, watched), first.keys, rows(), **options)) as groups:
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


def _of_arrays(
    session: Session, fetches: Fetches, keys: tuple[Any, ...], rows: Arrays, total: int, run: _Run,
    options: Mapping[str, Any],
) -> Taken:  # fmt: skip
    """Reports for arrays, from which tasks take their rows themselves."""
    each, begun = rows.order.per_pass if options["by_pass"] else total, run.step
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


def _awaited(each: Iterator[Batch], run: _Run) -> Iterator[Batch]:
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
        self, metrics: Metrics, front: Any, timeout: float | None, session: Session, callbacks: Callbacks,
        validate: Callable[[_Run], dict[str, float]], begin: int, reads: Source | None, mode: Mode,
        shown_after: float, checkpoints: Checkpoints, budget: RecoveryBudget,
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
        session.state.inputs.training = self.steps
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
                named = dict(zip(self._metrics.names, (value.reshape(()) for value in one.values), strict=False))
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
        values = {**self._metrics.means_of(epoch), **found}
        self._heed(self.callbacks.on_epoch(Progress(self.step, epoch, values, self._counted.samples)))

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
        """What of a memory budget is kept, and how; empty without one."""
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
        self.is_over = self.why_over is None
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
        if self.steps.is_inside:
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
    """The stacklevel that points a warning of the caller to the line that called `fit`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code is not fit.__code__:
        frame, level = frame.f_back, level + 1
    return level + 1


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
    session: Session, data: Any, feeds: Any, names: Sequence[str], watched: tuple[Any, ...], division: Division
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
    if any(tuple(rows.shape[:1]) == (0,) for rows in arrays if hasattr(rows, "shape")):
        raise ShapeError(f"validation data for {', '.join(map(name_of, data))} has no rows")

    def values(run: _Run) -> dict[str, float]:
        metrics = Metrics(names)
        source = batches(data, feeds=None if isinstance(data, Mapping) else feeds, shuffle=False)
        microbatches = 1 if session.memory_budget is None else division.microbatches
        for at, batch in enumerate(source.each, 1):
            if microbatches != 1:
                found = session.make_callable(watched, batch.keys, microbatches=microbatches)(*batch.values)
            else:
                found = session.run(watched, dict(zip(batch.keys, batch.values, strict=True)))
            metrics.add(at, StepReport((1,), (batch.rows,), found))
            run.stop_if_wanted()
        metrics.read()
        return {f"val_{name}": value for name, value in metrics.means().items()}

    return values
