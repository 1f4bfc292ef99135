"""The tracer: a step runs as generated code with probes, and the probes record the requested data.

`tfnb.execution.tracing.everything` keeps all of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tfnb.execution.commit import Pending
from tfnb.execution.lowering.program import Program
from tfnb.execution.tracing.probes import ProbedCode
from tfnb.execution.tracing.trace import Trace


class Tracer:
    """One step of a program; `forward` and `commit` stand in for the program's. Made anew for each step."""

    untraced = ""  # which code runs the step when nobody looks, and why

    def __init__(self, program: Program) -> None:
        self.program, self.code = program, ProbedCode.of(program)
        self.device, self.thread = self.code.device, threading.current_thread().name
        self.began = time.time_ns()

    def forward(self, *args: object) -> tuple[Any, ...]:
        """Run the generated code for these feeds, storages and run number."""
        raise NotImplementedError

    def commit(self, pending: Pending) -> None:
        """Write everything."""
        self.program.commit(pending)

    def end(self, results: Iterable[Any], profile: Mapping[str, Any]) -> None:
        """The step is over, and the caller holds ``results``; profile: of torch's own profiler."""

    def trace(self) -> Trace:
        """The recorded trace."""
        raise NotImplementedError
