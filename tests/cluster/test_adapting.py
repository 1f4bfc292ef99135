"""Workers that start while a notebook connects, that have resources or a lifetime, and that Dask may close again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from distributed import Client

import tfnb
from tests.cluster.conftest import worker_processes
from tests.cluster.test_modes import until
from tfnb.errors import DeadlineExceeded, InvalidArgument

SOON = 0.1  # seconds between two decisions of adaptive scaling


@contextmanager
def by_address(client: Client) -> Iterator[Client]:
    """A client that has no cluster object."""
    with Client(client.scheduler.address, set_as_default=False) as other:
        yield other


def train() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        w = tfnb.Variable(torch.zeros(3))
        step = tfnb.train.SGD(0.1).minimize(((x @ w - 1) ** 2).mean())
    tfnb.fit(step, {x: torch.ones(64, 3)}, batch_size=4, epochs=2)


def minimum(client: Client) -> int:
    return int(client.cluster._adaptive.minimum)


def test_adaptive_scaling_keeps_the_workers_of_a_connected_cluster() -> None:
    with worker_processes(0) as client:
        client.cluster.adapt(minimum=0, maximum=3, interval=SOON, wait_count=2)
        with tfnb.connect(client, ps=1, workers=3, timeout=120) as cluster:
            assert len(cluster.tasks) == 2 and minimum(client) == 3
            time.sleep(20 * SOON)
            train()
            assert len(cluster.tasks) == 2 and len(client.scheduler_info()["workers"]) == 3
        assert minimum(client) == 0


def test_adaptive_scaling_that_begins_later() -> None:
    with worker_processes(2) as client, tfnb.connect(client, ps=1, timeout=120) as cluster:
        client.cluster.adapt(minimum=0, maximum=2, interval=1.0, wait_count=2)
        time.sleep(4)
        train()
        assert len(cluster.tasks) == 1 and minimum(client) == 2
        assert "adaptive scaling keeps 2 workers" in str(cluster.status())
        client.cluster.adapt(minimum=1, maximum=2, interval=10)
        time.sleep(2)
        assert minimum(client) == 2
    assert minimum(client) == 1


def test_of_an_address_it_is_said() -> None:
    with worker_processes(2) as client, by_address(client) as other:
        client.cluster.adapt(minimum=2, maximum=3, interval=SOON)
        with tfnb.connect(other, ps=1, timeout=120) as cluster:
            until(lambda: "Dask's adaptive scaling is on" in str(cluster.status()))
            assert "adapt(minimum=2" in str(cluster.status())


def test_a_lifetime_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with worker_processes(2, lifetime="1 hour") as client, tfnb.connect(client, ps=1, timeout=120):
        said = capsys.readouterr().out
        assert said.count("has a lifetime of 3600 s") == 2 and "its values are lost then" in said


@pytest.mark.parametrize("asked", [{"ps": 2}, {"ps": 1, "workers": 3}])
def test_workers_that_start_are_waited_for(asked: dict[str, int]) -> None:
    with worker_processes(1) as client, by_address(client) as other:
        later = threading.Timer(1.0, client.cluster.scale, [3])
        later.start()
        with tfnb.connect(other, timeout=120, **asked) as cluster:
            assert len(cluster.servers) == asked["ps"] and len(cluster.tasks) == 3 - asked["ps"]
            train()


def test_those_that_do_not_come() -> None:
    with worker_processes(1) as client, by_address(client) as other:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"has 1 of 4 workers after .* or connect\(workers=1\) does with "):
            tfnb.connect(other, ps=3, timeout=2)
        assert time.monotonic() - begin < 20
        with tfnb.connect(other, ps=3, workers=1, timeout=120) as cluster:
            assert len(cluster._engine.shards) == 3
        with tfnb.connect(client, ps=3, timeout=120) as cluster:  # nothing starts there
            assert len(cluster._engine.shards) == 3


def test_resources() -> None:
    with worker_processes(2, resources={"GPU": 2}) as client, by_address(client) as other:
        client.cluster.new_spec["options"]["resources"] = None
        with tfnb.connect(other, ps=1, resources={"GPU": 1}, timeout=120) as cluster:
            client.cluster.scale(3)
            client.wait_for_workers(3, timeout=60)
            time.sleep(2)
            assert len(cluster.tasks) == 1
            train()
        with pytest.raises(DeadlineExceeded, match="has 0 of 1 workers with GPU=3"):
            tfnb.connect(other, resources={"GPU": 3}, timeout=1)


@pytest.mark.parametrize(
    "wrong", [{"workers": 0}, {"workers": True}, {"ps": 1.0}, {"resources": ["GPU"]}, {"resources": {"GPU": 0}}]
)
def test_wrong_arguments(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=f"^{next(iter(wrong))}="):
        tfnb.connect("tcp://127.0.0.1:9", timeout=1, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"connect\(2\) starts its own"):
        tfnb.connect(2, workers=3)
