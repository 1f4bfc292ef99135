"""Writes without a handle happen with the step of their block on a cluster, too; the oracle is eager torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import tfnb
from tests.recording.test_statements import DATA, World, eager, recorded, train
from tfnb.cluster.driver import Cluster

ROWS_ONLY = "copy_feed", "statistics", "in_branch"  # what they write is made of the rows that a task sees


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("statement", ["average", "clamp", "count", "count_variable", *ROWS_ONLY])
def test_a_run_there_does_the_statement(connect: Callable[..., Cluster], statement: str, place: str) -> None:
    world, _, x, _, made = recorded(statement, place, "by_torch")
    with connect(2):
        for batch in DATA:
            tfnb.run(made, {x: batch})
    torch.testing.assert_close(world.state(), eager(statement, place, "by_torch")[-1])


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("statement", ["average", "clamp", "count"])
def test_fit_there_does_the_statement(connect: Callable[..., Cluster], statement: str, place: str) -> None:
    world, _, x, loss, made = recorded(statement, place, "by_torch")
    with connect(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        tfnb.fit(made, {x: torch.cat(DATA)}, batch_size=4, epochs=1, shuffle=False, mode="sync", watch=[loss])
    torch.testing.assert_close(world.state(), eager(statement, place, "by_torch")[-1])


def test_everything_of_a_block_runs_there(connect: Callable[..., Cluster]) -> None:
    world, plain = World(), World()
    with tfnb.record():
        x = tfnb.placeholder(DATA[0])
        world.count.assign_add(x.sum())
        train(world, x, "average", "after", "by_torch")
        everything = tfnb.effects()
    with connect(2):
        for batch in DATA:
            tfnb.run(everything, {x: batch})
            plain.count.assign_add(batch.sum())
            train(plain, batch, "average", "after", "by_torch")
    torch.testing.assert_close(world.state(), plain.state())
