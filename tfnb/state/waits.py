"""Who waits for what, in this process; and whether anybody is left who could end it. Semantics S-67.

A deadlock is declared only where it is sure: every thread that could run a user's code waits here, or waits for such a
thread to end. A thread that runs user code, or the main thread at a prompt, may still put or take an element.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import functools
import inspect
import itertools
import queue
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tfnb.errors import DeadlockError, TfnbError
from tfnb.state.fifo import Attempt

POLL = 0.1  # seconds between looks at whether anything changed
_PACKAGE = str(Path(__file__).parents[1])
_LOOP = asyncio.BaseEventLoop.run_forever.__code__
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(eq=False, slots=True)
class Waiter:
    """A thread that waits for the end of ``attempts``; each comes into the ``inbox``.

    later: what it would still do to queues, for the wait-for graph: what, to which, and what that waits for.
    """

    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    attempts: Callable[[], Iterable[Attempt]] = tuple
    later: Callable[[], Iterable[tuple[str, str, Sequence[str]]]] = tuple
    thread: threading.Thread = field(default_factory=threading.current_thread)
    deadlock: TfnbError | None = None


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Edges (who waits, for whom or what)."""

    edges: tuple[tuple[str, str], ...]

    def dot(self) -> str:
        """The graph in the DOT language."""
        quoted = [tuple(part.replace("\\", "\\\\").replace('"', '\\"') for part in edge) for edge in self.edges]
        return "\n".join(["digraph {", *(f'  "{a}" -> "{b}";' for a, b in quoted), "}"])

    def __str__(self) -> str:
        return "\n".join(f"  {a} waits for {b}" for a, b in self.edges)


class Waits:
    """The waiters of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[Waiter, None] = {}

    def wait(self, waiter: Waiter, attempts: Sequence[Attempt], timeout: float | None) -> None:
        """Wait until the attempts are over, or ``timeout`` seconds; raises DeadlockError where nobody can end it."""
        waiter.attempts = lambda: [attempt for attempt in attempts if not attempt.is_over]
        end = None if timeout is None else time.monotonic() + timeout
        while waiter.attempts():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return
            self.next(waiter, left)

    def next(self, waiter: Waiter, timeout: float | None = None) -> Any:
        """What comes into the inbox next; None after POLL seconds, or ``timeout``. Raises DeadlockError."""
        pause = POLL if timeout is None else min(POLL, max(timeout, 0.0))
        try:
            return waiter.inbox.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            self._waiters[waiter] = None
        try:
            try:
                return waiter.inbox.get(timeout=pause / 10)
            except queue.Empty:
                self.look()
            return waiter.inbox.get(timeout=pause)
        except queue.Empty:
            return None
        finally:
            with self._lock:
                self._waiters.pop(waiter, None)
            if waiter.deadlock is not None:
                raise waiter.deadlock

    def look(self) -> None:
        """Where nothing can make progress, tell all who wait."""
        with self._lock:
            waiters = [waiter for waiter in self._waiters if waiter.deadlock is None]
            if not waiters or any(not waiter.inbox.empty() for waiter in waiters):
                return
            if any(could_act(thread, {waiter.thread for waiter in waiters}) for thread in threading.enumerate()):
                return
            if any(not waiter.inbox.empty() for waiter in waiters):
                return
            graph = wait_graph(waiters)
            for waiter in waiters:
                waiter.deadlock = DeadlockError(f"nothing can make progress:\n{graph}", details=graph)
                waiter.inbox.put(None)


WAITS = Waits()


def wait_graph(waiters: Sequence[Waiter]) -> WaitGraph:
    """Who waits for which queue, and who would serve it."""
    edges: dict[tuple[str, str], None] = {}
    queues: dict[str, set[str]] = {}
    for waiter in waiters:
        for attempt in waiter.attempts():
            held = attempt.fifo
            wanted = {"dequeue": "an element", "enqueue": "room", "close": "the enqueues before it"}.get(
                attempt.kind, ""
            )
            place = (
                f"queue {held.name} ({held.size} of {held.capacity} elements, {'closed' if held.closed else 'open'})"
            )
            who = attempt.what or f"{attempt.kind} by thread {waiter.thread.name}"
            edges[who, f"{wanted} of {place}"] = None
            queues.setdefault(held.name, set()).add(f"{wanted} of {place}")
    for waiter in waiters:
        for what, name, behind in waiter.later():
            if name in queues:
                edges.update({(place, what): None for place in queues[name]})
                edges.update({(what, other): None for other in behind})
    served = {a for a, _ in edges}
    for places in queues.values():
        edges.update({(place, "nobody: nothing that runs would serve it"): None for place in places - served})
    return WaitGraph(tuple(edges))


# -- threads ----------------------------------------------------------------------------------------------------------


def could_act(thread: threading.Thread, waiting: set[threading.Thread]) -> bool:
    """Whether a thread may still run code that uses a queue."""
    if thread in waiting or not thread.is_alive():
        return False
    frames = _frames(thread)
    if _joins(frames, waiting):
        return False
    is_user = thread is threading.main_thread() or any(_is_user_file(f.f_code.co_filename) for f in frames)
    return is_user or _is_of_user(thread) or _works(thread, frames) or _has_user_tasks(frames)


def _frames(thread: threading.Thread) -> list[FrameType]:
    """What a thread does now, the innermost call first."""
    frame, found = sys._current_frames().get(thread.ident or 0), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _joins(frames: Sequence[FrameType], waiting: set[threading.Thread]) -> bool:
    """Whether a thread does nothing but wait, without a deadline, for the end of one that waits."""
    for frame in itertools.takewhile(lambda frame: frame.f_code.co_filename == threading.__file__, frames):
        if frame.f_code is threading.Thread.join.__code__:
            return frame.f_locals.get("timeout") is None and frame.f_locals.get("self") in waiting
    return False


def _is_of_user(thread: threading.Thread) -> bool:
    """Whether a thread was started to run a user's function, or one of ours for the user."""
    run: Any = getattr(thread, "function", None) or getattr(thread, "_target", None) or type(thread).run
    while isinstance(run, functools.partial):
        run = run.func
    if not hasattr(run, "__code__") and not hasattr(run, "__func__"):
        run = type(run).__call__
    code = getattr(getattr(run, "__func__", run), "__code__", None)
    is_ours = code is not None and code.co_filename.startswith(_PACKAGE) and not thread.name.startswith("tfnb")
    return code is not None and (is_ours or _is_user_file(code.co_filename))


def _works(thread: threading.Thread, frames: Sequence[FrameType]) -> bool:
    """Whether a thread of an executor has something to do: what comes after that, nobody knows."""
    codes = (frame.f_code for frame in frames)
    is_busy = any(code.co_filename == concurrent.futures.thread.__file__ and code.co_name == "run" for code in codes)
    return is_busy and not thread.name.startswith("tfnb")


def _has_user_tasks(frames: Sequence[FrameType]) -> bool:
    """Whether a thread runs an event loop in which a user's coroutine is not over."""
    loops = (frame.f_locals.get("self") for frame in frames if frame.f_code is _LOOP)
    tasks = (task for loop in loops if loop is not None for task in asyncio.all_tasks(loop))
    return any(_is_user_file(code.co_filename) for task in tasks for code in _awaited(task.get_coro()))


def _awaited(item: Any) -> Iterator[CodeType]:
    """The code of a coroutine, and of what it awaits."""
    while inspect.iscoroutine(item):
        yield item.cr_code
        item = item.cr_await


def _is_user_file(name: str) -> bool:
    return not (name.startswith(("<frozen", _PACKAGE, *_LIBRARIES)) or "site-packages" in name)
