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

aten = torch.ops.aten

_NAMES = """
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data abs addmm baddbmm bmm clone convolution cos
    embedding exp log mm native_layer_norm neg ones_like permute relu reshape rsqrt sigmoid sin sqrt t tanh
    threshold_backward zeros_like
"""

CHANNELS, ELEMENTS = 8, 4096  # from which on `max_pool2d` copies


def max_pool2d(x: torch.Tensor, *window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.max_pool2d_with_indices`` on the CPU, through the kernel that has channels last.

    That one takes all channels at once, the other one a number at a time: measured on one thread, with both copies, a
    fifth to a third of the time from 8 channels on. The indices stay as that kernel gives them.
    """
    copies = x.is_cpu and x.dim() == 4 and x.is_contiguous() and x.shape[1] >= CHANNELS and x.numel() >= ELEMENTS
    if not copies:
        return _MAX_POOL2D(x, *window)  # type: ignore[no-any-return]
    values, indices = _MAX_POOL2D(x.contiguous(memory_format=torch.channels_last), *window)
    return values.contiguous(), indices


_MAX_POOL2D = aten.max_pool2d_with_indices.default
_COMPARES = ("eq", "ge", "gt", "le", "lt", "ne")

QUICK: dict[Any, Callable[..., Any]] = {
    getattr(aten, name).default: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)
} | {
    _MAX_POOL2D: max_pool2d,
    aten.add.Tensor: torch.add,
    aten.div.Tensor: torch.div,
    aten.mul.Tensor: torch.mul,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.transpose.int: torch.transpose,
    aten._unsafe_view.default: torch.reshape,
    aten.view.default: torch.reshape,  # the same values, also where a fed tensor lies in memory in another way
    **{
        getattr(getattr(aten, name), kind): getattr(operator, name)
        for name in _COMPARES
        for kind in ("Scalar", "Tensor")
    },  # torch.fx writes them as `a < b`
}

_IN_PLACE = "abs_ cos_ exp_ log_ neg_ relu_ rsqrt_ sigmoid_ sin_ sqrt_ tanh_"

WRITING: dict[Any, Callable[..., Any]] = {
    getattr(aten, name).default: getattr(torch.Tensor, name) for name in _IN_PLACE.split()
} | {getattr(aten, f"{name}_").Tensor: getattr(torch.Tensor, f"{name}_") for name in ("add", "div", "mul", "sub")}
"""The same for ops that write into their first argument."""
