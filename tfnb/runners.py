"""Threads that fill queues: a runner for the enqueues of one queue, and a coordinator that stops, joins and raises.

Semantics S-85, S-86. A runner is a loop around `tfnb.run`; what is waited for is the business of `tfnb.state`.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from types import NoneType
from weakref import WeakSet

from tfnb.errors import Aborted, Cancelled, FailedPrecondition, InvalidArgument, OutOfRange, QueueClosed, ensure_type
from tfnb.recording import Operation
from tfnb.session import Session, run
from tfnb.state.input_sources import Source
from tfnb.state.queue_operations import machine_of
from tfnb.state.queues import TensorQueue
from tfnb.state.source_puts import put_next
from tfnb.state.waits import WAITS, check_timeout

_POLL = 0.1  # seconds between looks at whether threads ended


class Coordinator:
    """Says to threads when to stop, waits for them, and raises the first error of any of them.

    A thread asks `should_stop` in its loop, and calls `request_stop` with the error that ends it, or does its work
    within `stop_on_exception`. `OutOfRange`, the end of the input, is a clean end.

    >>> coordinator = Coordinator()
    >>> def work():
    ...     with coordinator.stop_on_exception():
    ...         raise ValueError("no such file")
    >>> thread = threading.Thread(target=work)
    >>> thread.start()
    >>> coordinator.join([thread])
    Traceback (most recent call last):
    ValueError: no such file
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.error: BaseException | None = None  # that `join` raises
        self._threads: list[threading.Thread] = []
        self._on_stop: list[Callable[[], None]] = []

    def should_stop(self) -> bool:
        """Whether somebody asked for a stop."""
        return self._stopped.is_set()

    def request_stop(self, exc: BaseException | None = None) -> None:
        """Request all threads to stop. The first call counts: `join` raises its error, except OutOfRange."""
        with self._lock:
            if self._stopped.is_set():
                return
            self.error = None if isinstance(exc, OutOfRange) else exc
            self._stopped.set()
            calls, self._on_stop = self._on_stop, []
        for call in calls:
            call()

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until somebody asks for a stop, at most so many seconds; whether somebody did."""
        return self._stopped.wait(timeout)

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """An error inside asks for a stop, and ends here."""
        try:
            yield
        except BaseException as error:
            self.request_stop(error)

    def register(self, thread: threading.Thread, on_stop: Callable[[], None] | None = None) -> None:
        """Let `join` wait for this thread, too. on_stop: called once at the stop request, or at once after it."""
        with self._lock:
            self._threads.append(thread)
            if on_stop is None:
                return
            if not self._stopped.is_set():
                self._on_stop.append(on_stop)
                return
        on_stop()

    def join(self, threads: Sequence[threading.Thread] = (), *, stop_grace_period_secs: float = 120.0) -> None:
        """Wait until all threads ended, or for so many seconds after a stop was asked for; raise the first error.

        Where they ended without a stop, a runner may start again after a restore.
        Raises FailedPrecondition that names the threads which did not stop in that time, and what they wait for.
        """
        check_timeout(stop_grace_period_secs)
        for thread in threads:
            ensure_type(thread, threading.Thread, "Coordinator.join")
        everyone = list(dict.fromkeys([*threads, *self._threads]))
        while any(thread.is_alive() for thread in everyone) and not self.wait_for_stop(_POLL):
            pass
        end = time.monotonic() + stop_grace_period_secs
        for thread in everyone:
            thread.join(max(0.0, end - time.monotonic()))
        if self.error is not None:
            raise self.error
        late = [thread.name for thread in everyone if thread.is_alive()]
        if late:
            waits = WAITS.of([f"thread {name}" for name in late])
            raise FailedPrecondition(
                f"{', '.join(late)} did not stop within {stop_grace_period_secs} s after that was asked for"
                + (f":\n{waits}" if waits.edges else "")
            )


class QueueRunner:
    """Runs enqueue operations repeatedly, or enqueues elements of sources, each in a thread of its own.

    It starts by itself when somebody has to wait for an element of the queue, or by `start`; after a restore, again,
    unless its coordinator was asked for a stop.
    An operation is done when it raises OutOfRange: its input is at its end. When all are done the queue is closed, so
    that who takes elements gets those that are left and then OutOfRange. Any other error stops the coordinator and
    closes the queue; it is raised by ``coordinator.join()``, and is the cause of the OutOfRange.

    enqueue_ops: recorded enqueues, or a `tfnb.Source` whose elements are put; one for each thread, or one alone. A
    source has one element on its way: where runners of two queues share it, one that has room gets that element.
    session: that runs them, by default that of `tfnb.run`; its files keep what the queue holds and the positions of the
    sources, of those of one name in several runners that of the last one. Raises InvalidArgument for a ``queue`` that
    is no queue of tensors, and unless there are ``enqueue_ops``, each an operation or a source.

    >>> import torch, tfnb
    >>> names, letters = (tfnb.FIFOQueue(5, torch.int64, (), name=name) for name in ("names", "letters"))
    >>> names.enqueue_many([1, 2, 3]), names.close()
    (None, None)
    >>> with tfnb.record():
    ...     put = letters.enqueue(names.dequeue() * 10)
    >>> runner = QueueRunner(letters, [put])
    >>> [int(letter) for letter in letters]
    [10, 20, 30]
    >>> runner.coordinator.join()
    """

    def __init__(
        self, queue: TensorQueue, enqueue_ops: Operation | Source | Sequence[Operation | Source], *,
        coordinator: Coordinator | None = None, session: Session | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(queue, TensorQueue):
            raise InvalidArgument(f"a runner fills a queue such as tfnb.FIFOQueue, not {queue!r}")
        self.queue = queue
        self.enqueue_ops = (enqueue_ops,) if isinstance(enqueue_ops, Operation | Source) else tuple(enqueue_ops)
        if not self.enqueue_ops:
            raise InvalidArgument(f"a runner of queue {queue.name} has enqueues to run, and was given none")
        if wrong := [op for op in self.enqueue_ops if not isinstance(op, Operation | Source)]:
            raise InvalidArgument(
                f"a runner of queue {queue.name} runs recorded enqueues, or puts what a tfnb.Source gives, and was "
                f"given {wrong[0]!r}"
            )
        ensure_type(coordinator, (Coordinator, NoneType), "coordinator of a runner")
        ensure_type(session, (Session, NoneType), "session of a runner")
        self.coordinator = Coordinator() if coordinator is None else coordinator
        self.threads: tuple[threading.Thread, ...] = ()
        self._run = run if session is None else session.run
        if session is not None:
            inputs, sources = session.state.inputs, [op for op in self.enqueue_ops if isinstance(op, Source)]
            for source in sources:
                inputs.sources.pop(source.name, None)  # of a cell that was run before
            for earlier in [one for one in inputs.queues if one.name == queue.name]:
                del inputs.queues[earlier]
            for source in sources:
                session.reads(source)
            session.reads(queue)
        self._lock = threading.Lock()
        self._left = len(self.enqueue_ops)
        machine_of(queue).starters.append(self._start_once)
        _RUNNERS.add(self)

    def __repr__(self) -> str:
        state = f"{self._left} of {len(self.enqueue_ops)} run" if self.threads else "not started"
        return f"<QueueRunner of {self.queue}: {state}>"

    def start(self) -> tuple[threading.Thread, ...]:
        """Start its threads; nothing where they were started before."""
        self._start_once()
        return self.threads

    def _start_once(self) -> None:
        with self._lock:
            is_over = not self._left and not any(thread.is_alive() for thread in self.threads)
            if self.threads and not (is_over and self._may_go_on):
                return
            self._left = len(self.enqueue_ops)
            self.threads = tuple(
                threading.Thread(
                    target=self._loop,
                    args=(op,),
                    name=f"runner-{next(_NUMBERS)} of queue {self.queue.name}",
                    daemon=True,
                )
                for op in self.enqueue_ops
            )
        for place, thread in enumerate(self.threads):
            self.coordinator.register(thread, self._cancel if place == 0 else None)
        for thread in self.threads:
            thread.start()

    @property
    def _may_go_on(self) -> bool:
        """Whether the queue it closed was reopened by a restore."""
        return not self.coordinator.should_stop() and not machine_of(self.queue).level.closed

    def _put(self, op: Operation | Source) -> None:
        if isinstance(op, Source):
            put_next(self.queue, op)
        else:
            self._run(op)

    def _loop(self, op: Operation | Source) -> None:
        """One operation, until its input ends, the queue is closed, or a stop is asked for."""
        try:
            while not self.coordinator.should_stop():
                try:
                    self._put(op)
                except Aborted:  # by another step, or because the queue moves: again
                    self.coordinator.wait_for_stop(_POLL)
        except OutOfRange:
            pass  # the end of its input
        except BaseException as error:
            if not (isinstance(error, Cancelled) and machine_of(self.queue).level.closed):
                self.coordinator.request_stop(error)
        finally:
            with self._lock:
                self._left -= 1
                is_last = not self._left
            if is_last:
                self._close()

    def _close(self) -> None:
        with suppress(QueueClosed):  # by somebody else before
            self.queue.close()

    def _cancel(self) -> None:
        machine_of(self.queue).cause = self.coordinator.error
        self.queue.close(cancel_pending_enqueues=True)


_NUMBERS = count(1)
_RUNNERS: WeakSet[QueueRunner] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """No thread computes while the interpreter goes down."""
    runners = [runner for runner in list(_RUNNERS) if any(thread.is_alive() for thread in runner.threads)]
    for runner in runners:
        runner.coordinator.request_stop()
    for runner in runners:
        for thread in runner.threads:
            thread.join(2.0)
