"""A training step cut into forward, backward and update pieces of packs: sites of the one cut of steps. Pure.

Each node has a time at which its piece runs: forward pieces ascending, then each backward piece and its update
descending (semantics S-191). A forward node is done anew by the backward piece of its pack, so that a pack keeps only
what enters it (S-196); the last pack's forward is a part of its backward. What crosses is read off
`tfnb.passes.flow.cut.Partition`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tfnb.errors import Unimplemented
from tfnb.graph import Contents, Node, Value, Variable
from tfnb.graph.subgraph import uses_queues
from tfnb.memory.pack_tasks import Phase
from tfnb.memory.packs import LayerPacks, layers, one_each
from tfnb.passes.flow import frames
from tfnb.passes.flow.cut import End, Partition
from tfnb.passes.flow.merges import is_slope
from tfnb.passes.flow.places import Place, homes
from tfnb.passes.flow.step_flow import symbols_of
from tfnb.passes.prune import StepGraph
from tfnb.passes.resolve import resolve

_ANYWHERE = frozenset({"tfnb.read", "tfnb.constant", "tfnb.placeholder"})
_EFFECTS = frozenset({"tfnb.guard", "tfnb.print"})


@dataclass(frozen=True)
class CutPiece:
    """One piece of the cut.

    takes: values of other pieces. gives: values for other pieces, gradients left out. gradients: values that are summed
    over microbatches, made by a backward piece and taken by an update. fetched: values that the caller wants. written:
    Variables, by the nodes that assign them. nodes: ids of what it does.
    """

    phase: Phase
    pack: int
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    gradients: tuple[Value, ...]
    fetched: tuple[Value, ...]
    written: Mapping[Variable, Value]
    nodes: frozenset[int]


class PackCut:
    """The cut of a step. packing: of its layers, by default one pack for each.

    graph: pure dataflow, with one assign for each written Variable at its end. layers:
    how many there are. back: the backward pack in which each forward node is done anew.
    """

    def __init__(self, step: StepGraph, packing: LayerPacks | None = None) -> None:
        self.step, self.state = step, resolve(step.graph, step.feeds)
        nodes = tuple(_unordered(self.state.nodes.values()))
        self._layer = layers(nodes)
        self.layers = 1 + max(self._layer.values(), default=0)
        self.packing = packing or one_each(self.layers)
        self._first, self.packs = (1 + max(pack_of) for pack_of in self.packing)
        self.back: dict[int, int] = {}
        self.graph = step.whole.derive(Contents((*self._fed(), *nodes, *self._assigns()), step.graph.contents.guards))
        self.time: dict[int, int] = {}
        self._rows, self._by_id = frozenset(step.feeds), {node.id: node for node in nodes}
        self._gradient: set[int] = set()  # nodes that depend on a derivative
        for node in nodes:
            self._place(node)

    def _fed(self) -> list[Node]:
        fed = dict.fromkeys(v.node for v in self.step.feeds if v.node not in self.state.nodes)
        return [self.step.whole.contents.by_id[i] for i in fed]

    def _assigns(self) -> list[Node]:
        last = {node.attrs["variable"]: node for node in self.step.graph.nodes if node.op == "tfnb.assign"}
        return [replace(node, inputs=(self.state.final[v], *node.inputs[1:]), control=()) for v, node in last.items()]

    def backward(self, pack: int) -> int:
        """The time of a pack's backward piece; its update follows. The first one is at the time ``_first``."""
        return self._first + 2 * (self.packs - 1 - pack)

    def _piece(self, time: int) -> tuple[Phase, int]:
        if time < self._first:
            return Phase.FORWARD, time
        pack = self.packs - 1 - (time - self._first) // 2
        return (Phase.UPDATE if (time - self._first) % 2 else Phase.BACKWARD), pack

    def _place(self, node: Node) -> None:
        """Set the time of a node; never before its inputs. Raises Unimplemented for a queue operation and a print."""
        if node.op in _ANYWHERE:
            return
        if uses_queues(node) or node.op == "tfnb.print":
            raise Unimplemented(f"{node.name} is done once in a step, and packs do microbatches one after the other")
        slope = next((v for v in node.inputs if v not in self._rows and is_slope(self._by_id[v.node], v.index)), None)
        if slope is not None and "gradient" not in node.tags:
            raise Unimplemented(
                f"{node.name} takes {self._by_id[slope.node].name}, a derivative by rows, and a memory_budget plans "
                f"one backward pass behind one forward pass: leave out memory_budget{_at(node)}"
            )
        times = [self.time[v.node] for v in node.inputs if v.node in self.time]
        last = max([*times, *([0] if any(v in self._rows for v in node.inputs) else [])], default=None)
        of_gradient = "gradient" in node.tags or any(v.node in self._gradient for v in node.inputs)
        if of_gradient:
            self._gradient.add(node.id)
        if node.id in self.state.updated - self._dense or (of_gradient and not self._is_derivative(node)):
            last = max(last or 0, self._first)
            self.time[node.id] = last if self._piece(last)[0] is Phase.UPDATE else last + 1
        elif of_gradient or node.forward is not None:
            pack = self.back.get(node.forward, self.packs - 1) if node.forward is not None else self.packs - 1
            self.time[node.id] = max(self.backward(pack), last or 0)
        elif last is not None or node.id in self._layer or node.op == "tfnb.guard":
            # others depend on no row and no layer: done anew anywhere
            layer = self._layer.get(node.id, 0)
            back = max([self.packing.backward[layer], *(self.back.get(v.node, 0) for v in node.inputs)])
            self.back[node.id] = back
            is_fused = back == self.packs - 1
            self.time[node.id] = self._first if is_fused else max(self.packing.forward[layer], last or 0)

    @cached_property
    def _dense(self) -> frozenset[int]:
        return frozenset(node.id for node in self.state.nodes.values() if "densified" in node.tags)

    def _is_derivative(self, node: Node) -> bool:
        return "gradient" in node.tags or node.id in self._dense

    @cached_property
    def partition(self) -> Partition:
        """The cut of the dataflow form."""
        moved = {v for v, value in self.state.final.items() if self.time.get(value.node, self._first) <= self._first}
        flow, written = frames.resolved(frames.lower(
            self.graph.contents, self.step.feeds, symbols_of(self.step.whole, self.step.feeds), native=lambda node: True
        ))  # fmt: skip
        found = list(homes(flow, {node: Place(time) for node, time in self.time.items()}))
        for number, op in enumerate(flow.ops):
            node = op.node
            if op.kind != frames.NODE or node is None:
                continue
            if node.id not in self.time and node.attrs.get("variable") not in moved:
                found[number] = found[number]._replace(place=None)
            reads = {self.graph.contents.by_id[v.node].attrs.get("variable") for v in node.inputs}
            is_forward = self.time.get(node.id, self._first) < self._first
            if is_forward and node.op not in _EFFECTS and moved.isdisjoint(reads):
                found[number] = found[number]._replace(also=frozenset({Place(self.backward(self.back[node.id]))}))
        fetched = [self.state.resolved(v) for v in self.step.fetches if self.step.whole.contents.by_id[v.node].outputs]
        self._ends = tuple(dict.fromkeys(value for value in fetched if value not in self.step.feeds))
        ends = [End(flow.ports[value], (), Place(self._end(value))) for value in self._ends]
        ends += [End(port, (), Place(self._end(self.state.final[v]))) for v, port in written.items()]
        return Partition(flow, ends, found)

    def _end(self, value: Value) -> int:
        """The time of the piece that gives a value to the caller or to a Variable."""
        return self.time.get(value.node, self._first)

    @cached_property
    def pieces(self) -> tuple[CutPiece, ...]:
        """The pieces in the order of time."""
        cut = self.partition
        return tuple(self._cut_piece(place.number) for place in sorted(cut.done) if cut.nodes(place))

    def _cut_piece(self, time: int) -> CutPiece:
        cut, (phase, pack) = self.partition, self._piece(time)
        value = {edge: cut.flow.value(edge.port) for edge in cut.edges}
        in_update = {edge: self._piece(edge.to.number)[0] is Phase.UPDATE for edge in cut.edges}
        sums = {
            edge for edge in cut.edges if in_update[edge] and self._piece(edge.source.number)[0] is not Phase.UPDATE
        }
        here = [edge for edge in cut.edges if time in (edge.to.number, edge.source.number)]
        summed = dict.fromkeys(self._summed(value[edge]) for edge in here if edge in sums)
        takes = dict.fromkeys(value[edge] for edge in here if edge.to.number == time and edge not in sums)
        gives = dict.fromkeys(value[edge] for edge in here if edge.source.number == time and edge not in sums)
        assigns = {node.attrs["variable"]: node for node in self.graph.nodes if node.op == "tfnb.assign"}
        written = {
            variable: assigns[variable].value() for variable, final in self.state.final.items()
            if self._end(final) == time
        }  # fmt: skip
        fetched = tuple(v for v in self._ends if self._end(v) == time)
        nodes = frozenset(node.id for node in cut.nodes(Place(time)) if node.op not in _ANYWHERE | {"tfnb.assign"})
        return CutPiece(phase, pack, tuple(takes), tuple(gives), tuple(summed), fetched, written, nodes)  # type: ignore[arg-type]

    def _summed(self, value: Value | None) -> Value:
        """A gradient, which microbatches sum; raises Unimplemented for other values that an update takes."""
        node = None if value is None else self.graph.contents.by_id[value.node]
        if value is None or node is None or not self._is_derivative(node) or node.op == "tfnb.slices.default":
            name = "a size" if node is None else f"{node.name}"
            is_of_rows = node is not None and node.op == "tfnb.slices.default"
            remedy = "an optimizer with momentum, or Adam, takes dense ones, or " if is_of_rows else ""
            raise Unimplemented(
                f"an update takes {name}, which is no dense gradient, and packs sum dense ones over microbatches: "
                f"{remedy}leave out memory_budget{_at(node)}"
            )
        return value


def _at(node: Node | None) -> str:
    """The line of a node, for the end of an error."""
    return f"  {node.source}" if node is not None and node.source else ""


def _unordered(nodes: Collection[Node]) -> Iterator[Node]:
    """The nodes without an order by guards: those of all packs are asked before the step writes anything."""
    guards = {node.id for node in nodes if node.op == "tfnb.guard"}
    for node in nodes:
        control, effects = (tuple(i for i in ids if i not in guards) for ids in (node.control, node.effects))
        yield replace(node, control=control, effects=effects) if guards else node
