"""Faces of a box: the card of a node or folded group, and the frame around an unfolded one.

SVG strings in the box's own coordinates, colours as attributes. Sizes come from `style`, positions from the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tfnb.view import facts
from tfnb.view.box import Box
from tfnb.view.colours import TONES, ChangeMarks, Heat, Sites, Vitals
from tfnb.view.inside import ARGUMENT
from tfnb.view.loop_sliders import LoopSliders
from tfnb.view.style import FRAME, LIGHT, MONO, SOFT, WIRE, width
from tfnb.view.wiring import Wiring
from tfnb.widgets.escaping import shorten, xml

PAD, ROW, HEAD = 10, 15, 32
TITLE = 44  # characters of a title
STRIP = 9  # pixels of a card for its strip of health
TRACK, SLIDER = 130, 330  # pixels: a slider's track, the slider with its words


class Word(NamedTuple):
    """A piece of one row of a card."""

    text: str
    size: float = 12
    bold: bool = False
    mono: bool = False
    soft: bool = False
    others: tuple[str, ...] = ()  # what a script puts in its place
    mark: str = ""  # how a script finds it

    @property
    def width(self) -> float:
        """Width in pixels."""
        return max(width(text, self.size, bold=self.bold, mono=self.mono) for text in (self.text, *self.others))


Row = list[Word]


@dataclass(frozen=True, slots=True)
class Face:
    """SVG of a box, in its own coordinates."""

    svg: str
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Painter:
    """Draws the boxes of one graph; ``failing`` are ids in red, ``grey`` ids in pale, ``colours`` is for the others."""

    wiring: Wiring
    failing: frozenset[int] = frozenset()
    grey: frozenset[int] = frozenset()
    colours: Heat | ChangeMarks | None = None
    sliders: LoopSliders | None = None
    badges: ChangeMarks | None = None
    vitals: Vitals | None = None
    sites: Sites | None = None

    def tone(self, box: Box) -> str:
        """The colour of a box: that of its nodes, if they agree."""
        if any(node.id in self.failing for node in box.nodes):
            return "failing"
        if self.colours is not None:
            return self.colours.tone(box)
        if not box.children:
            return facts.tone(box.node)
        tones = {facts.tone(node) for node in box.nodes if node.op not in facts.SMALL}
        if tones == {"forward"} and box.kind in ("line", "cell", "root"):
            return "plain"
        return tones.pop() if len(tones) == 1 else "plain"

    def card(self, box: Box) -> Face:
        """A node, or a folded group."""
        if box.is_small:
            return self._pill(box)
        rows = self._rows(box)
        left = PAD + (13 if box.children else 0)
        wide = max(56, round(max(map(_length, rows)) + left + PAD))
        strip = self.vitals.shares(box) if self.vitals is not None else []
        high = ROW * len(rows) + 11 + (STRIP if strip else 0)
        tone = self.tone(box)
        parts = [_card(tone, wide, high, 3 * stack, 6) for stack in ((2, 1) if box.times > 1 else ())]
        parts.append(_card(tone, wide, high, 0, high / 2 if tone == "input" else 6))
        parts += [_chevron(PAD, 13, opened=False)] if box.children else []
        parts += [_text(row, left, 17 + ROW * place) for place, row in enumerate(rows)]
        parts += [_strip(strip, left, high - STRIP - 3, wide - left - PAD)] if strip else []
        parts += [*self._stripe(box, high), *self._badge(box, wide)]
        return Face(self._group(box, tone, parts), wide, high)

    def frame(self, box: Box, inside: str, wide: float, high: float) -> Face:
        """An unfolded group around the drawing of its level, of the given size, below the title."""
        row, slider = self._header(box), self.sliders.label(box) if self.sliders is not None else None
        least = _length(row) + 2 * PAD + 13 + (SLIDER if slider else 0)
        wide = max(wide, least)
        tone = self.tone(box)
        parts = [_frame(tone, wide, high + HEAD, least), inside, _chevron(PAD, 16, opened=True)]
        parts.append(_text(row, PAD + 13, 20, halo=True))
        parts += [_slider(PAD + 13 + _length(row) + 14, *slider)] if slider else []
        parts += self._badge(box, wide)
        return Face(self._group(box, tone, parts), wide, high + HEAD)

    def _group(self, box: Box, tone: str, parts: Iterable[str]) -> str:
        around = self.wiring.root.at(box.key[:-1])
        is_pale = self._is_grey(box) and not (around.key and self._is_grey(around))  # not twice
        pale = ' opacity="0.35"' if is_pale else ""
        return f'<g class="face t-{tone}" fill="{LIGHT[tone].ink}"{pale}>{"".join(parts)}</g>'

    def _is_grey(self, box: Box) -> bool:
        return self.grey.issuperset(node.id for node in box.nodes)

    def _pill(self, box: Box) -> Face:
        node = box.node
        name = self.wiring.contents.shown(node) if node.op == "tfnb.placeholder" else facts.label(node)
        row = [Word(shorten(name, TITLE), 10, bold=True)]
        if node.op == "tfnb.read" or node.outputs[0].shape:
            row.append(Word(facts.specs(node, (0,)), 9, mono=True, soft=True))
        wide = max(28, round(_length(row) + 16))
        tone = self.tone(box)
        parts = [_card(tone, wide, 20, 0, 10), _text(row, 8, 13.5), *self._stripe(box, 20), *self._badge(box, wide)]
        return Face(self._group(box, tone, parts), wide, 20)

    def _badge(self, box: Box, wide: float) -> list[str]:
        """A dot at the corner of a changed box."""
        mark = self.badges.of(box) if self.badges is not None else None
        if mark is None:
            return []
        colour = LIGHT[TONES[mark]].line
        return [f'<circle class="badge" cx="{n(wide - 3)}" cy="3" r="5" fill="{colour}" stroke="{FRAME}"/>']

    def _stripe(self, box: Box, high: float) -> list[str]:
        """Colours of the places where a card's nodes are done, along its left edge; in a frame cards have theirs."""
        places = self.sites.of(box) if self.sites is not None else []
        colours, part = self.sites.colours if self.sites is not None else {}, (high - 8) / max(1, len(places))
        return [
            f'<rect class="site" x="-2" y="{n(4 + at * part)}" width="4" height="{n(part)}" fill="{colours[place]}"/>'
            for at, place in enumerate(places)
        ]

    # -- words --------------------------------------------------------------------------------------------

    def _rows(self, box: Box) -> list[Row]:
        rows = [self._title(box), [Word(text, 10, mono=True, soft=True) for text in self._result(box)]]
        rows.append([Word(text, 10, soft=True) for text in (_variables(box) or self._uses(box))])
        more = self.colours.words(box) if self.colours is not None else ""
        rows.append([Word(more, 10, bold=True, mark="took")] if more else [])
        iteration = self.sliders.words(box) if self.sliders is not None else []
        rows.append(
            [Word(iteration[0], 10, mono=True, others=tuple(iteration[1:]), mark="iteration")] if iteration else []
        )
        if box.code:
            rows.append([Word(shorten(box.code, TITLE), 10, mono=True, soft=True)])
        return [row for row in rows if row]

    def _title(self, box: Box) -> Row:
        if box.kind in ("line", "cell"):
            return [Word(shorten(box.title, TITLE + 20), 11, bold=True, mono=True)]
        row = [Word(shorten(box.title, TITLE), 12, bold=True)]
        if box.times > 1:
            row.append(Word(times(box), 12, bold=True, soft=True))
        if not box.children and box.node.op == "tfnb.assign":
            row = [Word("assign", 12), *row]
        if box.detail:
            row.append(Word(shorten(box.detail, 28), 11, soft=True))
        return row

    def _header(self, box: Box) -> Row:
        row = self._title(box)
        row += [Word(shorten(box.code, TITLE), 10, mono=True, soft=True)] if box.code else []
        return [*row, Word(shorten(box.where, 24), 10, soft=True)] if box.where else row

    def _result(self, box: Box) -> list[str]:
        """Name and spec of the box's result, or its number of nodes."""
        results = self.wiring.results(box)
        if len(results) != 1:
            return [facts.plural(len(box.nodes), "node")] if box.children else []
        node, places = results[0]
        is_named = node.op not in ("tfnb.placeholder", "tfnb.assign", ARGUMENT) and facts.given_name(node)
        name = shorten(self.wiring.contents.shown(node), 24) if is_named else ""
        return [word for word in (name, facts.specs(node, places)) if word]

    def _uses(self, box: Box) -> list[str]:
        """Names of distant inputs of a function or node."""
        if box.kind not in ("function", "op"):
            return []
        names = [shorten(facts.short_name(node), 20) for node in self.wiring.uses(box)]
        return [f"with {facts.joined(names, 2)}"] if names else []


