"""What users build models with: recorded rightly, with the gradients of the plain loop, or refused with the line."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune

import tfnb
from tfnb.errors import ShapeError, Unsupported

DATA = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
Program = Callable[[Any, torch.Tensor], torch.Tensor]

torchscript = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning"
)


def call(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def check(make: Callable[[], nn.Module], program: Program = call, tolerance: float = 1e-5) -> None:
    """Values and gradients of all parameters on two batches, and three SGD steps, as in eager torch."""
    model, twin = made(make), made(make)
    optimizer, eager = (torch.optim.SGD([*m.parameters()], 0.1, momentum=0.9) for m in (model, twin))
    with tfnb.record():
        x = tfnb.placeholder(DATA)
        out = program(model, x)
        optimizer.zero_grad()
        out.float().square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        step = optimizer.step()
    connected = [grad is not None for grad in grads]
    for data in (DATA, OTHER, DATA):
        got = tfnb.run((out, [g for g in grads if g is not None], step), {x: data})
        eager.zero_grad()
        want = program(twin, data)
        want.float().square().mean().backward()
        assert connected == [p.grad is not None for p in twin.parameters()]
        wanted = want.detach(), [p.grad for p in twin.parameters() if p.grad is not None], None
        torch.testing.assert_close(got[:2], wanted[:2], rtol=tolerance, atol=tolerance)
        eager.step()
    state, other = model.state_dict(), twin.state_dict()
    torch.testing.assert_close({**state}, {**other}, rtol=tolerance, atol=tolerance)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


# -- autocast ---------------------------------------------------------------------------------------------------------


def autocast(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x) + model(x * 2)
    assert out.dtype is torch.bfloat16
    return out


def test_autocast() -> None:
    check(network, autocast, tolerance=3e-2)


@pytest.mark.parametrize("recorded", [False, True])
def test_autocast_around_a_run_changes_nothing(recorded: bool) -> None:
    torch.manual_seed(0)
    net, rows = nn.Linear(3, 5), torch.randn(8, 3)
    with tfnb.record():
        x = tfnb.placeholder(rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=recorded):
            out = net(x)
        step = tfnb.train.SGD(0.1).minimize(out.float().square().mean())
    call = tfnb.Session(out.graph).make_callable(out, [x])
    expected = tfnb.run(out, {x: rows})
    with torch.autocast("cpu", torch.bfloat16):
        for found in (tfnb.run(out, {x: rows}), call(rows)):
            assert found.dtype == (torch.bfloat16 if recorded else torch.float32) and torch.equal(found, expected)
        tfnb.fit(step, {x: rows}, batch_size=4)
        assert torch.is_autocast_enabled("cpu")


def test_casts_of_autocast_do_not_pass_from_one_recording_to_another() -> None:
    model = made(network)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(DATA)  # torch keeps the casts of the parameters
        for _ in range(2):
            with tfnb.record() as graph:
                x = tfnb.placeholder(DATA)
                model.zero_grad()
                out = model(x)
                out.float().sum().backward()
                assert all(p.grad is not None for p in model.parameters())
            assert len(graph.variables) == 4
        eager = model(DATA)
    assert type(eager) is torch.Tensor and eager.requires_grad
    model[0].weight.data.mul_(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(tfnb.run(out, {x: DATA}), model(DATA).detach())


# -- TorchScript, torch.compile ---------------------------------------------------------------------------------------


@torchscript
def test_scripted_and_traced_modules() -> None:
    def scripted() -> nn.Module:
        return torch.jit.script(network())

    def traced() -> nn.Module:
        return torch.jit.trace(network(), DATA)

    check(scripted)
    check(traced)


@torchscript
def test_scripted_functions() -> None:
    @torch.jit.script
    def loop(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i in range(3):
            y = y + x.tanh() * i
        return y

    check(network, lambda m, x: loop(m(x)))


@torchscript
def test_a_size_read_in_torchscript_is_fixed_aloud() -> None:
    @torch.jit.script
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0]

    with pytest.warns(UserWarning, match="became the constant 6"), tfnb.record():
        x = tfnb.placeholder(DATA)
        out = scaled(x)
    assert torch.equal(tfnb.run(out, {x: DATA}), DATA * 6)
    with pytest.raises(ShapeError):
        tfnb.run(out, {x: OTHER})


@pytest.mark.slow
def test_compiled_modules_run_as_the_code_they_are() -> None:
    outside = torch.compile(network(), backend="eager")
    check(lambda: made(network), lambda m, x: torch.compile(m, backend="eager")(x))
    with tfnb.record() as graph:
        x = tfnb.placeholder(DATA)
        out = outside(x)
    assert len(graph.variables) == 4
    torch.testing.assert_close(tfnb.run(out, {x: OTHER}), outside(OTHER).detach())


# -- libraries that ask which library a tensor is of ------------------------------------------------------------------


def test_opt_einsum_takes_recorded_tensors_for_those_of_torch() -> None:
    opt_einsum = pytest.importorskip("opt_einsum")
    a, b, c = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4, 5)
    with tfnb.record():
        x = tfnb.placeholder(a, name="x", shape=[2, 3])
        y = opt_einsum.contract("bi,ij,jk->kb", x, b, c)
    other = torch.randn(2, 3)
    torch.testing.assert_close(tfnb.run(y, {x: other}), (other @ b @ c).T)


# -- einops -----------------------------------------------------------------------------------------------------------


def test_einops() -> None:
    einops = pytest.importorskip("einops")
    layers = pytest.importorskip("einops.layers.torch")

    def functions(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = einops.rearrange(model(x), "b (c d) -> b c d", d=1)
        y = einops.repeat(y, "b c d -> b r c d", r=3)
        y = einops.einsum(y, y, "b r c d, b r e d -> b c e")
        y, shapes = einops.pack([y, y[:, 0]], "b *")
        return einops.reduce(einops.unpack(y, shapes, "b *")[0], "b c e -> b e", "mean")

    def with_layers() -> nn.Module:
        last = [layers.Rearrange("b (c d) -> b c d", d=3), layers.Reduce("b c d -> b d", "max")]
        mixed = layers.EinMix("b d -> b e", weight_shape="d e", bias_shape="e", d=3, e=2)
        return nn.Sequential(nn.Linear(4, 6), *last, mixed)

    check(network, functions)
    check(with_layers)


# -- modules whose parameters are computed ----------------------------------------------------------------------------


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.layer(x) + self.layer(x * 2)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [
    lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(),
    lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"),
    lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="matrix_exp"),
    lambda: parametrizations.orthogonal(nn.Linear(4, 3)),
    lambda: nn.utils.weight_norm(nn.Linear(4, 3)),
    lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
    lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", amount=0.5),
    Cached,
])  # fmt: skip
def test_parametrised_modules(make: Callable[[], nn.Module]) -> None:
    check(make)


def test_cached_parametrisations_do_not_pass_into_a_recording() -> None:
    model = made(lambda: parametrizations.weight_norm(nn.Linear(4, 3)))
    with parametrize.cached():
        before = model.weight
        with tfnb.record() as graph:
            out = model(tfnb.placeholder(DATA))
            out.sum().backward()
            assert all(p.grad is not None for p in model.parameters())
        assert model.weight is before and len(graph.variables) == 3


# -- modules that hold things -----------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Holds tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((4,), 2.0)
        self.leaf = torch.ones(4, requires_grad=True)
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale * self.leaf)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(4))})
        self.blocks = nn.ModuleDict({"one": nn.ModuleList([nn.Linear(4, 4)])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks["one"][0](x * self.many[0] + self.many[1]) * self.named["a"]


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.layers[0].register_forward_hook(lambda module, args, out: out * 2)
        self.layers[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.layers[2].register_forward_hook(lambda module, args, kwargs, out: out - 1, with_kwargs=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


class Averaging(nn.Module):
    """Gives its buffer a new tensor in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    more: dict[str, Any]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor) -> Output:
        y = self.layers(x)
        return Output(y, {"hidden": [y * 2]})


