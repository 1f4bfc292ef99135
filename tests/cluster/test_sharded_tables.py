"""Tables in shards on a real cluster: values of one process, and the bytes of row numbers and rows alone (S-162)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfnb
from tests.cluster.conftest import workers
from tests.cluster.test_stage_servers import moved
from tfnb.cluster.driver import Cluster

WIDTH, SHARDS = 64, 2
ROW = 4 * WIDTH  # bytes
ENDS = 2  # each byte is counted where it is sent, and where it arrives


class Words:
    """A table in shards, looked up in each step."""

    def __init__(self, rows: int, ids: torch.Tensor, where: Callable[[int], str] | None = None) -> None:
        table = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
        parts = [table[at::SHARDS].clone() for at in range(SHARDS)]
        with tfnb.record("words") as self.graph:
            self.ids = tfnb.placeholder(ids, name="ids")
            self.shards = []
            for at, part in enumerate(parts):
                with tfnb.device(where(at) if where else None, soft=where is not None):
                    self.shards.append(tfnb.Variable(part, name=f"words{at}"))
            with tfnb.device("task:0" if where else None, soft=where is not None):
                rows_of = tfnb.nn.embedding_lookup(self.shards, self.ids)
                self.loss = rows_of.mean(1).square().mean()
            self.train = tfnb.train.SGD(0.5).minimize(self.loss)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = tfnb.run([self.train, self.loss], {self.ids: ids})[1]
        return loss

    def values(self) -> list[torch.Tensor]:
        return [shard.value().clone() for shard in self.shards]


def batches(rows: int) -> list[torch.Tensor]:
    """Ids with duplicates, and with more distinct ones in the last batch."""
    chance = torch.Generator().manual_seed(2)
    some = torch.randint(0, rows, (30,), generator=chance)
    return [some[torch.randint(0, count, (20, 3), generator=chance)] for count in (10, 10, 30)]


@pytest.fixture
def connected(dask: Any) -> Iterator[Callable[..., Cluster]]:
    """``connected(ps=)``: a cluster of all workers."""
    made: list[Cluster] = []

    def connect(**options: Any) -> Cluster:
        workers(dask, 4)
        made.append(tfnb.connect(dask, timeout=180, **options))
        return made[-1]

    yield connect
    for cluster in made:
        cluster.close()


@pytest.mark.parametrize("rows", [8192, 32768])
def test_servers_send_and_get_the_rows_of_a_step_alone(connected, dask, rows: int) -> None:
    ids = batches(rows)
    here, there = Words(rows, ids[0]), Words(rows, ids[0])

    def fitted(words: Words) -> list[float]:
        """Rows of a batch are divided over the tasks there are."""
        result = tfnb.fit(words.train, {words.ids: ids[2]}, batch_size=8, epochs=2, watch={"loss": words.loss})
        return [entry["loss"] for entry in result.history]

    losses = [here.step(batch) for batch in ids]
    before_fit = here.values()
    history = fitted(here)
    connected(ps=SHARDS)
    for batch, loss in zip(ids, losses, strict=True):
        before = moved(dask)
        assert torch.equal(there.step(batch), loss)
        count = len(batch.unique())
        rest = moved(dask) - before - ENDS * 2 * count * (8 + ROW)  # a look-up, and a gradient
        assert batch is ids[0] or 0 <= rest < 1024, "no row of the table"
    assert all(map(torch.equal, there.values(), before_fit))
    assert fitted(there) == pytest.approx(history, rel=1e-6)
    for mine, other in zip(there.values(), here.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:task.* no stage of this pipeline")  # there are more workers
@pytest.mark.parametrize("rows", [8192, 32768])
def test_stages_that_hold_their_shards_get_row_numbers_and_gradients_and_send_rows(connected, dask, rows: int) -> None:
    """The bytes of more steps, without those of the values that come home at the end of a training."""
    batch = batches(rows)[2]
    here, there = Words(rows, batch), Words(rows, batch, lambda at: f"task:{at}")

    def fitted(words: Words, steps: int, **options: Any) -> float:
        about = {"batch_size": None, "epochs": 1, "watch": {"loss": words.loss}, **options}
        loss: float = tfnb.fit(words.train, [{words.ids: batch}] * steps, **about).history[0]["loss"]
        return loss

    lengths = (1, 2, 10)
    losses, sent = [fitted(here, steps) for steps in lengths], []
    connected(ps="stages")
    for steps, loss in zip(lengths, losses, strict=True):
        before = moved(dask)
        assert fitted(there, steps, mode="pipeline", microbatches=1) == pytest.approx(loss, rel=1e-6)
        sent.append(moved(dask) - before)
    for mine, other in zip(there.values(), here.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    count = sum(int(at) % SHARDS == 1 for at in batch.unique())  # of the other shard nothing travels
    rest = (sent[2] - sent[1]) / (lengths[2] - lengths[1]) - ENDS * count * (8 + ROW + ROW)
    assert 0 <= rest < 1024, "no row of the table"


def test_a_sampled_loss_reads_the_rows_of_its_classes_alone(connected, dask) -> None:
    classes, batch = 16384, 8
    table = torch.randn(classes, WIDTH, generator=torch.Generator().manual_seed(1))
    feeds = {"x": torch.randn(batch, WIDTH), "y": torch.arange(batch)}

    def made() -> list[Any]:
        weights = [tfnb.Variable(table[at::SHARDS].clone(), name=f"w{at}") for at in range(SHARDS)]
        bias = tfnb.Variable(torch.zeros(classes), name="b")  # small: it travels whole
        with tfnb.record("classes"):
            x, y = (tfnb.placeholder(value, shape=value.shape, name=name) for name, value in feeds.items())
            drawn = tfnb.nn.log_uniform_sampler(y.unsqueeze(1), 1, 20, True, classes)
            loss = tfnb.nn.sampled_softmax_loss(weights, bias, y, x, 20, classes, sampled_values=drawn).mean()
            step = tfnb.train.SGD(0.5).minimize(loss)
            ids = torch.cat([y, drawn.sampled_candidates])
        return [step, loss, ids]

    here, there = made(), made()
    found = [tfnb.run(here, feeds) for _ in range(3)]
    connected(ps=SHARDS)
    for at, (_, loss, ids) in enumerate(found):
        before = moved(dask)
        _, same, drawn = tfnb.run(there, feeds)
        assert torch.equal(same, loss) and torch.equal(drawn, ids)
        count = len(ids.unique())
        rest = moved(dask) - before - ENDS * (2 * count * (8 + ROW) + 4 * classes + count * (8 + 4))
        assert at == 0 or 0 <= rest < 4096, "inputs, and no row that is not used"
    assert numbers_off() == [0, 0, 0], "each task reads the rows that it draws"


def numbers_off() -> list[float]:
    """How far rows that hold their own number are from the drawn ids, in each epoch of a training over all tasks."""
    rows = 1 << 19
    shards = [torch.arange(at, rows, SHARDS, dtype=torch.float64).unsqueeze(1) for at in range(SHARDS)]
    with tfnb.record("numbers"):
        y = tfnb.placeholder(torch.arange(4), shape=("B",), name="y")
        weights = [tfnb.Variable(shard, name=f"n{at}") for at, shard in enumerate(shards)]
        ids = tfnb.nn.log_uniform_sampler(y.unsqueeze(1), 1, 50, True, rows).sampled_candidates
        found = tfnb.nn.embedding_lookup(weights, ids).squeeze(1)
        off = (found - ids).abs().max() + 0 * y.sum()
        step = tfnb.train.SGD(0.0).minimize(found.mean() * (y + 1.0).mean())
    result = tfnb.fit(step, {y: torch.arange(32)}, batch_size=8, epochs=3, watch={"off": off})
    return [entry["off"] for entry in result.history]
