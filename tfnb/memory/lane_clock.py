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

_LANES = (MoveKind.IN, MoveKind.OUT, MoveKind.RUN)


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
    """A copy or a task on its lane, with its start and end in seconds."""

    lane: MoveKind
    subject: DeviceItem | PackTask
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """The bars of a step. end: its seconds. busy: the seconds of each lane.

    waits: seconds in which the lane of tasks is idle, by what it waits for: room, or the role of a tensor.
    """

    bars: tuple[Bar, ...]
    end: float
    busy: Mapping[MoveKind, float]
    waits: Mapping[str, float]


def lane_times(
    plan: Schedule, tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], rate: float,
    seconds: Callable[[PackTask], float],
) -> LaneTimes:  # fmt: skip
    """When each copy and task begins and ends. rate: bytes a second of either lane. seconds: that a task computes.

    A lane works in order, and begins nothing before the tasks that stand before it are over. A task waits for what it
    reads and for copies out that stand before it in a WAIT, a copy in for those in a ROOM.
    """
    clock, bars, waits = LaneClock(), list[Bar](), dict[str, float]()
    room = dict.fromkeys((MoveKind.WAIT, MoveKind.ROOM), 0.0)
    arrived: dict[DeviceItem, float] = {}
    gone: dict[DeviceItem, float] = {}
    for act, item, at in plan.moves:
        if act in room and item is not None:
            room[act] = max(room[act], gone[item])
        if act not in _LANES:
            continue
        subject: DeviceItem | PackTask = tasks[at] if item is None else item
        idle, after = clock.free.get(act, 0.0), max(clock.free.get(MoveKind.RUN, 0.0), room[MoveKind.WAIT])
        if isinstance(subject, PackTask):
            last = max(subject.reads, key=lambda read: arrived.get(read, 0.0), default=None)
            ready = after if last is None else max(after, arrived.get(last, 0.0))
            if ready > idle:
                cause = "room" if ready == after or last is None else str(last.role)
                waits[cause] = waits.get(cause, 0.0) + ready - idle
            lasts = seconds(subject)
        else:
            ready = max(after, room[MoveKind.ROOM] if act is MoveKind.IN else 0.0)
            lasts = sizes[subject] / rate
        start = clock.book(act, ready, lasts)
        bars.append(Bar(act, subject, start, clock.free[act]))
        if item is not None:
            (arrived if act is MoveKind.IN else gone)[item] = clock.free[act]
    busy = {lane: clock.busy.get(lane, 0.0) for lane in _LANES}
    return LaneTimes(tuple(bars), max(clock.free.values(), default=0.0), busy, waits)
