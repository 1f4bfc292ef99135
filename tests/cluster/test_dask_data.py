"""Dask collections as data of `fit`: read from the workers that hold them, exact, and never through the notebook."""

from __future__ import annotations

import gc
import os
import signal
import time

import dask.array as da
import dask.bag as db
import dask.dataframe as frames
import numpy as np
import pandas
import pytest
import torch
from dask.delayed import delayed
from tornado.iostream import IOStream

import tfnb
from tfnb.errors import FeedError, InvalidArgument, ResourceExhausted, ShapeError, UnsupportedDtype
from tfnb.session import default_session
from tfnb.train.batches import batches


def fitted(p, data, **kwargs):
    """Values after a training from the start, and its result."""
    p.reset()
    done = tfnb.fit(p.train, data, watch=[p.loss], seed=3, epochs=2, batch_size=13, **kwargs)
    return p.values(), done


def array(tensor, *chunks):
    return da.from_array(tensor.numpy(), chunks=chunks)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("tasks", [2, 1])
def test_a_sync_fit_on_dask_arrays_is_bitwise_that_on_tensors(connect, problem, tasks, shuffle):
    p = problem()
    x, y = p.feeds
    connect(tasks)
    expected, of_tensors = fitted(p, {x: p.data, y: p.labels}, shuffle=shuffle)
    found, of_chunks = fitted(p, {x: array(p.data, 7, 2), y: array(p.labels, 25)}, shuffle=shuffle)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for mine, theirs in zip(of_chunks.history, of_tensors.history, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12), "means, summed in other portions"


@pytest.mark.slow
def test_every_kind_of_collection_and_tensors_beside_them(connect, problem):
    p = problem()
    x, y = p.feeds
    connect(2)
    expected, _ = fitted(p, {x: p.data, y: p.labels})
    unknown = array(p.data, 9, 4)
    unknown = unknown[da.from_array(np.ones(60, bool), chunks=9)]  # sizes that only its values tell
    assert np.isnan(unknown.shape[0])
    rows = [delayed(row) for row in p.data.numpy()]
    for of_x, of_y in (
        (unknown, p.labels),
        (p.data, db.from_sequence(p.labels.tolist(), npartitions=4)),
        (db.from_delayed([delayed(list)(rows[:31]), delayed(list)(rows[31:])]), array(p.labels, 60)),
        (delayed(p.data.numpy()), array(p.labels.int(), 20)),
    ):
        found, _ = fitted(p, {x: of_x, y: of_y})
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_columns_of_a_dataframe(connect, problem):
    p = problem()
    x, y = p.feeds
    connect(2)
    expected, _ = fitted(p, {x: p.data, y: p.labels})
    columns = {name: p.data[:, at].numpy() for at, name in enumerate("abcd")}
    frame = frames.from_pandas(pandas.DataFrame({**columns, "y": p.labels.numpy()}), npartitions=4)
    found, _ = fitted(p, {x: frame[list("abcd")], y: frame["y"]})
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["chunks", "array", "batches"])
def test_float64_data_of_a_float32_graph_is_rounded_with_one_note(connect, problem, kind):
    p = problem(dtype=torch.float32)
    x, y = p.feeds
    rows, options = p.data.double(), {"shuffle": False}
    connect(2)
    expected = trained(p, {x: p.data, y: p.labels}, **options)
    given = {
        "chunks": {x: array(rows, 13, 4), y: p.labels},
        "array": {x: rows.numpy(), y: p.labels},
        "batches": [{x: rows[at : at + 13].numpy(), y: p.labels[at : at + 13]} for at in range(0, len(rows), 13)],
    }[kind]
    with pytest.warns(UserWarning, match="float64 is fed for") as notes:
        found = trained(p, given, **({} if kind == "batches" else options))
    assert len(notes) == 1
    torch.testing.assert_close(found, expected)
    rows[17, 2] = 1e300
    with pytest.raises(FeedError, match=r"1e\+300 \(at \[(4|17), 2\]\)"):
        trained(p, {x: array(rows, 13, 4) if kind == "chunks" else rows.numpy(), y: p.labels}, **options)


