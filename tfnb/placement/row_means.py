"""Whether averaging by rows gives the gradients of a whole batch: a probe to compute, and the offending node if not.

Gradients of parts, averaged by rows, are those of all rows where the loss is a mean over rows. A `MeansProbe` computes
them from all rows and from parts alike: dropout passes everything on, batch norm takes its running statistics, and what
else is drawn is fed, so that nothing but the loss can make a difference. Pure; imports graph and passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from tfnb.graph import Contents, Dim, Graph, Node, Spec, Value
from tfnb.graph.ops import REGIONS
from tfnb.graph.spec import flows
from tfnb.graph.subgraph import map_nodes, nested
from tfnb.passes import StepGraph, feed_symbols, step_graph
from tfnb.placement.partition import split
from tfnb.placement.placement import Homes, Transfer

_DROPOUT = "aten.native_dropout.default"
_NORM = "aten._native_batch_norm_legit_functional.default"
_NORMS = {_NORM, "aten._batch_norm_with_update_functional.default", "aten._native_batch_norm_legit.no_stats"}
_NORM_BACK = "aten.native_batch_norm_backward.default"
_SUM = 2  # torch's number of reduction="sum"

_REDUCTIONS: Mapping[str, str] = {name: kind for kind, names in {
    "sum": "sum nansum",
    "mean": "mean nanmean",
    "extreme": "amax amin max min aminmax logsumexp median nanmedian topk sort",
    "statistic": "var std var_mean std_mean linalg_vector_norm norm cov corrcoef prod",
    "product": "mm bmm mv dot addmm addmv baddbmm matmul einsum",
    "entropy": "nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d",
}.items() for name in names.split()}  # fmt: skip
_BENDS = {
    "abs", "relu", "leaky_relu", "hardtanh", "threshold", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
    "fmax", "fmin", "where", "huber_loss", "smooth_l1_loss", "max", "min", "amax", "amin",
}  # fmt: skip
_PICKS = {"index", "nonzero", "masked_select", "_unsafe_index"}

SAID: Mapping[str, tuple[str, str]] = {
    "sum": ("{op} is a sum over rows", "divide it by the number of rows, x.shape[0]"),
    "ignored": (
        "cross entropy divides by the number of targets that are not ignore_index={ignore_index}, and tasks have other "
        "numbers of them",
        "take reduction='sum' and divide by the number of rows, x.shape[0]",
    ),
    "classes": (
        "cross entropy divides by the sum of the class weights of its targets, and tasks have other sums",
        "take reduction='sum' and divide by the number of rows, x.shape[0]",
    ),
    "weighted": (
        "a sum over rows is divided by another one, such as that of a mask or of sample weights, and tasks have other "
        "totals",
        "divide by the number of rows, x.shape[0]",
    ),
    "picked": (
        "{op} is a mean over what a boolean index leaves, and tasks have other numbers of it",
        "multiply by the mask, sum, and divide by the number of rows, x.shape[0]",
    ),
    "extreme": ("{op} takes the largest or smallest of all rows, and a task has only its own", ""),
    "statistic": ("{op} is a statistic of all rows, and a task has only its own", ""),
    "product": ("{op} multiplies rows with each other, and a task has only its own", ""),
    "function": ("{op} of a mean over rows is no mean of {op} over parts of them", "take the mean last"),
    "bent": (
        "{op} of a mean over rows is no mean of {op} over parts of them where these lie on both sides of its bend",
        "",
    ),
    "across": ("its rows are computed with each other, and a task has only its own", ""),
}
"""Why a loss is no mean over rows, and what to write in its place."""


@dataclass(frozen=True)
class Reason:
    """The node that makes a loss no mean over rows: ``kind`` is a row of SAID."""

    kind: str
    node: Node

    @property
    def text(self) -> str:
        """The reason in words."""
        name = self.node.op.split(".")[1] if "." in self.node.op else self.node.op
        return SAID[self.kind][0].format(op=name, ignore_index=self.node.attrs.get("ignore_index"))

    @property
    def cure(self) -> str:
        """The code to write instead; empty if there is no equivalent."""
        return SAID[self.kind][1]


@dataclass(frozen=True)
class MeansProbe:
    """``graph`` computes ``fetches`` from ``feeds`` and, once they are known, ``drawn``.

    The first fetches are what ``borders`` send to servers; those behind them are ``numbers`` of the step's own graph:
    its losses, what is fetched of it, and the values without an axis of rows that they are made of. ``watched``: those
    of them that are fetched. ``norms``: batch norms that take the
    statistics of their rows. ``why_not``: the reason why nothing can be compared.
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
    norms: tuple[Node, ...]
    bent: Reason | None  # of a loss whose gradients may be alike for some rows, and not for others
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
        is_ratio = False
        while True:
            node = contents.by_id[value.node]
            inner = [v for v in node.inputs if v in apart]
            if not inner:
                break
            is_ratio |= node.op.startswith("aten.div") and len(inner) == 2
            value = inner[0]
        return Reason(self._kind(contents, node, is_ratio), node)

    def _kind(self, contents: Contents, node: Node, is_ratio: bool) -> str:
        inputs = [contents.by_id[v.node].outputs[v.index] for v in node.inputs]
        if not any(_has_rows(spec, self.rows) for spec in inputs):
            return "function"
        kind = _REDUCTIONS.get(node.op.split(".")[1] if "." in node.op else node.op, "")
        if kind == "sum" or node.attrs.get("reduction") == _SUM:
            return "weighted" if is_ratio else "sum"
        if kind == "entropy" and not any(_symbols(size) & self.rows for size in inputs[0].shape[1:]):
            return "ignored" if node.attrs.get("weight") is None else "classes"
        if kind == "mean":
            return "picked" if _is_picked(contents, node) else "across"
        return kind if kind not in ("", "entropy") else "across"


