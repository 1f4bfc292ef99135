"""A table of more bytes than the machine has is made on servers and trained there in the memory of its rows."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F

import tfnb
from tfnb.errors import ResourceExhausted

WIDTH = 256
HUGE = 3 * psutil.virtual_memory().total // 2 // (4 * WIDTH)  # rows
STEPS, TAKEN, MOST = 8, 6, 100 << 20
pytestmark = pytest.mark.slow


def peak(dask_worker: Any) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


class Words:
    """Rows of a huge table beside a small weight."""

    def __init__(self, make: Any) -> None:
        torch.manual_seed(0)
        self.table = tfnb.Variable(0.0, shape=(HUGE, WIDTH), name="table")
        self.weight = tfnb.Variable(torch.randn(WIDTH) / 16, name="weight")
        self.data = torch.randint(HUGE, (2 * STEPS, TAKEN)), torch.randn(2 * STEPS)
        with tfnb.record("huge"):
            self.at = tfnb.placeholder(self.data[0][:2], shape=(None, None))
            self.wanted = tfnb.placeholder(self.data[1][:2])
            found = F.embedding(self.at, self.table.read()).mean(1) @ self.weight.read()
            self.loss = (found - self.wanted).square().mean()
            self.train = make().minimize(self.loss)

    def fit(self, mode: str = "sync") -> tfnb.RunResult:
        data = dict(zip((self.at, self.wanted), self.data, strict=True))
        return tfnb.fit(self.train, data, steps=STEPS, batch_size=2, shuffle=False, mode=mode)

    def rows(self) -> torch.Tensor:
        return self.table.storage[self.data[0].unique()]


@pytest.mark.parametrize(
    "make", [lambda: tfnb.train.SGD(0.5), lambda: tfnb.train.Adam(0.01, sparse="lazy")], ids=["SGD", "Adam"]
)
def test_a_table_of_more_than_the_memory_trains_there_and_comes_home_by_rows(dask, make):
    local = Words(make)
    local.fit()
    there = Words(make)
    before, here = dask.run(peak), psutil.Process().memory_info().rss
    with tfnb.connect(dask, ps=2) as cluster:
        there.fit()
        torch.testing.assert_close(there.rows(), local.rows(), rtol=1e-5, atol=1e-6)
        assert (there.rows() != 0).all()
        there.table.storage[11] = 3.0  # what is written here goes there before the next run
        value, _ = tfnb.run([there.loss, there.train], {there.at: [[11, 12] * (TAKEN // 2)], there.wanted: [0.0]})
        assert value > 0
        assert cluster.pull() and (there.table.storage[12] != 0).all()
        for worker, now in dask.run(peak).items():
            assert now - before[worker] < MOST
        with pytest.raises(ResourceExhausted, match="bytes"):
            there.table.assign(torch.ones(1).expand(HUGE, WIDTH))
    assert there.rows().isfinite().all()
    assert psutil.Process().memory_info().rss - here < MOST


def test_rows_over_the_budget_of_a_server_are_refused_and_training_goes_on():
    with tfnb.connect(1, memory="1200MB"):
        words = Words(lambda: tfnb.train.SGD(0.5))
        words.fit()
        before, taken = words.rows(), 0
        with pytest.raises(ResourceExhausted, match=r"bytes on this parameter server: asked \d+, used \d+, limit \d+"):
            for _ in range(12):
                tfnb.run(words.train, {words.at: torch.randint(HUGE, (1, 30_000)), words.wanted: [1.0]})
                taken += 30_000 * mmap.PAGESIZE
        assert 100e6 < taken < 360e6
        words.fit()
        assert not torch.equal(words.rows(), before)
