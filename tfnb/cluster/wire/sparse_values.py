"""Values in messages: a large table with few rows that are not zero travels as these rows.

Between a notebook, servers, and tasks that hold copies of shards; a task that computes asks for rows. See
`tfnb.graph.lazy_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tfnb.cluster.wire.envelope import size
from tfnb.errors import InvalidArgument
from tfnb.graph import lazy_memory


def written(
    values: Mapping[str, torch.Tensor], is_table: Callable[[str], bool] | None = None
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Facts and tensors of a message. ``tables``: by key the lengths of tables that travel as rows, in new memory.

    is_table: whether rows of a key are to travel, where that is known; else it is looked up.
    """
    tables: dict[str, int] = {}
    tensors: list[torch.Tensor] = []
    for key, value in values.items():
        if lazy_memory.is_table(value) if is_table is None else is_table(key):
            tables[key] = len(value)
            tensors += lazy_memory.packed(value)
        else:
            tensors.append(value)
    return {"keys": list(values), "tables": tables}, tensors


def read(keys: Sequence[str], tables: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values of a message of `written`. Raises InvalidArgument for other messages."""
    found = _parts(keys, tables, tensors)
    return {key: part if isinstance(part, torch.Tensor) else lazy_memory.unpacked(*part) for key, part in found.items()}


def taking(keys: Sequence[str], tables: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of a message's values in memory. Rows far apart take a page each, but not in the message."""
    total = 0
    for part in _parts(keys, tables, tensors).values():
        if isinstance(part, torch.Tensor):
            total += size([part])
        else:
            numbers, rows, length = part
            row = rows[0].numel() * rows.element_size() if len(rows) else 0
            total += min(length * row, lazy_memory.spread(numbers, row))
    return total


def _parts(
    keys: Sequence[str], tables: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor, int]]:
    """By key, the value; for a table the row numbers, the rows, and the table's length."""
    if len(tensors) != len(keys) + sum(key in tables for key in keys):
        raise InvalidArgument(f"{len(keys)} keys, {len(tables)} of tables, but {len(tensors)} tensors")
    rest = iter(tensors)
    return {key: _table(next(rest), next(rest), int(tables[key])) if key in tables else next(rest) for key in keys}


def _table(numbers: torch.Tensor, rows: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    fits = numbers.dtype == torch.int64 and numbers.dim() == 1 and rows.dim() > 0 and len(rows) == len(numbers)
    if not fits or (len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < length):
        raise InvalidArgument(f"rows of a table of {length} rows are {list(rows.shape)}, at {list(numbers.shape)}")
    return numbers, rows, length
