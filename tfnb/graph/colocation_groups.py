"""Colocation groups: the members of a group get one device request, merged field by field (S-145). Pure.

A member names the node or Variable that it is with (`tfnb.graph.device_request.with_group`). A group is the union of
all that name each other, with the reads and writes of its Variables and the gradients of its nodes. After `colocated`
each member has the request of the whole group, also where passes drop the node that the others named, under a key with
``_``: it is that of no node or Variable, so that nobody joins any more, and who is placed by other reasons may leave.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from tfnb.errors import InvalidArgument
from tfnb.graph.device_request import DeviceRequest, parse, readable, with_group
from tfnb.graph.graph import Graph
from tfnb.graph.node import Node
from tfnb.graph.subgraph import Recursion, map_nodes, with_inner
from tfnb.graph.variable import Variable

MOST = 8  # members that an error lists

Key = TypeVar("Key", bound=Hashable)


class DisjointSets(Generic[Key]):
    """Union-find. An item is in a set by itself until it is joined with another one."""

    def __init__(self, items: Iterable[Key] = ()) -> None:
        self._parent = {item: item for item in items}

    def __contains__(self, item: object) -> bool:
        return item in self._parent

    def root(self, item: Key) -> Key:
        """The item that stands for the set of an item."""
        self._parent.setdefault(item, item)
        while self._parent[item] != item:
            self._parent[item] = item = self._parent[self._parent[item]]
        return item

    def unite(self, one: Key, other: Key) -> None:
        """Make one set of the sets of two items; the root of the first stands for it.

        >>> sets = DisjointSets([1, 2, 3])
        >>> sets.unite(1, 2)
        >>> sets.root(2), sets.root(3)
        (1, 3)
        """
        self._parent[self.root(other)] = self.root(one)


def colocated(graph: Graph, whole: Graph | None = None) -> Graph:
    """The graph in which all members of a colocation group have the request of the group.

    whole: the graph that it was pruned from, whose other nodes are members, too. Raises InvalidArgument where hard
    requests of a group with members in the graph contradict each other. A soft one counts where no hard one says a
    task, and where it agrees with those before it.
    """
    everyone = tuple(with_inner((whole or graph).nodes))
    if not any(node.device is not None and "with:" in node.device for node in everyone):
        return graph
    nodes, asks = tuple(with_inner(graph.nodes)), dict[int, str]()
    ids = {node.id for node in nodes}
    for group in groups_in(everyone):
        members = ids.intersection(node.id for node in group.nodes)
        if members:
            asks |= dict.fromkeys(members, str(_merged(group)))
    if all(asks.get(node.id, node.device) == node.device for node in nodes):
        return graph  # merged before; the body of a recursive function stays the one that its calls hold
    made: dict[Recursion, Recursion] = {}

    def asking(node: Node) -> Node:
        request = asks.get(node.id, node.device)
        return node if request == node.device else replace(node, device=request)

    placed = tuple(map_nodes(asking, node, made) for node in graph.nodes)
    return graph.derive(replace(graph.contents, nodes=placed))


class ColocationGroup(NamedTuple):
    """A colocation group. title: as its members' requests have it. keys: all that name it. nodes: in program order."""

    title: str
    keys: list[str]
    nodes: list[Node]

    @property
    def key(self) -> str:
        """The key that merged requests have."""
        return self.title.rpartition("#")[2]


def groups_in(nodes: Sequence[Node]) -> Iterable[ColocationGroup]:
    """The groups of nodes."""
    sets: DisjointSets[str] = DisjointSets()
    named: dict[str, str] = {}  # name#key by key, in order of first mention
    for node in nodes:
        for group, key in _named(node):
            sets.unite(key, str(node.id))
            named.setdefault(key, group)
    names: dict[str, str] = {}  # of nodes and Variables, by key
    for node in nodes:
        variable = node.attrs.get("variable")
        names[str(node.id)] = node.name
        if isinstance(variable, Variable) and variable.key in sets:
            names[variable.key] = variable.name
            sets.unite(variable.key, str(node.id))
        elif _follows(node) and str(node.forward) in sets:
            sets.unite(str(node.forward), str(node.id))
    found: dict[str, ColocationGroup] = {}  # the name that is mentioned first stands for the group
    for key, group in named.items():
        merged = key if "_" in key else f"{key}_0"
        title = parse(with_group(names.get(key, group.rpartition("#")[0]), merged)).groups[0]
        found.setdefault(sets.root(key), ColocationGroup(title, [], [])).keys.append(key)
    for node in nodes:
        if str(node.id) in sets:
            found[sets.root(str(node.id))].nodes.append(node)
    return found.values()


def _named(node: Node) -> Iterator[tuple[str, str]]:
    """The groups that a node names, each as name#key and key."""
    if node.device is not None:
        request = parse(node.device)
        yield from zip(request.groups, request.keys, strict=True)


def _follows(node: Node) -> bool:
    """Whether a node is of a recorded derivative and asks for no place: it is where its forward node is."""
    is_gradient = "gradient" in node.tags and node.forward is not None
    return is_gradient and (node.device is None or not parse(node.device).has_place)


class _Claim(NamedTuple):
    """A request within a group, and who makes it."""

    request: DeviceRequest
    who: str
    node: Node


def _claims(group: ColocationGroup) -> Iterator[_Claim]:
    """The requests for a place within a group: of Variables where they were made, and of nodes."""
    seen: set[Variable] = set()
    for node in group.nodes:
        variable = node.attrs.get("variable")
        if isinstance(variable, Variable) and variable.key in group.keys and variable not in seen:
            seen.add(variable)
            if variable.request is not None:
                text = f"variable {variable.name} was made under {readable(variable.request)!r}"
                yield _Claim(parse(variable.request), text, node)
        if node.device is not None:
            at = f" ({node.source})" if node.source else ""
            yield _Claim(parse(node.device), f"{node.name} asks for {readable(node.device)!r}{at}", node)


def _merged(group: ColocationGroup) -> DeviceRequest:
    """The request of a group."""
    claims = [claim for claim in _claims(group) if claim.request.has_place]
    merged = DeviceRequest()
    for claim in claims:
        if not claim.request.soft:
            if not merged.agrees(claim.request):
                raise _contradiction(group, [claim for claim in claims if not claim.request.soft], claim.node)
            merged = merged.joined(claim.request)
    if merged.job is None and merged.task is None:
        for claim in claims:
            if claim.request.soft and merged.agrees(claim.request):
                merged = merged.joined(claim.request)
    return merged._replace(groups=(group.title,))


def _contradiction(group: ColocationGroup, claims: Sequence[_Claim], node: Node) -> InvalidArgument:
    """The error of a group whose hard requests contradict each other. node: the first that contradicts others."""
    lines = [*dict.fromkeys(claim.who for claim in claims)]
    asking = {claim.node.id for claim in claims}
    for member in group.nodes:
        if member.id not in asking and [*_named(member)]:
            at = f" ({member.source})" if member.source else ""
            lines.append(f"{member.name} asks to be with {', '.join(_names(member))}{at}")
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    text = "\n  ".join((*lines[:MOST], *more))
    return InvalidArgument(
        f"could not satisfy explicit device specification of node {node.name}: members of one colocation group ask for "
        f"different places:\n  {text}\nask for one place, ask with soft=True, or leave the group by "
        "tfnb.colocate_with(None)",
        **node.where,
    )


def _names(node: Node) -> Iterator[str]:
    """The names of the groups that a node asks to be in."""
    return (group.rpartition("#")[0] for group, _ in _named(node))
