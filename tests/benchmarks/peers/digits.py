"""DistBelief's methods on the digits of scikit-learn as users of DDP, plain Dask actors and Ray actors write them.

For `notebooks/evaluation/distbelief.ipynb`: "synchronous", in which two workers compute halves of a batch of 32 rows,
and "Downpour", in which each worker takes `N_PUSH` batches of its own between two meetings with the server. All begin
with the weights of a seed of `tests.benchmarks.cluster_local`, and take the same rows a pass in an order of their own.
A training is a list of points: seconds, processor seconds of all processes, rows, steps and accuracy after each pass.

Imports torch, numpy and psutil alone, so that the environment of Ray can run it: ``python digits.py METHOD EPOCHS``
there reads lines "SEED FILE" and answers each by its points as JSON. FILE has rows, labels and weights: `Data.saved`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import nn

BATCH, HELD_BACK, RATE, WORKERS, N_PUSH = 32, 400, 0.5, 2, 5
Arrays = list[Any]  # weights, or gradients, of numpy
Orders = list[torch.Tensor]  # the rows of each batch


class Data(NamedTuple):
    """Rows and labels, of which the last `HELD_BACK` are held back, and the first weights."""

    rows: torch.Tensor
    labels: torch.Tensor
    weights: list[torch.Tensor]

    def saved(self, file: Path) -> Path:
        """Write all of it to a file."""
        rows, labels, weights = self.arrays
        np.savez(file, rows, labels, *weights)
        return file

    @classmethod
    def read(cls, file: Path) -> Data:
        with np.load(file) as arrays:
            rows, labels, *weights = [torch.from_numpy(arrays[f"arr_{at}"]) for at in range(len(arrays.files))]
        return cls(rows, labels, weights)

    @property
    def arrays(self) -> tuple[Any, Any, Arrays]:
        return self.rows.numpy(), self.labels.numpy(), [w.numpy().copy() for w in self.weights]

    def batches(self, generator: torch.Generator) -> Orders:
        """The batches of one pass."""
        return [*torch.randperm(len(self.rows) - HELD_BACK, generator=generator).split(BATCH)]


class Learner:
    """The net with its data: gradients and accuracy by given weights."""

    def __init__(self, rows: Any, labels: Any) -> None:
        torch.set_num_threads(1)
        self.rows, self.labels = torch.from_numpy(rows.copy()), torch.from_numpy(labels.copy())
        self.net = nn.Sequential(nn.Linear(64, 128), nn.Sigmoid(), nn.Linear(128, 10))

    def take(self, weights: Arrays) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.net.parameters(), weights, strict=True):
                parameter.copy_(torch.tensor(value))

    def loss(self, at: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(self.rows[at]), self.labels[at])

    def gradients(self, at: Any) -> Arrays:
        grads = torch.autograd.grad(self.loss(torch.as_tensor(at)), list(self.net.parameters()))
        return [grad.numpy() for grad in grads]

    def together(self, batches: Sequence[Any]) -> Arrays:
        """The sum of the gradients of some batches, with a step of SGD between two of them."""
        total: Arrays = []
        for at in batches:
            grads = self.gradients(at)
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else [g.copy() for g in grads]
            with torch.no_grad():
                for parameter, grad in zip(self.net.parameters(), grads, strict=True):
                    parameter.sub_(torch.from_numpy(grad), alpha=RATE)
        return total

    @property
    def accuracy(self) -> float:
        """The share of the rows that were held back."""
        with torch.no_grad():
            right = self.net(self.rows[-HELD_BACK:]).argmax(1) == self.labels[-HELD_BACK:]
        return right.float().mean().item()


def parts(batches: Orders, method: str) -> list[list[Any]]:
    """For each worker its pieces between two meetings: half of a batch, or some batches."""
    if method == "synchronous":
        return [[batch.tensor_split(WORKERS)[worker].numpy() for batch in batches] for worker in range(WORKERS)]
    mine = [[batch.numpy() for batch in batches[worker::WORKERS]] for worker in range(WORKERS)]
    return [[each[at : at + N_PUSH] for at in range(0, len(each), N_PUSH)] for each in mine]


class Spent:
    """Seconds, and processor seconds of this process and of those that it has started."""

    def __init__(self) -> None:
        here = psutil.Process()
        self._all, self._begin = [here, *here.children(recursive=True)], time.perf_counter()
        self._before = self._processors()

    def _processors(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._all if process.is_running())

    def now(self) -> tuple[float, float]:
        return time.perf_counter() - self._begin, self._processors() - self._before


class Server:
    """The weights; half of a step waits for the other half."""

    def __init__(self, weights: Arrays) -> None:
        self.weights, self.halves, self.turn = [w.copy() for w in weights], [], asyncio.Event()

    async def pull(self) -> Arrays:
        return [w.copy() for w in self.weights]

    async def push(self, grads: Arrays, is_half: bool) -> None:
        self.halves.append(grads)
        if is_half and len(self.halves) < WORKERS:
            await self.turn.wait()
            return
        count = len(self.halves)
        self.weights = [
            w - RATE * sum(grads) / count for w, *grads in zip(self.weights, *self.halves, strict=True)
        ]  # fmt: skip
        self.halves, turn, self.turn = [], self.turn, asyncio.Event()
        turn.set()


class Worker:
    """A `Learner` that calls the server by Dask's actors."""

    def __init__(self, rows: Any, labels: Any, server: Any) -> None:
        self.learner, self.server = Learner(rows, labels), server

    async def train(self, pieces: Sequence[Any], is_half: bool) -> None:
        for piece in pieces:
            self.learner.take(await self.server.pull())
            grads = self.learner.gradients(piece) if is_half else self.learner.together(piece)
            await self.server.push(grads, is_half)


