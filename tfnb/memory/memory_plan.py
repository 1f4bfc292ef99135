"""The plan of one step's memory: values kept, recomputed or offloaded, for straight code and for loops.

A value of straight code that does not fit is computed again (semantics S-188): `rematerialize` chooses which, and the
graph that runs holds the copies. The rows that a loop keeps for its gradient are computed again or moved out, whichever
costs less (S-190); how many, the run decides by the bytes that the plan leaves. Both prices have one unit, so that more
kinds of values, and more places to move them to, are further rows of one table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from tfnb.graph import Graph, Node, Ref, Value
from tfnb.graph.node import leaves
from tfnb.graph.ops import WHILE
from tfnb.graph.subgraph import row_places
from tfnb.memory.loop_rows import LoopRows, kept_by_loops, loop_rows, of_rows, working
from tfnb.memory.prices import computing, cost, moving
from tfnb.memory.rematerialize import AGAIN, counted, infeasible, plans, spare
from tfnb.memory.scratch import state_bytes
from tfnb.passes.donate import donate
from tfnb.passes.liveness import Memory
from tfnb.passes.pipeline import ONCE, with_fed
from tfnb.passes.region_merging import kept_rows
from tfnb.passes.rewrite import Pass

Fate = Literal["is computed again", "moves out"]


def step_passes(once: Sequence[Pass] = ONCE, *planned: Pass) -> tuple[Pass, ...]:
    """The passes that run once: those for kernels and order, then those that plan memory."""
    return (*once, spare, *planned, donate)


LAST = step_passes()


@dataclass(frozen=True, slots=True)
class Decision:
    """The fate of a value or of a loop's rows that do not fit in memory.

    node: what makes it. bytes: of the value, or of one iteration. moving, computing: both prices, as `prices` says.
    rows: of a loop. held: places among the loop's inputs of what would be gone by then, and is held for it.
    """

    node: Node
    bytes: int
    moving: float
    computing: float
    rows: LoopRows | None = None
    held: frozenset[int] = frozenset()

    @property
    def fate(self) -> Fate:
        """The cheaper one."""
        return "is computed again" if self.computing < self.moving else "moves out"

    def __str__(self) -> str:
        where = self.node.name + (f" ({self.node.source})" if self.node.source else "")
        if self.rows is None:
            return f"{self.bytes:,} bytes of {where}: {self.fate}"
        return f"what does not fit of the {self.bytes:,} bytes of each iteration of loop {where} {self.fate}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The most bytes that a step holds, as predicted, and a decision for each value and loop that does not stay.

    peak: with Variables, gradients and the scratch of convolutions, without rows of loops whose bytes the run counts.
    state: of which Variables. left: what the budget leaves for those rows. counts_rows: whether there are such rows,
    also of loops with swap_memory=False, which have no decision.
    """

    peak: int
    left: int
    state: int = 0
    decisions: tuple[Decision, ...] = ()
    counts_rows: bool = False

    @property
    def values(self) -> tuple[Decision, ...]:
        """Decisions about values outside of loops: nodes that run a second time."""
        return tuple(found for found in self.decisions if found.rows is None)

    @property
    def loops(self) -> tuple[Decision, ...]:
        """Of loops."""
        return tuple(found for found in self.decisions if found.rows is not None)


def memory_plan(
    graph: Graph,
    fetches: Collection[Value],
    feeds: Collection[Value],
    sizes: Mapping[str, int],
    budget: int,
    whole: Graph,
) -> MemoryPlan:
    """The plan of a graph with the copies of `within`, at these sizes of symbols.

    whole: what it was pruned from; it has the nodes of what is fed.
    """
    seen = with_fed(graph, whole, feeds)
    memory, state = counted(seen, fetches, feeds, sizes), state_bytes(graph)
    peak = state + memory.peak()
    decisions = (*_of_values(seen, memory, sizes), *_of_loops(seen, fetches, memory, sizes))
    return MemoryPlan(peak, budget - peak, state, decisions, bool(kept_by_loops(seen, fetches, sizes)))


