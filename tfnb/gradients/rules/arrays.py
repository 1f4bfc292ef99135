"""Write-once arrays. Elements not yet written have no gradient, so the gradient of a write is not cleared there.

A read gives rows, so reads of the same element add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfnb.gradients.rule_table import READS, Forward, lookup, nograd, partials, rule
from tfnb.kernels import arrays, spans  # noqa: F401  define torch.ops.tfnb

ops = torch.ops.tfnb

nograd(ops.index_span.default, ops.index_single.default, ops.index_range.default)
nograd(ops.array_unwritten.default)


@rule(ops.array_write.default, outputs=1)
def _(n: Forward, dy: torch.Tensor) -> Any:
    index = n["index"]
    return {"rows": dy, "values": lambda: dy.index_select(0, index.reshape(-1)).reshape(n["values"].shape)}


@rule(ops.array_grown.default, outputs=1)
def _(n: Forward, dy: torch.Tensor) -> Any:
    return {"rows": lambda: dy.narrow(0, 0, n["rows"].shape[0])}


READS.add(str(ops.array_read.default))


@lookup(ops.array_read.default)
def _(n: Forward, dy: torch.Tensor, at: Callable[..., Any]) -> Any:
    return dy, at(n["index"])


partials(ops.array_read.default, lambda n, dy: dy.new_zeros(n["rows"].shape).index_add(
    0, n["index"].reshape(-1), dy.reshape([n["index"].numel(), *n["rows"].shape[1:]])
), None)  # fmt: skip
