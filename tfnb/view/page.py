"""A drawing as one self-contained piece of HTML: the picture, its other faces packed, a style and a small script.

Without the script (GitHub strips it) the picture stays. The script and style are plain files of `tfnb.widgets`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from tfnb.view import facts
from tfnb.view.drawing import Drawing
from tfnb.view.escape import packed, xml
from tfnb.view.layout import LayoutFailed
from tfnb.view.style import LIGHT

BYTES = 85_000  # of one page, where the picture leaves the choice; what is beyond unfolds in the live view only
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
        scripts = ["markup.js", "drawing.js", *(name for name, has in wanted.items() if has), "static.js"]
        script = "\n".join(map(asset, scripts))
        room = limit - len(picture.encode()) - len(script)  # what a traced run shows comes on top
        faces = packed(_fitting(drawing, room))
    except LayoutFailed as failure:
        return f'<div class="tfnb-page"><p>{xml(str(failure))}</p><pre>{xml(listing())}</pre>{below}</div>'
    return (
        f'<div class="tfnb-page" data-tfnb="{digest(picture)}"><style>{asset("drawing.css")}</style>{_bar(drawing)}'
        f'{picture}<script type="text/plain" class="tfnb-faces">{faces}</script>{sliders}{below}'
        f"<script>{script}</script></div>"
    )


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
    """Names a picture by its content: how a live view finds the static one it stands in for."""
    return hashlib.sha256(picture.encode()).hexdigest()[:16]


def live(drawing: Drawing, *, below: str = "") -> dict[str, Any]:
    """What `tfnb.widgets.graph_widget.GraphWidget` shows of a drawing, with a timeline below; LayoutFailed."""
    title = f"{drawing.name}  {facts.counts(drawing.contents)}"
    iterations = drawing.sliders.data if drawing.sliders is not None else {}
    return {
        "svg": drawing.svg, "name": digest(drawing.svg), "title": title, "legend": _legend(drawing),
        "iterations": iterations, "timeline": below,
    }  # fmt: skip


def _legend(drawing: Drawing) -> list[list[str]]:
    if drawing.colours is not None:
        return drawing.colours.legend
    tones = {facts.tone(node) for node in drawing.contents.nodes}
    return [[tone, LIGHT[tone].line] for tone in LEGEND if tone in tones]


def _bar(drawing: Drawing) -> str:
    dots = "".join(
        f'<span><span class="tfnb-dot" style="background:{colour}"></span>{word}</span>'
        for word, colour in _legend(drawing)
    )
    return f'<div class="tfnb-bar"><span><b>{xml(drawing.name)}</b> {facts.counts(drawing.contents)}</span>{dots}</div>'


@cache
def asset(name: str) -> str:
    """A file of `tfnb.widgets` without comment lines and indentation."""
    text = (files("tfnb.widgets") / name).read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))
