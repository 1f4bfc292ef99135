"""compare: ways to train, at equal numbers of samples and at equal time, over several seeds.

Each way starts from the same Variables, seed by seed in turn with the others, so that a machine that gets slower does
so for all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import combinations
from math import comb, isfinite, nan
from statistics import fmean, stdev
from typing import Any

import torch

from tfnb.errors import InvalidArgument
from tfnb.fitting.fit_loop import fit
from tfnb.fitting.fit_options import watched_by
from tfnb.graph.variable_locks import LOCKS
from tfnb.session import Session, default_session
from tfnb.session.structures import Fetches, graph_of
from tfnb.state.input_sources import Source
from tfnb.train.batches import Data
from tfnb.train.callbacks import Progress, listed
from tfnb.widgets.curve import bands, number
from tfnb.widgets.escaping import xml

POINTS = 40  # of a curve with its band
WARM = 4  # steps of each way before the clocks start
MOST = 20_000  # ways to deal values to two groups that are all tried; of more, so many are drawn
OPTIONS = tuple(signature(fit).parameters)
AXES = {"samples": "at equal samples", "seconds": "at equal time"}


@dataclass(frozen=True, slots=True)
class Point:
    """The value of one step, after so many samples and seconds of its run."""

    samples: int
    seconds: float
    value: float


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: ``runs`` has the points of each seed, by mode. Shown as curves with bands and a table.

    The bands are one standard deviation over seeds.
    """

    name: str  # of the value
    runs: Mapping[str, Sequence[Sequence[Point]]]

    def until(self, axis: str) -> float:
        """How far every run came, in ``"samples"`` or ``"seconds"``."""
        return min(getattr(run[-1], axis) for runs in self.runs.values() for run in runs)

    def curve(self, mode: str, axis: str) -> list[tuple[float, float, float]]:
        """Places up to `until`, with the mean and the deviation over seeds of the values since the place before."""
        end, found = self.until(axis), []
        binned = [_binned(run, axis, end) for run in self.runs[mode]]
        for place, values in enumerate(zip(*binned, strict=True), 1):
            found.append((end * place / POINTS, fmean(values), _spread(values)))
        return found

    def last(self, mode: str, axis: str) -> list[float]:
        """The value of each seed at `until`: the mean over the last tenth of the way."""
        end = self.until(axis)
        reached = [[point for point in run if getattr(point, axis) <= end] or run[:1] for run in self.runs[mode]]
        tails = [[p.value for p in run if getattr(p, axis) > 0.9 * end] or [run[-1].value] for run in reached]
        return list(map(fmean, tails))

    def chance(self, mode: str, axis: str) -> float:
        """How often chance alone makes as large a difference to the first mode as there is: a permutation test."""
        return permuted(self.last(next(iter(self.runs)), axis), self.last(mode, axis))

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Mode, steps in a second, and for both axes the value at its end and the chance of that difference."""
        for mode, runs in self.runs.items():
            rate = fmean(len(run) / run[-1].seconds for run in runs)
            cells = [mode, f"{number(rate)}/s"]
            for axis in AXES:
                values = self.last(mode, axis)
                chance = "" if mode == next(iter(self.runs)) else f", p {self.chance(mode, axis):.2g}"
                cells.append(f"{number(fmean(values))} ± {number(_spread(values))}{chance}")
            yield tuple(cells)

    def _heads(self) -> tuple[str, ...]:
        ends = (f"{self.name} {AXES[axis]} ({number(float(self.until(axis)))})" for axis in AXES)
        return ("mode", "steps", *ends)

    def __repr__(self) -> str:
        rows = [self._heads(), *self.rows()]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, wide)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        charts = "".join(
            f"<figure style='display:inline-block;margin:4px 12px 4px 0'>"
            f"{bands(self.name, {mode: self.curve(mode, axis) for mode in self.runs})}"
            f"<figcaption>{xml(self.name)} {AXES[axis]}</figcaption></figure>"
            for axis in AXES
        )
        rows = ("".join(f"<td>{xml(cell)}</td>" for cell in row) for row in self.rows())
        head = "".join(f"<th>{xml(cell)}</th>" for cell in self._heads())
        return f"{charts}<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


class Comparisons(dict[str, Comparison]):
    """The results of `compare` for several watched values, by name."""

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.values()))

    def _repr_html_(self) -> str:
        return "".join(each._repr_html_() for each in self.values())


def compare(
    fetch: Fetches, data: Data, modes: Mapping[str, Mapping[str, Any]], *, watch: Fetches, seeds: int = 5,
    **options: object,
) -> Comparison | Comparisons:  # fmt: skip
    """Train in several ways, each from the Variables of now, and compare a value at equal samples and at equal time.

    fetch, data: as of `fit`, but for data that can be read only once. modes: a name and options of `fit` for each way,
    also ``fetch`` for another optimizer: ``{"sync": {}, "async": {"mode": "async"}, "Adam": {"fetch": adam}}``; for a
    step of another graph its ``watch`` and ``data``, too. watch: the scalar to compare; of several, or of a dict of
    names, the result is a dict with a Comparison of each. seeds: so many runs of each, with other orders of the data
    and other random numbers. options: of all, such as ``epochs=3`` or ``feeds=(x, y)``. Afterwards the Variables are as
    before. p is how often chance alone makes as large a difference to the first mode: a permutation test over seeds.
    Raises InvalidArgument for data that can be read only once, for options that `fit` lacks, for ``seeds`` below 1, and
    for modes that watch no scalar or not the same ones.

    >>> import torch, tfnb
    >>> w = torch.nn.Parameter(torch.zeros(3))
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(8, 3), name="x")
    ...     loss = (x @ w - x.sum(1)).square().mean()
    ...     slow, quick = (tfnb.train.SGD(lr).minimize(loss) for lr in (0.001, 0.1))
    >>> found = compare(slow, {x: torch.rand(64, 3)}, {"slow": {}, "quick": {"fetch": quick}}, watch=loss, epochs=20)
    >>> found.chance("quick", "samples") < 0.05, w.tolist()
    (True, [0.0, 0.0, 0.0])
    """
    __tracebackhide__ = True
    if isinstance(data, Iterator | Source):
        raise InvalidArgument(
            f"compare reads the data anew for each run, and {type(data).__name__} goes on where it is: pass arrays, a "
            "DataLoader or a list of feed dicts"
        )
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InvalidArgument(f"seeds is a number of runs of each mode, an int of at least 1, not {seeds!r}")
    if not modes or not isinstance(modes, Mapping) or not all(isinstance(each, Mapping) for each in modes.values()):
        raise InvalidArgument(f"modes is a dict of names and options of fit, such as {{'sync': {{}}}}, not {modes!r}")
    asked = {mode: {"fetch": fetch, "data": data, "watch": watch, **options, **each} for mode, each in modes.items()}
    for mode, how in asked.items():
        if unknown := sorted(map(str, how.keys() - set(OPTIONS))):
            raise InvalidArgument(f"mode {mode}: fit has no option {', '.join(unknown)}; it has {', '.join(OPTIONS)}")
    sessions = {mode: default_session(graph_of(how["fetch"])) for mode, how in asked.items()}
    watched = {mode: watched_by(how["watch"], how["fetch"], sessions[mode])[0] for mode, how in asked.items()}
    names = next(iter(watched.values()))
    if not names or set(watched.values()) != {names}:
        raise InvalidArgument(f"compare follows at least one scalar, and in each mode the same ones; got {watched}")
    clocks: dict[str, list[_Clock]] = {mode: [] for mode in asked}
    with _kept([*dict.fromkeys(sessions.values())]) as begin:
        for how in asked.values():
            begin(0)
            fit(**{**how, "epochs": 1, "steps": WARM})
        for seed in range(seeds):
            for mode, how in asked.items():
                begin(seed)
                clocks[mode].append(clock := _Clock())
                fit(**{"seed": seed, **how, "callbacks": [*listed(how.get("callbacks", ())), clock]})
    found = Comparisons(
        (name, Comparison(name, {mode: [each.points[name] for each in mine] for mode, mine in clocks.items()}))
        for name in names
    )
    return next(iter(found.values())) if len(found) == 1 else found


class _Clock:
    """A callback of `fit` that keeps the values of each step by name, with samples and seconds."""

    def __init__(self) -> None:
        self.points: dict[str, list[Point]] = {}
        self._start = time.perf_counter()

    def on_step(self, progress: Progress) -> None:
        """`fit` tells that a step is done."""
        seconds = time.perf_counter() - self._start
        for name, value in progress.values.items():
            self.points.setdefault(name, []).append(Point(progress.samples, seconds, float(value)))


@contextmanager
def _kept(sessions: Sequence[Session]) -> Iterator[Any]:
    """Yields a function that restores the initial state for a seed; restores everything at the end."""
    variables = {id(one): one for session in sessions for one in session.graph.contents.variables.values()}.values()
    states = [(session, session.state.positions, session.graph.seed) for session in sessions]
    before = [variable.value() for variable in variables]

    def begin(number: int) -> None:
        is_there = any(session.cluster is not None for session in sessions)
        with nullcontext() if is_there else LOCKS.write(*variables):
            for variable, value in zip(variables, before, strict=True):
                variable.set(value.clone())
        for session, positions, seed in states:
            session.state.go_to(positions)
            session.graph.seed = seed + number
        torch.manual_seed(number)  # a DataLoader shuffles by it: each mode has the same order

    with torch.random.fork_rng():
        try:
            yield begin
        finally:
            begin(0)


def _spread(values: Sequence[float]) -> float:
    """The standard deviation; 0 of one value, NaN where one is not finite."""
    return nan if not all(map(isfinite, values)) else stdev(values) if len(values) > 1 else 0.0


def _binned(run: Sequence[Point], axis: str, end: float) -> list[float]:
    """Means of the values in equal parts of the way to ``end``; an empty part has the one before."""
    parts: list[list[float]] = [[] for _ in range(POINTS)]
    for point in run:
        if (at := getattr(point, axis)) <= end:
            parts[min(POINTS - 1, max(0, -int(-POINTS * at // end) - 1))].append(point.value)
    first = next((fmean(part) for part in parts if part), run[0].value if run else nan)
    found: list[float] = []
    for part in parts:
        found.append(fmean(part) if part else found[-1] if found else first)
    return found


def permuted(a: Sequence[float], b: Sequence[float]) -> float:
    """How often values dealt to two groups by chance have means as far apart as ``a`` and ``b``.

    >>> permuted([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), permuted([1, 2, 3, 4, 5], [11, 12, 13, 14, 15]) == 2 / 252
    (1.0, True)
    """
    both, total = [*a, *b], sum(a) + sum(b)
    apart = abs(fmean(a) - fmean(b)) * (1 - 1e-9)
    draw = random.Random(0)
    places = range(len(both))
    is_small = comb(len(both), len(a)) <= MOST
    dealt = combinations(places, len(a)) if is_small else (draw.sample(places, len(a)) for _ in range(MOST))
    hits = count = 0
    for group in dealt:
        mine = sum(both[place] for place in group)
        hits += abs(mine / len(a) - (total - mine) / len(b)) >= apart
        count += 1
    return hits / count
