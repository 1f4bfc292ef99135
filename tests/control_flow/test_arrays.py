"""Arrays written once: in loops, branches and gradients they give what Python lists of tensors give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.written import blocks, compared
from tfnb.errors import InvalidArgument, ShapeError

F64 = torch.float64


def powers(x: torch.Tensor, count: Any) -> torch.Tensor:
    """1, x, x^2, ...: each element is made of the one before."""

    def body(i: Any, array: Any) -> Any:
        return i + 1, array.write(i, array.read(i - 1) * x)

    array = tfnb.TensorArray(count, shape=x.shape, dtype=F64).write(0, torch.ones_like(x))
    return tfnb.while_loop(lambda i, array: i < array.size(), body, (1, array))[1].stack()


@pytest.mark.parametrize("trips", [1, 2, 6])
def test_elements_made_of_elements_and_their_gradients_to_the_second_order(trips: int) -> None:
    sample = torch.tensor([0.5, 1.5], dtype=F64)
    with tfnb.record():
        x = tfnb.placeholder(sample, name="x")
        n = tfnb.placeholder(torch.tensor(4), name="n")
        y = powers(x, n)
        (dx,) = tfnb.gradients(y.sin().sum(), [x])
        (ddx,) = tfnb.gradients((dx * dx).sum(), [x])
    fed = torch.tensor([0.7, -1.2, 2.0], dtype=F64, requires_grad=True)
    want = torch.stack([fed**i for i in range(trips)])
    (first,) = torch.autograd.grad(want.sin().sum(), fed, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), fed, allow_unused=True) if trips > 1 else (fed * 0,)
    got = tfnb.run([y, dx, ddx], {x: fed.detach(), n: trips})
    torch.testing.assert_close(got, [want.detach(), first.detach(), second.detach()])


def test_outside_a_recording_it_is_an_array_that_autograd_knows() -> None:
    x = torch.tensor([0.7, -1.2], dtype=F64, requires_grad=True)
    y = powers(x, 4)
    torch.testing.assert_close(y, torch.stack([x**i for i in range(4)]))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, (1 + 2 * x + 3 * x**2).detach())


def test_an_array_learns_its_elements_from_the_body() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        _, _, ys = tfnb.while_loop(
            lambda i, y, ys: i < 3, lambda i, y, ys: (i + 1, y * 2, ys.write(i, y.sum(1))), (0, x, tfnb.TensorArray(3))
        )
        carry = tfnb.fold(
            lambda c, row: (c[0] + 1, c[1].write(c[0], row * 2)), (0, tfnb.TensorArray(2)), torch.ones(2, 3)
        )
        out, other = ys.stack(), carry[1].concat()
    assert tfnb.run(out, {x: torch.ones(4, 2)}).tolist() == [[2.0] * 4, [4.0] * 4, [8.0] * 4]
    assert tfnb.run(other).tolist() == [2.0] * 6


def test_reads_of_one_element_add_up_and_unstack_is_undone_by_stack() -> None:
    with tfnb.record():
        xs = tfnb.placeholder(torch.randn(4, 2, dtype=F64), shape=("T", 2), name="xs")
        order = tfnb.placeholder(torch.tensor([0, 2, 2]), name="order")
        array = tfnb.TensorArray().unstack(xs)

        def body(i: Any, total: Any) -> Any:
            return i + 1, total + array.read(order[i]) * (i + 1)

        _, total = tfnb.while_loop(lambda i, t: i < order.shape[0], body, (0, torch.zeros(2, dtype=F64)))
        (dxs,) = tfnb.gradients(total.square().sum() + array.gather(order).sum() + array.stack().sum(), [xs])
    fed, picked = torch.randn(5, 2, dtype=F64, requires_grad=True), torch.tensor([4, 1, 4, 4])
    want = sum(fed[j] * (i + 1) for i, j in enumerate(picked))
    (expected,) = torch.autograd.grad(want.square().sum() + fed[picked].sum() + fed.sum(), fed)
    got = tfnb.run([total, dxs], {xs: fed.detach(), order: picked})
    torch.testing.assert_close(got, [want.detach(), expected])


def test_scatter_split_concat_and_branches() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.arange(6.0), shape=(6,), name="x")
        array = tfnb.TensorArray().split(x, 2)
        mixed = tfnb.cond(x.sum() > 0, lambda: array, lambda: tfnb.TensorArray(3).scatter([2, 0, 1], array.stack()))
        outs = [mixed.concat(), mixed.size(), array.read(1)]
    for fed in (torch.arange(8.0)[2:], -torch.arange(6.0)):
        rows = fed.reshape(3, 2)
        want = rows if fed.sum() > 0 else rows[[1, 2, 0]]
        assert [t.tolist() for t in tfnb.run(outs, {x: fed})] == [want.flatten().tolist(), 3, rows[1].tolist()]


def test_a_second_write_and_what_is_not_there_name_the_line() -> None:
    with pytest.warns(UserWarning, match="the program caught"), tfnb.record():
        i = tfnb.placeholder(torch.tensor(1), name="i")
        array = tfnb.TensorArray(3).write(0, 5.0)
        twice, read = array.write(i, 2.0).stack(), array.write(1, 1.0).read(i)
        _, looped = tfnb.while_loop(
            lambda n, a: n < 2, lambda n, a: (n + 1, a.write(n * i, 1.0)), (0, tfnb.TensorArray(2))
        )
        done = looped.stack()
        with pytest.raises(InvalidArgument, match=r"element 0 of a TensorArray is written twice.*\n.*\n.*line"):
            array.write(0, 1.0)
        with pytest.raises(ShapeError, match=r"shape \[2\].*TensorArray of \[\]"):
            array.write(1, torch.ones(2))
        with pytest.raises(InvalidArgument, match=r"written as torch\.int64"):
            array.write(1, torch.ones((), dtype=torch.int64))
        with pytest.raises(InvalidArgument, match="one whole number"):
            array.write(0.5, 1.0)
        with pytest.raises(InvalidArgument, match="before anything says"):
            tfnb.TensorArray(2).stack()
    assert tfnb.run(twice, {i: 2}).tolist() == [5, 0, 2]
    assert tfnb.run(done, {i: 1}).tolist() == [1, 1]
    for fetch, fed, why in (
        (twice, 0, "written twice"), (done, 0, "written twice"), (twice, 3, "element 3"), (read, 2, "was not written")
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=why) as raised:
            tfnb.run(fetch, {i: fed})
        assert raised.value.line is not None


def test_an_array_grows_as_far_as_it_is_written() -> None:
    def program(x: torch.Tensor) -> Any:
        def body(i: Any, array: Any) -> Any:
            return i + 1, array.write(i, array.read(i - 1) * x)

        array = tfnb.TensorArray(dynamic_size=True).write(0, x)
        return tfnb.while_loop(lambda i, array: array.read(i - 1).norm() < 10, body, (1, array))[1].stack()

    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([1.5, 1.2], dtype=F64), shape=(2,), name="x")
        y = program(x)
        (dx,) = tfnb.gradients(y.square().sum(), [x])
    for fed in (torch.tensor([1.4, 2.0], dtype=F64), torch.tensor([9.0, 9.0], dtype=F64)):
        fed.requires_grad_()
        want = program(fed)
        (expected,) = torch.autograd.grad(want.square().sum(), fed)
        torch.testing.assert_close(tfnb.run([y, dx], {x: fed.detach()}), [want.detach(), expected])


def test_a_loop_writes_its_array_in_place_and_leaves_others_alone() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(5, 2), shape=("T", 2), name="x")
        first = tfnb.TensorArray(6).unstack(torch.zeros(6, 2))
        start = tfnb.TensorArray(7, shape=(2,)).write(6, x[0])

        def body(i: Any, array: Any, kept: Any) -> Any:
            array = array.write(i, x[i] * 2)
            return i + 1, array, kept + array.stack() * first.read(i).sum()

        _, array, kept = tfnb.while_loop(lambda i, *_: i < x.shape[0], body, (0, start, torch.zeros(7, 2)))
        _, other, before = tfnb.while_loop(
            lambda i, *_: i < x.shape[0], lambda i, a, b: (i + 1, a.write(i, x[i]), a.stack()),
            (0, start, torch.zeros(7, 2)),
        )  # fmt: skip
        outs = [array.stack(), kept, start.stack(), other.stack(), before]
    fed = torch.arange(10.0).reshape(5, 2)
    a, k, s, o, b = tfnb.run(outs, {x: fed})
    assert torch.equal(a, torch.cat([fed * 2, torch.zeros(1, 2), fed[:1]]))
    assert torch.equal(s, torch.cat([torch.zeros(6, 2), fed[:1]]))
    assert torch.equal(o, torch.cat([fed, torch.zeros(1, 2), fed[:1]]))
    assert torch.equal(b, torch.cat([fed[:4], torch.zeros(2, 2), fed[:1]]))
    assert not k.any()


def test_writing_takes_time_by_what_is_written() -> None:
    with tfnb.record():
        n = tfnb.placeholder(torch.tensor(3), name="n")
        x = tfnb.placeholder(torch.ones(4096), shape=(4096,), name="x")
        _, array = tfnb.while_loop(
            lambda i, array: i < n, lambda i, array: (i + 1, array.write(i, x * 2)),
            (0, tfnb.TensorArray(n, shape=(4096,))),
        )  # fmt: skip
        (dx,) = tfnb.gradients(array.stack().sum(), [x])
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        (found,) = tfnb.run([dx], {n: 200, x: torch.ones(4096)})
    assert torch.equal(found, torch.full((4096,), 400.0))
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    taken = sum(e.nbytes() for e in events if e.nbytes() > 0)
    assert taken < 40 * 200 * 4096 * 4, "some arrays, and not one for each iteration"


# -- in staged statements ------------------------------------------------------------------------------------------

STAGED = """
# an array that a branch writes, in a loop
a = tfnb.TensorArray(len(x), shape=(3,))
for i, row in enumerate(x):
    if row.sum() > 0:
        a = a.write(i, row * 2)
