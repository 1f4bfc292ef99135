"""The live drawing of a graph: wires the widget, which knows no graph, to the view and the session."""

from __future__ import annotations

from typing import Any

import tfnb
from tfnb.widgets.graph import GraphWidget


def live(graph: Any, cell: str | None) -> GraphWidget:
    """A widget that hides the static drawing of the same cell, unfolds boxes, and fetches values on a click."""
    drawing = tfnb.view.Drawing(graph, cell=cell)

    def face(key: str, unfolded: bool) -> str:
        return drawing.face(key, unfolded=unfolded)

    return GraphWidget(
        **tfnb.view.page.live(drawing), text=repr(graph), on_face=face, on_fetch=lambda name: fetched(graph, name)
    )


def fetched(graph: Any, name: str) -> dict[str, str]:
    """A node's value now: the variables as they are, the placeholders as they were while recording."""
    session = tfnb.session.default_session(graph)
    space = tfnb.recording.workspace.workspace(graph)
    samples = {node.name: space.sample(node.value()) for node in graph.placeholders}
    value = session.run(name, {key: sample for key, sample in samples.items() if sample is not None})
    if value is None:
        return {"preview": "no value: an operation"}
    spec = graph[name].outputs[0]
    return {"preview": f"{spec}: {tfnb.view.reprs.health(value)}\n{value}"}
