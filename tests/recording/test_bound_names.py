"""A name means the value that was bound to it last, in order of execution; the oracle is plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.recording.test_cells import Notebook
from tfnb.errors import FeedError, InvalidArgument, NotFound

DATA = torch.arange(12.0).reshape(4, 3)
SUM = "x = tfnb.placeholder(torch.ones(4, 3))\nloss = x.sum()"
SQUARES = "x = tfnb.placeholder(torch.ones(4, 3))\nloss = x.square().sum()"


@pytest.fixture
def notebook(request: pytest.FixtureRequest) -> Notebook:
    return Notebook(f"bound {request.node.name}")


def value(graph: tfnb.Graph, fetch: str = "loss", feed: str = "x") -> float:
    return float(tfnb.Session(graph).run(fetch, {feed: DATA}))


def test_a_name_is_of_the_cell_that_ran_last(notebook: Notebook) -> None:
    graph = notebook.run("1", SUM)
    assert value(graph) == DATA.sum()
    notebook.run("2", SQUARES)
    assert value(graph) == DATA.square().sum()
    notebook.run("1", SUM.replace("x.sum", "x.abs().sum"))
    assert value(graph) == DATA.abs().sum()
    notebook.run("2", SQUARES)
    assert value(graph) == DATA.square().sum()
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)


@pytest.mark.parametrize("rebound", ["loss = double", "double, loss = loss, double"])
def test_a_cell_may_bind_what_another_one_recorded(notebook: Notebook, rebound: str) -> None:
    graph = notebook.run("1", SUM + "\ndouble = 2 * x.sum()")
    notebook.run("2", rebound)
    assert value(graph) == 2 * DATA.sum()
    assert value(graph, "double") == (DATA.sum() if "," in rebound else 2 * DATA.sum())


@pytest.mark.parametrize("edited", ["double = 2 * x.sum()", "double = x.sum().exp()"])
def test_a_name_bound_elsewhere_follows_the_cell_that_runs_again(notebook: Notebook, edited: str) -> None:
    graph = notebook.run("0", "x = tfnb.placeholder(torch.ones(4, 3))\nloss = 100 * x.sum()")
    notebook.run("1", "double = 2 * x.sum()")
    notebook.run("2", "loss = double\nmore = loss + 1")
    notebook.run("1", edited)
    assert value(graph) == value(graph, "double") == value(graph, "more") - 1


def test_a_removed_cell_gives_the_name_back(notebook: Notebook) -> None:
    graph = notebook.run("1", SUM)
    notebook.run("2", SQUARES)
    notebook.run("3", "x = tfnb.placeholder(torch.ones(4, 3))\nloss = x.mean()")
    notebook.run("3", "pass")
    assert value(graph) == DATA.square().sum()
    notebook.run("2", "pass")
    assert value(graph) == DATA.sum()


def test_a_failed_cell_changes_nothing(notebook: Notebook) -> None:
    graph = notebook.run("1", SUM)
    names = dict(graph.contents.names)
    with pytest.raises(ZeroDivisionError):
        notebook.run("2", SQUARES + "\n1 / 0")
    assert graph.contents.names == names
    assert value(graph) == DATA.sum()


def test_a_feed_is_of_the_latest_placeholder(notebook: Notebook) -> None:
    graph = notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3))")
    notebook.run("2", "x = x.flatten(1) + 1\nloss = x.sum()")
    assert value(graph) == (DATA + 1).sum()
    assert torch.equal(tfnb.Session(graph).run("x", {"x": DATA}), DATA + 1)
    notebook.run("3", SQUARES)
    assert value(graph) == DATA.square().sum()
    notebook.run("2", "x = x * 3\nloss = x.sum()")  # of what cell 3 fed
    assert value(graph) == 3 * DATA.sum()


def test_a_placeholder_that_was_written_is_fed_and_fetched_as_its_tensor(notebook: Notebook) -> None:
    graph = notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3))\nx += 1\nloss = x.sum()")
    by_name, by_tensor = (tfnb.Session(graph).run(x, {x: DATA}) for x in ("x", notebook.names["x"]))
    assert torch.equal(by_name, DATA + 1) and torch.equal(by_tensor, DATA + 1)


def test_a_given_name_is_never_shadowed(notebook: Notebook) -> None:
    graph = notebook.run(
        "1", "inputs = tfnb.placeholder(torch.ones(4, 3), name='x')\nhalf = tfnb.constant(0.5, name='c')"
    )
    notebook.run("2", "x = inputs * 2\nc = x.sum()\nloss = c * half")
    assert value(graph) == DATA.sum()
    assert torch.equal(tfnb.Session(graph).run("x", {"x": DATA}), DATA)
    assert tfnb.Session(graph).run("c") == 0.5
    assert value(graph, feed="inputs") == DATA.sum()  # the Python name means it, too
    with pytest.raises(InvalidArgument, match="taken"):
        notebook.run("3", "tfnb.placeholder(torch.ones(2), name='loss')")


def test_a_python_name_wins_over_one_that_was_made_up(notebook: Notebook) -> None:
    graph = notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3))\ny = x.exp().sum()")
    notebook.run("2", "exp = x.exp() * 2")
    torch.testing.assert_close(tfnb.Session(graph).run("exp", {"x": DATA}), DATA.exp() * 2)


def test_further_outputs_follow_the_cells(notebook: Notebook) -> None:
    source = "x = tfnb.placeholder(torch.ones(4, 3))\ntop, place = x.{}(1)\nloss = top.sum()"
    graph = notebook.run("1", source.format("max"))
    notebook.run("2", source.format("min"))
    assert tfnb.Session(graph).run("place", {"x": DATA}).tolist() == DATA.min(1).indices.tolist()
    notebook.run("1", source.format("max"))
    assert tfnb.Session(graph).run("place", {"x": DATA}).tolist() == DATA.max(1).indices.tolist()


def test_a_shadowed_node_is_shown_with_its_cell_and_had_by_that(notebook: Notebook) -> None:
    graph = notebook.run("1", SUM)
    first = notebook.names["loss"]
    notebook.run("2", SQUARES)
    assert "loss@In[1]" in graph and graph["loss@In[1]"] is first.node
    assert graph["loss"] is notebook.names["loss"].node and graph.value("loss:0") == graph.value("loss")
    assert float(tfnb.Session(graph).run("loss@In[1]", {"x@In[1]": DATA})) == DATA.sum()
    bundle = graph._repr_mimebundle_()
    assert all("x@In[1]" in text and "loss@In[1]" in text for text in (bundle["text/html"], graph.text()))
    assert "x@In[1] = tfnb.placeholder" in bundle["text/plain"]
    with pytest.raises(InvalidArgument, match=r"placeholder x@In\[1\] .* must be fed"):
        tfnb.Session(graph).run(first, {"x": DATA})
    with pytest.raises(FeedError, match=r"x@In\[1\]"):
        tfnb.Session(graph).run(torch.ones(2))
    with pytest.raises(NotFound, match="near: loss"):
        graph["losss"]


def test_a_watched_or_stopped_tensor_is_that_one(notebook: Notebook) -> None:
    graph = notebook.run("1", SUM)
    first = notebook.names["loss"], notebook.names["x"]
    notebook.run("2", SQUARES)
    seen = tfnb.watch("loss", first[0], every=1, graph=graph, show=False)
    tfnb.Session(graph).run([first[0], "loss"], {first[1]: DATA, "x": DATA})
    assert {name: course.points[-1][1] for name, course in seen.courses.items()} == {
        "loss": DATA.square().sum(), "loss@In[1]": DATA.sum()
    }  # fmt: skip
    seen.stop()
    tfnb.break_at("loss", "value > 100", graph=graph)
    assert float(tfnb.Session(graph).run(first[0], {first[1]: 100 * DATA})) == 100 * DATA.sum()
    with pytest.raises(tfnb.errors.BreakpointReached):
        tfnb.Session(graph).run("loss", {"x": DATA})
    assert tfnb.break_at(notebook.names["loss"], off=True) == []  # the same place, named in another way


def test_files_keep_the_table(notebook: Notebook, tmp_path: Path) -> None:
    graph = notebook.run("1", SUM + "\nimages = tfnb.placeholder(torch.ones(3), name='im')")
    notebook.run("2", SQUARES)
    notebook.run("1", SUM + "\nimages = tfnb.placeholder(torch.ones(3), name='im')")
    graph.save(tmp_path / "g.json")
    loaded = tfnb.Graph.load(tmp_path / "g.json")
    assert [*loaded.contents.names] == [*graph.contents.names]
    assert value(loaded) == DATA.sum()
    with tfnb.record(loaded):
        im = tfnb.placeholder(torch.ones(3)) * 2
    assert im.graph is loaded and loaded["im"].op == "tfnb.placeholder"  # a name that was given stays so


def test_a_file_of_an_earlier_release_has_one_value_for_each_name(notebook: Notebook, tmp_path: Path) -> None:
    graph = notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3))\ntop, place = x.max(1)\nloss = top.sum()")
    graph.save(tmp_path / "g.json")
    document = json.loads((tmp_path / "g.json").read_text())
    document["aliases"] = {"place": document["aliases"]["place"][0]}
    (tmp_path / "g.json").write_text(json.dumps(document))
    loaded = tfnb.Graph.load(tmp_path / "g.json")
    assert tfnb.Session(loaded).run("place", {"x": DATA}).tolist() == DATA.max(1).indices.tolist()
    assert value(loaded) == DATA.max(1).values.sum()


ROWS, TARGETS = torch.randn(8, 3, generator=torch.Generator().manual_seed(3)), torch.arange(8.0).reshape(8, 1)


def trained() -> tuple[list[float], list[nn.Module]]:
    """Two recordings that set the same names, trained and watched by name: the losses, and the models of both."""
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(3, 1), nn.Linear(3, 1)]
    with tfnb.record("two_losses") as graph:
        x, y = tfnb.placeholder(ROWS), tfnb.placeholder(TARGETS)
        loss = F.l1_loss(models[0](x), y)
        train = tfnb.train.SGD(0.1).minimize(loss)
    with tfnb.record(graph):
        x, y = tfnb.placeholder(ROWS), tfnb.placeholder(TARGETS)
        loss = F.mse_loss(models[1](x), y)
        train = tfnb.train.SGD(0.01).minimize(loss)
    assert train.graph is graph and loss.graph is graph
    data = {"x": ROWS, "y": TARGETS}
    result = tfnb.fit("train", data, batch_size=4, epochs=3, shuffle=False, watch="loss")
    tfnb.run("train", data)
    return [entry["loss"] for entry in result.history], models


def by_torch() -> tuple[list[float], list[nn.Module]]:
    """The same of plain PyTorch."""
    torch.manual_seed(0)
    first, model = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []

    def step(rows: torch.Tensor, targets: torch.Tensor) -> float:
        loss = F.mse_loss(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    for _ in range(3):
        losses.append((step(ROWS[:4], TARGETS[:4]) + step(ROWS[4:], TARGETS[4:])) / 2)
    step(ROWS, TARGETS)
    return losses, [first, model]


def assert_equal(models: list[nn.Module], plain: list[nn.Module]) -> None:
    """The weights of both."""
    for model, other in zip(models, plain, strict=True):
        torch.testing.assert_close(model.state_dict(), other.state_dict())
