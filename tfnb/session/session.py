"""Session: runs fetches of a graph. Prune, lower, check the feeds, compute, commit.

A lowered program is cached by what was fetched and fed, so a repeated run costs a dictionary look-up. State belongs to
the Variables, not to the session. The default session of a graph is behind `run`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from tfnb.cluster.connected import connected, notices
from tfnb.cluster.engine.members import Ahead
from tfnb.errors import InvalidArgument, ResourceExhausted, Unimplemented, ensure_type
from tfnb.execution import TRACERS, CheckedTracer, Trace, profiling
from tfnb.execution.budgeted import SizedPlan
from tfnb.execution.casts import is_cast, uncast
from tfnb.execution.dataflow.executor import EXECUTORS
from tfnb.execution.pack_step import PackCode, PackPlan
from tfnb.execution.step_code import StepCode
from tfnb.execution.tiers import tiered as tiers
from tfnb.execution.tiers.gain import ExpectedSteps
from tfnb.gradients import IndexedSlices
from tfnb.graph import Graph, Variable
from tfnb.graph.collector import uncollected
from tfnb.graph.current import unrecorded
from tfnb.graph.resources import reset
from tfnb.graph.variable_locks import LOCKS, VariableSnapshot
from tfnb.memory import byte_count, least_budgets, step_passes
from tfnb.passes import LAYOUTS, Passes, StepGraph, chosen_layout, table
from tfnb.passes.prune import without_writes
from tfnb.placement.requests import tasks_of
from tfnb.recording import graph as graph_named
from tfnb.recording.marks.notes import user_level
from tfnb.session.divided_feeds import AUTO, WHOLE, Division, division
from tfnb.session.feeding import Fed
from tfnb.session.prepared import PreparedRun, prepare, prepare_divided, same_step
from tfnb.session.saved_state import SavedState
from tfnb.session.step import PartialRun
from tfnb.session.step_parts import learn
from tfnb.session.step_runner import StepRunner
from tfnb.session.structures import (
    FeedKey,
    Fetches,
    fed_by,
    graph_of,
    key_of,
    parts_of,
    spread,
    structure,
    value_of,
    variable_of,
)
from tfnb.state import checkpoint
from tfnb.state.batch_order import Arrays, Rows
from tfnb.state.chunks import ChunkedArray, like
from tfnb.state.input_sources import Source
from tfnb.state.queues import TensorQueue
from tfnb.state.run_numbers import RunNumbers, runs_of
from tfnb.state.step_groups import StepGroup
from tfnb.state.waits import check_timeout

if TYPE_CHECKING:
    from tfnb.cluster.driver import Cluster

_NOT_TOGETHER: Mapping[tuple[str, str], str] = {
    ("step", "cluster"): "a step in parts runs here only: close the cluster, or run the fetches together",
    ("step", "memory_budget"): "a step in parts keeps what later fetches may take: use a session without memory_budget",
    ("step", "looks"): "a step in parts fetches values one by one: look at those, take tfnb.print out of the cell, and "
    "remove breakpoints, tfnb.break_at(off=True)",
    ("step", "queues"): "a step in parts is generated code, without queues; run the fetches together",
    ("kernels", "cluster"): "on a cluster trace=True tells the times of nodes, and not of kernels: close the cluster, "
    "or use trace=True",
    (
        "health",
        "cluster",
    ): "on a cluster trace=True tells the times of nodes, and not their numbers: close the cluster, "
    "or use check='nan', which finds the first bad number there",
    ("trace", "queues"): "a traced run is generated code, without queues: run without trace=True",
    ("check", "queues"): "a checked run is generated code, without queues: run without check='nan'",
    ("isolation", "cluster"): "isolation='snapshot' is of steps that run here: close the cluster",
    ("memory_budget", "cluster"): "memory_budget holds for steps that run here: close the cluster",
    ("memory_budget", "queues"): "memory_budget needs generated code, without queues and executor='dataflow'",
    (
        "accumulation",
        "cluster",
    ): "microbatches are of trainings in this process, and of fit(mode='pipeline'): close the cluster, or leave them "
    "out, as its tasks divide the rows of a step",
    ("schedule", "memory_budget"): "a pipeline has no memory_budget: leave out one of the two",
    ("microbatches", "watch"): "a watched step is looked at as a whole: take tfnb.watch off, or leave out microbatches",
    ("training", "queues"): (
        "fit divides the rows of a step over tasks and gives the part of a lost one to another, and an element of a "
        "queue can be taken once: let fit take the elements, fit(step, queue, feeds=x), or call run for each step"
    ),
}
"""What does not go with what: of an option and a situation, what the error says."""


class Session:
    """Runs a graph's fetches here, or on the connected cluster.

    compile: ``"auto"`` compiles a step in the background once it has taken long, where that is predicted to save a
    tenth of a step, and within the steps to come (those of `fit`, else as many as were taken) more than compiling
    costs; it keeps what then is faster, and `status` tells why nothing is compiled. ``"quiet"``, and ``"auto"`` on a
    battery: only what pays within a minute. ``"off"`` never compiles, ``"now"`` at the first run of each signature. The
    environment's TFNB_COMPILE stands for "auto".
    executor: ``"auto"`` runs a step as generated code with native loops, and one that uses queues by dataflow;
    ``"dataflow"`` overlaps the iterations of all loops where their data allow (see ``parallel_iterations`` of
    `while_loop`); ``"parts"`` cuts a step by the tasks that its nodes ask for (`tfnb.device`), as a cluster would, and
    runs all parts in this process: the values are those of a cluster, bit for bit.
    layout: ``"torch"`` gives each kernel the memory layout that torch's own loop would, and so the same sums;
    ``"channels_last"`` lets convolutions of images on the CPU run with channels last where that is faster, with other
    last digits (a deep net with batch norm in training mode makes them 2e-3 of its outputs). None: the environment's
    TFNB_LAYOUT, else "torch". On a cluster and by dataflow it is torch's.
    memory_budget: the most bytes, as a number or as text such as ``"2GB"``, that a step may hold at once on its device:
    its Variables (weights, slots of the optimizer, buffers), gradients and all other values, as predicted from shapes,
    and the scratch of convolutions, each of which is run once on zeros to measure it. Feeds and constants do not count.
    A step that fits runs as it does without a budget; of one that does not, values are computed again, with the same
    bits, in generated code. A run that cannot keep the budget raises ResourceExhausted with its largest node and the
    smallest budget that it could; `status` tells what is planned. Steps over microbatches (`make_callable`, `fit`) run
    in packs, each of one or more numbered layers of a module in a row, chosen by predicted time: Variables and sums of
    gradients lie outside of the device, and copies of those that a pack needs come to it and go, so that both may be
    many times the budget; values are those without it, bit for bit but where products whose results are added (two ways
    through a residual, several losses) lie in different packs, which rounds the sum otherwise. The device is virtual,
    on the CPU: its bytes are counted and enforced. Outside of it is a file for a model made in `tfnb.mapped_memory`,
    and the process holds no more than the budget; for others it is RAM, and none is saved. What loops keep for their
    gradients takes what is left of it; the rest of that is computed again, or moves out and comes back, whichever costs
    less as predicted (see ``swap_memory`` of `while_loop`).

    Raises InvalidArgument for an unknown ``compile``, ``executor`` or ``layout``, and for a budget that is no number of
    bytes.

    >>> import tfnb
    >>> with tfnb.record() as g:
    ...     x = tfnb.placeholder(torch.zeros(2, 3), name="x")
    ...     y = (x + 1).sum(1)
    >>> with Session(g) as session:
    ...     session.run(y, {x: torch.ones(4, 3)})
    tensor([6., 6., 6., 6.])
    """

    def __init__(
        self, graph: Graph | str | None = None, *, cluster: Cluster | None = None, compile: str = "auto",
        executor: str = "auto", layout: str | None = None, memory_budget: int | str | None = None,
    ) -> None:  # fmt: skip
        self._mode, self._once = tiers.mode(compile), LAYOUTS[chosen_layout(layout)]
        if executor not in EXECUTORS:
            raise InvalidArgument(f"executor is one of {', '.join(map(repr, EXECUTORS))}, not {executor!r}")
        self._executor = executor
        self.memory_budget = None if memory_budget is None else byte_count(memory_budget)
        self.graph = graph if isinstance(graph, Graph) else graph_named(graph)
        self._cluster = cluster
        self._prepared: dict[Any, PreparedRun] = {}
        self._steps = StepRunner(self.graph.name)
        self.state = SavedState(self.graph, self._steps, cluster)
        self.trace: Trace | None = None  # what the last traced run did
        self._ran: StepCode | None = None  # of the last step here
        self._twin: Session | None = None  # for runs that a watch looks at: generated code
        self._is_twin = False

    @property
    def cluster(self) -> Any:
        """The cluster that runs go to: the session's own, else the connected one, else None."""
        return connected(self._cluster)

    @property
    def runs(self) -> RunNumbers:
        """The run counter, from which random nodes draw."""
        return self._steps.runs

    # -- running ------------------------------------------------------------------------------------------------

    @unrecorded
    def run(
        self,
        fetches: Fetches,
        feed_dict: Mapping[Any, Any] | None = None,
        *,
        timeout: float | None = None,
        trace: bool | Literal["kernels", "health"] = False,
        check: Literal["nan"] | None = None,
        isolation: Literal["snapshot"] | None = None,
    ) -> Any:
        """The values of ``fetches``, with their structure; only their ancestors are executed.

        fetches: tensors, Variables, Operations, names, or any nesting of list, tuple, dict, namedtuple of them.
        feed_dict: values for placeholders or any other tensor of the graph. timeout in seconds; a compiled step that
        takes less than a tenth of it is not stopped, and one that takes longer runs as generated code. trace: compute
        node by node with a clock, or with ``"kernels"`` inside ``torch.profiler``; ``self.trace`` then tells what took
        how long. With ``"health"`` it has counts of NaN, infinite, negative and other numbers of each node, too. check:
        with ``"nan"`` a step that would give or write NaN or infinite numbers raises NonFinite and writes nothing; it
        runs once more with probes, and the error names the op and line that made the first of them, and its finite
        inputs. isolation: a step holds the locks of its Variables until it is over, so steps of other threads that
        write them wait; with
        ``"snapshot"`` it waits for those that write now, copies, and lets others go on. Raises FeedError, ShapeError,
        InvalidArgument for a missing feed, StaleNode, and Aborted where a step that uses queues, or a snapshot, would
        write after another step wrote what it read, or after one of its queues was restored: run it again. Variables
        are then as they were, and elements that the step took stand in front of their queues again, unless it put
        some, too; those of a queue that was restored are gone, for it holds what it held.
        """
        __tracebackhide__ = True
        if timeout is not None:
            check_timeout(timeout)
        if feed_dict is not None and type(feed_dict) is not dict:
            ensure_type(feed_dict, Mapping, "feed_dict")
        feeds = feed_dict or {}
        watch = None if self._is_twin else self.graph.attached.get("watch")
        if watch is None or trace or not (step := watch.next_step()):
            return self._run(fetches, feeds, timeout, trace, check, isolation)
        options: dict[str, Any] = {"timeout": timeout, "check": check, "isolation": isolation}
        plain = partial(self._run, fetches, feeds, trace=False, **options)
        return watch.step(step, self, plain, fetches, feeds, **options)

    def _run(
        self, fetches: Fetches, feeds: Mapping[Any, Any], timeout: float | None, trace: bool | str, check: str | None,
        isolation: str | None, *, is_written: bool = True,
    ) -> Any:  # fmt: skip
        __tracebackhide__ = True
        if is_cast():
            with uncast():
                return self._run(fetches, feeds, timeout, trace, check, isolation, is_written=is_written)
        if IndexedSlices in map(type, feeds):
            feeds = spread(feeds.items())
        prepared = self._prepare(fetches, tuple(feeds), is_written=is_written)
        prepared.ensure_fresh()
        if not trace and isolation is None and check is None:
            if (cache := self.graph.attached.get("values")) is not None and not self._is_twin and self.cluster is None:
                plan = cache.plan(prepared, prepared.feeder.fed(feeds.values()))
                if plan is not None:
                    again = {**feeds, **plan.feeds}
                    return plan.taken(*self._generated().run((fetches, plan.kept), again, timeout=timeout))
            results = self._directly(prepared, feeds.values(), timeout)
            if results is not None:
                return prepared.rebuild(results)
        fed = prepared.feeder.fed(feeds.values())
        cut = None if isolation is None else self._cut(prepared, isolation, timeout)
        if check is not None:
            if trace:
                raise InvalidArgument("a checked run is traced where it fails: leave out trace or check")
            results = self._checked(prepared, fed, timeout, check, cut)
        elif trace:
            results = self._traced(prepared, fed, timeout, trace, cut)
        else:
            results = self._execute(prepared, fed, timeout, cut)
        return prepared.rebuild(results)

    @unrecorded
    def without_writes(self, fetches: Fetches, feed_dict: Mapping[Any, Any]) -> Any:
        """`run`, but for what it writes: a value behind a write is computed of what the Variable holds."""
        __tracebackhide__ = True
        is_written = not self._prepare(fetches, tuple(feed_dict)).code.step.writes
        if is_written:  # there is nothing to leave out
            return self.run(fetches, feed_dict)
        return self._run(fetches, feed_dict, None, False, None, None, is_written=False)

    def make_callable(
        self, fetches: Fetches, feeds: Sequence[FeedKey] = (), *, check: str | None = None,
        microbatches: int | Literal["auto"] | Division = 1,
    ) -> Callable[..., Any]:  # fmt: skip
        """``f(*values)``: `run` with the signature resolved once; values stand in the order of ``feeds``.

        The result has the structure of ``fetches``. check: as of `run`. microbatches: so many consecutive ranges of the
        rows of a batch are done one after the other, and update once (see `tfnb.fit`); fetches are then operations, and
        means, sums, counts and extremes over rows; in packs operations, means and sums. ``"auto"``: the whole step if
        it keeps the memory budget, else as many as keep it in packs and are predicted quickest. A call with another
        number of values raises InvalidArgument.
        """
        feeds = tuple(feeds)
        if IndexedSlices in map(type, feeds):
            flat = self.make_callable(fetches, parts_of(feeds), check=check, microbatches=microbatches)
            return lambda *values: flat(*spread(zip(feeds, values, strict=True)).values())
        wanted = division(microbatches)
        self.ensure_limited(wanted)
        asked = WHOLE if wanted.microbatches == AUTO else wanted
        prepared, budget = self._prepare(fetches, feeds, asked), self.memory_budget

        @unrecorded
        def watched(*values: object) -> Any:
            watch = None if self._is_twin else self.graph.attached.get("watch")
            if watch is None or len(values) != len(feeds) or not (step := watch.next_step()):
                return call(*values)
            fed = dict(zip(feeds, values, strict=True))
            return watch.step(step, self, partial(call, *values), fetches, fed, check=check)

        def call(*values: object) -> Any:
            nonlocal prepared
            if is_cast():
                with uncast():
                    return call(*values)
            if not prepared.is_of(self.graph):
                prepared = self._prepare(fetches, feeds, asked)
            if len(values) != len(feeds):
                raise InvalidArgument(f"this callable takes {len(feeds)} values, got {len(values)}")
            prepared.ensure_fresh()
            if wanted != asked:
                with self._limited(budget):
                    chosen, fed = self._chosen(prepared, prepared.feeder.fed(values), fetches, feeds)
                    run: Callable[..., list[Any]] = (
                        self._execute if check is None else partial(self._checked, check=check)
                    )
                    return chosen.rebuild(run(chosen, fed, None))
            if check is not None:
                return prepared.rebuild(self._checked(prepared, prepared.feeder.fed(values), None, check))
            results = self._directly(prepared, values)
            if results is None:
                results = self._execute(prepared, prepared.feeder.fed(values), None)
            return prepared.rebuild(results)

        return watched

    def ensure_limited(self, division: Division) -> None:
        """Raise InvalidArgument for microbatches that a memory budget would choose, without one."""
        if division.microbatches == AUTO and self.memory_budget is None:
            raise InvalidArgument(
                "microbatches='auto' are chosen by a memory budget, and there is none: say memory_budget='2GB', for "
                "example, or how many microbatches a step has"
            )

    def _chosen(
        self, whole: PreparedRun, batch: Fed, fetches: Fetches, feeds: tuple[FeedKey, ...]
    ) -> tuple[PreparedRun, Fed]:  # fmt: skip
        """The whole step if a batch keeps the memory budget, else the step in packs, with its feeds.

        Raises ResourceExhausted with the least of both budgets.
        """
        if whole.code.fits(batch[1]):
            return whole, batch
        packs = self._prepare(fetches, feeds, Division(AUTO))
        try:
            return packs, packs.feeder.with_more(batch)  # type: ignore[attr-defined]
        except ResourceExhausted as error:
            budget = whole.code.budget
            other = None if budget is None else budget.refusal(batch[1])
            if other is not None and (other.details or inf) < (error.details or 0):
                raise other from None
            raise

    def microbatches_of(self, fetches: Fetches, feeds: Mapping[Any, Any], division: Division) -> int:
        """The number of microbatches of a step on these feeds."""
        if division.microbatches != AUTO:
            return division.microbatches
        self.ensure_limited(division)
        keys, whole = tuple(feeds), self._prepare(fetches, tuple(feeds))
        chosen, (tensors, _) = self._chosen(whole, whole.feeder.fed(feeds.values()), fetches, keys)
        return 1 if chosen is whole else len(tensors[-1])

    def step_of(self, fetches: Fetches, feeds: Mapping[Any, Any]) -> tuple[StepGraph, list[torch.Tensor]]:
        """The step that a run of ``fetches`` is, and its feeds as tensors."""
        prepared = self._prepare(fetches, tuple(feeds))
        return prepared.code.step, prepared.feeder.fed(feeds.values())[0]

    def looked_at(
        self, fetches: Fetches, feeds: Mapping[Any, Any], more: Mapping[str, Any], **options: Any
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """`run` in generated code, together with the items of ``more`` that the step computes anyway."""
        __tracebackhide__ = True
        step = self._prepare(fetches, parts_of(tuple(feeds))).code.step
        made = step.graph.contents.by_id.keys() - {value.node for value in step.feeds}
        there = {name: item for name, item in more.items() if isinstance(item, Variable) or item.node in made}
        results, values = self._generated().run((fetches, there), feeds, **options)
        return results, values

    def _generated(self) -> Session:
        """A twin session in generated code, for internal runs with further fetches and feeds."""
        if self._twin is None:
            self._twin = Session(self.graph, cluster=self._cluster, compile="off", executor=self._executor)
            self._twin._once, self._twin._is_twin, self._twin._steps.runs = self._once, True, self.runs
        self._twin.memory_budget = self.memory_budget
        return self._twin

    def passes(
        self, fetches: Fetches, feeds: Iterable[FeedKey] = (), *, sizes: Mapping[str, int] | None = None
    ) -> Passes:
        """Results of the passes on a run of ``fetches``: nodes, bytes and predicted peak after each pass.

        feeds: what would be fed, placeholders or other tensors. sizes: of axes that vary, by name, for the bytes; 32
        is taken for others. Runs nothing. A notebook draws what is new, gone and changed.

        >>> import tfnb
        >>> with tfnb.record() as g:
        ...     x = tfnb.placeholder(torch.zeros(2, 3), name="x")
        ...     y = (x.t().t() * 1 + torch.ones(3)).exp()
        >>> Session(g).passes(y, [x], sizes={"B": 64})
        after     nodes  bytes made  predicted peak
        prune         7       2,316           1,548
        fold          7       2,304           1,536
        simplify      7       2,304           1,536
        prune         4       1,536           1,536
        """
        leaves: list[Any] = []
        structure(fetches, leaves)
        values = [value_of(self.graph, leaf) for leaf in leaves if variable_of(self.graph, leaf) is None]
        fed = [value for key in feeds for value in fed_by(self.graph, key)]
        return Passes(tuple(table(self.graph, values, fed, sizes, step_passes(self._once))))

    def step(self, fetches: Sequence[Any], feeds: Sequence[FeedKey] = ()) -> PartialRun:
        """One step computed in parts, as a context manager: feed something, fetch something, feed more.

        fetches: what will be fetched, each once; feeds: what will be fed, each once. What a later fetch shares with an
        earlier one is computed once. Variables are written when everything was fetched, and not at all if the block is
        left before. Raises InvalidArgument for a Variable among ``fetches`` (record ``variable.read()``, and fetch
        that); Unimplemented with a cluster, queues, a memory budget, a print or a breakpoint.

        >>> import tfnb
        >>> with tfnb.record() as g:
        ...     a, b = tfnb.placeholder(torch.zeros(2)), tfnb.placeholder(torch.zeros(2))
        ...     total, scaled = a + 1, (a + 1) * b
        >>> with Session(g).step([total, scaled], [a, b]) as step:
        ...     first = step.fetch(total, {a: torch.ones(2)})
        ...     step.fetch(scaled, {b: first})
        tensor([4., 4.])
        """
        feeds = tuple(feeds)
        prepared = self._prepare(tuple(fetches), feeds)
        prepared.ensure_fresh()
        self._ensure_together("step", prepared.code, prepared)
        tasks_of(prepared.asked)
        if prepared.trailing:
            names = ", ".join(variable.name for variable in prepared.trailing)
            raise InvalidArgument(f"a step in parts fetches recorded tensors; record {names}.read()")
        values = {value: place for place, value in enumerate(prepared.values)}
        keys = {fed_by(self.graph, key)[0]: place for place, key in enumerate(feeds)}
        return PartialRun(
            prepared.code.program, prepared.feeder, self.runs.take(),
            fetch=lambda item: values.get(value_of(self.graph, item)),
            feed=lambda key: keys.get(fed_by(self.graph, key)[0]),
        )  # fmt: skip

    def train(
        self, fetches: Fetches, feeds: Sequence[FeedKey], data: Iterable[Sequence[Any] | None] | tuple[Arrays, int], *,
        mode: object, timeout: float | None, check: str | None = None, by_pass: bool = False, begin: int = 0,
        division: Division = WHOLE, **options: object,
    ) -> Generator[StepGroup, None, None]:  # fmt: skip
        """`fit` on the cluster: ``fetches`` once for each step of ``data``, in groups of steps as they are applied.

        The values of a group have the structure of ``fetches``, and are stacked over its steps.

        data: values of ``feeds`` for each step, or arrays of which each step takes some rows, and the number of steps.
        begin: steps over these arrays that were taken before. by_pass: tasks stand still after each pass over the
        arrays; after other values, where there is a None among them. An empty group then says that they do, until the
        next group is asked for. division: of each step into microbatches. mode, check, options: as `run` and
        `Cluster.train` have them. Raises InvalidArgument for an unknown ``check``.
        """
        cluster = self.cluster
        if isinstance(data, tuple):
            prepared = self._prepare(fetches, tuple(feeds), division)
            prepared.ensure_fresh()
            step = self._sent(prepared, "training")
            arrays, total = data
            source = cluster.ahead(step, self._ahead(prepared, arrays, total, by_pass, begin), begin)
        else:
            if IndexedSlices in map(type, feeds):
                flat = lambda values: tuple(spread(zip(feeds, values, strict=True)).values())  # noqa: E731
                data = (None if values is None else flat(values) for values in data)
            prepared = self._prepare(fetches, parts_of(feeds), division)
            prepared.ensure_fresh()
            step = self._sent(prepared, "training")
            fed = (None if values is None else (prepared.feeder.fed(values)[0], self.runs.take()) for values in data)
            source = cluster.batches(step, fed)
        options["one_by_one"] = "a Variable is watched" if prepared.trailing else ""
        options |= {"see": prepared.see, "compile": self._mode, "graph": self.graph}
        if check is not None:
            _ensure_nan(check)
            options["check"] = True
        with closing(cluster.train(step, source, mode=mode, timeout=timeout, begin=begin, **options)) as steps:
            for group in steps:
                self._steps.ensure_open()
                yield prepared.of_group(group)
                prepared.ensure_fresh()

    def _ahead(self, prepared: PreparedRun, data: Arrays, total: int, by_pass: bool, begin: int) -> Ahead:
        """Arrays for the cluster; the steps of a full and of a short batch are checked here, before anything runs."""
        __tracebackhide__ = True
        arrays, order = data
        shown = Rows([like(array) for array in arrays], order)
        for at in {0, min(total, order.per_pass) - 1}:
            prepared.feeder.fed(shown.batch(at))
        run = runs_of(self.runs, total, order.per_pass if by_pass else total, begin)
        given = prepared.feeder.converted([a.stand_in()[:0] if isinstance(a, ChunkedArray) else a for a in arrays])
        fed = [
            replace(array, dtype=tensor.dtype) if isinstance(array, ChunkedArray) else tensor
            for array, tensor in zip(prepared.feeder.spread(arrays), given, strict=True)
        ]
        return Ahead(tuple(fed), order, total, run, by_pass, prepared.feeder.more)

    def _cut(self, prepared: PreparedRun, isolation: str, timeout: float | None) -> VariableSnapshot:
        """A snapshot of the Variables read by a step, and of those fetched with it."""
        if isolation != "snapshot":
            raise InvalidArgument(f"isolation is None or 'snapshot', not {isolation!r}")
        self._ensure_together("isolation", prepared.code)
        return LOCKS.cut((*prepared.code.program.variables, *prepared.trailing), timeout)

    def _directly(
        self, prepared: PreparedRun, values: Iterable[Any], timeout: float | None = None
    ) -> list[Any] | None:  # fmt: skip
        """The step in one call; None if the call declined, to be run by `_execute`."""
        direct = prepared.direct  # another thread may forget it meanwhile
        if direct is None or self._steps.is_closed or self._cluster is not None or connected() is not None or notices:
            return None
        if timeout is not None and not (prepared.guarded and prepared.guarded.is_over_within(timeout)):
            return None
        results = direct(*values)
        if results is None:
            prepared.direct = None  # until the longer way gives it again
        else:
            prepared.code.program.use.last = time.time()
            self.runs.take()
        return results

    def _execute(
        self, prepared: PreparedRun, fed: Fed, timeout: float | None, cut: VariableSnapshot | None = None
    ) -> list[Any]:
        __tracebackhide__ = True
        tensors, shapes = fed
        if self.cluster is not None:
            return self._there(prepared, tensors, timeout)
        while notices:
            warnings.warn(notices.pop()(), stacklevel=user_level(None))
        program, forward = prepared.code.at(shapes)
        self._ran = prepared.code
        results = self._steps.step(prepared, program, tensors, timeout, forward, program.commit, cut)
        if type(forward) is tiers.GuardedCode and prepared.is_plain:
            again = prepared.guarded is forward  # a step that runs once needs none
            prepared.direct, prepared.guarded = forward.direct() if again else None, forward
        return results

    def _traced(
        self, prepared: PreparedRun, fed: Fed, timeout: float | None, how: bool | str, cut: VariableSnapshot | None
    ) -> list[Any]:
        """`_execute` with a tracer."""
        __tracebackhide__ = True
        if how not in TRACERS:
            raise InvalidArgument(f"trace is True, 'kernels' or 'health', not {how!r}")
        code = prepared.code.whole
        for option in ("trace", str(how)):
            self._ensure_together(option, code)
        tensors, shapes = fed
        if self.cluster is not None:
            return self._there(prepared, tensors, timeout, trace=partial(self._keep, prepared, tensors))
        program, _ = code.at(shapes)
        with profiling(how == "kernels") as profile:
            tracer = TRACERS[how](program)
            results = self._steps.step(prepared, program, tensors, timeout, tracer.forward, tracer.commit, cut)
        tracer.end(results, profile.found)
        tracer.untraced = prepared.code.code(shapes)
        self._keep(prepared, tensors, tracer.trace())
        return results

    def _keep(self, prepared: PreparedRun, tensors: list[torch.Tensor], trace: Trace) -> None:
        """The last traced run."""
        learn(self.graph, trace, prepared.code.step, tensors)
        self.trace = self.graph.attached["trace"] = trace  # live drawings of the graph look there

    def _checked(
        self, prepared: PreparedRun, fed: Fed, timeout: float | None, check: str, cut: VariableSnapshot | None = None
    ) -> list[Any]:  # fmt: skip
        """`_execute` of a step that writes nothing that is not finite."""
        __tracebackhide__ = True
        _ensure_nan(check)
        code = prepared.code.whole
        self._ensure_together("check", code)
        tensors, shapes = fed
        if self.cluster is not None:
            return self._there(prepared, tensors, timeout, check=True)
        program, _ = code.at(shapes)
        checked = CheckedTracer(program)
        try:
            return self._steps.step(prepared, program, tensors, timeout, checked.forward, checked.commit, cut)
        finally:
            if checked.found is not None:
                self._keep(prepared, tensors, checked.found.trace())

    def _there(
        self, prepared: PreparedRun, tensors: list[torch.Tensor], timeout: float | None, *, check: bool = False,
        trace: Callable[[Trace], None] | None = None,
    ) -> list[Any]:  # fmt: skip
        """The step on the cluster."""
        __tracebackhide__ = True

        def run() -> list[Any]:
            options = {"timeout": timeout, "run": self.runs.take(), "check": check, "see": prepared.see, "trace": trace}
            results = list(self.cluster.run(self._sent(prepared), tensors, compile=self._mode, **options))
            if prepared.code.step.writes:
                self.state.went_on()
            return results

        return [*self._steps.stoppable(prepared.code.step, None, run), *prepared.after()]

    def _sent(self, prepared: PreparedRun, *options: str) -> StepGraph:
        """The step for the cluster."""
        for option in ("memory_budget", *options):
            self._ensure_together(option, prepared.code, prepared)
        return prepared.code.step

    def _ensure_together(self, option: str, code: StepCode | None, prepared: PreparedRun | None = None) -> None:
        """Raise Unimplemented where an option that is asked for does not go with how the step runs."""
        asked = {"memory_budget": self.memory_budget is not None, "queues": code is not None and code.is_dataflow}
        if prepared is not None:
            asked["looks"] = bool(prepared.looks)
        holds = asked | {"cluster": self.cluster is not None, "watch": "watch" in self.graph.attached}
        if asked.get(option, True):
            for (what, situation), text in _NOT_TOGETHER.items():
                if what == option and holds[situation]:
                    raise Unimplemented(text)

    def _prepare(
        self, fetches: Fetches, feed_keys: tuple[Any, ...], division: Division = WHOLE, *, is_written: bool = True
    ) -> PreparedRun:  # fmt: skip
        __tracebackhide__ = True
        self._steps.ensure_open()
        about = division, self.memory_budget, torch.get_default_dtype(), is_written  # see `tfnb.passes.fractions`
        key = (key_of(fetches), tuple(map(key_of, feed_keys)), *about)
        prepared = self._prepared.get(key)
        if prepared is None or prepared.version != self.graph.version:
            self._forget()
            with uncollected():
                old = None if prepared is None else prepared.code
                code = partial(self._code, old=old)
                if not division.is_whole:
                    for option in ("microbatches", "schedule" if division.is_pipeline else "accumulation"):
                        self._ensure_together(option, None)
                    packs = None if self.memory_budget is None else partial(self._packs, old=old)
                    prepared = prepare_divided(self.graph, fetches, feed_keys, code, division, packs)
                else:
                    made = code if is_written else lambda step: code(without_writes(step))
                    prepared = prepare(self.graph, fetches, feed_keys, made)
            self._prepared[key] = prepared
        return prepared

    def _forget(self) -> None:
        """Signatures of nodes that are gone can never run again; their code holds the Variables of then."""
        nodes = self.graph.contents.by_id
        for key, old in list(self._prepared.items()):
            if any(value.node not in nodes for value in old.values):
                self._prepared.pop(key, None)

    def _code(self, step: StepGraph, *, old: StepCode | None) -> StepCode:
        """The code of a step, reused if only other cells changed."""
        if old is not None and same_step(old.step, step):
            return old
        code = StepCode(
            step, executor=self._executor, compile=self._mode, once=self._once, memory_budget=self.memory_budget
        )
        self._ensure_together("memory_budget", code)
        return code

    def _packs(self, step: StepGraph, *, old: object) -> PackCode:
        """The code of a step in packs and microbatches, within the memory budget."""
        assert self.memory_budget is not None
        return old if isinstance(old, PackCode) and same_step(old.step, step) else PackCode(step, self.memory_budget)

    # -- files ----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> checkpoint.Checkpoint:
        """Write the graph's variables to one safetensors file; returns a summary of its contents.

        With them go what the queues, accumulators and barriers of the graph hold, the numbers in the param groups of
        its torch optimizers, the states of schedulers that `reads` names, the positions of its random streams, of the
        sources that `fit` read or that `reads` names, and of a training of the graph that is not at its end, so that
        ``fit(resume=path)`` goes on from there. All of it is as if the steps under way were stopped at that moment:
        what they took is in its queue, unless they put elements, too. The steps go on, and queues keep what they hold.
        A callback of `fit` may call it, and another thread. Raises CheckpointWriteError, with an older file unchanged,
        FailedPrecondition for a Variable without a value, which it names, and DeadlineExceeded.
        """
        return self.state.save(path)

    def restore(
        self, path: str | PathLike[str], *, strict: bool = True, mapping: Mapping[str, str] | None = None
    ) -> Session:
        """Assign the variables from a file, and restore the contents of queues, all or none; returns the session.

        Steps under way that used one of these queues raise Aborted and write nothing: run them again. What waits for
        elements takes those that are there then. On a cluster everything is brought to the servers before the first
        of them changes; where one is lost while they do, all is here afterwards, and a warning says so.
        Random nodes draw what they would have drawn after the save: the graph takes the seed, the session its number
        of runs. A source goes on from its saved position once `fit` or `reads` is given one of that name, and likewise
        a queue that is not known yet holds what it held. The param groups of torch optimizers get their saved numbers
        (learning rate, ``initial_lr``, momentum ...), written in place: a note tells the changes. A scheduler that
        `reads` was given gets its saved state; a note names others, which ``scheduler.load_state_dict`` loads.

        A safetensors file of another library has values only: random streams and sources stay where they are.
        strict: a variable or queue missing in the file is an error. mapping: label here -> key in the file. With
        ``strict=False`` or a mapping optimizers and schedulers keep their numbers. Raises
        CheckpointCorrupt, NotFound or CheckpointIncompatible, and DeadlineExceeded where a run of another thread takes
        too long, with nothing assigned.
        """
        self.state.restore(path, strict=strict, mapping=mapping)
        return self

    def reads(self, source: Source | TensorQueue | LRScheduler) -> None:
        """Keep the position of a source in `save`; one that was restored under its name counts now.

        `fit` does this for its data, and a `QueueRunner` with a session; in a loop of one's own call it once. Where a
        runner puts the elements into a queue of the graph, the position is behind what the queue holds. A queue that
        the graph does not use: keep what it holds; what was restored under its name it holds now. A scheduler of a
        torch optimizer: keep its ``state_dict``; the restored one of its class it gets now, and its optimizer the
        learning rates that go with it (of several schedulers of one class in the order of these calls). Raises
        InvalidType for anything else, InvalidArgument where another source of that name is known, and for a scheduler
        whose state no file can hold, CheckpointIncompatible for a queue of another kind.
        """
        self.state.reads(source)

    def written(self, fetches: Fetches, feeds: Sequence[FeedKey] = ()) -> Sequence[Variable]:
        """The Variables that a step writes."""
        return self._prepare(fetches, tuple(feeds)).code.step.writes

    def status(self) -> list[str]:
        """A line for each signature run here and each choice of feed sizes: the running code and the reason."""
        return [line for code in self._codes() for line in code.status()]

    def code(
        self, fetches: Fetches, feeds: Sequence[FeedKey] = (), *,
        microbatches: int | Literal["auto"] | Division = 1,
    ) -> str:  # fmt: skip
        """The code that runs a signature here, and the reason, for the first sizes; empty before its first run.

        >>> import tfnb
        >>> with tfnb.record() as g:
        ...     x = tfnb.placeholder(torch.zeros(2, 3), name="x")
        ...     y = x.exp()
        >>> session = Session(g, compile="auto")
        >>> session.run(y, {x: torch.zeros(1, 3)}), session.code(y, [x])
        (tensor([[1., 1., 1.]]), 'generated code')
        """
        wanted = division(microbatches)
        if wanted.microbatches == AUTO and isinstance(self._ran, PackCode):
            return self._ran.code()
        code = self._prepare(fetches, tuple(feeds), WHOLE if wanted.microbatches == AUTO else wanted).code
        return code.code() if code.is_lowered else ""

    def expected(self, fetches: Fetches, feeds: Sequence[FeedKey] = ()) -> ExpectedSteps:
        """The further steps of a signature, which `fit` announces: compiling has to pay within these."""
        code = self._prepare(fetches, tuple(feeds)).code
        return code.expected if isinstance(code, StepCode) else ExpectedSteps()

    def limited(self, memory_budget: int | str | None) -> AbstractContextManager[None]:
        """Inside, runs and callables have this memory budget; None keeps the session's. Raises InvalidArgument."""
        return self._limited(self.memory_budget if memory_budget is None else byte_count(memory_budget))

    @contextmanager
    def _limited(self, budget: int | None) -> Iterator[None]:
        kept, self.memory_budget = self.memory_budget, budget
        try:
            yield
        finally:
            self.memory_budget = kept

    @property
    def plan(self) -> SizedPlan | PackPlan | None:
        """The memory plan of the last step that ran here within a memory budget; None without one."""
        budget = None if self._ran is None else self._ran.budget
        return None if budget is None else budget.last

    def plans(self) -> list[tuple[str, SizedPlan | PackPlan]]:
        """With a memory budget: names and sizes of the feeds of each signature run here, and the plan."""
        budgets = (code.budget for code in self._codes())
        return [row for found in budgets if found and found.budget == self.memory_budget for row in found.plans()]

    def _codes(self) -> list[StepCode]:
        return [prepared.code for prepared in self._prepared.values() if prepared.code.is_lowered]

    def close(self) -> None:
        """End the session: runs in other threads raise Cancelled and write nothing, later ones FailedPrecondition."""
        self._steps.close()
        if self._twin is not None:
            self._twin.close()
        for prepared in self._prepared.values():
            prepared.code.close()
        self._prepared.clear()

    @staticmethod
    def reset(containers: str | Iterable[str]) -> int:
        """Drop all that lives in these containers, for all sessions: `tfnb.reset`."""
        return reset(containers)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        from tfnb.view import session_html  # listed exception: a repr asks view

        return session_html(self)

    def __repr__(self) -> str:
        return f"<Session of {self.graph!r}{', closed' if self._steps.is_closed else ''}>"


def _ensure_nan(check: str) -> None:
    if check != "nan":
        raise InvalidArgument(f"check is None or 'nan', not {check!r}")


# -- the default session -------------------------------------------------------------------------------------------


def default_session(graph: Graph) -> Session:
    """The session that `run`, `.eval` and `fit` use for a graph."""
    if "session" not in graph.attached:
        graph.attached["session"] = Session(graph)
    return graph.attached["session"]


def limit(graph: Graph, memory_budget: int | str | None) -> Session:
    """Give the default session of a graph this memory budget; callables that were made before keep theirs.

    Raises InvalidArgument for a budget that holds the inputs and outputs of no node of the graph.
    """
    budget = None if memory_budget is None else byte_count(memory_budget)
    smallest, largest = least_budgets(graph)
    if budget is not None and budget < smallest:
        raise InvalidArgument(
            f"a memory budget of {budget:,} bytes holds no value of graph {graph.name}; the least sensible one is "
            f"{largest:,} bytes, the needs of its largest node for feeds of one row, and the Variables of a step"
        )
    session = default_session(graph)
    session.memory_budget = budget
    return session


def run(
    fetches: Fetches, feed_dict: Mapping[Any, Any] | None = None, *, timeout: float | None = None,
    trace: bool | Literal["kernels", "health"] = False, check: Literal["nan"] | None = None,
    isolation: Literal["snapshot"] | None = None,
) -> Any:  # fmt: skip
    """`Session.run` on the default session of the fetches' graph, with its options. Raises errors as that does.

    >>> import tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(3))
    ...     y = x.sum()
    >>> tfnb.run(y, {x: [1.0, 2.0, 3.0, 4.0]})
    tensor(10.)
    """
    __tracebackhide__ = True
    session = default_session(graph_of(fetches))
    return session.run(fetches, feed_dict, timeout=timeout, trace=trace, check=check, isolation=isolation)
