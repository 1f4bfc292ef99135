"""A training step on a cluster beside the same step written with plain Dask actors: `make bench-cluster`.

The 784-128-10 network, batch 32, 2 compute tasks, 1 server, one Dask cluster of processes for both, interleaved; it is
made as `tfnb.connect(2)` makes one, without the profile of Dask's own tasks, which costs each worker two percent. The
plain actors are what one writes in an afternoon: a server with `pull` and `push`, and workers that loop by themselves
on data they hold; no ledger, no fence, no deadline, nobody who counts. Results are compared before anything is timed.

Ours runs with direct streams and without them. Printed for each mode: milliseconds of a step, processor milliseconds of
all processes for a step, and ratios. Then the share of a core that the notebook's process takes in a longer training,
and while it is idle: Dask's scheduler lives in it. Where `make bench-ray` has made Ray's environment (or TFNB_RAY names
its interpreter), the same step with Ray actors comes last, in the same run, checked by its loss.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dask
import psutil
import torch
import torch.nn.functional as F
from distributed import Client, LocalCluster
from torch import nn

import tfnb
from tests.benchmarks.models import mlp
from tfnb.cluster.members import deploy
from tfnb.cluster.wire import streams

BATCH, ROWS, TASKS, RATE = 32, 3200, 2, 0.05
HERE = Path(__file__).parent
RAY = Path(os.environ.get("TFNB_RAY", HERE.parents[1] / ".venv-ray" / "bin" / "python"))


# -- plain Dask actors -------------------------------------------------------------------------------------------------


class Server:
    """Weights; `push` applies a gradient at once, or (sync) waits for those of all workers and applies their mean."""

    def __init__(self, weights: list[torch.Tensor], workers: int) -> None:
        self.weights, self.workers, self.grads, self.turn = weights, workers, [], asyncio.Event()

    async def pull(self) -> list[Any]:
        return [w.numpy().copy() for w in self.weights]

    async def push(self, grads: list[Any], sync: bool) -> None:
        self.grads.append([torch.from_numpy(g) for g in grads])
        if sync and len(self.grads) < self.workers:
            await self.turn.wait()
            return
        for weight, *parts in zip(self.weights, *self.grads, strict=True):
            weight -= RATE * sum(parts) / len(parts)
        self.grads, turn, self.turn = [], self.turn, asyncio.Event()
        turn.set()


class Worker:
    """Rows, and a loop over them."""

    def __init__(self, rows: torch.Tensor, labels: torch.Tensor, server: Any) -> None:
        torch.set_num_threads(1)
        self.rows, self.labels, self.server, self.model = rows, labels, server, mlp()

    async def train(self, batches: list[tuple[int, int]], sync: bool) -> float:
        for start, stop in batches:
            values = await self.server.pull()
            with torch.no_grad():
                for p, value in zip(self.model.parameters(), values, strict=True):
                    p.copy_(torch.from_numpy(value))
            loss = F.cross_entropy(self.model(self.rows[start:stop]), self.labels[start:stop])
            grads = torch.autograd.grad(loss, list(self.model.parameters()))
            await self.server.push([g.numpy() for g in grads], sync)
        return float(loss)


class Plain:
    """The actors on the workers of a cluster."""

    def __init__(self, client: Client, rows: torch.Tensor, labels: torch.Tensor, weights: list[torch.Tensor]) -> None:
        first, *others = sorted(client.scheduler_info(n_workers=-1)["workers"])
        self.server = client.submit(Server, weights, TASKS, actor=True, workers=first).result(60)
        made = [client.submit(Worker, rows, labels, self.server, actor=True, workers=w) for w in others]
        self.workers = [future.result(60) for future in made]

    def train(self, steps: int, mode: str) -> None:
        starts = [step * BATCH % ROWS for step in range(steps)]
        half = BATCH // TASKS
        ours = [
            [(s + w * half, s + w * half + half) for s in starts] if mode == "sync" else
            [(s, s + BATCH) for s in starts[w::TASKS]]
            for w in range(TASKS)
        ]  # fmt: skip
        for future in [w.train(mine, mode == "sync") for w, mine in zip(self.workers, ours, strict=True)]:
            future.result(300)

    def values(self) -> list[torch.Tensor]:
        return [torch.from_numpy(w) for w in self.server.pull().result(60)]


@contextmanager
def workers(count: int) -> Iterator[Client]:
    """A client of so many worker processes of one thread, as `tfnb.connect` makes them."""
    options = {"dashboard_address": None, "silence_logs": 50}
    with (
        dask.config.set(deploy.SETTINGS),
        LocalCluster(n_workers=count, threads_per_worker=1, host="127.0.0.1", **options) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(count, 120)
        yield client


# -- measuring ---------------------------------------------------------------------------------------------------------


class Usage:
    """Wall time, processor time of this process and of all of them since it was made."""

    def __init__(self) -> None:
        self.here = psutil.Process()
        self.all = [self.here, *self.here.children(recursive=True)]
        self.start = time.perf_counter(), self._seconds()

    def _seconds(self) -> dict[int, float]:
        """Processor seconds of each process; those of one that ended meanwhile, such as a compiler, are left out."""
        found = {}
        for process in self.all:
            with suppress(psutil.NoSuchProcess):
                found[process.pid] = sum(process.cpu_times()[:2])
        return found

    def since(self) -> tuple[float, float, float]:
        """Seconds: wall, this process, all processes."""
        wall, before = self.start
        spent = {pid: seconds - before[pid] for pid, seconds in self._seconds().items()}
        return time.perf_counter() - wall, spent[self.here.pid], sum(spent.values())


def measured(train: Callable[[int], None], steps: int) -> dict[str, float]:
    """Milliseconds of a step, processor milliseconds of it, and percents of a core that this process took."""
    usage = Usage()
    train(steps)
    wall, here, everybody = usage.since()
    return {"ms": wall / steps * 1e3, "cpu_ms": everybody / steps * 1e3, "notebook_%": here / wall * 100}


def main() -> None:
    rounds, steps = (int(a) for a in (sys.argv[1:] + ["5", "400"][len(sys.argv) - 1 :])[:2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, labels = torch.randn(ROWS, 784), torch.randint(10, (ROWS,))
    model = mlp()
    begin = [p.detach().clone() for p in model.parameters()]
    with tfnb.record("bench"):
        x, y = tfnb.placeholder(rows[:BATCH]), tfnb.placeholder(labels[:BATCH])
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.SGD(RATE).minimize(loss)

    def ours(steps: int, mode: str) -> tfnb.RunResult:
        return tfnb.fit(
            train, {x: rows, y: labels}, steps=steps, batch_size=BATCH, shuffle=False, mode=mode, watch=[loss]
        )

    with workers(1 + TASKS) as client:
        plain = Plain(client, rows, labels, [w.clone() for w in begin])
        for mode in ("sync", "async"):  # tasks let their processes keep freed memory, which serves plain actors, too
            plain.train(steps, mode)
            alone = measured(lambda n, m=mode: plain.train(n, m), steps)
            print(f"plain {mode}, before tfnb: {alone['ms']:.2f} ms, {alone['cpu_ms']:.2f} cpu ms")
        plain = Plain(client, rows, labels, [w.clone() for w in begin])
        with tfnb.connect(client, ps=1) as ours_there:
            after_50 = check(model, begin, ours, plain, ours_there.tasks)
            found: dict[str, list[dict[str, float]]] = {}
            for _ in range(rounds):
                for mode in ("sync", "async"):
                    found.setdefault(f"plain {mode}", []).append(measured(lambda n, m=mode: plain.train(n, m), steps))
                    for name, is_on in (("no streams", False), ("tfnb", True)):
                        client.run(switch, is_on)
                        found.setdefault(f"{name} {mode}", []).append(measured(lambda n, m=mode: ours(n, m), steps))
            long = {mode: measured(lambda n, m=mode: ours(n, m), 10 * steps) for mode in ("sync", "async")}
            usage = Usage()
            time.sleep(5)
            idle = usage.since()[1] / 5 * 100
    report(found, long, idle)
    if there := ray(rounds, steps, ("sync", "async")):
        torch.testing.assert_close(F.cross_entropy(after_50(rows), labels).item(), there["loss"], rtol=1e-4, atol=1e-5)
        for mode in ("sync", "async"):
            mine = [statistics.median(row[key] for row in found[f"tfnb {mode}"]) for key in ("ms", "cpu_ms")]
            ratios = " / ".join(f"{a / b:.2f}" for a, b in zip(mine, there[mode], strict=True))
            print(f"{mode:6} wall / processors {ratios} tfnb / Ray (target 0.3)")


def ray(rounds: int, steps: int, names: Sequence[str]) -> dict[str, Any] | None:
    """What `peers/ray_actors.py` printed, or None without Ray: milliseconds and processor milliseconds by row."""
    if not RAY.exists():
        print(f"no {RAY.name} of Ray: `make bench-ray`, or TFNB_RAY")
        return None
    arguments = [str(RAY), str(HERE / "peers" / "ray_actors.py"), str(rounds), str(steps), *names]
    said = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True, timeout=900).stdout
    print(said.rsplit("\n", 2)[0])
    return json.loads(said.splitlines()[-1])


def switch(is_on: bool) -> None:
    """On a worker: whether direct streams carry the messages of a step."""
    streams.is_on = is_on


def check(model: nn.Module, begin: list[torch.Tensor], ours: Callable[..., Any], plain: Plain, tasks: Any) -> nn.Module:
    """Both give the same weights in sync, and about the same loss in async; the model after 50 steps in sync."""
    assert len(tasks) == TASKS
    ours(50, "sync"), plain.train(50, "sync")
    for mine, theirs, start in zip(model.parameters(), plain.values(), begin, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-4, atol=1e-5)
        assert not torch.equal(theirs, start)
    after_50 = copy.deepcopy(model)
    ours(200, "async"), plain.train(200, "async")
    for mine, theirs in zip(model.parameters(), plain.values(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=0.05, atol=0.02)
    return after_50


def report(found: dict[str, list[dict[str, float]]], long: dict[str, dict[str, float]], idle: float) -> None:
    """Medians, and ratios of the pairs."""
    middle = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()
    }
    for name, row in middle.items():
        print(f"{name:16} {row['ms']:7.2f} ms  {row['cpu_ms']:7.2f} cpu ms")
    for mode in ("sync", "async"):
        for mine, other in (("tfnb", "plain"), ("no streams", "plain"), ("tfnb", "no streams")):
            pairs = list(zip(found[f"{mine} {mode}"], found[f"{other} {mode}"], strict=True))
            for key in ("ms", "cpu_ms"):
                ratios = sorted(a[key] / b[key] for a, b in pairs)
                spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
                print(f"{mode:6} {key:7} {statistics.median(ratios):5.2f} {mine} / {other} ({spread})")
    shares = ", ".join(f"{mode} {row['notebook_%']:.1f} %" for mode, row in long.items())
    print(f"notebook, of a core: {shares}, idle {idle:.1f} %")
    print(f"load {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    print(json.dumps({"bench": "cluster steps", "idle_%": idle, "long": long, **middle}))


if __name__ == "__main__":
    main()
