"""A Parameter without gradient in a run stays as it is, and its optimizer's state: as in eager torch, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.passes.microbatches import divide

Loss = Callable[[nn.ModuleList, torch.Tensor, torch.Tensor], torch.Tensor]
STEPS = 8


def either(m: nn.ModuleList, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if x[0, 0] > 0:
        y = m[0](x)
        y = y + y.sin()
    else:
        y = m[1](x)
    return y.square().mean()


def one_of_three(m: nn.ModuleList, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if k == 0:
        y = m[0](x)
    elif k == 1:
        y = m[1](x)
    else:
        y = m[2](x)
    return y.square().mean()


def nested(m: nn.ModuleList, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    y = m[0](x)
    if k > 0:
        y = y + m[1](x)
        if k > 1:
            y = y * m[2](x)
    return y.square().mean()


def early(m: nn.ModuleList, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    y = m[0](x)
    if k == 0:
        return y.square().mean()
    y = y + m[1](x)
    if k == 1:
        return y.square().mean()
    return (y + m[2](x)).square().mean()


def shared(m: nn.ModuleList, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The second layer has a gradient in every run, the third in some."""
    y = m[0](x) + m[1](x)
    if k > 0:
        y = y + m[1](x) * m[2](x)
    return y.square().mean()


def experts(m: nn.ModuleList, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape[0], 1, dtype=x.dtype)
    chosen = (x[:, 0] > 0).long() + k.clamp(max=1)
    for i in range(3):
        rows = chosen == i
        if rows.any():
            y[rows] = m[i](x[rows])
    return y.square().mean()


