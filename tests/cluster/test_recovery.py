"""Training goes on by itself after a parameter server was killed: each step counts once, in whatever mode."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tests.cluster.conftest import WORKERS, workers
from tests.cluster.test_cuts import Counters
from tfnb.errors import ParameterServerLost

STEPS = 400


@pytest.fixture(autouse=True)
def _all_workers(dask: Any) -> Iterator[None]:
    """Those that tests kill are started again."""
    yield
    workers(dask, WORKERS)


def kill_server(cluster: Any, at: int = -1) -> None:
    """SIGKILL."""
    os.kill(cluster._engine.servers[at].info["pid"], signal.SIGKILL)


class Killer:
    """Kills a server when a step of the training is told."""

    def __init__(self, cluster: Any, *steps: int, at: int = -1) -> None:
        self.cluster, self.left, self.at = cluster, list(steps), at
        self.heard: list[tuple[int, bool]] = []

    def on_step(self, progress: Any) -> None:
        self.heard.append((progress.step, progress.again))
        if self.left and progress.step >= self.left[0]:
            self.left.pop(0)
            kill_server(self.cluster, self.at)


@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}, {"backup": 1}], ids=str)
def test_no_step_is_lost_or_counted_twice(connect: Any, options: dict[str, Any], capsys: Any) -> None:
    counters = Counters(pause=2)
    cluster = connect(2)
    before = len(tfnb.recovery_log())
    killer = Killer(cluster, 150)
    result = tfnb.fit(counters.train, {counters.x: torch.ones(4 * STEPS)}, batch_size=4, callbacks=[killer], **options)
    assert result.steps == STEPS and counters.counts() == [STEPS, STEPS]
    (recovery,) = tfnb.recovery_log()[before:]
    assert recovery.redone == recovery.step - recovery.kept >= 0 and "was lost" in recovery.lost
    assert str(recovery) in capsys.readouterr().out
    assert killer.heard[-1][0] == STEPS and len(killer.heard) >= STEPS - recovery.kept
