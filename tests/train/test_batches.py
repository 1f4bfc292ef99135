"""Batches as plain data: order, sizes, passes, and what does not fit."""

from __future__ import annotations

import dask.array as da
import dask.bag as bags
import dask.dataframe as frames
import numpy as np
import pandas
import pytest
import torch
from dask import config
from dask.delayed import delayed

from tfnb.errors import InvalidArgument, ResourceExhausted, ShapeError
from tfnb.train.batches import PassEnd, batch_count, batches

X = torch.arange(10.0).reshape(10, 1)
Y = torch.arange(10)


def rows(made):
    """The rows of each batch."""
    return [batch.values[0].flatten().int().tolist() for batch in made.each]


def test_last_short_batch_is_kept():
    made = batches({"x": X, "y": Y}, batch_size=4, shuffle=False)
    assert made.total == 3
    assert rows(made) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_arrays_are_cut_alike():
    for batch in batches({"x": X, "y": Y}, batch_size=3, epochs=2).each:
        assert batch.keys == ("x", "y")
        assert torch.equal(batch.values[0].flatten(), batch.values[1].float())
        assert batch.rows == len(batch.values[1])


def test_every_epoch_has_each_row_once_in_another_order():
    order = [row for batch in rows(batches({"x": X}, batch_size=4, epochs=2)) for row in batch]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:] != list(range(10))


def test_order_depends_on_the_seed_alone():
    torch.manual_seed(1)
    first = rows(batches({"x": X}, batch_size=4, epochs=2, seed=5))
    torch.manual_seed(2)
    assert rows(batches({"x": X}, batch_size=4, epochs=2, seed=5)) == first
    assert rows(batches({"x": X}, batch_size=4, epochs=2, seed=6)) != first


def test_random_state_is_left_alone():
    before = torch.random.get_rng_state()
    list(batches({"x": X}).each)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_steps_take_as_many_passes_as_needed():
    made = batches({"x": X}, batch_size=4, steps=7, shuffle=False)
    assert made.total == 7
    assert [(b.epoch, b.rows) for b in made.each] == [(1, 4), (1, 4), (1, 2), (2, 4), (2, 4), (2, 2), (3, 4)]


def test_default_batch_is_32_rows():
    assert [b.rows for b in batches({"x": torch.zeros(70)}).each] == [32, 32, 6]


def test_numpy_lists_and_numbers_are_data():
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    made = batches({"a": frozen, "b": [1, 2, 3, 4], "rate": 0.5}, shuffle=False)
    (batch,) = made.each
    assert [v.tolist() for v in batch.values] == [[0, 1, 2, 3], [1, 2, 3, 4], 0.5]


def test_feed_dicts_pass_as_they_are():
    feeds = [{"x": X[:4]}, {"x": X[4:]}]
    made = batches(feeds, epochs=2)
    assert made.total == 4
    assert [(b.epoch, b.rows, b.values[0] is feeds[i % 2]["x"]) for i, b in enumerate(made.each)] == [
        (1, 4, True), (1, 6, True), (2, 4, True), (2, 6, True),
    ]  # fmt: skip


def test_generator_ends_early_or_at_steps():
    assert len(list(batches(({"x": X} for _ in range(5)), steps=9).each)) == 5
    made = batches(({"x": X} for _ in range(5)), steps=3)
    assert (made.total, len(list(made.each))) == (3, 3)
    assert batches({"x": X} for _ in range(5)).total is None


@pytest.mark.parametrize(
    ("begin", "expected"),
    [(0, [1, 1, "end of 1", 2, 2]), (1, [1, "end of 1", 2, 2]), (2, ["end of 1", 2, 2]), (3, [2]), (4, [])],
)
@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 4}])
@pytest.mark.parametrize("form", ["arrays", "feeds"])
def test_a_pass_ends_before_the_next_one_begins(form, options, begin, expected):
    data = {"x": X[:4]} if form == "arrays" else [{"x": X[:2]}, {"x": X[2:4]}]
    made = batches(data, begin=begin, **options, **({"batch_size": 2} if form == "arrays" else {}))
    found = [f"end of {part.epoch}" if isinstance(part, PassEnd) else part.epoch for part in made.parts]
    assert found == expected


class ByNumber:
    """A dataset: items by their numbers."""

    def __getitem__(self, number):
        return X[number]


def test_a_dataset_is_told_of_its_loader():
    with pytest.raises(
        InvalidArgument, match=r"not ByNumber; it gives items by number: .*DataLoader\(data, batch_size"
    ):
        batches(ByNumber(), feeds="x")


class Unsized:
    """Feed dicts whose ``len`` raises; ``passes`` counts calls of iter."""

    def __init__(self, error):
        self.error, self.passes = error, 0

    def __len__(self):
        raise self.error

    def __iter__(self):
        self.passes += 1
        return ({"x": X[i : i + 4]} for i in (0, 4, 8))


