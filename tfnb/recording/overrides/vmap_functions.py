"""Functions that `torch.vmap` takes apart by numbers, and so would fix a batch that varies: here by ops that need none.

Only where an argument is one of torch.func's wrapped tensors; everything else is torch's own call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording

_Row = Callable[..., Any]


def _is_wrapped(args: Any) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(leaf, torch.Tensor) and wrapped(leaf) for leaf in tree_leaves(args))


def _batched(*functions: Any) -> Callable[[_Row], _Row]:
    """Decorator: the row of functions where an argument is wrapped."""

    def register(other: _Row) -> _Row:
        def row(rec: Recording, *args: Any, **kwargs: Any) -> Any:
            return other(*args, **kwargs) if _is_wrapped((args, kwargs)) else NotImplemented

        override(Stage.FUNCTION, *functions)(row)
        return other

    return register


@_batched(torch.gather, torch.Tensor.gather)
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if not x.dim() or not index.dim():
        return NotImplemented
    places: list[Any] = []
    for axis, size in enumerate(index.shape):
        place = torch.arange(size, device=index.device).view([-1, *[1] * (index.dim() - 1 - axis)])
        places.append(index if axis == dim % x.dim() else place)
    return x[tuple(places)]


@_batched(torch.cat)
def _cat(tensors: Any, dim: int = 0, **options: Any) -> Any:
    """Of tensors of one shape."""
    first, *others = tensors
    same = all(t.dim() == first.dim() and t.dtype == first.dtype and _same(t.shape, first.shape) for t in others)
    if options or not same or not first.dim():
        return NotImplemented
    dim = dim % first.dim()
    return torch.stack(tuple(tensors), dim).flatten(dim, dim + 1)


def _same(a: Any, b: Any) -> bool:
    """Whether two shapes are numbers, and equal."""
    return all(isinstance(m, int) and isinstance(n, int) and m == n for m, n in zip(a, b, strict=True))


@_batched(F.embedding)
def _embedding(index: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
               scale_grad_by_freq: bool = False, sparse: bool = False) -> Any:  # fmt: skip
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    return weight[index.reshape(-1)].reshape(*index.shape, weight.shape[1])


@_batched(F.layer_norm)
def _layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    if x.dtype not in (torch.float32, torch.float64):  # torch computes the statistics of others in float32
        return NotImplemented
    axes = list(range(x.dim() - len(normalized_shape), x.dim()))
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    out = (x - mean) * torch.rsqrt(var + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@_batched(F.nll_loss)
def _nll_loss(logs: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
              reduce: Any = None, reduction: str = "mean", *, smoothing: float = 0.0) -> Any:  # fmt: skip
    if size_average is not None or reduce is not None:
        return NotImplemented
    axis, kept = min(logs.dim() - 1, 1), target != ignore_index
    flat = logs.movedim(axis, -1)
    rows = flat.reshape(-1, flat.shape[-1])
    place = torch.arange(rows.shape[0], device=rows.device)
    chosen = torch.where(kept, target, 0).reshape(-1)
    weights = rows.new_ones([rows.shape[1]]) if weight is None else weight
    share = weights[chosen].reshape(target.shape) * kept
    losses = -rows[place, chosen].reshape(target.shape) * share
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing / rows.shape[1] * (flat * weights).sum(-1) * kept
    if reduction == "none":
        return losses
    return losses.sum() / share.sum() if reduction == "mean" else losses.sum()


@_batched(F.cross_entropy)
def _cross_entropy(logits: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
                   reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0) -> Any:  # fmt: skip
    if target.is_floating_point():
        return NotImplemented
    logs = logits.log_softmax(min(logits.dim() - 1, 1))
    return _nll_loss(
        logs, target, weight, size_average, ignore_index, reduce, reduction, smoothing=label_smoothing
    )  # fmt: skip
