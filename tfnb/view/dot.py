"""DOT text, built with the graphviz package: of one level for the layout, of the visible graph for a reader."""

from __future__ import annotations

from collections.abc import Sequence

import graphviz

from tfnb.view.wiring import Edge, End, Inlet, Outlet

Size = tuple[float, float]  # pixels

_EFFORT = {"nslimit": "4", "nslimit1": "4", "mclimit": "0.6"}  # bounds the simplex and the crossing search
EDGES = 250  # of one level that are laid out; more would take seconds
_BUSY = 4  # edges of a port from which on they no longer pull their ends together


def level(sizes: Sequence[Size], edges: Sequence[Edge]) -> str:
    """DOT of one level: boxes ``0, 1, ...`` of these sizes, ports, and the first `EDGES` edges by their place."""
    graph = graphviz.Digraph(
        graph_attr={"rankdir": "TB", "nodesep": "0.22", "ranksep": "0.34", **_EFFORT},
        node_attr={"shape": "box", "fixedsize": "true", "label": ""},
        edge_attr={"arrowhead": "none", "headport": "n", "tailport": "s"},
    )
    for place, (wide, high) in enumerate(sizes):
        graph.node(str(place), width=inches(wide), height=inches(high))
    _ports(graph, "source", dict.fromkeys(edge.tail for edge in edges if isinstance(edge.tail, Inlet)))
    _ports(graph, "sink", dict.fromkeys(edge.head for edge in edges if isinstance(edge.head, Outlet)))
    busy = busy_inlets(edges)
    for place, edge in enumerate(edges[:EDGES]):
        weight = "0" if edge.tail in busy else "1" if isinstance(edge.tail, Inlet) else "3"
        graph.edge(end(edge.tail), end(edge.head), id=str(place), weight=weight)
    return str(graph.source)


def _ports(graph: graphviz.Digraph, rank: str, ports: dict[End, None]) -> None:
    if not ports:
        return
    with graph.subgraph(graph_attr={"rank": rank}) as row:
        for port in ports:
            row.node(end(port), width="0.08", height="0.02")


def busy_inlets(edges: Sequence[Edge]) -> set[End]:
    """Inlets with so many users that their edges are drawn pale."""
    tails = [edge.tail for edge in edges if isinstance(edge.tail, Inlet)]
    return {tail for tail in tails if tails.count(tail) > _BUSY}


def end(port: End) -> str:
    """The name of an end in DOT: a digit, or letters and digits."""
    match port:
        case Inlet(source=key):
            return "i" + "_".join(map(str, key))
        case Outlet(child=place):
            return f"o{place}"
    return str(port)


def inches(pixels: float) -> str:
    """Graphviz's unit, at 72 pixels each."""
    return f"{pixels / 72:.4f}"
