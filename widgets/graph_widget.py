"""The live drawing: one picture as a string, faces and values on request. Knows no graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

log = logging.getLogger(__name__)

Fetch = Callable[[str], Mapping[str, Any]]
Face = Callable[[str, bool], str]
Layout = Callable[[list[str]], str]

_HERE = Path(__file__).parent


def script(*names: str) -> str:
    """Files of this folder as one."""
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in names)


class GraphWidget(anywidget.AnyWidget):
    """A drawing that unfolds through ``on_face`` and shows values through ``on_fetch``.

    picture: ``svg`` and its ``name``; ``title`` and ``legend`` (pairs of a word and ``#rrggbb``), which stand above it;
    ``iterations``, data of the sliders of a traced run (see ``loop_sliders.js``), and its ``timeline`` as HTML, which
    stands below. Another picture replaces it whole; what was unfolded stays so. twin: the ``data-tfnb`` of a static
    drawing that this one hides while it is shown. text: what a front end without widgets shows. on_fetch(node name)
    gives ``{"preview": str}`` and where there are many numbers a ``histogram``: ``counts``, ``low``, ``high``;
    on_face(key of a box, unfolded) gives SVG, on_layout(keys of the unfolded boxes) the whole drawing. ``selection`` is
    the name of the node that was clicked, ``chosen`` the iteration of each loop, or None for all of them: all views of
    the widget share both. ``glow``: how strongly the stripes of a colour (``#rrggbb``) glow, from 0 to 1.
    """

    _esm = script("markup.js", "panel.js", "drawing.js", "loop_sliders.js", "timeline.js", "graph.js")
    _css = script("drawing.css")

    picture: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    twin = traitlets.Unicode().tag(sync=True)
    selection = traitlets.Unicode().tag(sync=True)
    chosen: traitlets.List[int | None] = traitlets.List().tag(sync=True)
    glow: traitlets.Dict[str, float] = traitlets.Dict().tag(sync=True)

    def __init__(
        self, picture: Mapping[str, Any], *, twin: str = "", text: str = "",
        on_fetch: Fetch | None = None, on_face: Face | None = None, on_layout: Layout | None = None,
    ) -> None:  # fmt: skip
        super().__init__(picture=dict(picture), twin=twin)
        self.text = text
        self._fetch, self._face, self._layout = on_fetch, on_face, on_layout
        self.on_msg(self._heard)

    def _heard(self, _widget: object, message: object, _buffers: object) -> None:
        """Answer one message of the page; errors of a callback are shown there, and logged."""
        match message:
            case {"kind": "fetch", "node": str(node)}:
                self.send({"kind": "value", "node": node, **self._value(node)})
            case {"kind": "fold" | "unfold" as kind, "scope": str(scope)}:
                self.send({"kind": "face", "scope": scope, "svg": self._drawn(self._face, scope, kind == "unfold")})
            case {"kind": "layout", "opened": list(keys)}:
                drawn = self._drawn(self._layout, [str(key) for key in keys])
                self.send({"kind": "layout", "opened": keys, "svg": drawn})

    def _value(self, node: str) -> dict[str, Any]:
        if self._fetch is None:
            return {"error": "values cannot be fetched here"}
        try:
            found = self._fetch(node)
            more = {"histogram": found["histogram"]} if found.get("histogram") else {}
            return {"preview": str(found.get("preview", "")), **more}
        except Exception as failure:  # the user's data and code: the page says what went wrong
            log.info("fetching %s failed", node, exc_info=True)
            return {"error": f"{type(failure).__name__}: {failure}"}

    def _drawn(self, draw: Callable[..., str] | None, *of: object) -> str:
        try:
            return draw(*of) if draw is not None else ""
        except Exception:  # a key of an older picture, or a layout that failed: the page keeps what it has
            log.info("drawing %s failed", of, exc_info=True)
            return ""

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None and self.text:
            data["text/plain"] = self.text
        return bundle
