"""Optimizers through real graphs against torch.optim; what minimize records, refuses and leaves alone."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb import train
from tfnb.errors import InvalidArgument, ShapeError

RULES = {
    "SGD": (train.SGD, torch.optim.SGD, {"lr": 0.1}),
    "SGD decay maximize": (train.SGD, torch.optim.SGD, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "SGD dampening": (train.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Momentum": (train.Momentum, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Momentum nesterov": (train.Momentum, torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "nesterov": True}),
    "Adagrad": (train.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "RMSProp": (train.RMSProp, torch.optim.RMSprop, {"lr": 0.01}),
    "RMSProp centered": (train.RMSProp, torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adam": (train.Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99)}),
    "Adam amsgrad": (train.Adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (train.AdamW, torch.optim.AdamW, {"lr": 0.01}),
}


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(step, rows=8):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def recorded(model, optimizer):
    """Placeholders, loss and one recorded step."""
    with tfnb.record():
        images, labels = batch(0)
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        loss = F.cross_entropy(model(x), y)
        step = optimizer.minimize(loss)
    return x, y, loss, step


@pytest.mark.parametrize("name", RULES)
def test_hundred_steps_follow_torch_optim(name):
    make, torch_make, arguments = RULES[name]
    model, twin = network(), network()
    x, y, _, step = recorded(model, make(**arguments))
    optimizer = torch_make(twin.parameters(), **arguments)
    for i in range(100):
        rows = 8 if i % 7 else 3
        images, labels = batch(i, rows)
        tfnb.run(step, {x: images, y: labels})
        optimizer.zero_grad()
        F.cross_entropy(twin(images), labels).backward()
        optimizer.step()
    for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_recording_takes_no_step():
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = train.Adam(0.1)
    recorded(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not s.value().any() for p in model.parameters() for s in optimizer.slots(p).values())


def test_later_lines_neither_see_nor_pull_the_step():
    model = network()
    images, labels = batch(0)
    with tfnb.record():
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        step = train.SGD(0.5).minimize(F.cross_entropy(model(x), y))
        below = model(x)
    assert torch.equal(below.sample, model(images))
    before = model(images).detach()
    assert torch.equal(tfnb.run(below, {x: images}), before)
    assert torch.equal(model(images), before)
    _, after = tfnb.run([step, below], {x: images, y: labels})
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, model(images).detach())


def test_minimize_outside_a_recording_appends_to_the_graph():
    model = network()
    images, labels = batch(0)
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        loss = F.cross_entropy(model(x), y)
    step = train.SGD(0.1).minimize(loss)
    assert step.graph is graph
    first = tfnb.run(loss, {x: images, y: labels})
    tfnb.run(step, {x: images, y: labels})
    assert tfnb.run(loss, {x: images, y: labels}) < first


def test_slots_are_variables_named_after_variable_optimizer_and_slot():
    model, optimizer = network(), train.Adam()
    recorded(model, optimizer)
    slots = optimizer.slots(model[0].weight)
    assert [s.name for s in slots.values()] == [f"0.weight/Adam/{n}" for n in ("exp_avg", "exp_avg_sq", "step")]
    assert not any(s.trainable for s in slots.values())
    assert optimizer.slots(model[0].weight) == slots
    assert train.Adam().slots(model[0].weight)["step"] is not slots["step"]


def test_two_steps_of_one_optimizer_share_slots():
    model, optimizer = network(), train.Momentum(0.1)
    images, labels = batch(0)
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        logits = model(x)
        steps = optimizer.minimize(F.cross_entropy(logits, y)), optimizer.minimize(logits.square().mean())
    assert len(steps) == 2 and sum("momentum_buffer" in v.name for v in graph.variables) == 4


def test_nodes_are_tagged_as_update_and_step():
    model = network()
    _, _, _, step = recorded(model, train.SGD(0.1))
    assert {n.op for n in step.graph.select(tag="update")} == {"tfnb.sgd.default"}
    assert {n.op for n in step.graph.select(tag="step")} == {"tfnb.assign"}
    assert len(step.graph.select(tag="step")) == 4


@pytest.mark.parametrize("kind", ["variable", "recorded", "tensor"])
def test_rate_may_be_a_variable_a_recorded_scalar_or_a_tensor(kind):
    models = network(), network()
    rate = tfnb.Variable(torch.tensor(0.25), name="rate", trainable=False)
    images, labels = batch(0)
    for model, changes in zip(models, (False, True), strict=True):
        with tfnb.record():
            x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
            lr = {"variable": rate, "recorded": rate * 1.0, "tensor": torch.tensor(0.25)}[kind] if changes else 0.25
            step = train.SGD(lr).minimize(F.cross_entropy(model(x), y))
        tfnb.run(step, {x: images, y: labels})
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_rate_variable_is_read_at_each_step():
    model = network()
    rate = tfnb.Variable(torch.tensor(0.0), trainable=False)
    x, y, _, step = recorded(model, train.Adam(rate))
    before = model[0].weight.clone()
    images, labels = batch(0)
    tfnb.run(step, {x: images, y: labels})
    assert torch.equal(model[0].weight, before)
    rate.assign(torch.tensor(0.1))
    tfnb.run(step, {x: images, y: labels})
    assert not torch.equal(model[0].weight, before)


def test_updates_of_one_step_do_not_see_one_another():
    a, b = (tfnb.Variable(torch.tensor(v), name=n) for n, v in (("a", [1.0, 2.0]), ("b", [10.0, 20.0])))
    with tfnb.record():
        da, db = b.read(), a.read()  # of a * b: the gradients are the variables' own memory
        steps = [train.SGD(1.0).apply_gradients([(da, a)]), train.Momentum(1.0).apply_gradients([(db, b)])]
    tfnb.run(steps)
    assert [v.value().tolist() for v in (a, b)] == [[-9.0, -18.0], [9.0, 18.0]]


def test_gradients_may_be_changed_between_compute_and_apply():
    model, twin = network(), network()
    images, labels = batch(0)
    optimizer = train.SGD(0.1)
    with tfnb.record():
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        pairs = optimizer.compute_gradients(F.cross_entropy(model(x), y))
        step = optimizer.apply_gradients([(g.clamp(-0.01, 0.01), v) for g, v in pairs])
    tfnb.run(step, {x: images, y: labels})
    F.cross_entropy(twin(images), labels).backward()
    for p in twin.parameters():
        p.grad.clamp_(-0.01, 0.01)
    torch.optim.SGD(twin.parameters(), 0.1).step()
    for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


def test_variables_can_be_chosen():
    model = network()
    before = copy.deepcopy(model.state_dict())
    images, labels = batch(0)
    with tfnb.record():
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        step = train.SGD(0.1).minimize(F.cross_entropy(model(x), y), [model[2].bias])
    tfnb.run(step, {x: images, y: labels})
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["2.bias"]


def test_frozen_parameters_are_left_out():
    model = network()
    model[0].requires_grad_(False)
    _, _, loss, _ = recorded(model, train.SGD(0.1))
    assert [v.name for _, v in train.SGD(0.1).compute_gradients(loss)] == ["2.weight", "2.bias"]


class _Outer(torch.nn.Module):
    """Writes into its buffers before and beside the modules that its output comes from."""

    def __init__(self):
        super().__init__()
        self.inner, self.watch = torch.nn.Linear(3, 2), _Watch()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("penalty", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.watch(x)
        return self.inner(x)


class _Watch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))


def test_a_step_runs_what_the_whole_forward_writes_into_buffers():
    model, other = _Outer(), _Outer()
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        other(x)  # goes into no loss: it is a statement of the block, as in eager torch
        step = train.SGD(0.1).minimize(model(x).sum())
    for factor in (3.0, 2.0):
        tfnb.run(step, {x: factor * torch.ones(5, 3)})
    for called in (model, other):
        assert (int(called.calls), float(called.watch.largest)) == (2, 3.0)


def test_a_buffer_that_requires_a_gradient_is_no_parameter():
    model = _Outer()
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        loss = model(x).square().mean() + model.penalty.requires_grad_()
        step = train.SGD(0.1).minimize(loss)
        chosen = train.SGD(0.1).minimize(loss, [model.penalty])
    tfnb.run(step, {x: torch.ones(4, 3)})
    assert float(model.penalty.detach()) == 0.0
    tfnb.run(chosen, {x: torch.ones(4, 3)})
    assert float(model.penalty.detach()) == pytest.approx(-0.1)


def test_variable_that_was_asked_for_and_has_no_path_gets_none():
    model, other = network(), tfnb.Variable(torch.zeros(2), name="other")
    _, _, loss, _ = recorded(model, train.SGD(0.1))
    pairs = train.SGD(0.1).compute_gradients(loss, [model[2].bias, other])
    assert [(g is None, v.name) for g, v in pairs] == [(False, "2.bias"), (True, "other")]


class Lion(train.Optimizer):
    """Chen et al. 2023, as a user would write it."""

    def __init__(self, lr=1e-4, betas=(0.9, 0.99)):
        super().__init__(lr)
        self.betas = betas

    def initial(self, w):
        return {"exp_avg": torch.zeros_like(w)}

    def update(self, w, grad, slots, lr):
        b1, b2 = self.betas
        m = slots["exp_avg"]
        direction = (b1 * m + (1 - b1) * grad).sign()
        return w - lr * direction, {"exp_avg": b2 * m + (1 - b2) * grad}


def test_user_optimizer_needs_no_runtime_change():
    model, twin = network(), network()
    optimizer = Lion(0.01)
    x, y, _, step = recorded(model, optimizer)
    moments = [torch.zeros_like(p) for p in twin.parameters()]
    for i in range(20):
        images, labels = batch(i)
        tfnb.run(step, {x: images, y: labels})
        gradients = torch.autograd.grad(F.cross_entropy(twin(images), labels), list(twin.parameters()))
        with torch.no_grad():
            for p, g, m in zip(twin.parameters(), gradients, moments, strict=True):
                p.sub_(0.01 * (0.9 * m + 0.1 * g).sign())
                m.mul_(0.99).add_(g, alpha=0.01)
    for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected)
    assert optimizer.slots(model[0].bias)["exp_avg"].value().any()


def test_loss_that_is_no_scalar_names_both_shapes():
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 6))
        y = nn.Linear(6, 3)(x)
        with pytest.raises(ShapeError, match=r"shape \[\].*float32\[B, 3\]"):
            train.SGD(0.1).minimize(y)


def test_loss_without_a_variable_is_refused():
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 6))
        with pytest.raises(InvalidArgument, match="no trainable variable"):
            train.SGD(0.1).minimize(x.mean())


def test_loss_cut_off_from_its_variables_names_them():
    model = network(torch.float32)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 6))
        with pytest.raises(InvalidArgument, match=r"no trainable variable has a path.*0\.weight"):
            train.SGD(0.1).minimize(model(x).detach().mean())


def test_loss_outside_a_recording_is_refused():
    with pytest.raises(InvalidArgument, match="recorded tensor"):
        train.SGD(0.1).minimize(network()(torch.ones(2, 6, dtype=torch.float64)).mean())


def test_gradient_of_another_shape_names_both():
    model = network(torch.float32)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 6))
        loss = model(x).mean()
        (grad, variable), *_ = train.SGD(0.1).compute_gradients(loss)
        with pytest.raises(ShapeError, match=r"0\.weight.*\[5\].*\[5, 6\]"):
            train.SGD(0.1).apply_gradients([(grad.sum(1), variable)])
        with pytest.raises(InvalidArgument, match="two gradients"):
            train.SGD(0.1).apply_gradients([(grad, variable), (grad, variable)])
        with pytest.raises(InvalidArgument, match="None"):
            train.SGD(0.1).apply_gradients([(None, variable)])


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (train.SGD, {"lr": -1}),
        (train.SGD, {"lr": float("nan")}),
        (train.SGD, {"lr": "fast"}),
        (train.SGD, {"momentum": -0.1}),
        (train.SGD, {"weight_decay": -0.1}),
        (train.SGD, {"nesterov": True}),
        (train.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        (train.Adagrad, {"lr_decay": -1}),
        (train.Adagrad, {"initial_accumulator_value": -1}),
        (train.RMSProp, {"alpha": -1}),
        (train.RMSProp, {"eps": -1}),
        (train.Adam, {"betas": (1.0, 0.9)}),
        (train.Adam, {"betas": (0.9, -0.1)}),
        (train.AdamW, {"eps": -1e-9}),
    ],
)
def test_bad_hyperparameters_are_refused(make, arguments):
    with pytest.raises(InvalidArgument, match=make.__name__):
        make(**arguments)


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999)])
def test_a_pair_has_two_numbers(betas):
    with pytest.raises(InvalidArgument, match="betas is a pair, beta1 and beta2, not"):
        train.Adam(betas=betas)


@pytest.mark.parametrize(("make", "torch_make", "_"), RULES.values())
def test_arguments_and_defaults_are_those_of_torch(make, torch_make, _):
    ours = dict(inspect.signature(make).parameters)
    theirs = inspect.signature(torch_make).parameters
    for name, parameter in ours.items():
        if name != "sparse" and (make, name) != (train.Momentum, "momentum"):
            assert parameter.default == theirs[name].default, name
    implementation = {"params", "foreach", "capturable", "differentiable", "fused"}
    missing = theirs.keys() - ours.keys() - implementation
    assert not missing
