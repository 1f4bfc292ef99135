"""Tasks and servers of a cluster as an SVG: a box for each, coloured by place, with its work, Variables and queues.

A task's box glows by the share of the time that it computes; an edge is as wide as its bytes a second are many. Takes
strings and numbers. Text has the colour of the page, so that the picture is legible on light and dark ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from tfnb.view.colours import STRIPES
from tfnb.view.face import n
from tfnb.widgets.escaping import shorten, xml

WIDE, BOX, GAP, LINE, BETWEEN = 480.0, 150.0, 10.0, 14.0, 46.0
LETTER = 6.0  # width of a letter, about
MOST = 4  # boxes of a row; the others are a number in the last one
SHOWN = 3  # Variables, and as many queues, that a box names
GLOW = 0.35  # opacity of a box whose task computes all the time
WIDEST = 5.0  # of edges
DIP = 28.0  # of the handles of an edge between two tasks


class ClusterMember(Protocol):
    """A task or server.

    lines: its work in words; holds: its Variables with their sizes, largest first; traffic: of a server, in words;
    busy: the share of the time that it computes; links: of a task, servers and other tasks with the bytes a second, as
    a number and in words; queues: name, elements and capacity, None for no limit.
    """

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def lines(self) -> Sequence[str]: ...

    @property
    def holds(self) -> Sequence[tuple[str, str]]: ...

    @property
    def traffic(self) -> str: ...

    @property
    def busy(self) -> float | None: ...

    @property
    def links(self) -> Sequence[tuple[str, float, str]]: ...

    @property
    def queues(self) -> Sequence[tuple[str, int, int | None]]: ...


def cluster_svg(members: Sequence[ClusterMember]) -> str:
    """At most four tasks in a row, as many servers (``ps:0``, ...) below (the last box counts the others), an edge from
    each task to each server, and to each task that it exchanges values with; empty without tasks.

    A task has the colour that its nodes have in drawings of graphs over all tasks and no server.

    >>> from tfnb.cluster.notebook.card import CardRow
    >>> task = CardRow("task:0", "", "alive", "", lines=("20 steps",), links=(("ps:0", 2e6, "2.0 MB/s"),))
    >>> server = CardRow("ps:0", "", "alive", "", holds=(("w", "8 B"),), traffic="1.0 kB/s")
    >>> picture = cluster_svg([task, server])
    >>> picture.count("<rect"), picture.count("<path"), "w 8 B" in picture, "1.0 kB/s" in picture
    (4, 1, True, True)
    >>> "20 steps" in picture, "task:0 and ps:0: 2.0 MB/s" in picture
    (True, True)
    """
    servers = [member for member in members if member.name.startswith("ps:")]
    tasks = [member for member in members if member not in servers]
    if not tasks:
        return ""
    upper = list(_row(tasks, 4.0))
    lower = list(_row(servers, max(box.bottom for box in upper) + BETWEEN, len(upper)))
    high = max(box.bottom for box in (*upper, *lower)) + (4 if lower else BETWEEN)
    most = max((rate for box in upper for _, rate, _ in box.member.links), default=0.0)
    edges = "".join(_edge(task, server, most) for task in upper for server in lower)
    edges += "".join(
        _edge(task, other, most)
        for task in upper
        for other in upper
        if any(name == other.member.name for name, _, _ in task.member.links)
    )
    boxes = "".join(box.svg() for box in (*upper, *lower))
    traffic = "".join(_text(box.middle + 6, box.y - 6, box.member.traffic, WIDE / 2) for box in lower)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{len(tasks)} tasks, {len(servers)} servers" '
        f'width="{n(WIDE)}" height="{n(high)}" viewBox="0 0 {n(WIDE)} {n(high)}" '
        f'font-family="Helvetica,Arial,sans-serif" style="max-width:100%;height:auto">{edges}{boxes}{traffic}</svg>'
    )


class _MemberBox(NamedTuple):
    """A member's box at its place. left_out: members of the row that have none."""

    member: ClusterMember
    colour: str
    x: float
    y: float
    wide: float
    left_out: int

    @property
    def lines(self) -> list[str]:
        """The text below the name, queues last."""
        member = self.member
        shown = [*member.lines, *_first([f"{name} {size}" for name, size in member.holds])]
        shown += [f"{self.left_out} more like it"] if self.left_out else []
        return shown + _first([_filled(*queue) for queue in member.queues])

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + 24 + LINE * len(self.lines)

    @property
    def middle(self) -> float:
        """Where edges begin or end."""
        return self.x + self.wide / 2

    def svg(self) -> str:
        """Frame, stripe, name and lines, dashed for a member that is not alive. Tab goes from box to box."""
        member, high = self.member, self.bottom - self.y
        dashes = "" if member.state == "alive" else ' stroke-dasharray="4 3"'
        head = member.name if member.state == "alive" else f"{member.name}, {member.state}"
        held = [f"{name} {size}" for name, size in member.holds]
        whole = "; ".join([head, *member.lines, *held, *(_filled(*queue) for queue in member.queues)])
        lines = (_text(self.x + 12, self.y + 30 + LINE * at, line, self.wide) for at, line in enumerate(self.lines))
        fill = f'"{self.colour}" fill-opacity="{GLOW * member.busy:.2f}"' if member.busy is not None else '"none"'
        return (
            f'<g tabindex="0"><title>{xml(whole)}</title><rect x="{n(self.x)}" y="{n(self.y)}" width="{n(self.wide)}" '
            f'height="{n(high)}" rx="5" fill={fill} stroke="currentColor" stroke-opacity="0.5"{dashes}/>'
            f'<rect x="{n(self.x)}" y="{n(self.y + 4)}" width="4" height="{n(high - 8)}" fill="{self.colour}"/>'
            f"{self._levels()}{_text(self.x + 12, self.y + 16, head, self.wide, more=_BOLD)}{''.join(lines)}</g>"
        )

    def _levels(self) -> str:
        """A bar behind the words of each queue that has a capacity, as long as the queue is full."""
        queues, count = self.member.queues[:SHOWN], min(len(self.member.queues), SHOWN + 1)
        top, whole = self.bottom - 5 - LINE * count, self.wide - 18
        return "".join(
            f'<rect x="{n(self.x + 9)}" y="{n(top + LINE * at)}" width="{n(whole * min(1.0, size / most))}" '
            f'height="{n(LINE - 2)}" fill="{self.colour}" fill-opacity="{GLOW}"/>'
            for at, (_, size, most) in enumerate(queues)
            if most
        )


