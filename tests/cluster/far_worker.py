"""A Dask worker in a network namespace of its own, behind a link that may be cut, slow or lossy. Needs root and Linux.

The link is two TUN devices, one here and one there, whose packets this process carries from one to the other.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from distributed import Client

from tests.cluster.conftest import worker_processes

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
_NUMBERS = itertools.count(1)


def has_networks() -> bool:
    """Whether namespaces and TUN devices can be made."""
    return sys.platform == "linux" and os.geteuid() == 0 and os.access("/dev/net/tun", os.W_OK)


needs_root = pytest.mark.skipif(
    not has_networks(),
    reason="network namespaces and TUN devices need root on Linux",
)


class Link:
    """The way between this host, at address ``here``, and a namespace, at ``there``.

    delay: seconds one way; loss: the share of packets that get lost; comes, goes: whether packets from there arrive
    here, and packets from here there.
    """

    def __init__(self) -> None:
        name = f"tf{os.getpid() % 100000}x{next(_NUMBERS)}"
        net = f"10.{64 + os.getpid() % 64}.{random.randrange(256)}"
        self.space, self.here, self.there = name, f"{net}.1", f"{net}.2"
        self.delay = self.loss = 0.0
        self.comes = self.goes = True
        self._random, self._is_over = random.Random(0), False
        ip("netns", "add", name)
        self._near, self._far = (_tun(f"{name}{end}") for end in "ab")
        ip("link", "set", f"{name}b", "netns", name)
        for end, prefix, mine, other in (("a", (), self.here, self.there), ("b", ("-n", name), self.there, self.here)):
            ip(*prefix, "addr", "add", mine, "peer", other, "dev", f"{name}{end}")
            ip(*prefix, "link", "set", f"{name}{end}", "mtu", str(MTU), "up")
        ip("-n", name, "link", "set", "lo", "up")
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def cut(self, *, comes: bool = False, goes: bool = False) -> None:
        """Packets get lost from now on, without a word."""
        self.comes, self.goes = comes, goes

    def heal(self) -> None:
        """Packets arrive again."""
        self.cut(comes=True, goes=True)

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while not self._is_over:
            left = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            for end in select.select([self._near, self._far], [], [], min(left, 0.1))[0]:
                packet, is_going = os.read(end, MTU + 100), end == self._near
                if (self.goes if is_going else self.comes) and self._random.random() >= self.loss:
                    other = self._far if is_going else self._near
                    heapq.heappush(under_way, (time.monotonic() + self.delay, next(numbers), other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(under_way)
                with suppress(OSError):
                    os.write(end, packet)

    def close(self) -> None:
        """Nothing is left."""
        self._is_over = True
        self._thread.join(10)
        os.close(self._near), os.close(self._far)
        ip("netns", "del", self.space)


def ip(*words: str) -> None:
    """A command of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def _tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return end


@contextmanager
def far_worker(near: int, *, is_first: bool, path: Path) -> Iterator[tuple[Client, Link]]:
    """A client of so many workers here and one there, by its name the first or the last, and the link to it."""
    link = Link()
    words = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard"]
    words += ["--name", "-" if is_first else "far"]
    worker = None
    try:
        with (
            worker_processes(near, host=link.here) as client,
            (path / "far.log").open("w") as log,
        ):
            address = client.scheduler.address
            worker = subprocess.Popen(
                ["ip", "netns", "exec", link.space, *words, "--host", link.there, "--local-directory", path, address],
                stdout=log, stderr=log,
            )  # fmt: skip
            client.wait_for_workers(near + 1, timeout=120)
            try:
                yield client, link
            finally:
                link.heal()
                worker.terminate()
                worker.wait(60)
    finally:
        if worker is not None and worker.poll() is None:
            worker.kill()
        link.close()
