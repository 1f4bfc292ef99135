"""What a loop does with the rows that do not fit a memory budget, by predicted cost: S-190's swap or recompute.

A byte that moves out and back costs as much as some bytes that a kernel moves; computing a turn again costs what its
nodes do, and what it takes to start them.

Measured with `tests/benchmarks/bench_swap.py --choices` on two cores (EPYC, torch 2.13, one thread), where other
programs ran too: 17 to 35 MB that move beside the turns, to a file that fits into the system's cache, hold these up by
0.2 to 0.4 nanoseconds for each byte. What is computed again takes 0.05 (sums, products) to 0.25 (tanh, sigmoid)
nanoseconds for each byte that `cost` says. So a byte that moves is worth 1 to 6 of those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from tfnb.graph import Contents, Graph, Node, Ref, Value
from tfnb.graph.node import leaves
from tfnb.graph.ops import COND, WHILE, WITH_GRADIENT
from tfnb.graph.subgraph import row_places
from tfnb.passes.budget import repeats
from tfnb.passes.cost import cost
from tfnb.passes.memory import NOMINAL, Memory
from tfnb.passes.regions import kept_rows
from tfnb.passes.saved import Saved, of_rows

MOVED: Mapping[str, float] = {"cpu": 4}
"""Of a device: how many bytes its kernels move in the time in which one byte goes to the second tier and comes back."""
MOVED_ELSEWHERE = 64.0
START = 32 << 10  # bytes that a kernel moves in the time that it takes to start one
_FREE = frozenset({"tfnb.placeholder", "tfnb.constant", "tfnb.guard", WITH_GRADIENT})


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one loop: whether what does not fit is computed again, or moves out, and both costs of a turn, in bytes.

    held: places among the node's inputs of what would be gone by then, and is held for it.
    """

    saved: Saved
    moving: float
    computing: float
    held: frozenset[int] = frozenset()

    @property
    def again(self) -> bool:
        """Whether it is computed again."""
        return self.computing < self.moving

    def __str__(self) -> str:
        node = self.saved.node
        where = f" ({node.source})" if node.source else ""
        what = "is computed again" if self.again else "moves out"
        return f"what does not fit of the {self.saved.bytes:,} bytes of each turn of loop {node.name}{where} {what}"


def choices(
    graph: Graph, fetches: Collection[Value], memory: Memory, sizes: Mapping[str, int]
) -> Iterator[Choice]:  # fmt: skip
    """For each loop of the graph whose rows only loops take and may leave; ``sizes``: of symbols."""
    kept, last = kept_rows(graph.contents, fetches), memory.last()
    for node in graph.nodes:
        places = row_places(node.attrs) if node.op == WHILE else []
        rows = [row for row, at in enumerate(places) if node.value(at[0]) in kept]
        if not rows or node.attrs.get("swap_memory") is False:
            continue
        found = of_rows(node, rows, sizes)
        device = node.outputs[places[rows[0]][0]].device.partition(":")[0]
        moving = found.bytes * MOVED.get(device, MOVED_ELSEWHERE)
        if node.attrs.get("swap_memory") or not _restarts(node, kept, sizes):
            yield Choice(found, moving, inf)
            continue
        end = max(graph.contents.position[user] for row in rows for user in kept[node.value(places[row][0])])
        given = {ref.input for ref in leaves((node.attrs["xs"], node.attrs["captures"]))}
        owners = {place: memory.owner.get(node.inputs[place], node.inputs[place]) for place in given}
        held = {
            place for place, owner in owners.items()
            if owner in memory.size and owner not in memory.kept and last[owner] < end
        }  # fmt: skip
        yield Choice(found, moving, _work(node.attrs["body"].contents, sizes), frozenset(held))


def _restarts(node: Node, kept: Collection[Value], sizes: Mapping[str, int]) -> bool:
    """Whether turns can be taken again from the middle: the carried values keep their shapes, sequences are tensors."""
    if any(not isinstance(x, Ref) or node.inputs[x.input] in kept for x in node.attrs["xs"]):
        return False
    body, carried = node.attrs["body"], len(node.attrs["init"])
    inside = [body.contents.by_id[v.node].outputs[v.index] for v in body.inputs[:carried]]
    return all(s in sizes for spec in inside for s in spec.symbols)


def _work(contents: Contents, sizes: Mapping[str, int]) -> float:
    """What it costs to run the nodes; infinite if one does something else than compute."""
    return sum(_of(node, contents, sizes) for node in contents.nodes)


def _of(node: Node, contents: Contents, sizes: Mapping[str, int]) -> float:
    if node.op in _FREE:
        return 0.0
    if node.op == COND:
        return max(_work(node.attrs[side].contents, sizes) for side in ("then", "else"))
    if node.op == WHILE:
        parts = [part for part in (node.attrs["cond"], node.attrs["body"]) if part is not None]
        return NOMINAL * sum(_work(part.contents, sizes) for part in parts)
    return START + cost(node, contents, sizes) if repeats(node) else inf
