"""What stands outside of a recording does not reach into it later, and is not changed by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import FailedPrecondition, Unsupported


def test_a_big_captured_tensor_keeps_its_recorded_value() -> None:
    big = torch.ones(600_000)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2), name="x")
        y = x.sum() * big
        held = big + 1
    assert any("constant of 2.4 MB" in note for note in graph.notes)
    big.zero_()
    with pytest.warns(UserWarning, match="other values"):
        assert tfnb.run([y, held], {x: torch.ones(3)})[0].max() == 3
    assert tfnb.run(held).min() == 2 and held.sample.min() == 2
    with tfnb.record(graph):
        more = held + y
    assert more.sample.min() == 4


def test_slicing_a_big_data_set_in_the_cell_copies_nothing_of_it() -> None:
    data = torch.ones(600_000, 2)
    with tfnb.record() as graph:
        x = tfnb.placeholder(data[:4])
        x.sum(1)
    assert all(node.op != "tfnb.constant" for node in graph.nodes)


def test_parameters_stay_shared_however_big() -> None:
    table = torch.nn.Embedding(200_000, 2)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor([1, 2, 3]))
        y = table(x)
    assert graph.variables[0].storage.data_ptr() == table.weight.data_ptr()
    with torch.no_grad():
        table.weight.fill_(7)
    assert tfnb.run(y, {x: torch.tensor([4, 5])}).tolist() == [[7, 7], [7, 7]]


def data_of_fresh(x: Any) -> list[Any]:
    y, old = x * 2, x.view(-1)
    x.data = y + 1
    x.add_(1)
    return [x, y, old]


def data_of_named(x: Any) -> list[Any]:
    y, old = x * 2, x.view(-1)
    x.data = y
    return [x * 1, y * 1, old * 1]


def data_of_itself(x: Any) -> list[Any]:
    x.data = x.data
    x.add_(1)
    return [x]


def write_to_the_new(x: Any) -> list[Any]:
    y = x * 2
    x.data = y
    x.add_(1)
    return [x, y]


def write_to_the_given(x: Any) -> list[Any]:
    y = x * 2
    x.data = y
    y[0] = 5
    return [x, y]


@pytest.mark.parametrize("program", [data_of_fresh, data_of_named, data_of_itself])
def test_data_gives_other_memory_and_leaves_aliases(program: Any) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2, 3))
        results = program(x * 1)
    fed = torch.arange(6.0).view(2, 3)
    for got, want in zip(tfnb.run(results, {x: fed}), program(fed * 1), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("program", [write_to_the_new, write_to_the_given])
def test_a_write_to_what_data_shares_is_refused_with_the_line(program: Any) -> None:
    with pytest.raises(Unsupported, match=r"by \.data = (.|\n)*test_outside\.py line"), tfnb.record():
        program(tfnb.placeholder(torch.ones(2, 3)) * 1)


def test_a_generator_and_a_seed_are_noted_and_nothing_outside_changes() -> None:
    generator = torch.Generator().manual_seed(3)
    before, state = generator.get_state(), torch.get_rng_state()
    with tfnb.record() as graph:
        a = torch.rand(3, generator=generator)
        torch.manual_seed(5)
        layer = torch.nn.Linear(2, 2)
        b = torch.rand(3)
    assert torch.equal(generator.get_state(), before) and torch.equal(torch.get_rng_state(), state)
    assert [note.split(" does not")[0].split(": ")[1] for note in graph.notes] == ["generator=", "torch.manual_seed"]
    assert all("test_outside.py line" in note for note in graph.notes)
    first, second = tfnb.Session(graph).run([a, b])
    assert torch.equal(a.sample, first) and torch.equal(b.sample, second) and not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(torch.nn.Linear(2, 2).weight, layer.weight)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_is_refused_with_the_line_unless_it_is_disabled(enabled: bool) -> None:
    layer = torch.nn.Linear(3, 1)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.5), torch.amp.GradScaler("cpu", enabled=enabled)

    def record() -> Any:
        with tfnb.record():
            loss = layer(tfnb.placeholder(torch.ones(4, 3), name="x")).sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            step = scaler.step(optimizer)
            scaler.update()
        return step

    if enabled:
        with pytest.raises(Unsupported, match=r"GradScaler\.scale(.|\n)*test_outside\.py line"):
            record()
        return
    step, before = record(), layer.weight.detach().clone()
    tfnb.run(step, {"x": torch.ones(2, 3)})
    torch.testing.assert_close(layer.weight.detach(), before - 1)


def test_tensors_without_elements() -> None:
    nothing = torch.empty(0, 3), torch.zeros(0, 0), torch.empty(0)[:0]
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3))
        y = torch.cat([x, *(each.reshape(0, 3) for each in nothing)]) + nothing[2].sum()
    assert torch.equal(tfnb.run(y, {x: torch.ones(2, 3)}), torch.ones(2, 3))


X = torch.arange(16.0).view(8, 2)
Batches = torch.utils.data.DataLoader


def pairs(**options: Any) -> Batches[Any]:
    return Batches(torch.utils.data.TensorDataset(X, X[:, 0]), **options)


@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": 4, "shuffle": True}, {"batch_size": None}], ids=str
)
def test_a_batch_that_a_loader_makes_in_a_cell_is_data_of_outside(options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="a batch of a DataLoader"), tfnb.record() as graph:
        rows, firsts = next(iter(pairs(**options)))
        total = rows.sum() + firsts.sum()
    assert {node.op for node in graph.nodes} <= {
        "tfnb.constant", "aten.as_strided.default", "aten.select.int", "aten.sum.default", "aten.add.Tensor"
    }  # fmt: skip
    assert len(graph.notes) == 1 and "a batch of a DataLoader" in graph.notes[0] and "feeds=(x, y)" in graph.notes[0]
    assert float(tfnb.run(total)) == float(total.sample) == float(rows.sum() + firsts.sum())
    with tfnb.record() as graph:
        rows, _ = next(iter(pairs(**options)))
        tfnb.placeholder(rows, name="x").sum()
    assert graph.notes == () and [node.op for node in graph.nodes] == ["tfnb.placeholder", "aten.sum.default"]


def test_a_loader_of_recorded_tensors_is_refused_with_what_to_write() -> None:
    with tfnb.record():
        x = tfnb.placeholder(X, shape=X.shape)
        for rows in (x * 2, torch.utils.data.TensorDataset(x * 2)):
            with pytest.raises(FailedPrecondition, match=r"(?s)a DataLoader of .*x\[first : first \+ size\]"):
                next(iter(Batches(rows, batch_size=4)))


class Kept(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that are computed once."""

    def __init__(self) -> None:
        self.rows: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        if i not in self.rows:
            self.rows[i] = X[i] * 2
        return self.rows[i]


