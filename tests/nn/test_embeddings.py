"""Look-ups in sharded tables beside `F.embedding` of the assembled table (semantics S-160 to S-163)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument, ShapeError, TfnbError
from tfnb.nn import embedding_lookup

ROWS, WIDTH = 13, 3
IDS = torch.tensor([[7, 7, 0], [12, 4, 7]])


WHOLE = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def shards_of(table: torch.Tensor, count: int, partition: str) -> list[torch.Tensor]:
    """The shards of a table, each by the ids that the specification lists."""
    if partition == "mod":
        return [table[at::count].clone() for at in range(count)]
    lengths = [len(table) // count + (at < len(table) % count) for at in range(count)]
    return [part.clone() for part in table.split(lengths)]


def assembled(shards: list[torch.Tensor], partition: str) -> torch.Tensor:
    """The table of its shards."""
    if partition == "div":
        return torch.cat(shards)
    found = torch.empty(sum(map(len, shards)), *shards[0].shape[1:], dtype=shards[0].dtype)
    for at, shard in enumerate(shards):
        found[at :: len(shards)] = shard
    return found


class Words:
    """A sharded table beside a whole one, each with a loss and a step."""

    def __init__(self, count: int, partition: str, optimizer: Any = tfnb.train.SGD, *, tasks: int = 0) -> None:
        self.partition = partition
        parts = shards_of(WHOLE, count, partition)
        with tfnb.record() as self.graph:
            self.ids = tfnb.placeholder(IDS, name="ids")
            self.shards = [self._variable(shard, at, tasks) for at, shard in enumerate(parts)]
            self.whole = tfnb.Variable(WHOLE, name="whole")
            self.found = embedding_lookup(self.shards, self.ids, partition=partition)
            self.wanted = F.embedding(self.ids, self.whole)
            self.losses = [rows.sin().square().sum() for rows in (self.found, self.wanted)]
            self.steps = [optimizer(0.1).minimize(loss) for loss in self.losses]
            self.gradients = tfnb.gradients(self.losses[0], self.shards)

    def _variable(self, shard: torch.Tensor, at: int, tasks: int) -> tfnb.Variable:
        if not tasks:
            return tfnb.Variable(shard, name=f"shard{at}")
        with tfnb.device(f"task:{at % tasks}", soft=True):
            return tfnb.Variable(shard, name=f"shard{at}")

    def table(self) -> torch.Tensor:
        return assembled([shard.value() for shard in self.shards], self.partition)


@pytest.mark.parametrize("partition", ["mod", "div"])
@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_rows_and_steps_are_bitwise_those_of_the_assembled_table(count: int, partition: str) -> None:
    for optimizer in (tfnb.train.SGD, tfnb.train.Adagrad):
        words = Words(count, partition, optimizer)
        for ids in (IDS, torch.tensor([[1, 1, 1]])):
            found, wanted, *_ = tfnb.run([words.found, words.wanted, *words.steps], {words.ids: ids})
            assert torch.equal(found, wanted) and torch.equal(words.table(), words.whole.value())
        assert not torch.equal(words.table(), WHOLE)


@pytest.mark.parametrize("partition", ["mod", "div"])
def test_gradients_are_rows_of_each_shard_alone(partition: str) -> None:
    words = Words(5, partition)
    assert all(isinstance(each, tfnb.IndexedSlices) for each in words.gradients)
    found = tfnb.run(words.gradients, {words.ids: IDS})
    leaf = WHOLE.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(F.embedding(IDS, leaf).sin().square().sum(), leaf)
    assert torch.equal(assembled([each.to_dense() for each in found], partition), wanted)
    assert sum(len(each.indices) for each in found) == 4, "each distinct id once"


@pytest.mark.parametrize("shape", [(), (4,), (2, 0), (0,), (1, 2, 3)])
def test_ids_have_any_shape_and_any_integer_dtype(shape: tuple[int, ...]) -> None:
    shards = shards_of(WHOLE, 3, "mod")
    for dtype in (torch.int64, torch.int32, torch.uint8):
        ids = torch.randint(0, ROWS, shape).to(dtype)
        assert torch.equal(embedding_lookup(shards, ids), F.embedding(ids.long(), WHOLE))


def test_rows_of_a_table_have_any_shape() -> None:
    for table in (torch.randn(7), torch.randn(7, 2, 3)):
        ids = torch.tensor([[6, 0], [1, 6]])
        assert torch.equal(embedding_lookup(shards_of(table, 3, "div"), ids, partition="div"), table[ids])


def test_shards_numbered_by_row_and_shard() -> None:
    ids = torch.tensor([0, 4, 12, 7])
    numbers = [torch.tensor([[10.0 * p + r] for r in range(3 if p < 3 else 2)]) for p in range(5)]
    found = {rule: embedding_lookup(numbers, ids, partition=rule).flatten().tolist() for rule in ("mod", "div")}
    assert found == {"mod": [0, 40, 22, 21], "div": [0, 11, 41, 21]}


@pytest.mark.parametrize("norm", [0.5, 1.5, 100.0])
def test_rows_are_clipped_with_their_gradient_and_the_table_stays(norm: float) -> None:
    table = WHOLE.clone()
    table[7] = 0
    with tfnb.record():
        shards = [tfnb.Variable(shard, name=f"s{at}") for at, shard in enumerate(shards_of(table, 2, "mod"))]
        ids = tfnb.placeholder(IDS, name="ids")
        rows = embedding_lookup(shards, ids, max_norm=norm)
        gradients = tfnb.gradients(rows.sin().sum(), shards)
    found, slices = tfnb.run([rows, gradients], {ids: IDS})
    leaf = table.clone().requires_grad_()
    taken = leaf[IDS]
    wanted = taken * (norm / taken.norm(dim=-1, keepdim=True).clamp(min=norm))
    (gradient,) = torch.autograd.grad(wanted.sin().sum(), leaf)
    torch.testing.assert_close(found, wanted, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(assembled([s.to_dense() for s in slices], "mod"), gradient, rtol=1e-13, atol=1e-13)
    assert torch.equal(assembled([shard.value() for shard in shards], "mod"), table)
    numbers = embedding_lookup([torch.tensor([3.0, -0.1])], torch.tensor([1, 0]), max_norm=norm)
    assert numbers.tolist() == [pytest.approx(-0.1), min(3.0, norm)]


def test_a_parameter_of_a_module_is_a_table() -> None:
    layer = nn.Embedding(ROWS, WIDTH)
    with tfnb.record():
        ids = tfnb.placeholder(IDS, name="ids")
        rows = embedding_lookup(layer.weight, ids)
        step = tfnb.train.SGD(1.0).minimize(rows.sum())
    before = layer.weight.detach().clone()
    assert torch.equal(tfnb.run([rows, step], {ids: IDS})[0], F.embedding(IDS, before))
    assert (layer.weight != before).any(1).nonzero().flatten().tolist() == [0, 4, 7, 12]


@pytest.mark.parametrize("bad", [-1, ROWS])
def test_an_id_that_the_table_lacks_is_named_with_its_line(bad: int) -> None:
    words = Words(5, "mod")
    text = rf"id {bad} is not within the 13 rows of a table of 5 shards \(shard0, ...\): ids are 0 to 12(.*\n)*.*line"
    with pytest.raises(InvalidArgument, match=text):
        tfnb.run([words.found, words.steps[0]], {words.ids: torch.tensor([[1, bad, 2]])})
    assert torch.equal(words.table(), WHOLE), "nothing is written"
    with pytest.raises(InvalidArgument, match=f"id {bad} is not within the 2 rows of table a Parameter"):
        embedding_lookup(nn.Parameter(torch.ones(2, 1)), torch.tensor([bad]))


@pytest.mark.parametrize(
    ("params", "ids", "options", "kind", "text"),
    [
        ([], IDS, {}, InvalidArgument, "this list is empty"),
        ([torch.ones(3, 2), torch.ones(4, 2)], IDS, {}, ShapeError, r"7 rows in 2 shards are \[4, 3\].*params\[0\]"),
        ([torch.ones(3, 2), torch.ones(3, 4)], IDS, {}, ShapeError, r"each row of shape \[2\].*params\[1\].*\[3, 4\]"),
        ([torch.ones(3), torch.ones(3).double()], IDS, {}, InvalidArgument, r"params\[1\] holds torch.float64"),
        (torch.ones(()), IDS, {}, ShapeError, "fixed number of rows"),
        ([torch.ones(3), 4], IDS, {}, TfnbError, r"params\[1\] takes Tensor or Variable"),
        (torch.ones(3), IDS.float(), {}, InvalidArgument, "ids are integers.*float32"),
        (torch.ones(3), [1, 2], {}, TfnbError, "ids takes Tensor"),
        (torch.ones(3), IDS, {"partition": "range"}, InvalidArgument, "'mod' or 'div', and was given 'range'"),
        (torch.ones(3), IDS, {"max_norm": 0}, InvalidArgument, "above 0, and was given 0"),
        (torch.ones(3), IDS, {"max_norm": "x"}, TfnbError, "max_norm takes"),
    ],
)
def test_wrong_arguments_are_named(params: Any, ids: Any, options: Any, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        embedding_lookup(params, ids, **options)


@pytest.mark.parametrize("partition", ["mod", "div"])
def test_over_tasks_only_row_numbers_rows_and_their_gradients_cross(partition: str) -> None:
    here, there = Words(5, partition), Words(5, partition, tasks=3)
    session = tfnb.Session(there.graph, executor="parts")
    for _ in range(2):
        wanted = tfnb.run([here.losses[0], here.steps[0]], {here.ids: IDS})[0]
        assert torch.equal(session.run([there.losses[0], there.steps[0]], {there.ids: IDS})[0], wanted)
    assert torch.equal(here.table(), there.table())
    program = session._prepare([there.losses[0], there.steps[0]], (there.ids,)).code.program
    assert [str(part.place) for part in program.parts] == ["task:0", "task:1", "task:2"]
    edges = [edge for part in program.parts for edge in part.sends]
    assert len(edges) == 3 * 3, "row numbers, rows and gradients of the three shards on other tasks"
    for edge in edges:
        node = program.flow.ops[edge.port.op].node
        spec = node.outputs[edge.port.index]
        assert not isinstance(spec.shape[0], int) and "B" not in str(spec.shape[0]), (
            f"{spec} is no number of distinct ids"
        )


def test_a_shard_on_a_server_is_looked_up_by_tasks() -> None:
    """A server does updates only, and refuses other nodes that ask for it."""
    with tfnb.record() as graph:
        with tfnb.device("ps:0"):
            shard = tfnb.Variable(WHOLE, name="shard")
        ids = tfnb.placeholder(IDS, name="ids")
        rows = embedding_lookup([shard], ids)
    assert shard.request is not None and rows is not None
    assert all(node.device is None for node in graph.nodes)


def test_a_shard_is_looked_up_where_it_was_read() -> None:
    shard = tfnb.Variable(WHOLE, name="shard")
    with tfnb.record() as graph:
        ids = tfnb.placeholder(IDS, name="ids")
        with tfnb.device("task:1"):
            read = shard.read()
        rows = embedding_lookup([read], ids)
        step = tfnb.train.SGD(0.1).minimize(rows.sum())
    gathers = [node for node in graph.nodes if node.op == "aten.index_select.default"]
    assert [node.device for node in gathers] == ["task:1", None] and step is not None
