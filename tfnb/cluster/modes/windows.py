"""Windows of steps of a pipeline whose tasks are servers: the notebook lends some steps at a time to all stages.

A window's steps are rounds with consecutive numbers. Stages take them one after the other by themselves: each computes
its part, lets its own shard prepare the write, and tells the first stage; when that has heard of all it tells all to
write. So no shard writes a step that another one has not prepared, and two shards are at most one step apart.

`WindowMachine` is the notebook's side. A window ends as a whole, or is stopped, by an error, Ctrl-C or a deadline: then
no task works on it any more, the shards tell which steps they wrote, and what one of them wrote all write. A lost shard
ends the cluster, whose recovery brings all values of one earlier step. Pure: time is an argument.

| State | Event | Next | Instructions |
|---|---|---|---|
| planned | `Start` | running | `RunWindow` |
| running | last `WindowAnswer`, none failed | over | `WindowEnd` with all steps |
| running | `WindowAnswer` that failed, `Interrupt`, `Tick` at the deadline | stopping | `StopWindow` |
| stopping | `WindowExit` | asking | `AskApplied` |
| asking | `WindowCounts`, all alike | over | `WindowEnd` with these steps, and the cause |
| asking | `WindowCounts`, some behind | deciding | `CommitLast` for these |
| deciding | `LastCommit` | over | `WindowEnd` |
| all but over | `ShardLost` | over | `WindowEnd` without steps |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tfnb.cluster.modes import events as e
from tfnb.cluster.wire.messages import Failure

SECONDS = 1.0  # that a window takes, about: so often the notebook hears of steps
STEPS = 16  # of a window, at most
BYTES = 64 << 20  # of a window's feeds, at most, unless one step has more


class WindowAnswer(NamedTuple):
    """A stage has left its window; ``failure``: why before its end."""

    task: int
    failure: Failure | None = None
    is_missed: bool = False  # a message to it or from it: it may be tried again


class WindowExit(NamedTuple):
    """No task works on the window any more."""


class WindowCounts(NamedTuple):
    """How many steps of the window each written shard has written."""

    steps: Mapping[int, int]


class LastCommit(NamedTuple):
    """All shards have written the last step."""


Event = e.Event | WindowAnswer | WindowExit | WindowCounts | LastCommit


class RunWindow(NamedTuple):
    """Let all stages begin."""


class StopWindow(NamedTuple):
    """Let all stages leave the window."""


class AskApplied(NamedTuple):
    """Ask the shards for the steps that they wrote."""


class CommitLast(NamedTuple):
    """Let shards write a step, by its place in the window, that others have written."""

    step: int
    shards: tuple[int, ...]


class WindowEnd(NamedTuple):
    """``steps`` of the window are written, everywhere."""

    steps: int
    cause: e.Cause | None = None
    is_missed: bool = False


Instruction = RunWindow | StopWindow | AskApplied | CommitLast | WindowEnd


@dataclass
class WindowMachine:
    """One window of ``count`` steps over these tasks.

    >>> machine = WindowMachine((0, 1), count=3)
    >>> machine.on(e.Start(), 0.0), machine.on(WindowAnswer(0), 0.0), machine.on(WindowAnswer(1), 0.0)
    ([RunWindow()], [], [WindowEnd(steps=3, cause=None, is_missed=False)])
    """

    tasks: Collection[int]
    count: int
    deadline: float = float("inf")
    state: str = "planned"
    steps: int = 0
    cause: e.Cause | None = None
    is_missed: bool = False
    answered: set[int] = field(default_factory=set)

    def on(self, event: Event, now: float) -> list[Instruction]:
        """The next instructions."""
        match self.state, event:
            case "planned", e.Start():
                self.state = "running"
                return [RunWindow()]
            case "running", WindowAnswer(task, None):
                self.answered.add(task)
                return self._end(self.count) if self.answered.issuperset(self.tasks) else []
            case "running", WindowAnswer(_, failure, is_missed):
                self.is_missed = is_missed
                return self._stop(failure)
            case "running", e.Interrupt():
                return self._stop(e.UserStop())
            case "running", e.Tick() if now >= self.deadline:
                return self._stop(e.TimedOut())
            case "stopping", WindowExit():
                self.state = "asking"
                return [AskApplied()]
            case "asking", WindowCounts(steps):
                return self._decide(steps)
            case "deciding", LastCommit():
                return self._end(self.steps)
            case (("planned" | "running" | "stopping" | "asking" | "deciding"), e.ShardLost(shard)):
                self.cause, self.is_missed = e.ServerLost(shard), False
                return self._end(0)
        return []

    def _stop(self, cause: e.Cause | None) -> list[Instruction]:
        self.state, self.cause = "stopping", cause
        return [StopWindow()]

    def _decide(self, steps: Mapping[int, int]) -> list[Instruction]:
        """A step that one shard wrote was prepared by all."""
        self.steps = max(steps.values(), default=0)
        behind = tuple(shard for shard, count in steps.items() if count < self.steps)
        if not behind:
            return self._end(self.steps)
        self.state = "deciding"
        return [CommitLast(self.steps - 1, behind)]

    def _end(self, steps: int) -> list[Instruction]:
        self.state = "over"
        return [WindowEnd(steps, self.cause, self.is_missed)]


# -- the stages' side -------------------------------------------------------------------------------------------------


class StageWord(NamedTuple):
    """A stage tells another one: that it has prepared a step (``is_go`` False), or that all have."""

    stage: int
    is_go: bool = False


class TellStage(NamedTuple):
    """Send a word to a stage."""

    to: int
    word: StageWord


class WriteStep(NamedTuple):
    """All stages have prepared the step: write it."""


@dataclass
class Agreement:
    """The agreement of the stages on one step, at stage ``here``: the first of ``stages`` hears of all, and tells all.

    >>> first, second = Agreement(0, (0, 1)), Agreement(1, (0, 1))
    >>> first.prepared(), second.prepared()
    ([], [TellStage(to=0, word=StageWord(stage=1, is_go=False))])
    >>> first.heard(StageWord(1))
    [TellStage(to=1, word=StageWord(stage=0, is_go=True)), WriteStep()]
    >>> second.heard(StageWord(0, is_go=True))
    [WriteStep()]
    """

    here: int
    stages: Sequence[int]
    ready: set[int] = field(default_factory=set)

    @property
    def awaited(self) -> list[StageWord]:
        """The words that this stage waits for."""
        first, *others = self.stages
        return [StageWord(stage) for stage in others] if self.here == first else [StageWord(first, is_go=True)]

    def prepared(self) -> list[TellStage | WriteStep]:
        """This stage has prepared the step."""
        first = self.stages[0]
        return self._ready(first) if self.here == first else [TellStage(first, StageWord(self.here))]

    def heard(self, word: StageWord) -> list[TellStage | WriteStep]:
        """A word of another stage."""
        return [WriteStep()] if word.is_go else self._ready(word.stage)

    def _ready(self, stage: int) -> list[TellStage | WriteStep]:
        self.ready.add(stage)
        if not self.ready.issuperset(self.stages):
            return []
        return [*(TellStage(to, StageWord(self.here, is_go=True)) for to in self.stages[1:]), WriteStep()]


# -- sizes ------------------------------------------------------------------------------------------------------------


@dataclass
class WindowSizes:
    """How many steps the next window has: about `SECONDS`, at most twice as many as the last one, `STEPS` and `BYTES`.

    >>> sizes = WindowSizes()
    >>> [(sizes.next, sizes.took(sizes.next, 0.02 * sizes.next))[0] for _ in range(5)]
    [1, 2, 4, 8, 16]
    """

    next: int = 1

    def took(self, steps: int, seconds: float) -> None:
        """So many steps took so long."""
        fitting = int(SECONDS * steps / max(seconds, 1e-6))
        self.next = max(1, min(2 * max(1, steps), fitting, STEPS))