return a.stack()

# longer by some branches
a, n = tfnb.TensorArray(dynamic_size=True, shape=(3,)), 0
for row in x:
    if row.sum() > 0:
        a = a.write(n, row)
        n += 1
return a.stack(), a.size()
"""


@pytest.mark.parametrize(("name", "body"), blocks(STAGED), ids=[n for n, _ in blocks(STAGED)])
def test_staged_statements_write_elements(name: str, body: str) -> None:
    feeds = [
        torch.linspace(-1, 2, 3 * n).reshape(n, 3) * scale for n, scale in ((3, 1.0), (1, 2.0), (5, 1.5), (2, 1.0))
    ]
    notes, refused = compared(body, feeds[0], feeds)
    assert not any("stays Python" in note for note in notes), notes
    assert refused == 0


def test_an_array_that_one_branch_alone_writes_has_to_know_its_elements() -> None:
    body = "a = tfnb.TensorArray(2)\nif x.sum() > 0:\n    a = a.write(0, x[0])\nreturn a.stack()"
    with pytest.raises(InvalidArgument, match=r"`a` is of another structure.*give it shape=\n *line 3 of f"):
        compared(body, torch.ones(3, 3), [])


def test_elements_of_several_shapes_are_refused_with_the_line() -> None:
    with tfnb.record():
        with pytest.raises(ShapeError, match=r"shape \[2\] is written to a TensorArray of \[3\]\n.*line"):
            tfnb.TensorArray(2).write(0, torch.ones(3)).write(1, torch.ones(2))
        with pytest.raises(InvalidArgument, match=r"one shape, not \[None, 2\]: pad them"):
            tfnb.TensorArray(2, shape=(None, 2))
