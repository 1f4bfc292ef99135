"""Habits that a recording could be silently wrong about: recorded as torch does them, or refused with the line."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torch.utils.data
from torch import nn

import tfnb
from tests.recording.test_torch_features import check, made, network
from tfnb.errors import BranchChanged, FailedPrecondition, InvalidArgument, ShapeError, Unsupported

SAMPLE = torch.arange(12.0).view(4, 3) / 5 - 1
aten = torch.ops.aten


# -- refused with the line --------------------------------------------------------------------------------------------


def hook_of_function(y: torch.Tensor) -> Any:
    return y.grad_fn.register_hook(print)


def functions_behind(y: torch.Tensor) -> Any:
    return y.grad_fn.next_functions


def hook_of_several(y: torch.Tensor) -> Any:
    return torch.autograd.graph.register_multi_grad_hook((y,), print)


def packed(y: torch.Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return y.exp()


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "bytes of the storage": lambda y: y.untyped_storage().nbytes(),
    "size of the typed storage": lambda y: y.storage().size(),
    "dense strides": lambda y: aten.is_non_overlapping_and_dense(y),
    "strides like a format": lambda y: aten.is_strides_like_format.default(y, torch.channels_last),
    "hook of a function": hook_of_function,
    "functions behind": functions_behind,
    "hook of several tensors": hook_of_several,
    "packed tensors": packed,
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line(name: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises((Unsupported, FailedPrecondition), match=r"test_habits\.py line"), tfnb.record():
        REFUSED[name](tfnb.placeholder(SAMPLE) * weight)


def test_outside_of_a_recording_the_storage_is_that_of_the_sample() -> None:
    with tfnb.record():
        y = tfnb.placeholder(SAMPLE) * 1
    assert y.untyped_storage().nbytes() == 48
    assert y.untyped_storage().data_ptr() == y.sample.untyped_storage().data_ptr()


def test_contiguity_asked_of_the_op_is_that_of_each_run() -> None:
    """One row of a matrix is contiguous however wide the matrix is."""
    with tfnb.record():
        x = tfnb.placeholder(SAMPLE)
        y = x[:, :2] * (2 if aten.is_contiguous(x[:, :2]) else 3)
    assert torch.equal(tfnb.run(y, {x: SAMPLE}), SAMPLE[:, :2] * 3)
    with pytest.raises(ShapeError):
        tfnb.run(y, {x: SAMPLE[:1]})


# -- classes ----------------------------------------------------------------------------------------------------------


def test_one_hot_finds_as_many_classes_as_were_recorded_or_stops() -> None:
    with tfnb.record() as graph:
        labels = tfnb.placeholder(torch.tensor([0, 2, 1]))
        hot, other = F.one_hot(labels), labels + 1
    assert "found 3 classes" in graph.notes[0] and "test_habits.py line" in graph.notes[0]
    assert torch.equal(tfnb.run(hot, {labels: [2, 0]}), F.one_hot(torch.tensor([2, 0])))
    for classes in ([0, 5], [0, 1]):
        with pytest.raises(BranchChanged):
            tfnb.run(hot, {labels: classes})
    assert tfnb.run(other, {labels: [7]}).tolist() == [8]  # nothing of it


@pytest.mark.parametrize("label", [4, -1])
def test_one_hot_refuses_classes_that_torch_refuses(label: int) -> None:
    with tfnb.record() as graph:
        labels = tfnb.placeholder(torch.tensor([0, 2, 1]))
        hot = F.one_hot(labels, 4)
    assert not graph.notes
    with pytest.raises(InvalidArgument, match=r"out of bounds(.|\n)*test_habits\.py line"):
        tfnb.run(hot, {labels: [0, label]})


# -- gradients of writes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logical_not_", "logical_and_", "logical_or_", "logical_xor_"])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_logical_writes_leave_the_path_of_gradients_as_it_was(name: str, grad_mode: bool) -> None:
    def program(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        with torch.set_grad_enabled(grad_mode):
            getattr(y, name)(*(() if name == "logical_not_" else (x[:, :2] > 0,)))
        return y * x[:, :2]

    check(network, program)


# -- the random state -------------------------------------------------------------------------------------------------


def test_a_seed_given_to_torchs_generator_is_noted_and_undone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with tfnb.record() as graph:
        torch.default_generator.manual_seed(3)
        layer = made(network)
        y = layer(tfnb.placeholder(torch.rand(4, 4)))
    assert torch.equal(torch.get_rng_state(), state) and y.shape[1] == 2
    assert any("a generator of torch" in note for note in graph.notes)


# -- copies -----------------------------------------------------------------------------------------------------------


def deepcopied(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) * copy.deepcopy(x).mean()


def copied(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    kept = x * 2
    copy.copy(kept).add_(1)  # the same memory
    return model(x) * kept.mean()


def read_from_a_file(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(torch.ones(2) * 3, file)
    file.seek(0)
    return model(x) * torch.load(file)


@pytest.mark.parametrize("program", [deepcopied, copied, read_from_a_file])
def test_copies(program: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    check(network, program)


def test_deepcopy_of_what_was_computed_is_refused_as_in_torch() -> None:
    with pytest.raises(FailedPrecondition, match=r"deepcopy(.|\n)*test_habits\.py line"), tfnb.record():
        copy.deepcopy(network()(tfnb.placeholder(torch.rand(2, 4))))


LEAVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "dlpack": torch.utils.dlpack.from_dlpack,
    "numpy from dlpack": np.from_dlpack,
}


@pytest.mark.parametrize("name", LEAVES)
def test_what_leaves_the_graph_is_noted(name: str) -> None:
    with pytest.warns(UserWarning, match="took the sample"), tfnb.record() as graph:
        y = tfnb.placeholder(SAMPLE, shape=tuple(SAMPLE.shape)) * 2
        got = LEAVES[name](y)
    assert type(got) in (torch.Tensor, np.ndarray) and torch.equal(torch.as_tensor(got), SAMPLE * 2)
    assert len(graph.notes) == 1 and "test_habits.py line" in graph.notes[0]


@pytest.mark.parametrize("call", [
    lambda y: y.apply_(lambda v: v + 1), lambda y: y.map_(y, max), torch.utils.dlpack.to_dlpack,
], ids=["apply_", "map_", "to_dlpack"])  # fmt: skip
def test_nothing_reads_or_writes_the_memory_that_is_not_there(call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"data pointer|calls Python"), tfnb.record():
        call(tfnb.placeholder(SAMPLE, shape=tuple(SAMPLE.shape)) * 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: nn.Parameter(m.weight.detach().clone())],
                         ids=["deepcopy", "clone"])  # fmt: skip
def test_a_parameter_copied_in_a_recording_is_said_to_be_copied_once(copied: Callable[[nn.Module], Any]) -> None:
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="is a copy of another one"), tfnb.record() as graph:
        x = tfnb.placeholder(SAMPLE)
        twin = copied(model)
        y = x @ (twin.weight if isinstance(twin, nn.Module) else twin)
    assert y is not None and [note for note in graph.notes if "is a copy of another one as of this recording" in note]


def test_an_error_of_the_samples_that_the_program_catches_is_said() -> None:
    with pytest.warns(UserWarning, match="the program caught"), tfnb.record() as graph:
        x = tfnb.placeholder(-torch.eye(2), shape=(2, 2))
        try:
            y = torch.linalg.cholesky(x)
        except ValueError:
            y = x * 2
    assert torch.equal(tfnb.run(y, {x: torch.eye(2)}), 2 * torch.eye(2))
    assert [note for note in graph.notes if "failed for the sample's values, and the program caught" in note]


@pytest.mark.parametrize("array", [lambda y: y.numpy(), np.asarray, lambda y: y.detach().cpu().numpy()])
@pytest.mark.filterwarnings("ignore:.*took the sample")
def test_numpy_does_not_write_into_a_recorded_tensor(array: Callable[[torch.Tensor], Any]) -> None:
    with tfnb.record():
        y = tfnb.placeholder(SAMPLE, shape=tuple(SAMPLE.shape)) * 2
        with pytest.raises(ValueError, match="read-only"):
            array(y)[:] = 0
    assert torch.equal(y.sample, SAMPLE * 2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:no input of checkpoint")
@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint around a write")
def test_running_statistics_in_a_checkpoint_are_said_to_move_once(reentrant: bool) -> None:
    body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with tfnb.record() as graph:
        x = tfnb.placeholder(SAMPLE)
        y = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=reentrant)
        everything = tfnb.effects()
    assert [note for note in graph.notes if "running_mean" in note and "twice in a step" in note]
    tfnb.run([y, everything], {x: SAMPLE})
    assert body[1].num_batches_tracked == 1


# -- frozen parameters ------------------------------------------------------------------------------------------------


def test_what_a_frozen_parameter_was_used_for_has_no_path_to_it_later() -> None:
    def program(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        before = model[0](x)
        model[0].weight.requires_grad_(False)
        while_frozen = model[0](x * 2)
        model[0].weight.requires_grad = True
        return model[2](before.exp() * while_frozen.sin() + model[0](x * 3))

    check(network, program)


# -- arithmetic of sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [
    lambda n: n**0.5, torch.sym_sqrt, lambda n: round(0.7 * n), lambda n: n & 1, lambda n: (n | 1) + (n >> 1),
    lambda n: -(-n // 4), lambda n: 1 / n,
])  # fmt: skip
def test_numbers_computed_from_a_size_are_those_of_each_run(size: Callable[[Any], Any]) -> None:
    check(network, lambda model, x: model(x) * size(x.shape[0]))


def test_what_no_size_expression_has_is_refused_with_the_line() -> None:
    with pytest.raises(Unsupported, match=r"size expression(.|\n)*test_habits\.py line"), tfnb.record():
        x = tfnb.placeholder(SAMPLE)
        x * (x.shape[0] ^ 1)


# -- a table of habits ------------------------------------------------------------------------------------------------


class Several(torch.autograd.Function):
    """Two results with a gradient of their own, and one without."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> Any:
        grown, positive = x.exp(), x > 0
        ctx.save_for_backward(grown, scale)
        ctx.mark_non_differentiable(positive)
        return grown * scale, positive, grown + 1

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: Any, other: torch.Tensor) -> Any:
        grown, scale = ctx.saved_tensors
        return dy * grown * scale + 3 * other * grown, (dy * grown).sum()


