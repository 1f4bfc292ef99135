"""tfnb with the program's loop as a loop of the graph, which `tfnb_off` unrolls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import tfnb
from tests.benchmarks.peers import tfnb_off, torch_ops
from tests.benchmarks.peers.serve import Step
from tests.benchmarks.peers.tfnb_off import version

__all__ = ["build", "version"]


def loop(cell: Callable[..., Any], state: Any, xs: Any, time: int) -> Any:
    return tfnb.fold(cell, state, xs)


def build(task: dict[str, Any], weights: list[np.ndarray], data: list[np.ndarray]) -> Step:
    return tfnb_off.build(task, weights, data, ops=SimpleNamespace(**vars(torch_ops) | {"loop": loop}))
