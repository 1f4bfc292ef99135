"""fit: many steps over batches, with progress, watched values, and an interrupt that stops between two steps.

The loop is the session's callable over `tfnb.train.batches`; with a connected cluster the same batches go there.
"""

from __future__ import annotations

import difflib
import logging
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import chain, count
from operator import is_not
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from tfnb import widgets
from tfnb.cluster.members import MODES, Mode
from tfnb.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, ShapeError, TfnbError, Unimplemented
from tfnb.graph import Variable
from tfnb.interrupts import handled
from tfnb.recording import Tensor
from tfnb.session import Session, default_session
from tfnb.state import checkpoint
from tfnb.state.batch_order import Arrays
from tfnb.state.input_sources import Source
from tfnb.structures import graph_of, value_of
from tfnb.train.batches import Batch, Batches, batches, name_of
from tfnb.train.callbacks import Callbacks, Progress
from tfnb.train.metrics import Metrics
from tfnb.train.modes import SyncReplicas
from tfnb.widgets.curve import number, svg

log = logging.getLogger("tfnb.fit")

T = TypeVar("T")

Curve = Sequence[Mapping[str, float]]  # of `Metrics`
Taken = Generator[tuple[Batch, Sequence[torch.Tensor]], None, None]

LATER = ("downpour", "sandblaster", "allreduce")
SHOWN_AFTER = 2.0  # seconds
SHOWN_EVERY = 0.1  # seconds
_PLAIN = "generated code"  # needs no word
LOGGED_EVERY = 10.0  # seconds, where there is no terminal


@dataclass(frozen=True, slots=True)
class RunResult:
    """What `fit` did: how many steps, in how many seconds, and the watched values.

    ``history`` has one entry for each epoch (pass over the data), also one that was cut short: ``epoch``, ``step`` (the
    last one of it), and for each watched value its mean over the epoch, weighted by rows. ``curve`` has them along the
    way: means over equal numbers of steps, at most 400 points. ``code``: which code ran the steps here at the end, why,
    and what compiling it cost. ``stopped``: why it ended before all steps were taken; empty if they were.
    """

    steps: int
    history: list[dict[str, Any]]
    seconds: float
    curve: list[dict[str, Any]] = field(default_factory=list)
    code: str = ""
    stopped: str = ""

    @property
    def summary(self) -> str:
        """How many steps in how many seconds."""
        rate = f", {number(self.steps / self.seconds)} steps/s" if self.seconds else ""
        return f"{self.steps} steps in {self.seconds:.2f} s{rate}{'; ' if self.stopped else ''}{self.stopped}"

    def __repr__(self) -> str:
        lines = [self.summary]
        lines += ["  " + "  ".join(f"{k} {number(v)}" for k, v in entry.items()) for entry in self.history[-10:]]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{escape(name)}</th>" for name in (self.history[-1] if self.history else {}))
        cells = ("".join(f"<td>{number(value)}</td>" for value in entry.values()) for entry in self.history[-10:])
        rows = "".join(f"<tr>{row}</tr>" for row in cells)
        names = [name for name in (self.curve[-1] if self.curve else {}) if name not in ("epoch", "step")]
        curves = "".join(
            f"<figure>{svg(name, [(p['step'], p[name]) for p in self.curve])}<figcaption>{escape(name)}</figcaption>"
            "</figure>"
            for name in names
        )
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        return f"<div>{escape(self.summary)}</div>{curves}{table}"