def _of_values(graph: Graph, memory: Memory, sizes: Mapping[str, int]) -> Iterator[Decision]:
    for node in graph.nodes:
        if AGAIN in node.tags:
            size = sum(memory.size.get(node.value(index), 0) for index in range(len(node.outputs)))
            yield Decision(node, size, inf, cost(node, graph.contents, sizes))


def _of_loops(
    graph: Graph, fetches: Collection[Value], memory: Memory, sizes: Mapping[str, int]
) -> Iterator[Decision]:  # fmt: skip
    """For each loop whose rows only loops take and may leave."""
    kept, last = kept_rows(graph.contents, fetches), memory.last()
    for node in graph.nodes:
        places = row_places(node.attrs) if node.op == WHILE else []
        rows = [row for row, at in enumerate(places) if node.value(at[0]) in kept]
        if not rows or node.attrs.get("swap_memory") is False:
            continue
        found = of_rows(node, rows, sizes)
        price = moving(found.bytes, node.outputs[places[rows[0]][0]].device)
        if node.attrs.get("swap_memory") or not _restarts(node, kept, sizes):
            yield Decision(node, found.bytes, price, inf, found)
            continue
        end = max(graph.contents.position[user] for row in rows for user in kept[node.value(places[row][0])])
        given = {ref.input for ref in leaves((node.attrs["xs"], node.attrs["captures"]))}
        owners = {place: memory.owner.get(node.inputs[place], node.inputs[place]) for place in given}
        held = {
            place for place, owner in owners.items()
            if owner in memory.size and owner not in memory.kept and last[owner] < end
        }  # fmt: skip
        yield Decision(
            node, found.bytes, price, computing(node.attrs["body"].contents, sizes), found, frozenset(held)
        )  # fmt: skip


def _restarts(node: Node, kept: Collection[Value], sizes: Mapping[str, int]) -> bool:
    """Whether the loop can run again from the middle: the carried values keep their shapes, sequences are tensors."""
    if any(not isinstance(x, Ref) or node.inputs[x.input] in kept for x in node.attrs["xs"]):
        return False
    body, carried = node.attrs["body"], len(node.attrs["init"])
    inside = [body.contents.by_id[v.node].outputs[v.index] for v in body.inputs[:carried]]
    return all(s in sizes for spec in inside for s in spec.symbols)


def within(budget: int, sizes: Mapping[str, int] | None = None) -> Pass:
    """The pass that keeps the predicted peak, Variables included, at or below ``budget`` bytes.

    sizes: of symbols. Where loops keep rows beside it, the peak leaves room for some iterations of those, if there is
    such a plan. It raises ResourceExhausted where no plan fits, with the smallest budget for which one does.
    """

    def recompute(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
        lowest: int | None = None
        fits: Graph | None = None
        rows, room = working(graph, fetches, sizes or {}), budget - state_bytes(graph)
        for peak, planned in plans(graph, fetches, feeds, sizes):
            if peak <= room:
                fits = planned
            if peak <= room - rows:
                break
            lowest = peak
        if fits is not None:
            return fits
        _refuse_rows(graph, fetches, sizes or {}, room, lowest or 0)
        raise infeasible(graph, fetches, feeds, sizes, budget, budget - room + (lowest or 0))

    return recompute


def _refuse_rows(graph: Graph, fetches: Collection[Value], sizes: Mapping[str, int], room: int, lowest: int) -> None:
    """Raise ResourceExhausted for a loop with a number of rows known from the feeds, if its rows exceed the room."""
    for found in loop_rows(graph, fetches, sizes):
        if not found.leaves and found.iterations is not None and found.iterations * found.bytes > lowest - room:
            left = room - lowest + found.iterations * found.bytes
            raise found.refused(left // found.bytes + 1, left)