class Dirty(torch.autograd.Function):
    """Writes its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return 30 * dy


def several_results(model: Any, x: torch.Tensor) -> torch.Tensor:
    a, positive, b = Several.apply(model(x), model[2].bias.sum())
    return torch.where(positive, a, b)


def written_argument(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x) * 1
    Dirty.apply(y)
    return y


def nested_modes(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a = model(x)
        with torch.enable_grad():
            b = model(x)
        c = b * 2
    with torch.inference_mode():
        d = model(x)
    return a + b + c + d.clone()


def gradient_steps_inside(model: Any, x: torch.Tensor) -> torch.Tensor:
    fast = dict(model.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(model, fast, (x,)).square().sum()
        steps = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: p - 0.01 * g for (name, p), g in zip(fast.items(), steps, strict=True)}
    return torch.func.functional_call(model, fast, (x,))


def gradients_of_rows(model: Any, x: torch.Tensor) -> torch.Tensor:
    fixed = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (row,)).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(fixed, x)
    return model(x) + each["2.weight"].sum(-1)


def hooked(model: Any, x: torch.Tensor) -> torch.Tensor:
    seen: dict[str, torch.Tensor] = {}
    handles = [
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        model[1].register_forward_hook(lambda module, args, out: seen.update(a=out)),
        model.register_forward_hook(lambda module, args, kwargs, out: out * 3, with_kwargs=True),
    ]
    y = model(x)
    for handle in handles:
        handle.remove()
    return model(x) + y * seen["a"].sum()


def reentrant_checkpoint(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model[2](torch.utils.checkpoint.checkpoint(model[:2], model[0].bias.sum() + x, use_reentrant=True))


def weight_cut(model: Any, x: torch.Tensor) -> torch.Tensor:
    weight = model[0].weight.clone()
    weight[0] = 0
    return F.linear(x, weight) + F.linear(x, model[0].weight.data * 2, model[0].bias)


def written_past_autograd(model: Any, x: torch.Tensor) -> torch.Tensor:
    y, z = model(x), model(x) * 1
    y.data.add_(5)
    z.detach().mul_(0)
    return (y * y + z * 2) / 100  # small, so that three steps stay tame


def parts_written(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x).clone()
    y[x.shape[0] // 2 :] = 0
    y[x[:, 0] > 0, 1] = -1
    y.t()[0].mul_(3)
    return y


def loader_in_the_cell(model: Any, x: torch.Tensor) -> torch.Tensor:
    data = torch.utils.data.TensorDataset(torch.arange(8.0).view(4, 2))
    return sum(model(x) * rows.sum() for (rows,) in torch.utils.data.DataLoader(data, batch_size=2))  # type: ignore[return-value]


def default_dtype(model: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return model(x) + torch.tensor(1.5) + torch.ones(2).sum()
    finally:
        torch.set_default_dtype(torch.float32)


def averaged(model: Any, x: torch.Tensor) -> torch.Tensor:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return model(x) + average(x).detach()


def complex_parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    c = torch.complex(model(x) / 9, model(x) / 4)
    c.real.mul_(2)
    c.imag[:, 0] = 3
    return torch.view_as_real(c * c.conj()).flatten(1)


HABITS = [
    several_results, written_argument, nested_modes, gradient_steps_inside, gradients_of_rows, hooked,
    reentrant_checkpoint, weight_cut, written_past_autograd, parts_written, loader_in_the_cell, default_dtype, averaged,
    complex_parts,
]  # fmt: skip


@pytest.mark.parametrize("program", HABITS)
@pytest.mark.filterwarnings(
    "ignore:.*(a batch of a DataLoader|is a copy of another one|does not write into a plain tensor)"
)
def test_habits_are_recorded_as_torch_has_them(program: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Values, gradients of all parameters and three steps, at two batches."""
    check(network, program)


def truth_asked_of_torch(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if torch.is_nonzero(x.sum() > 0) else 3)


def doubled_or_tripled(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x * 3


def scripted_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.jit.script(doubled_or_tripled)(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("program", [scripted_branch, truth_asked_of_torch])
def test_a_branch_inside_of_torch_is_guarded(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.warns(UserWarning, match="Python took the True branch"), tfnb.record():
        x = tfnb.placeholder(torch.ones(2, 3))
        y = program(x)
    assert torch.equal(tfnb.run(y, {x: SAMPLE.abs()}), SAMPLE.abs() * 2)
    with pytest.raises(BranchChanged):
        tfnb.run(y, {x: -SAMPLE.abs()})
