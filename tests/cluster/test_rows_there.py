"""Rows of large tables on servers: a step asks for those that it takes, and the table never travels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tfnb.cluster.tasks.rows_there import LookedUp, RowRequest
from tfnb.cluster.wire import envelope, streams
from tfnb.cluster.wire.messages import Ok
from tfnb.errors import InvalidArgument
from tfnb.placement.lookups import lookups
from tfnb.placement.placement import Piece

ROWS, WIDTH = 4096, 64
CASES = [(1, {}), (2, {}), (2, {"partitions": 3}), (2, {"optimizer": tfnb.train.Adagrad})]


class Words:
    """A table of 2 MB, looked up twice in a step, beside a small weight."""

    def __init__(self, *, partitions: int | None = None, optimizer: Any = None, plain: bool = False) -> None:
        torch.manual_seed(0)
        table = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        weight = torch.randn(WIDTH, dtype=torch.float64) / WIDTH
        self.table = tfnb.Variable(table, name="table", partitions=partitions)
        self.weight = tfnb.Variable(weight, name="weight")
        self.data = torch.randint(ROWS, (40, 5)), torch.randn(40, dtype=torch.float64)
        with tfnb.record("words") as self.graph:
            words = tfnb.placeholder(self.data[0][:4], name="words")
            wanted = tfnb.placeholder(self.data[1][:4], name="wanted")
            held = self.table.read()
            shown = F.embedding(words, held).mean(1) + F.embedding((words[:, 0] * 7 + 1) % ROWS, held)
            found = shown @ self.weight.read() + (held[0, 0] * 0 if plain else 0)
            self.loss = (found - wanted).square().mean()
            self.train = (optimizer or tfnb.train.SGD)(0.01).minimize(self.loss)
        self.feeds = words, wanted

    def fit(self, **options: Any) -> tfnb.RunResult:
        data = dict(zip(self.feeds, self.data, strict=True))
        return tfnb.fit(self.train, data, batch_size=8, watch={"loss": self.loss}, **options)

    def values(self) -> list[torch.Tensor]:
        return [v.value().clone() for v in self.graph.variables]


def moved(dask_worker: Any) -> Counter[str]:
    return envelope.MOVED.copy()


def switched(is_on: bool) -> None:
    streams.is_on = is_on


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("on", [True, False])
def test_training_equals_that_here_and_moves_no_table(connect, dask, case: tuple[int, dict[str, Any]], on) -> None:
    tasks, options = case
    here, there = Words(**options), Words(**options)
    losses = here.fit(epochs=3).history
    connect(tasks)
    tfnb.run(there.loss, dict(zip(there.feeds, (d[:3] for d in there.data), strict=True)))
    before = sum(sum(each.values()) for each in dask.run(moved).values())
    dask.run(switched, on)
    try:
        found = there.fit(epochs=3).history
    finally:
        dask.run(switched, True)
    after = sum(sum(each.values()) for each in dask.run(moved).values())
    assert [entry["loss"] for entry in found] == pytest.approx([entry["loss"] for entry in losses], rel=1e-12)
    for mine, other in zip(there.values(), here.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    size = ROWS * WIDTH * 8
    assert after - before < 8 * size, "tables are made, and come home, now and then; 15 steps move rows only"


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_tasks_on_their_own_take_rows_of_now(connect, mode: str) -> None:
    words = Words()
    connect(2)
    options = {"staleness": 1} if mode == "bounded" else {}
    result = words.fit(epochs=30, mode=mode, **options)
    assert result.steps == 150 and result.history[-1]["loss"] < 0.3 * result.history[0]["loss"]


def test_a_run_takes_rows_too_and_a_wrong_one_is_named(connect) -> None:
    here, there = Words(), Words()
    feeds = [dict(zip(each.feeds, (d[:5] for d in each.data), strict=True)) for each in (here, there)]
    expected = [tfnb.run([here.train, here.loss], feeds[0])[1] for _ in range(3)]
    connect(2)
    assert [tfnb.run([there.train, there.loss], feeds[1])[1] for _ in range(3)] == expected
    assert all(map(torch.equal, there.values(), here.values()))
    with pytest.raises(
        InvalidArgument, match=f"within the {ROWS} rows of the table.*\n.*\n.*test_rows_there"
    ) as caught:
        tfnb.run([there.train, there.loss], {there.feeds[0]: torch.full((2, 5), ROWS), there.feeds[1]: torch.zeros(2)})
    assert caught.value.op == "aten.embedding.default" and caught.value.line
    assert torch.equal(tfnb.run(there.loss, feeds[1]), tfnb.run(there.loss, feeds[1]))


def test_a_table_that_is_needed_whole_is_looked_up_nowhere() -> None:
    rows, whole = Words(), Words(plain=True)
    written = {rows.table.key, whole.table.key}
    found = [
        lookups(each.graph, [each.loss.value], [feed.value for feed in each.feeds], written=written)
        for each in (rows, whole)
    ]
    assert [len(each) for each in found] == [2, 0]
    assert {each.variable for each in found[0]} == {rows.table}
    assert not lookups(rows.graph, [rows.loss.value], [feed.value for feed in rows.feeds]), "it is sent once"


def test_rows_that_index_select_or_random_draws_pick_are_looked_up() -> None:
    table = tfnb.Variable(torch.randn(ROWS, WIDTH, dtype=torch.float64), name="table")
    numbers = tfnb.Variable(torch.randn(1 << 18), name="numbers")
    with tfnb.record() as graph:
        ids = tfnb.placeholder(torch.tensor([1, 2]), name="ids")
        picked = table.read().index_select(0, ids).sum() + numbers.read().index_select(0, ids).sum()
        loss = picked + F.embedding(torch.randint(ROWS, (3,)), table.read()).sum()
        columns = table.read().index_select(1, ids).sum() + table.read().index_select(0, ids[0]).sum()
    written = {table.key, numbers.key}
    found = lookups(graph, [loss.value], [ids.value], written=written)
    assert [each.variable.name for each in found] == ["table", "numbers", "table"]
    assert not lookups(graph, [columns.value], [ids.value], written=written)


def test_a_row_that_is_named_often_travels_once() -> None:
    table, index = torch.randn(10, 3), torch.tensor([[7, 2, 7], [9, 2, 2]], dtype=torch.int32)
    for pieces in ([Piece(0, "t")], [Piece(0, "t", (0, 4)), Piece(1, "t.1", (4, 10))]):
        looked = LookedUp.of([RowRequest.of(index, pieces)], [torch.empty(0, 3)])
        assert sum(len(at) for ask in looked.asks for at in ask.tensors) == 3
        of = {piece.shard: table if piece.rows is None else table[slice(*piece.rows)] for piece in pieces}
        answers = [Ok({}, [of[ask.shard][at] for at in ask.tensors]) for ask in looked.asks]
        (found,) = looked.rows(answers)
        assert torch.equal(found, table[index.long()])
