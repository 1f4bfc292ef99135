"""What an op is made of, when it has no rule of its own: our composites first, then torch's decompositions.

Uses `torch._decomp` (tried with torch 2.13). Imports recording.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import decomposition_table

from tfnb.errors import UnknownOp
from tfnb.gradients.library import autograd_kernel
from tfnb.gradients.rule_table import COMPOSITES
from tfnb.graph.ops import overload

_LISTS = "aten._foreach_"
_ONE: dict[str, Callable[..., Any]] = {  # what a call on lists is for one member, where the torch function differs
    "addcdiv": lambda x, a, b, value=1: torch.addcdiv(x, a, b, value=value),
    "addcmul": lambda x, a, b, value=1: torch.addcmul(x, a, b, value=value),
    "copy": lambda x, y, *_: y.to(x.dtype).expand_as(x),
    "maximum": lambda x, y: (torch.maximum if isinstance(y, torch.Tensor) else torch.clamp_min)(x, y),
    "minimum": lambda x, y: (torch.minimum if isinstance(y, torch.Tensor) else torch.clamp_max)(x, y),
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "zero": torch.zeros_like,
}


def decomposition(op: str) -> Callable[..., Any] | None:
    """A function that computes the same from simpler ops, or None."""
    return COMPOSITES.get(op) or (_of_members(op) if op.startswith(_LISTS) else _torchs(op))


@lru_cache(maxsize=1024)
def _torchs(op: str) -> Callable[..., Any] | None:
    try:
        which = overload(op)
    except UnknownOp:
        return None
    if which in decomposition_table:
        return decomposition_table[which]
    return which.decompose if which._can_decompose() else autograd_kernel(op)


def _of_members(op: str) -> Callable[..., Any] | None:
    """A call on lists of tensors as the call on each member; what is no list goes to every one."""
    name, _, kind = op.removeprefix(_LISTS).partition(".")
    one = _ONE.get(name) or getattr(torch, name, None)
    if one is None or (kind == "Tensor" and name.startswith("addc")):
        return None  # one tensor that holds a number for each member

    def members(*args: Any, **kwargs: Any) -> list[Any]:
        count = max(len(arg) for arg in args if isinstance(arg, (list, tuple)))
        each = ([arg[i] if isinstance(arg, (list, tuple)) else arg for arg in args] for i in range(count))
        return [one(*own, **kwargs) for own in each]

    return members
