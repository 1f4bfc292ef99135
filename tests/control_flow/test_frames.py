"""Loops and branches as Switch, Merge, Enter, Exit, NextIteration: the form, and its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tfnb.passes.flow import frames
from tfnb.passes.flow.frames import ENTER, EXIT, LOOPCOND, MERGE, NEXT, NODE, SWITCH, lower


def nested(x: torch.Tensor) -> Any:
    def body(i: Any, y: Any) -> Any:
        _, inner = tfnb.while_loop(lambda j, z: j < i, lambda j, z: (j + 1, z + x * y.sum()), (0, y))
        return i + 1, tfnb.cond(inner.sum() > 4, lambda: inner / 2, lambda: inner + i)

    return tfnb.while_loop(lambda i, y: i < 3, body, (0, x), maximum_iterations=7)


def drawing(x: torch.Tensor) -> Any:
    return tfnb.while_loop(lambda y: y.sum() < 9, lambda y: (y + torch.rand(3),), (x,))


def differentiated(x: torch.Tensor) -> Any:
    carry, rows = tfnb.scan(lambda c, r: (c + r, tfnb.cond(r > 0, lambda: c * r, lambda: c)), torch.zeros(()), x)
    return tfnb.gradients(tfnb.gradients(carry + rows.sum(), [x])[0].sum(), [x])


def reversed_rows(x: torch.Tensor) -> Any:
    return tfnb.scan(lambda c, r: (c * 2 + r, (c, r)), torch.zeros(()), x, reverse=True)


def in_branches(x: torch.Tensor) -> Any:
    return tfnb.cond(x.sum() > 0, lambda: nested(x)[1], lambda: x.exp())


PROGRAMS: list[Callable[[torch.Tensor], Any]] = [nested, drawing, differentiated, reversed_rows, in_branches]


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_lowered_it_gives_the_values_of_the_structured_form(make: Callable[[torch.Tensor], Any]) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        outs = make(x)
    for fed in ([0.5, 1.0, 0.25], [-1.0, -2.0, -3.0]):
        structured, lowered = (
            tfnb.Session(g, compile="off", executor=executor).run(outs, {x: torch.tensor(fed)})
            for executor in ("auto", "dataflow")
        )
        torch.testing.assert_close(lowered, structured, rtol=0, atol=0)


def test_a_loop_is_made_of_the_six_ops() -> None:
    with tfnb.record() as g:
        n = tfnb.placeholder(torch.tensor(3), name="n")
        tfnb.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, y * 2), (0, 1.0))
    flow = lower(g.contents)
    going = 3  # i, y and the number of iterations
    kinds = Counter(op.kind for op in flow.ops)
    assert kinds[MERGE] == kinds[SWITCH] == kinds[NEXT] == kinds[EXIT] == going
    assert kinds[ENTER] == going + sum(op.kind == ENTER and op.part[1] for op in flow.ops)  # and constants
    assert kinds[LOOPCOND] == 1
    assert all(flow.ops[op.inputs[1].op].kind == NEXT for op in flow.ops if op.kind == MERGE)


def test_every_op_but_a_merge_takes_what_comes_before_it() -> None:
    with tfnb.record() as g:
        nested(tfnb.placeholder(torch.ones(3), shape=(3,)))
    flow = lower(g.contents)
    for number, op in enumerate(flow.ops):
        taken = op.sources[:1] if op.kind == MERGE and op.frame else op.sources
        assert all(port.op < number for port in taken), (number, op.kind)


def test_what_a_branch_makes_of_nothing_waits_for_the_branch() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor(1.0))
        tfnb.cond(x > 0, lambda: torch.rand(2), lambda: torch.zeros(2))
    flow = lower(g.contents)
    drawn = [op for op in flow.ops if op.kind == NODE and op.scope and op.node is not None and not op.node.inputs]
    assert drawn and all(op.after and flow.ops[op.after[0].op].kind == SWITCH for op in drawn)


def test_a_native_loop_stays_a_node() -> None:
    with tfnb.record() as g:
        nested(tfnb.placeholder(torch.ones(3), shape=(3,)))
    flow = lower(g.contents, native=lambda node: True)
    assert {op.kind for op in flow.ops} == {NODE, frames.RUN}
