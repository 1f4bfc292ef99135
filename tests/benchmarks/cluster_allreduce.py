"""A step of ``fit(mode="allreduce")`` beside torch's DistributedDataParallel on gloo, 2 ranks, in one run and in turns.

`python -m tests.benchmarks.cluster_allreduce [--mb 0.4 100] [--turns 3]`. A step: the gradient of the mean over rows of
``x * w`` summed, by SGD; both end with equal values, which is looked at first. A step's time is the difference of a
long and a short training, so that no start and no end is in it. Prints medians in milliseconds and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tfnb
from tests.benchmarks.cluster_bulk import _workers

TARGETS = {0.4: 1.15, 100.0: 1.10}


class Scaled(nn.Module):
    """The mean of ``x`` times the sum of all weights."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1.0, 1.0, count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return (self.w * self.w * 0.5).sum() * x.mean()


def peer(rank: int, port: int, counts: list[int], pipe: Any) -> None:
    """One rank of torch's own: trains so many steps when it is asked, and says how long that took."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x, nets = torch.full((1,), 0.1), {}
    for count in counts:
        net = nn.parallel.DistributedDataParallel(Scaled(count))
        nets[count] = net, torch.optim.SGD(net.parameters(), 0.1)
    while (asked := pipe.recv()) is not None:
        count, steps = asked
        net, optimizer = nets[count]
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            net(x).backward()
            optimizer.step()
        dist.barrier()
        pipe.send((time.perf_counter() - begin, net.module.w.detach()[:3].tolist()))


class Peers:
    """The two ranks of torch's own."""

    def __init__(self, counts: list[int]) -> None:
        context = get_context("spawn")
        self.pipes, self._ranks, port = [], [], 0
        for rank in range(2):
            here, there = context.Pipe()
            self._ranks.append(context.Process(target=peer, args=(rank, port, counts, there)))
            self._ranks[-1].start()
            port = here.recv()
            self.pipes.append(here)

    def __call__(self, count: int, steps: int) -> tuple[float, list[float]]:
        for pipe in self.pipes:
            pipe.send((count, steps))
        first, _ = [pipe.recv() for pipe in self.pipes]
        return first

    def close(self) -> None:
        """They end."""
        for pipe, rank in zip(self.pipes, self._ranks, strict=True):
            pipe.send(None)
            rank.join(20)


def fitted(net: Scaled, train: Any, x: Any, mode: str, steps: int) -> float:
    """Seconds of a training."""
    begin = time.perf_counter()
    tfnb.fit(train, {x: torch.full((2 * steps,), 0.1)}, batch_size=2, mode=mode, exact=False)
    return time.perf_counter() - begin


def a_step(run: Callable[[int], float], few: int) -> float:
    """Milliseconds that one more step takes."""
    some, more = run(few), run(3 * few)
    return (more - some) / (2 * few) * 1e3


def measured(megabytes: list[float], turns: int) -> dict[float, dict[str, float]]:
    """Medians of a step, by megabytes: ``ddp``, ``allreduce`` and ``sync``, and the median of their paired ratios."""
    counts = [round(mb * 250_000) for mb in megabytes]
    found: dict[float, dict[str, float]] = {}
    peers = Peers(counts)
    with _workers(own=True, count=3) as client:
        client.run(torch.set_num_threads, 1)
        with tfnb.connect(client, ps=1):
            for mb, count in zip(megabytes, counts, strict=True):
                net = Scaled(count)
                with tfnb.record(f"scaled{count}"):
                    x = tfnb.placeholder(torch.full((2,), 0.1), name="x", shape=("B",))
                    train = tfnb.train.SGD(0.1).minimize(net(x))
                _, theirs = peers(count, 4)
                fitted(net, train, x, "allreduce", 4)
                torch.testing.assert_close(net.w.detach()[:3].tolist(), theirs, rtol=1e-5, atol=1e-6)
                few = 150 if mb < 10 else 5
                rows: dict[str, list[float]] = {"ddp": [], "allreduce": [], "sync": []}
                for _ in range(turns):
                    rows["ddp"].append(a_step(lambda steps, count=count: peers(count, steps)[0], few))
                    for mode in ("allreduce", "sync"):
                        rows[mode].append(a_step(partial(fitted, net, train, x, mode), few))
                found[mb] = {name: statistics.median(times) for name, times in rows.items()}
                for name in ("allreduce", "sync"):
                    pairs = zip(rows[name], rows["ddp"], strict=True)
                    found[mb][f"{name}/ddp"] = statistics.median(a / b for a, b in pairs)
    peers.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, nargs="+", default=[0.4, 100.0])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    found = measured(options.mb, options.turns)
    print(json.dumps({"bench": "cluster_allreduce", "load": os.getloadavg()[0], "target": TARGETS, "rows": found}))


if __name__ == "__main__":
    main()
