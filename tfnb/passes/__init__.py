"""Passes: functions from Graph to Graph."""

from tfnb.passes.prune import feed_symbols, prune
from tfnb.passes.transposes import drop_double_transposes

__all__ = ["drop_double_transposes", "feed_symbols", "prune"]
