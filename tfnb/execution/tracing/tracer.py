"""The tracer: a step runs as generated code with probes, and what they call keeps what was asked for.

`Times` keeps when each part of the code was over, at hardly any cost, so that it may stay on; bytes are predicted.
`tfnb.execution.tracing.everything` keeps more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from tfnb.execution.commit import Pending
from tfnb.execution.lowering.program import Program
from tfnb.execution.tracing.clocks import moment
from tfnb.execution.tracing.probes import Probe, Probed
from tfnb.execution.tracing.trace import Event, Trace


class Tracer:
    """One step of a program; `forward` and `commit` stand in for the program's. Made anew for each step."""

    by_parts: ClassVar[bool] = False

    untraced = ""  # which code runs the step when nobody looks, and why

    def __init__(self, program: Program) -> None:
        self.program, self.code = program, Probed.of(program, by_parts=self.by_parts)
        self.device, self.thread = self.code.device, threading.current_thread().name
        self.began = time.time_ns()

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """What the generated code gives for these feeds, storages and run number."""
        raise NotImplementedError

    def commit(self, pending: Pending) -> None:
        """Write everything."""
        self.program.commit(pending)

    def end(self, results: Iterable[Any], profile: Mapping[str, Any]) -> None:
        """The step is over, and the caller holds ``results``; profile: of torch's own profiler."""

    def trace(self) -> Trace:
        """What was kept."""
        raise NotImplementedError


class Times(Tracer, Probe):
    """When each part was over. On an accelerator its own events are noted, and read when the trace is."""

    by_parts = True

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.is_cpu = self.device.type == "cpu"
        self.read = time.perf_counter_ns if self.is_cpu else partial(moment, self.device)
        self.marks: list[Any] = []

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """What the generated code gives."""
        self.shapes = [feed.shape for feed in args[: len(self.program.feeds)]]
        self.marks.append(self.read())
        return self.code.forward(self, *args)

    def probe(self, place: int, value: Any) -> None:
        """A part is over."""
        self.marks.append(self.read())

    def commit(self, pending: Pending) -> None:
        """Write everything, as a part of its own."""
        super().commit(pending)
        self.marks.append(self.read())

    def seconds(self) -> list[float]:
        """When each mark was made, from the first one."""
        if self.is_cpu:
            return [1e-9 * (mark - self.marks[0]) for mark in self.marks]
        torch.accelerator.synchronize(self.device)
        return [1e-3 * self.marks[0].elapsed_time(mark) for mark in self.marks]

    def trace(self) -> Trace:
        """Parts as events, with predicted bytes."""
        program, at = self.program, self.seconds()
        made, held = self.code.predicted(self.shapes)
        names = [part.name for part in self.code.parts]
        if program.writes:
            names.append("commit")
            made.append(sum(variable.storage.untyped_storage().nbytes() for variable in program.writes))
        events = [
            Event(None, start, end, size, str(self.device), self.thread, name)
            for name, start, end, size in zip(names, at[:-1], at[1:], made, strict=False)
        ]
        live = [(0.0, 0), *zip(at[1:], held, strict=False)]
        return Trace(program.whole, program.fetches, tuple(events), tuple(live), at[len(names)], self.began,
                     untraced=self.untraced)  # fmt: skip
