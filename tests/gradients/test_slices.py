"""Row-sparse gradients: where they come from, what keeps them, what they cost (semantics S-101 to S-108, S-117)."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb import IndexedSlices
from tfnb.errors import FeedError, InvalidArgument, ShapeError

ROWS, WIDTH = 7, 3
INDEX = torch.tensor([[1, 1, 3], [2, 0, 1]])


def slices(count: int = 5, seed: int = 0, rows: int = ROWS, width: int = WIDTH) -> IndexedSlices:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return IndexedSlices(values, torch.randint(0, rows, (count,), generator=generator), (rows, width))


def table(rows: int = ROWS, width: int = WIDTH) -> tfnb.Variable:
    return tfnb.Variable(torch.randn(rows, width, dtype=torch.float64), name="table")


def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], w: torch.Tensor) -> torch.Tensor:
    leaf = w.detach().clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def densified(graph: tfnb.Graph) -> list[tfnb.Node]:
    return [node for node in graph.nodes if "densified" in node.tags]


# -- where they come from --------------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda w, i: F.embedding(i, w),
    "padding": lambda w, i: F.embedding(i, w, padding_idx=1),
    "frequency": lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
    "sparse": lambda w, i: F.embedding(i, w, sparse=False),
    "index_select": lambda w, i: torch.index_select(w, 0, i.reshape(-1)),
    "index_select from behind": lambda w, i: torch.index_select(w, -2, i.reshape(-1)),
    "index": lambda w, i: w[i],
    "negative index": lambda w, i: w[-i - 1],
    "bag sum": lambda w, i: F.embedding_bag(i, w, mode="sum"),
    "bag mean": lambda w, i: F.embedding_bag(i, w, mode="mean"),
    "bag offsets": lambda w, i: F.embedding_bag(i.reshape(-1), w, torch.tensor([0, 2]), mode="mean"),
    "bag of the largest": lambda w, i: F.embedding_bag(i, w, mode="max"),
    "bag with padding": lambda w, i: F.embedding_bag(i, w, mode="mean", padding_idx=1),
    "gather of whole rows": lambda w, i: w.gather(0, i.reshape(-1)[:, None].expand(-1, WIDTH)),
    "some columns": lambda w, i: w[i, 1:],
    "rows with a new axis": lambda w, i: w[i.reshape(-1), None].squeeze(1),
    "no row": lambda w, i: torch.cat([w[i.reshape(-1)[:0]], F.embedding(i.reshape(-1)[:0], w)]),
    "two lookups": lambda w, i: torch.cat([F.embedding(i, w), w[i * 2]], 1),
    "nested": lambda w, i: w[i.reshape(-1)][i.reshape(-1) + 1],
    "nested in two axes": lambda w, i: w[i][torch.tensor([1, 1, 0])],
    "nested padding": lambda w, i: F.embedding(i.reshape(-1), w, padding_idx=1)[i.reshape(-1) + 1],
    "nested frequency": lambda w, i: F.embedding(i.reshape(-1), w, scale_grad_by_freq=True)[i.reshape(-1) + 1],
    "nested and whole": lambda w, i: torch.cat([w[i.reshape(-1)], w[i.reshape(-1)][i.reshape(-1)].sum(0, True)]),
    "cast": lambda w, i: w.float()[i].double(),
    "clone": lambda w, i: w.clone()[i],
}


@pytest.mark.parametrize("name", SOURCES)
def test_lookup_by_row_gives_slices(name: str) -> None:
    w, look = table(), SOURCES[name]

    def loss(weight: Any, i: torch.Tensor) -> torch.Tensor:
        found = look(weight, i)
        return (found * torch.arange(1, found.shape[1] + 1, dtype=found.dtype).unsqueeze(-1) ** 2 * found).sum() if (
            found.dim() == 3) else found.square().sum()  # fmt: skip

    with tfnb.record() as g:
        i = tfnb.placeholder(INDEX)
        (dw,) = tfnb.gradients(loss(w.read(), i), [w])
    assert isinstance(dw, IndexedSlices)
    assert dw.dense_shape == (ROWS, WIDTH)
    assert [n.name for n in densified(g) if n.outputs[0].shape[0] == ROWS] == []
    for batch in (INDEX, INDEX.flip(0)):
        got = tfnb.run(dw, {i: batch})
        expected = gradient_of(lambda weight, b=batch: loss(weight, b), w.value())
        torch.testing.assert_close(got.to_dense(), expected, rtol=1e-5 if name == "cast" else 1e-12, atol=1e-12)


def test_gathered_rows_keep_their_duplicates() -> None:
    w = table()
    with tfnb.record():
        (dw,) = tfnb.gradients(w.read()[torch.tensor([1, 1, 3])].sum(), [w])
    assert dw.sample.indices.tolist() == [1, 1, 3]
    assert dw.sample.values.tolist() == [[1.0] * WIDTH] * 3


def test_vector_gathered_by_element_gives_slices() -> None:
    w = tfnb.Variable(torch.arange(4.0))
    with tfnb.record():
        (dw,) = tfnb.gradients((w.read().gather(0, torch.tensor([2, 0, 2])) ** 2).sum(), [w])
    assert isinstance(dw, IndexedSlices)
    assert dw.sample.to_dense().tolist() == [0.0, 0.0, 8.0, 0.0]


@pytest.mark.parametrize("arguments", [{}, {"sparse": True}, {"padding_idx": 1}, {"scale_grad_by_freq": True}])
def test_module_gives_slices(arguments: dict[str, Any]) -> None:
    model = nn.Embedding(ROWS, WIDTH, **arguments)
    with tfnb.record():
        i = tfnb.placeholder(INDEX)
        (dw,) = tfnb.gradients(model(i).square().sum(), [model.weight])
    model(INDEX).square().sum().backward()
    assert isinstance(dw, IndexedSlices)
    expected = model.weight.grad.to_dense()
    torch.testing.assert_close(tfnb.run(dw, {i: INDEX}).to_dense(), expected)


def test_row_norms_are_limited_before_the_lookup() -> None:
    model, twin = (nn.Embedding(ROWS, WIDTH, max_norm=1.0) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    with tfnb.record():
        i = tfnb.placeholder(INDEX)
        loss = model(i).square().sum()
        (dw,) = tfnb.gradients(loss, [model.weight])
    twin(INDEX).square().sum().backward()
    assert isinstance(dw, IndexedSlices)
    torch.testing.assert_close(tfnb.run(dw, {i: INDEX}).to_dense(), twin.weight.grad)


@pytest.mark.parametrize(
    "look",
    [lambda w: w.index_select(1, torch.tensor([0, 2])), lambda w: w[:, torch.tensor([0, 2])], lambda w: w * 2,
     lambda w: w[torch.tensor([0, 1]), torch.tensor([1, 2])], lambda w: w[w > 0], lambda w: w.gather(0, INDEX)],
)  # fmt: skip
def test_other_uses_stay_dense(look: Callable[[Any], torch.Tensor]) -> None:
    w = table()
    with tfnb.record() as g:
        (dw,) = tfnb.gradients(look(w.read()).square().sum(), [w])
    torch.testing.assert_close(dw.sample, gradient_of(lambda weight: look(weight).square().sum(), w.value()))
    assert densified(g) == []


def test_placeholder_stays_dense() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 2), shape=(4, 2))
        (dx,) = tfnb.gradients(x[torch.tensor([1, 1])].sum(), [x])
    assert dx.sample.tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


def test_bags_scale_by_frequency_as_lookups_do() -> None:
    """torch's kernel for bags on a CPU (2.13) takes the counts of other words: what it says it does is the oracle."""
    w = table()
    with tfnb.record():
        i = tfnb.placeholder(INDEX)
        loss = F.embedding_bag(i, w.read(), mode="mean", scale_grad_by_freq=True).square().sum()
        (dw,) = tfnb.gradients(loss, [w])
    for index in (INDEX, INDEX.flip(1) + 1):
        got = tfnb.run(dw, {i: index})
        want = gradient_of(
            lambda weight, b=index: F.embedding(b, weight, scale_grad_by_freq=True).mean(1).square().sum(), w.value()
        )
        torch.testing.assert_close(got.to_dense(), want)


