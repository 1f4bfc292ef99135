"""``optimizer.step()`` of torch becomes a recorded step; what would happen once, while recording, is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tfnb.errors import Unsupported
from tfnb.graph import current
from tfnb.recording.marks.while_recording import Shared, swapped
from tfnb.recording.values.recording import open_recording
from tfnb.train.from_torch import from_torch


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
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


def _is_new(scheduler: Any) -> bool:
    """Whether a scheduler is being made: constructors step, too."""
    return "_last_lr" not in scheduler.__dict__ or getattr(scheduler, "_is_initial", False)


def _refused(
    owner: Any, name: str, why: str, *, but: Callable[[Any], bool] = lambda first: False
) -> tuple[Any, str, Any]:  # fmt: skip
    """A method or function that is an error inside a recording. ``but``: of which first argument it is not."""
    original = getattr(owner, name)
    label = f"{owner.__name__}.{name}".removesuffix(".__enter__")

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = open_recording()
        if recorder is not None and not (args and but(args[0])):
            raise Unsupported(f"{label}{why}{recorder.tape.at()}")
        return original(*args, **kwargs)

    return owner, name, call


_SCHEDULER = (
    "() inside a recording would change the rate once, while recording: call it outside, between runs; a recorded "
    "optimizer.step() reads the rate at each run"
)
_SCALER = (
    "() inside a recording would decide once, while recording, which steps are taken: use bfloat16, which needs no "
    "scaling, or GradScaler(enabled=False), or scale the loss by a number of your own"
)
_PACKING = (
    " are not called for what is recorded: use tfnb.recompute or torch.utils.checkpoint to save memory, or a "
    "torch.autograd.Function"
)
_GROUP = " is not recorded: use Tensor.register_hook, or read .grad after backward()"


@contextmanager
def _steps() -> Iterator[None]:
    schedulers = [kind for kind in _all_schedulers(LRScheduler) if "step" in vars(kind)]
    scaler, off = torch.amp.GradScaler, lambda scaler: not scaler.is_enabled()
    handle = register_optimizer_step_pre_hook(_before_step)
    try:
        with swapped(
            *(_refused(kind, "step", _SCHEDULER, but=_is_new) for kind in schedulers),
            *(_refused(scaler, name, _SCALER, but=off) for name in ("scale", "unscale_", "step", "update")),
            _refused(saved_tensors_hooks, "__enter__", _PACKING, but=lambda h: isinstance(h, graph.save_on_cpu)),
            _refused(graph, "register_multi_grad_hook", _GROUP),
        ):
            yield
    finally:
        handle.remove()


recorded_steps = Shared(_steps)


def _all_schedulers(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all_schedulers(child)
