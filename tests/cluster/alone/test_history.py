"""The checker of histories under faults: it accepts what was right, and refuses each way to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tests.cluster.alone.history import DEADLINE, amount, check, kinds, runs

STEPS = 20


def values(times: list[int]) -> dict[str, Any]:
    total = float(sum(amount(step) * count for step, count in enumerate(times)))
    return {"seen": [runs(times), runs(times)], "total": [total, total]}


def first(steps: int) -> dict[str, Any]:
    """The values after the first steps."""
    return values([1] * steps + [0] * (STEPS - steps))


def history(mode: str = "sync") -> list[dict[str, Any]]:
    """A training that loses a server, then its notebook, and goes on from checkpoint 8; elements go through a queue."""
    events: list[dict[str, Any]] = [
        {"event": "begin", "training": 0, "mode": mode, "steps": STEPS, "first": 0, "values": None, "refused": []},
        *({"event": "told", "step": step, "again": False} for step in range(1, 7)),
        {"event": "checkpoint", "step": 5},
        {"event": "fault", "kind": "kill a server"},
        {"event": "recovered", "step": 6, "kept": 4, "redone": 2, "seconds": 1.0},
        *({"event": "told", "step": step, "again": step <= 6} for step in range(5, 13)),
        {"event": "checkpoint", "step": 8},
        {"event": "fault", "kind": "kill the notebook"},
        {"event": "killed"},
        {"event": "begin", "training": 0, "mode": mode, "steps": STEPS, "first": 8, "values": first(8), "refused": []},
        *({"event": "told", "step": step, "again": False} for step in range(9, STEPS + 1)),
        {"event": "end", "taken": STEPS - 8, "seconds": 1.0, "values": first(STEPS)},
        *({"event": "put", "queue": "q", "item": item} for item in range(4)),
        *({"event": "taken", "queue": "q", "item": item} for item in range(3)),
        {"event": "left", "queue": "q", "items": [3]},
    ]
    return [{**event, "at": float(at)} for at, event in enumerate(events)]


def at(events: list[dict[str, Any]], event: str, **facts: Any) -> int:
    """Where the last such event is."""
    return max(i for i, one in enumerate(events) if one["event"] == event and facts.items() <= one.items())


def test_a_history_in_which_all_is_right() -> None:
    verdict = check(history())
    assert verdict.is_clean and str(verdict).startswith("lost, doubled, torn, over deadline = 0, 0, 0, 0 of ")
    assert verdict.checked == {"steps told": 26, "attempts": 2, "values": 2, "trainings": 1, "items of queues": 4}


def test_each_kind_of_fault_has_the_longest_pause_after_it() -> None:
    found = {kind.kind: kind.pauses for kind in kinds(history())}
    assert found == {"kill a server": (4.0,), "kill the notebook": (3.0,)}


def drop(event: str, **facts: Any) -> Callable[[Any], None]:
    """An event that is not there."""
    return lambda events: events.pop(at(events, event, **facts))


def end_in(times: list[int], shard: int | None = None) -> Callable[[Any], None]:
    """Other values at the end, on one shard or on both."""

    def change(events: Any) -> None:
        found = events[at(events, "end")]["values"]
        for which in (0, 1) if shard is None else (shard,):
            for name in ("seen", "total"):
                found[name][which] = values(times)[name][which]

    return change


def change(event: str, facts: dict[str, Any], /, **others: Any) -> Callable[[Any], None]:
    """An event with other facts."""
    return lambda events: events[at(events, event, **facts)].update(others)


ONCE = [1] * STEPS
DOCTORED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a step is lost": (end_in([*ONCE[:-1], 0]), "lost"),
    "a step is applied twice": (end_in([1, 2, *ONCE[2:]]), "doubled"),
    "one step is lost and another one doubled": (end_in([0, 2, *ONCE[2:]]), "lost"),
    "one shard lacks a step": (end_in([*ONCE[:-1], 0], shard=1), "torn"),
    "half of a step": (lambda events: events[at(events, "end")]["values"]["seen"][0].__setitem__(0, [0.5, 20]), "torn"),
    "a wrong total": (lambda events: events[at(events, "end")]["values"]["total"].__setitem__(1, 7.0), "torn"),
    "a checkpoint of later values": (change("begin", {"first": 8}, values=first(9)), "doubled"),
    "a checkpoint of earlier values": (change("begin", {"first": 8}, values=first(7)), "lost"),
    "a checkpoint that lacks a step in the middle": (
        change("begin", {"first": 8}, values=values([1, 0, *[1] * 7, *[0] * (STEPS - 9)])), "lost",
    ),
    "a durable checkpoint is not found": (change("begin", {"first": 8}, first=5, values=first(5)), "lost"),
    "a step is never told": (drop("told", step=15), "lost"),
    "the last step is never told": (drop("told", step=STEPS), "lost"),
    "a step is told twice": (change("told", {"step": 15}, step=14), "doubled"),
    "steps come again without a recovery": (drop("recovered"), "doubled"),
    "a step that comes again is told as new": (change("told", {"step": 6, "again": True}, again=False), "wrong"),
    "fewer steps than it says": (change("end", {}, taken=STEPS), "wrong"),
    "an error without a type": (change("killed", {}, event="error", type="AssertionError", message="?"), "wrong"),
    "no end": (drop("end"), "wrong"),
    "nobody hears for long": (change("end", {}, at=1000.0 + DEADLINE), "late"),
    "it never ended": (lambda events: events.append({"event": "late", "at": 1e3, "message": "?"}), "late"),
    "it never began": (lambda events: events.append({"event": "failed", "at": 1e3, "message": "?"}), "wrong"),
    "an element is taken twice": (change("taken", {"item": 2}, item=1), "doubled"),
    "an element is lost": (change("left", {}, items=[]), "lost"),
    "elements come out of order": (change("taken", {"item": 0}, item=4), "wrong"),
}  # fmt: skip


@pytest.mark.parametrize(("doctor", "kind"), DOCTORED.values(), ids=DOCTORED)
def test_each_way_to_be_wrong_is_refused(doctor: Callable[[Any], None], kind: str) -> None:
    events = deepcopy(history())
    doctor(events)
    verdict = check(events)
    assert not verdict.is_clean and verdict.wrong and getattr(verdict, kind), verdict


def test_asynchronous_tasks_may_have_applied_any_steps() -> None:
    events = history("async")
    times = [1, 0, *[1] * 7, *[0] * (STEPS - 9)]
    change("begin", {"first": 8}, values=values(times))(events)
    assert check(events).is_clean
    change("begin", {"first": 8}, first=5, values=first(5), refused=["ckpt-8.safetensors"])(events)
    at_end = events[at(events, "begin")]
    told = [{"event": "told", "step": step, "again": False, "at": at_end["at"]} for step in range(6, 9)]
    events[at(events, "begin") + 1 : at(events, "begin") + 1] = told
    change("end", {}, taken=STEPS - 5)(events)
    assert check(events).is_clean
    end_in([*ONCE[:-1], 0])(events)
    assert check(events).lost
