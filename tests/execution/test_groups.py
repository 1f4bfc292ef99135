"""Groups of pointwise nodes: code with them computes what code without them does, and repeats share a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tfnb
from tfnb.execution import lower
from tfnb.execution.tiers import inductor as compiler
from tfnb.execution.tiers import node_groups as grouping
from tfnb.execution.tiers.node_groups import Layouts, function, groups, with_kernels
from tfnb.graph import Value


def program(build: Callable[..., Any], *samples: torch.Tensor) -> tuple[Any, Layouts, list[torch.Tensor]]:
    """The program of ``build(*samples)`` at these very sizes, what its values look like, its arguments."""
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(sample, shape=tuple(sample.shape)) for sample in samples]
        fetches = build(*fed)
    made = lower(graph, [Value(t.node.id, t.index) for t in fetches], [t.value for t in fed])
    args = [*samples, *(variable.storage for variable in made.variables), 0]
    layouts = Layouts(made.module)
    with torch.no_grad():
        layouts.run(*args)
    return made, layouts, args


def same(made: Any, layouts: Layouts, args: list[torch.Tensor]) -> list[grouping.Group]:
    """Checks the code with each group as one call of its own function, and gives the groups."""
    found = groups(made, layouts.of)
    modules = [function(made, layouts.of, group) for group in found]
    calls = [(group, lambda xs, module=module: module(*xs)) for group, module in zip(found, modules, strict=True)]
    with torch.no_grad():
        got, wanted = with_kernels(made, calls).forward(*args), made.forward(*args)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    return found


def cell(x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor], w: torch.Tensor) -> Any:
    hidden, memory = state
    entry, forget, new, out = (x + hidden @ w).chunk(4, 1)
    memory = forget.sigmoid() * memory + entry.sigmoid() * new.tanh()
    return out.sigmoid() * memory.tanh(), memory


def unrolled(xs: torch.Tensor, start: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    state = start, start
    for x in xs:
        state = cell(x, state, w)
    loss = state[0].square().mean()
    return [loss, *tfnb.gradients(loss, [start, w])]


def test_the_iterations_of_an_unrolled_cell_share_two_kernels() -> None:
    samples = torch.randn(12, 3, 20), torch.randn(3, 5), torch.randn(5, 20)
    found = same(*program(unrolled, *samples))
    counts = sorted(Counter(group.key for group in found).values())
    assert counts[-2:] == [11, 11] and sum(counts) <= 25  # the last iteration is a little different


@pytest.mark.parametrize(
    "build",
    [
        lambda x, y: [(x + 1).relu() * y - x.exp() * y.neg().exp() * 2 * (x * 3 + 4 * y + y * y)],
        lambda x, y: [((x + 1).t() * y.t() * 2 * 3 * 4 * 5 * 6 * 7 * 8 * 9).t().contiguous()],
        lambda x, y: [torch.cat([x * 2 + 1, y * 3 * 4 * 5 + 2, (x - y).exp() * 6, (x @ y.t() @ y) * 2], 1)],
        lambda x, y: [(x * 2 + 1 + y * 3 * y * 4 * 5 * 6).split(1, 1)[0].exp().neg().abs(), x.exp() * 2 + 1],
        lambda x, y: [(a := (x + y).exp() * 2 + 3) @ a.t() @ a + a * 4 * (a + 1) * (a - 1) * (a + 2), a],
        lambda x, y: [x[:, :1] * y * 2 * 3 * 4 * 5 * 6 * 7 * 8 * 9, x[:, :1]],
        lambda x, y: [torch.where(x > 0, x, y) * (x > y) * 2 * 3 * 4 * 5 * 6 * 7 * 8, (x > y) & (y > 0)],
        lambda x, y: [(x + x.shape[0]) * y * 2 * 3 * 4 * 5 * 6 * 7 * 8],
    ],
)  # fmt: skip
def test_code_in_groups_computes_the_same(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "WORTH_A_KERNEL", 2)
    samples = torch.randn(4, 3), torch.randn(4, 3)
    assert same(*program(build, *samples))


OPS: list[Callable[..., torch.Tensor]] = [
    lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a.sigmoid(), lambda a, b: a.t(), lambda a, b: a @ b,
    lambda a, b: torch.cat([a, b])[1:5], lambda a, b: a.chunk(2)[0].repeat(2, 1), lambda a, b: a.softmax(1),
    lambda a, b: a[1:3].exp().repeat(2, 1), lambda a, b: a.clone(), lambda a, b: torch.stack(a.unbind(1), 1) * 2,
]  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 99), st.integers(0, 99)), min_size=4, max_size=30)
)
def test_random_code_in_groups_computes_the_same(steps: list[tuple[int, int, int]]) -> None:
    def build(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        values = [x, y]
        for op, a, b in steps:
            values.append(OPS[op](values[a % len(values)], values[b % len(values)]).clamp(-2, 2))
        return values[-3:]

    made = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "WORTH_A_KERNEL", 1)
        patch.setattr(grouping, "MOST_KERNELS", 100)
        patch.setattr(grouping, "LARGEST", 5)
        same(*program(build, torch.randn(4, 4, generator=made), torch.randn(4, 4, generator=made)))


@pytest.mark.skipif(compiler.obstacle() is not None, reason="nothing can be compiled")
@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_a_long_step_is_compiled_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MOST_NODES", 10)
    made, _, args = program(unrolled, torch.randn(8, 3, 20), torch.randn(3, 5), torch.randn(5, 20))
    for got, wanted in zip(compiler.compiled(made, args)(*args), made.forward(*args), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.skipif(compiler.obstacle() is not None, reason="nothing can be compiled")
@pytest.mark.filterwarnings("ignore")
def test_a_step_with_sizes_that_data_decide_is_compiled_in_groups() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(256, 64))
        h = torch.tanh(x) * torch.sigmoid(x) + x.exp() * 0.1
        h = (h * h.sin() + h.cos()) * (h + 1)
        y = h[h > 0].sum()
        (dx,) = tfnb.gradients(y, [x])
    fed = torch.randn(256, 64)
    expected = tfnb.Session(g, compile="off").run([y, dx], {x: fed})
    session = tfnb.Session(g, compile="now")
    torch.testing.assert_close(session.run([y, dx], {x: fed}), expected)
    assert session.status()[0].endswith(": compiled")


@pytest.mark.skipif(compiler.obstacle() is not None, reason="nothing can be compiled")
@pytest.mark.filterwarnings("ignore")
def test_compiled_groups_give_memory_of_their_own() -> None:
    model = nn.Linear(6, 6)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 6), shape=(4, 6))
        y = model(x)
        if (y * 0).sum() == 0:  # a branch: only groups are compiled
            z = (y.exp() * 2 + 1) * y.sigmoid() * y.tanh() * (y + 1) * (y - 1) * 2
    session = tfnb.Session(g, compile="now")
    data = torch.randn(4, 6)
    bias = model.bias.detach().clone()
    got = session.run([z, tfnb.variable(model.bias)], {x: data})
    assert session.status()[0].endswith(": compiled")
    h = model(data)
    torch.testing.assert_close(got[0], ((h.exp() * 2 + 1) * h.sigmoid() * h.tanh() * (h + 1) * (h - 1) * 2).detach())
    got[1].zero_()
    assert torch.equal(model.bias.detach(), bias)
