"""A step in parts, all of them in this process: bit for bit the values of the step in one part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests.over_tasks import MODELS, Model, batch, branch, layers, loop, loop_in_branch, on, sizes, trained
from tfnb.errors import InvalidArgument, NonFinite, TfnbError
from tfnb.execution.dataflow.executor import Dataflow, Here
from tfnb.execution.dataflow.machine import Machine
from tfnb.graph.ops import STRUCTURAL
from tfnb.graph.subgraph import nested
from tfnb.passes.flow.cut import Kind


def both(g: tfnb.Graph, fetches: Any, feeds: dict[Any, Any]) -> tuple[Any, Any]:
    """What a step gives in one part and in several."""
    whole, parts = (tfnb.Session(g, compile="off", executor=executor) for executor in ("auto", "parts"))
    return whole.run(fetches, feeds), parts.run(fetches, feeds)


def program(g: tfnb.Graph, fetches: Any, feeds: dict[Any, Any]) -> Dataflow:
    """The step in parts."""
    found: Dataflow = tfnb.Session(g, compile="off", executor="parts")._prepare(fetches, tuple(feeds)).code.program
    return found


def assert_same(values: tuple[Any, Any]) -> None:
    torch.testing.assert_close(*values, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [5, 9])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_parts_give_the_bits_of_one_part(model: Model, sign: int, rows: int) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 8), shape=("B", 8), name="x")
        y = model(x)
    fed = sign * torch.linspace(0.1, 1, rows * 8).reshape(rows, 8)
    assert_same(both(g, y, {x: fed}))
    assert len(program(g, y, {x: fed}).parts) > 1


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("model", [layers, loop, branch, loop_in_branch], ids=lambda model: model.__name__)
def test_gradients_stand_where_their_forward_nodes_stand(model: Model, order: int) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 8, dtype=torch.float64), shape=("B", 8), name="x")
        y = model(x) if model is not layers else torch.tanh(loop(x) * branch(x))
        for _ in range(order):
            (y,) = tfnb.gradients(y.sum(), [x])
    every = [inner for node in g.nodes for inner in (node, *nested(node)) if inner.op not in STRUCTURAL]
    asked = {node.id: node.device for node in every}
    made = [node for node in every if "gradient" in node.tags and node.device is not None]
    assert made and all(node.device == asked[node.forward] for node in made if asked.get(node.forward))
    for sign in (0.3, -0.2):
        assert_same(both(g, y, {x: torch.full((3, 8), sign, dtype=torch.float64)}))


def states(g: tfnb.Graph, fetches: Any, x: Any, y: Any, executor: str) -> list[torch.Tensor]:
    """Losses of some steps and all Variables then; they are as before afterwards."""
    variables = [node.attrs["variable"] for node in g.nodes if node.op == "tfnb.read"]
    before = [v.value().clone() for v in variables]
    session = tfnb.Session(g, compile="off", executor=executor)
    found = [session.run(fetches, batch(x, y, rows))[0] for rows in (5, 6, 7, 6)]
    found += [v.value().clone() for v in variables]
    for variable, value in zip(variables, before, strict=True):
        variable.set(value)
    return found


def test_a_model_over_two_tasks_trains_bit_for_bit() -> None:
    g, x, y, fetches = trained()
    whole, parts = (states(g, fetches, x, y, executor) for executor in ("auto", "parts"))
    assert_same((parts, whole))
    assert not torch.equal(whole[0], whole[3])  # it learned


OPTIMIZERS = {
    "sgd": lambda: tfnb.train.SGD(0.1), "momentum": lambda: tfnb.train.SGD(0.1, momentum=0.9),
    "adam": lambda: tfnb.train.Adam(0.1),
}  # fmt: skip


def wide(optimizer: str) -> tuple[tfnb.Graph, Any, Any]:
    """A step whose first gradient is a product that is not made: graph, feed, fetches."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(512, 256), torch.nn.Linear(256, 3)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 512), shape=("B", 512), name="x")
        with on(0):
            h = torch.relu(first(x))
        with on(1):
            loss = second(h).square().mean()
        step = OPTIMIZERS[optimizer]().minimize(loss)
    return g, x, [loss, step]


