"""A step whose batch several tasks divide, exactly: values of all rows are summed or gathered in mid-step.

Each value of the step has a form. Tasks have its *rows*, along one axis; or each has a *summand* of it; or it is
*whole*: alike on all tasks, or on one of them. What is fed is divided by rows, and each op is done on the rows of each
task where `tfnb.passes.flow.row_rules` says that it goes row by row. Sums over rows give summands, which linear ops
leave as they are; what any other op takes is summed, or gathered from the tasks, before. Means and losses of the tables
here divide by the number of all rows. So the values are those of one machine, but for the order of sums.

Random numbers are drawn for all rows on each task, which takes its own. The result is a step like one that a user
placed by hand, with nodes that ask for tasks: the cut, its edges, commits and errors are those of any such step
(partition.md calls it exact losses; the white paper's §4.4 has data parallelism by averages only). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tfnb.errors import ShapeError, Unimplemented
from tfnb.graph import Contents, Dim, Node, Ref, Spec, Value
from tfnb.graph.contents import unique
from tfnb.graph.graph import new_id
from tfnb.graph.node import map_leaves
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import REGIONS, STRUCTURAL
from tfnb.graph.subgraph import nested
from tfnb.passes.flow.axis_orders import Order, axis_orders
from tfnb.passes.flow.exact_ops import SPECIAL, Emission, FormOf
from tfnb.passes.flow.row_rules import ALONG, BILINEAR, LINEAR, SUM, RowCall, outcome
from tfnb.passes.prune import StepGraph, step_graph

_LOCAL_SIZES = frozenset({"size", "shape", "self_size", "input_size", "input_sizes", "N"})
_SHAPED = frozenset({
    "rand_like", "randn_like", "randint_like", "normal_functional", "uniform", "exponential", "cauchy", "log_normal",
    "geometric", "random",
})  # fmt: skip
"""Random ops of which only the shape of the first operand counts."""


class FeedOrigin(NamedTuple):
    """The origin of a feed: the number of the original feed and, of a divided one, the place of the rows' task."""

    feed: int
    task: int | None = None


