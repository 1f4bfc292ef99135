"""Functions that would fix a size or row number before any op is called, or decide more than needed: replacements."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends import opt_einsum
from torch.utils._pytree import tree_leaves, tree_map_only

from tfnb.errors import Unsupported
from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.overrides.python_answers import stands_for_number
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Tensor, WholeNumbers

aten = torch.ops.aten
_VARYING = (torch.SymInt, torch.SymFloat, torch.SymBool)


@override(Stage.FUNCTION, torch.tensor, torch.as_tensor)
def _tensor(rec: Recording, data: object, **kwargs: Any) -> Any:
    """torch.tensor of numbers, varying sizes and recorded numbers; torch would fix them to the sample's."""
    if not any(isinstance(leaf, (*_VARYING, WholeNumbers, Tensor)) for leaf in tree_leaves(data)):
        return NotImplemented
    if isinstance(data, Tensor) and not stands_for_number(rec, data.value):
        return NotImplemented
    wanted = kwargs.get("dtype") or torch.get_default_dtype()
    data = tree_map_only(Tensor, partial(_as_in_python, rec, wanted), data)
    data = tree_map_only(WholeNumbers, lambda numbers: numbers.tensor(), data)
    data = tree_map_only(torch.SymBool, bool, data)
    if not any(isinstance(leaf, (*_VARYING, torch.Tensor)) for leaf in tree_leaves(data)):
        return torch.tensor(data, **kwargs)
    frozen = kwargs.pop("requires_grad", False) is False
    made = _as_tensor(rec, _stacked(data).to(kwargs.get("device"), kwargs.get("dtype")))
    return made if frozen else made.requires_grad_()


def _as_tensor(rec: Recording, made: torch.Tensor) -> torch.Tensor:
    """A copy of a number that promotes as a tensor does."""
    copied = made.clone()
    if isinstance(copied, Tensor):
        rec.tape.numbers.discard(copied.value)
    return copied


def _as_in_python(rec: Recording, wanted: torch.dtype, item: Tensor) -> torch.Tensor:
    """An item of a list, without gradient; one that stands for a fraction in the dtype that is wanted for such."""
    if item.graph is not rec.graph or item.numel() != 1:
        return item
    is_number = stands_for_number(rec, item.value) and item.is_floating_point()
    alone = item.detach().reshape(())
    return alone.to(wanted) if is_number else alone


def _stacked(data: Any) -> Any:
    if not isinstance(data, (list, tuple)):
        return data if isinstance(data, torch.Tensor) else torch.full((), data)
    members = [_stacked(member) for member in data]
    dtype = functools.reduce(torch.promote_types, (member.dtype for member in members))
    return torch.stack([member.to(dtype) for member in members])


@override(Stage.FUNCTION, torch.Tensor.new_tensor)
def _new_tensor(rec: Recording, x: torch.Tensor, data: object, **kwargs: object) -> Any:
    return _tensor(rec, data, **{"dtype": x.dtype, "device": x.device, **kwargs})


@override(Stage.FUNCTION, torch.full)
def _full(rec: Recording, size: Sequence[Any], fill_value: object, **kwargs: Any) -> Any:
    """torch.full of a recorded number; torch would fix it to the sample's."""
    is_number = isinstance(fill_value, Tensor) and stands_for_number(rec, fill_value.value)
    if not is_number or kwargs.keys() - {"dtype", "device"}:
        return NotImplemented
    return _as_tensor(rec, _tensor(rec, fill_value, **kwargs).expand(tuple(size)))


@override(Stage.FUNCTION, torch.Tensor.new_full)
def _new_full(rec: Recording, x: torch.Tensor, size: Sequence[Any], fill_value: object, **kwargs: Any) -> Any:
    return _full(rec, size, fill_value, **{"dtype": x.dtype, "device": x.device, **kwargs})


@override(Stage.FUNCTION, torch.full_like)
def _full_like(rec: Recording, x: torch.Tensor, fill_value: object, **kwargs: Any) -> Any:
    return _full(rec, x.shape, fill_value, **{"dtype": x.dtype, "device": x.device, **kwargs})


def _without_generator(draw: Callable[..., Any]) -> Callable[..., Any]:
    """The row of a function of sizes that draws: torch refuses varying sizes beside a generator, which no run asks."""

    def drawn(rec: Recording, *args: object, generator: torch.Generator | None = None, **kwargs: object) -> Any:
        if generator is None:
            return NotImplemented
        rec.streams_differ("generator=")
        return draw(*args, **kwargs)

    return drawn


for _draw in (torch.rand, torch.randn, torch.randint, torch.randperm):
    override(Stage.FUNCTION, _draw)(_without_generator(_draw))


