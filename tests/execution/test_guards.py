"""A way that Python took inside of a loop, branch or function: a run that would go another one is refused, not wrong.

Also where the way only picks a value from above it, and where nobody takes what is computed below it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.random_programs import python_branch, python_loop
from tfnb.errors import BranchChanged

pytestmark = pytest.mark.filterwarnings("ignore:.*Python took the")


ways: list[bool] = []  # that were taken


def pick(x: Any, y: Any) -> Any:
    way = bool(x.sum() > 0)
    ways.append(way)
    return x if way else y


def loop(x: Any, loop: Any, branch: Any) -> Any:
    """Nothing but the number of the iteration is computed below the guard."""

    def body(i: Any, y: Any) -> Any:
        z = pick(y - 1, y - 1.5)
        return i + 1, z

    return loop(lambda i, y: i < 3, body, (0, x))[1]


def picking_loop(x: Any, loop: Any, branch: Any) -> Any:
    """Nothing at all is."""
    return loop(lambda y: y.sum() < 3, lambda y: (pick(y + 1, y + 2),), (x,))[0]


def condition(x: Any, loop: Any, branch: Any) -> Any:
    return loop(lambda y: pick(y, -y).sum() < 3, lambda y: (y + 1,), (x,))[0]


def one_side(x: Any, loop: Any, branch: Any) -> Any:
    return branch(x.max() > -5, lambda: pick(x, -x), lambda: x * 10)


def other_result(x: Any, loop: Any, branch: Any) -> Any:
    """What is taken stands above the guard."""

    def side() -> Any:
        above = x * 2
        return above, pick(x, -x) + 1

    return branch(x.max() > -5, side, lambda: (x * 10, x))[0]


def branch_in_loop(x: Any, loop: Any, branch: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        return i + 1, branch(i < 1, lambda: pick(y, -y), lambda: y * -2)

    return loop(lambda i, y: i < 3, body, (0, x))[1]


def loop_in_branch(x: Any, loop: Any, branch: Any) -> Any:
    return branch(x.max() > -5, lambda: picking_loop(x, loop, branch), lambda: x * 10)


def loop_in_loop(x: Any, loop: Any, branch: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        return i + 1, loop(lambda j, z: j < i, lambda j, z: (j + 1, pick(z - 1, z - 1.5)), (0, y))[1]

    return loop(lambda i, y: i < 3, body, (0, x))[1]


PROGRAMS = (loop, picking_loop, condition, one_side, other_result, branch_in_loop, loop_in_branch, loop_in_loop)
FEEDS = ([9.0, 1.0], [0.5, 0.25], [-1.0, -0.5], [-4.0, -3.0], [-6.0, -7.0])


COMPILED = (branch_in_loop,)  # quickly; the others are slow


def refused_where_python_goes_another_way(program: Any, options: tuple[dict[str, Any], ...]) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor([4.0, 5.0]), shape=(2,), name="x")
        out = program(x, tfnb.while_loop, tfnb.cond)
    sessions = [tfnb.Session(graph, **each) for each in options]
    other = 0
    for fed in map(torch.tensor, FEEDS):
        ways.clear()
        expected = program(fed, python_loop, python_branch)
        other += not all(ways)
        for session in sessions:
            if all(ways):
                torch.testing.assert_close(session.run(out, {x: fed}), expected)
            else:
                with pytest.raises(BranchChanged):
                    session.run(out, {x: fed})
    assert 0 < other < len(FEEDS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_run_that_would_go_another_way_is_refused(program: Any) -> None:
    refused_where_python_goes_another_way(program, ({"executor": "dataflow"}, {"compile": "off"}))


@pytest.mark.parametrize(
    "program", [p if p in COMPILED else pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_compiled_code_refuses_it_too(program: Any) -> None:
    refused_where_python_goes_another_way(program, ({"compile": "now"},))


@pytest.mark.filterwarnings("ignore:.*Python took the")
@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_a_guard_in_a_loop_in_a_branch_that_gives_nothing_holds_below(executor: str) -> None:
    def iteration(i: Any, y: Any) -> Any:
        return i + 1, y * 2 if y.sum() > 0 else y

    def then(x: Any) -> Any:
        tfnb.while_loop(lambda i, y: i < 2, iteration, (0, x))
        return ()

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        tfnb.cond(x.sum() < 9, lambda: then(x), lambda: ())
        z = x + 1
    session = tfnb.Session(graph, executor=executor)
    torch.testing.assert_close(session.run(z, {x: torch.ones(3)}), torch.full((3,), 2.0))
    torch.testing.assert_close(session.run(z, {x: torch.full((3,), 9.0)}), torch.full((3,), 10.0))
    with pytest.raises(BranchChanged):
        session.run(z, {x: -torch.ones(3)})
