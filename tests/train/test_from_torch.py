"""`optimizer.step()` of torch optimizers in a recording: the graph's run is the eager loop, state and all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb import train
from tfnb.errors import FailedPrecondition, InvalidArgument, Unsupported

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99)}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01, "foreach": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True, "eps": 1e-6}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05, "eps": (1e-3, 1e-3), "weight_decay": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 5, "weight_decay": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "momentum_decay": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The first layer with a learning rate of its own."""
    first, rest = list(model[0].parameters()), [p for part in model[1:] for p in part.parameters()]
    return [{"params": rest}, {"params": first, "lr": 0.03}]


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The body of a training loop; in a recording, the Operation."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return optimizer.step()


def recorded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int, int], None]:
    """A function that takes one step of the recorded loop on a batch."""
    images, labels = batch(0)
    with tfnb.record():
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        step = step_on(model, optimizer, x, y)
    assert isinstance(step, tfnb.Operation)
    return lambda i, rows: tfnb.run(step, dict(zip((x, y), batch(i, rows), strict=True)))


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_those_of_the_eager_loop(name: str) -> None:
    make, arguments = OPTIMIZERS[name]
    model, twin = network(), network()
    optimizer, eager = make(groups(model), **arguments), make(groups(twin), **arguments)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run = recorded(model, optimizer)
    assert_same((model.state_dict(), optimizer.state_dict()), before)
    for i in range(20):
        rows = 3 + i % 7
        run(i, rows)
        step_on(twin, eager, *batch(i, rows))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    ours, theirs = optimizer.state_dict()["state"], eager.state_dict()["state"]
    if not ours:
        theirs = {i: s for i, s in theirs.items() if any(v is not None for v in s.values())}  # SGD's empty buffers
    assert_same(ours, theirs)
    for i in range(20, 23):  # the eager loop goes on where the graph stopped
        step_on(model, optimizer, *batch(i))
        step_on(twin, eager, *batch(i))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("name", ["SGD dampening", "Adagrad", "Adam amsgrad", "ASGD"])
def test_a_recording_goes_on_where_the_eager_loop_stopped(name: str) -> None:
    make, arguments = OPTIMIZERS[name]
    model, twin = network(), network()
    optimizer, eager = make(groups(model), **arguments), make(groups(twin), **arguments)
    for i in range(3):
        step_on(model, optimizer, *batch(i))
        step_on(twin, eager, *batch(i))
    before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    run = recorded(model, optimizer)
    assert_same((dict(model.state_dict()), optimizer.state_dict()), before)
    for i in range(3, 8):
        run(i, 8)
        step_on(twin, eager, *batch(i))
    optimizer.load_state_dict(copy.deepcopy(eager.state_dict()))  # other tensors: they count from here on
    for i in range(8, 12):
        run(i, 8)
        step_on(twin, eager, *batch(i))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


def test_fit_trains_the_module() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    images, labels = batch(0, 64)
    with pytest.warns(UserWarning, match=r"no name holds the step Adam.*`step = optimizer.step\(\)`"):  # noqa: SIM117
        with tfnb.record("fit"):
            x, y = tfnb.placeholder(images[:8]), tfnb.placeholder(labels[:8])
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # nothing is assigned: it is found by its name
    before = F.cross_entropy(model(images), labels).item()
    result = tfnb.fit("Adam", {x: images, y: labels}, epochs=10, batch_size=16, watch=[loss])
    assert result.steps == 40 and F.cross_entropy(model(images), labels).item() < 0.9 * before
    assert optimizer.state_dict()["state"][0]["step"] == 40


def test_later_lines_neither_see_nor_pull_the_step() -> None:
    model = network().eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    images, labels = batch(0)
    with tfnb.record():
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        step = step_on(model, optimizer, x, y)
        below = model(x)
    before = model(images).detach()
    assert torch.equal(below.sample, before)
    assert_same(tfnb.run(below, {x: images}), before)
    _, after = tfnb.run([step, below], {x: images, y: labels})
    assert not torch.equal(after, before)
    assert_same(after, model(images).detach())


