"""Slices by a number that a loop changes: one recording gives what Python gives for every size, with gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tfnb
from tfnb.errors import InvalidArgument


def prefixes(x: Any) -> Any:
    total = torch.zeros(x.shape[0], dtype=x.dtype)
    for t in range(x.shape[1]):
        total = total + x[:, :t].sum(1) * x[:, t:].prod(1) + x[:, -t:].sum(1)
    return total


def one_column_at_a_time(x: Any) -> Any:
    h = torch.zeros(x.shape[0], 1, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t : t + 1] + h * x[..., 0:1])
    return h


def batches(x: Any) -> Any:
    total = torch.zeros((), dtype=x.dtype)
    for i in range(0, x.shape[0], 2):
        total = total + x[i : i + 2].sin().mean()
    for i in range(x.shape[0] // 2):
        total = total + x[i * 2 : (i + 1) * 2].prod()
    return total


def causal_attention(x: Any) -> Any:
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        seen = x[: t + 1]
        y[t] = torch.softmax(seen @ x[t], 0) @ seen
    return y


def attention_heads(x: Any) -> Any:
    places = torch.stack([x.sum(1), x.sin().sum(1), x.cos().sum(1), x.square().sum(1)], 1)
    total = torch.zeros(4, dtype=x.dtype)
    for t in range(x.shape[0]):
        heads = places[None, : t + 1].unflatten(-1, (2, 2)).transpose(1, 2)
        found = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        total = total + found.transpose(1, 2).reshape(-1, 4)[-1] * (t + 1)
    return total


def elimination(x: Any) -> Any:
    a = x @ x.T + 5 * torch.eye(x.shape[0], dtype=x.dtype)
    for k in range(x.shape[0]):
        factors = a[k + 1 :, k] / a[k, k]
        row = a[k, k:].clone()
        a = a.clone()
        a[k + 1 :, k:] -= torch.outer(factors, row)
    return a


def views(x: Any) -> Any:
    y = x * 1
    total = torch.zeros((), dtype=x.dtype)
    for t in range(x.shape[0]):
        row, pair = y[t : t + 1], y[:, t : t + 2]
        row *= 2
        pair.add_(1)
        y.mul_(1.5)
        total = total + row.sum().sin() + pair.sum()
    return y.sin() * total


def steps(x: Any) -> Any:
    total = torch.zeros((), dtype=x.dtype)
    for t in range(x.shape[0]):
        total = total + x[t::2].sum() + x[:t:2].sin().sum() + x[t:5:3, 0].sum() + x[None, t:, -1].cos().sum()
    return total


def bisected(x: Any) -> Any:
    low, high = torch.tensor(0), torch.tensor(x.shape[0])
    total = x.sum()
    while high - low > 1:
        middle = (low + high) // 2
        if x[low:middle].sum() > x[middle:high].sum():
            high = middle
        else:
            low = middle
        total = total + x[low:high].mean()
    return total


def cut_short(x: Any) -> Any:
    total = torch.zeros((), dtype=x.dtype)
    for t in range(x.shape[0]):
        total = total + x[t : min(t + 2, x.shape[0])].sum() * 2 + x[max(t - 1, 0) : t + 1].prod()
    return total


def branches_of_rows(x: Any) -> Any:
    """The gradients of the two sides have one row and two."""
    total = x.sum()
    for t in range(x.shape[0]):
        total = total + (x[t].sin().sum() if t == 0 else (x[t].sin() * x[t - 1]).sum())
    return total


def by_methods(x: Any) -> Any:
    total = x.sum()
    for t in range(x.shape[0] - 1):
        total = total + x.narrow(0, t, 2).prod() + torch.narrow(x, -1, 1 - t % 2, 1).sum() + x.select(0, t).sum()
        total = total + torch.select(x, -1, 0)[t].sin()
    return total


def ranges(x: Any) -> Any:
    total = torch.zeros((), dtype=x.dtype)
    for t in range(x.shape[0]):
        total = total + torch.arange(t, dtype=x.dtype).sum() * x[t].sum() + x[torch.arange(t + 1)].prod()
        total = total + torch.arange(t, 2 * t, 2).sum()
    return total


PROGRAMS = [
    prefixes, one_column_at_a_time, batches, causal_attention, attention_heads, elimination, views, steps, bisected,
    cut_short, branches_of_rows, by_methods, ranges,
]  # fmt: skip


def _gradients(y: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True, materialize_grads=True)
    if not first.requires_grad:
        return [first, torch.zeros_like(x)]
    return [first, *torch.autograd.grad(first.square().sum(), x, materialize_grads=True)]


LONG = (attention_heads, batches, branches_of_rows, causal_attention, elimination, steps, by_methods, ranges)


@pytest.mark.parametrize("program", [pytest.param(p, marks=[pytest.mark.slow] * (p in LONG)) for p in PROGRAMS])
def test_slices_by_a_loops_number_are_those_of_each_iteration(program: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings(), tfnb.record() as graph:
        warnings.filterwarnings("error", ".*became the constant")
        warnings.filterwarnings("ignore", ".*Python took the")  # torch 2.11 asks whether two slices have as many rows
        x = tfnb.placeholder(torch.randn(4, 3, dtype=torch.float64), shape=("B", "T"))
        y = tfnb.autograph(program)(x)
        (first,) = tfnb.gradients(y.sin().sum(), [x])
        (second,) = tfnb.gradients(first.square().sum(), [x])
    assert not any("stays Python" in note for note in graph.notes)
    session = tfnb.Session(graph)
    for shape in [(4, 3), (7, 5), (1, 4)]:
        fed = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):  # torch's others have no second derivative
            want = program(fed)
            expected = [want.detach(), *_gradients(want, fed)]
        torch.testing.assert_close(session.run([y, first, second], {x: fed.detach()}), expected)


def test_one_row_that_a_run_does_not_have_is_an_error_with_the_line() -> None:
    with tfnb.record():
        x, n = tfnb.placeholder(torch.randn(3, 4), shape=("B", "T")), tfnb.placeholder(torch.tensor(2))
        column = x[:, n : n + 1]
    assert column.shape[1] == 1
    assert tfnb.run(column, {x: torch.ones(2, 6), n: torch.tensor(5)}).shape == (2, 1)
    with pytest.raises(InvalidArgument, match=r"slice \[6:7\] of 6 elements has none of them(.|\n)*column = x"):
        tfnb.run(column, {x: torch.ones(2, 6), n: torch.tensor(6)})


def test_a_number_outside_of_loops_cuts_in_each_run() -> None:
    with warnings.catch_warnings(), tfnb.record():
        warnings.simplefilter("error")
        x, n = tfnb.placeholder(torch.randn(3, 4), shape=("B", "T")), tfnb.placeholder(torch.tensor(3))
        kept = torch.softmax(x[:, :n], 1)
        blank = x * 1
        blank[:, n:] = 0
    fed = torch.randn(2, 6)
    for number in (3, 5, 0, -1, 9):
        want = fed.clone()
        want[:, number:] = 0
        got = tfnb.run([kept, blank], {x: fed, n: torch.tensor(number)})
        torch.testing.assert_close(got, [torch.softmax(fed[:, :number], 1), want])


def reads_rows(x: Any) -> Any:
    h = torch.zeros(x.shape[0], 1, 4, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t : t + 1] + h)
    return h


def writes_rows(x: Any) -> Any:
    out, h = torch.zeros_like(x), torch.zeros(x.shape[0], 4, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] + h)
        out[:, t] = h
    return out


def reads_neighbours(x: Any) -> Any:
    h = torch.zeros(x.shape[0], 4, dtype=x.dtype)
    for t in range(1, x.shape[1] - 1):
        h = torch.tanh(x[:, t] * x[:, t - 1] + h * x[:, t + 1])
    return h


@pytest.mark.slow
@pytest.mark.parametrize("program", [reads_rows, writes_rows, reads_neighbours])
def test_rows_by_a_loops_number_take_memory_by_the_row(program: Callable[[Any], Any]) -> None:
    """Values and gradients, without a tensor of all rows in each iteration."""
    iterations, width = 200, 8
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(width, 3, 4, dtype=torch.float64), shape=(width, "T", 4))
        y = tfnb.autograph(program)(x)
        (slope,) = tfnb.gradients(y.square().sum(), [x])
    fed = torch.randn(width, iterations, 4, dtype=torch.float64, requires_grad=True)
    want = program(fed)
    (expected,) = torch.autograd.grad(want.square().sum(), fed)
    session = tfnb.Session(graph, compile="off")
    session.run([y, slope], {x: fed.detach()})  # torch takes some memory once for a process
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        got = session.run([y, slope], {x: fed.detach()})
    torch.testing.assert_close(got, [want.detach(), expected])
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    taken = sum(e.nbytes() for e in events if e.nbytes() > 0)
    assert taken < 40 * fed.nbytes, f"{taken / fed.nbytes:.0f} times x, in {iterations} iterations"


def test_what_was_there_before_a_row_was_written_stays() -> None:
    def body(n: Any, y: Any, old: Any, total: Any) -> Any:
        row = n.reshape(1)
        new = y.index_copy(0, row, y[n : n + 1] * 2 + 1)
        return n + 1, new, y, total + new.index_fill(0, row, 0.5) * (new - y).sum()

    def program(x: Any) -> Any:
        start = 0, x, x, torch.zeros_like(x)
        return tfnb.while_loop(lambda n, *_: n < x.shape[0], body, start)[1:]

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(3, 2), shape=("B", 2))
        out = program(x)
    fed = torch.randn(5, 2)
    y, old, total = fed, fed, torch.zeros_like(fed)
    for n in range(5):
        _, y, old, total = body(torch.tensor(n), y, old, total)
    torch.testing.assert_close(tfnb.Session(graph).run(list(out), {x: fed}), [y, old, total])


def test_what_a_late_write_takes_is_not_written_before() -> None:
    """The row is needed once more below, by an op that may write into it, before what is written into is read."""

    def program(x: Any, y: Any) -> Any:
        def body(n: Any, y: Any, total: Any) -> Any:
            row = (x * (n + 1)).sin()
            new = y.index_copy(0, n.reshape(1), row)
            return n + 1, new, total + (row * 2).sum() + y.sum()

        return tfnb.while_loop(lambda n, *_: n < y.shape[0], body, (0, y, torch.zeros((), dtype=x.dtype)))[1:]

    wide = 1 << 17  # so that memory is worth writing into
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(1, wide, dtype=torch.float64), shape=(1, wide))
        y = tfnb.placeholder(torch.zeros(3, wide, dtype=torch.float64), shape=("B", wide))
        out = program(x, y)
    fed = torch.randn(1, wide, dtype=torch.float64), torch.randn(4, wide, dtype=torch.float64)
    got = tfnb.Session(graph, compile="off").run(list(out), dict(zip((x, y), fed, strict=True)))
    torch.testing.assert_close(got, list(program(*fed)))


class Decoder(nn.Module):
    """A layer of attention over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 8), nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Any) -> Any:
        count = tokens.shape[1]
        mask = torch.ones(count, count, dtype=torch.bool).triu(1)
        return self.head(self.layer(self.tokens(tokens) + self.places(torch.arange(count)), mask))


