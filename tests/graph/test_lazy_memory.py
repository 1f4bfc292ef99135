"""Tables of zeros take memory where they were written, and so do their copies. Sizes: more than this machine has."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
from tfnb.errors import ResourceExhausted
from tfnb.graph import lazy_memory
from tfnb.state.store import Store

WIDTH = 256
HUGE = 3 * psutil.virtual_memory().total // 2 // (4 * WIDTH)  # rows
MOST = 64 << 20


def rss():
    return psutil.Process().memory_info().rss


def written(count):
    table, at = lazy_memory.zeros((HUGE, WIDTH), torch.float32), torch.randint(HUGE, (count,)).unique()
    table[at] = torch.randn(len(at), WIDTH)
    return table, at


def test_a_table_of_more_than_the_memory_is_copied_and_packed_in_that_of_its_rows():
    table, at = written(500)
    before = rss()
    numbers, rows = lazy_memory.packed(table)
    copy, back = lazy_memory.clone(table), lazy_memory.unpacked(numbers, rows, HUGE)
    assert torch.equal(numbers, at) and torch.equal(rows, table[at])
    for other in (copy, back):
        assert other.shape == table.shape and torch.equal(other[at], table[at]) and not other[at + 1].equal(table[at])
    assert rss() - before < MOST


def test_a_whole_value_replaces_rows_of_before():
    (table, _), (other, at) = written(50), written(60)
    lazy_memory.assign(table, other)
    numbers, rows = lazy_memory.packed(table)
    assert torch.equal(numbers, at) and torch.equal(rows, other[at])


def test_rows_that_were_only_read_are_not_sent():
    table = lazy_memory.zeros((1 << 17, WIDTH), torch.float32)
    table[[5, 70_000]] = 1.0
    assert table.sum() == 2 * WIDTH  # every page is there from now on
    assert lazy_memory.is_table(table) and lazy_memory.packed(table)[0].tolist() == [5, 70_000]


def test_parts_are_joined_in_the_memory_of_their_rows():
    (table, at), before = written(50), rss()
    whole = lazy_memory.joined([table[: HUGE // 3], table[HUGE // 3 :]])
    assert whole.data_ptr() != table.data_ptr() and torch.equal(lazy_memory.packed(whole)[0], at)
    assert torch.equal(whole[at], table[at]) and rss() - before < MOST
    assert lazy_memory.joined([torch.ones(2), torch.zeros(1)]).tolist() == [1, 1, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 3000), st.integers(0, 5), st.data())
def test_packed_rows_of_any_length_and_place(width, length, skip, data):
    if width * (length + skip) > 8 << 20:
        length = (8 << 20) // width - skip
    table = lazy_memory.zeros((length + skip, width), torch.uint8)[skip:]
    at = torch.tensor(sorted(data.draw(st.sets(st.integers(0, length - 1), max_size=20))), dtype=torch.int64)
    table[at, (at * 7) % width] = 3
    numbers, rows = lazy_memory.packed(table)
    assert torch.equal(numbers, at) and torch.equal(rows, table[at])


def test_minus_zero_is_a_value():
    table = torch.zeros(4, 1)
    table[2] = -0.0
    assert lazy_memory.packed(table)[0].tolist() == [2]


def test_memory_of_a_file_and_memory_that_is_full_are_no_tables(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\1" * lazy_memory.LARGE)
    mapped = torch.from_file(str(path), size=lazy_memory.LARGE, dtype=torch.uint8).view(-1, 1024)
    full = torch.ones(lazy_memory.LARGE // 1024, 256)
    for tensor in (mapped, full):
        assert not lazy_memory.is_table(tensor)
        assert torch.equal(lazy_memory.clone(tensor), tensor)
    assert len(lazy_memory.packed(mapped)[0]) == len(mapped)


def test_a_variable_of_a_number_and_a_shape():
    before = rss()
    table = tfnb.Variable(0.0, shape=(HUGE, WIDTH), name="table")
    table.storage[7] = 1.0
    assert rss() - before < MOST and table.shape == (HUGE, WIDTH) and table.dtype == torch.float32
    assert tfnb.Variable(2, shape=(2, 3), dtype=torch.int64).value().tolist() == [[2] * 3] * 2
    small = tfnb.Variable(0.5, shape=(3,))
    small.assign(torch.ones(3))
    small.initialize()
    assert small.value().tolist() == [0.5] * 3


@pytest.mark.slow
def test_whatever_is_done_with_a_variable_takes_the_memory_of_its_rows():
    before, two = rss(), torch.full((2, WIDTH), 2.0)
    v = tfnb.Variable(0.0, shape=(HUGE, WIDTH), lazy_init=True, name="late")
    v.initialize()
    v.initialize()
    v.scatter_update([7, HUGE - 1], two)
    v.scatter_add([7, 7], two)
    v.scatter_sub([9], two[:1])
    v.scatter_mul([7], two[:1])
    new = v.scatter_div([9], -two[:1])
    seen = v.value()
    for value in (new, seen, v.storage):
        assert value.shape == (HUGE, WIDTH)
        assert value[[6, 7, 9, HUGE - 1], 3].tolist() == [0, 12, 1, 2]
    v.storage[7] = 0.0
    assert seen[7, 0] == 12, "it is a copy"
    mean = tfnb.train.ExponentialMovingAverage(0.9).average(v)
    assert mean.value()[9].sum() == WIDTH and v.storage.data_ptr() != mean.storage.data_ptr()
    with tfnb.record("late"):
        out = v.read()[0].sum()
    with tfnb.Session("late") as session:
        session.run(out)
        moment = session.state.moment().copy()
    assert [value.shape for value in moment.values.values()] == [(HUGE, WIDTH)]
    assert rss() - before < MOST


def test_the_first_value_of_a_late_variable_is_its_own():
    for value in (torch.ones(3, 4).T, torch.ones(4, 1).expand(4, 3), torch.ones(4, 3)):
        late = tfnb.Variable(0.0, shape=(4, 3), lazy_init=True)
        late.assign(value)
        assert late.storage.is_contiguous() and late.storage.data_ptr() != value.data_ptr()
        assert torch.equal(late.value(), value)
    late = tfnb.Variable(0.0, shape=(2,), dtype=torch.complex64, lazy_init=True)
    late.assign(torch.tensor([1j, 2]).conj())
    assert not late.storage.is_conj() and late.value().tolist() == [-1j, 2]


def test_the_value_of_a_large_parameter():
    parameter = torch.nn.Parameter(torch.from_numpy(np.zeros((1 << 18, WIDTH), dtype=np.float32)))
    with torch.no_grad():
        parameter[5] = 1.0
    variable = tfnb.Variable.of(parameter, name="p")
    before = rss()
    assert variable.value()[5].sum() == WIDTH and variable.scatter_add([5], torch.ones(1, WIDTH))[5, 0] == 2
    assert parameter[5, 0] == 2 and not variable.value().requires_grad and rss() - before < MOST


def test_what_does_not_fit_is_refused_with_its_bytes():
    with pytest.raises(ResourceExhausted, match=rf"a Variable of one number takes {HUGE * WIDTH * 4} bytes, and \d+"):
        tfnb.Variable(1.0, shape=(HUGE, WIDTH))


def test_a_store_holds_a_table_in_the_memory_of_its_rows():
    (table, at), before = written(100), rss()
    store = Store(budget=1 << 30, is_shared=True)
    store.create({"t": table, "b": torch.zeros(3)})
    assert store.bytes < MOST
    at_work = store.open(["t"], rows=2)["t"]
    at_work[5] = 1.0
    store.publish()
    (seen,) = store.read(["t"])
    assert seen[5].sum() == WIDTH and torch.equal(seen[at], table[at])
    store.assign({"t": table})
    assert store.get("t")[5].sum() == 0 and torch.equal(store.get("t")[at], table[at])
    assert rss() - before < MOST
    store.drop(["t"])
    assert store.bytes == 12


def test_rows_that_are_written_count():
    store = Store()
    store.create({"t": lazy_memory.zeros((HUGE, WIDTH), torch.float32)})
    for start in range(0, 200_000, 20_000):
        store.open(["t"], rows=20_000)["t"][start : start + 20_000] = 1.0
        store.publish()
        assert store.bytes >= (start + 20_000) * WIDTH * 4
    assert store.bytes <= 3 * 200_000 * WIDTH * 4 + 4 * lazy_memory.LARGE


@pytest.mark.slow
def test_the_end_of_a_table_leaves_one_alone_that_has_its_address_by_then():
    old, new = (lazy_memory.zeros((1, lazy_memory.LARGE), torch.uint8) for _ in range(2))
    address = old.data_ptr()
    lazy_memory._made[address] = lazy_memory._made[new.data_ptr()]  # as where other threads make tables
    del old
    gc.collect()
    assert address in lazy_memory._made