def test_a_step_runs_the_writes_of_running_statistics_of_its_own_loss() -> None:
    generator, critic = network(), network()
    g, c = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))
    images, labels = batch(0)
    with tfnb.record():
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        first = step_on(generator, g, x, y)
        second = step_on(critic, c, x, y)
    tfnb.run(first, {x: images, y: labels})
    assert generator[1].running_mean.any() and not critic[1].running_mean.any()
    tfnb.run(second, {x: images, y: labels})
    assert torch.equal(generator[1].running_mean, critic[1].running_mean)


def test_a_scheduler_works_between_runs() -> None:
    model, twin = network(), network()
    optimizer, eager = (torch.optim.SGD(groups(m), lr=0.1, momentum=0.9) for m in (model, twin))
    schedule, eager_schedule = (torch.optim.lr_scheduler.StepLR(o, 2, 0.1) for o in (optimizer, eager))
    run = recorded(model, optimizer)
    for i in range(8):
        run(i, 8)
        schedule.step()
        step_on(twin, eager, *batch(i))
        eager_schedule.step()
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("name", ["ASGD", "Rprop", "Adam", "SGD dampening"])
def test_a_parameter_of_which_a_later_run_has_the_first_gradient_begins_with_the_rate_of_then(name: str) -> None:
    kind, arguments = OPTIMIZERS[name]
    start = torch.randn(2, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (a, b), (a_twin, b_twin) = ([nn.Parameter(row.clone()) for row in start] for _ in range(2))
    optimizer, eager = (kind(pair, **arguments) for pair in ([a, b], [a_twin, b_twin]))
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(5, 4, dtype=torch.float64))
        optimizer.zero_grad()
        tfnb.cond(x.sum() > 0, lambda: (x @ a).tanh().sum(), lambda: (x * b).sin().sum()).backward()
        step = optimizer.step()
    for k, sign in enumerate((1, -1, 1, 1, -1, -1)):
        optimizer.param_groups[0]["lr"] = eager.param_groups[0]["lr"] = arguments["lr"] * 0.8**k
        rows = sign * torch.rand(5, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        tfnb.run(step, {x: rows})
        eager.zero_grad()
        ((rows @ a_twin).tanh().sum() if sign > 0 else (rows * b_twin).sin().sum()).backward()
        eager.step()
        torch.testing.assert_close([a, b], [a_twin, b_twin], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_that_is_made_after_the_recording_sees_the_steps_of_runs() -> None:
    model = network()
    optimizer = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)
    run = recorded(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    run(0, 8)
    schedule.step()


@pytest.mark.parametrize("make", [
    lambda o: torch.optim.lr_scheduler.StepLR(o, 1), lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
])  # fmt: skip
def test_a_scheduler_inside_a_recording_is_refused(make: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    with tfnb.record(), pytest.raises(Unsupported, match=r"(?s)between runs.*line"):
        make(optimizer).step(1)
    schedule = make(optimizer)
    optimizer.step()
    schedule.step(*[1.0] * isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau))


def test_a_closure_is_called_once_and_the_step_is_given() -> None:
    model, twin = network(), network()
    images, labels = batch(0)
    calls = []

    def closure() -> Any:
        calls.append(1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer, eager = (torch.optim.Adam(m.parameters(), 0.01) for m in (model, twin))
    with tfnb.record():
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        step = optimizer.step(closure)
    assert len(calls) == 1
    tfnb.run(step, {x: images, y: labels})
    step_on(twin, eager, images, labels)
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


def test_from_torch_minimizes_the_parameters_of_its_optimizer_only() -> None:
    model, twin = network(), network()
    optimizer, eager = (torch.optim.Adam(m[3].parameters(), 0.1) for m in (model, twin))
    images, labels = batch(0)
    with tfnb.record():
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        step = train.from_torch(optimizer).minimize(F.cross_entropy(model(x), y))
    tfnb.run(step, {x: images, y: labels})
    step_on(twin, eager, images, labels)
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert train.from_torch(optimizer) is train.from_torch(optimizer)
    slots = train.from_torch(optimizer).slots(model[3].weight)
    assert slots["exp_avg"].storage.data_ptr() == optimizer.state[model[3].weight]["exp_avg"].data_ptr()


class Mine(torch.optim.SGD):
    pass


@pytest.mark.parametrize(("make", "text"), [
    (lambda ps: torch.optim.LBFGS(ps), r"torch\.optim\.lbfgs\.LBFGS has no twin.*as often as the values tell"),
    (lambda ps: Mine(ps, 0.1), "Mine has no twin.*not their subclasses"),
    (lambda ps: torch.optim.SGD(ps, 0.1, differentiable=True), r"differentiable=True"),
])  # fmt: skip
def test_other_optimizers_are_refused_with_class_and_line(make: Callable[[Any], Any], text: str) -> None:
    model = network()
    optimizer = make(list(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    images, labels = batch(0)
    with tfnb.record():
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(Unsupported, match=f"(?s){text}.*line"):
            optimizer.step(lambda: 0.0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_step_without_gradients_is_refused() -> None:
    model = network()
    with tfnb.record(), pytest.raises(FailedPrecondition, match=r"(?s)backward\(\) in the same cell.*line"):
        torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("name", ["SGD momentum", "Adagrad", "Adam"])
def test_tables_of_rows_are_trained_as_torch_trains_them(name: str) -> None:
    make, arguments = OPTIMIZERS[name]

    def table() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)).double()
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        return model

    def rows(i: int) -> torch.Tensor:
        return torch.randint(0, 10, (7,), generator=torch.Generator().manual_seed(i))

    model, twin = table(), table()
    optimizer, eager = make(model.parameters(), **arguments), make(twin.parameters(), **arguments)
    with tfnb.record():
        x, y = tfnb.placeholder(rows(0)), tfnb.placeholder(rows(0) % 3)
        step = step_on(model, optimizer, x, y)
        assert isinstance(model[0].weight.grad, tfnb.Tensor) and model[0].weight.grad.shape == (10, 4)
    for i in range(5):
        tfnb.run(step, {x: rows(i), y: rows(i) % 3})
        step_on(twin, eager, rows(i), rows(i) % 3)
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_rows_that_a_batch_looks_up_are_all_that_a_step_of_them_writes(name: str) -> None:
    make, _ = OPTIMIZERS[name]
    model = nn.Embedding(1000, 4, padding_idx=3)
    optimizer = make(model.parameters(), lr=0.1)
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([[1, 3], [2, 1]]))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        step = optimizer.step()
    before = model.weight.detach().clone()
    tfnb.run(step, {x: torch.tensor([[3, 999], [2, 999]])})
    assert (model.weight != before).any(1).nonzero().flatten().tolist() == [2, 999]
    assert any(node.op.endswith("_rows.default") for node in step.graph.nodes)


def test_sparse_adam_refuses_a_dense_gradient_with_its_name() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with tfnb.record(), pytest.raises(InvalidArgument, match="dense: take Adam"):
        model(tfnb.placeholder(torch.ones(4, 3))).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_complex_parameters_are_refused_where_torch_refuses_them(kind: type) -> None:
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    optimizer = kind([weight])
    with tfnb.record(), pytest.raises(InvalidArgument, match="complex"):
        (tfnb.placeholder(torch.ones(4, 3)) @ weight.real).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["ASGD", "Rprop"])
def test_what_starts_at_the_learning_rate_starts_at_that_of_the_first_run(name: str) -> None:
    make, arguments = OPTIMIZERS[name]
    model, twin = network(), network()
    optimizer, eager = make(model.parameters(), **arguments), make(twin.parameters(), **arguments)
    run = recorded(model, optimizer)
    for each in (optimizer, eager):
        each.param_groups[0]["lr"] = 0.02
    for i in range(3):
        run(i, 8)
        step_on(twin, eager, *batch(i))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("name", ["SGD dampening", "Adam", "Adamax"])
def test_a_state_that_was_thrown_away_starts_anew(name: str) -> None:
    make, arguments = OPTIMIZERS[name]
    model, twin = network(), network()
    optimizer, eager = make(model.parameters(), **arguments), make(twin.parameters(), **arguments)
    run = recorded(model, optimizer)
    for i in range(6):
        if i == 3:
            optimizer.state.clear(), eager.state.clear()
        run(i, 8)
        step_on(twin, eager, *batch(i))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "SGD momentum", "Adafactor", "Rprop", "NAdam"])
