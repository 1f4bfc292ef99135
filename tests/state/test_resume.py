"""Save, restore, go on: the same numbers as without a break, also in a fresh process without IPython."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import tfnb
from tfnb.errors import CheckpointCorrupt, CheckpointIncompatible, FailedPrecondition, NotFound

X, Y = torch.linspace(-1, 1, 48).view(6, 8), torch.arange(6) % 3


@pytest.fixture
def graph() -> tfnb.Graph:
    """A network with batch norm and dropout, its loss and its Adam step."""
    model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    with tfnb.record("net") as g:
        x = tfnb.placeholder(X, name="x")
        y = tfnb.placeholder(Y, name="y")
        loss = functional.cross_entropy(model(x), y)
        train = tfnb.train.Adam(1e-2).minimize(loss)
    return g


def steps(session: tfnb.Session, count: int) -> list[float]:
    return [session.run(["loss", "train"], {"x": X, "y": Y})[0].item() for _ in range(count)]


def values(g: tfnb.Graph) -> dict[str, torch.Tensor]:
    return {label: variable.value() for label, variable in g.contents.variables.items()}


def same(a: tfnb.Graph, b: tfnb.Graph) -> bool:
    left, right = values(a), values(b)
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_loaded_graph_holds_the_same_values_after_restore(graph: tfnb.Graph, tmp_path: Path) -> None:
    session = tfnb.Session(graph)
    steps(session, 3)
    graph.save(tmp_path / "g.json")
    session.save(tmp_path / "v")
    loaded = tfnb.Graph.load(tmp_path / "g.json")
    tfnb.Session(loaded).restore(tmp_path / "v")
    assert graph.diff(loaded) == ""
    assert same(graph, loaded)


def test_restored_run_equals_the_uninterrupted_one_bitwise(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with tfnb.record("net") as g:
        x = tfnb.placeholder(X, name="x")
        y = tfnb.placeholder(Y, name="y")
        loss = functional.cross_entropy(model(x), y)
        train = tfnb.train.Adam(1e-2).minimize(loss)
    session = tfnb.Session(g)
    steps(session, 2)
    g.save(tmp_path / "g.json")
    session.save(tmp_path / "v")
    loaded = tfnb.Graph.load(tmp_path / "g.json")
    resumed = tfnb.Session(loaded).restore(tmp_path / "v")
    assert steps(session, 5) == steps(resumed, 5)
    assert same(g, loaded)


def test_run_before_restore_says_what_is_missing(graph: tfnb.Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "g.json")
    session = tfnb.Session(tfnb.Graph.load(tmp_path / "g.json"))
    with pytest.raises(FailedPrecondition, match=r"Attempting to use uninitialized value .*session\.restore"):
        session.run("loss", {"x": X, "y": Y})


@pytest.mark.parametrize("damage", ["cut", "shape", "missing"])
def test_failing_restore_leaves_every_variable_untouched(graph: tfnb.Graph, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "v"
    session = tfnb.Session(graph)
    session.save(path)
    steps(session, 1)
    before = values(graph)
    tensors, meta = tfnb.state.checkpoint.load(path)
    error: type[Exception] = CheckpointCorrupt
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        last = list(tensors)[-1]
        error = {"shape": CheckpointIncompatible, "missing": NotFound}[damage]
        tensors = {**tensors, last: torch.zeros(9, 9)} if damage == "shape" else dict(list(tensors.items())[:-1])
        tfnb.state.checkpoint.save(path, tensors, meta)
    with pytest.raises(error):
        session.restore(path)
    assert all(torch.equal(before[key], found) for key, found in values(graph).items())


@pytest.mark.slow
def test_saved_graph_and_variables_run_in_a_fresh_process(graph: tfnb.Graph, tmp_path: Path) -> None:
    session = tfnb.Session(graph)
    steps(session, 2)
    graph.save(tmp_path / "g.json")
    session.save(tmp_path / "v")
    program = (
        "import sys, torch\n"
        "from tfnb import Graph, Session\n"
        "g = Graph.load('g.json')\n"
        "x, y = torch.linspace(-1, 1, 48).view(6, 8), torch.arange(6) % 3\n"
        "s = Session(g).restore('v')\n"
        "print(repr(s.run('loss', {'x': x, 'y': y}).item()))\n"
        "s.run('train', {'x': x, 'y': y})\n"
        "print('IPython' in sys.modules, 'distributed' in sys.modules)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
    )
    assert done.stderr == ""
    loss, modules = done.stdout.splitlines()
    fresh = tfnb.Session(tfnb.Graph.load(tmp_path / "g.json")).restore(tmp_path / "v")
    # another process may sum in other parts: what other libraries did to this one's threads is not in the files
    assert float(loss) == pytest.approx(fresh.run("loss", {"x": X, "y": Y}).item(), rel=1e-6)
    assert modules == "False False"
