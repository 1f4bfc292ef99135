"""Resolution of a word in a magic's line to a graph or value: the notebook's variables first, then graphs.

``tfnb.<name>`` loads torch when first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

from IPython.core.error import UsageError

import tfnb


def graph_meant(names: Mapping[str, Any], graph: str | None, *words: str) -> Any:
    """The graph of a line: ``graph`` of its ``-g``, else the graph that contains the named items.

    names: the notebook's variables. One that holds a graph, or a recorded value, means that graph; else it is the graph
    of this name, and for nodes, Variables and patterns of them the latest graph that has all. Raises UsageError where
    none has.
    """
    listed = list(tfnb.graphs().values())
    if graph is not None:
        found = [_graph_held(names, graph) or _graph_named(graph)]
    else:
        held = (_graph_held(names, word) for word in words)
        found = [*filter(None, held)][:1] or [_graph_named(None), *reversed(listed)]
    best = next((each for each in found if all(_has(names, each, word) for word in words)), found[0])
    having = {word: [each.name for each in listed if _has(names, each, word)] for word in words}
    lacking = next((word for word in words if having[word] and not _has(names, best, word)), None)
    if lacking is None:
        return best  # what no graph has is for the call to say, with names that are near
    if whole := [each.name for each in listed if all(each.name in graphs for graphs in having.values())]:
        raise UsageError(f"graph {best.name} has no node {lacking!r}; add -g {' or -g '.join(whole)}")
    places = "; ".join(f"{word} is in {' and '.join(graphs) or 'none'}" for word, graphs in having.items())
    raise UsageError(f"no graph has all of {', '.join(words)}: {places}")


def fetch_meant(names: Mapping[str, Any], graph: tfnb.Graph, word: str) -> Any:
    """The fetch named by a word: a name in the graph, else the recorded value of the notebook's variable."""
    held = names.get(word)
    return held if word not in graph and _is_recorded(held) and held.graph is graph else word


def _graph_named(name: str | None) -> Any:
    try:
        return tfnb.graph(name)
    except tfnb.errors.NotFound as error:
        raise UsageError(str(error)) from None


def _graph_held(names: Mapping[str, Any], name: str) -> Any:
    held = names.get(name)
    return held if isinstance(held, tfnb.Graph) else held.graph if _is_recorded(held) else None


def is_graph(names: Mapping[str, Any], name: str) -> bool:
    """Whether a word alone means a graph."""
    return name in tfnb.graphs() or _graph_held(names, name) is not None


def _is_recorded(held: object) -> TypeGuard[Any]:
    return isinstance(held, tfnb.Tensor | tfnb.Operation)


def _has(names: Mapping[str, Any], graph: tfnb.Graph, word: str) -> bool:
    """Whether a graph contains the notebook variable's value, else a node or Variable of this name or pattern."""
    held = names.get(word)
    if _is_recorded(held) and held.graph is graph:
        return True
    variables = graph.contents.variables
    variable = tfnb.recording.values.variables.known(held) if type(held).__name__ == "Parameter" else held
    if isinstance(variable, tfnb.Variable):
        return any(each is variable for each in variables.values())
    try:
        graph.value(word)
    except tfnb.errors.NotFound:
        pattern = word.replace("/", ".")
        return any(fnmatchcase(each.replace("/", "."), pattern) for each in (*graph.contents.names, *variables))
    return True