def probe(step: StepGraph, homes: Homes) -> MeansProbe | None:
    """The probe that compares the gradients of a step; None if tasks average no gradients."""
    updates = StepGraph(step.whole, step.graph, _operations(step), step.feeds)
    for each in (step, updates):  # what is fetched may be of averaged gradients
        rows, losses, watched, numbers = _numbers(each)
        cut = split(each.also(numbers), homes, parallel=True)
        if cut.divides:
            break
    else:  # a loss of values after an update
        losses = watched = numbers = ()
        cut = split(updates, homes, parallel=True)
    borders = tuple({b.value: b for s in cut.servers for b in s.borders if b.kind != "value"}.values())
    if not cut.divides or not any(b.kind in ("grad", "rows") for b in borders):
        return None
    places = cut.fetches[len(cut.fetches) - len(numbers) :]
    known = [(number, at) for number, at in zip(numbers, places, strict=True) if at is not None]
    norms = tuple(inner for node in cut.compute.nodes for inner in (node, *nested(node)) if _mixes(inner))
    nodes = [map_nodes(_held, node) for node in cut.compute.nodes]
    inside = next((node for node in nodes if any(inner.stream is not None for inner in nested(node))), None)
    why_not = "" if inside is None else f"{inside.name} draws random numbers inside"
    if any(_mixes(inner) for node in nodes for inner in (node, *nested(node))):
        why_not = "batch norm without running statistics has none but those of its rows"
    graph = cut.compute.derive(Contents(tuple(nodes)))
    drawn = tuple(node.value(i) for node in nodes if node.stream is not None for i in range(len(node.outputs)))
    fetches = (*(border.value for border in borders), *(at for _, at in known))
    return MeansProbe(
        graph, cut.feeds, borders, fetches, drawn, rows, losses, watched, tuple(number for number, _ in known), norms,
        _bend(step, losses, rows), why_not,
    )  # fmt: skip


