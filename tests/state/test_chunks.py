"""Rows of arrays in chunks equal those of tensors, and their order within chunks is a permutation of each pass."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from tfnb.cluster.engine.members import Ahead
from tfnb.cluster.engine.sources import Near
from tfnb.state.batch_order import RowOrder, Rows
from tfnb.state.chunks import ChunkedArray, Chunks

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(sum)


def held(lengths, tail=(2,)):
    """An array whose chunks are all here, and the tensor that it stands for."""
    whole = torch.arange(sum(lengths) * 2).reshape(-1, *tail)
    chunks = Chunks(lengths, tail, torch.int64)
    chunks.here = dict(enumerate(whole.split(lengths)))
    return chunks, whole


@given(LENGTHS, st.integers(1, 9), st.booleans(), st.integers(0, 3))
def test_batches_of_chunks_are_those_of_a_tensor(lengths, size, shuffle, seed):
    chunks, whole = held(lengths)
    order = RowOrder(len(whole), size, shuffle, seed)
    for step in range(2 * order.per_pass):
        of_chunks, of_tensor = Rows((chunks, whole), order).batch(step)
        assert torch.equal(of_chunks, of_tensor) and of_chunks.is_contiguous()


@given(LENGTHS, st.data())
def test_the_chunks_that_rows_need_are_those_that_they_are_taken_of(lengths, data):
    chunks, whole = held(lengths)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=9)))
    needed = chunks.numbers(rows)
    chunks.here = {number: chunks.here[number] for number in needed}
    assert torch.equal(chunks.index_select(0, rows), whole[rows])


@given(LENGTHS, st.integers(1, 9), st.booleans(), st.integers(0, 3), st.integers(1, 3))
def test_within_chunks_each_pass_has_each_row_once_and_one_chunk_after_the_other(lengths, size, shuffle, seed, number):
    chunks, whole = held(lengths)
    order = RowOrder(len(whole), size, shuffle, seed, within=0)
    rows = Rows((chunks,), order)
    steps = range((number - 1) * order.per_pass, number * order.per_pass)
    taken = torch.cat([rows.batch(step)[0] for step in steps])[:, 0] // 2
    assert sorted(taken.tolist()) == list(range(len(whole)))
    seen = [chunks.numbers(row.reshape(1))[0] for row in taken]
    assert len([a for a, b in pairwise(seen) if a != b]) == len(set(seen)) - 1


@given(LENGTHS, st.integers(1, 9), st.booleans(), st.integers(1, 40), st.data())
def test_every_step_is_taken_once_and_near_where_its_rows_lie(lengths, size, shuffle, total, data):
    homes = data.draw(st.lists(st.sampled_from("abx"), min_size=len(lengths), max_size=len(lengths)))
    array = ChunkedArray("x", tuple(lengths), (), torch.float32, homes=tuple((home,) for home in homes))
    order = RowOrder(len(array), size, shuffle, 0, within=0)
    pieces = Near(Ahead((array,), order, total, int), ["a", "b"])
    taken: list[int] = []
    while not pieces.is_spent:
        task = data.draw(st.sampled_from([0, 1]))
        left = [where for _, where in pieces._runs]
        steps = pieces.take(data.draw(st.integers(1, 5)), task=task)
        assert 0 < len(steps) <= 5 and pieces.left == total - len(taken) - len(steps)
        if any("ab"[task] in where for where in left):
            start = order.place(steps[0])[1]
            chunks = Chunks(lengths, (), torch.float32, array.groups)
            first = Rows((chunks,), order).at(steps[0], 0, 1)
            row = first.start if isinstance(first, slice) else int(first)
            assert start < len(array) and homes[chunks.numbers(slice(row, row + 1))[0]] == "ab"[task]
        taken += steps
    assert sorted(taken) == list(range(total))
