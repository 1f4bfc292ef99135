"""Modules while recording, by torch's global hooks: the scopes of their nodes, and new buffers and Parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from tfnb.errors import Unsupported
from tfnb.graph.graph import new_id
from tfnb.recording.marks.while_recording import SharedContext
from tfnb.recording.values.recording import Recording, open_recording


def _before(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    recording = open_recording()
    if recording is not None:
        _refuse_backward_hooks(module, recording)
        is_outermost = recording.scopes.module is None
        if is_outermost:
            recording.tape.calls.append(range(new_id(), sys.maxsize))
        recording.buffers.meet([module])
        recording.scopes.enter(module, recording.buffers.held(module, deep=is_outermost))
        if not isinstance(module, torch.jit.ScriptModule):
            recording.python.enter(module)


def _after(module: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
    recording = open_recording()
    if recording is not None:
        recording.buffers.compare_held(recording.scopes.exit(module))
        recording.python.exit(module)
        calls = recording.tape.calls
        if recording.scopes.module is None and calls:
            calls[-1] = range(calls[-1].start, new_id())


def _buffer(module: torch.nn.Module, name: str, new: torch.Tensor | None) -> Any:
    """``m.h = t`` and ``register_buffer``, before the module has the tensor."""
    recording = open_recording()
    if recording is None or isinstance(module, torch.jit.ScriptModule):
        return None
    return recording.buffers.register(module, name, new)


def _parameter(module: torch.nn.Module, name: str, new: torch.nn.Parameter | None) -> None:
    recording = open_recording()
    if recording is not None and not isinstance(module, torch.jit.ScriptModule):
        recording.buffers.replace_parameter(module, name, new)


_REGISTERED = (
    partial(nn_module.register_module_forward_pre_hook, _before),
    partial(nn_module.register_module_forward_hook, _after, always_call=True),
    partial(nn_module.register_module_buffer_registration_hook, _buffer),
    partial(nn_module.register_module_parameter_registration_hook, _parameter),
)


@contextmanager
def _hooks() -> Iterator[None]:
    with ExitStack() as stack:
        for register in _REGISTERED:
            stack.callback(register().remove)
        yield


follow_modules = SharedContext(_hooks)


def _refuse_backward_hooks(module: torch.nn.Module, recording: Recording) -> None:
    """Raise Unsupported for backward hooks: they need the autograd engine, and a recording has none."""
    everywhere = nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks
    if torch.is_grad_enabled() and (everywhere or module._backward_hooks or module._backward_pre_hooks):
        raise Unsupported(
            f"{type(module).__name__} has a backward hook, which is not recorded: use register_hook on its input or "
            f"output tensor{recording.tape.at()}"
        )
