"""Composites that would fix a varying size: replaced by ops that do not, or guarded at the deciding line."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.errors import InvalidArgument, Unsupported
from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Tensor

aten = torch.ops.aten


@override(Stage.OP, aten.diff.default)
def _diff(rec: Recording, x: torch.Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Differences of neighbours: an axis too short for that many becomes empty in the run, not while recording."""
    parts = [part for part in (prepend, x, append) if part is not None] if n else [x]
    out, dim = parts[0] if len(parts) == 1 else torch.cat(parts, dim), dim % max(x.dim(), 1)
    for _ in range(n):
        later, earlier = aten.slice(out, dim, 1), aten.slice(out, dim, 0, -1)
        out = torch.logical_xor(later, earlier) if out.dtype is torch.bool else later - earlier
    return out.clone() if n == 0 else out


@override(Stage.OP, aten.fill_diagonal_.default)
def _fill_diagonal(rec: Recording, x: torch.Tensor, value: torch.types.Number, wrap: bool = False) -> Any:
    """A write to the diagonal; torch looks at the numbers of rows and columns to write by one stride."""
    if x.dim() != 2 or wrap or not any(isinstance(size, torch.SymInt) for size in x.shape):
        return NotImplemented
    x.diagonal().fill_(value)
    return x


@override(Stage.OP, aten.take_along_dim.default)
def _take_along_dim(rec: Recording, x: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> Any:
    if dim is None:
        return x.reshape(-1).gather(0, indices.reshape(-1))
    dim = dim % max(x.dim(), 1)
    lead = [b if isinstance(a, int) and a == 1 else a for a, b in zip(x.shape, indices.shape, strict=True)]
    own, picked = ([*lead[:dim], t.shape[dim], *lead[dim + 1 :]] for t in (x, indices))
    return x.expand(own).gather(dim, indices.expand(picked).remainder(x.shape[dim]))


@override(Stage.OP, aten.max_pool1d.default)
def _max_pool1d(rec: Recording, *args: object, **kwargs: object) -> Any:
    """Without the composite's check of the output's size, since the check wants a number."""
    return aten.max_pool1d_with_indices(*args, **kwargs)[0]


@override(Stage.OP, aten.unbind.int)
def _unbind(rec: Recording, x: torch.Tensor, dim: int = 0) -> Any:
    """One output for each row: this line fixes the size, whatever the shape rule of unbind concludes."""
    count = int(x.shape[dim])
    if not _is_number(x.shape[dim]):  # the size of data, or one such as min(A, B)
        return tuple(x.select(dim, i) for i in range(count))
    return NotImplemented


@override(Stage.OP, aten.one_hot.default)
def _one_hot(rec: Recording, x: Any, num_classes: int = -1) -> Any:
    """The kernel of torch's composite, refusing other classes in each run. A class count inferred from data is
    guarded.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return NotImplemented
    with rec.tape.enclosed():
        if num_classes == -1:
            found = x.max() + 1
            sample = rec.look(found).sample
            if sample is None:
                raise InvalidArgument(f"F.one_hot without a sample needs num_classes={rec.tape.at()}")
            num_classes = int(sample)
            rec.guard(found == num_classes, outcome=True)
            rec.note(
                f"F.one_hot found {num_classes} classes, and a run that has more or fewer raises BranchChanged: give "
                "num_classes="
            )
        return x.new_zeros([*x.shape, num_classes]).scatter(-1, x.unsqueeze(-1), 1)


@override(Stage.OP, aten.bincount.default)
def _bincount(rec: Recording, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Counts of ``minlength`` values, where the sample has no others: a run that has some is refused.

    Otherwise only data tell how many counts there are, and nothing that takes a given number, such as the weights of a
    loss, takes them.
    """
    sample = rec.look(x).sample if isinstance(x, Tensor) else None
    if sample is None or not minlength or not ((sample >= 0) & (sample < minlength)).all():
        return NotImplemented
    with rec.tape.enclosed():
        lacks = (
            f"torch.bincount was recorded with minlength={minlength}, and counts only values from 0 to "
            f"{minlength - 1}; this run has others: give a larger minlength="
        )
        rec.guard(((x >= 0) & (x < minlength)).all(), outcome=True, lacks=lacks)
        if weights is None:
            return x.new_zeros(minlength, dtype=torch.int64).index_add(0, x, torch.ones_like(x, dtype=torch.int64))
        weights = weights.detach() if weights.dtype is torch.float32 else weights.detach().double()
        return weights.new_zeros(minlength).index_add(0, x, weights)


def _is_number(size: object) -> bool:
    """Whether a size is the same in every run."""
    return not isinstance(size, torch.SymInt) or size.node.expr.is_number


def _is_of_data(size: object) -> bool:
    """Whether only the data of a run tell a size."""
    return isinstance(size, torch.SymInt) and size.node.hint is None


@override(
    Stage.OP,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
)
def _squeeze(rec: Recording, x: torch.Tensor, dim: Any = None) -> Any:
    """The rank of the result: whether an axis has one row is decided by this line, and a run must agree."""
    asked = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = [axis % x.dim() for axis in asked] if x.dim() else []
    gone = [axis for axis in axes if _is_of_data(x.shape[axis]) and _has_one_row(rec, x, axis)]
    if not gone:
        for axis in axes:
            if not _is_of_data(x.shape[axis]):
                rec.symbols.decided(x.shape[axis] == 1)
        return NotImplemented
    kept = [axis for axis in axes if not _is_of_data(x.shape[axis])]
    for axis in sorted(gone, reverse=True):  # torch would keep what it does not know to be one row
        x = x.select(axis, 0)
    rest = [axis - sum(other < axis for other in gone) for axis in kept]
    return x.squeeze(rest) if rest else x


def _has_one_row(rec: Recording, x: torch.Tensor, axis: int) -> bool:
    """Whether the sample has one row on an axis of data-dependent length; a guard holds runs to the answer."""
    size = x.shape[axis]
    seen = rec.symbols.concrete(size)
    if seen is None:
        raise Unsupported(
            f"squeeze of axis {axis}, whose length only the values tell, and there are no samples to decide by: name "
            f"the axes that always have length one{rec.tape.at()}"
        )
    one = bool(seen == 1)
    rec.guard(torch.scalar_tensor(size, dtype=torch.int64) == 1, outcome=one)  # type: ignore[arg-type]  # torch's stubs know no symbolic sizes
    return one


@override(Stage.OP, aten.ctc_loss.IntList)
def _ctc_loss(
    rec: Recording, x: torch.Tensor, targets: torch.Tensor, steps: list[int], lengths: list[int], *args: object
) -> Any:
    """With lengths that Python knows, torch's composite writes into memory, and a recorded tensor has none."""
    return aten.ctc_loss.Tensor(x, targets, torch.tensor(steps), torch.tensor(lengths), *args)


@override(Stage.OP, aten._to_copy.default)
def _number(rec: Recording, x: object, **options: object) -> Any:
    """vmap makes a tensor of a varying size in this way."""
    if not isinstance(x, torch.SymInt):
        return NotImplemented
    return torch.scalar_tensor(x, **options)  # type: ignore[arg-type]  # torch's stubs know no symbolic sizes
