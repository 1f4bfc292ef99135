"""Subgraph: a function as data, held by a node of structured control flow. Immutable, closed, without state.

Its contents are ordinary nodes; its inputs are their placeholders, so whatever works on a graph with feeds works on a
subgraph. It names no value of the graph around it: what it takes from there is an input. It neither reads nor writes
variables: the node around it takes and gives their values. It may use queues.

``tfnb.cond`` (``pred``, ``operands``, ``then``, ``else``, ``shapes``) gives the outputs of one of two subgraphs of the
operands; ``shapes`` has the shape of each output that may be absent, None for others.

``tfnb.while`` (``init``, ``xs``, ``captures``, ``cond``, ``body``, ``limit``, ``rows``, ``reverse``) runs ``body`` on
the carried values, one row of each of ``xs``, and the captures, as long as ``cond`` of the carried values and captures
holds (None: always), at most ``limit`` times, and once for each row of ``xs``. The body gives the next carried values,
then rows. The node's outputs are the carried values, the number of iterations, and the rows stacked; ``rows`` has their
shapes. Where ``rows`` has a rank instead, each row has a shape of its own, and there are two outputs: the elements of
all of them, and their shapes, [iterations, rank]. A pair among ``xs`` is such a sequence. With ``reverse`` the last
rows of ``xs`` and of the result belong to the first iteration. With ``replicas``, a pair (first, step), iteration i
draws what the replica at place ``first + i * step`` of a step draws.

``tfnb.call`` (``function``, ``args``) gives the outputs of the body of a `Recursion` for its args.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tfnb.graph.contents import Contents, Guard
from tfnb.graph.device_request import parse
from tfnb.graph.node import Node, Value, leaves, map_leaves
from tfnb.graph.ops import CALL, QUEUES, REGIONS


def row_places(attrs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The places of each of a loop's rows among the outputs of its node."""
    at = len(attrs["init"]) + 1
    places: list[tuple[int, ...]] = []
    for row in attrs["rows"]:
        places.append((at, at + 1) if isinstance(row, int) else (at,))
        at += len(places[-1])
    return places


@dataclass(frozen=True, eq=False)
class Subgraph:
    """``contents`` as a function from ``inputs``, its placeholders in order, to ``outputs``.

    An output that is None is absent: nobody looks at it, and what stands for it has the right shape and no meaning.
    """

    contents: Contents
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]

    @cached_property
    def draws(self) -> bool:
        """Whether something inside draws random numbers."""
        return any(node.stream is not None or any(s.draws for s in subgraphs(node)) for node in self.contents.nodes)

    @cached_property
    def guards(self) -> tuple[Value, ...]:
        """Guards that hold at every call: consumers of the outputs are computed below them."""
        return tuple(node.value() for node in self.contents.nodes if is_guarding(node))

    def __repr__(self) -> str:
        inner = len(self.contents.nodes) - len(self.inputs)
        return f"<Subgraph: {len(self.inputs)} inputs, {inner} nodes, {len(self.outputs)} outputs>"


class Recursion:
    """A recursive function: the nodes of its ``body`` that call the function hold this very object.

    ``limit``: how deep. The body is put in when it is there, and never replaced.
    """

    __slots__ = ("_body", "limit", "name")

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, limit
        self._body: Subgraph | None = None

    @property
    def body(self) -> Subgraph:
        """The subgraph that a call computes."""
        assert self._body is not None, f"{self.name} is still being recorded"
        return self._body

    def define(self, body: Subgraph) -> None:
        """Set the subgraph that a call computes, once."""
        assert self._body is None
        self._body = body

    def __repr__(self) -> str:
        return f"<Recursion {self.name}>"


def subgraphs(node: Node) -> Iterator[Subgraph]:
    """The subgraphs that a node holds."""
    if node.op in REGIONS:
        yield from (leaf for leaf in leaves(node.attrs) if isinstance(leaf, Subgraph))


