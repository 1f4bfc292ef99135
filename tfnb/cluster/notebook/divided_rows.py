"""A check before synchronous training: does the mean of parts' gradients equal the gradients of a whole batch?

They are computed here, of at most 64 rows of the data and of the values that Variables have in this process, and
nothing is applied. `tfnb.placement.row_means` says what is computed; `tfnb.passes.flow.row_weights` by what the parts
are weighted, and why a loss is no weighted mean: what a batch may hide is told by the structure of its graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from tfnb.cluster.engine.members import StepFeeds
from tfnb.cluster.modes.joins import joins
from tfnb.errors import DeadlineExceeded, ResourceExhausted
from tfnb.execution import Program, lower
from tfnb.execution.casts import uncast
from tfnb.execution.running import Running
from tfnb.graph import Node, Spec, Value
from tfnb.graph.lazy_memory import ensure_room
from tfnb.graph.spec import flows
from tfnb.graph.subgraph import nested
from tfnb.memory.scratch import variable_bytes
from tfnb.passes import StepGraph, feed_symbols, peak
from tfnb.passes.flow.merges import MERGES, merged, number_of
from tfnb.passes.flow.row_weights import Reason, weighed
from tfnb.passes.microbatches import divide
from tfnb.placement.placement import Homes, Piece
from tfnb.placement.row_means import MeansProbe, probe

ROWS = 64  # of a batch, at most
FEW = 16  # rows that are looked at first: steps may take long
BATCHES = 8  # of arrays that are looked at: by chance one has rows that are alike
SECONDS = 5.0
FEWEST = 3  # batches that are looked at however long it takes: each may hide a difference by chance
MORE = 0.5  # seconds after which what was seen is enough
APART = 1e-3  # of the size of a gradient: kernels add its parts in another order
NEAR = 2e-6  # the same of sums and means: of losses that begin alike, they tell what makes the difference
ZERO = 1e-5  # of the size of others: a gradient that small is what rounding leaves of a zero
UNITS = 8  # in the last place of the coarsest numbers: both at least
TF32 = 2.0**-10  # what a product of float32 may be rounded to on a device
_TURNED_OFF = "fit(..., exact=False) averages without a look"


class Dividers(NamedTuple):
    """Who divides the rows of a batch, for messages. ``instead``: what happens where an average is not exact, or cure;
    empty: gradients are not averaged, so that watched numbers alone are compared.

    ``of_norm``: what batch norm in training does, and the cure.
    """

    parts: str
    part: str
    instead: str
    of_norm: str


_OF_TASKS = (
    "and the running statistics are those of the first task, as with DistributedDataParallel without SyncBatchNorm. "
    "Larger batches, GroupNorm, or the module in eval mode make no such difference; "
)
SUMMING = Dividers(
    "tasks", "a task", "So tasks sum over all rows in mid-step, one step after the other, as with exact=True",
    f"{_OF_TASKS}exact=True takes the statistics of all rows",
)  # fmt: skip
TASKS = Dividers(
    "tasks", "a task", "mode='sync' without backup tasks sums over all rows in mid-step",
    f"{_OF_TASKS}mode='sync' with exact=True takes the statistics of all rows",
)  # fmt: skip
LATER = Dividers(
    "tasks", "a task",
    "This batch has feeds of different lengths: tasks divide the longest ones, and each has all of the others. It is "
    "averaged, as those before; mode='sync' with exact=True sums over all rows in mid-step",
    TASKS.of_norm,
)  # fmt: skip
LOCAL = Dividers("tasks", "a task", "", "")
MICROBATCHES = Dividers(
    "microbatches", "a microbatch", "Leave out microbatches",
    "and the running statistics move once for each of them, as where gradients are accumulated by hand. Larger "
    "batches, GroupNorm, or the module in eval mode make no such difference; fit without microbatches takes whole "
    "steps",
)  # fmt: skip


@dataclass(frozen=True)
class Observation:
    """The findings of a comparison, as warnings. is_settled: whether a further comparison would tell nothing more.

    is_mean: whether the mean of parts' gradients is that of all rows, as far as was seen.
    """

    notes: tuple[str, ...] = ()
    is_settled: bool = True
    is_mean: bool = True


def look_at_microbatches(step: StepGraph, count: int, batch: StepFeeds, room: int | None = None) -> Observation:
    """`look` at a step over ``count`` microbatches in this process; room: bytes that it may hold, Variables counted."""
    homes = {variable.key: (Piece(0, variable.key),) for variable in step.variables}
    return look(step, homes, count, [batch], MICROBATCHES, room)


def look(
    step: StepGraph, homes: Homes, count: int, batches: Iterable[StepFeeds], who: Dividers = TASKS,
    room: int | None = None,
) -> Observation:  # fmt: skip
    """Compare gradients on ``batches``, on more than one if quick. ``count``: the number of those who divide a batch.
    ``room``: the most bytes that this may hold, by default what is free.
    """
    ways = {value: how.way for value, how in zip(step.fetches, joins(weighed(step)), strict=False)}
    found = probe(step, homes)
    if found is None:
        return Observation()
    contents = step.whole.contents
    notes = [_of_no_count(contents.by_id[v.node], who) for v in found.watched if ways[v] == "none"]
    if not who.instead and (found.norms or found.why_not):
        return Observation(tuple(notes))
    notes += [_of_norms(found.norms, count, who)] if found.norms else []
    unseen = f"whether the loss is a mean over rows, so that {who.parts} may divide them, was not looked at"
    if found.why_not and not found.norms:
        return Observation((f"{unseen}: {found.why_not}. {_TURNED_OFF}",))
    if found.why_not:
        return Observation(tuple(notes))
    try:
        watched = {v: str(ways[v]) for v in found.watched if ways[v] in _SHOWN}
        seen = _Comparing(step, found, count, watched, room, who).first(batches)
    except (DeadlineExceeded, ResourceExhausted, torch.OutOfMemoryError) as error:
        if not who.instead:
            return Observation(tuple(notes))
        why = error.message if isinstance(error, DeadlineExceeded) else "this process has not the memory for it"
        return Observation((*notes, f"{unseen}: {why}. {_TURNED_OFF}"))
    except Exception:  # of the step: it will say so itself, with its line
        return Observation(tuple(notes), is_settled=False)
    if not seen.notes and found.hidden is not None and who.instead:
        return Observation((*notes, _of_hidden(found.hidden, who)), seen.is_settled, is_mean=False)
    return replace(seen, notes=(*notes, *seen.notes))


def _of_no_count(node: Node, who: Dividers) -> str:
    """The note on a watched whole number that cannot be joined."""
    return (
        f"{node.source or node.name}: {node.name} is fetched or watched, and is a whole number that is no count: its "
        f"value for all rows cannot be joined from its values for those of {who.parts}. NaN is shown; mode='sync' with "
        "exact=True has the value"
    )


def _of_norms(norms: Sequence[Node], count: int, who: Dividers) -> str:
    """The note on batch norm in training."""
    lines = {node.source: None for node in norms}
    first = next(iter(lines))
    others = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
    return (
        f"{first or norms[0].name}: batch norm in training{others} takes the statistics of the rows that {who.part} "
        f"has, one of {count} parts of a batch, {who.of_norm}"
    )


def _of_hidden(reason: Reason, who: Dividers) -> str:
    """The note on a loss whose gradients are alike for the rows that were looked at, and may not be for others."""
    return (
        f"{reason.node.source or reason.node.name}: the loss is a mean over the rows that were looked at, and may be "
        f"none over others: {_for(reason, who)}. {who.instead}. {_TURNED_OFF}"
    )


def _for(reason: Reason, who: Dividers) -> str:
    """A reason in words, with the cure where there is one."""
    cure = f". An average by {who.parts} is exact where you {reason.cure}" if reason.cure else ""
    return reason.text.replace("a task", who.part) + cure


@dataclass
class _Comparing:
    """One comparison in progress."""

    step: StepGraph
    probe: MeansProbe
    tasks: int
    watched: Mapping[Value, str]  # the merge of each
    room: int | None
    who: Dividers
    _end: float = field(init=False)
    _draw: Program | None = field(init=False, default=None)
    _compute: Program = field(init=False)

    def first(self, batches: Iterable[StepFeeds]) -> Observation:
        """The observation of the first batch with differing gradients, or of several batches with equal ones."""
        begin = time.monotonic()
        self._end = begin + SECONDS
        found = self.probe
        if found.drawn:
            self._draw = lower(found.graph, found.drawn, found.feeds)
        self._compute = lower(found.graph, found.fetches, (*found.feeds, *found.drawn))
        told = Observation(is_settled=False)
        few = max(FEW, 2 * self.tasks)
        looks = (
            (number, batch, rows)
            for number, batch in enumerate(batches, 1)
            for rows in sorted({min(few, _rows(batch)), _rows(batch)})
        )
        for number, batch, rows in looks:
            try:
                told = (self._of(batch, rows) if rows > 1 else None) or told
            except Exception:
                if told.is_settled:  # one look is enough
                    break
                raise
            if told.notes or (told.is_settled and number >= FEWEST and time.monotonic() > begin + MORE):
                break
        return told

    def _of(self, batch: StepFeeds, rows: int) -> Observation | None:
        """The observation of the first ``rows`` rows of a batch; None if all gradients are zero, or not finite."""
        feeds = batch.part(0, rows)
        drawn = self._run(self._draw, feeds) if self._draw is not None else []
        whole = self._part(batch, (0, rows), drawn)
        size = self._sizes_of(self._grads([whole], [rows]))
        if self.probe.borders and not size.all:
            return None
        told: dict[Value, str] = {}
        uneven = [(0, rows // 4), (rows // 4, rows)] if rows >= 4 else []  # halves may be alike by chance
        for division in (divide(rows, self.tasks), uneven):
            try:
                parts = [self._part(batch, part, drawn) for part in division]
            except Exception:
                if division is uneven:  # rows that belong together, it may be; and one look is enough
                    return Observation()
                raise
            if not parts:
                break
            counts = [stop - start for start, stop in division]
            worst = (
                size.furthest(self._grads([whole], [rows]), self._grads(parts, counts)) if self.who.instead else None
            )
            if worst is not None:
                apart = self._apart(whole, parts, counts, NEAR)
                reason = self.probe.hidden or self.probe.reason(self.step, apart, self.probe.losses)
                return Observation((self._words(*worst, len(division), rows, reason),), is_mean=False)
            told = dict(self._of_watched(whole, parts, counts)) | told
        return Observation(tuple(told.values()))

    def _part(self, batch: StepFeeds, part: tuple[int, int], drawn: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The fetches, of some rows."""
        feeds = batch.part(*part)
        sizes = self._sizes(feeds)
        alike = [self.probe.alike(value, one, sizes) for value, one in zip(self.probe.drawn, drawn, strict=True)]
        return self._run(self._compute, [*feeds, *alike])

    def _run(self, program: Program, feeds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        specs = [self._spec(value) for value in program.feeds]
        feeds = [tensor.to(spec.device) for tensor, spec in zip(feeds, specs, strict=True)]
        sizes = self._sizes(feeds[: len(self.probe.feeds)])
        nbytes = 2 * peak(program.graph, program.fetches, program.feeds, sizes)  # those of all rows are kept meanwhile
        if self.room is not None and nbytes + sum(map(variable_bytes, program.variables)) > self.room:
            raise ResourceExhausted(f"a look at the whole step holds more than its budget of {self.room:,} bytes")
        ensure_room(nbytes, f"a step of {max(sizes.values(), default=0)} rows in this process")
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(_LATE)
        storages = [variable.kept for variable in program.variables]
        with uncast():
            out, _ = Running().compute(
                lambda: program.compute(feeds, storages, 0), until=(left, lambda _: DeadlineExceeded(_LATE))
            )
        return out  # type: ignore[return-value]  # of values of the graph

    def _spec(self, value: Value) -> Spec:
        return self.probe.graph.contents.by_id[value.node].outputs[value.index]

    def _sizes(self, feeds: Sequence[torch.Tensor]) -> dict[str, int]:
        of = dict(zip(self.probe.feeds, feeds, strict=True))
        shown = feed_symbols(self.probe.graph.contents, self.probe.feeds)
        return {symbol: of[value].shape[axis] for symbol, (value, axis) in shown.items()}

    def _grads(self, parts: Sequence[Sequence[torch.Tensor]], rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """Each gradient, and each other mean or sum over rows, as servers join it; by the name of its Variable."""
        borders = self.probe.borders
        kinds, weights = [border.kind for border in borders], self.probe.weights[: len(borders)]
        means = dict(zip([b.value for b in borders], merged(kinds, weights, parts, rows), strict=True))
        found: dict[str, torch.Tensor] = {}
        for number, border in enumerate(self.probe.borders):
            value, name = means[border.value], border.variable or f"number {number}"
            if border.kind == "grad":
                found[f"{name}#{number}"] = value
            elif border.kind in ("mean", "sum"):
                found[f"{name}#{number}{_JOINED}"] = value if flows(value.dtype) else value.double()
            elif border.kind == "rows":
                entries = means.get(Value(border.value.node, 1))
                if entries is not None:
                    found[f"{name}#{number}"] = _by_row(value, entries)
        return found

    def _of_watched(
        self, whole: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]], rows: Sequence[int]
    ) -> Iterator[tuple[Value, str]]:
        """Watched numbers that are not what is made of those of parts, with notes."""
        if not self.watched:
            return
        near, apart = self._apart(whole, parts, rows, NEAR), self._apart(whole, parts, rows, APART, self.watched)
        for value in [value for value in self.watched if value in apart]:
            reason = self.probe.reason(self.step, near, [value])
            why = "" if reason is None else f": {reason.text.replace('a task', self.who.part)}"
            node, (claim, shown) = self.step.whole.contents.by_id[value.node], _SHOWN[self.watched[value]]
            note = (
                f"{node.source or node.name}: {node.name} is fetched or watched, and {claim}{why}. What is shown is "
                f"{shown} of a batch: {self.tasks} {self.who.parts} divide the rows of each step"
            )
            yield value, note

    def _apart(
        self, whole: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]], rows: Sequence[int], least: float,
        ways: Mapping[Value, str] | None = None,
    ) -> set[Value]:  # fmt: skip
        """The numbers whose value on the whole batch differs from that merged of its parts: by ``ways``, else the mean,
        if there is one.
        """
        apart: set[Value] = set()
        for at, value in enumerate(self.probe.numbers, len(self.probe.borders)):
            way = (ways or {}).get(value, "mean")
            if way == "mean" and not flows(whole[at].dtype):
                continue
            weight = self.probe.weights[at]
            numbers = [number_of(weight, part, count) for part, count in zip(parts, rows, strict=True)]
            joined = MERGES[way].merge([part[at] for part in parts], weight.shares(numbers))
            if not (joined.isfinite().all() or whole[at].isfinite().all()):
                continue  # both are NaN, for example: rows that say nothing
            one, other = ({"": found if flows(found.dtype) else found.double()} for found in (whole[at], joined))
            if joined.shape != whole[at].shape or self._sizes_of(one).furthest(one, other, least) is not None:
                apart.add(value)
        return apart

    def _sizes_of(self, grads: Mapping[str, torch.Tensor]) -> _GradientSizes:
        norms = {name: _norm(grad) for name, grad in grads.items()}
        each = [norm / math.sqrt(max(1, grads[name].numel())) for name, norm in norms.items() if math.isfinite(norm)]
        return _GradientSizes(norms, max(each, default=0.0), UNITS * self._unit)

    @cached_property
    def _unit(self) -> float:
        """The last place of the coarsest numbers that take part."""
        specs = {spec for node in self._compute.graph.nodes for one in (node, *nested(node)) for spec in one.outputs}
        kinds = {(spec.dtype, spec.device) for spec in specs if flows(spec.dtype)}
        return max(
            [
                torch.finfo(dtype).eps if device == "cpu" else max(torch.finfo(dtype).eps, TF32)
                for dtype, device in kinds
            ]
        )

    def _words(self, name: str, share: float, parts: int, rows: int, reason: Reason | None) -> str:
        loss = next(iter(self.probe.losses), None)
        node = None if loss is None else self.step.whole.contents.by_id[loss.node]
        at = reason.node if reason is not None else node
        where = "the step" if at is None else str(at.source or at.name)
        why = "" if reason is None else f": {_for(reason, self.who)}"
        away = "is not finite" if math.isinf(share) else f"is {share:.2g} of its size away"
        if name.endswith(_JOINED):
            return (
                f"{name.partition('#')[0]} takes a value that is no mean of, or sum over, rows. Of the first {rows} "
                f"rows, divided over {parts} {self.who.parts}, the value joined from theirs {away} from that of all of "
                f"them together. {self.who.instead}. {_TURNED_OFF}"
            )
        return (
            f"{where}: the loss is no mean over rows{why}. Of the first {rows} rows, divided over {parts} "
            f"{self.who.parts}, the averaged gradient of {name.partition('#')[0]} {away} from that of all of them "
            f"together. {self.who.instead}. {_TURNED_OFF}"
        )


