"""Gradients through loops and branches are those of torch.autograd through the same Python loop, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
from tests.control_flow.random_programs import python_branch, python_loop
from tests.control_flow.written import function
from tfnb.errors import NoGradient
from tfnb.passes import optimize

F64 = torch.float64


def check(
    program: Callable[..., torch.Tensor], samples: Sequence[torch.Tensor], feeds: Sequence[Sequence[torch.Tensor]],
    *, orders: int = 2, shape: Any = None,
) -> None:  # fmt: skip
    """``program(loop, branch, *inputs)`` recorded on the samples and run on the feeds against torch.autograd."""

    def derived(value: torch.Tensor, xs: Sequence[Any], take: Callable[..., Any]) -> list[Any]:
        found = [value]
        for _ in range(orders):
            grads = take(value, xs)
            found += grads
            value = sum(((g * g).sum() for g in grads), torch.zeros((), dtype=F64))
        return found

    def reference(value: torch.Tensor, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not value.requires_grad:
            return [torch.zeros_like(x) for x in xs]
        found = torch.autograd.grad(value, xs, create_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)]

    with tfnb.record():
        xs = [tfnb.placeholder(sample, shape=shape) for sample in samples]
        outs = derived(
            program(tfnb.while_loop, tfnb.cond, *xs), xs, lambda y, xs: tfnb.gradients(y, xs, unconnected="zero")
        )
    for values in [samples, *feeds]:
        leaves = [value.clone().requires_grad_() for value in values]
        expected = derived(program(python_loop, python_branch, *leaves), leaves, reference)
        got = tfnb.run(outs, dict(zip(xs, values, strict=True)))
        torch.testing.assert_close(got, [e.detach() for e in expected], rtol=1e-9, atol=1e-9)


def tensors(*shape: int, count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape) + count)
    return [torch.randn(shape, dtype=F64, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("trips", [0, 1, 7])
def test_a_power_by_a_loop(trips: int) -> None:
    def program(loop: Any, branch: Any, x: torch.Tensor) -> torch.Tensor:
        return loop(lambda n, y: n < trips, lambda n, y: (n + 1, y * x), (0, x))[1].sum()

    check(program, tensors(3, count=1), [tensors(5, count=1)], orders=3)


def test_the_third_power_at_two_is_twelve_twelve_six() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(2.0), name="x")
        y = tfnb.while_loop(lambda n, y: n < 2, lambda n, y: (n + 1, y * x), (0, x))[1]
        first = tfnb.gradients(y, [x])
        second = tfnb.gradients(first, [x])
        third = tfnb.gradients(second, [x])
    assert [v.item() for (v,) in tfnb.run([first, second, third], {x: 2.0})] == [12, 12, 6]


def test_a_branch_gives_the_gradient_of_the_side_it_takes() -> None:
    def program(loop: Any, branch: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return branch(x.sum() > 0, lambda: (2 * x * y).sin().sum(), lambda: (3 * x).exp().sum())

    up, down = tensors(3)[0].abs(), -tensors(3)[0].abs()
    check(program, [up, tensors(3)[1]], [[down, tensors(3)[1]], [down[:2], up[:2]]], orders=3)


def test_loops_in_loops_with_iterations_that_the_data_decide() -> None:
    def program(loop: Any, branch: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def body(i: Any, y: Any) -> Any:
            _, inner = loop(
                lambda j, z: (j < i) & (z.abs().sum() < 30), lambda j, z: (j + 1, z * w[j] + y.sin()), (0, y)
            )
            return i + 1, inner * w.mean()

        return loop(lambda i, y: i < 4, body, (0, x))[1].sum()

    check(program, [tensors(2)[0], tensors(4)[0]], [[tensors(3)[0], tensors(4)[1]]])


def test_loops_in_branches_and_branches_in_loops() -> None:
    def program(loop: Any, branch: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def body(i: Any, y: Any) -> Any:
            return i + 1, branch(
                y.sum() > 0, lambda: loop(lambda j, z: j < 2, lambda j, z: (j + 1, z * w.sin()), (0, y))[1].cos(),
                lambda: y * y + w.sum(),
            )  # fmt: skip

        return loop(lambda i, y: i < 3, body, (0, x))[1].sum()

    check(program, tensors(3), [tensors(4), [-t for t in tensors(4)]])


COLLECTED = """
if x.sum() > 0:
    w = x.sum(0)
else:
    ys, v = [], x[0] * 2
    for i in range(torch.tensor(len(x)) - 1):
        ys.append(v * (i + 1))
    w = torch.stack(ys).sum(0)
