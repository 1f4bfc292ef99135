"""Where NaN and infinite numbers began: the op, its line, its finite inputs; a checked step writes nothing bad."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument, NonFinite, NotFound
from tfnb.execution.tracing.health import Health, health, is_finite

BAD = [math.nan, math.inf, -math.inf]
NUMBERS = st.one_of(st.sampled_from([*BAD, 0.0]), st.floats(-1e6, 1e6, width=32))


@given(arrays(np.float32, st.integers(0, 50), elements=NUMBERS))
def test_the_health_of_an_array_is_what_numpy_counts(array: np.ndarray) -> None:
    found, finite = health(torch.from_numpy(array.copy())), array[np.isfinite(array)].astype(np.float64)
    assert found is not None
    assert dict(found.counts) == {
        "nan": np.isnan(array).sum(), "-inf": (array == -math.inf).sum(), "negative": (finite < 0).sum(),
        "zero": (finite == 0).sum(), "positive": (finite > 0).sum(), "+inf": (array == math.inf).sum(),
    }  # fmt: skip
    if finite.size:
        got = (found.least, found.greatest, found.mean, found.std)
        np.testing.assert_allclose(got, (finite.min(), finite.max(), finite.mean(), finite.std()), rtol=1e-9, atol=1e-6)
    assert is_finite(torch.from_numpy(array.copy())) == bool(np.isfinite(array).all())


@given(arrays(np.float64, st.integers(0, 30), elements=NUMBERS), arrays(np.float64, 7, elements=NUMBERS))
def test_healths_add_up(a: np.ndarray, b: np.ndarray) -> None:
    parts = [health(torch.from_numpy(each.copy())) for each in (a, b)]
    whole = health(torch.from_numpy(np.concatenate([a, b])))
    assert parts[0] is not None and parts[1] is not None and whole is not None
    total = parts[0] + parts[1]
    assert total.counts == whole.counts
    np.testing.assert_allclose([total.mean, total.std], [whole.mean, whole.std], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, math.nan], dtype=torch.float16), torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn),
        torch.tensor([complex(1, math.nan)]), torch.tensor([0.0, math.nan]).to_sparse(),
    ],
)  # fmt: skip
def test_any_kind_of_numbers_is_looked_at(tensor: torch.Tensor) -> None:
    found = health(tensor)
    assert found is not None and found.nan == 1


def test_of_nothing_and_of_whole_numbers() -> None:
    assert health(torch.empty(0)) == Health() or repr(health(torch.empty(0))) == "0 numbers: none"
    assert health(torch.tensor([True, False])).positive == 1  # type: ignore[union-attr]


def failure(fetches: Any, feeds: dict[Any, Any]) -> NonFinite:
    with pytest.raises(NonFinite) as caught:
        tfnb.run(fetches, feeds, check="nan")
    return caught.value


def test_the_op_the_line_and_the_finite_inputs_are_named_and_nothing_is_written() -> None:
    layer = nn.Linear(4, 3)
    with tfnb.record():
        x = tfnb.placeholder(torch.rand(5, 4), name="x")
        h = layer(x) - 100
        bad = torch.log(h)  # the line
        loss = (bad * bad).mean()
        train = tfnb.train.SGD(0.1).minimize(loss)
    before = [p.detach().clone() for p in layer.parameters()]
    error = failure([loss, train], {x: torch.rand(5, 4)})
    assert error.op == "aten.log.default" and error.node == "bad"
    assert "bad = torch.log(h)  # the line" in error.message and "made nan of finite numbers" in error.message
    assert "input h, float32[5, 3]: 15 numbers: 15 negative; finite: -1" in error.message
    assert failure(train, {x: torch.rand(5, 4)}).node == "bad", "through the gradient"
    assert all(torch.equal(p, old) for p, old in zip(layer.parameters(), before, strict=True))
    assert isinstance(error, FloatingPointError) and isinstance(error, ValueError)


def test_numbers_that_nothing_bad_comes_of_do_not_count() -> None:
    with tfnb.record():
        s = tfnb.placeholder(torch.rand(3, 3), shape=(3, 3), name="s")
        masked = (s + torch.full((3, 3), -math.inf).triu(1)).softmax(-1)
        safe = torch.where(s > 0, s.log(), torch.zeros(()))
        out = (masked * safe).sum()
        bad = (masked / (s - s)).sum()
    feed = {s: torch.tensor([[0.5, 0.0, 1.0]] * 3)}
    assert math.isfinite(tfnb.run(out, feed, check="nan"))
    error = failure([out, bad], feed)
    assert error.op == "aten.div.Tensor" and "input sub" in error.message


def test_infinite_numbers_of_which_nan_was_made_are_named_first() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.rand(2), name="x")
        large = (x * 1000).exp()
        lost = large - large
    error = failure(lost, {x: torch.ones(2)})
    assert error.node == "large" and error.message.index("aten.exp") < error.message.index("aten.sub")


def test_in_a_loop_the_iteration_is_named() -> None:
    with tfnb.record():
        v = tfnb.placeholder(torch.tensor(3.0), name="v")
        _, out = tfnb.while_loop(lambda i, a: i < 5, lambda i, a: (i + 1, (a - 2).sqrt()), (torch.tensor(0), v))
    error = failure(out, {v: torch.tensor(3.0)})
    assert error.op == "aten.sqrt.default" and "in iteration 2 of its loop" in error.message
    assert "float32[]: -1" in error.message
    assert "v held nan before the step" in failure(out, {v: torch.tensor(math.nan)}).message


def test_in_a_branch_and_in_a_gradient() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(4.0), name="x")
        y = tfnb.cond(x > 0, lambda: (x - 4).sqrt(), lambda: x)
        (slope,) = tfnb.gradients([y * 0], [x])
    error = failure(slope, {x: torch.tensor(4.0)})
    assert error.op == "aten.div.Tensor" and "in the gradient of y, test_nonfinite.py line" in error.message
    assert tfnb.run(slope, {x: torch.tensor(9.0)}, check="nan") == 0


def test_an_update_that_overflows_is_taken_back() -> None:
    layer = nn.Linear(2, 1)
    with tfnb.record():
        x = tfnb.placeholder(torch.rand(5, 2), name="x")
        train = tfnb.train.Adam(1e39).minimize(layer(x).square().mean())
    before = [p.detach().clone() for p in layer.parameters()]
    assert "the update of weight, bias made NaN or infinite" in failure(train, {x: torch.rand(5, 2)}).message
    assert all(torch.equal(p, old) for p, old in zip(layer.parameters(), before, strict=True))


def test_a_checked_fit_stops_before_the_step_that_would_spoil_the_variables() -> None:
    layer, seen = nn.Linear(2, 1, bias=False), []
    nn.init.ones_(layer.weight)
    with tfnb.record():
        x = tfnb.placeholder(torch.rand(4, 2), name="x")
        loss = layer(x).log().mean()
        train = tfnb.train.SGD(0.0).minimize(loss)

    def rows() -> Any:
        for step in range(9):
            seen.append(layer.weight.detach().clone())
            yield {x: torch.full((4, 2), -1.0 if step == 5 else 1.0)}

    with pytest.raises(NonFinite, match=r"aten\.log.*made nan of finite numbers") as caught:
        tfnb.fit(train, rows(), watch={"loss": loss}, check="nan")
    assert len(seen) == 6 and torch.equal(layer.weight, seen[-1]) and caught.value.node
    assert tfnb.fit(train, {x: torch.ones(8, 2)}, batch_size=4, check="nan").steps == 2


def test_a_trace_has_the_health_of_nodes_and_their_first_bad_ancestor() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.rand(3), name="x")
        low = x - 1
        bad = low.log()
        out = bad.sum()
    session = tfnb.Session(g)
    session.run([low, out], {x: torch.tensor([0.5, 1.0, 3.0])}, trace="health")
    assert session.trace is not None
    origin = session.trace.origin("out")
    assert origin is not None and origin.node is not None and origin.node.name == "bad"
    assert session.trace.origin(low.node) is None
    names = {path[-1]: found for path, found in session.trace.health.items()}
    assert names[bad.node.id].nan == 1 and names[bad.node.id].low == 1 and names[low.node.id].zero == 1
    with pytest.raises(NotFound, match="trace='health'"):
        session.trace.origin("nothing")


def test_bad_options() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.rand(3), name="x")
        y = x + 1
    with pytest.raises(InvalidArgument, match="check is None or 'nan', not 'inf'"):
        tfnb.run(y, {x: torch.rand(3)}, check="inf")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="leave out trace or check"):
        tfnb.run(y, {x: torch.rand(3)}, check="nan", trace=True)
    assert tfnb.Session(g).make_callable(y, [x], check="nan")(torch.ones(3)).tolist() == [2.0] * 3
