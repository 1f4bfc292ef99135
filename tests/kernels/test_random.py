"""Draws from a generator of one's own: those of the seed, and torch's own generator stays as it was."""

from __future__ import annotations

import torch

from tfnb.kernels.random import drawn, seeded

CPU = torch.device("cpu")
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
