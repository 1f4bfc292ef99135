"""Draws from a generator of one's own: those of the seed, and torch's own generator stays as it was."""

from __future__ import annotations

import math

import pytest
import torch

from tfnb.kernels.random import drawn, log_uniform, seeded

CPU, ops = torch.device("cpu"), torch.ops.tfnb
rand, dropout = torch.ops.aten.rand.default, torch.ops.aten.native_dropout.default


def test_a_generator_draws_what_its_seed_draws_and_goes_on() -> None:
    own = torch.Generator().manual_seed(7)
    first, second = (drawn(rand, own, ([5],), {}) for _ in range(2))
    assert torch.equal(first, seeded(rand, 7, CPU, ([5],), {}))
    assert not torch.equal(first, second)


def test_an_op_that_takes_no_generator_draws_from_it_too() -> None:
    args = (torch.ones(100), 0.5, True)
    own = torch.Generator().manual_seed(7)
    assert torch.equal(drawn(dropout, own, args, {})[0], seeded(dropout, 7, CPU, args, {})[0])


def test_the_generator_of_torch_stays_as_it_was() -> None:
    before = torch.get_rng_state()
    drawn(rand, torch.Generator(), ([5],), {})
    assert torch.equal(torch.get_rng_state(), before)


# -- log-uniform classes (semantics S-164) ----------------------------------------


@pytest.mark.parametrize("unique", [False, True])
def test_draws_pass_opcheck_for_shapes(unique: bool) -> None:
    torch.library.opcheck(ops.log_uniform_draw.default, (torch.zeros(2), 3, 9, unique), test_utils="test_faketensor")


def test_probabilities_are_those_of_the_formula_and_sum_to_one() -> None:
    assert float(4 * log_uniform(torch.tensor(0), 10)) == pytest.approx(1.1562593, abs=1e-7)
    assert float(log_uniform(torch.arange(1000), 1000).sum()) == pytest.approx(1, abs=1e-12)
    assert float(log_uniform(torch.tensor(3), 7)) == pytest.approx(math.log(5 / 4) / math.log(8), rel=1e-12)


def test_draws_have_these_frequencies() -> None:
    torch.manual_seed(1)
    count, classes = 200_000, 12
    ids, tries = ops.log_uniform_draw(torch.zeros(()), count, classes, False)
    expected = count * log_uniform(torch.arange(classes), classes)
    deviation = (torch.bincount(ids, minlength=classes) - expected) / expected.sqrt()
    assert int(tries) == count and float(deviation.square().sum()) < 31.3, "chi-square of 11, 1 in 1000"


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_unique_draws_are_distinct_and_count_their_tries(count: int) -> None:
    for seed in range(30):
        torch.manual_seed(seed)
        ids, tries = ops.log_uniform_draw(torch.zeros(()), count, 20, True)
        assert len({*ids.tolist()}) == count and all(0 <= at < 20 for at in ids.tolist())
        torch.manual_seed(seed)
        every = torch.cat(
            [ops.log_uniform_draw(torch.zeros(()), count, 20, False)[0] for _ in range(400 if count else 1)]
        )
        assert ids.tolist() == list(dict.fromkeys(every.tolist()))[:count], "the first distinct ones"
        assert len({*every[: int(tries)].tolist()}) == count
        assert int(tries) == 0 or len({*every[: int(tries) - 1].tolist()}) == count - 1, (
            "the last try was the last new one"
        )


def test_one_draw_more_is_made_for_each_repetition() -> None:
    """Of two distinct classes of two, the mean number of tries is 1 + p / q + q / p."""
    torch.manual_seed(0)
    p, q = log_uniform(torch.arange(2), 2).tolist()
    tries = [float(ops.log_uniform_draw(torch.zeros(()), 2, 2, True)[1]) for _ in range(4000)]
    assert sum(tries) / 4000 == pytest.approx(1 + p / q + q / p, abs=0.12)
