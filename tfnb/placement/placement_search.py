"""The search for the places of groups with the least simulated time of the step. Pure, and deterministic by its seed.

First come all groups on one place, round-robin, and a greedy list: group by group, in order of what depends on it, the
place where all that is placed by then ends first. The best of them is improved by moving groups of its critical path
and by swapping them with others; where nothing helps, some groups are moved at random, and so on from there. The search
is bounded by the number of simulated placements and not by a clock. Where there are no more placements than that, all
are simulated.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfnb.placement.simulation import Links, PlacementProblem, Timeline, simulate

EVALUATIONS = 1000  # simulated placements of a small step
OPS = 1_000_000  # simulated ops of a large one: some seconds
LEAST = 60  # simulated placements of any


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. one: the step with all groups on one place, except groups that may not be there.

    in_turn: with the groups on the places in turn. tried: how many placements were simulated.
    """

    best: Timeline
    one: Timeline
    in_turn: Timeline
    tried: int


def search(
    problem: PlacementProblem, links: Links, *, evaluations: int | None = None, seed: int = 0
) -> SearchResult:  # fmt: skip
    """The quickest placement found; among equally quick ones, the placement with the fewest bytes that cross.

    evaluations: how many placements may be simulated, None for as many as suit the size of the step; the simple ones
    and the greedy list are simulated in any case.
    """
    most = evaluations
    if most is None:
        most = max(LEAST, min(EVALUATIONS, OPS // max(1, len(problem.seconds))))
    return _Search(problem, links, most, random.Random(seed)).result()


class _Search:
    """One search: the best timeline so far, and the evaluations that are left."""

    def __init__(self, problem: PlacementProblem, links: Links, evaluations: int, draws: random.Random) -> None:
        self.problem, self.links, self.left, self.draws = problem, links, evaluations, draws
        self.tried = 0
        self.free = [group for group, places in enumerate(problem.places) if len(places) > 1]
        beside: list[dict[int, None]] = [{} for _ in problem.places]
        for op, taken in enumerate(problem.takes):
            for maker in (problem.groups[problem.values[value].maker] for value in taken):
                beside[maker][problem.groups[op]] = beside[problem.groups[op]][maker] = None
        self.beside = [[other for other in found if other != group] for group, found in enumerate(beside)]

    def result(self) -> SearchResult:
        """The best placement, beside the simple ones."""
        ones = [self.simulated(self._on_one(place)) for place in self._all_places()]
        one = min(ones, key=_cost)
        in_turn = self.simulated([places[group % len(places)] for group, places in enumerate(self.problem.places)])
        best = min((one, in_turn), key=_cost)
        if math.prod(map(len, self.problem.places)) <= self.left:
            best = min((best, *map(self.simulated, itertools.product(*self.problem.places))), key=_cost)
        elif self.free:
            best = self._climb(min(best, self._greedy(), key=_cost))
            while self.left > 0:
                best = min(best, self._climb(self._shaken(best)), key=_cost)
        return SearchResult(best, one, in_turn, self.tried)

    def simulated(self, at: Sequence[int | None]) -> Timeline:
        """The timeline of a placement."""
        self.tried += 1
        self.left -= 1
        return simulate(self.problem, at, self.links)

    def _all_places(self) -> list[int]:
        return sorted({place for places in self.problem.places for place in places}) or [0]

    def _on_one(self, place: int) -> list[int]:
        return [place if place in places else places[0] for places in self.problem.places]

    def _greedy(self) -> Timeline:
        """Each group where the step of all groups placed so far ends first."""
        at: list[int | None] = [places[0] if len(places) == 1 else None for places in self.problem.places]
        found = None
        for group in self._ranked():
            trials = [self.simulated([*at[:group], place, *at[group + 1 :]]) for place in self.problem.places[group]]
            found = min(trials, key=_cost)
            at[group] = found.at[group]
        return found or self.simulated(at)

    def _ranked(self) -> list[int]:
        """The groups that may be at several places, by the longest path from their first op to the end of the step."""
        problem = self.problem
        ranks = [0.0] * len(problem.seconds)
        for op in reversed(range(len(ranks))):
            ranks[op] += problem.seconds[op]
            for value in problem.takes[op]:
                maker = problem.values[value].maker
                ranks[maker] = max(ranks[maker], ranks[op])
        of_group: dict[int, float] = {}
        for op, group in enumerate(problem.groups):
            of_group[group] = max(of_group.get(group, 0.0), ranks[op])
        return sorted(self.free, key=lambda group: (-of_group.get(group, 0.0), group))

    def _climb(self, best: Timeline) -> Timeline:
        """Take the first better neighbour, until there is none."""
        is_better = True
        while is_better:
            is_better = False
            for at in self._neighbours(best):
                if self.left <= 0:
                    return best
                found = self.simulated(at)
                if _cost(found) < _cost(best):
                    best, is_better = found, True
                    break
        return best

    def _neighbours(self, timeline: Timeline) -> Iterator[list[int | None]]:
        """Placements with a group of the critical path moved: alone, with a neighbour, or in exchange for another."""
        at, places = timeline.at, self.problem.places
        critical = [group for group in timeline.critical() if len(places[group]) > 1]
        for group in critical:
            for place in places[group]:
                if place != at[group]:
                    yield [*at[:group], place, *at[group + 1 :]]
        for group in critical:
            for place in places[group]:
                for other in self.beside[group]:
                    if place != at[group] and place != at[other] and place in places[other]:
                        moved = [*at]
                        moved[group] = moved[other] = place
                        yield moved
        for group in critical:
            for other in self.free:
                here, there = at[group], at[other]
                if here != there and there in places[group] and here in places[other]:
                    swapped = [*at]
                    swapped[group], swapped[other] = there, here
                    yield swapped

    def _shaken(self, timeline: Timeline) -> Timeline:
        """A placement with some groups moved at random."""
        at = [*timeline.at]
        for group in self.draws.sample(self.free, self.draws.randint(1, len(self.free))):
            at[group] = self.draws.choice(self.problem.places[group])
        return self.simulated(at)


def _cost(timeline: Timeline) -> tuple[float, int]:
    """The cost of a placement: the time of the step, then the bytes that cross."""
    return timeline.seconds, timeline.sent
