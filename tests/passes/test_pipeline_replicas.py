"""Replicas of a pipeline, in one process: the whole batch, torch's autograd and one loop over all microbatches are the
oracles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tfnb
from tests.passes.test_microbatches import Net
from tests.weighted_losses import LOSSES, Trained, assert_same
from tfnb.errors import InvalidArgument, NonFinite, Unimplemented
from tfnb.graph.subgraph import nested
from tfnb.passes import step_graph
from tfnb.passes.flow import frames
from tfnb.passes.flow.pipeline_replicas import replicated
from tfnb.passes.flow.places import requested
from tfnb.passes.flow.step_flow import in_parts
from tfnb.passes.microbatches import in_microbatches

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def fitted(net: Net, **options: Any) -> Any:
    about = {"epochs": 2, "batch_size": 6, "shuffle": False, "watch": {"loss": net.loss, "count": net.count}}
    data = dict(zip(net.feeds, (net.x, net.y), strict=True))
    return tfnb.fit(net.train, data, **{**about, "microbatches": 4, "mode": "pipeline", **options})


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "dropout", "embedding", "clip", "adam"])
def test_replicas_train_as_one_loop_over_all_microbatches(kind: str, replicas: int) -> None:
    """With dropout, too: each microbatch draws what it draws there."""
    options: dict[str, Any] = {
        "plain": {}, "dropout": {"dropout": True}, "clip": {"clip": True},
        "embedding": {"embedding": True, "make": lambda: tfnb.train.SGD(0.3)},
        "adam": {"make": lambda: tfnb.train.Adam(0.01)},
    }[kind]  # fmt: skip
    one, many = Net(**options), Net(**options)
    expected, found = fitted(one), fitted(many, replicas=replicas)
    assert found.steps == expected.steps == 4
    assert found.history == [pytest.approx(entry, rel=1e-12) for entry in expected.history]
    for name, value in one.state.items():
        torch.testing.assert_close(many.state[name], value, **EXACT)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.integers(1, 9), microbatches=st.integers(2, 6), replicas=st.integers(2, 4), seed=st.integers(0, 99))
def test_gradients_of_replicas_are_those_of_autograd(rows: int, microbatches: int, replicas: int, seed: int) -> None:
    """Of batches that have fewer rows than microbatches, and fewer than replicas, too."""
    microbatches = max(microbatches, replicas)
    torch.manual_seed(seed)
    model, x, y = nn.Linear(3, 4).double(), torch.randn(rows, 3).double(), torch.randint(0, 4, (rows,))
    with tfnb.record():
        a, b = tfnb.placeholder(torch.ones(2, 3).double(), name="x"), tfnb.placeholder(torch.tensor([1, 2]), name="y")
        loss = F.cross_entropy(model(a), b)
        train = tfnb.train.SGD(1.0).minimize(loss)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(x), y).backward()
    gradients = [p.grad for p in model.parameters()]
    tfnb.fit(train, {a: x, b: y}, batch_size=rows, mode="pipeline", microbatches=microbatches, replicas=replicas)
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), old - gradient, **EXACT)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_replicas_are_weighted_as_whole_batches_are(name: str, replicas: int) -> None:
    """By totals of masks, of classes and of rows; in one batch all that some replicas see is ignored."""
    found = Trained(*LOSSES[name], microbatches=4, mode="pipeline", replicas=replicas)
    assert_same(found, Trained(*LOSSES[name]))


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_replica_that_sees_nothing_of_weight_adds_nothing(replicas: int) -> None:
    """Its mean over nothing is NaN."""
    model, other = nn.Linear(3, 4).double(), nn.Linear(3, 4).double()
    other.load_state_dict(model.state_dict())
    with tfnb.record():
        x, y = tfnb.placeholder(torch.ones(2, 3).double()), tfnb.placeholder(torch.tensor([1, 2]))
        train = tfnb.train.SGD(0.5).minimize(F.cross_entropy(model(x), y))
    for kept in range(4):  # only the rows of this microbatch count
        rows, labels = torch.randn(8, 3).double(), torch.arange(8) % 4
        labels[torch.arange(8) // 2 != kept] = -100
        tfnb.fit(train, {x: rows, y: labels}, batch_size=8, mode="pipeline", microbatches=4, replicas=replicas)
        gradients = torch.autograd.grad(F.cross_entropy(other(rows), labels), list(other.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(other.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), **EXACT)


def test_watched_extremes_and_counts_are_those_of_all_rows() -> None:
    net = Net()
    with tfnb.record(net.graph):
        watch = {"max": net.feeds[0].max(), "min": net.feeds[1].amin(), "count": net.count}
    found = fitted(net, batch_size=11, epochs=1, watch=watch, replicas=3)
    expected = {"max": net.x.max().item(), "min": net.y.min().item(), "count": (net.y > 0).sum().item()}
    assert {name: found.history[0][name] for name in expected} == expected


def test_running_statistics_are_those_of_the_first_replica() -> None:
    net = Net(norm=True)
    x, y, norm = net.x[:8], net.y[:8], nn.BatchNorm1d(5).double()
    weights = [p.detach().clone() for p in net.model[0].parameters()]
    tfnb.fit(net.train, dict(zip(net.feeds, (x, y), strict=True)), batch_size=8, shuffle=False, mode="pipeline",
             microbatches=4, replicas=2, exact=False)  # fmt: skip
    for microbatch in (0, 2):
        norm(F.linear(x[2 * microbatch : 2 * microbatch + 2], *weights))
    torch.testing.assert_close(net.model[1].running_mean, norm.running_mean, **EXACT)
    torch.testing.assert_close(net.model[1].running_var, norm.running_var, **EXACT)
    assert net.model[1].num_batches_tracked == 2


def test_what_a_step_writes_itself_is_told_to_be_the_first_replicas() -> None:
    with tfnb.record():
        w, seen = nn.Parameter(torch.ones(3).double()), tfnb.Variable(torch.zeros(3).double(), name="seen")
        x = tfnb.placeholder(torch.ones(2, 3).double(), name="x")
        train = tfnb.group(tfnb.train.SGD(0.1).minimize((x * w).square().mean()), seen.assign_add(x.sum(0)))
    with pytest.warns(UserWarning, match=r"writes seen itself.* of replicas=2 the writes of the first one count"):
        tfnb.fit(train, {x: torch.ones(8, 3).double()}, batch_size=8, mode="pipeline", microbatches=4, replicas=2)
    assert seen.value().tolist() == [4.0] * 3


class Staged:
    """A step of two stages, one of which has a loop, over microbatches and replicas."""

    def __init__(self, replicas: int, schedule: str = "1f1b") -> None:
        layers = [nn.Linear(4, 4) for _ in range(2)]
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.ones(2, 4), name="x")
            with tfnb.device("task:0"):
                h = torch.tanh(layers[0](x))
            with tfnb.device("task:1"):
                _, h = tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, layers[1](h)), (0, h))
                loss = h.square().mean()
            train = tfnb.train.SGD(0.1).minimize(loss)
        self.one = in_microbatches(step_graph(graph, [train.value], [x.value]), 4, schedule)
        self.step = replicated(self.one, replicas).step


def test_each_replica_asks_for_tasks_of_its_own() -> None:
    """Also inside of loops; nodes are the replica's own, and updates are done once."""
    made = Staged(3)
    nodes = made.step.graph.nodes
    assert {place.number for place in requested(nodes).values()} == set(range(6))
    one, two, three = ({inner.id for inner in nested(node)} for node in nodes if node.op == "tfnb.while")
    assert one and not (one & two or one & three or two & three)
    assert len({node.name for node in nodes}) == len(nodes)
    assert len(made.step.writes) == len(made.one.step.writes) == 4
    assert replicated(made.one, 1) is made.one


