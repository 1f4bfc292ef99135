"""Recovery after the loss of a parameter server: the report of a recovery, and the batches to replay.

While a training goes on other processes hold copies of the servers' values (`VariablesThere.refresh`), now and then
the notebook pulls them, with the steps that they have seen, and checkpoints are written. When a server is lost the
newest complete one of these copies is taken, tasks and servers are started anew on the workers that are there, under a
new epoch, and the training goes on from that copy: every later step is taken again, so that each counts once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tfnb.cluster.engine.members import Ahead, StepFeeds
from tfnb.cluster.engine.restarts import Restarts
from tfnb.cluster.modes.plan import POISON
from tfnb.cluster.wire import envelope
from tfnb.errors import TfnbError
from tfnb.state.steps_taken import AppliedSteps

KEPT = 256 << 20  # bytes of batches that a copy of the values has not seen, after which the next copy is made at once
MOST = 100  # recoveries that the log holds
NOTEBOOK = "the notebook's copy"

_log: deque[Recovery] = deque(maxlen=MOST)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery: the loss, the step where training resumed, and the cost.

    ``at``: when, in seconds since the epoch. ``lost``: the error in a line. ``step``: steps that were applied, of the
    training, as far as the notebook knew; ``kept``: those that the copy had seen; ``gone``: steps of `tfnb.run` that
    it had not, which nobody takes again; ``undone``: names of queues on lost servers, and how many steps of `tfnb.run`
    used each, of which the same is true. ``age``: of the copy, in seconds. ``seconds``: until tasks and servers stood
    again, the start of the values on them not included. ``left``: restarts that are left of ``most`` within ``within``
    seconds. ``holder``: names of the tasks that held the copy, empty for the notebook and for a checkpoint;
    ``source``: whose copy it was, in words. ``passed_over``: newer copies that could not be taken, and why.
    """

    at: float
    lost: str
    step: int
    kept: int
    gone: int
    undone: tuple[tuple[str, int], ...]
    age: float
    seconds: float
    left: int
    most: int
    within: float
    tasks: int
    servers: int
    holder: str = ""
    source: str = NOTEBOOK
    passed_over: tuple[str, ...] = ()

    @property
    def redone(self) -> int:
        """The number of steps to take again."""
        return max(0, self.step - self.kept)

    def __str__(self) -> str:
        steps = f"{self.redone} step{'' if self.redone == 1 else 's'}"
        return (
            f"{self.lost} at step {self.step} of the training.\n"
            f"  Restored from {self.source} of step {self.kept} ({self.age:.1f} s old): {steps} will be redone, "
            "none is counted twice.\n"
            f"{self._passed}{self._gone}{self._undone}"
            f"  Recovered in {self.seconds:.1f} s: {self.tasks} compute tasks, {self.servers} parameter servers. "
            f"Training goes on ({self.left} of {self.most} restarts left). tfnb.recovery_log() has details."
        )

    @property
    def _passed(self) -> str:
        return "".join(f"  Passed over: {line}.\n" for line in self.passed_over)

    @property
    def _gone(self) -> str:
        return f"  What {_runs(self.gone)} wrote since then is gone: run again what matters.\n" if self.gone else ""

    @property
    def _undone(self) -> str:
        said = (
            f"  Queue {name} holds what {_runs(count)} took since then, and lacks what they put.\n"
            for name, count in self.undone
        )
        return "".join(said)


def _runs(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''} of tfnb.run"


def recovery_log() -> tuple[Recovery, ...]:
    """The recoveries of this process, the oldest first; at most 100.

    `tfnb.fit` on a cluster goes on by itself after a lost parameter server, and prints one block each time.

    >>> import tfnb
    >>> taken_again = sum(recovery.redone for recovery in tfnb.recovery_log())
    """
    return tuple(_log)


@dataclass
class RecoveryBudget:
    """The budget of recoveries of one training: ``restarts``, and fewer than `POISON` in a row at one step."""

    restarts: Restarts
    _failed: int = -1  # the step at which a server was lost last
    _times: int = 0

    def spend(self, error: TfnbError, step: int) -> None:
        """Take one restart; without any left, raise ``error`` with the reason added."""
        if not self.restarts.most:
            raise error
        self._failed, self._times = step, self._times + 1 if step == self._failed else 1
        if self._times == POISON:
            error.message += f"\n  {POISON} attempts at step {step + 1} each lost a server: it seems to kill them."
            raise error
        if not self.restarts.spend(time.monotonic()):
            error.message += f"\n  {self.restarts}: training stops. fit(..., restarts=n) allows more."
            raise error


def logged(recovery: Recovery) -> Recovery:
    """Log a recovery, and return the recovery."""
    _log.append(recovery)
    return recovery


@dataclass
class BatchReplay:
    """The batches of a training, kept until a copy of the values has seen them.

    Arrays need not be kept: their steps are taken by their numbers. A None, at which tasks stand still, is kept until
    they have.

    >>> replay = BatchReplay(StepFeeds((), 0, number=number) for number in range(4))
    >>> batches = replay.rest()
    >>> [next(batches).number for _ in range(3)]
    [0, 1, 2]
    >>> replay.keep(AppliedSteps(1, {2}))
    >>> [batch.number for batch in replay.rest()], replay.applied
    ([1, 3], AppliedSteps(whole=1, beyond={2}))
    """

    source: Ahead | Iterable[StepFeeds | None]
    applied: AppliedSteps = field(default_factory=AppliedSteps)
    nbytes: int = 0
    _drawn: deque[StepFeeds | None] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._more = iter(()) if isinstance(self.source, Ahead) else iter(self.source)

    def rest(self) -> Ahead | Iterator[StepFeeds | None]:
        """Arrays, or the batches that were drawn and are not applied, and then the others."""
        return self.source if isinstance(self.source, Ahead) else self._rest(list(self._drawn))

    def _rest(self, again: list[StepFeeds | None]) -> Iterator[StepFeeds | None]:
        yield from again
        for batch in self._more:
            self._drawn.append(batch)
            self.nbytes += 0 if batch is None else envelope.size(batch.tensors)
            yield batch

    def keep(self, applied: AppliedSteps) -> None:
        """A copy of the values has seen these steps."""
        self.applied = applied
        self._drawn = deque(batch for batch in self._drawn if batch is None or batch.number not in applied)
        self.nbytes = sum(envelope.size(batch.tensors) for batch in self._drawn if batch is not None)

    def stood(self) -> None:
        """The tasks have stood still at the first None."""
        if self._drawn and self._drawn[0] is None:
            self._drawn.popleft()
