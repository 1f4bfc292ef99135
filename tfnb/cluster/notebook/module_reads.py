"""Hooks that pull values from the servers before a module is called, recorded, or asked for its ``state_dict()``.

The hook of ``state_dict()`` stands in the objects themselves, which are pickled and copied with it: it is a function,
and finds clusters when it is called. A copy has the hook, but does not stand in `_holders`, and nothing is done for it.
Calls of modules have one hook for all, as a recording reads the hooks of each module. Compiled and traced functions
that call a module have the values of the last pull.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.cluster import connected
from tfnb.graph import Variable, current
from tfnb.graph.current import recording
from tfnb.recording.marks.notes import user_level

Holder = nn.Module | Optimizer

_FIRED_AGAIN = r"Using `torch\.compile\(module\)` when there are global hooks"  # what torch says of its wrapper
PATIENCE = 4.0  # seconds that a recording waits for the servers: its samples are to look at
_holders = WeakIdKeyDictionary()  # module or optimizer -> how many clusters hold Variables of it


def pull_first(holder: Holder, *_: object) -> None:
    """The hook of ``state_dict()``: storages show one step of the servers before they are read."""
    if holder in _holders and recording() is None and not _is_inner(holder):
        _pull(holder, "state_dict()")


def _pull_before_call(module: nn.Module, _: object) -> None:
    """The hook of calls of modules; all that a call reads is of one step."""
    if torch.compiler.is_compiling() or module not in _holders or recording() is not None:
        return
    if not connected.notices and not any(cluster.is_outdated for cluster in connected.everyone()):
        return
    if not any(outer in _holders for outer in _callers()):
        _pull(module, f"this call of {type(module).__name__}")


@contextmanager
def _pull_before_recording(recorder: Any) -> Iterator[None]:
    """What each recording opens with: samples are computed with the values of now."""
    if not recorder.lazy:
        _pull(None, "this recording", PATIENCE)
    yield


def _forget() -> None:
    """A forked child has no thread that would ask the servers."""
    _holders.clear()
    current.extensions.remove(_pull_before_recording)


current.extensions.append(_pull_before_recording)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@current.unrecorded
def _pull(holder: Holder | None, reader: str, patience: float | None = None) -> None:
    """Pull the values of one object, or all, that are newer on servers."""
    tensors = None if holder is None else set(map(id, tensors_of(holder)))
    with _untraced():
        told = [cluster.show(tensors, reader, patience) for cluster in connected.everyone()]
        for notice in connected.notices if not any(told) else ():
            warnings.warn(f"{reader} has the values here: {notice()}", stacklevel=user_level(None))


@contextmanager
def _untraced() -> Iterator[None]:
    """Inside, nothing is seen by the modes and tracers of torch that are active."""
    tracing: Any = torch._C
    state = tracing._get_tracing_state()
    tracing._set_tracing_state(None)
    try:
        with _disable_current_modes():
            yield
    finally:
        tracing._set_tracing_state(state)


def _callers() -> Iterator[nn.Module]:
    """The modules in whose calls this one is made, but for the module itself; innermost first."""
    frame, code, own = sys._getframe(1), nn.Module._call_impl.__code__, True
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_code is code:
            if not own:
                yield frame.f_locals["self"]
            own = False


def tensors_of(holder: Holder) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a module, submodules included, or the parameters of an optimizer."""
    if isinstance(holder, Optimizer):
        return (parameter for group in holder.param_groups for parameter in group["params"])
    return chain(holder.parameters(), holder.buffers())


def _is_inner(holder: Holder) -> bool:
    """Whether ``state_dict()`` is called by the ``state_dict()`` of an outer module that has pulled already."""
    frame, code = sys._getframe(2), nn.Module.state_dict.__code__
    if frame.f_code is not code:
        return False
    destination, outer = frame.f_locals["destination"], frame.f_back
    while outer is not None:
        if outer.f_code is code and outer.f_locals["destination"] is destination and outer.f_locals["self"] in _holders:
            return True
        outer = outer.f_back
    return False


class Hooks:
    """The hooks of one cluster, for everything whose ``state_dict()`` has values of its Variables."""

    def __init__(self) -> None:
        self._handles = WeakIdKeyDictionary()  # module or optimizer -> the handle of its hook
        warnings.filterwarnings("ignore", _FIRED_AGAIN)  # that is harmless: the second time nothing is newer
        self._of_calls = register_module_forward_pre_hook(_pull_before_call)

    def add(self, variables: Iterable[Variable]) -> None:
        """Hook the modules that hold the Variables, at any depth, and the optimizers that lead them."""
        variables = list(variables)
        held = (variable.held.tensor() for variable in variables if variable.held is not None)
        wanted = {id(tensor) for tensor in held if tensor is not None}
        found: list[Holder] = [variable.leads.optimizer for variable in variables if variable.leads is not None]
        for module in _modules() if wanted else ():
            with suppress(Exception):  # one that is not made yet, or whose class gives its parameters in its own way
                if not wanted.isdisjoint(map(id, tensors_of(module))):
                    found.append(module)
        for holder in found:
            if holder not in self._handles:
                kind: Any = Optimizer if isinstance(holder, Optimizer) else nn.Module  # scripted modules refuse
                self._handles[holder] = kind.register_state_dict_pre_hook(holder, pull_first)
                _holders[holder] = _holders.get(holder, 0) + 1

    def remove(self) -> None:
        """The cluster is closed."""
        self._of_calls.remove()
        for holder, handle in list(self._handles.items()):
            handle.remove()
            _holders[holder] -= 1
            if not _holders[holder]:
                del _holders[holder]
        self._handles.clear()


def _modules() -> list[nn.Module]:
    """All modules of the process: the owner of a tensor need not be known to a recording, nor the modules around."""
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
