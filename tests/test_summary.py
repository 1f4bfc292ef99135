"""Summaries, read back from real event files where TensorBoard is installed; without it the error says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import InvalidArgument, ShapeError


@pytest.mark.slow
def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'tensorboard' else find(name, *a)\n"
        f"import tfnb\n"
        f"try: tfnb.summary.Writer({str(tmp_path)!r})\n"
        "except tfnb.errors.NotFound as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "pip install 'tfnb[tensorboard]'" in done.stdout, done.stderr


def read_back(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder), size_guidance=dict.fromkeys(("images", "tensors"), 0)).Reload()


@pytest.mark.filterwarnings("ignore")
def test_every_kind_is_read_back_by_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with tfnb.record("shown") as graph:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        y = (x * 2).sum()
    with tfnb.summary.Writer(tmp_path) as writer:
        for step in range(3):
            writer.scalar("loss", tfnb.run(y, {x: torch.full((2, 3), float(step))}), step)
        writer.histogram("weights", torch.linspace(0, 1, 10), 1)
        writer.image("picture", torch.zeros(3, 4, 5), 1)
        writer.image("grey", torch.zeros(4, 5), 1)
        writer.text("note", "a *text*", 1)
        writer.graph(graph)
    found = read_back(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(0, 0.0), (1, 12.0), (2, 24.0)]
    assert found.Histograms("weights")[0].histogram_value.num == 10
    assert {(e.height, e.width) for name in ("picture", "grey") for e in found.Images(name)} == {(4, 5)}
    assert b"a *text*" in found.Tensors("note/text_summary")[0].tensor_proto.string_val[0]
    assert [node.name for node in found.Graph().node] == [node.name for node in graph.nodes]


@pytest.mark.filterwarnings("ignore")
def test_bad_input_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = tfnb.summary.Writer(tmp_path)
    with pytest.raises(ShapeError, match=r"one number, this is \[2\]"):
        writer.scalar("a", torch.ones(2), 0)
    with pytest.raises(InvalidArgument, match="of 2 values 1 are larger or not finite"):
        writer.histogram("a", [1.0, float("nan")], 0)
    with pytest.raises(ShapeError, match="1 or 3 channels"):
        writer.image("a", torch.ones(2, 4, 4), 0)
    for value in ("x", None, 1j):
        with pytest.raises(InvalidArgument, match="summary a "):
            writer.scalar("a", value, 0)
    for step in (1.5, None, "1"):
        with pytest.raises(InvalidArgument, match="summary a: step is the number of a step"):
            writer.scalar("a", 1.0, step)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="of 2 values 1 are larger"):
        writer.histogram("a", torch.tensor([1.0, 1e30]), 0)
    for image in (torch.full((4, 4), 200), torch.full((4, 4), torch.nan), torch.ones(0, 4)):
        with pytest.raises(InvalidArgument, match="an image is of finite floats"):
            writer.image("a", image, 0)
    with pytest.raises(InvalidArgument, match="a summary has a name"):
        writer.text("", "a", 0)
    for _ in range(2):
        writer.close()
    with pytest.raises(InvalidArgument, match="is closed"):
        writer.text("a", "b", 0)


def test_a_graph_is_asked_for_where_one_is_shown(tmp_path: Path) -> None:
    with tfnb.summary.Writer(tmp_path) as writer, pytest.raises(InvalidArgument, match=r"takes a tfnb\.Graph"):
        writer.graph(3)  # type: ignore[arg-type]
