"""Accumulators of gradients: against plain Python models, in graphs, and what they refuse."""

from __future__ import annotations

import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import tfnb
from tests.state.homes import Here, There
from tests.state.test_queues import until
from tfnb import train
from tfnb.errors import Aborted, DeadlineExceeded, InvalidArgument, ShapeError
from tfnb.graph.queue import Queue
from tfnb.state.queue_machine import Attempt, QueueMachine, give_back
from tfnb.state.queue_operations import outcome

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


# -- against a model ----------------------------------------------------------------------------------------------

Grad = list[tuple[int, int]]  # row and value of each entry


class Model:
    """Lists of gradients and of takes that wait."""

    def __init__(self, kind: str) -> None:
        self.kind, self.step = kind, 0
        self.held: list[Grad] = []
        self.takes: list[tuple[int, int]] = []  # number of the take, and how many gradients it needs
        self.means: dict[int, dict[int, Fraction]] = {}
        self.made_of: dict[int, tuple[list[Grad], int]] = {}  # and the step before

    def apply(self, grad: Grad, step: int) -> bool:
        if step < self.step:
            return False
        self.held.append(grad)
        self.settle()
        return True

    def settle(self) -> None:
        while self.takes and len(self.held) >= self.takes[0][1]:
            number, _ = self.takes.pop(0)
            self.means[number], self.made_of[number] = self.mean(), (self.held, self.step)
            self.held, self.step = [], self.step + 1

    def mean(self) -> dict[int, Fraction]:
        rows = sorted({row for grad in self.held for row, _ in grad})
        total = {row: sum(value for grad in self.held for at, value in grad if at == row) for row in rows}
        having = {row: sum(any(at == row for at, _ in grad) for grad in self.held) for row in rows}
        by = having if self.kind == "per_row" else dict.fromkeys(rows, len(self.held))
        return {row: Fraction(total[row], by[row]) for row in rows}


class Accumulating(Here, RuleBasedStateMachine):
    """The same calls on an accumulator and its model."""

    @initialize(kind=st.sampled_from(["dense", "per_row", "per_step"]), seed=st.integers(0, 99))
    def make(self, kind: str, seed: int) -> None:
        self.model, self.takes = Model(kind), list[Attempt]()
        values, step = (torch.float64, None), (torch.int64, ())
        if kind == "dense":
            self.open(Queue("grads", float("inf"), [values, step], kind="mean"), seed)
        else:
            options = {"rows": 3, "per_row": int(kind == "per_row")}
            parts = [(torch.int64, (None,)), values, step]
            self.open(Queue("grads", float("inf"), parts, kind="sparse_mean", options=options), seed)

    @rule(
        grad=st.lists(st.tuples(st.integers(0, 2), st.integers(-9, 9)), min_size=1, max_size=4), lag=st.integers(-1, 2)
    )
    def apply(self, grad: Grad, lag: int) -> None:
        if self.model.kind == "dense":
            grad = [(row, sum(value for at, value in grad if at == row)) for row in range(3)]
        rows = torch.tensor([row for row, _ in grad])
        values = torch.tensor([[float(value)] for _, value in grad], dtype=torch.float64)
        step = torch.tensor(max(0, self.model.step + lag))
        element = [values, step] if self.model.kind == "dense" else [rows, values, step]
        attempt = self.ask("enqueue", {}, element)
        assert attempt.is_over
        assert [bool(kept) for kept in outcome(self.described, attempt, {})] == [self.model.apply(grad, int(step))]

    @rule(required=st.integers(1, 3))
    def take(self, required: int) -> None:
        self.model.takes.append((len(self.takes), required))
        self.takes.append(self.ask("dequeue", {"required": required}))
        self.model.settle()

    @rule(which=st.integers(0, 99))
    def withdraw(self, which: int) -> None:
        if self.model.takes:
            number, _ = self.model.takes.pop(which % len(self.model.takes))
            self.withdrawn(self.takes[number])
            self.model.settle()

    @rule(ahead=st.integers(0, 2))
    def set_step(self, ahead: int) -> None:
        self.model.step += ahead
        assert self.ask("set_step", {}, [torch.tensor(self.model.step)]).is_over

    @rule()
    def give_back(self) -> None:
        """The last mean that was taken, as by a step that was aborted."""
        if self.model.means and isinstance(self.described.machine, QueueMachine):
            number = max(self.model.means)
            del self.model.means[number]
            grads, before = self.model.made_of[number]
            self.model.held = grads + self.model.held
            self.model.step = before if self.model.step == before + 1 else self.model.step
            give_back([self.takes[number]])
            self.model.settle()

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "described"):
            return
        order = self.held.elements
        assert len(order) == len(self.model.held) and order.step == self.model.step  # type: ignore[attr-defined]
        for number, mean in self.model.means.items():
            assert self.found(self.taken(self.takes[number])[0]) == {row: float(value) for row, value in mean.items()}
        waiting = {number for number, _ in self.model.takes}
        assert all(not self.takes[number].is_over for number in waiting)
        (held,) = order or [None]
        assert (held is None) == (not self.model.held)
        if held is not None:
            assert self.found(held) == {row: float(value) for row, value in self.model.mean().items()}

    def found(self, element: Any) -> dict[int, float]:
        if self.model.kind == "dense":
            return dict(enumerate(element[0].flatten().tolist()))
        return dict(zip(element[0].tolist(), element[1].flatten().tolist(), strict=True))


