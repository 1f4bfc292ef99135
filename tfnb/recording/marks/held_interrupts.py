"""Ctrl-C and other signals in a recording: handled between ops, never inside the recorder.

Torch calls the recorder from C++, and Python calls it where a dead tensor is cleaned up: what is raised there is lost,
or becomes a TypeError of the operator. So a signal that comes there is held, an interrupt as well as an alarm whose
handler raises, and `raise_held` calls the program's handler when the op ends, or the next one, or the recording. In the
user's own code it is called at once. A second signal of the same number counts at once, wherever it comes.
"""

from __future__ import annotations

import _signal
import sys
import threading
from enum import Enum
from types import FrameType
from typing import Self

from tfnb.interrupts import handled


class _Kind(Enum):
    LANDS = "an interrupt is raised there: the user's code, and rooms of tfnb whose work may end anywhere"
    PASSES = "as its caller"
    WAITS = "an interrupt waits until the op of the caller that it lands in ends"


_ROOMS = {"recording": _Kind.WAITS, "graph": _Kind.WAITS, "interrupts": _Kind.WAITS, "kernels": _Kind.PASSES}
_MODULES = {
    "tfnb.recording.values.interpret": _Kind.LANDS,  # loops that a sample takes long to end
    "contextlib": _Kind.WAITS,  # between entering a block and being inside of it
    "weakref": _Kind.WAITS,
    "_weakrefset": _Kind.WAITS,
    "torch.utils.weak": _Kind.WAITS,
    "torch._ops": _Kind.WAITS,  # the dispatcher calls it
}
_SIGNALS = range(1, _signal.NSIG)
_PACKAGES = sys.stdlib_module_names | {"torch", "sympy", "mpmath", "numpy", "malt"}
_HOOKS = {"__torch_function__", "__torch_dispatch__", "__enter__", "__exit__", "__del__"}
_THROUGH = {"inner"}  # in contextlib: a function under a decorator, for as long as it takes


class at_user_lines:
    """Context manager: a signal in the block is handled once, in user code, by the handler that was there before.

    In the main thread, where that handler is Python's own or another function; elsewhere nothing changes.
    """

    def __init__(self) -> None:
        self._handled: dict[int, handled] = {}
        self._is_open = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = [number for number in _SIGNALS if callable(_signal.getsignal(number))]
            self._handled = {number: handled(self.on, number) for number in numbers}
            for each in self._handled.values():
                each.__enter__()
        self._is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        for each in self._handled.values():
            each.__exit__()
        self._is_open = False
        raise_held()

    def on(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. Installed again after the recording, by a program that saved it, the handler forwards."""
        is_first = all(number != held for _, held, _ in _held)
        lands = _landing(frame) if self._is_open and is_first else None
        if lands is None:
            self.call(number, frame)
        else:
            _held.append((self, number, lands))

    def call(self, number: int, frame: FrameType | None) -> None:
        """Call the program's own handler; Python's default one raises KeyboardInterrupt."""
        _held[:] = [held for held in _held if held[1] != number]
        before = self._handled[number].before
        while isinstance(outer := getattr(before, "__self__", None), at_user_lines):
            before = outer._handled[number].before
        if before is not None:
            before(number, frame)


_held: list[tuple[at_user_lines, int, FrameType]] = []  # the signals that wait: only the main thread gets any


def raise_held() -> None:
    """Run the handlers of pending signals, and raise their exceptions."""
    while _held and threading.current_thread() is threading.main_thread():
        held, number, frame = _held[0]
        held.call(number, frame)


def _landing(frame: FrameType | None) -> FrameType | None:
    """The frame whose op must end before an interrupt of ``frame`` is raised; None to raise at once."""
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
