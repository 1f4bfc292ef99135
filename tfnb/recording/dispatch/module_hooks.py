"""Modules while recording, by torch's global forward hooks: where their nodes stand, and what they do to themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from tfnb.errors import Unsupported
from tfnb.graph import current
from tfnb.graph.graph import new_id
from tfnb.recording.marks.while_recording import Shared
from tfnb.recording.values.recording import Recording, open_recording
from tfnb.recording.writes.in_place_calls import rebind


def _before(module: torch.nn.Module, args: Any) -> None:
    recording = open_recording()
    if recording is not None:
        _refuse_backward_hooks(module, recording)
        if recording.scopes.module is None:
            recording.tape.calls.append(range(new_id(), sys.maxsize))
        recording.scopes.enter(module)


def _after(module: torch.nn.Module, args: Any, output: Any) -> None:
    recording = open_recording()
    if recording is not None:
        _put_back(module, recording.scopes.exit(module), recording)
        calls = recording.tape.calls
        if recording.scopes.module is None and calls:
            calls[-1] = range(calls[-1].start, new_id())


@contextmanager
def _hooks() -> Iterator[None]:
    pre = nn_module.register_module_forward_pre_hook(_before)
    try:
        post = nn_module.register_module_forward_hook(_after, always_call=True)
        try:
            yield
        finally:
            post.remove()
    finally:
        pre.remove()


follow_modules = Shared(_hooks)


def _refuse_backward_hooks(module: torch.nn.Module, recording: Recording) -> None:
    """They hang on the engine of autograd, which a recording has not; they must not be passed over in silence."""
    everywhere = nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks
    if torch.is_grad_enabled() and (everywhere or module._backward_hooks or module._backward_pre_hooks):
        raise Unsupported(
            f"{type(module).__name__} has a backward hook, which is not recorded: use register_hook on its input or "
            f"output tensor{recording.tape.at()}"
        )


def _put_back(module: torch.nn.Module, before: dict[str, torch.Tensor | None], recording: Recording) -> None:
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
                f"{now.dtype}{list(now.shape)} while recording: make it so in the constructor, or, if it is kept from "
                f"call to call, by a call of the model before the recording{recording.tape.at()}"
            )
        rebind(recording, old, now)
