"""100 MB pulled, applied and pushed: one server, one task, over Dask's comms, beside plain Dask actors doing the same.

`python -m tests.benchmarks.cluster_bulk [--mb 100] [--steps 12]` starts two worker processes, checks first that both
ways end with equal values, then takes steps by turns and prints medians in milliseconds and their ratio. A step: the
task gets the weights, computes ``w * 0.5``, and the server subtracts a tenth of that. `bulk` is the same for callers.
Then the steps of ``fit`` by shared memory and by sockets alone, beside what they need at least: the copies and the two
passes over the values in one process, and a raw socket there and back between two processes.

Last, with ``--only prices`` alone, what a training pays for what it could do without: the pulls for the case that a
server is lost, values that are watched, and a spare task, each in turns with the training without them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Self

import dask
import psutil
import torch
from distributed import Client, LocalCluster
from distributed.actor import Actor

import tfnb
from tests.benchmarks.cluster_steps import ray
from tfnb.cluster.members import deploy
from tfnb.cluster.notebook.variables_there import VariablesThere
from tfnb.state import shared_memory

TARGET = 1.2  # times the plain actors' time


class PlainServer:
    """What thirty lines of Dask do: weights in one process. A reply must not be written while it is sent: a copy."""

    def __init__(self, count: int) -> None:
        self.w = torch.linspace(-1.0, 1.0, count)

    def pull(self) -> torch.Tensor:
        """The weights."""
        return self.w.clone()

    def push(self, grad: torch.Tensor) -> None:
        """One step of gradient descent."""
        self.w.sub_(grad, alpha=0.1)


class PlainTask:
    """The one who computes."""

    def step(self, server: Actor) -> None:
        """Pull, compute, push."""
        w = server.pull().result()
        server.push(w * 0.5).result()


def _grown(dask_worker: object) -> int:
    """The most memory that a worker process had, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def plain(client: Client, count: int) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    """A step by plain actors, and their weights."""
    one, other = client.scheduler_info()["workers"]
    server = client.submit(PlainServer, count, actor=True, workers=[one], pure=False).result()
    task = client.submit(PlainTask, actor=True, workers=[other], pure=False).result()
    return lambda: task.step(server).result(), lambda: server.pull().result()


def ours(count: int) -> tuple[Callable[[], object], Callable[[int], object], tfnb.Variable]:
    """A step by `tfnb.run`, several by `tfnb.fit`, and the weights."""
    w = tfnb.Variable(torch.linspace(-1.0, 1.0, count), name="w")
    with tfnb.record("bulk"):
        x = tfnb.placeholder(torch.zeros(1), name="x", shape=(1,))
        train = tfnb.train.SGD(0.1).apply_gradients([(w.read() * x, w)])
    feed = {x: torch.tensor([0.5])}

    def fit(steps: int, mode: str = "sync") -> object:
        return tfnb.fit(train, (feed for _ in range(steps)), mode=mode)

    return lambda: tfnb.run(train, feed), fit, w


class Row(NamedTuple):
    """Medians of a step, in milliseconds: on the clock, and of the processors of all processes."""

    wall: float
    processors: float


