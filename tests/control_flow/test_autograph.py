"""Staged functions give what Python gives, and differentiate; what does not fit is refused with name and line."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
from tfnb.errors import InvalidArgument, ShapeError

F64 = torch.float64


def recorded(function: Callable[..., Any], *samples: Any) -> tuple[Any, list[Any], tuple[str, ...]]:
    """What the function gives in a recording, its placeholders, and the notes."""
    with tfnb.record() as graph:
        inputs = [tfnb.placeholder(torch.as_tensor(sample), name=f"x{i}") for i, sample in enumerate(samples)]
        out = tfnb.autograph(function)(*inputs)
    return out, inputs, graph.notes


# -- gradients --------------------------------------------------------------------------------------------------------


def piecewise(x: Any, w: Any) -> Any:
    y = x * w
    if x.sum() > 0:
        y = y.exp()
        w = w + 1
    else:
        y = x * y
    return y.sum() if w > 0 else y.mean()


def powers(x: Any, w: Any) -> Any:
    total, y = x.sum() * 0, x.sum() * w
    while total.abs() < 3:
        total = total + y.cos()
        y = y * w + 0.25
    return total


def stopped_rows(x: Any, w: Any) -> Any:
    total = torch.zeros((), dtype=x.dtype)
    for row in x:
        if row.sum() < 0:
            continue
        if row.max() > 100:
            break
        total = total + (row * row * w).sum() * total.cos()
    return total


def first_large(x: Any, w: Any) -> Any:
    for row in x:
        if row.max() > 2:
            return (row * w).sin().sum()
    return x.sum() * w


def first_in_nested_loops(x: Any, w: Any) -> Any:
    for i in range(x.shape[0]):
        for j in range(2):
            if x[i, j] > 2:
                return (x[i, j] * w * (i + j + 1)).sin()
    return (x * w).sum()


def normed(x: Any, w: Any) -> Any:
    for _ in range(2):
        if x.sum() > -100:
            x = torch.nn.functional.batch_norm(x, torch.full((2,), 0.5, dtype=F64), torch.ones(2, dtype=F64) * 3) * w
    return x.sin().sum()


@pytest.mark.parametrize("function", [piecewise, powers, stopped_rows, first_large, normed, first_in_nested_loops])
def test_gradients_go_through_staged_statements(function: Any) -> None:
    x0 = torch.tensor([[0.5, 1.0], [-0.25, 0.75]], dtype=F64)
    with tfnb.record():
        x, w = tfnb.placeholder(x0, name="x"), tfnb.placeholder(torch.tensor(0.5, dtype=F64), name="w")
        y = tfnb.autograph(function)(x, w)
        dx, dw = tfnb.gradients(y, [x, w])
        (ddx,) = tfnb.gradients((dx**2).sum(), [x])
    fed = ([[1.0, 2.0], [3.0, 4.0], [200.0, 1.0], [7.0, 8.0]], [[200.0, 1.0]], [[1.0, 2.0], [-3.0, 1.0], [2.0, 2.0]])
    for rows, factor in zip(fed, (0.5, 1.5, -0.5), strict=True):
        if function is powers:
            rows, factor = [[r / 300 for r in row] for row in rows], abs(factor) / 2
        a = torch.tensor(rows, dtype=F64, requires_grad=True)
        b = torch.tensor(factor, dtype=F64, requires_grad=True)
        plain = function(a, b)
        first = [torch.zeros_like(a), torch.zeros_like(b)]
        if plain.requires_grad:
            found = torch.autograd.grad(plain, [a, b], create_graph=True, allow_unused=True)
            first = [z if g is None else g for g, z in zip(found, first, strict=True)]
        second = torch.zeros_like(a)
        if first[0].requires_grad:
            (again,) = torch.autograd.grad((first[0] ** 2).sum(), a, allow_unused=True)
            second = second if again is None else again
        got = tfnb.run([y, dx, dw, ddx], {x: a.detach(), w: b.detach()})
        torch.testing.assert_close(got, [t.detach() for t in (plain, *first, second)])


def test_a_model_with_a_staged_layer_trains_as_torch_trains_it() -> None:
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)
            self.steps = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            h = self.inner(x)
            while h.norm() > 1:
                h = h * 0.5 * self.steps
            return h if h.mean() > 0 else self.inner(h)

    torch.manual_seed(0)
    model, twin = Gated(), Gated()
    twin.load_state_dict(model.state_dict())
    data = [torch.randn(4, 3) * scale for scale in (0.1, 3.0, 30.0)]
    with tfnb.record():
        x = tfnb.placeholder(data[0], name="x")
        loss = tfnb.autograph(model)(x).square().sum()
        step = tfnb.train.SGD(0.1).minimize(loss)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for batch in data:
        tfnb.run(step, {x: batch})
        optimizer.zero_grad()
        twin(batch).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))


# -- what does not fit --------------------------------------------------------------------------------------------


def branch_dtypes(x: Any) -> Any:
    value = x
    if x.sum() > 0:
        value = x.long()
    return value


def branch_shapes(x: Any) -> Any:
    value = x[:1] if x.sum() > 0 else x.sum()
    return value


def branch_structures(x: Any) -> Any:
    value = (x,)
    if x.sum() > 0:
        value = (x, x)
    return value


def loop_shapes(x: Any) -> Any:
    grown = x.sum().reshape(1)
    while grown.sum() < 10:
        grown = torch.cat([grown, grown + 1])
    return grown


def loop_dtypes(x: Any) -> Any:
    changed = x.sum().long()
    while changed < 10:
        changed = changed * 1.5 + 1
    return changed


def unset(x: Any) -> Any:
    if x.sum() > 100:
        value = x
    return value + 1


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (
            branch_dtypes,
            InvalidArgument,
            ["`value` is int64[B] in one branch and float32[B]"],
        ),
        (branch_shapes, ShapeError, ["in one branch and float32[] in the other"]),
        (branch_structures, InvalidArgument, ["`value`", "another structure"]),
        (loop_shapes, ShapeError, ["`grown` enters as float32[1] and is float32[2] after one iteration"]),
        (loop_dtypes, InvalidArgument, ["`changed` enters as int64[] and is float32[] after one iteration"]),
        (unset, InvalidArgument, ["`value` has no value here", "give it one before"]),
    ],
)
def test_what_does_not_fit_names_the_variable_and_the_line(function: Any, kind: type, words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        recorded(function, torch.ones(3))
    first = function.__code__.co_firstlineno
    line = next(n for n in range(first, first + 9) if re.search(r"\b(if|while)\b", linecache.getline(__file__, n)))
    for word in (*words, f"line {line} of {function.__name__}"):
        assert word in str(caught.value)


def test_python_lists_and_attributes_stay_right_and_the_margin_says_why() -> None:
    seen: list[Any] = []

    def function(x: Any) -> Any:
        if x.sum() > 0:
            seen.append(1)
        return x

    with pytest.warns(UserWarning, match="Python took the True branch"):
        _, _, notes = recorded(function, torch.ones(3))
    assert seen == [1]
    assert any("append() in a list that was made outside of it" in note for note in notes)


def test_numbers_follow_torchs_promotion() -> None:
    def function(x: Any) -> Any:
        count, total, flag = 0, 0, False
        while total < 10:
            count += 1
            total = total + x.abs().mean()
            flag = total > 5
        return count, total, flag

    (count, total, flag), _, _ = recorded(function, torch.ones(3, dtype=F64))
    assert [t.dtype for t in (count, total, flag)] == [torch.int64, F64, torch.bool]


def test_a_number_that_is_raised_leaves_what_was_equal_to_it() -> None:
    def function(x: Any) -> Any:
        n, before = 0, 0
        while x.sum() > n:
            before = n
            n += 1
        return n, before

    out, (x,), _ = recorded(function, torch.ones(3))
    assert [int(v) for v in tfnb.run(list(out), {x: torch.full((2,), 2.25)})] == [5, 4]


def test_a_loop_leaves_no_check_of_the_samples_iterations() -> None:
    def function(x: Any) -> Any:
        while x.sum() > 1:
            half = x / 2
            x = half - 0.1
        return x

    y, _, _ = recorded(function, torch.ones(3))
    assert [node.op for node in y.graph.nodes if node.op in ("tfnb.guard", "aten.gt.Scalar")] == []


def test_no_autograph_and_outside_a_recording_python_decides() -> None:
    def function(x: Any) -> Any:
        with tfnb.no_autograph():
            return x if x.sum() > 0 else -x

    with pytest.warns(UserWarning, match="Python took the True branch"):
        recorded(function, torch.ones(3))
    assert tfnb.autograph(function)(torch.full((2,), -1.0)).tolist() == [1.0, 1.0]


def test_without_samples_both_ways_are_recorded() -> None:
    def function(x: Any) -> Any:
        return x * 2 if x.sum() > 0 else x - 1

    with tfnb.record(lazy=True):
        x = tfnb.placeholder(shape=(None,), name="x")
        y = tfnb.autograph(function)(x)
    for fed in (torch.ones(2), -torch.ones(3)):
        torch.testing.assert_close(tfnb.run(y, {x: fed}), function(fed))


# -- random programs --------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
values = st.one_of(
    st.sampled_from(NAMES),
    st.builds(
        "({} {} {})".format, st.sampled_from(NAMES), st.sampled_from("+-*"), st.sampled_from((*NAMES, "0.5", "2.0"))
    ),
)
tests = st.one_of(
    st.builds(
        "{} {} {}".format, st.sampled_from(NAMES), st.sampled_from("<>"), st.sampled_from((*NAMES, "1.0", "-1.0"))
    ),
    st.builds("({} > 0 and not {} > {})".format, *[st.sampled_from(NAMES)] * 3),
    st.builds("(k % 2 == 0 or {} < {})".format, *[st.sampled_from(NAMES)] * 2),
)
assigns = st.builds("{} = {}.clamp(-9, 9)".format, st.sampled_from(NAMES), values)


def indented(lines: list[str]) -> str:
    return "\n".join("    " + line for text in lines for line in text.split("\n"))


def blocks(inner: Any) -> Any:
    bodies = st.lists(inner, min_size=1, max_size=3).map(indented)
    leave = st.builds("if {}:\n    {}".format, tests, st.sampled_from(["break", "continue", "a = a + 1"]))
    iterations = st.tuples(bodies, leave, bodies).map(lambda t: f"{t[0]}\n{indented([t[1]])}\n{t[2]}")
    return st.one_of(
        st.builds("if {}:\n{}".format, tests, bodies),
        st.builds("if {}:\n{}\nelse:\n{}".format, tests, bodies, bodies),
        st.builds("for i in range(n):\n    k += i\n{}".format, iterations),
        st.builds("for row in x:\n    a = a + row\n{}".format, iterations),
        st.builds("while {} and k < 4:\n    k += 1\n{}".format, tests, bodies),
    )


# What counts the iterations is set back between statements, never in one: else a loop could set back that of another
# one around it, and no program may run forever.
statements = st.recursive(assigns, blocks, max_leaves=6).map("k = 0\n{}".format)
programs = st.lists(statements, min_size=2, max_size=4)


@settings(max_examples=6, deadline=None)
@given(programs, st.booleans())
def test_random_programs_equal_python(parts: list[str], is_early: bool) -> None:
    equals_python(parts, is_early)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(programs, st.booleans())
def test_many_random_programs_equal_python(parts: list[str], is_early: bool) -> None:
    equals_python(parts, is_early)


def equals_python(parts: list[str], is_early: bool) -> None:
    early = "if a > b:\n    return a, b, c, k\n" if is_early else ""
    body = f"a, b, c, k = x.sum(), x.max(), x.min(), 0\n{parts[0]}\n{early}" + "\n".join(parts[1:])
    source = f"def program(x, n):\n{indented([body])}\n    return a, b, c, k\n"
    name = f"<program {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {}
    exec(compile(source, name, "exec"), space)
    program = space["program"]
    out, (x, n), notes = recorded(program, torch.tensor([0.5, -0.25], dtype=F64), torch.tensor(2))
    assert not any("stays Python" in note for note in notes), (notes, source)
    for fed, iterations in (([0.5, 1.0, -2.0], 3), ([-1.0, 0.25], 0), ([3.0], 1)):
        data = torch.tensor(fed, dtype=F64)
        wanted = program(data, iterations)
        found = iter(tfnb.run([v for v in out if isinstance(v, torch.Tensor)], {x: data, n: torch.tensor(iterations)}))
        got = [next(found) if isinstance(v, torch.Tensor) else v for v in out]
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(torch.as_tensor(a).to(F64), torch.as_tensor(b).to(F64), rtol=1e-9, atol=1e-9)


def clipped(v: Any) -> Any:
    if v < 0:
        return v * 0
    elif v > 6:
        return v * 0 + 6
    return v


def first_product(v: Any) -> Any:
    for i in range(5):
        if v * i > 7:
            return v * i
    return -v


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("program", [clipped, first_product])
def test_a_function_that_always_returns_is_not_said_to_return_sometimes(program: Callable[[Any], Any]) -> None:
    out, (x,), notes = recorded(program, 4.0)
    assert not any("returns nothing" in note for note in notes)
    for fed in (-2.0, 3.5, 1.0, 9.0):
        torch.testing.assert_close(tfnb.run(out, {x: fed}), program(torch.tensor(fed)))


def of_a_constant(x: Any) -> Any:
    s = torch.tensor(1.0)
    while s < 100:
        s = s * 2
    return x + s


def over_constants(x: Any) -> Any:
    for t in torch.linspace(0, 1, 5):
        x = x + t
    return x


def over_a_draw(x: Any) -> Any:
    for t in torch.zeros(5).bernoulli_(0.0):
        x = x + t
    return x


@pytest.mark.parametrize(
    ("program", "count"), [(of_a_constant, 7), (over_constants, 5), (over_a_draw, 5)], ids=["while", "for", "random"]
)
def test_a_loop_that_derives_from_no_placeholder_is_noted(program: Any, count: int) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), name="x")
        out = tfnb.autograph(program)(x)
    assert [f"derives from no placeholder and was unrolled: {count} iterations" in note for note in g.notes] == [True]
    torch.testing.assert_close(tfnb.run(out, {x: torch.ones(2)}), program(torch.ones(2)))


def test_rows_of_a_placeholder_are_not_noted() -> None:
    @tfnb.autograph
    def columns(x: Any) -> Any:
        s = x.sum() * 0
        for column in x.t():
            s = s + column.sum()
        return s

    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 2), name="x")
        columns(x)
    assert g.notes == ()


def _helper_with_the_loops_name(x: torch.Tensor) -> Any:
    act = lambda z: torch.relu(z * 2)  # noqa: E731

    def shifted(k: Any) -> Any:
        return k + 1

    total = torch.zeros(3)
    for row in x:
        z = act(row)
        k = shifted(z)
        total = total + z * k
    z = total / x.shape[0]
    return total, z


def _bound_above_too(x: torch.Tensor) -> Any:
    act = lambda z: z * 2  # noqa: E731
    z = torch.ones(3)
    for row in x:
        z = z + act(row)
    return (z,)


def _named_handler(x: torch.Tensor) -> Any:
    total, told = torch.zeros(3), ""
    for row in x:
        try:
            total = total + torch.linalg.solve(row.outer(row) + torch.eye(3), row)
        except RuntimeError as error:
            told = str(error)
            total = total - 1
    try:
        raise ValueError("said")
    except (ValueError, TypeError) as error:
        assert str(error) == "said" and not told
    return (total,)


def _helper_of_the_name_below(x: torch.Tensor) -> Any:
    def positive(y: Any) -> Any:
        if y.sum() < 0:
            y = -y
        return y

    def block(h: Any) -> Any:
        for t in range(x.shape[0]):
            h = h * 2 + x[t]
        return h

    y = positive(x)
    h = block(torch.zeros(3))
    return y.sum(), h


@pytest.mark.parametrize(
    "function", [_helper_with_the_loops_name, _bound_above_too, _named_handler, _helper_of_the_name_below]
)
def test_parameters_of_helpers_and_names_of_handlers_stage_as_other_names(function: Any) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(5, 3))
        found = tfnb.autograph(function)(x)
    assert not any("stays Python" in note for note in graph.notes)
    data = torch.randn(8, 3)
    for mine, theirs in zip(tfnb.run(list(found), {x: data}), function(data), strict=True):
        torch.testing.assert_close(mine, theirs)
