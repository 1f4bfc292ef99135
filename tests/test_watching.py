"""`tfnb.watch`: what is seen is what was computed, nothing else changes, and names say what they mean."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument, NotFound
from tfnb.watching import histogram


class Net(nn.Module):
    """Two layers with names that patterns meet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv2(self.conv1(x).relu()).flatten(1))


@pytest.fixture
def net() -> Any:
    return recorded()


def recorded() -> Any:
    """Its graph, feeds, outputs, loss and step, and the model."""
    torch.manual_seed(0)
    model = Net()
    with tfnb.record("net") as graph:
        x = tfnb.placeholder(torch.randn(4, 1, 6, 6), name="x")
        y = tfnb.placeholder(torch.randint(3, (4,)), name="y")
        hidden = model(x)
        loss = F.cross_entropy(hidden, y)
        train = tfnb.train.SGD(0.1).minimize(loss)
    return graph, x, y, hidden, loss, train, model


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(5, 1, 6, 6), torch.randint(3, (5,))) for _ in range(count)]


def test_runs_of_other_fetches_do_not_take_the_turns_of_those_that_are_followed(net: Any) -> None:
    """As where an agent acts a hundred times and learns once."""
    _, x, y, hidden, loss, train, _ = net
    seen = tfnb.watch(loss)
    for images, labels in batches(4):
        for _ in range(20):
            tfnb.run(hidden, {x: images})
        tfnb.run(train, {x: images, y: labels})
    assert seen.courses["loss"].points, "the first of the runs that compute it"
    assert len(seen._without) == 1


def by_torch(data: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[float], nn.Module]:
    """The losses of plain steps, and the model after them."""
    torch.manual_seed(0)
    model, losses = Net(), list[float]()
    rule = torch.optim.SGD(model.parameters(), 0.1)
    for images, labels in data:
        rule.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        rule.step()
        losses.append(float(loss.detach()))
    return losses, model


WAYS = "run", "callable", "fit", "run, then fit"


def watched(how: str) -> Callable[[], None]:
    """Two equal models are trained, one of them is watched; gives what checks it once the values are here.

    `tests/cluster/test_here_and_there.py` does it on a cluster.
    """
    data, models = batches(6), list[Net]()
    for is_watched in (False, True):
        graph, x, y, _, loss, train, model = recorded()
        models.append(model)
        nodes = graph.nodes
        if is_watched:
            seen = tfnb.watch(loss, model.conv1.weight, "conv2/*:hist", every=2, graph=graph)
        runs = {"fit": 0, "run, then fit": 3}.get(how, 6)
        call = tfnb.session.default_session(graph).make_callable(train, [x, y])
        for a, b in data[:runs]:
            assert (call(a, b) if how == "callable" else tfnb.run(train, {x: a, y: b})) is None
        if runs < 6:
            assert tfnb.fit(train, [{x: a, y: b} for a, b in data[runs:]], watch=loss).steps == 6 - runs
    seen.stop()
    assert graph.nodes is nodes and "watch" not in graph.attached and seen.steps == 6

    def check() -> None:
        losses, plain = by_torch(data)
        assert all(map(torch.equal, *(model.parameters() for model in models)))
        torch.testing.assert_close([*models[1].parameters()], [*plain.parameters()])
        assert seen.courses["loss"].points == [(step, pytest.approx(losses[step - 1], rel=1e-5)) for step in (2, 4, 6)]
        mean = float(plain.conv1.weight.detach().mean())
        assert seen.courses["conv1.weight"].points[-1] == (6, pytest.approx(mean, abs=1e-7))  # of weights of both signs
        found = seen.courses["conv2.weight"].histogram
        assert found is not None and sum(found.counts) == plain.conv2.weight.numel()
        low, high = plain.conv2.weight.detach().aminmax()
        assert (found.low, found.high) == pytest.approx((float(low), float(high)))
        html, text = seen._repr_html_(), repr(seen)
        assert html.count("<svg") == 4 and all(name in html and name in text for name in seen.courses)

    return check


@pytest.mark.parametrize("how", WAYS)
def test_what_is_seen_is_what_a_run_computes_and_training_is_bitwise_the_same(how: str) -> None:
    watched(how)()


def test_a_run_that_does_not_compute_a_node_is_not_made_to(net: Any) -> None:
    _, x, _, hidden, *_ = net
    seen = tfnb.watch("loss", every=1)
    out = tfnb.run(hidden, {x: torch.zeros(2, 1, 6, 6)})  # y is not fed
    assert out.shape == (2, 3) and seen.courses["loss"].points == []
    fed = tfnb.run("loss", {"loss": torch.tensor(4.0)})
    assert fed == 4 and seen.courses["loss"].points == []
    assert "nothing yet" in repr(seen)


