"""Batch rules of `torch.vmap` for ops whose C++ rule asks for sizes as numbers, and so would fix a varying batch.

Each is registered with torch's Python dispatcher, which is on while a block records (and while torch itself traces):
`vmap` elsewhere keeps its rules in C++. A rule is called with plain values of one level of vmap below: tensors that
vary along the batch have it as their first axis. It gives one tensor, or several, with the batch first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard, _functorch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
_BATCHED = DispatchKey.FuncTorchBatched
Rule = Callable[..., Any]


def _level_below(op: OpOverload, rule: Rule, *args: object, **kwargs: object) -> Any:
    """Call a rule with the unwrapped tensors of this vmap level; every tensor argument gets the batch axis."""
    level = _functorch.maybe_current_level()
    assert level is not None

    def is_batched(leaf: object) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and _functorch.is_batchedtensor(leaf)
            and _functorch.maybe_get_level(leaf) == level
        )

    def opened(leaf: Any) -> Any:
        return _functorch.get_unwrapped(leaf).movedim(_functorch.maybe_get_bdim(leaf), 0) if is_batched(leaf) else leaf

    with _ExcludeDispatchKeyGuard(DispatchKeySet(_BATCHED)):
        batched = next(filter(is_batched, tree_leaves((args, kwargs))), None)
        if batched is None:  # all are of other levels
            return op(*args, **kwargs)
        batch = opened(batched).shape[0]

        def with_batch(leaf: object) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return opened(leaf) if is_batched(leaf) else leaf.expand(batch, *leaf.shape)

        out = rule(op, *tree_map(with_batch, args), **tree_map(with_batch, kwargs))
        return tree_map(lambda leaf: leaf if leaf is None else _functorch._add_batch_dim(leaf, 0, level), out)


def _batch_rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Decorator: the function is the batch rule of these ops, and gets the op before its arguments."""

    def register(rule: Rule) -> Rule:
        for op in ops:
            op.py_impl(_BATCHED)(partial(_level_below, op, rule))
        return rule

    return register


def _axis(dim: int, rank: int) -> int:
    """The axis of a batched tensor that is ``dim`` of one without batch, of ``rank`` axes."""
    return dim % max(rank, 1) + 1


def _at_least_1d(x: object) -> Any:
    return x.unsqueeze(-1) if isinstance(x, torch.Tensor) and x.dim() == 1 else x


@_batch_rule(aten.gather.default)
def _gather(op: OpOverload, x: torch.Tensor, dim: int, index: Any, **kwargs: object) -> Any:
    out = op(_at_least_1d(x), _axis(dim, x.dim() - 1), _at_least_1d(index), **kwargs)
    return out.squeeze(-1) if index.dim() == 1 else out


@_batch_rule(
    aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default,
    aten.scatter_reduce.two,
)  # fmt: skip
def _scatter(
    op: OpOverload, x: torch.Tensor, dim: int, index: object, source: torch.Tensor, *args: object, **kwargs: object
) -> Any:
    axis = _axis(dim, x.dim() - 1)
    out = op(_at_least_1d(x), axis, _at_least_1d(index), _at_least_1d(source), *args, **kwargs)
    return out.squeeze(-1) if x.dim() == 1 else out