def test_the_largest_of_equals_in_a_bag_is_the_first() -> None:
    w = tfnb.Variable(torch.ones(ROWS, WIDTH, dtype=torch.float64))
    with tfnb.record():
        i = tfnb.placeholder(INDEX)
        (dw,) = tfnb.gradients(F.embedding_bag(i, w.read(), mode="max").sum(), [w])
    want = gradient_of(lambda weight: F.embedding_bag(INDEX, weight, mode="max").sum(), w.value())
    assert torch.equal(tfnb.run(dw, {i: INDEX}).to_dense(), want)


@pytest.mark.parametrize("look", [
    lambda w, i: F.embedding(i, w, padding_idx=1), lambda w, i: F.embedding_bag(i, w, mode="sum", padding_idx=1),
], ids=["embedding", "bag"])  # fmt: skip
def test_a_padding_row_has_no_entry(look: Any) -> None:
    w = table()
    with tfnb.record():
        i = tfnb.placeholder(INDEX)
        (dw,) = tfnb.gradients(look(w.read(), i).square().sum(), [w])
    assert tfnb.run(dw, {i: INDEX}).indices.tolist() == [3, 2, 0]
    assert tfnb.run(dw, {i: torch.ones(2, 3, dtype=torch.int64)}).indices.tolist() == []