@pytest.mark.parametrize("executor", ["parts", "dataflow"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_are_committed_where_their_variables_lie(optimizer: str, executor: str) -> None:
    found = {}
    for how in ("auto", executor):
        g, x, fetches = wide(optimizer)
        variables = g.contents.variables.values()
        session = tfnb.Session(g, compile="off", executor=how)
        losses = [session.run(fetches, {x: torch.linspace(-1, 1, 512 * n).reshape(n, 512)})[0] for n in (4, 5, 4)]
        found[how] = [*losses, *(variable.value() for variable in variables)]
        if how != "auto":
            code, lain = session._prepare(fetches, (x,)).code.program, [v.storage for v in variables]
            _, pending = code.compute([torch.ones(4, 512)], [v.storage for v in code.variables])
            written = {id(tensor) for update in pending.updates for row in update.rows for tensor in row}
            assert written >= set(map(id, lain)) and not pending.targets
            torch.testing.assert_close([v.value() for v in variables], found[how][3:], rtol=0, atol=0)
    torch.testing.assert_close(found["auto"], found[executor], rtol=0, atol=0)


def test_a_write_of_rows_that_are_not_there_writes_nothing() -> None:
    table, other = torch.zeros(3, 2), torch.zeros(2)
    module = torch.nn.Module()
    module.register_buffer("table", table)
    module.register_buffer("other", other)
    with tfnb.record() as g:
        at = tfnb.placeholder(torch.tensor([0]), shape=("n",), name="at")
        with on(0):
            row = module.other + 1.0
        with on(1):
            module.table.index_add_(0, at, row.expand(at.shape[0], 2))
        module.other.copy_(row)
        writes = tfnb.effects()
    session = tfnb.Session(g, compile="off", executor="parts")
    session.run(writes, {at: torch.tensor([2, 0])})
    assert (table.tolist(), other.tolist()) == ([[1, 1], [0, 0], [1, 1]], [1, 1])
    with pytest.raises(InvalidArgument, match="index 3 is out of bounds"):
        session.run(writes, {at: torch.tensor([0, 3])})
    assert (table.tolist(), other.tolist()) == ([[1, 1], [0, 0], [1, 1]], [1, 1])
    code = session._prepare(writes, (at,)).code.program
    _, pending = code.compute([torch.tensor([1])], [v.storage for v in code.variables])
    assert [len(update.rows) for update in pending.updates] == [1] and len(pending.targets) == 1


def test_what_only_has_to_be_done_does_not_cross() -> None:
    g, x, fetches = wide("adam")
    first, second = program(g, fetches, {x: 0}).parts
    assert [edge.kind for part in (first, second) for edge in part.sends] == [Kind.VALUE, Kind.VALUE]


def test_each_value_crosses_once_for_each_destination() -> None:
    g, x, y, fetches = trained()
    parts = program(g, fetches, {x: 0, y: 0}).parts
    edges = [edge for part in parts for edge in part.sends]
    assert sorted(edges) == sorted(edge for part in parts for edge in part.receives)
    assert len({(edge.port, edge.to) for edge in edges}) == len(edges)
    names = {part.place.number: [flow_name(part, edge) for edge in part.sends] for part in parts}
    assert names[0][0] == "h" and len(names[1]) == 1 and "dropout" in names[1][0]


def flow_name(part: Any, edge: Any) -> str:
    return str(part.flow.ops[edge.port.op].node.name)


def test_of_a_value_whose_sizes_are_wanted_only_these_cross() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 8), shape=("B", 8), name="x")
        with on(0):
            some = torch.masked_select(x, x > 0)
        with on(1):
            y = torch.zeros(some.shape[0], 3) + 1
    fed = torch.tensor([[1.0, -1, 2, 3, -5, 6, 7, -8]])
    assert_same(both(g, [some, y], {x: fed}))
    (edge,) = program(g, [some, y], {x: 0}).parts[0].sends
    assert edge.kind is Kind.SIZE


def test_of_a_feed_a_part_may_want_the_sizes_only() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 8), shape=("B", 8), name="x")
        y = sizes(x)
    first, second = program(g, y, {x: 0}).parts
    assert [*first.feeds.values(), *second.feeds.values()] == [Kind.VALUE, Kind.SIZE]


def test_a_queue_is_used_at_one_place() -> None:
    queue = tfnb.FIFOQueue(4, [torch.float32], [(3,)])
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        with on(0):
            put = queue.enqueue(x * 2)
        with on(1), tfnb.control_dependencies([put]):
            (got,) = queue.dequeue()
            got = got + 1
    value = tfnb.Session(g, executor="parts").run([got, put], {x: torch.ones(3)})[0]
    assert value.tolist() == [3, 3, 3]


def test_requests_of_several_tasks_for_one_queue_are_refused() -> None:
    queue = tfnb.FIFOQueue(4, [torch.float32], [(3,)])
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        with tfnb.device("task:0"):
            put = queue.enqueue(x * 2)
        with tfnb.device("task:1"), tfnb.control_dependencies([put]):
            (got,) = queue.dequeue()
    with pytest.raises(InvalidArgument, match=r"is used at one task in a step.* for 'task:0' .* for 'task:1'"):
        tfnb.Session(g, executor="parts").run([got, put], {x: torch.ones(3)})