def fit(
    fetch: Any, data: Any, *, feeds: Any = None, epochs: int = 1, steps: int | None = None,
    batch_size: int | None = None, shuffle: bool = True, seed: int = 0, watch: Any = (), validation: Any = None,
    callbacks: Any = (), mode: Any = "sync", backup: int = 0, staleness: int | None = None,
    resume: bool | str | Path = False, check: str | None = None, timeout: float | None = None,
) -> RunResult:  # fmt: skip
    """Run ``fetch`` once for each batch of ``data``.

    fetch: usually what ``minimize`` gave. data: ``{placeholder: array}`` with rows on axis 0, or an iterable of feed
    dicts, or of other items such as those of a DataLoader: ``feeds=(x, y)`` says what the parts of a tuple are fed to,
    ``feeds={"image": x}`` those of a dict. The position of a `tfnb.Source` is saved by `Session.save`.
    An array is of torch or NumPy, or a Dask array, bag, dataframe or column of one: its chunks are computed and kept
    on the workers of a connected cluster, whose tasks read them there; without a cluster, up to 4 GiB are computed
    here. epochs: passes over the data. steps: so many steps in all instead. batch_size: rows of a step over all tasks
    (32). shuffle, seed: another order in each epoch, the same in each call. watch: scalars to follow, or a dict of
    names.

    validation: data in one of the forms of ``data``. After each epoch the watched values are computed over it, without
    updates; their means by rows stand in the history as ``val_...`` (here; on a cluster call `fit` once for each epoch,
    and `run` over the validation data between). callbacks: functions that are called with a `tfnb.train.Progress` after
    each epoch, or objects with ``on_step`` or ``on_epoch``, such as `tfnb.train.EarlyStopping`. They may end the
    training: ``progress.stop()``; what the tasks of a cluster have begun by then still counts, and an epoch is over
    there when a step of the next one is told. An error in one ends the training between two steps.

    resume: True goes on with the training of this graph that was interrupted, failed or was stopped, a path with the
    one that `Session.save` wrote there, which is restored first: the same call with the same data takes the steps that
    are left, with the batches that it would have taken. Arrays begin there at once; of other data that can be iterated
    again the batches before are drawn and dropped; a `tfnb.Source` and an iterator go on where they are. Steps and
    epochs in the history count on (here only).

    check: with ``"nan"`` each step is looked at, as `tfnb.run` does it: one that would give or write NaN or
    infinite numbers raises NonFinite, which names the op and line that made the first of them, and the Variables stay
    as they were before it (in this process only; servers refuse such gradients anyway). timeout in seconds.

    How the tasks of a connected cluster work together (here every mode is the same loop): ``mode="sync"`` divides the
    rows of a step over them and averages their gradients by rows, which equals the run here for a loss that is a mean
    over rows. ``backup`` of them are spare: a step is made of the first gradients that all servers have, over as many
    rows as asked for; later ones are dropped and counted in the cluster's status. `tfnb.train.SyncReplicas` has more
    options of this.
    ``"async"``: each task takes steps of its own, one after the other; of Dask data whole chunks are shuffled, and rows
    within them, and a task takes those of its own worker first. ``"bounded"``: likewise, but a task begins a
    step only while it is at most ``staleness`` steps ahead of the slowest one. Another call may have another mode: it
    goes on with the variables and the state of the optimizer as they are. In the midst of a training a callback changes
    it: ``progress.change("async")``.

    Raises InvalidArgument or ShapeError for data that does not fit, before anything runs; DeadlineExceeded after
    ``timeout``; KeyboardInterrupt when interrupted. Variables are then at a whole number of steps.

    >>> import tfnb
    >>> layer = torch.nn.Linear(2, 1)
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(4, 2))
    ...     train = tfnb.train.SGD(0.1).minimize(layer(x).square().mean())
    >>> tfnb.fit(train, {x: torch.ones(8, 2)}, epochs=3, batch_size=4).steps
    6
    """
    __tracebackhide__ = True
    how = _mode(mode, backup, staleness)
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise InvalidArgument(f"timeout is in seconds, more than 0, not {timeout!r}")
    session = default_session(graph_of(fetch))
    names, watched = _watched(watch, session)
    if session.cluster is not None:
        if check is not None:
            raise InvalidArgument(
                "fit(check=...) is of training in this process: leave it out, servers refuse gradients that are not "
                "finite; to see where NaN begins run one step with tfnb.run(..., check='nan') after closing the cluster"
            )
        data = session.cluster.in_chunks(data, timeout)
    checked = _validation(session, validation, feeds, names, watched)
    begin = _begin(session, resume)
    if isinstance(data, Source):
        session.reads(data)
    source = batches(
        data, epochs=epochs, steps=steps, batch_size=batch_size, shuffle=shuffle, seed=seed, feeds=feeds, begin=begin
    )
    front = _front(source.total, session.graph.name)
    run = _Run(Metrics(names), front, timeout, session, Callbacks(callbacks), checked, begin)
    if session.cluster is None:
        taken = _here(session, fetch, watched, source, run, check)
    else:

        def there(watched: tuple[Any, ...]) -> Taken:
            return _there(session, fetch, watched, source, run, {"mode": how, "changes": run.change})

        looks = session.graph.attached.get("watch")  # of `tfnb.watch`
        told: Taken = there(watched) if looks is None else looks.followed(watched, there)
        taken = _by_epoch(told, lambda one: one[0].epoch, run)
    try:
        with _interrupts(run), closing(taken):
            for batch, values in taken:
                run.stepped(batch, values)
                if run.why_over is not None:
                    taken.close()  # tasks end what they have begun
                    break
            return run.finished()
    except KeyboardInterrupt:
        stopped = run.stopped()
    except BaseException as error:
        run.failed(error)
        raise
    raise KeyboardInterrupt(stopped)


