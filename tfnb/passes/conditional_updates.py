"""Conditional-update hoisting: updates of Variables in branches become conditional in-place updates of the commit.

Rows that are written into a Variable which later branches read are written in each of those branches, too:

    new = old.index_copy(0, i, rows); v.assign(new); cond(p, lambda: f(new), g)
    -> v.assign(old.index_copy(0, i, rows)); cond(p, lambda: f(old.index_copy(0, i, rows)), g)

A step that takes the other side copies nothing, and the commit writes the rows in place, as nobody else takes the
whole. Optimizer updates in a branch are taken out of it: the branch gives gradients.

    w.assign(cond(p, lambda: adam(w, g, m, v), lambda: (w, m, v)))  ->  g' = cond(p, g, nothing); adam in place, if p

Only where the other side leaves every Variable as it is. What goes on to read the new value may only pass it on to
other Variables, which are written after the updates: the target of a net that takes over its weights.

Measured with `tests/benchmarks/bench_dqn.py`, one thread: a step takes 302 us, and 421 us as a plain conditional (356
with the updates alone, 377 with the rows alone).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tfnb.graph import Graph, Node, Ref, Spec, Subgraph, Value, Variable
from tfnb.graph.graph import new_id
from tfnb.graph.node import leaves, map_leaves
from tfnb.graph.ops import COND, HOISTED, OPTIONAL
from tfnb.kernels.optim import FUSED
from tfnb.kernels.row_writes import WRITES
from tfnb.passes.in_place_commit import written
from tfnb.passes.rewrite import redirected, with_nodes

_SIDES = ("then", "else")


def conditional_updates(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Writes of rows are made in the branches that take them; updates of branches stand behind them, as HOISTED."""
    fixed = frozenset((*fetches, *feeds))
    return _updates_behind(_rows_inside(graph, fixed), fixed)


class _Accesses:
    """Who reads and assigns each Variable."""

    def __init__(self, graph: Graph, fixed: frozenset[Value]) -> None:
        self.contents, self.fixed = graph.contents, fixed
        self.assigns: dict[Variable, list[Node]] = {}
        self.reads: dict[Variable, list[Node]] = {}
        for node in graph.nodes:
            if node.op in ("tfnb.assign", "tfnb.read"):
                kept = self.assigns if node.op == "tfnb.assign" else self.reads
                kept.setdefault(node.attrs["variable"], []).append(node)

    def values(self, value: Value, variable: Variable) -> list[Value]:
        """All values equal to the new value of a variable that is assigned once."""
        (assign,) = self.assigns[variable]
        after = self.contents.position[assign.id]
        later = [node.value() for node in self.reads.get(variable, ()) if self.contents.position[node.id] > after]
        return [value, assign.value(), *later]


# -- rows -----------------------------------------------------------------------------------------------------------


def _rows_inside(graph: Graph, fixed: frozenset[Value]) -> Graph:
    """Move row writes whose results go to branches only, besides the assignment, into the branches."""
    stored = _Accesses(graph, fixed)
    found = {value: write for node in graph.nodes for value, write in _taken(node, stored)}
    if not found:
        return graph
    by_id = graph.contents.by_id
    specs = {value: by_id[value.node].outputs[value.index] for write in found.values() for value in write.inputs}
    return with_nodes(graph, [_with_writes(node, found, specs) if node.op == COND else node for node in graph.nodes])


def _taken(assign: Node, stored: _Accesses) -> Iterable[tuple[Value, Node]]:
    """Values equal to the one that ``assign`` stores, with the row-writing node, if branches take them."""
    contents = stored.contents
    if assign.op != "tfnb.assign" or len(stored.assigns[assign.attrs["variable"]]) != 1:
        return ()
    variable = assign.attrs["variable"]
    write = contents.by_id.get(assign.inputs[0].node)
    old = None if write is None or write.op not in WRITES else contents.by_id.get(write.inputs[0].node)
    if write is None or old is None or old.op != "tfnb.read" or old.attrs["variable"] is not variable:
        return ()
    values = stored.values(write.value(), variable)
    specs = [contents.by_id[value.node].outputs[value.index] for value in write.inputs]
    if len(write.inputs) != 3 or any(spec.symbols for spec in specs):
        return ()
    if old.value() in values or not stored.fixed.isdisjoint([*values, old.value()]):
        return ()
    users = [contents.by_id[i] for value in values for i in contents.consumers.get(value, ())]
    others = [user for user in users if user is not assign and user.op != "tfnb.group"]
    if not others or not all(user.op == COND and _as_operands(user, values) for user in others):
        return ()
    return [(value, write) for value in values]


