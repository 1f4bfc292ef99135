"""Recording describes: values as eager torch, one node per ATen call, nothing outside changed."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tfnb
from tfnb.errors import BranchChanged, FailedPrecondition, ShapeError, StaleNode
from tfnb.recording.values.workspace import workspace


def ops(graph: tfnb.Graph) -> list[str]:
    return [node.op.split(".")[1] for node in graph.nodes if node.op.startswith("aten.")]


def test_recorded_values_equal_eager_torch() -> None:
    data = torch.randn(6, 8)
    with tfnb.record():
        x = tfnb.placeholder(data)
        y = torch.softmax(x @ torch.ones(8, 3), -1).sum(0)
    assert torch.equal(y.sample, torch.softmax(data @ torch.ones(8, 3), -1).sum(0))


def test_a_parameter_used_through_a_view_stays_connected() -> None:
    layer = nn.Linear(8, 3)
    with tfnb.record() as g:
        out = layer(tfnb.placeholder(torch.randn(4, 8)))
    assert [v.name for v in g.variables] == ["weight", "bias"]
    assert ops(g) == ["t", "addmm"]
    with torch.no_grad():
        layer.weight.mul_(2)
    x = torch.randn(5, 8)
    assert torch.equal(tfnb.run(out, {g.placeholders[0].name: x}), layer(x))


def test_factories_and_random_calls_become_nodes() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 8), name="x")
        y = x + torch.zeros(8) + torch.rand(x.shape[0], 1)
    assert ops(g) == ["zeros", "add", "rand", "add"]
    assert g["rand"].stream is not None and g["zeros"].stream is None
    assert y.shape[1] == 8


def test_plain_zeros_written_with_recorded_values_stay_in_the_graph() -> None:
    outside = torch.zeros(4, 8)
    with pytest.warns(UserWarning, match="does not write into a plain tensor"), tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 8), shape=(4, 8))
        outside.add_(x)
        y = outside * 2
    assert torch.equal(outside, torch.zeros(4, 8))
    assert torch.equal(tfnb.run(y, {x: torch.full((4, 8), 3.0)}), torch.full((4, 8), 6.0))


def test_recording_changes_neither_modules_nor_random_state() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    with tfnb.record():
        model(tfnb.placeholder(torch.randn(4, 8).abs()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_failing_block_leaves_the_graph_as_it_was() -> None:
    with tfnb.record("kept") as g:
        x = tfnb.placeholder(torch.randn(4, 8), name="x")
    text, version = g.text(), g.version
    with pytest.raises(KeyboardInterrupt), tfnb.record(g):
        x.sum()
        raise KeyboardInterrupt
    assert (g.text(), g.version) == (text, version)


def test_tensor_of_a_failed_recording_is_stale() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 8))
    with pytest.raises(ZeroDivisionError), tfnb.record(g):
        y = x.sum()
        raise ZeroDivisionError
    with pytest.raises(StaleNode):
        tfnb.run(y, {x: torch.randn(2, 8)})


def test_parameters_born_in_a_recording_are_variables_without_random_nodes() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 8))
        layer = nn.Linear(8, 3)
        nn.init.xavier_uniform_(layer.weight)
        scale = nn.Parameter(torch.ones(3))
        y = layer(x) * scale
    assert type(layer.weight) is nn.Parameter and type(scale) is nn.Parameter
    assert len(g.variables) == 3
    assert not [n for n in g.nodes if n.stream is not None]
    data = torch.randn(2, 8)
    assert torch.equal(tfnb.run(y, {x: data}), layer(data) * scale)


def test_tied_weights_are_one_variable() -> None:
    embed, head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
    head.weight = embed.weight
    with tfnb.record() as g:
        head(embed(tfnb.placeholder(torch.tensor([1, 2, 3]))))
    assert len(g.variables) == 1
    assert g.variables[0].storage.data_ptr() == embed.weight.data_ptr()


def test_variable_follows_the_module_to_new_storage() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2))
        y = layer(x)
    layer.weight.data = torch.full((2, 2), 3.0)
    assert torch.equal(tfnb.run(y, {x: torch.eye(2)}), torch.full((2, 2), 3.0))
    layer.double().float()
    layer.weight.data = torch.eye(2)
    assert torch.equal(tfnb.run(y, {x: torch.eye(2)}), torch.eye(2))


def test_detach_and_no_grad_are_kept_on_the_nodes() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3))
        with torch.no_grad():
            a = x * 2
        b = x * 3
    assert "no_grad" in a.node.tags and "no_grad" not in b.node.tags
    assert g is a.graph


def test_shape_error_names_line_and_both_specs() -> None:
    with tfnb.record() as g, pytest.raises(ShapeError) as info:
        x = tfnb.placeholder(torch.ones(4, 3))
        x @ torch.ones(5, 2)
    message = str(info.value)
    assert "float32[B, 3]" in message and "float32[5, 2]" in message and "x @ torch.ones(5, 2)" in message
    assert isinstance(info.value, ValueError) and info.value.line
    assert g.version == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: torch.mv(x, torch.ones(7)), "got input (Bx3), vec (7)"),
        (lambda x: torch.nn.functional.cross_entropy(x, torch.ones(7).long()), "batch_size (B)"),
    ],
)
def test_what_torch_says_of_sizes_has_the_letters_of_the_user(call: Any, words: str) -> None:
    with pytest.raises((ShapeError, ValueError), match=re.escape(words)), tfnb.record():
        call(tfnb.placeholder(torch.ones(4, 3)))


def test_values_that_leave_are_noted_once_with_their_line() -> None:
    with pytest.warns(UserWarning, match="took the sample"), tfnb.record() as g:
        x = tfnb.placeholder(torch.arange(4.0))
        y = x * float(x.sum())
        z = x + x.max().item()
    assert len(g.notes) == 2 and "float()" in g.notes[0] and "item()" in g.notes[1]
    assert torch.equal(tfnb.run([y, z], {x: torch.ones(2)})[0], torch.full((2,), 6.0))


def test_a_python_branch_warns_and_guards_the_run() -> None:
    with pytest.warns(UserWarning, match="took the True branch"), tfnb.record():
        x = tfnb.placeholder(torch.ones(4))
        before = x + 1
        y = x * 2 if x.mean() > 0 else x * 3
    assert torch.equal(tfnb.run(y, {x: torch.ones(2)}), torch.full((2,), 2.0))
    with pytest.raises(tfnb.errors.BranchChanged, match="recorded with True"):
        tfnb.run(y, {x: -torch.ones(2)})
    assert torch.equal(tfnb.run(before, {x: -torch.ones(2)}), torch.zeros(2))


def _below_device(x: Any, w: Any) -> bool:
    with tfnb.device("cpu"):
        return bool(x.sum() > 0)


def _below_dependencies(x: Any, w: Any) -> bool:
    with tfnb.control_dependencies([w * 2]):
        return bool(x.sum() > 0)


def _in_a_checkpoint(x: Any, w: Any) -> bool:
    seen: list[bool] = []

    def asked(x: Any) -> Any:
        seen.append(bool(x.sum() > 0))
        return x

    checkpoint(asked, x, use_reentrant=False)
    return seen[0]


def _in_a_backward(x: Any, w: Any) -> bool:
    seen: list[bool] = []
    (y := w * x).register_hook(lambda grad: seen.append(bool(grad.sum() > 0)))
    (y * x).sum().backward()
    return seen[0]


def _in_an_update(x: Any, w: Any) -> bool:
    seen: list[bool] = []

    class Asking(tfnb.train.Optimizer):
        def update(self, w: Any, grad: Any, slots: Any, lr: Any) -> Any:
            seen.append(bool(grad.sum() > 0))
            return w, slots

    Asking(0.1).minimize((w * x).sum(), [w])  # a step that no run takes
    return seen[0]


@pytest.mark.filterwarnings("ignore:.*(Python took the|no name holds the step):UserWarning")
@pytest.mark.parametrize("asked", [_below_device, _below_dependencies, _in_a_checkpoint, _in_a_backward, _in_an_update])
def test_a_python_branch_asked_within_a_context_guards_all_that_is_recorded_behind_it(asked: Any) -> None:
    w = nn.Parameter(torch.tensor(1.0))
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4))
        y = x * 2 if asked(x, w) else x * 3
    assert torch.equal(tfnb.run(y, {x: torch.ones(4) / 2}), torch.ones(4))
    with pytest.raises(BranchChanged, match="recorded with True"):
        tfnb.run(y, {x: -torch.ones(4)})


def test_without_a_sample_there_are_shapes_only() -> None:
    with tfnb.record():
        x = tfnb.placeholder(shape=(None, 3))
        y = x.sum(1)
        assert "no sample" in repr(y)
        with pytest.raises(tfnb.errors.InvalidArgument, match="no value while recording"):
            y.numpy()
    assert torch.equal(tfnb.run(y, {x: torch.ones(7, 3)}), torch.full((7,), 3.0))


def test_a_data_set_cut_for_a_sample_does_not_stay_in_the_graph() -> None:
    data = torch.randn(1000, 8)
    with tfnb.record() as g:
        x = tfnb.placeholder(data[:4] / 2, name="x")
        y = x + 1
    assert [n.op for n in g.nodes] == ["tfnb.placeholder", "aten.add.Tensor"]
    assert y.name == "y"


def test_constants_keep_their_recorded_value() -> None:
    offset = torch.ones(3)
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(2, 3))
        y = x + offset
    offset.zero_()
    with pytest.warns(UserWarning, match="offset has other values now"):
        assert torch.equal(tfnb.run(y, {x: torch.zeros(1, 3)}), torch.ones(1, 3))


def test_outside_a_recording_ops_give_plain_tensors() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3))
        y = x * 2
    count = len(g.nodes)
    z = y + 1
    assert type(z) is torch.Tensor and torch.equal(z, torch.full((3,), 3.0)) and len(g.nodes) == count
    with pytest.raises(tfnb.errors.FeedError, match="outside a recording"):
        tfnb.run(z)


def test_other_threads_are_not_recorded() -> None:
    def work() -> None:
        made.append(torch.ones(3) * 2)

    made: list[torch.Tensor] = []
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), shape=(3,))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        y = x + made[0]
    assert ops(g) == ["add"] and type(made[0]) is torch.Tensor
    assert torch.equal(y.sample, torch.full((3,), 3.0))


def test_nested_recordings_belong_to_the_inner_owner() -> None:
    with tfnb.record("outer") as outer:
        x = tfnb.placeholder(torch.ones(3))
        with tfnb.record("inner") as inner:
            tfnb.placeholder(torch.ones(2)) * 2
        x + 1
    assert ops(inner) == ["mul"] and ops(outer) == ["add"]


def test_finalized_graph_refuses() -> None:
    with tfnb.record() as g:
        tfnb.placeholder(torch.ones(3))
    g.finalize()
    with pytest.raises(FailedPrecondition, match="finalized"), tfnb.record(g):
        pass


def test_record_by_name_makes_a_new_graph_each_time() -> None:
    with tfnb.record("twice") as first:
        a = tfnb.placeholder(torch.ones(3), name="a") * 2
    with tfnb.record("twice") as second:
        tfnb.placeholder(torch.ones(3), name="a") * 3
    assert first is not second and tfnb.graph("twice") is second
    assert torch.equal(tfnb.run(a, {"a": torch.ones(3)}), 2 * torch.ones(3))


@pytest.mark.parametrize("module, shape", [
    (nn.LSTM(8, 5, 2, batch_first=True), (4, 7, 8)),
    (nn.GRU(8, 5), (4, 7, 8)),
    (nn.RNN(8, 5), (4, 7, 8)),
    (nn.MultiheadAttention(8, 2, batch_first=True), (4, 7, 8)),
    (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (4, 7, 8)),
    (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.GELU()), (4, 2, 8, 8)),
    (nn.Sequential(nn.ConvTranspose1d(2, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool1d(1)), (4, 2, 8)),
    (nn.Embedding(10, 4), (4, 7)),
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_modules_record_and_replay_at_other_batches(module: nn.Module, shape: tuple[int, ...], training: bool) -> None:
    module.train(training)
    kept = {k: v.clone() for k, v in module.state_dict().items()}

    def batch(rows: int) -> torch.Tensor:
        size = (rows, *shape[1:])
        return torch.randint(10, size) if isinstance(module, nn.Embedding) else torch.randn(size)

    args = 3 if isinstance(module, nn.MultiheadAttention) else 1
    with tfnb.record() as g:
        x = tfnb.placeholder(batch(shape[0]), shape=(None, *shape[1:]))
        out = module(*[x] * args)
        out = out[0] if isinstance(out, tuple) else out
    assert not [n.op for n in g.nodes if "mkldnn" in n.op or "_for_cpu" in n.op]
    for rows in (1, 5, 4):
        if rows == 1 and training and any(isinstance(m, nn.BatchNorm2d) for m in module.modules()):
            continue
        data = batch(rows)
        want = module(*[data] * args)
        want = want[0] if isinstance(want, tuple) else want
        torch.testing.assert_close(tfnb.run(out, {x: data}), want.detach(), rtol=1e-5, atol=1e-6)
        module.load_state_dict(kept)


def test_a_layer_called_twice_and_a_name_reused() -> None:
    layer = nn.Linear(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tfnb.record() as g:
            h = tfnb.placeholder(torch.ones(2, 3), name="x")
            for _ in range(3):
                h = F.relu(layer(h))
    assert len(g.variables) == 2 and h.name == "h"
    data = torch.randn(4, 3)
    want = data
    for _ in range(3):
        want = F.relu(layer(want))
    assert torch.equal(tfnb.Session(g).run("h", {"x": data}), want)


def test_variables_are_labelled_by_path_root_and_python_name() -> None:
    model, model2 = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    scale = nn.Parameter(torch.ones(2))
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3))
        y = model(x) + model2(x) * scale
    assert [v.name for v in g.variables] == ["0.weight", "0.bias", "model2.0.weight", "model2.0.bias", "scale"]


def test_attention_without_dropout_is_not_random() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(2, 3, 4, 5))
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert all(node.stream is None for node in g.nodes)


def test_the_number_of_a_buffer_leaves_the_graph_with_a_note() -> None:
    count = nn.BatchNorm1d(3)
    with pytest.warns(UserWarning, match="took the sample"), tfnb.record() as g:
        x = count(tfnb.placeholder(torch.randn(4, 3)))
        y = x / float(count.num_batches_tracked)
    assert len(g.notes) == 1 and "item()" in g.notes[0]


def test_a_branch_on_what_is_the_same_in_every_run_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tfnb.record() as g:
            x = tfnb.placeholder(torch.randn(4, 3))
            mask = torch.ones(3, 3).triu(1).bool()
            y = x.sum(1) if mask.all() else x @ mask.float()
    assert g.notes == ()
    assert tfnb.run(y, {x: torch.ones(2, 3)}).shape == (2, 3)


def test_a_view_recorded_of_dense_memory_runs_on_any_strides() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3, 2))
        y = x.view(-1, 6) * 2
    data = torch.randn(3, 5, 2).transpose(0, 1)
    assert torch.equal(tfnb.run(y, {x: data}), data.reshape(5, 6) * 2)


def test_a_buffer_written_through_a_view_belongs_to_the_step() -> None:
    norm, twin = (nn.InstanceNorm1d(3, affine=True, track_running_stats=True) for _ in range(2))
    data = torch.randn(4, 3, 5)
    with tfnb.record():
        step = tfnb.train.SGD(0.1).minimize(norm(x := tfnb.placeholder(data)).square().mean())
    tfnb.run(step, {x: data})
    twin(data)
    torch.testing.assert_close(norm.running_mean, twin.running_mean)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_is_drawn_in_each_run(layer: type[nn.Module]) -> None:
    net = layer(3, 4, num_layers=3, dropout=0.5, bidirectional=True)
    data = torch.randn(5, 2, 3)
    with tfnb.record() as g:
        out = net(x := tfnb.placeholder(data, shape=("T", "B", 3)))[0]
    assert sum(node.stream is not None for node in g.nodes) == 2
    assert not torch.equal(tfnb.run(out, {x: data}), tfnb.run(out, {x: data}))
    net.eval()
    with tfnb.record():
        out, _ = net(x := tfnb.placeholder(data, shape=("T", "B", 3)))
    torch.testing.assert_close(tfnb.run(out, {x: data[:4]}), net(data[:4])[0])


def test_the_memory_of_a_plain_tensor_is_read_as_it_is() -> None:
    data, written = torch.arange(3.0), torch.zeros(3)
    with pytest.warns(UserWarning, match="took the sample|does not write"), tfnb.record():
        assert data.numpy().tolist() == np.asarray(data).tolist() == [0, 1, 2]
        x = tfnb.placeholder(torch.ones(3), shape=(3,))
        written += x
        assert written.numpy().tolist() == [1, 1, 1]
        assert (torch.from_numpy(data.numpy()) * x).sample.tolist() == [0, 1, 2]
    assert written.tolist() == [0, 0, 0]


def test_a_buffer_used_before_its_module_is_called_is_a_variable() -> None:
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("scale", torch.ones(3))
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3), name="x")
        model.scale.mul_(2)
        y = model(x * model.scale).sum()
    assert next(v.name for v in g.variables) == "scale" and torch.equal(model.scale, torch.ones(3))
    tfnb.run([y, tfnb.variable(model.scale)], {x: torch.randn(4, 3)})
    tfnb.run(y, {x: torch.randn(4, 3)})
    assert torch.equal(model.scale, torch.full((3,), 4.0))


@pytest.mark.slow
def test_samples_that_nobody_holds_give_their_memory_back() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(8)))
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4000, 1000), name="x")  # 16 MB a layer
        y = layers(x).sum()
    space = workspace(g)
    assert space.samples.bytes <= 64 << 20
    torch.testing.assert_close(y.sample, layers(x.sample).sum().detach(), rtol=1e-4, atol=1e-2)
    (dw,) = tfnb.gradients(y, [layers[0].weight])  # computes again what it needs
    want = torch.autograd.grad(layers(x.sample).sum(), layers[0].weight)[0]
    torch.testing.assert_close(dw.sample, want, rtol=1e-4, atol=1e-2)
    held = y.sample
    tfnb.run(y, {x: x.sample[:2]})
    assert space.samples.bytes == 0 and y.sample is held


@pytest.mark.parametrize("found", [
    lambda x, y: 2 in y, lambda x, y: x[0] in y, lambda x, y: x[0] in torch.tensor([2, 5]),
], ids=["number", "tensor", "constants"])  # fmt: skip
def test_whether_a_tensor_holds_an_element_is_guarded(found: Callable[..., bool]) -> None:
    x, y = torch.tensor([2, 2]), torch.tensor([1, 2, 3])
    with pytest.warns(UserWarning, match="Python took the True branch"), tfnb.record():
        a, b = tfnb.placeholder(x, shape=(2,)), tfnb.placeholder(y, shape=(3,))
        z = a * 10 if found(a, b) else a
    assert tfnb.run(z, {a: x, b: y}).tolist() == [20, 20]
    with pytest.raises(BranchChanged):
        tfnb.run(z, {a: x - 1, b: y * 0})


@pytest.mark.parametrize("ask", [
    lambda x: (x > 0).all().item(), lambda x: (x.sum() > 0).item() is True, lambda x: x.gt(0).any().item() == 1,
], ids=["item", "is", "equal"])  # fmt: skip
def test_a_truth_value_taken_as_a_number_is_a_branch(ask: Any) -> None:
    with pytest.warns(UserWarning, match="took the True branch"), tfnb.record():
        x = tfnb.placeholder(torch.ones(4))
        y = x * 2 if ask(x) else x * 3
    assert torch.equal(tfnb.run(y, {x: torch.ones(2)}), torch.full((2,), 2.0))
    with pytest.raises(tfnb.errors.BranchChanged, match="recorded with True"):
        tfnb.run(y, {x: -torch.ones(2)})


def test_a_number_that_is_the_same_in_every_run_says_nothing() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4))
        y = x * torch.arange(3.0).sum().item()
    assert g.notes == () and tfnb.run(y, {x: torch.ones(2)}).tolist() == [3, 3]
