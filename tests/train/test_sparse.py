"""Optimizers on row-sparse gradients against the dense algorithms of torch.optim (semantics S-106, S-107)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb import train
from tfnb.errors import InvalidArgument
from tfnb.graph import lazy_memory

ROWS, WIDTH = 13, 5
EXACT = {
    "SGD": (train.SGD, torch.optim.SGD, {"lr": 0.1}),
    "SGD maximize": (train.SGD, torch.optim.SGD, {"lr": 0.01, "maximize": True}),
    "SGD decay": (train.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD dampening": (train.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Momentum": (train.Momentum, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (train.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "Adagrad decay": (train.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}),
    "RMSProp": (train.RMSProp, torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adam": (train.Adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (train.AdamW, torch.optim.AdamW, {"lr": 0.01}),
}
ROWS_ONLY = {"SGD", "SGD maximize", "Adagrad"}  # a row without gradient stays as it is


def table():
    torch.manual_seed(0)
    return nn.Embedding(ROWS, WIDTH, dtype=torch.float64)


def recorded(model, optimizer, dense=False):
    """A placeholder of row numbers, and a step that lowers a loss of those rows."""
    with tfnb.record():
        i = tfnb.placeholder(torch.tensor([1, 1, 3]))
        pairs = optimizer.compute_gradients((model(i) - 1).square().mean(1).sum())
        if dense:
            pairs = [(grad.to_dense(), variable) for grad, variable in pairs]
        step = optimizer.apply_gradients(pairs)
    return i, step


def words(number, rows=6, below=ROWS):
    return torch.randint(0, below, (rows,), generator=torch.Generator().manual_seed(number))


def densified(graph):
    return [node.name for node in graph.nodes if "densified" in node.tags]


@pytest.mark.parametrize("name", EXACT)
def test_60_exact_steps_are_bitwise_the_dense_ones_and_follow_torch(name):
    make, torch_make, arguments = EXACT[name]
    model, same, twin = (table() for _ in range(3))
    i, step = recorded(model, make(**arguments))
    j, dense = recorded(same, make(**arguments), dense=True)
    optimizer = torch_make(twin.parameters(), **arguments)
    for number in range(60):
        rows = words(number, 6 if number % 5 else 1)
        tfnb.run(step, {i: rows})
        tfnb.run(dense, {j: rows})
        optimizer.zero_grad()
        (twin(rows) - 1).square().mean(1).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, same.weight)
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-6)
    assert (densified(i.graph) == []) is (name in ROWS_ONLY)


@pytest.mark.parametrize("name", EXACT)
def test_lazy_equals_exact_where_every_row_is_touched(name):
    make, _, arguments = EXACT[name]
    model, twin = table(), table()
    i, lazy = recorded(model, make(**arguments, sparse="lazy"))
    j, exact = recorded(twin, make(**arguments))
    for number in range(20):
        rows = torch.cat([torch.arange(ROWS).roll(number), words(number)])
        tfnb.run(lazy, {i: rows})
        tfnb.run(exact, {j: rows})
    assert torch.equal(model.weight, twin.weight)
    assert densified(i.graph) == []


@pytest.mark.parametrize("name", EXACT)
def test_lazy_changes_touched_rows_and_their_slots_only(name):
    make, _, arguments = EXACT[name]
    model, optimizer = table(), make(**arguments, sparse="lazy")
    i, step = recorded(model, optimizer)
    tfnb.run(step, {i: torch.arange(ROWS)})
    slots = {k: v for k, v in optimizer.slots(model.weight).items() if v.shape}
    before = [model.weight.detach().clone(), *(v.value() for v in slots.values())]
    tfnb.run(step, {i: torch.tensor([2, 7, 2])})
    after = [model.weight.detach(), *(v.value() for v in slots.values())]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {2, 7}
    assert (before[0] != after[0]).any(1).sum() == 2
    if "step" in optimizer.slots(model.weight):
        assert optimizer.slots(model.weight)["step"].value() == 2


@pytest.mark.parametrize("padding", [None, 2])
def test_lazy_adam_is_torchs_sparse_adam(padding):
    """A padding row and its slots it leaves alone."""
    options = {"padding_idx": padding, "sparse": True, "dtype": torch.float64}
    model, twin = (nn.Embedding(ROWS, WIDTH, **options) for _ in range(2))
    with torch.no_grad():
        model.weight[2] = 1.5
    twin.load_state_dict(model.state_dict())
    rule = train.LazyAdam(0.01)
    i, step = recorded(model, rule)
    optimizer = torch.optim.SparseAdam(twin.parameters(), lr=0.01)
    for number in range(30):
        rows = torch.cat([words(number), torch.tensor([2])])
        tfnb.run(step, {i: rows})
        optimizer.zero_grad()
        (twin(rows) - 1).square().mean(1).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about checks of sparse tensors
            optimizer.step()
    # torch adds eps before it takes out the bias of the second moment
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-5, atol=1e-5)
    if padding is not None:
        assert model.weight[2].tolist() == [1.5] * WIDTH
        assert not rule.slots(model.weight)["exp_avg"].value()[2].any()


def test_duplicates_update_like_their_sum():
    w = tfnb.Variable(torch.ones(3, 1), name="w")
    with tfnb.record():
        rows = tfnb.IndexedSlices(tfnb.constant(torch.ones(2, 1)), tfnb.constant(torch.tensor([1, 1])), (3, 1))
        step = train.Adagrad(1.0, initial_accumulator_value=0.1).apply_gradients([(rows, w)])
    tfnb.run(step)
    torch.testing.assert_close(w.value(), torch.tensor([[1.0], [0.01227039], [1.0]]), rtol=0, atol=1e-7)


def test_rate_as_a_variable_and_as_a_placeholder():
    model, twin = table(), table()
    rate = tfnb.Variable(torch.tensor(0.1, dtype=torch.float64), name="rate")
    i, step = recorded(model, train.LazyAdam(rate))
    j, fixed = recorded(twin, train.LazyAdam(0.1))
    for number in range(3):
        tfnb.run(step, {i: words(number)})
        tfnb.run(fixed, {j: words(number)})
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-7)


def test_an_exact_pass_over_all_rows_says_what_it_costs():
    i, _ = recorded(table(), train.Adam(0.1))
    cost = f"embedding.weight [{ROWS}, {WIDTH}] becomes dense, {8 * ROWS * WIDTH} bytes"
    said = [note for note in i.graph.notes if "Adam step renews every row" in note]
    assert len(said) == 1
    assert cost.partition(".")[2] in said[0]
    assert "sparse='lazy'" in said[0]


class Halving(train.Optimizer):
    """A user's rule, which knows tensors only."""

    def update(self, w, grad, slots, lr):
        return w - lr * grad / 2, slots


