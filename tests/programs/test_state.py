"""Random programs over state: Variables, Parameters and buffers, written and read in one or two cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
from tests.recording.test_cells import Notebook

# Each step is a line for the cell, and what it means in plain Python on the dict ``s`` of states; ``{n}`` is a number
# of the line's own, ``{k}`` a drawn number.
STEPS: dict[str, tuple[str, str]] = {
    "assign": ("v.assign(v * {k} + 1)", "s['v'] = s['v'] * {k} + 1"),
    "assign input": ("v.assign(x.sum(0))", "s['v'] = x.sum(0)"),
    "assign_add": ("v.assign_add(x.sum(0) * {k})", "s['v'] = s['v'] + x.sum(0) * {k}"),
    "assign_sub": ("v.assign_sub(p.detach())", "s['v'] = s['v'] - s['p']"),
    "scatter_add": (
        "v.scatter_add(torch.tensor([0, 2, 0]), torch.full((3,), {k}.0))",
        "s['v'] = s['v'].index_add(0, torch.tensor([0, 2, 0]), torch.full((3,), {k}.0))",
    ),
    "scatter_update": (
        "v.scatter_update(torch.tensor([1]), x[:1, 0] + {k})",
        "s['v'] = s['v'].index_copy(0, torch.tensor([1]), x[:1, 0] + {k})",
    ),
    "parameter add_": (
        "with torch.no_grad(): p.add_(x.mean(0), alpha={k})", "s['p'] = s['p'].add(x.mean(0), alpha={k})"
    ),
    "parameter copy_": ("with torch.no_grad(): p.copy_(v * 2)", "s['p'] = s['v'] * 2"),
    "parameter row": ("with torch.no_grad(): p[1:] *= {k}", "s['p'] = torch.cat([s['p'][:1], s['p'][1:] * {k}])"),
    "buffer mul_": ("m(lambda b: b.mul_({k}))", "s['buf'] = s['buf'] * {k}"),
    "buffer row": ("m(lambda b: b[:1].copy_(x.sum()))", "s['buf'] = torch.cat([x.sum()[None], s['buf'][1:]])"),
    "buffer copy_": ("m(lambda b: b.copy_(p.detach() - v))", "s['buf'] = s['p'] - s['v']"),
    "read": ("r{n} = v * {k} + p.detach()", "r['r{n}'] = s['v'] * {k} + s['p']"),
    "read buffer": ("r{n} = m(lambda b: b + v.read())", "r['r{n}'] = s['buf'] + s['v']"),
    "read alone": ("r{n} = v.read()", "r['r{n}'] = s['v']"),
}  # fmt: skip
SETUP = """
v = tfnb.Variable(torch.ones(3), name='v')
m = Applies()
m.p = p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
m.register_buffer('buf', torch.tensor([0.5, 1.0, 2.0]))
"""
step = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 2))


class Applies(torch.nn.Module):
    """A module whose forward applies a given function to its buffer."""

    def forward(self, function: Any) -> Any:
        return function(self.buf)


@dataclass
class Plain:
    """The meaning of the lines in plain Python."""

    lines: list[str]
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = {"v": torch.ones(3), "p": torch.tensor([1.0, 2.0, 3.0]), "buf": torch.tensor([0.5, 1.0, 2.0])}

    def run(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """One run of all lines; returns the values read."""
        names: dict[str, Any] = {"torch": torch, "x": x, "s": self.state, "r": {}}
        exec("\n".join(self.lines), names)
        return names["r"]


def written(steps: list[tuple[str, int]], first: int = 0) -> tuple[list[str], list[str]]:
    """The lines of the cell, and their meaning; numbered from ``first``."""
    pairs = [[text.format(n=n, k=k) for text in STEPS[name]] for n, (name, k) in enumerate(steps, first)]
    return [cell for cell, _ in pairs], [plain for _, plain in pairs]


def opened(name: str) -> Notebook:
    notebook = Notebook(name)
    notebook.names["Applies"] = Applies
    exec(SETUP, notebook.names)
    notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')")
    return notebook


def values(notebook: Notebook) -> dict[str, torch.Tensor]:
    names = notebook.names
    with torch.no_grad():
        return {"v": names["v"].storage.clone(), "p": names["p"].clone(), "buf": names["m"].buf.clone()}


def everything(graph: tfnb.Graph, reads: list[str]) -> list[Any]:
    """Fetches that run every write of the graph, and the reads by name."""
    writes = [node.value(0) for node in graph.nodes if node.op.startswith("tfnb.assign")]
    return [*reads, *writes]


def agree(notebook: Notebook, plain: Plain, graph: tfnb.Graph, where: str) -> None:
    """Two runs of everything are two runs of plain Python."""
    reads = [name for name in notebook.names if name.startswith("r") and name[1:].isdigit()]
    for turn in (1, 2):
        x = torch.arange(6.0).view(2, 3) * turn / 4
        got = dict(zip(reads, graph_run(graph, [notebook.names[r] for r in reads], x), strict=True))
        want = plain.run(x)
        for name in reads:
            torch.testing.assert_close(got[name], want[name], msg=lambda text, n=name: f"{where}, {n}: {text}")
        for name, value in values(notebook).items():
            torch.testing.assert_close(value, plain.state[name], msg=lambda text, n=name: f"{where}, {n}: {text}")


def graph_run(graph: tfnb.Graph, reads: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    fetches = everything(graph, reads)
    return tfnb.Session(graph).run(fetches, {"x": x})[: len(reads)] if fetches else []


@settings(deadline=None, max_examples=20)
@given(st.lists(step, min_size=1, max_size=7))
def test_one_cell_of_state_is_plain_python(steps: list[tuple[str, int]]) -> None:
    notebook = opened("state")
    cell, meaning = written(steps)
    graph = notebook.run("2", "\n".join(cell))
    agree(notebook, Plain(meaning), graph, "; ".join(cell))


@settings(deadline=None, max_examples=20)
@given(st.lists(step, min_size=1, max_size=4), st.lists(step, min_size=1, max_size=4))
def test_two_cells_of_state_are_plain_python(one: list[tuple[str, int]], two: list[tuple[str, int]]) -> None:
    notebook = opened("states")
    cells, meanings = written(one)
    more, others = written(two, len(one))
    notebook.run("2", "\n".join(cells))
    graph = notebook.run("3", "\n".join(more))
    agree(notebook, Plain([*meanings, *others]), graph, "; ".join([*cells, "||", *more]))


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(st.lists(step, min_size=2, max_size=7))
def test_a_read_pulls_the_writes_above_it_and_no_others(steps: list[tuple[str, int]]) -> None:
    """Inside one cell: fetching one read alone gives what it sees in program order."""
    steps = [*steps, ("read alone", 1)]
    notebook = opened("pulled")
    cell, meaning = written(steps)
    graph = notebook.run("2", "\n".join(cell))
    x = torch.arange(6.0).view(2, 3) / 4
    for n, (name, _) in enumerate(steps):
        if not name.startswith("read"):
            continue
        fresh = opened("fresh")
        graph = fresh.run("2", "\n".join(cell))
        got = tfnb.Session(graph).run(fresh.names[f"r{n}"], {"x": x})
        want = Plain(meaning[: n + 1]).run(x)[f"r{n}"]
        torch.testing.assert_close(got, want, msg=lambda text: f"{'; '.join(cell)}: {text}")
