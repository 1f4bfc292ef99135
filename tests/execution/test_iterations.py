"""What a traced run sees inside of loops and branches: values and sides of single iterations, amounts, live bytes."""

from __future__ import annotations

import math

import pytest
import torch

import tfnb
from tfnb.errors import InvalidArgument
from tfnb.execution import Trace
from tfnb.execution.tracing import everything
from tfnb.execution.tracing.iterations import LoopTrace, ValueSummary, seen


def traced(graph: tfnb.Graph, fetches: object, feeds: dict[object, object]) -> tuple[Trace, object]:
    session = tfnb.Session(graph, compile="off")
    result = session.run(fetches, feeds, trace=True)
    assert session.trace is not None
    return session.trace, result


def of_op(loop: LoopTrace, trace: Trace, op: str) -> list[list[tuple[float, ...]]]:
    """The numbers that nodes of an op had, iteration by iteration."""
    named = {path for path, amount in trace.inside.items() if amount.node.op.startswith(op)}
    return [[note.values[0].numbers for path, note in one.notes.items() if path in named] for one in loop.kept]


@pytest.fixture
def collatz() -> tuple[tfnb.Graph, object, object]:
    with tfnb.record("collatz") as graph:
        n = tfnb.placeholder(torch.tensor(6), name="n")
        steps, _ = tfnb.while_loop(
            lambda k, m: m != 1,
            lambda k, m: (k + 1, tfnb.cond(m % 2 == 0, lambda: m // 2, lambda: 3 * m + 1)),
            (0, n),
        )
    return graph, n, steps


def test_values_and_sides_of_every_iteration_are_those_of_python(collatz) -> None:
    graph, n, steps = collatz
    trace, found = traced(graph, steps, {n: 7})
    expected, m = [], 7
    while m != 1:
        expected.append((m, m % 2 == 0))
        m = m // 2 if m % 2 == 0 else 3 * m + 1
    (loop,) = trace.loops
    assert (loop.total, loop.runs, loop.every, found.item()) == (len(expected), 1, 1, len(expected))
    assert [one.number for one in loop.kept] == list(range(len(expected)))
    assert [list(one.sides.values()) for one in loop.kept] == [[side] for _, side in expected]
    state = [{note.values[0].numbers for note in one.notes.values() if math.isnan(note.seconds)} for one in loop.kept]
    assert [(m,) in values for values, (m, _) in zip(state, expected, strict=True)] == [True] * len(expected)
    halves = [numbers for numbers in of_op(loop, trace, "aten.floor_divide") if numbers]
    assert halves == [[(m // 2,)] for m, even in expected if even]


def test_what_runs_inside_is_part_of_the_loop_and_counted(collatz) -> None:
    graph, n, steps = collatz
    trace, _ = traced(graph, steps, {n: 7})
    loop = next(event for event in trace.events if event.op == "tfnb.while")
    inner = sum(amount.seconds for amount in trace.inside.values())
    assert 0 < inner <= loop.seconds
    calls = {row.name.rpartition("/")[2]: row.calls for row in trace.table(by="node")}
    assert calls["ne"] == 17 and calls["remainder"] == 16 and calls["cond"] == 16
    assert sum(row.seconds for row in trace.table(by="op")) == pytest.approx(sum(e.seconds for e in trace.events))
    spans = [span for span in trace.spans if span.depth]
    assert {span.depth for span in spans} == {1} and len(spans) == sum(
        not math.isnan(note.seconds) and trace.inside[path].node.op != "tfnb.cond"
        for one in trace.loops[0].kept for path, note in one.notes.items()
    )  # fmt: skip
    assert all(loop.start <= span.start <= span.end <= loop.end for span in spans)


def test_iterations_of_a_loop_in_a_loop_know_the_iteration_around_them() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = tfnb.map_fn(lambda v: tfnb.while_loop(lambda a: a < 4, lambda a: a * 2, v), x)
    trace, result = traced(graph, y, {x: torch.tensor([1.0, 5.0, 3.0, 0.5])})
    assert result.tolist() == [4.0, 5.0, 6.0, 4.0]
    outer, inner = trace.loops
    assert (outer.total, inner.total, inner.runs, inner.around, outer.depth, inner.depth) == (4, 6, 4, outer.path, 1, 2)
    assert [(one.around.number, one.number) for one in inner.kept] == [
        (0, 0),
        (0, 1),
        (2, 0),
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    assert [numbers for (numbers,) in of_op(inner, trace, "aten.mul")] == [
        (2.0,),
        (4.0,),
        (6.0,),
        (1.0,),
        (2.0,),
        (4.0,),
    ]


def test_of_very_many_iterations_every_nth_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "NOTES", 200)
    with tfnb.record() as graph:
        n = tfnb.placeholder(torch.tensor(3), name="n")
        y = tfnb.while_loop(
            lambda k, s: k < n,
            lambda k, s: (k + 1, tfnb.while_loop(lambda j, t: j < 5, lambda j, t: (j + 1, t + j), (0, s))[1]),
            (0, 0),
        )[1]
    trace, result = traced(graph, y, {n: 300})
    outer, inner = trace.loops
    assert result.item() == 3000 and (outer.total, inner.total, inner.runs) == (300, 1500, 300)
    assert sum(len(one.notes) for loop in trace.loops for one in loop.kept) <= 200
    for loop in trace.loops:
        assert loop.every > 1 and loop.every & (loop.every - 1) == 0
        assert loop.kept and all(one.number % loop.every == 0 for one in loop.kept)
    assert [one.number for one in outer.kept] == list(range(0, 300, outer.every))
    assert {one.around for one in inner.kept} <= set(outer.kept)
    adds = [amount.calls for amount in trace.inside.values() if amount.node.op == "aten.add.Tensor"]
    assert sorted(adds) == [300, 1500, 1500]  # amounts are of all iterations


def test_live_bytes_in_a_loop_are_those_counted_by_hand() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(256), shape=[256], name="x")  # 1,024 bytes
        total, rows = tfnb.scan(lambda c, row: (c + 1, (c + row).exp()), x, tfnb.constant(torch.zeros(3, 256)))
    trace, _ = traced(graph, [total, rows], {x: torch.ones(256)})
    counts = [count // 1024 for _, count in trace.live if count % 1024 < 512]
    # carried: none (x is given), c + 1 from the first iteration on; rows: one more each iteration; c + row, its exp
    assert max(counts) == 7, counts  # at the end the next carried one, three rows, and those stacked
    assert counts[-1] == 4  # the result: one carried value, three rows


def test_results_are_those_of_a_plain_run_with_random_draws_and_in_place_writes() -> None:
    def step(i: object, table: torch.Tensor) -> tuple[object, torch.Tensor]:
        table = table.index_add(0, torch.tensor([1]), torch.rand(1, 3))
        return i + 1, table * tfnb.cond(table.sum() > 3, lambda: torch.rand(()), lambda: torch.ones(()))

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.zeros(4, 3), shape=[4, 3], name="x")
        _, y = tfnb.while_loop(lambda i, t: i < 6, step, (0, x))
    values = []
    for trace in (False, True):
        values.append(tfnb.Session(graph, compile="off").run(y, {x: torch.zeros(4, 3)}, trace=trace))
    assert torch.equal(*values)


def test_an_iteration_that_fails_names_the_line_as_a_plain_run_does() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        i = tfnb.placeholder(torch.tensor(0), name="i")
        y = tfnb.while_loop(lambda k, s: k < 3, lambda k, s: (k + 1, s + x[i + k]), (0, 0.0))[1]
    session, feeds = tfnb.Session(graph, compile="off"), {x: torch.ones(3), i: 7}
    messages = []
    for trace in (False, True):
        with pytest.raises(InvalidArgument) as caught:
            session.run(y, feeds, trace=trace)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "y = tfnb.while_loop" in messages[0] and session.trace is None


def test_branches_in_a_function_that_calls_itself_have_no_iterations() -> None:
    @tfnb.function
    def fall(n: torch.Tensor) -> torch.Tensor:
        return tfnb.cond(n < 1, lambda: n, lambda: fall(n - 1))

    with tfnb.record() as graph:
        n = tfnb.placeholder(torch.tensor(3.0), name="n")
        y = tfnb.while_loop(lambda k, m: k < 2, lambda k, m: (k + 1, fall(m) + k), (0, n))[1]
    trace, result = traced(graph, y, {n: 5.0})
    assert result.item() == 1.0 and [loop.total for loop in trace.loops] == [2]
    assert all(len(path) == 2 for path in trace.inside)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(2.5), (2.5,)),
        (torch.tensor([True, False]), (True, False)),
        (torch.arange(9), (0, 8)),
        (torch.linspace(0, 1, 9, dtype=torch.bfloat16), (0.0, 1.0)),
        (torch.linspace(0, 1, 9).to(torch.float8_e4m3fn), (0.0, 1.0)),
        (torch.zeros(0, 3), ()),
        (torch.ones(5, dtype=torch.complex64), ()),
        (torch.ones(5).to_sparse(), ()),
    ],
)
def test_a_value_in_brief(value: torch.Tensor, expected: tuple[float, ...]) -> None:
    assert seen(value) == ValueSummary(value.dtype, tuple(value.shape), expected)


def test_what_is_not_finite_is_counted() -> None:
    bad = torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0])
    assert seen(bad) == ValueSummary(torch.float32, (5,), (), 1, 2)
    assert seen(torch.tensor([math.inf, 1, 2, 3, 4])) == ValueSummary(torch.float32, (5,), (), 0, 1)
