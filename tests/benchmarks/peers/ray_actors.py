"""The step of `tests.benchmarks.cluster_steps` with Ray actors, and 100 MB pulled, applied and pushed.

It runs in an environment of its own, which `make bench-ray` makes: Ray, torch and psutil, nothing of tfnb. Arguments:
rounds, steps, names of rows (none: all). It prints milliseconds and processor milliseconds of a step, of all processes
that it started, as one line of JSON; and the loss after 50 steps in sync, which the cluster's own must equal.

The row ``kill`` is `tests.benchmarks.cluster_faults --rows 2` with actors: counters in sync, and SIGKILL of the process
of their server in the middle. Ray starts the actor again; what it held, and from where the steps go on, are the
program's: the server saves its counts every two seconds, as Ray's guide on fault tolerance asks for, and reads them
again. Printed: seconds until the first new step, median and worst, and the steps that were taken again.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import torch.nn.functional as F
from torch import nn

BATCH, ROWS, TASKS, RATE = 32, 3200, 2, 0.05
KILLED_AT, AFTER, PAUSE, SAVE_EVERY = 40, 60, 0.001, 2.0  # steps before a kill and from it on; seconds


@ray.remote(num_cpus=0)
class Server:
    """Weights; `push` applies a gradient, or (sync) the mean of those of all workers when it has them."""

    def __init__(self, weights: list[Any], workers: int) -> None:
        self.weights, self.workers, self.grads = [w.copy() for w in weights], workers, []

    def pull(self) -> list[Any]:
        return self.weights

    def push(self, grads: list[Any], sync: bool) -> bool:
        """Whether that was the last one of its step."""
        self.grads.append(grads)
        if sync and len(self.grads) < self.workers:
            return False
        self.weights = [w - RATE * sum(parts) / len(parts) for w, *parts in zip(self.weights, *self.grads, strict=True)]
        self.grads = []
        return True


@ray.remote(num_cpus=0)
class Worker:
    """Rows, and a loop over them; in sync the driver takes the steps, as Ray's own parameter server does."""

    def __init__(self, rows: Any, labels: Any) -> None:
        torch.set_num_threads(1)
        self.rows, self.labels = torch.from_numpy(rows.copy()), torch.from_numpy(labels.copy())
        self.model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def gradients(self, weights: list[Any], start: int, stop: int) -> list[Any]:
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), weights, strict=True):
                p.copy_(torch.from_numpy(value.copy()))
        loss = F.cross_entropy(self.model(self.rows[start:stop]), self.labels[start:stop])
        return [g.numpy() for g in torch.autograd.grad(loss, list(self.model.parameters()))]

    def train(self, server: Any, batches: list[tuple[int, int]]) -> None:
        for start, stop in batches:
            weights = ray.get(server.pull.remote())
            ray.get(server.push.remote(self.gradients(weights, start, stop), False))


@ray.remote(num_cpus=0)
class Large:
    """100 MB."""

    def __init__(self, count: int) -> None:
        self.w = torch.linspace(-1.0, 1.0, count).numpy()

    def pull(self) -> Any:
        return self.w

    def push(self, grad: Any) -> None:
        self.w = self.w - 0.1 * grad


@ray.remote(num_cpus=0)
class Puller:
    """Who computes on them."""

    def step(self, server: Any) -> None:
        ray.get(server.push.remote(ray.get(server.pull.remote()) * 0.5))


@ray.remote(num_cpus=0, max_restarts=-1)
class Counts:
    """A count of steps, saved now and then; another process goes on from there."""

    def __init__(self, file: str) -> None:
        self.file, self.saved = Path(file), time.monotonic()
        self.parts, self.steps = 0, int(self.file.read_text()) if self.file.exists() else 0

    def pid(self) -> int:
        return os.getpid()

    def taken(self) -> int:
        """Steps that the count has seen."""
        self.parts = 0
        return self.steps

    def push(self) -> bool:
        """One part of a step; whether that was the last one."""
        self.parts += 1
        if self.parts < TASKS:
            return False
        self.parts, self.steps = 0, self.steps + 1
        if time.monotonic() - self.saved > SAVE_EVERY:
            fresh = self.file.with_suffix(".new")
            fresh.write_text(str(self.steps))
            fresh.rename(self.file)
            self.saved = time.monotonic()
        return True


@ray.remote(num_cpus=0)
class Counter:
    """Computes its part of a step."""

    def step(self, server: Any) -> None:
        time.sleep(PAUSE)
        ray.get(server.push.remote())


