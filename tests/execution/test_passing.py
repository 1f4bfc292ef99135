"""Branches that were not taken leave Variables as they are, without copies; what they give is nobody else's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb


def recorded(body: Any, count: int = 2) -> tuple[tfnb.Graph, Any, list[tfnb.Variable], Any]:
    """A graph with a flag, some Variables and what ``body(flag, *variables)`` gives."""
    held = [tfnb.Variable(torch.arange(4.0) + 10 * i, name=f"v{i}") for i in range(count)]
    with tfnb.record() as graph:
        flag = tfnb.placeholder(torch.tensor(True), shape=(), name="flag")
        out = body(flag, *held)
    return graph, flag, held, out


def clones(graph: tfnb.Graph, fetches: Any, flag: Any) -> int:
    """Copies in the generated code of a step."""
    session = tfnb.Session(graph, compile="off")
    session.run(fetches, {flag: torch.tensor(False)})
    return sum(p.code.program.code.count("aten.clone") for p in session._prepared.values())


def added(flag: Any, v: tfnb.Variable, w: tfnb.Variable) -> Any:
    new = tfnb.cond(flag, lambda: v.read() + 1, lambda: v.read())
    return tfnb.group(v.assign(new))


def swapped(flag: Any, v: tfnb.Variable, w: tfnb.Variable) -> Any:
    a, b = v.read(), w.read()
    x, y = tfnb.cond(flag, lambda: (b, a), lambda: (a, b))
    return tfnb.group(v.assign(x), w.assign(y))


def halved(flag: Any, v: tfnb.Variable, w: tfnb.Variable) -> Any:
    new = tfnb.cond(flag, lambda: v.read() * 2, lambda: v.read()[:2].repeat(2))
    return tfnb.group(v.assign(new))


def twice(flag: Any, v: tfnb.Variable, w: tfnb.Variable) -> Any:
    v.assign(tfnb.cond(flag, lambda: v.read() + 1, lambda: v.read()))
    v.assign(tfnb.cond(flag, lambda: v.read() * 2, lambda: v.read()))
    return tfnb.group(v, w.assign(v.read()))


CASES = {
    added: lambda flag, v, w: (v + flag, w),
    swapped: lambda flag, v, w: (w, v) if flag else (v, w),
    halved: lambda flag, v, w: (v * 2 if flag else v[:2].repeat(2), w),
    twice: lambda flag, v, w: ((v + 1) * 2,) * 2 if flag else (v, v),
}


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_what_branches_assign_is_right_whichever_was_taken(body: Any, executor: str) -> None:
    graph, flag, held, step = recorded(body)
    session = tfnb.Session(graph, compile="off", executor=executor)
    values = [v.value().clone() for v in held]
    for taken in (False, True, False, True, True):
        session.run(step, {flag: torch.tensor(taken)})
        values = list(CASES[body](taken, *values))
        assert [v.value().tolist() for v in held] == [v.tolist() for v in values]


def test_a_side_that_gives_the_variable_back_costs_no_copy() -> None:
    graph, flag, _, step = recorded(added)
    assert clones(graph, step, flag) == 0
    graph, flag, _, step = recorded(swapped)
    assert clones(graph, step, flag) == 2


def test_what_is_fetched_is_not_the_variables_memory() -> None:
    def body(flag: Any, v: tfnb.Variable, w: tfnb.Variable) -> Any:
        new = tfnb.cond(flag, lambda: v.read() + 1, lambda: v.read())
        kept = v.assign(new)
        return [new, kept, v.read()]

    graph, flag, (v, _), out = recorded(body)
    found = tfnb.Session(graph, compile="off").run(out, {flag: torch.tensor(False)})
    for value in found:
        value.zero_()
    assert v.value().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_write_behind_a_branch_changes_no_earlier_value() -> None:
    def body(flag: Any, v: tfnb.Variable, w: tfnb.Variable) -> Any:
        before = tfnb.cond(flag, lambda: v.read() + 1, lambda: v.read())
        v.assign(before)
        v.assign_add(torch.ones(4))
        w.assign(before)
        return [before, tfnb.group(v, w)]

    graph, flag, (v, w), out = recorded(body)
    before, _ = tfnb.Session(graph, compile="off").run(out, {flag: torch.tensor(False)})
    assert before.tolist() == w.value().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert v.value().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_optimizers_in_branches_step_only_where_they_are_taken() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with tfnb.record() as graph:
        flag = tfnb.placeholder(torch.tensor(True), shape=(), name="flag")
        optimizer = tfnb.train.Adam(0.1)
        step = tfnb.cond(flag, lambda: optimizer.minimize((weight * weight).sum()), lambda: tfnb.group())
    other = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([other], 0.1)
    session = tfnb.Session(graph, compile="off")
    for taken in (True, False, True, False, True):
        session.run(step, {flag: torch.tensor(taken)})
        if taken:
            adam.zero_grad()
            (other * other).sum().backward()
            adam.step()
        torch.testing.assert_close(weight.detach(), other.detach(), rtol=1e-6, atol=0)
