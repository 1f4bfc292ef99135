"""PyTorch as users write it: a module, compiled or not, autograd, torch.optim.SGD with its defaults."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.benchmarks.peers.serve import Step
from tests.benchmarks.peers.torch_ops import network, tensors

VARIANTS: dict[str, dict[str, Any]] = {"torch_compiled": {"compiled": True}}


def version() -> str:
    return f"torch {torch.__version__}"


def build(
    task: dict[str, Any], weights: list[np.ndarray], data: list[np.ndarray], compiled: bool = False
) -> Step:  # fmt: skip
    net = network(task, weights)
    loss_of = torch.compile(net) if compiled else net
    torch.set_num_threads(task["threads"])
    batch, parameters = tensors(task, data), list(net.parameters())
    if task["mode"] == "forward":
        return Step(torch.no_grad()(lambda: loss_of(*batch)), float)
    optimizer = torch.optim.SGD(parameters, task["rate"])

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        if task["mode"] == "step":
            optimizer.step()
        return loss.detach()

    def state() -> list[np.ndarray]:
        return [(p.detach() if task["mode"] == "step" else p.grad).cpu().numpy() for p in parameters]

    return Step(run, float, state)
