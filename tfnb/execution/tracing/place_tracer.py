"""The tracer of one place of a step that runs on several: times of nodes by the true clock of the process.

`tfnb.execution.tracing.everything` stops its clock while it looks, so its times fit no other process's. Here the clock
goes on, and what looking takes lies between the nodes. Loops and branches that are one call of the code are one span.
Those that are cut over several places give a span for each node and iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from tfnb.errors import ResourceExhausted
from tfnb.execution.lowering.program import Program
from tfnb.execution.tracing.live_memory import Held, LiveMemory, devices, tensors, wait
from tfnb.execution.tracing.probes import Probe, ProbedCode
from tfnb.graph import Node

MOST = 200_000  # spans of one place in one step


class Span(NamedTuple):
    """A node that ran: when, in nanoseconds of `time.monotonic_ns`, and the bytes of its outputs."""

    node: Node
    start: int
    end: int
    bytes: int
    device: str


class PlaceTracer:
    """The trace of one place in one step, over all threads; ``points``: live bytes, if one function is the step.

    ``watching`` and ``whole`` give the functions that stand in for those of programs.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.points: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Clear the trace."""
        self.spans, self.points = [], []

    def prepare(self, programs: Iterable[Program]) -> None:
        """Make probed code for these programs ahead of time, so that no step waits."""
        for program in programs:
            ProbedCode.of(program)

    def watching(self, program: Program) -> Callable[..., tuple[Any, ...]]:
        """The function of a program that is a part of the step."""
        code = ProbedCode.of(program)
        return lambda *args: code.forward(_Spans(self, code), *args)

    def whole(self, program: Program) -> Callable[..., tuple[Any, ...]]:
        """A probed function of a program that is the whole part of a place; counts live bytes, too."""
        code = ProbedCode.of(program)

        def forward(*args: object) -> tuple[Any, ...]:
            start, memory = time.monotonic_ns(), LiveMemory()
            memory.borrow((args, code.constants))
            found = code.forward(_LiveSpans(self, code, memory, start), *args)
            memory.keep(found, (time.monotonic_ns() - start) * 1e-9)
            self.points = [(start + round(1e9 * at), count) for at, count in memory.points]
            return found

        return forward

    def add(self, node: Node, start: int, found: list[torch.Tensor], end: int) -> None:
        """A node ran. Raises ResourceExhausted beyond `MOST` of them."""
        if len(self.spans) >= MOST:
            raise ResourceExhausted(
                f"a trace holds {MOST:,} runs of nodes of one place, and this step has more: trace one with fewer "
                "iterations, or run without trace"
            )
        size = sum(tensor.numel() * tensor.element_size() for tensor in found)
        self.spans.append(Span(node, start, end, size, str(found[0].device) if found else "cpu"))


class _Spans(Probe):
    """The probes of one call of a program."""

    __slots__ = ("code", "since", "tracer")

    def __init__(self, tracer: PlaceTracer, code: ProbedCode) -> None:
        self.tracer, self.code, self.since = tracer, code, time.monotonic_ns()

    def probe(self, place: int, value: object) -> None:
        """A call of the code gave this."""
        wait(devices(value))
        end, node, found = time.monotonic_ns(), self.code.nodes[place], tensors(value)
        if node is not None and (self.code.owned[place] or found):
            self.tracer.add(node, self.since, found, end)
        self.since = time.monotonic_ns()


class _LiveSpans(_Spans):
    """The probes of one call of a program, counting live bytes."""

    __slots__ = ("held", "memory", "zero")

    def __init__(self, tracer: PlaceTracer, code: ProbedCode, memory: LiveMemory, zero: int) -> None:
        super().__init__(tracer, code)
        self.memory, self.zero, self.held = memory, zero, dict[int, Held]()

    def probe(self, place: int, value: object) -> None:
        """A call of the code gave this."""
        start = self.since
        super().probe(place, value)
        self.held[place] = self.memory.hold(value, (start - self.zero) * 1e-9)
        for dead in self.code.dead[place]:
            self.memory.free(self.held.pop(dead, []), (self.since - self.zero) * 1e-9)
        self.since = time.monotonic_ns()
