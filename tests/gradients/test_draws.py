"""Draws that torch differentiates by their parameters, and functions with one derivative that is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import distributions

import tfnb
from tests.gradients.reference import compare
from tfnb.errors import NoGradient

DRAWS: dict[str, Callable[[torch.Tensor], distributions.Distribution]] = {
    "gamma": lambda a: distributions.Gamma(a, 2 * a),
    "dirichlet": lambda a: distributions.Dirichlet(a.expand(4, 2)),
    "beta": lambda a: distributions.Beta(a, 1 + a),
    "student": lambda a: distributions.StudentT(2 + a),
    "chi2": lambda a: distributions.Chi2(a),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.filterwarnings("ignore:.*Python took the")
def test_draws_that_torch_differentiates(name: str) -> None:
    a = torch.tensor([1.5, 2.5], dtype=torch.float64, requires_grad=True)
    compare(lambda a: DRAWS[name](a).rsample(), [a], second=False)


FUNCTIONS = [torch.special.gammainc, torch.special.gammaincc, torch.special.zeta]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_with_one_derivative_that_is_known(function: Callable[..., torch.Tensor]) -> None:
    a = torch.tensor([1.5, 2.5], dtype=torch.float64)
    x = torch.tensor([1.2, 0.7], dtype=torch.float64, requires_grad=True)
    compare(lambda x: function(a, 1 + x), [x])
    with pytest.raises(NoGradient), tfnb.record():
        first = tfnb.placeholder(a)
        tfnb.gradients(function(first, x.detach()).sum(), [first])