@pytest.mark.parametrize("look", [
    lambda w: w[torch.tensor([1, 2]), 0], lambda w: w.gather(0, INDEX),
], ids=["elements", "gather"])  # fmt: skip
def test_a_dense_gradient_of_some_rows_of_a_large_table_is_said(look: Any) -> None:
    w = tfnb.Variable(torch.randn(1 << 17, 3), name="table")
    with tfnb.record() as g:
        (dw,) = tfnb.gradients(look(w.read()).square().sum(), [w])
    assert not isinstance(dw, IndexedSlices)
    assert densified(g)
    (note,) = [note for note in g.notes if "becomes dense" in note]
    assert f"table [{1 << 17}, 3] becomes dense, {12 << 17} bytes: the gradient of aten." in note


def test_backward_says_that_the_grad_of_a_large_table_is_dense() -> None:
    layer = nn.Embedding(1 << 17, 3)
    with tfnb.record() as g:
        layer(tfnb.placeholder(INDEX)).square().sum().backward()
        assert layer.weight.grad.shape == (1 << 17, 3)
    assert any("embedding" in note and f"{12 << 17} bytes" in note for note in g.notes)


# -- mixed -----------------------------------------------------------------------------------------------------


def test_tied_weights_give_a_dense_gradient_that_is_counted() -> None:
    w = table()

    def loss(weight: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(weight[i] @ weight.t(), i)

    with tfnb.record() as g:
        i = tfnb.placeholder(INDEX[0])
        (dw,) = tfnb.gradients(loss(w.read(), i), [w])
    expected = gradient_of(lambda weight: loss(weight, INDEX[0]), w.value())
    torch.testing.assert_close(tfnb.run(dw, {i: INDEX[0]}), expected)
    assert [node.outputs[0].shape for node in densified(g)] == [(ROWS, WIDTH)]
    assert any(f"table [{ROWS}, {WIDTH}] becomes dense, {8 * ROWS * WIDTH} bytes" in note for note in g.notes)


def test_to_dense_is_marked_and_noted_with_its_line() -> None:
    w = table()
    with tfnb.record() as g:
        (dw,) = tfnb.gradients(w.read()[INDEX].sum(), [w])
        dw.to_dense()
    assert [node.outputs[0].shape for node in densified(g)] == [(ROWS, WIDTH)]
    assert [note for note in g.notes if "test_slices.py line" in note and "168 bytes" in note]


def test_large_densification_warns_with_bytes() -> None:
    with tfnb.record(lazy=True):
        values, indices = tfnb.placeholder(shape=("n", 1)), tfnb.placeholder(shape=("n",), dtype=torch.int64)
        g = IndexedSlices(values, indices, (100_000_001, 1))
        with pytest.warns(UserWarning, match="400000004 bytes") as caught:
            g.to_dense()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            IndexedSlices(values, indices, (100_000_000, 1)).to_dense()
    assert caught[0].filename == __file__


# -- the algebra -----------------------------------------------------------------------------------------------

Map = Callable[[Any], Any]
ROW_FACTOR = torch.arange(1.0, ROWS + 1, dtype=torch.float64).unsqueeze(-1)
LINEAR: dict[str, Map] = {
    "scale": lambda g: g * 2.5,
    "scale from the left": lambda g: 2.5 * g,
    "scale by a tensor": lambda g: torch.tensor(3.0) * g,
    "torch.mul": lambda g: torch.mul(g, 2),
    "method": lambda g: g.mul(2),
    "negate": operator.neg,
    "torch.neg": torch.neg,
    "divide": lambda g: g / 3,
    "torch.div": lambda g: torch.div(g, torch.tensor(4.0)),
    "cast": lambda g: g.to(torch.float32),
    "half": lambda g: g.float(),
    "per row": lambda g: g * ROW_FACTOR,
    "per row from the left": lambda g: ROW_FACTOR * g,
    "per row divide": lambda g: g / ROW_FACTOR,
    "per column": lambda g: g * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64),
    "per element": lambda g: g * (ROW_FACTOR * torch.tensor([1.0, -2.0, 0.5])),
    "clone": torch.clone,
}
FROM_ZERO: dict[str, Map] = {
    "clamp": lambda g: torch.clamp(g, -0.5, 0.25),
    "clamp below": lambda g: g.clamp(min=-0.5),
    "clamp_max": lambda g: g.clamp_max(0.5),
    "clip_by_value": lambda g: tfnb.clip_by_value(g, -0.5, 0.25),
    "sign": torch.sign,
    "abs": abs,
    "pow": lambda g: g**2,
    "square": torch.square,
    "tanh": lambda g: g.tanh(),
    "clip_by_norm": lambda g: tfnb.clip_by_norm(g, 0.5),
    "clip_by_norm of rows": lambda g: tfnb.clip_by_norm(g, 0.5, dim=-1),
    "clip_by_global_norm": lambda g: tfnb.clip_by_global_norm([g], 0.5)[0][0],
}
INDICES = st.lists(st.integers(0, ROWS - 1), max_size=12)