@pytest.mark.parametrize(
    ("examples", "steps"), [(80, 25), pytest.param(300, 50, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("home", [Here, There])
def test_random_gradients_give_the_means_of_a_plain_model(home: type, examples: int, steps: int) -> None:
    machine = Accumulating if home is Here else type("There", (home, Accumulating), {})
    examples //= 1 if home is Here else 4  # each takes a thread and an event loop
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )


# -- at once ------------------------------------------------------------------------------------------------------


def dense(shape: Any = (2,), name: str = "grads") -> tfnb.ConditionalAccumulator:
    return tfnb.ConditionalAccumulator(torch.float32, shape, name=name)


def rows(sparse_mean: str = "per_step") -> tfnb.SparseConditionalAccumulator:
    return tfnb.SparseConditionalAccumulator(torch.float32, (4, 1), sparse_mean=sparse_mean, name="rows")


def slices(found: dict[int, float]) -> tfnb.IndexedSlices:
    return tfnb.IndexedSlices(torch.tensor([[v] for v in found.values()]), torch.tensor(list(found)), (4, 1))


def test_a_stale_gradient_is_dropped_and_says_so() -> None:
    grads = dense()
    assert grads.apply_grad([1.0, 2.0]) is True
    grads.set_global_step(3)
    assert grads.apply_grad([1.0, 2.0], local_step=2) is False
    assert grads.apply_grad([3.0, 4.0], local_step=torch.tensor(3)) is True
    assert grads.count() == 2 and grads.take_grad(2).tolist() == [2.0, 3.0]
    with pytest.warns(UserWarning, match="at step 4 goes back to step 0"):
        grads.set_global_step(0)
    assert grads.apply_grad([1.0, 2.0]) is True


@pytest.mark.parametrize(("mean", "expected"), [("per_row", {0: 6.0, 2: 6.0}), ("per_step", {0: 6.0, 2: 3.0})])
def test_rows_are_divided_by_those_who_gave_them_or_by_the_gradients_of_the_step(
    mean: str, expected: dict[int, float]
) -> None:
    grads = rows(mean)
    for found in ({0: 4.0, 2: 6.0}, {0: 8.0}):
        assert grads.apply_grad(slices(found))
    taken = grads.take_grad(2)
    assert dict(zip(taken.indices.tolist(), taken.values.flatten().tolist(), strict=True)) == expected
    assert taken.is_distinct and taken.dense_shape == (4, 1)


def test_a_gradient_may_be_written_after_it_was_given() -> None:
    grads, given = dense(), torch.ones(2)
    grads.apply_grad(given)
    grads.apply_grad(given)
    given.zero_()
    assert grads.take_grad(1).tolist() == [1.0, 1.0]


def test_what_does_not_fit_is_refused_and_nothing_is_added() -> None:
    grads, few = dense(name="g"), rows()
    grads.apply_grad([1.0, 2.0])
    with pytest.raises(ShapeError, match=r"component 0 of queue g has shape \[2\]"):
        grads.apply_grad([1.0])
    with pytest.raises(InvalidArgument, match=r"takes torch.float32, and was given torch.float64"):
        grads.apply_grad(torch.ones(2, dtype=torch.float64))
    with pytest.raises(InvalidArgument, match="at least 1, not 0"):
        grads.take_grad(0)
    with pytest.raises(InvalidArgument, match="row 4 is outside of the 4 rows"):
        few.apply_grad(tfnb.IndexedSlices(torch.ones(2, 1), torch.tensor([0, 4]), (4, 1)))
    with pytest.raises(ShapeError, match=r"of shape \[4, 1\], the gradient of \[5, 1\]"):
        few.apply_grad(tfnb.IndexedSlices(torch.ones(1, 1), torch.tensor([0]), (5, 1)))
    with pytest.raises(InvalidArgument, match="takes IndexedSlices, not a Tensor"):
        few.apply_grad(torch.ones(4, 1))
    with pytest.raises(InvalidArgument, match=r"not of torch\.int64"):
        tfnb.ConditionalAccumulator(torch.int64, ())
    with pytest.raises(InvalidArgument, match="'per_step' or 'per_row', not 'sum'"):
        rows("sum")
    assert (grads.count(), few.count()) == (1, 0)


def test_a_mean_that_comes_too_late_takes_nothing() -> None:
    grads = dense(name="late")
    grads.apply_grad([1.0, 2.0])
    with pytest.raises(DeadlineExceeded, match=r"dequeue on queue late did not end within 0.05 s: 1 gradients"):
        grads.take_grad(2, timeout=0.05)
    assert grads.count() == 1 and repr(grads) == "<ConditionalAccumulator late: 1 gradients, open>"
    grads.apply_grad([3.0, 4.0])
    assert grads.take_grad(2).tolist() == [2.0, 3.0]


# -- in graphs ----------------------------------------------------------------------------------------------------


def test_recorded_calls_act_when_they_are_run() -> None:
    grads = dense()
    with tfnb.record("calls"):
        x = tfnb.placeholder(torch.tensor([1.0, 2.0]), shape=(2,), name="x")
        step = tfnb.placeholder(torch.tensor(0), name="step")
        kept = grads.apply_grad(2 * x, step)
        held = grads.count()
        assert kept.sample.item() is True and held.sample.item() == 0
    with tfnb.record("mean"):
        mean = grads.take_grad(2, sample=torch.ones(2))
        goes_on = grads.set_global_step(step.sample + 5)
        assert mean.sample.tolist() == [1.0, 1.0]
    assert grads.count() == 0
    feeds = {x: [1.0, 1.0], step: 0}
    assert tfnb.run([kept, held], feeds) == [True, 1] and tfnb.run(kept, feeds).item() is True
    assert tfnb.run(mean).tolist() == [2.0, 2.0]
    assert tfnb.run(kept, feeds).item() is False  # a mean was taken since
    tfnb.run(goes_on)
    assert tfnb.run(kept, {x: [1.0, 1.0], step: 4}).item() is False
    assert tfnb.run(kept, {x: [1.0, 1.0], step: 5}).item() is True


def test_two_workers_and_a_chief_train_as_one_would() -> None:
    torch.manual_seed(0)
    data, start = torch.randn(20, 2, 4, 3), torch.randn(3)
    weight, grads = tfnb.Variable(start, name="w"), dense((3,))
    with tfnb.record("worker"):
        x = tfnb.placeholder(data[0, 0], name="x")
        step = tfnb.placeholder(torch.tensor(0), name="step")
        (grad,) = tfnb.gradients((x @ weight).square().mean(), [weight])
        push = grads.apply_grad(grad, step)
    with tfnb.record("chief"):
        update = train.SGD(0.1).apply_gradients([(grads.take_grad(2), weight)])

    def work(number: int) -> None:
        for at in range(20):
            barrier.wait(60)
            assert tfnb.run(push, {x: data[at, number], step: at})
            barrier.wait(60)

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    alone = start.clone().requires_grad_()
    for at in range(20):
        barrier.wait(60)
        tfnb.run(update, timeout=60)
        barrier.wait(60)
        (grad,) = torch.autograd.grad((data[at].reshape(8, 3) @ alone).square().mean(), alone)
        alone = (alone - 0.1 * grad).detach().requires_grad_()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(weight.value(), alone.detach())


def test_gradients_of_a_table_stay_rows_from_workers_to_the_optimizer() -> None:
    table, grads = tfnb.Variable(torch.zeros(4, 1), name="table"), rows()
    with tfnb.record("worker"):
        ids = tfnb.placeholder(torch.tensor([0, 1, 1]), name="ids")
        (grad,) = tfnb.gradients(torch.nn.functional.embedding(ids, table.read()).sum(), [table])
        push = grads.apply_grad(grad)
    with tfnb.record("chief") as chief:
        mean = grads.take_grad(2)
        update = train.SGD(1.0).apply_gradients([(mean, table)])
    for given in ([0, 1, 1], [1, 3]):
        assert tfnb.run(push, {ids: torch.tensor(given)})
    tfnb.run(update)
    assert table.value().flatten().tolist() == [-0.5, -1.5, 0.0, -0.5]
    assert not chief.select(tag="densified")


def test_an_aborted_step_gives_its_gradients_back() -> None:
    """The step takes a mean, then waits; another one writes what it read meanwhile."""
    grads, more = dense((), name="g"), tfnb.FIFOQueue(1, torch.float32, (), name="more")
    total = tfnb.Variable(torch.tensor(1.0), name="total")
    with tfnb.record():
        add = total.assign_add(grads.take_grad(1, sample=torch.tensor(0.0)) * more.dequeue() * total)
    grads.apply_grad(torch.tensor(5.0), 0)
    found: list[BaseException] = []

    def learn() -> None:
        try:
            tfnb.run(add, timeout=60)
        except Aborted as error:
            found.append(error)

    thread = threading.Thread(target=learn)
    thread.start()
    until(lambda: more.machine is not None and bool(more.machine.lines["dequeue"]), 60)
    until(lambda: grads.count() == 0, 60)
    total.assign(torch.tensor(7.0))
    more.enqueue(torch.tensor(1.0))
    thread.join(60)
    assert found and grads.count() == 1 and more.size() == 1
    assert grads.apply_grad(torch.tensor(7.0), 0)  # its step is 0 again
    assert tfnb.run(add, timeout=60) == 7.0 + 6.0 * 7.0


def test_a_graph_with_accumulators_is_saved_and_loaded(tmp_path: Path) -> None:
    grads, few = dense(name="g"), rows("per_row")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2), shape=(2,), name="x")
        push, mean = grads.apply_grad(x), grads.take_grad(1)
        taken = few.take_grad(1)
    graph.save(tmp_path / "graph.json")
    again = tfnb.Graph.load(tmp_path / "graph.json")
    assert [node.op for node in again.nodes] == [node.op for node in graph.nodes]
    with tfnb.Session(again) as session:
        assert session.run(push.name, {"x": [2.0, 4.0]})
        assert session.run(mean.name).tolist() == [2.0, 4.0]
    assert grads.count() == 0 and taken.indices.node.op == "tfnb.dequeue"
