"""All-reduce training as a pure machine: every task has a replica of all Variables.

`Ranks` gives every task of a generation, a rank, the same pieces, as `rounds.Rounds` does. Ranks sum their gradients
among themselves and apply the same update, so a rank may be one step ahead of another one, and never more. The servers
hold the values of ``saved`` steps: those of the begin, and of every save. At a cut all loops end, and the rank that
applied most steps saves; a new generation begins from that. Hence a step counts once, as long as one rank lives that
applied it. A hold stands where every piece is done that was given, and saves. No clock, socket, thread or Dask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfnb.cluster.modes import events as e
from tfnb.cluster.modes.leases import LoopFailure, Standstill
from tfnb.cluster.modes.rounds import Rounds
from tfnb.cluster.wire.messages import Failure


class Save(NamedTuple):
    """Let a rank that has applied every round up to ``latest`` write its values to the servers."""

    task: int
    latest: int


class Stood(NamedTuple):
    """The loop of a rank has ended after round ``latest``; None: its values are gone."""

    task: int
    latest: int | None


class SaveResult(NamedTuple):
    """The servers hold a rank's saved values; or none of them, because of a ``failure``."""

    save: Save
    failure: Failure | None = None


@dataclass
class Ranks(Rounds):
    """All-reduce. ``saved``: steps that the servers' values have seen.

    ``waits``: ranks whose loops have not ended in a cut; ``stood``: the last round of those that have. ``saver``: who
    saves, and which round that is.
    """

    saved: int = -1
    waits: set[int] = field(default_factory=set)
    stood: dict[int, int] = field(default_factory=dict)
    saver: Save | None = None
    is_hold_wanted: bool = False

    def __post_init__(self) -> None:
        self.saved = self.base

    def on(self, event: Any, now: float) -> list[Any]:
        """The instructions that an event leads to."""
        match self.state, event:
            case "cutting", Stood(task, latest):
                self.waits.discard(task)
                if latest is not None and task in self.tasks:
                    self.stood[task] = latest
                return self._gathered(now)
            case "cutting", LoopFailure(_, failure, is_fatal=True) if self.waits:  # others heard of it as a missing sum
                self.cause = self.cause or failure
                return []
            case "open" | "cutting", SaveResult(save, failure) if save is self.saver:
                return self._saved(failure, now)
            case "cutting", SaveResult(save, None):  # an earlier one, which ended after the cut began: it is written
                self.saved = max(self.saved, self.steps_at(save.latest))
                return []
            case "open" | "cutting", e.Drain():
                self.is_hold_wanted = True
                return self._next()
            case "waiting", e.Drain():  # the servers hold all, and the task that comes does not begin
                self.is_hold_wanted = True
                return [Standstill()]
            case "open" | "cutting" | "waiting", e.Resume():
                self.is_hold_wanted = False
                return self._next()
        found = super().on(event, now)
        if isinstance(event, e.TaskLoss) and self.state == "cutting":
            self.waits.discard(event.task)
            self.stood.pop(event.task, None)
            if self.saver is not None and self.saver.task == event.task:
                self.saver = None
            found += self._gathered(now)
        return found

    @property
    def reported(self) -> int:
        """Steps reported to the notebook as applied."""
        return self.steps_at(self.out[0].first + self.out[0].done - 1 if self.out else self.next - 1)

    def _begin(self, now: float) -> list[Any]:
        held = [Standstill()] if self.is_hold_wanted else []
        return [*super()._begin(now), *held]  # the servers hold all that is applied

    def _next(self) -> list[Any]:
        if self.state == "open" and self.saver is not None:  # a rank that saves stands: its values must not change
            return []
        if self.state == "open" and self.is_hold_wanted:
            return self._hold() if not self.out else []
        return super()._next()

    def _hold(self) -> list[Any]:
        """Every rank stands after the last round."""
        if self.reported == self.saved:
            return [Standstill()]
        self.saver = Save(self.members[0], self.next - 1)
        return [self.saver]

    def _stop(self, cause: e.Cause | None) -> list[Any]:
        found = super()._stop(cause)
        if found:  # it begins
            self.waits, self.stood, self.saver = set(self.members), {}, None
        return found

    def _join(self, task: int, follows: int | None, now: float) -> list[Any]:
        """A rank joins at once: steps that only one rank has applied are lost with that rank."""
        found = super()._join(task, follows, now)
        return self._stop(None) if self.state == "open" and not found else found

    def _gathered(self, now: float) -> list[Any]:
        """In a cut, once every loop has ended: let the most advanced rank save, or end the cut."""
        if self.waits or self.saver is not None:
            return []
        task = max(self.stood, key=lambda task: self.stood[task], default=None)
        most = self.saved if task is None else max(self.saved, self.steps_at(self.stood[task]))
        if self.reported > most:
            gone = self.reported - most
            return self._over(Failure(
                "WorkerLost", f"every rank that had applied the last {gone} step{'s' if gone > 1 else ''} was lost: "
                f"the servers hold the values of step {most} of {self.reported}. Take the rest again; more ranks, or "
                'mode="sync", lose none',
            ))  # fmt: skip
        if task is None or most == self.saved:
            return self._cut(self.first - 1 + most - self.base, now)
        self.saver = Save(task, self.stood[task])
        return [self.saver]

    def _saved(self, failure: Failure | None, now: float) -> list[Any]:
        assert self.saver is not None
        saver, self.saver = self.saver, None
        if self.state == "open":
            if failure is not None:
                return self._stop(failure)
            self.saved = self.steps_at(saver.latest)
            return self._next()
        if failure is not None:
            self.cause = self.cause or failure
            del self.stood[saver.task]
            return self._gathered(now)
        self.saved = self.steps_at(saver.latest)
        return self._cut(saver.latest, now)
