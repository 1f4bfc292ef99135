"""A display that is renewed in place: HTML with its text, so that a saved notebook keeps the last state.

Takes strings. How often it is renewed is the caller's business.
"""

from __future__ import annotations

from typing import Any

from IPython import get_ipython
from IPython.display import display


class LivePlot:
    """One place in the output of a cell; a terminal has the text once, a script nothing."""

    def __init__(self, html: str, text: str) -> None:
        self._place: Any = None
        shell = get_ipython()
        if shell is not None:
            place = display(_bundle(html, text), raw=True, display_id=True)
            self._place = place if hasattr(shell, "kernel") else None

    def show(self, html: str, text: str) -> None:
        """Update the plot, from any cell."""
        if self._place is not None:
            self._place.update(_bundle(html, text), raw=True)


def _bundle(html: str, text: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": text}
