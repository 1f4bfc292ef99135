"""Passes: functions from Graph to Graph."""

from tfnb.passes.prune import feed_symbols, prune

__all__ = ["feed_symbols", "prune"]
