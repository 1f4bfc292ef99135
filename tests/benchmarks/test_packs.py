"""The benchmark of packs at a small size: it carries out what it counts."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.bench_packs import (
    FIRST,
    GROUPED,
    LAST,
    PROGRAM,
    GptTraining,
    by_arithmetic,
    trained,
    trained_by_torch,
    weight_copies,
)
from tfnb.execution.pack_step import PackStep


def test_packs_of_a_small_gpt_move_less_than_swapping_with_the_same_loss() -> None:
    """Each run asserts that it copied the bytes of its plan."""
    made = GptTraining(layers=2, width=16)
    first, last = made.ran(FIRST), made.ran(LAST)
    assert last.loaded + last.stored < first.loaded + first.stored
    assert first.fetched.keys() == last.fetched.keys() and first.fetched
    assert all(torch.equal(value, last.fetched[key]) for key, value in first.fetched.items())


def test_copies_of_weights_are_those_of_the_closed_forms() -> None:
    made = GptTraining(layers=2, width=16)
    for microbatches in (1, 8):
        found = weight_copies(made, microbatches)
        (form, counted), (packs, counted_of_packs) = found["virtualised"], found["packs"]
        assert counted == pytest.approx(form, rel=2e-3) and counted_of_packs == pytest.approx(packs)
        assert 2 * microbatches < form < 4 * microbatches + 2 and 2 < packs < 3


def test_losses_on_a_budget_are_those_without_one_and_of_plain_pytorch() -> None:
    about = {"layers": 2, "width": 32, "seed": 1, "steps": 2}
    packed, whole = (trained(**about, is_limited=is_limited) for is_limited in (True, False))
    assert packed == whole and whole == pytest.approx(trained_by_torch(**about), rel=1e-5)


@pytest.mark.slow
def test_a_gpt_on_a_quarter_of_its_weights_and_state_waits_for_half_the_time_of_its_tasks_at_most() -> None:
    """12 GB/s beside 11.3 TFLOPS. The lane of copies in alone takes 1.3 of its tasks' time; swapping takes 8."""
    made = GptTraining()
    lru = by_arithmetic(made, FIRST, made.step(PROGRAM))
    eight = by_arithmetic(made, LAST, made.step(GROUPED))
    sixteen = by_arithmetic(made, LAST, PackStep(made.programs, (2,) * 16))
    assert sixteen["by arithmetic"] < 1.5 < eight["by arithmetic"] < 1.7 and lru["by arithmetic"] > 8
    assert sixteen["of the uncut"] < 1.8 and eight["of the uncut"] < 2
    assert sum(eight["waits"].values()) == pytest.approx(eight["by arithmetic"] - 1, abs=0.1)
