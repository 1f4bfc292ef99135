"""Reader/writer locks of Variables: which steps may read and write, step by step.

A step asks for all that it reads and writes at once, and waits for the steps before it that conflict: those that write
what it uses, or use what it writes. Steps wait only for earlier ones, so they cannot wait for each other, and steps of
different models never wait. What a thread does inside of its own step (a hook, a finalizer, a commit that takes more
locks) is part of that step: it goes before those that still wait, and they wait for it.

A hold ends with the block of its token, a lock of C: no interrupt can come between the end of the block and the
release. Whoever waits looks again every `ITERATION`, so a missed wake-up costs no more than that. Only a step waits as
long as its run may take; a read or a write beside the steps waits `PATIENCE`.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tfnb.errors import Aborted, DeadlineExceeded
from tfnb.graph import lazy_memory

ITERATION = 0.05  # seconds; Python raises nothing in a thread that waits for longer
PATIENCE = 60.0  # seconds


_AT_ONCE = 64
_free: list[ctypes.c_int64] = []


def counter() -> ctypes.c_int64:
    """An int64 counter that compiled code can increment too; consecutive counters are neighbours in memory."""
    if not _free:
        block = (ctypes.c_int64 * _AT_ONCE)()
        _free.extend(ctypes.c_int64.from_buffer(block, 8 * at) for at in reversed(range(_AT_ONCE)))
    return _free.pop()


class StoredVariable(Protocol):
    """A Variable. ``writes`` counts its writes, and ``version`` is the current count."""

    key: str
    name: str
    writes: ctypes.c_int64

    @property
    def version(self) -> int: ...

    @property
    def kept(self) -> torch.Tensor: ...


class Access:
    """The Variables that a step reads and those it writes."""

    __slots__ = ("used", "variables", "written")

    def __init__(self, variables: Iterable[StoredVariable], written: Iterable[StoredVariable] = ()) -> None:
        self.variables = tuple(variables)
        self.written = frozenset(variable.key for variable in written)
        self.used = frozenset(variable.key for variable in self.variables) | self.written

    def also(self, variables: Iterable[StoredVariable]) -> Access:
        """A copy that reads further Variables."""
        found = Access((*self.variables, *variables))
        found.written, found.used = self.written, found.used | self.used
        return found

    def conflicts(self, other: Access) -> bool:
        """Whether one of the two accesses writes a Variable used by the other."""
        return not (self.written.isdisjoint(other.used) and other.written.isdisjoint(self.used))

    def names(self, other: Access) -> str:
        """Names of the Variables that both accesses use."""
        return ", ".join(variable.name for variable in self.variables if variable.key in other.used)


class Use:
    """The Variables of a program, and the time of its last run, as `time.time`."""

    __slots__ = ("__weakref__", "keys", "last")

    def __init__(self, keys: frozenset[str]) -> None:
        self.keys = keys
        self.last: float | None = None


class Hold:
    """One step's locks, from `Locks.take` until the block of ``token`` is left; then `leave` wakes who waits."""

    __slots__ = ("access", "behind", "is_granted", "stop", "thread", "token", "waiters")

    def __init__(self, access: Access) -> None:
        self.stop: Callable[[Any], None] | None = None  # ends it, from any thread, while it computes
        self.access, self.thread, self.token = access, threading.get_ident(), threading.Lock()
        self.is_granted = False
        self.behind: list[Hold] = []  # that it waits for
        self.waiters: list[threading.Event] = []

    def leave(self) -> None:
        """After the block."""
        self.access = NOTHING
        self.wake()

    def wake(self) -> None:
        """Wake all waiters, so that they check again."""
        while self.waiters:
            self.waiters.pop().set()


@dataclass(frozen=True, slots=True)
class VariableSnapshot:
    """Copies of Variables, all of one moment, and how often each had been written by then."""

    versions: Mapping[Any, int]
    copies: Mapping[Any, torch.Tensor]


