"""``%tfgraph on``: the cells below are recorded as if each began with ``%%tfgraph``, and stay plain Python.

A cell is recorded unless it starts with a magic, a shell command or a question: ``%tfrun loss`` runs as ever. Imports
nothing of tfnb.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable


class Sticky:
    """An input transformer of IPython: maps a cell's lines to the lines to run.

    is_running: whether a cell runs; what is transformed then is a part of it.

    >>> sticky = Sticky(is_running=lambda: False)
    >>> sticky.graph = "digits"
    >>> sticky(["loss = model(x)\\n"]), sticky(["%tfrun loss\\n"])
    (['%%tfgraph digits\\n', 'loss = model(x)\\n'], ['%tfrun loss\\n'])
    """

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self.graph: str | None = None  # which is recorded into; None: cells are not recorded
        self._is_running = is_running

    def __call__(self, lines: list[str]) -> list[str]:
        """The lines of one cell; cells that Python alone cannot read stay unchanged."""
        if self.graph is None or self._is_running():
            return lines
        code = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        is_plain = bool(code) and not code[0].startswith(("%", "!", "?")) and not code[-1].endswith("?")
        return [f"%%tfgraph {shlex.quote(self.graph)}\n", *lines] if is_plain else lines
