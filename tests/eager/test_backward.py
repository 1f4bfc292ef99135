"""Autograd inside a recording, line for line as in eager torch, with torch.autograd as the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import FailedPrecondition, InvalidArgument, ShapeError, Unsupported
from tfnb.graph import current

DATA = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
OTHER = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
PLAIN = DATA.sum().requires_grad_()

TAKES_DICTS = torch.__version__ >= (2, 12)  # torch.autograd.grad


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def check(program: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    """The program gives the same tensors recorded (and run on other data) as run eagerly on each data."""
    model, before = network(), {}
    for p in model.parameters():
        p.grad = before[p] = torch.full_like(p, 7.0)
    with tfnb.record():
        x = tfnb.placeholder(DATA)
        found = program(model, x)
    assert all(p.grad is before[p] and (p.grad == 7).all() for p in model.parameters())
    for data in (DATA, OTHER):
        want = program(network(), data.clone())
        got = tfnb.run(found, {x: data})
        torch.testing.assert_close(got, [w.detach() for w in want], rtol=1e-10, atol=1e-10)
    for here, there in zip(found, program(network(), DATA.clone()), strict=True):
        torch.testing.assert_close(here.sample, there.detach(), rtol=1e-10, atol=1e-10)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


def test_backward_fills_grad() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        assert all(p.grad is None for p in model.parameters())
        model(x).square().mean().backward()
        return grads(model)

    check(program)


def test_gradients_accumulate_over_micro_batches() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        for part in (x, x * 2):
            (model(part).square().mean() / 2).backward()
        return grads(model)

    check(program)


@pytest.mark.parametrize("clear", [
    lambda m: m.zero_grad(), lambda m: m.zero_grad(set_to_none=False),
    lambda m: torch.optim.SGD(m.parameters(), 0.1).zero_grad(),
    lambda m: torch.optim.SGD(m.parameters(), 0.1).zero_grad(set_to_none=False),
    lambda m: torch.optim.SGD(m.parameters(), 0.1, foreach=True).zero_grad(set_to_none=False),
    lambda m: [setattr(p, "grad", None) for p in m.parameters()],
    lambda m: [p.grad.zero_() for p in m.parameters()],
    lambda m: [delattr(p, "grad") for p in m.parameters()],
])  # fmt: skip
def test_gradients_are_cleared(clear: Callable[[nn.Module], Any]) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        model(x).sum().backward()
        clear(model)
        model(x).square().mean().backward()
        return grads(model)

    check(program)


@pytest.mark.parametrize("clip", [
    lambda ps: nn.utils.clip_grad_norm_(ps, 0.1), lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, norm_type=1.0),
    lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, norm_type=float("inf")),
    lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=True),
    lambda ps: nn.utils.clip_grad_value_(ps, 0.01), lambda ps: nn.utils.clip_grad_value_(ps, 0.01, foreach=True),
])  # fmt: skip
def test_gradients_are_clipped(clip: Callable[[Any], Any]) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        model(x).square().sum().backward()
        total = clip(list(model.parameters()))
        return grads(model) + ([] if total is None else [total])

    check(program)


def test_a_write_into_one_gradient_is_no_write_into_another() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        a, b = model[0].bias, model[2].bias[:1].expand(3)
        (a + b + x[0, :3]).sum().backward()
        model[0].bias.grad.mul_(5)
        return [model[0].bias.grad, model[2].bias.grad]

    check(program)


def test_gradient_of_an_output_that_is_no_scalar() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        out = model(x)
        out.backward(gradient=torch.ones_like(out) * 3, retain_graph=True)
        torch.autograd.backward([out.sum(), out.mean()], [torch.tensor(2.0, dtype=torch.float64), None])
        return grads(model)

    check(program)


def test_only_the_chosen_inputs_get_gradients() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        model(x).square().mean().backward(inputs=[model[2].weight])
        assert model[0].weight.grad is None and model[2].bias.grad is None
        return [model[2].weight.grad]

    check(program)


def test_a_recorded_tensor_that_requires_a_gradient() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        assert not x.requires_grad and x.is_leaf and x.grad is None
        early = x * 2  # torch: no part of the graph of x, which requires a gradient from the next line on
        x.requires_grad_()
        hidden = model[0](x)
        hidden.retain_grad()
        assert hidden.requires_grad and not hidden.is_leaf and hidden.grad_fn is not None and hidden.retains_grad
        assert x.requires_grad and x.is_leaf and x.grad_fn is None and not early.requires_grad
        (model[2](torch.tanh(hidden)).square().mean() + (early * x).sum()).backward()
        return [x.grad, hidden.grad, *grads(model)]

    check(program)


def test_detached_leaf_and_fast_gradient_sign() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        x = x.detach()
        x.requires_grad = True
        for _ in range(2):
            model(x).square().mean().backward()
            with torch.no_grad():
                x += 0.1 * x.grad.sign()
            x.grad.zero_()
        model(x).sum().backward()
        return [x.detach(), x.grad]

    check(program)


def test_a_plain_leaf_of_outside() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        (x * w).square().sum().backward()
        return [w.grad]

    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with tfnb.record():
        x = tfnb.placeholder(DATA)
        (found,) = program(network(), x)
    assert w.grad is None
    (want,) = program(network(), OTHER)
    torch.testing.assert_close(tfnb.run(found, {x: OTHER}), want)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_second_order_through_create_graph() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        model(x).square().mean().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        model.zero_grad()
        penalty.backward()
        return grads(model)

    check(program)


def test_without_create_graph_a_gradient_is_a_constant() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        model(x).square().mean().backward()
        first = model[0].weight.grad.clone()
        assert not model[0].weight.grad.requires_grad
        model.zero_grad()
        (model(x).mean() * first.square().sum()).backward()
        return grads(model)

    check(program)


def test_autograd_grad_with_its_arguments() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        w, unused = model[0].weight, model[2].bias
        h = model[0](x)
        (first,) = torch.autograd.grad(h.square().sum(), w, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), [w], retain_graph=True)
        weights = [torch.ones_like(h) * 2, None]
        weighted = torch.autograd.grad([h, h.sum()], [w], grad_outputs=weights, retain_graph=True)
        loose = torch.autograd.grad(h.sum(), (w, unused), allow_unused=True, retain_graph=True)
        zeros = torch.autograd.grad(h.sum(), (w, unused), materialize_grads=True, retain_graph=True)
        named = torch.autograd.grad(h.sum(), {"w": w}) if TAKES_DICTS else {"w": first}
        assert loose[1] is None and list(named) == ["w"] and w.grad is None
        return [first, *second, *weighted, loose[0], *zeros, named["w"]]

    check(program)


def test_gradient_penalty_of_an_input() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        x = x.requires_grad_()
        (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (dx.norm(2, dim=1) - 1).square().mean().backward()
        return grads(model)[:3]  # the last bias has no path to the penalty: None here and there

    check(program)


def test_hooks_of_tensors_and_parameters_work() -> None:
    def double(p: torch.Tensor) -> None:
        p.grad.mul_(2)

    def program(model: nn.Module, x: torch.Tensor) -> Any:
        seen: list[torch.Tensor] = []
        hidden = model[0](x)
        hidden.register_hook(lambda g: g * 3)
        hidden.register_hook(seen.append)
        removed = hidden.register_hook(lambda g: g * 1000)
        removed.remove()
        handles = [model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))]
        handles.append(model[2].weight.register_post_accumulate_grad_hook(double))
        model[2](hidden.tanh()).square().mean().backward()
        for handle in handles:
            handle.remove()
        return [*grads(model), *seen]

    check(program)


def test_a_variable_of_ours_has_a_gradient() -> None:
    v = tfnb.Variable(torch.tensor([1.0, 2.0]), name="v")
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2))
        assert v.grad is None
        (x * v * v).sum().backward()
        dv = v.grad
        v.grad = None
        assert v.grad is None
    assert tfnb.run(dv, {x: torch.ones(3, 2)}).tolist() == [6, 12] and v.grad is None


def test_in_place_detach_stops_the_gradient() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        h = model[0](x)
        h.detach_()
        model[2](h).square().mean().backward()
        assert model[0].weight.grad is None
        return grads(model)[2:]

    check(program)


def test_frozen_and_unfrozen_parameters() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        model[0].requires_grad_(False)
        model(x).mean().backward()
        assert model[0].weight.grad is None and model[2].weight.grad is not None
        model[0].requires_grad_(True)
        model(x).square().mean().backward()
        return grads(model)

    check(program)


def test_grad_mode_decides_what_has_a_path() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.no_grad():
            a = model[0](x)
        with torch.set_grad_enabled(False):
            b = model[0](x)
        with torch.inference_mode():
            c = model[0](x)
        d = model[0](x)
        model[2](a + b + c.clone() + d).square().mean().backward()
        return grads(model)

    check(program)


def test_a_failed_recording_leaves_the_gradients_of_outside() -> None:
    model = network()
    model(DATA).sum().backward()
    before = copy.deepcopy(grads(model))
    with pytest.raises(ZeroDivisionError), tfnb.record():
        model(tfnb.placeholder(DATA)).sum().backward()
        model[0].weight.grad.zero_()
        model.zero_grad()
        1 / 0  # noqa: B018
    assert all(map(torch.equal, grads(model), before))


def test_nested_recordings_have_gradients_of_their_own() -> None:
    model = network()
    with tfnb.record():
        model(tfnb.placeholder(DATA)).sum().backward()
        outer = model[0].weight.grad
        with tfnb.record():
            assert model[0].weight.grad is None
        assert model[0].weight.grad is outer


@pytest.mark.parametrize(("program", "error", "text"), [
    (lambda m, x: m(x).backward(), ShapeError, r"float64\[B, 2\].*gradient=.*line"),
    (lambda m, x: x.sum().backward(), FailedPrecondition, "nothing that requires a gradient has a path.*line"),
    (lambda m, x: m(x).detach().sum().backward(), FailedPrecondition, r"looked at: .*0\.weight.*no_grad"),
    (lambda m, x: torch.autograd.grad(x.sum(), m[0].weight), FailedPrecondition, "allow_unused"),
    (lambda m, x: torch.autograd.grad(m(x).sum(), m[0].weight, is_grads_batched=True), Unsupported, "each row"),
    (lambda m, x: torch.autograd.grad(PLAIN, m[0].weight), InvalidArgument, "plain Tensor"),
    (lambda m, x: torch.autograd.grad(m(x).sum(), DATA), InvalidArgument, "not a plain Tensor"),
    (lambda m, x: x.retain_grad(), FailedPrecondition, "retain_grad"),
    (lambda m, x: x.register_hook(print), FailedPrecondition, "hook"),
    (lambda m, x: setattr(m[0].weight, "grad", x), ShapeError, r"float64\[B, 4\].*\[3, 4\]"),
    (lambda m, x: (x > 0).requires_grad_(), InvalidArgument, "floating-point"),
])  # fmt: skip
def test_mistakes_name_what_and_where(program: Any, error: type[Exception], text: str) -> None:
    with tfnb.record(), pytest.raises(error, match=f"(?s){text}"):
        program(network(), tfnb.placeholder(DATA))


@pytest.mark.parametrize("derived", [
    lambda loss: loss, lambda loss: loss * 2, lambda loss: torch.log(loss.square() + 1).sum(),
])  # fmt: skip
@pytest.mark.parametrize("call", [
    torch.Tensor.backward, torch.autograd.backward, lambda y: torch.autograd.grad(y, network()[0].weight),
])  # fmt: skip
def test_backward_outside_says_what_to_write(derived: Any, call: Any) -> None:
    with tfnb.record():
        loss = network()(tfnb.placeholder(DATA)).sum()
    with pytest.raises(Unsupported, match=r"(?s)test_backward\.py line.* loss: .*gradients\(loss, variables\)"):
        call(derived(loss))


def test_torchs_own_error_stays_where_no_recorded_tensor_was_used() -> None:
    current.stack.used_outside.clear()
    with tfnb.record():
        tfnb.placeholder(DATA)
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        DATA.sum().backward()
    assert not isinstance(caught.value, Unsupported)


def test_a_parameter_without_axes_or_without_elements_has_a_gradient() -> None:
    scale, none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(0))
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3))
        assert scale.grad is None
        loss = (scale * x).sum() + none.sum()
        loss.backward()
        torch.optim.SGD([scale, none], 0.1).zero_grad(set_to_none=False)
        assert scale.grad is not None
        (scale.square() * x).sum().backward()
        found = [scale.grad, none.grad]
    got = tfnb.run(found, {x: torch.ones(5)})
    assert got[0] == 20 and got[1].shape == (0,)


def test_updates_by_hand_are_what_fetching_the_parameters_does() -> None:
    model, twin = network(), network()
    with tfnb.record():
        x = tfnb.placeholder(DATA)
        loss = model(x).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        step = tfnb.group(*model.parameters())
    for fetch in (list(model.parameters()), step):
        got = tfnb.run([loss, fetch], {x: OTHER})
        want = twin(OTHER).square().mean()
        for p, g in zip(twin.parameters(), torch.autograd.grad(want, list(twin.parameters())), strict=True):
            p.data -= 0.1 * g
        torch.testing.assert_close(got[0], want.detach())
        for here, there in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(here, there)
        if fetch is not step:
            torch.testing.assert_close(got[1], [p.detach() for p in model.parameters()])


def test_a_parameter_is_a_fetch_like_its_variable() -> None:
    w = nn.Parameter(torch.ones(2))
    with tfnb.record():
        loss = (w * w).sum()
        step = tfnb.train.SGD(0.25).minimize(loss)
    assert tfnb.run([w, step])[0].tolist() == [0.5, 0.5] == w.tolist()
    with pytest.raises(tfnb.errors.FeedError, match="plain tensor"):
        tfnb.run([loss, nn.Parameter(torch.ones(2))])


def test_state_of_outside_is_kept_in_a_buffer_and_not_in_a_plain_tensor() -> None:
    count, plain = nn.Buffer(torch.zeros(())), torch.zeros(())
    with pytest.warns(UserWarning, match="does not write into a plain tensor"), tfnb.record() as graph:
        count.add_(1)
        plain[...].add_(1)
        plain.add_(1)
        inner = torch.zeros(2)
        inner.add_(1)
    assert len(graph.notes) == 2  # once a line that writes
    assert all("does not write into a plain tensor" in note for note in graph.notes)
    assert [float(tfnb.Session(graph).run(count)) for _ in range(3)] == [1, 2, 3] and count == 3
