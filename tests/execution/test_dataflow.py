"""The dataflow executor gives what plain Python gives, overlaps what may overlap, and leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.random_programs import program, python_branch, python_loop
from tfnb.errors import DeadlineExceeded, InvalidArgument, Unimplemented
from tfnb.execution.dataflow.executor import Dataflow
from tfnb.execution.dataflow.machine import Machine
from tfnb.passes import step_graph
from tfnb.passes.flow.step_flow import as_one
from tfnb.state.queue_machine import UNDER_WAY

GRAPHS = int(os.environ.get("TFNB_GRAPHS", "0"))  # more random graphs than the quick tests run: 5000


def dataflow(graph: tfnb.Graph) -> tfnb.Session:
    return tfnb.Session(graph, executor="dataflow")


class Naps:
    """How many naps went on at a time; ``until_so_many`` let none end before."""

    lock, now, most, until_so_many = threading.Lock(), 0, 0, 0


@pytest.fixture(autouse=True)
def no_naps() -> None:
    Naps.most = Naps.until_so_many = 0


@torch.library.custom_op("tfnb_tests::nap", mutates_args=())
def nap(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """x + 1, after a while in which nothing is computed."""
    with Naps.lock:
        Naps.now += 1
        Naps.most = max(Naps.most, Naps.now)
    time.sleep(seconds)
    end = time.monotonic() + 60
    while Naps.most < Naps.until_so_many and time.monotonic() < end:
        time.sleep(0.01)
    with Naps.lock:
        Naps.now -= 1
    return x + 1


nap.register_fake(lambda x, seconds: torch.empty_like(x))


def check_random_program(seed: int) -> None:
    block = program(seed)
    gen = torch.Generator().manual_seed(seed)
    with tfnb.record() as g:
        xs = [tfnb.placeholder(torch.rand(2, dtype=torch.float64, generator=gen) - 0.5, shape=(2,)) for _ in range(3)]
        outs = block(list(xs), tfnb.while_loop, tfnb.cond)
    fed = [torch.rand(2, dtype=torch.float64, generator=gen) * 4 - 2 for _ in xs]
    expected = block(list(fed), python_loop, python_branch)
    feeds = dict(zip(xs, fed, strict=True))
    for session in (tfnb.Session(g, compile="off"), dataflow(g)):
        torch.testing.assert_close(session.run(outs, feeds), expected, rtol=0, atol=0, msg=f"seed {seed}")


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_programs_give_what_python_gives(first: int) -> None:
    for seed in range(first, first + 10):
        check_random_program(seed)


@pytest.mark.slow
def test_many_random_programs_give_what_python_gives() -> None:
    for seed in range(40, max(200, GRAPHS)):
        check_random_program(seed)


def test_gradients_of_loops_in_loops_are_those_of_native_loops() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3, dtype=torch.float64), name="x")

        def body(i: Any, y: Any) -> Any:
            _, z = tfnb.while_loop(lambda j, z: j < i, lambda j, z: (j + 1, (z * x).sin()), (0, y))
            return i + 1, tfnb.cond(z.sum() > 0, lambda: z * y, lambda: z - y)

        _, y = tfnb.while_loop(lambda i, y: i < 4, body, (0, x))
        (dx,) = tfnb.gradients(y.sum(), [x])
        (ddx,) = tfnb.gradients(dx.pow(2).sum(), [x])
    fed = {x: torch.randn(5, dtype=torch.float64)}
    native = tfnb.Session(g, compile="off").run([y, dx, ddx], fed)
    torch.testing.assert_close(dataflow(g).run([y, dx, ddx], fed), native, rtol=1e-12, atol=0)


def test_draws_rows_sizes_and_limits_are_those_of_native_loops() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        n = x.shape[0]
        carry, rows = tfnb.scan(lambda c, r: (c + torch.rand(3), c * r), torch.zeros(3), x, reverse=True)
        (grown,) = tfnb.while_loop(
            lambda y: y.sum() < 20, lambda y: (torch.cat([y, torch.ones(n, 3)]),), (x,), shape_invariants=[(None, 3)]
        )
        (few,) = tfnb.while_loop(lambda y: y.sum() < 1e9, lambda y: (y * 2,), (x,), maximum_iterations=5)
    fed = {x: torch.rand(2, 3)}
    fetches = [carry, rows, grown, few]
    torch.testing.assert_close(dataflow(g).run(fetches, fed), tfnb.Session(g).run(fetches, fed), rtol=0, atol=0)
    empty = {x: torch.rand(0, 3)}
    assert dataflow(g).run([carry, rows], empty)[1].shape == (0, 3)


def test_variables_are_written_in_order_and_once_the_step_is_over() -> None:
    v = tfnb.Variable(torch.zeros(()), name="v")
    with tfnb.record() as g:

        def body(i: Any, before: Any) -> Any:
            return i + 1, v.assign_add(1.0)

        _, last = tfnb.while_loop(lambda i, y: i < 20, body, (0, torch.zeros(())), parallel_iterations=32)
        after = v.read() * 10
    assert dataflow(g).run([last, after]) == [20, 200] and v.value() == 20
    assert dataflow(g).run(after) == 400


def test_a_group_of_groups_runs() -> None:
    v, w = tfnb.Variable(torch.zeros(())), tfnb.Variable(torch.ones(()))
    with tfnb.record() as g:
        step = tfnb.group(tfnb.group(v.assign_add(1.0)), tfnb.group(w.assign_add(v.read())))
    assert dataflow(g).run(step) is None
    assert (v.value(), w.value()) == (1, 2)


def test_a_training_step_is_that_of_generated_code() -> None:
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, executor in zip(models, ("auto", "dataflow"), strict=True):
        with tfnb.record() as g:
            x = tfnb.placeholder(torch.ones(4, 3), name="x")
            loss = model(tfnb.cond(x.sum() > 0, lambda x: x * 2, lambda x: x, x)).pow(2).mean()
            train = tfnb.train.Adam(1e-2).minimize(loss)
        session = tfnb.Session(g, executor=executor)
        torch.manual_seed(0)
        for _ in range(3):
            session.run([train, loss], {x: torch.randn(5, 3)})
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def chained_naps(stages: int, iterations: int, seconds: float, parallel: int) -> tuple[tfnb.Session, Any]:
    """A loop of stages on a device each, whose state only they need: a pipeline over its iterations."""
    with tfnb.record() as g:
        start = [torch.zeros(()) for _ in range(stages)]

        def body(i: Any, *state: Any) -> Any:
            x, new = i.to(torch.float32), []
            for stage, mine in enumerate(state):
                with tfnb.device(f"cpu:{stage}"):
                    x = torch.ops.tfnb_tests.nap(x + mine, seconds)
                new.append(x)
            return (i + 1, *new)

        _, *outs = tfnb.while_loop(lambda i, *s: i < iterations, body, (0, *start), parallel_iterations=parallel)
    return dataflow(g), outs


@pytest.mark.slow
def test_iterations_overlap_where_their_data_allow() -> None:
    most, found = {}, {}
    for parallel in (1, 8):
        session, outs = chained_naps(4, 6, 0.03, parallel)
        Naps.most = 0
        found[parallel] = session.run(outs)
        most[parallel] = Naps.most
    torch.testing.assert_close(found[1], found[8], rtol=0, atol=0)
    assert most[1] == 1 and most[8] > 1  # 4 at best, on an idle machine


def test_both_sides_of_a_step_run_at_a_time() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(()), name="x")
        outs = []
        for lane in range(4):
            with tfnb.device(f"cpu:{lane}"):
                outs.append(torch.ops.tfnb_tests.nap(x, 0.0))
    Naps.until_so_many = 4
    assert dataflow(g).run(outs, {x: 1.0}) == [2, 2, 2, 2]
    assert Naps.most == 4


def test_nothing_is_left_after_a_step_and_few_iterations_are_live() -> None:
    with tfnb.record() as g:
        _, y = tfnb.while_loop(lambda i, y: i < 30, lambda i, y: (i + 1, y + 1), (0, 0.0), parallel_iterations=3)
    (plan,) = Dataflow(as_one(step_graph(g, [y.value], []), lambda node: False)).plans
    machine = Machine([plan.root], 1)
    machine.feed(plan.given)
    machine.run()
    assert machine.is_over and machine.results[0] == 30 and machine.most <= 4 and not machine.waits
    assert not machine.roots[0].iterations


def test_a_step_without_queues_is_not_kept_among_those_that_use_some() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(4))
        y = (x + 1).exp()
    session, before = dataflow(g), len(UNDER_WAY)
    for _ in range(5):
        session.run(y, {x: torch.zeros(4)})
    assert len(UNDER_WAY) == before


def test_an_error_in_a_thread_names_its_line_and_ends_the_step() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(30), shape=(None,), name="x")
        i = tfnb.placeholder(torch.tensor(0), name="i")

        def body(n: Any, y: Any) -> Any:
            return n + 1, torch.ops.tfnb_tests.nap(y, 0.001) + x[i + n]

        _, y = tfnb.while_loop(lambda n, y: n < 20, body, (0, torch.zeros(())))
    before = threading.active_count()
    with pytest.raises(InvalidArgument, match="index") as raised:
        dataflow(g).run(y, {x: torch.ones(10), i: 3})
    assert raised.value.line is not None and raised.value.op == "aten.index_select.default"
    assert threading.active_count() <= before + os.cpu_count()  # type: ignore[operator]


def test_a_deadline_ends_a_loop_and_nothing_is_written() -> None:
    v = tfnb.Variable(torch.zeros(()), name="v")
    with tfnb.record() as g:
        (y,) = tfnb.while_loop(lambda y: y > 0, lambda y: (y + 0.5,), (tfnb.placeholder(torch.tensor(-1.0), name="x"),))
        step = v.assign(y)
    with pytest.raises(DeadlineExceeded):  # it would never end
        dataflow(g).run(step, {"x": 1.0}, timeout=0.3)
    assert v.value() == 0


def test_what_is_not_there_says_so() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(()), name="x")
        y = x + 1
    with pytest.raises(InvalidArgument, match="executor is one of"):
        tfnb.Session(g, executor="native")
    with pytest.raises(InvalidArgument, match="must be fed"):
        dataflow(g).run(y)
    with pytest.raises(Unimplemented, match="in parts"):
        dataflow(g).step([y], [x])
