"""Sandblaster L-BFGS in this process, beside `torch.optim.LBFGS`; its line search and its recursion on numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lbfgs import _strong_wolfe

import tfnb
from tfnb.errors import FailedPrecondition, InvalidArgument, NonFinite, TfnbError
from tfnb.fitting import minimization
from tfnb.fitting.minimization import Minimization
from tfnb.train import Sandblaster
from tfnb.train.curvature_pairs import CurvaturePairs
from tfnb.train.line_search import LinePoint, strong_wolfe

ROWS = 60


def data() -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 4, dtype=torch.float64, generator=gen), torch.randint(0, 3, (ROWS,), generator=gen)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3).double()


class Scaled(nn.Module):
    """A Parameter that is a number, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.scale, self.inner = nn.Parameter(torch.tensor(1.5)), nn.Linear(4, 4)
        self.outer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.inner(x).tanh()).tanh() * self.scale)


def scaled() -> nn.Module:
    return Scaled().double()


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def quadratic(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wanted = torch.stack([y, 2 * y, y - 1], 1)
    return (torch.tensor([1.0, 30.0, 0.05], dtype=torch.float64) * (model(x) - wanted).square()).sum()


def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), torch.where(y == 2, -100, y))


def hilly(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss whose line searches zoom."""
    return (10 * model(x)).sin().square().mean() + F.cross_entropy(model(x), y)


def by_torch(make: Callable[[], nn.Module], loss: Loss, steps: int, **options: Any) -> tuple[nn.Module, int]:
    """The local reference on all rows, and how many evaluations it took."""
    model, (x, y), seen = make(), data(), []
    rule = torch.optim.LBFGS(model.parameters(), max_iter=steps, max_eval=10**6, **options)

    def closure() -> torch.Tensor:
        rule.zero_grad()
        value = loss(model, x, y)
        value.backward()
        seen.append(value)
        return value

    rule.step(closure)
    return model, len(seen)


def fitted(
    make: Callable[[], nn.Module], loss: Loss, mode: Sandblaster, steps: int, batch: int = 16, **options: Any
) -> tuple[nn.Module, Any]:  # fmt: skip
    model, (x, y) = make(), data()
    with tfnb.record("sandblaster"):
        fed, label = tfnb.placeholder(x[:5], name="x"), tfnb.placeholder(y[:5], name="y")
        value = loss(model, fed, label)
    return model, tfnb.fit(value, {fed: x, label: y}, mode=mode, steps=steps, batch_size=batch, **options)


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models, by the size of the Parameter."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


PROBLEMS = [
    pytest.param(linear, quadratic, 3, id="quadratic, a sum over rows"),
    pytest.param(linear, entropy, 10, id="logistic"),
    pytest.param(net, entropy, 5, id="net"),
    pytest.param(net, masked, 5, id="what counts of the rows"),
    pytest.param(net, hilly, 5, id="hilly"),
    pytest.param(scaled, entropy, 5, id="a number"),
]


@pytest.mark.parametrize(("make", "loss", "history"), PROBLEMS)
@pytest.mark.parametrize("search", ["strong_wolfe", None])
def test_twenty_iterations_are_those_of_torch(
    make: Callable[[], nn.Module], loss: Loss, history: int, search: str | None
) -> None:
    options = {"history_size": history, "line_search_fn": search, "lr": 1.0 if search else 0.3}
    wanted, evaluations = by_torch(make, loss, 20, **options)
    mode = Sandblaster(history=history, line_search=search, lr=options["lr"])
    found, result = fitted(make, loss, mode, 20)
    assert apart(found, wanted) < 1e-8
    assert len(result.history) == result.steps and result.history[-1]["step"] == result.steps
    x, y = data()
    assert result.history[-1]["value"] == pytest.approx(float(loss(found, x, y).detach()), rel=1e-12)
    assert result.history[-1]["evaluations"] >= evaluations - 1


def test_portions_of_any_size_give_the_same_and_a_batch_is_no_step() -> None:
    first, result = fitted(net, entropy, Sandblaster(), 8, batch=ROWS)
    for batch in (1, 7, 59):
        other, again = fitted(net, entropy, Sandblaster(), 8, batch=batch)
        assert apart(other, first) < 1e-8
        assert again.steps == result.steps == 8


def test_watched_values_and_callbacks_are_of_iterations() -> None:
    seen = []
    model, (x, y) = net(), data()
    with tfnb.record("watched"):
        fed, label = tfnb.placeholder(x[:5]), tfnb.placeholder(y[:5])
        logits = model(fed)
        loss, accuracy = F.cross_entropy(logits, label), (logits.argmax(1) == label).double().mean()

    def look(progress: tfnb.train.Progress) -> None:
        seen.append((progress.step, progress.values["accuracy"]))
        if progress.step == 4:
            progress.stop("enough")

    result = tfnb.fit(
        loss, [{fed: x[:25], label: y[:25]}, {fed: x[25:], label: y[25:]}], mode=Sandblaster(), steps=9,
        watch={"accuracy": accuracy}, callbacks=look,
    )  # fmt: skip
    assert result.steps == 4 and result.stopped == "enough"
    assert seen == [(entry["step"], entry["accuracy"]) for entry in result.history]
    right = (model(x).argmax(1) == y).double().mean()
    assert seen[-1][1] == pytest.approx(float(right)), "means over portions are weighted by rows"


def test_callbacks_of_steps_are_of_iterations_too_and_may_stop_it() -> None:
    seen: list[int] = []

    class Each:
        def on_step(self, progress: tfnb.train.Progress) -> None:
            seen.append(progress.step)
            if progress.step == 2:
                progress.stop("two are enough")

    _, result = fitted(net, entropy, Sandblaster(), 9, callbacks=[Each()])
    assert seen == [1, 2] and result.stopped == "two are enough"


def test_a_portion_of_which_nothing_counts_adds_nothing() -> None:
    """The last one has ignored rows only: its own loss is 0 / 0."""
    model, (x, y) = net(), data()
    y = y.clone()
    y[-len(y) // 3 :] = -100
    twin = net()
    with tfnb.record("ignored"):
        fed, label = tfnb.placeholder(x[:5]), tfnb.placeholder(y[:5])
        loss = entropy(model, fed, label)
    tfnb.fit(loss, {fed: x, label: y}, mode=Sandblaster(), steps=3, batch_size=len(y) // 3)
    rule = torch.optim.LBFGS(
        twin.parameters(), max_iter=3, max_eval=10**6, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        rule.zero_grad()
        value = entropy(twin, x, y)
        value.backward()
        return value

    rule.step(closure)
    assert apart(model, twin) < 1e-8


@pytest.mark.parametrize("decay", [0.0, 3.0])
def test_a_sum_beside_something_without_rows_is_refused_also_of_a_list(decay: float) -> None:
    """Of portions it would be another function: what has no rows counted once for each portion."""
    model, (x, y) = linear(), data()
    with tfnb.record("decayed"):
        fed, label = tfnb.placeholder(x[:5]), tfnb.placeholder(y[:5])
        loss = quadratic(model, fed, label)
        loss = loss + decay * sum(p.square().sum() for p in model.parameters()) if decay else loss
    portions = [{fed: x[at : at + 10], label: y[at : at + 10]} for at in range(0, len(x), 10)]
    if not decay:
        tfnb.fit(loss, portions, mode=Sandblaster(), steps=2)
        return
    with pytest.raises(InvalidArgument):
        tfnb.fit(loss, portions, mode=Sandblaster(), steps=2)


def test_it_goes_on_from_the_parameters_of_now_and_stops_where_nothing_is_to_be_gained() -> None:
    model, (x, y) = linear(), data()
    with tfnb.record("again"):
        fed, label = tfnb.placeholder(x[:5]), tfnb.placeholder(y[:5])
        loss = quadratic(model, fed, label)
    first = tfnb.fit(loss, {fed: x, label: y}, mode=Sandblaster(), steps=200)
    assert first.steps < 200 and "within tolerance" in first.stopped
    with torch.no_grad():
        model.weight.add_(0.5)
    again = tfnb.fit(loss, {fed: x, label: y}, mode=Sandblaster(), steps=200)
    assert again.steps > 0
    assert again.history[0]["loss"] > 1.01 * first.history[-1]["loss"]
    assert again.history[-1]["loss"] == pytest.approx(first.history[-1]["loss"], rel=1e-6)


def test_without_a_tolerance_a_search_goes_on_to_its_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes jump at the kinks, so that no point meets the conditions; the best one is evaluated once more."""
    x = torch.tensor([[0.7], [0.2]], dtype=torch.float64)
    y, w = torch.tensor([0.3, 0.1], dtype=torch.float64), nn.Parameter(torch.tensor([-2.0], dtype=torch.float64))
    with tfnb.record("kinks"):
        fed, wanted = tfnb.placeholder(x, name="x"), tfnb.placeholder(y, name="y")
        error = (fed * w).sum(1) - wanted
        loss = (3.7 * error.relu() + 0.9 * (-error).relu()).mean()
    monkeypatch.setattr(minimization, "AGAIN", 0)  # evaluations that lack rows leave none to spare
    mode = Sandblaster(tolerance_change=0.0, tolerance_grad=0.0)
    result = tfnb.fit(loss, {fed: x, wanted: y}, mode=mode, steps=2)
    taken = [1, *(entry["evaluations"] for entry in result.history)]
    assert max(after - before for before, after in pairwise(taken)) == minimization.EVALUATIONS
    assert result.steps == 2 and not result.stopped, "there was no evaluation for the last step"
    assert w.item() == pytest.approx(3 / 7)


def test_errors_say_the_iteration_and_the_callback_that_raised_them() -> None:
    def broken(progress: tfnb.train.Progress) -> None:
        if progress.step == 2:
            raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk") as caught:
        fitted(net, entropy, Sandblaster(), 5, callbacks=broken)
    where = "the Parameters are those of iteration 2 of Sandblaster"
    assert caught.value.__notes__ == ["in a callback of fit after step 2; variables are at step 2", where]
    with pytest.raises(NonFinite) as failed:
        fitted(net, _infinite, Sandblaster(), 5)
    assert failed.value.__notes__ == [where.replace("2", "0")]


@pytest.mark.parametrize("moves", [9, 10])
def test_an_interrupt_leaves_the_last_iteration(moves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind any command: also in the midst of a line search."""
    model, (x, y) = net(), data()
    with tfnb.record("interrupt"):
        fed, label = tfnb.placeholder(x[:5]), tfnb.placeholder(y[:5])
        loss = hilly(model, fed, label)
    move, done, seen = Minimization._move, list[float](), list[float]()

    def interrupted(program: Minimization, step: float) -> None:
        move(program, step)
        done.append(step)
        if len(done) == moves:
            raise KeyboardInterrupt

    monkeypatch.setattr(Minimization, "_move", interrupted)
    with pytest.raises(KeyboardInterrupt, match="those of iteration"):
        tfnb.fit(
            loss, {fed: x, label: y}, mode=Sandblaster(), steps=50,
            callbacks=lambda progress: seen.append(progress.values["loss"]),
        )  # fmt: skip
    assert float(hilly(model, x, y).detach()) == pytest.approx(seen[-1], rel=1e-12)
    assert len(seen) < moves - 1, "a line search took more than one evaluation"


def test_float32_parameters_train() -> None:
    model, (x, y) = net().float(), data()
    with tfnb.record("single"):
        fed, label = tfnb.placeholder(x[:5].float()), tfnb.placeholder(y[:5])
        loss = F.cross_entropy(model(fed), label)
    result = tfnb.fit(loss, {fed: x.float(), label: y}, mode=Sandblaster(5), steps=10)
    wanted, _ = by_torch(net, entropy, 10, history_size=5, line_search_fn="strong_wolfe")
    assert result.history[-1]["loss"] == pytest.approx(float(entropy(wanted, *data()).detach()), rel=1e-3)


# -- bad input --------------------------------------------------------------------------------------------------------


def _maximum(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none").max()


def _root(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y).sqrt()


def _dropped(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.dropout(model(x), 0.5), y)


def _normed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.batch_norm(model(x), None, None, training=True), y)


def _infinite(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).sum(1) * 0 - 1).log().mean()


def _fixed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mean()


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (_maximum, InvalidArgument, "largest or smallest of all rows"),
        (_root, InvalidArgument, "take the mean last"),
        (_dropped, InvalidArgument, "model.eval()"),
        (_normed, InvalidArgument, "LayerNorm or GroupNorm"),
        (_infinite, NonFinite, "check='nan'"),
        (_fixed, InvalidArgument, "no trainable variable"),
    ],
)
def test_what_is_no_loss_over_rows_is_named_with_its_line(loss: Loss, error: type[TfnbError], text: str) -> None:
    model, (x, y) = net(), data()
    before = [p.detach().clone() for p in model.parameters()]
    with tfnb.record("bad"):
        fed, label = tfnb.placeholder(x[:5]), tfnb.placeholder(y[:5])
        value = loss(model, fed, label)
    with pytest.raises(error) as caught:
        tfnb.fit(value, {fed: x, label: y}, mode=Sandblaster(), steps=3)
    assert text in str(caught.value)
    assert loss is _fixed or "test_sandblaster.py" in str(caught.value)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_parameters_of_too_few_bits_are_refused_and_a_loss_without_rows_trains() -> None:
    x = torch.randn(4, 3, dtype=torch.bfloat16)
    with tfnb.record("half"):
        fed = tfnb.placeholder(x)
        loss = nn.Linear(3, 1).bfloat16()(fed).square().mean()
    with pytest.raises(InvalidArgument, match="bfloat16"):
        tfnb.fit(loss, {fed: x}, mode=Sandblaster())
    w = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with tfnb.record("fixed"):
        point = tfnb.placeholder(torch.zeros(2, dtype=torch.float64), shape=(2,))
        loss = (w - point).square().sum()
    feeds = [{point: torch.tensor([4.0, 2.0])}, {point: torch.tensor([2.0, 6.0])}]
    tfnb.fit(loss, feeds, mode=Sandblaster(), steps=9)
    torch.testing.assert_close(w.detach(), torch.tensor([3.0, 4.0], dtype=torch.float64))


class _Uphill(torch.autograd.Function):
    """Its gradient is that of another function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


def test_a_gradient_that_is_not_of_the_loss_gains_nothing_and_leaves_the_parameters() -> None:
    model, (x, y) = linear(), data()
    before = model.weight.detach().clone()
    with tfnb.record("uphill"):
        fed, label = tfnb.placeholder(x[:5]), tfnb.placeholder(y[:5])
        loss = F.cross_entropy(_Uphill.apply(model(fed)), label)
    result = tfnb.fit(loss, {fed: x, label: y}, mode=Sandblaster(), steps=3)
    assert result.steps == 0 and "no lower loss" in result.stopped
    assert torch.equal(model.weight.detach(), before)


def test_a_direction_that_is_no_descent_is_an_error() -> None:
    model, (x, y) = linear(), data()
    with tfnb.record("descent"):
        fed, label = tfnb.placeholder(x[:5]), tfnb.placeholder(y[:5])
        loss = entropy(model, fed, label)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CurvaturePairs, "direction", lambda pairs: torch.eye(pairs.size, dtype=torch.float64)[-1])
        with pytest.raises(FailedPrecondition, match="no descent"):
            tfnb.fit(loss, {fed: x, label: y}, mode=Sandblaster(), steps=3)


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 2},
        {"resume": True},
        {"validation": []},
        {"check": "nan"},
        {"microbatches": 2},
        {"exact": True},
        {"checkpoint_every": 5.0},
    ],
)
def test_options_that_it_does_not_take_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="takes no"):
        fitted(linear, entropy, Sandblaster(), 3, **options)


