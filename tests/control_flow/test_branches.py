"""`cond` takes the branch that the run's value says, and runs nothing of the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.random_programs import python_branch
from tfnb.errors import InvalidArgument, ShapeError, Unsupported
from tfnb.recording.subgraphs import capture


@pytest.mark.parametrize("value", [3.0, -3.0])
def test_the_run_decides(value: float) -> None:
    def program(x: Any, branch: Any) -> Any:
        return branch(
            x.sum() > 0, lambda x: {"a": 2 * x, "b": (x.sum(), 1.5)}, lambda x: {"a": x - 1, "b": (x[0], 2.5)}, x
        )

    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), name="x")
        out = program(x, tfnb.cond)
    fed = torch.full((4,), value)
    found, expected = tfnb.run(out, {x: fed}), program(fed, python_branch)
    torch.testing.assert_close((found["a"], *found["b"]), (expected["a"], *map(torch.as_tensor, expected["b"])))
    assert program(fed, tfnb.cond)["b"][1] in (1.5, 2.5)


def test_only_the_taken_branch_runs_and_writes() -> None:
    a, b = tfnb.Variable(torch.zeros(()), name="a"), tfnb.Variable(torch.zeros(()), name="b")
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        y = tfnb.cond(x > 0, lambda: a.assign_add(x), lambda: b.assign_sub(x))
        step = tfnb.group(y, a, b)
        seen = a.read() + b.read()
    assert (a.value(), b.value()) == (0, 0)
    tfnb.run(step, {x: 2.0})
    assert (a.value(), b.value()) == (2, 0)
    tfnb.run(step, {x: -3.0})
    assert (a.value(), b.value()) == (2, 3)
    assert tfnb.run(seen, {x: 1.0}) == 6


def test_a_write_in_place_in_one_branch_reaches_outside() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = x * 1
        row = y[:2]

        def write() -> Any:
            y[0] = 5
            return y.sum()

        total = tfnb.cond(x.sum() > 0, write, lambda: y.sum())
        outs = total, y + 0, row + 0
    for value in (1.0, -1.0):
        fed = torch.full((3,), value)
        want = fed.clone()
        want[0] = 5 if value > 0 else want[0]
        torch.testing.assert_close(tuple(tfnb.run(outs, {x: fed})), (want.sum(), want, want[:2]))


def test_nested_branches_and_a_guard_inside() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        y = tfnb.cond(x > 0, lambda: tfnb.cond(x > 1, lambda: x * 10, lambda: x * 100), lambda: x * 1000)
    assert [tfnb.run(y, {x: v}).item() for v in (2.0, 0.5, -1.0)] == [20, 50, -1000]


def test_branches_that_do_not_agree_are_refused_with_both_lines() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), name="x")
        with pytest.raises(InvalidArgument, match=r"different structures: .*tensor") as raised:
            tfnb.cond(x.sum() > 0, lambda: (x, x), lambda: x)
        assert str(raised.value).count(" line ") == 3
        with pytest.raises(InvalidArgument, match=r"output of .* float32\[B\] .* float64\[B\]"):
            tfnb.cond(x.sum() > 0, lambda: x, lambda: x.double())
        with pytest.raises(ShapeError, match=r"output of .* float32\[B\] .* float32\[1, B\]"):
            tfnb.cond(x.sum() > 0, lambda: x, lambda: x[None])
        with pytest.raises(InvalidArgument, match="one truth value"):
            tfnb.cond(x > 0, lambda: x, lambda: x)
    assert {node.op for node in g.nodes} <= {"tfnb.placeholder", "aten.sum.default", "aten.gt.Scalar"}


def test_a_tensor_of_a_branch_is_not_there_outside() -> None:
    leaked = []
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), name="x")
        tfnb.cond(x.sum() > 0, lambda: leaked.append(x * 2) or x, lambda: x)
        with pytest.raises(tfnb.errors.InvalidArgument, match="is inside of a branch"):
            leaked[0] + 1


def test_a_branch_that_is_recorded_again_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_TRIES", 0)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2))
        with pytest.raises(Unsupported, match="makes a tensor of state anew each time that it is recorded"):
            tfnb.cond(x.sum() > 0, lambda: x + 1, lambda: x - 1)
