"""Ctrl-C in a recording: raised in the user's code, never in the middle of what records.

Torch calls the recorder from C++, and Python calls it where a dead tensor is cleaned up: what is raised there is lost,
or becomes a TypeError of the operator. So an interrupt that comes there waits for the line below which it came: that
frame is traced, and its next instruction raises (tried with Python 3.11). A recording without an interrupt pays
nothing for that. A second interrupt counts at once, wherever it comes.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import FrameType
from typing import Any, Self

from tfnb.interrupts import handled


class _Kind(Enum):
    LANDS = "an interrupt is raised there: the user's code, and rooms of tfnb whose work may end anywhere"
    PASSES = "as its caller"
    WAITS = "an interrupt waits until the caller that it lands in goes on"


_ROOMS = {"recording": _Kind.WAITS, "graph": _Kind.WAITS, "interrupts": _Kind.WAITS, "kernels": _Kind.PASSES}
_MODULES = {
    "tfnb.recording.values.interpret": _Kind.LANDS,  # loops that a sample takes long to end
    "contextlib": _Kind.WAITS,  # between entering a block and being inside of it
    "weakref": _Kind.WAITS,
    "_weakrefset": _Kind.WAITS,
    "torch.utils.weak": _Kind.WAITS,
    "torch._ops": _Kind.WAITS,  # the dispatcher calls it
}
_PACKAGES = sys.stdlib_module_names | {"torch", "sympy", "mpmath", "numpy", "malt"}
_HOOKS = {"__torch_function__", "__torch_dispatch__", "__enter__", "__exit__", "__del__"}
_THROUGH = {"inner"}  # in contextlib: a function under a decorator, for as long as it takes


class at_user_lines:
    """Context manager: an interrupt of the block is raised once, in user code, by the handler that was there before.

    In the main thread, where that handler is Python's own or another function; elsewhere nothing changes.
    """

    def __init__(self) -> None:
        self._handled = handled(self.on)
        self._number = 0  # of the signal that waits
        self._lands: FrameType | None = None  # where it is raised
        self._traced: tuple[Any, bool] = (None, False)  # how that frame was traced before
        self._tracer: Any = None  # of the thread, before
        self._is_open = False

    def __enter__(self) -> Self:
        self._handled.__enter__()
        self._is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._handled.__exit__()
        self._is_open = False
        try:
            self.check()
        finally:
            if self._tracer is not None and sys.gettrace() is None:
                sys.settrace(self._tracer)  # Python drops the one that raised

    def check(self) -> None:
        """Raise an interrupt that waits."""
        if self._lands is not None:
            self._raise(self._number, self._lands)

    def on(self, number: int, frame: FrameType | None) -> None:
        """The handler. A program that put it aside may set it again after the recording: then it passes on."""
        lands = _landing(frame) if self._is_open and self._lands is None else None
        if lands is None:
            self._raise(number, frame)
        else:
            self._wait(number, lands)

    def _wait(self, number: int, lands: FrameType) -> None:
        self._number, self._lands = number, lands
        self._traced, self._tracer = (lands.f_trace, lands.f_trace_opcodes), sys.gettrace()
        lands.f_trace, lands.f_trace_opcodes = self._landed, True
        sys.settrace(self._called)

    def _landed(self, frame: FrameType, event: str, arg: Any) -> None:
        self._raise(self._number, frame)

    def _called(self, frame: FrameType, event: str, arg: Any) -> None:
        """A function of the user's that is called before the line goes on: the body of a branch."""
        if _kind(frame) is _Kind.LANDS and self._lands is not None:
            self._raise(self._number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._lands is not None:
            self._lands.f_trace, self._lands.f_trace_opcodes = self._traced
            self._lands = None
            sys.settrace(self._tracer)
        before = self._handled.before
        while isinstance(outer := getattr(before, "__self__", None), at_user_lines):
            before = outer._handled.before
        if before is not None:
            before(number, frame)
        self._tracer = None


def _landing(frame: FrameType | None) -> FrameType | None:
    """The frame that an interrupt of ``frame`` waits for; None where it may be raised at once."""
    waits = False
    while frame is not None:
        kind = _kind(frame)
        if kind is _Kind.LANDS:
            return frame if waits else None
        waits = waits or kind is _Kind.WAITS
        frame = frame.f_back
    return None


def _kind(frame: FrameType) -> _Kind:
    module, function = frame.f_globals.get("__name__") or "", frame.f_code.co_name
    top, _, rest = module.partition(".")
    is_ours = top == "tfnb"
    if not is_ours and top not in _PACKAGES:
        return _Kind.LANDS if top in sys.modules else _Kind.PASSES  # what a namedtuple made has none
    if function in _HOOKS:
        return _Kind.WAITS
    if module in _MODULES:
        return _Kind.PASSES if function in _THROUGH else _MODULES[module]
    return _ROOMS.get(rest.partition(".")[0], _Kind.LANDS) if is_ours else _Kind.PASSES
