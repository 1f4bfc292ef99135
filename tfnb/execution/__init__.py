"""Running: a graph lowered to one generated function, computed and then committed.

`lowering` makes a program, `tiers` chooses the code that runs it, `running` lets others stop it, `commit` writes,
`explain` names the line of what failed, `casts` leaves out the caller's autocast. `step_code` is all that computes one
step here, `budgeted` keeps to a memory budget, `pack_step` runs a step in packs of layers on a `virtual_device` with
`copy_lanes`, `heap` primes the allocator.
`dataflow` is the machine for queues and overlapping loops, `tracing` watches.
`compiling` is the process that compiles, and its packages on disk.
"""

from tfnb.execution.budgeted import Budget
from tfnb.execution.commit import Pending
from tfnb.execution.lowering.lower import lower
from tfnb.execution.lowering.program import Program
from tfnb.execution.tracing.checked_steps import CheckedTracer
from tfnb.execution.tracing.everything import Everything
from tfnb.execution.tracing.kernel_events import profiling
from tfnb.execution.tracing.trace import Trace
from tfnb.execution.tracing.tracer import Tracer
from tfnb.execution.tracing.value_health import ValueHealth

__all__ = [
    "TRACERS",
    "Budget",
    "CheckedTracer",
    "Pending",
    "Program",
    "Trace",
    "Tracer",
    "ValueHealth",
    "lower",
    "profiling",
]

TRACERS: dict[object, type[Tracer]] = {True: Everything, "kernels": Everything, "health": ValueHealth}
"""What ``trace=`` of a run keeps."""
