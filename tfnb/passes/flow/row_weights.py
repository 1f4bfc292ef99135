"""The weights by which values of parts of a batch average to the value of the whole batch. Pure; imports the graph.

A *weighted mean* is N / D, where N and D add up over rows and no gradient flows through D. Its value for the batch, and
its gradient, are those of the parts weighted by the D of each part. The number of rows is the D of a mean over rows; a
mask's sum, the number of targets that count, or the length of what a boolean index leaves are others; of a sum over
rows it is 1 for the batch as for each part. The structure of the graph says which: each value is alike on all parts,
divided by rows, or a sum over rows, times powers of such totals. Where it is none of these, a `Reason` names the node;
of an op that the tables do not know nothing is said, and parts are weighted by rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from tfnb.errors import ShapeError
from tfnb.graph import Contents, Dim, Graph, Node, Ref, Spec, Value
from tfnb.graph.contents import distinct
from tfnb.graph.graph import new_id
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import REGIONS, STRUCTURAL, overload
from tfnb.graph.spec import flows
from tfnb.passes.flow.merges import ROWS, SUM, Weight, varying_axis
from tfnb.passes.flow.row_counts import NUMBER, with_counts
from tfnb.passes.flow.row_rules import BILINEAR, LINEAR
from tfnb.passes.merge import frozen
from tfnb.passes.prune import StepGraph, feed_symbols, step_graph
from tfnb.passes.resolve import resolve

SAID: Mapping[str, tuple[str, str]] = {
    "sum": ("{op} is a sum over rows", "divide it by the number of rows, x.shape[0]"),
    "weighted": (
        "a sum over rows is divided by another one through which gradients flow, or which is no single number",
        "take the divisor's detach(), where it is one number",
    ),
    "weights": (
        "{op} joins values that parts of a batch weight differently, such as a sum and a mean over rows, or means by "
        "two masks",
        "divide both by the same total",
    ),
    "constant": (
        "{op} adds a term without rows to a sum over rows, or to a mean whose divisor is clamped or shifted: each task "
        "has the whole term",
        "take a mean, with a divisor that is a plain sum over rows",
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
"""Why a value is no weighted mean over rows, and the code to write in its place."""


@dataclass(frozen=True)
class Reason:
    """The node that makes a value no weighted mean over rows: ``kind`` is a row of SAID."""

    kind: str
    node: Node

    @property
    def text(self) -> str:
        """The reason in words."""
        return SAID[self.kind][0].format(op=name_of(self.node))

    @property
    def cure(self) -> str:
        """The code to write instead; empty if there is no equivalent."""
        return SAID[self.kind][1]


REDUCTIONS: Mapping[str, str] = {name: kind for kind, names in {
    "sum": "sum nansum count_nonzero",
    "mean": "mean",
    "extreme": "amax amin max min aminmax logsumexp median nanmedian topk sort argmax argmin",
    "statistic": "var std var_mean std_mean linalg_vector_norm norm cov corrcoef prod",
    "product": "mm bmm mv dot addmm addmv baddbmm matmul einsum",
    "entropy": "nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d",
}.items() for name in names.split()}  # fmt: skip
"""Ops that make numbers of rows."""

_BENDS = {
    "abs", "relu", "leaky_relu", "hardtanh", "threshold", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
    "fmax", "fmin", "where", "huber_loss", "smooth_l1_loss", "max", "min", "amax", "amin",
}  # fmt: skip
_SAME = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "clone", "contiguous", "alias", "detach", "slice"}
_OF_INTEGERS = {
    "mul", "div", "add", "sub", "rsub", "pow", "where", "_to_copy", "clamp", "clamp_min",
}  # fmt: skip
_SUMS = {"add", "sub", "rsub", "cat", "stack"}
_ALONG = {
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp",
    "sort", "topk", "flip", "roll", "diff", "argsort",
}  # fmt: skip
_IGNORED = -100  # torch's ignore_index
_ALIKE, _UNKNOWN = "alike", "unknown"
_DOUBLE = Spec(torch.float64, ())


def name_of(node: Node) -> str:
    """The op's own name: ``mm`` of ``aten.mm.default``."""
    return node.op.split(".")[1] if "." in node.op else node.op


class _Total(NamedTuple):
    """A number of a part that adds up over parts: a value, times a size. is_length: how many numbers the value has."""

    value: Value
    size: Dim | None = None
    is_length: bool = False
    shift: float = 0.0
    least: float = -math.inf


