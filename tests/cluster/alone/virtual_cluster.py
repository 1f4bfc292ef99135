"""A training under faults on a virtual clock: the real machines of the modes, with real server cores where it is sync.

Each task computes, sends and waits. A fault comes every so many seconds, by a seed: a task is killed, and has a
successor some seconds later, or is stopped for some seconds. What an event takes is a constant here, measured on real
processes. Processor seconds of all tasks are accounted for by what they were spent on.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.cluster.alone.test_rounds import Worker, World, replayed
from tests.cluster.alone.virtual_clock import Clock
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import leases as a
from tfnb.cluster.modes import rounds as s
from tfnb.cluster.tasks.pieces import TaskShare
from tfnb.cluster.wire.messages import SILENCE

TASKS, SHARDS = 8, (0, 1)
WAY = 0.001  # seconds of a message, one way
TOLD = 0.5  # seconds between two reports of a loop, which tells of the end of a piece at once
FOUND = 0.1  # seconds until the notebook knows of a death
CUT = 0.05  # seconds until servers and loops have ended all rounds
BACK = 4.0  # seconds until a killed task has a successor that takes part: 1.3 to 9.7 on two processors, idle or busy
AGAIN = 0.3  # seconds until a task takes part that was silent, and answers again
STOPS = 1.0, 10.0  # seconds for which a task is stopped: least and most
TICK = 0.05  # seconds between two looks at the clock


class Kept(NamedTuple):
    """The steps of a training, ``rate`` of them a virtual second, and shares of the tasks' time by their use."""

    steps: int
    rate: float
    faults: int
    shares: dict[str, float]

    def __str__(self) -> str:
        told = ", ".join(f"{name} {share:.1%}" for name, share in self.shares.items() if share >= 0.0005)
        return f"{self.steps} steps, {self.faults} faults; of the tasks' time: {told}"


@dataclass
class VirtualTask:
    """The process of a task. ``token``: another one where what the task has begun is dropped.

    ``is_computing``; ``is_engaged``: it computes, or waits for the answers to its step.
    """

    number: int
    token: int = 0
    is_dead: bool = False
    stopped_at: float = -1.0
    until: float = -1.0  # it is stopped
    is_suspect: bool = False
    is_computing: bool = False
    is_engaged: bool = False

    def is_stopped(self, now: float) -> bool:
        """Whether the process stands still."""
        return now < self.until

    def drop(self) -> None:
        """Nothing that the task has begun comes to its end."""
        self.token, self.is_computing, self.is_engaged = self.token + 1, False, False


