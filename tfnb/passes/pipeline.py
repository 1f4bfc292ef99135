"""The passes in order, and the loop that applies them until nothing changes (semantics S-140)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfnb.graph import Contents, Graph, Node, Value
from tfnb.graph.difference import Difference
from tfnb.passes.conditional_updates import conditional_updates
from tfnb.passes.fold import fold
from tfnb.passes.fractions import fractions
from tfnb.passes.in_place_commit import absorb
from tfnb.passes.liveness import Memory
from tfnb.passes.memory_format import Layout, channels_last
from tfnb.passes.merge import merge
from tfnb.passes.narrow import narrow
from tfnb.passes.order import order, split
from tfnb.passes.prune import StepGraph, groups_of, prune, step_graph
from tfnb.passes.rewrite import Pass
from tfnb.passes.simplify import simplify
from tfnb.passes.stack import stack

PIPELINE: tuple[Pass, ...] = (fractions, fold, simplify, merge)  # between two prunings
ONCE: tuple[Pass, ...] = (conditional_updates, absorb, stack, narrow, split, order)
"""What a commit does in place, then kernels and order are chosen; memory is planned after that (`tfnb.memory`)."""
LAYOUTS: Mapping[Layout, tuple[Pass, ...]] = {
    "torch": ONCE,
    "channels_last": (conditional_updates, absorb, stack, channels_last, *ONCE[3:]),
}
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class PassResult:
    """The graph after a pass: its nodes, total bytes of its values, and predicted peak."""

    name: str
    nodes: int
    bytes: int
    peak: int
    graph: Graph = field(repr=False, compare=False)


@dataclass(frozen=True)
class Passes:
    """The results of the passes on the part of a graph needed by a run, stage by stage.

    As text and in a notebook a table; the drawing below it has what all of them together changed. ``p[i].graph.diff(
    p[i + 1].graph)`` is what one of them did.
    """

    stages: tuple[PassResult, ...]

    def __getitem__(self, place: int) -> PassResult:
        return self.stages[place]

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[PassResult]:
        return iter(self.stages)

    def diff(self) -> Difference:
        """The difference from the pruned graph to the optimized one."""
        return self.stages[0].graph.diff(self.stages[-1].graph)

    def __repr__(self) -> str:
        rows = [("after", "nodes", "bytes made", "predicted peak")]
        rows += [(stage.name, f"{stage.nodes:,}", f"{stage.bytes:,}", f"{stage.peak:,}") for stage in self.stages]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [[name.ljust(wide[0]), *map(str.rjust, numbers, wide[1:])] for name, *numbers in rows]
        return "\n".join("  ".join(line) for line in lines)

    def _repr_html_(self) -> str:
        from tfnb.view import passes_html  # listed exception: a repr asks view

        return passes_html(self)

    def _repr_svg_(self) -> str | None:
        return self.diff()._repr_svg_()


def table(
    graph: Graph, fetches: Collection[Value], feeds: Collection[Value], sizes: Mapping[str, int] | None = None,
    last: Sequence[Pass] = ONCE,
) -> list[PassResult]:  # fmt: skip
    """A row for each of `stages` that left something else. sizes: of symbols, by name; 32 for one that is missing."""
    rows: list[PassResult] = []
    for name, after in stages(step_graph(graph, fetches, feeds), last):
        seen = with_fed(after, graph, feeds)  # the same head for all
        if rows and seen.nodes == rows[-1].graph.nodes:
            continue
        memory = Memory(seen, fetches, feeds, sizes)
        rows.append(PassResult(name, len(seen.nodes), sum(memory.size.values()), memory.peak(), seen))
    return rows


def optimize(
    graph: Graph, fetches: Collection[Value], feeds: Collection[Value], last: Sequence[Pass] = ONCE,
    repeated: Sequence[Pass] = PIPELINE,
) -> Graph:  # fmt: skip
    """The graph that computes ``fetches`` from ``feeds`` with the least work; values and writes are the same, but for
    rounding where `stack` sums otherwise.
    """
    return optimized(step_graph(graph, fetches, feeds), last, repeated)


def optimized(step: StepGraph, last: Sequence[Pass] = ONCE, repeated: Sequence[Pass] = PIPELINE) -> Graph:
    """`optimize` for a step that is already pruned."""
    *_, (_, found) = stages(step, last, repeated)
    return found


def stages(
    step: StepGraph, last: Sequence[Pass] = ONCE, repeated: Sequence[Pass] = PIPELINE
) -> Iterator[tuple[str, Graph]]:  # fmt: skip
    """The graph after each pass with an effect; a final `prune` drops unused nodes.

    repeated: the passes between two prunings, until nothing changes; last: those that come once, behind.
    """
    whole, graph, fetches, feeds = step.whole, step.graph, step.fetches, step.feeds
    groups = groups_of(graph)
    yield "prune", graph
    for _ in range(ROUNDS):
        before, seen = graph.nodes, with_fed(graph, whole, feeds)
        for run in repeated:
            after = run(seen, fetches, feeds)
            if after is not seen:
                yield run.__name__, after
            seen = after
        graph = prune(seen, fetches, feeds, groups)
        if graph.nodes == before:
            break
        yield "prune", graph
    seen = with_fed(graph, whole, feeds)
    for run in last:
        chosen = run(seen, fetches, feeds)
        if chosen is not seen:  # otherwise the next pass finds its consumers there
            yield run.__name__, chosen
            graph = prune(chosen, fetches, feeds, groups)
            yield "prune", graph
            seen = with_fed(graph, whole, feeds)


def with_fed(graph: Graph, whole: Graph, feeds: Collection[Value]) -> Graph:
    """The graph with a placeholder for each fed node it lacks: passes see the spec of a feed, not its operands."""
    fed = dict.fromkeys(value.node for value in feeds)
    missing = (whole.contents.by_id[i] for i in fed if i not in graph.contents.by_id)
    nodes = tuple(node if node.op == "tfnb.placeholder" else _opaque(node) for node in missing)
    return graph.derive(Contents((*nodes, *graph.nodes), graph.contents.guards))


def _opaque(fed: Node) -> Node:
    return replace(
        fed, op="tfnb.placeholder", inputs=(), attrs={}, control=(), effects=(), stream=None, forward=None
    )  # fmt: skip
