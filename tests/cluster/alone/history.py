"""The history of trainings under faults, and its violations. Pure: events in, counts out.

A history is a list of events, each a dict of JSON with ``event``, what it is, and ``at``, seconds of a monotonic clock.
A training of n steps may take several attempts, each in a notebook process of its own:

- begin: ``training``, ``mode``, ``steps``, ``first`` (steps that were taken before), ``values`` (of the checkpoint),
  ``refused`` (newer checkpoints of asynchronous tasks, with gaps);
- told: ``step`` (from 1), and ``again`` where it was told before a lost server took it back;
- recovered: ``step``, ``kept``, ``redone``, ``seconds``, as `tfnb.recovery_log` has it;
- checkpoint: ``step``; its file is durable;
- end: ``taken`` (steps of this attempt), ``seconds``, ``values``; error: ``type``, ``message``, ``values``, where there
  are any; killed: the notebook process is gone;
- put, taken: ``queue``, ``item``; each item is put once, and an item that was put is taken once, in order;
- left: ``queue``, ``items`` that are in it at the end; fault: ``kind``;
- failed, late: ``message``; the notebook never began, or never ended.

Values are the record of the updates that were applied: Variable ``seen`` of each shard says how often each step was, as
runs of ``[times, steps]``, and ``total`` is the sum of the `amount` of each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import median
from typing import Any

DEADLINE = 100.0  # seconds without a word of a notebook that takes steps: a silent server is given up after 60
TYPED = ("ParameterServerLost", "SchedulerLost", "WorkerLost", "Unavailable")  # errors that a fault may end in

Event = Mapping[str, Any]


def amount(step: int) -> int:
    """The number that a step, from 0, adds to the total: a whole number, different for most steps."""
    return step * 7919 % 97 + 1


def runs(times: Iterable[float]) -> list[list[float]]:
    """Equal neighbours as ``[value, how many]``.

    >>> runs([1, 1, 0])
    [[1, 2], [0, 1]]
    """
    return [[value, len(list(group))] for value, group in groupby(times)]


def expanded(values: Sequence[Sequence[float]]) -> list[float]:
    """The opposite of `runs`."""
    return [value for value, count in values for _ in range(int(count))]


@dataclass
class Verdict:
    """The findings on a history. ``wrong``: a line for each violation; the four counts are to be 0.

    lost: steps that were acknowledged and are not in the values, and items of queues; doubled: those that were applied
    or taken more than once; torn: values of two shards, or of one, that are not of the same steps; late: waits beyond
    the deadline.
    """

    lost: int = 0
    doubled: int = 0
    torn: int = 0
    late: int = 0
    wrong: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        """Whether there are no violations."""
        return not (self.lost or self.doubled or self.torn or self.late or self.wrong)

    def says(self, where: str, text: str, **counts: int) -> None:
        """Add a line, and its counts."""
        if not counts or any(counts.values()):
            self.wrong.append(f"{where}: {text}")
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def __str__(self) -> str:
        four = f"lost, doubled, torn, over deadline = {self.lost}, {self.doubled}, {self.torn}, {self.late}"
        of = ", ".join(f"{count} {name}" for name, count in self.checked.items())
        return "\n".join([f"{four} of {of}", *self.wrong])


def check(events: Iterable[Event]) -> Verdict:
    """Whether each step of each training was applied once, and no acknowledged step is missing."""
    verdict, events = Verdict(), list(events)
    attempts = list(_attempts(events))
    for number, tries in groupby(attempts, key=lambda attempt: attempt[0]["training"]):
        _check_training(f"training {number}", list(tries), verdict)
    _check_queues(events, verdict)
    for event in events:
        if event["event"] in ("late", "failed"):
            counts = {"late": 1} if event["event"] == "late" else {}
            verdict.says("notebook", f"{event['event']}: {event['message']}", **counts)
    return verdict


def _attempts(events: Iterable[Event]) -> Iterator[list[Event]]:
    """The events of each attempt, from its beginning to its end; faults are of none."""
    attempt: list[Event] = []
    for event in events:
        if event["event"] == "begin":
            if attempt:
                yield attempt
            attempt = [event]
        elif attempt and event["event"] in ("told", "recovered", "checkpoint", "end", "error", "killed"):
            attempt.append(event)
            if event["event"] in ("end", "error", "killed"):
                yield attempt
                attempt = []
    if attempt:
        yield attempt


def _check_training(where: str, attempts: Sequence[Sequence[Event]], verdict: Verdict) -> None:
    """All attempts of one training."""
    durable = 0
    for attempt in attempts:
        begin = attempt[0]
        first, refused = begin["first"], begin.get("refused", [])
        if first < durable and not (refused and begin["mode"] in ("async", "bounded")):
            verdict.says(where, f"begins at step {first}, checkpoint {durable} was durable", lost=durable - first)
        _check_values(f"{where}, checkpoint {first}", begin, begin.get("values"), first, verdict)
        durable = first
        _check_told(where, attempt, verdict)
        durable = max([durable, *(event["step"] for event in attempt if event["event"] == "checkpoint")])
        last = attempt[-1]
        if last["event"] == "error" and last["type"] not in TYPED:
            verdict.says(where, f"ended in {last['type']}: {last['message']}")
        if last["event"] == "error":
            _check_values(f"{where}, after an error", begin, last.get("values"), None, verdict)
        for before, after in pairwise(attempt):
            pause = after["at"] - before["at"]
            verdict.says(where, f"{pause:.0f} s before {dict(after)}", late=int(pause > DEADLINE))
        verdict.checked["attempts"] += 1
    begin, last = attempts[-1][0], attempts[-1][-1]
    if last["event"] != "end":
        verdict.says(where, f"has no end, but {last['event']}")
        return
    if begin["first"] + last["taken"] != begin["steps"]:
        verdict.says(where, f"{last['taken']} steps taken from step {begin['first']} of {begin['steps']}")
    _check_values(f"{where}, end", begin, last["values"], begin["steps"], verdict)
    verdict.checked["trainings"] += 1


def _check_told(where: str, attempt: Sequence[Event], verdict: Verdict) -> None:
    """Steps are told in order; only a recovery takes some back, to be told again as such."""
    step = highest = attempt[0]["first"]
    may_go_back = False
    for event in attempt:
        if event["event"] == "recovered":
            may_go_back = True
        if event["event"] != "told":
            continue
        verdict.checked["steps told"] += 1
        if event["step"] != step + 1:
            if not (may_go_back and event["step"] <= step):
                missed = max(0, event["step"] - step - 1)
                verdict.says(where, f"step {event['step']} was told after {step}", lost=missed, doubled=int(not missed))
            may_go_back = False
        if event["again"] != (event["step"] <= highest):
            verdict.says(where, f"step {event['step']} was told as again={event['again']} after {highest}")
        step, highest = event["step"], max(highest, event["step"])
    last = attempt[-1]
    if last["event"] == "end" and step != attempt[0]["steps"] and last["taken"]:
        verdict.says(where, f"{attempt[0]['steps'] - step} steps were never told", lost=attempt[0]["steps"] - step)


def _check_values(where: str, begin: Event, values: Any, steps: int | None, verdict: Verdict) -> None:
    """Values are a replay of so many steps, each applied once: the first steps, or any ones of asynchronous tasks."""
    if values is None:
        if steps:
            verdict.says(where, "there are no values")
        return
    seen = [expanded(one) for one in values["seen"]]
    verdict.checked["values"] += 1
    for at, (times, total) in enumerate(zip(seen, values["total"], strict=True)):
        doubled = sum(max(0, round(count) - 1) for count in times)
        verdict.says(where, f"steps of shard {at} were applied more than once: {runs(times)}", doubled=doubled)
        replay = sum(amount(step) * count for step, count in enumerate(times))
        verdict.says(where, f"shard {at} has {total}, a replay of its steps {replay}", torn=int(total != replay))
        verdict.says(where, f"shard {at} has {times}", torn=int(any(count != round(count) for count in times)))
        if steps is not None:
            in_order = begin["mode"] not in ("async", "bounded") or steps == begin["steps"]
            there = sum(map(bool, times[:steps] if in_order else times))
            verdict.says(where, f"shard {at} has {there} of {steps} steps: {runs(times)}", lost=max(0, steps - there))
            more = sum(map(bool, times)) - steps
            verdict.says(where, f"shard {at} has {more} steps that do not count", doubled=max(0, more))
    verdict.says(where, "shards are of different steps", torn=int(any(one != seen[0] for one in seen)))


def _check_queues(events: Sequence[Event], verdict: Verdict) -> None:
    """Items that were put come out once, in order; the last put of a killed notebook is unknown."""
    put, taken = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    left: dict[str, list[int]] = {}
    for event in events:
        match event["event"]:
            case "put":
                put[event["queue"]].append(event["item"])
            case "taken":
                taken[event["queue"]].append(event["item"])
            case "left":
                left[event["queue"]] = event["items"]
    for queue in put.keys() | taken.keys():
        out = [*taken[queue], *left.get(queue, [])]
        doubled = sum(count - 1 for count in Counter(out).values())
        verdict.says(f"queue {queue}", f"items came out twice: {out}", doubled=doubled)
        expected = range(max([-1, *out]) + 1 if queue not in left else max([-1, *put[queue], *out]) + 1)
        lost = [item for item in expected if item not in set(out)]
        verdict.says(f"queue {queue}", f"items {lost} never came out", lost=len(lost))
        if out != sorted(out):
            verdict.says(f"queue {queue}", f"items came out of order: {out}")
        verdict.checked["items of queues"] += len(out)


@dataclass(frozen=True)
class Kind:
    """The cost of one kind of fault: number of faults, and after each the longest pause before the next, in seconds."""

    kind: str
    pauses: tuple[float, ...]
    injected: int

    def __str__(self) -> str:
        seconds = f"{median(self.pauses):8.1f} {max(self.pauses):8.1f}" if self.pauses else f"{'-':>8} {'-':>8}"
        return f"{self.kind:32} {self.injected:4} {seconds}"


def kinds(events: Iterable[Event]) -> list[Kind]:
    """For each kind of fault the longest times without a new step, from each fault to the next."""
    found = defaultdict[str, list[list[float]]](list)
    waiting: list[list[float]] = []
    last = "end"
    for event in events:
        is_new = event["event"] in ("told", "end") and not event.get("again")
        if is_new or (event["event"] == "begin" and last == "end"):
            for times in waiting:
                times.append(event["at"])
            waiting = waiting[-1:]  # of the last fault later pauses count, too
        if event["event"] == "fault":
            found[event["kind"]].append([event["at"]])
            waiting = [*(times for times in waiting if len(times) == 1), found[event["kind"]][-1]]
        last = event["event"] if event["event"] in ("begin", "end", "error", "killed") else last
    return [
        Kind(kind, tuple(max(b - a for a, b in pairwise(times)) for times in each if len(times) > 1), len(each))
        for kind, each in sorted(found.items())
    ]