@pytest.mark.parametrize("error", [NotImplementedError(), TypeError("no length"), ValueError("-1"), RuntimeError()])
def test_data_whose_len_raises_has_no_total_and_is_iterated_anew_in_each_epoch(error):
    data = Unsized(error)
    made = batches(data, epochs=2)
    assert made.total is None and data.passes == 0
    assert [(b.epoch, b.rows) for b in made.each] == [(1, 4), (1, 4), (1, 2), (2, 4), (2, 4), (2, 2)]
    assert data.passes == 2
    made = batches(data, steps=4)
    assert (made.total, [b.epoch for b in made.each]) == (4, [1, 1, 1, 2])


def test_an_interrupt_in_len_is_not_a_missing_length():
    with pytest.raises(KeyboardInterrupt):
        batch_count(Unsized(KeyboardInterrupt()))


def test_a_later_epoch_over_an_exhausted_iterator_is_refused():
    class Wrapped:
        each = ({"x": X} for _ in range(3))

        def __iter__(self):
            return self.each

    made, found = batches(Wrapped(), epochs=2), []
    with pytest.raises(InvalidArgument, match="epochs=2 needs data that can be iterated again, and Wrapped can be"):
        found.extend(batch.epoch for batch in made.each)
    assert found == [1, 1, 1]


@pytest.mark.parametrize(
    ("data", "options", "error", "text"),
    [
        ({"x": X, "y": Y[:7]}, {}, ShapeError, "10 rows for x and 7 rows for y"),
        ({"x": X[:0]}, {}, ShapeError, "no rows"),
        ({"x": 1.0}, {}, InvalidArgument, "at least one array"),
        ({"x": ["a"]}, {}, InvalidArgument, "data for x"),
        ({}, {}, InvalidArgument, "at least one array"),
        ([], {}, InvalidArgument, "empty"),
        (5, {}, InvalidArgument, "not int"),
        ([{"x": X}], {"batch_size": 4}, InvalidArgument, "batch_size=4"),
        (iter([{"x": X}]), {"epochs": 2}, InvalidArgument, "epochs=2"),
        ({"x": X}, {"epochs": 0}, InvalidArgument, "epochs must be"),
        ({"x": X}, {"steps": -1}, InvalidArgument, "steps must be"),
        ({"x": X}, {"batch_size": 2.5}, InvalidArgument, "batch_size must be"),
        ({"x": X}, {"batch_size": True}, InvalidArgument, "batch_size must be"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(data, options, error, text):
    with pytest.raises(error, match=text):
        batches(data, **options)


def test_item_that_is_no_feed_dict_is_named():
    with pytest.raises(InvalidArgument, match="item 1 of data is tuple"):
        list(batches([{"x": X}, (X, Y)]).each)


def test_dask_collections_are_computed_here_where_no_cluster_is():
    of_tensors = rows(batches({"x": X}, batch_size=4, epochs=2))
    array = da.from_array(X.numpy(), chunks=(3, 1))
    assert rows(batches({"x": array}, batch_size=4, epochs=2)) == of_tensors
    assert rows(batches({"x": array[array[:, 0] >= 0]}, batch_size=4, epochs=2)) == of_tensors
    assert rows(batches({"x": delayed(X.numpy())}, batch_size=4, epochs=2)) == of_tensors
    with config.set(scheduler="sync"):
        bag = bags.from_sequence([row.numpy() for row in X], npartitions=3)
        assert rows(batches({"x": bag}, batch_size=4, epochs=2)) == of_tensors


def test_a_dask_collection_that_is_too_large_or_fails():
    with pytest.raises(ResourceExhausted, match=r"data for x has 7\.5 GiB.*tfnb\.connect"):
        batches({"x": da.zeros((1000, 1000, 1000))})
    with pytest.raises(InvalidArgument, match="data for x: Dask could not compute it: ZeroDivisionError"):
        batches({"x": da.ones(3).map_blocks(lambda rows: 1 // 0, dtype=float)})
    with pytest.raises(InvalidArgument, match="data is a Dask Array: say what it feeds"):
        batches(da.ones(3), batch_size=2)
    with pytest.raises(ShapeError, match="10 rows for x and 9 rows for y"):
        batches({"x": X, "y": da.ones(9, chunks=2)})


def test_columns_of_a_dask_dataframe():
    frame = frames.from_pandas(pandas.DataFrame({"x": X[:, 0].numpy(), "y": Y.numpy()}), npartitions=3)
    made = batches({"x": frame[["x"]], "y": frame["y"]}, batch_size=4, shuffle=False)
    x, y = next(made.each).values
    assert torch.equal(x, X[:4]) and torch.equal(y, Y[:4])


def test_numbers_of_numpy_are_plain_ones_in_the_order_that_a_cluster_is_told():
    made = batches({"x": X}, batch_size=np.int64(4), epochs=np.int32(2), seed=np.int64(5), shuffle=np.bool_(True))
    assert {type(entry) for entry in made.rows.order} <= {int, bool, type(None)}
    assert rows(made) == rows(batches({"x": X}, batch_size=4, epochs=2, seed=5))


@pytest.mark.parametrize("seed", [None, 1.5, "3", True])
def test_a_seed_is_an_int(seed):
    with pytest.raises(InvalidArgument, match="seed must be an int"):
        batches({"x": X}, batch_size=4, seed=seed)