class _Sum(NamedTuple):
    """Rows, or a sum over rows, times ``powers`` of totals by their keys. is_affine: a term without rows was added.

    total: of a sum through which no gradient flows, the plain sum that it is a clamped or shifted one of.
    """

    has_rows: bool
    powers: frozenset[tuple[Hashable, int]] = frozenset()
    is_affine: bool = False
    total: _Total | None = None

    def times(self, powers: Iterable[tuple[Hashable, int]], sign: int = 1) -> _Sum:
        """The same, times these powers of totals."""
        found = dict(self.powers)
        for key, power in powers:
            found[key] = found.get(key, 0) + sign * power
        return self._replace(powers=frozenset((key, power) for key, power in found.items() if power))


_State = _Sum | Reason | str


@dataclass(frozen=True)
class WeighedStep:
    """A step whose last fetches are the totals that its weights take, and the weights of its values.

    ``gradients``: by the node of a derivative, the weight of its values. ``values``: of fetched
    numbers, and of numbers that lead to losses; None for those whose weight the step does not give. ``merges``: of
    values that parts make of their rows, and that Variables take along no gradient, the weight by which the parts'
    values are certainly that of all rows. ``losses``: what the step differentiates. ``reasons``: of values that are no
    weighted means.
    """

    step: StepGraph
    totals: tuple[Value, ...] = ()
    gradients: Mapping[int, Weight] = field(default_factory=dict)
    values: Mapping[Value, Weight | None] = field(default_factory=dict)
    losses: tuple[Value, ...] = ()
    reasons: Mapping[Value, Reason] = field(default_factory=dict)
    mixed: tuple[Reason, ...] = ()  # of gradients of several losses
    merges: Mapping[Value, Weight] = field(default_factory=dict)

    def of(self, value: Value) -> Weight:
        """The weight of a derivative, or of a fetched number."""
        return self.gradients.get(value.node) or self.values.get(value) or ROWS

    @property
    def of_fetches(self) -> list[Weight]:
        """The weight of each fetch of the step as it was."""
        return [self.values.get(v) or ROWS for v in self.step.fetches[: len(self.step.fetches) - len(self.totals)]]


def weighed(step: StepGraph) -> WeighedStep:
    """The weights of a step's gradients and fetches; the step itself where all of them are rows."""
    known, key = step.graph.attached.setdefault("weighed", {}), (step.fetches, step.feeds)
    if key not in known:
        known[key] = _Weighing(with_counts(step), step.whole).made()
    found: WeighedStep = known[key]
    return found