def bulk(megabytes: int = 100, steps: int = 12, *, own: bool = True) -> Mapping[str, Row]:
    """Rows of ``plain`` actors, of ``run``, and of a step of ``sync`` and ``async`` training.

    own: on a cluster as `tfnb.connect` makes it; else on one with Dask's defaults. The plain actors run on the same.
    """
    with _workers(own) as client:
        client.run(torch.set_num_threads, 1)
        plain_step, plain_weights = plain(client, megabytes * 250_000)
        with tfnb.connect(client, ps=1) as connected:
            step, fit, w = ours(megabytes * 250_000)
            for _ in range(3):
                plain_step(), step()
            torch.testing.assert_close(w.value(), plain_weights(), rtol=1e-6, atol=1e-7)
            clock = _Clock([*client.run(os.getpid).values(), os.getpid()])
            times: dict[str, list[Row]] = {"plain": [], "run": [], "sync": [], "async": []}
            for _ in range(steps):
                times["plain"].append(clock(plain_step))
                times["run"].append(clock(step))
            few = max(4, steps // 2)
            for mode in ("sync", "async"):  # what a step costs more: moving the values home at the end is no step
                for _ in range(3):
                    some, more = (clock(partial(fit, count, mode)) for count in (2, 2 + few))
                    times[mode].append(Row(*((b - a) / few for a, b in zip(some, more, strict=True))))
            print(f"server: {connected.status().rows[-1]}; MB at most: {list(client.run(_grown).values())}")
    return {name: Row(*map(statistics.median, zip(*found, strict=True))) for name, found in times.items()}


@contextmanager
def _workers(own: bool, count: int = 2) -> Iterator[Client]:
    """Worker processes."""
    options = {"dashboard_address": None, "silence_logs": 50, "memory_limit": "8GB"}
    with (
        dask.config.set(deploy.SETTINGS if own else {}),
        LocalCluster(n_workers=count, threads_per_worker=1, **options) as cluster,
        Client(cluster) as client,
    ):
        yield client


class _Clock:
    """Milliseconds that a call takes."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def __call__(self, function: Callable[[], object]) -> Row:
        begin, before = time.perf_counter(), self._processors()
        function()
        return Row((time.perf_counter() - begin) * 1e3, (self._processors() - before) * 1e3)

    def _processors(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


def copies(count: int, steps: int) -> Row:
    """In one process what a step on one host needs: a copy of the values, a pass that computes, and the update.

    By one thread, as each process of the cluster has one.
    """
    torch.set_num_threads(1)
    w, mine, grad = torch.linspace(-1.0, 1.0, count), torch.empty(count), torch.empty(count)
    clock = _Clock([os.getpid()])

    def step() -> None:
        mine.copy_(w)
        torch.mul(mine, 0.5, out=grad)
        w.sub_(grad, alpha=0.1)

    step()
    return Row(*map(statistics.median, zip(*(clock(step) for _ in range(steps)), strict=True)))


def _echo(port: int, nbytes: int) -> None:
    """The other end of a raw socket: gets so many bytes, and sends as many."""
    buffer = memoryview(bytearray(nbytes))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while _filled(sock, buffer):
            sock.sendall(buffer)


def _filled(sock: socket.socket, buffer: memoryview) -> bool:
    at = 0
    while at < len(buffer):
        got = sock.recv_into(buffer[at:])
        if not got:
            return False
        at += got
    return True


def raw(nbytes: int, steps: int) -> Row:
    """A raw socket: so many bytes there and back, into buffers that are there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = get_context("spawn").Process(target=_echo, args=(server.getsockname()[1], nbytes))
        other.start()
        sock, _ = server.accept()
        buffer = memoryview(bytearray(nbytes))
        clock = _Clock([os.getpid(), other.pid or 0])
        with sock:

            def step() -> None:
                sock.sendall(buffer)
                _filled(sock, buffer)

            step()
            rows = [clock(step) for _ in range(steps)]
        other.join(10)
    return Row(*map(statistics.median, zip(*rows, strict=True)))


def _shared(is_on: bool) -> None:
    """On a worker: whether values lie in shared memory from here on."""
    shared_memory.is_on = is_on


def lanes(megabytes: int = 100, steps: int = 12) -> Mapping[str, Row]:
    """A step of async training by shared memory, and by sockets alone."""
    found: dict[str, Row] = {}
    few = max(4, 2 * steps)
    with _workers(own=True) as client:
        client.run(torch.set_num_threads, 1)
        clock = _Clock([*client.run(os.getpid).values(), os.getpid()])
        for name, is_on in (("lane M", True), ("lane S", False)):
            client.run(_shared, is_on)
            with tfnb.connect(client, ps=1) as connected:
                _, fit, w = ours(megabytes * 250_000)
                rows = []
                for _ in range(4):
                    some, more = (clock(partial(fit, count, "async")) for count in (2, 2 + few))
                    rows.append(Row(*((b - a) / few for a, b in zip(some, more, strict=True))))
                expected = torch.linspace(-1.0, 1.0, megabytes * 250_000) * 0.95 ** (4 * (4 + few))
                torch.testing.assert_close(w.value(), expected, rtol=1e-4, atol=1e-6)
                print(f"{name}: {connected.status().details[-2]}")
            found[name] = Row(*map(statistics.median, zip(*rows, strict=True)))
    return found


def show_lanes(megabytes: int, steps: int) -> None:
    """Print the lanes beside what they need at least; the baselines are taken before and after."""
    nbytes = megabytes * 1_000_000
    before = copies(nbytes // 4, steps), raw(nbytes, steps)
    rows = dict(lanes(megabytes, steps))
    after = copies(nbytes // 4, steps), raw(nbytes, steps)
    for name, base, a, b in zip(("copies", "raw socket"), ("lane M", "lane S"), before, after, strict=True):
        rows[name] = least = Row(*((x + y) / 2 for x, y in zip(a, b, strict=True)))
        ratios = " / ".join(f"{x / y:.2f}" for x, y in zip(rows[base], least, strict=True))
        ours_ms, least_ms = (" and ".join(f"{part:.0f}" for part in row) for row in (rows[base], least))
        print(f"{base} {ours_ms} ms wall and processors, {name} {least_ms}: {ratios} (target 1.3)")
    print(json.dumps({"bench": "cluster_bulk lanes", "load": os.getloadavg()[0], "rows": rows}))


class Pulls:
    """In a block, pulls for safety are made where they are asked for, and counted."""

    are_made = False
    count, busy = 0, 0.0  # how many, and the milliseconds of this process's processors for them

    def __enter__(self) -> Self:
        self._refresh = VariablesThere.refresh

        def refresh(there: VariablesThere) -> None:
            if self.are_made and time.monotonic() > there._due:
                begin = time.process_time()
                self._refresh(there)
                self.busy += (time.process_time() - begin) * 1e3
                self.count += 1

        VariablesThere.refresh = refresh  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        VariablesThere.refresh = self._refresh  # type: ignore[method-assign]


class Price(NamedTuple):
    """What a training pays for something: medians of pairs, as parts of the training without it."""

    wall: float
    processors: float
    pulls: int  # of all trainings with it
    here: float  # the share of the time of all processors that the notebook's process took for them


def prices(megabytes: int = 100, seconds: float = 30.0, turns: int = 3) -> Mapping[str, Price]:
    """Of the pulls for safety and of a watched number in async training by one task, of a spare one of two tasks."""
    found: dict[str, Price] = {}
    alone = {"mode": "async"}
    for tasks, ways in ((1, {"pulls": alone, "watched": alone}), (2, {"backup": {"backup": 1}})):
        with _workers(own=True, count=1 + tasks) as client:
            client.run(torch.set_num_threads, 1)
            with tfnb.connect(client, ps=1):
                clock = _Clock([*client.run(os.getpid).values(), os.getpid()])
                found |= _paid(clock, megabytes * 250_000, ways, seconds, turns)
    return found


def _paid(
    clock: _Clock, count: int, ways: Mapping[str, Mapping[str, Any]], seconds: float, turns: int
) -> dict[str, Price]:
    w = tfnb.Variable(torch.linspace(-1.0, 1.0, count), name="w")
    with tfnb.record("paid"):
        x = tfnb.placeholder(torch.zeros(2), name="x", shape=("B",))
        factor = x.mean()
        train = tfnb.train.SGD(0.1).apply_gradients([(w.read() * factor, w)])

    def trained(way: str, is_paid: bool) -> tuple[Row, float]:
        """A step of a training for so long, and the processors' time of all its steps."""
        pulls.are_made = way == "pulls" and is_paid
        options = {key: value for key, value in ways[way].items() if key == "mode" or is_paid}
        options |= {"watch": {"factor": factor}} if way == "watched" and is_paid else {}
        end, steps = time.monotonic() + seconds, list[int]()

        def feeds() -> Iterator[Any]:
            while time.monotonic() < end:
                yield {x: torch.tensor([0.5, 0.5])}

        row = clock(lambda: steps.append(tfnb.fit(train, feeds(), **options).steps))
        return Row(row.wall / steps[0], row.processors / steps[0]), row.processors

    found = {}
    with Pulls() as pulls:
        for way in ways:
            trained(way, is_paid=False)
            pulls.count, pulls.busy = 0, 0.0
            pairs = [(trained(way, is_paid=True), trained(way, is_paid=False)) for _ in range(turns)]
            wall, processors = (statistics.median(a[0][i] / b[0][i] for a, b in pairs) - 1.0 for i in range(2))
            found[way] = Price(wall, processors, pulls.count, pulls.busy / sum(whole for (_, whole), _ in pairs))
    return found


def show_prices(megabytes: int, seconds: float) -> None:
    """Print what is paid: in trainings of few seconds there is hardly a pull, as the next one waits for its share."""
    found = prices(megabytes, seconds)
    for name, price in found.items():
        print(
            f"{name}: {price.wall:+.1%} wall, {price.processors:+.1%} processors; {price.pulls} pulls for safety "
            f"took {price.here:.2%} of all processors' time in the notebook (target 2 %)"
        )
    print(json.dumps({"bench": "cluster_bulk prices", "load": os.getloadavg()[0], "rows": found}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each training of the prices")
    parser.add_argument("--only", choices=["prices"])
    options = parser.parse_args()
    if options.only is not None:
        show_prices(options.mb, options.seconds)
        return
    for own in (False, True):
        rows = bulk(options.mb, options.steps, own=own)
        kind = "a cluster as tfnb makes it" if own else "a cluster with Dask's defaults"
        print(f"{options.mb} MB on {kind}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; milliseconds a step")
        for name, row in rows.items():
            ratios = " / ".join(f"{a / b:.2f}" for a, b in zip(row, rows["plain"], strict=True))
            print(f"{name:6} {row.wall:8.1f} wall {row.processors:8.1f} processors  {ratios} x plain actors")
        print(json.dumps({"bench": "cluster_bulk", "own": own, "target": TARGET, "rows": rows}))
    show_lanes(options.mb, options.steps)
    show_prices(options.mb, options.seconds)
    if options.mb == 100 and (there := ray(3, 1, ["100 MB"])):
        print(f"Ray takes {there['100 MB'][0] / rows['async'].wall:.1f} times as long as a step of async (target 4)")


if __name__ == "__main__":
    main()