@_batch_rule(aten.cat.default)
def _cat(op: OpOverload, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    rank = max(x.dim() for x in tensors) - 1
    some = [x for x in tensors if x.dim() - 1 == rank or not _is_legacy_empty(x)]  # torch skips those of shape (0,)
    return op(some, _axis(dim, rank))


def _is_legacy_empty(x: Any) -> bool:
    return x.dim() == 2 and isinstance(x.shape[1], int) and x.shape[1] == 0


@_batch_rule(aten.slice_backward.default)
def _slice_backward(op: OpOverload, grad: torch.Tensor, sizes: Sequence[int], dim: int, *where: object) -> Any:
    return op(grad, [grad.shape[0], *sizes], _axis(dim, len(sizes)), *where)


@_batch_rule(aten.diagonal_backward.default)
def _diagonal_backward(
    op: OpOverload, grad: torch.Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Any:
    rank = len(sizes)
    return op(grad, [grad.shape[0], *sizes], offset, _axis(dim1, rank), _axis(dim2, rank))


@_batch_rule(aten.index_add.default)
def _index_add(op: OpOverload, x: torch.Tensor, dim: int, index: Any, source: torch.Tensor, *, alpha: Any = 1) -> Any:
    axis, rows = _axis(dim, x.dim() - 1), _at_least_1d(source)
    index = _at_least_1d(index)
    index = index[(slice(None), *[None] * (axis - 1), slice(None), *[None] * (rows.dim() - axis - 1))]
    out = _at_least_1d(x).scatter_add(axis, index.expand_as(rows), rows if alpha == 1 else rows * alpha)
    return out.squeeze(-1) if x.dim() == 1 else out


@_batch_rule(aten.native_layer_norm.default)
def _layer_norm(
    op: OpOverload,
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Any:
    out, mean, rstd = op(x, shape, None, None, eps)
    out = out if weight is None else out * _beside(weight, x)
    return out if bias is None else out + _beside(bias, x), mean, rstd


@_batch_rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    op: OpOverload, grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], mean: torch.Tensor, rstd: torch.Tensor,
    weight: torch.Tensor | None, bias: torch.Tensor | None, mask: Sequence[bool],
) -> Any:  # fmt: skip
    scaled = grad if weight is None else grad * _beside(weight, x)
    to_x = op(scaled, x, shape, mean, rstd, None, None, [True, False, False])[0] if mask[0] else None
    rows = list(range(1, x.dim() - len(shape)))

    def summed(each: Any) -> Any:
        return each.sum(rows) if rows else each

    to_weight = summed(grad * (x - mean) * rstd) if mask[1] and weight is not None else None
    return to_x, to_weight, summed(grad) if mask[2] and bias is not None else None


def _beside(weight: torch.Tensor, x: torch.Tensor) -> Any:
    """Per-sample weights of the last axes, expanded with axes of length one."""
    return weight[(slice(None), *[None] * (x.dim() - weight.dim()))]


@_batch_rule(
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default, aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
)  # fmt: skip
def _pooled(op: OpOverload, x: torch.Tensor, *args: object, **kwargs: object) -> Any:
    """The batch and the samples' own rows are one axis; an image without rows has its batch there."""
    if x.dim() == 4:
        return op(x, *args, **kwargs)
    flat = tree_map(lambda leaf: leaf.flatten(0, 1) if isinstance(leaf, torch.Tensor) else leaf, args)
    return tree_map(lambda out: out.unflatten(0, x.shape[:2]), op(x.flatten(0, 1), *flat, **kwargs))


@_batch_rule(aten.convolution.default)
def _convolution(
    op: OpOverload, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, *rest: Any,
) -> Any:  # fmt: skip
    """Samples with their own weights become groups of channels; samples with shared weights become rows."""
    *output_padding, groups = rest
    if _is_shared(weight) and (bias is None or _is_shared(bias)):
        one = (weight[0], None if bias is None else bias[0])
        out = op(x.flatten(0, 1), *one, stride, padding, dilation, transposed, *output_padding, groups)
        return out.unflatten(0, x.shape[:2])
    out = op(
        _as_channels(x), weight.flatten(0, 1), None if bias is None else bias.flatten(), stride, padding, dilation,
        transposed, *output_padding, x.shape[0] * groups,
    )  # fmt: skip
    return _from_channels(out, x.shape[0])


@_batch_rule(aten.convolution_backward.default)
def _convolution_backward(
    op: OpOverload, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Sequence[int] | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    batch = x.shape[0]
    to_x, to_weight, _ = op(
        _as_channels(grad), _as_channels(x), weight.flatten(0, 1), None, stride, padding, dilation, transposed,
        output_padding, batch * groups, [mask[0], mask[1], False],
    )  # fmt: skip
    return (
        _from_channels(to_x, batch) if mask[0] else None,
        to_weight.unflatten(0, (batch, weight.shape[1])) if mask[1] else None,
        grad.sum([1, *range(3, grad.dim())]) if mask[2] else None,
    )


def _is_shared(x: torch.Tensor) -> bool:
    """Whether the samples share a tensor that was expanded along the batch."""
    stride = x.stride(0)
    return isinstance(stride, int) and stride == 0


def _as_channels(x: torch.Tensor) -> Any:
    return x.transpose(0, 1).flatten(1, 2)


def _from_channels(x: torch.Tensor, batch: Any) -> Any:
    return x.unflatten(1, (batch, x.shape[1] // batch)).transpose(0, 1)