def trained(p, data, **options):
    """Values after one pass from the start."""
    p.reset()
    tfnb.fit(p.train, data, **({} if isinstance(data, list) else {"batch_size": 13}), **options)
    return p.values()


class Sums:
    """Two Variables on two servers; every batch takes its mean row from each."""

    def __init__(self) -> None:
        self.variables = [tfnb.Variable(torch.zeros(200, dtype=torch.float64), name=f"sum{i}") for i in range(2)]
        with tfnb.record("sums") as self.graph:
            self.x = tfnb.placeholder(torch.ones(4, dtype=torch.float64), name="x")
            both = [(self.x.mean().expand(200) * 1.0, variable) for variable in self.variables]
            self.train = tfnb.train.SGD(1.0).apply_gradients(both)

    def sums(self) -> list[float]:
        return [-float(v.storage[0]) for v in self.variables]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_chunks_of_a_killed_worker_are_computed_again_and_no_row_is_lost_or_doubled(connect, mode):
    s = Sums()
    cluster = connect(2)
    tfnb.run(s.train, {s.x: torch.zeros(4, dtype=torch.float64)})
    rows = da.arange(1600, chunks=64, dtype=np.float64)
    data = batches(cluster.in_chunks({s.x: rows}, None), batch_size=4, shuffle=False)
    session = default_session(s.graph)
    done = 0
    for group in session.train(s.train, data.keys, (data.rows, data.total), mode=mode, timeout=None):
        if done == 0:  # a few steps are lent; most chunks are read later
            os.kill(cluster._engine.tasks[1].info["pid"], signal.SIGKILL)
        done += group.steps
    assert done == 400 and cluster.step == 401
    assert cluster.tasks[0] == "task:0"
    assert s.sums() == [1600 * 1599 / 2 / 4] * 2


def test_no_row_comes_through_the_notebook_or_the_scheduler(connect, monkeypatch):
    s = Sums()
    connect(2)
    with tfnb.record("wide"):
        x = tfnb.placeholder(torch.ones(4, 25_000, dtype=torch.float64), name="x")
        train = tfnb.train.SGD(1.0).apply_gradients([(x.mean().expand(200) * 1.0, s.variables[0])])
    received = []
    read = IOStream.read_from_fd

    def counted(stream, buffer):
        count = read(stream, buffer)
        received.append(count or 0)
        return count

    rows = da.random.default_rng(0).random((160, 25_000), chunks=(16, 25_000))
    tfnb.fit(train, {x: rows}, batch_size=8)
    monkeypatch.setattr(IOStream, "read_from_fd", counted)
    tfnb.fit(train, {x: rows}, batch_size=8)
    assert 0 < sum(received) < 0.02 * rows.nbytes, f"{sum(received)} of {rows.nbytes} bytes"


def fails_at(number):
    def chunk(values, block_info=None):
        if block_info[0]["chunk-location"][0] == number:
            raise ZeroDivisionError("no such file")
        return values

    return chunk


def narrower_at(number):
    def chunk(values, block_info=None):
        return values[:, :3] if block_info[0]["chunk-location"][0] == number else values

    return chunk


