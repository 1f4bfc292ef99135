"""Random nets of many kinds in packs, on budgets from the least upwards: the bits of plain microbatches in float64."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import ResourceExhausted, Unimplemented
from tfnb.execution.pack_step import PackPlan
from tfnb.graph import mapped_files

ROWS, WIDTH, TIME, WORDS = 12, 6, 3, 9


class ResidualNet(nn.Module):
    """Layers in a list, as most models have them."""

    def __init__(self, make: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.h = nn.ModuleList([make() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = x + layer(x)
        return x


class RecurrentLayer(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


class LoopLayer(nn.Module):
    """A counted loop over one matrix, which the loop captures."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(i: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.tanh(h @ self.weight)

        return tfnb.while_loop(lambda i, h: i < 3, body, (torch.tensor(0), x))[1]  # type: ignore[no-any-return]


class BranchLayer(nn.Module):
    """A branch that is chosen by the weights of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        return tfnb.cond(self.one.bias.sum() > 0, lambda: torch.tanh(y), lambda: y * 0.5)  # type: ignore[no-any-return]


class TiedNet(nn.Module):
    """The first and the last layer share a matrix."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x @ self.enter.weight


class WordNet(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x


def blocks(make: Callable[[], list[nn.Module]]) -> Callable[[int], nn.Module]:
    """Numbered blocks of layers."""
    return lambda depth: nn.Sequential(*(nn.Sequential(*make()) for _ in range(depth)))


def convolutions(normed: bool) -> list[nn.Module]:
    return [nn.Conv1d(TIME, TIME, 3, padding=1), *([nn.BatchNorm1d(TIME)] if normed else []), nn.ReLU()]


def normed() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TIME), nn.Tanh()]


NETS: dict[str, Callable[[int], nn.Module]] = {
    "convolutions": blocks(lambda: convolutions(False)), "convolutions, batch norm": blocks(lambda: convolutions(True)),
    "RNN": lambda depth: ResidualNet(lambda: RecurrentLayer(nn.RNN), depth),
    "LSTM": lambda depth: ResidualNet(lambda: RecurrentLayer(nn.LSTM), depth),
    "attention": lambda depth: ResidualNet(Attention, depth), "tied": TiedNet, "batch norm": blocks(normed),
    "dropout": blocks(lambda: [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()]),
    "frozen": blocks(lambda: [nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]),
    "loop": lambda depth: ResidualNet(LoopLayer, depth), "branch": lambda depth: ResidualNet(BranchLayer, depth),
    "embedding": WordNet, "two optimizers": blocks(lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh()]),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: tfnb.train.SGD(0.1), "momentum": lambda: tfnb.train.SGD(0.1, momentum=0.9),
    "Adam": lambda: tfnb.train.Adam(0.01), "AdamW": lambda: tfnb.train.AdamW(0.01, weight_decay=0.1),
}  # fmt: skip


REFUSED = {("embedding", "SGD")}  # a gradient of rows: see `test_a_gradient_of_rows_is_refused_with_a_remedy`
# `stack` makes one product of those of several time steps, in packs of others; plain microbatches add the entries of an
# embedding's gradient in another order
ROUNDED = frozenset({"RNN", "LSTM", "embedding"})


