"""What asks for more memory than there is, on tasks (row 11) and servers (row 12), costs a typed error, no process."""

from __future__ import annotations

import pytest
import torch

import tfnb
from tests.cluster.test_cuts import Counters
from tfnb.errors import ResourceExhausted, TfnbError

pytestmark = pytest.mark.slow


def pids(cluster):
    engine = cluster._engine
    return sorted(member.info["pid"] for member in (*engine.tasks, *engine.servers) if member.is_there)


def test_c63_row11_a_kernel_that_finds_no_memory_names_its_node_and_the_bytes_and_no_task_is_lost(connect):
    counters, n = Counters(), 1 << 22
    with tfnb.record("huge"):
        x = tfnb.placeholder(torch.ones(2), name="x")
        out = (x[:, None] * x[None, :]).sum() + 1
    cluster = connect(1)
    tfnb.fit(counters.train, counters.rows(5))
    before = pids(cluster)
    for _ in range(3):
        with pytest.raises(TfnbError, match=str(4 * n * n)) as caught:
            tfnb.run(out, {x: torch.ones(n)})
        assert "test_memory_there.py line" in str(caught.value)
    assert tfnb.fit(counters.train, counters.rows(5)).steps == 5
    assert pids(cluster) == before and counters.counts() == [10, 10]


def test_c63_row12_a_server_refuses_what_is_over_its_budget_and_lives():
    counters = Counters(shards=1)
    with tfnb.connect(1, memory="1GB") as cluster:
        tfnb.fit(counters.train, counters.rows(5))
        before = pids(cluster)
        for place in range(3):
            big = tfnb.Variable(torch.ones(200 << 20, dtype=torch.uint8).view(torch.float32), name=f"big{place}")
            big_too = tfnb.Variable(torch.ones(200 << 20), name=f"more{place}")
            with tfnb.record(f"big{place}"):
                both = big.read()[0] + big_too.read()[0]
            with pytest.raises(ResourceExhausted, match=r"asked \d+, used \d+, limit \d+|bytes"):
                tfnb.run(both)
        assert tfnb.fit(counters.train, counters.rows(5)).steps == 5
        assert pids(cluster) == before and counters.counts() == [10]
