"""The plan of tensor transfers of a device: tasks in an order, sizes and a budget give moves. Pure.

One planner for weights, optimizer state, gradients and border values (semantics S-189). `tfnb.memory.residency` says
between which tasks each tensor is on the device: victims are those of the farthest next use, clean ones are dropped and
changed ones copied out. Here each copy out begins after the last use of its tensor's stay (by LRU, when room is
needed), and each copy in as early as the budget allows, some tasks ahead. Copies go on beside tasks, so their order in
time is unknown: bytes on their way out count until something has waited for them, and so do those of copies in from the
moment they may have begun. Least recently used and "nothing stays", which virtualised memory does, are policies of the
same planner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from tfnb.errors import ResourceExhausted
from tfnb.memory.pack_tasks import DeviceItem, PackTask, Role
from tfnb.memory.residency import Exit, Residency, Victims, residencies
from tfnb.memory.slabs import Slabs, slabs


class MoveKind(StrEnum):
    """IN, OUT: copies from and to the host. DROP: a clean copy. FREE: a dead value. RUN: a task.

    WAIT: tasks wait until an OUT is over. ROOM: the copies in behind it do, and tasks go on.
    """

    IN, OUT, ROOM, WAIT, DROP, FREE, RUN = "in", "out", "room", "wait", "drop", "free", "run"


class Move(NamedTuple):
    """One act, and the tensor, or the place of the task."""

    act: MoveKind
    item: DeviceItem | None = None
    task: int = -1


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """How a schedule is made.

    victims: who leaves. ahead: the most tasks by which a copy in precedes the task that needs it. drain: the number of
    tasks after a copy out for which its bytes count as occupied, though it may be over sooner. share: of the room that
    the largest task leaves, the part in which tensors stay for later tasks; copies ahead have all of it. writes_back:
    clean tensors are copied out, too.
    """

    victims: Victims = Victims.NEXT_USE
    ahead: int = 1
    drain: int = 0
    share: float = 1.0
    writes_back: bool = False


ON_DEMAND = MovePolicy(ahead=0)
TRIED = tuple(
    MovePolicy(ahead=ahead, drain=drain, share=share)
    for share in (1.0, 0.5) for ahead, drain in ((1, 0), (4, 0), (16, 2), (16, 8), (64, 24))
)  # fmt: skip
"""The policies of which a step takes the quickest; beside `ON_DEMAND`."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Moves in order. bytes: copied, by act and role.

    most: bytes on the device at once, work and leaving included, however quick or slow copies are.
    """

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


def best_schedule(
    tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], budget: int, seconds: Callable[[Schedule], float]
) -> Schedule:
    """The quickest schedule of `ON_DEMAND` and `TRIED` that copies no more bytes than LRU; LRU on demand if none of
    them does.

    Farthest next use alone may copy more where sizes differ. seconds: of a schedule. Raises ResourceExhausted, as
    `schedule`.
    """
    ensure_feasible(tasks, sizes, budget)
    merged = slabs(tasks, sizes)
    lru = _scheduled(merged, budget, MovePolicy(Victims.LRU, 0))
    found = [_scheduled(merged, budget, policy) for policy in (ON_DEMAND, *TRIED)]
    return min((plan for plan in found if plan.moved <= lru.moved), key=seconds, default=lru)


def need(task: PackTask, sizes: Mapping[DeviceItem, int]) -> int:
    """Bytes on the device while a task runs, with nothing beside it."""
    return task.work + sum(map(sizes.__getitem__, {*task.reads, *task.makes}))


def ensure_feasible(tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], budget: int) -> None:
    """Raise ResourceExhausted with the smallest budget, the need of the largest task, if this one is smaller."""
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


def schedule(
    tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], budget: int, policy: MovePolicy = MovePolicy()
) -> Schedule:
    """The moves of one step. At its beginning and end all Variables are on the host, and nothing is on the device.

    Raises ResourceExhausted as `ensure_feasible`; every larger budget is feasible.
    """
    ensure_feasible(tasks, sizes, budget)
    return _scheduled(slabs(tasks, sizes), budget, policy)


def _scheduled(merged: Slabs, budget: int, policy: MovePolicy) -> Schedule:
    """The schedule of slabs, with the moves of their members."""
    tasks, sizes = merged.tasks, merged.sizes
    least = max((need(task, sizes) for task in tasks), default=0)
    room = least + int(policy.share * (budget - least))
    stays = residencies(tasks, sizes, room, policy.victims, writes_back=policy.writes_back)
    plan = _Planner(tasks, sizes, budget, policy).planned(_entries(stays, tasks, sizes, budget, policy), stays)
    moves = (
        Move(act, item, at) for act, slab, at in plan.moves
        for item in ((None,) if slab is None else merged.members.get(slab, (slab,)))
    )  # fmt: skip
    return replace(plan, moves=tuple(moves))


def _entries(
    stays: Sequence[Residency], tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], budget: int,
    policy: MovePolicy,
) -> dict[int, list[DeviceItem]]:  # fmt: skip
    """The copies in that begin before each task: in the order of need, each as early as policy and budget allow.

    None begins before the end of the tensor's stay before, so that no byte is copied more often for it.
    """
    used = _used(stays, tasks, sizes, policy.drain)
    left: dict[DeviceItem, int] = {}  # the task after which a tensor left last
    found: dict[int, list[DeviceItem]] = {}
    earliest = 0
    for stay in sorted(stays, key=lambda stay: stay.first):
        item, at = stay.item, stay.first
        if stay.is_loaded:
            first = max(earliest, left.get(item, -1) + 1, at - policy.ahead)
            while at > first and used[at - 1] + sizes[item] <= budget:
                at -= 1
                used[at] += sizes[item]
            earliest = at
            found.setdefault(at, []).append(item)
        left[item] = stay.last
    return found


def _used(
    stays: Sequence[Residency], tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], drain: int
) -> list[int]:  # fmt: skip
    """Bytes on the device during each task, copies out counted for ``drain`` tasks more."""
    more = [0] * (len(tasks) + 1)
    for stay in stays:
        more[stay.first] += sizes[stay.item]
        end = stay.last + 1 + (drain if stay.exit is Exit.OUT else 0)
        more[min(end, len(tasks))] -= sizes[stay.item]
    sums = accumulate(more)
    return [held + task.work for held, task in zip(sums, tasks, strict=False)]


@dataclass
class _Planner:
    """The bytes that may be on a device while moves are planned.

    here: bytes on the device for certain, with those of copies out that no task has waited for. queue: what the lane of
    copies in has before it, as far as no task has waited for it: copies in, and copies out that it waits for.
    """

    tasks: Sequence[PackTask]
    sizes: Mapping[DeviceItem, int]
    budget: int
    policy: MovePolicy
    moves: list[Move] = field(default_factory=list)
    bytes: dict[tuple[MoveKind, Role], int] = field(default_factory=dict)
    most: int = 0
    here: int = 0

    def __post_init__(self) -> None:
        self.queue: list[tuple[MoveKind, DeviceItem]] = []
        self.queue_end = self.queue_most = 0  # bytes that the queue adds in the end, and at most on its way there
        self.going: dict[DeviceItem, None] = {}  # copies out, in order, that nothing has waited for
        self.waited: dict[DeviceItem, None] = {}  # those that the lane of copies in waits for, and no task has

    def planned(self, entries: Mapping[int, Sequence[DeviceItem]], stays: Sequence[Residency]) -> Schedule:
        leaving: dict[int, list[Residency]] = {}
        for stay in stays:
            leaving.setdefault(stay.last, []).append(stay)
        for at, task in enumerate(self.tasks):
            for item in entries.get(at, ()):
                self._load(item)
            self._run(at, task)
            for stay in leaving.get(at, ()):
                self._leave(stay.item, stay.exit)
        return Schedule(tuple(self.moves), self.bytes, self.most, self.policy)

    def _load(self, item: DeviceItem) -> None:
        """Begin a copy in, behind copies out that make its room, and behind the copy out of the same tensor."""
        size = self.sizes[item]
        while item in self.going or (self.going and self.here + self.queue_end + size > self.budget):
            first = next(iter(self.going))
            del self.going[first]
            self.waited[first] = None
            self._queue(MoveKind.ROOM, first)
        self._queue(MoveKind.IN, item)
        self._count(MoveKind.IN, item)
        self.most = max(self.most, self.here + self.queue_most)

    def _queue(self, act: MoveKind, item: DeviceItem) -> None:
        self.moves.append(Move(act, item))
        self.queue.append((act, item))
        self._add(act, item)

    def _add(self, act: MoveKind, item: DeviceItem) -> None:
        self.queue_end += self.sizes[item] if act is MoveKind.IN else -self.sizes[item]
        self.queue_most = max(self.queue_most, self.queue_end)

    def _requeue(self, queue: list[tuple[MoveKind, DeviceItem]]) -> None:
        """Set the rest of the queue."""
        self.queue, self.queue_end, self.queue_most = queue, 0, 0
        for act, item in queue:
            self._add(act, item)

    def _run(self, at: int, task: PackTask) -> None:
        """Run a task once copies out have made its room, at any state of the copies in."""
        reads = set(task.reads)
        ins = [place for place, (act, item) in enumerate(self.queue) if act is MoveKind.IN and item in reads]
        if ins:
            for act, item in self.queue[: ins[-1] + 1]:
                self.here += self.sizes[item] if act is MoveKind.IN else -self.sizes[item]
                if act is MoveKind.ROOM:
                    del self.waited[item]
            self._requeue(self.queue[ins[-1] + 1 :])
        made = sum(self.sizes[item] for item in task.makes)
        while self.here + self.queue_most + task.work + made > self.budget:
            self._wait()
        self.most = max(self.most, self.here + self.queue_most + task.work + made)
        self.moves.append(Move(MoveKind.RUN, task=at))
        self.here += made

    def _wait(self) -> None:
        """Let tasks wait for the first copy out that none has waited for."""
        among = self.waited or self.going
        item = next(iter(among))
        if among is self.waited:
            self._requeue([queued for queued in self.queue if queued != (MoveKind.ROOM, item)])
        del among[item]
        self.here -= self.sizes[item]
        self.moves.append(Move(MoveKind.WAIT, item))

    def _leave(self, item: DeviceItem, exit: Exit) -> None:
        if exit is Exit.OUT:
            self._count(MoveKind.OUT, item)
            self.going[item] = None
        else:
            self.here -= self.sizes[item]
        self.moves.append(Move(MoveKind(exit), item))

    def _count(self, act: MoveKind, item: DeviceItem) -> None:
        self.bytes[act, item.role] = self.bytes.get((act, item.role), 0) + self.sizes[item]
