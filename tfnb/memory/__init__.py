"""Memory: one plan of the values kept, recomputed or offloaded in a step, on a byte budget.

`memory_plan`: the plan (`MemoryPlan`), one `Decision` for each value or loop that does not stay. `rematerialize`: the
search in straight code. `loop_rows`: what loops keep of each iteration. `prices`: what computing and moving cost, in
one unit, by the constants of `machine_rates`. `byte_counts`: budgets as text. The plan knows predicted bytes only. It
is carried out, for straight code, by copies of nodes in the graph; for rows of loops, by `tfnb.kernels.memory_budget`
and the files beside it; for packs, by `tfnb.execution.pack_step`. `packs`, `pack_cut`, `pack_tasks`: a step in packs of
layers; `residency`: which tensors, small ones in `slabs`, are on the device for which tasks; `moves`: when they are
copied; `lane_clock`: how long that takes; `pack_search`: which packs, and how many microbatches. `scratch`: bytes
beside values, of Variables and kernels, measured by torch's `profiler`.
"""

from tfnb.memory.byte_counts import byte_count
from tfnb.memory.loop_rows import LoopRows, of_rows, working
from tfnb.memory.memory_plan import LAST, Decision, MemoryPlan, memory_plan, step_passes, within
from tfnb.memory.rematerialize import least_budgets, spare

__all__ = [
    "LAST", "Decision", "LoopRows", "MemoryPlan", "byte_count", "least_budgets", "memory_plan", "of_rows", "spare",
    "step_passes", "within", "working",
]  # fmt: skip
