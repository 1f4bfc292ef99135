"""The course of one value as a small line chart, and numbers for people. Knows no widget library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tfnb.widgets.escaping import xml

INK = "#5b8def"
FONT = "font:13px Helvetica,Arial,sans-serif"
_CELL = 'style="text-align:left;padding:2px 14px 2px 0;vertical-align:middle;border:0"'
_BLOCKS = "▁▂▃▄▅▆▇█"

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
        f"<title>{xml(name)}: {span}</title>"
        f'<polyline points="{line}" fill="none" stroke="{INK}" stroke-width="1.6" stroke-linejoin="round"/>'
        f'<circle cx="{x + 4:.1f}" cy="{y + 4:.1f}" r="2.6" fill="{INK}"/></svg>'
    )


INKS = (INK, "#e07b39", "#3a9d5d", "#b04fb0", "#8a7a2f", "#4aa3b5")


def bands(
    name: str, curves: Mapping[str, Sequence[tuple[float, float, float]]], wide: int = 400, high: int = 160
) -> str:  # fmt: skip
    """Curves of (place, mean, deviation) with their bands and a legend; nothing where no value is finite.

    >>> bands("loss", {}), bands("loss", {"sync": [(1, 2.0, 0.1), (2, 1.0, 0.1)]})[:36]
    ('', '<svg width="400" height="160" viewBo')
    """
    good = {key: [p for p in points if all(map(math.isfinite, p))] for key, points in curves.items()}
    every = [point for points in good.values() for point in points]
    if not every:
        return ""
    low, top = min(y - d for _, y, d in every), max(y + d for _, y, d in every)
    end, span = max(x for x, _, _ in every) or 1, (top - low) or 1

    def at(x: float, y: float) -> str:
        return f"{4 + (wide - 8) * x / end:.1f},{4 + (high - 8) * (1 - (y - low) / span):.1f}"

    drawn = ""
    for number_of, (key, points) in enumerate(good.items()):
        ink = INKS[number_of % len(INKS)]
        edge = [at(x, y + d) for x, y, d in points] + [at(x, y - d) for x, y, d in reversed(points)]
        drawn += f'<polygon points="{" ".join(edge)}" fill="{ink}" fill-opacity="0.2"/>'
        drawn += f'<polyline points="{" ".join(at(x, y) for x, y, _ in points)}" fill="none" stroke="{ink}"/>'
        drawn += (
            f'<text x="{wide - 6}" y="{16 + 14 * number_of}" text-anchor="end" fill="{ink}" font-size="12" '
            f'font-family="Helvetica,Arial,sans-serif">{xml(key)}</text>'
        )
    return (
        f'<svg width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" role="img">'
        f"<title>{xml(name)}: {number(low)} to {number(top)}</title>{drawn}</svg>"
    )


def bars(name: str, counts: Sequence[float], low: float, high: float, wide: int = 240, tall: int = 40) -> str:
    """A histogram whose title says the range; nothing where there are no counts.

    >>> bars("w", [], 0.0, 1.0), bars("w", [1, 3], 0.0, 1.0)[:33]
    ('', '<svg width="240" height="40" view')
    """
    if not counts:
        return ""
    each, most = wide / len(counts), max(counts) or 1
    drawn = "".join(
        f'<rect x="{each * place:.1f}" y="{tall * (1 - count / most):.1f}" width="{each * 0.9:.1f}" '
        f'height="{tall * count / most:.1f}"/>'
        for place, count in enumerate(counts)
    )
    return (
        f'<svg width="{wide}" height="{tall}" viewBox="0 0 {wide} {tall}" role="img" fill="{INK}">'
        f"<title>{xml(name)}: {number(low)} to {number(high)}</title>{drawn}</svg>"
    )


def blocks(values: Sequence[float], most: int = 40) -> str:
    """The last of the values as a line of block characters, from the lowest to the highest.

    >>> blocks([0.0, 1.0, 2.0, 7.0]), blocks([3.0]), blocks([])
    ('▁▂▃█', '▁', '')
    """
    shown = [value for value in values if math.isfinite(value)][-most:]
    low, span = min(shown, default=0.0), (max(shown, default=0.0) - min(shown, default=0.0)) or 1
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in shown)


def _scaled(points: Sequence[Point], wide: float, high: float) -> Iterator[tuple[float, float]]:
    low, top = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    for step, value in points:
        yield wide * (step - first) / ((last - first) or 1), high * (1 - (value - low) / ((top - low) or 1))


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Names, texts and pictures (SVG) as HTML; nothing without rows."""
    drawn = "".join(
        f"<tr><th {_CELL}>{xml(name)}</th><td {_CELL}>{xml(text)}</td><td {_CELL}>{picture}</td></tr>"
        for name, text, picture in rows
    )
    return f'<table style="border-collapse:collapse;{FONT}">{drawn}</table>' if drawn else ""


def curves(points: Sequence[Mapping[str, float]]) -> str:
    """The last values of all metrics and their curves, as HTML; each point has its ``step``.

    >>> curves([]), curves([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]).count("<polyline")
    ('', 1)
    """
    names = [name for name in (points[-1] if points else {}) if name not in ("step", "epoch")]
    return table(
        (name, number(points[-1][name]), svg(name, [(int(point["step"]), point[name]) for point in points]))
        for name in names
    )


def number(value: object) -> str:
    """A float in at most four digits; other values unchanged.

    >>> number(0.123456), number(50.0), number(123456)
    ('0.1235', '50', '123456')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)
