"""Heat: a drawing coloured by what a traced run measured for each node.

A trace is anything with ``events`` that have ``node``, ``seconds`` and ``bytes``, and ``inside``.
Imports the words and the box.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfnb.errors import InvalidArgument
from tfnb.view import facts
from tfnb.view.box import Box
from tfnb.view.inside import Path
from tfnb.view.style import LIGHT

LEVELS = 5  # of colour; a level is three times the share of the one below
BY = ("time", "bytes")
HOT = {"heat4": "over 33 %", "heat3": "11 %", "heat2": "4 %", "heat1": "1 %"}


@dataclass(frozen=True, slots=True)
class Heat:
    """Amounts by node id, of what total, and what they are: ``time`` in seconds or ``bytes``."""

    amounts: dict[int, float]
    total: float
    by: str = "time"
    lit: frozenset[int] = frozenset()  # nodes that ran, and nobody measured

    def of(self, box: Box) -> float | None:
        """The amount of all nodes of a box; None where nothing of it ran."""
        found = [self.amounts[node.id] for node in box.nodes if node.id in self.amounts]
        return sum(found) if found else None

    def tone(self, box: Box) -> str:
        """The colour of a box: by its share of the whole."""
        amount = self.of(box)
        if amount is None:
            return "heat0" if self.lit.issuperset(node.id for node in box.nodes) else "plain"
        return f"heat{level(self._share(amount))}"

    def words(self, box: Box) -> str:
        """``1.2 ms · 14 %``, or nothing."""
        amount = self.of(box)
        if amount is None:
            return ""
        text, percent = duration(amount) if self.by == "time" else facts.amount(amount), 100 * self._share(amount)
        return f"{text} · {percent:.0f} %" if percent >= 1 else f"{text} · <1 %"

    @property
    def legend(self) -> list[list[str]]:
        """Words and colours."""
        return [[f"{words} of the {self.by}", LIGHT[tone].line] for tone, words in HOT.items()]

    def _share(self, amount: float) -> float:
        return amount / self.total if self.total else 0.0


def heat(
    trace: Any, by: str = "time", lit: frozenset[int] = frozenset(), paths: Mapping[int, Path] | None = None
) -> Heat:  # fmt: skip
    """What a trace says of each node; a share of the time is one of the whole step's. Raises InvalidArgument.

    paths: of the drawing's nodes in loops and branches.
    """
    if by not in BY:
        raise InvalidArgument(f"a drawing is coloured by {' or by '.join(BY)}, not by {by!r}")
    amounts: dict[int, float] = {}
    places = {path: node for node, path in (paths or {}).items()}
    for event in trace.events:
        if event.node is not None:
            amount = event.seconds if by == "time" else event.bytes
            amounts[event.node.id] = amounts.get(event.node.id, 0.0) + amount
    for path, inside in trace.inside.items():  # in time they are part of the node around all of them
        node = places.get(path)
        if node is not None:
            amounts[node] = amounts.get(node, 0.0) + (inside.seconds if by == "time" else inside.bytes)
            if by == "time":
                amounts[path[0]] = max(0.0, amounts.get(path[0], 0.0) - inside.seconds)
    return Heat(amounts, trace.seconds if by == "time" else sum(amounts.values()), by, lit)


def level(share: float) -> int:
    """The colour of a share: above 1/3, 1/9, 1/27, 1/81, or below.

    >>> [level(share) for share in (0.5, 0.2, 0.05, 0.02, 0.001)]
    [4, 3, 2, 1, 0]
    """
    return sum(share > 3.0**-power for power in range(1, LEVELS))


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.00123), duration(2.5), duration(4e-6)
    ('1.23 ms', '2.50 s', '4 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"
