"""Stages of a step: the calls of its modules, cut into consecutive groups of even weight. Pure.

A stage is one task of a pipeline. Its weight is the seconds of its nodes, forward and backward, and those of the
values, and their gradients, that it sends to other stages and receives from them. `tfnb.session.step_parts` measures
the nodes, and writes the result into the graph as device requests of nodes, like those of ``tfnb.device``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from tfnb.errors import InvalidArgument
from tfnb.graph import Contents, Graph, Node
from tfnb.graph.device_request import DeviceRequest, nested, parse
from tfnb.graph.ops import LATE
from tfnb.passes.flow.places import Place
from tfnb.passes.flow.reasons import StepParts
from tfnb.passes.flow.step_flow import StepFlow
from tfnb.placement.costs import LATENCY, RATE
from tfnb.placement.module_calls import ModuleCall, Passage, colocated_calls, is_gradient, task_of
from tfnb.placement.shards import nbytes

SLACK = 1.05  # nodes are not timed better: among cuts whose slowest stage is within this of the best, bytes decide
INFINITE = float("inf")

Cost = Callable[[int, int, int], float]
"""The cost of a stage: its number, its first unit, and the one behind its last; infinite where it cannot be."""


def least_maximum(cost: Cost, units: int, stages: int) -> tuple[int, ...] | None:
    """Cut units into consecutive stages with the least largest cost: the ends, or None if every cut is infinite.

    Exact: dynamic programming over the first unit of the last stage.

    >>> weights = [3, 1, 1, 1, 2]
    >>> least_maximum(lambda stage, start, stop: sum(weights[start:stop]), 5, 3)
    (1, 3, 5)
    """
    best: list[tuple[float, tuple[int, ...]]] = [(INFINITE if stop else 0.0, ()) for stop in range(units + 1)]
    for stage in range(stages):
        best = [
            min(
                ((max(best[start][0], cost(stage, start, stop)), (*best[start][1], stop)) for start in range(stop)),
                key=lambda found: found[0],
                default=(INFINITE, ()),
            )
            for stop in range(units + 1)
        ]
    return best[units][1] if best[units][0] < INFINITE else None


@dataclass(frozen=True)
class PipelineStage:
    """A stage, as a line of a table. sends: bytes of the values for later stages, for the measured batch.

    variables, slots: bytes of the Variables first read here, and of other Variables updated together with these.
    """

    place: Place
    modules: tuple[str, ...]
    variables: int
    slots: int
    seconds: float
    sends: int


class StagedStep(StepParts):
    """A step in the ``stages`` that `tfnb.place` chose; prints a table of them."""

    def __init__(self, graph: Graph, step: StepFlow, stages: Sequence[PipelineStage]) -> None:
        super().__init__(graph, step)
        self.stages = tuple(stages)

    def __repr__(self) -> str:
        rows = [("stage", "Variables", "slots", "ms", "sends", "modules")]
        for stage in self.stages:
            numbers = f"{stage.variables:,}", f"{stage.slots:,}", f"{stage.seconds * 1e3:.2f}", f"{stage.sends:,}"
            rows.append((str(stage.place), *numbers, ", ".join(stage.modules)))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [[row[0].ljust(wide[0]), *map(str.rjust, row[1:-1], wide[1:-1]), row[-1]] for row in rows]
        return "\n".join(map("  ".join, lines))

    def _repr_html_(self) -> str:
        from tfnb.view import stages_html  # listed exception: a repr asks view

        return stages_html(self)


@dataclass(frozen=True)
class StageWeights:
    """The input of the cut: the calls of modules, the seconds of each, and the values between them."""

    calls: Sequence[ModuleCall]
    seconds: Sequence[float]
    passages: Sequence[Passage]

    def ends(self, stages: int) -> tuple[int, ...]:
        """Ends of the stages, by number of calls: least seconds of the slowest stage, then least bytes of the largest.

        Raises InvalidArgument where there are too few calls, or where requests of the user leave no such stages.
        """
        units = len(self.calls)
        if not any(call.path for call in self.calls):
            raise InvalidArgument(
                "stages are made of modules and name scopes, and none of the step's nodes is in one: call modules in "
                "the cell, or place nodes by tfnb.device('task:0')"
            )
        if units < stages:
            what = f"{units} module{'s' * (units != 1)}: {', '.join(call.name for call in self.calls)}"
            raise InvalidArgument(f"a stage has one module at least, and stages={stages} of {what}")
        self._ensure_in_order(stages)
        seconds = self._stage_seconds()
        bytes_before = [0, *accumulate(call.bytes for call in self.calls)]

        together = colocated_calls(self.calls)

        def time(stage: int, start: int, stop: int) -> float:
            asked = any(call.task not in (None, stage) for call in self.calls[start:stop])
            is_cut = any(first < border <= last for border in (start, stop) for first, last in together)
            return INFINITE if asked or is_cut else seconds[start][stop]

        quickest = least_maximum(time, units, stages)
        if quickest is None:
            reasons = [f"{c.name} asks for task:{c.task}" for c in self.calls if c.task is not None]
            reasons += [f"{self.calls[a].name} to {self.calls[b].name} are colocated" for a, b in together]
            raise InvalidArgument(
                f"stages={stages} of {units} modules in their order, and {', '.join(reasons)}: a stage would be empty"
            )
        bound = SLACK * max(seconds[start][stop] for start, stop in pairwise((0, *quickest)))

        def size(stage: int, start: int, stop: int) -> float:
            return bytes_before[stop] - bytes_before[start] if time(stage, start, stop) <= bound else INFINITE

        return least_maximum(size, units, stages) or quickest

    def _ensure_in_order(self, stages: int) -> None:
        """Raise InvalidArgument for requests of the user that contradict consecutive stages."""
        before: ModuleCall | None = None
        for call in self.calls:
            if call.task is None:
                continue
            if call.task >= stages:
                raise InvalidArgument(
                    f"stages={stages} are task:0 to task:{stages - 1}, and {_said(call)}", **_where(call.asked)
                )
            if before is not None and before.task is not None and before.task > call.task:
                raise InvalidArgument(
                    f"stages go through the modules in their order, and {_said(before)}, but {_said(call)}, which "
                    "comes later: take one of these requests away",
                    **_where(call.asked),
                )
            before = call

    def _stage_seconds(self) -> list[list[float]]:
        """Seconds of the stage from each call to each later one, with its messages."""
        units = len(self.calls)
        before = [0.0, *accumulate(self.seconds)]
        found = [[before[stop] - before[start] for stop in range(units + 1)] for start in range(units)]
        for border in range(1, units):
            sent, taken = [0.0] * (units + 1), [0.0] * (units + 1)  # by where it was made; by where it is used first
            for source, users, sizes in self.passages:
                later = next((user for user in users if user >= border), None)
                if source < border and later is not None:
                    price = sum(LATENCY + size / RATE for size in sizes)
                    sent[source] += price
                    taken[later] += price
            for start in range(border):
                found[start][border] += sum(sent[start:border])
            for stop in range(border + 1, units + 1):
                found[border][stop] += sum(taken[border:stop])
        return found

    def tasks(self, ends: Sequence[int]) -> dict[int, int]:
        """The number of each node's stage, by the node's id."""
        stages = enumerate(pairwise((0, *ends)))
        return {n.id: number for number, (start, stop) in stages for call in self.calls[start:stop] for n in call.nodes}

    def stages(self, ends: Sequence[int]) -> tuple[PipelineStage, ...]:
        """The stages, as lines of a table."""
        found = []
        for number, (start, stop) in enumerate(pairwise((0, *ends))):
            mine = self.calls[start:stop]
            found.append(
                PipelineStage(
                    Place(number),
                    _shortest(
                        [call.path or (call.name,) for call in mine], [c.path for c in self.calls if c not in mine]
                    ),
                    sum(nbytes(variable) for call in mine for variable in call.variables),
                    sum(nbytes(variable) for call in mine for variable in call.slots),
                    sum(self.seconds[start:stop]),
                    sum(p.bytes[0] for p in self.passages if start <= p.source < stop <= p.users[-1]),
                )
            )
        return tuple(found)


def requests(nodes: Iterable[Node], tasks: Mapping[int, int], *, soft: bool) -> dict[int, str]:
    """The device request of each node that has a task, by id; a gradient without one has that of its forward node.

    tasks: numbers by the ids of nodes. A request of the user for a task stands, and fields of others are kept.
    """
    asks: dict[int, str] = {}
    for node in nodes:
        number, device = tasks.get(node.id), node.device
        if number is not None:
            here = str(DeviceRequest(task=number, soft=True)) if soft else f"task:{number}"
            is_free = device is None or (parse(device).job != "ps" and parse(device).task is None)
            asks[node.id] = here if device is None else str(nested(device, here)) if is_free else device
        elif is_gradient(node) and node.forward in asks and task_of(node) is None:
            asks[node.id] = asks[node.forward]
    return asks


Requests = Mapping[int, tuple[str | None, str]]
"""Device requests that stages gave, by node: the one before, and the one given."""


def placed(
    contents: Contents, asks: Mapping[int, str], late: Collection[int] = ()
) -> tuple[Contents, Requests]:  # fmt: skip
    """The contents with these requests, and the changes. late: ids of nodes whose values are sent late."""
    changed = {n.id: (n.device, asks[n.id]) for n in contents.nodes if n.device != asks.get(n.id, n.device)}
    nodes = (replace(n, device=changed[n.id][1]) if n.id in changed else n for n in contents.nodes)
    tagged = tuple(replace(n, tags=n.tags | {LATE}) if n.id in late else n for n in nodes)
    return replace(contents, nodes=tagged), changed


def unplaced(contents: Contents, given: Requests) -> Contents:
    """The contents before `placed`; gradients recorded later lose the request of their forward node, too."""
    before: dict[int, tuple[str | None, str]] = {}
    nodes, has_changed = [], False
    for node in contents.nodes:
        found = given.get(node.id) or (before.get(node.forward or 0) if is_gradient(node) else None)
        if found is not None and node.device == found[1]:
            before[node.id] = found
            node = replace(node, device=found[0])
        is_late = LATE in node.tags
        has_changed = has_changed or is_late or found is not None
        nodes.append(replace(node, tags=node.tags - {LATE}) if is_late else node)
    return replace(contents, nodes=tuple(nodes)) if has_changed else contents


def _shortest(paths: Sequence[tuple[str, ...]], others: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Names of modules: the outermost ones with all of their calls among ``paths``."""
    taken = {other[:end] for other in others for end in range(len(other) + 1)}
    found = (next((path[:end] for end in range(1, len(path)) if path[:end] not in taken), path) for path in paths)
    return tuple(dict.fromkeys(map(".".join, found)))


def _said(call: ModuleCall) -> str:
    at = "" if call.asked is None or call.asked.source is None else f" ({call.asked.source})"
    return f"{call.name} asks for task:{call.task}{at}"


def _where(node: Node | None) -> dict[str, Any]:
    return {} if node is None else node.where
