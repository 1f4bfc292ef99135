"""Optimizers by their papers' names, schedules, averages: step by step against torch or the published formula."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import tfnb
from tfnb import train
from tfnb.errors import FailedPrecondition, InvalidArgument

STEPS = 8
rates = st.floats(1e-3, 0.3)
shares = st.floats(0.0, 0.99)
small = st.floats(0.0, 0.1)


class Ftrl:
    """McMahan et al. 2013, algorithm 1 with TensorFlow's constants, one number after the other."""

    def __init__(self, params, lr, learning_rate_power=-0.5, initial_accumulator_value=0.1,
                 l1_regularization_strength=0.0, l2_regularization_strength=0.0):  # fmt: skip
        self.params, self.lr, self.power = list(params), lr, learning_rate_power
        self.l1, self.l2 = l1_regularization_strength, l2_regularization_strength
        self.state = [[[0.0, initial_accumulator_value] for _ in range(p.numel())] for p in self.params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        for p, state in zip(self.params, self.state, strict=True):
            flat = p.data.view(-1)
            for i, (g, (z, n)) in enumerate(zip(p.grad.flatten().tolist(), state, strict=True)):
                after = n + g * g
                sigma = (after**-self.power - n**-self.power) / self.lr
                z = z + g - sigma * float(flat[i])
                quadratic = after**-self.power / self.lr + 2 * self.l2
                flat[i] = 0.0 if abs(z) <= self.l1 else (math.copysign(self.l1, z) - z) / quadratic
                state[i] = [z, after]


def lbfgs(params, **options):
    return torch.optim.LBFGS(params, max_iter=1, **options)


RULES: dict[str, tuple[Any, Any, dict[str, st.SearchStrategy[Any]]]] = {
    "Momentum": (train.Momentum, torch.optim.SGD, {"lr": rates, "momentum": shares, "weight_decay": small}),
    "Nesterov": (train.Nesterov, lambda p, **o: torch.optim.SGD(p, nesterov=True, **o),
                 {"lr": rates, "momentum": st.floats(0.01, 0.99), "weight_decay": small}),
    "Adagrad": (train.Adagrad, torch.optim.Adagrad,
                {"lr": rates, "lr_decay": small, "initial_accumulator_value": small}),
    "Adadelta": (train.Adadelta, torch.optim.Adadelta,
                 {"lr": rates, "rho": st.floats(0.0, 1.0), "eps": st.floats(1e-8, 1e-2), "weight_decay": small}),
    "RMSProp": (train.RMSProp, torch.optim.RMSprop,
                {"lr": rates, "alpha": st.floats(0.5, 0.99), "momentum": shares, "eps": st.floats(1e-8, 1e-2)}),
    "Adam": (train.Adam, torch.optim.Adam,
             {"lr": rates, "betas": st.tuples(shares, shares), "eps": st.floats(1e-8, 1e-2), "amsgrad": st.booleans()}),
    "Ftrl": (train.Ftrl, Ftrl,
             {"lr": rates, "learning_rate_power": st.floats(-1.0, -0.25),
              "initial_accumulator_value": st.floats(0.01, 1.0), "l1_regularization_strength": small,
              "l2_regularization_strength": small}),
    "LBFGS": (train.LBFGS, lbfgs, {"lr": rates, "history_size": st.integers(1, 6)}),
}  # fmt: skip


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3,), (2, 3), ())
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Neither a square nor convex; each batch has its own, and no rate makes it grow without end."""
    a, b, c = params
    return (torch.tanh(x @ b.T).sum(1) - (x * a).sum(1) * c).square().log1p().mean() + 0.1 * (
        a - 1
    ).square().log1p().sum()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)


def recorded(optimizer: Any, seed: int = 0) -> tuple[list[torch.nn.Parameter], Any, Any]:
    params = parameters(seed)
    with tfnb.record():
        x = tfnb.placeholder(batch(0))
        step = optimizer.minimize(loss_of(params, x))
    return params, x, step


def assert_follows(optimizer: Any, torch_make: Any, options: dict[str, Any]) -> None:
    mine, x, step = recorded(optimizer)
    theirs = parameters()
    eager = torch_make(theirs, **options)
    for i in range(STEPS):
        tfnb.run(step, {x: batch(i)})
        eager.zero_grad()
        loss = loss_of(theirs, batch(i))
        loss.backward()
        eager.step(*[lambda loss=loss: loss] * isinstance(eager, torch.optim.LBFGS))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=lambda text, i=i: f"step {i}: {text}")


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=3)
@given(data=st.data())
def test_each_step_is_that_of_torch_or_of_the_paper(name: str, data: st.DataObject) -> None:
    make, torch_make, options = RULES[name]
    chosen = data.draw(st.fixed_dictionaries(options))
    assert_follows(make(**chosen), torch_make, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=12)
@given(data=st.data())
def test_many_hyperparameters(name: str, data: st.DataObject) -> None:
    make, torch_make, options = RULES[name]
    chosen = data.draw(st.fixed_dictionaries(options))
    assert_follows(make(**chosen), torch_make, chosen)


def test_lbfgs_stops_where_torch_does() -> None:
    mine, theirs = (torch.nn.Parameter(torch.tensor([2.0, -3.0], dtype=torch.float64)) for _ in range(2))
    with tfnb.record():
        step = train.LBFGS(1.0).minimize((mine - 1).square().sum())
    eager = torch.optim.LBFGS([theirs], max_iter=1)
    for _ in range(6):
        tfnb.run(step)
        eager.zero_grad()
        (theirs - 1).square().sum().backward()
        eager.step(lambda: torch.zeros(()))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.detach(), torch.ones(2, dtype=torch.float64))


def test_ftrl_makes_small_weights_zero() -> None:
    w = torch.nn.Parameter(torch.tensor([0.5, 0.5], dtype=torch.float64))
    with tfnb.record():
        step = train.Ftrl(0.5, l1_regularization_strength=0.2).minimize((w * torch.tensor([1.0, 0.01])).square().sum())
    for _ in range(50):
        tfnb.run(step)
    assert float(w[1].detach()) == 0.0


@pytest.mark.parametrize("make", [*(row[0] for row in RULES.values()), train.SGD, train.AdamW, train.LazyAdam,
                                  train.ExponentialMovingAverage])  # fmt: skip
def test_every_rule_is_short(make: Any) -> None:
    body = inspect.getsource(make).split('"""')
    code = [line for line in "".join(body[::2]).splitlines() if line.strip()]
    assert len(code) <= 30


