"""Functions of files that are edited under ``%autoreload 2``: the edited code is recorded, with its control flow."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.frontend.edited_files import edited_tree

PROGRAM = '''import functools

from torch import nn


def f(x):
    if x.sum() > 0: y = x * 2
    else: y = x * 10
    return y


class Other(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 7
        return x * 10


class Block(nn.Module):
    """A block."""

    def forward(self, x):
        def scaled(v):
            return v * 2 if v.sum() > 0 else v * 10

        return scaled(x)


def kept(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


@kept
def decorated(x):
    if x.sum() > 0:
        x = x * 2
    else:
        x = x * 10
    return x


def unedited(x):
    return x * 3 if x.sum() > 0 else x * 10
'''
_names = itertools.count()
FED = torch.ones(2, 3)


def edited(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))
    later = time.time() + 2 * next(_names)
    os.utime(path, (later, later))  # two edits within the clock's grain


def factors(notebook: Any, call: str) -> list[float]:
    notebook.ok(f"%%tfgraph A\nx = tfnb.placeholder(torch.ones(2, 3))\ny = {call}")
    x, y = notebook.names["x"], notebook.names["y"]
    assert not any("stays Python" in note for note in y.graph.notes), y.graph.notes
    return [float((tfnb.run(y, {x: fed}) / fed).mean()) for fed in (FED, -FED)]


def test_edited_functions_stay_staged(notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"edited_module_{os.getpid()}"
    path = tmp_path / f"{name}.py"
    path.write_text(PROGRAM)
    notebook.ok(f"%load_ext autoreload\n%autoreload 2\nimport {name} as m\nfrom {name} import f\nb = m.Block()")
    calls = ("f(x)", "m.f(x)", "b(x)", "m.Block()(x)", "m.decorated(x)")
    try:
        assert all(factors(notebook, call) == [2, 10] for call in calls)
        edited(path, "x * 2", "x * 4")
        edited(path, "v * 2", "v * 4")
        assert [factors(notebook, call) for call in calls] == [[4, 10]] * len(calls)
        edited(path, "import functools", "# more\n# lines\nimport functools")
        edited(path, "def f(x):\n", "def f(x):\n    if x.sum() < -100:\n        x = x * 1\n")
        assert [factors(notebook, call) for call in calls] == [[4, 10]] * len(calls)
        assert factors(notebook, "m.Other()(x)") == [7, 10]
        assert factors(notebook, "m.unedited(x)") == [3, 10]
        edited(path, "x * 4", "x / 0.5")
        assert factors(notebook, "m.f(x)") == [2, 10]
    finally:
        notebook.ok("%autoreload 0")


def test_code_that_was_not_loaded_again_is_not_taken_for_the_edited_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "loaded_once.py"
    path.write_text(PROGRAM)
    names: dict[str, Any] = {"__name__": "loaded_once"}
    exec(compile(PROGRAM, str(path), "exec"), names)
    assert edited_tree(names["f"].__code__).lineno == 6
    edited(path, "x * 2", "x + 2")
    with pytest.raises(CannotStage, match="edited since"):
        edited_tree(names["f"].__code__)
    assert edited_tree(names["unedited"].__code__).lineno == 46
