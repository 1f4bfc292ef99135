"""Rows of a cluster beside the step of `cluster_steps`: `python -m tests.benchmarks.cluster_rows [ROW ...]`.

conv: a convolutional net of about 250 ms a step, two tasks of one thread each, beside one process with two threads.
tasks: processor time of all processes for a step of 1, 2, 4 and 8 tasks, and a server's for 400 kB pulled and pushed.
scalar: one number, there and back from a task to a server, beside a call of a plain Dask actor between two workers.
null: the null step of OSDI 2016, figure 7: 16 servers in two processes, workers that compute next to nothing in another
one. A scalar on each server, 100 MB, and 32 random rows of each of 16 tables of 64 MB, 1 GB or 16 GB in all.

Each row prints what it measured beside its target, and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import dask
import psutil
import torch
import torch.nn.functional as F
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker
from torch import nn

import tfnb
from tests.benchmarks.cluster_steps import measured, workers
from tests.benchmarks.models import mlp
from tfnb.cluster.members import deploy
from tfnb.cluster.tasks.task import TaskActor
from tfnb.cluster.wire.messages import Ask, Ok
from tfnb.graph import lazy_memory

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
Printed = dict[str, Any]


def said(name: str, found: Printed) -> None:
    """The line for programs."""
    load = psutil.getloadavg()[0]
    print(json.dumps({"bench": f"cluster {name}", "load": load, "cores": psutil.cpu_count(), **found}), flush=True)


# -- a net that computes ---------------------------------------------------------------------------------------------


def convolutions(width: int = 48) -> nn.Module:
    """Eight convolutions and a linear layer; input [B, 3, 32, 32]."""
    layers: list[nn.Module] = []
    for place in range(8):
        layers += [nn.Conv2d(width if place else 3, width, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if place in (2, 5) else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def conv(rounds: int = 3, steps: int = 20, batch: int = 48) -> None:
    """Two tasks beside torch in this process, by turns; and beside `fit` in this process."""
    torch.manual_seed(0)
    rows, labels = torch.randn(4 * batch, 3, 32, 32), torch.randint(10, (4 * batch,))
    eager, model = convolutions(), convolutions()
    model.load_state_dict(eager.state_dict())
    with tfnb.record("conv"):
        x, y = tfnb.placeholder(rows[:batch]), tfnb.placeholder(labels[:batch])
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.SGD(0.05).minimize(loss)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.05)

    def fit(steps: int) -> object:
        return tfnb.fit(train, {x: rows, y: labels}, steps=steps, batch_size=batch, shuffle=False)

    def here(steps: int) -> None:
        for step in range(steps):
            start = step * batch % len(rows)
            optimizer.zero_grad()
            F.cross_entropy(eager(rows[start : start + batch]), labels[start : start + batch]).backward()
            optimizer.step()

    torch.set_num_threads(2)
    fit(2), here(2)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    found: dict[str, list[float]] = {"torch": [], "here": [], "there": []}

    def timed(name: str, call: Callable[[int], object]) -> None:
        begin = time.perf_counter()
        call(steps)
        found[name].append((time.perf_counter() - begin) / steps * 1e3)

    fit(20)  # compiled by now, where that pays
    for _ in range(rounds):
        timed("here", fit), timed("torch", here)
    with workers(3) as client, tfnb.connect(client, ps=1):
        fit(8)
        for _ in range(rounds):
            timed("there", fit), timed("torch", here)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.isfinite().all() and theirs.isfinite().all()
    middle = {name: statistics.median(times) for name, times in found.items()}
    ratios = {name: middle[name] / middle["there"] for name in ("torch", "here")}
    print(f"conv net, a step: torch with two threads {middle['torch']:.0f} ms, fit here {middle['here']:.0f} ms, "
          f"two tasks of one thread {middle['there']:.0f} ms: rate {ratios['torch']:.2f} of torch's, "
          f"{ratios['here']:.2f} of fit's here (target 0.90)")  # fmt: skip
    said("conv", middle)


# -- more and more tasks ---------------------------------------------------------------------------------------------


def tasks(steps: int = 400, counts: Sequence[int] = (1, 2, 4, 8), batch: int = 32) -> None:
    """Processor milliseconds of a step, by mode and number of tasks."""
    torch.manual_seed(0)
    rows, labels = torch.randn(3200, 784), torch.randint(10, (3200,))
    found: dict[str, dict[int, float]] = {"sync": {}, "async": {}}
    server = 0.0
    for count in counts:
        model = mlp()
        with tfnb.record(f"tasks{count}"):
            x, y = tfnb.placeholder(rows[:batch]), tfnb.placeholder(labels[:batch])
            loss = F.cross_entropy(model(x), y)
            train = tfnb.train.SGD(0.05).minimize(loss)
        with workers(count + 1) as client, tfnb.connect(client, ps=1) as there:
            pid = there._engine.servers[0].info["pid"]
            for mode in found:
                fit = partial(tfnb.fit, train, {x: rows, y: labels}, batch_size=batch, mode=mode, watch=[loss])
                fit(steps=steps)
                before = sum(psutil.Process(pid).cpu_times()[:2])
                found[mode][count] = measured(lambda n, fit=fit: fit(steps=n), steps)["cpu_ms"]
                if count == 1 and mode == "async":
                    server = (sum(psutil.Process(pid).cpu_times()[:2]) - before) / steps * 1e3
    for mode, costs in found.items():
        text = ", ".join(f"{count} task{'s' if count > 1 else ''} {cost:.2f}" for count, cost in costs.items())
        grows = (costs[counts[-1]] - costs[counts[0]]) / (counts[-1] - counts[0])
        print(f"{mode:6} processor ms of a step, all processes: {text}; {grows:.2f} a task (target 1)")
    print(f"a server's processor ms for 400 kB pulled, pushed and applied: {server:.2f} (target 1)")
    said("tasks", {**found, "server": server})


# -- one number ------------------------------------------------------------------------------------------------------


class Plain:
    """A number behind a plain Dask actor, and one who asks for it."""

    def __init__(self) -> None:
        self.number = 0.0

    async def get(self) -> float:
        return self.number

    async def ask(self, server: Any, times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            await server.get()
        return (time.perf_counter() - begin) / times


async def asked(key: str, times: int, dask_worker: Any) -> float | None:
    """In the worker of a task: seconds of a pull of one number by its direct stream."""
    task = next(actor.task for actor in dask_worker.state.actors.values() if isinstance(actor, TaskActor))
    await task.open_streams([0])

    def ask() -> float:
        begin = time.perf_counter()
        for _ in range(times):
            (answer,) = task.stream([Ask(0, "pull", {"keys": [key], "since": [-1]})])
            assert isinstance(answer, Ok) and len(answer.tensors) == 1, answer
        return (time.perf_counter() - begin) / times

    return await task.computing.do(-1, ask)


def scalar(rounds: int = 5, times: int = 300) -> None:
    """There and back, by turns."""
    number = tfnb.Variable(torch.tensor(1.0), name="number")
    with tfnb.record("scalar"):
        out = number.read() * 2
    with workers(2) as client, tfnb.connect(client, ps=1) as there:
        tfnb.run(out)
        server_at, task_at = there._engine.servers[0].peer.addr, there._engine.tasks[0].peer.addr
        server = client.submit(Plain, actor=True, workers=[server_at], pure=False).result()
        plain = client.submit(Plain, actor=True, workers=[task_at], pure=False).result()
        key = there._variables.held.homes[number.key][0].key
        pids = client.run(os.getpid, workers=[server_at, task_at]).values()
        both = [psutil.Process(pid) for pid in pids]
        found: dict[str, list[float]] = {name: [] for name in ("plain", "tfnb", "plain cpu", "tfnb cpu")}
        calls: dict[str, Callable[[], float]] = {
            "plain": lambda: plain.ask(server, times).result(),
            "tfnb": lambda: client.run(asked, key, times, workers=[task_at])[task_at],
        }
        for _ in range(rounds):
            for name, call in calls.items():
                before = sum(sum(each.cpu_times()[:2]) for each in both)
                found[name].append(call())
                found[f"{name} cpu"].append((sum(sum(each.cpu_times()[:2]) for each in both) - before) / times)
    middle = {name: statistics.median(each) * 1e6 for name, each in found.items()}
    ratios = [statistics.median(a / b for a, b in zip(found[f"tfnb{of}"], found[f"plain{of}"], strict=True))
              for of in ("", " cpu")]  # fmt: skip
    print(f"one number there and back: plain actor {middle['plain']:.0f} us, tfnb {middle['tfnb']:.0f} us: "
          f"{ratios[0]:.2f} (target 0.30); processor time of both processes {middle['plain cpu']:.0f} and "
          f"{middle['tfnb cpu']:.0f} us: {ratios[1]:.2f}")  # fmt: skip
    said("scalar", {**middle, "ratio": ratios[0], "cpu ratio": ratios[1]})


# -- the null step ---------------------------------------------------------------------------------------------------

SERVERS = 16
COUNTS = 1, 2, 5, 10, 25, 50, 100
PUBLISHED = {"scalar": "1.8 ms at 1 worker, 8.8 at 100", "dense 100 MB": "147, 613", "sparse 64 MB": "none",
             "sparse 1 GB": "5 to 20", "sparse 16 GB": "5 to 20"}  # fmt: skip


@contextmanager
def crowd(count: int) -> Iterator[tuple[Client, Any]]:
    """16 servers in two processes, and so many tasks in a third one: a client and the connected cluster."""
    nanny = {"cls": Nanny, "options": {"nthreads": 1, "host": HOST, "memory_limit": 0, "silence_logs": 50}}
    scheduler = {"cls": Scheduler, "options": {"host": HOST, "dashboard": False}}
    roles, deploy.roles = deploy.roles, lambda found, ps: deploy.Roles(count, 2, SERVERS)
    try:
        with (
            dask.config.set(deploy.SETTINGS),
            SpecCluster(
                workers={"000": nanny, "001": nanny}, scheduler=scheduler, silence_logs=50
            ) as cluster, Client(cluster) as client, many(cluster.scheduler_address, count),
        ):  # fmt: skip
            client.wait_for_workers(2 + count, 120)
            with tfnb.connect(client, ps=SERVERS, timeout=120) as there:
                assert (len(there.servers), len(there.tasks)) == (2, count)
                yield client, there
    finally:
        deploy.roles = roles


@contextmanager
def many(address: str, count: int) -> Iterator[None]:
    """A process of so many workers, each of which stands for a machine."""
    process = subprocess.Popen([sys.executable, "-m", __spec__.name, "--serve", address, str(count)], cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


async def serve(address: str, count: int) -> None:
    """In that process. What each machine looks at now and then (its usage, all that is imported) nobody does here."""
    settings = {**deploy.SETTINGS, "distributed.admin.system-monitor.interval": "1h"}
    with dask.config.set(settings):
        names = [f"{2 + place:03}" for place in range(count)]
        made = [Worker(address, name=name, nthreads=1, host=HOST, memory_limit=0, dashboard=False) for name in names]
        await asyncio.gather(*made)
    gc.collect(), gc.freeze()
    await asyncio.gather(*(worker.finished() for worker in made))


def dense(nbytes: int) -> tuple[Any, Callable[[int, int], Any], Callable[[int], None]]:
    """16 Variables of so many bytes in all: each is fetched, and one is taken off each number of it."""
    size = max(1, nbytes // 4 // SERVERS)
    held = [tfnb.Variable(torch.zeros(size), name=f"w{place}") for place in range(SERVERS)]
    with tfnb.record("null"):
        x = tfnb.placeholder(torch.ones(2), name="x")
        grads = [(variable.read() * 0 + x.mean(), variable) for variable in held]
        train = tfnb.train.SGD(1.0).apply_gradients(grads)

    def check(steps: int) -> None:
        for variable in held:
            value = variable.value()  # a hundred shares of a hundredth are one, but for rounding
            torch.testing.assert_close(value, torch.full_like(value, -steps), rtol=1e-5, atol=0.0)

    return train, lambda count, steps: {x: torch.ones(count * steps)}, check


def sparse(nbytes: int, width: int = 256, rows: int = 32) -> tuple[Any, Callable[[int, int], Any], Callable[..., None]]:
    """16 tables of so many bytes in all: each worker fetches 32 random rows of each, and takes one off them."""
    height = nbytes // 4 // width // SERVERS
    held = [tfnb.Variable(0.0, shape=(height, width), name=f"t{place}") for place in range(SERVERS)]
    with tfnb.record("sparse"):
        at = tfnb.placeholder(torch.zeros(2, rows, dtype=torch.int64), name="at")
        total = sum(F.embedding(at % height, variable.read()).sum((1, 2)).mean() for variable in held)
        train = tfnb.train.SGD(1.0).minimize(total, held)

    def fed(count: int, steps: int) -> Any:
        return {at: torch.randint(1 << 40, (count * steps, rows))}

    def check(steps: int) -> None:
        """Each step takes one off ``rows`` rows of each table in all: a lost or doubled one shows."""
        for variable in held:
            _, found = lazy_memory.packed(variable.storage)
            torch.testing.assert_close(-found.double().sum().item(), float(steps * rows * width), rtol=1e-5, atol=0.0)

    return train, fed, check


KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "scalar": (partial(dense, 4 * SERVERS), 200),
    "dense 100 MB": (partial(dense, 100 << 20), 10),
    "sparse 64 MB": (partial(sparse, 1 << 26), 50),
    "sparse 1 GB": (partial(sparse, 1 << 30), 50),
    "sparse 16 GB": (partial(sparse, 1 << 34), 50),
}


def null(kinds: Sequence[str] = tuple(KINDS), counts: Sequence[int] = COUNTS) -> None:
    """Milliseconds of a synchronous step, by kind and number of workers; why there are none, where a run failed."""
    for kind in kinds:
        found: dict[int, float | str] = {}
        for count in counts:
            try:
                found[count], more = step_of(kind, count)
                print(f"null step, {kind}, {count} workers: {found[count]:.1f} ms, {more}", flush=True)
            except (tfnb.errors.TfnbError, AssertionError, TimeoutError) as error:
                found[count] = f"{type(error).__name__}: {error}".split("\n")[0]
                print(f"null step, {kind}, {count} workers: none, {found[count]}", flush=True)
        text = ", ".join(f"{count}: {ms:.1f}" for count, ms in found.items() if isinstance(ms, float))
        print(f"null step, {kind}, ms by workers: {text} (published, on other machines: {PUBLISHED[kind]})")
        said("null", {"kind": kind, "ms": found})


def step_of(kind: str, count: int, seconds: float = 10.0) -> tuple[float, str]:
    """Milliseconds of a step and, in words, what else it took; over about so many seconds."""
    torch.manual_seed(0)
    make, most = KINDS[kind]
    train, feeds, check = make()
    done = 0
    with crowd(count) as (client, there):

        def fitted(steps: int) -> tuple[float, float]:
            """Seconds of wall and of all processors."""
            nonlocal done
            begin, before = time.perf_counter(), spent()
            tfnb.fit(train, feeds(count, steps), batch_size=count, shuffle=False)
            done += steps
            return time.perf_counter() - begin, spent() - before

        memory = resident(client)
        fitted(2)
        few = fitted(2)  # values move at the start and the end, which is no step
        some = fitted(6)
        steps = max(4, min(most, int(seconds / max(1e-3, (some[0] - few[0]) / 4))))
        wall, processor = (a - b for a, b in zip(fitted(2 + steps), few, strict=True))
        grown = resident(client) - memory
        lost = count - len(there.tasks)
    check(done)
    more = f"{steps} steps, {processor / steps * 1e3:.1f} ms of processors, {grown / 1e6:.0f} MB more in all processes"
    return wall / steps * 1e3, more + (f", {lost} workers were given up" if lost else "")


def spent() -> float:
    """Seconds of all processors that this process and those that it began have taken."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # one that compiled something has ended
            total += sum(process.cpu_times()[:2])
    return total


def resident(client: Client) -> int:
    """Bytes of memory of all worker processes."""
    return sum(dict(client.run(rss).values()).values())


def rss() -> tuple[int, int]:
    """The number of a process, and bytes of its memory."""
    return os.getpid(), int(psutil.Process().memory_info().rss)


ROWS: dict[str, Callable[[], None]] = {"conv": conv, "tasks": tasks, "scalar": scalar, "null": null}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", choices=[*ROWS, []])  # none: an empty list is looked up
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=KINDS)
    parser.add_argument("--workers", nargs="*", type=int, default=COUNTS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        return asyncio.run(serve(options.serve[0], int(options.serve[1])))
    for name in options.rows or ROWS:
        null(options.kinds, options.workers) if name == "null" else ROWS[name]()


if __name__ == "__main__":
    main()
