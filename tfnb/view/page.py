"""A drawing as one self-contained piece of HTML: the picture, its other faces, the style and the script, packed.

Without the script (GitHub strips it) the picture stays. The script and style are plain files of `tfnb.widgets`. Every
output has its own copy, as any of them may be cleared or copied elsewhere; a page unpacks and runs one of them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from tfnb.view import facts
from tfnb.view.colours import legend
from tfnb.view.drawing import Drawing
from tfnb.view.escape import packed
from tfnb.view.layout import LayoutFailed
from tfnb.view.style import LIGHT
from tfnb.widgets.escaping import xml

BYTES = 85_000  # of one page, where the picture leaves the choice; what is beyond unfolds in the live view only
DOT = "display:inline-block;width:9px;height:9px;border-radius:3px;margin-right:4px"
LEGEND = ("forward", "gradient", "update", "variable")


def html(drawing: Drawing, listing: Callable[[], str], *, below: str = "", limit: int = BYTES) -> str:
    """The page; ``listing()`` stands in where the graph cannot be laid out, ``below`` (a timeline) follows.

    limit: bytes up to which faces are taken along.
    """
    try:
        picture = drawing.svg
        iterations = drawing.sliders.data if drawing.sliders is not None else {}
        sliders = f'<script type="text/plain" class="tfnb-iterations">{packed(iterations)}</script>' * bool(iterations)
        wanted = {"loop_sliders.js": bool(iterations), "timeline.js": bool(below)}
        program, name = code(*(name for name, has in wanted.items() if has))
        room = limit - len(picture.encode()) - len(program)  # what a traced run shows comes on top
        faces = packed(_fitting(drawing, room))
    except LayoutFailed as failure:
        return f'<div class="tfnb-page"><p>{xml(str(failure))}</p><pre>{xml(listing())}</pre>{below}</div>'
    return (
        f'<div class="tfnb-page" data-tfnb="{digest(picture)}">{_bar(drawing)}'
        f'{picture}<script type="text/plain" class="tfnb-faces">{faces}</script>{sliders}{below}'
        f'<script type="text/plain" class="tfnb-code" data-name="{name}">{program}</script>'
        f"<script>{asset('loader.js')}</script></div>"
    )


@cache
def code(*more: str) -> tuple[str, str]:
    """The style and script of a page, packed, and a name for them: of two versions in one page each runs its own."""
    script = "\n".join(map(asset, ("markup.js", "panel.js", "drawing.js", *more, "static.js")))
    return packed({"style": asset("drawing.css"), "script": script}), digest(script)


def _fitting(drawing: Drawing, room: int) -> dict[str, str]:
    """As many faces as have room when they are packed, outer boxes first."""
    found, size, stream = dict[str, str](), 0, zlib.compressobj(9)
    for key, face in drawing.faces():
        plain = face.replace('"', "'")  # JSON would escape them; text has none that are bare
        size += len(stream.compress(f"{key}{plain}".encode()) + stream.flush(zlib.Z_SYNC_FLUSH))
        if size * 4 / 3 > room:
            break
        found[key] = plain
    return found


def digest(picture: str) -> str:
    """The name of a picture, a digest by which a live view finds the static picture it replaces."""
    return hashlib.sha256(picture.encode()).hexdigest()[:16]


def live(drawing: Drawing, *, below: str = "") -> dict[str, Any]:
    """The data of `tfnb.widgets.graph_widget.GraphWidget` for a drawing, with a timeline below; raises LayoutFailed."""
    title = f"{drawing.name}  {facts.counts(drawing.contents)}"
    iterations = drawing.sliders.data if drawing.sliders is not None else {}
    return {
        "svg": drawing.svg, "name": digest(drawing.svg), "title": title, "legend": _legend(drawing),
        "iterations": iterations, "timeline": below,
    }  # fmt: skip


def _legend(drawing: Drawing) -> list[list[str]]:
    sites = {} if drawing.sites is None else drawing.sites.colours
    return [*_tones(drawing), *([str(place), colour] for place, colour in sites.items())]


def _tones(drawing: Drawing) -> list[list[str]]:
    if drawing.colours is not None:
        return legend(drawing.colours, drawing.root)
    tones = {facts.tone(node) for node in drawing.contents.nodes}
    badges = [] if drawing.badges is None else legend(drawing.badges, drawing.root)
    return [
        *([tone, LIGHT[tone].line] for tone in LEGEND if tone in tones),
        *([f"dot: {word}", colour] for word, colour in badges),
    ]


def _bar(drawing: Drawing) -> str:
    dots = "".join(
        f'<span class="tfnb-key"><span class="tfnb-dot" style="{DOT};background:{colour}"></span>{word}</span>'
        for word, colour in _legend(drawing)
    )
    return f'<div class="tfnb-bar"><span><b>{xml(drawing.name)}</b> {facts.counts(drawing.contents)}</span>{dots}</div>'


@cache
def asset(name: str) -> str:
    """A file of `tfnb.widgets` without comment lines and indentation."""
    text = (files("tfnb.widgets") / name).read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))
