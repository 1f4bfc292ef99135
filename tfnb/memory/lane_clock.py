"""A clock of lanes that work in order, and the time of a schedule of packs by this clock. Pure.

A device in packs has three lanes: copies in, copies out, and computing. A step over several places has one for each
place, and one for each link between two (`tfnb.placement.simulation`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfnb.memory.moves import MoveKind, Schedule
from tfnb.memory.pack_tasks import DeviceItem, PackTask


class LaneClock:
    """The times of lanes. A lane works on one subject at a time, in the order of booking.

    free: when each lane that worked is idle again. busy: the seconds that it worked.

    >>> clock = LaneClock()
    >>> clock.book("copies", 0.0, 2.0), clock.book("copies", 1.0, 0.5), clock.book("runs", 1.0, 4.0)
    (0.0, 2.0, 1.0)
    >>> clock.free, clock.busy["copies"]
    ({'copies': 2.5, 'runs': 5.0}, 2.5)
    """

    def __init__(self) -> None:
        self.free: dict[Hashable, float] = {}
        self.busy: dict[Hashable, float] = {}

    def book(self, lane: Hashable, ready: float, seconds: float) -> float:
        """Let a lane work for so many seconds, once the lane is idle and the work is ready; returns the start."""
        start = max(self.free.get(lane, 0.0), ready)
        self.free[lane] = start + seconds
        self.busy[lane] = self.busy.get(lane, 0.0) + seconds
        return start


class Bar(NamedTuple):
    """A copy or a task on its lane, from a second to a second."""

    lane: MoveKind
    subject: DeviceItem | PackTask
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """The bars of a step. end: its seconds. busy: the seconds of each lane that worked."""

    bars: tuple[Bar, ...]
    end: float
    busy: Mapping[Hashable, float]


def lane_times(
    plan: Schedule, tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], rate: float,
    seconds: Callable[[PackTask], float],
) -> LaneTimes:  # fmt: skip
    """When each copy and task begins and ends. rate: bytes a second of either lane. seconds: that a task computes.

    A lane works in order; a task waits for what it reads, a copy in for the room of copies out that stand before it,
    and a copy out for the task before it.
    """
    clock, bars, room = LaneClock(), list[Bar](), 0.0
    arrived: dict[DeviceItem, float] = {}
    gone: dict[DeviceItem, float] = {}
    for act, item, at in plan.moves:
        if act is MoveKind.WAIT and item is not None:
            room = max(room, gone[item])
        if act not in (MoveKind.IN, MoveKind.OUT, MoveKind.RUN):
            continue
        subject: DeviceItem | PackTask = tasks[at] if item is None else item
        if isinstance(subject, PackTask):
            ready = max([room, *(arrived.get(read, 0.0) for read in subject.reads)])
            lasts = seconds(subject)
        else:
            after = room if act is MoveKind.IN else arrived.get(subject, 0.0)
            ready, lasts = max(clock.free.get(MoveKind.RUN, 0.0), after), sizes[subject] / rate
        start = clock.book(act, ready, lasts)
        bars.append(Bar(act, subject, start, clock.free[act]))
        if item is not None:
            (arrived if act is MoveKind.IN else gone)[item] = clock.free[act]
    return LaneTimes(tuple(bars), max(clock.free.values(), default=0.0), clock.busy)