# -- the loop -------------------------------------------------------------------------------------------------------


def _here(
    session: Session, fetch: Any, watched: tuple[Any, ...], source: Batches, run: _Run, check: str | None
) -> Taken:  # fmt: skip
    """Each batch with the watched values of its step, taken in this process."""
    keys: tuple[Any, ...] = ()
    call: Callable[..., Any] | None = None
    each = source.each if source.is_ours else _awaited(source.each, run)
    for batch in _by_epoch(each, lambda batch: batch.epoch, run):
        if call is None or len(keys) != len(batch.keys) or any(map(is_not, keys, batch.keys)):
            keys, call = batch.keys, session.make_callable((fetch, watched), batch.keys, check=check)
            run.code = partial(session.code, (fetch, watched), keys)
        run.is_inside = True
        yield batch, call(*batch.values)[1]


def _by_epoch(each: Iterator[T], epoch_of: Callable[[T], int], run: _Run) -> Generator[T, None, None]:
    """The same; ``run`` hears of the end of each epoch before the first of the next one."""
    epoch = 0
    with closing(each) if isinstance(each, Generator) else nullcontext():
        for one in each:
            if epoch and epoch_of(one) > epoch:
                run.epoch_over(epoch)
                if run.why_over is not None:
                    return
            epoch = max(epoch, epoch_of(one))
            yield one
    if epoch:
        run.epoch_over(epoch)


def _there(
    session: Session, fetch: Any, watched: tuple[Any, ...], source: Batches, run: _Run, mode: Mapping[str, Any]
) -> Taken:
    """Each batch with the watched values of its step, taken by the connected cluster."""
    if source.rows is not None and source.total is not None:
        yield from _of_arrays(session, (fetch, watched), source.keys, source.rows, source.total, run, mode)
        return
    each = _awaited(source.each, run)
    first = next(each, None)
    if first is None:
        return
    begun: dict[int, Batch] = {}  # by number: in asynchronous mode several at a time, and they end in any order
    numbers, drawn = deque[int | None](), count()

    def rows() -> Iterator[tuple[Any, ...]]:
        for batch in chain([first], each):
            if len(batch.keys) != len(first.keys) or any(map(is_not, first.keys, batch.keys)):
                asked, found = (", ".join(map(name_of, keys)) for keys in (first.keys, batch.keys))
                raise InvalidArgument(
                    "on a cluster every feed dict has the same keys in the same order: the first one has "
                    f"{asked}; another one has {found or 'none'}"
                )
            begun[next(drawn)] = batch
            yield batch.values

    with closing(
        session.train((fetch, watched), first.keys, rows(), timeout=run.timeout, numbers=numbers, **mode)
    ) as steps:
        for _, values in steps:
            number = numbers.popleft()
            yield first if number is None else begun.pop(number), values


