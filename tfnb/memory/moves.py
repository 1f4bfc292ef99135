"""The plan of tensor transfers of a device: tasks in an order, sizes and a budget give moves. Pure.

One planner for weights, optimizer state, gradients and border values (semantics S-189): before a task runs, what it
reads is loaded; victims are those of the farthest next use, clean ones are dropped and changed ones copied out; what
the next tasks read is loaded beside it, where that evicts nothing of nearer use. Bytes on their way out count until
they are gone. Least recently used and "nothing stays", which virtualised memory does, are policies of the same planner.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

from tfnb.errors import ResourceExhausted
from tfnb.memory.pack_tasks import DeviceItem, PackTask, Role


class MoveKind(StrEnum):
    """IN, OUT: copies from and to the host. WAIT: until an OUT is over. DROP: a clean copy. FREE: a dead value."""

    IN, OUT, WAIT, DROP, FREE, RUN = "in", "out", "wait", "drop", "free", "run"


class Move(NamedTuple):
    """One act, and the tensor, or the place of the task."""

    act: MoveKind
    item: DeviceItem | None = None
    task: int = -1


class Victims(StrEnum):
    """The order in which tensors leave: farthest next use, least recently used, or all at once after each task."""

    NEXT_USE, LRU, ALL = "farthest next use", "least recently used", "nothing stays"


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """How a schedule is made.

    victims: who leaves. ahead: tasks whose tensors are loaded beside the running one. writes_back: clean ones, too.
    """

    victims: Victims = Victims.NEXT_USE
    ahead: int = 1
    writes_back: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """Moves in order. bytes: copied, by act and role. most: bytes on the device at once, work and leaving included."""

    moves: tuple[Move, ...]
    bytes: Mapping[tuple[MoveKind, Role], int]
    most: int
    policy: MovePolicy

    @property
    def moved(self) -> int:
        """All bytes copied in and out."""
        return sum(self.bytes.values())

    def of(self, role: Role) -> int:
        """The bytes of one role that are copied in and out."""
        return self.bytes.get((MoveKind.IN, role), 0) + self.bytes.get((MoveKind.OUT, role), 0)


def best_schedule(tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], budget: int, ahead: int = 1) -> Schedule:
    """The schedule of farthest next use, prefetched if that copies no more than LRU; never more bytes than LRU.

    Farthest next use alone may copy more where sizes differ. Raises ResourceExhausted, as `schedule`.
    """
    least = schedule(tasks, sizes, budget, MovePolicy(Victims.LRU, 0))
    for tried in dict.fromkeys((ahead, 0)):
        found = schedule(tasks, sizes, budget, MovePolicy(ahead=tried))
        if found.moved <= least.moved:
            return found
    return least


def need(task: PackTask, sizes: Mapping[DeviceItem, int]) -> int:
    """Bytes on the device while a task runs, with nothing beside it."""
    return task.work + sum(map(sizes.__getitem__, {*task.reads, *task.makes}))


def schedule(
    tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], budget: int, policy: MovePolicy = MovePolicy()
) -> Schedule:
    """The moves of one step. At its beginning and end all Variables are on the host, and nothing is on the device.

    Raises ResourceExhausted with the smallest budget, the need of the largest task; every larger one is feasible.
    """
    largest = max(tasks, key=lambda task: need(task, sizes), default=None)
    if largest is not None and need(largest, sizes) > budget:
        parts = {role: sum(sizes[i] for i in {*largest.reads, *largest.makes} if i.role == role) for role in Role}
        told = " + ".join(f"{role} {size:,}" for role, size in parts.items() if size)
        raise ResourceExhausted(
            f"a memory budget of {budget:,} bytes is too small for this step in packs: its largest task, {largest}, "
            f"holds {told} + work {largest.work:,} bytes; the smallest feasible budget is "
            f"{need(largest, sizes):,} bytes. Give at least that, take more microbatches, or cut the model into "
            "smaller packs", details=need(largest, sizes),
        )  # fmt: skip
    return _Planner(tasks, sizes, budget, policy).planned()


@dataclass
class _Planner:
    """The state of a device while its moves are planned."""

    tasks: Sequence[PackTask]
    sizes: Mapping[DeviceItem, int]
    budget: int
    policy: MovePolicy
    moves: list[Move] = field(default_factory=list)
    bytes: dict[tuple[MoveKind, Role], int] = field(default_factory=dict)
    most: int = 0
    used: int = 0  # by what is here
    going: int = 0  # by what is on its way out

    def __post_init__(self) -> None:
        self.uses: dict[DeviceItem, list[int]] = {}
        for at, task in enumerate(self.tasks):
            for item in task.reads:
                self.uses.setdefault(item, []).append(at)
        self.on_host = {item for item in self.sizes if item.role in (Role.WEIGHT, Role.STATE)}
        self.here: dict[DeviceItem, int] = {}  # and the place of the task that used it last
        self.changed: set[DeviceItem] = set()
        self.leaving: list[DeviceItem] = []

    def planned(self) -> Schedule:
        for at, task in enumerate(self.tasks):
            self._before(at, task)
            self.most = max(self.most, self.used + self.going + self._made(task))
            self.moves.append(Move(MoveKind.RUN, task=at))
            self._after(at, task)
        for item in list(self.here):
            self._leave(item)
        return Schedule(tuple(self.moves), self.bytes, self.most, self.policy)

    def _made(self, task: PackTask) -> int:
        return task.work + sum(self.sizes[item] for item in task.makes)

    def _before(self, at: int, task: PackTask) -> None:
        """Load the inputs of a task; prefetch the inputs of the next tasks if there is room."""
        made = self._made(task)
        missing = [item for item in task.reads if item not in self.here]
        self._has_room(sum(self.sizes[item] for item in missing) + made, task.reads, at, is_needed=True)
        for item in missing:
            self._load(item, at)
        for later in self.tasks[at + 1 : at + 1 + self.policy.ahead]:
            for item in later.reads:
                is_there = item in self.here or item not in self.on_host or item in task.makes
                pinned = (*task.reads, *later.reads)
                if not is_there and self._has_room(self.sizes[item] + made, pinned, at, is_needed=False):
                    self._load(item, at)
        self._settle(made)

    def _after(self, at: int, task: PackTask) -> None:
        for item in task.makes:
            self.here[item] = at
            self.used += self.sizes[item]
        for item in task.reads:
            self.here[item] = at
        self.changed.update(task.makes, task.writes)
        for item in task.frees:
            self._forget(item)
            self.moves.append(Move(MoveKind.FREE, item))
        if self.policy.victims is Victims.ALL:
            kept = self.tasks[at + 1].reads if at + 1 < len(self.tasks) and not self.policy.writes_back else ()
            for item in [item for item in self.here if item.role is not Role.BORDER and item not in kept]:
                self._leave(item)

    def _next(self, item: DeviceItem, at: int) -> float:
        """The place of the next task from ``at`` on that reads a tensor."""
        uses = self.uses.get(item, [])
        found = bisect_left(uses, at)
        return uses[found] if found < len(uses) else inf

    def _rank(self, item: DeviceItem, at: int) -> tuple[float, int]:
        """Sort key of eviction: the least leaves first."""
        used = self.here[item] if self.policy.victims is Victims.LRU else -self._next(item, at + 1)
        return used, -self.sizes[item]

    def _has_room(self, wanted: int, pinned: Collection[DeviceItem], at: int, *, is_needed: bool) -> bool:
        """Make room for so many bytes beside the pinned tensors; a prefetch evicts nothing that is used sooner."""
        short, victims = self.used + wanted - self.budget, []
        if short > 0:
            able = (item for item in self.here if item not in pinned)
            for item in sorted(able, key=lambda item: self._rank(item, at)):
                if short <= 0 or (not is_needed and self._next(item, at + 1) <= at + self.policy.ahead):
                    break
                victims.append(item)
                short -= self.sizes[item]
            if short > 0:
                return False
        for item in victims:
            self._leave(item)
        self._settle(wanted)
        return True

    def _settle(self, wanted: int) -> None:
        """Wait for tensors on their way out until so many bytes have room."""
        while self.leaving and self.used + self.going + wanted > self.budget:
            item = self.leaving.pop(0)
            self.going -= self.sizes[item]
            self.moves.append(Move(MoveKind.WAIT, item))

    def _load(self, item: DeviceItem, at: int) -> None:
        if item in self.leaving:  # its copy out is over before it comes back
            while self.leaving and item in self.leaving:
                gone = self.leaving.pop(0)
                self.going -= self.sizes[gone]
                self.moves.append(Move(MoveKind.WAIT, gone))
        self._copied(MoveKind.IN, item)
        self.here[item] = at
        self.used += self.sizes[item]
        self.most = max(self.most, self.used + self.going)

    def _leave(self, item: DeviceItem) -> None:
        is_copied = item in self.changed or (self.policy.writes_back and item.role is not Role.BORDER)
        self._forget(item)
        if is_copied:
            self._copied(MoveKind.OUT, item)
            self.on_host.add(item)
            self.leaving.append(item)
            self.going += self.sizes[item]
        else:
            self.moves.append(Move(MoveKind.DROP, item))

    def _forget(self, item: DeviceItem) -> None:
        self.used -= self.sizes[item]
        del self.here[item]
        self.changed.discard(item)

    def _copied(self, act: MoveKind, item: DeviceItem) -> None:
        self.moves.append(Move(act, item))
        self.bytes[act, item.role] = self.bytes.get((act, item.role), 0) + self.sizes[item]
