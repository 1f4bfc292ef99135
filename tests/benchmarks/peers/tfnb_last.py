"""tfnb with ``layout="channels_last"``, for sessions that ask for it: sums are rounded in another order."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.benchmarks.peers import tfnb_off
from tests.benchmarks.peers.serve import Step
from tests.benchmarks.peers.tfnb_off import version

__all__ = ["build", "version"]


def build(task: dict[str, Any], weights: list[np.ndarray], data: list[np.ndarray]) -> Step:
    return tfnb_off.build(task, weights, data, layout="channels_last")