def drawn(indices: list[int]) -> IndexedSlices:
    values = torch.randn(len(indices), WIDTH, dtype=torch.float64)
    return IndexedSlices(values, torch.tensor(indices, dtype=torch.int64), (ROWS, WIDTH))


def dense(g: IndexedSlices) -> torch.Tensor:
    """What is meant, without the code under test."""
    out = torch.zeros(g.dense_shape, dtype=g.dtype)
    for value, index in zip(g.values, g.indices.tolist(), strict=True):
        out[index] += value
    return out


@pytest.mark.parametrize("name", [*LINEAR, *FROM_ZERO])
@given(INDICES)
def test_closed_map_equals_the_dense_one(name: str, indices: list[int]) -> None:
    g, function = drawn(indices), (LINEAR | FROM_ZERO)[name]
    got = function(g)
    assert isinstance(got, IndexedSlices)
    expected = function(dense(g))
    assert got.dtype == expected.dtype
    tolerance = 1e-6 if got.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(dense(got), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [*LINEAR, *FROM_ZERO])
def test_closed_map_is_recorded_and_replays_on_other_rows(name: str) -> None:
    function, g, other = (LINEAR | FROM_ZERO)[name], slices(5), slices(8, 1)
    with tfnb.record() as graph:
        values, indices = (tfnb.placeholder(x, shape=("n", *x.shape[1:])) for x in (g.values, g.indices))
        result = function(IndexedSlices(values, indices, g.dense_shape))
    got = tfnb.run(result, {values: other.values, indices: other.indices})
    torch.testing.assert_close(dense(got), function(dense(other)))
    assert densified(graph) == []


@given(INDICES, INDICES)
def test_sums_equal_the_dense_ones(a: list[int], b: list[int]) -> None:
    g, h = drawn(a), drawn(b)
    for function in (operator.add, operator.sub, torch.add, lambda x, y: torch.sub(x, y, alpha=2), lambda x, y: x + y):
        got = function(g, h)
        assert isinstance(got, IndexedSlices)
        torch.testing.assert_close(dense(got), function(dense(g), dense(h)))
    assert isinstance(sum([g, h, g]), IndexedSlices)


@pytest.mark.parametrize("axis", [0, 1, -1])
@given(INDICES, INDICES)
def test_concatenation_equals_the_dense_one(axis: int, a: list[int], b: list[int]) -> None:
    parts = [drawn(a), drawn(b), drawn(a)]
    got = torch.cat(parts, axis)
    assert isinstance(got, IndexedSlices)
    torch.testing.assert_close(dense(got), torch.cat([dense(p) for p in parts], axis))