@dataclass(frozen=True)
class StepOverRows:
    """``step`` for tasks with the numbers ``tasks``. ``feeds``: the origin of each feed.

    ``first``: the original feed whose length is the number of rows. ``gathered``: nodes that one task does with all
    rows.
    """

    step: StepGraph
    tasks: tuple[int, ...]
    feeds: tuple[FeedOrigin, ...]
    first: int
    gathered: tuple[Node, ...]

    @property
    def divided(self) -> list[bool]:
        """Whether tasks divide a feed, for each feed of the original step."""
        found = {of.feed: of.task is not None for of in self.feeds}
        return [found[number] for number in range(len(found))]

    def rows(self, tensors: Sequence[torch.Tensor]) -> int:
        """The rows of a batch, of the tensors of the original step."""
        return len(tensors[self.first])

    def fed(self, tensors: Sequence[torch.Tensor], ranges: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """The feeds, of the tensors of the original step; ranges: the rows of each task."""
        rows = ranges[-1][1]

        def part(of: FeedOrigin) -> torch.Tensor:
            tensor = tensors[of.feed]
            if of.task is None:
                return tensor
            unit, (start, stop) = len(tensor) // rows, ranges[of.task]
            return tensor[start * unit : stop * unit]

        return tuple(map(part, self.feeds))


def over_rows(step: StepGraph, tasks: Sequence[int]) -> StepOverRows | None:
    """The step over these tasks; None where no feed has rows, or there is one task only."""
    making = RowDivision(step, tuple(tasks))
    return making.made() if making.rows and len(tasks) > 1 else None


@dataclass
class RowDivision:
    """One division in the making."""

    step: StepGraph
    tasks: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    states: dict[Value, FormOf] = field(default_factory=dict)
    ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gathered: list[Node] = field(default_factory=list)
    written: set[Any] = field(default_factory=set)  # Variables
    whole: dict[Value, Value] = field(default_factory=dict)  # sums and gathered rows
    cut: dict[tuple[Value, int], tuple[Value, ...]] = field(default_factory=dict)  # rows of whole values
    constants: set[Value] = field(default_factory=set)  # whole values that each task computes for itself
    _divided: dict[str, bool] = field(default_factory=dict)  # sizes, by their expression
    effects: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of nodes made, ids of the step's
    drawn: dict[int, Node] = field(default_factory=dict)  # random nodes of all rows, in place of the step's
    _orders: dict[Value, Order] = field(init=False)  # of axes in memory, of what random ops take

    def __post_init__(self) -> None:
        by_id = self.step.whole.contents.by_id
        self.specs = {v: by_id[v.node].outputs[v.index] for v in self.step.feeds}
        firsts = [spec.shape[0] for spec in self.specs.values() if spec.shape and isinstance(spec.shape[0], Dim)]
        self.rows = next((first.expr for first in firsts if first.is_symbol), "")
        taken = {s for node in self.step.graph.nodes for one in (node, *nested(node))
                 for spec in one.outputs for s in spec.symbols}  # fmt: skip
        drawn = (value for node in self.step.graph.nodes if node.stream is not None for value in node.inputs)
        self._orders = axis_orders(self.step.graph.nodes, self.specs, drawn)
        self.symbols: list[str] = []
        for _ in self.tasks if self.rows else ():
            self.symbols.append(unique(self.rows, taken | {self.rows, *self.symbols}))

    # -- sizes ----------------------------------------------------------------------------------------------------

    def is_rows(self, size: int | Dim) -> bool:
        """Whether a size is that of rows."""
        return isinstance(size, Dim) and self.rows in size.symbols

    def is_divided(self, size: int | Dim) -> bool:
        """Whether a size is that of rows times a number, or times sizes of other axes: each row has as many places."""
        if not isinstance(size, Dim) or not self.is_rows(size):
            return False
        if size.expr not in self._divided:
            self._divided[size.expr] = all(self._is_linear(size, other) for other in (7, 11))
        return self._divided[size.expr]

    def _is_linear(self, size: Dim, other: int) -> bool:
        """Whether a size is a multiple of the number of rows while all other symbols are the same."""
        try:
            each = {
                size.evaluate({s: n if s == self.rows else other for s in size.symbols}) / n for n in (60, 120, 2520)
            }
        except ShapeError:
            return False
        return len(each) == 1 and each != {0.0}

    def axis_of(self, spec: Spec) -> int | None:
        """The only axis of rows of a shape; None where there is none, or another number of them."""
        found = [at for at, size in enumerate(spec.shape) if self.is_rows(size)]
        return found[0] if len(found) == 1 and self.is_divided(spec.shape[found[0]]) else None

    def local(self, leaf: object, task: int) -> Any:
        """A size, of the rows of a task."""
        is_own = isinstance(leaf, Dim) and self.rows in leaf.symbols
        return leaf.rename({self.rows: self.symbols[task]}) if is_own and isinstance(leaf, Dim) else leaf

    def spec_of(self, spec: Spec, task: int, renamed: Mapping[str, str]) -> Spec:
        """A spec, of the rows of a task."""
        sizes = (self.local(size, task) for size in spec.shape)
        return replace(spec, shape=tuple(s.rename(renamed) if isinstance(s, Dim) else s for s in sizes))

    def before(self, size: Dim, task: int) -> int | Dim:
        """Where the rows of a task begin on an axis of this size; of the number of tasks: where they end."""
        if not task:
            return 0
        return size.rename({self.rows: f"({' + '.join(self.symbols[:task])})"})

    # -- the result ---------------------------------------------------------------------------------------------------

    def made(self) -> StepOverRows:
        """The step."""
        step, feeds = self.step, list[FeedOrigin]()
        placed: list[Value] = []
        for number, value in enumerate(step.feeds):
            spec, name = self.specs[value], step.whole.contents.by_id[value.node].name
            is_divided = bool(spec.shape) and self.axis_of(spec) == 0
            shown = [self.spec_of(spec, task, {}) for task in range(len(self.tasks))] if is_divided else [spec]
            own = [
                self._add(Node(id=new_id(), name=f"{name}/{at}" if is_divided else name, op="tfnb.placeholder",
                               outputs=(one,), source=step.whole.contents.by_id[value.node].source))
                for at, one in enumerate(shown)
            ]  # fmt: skip
            values = tuple(Value(node.id) for node in own)
            placed += values
            feeds += [FeedOrigin(number, at) for at in range(len(own))] if is_divided else [FeedOrigin(number)]
            if is_divided:
                self.states[value] = FormOf("rows", values, 0)
            else:
                self.states[value] = FormOf("whole", values * len(self.tasks))
                self.constants.add(value)
            self.ids[value.node] = tuple(node.id for node in own)
        self._count()
        for node in step.graph.nodes:
            if Value(node.id) not in self.specs:
                self._visit(node)
                self._keep_effects(node)
        fetches = [self._fetched(value) for value in step.fetches]
        graph = step.whole.derive(Contents(tuple(map(self._with_effects, self.nodes))))
        over = step_graph(graph, fetches, placed)
        lengths = [spec.shape[0] if spec.shape else 0 for spec in self.specs.values()][: len(step.feeds)]
        first = next(at for at, length in enumerate(lengths) if isinstance(length, Dim) and length.expr == self.rows)
        return StepOverRows(over, self.tasks, tuple(feeds), first, tuple(self.gathered))

    def _count(self) -> None:
        """Add a node whose shape binds the original symbol to the number of all rows."""
        everything = Dim(" + ".join(self.symbols))
        about = {"size": [everything], "dtype": torch.uint8, "device": torch.device("cpu")}
        spec = Spec(torch.uint8, (Dim(self.rows),))
        self.new("rows", "aten.empty.memory_format", (), about, spec, None)

    def _fetched(self, value: Value) -> Value:
        if value in self.states:
            return self._whole(value)
        return Value(self.ids[value.node][0])

    # -- nodes ----------------------------------------------------------------------------------------------------

    def _add(self, node: Node) -> Node:
        if node.name in self.names:
            node = replace(node, name=unique(node.name, self.names))
        self.names.add(node.name)
        self.nodes.append(node)
        return node

    def new(
        self, name: str, op: str, inputs: Sequence[Value], attrs: Mapping[str, Any], spec: Spec, of: Node | None,
        task: int | None = None,
    ) -> Value:  # fmt: skip
        """Add a node near one of the step's. task: the place of its task in ``tasks``; None: any."""
        node = Node(
            id=new_id(), name=name, op=op, inputs=tuple(inputs), outputs=(spec,), attrs=attrs,
            source=None if of is None else of.source, scope=() if of is None else of.scope,
            owner=None if of is None else of.owner, device=None if task is None else self._place(task),
        )  # fmt: skip
        return Value(self._add(node).id)

    def _place(self, task: int) -> str:
        return f"task:{self.tasks[task]}"

    def spec_at(self, value: Value) -> Spec:
        found = self.specs.get(value)
        return found if found is not None else self._node(value).outputs[value.index]

    def _visit(self, node: Node) -> None:
        """Do one node of the step: on rows, as summands, or whole."""
        if node.op == "aten.squeeze.default":  # where a task has one row that axis stays
            size = list(node.outputs[0].shape)
            node = replace(node, op="aten.reshape.default", attrs={"self": Ref(0), "shape": size})
        forms = {self.states[v].form for v in node.inputs if v in self.states}
        is_plain = node.op not in STRUCTURAL and "update" not in node.tags and not node.control
        if is_plain and "rows" in forms and self._of_rows(node):
            return
        if is_plain and "summands" in forms and "rows" not in forms and self._of_summands(node):
            return
        self.do_whole(node)

    def do_whole(self, node: Node) -> None:
        """Do a node over all rows: on each task if its operands are constants of each task, else once."""
        is_gathered = any(self.states[v].form == "rows" for v in node.inputs if v in self.states)
        if is_gathered:
            self.gathered.append(node)
        inputs = [self._whole(v) if v in self.states else None for v in node.inputs]
        is_own = self._is_each(node) and all(v in self.constants for v in node.inputs)
        if node.stream is not None and not is_own:
            inputs = [self._laid_out(v, whole, node) for v, whole in zip(node.inputs, inputs, strict=True)]
        if node.op == "tfnb.assign":
            self.written.add(node.attrs["variable"])
        copies = []
        for task in range(len(self.tasks)) if is_own else (0,):
            given = tuple(
                Value(self.ids[v.node][0]) if whole is None else self.states[v].values[task] if is_own else whole
                for v, whole in zip(node.inputs, inputs, strict=True)
            )
            about: dict[str, Any] = {"device": self._place(task)} if is_own else {}
            if task:
                about |= {"name": f"{node.name}/{task}", "id": new_id()}
            control = tuple(one for i in node.control for one in self.ids.get(i, ()))
            forward = None if node.forward is None else self.ids.get(node.forward, (None,))[0]
            copies.append(self._add(replace(node, inputs=given, control=control, forward=forward, **about)))
        self.ids[node.id] = tuple(copy.id for copy in copies)
        for index in range(len(node.outputs)):
            values = tuple(copy.value(index) for copy in copies)
            self.states[node.value(index)] = FormOf("whole", values if is_own else values * len(self.tasks))
            if is_own:
                self.constants.add(node.value(index))

    def _keep_effects(self, node: Node) -> None:
        """Let all nodes that stand for one with effects have these."""
        values = [v for index in range(len(node.outputs)) for v in self.states[node.value(index)].values]
        for made in {*self.ids[node.id], *(value.node for value in values)} if node.effects else ():
            self.effects[made] = (*self.effects.get(made, ()), *node.effects)

    def _with_effects(self, node: Node) -> Node:
        """The node with the copies of its effects, which may stand below it in the program."""
        effects = tuple(dict.fromkeys(one for i in self.effects.get(node.id, ()) for one in self.ids[i]))
        return node if effects == node.effects else replace(node, effects=effects)

    def _is_each(self, node: Node) -> bool:
        """Whether each task may do a node by itself with the same result; random numbers are the same, too."""
        if node.op == "tfnb.read":
            return node.attrs["variable"] not in self.written and not node.control
        is_op = node.op == "tfnb.constant" or node.op not in STRUCTURAL
        return is_op and "update" not in node.tags and not (node.control or node.op in REGIONS)

    def _of_rows(self, node: Node) -> bool:
        """Divide a node with operands in rows; False where one task has to do the node."""
        special = SPECIAL.get(node.op.split(".")[1])
        if special is not None and special(Emission(self, node)):
            return True
        if node.stream is not None:
            return self._drawn(node)
        for v in node.inputs:
            if self.states[v].form == "summands":
                self._whole(v)
        call = self.call_of(node)
        is_shaped = facts_of(node.op).shape_only
        found = None if call is None else ALONG if is_shaped else outcome(call)
        is_odd = is_shaped and any(map(self.is_rows, node.outputs[0].shape)) and self.axis_of(node.outputs[0]) is None
        if call is None or found is None or is_odd:  # odd: a size such as one more than that of rows
            return False
        copies = self.copies(node, call)
        if is_shaped and self.axis_of(node.outputs[0]) is None:
            self.states[node.value()] = FormOf("whole", tuple(copy.value() for copy in copies))
            self.constants.add(node.value())
            return True
        for index, spec in enumerate(node.outputs):
            values = tuple(copy.value(index) for copy in copies)
            axis = self.axis_of(spec)
            if found == SUM or (found != ALONG and axis is None):
                state = FormOf("summands", values)
            else:
                state = FormOf("own", values) if axis is None else FormOf("rows", values, axis)
            self.states[node.value(index)] = state
        return True

    def call_of(self, node: Node) -> RowCall | None:
        """The call for the rules; None where the rows of an operand do not lie on one axis."""
        axes: list[int | None] = []
        for v in node.inputs:
            spec, state = self.spec_at(v), self.states[v]
            if state.form == "own":
                axes.append(None)
            elif any(map(self.is_rows, spec.shape)):
                axis = state.axis if state.form == "rows" else self.axis_of(spec)
                if axis is None:
                    return None
                axes.append(axis)
            else:
                axes.append(None)
        zeros = frozenset(
            at for at, v in enumerate(node.inputs)
            if v not in self.specs and facts_of(self.step.graph.contents.by_id[v.node].op).zeros
        )  # fmt: skip
        specs = tuple(self.spec_at(v) for v in node.inputs)
        return RowCall(node, tuple(axes), specs, self.is_divided, zeros)

    def copies(self, node: Node, call: RowCall, attrs: Mapping[str, Any] | None = None) -> list[Node]:
        """The node on each task, over its rows."""
        operands = [
            self.states[v].values if self.states[v].form == "own"
            else self.rows_of(v, axis) if axis is not None else self.alike(v)
            for v, axis in zip(node.inputs, call.axes, strict=True)
        ]  # fmt: skip
        own = [s.expr for spec in node.outputs for s in spec.shape if isinstance(s, Dim) and self._is_bound(node, s)]
        copies = []
        for task in range(len(self.tasks)):
            renamed = {name: f"{name}_{self.symbols[task]}" for name in own}
            outputs = tuple(self.spec_of(spec, task, renamed) for spec in node.outputs)
            copies.append(self._add(replace(
                node, id=new_id(), name=f"{node.name}/{task}", inputs=tuple(each[task] for each in operands),
                outputs=outputs, attrs=self._arguments(node, task) if attrs is None else attrs, forward=None,
                device=self._place(task),
            )))  # fmt: skip
        self.ids[node.id] = tuple(copy.id for copy in copies)
        return copies

    def _is_bound(self, node: Node, size: Dim) -> bool:
        """Whether a size is a symbol of this node, such as the length of a reserve for the derivative."""
        at = self.step.graph.contents.symbols.get(size.expr) if size.is_symbol else None
        return at is not None and at[0].node == node.id

    def _arguments(self, node: Node, task: int) -> Mapping[str, Any]:
        """The arguments of a node on a task, with the task's own sizes, and numbers of all rows."""
        if self.rows not in node.symbols:
            return node.attrs
        return {
            name: map_leaves(lambda leaf: self.local(leaf, task), value) if name in _LOCAL_SIZES else value
            for name, value in node.attrs.items()
        }

    def _of_summands(self, node: Node) -> bool:
        """Do a linear node on summands; False where a node needs their sums."""
        name, given = node.op.split(".")[1], [self.states[v] for v in node.inputs]
        summands = [at for at, state in enumerate(given) if state.form == "summands"]
        is_scaled = name in BILINEAR and len(summands) == 1
        is_divided = name == "div" and summands == [0] and node.attrs.get("rounding_mode") is None
        is_added = name in ("add", "sub") and len(summands) == len(given) == 2
        is_kept = name in LINEAR and len(given) == 1 and not (
            name == "_to_copy" and not node.outputs[0].dtype.is_floating_point
        )  # fmt: skip
        if not (is_scaled or is_divided or is_added or is_kept) or self.axis_of(node.outputs[0]) is not None:
            return False
        operands = [self.states[v].values if at in summands else self.alike(v) for at, v in enumerate(node.inputs)]
        copies = [
            self._add(replace(
                node, id=new_id(), name=f"{node.name}/{task}", inputs=tuple(each[task] for each in operands),
                forward=None, device=self._place(task),
            )) for task in range(len(self.tasks))
        ]  # fmt: skip
        self.ids[node.id] = tuple(copy.id for copy in copies)
        for index in range(len(node.outputs)):
            self.states[node.value(index)] = FormOf("summands", tuple(copy.value(index) for copy in copies))
        return True

    def _drawn(self, node: Node) -> bool:
        """Draw for all rows on each task, where only the shape of an operand counts; else False."""
        is_shaped = node.op.split(".")[1] in _SHAPED or node.op == "aten.bernoulli.p"
        if not is_shaped or len(node.inputs) != 1:
            return False
        self.do_whole(replace(node, inputs=(self.ones_like(node.inputs[0], node),)))
        return True

    def ones_like(self, value: Value, of: Node) -> Value:
        """Ones, of all rows, on each task, laid out in memory as ``value``."""
        spec = self.spec_at(value)
        order = self._orders.get(value) or tuple(range(len(spec.shape)))
        sizes = [spec.shape[axis] for axis in order]
        about = {"size": sizes, "fill_value": 1, "dtype": spec.dtype, "device": torch.device(spec.device)}
        name, laid = f"{of.name}/ones", replace(spec, shape=tuple(sizes))
        values = tuple(
            self.new(name, "aten.full.default", (), about, laid, of, task) for task in range(len(self.tasks))
        )
        if list(order) != sorted(order):
            turn = {"self": Ref(0), "dims": [order.index(axis) for axis in range(len(order))]}
            values = tuple(
                self.new(f"{name}/turned", "aten.permute.default", (ones,), turn, spec, of, task)
                for task, ones in enumerate(values)
            )
        self.states[values[0]] = FormOf("whole", values)
        self.constants.add(values[0])
        self.specs[values[0]] = spec
        return values[0]

    def _laid_out(self, value: Value, whole: Value | None, of: Node) -> Value | None:
        """A whole value laid out in memory as ``value``: gathered rows are contiguous."""
        order = self._orders.get(value, ())
        if whole is None or list(order) == sorted(order):
            return whole
        spec = self.spec_at(value)
        laid = replace(spec, shape=tuple(spec.shape[axis] for axis in order))
        back = [order.index(axis) for axis in range(len(order))]
        for op, about, shown in (
            ("aten.permute.default", {"dims": list(order)}, laid),
            ("aten.clone.default", {"memory_format": torch.contiguous_format}, laid),
            ("aten.permute.default", {"dims": back}, spec),
        ):
            whole = self.new(f"{of.name}/laid_out", op, (whole,), {"self": Ref(0), **about}, shown, of)
        return whole

    # -- forms --------------------------------------------------------------------------------------------------------

    def alike(self, value: Value) -> tuple[Value, ...]:
        """A whole value, on each task."""
        whole, state = self._whole(value), self.states[value]
        return state.values if state.form == "whole" else (whole,) * len(self.tasks)

    def _whole(self, value: Value) -> Value:
        """A value of all rows, on one task."""
        state = self.states[value]
        if state.form == "whole":
            return state.values[0]
        if value not in self.whole:
            node, spec = self._node(value), self.spec_at(value)
            if state.form == "own":
                raise Unimplemented(
                    f"exact=True: {node.name} keeps something of each task's rows, and an op of all rows takes it"
                    + (f"\n  recorded at {node.source}" if node.source else "")
                )
            if state.form == "summands":
                self.whole[value] = self.summed(node, state.values, spec)
            else:
                about = {"tensors": [Ref(at) for at in range(len(self.tasks))], "dim": state.axis}
                name = f"{node.name}/gathered"
                self.whole[value] = self.new(name, "aten.cat.default", state.values, about, spec, node)
        return self.whole[value]

    def _node(self, value: Value) -> Node:
        found = self.drawn.get(value.node)
        return self.step.whole.contents.by_id[value.node] if found is None else found

    def summed(self, node: Node, values: Sequence[Value], spec: Spec) -> Value:
        """The sum of summands: where they are gradients, servers add them up."""
        first, *others = values
        for other in others:
            about = {"self": Ref(0), "other": Ref(1)}
            first = self.new(f"{node.name}/sum", "aten.add.Tensor", (first, other), about, spec, node)
        return first

    def rows_of(self, value: Value, axis: int) -> tuple[Value, ...]:
        """The rows of a value along an axis, on each task."""
        state = self.states[value]
        if state.form == "rows":
            return state.values
        whole = self.alike(value)
        if (value, axis) not in self.cut:
            spec, node = self.spec_at(value), self._node(value)
            size = spec.shape[axis]
            assert isinstance(size, Dim)
            found = []
            for task, given in enumerate(whole):
                about = {
                    "self": Ref(0),
                    "dim": axis,
                    "start": self.before(size, task),
                    "end": self.before(size, task + 1),
                }
                own = self._place(task) if value in self.constants else None
                found.append(self.new(
                    f"{node.name}/rows", "aten.slice.Tensor", (given,), about, self.spec_of(spec, task, {}), node,
                    None if own is None else task,
                ))  # fmt: skip
            self.cut[value, axis] = tuple(found)
        return self.cut[value, axis]
