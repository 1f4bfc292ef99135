"""A step placed by a search, for people: predicted times, measured times below, and reasons for places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tfnb.execution.tracing.trace import Event, Trace, Transmission
from tfnb.graph import Graph, Node
from tfnb.graph.device_request import readable
from tfnb.memory.byte_counts import told
from tfnb.passes.flow.places import Place
from tfnb.passes.flow.reasons import StepParts, Why
from tfnb.passes.flow.step_flow import StepFlow
from tfnb.placement.costs import PlacementCosts
from tfnb.placement.groups import GroupedStep
from tfnb.placement.placement_search import SearchResult
from tfnb.placement.simulation import Timeline, TimelineBar, simulate

WIDE = 48  # characters of a lane in a table
GAIN = 0.98  # of the time on one task: a step that is not quicker than that on several stays on one


class AutoPlacement(StepParts):
    """A step that `tfnb.place` placed by a search; prints its predicted times, and the time of the last traced run.

    ``timeline``: the predicted times of the placement. ``tasks``: how many tasks there were to choose from.
    ``predicted`` and ``measured`` are traces, with bars for each place and link. The table has the most bytes of
    values that a place holds, and what that would be if all values were sent at once: some are sent when their own
    places have used them, where the step takes no longer for it (S-154).
    """

    def __init__(
        self, graph: Graph, step: StepFlow, grouped: GroupedStep, found: SearchResult, timeline: Timeline,
        costs: PlacementCosts, tasks: int,
    ) -> None:  # fmt: skip
        super().__init__(graph, step)
        self.tasks, self._grouped, self._found, self._costs = tasks, grouped, found, costs
        self.timeline = timeline
        self._before = graph.attached.get("trace")

    @property
    def seconds(self) -> float:
        """The predicted seconds of a run, with its margins as far as traces know them."""
        return self.timeline.seconds + sum(self._costs.times.margin)

    @property
    def measured(self) -> Trace | None:
        """The last traced run of these fetches since this placement was made, None if there is none."""
        trace = self.graph.attached.get("trace")
        is_ours = trace is not None and trace is not self._before and trace.fetches == self._step.step.fetches
        return trace if is_ours else None

    @property
    def predicted(self) -> Trace:
        """The predicted times as a trace: each node at its place, and each message on its link."""
        return Trace(
            self.graph, self._step.step.fetches, tuple(self._events()), (), self.seconds, 0, grouped="place",
            transmissions=tuple(self._messages()),
        )  # fmt: skip

    def _events(self) -> Iterator[Event]:
        margin = self._costs.times.margin
        for op, start, end in sorted(self.timeline.op_times(), key=lambda item: (self._at(item[0]), item[1])):
            node = self._grouped.nodes[op]
            size = sum(self._costs.size(node, output) for output in range(len(node.outputs)))
            if end > start:
                yield Event(node, margin.before + start, margin.before + end, size, "cpu", str(self._at(op)))

    def _messages(self) -> Iterator[Transmission]:
        before = self._costs.times.margin.before
        for bar in self.timeline.messages:
            source, to = (str(Place(number)) for number in bar.lane)
            maker, size = self.timeline.problem.values[bar.value]
            node = self._grouped.nodes[maker]
            yield Transmission(source, to, before + bar.start, before + bar.end, size, node)

    def _at(self, op: int) -> Place:
        return Place(self.timeline.at[self.timeline.problem.groups[op]] or 0)

    def why(self, node: Node | torch.Tensor | str) -> Why:
        """Explain the place of a node, with the predicted time of the step for each place where its group may be.

        Raises NotFound, with names that are near, where the step has no such node.
        """
        why = super().why(node)
        found = self._find(node)
        number = self._grouped.group_of.get(found.id)
        if number is None:
            return why
        group, at = self._grouped.groups[number], [*self.timeline.at]
        request = readable(next((n.device for n in group.nodes if n.id == found.id), None))
        if group.asked is not None:
            rule = f"{group.title}: {group.asked.name} asks for {group.places[0]}"
            return replace(why, rule=rule, request=request, possible=group.places)
        times = []
        for place in group.places:
            at[number] = place.number
            seconds = simulate(self.timeline.problem, at, self._costs.links).seconds
            times.append(f"{1e3 * seconds:.3f} ms at {place}")
        rule = f"{group.title}: the step is predicted to take {', '.join(times)}"
        return replace(why, rule=rule, request=request, possible=group.places)

    @property
    def summary(self) -> str:
        """The answer in a line."""
        found, used = self._found, len({*self.timeline.at})
        one, best = (f"{1e3 * each.seconds:.3f} ms" for each in (found.one, found.best))
        tried = f"{found.tried:,} placements of {len(self._grouped.groups):,} groups tried"
        if used < 2:
            several = "" if found.best is found.one else f"; the best over several {best}"
            return f"one task of {self.tasks} is enough: predicted {one}{several}; {tried}"
        is_free = all(group.asked is None for group in self._grouped.groups)
        alone = "on one task" if is_free else "with all that is free on one task"
        return (
            f"{used} of {self.tasks} tasks: predicted {1e3 * self.timeline.seconds:.3f} ms; {alone} {one}, in turn "
            f"{1e3 * found.in_turn.seconds:.3f} ms; {tried}"
        )

    @property
    def comparison(self) -> str:
        """The measured time beside the predicted one; empty before a traced run."""
        if self.measured is None:
            return ""
        return f"last traced run {1e3 * self.measured.seconds:.3f} ms, predicted {1e3 * self.seconds:.3f} ms in all"

    def __repr__(self) -> str:
        rows = [("lane", "items", "busy ms", "sent", "most held", "at once", ""), *self._rows()]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [[row[0].ljust(wide[0]), *map(str.rjust, row[1:-1], wide[1:-1]), row[-1]] for row in rows]
        table = ["  ".join(line).rstrip() for line in lines]
        return "\n".join([self.summary, *table, *filter(None, [self.comparison])])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """A line of each place, then of each link, with its bars over the time of the step."""
        timeline, at_once = self.timeline, chosen(self._found)
        lanes: dict[tuple[int, ...], list[TimelineBar]] = {}
        for bar in timeline.bars:
            lanes.setdefault(bar.lane, []).append(bar)
        for lane in sorted(lanes, key=lambda lane: (len(lane), lane)):
            bars, is_link = lanes[lane], len(lane) > 1
            items = len(bars) if is_link else sum(len(bar.ops) for bar in bars)
            busy = sum(bar.end - bar.start for bar in bars)
            sent = sum(timeline.problem.values[bar.value].bytes for bar in bars if is_link)
            held = ("", "") if is_link else tuple(told(each.peaks.get(lane[0], 0)) for each in (timeline, at_once))
            name = " → ".join(str(Place(number)) for number in lane)
            yield name, str(items), f"{1e3 * busy:.3f}", told(sent) if is_link else "", *held, self._picture(bars)

    def _picture(self, bars: Sequence[TimelineBar]) -> str:
        """Bars as a line of text."""
        marks, scale = [" "] * WIDE, WIDE / (self.timeline.seconds or 1.0)
        for bar in bars:
            start, end = int(scale * bar.start), math.ceil(scale * bar.end)
            marks[start:end] = ("█" if bar.value < 0 else "▒") * (min(end, WIDE) - start)
        return "".join(marks)

    def _repr_html_(self) -> str:
        from tfnb.view import auto_placement_html  # listed exception: a repr asks view

        return auto_placement_html(self)


def chosen(found: SearchResult) -> Timeline:
    """The placement that is taken: several places where that saves enough."""
    return found.best if found.best.seconds < GAIN * found.one.seconds else found.one
