"""How wide a text will be: Helvetica's advance widths, in thousandths of the font size.

The layout has no metrics of the reader's fonts; Arial and Liberation Sans share these, and boxes keep a margin.
"""

from __future__ import annotations

import unicodedata

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