@pytest.mark.parametrize(("sizes", "axis"), [(3, 0), ([2, 5], 0), (2, 1), ([1, 2], -1)])
@given(INDICES)
def test_parts_equal_the_dense_ones(sizes: Any, axis: int, indices: list[int]) -> None:
    g = drawn(indices)
    for got, expected in zip(torch.split(g, sizes, axis), torch.split(dense(g), sizes, axis), strict=True):
        assert isinstance(got, IndexedSlices)
        torch.testing.assert_close(dense(got), expected)


def test_split_of_recorded_slices_filters_what_is_fed() -> None:
    w, other = table(), torch.tensor([6, 6, 5, 0])
    with tfnb.record():
        i = tfnb.placeholder(torch.tensor([1, 2, 6]))
        (dw,) = tfnb.gradients(w.read()[i].sum(), [w])
        parts = dw.split([5, 2])
    first, second = tfnb.run(list(parts), {i: other})
    assert (first.indices.tolist(), second.indices.tolist()) == ([0], [1, 1, 0])


def test_negative_rows_count_from_the_end() -> None:
    g = IndexedSlices(torch.ones(3, 1), torch.tensor([-1, 3, 0]), (4, 1))
    table = torch.arange(4.0).unsqueeze(1)
    expected = torch.tensor([[1.0], [0.0], [0.0], [2.0]])
    assert torch.equal(g.to_dense(), expected)
    assert torch.equal(g.coalesce().to_dense(), expected)
    assert torch.equal((g * table).to_dense(), expected * table)
    assert torch.equal(g + table, expected + table)
    assert torch.equal(torch.cat([g, g]).to_dense(), torch.cat([expected, expected]))
    assert torch.equal(g.split(2)[1].to_dense(), expected[2:])


# -- coalesce --------------------------------------------------------------------------------------------------


@given(INDICES)
def test_coalesced_rows_are_distinct_ascending_and_bitwise_the_sum(indices: list[int]) -> None:
    g = drawn(indices)
    rows = g.coalesce()
    assert rows.indices.tolist() == sorted(set(indices))
    assert torch.equal(dense(rows), dense(g))
    again = IndexedSlices(rows.values, rows.indices, rows.dense_shape).coalesce()
    assert torch.equal(again.values, rows.values)
    assert torch.equal(again.indices, rows.indices)


def test_entries_of_one_row_count_together() -> None:
    g = IndexedSlices(torch.tensor([[3.0], [4.0]]), torch.tensor([1, 1]), (3, 1))
    assert torch.linalg.vector_norm(g) == 7
    assert tfnb.clip_by_norm(g, 1.0).to_dense().flatten().tolist() == [0.0, 1.0, 0.0]
    (clipped, _), norm = tfnb.clip_by_global_norm([g, torch.tensor([24.0])], 5.0)
    assert norm == 25
    torch.testing.assert_close(clipped.to_dense(), torch.tensor([[0.0], [1.4], [0.0]]))


@pytest.mark.parametrize("bad", [ROWS, -ROWS - 1])
def test_row_that_is_not_there_is_refused(bad: int) -> None:
    g = IndexedSlices(torch.ones(2, WIDTH), torch.tensor([0, bad]), (ROWS, WIDTH))
    with pytest.raises(IndexError, match=f"of a table of {ROWS} rows"):
        g.coalesce()


# -- what is not closed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [torch.exp, lambda g: g.cos(), lambda g: g + 1, lambda g: 1 - g, lambda g: g**-1, lambda g: g**0,
     lambda g: torch.clamp(g, 0.1, 1), lambda g: g @ torch.ones(WIDTH, 2), lambda g: g[0], lambda g: 1 / g,
     lambda g: g * g, lambda g: torch.cat([g, torch.ones(1, WIDTH)]), lambda g: g > 0, torch.mean,
     lambda g: g.long(), lambda g: g * torch.ones(2, ROWS, WIDTH), lambda g: torch.ones(ROWS, WIDTH) / g],
)  # fmt: skip
def test_open_operation_names_op_variable_and_bytes(call: Map) -> None:
    w = table()
    with tfnb.record():
        (dw,) = tfnb.gradients(w.read()[INDEX].sum(), [w])
        with pytest.raises(InvalidArgument, match=r"table.* takes 168 bytes.*to_dense\(\).*\n.*test_slices") as caught:
            call(dw)
    assert caught.value.op