@pytest.mark.parametrize(("schedule", "windows"), [("1f1b", [2, 1, 2, 1]), ("gpipe", [4, 4, 4, 4])])
def test_stages_of_each_replica_have_the_windows_of_one_pipeline(schedule: str, windows: list[int]) -> None:
    """And nothing goes from replica to replica for each microbatch."""
    found = in_parts(Staged(2, schedule).step)
    loops = [number for number, frame in enumerate(found.flow.frames) if frame.schedule]
    assert [part.place.number for part in found.parts] == [0, 1, 2, 3] and len(loops) == 2
    for part, window in zip(found.parts, windows, strict=True):
        assert part.flow.frames[loops[part.place.number // 2]].parallel == window
        others = [edge for edge in part.sends if edge.to.number // 2 != part.place.number // 2]
        assert bool(others) == (part.place.number >= 2)  # sums of gradients; each task reads Variables by itself
        ops = [found.flow.ops[edge.port.op] for edge in others]
        assert all(op.frame == 0 or op.kind == frames.EXIT for op in ops)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "an int of at least 1, not 0"),
        ({"replicas": True}, "an int of at least 1, not True"),
        ({"replicas": 2.0}, "an int of at least 1, not 2.0"),
        ({"replicas": 5}, r"microbatches=4 among them, and some would have none: take microbatches=20"),
        ({"replicas": 2, "microbatches": 1}, r"microbatches=1 among them"),
        ({"replicas": 2, "mode": "sync"}, r"replicas=2 are of mode='pipeline': in mode 'sync' each compute task is"),
    ],
)
def test_wrong_replicas_are_refused(options: dict[str, Any], message: str) -> None:
    net = Net()
    before = net.state
    with pytest.raises(InvalidArgument, match=message):
        fitted(net, **options)
    assert all(torch.equal(value, net.state[name]) for name, value in before.items())


def test_a_step_that_is_not_finite_is_dropped_whole() -> None:
    net = Net()
    before = net.state
    net.x[4, 1] = torch.nan
    with pytest.raises(NonFinite):
        fitted(net, check="nan", replicas=2)
    assert all(torch.equal(value, net.state[name]) for name, value in before.items())


def test_a_memory_budget_makes_packs_and_no_replicas() -> None:
    with pytest.raises(Unimplemented, match="a pipeline has no memory_budget"):
        fitted(Net(), replicas=2, memory_budget="1GB")
