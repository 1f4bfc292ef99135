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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from tfnb.errors import ShapeError, Unimplemented
from tfnb.graph import Contents, Dim, Node, Ref, Spec, Value
from tfnb.graph.contents import unique
from tfnb.graph.graph import new_id
from tfnb.graph.node import map_leaves
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import REGIONS, STRUCTURAL
from tfnb.graph.subgraph import nested
from tfnb.passes.flow.row_rules import ALONG, LINEAR, SUM, RowCall, outcome
from tfnb.passes.prune import StepGraph, step_graph

Form = Literal["rows", "summands", "whole", "own"]
_LOCAL_SIZES = frozenset({"size", "shape", "self_size", "input_sizes", "N"})
_BILINEAR = frozenset({"mul", "mm", "bmm", "mv", "dot"})
_SHAPED = frozenset(
    "rand_like randn_like randint_like normal_functional uniform exponential cauchy log_normal geometric random".split()
)
"""Random ops of which only the shape of the first operand counts."""


class Divided(NamedTuple):
    """A feed of the step: the number of the original feed, and the number of the task whose rows it has, if any."""

    feed: int
    task: int | None = None


@dataclass(frozen=True)
class StepOverRows:
    """``step`` for as many ``tasks``, which are numbers of tasks; ``feeds`` says what each of its feeds is.

    ``first``: the original feed whose length is the number of rows. ``gathered``: nodes that one task does with all
    rows.
    """

    step: StepGraph
    tasks: tuple[int, ...]
    feeds: tuple[Divided, ...]
    first: int
    gathered: tuple[Node, ...]

    @property
    def divided(self) -> list[bool]:
        """For each feed of the original step, whether tasks divide it."""
        found = {of.feed: of.task is not None for of in self.feeds}
        return [found[number] for number in range(len(found))]

    def rows(self, tensors: Sequence[torch.Tensor]) -> int:
        """The rows of a batch, of the tensors of the original step."""
        return len(tensors[self.first])

    def fed(self, tensors: Sequence[torch.Tensor], ranges: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """The feeds, of the tensors of the original step; ranges: the rows of each task."""
        rows = ranges[-1][1]

        def part(of: Divided) -> torch.Tensor:
            tensor = tensors[of.feed]
            if of.task is None:
                return tensor
            unit, (start, stop) = len(tensor) // rows, ranges[of.task]
            return tensor[start * unit : stop * unit]

        return tuple(map(part, self.feeds))


def over_rows(step: StepGraph, tasks: Sequence[int]) -> StepOverRows | None:
    """The step over these tasks; None where no feed has rows, or there is one task only."""
    making = _Division(step, tuple(tasks))
    return making.made() if making.rows and len(tasks) > 1 else None


class _State(NamedTuple):
    """The form of a value, and its values on the tasks. axis: of rows."""

    form: Form
    values: tuple[Value, ...]
    axis: int = -1


@dataclass
class _Division:
    """One division in the making."""

    step: StepGraph
    tasks: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    states: dict[Value, _State] = field(default_factory=dict)
    ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gathered: list[Node] = field(default_factory=list)
    written: set[Any] = field(default_factory=set)  # Variables
    whole: dict[Value, Value] = field(default_factory=dict)  # sums and gathered rows
    cut: dict[tuple[Value, int], tuple[Value, ...]] = field(default_factory=dict)  # rows of whole values
    constants: set[Value] = field(default_factory=set)  # whole values that each task computes for itself

    def __post_init__(self) -> None:
        by_id = self.step.whole.contents.by_id
        self.specs = {v: by_id[v.node].outputs[v.index] for v in self.step.feeds}
        firsts = [spec.shape[0] for spec in self.specs.values() if spec.shape and isinstance(spec.shape[0], Dim)]
        self.rows = next((first.expr for first in firsts if first.is_symbol), "")
        taken = {s for node in self.step.graph.nodes for one in (node, *nested(node))
                 for spec in one.outputs for s in spec.symbols}  # fmt: skip
        self.symbols: list[str] = []
        for _ in self.tasks if self.rows else ():
            self.symbols.append(unique(self.rows, taken | {self.rows, *self.symbols}))

    # -- sizes ----------------------------------------------------------------------------------------------------

    def is_rows(self, size: int | Dim) -> bool:
        """Whether a size is that of rows."""
        return isinstance(size, Dim) and self.rows in size.symbols

    @cached_property
    def _units(self) -> dict[str, int | None]:
        return {}

    def unit(self, size: int | Dim) -> int | None:
        """How many places of an axis a row of the batch has; None where that is no fixed number."""
        if not isinstance(size, Dim):
            return None
        if size.expr not in self._units:
            found: set[float] = set()
            try:
                for rows, other in ((60, 7), (120, 7), (180, 11), (2520, 5)):
                    sizes = {s: rows if s == self.rows else other for s in size.symbols}
                    found.add(size.evaluate(sizes) / rows)
            except ShapeError:
                found = set()
            (one,) = found if len(found) == 1 else (0.0,)
            self._units[size.expr] = int(one) if one and one == int(one) else None
        return self._units[size.expr]

    def axis_of(self, spec: Spec) -> int | None:
        """The only axis of rows of a shape; None where there is none, or another number of them."""
        found = [at for at, size in enumerate(spec.shape) if self.is_rows(size)]
        return found[0] if len(found) == 1 and self.unit(spec.shape[found[0]]) else None

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
        step, feeds = self.step, list[Divided]()
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
            feeds += [Divided(number, at) for at in range(len(own))] if is_divided else [Divided(number)]
            if is_divided:
                self.states[value] = _State("rows", values, 0)
            else:
                self.states[value] = _State("whole", values * len(self.tasks))
                self.constants.add(value)
            self.ids[value.node] = tuple(node.id for node in own)
        self._count()
        for node in step.graph.nodes:
            if Value(node.id) not in self.specs:
                self._visit(node)
        fetches = [self._fetched(value) for value in step.fetches]
        graph = step.whole.derive(Contents(tuple(self.nodes)))
        over = step_graph(graph, fetches, placed)
        lengths = [spec.shape[0] if spec.shape else 0 for spec in self.specs.values()][: len(step.feeds)]
        first = next(at for at, length in enumerate(lengths) if isinstance(length, Dim) and length.expr == self.rows)
        return StepOverRows(over, self.tasks, tuple(feeds), first, tuple(self.gathered))

    def _count(self) -> None:
        """A node whose shape has the number of all rows, under the symbol that it had."""
        everything = Dim(" + ".join(self.symbols))
        about = {"size": [everything], "dtype": torch.uint8, "device": torch.device("cpu")}
        spec = Spec(torch.uint8, (Dim(self.rows),))
        self._new("rows", "aten.empty.memory_format", (), about, spec, None)

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

    def _new(
        self, name: str, op: str, inputs: Sequence[Value], attrs: Mapping[str, Any], spec: Spec, of: Node | None,
        task: int | None = None,
    ) -> Value:  # fmt: skip
        """A node of our own, near one of the step's. task: the place in ``tasks`` that does it."""
        node = Node(
            id=new_id(), name=name, op=op, inputs=tuple(inputs), outputs=(spec,), attrs=attrs,
            source=None if of is None else of.source, scope=() if of is None else of.scope,
            owner=None if of is None else of.owner, device=None if task is None else self._place(task),
        )  # fmt: skip
        return Value(self._add(node).id)

    def _place(self, task: int) -> str:
        return f"task:{self.tasks[task]}"

    def _spec(self, value: Value) -> Spec:
        found = self.specs.get(value)
        return found if found is not None else self.step.graph.contents.by_id[value.node].outputs[value.index]

    def _visit(self, node: Node) -> None:
        """Do one node of the step: on rows, as summands, or whole."""
        if node.op == "aten.squeeze.default":  # where a task has one row that axis stays
            size = list(node.outputs[0].shape)
            node = replace(node, op="aten.reshape.default", attrs={"self": Ref(0), "shape": size})
        forms = {self.states[v].form for v in node.inputs if v in self.states}
        is_plain = node.op not in STRUCTURAL and "update" not in node.tags and not node.control and not node.effects
        if is_plain and "rows" in forms and self._of_rows(node):
            return
        if is_plain and "summands" in forms and "rows" not in forms and self._of_summands(node):
            return
        self._do_whole(node)

    def _do_whole(self, node: Node) -> None:
        """A node over all rows: on each task, if it needs nothing that one task has; else once."""
        is_gathered = any(self.states[v].form == "rows" for v in node.inputs if v in self.states)
        if is_gathered:
            self.gathered.append(node)
        inputs = [self._whole(v) if v in self.states else None for v in node.inputs]
        is_own = self._is_each(node) and all(v in self.constants for v in node.inputs)
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
            effects = tuple(one for i in node.effects for one in self.ids.get(i, ()))
            forward = None if node.forward is None else self.ids.get(node.forward, (None,))[0]
            copies.append(self._add(replace(
                node, inputs=given, control=control, effects=effects, forward=forward, **about
            )))  # fmt: skip
        self.ids[node.id] = tuple(copy.id for copy in copies)
        for index in range(len(node.outputs)):
            values = tuple(copy.value(index) for copy in copies)
            self.states[node.value(index)] = _State("whole", values if is_own else values * len(self.tasks))
            if is_own:
                self.constants.add(node.value(index))

    def _is_each(self, node: Node) -> bool:
        """Whether each task may do a node by itself, with the same result: it draws the same numbers, too."""
        if node.op == "tfnb.read":
            return node.attrs["variable"] not in self.written and not node.control
        is_op = node.op == "tfnb.constant" or node.op not in STRUCTURAL
        return is_op and "update" not in node.tags and not (node.control or node.effects or node.op in REGIONS)

    def _of_rows(self, node: Node) -> bool:
        """A node some of whose operands lie in rows; False where it goes to one task."""
        special = _SPECIAL.get(node.op.split(".")[1])
        if special is not None and special(_Emission(self, node)):
            return True
        if node.stream is not None:
            return self._drawn(node)
        for v in node.inputs:
            if self.states[v].form == "summands":
                self._whole(v)
        call = self._call(node)
        is_shaped = facts_of(node.op).shape_only
        found = None if call is None else ALONG if is_shaped else outcome(call)
        if call is None or found is None:
            return False
        copies = self._copies(node, call)
        if is_shaped and self.axis_of(node.outputs[0]) is None:
            self.states[node.value()] = _State("whole", tuple(copy.value() for copy in copies))
            self.constants.add(node.value())
            return True
        for index, spec in enumerate(node.outputs):
            values = tuple(copy.value(index) for copy in copies)
            axis = self.axis_of(spec)
            if found == SUM or (found != ALONG and axis is None):
                state = _State("summands", values)
            else:
                state = _State("own", values) if axis is None else _State("rows", values, axis)
            self.states[node.value(index)] = state
        return True

    def _call(self, node: Node) -> RowCall | None:
        """What the rules look at; None where rows do not lie on one axis of an operand."""
        axes: list[int | None] = []
        for v in node.inputs:
            spec, state = self._spec(v), self.states[v]
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
        specs = tuple(self._spec(v) for v in node.inputs)
        return RowCall(node, tuple(axes), specs, lambda size: self.unit(size) is not None, zeros)

    def _copies(self, node: Node, call: RowCall, attrs: Mapping[str, Any] | None = None) -> list[Node]:
        """The node on each task, over its rows."""
        operands = [
            self.states[v].values if self.states[v].form == "own"
            else self._rows(v, axis) if axis is not None else self._alike(v)
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
        """Whether a size is a symbol of this node, such as the length of what it keeps."""
        at = self.step.graph.contents.symbols.get(size.expr) if size.is_symbol else None
        return at is not None and at[0].node == node.id

    def _arguments(self, node: Node, task: int) -> Mapping[str, Any]:
        """The arguments of a node on a task: sizes are its own, numbers are those of all rows."""
        if self.rows not in node.symbols:
            return node.attrs
        return {
            name: map_leaves(lambda leaf: self.local(leaf, task), value) if name in _LOCAL_SIZES else value
            for name, value in node.attrs.items()
        }

    def _of_summands(self, node: Node) -> bool:
        """A node some of whose operands are summands: linear ones go on with them; False where it needs sums."""
        name, given = node.op.split(".")[1], [self.states[v] for v in node.inputs]
        summands = [at for at, state in enumerate(given) if state.form == "summands"]
        is_scaled = name in _BILINEAR and len(summands) == 1
        is_divided = name == "div" and summands == [0] and node.attrs.get("rounding_mode") is None
        is_added = name in ("add", "sub") and len(summands) == len(given) == 2
        is_kept = name in LINEAR and len(given) == 1 and not (
            name == "_to_copy" and not node.outputs[0].dtype.is_floating_point
        )  # fmt: skip
        if not (is_scaled or is_divided or is_added or is_kept) or self.axis_of(node.outputs[0]) is not None:
            return False
        operands = [self.states[v].values if at in summands else self._alike(v) for at, v in enumerate(node.inputs)]
        copies = [
            self._add(replace(
                node, id=new_id(), name=f"{node.name}/{task}", inputs=tuple(each[task] for each in operands),
                forward=None, device=self._place(task),
            )) for task in range(len(self.tasks))
        ]  # fmt: skip
        self.ids[node.id] = tuple(copy.id for copy in copies)
        for index in range(len(node.outputs)):
            self.states[node.value(index)] = _State("summands", tuple(copy.value(index) for copy in copies))
        return True

    def _drawn(self, node: Node) -> bool:
        """A random node like another tensor, of which only the shape counts: each task draws for all rows."""
        is_shaped = node.op.split(".")[1] in _SHAPED or node.op == "aten.bernoulli.p"
        if not is_shaped or len(node.inputs) != 1:
            return False
        self._do_whole(replace(node, inputs=(self.ones(self._spec(node.inputs[0]), node),)))
        return True

    def ones(self, spec: Spec, of: Node) -> Value:
        """A tensor of ones, of all rows, on each task."""
        about = {"size": list(spec.shape), "fill_value": 1, "dtype": spec.dtype, "device": torch.device(spec.device)}
        values = tuple(
            self._new(f"{of.name}/ones", "aten.full.default", (), about, spec, of, task)
            for task in range(len(self.tasks))
        )  # fmt: skip
        self.states[values[0]] = _State("whole", values)
        self.constants.add(values[0])
        self.specs[values[0]] = spec
        return values[0]

    # -- forms --------------------------------------------------------------------------------------------------------

    def _alike(self, value: Value) -> tuple[Value, ...]:
        """A whole value, on each task."""
        whole, state = self._whole(value), self.states[value]
        return state.values if state.form == "whole" else (whole,) * len(self.tasks)

    def _whole(self, value: Value) -> Value:
        """A value of all rows, on one task."""
        state = self.states[value]
        if state.form == "whole":
            return state.values[0]
        if value not in self.whole:
            node, spec = self._node(value), self._spec(value)
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
                self.whole[value] = self._new(name, "aten.cat.default", state.values, about, spec, node)
        return self.whole[value]

    def _node(self, value: Value) -> Node:
        return self.step.whole.contents.by_id[value.node]

    def summed(self, node: Node, values: Sequence[Value], spec: Spec) -> Value:
        """The sum of summands: where they are gradients, servers add them up."""
        first, *others = values
        for other in others:
            about = {"self": Ref(0), "other": Ref(1)}
            first = self._new(f"{node.name}/sum", "aten.add.Tensor", (first, other), about, spec, node)
        return first

    def _rows(self, value: Value, axis: int) -> tuple[Value, ...]:
        """The rows of a value along an axis, on each task."""
        state = self.states[value]
        if state.form == "rows":
            return state.values
        whole = self._alike(value)
        if (value, axis) not in self.cut:
            spec, node = self._spec(value), self._node(value)
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
                found.append(self._new(
                    f"{node.name}/rows", "aten.slice.Tensor", (given,), about, self.spec_of(spec, task, {}), node,
                    None if own is None else task,
                ))  # fmt: skip
            self.cut[value, axis] = tuple(found)
        return self.cut[value, axis]


# -- ops that take more than their own node -----------------------------------------------------------------------


@dataclass
class _Emission:
    """One node that becomes several."""

    division: _Division
    node: Node

    def argument(self, name: str) -> Any:
        """An argument of the op, or its default by the schema."""
        found = self.node.attrs.get(name, facts_of(self.node.op).defaults.get(name))
        return found

    def value(self, name: str) -> Value | None:
        """An operand; None where it is absent."""
        found = self.node.attrs.get(name)
        return self.node.inputs[found.input] if isinstance(found, Ref) else None

    def axis(self, name: str) -> int | None:
        """The axis of an operand's rows; None where it has none."""
        value = self.value(name)
        return None if value is None else self.division.axis_of(self.spec(value))

    def spec(self, value: Value) -> Spec:
        """The spec of an operand, of all rows."""
        return self.division._spec(value)

    @cached_property
    def call(self) -> RowCall | None:
        """What a rule looks at."""
        return self.division._call(self.node)

    def has_summands(self) -> bool:
        """Whether an operand is summands."""
        return any(self.division.states[v].form == "summands" for v in self.node.inputs)

    def rows(self, value: Value) -> tuple[Value, ...]:
        """The rows of an operand, on each task."""
        axis = self.division.axis_of(self.spec(value))
        assert axis is not None
        return self.division._rows(value, axis)

    def alike(self, value: Value) -> tuple[Value, ...]:
        """A whole operand, on each task."""
        return self.division._alike(value)

    def each(self, op: str, *operands: Sequence[Value], spec: Spec, **arguments: Any) -> tuple[Value, ...]:
        """One new node on each task, of ``self`` and perhaps ``other``; ``spec`` of all rows."""
        division, name = self.division, f"{self.node.name}/{op.split('.')[1]}"
        attrs = {key: Ref(at) for at, key in zip(range(len(operands)), ("self", "other"), strict=False)} | arguments
        return tuple(
            division._new(
                name, op, [values[task] for values in operands], attrs, division.spec_of(spec, task, {}), self.node, task
            ) for task in range(len(division.tasks))
        )  # fmt: skip

    def total(self, summands: Sequence[Value], spec: Spec) -> tuple[Value, ...]:
        """The sum of summands, on each task."""
        division = self.division
        return (division.summed(self.node, summands, spec),) * len(division.tasks)

    def give(self, form: Form, values: tuple[Value, ...], index: int = 0, axis: int = -1) -> None:
        """The form of an output, and its values."""
        self.division.states[self.node.value(index)] = _State(form, values, axis)
        self.division.ids[self.node.id] = tuple(value.node for value in values)

    def copies(self, **attrs: Any) -> list[Node] | None:
        """The node itself on each task, with other arguments."""
        call = self.call
        return None if call is None else self.division._copies(self.node, call, {**self.node.attrs, **attrs})


def _count(sizes: Iterable[int | Dim]) -> Dim:
    """The product of sizes, as one."""
    return Dim("*".join(f"({size})" for size in sizes) or "1")


def _mean(e: _Emission) -> bool:
    """A mean over rows: each task's sum, divided by the number of all."""
    value = e.value("self")
    assert value is not None
    spec, dim = e.spec(value), e.argument("dim")
    axis = e.division.axis_of(spec)
    rank = len(spec.shape)
    dims = list(range(rank)) if not dim else [one % rank for one in ([dim] if isinstance(dim, int) else dim)]
    if axis is None or axis not in dims:
        return False
    out = e.node.outputs[0]
    about = {"dim": dims, "keepdim": bool(e.argument("keepdim")), "dtype": out.dtype}
    sums = e.each("aten.sum.dim_IntList", e.rows(value), spec=out, **about)
    count = _count(spec.shape[one] for one in dims)
    e.give("summands", e.each("aten.div.Tensor", sums, spec=out, other=count))
    return True


def _extreme(e: _Emission) -> bool:
    """The largest or smallest of rows: that of what each task has."""
    value = e.value("self")
    if value is None or (axis := e.division.axis_of(e.spec(value))) is None or len(e.node.inputs) != 1:
        return False
    spec, dim, division = e.spec(value), e.argument("dim"), e.division
    rank = len(spec.shape)
    dims = list(range(rank)) if not dim else [one % rank for one in dim]
    if axis not in dims:
        return False
    kept = replace(spec, shape=tuple(1 if at in dims else size for at, size in enumerate(spec.shape)))
    each = e.each(e.node.op, e.rows(value), spec=kept, dim=dims, keepdim=True)
    count = len(division.tasks)
    many = replace(kept, shape=tuple(count if at == axis else size for at, size in enumerate(kept.shape)))
    refs = [Ref(at) for at in range(count)]
    name = e.node.name
    joined = division._new(f"{name}/cat", "aten.cat.default", each, {"tensors": refs, "dim": axis}, many, e.node)
    one = division._new(
        f"{name}/all", e.node.op, (joined,), {"self": Ref(0), "dim": [axis], "keepdim": True}, kept, e.node
    )
    out = e.node.outputs[0]
    if out.shape != kept.shape:
        size = {"self": Ref(0), "shape": list(out.shape)}
        one = division._new(f"{name}/shape", "aten.reshape.default", (one,), size, out, e.node)
    e.give("whole", (one,) * count)
    return True


def _loss(e: _Emission) -> bool:
    """A loss with a ``reduction``: of rows, a sum over them, or that by the number of all."""
    call, reduction = e.call, e.argument("reduction")
    if call is None or e.has_summands() or not call.is_aligned():
        return False
    rows = tuple(size for size in _broadcast([e.spec(v).shape for v in e.node.inputs]))
    out = e.node.outputs[0]
    copies = e.copies(reduction=min(reduction, 1) * 2)
    assert copies is not None
    values = tuple(copy.value() for copy in copies)
    if reduction == 0:
        axis = e.division.axis_of(out)
        assert axis is not None
        e.give("rows", values, axis=axis)
    elif reduction == 2:
        e.give("summands", values)
    else:
        e.give("summands", e.each("aten.div.Tensor", values, spec=out, other=_count(rows)))
    return True


def _loss_back(e: _Emission) -> bool:
    """The gradient of such a loss, of rows."""
    call, reduction, out = e.call, e.argument("reduction"), e.node.outputs[0]
    axis = e.division.axis_of(out)
    if call is None or axis is None or e.has_summands() or not call.is_aligned():
        return False
    copies = e.copies(reduction=min(reduction, 1) * 2)
    assert copies is not None
    values = tuple(copy.value() for copy in copies)
    if reduction == 1:
        rows = _broadcast([e.spec(v).shape for v in e.node.inputs])
        values = e.each("aten.div.Tensor", values, spec=out, other=_count(rows))
    e.give("rows", values, axis=axis)
    return True


def _class_loss(e: _Emission) -> bool:
    """Cross entropy of rows by their classes: the sum of losses, and the total of weights, of each task."""
    reduction = e.argument("reduction")
    if e.axis("self") != 0 or e.axis("target") != 0 or e.has_summands():
        return False
    copies = e.copies(reduction=min(reduction, 1) * 2)
    if copies is None:
        return False
    losses, weights = (tuple(copy.value(at) for copy in copies) for at in (0, 1))
    out, total = e.node.outputs
    if reduction == 1:
        whole = e.total(weights, total)
        losses = e.each("aten.div.Tensor", losses, whole, spec=out)
    e.give("rows" if reduction == 0 else "summands", losses, axis=0 if reduction == 0 else -1)
    e.give("whole" if reduction == 0 else "summands", weights, index=1)
    e.division.ids[e.node.id] = tuple(copy.id for copy in copies)
    return True


def _dropout(e: _Emission) -> bool:
    """Dropout: each task draws the mask of all rows, and takes that of its own."""
    value, division = e.value("input"), e.division
    if value is None or not e.argument("train") or (axis := division.axis_of(e.spec(value))) is None:
        return False
    if e.has_summands():
        return False
    division._do_whole(replace(e.node, inputs=(division.ones(e.spec(value), e.node),)))
    scaled, mask = (division._rows(e.node.value(at), axis) for at in (0, 1))
    out = e.each("aten.mul.Tensor", e.rows(value), scaled, spec=e.node.outputs[0])
    e.give("rows", out, axis=axis)
    e.give("rows", mask, index=1, axis=axis)
    return True


def _batch_norm(e: _Emission) -> bool:
    """Batch norm in training, of the statistics of all rows: means of each task's sums, twice."""
    x, training = e.value("input"), e.argument("training")
    if x is None or e.axis("input") != 0 or not training or e.has_summands():
        return False
    out, mean_spec = e.node.outputs[:2]
    shape, dims, flat = _of_channels(e.spec(x))
    count, rows = _count(e.spec(x).shape[at] for at in dims), e.rows(x)

    def mean(values: Sequence[Value]) -> tuple[Value, ...]:
        sums = e.each("aten.sum.dim_IntList", values, spec=mean_spec, dim=dims)
        return e.each("aten.div.Tensor", e.total(sums, mean_spec), spec=mean_spec, other=count)

    def spread(values: Sequence[Value]) -> tuple[Value, ...]:
        return e.each("aten.reshape.default", values, spec=replace(mean_spec, shape=tuple(flat)), shape=flat)

    mu = mean(rows)
    away = e.each("aten.sub.Tensor", rows, spread(mu), spec=out)
    var = mean(e.each("aten.mul.Tensor", away, away, spec=out))
    shifted = e.each("aten.add.Tensor", var, spec=mean_spec, other=e.argument("eps"))
    scale = e.each("aten.rsqrt.default", shifted, spec=mean_spec)
    y = e.each("aten.mul.Tensor", away, spread(scale), spec=out)
    for op, name in (("aten.mul.Tensor", "weight"), ("aten.add.Tensor", "bias")):
        if (own := e.value(name)) is not None:
            y = e.each(op, y, spread(e.alike(own)), spec=out)
    e.give("rows", y, axis=0)
    e.give("whole", mu, index=1)
    e.give("whole", scale, index=2)
    momentum = e.argument("momentum")
    less = Dim(f"({count}) - 1")
    unbiased = e.each("aten.div.Tensor", e.each("aten.mul.Tensor", var, spec=mean_spec, other=count), spec=mean_spec, other=less)  # fmt: skip
    for index, name, new in ((3, "running_mean", mu), (4, "running_var", unbiased)):
        if index < len(e.node.outputs) and (old := e.value(name)) is not None:
            kept = e.each("aten.mul.Tensor", e.alike(old), spec=mean_spec, other=1 - momentum)
            added = e.each("aten.mul.Tensor", new, spec=mean_spec, other=momentum)
            e.give("whole", e.each("aten.add.Tensor", kept, added, spec=mean_spec), index=index)
    del shape
    return True


def _batch_norm_back(e: _Emission) -> bool:
    """The gradients of batch norm in training: sums over all rows of what each task has."""
    x, grad = e.value("input"), e.value("grad_out")
    if x is None or grad is None or e.axis("input") != 0 or e.axis("grad_out") != 0 or e.has_summands():
        return False
    if not e.argument("train"):
        return False
    out, channels = e.node.outputs[0], e.spec(x)
    _, dims, flat = _of_channels(channels)
    mean, scale = e.value("save_mean"), e.value("save_invstd")
    assert mean is not None and scale is not None
    spec = e.spec(mean)
    count = _count(channels.shape[at] for at in dims)
    rows, given = e.rows(x), e.rows(grad)

    def spread(values: Sequence[Value]) -> tuple[Value, ...]:
        return e.each("aten.reshape.default", values, spec=replace(spec, shape=tuple(flat)), shape=flat)

    def total(values: Sequence[Value]) -> tuple[Value, ...]:
        return e.total(e.each("aten.sum.dim_IntList", values, spec=spec, dim=dims), spec)

    def share(values: Sequence[Value]) -> tuple[Value, ...]:
        return spread(e.each("aten.div.Tensor", values, spec=spec, other=count))

    away = e.each("aten.sub.Tensor", rows, spread(e.alike(mean)), spec=channels)
    normal = e.each("aten.mul.Tensor", away, spread(e.alike(scale)), spec=channels)
    of_weight = total(e.each("aten.mul.Tensor", given, normal, spec=channels))
    of_bias = total(given)
    less = e.each("aten.sub.Tensor", given, share(of_bias), spec=channels)
    along = e.each("aten.mul.Tensor", normal, share(of_weight), spec=channels)
    less = e.each("aten.sub.Tensor", less, along, spec=channels)
    factor = e.alike(scale)
    if (weight := e.value("weight")) is not None:
        factor = e.each("aten.mul.Tensor", factor, e.alike(weight), spec=spec)
    e.give("rows", e.each("aten.mul.Tensor", less, spread(factor), spec=out), axis=0)
    e.give("whole", of_weight, index=1)
    e.give("whole", of_bias, index=2)
    return True


def _of_channels(spec: Spec) -> tuple[tuple[int | Dim, ...], list[int], list[int | Dim]]:
    """The shape, the axes that are no channels, and the shape of one number for each channel."""
    shape = spec.shape
    return shape, [at for at in range(len(shape)) if at != 1], [
        size if at == 1 else 1 for at, size in enumerate(shape)
    ]  # fmt: skip


def _broadcast(shapes: Sequence[Sequence[int | Dim]]) -> list[int | Dim]:
    """The shape that others broadcast to."""
    rank = max(map(len, shapes))
    wide = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*wide, strict=True)]


_SPECIAL = {
    "mean": _mean, "amax": _extreme, "amin": _extreme, "native_dropout": _dropout,
    "nll_loss_forward": _class_loss, "nll_loss2d_forward": _class_loss,
    "_native_batch_norm_legit_functional": _batch_norm, "native_batch_norm_backward": _batch_norm_back,
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
                     "soft_margin_loss", "binary_cross_entropy_with_logits"), _loss),
    **dict.fromkeys(("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
                     "binary_cross_entropy_backward", "soft_margin_loss_backward"), _loss_back),
}  # fmt: skip
