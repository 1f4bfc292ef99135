"""Generated code in two halves: what a compiler takes whole, and what comes behind nodes that it does not take.

Row-sparse gradients end a step so: how many rows there are, only the indices tell. Everything before is static.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set

from torch import fx

from tfnb.execution.lowering.lower import _evaluated
from tfnb.execution.lowering.program import Program, unwritten
from tfnb.graph import Dim
from tfnb.passes import feed_symbols

FEWEST = 8  # calls that are worth compiling before others


def halves(program: Program, late: Set[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """The code without ``late``, which takes what the program does, and the rest, which takes what the first gives.

    late: nodes with all that depends on them. None where that is most of the code, or little comes before it.
    """
    graph = program.module.graph
    early = sum(node.op == "call_function" for node in graph.nodes if node not in late)
    if 2 * len(late) > len(graph.nodes) or early < FEWEST:
        return None
    returned: tuple[fx.Node | None, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    sources = [source for node in late for source in node.all_input_nodes]
    inside = _repeated(graph, sources) | late
    taken = [source for node in graph.nodes if node in inside for source in node.all_input_nodes]  # in any process
    wanted = dict.fromkeys(n for n in (*taken, *returned) if isinstance(n, fx.Node) and n not in inside)
    first, second = fx.Graph(), fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in late and node.op != "output":
            new[node] = first.node_copy(node, new.__getitem__)
    first.output(tuple(new[node] for node in wanted))
    new = {node: second.placeholder(f"given{place}") for place, node in enumerate(wanted)}
    for node in graph.nodes:
        if node in inside:
            new[node] = second.node_copy(node, new.__getitem__)
    second.output(tuple(None if node is None else new[node] for node in returned))
    return unwritten(program.module, first), unwritten(program.module, second)


def behind(program: Program) -> set[fx.Node]:
    """Nodes that make a size which no feed shows, and all that depends on them."""
    known = feed_symbols(program.whole.contents, program.feeds).keys()
    return dependents(program, (node for node in program.module.graph.nodes if not sizes(program, node) <= known))


def sizes(program: Program, node: fx.Node) -> set[str]:
    """The symbols in the shapes that a call gives."""
    owner = program.node_of.get(node.name) if node.op == "call_function" else None
    specs = () if owner is None else owner.outputs
    return {s for spec in specs for d in spec.shape if isinstance(d, Dim) for s in d.symbols}


def dependents(program: Program, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that depends on them."""
    found = set(nodes)
    for node in program.module.graph.nodes:
        if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _repeated(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Sizes and constants, which the second half makes for itself: the first one gives tensors that it made."""
    found: set[fx.Node] = set()
    stack = list(sources)
    while stack:
        node = stack.pop()
        if node not in found and _is_number(node):
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _is_number(node: fx.Node) -> bool:
    if node.op in ("get_attr", "call_method"):
        return True
    own = getattr(node.target, "__module__", "") == operator.add.__module__ or node.target is _evaluated
    return node.op == "call_function" and own and node.target is not operator.getitem
