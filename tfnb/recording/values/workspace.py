"""The workspace that recordings of one graph share in this process: symbols, samples, fakes, tensors of values.

What is kept of the samples, and how others are computed, is `tfnb.recording.values.samples`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.graph import Graph, Node, Value, Variable, current
from tfnb.recording.shapes.shape_cache import Shapes
from tfnb.recording.shapes.symbols import Symbols
from tfnb.recording.values.samples import Samples

if TYPE_CHECKING:
    from tfnb.recording.values.outside_tensors import MetMemory


@dataclass(frozen=True, slots=True)
class Derivative:
    """A derivative recorded by `gradients`, valid as long as ``ys`` depend on ``xs`` by the same nodes.

    is_plain: whether that of the sum of ``ys``, without ``grad_ys``.
    """

    nodes: frozenset[int]
    ys: tuple[Value, ...]
    xs: tuple[Value | Variable, ...]
    is_plain: bool = True

    def ways(self, nodes: Sequence[Node]) -> frozenset[int]:
        """The nodes on paths from ``xs`` to ``ys``."""
        reached = {x.node for x in self.xs if isinstance(x, Value)}
        between: set[int] = set()
        for node in nodes:
            if any(v.node in reached for v in node.inputs):
                reached.add(node.id)
                between.add(node.id)
            elif node.op == "tfnb.read" and any(node.attrs["variable"] is x for x in self.xs):
                reached.add(node.id)
        needed = {y.node for y in self.ys}
        for node in reversed(nodes):
            if node.id in needed:
                needed.update(v.node for v in node.inputs)
        return frozenset(between & needed)

    def moved(self, moved: Mapping[Value, Value]) -> Derivative:
        """The same one of the values that took the place of others."""
        xs = tuple(moved.get(x, x) if isinstance(x, Value) else x for x in self.xs)
        return replace(self, ys=tuple(moved.get(y, y) for y in self.ys), xs=xs)


class Workspace:
    """Symbols and samples of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = weakref.ref(graph)
        self.symbols = Symbols()
        self.shapes = Shapes(self.symbols)
        self.fakes: dict[Value, torch.Tensor] = {}
        self._apart: dict[Value, torch.Tensor] = {}  # fakes that stand for one value alone
        self.samples = Samples(self.symbols.number, self._graph)
        self.live = WeakIdKeyDictionary()  # recorded tensors of finished recordings that somebody still holds
        self.outside: dict[int, list[MetMemory]] = {}  # memory of plain tensors that recordings met, by storage
        self.rules: dict[int, Callable[..., Any]] = {}  # nodes with a gradient rule of their own
        self.asked: dict[int, tuple[str, int]] = {}  # nodes of a function that the user's line called: where in it
        self.told: set[tuple[str, str, int]] = set()  # tensors and lines that took their samples' numbers outside
        self.derivatives: tuple[Derivative, ...] = ()
        self.assigned: dict[int, dict[str, int]] = {}  # of nodes that have a name of the user's: name -> output

    @property
    def graph(self) -> Graph:
        graph = self._graph()
        assert graph is not None
        return graph

    def apart(self, entry: Any) -> torch.Tensor:
        """A separate fake tensor of this value: torch caches data-dependent sizes on the fake tensor."""
        found = self._apart.get(entry.value)
        if found is None:
            with self.symbols.kernel():
                found = entry.fake.new_empty_strided(entry.fake.shape, entry.fake.stride())
            self._apart[entry.value] = found
        return found

    def renew(self, ids: Collection[int]) -> None:
        """Renew nodes with changed operands: samples are recomputed, and sizes updated."""
        self.samples.renew(ids)
        for value, fake in self.fakes.items():
            if value.node in ids:
                self.fakes[value] = self.symbols.renewed(fake)
        for tensor in list(self.live):
            tensor.renew(ids, self.symbols.renewed)

    def release(self, nodes: Iterable[Node]) -> None:
        """Drop fakes and samples of nodes that stand in a subgraph now."""
        values = [node.value(index) for node in nodes for index in range(len(node.outputs))]
        for value in values:
            self.fakes.pop(value, None)
        self.samples.forget(values)

    def forget(self, ids: set[int]) -> None:
        """Drop everything about removed nodes."""
        for table in (self.fakes, self._apart):
            for value in [v for v in table if v.node in ids]:
                del table[value]
        for node_id in ids:
            self.rules.pop(node_id, None)
            self.asked.pop(node_id, None)
            self.assigned.pop(node_id, None)
        self.samples.forget(self.samples.of(ids))

    def sample(self, value: Value) -> torch.Tensor | None:
        """The sample of a value, computed if unknown; None if there is none."""
        found = self.samples.known(value)
        return self.samples.compute(value, (), self._nodes()).get(value) if found is None else found

    def awaited(self, value: Value) -> torch.Tensor | None:
        """The sample of a value that was lazy; other lazy samples with handles are computed along.

        To look at them one after the other would compute what they have in common again and again.
        """
        recordings = self._open()
        if self.samples.is_absent(value) or any(recording.lazy for recording in recordings):
            return None
        handles = [*self.live, *(handle for recording in recordings for handle in recording.live)]
        entries = [entry for tensor in handles for entry in (tensor._entry, tensor._family.entry)]
        waiting = [entry for entry in entries if entry.waits and not self.samples.is_absent(entry.value)]
        found = self.samples.compute(value, {entry.value for entry in waiting}, self._nodes())
        for entry in waiting:
            entry.sample = found.get(entry.value)
        if not recordings:
            self.samples.settle(())
        return found.get(value)

    def _open(self) -> list[Any]:
        """The open recordings of this graph in this thread, the innermost first."""
        return [recording for recording in reversed(current.stack.open) if recording.graph is self.graph]

    def _nodes(self) -> Mapping[int, Node]:
        """The nodes of the open recording, or of the graph."""
        return next((r.tape.by_id for r in self._open() if not r.lazy), self.graph.contents.by_id)


def workspace(graph: Graph) -> Workspace:
    """The workspace of a graph, made when first asked for."""
    if "workspace" not in graph.attached:
        graph.attached["workspace"] = Workspace(graph)
    return graph.attached["workspace"]


def unburden(graph: Graph) -> None:
    """Before the graph runs: samples go that can be computed again. Handles hold theirs."""
    space = graph.attached.get("workspace")
    if space is not None:
        space.samples.settle((), 0)
