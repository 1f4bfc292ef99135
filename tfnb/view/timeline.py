"""A traced run as HTML: bars in lanes, the live bytes below, and tables of the longest items.

Of a run on a cluster each place is a lane, and below them each link; arrows go from place to place, messages on links.

A trace is anything with the fields of `tfnb.execution.Trace`. Tooltips are ``title`` elements and need no script; the
script of the page only links bars to the boxes of the drawing above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tfnb.view import facts
from tfnb.view.colours import duration
from tfnb.view.face import n
from tfnb.view.style import LIGHT, PAPER, SANS, SHEET, SOFT, Tone, width
from tfnb.widgets.escaping import shorten, xml

WIDE, LEFT = 960.0, 8.0  # pixels: the picture, its margin
LANE, BAR, CURVE = 40.0, 20.0, 70.0
ROW = 23.0  # of bars in a loop
BARS = 3000  # most bars of a page; the shortest are left out first
LINK = 28.0  # height of a link's lane
TABLES = (("node", "nodes"), ("op", "operations"), ("line", "lines"), ("scope", "scopes"))
PLACES = ("place", "places and links")  # the table more of a cluster

_TABLE = 'style="border-collapse:collapse;font:12px Menlo,Consolas,monospace;margin:4px 0"'
_WORD = 'style="text-align:left;padding:1px 14px 1px 0;vertical-align:top"'
_NUMBER = 'style="text-align:right;padding:1px 14px 1px 0;vertical-align:top;white-space:nowrap"'


def timeline(trace: Any, keys: Mapping[tuple[int, ...], str]) -> str:
    """Bars, curve and tables; ``keys`` are the boxes of the drawing, by the nodes' paths."""
    spans = (*trace.spans, *trace.transmissions)
    longest = sorted(spans, key=lambda event: -event.seconds)[:BARS]
    sent = {id(one) for one in trace.transmissions}
    events = [event for event in longest if id(event) not in sent]
    messages = [event for event in longest if id(event) in sent]
    iterations = {
        id(iteration): f"{loop} {at}"
        for loop, found in enumerate(trace.loops)
        for at, iteration in enumerate(found.kept)
    }
    left_out = len(spans) - len(events)
    note = f"; the {left_out:,} shortest of {len(spans):,} bars are left out" if left_out else ""
    head = f"<b>{xml(trace.title)}</b> {duration(trace.seconds)} · {facts.plural(len(trace.events), 'event')}"
    head += f" · at most {facts.amount(trace.peak)} at once" if trace.live else ""
    head += "".join(f" · {xml(words)}" for words in (trace.other_code, trace.clock_note) if words) + note
    listed = (*TABLES, PLACES) if trace.clocks or trace.grouped == PLACES[0] else TABLES
    tables = "".join(_table(trace, by, title, is_open=by == trace.grouped) for by, title in listed)
    bar = f'<div class="tfnb-bar"><span>{head}</span></div>'
    return f'<div class="tfnb-timeline">{bar}{_svg(trace, events, messages, keys, iterations)}{tables}</div>'


def _svg(
    trace: Any, events: Sequence[Any], messages: Sequence[Any], keys: Mapping[tuple[int, ...], str],
    iterations: Mapping[int, str],
) -> str:  # fmt: skip
    lanes, top = dict[Any, float](), 0.0  # what is in loops has rows of its own below
    for lane in trace.lanes:
        lanes[lane] = top
        top += LANE + ROW * max((event.depth for event in events if (event.thread, event.device) == lane), default=0)
    places = dict(lanes)
    for link in trace.links:
        lanes[link] = top
        top += LINK
    scale = (WIDE - 2 * LEFT) / (trace.seconds or 1.0)
    curve_top = top + 22
    high = curve_top + CURVE + 24 if trace.live else top + 24
    named = {lane: ", ".join(filter(None, lane)) for lane in places} | {link: link[0] for link in trace.links}
    parts = [_text(LEFT, lanes[lane] + (12 if lane in places else 10), name, soft=True) for lane, name in named.items()]
    by_tone = sorted(events, key=_tone)
    for tone, group in groupby(by_tone, key=_tone):
        paint = LIGHT[tone]
        bars = "".join(_bar(event, lanes, scale, _links(event, keys, iterations), paint) for event in group)
        parts.append(f'<g class="t-{tone}" fill="{paint.ink}">{bars}</g>')
    parts += [_messages(messages, lanes, scale)] if messages else []
    parts += [_curve(trace, scale, curve_top)] if trace.live else []
    parts.append(_axis(trace, high))
    words = f"Timeline of {trace.title}: {duration(trace.seconds)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tfnb" role="img" aria-label="{xml(words)}" '
        f'width="{n(WIDE)}" height="{n(high)}" viewBox="0 0 {n(WIDE)} {n(high)}" font-family="{SANS}" '
        f'style="max-width:100%;height:auto"><style>{SHEET}</style>'
        f'<rect class="paper" width="100%" height="100%" fill="{PAPER}"/>{"".join(parts)}</svg>'
    )


def _tone(event: Any) -> str:
    return facts.tone(event.node) if event.node else "update"


def _links(event: Any, keys: Mapping[tuple[int, ...], str], iterations: Mapping[int, str]) -> str:
    """The box of a bar in the drawing, and its iteration of a loop: see ``timeline.js`` of `tfnb.widgets`."""
    key = keys.get(event.path or (event.node.id,)) if event.node else None
    iteration = iterations.get(id(event.iteration))
    words = [
        f' data-box="{key}" data-node="{xml(event.name)}"' if key else "",
        f' data-iteration="{iteration}"' if iteration else "",
    ]
    return "".join(words)


