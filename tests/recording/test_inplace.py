"""In-place calls and writes through views replay as torch runs them, on other data too."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import tfnb

# Each step picks a tensor of the family (base and views) and does something to it.
VIEWS = {
    "row": lambda t: t[1],
    "column": lambda t: t[..., 0] if t.dim() > 1 else t,
    "tail": lambda t: t[1:],
    "step": lambda t: t[..., ::2],
    "transpose": lambda t: t.t() if t.dim() == 2 else t,
    "flat": lambda t: t.view(-1) if t.is_contiguous() else t,
    "unsqueeze": lambda t: t.unsqueeze(0),
    "chunk": lambda t: t.chunk(2)[0],
    "diagonal": lambda t: t.diagonal() if t.dim() == 2 else t,
    "split": lambda t: t.split(2)[-1],
    "unbind": lambda t: t.unbind(0)[0] if t.dim() > 1 else t,
}
WRITES = {
    "add": lambda t: t.add_(1),
    "mul": lambda t: t.mul_(2),
    "relu": lambda t: t.relu_(),
    "zero": lambda t: t.zero_(),
    "fill": lambda t: t.fill_(3),
    "copy": lambda t: t.copy_(torch.full_like(t, 7.0)),
    "set": lambda t: t.__setitem__(0, 5.0),
    "masked": lambda t: t.masked_fill_(t > 2, -1.0),
    "self": lambda t: t.add_(t),
}
step = st.one_of(
    st.tuples(st.just("view"), st.integers(0, 9), st.sampled_from(sorted(VIEWS))),
    st.tuples(st.just("write"), st.integers(0, 9), st.sampled_from(sorted(WRITES))),
)


def run(base: torch.Tensor, program: list[tuple[str, int, str]]) -> list[torch.Tensor]:
    family: list[Any] = [base * 1]
    for kind, index, name in program:
        target = family[index % len(family)]
        if target.dim() == 0 or target.shape[0] < 2:
            continue
        if kind == "view":
            family.append(VIEWS[name](target))
        else:
            WRITES[name](target)
    return family


@given(st.lists(step, max_size=8))
def test_random_alias_programs_equal_torch(program: list[tuple[str, int, str]]) -> None:
    sample, other = torch.arange(16.0).view(4, 4) - 6, torch.arange(16.0, 0, -1).view(4, 4) - 9
    with tfnb.record() as g:
        x = tfnb.placeholder(sample, shape=(4, 4))
        recorded = run(x, program)
    for got, want in zip(recorded, run(sample, program), strict=True):
        assert torch.equal(got.sample, want)
    for got, want in zip(tfnb.Session(g).run(recorded, {x: other}), run(other, program), strict=True):
        assert torch.equal(got, want)


def test_writes_through_views_with_a_varying_batch() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(6, 8))
        y = x * 1
        y[:, 0] = 0
        v = y.view(-1, 2, 4)
        v[:, 1].mul_(2)
        y += 1
    data = torch.randn(3, 8)
    want = data.clone()
    want[:, 0] = 0
    want.view(-1, 2, 4)[:, 1].mul_(2)
    want += 1
    got_y, got_v = tfnb.run([y, v], {x: data})
    assert torch.equal(got_y, want) and torch.equal(got_v, want.view(-1, 2, 4))


def test_a_placeholder_written_in_place_stays_the_feed_key() -> None:
    data = torch.ones(3)
    with tfnb.record():
        x = tfnb.placeholder(data)
        x.add_(1)
        y = x * 2
    assert torch.equal(data, torch.ones(3))
    assert [t.tolist() for t in tfnb.run([x, y], {x: torch.zeros(2)})] == [[1, 1], [2, 2]]


def test_out_argument_is_rebound() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(3,))
        out = torch.empty(3)
        torch.add(x, 1, out=out)
        y = out * 2
    assert tfnb.run(y, {x: torch.zeros(3)}).tolist() == [2, 2, 2]


def test_index_put_and_in_place_dtype_rules() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(4, dtype=torch.int64))
        x[torch.tensor([0, 2])] = 7
        y = torch.zeros(3)
        y += torch.ones(3, dtype=torch.float64)
    assert y.dtype is torch.float32
    assert tfnb.run(x, {x: torch.zeros(3, dtype=torch.int64)}).tolist() == [7, 0, 7]


def test_a_parameter_written_in_a_cell_is_an_assignment() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    with tfnb.record():
        before = w * 1
        with torch.no_grad():
            w.add_(1)
        after = w * 1
    assert w.tolist() == [1, 1, 1]
    assert [t.tolist() for t in tfnb.run([before, after])] == [[1, 1, 1], [2, 2, 2]]
    assert w.tolist() == [2, 2, 2]


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_writing_through_an_expanded_view_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises((tfnb.errors.TfnbError, RuntimeError)), tfnb.record():
        tfnb.placeholder(torch.ones(1, 3), shape=(1, 3)).expand(4, 3).add_(1)


def test_a_call_that_reshapes_in_place_reshapes_the_handle_alone() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        flat = y.view(-1)
        y.unsqueeze_(1).transpose_(0, 1)
        y[0, 0] = 5
        z = torch.quantile(x, 0.5)  # squeezes in place, and goes on with the handle
        return y, flat, z, y.sum(0) * z.reshape([1] * (z.dim() + 1))

    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3))
        recorded = program(x)
    for rows in (4, 7, 1):
        data = torch.randn(rows, 3)
        for got, expected in zip(tfnb.run(recorded, {x: data}), program(data), strict=True):
            torch.testing.assert_close(got, expected)
    assert recorded[0].shape == (1, *x.shape) and recorded[2].dim() == 0
