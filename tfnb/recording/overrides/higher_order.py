"""Higher-order operators of torch, such as `torch.cond`: refused, except for some that are tensor code."""

from __future__ import annotations

from typing import Any

from torch._C import DispatchKey

from tfnb.errors import Unsupported
from tfnb.recording.values.recording import Recording

_PLAIN = frozenset({"flex_attention"})  # torch computes it by tensor code


def call(rec: Recording, op: Any, args: Any, kwargs: Any) -> Any:
    """Record a call of a higher-order operator. Raises Unsupported for operators without a form in a graph."""
    plain = op.py_kernels.get(DispatchKey.CompositeExplicitAutograd) if op.name() in _PLAIN else None
    if plain is None:
        raise Unsupported(
            f"torch's operator {op.name()} calls functions, and is not recorded: write it with tfnb.cond, while_loop, "
            f"scan, fold or map_fn, or as plain tensor code{rec.tape.at()}"
        )
    with rec.on():
        return plain(*args, **kwargs)
