"""Nodes with subgraphs, opened: inner nodes stand before them as ordinary nodes, in a scope of their own.

For drawings only. What a subgraph is given becomes a node that takes the value from outside, and the node itself takes
what its subgraphs give; so the edges of a picture go in and come out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from tfnb.graph import Contents, Node, Ref, Subgraph, Value
from tfnb.graph.node import leaves
from tfnb.graph.ops import COND, REGIONS

ARGUMENT = "tfnb.argument"

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenedGraph:
    """The contents with all subgraphs opened, and ids of nodes in branches that a run took, and did not take.

    ``paths``: of each node that is in a loop or branch, the recorded ids of those around it and its own. ``sides``: the
    nodes in the sides of branches, by the branch's path and which of them it is.
    """

    contents: Contents
    lit: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    paths: Mapping[int, Path] = field(default_factory=dict)
    sides: Mapping[tuple[Path, bool], tuple[int, ...]] = field(default_factory=dict)


def opened(
    contents: Contents, taken: Mapping[int, Collection[bool]] | None = None, keep: Collection[int] = ()
) -> OpenedGraph:  # fmt: skip
    """The contents with all subgraphs opened, at any depth.

    keep: constants and the like that are shown even where a loop does not use them. taken: the sides that
    a run took, by the branch's id.
    """
    if not any(node.op in REGIONS for node in contents.nodes):
        return OpenedGraph(contents)
    opening = _Opening(taken or {})
    found = [inner for node in contents.nodes for inner in opening.node(node)]
    opening.taken_from.update(value.node for node in contents.nodes for value in node.inputs)
    nodes = tuple(_without_unused(found, opening.taken_from.difference(keep)))
    dead = frozenset(opening.dead)
    shown = Contents(nodes, contents.guards, contents.bindings)
    return OpenedGraph(shown, frozenset(opening.lit) - dead, dead, opening.paths, opening.sides)


def _without_unused(nodes: Sequence[Node], taken: Collection[int]) -> Iterator[Node]:
    """Nodes without constants, zeros and the like that a loop is given, among ``taken``, but never uses."""
    used = {value.node for node in nodes for value in node.inputs}
    return (n for n in nodes if n.inputs or n.op == "tfnb.placeholder" or n.id in used or n.id not in taken)


class _Opening:
    """One pass over a graph. A loop and the copy that saves its values hold the same nodes: the second gets new ids."""

    def __init__(self, taken: Mapping[int, Collection[bool]]) -> None:
        self.taken, self.lit, self.dead = taken, set[int](), set[int]()
        self.paths: dict[int, Path] = {}
        self.sides: dict[tuple[Path, bool], tuple[int, ...]] = {}
        self._scopes: dict[int, tuple[str, ...]] = {}  # as recorded
        self.taken_from: set[int] = set()  # nodes of which others take values
        self._met: set[int] = set()
        self._own: dict[int, int] = {}  # ids that were made up, and what they stand for
        self._ids = count(-1, -1)

    def node(self, node: Node) -> Iterator[Node]:
        """The node, after its inner nodes."""
        if node.op not in REGIONS:
            yield node
            return
        given: list[Value] = []
        for part, subgraph in node.attrs.items():
            if isinstance(subgraph, Subgraph):
                ids = {inner.id: self._id(inner.id) for inner in subgraph.contents.nodes}  # of each copy its own
                inner_nodes = list(self._part(node, part, subgraph, ids))
                self._note(node, part, inner_nodes)
                yield from inner_nodes
                given += [Value(ids[v.node], v.index) for v in subgraph.outputs if v is not None]
        attrs = {name: attr for name, attr in node.attrs.items() if isinstance(attr, (int, str))}
        inputs = tuple(dict.fromkeys([*(node.inputs[:1] if node.op == COND else ()), *given]))
        yield replace(node, inputs=inputs, attrs={**attrs, "given": tuple(map(Ref, range(len(inputs))))})

    def _note(self, node: Node, part: str, inner: Iterable[Node]) -> None:
        """Note whether a run took this side of a branch; for a branch never reached, neither side is known."""
        if node.op != COND:
            return
        way, ids = part == "then", tuple(n.id for n in inner)
        self.sides[self.paths.get(node.id, (node.id,)), way] = ids
        ways = self.taken.get(self._own.get(node.id, node.id), ())
        if ways:
            (self.lit if way in ways else self.dead).update(ids)

    def _id(self, node: int) -> int:
        if node in self._met:
            made = next(self._ids)
            self._own[made] = node
            return made
        self._met.add(node)
        return node

    def _part(self, node: Node, part: str, subgraph: Subgraph, ids: dict[int, int]) -> Iterator[Node]:
        """The nodes of one subgraph, at the line of the enclosing node."""
        values = dict(zip(subgraph.inputs, _given(node, part), strict=True))
        used = {value for inner in subgraph.contents.nodes for value in inner.inputs}.union(subgraph.outputs)
        self.taken_from.update(ids[value.node] for value in used if value is not None)
        around, scope = self.paths.get(node.id, (node.id,)), self._scopes.get(node.id, node.scope)
        for inner in subgraph.contents.nodes:
            if inner.op == "tfnb.placeholder" and inner.value() not in used:
                continue
            self.paths[ids[inner.id]] = (*around, inner.id)
            pairs = enumerate(zip(scope, inner.scope, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), min(len(scope), len(inner.scope)))
            self._scopes[ids[inner.id]] = inner.scope
            place: dict[str, Any] = {
                "id": ids[inner.id], "name": f"{node.name}/{part}/{inner.name}", "source": node.source,
                "scope": (*node.scope, part, *inner.scope[shared:]), "owner": node.owner, "tags": node.tags,
                "forward": node.forward, "inputs": tuple(Value(ids[v.node], v.index) for v in inner.inputs),
                "control": tuple(ids[i] for i in inner.control),
            }  # fmt: skip
            if inner.op == "tfnb.placeholder":
                value = values[inner.value()]
                taken = () if value is None else (value,)
                place |= {"op": ARGUMENT, "inputs": taken, "attrs": {"value": Ref(0)} if taken else {}}
                place["scope"] = (*node.scope, part, inner.name)
            yield from self.node(replace(inner, **place))


def _given(node: Node, part: str) -> list[Value | None]:
    """The outside value of each input of a subgraph."""
    names = ["operands"] if node.op == COND else ["init", "xs", "captures"] if part == "body" else ["init", "captures"]
    found: list[Value | None] = []
    for name in names:
        for item in node.attrs[name]:
            refs = [leaf for leaf in leaves(item) if isinstance(leaf, Ref)]
            found.append(node.inputs[refs[0].input] if refs else None)
    return found
