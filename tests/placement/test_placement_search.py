"""The search beside all placements of small steps, and beside the simple ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from tfnb.placement.placement_search import search
from tfnb.placement.simulation import LinkCost, Links, OpValue, PlacementProblem, simulate


def any_step(draws: random.Random, groups: int, places: int) -> PlacementProblem:
    """Ops that take any earlier ones, some of which share a group."""
    count = draws.randint(groups, 2 * groups)
    of = [*range(groups), *(draws.randrange(groups) for _ in range(count - groups))]
    draws.shuffle(of)
    return PlacementProblem(
        [draws.choice([0.1, 0.5, 1.0, 2.0, 3.0]) for _ in range(count)],
        [sorted(draws.sample(range(op), min(op, draws.choice([0, 1, 1, 2, 3])))) for op in range(count)],
        [OpValue(op, draws.choice([0, 10, 100])) for op in range(count)], of,
        [tuple(sorted(draws.sample(range(places), draws.choice([1, places, places])))) for _ in range(groups)],
    )  # fmt: skip


def trained_step(draws: random.Random, groups: int, places: int) -> PlacementProblem:
    """Branches of layers and a backward pass, in which each layer has its forward op in its group."""
    before = [sorted(draws.sample(range(op), min(op, draws.choice([0, 1, 1, 1, 2])))) for op in range(groups)]
    seconds = [draws.choice([0.1, 1.0, 2.0]) for _ in range(groups)]
    takes, of, back = [*before], [*range(groups)], dict[int, int]()
    for op in reversed(range(groups)):
        back[op] = len(takes)
        takes.append(sorted([op, *(back[user] for user in range(op + 1, groups) if op in before[user])]))
        seconds.append(2 * seconds[op])
        of.append(op)
    values = [OpValue(op, draws.choice([10, 100])) for op in range(len(takes))]
    return PlacementProblem(seconds, takes, values, of, [tuple(range(places))] * groups)


def links(draws: random.Random) -> Links:
    """The cost of all links."""
    cost = LinkCost(draws.choice([0.0, 0.1, 1.0]), draws.choice([50.0, 1000.0]))
    return lambda source, to: cost


Step = Callable[[random.Random, int, int], PlacementProblem]


@pytest.mark.parametrize("step", [any_step, trained_step])
@pytest.mark.parametrize("seed", range(20))
def test_a_placement_takes_at_most_a_tenth_longer_than_the_best_of_all(step: Step, seed: int) -> None:
    draws = random.Random(seed)
    places = draws.choice([2, 3])
    made, cost = step(draws, draws.randint(1, 9 if places == 2 else 6), places), links(draws)
    found = search(made, cost, evaluations=300)
    best = min(simulate(made, at, cost).seconds for at in itertools.product(*made.places))
    assert found.best.seconds <= 1.1 * best
    assert found.best.seconds <= min(found.one.seconds, found.in_turn.seconds)
    assert found.best.seconds == best or math.prod(map(len, made.places)) > 290, "all were tried"


@pytest.mark.slow
@pytest.mark.parametrize("step", [any_step, trained_step])
@pytest.mark.parametrize("seed", range(100, 115))
def test_twelve_groups(step: Step, seed: int) -> None:
    draws = random.Random(seed)
    made, cost = step(draws, 12, 2), links(draws)
    best = min(simulate(made, at, cost).seconds for at in itertools.product(*made.places))
    assert search(made, cost).best.seconds <= 1.1 * best


@pytest.mark.parametrize("seed", range(4))
def test_a_large_step_is_bounded_never_worse_than_simple_ones_and_the_same_each_time(seed: int) -> None:
    draws = random.Random(seed)
    made, cost = trained_step(draws, 60, 4), links(draws)
    found, again = (search(made, cost, evaluations=400, seed=seed) for _ in range(2))
    assert found.best.seconds <= min(found.one.seconds, found.in_turn.seconds)
    assert found.best.at == again.best.at and found.tried == again.tried
    assert found.tried <= 400 + 5 + 4 * 60
    assert all(place in places for place, places in zip(found.best.at, made.places, strict=True))


def test_groups_stay_where_they_must_and_a_chain_stays_together() -> None:
    chain = PlacementProblem(
        [1.0] * 4, [[], [0], [1], [2]], [OpValue(op, 8) for op in range(4)], [0, 1, 2, 3], [(0, 1)] * 3 + [(1,)]
    )
    found = search(chain, lambda source, to: LinkCost(0.1, 1e9))
    assert [*found.best.at] == [1, 1, 1, 1] and found.best is found.one
    alone = search(PlacementProblem([1.0], [[]], [], [0], [(2,)]), lambda source, to: LinkCost(0.1, 1e9))
    assert [*alone.best.at] == [2]
