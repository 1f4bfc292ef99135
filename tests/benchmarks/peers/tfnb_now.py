"""tfnb with the whole step compiled at its first run, as ``compile="auto"`` does later where it is faster."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.benchmarks.peers import tfnb_off
from tests.benchmarks.peers.serve import Step
from tests.benchmarks.peers.tfnb_off import version

__all__ = ["build", "version"]


def build(task: dict[str, Any], weights: list[np.ndarray], data: list[np.ndarray]) -> Step:
    return tfnb_off.build(task, weights, data, compile="now")