def killed(workers: list[Any]) -> tuple[float, int]:
    """A training whose server is killed: seconds until the first new step, and the steps that were taken again."""
    with tempfile.TemporaryDirectory() as folder:
        server = Counts.remote(str(Path(folder) / "counts"))
        step, pause, at, again = 0, 0.0, time.perf_counter(), 0
        pid = ray.get(server.pid.remote())
        while step < KILLED_AT + AFTER:
            if step == KILLED_AT and not again and pid:
                os.kill(pid, signal.SIGKILL)
                pid, at = 0, time.perf_counter()
            try:
                ray.get([worker.step.remote(server) for worker in workers])
                step += 1
                if not pid and not pause and step > KILLED_AT:
                    pause = time.perf_counter() - at
            except ray.exceptions.RayError:  # one of them says that nobody knows whether it was done
                kept = None
                while kept is None:
                    try:
                        kept = ray.get(server.taken.remote())
                    except ray.exceptions.RayError:
                        time.sleep(0.01)
                again, step = step - kept, kept
        if (found := ray.get(server.taken.remote())) != step:
            raise AssertionError(f"{step} steps, counted {found}")
        ray.kill(server)
    return pause, again


def sync(server: Any, workers: list[Any], steps: int) -> None:
    half = BATCH // TASKS
    for step in range(steps):
        start = step * BATCH % ROWS
        weights = server.pull.remote()
        grads = [w.gradients.remote(weights, start + i * half, start + (i + 1) * half) for i, w in enumerate(workers)]
        ray.get([server.push.remote(each, True) for each in grads])


def alone(server: Any, workers: list[Any], steps: int) -> None:
    starts = [step * BATCH % ROWS for step in range(steps)]
    ray.get([w.train.remote(server, [(s, s + BATCH) for s in starts[i::TASKS]]) for i, w in enumerate(workers)])


def measured(call: Callable[[], None], steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and processor milliseconds."""
    here = psutil.Process()
    everybody = [here, *here.children(recursive=True)]
    processors = lambda: sum(sum(p.cpu_times()[:2]) for p in everybody if p.is_running())  # noqa: E731
    begin, before = time.perf_counter(), processors()
    call()
    return (time.perf_counter() - begin) / steps * 1e3, (processors() - before) / steps * 1e3


def main() -> None:
    rounds, steps = (int(a) for a in (sys.argv[1:3] + ["5", "200"][len(sys.argv[1:3]) :]))
    torch.manual_seed(0)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    rows, labels = torch.randn(ROWS, 784), torch.randint(10, (ROWS,))
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    server = Server.remote([p.detach().numpy() for p in model.parameters()], TASKS)
    workers = [Worker.remote(rows.numpy(), labels.numpy()) for _ in range(TASKS)]
    large, puller, count = Large.remote(25_000_000), Puller.remote(), 25_000_000

    def bulk() -> None:
        for _ in range(4):
            ray.get(puller.step.remote(large))

    calls: dict[str, tuple[Callable[[], None], int]] = {
        "sync": (lambda: sync(server, workers, steps), steps),
        "async": (lambda: alone(server, workers, steps), steps),
        "100 MB": (bulk, 4),
    }
    names = sys.argv[3:] or [*calls, "kill"]
    if "kill" in names:
        names.remove("kill")
        counters = [Counter.remote() for _ in range(TASKS)]
        ends = [killed(counters) for _ in range(rounds + 1)][1:]
        pauses, again = zip(*ends, strict=True)
        kills = {"seconds": statistics.median(pauses), "worst": max(pauses), "again": statistics.median(again)}
        print(
            f"Ray kill   goes on after {kills['seconds']:.2f} s, worst {kills['worst']:.2f} s; "
            f"{kills['again']:.0f} steps again"
        )
        print(json.dumps({"bench": "ray-kill", "ray": ray.__version__, "load": psutil.getloadavg()[0], **kills}))
        if not names:
            return
    sync(server, workers, 50)
    weights = [torch.from_numpy(w.copy()) for w in ray.get(server.pull.remote())]
    with torch.no_grad():
        hidden = torch.relu(F.linear(rows, *weights[:2]))
        loss = float(F.cross_entropy(F.linear(hidden, *weights[2:]), labels))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names:
            row = measured(*calls[name])
            found[name] += [row] if turn else []
    if "100 MB" in names:
        expected = torch.linspace(-1.0, 1.0, count) * 0.95 ** (4 * (rounds + 1))
        w = torch.from_numpy(ray.get(large.pull.remote()).copy())
        torch.testing.assert_close(w, expected, rtol=1e-4, atol=1e-6)
    middle = {name: [statistics.median(each) for each in zip(*each, strict=True)] for name, each in found.items()}
    for name, (wall, processors) in middle.items():
        print(f"Ray {name:6} {wall:8.2f} ms {processors:8.2f} cpu ms")
    print(json.dumps({"bench": "ray", "ray": ray.__version__, "load": psutil.getloadavg()[0], "loss": loss, **middle}))


if __name__ == "__main__":
    main()
