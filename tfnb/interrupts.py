"""Who gets Ctrl-C for the time of a block.

Only the main thread gets signals, and only a handler that was set from Python can be put back: elsewhere, and where
SIGINT is ignored or ends the process, nothing changes. May import nothing of tfnb.
"""

from __future__ import annotations

import _signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

Handler = Callable[[int, FrameType | None], object]


class handled:
    """Context manager: inside, SIGINT calls ``handler``. A handler that the block itself has set stays.

    before: the handler that is put back; None where nothing changes. NOTE: the C module behind ``signal`` (tried with
    Python 3.11 and 3.12) takes 1.5 microseconds for what the enums of the public one make 23.
    """

    __slots__ = ("_handler", "before")

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.before: Handler | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(_signal.SIGINT)
            if callable(before):
                self.before = before
                _signal.signal(_signal.SIGINT, self._handler)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.before is not None and _signal.getsignal(_signal.SIGINT) is self._handler:
            _signal.signal(_signal.SIGINT, self.before)


class no_interrupt(handled):
    """Context manager: SIGINT is held back, and delivered when the block is done."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        super().__init__(self._hold)
        self._held: list[tuple[int, FrameType | None]] = []

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._held and self.before is not None:
            self.before(*self._held[0])
