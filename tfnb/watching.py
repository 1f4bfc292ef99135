"""watch: values of nodes and Variables during runs, as curves and histograms. Adds no node to the graph.

A run that is looked at is the same step with the watched values as further fetches, in generated code. Its extra time
is measured: the next look waits until it is a small part of the time since.
"""

from __future__ import annotations

import difflib
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import count
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from tfnb import widgets
from tfnb.errors import InvalidArgument, NotFound, ResourceExhausted
from tfnb.graph import Graph, Variable
from tfnb.recording import Tensor
from tfnb.recording import graph as graph_named
from tfnb.recording import variable as variable_named
from tfnb.session import Session
from tfnb.session.structures import Fetches, graph_of, key_of, value_of
from tfnb.state.step_groups import StepReport
from tfnb.widgets.curve import bars, blocks, number, svg, table
from tfnb.widgets.escaping import xml

SHARE = 0.01  # of the time that looking may take, as measured; the caches that it empties come on top
LEAST = 0.05  # seconds between two looks
TIMED = 5  # ordinary runs after each look that are timed
PERIOD = 0.25  # seconds between two renewals of the picture, and between two looks on a cluster, at least
POINTS = 400  # of a curve
BINS = 30
MOST = 32  # things that one watch follows
HIST = ":hist"
_UNSEEN = frozenset({"tfnb.read", "tfnb.assign", "tfnb.group", "tfnb.guard"})  # nodes that patterns leave out


class ValueWriter(Protocol):
    """Keeps watched values by name and step; `tfnb.summary.Writer` writes them to event files."""

    def scalar(self, name: str, value: float, step: int) -> None:
        """Keep one number."""

    def histogram(self, name: str, values: torch.Tensor, step: int) -> None:
        """Keep the distribution of a tensor's numbers."""


class Histogram(NamedTuple):
    """How many of the finite values lie in each of equally wide bins from ``low`` to ``high``; how many are not."""

    counts: tuple[int, ...]
    low: float
    high: float
    bad: int = 0


def histogram(tensor: torch.Tensor, bins: int = BINS) -> Histogram:
    """The histogram of a tensor.

    >>> histogram(torch.tensor([0.0, 0.1, 1.0, float("nan")]), bins=2)
    Histogram(counts=(2, 1), low=0.0, high=1.0, bad=1)
    """
    finite = _finite(tensor)
    if not finite.numel():
        return Histogram((), math.nan, math.nan, tensor.numel())
    low, high = (bound.item() for bound in finite.aminmax())
    span = (low, high) if low < high else (low - 0.5, high + 0.5)
    return Histogram(tuple(map(int, finite.histc(bins, *span).tolist())), *span, tensor.numel() - finite.numel())


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """Its finite values as floats; of complex ones the sizes."""
    flat = tensor.detach().reshape(-1)
    wide = (flat.abs() if flat.is_complex() else flat).to(torch.float64 if flat.dtype == torch.float64 else torch.float)
    return wide[wide.isfinite()]


class Series:
    """The observed values of one item: a curve (of means, if it has several elements), or its last histogram."""

    def __init__(self, name: str, is_histogram: bool) -> None:
        self.name, self.is_histogram = name, is_histogram
        self.points: list[tuple[int, float]] = []
        self.histogram: Histogram | None = None
        self._said = "nothing yet"

    def add(self, step: int, tensor: torch.Tensor) -> None:
        """The value after a step."""
        wide = tensor.detach()
        wide = (wide.abs() if wide.is_complex() else wide).double() if wide.device.type != "mps" else wide.float()
        value = wide.mean().item() if wide.numel() else math.nan
        self.points.append((step, value))
        if len(self.points) > POINTS:
            del self.points[1:-1:2]
        self._said = f"step {step}: {number(value)}"
        if wide.numel() != 1:
            self._said = f"step {step}: mean {number(value)} of {list(tensor.shape)}"
        if self.is_histogram:
            self.histogram = found = histogram(tensor)
            self._said += f", {number(found.low)} to {number(found.high)}" if found.counts else ", no finite value"
            self._said += f", {found.bad} not finite" if found.bad and found.counts else ""

    def row(self) -> tuple[str, str, str]:
        """Name, value in words, and picture."""
        if self.histogram is not None:
            return self.name, self._said, bars(self.name, *self.histogram[:3])
        return self.name, self._said, svg(self.name, self.points)

    def line(self) -> str:
        """The same as text."""
        seen = self.histogram.counts if self.histogram is not None else [value for _, value in self.points]
        return f"{self.name}  {self._said}  {blocks(seen)}".rstrip()


