"""Steps that another thread can stop while they compute: a deadline, a session that is closed.

The stop is an exception that Python raises in the computing thread between two bytecodes, so between kernels (a kernel,
and a step that was compiled as a whole, finishes first) and at no cost to generated code. What was computed can be
stopped, what is being committed cannot: exactly one of `Running.stop` and the end of the computing takes the token.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from tfnb.errors import TfnbError
from tfnb.interrupts import no_interrupt

T = TypeVar("T")
_IMPORTER = "<frozen importlib._bootstrap>"
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_TURN = 0.001  # seconds

Why = Callable[["Stop"], TfnbError]
Deadline = tuple[float, Why]


class Stop(BaseException):
    """Raised in a thread whose step is stopped; not caught by an ``except Exception`` in a user's op.

    node: where it stood, if what runs it knows; waits: what it waited for, in words.
    """

    node: object = None
    waits: Sequence[str] = ()


class Running:
    """One running step, made in the computing thread.

    >>> from tfnb.errors import Cancelled
    >>> step = Running()
    >>> step.compute(lambda: 3)
    3
    >>> Running().compute(lambda: 3, until=(0.0, lambda at: Cancelled("too late")))
    Traceback (most recent call last):
    tfnb.errors.Cancelled: too late
    """

    __slots__ = ("_is_claimed", "_sent", "_thread", "_token", "_why")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._token: list[None] = []  # one while it computes; list.pop is atomic, so one thread gets it
        self._why: Why | None = None
        self._sent = self._is_claimed = False

    def compute(self, call: Callable[..., T], *args: object, until: Deadline | None = None) -> T:
        """``call(*args)``, or the error given to `stop` if the step is stopped.

        until: seconds from now, and the error; what ends later than that counts as stopped.
        """
        above, _stops.running = _stops.running, (*_stops.running, self)
        try:
            try:
                self._token.append(None)
                if self._why is not None:  # stopped before it began
                    self._claim()
                    raise Stop
                result = call(*args) if until is None else self._in_time(call, args, *until)
            except Stop:
                raise
            except BaseException:
                self._claim()
                raise
            self._claim()
            return result
        except Stop as stop:
            if self._why is None:  # meant for a step around this one
                self._claim()
                raise
            raise self._why(stop) from None
        finally:
            _stops.running = above

    def stop(self, why: Why) -> None:
        """Stop the computation with the error ``why(stop)``, from any thread; no effect after its end."""
        self._why = why
        try:
            self._token.pop()
        except IndexError:
            return
        self._send()

    def _send(self) -> None:
        """Raise the stop in the computing thread; a library that the thread imports is imported first, since half of
        one would stay broken in this process.
        """
        if _imports(self._thread):
            threading.Thread(target=self._send_after_import, name="tfnb-stop", daemon=True).start()
        else:
            self._raise()

    def _send_after_import(self) -> None:
        while _imports(self._thread):
            time.sleep(_TURN)
        self._raise()

    def _raise(self) -> None:
        _raise_in(ctypes.c_ulong(self._thread), ctypes.py_object(Stop))
        self._sent = True

    def _in_time(self, call: Callable[..., T], args: tuple[Any, ...], seconds: float, why: Why) -> T:
        end = time.monotonic() + seconds
        timer = threading.Timer(seconds, self.stop, (why,))
        timer.daemon, timer.name = True, "tfnb-deadline"
        timer.start()
        try:
            result = call(*args)
        finally:
            timer.cancel()
        if time.monotonic() > end:
            self.stop(why)
        return result

    def hold(self) -> None:
        """Block stops until `let_go`; raises a stop already under way."""
        self._claim()

    def let_go(self) -> None:
        """After `hold`: raise a stop that arrived in the meantime."""
        self._is_claimed = False
        self._token.append(None)
        if self._why is not None:
            self._claim()
            raise Stop

    def _claim(self) -> None:
        """End the computation, or wait for the exception of a stop that was sent to this thread before.

        Python drops what it raises in a callback of the collector or a ``__del__``: what was sent and does not come
        within two turns is raised here.
        """
        if self._is_claimed:  # an interrupt came between `hold` and `let_go`, or for the Stop that that raised
            return
        try:
            self._token.pop()
            self._is_claimed = True
        except IndexError:
            waited = 0
            while waited < 2:
                time.sleep(_TURN)
                waited += self._sent
            raise Stop from None


def _imports(thread: int) -> bool:
    """Whether the step of a thread is within an import."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not Running.compute.__code__:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False


class _Stops(threading.local):
    """The stoppable computations of a thread: a step, and nested steps."""

    running: tuple[Running, ...] = ()


_stops = _Stops()


@contextmanager
def unstoppable() -> Iterator[None]:
    """A block that runs as a whole: a stop or Ctrl-C in the meantime is raised after the block."""
    with ExitStack() as after, no_interrupt():
        held, _stops.running = _stops.running, ()  # a block inside, as of a step that a finalizer runs, finds them held
        after.callback(setattr, _stops, "running", held)
        for running in held:
            running.hold()
            after.callback(running.let_go)
        yield
