"""torch.compile of the model; the optimizer stays eager."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.benchmarks.peers.serve import Step
from tests.benchmarks.peers.torch_eager import stepped, version
from tests.benchmarks.peers.torch_ops import network

__all__ = ["build", "version"]


def build(task: dict[str, Any], weights: list[np.ndarray], data: list[np.ndarray]) -> Step:
    return stepped(task, net := network(task, weights), torch.compile(net), data)
