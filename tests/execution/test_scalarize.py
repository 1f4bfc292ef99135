"""Generated code with numbers inside: the same values to the last bit, and what a step writes is written."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tfnb
from tfnb.execution import lower
from tfnb.execution.tiers.scalarize import parts, quick

LAST = 2**63 - 1


def code(graph: tfnb.Graph, fetches: Any, feeds: Any = ()) -> str:
    """The code with numbers of a step and its branches."""
    found = quick(lower(graph, [f.value for f in fetches], [f.value for f in feeds]))
    return "\n".join(part.code for part in parts(found))


def machine() -> tuple[tfnb.Graph, list[tfnb.Variable], Any, Any]:
    """A counter that decides which branch moves a place; what is written depends on all of it."""
    clock = tfnb.Variable(torch.tensor(LAST - 20), name="clock", trainable=False)
    place = tfnb.Variable(torch.tensor(5), name="place", trainable=False)
    odd = tfnb.Variable(torch.tensor(False), name="odd", trainable=False)
    seen = tfnb.Variable(torch.zeros(8), name="seen", trainable=False)
    held = [clock, place, odd, seen]
    with tfnb.record() as graph:
        way = tfnb.placeholder(torch.tensor(1), shape=(), name="way")
        now, here = clock.read(), place.read()
        there = tfnb.cond(
            (now % 3 == 0) | odd.read(),
            lambda: (here + way).clamp(0, 7),
            lambda: torch.arange(8.0).roll(3).argmax() - here,
        )
        right = (there >= 4) & ~odd.read()
        reward = torch.where(right, 1.0, -0.01)
        seen.assign(tfnb.cond(right, lambda: seen.read() + reward, lambda: seen.read()))
        place.assign(tfnb.cond(there * 8 + way > 30, lambda: torch.zeros_like(there), lambda: there))
        odd.assign(there % 2 == 1)
        clock.assign_add(torch.tensor(3))
        fetches = [reward, there, tfnb.group(*held)]
    return graph, held, way, fetches


def by_hand(state: list[Any], way: int) -> tuple[float, int]:
    """A step of the machine on numbers and a list."""
    now, here, odd, seen = state
    there = min(max(here + way, 0), 7) if now % 3 == 0 or odd else 2 - here
    right = there >= 4 and not odd
    reward = float(torch.tensor(1.0 if right else -0.01))
    seen = [float(torch.tensor(x) + reward) for x in seen] if right else seen
    after = now + 3 - (2**64 if now + 3 > LAST else 0)
    state[:] = after, 0 if there * 8 + way > 30 else there, there % 2 == 1, seen
    return reward, there


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_decisions_in_numbers_are_those_by_hand(executor: str) -> None:
    graph, held, way, fetches = machine()
    call = tfnb.Session(graph, compile="off", executor=executor).make_callable(fetches, [way])
    state: list[Any] = [LAST - 20, 5, False, [0.0] * 8]
    draw = random.Random(3)
    for _ in range(30):
        step = draw.choice([-1, 1, 2, LAST])
        if step == LAST:  # here + way is below the bound: the sum wraps around only where torch's does
            step = 1
        reward, there, _ = call(torch.tensor(step))
        assert (reward.item(), there.item()) == by_hand(state, step)
        assert [v.value().tolist() for v in held] == state
        assert [v.value().dtype for v in held] == [torch.int64, torch.int64, torch.bool, torch.float32]


def test_the_machine_runs_in_numbers() -> None:
    graph, _, way, fetches = machine()
    text = code(graph, fetches, [way])
    assert "item % 3" in text and ".remainder" not in text and "wrapped" in text


def test_a_single_op_between_tensors_is_torchs_to_the_last_bit() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(3), shape=())
        y = x + 1
    assert "wrapped" in code(graph, [y], [x])
    assert tfnb.run(y, {x: torch.tensor(LAST)}).item() == -LAST - 1


def test_other_dtypes_and_shapes_stay_torchs() -> None:
    def decided(x: torch.Tensor) -> Any:
        with tfnb.record() as graph:
            fed = tfnb.placeholder(x, shape=tuple(x.shape))
            y = (fed * 3 + 1) * 5 - fed
        return code(graph, [y], [fed])

    assert decided(torch.tensor(3)) != ""
    for other in (torch.tensor(3, dtype=torch.int32), torch.tensor(0.5), torch.tensor([3]), torch.tensor(3.0).double()):
        assert decided(other) == ""


def test_what_a_branch_that_was_not_taken_gives_back_is_not_written() -> None:
    """Another step's write in between stays."""
    v = tfnb.Variable(torch.tensor(1), name="v", trainable=False)
    with tfnb.record() as graph:
        flag = tfnb.placeholder(torch.tensor(True), shape=())
        new = tfnb.cond(flag, lambda: torch.full((3,), 2.0).cumsum(0).argmax() + v.read() * 2, lambda: v.read())
        step = v.assign(new)
    program = lower(graph, [step.value], [flag.value])
    program.quick = quick(program)
    forward = program.forward if program.quick is None else program.quick.forward
    _, pending = program.compute([torch.tensor(False)], [v.storage], 0, forward)
    v.assign(torch.tensor(7))
    program.commit(pending)
    assert v.value().item() == 7


def test_an_error_names_the_users_line() -> None:
    with tfnb.record() as graph:
        n = tfnb.placeholder(torch.tensor(1), shape=(), name="n")
        rows = tfnb.placeholder(torch.arange(4.0), shape=(4,), name="rows")
        at = (n * 2 + 1) % 8
        found = tfnb.cond(at > 2, lambda: rows.index_select(0, at.reshape(1)), lambda: rows[:1])  # the line
    with pytest.raises(tfnb.errors.InvalidArgument, match="# the line") as caught:
        tfnb.Session(graph, compile="off").run(found, {n: torch.tensor(3), rows: torch.arange(4.0)})
    assert caught.value.op == "aten.index_select.default" and caught.value.line is not None


def test_a_traced_run_gives_the_same() -> None:
    graph, held, way, fetches = machine()
    session = tfnb.Session(graph, compile="off")
    one = session.run(fetches, {way: torch.tensor(1)})
    for variable, value in zip(
        held, (torch.tensor(LAST - 20), torch.tensor(5), torch.tensor(False), torch.zeros(8)), strict=True
    ):
        variable.set(value)
    other = session.run(fetches, {way: torch.tensor(1)}, trace=True)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_updates_of_several_threads_lose_no_count() -> None:
    from concurrent.futures import ThreadPoolExecutor

    count = tfnb.Variable(torch.tensor(0), name="count", trainable=False)
    with tfnb.record() as graph:
        early = count.read() % 5 < 3
        step = count.assign(count.read() + torch.where(early, 1, 1))
    call = tfnb.Session(graph, compile="off").make_callable(step)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [call() for _ in range(200)], range(4)))
    assert count.value().item() == 800
