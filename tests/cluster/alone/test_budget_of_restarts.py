"""How often a training is recovered: the budget, and a step that kills servers; what the block says."""

from __future__ import annotations

import pytest

from tfnb.cluster.engine.restarts import Restarts
from tfnb.cluster.modes.plan import POISON
from tfnb.cluster.recovery import Recovery, RecoveryBudget
from tfnb.errors import ParameterServerLost


def lost() -> ParameterServerLost:
    return ParameterServerLost("parameter server 1 of 1 was lost at step 7.")


def test_none_are_taken_of_an_empty_budget() -> None:
    with pytest.raises(ParameterServerLost, match=r"at step 7\.$"):
        RecoveryBudget(Restarts(most=0)).spend(lost(), 7)


def test_a_spent_budget_says_how_to_have_more() -> None:
    budget = RecoveryBudget(Restarts(most=2))
    budget.spend(lost(), 7)
    budget.spend(lost(), 9)
    with pytest.raises(ParameterServerLost, match=r"2 restarts in 10 minutes are spent.*restarts=n"):
        budget.spend(lost(), 11)


def test_a_step_that_kills_servers_stops_the_training() -> None:
    budget = RecoveryBudget(Restarts(most=100))
    for step in (7, *[9] * (POISON - 1)):
        budget.spend(lost(), step)
    with pytest.raises(ParameterServerLost, match=f"{POISON} attempts at step 10 each lost a server"):
        budget.spend(lost(), 9)
    assert budget.restarts.left(0.0) == 100 - POISON, "the last attempt takes none"


def test_the_block_has_all_facts() -> None:
    text = str(Recovery(0.0, "ParameterServerLost: ps:0", 12, 10, 1, (("jobs", 2),), 0.5, 2.0, 4, 5, 600.0, 2, 1))
    for fact in (
        "ps:0 at step 12",
        "step 10",
        "0.5 s old",
        "2 steps will be redone",
        "2.0 s",
        "4 of 5",
        "1 step of tfnb.run",
    ):
        assert fact in text
