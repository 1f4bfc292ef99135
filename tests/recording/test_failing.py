"""A recording that fails leaves every tensor of earlier recordings as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests.recording.test_cells import Notebook

FIRST = """
x = tfnb.placeholder(torch.arange(12.0).view(4, 3), name='x')
v = tfnb.Variable(torch.ones(3), name='v')
h = x * 2
row, flat = h[0], h.view(-1)
k = h.clone()
late = v + 1
other = torch.zeros(3)
kept = other + h
part = weight[1:]
"""
SECOND = """
v.assign_add(torch.ones(3))
weight.data.fill_(7)
k = h * 3 + part.sum()
k.add_(1)
other = torch.ones(3) * 2
y = h.sum() + k.sum() + late.sum()
"""
NAMES = ("x", "h", "row", "flat", "k", "late", "kept", "part")


def facts(names: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: names[name] for name in NAMES}
    fed = {"x": torch.ones(4, 3)}
    return {
        name: (t.value, t.feed_value, tuple(t.shape), t.stride(), t.sample.tolist(), tfnb.run(t, fed).tolist())
        for name, t in tensors.items()
    }


def test_the_cell_of_these_tests_runs_whole() -> None:
    notebook = Notebook("whole")
    notebook.names["weight"] = torch.nn.Parameter(torch.ones(3))
    notebook.run("1", FIRST)
    notebook.run("2", SECOND)
    assert tfnb.run(notebook.names["y"], {"x": torch.ones(4, 3)}).isfinite()


@pytest.mark.parametrize("error", ["1 / 0", "raise KeyboardInterrupt"])
@pytest.mark.parametrize("line", range(len(SECOND.strip().splitlines()) + 1))
def test_raising_at_any_line_leaves_every_handle_as_it_was(line: int, error: str) -> None:
    notebook = Notebook(f"raises-{line}-{len(error)}")
    notebook.names["weight"] = torch.nn.Parameter(torch.ones(3))
    graph = notebook.run("1", FIRST)
    before, text, held = facts(notebook.names), graph.text(), dict(notebook.names)
    lines = SECOND.strip().splitlines()
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        notebook.run("2", "\n".join([*lines[:line], error, *lines[line:]]))
    assert facts(held) == before and graph.text() == text
    notebook.names.update(held)
    notebook.run("2", "again = h + row.sum() + kept")
    assert torch.equal(tfnb.run(notebook.names["again"], {"x": torch.ones(4, 3)}), torch.full((4, 3), 2.0) + 6 + 2)


def test_a_failing_commit_leaves_every_handle_as_it_was() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        h = x * 2
        tail = h[1:]
    before = (h.value, tail.value)
    with pytest.raises(tfnb.errors.FailedPrecondition), tfnb.record(graph):
        k = h + 1
        graph.commit(graph.contents.__class__((*graph.contents.nodes,)), removed=())
    assert (h.value, tail.value) == before
    assert tfnb.run([h, tail], {x: torch.ones(3)})[1].tolist() == [2, 2]
