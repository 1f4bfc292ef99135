"""Replicas of a large model on a virtual clock, after figure 8 of the TensorFlow paper (OSDI 2016).

Real are the token queue with its leases, the accumulator, and their queue machines. Modelled are the seconds of a
gradient, from a shifted log-normal distribution, and the links of the parameter servers. All servers have the same
traffic, so one of them is played: a message carries the model's bytes divided by the number of servers.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tests.cluster.alone.virtual_clock import Clock, Link
from tfnb.graph.queue import Queue
from tfnb.state.accumulator import Accumulator
from tfnb.state.queue_machine import Attempt, QueueMachine
from tfnb.state.queue_operations import attempt_on, made, outcome
from tfnb.state.tokens import Tokens

REPLICAS, PERCENTILES = 50, (2.18, 2.265, 2.45)  # of the paper's job; its step without backup workers, read off (1 %)
SERVERS, MODEL = 17, 95e6  # of the paper; bytes of float32 parameters, which is our assumption
LEASE = 60.0  # seconds
BURN_IN = 5  # steps that do not count


class StepTimes(NamedTuple):
    """Seconds of a gradient: ``shift + scale * exp(shape * z)`` for a normal number z."""

    shift: float
    scale: float
    shape: float

    def draw(self, numbers: random.Random) -> float:
        """The seconds of one gradient."""
        return self.shift + self.scale * math.exp(self.shape * numbers.gauss(0, 1))


def fitted(percentiles: Sequence[float], replicas: int) -> StepTimes:
    """The distribution whose largest of so many draws has these 10th, 50th and 90th percentiles.

    >>> times = fitted((2.18, 2.265, 2.45), 50)
    >>> [round(x, 3) for x in times]
    [2.03, 0.034, 0.882]
    """
    low, middle, high = (statistics.NormalDist().inv_cdf(q ** (1 / replicas)) for q in (0.1, 0.5, 0.9))
    p10, p50, p90 = percentiles
    wanted = (p90 - p50) / (p50 - p10)
    least, most = 1e-3, 5.0
    while most - least > 1e-9:  # the ratio grows with the shape
        shape = (least + most) / 2
        found = math.expm1(shape * (high - middle)) / -math.expm1(shape * (low - middle))
        least, most = (shape, most) if found < wanted else (least, shape)
    scale = (p50 - p10) / (math.exp(shape * middle) - math.exp(shape * low))
    return StepTimes(p50 - scale * math.exp(shape * middle), scale, shape)


class Injected(NamedTuple):
    """A tail: in every so many steps one worker, another one each time, takes ``seconds`` longer, times a log-normal
    number.
    """

    every: int
    seconds: float

    def extra(self, seed: int, step: int, worker: int, workers: int) -> float:
        """The extra seconds of a worker in a step."""
        numbers = random.Random(f"{seed}/late/{step}")
        is_late = step % self.every == 0 and numbers.randrange(workers) == worker
        return self.seconds * math.exp(0.25 * numbers.gauss(0, 1)) if is_late else 0.0


def between(times: Sequence[float]) -> list[float]:
    """The differences of consecutive times."""
    return [after - before for before, after in itertools.pairwise(times)]


class Percentiles(NamedTuple):
    """The 10th, 50th and 90th percentile."""

    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Percentiles:
        """The percentiles of some numbers."""
        tenths = statistics.quantiles(numbers, n=10)
        return cls(tenths[0], statistics.median(numbers), tenths[8])


@dataclass
class VirtualReplicas:
    """Workers that read the model, compute a gradient and send it.

    bandwidth: bytes a second of a server's link, in each direction. Each worker has random numbers of its own, so that
    another worker changes none of the others' times.
    """

    workers: int
    times: StepTimes
    bandwidth: float
    seed: int = 0
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.outbound, self.inbound = Link(self.clock, self.bandwidth), Link(self.clock, self.bandwidth)
        self.numbers = [random.Random(f"{self.seed}/{worker}") for worker in range(self.workers)]

    def compute(self, worker: int, then: Callable[[], None], extra: float = 0.0) -> None:
        """Read the model, compute, and send the gradient; ``then`` is called when a server has it."""
        nbytes = MODEL / SERVERS
        computed = self.outbound.arrival(nbytes) + self.times.draw(self.numbers[worker]) + extra
        self.clock.at(computed, lambda: self.clock.at(self.inbound.arrival(nbytes), then))


class SyncReplicas(VirtualReplicas):
    """A step is the mean of the first ``aggregate`` gradients. Tokens say which step a gradient belongs to."""

    def run(self, aggregate: int, steps: int, tail: Injected | None = None) -> list[float]:
        """Seconds of each step."""
        self.tail = tail
        self.aggregate, self.step, self.ends = aggregate, 0, [0.0]
        self.tokens = Queue(
            "tokens", math.inf, [(torch.int64, ())], kind="tokens", options={"lease_ms": int(1e3 * LEASE)}
        )
        self.tokens.machine = QueueMachine("tokens", math.inf, Tokens(LEASE, lambda: self.clock.now))
        self.grads = Queue("grads", math.inf, [(torch.float64, ()), (torch.int64, ())], kind="mean")
        self.grads.machine = made(self.grads)
        self.updates: list[float] = []
        self._begin()
        for worker in range(self.workers):
            self._work(worker)
        self.clock.run(lambda: self.step == steps + BURN_IN)
        return between(self.ends[BURN_IN:])

    @property
    def sums(self) -> Accumulator:
        """The accumulator of the gradients."""
        return self.grads.machine.elements  # type: ignore[no-any-return]

    def _do(
        self, queue: Queue, kind: Any, then: Callable[..., None], tensors: Sequence[torch.Tensor] = (), **attrs: Any
    ) -> None:
        """An operation; ``then`` gets what it took."""

        def over(attempt: Attempt) -> None:
            assert attempt.error is None, attempt.error
            then(*outcome(queue, attempt, attrs))

        queue.machine.submit(attempt_on(queue, kind, over, attrs, tensors))

    def _begin(self) -> None:
        """The chief puts the tokens of a step, and waits for the mean."""
        steps = torch.full((self.workers,), self.step)
        self._do(self.tokens, "enqueue", lambda *_: None, [steps], many=True)
        self._do(self.grads, "dequeue", self._update, required=self.aggregate)

    def _update(self, mean: torch.Tensor) -> None:
        self.updates.append(float(mean))
        self.step += 1
        self.ends.append(self.clock.now)
        self.clock.at(self.clock.now, self._begin)

    def _work(self, worker: int) -> None:
        """A worker takes a token, and computes."""

        def begin(token: torch.Tensor, step: torch.Tensor) -> None:
            late = 0.0 if self.tail is None else self.tail.extra(self.seed, int(step), worker, self.workers)
            self.compute(worker, lambda: self._give(worker, token, step), late)

        self._do(self.tokens, "dequeue", begin)

    def _give(self, worker: int, token: torch.Tensor, step: torch.Tensor) -> None:
        self._do(self.tokens, "finish", lambda *_: None, [token])
        self._do(self.grads, "enqueue", lambda *_: None, [torch.tensor(1.0, dtype=torch.float64), step])
        self._work(worker)


class AsyncReplicas(VirtualReplicas):
    """Each worker applies its gradient as soon as it has one."""

    def run(self, steps: int) -> list[float]:
        """Seconds in which as many gradients were applied as there are workers, over and over."""
        applied: list[float] = []

        def work(worker: int) -> None:
            def give() -> None:
                applied.append(self.clock.now)
                work(worker)

            self.compute(worker, give)

        for worker in range(self.workers):
            work(worker)
        self.clock.run(lambda: len(applied) > (steps + BURN_IN) * self.workers)
        return between(applied[:: self.workers][-steps - 1 :])


@dataclass(frozen=True)
class Job:
    """The paper's job of 50 workers: the times of a gradient, and the bandwidth of a server's link."""

    bandwidth: float = 5e9
    seed: int = 0
    steps: int = 80  # that are counted

    @functools.cached_property
    def times(self) -> StepTimes:
        """Times with which a synchronous step without backup workers has the paper's median, its messages included."""
        times = fitted(PERCENTILES, REPLICAS)
        found = SyncReplicas(REPLICAS, times, self.bandwidth, self.seed).run(REPLICAS, self.steps)
        return times._replace(shift=times.shift + PERCENTILES[1] - statistics.median(found))

    def sync(self, workers: int = REPLICAS, backup: int = 0, tail: Injected | None = None) -> Percentiles:
        """Seconds of a step of so many gradients, with so many workers more."""
        return Percentiles.of(self.sync_seconds(workers, backup, tail))

    def sync_seconds(self, workers: int = REPLICAS, backup: int = 0, tail: Injected | None = None) -> list[float]:
        """The seconds of each step."""
        replicas = SyncReplicas(workers + backup, self.times, self.bandwidth, self.seed)
        found = replicas.run(workers, self.steps, tail)
        assert replicas.updates == [1.0] * len(replicas.updates), "means of gradients that are all 1"
        return found

    def asynchronous(self, workers: int = REPLICAS) -> Percentiles:
        """Seconds in which as many gradients are applied as there are workers."""
        return Percentiles.of(self.async_seconds(workers))

    def async_seconds(self, workers: int = REPLICAS) -> list[float]:
        """Seconds in which as many gradients are applied as there are workers, over and over."""
        return AsyncReplicas(workers, self.times, self.bandwidth, self.seed).run(self.steps)

    @property
    def gap(self) -> float:
        """How much more asynchronous workers do than synchronous ones, in the median."""
        return self.sync().p50 / self.asynchronous().p50 - 1
