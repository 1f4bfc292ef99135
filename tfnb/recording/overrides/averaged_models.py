"""`torch.optim.swa_utils.AveragedModel.update_parameters` of a recording: the first update is a choice of each run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from tfnb.recording.values.recording import open_recording


def recorded_update(original: Callable[[AveragedModel, torch.nn.Module], None]) -> Callable[..., None]:
    """`AveragedModel.update_parameters` with "is this the first update" as a function of the count, not a Python
    branch.
    """

    def update_parameters(self: AveragedModel, model: torch.nn.Module) -> None:
        if open_recording() is None:
            return original(self, model)
        pairs = list(zip(_tensors(self, self.module), _tensors(self, model), strict=False))
        is_first = self.n_averaged == 0
        with torch.no_grad():
            values = [(p.detach(), q.detach().to(p.device)) for p, q in pairs]
            for (p, q), new in zip(values, _averages(self, values), strict=True):
                p.copy_(torch.where(is_first.to(p.device), q, new))
            if not self.use_buffers:
                for p, q in zip(self.module.buffers(), model.buffers(), strict=True):
                    p.copy_(q.to(p.device))
        self.n_averaged += 1
        return None

    return update_parameters


def _tensors(averaged: AveragedModel, module: torch.nn.Module) -> Any:
    return chain(module.parameters(), module.buffers()) if averaged.use_buffers else module.parameters()


def _averages(averaged: AveragedModel, values: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """The averages of (average, parameter) pairs after an update, as new tensors."""
    if averaged.multi_avg_fn is None:
        average = averaged.avg_fn or get_swa_avg_fn()
        return [average(p, q, averaged.n_averaged.to(p.device)) for p, q in values]
    old = [p.clone() for p, _ in values]  # the function writes into what it is given
    groups = _group_tensors_by_device_and_dtype([old, [q for _, q in values]])  # type: ignore[list-item]
    for (device, _), ((mine, others), _) in groups.items():
        averaged.multi_avg_fn(mine, others, averaged.n_averaged.to(device))  # type: ignore[arg-type]
    return old