SCHEDULES = {
    "exponential": (lambda lr: train.exponential_decay(lr, 1, 0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "staircase": (
        lambda lr: train.exponential_decay(lr, 3, 0.5, staircase=True), lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    ),
    "polynomial": (lambda lr: train.polynomial_decay(lr, 8, end=0.0, power=2.0),
                   lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0)),
    "cosine": (lambda lr: train.cosine_decay(lr, 12), lambda o: lr_scheduler.CosineAnnealingLR(o, 12)),
    "piecewise": (lambda lr: train.piecewise_constant([3, 7], [lr, lr / 10, lr / 100]),
                  lambda o: lr_scheduler.MultiStepLR(o, [4, 8], 0.1)),
    "warmup": (lambda lr: train.warmup(5, lr), lambda o: lr_scheduler.LinearLR(o, 1 / 5, 1.0, 4)),
    "inverse": (lambda lr: train.inverse_time_decay(lr, 4, 0.5),
                lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + 0.5 * i / 4))),
    "natural": (lambda lr: train.natural_exp_decay(lr, 4, 0.5, staircase=True),
                lambda o: lr_scheduler.LambdaLR(o, lambda i: math.exp(-0.5 * (i // 4)))),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_trains_as_torch_with_its_scheduler(name: str) -> None:
    make, torch_make = SCHEDULES[name]
    mine, x, step = recorded(train.Adam(make(0.1)))
    theirs = parameters()
    eager = torch.optim.Adam(theirs, 0.1)
    scheduler = torch_make(eager)
    for i in range(STEPS):
        assert float(make(0.1)(i)) == pytest.approx(eager.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
        tfnb.run(step, {x: batch(i)})
        eager.zero_grad()
        loss_of(theirs, batch(i)).backward()
        eager.step()
        scheduler.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_any_function_of_the_number_of_steps_is_a_schedule_of_every_rule() -> None:
    for make in (train.SGD, train.Ftrl, train.LBFGS):
        one, two = recorded(make(lambda step: 0.1 / (1 + step))), recorded(make(0.1))
        for model in (one, two):
            tfnb.run(model[2], {model[1]: batch(0)})
        assert all(map(torch.equal, one[0], two[0])), make.__name__
        before = [p.detach().clone() for p in one[0]]
        tfnb.run(one[2], {one[1]: batch(1)})
        assert not all(map(torch.equal, one[0], before))


@pytest.mark.parametrize("num_updates", [None, 3])
def test_moving_averages_are_those_of_torch(num_updates: int | None) -> None:
    decay = 0.9 if num_updates is None else min(0.9, (1 + num_updates) / (10 + num_updates))
    params, means = parameters(), train.ExponentialMovingAverage(0.9, num_updates)
    with tfnb.record():
        x = tfnb.placeholder(batch(0))
        step = train.SGD(0.1).minimize(loss_of(params, x))
        both = tfnb.group(step, means.apply())
    twin = torch.nn.ParameterList(parameters())
    eager, averaged = torch.optim.SGD(twin.parameters(), 0.1), AveragedModel(twin, avg_fn=get_ema_avg_fn(decay))
    averaged.update_parameters(twin)  # the first call copies
    for i in range(STEPS):
        tfnb.run(both, {x: batch(i)})
        eager.zero_grad()
        loss_of(twin, batch(i)).backward()
        eager.step()
        averaged.update_parameters(twin)
        for p, mean in zip(params, averaged.module.parameters(), strict=True):
            torch.testing.assert_close(means.average(p).value(), mean.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: train.Adadelta(rho=1.5), "rho"),
        (lambda: train.Ftrl(l1_regularization_strength=-1.0), "Ftrl"),
        (lambda: train.LBFGS(history_size=0), "history_size"),
        (lambda: train.exponential_decay(0.1, 0, 0.5), "decay_steps"),
        (lambda: train.piecewise_constant([2, 1], [1.0, 2.0, 3.0]), "rise"),
        (lambda: train.warmup(-1, 0.1), "steps"),
        (lambda: train.ExponentialMovingAverage(2.0), "decay"),
        (lambda: recorded(train.SGD(lambda step: "fast")), "lr must be"),
    ],
)
def test_bad_input_names_what_is_wrong(wrong: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        wrong()


def test_averages_outside_of_a_recording_say_where_they_belong() -> None:
    with pytest.raises(FailedPrecondition, match="inside a recording"):
        train.ExponentialMovingAverage(0.9).apply()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_compiled_steps_follow_generated_ones() -> None:
    """All rules, a schedule and averages in one step, compiled once."""
    makers = {name: make() for name, (make, _, _) in RULES.items()} | {
        "schedule": train.Adam(train.cosine_decay(0.1, STEPS))
    }
    found = []
    for compiled in ("off", "now"):
        makers = {name: type(rule)(rule.lr) for name, rule in makers.items()}
        params = {name: parameters() for name in makers}
        with tfnb.record() as graph:
            x = tfnb.placeholder(batch(0))
            steps = [rule.minimize(loss_of(params[name], x)) for name, rule in makers.items()]
            everything = tfnb.group(*steps, train.ExponentialMovingAverage(0.9).apply(params["Adam"]))
        session = tfnb.Session(graph, compile=compiled)
        for i in range(STEPS):
            session.run(everything, {x: batch(i)})
        found.append({name: [p.detach().clone() for p in ps] for name, ps in params.items()})
        assert compiled == "off" or "compiled" in session.status()[0], session.status()
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values, rtol=1e-6, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")
