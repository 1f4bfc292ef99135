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
    """The bars of a step. end: its seconds. busy: the seconds of each lane."""

    bars: tuple[Bar, ...]
    end: float
    busy: Mapping[MoveKind, float]


def lane_times(
    plan: Schedule, tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], rate: float,
    seconds: Callable[[PackTask], float],
) -> LaneTimes:  # fmt: skip
    """When each copy and task begins and ends. rate: bytes a second of either lane. seconds: that a task computes.

    A lane works in order; a task waits for what it reads, a copy in for the room of copies out that stand before it,
    and a copy out for the task before it.
    """
    free = dict.fromkeys((MoveKind.IN, MoveKind.OUT, MoveKind.RUN), 0.0)
    arrived: dict[DeviceItem, float] = {}
    gone: dict[DeviceItem, float] = {}
    busy, bars, room = dict(free), [], 0.0
    for act, item, at in plan.moves:
        if act is MoveKind.WAIT and item is not None:
            room = max(room, gone[item])
        if act not in free:
            continue
        subject: DeviceItem | PackTask = tasks[at] if item is None else item
        if isinstance(subject, PackTask):
            start = max([free[act], room, *(arrived.get(read, 0.0) for read in subject.reads)])
            lasts = seconds(subject)
        else:
            after = room if act is MoveKind.IN else arrived.get(subject, 0.0)
            start, lasts = max(free[act], free[MoveKind.RUN], after), sizes[subject] / rate
        free[act] = start + lasts
        busy[act] += lasts
        bars.append(Bar(act, subject, start, free[act]))
        if item is not None:
            (arrived if act is MoveKind.IN else gone)[item] = free[act]
    return LaneTimes(tuple(bars), max(free.values()), busy)
