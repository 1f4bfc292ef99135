"""Optimizers whose class the user wrote: their own ``step`` in a graph, equal to plain PyTorch over several runs."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import BranchChanged, FailedPrecondition, InvalidArgument, Unsupported


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01, betas: Any = (0.9, 0.99), weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average, (first, second) = state["exp_avg"], group["betas"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = average.clone().mul_(first).add(p.grad, alpha=1 - first).sign_()
                p.add_(update, alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)


class Counting(torch.optim.Optimizer):
    """Adam by hand, whose count is a number of Python."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, square=torch.zeros_like(p))
                state["step"] += 1
                state["square"].mul_(group["beta"]).addcmul_(p.grad, p.grad, value=1 - group["beta"])
                correction = 1 - group["beta"] ** state["step"]
                denominator = (state["square"] / correction).sqrt().add_(1e-8)
                p.addcdiv_(p.grad, denominator, value=-group["lr"] / correction)


class SignMomentum(torch.optim.Optimizer):
    """Written as before there was `torch.no_grad`: by ``.data``, in groups that differ."""

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d, state = p.grad.data, self.state[p]
                if "buffer" not in state:
                    buffer = state["buffer"] = torch.zeros_like(p.data)
                else:
                    buffer = state["buffer"]
                buffer.mul_(group["momentum"]).add_(d)
                p.data.add_(buffer.sign(), alpha=-group["lr"])
        return loss


class Trust(torch.optim.Optimizer):
    """Layer-wise rates, and one norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.01, "eps": 1e-8})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            total = torch.stack([p.grad.norm() for p in group["params"] if p.grad is not None]).norm()
            for p in group["params"]:
                if p.grad is None:
                    continue
                size, slope = p.norm(), p.grad.norm()
                trust = size / (slope + group["decay"] * size + group["eps"])
                trust = torch.where((size > 0) & (slope > 0), trust, 1.0)
                p -= group["lr"] * trust * p.grad.add(p, alpha=group["decay"]) / (1 + total)


class Lists(torch.optim.Optimizer):
    """By functions of lists of tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            torch._foreach_add_(params, [p.grad for p in params], alpha=-group["lr"])


KINDS = [Lion, Counting, SignMomentum, Trust, Lists]


