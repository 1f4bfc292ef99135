"""New values of Variables computed again at the commit, where another step wrote after this one read.

Which nodes: `tfnb.passes.again`. What they take from the step comes with its results, as more fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from tfnb.execution.commit import Pending
from tfnb.execution.lowering.fused_updates import in_place_updates
from tfnb.graph import Graph, Value, Variable
from tfnb.passes import again, hoist, prune, sink, with_fed
from tfnb.recording.values.interpret import evaluate


class Stale:
    """What one program computes again. ``operands``: the values of the step that this takes."""

    def __init__(self, graph: Graph, fetches: Sequence[Value], feeds: Collection[Value], *, fuses: bool) -> None:
        pruned = prune(graph, fetches, feeds)
        seen = _as_committed(pruned, graph, fetches, feeds) if fuses else pruned
        fused = in_place_updates(seen, fetches, feeds) if fuses else {}
        done = {node.attrs["variable"] for node in seen.nodes if node.op == "tfnb.assign" and node.id in fused}
        self.found = again(pruned, feeds, done)
        self.operands = () if self.found is None else tuple(self.found.operands.values())
        self.fetches, self.nodes = tuple(fetches), graph.contents.by_id

    @property
    def private(self) -> frozenset[Variable]:
        """The variables that a step reads from a copy."""
        return frozenset() if self.found is None else self.found.private

    def call(
        self, written: Sequence[Variable], variables: Sequence[Variable], storages: Sequence[torch.Tensor],
        operands: Sequence[Any], fetched: list[torch.Tensor | None],
    ) -> Callable[[Pending], None] | None:  # fmt: skip
        """What a commit calls; ``written``: whose values the step writes as they are, ``fetched`` is brought up too."""
        if self.found is None:
            return None
        return partial(self._renew, written, variables, storages, operands, fetched)

    def _renew(
        self, written: Sequence[Variable], variables: Sequence[Variable], stored: Sequence[torch.Tensor],
        operands: Sequence[Any], fetched: list[torch.Tensor | None], pending: Pending,
    ) -> None:  # fmt: skip
        assert self.found is not None
        storages = dict(zip(variables, stored, strict=True))
        given = zip(self.found.operands, operands, strict=True)
        values = {v: x if isinstance(x, torch.Tensor) else self._tensor(v, x) for v, x in given}
        for node in self.found.nodes:
            if node.op == "tfnb.read":
                values[node.value()] = storages[node.attrs["variable"]].clone()
            elif node.op == "tfnb.constant":
                values[node.value()] = node.attrs["value"]
            else:
                outs = evaluate(node, [values[value] for value in node.inputs], _no_size, 0)
                values.update({node.value(index): out for index, out in enumerate(outs)})
        for place, variable in enumerate(written):
            if variable in self.found.new:
                pending.values[place] = values[self.found.new[variable]]
        made = {node.id for node in self.found.nodes}
        for place, value in enumerate(self.fetches):
            value = self.found.same.get(value, value)
            if value.node in made and fetched[place] is not None:
                fetched[place] = values[value]

    def _tensor(self, value: Value, number: Any) -> torch.Tensor:
        """What generated code has as a number."""
        assert self.found is not None
        step = self.found.operands[value]
        spec = self.nodes[step.node].outputs[step.index]
        return torch.full(spec.sizes({}), number, dtype=spec.dtype, device="cpu")


def _as_committed(graph: Graph, whole: Graph, fetches: Sequence[Value], feeds: Collection[Value]) -> Graph:
    """The graph, pruned before, with what a commit does in place taken out of branches."""
    for run in (sink, hoist):
        seen = with_fed(graph, whole, feeds)
        found = run(seen, fetches, feeds)
        graph = graph if found is seen else prune(found, fetches, feeds)
    return graph


def _no_size(dim: object) -> int:
    raise AssertionError(f"a node that is computed again takes no size, but {dim}")
