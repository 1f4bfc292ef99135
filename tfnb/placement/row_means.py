"""Whether the mean of parts' gradients is that of a whole batch: a probe to compute, and the offending node if not.

Gradients of parts, averaged by their weights, are those of all rows where the loss is a weighted mean or a sum over
rows, as far as `tfnb.passes.flow.row_weights` sees it. A `MeansProbe` computes them from all rows and from parts alike:
dropout passes everything on, batch norm takes its running statistics, and what else is drawn is fed, so that nothing
but the loss can make a difference. Pure; imports graph and passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from tfnb.graph import Contents, Dim, Graph, Node, Spec, Value
from tfnb.graph.spec import flows
from tfnb.graph.subgraph import map_nodes, nested
from tfnb.passes import StepGraph, feed_symbols
from tfnb.passes.flow.merges import ROWS, Weight
from tfnb.passes.flow.row_weights import REDUCTIONS, Reason, WeighedStep, name_of, weighed
from tfnb.placement.partition import split
from tfnb.placement.placement import Homes, Transfer

_DROPOUT = "aten.native_dropout.default"
_NORM = "aten._native_batch_norm_legit_functional.default"
_NORMS = {_NORM, "aten._batch_norm_with_update_functional.default", "aten._native_batch_norm_legit.no_stats"}
_NORM_BACK = "aten.native_batch_norm_backward.default"


@dataclass(frozen=True)
class MeansProbe:
    """``graph`` computes ``fetches`` from ``feeds`` and, once they are known, ``drawn``.

    The first fetches are what ``borders`` send to servers; those behind them are ``numbers`` of the step's own graph:
    its losses, what is fetched of it, and the real values without an axis of rows that they are made of. ``watched``:
    those of them that are fetched. ``weights``: of each fetch, with the place of its total. ``reasons``: of numbers
    that are no weighted means, as the structure of the graph says. ``norms``: batch norms that take the statistics of
    their rows. ``why_not``: the reason why nothing can be compared.
    """

    graph: Graph
    feeds: tuple[Value, ...]
    borders: tuple[Transfer, ...]
    fetches: tuple[Value, ...]
    drawn: tuple[Value, ...]
    rows: frozenset[str]  # symbols of axes that rows lie on
    losses: tuple[Value, ...]
    watched: tuple[Value, ...]
    numbers: tuple[Value, ...]
    weights: tuple[Weight, ...]
    reasons: Mapping[Value, Reason]
    norms: tuple[Node, ...]
    hidden: Reason | None  # of a loss whose gradients may be alike for some rows, and not for others
    why_not: str = ""

    def alike(self, value: Value, drawn: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        """The feed for a drawn value when the feeds have these ``sizes``: every row gets the numbers of the first row.

        Places among the rows are those of each row itself, so that they are there in every part.
        """
        node = self.graph.contents.by_id[value.node]
        spec = node.outputs[value.index]
        axes = [axis for axis, size in enumerate(spec.shape) if _symbols(size) & self.rows]
        if not axes:
            return drawn
        shape = spec.sizes(sizes)
        if _symbols(node.attrs.get("high", 0)) & self.rows or "randperm" in node.op:
            places = torch.arange(shape[axes[0]], dtype=spec.dtype, device=drawn.device)
            return places.view([-1 if axis == axes[0] else 1 for axis in range(len(shape))]).expand(shape).contiguous()
        for axis in axes:
            drawn = drawn.narrow(axis, 0, 1)
        return drawn.expand(shape).contiguous()

    def reason(self, step: StepGraph, apart: Collection[Value], of: Collection[Value]) -> Reason | None:
        """Why one of the numbers ``of`` is no mean over rows; ``apart``: numbers unlike the mean of the parts."""
        contents = step.whole.contents
        value = next((number for number in of if number in apart), None)
        if value is None:
            return None
        if (known := self.reasons.get(value)) is not None:
            return known
        while True:
            node = contents.by_id[value.node]
            inner = [v for v in node.inputs if v in apart]
            if not inner:
                break
            value = inner[0]
        return self.reasons.get(value) or Reason(self._kind(contents, node), node)

    def _kind(self, contents: Contents, node: Node) -> str:
        inputs = [contents.by_id[v.node].outputs[v.index] for v in node.inputs]
        if not any(_has_rows(spec, self.rows) for spec in inputs):
            return "function"
        kind = REDUCTIONS.get(name_of(node), "")
        return kind if kind in ("extreme", "statistic", "product") else "across"


def probe(step: StepGraph, homes: Homes) -> MeansProbe | None:
    """The probe that compares the gradients of a step, and numbers that are watched; None if there are neither."""
    weights = weighed(step)
    hidden = next(
        itertools.chain((weights.reasons[y] for y in weights.losses if y in weights.reasons), weights.mixed), None
    )
    updates = StepGraph(step.whole, step.graph, _operations(step), step.feeds)
    for each in (step, updates):  # what is fetched may be of averaged gradients
        rows, losses, watched, numbers = _numbers(each, weights)
        whole = StepGraph(weights.step.whole, weights.step.graph, each.fetches, each.feeds)
        cut = split(whole.also((*weights.totals, *numbers)), homes, parallel=True, weighed=weights)
        if cut.divides:
            break
    else:  # a loss of values after an update
        losses = watched = numbers = ()
        cut = split(whole.also(weights.totals), homes, parallel=True, weighed=weights)
    borders = tuple({b.value: b for s in cut.servers for b in s.borders if b.kind not in ("value", "any")}.values())
    if not cut.divides or not (watched or any(b.kind in ("grad", "rows") for b in borders)):
        return None
    places = cut.fetches[len(cut.fetches) - len(numbers) :]
    known = [(number, at) for number, at in zip(numbers, places, strict=True) if at is not None]
    norms = tuple(inner for node in cut.compute.nodes for inner in (node, *nested(node)) if mixes_rows(inner))
    nodes = [map_nodes(_held, node) for node in cut.compute.nodes]
    inside = next((node for node in nodes if any(inner.stream is not None for inner in nested(node))), None)
    why_not = "" if inside is None else f"{inside.name} draws random numbers inside"
    if any(mixes_rows(inner) for node in nodes for inner in (node, *nested(node))):
        why_not = "batch norm without running statistics has none but those of its rows"
    graph = cut.compute.derive(Contents(tuple(nodes)))
    drawn = tuple(node.value(i) for node in nodes if node.stream is not None for i in range(len(node.outputs)))
    first = len(cut.fetches) - len(numbers) - len(weights.totals)
    ends = [at for at in cut.fetches[first : first + len(weights.totals)] if at is not None]
    fetches = (*(border.value for border in borders), *(at for _, at in known), *ends)
    by_total = {total: len(borders) + len(known) + at for at, total in enumerate(weights.totals)}
    sent = {border.value: at for at, border in enumerate(borders)}
    found = [border.weight.at(sent) for border in borders] + [weights.of(number).at(by_total) for number, _ in known]
    return MeansProbe(
        graph, cut.feeds, borders, fetches, drawn, rows, losses, watched, tuple(number for number, _ in known),
        tuple(found), weights.reasons, norms, hidden, why_not,
    )  # fmt: skip


def _operations(step: StepGraph) -> tuple[Value, ...]:
    """The fetches without a value, and the assigns."""
    nodes = step.whole.contents.by_id
    return tuple(v for v in step.fetches if not nodes[v.node].outputs or nodes[v.node].op == "tfnb.assign")


def _numbers(
    step: StepGraph, weights: WeighedStep
) -> tuple[frozenset[str], tuple[Value, ...], tuple[Value, ...], tuple[Value, ...]]:  # fmt: skip
    """Symbols of row axes, losses, watched fetches, and all values without rows behind losses and fetches."""
    contents, fed = step.whole.contents, set(step.feeds)
    shapes = [contents.by_id[value.node].outputs[value.index].shape for value in step.feeds]
    divided = {symbol for shape in shapes if shape for symbol in _symbols(shape[0])}
    shown = feed_symbols(contents, step.feeds)
    rows = frozenset(divided | {symbol for symbol in contents.symbols if symbol not in shown})
    losses = weights.losses
    above: set[int] = set()
    fetched = dict.fromkeys(value for value in step.fetches if value not in set(_operations(step)))
    stack = [value.node for value in (*losses, *fetched)]
    while stack:
        node_id = stack.pop()
        if node_id not in above:
            above.add(node_id)
            stack.extend(v.node for v in contents.by_id[node_id].inputs if v not in fed)
    hangs: set[Value] = set(fed)
    numbers: list[Value] = []
    for node in contents.nodes:
        if node.id in above and (not rows.isdisjoint(node.symbols) or any(value in hangs for value in node.inputs)):
            values = [node.value(i) for i in range(len(node.outputs))]
            hangs.update(values)
            numbers += [
                v for v in values
                if not _has_rows(spec := node.outputs[v.index], rows) and (flows(spec.dtype) or v in fetched)
                and not mixes_rows(node)
            ]  # fmt: skip
    numbers = [value for value in numbers if weights.values.get(value, ROWS) is not None]
    watched = tuple(value for value in fetched if value in numbers)
    return rows, losses, watched, tuple(numbers)


def _has_rows(spec: Spec, rows: frozenset[str]) -> bool:
    return any(_symbols(size) & rows for size in spec.shape)


def _symbols(size: int | Dim) -> set[str]:
    return set(size.symbols) if isinstance(size, Dim) else set()


# -- what is held -------------------------------------------------------------------------------------------------


def mixes_rows(node: Node) -> bool:
    """Whether a batch norm uses the statistics of its batch; an instance norm uses statistics of single rows."""
    if node.op not in _NORMS or node.attrs.get("training") is False:
        return False
    return all(isinstance(size, int) for size in node.outputs[1].shape)


def _held(node: Node) -> Node:
    """The node with dropout switched off, and with batch norm on running statistics."""
    if node.op == _DROPOUT:
        return replace(node, attrs={**node.attrs, "train": False}, stream=None)
    if mixes_rows(node) and node.attrs.get("running_mean") is not None:
        return replace(node, op=_NORM, attrs={**node.attrs, "training": False})
    is_back = node.op == _NORM_BACK and node.attrs["train"] and node.attrs["running_mean"] is not None
    if is_back and all(isinstance(size, int) for spec in node.outputs for size in _channels(spec)):
        return replace(node, attrs={**node.attrs, "train": False})
    return node


def _channels(spec: Spec) -> Iterator[int | Dim]:
    """The size of the channel axis, if there is one."""
    yield from spec.shape[1:2] if len(spec.shape) > 1 else spec.shape