def _of_arrays(
    session: Session, fetches: Any, keys: tuple[Any, ...], rows: Arrays, total: int, run: _Run, mode: Mapping[str, Any]
) -> Taken:  # fmt: skip
    """The same for arrays, which tasks take their rows of by themselves."""
    numbers = deque[int | None]()  # which step each result is of; None where its values are lost, too
    with closing(session.train(fetches, keys, (rows, total), timeout=run.timeout, numbers=numbers, **mode)) as steps:
        for _, values in steps:
            number = numbers.popleft()
            epoch, start, stop = rows.order.place(number or 0)
            yield Batch(epoch, keys, (), stop - start), values


def _awaited(each: Iterator[Batch], run: _Run) -> Iterator[Batch]:
    """The user's data: nothing is half done while waiting for it, so an interrupt counts at once."""
    while True:
        run.is_waiting = True
        run.stop_if_wanted()
        batch = next(each, None)
        run.is_waiting = False
        if batch is None:
            return
        yield batch


class _Run:
    """Where one `fit` stands."""

    def __init__(
        self, metrics: Metrics, front: Any, timeout: float | None, session: Session, callbacks: Callbacks,
        validate: Callable[[_Run], dict[str, float]], begin: int,
    ) -> None:  # fmt: skip
        self._session, self._begin, cluster = session, begin, session.cluster
        self.step = session.trained = begin
        self.why_over: str | None = None  # a callback ended it
        self._change: Mode | None = None  # a callback asked for it
        self._callbacks, self._validate = callbacks, validate
        self._validated: dict[int, dict[str, float]] = {}  # by epoch
        self.timeout = timeout
        self._cluster = cluster
        self._before = 0 if cluster is None else cluster.step
        self._lines = 0 if cluster is None else cluster.news(0)[0]  # that tell who came and left, shown so far
        self.is_inside = False  # within a step
        self.is_waiting = False  # for data
        self.is_wanted = False  # an interrupt
        self._metrics, self._front = metrics, front
        self.code: Callable[[], str] = str  # which code runs the steps
        self._said = _PLAIN
        self._start = self._looked = time.perf_counter()
        self._warned = 0

    def stepped(self, batch: Batch, values: Sequence[torch.Tensor]) -> None:
        """One more step is done."""
        __tracebackhide__ = True
        self.step += 1
        self._session.trained = self.step
        self.is_inside = False
        is_known = not any(value is None for value in values)  # else a lost task told nobody of them
        self._metrics.add(self.step, batch.rows, values if is_known else (), batch.epoch)
        if self._callbacks.follow_steps:
            named = dict(zip(self._metrics.names, values, strict=True)) if is_known else {}
            self._heed(self._callbacks.on_step(Progress(self.step, batch.epoch, named)))
        now = time.perf_counter()
        if now - self._looked >= SHOWN_EVERY:
            self._looked = now
            self._look(now - self._start)
        self.stop_if_wanted()

    def epoch_over(self, epoch: int) -> None:
        """An epoch is over: its values, and what is to be called."""
        self._read()
        found = self._validate(self)
        if found:
            self._validated[epoch] = found
        values = {**self._metrics.means_of(epoch), **found}
        self._heed(self._callbacks.on_epoch(Progress(self.step, epoch, values)))

    def _heed(self, progress: Progress) -> None:
        """What a callback asked for."""
        self.why_over = progress.stopped or self.why_over
        self._change = _mode(*progress.changed) if progress.changed is not None else self._change

    def change(self) -> Mode | None:
        """The mode that a callback asked for last, once."""
        wanted, self._change = self._change, None
        return wanted

    @property
    def _means(self) -> dict[str, float]:
        """The values of now, for people."""
        return {**self._metrics.means(), **self._validated.get(max(self._validated, default=0), {})}

    def _look(self, seconds: float) -> None:
        """What is done a few times a second."""
        __tracebackhide__ = True
        self._read()
        self._say_who_came()
        if seconds >= SHOWN_AFTER:
            code = self.code()
            if code and code != self._said:
                self._said = code
                self._front.say(code)
            self._front.update(self.step, self._means, (self.step - self._begin) / seconds, self._metrics.curve())
        if self.timeout is not None and self._cluster is None and seconds > self.timeout:
            raise DeadlineExceeded(
                f"fit did not end within {self.timeout} s; variables are at step {self.step}", step=self.step
            )

    def _say_who_came(self) -> None:
        if self._cluster is not None:
            self._lines, lines = self._cluster.news(self._lines)
            for line in lines:
                self._front.say(line)

    def _read(self) -> None:
        self._metrics.read()
        for bad in self._metrics.bad[self._warned :]:
            warnings.warn(f"{bad.name} is {bad.value} at step {bad.step}", stacklevel=_user_level())
        self._warned = len(self._metrics.bad)

    def stop_if_wanted(self) -> None:
        """Between two steps: grant the wish of an interrupt."""
        if self.is_wanted:
            raise KeyboardInterrupt

    def finished(self) -> RunResult:
        """The end as planned."""
        self._read()
        self._say_who_came()
        seconds = time.perf_counter() - self._start
        if self.why_over is None:
            self._session.trained = 0
        steps = (self.step if self.why_over is None else self._applied()) - self._begin
        history = [entry | self._validated.get(entry["epoch"], {}) for entry in self._metrics.history]
        result = RunResult(steps, history, seconds, self._metrics.curve(), self.code(), self.why_over or "")
        self._finish(result.summary)
        return result

    def _finish(self, text: str) -> None:
        self._front.finish(text, self._means, self._metrics.curve())

    def stopped(self) -> str:
        """The end by an interrupt; says where the variables are."""
        step = self._applied()
        place = f"{step} or {step + 1}" if self.is_inside else str(step)
        text = f"stopped at step {step}; variables are at step {place}"
        if self._cluster is None:
            text += "; the same call with resume=True goes on"
        self._finish(text)
        return text

    def _applied(self) -> int:
        """Steps that the variables have seen: a cluster ends what it has begun."""
        return self.step if self._cluster is None else self._cluster.step - self._before

    def failed(self, error: BaseException) -> None:
        """The end by an error, which learns its step."""
        self._finish(f"failed after step {self.step}: {type(error).__name__}")
        if self.is_inside:
            error.add_note(f"in step {self.step + 1} of fit; variables are at step {self.step}")
            if isinstance(error, TfnbError) and error.step is None:
                error.step = self.step + 1


