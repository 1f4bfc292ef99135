"""Random streams on a cluster: a run draws there what it draws here, and the position goes on with the session."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import tfnb


def test_draws_there_are_those_of_here(connect, tmp_path):
    with tfnb.record("noise") as graph:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        w = tfnb.Variable(torch.ones(3), name="w")
        fetches = [torch.randn_like(x) + x * w, F.dropout(x, 0.5), torch.randperm(7)]
    graph.seed = 5

    def drawn(session, runs=3):
        return [session.run(fetches, {x: torch.ones(4, 3)}) for _ in range(runs)]

    here = drawn(tfnb.Session(graph), 6)
    connect(2)
    session = tfnb.Session(graph)
    there = drawn(session)
    session.save(tmp_path / "v")
    there += drawn(tfnb.Session(graph).restore(tmp_path / "v"))
    for one, two in zip(here, there, strict=True):
        assert all(map(torch.equal, one, two))
