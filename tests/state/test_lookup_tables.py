"""Lookup tables against a dict: static and mutable, at once and in graphs, saved and restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tfnb
from tfnb.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, ShapeError
from tfnb.kernels.tables import EMPTY

keys = st.integers(-(2**62), 2**62) | st.integers(-3, 3)


def test_a_hundred_thousand_keys_are_those_of_a_dict() -> None:
    generator = torch.Generator().manual_seed(0)
    known = torch.randint(-(2**62), 2**62, (100_000,), generator=generator).unique()
    values = torch.randn(len(known), 2, generator=generator)
    table = tfnb.HashTable(known[torch.randperm(len(known), generator=generator)].sort().values, values, 0.5)
    asked = torch.cat([known[::3], known[::7] + 1])
    reference = dict(zip(known.tolist(), values.tolist(), strict=True))
    assert table.lookup(asked).tolist() == [reference.get(key, [0.5, 0.5]) for key in asked.tolist()]
    assert int(table.size()) == len(known)


@given(st.lists(st.tuples(st.booleans(), st.lists(keys, max_size=4)), max_size=8), st.lists(keys, max_size=6))
def test_inserts_and_removes_follow_a_dict(moves: list[tuple[bool, list[int]]], asked: list[int]) -> None:
    table, reference, number = tfnb.MutableHashTable(6, default=-1), dict[int, int](), 0
    for is_insert, some in moves:
        some_keys = torch.tensor(some, dtype=torch.int64)
        if not is_insert:
            table.remove(some_keys)
            for key in some:
                reference.pop(key, None)
            continue
        numbers = [number := number + 1 for _ in some]
        after = reference | dict(zip(some, numbers, strict=True))
        if len(after) > 6:
            with pytest.raises(ResourceExhausted, match=f"capacity of 6 keys and would have {len(after)}"):
                table.insert(some_keys, torch.tensor(numbers, dtype=torch.int64))
        else:
            table.insert(some_keys, torch.tensor(numbers, dtype=torch.int64))
            reference = after
    found = table.lookup(torch.tensor(asked, dtype=torch.int64)).tolist()
    assert found == [reference.get(key, -1) for key in asked]
    known, values = table.export()
    assert dict(zip(known.tolist(), values.tolist(), strict=True)) == reference and known.tolist() == sorted(reference)
    other = tfnb.MutableHashTable(9, default=-1)
    other.insert([5], [5])
    other.load(known, values)
    assert all(map(torch.equal, other.export(), (known, values)))


def graph_of_a_table() -> tuple[tfnb.MutableHashTable, tfnb.Graph, Any, Any]:
    table = tfnb.MutableHashTable(4, default=0.0, name="seen")
    with tfnb.record("tables") as graph:
        k = tfnb.placeholder(torch.tensor([1, 2, 3]), name="k")
        v = tfnb.placeholder(torch.tensor([0.1, 0.2, 0.3]), name="v")
        before = table.lookup(k)
        put = table.insert(k, v)
        after = table.lookup(k)
    return table, graph, put, [before, after]


def inserted_by_runs() -> Callable[[], None]:
    """A table that is written at once and in runs; gives what checks it once its keys are here.

    `tests/cluster/test_here_and_there.py` does it on a cluster.
    """
    table, reference = tfnb.MutableHashTable(8, default=-1, name="inserted"), {100: 1000}
    with tfnb.record("tables"):
        k = tfnb.placeholder(torch.tensor([1, 2]), name="k")
        put, found = table.insert(k, k * 10), table.lookup(k + 1)  # which sees what is put above it
    table.insert([100], [1000])
    for fetched, keys in ((put, [4, 5]), (found, [3, 4]), (found, [7, 99])):
        reference |= {key: key * 10 for key in keys}
        values = tfnb.run(fetched, {k: torch.tensor(keys)})
        assert fetched is put or values.tolist() == [reference.get(key + 1, -1) for key in keys]

    def check() -> None:
        known = sorted(reference)
        assert [t.tolist() for t in table.export()] == [known, [reference[key] for key in known]]

    return check


def test_what_runs_insert_is_found_by_later_runs() -> None:
    inserted_by_runs()()


def test_in_a_graph_reads_see_the_writes_above_them(tmp_path: Path) -> None:
    table, graph, put, found = graph_of_a_table()
    assert int(table.size()) == 0, "recording inserts nothing"
    feeds = {"k": torch.tensor([5, 5]), "v": torch.tensor([1.0, 2.0])}
    before, after = tfnb.run(found, feeds)
    assert (before.tolist(), after.tolist()) == ([0.0, 0.0], [2.0, 2.0])
    session = tfnb.Session(graph)
    session.save(tmp_path / "v")
    table.insert([6], [3.0])
    session.restore(tmp_path / "v")
    assert [t.tolist() for t in table.export()] == [[5], [2.0]]
    with pytest.raises(Exception, match="capacity of 4 keys and would have 6"):
        tfnb.run(put, {"k": torch.arange(10, 15), "v": torch.ones(5)})
    assert int(table.size()) == 1, "nothing changed"


def test_vocabulary_files_and_buckets(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("the\nä\nzebra\n")
    table = tfnb.HashTable.from_file(str(tmp_path / "words.txt"), num_oov_buckets=3)
    assert table.lookup(["zebra", "the", "ä"]).tolist() == [2, 0, 1]
    others = table.lookup([f"word {i}" for i in range(50)])
    assert set(others.tolist()) == {3, 4, 5}
    plain = tfnb.HashTable.from_file(f"file://{tmp_path}/words.txt", default=7)
    assert plain.lookup("none").tolist() == 7
    with tfnb.record():
        words = tfnb.placeholder(tfnb.string_keys(["the", "ä"]))
        numbers = table.lookup(words)
    assert tfnb.run(numbers, {words: tfnb.string_keys(["zebra", "ä", "the"])}).tolist() == [2, 1, 0]


def test_bad_input_says_what_to_do() -> None:
    with pytest.raises(FailedPrecondition, match="key 'a' has two values"):
        tfnb.HashTable(["a", "b", "a"], [1, 2, 3])
    assert int(tfnb.HashTable(["a", "b", "a"], [1, 2, 1]).size()) == 2
    with pytest.raises(ShapeError, match="2 keys need as many values"):
        tfnb.HashTable([1, 2], [1])
    with pytest.raises(InvalidArgument, match=r"int64 keys, these are torch.float32.*string_keys"):
        tfnb.HashTable([1, 2], [1, 2]).lookup(torch.ones(2))
    with pytest.raises(InvalidArgument, match="num_oov_buckets"):
        tfnb.HashTable([1, 2], [0.1, 0.2], num_oov_buckets=2)
    for buckets in (-1, 1.5, True):
        with pytest.raises(InvalidArgument, match="num_oov_buckets is an int"):
            tfnb.HashTable([1, 2], [1, 2], num_oov_buckets=buckets)
    with pytest.raises(InvalidArgument, match="capacity"):
        tfnb.MutableHashTable(0, 1)
    for make in (lambda: tfnb.HashTable([1, EMPTY], [1, 2]), lambda: tfnb.MutableHashTable(2, 1).insert([EMPTY], [1])):
        with pytest.raises(InvalidArgument, match=f"{EMPTY} marks an empty place"):
            make()
    for change in (lambda: tfnb.MutableHashTable(2, 1).insert([1], [1.5]), lambda: tfnb.HashTable([1], [2], 0.5)):
        with pytest.raises(InvalidArgument, match=r"table table takes int64, and was given .*float32: convert it"):
            change()
    with pytest.raises(InvalidArgument, match="values, these are"):
        tfnb.MutableHashTable(2, 1).insert([1], torch.ones(1))
    with pytest.raises(InvalidArgument, match=r"takes strings, and was given 2"):
        tfnb.HashTable(["a", 2], [1, 2])
    assert tfnb.HashTable([1], [2]).lookup([]).tolist() == []


@pytest.mark.parametrize("change", ["insert", "load"])
@pytest.mark.parametrize(("keys", "values"), [([1, 2], [1, 2, 3]), ([1], [[1, 2]]), ([1, 2], [1]), ([[1, 2]], [1, 2])])
@pytest.mark.filterwarnings("ignore:.*the program caught the error")
def test_each_key_has_one_value(change: str, keys: Any, values: Any) -> None:
    table = tfnb.MutableHashTable(4, -1)
    table.insert([7], [9])
    with pytest.raises(ShapeError, match=r"table table: keys of .* need a value each, and these are"):
        getattr(table, change)(keys, values)
    assert table.lookup([7, 1]).tolist() == [9, -1]
    with tfnb.record():
        given = tfnb.placeholder(torch.tensor([1]))
        with pytest.raises(ShapeError, match=r"table_insert failed: keys of \[1\] need a value each"):
            getattr(table, change)([2], given)
        more = tfnb.placeholder(torch.tensor([2, 3]))
        put = getattr(table, change)(more, more + 3)
    tfnb.run(put, {more: torch.tensor([2])})
    assert table.lookup([2]).tolist() == [5]


def test_two_strings_with_one_digest_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfnb.state.lookup_tables._key", len)
    assert tfnb.string_keys(["a", "to", "a"]).tolist() == [1, 2, 1]
    with pytest.raises(InvalidArgument, match="'to' and 'of' have the same 63-bit digest"):
        tfnb.HashTable(["a", "to", "of"], [1, 2, 3])