def _user_level() -> int:
    """The stacklevel at which a warning of the caller points to the line that called `fit`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code is not fit.__code__:
        frame, level = frame.f_back, level + 1
    return level + 1


# -- interrupts -------------------------------------------------------------------------------------------------------


@contextmanager
def _interrupts(run: _Run) -> Iterator[None]:
    """Ctrl-C becomes a wish that is granted between two steps; a second one counts at once."""

    def wish(number: int, frame: FrameType | None) -> None:
        if run.is_waiting or run.is_wanted:
            raise KeyboardInterrupt
        run.is_wanted = True

    with handled(wish):
        yield
    run.stop_if_wanted()  # wished after the last step


# -- watched values ---------------------------------------------------------------------------------------------------


def _watched(watch: Any, session: Session) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and fetches of what is watched; raises ShapeError for what is no scalar."""
    if isinstance(watch, Mapping):
        named = [(str(name), item) for name, item in watch.items()]
    else:
        if not isinstance(watch, str | Tensor | Variable | Iterable):
            raise InvalidArgument(
                f"watch is a scalar of the graph, its name, a list of them, or a dict of names to them: got {watch!r}"
            )
        items = [watch] if isinstance(watch, str | Tensor | Variable) else list(watch)
        named = [(name_of(item), item) for item in items]
    found: dict[str, Any] = {}
    for name, item in named:
        unique = name if name not in found else f"{name}_{len(found)}"
        _check_scalar(unique, item, session)
        found[unique] = item
    return tuple(found), tuple(found.values())


