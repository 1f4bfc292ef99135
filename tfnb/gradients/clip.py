"""Clipping of gradients as ordinary recorded code. Imports graph and torch.

A norm that is NaN or infinite gives NaN, never silently zeros. `IndexedSlices` stay so; the entries of one row count as
their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfnb.errors import InvalidArgument
from tfnb.gradients.slices import IndexedSlices


def clip_by_value(x: Any, low: Any, high: Any) -> Any:
    """``x`` with every element between ``low`` and ``high``; for row-sparse ``x`` the range must include 0.

    >>> clip_by_value(torch.tensor([-3.0, 0.5]), -1, 1)
    tensor([-1.0000,  0.5000])
    """
    return torch.clamp(x, low, high)


def clip_by_norm(x: Any, norm: float | torch.Tensor, dim: int | Sequence[int] | None = None) -> Any:
    """``x`` scaled down where its 2-norm (over ``dim``, default all) exceeds ``norm``.

    Raises InvalidArgument for an axis that ``x`` lacks, and for the axis of the rows of `IndexedSlices`.

    >>> clip_by_norm(torch.tensor([3.0, 4.0]), 1.0)
    tensor([0.6000, 0.8000])
    """
    if isinstance(x, IndexedSlices):
        return _rows_by_norm(x.coalesce(), norm, dim)
    try:
        found = torch.linalg.vector_norm(x, dim=dim, keepdim=dim is not None)
    except IndexError as error:  # an axis that there is not
        raise InvalidArgument(f"clip_by_norm over dim={dim}: {error}") from None
    return x * _scale(found, norm)


def _rows_by_norm(x: IndexedSlices, norm: float | torch.Tensor, dim: int | Sequence[int] | None) -> IndexedSlices:
    """On distinct rows; over all elements, or within each row."""
    dims = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if any(d % x.dim() == 0 for d in dims):
        raise InvalidArgument(f"clip_by_norm over dim={dim} of {x.name}, whose rows lie on axis 0: use .to_dense()")
    return x.map(lambda rows: clip_by_norm(rows, norm, dim))


def clip_by_global_norm(
    xs: Sequence[Any], norm: float | torch.Tensor, *, use_norm: torch.Tensor | None = None
) -> tuple[list[Any], torch.Tensor]:
    """All ``xs`` scaled by one factor so that their joint 2-norm is at most ``norm``; also the norm before.

    None entries stay None. use_norm: the joint norm, where it is known already. Raises InvalidArgument for nothing.

    >>> clip_by_global_norm([torch.tensor([3.0]), None, torch.tensor([4.0])], 1.0)
    ([tensor([0.6000]), None, tensor([0.8000])], tensor(5.))
    """
    xs = [x.coalesce() if isinstance(x, IndexedSlices) else x for x in xs]
    given = [x for x in xs if x is not None]
    if not given:
        raise InvalidArgument("clip_by_global_norm needs at least one tensor: got none")
    if use_norm is None:
        use_norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in given]))
    factor = _scale(use_norm, norm)
    return [None if x is None else x * factor for x in xs], use_norm


def _scale(found: torch.Tensor, norm: float | torch.Tensor) -> torch.Tensor:
    """norm / max(found, norm): one where nothing is to clip, NaN for a NaN or infinite norm."""
    factor = norm / torch.clamp_min(found, norm)
    return torch.where(torch.isfinite(found), factor, torch.full_like(found, float("nan")))
