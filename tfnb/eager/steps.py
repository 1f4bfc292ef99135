"""``optimizer.step()`` of torch becomes a recorded step, by torch's own hook before each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tfnb.errors import Unsupported
from tfnb.graph import current
from tfnb.recording.marks.while_recording import SharedContext
from tfnb.train.from_class import has_own_step, step_within
from tfnb.train.twins import from_torch, record_own_steps


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``optimizer.step()`` of a torch optimizer becomes a recorded step, or is refused.

    torch's own hook before each step lets the step run over no parameters; its closure records and gives the Operation.
    A ``step`` of the user's own need not call its closure, so there its class has another one: `record_own_steps`.
    """
    if current.recording() is None:
        return None
    if getattr(type(optimizer).step, "is_recorded", False):
        return None
    if has_own_step(type(optimizer)):
        raise Unsupported(
            f"{type(optimizer).__name__} was defined in this recording, which records its step() only if the class was "
            "there before: define the class above"
        )
    from_torch(optimizer)  # which refuses a class without a twin
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    idle = object.__new__(type(optimizer))
    idle.__dict__.update(optimizer.__dict__, param_groups=[])
    return (idle, lambda: _record(optimizer, closure)), {}


def _record(optimizer: torch.optim.Optimizer, closure: Any) -> Any:
    if (inner := step_within()) is not None:
        return inner(optimizer, closure)
    return from_torch(optimizer).step(closure)


@contextmanager
def _steps() -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(_before_step)
    record_own_steps(_record)
    try:
        yield
    finally:
        handle.remove()


recorded_steps = SharedContext(_steps)
