"""One step of a session: computed under the locks of its Variables, then committed; can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from tfnb.errors import Cancelled, FailedPrecondition, TfnbError
from tfnb.execution import Program
from tfnb.execution.explain import deadline, explained
from tfnb.execution.running import Running, Stop
from tfnb.graph.variable_locks import LOCKS, NOTHING, Hold, VariableSnapshot, ensure_unchanged, versions
from tfnb.interrupts import from_signal_handler
from tfnb.placement.requests import tasks_of
from tfnb.session.prepared import PreparedRun
from tfnb.state.queue_machine import whole_steps
from tfnb.state.run_numbers import RunNumbers


class StepRunner:
    """Runs steps in sequence or concurrently, as threads request; tracks running steps, and numbers all."""

    def __init__(self, graph: str) -> None:
        self.graph = graph  # its name
        self.runs = RunNumbers()
        self.running: set[Running] = set()
        self.is_closed = False

    def ensure_open(self) -> None:
        """Raise FailedPrecondition after `close`."""
        if self.is_closed:
            raise FailedPrecondition(f"the session of graph {self.graph} is closed; make a new tfnb.Session")

    def close(self) -> None:
        """Steps under way raise Cancelled and write nothing."""
        self.is_closed = True
        for running in tuple(self.running):
            running.stop(lambda _: Cancelled(f"the session of graph {self.graph} was closed during this run"))

    def step(
        self, prepared: PreparedRun, program: Program, tensors: list[torch.Tensor], timeout: float | None,
        forward: Callable[..., Any], commit: Callable[[Any], None], cut: VariableSnapshot | None,
    ) -> list[Any]:  # fmt: skip
        """Compute, commit, and read the fetched Variables, with the locks of all Variables. A step that waits for
        queues computes without locks: it takes them before it writes, if no other step wrote what it read.
        """
        __tracebackhide__ = True
        if prepared.asked:
            tasks_of(prepared.asked)
        access, run = program.access, self.runs.take()
        program.use.last = time.time()
        if prepared.trailing:
            access = (access or NOTHING).also(prepared.trailing)
        uses = whole_steps() if program.waits else _NOTHING_USED
        if access is None:
            with uses:
                results, _ = self.stoppable(program, timeout, self._compute, program, tensors, forward, run)
                _look(prepared, results)
            return results  # type: ignore[no-any-return]
        hold = Hold(access)
        try:
            with hold.token, uses:
                results = None
                if getattr(forward, "writes", False):  # nothing can stop it
                    is_timed = timeout is None or getattr(forward, "seconds", None) is not None
                    if cut is None and is_timed and not prepared.stops:
                        results = self._written(hold, program, tensors, forward, run, timeout)
                    if results is None:
                        forward = program.forward
                if results is None:
                    compute = self._locked if cut is None and not program.waits else self._aside
                    given = hold, program, tensors, forward, run, cut
                    results, pending = self.stoppable(program, timeout, compute, *given)
                    _look(prepared, results)
                    with nullcontext() if program.commit_access is None else LOCKS.held(program.commit_access):
                        commit(pending)
                if prepared.trailing:
                    results += prepared.after(cut)
        finally:
            hold.leave()
        return results  # type: ignore[no-any-return]

    def stoppable(self, program: Any, timeout: float | None, call: Callable[..., Any], *args: object) -> Any:
        """``call(*args)``, stopped by `close`, by the deadline, or by a reset of the held Variables."""
        __tracebackhide__ = True
        running, hold = Running(), next((arg for arg in args[:1] if isinstance(arg, Hold)), None)
        self.running.add(running)
        if hold is not None:
            hold.stop = running.stop
            LOCKS.computing.add(hold)
        try:
            self.ensure_open()  # after the step can be found: `close` looks for steps after it closed
            return running.compute(call, *args, until=None if timeout is None else deadline(program, timeout))
        finally:
            self.running.discard(running)
            if hold is not None:
                LOCKS.computing.discard(hold)

    def _written(
        self, hold: Hold, program: Program, tensors: list[torch.Tensor], forward: Any, run: int,
        timeout: float | None,
    ) -> list[Any] | None:  # fmt: skip
        """A step in one call of compiled code, with the locks; None where that did nothing, or may end too late."""
        self.ensure_open()
        if timeout is None:
            _take(hold)
        else:
            end = time.monotonic() + timeout
            self.stoppable(program, timeout, _take, hold)
            if not forward.is_over_within(end - time.monotonic()):
                return None
        return program.write(tensors, [variable.storage for variable in program.variables], run, forward)

    def _locked(self, hold: Hold, *args: Any) -> Any:
        """`_compute` with the locks, held until the commit."""
        __tracebackhide__ = True
        if not hold.is_granted:
            _take(hold)
        return self._compute(*args)

    def _aside(
        self, hold: Hold, program: Program, tensors: list[torch.Tensor], forward: Callable[..., Any], run: int,
        cut: VariableSnapshot | None,
    ) -> Any:  # fmt: skip
        """`_compute` for a step that waits inside, or reads a snapshot: locks are taken afterwards, if versions are
        unchanged.
        """
        __tracebackhide__ = True
        kept = () if program.access is None else program.access.variables  # not those that it writes without order
        seen = versions(kept) if cut is None else {v: cut.versions[v] for v in kept}
        found = self._compute(program, tensors, forward, run, cut)
        if program.writes or (cut is None and hold.access is not program.access):  # which fetches Variables
            _take(hold)
        if program.writes:
            ensure_unchanged(seen)
            if found[1].queued is not None:
                found[1].queued.ensure_valid()
        return found

    def _compute(
        self, program: Program, tensors: list[torch.Tensor], forward: Callable[..., Any], run: int,
        cut: VariableSnapshot | None = None,
    ) -> Any:  # fmt: skip
        __tracebackhide__ = True
        storages = [variable.storage for variable in program.variables]
        try:
            return program.compute(tensors, storages, run, forward, cut)
        except Exception as error:
            if isinstance(error, TfnbError) or from_signal_handler(error):
                raise
            raise explained(program, error, tensors) from error


def _look(prepared: PreparedRun, results: Sequence[Any]) -> None:
    """Raise where a breakpoint stops the step."""
    __tracebackhide__ = True
    if prepared.looks:
        prepared.look(results)


_NOTHING_USED = nullcontext()


def _take(hold: Hold) -> None:
    """Wait for the locks; the error of a deadline names the Variables."""
    start = time.monotonic()
    try:
        LOCKS.take(hold)
    except Stop as stop:
        names = ", ".join(variable.name for variable in hold.access.variables)
        stop.waits = (f"Variables that other steps use ({names}), for {time.monotonic() - start:.1f} s",)
        raise