class Locks:
    """The locks of all Variables of the process."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # a finalizer may ask inside of it
        self.holds: list[Hold] = []  # in the order in which they asked; always the same list
        self._waiting: dict[int, Hold] = {}  # by thread
        self.computing: set[Hold] = set()  # those that have a ``stop``
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()

    def take(self, hold: Hold, timeout: float | None = None) -> None:
        """Wait until the Variables are free; inside of the block of ``hold.token``. Raises DeadlineExceeded."""
        with self._mutex:
            self.holds.append(hold)  # from here on a `reusable` one is not taken
            earlier = [other for other in [*self.holds] if other is not hold and other.token.locked()]
            self.holds[:] = [*earlier, hold]
            is_nested = any(other.thread == hold.thread for other in earlier)
            for other in earlier:
                if other.thread == hold.thread or not other.access.conflicts(hold.access):
                    continue
                if is_nested and not other.is_granted:  # it may wait for this thread
                    other.behind.append(hold)
                else:
                    hold.behind.append(other)
            hold.is_granted = not hold.behind
        if not hold.is_granted:
            self._wait(hold, is_nested, timeout)

    def reusable(self, access: Access) -> Hold:
        """A hold that compiled code may take repeatedly, while no hold of ``holds`` is locked.

        It looks and takes without giving Python's lock away, so needs no other.
        """
        hold = Hold(access)
        hold.is_granted = True  # as soon as its token is locked
        return hold

    def _wait(self, hold: Hold, is_nested: bool, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not hold.is_granted:
            other = next((other for other in [*hold.behind] if other.token.locked()), None)
            if other is None:
                with self._mutex:  # in which another one may go before this one
                    hold.is_granted = not any(other.token.locked() for other in hold.behind)
                continue
            freed = threading.Event()
            other.waiters.append(freed)
            self._waiting[hold.thread] = other
            try:
                while other.token.locked():
                    if is_nested and self._comes_back(other, hold.thread):
                        raise Aborted(
                            f"a step holds {hold.access.names(other.access)} and waits for what this step holds: run "
                            "it again"
                        )
                    if end is not None and time.monotonic() >= end:
                        raise DeadlineExceeded(
                            f"{hold.access.names(other.access)} did not become free within {timeout:g} s: a step of "
                            f"{_thread(other)} uses it. Nothing was read or written: ask again when that step ended"
                        )
                    freed.wait(ITERATION)
            finally:
                del self._waiting[hold.thread]
        hold.behind.clear()

    def _comes_back(self, hold: Hold | None, thread: int) -> bool:
        """Whether the thread that has a hold waits, through others, for this one."""
        seen = set[int]()
        while hold is not None and hold.thread not in seen:
            seen.add(hold.thread)
            hold = self._waiting.get(hold.thread)
        return thread in seen

    @contextmanager
    def held(self, access: Access, timeout: float | None = None) -> Iterator[None]:
        """A block that has these locks. Raises DeadlineExceeded after so many seconds, by default `PATIENCE`."""
        hold = Hold(access)
        try:
            with hold.token:
                self.take(hold, PATIENCE if timeout is None else timeout)
                yield
        finally:
            hold.leave()

    def stop(self, variable: StoredVariable, why: Callable[[Any], BaseException]) -> None:
        """Stop other threads' steps that compute with a Variable, with the error of ``why``; they write nothing."""
        for hold in tuple(self.computing):
            if variable.key in hold.access.used and hold.thread != threading.get_ident() and hold.stop is not None:
                hold.stop(why)

    def use(self, variables: Iterable[StoredVariable]) -> Use:
        """Register the Variables of a program, so that `uses` knows when it last ran."""
        with self._mutex:
            made = Use(frozenset(variable.key for variable in variables))
            self._uses.add(made)
        return made

    def uses(self, variable: StoredVariable) -> list[float | None]:
        """When each program that uses a Variable last ran."""
        with self._mutex:
            return [use.last for use in self._uses if variable.key in use.keys]

    def read(self, *variables: StoredVariable, timeout: float | None = None) -> Any:
        """A block in which nobody else writes these Variables."""
        return self.held(Access(variables), timeout)

    def write(self, *variables: StoredVariable) -> Any:
        """A block in which nobody else reads or writes these Variables."""
        return self.held(Access(variables, variables))

    def cut(self, variables: Iterable[StoredVariable], timeout: float | None = None) -> VariableSnapshot:
        """A consistent snapshot: copies of these Variables' values here, all of one moment."""
        found = tuple(variables)
        with self.read(*found, timeout=timeout):
            return VariableSnapshot(versions(found), {variable: lazy_memory.clone(variable.kept) for variable in found})


def versions(variables: Iterable[StoredVariable]) -> dict[Any, int]:
    """How often each was written so far."""
    return {variable: variable.version for variable in variables}


def ensure_unchanged(seen: Mapping[Any, int]) -> None:
    """Raise Aborted if one of these Variables was written since; with their locks held."""
    written = [variable.name for variable, version in seen.items() if variable.version != version]
    if written:
        raise Aborted(
            f"another step wrote {', '.join(written)} after this step read it; nothing was written: run this step again"
        )


def _thread(hold: Hold) -> str:
    name = next((thread.name for thread in threading.enumerate() if thread.ident == hold.thread), "an ended thread")
    return f"thread {name}" if hold.thread != threading.get_ident() else "this thread"


NOTHING = Access(())
LOCKS = Locks()
