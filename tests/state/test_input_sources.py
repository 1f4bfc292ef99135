"""Sources with a position: iterables, DataLoaders and files; into `fit` and queues; taken up again after a restore."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask.array as arrays
import dask.bag as bags
import dask.dataframe as frames
import fsspec
import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import tfnb
from tests.state.test_queues import until
from tfnb.errors import DataLoss, InvalidArgument, NotFound, OutOfRange
from tfnb.state.input_sources import Source


def plain(element: Any) -> Any:
    if isinstance(element, torch.Tensor):
        return element.tolist()
    return [plain(e) for e in element] if isinstance(element, (list, tuple)) else element


def assert_taken_up_anywhere(make: Any, passes: int = 2) -> None:
    """From every position the rest is that of a run without a break; positions are JSON."""
    whole, places = [], []
    source = make()
    for _ in range(passes):
        places.append((len(whole), source.position))
        for element in source:
            whole.append(plain(element))
            places.append((len(whole), source.position))
        source.rewind()
    for done, position in places:
        again, found = make(), []
        again.seek(json.loads(json.dumps(position)))
        while again.position["epoch"] < passes:
            found += [plain(element) for element in again]
            again.rewind()
        assert found == whole[done:], position


@given(st.lists(st.integers(), max_size=7), st.integers(1, 4))
def test_a_list_in_batches_is_taken_up_anywhere(numbers: list[int], size: int) -> None:
    numbers = [n % 1000 for n in numbers]
    assert_taken_up_anywhere(lambda: Source(numbers).map(lambda n: n + 1).batch(size))


@pytest.mark.parametrize("own", [False, True])
def test_a_shuffled_loader_is_taken_up_anywhere_in_its_order(own: bool) -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)

    def make() -> Source:
        return Source(DataLoader(data, 3, shuffle=True, generator=torch.Generator() if own else None), seed=5)

    state = torch.get_rng_state()
    assert_taken_up_anywhere(make)
    assert torch.equal(torch.get_rng_state(), state)
    first, second = ([plain(e) for e in s] for s in [make()] * 2)
    assert first != second, "each pass has an order of its own"


@given(st.lists(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))), min_size=1, max_size=3))
def test_lines_are_those_of_the_files_and_are_taken_up_anywhere(files: list[list[str]]) -> None:
    for number, lines in enumerate(files):
        with fsspec.open(f"memory://lines/{number}.txt", "wb") as file:
            file.write("".join(f"{line}\n" for line in ["head", *lines]).encode())
    urls = [f"memory://lines/{number}.txt" for number in range(len(files))]
    assert list(tfnb.TextLineReader(urls, skip_header_lines=1)) == [line for lines in files for line in lines]
    assert_taken_up_anywhere(lambda: tfnb.TextLineReader(urls, skip_header_lines=1))


def test_compressed_files_are_taken_up_anywhere(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("one\ntwo\r\nthree")
    assert list(tfnb.TextLineReader(str(tmp_path / "*.gz"))) == ["one", "two", "three"]
    assert_taken_up_anywhere(lambda: tfnb.TextLineReader(str(tmp_path / "a.txt.gz")))


def test_records_without_header_and_footer(tmp_path: Path) -> None:
    for name, content in (("a.bin", b"H\x01\x02\x03\x04F"), ("b.bin", b"H\x05\x06F"), ("c.bin", b"HF")):
        (tmp_path / name).write_bytes(content)

    def make() -> Source:
        return tfnb.FixedLengthRecordReader(f"file://{tmp_path}/*.bin", 2, header_bytes=1, footer_bytes=1)

    assert plain(list(make())) == [[1, 2], [3, 4], [5, 6]]
    assert_taken_up_anywhere(make)


def test_whole_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x01\x02")
    (tmp_path / "b").write_bytes(b"")
    found = [(Path(url).name, content.tolist()) for url, content in tfnb.WholeFileReader(str(tmp_path / "*"))]
    assert found == [("a", [1, 2]), ("b", [])]
    assert_taken_up_anywhere(lambda: tfnb.WholeFileReader(str(tmp_path / "*")))


def test_the_end_is_out_of_range_and_a_failure_is_not_the_end(tmp_path: Path) -> None:
    source = Source([1], name="one")
    source.read()
    for _ in range(2):
        with pytest.raises(OutOfRange, match="one is at its end, after 1 elements"):
            source.read()
    (tmp_path / "a.bin").write_bytes(b"\x01\x02\x03")
    records = tfnb.FixedLengthRecordReader(str(tmp_path / "a.bin"), 2)
    records.read()
    for _ in range(2):
        with pytest.raises(DataLoss, match=r"a\.bin ends within a record: 1 of 2 bytes at byte 2"):
            records.read()
    (tmp_path / "a.bin").write_bytes(b"\x01\x02\x03\x04")
    assert records.read().tolist() == [3, 4]


def test_bad_input_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"iterated only once.*pass a list"):
        Source(iter([1]))
    with pytest.raises(InvalidArgument, match="a position has epoch, count"):
        Source([1]).seek({"file": 1})
    for wrong in ("a", -1, 1.5):
        with pytest.raises(InvalidArgument, match="a position has numbers of at least 0"):
            Source([1]).seek({"epoch": 0, "count": wrong})  # type: ignore[dict-item]
    with pytest.raises(NotFound, match="no file is at"):
        tfnb.TextLineReader(str(tmp_path / "none.txt")).read()
    (tmp_path / "bad.txt").write_bytes(b"good\n\xff\n")
    lines = tfnb.TextLineReader(str(tmp_path / "bad.txt"))
    lines.read()
    with pytest.raises(DataLoss, match=r"bad\.txt, byte 5"):
        lines.read()
    shorter = Source([1, 2])
    shorter.seek({"epoch": 0, "count": 3})
    with pytest.raises(InvalidArgument, match="has 2 elements now"):
        shorter.read()


@pytest.mark.parametrize(
    "arguments",
    [{"skip_header_lines": -1}, {"skip_header_lines": 1.5}, {"encoding": "utf-16"}, {"encoding": "none such"}],
)
def test_lines_that_cannot_be_read_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="skip_header_lines is at least 0, and encoding one"):
        tfnb.TextLineReader("memory://lines.txt", **arguments)


@pytest.mark.parametrize(
    "make", [tfnb.TextLineReader, tfnb.WholeFileReader, partial(tfnb.FixedLengthRecordReader, record_bytes=2)]
)
@pytest.mark.parametrize("keep", [3, 60])
def test_a_damaged_compressed_file_is_named(make: Any, keep: int) -> None:
    whole = gzip.compress(bytes(range(256)) * 8)
    with fsspec.open("memory://damaged/a.gz", "wb") as file:
        file.write(whole[:keep] if keep > 3 else b"none" + whole)
    with pytest.raises(DataLoss, match=r"damaged/a\.gz is no whole gzip file"):
        list(make("memory://damaged/a.gz", **({"encoding": "latin-1"} if make is tfnb.TextLineReader else {})))


@pytest.mark.parametrize("content", [b"", b"12345"])
def test_a_file_that_is_shorter_than_its_header_is_no_empty_file(content: bytes) -> None:
    with fsspec.open("memory://headers/a.bin", "wb") as file:
        file.write(content)
    assert list(tfnb.FixedLengthRecordReader("memory://headers/a.bin", 1, header_bytes=len(content))) == []
    with pytest.raises(DataLoss, match=r"headers/a\.bin ends within its header"):
        tfnb.FixedLengthRecordReader("memory://headers/a.bin", 1, header_bytes=4, footer_bytes=2).read()


def test_rows_of_dask_come_partition_by_partition_and_are_taken_up_anywhere() -> None:
    array = arrays.from_array(np.arange(51.0).reshape(17, 3), chunks=((5, 1, 0, 11), (2, 1)))
    for count in (0, 5, 6, 17):
        source, again = Source(array), Source(array)
        begun = [source.read() for _ in range(count)]
        again.seek(source.position)
        assert np.array_equal([*begun, *again], np.arange(51.0).reshape(17, 3))
    columns = pandas.DataFrame({"x": np.arange(5.0), "word": list("abcde")})
    taken = list(Source(frames.from_pandas(columns, npartitions=2)))
    assert [row.word for row in taken] == list("abcde") and taken[2] == (2.0, "c")
    bag = Source(bags.from_sequence([(0.5, number) for number in range(7)], npartitions=3))
    queue = tfnb.FIFOQueue(2, [torch.float32, torch.int64], [(), ()])
    tfnb.QueueRunner(queue, [bag])
    assert [int(number) for _, number in queue] == list(range(7))


def regression() -> tuple[Any, Any, Any, torch.nn.Linear]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    with tfnb.record("regression"):
        x, y = tfnb.placeholder(torch.ones(4, 3), name="x"), tfnb.placeholder(torch.ones(4, 1), name="y")
        step = tfnb.train.SGD(0.1).minimize((model(x) - y).square().mean())
    return x, y, step, model


def test_a_loader_feeds_fit_as_tuples_and_as_dicts() -> None:
    rows = [{"in": torch.randn(3), "out": torch.randn(1), "name": "row"} for _ in range(10)]
    pairs = [(row["in"], row["out"]) for row in rows]
    found = []
    for loader, by in ((DataLoader(pairs, 4), "tuple"), (DataLoader(rows, 4), "dict")):
        x, y, step, model = regression()
        feeds = (x, y) if by == "tuple" else {"in": x, "out": y}
        assert tfnb.fit(step, loader, feeds=feeds, epochs=2).steps == 6
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


def test_feeds_that_do_not_fit_the_items_are_named() -> None:
    x, y, step, _ = regression()
    for data, feeds, says in (
        ([(1.0,)], (x, y), "item 0 of data is 1 parts, and feeds names 2"),
        ([{"a": 1.0}], {"b": x}, "feeds takes 'b' of item 0 of data, which has 'a'"),
        ([{"a": 1.0}], (x,), "a dict of 'a'"),
        ([(1.0, 2.0)], None, r"say with feeds=\(x, y\)"),
        ({x: torch.ones(2, 3)}, (x,), "is for an iterable"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            tfnb.fit(step, data, feeds=feeds)


def test_training_goes_on_with_the_data_where_it_was_saved(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))

    def source() -> Source:
        return Source(DataLoader(data, 3, shuffle=True), name="train")

    x, y, step, model = regression()
    whole = source()
    tfnb.fit(step, whole, feeds=(x, y), epochs=3, steps=4)
    session = tfnb.session.default_session(step.graph)
    session.save(tmp_path / "v")
    assert whole.position == {"epoch": 0, "count": 4}
    assert tfnb.fit(step, whole, feeds=(x, y), epochs=2).steps == 3 + 7
    expected = model.weight.detach().clone()

    session.restore(tmp_path / "v")
    tfnb.fit(step, whole, feeds=(x, y), epochs=2)
    assert torch.equal(model.weight, expected), "the same session"

    x, y, step, model = regression()
    tfnb.session.default_session(step.graph).restore(tmp_path / "v")
    fresh = source()
    tfnb.fit(step, fresh, feeds=(x, y), epochs=2)
    assert torch.equal(model.weight, expected), "a new graph, session and loader"
    with pytest.raises(InvalidArgument, match="another source named 'train'"):
        tfnb.fit(step, source(), feeds=(x, y))


def test_a_source_fills_a_queue_to_its_end() -> None:
    queue = tfnb.FIFOQueue(2, (torch.int64, torch.int64), ((), ()))
    loader = DataLoader(TensorDataset(torch.arange(5), torch.arange(5) * 2), batch_size=None)
    runner = tfnb.QueueRunner(queue, [Source(loader)])
    with tfnb.record():
        a, b = queue.dequeue()
        both = a + b
    assert [int(tfnb.run(both, timeout=60)) for _ in range(5)] == [0, 3, 6, 9, 12]
    with pytest.raises(OutOfRange):
        tfnb.run(both, timeout=60)
    runner.coordinator.join()


class Interrupted:
    """An iterable that is interrupted once, before its fourth element."""

    def __init__(self) -> None:
        self.is_done = False

    def __iter__(self) -> Iterator[float]:
        for number in range(6):
            if number == 3 and not self.is_done:
                self.is_done = True
                raise KeyboardInterrupt
            yield float(number)


def test_an_interrupt_in_the_middle_of_a_batch_leaves_the_position_before_it() -> None:
    source = Source(Interrupted()).batch(2)
    assert source.read().tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        source.read()
    assert source.position == {"epoch": 0, "count": 2}
    assert [batch.tolist() for batch in source] == [[2, 3], [4, 5]]


def test_an_element_that_was_not_put_is_read_again() -> None:
    source, queue = Source([1.0, 2.0, 3.0]), tfnb.FIFOQueue(1, torch.float32, ())
    runner = tfnb.QueueRunner(queue, [source])
    (thread,) = runner.start()
    until(lambda: queue.level.enqueues == 1)
    runner.coordinator.request_stop()
    thread.join(30)
    assert source.position["count"] == 1 and queue.dequeue() == 1, "the second one found no room"


@pytest.mark.parametrize(
    ("content", "lines"),
    [(b"", []), (b"one", ["one"]), (b"a\r\nb\r\n", ["a", "b"]), (b"a\nb", ["a", "b"]), (b"\n", [""])],
)
def test_odd_files_end_with_out_of_range(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    (tmp_path / "0.txt").write_bytes(content)
    reader = tfnb.TextLineReader(str(tmp_path / "*.txt"))
    assert [reader.read() for _ in lines] == lines
    with pytest.raises(OutOfRange):
        reader.read()
    for wrong in ("a", -1, 1.5):
        with pytest.raises(InvalidArgument, match="a position has numbers of at least 0"):
            Source([1]).seek({"epoch": 0, "count": wrong})  # type: ignore[dict-item]
    with pytest.raises(NotFound, match="no file is at"):
        tfnb.TextLineReader(str(tmp_path / "*.none"))


def test_a_loader_with_workers_is_taken_up_and_fills_a_queue() -> None:
    data = TensorDataset(torch.arange(7.0))
    source = Source(DataLoader(data, batch_size=2, num_workers=2)).map(lambda batch: batch[0].sum())
    source.read()
    queue = tfnb.FIFOQueue(2, torch.float32, ())
    tfnb.QueueRunner(queue, [source])
    assert [float(total) for total in queue] == [5, 9, 6]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    for reader in (tfnb.TextLineReader(str(tmp_path)), tfnb.WholeFileReader(str(tmp_path))):
        with pytest.raises(InvalidArgument, match="is no file to read"):
            reader.read()
