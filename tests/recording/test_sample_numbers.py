"""Numbers taken of recorded tensors below their block are the sample's, and a line that takes one is told once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfnb


def trained() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        loss = model(x).square().mean()
        train = tfnb.train.SGD(0.1).minimize(loss)
    return x, loss, train


def said(program: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    return caught


@pytest.mark.parametrize("take", [
    lambda t: t.item(), float, int, lambda t: t.tolist(), lambda t: t.numpy(), np.asarray, lambda t: f"{t:.3f}",
    lambda t: t.detach().item(), lambda t: t.data.tolist(), lambda t: t.cpu().numpy(),
    lambda t: t.detach().cpu().numpy(),
], ids=["item", "float", "int", "tolist", "numpy", "asarray", "format", "detach", "data", "cpu", "all"])  # fmt: skip
def test_a_loop_that_prints_the_samples_number_is_told_once(take: Callable[[Any], Any]) -> None:
    x, loss, train = trained()

    def loop() -> None:
        for _ in range(3):
            tfnb.run(train, {x: torch.ones(4, 3)})
            take(loss)

    (only,) = said(loop)
    assert only.filename == __file__
    assert all(
        text in str(only.message) for text in ("test_sample_numbers.py line", "of loss", "tfnb.run([step, loss]")
    )


def test_each_line_and_each_tensor_is_told() -> None:
    _, loss, _ = trained()
    _, other, _ = trained()

    def program() -> None:
        for each in (loss, other):
            each.item()
        loss.item()

    assert len(said(program)) == 3


def test_what_shows_that_it_is_the_sample_is_not_told() -> None:
    x, loss, train = trained()

    def program() -> None:
        repr(loss), str(x), f"{x}", loss.sample.item(), x.sample.numpy(), loss.graph.text(), repr(loss.graph)
        tfnb.run([train, loss], {x: x.sample})[1].item()
        tfnb.run(loss, {x: x})
        tfnb.fit(train, {x: torch.ones(8, 3)}, epochs=1, batch_size=4, watch=[loss])
        torch.equal(x, torch.ones(4, 3)), (x * 2).sum().item()

    assert said(program) == []


def test_a_constant_is_the_same_in_every_run() -> None:
    with tfnb.record():
        three = tfnb.constant(3.0)
    assert said(lambda: three.item()) == []


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, type("Own", (nn.BatchNorm1d,), {})])
def test_the_counter_of_a_cumulative_batch_norm_is_read_in_each_run(kind: Any) -> None:
    layer, twin = kind(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(4, 3))
        y = layer(x)
    assert graph.notes == ()
    for rows in torch.randn(3, 5, 3):
        torch.testing.assert_close(tfnb.run(y, {x: rows}), twin(rows))
    torch.testing.assert_close(layer.running_mean, twin.running_mean)
