"""Formulas for compilers give what the kernels of the optimizers write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfnb.kernels.formulas import FORMULAS
from tfnb.kernels.optim import FUSED, NUMBERS, SGD, SGD_PRODUCT, SWITCHES

ADAM = "tfnb.adam.default"
SETTINGS: list[tuple[str, int, dict[str, Any]]] = [  # the op, how many slots are like the variable, settings
    (SGD, 0, {}),
    (SGD, 0, {"weight_decay": 0.1, "maximize": True}),
    (SGD, 1, {"momentum": 0.9}),
    (SGD, 1, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (ADAM, 2, {}),
    (ADAM, 2, {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    (ADAM, 2, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (ADAM, 3, {"amsgrad": True}),
]

MOVED = {"momentum": 0.7, "dampening": 0.2, "weight_decay": 0.3, "beta1": 0.95, "beta2": 0.99, "eps": 0.01}


def numbers(op: str) -> tuple[str, ...]:
    return NUMBERS[op.split(".")[1]]


def row(op: str, like: int, settings: dict[str, Any], made: torch.Generator) -> list[torch.Tensor]:
    w, grad, *slots = (torch.randn(4, 3, generator=made) for _ in range(2 + like))
    slots = [slot.abs() if op == ADAM else slot for slot in slots]
    if op == ADAM:
        slots.insert(2, torch.tensor(0.0))
    elif settings.get("dampening"):
        slots.append(torch.tensor(0.0))
    return [w, grad, *slots]


@pytest.mark.parametrize("kind", ["number", "tensor", "vector"])
@pytest.mark.parametrize(("op", "like", "settings"), [*SETTINGS, (SGD, 1, {"momentum": 0.9, "dampening": 0.3})])
def test_a_formula_gives_what_the_kernel_writes(op: str, like: int, settings: dict[str, Any], kind: str) -> None:
    made = torch.Generator().manual_seed(1)
    given = row(op, like, settings, made)
    found = [x.clone() for x in given]
    rate = {
        "number": [],
        "tensor": [torch.tensor(0.05).double()],
        "vector": [torch.tensor([0.05, *map(MOVED.get, numbers(op))], dtype=torch.float64)],
    }[kind]
    recorded = settings if rate else settings | {"lr": 0.05}
    places = FORMULAS[op].state(len(given) + len(rate), recorded)
    meant = settings
    if kind == "vector":  # a product or a slot that was not recorded stays away
        meant = settings | {name: MOVED[name] for name in numbers(op) if name not in SWITCHES or settings.get(name)}
    for _ in range(3):
        FUSED[op]([tuple(given)], lr=0.05, **meant)
        for place, value in zip(places, FORMULAS[op].new([*found, *rate], **recorded), strict=True):
            found[place] = value
    torch.testing.assert_close(found, given, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}])
def test_the_formula_of_a_product_gives_what_its_kernel_writes(settings: dict[str, Any]) -> None:
    made = torch.Generator().manual_seed(1)
    w, left, right = (torch.randn(*shape, generator=made) for shape in ((4, 3), (4, 2), (2, 3)))
    slots = [torch.randn(4, 3, generator=made)] if settings else []
    given = [w, left, *slots, right]
    settings = settings | {"lr": 0.05}
    new = FORMULAS[SGD_PRODUCT].new(given, **settings)
    places = FORMULAS[SGD_PRODUCT].state(len(given), settings)
    FUSED[SGD_PRODUCT]([tuple(given)], **settings)
    torch.testing.assert_close(new, [given[place] for place in places], rtol=1e-5, atol=1e-6)