class VirtualCluster:
    """The clock, the tasks and the faults; a mode gives it its machine. ``spent``: processor seconds, by their use.

    every: seconds between two faults. step: seconds between two steps while all tasks are there. ``work``: the seconds
    that a step takes of one processor.
    """

    def __init__(self, seed: int, seconds: float, every: float | None, kinds: tuple[str, ...], step: float) -> None:
        self.clock, self._end = Clock(), seconds
        self._random = random.Random(seed)
        self._every, self._kinds = every, kinds
        self.work = step * TASKS
        self.numbers = itertools.count(TASKS)
        self.tasks = {number: VirtualTask(number) for number in range(TASKS)}
        self.spent: Counter[str] = Counter()
        self.faults = 0
        self.untold = 0  # faults that the machine has not dealt with
        self.offered = 0
        self.written = 0  # steps
        self.last = 0.0  # when the last of them was written

    # -- what a mode says ---------------------------------------------------------------------------------------------

    machine: Any

    def feed(self, event: Any) -> None:
        """Give the machine an event, and carry out what it says."""
        raise NotImplementedError

    def ended(self, task: VirtualTask) -> None:
        """What a task does is dropped: it is killed, or was given up."""

    def check(self) -> None:
        """Each step counts once."""

    # -- the clock ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The virtual time."""
        return self.clock.now

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something so many seconds from now."""
        self.clock.at(self.now + seconds, do)

    def by(self, task: VirtualTask, seconds: float, do: Callable[[], None]) -> None:
        """Let a task do something in so many seconds, or as soon as it is not stopped; never if that is dropped."""
        token = task.token

        def due() -> None:
            if token == task.token and task.is_stopped(self.now):
                self.at(task.until - self.now, due)
            elif token == task.token:
                do()

        self.at(seconds, due)

    def compute(self, task: VirtualTask, seconds: float, then: Callable[[], None]) -> None:
        """Let a task compute for so long, not counting the time in which it is stopped."""
        task.is_computing, token = True, task.token

        def computed() -> None:
            if token == task.token and task.is_stopped(self.now):
                self.at(task.until - task.stopped_at, computed)
            elif token == task.token:
                task.is_computing = False
                then()

        self.at(seconds + max(0.0, task.until - self.now), computed)

    def run(self) -> Kept:
        """The whole time."""
        self.feed(e.Start())
        self._offer()
        self.at(TICK, self._tick)
        if self._every is not None:
            self.at(self._every / 2, self._fault)
        while self.clock.due <= self._end:
            self._account(self.clock.due - self.now)
            self.clock.step()
            self._offer()
        self.check()
        whole = TASKS * self._end
        useful = self.written * self.work
        shares = {"steps": useful, "computed in vain": self.spent.pop("computing", 0.0) - useful, **self.spent}
        return Kept(
            self.written,
            self.written / self.last,
            self.faults,
            {name: seconds / whole for name, seconds in shares.items()},
        )

    def _account(self, seconds: float) -> None:
        there = 0
        for task in self.tasks.values():
            if task.is_dead or task.is_stopped(self.now) or task.is_suspect:
                continue
            there += 1
            waits = "waiting until a fault is known" if self.untold else "waiting for messages"
            self.spent["computing" if task.is_computing else waits] += seconds
        self.spent["away"] += (TASKS - there) * seconds

    def _tick(self) -> None:
        self.feed(e.Tick())
        self.at(TICK, self._tick)

    def _offer(self) -> None:
        while self.machine.wants:
            count = self.machine.next_size(None)
            steps = tuple(range(self.offered + 1, self.offered + count + 1))
            self.offered += count
            self.feed(a.Offer(steps, self.machine.takers[0]))

    # -- faults -------------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        assert self._every is not None
        self.at(self._every, self._fault)
        there = [task for task in self.tasks.values() if not (task.is_dead or task.is_stopped(self.now))]
        task = self._random.choice([task for task in there if not task.is_suspect])
        self.faults += 1
        if self._random.choice(self._kinds) == "kill":
            self._kill(task)
        else:
            self._stop(task, self._random.uniform(*STOPS))

    def _kill(self, task: VirtualTask) -> None:
        task.is_dead, self.untold = True, self.untold + 1
        task.drop()
        self.ended(task)
        self.at(FOUND, lambda: self._lose(task, is_silent=False))
        self.at(BACK, lambda: self._join(task))

    def _lose(self, task: VirtualTask, *, is_silent: bool) -> None:
        self.untold -= 1
        self.feed(e.TaskLoss(task.number, is_silent))

    def _stop(self, task: VirtualTask, seconds: float) -> None:
        task.stopped_at, task.until = self.now, self.now + seconds
        self.untold += 1
        if seconds < SILENCE:
            self.at(seconds, self._unnoticed)
        else:
            self.at(SILENCE, lambda: self._suspect(task))

    def _unnoticed(self) -> None:
        self.untold -= 1

    def _suspect(self, task: VirtualTask) -> None:
        task.is_suspect = True
        task.drop()
        self.ended(task)
        self._lose(task, is_silent=True)
        self.at(task.until - self.now + AGAIN, lambda: self._join(task))

    def _join(self, task: VirtualTask) -> None:
        """The successor of a task takes part, in its place."""
        del self.tasks[task.number]
        new = VirtualTask(next(self.numbers))
        self.tasks[new.number] = new
        self.begin(new)
        self.feed(e.TaskJoin(new.number, task.number))

    def begin(self, task: VirtualTask) -> None:
        """A task is there."""


class _TimedWorld(World):
    """Real cores; what tells the notebook of a step takes its time."""

    cluster: VirtualSync

    def feed(self, event: Any) -> None:
        if isinstance(event, a.PieceProgress):
            self.cluster.tell(event)
        else:
            super().feed(event)


class VirtualSync(VirtualCluster):
    """Synchronous training: each task computes its part of a step; servers write a step when all parts are there."""

    def __init__(self, *about: Any, spare: int = 0) -> None:
        super().__init__(*about)
        self.machine = s.Rounds(list(range(TASKS)), list(SHARDS), itertools.count(1), spare=spare, patience=60.0)
        self.world = _TimedWorld(self.machine, range(TASKS), SHARDS, SHARDS)
        self.world.cluster = self
        self._waits: set[int] = set()  # tasks whose parts are sent
        self._told: dict[int, list[a.PieceProgress]] = {}
        self._is_cutting = False

    def feed(self, event: Any) -> None:
        self.world.now = self.now
        self.world.feed(event)
        self._after()

    def _after(self) -> None:
        """Carry on with everything that the last event made possible."""
        world = self.world
        if len(world.written) > self.written:
            self.written, self.last = len(world.written), self.now
        if world.cut is not None and not self._is_cutting:
            self._is_cutting = True
            self.at(CUT, self._cut)
        if world.is_asked:
            world.is_asked = False
            self.at(2 * WAY, self._answer)
        for send in world.sends:
            self.at(WAY, lambda send=send: self._deliver(send))
        world.sends.clear()
        for number, task in self.tasks.items():
            worker = world.tasks[number]
            if number in self._waits:
                if all(world.answers.get(ticket) is not None for ticket in worker.out.values()):
                    self._waits.discard(number)
                    self.by(task, WAY, lambda task=task: self._hear(task))
            elif worker.pieces and not (task.is_engaged or task.is_dead or task.is_suspect or self._is_cutting):
                self._compute(task)

    def _compute(self, task: VirtualTask) -> None:
        task.is_engaged = True
        share = TaskShare(*self.world.tasks[task.number].pieces[0][3])
        self.compute(task, self.work / share.places, lambda: self.by(task, WAY, lambda: self._send(task)))

    def _send(self, task: VirtualTask) -> None:
        self.world.tasks[task.number].begin(SHARDS)
        self._waits.add(task.number)
        self._after()

    def _hear(self, task: VirtualTask) -> None:
        worker = self.world.tasks[task.number]
        worker.hear()
        if worker.out:  # it asks for values of one round
            self._waits.add(task.number)
        task.is_engaged = bool(worker.out)
        self._after()

    def _deliver(self, send: Any) -> None:
        self.world.ask(send.shard, send.method, **send.meta)
        self._after()

    def _answer(self) -> None:
        self.world.answer()
        self._after()

    def tell(self, progress: a.PieceProgress) -> None:
        """A task has a step to tell of."""
        waiting = self._told.setdefault(progress.task, [])
        waiting.append(progress)
        if progress.done == len(self.world.steps[progress.number]):
            self.at(WAY, lambda: self._tell(progress.task))
        elif len(waiting) == 1:
            self.at(TOLD, lambda: self._tell(progress.task))

    def _tell(self, number: int) -> None:
        for progress in self._told.pop(number, ()):
            self.world.now = self.now
            World.feed(self.world, progress)
        self._after()

    def _cut(self) -> None:
        for task in self.tasks.values():
            task.drop()
        self._waits.clear()
        self._told.clear()
        self._is_cutting = False
        self.world.make_cut()
        self._told.clear()
        self._after()

    def ended(self, task: VirtualTask) -> None:
        self._waits.discard(task.number)
        self.world.tasks[task.number].alive = False
        self.world.tasks[task.number].end()

    def begin(self, task: VirtualTask) -> None:
        self.world.tasks[task.number] = Worker(self.world, task.number)

    def check(self) -> None:
        world = self.world
        world.feed(e.Interrupt())
        world.make_cut()  # all servers are at one round then
        assert world.reported == list(range(1, self.written + 1)), "every step once, in order"
        assert {shard: world.value(shard) for shard in SHARDS} == replayed(world), "each part of each round once"


class VirtualAsync(VirtualCluster):
    """Asynchronous training: each task takes whole steps on its own, and servers apply each when it comes."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.machine = a.Leases(list(range(TASKS)), list(SHARDS), itertools.count(1), patience=60.0)
        self._lines: dict[int, deque[a.StreamPiece]] = {number: deque() for number in range(TASKS)}
        self._done: dict[int, int] = {}  # by piece, steps that are applied
        self._told: dict[int, int] = {}
        self._applied: dict[tuple[int, int], int] = {}  # by stream and number, the step
        self._steps: dict[int, a.StreamPiece] = {}
        self._reported: Counter[int] = Counter()

    def feed(self, event: Any) -> None:
        for instruction in self.machine.on(event, self.now):
            match instruction:
                case a.Give(task, piece):
                    lent = a.StreamPiece(piece.number, piece.stream, piece.first, piece.steps)
                    self._steps[piece.number] = lent
                    self._lines[task].append(lent)
                    self._go_on(task)
                case a.Report(number, start, stop):
                    self._reported.update(self._steps[number].steps[start:stop])
                case a.Continue():
                    pass
                case _:
                    raise AssertionError(instruction)

    def _go_on(self, number: int) -> None:
        task = self.tasks.get(number)
        if task is not None and self._lines[number] and not (task.is_engaged or task.is_dead or task.is_suspect):
            task.is_engaged = True
            self.compute(task, self.work, lambda: self.by(task, WAY, lambda: self._apply(task)))

    def _apply(self, task: VirtualTask) -> None:
        """The servers apply a step, unless they have it, and answer."""
        piece = self._lines[task.number][0]
        done = self._done.get(piece.number, 0)
        operation = piece.operations[done]
        if operation not in self._applied:
            self.written, self.last = self.written + 1, self.now
        assert self._applied.setdefault(operation, piece.steps[done]) == piece.steps[done]
        self.by(task, WAY, lambda: self._answered(task, piece))

    def _answered(self, task: VirtualTask, piece: a.StreamPiece) -> None:
        task.is_engaged = False
        self._done[piece.number] = done = self._done.get(piece.number, 0) + 1
        if done == piece.count:
            self._lines[task.number].popleft()
            self._tell(task.number, piece.number)
        elif piece.number not in self._told:
            self._told[piece.number] = task.number
            self.by(task, TOLD, lambda: self._tell(task.number, piece.number))
        self._go_on(task.number)

    def _tell(self, task: int, number: int) -> None:
        self._told.pop(number, None)
        if task in self.tasks:
            self.feed(a.PieceProgress(task, number, self._done[number]))

    def ended(self, task: VirtualTask) -> None:
        self._lines[task.number] = deque()

    def begin(self, task: VirtualTask) -> None:
        self._lines[task.number] = deque()

    def check(self) -> None:
        steps = list(self._applied.values())
        assert len(set(steps)) == len(steps) == self.written, "each step is applied under one number"
        assert set(self._reported.values()) <= {1} and self._reported.keys() <= set(steps), "each is told once"


MODES: dict[str, Callable[..., VirtualCluster]] = {
    "sync": VirtualSync,
    "sync, backup=1": lambda *about: VirtualSync(*about, spare=1),
    "async": VirtualAsync,
}
KINDS = {"killed": ("kill",), "killed or stopped": ("kill", "stop")}


def kept(
    mode: str, kinds: str, seconds: float, *, every: float = 15.0, step: float = 0.1, seed: int = 0
) -> tuple[float, Kept]:
    """The share of its steps that a training keeps where a task is struck every so many seconds, and the account."""
    alone = MODES[mode](seed, 60.0, None, (), step).run()
    struck = MODES[mode](seed, seconds, every, KINDS[kinds], step).run()
    return struck.rate / alone.rate, struck
