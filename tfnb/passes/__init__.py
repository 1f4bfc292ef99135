"""Passes: functions from Graph to Graph."""

from tfnb.passes.absorb import absorb
from tfnb.passes.again import again
from tfnb.passes.donate import donate, overwriting
from tfnb.passes.fold import fold
from tfnb.passes.hoist import hoist
from tfnb.passes.layout import LAID_OUT, channels_last, chosen_layout
from tfnb.passes.memory import Memory, peak
from tfnb.passes.merge import merge
from tfnb.passes.narrow import narrow
from tfnb.passes.numbers import numbers
from tfnb.passes.order import order, split
from tfnb.passes.pipeline import LAST, LAYOUTS, PIPELINE, Passes, Stage, optimize, stages, table, with_fed
from tfnb.passes.prune import feed_symbols, prune
from tfnb.passes.simplify import simplify
from tfnb.passes.sink import sink
from tfnb.passes.stack import stack

__all__ = [
    "LAID_OUT", "LAST", "LAYOUTS", "PIPELINE", "Memory", "Passes", "Stage", "absorb", "again", "channels_last",
    "chosen_layout",
    "donate", "feed_symbols", "fold", "hoist", "merge", "narrow", "numbers", "optimize", "order", "overwriting", "peak",
    "prune", "simplify", "sink", "split", "stack", "stages", "table", "with_fed",
]  # fmt: skip
