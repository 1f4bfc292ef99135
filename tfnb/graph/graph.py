"""Graph: a named handle to immutable contents.

A recording builds new contents and swaps them in with `Graph.commit`, which raises ``version``; a run keeps what it
started with. Everything between recording and running is a function from Graph to Graph.
"""

from __future__ import annotations

import difflib
import itertools
import threading
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from tfnb.errors import FailedPrecondition, InvalidArgument, NotFound, ensure_type
from tfnb.graph.check import check
from tfnb.graph.contents import Contents, Guard
from tfnb.graph.difference import Difference, Matching, compared
from tfnb.graph.forms.serial import read_graph, write_graph
from tfnb.graph.forms.text import text
from tfnb.graph.node import Node, Value
from tfnb.graph.variable import Variable

_ids = itertools.count(1)


def new_id() -> int:
    """A node id: never reused in this process."""
    return next(_ids)


class Graph:
    """Nodes in program order, under a name.

    >>> g = Graph("empty")
    >>> g.nodes, g.version
    ((), 0)

    ``seed``, with the cell and place of a random node and the number of the run, decides what it draws; it may be set.
    """

    def __init__(self, name: str = "graph", contents: Contents | None = None, *, seed: int = 0) -> None:
        ensure_type(name, str, "the name of a Graph")
        ensure_type(contents, (Contents, type(None)), "the contents of a Graph")
        self.name = name
        self.version = -1
        self.seed = seed
        self.finalized = False
        self.stale: dict[int, str] = {}  # ids of removed nodes -> what to re-run
        self.owners: list[str] = []  # owner keys in order of first recording
        self.notes: tuple[str, ...] = ()  # what the last recording wants to say
        self.attached: dict[str, Any] = {}  # what rooms above keep for as long as the graph lives
        self.contents = contents or Contents()
        self._lock = threading.Lock()

    @property
    def seed(self) -> int:
        """Seed of the random streams of this graph's nodes; each stream adds the cell and place of its node."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise InvalidArgument(f"the seed of graph {self.name} is an int, not {seed!r}")
        self._seed = seed
        self.version += 1  # steps that were prepared draw by the old one

    # -- reading ------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in program order."""
        return self.contents.nodes

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Variables that nodes read or write, in order of first use."""
        return tuple(self.contents.variables.values())

    @property
    def placeholders(self) -> tuple[Node, ...]:
        """Placeholder nodes in program order."""
        return self.contents.placeholders

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Relations between sizes that feeds must keep; a local one only in runs of its own line."""
        return self.contents.guards

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: str) -> bool:
        return name in self.contents.names

    def __getitem__(self, name: str) -> Node:
        ensure_type(name, str, "graph[...]")
        contents = self.contents
        if name not in contents.names:
            raise NotFound(f"graph {self.name} has no node {name!r}{self._near(name)}")
        return contents.by_id[contents.names[name].node]

    def _near(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.contents.names, 3)
        return f"; near: {', '.join(near)}" if near else ""

    def value(self, name: str) -> Value:
        """The Value that a name means: ``"loss"``, ``"split:1"`` or an assigned Python name.

        A Python name means the value that a recording bound to it last, in order of execution. An earlier node of that
        name stands behind it with its cell, ``"loss@In[1]"``; a name that was given by ``name=`` is never taken away.
        Raises NotFound, with names that are near.

        >>> import torch, tfnb
        >>> with tfnb.record() as g:
        ...     loss = tfnb.placeholder(torch.ones(2), name="x").sum()
        >>> with tfnb.record(g):
        ...     loss = loss * 2
        >>> g.value("loss") == loss.value, g["loss"].name
        (True, 'loss_1')
        """
        ensure_type(name, str, "Graph.value")
        if name in self.contents.names:
            return self.contents.names[name]
        stem, colon, index = name.rpartition(":")
        if colon and index.isdigit():
            node = self[stem]
            if int(index) >= max(1, len(node.outputs)):
                raise NotFound(f"node {stem} has {len(node.outputs)} outputs, not {name!r}", node=stem)
            return Value(node.id, int(index))
        return Value(self[name].id)

    def select(
        self, *, op: str | None = None, scope: str | None = None, tag: str | None = None, cell: str | None = None
    ) -> tuple[Node, ...]:
        """Nodes whose op, scope path (joined by ``/``) and cell label match the patterns, with that tag."""

        def matches(node: Node) -> bool:
            return (
                (op is None or fnmatch(node.op, op))
                and (scope is None or fnmatch("/".join(node.scope), scope))
                and (tag is None or tag in node.tags)
                and (cell is None or (node.source is not None and fnmatch(node.source.label, cell)))
            )

        return tuple(filter(matches, self.nodes))

    def text(self) -> str:
        """The stable, readable text form: one node per line."""
        return text(self.name, self.contents)

    def diff(self, other: Graph) -> Difference:
        """The nodes that are new, gone or changed in ``other``: a string, empty for equal graphs, drawn in a notebook.

        >>> Graph("a").diff(Graph("b"))
        <Difference: 0 added, 0 removed, 0 changed>
        """
        ensure_type(other, Graph, "Graph.diff")
        return Difference.of(self.name, self.contents, other.name, other.contents)

    def since(self, before: Contents) -> Matching:
        """The nodes that are new, gone or changed since ``before``: nodes only, no text.

        >>> Graph("a").since(Contents()).added
        ()
        """
        ensure_type(before, Contents, "Graph.since")
        return compared(before, self.contents)

    def to_module(self, fetches: object, feeds: Iterable[Any]) -> Any:
        """The part of the graph that ``fetches`` need, as a `torch.fx.GraphModule` that takes ``feeds`` in this order.

        For `torch.export`, `torch.compile`, `torch.onnx.export(..., dynamo=True)` and training by torch. Parameters and
        buffers are copies of the Variables, under their names; sizes that vary in the graph vary here. The result has
        the structure of ``fetches``. Random ops draw from torch's generator. Branches and loops become `torch.cond`,
        `scan` and `while_loop`. It writes what a run of ``fetches`` writes to buffers.

        Raises Unimplemented, with the node and its line, for what torch has no form for: queues, training steps,
        recursion, a branch that Python took while recording.

        >>> import torch, tfnb
        >>> with tfnb.record() as g:
        ...     x = tfnb.placeholder(torch.ones(2, 3), name="x")
        ...     y = torch.nn.Linear(3, 1)(x).relu()
        >>> module = g.to_module(y, [x])
        >>> module(torch.ones(5, 3)).shape, sorted(module.state_dict())
        (torch.Size([5, 1]), ['bias', 'weight'])
        """
        from tfnb.interop import to_module  # listed exception: the translation asks lowering

        return to_module(self, fetches, feeds)

    def why(self, node: Node | torch.Tensor | str) -> Any:
        """Explain the task of a node in a run of the whole graph: its request, its place, the rule, and the edges cut.

        node: a Node, a recorded tensor, or a name, also of what is inside of loops and branches. A run's passes may
        merge nodes: `tfnb.place(...).why` says it of a step. Raises NotFound, with names that are near.

        >>> import torch, tfnb
        >>> with tfnb.record() as g:
        ...     with tfnb.device("task:0"):
        ...         h = tfnb.placeholder(torch.ones(2, 3), name="x").exp()
        ...     with tfnb.device("task:1"):
        ...         y = h + 1
        >>> g.why(y).place, g.why("h").rule
        (Place(number=1, job='task'), 'asks for task:0')
        >>> g.why(h).crossing[0].words
        'value, 12*B bytes'
        """
        from tfnb.passes.flow.reasons import parts_of_graph  # listed exception: passes know where nodes are done

        return parts_of_graph(self).why(node)

    def to_networkx(self) -> Any:
        """A networkx MultiDiGraph of the nodes (``name``, ``op``, ``spec``, ``line``) and of the edges between nodes.

        >>> import torch, tfnb
        >>> with tfnb.record() as g:
        ...     y = tfnb.placeholder(torch.ones(2), name="x") + 1
        >>> found = g.to_networkx()
        >>> [found.nodes[node]["op"] for node in found], [kind for *_, kind in found.edges(data="kind")]
        (['tfnb.placeholder', 'aten.add.Tensor'], ['value'])
        """
        from tfnb.view import graph_networkx  # listed exception: view knows how a graph is shown

        return graph_networkx(self)

    # -- files --------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write JSON to ``path`` and, if there are any, constants to ``path + .safetensors``. No pickle."""
        write_graph(self.name, self.seed, self.contents, Path(path))

    @classmethod
    def load(cls, path: str | Path, *, trusted: bool = False) -> Graph:
        """Read a saved graph; its variables have no values until a checkpoint is restored.

        Raises GraphFormatError, GraphCycleError or UnknownOp for a bad file, and UntrustedOp for ops that may do
        more than compute, unless ``trusted``.
        """
        name, seed, contents = read_graph(Path(path), new_id, trusted=trusted)
        return cls(name, contents, seed=seed)

    # -- writing ------------------------------------------------------------------------------------------

    def commit(self, contents: Contents, *, removed: Iterable[tuple[int, str]] = ()) -> None:
        """Swap in new contents, all or nothing; ``removed`` maps ids of removed nodes to the cell to run again.

        Raises FailedPrecondition for a finalized graph, GraphCycleError or another InvalidArgument for contents that
        are not well formed.
        """
        ensure_type(contents, Contents, "Graph.commit")
        gone = dict(removed)
        check(contents)
        with self._lock:
            self.ensure_open()
            self.contents = contents
            self.stale.update(gone)
            self.version += 1

    def finalize(self) -> None:
        """Make the graph read-only for all threads; runs stay possible."""
        self.finalized = True

    def ensure_open(self) -> None:
        """Raise FailedPrecondition if the graph is finalized."""
        if self.finalized:
            raise FailedPrecondition(f"Graph {self.name} is finalized and cannot be modified")

    def derive(self, contents: Contents) -> Graph:
        """A new graph with other contents, as the result of a pass."""
        ensure_type(contents, Contents, "Graph.derive")
        derived = Graph(self.name, contents, seed=self.seed)
        derived.stale = self.stale
        return derived

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.nodes)} nodes, {len(self.variables)} variables, version {self.version}>"

    def _repr_html_(self) -> str:
        return self._repr_mimebundle_()["text/html"]

    def _repr_svg_(self) -> str | None:
        return self._repr_mimebundle_().get("image/svg+xml")

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from tfnb.view import graph_bundle  # listed exception: a repr asks view

        return graph_bundle(self)
