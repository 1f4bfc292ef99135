"""DOT text, built with the graphviz package: of one level for the layout, of the visible graph for a reader."""

from __future__ import annotations

from collections.abc import Sequence

import graphviz

from tfnb.view.wiring import DrawnEdge, End, Inlet, Outlet

Size = tuple[float, float]  # pixels

_EFFORT = {"nslimit": "4", "nslimit1": "4", "mclimit": "0.6"}  # bounds the simplex and the crossing search
EDGES = 250  # of one level that are laid out; more would take seconds
_BUSY = 4  # edges of a port from which on they no longer pull their ends together


def level(sizes: Sequence[Size], edges: Sequence[DrawnEdge]) -> str:
    """DOT of one level: boxes ``0, 1, ...`` of these sizes, ports, and the first `EDGES` edges by their place."""
    graph = graphviz.Digraph(
        graph_attr={"rankdir": "TB", "nodesep": "0.22", "ranksep": "0.34", **_EFFORT},
        node_attr={"shape": "box", "fixedsize": "true", "label": ""},
        edge_attr={"arrowhead": "none", "headport": "n", "tailport": "s"},
    )
    names = ends(edges)
    graph.body += [
        f"\t{place} [height={inches(high)} width={inches(wide)}]\n" for place, (wide, high) in enumerate(sizes)
    ]  # NOTE: the body takes lines as they are; quoting number by number takes longer than the layout
    _ports(graph, "source", [name for end, name in names.items() if isinstance(end, Inlet)])
    _ports(graph, "sink", [name for end, name in names.items() if isinstance(end, Outlet)])
    busy = busy_inlets(edges)
    for place, edge in enumerate(edges[:EDGES]):
        weight = 0 if edge.tail in busy else 1 if isinstance(edge.tail, Inlet) else 3
        graph.body.append(f"\t{names[edge.tail]} -> {names[edge.head]} [id={place} weight={weight}]\n")
    return str(graph.source)


def _ports(graph: graphviz.Digraph, rank: str, names: Sequence[str]) -> None:
    if names:
        with graph.subgraph(graph_attr={"rank": rank}, node_attr={"width": "0.08", "height": "0.02"}) as row:
            row.body += [f"\t\t{name}\n" for name in names]


def busy_inlets(edges: Sequence[DrawnEdge]) -> set[End]:
    """Inlets with so many users that their edges are drawn pale."""
    tails = [edge.tail for edge in edges if isinstance(edge.tail, Inlet)]
    return {tail for tail in tails if tails.count(tail) > _BUSY}


def ends(edges: Sequence[DrawnEdge]) -> dict[End, str]:
    """Names of all ends in DOT, by place: equal levels of different boxes have the same DOT and are laid out once."""
    names: dict[End, str] = {}
    for end in (end for edge in edges for end in (edge.tail, edge.head)):
        if end not in names:
            names[end] = (
                f"i{len(names)}" if isinstance(end, Inlet) else f"o{end.child}" if isinstance(end, Outlet) else str(end)
            )
    return names


def inches(pixels: float) -> str:
    """Graphviz's unit, at 72 pixels each."""
    return f"{pixels / 72:.4f}"
