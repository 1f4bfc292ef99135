"""Tokens under leases, here and on a server, and synchronous training written with them in ordinary graph code."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tfnb
from tests.state.distance import Distance, queues_there
from tests.state.test_queues import in_thread
from tfnb.errors import FailedPrecondition, InvalidArgument, OutOfRange

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


@pytest.fixture(params=["here", "there"])
def home(request: pytest.FixtureRequest) -> Iterator[Distance | None]:
    with queues_there(loss=0.1) if request.param == "there" else nullcontext() as distance:
        yield distance


def test_a_token_whose_lease_is_over_goes_to_the_next_and_its_holder_is_refused(home: Distance | None) -> None:
    tokens = tfnb.TokenQueue(lease=0.6)
    tokens.give(3), tokens.give(4)
    first, step = tokens.take()
    second, _ = tokens.take()
    assert (int(first), int(step), int(second)) == (1, 3, 2)
    tokens.finish(second)
    taker, found = in_thread(tokens.take)
    end = time.monotonic() + 20
    while taker.is_alive() and time.monotonic() < end:
        taker.join(0.2)
        if home is not None:
            home.tick()
    assert [int(part) for part in found[0]] == [3, 3], "the third token, of the step of the first"
    with pytest.raises(FailedPrecondition, match=r"token 1 is not held any more"):
        tokens.renew(first)
    tokens.finish(found[0][0]), tokens.close()
    with pytest.raises(OutOfRange):
        tokens.take()


def test_what_is_no_lease_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="more than 0"):
        tfnb.TokenQueue(lease=0)


class SyncReplicas:
    """S-91: workers give gradients and wait for a token; the chief takes means, updates, and gives tokens."""

    def __init__(self, w: tfnb.Variable, replicas: int, aggregate: int, rate: float = 0.1) -> None:
        self.grads = tfnb.ConditionalAccumulator(torch.float32, tuple(w.shape), name="grads")
        self.tokens = tfnb.TokenQueue(lease=60.0, name="tokens")
        self.step = tfnb.Variable(torch.tensor(0), name="step", trainable=False)
        self.per_step, self.aggregate = max(replicas, aggregate), aggregate
        with tfnb.record() as self.graph:
            self.grad = tfnb.placeholder(torch.zeros(tuple(w.shape)), shape=tuple(w.shape), name="grad")
            token, self.local_step = self.tokens.take()
            with tfnb.control_dependencies([self.tokens.finish(token)]):  # a late holder gives nothing
                self.given = self.grads.apply_grad(self.grad, self.local_step)
            mean = self.grads.take_grad(aggregate)
            updated = w.assign_sub(rate * mean)
            with tfnb.control_dependencies([updated]):
                after = self.step.assign_add(1)
            self.round = tfnb.group(updated, after)
        self.session = tfnb.Session(self.graph)

    def begin(self) -> None:
        self.tokens.give(0, self.per_step)

    def work(self, gradient: Any) -> None:
        """A worker, until the tokens end."""
        while True:
            try:
                self.session.run([self.given], {self.grad: gradient})
            except OutOfRange:
                return

    def chief(self, rounds: int) -> None:
        for _ in range(rounds):
            self.session.run(self.round)
            self.tokens.give(int(self.step.value()), self.per_step)
        self.tokens.close()


def test_synchronous_training_with_a_backup_worker_takes_each_step_once(home: Distance | None) -> None:
    w = tfnb.Variable(torch.zeros(2), name="w")
    sync = SyncReplicas(w, replicas=3, aggregate=2)
    sync.begin()
    workers = [threading.Thread(target=sync.work, args=(torch.tensor([1.0, -2.0]),)) for _ in range(3)]
    [worker.start() for worker in workers]
    sync.chief(5)
    [worker.join(60) for worker in workers]
    assert not any(worker.is_alive() for worker in workers)
    assert int(sync.step.value()) == 5
    torch.testing.assert_close(w.value(), torch.tensor([-0.5, 1.0]))