def _as_operands(node: Node, values: Collection[Value]) -> bool:
    """Whether a branch takes the values as operands only."""
    operands = {ref.input for ref in node.attrs["operands"] if isinstance(ref, Ref)}
    rest = (leaf.input for name in ("pred", "shapes") for leaf in leaves(node.attrs[name]) if isinstance(leaf, Ref))
    return all(place in operands for place, value in enumerate(node.inputs) if value in values) and not any(
        node.inputs[place] in values for place in rest
    )


def _with_writes(node: Node, found: dict[Value, Node], specs: dict[Value, Spec]) -> Node:
    """The branch with the operands of row writes in place of the writes' results."""
    for place, operand in enumerate(node.attrs["operands"]):
        write = found.get(node.inputs[operand.input]) if isinstance(operand, Ref) else None
        if write is not None:
            node = _with_write(node, place, write, [specs[value] for value in write.inputs[1:]])
    return _without_unused(node)


def _without_unused(node: Node) -> Node:
    """The node without inputs that nothing refers to."""
    used = sorted({leaf.input for leaf in leaves(node.attrs) if isinstance(leaf, Ref)})
    at = {old: new for new, old in enumerate(used)}
    attrs = map_leaves(lambda leaf: Ref(at[leaf.input]) if isinstance(leaf, Ref) else leaf, node.attrs)
    return replace(node, inputs=tuple(node.inputs[place] for place in used), attrs=attrs)


def _with_write(node: Node, place: int, write: Node, specs: Sequence[Spec]) -> Node:
    """The branch that takes the unwritten table at ``place``, and the rows and values as further operands
    if missing.
    """
    inputs, attrs = list(node.inputs), dict(node.attrs)
    operands, places = list(attrs["operands"]), []
    operands[place] = Ref(len(inputs))
    inputs.append(write.inputs[0])
    for value in write.inputs[1:]:
        at = next((i for i, ref in enumerate(operands) if isinstance(ref, Ref) and inputs[ref.input] == value), None)
        if at is None:
            at = len(operands)
            operands.append(Ref(len(inputs)))
            inputs.append(value)
        places.append(at)
    sides = {name: _side(attrs[name], place, write, dict(zip(places, specs, strict=True))) for name in ("then", "else")}
    return replace(node, inputs=tuple(inputs), attrs={**attrs, **sides, "operands": tuple(operands)})


def _side(side: Subgraph, place: int, write: Node, specs: dict[int, Spec]) -> Subgraph:
    """One side, with the row write inside, of the table at ``place``. specs: of rows and values, by their place."""
    contents, whole = side.contents, side.inputs[place]
    more = [
        Node(id=new_id(), name=f"{write.name}.rows{new_id()}", op="tfnb.placeholder", outputs=(spec,))
        for at, spec in specs.items() if at >= len(side.inputs)
    ]  # fmt: skip
    inputs = (*side.inputs, *(each.value() for each in more))
    inner = replace(
        write, id=new_id(), inputs=(whole, *(inputs[at] for at in specs)), control=(), forward=None,
        name=f"{write.name}.within{new_id()}",
    )  # fmt: skip
    same = {whole: inner.value()}
    given = {value.node for value in side.inputs}
    nodes = [each if each.id in given else redirected(each, same) for each in contents.nodes]
    head = max((contents.position[i] for i in given), default=-1) + 1
    nodes[head:head] = [*more, inner]
    outputs = tuple(None if value is None else same.get(value, value) for value in side.outputs)
    return replace(side, contents=replace(contents, nodes=tuple(nodes)), outputs=outputs, inputs=inputs)


# -- updates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Update:
    """An update in one side of a branch: its Variables, and its outputs among the branch's."""

    node: Node
    side: str
    variables: tuple[Variable, ...]
    places: tuple[int, ...]
    reads: tuple[Value, ...]  # of the variables, around the branch

    @property
    def state(self) -> tuple[int, ...]:
        return written(self.node)


