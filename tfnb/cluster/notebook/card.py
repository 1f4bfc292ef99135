"""The status of a cluster, as text and as HTML with the same facts. Strings only; every name is data and is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfnb.escaping import xml


@dataclass(frozen=True, slots=True)
class CardRow:
    """One task or server."""

    name: str
    address: str
    state: str
    detail: str


@dataclass(frozen=True, slots=True)
class Status:
    """The result of `Cluster.status`; prints as text and shows as a card."""

    title: str
    facts: tuple[tuple[str, str], ...]
    rows: tuple[CardRow, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.title, *(f"  {name}: {value}" for name, value in self.facts)]
        lines += [f"  {row.name:8} {row.state:6} {row.address:26} {row.detail}".rstrip() for row in self.rows]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        facts = "".join(f"<div><b>{xml(n)}</b>: {xml(v)}</div>" for n, v in self.facts)
        rows = "".join(_html_row((row.name, row.state, row.address, row.detail)) for row in self.rows)
        notes = "".join(f'<div style="color:#b45309">note: {xml(note)}</div>' for note in self.notes)
        return (
            '<div style="border:1px solid #8888;border-radius:6px;padding:.6em 1em;max-width:60em">'
            f'<div style="font-weight:bold;margin-bottom:.3em">{xml(self.title)}</div>{facts}'
            f'<table style="margin:.4em 0">{rows}</table>{notes}</div>'
        )


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
