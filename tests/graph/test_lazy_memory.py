"""Tables of zeros take memory where they were written, and so do their copies. Sizes: more than this machine has."""

from __future__ import annotations

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
