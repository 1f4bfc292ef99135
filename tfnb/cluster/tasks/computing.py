"""Compute threads of a task: calls under the number of their round, stoppable like local steps, with whole errors.

A stop comes between two kernels (see `tfnb.execution.running`); a kernel finishes first. Whoever waits for a call may
be cancelled; the call itself goes on until it is stopped or ends, and `Computing.stopped` waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from tfnb.cluster.wire.messages import aborted
from tfnb.errors import Cancelled
from tfnb.execution.running import Running

T = TypeVar("T")


class Compute(Protocol):
    """Calls a function that may be stopped; raises Cancelled then."""

    def __call__(self, function: Callable[[], T], /) -> T: ...


async def in_thread(executor: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    """The result of ``function`` in a thread; SystemExit and its like arrive as an ordinary error."""

    def guarded() -> tuple[T | None, BaseException | None]:
        try:
            return function(), None
        except BaseException as error:  # asyncio would end the event loop on SystemExit
            return None, error

    result, error = await asyncio.get_running_loop().run_in_executor(executor, guarded)
    if error is None:
        return result  # type: ignore[return-value]
    if isinstance(error, Exception):
        raise error
    raise aborted(error) from error


class _Call:
    """One call, waiting for a thread or running."""

    def __init__(self, body: Callable[[Compute], Any]) -> None:
        self._body = body
        self._running: Running | None = None
        self._is_unwanted = False

    def run(self) -> Any:
        """In the thread."""
        return self._body(self._computed)

    def _computed(self, function: Callable[[], T]) -> T:
        self._running = running = Running()
        if self._is_unwanted:  # looked at after `_running` was set, as `stop` does it the other way round
            raise Cancelled("stopped before it began")
        return running.compute(function)

    def stop(self) -> None:
        """From the event loop."""
        self._is_unwanted = True
        if self._running is not None:
            self._running.stop(lambda at: Cancelled("stopped while it computed", details={"waits": list(at.waits)}))


class Computing:
    """Compute threads of a task: calls in order, each under the number of its round."""

    def __init__(self, threads: int = 1) -> None:
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="tfnb-compute")
        self._calls: dict[int, tuple[_Call, asyncio.Future[Any]]] = {}

    async def do(self, number: int, function: Callable[[], T]) -> T:
        """The result of ``function``; raises Cancelled if round ``number`` is stopped."""
        return await self.work(number, lambda compute: compute(function))

    async def work(self, number: int, body: Callable[[Compute], T]) -> T:
        """The result of ``body(compute)``. A stop interrupts only functions called by ``compute``; no other one begins
        then.
        """
        call = _Call(body)
        end = asyncio.ensure_future(in_thread(self.executor, call.run))
        self._calls[number] = call, end
        end.add_done_callback(lambda end: self._ended(number, end))
        return await asyncio.shield(end)

    def is_wanted(self) -> bool:
        """From any thread: whether another call waits for the running one."""
        return len(self._calls) > 1

    def _ended(self, number: int, end: asyncio.Future[Any]) -> None:
        if number in self._calls and self._calls[number][1] is end:
            del self._calls[number]
        if not end.cancelled():
            end.exception()  # seen, also if nobody waits any more

    def close(self) -> None:
        """Stop running calls and end the threads, without waiting for them."""
        for call, _ in list(self._calls.values()):
            call.stop()
        self.executor.shutdown(wait=False, cancel_futures=True)

    async def stopped(self, is_over: Callable[[int], bool]) -> list[str]:
        """Stop the calls of rounds that are over, and wait for their threads; returns the calls' pending waits, in
        words.
        """
        found = [entry for number, entry in self._calls.items() if is_over(number)]
        for call, _ in found:
            call.stop()
        if found:
            await asyncio.wait([end for _, end in found])
        errors = [end.exception() for _, end in found if not end.cancelled()]
        told = [error.details or {} for error in errors if isinstance(error, Cancelled)]
        return [wait for details in told for wait in details.get("waits", ())]