@pytest.mark.parametrize(("make", "program"), [
    (Plain, call), (Lists, call), (Hooked, call), (Tied, call), (Averaging, call), (Lists, call),
    (lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer))(nn.Linear(4, 4)), call),
    (Structured, lambda m, x: (lambda out: out.logits + out.more["hidden"][0])(m(x))),
    (network, lambda m, x: torch.func.functional_call(m, {k: v * 2 for k, v in m.named_parameters()}, (x,))),
    (network, lambda m, x: m(x) + parameters_to_vector(m.parameters()).sum()),
])  # fmt: skip
def test_modules_of_all_kinds(make: Callable[[], nn.Module], program: Program) -> None:
    check(make, program)


def test_a_plain_leaf_held_by_a_module_has_a_gradient() -> None:
    model = made(Plain)
    with tfnb.record() as graph:
        x = tfnb.placeholder(DATA)
        model(x).square().sum().backward()
        found = model.leaf.grad
        assert model.scale.grad is None
    assert len(graph.variables) == 3
    model(OTHER).square().sum().backward()
    torch.testing.assert_close(tfnb.run(found, {x: OTHER}), model.leaf.grad)


def test_a_buffer_given_a_new_tensor_is_written_by_the_step_only() -> None:
    model = made(Averaging)
    before = model.mean
    with tfnb.record():
        out = model(tfnb.placeholder(DATA))
        model(tfnb.placeholder(DATA))
    assert model.mean is before and not before.any() and type(out.sample) is torch.Tensor


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.sum(0)
        return x


