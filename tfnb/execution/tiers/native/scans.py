"""Loops whose number of iterations is known before they run, as torch's ``scan``: compiled once, however long they are.

The body takes rows of sequences and gives rows, which lie in one buffer for all iterations. Products and sums that
lowering took out of the body (`tfnb.execution.lowering.loop_products`) are one each, ahead of the loop or behind
it. What the body's kernels must not take is flagged in each iteration.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tfnb.errors import Unimplemented
from tfnb.execution.lowering.control_flow_code import Loop
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.operand_checks import OperandChecks

Body = Callable[..., Sequence[Tensor]]
"""The body, from carried values, rows, captures and constants to carried values, rows and what is summed."""


def refusal(program: Program, node: fx.Node) -> str | None:
    """The reason why a loop's call is no scan, as the end of a sentence; None if it is a scan."""
    loop: Any = node.target
    _, _, xs, _, limit, rows = node.args
    if loop.cond is not None or not (_is_known(program, limit) or (loop.reverse and xs)):
        return "runs as often as data decide"
    if any(isinstance(x, tuple) for x in xs) or any(isinstance(rows[row], int) for row in loop.rows):  # type: ignore[index, union-attr]
        return "has rows of different shapes"
    return "draws in each iteration" if loop.draws else None


def _is_known(program: Program, limit: object) -> bool:
    """Whether sizes tell the limit of a loop: values have specs, and sizes have none."""
    return not isinstance(limit, fx.Node) or is_count(limit) or limit.name not in program.specs


def is_count(node: fx.Node) -> bool:
    """Whether a node is the iteration count of a loop, which a scan gives as a number."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and isinstance(source.target, Loop) and node.args[1] == len(source.args[1])  # type: ignore[arg-type]


class Scan:
    """A loop: called with its attrs and the constants of its body, while the step is traced."""

    def __init__(self, loop: Loop, body: Body, checks: OperandChecks) -> None:
        self.loop, self.body, self.checks = loop, body, checks
        self.__name__ = "scan"  # for the traced code

    def __call__(
        self, init: Any, xs: Sequence[Any], captures: Any, limit: object, rows: object, constants: Sequence[Tensor]
    ) -> list[Any]:
        loop = self.loop
        sequences = [*xs, *(product.stacked() for product in loop.products(xs, captures))]
        # A loop backwards takes the rows of the one forwards, which are as many as its limit says.
        limits = [limit] if isinstance(limit, int) and not (loop.reverse and sequences) else []
        count = min([*(len(x) for x in sequences[:1]), *limits])
        if count < 1:
            raise Unimplemented("a loop takes no iteration")
        taken = [x[len(x) - count :].flip(0) if loop.reverse else x[:count] for x in sequences]
        given = [*captures, *(init[total.place] for total in loop.apart.totals), *constants]
        state = _own([init[place] for place in loop.order], [*taken, *given])
        found = list(self._scanned(state, taken or [torch.arange(count)], given, rowless=not taken))
        carried, columns = found[: len(state)], found[len(state) :]
        made, terms = columns[: len(loop.rows)], columns[len(loop.rows) :]
        made = [column.flip(0) for column in made] if loop.reverse else made
        out = [*carried, count, *made]
        sums = loop.sums(init)
        if sums is None:
            return out
        *silent, last = sums.columns()
        for column, term in zip((*silent, last), terms, strict=True):
            column.put(term.flatten(0, 1))
        return loop.united([*out, *last.end(reverse=False)], len(init))

    def _scanned(
        self, state: Sequence[Tensor], xs: Sequence[Tensor], given: Sequence[Tensor], rowless: bool
    ) -> Sequence[Tensor]:
        """Carried values after the last iteration, and columns in the order of the iterations."""
        first, after = len(state), len(state) + len(xs)
        results = 0

        def iteration(*args: Tensor) -> list[Tensor]:
            nonlocal results
            taken = (*args[:first], *args[after:]) if rowless else args
            with self.checks.inside() as flag:
                outs = _own(self.body(*taken), args)
                results = len(outs)
                changed = flag()
            return [*outs, *([] if changed is None else [changed])]

        found = torch.ops.higher_order.scan(iteration, list(state), list(xs), tuple(given))
        if len(found) > results:
            self.checks.note(found[-1].any())
        return found[:results]  # type: ignore[no-any-return]


def _own(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, each in memory of its own: torch takes two names for one tensor as one."""
    found, seen = list[Tensor](), {other.untyped_storage()._cdata for other in others}
    for tensor in tensors:
        place = tensor.untyped_storage()._cdata
        found.append(tensor.clone(memory_format=torch.contiguous_format) if place in seen else tensor.contiguous())
        seen.add(place)
    return found
