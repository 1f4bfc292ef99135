"""Rows that loops keep of each iteration for their gradients, predicted before a run (semantics S-122)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from tfnb.errors import ResourceExhausted
from tfnb.graph import Graph, Node, Value
from tfnb.graph.ops import WHILE
from tfnb.graph.subgraph import row_places
from tfnb.passes.liveness import nominal
from tfnb.passes.region_merging import counted_in_runs, kept_rows


@dataclass(frozen=True, slots=True)
class LoopRows:
    """The rows of one loop that only loops take.

    names: of the values, with their specs. bytes: of one iteration. iterations: None where only a run knows. leaves:
    they may, if there is no room. known: whether the bytes of an iteration are.
    """

    node: Node
    names: tuple[str, ...]
    bytes: int
    iterations: int | None
    leaves: bool
    known: bool = True

    def refused(self, iteration: int, room: int, why: str = "") -> ResourceExhausted:
        """The error of a run whose rows do not fit from this iteration on; ``room``: the bytes available for the rows.

        why: what the system said when they were moved out.
        """
        source = self.node.source
        if why:
            cure = f"moving them out failed: {why}"
        elif self.leaves:
            cure = f"a budget that is {self.bytes - max(room, 0):,} bytes larger holds one iteration"
        else:
            cure = "without swap_memory=False a loop computes them again or moves them out and back"
        return ResourceExhausted(
            f"iteration {iteration} of loop {self.node.name} does not fit: for its gradient it keeps "
            + f"{self.bytes:,} bytes"
            + ("" if self.known else " or more")
            + f" of each iteration ({', '.join(self.names)}), and the memory budget leaves {max(room, 0):,} bytes "
            + "for that; "
            + cure
            + (f"\n  at {source}" if source else ""),
            **self.node.where,
        )


def loop_rows(graph: Graph, fetches: Collection[Value], sizes: Mapping[str, int]) -> Iterator[LoopRows]:
    """The kept rows of each loop; ``sizes``: of symbols."""
    kept = kept_rows(graph.contents, fetches)
    for node in graph.nodes:
        rows = (
            [row for row, at in enumerate(row_places(node.attrs)) if node.value(at[0]) in kept]
            if node.op == WHILE
            else []
        )
        if rows:
            yield of_rows(node, rows, sizes)


def kept_by_loops(graph: Graph, fetches: Collection[Value], sizes: Mapping[str, int]) -> set[Value]:
    """Rows that only loops take, and whose bytes the run counts: no part of a predicted peak."""
    return counted_in_runs(graph.contents, kept_rows(graph.contents, fetches), sizes)


def working(graph: Graph, fetches: Collection[Value], sizes: Mapping[str, int]) -> int:
    """Bytes that should stay free for rows of loops that may be offloaded or recomputed: two iterations of each."""
    found = (row for row in loop_rows(graph, fetches, sizes) if row.leaves and row.known)
    return sum(row.bytes * min(2, 2 if row.iterations is None else row.iterations) for row in found)


def of_rows(node: Node, rows: Collection[int], sizes: Mapping[str, int]) -> LoopRows:
    """Some rows of a loop, by their places among its rows."""
    body, first = node.attrs["body"], len(node.attrs["init"])
    values = [body.outputs[first + row] for row in rows]
    specs = [body.contents.by_id[v.node].outputs[v.index] for v in values]
    count = node.outputs[row_places(node.attrs)[min(rows)][-1]].shape[0]
    iterations = count if isinstance(count, int) else None
    if not isinstance(count, int) and all(symbol in sizes for symbol in count.symbols):
        iterations = int(count.evaluate(dict(sizes)))
    return LoopRows(
        node, tuple(f"{body.contents.by_id[v.node].name} {spec}" for v, spec in zip(values, specs, strict=True)),
        sum(prod(nominal(spec, sizes)) * spec.dtype.itemsize for spec in specs), iterations,
        node.attrs.get("swap_memory") is not False, all(s in sizes for spec in specs for s in spec.symbols),
    )  # fmt: skip