def made(kind: Any, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    if kind is SignMomentum:
        groups = [{"params": net[0].parameters(), "lr": 0.03}, {"params": net[2].parameters(), "momentum": 0.5}]
        return net, kind(groups, **settings)
    return net, kind(net.parameters(), **settings)


def always(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = (net(x) - k).square().mean()
    loss.backward()
    opt.step()
    return loss


def in_a_branch(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean() / k
    if torch.isfinite(loss):
        loss.backward()
        opt.step()
    return loss


def a_gradient_below(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    if k > 0:
        opt.step()
    opt.zero_grad()
    later = (net(x) - 1).square().mean()
    later.backward()
    opt.step()
    return later


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(rows, 3, dtype=torch.float64) for rows in (4, 4, 6, 3)]


def assert_same(a: Any, b: Any) -> None:
    for mine, other in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("where", ["here", "parts"])
@pytest.mark.parametrize("function", [always, in_a_branch, a_gradient_below])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_take_the_steps_of_the_class(kind: Any, function: Any, where: str) -> None:
    (plain, optimizer), (net, recorded) = made(kind), made(kind)
    numbers = [torch.tensor(number, dtype=torch.float64) for number in (0.0, 1.0, 0.0, 2.0)]
    rows = batches()
    with tfnb.record() as graph:
        x, k = tfnb.placeholder(rows[0]), tfnb.placeholder(numbers[0])
        loss = tfnb.autograph(function)(net, recorded, x, k)
        everything = tfnb.effects()
    session = tfnb.Session(graph, executor="parts") if where == "parts" else tfnb.Session(graph)
    for batch, number in zip(rows, numbers, strict=True):
        want = function(plain, optimizer, batch, number)
        got, _ = session.run([loss, everything], {x: batch, k: number})
        torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-12, equal_nan=True)
        assert_same(net, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_the_optimizers_own_and_rates_are_read_at_each_run(kind: Any) -> None:
    (plain, optimizer), (net, recorded) = made(kind), made(kind)
    rows = batches()
    for each, opt in ((plain, optimizer), (net, recorded)):  # a step before the recording
        always(each, opt, rows[1], torch.tensor(0.5))
        opt.zero_grad()
    schedules = [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5) for opt in (optimizer, recorded)]
    with tfnb.record():
        x, k = tfnb.placeholder(rows[0]), tfnb.placeholder(torch.tensor(1.0, dtype=torch.float64))
        loss = (net(x) - k).square().mean()
        loss.backward()
        step = recorded.step()
    for batch in rows:
        always(plain, optimizer, batch, torch.tensor(1.0))
        tfnb.run(step, {x: batch, k: 1.0})
        assert_same(net, plain)
        for schedule in schedules:
            schedule.step()
    found, wanted = recorded.state_dict()["state"], optimizer.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for place in wanted:
        for name, value in wanted[place].items():
            torch.testing.assert_close(torch.as_tensor(found[place][name]).double(), torch.as_tensor(value).double())
    saved = copy.deepcopy(recorded.state_dict())
    tfnb.run(step, {x: rows[0], k: 1.0})
    recorded.load_state_dict(saved)
    always(plain, optimizer, rows[0], torch.tensor(1.0))
    plain.load_state_dict(net.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saved))
    tfnb.run(step, {x: rows[2], k: 1.0})
    always(plain, optimizer, rows[2], torch.tensor(1.0))
    assert_same(net, plain)


def test_fit_and_minimize_take_the_steps_of_the_class() -> None:
    (plain, optimizer), (net, recorded) = made(Lion), made(Lion)
    data = torch.cat(batches())[:16]
    with tfnb.record():
        x = tfnb.placeholder(data[:4])
        step = tfnb.train.from_torch(recorded).minimize((net(x) - 1).square().mean())
    tfnb.fit(step, {x: data}, epochs=2, batch_size=4, shuffle=False)
    for _ in range(2):
        for batch in data.split(4):
            always(plain, optimizer, batch, torch.tensor(1.0))
    assert_same(net, plain)


def test_recording_alone_changes_neither_state_nor_random_numbers() -> None:
    net, optimizer = made(Counting)
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    with tfnb.record():
        net(tfnb.placeholder(batches()[0])).sum().backward()
        step = optimizer.step()
    assert isinstance(step, tfnb.Operation)
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_another_setting_than_the_recording_had_is_refused_in_a_run() -> None:
    net, optimizer = made(Lion)
    with tfnb.record():
        x = tfnb.placeholder(batches()[0])
        net(x).sum().backward()
        step = optimizer.step()
    tfnb.run(step, {x: batches()[1]})
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(FailedPrecondition, match=r"Lion: weight_decay was 0\.1, and is 0\.2 now \(group 0\)"):
        tfnb.run(step, {x: batches()[1]})


# -- what stays refused ---------------------------------------------------------------------------------------------


class Rule(torch.optim.Optimizer):
    """Its subclasses say what happens to one Parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.count = 0

    def rule(self, p: Any, group: Any) -> None: ...

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.rule(p, group)


class TakesANumber(Rule):
    def rule(self, p: Any, group: Any) -> None:
        p.add_(p.grad, alpha=-group["lr"] / np.sqrt(p.grad.norm().item()))


class Wraps(Rule):
    """Around an optimizer that is no attribute of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.bases = [torch.optim.SGD(self.param_groups[0]["params"], 0.1)]

    def rule(self, p: Any, group: Any) -> None:
        self.bases[0].step()


class WrapsItsLike(Rule):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = Lion(self.param_groups[0]["params"], 0.1)

    def rule(self, p: Any, group: Any) -> None:
        self.base.step()


class SchedulesInner(Rule):
    """It changes a setting of its inner optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.SGD(self.param_groups[0]["params"], 0.1)

    def rule(self, p: Any, group: Any) -> None:
        self.base.param_groups[0]["lr"] *= 0.9
        self.base.step()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (TakesANumber, r"takes a value as a Python number by \w+\(\)"),
        (Wraps, r"SGD\.step\(\) is called within the step\(\) of another optimizer: keep it as an attribute"),
        (WrapsItsLike, r"Lion\.step\(\) is called within the step\(\) of another optimizer, WrapsItsLike"),
        (SchedulesInner, r"SchedulesInner\.step\(\) changes its attribute base"),
    ],
)
def test_a_step_that_the_graph_cannot_repeat_is_refused_by_name(kind: Any, text: str) -> None:
    net, optimizer = made(kind)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises((Unsupported, InvalidArgument), match=text), tfnb.record():
        net(tfnb.placeholder(batches()[0])).sum().backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_class_that_the_recording_itself_defines_is_refused() -> None:
    net, _ = made(Lion)
    with pytest.raises(Unsupported, match=r"Late was defined in this recording.*define the class above"), tfnb.record():

        class Late(Rule):
            def step(self) -> None: ...

        net(tfnb.placeholder(batches()[0])).sum().backward()
        Late(net.parameters()).step()


def test_another_argument_than_a_closure_is_refused() -> None:
    net, optimizer = made(Lion)
    with pytest.raises(Unsupported, match=r"Lion\.step\(\).*a closure or without arguments"), tfnb.record():
        net(tfnb.placeholder(batches()[0])).sum().backward()
        optimizer.step(3)


class Sharpness(torch.optim.Optimizer):
    """SAM: its closure is called where the Parameters are others."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        closure = torch.enable_grad()(closure)
        moved = []
        for p in self.param_groups[0]["params"]:
            moved.append(0.05 * p.grad)
            p.add_(moved[-1])
        closure()
        for p, move in zip(self.param_groups[0]["params"], moved, strict=True):
            p.sub_(move).sub_(p.grad, alpha=self.param_groups[0]["lr"])


class CallsTwice(Rule):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure()
        closure()


@pytest.mark.parametrize(("kind", "text"), [
    (Sharpness, "calls its closure after it wrote a Parameter"), (CallsTwice, "calls its closure 2 times"),
])  # fmt: skip
def test_a_closure_that_is_not_called_first_and_once_is_refused(kind: Any, text: str) -> None:
    net, optimizer = made(kind)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    with pytest.raises(Unsupported, match=text), tfnb.record():
        x = tfnb.placeholder(batches()[0])
        optimizer.step(closure)


def test_a_gradient_that_only_some_runs_have_is_refused() -> None:
    def program(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> None:
        if k > 0:
            net(x).sum().backward()
        opt.step()

    net, optimizer = made(Lion)
    with pytest.raises(Unsupported, match=r"a branch decides whether .* has a \.grad.*inside of the branch"):  # noqa: SIM117
        with tfnb.record():
            x, k = tfnb.placeholder(batches()[0]), tfnb.placeholder(torch.tensor(1.0))
            tfnb.autograph(program)(net, optimizer, x, k)


# -- classes whose steps a graph would not repeat: each was recorded once, with wrong numbers --------------------------


class Ruled(torch.optim.Optimizer):
    """Its subclasses say what happens to one Parameter; ``kept`` is its state."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.9})
        self.set_up([p for group in self.param_groups for p in group["params"]])

    def set_up(self, params: list[Any]) -> None: ...

    def rule(self, p: Any, group: Any, kept: Any) -> None: ...

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, group, self.state[p])


class OneTensorTwice(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if not kept:
            kept["a"] = kept["b"] = torch.zeros_like(p)
        kept["a"].mul_(0.9).add_(p.grad)
        p.add_(kept["b"], alpha=-group["lr"])


class StringInState(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        p.add_(p.grad, alpha=-group["lr"] * (1 if kept.setdefault("phase", "a") == "a" else 0.25))
        kept["phase"] = "b"


class ListInState(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        (buffer,) = kept.setdefault("buffers", [torch.zeros_like(p)])
        p.add_(buffer.mul_(0.9).add_(p.grad), alpha=-group["lr"])


class DictInState(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        buffer = kept.setdefault("d", {"m": torch.zeros_like(p)})["m"]
        p.add_(buffer.mul_(0.9).add_(p.grad), alpha=-group["lr"])


class TupleInState(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        (buffer,) = kept.get("m", (torch.zeros_like(p),))
        kept["m"] = (0.9 * buffer + p.grad,)
        p.add_(kept["m"][0], alpha=-group["lr"])


class History(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        history = kept.setdefault("history", [])
        history.append(p.grad.clone())
        p.add_(sum(history) / len(history), alpha=-group["lr"])


class BufferInItself(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.buffers = [torch.zeros_like(p) for p in params]

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        buffer = self.buffers[[q is p for q in group["params"]].index(True)]
        p.add_(buffer.mul_(0.9).add_(p.grad), alpha=-group["lr"])


class BuffersByParameter(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.buffers: dict[Any, Any] = {}

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if p not in self.buffers:
            self.buffers[p] = torch.zeros_like(p)
        p.add_(self.buffers[p].mul_(0.9).add_(p.grad), alpha=-group["lr"])


class CountInDict(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.counts = {"n": 0}

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        self.counts["n"] += 1
        p.add_(p.grad, alpha=-group["lr"] / self.counts["n"])


class DropsGradient(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        p.add_(p.grad, alpha=-group["lr"])
        p.grad = None


class KeepsGradient(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if not kept:
            kept["before"] = torch.zeros_like(p)
        p.add_(p.grad + 0.5 * kept["before"], alpha=-group["lr"])
        kept["before"] = p.grad


class CountsInItsObject(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.phase = SimpleNamespace(n=0)

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        self.phase.n += 1
        p.sub_(p.grad * group["lr"] * (0.5 if self.phase.n > 20 else 1.0))


class LooksBack(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.norms = deque(maxlen=20)

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        self.norms.append(1.0)
        p.sub_(p.grad * group["lr"] * (0.5 if len(self.norms) == 20 else 1.0))


WRONG = [
    (CountsInItsObject, "changes its attribute phase"),
    (LooksBack, "changes its attribute norms"),
    (OneTensorTwice, r"another state\['\w'\] than a step that has.*no tensor in it by two names"),
    (StringInState, r"keeps state\['phase'\], which is a str"),
    (ListInState, r"keeps state\['buffers'\], which is a list"),
    (DictInState, r"keeps state\['d'\], which is a dict"),
    (TupleInState, r"keeps state\['m'\], which is a tuple"),
    (History, r"keeps state\['history'\], which is a list"),
    (BufferInItself, "changes its attribute buffers"),
    (BuffersByParameter, "changes its attribute buffers"),
    (CountInDict, "changes its attribute counts"),
    (DropsGradient, r"replaces or drops p\.grad.*zero_grad\(\) after step\(\)"),
    (KeepsGradient, r"keeps the gradient itself in state\['before'\].*p\.grad\.clone\(\)"),
]


@pytest.mark.parametrize("rate", [0.05, 0.0])
@pytest.mark.parametrize(("kind", "text"), WRONG)
def test_a_step_that_lives_on_otherwise_than_a_graph_is_refused(kind: Any, text: str, rate: float) -> None:
    net, optimizer = made(kind, lr=rate)
    before, own = copy.deepcopy(net.state_dict()), copy.deepcopy(getattr(optimizer, "buffers", None))
    with pytest.raises(Unsupported, match=rf"{kind.__name__}\.step\(\).*{text}"), tfnb.record():
        net(tfnb.placeholder(batches()[0])).sum().backward()
        optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert kind is not BufferInItself or all(map(torch.equal, optimizer.buffers, own))


class CountsByDefault(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        kept.setdefault("n", 0)
        kept["n"] += 1
        p.add_(p.grad, alpha=-group["lr"] / kept["n"])


class WritesGradient(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        p.grad.add_(p, alpha=0.1)
        p.add_(p.grad, alpha=-group["lr"])


class SizesByRate(Ruled):
    """Its state begins with the learning rate of the first step."""

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if not kept:
            kept["before"], kept["size"] = torch.zeros_like(p), torch.full_like(p, group["lr"])
        kept["size"].mul_(torch.where(p.grad * kept["before"] > 0, 1.2, 0.5))
        kept["before"].copy_(p.grad)
        p.sub_(p.grad.sign() * kept["size"])


class EveryThird(Ruled):
    def set_up(self, params: list[Any]) -> None:
        for p in params:
            self.state[p].update(n=0, slow=p.detach().clone())

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        kept["n"] += 1
        p.add_(p.grad, alpha=-group["lr"])
        if kept["n"] % 3 == 0:
            p.copy_(kept["slow"].lerp_(p, 0.5))


class ReadsItself(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.mixed, self.scales, self.all = 0.8, {"m": [0.5]}, params

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        kept.setdefault("m", torch.zeros_like(p)).mul_(self.mixed).add_(p.grad, alpha=self.scales["m"][0])
        p.sub_(group["lr"] * kept["m"] / len(self.all))


class CountsFromOne(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        kept["n"] = kept.get("n", 0) + 1
        p.add_(p.grad, alpha=-group["lr"] / kept["n"])


class BeginsAtOne(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if "n" not in kept:
            kept["n"] = 1
        else:
            kept["n"] += 1
        p.add_(p.grad, alpha=-group["lr"] / kept["n"])


class FirstIsUndamped(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if "m" not in kept:
            kept["m"] = torch.zeros_like(p)
            kept["m"].add_(p.grad)
        else:
            kept["m"].mul_(0.9).add_(p.grad, alpha=0.1)
        p.add_(kept["m"], alpha=-group["lr"])


class FirstOnlyBegins(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if not kept:
            kept["m"] = torch.zeros_like(p)
            return
        kept["m"].mul_(0.9).add_(p.grad)
        p.add_(kept["m"], alpha=-group["lr"])


class BoolInState(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        kept["odd"] = not kept.get("odd", False)
        p.add_(p.grad, alpha=-group["lr"] if kept["odd"] else -0.1 * group["lr"])


class BeginsWithGradient(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if "buffer" not in kept:
            kept["buffer"] = p.grad.clone()
        p.add_(kept["buffer"], alpha=-group["lr"])


class BeginsWithParameter(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        kept.setdefault("slow", p.clone())
        p.add_(p.grad, alpha=-group["lr"])


class KeepsAMaster(Ruled):
    """Of 16 bits, with a copy in float32 that is stepped."""

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if not kept:
            kept["master"], kept["m"] = p.detach().float().clone(), torch.zeros_like(p, dtype=torch.float32)
        kept["m"].mul_(0.9).add_(p.grad.float(), alpha=0.1)
        kept["master"].add_(kept["m"], alpha=-group["lr"])
        p.copy_(kept["master"])


class AssignsData(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        p.data = p.data - group["lr"] * p.grad


class AssignsDataTwice(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        buffer = kept.setdefault("m", torch.zeros_like(p))
        buffer.data = 0.5 * buffer.data + p.grad.data
        p.data = p.data.mul(1 - group["lr"] * 0.1)
        p.data = p.data - group["lr"] * buffer.data


class MadeInPart(Ruled):
    """Half of its state is made in __init__, and half by the first step."""

    def set_up(self, params: list[Any]) -> None:
        for p in params:
            self.state[p]["slow"] = p.detach().clone()

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if "m" not in kept:
            kept["m"] = p.grad.clone()
        else:
            kept["m"].lerp_(p.grad, 0.5)
        p.sub_(kept["m"] * group["lr"])
        kept["slow"].lerp_(p, 0.1)
        p.lerp_(kept["slow"], 0.01)


class CountsInItself(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.count = 0

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        self.count += 1
        p.add_(p.grad, alpha=-group["lr"] / self.count)


class CountsInGroup(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.param_groups[0]["count"] = 0

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        group["count"] += 1
        p.add_(p.grad, alpha=-group["lr"] / group["count"])


class CountInTensor(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        self.total += 1
        p.sub_(group["lr"] * p.grad / self.total)


class TensorInGroup(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.param_groups[0]["t"] = torch.zeros((), dtype=torch.float64)

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        group["t"].add_(1)
        p.sub_(group["lr"] * p.grad / group["t"])


class KeepsItsCount(Ruled):
    """A name for a number stays that number where the state goes on."""

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        count = kept.setdefault("n", 0)
        kept["n"] += 1
        p.sub_(p.grad * group["lr"] / (count + 1))


OWN_FIRST = [CountsFromOne, BeginsAtOne, FirstIsUndamped, FirstOnlyBegins, BeginsWithGradient, BeginsWithParameter]
RIGHT = [
    CountsByDefault, KeepsItsCount, WritesGradient, SizesByRate, EveryThird, ReadsItself, *OWN_FIRST, BoolInState,
    AssignsData, AssignsDataTwice, MadeInPart, CountsInItself, CountsInGroup, CountInTensor, TensorInGroup,
]  # fmt: skip


@pytest.mark.parametrize("rate", [0.05, 0.0])
@pytest.mark.parametrize("kind", RIGHT)
def test_six_runs_of_a_step_that_a_graph_repeats(kind: Any, rate: float) -> None:
    (plain, optimizer), (net, recorded) = made(kind, lr=rate), made(kind, lr=rate)
    with tfnb.record():
        x = tfnb.placeholder(batches()[0])
        always(net, recorded, x, torch.tensor(1.0))
        step = tfnb.effects()
    for opt in (optimizer, recorded):
        opt.param_groups[0]["lr"] = 0.04
    for batch in (*batches(), *batches()[:2]):
        tfnb.run(step, {x: batch})
        always(plain, optimizer, batch, torch.tensor(1.0))
        assert_same(net, plain)


@pytest.mark.parametrize("clear", [lambda opt, start: opt.load_state_dict(start), lambda opt, start: opt.state.clear()])
@pytest.mark.parametrize("kind", [CountsByDefault, SizesByRate, ReadsItself, Lion, Counting, *OWN_FIRST])
def test_a_state_that_was_cleared_begins_anew(kind: Any, clear: Any) -> None:
    (plain, optimizer), (net, recorded) = made(kind), made(kind)
    start = recorded.state_dict()
    with tfnb.record():
        x = tfnb.placeholder(batches()[0])
        always(net, recorded, x, torch.tensor(1.0))
        step = tfnb.effects()
    for turn in range(2):
        for batch in batches():
            tfnb.run(step, {x: batch})
            always(plain, optimizer, batch, torch.tensor(1.0))
            assert_same(net, plain)
        if not turn:
            clear(recorded, copy.deepcopy(start))
            optimizer.state.clear()


def test_a_cleared_state_that_a_step_does_not_begin_is_refused_in_a_run() -> None:
    net, recorded = made(EveryThird)
    with tfnb.record():
        x = tfnb.placeholder(batches()[0])
        net(x).sum().backward()
        step = recorded.step()
    recorded.state.clear()
    with pytest.raises(FailedPrecondition, match=r"EveryThird: state\['\w+'\] is gone.*load a state_dict"):
        tfnb.run(step, {x: batches()[1]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*RIGHT, KeepsAMaster, Lion, Counting, SignMomentum, Lists])
def test_steps_in_sixteen_bits_round_as_plain_torch(kind: Any, dtype: torch.dtype) -> None:
    """But for one number in fifty: torch adds a product without rounding it first, or not, as the size tells."""
    start = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    plain, net = (nn.ParameterList([start.clone()]) for _ in range(2))
    optimizer, recorded = kind(plain.parameters()), kind(net.parameters())

    def loss(each: Any, x: torch.Tensor) -> torch.Tensor:
        return ((each[0] - 0.3) * x).sum()

    with tfnb.record():
        x = tfnb.placeholder(torch.ones((), dtype=dtype))
        loss(net, x).backward()
        step = recorded.step()
    for number in (0.5, -1.25, 3.0, 0.75):
        tfnb.run(step, {x: torch.tensor(number, dtype=dtype)})
        optimizer.zero_grad()
        loss(plain, torch.tensor(number, dtype=dtype)).backward()
        optimizer.step()
        assert net[0].dtype == dtype and (net[0] != plain[0]).double().mean() < 0.02
        torch.testing.assert_close(net[0], plain[0], rtol=0.05, atol=0.005)


def test_parameters_of_which_some_took_their_first_step_are_refused_in_a_run() -> None:
    net, optimizer = made(FirstIsUndamped)
    with tfnb.record():
        x = tfnb.placeholder(batches()[0])
        net(x).sum().backward()
        step = optimizer.step()
    optimizer.state[net[0].weight]["m"] = torch.zeros_like(net[0].weight)
    with pytest.raises(FailedPrecondition, match=r"FirstIsUndamped\.step\(\): .*some Parameters"):
        tfnb.run(step, {x: batches()[1]})


def test_a_state_that_no_run_has_begun_is_none_of_plain_torch() -> None:
    def program(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> None:
        opt.zero_grad()
        net(x).square().sum().backward()
        if k > 0:
            opt.step()

    (plain, optimizer), (net, recorded) = made(FirstIsUndamped), made(FirstIsUndamped)
    with tfnb.record():
        x, k = tfnb.placeholder(batches()[0]), tfnb.placeholder(torch.tensor(1.0))
        tfnb.autograph(program)(net, recorded, x, k)
        everything = tfnb.effects()
    tfnb.run(everything, {x: batches()[0], k: -1.0})
    assert not recorded.state_dict()["state"]
    for each, opt in ((plain, optimizer), (net, recorded)):
        for batch in batches():
            program(each, opt, batch, torch.tensor(1.0))
    assert_same(net, plain)


class OwnRate(Ruled):
    """It uses no learning rate of a group."""

    def set_up(self, params: list[Any]) -> None:
        self.rate, self.mixed = 0.1, [0.5]

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        p.sub_(p.grad * (self.rate * self.mixed[0]))


def test_an_attribute_that_changed_is_refused_in_a_run() -> None:
    net, optimizer = made(OwnRate)
    with tfnb.record():
        x = tfnb.placeholder(batches()[0])
        net(x).sum().backward()
        step = optimizer.step()
    tfnb.run(step, {x: batches()[1]})
    optimizer.mixed[0] = 0.25
    with pytest.raises(FailedPrecondition, match=r"OwnRate: self\.mixed was \[0\.5\], and is \[0\.25\] now"):
        tfnb.run(step, {x: batches()[1]})


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor, self.curve = factor, {"at": [torch.ones(2)]}


def times(factor: float) -> Any:
    return lambda grad: grad * factor


class Constants(Ruled):
    """Its attributes are an object, functions and tensors."""

    def set_up(self, params: list[Any]) -> None:
        self.scale, self.kernel, self.curve = Scale(0.1), times(0.5), partial(torch.mul, other=1.0)
        self.weights, self.large, self.seen = torch.tensor([0.5, 0.25]), torch.ones(5000), {Scale}

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        grad = self.curve(self.kernel(p.grad) * self.weights[0]) * self.scale.curve["at"][0][1]
        p.sub_(grad * self.scale.factor * self.large[3])


@pytest.mark.filterwarnings("ignore:a tensor that .* reads has other values:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda o: setattr(o, "scale", Scale(0.2)), lambda o: setattr(o.scale, "factor", 0.3),
        lambda o: o.scale.curve["at"][0].mul_(2), lambda o: setattr(o, "kernel", times(0.25)),
        lambda o: setattr(o, "curve", partial(torch.mul, other=2.0)), lambda o: o.weights.mul_(2),
        lambda o: setattr(o, "weights", torch.tensor([0.5, 0.3])), lambda o: o.large.mul_(2),
        lambda o: o.seen.add(int),
    ],
)  # fmt: skip
def test_an_object_function_or_tensor_of_a_class_that_changed_is_refused_in_a_run(change: Any) -> None:
    net, optimizer = made(Constants)
    with tfnb.record():
        x = tfnb.placeholder(batches()[0])
        net(x).sum().backward()
        step = optimizer.step()
    for _ in range(2):
        tfnb.run(step, {x: batches()[1]})
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # wraps optimizer.step
    optimizer.scale, optimizer.weights = copy.deepcopy(optimizer.scale), optimizer.weights.clone()  # equal ones
    before = net[0].weight.detach().clone()
    tfnb.run(step, {x: batches()[1]})
    assert not torch.equal(net[0].weight, before)
    before = net[0].weight.detach().clone()
    change(optimizer)
    with pytest.raises(FailedPrecondition, match=r"Constants: self\.\w+ is another one now"):
        tfnb.run(step, {x: batches()[1]})
    assert torch.equal(net[0].weight, before)


def test_the_first_graph_holds_to_its_settings_after_another_recording() -> None:
    net, optimizer = made(Lion)
    steps = []
    for decay in (0.1, 0.2):
        optimizer.param_groups[0]["weight_decay"] = decay
        with tfnb.record():
            x = tfnb.placeholder(batches()[0])
            net(x).sum().backward()
            steps.append((optimizer.step(), x))
    (first, x), (second, y) = steps
    tfnb.run(second, {y: batches()[1]})
    with pytest.raises(FailedPrecondition, match=r"weight_decay was 0\.1, and is 0\.2 now"):
        tfnb.run(first, {x: batches()[1]})


class Greatest(Ruled):
    """A setting that no step of the rehearsal binds anew, as its value is large; a step of a run does."""

    def set_up(self, params: list[Any]) -> None:
        self.greatest = 10.0

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        norm = p.grad.abs().max()
        if norm > self.greatest:
            self.greatest = norm
        p.sub_(p.grad * group["lr"] / self.greatest)


class LaterNone(Ruled):
    """An entry that begins as None."""

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        if not kept:
            kept["before"] = None
        if kept["before"] is None:
            kept["before"] = p.grad.clone()
        p.sub_((p.grad + kept["before"]) * group["lr"])
        kept["before"] = p.grad.clone()


class CountsByGroup(Ruled):
    def set_up(self, params: list[Any]) -> None:
        for group in self.param_groups:
            group["t"], group["before"] = 0, 0

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        group["before"] = group["t"]
        group["t"] += 1
        p.sub_(p.grad * group["lr"] / (group["before"] + 1) / group["t"])


LATER = [
    pytest.param(kind, how, marks=[pytest.mark.slow] if how == "added" else []) for how in ("unfrozen", "added")
    for kind in (*OWN_FIRST, MadeInPart, CountsInItself, CountsByGroup, Greatest, LaterNone)
    if (kind, how) != (MadeInPart, "added")  # plain PyTorch raises KeyError
]  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), LATER)
def test_parameters_that_come_later_take_their_first_step_then(kind: Any, how: str) -> None:
    torch.manual_seed(1)
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [kind((net if how == "unfrozen" else net[0]).parameters()) for net in nets]
    for net in nets if how == "unfrozen" else ():
        net[0].requires_grad_(False)
    for turn in range(2):
        if turn:
            for net, optimizer in zip(nets, optimizers, strict=True):
                if how == "unfrozen":
                    net[0].requires_grad_(True)
                else:
                    optimizer.add_param_group({"params": net[2].parameters(), "t": 0, "before": 0})
        with tfnb.record():
            x = tfnb.placeholder(batches()[0])
            always(nets[1], optimizers[1], x, torch.tensor(1.0))
            step = tfnb.effects()
        for number, batch in enumerate(batches()):
            tfnb.run(step, {x: batch * 10**number})
            always(nets[0], optimizers[0], batch * 10**number, torch.tensor(1.0))
            assert_same(nets[1], nets[0])


def test_a_step_that_returns_early_raises_in_a_run_that_would_not() -> None:
    class EveryOther(Rule):
        @torch.no_grad()
        def step(self) -> None:
            self.count += 1
            if self.count % 2:
                return
            super().step()

        def rule(self, p: Any, group: Any) -> None:
            p.sub_(p.grad, alpha=group["lr"])

    net, optimizer = made(EveryOther)
    with pytest.warns(UserWarning, match="Python took the True branch"), tfnb.record():
        x = tfnb.placeholder(batches()[0])
        net(x).sum().backward()
        step = optimizer.step()
    before = net[0].weight.detach().clone()
    tfnb.run(step, {x: batches()[1]})
    assert torch.equal(net[0].weight, before) and optimizer.count == 1
    with pytest.raises(BranchChanged, match=r"if self\.count % 2.*recorded with True"):
        tfnb.run(step, {x: batches()[1]})


class Known(Ruled):
    """It tells its Parameters apart by an attribute of theirs."""

    def set_up(self, params: list[Any]) -> None:
        params[0].lr_scale = 0.1

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        p.sub_(p.grad, alpha=group["lr"] * getattr(p, "lr_scale", 1.0))


class KnownByIdentity(Ruled):
    def set_up(self, params: list[Any]) -> None:
        self.slow, self.among, self.rates = [params[0]], {params[1]}, {id(params[2]): 0.3}
        self.held = SimpleNamespace(one=params[0])
        self.param_groups[0]["slow"] = (params[3],)

    def rule(self, p: Any, group: Any, kept: Any) -> None:
        scale = self.rates.get(id(p), 1.0) * (0.5 if p in self.among else 1.0) * (2.0 if p is self.held.one else 1.0)
        scale *= 1.0 if isinstance(p, nn.Parameter) else -1.0
        if any(q is p for q in (*self.slow, *group["slow"])) and p.requires_grad:
            scale *= 0.1
        p.sub_(p.grad, alpha=group["lr"] * scale)


class OwnList(torch.optim.Optimizer):
    """It steps the Parameters of a list of its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        self.all = list(params)
        super().__init__(self.all, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.all:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", [Known, KnownByIdentity, OwnList])
def test_parameters_are_known_in_a_step_by_identity_and_attributes(kind: Any) -> None:
    (plain, optimizer), (net, recorded) = made(kind), made(kind)
    with tfnb.record():
        x = tfnb.placeholder(batches()[0])
        always(net, recorded, x, torch.tensor(1.0))
        step = tfnb.effects()
    for batch in batches():
        tfnb.run(step, {x: batch})
        always(plain, optimizer, batch, torch.tensor(1.0))
        assert_same(net, plain)


class OfAModule(OwnList):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.module = nn.ParameterList(self.all)

    @torch.no_grad()
    def step(self) -> None:
        for p in self.module:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class AsAKey(Ruled):
    def rule(self, p: Any, group: Any, kept: Any) -> None:
        kept["t"] = kept.get("t", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] * {2: 0.5}.get(kept["t"], 1.0))


@pytest.mark.parametrize(("kind", "text"), [
    (OfAModule, r"OfAModule\.step\(\) writes Parameters that it does not take from its groups"),
    (AsAKey, "takes a value as a Python number by item"),
])  # fmt: skip
def test_parameters_of_a_module_and_numbers_as_keys_are_refused_in_a_step(kind: Any, text: str) -> None:
    net, optimizer = made(kind)
    with pytest.raises(Unsupported, match=text), tfnb.record():
        net(tfnb.placeholder(batches()[0])).sum().backward()
        optimizer.step()


class Slow(torch.optim.Optimizer):
    """Lookahead's slow weights, which are Parameters, made by the first step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["slow"] = nn.Parameter(p.detach().clone())
                p.add_(p.grad, alpha=-group["lr"])
                state["slow"].lerp_(p, 0.5)
                p.copy_(state["slow"])


def test_a_first_step_may_make_parameters_of_the_weights():
    torch.manual_seed(0)
    net, data = nn.Linear(4, 2).double(), torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(net)
    mine, theirs = Slow(net.parameters()), Slow(plain.parameters())
    with tfnb.record():
        x = tfnb.placeholder(data)
        net(x).square().mean().backward()
        step = mine.step()
    for _ in range(3):
        theirs.zero_grad()
        plain(data).square().mean().backward()
        theirs.step()
        tfnb.run(step, {x: data})
    torch.testing.assert_close(net.weight, plain.weight, rtol=1e-13, atol=0)
