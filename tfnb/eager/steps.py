"""``optimizer.step()`` of torch becomes a recorded step, by torch's own hook before each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tfnb.graph import current
from tfnb.recording.marks.while_recording import SharedContext
from tfnb.train.from_torch import from_torch


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``optimizer.step()`` of a torch optimizer becomes a recorded step, or is refused.

    torch's own hook before each step lets the step run over no parameters; its closure records and gives the Operation.
    """
    if current.recording() is None:
        return None
    twin = from_torch(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")

    def record() -> Any:
        if closure is not None:
            closure()
        return twin.step()

    idle = object.__new__(type(optimizer))
    idle.__dict__.update(optimizer.__dict__, param_groups=[])
    return (idle, record), {}


@contextmanager
def _steps() -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(_before_step)
    try:
        yield
    finally:
        handle.remove()


recorded_steps = SharedContext(_steps)