def points(data: Data, epochs: int, seed: int, method: str, train: Any, pull: Any) -> Iterator[list[float]]:
    """A training: ``train(pieces of each worker)`` takes a pass, ``pull()`` gives the weights."""
    learner, generator = Learner(data.rows.numpy(), data.labels.numpy()), torch.Generator().manual_seed(seed)
    spent, rows, steps = Spent(), 0, 0
    for _ in range(epochs):
        batches = data.batches(generator)
        train(parts(batches, method))
        rows, steps = rows + sum(map(len, batches)), steps + len(batches)
        learner.take(pull())
        yield [*spent.now(), rows, steps, learner.accuracy]


def by_dask(client: Any, data: Data, epochs: int, seed: int, method: str) -> list[list[float]]:
    """Plain actors on three workers of a Dask cluster."""
    *given, weights = data.arrays
    first, *others = sorted(client.scheduler_info(n_workers=-1)["workers"])
    server = client.submit(Server, weights, actor=True, workers=first, pure=False).result(60)
    made = [client.submit(Worker, *given, server, actor=True, workers=w, pure=False) for w in others[:WORKERS]]
    workers, is_half = [future.result(60) for future in made], method == "synchronous"

    def train(pieces: list[list[Any]]) -> None:
        for future in [worker.train(mine, is_half) for worker, mine in zip(workers, pieces, strict=True)]:
            future.result(300)

    return [*points(data, epochs, seed, method, train, lambda: server.pull().result(60))]


def by_ray(data: Data, epochs: int, seed: int, method: str) -> list[list[float]]:
    """The same actors, of Ray; in its environment."""
    import ray

    class Asking(Worker):
        def train(self, pieces: Sequence[Any], is_half: bool) -> None:  # type: ignore[override]
            for piece in pieces:
                self.learner.take(ray.get(self.server.pull.remote()))
                grads = self.learner.gradients(piece) if is_half else self.learner.together(piece)
                ray.get(self.server.push.remote(grads, is_half))

    *given, weights = data.arrays
    server = ray.remote(num_cpus=0)(Server).remote(weights)
    workers = [ray.remote(num_cpus=0)(Asking).remote(*given, server) for _ in range(WORKERS)]
    is_half = method == "synchronous"
    ray.get([worker.train.remote([], is_half) for worker in workers])  # they are up

    def train(pieces: list[list[Any]]) -> None:
        ray.get([worker.train.remote(mine, is_half) for worker, mine in zip(workers, pieces, strict=True)])

    return [*points(data, epochs, seed, method, train, lambda: ray.get(server.pull.remote()))]


def _rank(rank: int, port: int, data: Data, pipe: Any) -> None:
    """One rank of DDP on gloo: a pass over its halves of batches when it is asked."""
    import torch.distributed as dist

    learner = Learner(data.rows.numpy(), data.labels.numpy())
    learner.take(data.arrays[2])
    store = dist.TCPStore("127.0.0.1", port, WORKERS, is_master=rank == 0, wait_for_workers=False)
    pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    net = nn.parallel.DistributedDataParallel(learner.net)
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    while (pieces := pipe.recv()) is not None:
        for at in map(torch.from_numpy, pieces):
            optimizer.zero_grad()
            F.cross_entropy(net(learner.rows[at]), learner.labels[at]).backward()
            optimizer.step()
        pipe.send([p.detach().numpy() for p in learner.net.parameters()])
    dist.destroy_process_group()


def by_ddp(data: Data, epochs: int, seed: int) -> list[list[float]]:
    """DistributedDataParallel on gloo, a process for each of two ranks. "synchronous" alone."""
    context, pipes, ranks, port = get_context("spawn"), [], [], 0
    for rank in range(WORKERS):
        here, there = context.Pipe()
        ranks.append(context.Process(target=_rank, args=(rank, port, data, there)))
        ranks[-1].start()
        port = here.recv()
        pipes.append(here)
    weights: list[Any] = []

    def train(pieces: list[list[Any]]) -> None:
        for pipe, mine in zip(pipes, pieces, strict=True):
            pipe.send(mine)
        weights[:] = [pipe.recv() for pipe in pipes][-1]

    train([[], []])  # they are up
    found = [*points(data, epochs, seed, "synchronous", train, lambda: weights)]
    for pipe, rank in zip(pipes, ranks, strict=True):
        pipe.send(None)
        rank.join(20)
    return found


def main() -> None:
    """The trainings of Ray, one after the other."""
    import ray

    method, epochs = sys.argv[1], int(sys.argv[2])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    for line in sys.stdin:
        seed, file = line.split(maxsplit=1)
        print(json.dumps(by_ray(Data.read(Path(file.strip())), epochs, int(seed), method)), flush=True)


if __name__ == "__main__":
    main()
