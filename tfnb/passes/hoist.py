"""Optimizer updates that a branch makes, taken out of it: the branch gives gradients, the commit updates in place.

    w.assign(cond(p, lambda: adam(w, g, m, v), lambda: (w, m, v)))  ->  g' = cond(p, g, nothing); adam in place, if p

Only where the other side leaves every Variable as it is. What goes on to read the new value may only pass it on to
other Variables, which are written after the updates: the target of a net that takes over its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tfnb.graph import Graph, Node, Ref, Spec, Subgraph, Value, Variable
from tfnb.graph.graph import new_id
from tfnb.graph.ops import COND, HOISTED, OPTIONAL
from tfnb.kernels.optim import FUSED
from tfnb.passes.rewrite import redirected, with_nodes

_SIDES = ("then", "else")


@dataclass(frozen=True, slots=True)
class _Update:
    """An update in one side of a branch: what it writes, and which outputs of the branch are its."""

    node: Node
    side: str
    variables: tuple[Variable, ...]
    places: tuple[int, ...]
    reads: tuple[Value, ...]  # of the variables, around the branch

    @property
    def state(self) -> tuple[int, ...]:
        return state_places(self.node)


def state_places(node: Node) -> tuple[int, ...]:
    """Of an update's inputs those that it writes: the variable and its slots."""
    return (0, *range(2, 2 + len(node.attrs.get("slots", ()))))


def hoist(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Updates of branches that only write Variables, behind their branch, with the tag HOISTED."""
    finder = _Finder(graph, frozenset(fetches), frozenset(feeds))
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


class _Finder:
    def __init__(self, graph: Graph, fetches: frozenset[Value], feeds: frozenset[Value]) -> None:
        self.contents, self.fixed = graph.contents, fetches | feeds
        self.assigns: dict[Variable, list[Node]] = {}
        self.reads: dict[Variable, list[Node]] = {}
        self.late: dict[int, dict[Value, Value]] = {}
        for node in graph.nodes:
            if node.op in ("tfnb.assign", "tfnb.read"):
                kept = self.assigns if node.op == "tfnb.assign" else self.reads
                kept.setdefault(node.attrs["variable"], []).append(node)

    def assigned(self, variable: Variable) -> Value:
        return self.assigns[variable][0].value()

    def values(self, value: Value, variable: Variable) -> list[Value]:
        """All values that are the new one of a variable."""
        (assign,) = self.assigns[variable]
        after = self.contents.position[assign.id]
        later = [node.value() for node in self.reads[variable] if self.contents.position[node.id] > after]
        return [value, assign.value(), *later]

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
        for index, at in enumerate(state_places(inner)):
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
        rest = [v for at, v in enumerate(inner.inputs) if at not in state_places(inner)]
        specs = [_spec(inside, value) for value in rest]
        if len(set(variables)) != len(variables) or any(spec.symbols for spec in specs):
            return None
        return _Update(inner, side, tuple(variables), tuple(places), tuple(reads))

    def _fits(self, node: Node, place: int, read: Node) -> bool:
        """Whether the output is stored in the variable that was read, and what else takes it passes it on."""
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
    """The branch that also gives what its updates take, and the updates behind it."""
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
