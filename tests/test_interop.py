"""Graphs as modules of plain torch: equal to eager, to runs, through torch.export, ONNX and torch's own training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import FeedError, InvalidArgument, NotFound, Unimplemented

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporters warn of their own deprecations


class Last(nn.Module):
    """The last output of an LSTM, through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x)[0][:, -1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3)), lambda b: torch.randn(b, 10)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
        ),
        lambda b: torch.randn(b, 3, 8, 8),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda b: torch.randn(b, 6, 16)),
    "lstm": (Last, lambda b: torch.randn(b, 6, 5)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(48, 2)),
        lambda b: torch.randint(0, 20, (b, 6)),
    ),
}


def recorded(model: nn.Module, x: torch.Tensor) -> tuple[tfnb.Graph, Any, Any]:
    with tfnb.record() as g:
        fed = tfnb.placeholder(x, name="x")
        return g, fed, model(fed)


@pytest.mark.parametrize("name", MODELS)
def test_a_module_is_the_model_at_any_batch_and_is_exported(name: str) -> None:
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make().eval()
    g, x, y = recorded(model, data(4))
    module = g.to_module(y, [x])
    for batch in (4, 1, 7):
        given = data(batch)
        torch.testing.assert_close(module(given), model(given))
    state = {key: value for key, value in model.state_dict().items() if "num_batches" not in key}
    assert {key: value.tolist() for key, value in module.state_dict().items()} == {
        key: value.tolist() for key, value in state.items()
    }
    exported = torch.export.export(module, (data(4),), dynamic_shapes=({0: torch.export.Dim("b", min=2, max=64)},))
    given = data(6)
    torch.testing.assert_close(exported.module()(given), model(given))


def test_values_are_copies_and_a_state_dict_goes_back() -> None:
    model = nn.Linear(3, 2)
    g, x, y = recorded(model, torch.ones(4, 3))
    module, before = g.to_module(y, [x]), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)
    module.load_state_dict(before)
    torch.testing.assert_close(module(torch.ones(2, 3)), model(torch.ones(2, 3)))


def test_it_has_the_structure_of_the_fetches_and_is_trained_by_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
    g, x, y = recorded(model, torch.randn(8, 4))
    module = g.to_module({"y": y, "twice": [y, (y,)]}, [x])
    optimizer, data = torch.optim.SGD(module.parameters(), 0.1), torch.randn(64, 4)
    losses = []
    for _ in range(60):
        out = module(data)
        assert out["twice"][0] is out["y"] and out["twice"][1] == (out["y"],)
        loss = (out["y"][:, 0] - data.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(module(data)["y"], module(data)["y"]), "dropout draws anew"


def control(kind: str, x: Any) -> Any:
    if kind == "cond":
        return tfnb.cond(x.sum() > 2, lambda: x * 2, lambda: x - 1)
    if kind == "while":
        return tfnb.while_loop(lambda i, a: a.sum() < 100, lambda i, a: (i + 1, a * 2), (torch.tensor(0), x))
    if kind == "scan":
        return tfnb.scan(lambda c, row: (c + row, c * row), torch.zeros(()), x)
    return tfnb.map_fn(lambda row: row.exp() * 2, x)


@pytest.mark.parametrize("kind", ["cond", "while", "scan", "map"])
def test_branches_and_loops_keep_their_form(kind: str) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), name="x")
        out = control(kind, x)
    module = g.to_module(out, [x])
    for given in (torch.ones(3), torch.full((3,), 0.1), torch.ones(5)):
        torch.testing.assert_close(module(given), tfnb.run(out, {x: given}))
    exported, given = torch.export.export(module, (torch.ones(3),)), torch.full((3,), 0.25)
    torch.testing.assert_close(exported.module()(given), tfnb.run(out, {x: given}))


def test_relations_between_sizes_are_checked() -> None:
    with tfnb.record() as g:
        a, b = tfnb.placeholder(torch.ones(3), name="a"), tfnb.placeholder(torch.ones(3), name="b")
        total = a + b
    module = g.to_module(total, [a, b])
    assert module(torch.ones(5), torch.ones(5)).tolist() == [2.0] * 5
    with pytest.raises(RuntimeError):
        module(torch.ones(5), torch.ones(4))


def test_what_torch_has_no_form_for_is_refused_with_the_line() -> None:
    model = nn.Linear(3, 1)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        loss = model(x).sum()
        train = tfnb.train.SGD(0.1).minimize(loss)
        taken = tfnb.FIFOQueue(3, [torch.float32], [()]).dequeue()
    with pytest.raises(InvalidArgument, match=r"operation without a value.*test_interop.py line.*its loss"):
        g.to_module([loss, train], [x])
    with pytest.raises(Unimplemented, match=r"queue.*test_interop.py line.*feed its element"):
        g.to_module(taken, [x])
    with pytest.raises(InvalidArgument, match="must be fed"):
        g.to_module(loss, [])
    with pytest.raises(FeedError, match="stands twice"):
        g.to_module(loss, [x, x])
    with pytest.raises(NotFound, match="no node 'nothing'"):
        g.to_module(loss, ["nothing"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnx_computes_the_same_at_another_batch(name: str, tmp_path: Any) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="optional extra [onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="optional extra [onnx]")
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make().eval()
    g, x, y = recorded(model, data(4))
    path, dims = str(tmp_path / "model.onnx"), ({0: torch.export.Dim("b")},)
    torch.onnx.export(g.to_module(y, [x]), (data(4),), path, dynamo=True, dynamic_shapes=dims, verbose=False)
    session, given = runtime.InferenceSession(path), data(6)
    (got,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
    np.testing.assert_allclose(got, model(given).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_networkx_has_the_nodes_and_edges() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = x * x
        with tfnb.control_dependencies([y]):
            x.exp()
    found = g.to_networkx()
    assert [found.nodes[node.id]["name"] for node in g.nodes] == [node.name for node in g.nodes]
    assert sorted(kind for *_, kind in found.edges(data="kind")) == ["control", "value", "value", "value"]
