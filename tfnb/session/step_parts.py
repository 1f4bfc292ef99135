"""A step over several tasks: shown before a run, and its modules placed in stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tfnb.errors import InvalidArgument, Unimplemented, ensure_type
from tfnb.execution.tracing.node_seconds import node_seconds
from tfnb.graph import Graph, Value
from tfnb.graph.subgraph import uses_queues
from tfnb.passes import StepGraph, step_graph
from tfnb.passes.flow.reasons import StepParts
from tfnb.passes.flow.step_flow import in_parts
from tfnb.passes.prune import feed_symbols
from tfnb.placement.module_calls import (
    forward_nodes,
    module_calls,
    passages,
    seconds_of_calls,
    take_slots,
    without_writes,
)
from tfnb.placement.stages import Requests, StagedStep, StageWeights, placed, requests, unplaced
from tfnb.recording.values.workspace import workspace
from tfnb.session.feeding import Feeder
from tfnb.session.structures import FeedKey, Fetches, fed_by, graph_of, structure, value_of, variable_of

_GIVEN = "stages"  # in `Graph.attached`: the requests that stages gave to nodes


def place(
    fetches: Fetches, feeds: Iterable[FeedKey] | None = None, *, stages: int | None = None, soft: bool = False
) -> StepParts:  # fmt: skip
    """The parts of a run of ``fetches``, by the tasks that its nodes request; runs nothing, and needs no cluster.

    fetches: as those of `run`. feeds: what would be fed, placeholders or other tensors (of a dict, its keys); None for
    all placeholders. The result prints a table with a line for each task; a notebook draws it, and each of its
    ``parts`` alone; ``why(node)`` says why a node is done where it is.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(2, 3), name="x")
    ...     with tfnb.device("task:0"):
    ...         h = x.exp()
    ...     with tfnb.device("task:1"):
    ...         y = h.sum()
    >>> tfnb.place(y)
    task    nodes  sends  receives  feeds  bytes sent
    task:0      1      1         0      x        12*B
    task:1      1      0         1      -           0
    >>> tfnb.place(y).parts[0]
    task:0: 1 nodes, feeds x
    send h: task:0 -> task:1 (value, 12*B bytes)

    stages: cut the modules of the step, in the order in which they compute, in so many consecutive stages for
    ``fit(mode="pipeline")``, and let the nodes of stage s ask for ``task:s``, as `tfnb.device` around these modules
    would. The slowest stage is as quick as it can be, with its messages; among cuts within 5 percent of that, the
    largest stage holds the fewest bytes of Variables and slots. Nodes are measured here, on ``feeds`` where that is a
    dict of values, else on the samples of placeholders; nothing is written. A module that the user placed on a task
    stays there. A weight of two modules is read at the first one, and sent to the other's stage. Once more with
    another number places anew; a cell that is run again has nodes without stages. soft: the requests are dropped where
    there is no such task, so the same step runs here and on fewer tasks.

    Raises InvalidArgument for more stages than modules, a step without modules, and requests that consecutive stages
    cannot meet; Unimplemented for a step with queues.
    """
    graph = graph_of(fetches)
    leaves: list[Any] = []
    structure(fetches, leaves)
    values = [value_of(graph, leaf) for leaf in leaves if variable_of(graph, leaf) is None]
    if stages is not None:
        return _staged(graph, values, feeds, stages, soft)
    if soft:
        raise InvalidArgument("soft=True is of stages that place makes: say how many, stages=4")
    keys = graph.placeholders if feeds is None else tuple(feeds)
    return StepParts(graph, in_parts(step_graph(graph, values, _fed(graph, keys))))


def _fed(graph: Graph, keys: Iterable[Any]) -> tuple[Value, ...]:
    """The values that these keys feed."""
    return tuple(dict.fromkeys(value for key in keys for value in fed_by(graph, key)))


def _staged(graph: Graph, values: Sequence[Value], feeds: Any, stages: int, soft: bool) -> StagedStep:
    """The step in stages, which the graph asks for from now on."""
    ensure_type(stages, int, "stages")
    ensure_type(soft, bool, "soft")
    if stages < 1:
        raise InvalidArgument(f"stages={stages}: a step has one stage at least")
    graph.ensure_open()
    given: Requests = graph.attached.get(_GIVEN, {})
    bare = graph.derive(unplaced(graph.contents, given))
    keys = step_graph(bare, values, ()).graph.placeholders if feeds is None else tuple(feeds)
    batch = feeds if isinstance(feeds, Mapping) else {key: _sample(graph, key) for key in keys}
    step = step_graph(bare, values, _fed(graph, keys))
    weights = _weights(step, Feeder(bare, [(key, fed_by(graph, key)) for key in keys]).fed(batch.values())[0])
    ends = weights.ends(stages)
    contents, graph.attached[_GIVEN] = placed(
        bare.contents, requests(bare.contents.nodes, weights.calls, ends, soft=soft)
    )  # fmt: skip
    graph.commit(contents)
    return StagedStep(graph, in_parts(step_graph(graph, values, step.feeds)), weights.stages(ends))


def _sample(graph: Graph, key: object) -> torch.Tensor:
    """The sample of a feed key. Raises InvalidArgument where it has none."""
    found = workspace(graph).sample(fed_by(graph, key)[0])
    if found is None:
        name = getattr(key, "name", key)
        raise InvalidArgument(
            f"stages are measured on a batch, and {name} has no sample: give feeds={{{name}: values}}"
        )
    return found


def _weights(step: StepGraph, batch: Sequence[torch.Tensor]) -> StageWeights:
    """The module calls of a step, measured on a batch."""
    queue = next(filter(uses_queues, step.graph.nodes), None)
    if queue is not None:
        raise Unimplemented(
            f"stages are measured on a batch, and {queue.name} uses a queue: place modules by tfnb.device",
            **queue.where,
        )
    forward = forward_nodes(step)
    calls = module_calls(forward)
    take_slots(step, calls)
    shown = zip(step.feeds, batch, strict=True)
    shapes = {value: tensor.shape for value, tensor in shown}
    symbols = feed_symbols(step.whole.contents, step.feeds)
    sizes = {symbol: shapes[value][axis] for symbol, (value, axis) in symbols.items()}
    measured = step_graph(step.whole, without_writes(step, forward), step.feeds)
    seconds = seconds_of_calls(step, calls, node_seconds(measured, batch))
    return StageWeights(calls, seconds, passages(step, calls, sizes))
