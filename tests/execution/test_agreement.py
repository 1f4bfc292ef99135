"""What counts as the same step: compiled code may round in other places, and may not be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.agreement import compared


class Attends(nn.Module):
    """The gradient of the bias of the keys is zero but for rounding, and Adam takes a whole step along it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Halves(nn.Module):
    """Its second layer computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 5).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.mean(1)).relu().to(torch.bfloat16)).float()


def step(model: nn.Module) -> tuple[Program, list[Any]]:
    """A step of Adam, lowered, and arguments of a run."""
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(torch.randn(8, 6, 16)), tfnb.placeholder(torch.randint(5, (8,)))
        loss = F.cross_entropy(model(x), y)
        fetches = [loss, tfnb.train.Adam(0.01).minimize(loss)]
    feeds = [torch.randn(8, 6, 16), torch.randint(5, (8,))]
    session = tfnb.Session(graph, compile="off")
    session.run(fetches, dict(zip([x, y], feeds, strict=True)))
    (prepared,) = session._prepared.values()
    program = prepared.code.program.undonated()
    return program, [*feeds, *(variable.storage.clone() for variable in program.variables), 0]


def elsewhere(program: Program, dtype: torch.dtype) -> Callable[..., Sequence[Any]]:
    """The program's code, which rounds its feed: the sums behind it are others in their last bits."""
    by = torch.randn(8, 6, 16).sign() * torch.finfo(dtype).eps / 2

    def forward(x: torch.Tensor, *rest: Any) -> Sequence[Any]:
        return program.forward((x * (1 + by)).to(x.dtype), *rest)

    return forward


@pytest.mark.parametrize(("model", "dtype"), [(Attends, torch.float32), (Halves, torch.bfloat16)])
def test_rounding_agrees_and_a_wrong_value_does_not(model: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    program, args = step(model())
    right = elsewhere(program, dtype)
    found = compared(program, program.forward, right, [args])
    assert found["agrees"], found

    names = [variable.name for variable in program.variables]
    wanted = right(*args)
    for place, value in enumerate(wanted):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() != 2:
            continue

        def wrong(*given: Any, place: int = place) -> Sequence[Any]:
            outs = list(right(*given))
            outs[place] = outs[place] * 1.5 + 0.1
            return outs

        found = compared(program, program.forward, wrong, [args])
        assert not found["agrees"] and "differs" in found["status"], (place, names)


def test_a_plain_step_has_no_such_room() -> None:
    torch.manual_seed(0)
    program, args = step(Attends())

    def wrong(*given: Any) -> Sequence[Any]:
        loss, *rest = program.forward(*given)
        return [loss * 1.01, *rest]

    assert not compared(program, program.forward, wrong, [args])["agrees"]
