"""What a cell does to torch's random state: noted with its line, and undone at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.random import manual_seed

import tfnb


def _put_back() -> None:
    state = torch.get_rng_state()
    torch.randn(2)
    torch.random.set_rng_state(state)


def _forked() -> None:
    with torch.random.fork_rng():
        torch.random.manual_seed(1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, g: torch.rand(x.shape, generator=g), lambda x, g: torch.randn(x.shape[0], 3, generator=g),
        lambda x, g: torch.randint(0, 5, x.shape, generator=g), lambda x, g: x[torch.randperm(x.shape[0], generator=g)],
    ],
    ids=["rand", "randn", "randint", "randperm"],
)  # fmt: skip
def test_sizes_vary_beside_a_generator(draw: Callable[[Any, torch.Generator], Any]) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.arange(12.0).view(4, 3))
        y = draw(x, torch.Generator().manual_seed(3))
    found = [tfnb.run(y, {x: torch.arange(90.0).view(30, 3)}) for _ in range(2)]
    assert found[0].shape == (30, 3) and not torch.equal(*found)


@pytest.mark.parametrize(("change", "name"), [
    (lambda: torch.manual_seed(3), "manual_seed"), (lambda: torch.random.manual_seed(3), "manual_seed"),
    (lambda: manual_seed(3), "manual_seed"), (torch.seed, "seed"), (torch.random.seed, "seed"),
    (_put_back, "set_rng_state"), (_forked, "manual_seed"), 
    (lambda: torch.randn(2, generator=torch.Generator().manual_seed(3)), "generator="),
], ids=["torch", "random", "imported", "seed", "random.seed", "state", "fork", "generator"])  # fmt: skip
def test_a_change_of_the_random_state_is_noted_and_undone(change: Callable[[], Any], name: str) -> None:
    before = torch.get_rng_state()
    with tfnb.record() as graph:
        change()
    assert torch.equal(torch.get_rng_state(), before)
    assert any(
        "test_streams.py line" in note and f"{name} does not reach recorded draws" in note for note in graph.notes
    )


def test_a_seed_in_a_cell_is_that_of_a_module_made_there() -> None:
    torch.manual_seed(5)
    want = nn.Linear(3, 2)
    with tfnb.record():
        torch.random.manual_seed(5)
        got = nn.Linear(3, 2)
    assert torch.equal(got.weight, want.weight)


def test_reading_the_state_changes_nothing() -> None:
    with tfnb.record() as graph:
        assert torch.equal(torch.get_rng_state(), torch.random.get_rng_state())
        torch.initial_seed()
    assert graph.notes == ()


def test_outside_of_a_recording_the_functions_are_torchs() -> None:
    with tfnb.record():
        pass
    torch.manual_seed(1)
    first = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), first)