def _first(lines: Sequence[str]) -> list[str]:
    """The first of many lines, with the number of the others."""
    return [*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]


def _filled(name: str, size: int, most: int | None) -> str:
    return f"queue {name} {size}" + ("" if most is None else f" of {most}")


def _row(members: Sequence[ClusterMember], y: float, first: int = 0) -> Iterator[_MemberBox]:
    """At most `MOST` boxes in the middle of a row. first: the number of the first one's colour."""
    count = min(MOST, len(members))
    wide = min(BOX, (WIDE - GAP * (count + 1)) / max(1, count))
    start = (WIDE - count * wide - (count - 1) * GAP) / 2
    for at, member in enumerate(members[:count]):
        left_out = len(members) - count if at == count - 1 else 0
        yield _MemberBox(member, STRIPES[(first + at) % len(STRIPES)], start + at * (wide + GAP), y, wide, left_out)


def _edge(task: _MemberBox, other: _MemberBox, most: float) -> str:
    """A curve from a task to a server, or below both to another task, in the task's colour. most: the bytes a second of
    the widest one.
    """
    end = other.y if other.y > task.y else other.bottom
    half = n((task.bottom + end) / 2 if other.y > task.y else max(task.bottom, end) + DIP)
    path = f"M{n(task.middle)} {n(task.bottom)} C{n(task.middle)} {half} {n(other.middle)} {half}"
    rates = ((rate, words) for name, rate, words in task.member.links if name == other.member.name)
    rate, words = next(rates, (0.0, ""))
    wide = 1 + (WIDEST - 1) * rate / most if rate else 1.0
    whole = f"{task.member.name} and {other.member.name}: {words or 'nothing travels now'}"
    return (
        f'<path d="{path} {n(other.middle)} {n(end)}" fill="none" stroke="{task.colour}" stroke-opacity="0.8" '
        f'stroke-width="{n(wide)}"><title>{xml(whole)}</title></path>'
    )


_BOLD = ' font-weight="bold"'


def _text(x: float, y: float, text: str, wide: float, more: str = "") -> str:
    cut = xml(shorten(text, int((wide - 16) / LETTER)))
    return f'<text x="{n(x)}" y="{n(y)}" font-size="11" fill="currentColor"{more}>{cut}</text>' if text else ""