def test_a_buffer_made_in_forward_is_refused() -> None:
    model = Growing()
    with (
        pytest.raises(Unsupported, match=r"(?s)Growing gives its buffer seen, which held nothing.*line"),
        tfnb.record(),
    ):
        model(tfnb.placeholder(DATA))
    assert model.seen is None


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_are_refused_where_they_would_count(register: str) -> None:
    model = made(network)
    getattr(model[0], register)(lambda *args: None)
    with tfnb.record():
        x = tfnb.placeholder(DATA)
        with torch.no_grad():
            model(x)
        with pytest.raises(Unsupported, match=r"(?s)Linear has a backward hook.*register_hook.*line"):
            model(x)


# -- modules made and changed in a cell -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is a copy of another one")
def test_a_module_made_converted_and_copied_in_a_recording() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(DATA.double())
        layer = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().to("cpu")
        twin = copy.deepcopy(layer)
        out = layer(x) + twin(x)
        out.square().mean().backward()
        grads = [p.grad for p in layer.parameters()]
    assert layer[0].weight.dtype is torch.float64 and len(graph.variables) == 8 + 6
    want = layer(OTHER.double()) + twin(OTHER.double())
    want.square().mean().backward()
    torch.testing.assert_close(tfnb.run(grads, {x: OTHER.double()}), [p.grad for p in layer.parameters()])


@pytest.mark.filterwarnings("ignore:.*is a copy of another one")
def test_a_copy_of_a_module_of_outside_has_variables_of_its_own() -> None:
    model = made(network)
    with tfnb.record() as graph:
        x = tfnb.placeholder(DATA)
        twin = copy.deepcopy(model)
        out = twin(x) - model(x)
    assert len(graph.variables) == 8 and not tfnb.run(out, {x: OTHER}).any()
    assert all(type(p) is nn.Parameter and p.is_leaf for p in twin.parameters())


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules(inside: bool) -> None:
    layer = None if inside else nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with tfnb.record() as graph:
        layer = layer or nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        x = tfnb.placeholder(DATA)
        out = layer(x)
    assert type(layer[0]) is nn.Linear and layer[0].weight.shape == (3, 4) and len(graph.variables) == 7
    torch.testing.assert_close(tfnb.run(out, {x: OTHER}), layer(OTHER).detach())


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("make", [lambda x: nn.LazyConv1d(2, 3)(x), lambda x: nn.Linear(x.shape[1], x.shape[0])(x)])
def test_a_size_that_becomes_one_of_a_parameter_is_that_of_the_sample(make: Any) -> None:
    with pytest.warns(UserWarning, match="size B became the constant 6"), tfnb.record():
        x = tfnb.placeholder(DATA)
        y = make(x)
    assert tfnb.run(y, {x: DATA}).shape == y.sample.shape
    with pytest.raises(ShapeError, match=r"\(3, 4\)"):
        tfnb.run(y, {x: OTHER})


def test_converting_a_module_of_outside_is_refused() -> None:
    model = made(network)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Unsupported, match=r"(?s)float32\[5, 4\] one of torch\.float64.*outside.*line"), tfnb.record():
        model.double()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_data_assigned_is_a_write_that_gradients_do_not_see() -> None:
    model = made(network)
    before = model[0].weight.detach().clone()
    with tfnb.record():
        x = tfnb.placeholder(DATA)
        x.data = x * 2
        model[0].weight.data = model[0].weight.data.clamp(-0.1, 0.1)
        out = model(x)
    assert torch.equal(model[0].weight, before)
    got = tfnb.run(out, {x: OTHER})
    assert model[0].weight.abs().max() <= 0.1
    torch.testing.assert_close(got, model(OTHER * 2).detach())
