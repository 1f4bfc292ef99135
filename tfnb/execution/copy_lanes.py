"""Copies between a device and a file that go on while tasks compute: a lane in and a lane out, each in its order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

import torch

T = TypeVar("T")
WAKE = 0.05  # seconds: a wait without an end would let no other thread stop the step


def finished(copy: Future[T]) -> T:
    """Wait for the result of a copy, or its error; a deadline or the close of the session cuts the wait."""
    while not copy.done():
        wait([copy], WAKE)
    return copy.result()


class CopyLanes:
    """Two threads, for the time of a block; its end waits for the copies that run, and gives up the others.

    >>> with CopyLanes() as lanes:
    ...     lanes.load(lambda: torch.ones(2)).result()
    tensor([1., 1.])
    """

    def __enter__(self) -> CopyLanes:
        self._in, self._out = (ThreadPoolExecutor(1, f"tfnb-copies-{way}") for way in ("in", "out"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:  # fmt: skip
        # a copy in may wait for one out: those go on until no copy in runs
        for lane in (self._in, self._out):
            lane.shutdown(wait=True, cancel_futures=True)

    def load(self, copy: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        """A copy in, behind those that were asked for before."""
        return self._in.submit(copy)

    def store(self, copy: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> Future[None]:
        """A copy out, behind those that were asked for before."""
        return self._out.submit(copy, tensor)


class InlineCopies(CopyLanes):
    """Copies that are done where they are asked for: memory to memory, a thread would take longer to wake."""

    def __enter__(self) -> InlineCopies:
        return self

    def __exit__(self, *given: object) -> None:
        """Nothing runs."""

    def load(self, copy: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        """A copy in, done."""
        done: Future[torch.Tensor] = Future()
        done.set_result(copy())
        return done

    def store(self, copy: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> Future[None]:
        """A copy out, done."""
        copy(tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done
