"""Passes: functions from Graph to Graph."""

from tfnb.passes.fold import fold
from tfnb.passes.merge import merge
from tfnb.passes.pipeline import PIPELINE, optimize, stages
from tfnb.passes.prune import feed_symbols, prune
from tfnb.passes.simplify import simplify
from tfnb.passes.stack import stack

__all__ = ["PIPELINE", "feed_symbols", "fold", "merge", "optimize", "prune", "simplify", "stack", "stages"]