def _updates_behind(graph: Graph, fixed: frozenset[Value]) -> Graph:
    """Updates of branches that only write Variables, behind their branch, with the tag HOISTED."""
    finder = _UpdateFinder(graph, fixed)
    found = {node.id: updates for node in graph.nodes if node.op == COND and (updates := list(finder.updates(node)))}
    if not found:
        return graph
    nodes: list[Node] = []
    same: dict[Value, Value] = {}
    stored: set[Value] = set()  # a group wants them to be written
    for node in graph.nodes:
        late = finder.late.get(node.id)
        if late is not None:
            node = _passing(node, late)
        updates = found.get(node.id, [])
        if updates:
            node, behind = _apart(node, updates)
            nodes += [redirected(node, same), *behind]
            for update, after in zip(updates, behind, strict=True):
                for index, place in enumerate(update.places):
                    same |= dict.fromkeys(finder.values(node.value(place), update.variables[index]), after.value(index))
                    stored.add(finder.assigned(update.variables[index]))
        elif node.op == "tfnb.group":
            nodes.append(redirected(node, {value: new for value, new in same.items() if value not in stored}))
        else:
            nodes.append(redirected(node, same))
    return with_nodes(graph, nodes)


class _UpdateFinder(_Accesses):
    """Finds updates that can be hoisted; ``late``: later branches that pass on the updated values."""

    def __init__(self, graph: Graph, fixed: frozenset[Value]) -> None:
        super().__init__(graph, fixed)
        self.late: dict[int, dict[Value, Value]] = {}

    def assigned(self, variable: Variable) -> Value:
        return self.assigns[variable][0].value()

    def updates(self, node: Node) -> Iterator[_Update]:
        """The updates of a branch that can be taken out."""
        for side, other in (_SIDES, _SIDES[::-1]):
            inside: Subgraph = node.attrs[side]
            for inner in inside.contents.nodes:
                found = self._update(node, side, other, inner) if inner.op in FUSED else None
                if found is not None:
                    yield found

    def _update(self, node: Node, side: str, other: str, inner: Node) -> _Update | None:
        inside, outside = node.attrs[side], node.attrs[other]
        given = {value: place for place, value in enumerate(inside.inputs)}
        places, variables, reads = [], [], []
        for index, at in enumerate(written(inner)):
            value, operand = inner.value(index), given.get(inner.inputs[at])
            out = [place for place, v in enumerate(inside.outputs) if v == value]
            if operand is None or len(out) != 1 or inside.contents.consumers.get(value):
                return None
            if outside.outputs[out[0]] != outside.inputs[operand]:
                return None
            ref = node.attrs["operands"][operand]
            read = self.contents.by_id.get(node.inputs[ref.input].node) if isinstance(ref, Ref) else None
            if read is None or read.op != "tfnb.read" or not self._fits(node, out[0], read):
                return None
            places.append(out[0])
            variables.append(read.attrs["variable"])
            reads.append(read.value())
        rest = [v for at, v in enumerate(inner.inputs) if at not in written(inner)]
        specs = [_spec(inside, value) for value in rest]
        if len(set(variables)) != len(variables) or any(spec.symbols for spec in specs):
            return None
        return _Update(inner, side, tuple(variables), tuple(places), tuple(reads))

    def _fits(self, node: Node, place: int, read: Node) -> bool:
        """Whether the output is stored in the variable that was read, and its other consumers only pass it on."""
        variable, position = read.attrs["variable"], self.contents.position
        assigns = self.assigns.get(variable, [])
        if len(assigns) != 1 or assigns[0].inputs != (node.value(place),):
            return False
        if position[read.id] > position[assigns[0].id]:
            return False
        values = self.values(node.value(place), variable)
        if not self.fixed.isdisjoint([*values, read.value()]):
            return False
        others = dict.fromkeys(i for value in values for i in self.contents.consumers.get(value, ()))
        found: dict[int, dict[Value, Value]] = {}
        for user in map(self.contents.by_id.__getitem__, others):
            if user is assigns[0] or user.op in ("tfnb.group", "tfnb.read"):
                continue
            passed = self._passed_on(user, values)
            if passed is None:
                return False
            found[user.id] = passed
        for each, copies in found.items():
            self.late.setdefault(each, {}).update(copies)
        return True

    def _passed_on(self, node: Node, values: Sequence[Value]) -> dict[Value, Value] | None:
        """Copies of these values in the sides of a branch that does nothing else with them, each with its original.

        None where it does. What such a branch gives may only be stored.
        """
        if node.op != COND:
            return None
        operands = node.attrs["operands"]
        if any(node.inputs[ref.input] in values for ref in [node.attrs["pred"]] if isinstance(ref, Ref)):
            return None
        copies: dict[Value, Value] = {}
        for place, ref in enumerate(operands):
            if not isinstance(ref, Ref) or node.inputs[ref.input] not in values:
                continue
            for name in _SIDES:
                side: Subgraph = node.attrs[name]
                value = side.inputs[place]
                users = [side.contents.by_id[i] for i in side.contents.consumers.get(value, ())]
                if not all(_is_copy(user, value, side) for user in users):
                    return None
                copies |= {user.value(): value for user in users}
                for out, given in enumerate(side.outputs):
                    if (given == value or given in copies) and not self._stored(node.value(out)):
                        return None
        return copies

    def _stored(self, value: Value) -> bool:
        """Whether nothing but assignments take a value."""
        users = [self.contents.by_id[i] for i in self.contents.consumers.get(value, ())]
        return value not in self.fixed and all(
            user.op == "tfnb.assign" and len(self.assigns[user.attrs["variable"]]) == 1
            and self._unread(user) for user in users
        )  # fmt: skip

    def _unread(self, assign: Node) -> bool:
        values = self.values(assign.inputs[0], assign.attrs["variable"])[1:]
        users = [self.contents.by_id[i] for value in values for i in self.contents.consumers.get(value, ())]
        return self.fixed.isdisjoint(values) and all(user.op == "tfnb.group" for user in users)


