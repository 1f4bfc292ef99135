"""A name that a block takes from a placeholder, and binds anew, feeds the placeholder; oracle: eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb

X, Y = torch.arange(6.0).reshape(3, 2), torch.ones(3, 2)
MORE = torch.arange(10.0).reshape(5, 2) - 3


def test_a_line_that_prepares_the_batch_is_part_of_each_run() -> None:
    with tfnb.record():
        x = tfnb.placeholder(X)
        x = x / 4
        x = x.flip(1)
        loss = x[:, 0].sum()
    assert tfnb.run(loss, {x: MORE}) == MORE[:, 1].sum() / 4
    assert torch.equal(tfnb.run(x, {"x": MORE}), MORE.flip(1) / 4)
    assert tfnb.fit([loss], {x: MORE}, batch_size=5).history[0]["loss"] == MORE[:, 1].sum() / 4


@pytest.mark.parametrize("made", [
    lambda: map(tfnb.placeholder, (X, Y)), lambda: [tfnb.placeholder(part) for part in (X, Y)],
    lambda: (tfnb.placeholder(X, name="x"), tfnb.placeholder(Y, name="y")),
])  # fmt: skip
def test_each_of_two_names_feeds_its_own(made: Callable[[], Any]) -> None:
    with tfnb.record():
        x, y = made()
        x, y = x + 2 * y, y * 3
        both = [x, y]
        loss = (x * y).sum()
    found = tfnb.run(loss, {x: MORE, both[1]: MORE + 1})
    assert found == ((MORE + 2 * (MORE + 1)) * (MORE + 1) * 3).sum()


def test_names_of_one_line() -> None:
    with tfnb.record():
        x = tfnb.placeholder(X); y = tfnb.placeholder(Y)  # noqa: E702  # fmt: skip
        x, y = x + 2 * y, y * 3
        z = tfnb.placeholder(X); z = z / 4  # noqa: E702  # fmt: skip
        loss, other = (x * y).sum(), z.sum()
    assert tfnb.run(loss, {x: MORE, y: MORE + 1}) == ((MORE + 2 * (MORE + 1)) * (MORE + 1) * 3).sum()
    assert tfnb.run(other, {z: MORE}) == MORE.sum() / 4


def test_a_shape_that_a_line_gives_to_the_batch() -> None:
    with tfnb.record():
        x, y = tfnb.placeholder(torch.ones(3, 2, 2)), tfnb.placeholder(Y)
        x = x.view(-1, 4)
        loss = x.sum() + y.sum()
    assert tfnb.run(loss, {x: torch.ones(5, 2, 2), y: torch.ones(5, 2)}) == 30


def test_a_state_that_is_fed_and_fetched_under_one_name() -> None:
    torch.manual_seed(0)
    cell = nn.LSTMCell(2, 3)
    zero = torch.zeros(3, 3)
    with tfnb.record():
        x = tfnb.placeholder(X)
        state = (
            tfnb.placeholder(zero),
            tfnb.placeholder(zero),
        )
        state = cell(x, state)
        total = tfnb.placeholder(torch.tensor(0.0))
        total = total + state[0].sum()
    fed, wanted, added = (zero, zero), (zero, zero), torch.tensor(0.0)
    for _ in range(2):
        fed, added = tfnb.run([state, total], {x: X, state[0]: fed[0], state[1]: fed[1], total: added})
        wanted = cell(X, wanted)
    torch.testing.assert_close(fed, tuple(each.detach() for each in wanted))
    torch.testing.assert_close(added, added.new_tensor(cell(X, (zero, zero))[0].sum().item()) + fed[0].sum())


def test_a_later_block_that_binds_the_name_anew() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(X)
        first = x.sum()
    with tfnb.record(graph):
        x = x * 2
        second = x.sum()
    assert tfnb.run([first, second, x], {x: MORE})[:2] == [MORE.sum(), MORE.sum() * 2]


def test_names_of_other_values_feed_these() -> None:
    def made() -> torch.Tensor:
        k = tfnb.placeholder(X)
        return k.exp()

    with tfnb.record():
        x, y = tfnb.placeholder(X), tfnb.placeholder(Y)
        h = x * 2
        x = h  # two names: the one says that the product is meant
        y = torch.zeros(2)  # no longer of the placeholder
        k = made()
        k = k * 2  # its first value was no placeholder
        loss, other = x.sum(), k.sum()
    assert tfnb.run(loss, {h: MORE}) == tfnb.run(loss, {x: MORE}) == MORE.sum()
    assert tfnb.run(other, {k: MORE}) == MORE.sum()
    assert torch.equal(tfnb.run(y, {y: torch.ones(2)}), torch.ones(2))


def test_other_forms_of_an_assignment() -> None:
    with tfnb.record():
        x: torch.Tensor = tfnb.placeholder(X)
        x = x / 4
        loss = x.sum()
        twice = (y := tfnb.placeholder(Y)).sum() * 2
        y = y * 5
        more = y.sum()
        z = tfnb.placeholder(X); n = 3  # noqa: E702  # fmt: skip
        z = z * n
        other = z.sum()
    assert tfnb.run(loss, {x: MORE}) == MORE.sum() / 4 and tfnb.run(other, {z: MORE}) == MORE.sum() * 3
    assert tfnb.run([twice, more], {y: MORE}) == [MORE.sum() * 2, MORE.sum() * 5]


def test_of_two_placeholders_of_a_name_the_later_one_is_fed() -> None:
    with tfnb.record():
        x = tfnb.placeholder(X)
        old = x.sum()
        x = tfnb.placeholder(Y)
        x = x * 3
        loss = x.sum()
    assert tfnb.run(loss, {x: MORE}) == MORE.sum() * 3
    assert old is not None
