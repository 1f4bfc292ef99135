"""A run with few clocks: the same results, parts by scope, predicted bytes, and errors that name the node."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument
from tfnb.execution import lower
from tfnb.execution.tracing.probes import MOST, parts


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * 2 - block(x).exp() * 0.1
        return x


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = Net()
    with tfnb.record("trained") as graph:
        x = tfnb.placeholder(torch.rand(4, 8), name="x")
        y = tfnb.placeholder(torch.zeros(4, dtype=torch.long), name="y")
        loss = F.cross_entropy(model(x), y)
        step = tfnb.train.Adam(1e-2).minimize(loss)
    return graph, [step, loss], {x: torch.rand(5, 8), y: torch.tensor([0, 1, 2, 3, 0])}


def test_results_and_variables_are_those_of_a_plain_run(trained) -> None:
    graph, fetches, feeds = trained
    runs = []
    start = {label: variable.value() for label, variable in graph.contents.variables.items()}
    for trace in (False, "parts"):
        for label, variable in graph.contents.variables.items():
            variable.set(start[label])
        session = tfnb.Session(graph, compile="off")
        losses = [session.run(fetches, feeds, trace=trace)[1] for _ in range(3)]
        runs.append([*losses, *(variable.value() for variable in graph.contents.variables.values())])
    for plain, traced in zip(*runs, strict=True):
        assert torch.equal(plain, traced)


def test_parts_follow_one_another_and_are_named_by_scopes(trained) -> None:
    graph, fetches, feeds = trained
    session = tfnb.Session(graph, compile="off")
    session.run(fetches, feeds, trace="parts")
    trace = session.trace
    assert trace is session.trace and "loss" in trace.title
    names = [event.name for event in trace.events]
    assert names[-1] == "commit" and any("blocks/0" in name for name in names), names
    assert any(name.startswith("gradients/") for name in names) and len(names) <= MOST + 1
    assert trace.events[0].start == 0 and trace.events[-1].end == trace.seconds
    assert all(a.end == b.start for a, b in zip(trace.events, trace.events[1:], strict=False))


def test_bytes_are_those_of_a_run_node_by_node(trained) -> None:
    graph, fetches, feeds = trained
    session = tfnb.Session(graph, compile="off")
    session.run(fetches, feeds, trace=True)
    exact = session.trace
    session.run(fetches, feeds, trace="parts")
    assert session.trace.events[-1].bytes == exact.events[-1].bytes
    assert session.trace.peak == pytest.approx(exact.peak, rel=0.2)  # held after a part, not within it


def test_parts_have_eight_nodes_or_more() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        for place in range(64):
            with tfnb.name_scope(f"turn{place}"):
                x = (x + place).exp().log()
    sizes = [len(part.nodes) for part in parts(lower(graph, [x.value], [graph.placeholders[0].value()]))]
    assert set(sizes[:-1]) == {9} and sum(sizes) == 3 * 64


def test_a_failing_kernel_names_its_line() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        i = tfnb.placeholder(torch.tensor([0]), name="i")
        y = x[i] * 2
    session = tfnb.Session(graph, compile="off")
    feeds = {x: torch.ones(3), i: torch.tensor([7])}
    with pytest.raises(InvalidArgument) as plain:
        session.run(y, feeds)
    with pytest.raises(InvalidArgument) as clocked:
        session.run(y, feeds, trace="parts")
    assert str(plain.value) == str(clocked.value) and plain.value.node
    with pytest.raises(InvalidArgument, match="trace is True, 'parts' or 'kernels'"):
        session.run(y, feeds, trace="regions")
