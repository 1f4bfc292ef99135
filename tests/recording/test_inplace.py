"""In-place calls and writes through views replay as torch runs them, on other data too."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
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


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch's own quantile asks for a plain number of elements")
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


def replayed(program: Any, sample: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    """Record ``program(x)``, compare with eager, and return what a run on ``other`` gives."""
    with tfnb.record() as g:
        x = tfnb.placeholder(sample, shape=tuple(sample.shape))
        got = program(x)
    want = program(sample.clone())
    assert [t.sample.tolist() for t in got] == [t.tolist() for t in want]
    assert [tuple(t.shape) for t in got] == [tuple(t.shape) for t in want]
    found = tfnb.Session(g).run(list(got), {x: other})
    assert [t.tolist() for t in found] == [t.tolist() for t in program(other.contiguous().clone())]
    return found


def _turned(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 1
    row = y[0]
    y.t_()
    y.unsqueeze_(0)
    row.squeeze_().add_(1)
    y[0, 0] = 9
    return [y, row, y.squeeze_(0), y.view(-1) if y.is_contiguous() else y.reshape(-1)]


def _foreach_aliases(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 1
    torch._foreach_add_([y, y[0], y.t()], 1)
    torch._foreach_mul_([y, x], [x, y])
    return [x, y]


def _overlaid(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 1
    tail = y[1:]
    tail.as_strided((2,), (1,), 0).add_(10)  # counts from the start of y
    y.unfold(1, 2, 2).mul_(2)
    y.view(torch.int32)[0, 0] = 0
    return [y, tail]


def _same_strides(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.t() * 1  # lies in memory by columns, and stays so
    y.copy_(x.t().contiguous())
    y.mul_(x.t().contiguous())
    flat = y.t().view(-1)
    flat[0] = 5
    z = F.dropout(y, 0.5, training=False)
    z.add_(1)
    return [y, flat, z]


def _grown(x: torch.Tensor) -> list[torch.Tensor]:
    out = torch.empty(0)
    same = torch.add(x, 1, out=out)
    same[0] = 0
    return [out, same]


@pytest.mark.parametrize("program", [_turned, _foreach_aliases, _overlaid, _same_strides, _grown])
def test_aliases_are_torchs(program: Any) -> None:
    replayed(program, torch.arange(12.0).view(3, 4), torch.arange(12.0, 0, -1).view(4, 3).t())


def test_a_fed_tensor_may_lie_in_memory_in_any_way() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 3).t(), shape=(3, 4))
        middle = x.t() * 1
        y = middle.t().view(-1)
        x.fill_diagonal_(0)
    other = torch.arange(12.0).view(4, 3).t()
    session = tfnb.Session(g)
    assert torch.equal(session.run(x, {x: other}), other.clone().fill_diagonal_(0))
    assert torch.equal(session.run(y, {middle: torch.ones(4, 3)}), torch.ones(12))


@pytest.mark.filterwarnings("ignore:.*does not write into a plain tensor")
def test_plain_tensors_that_share_memory() -> None:
    whole = torch.zeros(4)
    part, later = whole[1:3], whole[2:]
    with tfnb.record():
        whole.add_(1)
        y = part * 2
        part.add_(1)
        z = whole * 1
    assert [t.tolist() for t in tfnb.run([y, z])] == [[2, 2], [1, 2, 2, 1]]
    assert whole.tolist() == [0, 0, 0, 0]
    with pytest.raises(tfnb.errors.Unsupported, match="shares in part"), tfnb.record():
        part * 1
        later * 1
        part.add_(1)


def test_a_view_of_a_parameter_made_before_is_a_view_of_its_variable() -> None:
    w = torch.nn.Parameter(torch.ones(2, 3))
    turned = w.t()
    with tfnb.record():
        loss = (turned * 2).sum() + w.data.sum()
        dw = tfnb.gradients(loss, [w])[0]
    with torch.no_grad():
        w.fill_(3)
    got = tfnb.run([loss, dw])
    assert got[0] == 54 and got[1].tolist() == [[2, 2, 2], [2, 2, 2]]


def _through_detach(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.detach()[0].add_(1)
    y.data.mul_(3)
    return (y * y.detach()).sum()


def _looked_at_without_grad(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    row, alias = y[0], y.view(-1)
    with torch.no_grad():
        y.add_(1)
        alias.mul_(2)
        row.sum()
    return (row * 3).sum() + alias.sum()


def _out_without_grad(x: torch.Tensor) -> torch.Tensor:
    y, z = x * 2, x * 3
    with torch.no_grad():
        torch.add(x, 1, out=y)
        torch._foreach_mul_([y, z], 2)
    return (y * 5).sum() + z.sum()


def _filled(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[0].fill_(x.sum())
    y[1] = x[0] * 3
    y.squeeze_().t_()
    return (y * torch.arange(6.0, dtype=torch.float64).view(3, 2)).sum()


@pytest.mark.parametrize("program", [_through_detach, _looked_at_without_grad, _out_without_grad, _filled])
def test_gradients_through_writes_are_torchs(program: Any) -> None:
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
    program(x).backward()
    with tfnb.record():
        held = tfnb.placeholder(x.detach(), shape=(2, 3))
        (dx,) = tfnb.gradients(program(held), [held])
    assert torch.equal(dx.sample, x.grad)


REFUSED = {
    "set_": lambda x, plain: x.set_(plain),
    "resize_": lambda x, plain: x.clone().resize_(3, 2),
    "shape of a plain tensor": lambda x, plain: plain.t_(),
    "out= of another shape": lambda x, plain: torch.add(x, 1, out=torch.empty(4, 4)),
    "out= of another rank": lambda x, plain: torch.sum(x, (0, 1), out=torch.empty(1)),
    "out= of a plain tensor": lambda x, plain: torch.add(x[:1, :1], 1, out=plain[:0]),
    "overlap": lambda x, plain: x.as_strided((2, 2), (1, 1)).add_(1),
    "unfold": lambda x, plain: x.unfold(0, 2, 1).add_(1),
    "expand": lambda x, plain: x[:, :1].expand(2, 3)[:, 1:].add_(1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_its_line(what: str) -> None:
    plain = torch.ones(2, 3)
    with pytest.raises(tfnb.errors.Unsupported, match=r"test_inplace.py line"), tfnb.record():
        REFUSED[what](tfnb.placeholder(torch.ones(2, 3), shape=(2, 3)), plain)
    assert plain.shape == (2, 3)


def test_out_of_ops_that_give_several() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        values, places = torch.empty(0), torch.empty(0, dtype=torch.int64)
        torch.sort(x, 0, out=(values, places))
        most, where = torch.empty(4), torch.empty(4, dtype=torch.int64)
        torch.max(x, 0, out=(most, where))
        return [values, places, most, where]

    with tfnb.record():
        x = tfnb.placeholder(torch.randn(5, 4))
        found = program(x)
    fed = torch.randn(3, 4)
    torch.testing.assert_close(tfnb.run(found, {x: fed}), program(fed))
