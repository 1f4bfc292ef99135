"""Small tensors that come and go together, planned as one. Pure.

A layer has many small tensors, such as biases and step counts, which the same tasks read and write. Of a GPT of 12
layers over 8 microbatches a plan of slabs has half the tensors and takes half the time. Large tensors stay apart: they
make room for others one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tfnb.memory.pack_tasks import DeviceItem, PackTask, Role

SMALL = 16  # a tensor below this part of the largest one is small


@dataclass(frozen=True)
class Slabs:
    """Tasks and sizes with slabs; the first member of a slab stands for all. members: of each slab, by the first."""

    tasks: Sequence[PackTask]
    sizes: Mapping[DeviceItem, int]
    members: Mapping[DeviceItem, tuple[DeviceItem, ...]]


def slabs(tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int]) -> Slabs:
    """Small Variables and gradients of one role with the same tasks, in slabs."""
    small = max(sizes.values(), default=0) / SMALL
    places: dict[DeviceItem, list[tuple[int, int]]] = {}
    for at, task in enumerate(tasks):
        for part, items in enumerate((task.reads, task.makes, task.writes, task.frees)):
            for item in items:
                if item.role is not Role.BORDER and sizes[item] < small:
                    places.setdefault(item, []).append((at, part))
    found: dict[tuple[Role, tuple[tuple[int, int], ...]], list[DeviceItem]] = {}
    for item, seen in places.items():
        found.setdefault((item.role, tuple(seen)), []).append(item)
    members = {group[0]: tuple(group) for group in found.values() if len(group) > 1}
    gone = {item for group in members.values() for item in group[1:]}

    def kept(items: Sequence[DeviceItem]) -> tuple[DeviceItem, ...]:
        return tuple(item for item in items if item not in gone)

    return Slabs(
        [
            replace(
                task, reads=kept(task.reads), makes=kept(task.makes), writes=kept(task.writes), frees=kept(task.frees)
            )
            for task in tasks
        ] if gone else tasks,
        {item: sum(sizes[one] for one in members.get(item, (item,))) for item in sizes if item not in gone},
        members,
    )  # fmt: skip
