"""HTML that is renewed in place, with a slider over its earlier states by step. Knows no cluster and no graph."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import anywidget
import traitlets
from IPython import get_ipython
from IPython.display import display

from tfnb.widgets.graph_widget import script
from tfnb.widgets.live_plot import LivePlot

MOST = 120  # states that the slider has, of some 20 kB each


class State(NamedTuple):
    """One state: its number among all that were shown, its step, and its HTML."""

    number: int
    step: int
    html: str


class StateHistory:
    """The states of a course, evenly thinned: at most ``most``, the first and the newest always among them.

    >>> history = StateHistory(most=4)
    >>> for step in range(10):
    ...     state = history.add(step, f"at {step}")
    >>> [state.step for state in history.states]
    [0, 4, 8, 9]

    A state of the same step as the newest one takes its place: while nothing is trained the history stays as it is.

    >>> history.add(9, "later").html, len(history.states)
    ('later', 4)
    """

    def __init__(self, most: int = MOST) -> None:
        self.states: list[State] = []
        self._most, self._every = most, 1

    def add(self, step: int, html: str) -> State:
        """Append the newest state."""
        states = self.states
        number = states[-1].number + 1 if states else 0
        if states and states[-1].step == step:
            number = states.pop().number
        elif states and states[-1].number % self._every:
            states.pop()  # was kept as the newest only
        if len(states) >= self._most:
            self._every *= 2
            states[:] = [state for state in states if state.number % self._every == 0]
        states.append(State(number, step, html))
        return states[-1]


class StepSlider:
    """A live place in the output of a cell, of HTML that says the state of now, with a slider over earlier steps.

    The page keeps the earlier states, so the slider answers while a cell trains. A front end without widgets and a
    saved notebook show the state of now as plain HTML; a terminal has the text once, a script nothing.
    """

    def __init__(self, step: int, html: str, text: str) -> None:
        self._twin = f"live-{uuid.uuid4().hex[:12]}"
        self._plot = LivePlot(self._static(html), text)
        self.history = StateHistory()
        self.history.add(step, html)
        self.widget: _StepSliderWidget | None = None
        if hasattr(get_ipython(), "kernel"):
            self.widget = _StepSliderWidget(self.history, html=html, twin=self._twin)
            bundle = self.widget._repr_mimebundle_()
            display(bundle[0] if isinstance(bundle, tuple) else bundle, raw=True)

    def show(self, step: int, html: str, text: str) -> None:
        """Show another state, from any thread."""
        state = self.history.add(step, html)
        self._plot.show(self._static(html), text)
        if self.widget is not None:
            kept = [each.number for each in self.history.states]
            self.widget.send({"kind": "state", **state._asdict(), "kept": kept})

    def _static(self, html: str) -> str:
        """The HTML with the name by which the widget hides it."""
        return f'<div data-tfnb="{self._twin}">{html}</div>'


class _StepSliderWidget(anywidget.AnyWidget):
    """The front end's half: ``html`` is the first state, ``twin`` the ``data-tfnb`` of the static output to hide."""

    _esm = script("markup.js", "step_slider.js")

    html = traitlets.Unicode().tag(sync=True)
    twin = traitlets.Unicode().tag(sync=True)

    def __init__(self, history: StateHistory, **traits: str) -> None:
        super().__init__(**traits)
        self._history = history
        self.on_msg(self._heard)

    def _heard(self, _widget: object, message: Any, _buffers: object) -> None:
        """Answer a page that begins with all states."""
        if message == {"kind": "past"}:
            self.send({"kind": "states", "states": list(self._history.states)})
