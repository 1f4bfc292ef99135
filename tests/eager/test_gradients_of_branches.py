"""``backward()``, ``.grad`` and hooks inside of branches: the steps of plain PyTorch, in all runs and on all places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import BranchChanged, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:.*a branch decides whether there is a .grad")


Program = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor], Any]
PROGRAMS: dict[str, tuple[Program, tuple[float, ...]]] = {}


def program(*limits: float) -> Callable[[Program], Program]:
    """Run with these numbers, one a run: the first is the sample, and the branch goes both ways."""

    def put(function: Program) -> Program:
        PROGRAMS[function.__name__] = function, limits
        return function

    return put


@program(0.0, 1.0, 0.0, 2.0)
def skips_what_is_not_finite(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean() / k
    if torch.isfinite(loss):
        loss.backward()
        opt.step()
    return loss


@program(3.0, -1.0, 2.0, -1.0)
def skips_nan_and_clips(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    loss = (net(x) * torch.log(k)).square().mean()
    if not torch.isnan(loss):
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
    return loss


@program(0.0, 9.0, 0.0, 9.0)
def nested_checks(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    if torch.isfinite(loss):
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if norm < k:
            opt.step()
    return loss


@program(0.0, 9.0, 0.0, 9.0)
def steps_below(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    if loss < k:
        loss.backward()
    opt.step()  # in runs without a gradient it leaves every Parameter, also by momentum and decay
    return loss


@program(1.0, -1.0, -2.0, 3.0)
def adds_to_gradients(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    (net(x) - 1).square().mean().backward()
    loss = net(x).square().mean()
    if k > 0:
        loss.backward()
    opt.step()
    return loss


@program(-1.0, 1.0, 0.5, 2.0)
def each_arm_its_own(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    out = net(x)
    if k > 1:
        out.square().mean().backward()
    elif k > 0:
        out.abs().mean().backward(inputs=list(net[2].parameters()))
    else:
        for p in net.parameters():
            p.grad = torch.ones_like(p) * 0.1
    opt.step()
    return out.sum()


@program(1.0, -1.0, -2.0, 3.0)
def freezes_by_none(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    if k > 0:
        for p in net[0].parameters():
            p.grad = None
    opt.step()
    return loss


@program(-1.0, 1.0, 2.0, -3.0)
def freezes_an_attribute_by_none(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    if k > 0:
        net[0].weight.grad = None
    opt.step()
    return loss


@program(-1.0, 1.0, 2.0, -3.0)
def forgets_in_between(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    net(x).square().mean().backward()
    if k > 0:
        opt.zero_grad()
    loss = (net(x) - 1).square().mean()
    loss.backward()
    opt.step()
    return loss


@program(-1.0, 1.0, 2.0, -3.0)
def forgets_either_way(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    net(x).square().mean().backward()
    opt.step()
    if k > 0:
        opt.zero_grad()
    else:
        net.zero_grad()
    loss = (net(x) - 1).square().mean()
    loss.backward()
    opt.step()
    return loss


@program(9.0, 0.1, 0.1, 9.0)
def scales_by_hand(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    total = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    if total > k:
        for p in net.parameters():
            p.grad = p.grad * (k / total)
    opt.step()
    return loss


@program(0.0, 1.0, -1.0, -2.0)
def skips_parts_of_a_batch(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    for i in range(3):
        loss = (net(x) * (i + 1) / (k + i)).square().mean()
        if torch.isfinite(loss):
            loss.backward()
    opt.step()
    return loss


@program(1.0, 0.0, 2.0, 0.0)
def leaves_early(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean() / k
    if not torch.isfinite(loss):
        return loss * 0
    loss.backward()
    opt.step()
    return loss


@program(-1.0, 1.0, 2.0, -3.0)
def branch_before_and_behind(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    h = net[0](x)
    if k > 0:  # noqa: SIM108  a branch of the graph
        h = torch.tanh(h)
    else:
        h = h * 0.5
    loss = net[2](h).square().mean()
    if loss < 0.25:
        loss.backward()
        opt.step()
    return loss


@program(-1.0, 1.0, -2.0, 3.0)
def penalty_of_gradients(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    x = x.detach().clone().requires_grad_(True)
    out = net(x)
    loss = out.square().mean()
    loss.backward(retain_graph=True)
    if k > 0:
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (g.norm(dim=1) - 1).square().mean().backward()
    opt.step()
    return loss


@program(-1.0, 1.0, -2.0, 3.0)
def differentiates_a_gradient(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    if k > 0:
        loss.backward(create_graph=True)
        norm = torch.stack([p.grad.square().sum() for p in net.parameters()]).sum()
        opt.zero_grad()
        (loss + norm).backward()
        opt.step()
    return loss


@program(-1.0, 1.0, 2.0, -3.0)
def hook_inside_of_a_branch(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    if k > 0:
        h = net[0](x)
        h.register_hook(lambda g: g * 2)
        loss = net[2](net[1](h)).square().mean()
    else:
        loss = net(x).abs().mean()
    loss.backward()
    opt.step()
    return loss


@program(3.0, 1.0, 2.0, 4.0)
def hook_inside_of_a_loop(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    h, i = net[0](x).sum(0), torch.zeros_like(k)
    while i < k:
        h = torch.tanh(h) + 1
        h.register_hook(lambda g: g * 0.5)
        i = i + 1
    loss = net[2](h).sum()
    loss.backward()
    opt.step()
    return loss


@program(3.0, 1.0, 2.0, 2.0)
def leaves_made_inside_of_a_loop(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    i, near = torch.zeros_like(k), x * 1
    while i < k:
        leaf = near.detach().requires_grad_(True)
        net(leaf).sum().backward(inputs=[leaf])
        near = near + 0.1 * leaf.grad.sign()
        i = i + 1
    opt.zero_grad()
    loss = net(near.detach()).square().mean()
    loss.backward()
    opt.step()
    return loss


@program(3.0, 1.0, 2.0, 1.0)
def adds_to_a_leaf_of_outside(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    leaf = (x * 1).detach().requires_grad_(True)
    net(leaf).sum().backward(inputs=[leaf])
    if k > 1:
        net(leaf).square().sum().backward(inputs=[leaf])
    opt.zero_grad()
    loss = net((leaf + leaf.grad).detach()).square().mean()
    loss.backward()
    opt.step()
    return loss


@program(3.0, 1.0, 2.0, 1.0)
def freezes_and_trains_again(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    if k > 1:
        net[0].requires_grad_(False)
        net(x).sum().backward()
        net[0].requires_grad_(True)
    else:
        loss.backward()
    opt.step()
    return loss


@program(9.0, 0.0, 9.0, 0.0)
def scales_a_gradient_that_is_there(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    if loss < k:
        loss.backward()
    for p in net.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5
    opt.step()
    return loss


@program(-1.0, 1.0, -2.0, 3.0)
def puts_a_gradient_back(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    if k > 0:
        loss.backward()
    kept = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    opt.zero_grad()
    for p, g in zip(net.parameters(), kept, strict=True):
        p.grad = g
    opt.step()
    return loss


@program(-1.0, 1.0, -2.0, 3.0)
def gives_a_gradient_of_its_own(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> Any:
    opt.zero_grad()
    loss = net(x).square().mean()
    if k > 0:
        loss.backward()
    for p in net.parameters():
        p.grad = p.detach() * 0.1
    opt.step()
    return loss


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, 0.05),
}


def made(kind: str = "momentum") -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return net, OPTIMIZERS[kind](net.parameters())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # in plain PyTorch
@pytest.mark.parametrize("where", ["here", "parts"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_take_the_steps_of_torch(name: str, kind: str, where: str) -> None:
    function, limits = PROGRAMS[name]
    torch.manual_seed(1)
    batches = [torch.randn(rows, 3, dtype=torch.float64) for rows in (4, 4, 6, 3)]
    numbers = [torch.tensor(limit, dtype=torch.float64) for limit in limits]
    (plain, optimizer), (net, recorded) = made(kind), made(kind)
    with tfnb.record() as graph:
        x, k = tfnb.placeholder(batches[0]), tfnb.placeholder(numbers[0])
        loss = tfnb.autograph(function)(net, recorded, x, k)
        everything = tfnb.effects()
    session = tfnb.Session(graph, executor="parts") if where == "parts" else tfnb.Session(graph)
    for rows, number in zip(batches, numbers, strict=True):
        want = function(plain, optimizer, rows, number)
        got, _ = session.run([loss, everything], {x: rows, k: number})
        torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-12, equal_nan=True)
        for a, b in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_fit_skips_batches_whose_loss_is_not_finite() -> None:
    def train(net: Any, opt: Any, x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = net(x).square().mean()
        if torch.isfinite(loss):
            loss.backward()
            opt.step()
        return loss

    torch.manual_seed(1)
    data = torch.randn(20, 3, dtype=torch.float64)
    data[5], data[17] = float("nan"), float("inf")
    (plain, optimizer), (net, recorded) = made(), made()
    with tfnb.record():
        x = tfnb.placeholder(data[:4])
        tfnb.autograph(train)(net, recorded, x)
        step = tfnb.effects()
    tfnb.fit(step, {x: data}, epochs=2, batch_size=4, shuffle=False)
    for _ in range(2):
        for batch in data.split(4):
            train(plain, optimizer, batch)
    assert all(p.isfinite().all() for p in net.parameters())
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# -- what stays refused ---------------------------------------------------------------------------------------------


def hook_of_outside(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    h = net[0](x)
    if k > 0:
        h.register_hook(lambda g: g * 2)
    return net[2](h).sum()


def hook_of_a_parameter(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if k > 0:
        net[0].weight.register_hook(lambda g: g * 2)
    return net(x).sum()


def frozen(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if k > 0:
        net[0].requires_grad_(False)
    return net(x).sum()


def frozen_in_a_nested_branch(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if k > 0:
        x = x + 1
        if k > 2:
            net[0].weight.requires_grad_(False)
    return net(x).sum()


def frozen_by_attribute(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if k > 0:
        net[0].weight.requires_grad = False
    return net(x).sum()


@pytest.mark.filterwarnings("ignore:.*Python took the False branch")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (hook_of_outside, "register_hook of .* in which it is not computed"),
        (hook_of_a_parameter, "register_hook of .* in which it is not computed"),
        (frozen, "requires_grad of .* is changed inside of a branch"),
        (frozen_in_a_nested_branch, "requires_grad of .* is changed inside of a branch"),
        (frozen_by_attribute, "requires_grad of .* is changed inside of a branch"),
    ],
)
def test_what_only_some_runs_would_mark_is_left_to_python_and_its_guard(function: Any, why: str) -> None:
    net, _ = made()
    rows = torch.ones(4, 3, dtype=torch.float64)
    with tfnb.record():
        x, k = tfnb.placeholder(rows), tfnb.placeholder(torch.tensor(-1.0))
        loss = tfnb.autograph(function)(net, x, k)
        loss.backward()
        grad = net[0].weight.grad * 1
    assert all(p.requires_grad for p in net.parameters())
    assert not net[0].weight._backward_hooks
    want = torch.autograd.grad(function(net, rows, torch.tensor(-1.0)), [net[0].weight])[0]
    torch.testing.assert_close(tfnb.run(grad, {x: rows, k: -1.0}), want)
    with pytest.raises(BranchChanged, match=why):
        tfnb.run(grad, {x: rows, k: 3.0})


def hook_removed(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    h = net[0](x)
    handle = h.register_hook(lambda g: g * 2)
    if k > 0:
        handle.remove()
    return net[2](h).sum()


def hook_of_a_parameter_removed(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    handle = net[0].weight.register_hook(lambda g: g * 3)
    loss = net(x).sum()
    if k > 0:
        handle.remove()
    return loss


def hook_of_a_module(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if k > 0:
        net[1].register_forward_hook(lambda module, given, y: y * 2)
    return net(x).sum()


def hook_of_a_module_removed(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    handle = net[1].register_forward_hook(lambda module, given, y: y * 2)
    if k > 0:
        handle.remove()
    loss = net(x).sum()
    handle.remove()
    return loss


def hook_after_accumulation(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    def triple(p: Any) -> None:
        p.grad.mul_(3)

    if k > 0:
        net[0].weight.register_post_accumulate_grad_hook(triple)
    return net(x).sum()


def detached(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    h = net[0](x)
    if k > 0:
        h.detach_()
    return net[2](h).sum() + net[0].weight.sum()


def leaf_of_outside(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    z = x.detach().clone()
    if k > 0:
        z.requires_grad_(True)
    return net(z).sum() * (2 if z.requires_grad else 1)


def no_leaf_any_more(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    z = x.detach().clone().requires_grad_(True)
    if k > 0:
        z.requires_grad = False
    return net(z).sum() * (2 if z.requires_grad else 1)


def retained(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    h = net[0](x)
    if k > 0:
        h.retain_grad()
    return net[2](h).sum() * (2 if h.retains_grad else 1)


def mode_of_a_module(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    net.train()
    if k > 0:
        net.eval()
    return net(x).sum() * (2 if net.training else 1)


@pytest.mark.filterwarnings("ignore:.*Python took the (True|False) branch")
@pytest.mark.parametrize("first", [1.0, -1.0])
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (hook_removed, "a hook of what lies outside is registered or removed inside of a branch"),
        (hook_of_a_parameter_removed, "a hook of what lies outside is registered or removed inside of a branch"),
        (hook_of_a_module, "a hook of what lies outside is registered or removed inside of a branch"),
        (hook_of_a_module_removed, "a hook of what lies outside is registered or removed inside of a branch"),
        (hook_after_accumulation, "a hook of what lies outside is registered or removed inside of a branch"),
        (detached, r"detach_\(\) of .* in which it is not computed"),
        (leaf_of_outside, "requires_grad of .* is changed inside of a branch"),
        (no_leaf_any_more, "requires_grad of .* is changed inside of a branch"),
        (retained, r"retain_grad\(\) of .* is called inside of a branch"),
        (mode_of_a_module, r"train\(\) or eval\(\) of .* changes its mode inside of a branch"),
    ],
)
def test_python_state_that_only_some_runs_would_change_is_left_to_python(
    function: Any, why: str, first: float
) -> None:  # fmt: skip
    def gradient(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        function(net, x, k).backward()
        return net[0].weight.grad * 1

    rows = torch.ones(4, 3, dtype=torch.float64)
    net, _ = made()
    with tfnb.record():
        x, k = tfnb.placeholder(rows), tfnb.placeholder(torch.tensor(first))
        grad = tfnb.autograph(gradient)(net, x, k)
    ran = 0
    for number in (1.0, -1.0, 2.0, -2.0):
        plain, _ = made()
        want = gradient(plain, rows, torch.tensor(number))
        if (number > 0) is (first > 0):
            torch.testing.assert_close(tfnb.run(grad, {x: rows, k: number}), want)
            ran += 1
        else:
            with pytest.raises(BranchChanged, match=why):
                tfnb.run(grad, {x: rows, k: number})
    assert ran == 2


@pytest.mark.parametrize("first", [1.0, -1.0])
def test_state_that_a_branch_leaves_as_it_was_may_change_inside(first: float) -> None:
    def loss_of(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if k > 0:
            handle = net[1].register_forward_hook(lambda module, given, y: y * 2)
            net.eval()
            leaf = net(x).detach_().requires_grad_(True)
            hook = leaf.register_hook(lambda g: g * 2)
            hook.remove()
            y = leaf * 3
            y.retain_grad()
            net.train()
            handle.remove()
        else:
            y = net(x)
        return y.sum()

    rows = torch.ones(4, 3, dtype=torch.float64)
    net, _ = made()
    with tfnb.record() as graph:
        x, k = tfnb.placeholder(rows), tfnb.placeholder(torch.tensor(first))
        loss = tfnb.autograph(loss_of)(net, x, k)
    assert any(node.op == "tfnb.cond" for node in graph.nodes)
    assert net.training and not net[1]._forward_hooks
    for number in (1.0, -1.0, 2.0, -2.0):
        torch.testing.assert_close(
            tfnb.run(loss, {x: rows, k: number}), loss_of(made()[0], rows, torch.tensor(number)).detach()
        )


def test_a_loop_that_sets_the_mode_of_a_module_is_refused() -> None:
    def body(i: torch.Tensor) -> torch.Tensor:
        net.eval()
        return i + net(x).sum().abs()

    net, _ = made()
    rows = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(Unsupported, match=r"train\(\) or eval\(\) of .* changes its mode"), tfnb.record():
        x, k = tfnb.placeholder(rows), tfnb.placeholder(torch.tensor(2.0, dtype=torch.float64))
        tfnb.while_loop(lambda i: i < k, body, (torch.zeros((), dtype=torch.float64),))
    assert net.training


def test_a_grad_that_only_some_runs_have_is_noted_where_the_program_asks() -> None:
    def asks(net: Any, opt: Any, x: torch.Tensor, k: torch.Tensor) -> None:
        if k > 0:
            net(x).square().mean().backward()
        for p in net.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        opt.step()

    net, opt = made()
    with pytest.warns(UserWarning, match="a branch decides whether there is a .grad"), tfnb.record() as graph:
        x, k = tfnb.placeholder(torch.ones(4, 3, dtype=torch.float64)), tfnb.placeholder(torch.tensor(1.0))
        tfnb.autograph(asks)(net, opt, x, k)
        everything = tfnb.effects()
    assert isinstance(everything, tfnb.Operation)
    assert sum("a branch decides whether there is a .grad" in note for note in graph.notes) == 1


def test_gradients_cleared_inside_of_a_loop_of_the_graph_are_refused() -> None:
    def clears(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        def body(i: torch.Tensor) -> torch.Tensor:
            net.zero_grad()
            return i + 1

        net(x).sum().backward()
        return tfnb.while_loop(lambda i: i < k, body, (torch.tensor(0.0),))[0]

    net, _ = made()
    x = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(Unsupported, match=r"inside of a loop the \.grad of .* is filled or cleared"), tfnb.record():
        clears(net, tfnb.placeholder(x), tfnb.placeholder(torch.tensor(2.0)))


def test_a_write_into_a_gradient_that_some_runs_kept_is_refused_where_it_is_held() -> None:
    def held(net: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        net(x).sum().backward()
        before = net[0].weight.grad
        if k > 0:
            net.zero_grad()
        net(x).square().sum().backward()
        return before * 1

    net, _ = made()
    x = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(Unsupported, match=r"may share memory with another: a branch leaves the \.grad"), tfnb.record():
        tfnb.autograph(held)(net, tfnb.placeholder(x), tfnb.placeholder(torch.tensor(1.0)))