@dataclass
class _Weighing:
    """One analysis. recorded: the graph whose derivatives are known."""

    step: StepGraph
    recorded: Graph
    states: dict[Value, _State] = field(default_factory=dict)
    carrying: set[Value] = field(default_factory=set)  # values through which gradients flow
    totals: dict[Hashable, _Total] = field(default_factory=dict)
    loose: set[Hashable] = field(default_factory=set)  # totals that are those of rows, unless a target is ignored
    doubtful: set[Value] = field(default_factory=set)  # values of which no rule says that rows go by themselves

    def __post_init__(self) -> None:
        step = self.step
        self.by_id = step.whole.contents.by_id
        shapes = [self._spec(value).shape for value in step.feeds]
        self.batch = frozenset(s for shape in shapes if shape for s in _symbols(shape[0]))
        self.rows = set(self.batch)  # symbols of axes that rows lie on
        self.shown = set(feed_symbols(step.whole.contents, step.feeds))
        self.numbers: dict[Value, Hashable] = {}

    def _spec(self, value: Value) -> Spec:
        return self.by_id[value.node].outputs[value.index]

    # -- the result ---------------------------------------------------------------------------------------------

    def made(self) -> WeighedStep:
        """The weights."""
        step, by_id = self.step, self.by_id
        space = self.recorded.attached.get("workspace")
        ids = {node.id for node in step.graph.nodes}
        derivatives = [d for d in (() if space is None else space.derivatives) if d.nodes & ids]
        losses = tuple(dict.fromkeys(y for d in derivatives for y in d.ys if y.node in by_id))
        fetched = [v for v in step.fetches if by_id[v.node].outputs]
        if not self.batch:
            return WeighedStep(step, losses=losses)
        reached = step_graph(step.whole, (*losses, *fetched, *self._written()), step.feeds).graph
        for value in step.feeds:
            self.states[value] = _Sum(True) if self._has_rows(self._spec(value)) else _ALIKE
        state = resolve(reached, set(step.feeds))
        for node in state.nodes.values():
            self._visit(node)
        found: dict[Hashable, Value] = {}
        made: list[Node] = []

        def weight(value: Value) -> Weight | Reason | None:
            key = self._weight(value)
            if key is None or isinstance(key, Reason | Weight):
                return key
            total = self.totals[key]
            if key not in found:
                found[key] = self._node_of(total, made)
            return Weight(found[key], total.shift, total.least)

        gradients: dict[int, Weight] = {}
        mixed: list[Reason] = []
        refused: dict[Value, Reason] = {}
        for d in derivatives:
            each = [weight(y) for y in d.ys] if d.is_plain and all(y.node in by_id for y in d.ys) else []
            known = {one for one in each if isinstance(one, Weight)}
            refused |= {y: one for y, one in zip(d.ys, each, strict=False) if isinstance(one, Reason)}
            if len(known) > 1:
                mixed.append(Reason("weights", by_id[d.ys[-1].node]))
            is_one = len(known) == 1 and all(isinstance(one, Weight) for one in each)
            gradients |= dict.fromkeys(d.nodes, *known) if is_one else dict.fromkeys(d.nodes, ROWS)
        for node in step.whole.nodes:  # an optimizer takes a derivative of a table by rows
            if "gradient" in node.tags and node.id not in gradients:
                of = next((gradients[value.node] for value in node.inputs if value.node in gradients), None)
                gradients |= {} if of is None else {node.id: of}
        ends = {v: state.resolved(v) for v in fetched if self._is_number(v)}
        refused |= {value: one for value in ends.values() if isinstance(one := weight(value), Reason)}
        values = {value: self._known(value, found) for value in self.states if self._is_number(value)}
        values |= {value: values.get(end) for value, end in ends.items()}
        reasons = {value: one for value, one in self.states.items() if isinstance(one, Reason)} | refused
        about = gradients, values, losses, reasons, tuple(mixed), dict(self._merges(found))
        if not found:
            return WeighedStep(step, (), *about)
        nodes = tuple(distinct((*step.whole.nodes, *made)))
        graph, totals = step.whole.derive(Contents(nodes, step.whole.contents.guards)), tuple(found.values())
        return WeighedStep(step_graph(graph, (*step.fetches, *totals), step.feeds), totals, *about)

    def _known(self, value: Value, found: Mapping[Hashable, Value]) -> Weight | None:
        """The weight of a number, as far as the step gives its total; rows where nothing is known."""
        key = self._weight(value)
        if key is None:
            return None if isinstance(self.states.get(value), _Sum) else ROWS
        if isinstance(key, Reason | Weight):
            return key if isinstance(key, Weight) else ROWS
        return Weight(found[key], self.totals[key].shift, self.totals[key].least) if key in found else None

    def _written(self) -> Iterator[Value]:
        """The values that Variables take, but along a gradient."""
        behind: set[int] = set()
        for node in self.step.graph.nodes:
            is_behind = not {"update", "gradient"}.isdisjoint(node.tags) or any(v.node in behind for v in node.inputs)
            if is_behind:
                behind.add(node.id)
            elif node.op == "tfnb.assign":
                yield node.inputs[0]

    def _merges(self, found: Mapping[Hashable, Value]) -> Iterator[tuple[Value, Weight]]:
        """The weights of values that are certainly weighted means of, or sums over, the parts' ones."""
        for value, state in self.states.items():
            if isinstance(state, _Sum) and not state.has_rows and value not in self.doubtful:
                key, dtype = self._weight(value), self._spec(value).dtype
                weight = key if isinstance(key, Weight) else None
                if key in found:
                    weight = Weight(found[key], self.totals[key].shift, self.totals[key].least)
                if weight is not None and (flows(dtype) or (weight == SUM and dtype is not torch.bool)):
                    yield value, weight

    def _is_number(self, value: Value) -> bool:
        return flows(self._spec(value).dtype) and varying_axis(self._spec(value)) is None

    def _weight(self, value: Value) -> Hashable | Weight | Reason | None:
        """The weight of a value, or the key of the total that it takes; None: nothing is known."""
        state = self.states.get(value, _UNKNOWN)
        if isinstance(state, Reason):
            return state
        if state == _ALIKE:
            return ROWS
        if not isinstance(state, _Sum):
            return None
        powers = dict(state.powers)
        if state.total is not None and _is_bounded(state.total):
            return None
        if powers == {"rows": -1}:
            return ROWS
        if not powers and not state.is_affine:
            return SUM
        if list(powers.values()) == [-1]:
            (key,) = powers
            total = self.totals[key]
            if not state.is_affine or (not total.shift and total.least == -math.inf):
                return key
        kind = "constant" if state.is_affine and list(powers.values()) in ([], [-1]) else "weights"
        return Reason(kind, self.by_id[value.node])

    def _node_of(self, total: _Total, made: list[Node]) -> Value:
        """A node that computes a total, as a number of 64 bits on the CPU."""
        if total.is_length:
            made.append(_made("tfnb.length_of.default", (total.value,), {"value": Ref(0)}))
            return made[-1].value()
        cpu = {"dtype": torch.float64, "device": torch.device("cpu")}
        value = total.value
        if self._spec(value).shape:
            spec = replace(self._spec(value), shape=())
            made.append(
                replace(_made("aten.reshape.default", (value,), {"self": Ref(0), "shape": []}), outputs=(spec,))
            )
            value = made[-1].value()
        made.append(_made("aten._to_copy.default", (value,), {"self": Ref(0), **cpu}))
        if total.size is not None:
            inputs = (made[-1].value(),)
            made.append(_made("aten.mul.Tensor", inputs, {"self": Ref(0), "other": total.size}))
        return made[-1].value()

    # -- states ---------------------------------------------------------------------------------------------------

    def _visit(self, node: Node) -> None:
        """The states of a node's outputs."""
        given = {v: self.states.get(v, _ALIKE) for v in node.inputs}
        hangs = any(state != _ALIKE for state in given.values())
        if hangs:  # a size that only these rows tell is one of rows
            self.rows.update(s for o in node.outputs for d in o.shape for s in _symbols(d) if s not in self.shown)
        self._carry(node)
        for index, spec in enumerate(node.outputs):
            value = node.value(index)
            if value not in self.states:
                self.states[value] = self._state(node, index, spec, given, hangs)
                if hangs and self._is_doubtful(node, given):
                    self.doubtful.add(value)

    def _is_doubtful(self, node: Node, given: Mapping[Value, _State]) -> bool:
        """Whether a node takes its rows to go by themselves for want of a rule, or one of its operands does."""
        is_odd = node.op in REGIONS or any(isinstance(state, Reason) or state == _UNKNOWN for state in given.values())
        sizes = [d for spec in node.outputs for d in spec.shape if isinstance(d, Dim) and _symbols(d) & self.rows]
        return is_odd or any(v in self.doubtful for v in node.inputs) or not all(map(self._adds_up, sizes))

    def _carry(self, node: Node) -> None:
        """Note the outputs through which gradients flow."""
        if node.op == "tfnb.read":
            carries = node.attrs["variable"].trainable
        elif node.op == "aten.detach.default" or "no_grad" in node.tags:
            carries = False
        else:
            carries = any(v in self.carrying for v in node.inputs)
        if carries:
            is_entropy = REDUCTIONS.get(name_of(node)) == "entropy"  # its second output counts
            values = (node.value(i) for i, o in enumerate(node.outputs) if flows(o.dtype) and not (i and is_entropy))
            self.carrying.update(values)

    def _state(self, node: Node, index: int, spec: Spec, given: Mapping[Value, _State], hangs: bool) -> _State:
        has_rows, op = self._has_rows(spec), name_of(node)
        refused = {v: state for v, state in given.items() if isinstance(state, Reason)}
        reason = next((state for v, state in refused.items() if flows(self._spec(v).dtype) or op in _OF_INTEGERS), None)
        if reason is not None:
            return reason
        if not hangs or facts_of(node.op).shape_only:
            return self._begun(node, spec, has_rows)
        if node.op in REGIONS and any(isinstance(state, _Sum) and not state.has_rows for state in given.values()):
            return _Sum(True) if has_rows else Reason("bent", node)
        if refused or any(state == _UNKNOWN for state in given.values()) or "update" in node.tags:
            return _Sum(True) if has_rows else _UNKNOWN
        if has_rows:
            return self._of_rows(node, spec, given)
        if any(isinstance(state, _Sum) and state.has_rows for state in given.values()):
            return self._reduced(node, index, given)
        return self._of_sums(node, given)

    def _begun(self, node: Node, spec: Spec, has_rows: bool) -> _State:
        """The state of a value that depends on no rows, but perhaps on their number."""
        if has_rows:
            crossed = sum(bool(_symbols(size) & self.rows) for size in spec.shape) > 1
            return Reason("across", node) if crossed else _Sum(True)
        if not self.rows.intersection(node.symbols):
            return _ALIKE
        is_count = node.op == NUMBER and self._adds_up(node.attrs["fill_value"])
        return _Sum(False) if is_count else _UNKNOWN

    def _of_rows(self, node: Node, spec: Spec, given: Mapping[Value, _State]) -> _State:
        """The state of a value that has rows."""
        op = name_of(node)
        sums = [state for state in given.values() if isinstance(state, _Sum)]
        widest = max(sum(bool(_symbols(d) & self.rows) for d in self._spec(v).shape) for v in node.inputs)
        crossed = sum(bool(_symbols(size) & self.rows) for size in spec.shape) > max(1, widest)
        if crossed or (op in _ALONG and self._is_along(node)):
            return Reason("across", node)
        is_plain = all(state.has_rows and not state.powers for state in sums)
        if op in ("mul", "div") and (not is_plain or self.rows.intersection(node.symbols)):
            return self._product(node, given)
        if is_plain:
            return _Sum(True)
        same = len({state.powers for state in sums}) == 1 and all(state.has_rows for state in sums)
        is_kept = (op in _SUMS and len(sums) == len(given)) or (op in LINEAR and len(given) == 1)
        return sums[0] if same and is_kept else Reason("across", node)

    def _is_along(self, node: Node) -> bool:
        """Whether an op goes along the axis of rows."""
        shape, dim = self._spec(node.inputs[0]).shape, _argument(node, "dim", _argument(node, "dims", -1))
        axes = range(len(shape)) if dim == [] else dim if isinstance(dim, (list, tuple)) else [dim]
        return any(isinstance(axis, int) and bool(_symbols(shape[axis]) & self.rows) for axis in axes if shape)

    def _product(self, node: Node, given: Mapping[Value, _State]) -> _State:
        """The state of a product, a quotient, or a linear function of one value; rows times a sum cross parts."""
        op = name_of(node)
        operands = [given[v] for v in node.inputs]
        sums = [state for state in operands if isinstance(state, _Sum)]
        if op == "div" and _argument(node, "rounding_mode", None) is not None:
            return Reason("function", node)
        if op == "div" and len(operands) == 2 and isinstance(operands[1], _Sum) and not operands[1].has_rows:
            return self._divided(node, operands[0])
        if any(state.total is not None and _is_bounded(state.total) for state in sums):
            return Reason("function", node)
        if op == "div" and len(operands) == 2 and operands[1] != _ALIKE:
            assert isinstance(operands[1], _Sum)
            if not isinstance(operands[0], _Sum):
                return Reason("across", node)
            return operands[0].times(operands[1].powers, -1)
        if len(sums) == 2:
            if any(state.is_affine or not state.has_rows for state in sums):
                return Reason("across" if sums[0].has_rows or sums[1].has_rows else "function", node)
            return sums[0].times(sums[1].powers)
        return self._scaled(node, sums[0])

    def _scaled(self, node: Node, state: _Sum) -> _State:
        """The state times a number that the number of rows may decide."""
        factor = next((a for a in node.attrs.values() if isinstance(a, Dim) and self.rows & set(a.symbols)), None)
        if factor is None:
            return state._replace(total=None)
        degree = self._degree(factor)
        if degree is None or state.is_affine:
            return Reason("function", node)
        return state.times([("rows", degree if name_of(node) == "mul" else -degree)])._replace(total=None)

    def _divided(self, node: Node, over: _State) -> _State:
        """The state of a value divided by a sum over rows."""
        divisor = node.inputs[-1]
        state = self.states[divisor]
        assert isinstance(state, _Sum)
        total = state.total or self._total(divisor, state)
        if divisor in self.carrying or total is None or math.prod(_sizes(self._spec(divisor))) != 1:
            return Reason("weighted", node)
        if over == _ALIKE:
            return Reason("function", node)
        if not isinstance(over, _Sum) or over.is_affine or (over.total is not None and _is_bounded(over.total)):
            return Reason("function", node)
        key = self._key(divisor, total)
        self.totals.setdefault(key, total)
        return over.times(state.powers, -1).times([(key, -1)])._replace(total=None)

    def _total(self, value: Value, state: _Sum) -> _Total | None:
        """The plain sum over rows that a value is a multiple of."""
        if state.is_affine:
            return None
        if not state.powers:
            return _Total(value)
        return _Total(value, self._one) if state.powers == {("rows", -1)} and self._one is not None else None

    @cached_property
    def _one(self) -> Dim | None:
        """The number of rows as a size."""
        shapes = (self._spec(value).shape for value in self.step.feeds)
        return next((s[0] for s in shapes if s and isinstance(s[0], Dim) and self._degree(s[0]) == 1), None)

    def _reduced(self, node: Node, index: int, given: Mapping[Value, _State]) -> _State:
        """The state of a number that an op makes of rows."""
        op, states = name_of(node), list(given.values())
        sums = [state for state in states if isinstance(state, _Sum)]
        kind = REDUCTIONS.get(op, "")
        plain = all(state.has_rows and not state.powers for state in sums)
        reduction = _argument(node, "reduction", None)
        if kind in ("extreme", "statistic"):
            return Reason(kind, node)
        if kind in ("sum", "mean"):
            if op != "sum" and not plain and (op != "mean" or not sums[0].has_rows):
                return Reason("function", node)
            found = sums[0]._replace(has_rows=False)
            return found if kind == "sum" else self._counted(node, found, self._length(node))
        if kind == "product":
            rows = [state for state in sums if state.has_rows]
            if len(rows) < len(sums) or op not in BILINEAR or len(rows) != 2:
                return Reason("product", node)
            return rows[0].times(rows[1].powers)._replace(has_rows=False)
        if not plain:
            return Reason("across" if all(state.has_rows for state in sums) else "function", node)
        if kind == "entropy":
            return self._entropy(node, index, reduction)
        if reduction == 2:
            return _Sum(False)
        if reduction == 1:
            return self._counted(node, _Sum(False), _size(_broadcast([self._spec(v).shape for v in node.inputs[:2]])))
        return _UNKNOWN

    def _entropy(self, node: Node, index: int, reduction: object) -> _State:
        if index:
            return _Sum(False)
        if reduction != 1:
            return _Sum(False)
        total = _Total(node.value(1))
        key = self._key(node.value(1), total)
        self.totals.setdefault(key, total)
        length = _size(self._spec(node.inputs[1]).shape)
        is_default = _argument(node, "ignore_index", _IGNORED) == _IGNORED and len(node.inputs) == 2
        if is_default and self._degree(length) == 1:
            self.loose.add(key)
        return _Sum(False, frozenset([(key, -1)]))

    def _length(self, node: Node) -> Dim:
        """How many numbers a mean is over, but for a factor."""
        shape = self._spec(node.inputs[0]).shape
        dim = _argument(node, "dim", None)
        axes = range(len(shape)) if dim is None or dim == [] else dim
        return _size([shape[axis] for axis in axes])

    def _counted(self, node: Node, state: _Sum, size: Dim) -> _State:
        """A sum divided by the number of what it is of."""
        if self._degree(size) == 1:
            return state.times([("rows", -1)])
        if not self._adds_up(size):
            return Reason("across", node)
        key = "size", size.expr
        of = next(v for v in node.inputs if self._has_rows(self._spec(v)))
        self.totals.setdefault(key, _Total(of, is_length=True))
        return state.times([(key, -1)])

    def _of_sums(self, node: Node, given: Mapping[Value, _State]) -> _State:
        """The state of a number that is computed from sums over rows."""
        op, operands = name_of(node), [given[v] for v in node.inputs]
        sums = [state for state in operands if isinstance(state, _Sum)]
        free = node.inputs and not any(v in self.carrying for v in node.inputs)
        if free and (bound := self._bound(node)) is not None:
            return bound
        if op in ("mul", "div"):
            return self._product(node, given)
        if any(state.total is not None and _is_bounded(state.total) for state in sums):
            return Reason("function", node)
        if op in LINEAR and len(operands) == 1:
            return sums[0]._replace(total=None)
        if op in BILINEAR and len(sums) == 1:
            return sums[0]._replace(total=None)
        if op in _SUMS and not self.rows.intersection(node.symbols):
            return self._added(node, operands, sums)
        return Reason("bent" if node.op in REGIONS or op in _BENDS else "function", node)

    def _added(self, node: Node, operands: list[_State], sums: list[_Sum]) -> _State:
        """The state of a sum of numbers."""
        if len({state.powers for state in sums}) > 1:
            sums = [self._loosened(state) for state in sums]
            if len({state.powers for state in sums}) > 1:
                return Reason("weights", node)
        number = _argument(node, "other", 0) if len(operands) == 1 else 0
        adds = len(sums) < len(operands) or bool(number)
        return sums[0]._replace(is_affine=adds or any(state.is_affine for state in sums), total=None)

    def _loosened(self, state: _Sum) -> _Sum:
        """The state with all targets of a cross entropy taken to count, whose ignore_index is torch's own."""
        keys = [key for key, _ in state.powers if key in self.loose]
        return state.times([(key, -power) for key, power in state.powers if key in keys]).times(
            ("rows", power) for key, power in state.powers if key in keys
        )

    def _bound(self, node: Node) -> _State | None:
        """The state of a plain sum over rows that is shifted, or clamped from below, by a number."""
        op, state = name_of(node), self.states.get(node.inputs[0])
        if (
            not isinstance(state, _Sum)
            or state.powers
            or state.is_affine
            or any(self.states.get(v) != _ALIKE for v in node.inputs[1:])
        ):
            return None
        total = state.total or _Total(node.inputs[0])
        if op in ("_to_copy", *_SAME) and len(node.inputs) == 1 and state.total is not None:
            dtype = _argument(node, "dtype", None)
            return state if dtype is None or flows(dtype) else None
        number = self._number(node)
        if number is None:
            return None
        if op == "add" and _argument(node, "alpha", 1) == 1:
            total = total._replace(shift=total.shift + number, least=total.least + number)
        elif op in ("clamp", "clamp_min", "maximum"):
            total = total._replace(least=max(total.least, number))
        else:
            return None
        return state._replace(total=total)

    def _number(self, node: Node) -> float | None:
        """The second operand of an op, if it is a number that is known."""
        if len(node.inputs) > 1:
            above = self.by_id[node.inputs[1].node]
            while above.op == "aten.detach.default":
                above = self.by_id[above.inputs[0].node]
            tensor = above.attrs.get("value") if above.op == "tfnb.constant" else None
            return float(tensor) if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 else None
        if node.attrs.get("max") is not None:
            return None
        found = node.attrs.get("other" if name_of(node) in ("add", "maximum") else "min")
        return float(found) if isinstance(found, (int, float)) else None

    # -- sizes ----------------------------------------------------------------------------------------------------

    def _has_rows(self, spec: Spec) -> bool:
        return any(_symbols(size) & self.rows for size in spec.shape)

    def _at(self, size: Dim, batch: float, of_data: float) -> float:
        """The size, with sizes of the batch and those that only data tell at these numbers."""
        sizes = {s: batch if s in self.batch else of_data if s in self.rows else 7 for s in size.symbols}
        return float(size.evaluate(sizes))

    def _degree(self, size: Dim) -> int | None:
        """The power of the number of rows that a size is a multiple of; None for others."""
        try:
            found = {rows: self._at(size, rows, 40) for rows in (60, 7, 11)}
            if self._at(size, 60, 80) != found[60] or not found[60]:
                return None
        except ShapeError:
            return None
        return next((p for p in (-1, 1) if all(_near(y, found[60] * (n / 60) ** p) for n, y in found.items())), None)

    def _adds_up(self, size: Dim) -> bool:
        """Whether the sizes of parts add up to that of the whole."""
        try:
            # (rows, sizes that only data tell) of two parts; a size // n adds up for some of them only
            pairs = (((60, 30), (120, 80)), ((7, 3), (8, 6)), ((11, 5), (13, 9)))
            wholes = [self._at(size, a[0] + b[0], a[1] + b[1]) for a, b in pairs]
            sums = [self._at(size, *a) + self._at(size, *b) for a, b in pairs]
            return all(wholes) and all(map(_near, wholes, sums))
        except ShapeError:
            return False

    # -- equal totals -----------------------------------------------------------------------------------------------

    def _key(self, value: Value, total: _Total) -> Hashable:
        """The same for totals that are equal, whatever nodes compute them."""
        return self._number_of(total.value), None if total.size is None else total.size.expr, total.shift, total.least

    def _number_of(self, value: Value) -> Hashable:
        """A key of a value by what computes it: equal for equal computations."""
        stack = [value]
        while stack:
            node = self.by_id[stack[-1].node]
            above = [] if stack[-1] in self.step.feeds else [v for v in node.inputs if v not in self.numbers]
            if above:
                stack.extend(above)
                continue
            at = stack.pop()
            if at not in self.numbers:
                self.numbers[at] = self._numbered(node, at)
        return self.numbers[value]

    def _numbered(self, node: Node, value: Value) -> Hashable:
        op, inputs = name_of(node), [self.numbers.get(v) for v in node.inputs]
        if value in self.step.feeds or (node.op in STRUCTURAL and node.op != "tfnb.read") or node.stream is not None:
            return value
        if node.op == "tfnb.read":
            return "read", id(node.attrs["variable"]), node.id if node.control else 0
        if op in _SAME and len(inputs) == 1 and (op != "slice" or node.outputs[0] == self._spec(node.inputs[0])):
            return inputs[0]
        if op == "_to_copy" and _widens(self._spec(node.inputs[0]).dtype, node.outputs[0].dtype):
            return inputs[0]
        if op in ("bitwise_not", "logical_not") and self._spec(node.inputs[0]).dtype is torch.bool:
            one: object = inputs[0]
            return ("ne", *one[1:]) if isinstance(one, tuple) and one[0] == "eq" else ("not", one)
        if node.op in ("aten.eq.Scalar", "aten.ne.Scalar"):
            return op, inputs[0], node.attrs.get("other")
        if REDUCTIONS.get(op) == "entropy" and value.index == 1:
            ignored = _argument(node, "ignore_index", _IGNORED)
            if len(inputs) < 3:
                return "sum", ("ne", inputs[1], ignored)
            return "sum", ("classes", inputs[2], inputs[1], ignored)
        if node.op == "aten.sum.default" or (op == "sum" and _argument(node, "dim", None) in (None, [])):
            return "sum", inputs[0]
        if op == "masked_fill" and (found := _classes(node, inputs)) is not None:
            return found
        if op == "masked_fill":
            return op, inputs[0], inputs[1], node.attrs.get("value")
        shapes = [self._spec(v).shape for v in node.inputs]
        spread = tuple(map(str, shapes)) if len(set(shapes)) > 1 else ()  # of views that are joined in another way
        return node.op, tuple(inputs), frozen(node.attrs), value.index, spread