def test_a_decoder_writes_token_after_token() -> None:
    model = Decoder()

    def written(tokens: Any) -> Any:
        out = F.pad(tokens, (0, 6))
        for t in range(tokens.shape[1], tokens.shape[1] + 6):
            out[:, t] = model(out[:, :t])[:, -1].argmax(-1)
        return out

    with torch.no_grad(), tfnb.record() as graph:
        x = tfnb.placeholder(torch.randint(7, (2, 3)), shape=("B", "T"))
        out = tfnb.autograph(written)(x)
    assert not any("stays Python" in note for note in graph.notes)
    session = tfnb.Session(graph)
    for shape in [(2, 3), (4, 5), (1, 1)]:
        fed = torch.randint(7, shape)
        with torch.no_grad():
            wanted = written(fed)
        assert torch.equal(session.run(out, {x: fed}), wanted)


def test_a_loop_in_a_loop_takes_a_part_of_which_no_axis_tells_how_long_the_whole_is() -> None:
    def program(x: Any) -> Any:
        a, last, iterations = x.max(), x[-1:], 0
        while a < 2 and iterations < 3:
            iterations += 1
            times = 0
            while a < 1 and times < 3:
                times += 1
                a = a + (last * a).sum().square()
        return a

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor([0.5, -0.25], dtype=torch.float64), name="x")
        a = tfnb.autograph(program)(x)
        (dx,) = tfnb.gradients(a, [x])
    session = tfnb.Session(graph)
    for fed in ([0.5, 0.25, -0.5], [0.75], [0.25, 3.0], [-0.5, 0.25]):
        leaf = torch.tensor(fed, dtype=torch.float64, requires_grad=True)
        want = program(leaf)
        (slope,) = torch.autograd.grad(want, leaf)
        torch.testing.assert_close(session.run([a, dx], {x: leaf.detach()}), [want.detach(), slope])
