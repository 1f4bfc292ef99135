"""The predicted time of a step over several places: ops as they run there, and the values between places. Pure.

A place computes as a task does (`tfnb.execution.dataflow.templates`): its ops that wait for the same received values
are one segment, which begins when all of these have come, and sends what it made when it is over. Each place, and each
link between two, is a lane of `tfnb.memory.lane_clock` that takes what is ready first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tfnb.memory.lane_clock import LaneClock

TRIALS = 64  # values that are tried to be sent late


class LinkCost(NamedTuple):
    """The cost of a message from place to place: seconds until its first byte arrives, and bytes in a second."""

    latency: float
    rate: float

    def seconds(self, size: int) -> float:
        """The seconds of a message of so many bytes.

        >>> LinkCost(0.001, 1e6).seconds(2000)
        0.003
        """
        return self.latency + size / self.rate


Links = Callable[[int, int], LinkCost]
"""The cost of a link, by the numbers of its source and its destination."""


class OpValue(NamedTuple):
    """A value that may cross: the number of the op that makes the value, and bytes."""

    maker: int
    bytes: int


@dataclass(frozen=True)
class PlacementProblem:
    """Ops in program order, in groups that are placed as a whole.

    seconds: of each op. takes: by op, the numbers of the values that it takes. groups: the group of each op. places: by
    group, the numbers of the places where it may be. kept: numbers of the values that are held until the step is over.
    stored: those that are Variables' own, which take no memory where they are read. staged: those that go to a server,
    from the place that makes most of their bytes.
    """

    seconds: Sequence[float]
    takes: Sequence[Sequence[int]]
    values: Sequence[OpValue]
    groups: Sequence[int]
    places: Sequence[Sequence[int]]
    kept: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()
    staged: frozenset[int] = frozenset()

    @cached_property
    def users(self) -> list[list[int]]:
        """The ops that take each value."""
        found: list[list[int]] = [[] for _ in self.values]
        for op, taken in enumerate(self.takes):
            for value in taken:
                found[value].append(op)
        return found


@dataclass(slots=True)
class TimelineBar:
    """A segment of ops on a place, or a value on a link.

    lane: the number of the place, or those of the link. ops: of a segment, in order. value: of a message, else -1.
    cause: the number of the bar that this one waited for last, -1 for the start of the step.
    """

    lane: tuple[int, ...]
    ops: list[int] = field(default_factory=list)
    value: int = -1
    start: float = 0.0
    end: float = 0.0
    cause: int = -1


@dataclass(frozen=True)
class Timeline:
    """The predicted times of a step. at: the place of each group, None for a group that is left out.

    seconds: of the whole step, infinite where messages wait for each other. late: ops whose values are sent late.
    """

    problem: PlacementProblem
    at: Sequence[int | None]
    bars: Sequence[TimelineBar]
    seconds: float
    late: frozenset[int] = frozenset()

    @property
    def segments(self) -> Iterator[TimelineBar]:
        """The bars of places."""
        return (bar for bar in self.bars if bar.value < 0)

    @property
    def messages(self) -> Iterator[TimelineBar]:
        """The bars of links."""
        return (bar for bar in self.bars if bar.value >= 0)

    @property
    def sent(self) -> int:
        """Bytes that cross."""
        return sum(self.problem.values[bar.value].bytes for bar in self.messages)

    def critical(self) -> list[int]:
        """The groups on the critical path, from its end to its begin: of segments, and of the values between."""
        found: dict[int, None] = {}
        number = max(range(len(self.bars)), key=lambda n: self.bars[n].end, default=-1)
        while number >= 0:
            bar = self.bars[number]
            ops = bar.ops if bar.value < 0 else [self.problem.values[bar.value].maker]
            found |= dict.fromkeys(self.problem.groups[op] for op in reversed(ops))
            number = bar.cause
        return [*found]

    def op_times(self) -> Iterator[tuple[int, float, float]]:
        """Each op with its start and its end, one after the other within its segment."""
        for bar in self.segments:
            now = bar.start
            for op in bar.ops:
                yield op, now, now + self.problem.seconds[op]
                now += self.problem.seconds[op]

    @cached_property
    def peaks(self) -> Mapping[int, int]:
        """The most bytes of values that each place holds at once.

        A place holds a value that it makes until its last use there and its last message are over, and one that it
        receives from the begin of the message. Variables and fed values are not counted.
        """
        lives = self._lives()
        steps: dict[int, list[tuple[float, int]]] = {}
        for (value, place), (start, end) in lives.items():
            size = self.problem.values[value].bytes
            steps.setdefault(place, []).extend([(start, size), (end, -size)])
        peaks = {}
        for place, changes in steps.items():
            held = peaks[place] = 0
            for _, change in sorted(changes):  # what ends makes room for what begins then
                held += change
                peaks[place] = max(peaks[place], held)
        return peaks

    def _lives(self) -> dict[tuple[int, int], tuple[float, float]]:
        """The begin and the end of each value, by value and place."""
        problem, times = self.problem, {op: (start, end) for op, start, end in self.op_times()}
        homes = [self.at[group] for group in problem.groups]
        lives: dict[tuple[int, int], tuple[float, float]] = {}
        for value, (maker, _) in enumerate(problem.values):
            place = homes[maker]
            if place is not None:
                start, end = times[maker]
                lives[value, place] = start, self.seconds if value in problem.kept else end
        for bar in self.messages:
            source, to = bar.lane
            lives[bar.value, to] = bar.start, self.seconds if bar.value in problem.staged else bar.end
            start, end = lives[bar.value, source]
            lives[bar.value, source] = start, max(end, bar.end)
        for op, taken in enumerate(problem.takes):
            place = homes[op]
            if place is not None:
                for key in [(value, place) for value in taken if (value, place) in lives]:
                    lives[key] = lives[key][0], max(lives[key][1], times[op][1])
        own = {(value, homes[problem.values[value].maker]) for value in problem.stored}
        return {key: life for key, life in lives.items() if key not in own}


def simulate(
    problem: PlacementProblem, at: Sequence[int | None], links: Links, late: frozenset[int] = frozenset()
) -> Timeline:  # fmt: skip
    """The times of a step whose groups are at these places; ops of groups at no place are left out.

    late: ops whose values are sent when their own places have used them.

    >>> problem = PlacementProblem([1.0, 1.0, 1.0], [[], [], [0, 1]], [OpValue(0, 8), OpValue(1, 8)], [0, 1, 2], [])
    >>> half = LinkCost(0.5, 1e9)
    >>> [round(simulate(problem, at, lambda source, to: half).seconds, 3) for at in ([0, 0, 0], [0, 1, 0])]
    [3.0, 2.5]
    """
    bars, needs = _segments(problem, at, late)
    begins: list[list[int]] = [[] for _ in bars]
    for number, before in enumerate(needs):
        for other in before:
            begins[other].append(number)
    waits, ready, causes = [len(before) for before in needs], [0.0] * len(bars), [-1] * len(bars)
    clock, last = LaneClock(), dict[tuple[int, ...], int]()
    queue = [(0.0, number) for number in range(len(bars)) if not waits[number]]
    seconds, done = 0.0, 0
    while queue:
        _, number = heapq.heappop(queue)
        bar = bars[number]
        if bar.value < 0:
            lasts, latency = sum([problem.seconds[op] for op in bar.ops]), 0.0
        else:
            link = links(*bar.lane)
            lasts, latency = problem.values[bar.value].bytes / link.rate, link.latency
        bar.start = clock.book(bar.lane, ready[number], lasts)
        bar.end = bar.start + lasts + latency
        bar.cause = last[bar.lane] if bar.start > ready[number] else causes[number]
        last[bar.lane] = number
        seconds, done = max(seconds, bar.end), done + 1
        for other in begins[number]:
            waits[other] -= 1
            if bar.end >= ready[other]:
                ready[other], causes[other] = bar.end, number
            if not waits[other]:
                heapq.heappush(queue, (ready[other], other))
    return Timeline(problem, at, bars, seconds if done == len(bars) else math.inf, late)


def _segments(
    problem: PlacementProblem, at: Sequence[int | None], late: frozenset[int]
) -> tuple[list[TimelineBar], list[set[int]]]:  # fmt: skip
    """The segments and messages in program order, and by number the bars that each one waits for."""
    homes = [at[group] for group in problem.groups]
    bars: list[TimelineBar] = []
    needs: list[set[int]] = []
    masks, segment_of = [0] * len(homes), [-1] * len(homes)  # by op: the messages that it waits for, as bits
    segments: dict[tuple[int, int], int] = {}
    messages: dict[tuple[int, int], int] = {}
    for op, place in enumerate(homes):
        if place is None:
            continue
        mask, before = 0, set[int]()
        for value in problem.takes[op]:
            maker = problem.values[value].maker
            source = homes[maker]
            if source == place:
                mask |= masks[maker]
                before.add(segment_of[maker])
            elif source is not None:
                message = messages.get((value, place), -1)
                if message < 0:
                    message = messages[value, place] = len(bars)
                    bars.append(TimelineBar((source, place), value=value))
                    needs.append({segment_of[maker]})
                mask |= 1 << message
                before.add(message)
        masks[op] = mask
        segment = segments.get((place, mask), -1)
        if segment < 0:
            segment = segments[place, mask] = len(bars)
            bars.append(TimelineBar((place,)))
            needs.append(set())
        segment_of[op] = segment
        bars[segment].ops.append(op)
        needs[segment] |= before - {segment}
    for value, lane in _gathered(problem, homes):
        if (value, lane[1]) not in messages:
            messages[value, lane[1]] = len(bars)
            bars.append(TimelineBar(lane, value=value))
            needs.append({segment_of[problem.values[value].maker]})
    for (value, _), message in messages.items() if late else ():
        maker = problem.values[value].maker
        if maker in late:
            users = (op for op in problem.users[value] if homes[op] == homes[maker])
            needs[message] |= {segment_of[op] for op in users}
    return bars, needs


def _gathered(problem: PlacementProblem, homes: Sequence[int | None]) -> Iterator[tuple[int, tuple[int, int]]]:
    """The staged values that another place than their own sends to the server, with the link to that place."""
    made: dict[int, int] = {}
    for value in sorted(problem.staged):
        home = homes[problem.values[value].maker]
        if home is not None:
            made[home] = made.get(home, 0) + problem.values[value].bytes
    sender = max(sorted(made), key=lambda place: made[place], default=None)
    for value in sorted(problem.staged):
        home = homes[problem.values[value].maker]
        if home is not None and sender is not None and home != sender:
            yield value, (home, sender)


def with_late_messages(timeline: Timeline, links: Links) -> Timeline:
    """The same placement with values sent late (S-154), so that receivers hold them for less time.

    Value by value, where the step takes no longer and no place holds more at once; at most `TRIALS` values are tried,
    the largest first.
    """
    problem = timeline.problem
    sizes: dict[int, int] = {}
    for bar in timeline.messages:
        maker, size = problem.values[bar.value]
        sizes[maker] = max(sizes.get(maker, 0), size)
    for maker in sorted(sizes, key=lambda maker: (-sizes[maker], maker))[:TRIALS]:
        trial = simulate(problem, timeline.at, links, timeline.late | {maker})
        is_better = trial.seconds <= timeline.seconds and trial.peaks != timeline.peaks
        if is_better and all(trial.peaks[place] <= most for place, most in timeline.peaks.items()):
            timeline = trial
    return timeline
