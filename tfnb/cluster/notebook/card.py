"""The status of a cluster, as text and as HTML with the same facts. Strings only; every name is data and is escaped.

The card says in plain words what runs where and how fast; addresses, memory and words of the inside open below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfnb.widgets.escaping import xml

_TABLE = "margin:.4em 0;color:inherit;font:inherit"


@dataclass(frozen=True, slots=True)
class CardRow:
    """One task or server."""

    name: str
    address: str
    state: str
    detail: str
    work: str = ""  # steps, rate and waiting of a task in a training; contents of a server
    holds: tuple[tuple[str, str], ...] = ()  # Variables of a server with their sizes, the largest first
    traffic: str = ""  # bytes a second of a server
    lines: tuple[str, ...] = ()  # the work of a task in few words, for its box
    busy: float | None = None  # the share of the time that a task computes
    links: tuple[tuple[str, float, str], ...] = ()  # of a task: other end, bytes a second, and in words
    queues: tuple[tuple[str, int, int | None], ...] = ()  # of a server: name, elements, capacity


@dataclass(frozen=True, slots=True)
class Status:
    """The result of `Cluster.status`; prints as text and shows as a card.

    ``details``: facts on how the cluster works inside. ``curve``: watched values of the latest `fit`, by step.
    ``step``: of the Variables on the servers.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    rows: tuple[CardRow, ...]
    notes: tuple[str, ...] = ()
    details: tuple[tuple[str, str], ...] = ()
    curve: Sequence[Mapping[str, float]] = ()
    step: int = 0

    def __str__(self) -> str:
        lines = [self.title, *(f"  {name}: {value}" for name, value in (*self.facts, *self.details))]
        for row in self.rows:
            said = "; ".join(filter(None, (row.work, row.detail)))
            lines.append(f"  {row.name:8} {row.state:6} {row.address:26} {said}".rstrip())
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(_html_row((row.name, row.address, row.detail)) for row in self.rows)
        table = f'<div style="overflow-x:auto"><table style="{_TABLE}">{rows}</table></div>'
        return self._card(f"<details><summary>details</summary>{_html_facts(self.details)}{table}</details>")

    def live_html(self, beside: str = "") -> str:
        """The card without the details, which would close whenever it is renewed. beside: HTML below the picture."""
        return self._card(f'{beside}<div style="opacity:.7">%tfcluster shows addresses, memory and more</div>')

    def _card(self, below: str) -> str:
        from tfnb.view import cluster_svg  # listed exception: a repr asks view

        rows = "".join(_html_row((row.name, row.state, row.work)) for row in self.rows)
        notes = "".join(f'<div style="color:#b45309">note: {xml(note)}</div>' for note in self.notes)
        return (
            '<div style="border:1px solid #8888;border-radius:6px;padding:.6em 1em;max-width:60em">'
            f'<div style="font-weight:bold;margin-bottom:.3em">{xml(self.title)}</div>{_html_facts(self.facts)}'
            f'<table style="{_TABLE}">{rows}</table>{cluster_svg(self.rows)}{notes}{below}</div>'
        )


def _html_facts(facts: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<div><b>{xml(name)}</b>: {xml(value)}</div>" for name, value in facts)


def _html_row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f'<td style="text-align:left">{xml(cell)}</td>' for cell in cells) + "</tr>"


def size(nbytes: float) -> str:
    """``nbytes`` for people.

    >>> size(999), size(2048), size(5e9)
    ('999 B', '2.0 kB', '5.0 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{int(nbytes)} B"
