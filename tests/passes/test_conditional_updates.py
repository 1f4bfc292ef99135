"""What branches write is written at the commit, in place, only if they were taken: the same bits, all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.execution import lower
from tfnb.graph.ops import HOISTED
from tfnb.passes import conditional_updates

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: tfnb.train.Adam(0.01),
    "sgd": lambda: tfnb.train.SGD(0.1, momentum=0.9),
    "rmsprop": lambda: tfnb.train.RMSProp(0.01),
    "adagrad": lambda: tfnb.train.Adagrad(0.1),
}
BUILT = {
    "adam": lambda ws: torch.optim.Adam(ws, 0.01, fused=True),
    "sgd": lambda ws: torch.optim.SGD(ws, 0.1, momentum=0.9, fused=True),
    "rmsprop": lambda ws: torch.optim.RMSprop(ws, 0.01),
    "adagrad": lambda ws: torch.optim.Adagrad(ws, 0.1, fused=True),
}


def nets() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(1)
    return nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)


class Step:
    """A step that learns, and lets the target take over, only where a flag says so."""

    def __init__(self, kind: str) -> None:
        self.net, self.target = nets()
        optimizer = OPTIMIZERS[kind]()
        net, target = self.net, self.target

        def learn(x: Any) -> Any:
            return optimizer.minimize((net(x) - target(x)).square().mean(), list(net.parameters()))

        def renew() -> Any:
            for kept, new in zip(target.parameters(), net.parameters(), strict=True):
                kept.copy_(new)
            return tfnb.group(*target.parameters())

        with tfnb.record() as self.graph:
            self.learns = tfnb.placeholder(torch.tensor(True), shape=())
            self.renews = tfnb.placeholder(torch.tensor(True), shape=())
            self.x = tfnb.placeholder(torch.ones(4, 3), shape=(4, 3))

            @tfnb.autograph
            def step(learns: Any, renews: Any, x: Any) -> Any:
                if learns:
                    learn(x)
                if renews:
                    renew()
                return tfnb.group(*net.parameters(), *target.parameters())

            self.step = step(self.learns, self.renews, self.x)
        self.feeds = [self.learns, self.renews, self.x]

    @property
    def values(self) -> list[torch.Tensor]:
        return [w.detach().clone() for net in (self.net, self.target) for w in net.parameters()]

    def program(self) -> Any:
        return lower(self.graph, [self.step.value], [f.value for f in self.feeds])


def drawn() -> list[tuple[bool, bool, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    flags = torch.rand(12, 2, generator=generator) < 0.6
    return [(bool(a), bool(b), torch.randn(4, 3, generator=generator)) for a, b in flags]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_conditional_steps_are_torchs(kind: str, executor: str) -> None:
    made = Step(kind)
    call = tfnb.Session(made.graph, compile="off", executor=executor).make_callable(made.step, made.feeds)
    net, target = nets()
    optimizer = BUILT[kind](list(net.parameters()))
    for learns, renews, x in drawn():
        call(torch.tensor(learns), torch.tensor(renews), x)
        if learns:
            optimizer.zero_grad()
            (net(x) - target(x)).square().mean().backward()
            optimizer.step()
        if renews:
            target.load_state_dict(net.state_dict())
        wanted = [w.detach() for each in (net, target) for w in each.parameters()]
        torch.testing.assert_close(made.values, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_both_executors_agree_to_the_last_bit(kind: str) -> None:
    one, other = Step(kind), Step(kind)
    first = tfnb.Session(one.graph, compile="off").make_callable(one.step, one.feeds)
    second = tfnb.Session(other.graph, executor="dataflow").make_callable(other.step, other.feeds)
    for learns, renews, x in drawn():
        first(torch.tensor(learns), torch.tensor(renews), x)
        second(torch.tensor(learns), torch.tensor(renews), x)
        assert all(map(torch.equal, one.values, other.values))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_of_a_branch_are_the_commits(kind: str) -> None:
    program = Step(kind).program()
    assert sum(HOISTED in node.tags for node in program.graph.nodes) == 2
    assert [len(lengths) for _, _, lengths in program.updates] == [2] and len(program.copies) == 2
    assert "clone" not in program.code and all(kind not in inner.code for inner in program.inner)


@pytest.mark.parametrize(("learns", "renews"), [(True, True), (True, False), (False, True), (False, False)])
def test_computing_writes_nothing(learns: bool, renews: bool) -> None:
    made = Step("adam")
    program, before = made.program(), made.values
    storages = [variable.storage for variable in program.variables]
    kept = [storage.clone() for storage in storages]
    _, pending = program.compute([torch.tensor(learns), torch.tensor(renews), torch.ones(4, 3)], storages)
    assert all(map(torch.equal, storages, kept))
    assert (len(pending.updates) == 1) is learns
    program.commit(pending)
    same = [torch.equal(a, b) for a, b in zip(before, made.values, strict=True)]
    assert same == [not learns, not learns, not renews, not renews]


def test_a_step_that_reads_a_snapshot_writes_the_variables() -> None:
    one, other = Step("adam"), Step("adam")
    plain, cut = tfnb.Session(one.graph, compile="off"), tfnb.Session(other.graph, compile="off")
    for flags in drawn():
        for made, session, how in ((one, plain, None), (other, cut, "snapshot")):
            session.run(
                made.step, dict(zip(made.feeds, [*map(torch.tensor, flags[:2]), flags[2]], strict=True)), isolation=how
            )
        assert all(map(torch.equal, one.values, other.values))


def test_an_update_whose_new_value_is_used_stays_in_its_branch() -> None:
    w = tfnb.Variable(torch.ones(3), name="w")
    optimizer = tfnb.train.SGD(0.1)
    with tfnb.record() as graph:
        flag = tfnb.placeholder(torch.tensor(True), shape=())

        @tfnb.autograph
        def step(flag: Any) -> Any:
            if flag:
                optimizer.minimize((w.read() ** 2).sum(), [w])
            return w.read() * 2, tfnb.group(w)

        doubled, done = step(flag)
    values = [doubled.value, done.value]
    assert conditional_updates(graph, values, [flag.value]) is graph
    for taken in (True, False):
        session, before = tfnb.Session(graph, compile="off"), w.value()
        got = session.run([doubled, done], {flag: torch.tensor(taken)})[0]
        assert torch.equal(got, w.value() * 2) and torch.equal(w.value(), before) is not taken


# -- rows ---------------------------------------------------------------------------------------------------------


def memory(kind: torch.dtype = torch.int64) -> tuple[tfnb.Graph, tfnb.Variable, list[Any], Any]:
    """A table of which a row is written, and a branch that reads it then."""
    table = tfnb.Variable(torch.arange(6).to(kind), name="table", trainable=False)
    with tfnb.record() as graph:
        flag = tfnb.placeholder(torch.tensor(True), shape=())
        slot, value = tfnb.placeholder(torch.tensor(0), shape=()), tfnb.placeholder(torch.tensor(0), shape=())
        rows = tfnb.placeholder(torch.tensor([0, 1]), shape=(2,))
        table.scatter_update((slot * 2 + 1).reshape(1), (value * 3).to(kind).reshape(1))
        read = tfnb.cond(flag, lambda: table.read()[rows].sum(), lambda: torch.zeros((), dtype=kind))
        done = tfnb.group(table)
    return graph, table, [flag, slot, value, rows], [read, done]


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_a_branch_reads_the_row_that_was_written(kind: torch.dtype, executor: str) -> None:
    graph, table, feeds, fetches = memory(torch.float32 if kind is torch.bool else kind)
    call = tfnb.Session(graph, compile="off", executor=executor).make_callable(fetches, feeds)
    held = table.value()
    for flag, slot, value in ((True, 0, 5), (False, 1, 7), (True, 2, -3), (True, 0, 1)):
        read, _ = call(torch.tensor(flag), torch.tensor(slot), torch.tensor(value), torch.tensor([1, 3]))
        held[slot * 2 + 1] = value * 3
        assert torch.equal(table.value(), held)
        assert read == (held[1] + held[3] if flag else 0)


def test_a_written_row_is_all_that_is_written() -> None:
    graph, _, feeds, fetches = memory()
    program = lower(graph, [f.value for f in fetches], [f.value for f in feeds])
    assert program.copies == () and [op for op, _, _ in program.updates] == ["aten.index_copy.default"]
    assert "index_copy" not in program.code and "index_copy" in program.inner[0].code
    once = conditional_updates(graph, [f.value for f in fetches], [f.value for f in feeds])
    assert once is not graph
    assert conditional_updates(once, [f.value for f in fetches], [f.value for f in feeds]) is once
