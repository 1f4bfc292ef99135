"""Steps of optimizers in branches, and gradients taken below them: those of plain PyTorch, in all runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import Unsupported

Program = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor], Any]


def then_again(net: nn.Module, optimizer: Any, x: torch.Tensor, limit: torch.Tensor) -> Any:
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if loss < limit:
        optimizer.step()
    later = (net(x) - 1).square().mean()
    optimizer.zero_grad()
    later.backward()
    return later, optimizer.step()


def gradients_add_up(net: nn.Module, optimizer: Any, x: torch.Tensor, limit: torch.Tensor) -> Any:
    loss = net(x).square().mean()
    loss.backward()
    if loss < limit:
        optimizer.step()
    later = (net(x) - 1).square().mean()
    later.backward()  # onto the gradients of before
    return later, optimizer.step()


def either_way(net: nn.Module, optimizer: Any, x: torch.Tensor, limit: torch.Tensor) -> Any:
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if loss < limit:
        optimizer.step()
    else:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.5)
    optimizer.zero_grad()
    later = net(x).exp().mean()
    later.backward()
    return later, optimizer.step()


def in_a_loop(net: nn.Module, optimizer: Any, x: torch.Tensor, limit: torch.Tensor) -> Any:
    for row in x:
        loss = net(row).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if loss < limit:
            optimizer.step()
    later = (net(x) - 1).square().mean()
    optimizer.zero_grad()
    later.backward()
    return later, optimizer.step()


def nested(net: nn.Module, optimizer: Any, x: torch.Tensor, limit: torch.Tensor) -> Any:
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if loss < limit:  # noqa: SIM102  two branches
        if x.sum() > 0:
            optimizer.step()
    later = (net(x) - 1).square().mean()
    optimizer.zero_grad()
    later.backward()
    return later, optimizer.step()


def nested_alone(net: nn.Module, optimizer: Any, x: torch.Tensor, limit: torch.Tensor) -> Any:
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if loss < limit:  # noqa: SIM102  two branches
        if x.sum() > 0:
            optimizer.step()
    return loss, net[0].weight


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, 0.05),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.05),
}


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return net, OPTIMIZERS[kind](net.parameters())


@pytest.mark.filterwarnings("ignore:size B became the constant")  # a loop with a backward pass is unrolled
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("program", [then_again, gradients_add_up, either_way, nested, nested_alone, in_a_loop])
def test_what_comes_below_has_the_gradients_of_torch(program: Program, kind: str) -> None:
    torch.manual_seed(1)
    lengths = (4, 4, 4, 4) if program is in_a_loop else (4, 4, 6, 3)
    batches = [torch.randn(rows, 3, dtype=torch.float64) for rows in lengths]
    limits = [torch.tensor(limit, dtype=torch.float64) for limit in (0.0, 100.0, 0.05, 100.0)]
    plain, optimizer = made(kind)
    net, recorded = made(kind)
    with tfnb.record():
        x = tfnb.placeholder(batches[0])
        limit = tfnb.placeholder(limits[0])
        fetches = list(tfnb.autograph(program)(net, recorded, x, limit))
    for rows, most in zip(batches, limits, strict=True):
        optimizer.zero_grad()
        want, _ = program(plain, optimizer, rows, most)
        got, _ = tfnb.run(fetches, {x: rows, limit: most})
        torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-12)
        for a, b in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_gradient_of_what_a_branch_computes_behind_its_step_is_refused() -> None:
    net, optimizer = made("sgd")
    with (
        pytest.raises(Unsupported, match=r"behind the step of an optimizer inside of it.*compute it below"),
        tfnb.record(),
    ):
        x, limit = tfnb.placeholder(torch.ones(4, 3, dtype=torch.float64)), tfnb.placeholder(torch.tensor(100.0))

        def program(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            found = loss * 0
            if loss < limit:
                optimizer.step()
                found = net(x).sum()
            return found

        torch.autograd.grad(tfnb.autograph(program)(x, limit), list(net.parameters()))