def turns(m: nn.ModuleList, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A loop that a run may not enter."""
    y = m[0](x)
    for _ in range(k):
        y = y + m[1](x)
    return (y + 0 * m[2](x)).square().mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.05, weight_decay=0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.5),
}
CASES = [
    *((loss, "AdamW") for loss in (either, one_of_three, nested, early, shared, experts, turns)),
    (either, "SGD"), (nested, "RMSprop"),
]  # fmt: skip


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(1 + step % 5, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (), generator=generator)


def taken(loss: Loss, m: nn.ModuleList, optimizer: torch.optim.Optimizer, *given: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss(m, *given).backward()
    return optimizer.step()


def assert_same(here: Any, there: Any) -> None:
    torch.testing.assert_close(dict(here[0].state_dict()), dict(there[0].state_dict()), rtol=1e-9, atol=1e-11)
    mine, other = (each[1].state_dict()["state"] for each in (here, there))
    filled = {i: {k: v for k, v in state.items() if v is not None} for i, state in other.items()}
    for i, state in mine.items():
        ours = {k: torch.as_tensor(v).double() for k, v in state.items()}
        zeros = {k: torch.zeros_like(v) for k, v in ours.items()}  # torch makes them at the first step
        theirs = {k: torch.as_tensor(v).double() for k, v in filled.get(i, {}).items()}
        torch.testing.assert_close(ours, theirs or zeros, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("loss", "kind"), CASES, ids=[f"{loss.__name__}-{kind}" for loss, kind in CASES])
def test_parameters_of_a_branch_not_taken_stay_as_they_are(loss: Loss, kind: str) -> None:
    m = nn.ModuleList(nn.Linear(4, 1) for _ in range(3)).double()
    twin = copy.deepcopy(m)
    optimizer, eager = (OPTIMIZERS[kind](each.parameters()) for each in (m, twin))
    with tfnb.record():
        x, k = (tfnb.placeholder(each) for each in (data(3)[0], torch.tensor(1)))
        step = taken(tfnb.autograph(loss), m, optimizer, x, k)
    for i in range(STEPS):
        tfnb.run(step, dict(zip((x, k), data(i), strict=True)))
        taken(loss, twin, eager, *data(i))
        assert_same((m, optimizer), (twin, eager))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_microbatches_have_the_gradients_that_any_of_them_has(kind: str) -> None:
    """As accumulated by hand: in some batches all microbatches take one branch, in others only the last one does."""
    m = nn.ModuleList(nn.Linear(4, 1) for _ in range(3)).double()
    twin = copy.deepcopy(m)
    optimizer, eager = (OPTIMIZERS[kind](each.parameters()) for each in (m, twin))
    x_all = batches_of_branches()
    with tfnb.record():
        x, k = (tfnb.placeholder(each) for each in (x_all[0], torch.tensor(1)))
        step = taken(tfnb.autograph(either), m, optimizer, x, k)
    call = tfnb.session.default_session(step.graph).make_callable(step, (x, k), microbatches=3)
    for rows in x_all:
        call(rows, torch.tensor(1))
        accumulated(either, twin, eager, rows, torch.tensor(1))
        assert_same((m, optimizer), (twin, eager))


def batches_of_branches() -> list[torch.Tensor]:
    """Batches of seven rows, whose three parts take these branches of `either`."""
    torch.manual_seed(5)
    found = []
    for signs in ((1, 1, 1), (1, 1, 1), (-1, -1, -1), (1, 1, -1), (1, 1, 1), (-1, 1, -1), (-1, -1, -1)):
        rows = torch.randn(7, 4, dtype=torch.float64)
        for sign, (start, _) in zip(signs, divide(7, 3), strict=True):
            rows[start, 0] = sign * rows[start, 0].abs()
        found.append(rows)
    return found


def accumulated(
    loss: Loss, m: nn.ModuleList, optimizer: torch.optim.Optimizer, rows: torch.Tensor, k: torch.Tensor
) -> None:  # fmt: skip
    """A step over three microbatches, by hand."""
    optimizer.zero_grad()
    for start, stop in divide(len(rows), 3):
        (loss(m, rows[start:stop], k) * ((stop - start) / len(rows))).backward()
    optimizer.step()


def test_gradients_of_two_passes_are_there_where_one_is() -> None:
    m = nn.ModuleList(nn.Linear(4, 1) for _ in range(3)).double()
    twin = copy.deepcopy(m)
    optimizer, eager = (OPTIMIZERS["AdamW"](each.parameters()) for each in (m, twin))

    def both(way: Callable[[Any], Any], m: Any, optimizer: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
        optimizer.zero_grad()
        way(either)(m, x, k).backward()
        way(one_of_three)(m, x, k).backward()
        return optimizer.step()

    with tfnb.record():
        x, k = (tfnb.placeholder(each) for each in (data(3)[0], torch.tensor(1)))
        step = both(tfnb.autograph, m, optimizer, x, k)
    for i in range(STEPS):
        tfnb.run(step, dict(zip((x, k), data(i), strict=True)))
        both(lambda loss: loss, twin, eager, *data(i))
        assert_same((m, optimizer), (twin, eager))


def test_a_branch_inside_of_a_loop_that_leaves_a_parameter_out_is_noted() -> None:
    m = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).double()

    @tfnb.autograph
    def looped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        for _ in range(k):
            if x.sum() > 0:
                x = m[0](x)
                x = x.sin()
            else:
                x = x + 1
        return x.square().mean()

    with pytest.warns(UserWarning, match="leaves a Parameter out"), tfnb.record() as graph:
        x, k = tfnb.placeholder(data(3)[0]), tfnb.placeholder(torch.tensor(2))
        looped(x, k).backward()
    assert any("leaves a Parameter out" in note and "momentum" in note for note in graph.notes)


def test_where_every_run_has_the_gradient_the_update_stands_in_no_branch() -> None:
    m = nn.ModuleList(nn.Linear(4, 1) for _ in range(3)).double()
    optimizer = OPTIMIZERS["AdamW"](m.parameters())
    with tfnb.record() as graph:
        x, k = tfnb.placeholder(data(3)[0]), tfnb.placeholder(torch.tensor(1))
        step = taken(tfnb.autograph(shared), m, optimizer, x, k)
    assert step.graph is graph
    updates = [node for node in graph.nodes if node.op == "tfnb.adam.default"]
    assert len(updates) == 4  # of the first two layers; those of the third stand in branches


def metric(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h, seen = torch.zeros(3), torch.zeros(())
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t] * b)
        seen = seen + (x[t] * w).sum()
    return h.sum()


def teacher(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for t in range(x.shape[0]):
        with torch.no_grad():
            target = x[t] * w
        total = total + (x[t] * b - target).pow(2).sum()
    return total


def halting(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total, i = torch.zeros(3), 0
    while i < x.shape[0] and (x[i] * w).sum() < 3:
        total = total + x[i] * b
        i += 1
    return total.sum()


def gate(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(3)
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t] * b) * (x[t] * w > 0)
    return h.sum()


def detached(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:  # noqa: SIM108 - a statement is staged
        h = (x * b - (x * w).detach()).pow(2)
    else:
        h = x * b
    return h.sum()


def decides(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        if (x * w).sum() > 0:  # noqa: SIM108
            h = x * b
        else:
            h = x * b * 2
    else:
        h = x * b * 3
    return h.sum()


def carried(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The weight reaches the loss by way of another value that the loop carries."""
    h, other = torch.zeros(3), torch.zeros(3)
    for t in range(x.shape[0]):
        h = torch.tanh(h * b + other)
        other = x[t] * w
    return h.sum()


def rows(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out, h = [], torch.zeros(3)
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t] * b)
        out.append(x[t] * w)
    return h.sum() + 0 * torch.stack(out).detach().sum()


