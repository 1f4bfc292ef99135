"""Synchronisation as users write it: the classes of notebooks/replicas.ipynb on real tasks, and what they stand on."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tfnb
from tests.cluster.test_queues_on_servers import _waiting, until
from tests.state.test_queues import in_thread
from tfnb.errors import Aborted, FailedPrecondition, Unimplemented

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")
STEPS = 4
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "replicas.ipynb"


@pytest.fixture(scope="module")
def pieces() -> Any:
    """The names that the cells of the notebook define before it connects to a cluster."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    names: dict[str, Any] = {}
    for number, source in enumerate(sources):
        if "tfnb.connect(" in source:
            break
        code = "\n".join(line for line in source.splitlines() if not line.startswith("%"))
        exec(compile(code, f"cell {number}", "exec"), names)
    return SimpleNamespace(**names)


def descend(theta: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return theta - 0.5 * mean


def test_rounds_of_all_workers_are_the_steps_of_one_with_the_joint_batch(connect, pieces) -> None:
    connect(3)
    rounds = pieces.Rounds(pieces.gradient, descend)
    rounds.train(STEPS)
    theta = torch.zeros(650, dtype=torch.float64)
    for step in range(STEPS):
        theta = descend(theta, pieces.plain_gradient(theta, *range(3 * step, 3 * step + 3)))
    torch.testing.assert_close(rounds.theta.value(), theta, rtol=0, atol=1e-12)
    assert sorted((part, counts) for part, _, counts in rounds.given) == [(part, True) for part in range(3 * STEPS)]


def test_a_step_of_two_gradients_waits_for_no_third_one(connect, pieces) -> None:
    connect(3)
    rounds = pieces.Rounds(pieces.gradient, descend, aggregate=2)
    work, held = rounds.worker, []

    def worker(k: int) -> None:
        if k != 2:
            until(lambda: held)
        else:  # holds a token of the first step until that is over
            token, part = rounds.session.run(rounds.take, timeout=60)
            held.append(int(part))
            until(lambda: any(counts and part >= 3 for part, _, counts in rounds.given))
            found, counts = rounds.session.run(rounds.work[2], {rounds.token: token, rounds.part: part}, timeout=60)
            rounds.given.append((int(part), found, bool(counts)))
        work(k)

    rounds.worker = worker
    rounds.train(STEPS)
    counted = [sum(counts and part // 3 == step for part, _, counts in rounds.given) for step in range(STEPS)]
    late = next(counts for part, _, counts in rounds.given if part == held[0])
    assert min(counted) >= 2 and not late
    torch.testing.assert_close(rounds.theta.value(), rounds.replay(descend, STEPS), rtol=0, atol=1e-12)


def test_what_a_worker_sends_when_its_lease_is_over_is_refused(connect, pieces) -> None:
    connect(2)
    rounds = pieces.Rounds(pieces.gradient, descend, workers=1, aggregate=1)
    rounds.tokens.give(0)
    token, part = rounds.session.run(rounds.take, timeout=60)
    rounds.tokens.finish(token)
    with pytest.raises(FailedPrecondition, match="is not held any more"):
        rounds.session.run(rounds.work[0], {rounds.token: token, rounds.part: part}, timeout=60)


def test_values_of_workers_that_train_alone_are_averaged(connect, pieces) -> None:
    connect(3)

    def local_steps(theta: Any, part: Any, gradient: Any) -> Any:
        for i in range(2):
            theta = theta - 0.5 * gradient(theta, part * 2 + i)
        return theta

    rounds = pieces.Rounds(lambda theta, part: local_steps(theta, part, pieces.gradient), lambda theta, mean: mean)
    rounds.train(STEPS)
    theta = torch.zeros(650, dtype=torch.float64)
    for step in range(STEPS):
        theta = sum(local_steps(theta, 3 * step + k, pieces.plain_gradient) for k in range(3)) / 3
    torch.testing.assert_close(rounds.theta.value(), theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("every", [1, 3])
def test_updates_of_free_workers_are_each_added_once(every: int, connect, pieces) -> None:
    """every: 1 is Hogwild, more is Downpour."""
    connect(3)

    def pushed(theta: Any, part: Any) -> Any:
        start = theta
        for i in range(every):
            theta = theta - 0.5 * pieces.gradient(theta, part * every + i)
        return theta - start

    free = pieces.Free(pushed)
    free.train(24)
    assert sorted(part for part, _ in free.given) == [*range(24)]
    assert torch.equal(free.theta.value(), sum(update for _, update in free.given))
    assert pieces.loss(free.theta.value()) < 0.8 * pieces.loss(torch.zeros(650, dtype=torch.float64))


def test_one_free_worker_is_plain_sgd(connect, pieces) -> None:
    connect(2)
    free = pieces.Free(lambda theta, part: -0.5 * pieces.gradient(theta, part), workers=1)
    free.train(8)
    theta = torch.zeros(650, dtype=torch.float64)
    for part in range(8):
        theta = descend(theta, pieces.plain_gradient(theta, part))
    torch.testing.assert_close(free.theta.value(), theta, rtol=0, atol=1e-5)  # updates are multiples of 2^-20


@pytest.mark.parametrize("is_free", [True, False])
def test_unordered_updates_of_waiting_steps_do_not_abort_each_other(is_free: bool, connect) -> None:
    total = tfnb.Variable(torch.zeros(2), name="total", trainable=False)
    queues = [tfnb.FIFOQueue(4, torch.float32, (2,), name=f"updates{k}") for k in range(2)]
    steps = []
    for k, queue in enumerate(queues):
        with tfnb.record(), tfnb.device(f"task:{k}"):
            update = queue.dequeue(sample=torch.ones(2)) + 0 * total.read()
            with tfnb.unordered() if is_free else nullcontext():
                steps.append(total.assign_add(update))
    cluster = connect(2)
    threads = [in_thread(lambda step=step: tfnb.run([step], timeout=120)) for step in steps]
    until(lambda: _waiting(cluster) == 2)
    for k, (queue, (thread, _)) in enumerate(zip(queues, threads, strict=True)):
        queue.enqueue(torch.full((2,), 1.0 + k))
        thread.join(60)
    assert isinstance(threads[1][1][0], Aborted) != is_free and not isinstance(threads[0][1][0], BaseException)
    cluster.close()
    assert total.value().tolist() == ([3.0, 3.0] if is_free else [1.0, 1.0])


def test_a_variable_that_is_to_be_read_after_a_dequeue_is_refused_on_a_cluster(connect) -> None:
    weight, queue = tfnb.Variable(torch.zeros(2), name="weight"), tfnb.FIFOQueue(4, torch.float32, (2,), name="ticks")
    with tfnb.record() as graph:
        tick = queue.dequeue(sample=torch.ones(2))
        with tfnb.control_dependencies([tick]):
            later = weight.read() + tick
        earlier = weight.read() + tick
    session = tfnb.Session(graph)
    queue.enqueue(torch.ones(2))
    assert session.run(later).tolist() == [1, 1], "here it waits, and reads then"
    connect(2)
    queue.enqueue(torch.ones(2))
    with pytest.raises(Unimplemented, match=r"weight is read after tick.*dequeue in a run of its own"):
        session.run(later)
    assert queue.size() == 1 and session.run(earlier).tolist() == [1, 1]
