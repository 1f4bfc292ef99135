"""Loops and branches in generated code: native Python around the generated functions of their subgraphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tfnb.graph import Node, ops
from tfnb.graph.subgraph import row_places
from tfnb.kernels.control import call, while_loop
from tfnb.kernels.random import mix
from tfnb.recording.interpret import absent, number, too_deep


class Lowered(Protocol):
    """What a subgraph was lowered to."""

    @property
    def forward(self) -> Callable[..., Sequence[torch.Tensor]]: ...

    @property
    def written(self) -> tuple[int, ...]: ...


Lower = Callable[..., Lowered]  # of a subgraph, which outputs are wanted; how many inputs a call may write into


class Loop:
    """A ``tfnb.while``, without stacked rows that nobody takes: called with the run's number and its attrs."""

    def __init__(self, node: Node, lower: Lower, taken: Set[int]) -> None:
        attrs = node.attrs
        carried = len(attrs["init"])
        places = row_places(attrs)
        self.rows = [row for row, at in enumerate(places) if not taken.isdisjoint(at)]
        self.places = (*range(carried + 1), *(p for row in self.rows for p in places[row]))  # among the node's outputs
        outputs = attrs["body"].outputs
        wanted = [*outputs[:carried], *(outputs[carried + row] for row in self.rows)]
        self.body = lower(attrs["body"], wanted, carried)
        self.cond = None if attrs["cond"] is None else lower(attrs["cond"], attrs["cond"].outputs)
        self.inner = (self.body,) if self.cond is None else (self.cond, self.body)
        firsts = [node.outputs[places[row][0]] for row in self.rows]
        self.kinds = [(spec.dtype, spec.device) for spec in firsts]
        self.reverse = attrs["reverse"]
        self.draws = attrs["body"].draws or (attrs["cond"] is not None and attrs["cond"].draws)
        self.__name__ = "loop"  # for the generated code

    def __call__(self, run: int, init: Any, xs: Any, captures: Any, limit: Any, rows: Any) -> list[torch.Tensor]:
        kinds, init = zip(self.rows, self.kinds, strict=True), list(init)
        for place in self.body.written:  # from here on they are the loop's own
            init[place] = init[place].clone()
        return while_loop(
            None if self.cond is None else self.cond.forward, self.body.forward, init, xs, captures,
            limit=number(limit), rows=[(rows[row], *kind) for row, kind in kinds], reverse=self.reverse, run=run,
            draws=self.draws,
        )  # fmt: skip


_watched = threading.local()


@contextmanager
def watched() -> Iterator[dict[int, set[bool]]]:
    """Which sides branches take inside, by the id of their node."""
    before = getattr(_watched, "taken", None)
    _watched.taken = taken = dict[int, set[bool]]()
    try:
        yield taken
    finally:
        _watched.taken = before


class Cond:
    """A ``tfnb.cond``: called with the run's number and its attrs."""

    def __init__(self, node: Node, lower: Lower, taken: Set[int]) -> None:
        self.places = tuple(place for place in range(len(node.outputs)) if place in taken)
        self.specs = [node.outputs[place] for place in self.places]
        self.branches, self.id = {}, node.id
        for part in ("then", "else"):
            outputs = [node.attrs[part].outputs[place] for place in self.places]
            program = lower(node.attrs[part], [value for value in outputs if value is not None])
            self.branches[part == "then"] = program, [value is None for value in outputs]
        self.inner = tuple(program for program, _ in self.branches.values())
        self.__name__ = "cond"  # for the generated code

    def __call__(self, run: int, pred: Any, operands: Any, shapes: Any) -> list[torch.Tensor]:
        way = bool(pred)
        taken = getattr(_watched, "taken", None)
        if taken is not None:
            taken.setdefault(self.id, set()).add(way)
        program, missing = self.branches[way]
        given = iter(program.forward(*operands, run))
        return [
            absent(spec, shapes[place]) if lacks else next(given)
            for place, spec, lacks in zip(self.places, self.specs, missing, strict=True)
        ]


class Call:
    """Calls of one function that calls itself: called with the run's number, that of the call, and its args.

    ``program`` is put in when it is lowered, as it holds this very object.
    """

    def __init__(self, node: Node) -> None:
        self.node, self.function = node, node.attrs["function"]
        self.program: Lowered
        self.__name__ = "call"  # for the generated code

    def __call__(self, run: int, place: int, *args: Any) -> Sequence[torch.Tensor]:
        function = self.function
        given: tuple[Any, ...] = (*args, mix(run, place))
        return call(function.name, function.limit, self.program.forward, given, self._explained)

    def _explained(self, deep: RecursionError) -> Exception:
        return too_deep(self.node, deep)


REGIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    ops.WHILE: (Loop, ("init", "xs", "captures", "limit", "rows")),
    ops.COND: (Cond, ("pred", "operands", "shapes")),
}
"""The class of each op's calls, and the attrs that a call takes."""
