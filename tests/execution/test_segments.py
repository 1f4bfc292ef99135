"""Steps that are no single straight piece: segments are compiled, and generated code runs between them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import BranchChanged
from tfnb.execution import lower
from tfnb.execution.lowering.program import Program, written
from tfnb.execution.tiers import compiled_loops, graph_split
from tfnb.execution.tiers.graph_split import cut
from tfnb.execution.tiers.native.exportable import obstacles
from tfnb.execution.tiers.native.request import Operand
from tfnb.execution.tiers.native.segments import fitting, given, operands

needs_compiler = pytest.mark.skipif(compiled_loops.obstacle() is not None, reason="nothing can be compiled")
ROWS = 4


@torch.library.custom_op("tfnb_segments::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def of_the_notebook(h: Any) -> Any:
    return doubled(h.detach()) * 0.1 + h.t().contiguous().t()


def formless(h: Any) -> Any:
    return torch.fft.ifft(torch.fft.fft(h, dim=1).real, dim=1).real + h


def decided(h: Any) -> Any:
    return tfnb.cond(h.sum() > 0, lambda: h * 2, lambda: h - 1)


def guarded(h: Any) -> Any:
    return h * 2 if h.sum() > -1e3 else h


class Step:
    """A training step with something between its two parts."""

    def __init__(self, between: Callable[[Any], Any], compile: str = "off") -> None:
        torch.manual_seed(0)
        more = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
        first = nn.Sequential(nn.Linear(6, 8), *more, nn.GELU(), nn.LayerNorm(8))
        last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
        with tfnb.record() as self.graph:
            self.x = tfnb.placeholder(torch.randn(ROWS, 6), shape=(ROWS, 6), name="x")
            self.y = tfnb.placeholder(torch.randint(3, (ROWS,)), shape=(ROWS,), name="y")
            self.loss = F.cross_entropy(last(between(first(self.x))), self.y)
            self.train = tfnb.train.Adam(0.01).minimize(self.loss)
        self.session = tfnb.Session(self.graph, compile=compile)  # type: ignore[arg-type]
        self.feed = {self.x: torch.randn(ROWS, 6), self.y: torch.randint(3, (ROWS,))}

    def program(self) -> Program:
        return lower(self.graph, [self.loss.value, self.train.value], [self.x.value, self.y.value]).undonated()

    def losses(self) -> list[float]:
        return [float(self.session.run([self.loss, self.train], self.feed)[0]) for _ in range(4)]


def names(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def equal(program: Program, code: Any, args: list[Any]) -> None:
    for got, wanted in zip(written(code)(*args), program.forward(*args), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert got is wanted or not any(wanted is arg for arg in args)  # what is updated in place is the Variable's own


@pytest.mark.filterwarnings("ignore:.*branch")
@pytest.mark.parametrize(("between", "count"), [(of_the_notebook, 2), (decided, 3), (guarded, 1)])
def test_segments_and_what_lies_between_them_are_the_step(between: Callable[[Any], Any], count: int) -> None:
    step = Step(between)
    program = step.program()
    unfit = obstacles(program)
    found = cut(program, unfit.keys())
    assert unfit and found is not None
    code, segments = found
    assert len(segments) == count and not any(obstacles(segment.program) for segment in segments)
    args = [*step.feed.values(), *(variable.storage for variable in program.variables), 3]
    equal(program, code, args)
    for segment, taken in zip(segments, given(code, segments, args), strict=True):
        layout = operands(taken)
        assert layout is not None and len(layout) == len(segment.program.feeds) and not segment.program.variables


def test_views_cross_as_what_they_are_views_of() -> None:
    weight = nn.Linear(3, 3, bias=False)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(3, 3), shape=(3, 3))
        h = x
        for _ in range(8):
            h = weight(h).exp()
        h = doubled(h)
        for _ in range(8):
            h = weight(h).exp()
    program = lower(graph, [h.value], [x.value]).undonated()
    code, segments = cut(program, obstacles(program).keys()) or pytest.fail("there are none")
    assert len(segments) == 2
    for taken in given(code, segments, [torch.randn(3, 3), weight.weight.detach(), 0]):
        assert any(x is weight.weight or x.data_ptr() == weight.weight.data_ptr() for x in taken[:-1])
    assert not any("clone" in name for segment in segments for name in names(segment.program.module.graph))


def test_loops_that_share_rows_are_in_no_segment_or_in_one() -> None:
    def drawn(total: Any, x: Any) -> Any:
        return total + F.dropout(x, 0.5)

    with tfnb.record() as graph:
        xs = tfnb.placeholder(torch.randn(5, 3), shape=(5, 3))
        h = xs
        for _ in range(8):
            h = (h + 1).sin()
        y = tfnb.fold(lambda total, x: (total * x).tanh(), torch.ones(3), h)
        y = tfnb.fold(drawn, y, h)
    program = lower(graph, [y.value], [xs.value]).undonated()
    code, segments = cut(program, obstacles(program).keys()) or pytest.fail("there are none")
    assert [name for segment in segments for name in names(segment.program.module.graph) if "Loop" in name] == []
    assert sum("Loop" in name for name in names(code.graph)) == 2
    equal(program, code, [torch.randn(5, 3), 1])


def test_few_calls_are_no_segment_and_the_largest_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Step(of_the_notebook).program()
    unfit = obstacles(program).keys()
    monkeypatch.setattr(graph_split, "MOST", 1)
    found = cut(program, unfit)
    assert found is not None and len(found[1]) == 1
    monkeypatch.setattr(graph_split, "FEWEST", 1000)
    assert cut(program, unfit) is None


def test_what_crosses_is_copied_where_it_lies_in_another_way() -> None:
    from tfnb.execution.tiers.interface import Unfit

    def step(*args: Any) -> Any:
        if args[0].stride() != (3, 1):
            raise Unfit
        return args[0] * 2

    x = torch.randn(3, 2).t()
    found: Any = fitting(step, [Operand.of(torch.empty(2, 3))])(x, 0)
    assert torch.equal(found, x * 2)


def test_code_with_static_sizes_is_one_piece() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(4, 3))
        y = (x * 2).reshape(-1).sum()
    assert obstacles(lower(graph, [y.value], [x.value])) == {}


class Words(nn.Module):
    """A table and two layers that guess the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 50))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.table(words[:, :-1])).flatten(0, 1), words[:, 1:].flatten())