def _classes(node: Node, inputs: list[Any]) -> Hashable | None:
    """The key of the class weights of targets that count, as cross entropy with label smoothing gathers them."""
    match inputs:
        case [("aten.gather.default", (weight, ("masked_fill", target, mask, 0)), _, 0, _), again] if (
            mask == again and isinstance(mask, tuple) and mask[0] == "eq" and mask[1] == target
        ):
            return "classes", weight, target, mask[2]
    return None


def _widens(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether a conversion changes no number, but for rounding."""
    return old is torch.bool or flows(new) or (not flows(old) and torch.can_cast(old, new))


def _is_bounded(total: _Total) -> bool:
    return bool(total.shift) or total.least > -math.inf


def _sizes(spec: Spec) -> list[int]:
    """The sizes of a shape, 0 for one that varies."""
    return [size if isinstance(size, int) else 0 for size in spec.shape]


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-12)


def _symbols(size: int | Dim) -> set[str]:
    return set(size.symbols) if isinstance(size, Dim) else set()


def _size(shape: Sequence[int | Dim]) -> Dim:
    """The number of numbers of a shape.

    >>> _size([Dim("2*B"), 3])
    (2*B)*(3)
    """
    return Dim("*".join(f"({size})" for size in shape) or "1")


def _broadcast(shapes: Sequence[Sequence[int | Dim]]) -> list[int | Dim]:
    """The shape that others broadcast to.

    >>> _broadcast([(Dim("B"), 1), (4,)])
    [B, 4]
    """
    axes = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return [next((size for size in sizes if size != 1), 1) for sizes in axes][::-1]


def _argument(node: Node, name: str, default: object) -> Any:
    """An argument of a node's op, or the one that its schema gives."""
    if name in node.attrs:
        return node.attrs[name]
    if node.op in STRUCTURAL or node.op.count(".") != 2:
        return default
    arguments = overload(node.op)._schema.arguments
    return next((a.default_value for a in arguments if a.name == name and a.has_default_value()), default)


def _made(op: str, inputs: tuple[Value, ...], attrs: Mapping[str, Any]) -> Node:
    return Node(id=new_id(), name="weight", op=op, inputs=inputs, outputs=(_DOUBLE,), attrs=dict(attrs))