def test_branches_that_were_not_taken_send_dead_values() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        y = branch(x)
        with on(1):
            inside = tfnb.cond(x.sum() > 0, lambda: x.exp(), lambda: x)
    assert_same(both(g, [y, inside], {x: -torch.ones(3)}))


def test_an_error_of_one_part_is_the_error_of_the_step() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.eye(3), shape=(3, 3), name="x")
        with on(0):
            y = x * 2
        with on(1):
            z = torch.linalg.cholesky(y)
        with on(0):
            w = z * 2
    with pytest.raises(TfnbError, match="cholesky"):
        tfnb.Session(g, executor="parts").run(w, {x: -torch.ones(3, 3)})


def test_a_checked_or_traced_step_in_parts_is_the_whole_step() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(2), shape=(2,), name="x")
        v = tfnb.Variable(torch.ones(2), name="v")
        with tfnb.device("task:0"):
            h = x - 1
        with tfnb.device("task:1"):
            y = h.log() * v.read()
            done = v.assign(y)
    session = tfnb.Session(g, executor="parts")
    with pytest.raises(NonFinite, match="node log") as caught:
        session.run([y, done], {x: torch.zeros(2)}, check="nan")
    assert "aten.log.default" in str(caught.value)
    assert v.storage.tolist() == [1, 1]
    session.run([y, done], {x: torch.tensor([3.0, 5.0])}, trace=True)
    assert {event.op for event in session.trace.events} >= {"aten.sub.Tensor", "aten.log.default"}
    assert torch.equal(v.storage, torch.tensor([2.0, 4.0]).log())


def test_a_request_without_a_cluster_is_refused_but_for_a_soft_one() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        with tfnb.device("task:1"):
            y = x + 1
        with tfnb.device("task:1", soft=True):
            z = x + 2
    with pytest.raises(InvalidArgument, match="'task:1' of node"):
        tfnb.Session(g).run(y, {x: torch.ones(3)})
    assert tfnb.Session(g).run(z, {x: torch.ones(3)}).tolist() == [3, 3, 3]


class Apart(Here):
    """Messages of one part, while the other one does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, tuple[int, ...]]] = []

    def tell(self, edge: int, to: int, tag: tuple[int, ...], value: Any, dead: tuple[int, int] | None) -> None:
        self.told.append((edge, tag))


def ahead(x: torch.Tensor) -> Any:
    """The second task uses what the first one makes in each iteration, and both count by themselves."""

    def body(carry: Any, row: torch.Tensor) -> Any:
        with on(0):
            made = carry[0] + row
        with on(1):
            return (made, carry[1] * 0.5 + made), ()

    return tfnb.scan(body, (torch.zeros(()), torch.zeros(())), x)[0][1]


def test_a_loop_runs_no_more_than_its_window_ahead_of_another_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfnb.execution.dataflow.machine.WINDOW", 5)
    monkeypatch.setattr("tfnb.execution.dataflow.machine.EACH", 2)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4), shape=("N",), name="x")
        y = ahead(x)
    found = program(g, y, {x: 0})
    peers, arrived = Apart(), list[Any]()
    first = Machine([found.plans[0].root], len(found.found.ends), None, peers, lambda *one: arrived.append(one))
    first.feed(found._start(found.plans[0], [torch.ones(50)], {}, 0))
    first.run()
    sent = {tag[1] for _, tag in peers.told if tag}
    assert sent == set(range(len(sent))) and 5 <= len(sent) <= 7 and not first.is_over
    ((edge, tag),) = peers._wanted
    Here.tell(peers, edge, 0, tag, 3, None)  # the other one has come up to iteration 3
    first.came(*arrived.pop())
    first.run()
    assert 9 <= len({tag[1] for _, tag in peers.told if tag}) <= 11
    assert_same(both(g, y, {x: torch.arange(50.0)}))


@pytest.mark.parametrize(("window", "each"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("model", [loop, loop_in_branch, ahead], ids=lambda model: model.__name__)
def test_small_windows_change_nothing(model: Model, window: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfnb.execution.dataflow.machine.WINDOW", window)
    monkeypatch.setattr("tfnb.execution.dataflow.machine.EACH", each)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(7), shape=("N",), name="x")
        y = model(x)
        (dx,) = tfnb.gradients(y.sum(), [x])
    for sign in (0.1, -0.1):
        assert_same(both(g, [y, dx], {x: sign * torch.arange(9.0)}))
