"""The ops of row-sparse gradients, and the optimizers' forms that take rows, by torch and against the dense ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tfnb.kernels.optim import FUSED
from tfnb.kernels.sparse_rows import shards_of

ops = torch.ops.tfnb


@pytest.mark.parametrize("shape", [(4,), (2, 2), (), (0,)])
def test_slices_pass_opcheck(shape):
    values, indices = torch.randn(*shape, 3), torch.randint(-5, 5, shape)
    torch.library.opcheck(ops.slices.default, (values, indices, 5), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op", [ops.coalesce.default, ops.densify.default])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_ops_on_slices_pass_opcheck(op, count):
    values, indices = torch.randn(count, 3), torch.randint(0, 5, (count,))
    torch.library.opcheck(op, (values, indices, 5), test_utils=("test_schema", "test_faketensor"))


def test_coalesce_adds_in_the_order_of_the_entries():
    values = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])  # another order gives 0 or 2
    summed, rows, places = ops.coalesce(values, torch.tensor([3, 3, 3, 3]), 4)
    assert (summed.tolist(), rows.tolist(), places.tolist()) == ([[1.0]], [3], [0, 0, 0, 0])


@pytest.mark.parametrize(("op", "slots"), [("sgd", 0), ("adagrad", 1), ("adam", 2), ("rmsprop", 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_bitwise_those_of_the_dense_kernel_and_others_stay(op, slots, dtype):
    steps = [torch.tensor(3.0)] if op != "sgd" else []
    w, *state = (torch.rand(9, 5).to(dtype) for _ in range(slots + 1))
    grad, rows = torch.randn(3, 5).to(dtype), torch.tensor([7, 0, 4])
    small = [torch.cat([x[rows]]) for x in (w, *state)]
    dense = getattr(ops, op)(small[0], grad, [*small[1:], *steps], lr=0.1)
    sparse = getattr(ops, f"{op}_rows")(w, grad, [*state, *steps], rows, lr=0.1)
    others = torch.tensor([1, 2, 3, 5, 6, 8])
    for before, new, expected in zip((w, *state), sparse, dense, strict=False):
        assert torch.equal(new[rows], expected)
        assert torch.equal(new[others], before[others])
    assert all(torch.equal(a, b) for a, b in zip(sparse[slots + 1 :], dense[slots + 1 :], strict=True))


def test_in_place_twin_takes_tables_that_are_not_contiguous():
    w = torch.zeros(4, 6).t()
    FUSED["tfnb.sgd_rows.default"]([(w, torch.ones(2, 4), torch.tensor([5, 1]))], lr=1.0)
    assert w.sum(1).tolist() == [0.0, -4.0, 0.0, 0.0, 0.0, -4.0]


def test_gradient_that_does_not_fit_is_refused_before_anything_is_written():
    w, other = torch.zeros(4, 2), torch.zeros(4, 2)
    rows = [(other, torch.ones(1, 2), torch.tensor([0])), (w, torch.ones(1, 3), torch.tensor([0]))]
    with pytest.raises(ValueError, match=r"float32\[1, 3\]"):
        FUSED["tfnb.sgd_rows.default"](rows, lr=1.0)
    assert not w.any()
    assert not other.any()


# -- shards (semantics S-160, S-161, S-163) ----------------------------------------

DEALT = {
    False: [[0, 5, 10], [1, 6, 11], [2, 7, 12], [3, 8], [4, 9]],
    True: [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10], [11, 12]],
}


def dealt(rows: int, shards: int, by_range: bool) -> list[list[int]]:
    """The ids of each shard, by row."""
    shard, row = shards_of(torch.arange(rows), rows, shards, by_range)
    found: list[dict[int, int]] = [{} for _ in range(shards)]
    for at, (p, r) in enumerate(zip(shard.tolist(), row.tolist(), strict=True)):
        assert found[p].setdefault(r, at) == at, "two ids have one row"
    assert all(sorted(each) == [*range(len(each))] for each in found), "a row has no id"
    return [[each[r] for r in range(len(each))] for each in found]


@pytest.mark.parametrize("by_range", [False, True])
def test_thirteen_ids_on_five_shards(by_range: bool) -> None:
    assert dealt(13, 5, by_range) == DEALT[by_range]


@pytest.mark.parametrize("by_range", [False, True])
def test_each_id_has_one_row_and_the_first_shards_are_longer(by_range: bool) -> None:
    for rows in range(51):
        for shards in range(1, 13):
            lengths = [len(each) for each in dealt(rows, shards, by_range)]
            assert lengths == [rows // shards + (p < rows % shards) for p in range(shards)]


@given(
    ids=st.lists(st.integers(0, 29), max_size=40), shards=st.integers(1, 40), by_range=st.booleans(), wide=st.booleans()
)
def test_part_then_stitch_gives_the_rows_of_the_ids(
    ids: list[int], shards: int, by_range: bool, wide: bool
) -> None:  # fmt: skip
    wanted = torch.tensor(ids, dtype=torch.int64 if wide else torch.int32).reshape(-1, 1)
    *numbers, places = ops.part(wanted, 30, shards, by_range, "t")
    tables = [torch.tensor(each, dtype=torch.int64) for each in dealt(30, shards, by_range)]
    assert sum(map(len, numbers)) == len({*ids}), "a duplicate is sent"
    assert torch.equal(torch.cat([t[at] for t, at in zip(tables, numbers, strict=True)])[places], wanted.long())


@pytest.mark.parametrize("bad", [-1, 30])
def test_an_id_that_the_table_lacks_is_named(bad: int) -> None:
    with pytest.raises(IndexError, match=f"id {bad} is not within the 30 rows of table t"):
        ops.part(torch.tensor([3, bad]), 30, 4, False, "table t")


@pytest.mark.parametrize("ids", [[], [4, 4, 0]])
def test_part_passes_opcheck(ids: list[int]) -> None:
    args = (torch.tensor(ids, dtype=torch.int64), 5, 3, True, "t")
    torch.library.opcheck(ops.part.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("by_range", [False, True])
def test_each_id_is_owned_by_the_shard_that_lists_it(by_range: bool) -> None:
    ids = torch.arange(13, dtype=torch.int32).reshape(13, 1)
    for shard, mine in enumerate(DEALT[by_range]):
        is_own, row = ops.owned(ids, 13, 5, by_range, shard, "t")
        assert ids[is_own].tolist() == mine and row[is_own].tolist() == [*range(len(mine))]
        assert not row[~is_own].any() and is_own.shape == row.shape == ids.shape
    args = (ids, 13, 5, by_range, 1, "t")
    torch.library.opcheck(ops.owned.default, args, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(IndexError, match="id 13 is not within the 13 rows of t"):
        ops.owned(torch.tensor([[2], [13]]), 13, 5, by_range, 0, "t")
