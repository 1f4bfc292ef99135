"""Shape rules are asked once for the same metadata, and again where the answer may be another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfnb
from tfnb.recording.overrides.override_table import OVERRIDES, Stage
from tfnb.recording.values.workspace import workspace

aten = torch.ops.aten
SHAPES = OVERRIDES[Stage.SHAPE]


def test_equal_questions_have_one_answer() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3))
        a, b = x.sin(), x.cos()
        c, d = a + b, b + a
    fakes = workspace(g).fakes
    assert fakes[c.value] is fakes[d.value] is fakes[a.value]
    assert str(c.spec) == "float32[B, 3]"


def test_rows_of_one_table_ask_the_same_question_of_ops_that_are_no_views() -> None:
    data = torch.randn(5, 6)
    with tfnb.record() as g:
        x = tfnb.placeholder(data, shape=(5, 6))
        rows = [x[place] for place in range(5)]
        waves = [row.sin() for row in rows]
        tails = [row[3:] for row in rows]
        same = [torch.ops.aten._unsafe_view(row, [2, 3]) for row in rows]
    fakes = workspace(g).fakes
    assert len({id(fakes[wave.value]) for wave in waves}) == 1
    assert [tail.storage_offset() for tail in tails] == [3, 9, 15, 21, 27]
    assert [each.storage_offset() for each in same] == [0, 6, 12, 18, 24]  # as in torch: it looks at the row's memory
    for got, row in zip(tfnb.run([*waves, *tails], {x: data}), 2 * list(data), strict=True):
        assert torch.equal(got, row.sin() if got.shape == (6,) else row[3:])


def test_numbers_of_other_types_are_other_questions() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.arange(4))
        specs = [(x * number).spec.dtype for number in (True, 1, 1.0)]
    assert specs == [torch.int64, torch.int64, torch.float32]


def test_the_default_dtype_is_part_of_the_question() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.arange(4))
        single = x / 2
        torch.set_default_dtype(torch.float64)
        try:
            double = x / 2
        finally:
            torch.set_default_dtype(torch.float32)
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)


def test_a_run_has_the_default_dtype_of_the_recording() -> None:
    """Workers of a cluster, and a later cell, may have another one."""
    torch.set_default_dtype(torch.float64)
    try:
        with tfnb.record():
            x = tfnb.placeholder(torch.arange(4))
            n, z = x.shape[0], tfnb.placeholder(torch.ones(4, dtype=torch.complex128))
            made = [torch.zeros(n, 2), torch.full((n,), 1.5), torch.rand(n), torch.arange(0, n * 1.0), torch.eye(3)]
            ratios = [x / 3, 2 / (x + 1), x * 0.3, x.sqrt(), 2.5**x, torch.where(x > 1, x, 0.3), (x == 1).sum() / n]
            ratios.append(x.logsumexp(0))
            feeds, values = {x: torch.arange(4), z: torch.ones(4, dtype=torch.complex128)}, [*made, *ratios, z.abs()]
        wanted = tfnb.run(values, feeds)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {value.dtype for value in wanted} == {torch.float64}
    again = tfnb.Session(values[0].graph).run(values, feeds)  # lowered anew
    for value, got, want in zip(values, again, wanted, strict=True):
        assert got.dtype == want.dtype
        assert value is made[2] or torch.equal(got, want)  # that one is drawn


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_a_default_dtype_of_later_changes_no_run(executor: str) -> None:
    """What was recorded with float32, run before and while the default is float64."""
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.arange(4))
        values = [x / 3, x * 0.3, x.sqrt(), 0.5 - x, x / (x + 1), (x > 1) * 0.1, torch.atan2(x, x), x * 1j]
        values.append(x.logsumexp(0))
        total, _ = tfnb.while_loop(lambda t, i: i < 3, lambda t, i: (t + (i / 7), i + 1), (x * 0.1, x[1]))
        values = [*values, total, torch.where(x > 1, x, 0.3)]
    session, feeds = tfnb.Session(graph, executor=executor), {x: torch.arange(4)}
    wanted, call = session.run(values, feeds), session.make_callable(values, [x])
    torch.set_default_dtype(torch.float64)
    try:
        called = call(feeds[x])
        again, anew = session.run(values, feeds), tfnb.Session(graph, executor=executor).run(values, feeds)
    finally:
        torch.set_default_dtype(torch.float32)
    for value, want, *found in zip(values, wanted, called, again, anew, strict=True):
        assert all(got.dtype == value.dtype and torch.equal(got, want) for got in found)


def test_a_view_is_not_taken_for_memory_of_its_own() -> None:
    data = torch.randn(4, 6)
    with tfnb.record():
        x = tfnb.placeholder(data, shape=(4, 6))
        small = torch.zeros(2, 3)
        view = (x * 1)[:2, :3].as_strided((2, 6), (6, 1))  # reaches beyond what [2, 3] of its own would hold
        y = view + small.sum()
    assert torch.equal(tfnb.run(y, {x: data}), data[:2])


def test_views_of_plain_sizes_look_where_torch_looks() -> None:
    data = torch.randn(4, 6, 3)
    views = [
        lambda x: x[3], lambda x: x[-1, 2:5], lambda x: x.mT, lambda x: x[1:].unbind(1)[2], lambda x: x.split(4, 1)[1],
        lambda x: x.permute(2, 0, 1), lambda x: x.view(24, 3)[5:], lambda x: x[2].expand(7, 6, 3),
        lambda x: x[..., None], lambda x: x.diagonal(1, 0, 1), lambda x: x.unfold(1, 2, 3),
        lambda x: x.chunk(3, 2)[2].squeeze(2), lambda x: x[1].t(),
    ]  # fmt: skip
    with tfnb.record():
        x = tfnb.placeholder(data, shape=(4, 6, 3))
        got = [view(x) for view in views]
        with pytest.raises(
            tfnb.errors.ShapeError, match=r"select failed: .*out of range[\s\S]*test_shapes.py line \d+"
        ):
            x.select(0, 9)
    for each, view in zip(got, views, strict=True):
        want = view(data)
        assert each.shape == want.shape and each.stride() == want.stride(), each
        assert each.storage_offset() == want.storage_offset(), each
    for each, view in zip(tfnb.run(got, {x: 2 * data}), views, strict=True):
        assert torch.equal(each, view(2 * data))


def test_sizes_that_data_decide_are_asked_each_time() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([1.0, 0.0, 2.0]))
        a, b = x.nonzero(), (x - 1).nonzero()
    assert a.spec.shape[0] != b.spec.shape[0]
    a, b = tfnb.run([a, b], {x: torch.tensor([1.0, 1.0, 0.0, 3.0])})
    assert (len(a), len(b)) == (3, 2)


def test_a_size_that_becomes_fixed_is_asked_again() -> None:
    with pytest.warns(UserWarning, match="became the constant 4"), tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3))
        y = x.sin() + torch.randn(4, 3)
        z = x.sin()
    assert y.spec.shape == z.spec.shape == (4, 3)


def _metadata(out: Any) -> list[Any]:
    flat = out if isinstance(out, tuple) else (out,)
    return [None if t is None else (t.dtype, t.shape, t.stride(), t.storage_offset()) for t in flat]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 6)], ids=str)
def test_batch_norms_give_the_shapes_that_torch_says(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    forward, backward = aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default
    with FakeTensorMode():
        plain = torch.empty(shape, dtype=dtype)
        turned = torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape) - 1, -1, -1))
        w, b, mean, var = (torch.empty(3, dtype=dtype) for _ in range(4))
        for x in (plain, turned):
            for weights in ((w, b), (None, None)):
                args = x, *weights, mean, var, True, 0.1, 1e-5
                assert _metadata(SHAPES[forward](*args)) == _metadata(forward(*args))
            for mask in itertools.product((True, False), repeat=3):
                args = torch.empty_like(x), x, w, mean, var, mean, var, True, 1e-5, list(mask)
                assert _metadata(SHAPES[backward](*args)) == _metadata(backward(*args))


def _losses(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    x, dy = torch.randn(5, 4, dtype=dtype), torch.randn(4, 5, dtype=dtype).T  # which lies the other way
    y, weight = torch.tensor([0, 1, 2, 3, 1]), torch.rand(4, dtype=dtype)
    one, rows = torch.ones((), dtype=dtype), torch.ones(5, dtype=dtype)
    found: dict[str, tuple[Any, ...]] = {"relu back": (aten.threshold_backward.default, dy, x, 0)}
    for name, op in (("softmax", aten._softmax), ("log softmax", aten._log_softmax)):
        found |= {f"{name} {dim}": (op.default, dy, dim, False) for dim in (0, -1)}
    for name, op in (("softmax", aten._softmax_backward_data), ("log softmax", aten._log_softmax_backward_data)):
        found[f"{name} back"] = op.default, dy, x, 1, dtype
    for reduction in (0, 1, 2):
        for w in (None, weight):
            key, by = f"nll {reduction}{'' if w is None else ' weighted'}", one if reduction else rows
            found[key] = aten.nll_loss_forward.default, dy, y, w, reduction, -100
            found[f"{key} back"] = aten.nll_loss_backward.default, by, dy, y, w, reduction, -100, one
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", _losses(torch.float32))
def test_losses_give_the_shapes_of_the_kernels(name: str, dtype: torch.dtype) -> None:
    op, *args = _losses(dtype)[name]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        found = SHAPES[op](*fakes)
    assert [one[:3] for one in _metadata(found)] == [one[:3] for one in _metadata(op(*args))]


def test_a_fixed_number_of_rows_before_others_has_that_size() -> None:
    first, data = torch.nn.Parameter(torch.randn(5)), torch.randn(4, 3)
    with tfnb.record():
        x = tfnb.placeholder(data)
        joined = torch.cat([first * 1, x[:, 0]])
        parts = [joined[:5], joined[..., 2:5], joined.narrow(0, 0, 5), joined[-5:], joined[:7]]
        (grad,) = tfnb.gradients((joined[:5] ** 2).sum(), [first])
    assert [str(part.spec) for part in (*parts, grad)] == [
        "float32[5]", "float32[3]", "float32[5]", "float32[5]", "float32[min(7, 5 + B)]", "float32[5]"
    ]  # fmt: skip
    for rows in (4, 1, 0):
        batch = torch.randn(rows, 3)
        whole = torch.cat([first.detach(), batch[:, 0]])
        wanted = [whole[:5], whole[2:5], whole[:5], whole[-5:], whole[:7]]
        for got, want in zip(tfnb.run(parts, {x: batch}), wanted, strict=True):
            torch.testing.assert_close(got, want)