def _bend(step: StepGraph, losses: Collection[Value], rows: frozenset[str]) -> Reason | None:
    """The first function with a bend that is taken of a mean over rows, and leads to a loss."""
    contents = step.whole.contents
    means = {value for value in step.feeds if _has_rows(contents.by_id[value.node].outputs[value.index], rows)}
    for node in step_graph(step.whole, losses, step.feeds).graph.nodes if losses else ():
        inputs = [value for value in node.inputs if value in means]
        if not inputs:
            continue
        means.update(node.value(i) for i in range(len(node.outputs)))
        if any(_has_rows(contents.by_id[v.node].outputs[v.index], rows) for v in inputs):
            continue
        op = node.op.split(".")[1] if node.op.startswith("aten.") else ""
        if node.op in REGIONS or op in _BENDS:
            return Reason("bent", node)
    return None


def _operations(step: StepGraph) -> tuple[Value, ...]:
    """The fetches without a value, and the assigns."""
    nodes = step.whole.contents.by_id
    return tuple(v for v in step.fetches if not nodes[v.node].outputs or nodes[v.node].op == "tfnb.assign")


def _numbers(step: StepGraph) -> tuple[frozenset[str], tuple[Value, ...], tuple[Value, ...], tuple[Value, ...]]:
    """Symbols of row axes, losses, watched fetches, and all values without rows behind losses and fetches."""
    contents, fed = step.whole.contents, set(step.feeds)
    shapes = [contents.by_id[value.node].outputs[value.index].shape for value in step.feeds]
    divided = {symbol for shape in shapes if shape for symbol in _symbols(shape[0])}
    shown = feed_symbols(contents, step.feeds)
    rows = frozenset(divided | {symbol for symbol in contents.symbols if symbol not in shown})
    space = step.whole.attached.get("workspace")
    ids = {node.id for node in step.graph.nodes}
    found = [d.ys for d in (() if space is None else space.derivatives) if d.nodes & ids]
    losses = tuple(dict.fromkeys(y for ys in found for y in ys if y.node in contents.by_id))
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
        if node.id in above and any(value in hangs for value in node.inputs):
            values = [node.value(i) for i in range(len(node.outputs))]
            hangs.update(values)
            numbers += [v for v in values if _is_number(node.outputs[v.index], rows) and not _mixes(node)]
    watched = tuple(value for value in fetched if value in numbers)
    return rows, losses, watched, tuple(numbers)


def _is_number(spec: Spec, rows: frozenset[str]) -> bool:
    return flows(spec.dtype) and not _has_rows(spec, rows)


def _has_rows(spec: Spec, rows: frozenset[str]) -> bool:
    return any(_symbols(size) & rows for size in spec.shape)


def _symbols(size: int | Dim) -> set[str]:
    return set(size.symbols) if isinstance(size, Dim) else set()


def _is_picked(contents: Contents, node: Node) -> bool:
    """Whether a mean is over the values that an index of a number that only data tell leaves."""
    stack, seen = list(node.inputs), set[int]()
    while stack:
        above = contents.by_id[stack.pop().node]
        if above.id in seen:
            continue
        seen.add(above.id)
        if "." in above.op and above.op.split(".")[1] in _PICKS:
            return True
        stack.extend(above.inputs)
    return False


# -- what is held -------------------------------------------------------------------------------------------------


def _mixes(node: Node) -> bool:
    """Whether a batch norm uses the statistics of its batch; an instance norm uses statistics of single rows."""
    if node.op not in _NORMS or node.attrs.get("training") is False:
        return False
    return all(isinstance(size, int) for size in node.outputs[1].shape)


def _held(node: Node) -> Node:
    """The node with dropout switched off, and with batch norm on running statistics."""
    if node.op == _DROPOUT:
        return replace(node, attrs={**node.attrs, "train": False}, stream=None)
    if _mixes(node) and node.attrs.get("running_mean") is not None:
        return replace(node, op=_NORM, attrs={**node.attrs, "training": False})
    is_back = node.op == _NORM_BACK and node.attrs["train"] and node.attrs["running_mean"] is not None
    if is_back and all(isinstance(size, int) for spec in node.outputs for size in _channels(spec)):
        return replace(node, attrs={**node.attrs, "train": False})
    return node


def _channels(spec: Spec) -> Iterator[int | Dim]:
    """The size of the channel axis, if there is one."""
    yield from spec.shape[1:2] if len(spec.shape) > 1 else spec.shape
