"""Decompositions of ops for inductor, where its own are wrong or missing.

Factors of sums and products, which it drops where one of its patterns matches, become multiplications of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def _sum(x: torch.Tensor, y: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    return x + y * alpha


def _difference(x: torch.Tensor, y: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    return x - y * alpha


def _product(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: float = 1) -> torch.Tensor:
    product = a @ b * alpha
    return x * beta + product if beta else product  # torch does not look at x then: it may be NaN


# Inductor's patterns see the operands of these and not their factors, which they drop without a word
# (pytorch issues 167313, 196577; torch 2.13): they become multiplications of their own.
FACTORS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.add.Tensor: _sum,
    torch.ops.aten.sub.Tensor: _difference,
    torch.ops.aten.addmm.default: _product,
    torch.ops.aten.baddbmm.default: _product,
}


def decompositions(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions, with ours in `FACTORS` for factors other than one, and `_outer`."""

    def chosen(mine: Callable[..., Any], theirs: Callable[..., Any] | None) -> Callable[..., Any]:
        def decomposed(*args: object, **kwargs: object) -> Any:
            if any(kwargs.get(factor, 1) != 1 for factor in ("alpha", "beta")):
                return mine(*args, **kwargs)
            return NotImplemented if theirs is None else theirs(*args, **kwargs)

        return decomposed

    product = torch.ops.aten.mm.default
    mine = {op: chosen(mine, table.get(op)) for op, mine in FACTORS.items()}
    return {**table, **mine, product: _outer(table.get(product))}


def _outer(theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    """The product of a column and a row, by broadcasting, so that consumers can fuse the product."""

    def decomposed(a: torch.Tensor, b: torch.Tensor) -> Any:
        if a.shape[1] == 1:
            return a * b
        return NotImplemented if theirs is None else theirs(a, b)

    return decomposed
