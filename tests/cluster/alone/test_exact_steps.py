"""The warning of a training that is exact: which ops one task does, and why the training sums in mid-step."""

from __future__ import annotations

import pytest
import torch

import tfnb
from tfnb.cluster.notebook.exact_steps import ExactSteps
from tfnb.passes import step_graph


def no_plans(step):
    raise AssertionError("a warning places nothing")


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_warning_says_who_chose_exact_sums(is_asked):
    w = tfnb.Variable(torch.ones(3), name="w")
    with tfnb.record("sorted") as graph:
        x = tfnb.placeholder(torch.randn(8, 3), name="x")
        loss = (x @ w).sort().values[:4].sum()
        train = tfnb.train.SGD(0.1).minimize(loss)
    step = step_graph(graph, (train.value,), (x.value,))
    note = ExactSteps(step, lambda: [0, 1], no_plans, is_asked).note
    assert "sort" in note and "test_exact_steps.py" in note and "cannot be divided by rows" in note
    assert note.startswith("exact=True: ") is is_asked
    assert ("exact=False averages" in note) is not is_asked
    assert ("the loss is no mean over rows" in note) is not is_asked
