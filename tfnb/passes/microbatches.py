"""A step over microbatches: consecutive ranges of a batch's rows are done one after the other, and update once.

The part of a step that depends on rows becomes the body of one counted loop, over the microbatches. Gradients are
carried as a sum weighted as the servers of a synchronous round average the tasks' gradients: a microbatch is a worker
that comes later. Shares of rows are known before; of other weights (`tfnb.passes.flow.row_weights`) the loop carries
the sum of their totals, too, by which the gradients are divided behind it. Nodes computed from averaged gradients, and
the updates, stand behind the loop and run once. Buffers of modules, such as the running statistics of batch norm, and
other Variables written from the batch along no gradient are carried from microbatch to microbatch. Pure; imports the
graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from tfnb.errors import InvalidArgument, Unimplemented
from tfnb.graph import Contents, Dim, Node, Ref, Spec, Subgraph, Value, Variable
from tfnb.graph.contents import distinct, unique
from tfnb.graph.graph import new_id
from tfnb.graph.ops import GRADIENT, PRESENT, WHILE
from tfnb.graph.spec import flows
from tfnb.graph.subgraph import uses_queues
from tfnb.passes.flow.merges import MERGES, ROWS, SUM, Weight, begin, is_slope, varying_axis, way_of
from tfnb.passes.flow.row_weights import weighed
from tfnb.passes.prune import StepGraph, feed_symbols, prune
from tfnb.passes.resolve import ResolvedStep, resolve

_NARROW = (torch.float16, torch.bfloat16)  # summed in float32
_SHARE = Spec(torch.float64, ())


def divide(rows: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive ranges of nearly equal length, none empty.

    >>> divide(7, 3), divide(2, 3)
    ([(0, 3), (3, 5), (5, 7)], [(0, 1), (1, 2)])
    """
    parts = max(1, min(parts, rows))
    short, longer = divmod(rows, parts)
    stops = [short * (i + 1) + min(i + 1, longer) for i in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


class LoopResult(NamedTuple):
    """How the results of several loops, each over some of the microbatches, become that of one.

    way: as of `tfnb.passes.flow.merges`. seen: of a sum over weights, the result of the same loop that says whether
    there was any weight.
    """

    way: str
    seen: int | None = None


@dataclass(frozen=True)
class Microbatches:
    """``step`` over microbatches.

    Feeds: of the original step, then for each divided feed the shapes of its microbatches, [microbatches, rank], and
    the microbatches' shares of the rows. ``divided``: for each original feed, whether it is divided. ``moved``:
    Variables that each microbatch writes, without statistics of batch norm. ``loop``: the id of the loop; ``results``:
    its outputs.
    """

    step: StepGraph
    divided: tuple[bool, ...]
    moved: tuple[Variable, ...]
    loop: int
    results: tuple[LoopResult, ...]


def in_microbatches(step: StepGraph, most: int = 1, schedule: str = "") -> Microbatches:
    """The step with a loop over microbatches, one after the other.

    schedule: of a pipeline, over ``most`` microbatches, see `tfnb.passes.flow.microbatch_schedules`.

    Fetches: operations, and numbers, each merged by its way of `tfnb.passes.flow.merges`: a mean over rows is the mean
    over microbatches, weighted by rows or as `tfnb.passes.flow.row_weights` says, a sum or count their sum, an extreme
    that of all rows. Raises InvalidArgument where no feed has rows, Unimplemented naming what microbatches cannot do.
    """
    return _Loop(step, most, schedule).made()


@dataclass
class _Loop:
    """One loop over microbatches in the making."""

    recorded: StepGraph
    most: int = 1  # microbatches at a time
    schedule: str = ""
    state: ResolvedStep = field(init=False)
    gradient: set[int] = field(default_factory=set)  # nodes that depend on a recorded derivative
    varying: set[int] = field(default_factory=set)  # nodes whose values differ by microbatch

    def __post_init__(self) -> None:
        self.weighed = weighed(self.recorded)
        with_totals, recorded = self.weighed.step, self.recorded
        self.step = step = StepGraph(with_totals.whole, with_totals.graph, recorded.fetches, recorded.feeds)
        self.by_id, self.fed = step.whole.contents.by_id, set(step.feeds)
        shapes = [self._spec(value).shape for value in step.feeds]
        self.divided = tuple(bool(shape) and isinstance(shape[0], Dim) for shape in shapes)
        self.rows = {v for v, is_divided in zip(step.feeds, self.divided, strict=True) if is_divided}
        if not self.rows:
            raise InvalidArgument(
                "microbatches divide the rows of a batch, and no placeholder that is fed has a size that varies on "
                f"axis 0: {', '.join(self.by_id[v.node].name for v in step.feeds) or 'nothing is fed'}"
            )
        symbols = {s for v in self.rows for s in _symbols(self._spec(v).shape[:1])}
        self.state = resolve(step.graph, self.fed)
        for node in self.state.nodes.values():
            self._refuse(node)
            above = [v for v in node.inputs if v not in self.fed and not is_slope(self.by_id[v.node], v.index)]
            if "gradient" in node.tags or any(v.node in self.gradient for v in above):
                self.gradient.add(node.id)
            sizes = [*node.symbols, *(s for spec in node.outputs for s in _symbols(spec.shape))]
            differs = draws(node) or "gradient" in node.tags or not symbols.isdisjoint(sizes)
            is_constant = node.op == "tfnb.constant"  # of a derivative, too: a loop that is cut has none inside
            if (differs and not is_constant) or any(v in self.rows or v.node in self.varying for v in node.inputs):
                self.varying.add(node.id)
        self.moved = self._moved()
        while (more := self._moved()) != self.moved:  # a buffer that is read moves others
            self.moved = more

    def _refuse(self, node: Node) -> None:
        if node.op == "tfnb.print" or uses_queues(node):
            what = "prints" if node.op == "tfnb.print" else "uses a queue"
            raise Unimplemented(f"{node.name} {what}, once in a step, which microbatches would do several times")

    def _spec(self, value: Value) -> Spec:
        return self.by_id[value.node].outputs[value.index]

    def _moved(self) -> dict[Variable, Value]:
        """Variables that each microbatch writes, with the written values; values computed from reads of them vary from
        here on.
        """
        found = {
            variable: value for variable, value in self.state.final.items()
            if value.node not in self.state.updated and value.node not in self.gradient
            and (value in self.rows or value.node in self.varying or self._is_moved_by_forward(variable, value))
        }  # fmt: skip
        for node in self.state.nodes.values():
            if (node.op == "tfnb.read" and node.attrs["variable"] in found) or any(
                v.node in self.varying and v not in self.fed for v in node.inputs
            ):
                self.varying.add(node.id)
        return found

    def _is_moved_by_forward(self, variable: Variable, value: Value) -> bool:
        """Whether a buffer's value, of no rows, is computed above a derivative, as batch norm counts its batches.

        A count or an average of weights below the last ``backward()`` is one of steps.
        """
        if variable.held is not None and variable.held.is_of_batch_norm():
            return True
        stack, seen = [value] if _is_buffer(variable) else [], set[int]()
        while stack:
            value = stack.pop()
            node = None if value in self.fed else self.state.nodes[value.node]
            if node is None or node.id in seen or node.op in ("tfnb.read", "tfnb.constant") or self._is_behind(node):
                continue
            if node.id < self._last_derivative:
                return True
            seen.add(node.id)
            stack.extend(node.inputs)
        return False

    @cached_property
    def _last_derivative(self) -> float:
        return max((id for id, node in self.state.nodes.items() if "gradient" in node.tags), default=math.inf)

    # -- borders ------------------------------------------------------------------------------------------------

    def _is_behind(self, node: Node) -> bool:
        """Whether a node runs once, behind the loop: updates, and nodes computed from averaged gradients."""
        return node.id in self.state.updated or (node.id in self.gradient and "gradient" not in node.tags)

    def _varies(self, value: Value) -> bool:
        return value in self.rows or (value not in self.fed and value.node in self.varying)

    @cached_property
    def behind(self) -> dict[int, Node]:
        """Nodes outside of the loop, by id: needed by updates and fetches, and run by no microbatch."""
        found: dict[int, Node] = {}
        stack = [v for variable, v in self.state.final.items() if variable not in self.moved]
        stack += [*self._fetched, *self._guards(behind=True)]
        while stack:
            value = stack.pop()
            node = None if value in self.fed else self.state.nodes[value.node]
            if node is None or node.id in found or (self._varies(value) and not self._is_behind(node)):
                continue
            found[node.id] = node
            stack.extend(node.inputs)
            stack.extend(Value(i) for i in node.control if not self._varies(Value(i)))
        return found

    def _guards(self, *, behind: bool) -> list[Value]:
        """The guards that each microbatch asks, or those of no rows, of averaged gradients and updates, asked once."""
        guards = [node for node in self.state.nodes.values() if node.op == "tfnb.guard"]
        return [Value(n.id) for n in guards if (n.id not in self.varying or self._is_behind(n)) is behind]

    @cached_property
    def borders(self) -> list[Value]:
        """Values of microbatches that are taken behind the loop, each once."""
        found: dict[Value, None] = {}
        for node in self.behind.values():
            found |= {v: None for v in node.inputs if v not in self.behind_values and self._varies(v)}
        for variable, value in self.state.final.items():
            if variable not in self.moved and value not in self.behind_values and self._varies(value):
                found[value] = None
        for value in self._fetched:
            if self._varies(value) and value not in self.behind_values:
                found[value] = None
        return list(found)

    @cached_property
    def behind_values(self) -> set[Value]:
        return {node.value(i) for node in self.behind.values() for i in range(len(node.outputs))}

    @cached_property
    def _fetched(self) -> list[Value]:
        """The fetched values, without the final values of moved Variables."""
        found = [self.state.resolved(v) for v in self.step.fetches if self.by_id[v.node].outputs]
        return [value for value in found if value not in self.moved.values()]

    def _way(self, value: Value) -> str:
        """The merge of the microbatches' values; raises Unimplemented for a value without one."""
        node, spec, is_fetched = self.by_id[value.node], self._spec(value), value in self._fetched
        derived = value not in self.fed and node.id in self.gradient
        if node.op == "tfnb.slices.default" and derived and not is_fetched:
            return "rows" if value.index == 0 else "entries"
        if derived and flows(spec.dtype) and varying_axis(spec) is None:
            return "mean"
        if PRESENT in node.tags:
            return "any"
        way = way_of(self.step.whole.contents, value, is_fed=value in self.fed)
        if is_fetched and not self._is_taken(value) and not isinstance(way, int) and MERGES[way].carried:
            return way
        where = f"  {node.source}" if node.source else ""
        raise Unimplemented(
            f"{node.name}, {spec}, depends on the rows of a microbatch and is no gradient, and "
            + ("is fetched: fetch or watch real numbers and counts" if is_fetched else "an update takes it")
            + f"; microbatches give the mean of gradients and watched numbers, extremes, and the sum of counts{where}"
        )

    def _ways(self) -> tuple[dict[Value, str], dict[Value, Weight]]:
        """The merge of each border value, and the weight of each mean that is not weighted by rows."""
        ways = {value: self._way(value) for value in self.borders}
        weights = {value: self.weighed.of(value) for value, way in ways.items() if way in ("mean", "rows")}
        ways |= {value: "sum" for value, weight in weights.items() if weight == SUM and ways[value] == "mean"}
        return ways, {value: weight for value, weight in weights.items() if weight != ROWS}

    def _is_taken(self, value: Value) -> bool:
        return any(value in node.inputs for node in self.behind.values())

    # -- the body -----------------------------------------------------------------------------------------------

    def _needed(self, roots: Iterable[Value]) -> dict[int, Node]:
        """Nodes that a microbatch runs for these values, by id."""
        found: dict[int, Node] = {}
        stack = list(roots)
        while stack:
            value = stack.pop()
            if value in self.fed or value.node in found or not self._varies(value):
                continue
            node = self.state.nodes[value.node]
            if node.id in self.state.updated:
                raise Unimplemented(
                    f"{node.name} is computed from an update, and the gradients of a microbatch from it"
                )
            if node.op == "tfnb.read":
                continue  # a Variable that moves
            found[node.id] = node
            stack.extend((*node.inputs, *map(Value, node.control)))
        return {node.id: node for node in self.state.nodes.values() if node.id in found}

    def made(self) -> Microbatches:
        """Build the step."""
        ways, weights = self._ways()
        found = dict.fromkeys(weight for weight in weights.values() if isinstance(weight.total, Value))
        sums = [_TotalInLoop(weight) for weight in found]
        roots = [*self.borders, *self.moved.values(), *self._guards(behind=False), *(each.total for each in sums)]
        inner = self._needed(roots)
        build = _Build(self, ways, weights, sums)
        shapes, shares = build.fed_more()
        body = _Body(self, ways, weights, sums, inner)
        part = body.made()
        return build.step_of(part, body.captured, shapes, shares, inner)

    @cached_property
    def last_assigns(self) -> dict[Variable, Node]:
        """The last assignment of each Variable that the step writes."""
        return {node.attrs["variable"]: node for node in self.step.graph.nodes if node.op == "tfnb.assign"}

    @cached_property
    def symbols(self) -> set[str]:
        """Names of all sizes in the recorded graph."""
        return {symbol for node in self.by_id.values() for spec in node.outputs for symbol in _symbols(spec.shape)}


@dataclass
class _Merging:
    """How the values of microbatches become those of the batch.

    ways: the merge of each border value. weights: of means that are not weighted by rows. sums: the totals of these
    weights, which the loop carries.
    """

    loop: _Loop
    ways: Mapping[Value, str]
    weights: Mapping[Value, Weight]
    sums: Sequence[_TotalInLoop]

    @property
    def variables(self) -> list[Variable]:
        """Variables that each microbatch writes."""
        return list(self.loop.moved)

    @property
    def carried(self) -> list[Value]:
        """Values of which the loop carries a sum or an extreme."""
        return [value for value, way in self.ways.items() if MERGES[way].carried]

    @property
    def stacked(self) -> list[Value]:
        """Values that the loop gives for each microbatch."""
        return [value for value, way in self.ways.items() if not MERGES[way].carried]

    @property
    def wide(self) -> list[Spec]:
        """Specs of the carried values."""
        return [_wide(self.loop._spec(value)) for value in self.carried]


@dataclass
class _Body(_Merging):
    """The body of the loop in the making: the nodes that a microbatch runs.

    same: for values of the step, the inputs of the body that stand for them. captured: values that lie before the loop.
    """

    inner: dict[int, Node]
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    same: dict[Value, Value] = field(default_factory=dict)
    captured: dict[Value, None] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)  # of nodes in the body, by those in the step

    def made(self) -> Subgraph:
        """The body: its inputs are moved Variables, totals, a share of the rows, the rows, and captured values."""
        loop = self.loop
        self._take_variables()
        totals = [
            self._given(f"total.{loop.by_id[value.node].name}", spec)
            for value, spec in zip(self.carried, self.wide, strict=True)
        ]
        for each in self.sums:
            each.before = self._given("weights", _SHARE), self._given("weights.seen", _SHARE)
        share = self._given("share", _SHARE)  # the first of the rows: each stage counts microbatches by the shares
        for value in loop.step.feeds:
            if value in loop.rows:
                self._take(value)
        self._capture()
        # nodes that are done behind the loop as well get ids of their own
        self.ids = {i: new_id() if i in loop.behind else i for i in self.inner}
        self._compute()
        outputs = self._outputs(totals, share)
        return Subgraph(Contents(tuple(distinct(self.nodes))), tuple(self.inputs), tuple(outputs))

    def _given(self, name: str, spec: Spec) -> Value:
        """Another input."""
        node = Node(id=new_id(), name=name, op="tfnb.placeholder", outputs=(spec,))
        self.nodes.append(node)
        self.inputs.append(Value(node.id))
        return self.inputs[-1]

    def _take(self, value: Value) -> None:
        self.same[value] = self._given(self.loop.by_id[value.node].name, self.loop._spec(value))

    def _take_variables(self) -> None:
        """Inputs for the moved Variables, in place of their reads."""
        states = {variable: self._given(variable.name, variable.spec) for variable in self.loop.moved}
        for node in self.loop.state.nodes.values():
            if node.op == "tfnb.read" and node.attrs["variable"] in states:
                self.same[Value(node.id)] = states[node.attrs["variable"]]

    def _capture(self) -> None:
        """Inputs for what lies before the loop: values that nodes take, and feeds that show a size that is used."""
        loop, nodes = self.loop, self.inner.values()
        specs = [node.outputs[0] for node in self.nodes]  # of the inputs so far
        taken = [v for node in nodes for v in node.inputs]
        taken += [*loop.borders, *loop.moved.values()]
        captured = dict.fromkeys(v for v in taken if v not in self.same and v.node not in self.inner)
        sizes = {s for node in nodes for s in (*node.symbols, *(s for o in node.outputs for s in _symbols(o.shape)))}
        bound = {s for spec in (*specs, *map(loop._spec, captured)) for s in _symbols(spec.shape)}
        shown = feed_symbols(loop.step.whole.contents, loop.step.feeds)
        captured |= {shown[s][0]: None for s in sizes if s not in bound and s in shown and shown[s][0] not in self.same}
        for value in captured:
            self._take(value)
        self.captured = captured

    def _compute(self) -> None:
        """The nodes of a microbatch."""
        for node in self.inner.values():
            control = tuple(self.ids[i] for i in node.control if i in self.ids)
            inputs = tuple(map(self._of, node.inputs))
            self.nodes.append(replace(node, id=self.ids[node.id], inputs=inputs, control=control, effects=()))

    def _of(self, value: Value) -> Value:
        """The body's value for one of the step."""
        return self.same.get(value) or Value(self.ids[value.node], value.index)

    def _outputs(self, totals: Sequence[Value], share: Value) -> list[Value]:
        """Values of moved Variables, carried values, totals of weights, and stacked values after a microbatch."""
        outputs = [self._of(value) for value in self.loop.moved.values()]
        for each in self.sums:
            self.nodes += each.inside(self._of(each.total))
        by_weight = {each.weight: each for each in self.sums}
        for value, total, spec in zip(self.carried, totals, self.wide, strict=True):
            by = by_weight.get(self.weights.get(value, ROWS))
            self.nodes.append(_adding(self.ways[value], total, self._of(value), share, by, spec))
            outputs.append(self.nodes[-1].value())
        outputs += [value for each in self.sums for value in each.after]
        for value in self.stacked:
            if self.ways[value] != "rows" or self.weights.get(value) == SUM:
                outputs.append(self._of(value))
                continue
            by = by_weight.get(self.weights.get(value, ROWS))
            inputs = self._of(value), share if by is None else by.own
            node = op_node("weighted", "tfnb.times_weight.default", inputs, self.loop._spec(value), value=0, weight=1)
            self.nodes.append(replace(node, tags=GRADIENT))
            outputs.append(node.value())
        return outputs