def test_an_optimizer_may_be_made_in_the_recording(name: str) -> None:
    make, arguments = OPTIMIZERS[name]
    model, twin = network(), network()
    with tfnb.record():
        x, y = map(tfnb.placeholder, batch(0))
        optimizer = make(model.parameters(), **arguments)
        step = step_on(model, optimizer, x, y)
    eager = make(twin.parameters(), **arguments)
    for i in range(4):
        tfnb.run(step, dict(zip((x, y), batch(i), strict=True)))
        step_on(twin, eager, *batch(i))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert all(type(t) is torch.Tensor for s in optimizer.state.values() for t in s.values())
    assert all(type(v.storage) is torch.Tensor for v in step.graph.variables)


def test_outside_of_a_recording_an_optimizer_is_torchs() -> None:
    model, twin = network(), network()
    optimizer, eager = (torch.optim.Adam(m.parameters(), 0.1) for m in (model, twin))
    recorded(model, optimizer)
    for _ in range(2):
        assert step_on(model, optimizer, *batch(0)) is None
        step_on(twin, eager, *batch(0))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert_same(optimizer.state_dict(), eager.state_dict())
    copy.deepcopy(optimizer)


Loop = Callable[[nn.Module, Any, torch.Tensor, torch.Tensor], Any]


