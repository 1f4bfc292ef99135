"""Steps at the same time, in threads: what they share is Variables and queues, and no write is lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import OutOfRange

STEPS = 60


@pytest.fixture(autouse=True)
def turns() -> Iterator[None]:
    """Threads take turns more often than every 5 ms: more interleavings, less waiting."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[], None]) -> None:
    """Run in a thread each; the first error of any is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait(30)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_steps_of_one_graph_never_exchange_values() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = (x * 2).exp().log() / 2
        drawn = torch.rand(4) + y.sum() * 0
    session = tfnb.Session(graph, compile="off")
    draws: list[torch.Tensor] = []

    def work(k: int) -> Callable[[], None]:
        def steps() -> None:
            for place in range(250):
                rows = 1 + (place + k) % 5
                got, random = session.run([y, drawn], {x: torch.full((rows,), float(k))})
                torch.testing.assert_close(got, torch.full((rows,), float(k)))
                draws.append(random)

        return steps

    at_once(*(work(k) for k in range(4)))
    assert len({tuple(draw.tolist()) for draw in draws}) == 1000  # each run drew its own numbers


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [(tfnb.train.SGD(1.0), 2 * STEPS), (tfnb.train.Momentum(1.0, 1.0), STEPS * (2 * STEPS + 1))],
    ids=["plain", "with a slot"],
)
def test_updates_of_two_trainers_are_all_kept(rule: tfnb.train.Optimizer, wanted: int) -> None:
    weight = tfnb.Variable(torch.zeros(400_000), name="weight")  # long enough for two kernels to meet
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0), name="x", shape=())
        step = rule.minimize((weight * x).sum())  # the gradient is x, whatever the weight is
    sessions = [tfnb.Session(graph, compile="off"), tfnb.Session(graph, compile="off")]
    at_once(*(lambda s=s: [s.run(step, {x: 1.0}) for _ in range(STEPS)] for s in sessions))
    assert torch.equal(weight.value(), torch.full((400_000,), -float(wanted)))


def test_an_input_pipeline_training_and_evaluation_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(STEPS)]
    held = torch.randn(20, 6), torch.randint(3, (20,))
    twin = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    wanted = [F.cross_entropy(twin(held[0]), held[1]).item()]
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(twin(images), labels).backward()
        optimizer.step()
        wanted.append(F.cross_entropy(twin(held[0]), held[1]).item())

    queue = tfnb.FIFOQueue(2, [torch.float32, torch.int64], [(8, 6), (8,)], name="batches")
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(held[0], name="x"), tfnb.placeholder(held[1], name="y")
        one, one_label = tfnb.placeholder(batches[0][0], shape=(8, 6)), tfnb.placeholder(batches[0][1], shape=(8,))
        put, end = queue.enqueue([one, one_label]), queue.close()
        images, labels = queue.dequeue()
        train = tfnb.train.SGD(0.1).minimize(F.cross_entropy(model(images), labels))
        loss = F.cross_entropy(model(x), y)
    session = tfnb.Session(graph, compile="off")
    done, seen, trained = threading.Event(), [], []

    def feed() -> None:
        for image, label in batches:
            session.run(put, {one: image, one_label: label})
        session.run(end)

    def learn() -> None:
        try:
            while True:
                session.run(train)
                trained.append(1)
        except OutOfRange:
            done.set()

    def evaluate() -> None:
        while not done.is_set():
            seen.append(session.run(loss, {x: held[0], y: held[1]}).item())

    at_once(feed, learn, evaluate)
    assert len(trained) == STEPS and len(seen) > 1
    assert session.run(loss, {x: held[0], y: held[1]}).item() == pytest.approx(wanted[-1], rel=1e-4)
    low, high = min(wanted), max(wanted)
    assert all(low - 0.05 <= value <= high + 0.05 for value in seen)  # of weights of some step, or between two
