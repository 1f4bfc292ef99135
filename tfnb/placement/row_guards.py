"""Guards of a recording for parts of a batch: a relation such as ``B > 1`` must hold for the rows of each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfnb.errors import ShapeError
from tfnb.graph import Dim, Guard, Spec
from tfnb.passes import StepGraph, feed_symbols
from tfnb.passes.microbatches import divide


@dataclass(frozen=True)
class RowGuards:
    """The guards that a step relies on, of sizes that its feeds show. ``specs``: of its feeds."""

    guards: tuple[Guard, ...] = ()
    specs: tuple[Spec, ...] = ()

    @classmethod
    def of(cls, step: StepGraph) -> RowGuards:
        """Those of a step."""
        contents = step.whole.contents
        specs = tuple(contents.by_id[value.node].outputs[value.index] for value in step.feeds)
        shown = feed_symbols(contents, step.feeds).keys()
        nodes = step.graph.nodes
        return cls(tuple(g for g in contents.guards if shown >= set(g.symbols) and g.concerns(nodes)), specs)

    def divide(
        self, shapes: Sequence[Sequence[int]], divided: Sequence[bool], rows: int, most: int
    ) -> tuple[list[tuple[int, int]], Guard | None]:
        """`tfnb.passes.microbatches.divide` into as many parts, at most ``most``, as the guards allow, and the first
        guard that makes them fewer.

        shapes, divided: of the feeds, and which of them have the batch's rows. The batch itself was checked.
        """
        why: Guard | None = None
        for parts in range(max(1, min(most, rows)), 1, -1):
            ranges = divide(rows, parts)
            sizes = dict.fromkeys(stop - start for start, stop in (ranges[-1], ranges[0]))
            broken = [guard for size in sizes if (guard := self._broken(shapes, divided, size)) is not None]
            if not broken:
                return ranges, why
            why = why or broken[0]
        return divide(rows, 1), why

    def _broken(self, shapes: Sequence[Sequence[int]], divided: Sequence[bool], rows: int) -> Guard | None:
        """A guard that does not hold for a part of so many rows."""
        fed = list(zip(shapes, self.specs, divided, strict=False))  # microbatches feed more
        symbols: dict[str, int] = {}
        for cut in (True, False, True):  # divided ones say what B is; a size may derive from one shown later
            for shape, spec, is_divided in fed:
                if is_divided is cut:
                    spec.fits((rows, *shape[1:]) if cut else shape, symbols)
        return next((guard for guard in self.guards if not _holds(guard, symbols)), None)


NO_GUARDS = RowGuards()


def _holds(guard: Guard, symbols: dict[str, int]) -> bool:
    try:
        return bool(Dim(guard.expr).evaluate(symbols))
    except ShapeError:  # a division by an axis of length 0
        return False