_JOINED = "#joined"  # ends the name of a value that a Variable takes along no gradient
_LATE = f"it takes more than {SECONDS:.0f} s"
_SHOWN = {
    "mean": ("is no mean over rows", "the mean, by rows, of its values for parts"),
    "sum": ("is no sum over rows", "the sum of its values for parts"),
    "max": ("is no extreme of rows by themselves", "the largest of its values for parts"),
    "min": ("is no extreme of rows by themselves", "the least of its values for parts"),
    "first": ("depends on all rows", "its value for the first part"),
}
"""By the merge of a watched number: what it would have to be, and what is shown of it."""


def _by_row(values: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Row-sparse entries, summed: one vector for each row of the table that has some, in its order."""
    rows, place = entries.unique(return_inverse=True)
    total = values.new_zeros(len(rows), *values.shape[1:])
    return total.index_add_(0, place, values)


@dataclass(frozen=True)
class _GradientSizes:
    """Norms of gradients: ``of_each`` by name, ``typical`` the root mean square of the largest gradient.

    ``rounding``: a share of them that may be nothing else.
    """

    of_each: Mapping[str, float]
    typical: float
    rounding: float

    @property
    def all(self) -> bool:
        """Whether there is something to compare."""
        return self.typical > 0 and all(map(math.isfinite, self.of_each.values()))

    def furthest(
        self, whole: Mapping[str, torch.Tensor], mean: Mapping[str, torch.Tensor], least: float = APART
    ) -> tuple[str, float] | None:  # fmt: skip
        """The gradient furthest from the mean of parts, and the relative distance; None if all are near."""
        found: dict[str, float] = {}
        for name, norm in self.of_each.items():
            one, other = whole[name], mean[name]
            if one.shape != other.shape:  # sparse rows that are all zero in one of them
                found[name] = math.inf
                continue
            away = _norm(one.to(torch.promote_types(one.dtype, torch.float32)) - other)
            share = away / max(norm, 1e-300) if math.isfinite(away) else math.inf
            zero = max(min(ZERO, least), self.rounding) * self.typical * math.sqrt(max(1, one.numel()))
            if not math.isfinite(away) or (share > max(least, self.rounding) and away > zero):
                found[name] = share
        return max(found.items(), key=lambda pair: pair[1], default=None)


def _norm(tensor: torch.Tensor) -> float:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor.to(wide))) if tensor.numel() else 0.0


def _rows(batch: StepFeeds) -> int:
    return min(batch.rows or 0, ROWS)