def _is_copy(node: Node, value: Value, side: Subgraph) -> bool:
    """Whether a node gives the value with another one's memory, and its side gives that back."""
    is_copy = node.op == "aten.copy.default" and node.inputs[-1] == value and node.inputs[0] != value
    taken = side.contents.consumers.get(node.value())
    return is_copy and not taken and node.outputs[0] == _spec(side, value)


def _spec(side: Subgraph, value: Value) -> Spec:
    return side.contents.by_id[value.node].outputs[value.index]


def _passing(node: Node, copies: dict[Value, Value]) -> Node:
    """The branch with the values themselves in the place of copies."""
    attrs = dict(node.attrs)
    for name in _SIDES:
        outputs = tuple(None if v is None else copies.get(v, v) for v in attrs[name].outputs)
        attrs[name] = replace(attrs[name], outputs=outputs)
    return replace(node, attrs=attrs)


def _apart(node: Node, updates: Sequence[_Update]) -> tuple[Node, list[Node]]:
    """Split a branch: the branch that also returns the operands of its updates, and the hoisted updates."""
    attrs, outputs = dict(node.attrs), list(node.outputs)
    sides = {name: list(attrs[name].outputs) for name in _SIDES}
    shapes, optional = list(attrs["shapes"]), set(attrs.get(OPTIONAL, ()))
    behind = []
    for update in updates:
        inputs = list(update.node.inputs)
        for at, read in zip(update.state, update.reads, strict=True):
            inputs[at] = read
        for at, value in enumerate(update.node.inputs):
            if at in update.state:
                continue
            spec = _spec(attrs[update.side], value)
            for name in _SIDES:
                sides[name].append(value if name == update.side else None)
            inputs[at] = node.value(len(outputs))
            optional.add(len(outputs))
            outputs.append(spec)
            shapes.append(list(spec.shape))
        behind.append(
            replace(update.node, id=new_id(), inputs=tuple(inputs), tags=update.node.tags | {HOISTED}, control=())
        )
    attrs |= {name: replace(attrs[name], outputs=tuple(sides[name])) for name in _SIDES}
    attrs |= {"shapes": tuple(shapes), OPTIONAL: frozenset(optional)}
    return replace(node, attrs=attrs, outputs=tuple(outputs)), behind
