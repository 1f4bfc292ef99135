"""Random streams: seeds of a graph and of each op; the same draws on every executor; the position is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tfnb
from tfnb.errors import InvalidArgument


def noise() -> tuple[tfnb.Graph, list[tfnb.Tensor]]:
    """Draws of several kinds, beside and inside of a loop."""
    with tfnb.record("noise") as graph:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        first = torch.randn_like(x) + x
        dropped = F.dropout(x, 0.5)
        chosen = torch.randperm(7)
        looped = tfnb.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + torch.rand(())), (0, torch.zeros(())))[1]
    return graph, [first, dropped, chosen, looped]


def drawn(session: tfnb.Session, fetches: list[tfnb.Tensor], runs: int = 3) -> list[list[torch.Tensor]]:
    return [session.run(fetches, {"x": torch.ones(4, 3)}) for _ in range(runs)]


def alike(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True))


def test_runs_differ_and_sessions_agree() -> None:
    graph, fetches = noise()
    first = drawn(tfnb.Session(graph), fetches)
    assert not torch.equal(first[0][0], first[1][0])
    assert alike(first, drawn(tfnb.Session(graph), fetches))


def test_a_partition_draws_what_the_whole_step_draws() -> None:
    graph, fetches = noise()
    whole = drawn(tfnb.Session(graph), fetches)
    for at, fetch in enumerate(fetches):
        alone = drawn(tfnb.Session(graph), [fetch])
        assert all(torch.equal(run[at], one[0]) for run, one in zip(whole, alone, strict=True)), fetch.name


def test_the_dataflow_machine_draws_the_same() -> None:
    graph, fetches = noise()
    assert alike(
        drawn(tfnb.Session(graph, compile="off"), fetches[:3]),
        drawn(tfnb.Session(graph, executor="dataflow"), fetches[:3]),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_compiled_code_draws_the_same() -> None:
    graph, (*straight, looped) = noise()
    with tfnb.record(graph):  # enough beside the loop for a segment
        beside = straight[0]
        for _ in range(5):
            beside = torch.rand_like(beside).sin() * beside
    for fetches, word in ((straight, "compiled"), ([beside, looped], "the rest is generated code")):
        session = tfnb.Session(graph, compile="now")
        expected, got = drawn(tfnb.Session(graph, compile="off"), fetches), drawn(session, fetches)
        for one, two in zip(expected, got, strict=True):
            torch.testing.assert_close(two, one)
        assert word in session.status()[0], session.status()


def test_the_seed_of_a_graph_counts_from_the_next_run_on() -> None:
    graph, fetches = noise()
    sessions = tfnb.Session(graph), tfnb.Session(graph)
    before = drawn(sessions[0], fetches)
    graph.seed = 7
    after = drawn(sessions[1], fetches)
    assert not alike(before, after) and not alike(drawn(sessions[0], fetches), before)
    graph.seed = 0
    assert alike(drawn(tfnb.Session(graph), fetches), before)


def test_a_seed_that_is_no_int_is_refused() -> None:
    graph, _ = noise()
    with pytest.raises(InvalidArgument, match=r"seed of graph noise is an int, not 1\.5"):
        graph.seed = 1.5  # type: ignore[assignment]


def test_a_restored_session_draws_what_the_saved_one_would_have_drawn(tmp_path: Path) -> None:
    graph, fetches = noise()
    graph.seed = 11
    session = tfnb.Session(graph)
    drawn(session, fetches)
    session.save(tmp_path / "v")
    graph.save(tmp_path / "g.json")
    expected = drawn(session, fetches)
    graph.seed = 12
    assert alike(drawn(tfnb.Session(graph).restore(tmp_path / "v"), fetches), expected)
    assert alike(drawn(session.restore(tmp_path / "v"), fetches), expected)
    loaded = tfnb.Graph.load(tmp_path / "g.json")
    names = [fetch.name for fetch in fetches]
    assert alike(drawn(tfnb.Session(loaded).restore(tmp_path / "v"), names), expected)


def test_training_with_dropout_goes_on_bitwise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        step = tfnb.train.Adam(1e-2).minimize(model(x).square().mean())
    session = tfnb.Session(graph)
    data = torch.randn(12, 4, 3)

    def train(session: tfnb.Session, batches: torch.Tensor) -> list[torch.Tensor]:
        for batch in batches:
            session.run(step, {x: batch})
        return [p.detach().clone() for p in model.parameters()]

    train(session, data[:5])
    session.save(tmp_path / "v")
    expected = train(session, data[5:])
    found = train(tfnb.Session(graph).restore(tmp_path / "v"), data[5:])
    assert all(map(torch.equal, found, expected))
