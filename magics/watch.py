"""The running notebook cell: its identity, and output to show after its result. Inspects recorded cells."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from IPython.core.interactiveshell import InteractiveShell, display

import tfnb

BY_TEXT = "cell:#"  # how the owner of a cell without an id starts


class CellWatch:
    """Follows the shell's events.

    Identity is the front end's cell id. ``%%capture`` and its like run their body as a nested cell without an id, so
    the outermost one counts until it ends. A drawing waits for the end of the cell, which puts it below ``Out[n]``.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self._outermost: object = None
        self._pending: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Start to follow."""
        self.shell.events.register("pre_run_cell", self._start)
        self.shell.events.register("post_run_cell", self._end)

    def detach(self) -> None:
        """Stop to follow."""
        self.shell.events.unregister("pre_run_cell", self._start)
        self.shell.events.unregister("post_run_cell", self._end)

    @property
    def is_running(self) -> bool:
        """Whether a cell runs."""
        return self._outermost is not None

    def owner(self, body: str) -> str:
        """Who records: ``cell:<id>``, or ``cell:#<digest of the body>`` where the front end sends no id."""
        cell_id = getattr(self._outermost, "cell_id", None)
        return f"cell:{cell_id}" if cell_id else BY_TEXT + hashlib.sha256(body.encode()).hexdigest()[:12]

    def show(self, *bundles: dict[str, Any]) -> None:
        """Display the bundles when the running cell ends; at once where no cell is running."""
        self._pending += bundles
        if self._outermost is None:
            self._publish()

    def _start(self, info: object) -> None:
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


def recorded_by(graph: tfnb.Graph) -> dict[str, Any]:
    """Name -> node, for nodes of cells identified by their text only."""
    nodes = graph.nodes if graph is not None else ()
    return {node.name: node for node in nodes if node.owner is not None and node.owner.key.startswith(BY_TEXT)}


def shadowed(graph: object, before: dict[str, Any], names: dict[str, Any]) -> Iterator[str]:
    """Report remains of an edited cell that the front end gave no id, and so cannot be recognised."""
    stays: dict[str, list[str]] = {}
    for name, old in before.items():
        new = names.get(name)
        if not isinstance(new, (tfnb.Tensor, tfnb.Operation)) or new.graph is not graph:
            continue
        if new.node is not old and old.id in graph.contents.by_id and old.source is not None:
            stays.setdefault(old.source.label, []).append(name)
    for label, both in stays.items():
        yield f"{label} recorded {', '.join(both)} too, and that stays in the graph; %tfgraph rm {label} removes it"
