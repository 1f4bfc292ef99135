"""The time of a schedule on a device with three lanes: copies in, copies out, and computing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfnb.memory.moves import MoveKind, Schedule
from tfnb.memory.pack_tasks import DeviceItem, PackTask


class Bar(NamedTuple):
    """A copy or a task on its lane, from a second to a second."""

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
    free = dict.fromkeys((MoveKind.IN, MoveKind.OUT, MoveKind.RUN), 0.0)
    room = dict.fromkeys((MoveKind.WAIT, MoveKind.ROOM), 0.0)
    arrived: dict[DeviceItem, float] = {}
    gone: dict[DeviceItem, float] = {}
    busy, bars, waits = dict(free), [], dict[str, float]()
    for act, item, at in plan.moves:
        if act in room and item is not None:
            room[act] = max(room[act], gone[item])
        if act not in free:
            continue
        subject: DeviceItem | PackTask = tasks[at] if item is None else item
        after = max(free[act], free[MoveKind.RUN], room[MoveKind.WAIT])
        if isinstance(subject, PackTask):
            last = max(subject.reads, key=lambda read: arrived.get(read, 0.0), default=None)
            start = after if last is None else max(after, arrived.get(last, 0.0))
            if start > free[act]:
                cause = "room" if start == after or last is None else str(last.role)
                waits[cause] = waits.get(cause, 0.0) + start - free[act]
            lasts = seconds(subject)
        else:
            start = max(after, room[MoveKind.ROOM] if act is MoveKind.IN else 0.0)
            lasts = sizes[subject] / rate
        free[act] = start + lasts
        busy[act] += lasts
        bars.append(Bar(act, subject, start, free[act]))
        if item is not None:
            (arrived if act is MoveKind.IN else gone)[item] = free[act]
    return LaneTimes(tuple(bars), max(free.values()), busy, waits)
