"""Where work of a step runs that takes long: lanes over one pool of threads.

A device is a lane with one task at a time; what names no device shares one that is as wide as the machine. A lane takes
the earliest iteration first, and there what the most work waits for. The lane OWN is the thread of the step itself,
which hears what came in between two of its tasks.
"""

from __future__ import annotations

import os
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from tfnb.execution.dataflow.machine import Task

OWN = "own"
_THREADS = ThreadPoolExecutor(256, thread_name_prefix="tfnb-lane")  # started when they are needed, and then kept


@dataclass(slots=True)
class _Lane:
    width: int
    busy: int = 0
    tasks: list[Task] = field(default_factory=list)


class Lanes:
    """The lanes of one step; ``inbox`` gets (task, outputs, error) of each task that ends."""

    def __init__(self, inbox: queue.SimpleQueue[Any]) -> None:
        self.inbox = inbox
        self.running: set[Task] = set()
        self.waiting = 0
        self._lanes: dict[str | None, _Lane] = {}

    def add(self, task: Task) -> None:
        """A task to be run when its lane is free."""
        name = task.step.lane
        lane = self._lanes.get(name)
        if lane is None:
            width = 0 if name == OWN else 1 if name is not None else os.cpu_count() or 1
            lane = self._lanes[name] = _Lane(width)
        heappush(lane.tasks, task)
        self.waiting += 1

    def own(self) -> Task | None:
        """The first task of the step's own thread, which is taken."""
        lane = self._lanes.get(OWN)
        if lane is None or not lane.tasks:
            return None
        self.waiting -= 1
        return heappop(lane.tasks)

    def only(self) -> Task | None:
        """Take the only task, if there is exactly one and none is running."""
        if self.running or self.waiting != 1:
            return None
        self.waiting = 0
        return next(heappop(lane.tasks) for lane in self._lanes.values() if lane.tasks)

    def start(self) -> None:
        """Start tasks while lanes have capacity."""
        for lane in self._lanes.values():
            while lane.tasks and lane.busy < lane.width:
                task = heappop(lane.tasks)
                lane.busy += 1
                self.running.add(task)
                self.waiting -= 1
                _THREADS.submit(self._work, task)

    def ended(self, task: Task) -> None:
        """Said when a task's end came out of the inbox."""
        self._lanes[task.step.lane].busy -= 1
        self.running.discard(task)

    def drop(self) -> None:
        """Drop waiting tasks, and wait for running ones."""
        for lane in self._lanes.values():
            lane.tasks.clear()
        self.waiting = 0
        while self.running:
            event = self.inbox.get()
            if isinstance(event, tuple):  # what waited for a queue may have ended, too
                self.ended(event[0])

    def _work(self, task: Task) -> None:
        try:
            self.inbox.put((task, task.step.call(*task.args), None))  # type: ignore[misc]
        except BaseException as error:
            self.inbox.put((task, (), error))