@dataclass
class RandomNet:
    """A net, recorded, with its data: all of it follows from the kind and a number."""

    kind: str
    number: int

    def __post_init__(self) -> None:
        chosen = random.Random(f"{self.kind} {self.number}")
        self.microbatches = chosen.choice([2, 3, 4, 5, 12] if "norm" not in self.kind else [2, 3, 5])
        self.steps = 2
        torch.manual_seed(self.number)
        net = NETS[self.kind](chosen.randint(1, 4)).double()
        x = torch.randint(0, WORDS, (ROWS, TIME)) if self.kind == "embedding" else torch.randn(ROWS, TIME, WIDTH)
        self.data = x if self.kind == "embedding" else x.double(), torch.randn(ROWS, TIME, WIDTH).double()
        optimizers = chosen.sample([name for name in OPTIMIZERS if (self.kind, name) not in REFUSED], 2)
        with tfnb.record() as self.graph:
            px, py = (tfnb.placeholder(rows[:4]) for rows in self.data)
            self.keys = px, py
            self.loss = F.mse_loss(net(px), py)
            parameters = [p for p in net.parameters() if p.requires_grad]
            parts = [parameters[::2], parameters[1::2]] if self.kind == "two optimizers" else [parameters]
            self.train = [
                OPTIMIZERS[name]().minimize(self.loss, part) for name, part in zip(optimizers, parts, strict=False)
            ]
        self.graph.seed = 5
        self.chosen = chosen

    def trained(self, budget: int | None, microbatches: int | str) -> tuple[list[torch.Tensor], tfnb.Session]:
        """Losses and values after some steps."""
        session = tfnb.Session(self.graph, compile="off", memory_budget=budget)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = session.make_callable([self.loss, self.train], self.keys, microbatches=microbatches)
            losses = [call(*self.data)[0] for _ in range(self.steps)]
        return [*losses, *(variable.value().clone() for variable in self.graph.variables)], session


def least_of(kind: str, number: int, microbatches: int | str) -> int:
    """The smallest budget that the error of one byte names, which works, while one byte less is refused."""
    made = RandomNet(kind, number)
    before = [variable.value().clone() for variable in made.graph.variables]
    with pytest.raises(ResourceExhausted, match="smallest feasible budget") as raised:
        made.trained(1, microbatches)
    (text,) = re.findall(r"feasible budget is ([\d,]+)", str(raised.value))
    least = int(text.replace(",", ""))
    with pytest.raises(ResourceExhausted, match=f"feasible budget is {text} bytes"):
        made.trained(least - 1, microbatches)
    assert all(map(torch.equal, before, [variable.value() for variable in made.graph.variables]))
    return least


def check(kind: str, number: int, folder: Path | None) -> None:
    """Plain microbatches, then packs on the least budget, on random ones above it, and on one of everything."""
    plain = RandomNet(kind, number)
    want, _ = plain.trained(None, plain.microbatches)
    least = least_of(kind, number, plain.microbatches)
    whole = 4 * sum(value.nbytes for value in want)
    for budget in (least, least + plain.chosen.randint(1, least), least + whole):
        with tfnb.mapped_memory(folder) if folder else nullcontext():
            made = RandomNet(kind, number)
        got, session = made.trained(budget, made.microbatches)
        plan = session.plan
        assert isinstance(plan, PackPlan) and plan.last is not None
        assert plan.last.most <= plan.schedule.most <= budget, (kind, number, budget)
        assert plan.last.loaded + plan.last.stored == plan.schedule.moved, (kind, number, budget)
        if kind in ROUNDED:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)
        else:
            assert all(map(torch.equal, want, got)), (kind, number, budget, made.microbatches)


@pytest.fixture(autouse=True)
def small_tensors_are_mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mapped_files, "LEAST", 64)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", NETS)
def test_a_net_of_each_kind_trains_in_packs_as_without(kind: str) -> None:
    check(kind, 0, None)


def test_a_gradient_of_rows_is_refused_with_a_remedy() -> None:
    words = nn.Embedding(WORDS, WIDTH)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.zeros(4, dtype=torch.int64))
        train = tfnb.train.SGD(0.1).minimize(words(x).square().mean())
    before = words.weight.detach().clone()
    call = tfnb.Session(graph, memory_budget="1GB").make_callable(train, [x], microbatches=2)
    with pytest.raises(Unimplemented, match="momentum, or Adam, takes dense ones, or leave out memory_budget"):
        call(torch.tensor([0, 1, 1, 2]))
    assert torch.equal(words.weight, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("kind", NETS)
def test_random_nets_train_in_packs_as_without(kind: str, number: int, is_mapped: bool, tmp_path: Path) -> None:
    check(kind, number, tmp_path if is_mapped else None)
