"""The events that `plan` and the machines of `fit` share, and the causes of a stop."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfnb.cluster.wire.messages import Failure

# -- why a machine stopped ------------------------------------------------------------------------------------


class UserStop(NamedTuple):
    """The user stopped the step or training; nothing of the step was written."""


class TimedOut(NamedTuple):
    """Its deadline passed; nothing of the step was written."""


class TasksLost(NamedTuple):
    """No compute task is left, or the step itself kills them."""

    message: str = "no compute task is left"
    tasks: tuple[int, ...] = ()  # that it killed
    put: str = ""  # elements that it put into queues, in words

    @property
    def is_none_left(self) -> bool:
        """Whether another task, should one come, can go on."""
        return self.message == TasksLost().message


class ServerLost(NamedTuple):
    """A parameter server is gone."""

    shard: int


Cause = UserStop | TimedOut | TasksLost | ServerLost | Failure


# -- events ---------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """Begin."""


class TaskLoss(NamedTuple):
    """A compute task is dead, or ``is_silent``: a suspect that does not answer, and rejoins when answering again."""

    task: int
    is_silent: bool = False


class MissedPing(NamedTuple):
    """A compute task left a ping unanswered: in bounded mode servers give its loop up, so that no peer waits; it goes
    on with a new one.
    """

    task: int


class TaskJoin(NamedTuple):
    """A compute task joins, with a number of its own, even if the task follows a lost one."""

    task: int
    follows: int | None = None


class ShardLost(NamedTuple):
    """A server is dead."""

    shard: int


class Interrupt(NamedTuple):
    """Ctrl-C."""


class Tick(NamedTuple):
    """Time has passed."""


class Drain(NamedTuple):
    """Begin nothing, and say when every lease is over."""


class Resume(NamedTuple):
    """The end of a hold."""


class DataEnd(NamedTuple):
    """There are no more batches."""


class Fault(NamedTuple):
    """The driver of the machine cannot carry out its instructions."""

    failure: Failure


Event = Start | TaskLoss | MissedPing | TaskJoin | ShardLost | Interrupt | Tick | Drain | Resume | DataEnd | Fault


# -- the last instruction -----------------------------------------------------------------------------------------


class Finish(NamedTuple):
    """The machine is at its end: with values of each worker and their rows, or with a cause.

    ``torn``: of each push that only some shards applied, these shards; no task is left to complete it.
    """

    values: tuple[Any, ...] = ()
    rows: tuple[int, ...] = ()
    cause: Cause | None = None
    torn: tuple[tuple[int, ...], ...] = ()
