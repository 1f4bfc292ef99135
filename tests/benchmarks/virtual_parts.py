"""A step in parts, each on a device of its own, on a virtual clock: the real machines, whose work has given times.

Each part has its own `tfnb.execution.dataflow.machine.Machine`, a lane that runs one piece of its work after the other,
most urgent first, and a link to each other part that carries one message after the other. Work is done for real, so the
values are those of a run; how long it takes on the clock is its time in a profile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tests.cluster.alone.virtual_clock import Clock, Link
from tfnb.execution.dataflow.executor import Dataflow
from tfnb.execution.dataflow.machine import CALL, WORK, Machine, Step, Task, Template
from tfnb.placement.simulation import LinkCost

Dead = tuple[int, int] | None


class Profile:
    """The seconds of each piece of work: the median of all times that it ran."""

    def __init__(self) -> None:
        self._seconds: dict[Step, list[float]] = {}

    def add(self, step: Step, seconds: float) -> None:
        """Add one measured time."""
        self._seconds.setdefault(step, []).append(seconds)

    @property
    def medians(self) -> dict[Step, float]:
        """By the step of a plan."""
        return {step: statistics.median(found) for step, found in self._seconds.items()}


class VirtualPeers:
    """The messages of one part; see `tfnb.execution.dataflow.machine.Peers`."""

    round = 0

    def __init__(self, clock: VirtualStep, part: int) -> None:
        self._clock, self._part = clock, part

    def tell(self, edge: int, to: int, tag: tuple[int, ...], value: object, dead: Dead) -> None:
        """Send a message over the link, which is free when earlier ones are over it."""
        self._clock.send(self._part, to, (edge, tag), value, dead)

    def want(self, edge: int, tag: tuple[int, ...], deliver: Callable[[Any, Dead], None]) -> None:
        """Register who takes a message."""
        self._clock.want((edge, tag), deliver)


class VirtualStep:
    """One run of a step on the clock. seconds: of each piece of work, by default as measured now.

    profile: gets the measured processor seconds.
    """

    def __init__(
        self,
        program: Dataflow,
        links: Callable[[int, int], LinkCost],
        seconds: Mapping[Step, float] | None = None,
        *,
        profile: Profile | None = None,
    ) -> None:
        self.program, self.links, self.seconds = program, links, seconds
        self.profile, self.clock, self.sent = profile or Profile(), Clock(), 0
        self._carriers: dict[tuple[int, int], Link] = {}
        self._here: dict[Any, tuple[Any, Dead]] = {}
        self._wanted: dict[Any, Callable[[Any, Dead], None]] = {}
        self._places = [part.place.number for part in program.parts]
        self._ready: list[list[Task]] = [[] for _ in self._places]
        self.busy = [0.0] * len(self._places)  # seconds that each lane worked
        self._running: list[Task | None] = [None] * len(self._places)
        results = len(program.found.ends)
        self.machines = [Machine([plan.root], results, None, VirtualPeers(self, place))
                         for plan, place in zip(program.plans, self._places, strict=True)]  # fmt: skip
        for machine, plan in zip(self.machines, program.plans, strict=True):
            machine.arrived = machine.came
            hand_out(plan.root)

    def run(self, feeds: Sequence[torch.Tensor], storages: Sequence[torch.Tensor]) -> list[Any]:
        """The fetched values. Fails where parts wait for one another."""
        stored = dict(zip(self.program.variables, storages, strict=True))
        for at, (machine, plan) in enumerate(zip(self.machines, self.program.plans, strict=True)):
            machine.feed(self.program._start(plan, feeds, stored, 0))
            self._turn(at)
        self.clock.run(self._is_over)
        each = zip(*(machine.results for machine in self.machines), strict=True)
        return [next((value for value in values if value is not None), None) for values in each]

    def send(self, source: int, to: int, key: Any, value: Any, dead: Dead) -> None:
        """A message leaves a part."""
        nbytes = getattr(value, "nbytes", 0)
        self.sent += nbytes
        if (source, to) not in self._carriers:
            cost = self.links(source, to)
            self._carriers[source, to] = Link(self.clock, cost.rate, cost.latency)
        self.clock.at(self._carriers[source, to].arrival(nbytes), partial(self._came, key, value, dead))

    def want(self, key: Any, deliver: Callable[[Any, Dead], None]) -> None:
        """Somebody waits for a message."""
        if key in self._here:
            self.clock.at(self.now, partial(deliver, *self._here.pop(key)))  # never inside of the machine's own turn
        else:
            self._wanted[key] = deliver

    def _came(self, key: Any, value: Any, dead: Dead) -> None:
        deliver = self._wanted.pop(key, None)
        if deliver is None:
            self._here[key] = value, dead
        else:
            deliver(value, dead)

    @property
    def now(self) -> float:
        """The virtual time."""
        return self.clock.now

    def _is_over(self) -> bool:
        """Let each part do what is ready; whether nothing is left."""
        for at in range(len(self.machines)):
            self._turn(at)
        return all(machine.is_over for machine in self.machines)

    def _turn(self, at: int) -> None:
        """Run what is ready on a part, and begin the most urgent work if its lane is free."""
        machine, ready = self.machines[at], self._ready[at]
        machine.run()
        ready += machine.tasks
        machine.tasks.clear()
        if self._running[at] is None and ready:
            task = min(ready)
            ready.remove(task)
            self._running[at] = task
            begin = time.thread_time()  # beside other work
            outputs = task.step.call(*task.args)  # type: ignore[misc]
            taken = time.thread_time() - begin
            self.profile.add(task.step, taken)
            lasts = taken if self.seconds is None else self.seconds[task.step]
            self.busy[at] += lasts
            self.clock.at(self.now + lasts, partial(self._over, at, task, outputs))

    def _over(self, at: int, task: Task, outputs: Sequence[Any]) -> None:
        self._running[at] = None
        self.machines[at].finish(task, outputs)


def hand_out(root: Template) -> None:
    """Have what generated code computes handed out, in place of being done inside of the machine's own turn."""
    stack, seen = [root], {root}
    while stack:
        for step in stack.pop().steps:
            if step.kind == CALL and step.op is not None:
                step.kind = WORK
            if step.inner is not None and step.inner not in seen:
                seen.add(step.inner)
                stack.append(step.inner)
