"""Functions whose loops and branches set items and attributes of objects of outside."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from tests.control_flow.entered import F64, Case, cases

CASES: list[Case] = []
case = cases(CASES)
ROWS = [[1.0, -2.0], [3.0, 0.5], [-1.5, 2.0], [0.25, -4.0]]
LESS = [[-1.0, 2.0], [0.5, 0.5], [4.0, -2.0], [1.0, 1.0]]
rows = case((ROWS, 3), (LESS, 4), (ROWS, 0), (LESS, 1))


@rows
def list_of_states(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    state = [torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64)]
    for t in range(n):
        state[0] = torch.tanh(state[0] + x[t])
        state[-1] = state[1] * 0.5 + state[0]
    return state[0], state[1]


@rows
def dict_of_sums(x: Tensor, n: Tensor) -> tuple[Any, ...]:
    sums = {"up": torch.zeros((), dtype=F64), "down": torch.zeros((), dtype=F64), "count": 0}
    for i in range(n):
        if x[i, 0] > 0:
            sums["up"] += x[i, 0] * x[i, 1]
        else:
            sums["down"] = sums["down"] - x[i, 0]
            sums["count"] += 1
    return sums["up"], sums["down"], sums["count"]


@rows
def two_names_of_one_list(x: Tensor, n: Tensor) -> Tensor:
    held = [x[0]]
    same = held
    for i in range(n):
        held[0] = held[0] + x[i]
        same[0] = same[0] * 2
    return same[0] - held[0] + same[0]


@rows
def branch_alone(x: Tensor, n: Tensor) -> tuple[Any, ...]:
    found = {"best": x[0], "at": -1}
    if x.sum() > 1:
        found["best"] = x[1] * 2
        if n > 2:
            found["at"] = 1
    return found["best"], found["at"]


class Meter:
    """An object that its own methods change."""

    def __init__(self) -> None:
        self.total, self.iterations = torch.zeros((), dtype=F64), 0

    def add(self, value: Tensor) -> None:
        if value > 0:
            self.total = self.total + value
        self.iterations += 1


@rows
def attributes_set_by_a_method(x: Tensor, n: Tensor) -> tuple[Any, ...]:
    meter = Meter()
    for i in range(n):
        meter.add(x[i].sum())
    return meter.total, meter.iterations


class Cell(nn.Module):
    """A recurrent module that keeps its state, as many do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 2, dtype=F64)
        self.hidden = torch.zeros(2, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.inner(torch.cat([x, self.hidden])))
        return self.hidden


@rows
def module_that_keeps_its_state(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    cell, out = Cell(), torch.zeros(2, dtype=F64)
    for i in range(n):
        out = out + cell(x[i])
    return out, cell.hidden


@rows
def new_key(x: Tensor, n: Tensor) -> Tensor:
    found = {}
    for i in range(n):
        found["last"] = x[i]
    return found.get("last", x.sum(0))


@rows
def item_of_a_copy(x: Tensor, n: Tensor) -> Tensor:
    """What another name sees of it is the list of before the first iteration."""
    pair = [x[0], x[1]]
    first = pair
    for _ in range(n):
        pair[0] = pair[0] + 1
        pair = [pair[1], pair[0]]
    return pair[0] * 2 + pair[1] + first[0] * 10


@rows
def through_the_operator(x: Tensor, n: Tensor) -> Tensor:
    pair = [x[0], x[1]]
    for i in range(n):
        operator.setitem(pair, 0, pair[0] + x[i])
    return pair[0]


@rows
def words(x: Tensor, n: Tensor) -> Tensor:
    kind = {"mode": "small"}
    for i in range(n):
        if x[i, 0] > 2:
            kind["mode"] = "large"
    return x.sum() if kind["mode"] == "small" else x.sum() * 2


@rows
def a_word_as_a_name(x: Tensor, n: Tensor) -> Tensor:
    mode = "small"
    for i in range(n):
        if x[i, 0] > 2:
            mode = "large"
    return x.sum() if mode == "small" else x.sum() * 2
