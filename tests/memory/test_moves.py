"""The planner of a step in packs: invariants of its moves on random task lists, closed forms, and its clock."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfnb.errors import ResourceExhausted
from tfnb.memory.lane_clock import lane_times
from tfnb.memory.moves import MoveKind, MovePolicy, Schedule, best_schedule, need, schedule
from tfnb.memory.pack_tasks import DeviceItem, PackPiece, PackTask, Phase, Role, tasks_of
from tfnb.memory.packs import balanced, greedy, greedy_reverse
from tfnb.memory.residency import Victims
from tfnb.memory.slabs import slabs

POLICIES = [
    MovePolicy(victims, ahead, drain, share, writes_back) for victims in Victims
    for ahead, drain, share in ((0, 0, 1.0), (1, 0, 0.5), (2, 1, 1.0), (20, 3, 0.3)) for writes_back in (False, True)
]  # fmt: skip


def best(tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], budget: int, rate: float = 1.0) -> Schedule:
    """The quickest schedule where each task takes a second."""
    return best_schedule(
        tasks, sizes, budget, lambda plan: lane_times(plan, tasks, sizes, rate, lambda task: 1.0).end
    )  # fmt: skip


def chain(
    packs: int, microbatches: int, sizes: Sequence[int] = (4,), *, skips: Sequence[int] = (), tied: bool = False,
    fused: bool = True, **order: bool,
) -> tuple[list[PackTask], dict[DeviceItem, int]]:  # fmt: skip
    """Tasks of a chain of packs with weights, two state tensors each, gradients and borders.

    sizes: of weights, in turn. skips: packs whose output the last pack takes, too. tied: the last pack reads the
    weights of the first, and makes a part of its gradient, a border value. fused: the last pack has no forward piece.
    """
    last, pieces, known = packs - 1, [], dict[DeviceItem, int]()
    for k in range(last if fused else packs):
        takes = (("x", k - 1),) if k else ()
        more = tuple(("x", j) for j in skips if j < k - 1 and k == last)
        gives = (("x", k),) if k < last else ()
        pieces.append(PackPiece(Phase.FORWARD, k, (("w", k),), takes=(*takes, *more), gives=gives, work=1 + k % 3))
    for k in reversed(range(packs)):
        takes = [("x", k - 1)] if k else []
        takes += [("x", j) for j in skips if j < k - 1 and k == last]
        takes += [("g", k)] if k < last else []
        gives = [("g", k - 1)] if k else []
        weights = [("w", k)] + ([("w", 0)] if tied and k == last and k else [])
        if tied and packs > 1:
            gives += [("part", 0)] if k == last else []
            takes += [("part", 0)] if k == 0 else []
        pieces.append(
            PackPiece(Phase.BACKWARD, k, tuple(weights), (), frozenset(), (("d", k),), tuple(takes), tuple(gives), 2)
        )
        state = (("m", k), ("v", k))
        pieces.append(
            PackPiece(Phase.UPDATE, k, (("w", k),), state, frozenset({("w", k), *state}), (("d", k),), work=1)
        )
    for k in range(packs):
        size = sizes[k % len(sizes)]
        known |= {DeviceItem(Role.WEIGHT, ("w", k)): size, DeviceItem(Role.GRADIENT, ("d", k)): size}
        known |= {DeviceItem(Role.STATE, (name, k)): size for name in "mv"}
        for name in ("x", "g", "part"):
            known |= {DeviceItem(Role.BORDER, (name, k), micro): 1 + k % 2 for micro in range(microbatches)}
    return tasks_of(pieces, microbatches, **order), known


def replay(plan: Schedule, tasks: Sequence[PackTask], sizes: Mapping[DeviceItem, int], budget: int) -> None:
    """Check a schedule move by move: copies exist, reads are there and newest, and all of it keeps the budget.

    Copies are as quick or slow as they can be: a copy in is over where a task needs it, a copy out where something has
    waited for it, and before that the lane of copies in may have done any part of what it has before it.
    """
    here: dict[DeviceItem, int] = {}  # versions
    host = {item: 0 for item in sizes if item.role in (Role.WEIGHT, Role.STATE)}
    newest, ran, most = dict(host), [], 0
    leaving: set[DeviceItem] = set()
    lane: list[tuple[MoveKind, DeviceItem]] = []

    def held() -> int:
        """The most bytes, over all places that the lane may have reached."""
        coming = {item for act, item in lane if act is MoveKind.IN}
        sums = [sum(sizes[item] for item in (*(here.keys() - coming), *leaving))]
        for act, item in lane:
            sums.append(sums[-1] + (sizes[item] if act is MoveKind.IN else -sizes[item]))
        return max(sums)

    for act, item, at in plan.moves:
        work = 0
        if act is MoveKind.RUN:
            task = tasks[at]
            assert all(here[read] == newest[read] for read in task.reads)
            assert not {*task.makes} & {*here}
            done = max((1 + place for place, (_, got) in enumerate(lane) if got in task.reads), default=0)
            leaving -= {got for kind, got in lane[:done] if kind is MoveKind.ROOM}
            del lane[:done]
            for made in (*task.makes, *task.writes):
                newest[made] = newest.get(made, 0) + 1
                here[made] = newest[made]
            ran.append(at)
            work = task.work
        else:
            assert item is not None
            if act is MoveKind.IN:
                assert item not in here and host[item] == newest[item]
                assert item not in leaving or (MoveKind.ROOM, item) in lane
                here[item] = host[item]
                lane.append((act, item))
            elif act is MoveKind.ROOM:
                assert item in leaving
                lane.append((act, item))
            elif act is MoveKind.OUT:
                assert (MoveKind.IN, item) not in lane
                host[item] = here.pop(item)
                leaving.add(item)
            elif act is MoveKind.WAIT:
                leaving.remove(item)
                lane = [queued for queued in lane if queued != (MoveKind.ROOM, item)]
            else:
                version = here.pop(item)
                assert act is MoveKind.FREE or host.get(item) == version
                assert act is MoveKind.DROP or all(item not in task.reads for task in tasks[len(ran) :])
        assert held() + work <= budget
        most = max(most, held() + work)
    assert ran == list(range(len(tasks))) and not here and most == plan.most
    assert all(host[item] == newest[item] for item in host if item.role in (Role.WEIGHT, Role.STATE))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[PackTask], dict[DeviceItem, int]]:
    packs = draw(st.integers(1, 6))
    return chain(
        packs, draw(st.integers(1, 4)), draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        skips=draw(st.lists(st.integers(0, 4), max_size=2, unique=True)), tied=draw(st.booleans()),
        fused=draw(st.booleans()), grouped=draw(st.booleans()), just_in_time=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(step=steps(), share=st.floats(0, 1.2), policy=st.sampled_from(POLICIES))
def test_every_copy_exists_every_read_is_there_and_the_budget_is_kept(
    step: tuple[list[PackTask], dict[DeviceItem, int]], share: float, policy: MovePolicy
) -> None:
    """P4, P5, P13: also with bytes on their way out, and nothing is left on the device."""
    tasks, sizes = step
    least = max(need(task, sizes) for task in tasks)
    budget = least + int(share * sum(sizes.values()))
    replay(schedule(tasks, sizes, budget, policy), tasks, sizes, budget)


@settings(max_examples=30, deadline=None)
@given(step=steps(), share=st.floats(0, 1.2), policy=st.sampled_from(POLICIES), large=st.sampled_from(["w", "x", "m"]))
def test_small_tensors_that_go_together_are_planned_as_one_and_moved_one_by_one(
    step: tuple[list[PackTask], dict[DeviceItem, int]], share: float, policy: MovePolicy, large: str
) -> None:
    """The state of a pack is two tensors of the same tasks; others are a hundred times as large."""
    tasks, sizes = step[0], {i: size * (100 if i.key[0] == large else 1) for i, size in step[1].items()}  # type: ignore[index]
    budget = max(need(task, sizes) for task in tasks) + int(share * sum(sizes.values()))
    merged = slabs(tasks, sizes)
    assert sum(merged.sizes.values()) == sum(sizes.values())
    assert [need(task, merged.sizes) for task in merged.tasks] == [need(task, sizes) for task in tasks]
    is_merged = large != "m" and any(first.key == ("m", 0) for first in merged.members)
    assert is_merged == (large != "m" and max(sizes.values()) > 16 * sizes[DeviceItem(Role.STATE, ("m", 0))])
    replay(schedule(tasks, sizes, budget, policy), tasks, sizes, budget)


@settings(max_examples=40, deadline=None)
@given(step=steps(), share=st.floats(0, 1.2))
def test_the_chosen_schedule_copies_no_more_than_lru(
    step: tuple[list[PackTask], dict[DeviceItem, int]], share: float
) -> None:
    """P8, and P6: what is feasible stays so; with room for everything Variables go in and out once."""
    tasks, sizes = step
    budget = max(need(task, sizes) for task in tasks) + int(share * sum(sizes.values()))
    chosen = best(tasks, sizes, budget)
    assert chosen.moved <= schedule(tasks, sizes, budget, MovePolicy(Victims.LRU, 0)).moved
    free = best(tasks, sizes, sum(sizes.values()) + 10)
    assert free.moved <= chosen.moved
    assert free.of(Role.GRADIENT) == free.of(Role.BORDER) == 0
    assert free.of(Role.WEIGHT) == 2 * sum(size for item, size in sizes.items() if item.role is Role.WEIGHT)


@settings(max_examples=40, deadline=None)
@given(step=steps(), more=st.integers(1, 30))
def test_with_equal_sizes_copies_in_do_not_grow_with_the_budget(
    step: tuple[list[PackTask], dict[DeviceItem, int]], more: int
) -> None:
    """P6, for farthest next use without prefetch: with unequal sizes, or counting copies out, it is no theorem."""
    tasks, sizes = step[0], dict.fromkeys(step[1], 1)
    least = max(need(task, sizes) for task in tasks)

    def copied(budget: int) -> int:
        plan = schedule(tasks, sizes, budget, MovePolicy(ahead=0))
        return sum(size for (act, _), size in plan.bytes.items() if act is MoveKind.IN)

    assert copied(least + more) <= copied(least)


@pytest.mark.parametrize("microbatches", [1, 8, 32])
def test_closed_forms_of_published_systems(microbatches: int) -> None:
    """P7: virtualised memory copies (4m+2)|W|, 2m|dW|, 2|K|; Harmony 3|W| less the last pack, 0 and 2|K|."""
    m, packs = microbatches, 6
    tasks, sizes = chain(packs, m, fused=False, grouped=False, just_in_time=False)
    budget, whole = max(need(task, sizes) for task in tasks), 4 * packs
    nothing_stays = schedule(tasks, sizes, budget + 4 * m * packs, MovePolicy(Victims.ALL, 0, writes_back=True))
    assert nothing_stays.of(Role.WEIGHT) == (4 * m + 2) * whole
    assert nothing_stays.of(Role.GRADIENT) == 2 * m * whole
    assert nothing_stays.of(Role.STATE) == 2 * 2 * whole
    tasks, sizes = chain(packs, m)
    harmony = schedule(tasks, sizes, budget + 4 * m * packs, MovePolicy(Victims.ALL, 0))
    assert harmony.of(Role.WEIGHT) == 3 * whole - 4
    assert harmony.of(Role.GRADIENT) == 0 and harmony.of(Role.STATE) == 2 * 2 * whole
    assert best(tasks, sizes, budget + 4 * m * packs).of(Role.WEIGHT) <= harmony.of(Role.WEIGHT)


@settings(max_examples=40, deadline=None)
@given(step=steps(), share=st.floats(0, 1), policy=st.sampled_from(POLICIES), rate=st.floats(0.5, 50))
def test_a_step_lasts_at_least_as_long_as_its_busiest_lane_and_at_most_as_all_of_them(
    step: tuple[list[PackTask], dict[DeviceItem, int]], share: float, policy: MovePolicy, rate: float
) -> None:
    """P9; tasks do not overlap, and none begins before what it reads has arrived."""
    tasks, sizes = step
    budget = max(need(task, sizes) for task in tasks) + int(share * sum(sizes.values()))
    plan = schedule(tasks, sizes, budget, policy)
    times = lane_times(plan, tasks, sizes, rate, lambda task: 1.0 + task.piece.pack)
    assert max(times.busy.values()) <= times.end * (1 + 1e-9) and times.end <= sum(times.busy.values()) * (1 + 1e-9)
    assert times.busy[MoveKind.IN] + times.busy[MoveKind.OUT] == pytest.approx(plan.moved / rate)
    arrived: dict[object, float] = {}
    ended = 0.0
    for lane, subject, start, end in times.bars:
        if isinstance(subject, PackTask):
            assert start >= max([ended, *(arrived.get(read, 0.0) for read in subject.reads)])
            ended = end
        elif lane is MoveKind.IN:
            arrived[subject] = end
    assert ended == pytest.approx(times.busy[MoveKind.RUN] + sum(times.waits.values()))
    assert times.waits.keys() <= {"room", *Role} and min(times.waits.values(), default=1) > 0


def test_packs_are_several_times_as_quick_as_lru_on_a_slow_link() -> None:
    """GPT-like: 12 packs, 8 microbatches, a budget of a quarter of weights and state, borders of little beside them."""
    sizes = [40]
    packs = [chain(12, 8, sizes, grouped=how, just_in_time=how) for how in (True, False)]
    budget = 12 * 3 * 40 // 4
    lru = schedule(*packs[1], budget, MovePolicy(Victims.LRU, 0, writes_back=True))
    rate = schedule(*packs[0], budget).moved / 120  # copies of ours take about half of the time of its tasks
    ours = best(*packs[0], budget, rate)
    both = [lane_times(plan, *of, rate, lambda task: 1.0) for plan, of in zip((ours, lru), packs, strict=True)]
    assert ours.moved < lru.moved / 4 and ours.of(Role.GRADIENT) == 0
    assert both[0].end < 1.5 * both[0].busy[MoveKind.RUN] and both[1].end > 3 * both[0].end


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7), packs=st.integers(1, 7))
def test_balanced_packs_are_the_best_of_all_and_greedy_ones_keep_the_capacity(sizes: list[int], packs: int) -> None:
    """S-192: beside brute force; every layer in one pack, packs in order."""

    def sums(of: Sequence[int]) -> list[int]:
        return [sum(size for size, pack in zip(sizes, of, strict=True) if pack == k) for k in range(max(of) + 1)]

    count = min(packs, len(sizes))
    cuts = [[sum(at >= cut for cut in chosen) for at in range(len(sizes))]
            for chosen in combinations(range(1, len(sizes)), count - 1)]  # fmt: skip
    assert max(sums(balanced(sizes, packs))) == min(max(sums(of)) for of in cuts)
    for heuristic in (greedy, greedy_reverse):
        found = heuristic(sizes, 9)
        assert found == sorted(found) and max(sums(found)) <= 9
        assert max(sums(balanced(sizes, max(found) + 1))) <= max(sums(found))


def test_an_update_waits_for_the_last_backward_piece_that_reads_its_weights() -> None:
    tasks, _ = chain(3, 2, tied=True)
    names = [str(task) for task in tasks]
    assert names.index("update of pack 2") < names.index("backward of pack 1, microbatch 0")
    assert names.index("update of pack 0") > names.index("backward of pack 0, microbatch 1")
    assert [name for name in names if name.startswith("forward of pack 0")] == names[:2]


def test_a_budget_that_is_too_small_names_the_largest_task_and_the_least_that_works() -> None:
    tasks, sizes = chain(3, 2, (4, 9, 2))
    text = (
        r"its largest task, update of pack 1, holds weight 9 \+ state 18 \+ gradient 9 \+ work 1 bytes; .* is 37 bytes"
    )
    with pytest.raises(ResourceExhausted, match=text) as raised:
        best(tasks, sizes, 36)
    (least,) = re.findall(r"feasible budget is (\d+)", str(raised.value))
    replay(best(tasks, sizes, int(least)), tasks, sizes, int(least))
