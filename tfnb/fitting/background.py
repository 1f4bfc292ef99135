"""A training in the background: `launch` starts the thread, and a handle reports progress and stops the training.

The handle is one of the callbacks of `fit`, so it hears of each step and stops between two of them.
"""

from __future__ import annotations

import asyncio
import atexit
import weakref
from collections.abc import Generator
from concurrent.futures import Future, TimeoutError
from threading import Thread
from typing import Any

from tfnb.errors import DeadlineExceeded
from tfnb.fitting.fit_loop import RunResult, fit
from tfnb.session.structures import Fetches, graph_of
from tfnb.train.batches import Data
from tfnb.train.callbacks import Progress, listed
from tfnb.widgets.curve import number
from tfnb.widgets.escaping import xml

STOPPED = "stopped by its handle"
_LAST = 10.0  # seconds that the end of the process waits for a step

_running: weakref.WeakSet[RunHandle] = weakref.WeakSet()


class RunHandle:
    """A training that runs in a thread of its own.

    step, epoch: the last one that is done. metrics: the watched values of that step. ``await handle`` gives the result,
    as `result` does. What fails shows in the handle, and is raised by `result`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.step = self.epoch = 0
        self._values: dict[str, Any] = {}
        self._is_unwanted = False
        self._future: Future[RunResult] = Future()
        self._future.set_running_or_notify_cancel()

    def on_step(self, progress: Progress) -> None:
        """`fit` tells that a step is done."""
        self.step, self.epoch, self._values = progress.step, progress.epoch, dict(progress.values)
        if self._is_unwanted:
            progress.stop(STOPPED)

    @property
    def metrics(self) -> dict[str, float]:
        """The watched values of the last step."""
        return {name: float(value) for name, value in self._values.items()}

    @property
    def is_done(self) -> bool:
        """Whether the training is over, however it ended."""
        return self._future.done()

    @property
    def progress(self) -> str:
        """``step 312, epoch 2, running``, or the result."""
        place = f"step {self.step}, epoch {self.epoch}"
        if not self.is_done:
            return f"{place}, {'stopping' if self._is_unwanted else 'running'}"
        error = self._future.exception()
        return f"{place}, {self._future.result().summary if error is None else f'{type(error).__name__}: {error}'}"

    def stop(self) -> None:
        """Stop after the current step; `fit` with ``resume=True`` continues from there."""
        self._is_unwanted = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most ``timeout`` seconds; returns whether the training is over."""
        try:
            self._future.exception(timeout)
        except TimeoutError:
            return False
        return True

    def result(self, timeout: float | None = None) -> RunResult:
        """The result or error of `fit`. Raises DeadlineExceeded if still running after ``timeout`` seconds."""
        if not self.wait(timeout):
            raise DeadlineExceeded(f"the training of {self.name} did not end within {timeout} s: {self.progress}")
        return self._future.result()

    def __await__(self) -> Generator[Any, None, RunResult]:
        return asyncio.wrap_future(self._future).__await__()

    def _facts(self) -> list[str]:
        return [self.progress, *(f"{name} {number(value)}" for name, value in self.metrics.items())]

    def __repr__(self) -> str:
        return f"<training of {self.name}: {'; '.join(self._facts())}>"

    def _repr_html_(self) -> str:
        rows = "".join(f"<div>{xml(fact)}</div>" for fact in self._facts())
        return f"<div><b>training of {xml(self.name)}</b>{rows}</div>"


def launch(fetch: Fetches, data: Data, **options: Any) -> RunHandle:
    """`fit` in the background: the same arguments; returns at once.

    Cells may record and run meanwhile: the training works on the graph as it was, and takes turns with other steps on
    the Variables that they share.

    >>> import tfnb, torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(4, 2))
    ...     train = tfnb.train.SGD(0.1).minimize(layer(x).square().mean())
    >>> handle = tfnb.launch(train, {x: torch.ones(8, 2)}, epochs=3, batch_size=4)
    >>> handle.result(timeout=60).steps, handle.step
    (6, 6)
    """
    handle = RunHandle(graph_of(fetch).name)
    callbacks = [*listed(options.pop("callbacks", ())), handle]

    def train() -> None:
        try:
            handle._future.set_result(fit(fetch, data, callbacks=callbacks, **options))
        except BaseException as error:  # raised by who asks for the result
            handle._future.set_exception(error)

    _running.add(handle)
    Thread(target=train, name=f"tfnb-training-{handle.name}", daemon=True).start()
    return handle


@atexit.register
def _end() -> None:
    """A step is not cut by the end of the process."""
    running = [handle for handle in _running if not handle.is_done]
    for handle in running:
        handle.stop()
    for handle in running:
        handle.wait(_LAST)