def _two_optimizers(model: nn.Module) -> Any:
    return (torch.optim.SGD(model[:2].parameters(), 0.1, momentum=0.9), torch.optim.Adam(model[3].parameters(), 0.01))


def _by_turns(model: nn.Module, optimizers: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """One loss for each optimizer; the second one sees what the first did."""
    first, second = optimizers
    steps = []
    for optimizer in (first, second):
        first.zero_grad(set_to_none=False)
        second.zero_grad()
        F.cross_entropy(model(x), y).backward()
        steps.append(optimizer.step())
    return steps


def _together(model: nn.Module, optimizers: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return [optimizer.step() for optimizer in optimizers]


def _groups(model: nn.Module) -> Any:
    first = {"params": model[0].parameters(), "lr": 0.05, "weight_decay": 0.0}
    return torch.optim.AdamW([first, {"params": model[3].parameters(), "betas": (0.8, 0.99)}], lr=0.01)


def _micro_batches(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    for k in range(0, 8, 2):
        (F.cross_entropy(model(x[k : k + 2]), y[k : k + 2]) / 4).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    return optimizer.step()


def _edited_gradients(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(2).clamp_(-0.1, 0.1)
    model[0].weight.grad = model[0].weight.grad / 2
    model[3].bias.grad = None
    return optimizer.step()


LOOPS: dict[str, tuple[Callable[[nn.Module], Any], Loop]] = {
    "two optimizers by turns": (_two_optimizers, _by_turns),
    "two optimizers together": (_two_optimizers, _together),
    "groups": (_groups, step_on),
    "micro batches": (lambda model: torch.optim.SGD(model.parameters(), 0.1), _micro_batches),
    "edited gradients": (_groups, _edited_gradients),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_users_are_those_of_the_eager_loop(name: str) -> None:
    make, loop = LOOPS[name]
    model, twin = network(), network()
    mine, theirs = make(model), make(twin)
    with tfnb.record():
        x, y = (tfnb.placeholder(t, shape=t.shape) for t in batch(0))
        step = loop(model, mine, x, y)
    for i in range(5):
        tfnb.run(step, dict(zip((x, y), batch(i), strict=True)))
        loop(twin, theirs, *batch(i))
        assert_same(dict(model.named_parameters()), dict(twin.named_parameters()))


class Trainer:
    """A model and the average of its weights, as attributes."""

    def __init__(self, **options: Any) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, **options)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        taken = step_on(self.model, self.optimizer, x, y)
        self.average.update_parameters(self.model)
        return taken


@pytest.mark.filterwarnings("ignore:.*Python took the False branch")  # whether it is the first average
@pytest.mark.parametrize("options", [
    {}, {"use_buffers": True}, {"avg_fn": lambda average, new, count: 0.9 * average + 0.1 * new},
    {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)},
], ids=["mean", "with buffers", "function", "exponential"])  # fmt: skip
def test_averages_of_weights_see_each_step(options: dict[str, Any]) -> None:
    mine, theirs = Trainer(**options), Trainer(**options)
    for trainer in (mine, theirs):  # the first average is a copy, by a Python branch
        trainer.average.update_parameters(trainer.model)
    with tfnb.record() as graph:
        x, y = map(tfnb.placeholder, batch(0))
        step = mine.step(x, y), list(mine.average.parameters()), list(mine.average.buffers())
    assert not any("plain tensor of outside" in note for note in graph.notes)
    for i in range(4):
        tfnb.run(step, dict(zip((x, y), batch(i), strict=True)))
        theirs.step(*batch(i))
        assert_same(dict(mine.average.state_dict()), dict(theirs.average.state_dict()))


CYCLES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.1, 0.05], total_steps=9),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
}


