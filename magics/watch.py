"""The running notebook cell: its identity, and what to show once its result stands. May import IPython only."""

from __future__ import annotations

import hashlib
from typing import Any

from IPython.core.interactiveshell import InteractiveShell, display

BY_TEXT = "cell:#"  # how the owner of a cell without an id starts


class CellWatch:
    """Follows the shell's events.

    Identity is the front end's cell id. ``%%capture`` and its like run their body as a nested cell without an id, so
    the outermost one counts until it ends. A drawing waits for the end of the cell, which puts it below ``Out[n]``.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self._outermost: Any = None
        self._pending: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Start to follow."""
        self.shell.events.register("pre_run_cell", self._start)
        self.shell.events.register("post_run_cell", self._end)

    def detach(self) -> None:
        """Stop to follow."""
        self.shell.events.unregister("pre_run_cell", self._start)
        self.shell.events.unregister("post_run_cell", self._end)

    def owner(self, body: str) -> str:
        """Who records: ``cell:<id>``, or ``cell:#<digest of the body>`` where the front end sends no id."""
        cell_id = getattr(self._outermost, "cell_id", None)
        return f"cell:{cell_id}" if cell_id else BY_TEXT + hashlib.sha256(body.encode()).hexdigest()[:12]

    def show(self, *bundles: dict[str, Any]) -> None:
        """Display the bundles when the running cell ends; at once where no cell is running."""
        self._pending += bundles
        if self._outermost is None:
            self._publish()

    def _start(self, info: Any) -> None:
        if self._outermost is None:
            self._outermost = info

    def _end(self, result: Any) -> None:
        self._publish()
        if result is None or result.info is self._outermost:
            self._outermost = None

    def _publish(self) -> None:
        pending, self._pending = self._pending, []
        for bundle in pending:
            display(bundle, raw=True)