def _validation(
    session: Session, data: Any, feeds: Any, names: Sequence[str], watched: tuple[Any, ...]
) -> Callable[[_Run], dict[str, float]]:  # fmt: skip
    """What gives the watched values over the validation data, by name."""
    if data is None:
        return lambda run: {}
    if session.cluster is not None:
        raise InvalidArgument(
            "fit(validation=...) is of training in this process: tasks of a cluster do not stop between two epochs. "
            "Call fit once for each epoch, with another seed each, and tfnb.run over the validation data between"
        )
    if not names:
        raise InvalidArgument("validation= computes the watched values over other data: name them, watch=loss")
    if not isinstance(data, Mapping) and iter(data) is data:
        raise InvalidArgument(
            f"validation data is iterated after each epoch, and {type(data).__name__} can be only once: pass a list, "
            "a DataLoader or {placeholder: array}"
        )

    def values(run: _Run) -> dict[str, float]:
        metrics = Metrics(names)
        source = batches(data, feeds=None if isinstance(data, Mapping) else feeds, shuffle=False)
        for at, batch in enumerate(source.each, 1):
            found = session.run(watched, dict(zip(batch.keys, batch.values, strict=True)))
            metrics.add(at, batch.rows, found)
            run.stop_if_wanted()
        metrics.read()
        return {f"val_{name}": value for name, value in metrics.means().items()}

    return values


def _check_scalar(name: str, item: Any, session: Session) -> None:
    if isinstance(item, Variable):
        spec = item.spec
    else:
        value = value_of(session.graph, item)
        node = session.graph.contents.by_id[value.node]
        if not node.outputs:
            raise InvalidArgument(f"cannot watch {name}: it has no value")
        spec = node.outputs[value.index]
    if any(size != 1 for size in spec.shape):
        raise ShapeError(f"a watched value has shape []: {name} is {spec}; take its mean() in the graph")


# -- options ----------------------------------------------------------------------------------------------------------


def _begin(session: Session, resume: Any) -> int:
    """Steps that were taken before."""
    if resume is False or resume is None:
        return 0
    if session.cluster is not None:
        raise InvalidArgument(
            "fit(resume=...) is of trainings in this process: on a cluster call fit with the steps that are left, and "
            "another seed"
        )
    if resume is not True:
        if not isinstance(resume, str | Path):
            raise InvalidArgument(f"resume is True or the path of a file of Session.save, not {resume!r}")
        steps = checkpoint.load(resume)[1].get("training", {}).get("steps", 0)
    else:
        steps = session.trained
    if not steps:
        where = "in this session" if resume is True else f"in {resume}"
        raise FailedPrecondition(
            f"there is no training of graph {session.graph.name} to go on with {where}: none began, or it was at its "
            "end; leave out resume"
        )
    if resume is not True:
        session.restore(resume)
    return steps


