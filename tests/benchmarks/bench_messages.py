"""A value from one process to another and a byte back: ours beside a raw socket and gloo's send and recv.

`python -m tests.benchmarks.bench_messages [--rounds 5]` checks first that each way carries equal values, then takes the
ways by turns, so that what else the machine does meets all. Printed are microseconds, the median of the fastest fifth,
and ratios. The ways between two plain processes: a raw socket into a buffer that is used again; gloo; posts, whose
receiver reads in the thread that waits. Between two Dask workers: the exchange of two tasks, which answers by the
exchange, too, and wakes another thread at each end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as gloo
from distributed import Client, LocalCluster, get_worker

import tfnb
from tfnb.cluster.server.cores import Cores
from tfnb.cluster.server.serving import Serving
from tfnb.cluster.wire.lending import ServerLoans, TaskLoans
from tfnb.cluster.wire.messages import Peer
from tfnb.cluster.wire.posting import Post, Receiver, Sender

SIZES = {"4 B": (4, 1000), "100 kB": (100_000, 400), "10 MB": (10_000_000, 20)}  # bytes, and messages of a round
TARGETS = {"raw socket": (3.0, 4.0, 0.5), "gloo": (0.5, 0.6, 0.5)}
WAYS = ("raw socket", "gloo", "posts", "posts, by the socket")

Once = Callable[[torch.Tensor], None]


def value(nbytes: int) -> torch.Tensor:
    """What is sent."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def _filled(sock: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


class Here:
    """The end that sends and waits for the byte."""

    def __init__(self, pipe: Connection, file: str) -> None:
        torch.set_num_threads(1)
        self.pipe, self.byte = pipe, memoryview(bytearray(1))
        with socket.create_server(("127.0.0.1", 0)) as server:
            pipe.send(server.getsockname()[1])
            self.raw, self.posts, self.plain = (server.accept()[0] for _ in range(3))
        for sock in (self.raw, self.posts, self.plain):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _group(0, file)
        self.serving = Serving(Cores(), lambda sends: None)
        loans = TaskLoans(16)
        pipe.send(loans.name)
        self.senders = {
            way: self._sender(sock, one)
            for way, sock, one in zip(WAYS[2:], (self.posts, self.plain), (loans, None), strict=True)
        }
        self.back, self.count = torch.zeros(1, dtype=torch.uint8), 0

    def _sender(self, sock: socket.socket, loans: TaskLoans | None) -> Sender:
        sender = Sender(lambda error: None)
        sender.connect(sock, loans)
        self.serving.host(sender)
        return sender

    def once(self, way: str) -> Once:
        """One message and its byte."""
        return {"raw socket": self._raw, "gloo": self._gloo}.get(way) or (lambda x: self._post(self.senders[way], x))

    def _raw(self, x: torch.Tensor) -> None:
        self.raw.sendall(x.numpy())
        _filled(self.raw, self.byte)

    def _gloo(self, x: torch.Tensor) -> None:
        gloo.send(x, 1)
        gloo.recv(self.back, 1)

    def _post(self, sender: Sender, x: torch.Tensor) -> None:
        self.count += 1
        if sender.post(1, 3, (0, self.count), x, None):
            self.serving.look(sender)
        _filled(self.raw, self.byte)