def test_a_table_is_updated_behind_the_segment() -> None:
    torch.manual_seed(0)
    model, words = Words(), torch.randint(50, (4, 7))
    with tfnb.record() as graph:
        x = tfnb.placeholder(words, shape=(4, 7))
        loss = model(x)
        step = tfnb.train.Adagrad(0.1).minimize(loss)
    program = lower(graph, [loss.value, step.value], [x.value]).undonated()
    code, segments = cut(program, obstacles(program).keys()) or pytest.fail("there are none")
    (segment,) = segments
    assert "tfnb.coalesce.default" in names(code.graph)
    assert (
        sum("getitem" not in name for name in names(code.graph)) < 10 and len(names(segment.program.module.graph)) > 8
    )
    equal(program, code, [words, *(variable.storage for variable in program.variables), 0])


@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("between", "why"),
    [(formless, "fft.* has no form in C"), (guarded, "decides what runs next")],
)
def test_compiled_segments_train_as_generated_code_and_are_found_again(between: Callable[[Any], Any], why: str) -> None:
    wanted = Step(between).losses()
    mine = Step(between, "now")
    assert mine.losses() == pytest.approx(wanted, rel=1e-4)
    (status,) = mine.session.status()
    assert re.search(rf": compiled; [\d.]+ s to compile; the rest is generated code: .*{why}", status), status
    again = Step(between, "now")
    assert again.losses() == pytest.approx(wanted, rel=1e-4)
    assert "from the cache; the rest is generated code: " in again.session.status()[0], again.session.status()
    if between is guarded:
        with pytest.raises(BranchChanged):
            again.session.run([again.loss, again.train], again.feed | {again.x: torch.full((ROWS, 6), torch.nan)})
        assert ": compiled; " in again.session.status()[0]
