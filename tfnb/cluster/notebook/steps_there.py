"""The notebook's steps on a cluster: single steps of `run`, and the steps of a training."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from distributed import Client

from tfnb.cluster.engine.engine import Engine
from tfnb.cluster.engine.members import CLASSES, MODES, Ahead, Mode, StepFeeds
from tfnb.cluster.engine.sources import NONE, DrawnBatches, drawn_from
from tfnb.cluster.engine.step_record import StepRecord
from tfnb.cluster.engine.training import Training
from tfnb.cluster.modes.joins import join, joins
from tfnb.cluster.modes.leases import Offer
from tfnb.cluster.modes.windows import BYTES, WindowSizes
from tfnb.cluster.notebook import divided_rows
from tfnb.cluster.notebook.collections import head, read
from tfnb.cluster.notebook.exact_steps import ExactSteps
from tfnb.cluster.notebook.queue_homes import QueueHomes
from tfnb.cluster.notebook.variables_there import VariablesThere
from tfnb.cluster.notebook.waiting import SETTLE, EventLoopWaiter, begin_look
from tfnb.cluster.tasks.collectives import is_summed
from tfnb.cluster.tasks.part_programs import part_plans, task_of
from tfnb.cluster.tasks.programs import PlacedOuterStep, PlacedStep, place
from tfnb.cluster.wire import envelope
from tfnb.cluster.wire.lossy import AS_THEY_ARE, LossyTransfers
from tfnb.cluster.wire.messages import GIVEN_UP
from tfnb.errors import (
    DeadlineExceeded,
    InsecureAddress,
    InvalidArgument,
    NonFinite,
    NonFiniteGradient,
    OutOfRange,
    TfnbError,
    Unimplemented,
    WorkerLost,
)
from tfnb.execution.tiers.tiered import Mode as Compile
from tfnb.execution.tracing.trace import Trace
from tfnb.graph import Graph
from tfnb.passes import StepGraph
from tfnb.passes.flow.row_weights import WeighedStep, weighed
from tfnb.placement.partition import split
from tfnb.placement.placement import Homes
from tfnb.placement.requests import asked, ensure_on_servers, ensure_stages, idle_tasks, numbers_of, tasks_of
from tfnb.placement.row_guards import RowGuards
from tfnb.recording.marks.notes import user_level
from tfnb.state.batch_order import Rows
from tfnb.state.step_groups import StepGroup, of_one
from tfnb.state.steps_taken import AppliedSteps, SeenSteps

See = Callable[[Sequence[Any]], None]

KEPT = 64  # placed programs
_LATE = "a watched value depends on averaged gradients, or on the state after the step"
_SUMMED = (
    "So tasks sum over all rows in mid-step, one step after the other, as with exact=True; with exact=False the step "
    "takes what the first task makes of its rows"
)
STANDS = StepGroup(0, ())  # tells that tasks stand still
_END: Any = object()  # of batches
AHEAD = 1 << 30  # bytes of arrays that are sent to every task before a training


def varying(step: StepGraph) -> list[bool]:
    """For each feed of a step, whether axis 0 varies."""
    by_id = step.whole.contents.by_id
    shapes = (by_id[value.node].outputs[value.index].shape for value in step.feeds)
    return [bool(shape) and not isinstance(shape[0], int) for shape in shapes]


def batches(
    step: StepGraph, rows: Iterable[tuple[Sequence[torch.Tensor], int] | None], numbers: Iterator[int] | None = None
) -> Iterator[StepFeeds | None]:
    """Batches of (tensors, run index): every feed with a varying axis 0 of the batch's length is divided.

    A None, at which tasks stand still, stays one. numbers: of the steps; from 0 if not given.
    """
    varies, numbers = varying(step), itertools.count() if numbers is None else numbers
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
        yield StepFeeds(tuple(tensors), run_index, count or None, cut, number)


class PeekedBatches:
    """Batches that are drawn a window at a time."""

    def __init__(self, batches: Iterator[StepFeeds | None]) -> None:
        self._batches, self._ahead = batches, list[StepFeeds | None]()
        self._error: Exception | None = None  # of the next batch

    def window(self, most: int, is_written: Callable[[], bool]) -> list[StepFeeds] | None:
        """The next batches, at least one; none where tasks are to stand still, None at the end.

        is_written: whether drawing a batch wrote a Variable: earlier batches do not see that.
        """
        found: list[StepFeeds] = []
        nbytes = 0
        while len(found) < most:
            batch = self._ahead.pop() if self._ahead else self._drawn(bool(found))
            if batch is _END:
                return found or None
            nbytes += 0 if batch is None else envelope.size(batch.tensors)
            if found and (batch is None or nbytes > BYTES or is_written()):
                self._ahead.append(batch)
                return found
            if batch is None:
                return []
            found.append(batch)
        return found

    def _drawn(self, is_later: bool) -> Any:
        """The next batch. Raises what drawing one raised, but not before earlier batches of a window are taken."""
        if self._error is not None:
            raise self._error
        try:
            return next(self._batches, _END)
        except Exception as error:
            if not is_later:
                raise
            self._error = error
            return _END


class Steps:
    """Places steps on the tasks and servers, with the Variables that they need, and takes them.

    is_staged: whether each task is the server of its stage of a pipeline. lossy: the formats of what crosses.
    """

    def __init__(
        self, client: Client, engine: Engine, waiting: EventLoopWaiter, variables: VariablesThere, queues: QueueHomes,
        *, is_staged: bool = False, lossy: LossyTransfers = AS_THEY_ARE,
    ) -> None:  # fmt: skip
        self._is_staged, self._lossy = is_staged, lossy
        self._client, self._engine, self._waiting = client, engine, waiting
        self._variables, self._queues = variables, queues
        self._placed: OrderedDict[tuple[Any, ...], tuple[weakref.ref[StepGraph], PlacedStep]] = OrderedDict()
        self.placing = threading.RLock()  # while it is held Variables stay where they are

    def forget(self) -> None:
        """The cluster is no more."""
        self._placed.clear()

    def run(
        self, step: StepGraph, tensors: Sequence[torch.Tensor], *, timeout: float | None = None, run: int = 0,
        check: bool = False, see: See | None = None, compile: Compile = "off",
        trace: Callable[[Trace], object] | None = None,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Run one step, on one task or in parts on the tasks requested by its nodes; returns the fetched values of
        ``step``.

        tensors: in the order of its feeds.
        check: raise NonFinite where the step would give, or write, numbers that are not finite. see: gets the fetched
        values before anything is written; nothing is where it raises. compile: as of `Session`, on the task. trace:
        gets what all places did, and when.
        """
        self._waiting.ensure_open()
        placed = self.place(step, parallel=False, check=check, compile=compile)
        self._variables.send_for_step(step.variables)
        queues = self._queues.used(placed.queues)
        record = None if trace is None else StepRecord(step)
        try:
            batch, counted = StepFeeds(tuple(tensors), run), self._variables.unseen.append
            values, _ = self._step(step, placed, batch, timeout, "run", queues, see, counted, record)
        except OutOfRange as error:
            error.__cause__ = self._queues.cause(placed.queues)
            raise
        if trace is not None and record is not None:
            trace(record.trace())
        if step.writes:
            self._variables.refresh(pulls=False)  # a pull would take longer than this run may
        return _picked(placed.fetched, values[0])

    def _step(
        self,
        step: StepGraph,
        placed: PlacedStep,
        batch: StepFeeds,
        timeout: float | None,
        what: str,
        queues: Sequence[tuple[int, str]] = (),
        see: See | None = None,
        counted: Callable[[int], object] = int,
        record: StepRecord | None = None,
    ) -> tuple[list[list[Any]], list[int]]:
        patience = None if timeout is None else timeout + 5
        before = self._engine.step

        def seen(values: list[list[Any]]) -> None:
            begin_look()
            if see is not None:
                see(_picked(placed.fetched, values[0]))

        looked = None if see is None else seen
        try:
            given = placed, batch, timeout, queues, looked, counted, record
            return self._waiting.do(what, patience, self._engine.single.run, *given)
        except NonFinite as error:
            if not placed.parts:
                raise
            raise self._located(error, step, batch, timeout) from None
        finally:
            if self._engine.step != before:
                self._variables.outdated(step)

    def _located(self, error: NonFinite, step: StepGraph, batch: StepFeeds, timeout: float | None) -> NonFinite:
        """The error of a step in parts, with the op, line and task where the numbers that are not finite began.

        A task sees its own part only, so one task computes the whole step again, with probes; nothing is written. Where
        it cannot, or finds nothing, the error stays as it is.
        """
        is_finite = False

        def stop(values: Sequence[Any]) -> None:
            nonlocal is_finite
            is_finite = True
            begin_look()
            raise error

        what, patience = "looking for where NaN began", None if timeout is None else timeout + 5
        try:
            placed = self.place(step, parallel=False, check=True, is_cut=False)
            whole = replace(batch, rows=None)
            self._waiting.do(what, patience, self._engine.single.run, placed, whole, timeout, (), stop)
        except TfnbError as found:
            if is_finite or not isinstance(found, NonFinite):
                return error
            names = [member.name for member in self._engine.tasks]
            number = task_of(step, numbers_of(names), found)
            found.task = error.task if number is None else f"task:{number}"
            if not isinstance(error, NonFiniteGradient):
                return found
            error.message += f"\nComputed again on one task: {found.message}"
            error.task, error.node, error.op, error.cell, error.line = (
                found.task, error.node, found.op, found.cell, found.line
            )  # fmt: skip
        return error

    def ahead(self, step: StepGraph, data: Ahead, begin: int = 0) -> Ahead | Iterator[StepFeeds | None]:
        """The input of `train`, made from arrays in the order of the feeds: sent once, unless too large.

        begin: so many of its steps were taken before.
        """
        arrays = data.arrays
        fits = all(of or not array.dim() for of, array in zip(varying(step), arrays, strict=False))
        budgets = (member.info.get("budget") for member in self._engine.tasks)
        room = min([AHEAD, *(budget // 4 for budget in budgets if budget)])
        if fits and envelope.size([array for array in arrays if isinstance(array, torch.Tensor)]) <= room:
            return data
        return self._drawn(step, data, AppliedSteps(begin))

    def _drawn(self, step: StepGraph, data: Ahead, applied: AppliedSteps = NONE) -> Iterator[StepFeeds | None]:
        """Batches that are made here, but of steps that were applied before."""
        rows = Rows([read(self._client, array) for array in data.arrays], data.order)

        missing, begin = applied.missing(range(data.total)), applied.whole

        def each() -> Iterator[tuple[Sequence[torch.Tensor], int] | None]:
            for at in itertools.chain.from_iterable(missing):
                if data.ends_pass(at) and at != begin:
                    yield None
                tensors = rows.batch(at)
                yield [*tensors, *data.more(tensors)], data.run(at)

        return batches(step, each(), itertools.chain.from_iterable(missing))

    def train(
        self, step: StepGraph, source: Ahead | Iterable[StepFeeds | None], *, mode: Mode | str = "sync",
        timeout: float | None = None, one_by_one: str = "", changes: Callable[[], Mode | None] = lambda: None,
        check: bool = False, see: See | None = None, compile: Compile = "off", exact: bool | None = False,
        applied: AppliedSteps = NONE, seen: SeenSteps | None = None, graph: Graph | None = None,
    ) -> Generator[StepGroup, None, None]:  # fmt: skip
        """Train data-parallel over the compute tasks; yields the fetched values of steps that are applied, in groups.

        sync: the rows of a batch are divided over the live tasks, gradients are averaged weighted by rows. With
        ``backup`` spare tasks a step is made of the first gradient of each of its parts, and waits for no copy.
        async: each task works on whole batches of its own. bounded: likewise, at most ``staleness`` steps ahead of the
        slowest one. ``changes``: asked now and then for another mode to go on in. Tasks work ahead of what is yielded.
        Close the generator (or exhaust it): local storages then show the values of the last step, also after Ctrl-C.
        ``timeout``: seconds for all of it. ``one_by_one``: why the notebook has to see every step before the next one
        begins; each is a group of its own then. Asynchronous tasks end their steps in any order: a group has their
        numbers. ``check``, ``compile``: as of `run`. ``see``, too: then tasks do not divide the rows of a step.
        A step whose nodes ask for several tasks is taken in parts, one step after the other, whatever the mode.
        pipeline: such a step over microbatches, which each of its tasks, a stage, takes in the order of the schedule.
        ``graph``: whose step it is; with ``ps="stages"`` its first pipeline moves Variables to the tasks of their
        stages.
        ``exact``: True has the tasks sum over all rows in mid-step, one step after the other. None looks first whether
        gradients averaged by rows are those of whole batches, and where they are not warns, and does so, too.

        Where there is a None among the batches, or a pass ends of data that says so, tasks stand still when everything
        before is applied: local storages show that, and an empty group tells it. They go on when the next one is asked
        for. An empty group with ``kept`` tells which steps local storages show, and so does ``seen``, also after an
        error. ``applied``: steps of arrays that are left out, as they were applied before.
        """
        seen = SeenSteps() if seen is None else seen
        if not self._variables.held.stale:
            seen.now = applied.copy
        self._waiting.ensure_open()
        how = self._possible(Mode(mode) if isinstance(mode, str) else mode)
        end = None if timeout is None else time.monotonic() + timeout
        if how.is_pipeline:
            self._check_stages(step, how)
        graph = step.whole if graph is None else graph
        placed, why = self._placed_for(step, how, see, check, compile, one_by_one, graph)
        tasks = len(self._numbers())
        is_exact, source = self._is_exact(step, placed, how, source, exact)
        may_sum = is_exact and placed.divides and placed.writes and not how.is_pipeline  # more tasks may join one
        over = self._over_rows(step, check, compile, is_asked=exact is True) if may_sum else None
        is_stepwise = bool(why) or not placed.writes or over is not None
        _check_writes(step, placed, how, tasks, why, is_stepwise=is_stepwise)
        if (self._variables.held.stale or self._queues.lacks_copies) and not how.is_coordinated:
            self._show()  # should a server be lost, training goes on from what is here
        seen.now = applied.copy
        steps: Generator[StepGroup, None, Any]
        if how.is_pipeline and not see and not one_by_one and self._engine.windows.may_take(placed):
            steps = self._in_windows(step, placed, source, end, applied, seen)
        elif is_stepwise:
            if over is not None and not why and tasks == 1:
                steps = self._alone_first(step, placed, source, how, end, timeout, applied, seen, over)
            else:
                is_whole = see is not None or how.is_pipeline
                steps = self._stepwise(step, placed, source, end, see, applied, seen, is_whole=is_whole, over=over)
            steps = _in_one_mode(steps, how, changes, why or "tasks sum over all rows in mid-step")
        else:
            changed = partial(self._changed, step, placed, source, changes, exact)
            steps = self._looping(step, placed, source, how, changed, end, timeout, applied, seen)
        yield from self._to_the_end(step, how, steps, end, seen)

    def _check_stages(self, step: StepGraph, how: Mode) -> None:
        """Raise InvalidArgument where a pipeline asks for tasks that are not there; warn of tasks without a stage."""
        stages = asked(step.graph.nodes)
        ensure_stages(stages, self._names, how.pipelines)
        if note := idle_tasks(stages, self._names, how.pipelines):
            warnings.warn(note, stacklevel=user_level(None))

    def _to_the_end(
        self, step: StepGraph, how: Mode, steps: Generator[StepGroup, None, Any], end: float | None, seen: SeenSteps
    ) -> Generator[StepGroup, None, None]:
        """The groups of a training. Then local storages show its last step, also after an error or Ctrl-C."""
        is_shown, interrupts = False, self._engine.interrupts
        written = frozenset([*step.writes, *(how.outer.step.writes if how.outer is not None else ())])
        self._variables.training.append(written)
        try:
            yield from self._groups(step, how, steps, seen)
            self._show(step, how)
            is_shown = True
        finally:
            self._variables.training.remove(written)
            if not self._variables.training and self._engine.lost is None:
                self._variables.safety.end()
            if not is_shown and self._engine.lost is None:  # an error, or Ctrl-C at whatever instant, also in `_show`
                is_unwanted = self._engine.interrupts != interrupts or (end is not None and time.monotonic() >= end)
                if is_unwanted and (silent := self._engine.peers.silent):
                    who = ", ".join(member.name for member in silent)
                    text = f"the values stay on the servers until Cluster.pull(): {who} does not answer"
                    warnings.warn(text, stacklevel=user_level(None))
                else:
                    self._show(step, how)

    def _groups(
        self, step: StepGraph, how: Mode, steps: Generator[StepGroup, None, Any], seen: SeenSteps
    ) -> Generator[StepGroup, None, None]:
        """The groups, and an empty group after each pull; between them Variables that the notebook leads, such as
        rates, go there.
        """
        try:
            pulled = self._variables.pulled_step
            for group in steps:
                if self._variables.pulled_step != pulled:
                    assert seen.now is not None, "`train` sets it"
                    pulled = self._variables.pulled_step
                    yield StepGroup(0, (), kept=seen.now())
                yield group._replace(values=group.values[: len(step.fetches)])  # without totals of weights
                if group.steps:  # where tasks stand still, storages show it, and what is written here goes there
                    self._variables.send_leading(step.variables)  # a callback set a rate: for the next steps
                    self._variables.refresh(pulls=not how.is_coordinated)
        finally:
            steps.close()

    def _is_exact(
        self, step: StepGraph, placed: PlacedStep, how: Mode, source: Ahead | Iterable[StepFeeds | None],
        exact: bool | None,
    ) -> tuple[bool, Ahead | Iterable[StepFeeds | None]]:  # fmt: skip
        """Whether tasks sum over all rows in mid-step, and the batches of the training."""
        if exact is not None or not how.is_joint or not placed.divides:
            return bool(exact), source
        may_sum, tasks = how.name == "sync" and not how.may_have_spare, len(self._numbers())
        count = min(how.required or tasks - how.backup, tasks)
        if may_sum and (names := (*placed.placement.apart, *placed.placement.shown)):
            if tasks > 1:
                warnings.warn(f"{_written(names)}. {_SUMMED}", stacklevel=user_level(None))
            return True, source
        who = divided_rows.SUMMING if may_sum else divided_rows.LOCAL if how.every else divided_rows.TASKS
        source, notes, is_mean = self._looked_at(step, placed, max(2, count), source, who)
        for note in notes if tasks > 1 or not (may_sum or is_mean) else ():
            warnings.warn(note, stacklevel=user_level(None))
        if is_mean and count > 1 and not how.every and not isinstance(source, Ahead):
            source = self._looked_further(step, placed, count, source)
        return may_sum and not is_mean, source

    def _over_rows(self, step: StepGraph, check: bool, compile: Compile, *, is_asked: bool) -> ExactSteps:
        """The step over the rows of the tasks; warns of the ops that one task does."""
        place = partial(self.place, parallel=False, check=check, compile=compile, is_exact=True)
        over = ExactSteps(step, self._numbers, place, is_asked)
        if note := over.note:
            warnings.warn(note, stacklevel=user_level(None))
        return over

    def _placed_for(
        self, step: StepGraph, how: Mode, see: See | None, check: bool, compile: Compile, one_by_one: str, graph: Graph
    ) -> tuple[PlacedStep, str]:
        """The plans of a training, and why its steps are taken one after the other; warns where that was not asked."""
        staged = graph if how.is_pipeline and self._is_staged else None
        parallel = see is None and not how.is_pipeline
        placed = self.place(step, parallel=parallel, check=check, compile=compile, staged=staged)
        is_cut = bool(placed.parts) or how.is_pipeline
        undivided = placed.undivided or ""
        one_by_one = "a breakpoint is set" if see is not None else one_by_one
        if placed.late is not None:
            obstacles = (
                (one_by_one, one_by_one),
                (how.may_have_spare, "with spare tasks no replica is sure to have these"),
                (check, "check='nan' looks at it before anything is written"),
            )
            reason = next((text for is_so, text in obstacles if is_so), "")
            if reason:
                undivided = f"{_LATE}: {reason}"
                placed = self.place(step, parallel=False, check=check, compile=compile)
        why = "its parts lie on several tasks" if is_cut else undivided or one_by_one
        if why and how != Mode() and not how.is_pipeline:
            warnings.warn(f"mode={how} takes one step after the other: {why}", stacklevel=user_level(None))
        elif undivided and see is None and not is_cut:
            text = f"every step runs whole on one task, not in parallel: {undivided}"
            warnings.warn(text, stacklevel=user_level(None))
        return placed, why

    def _looked_at(
        self, step: StepGraph, placed: PlacedStep, tasks: int, source: Ahead | Iterable[StepFeeds | None],
        who: divided_rows.Dividers,
    ) -> tuple[Ahead | Iterable[StepFeeds | None], tuple[str, ...], bool]:  # fmt: skip
        """The batches of a training, warnings of what is no mean over rows, each once, and whether the loss is one."""
        known: dict[Any, bool] = step.whole.attached.setdefault("divided", {})
        writes = frozenset(node.id for node in step.graph.nodes if node.op == "tfnb.assign")
        key = writes, step.fetches, tasks, who  # where tasks average, after a sum was told, that is told, too
        if key in known or placed.tasks:
            return source, (), known.get(key, True)
        first: Iterable[StepFeeds | None]
        if isinstance(source, Ahead):
            first = self._heads(step, source)
        else:
            source = iter(source)
            first = list(itertools.islice(source, 1))
            source = itertools.chain(first, source)
        whole = (batch for batch in first if batch is not None)
        seen = divided_rows.look(step, placed.placement.homes, tasks, whole, who)
        if seen.is_settled:
            known[key] = seen.is_mean
        is_summed = who is divided_rows.SUMMING and not seen.is_mean
        notes = seen.notes[-1:] if is_summed else seen.notes  # batch norm is exact then, too
        return source, notes, seen.is_mean

    def _looked_further(
        self, step: StepGraph, placed: PlacedStep, tasks: int, source: Iterable[StepFeeds | None]
    ) -> Iterator[StepFeeds | None]:
        """The batches of a training; warns of one where the mean is none, as its feeds have different lengths.

        A feed that has fewer rows than the longest one is not divided: a first batch of equal lengths tells nothing.
        """
        known: set[Any] = step.whole.attached.setdefault("uneven", set())
        varies, homes = varying(step), placed.placement.homes
        for batch in source:
            key = () if batch is None or batch.split == tuple(varies) else (batch.split, step.fetches, tasks)
            if batch is not None and key and key not in known:
                known.add(key)
                for note in divided_rows.look(step, homes, tasks, [batch], divided_rows.LATER).notes:
                    warnings.warn(note, stacklevel=user_level(None))
            yield batch

    def _numbers(self) -> list[int]:
        """The numbers of the tasks that are there."""
        return [member.number for member in self._engine.places.values() if member.is_there]

    def _heads(self, step: StepGraph, data: Ahead) -> Iterator[StepFeeds | None]:
        """The first rows of some batches of a pass; for arrays in chunks one batch, of the arrays' first rows."""
        rows = min(divided_rows.ROWS, data.order.batch_size, data.order.rows)
        if any(not isinstance(array, torch.Tensor) for array in data.arrays):
            heads = [head(self._client, array, rows) for array in data.arrays]
            yield from batches(step, [(heads, 0)])
            return
        taken = Rows([array for array in data.arrays if isinstance(array, torch.Tensor)], data.order)
        steps = min(data.total, data.order.per_pass)
        for at in sorted({number * steps // divided_rows.BATCHES for number in range(divided_rows.BATCHES)}):
            _, start, stop = data.order.place(at)
            yield from batches(step, [(taken.part(at, 0, min(rows, stop - start)), 0)])

    def _possible(self, mode: Mode) -> Mode:
        """Check that the cluster has the tasks required by a mode."""
        tasks = sum(member.is_there for member in self._engine.places.values())
        if mode.name not in (*MODES, *CLASSES):
            raise Unimplemented(f"mode={mode.name!r}: this version trains with {' and '.join(map(repr, MODES))}")
        if mode.has_ranks and self._client.security.require_encryption and not mode.is_plain:
            raise InsecureAddress(
                f"mode={mode.name!r} sums over plain sockets, and this cluster encrypts what it sends: use "
                "mode='sync', or allow_plain_collectives=True where the network between its workers is trusted"
            )
        if mode.has_ranks and self._lossy.gradients:
            raise Unimplemented(
                f"mode={mode.name!r} sends no gradients to servers, and the cluster was connected with "
                f"lossy={{'gradients': {self._lossy.gradients!r}}}: use mode='sync', or connect without it"
            )
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
        self, step: StepGraph, placed: PlacedStep, source: Ahead | Iterable[StepFeeds | None], end: float | None,
        see: See | None, applied: AppliedSteps, seen: SeenSteps, *, is_whole: bool, over: ExactSteps | None = None,
    ) -> Generator[StepGroup, None, None]:  # fmt: skip
        """Drive every step from the notebook, if tasks' loops cannot. is_whole: no task divides rows.

        over: the steps in which tasks divide rows and sum in mid-step.
        """
        copied, later = applied.copy(), deque[tuple[int, int]]()  # steps of the cluster, and numbers of the training

        seen.now = partial(_now, copied, later, lambda: self._variables.pulled_step)
        self._variables.send_for_step(step.variables)
        if isinstance(source, Ahead):
            source = self._drawn(step, source, applied)
        for batch in source:
            if batch is None:
                self._show()
                yield STANDS
                self._variables.send_for_step(step.variables)
                continue
            left = self._left(end)
            self._variables.send_for_step(step.variables, thorough=False)
            taken = step, placed, replace(batch, rows=None) if is_whole else batch
            counted = partial(_append, later, batch.number)
            values = None
            while values is None:
                if over is not None:
                    taken = over.of(batch)
                try:
                    values, rows_of = self._step(*taken, left, "a training step", (), see, counted)
                except WorkerLost:  # nothing of it was written: others take the rows of a task that is gone
                    if over is None or not {*taken[1].tasks} - {*self._numbers()} or not self._numbers():
                        raise
            placed = taken[1]
            parts = [_picked(placed.fetched, part) for part in values]
            joined = [join(each, parts, at, rows_of) for at, each in enumerate(placed.joins)]
            yield of_one(joined, batch.number)

    def _in_windows(
        self, step: StepGraph, placed: PlacedStep, source: Ahead | Iterable[StepFeeds | None], end: float | None,
        applied: AppliedSteps, seen: SeenSteps,
    ) -> Generator[StepGroup, None, None]:  # fmt: skip
        """Lend windows of steps to the stages of a pipeline that hold their Variables."""
        copied, later = applied.copy(), deque[tuple[int, int]]()  # steps of the cluster, and numbers of the training
        seen.now = partial(_now, copied, later, lambda: self._variables.pulled_step)
        if isinstance(source, Ahead):
            source = self._drawn(step, source, applied)
        drawn, sizes = PeekedBatches(iter(source)), WindowSizes()
        self._variables.send_for_step(step.variables)
        while (batches := drawn.window(sizes.next, lambda: self._is_written(step))) is not None:
            if not batches:
                self._show()
                yield STANDS
                self._variables.send_for_step(step.variables)
                continue
            left, begin, run = self._left(end), time.monotonic(), self._engine.windows.run
            self._variables.send_for_step(step.variables, thorough=False)
            self._variables.outdated(step)
            patience = None if left is None else left + SETTLE
            found = self._waiting.do("training", patience, run, placed, batches, left, partial(_append, later))
            sizes.took(len(batches), time.monotonic() - begin)
            if found.values:
                columns = zip(*(_picked(placed.fetched, values) for values in found.values), strict=True)
                stacked = [
                    None if any(value is None for value in column) else torch.stack(column) for column in columns
                ]
                numbers = [batch.number for batch in batches[: len(found.values)]]
                yield StepGroup(len(found.values), stacked, numbers)
            if isinstance(found.error, NonFinite):
                raise self._located(found.error, step, replace(batches[found.steps], rows=None), left)
            if found.error is not None:
                raise found.error

    def _is_written(self, step: StepGraph) -> bool:
        return bool(self._variables.held.written(step.variables, thorough=False))

    def _left(self, end: float | None) -> float | None:
        """Seconds until ``end``; raises DeadlineExceeded when ``end`` is past."""
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise DeadlineExceeded(
                f"training did not end in time; variables are at step {self._engine.step}", step=self._engine.step
            )
        return left

    def _alone_first(
        self, step: StepGraph, placed: PlacedStep, source: Ahead | Iterable[StepFeeds | None], mode: Mode,
        end: float | None, timeout: float | None, applied: AppliedSteps, seen: SeenSteps, over: ExactSteps,
    ) -> Generator[StepGroup, None, None]:  # fmt: skip
        """The only task has all rows, and loops by itself until another task is there; then they sum in mid-step."""
        only = replace(placed, placement=replace(placed.placement, tasks=tuple(self._numbers())))
        has_joined = lambda: not {*self._numbers()} <= {*only.tasks}  # noqa: E731
        given = mode, lambda: None, end, timeout, applied, seen, has_joined
        rest = yield from self._looping(step, only, source, *given)
        if rest is not None:
            self._show()
            yield from self._stepwise(step, placed, rest[0], end, None, rest[1], seen, is_whole=False, over=over)

    def _looping(
        self, step: StepGraph, placed: PlacedStep, source: Ahead | Iterable[StepFeeds | None], mode: Mode,
        changes: Callable[[], Mode | None], end: float | None, timeout: float | None, applied: AppliedSteps,
        seen: SeenSteps, is_over: Callable[[], bool] = lambda: False,
    ) -> Generator[StepGroup, None, tuple[Ahead | Iterable[StepFeeds | None], AppliedSteps] | None]:  # fmt: skip
        """The tasks loop by themselves; from here they are lent pieces of the data ahead of need.

        Once ``is_over`` is true nothing more is lent; returns the data that is left, and the steps that are applied.
        """
        engine, held, left = self._engine, self._variables.held, self._left(end)
        if mode.outer is not None:
            outer = self.place(mode.outer.step, parallel=False)
            pieces_of = tuple(outer.placement.homes[variable.key] for variable in mode.outer.variables)
            placed = replace(placed, outer=PlacedOuterStep(outer, pieces_of))
            self._variables.send_for_step(mode.outer.step.variables)
        self._variables.send_for_step(step.variables)
        self._variables.outdated(step)
        data, pieces = drawn_from(source, not mode.is_joint, engine.homes, applied)
        training: Training = self._waiting.do(
            "starting to train", None, engine.train, placed, mode, data, left, applied
        )
        seen.now, is_left = lambda: training.kept, False

        def results(offers: list[Offer], drain: bool = False) -> Iterator[StepGroup]:
            patience, how = None if end is None else max(0.0, end - time.monotonic()) + SETTLE, changes()
            is_last = pieces.is_spent or is_left
            for group in self._waiting.do("training", patience, training.exchange, offers, is_last, drain, how):
                yield group._replace(values=_picked(placed.fetched, group.values))

        try:
            while training.end is None:
                self._variables.outdated(step)
                self._variables.send_for_step(step.variables, thorough=False)
                machine, offers, is_left = training.machine, [], is_left or is_over()
                for task in () if is_left else machine.takers:
                    size = machine.next_size(pieces.left)
                    piece = pieces.take(size, lambda: bool(held.written(step.variables, thorough=False)), task)
                    offers += [Offer(piece, task)] if piece else []
                    if pieces.held_back or pieces.stands or pieces.is_spent:
                        break
                if pieces.held_back or pieces.stands:  # held back: the user's iterator wrote a Variable
                    yield from results(offers, drain=True)
                    offers = []
                    if pieces.stands and training.end is None:
                        pieces.stands = False
                        if not mode.is_coordinated:
                            self._show()
                        yield STANDS
                        self._variables.send_for_step(step.variables)
                        continue
                    self._variables.send_for_step(step.variables, thorough=False)
                yield from results(offers)
            yield from results([])
        finally:
            if training.end is None and engine.lost is None:
                self._waiting.do("ending the training", SETTLE + GIVEN_UP, training.finish)
        told = self._engine.link.start(engine.training_error, training, timeout)
        error = self._engine.link.wait(told, SETTLE, "the end of the training")
        if error is not None:
            raise self._waiting.explained(error)
        if not is_left or pieces.is_spent:
            return None
        return pieces.rest if isinstance(pieces, DrawnBatches) else source, training.applied_steps()

    def _changed(
        self, step: StepGraph, placed: PlacedStep, source: Ahead | Iterable[StepFeeds | None],
        changes: Callable[[], Mode | None], exact: bool | None,
    ) -> Mode | None:  # fmt: skip
        """Another mode for a training in progress, checked; warns of a step that tasks do not average exactly there.

        Of drawn batches none is looked at, but the structure of the step is.
        """
        new = changes()
        if new is None:
            return None
        how = self._possible(new)
        if placed.late is not None and how.may_have_spare:
            raise Unimplemented(
                f"mode={how}: {_LATE}, and with spare tasks no replica is sure to have these. Use a mode "
                "without spare tasks, or do not watch it"
            )
        tasks = len(self._numbers())
        _check_writes(step, placed, how, tasks, "", is_stepwise=False)
        if exact is None and how.is_joint and placed.divides:
            heads = source if isinstance(source, Ahead) else ()
            who = divided_rows.LOCAL if how.every else divided_rows.TASKS
            for note in self._looked_at(step, placed, max(2, tasks), heads, who)[1]:
                warnings.warn(note, stacklevel=user_level(None))
        return how

    def place(
        self, step: StepGraph, *, parallel: bool, check: bool = False, compile: Compile = "off", is_cut: bool = True,
        staged: Graph | None = None, is_exact: bool = False,
    ) -> PlacedStep:  # fmt: skip
        """The plans of a step, with its variables on the servers. is_cut: whether requests for tasks are met.

        staged: the graph of a pipeline whose Variables lie at the tasks of their stages. is_exact: whether its tasks
        sum over all rows in mid-step: these sums cross as they are.
        """
        with self.placing:
            self._variables.drop_gone()
            key = id(step), parallel, check, compile, is_cut, staged is not None, is_exact
            strays = self._variables.strays(step)
            known = self._placed.get(key)
            if known is None or known[0]() is not step or strays:
                names = self._names
                found = asked(step.graph.nodes)
                tasks = tasks_of(found, names, len(self._engine.shards)) if is_cut else ()
                homes = self._homes(step, names, staged)  # once: what the servers hold may change at any instant
                divides, is_staged = parallel and len(tasks) < 2, staged is not None
                about = weighed(step) if divides else WeighedStep(step)
                cut = split(about.step, homes, parallel=divides, tasks=tasks, is_staged=is_staged, weighed=about)
                ensure_on_servers(found, cut.placement.places, cut.undivided)
                gradients = "" if is_staged or is_exact else self._lossy.gradients  # a stage keeps its own
                edges = "" if is_exact else self._lossy.edges
                placed = place(cut, check=check, compile=compile, format=gradients)
                placed = replace(placed, guards=RowGuards.of(step), joins=joins(about))
                if len(tasks) > 1:
                    parts, senders = part_plans(
                        cut, placed.servers, numbers_of(names), check, is_staged=is_staged, format=edges
                    )
                    placed = replace(placed, parts=parts, senders=senders)
                known = (weakref.ref(step), placed)
                self._variables.adopt(strays, homes)
                self._placed[key] = known
                while len(self._placed) > KEPT:
                    self._placed.popitem(last=False)
            return known[1]

    @property
    def _names(self) -> list[str]:
        """The names of the tasks; a successor has that of the task that it follows."""
        return list(dict.fromkeys(member.name for member in self._engine.tasks))

    def _homes(self, step: StepGraph, tasks: Sequence[str], staged: Graph | None) -> Homes:
        """The homes of a step's Variables; where some moved to their stages, nothing is known of their old places."""
        if staged is None:
            return self._variables.homes_of(step)
        before = dict(self._variables.held.homes)
        homes = self._variables.homes_of_stages(step, numbers_of(tasks), staged)
        if before != self._variables.held.homes:
            self._placed.clear()
        return homes

    def _show(self, step: StepGraph | None = None, mode: Mode | None = None) -> None:
        """Send local writes and pull: before a training, where tasks stand still, and at its end; local writes to
        outdated copies stay.

        Of a coordinated training only what its step uses comes home: vectors of its coordinator stay on the servers.
        """
        if self._engine.is_closing:  # another thread closes it, which brings the values home
            return
        self._waiting.ensure_open()
        self._variables.drop_gone()
        held, some = self._variables.held, None
        if step is not None and mode is not None and mode.is_coordinated:
            some = set(step.variables)
        others = [] if some is None else [variable for variable in held.variables if variable not in some]
        self._variables.pull([*self._variables.sent_but_behind(), *others])


def _in_one_mode(
    steps: Generator[StepGroup, None, None], mode: Mode, changes: Callable[[], Mode | None], why: str
) -> Generator[StepGroup, None, None]:  # fmt: skip
    """The groups of a training that the notebook takes step by step; warns of a mode that a callback asks for."""
    with closing(steps):
        for group in steps:
            yield group
            if (new := changes()) not in (None, mode):
                text = f"the training does not change to mode={new}: it takes one step after the other, as {why}"
                warnings.warn(text, stacklevel=user_level(None))


def _check_writes(
    step: StepGraph, placed: PlacedStep, how: Mode, tasks: int, why: str, *, is_stepwise: bool
) -> None:  # fmt: skip
    """Raise Unimplemented for a step that a mode does not take; warn of Variables of which one task's value counts.

    why: the reason that the notebook takes one step after the other; empty where it does not.
    """
    names = _ensure_summed(step, placed, how, is_taken=not is_stepwise)
    if how.outer is not None and is_stepwise:
        why = why or "the step writes no Variable"
        raise Unimplemented(f"LocalSGD(outer=...) takes no such step: {why}. Leave out outer")
    if names and not is_stepwise and (tasks > 1 or how.n_push > 1) and not placed.tasks:
        warnings.warn(_apart(names, how, how.is_joint), stacklevel=user_level(None))


def _ensure_summed(step: StepGraph, placed: PlacedStep, mode: Mode, *, is_taken: bool) -> tuple[str, ...]:
    """Names of Variables that several tasks write along no gradient.

    Raises Unimplemented for a step that tasks with copies cannot take as servers do, if it ``is_taken`` by all tasks.
    """
    found = placed.placement.apart if mode.is_joint else placed.placement.raced
    if mode.n_push > 1:  # servers take them of one step of a push
        found = tuple(dict.fromkeys([*placed.placement.apart, *placed.placement.joined, *found]))
    elif mode.every:  # each task adds to its own copy
        found = tuple(dict.fromkeys([*found, *placed.placement.joined]))
    if not is_taken or not (mode.has_ranks or mode.takes_local_steps):
        return found
    names = [name for plan in placed.compute.meta["pushes"] for name in plan["grads"]]
    kinds = [kind for plan in placed.servers.values() for kind in plan.meta["kinds"]]
    sparse = dict.fromkeys(n or "?" for n, kind in zip(names, kinds, strict=True) if kind in ("rows", "entries"))
    odd = [variable for variable in step.writes if mode.every and not is_summed(variable.spec.dtype)]
    why = ""
    if odd:
        shown = ", ".join(f"{variable.name} ({variable.spec.dtype})" for variable in odd)
        why = f"tasks average all that it writes, by gloo, which does not sum {shown}"
    elif sparse and mode.has_ranks:
        why = f"the gradients of rows of {', '.join(sparse)} are sparse"
    elif placed.compute.meta["lookups"] and (mode.has_ranks or mode.n_fetch > 1):
        why = "rows of a large Variable are looked up on its servers"
    elif placed.compute.meta["lookups"] and mode.is_warmth_measured:
        why = "warm_start='auto' computes gradients again, and rows of a large Variable are looked up: give a number"
    elif placed.queues:
        why = "the step uses queues"
    elif mode.takes_local_steps and placed.late is not None:
        why = f"{_LATE}, and each task has other weights between two meetings"
    if why:
        other = "sync" if mode.is_joint else "async"
        raise Unimplemented(f"mode={mode.name!r} takes no such step: {why}. Use mode={other!r}")
    return found


def _now(copied: AppliedSteps, later: deque[tuple[int, int]], pulled: Callable[[], int]) -> AppliedSteps:
    """The steps that the last pull shows."""
    while later and later[0][0] <= pulled():
        copied.add([later.popleft()[1]])
    return copied.copy()


def _append(later: deque[tuple[int, int]], number: int, step: int) -> None:
    later.append((step, number))


def _picked(places: Sequence[int | None], values: Sequence[Any]) -> list[Any]:
    return [None if place is None or not values else values[place] for place in places]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _written(names: Sequence[str]) -> str:
    return f"the step writes {_shown(names)} itself, not along a gradient that tasks average, and they divide its rows"


def _apart(names: Sequence[str], how: Mode, is_joint: bool) -> str:
    """The warning for Variables that several tasks write without a gradient."""
    shown, cure = _shown(names), "tfnb.run(step, feeds) in a loop gives each step to one task"
    if is_joint:
        found = _written(names)
        kept = "averages what the tasks make" if how.every else "takes what the first task makes of its rows"
        cure = "mode='sync' without backup tasks, and without exact=False, sums over all rows"
    elif how.n_push > 1:
        found = f"the step writes {shown} itself, not along a gradient that tasks add up"
        kept = "takes what the last step of a push makes"
    else:
        found = f"each task makes the new value of {shown} of the one that it read"
        kept = "loses what other tasks write in between; what assign_add adds to a Variable on one server is not lost"
    return f"{found}: with mode={how} the step {kept}. {cure}"
