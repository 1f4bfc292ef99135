"""What comes before sizes that data decide is compiled as a whole; what comes behind runs as it was generated."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.execution import lower
from tfnb.execution.tiers import compiled_loops
from tfnb.execution.tiers.native.exportable import split


class Words(nn.Module):
    """A table and two layers that guess the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 50))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.table(words[:, :-1])).flatten(0, 1), words[:, 1:].flatten())


def test_a_table_is_updated_behind_the_half_that_is_compiled() -> None:
    torch.manual_seed(0)
    model, words = Words(), torch.randint(50, (4, 7))
    with tfnb.record() as graph:
        x = tfnb.placeholder(words, shape=(4, 7))
        loss = model(x)
        step = tfnb.train.Adagrad(0.1).minimize(loss)
    program = lower(graph, [loss.value, step.value], [x.value])
    found = split(program.undonated())
    assert not isinstance(found, str) and found.rest is not None
    parts = found.first.module, found.rest
    names = [[str(node.target) for node in part.graph.nodes if node.op == "call_function"] for part in parts]
    assert "tfnb.coalesce.default" in names[1] and len(names[1]) < 8 < len(names[0])
    args = [words, *(variable.storage for variable in program.variables), 0]
    for got, wanted in zip(parts[1](*parts[0](*args)), program.forward(*args), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert got is wanted or not any(wanted is arg for arg in args)  # what is updated in place is the Variable's own


def test_code_with_static_sizes_is_one_piece() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(4, 3))
        y = (x * 2).reshape(-1).sum()
    program = lower(graph, [y.value], [x.value])
    assert split(program) == (program, None, "")


@pytest.mark.skipif(compiled_loops.obstacle() is not None, reason="nothing can be compiled")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_training_a_table_is_compiled_and_equals_eager() -> None:
    torch.manual_seed(0)
    model, words = Words(), torch.randint(50, (4, 7))
    twin = copy.deepcopy(model)
    with tfnb.record() as graph:
        x = tfnb.placeholder(words, shape=(4, 7))
        loss = model(x)
        step = tfnb.train.Adagrad(0.1).minimize(loss)
    session, optimizer = tfnb.Session(graph, compile="now"), torch.optim.Adagrad(twin.parameters(), 0.1)
    for _ in range(3):
        got, _ = session.run([loss, step], {x: words})
        optimizer.zero_grad()
        wanted = twin(words)
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(got, wanted.detach())
    assert ": compiled; " in session.status()[0]
    assert re.search(r"; the rest is generated code: data decide the sizes of \S*coalesce", session.status()[0])
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
