"""Decompositions of ops without a gradient rule: our composites first, then torch's.

Uses `torch._decomp` (tried with torch 2.13). Imports recording.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch._decomp import decomposition_table

from tfnb.errors import UnknownOp
from tfnb.gradients.rule_table import COMPOSITES
from tfnb.graph.ops import overload


def decomposition(op: str) -> Callable[..., Any] | None:
    """A function that computes the same from simpler ops, or None."""
    return COMPOSITES.get(op) or _torchs(op)


@lru_cache(maxsize=1024)
def _torchs(op: str) -> Callable[..., Any] | None:
    try:
        which = overload(op)
    except UnknownOp:
        return None
    if which in decomposition_table:
        return decomposition_table[which]
    return which.decompose if which._can_decompose() else None