def _adding(way: str, total: Value, value: Value, share: Value, weight: _TotalInLoop | None, spec: Spec) -> Node:
    """The node of the body that takes a microbatch's value to a carried one."""
    if weight is not None:
        node = weight.added(total, value, spec)
    elif way == "mean":
        node = op_node("add_share", MERGES[way].carried, (total, value, share), spec, total=0, value=1, share=2)
    else:
        node = op_node(way, MERGES[way].carried, (total, value), spec, self_=0, other=1)
    return replace(node, tags=GRADIENT)  # a stage takes up sums with its backward pass


@dataclass
class _TotalInLoop:
    """The total of a weight in a loop: its sum, and that of the weights' sizes, before and after a microbatch."""

    weight: Weight
    before: tuple[Value, Value] = field(init=False)
    after: tuple[Value, Value] = field(init=False)
    own: Value = field(init=False)  # weight of the microbatch

    @property
    def total(self) -> Value:
        """The microbatch's number, by a value of the step."""
        assert isinstance(self.weight.total, Value)
        return self.weight.total

    def inside(self, number: Value) -> list[Node]:
        """The nodes of the body."""
        made = self._of(number)
        self.own = made[-1].value() if made else number
        total = op_node("weights.sum", "aten.add.Tensor", (self.before[0], number), _SHARE, self_=0, other=1)
        size = op_node("weights.size", "aten.abs.default", (self.own,), _SHARE, self_=0)
        seen = op_node("weights.seen", "aten.add.Tensor", (self.before[1], size.value()), _SHARE, self_=0, other=1)
        self.after = total.value(), seen.value()
        return [replace(node, tags=GRADIENT) for node in (*made, total, size, seen)]

    def added(self, total: Value, value: Value, spec: Spec) -> Node:
        """The node that adds a weighted value to a carried sum."""
        inputs = (total, value, self.own, self.before[1])
        return op_node("add_weighted", "tfnb.add_weighted.default", inputs, spec, total=0, value=1, weight=2, seen=3)

    def behind(self, loop: Node, at: int) -> tuple[Value, Value, list[Node]]:
        """The weight of the batch and the sum of sizes, which lie ``at`` among the loop's results; nodes for them."""
        made = self._of(loop.value(at))
        return made[-1].value() if made else loop.value(at), loop.value(at + 1), made

    def _of(self, number: Value) -> list[Node]:
        """The nodes of a weight, from its number."""
        made: list[Node] = []
        if self.weight.shift:
            node = op_node("weights.shift", "aten.add.Tensor", (number,), _SHARE, self_=0)
            made.append(replace(node, attrs={**node.attrs, "other": self.weight.shift}))
            number = node.value()
        if self.weight.least > -math.inf:
            node = op_node("weights.least", "aten.clamp_min.default", (number,), _SHARE, self_=0)
            made.append(replace(node, attrs={**node.attrs, "min": self.weight.least}))
        return made


