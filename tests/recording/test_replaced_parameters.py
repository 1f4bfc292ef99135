"""A Variable goes with the module: what the module holds now is what runs read and steps train."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import FailedPrecondition, ShapeError, Unsupported

DATA = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def recorded(model: nn.Module) -> tuple[Any, Any, Any]:
    with tfnb.record():
        x = tfnb.placeholder(DATA)
        out = model(x)
        step = tfnb.train.SGD(0.1, momentum=0.9).minimize(out.square().mean())
    return x, out, step


def load(model: nn.Module) -> None:
    model.load_state_dict(network().state_dict(), assign=True)


def assign(model: nn.Module) -> None:
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    model[1].running_mean = torch.ones(3)


def convert(model: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        before = model[0].weight
        model.double().float()
        assert model[0].weight is not before
        with torch.no_grad():
            model[0].weight.mul_(2)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def swap(model: nn.Module) -> None:
    model[0].weight.data = torch.randn(3, 3)


@pytest.mark.parametrize("replace", [load, assign, convert, swap])
def test_a_replaced_parameter_is_followed(replace: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(1)
    model = network()
    x, out, step = recorded(model)
    tfnb.run(step, {x: DATA})  # slots exist and the plan is prepared
    replace(model)
    twin, eager = copy.deepcopy(model), None
    torch.testing.assert_close(tfnb.run(out, {x: DATA}), copy.deepcopy(model)(DATA).detach())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = twin(DATA).square().mean()
    loss.backward()
    tfnb.run(step, {x: DATA})
    for name, p in twin.named_parameters():
        moved = (before[name] - dict(model.named_parameters())[name]).abs().max()
        assert moved > 0 or p.grad.abs().max() < 1e-6, (name, eager)
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)


def test_the_variable_stays_the_same_one() -> None:
    model = network()
    x, _, _ = recorded(model)
    v = tfnb.variable(model[0].weight)
    model[0].weight = nn.Parameter(torch.zeros(3, 3))
    assert tfnb.variable(model[0].weight) is v and not v.value().any()
    model[0].weight = nn.Parameter(torch.ones(3, 3))
    with tfnb.record(x.graph) as graph:
        again = model(x)
        (dw,) = tfnb.gradients(again.sum(), [model[0].weight])
    assert [n for n in (w.name for w in graph.variables) if n.endswith("0.weight")] == ["0.weight"]
    assert dw is not None and v.value().all()


def test_a_new_parameter_of_outside_is_what_gradients_means() -> None:
    model = network()
    x, out, _ = recorded(model)
    model[2].weight = nn.Parameter(torch.ones(2, 3))
    (dw,) = tfnb.gradients(out, [model[2].weight])
    assert dw is not None and tfnb.run(dw, {x: DATA}).shape == (2, 3)


def test_a_replacement_of_another_shape_names_variable_and_both() -> None:
    model = network()
    x, out, _ = recorded(model)
    model[2].weight = nn.Parameter(torch.ones(5, 3))
    with pytest.raises(ShapeError, match=r"2\.weight is float32\[2, 3\].*float32\[5, 3\].*again"):
        tfnb.run(out, {x: DATA})
    model[2].weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(ShapeError, match=r"2\.weight is float32\[2, 3\].*float64\[2, 3\]"):
        tfnb.run(out, {x: DATA})
    model[2].weight, model[2].bias = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(5))
    y, again, _ = recorded(model)  # recorded again: a Variable of the new shape
    assert tfnb.run(again, {y: DATA}).shape == (4, 5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def test_tied_weights_are_followed_together_and_untied_ones_refused() -> None:
    model = Tied()
    with tfnb.record() as graph:
        x = tfnb.placeholder(DATA)
        out = model(x)
        (dw,) = tfnb.gradients(out, [model.a.weight])
    assert len(graph.variables) == 1
    model.a.weight = model.b.weight = nn.Parameter(torch.randn(3, 3))
    torch.testing.assert_close(tfnb.run(out, {x: DATA}), model(DATA).detach())
    model(DATA).sum().backward()
    torch.testing.assert_close(tfnb.run(dw, {x: DATA}), model.a.weight.grad)
    model.b.weight = nn.Parameter(torch.randn(3, 3))
    with pytest.raises(FailedPrecondition, match=r"a\.weight.*shared by several modules.*tie them again"):
        tfnb.run(out, {x: DATA})
    with tfnb.record() as graph:
        x = tfnb.placeholder(DATA)
        out = model(x)
    assert len(graph.variables) == 2
    torch.testing.assert_close(tfnb.run(out, {x: DATA}), model(DATA).detach())


def test_swapped_parameters_go_with_their_modules() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with tfnb.record():
        x = tfnb.placeholder(DATA)
        out = model(x)
    model[0].weight, model[1].weight = model[1].weight, model[0].weight
    want = model(DATA).detach()
    torch.testing.assert_close(tfnb.run(out, {x: DATA}), want)
    with tfnb.record():
        x = tfnb.placeholder(DATA)
        out = model(x)
    torch.testing.assert_close(out.sample, want)
    torch.testing.assert_close(tfnb.run(out, {x: DATA}), want)


@pytest.mark.slow
def test_nothing_keeps_a_module_alive() -> None:
    model = network()
    x, out, _ = recorded(model)
    want = tfnb.run(out, {x: DATA})
    gone = weakref.ref(model[0])
    del model
    gc.collect()
    assert gone() is None
    torch.testing.assert_close(tfnb.run(out, {x: DATA}), want)


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(3))
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.h)


STATE = Kept().state_dict()


def _del_assigned(model: Any) -> None:
    model.h = model.h + 1
    del model.h


def _del_buffer(model: Any) -> None:
    del model.h


def _del_parameter(model: Any) -> None:
    del model.inner[0].bias


def _del_module(model: Any) -> None:
    del model.inner[1]


def _assign_all(model: Any) -> None:
    model.load_state_dict(STATE, assign=True)


@pytest.mark.parametrize("change", [_del_assigned, _del_buffer, _del_parameter, _del_module, _assign_all])
def test_a_module_of_outside_keeps_what_it_has(change: Callable[[Any], None]) -> None:
    model = Kept()
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    with pytest.raises(Unsupported, match=r"change the module for good.*\n  at test_replaced_param"), tfnb.record():
        model(tfnb.placeholder(DATA))
        change(model)
    now = dict(model.named_parameters()) | dict(model.named_buffers())
    assert now.keys() == held.keys() and all(now[name] is held[name] for name in held)
    with tfnb.record():  # one that is made there is the recording's
        made = Kept()
        change(made)
    assert "__delattr__" in vars(nn.Module) and nn.Module.__delattr__.__module__ == "torch.nn.modules.module"
