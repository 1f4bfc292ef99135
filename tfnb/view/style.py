"""Colours and fonts of a drawing. Light colours are attributes: a page may strip styles. A block is for dark pages."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

LEGIBLE = 0.75  # of the size of text: a drawing that is still wider is not made smaller, and scrolls


class Tone(NamedTuple):
    """Fill and line of a card, and the ink on it."""

    fill: str
    line: str
    ink: str


LIGHT = {
    "forward": Tone("#eaf1fe", "#6b9bf2", "#17325e"),
    "gradient": Tone("#f3ebfe", "#a274ec", "#3e1d78"),
    "update": Tone("#e2f6f0", "#33a98a", "#0b4a3b"),
    "variable": Tone("#fdf4d7", "#d3a518", "#5a4405"),
    "constant": Tone("#f1f2f4", "#a9b0bb", "#414853"),
    "input": Tone("#e8ecf2", "#3d4d66", "#1b2738"),
    "plain": Tone("#ffffff", "#b9c2cf", "#1f2937"),
    "failing": Tone("#fde3e1", "#dc2f26", "#7c130d"),
    # by share of the whole, the least first
    "heat0": Tone("#fdf8f0", "#d9cbb5", "#5d5242"),
    "heat1": Tone("#fdebc8", "#dcb25f", "#5c430f"),
    "heat2": Tone("#fbd49a", "#dd9130", "#5e3705"),
    "heat3": Tone("#f7ae72", "#d2691e", "#5b2603"),
    "heat4": Tone("#ef8161", "#b83a16", "#470f02"),
}
DARK = {
    "forward": Tone("#1c2d4d", "#5b8def", "#dbe7ff"),
    "gradient": Tone("#33224f", "#9f78e6", "#ebdfff"),
    "update": Tone("#12392f", "#35a98b", "#d0f4e8"),
    "variable": Tone("#40350f", "#c79f2a", "#fbeab4"),
    "constant": Tone("#2c3038", "#6f7885", "#d8dce3"),
    "input": Tone("#2b3442", "#aebace", "#eef2f8"),
    "plain": Tone("#1d2026", "#4a5260", "#e8ebf0"),
    "failing": Tone("#4c1714", "#f4665d", "#ffd9d6"),
    "heat0": Tone("#25221e", "#5b5347", "#d9d0c2"),
    "heat1": Tone("#3d3218", "#8a7136", "#f3e3bd"),
    "heat2": Tone("#58400f", "#b98524", "#fbe2b0"),
    "heat3": Tone("#763a10", "#dd7c33", "#ffe0c8"),
    "heat4": Tone("#8f2a13", "#f3694a", "#ffe1d9"),
}
PAPER, SOFT, WIRE, FRAME = "#fbfcfd", "#66707f", "#8d97a6", "#ffffff"
DARK_PAPER, DARK_SOFT, DARK_WIRE, DARK_FRAME = "#15171b", "#9aa4b3", "#76808f", "#1b1e23"
LIGHT_PAGE = "[data-jp-theme-light=true]"  # a notebook that is light although the system is dark
DARK_PAGES = "[data-jp-theme-light=false] .tfnb,.vscode-dark .tfnb,html[theme=dark] .tfnb"


def _paints(tones: dict[str, Tone], paper: str, soft: str, wire: str, frame: str) -> str:
    """The colours as CSS variables: ``--f0`` is forward's fill."""
    plain = f"--paper:{paper};--soft:{soft};--wire:{wire};--frame:{frame};"
    return plain + "".join(f"--{name}{i}:{colour};" for name, tone in tones.items() for i, colour in enumerate(tone))


def _rules(tones: Iterable[str]) -> str:
    rules = ".paper{fill:var(--paper)}.soft{fill:var(--soft)}.wire{stroke:var(--wire)}.port{fill:var(--wire)}"
    rules += ".frame{fill:var(--frame)}.halo{stroke:var(--frame)}.fold{stroke:var(--soft)}"
    for name in tones:
        rules += f".t-{name}>.card{{fill:var(--{name}0)}}.t-{name}>.card,.t-{name}>.frame{{stroke:var(--{name}1)}}"
        rules += f".t-{name},.t-{name}>.ink{{fill:var(--{name}2)}}.w-{name}{{stroke:var(--{name}1)}}"
    return ".tfnb " + rules.replace("}.", "}.tfnb .").replace(",.", ",.tfnb .")


def _sheet(names: Iterable[str]) -> str:
    """The style of a picture that has these tones."""
    light = _paints({name: LIGHT[name] for name in names}, PAPER, SOFT, WIRE, FRAME)
    dark = _paints({name: DARK[name] for name in names}, DARK_PAPER, DARK_SOFT, DARK_WIRE, DARK_FRAME)
    system = f"@media (prefers-color-scheme:dark){{.tfnb:not({LIGHT_PAGE} *){{{dark}}}}}"
    return f".tfnb{{{light}}}{system}{DARK_PAGES}{{{dark}}}{_rules(names)}"


SHEET = _sheet([name for name in LIGHT if not name.startswith("heat")])
HOT_SHEET = _sheet(LIGHT)

# -- fonts: the layout knows none of the reader's and takes the widths of Helvetica, in thousandths of the size ------

SANS = "Helvetica,Arial,sans-serif"
MONO = "Menlo,Consolas,monospace"

_ASCII = (  # U+0020 to U+007E
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 278 "
    "584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 667 944 "
    "667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 556 333 500 "
    "278 556 500 722 500 500 500 334 260 334 584"
)
_WIDTHS = {chr(32 + place): int(width) for place, width in enumerate(_ASCII.split())}
_BOLD = 1.18  # bold letters over regular ones
_ROOM = 1.12  # other fonts, DejaVu and Verdana, are wider


def width(text: str, size: float, *, bold: bool = False, mono: bool = False) -> float:
    """Width in pixels of one line at a font size in pixels.

    >>> round(width("conv1", 12), 1), width("conv1", 10, mono=True)
    (35.9, 30.5)
    """
    if mono:
        return sum(1.0 if _wide(c) else 0.61 for c in text) * size
    units = sum(_WIDTHS.get(c) or (1000 if _wide(c) else 600) for c in text)
    return units * size / 1000 * (_BOLD if bold else 1.0) * _ROOM


def _wide(char: str) -> bool:
    return not char.isascii() and unicodedata.east_asian_width(char) in "WF"
