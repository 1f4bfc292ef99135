"""A step over several tasks: shown before a run, its modules placed in stages, or its nodes by a search."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import torch

from tfnb.cluster.connected import connected
from tfnb.errors import InvalidArgument, Unimplemented, ensure_type
from tfnb.execution.tracing.node_seconds import node_seconds
from tfnb.execution.tracing.trace import Trace
from tfnb.graph import Graph, Node, Value
from tfnb.graph.subgraph import uses_queues
from tfnb.passes import StepGraph, step_graph
from tfnb.passes.flow.reasons import StepParts
from tfnb.passes.flow.step_flow import in_parts
from tfnb.passes.pipeline import optimized
from tfnb.passes.prune import feed_symbols
from tfnb.placement.costs import PlacementCosts, StepTimes
from tfnb.placement.groups import grouped
from tfnb.placement.module_calls import (
    forward_nodes,
    module_calls,
    passages,
    seconds_of_calls,
    take_slots,
    without_writes,
)
from tfnb.placement.placement_search import search
from tfnb.placement.requests import numbers_of
from tfnb.placement.simulation import with_late_messages
from tfnb.placement.stages import StagedStep, StageWeights, placed, requests, unplaced
from tfnb.recording.values.workspace import workspace
from tfnb.session.auto_placement import AutoPlacement, chosen
from tfnb.session.feeding import Feeder
from tfnb.session.machine_speed import machine_speed
from tfnb.session.structures import FeedKey, Fetches, fed_by, graph_of, structure, value_of, variable_of

_GIVEN = "stages"  # in `Graph.attached`: the requests that `place` gave to nodes
_TIMES = "times"  # in `Graph.attached`: those of traced runs
MOST = 64  # tasks of a search

Key = FeedKey | Node  # of a feed: as a user names it, or the node of a placeholder


def place(
    fetches: Fetches, how: Literal["auto"] | None = None, *, feeds: Iterable[FeedKey] | None = None,
    stages: int | None = None, tasks: int | None = None, soft: bool = False,
) -> StepParts:  # fmt: skip
    """The parts of a run of ``fetches``, by the tasks that its nodes request; runs nothing, and needs no cluster.

    fetches: as those of `run`.
    how: ``"auto"`` searches for the tasks on which a run is predicted to be quickest, and lets the nodes ask for them.
    feeds: placeholders or other tensors that would be fed; None for all placeholders. A dict has values, too.
    stages: so many consecutive groups of modules for ``fit(mode="pipeline")``: the nodes of stage s ask for ``task:s``.
    tasks: of a search, at most; None for those of the connected cluster.
    soft: requests of a search or of stages are dropped where there is no such task, as without a cluster.

    The result prints a table with a line for each task; a notebook draws it, and each of its ``parts`` alone;
    ``why(node)`` says why a node is done where it is. The page `notebooks/cluster.md` says how a search and a cut in
    stages choose. Requests of the user, `tfnb.device`, stand. Another call places anew.

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

    >>> with tfnb.record() as graph:
    ...     x, w = tfnb.placeholder(torch.ones(400, 400), name="x"), torch.ones(400, 400)
    ...     y = (x @ w).sum() + (x.exp() @ w).sum()
    >>> placement = tfnb.place(y, "auto", tasks=2)
    >>> len(placement.parts) <= placement.tasks, placement.seconds > 0
    (True, True)
    >>> session = tfnb.Session(graph, executor="parts")
    >>> bool(session.run(y, {x: torch.ones(400, 400)}) > 0)
    True

    Raises InvalidArgument for requests that these tasks cannot meet, for more stages than modules, and for stages of a
    step without modules; Unimplemented for stages of a step with queues.
    """
    _ensure_one_way(how, stages, tasks, soft)
    graph = graph_of(fetches)
    leaves: list[Any] = []
    structure(fetches, leaves)
    values = [value_of(graph, leaf) for leaf in leaves if variable_of(graph, leaf) is None]
    if stages is not None:
        return _staged(graph, values, feeds, stages, soft)
    if how is not None:
        return _searched(graph, values, feeds, _task_count(tasks), soft)
    keys = graph.placeholders if feeds is None else tuple(feeds)
    return StepParts(graph, in_parts(step_graph(graph, values, _fed(graph, keys))))


def _ensure_one_way(how: object, stages: object, tasks: object, soft: object) -> None:
    """Raise InvalidArgument for arguments of which one is of a search, and another of stages or of neither."""
    if how is not None and not (isinstance(how, str) and how == "auto"):
        raise InvalidArgument(f"how is 'auto' or None, not {how!r:.60}; what is fed is feeds=")
    if how is not None and stages is not None:
        raise InvalidArgument(f"how={how!r} searches for places, and stages={stages} cuts modules in order: take one")
    if how is None and tasks is not None:
        raise InvalidArgument(f"tasks={tasks} is of a search: tfnb.place(fetches, 'auto', tasks={tasks})")
    if soft and how is None and stages is None:
        raise InvalidArgument("soft=True is of stages or of a search: say stages=4, or 'auto'")


def _fed(graph: Graph, keys: Iterable[Key]) -> tuple[Value, ...]:
    """The values that these keys feed."""
    return tuple(dict.fromkeys(value for key in keys for value in fed_by(graph, key)))


def learn(graph: Graph, trace: Trace, step: StepGraph, tensors: Sequence[torch.Tensor]) -> None:
    """Keep the times of a traced run for later placements of the graph. tensors: of the feeds."""
    graph.attached.setdefault(_TIMES, StepTimes()).learn(trace, _sizes(step, [tensor.shape for tensor in tensors]))


def _sizes(step: StepGraph, shapes: Sequence[Sequence[int] | None]) -> dict[str, int]:
    """The sizes of symbols, where feeds have these shapes; None for a feed whose shape is not known."""
    fed = dict(zip(step.feeds, shapes, strict=True))
    symbols = feed_symbols(step.whole.contents, step.feeds).items()
    return {symbol: shape[axis] for symbol, (value, axis) in symbols if (shape := fed[value]) is not None}


def _task_count(tasks: int | None) -> int:
    """How many tasks a search may use."""
    cluster = connected()
    if tasks is None and cluster is None:
        raise InvalidArgument("no cluster is connected: say how many tasks there would be, tasks=4")
    if tasks is None:
        tasks = 1 + max(numbers_of(cluster.tasks), default=0)
    ensure_type(tasks, int, "tasks")
    if not 1 <= tasks <= MOST:
        raise InvalidArgument(f"tasks={tasks}: a search takes 1 to {MOST}")
    return tasks


def _searched(
    graph: Graph, values: Sequence[Value], feeds: Iterable[FeedKey] | None, tasks: int, soft: bool
) -> AutoPlacement:
    """The step at the tasks of the quickest placement; the graph asks for these tasks from now on."""
    ensure_type(soft, bool, "soft")
    graph.ensure_open()
    bare, keys = _bare(graph, values, feeds)
    step = step_graph(bare, values, _fed(graph, keys))
    if isinstance(feeds, Mapping):
        shapes: list[Any] = [tensor.shape for tensor in _batch(graph, keys, feeds.values())]
    else:
        samples = [workspace(graph).sample(value) for value in step.feeds]
        shapes = [None if sample is None else sample.shape for sample in samples]
    times = deepcopy(graph.attached.get(_TIMES, StepTimes()))  # a prediction stays as it is while more is learned
    costs = PlacementCosts(machine_speed(), times, _sizes(step, shapes))
    groups = grouped(step, tasks)
    stays = {node.id for node in optimized(step, last=()).nodes}

    def seconds(node: Node) -> float:
        is_done = node.id in stays and "update" not in node.tags  # an update is done when the step is written
        return costs.seconds(node, bare.contents) if is_done else 0.0

    cluster = connected()
    has_server = cluster is None or len(cluster.servers) == 1  # as connect(4) has; of several, each takes its share
    found = search(groups.problem(seconds, costs.size, has_server=has_server), costs.links)
    timeline = with_late_messages(chosen(found), costs.links)
    at, late = timeline.at, {groups.nodes[op].id for op in timeline.late}
    homes = {number: at[group] or 0 for number, group in groups.group_of.items() if number in groups.free}
    is_cut = len({*homes.values()}) > 1 or any(group.asked is not None for group in groups.groups)
    nodes = bare.contents.nodes
    _commit(graph, bare, requests(nodes, homes, soft=soft) if is_cut else {}, late)
    parts = in_parts(step_graph(graph, values, step.feeds))
    return AutoPlacement(graph, parts, groups, found, timeline, costs, tasks)


def _bare(graph: Graph, values: Sequence[Value], feeds: Iterable[FeedKey] | None) -> tuple[Graph, tuple[Key, ...]]:
    """The graph without requests of an earlier placement, and the keys of its feeds."""
    bare = graph.derive(unplaced(graph.contents, graph.attached.get(_GIVEN, {})))
    return bare, step_graph(bare, values, ()).graph.placeholders if feeds is None else tuple(feeds)


def _batch(graph: Graph, keys: Iterable[Key], batch: Iterable[Any]) -> Sequence[torch.Tensor]:
    """The batch of these keys, as tensors that the graph takes."""
    return Feeder(graph, [(key, fed_by(graph, key)) for key in keys]).fed(batch)[0]


def _commit(graph: Graph, bare: Graph, asks: Mapping[int, str], late: Collection[int] = ()) -> None:
    """Let nodes of the graph ask for these devices. Requests of an earlier placement go. late: as of `placed`."""
    contents, graph.attached[_GIVEN] = placed(bare.contents, asks, late)
    graph.commit(contents)


def _staged(
    graph: Graph, values: Sequence[Value], feeds: Iterable[FeedKey] | None, stages: int, soft: bool
) -> StagedStep:
    """The step in stages; the graph asks for these stages from now on."""
    ensure_type(stages, int, "stages")
    ensure_type(soft, bool, "soft")
    if stages < 1:
        raise InvalidArgument(f"stages={stages}: a step has one stage at least")
    graph.ensure_open()
    bare, keys = _bare(graph, values, feeds)
    batch = feeds if isinstance(feeds, Mapping) else {key: _sample(graph, key) for key in keys}
    step = step_graph(bare, values, _fed(graph, keys))
    weights = _weights(step, _batch(graph, keys, batch.values()))
    ends = weights.ends(stages)
    _commit(graph, bare, requests(bare.contents.nodes, weights.tasks(ends), soft=soft))
    return StagedStep(graph, in_parts(step_graph(graph, values, step.feeds)), weights.stages(ends))


def _sample(graph: Graph, key: Key) -> torch.Tensor:
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
    sizes = _sizes(step, [tensor.shape for tensor in batch])
    measured = step_graph(step.whole, without_writes(step, forward), step.feeds)
    seconds = seconds_of_calls(step, calls, node_seconds(measured, batch))
    return StageWeights(calls, seconds, passages(step, calls, sizes))
