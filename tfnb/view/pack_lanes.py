"""A plan of memory in packs as HTML: its answer, bars in the lanes in, run and out, and the slowdown by budget.

The predicted bars stand above those that were measured, if the step has run. A plan is anything with the fields of
`tfnb.execution.pack_step.PackPlan`. Tooltips are ``title`` elements: the drawing needs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfnb.view import facts
from tfnb.view.colours import duration
from tfnb.view.face import n
from tfnb.view.style import LIGHT, PAPER, SANS, SHEET, SOFT
from tfnb.widgets.escaping import xml

LANES = {"in": "copies in", "run": "tasks", "out": "copies out"}
WIDE, LEFT, RIGHT = 960.0, 74.0, 8.0  # pixels: the picture, its margins
LANE, BAR, HEAD = 22.0, 16.0, 20.0
MOST = 1500  # bars of a drawing; the shortest are left out first
_TONES = {
    "forward": "forward", "backward": "gradient", "update": "update",
    "weight": "variable", "state": "constant", "gradient": "gradient", "border": "input",
}  # fmt: skip
_CELL = 'style="text-align:right;padding:1px 14px 1px 0"'


def plan_html(plan: object) -> str:
    """The answer of a plan, its bars, and what other budgets would do."""
    return lanes_html(plan) + budgets_html(plan)


def lanes_html(plan: Any) -> str:
    """The answer of a plan and its bars."""
    drawn = [_lanes("predicted, as a share of the step", plan.times.bars, plan.times.end, is_share=True)]
    if plan.last is not None:
        end = max(bar.end for bar in plan.last.bars)
        drawn.append(_lanes("measured in the last step here", plan.last.bars, end, is_share=False))
    return f"<div>{xml(str(plan))}</div>{''.join(drawn)}"


def budgets_html(plan: Any) -> str:
    """A table of budgets: packs as they are, with the same microbatches."""
    rows = "".join(
        f"<tr><td {_CELL}>{facts.amount(one.budget)}</td><td {_CELL}>{facts.amount(one.schedule.moved)}</td>"
        f"<td {_CELL}>{one.slowdown:.2f}</td></tr>"
        for one in plan.others
    )
    heads = "".join(f"<th {_CELL}>{word}</th>" for word in ("budget", "moved a step", "times the time without"))
    return (
        "<details><summary>other budgets, predicted</summary>"
        f'<table style="border-collapse:collapse"><tr>{heads}</tr>{rows}</table></details>'
    )


def _lanes(title: str, bars: Sequence[Any], end: float, *, is_share: bool) -> str:
    """One picture. is_share: times are told as a share of the whole, for prices have no seconds."""
    scale, high = (WIDE - LEFT - RIGHT) / (end or 1.0), HEAD + LANE * len(LANES) + 18
    tops = {lane: HEAD + LANE * at for at, lane in enumerate(LANES)}
    kept = sorted(bars, key=lambda bar: bar.start - bar.end)[:MOST]
    left_out = f"; the {len(bars) - MOST:,} shortest bars are left out" if len(bars) > MOST else ""
    parts = [_text(LEFT, 12, title + left_out)]
    parts += [_text(4, tops[lane] + 12, name) for lane, name in LANES.items()]
    for tone in dict.fromkeys(map(_tone, kept)):
        drawn = "".join(_bar(bar, tops, scale, end, is_share) for bar in kept if _tone(bar) == tone)
        parts.append(f'<g class="t-{tone}" fill="{LIGHT[tone].ink}">{drawn}</g>')
    for quarter, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        word = f"{25 * quarter} %" if is_share else duration(quarter / 4 * end)
        parts.append(_text(LEFT + scale * end * quarter / 4, high - 4, word, f' text-anchor="{anchor}"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tfnb" role="img" aria-label="{xml(title)}" width="{n(WIDE)}" '
        f'height="{n(high)}" viewBox="0 0 {n(WIDE)} {n(high)}" font-family="{SANS}" style="max-width:100%;height:auto">'
        f'<style>{SHEET}</style><rect class="paper" width="100%" height="100%" fill="{PAPER}"/>{"".join(parts)}</svg>'
    )


def _tone(bar: Any) -> str:
    return _TONES[bar.subject.piece.phase if bar.lane == "run" else bar.subject.role]


def _bar(bar: Any, tops: dict[str, float], scale: float, end: float, is_share: bool) -> str:
    lasts, paint = bar.end - bar.start, LIGHT[_tone(bar)]
    name = bar.subject if bar.lane == "run" else f"{bar.subject.role} {getattr(bar.subject.key, 'name', '')}".strip()
    told = f"{100 * lasts / (end or 1.0):.1f} % of the step" if is_share else duration(lasts)
    return (
        f'<rect class="card" x="{LEFT + scale * bar.start:.2f}" y="{n(tops[bar.lane])}" '
        f'width="{max(0.4, scale * lasts):.2f}" height="{n(BAR)}" fill="{paint.fill}" stroke="{paint.line}" '
        f'stroke-width="0.5"><title>{xml(f"{name}: {told}")}</title></rect>'
    )


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text class="soft" fill="{SOFT}" x="{n(x)}" y="{n(y)}" font-size="10"{extra}>{xml(text)}</text>'
