"""The choice of graph for a checkpoint, and the Variables it leaves out: several graphs may share a model's Variables.

A graph that only evaluates a model lacks the optimizer's Variables, which the graph that trains it has.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from tfnb.graph import Graph, Variable
from tfnb.graph.subgraph import queues_of
from tfnb.graph.tensor_files import read_facts
from tfnb.recording import graphs
from tfnb.state import queue_contents

_FEW = 4


def header(path: str | PathLike[str]) -> tuple[list[str], str | None]:
    """Labels of the Variables in a file, and the name of its graph, absent in files of other libraries.

    Reads the header alone: a restore says whether the file is whole. Raises CheckpointCorrupt for one without a header.
    """
    keys, about = read_facts(Path(path))
    meta = about.get("meta")
    facts = meta if isinstance(meta, dict) else {}
    of_queues = facts.get("queues", ())
    labels, _ = queue_contents.split(dict.fromkeys(keys), of_queues if isinstance(of_queues, dict) else ())
    name = facts.get("graph")
    return list(labels), name if isinstance(name, str) else None


def widest(graph: Graph) -> Graph:
    """The named graph that has all Variables of ``graph`` and the most others; ``graph`` itself where there is none.

    >>> import torch, tfnb
    >>> layer = torch.nn.Linear(2, 1)
    >>> with tfnb.record("widest"):
    ...     x = tfnb.placeholder(torch.ones(4, 2))
    ...     train = tfnb.train.Adam().minimize(layer(x).square().mean())
    >>> with tfnb.record("narrow") as narrow:
    ...     y = layer(tfnb.placeholder(torch.ones(4, 2)))
    >>> widest(narrow).name
    'widest'
    """
    own = set(graph.contents.variables.values())
    wider = [each for each in graphs().values() if own <= set(each.contents.variables.values())]
    return max([graph, *reversed(wider)], key=lambda each: len(each.contents.variables))


def fitting(graph: Graph, labels: Container[str], name: str | None) -> Graph:
    """The graph to restore from a file: the first whose Variables are all in the file, else ``graph``.

    Asked are the widest graph, ``graph`` and the graph whose name the file tells. labels: of the file's tensors.
    """
    asked = [widest(graph), graph, *(each for each in graphs().values() if each.name == name)]
    return next((each for each in asked if all(label in labels for label in settable(each))), graph)


def settable(graph: Graph) -> dict[str, Variable]:
    """Variables that a restore sets, by label: all but the mirrors of a torch optimizer's numbers."""
    return {label: variable for label, variable in graph.contents.variables.items() if variable.leads is None}


def left_out(graph: Graph, *, related: bool) -> Iterator[tuple[str, Graph]]:
    """The names of Variables and queues of other named graphs that ``graph`` lacks, each with that graph.

    related: only of graphs that share a Variable or queue with it.
    """
    own = set(_held(graph).values())
    for other in graphs().values():
        found = _held(other)
        lacking = [label for label, item in found.items() if item not in own]
        if lacking and not (related and own.isdisjoint(found.values())):
            yield few(lacking), other


def few(labels: list[str]) -> str:
    """The first labels, and how many more there are."""
    return ", ".join(labels[:_FEW]) + (f" and {len(labels) - _FEW} more" if len(labels) > _FEW else "")


def _held(graph: Graph) -> Mapping[str, Any]:
    return {**{queue.name: queue for queue in queues_of(graph.nodes)}, **graph.contents.variables}
