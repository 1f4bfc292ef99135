"""From a finished recording to new graph contents: pure functions.

Sizes that turned out equal are unified, nodes of nothing but captured data that nobody can reach are dropped, the
owner's earlier nodes are replaced in place, and consumers in other cells are re-linked by name or become stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tfnb.graph import Contents, Guard, Node, Owner, Spec, Value
from tfnb.graph.node import map_leaves
from tfnb.graph.spec import Dim

_SOURCES = ("tfnb.placeholder", "tfnb.read", "tfnb.assign", "tfnb.group", "tfnb.guard")


def drop_unreachable_data(nodes: Iterable[Node], live: set[int]) -> list[Node]:
    """Without the nodes made of constants and factories alone that no kept node and no live handle uses.

    A placeholder's sample is often cut out of a data set in the cell itself; the data set must not stay in the graph.
    """
    nodes = list(nodes)
    known = {node.id for node in nodes}
    real: set[int] = set()
    for node in nodes:
        earlier = any(v.node not in known or v.node in real for v in node.inputs)
        if node.op in _SOURCES or earlier or node.id in live:
            real.add(node.id)
    needed: set[int] = set()
    for node in reversed(nodes):
        if node.id in real or node.id in needed:
            needed.add(node.id)
            needed.update(v.node for v in node.inputs)
            needed.update(node.control)
    return [node for node in nodes if node.id in needed]


def substitute(node: Node, sizes: Mapping[str, int | str]) -> Node:
    """The node with symbols replaced: by a number where a size became fixed, by a letter where two became one."""

    def dim(leaf: Any) -> Any:
        if not isinstance(leaf, Dim) or not set(leaf.symbols) & set(sizes):
            return leaf
        names = {s: sizes.get(s, s) for s in leaf.symbols}
        if all(isinstance(v, int) for v in names.values()):
            return leaf.evaluate(names)
        return leaf.rename(names)

    outputs = tuple(Spec(s.dtype, tuple(dim(d) for d in s.shape), s.device) for s in node.outputs)
    return replace(node, outputs=outputs, attrs=map_leaves(dim, node.attrs) if node.symbols else node.attrs)


def unified_guards(guards: Iterable[Guard], sizes: Mapping[str, int | str]) -> list[Guard]:
    """The guards over the symbols that remain; those that became trivial are gone."""
    kept = []
    for guard in guards:
        relation = Dim(guard.expr).rename(sizes) if set(guard.symbols) & set(sizes) else Dim(guard.expr)
        left, equal, right = relation.expr.partition(" == ")
        if relation.symbols and not (equal and left == right):
            kept.append(replace(guard, expr=relation.expr))
    return kept


def replaced(
    old: Contents, new: list[Node], guards: list[Guard], aliases: Mapping[str, Value], owner: Owner, *, append: bool
) -> tuple[Contents, dict[int, str]]:
    """Contents with ``owner``'s block replaced by ``new``, and the nodes that are gone with what to re-run.

    The block keeps its place in program order unless it uses nodes recorded later.
    """
    mine = [] if append else [n for n in old.nodes if n.owner is not None and n.owner.key == owner.key]
    gone = {n.id: _rerun(n) for n in mine}
    moved = _relinked(mine, new)
    others = [n for n in old.nodes if n.id not in gone]
    place = _place(old, others, mine, new)
    before, after = others[:place], others[place:]
    new_ids = {n.id for n in new}
    kept_after: list[Node] = []
    available = {n.id for n in before} | new_ids
    bound = {s for n in (*before, *new, *after) if n.op == "tfnb.placeholder" for s in n.outputs[0].symbols}
    for node in after:
        node = _relink(node, moved)
        bound.update(s for spec in node.outputs for s in spec.symbols if s not in node.symbols)
        if (
            any(v.node not in available for v in node.inputs)
            or any(c not in available for c in node.control)
            or not bound.issuperset(node.symbols)
        ):
            gone[node.id] = _rerun(node)
            continue
        available.add(node.id)
        kept_after.append(node)
    nodes = (*before, *new, *kept_after)
    ids = {n.id for n in nodes}
    kept_guards = [g for g in old.guards if append or g.owner is None or g.owner.key != owner.key]
    kept_aliases = {k: v for k, v in old.aliases.items() if v.node in ids}
    return Contents(nodes, (*kept_guards, *guards), {**kept_aliases, **aliases}), gone


def _rerun(node: Node) -> str:
    where = node.source.label if node.source else "its cell"
    return f"node {node.name} was recorded by an earlier run of {where}; run {where} again"


def _relinked(mine: list[Node], new: list[Node]) -> dict[Value, Value]:
    """Old value -> new value for nodes of the same name, op and specs."""
    fresh = {n.name: n for n in new}
    moved: dict[Value, Value] = {}
    for node in mine:
        twin = fresh.get(node.name)
        if twin is not None and twin.op == node.op and twin.outputs == node.outputs:
            moved.update({Value(node.id, i): Value(twin.id, i) for i in range(max(1, len(node.outputs)))})
    return moved


def _relink(node: Node, moved: Mapping[Value, Value]) -> Node:
    if not any(v in moved for v in node.inputs) and not any(Value(c) in moved for c in node.control):
        return node
    return replace(
        node,
        inputs=tuple(moved.get(v, v) for v in node.inputs),
        control=tuple(moved.get(Value(c), Value(c)).node for c in node.control),
        forward=node.forward if node.forward is None else moved.get(Value(node.forward), Value(node.forward)).node,
    )


def _place(old: Contents, others: list[Node], mine: list[Node], new: list[Node]) -> int:
    """Where the block stands among the others: its old place, or after the last node that it uses."""
    if not mine:
        return len(others)
    first = old.position[mine[0].id]
    place = sum(old.position[n.id] < first for n in others)
    used = {v.node for n in new for v in n.inputs} | {c for n in new for c in n.control}
    last = max((i for i, n in enumerate(others) if n.id in used), default=-1)
    return max(place, last + 1)