@override(Stage.FUNCTION, F.pad)
def _pad(rec: Recording, x: torch.Tensor, pad: object, mode: str = "constant", value: object = None) -> Any:
    if mode == "constant" and isinstance(value, (torch.SymInt, torch.SymFloat)):
        return torch.constant_pad_nd(x, pad, value)  # type: ignore[arg-type]  # F.pad makes a number of it
    return NotImplemented


def same_size(rec: Recording, one: object, other: object) -> bool:
    """Whether two sizes are equal. Those of two axes that vary are from here on, if they are equal for the samples."""
    if not (isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt)):
        return isinstance(one, int) and isinstance(other, int) and one == other
    seen = rec.symbols.hint(one)
    return seen is not None and seen == rec.symbols.hint(other) and bool(rec.symbols.decided(one == other))


@override(Stage.FUNCTION, torch.broadcast_tensors)
def _broadcast_tensors(rec: Recording, *tensors: Any) -> Any:
    """Tensors whose sizes are equal or the number 1, expanded; torch would ask of a varying size whether it is 1."""
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tuple(tensors[0])
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return NotImplemented
    if not any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape):
        return NotImplemented
    rank = max(x.dim() for x in tensors)
    rows = zip(*((1,) * (rank - x.dim()) + tuple(x.shape) for x in tensors), strict=True)
    wide = [[n for n in sizes if not isinstance(n, int) or n != 1] or [1] for sizes in rows]
    if not all(same_size(rec, n, sizes[0]) for sizes in wide for n in sizes):
        return NotImplemented
    return tuple(x.expand([sizes[0] for sizes in wide]) for x in tensors)


@override(Stage.FUNCTION, F.affine_grid)
def _affine_grid(rec: Recording, theta: torch.Tensor, size: Sequence[Any], align_corners: object = None) -> Any:
    """affine_grid with each size compared with one: torch compares the minimum of all sizes, and so fixes
    their order.
    """
    ranks = len(size) - 2, len(size) - 1
    fits = len(size) in (4, 5) and theta.dim() == 3 and all(map(operator.eq, theta.shape[1:], ranks))
    if not any(isinstance(each, torch.SymInt) for each in size) or not theta.is_floating_point() or not fits:
        return NotImplemented
    for each in size:
        if isinstance(each, torch.SymInt):
            rec.symbols.decided(each >= 1)
    if align_corners is None:
        rec.note("F.affine_grid without align_corners= takes align_corners=False")
    return torch.affine_grid_generator(theta, size, bool(align_corners))  # type: ignore[arg-type]  # SymInts


@override(Stage.FUNCTION, torch.istft, torch.Tensor.istft)
def _istft(rec: Recording, x: torch.Tensor, *args: object, length: object = None, **kwargs: object) -> Any:
    """Torch's form in other ops, where the length varies; the composite in C++ takes a number."""
    if not isinstance(length, torch.SymInt):
        return NotImplemented
    return torch._refs.istft(x, *args, length=length, **kwargs)  # type: ignore[misc,arg-type]  # a SymInt


@override(Stage.FUNCTION, torch.einsum)
def _einsum(rec: Recording, equation: str, *operands: Any) -> Any:
    """einsum with the contraction order best for the samples' sizes; asking torch for the order would fix the sizes."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    varies = any(isinstance(size, torch.SymInt) for x in operands for size in x.shape)
    if not varies or len(operands) < 3 or not opt_einsum.is_available() or not opt_einsum.enabled:
        return NotImplemented
    shapes = [[rec.symbols.concrete(size) or 1 for size in x.shape] for x in operands]
    path, _ = opt_einsum.get_opt_einsum().contract_path(equation, *shapes, shapes=True, optimize=opt_einsum.strategy)
    return aten.einsum(equation, operands, path=list(chain.from_iterable(path)))


@override(Stage.FUNCTION, aten.is_contiguous, aten.is_contiguous.default, aten.is_contiguous.memory_format)
def _is_contiguous(
    rec: Recording, x: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    return x.is_contiguous(memory_format=memory_format)


def _of_strides(op: object) -> Callable[..., Any]:
    """A question about memory that torch answers by the sample, where sizes vary: refused."""

    def row(rec: Recording, x: torch.Tensor, *args: object) -> Any:
        if any(isinstance(size, torch.SymInt) for size in x.shape):
            raise Unsupported(
                f"{op} of a tensor whose sizes vary: decide by is_contiguous() or stride(){rec.tape.at()}"
            )
        return NotImplemented

    return row


for _op in (
    aten.is_non_overlapping_and_dense,
    aten.is_non_overlapping_and_dense.default,
    aten.is_strides_like_format,
    aten.is_strides_like_format.default,
):
    override(Stage.FUNCTION, _op)(_of_strides(_op))
