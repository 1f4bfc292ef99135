"""Stays of tensors on the device: the tasks for which each is loaded or made, and after which each leaves. Pure.

Tensors are loaded on demand here, so that this decides how many bytes are copied, and `tfnb.memory.moves` when.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

from tfnb.memory.pack_tasks import DeviceItem, PackTask, Role


class Victims(StrEnum):
    """The order of eviction: farthest next use, least recently used, or after each task all tensors but borders, and
    what the next task reads.
    """

    NEXT_USE, LRU, ALL = "farthest next use", "least recently used", "nothing stays"


class Exit(StrEnum):
    """How a tensor leaves the device: copied OUT to the host, DROP of one that the host has, FREE of a dead value."""

    OUT, DROP, FREE = "out", "drop", "free"


class Residency(NamedTuple):
    """A stay of a tensor on the device, from the first task that needs or makes the tensor to the last one."""

    item: DeviceItem
    first: int
    last: int
    is_loaded: bool
    exit: Exit


def residencies(
    tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], room: int, victims: Victims, *, writes_back: bool
) -> list[Residency]:
    """All stays of a step, such that tensors and the running task's work take at most ``room`` bytes.

    room: at least the need of the largest task. writes_back: clean tensors are copied out, too.
    """
    return _Stays(tasks, sizes, room, victims, writes_back).planned()


@dataclass
class _Stays:
    """The tensors on the device while tasks are gone through."""

    tasks: Sequence[PackTask]
    sizes: Mapping[DeviceItem, int]
    room: int
    victims: Victims
    writes_back: bool
    used: int = 0
    found: list[Residency] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.uses: dict[DeviceItem, list[int]] = {}
        for at, task in enumerate(self.tasks):
            for item in task.reads:
                self.uses.setdefault(item, []).append(at)
        self.begun: dict[DeviceItem, tuple[int, bool]] = {}  # its first task; is it loaded
        self.used_by: dict[DeviceItem, int] = {}  # the last task
        self.changed: set[DeviceItem] = set()

    def planned(self) -> list[Residency]:
        for at, task in enumerate(self.tasks):
            missing = [item for item in task.reads if item not in self.begun]
            self._evict(task.work + sum(self.sizes[item] for item in (*missing, *task.makes)), at, task)
            for item in missing:
                self._enter(item, at, is_loaded=True)
            for item in task.makes:
                self._enter(item, at, is_loaded=False)
            self.used_by |= dict.fromkeys((*task.reads, *task.makes), at)
            self.changed.update(task.makes, task.writes)
            for item in task.frees:
                self._leave(item, at, Exit.FREE)
            if self.victims is Victims.ALL:
                kept = self.tasks[at + 1].reads if at + 1 < len(self.tasks) and not self.writes_back else ()
                for item in [item for item in self.begun if item.role is not Role.BORDER and item not in kept]:
                    self._leave(item, at)
        for item in list(self.begun):
            self._leave(item, len(self.tasks) - 1)
        return self.found

    def _evict(self, wanted: int, at: int, task: PackTask) -> None:
        """Let tensors leave until so many bytes have room beside the others."""
        if self.used + wanted <= self.room:
            return
        for item in sorted((item for item in self.begun if item not in task.reads), key=lambda i: self._rank(i, at)):
            self._leave(item, at - 1)
            if self.used + wanted <= self.room:
                return

    def _rank(self, item: DeviceItem, at: int) -> tuple[float, int]:
        """Sort key of eviction: the least leaves first; of equals the larger."""
        if self.victims is Victims.LRU:
            return self.used_by[item], -self.sizes[item]
        uses = self.uses.get(item, [])
        found = bisect_left(uses, at + 1)
        return -(uses[found] if found < len(uses) else inf), -self.sizes[item]

    def _enter(self, item: DeviceItem, at: int, *, is_loaded: bool) -> None:
        self.begun[item] = at, is_loaded
        self.used += self.sizes[item]

    def _leave(self, item: DeviceItem, at: int, exit: Exit | None = None) -> None:
        """End a stay after a task, or at once after the last use where the policy knows the next uses."""
        is_copied = item in self.changed or (self.writes_back and item.role is not Role.BORDER)
        last = self.used_by[item] if self.victims is Victims.NEXT_USE else at
        self.found.append(Residency(item, self.begun[item][0], last, self.begun[item][1], exit or (
            Exit.OUT if is_copied else Exit.DROP
        )))  # fmt: skip
        self.used -= self.sizes[item]
        self.changed.discard(item)
        del self.begun[item], self.used_by[item]
