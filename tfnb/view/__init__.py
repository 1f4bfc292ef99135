"""Graph -> SVG, HTML, DOT and text, for reprs, files and widgets."""

from tfnb.view.cluster_picture import cluster_svg
from tfnb.view.drawing import Drawing
from tfnb.view.export import (
    auto_placement_html,
    difference_html,
    difference_svg,
    graph_bundle,
    graph_dot,
    graph_graphml,
    graph_html,
    graph_networkx,
    graph_png,
    graph_svg,
    parts_html,
    passes_html,
    stages_html,
    timeline_of,
    trace_html,
    trace_svg,
)
from tfnb.view.listing import text_tree
from tfnb.view.pack_lanes import lanes_html, plan_html
from tfnb.view.reprs import (
    checkpoint_html,
    operation_html,
    queue_html,
    session_html,
    spec_html,
    tensor_html,
    values_html,
    variable_html,
)

__all__ = [
    "Drawing", "auto_placement_html", "checkpoint_html", "cluster_svg", "difference_html", "difference_svg",
    "graph_bundle", "graph_dot", "graph_graphml", "graph_html", "graph_networkx", "graph_png", "graph_svg",
    "lanes_html", "operation_html", "parts_html", "passes_html", "plan_html", "queue_html", "session_html",
    "spec_html", "stages_html", "tensor_html", "text_tree", "timeline_of", "trace_html", "trace_svg", "values_html",
    "variable_html",
]  # fmt: skip