def is_guarding(node: Node) -> bool:
    """Whether a node is a guard of all nodes below, or contains a guard in a subgraph."""
    return node.op == "tfnb.guard" or any(inner.op == "tfnb.guard" for inner in nested(node))


def uses_queues(node: Node) -> bool:
    """Whether a node, or a node in its subgraphs, uses a queue: such a node acts when run, and may wait."""
    return node.op in QUEUES or any(inner.op in QUEUES for inner in nested(node))


def queues_of(nodes: Iterable[Node]) -> tuple[Any, ...]:
    """The queues used by nodes and by nodes in their subgraphs, in order of first use."""
    everyone = (inner for node in nodes for inner in (node, *nested(node)))
    return tuple(dict.fromkeys(node.attrs["queue"] for node in everyone if node.op in QUEUES))


def map_nodes(
    function: Callable[[Node], Node], node: Node, made: dict[Recursion, Recursion] | None = None, *,
    guards: Callable[[tuple[Guard, ...]], Iterable[Guard]] = tuple,
) -> Node:  # fmt: skip
    """``function`` of the node, its subgraphs' nodes mapped before, from the inside out; ``guards`` of their guards.

    made: recursive functions with their mapped ones, which several nodes may share.
    """
    made = {} if made is None else made

    def mapped(leaf: object) -> object:
        if isinstance(leaf, Recursion):
            if leaf not in made:
                made[leaf] = Recursion(leaf.name, leaf.limit)
                made[leaf].define(body(leaf.body))
            return made[leaf]
        return body(leaf) if isinstance(leaf, Subgraph) else leaf

    def body(part: Subgraph) -> Subgraph:
        inner = tuple(map_nodes(function, node, made, guards=guards) for node in part.contents.nodes)
        return replace(part, contents=replace(part.contents, nodes=inner, guards=tuple(guards(part.contents.guards))))

    if node.op in REGIONS or node.op == CALL:
        node = replace(node, attrs=map_leaves(mapped, node.attrs))
    return function(node)


def with_inner(nodes: Iterable[Node], _seen: set[Recursion] | None = None) -> Iterator[Node]:
    """The nodes, each followed by those inside of it, also of the recursive functions that it calls, each once."""
    seen = set() if _seen is None else _seen
    for node in nodes:
        yield node
        for part in subgraphs(node):
            yield from with_inner(part.contents.nodes, seen)
        for leaf in leaves(node.attrs) if node.op == CALL else ():
            if isinstance(leaf, Recursion) and leaf not in seen and leaf._body is not None:
                seen.add(leaf)
                yield from with_inner(leaf.body.contents.nodes, seen)


def group_keys(node: Node) -> tuple[str, ...]:
    """The keys of the colocation groups that a node, or a node inside of it, asks to be in."""
    devices = (each.device for each in with_inner([node]))
    return tuple(dict.fromkeys(key for device in devices if device and "#" in device for key in parse(device).keys))


def nested(node: Node) -> Iterator[Node]:
    """All nodes inside of a node, at any depth."""
    for subgraph in subgraphs(node):
        for inner in subgraph.contents.nodes:
            yield inner
            yield from nested(inner)


def path_to(nodes: Iterable[Node], wanted: int) -> list[str] | None:
    """Names of the node with id ``wanted`` and of its enclosing regions, innermost first; None if no region contains
    it.
    """
    for node in nodes:
        for part, subgraph in node.attrs.items():
            if not isinstance(subgraph, Subgraph):
                continue
            inside = subgraph.contents.nodes
            found = [inner.name for inner in inside if inner.id == wanted] or path_to(inside, wanted)
            if found is not None:
                return [*found, _words(node, part)]
    return None


def _words(node: Node, part: str) -> str:
    """A region for messages: with the line, and of a branch with the value that leads there."""
    which = f"the `{part}` of {node.name}"
    if part in ("then", "else"):
        which += f", taken where its predicate is {part == 'then'}"
    return which + (f" ({node.source})" if node.source else "")