def _mode(mode: Any, backup: Any, staleness: Any) -> Mode:
    """The mode that is asked for; raises InvalidArgument, or Unimplemented for one that is to come."""
    if isinstance(mode, SyncReplicas):
        if backup or staleness is not None:
            raise InvalidArgument("SyncReplicas says how many tasks are spare: leave out backup and staleness")
        elastic = mode.elastic or not mode.distinct
        return Mode("sync", mode.backup, None, mode.m, mode.n or 0, mode.atomic, elastic)
    if not isinstance(mode, str) or mode in LATER:
        raise Unimplemented(f"mode={mode!r} is not there yet; there are: {', '.join(MODES)}")
    if mode not in MODES:
        near = difflib.get_close_matches(mode, [*MODES, *LATER], 1)
        nearest = f"; near: {near[0]!r}" if near else ""
        raise InvalidArgument(f"unknown mode {mode!r}{nearest}; there are: {', '.join(MODES)}")
    if isinstance(backup, bool) or not isinstance(backup, int) or backup < 0:
        raise InvalidArgument(f"backup is the number of spare tasks, an int of at least 0, not {backup!r}")
    if backup and mode != "sync":
        raise InvalidArgument(
            f"backup={backup} belongs to mode='sync', not to {mode!r}: there no task waits for others"
        )
    if staleness is not None and mode != "bounded":
        raise InvalidArgument(f"staleness={staleness!r} belongs to mode='bounded', not to {mode!r}")
    if mode == "bounded" and (isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0):
        raise InvalidArgument(
            "mode='bounded' takes staleness, the number of steps that a task may be ahead of the slowest one: an int "
            f"of at least 0, not {staleness!r}"
        )
    return Mode(mode, backup, staleness)


# -- showing ----------------------------------------------------------------------------------------------------------


class _Log:
    """Log lines now and then, where nobody watches."""

    def __init__(self, total: int | None, label: str) -> None:
        self._total, self._label = total, label
        self._next = 0.0

    def update(self, step: int, metrics: Mapping[str, float], rate: float, curve: Curve) -> None:
        """A line, if the last one is some time ago."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOGGED_EVERY
            log.info("%s", _line(self._label, step, self._total, metrics, rate))

    def say(self, text: str) -> None:
        """Once, when other code runs or is on its way, or when a task of a cluster came or left."""
        log.info("%s: %s", self._label, text)

    def finish(self, text: str, metrics: Mapping[str, float], curve: Curve) -> None:
        """The last line."""
        log.info("%s: %s", self._label, text)


class _Panel:
    """The panel of a notebook or the line of a terminal, made when there is something to show."""

    def __init__(self, total: int | None, label: str) -> None:
        self._total, self._label = total, label
        self._panel: Any = None

    def say(self, text: str) -> None:
        """Show it beside the steps."""
        if self._panel is None:
            self._panel = widgets.ProgressPanel(self._total, self._label)
        self._panel.note = text

    def update(self, step: int, metrics: Mapping[str, float], rate: float, curve: Curve) -> None:
        """Show it, or renew it."""
        if self._panel is None:
            self._panel = widgets.ProgressPanel(self._total, self._label)
        self._panel.update(step, metrics, rate, curve)

    def finish(self, text: str, metrics: Mapping[str, float], curve: Curve) -> None:
        """The final state, which a saved notebook keeps."""
        if self._panel is not None:
            self._panel.finish(text, metrics, curve)


def _front(total: int | None, label: str) -> _Panel | _Log:
    """Where progress goes: the notebook or terminal, or the log."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    is_seen = hasattr(shell, "kernel") or (sys.stdout is not None and sys.stdout.isatty())
    return (_Panel if is_seen else _Log)(total, label)


def _line(label: str, step: int, total: int | None, metrics: Mapping[str, float], rate: float) -> str:
    """``digits: step 312/1000  50.1/s  loss 0.123  13 s left``."""
    parts = [f"{label}: step {step}/{total}" if total else f"{label}: step {step}", f"{number(rate)}/s"]
    parts += [f"{name} {number(value)}" for name, value in metrics.items()]
    if total and rate:
        parts.append(f"{(total - step) / rate:.0f} s left")
    return "  ".join(parts)
