"""The live view of `%tfgraph --live` and `%tfcluster --live`: the connected cluster, and the drawing of a graph.

Connects displays and widgets, which know no graph and no cluster, to the view and the session.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import tfnb
from tfnb.magics.watch import BY_TEXT
from tfnb.widgets.curve import curves
from tfnb.widgets.graph_widget import GraphWidget
from tfnb.widgets.step_slider import StepSlider


class LiveDrawing:
    """A widget that hides the static drawing of the same cell, unfolds boxes, and fetches values on a click.

    After a traced run of the graph it shows that run: colours, sliders over iterations, sides, and a timeline.
    """

    def __init__(self, graph: tfnb.Graph, cell: str | None, badges: Mapping[int, str] | None = None) -> None:
        self.graph, self.cell = graph, cell
        self.drawing = tfnb.view.Drawing(graph, cell=cell, badges=badges)
        self.shown = graph.attached.get("trace")  # a picture of now is of no earlier run
        picture = tfnb.view.page.live(self.drawing)
        self.widget = GraphWidget(
            picture, twin=picture["name"], text=repr(graph), on_fetch=self.fetch,
            on_face=lambda key, unfolded: self.drawing.face(key, unfolded=unfolded),
            on_layout=lambda keys: self.drawing.picture(keys),
        )  # fmt: skip

    def fetch(self, name: str) -> dict[str, Any]:
        """A node's current value; inside a loop or branch, the values of the last traced run."""
        inside = self.drawing.contents.by_name.get(name)
        if name in self.graph.contents.by_name or inside is None:
            return fetched(self.graph, name)
        if not _is_trace(self.shown):
            return {"preview": "inside of a loop or branch: %tfrun --profile (trace=True) shows its values"}
        return {"preview": tfnb.view.loop_sliders.history(self.shown, self.drawing.path(inside.id))}

    def follow(self) -> None:
        """Show the last traced run of the graph, if new."""
        trace = self.graph.attached.get("trace")
        if trace is not self.shown and _is_trace(trace):
            self.shown = trace
            self.show(trace)

    def glow(self, busy: Mapping[str, float]) -> None:
        """Let boxes glow by their places. busy: the share of the time that each place computes."""
        colours = {} if self.drawing.sites is None else self.drawing.sites.colours
        self.widget.glow = {colour: busy[str(place)] for place, colour in colours.items() if str(place) in busy}

    def with_run(self) -> LiveDrawing:
        """Itself, with the last traced run if its fetches are still in the graph."""
        if _is_trace(self.shown) and self.shown.fetched <= self.graph.contents.by_id.keys():
            self.show(self.shown)
        return self

    def show(self, trace: Any) -> None:
        """Replace the picture by one of a traced run; where that cannot be laid out, the one before stays."""
        drawing = tfnb.view.Drawing(self.graph, cell=self.cell, trace=trace, by=trace.colours)
        try:
            picture = tfnb.view.page.live(drawing, below=tfnb.view.timeline_of(trace, drawing))
        except tfnb.view.layout.LayoutFailed:
            return
        self.drawing, self.widget.picture = drawing, picture


class Lives:
    """The live drawings of a notebook, one for each cell and graph, and one display for each connected cluster."""

    def __init__(self) -> None:
        self._of: dict[Any, LiveDrawing] = {}
        self._serial = itertools.count()
        self._plots: WeakKeyDictionary[Any, StepSlider] = WeakKeyDictionary()  # by cluster

    def follow_cluster(self, cluster: Any) -> None:
        """Show a cluster in this cell, renewed twice a second; where it was shown before the state of now stays."""
        if cluster is None:
            return
        before, now = self._plots.get(cluster), cluster.status()
        self._plots[cluster] = StepSlider(now.step, cluster_html(now), str(now))
        if before is None:
            cluster.follow(lambda status: self._renew(cluster, status))
        else:
            before.show(now.step, cluster_html(now), str(now))

    def _renew(self, cluster: Any, status: Any) -> None:
        self._plots[cluster].show(status.step, cluster_html(status), str(status))
        busy = {row.name: row.busy for row in status.rows if row.busy is not None}
        for live in tuple(self._of.values()):
            live.glow(busy)

    def make(
        self, graph: tfnb.Graph, cell: str | None = None, owner: str = BY_TEXT, badges: Mapping[int, str] | None = None
    ) -> LiveDrawing:
        """A live drawing; the owner's previous one, already removed by the front end, is closed."""
        key: object = next(self._serial) if owner.startswith(BY_TEXT) else (owner, graph.name)
        if key in self._of:
            self._of.pop(key).widget.close()
        made = self._of[key] = LiveDrawing(graph, cell, badges)
        return made

    def follow(self, _result: object = None) -> None:
        """After a cell: show its traced run, if any."""
        for live in tuple(self._of.values()):
            live.follow()


def cluster_html(status: Any) -> str:
    """The card of a cluster, with the curves of its training and the watched values of all graphs."""
    watches = (graph.attached.get("watch") for graph in tfnb.graphs().values())
    watched = "".join(watch._repr_html_() for watch in watches if watch is not None)
    return status.live_html(curves(status.curve) + watched)


def _is_trace(found: object) -> bool:
    """Whether this is a traced run; before the first run there is none, and its room is not loaded."""
    return found is not None and isinstance(found, tfnb.execution.Trace)


def fetched(graph: tfnb.Graph, name: str) -> dict[str, Any]:
    """The value of the node of this very name now: variables as they are, placeholders as they were while recording."""
    node = graph.contents.by_name.get(name) or graph[name]
    session = tfnb.session.default_session(graph)
    space = tfnb.recording.values.workspace.workspace(graph)
    samples = {each.value(): space.sample(each.value()) for each in graph.placeholders}
    value = session.run(node.value(), {key: sample for key, sample in samples.items() if sample is not None})
    if value is None:
        return {"preview": "no value: an operation"}
    spec = node.outputs[0]
    shown = {"preview": f"{spec}: {tfnb.view.reprs.health(value)}\n{value}"}
    return shown | tfnb.view.reprs.histogram(value)
