"""Running: a graph lowered to one generated function, computed and then committed.

The way of a step: `lower` makes a `program`, the generated function (with `bindings` and `calls` in it; of loops and
branches it is `regions`, `in_place`, `passing` and, for what turns can share, `products`; of updates `fused`), `quick`
writes it once more with the numbers of `scalars` inside, `tiers` chooses between it and compiled code, `captured`
launches either whole (by `cuda_graphs`), `running` lets others stop it, `commit` writes, `explain` names the line of
what failed.
Compiling: `compiler`, `groups` and `halves` for steps; `native`, `cpp` and `arithmetic` for loops.
Dataflow: `plan` and `flow_calls` make what `machine` runs, `dataflow` carries it out on a `pool`.
Memory and other threads: `planned`, `heap`; `stale`. Clocks: `clocks`, `trace`, `tracer`, `parts`, `kernels`, `watch`,
`turns`.
"""

from tfnb.execution.commit import Pending
from tfnb.execution.kernels import profiling
from tfnb.execution.lower import lower
from tfnb.execution.parts import Clocked, Run
from tfnb.execution.planned import Budget
from tfnb.execution.program import Program
from tfnb.execution.trace import Trace
from tfnb.execution.tracer import Tracer

__all__ = ["Budget", "Clocked", "Pending", "Program", "Run", "Trace", "Tracer", "lower", "profiling"]