def times(box: Box) -> str:
    """How often a repeated block occurs."""
    return f"\N{MULTIPLICATION SIGN}{box.times}"


def _variables(box: Box) -> list[str]:
    if not box.children:
        return []
    reads = dict.fromkeys(facts.variable_name(node) for node in box.nodes if node.op == "tfnb.read")
    if len(reads) > 3:
        return [facts.plural(len(reads), "variable")]
    return [", ".join(shorten(name.rpartition(".")[2], 20) for name in reads)] if reads else []


# -- shapes ---------------------------------------------------------------------------------------------------


def _length(row: Row) -> float:
    return sum(word.width for word in row) + 6 * (len(row) - 1)


def _card(tone: str, wide: float, high: float, shift: float, corner: float) -> str:
    paint = LIGHT[tone]
    moved = f' x="{n(shift)}" y="{n(-shift)}"' if shift else ""
    return (
        f'<rect class="card"{moved} width="{n(wide)}" height="{n(high)}" rx="{n(corner)}" '
        f'fill="{paint.fill}" stroke="{paint.line}"{_thick(tone)}/>'
    )


def _thick(tone: str) -> str:
    return ' stroke-width="2.5"' if tone == "failing" else ""


def _frame(tone: str, wide: float, high: float, least: float) -> str:
    return (
        f'<rect class="frame" width="{n(wide)}" height="{n(high)}" data-min="{n(least)}" rx="8" fill="{FRAME}" '
        f'stroke="{LIGHT[tone].line}"{_thick(tone)}/>'
    )