class Signed(train.SGD):
    """A user's change to a rule that takes rows."""

    def update(self, w, grad, slots, lr):
        return super().update(w, grad.sign(), slots, lr)


@pytest.mark.parametrize("make", [Halving, Signed])
def test_rules_of_users_get_a_dense_gradient_that_is_counted(make):
    model, twin = table(), table()
    i, step = recorded(model, make(0.1))
    tfnb.run(step, {i: torch.tensor([2, 2])})
    (twin(torch.tensor([2, 2])) - 1).square().mean(1).sum().backward()
    grad = twin.weight.grad / 2 if make is Halving else twin.weight.grad.sign()
    torch.testing.assert_close(model.weight, twin.weight - 0.1 * grad)
    assert len(densified(i.graph)) == 1


def test_unknown_way_is_refused():
    with pytest.raises(InvalidArgument, match="exact, lazy"):
        train.Adam(0.1, sparse="both")


def test_row_outside_of_the_table_writes_nothing():
    w, other = tfnb.Variable(torch.ones(3, 1), name="w"), tfnb.Variable(torch.ones(2), name="other")
    with tfnb.record():
        indices = tfnb.placeholder(torch.tensor([1, 1]))
        rows = tfnb.IndexedSlices(tfnb.constant(torch.ones(2, 1)), indices, (3, 1))
        step = train.SGD(1.0).apply_gradients([(tfnb.constant(torch.ones(2)), other), (rows, w)])
    with pytest.raises(InvalidArgument, match="row 3 is outside of a table of 3 rows"):
        tfnb.run(step, {indices: torch.tensor([0, 3])})
    assert w.value().flatten().tolist() == [1.0, 1.0, 1.0]
    assert other.value().tolist() == [1.0, 1.0]


def test_a_step_on_a_large_table_is_in_place_and_makes_nothing_of_its_size():
    model = nn.Embedding(200_000, 4)
    optimizer = train.LazyAdam(0.1)
    with tfnb.record() as graph:
        i = tfnb.placeholder(torch.tensor([1, 1, 3]))
        step = optimizer.minimize(model(i).square().sum())
    tfnb.run(step, {i: torch.tensor([1, 5])})
    memory = model.weight.data_ptr()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        tfnb.run(step, {i: torch.tensor([1, 5, 199_999])})
    assert model.weight.data_ptr() == memory
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 100_000  # the table is 3 200 000 bytes
    assert densified(graph) == []


def test_two_tables_of_one_rule_are_one_update():
    first, second = nn.Embedding(9, 3), nn.Embedding(7, 2)
    twins = nn.Embedding(9, 3), nn.Embedding(7, 2)
    for twin, model in zip(twins, (first, second), strict=True):
        twin.load_state_dict(model.state_dict())
    with tfnb.record():
        i = tfnb.placeholder(torch.tensor([1, 1, 3]))
        step = train.SGD(0.1).minimize(F.normalize(first(i)).sum() + second(i).square().sum())
    tfnb.run(step, {i: torch.tensor([2, 6, 2])})
    rows = torch.tensor([2, 6, 2])
    (F.normalize(twins[0](rows)).sum() + twins[1](rows).square().sum()).backward()
    for twin, model in zip(twins, (first, second), strict=True):
        torch.testing.assert_close(model.weight, twin.weight - 0.1 * twin.weight.grad)


def test_fit_trains_a_table_like_torch():
    model, twin = table(), table()
    data = words(0, 60)
    i, step = recorded(model, train.Adagrad(0.1))
    tfnb.fit(step, {i: data}, epochs=2, batch_size=8, shuffle=False)
    optimizer = torch.optim.Adagrad(twin.parameters(), lr=0.1)
    for batch in (*data.split(8), *data.split(8)):
        optimizer.zero_grad()
        (twin(batch) - 1).square().mean(1).sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", [train.Adagrad, train.LazyAdam, train.RMSProp])
def test_slots_of_a_table_of_zeros_take_memory_where_they_are_written(optimizer: Any) -> None:
    table = tfnb.Variable(0.0, shape=(1 << 18, 64), name="table")
    with tfnb.record():
        ids = tfnb.placeholder(torch.tensor([3, 5]), name="ids")
        rule = optimizer(0.1)
        step = rule.minimize((F.embedding(ids, table) - 1).square().sum())
        slots = [slot for slot in rule.slots(table).values() if slot.shape == table.shape]
    assert step is not None and slots and all(lazy_memory.committed(slot.storage) < 1 << 20 for slot in slots)
