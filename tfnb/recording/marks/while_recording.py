"""Changes to torch while any thread records: made by the first recording, undone after the last.

Recordings of two threads end in any order, so none may put back what it found. What stands in the place of something
of torch asks `current.recording()`, which is of its own thread, and does as torch does where that is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

_MISSING = object()


class SharedContext:
    """A context manager that is entered by the first who comes, and left by the last who goes."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = Lock()
        self._inside = 0
        self._open: AbstractContextManager[Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._open = self._make()
                self._open.__enter__()
            self._inside += 1

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._open is not None:
                self._open.__exit__(None, None, None)


@contextmanager
def swapped(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of modules and classes, (owner, name, value), that hold inside."""
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
