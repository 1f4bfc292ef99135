"""Clipping of gradients as ordinary recorded code. Imports graph and torch.

A norm that is NaN or infinite gives NaN, never silently zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfnb.errors import InvalidArgument


def clip_by_value(x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    """``x`` with every element between ``low`` and ``high``."""
    return torch.clamp(x, low, high)


def clip_by_norm(x: torch.Tensor, norm: Any, dim: int | Sequence[int] | None = None) -> torch.Tensor:
    """``x`` scaled down where its 2-norm (over ``dim``, default all) exceeds ``norm``.

    >>> clip_by_norm(torch.tensor([3.0, 4.0]), 1.0)
    tensor([0.6000, 0.8000])
    """
    found = torch.linalg.vector_norm(x, dim=dim, keepdim=dim is not None)
    return x * _scale(found, norm)


def clip_by_global_norm(
    xs: Sequence[torch.Tensor | None], norm: Any, *, use_norm: torch.Tensor | None = None
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """All ``xs`` scaled by one factor so that their joint 2-norm is at most ``norm``; also the norm before.

    None entries stay None. use_norm: the joint norm, where it is known already.
    """
    given = [x for x in xs if x is not None]
    if not given:
        raise InvalidArgument("clip_by_global_norm needs at least one tensor: got none")
    if use_norm is None:
        use_norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in given]))
    factor = _scale(use_norm, norm)
    return [None if x is None else x * factor for x in xs], use_norm


def _scale(found: torch.Tensor, norm: Any) -> torch.Tensor:
    """norm / max(found, norm): one where nothing is to clip, NaN for a NaN or infinite norm."""
    factor = norm / torch.clamp_min(found, norm)
    return torch.where(torch.isfinite(found), factor, torch.full_like(found, float("nan")))
