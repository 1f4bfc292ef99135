"""Random notebooks: cells with views and writes, run, edited, run again and failing, against plain torch.

The contract, as a model that knows nothing of recordings: a notebook's names are what its cells, each as it was last
run without an error, give when they run once from top to bottom, in the order in which they first ran. What an edit
above has made impossible to know says that it is stale, until its cell is run again. A cell that writes into a tensor
of another one is refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings

import tfnb
from tests.recording.test_cells import Notebook
from tfnb.errors import StaleNode, Unsupported

SAMPLE = torch.arange(12.0).view(4, 3) - 5
OTHER = torch.arange(12.0, 0, -1).view(4, 3) - 4
STATEMENTS = (
    "{new} = {a} * 2", "{new} = {a} + {b}.sum()", "{new} = {a}.clone()", "{new} = torch.relu({a}) - 1",
    "{new} = {a}[1:]", "{new} = {a}.t()", "{new} = {a}[..., 0]", "{new} = {a}.unsqueeze(0)", "{new} = {a}.detach()",
    "{a}.add_(1)", "{a}.mul_(2)", "{a}.zero_()", "{a}.add_({b}.sum())", "{a}.copy_({b}.mean() + torch.zeros_like({a}))",
    "{a}[0] = 3", "{a}.relu_()", "{new} = grad({b}, x)",
)  # fmt: skip
numbers = itertools.count()


class Model:
    """The cells in program order, by number: their sources, and what plain torch gives for them."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def names(self, cells: int) -> list[str]:
        """Names of the first ``cells`` cells."""
        return sorted(self.values(SAMPLE, self.sources[:cells]))

    @staticmethod
    def values(x: torch.Tensor, sources: list[str]) -> dict[str, torch.Tensor]:
        leaf = x.clone().requires_grad_()

        def grad(y: torch.Tensor, _: Any) -> torch.Tensor:
            (dx,) = (
                torch.autograd.grad(y.sum(), leaf, allow_unused=True, retain_graph=True) if y.requires_grad else (None,)
            )
            return torch.zeros_like(leaf) if dx is None else dx

        names: dict[str, Any] = {"torch": torch, "grad": grad, "x": leaf, "c_0": leaf * 1}
        for source in sources:
            exec(source, names)
        return {name: value.detach() for name, value in names.items() if name.startswith("c_")}


def grad(y: Any, x: Any) -> Any:
    return tfnb.gradients(y.sum(), [x], unconnected="zero")[0].detach() * 1


def source(data: st.DataObject, model: Model, cell: int) -> str:
    """A random cell that plain torch can run at its place."""
    lines: list[str] = []
    for line in range(data.draw(st.integers(1, 3))):
        known = sorted(model.values(SAMPLE, [*model.sources[:cell], "\n".join(lines)]))
        text = data.draw(st.sampled_from(STATEMENTS))
        mine = [name for name in known if name.startswith(f"c_{cell + 1}_")]
        a = data.draw(st.sampled_from(mine if mine and not text.startswith("{new}") else known))
        text = text.format(new=f"c_{cell + 1}_{line}", a=a, b=data.draw(st.sampled_from(known)))
        if runs(model, [*model.sources[:cell], "\n".join([*lines, text])]):
            lines.append(text)
    return "\n".join(lines) or "pass"


def runs(model: Model, sources: list[str]) -> bool:
    try:
        model.values(SAMPLE, sources)
    except (RuntimeError, IndexError, NameError):  # autograd's own limits of writes, shapes, names that are gone
        return False
    return True


def check(notebook: Notebook, model: Model, names: list[str], *, strict: bool) -> None:
    """Samples and runs equal the model; unless ``strict``, what is stale may say so."""
    shown, ran = model.values(SAMPLE, model.sources), model.values(OTHER, model.sources)
    session = tfnb.Session(tfnb.graph(notebook.graph))
    for name in names:
        try:
            got, sample = session.run(notebook.names[name], {"x": OTHER}), notebook.names[name].sample
        except StaleNode as error:
            assert not strict, f"{name}: {error}"
            assert "run In[" in str(error) and "again" in str(error)
            continue
        assert torch.equal(got, ran[name]), name
        assert torch.equal(sample, shown[name]), name


def is_taken(notebook: Notebook, cell: int, text: str) -> bool:
    """Run a cell; False where it is refused, which leaves everything as it was."""
    held = dict(notebook.names)
    try:
        notebook.run(str(cell + 1), text)
    except Unsupported as error:
        assert "a tensor that another cell recorded" in str(error)
        notebook.names.update(held)
        return False
    return True


def play(data: st.DataObject) -> None:
    model, notebook = Model(), Notebook(f"random-{next(numbers)}")
    notebook.names |= {"grad": grad, "sample": SAMPLE}
    notebook.run("0", "x = tfnb.placeholder(sample, shape=(4, 3), name='x')\nc_0 = x * 1")
    for _ in range(data.draw(st.integers(2, 6))):
        count = len(model.sources)
        action = data.draw(st.sampled_from(("new", "new", "again", "edit", "fail"))) if count else "new"
        cell = count if action == "new" else data.draw(st.integers(0, count - 1))
        text = model.sources[cell] if action == "again" else source(data, model, cell)
        note(f"# {action} cell {cell + 1}\n{text}")
        if action == "fail":
            held = dict(notebook.names)
            with pytest.raises((ZeroDivisionError, Unsupported)):
                notebook.run(str(cell + 1), f"{text}\n1 / 0")
            notebook.names.update(held)
        elif action == "edit":
            sources = [*model.sources[:cell], text, *model.sources[cell + 1 :]]
            if not runs(model, sources) or not is_taken(notebook, cell, text):
                continue
            model.sources = sources
            check(notebook, model, [n for n in model.names(count) if int(n.split("_")[1]) > cell + 1], strict=False)
            for below in range(cell + 1, count):
                notebook.run(str(below + 1), model.sources[below])
        elif is_taken(notebook, cell, text):
            model.sources[cell:] = [text, *model.sources[cell + 1 :]]
        check(notebook, model, model.names(len(model.sources)), strict=True)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_notebooks_are_what_their_cells_give_in_order(data: st.DataObject) -> None:
    play(data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_random_notebooks(data: st.DataObject) -> None:
    play(data)