def _bar(event: Any, lanes: Mapping[Any, float], scale: float, links: str, paint: Tone) -> str:
    x, y = LEFT + scale * event.start, lanes[event.thread, event.device] + 17 + ROW * event.depth
    wide = max(0.6, scale * event.seconds)
    shape = (
        f'<rect class="card"{links} x="{x:.2f}" y="{n(y)}" width="{wide:.2f}" height="{n(BAR)}" fill="{paint.fill}" '
        f'stroke="{paint.line}" stroke-width="0.5"><title>{xml(_title(event))}</title></rect>'
    )
    label = shorten(event.kernel or (facts.label(event.node) if event.node else event.name), 24)
    fits = width(label, 10) + 6 < wide
    return shape + (_text(x + 3, y + 14, label, extra=' pointer-events="none"') if fits else "")


def _messages(messages: Sequence[Any], lanes: Mapping[Any, float], scale: float) -> str:
    """A bar on the link for each message, and an arrow from its source to its destination."""
    middle = {thread: top + 17 + BAR / 2 for (thread, device), top in reversed([*lanes.items()]) if device != "link"}
    paint, parts = LIGHT["input"], []
    for one in messages:
        x, y, wide = LEFT + scale * one.start, lanes[one.lane] + 14, max(0.6, scale * one.seconds)
        words = "\n".join([
            one.name, one.lane[0], f"{duration(one.seconds)} from {duration(one.start)}", facts.amount(one.bytes)
        ])  # fmt: skip
        title = f"<title>{xml(words)}</title>"
        parts.append(
            f'<rect class="card" x="{x:.2f}" y="{n(y)}" width="{wide:.2f}" height="{n(LINK - 18)}" '
            f'fill="{paint.fill}" stroke="{paint.line}" stroke-width="0.5">{title}</rect>'
        )
        if one.source in middle and one.to in middle:
            start, end = middle[one.source], middle[one.to]
            x, last, way = LEFT + scale * one.start, LEFT + scale * one.end, 1 if end > start else -1
            path = f"M{x:.2f},{n(start)}L{last:.2f},{n(end)}m-3,{-5 * way}l3,{5 * way}l3,{-5 * way}"
            parts.append(
                f'<path class="frame" d="{path}" fill="none" stroke="{paint.line}" stroke-width="0.8">{title}</path>'
            )
    return f'<g class="t-input" fill="{paint.ink}">{"".join(parts)}</g>'


def _title(event: Any) -> str:
    source = event.node.source if event.node else None
    lines = [
        event.name,
        f"of {event.node.name}" if event.kernel and event.node else "",
        event.op,
        f"{duration(event.seconds)} from {duration(event.start)}",
    ]
    lines += [
        f"{facts.amount(event.bytes)} on {event.device}" if event.bytes else f"on {event.device}",
        str(source) if source else "",
    ]
    return "\n".join(shorten(line, 200) for line in lines if line)


def _curve(trace: Any, scale: float, top: float) -> str:
    """The live bytes as steps; of the points that fall on half a pixel only the highest."""
    highest: dict[int, int] = {}
    for at, count in trace.live:
        place = int(2 * scale * at)
        highest[place] = max(highest.get(place, 0), count)
    tall = CURVE / (trace.peak or 1)
    path = f"M{n(LEFT)},{n(top + CURVE)}"
    for place, count in sorted(highest.items()):
        path += f"H{n(LEFT + place / 2)}V{n(top + CURVE - tall * count)}"
    path += f"H{n(WIDE - LEFT)}V{n(top + CURVE)}Z"
    paint, words = LIGHT["forward"], f"live bytes, at most {trace.peak:,}"
    shape = f'<path class="card" d="{path}" fill="{paint.fill}" stroke="{paint.line}"><title>{words}</title></path>'
    return f'<g class="t-forward">{shape}</g>' + _text(LEFT, top - 6, words, soft=True)


def _axis(trace: Any, high: float) -> str:
    marks = []
    for quarter in range(5):
        x = LEFT + quarter / 4 * (WIDE - 2 * LEFT)
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        marks.append(
            _text(x, high - 6, duration(quarter / 4 * trace.seconds), soft=True, extra=f' text-anchor="{anchor}"')
        )
    return "".join(marks)


def _text(x: float, y: float, text: str, *, soft: bool = False, extra: str = "") -> str:
    kind = f'class="soft" fill="{SOFT}"' if soft else 'class="ink"'
    return f'<text {kind} x="{n(x)}" y="{n(y)}" font-size="10"{extra}>{xml(text)}</text>'


def _table(trace: Any, by: str, title: str, *, is_open: bool) -> str:
    rows = trace.table(trace.rows, by=by)
    heads = "".join(f"<th {_NUMBER}>{word}</th>" for word in ("time", "share", "bytes", "calls"))
    body = "".join(
        f"<tr><td {_WORD}>{xml(shorten(row.name, 80))}</td><td {_WORD}>{xml(shorten(row.detail, 80))}</td>"
        f"<td {_NUMBER}>{duration(row.seconds)}</td><td {_NUMBER}>{100 * row.share:.1f} %</td>"
        f"<td {_NUMBER}>{facts.amount(row.bytes)}</td><td {_NUMBER}>{row.calls}</td></tr>"
        for row in rows
    )
    opened = " open" if is_open else ""
    return (
        f'<details{opened}><summary>{title}</summary><div style="overflow-x:auto">'
        f"<table {_TABLE}><tr><th {_WORD}>{by}</th><th></th>{heads}</tr>{body}</table></div></details>"
    )
