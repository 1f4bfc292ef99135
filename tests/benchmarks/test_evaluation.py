"""Tables of published figures beside what runs here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import evaluation
from tests.benchmarks.evaluation import Figure

ROOT = Path(__file__).parents[2]


def figure() -> Figure:
    found = Figure("f0", "Figure 0", "ms", "nothing", ["1", "2"], equal="values, bitwise")
    return found.add("the paper", {1: 8.5}, mark="fig").add("here", {1: [3.0, 1.0, 2.0], 2: [4.0, 5.0]})


def test_columns_have_marks_medians_percentiles_and_counts():
    lines = figure().add("clock", {2: 7}, is_virtual=True).markdown().splitlines()
    assert lines[2] == "|  | the paper (read off the figure, 2 % on its axis) | here | clock (virtual clock) |"
    assert lines[4] == "| 1 | 8.5 | 2 (1.2 to 2.8, n=3) |  |" and lines[5] == "| 2 |  | 4.5 | 7 |"
    assert lines[-1] == "Compared: nothing. Equal first: values, bitwise."


def test_an_unknown_mark_is_an_error():
    with pytest.raises(KeyError):
        figure().add("recalled", {1: 1.0}, mark="rec").markdown()


def test_the_quick_form_writes_nothing_and_the_full_one_a_file_and_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "FOLDER", tmp_path / "evaluation")
    assert evaluation.sized("small", "large") == "small"
    figure().saved()
    assert not (tmp_path / "evaluation").exists() and "quick form" in figure()._repr_markdown_()
    monkeypatch.setattr(evaluation, "FULL", True)
    assert evaluation.sized("small", "large") == "large"
    figure().saved()
    stored = json.loads((tmp_path / "evaluation" / "f0.json").read_text())
    assert stored["columns"][1]["samples"] == {"1": [3.0, 1.0, 2.0], "2": [4.0, 5.0]} and stored["machine"]["torch"]
    page = (tmp_path / "evaluation" / "results.md").read_text()
    assert figure().markdown() in page and "never compared" in page


def test_a_figure_that_is_stored_gives_the_page_that_is_stored():
    folder = ROOT / "notebooks" / "evaluation"
    if (folder / "results.md").exists():
        page = evaluation.page(folder)
        assert (folder / "results.md").read_text() == page, "run python -m tests.benchmarks.evaluation"
    done = subprocess.run(
        [sys.executable, "-c", "from tests.benchmarks import evaluation; print(evaluation.FULL)"],
        capture_output=True, text=True, check=True, cwd=ROOT, env={"TFNB_EVALUATE": "full", "PATH": ""},
    )  # fmt: skip
    assert done.stdout.strip() == "True"
