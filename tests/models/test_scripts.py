"""Training scripts as notebooks, with few changed lines, have the losses and weights of the plain scripts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.magics.conftest import Notebook, ipython, notebook
from tests.models.further_scripts import FURTHER
from tests.models.script import IMPORTS
from tests.models.scripts import SCRIPTS

__all__ = ["ipython", "notebook"]  # fixtures
ALL = SCRIPTS | FURTHER
ROOT = Path(__file__).parents[2]
PAGE, TIMES = ROOT / "notebooks" / "scripts.md", ROOT / "tests" / "benchmarks" / "results" / "scripts.json"


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tensors(space: dict[str, Any]) -> list[torch.Tensor]:
    state = space["model"].state_dict().values()
    return [torch.as_tensor(value).detach() for value in (*state, *space["log"])]


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ALL)
def test_a_script_trains_as_in_torch(notebook: Notebook, name: str) -> None:
    script = ALL[name]
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS + script.shared + script.plain, space)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cell in script.cells:
            notebook.ok(cell)
    got, want = tensors(notebook.names), tensors(space)
    assert len(got) == len(want) and all(value.isfinite().all() for value in want)
    for place, (here, there) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            here, there, rtol=1e-6, atol=1e-8, msg=lambda text, place=place: f"{place} of {len(want)}: {text}"
        )


def test_the_page_has_the_changed_lines_and_the_measured_times() -> None:
    page, rows = PAGE.read_text(), json.loads(TIMES.read_text())["rows"]
    for name, script in ALL.items():
        assert f"| {name} | {script.changed} | {rows[name]['processor time']:.2f} |" in page
