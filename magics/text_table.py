"""A small table with HTML and text reprs of equal facts: the result of %tfvars, %tfload, %tfbudget and %tfgraph ls.
Imports no room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfnb.widgets.escaping import xml

COLUMNS = ("name", "spec", "bytes", "where", "trainable")  # of Variables


def variable_row(label: str, variable: Any) -> tuple[Any, ...]:
    """One Variable as a row of `COLUMNS`."""
    spec = variable.spec
    return label, str(spec), math.prod(spec.shape) * spec.dtype.itemsize, str(variable.device), variable.trainable


class TextLines(str):
    """A string shown by a cell as its lines.

    >>> TextLines("a\\nb")
    a
    b
    """

    __repr__ = str.__str__


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names; iterates over its rows.

    >>> Table(("name", "bytes"), [("w", 40), ("bias", 4)])
    name  bytes
    w        40
    bias      4
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        numbers = [all(isinstance(row[i], int | float) for row in self.rows) for i in range(len(self.columns))]
        cells = [self.columns, *(tuple(map(str, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

        def line(row: tuple[str, ...]) -> str:
            padded = (
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(row, widths, numbers, strict=True)
            )
            return "  ".join(padded).rstrip()

        return "\n".join(map(line, cells))

    def _repr_html_(self) -> str:
        def row(tag: str, cells: tuple[Any, ...]) -> str:
            return "<tr>" + "".join(f"<{tag}>{xml(str(cell))}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row("td", cells) for cells in self.rows)
        return f"<table><thead>{row('th', self.columns)}</thead><tbody>{body}</tbody></table>"