@pytest.mark.parametrize("loss_of", [metric, teacher, halting, gate, detached, decides, carried, rows])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.filterwarnings("ignore:.*a branch decides whether there is a .grad")
def test_a_loop_or_branch_that_passes_a_parameter_no_gradient_leaves_it(loss_of: Any, kind: Any) -> None:
    data = torch.linspace(-1, 1.3, 15).view(5, 3)
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    ends, losses, absent = [], [], []
    for is_recorded in (False, True):
        w, b = nn.Parameter(torch.tensor([1.5, -0.4, 2.2])), nn.Parameter(torch.ones(3))
        optimizer = kind([w, b], lr=0.1, weight_decay=0.5, **settings)
        found = []
        if is_recorded:
            with tfnb.record():
                x = tfnb.placeholder(data)
                loss = tfnb.autograph(loss_of)(x, w, b)
                absent.append(torch.autograd.grad(loss, w, allow_unused=True, retain_graph=True)[0] is None)
                loss.backward()
                absent.append(w.grad is None)
                step = optimizer.step()
            found = [tfnb.run([step, loss], {x: data * scale})[1] for scale in (1.0, 2.0, 0.5)]
        else:
            for scale in (1.0, 2.0, 0.5):
                optimizer.zero_grad()
                loss = loss_of(data * scale, w, b)
                loss.backward()
                optimizer.step()
                absent = [w.grad is None] * 2
                found.append(loss.detach())
            absent = [*absent]
        ends.append((w.detach(), b.detach()))
        losses.append(torch.stack(found))
    assert absent[:2] == absent[2:]
    torch.testing.assert_close(ends[1], ends[0])
    torch.testing.assert_close(losses[1], losses[0])


FLAT = {
    "round": torch.round, "sign": torch.sign, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc,
    "pow": lambda w: w**0, "bernoulli": lambda w: torch.bernoulli(w.sigmoid()),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAT)
def test_ops_that_are_flat_give_zeros_and_no_absent_gradient(name: str) -> None:
    w = nn.Parameter(torch.tensor([1.5, -0.4, 2.2]))
    optimizer = torch.optim.AdamW([w], lr=0.1, weight_decay=0.5)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(3,))
        (FLAT[name](w) * x).sum().backward()
        step = optimizer.step()
    tfnb.run(step, {x: torch.ones(3)})
    torch.testing.assert_close(w.detach(), torch.tensor([1.5, -0.4, 2.2]) * 0.95)


def test_three_branches_inside_of_each_other_leave_a_parameter() -> None:
    def loss_of(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h = x * b
        if x[0] > 0:
            if x[1] > 0:
                if x[2] > 0:  # noqa: SIM108
                    h = h * a
                else:
                    h = h + 1
                h = h * 2
            h = h - b
        return h.square().sum()

    ends = []
    data = [torch.tensor(signs) for signs in ([1.0, 2, 3], [1, 2, -3], [1, -2, 3], [-1, 2, 3], [3, 1, 2])]
    for is_recorded in (False, True):
        a, b = nn.Parameter(torch.full((3,), 1.5)), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([a, b], lr=0.001, momentum=0.9, weight_decay=0.5)
        if is_recorded:
            with tfnb.record():
                x = tfnb.placeholder(data[0], shape=(3,))
                tfnb.autograph(loss_of)(x, a, b).backward()
                step = optimizer.step()
        for fed in data:
            if is_recorded:
                tfnb.run(step, {x: fed})
            else:
                optimizer.zero_grad()
                loss_of(fed, a, b).backward()
                optimizer.step()
        ends.append((a.detach(), b.detach()))
    torch.testing.assert_close(ends[1], ends[0])