def test_data_that_passes_once_and_steps_that_are_no_losses_are_refused() -> None:
    model, (x, y) = linear(), data()
    with tfnb.record("once"):
        fed, label = tfnb.placeholder(x[:5]), tfnb.placeholder(y[:5])
        loss = entropy(model, fed, label)
        step = tfnb.train.SGD(0.1).minimize(loss)
    with pytest.raises(InvalidArgument, match="gives its items once"):
        tfnb.fit(loss, iter([{fed: x, label: y}]), mode=Sandblaster())
    with pytest.raises(InvalidArgument, match="needs no optimizer"):
        tfnb.fit(step, {fed: x, label: y}, mode=Sandblaster())
    for wrong in ({"history": 0}, {"line_search": "armijo"}, {"lr": 0.0}, {"tolerance_grad": math.nan}):
        with pytest.raises(InvalidArgument, match="Sandblaster: "):
            Sandblaster(**wrong)


# -- on numbers -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-2, 2), min_size=3, max_size=5), st.floats(0.01, 3), st.floats(0.05, 3), st.integers(1, 25)
)  # fmt: skip
def test_the_line_search_is_torchs(weights: list[float], first: float, width: float, most: int) -> None:
    def loss(t: float) -> tuple[float, float]:
        value = sum(w * math.sin((k + 1) * t) for k, w in enumerate(weights)) + 0.05 * t * t
        return value, sum(w * (k + 1) * math.cos((k + 1) * t) for k, w in enumerate(weights)) + 0.1 * t

    start = LinePoint(0.0, *loss(0.0))
    if start.slope > -1e-6:
        return
    asked, theirs = [], []
    search = strong_wolfe(start, first, width, most=most)
    step = next(search)
    while True:
        asked.append(step)
        try:
            step = search.send(loss(step))
        except StopIteration as end:
            found = end.value
            break

    def torchs(x: Any, t: Any, d: torch.Tensor) -> tuple[float, torch.Tensor]:
        theirs.append(float(t))
        value, slope = loss(float(t))
        return value, torch.tensor([slope / width], dtype=torch.float64)

    d = torch.tensor([width], dtype=torch.float64)
    g = torch.tensor([start.slope / width], dtype=torch.float64)
    slope = torch.tensor(start.slope, dtype=torch.float64)
    _, _, taken, _ = _strong_wolfe(torchs, [], first, d, start.loss, g, slope, max_ls=most)
    torch.testing.assert_close(torch.tensor(asked), torch.tensor(theirs), rtol=1e-6, atol=1e-8)
    assert found.step == pytest.approx(float(taken), rel=1e-6, abs=1e-8)


