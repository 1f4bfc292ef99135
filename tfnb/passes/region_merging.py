"""Merging of nodes with subgraphs that differ only in their outputs.

A gradient saves values of a loop or branch in a copy of its node, whose subgraphs have the same inputs (ids are never
used twice), the same nodes, and further nodes and outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import replace
from typing import Any

from tfnb.graph import Contents, Node, Ref, Subgraph, Value
from tfnb.graph.node import leaves
from tfnb.graph.ops import COND, WHILE
from tfnb.graph.subgraph import row_places


def key(node: Node) -> Hashable:
    """Key shared by two nodes with the same computation and possibly different outputs."""
    attrs = node.attrs
    parts = (attrs["then"], attrs["else"]) if node.op == COND else (attrs["body"], attrs["cond"])
    how = () if node.op == COND else (attrs["reverse"], "given" if isinstance(attrs["limit"], Ref) else attrs["limit"])
    return node.op, node.inputs, node.control, node.device, how, *(part and part.inputs for part in parts)


def both(first: Node, other: Node) -> tuple[Node, dict[int, int]]:
    """``first`` with the outputs of ``other`` added; and the indices of the outputs of ``other`` among them."""
    return _branches(first, other) if first.op == COND else _loops(first, other)


def _branches(first: Node, other: Node) -> tuple[Node, dict[int, int]]:
    mine, theirs = first.attrs, other.attrs
    then, otherwise = _united(mine["then"], theirs["then"]), _united(mine["else"], theirs["else"])
    pairs = list(zip(then.outputs, otherwise.outputs, strict=True))
    outputs, shapes, places = list(first.outputs), list(mine["shapes"]), {}
    for place, pair in enumerate(zip(theirs["then"].outputs, theirs["else"].outputs, strict=True)):
        if pair not in pairs:
            pairs.append(pair)
            outputs.append(other.outputs[place])
            shapes.append(theirs["shapes"][place])
        places[place] = pairs.index(pair)
    then = replace(then, outputs=tuple(pair[0] for pair in pairs))
    otherwise = replace(otherwise, outputs=tuple(pair[1] for pair in pairs))
    attrs = {**mine, "then": then, "else": otherwise, "shapes": tuple(shapes)}
    return replace(first, attrs=attrs, outputs=tuple(outputs)), places


def _loops(first: Node, other: Node) -> tuple[Node, dict[int, int]]:
    carried = len(first.attrs["init"])
    body = _united(first.attrs["body"], other.attrs["body"])
    given, shapes, outputs = list(body.outputs[carried:]), list(first.attrs["rows"]), list(first.outputs)
    at, theirs = row_places(first.attrs), row_places(other.attrs)
    places = {place: place for place in range(carried + 1)}
    for row, value in enumerate(other.attrs["body"].outputs[carried:]):
        if value not in given:
            given.append(value)
            shapes.append(other.attrs["rows"][row])
            at.append(tuple(range(len(outputs), len(outputs) + len(theirs[row]))))
            outputs += [other.outputs[place] for place in theirs[row]]
        places.update(zip(theirs[row], at[given.index(value)], strict=True))
    body = replace(body, outputs=(*body.outputs[:carried], *given))
    return replace(first, attrs={**first.attrs, "body": body, "rows": tuple(shapes)}, outputs=tuple(outputs)), places


def _united(first: Subgraph, other: Subgraph) -> Any:
    """The first subgraph with the nodes of both."""
    known = first.contents.by_id
    more = tuple(node for node in other.contents.nodes if node.id not in known)
    return replace(first, contents=replace(first.contents, nodes=(*first.contents.nodes, *more))) if more else first


def kept_rows(contents: Contents, fetches: Collection[Value]) -> dict[Value, tuple[int, ...]]:
    """Outputs of loops that are rows, and that only loops take, as rows: nobody needs them in one piece.

    Each with the nodes that take it.
    """
    rows = {
        node.value(i): at for node in contents.nodes if node.op == WHILE for at in row_places(node.attrs) for i in at
    }
    if not rows:
        return {}
    found = {v: tuple(Value(v.node, i) for i in at) for v, at in rows.items()}
    others, users = set(fetches), dict[Value, tuple[int, ...]]()
    for node in contents.nodes:
        xs: Counter[int] = Counter()
        for x in node.attrs["xs"] if node.op == WHILE else ():
            refs = (x,) if isinstance(x, Ref) else x
            given = tuple(node.inputs[ref.input] for ref in refs)
            if all(found.get(v) == given for v in given):
                xs.update(ref.input for ref in refs)
        taken = Counter(leaf.input for leaf in leaves(node.attrs) if isinstance(leaf, Ref))
        for place, value in enumerate(node.inputs):
            if taken[place] != 1 or xs[place] != 1 or node.id in users.get(value, ()):
                others.add(value)
            users[value] = (*users.get(value, ()), node.id)
    return {v: users[v] for v, at in found.items() if v in users and others.isdisjoint(at)}


def counted_in_runs(contents: Contents, kept: Collection[Value], told: Collection[str]) -> set[Value]:
    """Kept rows whose bytes are counted at run time: rows that may be offloaded, or of sizes not in ``told``."""
    return {
        v for v in kept
        if contents.by_id[v.node].attrs.get("swap_memory") is not False
        or any(s not in told for i in _together(contents, v) for s in contents.by_id[v.node].outputs[i].symbols)
    }  # fmt: skip


def _together(contents: Contents, value: Value) -> tuple[int, ...]:
    return next(at for at in row_places(contents.by_id[value.node].attrs) if value.index in at)
