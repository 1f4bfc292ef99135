"""The letters of sizes when a block enters a graph: pure functions.

A size keeps the letter that it had in the earlier run of its cell, whatever letter this run gave it. Where that is not
possible (the user names it, two sizes became one), the cells below take the new letter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfnb.graph import Contents, Guard, Node, Spec
from tfnb.graph.contents import Names
from tfnb.graph.node import map_leaves
from tfnb.graph.spec import Dim
from tfnb.graph.subgraph import map_nodes


@dataclass(frozen=True, slots=True)
class Letters:
    """Renamed letters. block: letters of this run -> letters in the graph. below: letters of the earlier run -> new
    letters.
    """

    block: Mapping[str, str] = field(default_factory=dict)
    below: Mapping[str, str] = field(default_factory=dict)


def matched(
    mine: Sequence[Node], new: Sequence[Node], old: Contents, others: Sequence[Node], chosen: Collection[str]
) -> Letters:
    """Match the sizes of a block with the sizes of its earlier run, by nodes of the same name.

    mine, new: the block's nodes of the earlier run and of this one. others: all other nodes of the graph. chosen:
    letters that the user gave in this run.
    """
    bound_before = _bound(old.nodes, mine)
    bound_now = _bound((*(n for n in others if old.position[n.id] < old.position[mine[0].id]), *new), new)
    block: dict[str, str] = {}
    below: dict[str, str] = {}
    pairs = [(o, n) for o, n in _pairs(mine, new) if o in bound_before and n in bound_now]
    for before, now in pairs:
        is_free = before not in block.values() and before not in below and before not in chosen
        if now not in block and now not in chosen and is_free:
            block[now] = before
        elif before not in block.values() and before not in below:
            below[before] = now
    names = Names({*block.values(), *bound_before, *chosen, *_symbols(others)})
    for letter in bound_now:
        if letter not in block and letter not in chosen:
            block[letter] = names.fresh(letter)
    below = {before: block.get(now, now) for before, now in below.items()}
    return Letters(_changes(block), _changes(below))


def _changes(letters: Mapping[str, str]) -> dict[str, str]:
    return {one: other for one, other in letters.items() if one != other}


def _bound(nodes: Iterable[Node], block: Iterable[Node]) -> tuple[str, ...]:
    """The letters bound by ``nodes`` whose binding node is in ``block``."""
    ids = {node.id for node in block}
    return tuple(letter for letter, (value, _) in Contents(tuple(nodes)).symbols.items() if value.node in ids)


def _symbols(nodes: Iterable[Node]) -> Iterator[str]:
    return (symbol for node in nodes for spec in node.outputs for symbol in spec.symbols)


def _pairs(mine: Iterable[Node], new: Iterable[Node]) -> Iterator[tuple[str, str]]:
    """Letters of the earlier run and of this one that name the same axis of a node."""
    twins = {node.name: node for node in new}
    for node in mine:
        twin = twins.get(node.name)
        if twin is None or twin.op != node.op:
            continue
        for before, now in zip(node.outputs, twin.outputs, strict=False):
            for one, other in zip(before.shape, now.shape, strict=False):
                if isinstance(one, Dim) and isinstance(other, Dim) and one.is_symbol and other.is_symbol:
                    yield one.expr, other.expr


def substitute(node: Node, sizes: Mapping[str, int | str]) -> Node:
    """The node with symbols replaced: by a number where a size became fixed, by a letter where two became one."""
    return map_nodes(lambda inner: _substituted(inner, sizes), node, guards=lambda each: unified_guards(each, sizes))


def _substituted(node: Node, sizes: Mapping[str, int | str]) -> Node:

    def dim(leaf: object) -> Any:
        if not isinstance(leaf, Dim) or not set(leaf.symbols) & set(sizes):
            return leaf
        names = {s: sizes.get(s, s) for s in leaf.symbols}
        if all(isinstance(v, int) for v in names.values()):
            return leaf.evaluate(names)
        return leaf.rename(names)

    outputs = tuple(Spec(s.dtype, tuple(dim(d) for d in s.shape), s.device) for s in node.outputs)
    return replace(node, outputs=outputs, attrs=map_leaves(dim, node.attrs) if node.symbols else node.attrs)


def unified_guards(guards: Iterable[Guard], sizes: Mapping[str, int | str]) -> list[Guard]:
    """The guards over the remaining symbols, without guards that became trivial."""
    kept = []
    for guard in guards:
        relation = Dim(guard.expr).rename(sizes) if set(guard.symbols) & set(sizes) else Dim(guard.expr)
        left, equal, right = relation.expr.partition(" == ")
        if relation.symbols and not (equal and left == right):
            kept.append(replace(guard, expr=relation.expr))
    return kept
