"""A Dask cluster that is restarted while it trains: an error soon, and another connection at once."""

from __future__ import annotations

import threading

import pytest

import tfnb
from tests.cluster.conftest import WORKERS, workers
from tests.cluster.test_cuts import Counters
from tfnb.errors import ParameterServerLost


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c63_row27_a_dask_cluster_that_is_restarted_in_mid_training(connect, dask, mode: str) -> None:
    counters = Counters(shards=1)
    connect(3)
    restart = threading.Thread(target=lambda: dask.restart(wait_for_workers=False))
    rows = counters.rows(100_000, lambda step: restart.start() if step == 30 else None)
    with pytest.raises(ParameterServerLost, match="The local variables hold the last pulled values, of step") as lost:
        tfnb.fit(counters.train, rows, mode=mode, timeout=100, restarts=0)
    assert counters.counts() == [lost.value.details["pulled_step"]]
    with tfnb.connect(dask, ps=1, timeout=100):  # at once: workers still come and go
        tfnb.fit(counters.train, counters.rows(20), mode=mode, timeout=60)
    assert counters.counts() == [lost.value.details["pulled_step"] + 20]
    restart.join(60)
    workers(dask, WORKERS)
