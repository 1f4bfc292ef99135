"""The course of one value as a small line chart, and numbers for people. Knows no widget library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

INK = "#5b8def"

Point = tuple[int, float]


def svg(name: str, points: Sequence[Point], wide: int = 240, high: int = 40) -> str:
    """A line chart whose title says the range; nothing for fewer than two values that are finite.

    >>> svg("loss", [(1, 2.0)]), svg("loss", [(1, 2.0), (2, 1.0)])[:35]
    ('', '<svg width="240" height="40" viewBo')
    """
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if len(points) < 2:
        return ""
    places = list(_scaled(points, wide - 8, high - 8))
    line = " ".join(f"{x + 4:.1f},{y + 4:.1f}" for x, y in places)
    x, y = places[-1]
    values = [value for _, value in points]
    span = f"{number(min(values))} to {number(max(values))}"
    return (
        f'<svg width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" role="img">'
        f"<title>{escape(name)}: {span}</title>"
        f'<polyline points="{line}" fill="none" stroke="{INK}" stroke-width="1.6" stroke-linejoin="round"/>'
        f'<circle cx="{x + 4:.1f}" cy="{y + 4:.1f}" r="2.6" fill="{INK}"/></svg>'
    )


def _scaled(points: Sequence[Point], wide: float, high: float) -> Iterator[tuple[float, float]]:
    low, top = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    for step, value in points:
        yield wide * (step - first) / ((last - first) or 1), high * (1 - (value - low) / ((top - low) or 1))


def number(value: object) -> str:
    """A float in at most four digits, anything else as it is.

    >>> number(0.123456), number(50.0), number(123456)
    ('0.1235', '50', '123456')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)