@pytest.mark.filterwarnings("ignore:.*a batch of a DataLoader")
def test_a_dataset_that_keeps_its_rows_serves_further_batches_here_and_outside() -> None:
    data = Kept()
    for _ in range(2):
        with tfnb.record():
            first, second = next(iter(Batches(data, batch_size=2))), next(iter(Batches(data, batch_size=4)))
            assert torch.equal(first, second[:2]) and torch.equal(second, 2 * X[:4])
    assert all(type(row) is torch.Tensor for row in data.rows.values())
    assert torch.equal(next(iter(Batches(data, batch_size=4))), 2 * X[:4])


def test_a_loader_with_a_generator_shuffles_as_its_seed_says_and_torch_draws_on_as_ever() -> None:
    def drawn() -> torch.Tensor:
        return next(iter(pairs(batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))))[1]

    outside, before = drawn(), torch.get_rng_state()
    with tfnb.record() as graph:
        assert torch.equal(drawn(), outside) and next(iter(pairs(shuffle=True))) is not None
    assert torch.equal(torch.get_rng_state(), before) and graph.notes == ()


@pytest.mark.slow
def test_the_workers_of_a_loader_know_of_no_recording() -> None:
    with tfnb.record() as graph:
        rows, _ = next(iter(pairs(batch_size=4, num_workers=2)))
        total = rows.sum()
    assert len(graph.nodes) == 2 and float(tfnb.run(total)) == float(X[:4].sum())


class Flipped(torch.utils.data.Dataset[torch.Tensor]):
    """Rows with a number of chance, every other one turned."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> torch.Tensor:
        row = torch.rand(2) + i
        return row.flip(0) if torch.rand(1) < 0.5 else row


@pytest.mark.filterwarnings("ignore:.*Python took the")
def test_each_batch_that_a_loader_makes_draws_numbers_of_its_own() -> None:
    shuffled = torch.utils.data.DataLoader(torch.arange(64), batch_size=16, shuffle=True)
    flipped = torch.utils.data.DataLoader(Flipped(), batch_size=3)
    with tfnb.record() as graph:
        batches = [next(iter(loader)) for loader in (shuffled, shuffled, flipped, flipped)]
        drawn = torch.rand(2)
    assert not any(isinstance(batch, tfnb.Tensor) for batch in batches) and len(graph.nodes) == 1
    assert not torch.equal(batches[0], batches[1]) and not torch.equal(batches[2], batches[3])
    assert not any(torch.equal(row - i, tfnb.run(drawn)) for i, row in enumerate(batches[2]))
