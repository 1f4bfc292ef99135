"""Costs of a step's ops and of its messages: formulas until a run was traced, then medians of traces (S-147). Pure.

The formula of an op is a roofline: the seconds to start a kernel, and those for its bytes or its arithmetic, whichever
are more. `tfnb.session.machine_speed` fits it to this machine. `StepTimes` collects the times of traced runs of a
graph by op and shapes, so that the same op of the same shapes elsewhere in the graph is known, too.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from statistics import median
from typing import Any, NamedTuple

from tfnb.graph import Contents, Node
from tfnb.graph.ops import COND, WHILE
from tfnb.memory.prices import KernelWork, is_kernel, kernel_work
from tfnb.passes.liveness import NOMINAL, nominal
from tfnb.placement.simulation import LinkCost, Links

LATENCY, RATE = 1e-4, 3e9  # seconds of a message between tasks of one host, and bytes in a second
LEAST = 1e-6  # seconds of a kernel
RUNS = 15  # newest measurements that count
SMALL = 1 << 16  # bytes of a message whose time is latency; of larger ones the rest is by bytes

OpKey = tuple[Any, ...]
"""An op with the shapes and dtypes of its operands and results."""


class Roofline(NamedTuple):
    """The speed of a machine: seconds to start a kernel, floating-point operations and bytes in a second.

    >>> Roofline(1e-6, 1e9, 1e9).seconds(KernelWork(bytes=1000, flops=5000))
    6e-06
    """

    start: float
    flops: float
    bytes: float

    def seconds(self, work: KernelWork) -> float:
        """The seconds of a kernel."""
        return max(LEAST, self.start + max(work.flops / self.flops, work.bytes / self.bytes))


class RunMargins(NamedTuple):
    """The seconds of a run before its first op, and after its last one: messages of the notebook, reads, the commit."""

    before: float
    after: float


def op_key(node: Node, contents: Contents, sizes: Mapping[str, int]) -> OpKey | None:
    """The key of a node, None where the maker of an operand is not among the contents."""
    specs = [*node.outputs]
    for value in node.inputs:
        maker = contents.by_id.get(value.node)
        if maker is None or value.index >= len(maker.outputs):
            return None
        specs.append(maker.outputs[value.index])
    return (node.op, len(node.outputs), *((spec.dtype, nominal(spec, sizes)) for spec in specs))


def _newest() -> deque[Any]:
    return deque(maxlen=RUNS)


@dataclass
class StepTimes:
    """The times of the newest traced runs of a graph: of ops by their keys, of messages by their link, and margins.

    A trace is anything with the events, transmissions and seconds of `tfnb.execution.Trace`.
    """

    ops: dict[OpKey, deque[float]] = field(default_factory=lambda: defaultdict(_newest))
    messages: dict[tuple[str, str], deque[tuple[int, float]]] = field(default_factory=lambda: defaultdict(_newest))
    margins: dict[bool, deque[RunMargins]] = field(default_factory=lambda: defaultdict(_newest))  # by: on a cluster

    def learn(self, trace: Any, sizes: Mapping[str, int]) -> None:
        """Take the times of a traced run. sizes: of symbols, in the run."""
        contents = trace.graph.contents
        seconds: dict[int, float] = {}  # several kernels may come from one recorded node
        nodes: dict[int, Node] = {}
        ran = [event for event in trace.events if event.node is not None]
        for event in ran:
            nodes[event.node.id] = event.node
            seconds[event.node.id] = seconds.get(event.node.id, 0.0) + event.seconds
        for number, node in nodes.items():
            key = op_key(node, contents, sizes)
            if key is not None:
                self.ops[key].append(seconds[number])
        for sent in trace.transmissions:
            if sent.source.startswith("task:") and sent.to.startswith("task:"):
                self.messages[sent.source, sent.to].append((sent.bytes, sent.seconds))
        if ran:
            first, last = min(event.start for event in ran), max(event.end for event in ran)
            self.margins[bool(trace.transmissions)].append(RunMargins(first, max(0.0, trace.seconds - last)))

    def link(self, source: str, to: str) -> LinkCost:
        """The cost of a link: as measured there, else as on all links together, else a guess for tasks of one host."""
        found = self.messages.get((source, to)) or [each for link in self.messages.values() for each in link]
        return _fitted(found)

    @property
    def margin(self) -> RunMargins:
        """The medians of the margins, of a cluster if there was one; zeros before a run was traced."""
        found = self.margins.get(True) or self.margins.get(False)
        if not found:
            return RunMargins(0.0, 0.0)
        before, after = zip(*found, strict=True)
        return RunMargins(median(before), median(after))


def _fitted(messages: Iterable[tuple[int, float]]) -> LinkCost:
    """Latency and rate of messages, by medians of the small and of the large ones.

    >>> _fitted([])
    LinkCost(latency=0.0001, rate=3000000000.0)
    >>> _fitted([(8, 0.5), (8, 0.25), (8, 0.5), (1 << 20, 0.75)])
    LinkCost(latency=0.5, rate=4194304.0)
    """
    found = [*messages]
    small = [seconds for size, seconds in found if size <= SMALL]
    latency = median(small) if small else LATENCY
    rates = [size / max(seconds - latency, seconds / 10) for size, seconds in found if size > SMALL and seconds > 0]
    return LinkCost(latency, median(rates) if rates else RATE)


@dataclass(frozen=True)
class PlacementCosts:
    """The costs of a step: the formula of a machine, the measured times that replace the formula, sizes of symbols."""

    roofline: Roofline
    times: StepTimes = field(default_factory=StepTimes)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def seconds(self, node: Node, contents: Contents) -> float:
        """The seconds of a node: the median of traces, else by the formula; of a loop, for 32 iterations then."""
        key = op_key(node, contents, self.sizes)
        measured = self.times.ops.get(key) if key is not None else None
        if measured:
            return max(LEAST, median(measured))
        if node.op == COND:
            return max(self._inside(node.attrs[side].contents) for side in ("then", "else"))
        if node.op == WHILE:
            parts = [part for part in (node.attrs["cond"], node.attrs["body"]) if part is not None]
            return NOMINAL * sum(self._inside(part.contents) for part in parts)
        return self.roofline.seconds(kernel_work(node, contents, self.sizes)) if is_kernel(node) else 0.0

    @cached_property
    def links(self) -> Links:
        """The cost of a link between two tasks, by their numbers."""
        return cache(lambda source, to: self.times.link(f"task:{source}", f"task:{to}"))

    def _inside(self, contents: Contents) -> float:
        return sum(self.seconds(node, contents) for node in contents.nodes)

    def size(self, node: Node, output: int) -> int:
        """The bytes of an output; none of a control edge, whose number is -1."""
        if not 0 <= output < len(node.outputs):
            return 0
        spec = node.outputs[output]
        return math.prod(nominal(spec, self.sizes)) * spec.dtype.itemsize
