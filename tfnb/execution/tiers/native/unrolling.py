"""Scans as loops with several iterations in the body: a pass of inductor's, before kernels are made.

Rows are read and written where they lie. A call of a loop's body costs as much as some of its kernels, because every
tensor that it may touch gets a handle; so a small body stands several times in the loop's. A sequence that is turned
round before the loop, or rows that are afterwards, are taken from their end and copied nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, PatternMatcherPass, register_graph_pattern

MOST_NODES, MOST_ITERATIONS = 250, 5  # of one body; with ten a step is 2 % quicker, and compiles two thirds longer
_TURNED = torch.ops.aten.flip.default, torch.ops.prims.rev.default

aten, higher_order = torch.ops.aten, torch.ops.higher_order
_scans = PatternMatcherPass()


def unroll_scans(graph: fx.Graph) -> None:
    """Apply the pass; scans of unknown sizes stay unchanged."""
    _scans.apply(graph)


def _is_static(match: Match) -> bool:
    given = [node.meta["val"] for node in match.nodes[0].all_input_nodes if node.op != "get_attr"]
    return all(isinstance(x, Tensor) and not x.is_meta and all(type(n) is int for n in x.shape) for x in given)


@register_graph_pattern(CallFunctionVarArgs(higher_order.scan), extra_check=_is_static, pass_dict=_scans)
def _unrolled(match: Match, body: fx.Node, init: Any, xs: Sequence[Any], given: Any) -> None:
    (node,) = match.nodes
    module: fx.GraphModule = getattr(node.graph.owning_module, str(body.target))
    turned = [x.target in _TURNED and x.args[1] == [0] for x in xs]
    rows = [x.args[0] if back else x for x, back in zip(xs, turned, strict=True)]
    results = [_is_turned(node, place) for place in range(len(node.meta["val"]))]
    count = int(xs[0].meta["val"].shape[0])
    each = max(1, min(MOST_ITERATIONS, MOST_NODES // len(module.graph.nodes)))
    loop = _UnrolledLoop(module, len(init), len(rows), count, each, turned, results[len(init) :])
    made = [value for value in node.meta["val"][len(init) :]]

    def function(*operands: Tensor) -> list[Tensor]:
        return loop(operands, [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in made])

    match.replace_by_example(function, [*init, *rows, *given], run_functional_passes=False)


def _is_turned(scan: fx.Node, place: int) -> bool:
    """Whether all consumers flip a column; if so, remove the flips."""
    taken = [node for node in scan.users if node.args[1] == place]
    users = [user for node in taken for user in node.users]
    if not users or not all(user.target in _TURNED and user.args[1] == [0] for user in users):
        return False
    for user in users:
        user.replace_all_uses_with(user.args[0])  # type: ignore[arg-type]
        user.graph.erase_node(user)
    return True


class _UnrolledLoop:
    """``count`` iterations of a body: ``each`` of them in the loop's body, the remainder before the loop."""

    def __init__(
        self, body: Callable[..., Sequence[Tensor]], carried: int, rows: int, count: int, each: int,
        turned: Sequence[bool], results: Sequence[bool],
    ) -> None:  # fmt: skip
        self.body, self.carried, self.rows, self.count, self.each = body, carried, rows, count, each
        self.turned, self.results = turned, results

    def __call__(self, operands: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        state, xs = operands[: self.carried], operands[self.carried :][: self.rows]
        given = operands[self.carried + self.rows :]
        first = self.count % self.each if self.count > self.each else self.count
        for at in range(first):
            state = self._iteration(at, state, xs, given, made)
        if first == self.count:
            return [*state, *made]
        carried = (torch.full((), first, dtype=torch.int64), *state, *made)
        out = higher_order.while_loop(self._goes_on, self._iterations, carried, (*xs, *given))
        return list(out[1:])

    def _goes_on(self, at: Tensor, *_: Tensor) -> Tensor:
        return at < self.count

    def _iterations(self, at: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        after = self.carried + len(self.results)
        state: Sequence[Tensor] = operands[: self.carried]
        made, xs = operands[self.carried : after], operands[after:][: self.rows]
        first: Any = at.item()
        torch.ops.aten._assert_scalar.default(first >= 0, "")
        torch.ops.aten._assert_scalar.default(first <= self.count - self.each, "")
        for place in range(self.each):
            state = self._iteration(first + place, state, xs, operands[after + self.rows :], made)
        return (at + self.each, *state, *made)

    def _iteration(
        self, at: object, state: Sequence[Tensor], xs: Sequence[Tensor], given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        rows = [aten.select.int(x, 0, self._place(at, back)) for x, back in zip(xs, self.turned, strict=True)]
        outs = self.body(*state, *rows, *given)
        for out, row, back in zip(made, outs[self.carried :], self.results, strict=True):
            aten.select.int(out, 0, self._place(at, back)).copy_(row)
        return outs[: self.carried]

    def _place(self, at: Any, back: bool) -> Any:
        return self.count - 1 - at if back else at
