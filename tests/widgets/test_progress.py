"""The panel of a long run, as text and as widgets."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from tfnb.widgets import ProgressPanel, progress

FALLING = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    out = io.StringIO()
    panel = ProgressPanel(1000, "digits", stream=out)
    for step in (100, 200):
        panel.update(step, {"loss": 1 / step}, rate=50.0)
    panel.finish("1000 steps")
    assert out.getvalue() == (
        "\rdigits: step 100/1000 · 50/s · 18 s left · loss 0.01"
        "\rdigits: step 200/1000 · 50/s · 16 s left · loss 0.005"
        "\rdigits: 1000 steps · loss 0.005\x1b[K\n"
    )


def test_without_a_total_or_rate_nothing_is_promised() -> None:
    panel = ProgressPanel(None, "run", stream=io.StringIO())
    panel.update(7)
    assert panel.status() == "run: step 7"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_shown_but_not_drawn(value: float) -> None:
    panel = ProgressPanel(10, "run", stream=io.StringIO())
    panel.update(3, {"loss": value}, curve=[{"step": step, "loss": x} for step, x in enumerate([1.0, value, 2.0])])
    assert str(value) in panel.table() and "<polyline" in panel.table()
    assert not re.search("points=.[^>]*(nan|inf)", panel.table())


def test_a_metric_of_the_end_of_an_epoch_stands_beside_those_of_each_step() -> None:
    panel = ProgressPanel(10, "run", stream=io.StringIO())
    panel.update(2, {"loss": 1.0, "val_loss": 1.5}, curve=FALLING)
    assert "val_loss" in panel.table() and "1.5" in panel.table() and panel.table().count("<polyline") == 1


def test_names_are_text() -> None:
    panel = ProgressPanel(10, "<run>", stream=io.StringIO())
    panel.update(2, {"<script>": 2.0}, curve=[{"step": 1, "<script>": 1.0}, {"step": 2, "<script>": 2.0}])
    assert "<script>" not in panel.table() and "&lt;script&gt;" in panel.table()


class Place:
    """Stands for a display of a notebook."""

    def __init__(self) -> None:
        self.updates: list[Any] = []

    def update(self, shown: Any, raw: bool = False) -> None:
        assert raw
        self.updates.append(shown)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Place]:
    """A notebook's displays."""
    shown: list[Any] = []
    place = Place()

    def display(thing: Any, raw: bool = False, display_id: bool = False) -> Place | None:
        assert raw
        shown.append(thing)
        return place if display_id else None

    monkeypatch.setattr(progress, "_in_notebook", lambda: True)
    monkeypatch.setattr(progress, "display", display)
    return shown, place


def test_a_notebook_gets_one_display_renewed_in_place(notebook: tuple[list[Any], Place]) -> None:
    shown, place = notebook
    panel = ProgressPanel(100, "digits <x>")
    assert shown == []
    for step in (10, 20, 30):
        panel.update(step, {"loss": 1 / step}, rate=5.0, curve=FALLING)
    (bundle,) = shown
    assert bundle["text/plain"] == "digits <x>: step 10/100 · 5/s · 18 s left · loss 0.1"
    box = panel._front._box
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == box.model_id
    bar, status = box.children[0].children
    assert (bar.value, bar.max) == (30, 100)
    assert status.value == "digits &lt;x&gt;: step 30/100 · 5/s · 14 s left"
    assert "<polyline" in box.children[1].value and place.updates == []


def test_the_final_state_is_static(notebook: tuple[list[Any], Place]) -> None:
    _, place = notebook
    panel = ProgressPanel(100, "digits")
    panel.update(50, {"loss": 0.5})
    box = panel._front._box
    panel.finish("100 steps in 2 s", {"loss": 0.25}, FALLING)
    (final,) = place.updates
    html = final["text/html"]
    assert "digits: 100 steps in 2 s" in html and "0.25" in html and "<polyline" in html and "<script" not in html
    assert final["text/plain"] == "digits: 100 steps in 2 s · loss 0.25"
    assert box.comm is None  # the widgets are gone


def test_a_run_that_showed_nothing_still_shows_its_end(notebook: tuple[list[Any], Place]) -> None:
    shown, _ = notebook
    ProgressPanel(100, "digits").finish("done")
    assert "digits: done" in shown[0]["text/html"] and shown[0]["text/plain"] == "digits: done"