def _chevron(x: float, y: float, *, opened: bool) -> str:
    shape = f"M{n(x)},{n(y - 2)}l4,4l4,-4" if opened else f"M{n(x + 1)},{n(y - 4)}l4,4l-4,4"
    return f'<path class="fold" d="{shape}" fill="none" stroke="{SOFT}" stroke-width="1.6"/>'


def _text(row: Row, x: float, y: float, *, halo: bool = False) -> str:
    """Words on one line; with ``halo`` they stay readable where edges cross them."""
    around = f' paint-order="stroke" stroke="{FRAME}" stroke-width="4"' if halo else ""
    parts = []
    for word in row:
        kind = ("soft" if word.soft else "ink") + (" halo" if halo else "") + (f" {word.mark}" if word.mark else "")
        ink = f'class="{kind}"' + (f' fill="{SOFT}"' if word.soft else "") + around
        weight = ' font-weight="bold"' if word.bold else ""
        family = f' font-family="{MONO}"' if word.mono else ""
        place = f'x="{n(x)}" y="{n(y)}" font-size="{n(word.size)}"'
        parts.append(f"<text {ink} {place}{family}{weight}>{xml(word.text)}</text>")
        x += word.width + 6
    return "".join(parts)


def _strip(shares: Iterable[tuple[str, float]], x: float, y: float, wide: float) -> str:
    """Shares of numbers by kind, as lengths."""
    parts = []
    for colour, share in shares:
        parts.append(
            f'<path class="vital" d="M{n(x)},{n(y)}h{n(share * wide)}v4h{n(-share * wide)}z" fill="{colour}"/>'
        )
        x += share * wide
    return "".join(parts)


def _slider(x: float, loop: int, words: str) -> str:
    """The slider that selects iterations of a loop: the thumb on the left means all of them."""
    track = f'<rect class="track" y="7" width="{n(TRACK)}" height="4" rx="2" fill="{WIRE}"/>'
    grip = f'<rect class="grip" y="-4" width="{n(TRACK)}" height="26" fill="{FRAME}" fill-opacity="0"/>'
    thumb = f'<circle class="thumb" cx="0" cy="9" r="6" fill="{LIGHT["forward"].line}" stroke="{FRAME}"/>'
    text = f'<text class="soft" x="{n(TRACK + 14)}" y="12.5" font-size="10" fill="{SOFT}">{xml(words)}</text>'
    return f'<g class="iterations" data-loop="{loop}" transform="translate({n(x)},7)">{track}{grip}{thumb}{text}</g>'


def n(value: float) -> str:
    """A coordinate with at most one decimal.

    >>> n(12.0), n(0.25), n(-0.01)
    ('12', '0.2', '0')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
