"""A step as dataflow: its ops, its ends, and its parts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest

from tfnb.graph import Contents, Graph, Node, Spec, Subgraph, Value, Variable
from tfnb.graph.node import map_leaves
from tfnb.graph.ops import REGIONS
from tfnb.graph.subgraph import uses_queues
from tfnb.passes.flow import frames
from tfnb.passes.flow.cut import End, Kind, Part, Partition, uncut
from tfnb.passes.flow.frames import Flow, Port
from tfnb.passes.flow.places import Place, ensure_whole_calls, homes, is_split, requested
from tfnb.passes.fold import fold
from tfnb.passes.in_place_commit import absorb, in_place_updates
from tfnb.passes.pipeline import PIPELINE, optimize, optimized, with_fed
from tfnb.passes.prune import StepGraph, feed_symbols
from tfnb.passes.rewrite import Pass
from tfnb.passes.stack import stack


@dataclass(frozen=True)
class StepFlow:
    """A step as dataflow.

    graph: what was lowered. feeds: where the fed values are. ends: what is wanted of each fetch, then the values that
    are written, in the order of ``written``. parts: one for each place, or one for all. updates: numbers of the ops
    that the commit does in the memory of Variables.
    """

    step: StepGraph
    graph: Graph
    flow: Flow
    feeds: tuple[Port, ...]
    ends: tuple[End, ...]
    written: tuple[Variable, ...]
    parts: tuple[Part, ...]
    updates: frozenset[int] = frozenset()

    def queue_uses_behind(self, number: int) -> frozenset[int]:
        """Queue operations of the whole step that depend on an op, at any place."""
        found = self._behind.get(number)
        if found is None:
            seen, stack = set[int](), [number]
            while stack:
                new = self._users[stack.pop()] - seen
                seen |= new
                stack.extend(new)
            found = frozenset(n for n in seen if frames.uses_queue(self.flow.ops[n]))
            self._behind[number] = found
        return found

    @cached_property
    def _users(self) -> list[set[int]]:
        """By op, its successors: ops with a value or completion of the op among their sources."""
        found: list[set[int]] = [set() for _ in self.flow.ops]
        for number, op in enumerate(self.flow.ops):
            for port in op.sources:
                found[port.op].add(number)
        return found

    @cached_property
    def _behind(self) -> dict[int, frozenset[int]]:
        return {}

    def kinds(self, part: Part) -> list[Kind | None]:
        """How much of each feed a part wants; None: nothing."""
        return [part.feeds.get(port.op) for port in self.feeds]


@dataclass(frozen=True)
class CutOptions:
    """Options of a cut. tasks: the existing task numbers, None for all requested by nodes.

    places: where each fetch is wanted, None for the place that makes it. is_optimized: passes saw the graph already.
    has_writes: whether the step writes Variables, as a run in one process does; else somebody does it with its fetches.
    here: the part that runs in this process, None for all of them.
    """

    tasks: Collection[int] | None = None
    places: Sequence[Place | None] = ()
    is_optimized: bool = False
    has_writes: bool = True
    here: Place | None = None


def as_one(step: StepGraph, native: Callable[[Node], bool]) -> StepFlow:
    """The step as dataflow, in one part. native: whether a loop or branch stays one op."""
    return _step_flow(step, optimized(step, last=(absorb,)), native, None, CutOptions())


def in_parts(step: StepGraph, wanted: CutOptions | None = None) -> StepFlow:
    """The step cut by the places that its nodes ask for.

    Products are stacked before, on each place: so all parts give the bits of one part with the same requests.
    """
    wanted = wanted or CutOptions()
    graph = step.graph if wanted.is_optimized else _stacked(step, (absorb, stack), wanted.tasks)
    sites = requested(graph.nodes, wanted.tasks)
    ensure_whole_calls(graph.nodes, sites)
    return _step_flow(step, graph, partial(_is_native, sites), sites, wanted)


def optimized_step(step: StepGraph, tasks: Collection[int]) -> StepGraph:
    """The step after all passes before the cut. Places that cut for themselves must agree on this step.

    tasks: numbers of those there are.
    """
    graph = with_fed(_stacked(step, (stack,), tasks), step.whole, step.feeds)
    return StepGraph(graph, graph, step.fetches, step.feeds)


_UNFOLDED = tuple(run for run in PIPELINE if run is not fold)  # constants lie outside of what is cut


def _is_native(sites: Mapping[int, Place], node: Node) -> bool:
    """Whether a loop or branch stays one op of a step in parts."""
    return not (uses_queues(node) or is_split(node, sites))


def _stacked(step: StepGraph, last: Sequence[Pass], tasks: Collection[int] | None) -> Graph:
    """The optimized step. Products are stacked also inside of the loops and branches that are cut.

    Those that stay one op are stacked when they are lowered, as all are in one process.
    """
    graph = optimized(step, last)
    native = partial(_is_native, requested(graph.nodes, tasks))

    def outside(node: Node) -> Node:
        is_cut = node.op in REGIONS and not native(node) and not uses_queues(node)
        return replace(node, attrs=map_leaves(inside, node.attrs)) if is_cut else node

    def inside(leaf: object) -> object:
        if not isinstance(leaf, Subgraph):
            return leaf
        contents = replace(leaf.contents, nodes=tuple(map(outside, leaf.contents.nodes)))
        whole, outputs = Graph("subgraph", contents, seed=graph.seed), [v for v in leaf.outputs if v is not None]
        found = optimize(whole, (*outputs, *leaf.guards), leaf.inputs, (stack,), _UNFOLDED)
        return replace(leaf, contents=with_fed(found, whole, leaf.inputs).contents)

    nodes = tuple(map(outside, graph.nodes))
    return graph.derive(Contents(nodes, graph.contents.guards)) if nodes != graph.nodes else graph


def _step_flow(
    step: StepGraph, graph: Graph, native: Callable[[Node], bool], sites: Mapping[int, Place] | None, wanted: CutOptions
) -> StepFlow:
    flow, written = frames.resolved(
        frames.lower(graph.contents, step.feeds, symbols_of(step.whole, step.feeds), native=native)
    )
    if not wanted.has_writes:
        written = {}
    ends = (*_ends(step, flow, wanted.places), *(End(port) for port in written.values()))
    parts = (uncut(flow, ends),) if sites is None else Partition(flow, ends, homes(flow, sites)).parts()
    fused = in_place_updates(graph, step.fetches, step.feeds) if written else {}
    updates = frozenset(flow.ports[node.value()].op for node in fused.values())
    return StepFlow(step, graph, flow, tuple(flow.ports[v] for v in step.feeds), ends, tuple(written), parts, updates)


def symbols_of(graph: Graph, feeds: Sequence[Value]) -> dict[str, tuple[Value, Spec]]:
    """For each symbol that the feeds show a fed value with an axis of that size, and its spec."""
    by_id, shown = graph.contents.by_id, feed_symbols(graph.contents, feeds)
    return {s: (value, by_id[value.node].outputs[value.index]) for s, (value, _) in shown.items()}


def _ends(step: StepGraph, flow: Flow, places: Sequence[Place | None]) -> Iterator[End]:
    """The end of each fetch."""
    for value, at in zip_longest(step.fetches, places):
        if step.whole.contents.by_id[value.node].outputs:
            yield End(flow.ports[value], (), at)
        else:
            yield End(None, tuple(_members(flow, flow.done[value.node])), at)


def _members(flow: Flow, ports: Iterable[Port]) -> Iterator[Port]:
    """The ports, with members in place of groups."""
    for port in ports:
        op = flow.ops[port.op]
        is_group = op.kind == frames.NODE and op.node is not None and op.node.op == "tfnb.group"
        yield from _members(flow, op.sources) if is_group else (port,)
