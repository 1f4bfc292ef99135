"""Rows written into a Variable that later branches read: each branch makes the written tensor for itself.

    new = old.index_copy(0, i, rows); v.assign(new); cond(p, lambda: f(new), g)
    -> v.assign(old.index_copy(0, i, rows)); cond(p, lambda: f(old.index_copy(0, i, rows)), g)

A step that takes the other side copies nothing, and the commit writes the rows in place, as nobody else takes the
whole. A branch that reads rows of a large table where one was written looks which of them that is, and copies no table:

    old.index_copy(0, i, row)[rows] -> where(rows == i, row, old[rows])
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from tfnb.graph import Contents, Graph, Node, Ref, Spec, Subgraph, Value, Variable
from tfnb.graph.graph import new_id
from tfnb.graph.node import leaves, map_leaves
from tfnb.graph.ops import COND
from tfnb.kernels.places import WRITES
from tfnb.passes.rewrite import redirected, with_nodes

LARGE = 1024  # elements of a table from which on to look costs less than to copy it
_READS = frozenset({"aten.index.Tensor", "aten.index_select.default"})


def sink(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Writes of rows of which, but for the assignment, branches alone take the result are made in those, too."""
    finder = _Finder(graph, frozenset(fetches), frozenset(feeds))
    found = {value: write for node in graph.nodes for value, write in finder.taken(node)}
    if not found:
        return graph
    specs = {value: finder.spec(value) for write in found.values() for value in write.inputs}
    return with_nodes(graph, [_with_writes(node, found, specs) if node.op == COND else node for node in graph.nodes])


class _Finder:
    def __init__(self, graph: Graph, fetches: frozenset[Value], feeds: frozenset[Value]) -> None:
        self.contents, self.fetches, self.feeds = graph.contents, fetches, feeds
        self.assigns: dict[Variable, list[Node]] = {}
        self.reads: dict[Variable, list[Node]] = {}
        for node in graph.nodes:
            if node.op in ("tfnb.assign", "tfnb.read"):
                kept = self.assigns if node.op == "tfnb.assign" else self.reads
                kept.setdefault(node.attrs["variable"], []).append(node)

    def spec(self, value: Value) -> Spec:
        return self.contents.by_id[value.node].outputs[value.index]

    def taken(self, assign: Node) -> Iterable[tuple[Value, Node]]:
        """Values that are what ``assign`` stores, with the node that writes it, where branches take them."""
        if assign.op != "tfnb.assign" or len(self.assigns[assign.attrs["variable"]]) != 1:
            return ()
        variable, position = assign.attrs["variable"], self.contents.position
        write = self.contents.by_id.get(assign.inputs[0].node)
        old = None if write is None or write.op not in WRITES else self.contents.by_id.get(write.inputs[0].node)
        if write is None or old is None or old.op != "tfnb.read" or old.attrs["variable"] is not variable:
            return ()
        later = [n for n in self.reads[variable] if position[n.id] > position[assign.id]]
        values = [write.value(), assign.value(), *(node.value() for node in later)]
        if len(write.inputs) != 3 or any(self.spec(value).symbols for value in write.inputs):
            return ()
        if old in later or not {*self.feeds, *self.fetches}.isdisjoint([*values, old.value()]):
            return ()
        users = [self.contents.by_id[i] for value in values for i in self.contents.consumers.get(value, ())]
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
    """The branch with what the writes take for its operands, in the place of what they give."""
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
    """The branch that takes what is written into at ``place``, and the rows and values where it does not have them."""
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
    """One side, where the input at ``place`` is what is written into. specs: of rows and values, by their place."""
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
    nodes, given = [], {value.node for value in side.inputs}
    seen = _is_one_of_many(write, [*specs.values()])
    for each in contents.nodes:
        rows = _rows_read(each, whole, contents) if seen and each.id not in given else None
        if rows is not None:
            nodes += _looked_up(each, rows, inner, contents)
        else:
            nodes.append(each if each.id in given else redirected(each, same))
    head = max((contents.position[i] for i in given), default=-1) + 1
    nodes[head:head] = [*more, inner]
    outputs = tuple(None if value is None else same.get(value, value) for value in side.outputs)
    return replace(side, contents=replace(contents, nodes=tuple(nodes)), outputs=outputs, inputs=inputs)


# -- rows of a table in which one was written ---------------------------------------------------------------------


def _is_one_of_many(write: Node, specs: Sequence[Spec]) -> bool:
    """Whether one row of a large table is replaced."""
    shape = write.outputs[0].shape
    large = all(isinstance(size, int) for size in shape) and prod(shape) >= LARGE  # type: ignore[arg-type]
    return large and write.op == "aten.index_copy.default" and write.attrs["dim"] == 0 and specs[0].shape == (1,)


def _rows_read(node: Node, whole: Value, contents: Contents) -> Value | None:
    """The numbers of the rows that a node reads of a table, if that is all it does with it."""
    if node.op not in _READS or len(node.inputs) != 2 or node.inputs[0] != whole or node.inputs[1] == whole:
        return None
    if node.op == "aten.index.Tensor" and list(node.attrs["indices"]) != [Ref(1)]:
        return None
    if node.attrs.get("dim", 0) != 0:
        return None
    rows = contents.by_id[node.inputs[1].node].outputs[node.inputs[1].index]
    return node.inputs[1] if rows.dtype is torch.int64 and rows.device == node.outputs[0].device else None


def _looked_up(node: Node, rows: Value, write: Node, contents: Contents) -> list[Node]:
    """Nodes that give what ``node`` does, the last one in its place; rows may be negative numbers."""
    shape, where = contents.by_id[rows.node].outputs[rows.index].shape, write.inputs[1]
    device = node.outputs[0].device
    nodes = [replace(node, id=new_id(), name=f"{node.name}.old", control=(), forward=None)]

    def made(op: str, inputs: Sequence[Value], output: Spec, **attrs: Any) -> Value:
        refs = {name: Ref(place) for place, name in enumerate(("self", "other")[: len(inputs)])}
        number, name = new_id(), op.split(".")[1]
        nodes.append(
            replace(
                node, id=number, name=f"{node.name}.{name}{number}", op=op, inputs=tuple(inputs), outputs=(output,),
                attrs=refs | attrs, control=(), forward=None,
            )
        )  # fmt: skip
        return Value(number)

    hit = made("aten.eq.Tensor", [rows, where], Spec(torch.bool, shape, device))
    if node.op == "aten.index.Tensor":
        below = made("aten.sub.Tensor", [where], Spec(torch.int64, (1,), device), other=write.outputs[0].shape[0])
        other = made("aten.eq.Tensor", [rows, below], Spec(torch.bool, shape, device))
        hit = made("aten.bitwise_or.Tensor", [hit, other], Spec(torch.bool, shape, device))
    for _ in write.outputs[0].shape[1:]:
        shape = (*shape, 1)
        hit = made("aten.unsqueeze.default", [hit], Spec(torch.bool, shape, device), dim=-1)
    attrs = {"condition": Ref(0), "self": Ref(1), "other": Ref(2)}
    return [*nodes, replace(node, op="aten.where.self", inputs=(hit, write.inputs[2], nodes[0].value()), attrs=attrs)]