@pytest.mark.parametrize("cycle", CYCLES)
@pytest.mark.parametrize(("kind", "settings"), [
    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.3}), (torch.optim.Adam, {}), (torch.optim.AdamW, {}),
    (torch.optim.RMSprop, {"momentum": 0.5}),
], ids=str)  # fmt: skip
def test_a_cycled_momentum_is_that_of_each_run(cycle: str, kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    x = torch.randn(3, 2, dtype=torch.float64)
    nets = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [kind([{"params": net[0].parameters()}, {"params": net[1].parameters()}], **settings) for net in nets]
    mine, theirs = map(CYCLES[cycle], optimizers)
    with tfnb.record() as graph:
        fed = tfnb.placeholder(x)
        step = train.from_torch(optimizers[0]).minimize(nets[0](fed).square().sum())
    for _ in range(8):
        tfnb.run(step, {fed: x})
        optimizers[1].zero_grad()
        nets[1](x).square().sum().backward()
        optimizers[1].step()
        assert_same(dict(nets[0].state_dict()), dict(nets[1].state_dict()))
        mine.step()
        theirs.step()
    tfnb.Session(graph).save(tmp_path / "cycled.safetensors")


def by_hand(**values: Sequence[Any]) -> Callable[[torch.optim.Optimizer], Callable[[int], None]]:
    """Settings of the first group that change at each step, those of the second group at every other one."""

    def started(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        def change(step: int) -> None:
            for number, group in enumerate(optimizer.param_groups):
                group.update({name: some[(step >> number) % len(some)] for name, some in values.items()})

        return change

    return started


BETAS = [(0.9, 0.999), (0.5, 0.9), (0.99, 0.9999)]
NUMBERS: dict[str, tuple[Any, dict[str, Any], dict[str, Sequence[Any]]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, {
        "momentum": [0.9, 0.1], "dampening": [0.3, 0.5], "weight_decay": [0.1, 0.5, 2.0]}),
    "SGD nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {"momentum": [0.9, 0.1]}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}, {"betas": BETAS, "eps": [1e-8, 1.0], "weight_decay": [0.1, 1]}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}, {"betas": BETAS}),
    "AdamW": (torch.optim.AdamW, {}, {"betas": BETAS, "eps": [1e-8, 1.0], "weight_decay": [0.01, 2.0]}),
    "AdamW, lr a tensor": (
        torch.optim.AdamW, {"lr": torch.tensor(0.01, dtype=torch.float64)}, {"weight_decay": [0.01, 2.0]}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.1}, {
        "betas": BETAS, "eps": [1e-8, 1.0], "weight_decay": [0.1, 1.0], "momentum_decay": [0.004, 0.1]}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "weight_decay": 0.1}, {
        "alpha": [0.99, 0.5], "eps": [1e-8, 0.1], "momentum": [0.9, 0.3], "weight_decay": [0.1, 0.4]}),
    "RMSprop centered": (torch.optim.RMSprop, {"centered": True}, {"alpha": [0.99, 0.5]}),
    "Adagrad": (torch.optim.Adagrad, {"weight_decay": 0.1}, {"lr_decay": [0.0, 0.1], "eps": [1e-10, 0.1]}),
    "Adadelta": (torch.optim.Adadelta, {}, {"rho": [0.9, 0.5], "eps": [1e-6, 1e-2], "lr": [1.0, 0.5]}),
    "RAdam": (torch.optim.RAdam, {"weight_decay": 0.1}, {"betas": BETAS, "weight_decay": [0.1, 0.4]}),
    "Adamax": (torch.optim.Adamax, {}, {"betas": BETAS, "eps": [1e-8, 0.1]}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_groups_are_those_of_each_run(name: str, dtype: torch.dtype) -> None:
    kind, settings, changes = NUMBERS[name]
    x = torch.randn(3, 2, dtype=dtype)
    nets = [nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    made = [kind([{"params": net[0].parameters()}, {"params": net[2].parameters()}], **settings) for net in nets]
    mine, theirs = (by_hand(**changes)(optimizer) for optimizer in made)
    with tfnb.record():
        fed = tfnb.placeholder(x)
        step = train.from_torch(made[0]).minimize(nets[0](fed).square().sum())
    for i in range(6):
        tfnb.run(step, {fed: x})
        made[1].zero_grad()
        nets[1](x).square().sum().backward()
        made[1].step()
        tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
        for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(one, other, **tolerance)
        mine(i + 1)
        theirs(i + 1)


@pytest.mark.parametrize(("kind", "settings", "change", "found"), [
    (torch.optim.SGD, {"momentum": 0.9}, {"nesterov": True}, "nesterov was False, and is True now"),
    (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}, "momentum was 0.9, and is 0.0 now"),
    (torch.optim.SGD, {"momentum": 0.9}, {"dampening": 0.1}, "dampening was 0, and is 0.1 now"),
    (torch.optim.Adam, {}, {"weight_decay": 0.1}, "weight_decay was 0, and is 0.1 now"),
    (torch.optim.AdamW, {"weight_decay": 0.1}, {"weight_decay": 0}, "weight_decay was 0.1, and is 0 now"),
    (torch.optim.Adam, {}, {"amsgrad": True}, "amsgrad was False, and is True now"),
    (torch.optim.NAdam, {}, {"maximize": True}, "maximize was False, and is True now"),
    (torch.optim.RMSprop, {}, {"centered": True}, "centered was False, and is True now"),
], ids=str)  # fmt: skip
def test_a_formula_that_changed_is_refused_until_it_is_back(
    kind: Any, settings: dict[str, Any], change: dict[str, Any], found: str
) -> None:
    layer, x = nn.Linear(2, 1), torch.ones(3, 2)
    optimizer = kind(layer.parameters(), lr=0.1, **settings)

    def recorded() -> tuple[Any, Any]:
        with tfnb.record():
            fed = tfnb.placeholder(x)
            return fed, train.from_torch(optimizer).minimize(layer(fed).sum())

    fed, step = recorded()
    tfnb.run(step, {fed: x})
    group, before = optimizer.param_groups[0], layer.weight.detach().clone()
    was = {name: group[name] for name in change}
    group.update(change)
    with pytest.raises(FailedPrecondition, match=rf"{found} \(group 0\).*Record the step again"):
        tfnb.run(step, {fed: x})
    assert torch.equal(layer.weight, before)
    fed_anew, anew = recorded()
    tfnb.run(anew, {fed_anew: x})
    with pytest.raises(FailedPrecondition, match=found):  # a step of another cell has its own formula
        tfnb.run(step, {fed: x})
    group.update(was)
    tfnb.run(step, {fed: x})
    with pytest.raises(FailedPrecondition, match="Record the step again"):
        tfnb.run(anew, {fed_anew: x})


def test_hyperparameters_that_change_after_the_recording_are_not_passed_over(tmp_path: Path) -> None:
    layer, x = nn.Linear(2, 1), torch.ones(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with tfnb.record() as graph:
        fed = tfnb.placeholder(x)
        step = train.from_torch(optimizer).minimize(layer(fed).sum())
    tfnb.run(step, {fed: x})
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)  # cycles the momentum as well
    before = layer.weight.detach().clone()
    with pytest.raises(FailedPrecondition, match=r"momentum was 0, and is 0.95 now \(group 0\)"):
        tfnb.run(step, {fed: x})
    assert torch.equal(layer.weight, before)
    session = tfnb.Session(graph)
    session.save(tmp_path / "here.safetensors")  # the refusal is of steps only
    session.restore(tmp_path / "here.safetensors")
    assert float(graph.contents.variables["SGD/hyperparameters"].value()[0]) == optimizer.param_groups[0]["lr"]
    with tfnb.record():
        fed = tfnb.placeholder(x)
        step = train.from_torch(optimizer).minimize(layer(fed).sum())
    tfnb.run(step, {fed: x})
    assert not torch.equal(layer.weight, before)


def test_a_rate_that_is_a_tensor_is_filled_between_runs() -> None:
    x, rates = torch.randn(3, 2), [torch.tensor(0.1), torch.tensor(0.1)]
    layers = [nn.Linear(2, 1) for _ in rates]
    layers[1].load_state_dict(layers[0].state_dict())
    made = [torch.optim.Adam(layer.parameters(), lr=rate) for layer, rate in zip(layers, rates, strict=True)]
    with tfnb.record():
        fed = tfnb.placeholder(x)
        step = train.from_torch(made[0]).minimize(layers[0](fed).square().sum())
    for _ in range(4):
        tfnb.run(step, {fed: x})
        made[1].zero_grad()
        layers[1](x).square().sum().backward()
        made[1].step()
        assert_same(dict(layers[0].state_dict()), dict(layers[1].state_dict()))
        for rate in rates:
            rate.mul_(0.5)


def test_a_cycled_momentum_is_that_of_its_own_optimizer() -> None:
    x = torch.randn(3, 2, dtype=torch.float64)
    nets = [[nn.Linear(2, 1).double() for _ in range(2)] for _ in range(2)]
    for mine, theirs in zip(*nets, strict=True):
        theirs.load_state_dict(mine.state_dict())
    made = [[torch.optim.SGD(net.parameters(), 0.1, momentum) for net, momentum in zip(pair, (0.9, 0.95), strict=True)]
            for pair in nets]  # fmt: skip
    cycles = [torch.optim.lr_scheduler.OneCycleLR(pair[0], 0.1, total_steps=9) for pair in made]  # 0.95 at first
    with tfnb.record():
        fed = tfnb.placeholder(x)
        steps = [train.from_torch(o).minimize(net(fed).square().sum()) for o, net in zip(made[0], nets[0], strict=True)]
    for _ in range(6):
        tfnb.run(steps, {fed: x})
        for optimizer, net in zip(made[1], nets[1], strict=True):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        for mine, theirs in zip(*nets, strict=True):
            assert_same(dict(mine.state_dict()), dict(theirs.state_dict()))
        for cycle in cycles:
            cycle.step()


@pytest.mark.parametrize("first", ["state_dict", "step"])
def test_a_buffer_that_no_run_has_begun_does_not_damp_the_first_eager_step(first: str) -> None:
    """SGD with dampening takes its first step along the gradient itself."""
    nets = [nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, dampening=0.5) for net in nets]

    def program(net: Any, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = net[0](x).square().sum() if x[0, 0] > 0 else net[1](x).square().sum()
        loss.backward()
        optimizer.step()

    rows = [torch.tensor([[sign, 2.0]], dtype=torch.float64) for sign in (1.0, 1.0, -1.0, -1.0, 1.0)]
    with tfnb.record():
        x = tfnb.placeholder(rows[0])
        tfnb.autograph(program)(nets[0], optimizers[0], x)
        step = tfnb.effects()
    for row in rows[:2]:
        tfnb.run(step, {x: row})
        program(nets[1], optimizers[1], row)
    if first == "state_dict":
        found = copy.deepcopy(optimizers[0].state_dict())
        assert found["state"].keys() == optimizers[1].state_dict()["state"].keys()
        optimizers[0] = torch.optim.SGD(nets[0].parameters(), 0.1, momentum=0.9, dampening=0.5)
        optimizers[0].load_state_dict(found)
    for row in rows[2:]:
        for net, optimizer in zip(nets, optimizers, strict=True):
            program(net, optimizer, row)
    for mine, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_rprop_begins_the_step_size_of_complex_parameters_as_torch_does() -> None:
    ends = []
    for is_recorded in (False, True):
        w = nn.Parameter(torch.tensor([1.0 + 1.0j], dtype=torch.complex128))
        optimizer = torch.optim.Rprop([w], lr=0.05)
        x = torch.tensor([2.0 - 1.0j], dtype=torch.complex128)
        if is_recorded:
            with tfnb.record():
                fed = tfnb.placeholder(x)
                (w - fed).abs().square().sum().backward()
                step = optimizer.step()
        for _ in range(4):
            if is_recorded:
                tfnb.run(step, {fed: x})
            else:
                optimizer.zero_grad()
                (w - x).abs().square().sum().backward()
                optimizer.step()
        ends.append(w.detach())
    torch.testing.assert_close(ends[1], ends[0])
