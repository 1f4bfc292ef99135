"""Tasks and servers of a cluster as an SVG: a box for each, coloured by place, with its Variables, and what travels.

Takes strings. Text has the colour of the page, so that the picture is legible on light and dark ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from tfnb.escaping import shorten, xml
from tfnb.view.colours import STRIPES
from tfnb.view.face import n

WIDE, BOX, GAP, LINE, BETWEEN = 480.0, 150.0, 10.0, 14.0, 46.0
LETTER = 6.0  # width of a letter, about
MOST = 4  # boxes of a row; the others are a number in the last one
SHOWN = 3  # Variables that a box names


class ClusterMember(Protocol):
    """A task or server: its state, its Variables with their sizes, largest first, and its traffic; all in words."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def holds(self) -> Sequence[tuple[str, str]]: ...

    @property
    def traffic(self) -> str: ...


def cluster_svg(members: Sequence[ClusterMember]) -> str:
    """The tasks in a row, the servers (``ps:0``, ...) below, an edge from each to each; empty without tasks.

    A task has the colour that its nodes have in drawings of graphs over all tasks and no server.

    >>> from tfnb.cluster.notebook.card import CardRow
    >>> server = CardRow("ps:0", "", "alive", "", holds=(("w", "8 B"),), traffic="1.0 kB/s")
    >>> picture = cluster_svg([CardRow("task:0", "", "alive", ""), server])
    >>> picture.count("<rect"), picture.count("<path"), "w 8 B" in picture, "1.0 kB/s" in picture
    (4, 1, True, True)
    """
    servers = [member for member in members if member.name.startswith("ps:")]
    tasks = [member for member in members if member not in servers]
    if not tasks:
        return ""
    upper = list(_row(tasks, 4.0))
    lower = list(_row(servers, max(box.bottom for box in upper) + BETWEEN, len(upper)))
    high = max(box.bottom for box in (*upper, *lower)) + 4
    edges = "".join(_edge(task, server) for task in upper for server in lower)
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
        """The text below the name."""
        holds = self.member.holds
        shown = [f"{name} {size}" for name, size in holds[:SHOWN]]
        shown += [f"and {len(holds) - SHOWN} more"] if len(holds) > SHOWN else []
        return shown + ([f"{self.left_out} more like it"] if self.left_out else [])

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + 24 + LINE * len(self.lines)

    @property
    def middle(self) -> float:
        """Where edges begin or end."""
        return self.x + self.wide / 2

    def svg(self) -> str:
        """Frame, stripe, name and lines; the frame of a member that is not alive is dashed."""
        is_alive, high = self.member.state == "alive", self.bottom - self.y
        dashes = "" if is_alive else ' stroke-dasharray="4 3"'
        head = self.member.name if is_alive else f"{self.member.name}, {self.member.state}"
        whole = "; ".join([head, *(f"{name} {size}" for name, size in self.member.holds)])
        lines = (_text(self.x + 12, self.y + 30 + LINE * at, line, self.wide) for at, line in enumerate(self.lines))
        return (
            f'<g><title>{xml(whole)}</title><rect x="{n(self.x)}" y="{n(self.y)}" width="{n(self.wide)}" '
            f'height="{n(high)}" rx="5" fill="none" stroke="currentColor" stroke-opacity="0.5"{dashes}/>'
            f'<rect x="{n(self.x)}" y="{n(self.y + 4)}" width="4" height="{n(high - 8)}" fill="{self.colour}"/>'
            f"{_text(self.x + 12, self.y + 16, head, self.wide, more=_BOLD)}{''.join(lines)}</g>"
        )


def _row(members: Sequence[ClusterMember], y: float, first: int = 0) -> Iterator[_MemberBox]:
    """At most `MOST` boxes in the middle of a row. first: the number of the first one's colour."""
    count = min(MOST, len(members))
    wide = min(BOX, (WIDE - GAP * (count + 1)) / max(1, count))
    start = (WIDE - count * wide - (count - 1) * GAP) / 2
    for at, member in enumerate(members[:count]):
        left_out = len(members) - count if at == count - 1 else 0
        yield _MemberBox(member, STRIPES[(first + at) % len(STRIPES)], start + at * (wide + GAP), y, wide, left_out)


def _edge(task: _MemberBox, server: _MemberBox) -> str:
    """A curve from a task to a server, in the task's colour."""
    half = n((task.bottom + server.y) / 2)
    path = f"M{n(task.middle)} {n(task.bottom)} C{n(task.middle)} {half} {n(server.middle)} {half}"
    return (
        f'<path d="{path} {n(server.middle)} {n(server.y)}" fill="none" stroke="{task.colour}" stroke-opacity="0.8"/>'
    )


_BOLD = ' font-weight="bold"'


def _text(x: float, y: float, text: str, wide: float, more: str = "") -> str:
    cut = xml(shorten(text, int((wide - 16) / LETTER)))
    return f'<text x="{n(x)}" y="{n(y)}" font-size="11" fill="currentColor"{more}>{cut}</text>' if text else ""