@dataclass
class _Build(_Merging):
    """The graph around the loop."""

    front: list[Node] = field(default_factory=list)  # placeholders
    inside: list[Node] = field(default_factory=list)  # between those that the loop takes and those behind it

    def fed_more(self) -> tuple[dict[Value, Value], Value]:
        """Placeholders of the shapes of microbatches, by feed, and of their shares."""
        loop, shapes = self.loop, dict[Value, Value]()
        count = Dim(unique("M", loop.symbols))
        for value in loop.step.feeds:
            if value in loop.rows:
                spec = Spec(torch.int64, (count, len(loop._spec(value).shape)))
                shapes[value] = self._placed(f"{loop.by_id[value.node].name}.shapes", spec)
        return shapes, self._placed("microbatches.shares", Spec(torch.float64, (count,)))

    def _placed(self, name: str, spec: Spec) -> Value:
        self.front.append(Node(id=new_id(), name=name, op="tfnb.placeholder", outputs=(spec,)))
        return Value(self.front[-1].id)

    def step_of(
        self, body: Subgraph, captured: Collection[Value], shapes: dict[Value, Value], shares: Value,
        inner: Mapping[int, Node],
    ) -> Microbatches:  # fmt: skip
        """The step around this body."""
        loop, step, state = self.loop, self.loop.step, self.loop.state
        before = self._before(captured)
        whole = self._whole(body, captured, shapes, shares, before, inner)
        same = self._after(whole)
        behind = [*self._behind(whole, before, same)]
        new = {v: whole.value(i) for i, v in enumerate(self.variables)}
        new |= {v: same.get(x, x) for v, x in state.final.items() if v not in new}
        assigns, group = self._writes(new, whole)
        early = [replace(n, control=self._control(n), effects=()) for n in state.nodes.values() if n.id in before]
        nodes = (*self._fed(), *self.front, *early, *self.inside, *behind, *assigns, group)
        graph = step.whole.derive(Contents(tuple(distinct(nodes)), step.graph.contents.guards))
        fetches = tuple(self._fetch(value, same, new, group) for value in step.fetches)
        feeds = (*step.feeds, *(shapes[v] for v in step.feeds if v in loop.rows), shares)
        moved = tuple(v for v in self.variables if v.held is None or not v.held.is_of_batch_norm())
        pruned = prune(graph, fetches, feeds, [group.id])  # whatever is fetched, all of it is written
        return Microbatches(StepGraph(graph, pruned, fetches, feeds), loop.divided, moved, whole.id, self._results())

    def _whole(
        self, body: Subgraph, captured: Collection[Value], shapes: dict[Value, Value], shares: Value,
        before: Collection[int], inner: Mapping[int, Node],
    ) -> Node:  # fmt: skip
        """The node of the loop."""
        loop = self.loop
        begins = [(spec, self.ways[value]) for value, spec in zip(self.carried, self.wide, strict=True)]
        begins += 2 * len(self.sums) * [(_SHARE, "sum")]
        init = (*self._reads(), *self._zeros(begins))
        inputs: list[Value] = []

        def ref(value: Value) -> Ref:
            inputs.append(value)
            return Ref(len(inputs) - 1)

        flat = self._flat(shapes)
        attrs: dict[str, Any] = {
            "init": tuple(map(ref, init)),
            "xs": (ref(shares), *((ref(a), ref(b)) for a, b in flat)),
            "captures": tuple(map(ref, captured)),
            "limit": None, "cond": None, "body": body,
            "rows": tuple(len(loop._spec(v).shape) for v in self.stacked),
            "reverse": False, "back_prop": False, "parallel_iterations": loop.most, "recompute": False,
            "swap_memory": None, "replicas": (0, 1), **({"schedule": loop.schedule} if loop.schedule else {}),
        }  # fmt: skip
        control = tuple(dict.fromkeys(i for n in inner.values() for i in n.control if i in before))
        found = Node(id=new_id(), name="microbatches", op=WHILE, inputs=tuple(inputs), outputs=self._specs(),
                     attrs=attrs, control=control)  # fmt: skip
        self.inside.append(found)
        return found

    def _specs(self) -> tuple[Spec, ...]:
        """Specs of the loop's outputs."""
        outs = [*(v.spec for v in self.variables), *self.wide, *[_SHARE] * (2 * len(self.sums)), Spec(torch.int64, ())]
        known = set(self.loop.symbols)
        for value in self.stacked:
            spec = self.loop._spec(value)
            n, k = Dim(unique("E", known)), Dim(unique("M", known))
            known |= {n.expr, k.expr}
            outs += Spec(spec.dtype, (n,), spec.device), Spec(torch.int64, (k, len(spec.shape)))
        return tuple(outs)

    def _after(self, whole: Node) -> dict[Value, Value]:
        """For each border value, its value behind the loop."""
        first = len(self.variables) + len(self.carried)
        means = {each.weight: each.behind(whole, first + 2 * at) for at, each in enumerate(self.sums)}
        self.inside += [node for _, _, nodes in means.values() for node in nodes]
        by = {value: means[weight][:2] for value, weight in self.weights.items() if weight in means}
        return self._means(whole, by) | self._entries(whole, first + 2 * len(self.sums) + 1, by)

    def _writes(self, new: Mapping[Variable, Value], whole: Node) -> tuple[list[Node], Node]:
        """The assignments of new values, and the operation that waits for them and for the last microbatch."""
        last, final = self.loop.last_assigns, self.loop.state.final
        assigns = [replace(last[variable], inputs=(new[variable],), control=(), effects=()) for variable in final]
        done = tuple(Value(node.id) for node in assigns)
        count = len(self.variables) + len(self.carried) + 2 * len(self.sums)
        group = Node(id=new_id(), name="microbatches.apply", op="tfnb.group", inputs=(*done, whole.value(count)),
                     control=tuple(guard.node for guard in self.loop._guards(behind=True)),
                     attrs={"values": tuple(map(Ref, range(len(done) + 1)))})  # fmt: skip
        return assigns, group

    def _fetch(self, value: Value, same: Mapping[Value, Value], new: Mapping[Variable, Value], group: Node) -> Value:
        """The value of the new step that stands for a fetched one."""
        loop, node = self.loop, self.loop.by_id[value.node]
        if not node.outputs:
            return group.value()
        if any(node.id == assign.id for assign in loop.last_assigns.values()):
            return value
        value = loop.state.resolved(value)
        moved = next((v for v, x in loop.state.final.items() if x == value and v in loop.moved), None)
        return same.get(value, value) if moved is None or value in same else new[moved]

    def _results(self) -> tuple[LoopResult, ...]:
        """The outputs of the loop: moved Variables, carried values, totals of weights, a count, and stacked values."""
        first = len(self.variables) + len(self.carried)
        seen = {each.weight: first + 2 * at + 1 for at, each in enumerate(self.sums)}
        found = [LoopResult("first")] * len(self.variables)
        found += [LoopResult(self.ways[value], seen.get(self.weights.get(value, ROWS))) for value in self.carried]
        found += [LoopResult("sum")] * (2 * len(self.sums)) + [LoopResult("first")]
        return (*found, *[LoopResult("entries")] * (2 * len(self.stacked)))

    def _fed(self) -> Iterator[Node]:
        """Placeholders of the step's feeds."""
        for node_id in dict.fromkeys(value.node for value in self.loop.step.feeds):
            node = self.loop.by_id[node_id]
            is_one = node.op == "tfnb.placeholder"
            yield node if is_one else replace(node, op="tfnb.placeholder", inputs=(), attrs={}, control=(), effects=())

    def _before(self, captured: Iterable[Value]) -> set[int]:
        """Ids of the nodes that compute the captures of the loop."""
        loop, found, stack = self.loop, set[int](), list(captured)
        while stack:
            value = stack.pop()
            if value in loop.fed or value.node in found:
                continue
            node = loop.state.nodes[value.node]
            if loop._varies(value) or node.id in loop.state.updated:
                raise Unimplemented(f"{node.name} is behind an update, and a microbatch takes it")
            found.add(node.id)
            stack.extend((*node.inputs, *map(Value, self._control(node))))
        return found

    def _control(self, node: Node) -> tuple[int, ...]:
        """What a node before the loop waits for: no guards that each microbatch asks, before anything is written."""
        nodes, varying = self.loop.state.nodes, self.loop.varying
        return tuple(i for i in node.control if i not in varying or nodes[i].op != "tfnb.guard")

    def _reads(self) -> list[Value]:
        """Values of the moved Variables before the first microbatch."""
        found, nodes = [], self.loop.step.graph.nodes
        for variable in self.variables:
            read = next((n for n in nodes if n.op == "tfnb.read" and n.attrs["variable"] is variable), None)
            node = Node(id=new_id(), name=f"{variable.name}.before", op="tfnb.read", outputs=(variable.spec,),
                        attrs={"variable": variable}, device=None if read is None else read.device)  # fmt: skip
            self.inside.append(node)
            found.append(node.value())
        return found

    def _zeros(self, carried: Iterable[tuple[Spec, str]]) -> list[Value]:
        """Initial values of the carried sums and extremes: merging a value with one changes no bit of the value."""
        found = []
        for spec, way in carried:
            attrs = {"size": list(spec.shape), "fill_value": begin(way, spec.dtype), "dtype": spec.dtype,
                     "device": torch.device(spec.device), "pin_memory": False}  # fmt: skip
            node = Node(id=new_id(), name="microbatches.zeros", op="aten.full.default", outputs=(spec,), attrs=attrs)
            self.inside.append(node)
            found.append(node.value())
        return found

    def _flat(self, shapes: Mapping[Value, Value]) -> list[tuple[Value, Value]]:
        """The elements of each divided feed, and the shapes of its microbatches."""
        found = []
        size = Dim(unique("E", self.loop.symbols))
        for value, shape in shapes.items():
            spec = self.loop._spec(value)
            node = op_node(
                "microbatches.flat", "aten.reshape.default", (value,), Spec(spec.dtype, (size,), spec.device), self_=0
            )
            self.inside.append(replace(node, attrs={**node.attrs, "shape": [-1]}))
            found.append((node.value(), shape))
        return found

    def _over(self, value: Value, spec: Spec, by: tuple[Value, Value] | None) -> Value:
        """A carried sum divided by its weight and whether there was any; by shares of rows it is a mean already."""
        if by is None:
            return value
        node = op_node("weights.mean", "tfnb.over_weight.default", (value, *by), spec, total=0, whole=1, seen=2)
        self.inside.append(node)
        return node.value()

    def _means(self, whole: Node, by: Mapping[Value, tuple[Value, Value]]) -> dict[Value, Value]:
        """The value of each carried sum behind the loop, in the dtype of the original value."""
        same: dict[Value, Value] = {}
        for index, value in enumerate(self.carried, len(self.variables)):
            spec = self.loop._spec(value)
            same[value] = self._over(whole.value(index), whole.outputs[index], by.get(value))
            if whole.outputs[index].dtype is not spec.dtype:
                node = op_node("microbatches.narrow", "aten._to_copy.default", (same[value],), spec, self_=0)
                self.inside.append(replace(node, attrs={**node.attrs, "dtype": spec.dtype}))
                same[value] = node.value()
        return same

    def _entries(self, whole: Node, first: int, by: Mapping[Value, tuple[Value, Value]]) -> dict[Value, Value]:
        """The entries of row-sparse gradients, concatenated over all microbatches."""
        known = self.loop.symbols.union(*(_symbols(spec.shape) for spec in whole.outputs[first:]))
        same: dict[Value, Value] = {}
        counts: dict[int, Dim] = {}  # by node that gives both the rows and their numbers
        for place, value in enumerate(self.stacked):
            spec = self.loop._spec(value)
            if any(isinstance(size, Dim) for size in spec.shape[1:]):
                name = self.loop.by_id[value.node].name
                raise Unimplemented(f"{name}, {spec}: rows whose size varies have no microbatches")
            if value.node not in counts:
                counts[value.node] = Dim(unique("R", known | {count.expr for count in counts.values()}))
            entries = Spec(spec.dtype, (counts[value.node], *spec.shape[1:]), spec.device)
            node = op_node(
                "microbatches.entries", "aten.reshape.default", (whole.value(first + 2 * place),), entries, self_=0
            )
            self.inside.append(replace(node, attrs={**node.attrs, "shape": [-1, *spec.shape[1:]]}))
            same[value] = self._over(node.value(), entries, by.get(value))
        return same

    def _behind(self, whole: Node, before: set[int], same: Mapping[Value, Value]) -> Iterator[Node]:
        """The nodes that run once, with the loop's results as inputs."""
        for node in self.loop.state.nodes.values():
            if node.id in self.loop.behind and node.id not in before:
                there = [i for i in node.control if i in self.loop.behind or i in before]
                control = (*there, *([whole.id] if len(there) < len(node.control) else []))
                yield replace(node, inputs=tuple(same.get(v, v) for v in node.inputs), control=control, effects=())


def op_node(name: str, op: str, inputs: tuple[Value, ...], spec: Spec, **places: int) -> Node:
    """A node with one output. places: of each argument, by name, the place of its value among the inputs."""
    attrs = {key.rstrip("_"): Ref(place) for key, place in places.items()}
    return Node(id=new_id(), name=name, op=op, inputs=inputs, outputs=(spec,), attrs=attrs)


def _wide(spec: Spec) -> Spec:
    return replace(spec, dtype=torch.float32) if spec.dtype in _NARROW else spec


def _symbols(shape: Iterable[int | Dim]) -> list[str]:
    return [symbol for size in shape if isinstance(size, Dim) for symbol in size.symbols]


def draws(node: Node) -> bool:
    """Whether a node, or a node inside of its subgraphs, draws random numbers."""
    return node.stream is not None or any(isinstance(a, Subgraph) and a.draws for a in node.attrs.values())


def _is_buffer(variable: Variable) -> bool:
    return variable.held is not None and variable.held.is_buffer()
