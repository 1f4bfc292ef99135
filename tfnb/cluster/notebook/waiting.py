"""Waiting of the notebook's threads for the event loop of a cluster, and the warnings given meanwhile."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from tfnb.cluster.engine.engine import Engine
from tfnb.cluster.engine.single_steps import Turn
from tfnb.errors import FailedPrecondition, ParameterServerLost, TfnbError
from tfnb.graph.variable_locks import PATIENCE as STEP
from tfnb.recording.marks.notes import user_level

T = TypeVar("T")

SETTLE = 15.0  # seconds that an interrupted step has to end
_looks: ContextVar[bool] = ContextVar("looks", default=False)  # a step waits for this thread


class EventLoopWaiter:
    """Lets the event loop do things, and waits for them: one thing at a time for each thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._link = engine, engine.link
        self.is_loss_told = False  # an error said that the cluster is lost

    def ensure_open(self) -> None:
        """Raise if the cluster is closed or lost."""
        if self._engine.is_closed:
            raise FailedPrecondition("this cluster is closed; tfnb.connect(...) makes another")
        if self._engine.lost is not None:
            raise self.explained(self._engine.lost)

    @property
    def is_here(self) -> bool:
        """Whether this thread is the event loop's own, and so cannot wait for the loop."""
        with suppress(RuntimeError):
            return asyncio.get_running_loop() is self._link.loop
        return False

    def do(self, what: str, timeout: float | None, function: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """Run a coroutine in the event loop and wait; an interrupt or a deadline ends the work at a step boundary."""
        ensure_no_look(what)
        self.say_notes()
        try:
            return self._link.wait(self._link.start(function, *args), timeout, what, self.say_notes)
        except ParameterServerLost as error:
            raise self.explained(error) from None
        except TfnbError:
            raise
        except BaseException:
            self._settle()
            raise

    def say_notes(self) -> None:
        """Warn of events noted by the engine."""
        with suppress(IndexError):  # none are left; other threads take some, too
            while True:
                warnings.warn(self._engine.notes.pop(0), stacklevel=user_level(None))

    def _settle(self) -> None:
        """End the work in progress, at a step boundary."""
        self._link.wait(self._link.start(self._engine.settle, SETTLE), SETTLE + 1, "ending the step")

    def explained(self, error: TfnbError) -> TfnbError:
        """A fresh exception of the same error, so that tracebacks do not pile up."""
        self.is_loss_told = self.is_loss_told or self._engine.lost is not None
        fresh = type(error)(error.message)
        vars(fresh).update(vars(error))
        fresh.__notes__, fresh.__cause__ = list(getattr(error, "__notes__", ())), error.__cause__
        return fresh

    @contextmanager
    def turn(self, who: str) -> Iterator[None]:
        """A block beside which no step computes, except steps that wait for queues. The wait can be interrupted."""
        turn, single = Turn(), self._engine.single
        what = f"{who} waits for a run of another thread, which"
        try:
            self._link.wait(self._link.start(single.take, turn), STEP, what, self.say_notes)
            yield
        finally:
            self._link.post(single.leave, turn)


def begin_look() -> None:
    """Mark this thread as inspecting values of a step that waits for the inspection. The thread's context is a copy."""
    _looks.set(True)


def ensure_no_look(what: str) -> None:
    """Raise if a step waits for this thread, since a call of the cluster would deadlock."""
    if _looks.get():
        raise FailedPrecondition(
            f"the condition of a breakpoint asked the cluster for something ({what}), which waits for the condition: "
            "read what it compares with before the run, or fetch it"
        )
