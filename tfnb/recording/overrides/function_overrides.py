"""Functions that take a number for a size or a row, and so would fix it before any op is called, or that decide more
than they need: each is called in the place of torch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends import opt_einsum
from torch.utils._pytree import tree_leaves, tree_map_only

from tfnb.errors import Unsupported
from tfnb.recording.overrides import dynamic_indexing as picked
from tfnb.recording.overrides import higher_order, plain_tensors
from tfnb.recording.overrides import packed_sequences as packed
from tfnb.recording.overrides import vmap_functions as batched
from tfnb.recording.values.recording import open_recording

aten = torch.ops.aten


def _linspace(start: Any, end: Any, steps: Any, **kwargs: Any) -> Any:
    if not isinstance(steps, torch.SymInt):
        return torch.linspace(start, end, steps, **kwargs)
    kwargs.setdefault("dtype", torch.get_default_dtype())
    place = torch.arange(steps, **kwargs)  # type: ignore[call-overload]  # torch's stubs know no symbolic sizes
    step = (end - start) / torch.sym_max(steps - 1, 1)
    return torch.where(place < (steps + 1) // 2, start + step * place, end - step * (steps - 1 - place))


def _of_numbers(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor of numbers, sizes that vary among them, of which torch would make those of the sample."""

    def tensor(data: Any, **kwargs: Any) -> Any:
        data = tree_map_only(torch.SymBool, bool, data)
        if not any(isinstance(leaf, (torch.SymInt, torch.SymFloat)) for leaf in tree_leaves(data)):
            return plain(data, **kwargs)
        frozen = kwargs.pop("requires_grad", False) is False
        made = _stacked(data).to(kwargs.get("device"), kwargs.get("dtype"))
        return made if frozen else made.requires_grad_()

    return tensor


def _stacked(data: Any) -> Any:
    if not isinstance(data, (list, tuple)):
        return data if isinstance(data, torch.Tensor) else torch.full((), data)
    members = [_stacked(member) for member in data]
    dtype = functools.reduce(torch.promote_types, (member.dtype for member in members))
    return torch.stack([member.to(dtype) for member in members])


_tensor = _of_numbers(torch.tensor)


def _new_tensor(x: Any, data: Any, **kwargs: Any) -> Any:
    return _tensor(data, **{"dtype": x.dtype, "device": x.device, **kwargs})


def _pad(x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    if mode == "constant" and isinstance(value, (torch.SymInt, torch.SymFloat)):
        return torch.constant_pad_nd(x, pad, value)  # type: ignore[arg-type]  # F.pad makes a number of it
    return F.pad(x, pad, mode, value)


def _triangle(cut: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Where a matrix has a triangle; how many places, is left to each run."""

    def indices(row: Any, col: Any, offset: int = 0, **kwargs: Any) -> Any:
        if not any(isinstance(size, torch.SymInt) for size in (row, col)):
            return plain(row, col, offset, **kwargs)
        inside = cut(torch.ones([row, col], dtype=torch.bool, device=kwargs.get("device")), offset)
        return inside.nonzero().t().to(kwargs.get("dtype", torch.int64))

    return indices


def _affine_grid(theta: Any, size: Any, align_corners: bool | None = None) -> Any:
    """Asks of each size what torch asks of the least: to find that, it would compare them with one another."""
    if not any(isinstance(length, torch.SymInt) for length in size):
        return F.affine_grid(theta, size, align_corners)
    if any(length <= 0 for length in size):
        raise ValueError(f"Expected non-zero, positive output size. Got {size}")
    return torch.affine_grid_generator(theta, size, bool(align_corners))


def _einsum(equation: str, *operands: Any) -> Any:
    """The order of the products that is best for the sizes of the samples: to ask for it, torch would fix them."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    rec = open_recording()
    varies = any(isinstance(size, torch.SymInt) for x in operands for size in x.shape)
    if rec is None or not varies or len(operands) < 3 or not opt_einsum.is_available() or not opt_einsum.enabled:
        return torch.einsum(equation, *operands)
    shapes = [[rec.symbols.concrete(size) or 1 for size in x.shape] for x in operands]
    path, _ = opt_einsum.get_opt_einsum().contract_path(equation, *shapes, shapes=True, optimize=opt_einsum.strategy)
    return aten.einsum(equation, operands, path=list(chain.from_iterable(path)))


def _is_contiguous(x: Any, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    return x.is_contiguous(memory_format=memory_format)


def _of_strides(original: Any) -> Callable[..., Any]:
    """A question about memory that torch answers by the sample, where sizes vary: refused."""

    def call(x: Any, *args: Any) -> Any:
        rec = open_recording()
        if rec is not None and any(isinstance(size, torch.SymInt) for size in x.shape):
            raise Unsupported(
                f"{original} of a tensor whose sizes vary: decide by is_contiguous() or stride(){rec.tape.at()}"
            )
        return original(x, *args)

    return call


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.is_contiguous: _is_contiguous,
    aten.is_contiguous.default: _is_contiguous,
    aten.is_contiguous.memory_format: _is_contiguous,
    **{
        op: _of_strides(op)
        for op in (
            aten.is_non_overlapping_and_dense,
            aten.is_non_overlapping_and_dense.default,
            aten.is_strides_like_format,
            aten.is_strides_like_format.default,
        )
    },
    F.affine_grid: _affine_grid,
    F.pad: _pad,
    torch.einsum: _einsum,
    torch.as_tensor: _of_numbers(torch.as_tensor),
    torch.linspace: _linspace,
    torch.tensor: _tensor,
    torch.Tensor.new_tensor: _new_tensor,
    torch.tril_indices: _triangle(torch.tril, torch.tril_indices),
    torch.triu_indices: _triangle(torch.triu, torch.triu_indices),
    **picked.FUNCTIONS,
    **packed.FUNCTIONS,
    **batched.FUNCTIONS,
    **higher_order.FUNCTIONS,
    **plain_tensors.FUNCTIONS,
}
