"""Tasks of which one is late now and then, in real processes: `notebooks/evaluation/backup_workers.ipynb`.

A small net learns the digits of scikit-learn on 2 to 4 tasks and a server. In each gradient a task sleeps for as long
as the gradient would take on a machine of its own; in one step of `TAIL.every` one task, another one each time, sleeps
`TAIL.seconds` longer, times a log-normal number. Sleeping takes no processor, so tasks that share two cores are late
for no other reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from distributed import Client

import tfnb
from tests.benchmarks.cluster_local import BATCH, HELD_BACK, AccuracyClock, digits, perceptron
from tests.cluster.alone.virtual_replicas import Injected
from tests.cluster.conftest import worker_processes
from tfnb.cluster.driver import Cluster

GRADIENT, TAIL = 0.01, Injected(every=5, seconds=0.1)  # seconds of each gradient; of how many steps one takes longer
PARTS, RATE, BURN_IN = 2, 0.1, 3  # gradients of a step; the learning rate; steps that do not count


@dataclass
class TaskClock:
    """In the process of a task: its number among how many, the injected tail, and when it began each gradient."""

    task: int = 0
    tasks: int = 1
    tail: Injected | None = None
    begun: list[tuple[int, float]] = field(default_factory=list)  # step, and seconds of the system's clock


_here = TaskClock()


@torch.library.custom_op("tfnb_bench::gradient_time", mutates_args=())
def gradient_time(step: torch.Tensor) -> torch.Tensor:
    """Zero, after the seconds of a gradient of this step on this task."""
    _here.begun.append((int(step), time.monotonic()))
    late = 0.0 if _here.tail is None else _here.tail.extra(0, int(step), _here.task, _here.tasks)
    time.sleep(GRADIENT + late)
    return torch.zeros(())


gradient_time.register_fake(lambda step: torch.empty(()))


def _begin(task: int, tasks: int, tail: Injected | None) -> None:
    """In a task: forget what was noted, and sleep so from now on."""
    global _here
    _here = TaskClock(task, tasks, tail)


def _noted() -> list[tuple[int, float]]:
    return _here.begun


class StragglerTraining:
    """The net, its step for synchronous and for asynchronous tasks, and its data, on a cluster.

    Asynchronous tasks take half of the rows of a synchronous step of two, at half of its rate: as much for each row.
    What is watched, and the accuracy on the rows that were held back, come from a forward pass that does not sleep.
    """

    def __init__(self, client: Client, cluster: Cluster) -> None:
        self.client, self.cluster = client, cluster
        rows, labels = digits()
        torch.manual_seed(0)
        self.model, self.step = perceptron(), tfnb.Variable(torch.tensor(0), name="step", trainable=False)
        self.data = {"x": rows[:-HELD_BACK], "y": labels[:-HELD_BACK]}
        self.held_back = {"x": rows[-HELD_BACK:], "y": labels[-HELD_BACK:]}
        backup, sync = len(cluster.tasks) - PARTS, self._options(BATCH, RATE)
        alone = self._options(BATCH // PARTS, RATE / PARTS) | {"mode": "async"}
        self.modes = {f"sync, {backup} backup": sync | {"backup": backup}} if backup else {"async": alone, "sync": sync}

    def _options(self, rows: int, rate: float) -> dict[str, Any]:
        """Of `fit`: a step recorded in a block of its own, as the steps of one block follow each other."""
        with tfnb.record(f"digits_{rows}"):
            x, y = (tfnb.placeholder(values[:rows], name=name) for name, values in self.data.items())
            logits = self.model(x)
            watch = {"loss": F.cross_entropy(logits, y), "right": (logits.argmax(1) == y).float().mean()}
            loss = F.cross_entropy(self.model(x + torch.ops.tfnb_bench.gradient_time(self.step.read())), y)
            fetch = tfnb.group(tfnb.train.SGD(rate).minimize(loss), self.step.assign_add(1))
        return {"fetch": fetch, "batch_size": rows, "watch": watch}

    def begin(self, tail: Injected | None = TAIL) -> None:
        """Let the tasks begin anew, with this tail."""
        members = self.cluster._engine.tasks
        for number, member in enumerate(members):
            self.client.run(_begin, number, len(members), tail, workers=[member.peer.addr])

    def seconds(self, mode: str, steps: int, tail: Injected | None = TAIL) -> list[float]:
        """Seconds of steps; of asynchronous ones, those in which as many are taken as there are tasks."""
        together = PARTS if mode == "async" else 1
        before = int(self.step.value())
        self.begin(tail)
        tfnb.fit(**self.modes[mode] | {"watch": ()}, data=self.data, steps=steps * together)
        assert int(self.step.value()) == before + steps * together, "each step counts once"
        noted = [each for found in self.client.run(_noted).values() for each in found]
        first: dict[int, float] = {}
        for number, at in noted:
            first[number] = min(at, first.get(number, at))
        times = sorted(at for _, at in noted)[::together] if mode == "async" else [first[n] for n in sorted(first)]
        return [after - start for start, after in pairwise(times)][BURN_IN:]

    def compared(self, seeds: int, epochs: int) -> tuple[Any, dict[str, list[float]]]:
        """`tfnb.compare` of the modes, and their accuracies on the rows that were held back, by mode."""
        self.begin()
        clocks = {mode: AccuracyClock(math.inf, None) for mode in self.modes}
        asked = {mode: options | {"callbacks": clocks[mode]} for mode, options in self.modes.items()}
        first = next(iter(asked.values()))
        found = tfnb.compare(
            first["fetch"], self.data, asked, watch=first["watch"], seeds=seeds, epochs=epochs,
            validation=self.held_back,
        )  # fmt: skip
        ends = {mode: [point.accuracy for point in clock.points][::-1][: seeds * epochs : epochs][::-1]
                for mode, clock in clocks.items()}  # fmt: skip
        return found, ends


@contextmanager
def trainings(backup: int) -> Iterator[StragglerTraining]:
    """The training on a cluster with so many backup tasks beside the two of a step."""
    with worker_processes(PARTS + backup + 1) as client:
        client.run(_begin, 0, 1, None)  # loads this module, and the operator with it
        with tfnb.connect(client, ps=1) as cluster:
            assert len(cluster.tasks) == PARTS + backup
            yield StragglerTraining(client, cluster)