def test_errors_name_the_chunk(connect, problem):
    p = problem()
    x, y = p.feeds
    connect(2)
    bad = array(p.data, 10, 4).map_blocks(fails_at(3), dtype=np.float64)
    with pytest.raises(InvalidArgument, match=r"data for x: .*chunk 3 of 6 \(.*ZeroDivisionError: no such file"):
        fitted(p, {x: bad, y: p.labels})
    with pytest.raises(ShapeError, match="60 rows for x and 59 rows for y"):
        fitted(p, {x: array(p.data, 10, 4), y: array(p.labels[:59], 10)})
    with pytest.raises(UnsupportedDtype, match=r"data for y: chunk 0 of 6: torch has no dtype <U1"):
        fitted(p, {x: p.data, y: da.from_array(np.array(["a"] * 60), chunks=10)})
    ragged = db.from_sequence([[1.0], [1.0, 2.0]], npartitions=1)
    with pytest.raises(InvalidArgument, match=r"data for x: chunk 0 of 1: list has no rows of one shape"):
        fitted(p, {x: ragged, y: p.labels})
    other = array(p.data, 30, 4).map_blocks(narrower_at(1), dtype=np.float64)
    with pytest.raises(ShapeError, match=r"chunk 0 has float64\[30, 4\], and chunk 1 has float64\[30, 3\]"):
        fitted(p, {x: other, y: p.labels})
    with pytest.raises(ShapeError, match="no rows"):
        fitted(p, {x: array(p.data[:0], 1, 4), y: p.labels})
    assert all(torch.equal(a, b) for a, b in zip(p.values(), p.start, strict=True))


def test_a_step_that_the_notebook_leads_takes_chunks_too(connect):
    total = tfnb.Variable(torch.zeros((), dtype=torch.float64), name="total")
    data = torch.arange(60, dtype=torch.float64)
    with tfnb.record("led"):
        x = tfnb.placeholder(data[:4], name="x")
        train = tfnb.train.SGD(1.0).apply_gradients([(x.mean() * 1.0, total)])
    connect(2)
    # the value after a step is one that no task has
    result = tfnb.fit(train, {x: array(data, 7)}, batch_size=20, shuffle=False, watch={"total": total})
    assert [point["total"] for point in result.curve] == [-9.5, -39.0, -88.5]


def test_workers_forget_the_chunks_after_a_training(connect, problem, dask):
    p = problem()
    x, y = p.feeds
    connect(2)
    fitted(p, {x: array(p.data, 7, 4), y: array(p.labels, 30)})
    end = time.monotonic() + 60
    while time.monotonic() < end:
        gc.collect()  # what cycles of earlier tests hold
        left = [key for keys in dask.has_what().values() for key in keys if not str(key).startswith("tfnb-")]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(left)


def test_in_asynchronous_mode_whole_chunks_are_shuffled_and_each_row_counts_once_in_an_epoch(connect, dask):
    s = Sums()
    cluster = connect(2)
    homes = [member.peer.addr for member in cluster._engine.tasks]
    rows = dask.persist(da.arange(8000, chunks=1000, dtype=np.float64), workers=homes)
    done = tfnb.fit(s.train, {s.x: rows}, batch_size=64, epochs=2, mode="async")
    first, last = (entry["step"] for entry in done.history)
    assert 125 <= first < 250 and last == done.steps == 250, "a task may be in the next epoch already"
    assert s.sums() == [2 * 8000 * 7999 / 2 / 64] * 2


@pytest.mark.parametrize("options", [{}, {"backup": 1}], ids=["sync", "backup"])
def test_shuffled_steps_that_need_more_chunks_than_a_task_keeps(connect, options):
    """Rows of a shuffled step lie in nearly all chunks; the error says so, and its advice is sound."""
    s = Sums()
    cluster = connect(2)

    def limit(dask_worker):
        for actor in dask_worker.state.actors.values():
            actor.task.room = 4 * 64 * 8

    cluster.client.run(limit, workers=[member.peer.addr for member in cluster._engine.tasks])
    data = {s.x: da.arange(1600, chunks=64, dtype=np.float64)}
    text = r"take rows of \d+ chunks with \d+ bytes, and a task keeps 2048 bytes of them: use mode=\"async\""
    with pytest.raises(ResourceExhausted, match=text):
        tfnb.fit(s.train, data, batch_size=40, **options)
    assert cluster.step == 0 and s.sums() == [0.0, 0.0]
    assert tfnb.fit(s.train, data, batch_size=40, mode="async").steps == 40
    assert s.sums() == pytest.approx([1600 * 1599 / 2 / 40] * 2, rel=1e-12)
