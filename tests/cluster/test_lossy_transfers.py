"""Gradients and values between tasks that cross in 16 bits: `tfnb.connect(lossy=...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import Client
from torch import nn

import tfnb
from tests.cluster.conftest import WORKERS, workers
from tests.cluster.test_stage_servers import moved
from tfnb.cluster.driver import Cluster
from tfnb.errors import NonFinite, Unimplemented

ROWS, RATE, STEPS = 12, 0.5, 3
Lossy = Mapping[str, Any]


def in_levels(tensor: torch.Tensor) -> torch.Tensor:
    step = tensor.abs().max() / 126
    return (tensor / step).round() * step


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16": lambda tensor: tensor.bfloat16().to(tensor.dtype),
    "int8": in_levels,
}


@pytest.fixture
def lossy(dask: Client) -> Iterator[Callable[..., Cluster]]:
    """``lossy(formats)``: a connection with two tasks."""
    made: list[Cluster] = []

    def connected(formats: Lossy, ps: int = 2) -> Cluster:
        workers(dask, WORKERS)
        made.append(tfnb.connect(dask, ps=ps, timeout=180, lossy=formats))
        return made[-1]

    yield connected
    for cluster in made:
        cluster.close()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 5, generator=gen), torch.randint(0, 3, (ROWS,), generator=gen)


def by_hand(tasks: int, format: str) -> list[torch.Tensor]:
    """SGD in plain torch, whose gradients are means over tasks of what these would send."""
    net, (x, y) = model(), data()
    for _ in range(STEPS):
        parts = []
        for task in range(tasks):
            rows = slice(task * ROWS // tasks, (task + 1) * ROWS // tasks)
            found = torch.autograd.grad(F.cross_entropy(net(x[rows]), y[rows]), [*net.parameters()])
            parts.append([ROUNDED[format](each) for each in found])
        with torch.no_grad():
            for parameter, *grads in zip(net.parameters(), *parts, strict=True):
                parameter -= RATE * torch.stack(grads).mean(0)
    return [*net.state_dict().values()]


def fitted(name: str, **options: Any) -> list[torch.Tensor]:
    net, (x, y) = model(), data()
    with tfnb.record(name):
        fed, label = tfnb.placeholder(x, name="x"), tfnb.placeholder(y, name="y")
        train = tfnb.train.SGD(RATE).minimize(F.cross_entropy(net(fed), label))
    tfnb.fit(train, {fed: x, label: y}, batch_size=ROWS, epochs=STEPS, shuffle=False, **options)
    return [tensor.detach().clone() for tensor in net.state_dict().values()]


@pytest.mark.parametrize("format", ROUNDED)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gradients_are_rounded_once_and_averaged_in_full(lossy: Callable[..., Cluster], mode: str, format: str) -> None:
    cluster = lossy({"gradients": format}, 2 if mode == "sync" else 3)
    assert f"gradients as {format}" in str(cluster.status())
    found = fitted(f"rounded_{mode}_{format}", mode=mode)
    torch.testing.assert_close(found, by_hand(len(cluster.tasks), format), rtol=1e-6, atol=1e-7)
    assert not all(torch.equal(mine, exact) for mine, exact in zip(found, by_hand_exactly(), strict=True))


def by_hand_exactly() -> list[torch.Tensor]:
    net, (x, y) = model(), data()
    for _ in range(STEPS):
        found = torch.autograd.grad(F.cross_entropy(net(x), y), [*net.parameters()])
        with torch.no_grad():
            for parameter, grad in zip(net.parameters(), found, strict=True):
                parameter -= RATE * grad
    return [*net.state_dict().values()]


def over_two_tasks(name: str) -> tuple[Any, Any, torch.Tensor]:
    """A product of a large value of the second task, and numbers that stay as they are: sizes, integers."""
    values = torch.randn(300, 200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with tfnb.record(name):
        x = tfnb.placeholder(values, name="x")
        with tfnb.device("task:1"):
            there, which = x.sin(), x.argmax(1)
        with tfnb.device("task:0"):
            out = (there.cos() + which[:, None]).mean(1)
    return out, x, values


@pytest.mark.parametrize(("format", "size"), [("bfloat16", 2), ("int8", 1)])
def test_values_between_tasks_are_fewer_bytes_and_integers_are_exact(
    lossy: Callable[..., Cluster], dask: Client, format: str, size: int
) -> None:
    sent = []
    for number, formats in enumerate(({}, {"edges": format})):
        cluster = lossy(formats)
        out, x, values = over_two_tasks(f"edges_{format}_{number}")
        tfnb.run(out, {x: values})
        before = moved(dask)
        found = tfnb.run(out, {x: values})
        sent.append(moved(dask) - before)
        rounded = values.sin() if not formats else ROUNDED[format](values.sin())
        expected = (rounded.cos() + values.argmax(1)[:, None]).mean(1)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
        cluster.close()
    saved = 300 * 200 * (8 - size)  # at each end, once sent and once got
    assert (sent[0] - sent[1]) == pytest.approx(2 * saved, abs=2000)


def test_a_loop_whose_state_crosses_has_rounded_values_in_each_iteration(lossy: Callable[..., Cluster]) -> None:
    lossy({"edges": "bfloat16"})
    first = torch.tensor([1 / 3, 2 / 3])
    with tfnb.record("looped"):
        x = tfnb.placeholder(first, name="x")

        def body(i: Any, value: Any) -> Any:
            with tfnb.device("task:0"):
                half = value / 3
            with tfnb.device("task:1"):
                return i + 1, half + 1

        _, out = tfnb.while_loop(lambda i, value: i < 4, body, (torch.tensor(0), x))
    expected, exact = first, first
    for _ in range(4):
        expected = (expected / 3).bfloat16().float() + 1
        exact = exact / 3 + 1
    found = tfnb.run(out, {x: first})
    assert not torch.equal(found, exact)
    assert (found - exact).abs().max() <= 2**-7 and (found - expected).abs().max() <= 2**-7


def test_sums_of_exact_steps_are_not_rounded(lossy: Callable[..., Cluster]) -> None:
    """Of a loss that is no mean over rows: with summands rounded it would be far from one machine's."""
    lossy({"gradients": "bfloat16", "edges": "bfloat16"})
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = tfnb.Variable(torch.ones(3, dtype=torch.float64), name="w")
    with tfnb.record("exact_sums"):
        x = tfnb.placeholder(rows, name="x")
        train = tfnb.train.SGD(0.1).minimize((x @ weight).sin().mean().exp())
    tfnb.fit(train, {x: rows}, batch_size=8, epochs=2, exact=True)
    expected = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        (grad,) = torch.autograd.grad((rows @ expected).sin().mean().exp(), expected)
        expected = (expected - 0.1 * grad).detach().requires_grad_()
    torch.testing.assert_close(weight.value(), expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_gradient_that_its_format_cannot_hold_ends_the_step_and_nothing_is_written(
    lossy: Callable[..., Cluster], mode: str
) -> None:
    lossy({"gradients": "float16"})
    weight = tfnb.Variable(torch.ones(2), name="w")
    with tfnb.record(f"beyond_{mode}"):
        x = tfnb.placeholder(torch.ones(4, 2), name="x")
        train = tfnb.train.SGD(0.1).minimize((x * weight).sum(1).mean())
    with pytest.raises(NonFinite, match=r"gradient of w.* holds 1e\+05, which float16 cannot hold"):
        tfnb.fit(train, {x: torch.full((4, 2), 1e5)}, batch_size=4, mode=mode)
    assert torch.equal(weight.value(), torch.ones(2))
    tfnb.fit(train, {x: torch.ones(4, 2)}, batch_size=4, mode=mode)
    torch.testing.assert_close(weight.value(), torch.full((2,), 0.9))


def test_ranks_send_no_gradients_to_servers(lossy: Callable[..., Cluster]) -> None:
    lossy({"gradients": "bfloat16"})
    with pytest.raises(Unimplemented, match=r"mode='allreduce' sends no gradients.*lossy="):
        fitted("ranks", mode="allreduce")


def test_new_values_of_variables_and_values_that_other_tasks_read_are_not_rounded(
    lossy: Callable[..., Cluster],
) -> None:
    """What a branch makes of a gradient is a new value; a Variable of one task is used by two; two are assigned."""
    lossy({"gradients": "bfloat16", "edges": "bfloat16"})
    w, v = tfnb.Variable(torch.full((3,), 1.001), name="w"), tfnb.Variable(torch.full((3, 3), 1.001), name="v")
    with tfnb.record("branches"):
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        (grad,) = tfnb.gradients((x @ w).mean(), [w])
        new = tfnb.cond(grad.norm() > 100, lambda: w - grad, lambda: w - 1e-3 * grad)
        step = w.assign(new)
    for _ in range(5):
        tfnb.run(step, {x: torch.ones(4, 3)})
    torch.testing.assert_close(w.value(), torch.full((3,), 1.001 - 5e-3), rtol=1e-5, atol=0)
    big, small = tfnb.Variable(torch.zeros(100), name="big"), tfnb.Variable(torch.zeros(3), name="small")
    with tfnb.record("read_twice"):
        y = tfnb.placeholder(torch.ones(100), name="y", shape=(100,))
        with tfnb.device("task:0"):
            first, flat = (y[:3] @ v) * 0, v.view(9)
            assigned = y * 1.001
        with tfnb.device("task:1"):
            found, flattened = v.sum() + first.sum(), flat.sum()
            other = y[:3] * 1.001
        both = tfnb.group(big.assign(assigned), small.assign(other))
    found, flattened, _ = tfnb.run([found, flattened, both], {y: torch.ones(100)})
    torch.testing.assert_close(torch.stack([found, flattened]), torch.full((2,), 9 * 1.001))
    assert torch.equal(big.value()[:3], small.value()) and small.value()[0] == torch.tensor(1.001)
