"""The panel of a long run: a bar, the latest metrics and their curves, renewed in place.

Takes plain numbers and strings. How often it is renewed is the caller's business. Without a notebook it is one line
that a carriage return rewrites.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

import ipywidgets
from IPython import get_ipython
from IPython.display import display

from tfnb.widgets import curve as chart
from tfnb.widgets.curve import FONT, number
from tfnb.widgets.escaping import xml

Curve = Sequence[Mapping[str, float]]  # ``step`` and the metrics there


class ProgressPanel:
    """Shows how far a run is.

    total: steps, or None if that is not known. label: what is running. stream: where a line goes, also in a notebook;
    None: the notebook's panel or, without a notebook, a line on standard output.

    >>> import io
    >>> out = io.StringIO()
    >>> panel = ProgressPanel(10, "digits", stream=out)
    >>> panel.update(5, {"loss": 0.25}, rate=2.5)
    >>> panel.finish("10 steps in 4.0 s")
    >>> out.getvalue().split("\\r")[1:]
    ['digits: step 5/10 · 2.5/s · 2 s left · loss 0.25', 'digits: 10 steps in 4.0 s · loss 0.25\\x1b[K\\n']
    """

    def __init__(self, total: int | None, label: str, *, stream: TextIO | None = None) -> None:
        self.total, self.label = total, label
        self.step, self.rate = 0, 0.0
        self.metrics: dict[str, float] = {}
        self.curve: Curve = ()
        self.note = self.more = ""  # stand behind the steps
        self._front: _Front = _Notebook(self) if stream is None and _in_notebook() else _Line(stream or sys.stdout)

    def update(
        self, step: int, metrics: Mapping[str, float] | None = None, rate: float = 0.0, curve: Curve = ()
    ) -> None:  # fmt: skip
        """Show step, metrics (name -> number), rate (steps per second) and how the metrics went."""
        self.step, self.rate = step, rate
        self._take(metrics, curve)
        self._front.show(self)

    def _take(self, metrics: Mapping[str, float] | None, curve: Curve) -> None:
        self.metrics |= {name: float(value) for name, value in (metrics or {}).items()}
        self.curve = curve or self.curve

    def finish(self, text: str = "", metrics: Mapping[str, float] | None = None, curve: Curve = ()) -> None:
        """Leave the final state, with ``text``, as static output that a saved notebook keeps."""
        self._take(metrics, curve)
        self._front.finish(self, f"{self.label}: {text}" if text else self.status())

    def status(self) -> str:
        """``digits: step 312/1000 · 50.1/s · 14 s left``, with the note and further text."""
        parts = [f"{self.label}: step {self.step}" + (f"/{self.total}" if self.total else "")]
        if self.rate:
            parts.append(f"{number(self.rate)}/s")
        if self.rate and self.total:
            parts.append(f"{duration((self.total - self.step) / self.rate)} left")
        return " · ".join(filter(None, [*parts, self.note, self.more]))

    def line(self, status: str) -> str:
        """A status followed by the metrics, as text."""
        return " · ".join([status, *(f"{name} {number(value)}" for name, value in self.metrics.items())])

    def table(self) -> str:
        """The metrics and their curves, as HTML."""
        return chart.table(
            (name, number(value), chart.svg(name, [(int(p["step"]), p[name]) for p in self.curve if name in p]))
            for name, value in self.metrics.items()
        )


# -- where it is shown ----------------------------------------------------------------------------------------


class _Front(Protocol):
    def show(self, panel: ProgressPanel) -> None: ...

    def finish(self, panel: ProgressPanel, text: str) -> None: ...


class _Notebook:
    """A live widget during the run; at the end the same display holds plain HTML.

    Its text is a line, for logs and for front ends without HTML.
    """

    def __init__(self, panel: ProgressPanel) -> None:
        known = panel.total or 1
        self._bar = ipywidgets.IntProgress(max=known, layout=ipywidgets.Layout(width="260px"))
        self._status, self._table = ipywidgets.HTML(), ipywidgets.HTML()
        self._box = ipywidgets.VBox([ipywidgets.HBox([self._bar, self._status]), self._table])
        self._place: Any = None

    def show(self, panel: ProgressPanel) -> None:
        if self._place is None:
            made: Any = self._box._repr_mimebundle_()
            shown = {**made, "text/plain": panel.line(panel.status())}
            self._place = display(shown, raw=True, display_id=True)
        self._bar.value = min(panel.step, self._bar.max) if panel.total else 0
        self._bar.bar_style = "" if panel.total else "info"
        self._status.value = xml(panel.status())
        self._table.value = panel.table()

    def finish(self, panel: ProgressPanel, text: str) -> None:
        html = f'<div style="{FONT};padding:4px 0">{xml(text)}</div>{panel.table()}'
        final = {"text/html": html, "text/plain": panel.line(text)}
        if self._place is None:
            display(final, raw=True)
        else:
            self._place.update(final, raw=True)
        for widget in (self._box, *self._box.children[0].children, *self._box.children, self._bar):
            widget.close()


class _Line:
    """One line of a terminal, rewritten."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, panel: ProgressPanel) -> None:
        self._write(panel.line(panel.status()))

    def finish(self, panel: ProgressPanel, text: str) -> None:
        self._write(panel.line(text) + "\x1b[K\n")

    def _write(self, text: str) -> None:
        self._stream.write("\r" + text)
        self._stream.flush()


def _in_notebook() -> bool:
    return hasattr(get_ipython(), "kernel")


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(14.2), duration(130), duration(7300)
    ('14 s', '2 min 10 s', '2 h 1 min')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
