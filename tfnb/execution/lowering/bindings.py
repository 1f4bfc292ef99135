"""Quicker callables for common ops, with the same results to the last bit.

Torch's own Python bindings instead of the dispatcher's overload objects: both run the same kernels; the binding saves
about 1.5 microseconds a call, which is a tenth of a small step. Only ops whose binding takes the schema's arguments as
they are. And pooling by the kernel that is quicker.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

_NAMES = """
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data abs addmm amax amin argmax argmin baddbmm
    bmm cat clamp clone convolution cos detach embedding exp floor_divide gather index_add index_copy index_select log
    maximum minimum mm native_layer_norm neg ones_like permute relu reshape rsqrt scatter_add sigmoid sin sqrt stack t
    tanh threshold_backward unsqueeze zeros_like
"""

CHANNELS, ELEMENTS = 8, 4096  # from which on `max_pool2d` copies


def max_pool2d(x: torch.Tensor, *window: object) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.max_pool2d_with_indices`` on the CPU, through the kernel that has channels last.

    That one takes all channels at once, the other one a number at a time: measured on one thread, with both copies, a
    fifth to a third of the time from 8 channels on. The indices stay as that kernel gives them.
    """
    copies = x.is_cpu and x.dim() == 4 and x.is_contiguous() and x.shape[1] >= CHANNELS and x.numel() >= ELEMENTS
    if not copies:
        return _MAX_POOL2D(x, *window)  # type: ignore[no-any-return]
    values, indices = _MAX_POOL2D(x.contiguous(memory_format=torch.channels_last), *window)
    return values.contiguous(), indices


def index(x: torch.Tensor, indices: list[Any]) -> torch.Tensor:
    """``aten.index.Tensor``, by Python's own indexing for one index tensor with dimensions (a number would give a
    view).
    """
    if len(indices) == 1 and indices[0] is not None and indices[0].dim():
        return x[indices[0]]
    return _INDEX(x, indices)  # type: ignore[no-any-return]


def to_copy(x: torch.Tensor, **how: Any) -> torch.Tensor:
    """``aten._to_copy``; the method where only the dtype is another one."""
    return x.to(copy=True, **how) if [*how] == ["dtype"] else _TO_COPY(x, **how)


_INDEX, _TO_COPY = aten.index.Tensor, aten._to_copy.default
_MAX_POOL2D = aten.max_pool2d_with_indices.default
_COMPARES = ("eq", "ge", "gt", "le", "lt", "ne")

QUICK: dict[Any, Callable[..., Any]] = {
    getattr(aten, name).default: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)
} | {
    _MAX_POOL2D: max_pool2d,
    _INDEX: index,
    _TO_COPY: to_copy,
    aten.add.Tensor: torch.add,
    aten.bitwise_and.Tensor: torch.bitwise_and,
    aten.bitwise_or.Tensor: torch.bitwise_or,
    aten.div.Tensor: torch.div,
    aten.mean.dim: torch.mean,
    aten.mul.Tensor: torch.mul,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.remainder.Scalar: torch.remainder,
    aten.rsub.Tensor: torch.rsub,
    aten.scatter.src: torch.scatter,
    aten.scatter.value: torch.scatter,
    aten.select.int: torch.select,
    aten.squeeze.dim: torch.squeeze,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.transpose.int: torch.transpose,
    aten.where.self: torch.where,
    aten._unsafe_view.default: torch.reshape,
    aten.view.default: torch.reshape,  # the same values, also where a fed tensor lies in memory in another way
    **{
        getattr(getattr(aten, name), kind): getattr(operator, name)
        for name in _COMPARES
        for kind in ("Scalar", "Tensor")
    },  # torch.fx writes them as `a < b`
}


def writing(op: OpOverload) -> Callable[..., Any]:
    """The method of ``torch.Tensor`` for an in-place overload, since methods are quicker to call."""
    name = op._schema.name.partition("::")[2]
    return getattr(torch.Tensor, name, op) if op._overloadname in ("default", "Tensor") else op