def test_a_search_goes_back_from_where_the_loss_is_not_finite() -> None:
    search = strong_wolfe(LinePoint(0.0, 1.0, -1.0), 64.0, 1.0)
    step = next(search)
    with pytest.raises(StopIteration) as end:
        while True:
            step = search.send((math.inf, math.nan) if step > 1 else ((step - 0.5) ** 2 + 0.75, 2 * step - 1))
    assert 0 < end.value.value.step <= 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 7), st.integers(0, 1000))
def test_directions_of_inner_products_are_those_of_the_two_loop_recursion(history: int, count: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    half = torch.randn(9, 9, dtype=torch.float64, generator=gen)
    matrix = half @ half.T + torch.eye(9, dtype=torch.float64)
    point = torch.randn(9, dtype=torch.float64, generator=gen)
    zeros = torch.zeros(history, 9, dtype=torch.float64)
    steps, changes, kept = zeros.clone(), zeros.clone(), list[tuple[torch.Tensor, torch.Tensor]]()
    pairs = CurvaturePairs(history)
    step, change = zeros[0].clone(), zeros[0].clone()
    for number in range(count):
        if pairs.is_kept:
            steps, changes = torch.cat([steps[1:], step[None]]), torch.cat([changes[1:], change[None]])
        step = torch.randn(9, dtype=torch.float64, generator=gen) if number else torch.zeros_like(point)
        sign = -1 if number % 3 == 2 else 1  # of some pairs the curvature is negative: they take no part
        change = sign * matrix @ step
        point = point + step
        gradient = matrix @ point
        new = torch.stack([step, change, gradient])
        basis = torch.cat([steps, changes, new])
        pairs.add(new @ basis.T)
        if change @ step > 1e-10:
            kept = [*kept, (step, change)][-history:]
        assert pairs.is_kept == bool(change @ step > 1e-10)
        q, shares = -gradient, []
        for s, y in reversed(kept):
            shares.append(s @ q / (s @ y))
            q = q - shares[-1] * y
        q = q * (kept[-1][0] @ kept[-1][1] / (kept[-1][1] @ kept[-1][1])) if kept else q
        for (s, y), share in zip(kept, reversed(shares), strict=True):
            q = q + s * (share - y @ q / (s @ y))
        torch.testing.assert_close(pairs.direction() @ basis, q, rtol=1e-8, atol=1e-8)
