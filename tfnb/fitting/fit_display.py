"""Where the progress of `fit` goes: the panel of a notebook, the line of a terminal, or the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfnb import widgets
from tfnb.widgets.curve import number

log = logging.getLogger("tfnb.fit")

Curve = Callable[[], Sequence[Mapping[str, float]]]  # of `Metrics`: made where it is shown

LOGGED_EVERY = 10.0  # seconds, where there is no terminal


class Log:
    """Log lines now and then, where nobody watches."""

    def __init__(self, total: int | None, label: str) -> None:
        self._total, self._label = total, label
        self._next = 0.0

    def update(self, step: int, metrics: Mapping[str, float], rate: float, curve: Curve, more: str = "") -> None:
        """A line, if the last one is some time ago."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOGGED_EVERY
            log.info("%s", line(self._label, step, self._total, metrics, rate, more))

    def say(self, text: str) -> None:
        """Once, when other code runs or is on its way, or when a task of a cluster came or left."""
        log.info("%s: %s", self._label, text)

    def finish(self, text: str, metrics: Mapping[str, float], curve: Curve) -> None:
        """The last line."""
        log.info("%s: %s", self._label, text)


class Panel:
    """The panel of a notebook or the line of a terminal, made when there is something to show."""

    def __init__(self, total: int | None, label: str) -> None:
        self._total, self._label = total, label
        self._panel: Any = None

    def say(self, text: str) -> None:
        """Show a text beside the steps."""
        if self._panel is None:
            self._panel = widgets.ProgressPanel(self._total, self._label)
        self._panel.note = text

    def update(self, step: int, metrics: Mapping[str, float], rate: float, curve: Curve, more: str = "") -> None:
        """Show or update the panel."""
        if self._panel is None:
            self._panel = widgets.ProgressPanel(self._total, self._label)
        self._panel.more = more
        self._panel.update(step, metrics, rate, curve())

    def finish(self, text: str, metrics: Mapping[str, float], curve: Curve) -> None:
        """Show the final state, kept in a saved notebook."""
        if self._panel is not None:
            self._panel.finish(text, metrics, curve())


def front(total: int | None, label: str) -> Panel | Log:
    """Where progress goes: the notebook or terminal, or the log."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    is_seen = hasattr(shell, "kernel") or (sys.stdout is not None and sys.stdout.isatty())
    return (Panel if is_seen else Log)(total, label)


def line(
    label: str, step: int, total: int | None, metrics: Mapping[str, float], rate: float, more: str = ""
) -> str:  # fmt: skip
    """``digits: step 312/1000  50.1/s  loss 0.123  13 s left``, and ``more``."""
    parts = [f"{label}: step {step}/{total}" if total else f"{label}: step {step}", f"{number(rate)}/s"]
    parts += [f"{name} {number(value)}" for name, value in metrics.items()]
    if total and rate:
        parts.append(f"{(total - step) / rate:.0f} s left")
    return "  ".join([*parts, more] if more else parts)