def test_a_cell_that_is_run_again_goes_on_under_its_name() -> None:
    def record(factor: float) -> Any:
        with tfnb.recording.record_cell("again", owner="cell:1", label="In[1]", filename="", namespace={}) as graph:
            x = tfnb.placeholder(torch.ones(2), name="x")
            y = (x * factor).sum()
            graph_y = tfnb.recording.api.group(y, name="go")
        return graph, graph_y

    graph, _ = record(2.0)
    name = next(node.name for node in graph.nodes if "sum" in node.op)
    seen = tfnb.watch(name, every=1, graph=graph)
    session = tfnb.Session(graph)
    session.run(name, {"x": torch.ones(2)})
    record(3.0)
    session.run(name, {"x": torch.ones(2)})
    assert [value for _, value in seen.courses[name].points] == [4.0, 6.0]


@pytest.mark.parametrize(
    ("what", "options", "error", "text"),
    [
        (["los"], {}, NotFound, "no node or variable 'los' to watch; near: loss"),
        (["conv9*"], {}, NotFound, r"conv9\*"),
        (["loss"], {"every": 0}, InvalidArgument, "at least 1, not 0"),
        ([3], {}, InvalidArgument, "not int"),
        (["*"], {}, InvalidArgument, "at most 32"),
    ],
)
def test_bad_input_is_named(net: Any, what: list[Any], options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        tfnb.watch(*what, graph=net[0], **options)
    assert "watch" not in net[0].attached


def test_looks_take_a_small_part_of_the_time_and_the_picture_is_renewed_four_times_a_second(net: Any) -> None:
    graph, x, y, _, loss, train, _ = net
    (feed,) = batches(1)
    seen = tfnb.watch(loss, graph=graph)
    shown: list[float] = []
    for _ in range(20):
        tfnb.run(train, {x: feed[0], y: feed[1]})
    seen._plot = type("Plot", (), {"show": lambda self, html, text: shown.append(time.perf_counter())})()
    end = time.perf_counter() + 1.2
    while time.perf_counter() < end:
        tfnb.run(train, {x: feed[0], y: feed[1]})
    assert 1 <= len(seen.courses["loss"].points) <= 30, "at most 20 a second, and fewer where steps are slow"
    assert all(b - a >= 0.2 for a, b in pairwise(shown)) and len(shown) <= 6


def test_threads_are_looked_at_one_at_a_time_and_all_their_steps_count() -> None:
    total = tfnb.Variable(torch.zeros(()), name="total")
    with tfnb.record("threads") as graph:
        more = total.assign_add(torch.ones(()))
    seen = tfnb.watch("total", every=1, graph=graph)
    threads = [threading.Thread(target=lambda: [tfnb.run(more) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total.value() == 200 and seen.steps == 200
    assert [v for _, v in seen.courses["total"].points] == sorted(v for _, v in seen.courses["total"].points)


@pytest.mark.parametrize("values", [[], [float("nan")] * 3, [2.0, 2.0], [True, False], [1 + 2j, 0j], [1, 5]])
def test_histograms_of_odd_tensors(values: list[Any]) -> None:
    tensor = torch.tensor(values)
    found = histogram(tensor)
    assert sum(found.counts) + found.bad == tensor.numel()


@pytest.mark.filterwarnings("ignore")
def test_what_is_seen_goes_into_event_files(net: Any, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    graph, x, y, _, loss, train, _ = net
    with tfnb.summary.Writer(tmp_path) as writer:
        seen = tfnb.watch(loss, "conv1.bias:hist", every=1, writer=writer, graph=graph)
        for a, b in batches(3):
            tfnb.run(train, {x: a, y: b})
        seen.stop()
    read = accumulators.EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    steps, values = zip(*seen.courses["loss"].points, strict=True)
    assert [e.value for e in read.Scalars("loss")] == pytest.approx(values) and steps == (1, 2, 3)
    assert [e.step for e in read.Histograms("conv1.bias")] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore")
def test_values_that_are_not_finite_stop_no_run_that_writes_event_files(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tfnb.record("odd") as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = x / x
    with tfnb.summary.Writer(tmp_path) as writer:
        seen = tfnb.watch("y:hist", every=1, writer=writer, graph=graph, show=False)
        for values in ([0.0, 0.0], [0.0, 2.0]):
            assert tfnb.run(y, {x: torch.tensor(values)})[0].isnan()
        seen.stop()
    read = accumulators.EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    (event,) = read.Histograms("y")
    assert event.step == 2 and event.histogram_value.num == 1
