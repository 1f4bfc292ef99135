"""Tables of sorted keys as pure functions on tensors: insert and remove give new keys and values of the same capacity.

An empty place has the key `EMPTY`, the largest int64, so that all of them stand at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfnb.kernels.define import op

EMPTY = (1 << 63) - 1

_SAME = "(Tensor keys, Tensor values, Tensor new_keys, Tensor new_values) -> (Tensor, Tensor)"


def _alike(keys: Tensor, values: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(keys), torch.empty_like(values)


@op(_SAME, _alike)
def table_insert(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
    """The table with a value for each new key, too; of equal keys the last counts.

    Raises OverflowError where there is no room, KeyError for the key `EMPTY`, ValueError for another number of values.
    """
    if new_values.shape != (*new_keys.shape, *values.shape[1:]):
        one = f" of {list(values.shape[1:])}" if values.dim() > 1 else ""
        raise ValueError(
            f"keys of {list(new_keys.shape)} need a value{one} each, and these are {list(new_values.shape)}"
        )
    if (new_keys == EMPTY).any():
        raise KeyError(f"the key {EMPTY} marks an empty place, so no table can have it")
    all_keys = torch.cat([keys, new_keys.flatten()])
    all_values = torch.cat([values, new_values.reshape(-1, *values.shape[1:])])
    ordered, order = torch.sort(all_keys, stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    kept, places = torch.sort(ordered.masked_fill(~is_last, EMPTY), stable=True)
    found = int((kept != EMPTY).sum())
    if found > len(keys):
        raise OverflowError(
            f"the table has a capacity of {len(keys)} keys and would have {found}: give it a larger one"
        )
    return kept[: len(keys)].clone(), all_values[order[places]][: len(keys)].clone()


@op("(Tensor keys, Tensor values, Tensor gone) -> (Tensor, Tensor)", _alike)
def table_remove(keys: Tensor, values: Tensor, gone: Tensor) -> tuple[Tensor, Tensor]:
    """The table without these keys; absent keys are ignored."""
    kept, places = torch.sort(keys.masked_fill(torch.isin(keys, gone), EMPTY), stable=True)
    return kept, values[places]