class Watch:
    """The values of one graph followed by `watch`. Shown as a table of curves and histograms, or as text.

    ``courses`` has what was seen, by name; ``steps`` counts the runs of the graph since. Raises NotFound, with near
    names, for a name that the graph lacks, InvalidArgument for more than 32 matches.
    """

    def __init__(
        self, graph: Graph, names: Sequence[str], *, every: int | None, hist: bool, writer: ValueWriter | None = None
    ) -> None:  # fmt: skip
        self.graph, self.every, self.steps = graph, every, 0
        self._names, self._hist, self._writer = names, hist, writer
        self._found, self._version = wanted(graph, names, hist), graph.version
        self.courses = {name: Series(name, is_histogram) for name, (_, is_histogram) in self._found.items()}
        self.note = ""
        self._number = count(1)
        self._looking = threading.Lock()
        self._usual, self._next, self._shown = 0.0, 0.0, 0.0
        self._extra: list[float] = []  # seconds that the last looks took
        self._looks = 0
        self._to_time = 0  # ordinary runs that are still to be timed
        self._without: set[Any] = set()  # fetches and feeds of runs that compute nothing of what is followed
        self._is_fresh = False  # seen and not shown
        self._plot: Any = None

    # -- what a session calls ---------------------------------------------------------------------------------

    def next_step(self) -> int:
        """Count a run; returns the number with which `step` runs it, or 0 for an ordinary run."""
        step = self.steps = next(self._number)
        return step if self._to_time or self._is_due(step, time.perf_counter()) else 0

    def step(
        self, step: int, session: Session, plain: Callable[[], Any], fetches: Fetches, feeds: Mapping[Any, Any],
        **options: Any,
    ) -> Any:  # fmt: skip
        """One run: ``plain()``, timed, or now and then the same run with the watched values."""
        start = time.perf_counter()
        is_due = self._is_due(step, start) and (key_of(fetches), *map(key_of, feeds)) not in self._without
        if not is_due or not self._looking.acquire(blocking=False):
            found = plain()
            took = time.perf_counter() - start
            self._to_time = max(0, self._to_time - 1)
            self._usual = min(took, 1.05 * self._usual) if self._usual else took  # the first ones are slow
            return found
        try:
            found, values = session.looked_at(fetches, feeds, self._items(), **options)
            if not values:  # the next run of other fetches is looked at
                self._without.add((key_of(fetches), *map(key_of, feeds)))
                return found
            self._took(step, values)
            self._pause(time.perf_counter() - start - self._usual, PERIOD if session.cluster is not None else 0.0)
            return found
        except ResourceExhausted:  # no room within the memory budget; nothing was written
            self.note = "the memory budget has no room for watched values"
            self._next = math.inf
            return plain()
        finally:
            self._looking.release()

    def _is_due(self, step: int, now: float) -> bool:
        return now >= self._next if self.every is None else step % self.every == 0 and self._next < math.inf

    def _pause(self, extra: float, least: float) -> None:
        """Set the time of the next look, so that looks take at most `SHARE` of the time; the first look is not
        measured, as it includes lowering.
        """
        self._extra = [*self._extra, extra][-5:] if self._looks else []
        self._looks, self._to_time = self._looks + 1, TIMED
        self._next = time.perf_counter() + max(least, LEAST, median(self._extra or [0.0]) / SHARE)

    def followed(
        self, watched: tuple[Any, ...], taken: Callable[[tuple[Any, ...]], Generator[StepReport, None, None]]
    ) -> Generator[StepReport, None, None]:  # fmt: skip
        """The steps of a `fit` taken by others: ``taken(watched)``, with the followed items added to the results.

        Of nodes it has those with one number; Variables are fetched from where they live.
        """
        items = self._items()
        scalars = {name: item for name, item in items.items() if _is_scalar(self.graph, item)}
        variables = {name: item for name, item in items.items() if isinstance(item, Variable)}
        left = sorted(items.keys() - scalars.keys() - variables.keys())
        if left:
            self.note = f"on a cluster fit sends single numbers and Variables only, so not {', '.join(left)}"
        for told in taken((*watched, *scalars.values())):
            own = told.values[len(watched) :]
            for at in range(len(told.epochs)):
                self.steps, now = next(self._number), time.perf_counter()
                if self._is_due(self.steps, now) and len(own) == len(scalars):
                    found = {name: value.reshape(-1)[at] for name, value in zip(scalars, own, strict=True)}
                    found |= {name: variable.value() for name, variable in variables.items()}
                    self._took(self.steps, found)
                    self._pause(time.perf_counter() - now, PERIOD)
            yield told._replace(values=told.values[: len(watched)])

    def _items(self) -> dict[str, Any]:
        """The items to fetch, by name, updated if the graph was recorded again."""
        if self._version != self.graph.version:
            self._version, self._found = self.graph.version, wanted(self.graph, self._names, self._hist, gone=True)
            self._without.clear()
            for name, (_, is_histogram) in self._found.items():
                self.courses.setdefault(name, Series(name, is_histogram))
        return {name: item for name, (item, _) in self._found.items() if not _is_empty(item)}

    def _took(self, step: int, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            course = self.courses[name]
            course.add(step, value)
            if self._writer is None:
                continue
            if not course.is_histogram:
                self._writer.scalar(name, course.points[-1][1], step)
            elif (finite := _finite(value)).numel():  # a histogram in a file is of finite values
                self._writer.histogram(name, finite, step)
        self._is_fresh = True
        if self._plot is not None and time.perf_counter() - self._shown >= PERIOD:
            self.show()

    # -- what is shown ----------------------------------------------------------------------------------------

    def show(self) -> None:
        """Renew the picture below the cell that began to watch."""
        self._shown, self._is_fresh = time.perf_counter(), False
        if self._plot is None:
            self._plot = widgets.LivePlot(self._repr_html_(), repr(self))
        self._plot.show(self._repr_html_(), repr(self))

    def settle(self) -> None:
        """Show the latest values at the end of a cell."""
        if self._plot is not None and self._is_fresh:
            self.show()

    def stop(self) -> Watch:
        """Stop following; the picture stays. Returns itself."""
        if self.graph.attached.get("watch") is self:
            del self.graph.attached["watch"]
        if self._plot is not None:
            self.show()
        return self

    def _head(self) -> str:
        stopped = "" if self.graph.attached.get("watch") is self else ", stopped"
        often = "" if self.every is None else f", every {self.every}"
        return f"{self.graph.name}: watched for {self.steps} steps{often}{stopped}" + (self.note and f"; {self.note}")

    def __repr__(self) -> str:
        return "\n".join([self._head(), *(f"  {course.line()}" for course in self.courses.values())])

    def _repr_html_(self) -> str:
        return f"<div>{xml(self._head())}</div>{table(course.row() for course in self.courses.values())}"


def watch(
    *what: Fetches, every: int | None = None, hist: bool = False, graph: Graph | str | None = None,
    writer: ValueWriter | None = None, show: bool = True,
) -> Watch:  # fmt: skip
    """Follow values during the runs of a graph, including those of `fit` and on a cluster; adds no node.

    what: recorded tensors, Variables, Parameters or names, with ``*`` and ``?`` (``"conv*/weight"``; ``/`` and ``.``
    are the same); a name that ends with ``:hist`` has a histogram. hist: all have. Of other tensors with more than one
    number the mean is followed. A node is seen in runs that compute it.

    every: look at each so many runs. By default it looks as often as takes at most 2 % of the time, and at most 4 times
    a second on a cluster. A run that is looked at is generated code, whose last digits may differ from those of
    compiled code. In `fit` on a cluster nodes with more than one number are not seen. writer: a `tfnb.summary.Writer`
    that has all values, too.

    In a notebook the picture appears at once and is renewed in place (show). Another call for the graph ends the one
    before; without arguments it gives that. Raises NotFound, with near names, for what is not in the graph. Raises
    InvalidArgument for ``every`` below 1, for more than 32 matches, and for anything else than a tensor, Variable or
    name; NotFound without arguments where nothing is watched.

    >>> import tfnb
    >>> with tfnb.record("watched"):
    ...     x = tfnb.placeholder(torch.ones(3))
    ...     y = x.square()
    ...     z = y.sum()
    >>> seen = tfnb.watch(z, "y:hist", every=1, show=False)
    >>> for k in range(3):
    ...     _ = tfnb.run(z, {x: torch.arange(2.0) + k})
    >>> seen.stop()
    watched: watched for 3 steps, every 1, stopped
      z  step 3: 13  ▁▃█
      y  step 3: mean 6.5 of [2], 4 to 9  █▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁█
    """
    found = _graph(what, graph)
    before = found.attached.get("watch")
    if not what:
        if before is None:
            raise NotFound(f"nothing is watched in graph {found.name}: tfnb.watch(loss) begins")
        return before  # type: ignore[no-any-return]
    if every is not None and (type(every) is not int or every < 1):
        raise InvalidArgument(f"every is a number of runs, an int of at least 1, not {every!r}")
    made = Watch(found, [_name(found, item) for item in what], every=every, hist=hist, writer=writer)
    if before is not None:
        before.stop()
    found.attached["watch"] = made
    if show:
        made.show()
    return made


# -- names ----------------------------------------------------------------------------------------------------------


def wanted(graph: Graph, names: Iterable[str], hist: bool, *, gone: bool = False) -> dict[str, tuple[Any, bool]]:
    """The meaning of each name or pattern: a Value or Variable, and whether to show a histogram.

    gone: leave out what is not there. Raises NotFound with near names, InvalidArgument for too many.
    """
    found: dict[str, tuple[Any, bool]] = {}
    for text in names:
        name = text.removesuffix(HIST)
        matches = dict(_matches(graph, name))
        if not matches and not gone:
            near = difflib.get_close_matches(_plain(name), [*map(_plain, _all(graph))], 3)
            advice = f"; near: {', '.join(near)}" if near else f"; there are: {', '.join([*_all(graph)][:8])}"
            raise NotFound(f"graph {graph.name} has no node or variable {name!r} to watch{advice}")
        found |= {each: (item, hist or text.endswith(HIST)) for each, item in matches.items()}
    if len(found) > MOST:
        raise InvalidArgument(f"{len(found)} things match {', '.join(names)}; one watch follows at most {MOST}")
    return found


def _matches(graph: Graph, name: str) -> Iterator[tuple[str, Any]]:
    everything = _all(graph)
    if name in everything or not set("*?[") & set(name):
        if name in everything or name.rpartition(":")[0] in everything:
            yield name, everything[name] if name in everything else graph.value(name)
        elif (same := next((each for each in everything if _plain(each) == _plain(name)), None)) is not None:
            yield same, everything[same]
        return
    for each, item in everything.items():
        if fnmatchcase(_plain(each), _plain(name)):
            yield each, item


def _all(graph: Graph) -> dict[str, Any]:
    """Everything that has a value, by name: nodes and their outputs, Variables."""
    contents = graph.contents
    seen = {node.id for node in graph.nodes if node.op not in _UNSEEN and node.outputs}
    return {name: value for name, value in contents.names.items() if value.node in seen} | contents.variables


def _plain(name: str) -> str:
    return name.replace("/", ".")


def _name(graph: Graph, item: object) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Tensor):
        value = value_of(graph, item)
        name = graph.contents.shown(graph.contents.by_id[value.node])
        return f"{name}:{value.index}" if value.index else name
    if isinstance(item, nn.Parameter | torch.Tensor):
        item = variable_named(item)
    if isinstance(item, Variable):
        label = next((label for label, each in graph.contents.variables.items() if each is item), None)
        if label is not None:
            return label
        raise NotFound(f"graph {graph.name} has no variable {item.name} to watch")
    raise InvalidArgument(f"a recorded tensor, Variable or name is watched, not {type(item).__name__}")


def _graph(what: Sequence[Any], graph: Graph | str | None) -> Graph:
    if isinstance(graph, Graph):
        return graph
    recorded = [item for item in what if isinstance(item, Tensor)]
    return graph_of(recorded[0]) if graph is None and recorded else graph_named(graph)


def _is_scalar(graph: Graph, item: Any) -> bool:
    if isinstance(item, Variable):
        return False
    spec = graph.contents.by_id[item.node].outputs[item.index]
    return all(size == 1 for size in spec.shape)


def _is_empty(item: object) -> bool:
    """Whether an item is a Variable without a value."""
    return isinstance(item, Variable) and item.home is None and not item.initialized