"""


@pytest.mark.parametrize("last", ["torch.stack(ys).sum(0)", "torch.stack(ys).sum(0) if len(ys) > 1 else v.exp()"])
def test_higher_orders_of_a_branch_that_holds_a_loop_with_rows(last: str) -> None:
    program = function(COLLECTED.replace("torch.stack(ys).sum(0)", last) + "return (w ** 3).sum()")

    def derived(value: Any, x: Any, take: Any) -> list[Any]:
        found = []
        for _ in range(3):
            found += take(value, [x])
            value = found[-1].square().sum()
        return found

    for sample in (tensors(4, 3)[0].abs(), -tensors(4, 3)[0].abs()):
        with tfnb.record() as graph:
            x = tfnb.placeholder(sample, name="x")
            slopes = derived(tfnb.autograph(program)(x), x, tfnb.gradients)
        sessions = [tfnb.Session(graph, executor=executor) for executor in ("auto", "dataflow")]
        for fed in (sample, -sample, sample[:2], -sample[:2], sample[:3]):
            leaf = fed.clone().requires_grad_()
            wanted = derived(program(leaf), leaf, lambda y, xs: torch.autograd.grad(y, xs, create_graph=True))
            for session in sessions:
                got = session.run(slopes, {x: fed})
                torch.testing.assert_close(got, [w.detach() for w in wanted], rtol=1e-9, atol=1e-9)


def test_scan_saves_what_its_gradient_needs_once() -> None:
    def cell(w: Any, h: Any, xs: Any) -> Any:
        def iteration(h: Any, x: Any) -> Any:
            h = torch.tanh(h @ w + x)
            return h, (h * x).sum(-1)

        last, ys = tfnb.scan(iteration, h, xs)
        return last.sum() + (ys * ys).sum()

    values = [torch.randn(shape, dtype=F64) for shape in [(3, 3), (2, 3), (5, 2, 3)]]
    with tfnb.record() as g:
        w = tfnb.placeholder(values[0], shape=(3, 3))
        h, xs = tfnb.placeholder(values[1]), tfnb.placeholder(values[2], shape=("T", "B", 3))
        loss = cell(w, h, xs)
        grads = tfnb.gradients(loss, [w, h, xs])
    leaves = [value.clone().requires_grad_() for value in values]
    expected = torch.autograd.grad(cell(*leaves), leaves)
    torch.testing.assert_close(tfnb.run(grads, dict(zip((w, h, xs), values, strict=True))), list(expected))
    last = optimize(g, [t.value for t in (loss, *grads)], [t.value for t in (w, h, xs)])
    loops = last.select(op="tfnb.while")
    assert len(loops) == 2
    assert [len(node.attrs["rows"]) for node in loops] == [3, 1]  # ys, h and the tanh; the cotangents of xs


def test_a_module_in_a_loop_learns() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3).double()
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3, dtype=F64), name="x")
        (y,) = tfnb.while_loop(lambda y: y.norm() < 5, lambda y: (y + layer(y).tanh(),), (x,), maximum_iterations=3)
        loss = (y * y).mean()
        grads = tfnb.gradients(loss, list(layer.parameters()))
        step = tfnb.train.SGD(0.1).minimize(loss)
    fed = torch.randn(5, 3, dtype=F64)
    (want,) = tfnb.while_loop(lambda y: y.norm() < 5, lambda y: (y + layer(y).tanh(),), (fed,), maximum_iterations=3)
    expected = torch.autograd.grad((want * want).mean(), list(layer.parameters()))
    torch.testing.assert_close(tfnb.run(grads, {x: fed}), list(expected))
    before = tfnb.run(loss, {x: fed})
    for _ in range(5):
        tfnb.run(step, {x: fed})
    assert tfnb.run(loss, {x: fed}) < before


def test_a_module_in_a_branch_in_a_loop_has_autograds_gradients() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3).double()

    def program(loop: Any, branch: Any, x: torch.Tensor) -> torch.Tensor:
        def body(i: Any, y: Any) -> Any:
            return i + 1, y + branch(y.sum() > 0, lambda: layer(y).tanh(), lambda: y * 0.5)

        return loop(lambda i, y: i < 3, body, (0, x))[1].square().mean()

    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3, dtype=F64), name="x")
        grads = tfnb.gradients(program(tfnb.while_loop, tfnb.cond, x), [*layer.parameters()])
    for fed in torch.randn(3, 5, 3, dtype=F64):
        value = program(python_loop, python_branch, fed) + 0 * layer(fed).sum()  # zeros where no iteration takes it
        torch.testing.assert_close(tfnb.run(grads, {x: fed}), list(torch.autograd.grad(value, [*layer.parameters()])))


def test_backward_in_a_cell_goes_through_a_loop() -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    with tfnb.record():
        y = tfnb.fold(lambda c, x: c * w.sin() + x, w, torch.ones(3, 2))
        y.sum().backward()
        grad = w.grad * 1
    y = w
    for _ in range(3):
        y = y * w.sin() + 1
    torch.testing.assert_close(tfnb.run(grad), torch.autograd.grad(y.sum(), w)[0])


def test_draws_inside_are_the_same_forward_and_backward() -> None:
    def program(x: torch.Tensor) -> Any:
        def outer(c: Any, _: Any) -> Any:
            return tfnb.fold(lambda c, _: torch.nn.functional.dropout(c, 0.5) * x, c, torch.zeros(2)), ()

        return tfnb.scan(outer, x, torch.zeros(3))[0]

    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2000, dtype=F64), name="x")
        y = program(x)
        (dx,) = tfnb.gradients(y.sum(), [x])
    value, grad = tfnb.run([y, dx], {x: torch.full((2000,), 1.5, dtype=F64)})
    assert 0 < (value != 0).sum() < 2000
    torch.testing.assert_close(grad, value * 7 / 1.5)  # x to the seventh, times what the draws left


def test_integers_and_what_does_not_matter_have_no_gradient() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([1.0, 2.0]), name="x")
        i = tfnb.placeholder(torch.tensor(3), name="i")
        _, y, z = tfnb.while_loop(lambda n, y, z: n < 3, lambda n, y, z: (n + 1, y * 2, z + i), (0, x, i))
        dx, di = tfnb.gradients(y.sum() + z, [x, i])
    assert di is None
    assert tfnb.run(dx, {x: [1.0, 2.0], i: 1}).tolist() == [8, 8]


def test_back_prop_false_is_an_error_with_its_line() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        (y,) = tfnb.while_loop(lambda y: y < 9, lambda y: (y * 2,), (x,), back_prop=False)
        with pytest.raises(NoGradient, match=r"back_prop=False.*\n.*test_gradients.py line \d+") as raised:
            tfnb.gradients(y, [x])
    assert raised.value.line is not None


def test_gradients_of_a_loop_are_taken_after_the_recording_and_from_a_file(tmp_path: Any) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor([1.0, 2.0], dtype=F64), name="x")
        y = tfnb.while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, y * x.sin()), (0, x))[1].sum()
    (dx,) = tfnb.gradients(y, [x])
    fed = torch.tensor([0.5, 1.5, 2.5], dtype=F64, requires_grad=True)
    (expected,) = torch.autograd.grad((fed * fed.sin() ** 3).sum(), [fed])
    torch.testing.assert_close(tfnb.run(dx, {x: fed.detach()}), expected)
    g.save(tmp_path / "g.json")
    loaded = tfnb.Graph.load(tmp_path / "g.json")
    torch.testing.assert_close(tfnb.Session(loaded).run(dx.name, {"x": fed.detach()}), expected)


# -- random programs ----------------------------------------------------------------------------------------------

PLACES = st.integers(0, 2)
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sin": lambda a, b, w: a.sin() + 0.1 * b, "mul": lambda a, b, w: 0.5 * a * b.cos(),
    "w": lambda a, b, w: a * w.tanh() + b,
    "mix": lambda a, b, w: (a - b) * 0.7 + w.mean(), "sum": lambda a, b, w: a * 0.3 + b.sum().tanh(),
}  # fmt: skip
OP = st.tuples(st.just("op"), st.sampled_from(sorted(OPS)), PLACES, PLACES, PLACES)
BLOCK = st.recursive(
    st.lists(OP, min_size=1, max_size=2),
    lambda inner: st.lists(
        st.one_of(
            OP, st.tuples(st.just("loop"), st.integers(0, 3), PLACES, inner),
            st.tuples(st.just("branch"), PLACES, inner, inner),
        ), min_size=1, max_size=2,
    ),
    max_leaves=6,
)  # fmt: skip


def run_block(block: Any, state: tuple[torch.Tensor, ...], w: torch.Tensor, loop: Any, branch: Any) -> Any:
    for kind, *args in block:
        if kind == "op":
            name, to, a, b = args
            state = (*state[:to], OPS[name](state[a], state[b], w), *state[to + 1 :])
        elif kind == "loop":
            trips, place, inner = args
            state = loop(
                lambda n, *s, t=trips, p=place: (n < t) & (s[p].sum() < 3),
                lambda n, *s, i=inner: (n + 1, *run_block(i, s, w, loop, branch)), (0, *state),
            )[1:]  # fmt: skip
        else:
            place, then, other = args
            state = branch(
                state[place].sum() > 0,
                lambda s=state, b=then: run_block(b, s, w, loop, branch),
                lambda s=state, b=other: run_block(b, s, w, loop, branch),
            )
    return state


def check_block(block: Any, orders: int) -> None:
    def program(loop: Any, branch: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b, c = run_block(block, (x, x.cos(), w * 0.5), w, loop, branch)
        return (a + b * c).sum()

    check(program, tensors(2), [tensors(3), [-t for t in tensors(4)]], orders=orders, shape=("B",))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(BLOCK)
def test_random_programs_equal_python(block: Any) -> None:
    check_block(block, 1)


def test_a_sample_computed_again_while_recording_is_not_recorded() -> None:
    op = [("op", "mix", 0, 0, 0)]
    check_block([("branch", 0, op, op)], 2)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(BLOCK)
def test_many_random_programs_equal_python_to_the_second_order(block: Any) -> None:
    check_block(block, 2)


def test_a_recurrent_net_over_sequences_of_different_lengths() -> None:
    torch.manual_seed(0)
    cell, table = torch.nn.LSTMCell(3, 4).double(), torch.nn.Embedding(7, 3).double()
    parameters = [*cell.parameters(), *table.parameters()]

    def program(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        def iteration(state: Any, row: Any) -> Any:
            (h, c), (words, t) = state, row
            new, kept = cell(table(words), (h, c)), (t < lengths)[:, None]
            return tuple(torch.where(kept, a, b) for a, b in zip(new, (h, c), strict=True)), ()

        zeros = torch.zeros(2, 4, dtype=F64)
        (h, _), _ = tfnb.scan(iteration, (zeros, zeros), (ids, torch.arange(ids.shape[0])))
        return h.square().sum()

    lengths = torch.tensor([5, 3])
    with tfnb.record():
        ids = tfnb.placeholder(torch.randint(0, 7, (5, 2)), shape=("T", 2), name="ids")
        grads = tfnb.gradients(program(ids, lengths), parameters)
    for length in (5, 4, 7):
        fed = torch.randint(0, 7, (length, 2))
        *got, rows = tfnb.run(grads, {ids: fed})
        want = list(torch.autograd.grad(program(fed, lengths), parameters))
        torch.testing.assert_close([*got, rows.to_dense()], want)


def test_no_iterations_and_no_samples() -> None:
    with tfnb.record():
        xs = tfnb.placeholder(shape=("T", 2), name="xs")
        w = tfnb.placeholder(torch.ones(2), shape=(2,), name="w")
        last, ys = tfnb.scan(lambda c, x: (c + x * w, c * x), torch.zeros(2), xs)
        grads = tfnb.gradients([last.sum(), ys.sum()], [xs, w])
    last_, ys_, (dxs, dw) = tfnb.run([last, ys, grads], {xs: torch.zeros(0, 2), w: [1.0, 2.0]})
    assert (last_.tolist(), ys_.shape, dxs.shape, dw.tolist()) == ([0, 0], (0, 2), (0, 2), [0, 0])


def test_a_variable_that_grows_has_a_gradient() -> None:
    def program(loop: Any, branch: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def body(n: Any, rows: Any) -> Any:
            new = rows[-1] * w + rows.sum(0)
            return n + 1, torch.cat([rows, new[None].sin()])

        init = (torch.tensor(0), torch.stack([x, x * 2]))
        if loop is python_loop:
            return loop(lambda n, r: n < 3, body, init)[1].square().sum()
        _, rows = loop(lambda n, r: n < 3, body, init, shape_invariants=((), (None, x.shape[0])))
        return rows.square().sum()

    check(program, tensors(3), [tensors(4)])


def test_a_variable_that_shrinks_inside_a_loop_has_a_gradient() -> None:
    def program(loop: Any, branch: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def body(total: Any, x: Any) -> Any:
            return total * w.mean() + x.cos().sum(), x[1:] * w[0]

        init = (torch.zeros((), dtype=F64), x)
        how = {} if loop is python_loop else {"shape_invariants": ((), (None,))}
        return loop(lambda total, x: x.abs().sum() > 0, body, init, **how)[0]

    check(program, tensors(3), [tensors(5)])


def test_a_table_that_a_body_looks_up_gets_the_rows_of_all_iterations() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(50, 3, dtype=F64)
    with tfnb.record() as g:
        words = tfnb.placeholder(torch.tensor([[4, 7, 7], [2, 4, 1]]), shape=("T", "B"), name="words")

        def body(i: Any, h: Any) -> Any:
            def inner(j: Any, h: Any) -> Any:
                return j + 1, h + table(words[i]).sum(0) * h.sin() * table.weight[words[i, j]]

            _, h = tfnb.while_loop(lambda j, h: j < 2, inner, (0, h))
            return i + 1, h

        _, h = tfnb.while_loop(lambda i, h: i < words.shape[0], body, (0, torch.ones(3, dtype=F64)))
        (dw,) = tfnb.gradients(h.sum(), [table.weight])
        step = tfnb.train.SGD(0.1).minimize(h.sum())
    assert isinstance(dw, tfnb.IndexedSlices)
    assert not any("densif" in node.op for node in g.nodes)
    fed = torch.tensor([[9, 3], [3, 0], [1, 1]])
    h = torch.ones(3, dtype=F64)
    for row in fed:
        for j in range(2):
            h = h + table(row).sum(0) * h.sin() * table.weight[row[j]]
    (want,) = torch.autograd.grad(h.sum(), table.weight)
    got = tfnb.run(dw, {words: fed})
    torch.testing.assert_close(got.to_dense(), want)
    assert set(got.indices.tolist()) == {0, 1, 3, 9}
    before = table.weight.detach().clone()
    tfnb.run(step, {words: fed})
    torch.testing.assert_close(table.weight.detach(), before - 0.1 * want)


@pytest.mark.parametrize("trips", [0, 1, 2, 7, 12])
def test_a_loop_that_is_computed_again_has_the_same_gradients(trips: int) -> None:
    def program(loop: Any, branch: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def body(n: Any, y: Any) -> Any:
            return n + 1, (y * w).sin() + x

        how = {} if loop is python_loop else {"recompute": True}
        return loop(lambda n, y: n < trips, body, (0, x), **how)[1].sum()

    check(program, tensors(3), [tensors(4)])


def test_draws_of_a_loop_that_is_computed_again_are_the_same_again() -> None:
    def program(x: torch.Tensor, recompute: bool) -> tuple[torch.Tensor, torch.Tensor]:
        def body(n: Any, y: Any, seen: Any) -> Any:
            noise = torch.rand(3, dtype=F64)
            return n + 1, (y * noise).sin(), seen.write(n, noise)

        seen = tfnb.TensorArray(9)
        _, y, seen = tfnb.while_loop(lambda n, *_: n < 9, body, (0, x, seen), recompute=recompute)
        return y, seen.stack()

    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, dtype=F64), shape=(3,), name="x")
        y, seen = program(x, True)
        (dx,) = tfnb.gradients(y.sum(), [x])
    fed = torch.rand(3, dtype=F64, requires_grad=True)
    got, noise, gradient = tfnb.run([y, seen, dx], {x: fed.detach()})
    want = fed
    for row in noise:
        want = (want * row).sin()
    torch.testing.assert_close([got, gradient], [want.detach(), torch.autograd.grad(want.sum(), fed)[0]])
    assert len(torch.unique(noise)) == 27


@pytest.mark.slow
def test_a_loop_that_is_computed_again_keeps_what_enters_its_pieces() -> None:
    def kept(recompute: bool) -> int:
        """The most bytes of 64 x 64 tensors that are alive at once in a run of 120 iterations."""
        with tfnb.record():
            x = tfnb.placeholder(torch.ones(64, 64), shape=(64, 64), name="x")
            n = tfnb.placeholder(torch.tensor(3), name="n")
            _, y = tfnb.while_loop(
                lambda i, y: i < n, lambda i, y: (i + 1, (y.sin() * x).cos()), (0, x), recompute=recompute
            )
            (dx,) = tfnb.gradients(y.sum(), [x])
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            tfnb.run(dx, {x: torch.ones(64, 64), n: 120})
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        total = most = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            total += event.nbytes()
            most = max(most, total)
        return most

    assert kept(True) * 3 < kept(False)


def test_gradients_through_a_loop_are_taken_after_the_recording_too() -> None:
    cell = torch.nn.GRUCell(1, 4).double()
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2, 3, dtype=F64), shape=("B", "T"), name="x")
        h, t = torch.zeros(x.shape[0], 4, dtype=F64), torch.tensor(0)
        _, h = tfnb.while_loop(lambda t, h: t < x.shape[1], lambda t, h: (t + 1, cell(x[:, t, None], h)), (t, h))
        y = h.sum()
    fed, h = torch.randn(3, 5, dtype=F64), torch.zeros(3, 4, dtype=F64)
    for t in range(5):
        h = cell(fed[:, t, None], h)
    got = tfnb.run(tfnb.gradients(y, list(cell.parameters())), {x: fed})
    torch.testing.assert_close(got, list(torch.autograd.grad(h.sum(), list(cell.parameters()))))
