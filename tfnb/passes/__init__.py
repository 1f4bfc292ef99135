"""Passes: functions from Graph to Graph, and their shared analyses.

`pipeline` has their order. `prune` keeps what a run needs. Until nothing changes: `fractions` keep their dtype, `fold`
constants, `simplify` by a table, `merge` equal nodes (`region_merging`: loops and branches). Once, what a commit does
in place: `conditional_updates`, `in_place_commit`. Once, kernels and order: `stack` products, `memory_format`,
`narrow`, `order`, `numbers` (in loops and branches), and `donate` once memory is planned. `flow`: the graph as
dataflow, and its parts for several places. What passes share: `rewrite`, `resolve` (the state that nodes see),
`liveness` (which values are held when), `unordered` (which accesses to Variables have no order). `microbatches` is
asked for a step whose rows are done range by range.
"""

from tfnb.passes.conditional_updates import conditional_updates
from tfnb.passes.donate import donate, overwriting
from tfnb.passes.fold import fold
from tfnb.passes.in_place_commit import absorb
from tfnb.passes.liveness import Memory, peak
from tfnb.passes.memory_format import LAID_OUT, channels_last, chosen_layout
from tfnb.passes.merge import merge
from tfnb.passes.narrow import narrow
from tfnb.passes.numbers import numbers
from tfnb.passes.order import order, split
from tfnb.passes.pipeline import (
    LAYOUTS,
    ONCE,
    PIPELINE,
    Passes,
    PassResult,
    optimize,
    optimized,
    stages,
    table,
    with_fed,
)
from tfnb.passes.prune import StepGraph, feed_symbols, prune, step_graph
from tfnb.passes.simplify import simplify
from tfnb.passes.stack import stack

__all__ = [
    "LAID_OUT",
    "LAYOUTS",
    "ONCE",
    "PIPELINE",
    "Memory",
    "PassResult",
    "Passes",
    "StepGraph",
    "absorb",
    "channels_last",
    "chosen_layout",
    "conditional_updates",
    "donate",
    "feed_symbols",
    "fold",
    "merge",
    "narrow",
    "numbers",
    "optimize",
    "optimized",
    "order",
    "overwriting",
    "peak",
    "prune",
    "simplify",
    "split",
    "stack",
    "stages",
    "step_graph",
    "table",
    "with_fed",
]  # fmt: skip