def _group(rank: int, file: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gloo.init_process_group(
        "gloo", store=gloo.FileStore(file, 2), rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )  # fmt: skip


def other(pipe: Connection, file: str) -> None:
    """The end that receives: what it is told to expect, again and again."""
    torch.set_num_threads(1)
    port = pipe.recv()
    raw, posts, plain = (socket.create_connection(("127.0.0.1", port)) for _ in range(3))
    for sock in (raw, posts, plain):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _group(1, file)
    came: list[Post] = []
    loans = ServerLoans(pipe.recv())
    receivers = {
        way: Receiver(sock, one, came.extend, lambda error: None)
        for way, sock, one in zip(WAYS[2:], (posts, plain), (loans, None), strict=True)
    }  # fmt: skip
    byte = torch.ones(1, dtype=torch.uint8)
    while (asked := pipe.recv()) is not None:
        way, nbytes, count = asked
        last = buffer = torch.empty(nbytes, dtype=torch.uint8)
        view = memoryview(buffer.numpy())
        with selectors.DefaultSelector() as selector:
            if way in receivers:
                receiver = receivers[way]
                receiver.sock.setblocking(False)
                selector.register(receiver.sock, selectors.EVENT_READ)
            for _ in range(count):
                if way == "gloo":
                    gloo.recv(buffer, 0)
                    gloo.send(byte, 0)
                    continue
                if way == "raw socket":
                    _filled(raw, view)
                else:
                    del came[:], last  # as who has used a value
                    while not came:
                        selector.select()
                        receiver.ready(selectors.EVENT_READ)
                    last = came[0].value
                raw.sendall(b"x")
        pipe.send(digest(last))
    gloo.destroy_process_group()


def digest(x: torch.Tensor) -> str:
    """Equal for equal bytes."""
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


@contextmanager
def plain() -> Iterator[Callable[[str, int, int], list[float]]]:
    """Seconds of messages between two plain processes."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "store")
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=other, args=(theirs, file))
        process.start()
        here = Here(ours, file)

        def seconds(way: str, nbytes: int, count: int) -> list[float]:
            x, once = value(nbytes), here.once(way)
            ours.send((way, nbytes, count))
            found = []
            for _ in range(count):
                begin = time.perf_counter()
                once(x)
                found.append(time.perf_counter() - begin)
            assert ours.recv() == digest(x), way
            return found

        yield seconds
        ours.send(None)
        gloo.destroy_process_group()
        here.serving.close()
        process.join(10)


def exchanged(parts: dict[int, Peer], me: int, number: int, nbytes: int, count: int) -> list[float]:
    """On the worker of a task: messages of one round, in the thread of a step."""
    exchange, got = get_worker().state.actors[parts[me].key].task.exchange, queue.SimpleQueue[Any]()
    peers, x, found = exchange.begin(number, parts, got.put), torch.arange(nbytes).to(torch.uint8), []
    for turn in range(count):
        begin = time.perf_counter()
        if me == 0:
            peers.tell(0, 1, (0, turn), x, None)
            peers.want(1, (0, turn), lambda value, dead: got.put(value))
            back = got.get(timeout=60)
            assert back is None, back
        else:
            peers.want(0, (0, turn), lambda value, dead: got.put(value))
            came = got.get(timeout=60)
            assert turn or torch.equal(came, x)
            del came
            peers.tell(1, 0, (0, turn), None, None)
        found.append(time.perf_counter() - begin)
    exchange.end(number)
    return found


@contextmanager
def workers() -> Iterator[Callable[[int, int], list[float]]]:
    """Seconds of messages between the tasks of two Dask workers."""
    options: dict[str, Any] = {"dashboard_address": None, "silence_logs": 50}
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, **options) as local,
        Client(local) as client,
        tfnb.connect(client, ps=1) as cluster,
    ):
        parts = {number: member.peer for number, member in enumerate(cluster._engine.tasks)}
        rounds = iter(range(1, 1 << 30))

        def seconds(nbytes: int, count: int) -> list[float]:
            number = next(rounds)
            both = [
                client.submit(exchanged, parts, me, number, nbytes, count, workers=[parts[me].addr], pure=False)
                for me in parts
            ]  # fmt: skip
            return both[0].result()  # type: ignore[no-any-return]

        yield seconds


def fastest(found: Sequence[float]) -> float:
    """Microseconds: the median of the fastest fifth."""
    return statistics.median(sorted(found)[: max(1, len(found) // 5)]) * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found: dict[tuple[str, str], list[float]] = {}
    with plain() as one, workers() as two:
        for turn in range(rounds + 1):  # the first one warms up and proves that the values are equal
            for size, (nbytes, count) in SIZES.items():
                for way in (*WAYS, "exchange"):
                    some = two(nbytes, count) if way == "exchange" else one(way, nbytes, count)
                    if turn:
                        found.setdefault((way, size), []).extend(some)
    print(f"microseconds there and a byte back, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    times = {key: fastest(some) for key, some in found.items()}
    for place, size in enumerate(SIZES):
        print(size)
        for way in (*WAYS, "exchange"):
            ratios = "  ".join(
                f"{times[way, size] / times[base, size]:6.2f} x {base} (target {targets[place]})"
                for base, targets in TARGETS.items()
            )
            print(f"  {way:21} {times[way, size]:9.1f}  {ratios}")
    rows = {size: {way: round(times[way, size], 1) for way in (*WAYS, "exchange")} for size in SIZES}
    print(json.dumps({"bench": "messages", "load": os.getloadavg()[0], "targets": TARGETS, "rows": rows}))


if __name__ == "__main__":
    main()
