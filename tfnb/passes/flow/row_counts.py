"""Counters of rows, such as ``seen += x.shape[0]``: the number of rows becomes a value that parts of a batch add up.

An op with a size among its arguments is done by whoever has the rows. As a value of its own, the size goes to the
server of the counter, which adds the sizes of all parts to it. Pure; imports the graph.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tfnb.graph import Contents, Dim, Node, Ref, Spec
from tfnb.graph.graph import new_id
from tfnb.passes.prune import StepGraph, step_graph

_ADDING = ("aten.add.Tensor", "aten.sub.Tensor")
NUMBER = "aten.full.default"
"""The op of a size as a value."""


def with_counts(step: StepGraph) -> StepGraph:
    """The step whose Variables take sizes as values; the step itself where no Variable counts by a size."""
    written = {node.inputs[0].node for node in step.graph.nodes if node.op == "tfnb.assign"}
    counting = {node.id for node in step.graph.nodes if node.id in written and _is_count(node)}
    if not counting:
        return step
    nodes: list[Node] = []
    for node in step.whole.nodes:
        if node.id in counting:
            size = node.attrs["other"]
            is_whole = isinstance(size.evaluate(dict.fromkeys(size.symbols, 60)), int)
            dtype = torch.int64 if is_whole else node.outputs[0].dtype  # of ``0.1 * x.shape[0]``
            about = {"size": [], "fill_value": size, "dtype": dtype, "device": torch.device("cpu")}
            number = Node(
                id=new_id(), name=f"{node.name}/size", op=NUMBER, outputs=(Spec(dtype, ()),), attrs=about,
                source=node.source, scope=node.scope,
            )  # fmt: skip
            nodes.append(number)
            node = replace(node, inputs=(*node.inputs, number.value()), attrs={**node.attrs, "other": Ref(1)})
        nodes.append(node)
    graph = step.whole.derive(Contents(tuple(nodes), step.whole.contents.guards))
    return step_graph(graph, step.fetches, step.feeds)


def _is_count(node: Node) -> bool:
    """Whether a node adds a size to a number, or to numbers of a known shape."""
    return (
        node.op in _ADDING and isinstance(node.attrs.get("other"), Dim) and len(node.inputs) == 1
        and not node.outputs[0].symbols and "update" not in node.tags
    )  # fmt: skip
