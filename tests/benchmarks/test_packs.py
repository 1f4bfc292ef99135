"""The benchmark of packs at a small size: it carries out what it counts."""

from __future__ import annotations

import torch

from tests.benchmarks.bench_packs import FIRST, LAST, ORDERS, GptTraining


def test_packs_of_a_small_gpt_move_less_than_swapping_with_the_same_loss() -> None:
    """Each run asserts that it copied the bytes of its plan."""
    made = GptTraining(layers=2, width=16)
    made.budget = max(made.step(ORDERS[name][0]).least for name in (FIRST, LAST))
    first, last = made.ran(FIRST), made.ran(LAST)
    assert last.loaded + last.stored < first.loaded + first.stored
    assert first.fetched.keys() == last.fetched.keys() and first.fetched
    assert all(torch.equal(value, last.fetched[key]) for key, value in first.fetched.items())