@pytest.mark.parametrize(
    ("values", "indices", "shape", "error"),
    [(torch.ones(2, 3), torch.ones(2), (4, 3), InvalidArgument),
     (torch.ones(2, 3), torch.tensor([1]), (4, 3), ShapeError),
     (torch.ones(2, 3), torch.tensor([1, 2]), (4, 5), ShapeError),
     (torch.ones(2, 3), torch.tensor([[1, 2]]), (4, 3), ShapeError),
     (torch.ones(2), torch.tensor([1, 2]), (4, 3), ShapeError)],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(values: Any, indices: Any, shape: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        IndexedSlices(values, indices, shape)


# -- as values of the graph --------------------------------------------------------------------------------------


def test_slices_are_fetched_and_fed() -> None:
    w, fed = table(), slices(9)
    with tfnb.record():
        i = tfnb.placeholder(INDEX)
        (dw,) = tfnb.gradients(w.read()[i].sum(), [w])
        twice = (dw * 2).coalesce()
    result = tfnb.run({"dw": dw, "twice": [twice]}, {i: INDEX})
    assert type(result["dw"].values) is torch.Tensor
    torch.testing.assert_close(result["twice"][0].to_dense(), 2 * dense(result["dw"]))
    torch.testing.assert_close(tfnb.run(twice, {dw: fed}).to_dense(), 2 * dense(fed))
    call = tfnb.Session(dw.graph).make_callable(twice, [dw])
    torch.testing.assert_close(call(fed).to_dense(), 2 * dense(fed))
    torch.testing.assert_close(twice.eval({dw: fed}).to_dense(), 2 * dense(fed))


def test_feed_that_is_no_slices_is_refused() -> None:
    w = table()
    with tfnb.record():
        (dw,) = tfnb.gradients(w.read()[INDEX].sum(), [w])
    with pytest.raises(FeedError, match="IndexedSlices"):
        tfnb.run(dw, {dw: torch.ones(ROWS, WIDTH)})
    with pytest.raises(ShapeError, match=r"\[8, 3\]"):
        tfnb.run(dw, {dw: slices(3, rows=8)})


def test_second_order_through_a_lookup_and_its_slices() -> None:
    w, scale = table(), tfnb.Variable(torch.tensor(0.7, dtype=torch.float64), name="scale")
    direction = torch.randn(ROWS, WIDTH, dtype=torch.float64)

    def loss(weight: torch.Tensor, s: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (torch.sin(weight[i]) * s).pow(3).sum()

    with tfnb.record():
        i = tfnb.placeholder(INDEX)
        (dw,) = tfnb.gradients(loss(w.read(), scale.read(), i), [w])
        second = tfnb.gradients(dw, [w, scale], direction)
        by_rows = tfnb.gradients([(dw.coalesce().values ** 2).sum()], [w, scale])
        by_dense = tfnb.gradients([(dw.to_dense() ** 2).sum()], [w, scale])
    ww, ss = w.value().requires_grad_(), scale.value().requires_grad_()
    (first,) = torch.autograd.grad(loss(ww, ss, INDEX), ww, create_graph=True)
    expected = torch.autograd.grad(first, [ww, ss], direction, retain_graph=True)
    squared = torch.autograd.grad((first**2).sum(), [ww, ss])
    assert isinstance(second[0], IndexedSlices)
    for got, wanted in ((second, expected), (by_rows, squared), (by_dense, squared)):
        rows, factor = tfnb.run(got, {i: INDEX})
        torch.testing.assert_close(rows.to_dense(), wanted[0])
        torch.testing.assert_close(factor, wanted[1])


def test_no_dense_tensor_is_made_on_the_way() -> None:
    rows = 5_000_000
    w = tfnb.Variable(torch.zeros(rows, 1), name="big")
    with tfnb.record() as g:
        i = tfnb.placeholder(INDEX)
        (dw,) = tfnb.gradients((w.read()[i] + 1).square().sum(), [w])
        tfnb.clip_by_norm(-dw / 2, 1.0)
    made = [node.name for node in g.nodes if node.op != "tfnb.read" and rows in node.outputs[0].shape]
    assert made == []
    assert math.isclose(float(tfnb.run(tfnb.gradients(dw, [w])[0], {i: INDEX}).values.sum()), 12.0)
