"""Modules while recording, by torch's global forward hooks: where their nodes stand, and what they do to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from tfnb.errors import Unsupported
from tfnb.graph import current
from tfnb.recording.packed import after_call, packed_call
from tfnb.recording.scopes import Scopes
from tfnb.recording.writes import rebind


@contextmanager
def follow_modules(scopes: Scopes, recording: Any) -> Iterator[None]:
    """Global module hooks for the time of a recording; they act on this thread's recording only."""

    def before(module: torch.nn.Module, args: Any) -> Any:
        if current.recording() is not recording:
            return None
        _refuse_backward_hooks(module, recording)
        scopes.enter(module)
        return packed_call(recording, module, args)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if current.recording() is recording:
            after_call(module)
            _put_back(module, scopes.exit(module), recording)

    pre = nn_module.register_module_forward_pre_hook(before)
    try:
        post = nn_module.register_module_forward_hook(after, always_call=True)
        try:
            yield
        finally:
            post.remove()
    finally:
        pre.remove()


def _refuse_backward_hooks(module: torch.nn.Module, recording: Any) -> None:
    """They hang on the engine of autograd, which a recording has not; they must not be passed over in silence."""
    everywhere = nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks
    if torch.is_grad_enabled() and (everywhere or module._backward_hooks or module._backward_pre_hooks):
        raise Unsupported(
            f"{type(module).__name__} has a backward hook, which is not recorded: use register_hook on its input or "
            f"output tensor{recording.tape.at()}"
        )


def _put_back(module: torch.nn.Module, before: dict[str, torch.Tensor | None], recording: Any) -> None:
    """``self.buffer = value`` in a forward is a write: recorded, and the module has its own tensor again."""
    for name, now in module._buffers.items():
        old = before.get(name)
        if now is old or now is None or current.plain(now) is now:
            continue
        module._buffers[name] = old
        if old is None or old.shape != now.shape or old.dtype != now.dtype:
            found = "nothing" if old is None else f"{old.dtype}{list(old.shape)}"
            raise Unsupported(
                f"{type(module).__name__} gives its buffer {name}, which held {found}, a value of "
                f"{now.dtype}{list(now.shape)} while recording: make it so in the constructor{recording.tape.at()}"
            )
        rebind(recording, old, now)
