"""Calls that are recorded as other calls: those that write into buffers, and those that a device would choose.

Each row is called under the recorder with the arguments of the op, and returns what the op would (or NotImplemented).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from tfnb.errors import InvalidArgument, Unsupported
from tfnb.recording.overrides import packed_sequences as packed
from tfnb.recording.overrides import recurrent_cells as cells
from tfnb.recording.values.recording import Recording
from tfnb.recording.writes import as_strided as strided
from tfnb.recording.writes.in_place_calls import rebind

aten = torch.ops.aten


def _batch_norm(
    rec: Recording,
    x: Any,
    w: Any,
    b: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: Any = None,
) -> Any:
    """Batch norm as a pure op; the running statistics are written back as recorded assignments."""
    if x.dim() < 2 or any(isinstance(size, int) and size == 0 for size in x.shape):
        return NotImplemented  # torch takes what has no elements, its kernels do not
    if not training:
        return aten._native_batch_norm_legit_no_training(x, w, b, mean, var, momentum, eps)[0]
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, w, b, True, momentum, eps)[0]
    count = _batches(rec.scopes.module)
    momentum = momentum if count is None else 1.0
    out, _, _, new_mean, new_var = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, momentum, eps)
    for stored, new in ((mean, new_mean), (var, new_var)):
        rebind(rec, stored, new if count is None else stored + (new - stored) / count)
    return out


def _batches(module: Any) -> Any:
    """The counter of a batch norm with ``momentum=None``, which keeps the mean of all batches; torch's forward makes a
    number of it."""
    cumulative = isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.momentum is None
    return module.num_batches_tracked if cumulative else None


def _batch_norm_with_update(
    rec: Recording, x: Any, w: Any, b: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    found = aten._batch_norm_with_update_functional(x, w, b, mean, var, momentum, eps)
    rebind(rec, mean, found[4])
    rebind(rec, var, found[5])
    return found[:4]


def _rrelu(rec: Recording, x: Any, noise: Any, *args: Any, **kwargs: Any) -> Any:
    out, drawn = aten.rrelu_with_noise_functional(x, noise, *args, **kwargs)
    rebind(rec, noise, drawn)
    return out


def _native_batch_norm(
    rec: Recording, x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    if not training:
        return aten._native_batch_norm_legit_no_training(x, w, b, mean, var, momentum, eps)
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, w, b, True, momentum, eps)
    *outs, new_mean, new_var = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, momentum, eps)
    rebind(rec, mean, new_mean)
    rebind(rec, var, new_var)
    return tuple(outs)


def _linear(rec: Recording, x: Any, weight: Any, bias: Any = None) -> Any:
    """One matrix product over all leading axes: with symbolic sizes torch would expand the weight over the batch."""
    if x.dim() < 2:
        return NotImplemented
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    out = rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def _matmul(rec: Recording, a: Any, b: Any) -> Any:
    if a.dim() < 3 or b.dim() != 2:
        return NotImplemented
    return a.flatten(0, -2).mm(b).view(*a.shape[:-1], b.shape[-1])


def _kron(rec: Recording, a: Any, b: Any) -> Any:
    """The product of all pairs: torch's own composite wants numbers for the sizes."""
    rank = max(a.dim(), b.dim())
    left, right = ([1] * (rank - t.dim()) + list(t.shape) for t in (a, b))
    pairs = a.reshape([s for size in left for s in (size, 1)]) * b.reshape([s for size in right for s in (1, size)])
    return pairs.reshape([i * j for i, j in zip(left, right, strict=True)])


def _cdist(rec: Recording, x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    """One kernel, which chooses by the number of rows in each run; the composite would choose while recording."""
    return aten._cdist_forward(x1, x2, p, compute_mode)


def _diff(rec: Recording, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Differences of neighbours: an axis too short for that many becomes empty in the run, not while recording."""
    parts = [part for part in (prepend, x, append) if part is not None] if n else [x]
    out, dim = parts[0] if len(parts) == 1 else torch.cat(parts, dim), dim % max(x.dim(), 1)
    for _ in range(n):
        later, earlier = aten.slice(out, dim, 1), aten.slice(out, dim, 0, -1)
        out = torch.logical_xor(later, earlier) if out.dtype is torch.bool else later - earlier
    return out.clone() if n == 0 else out


def _fill_diagonal(rec: Recording, x: Any, value: Any, wrap: bool = False) -> Any:
    """A write to the diagonal; torch looks at the numbers of rows and columns to write by one stride."""
    if x.dim() != 2 or wrap or not any(isinstance(size, torch.SymInt) for size in x.shape):
        return NotImplemented
    x.diagonal().fill_(value)
    return x


def _multi_dot(rec: Recording, tensors: Any) -> Any:
    """Products in the order that is cheapest for the sizes of the samples, without fixing them."""
    first, last = tensors[0].dim() == 1, tensors[-1].dim() == 1
    ts = list(tensors)
    ts[0] = ts[0].unsqueeze(0) if first else ts[0]
    ts[-1] = ts[-1].unsqueeze(1) if last else ts[-1]
    sizes = [rec.symbols.hint(size) for size in (*(t.shape[0] for t in ts), ts[-1].shape[1])]

    @cache
    def best(i: int, j: int) -> tuple[int, int]:  # cost of the product of i..j, and where it is cut
        cuts = ((best(i, k)[0] + best(k + 1, j)[0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j))
        return min(cuts, default=(0, i))

    def product(i: int, j: int) -> Any:
        cut = best(i, j)[1]
        return ts[i] if i == j else product(i, cut).mm(product(cut + 1, j))

    out = product(0, len(ts) - 1)
    out = out.squeeze(1) if last else out
    return out.squeeze(0) if first else out


def _cov(rec: Recording, x: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Covariances of rows: torch's own composite wants numbers, and looks at the divisor's value."""
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    given = [w for w in (fweights, aweights) if w is not None]
    if not given:
        centred = rows - rows.sum(1, keepdim=True) / rows.shape[1]
        return (centred @ centred.mH / torch.sym_max(rows.shape[1] - correction, 0)).squeeze()
    weights = given[0] if len(given) == 1 else given[0] * given[1]
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    centred = rows - (rows * weights).sum(1, keepdim=True) / total
    return (centred @ (centred * weights).mH / (total - lost).clamp_min(0)).squeeze()


def _combinations(rec: Recording, x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    if r < 1:
        return NotImplemented
    grids = torch.meshgrid(*[torch.arange(x.shape[0], device=x.device)] * r, indexing="ij")
    kept = torch.ones_like(grids[0], dtype=torch.bool)
    for a, b in pairwise(grids):
        kept = kept & (a <= b if with_replacement else a < b)
    return x[kept.nonzero()]


def _take_along_dim(rec: Recording, x: Any, indices: Any, dim: Any = None) -> Any:
    if dim is None:
        return x.reshape(-1).gather(0, indices.reshape(-1))
    dim = dim % max(x.dim(), 1)
    lead = [b if isinstance(a, int) and a == 1 else a for a, b in zip(x.shape, indices.shape, strict=True)]
    own, picked = ([*lead[:dim], t.shape[dim], *lead[dim + 1 :]] for t in (x, indices))
    return x.expand(own).gather(dim, indices.expand(picked).remainder(x.shape[dim]))


def _matrix_norm(
    rec: Recording, a: Any, ord: Any, dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """The largest (smallest) sum of a column or row; the other norms are made of singular values."""
    is_empty = any(isinstance(size, int) and size == 0 for size in a.shape)  # that of an empty matrix is 0
    if abs(ord) not in (1, math.inf) or is_empty:
        return NotImplemented
    summed, compared = (d % a.dim() for d in (dim if abs(ord) == 1 else reversed(dim)))
    sums = torch.linalg.vector_norm(a, 1, [summed], keepdim=True, dtype=dtype)
    out = sums.amax([compared], keepdim=True) if ord > 0 else sums.amin([compared], keepdim=True)
    return out if keepdim else out.squeeze((summed, compared))


def _max_pool1d(rec: Recording, *args: Any, **kwargs: Any) -> Any:
    """Without the composite's check of the output's size, which wants a number."""
    return aten.max_pool1d_with_indices(*args, **kwargs)[0]


def _unbind(rec: Recording, x: Any, dim: int = 0) -> Any:
    """As many outputs as rows: the size is fixed by this line, whatever the shape rule of unbind concludes."""
    count = int(x.shape[dim])
    if _is_of_data(x.shape[dim]):
        return tuple(x.select(dim, i) for i in range(count))
    return NotImplemented


def _one_hot(rec: Recording, x: Any, num_classes: int = -1) -> Any:
    """The kernel of torch's composite, which refuses other classes in each run. How many it finds by itself is decided
    by this line, and a run must agree."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return NotImplemented
    with rec.tape.marked():
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


def _is_of_data(size: Any) -> bool:
    """Whether only the data of a run tell a size."""
    return isinstance(size, torch.SymInt) and size.node.hint is None


def _squeeze(rec: Recording, x: Any, dim: Any = None) -> Any:
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


def _has_one_row(rec: Recording, x: Any, axis: int) -> bool:
    """Of an axis whose length only data tell: whether the sample has one row, and a guard that a run agrees."""
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


def _is_same_size(rec: Recording, a: Any, b: Any) -> bool:
    """Decided by this line: the kernel's own answer would be nobody's."""
    return a.dim() == b.dim() and all(rec.symbols.decided(m == n) for m, n in zip(a.shape, b.shape, strict=True))


def _zeros(rec: Recording, size: Any, **options: Any) -> Any:
    """Forward mode's zeros without memory: kernels that torch calls past its own handling of them would read it."""
    return torch.zeros(size, **options)


def _refused(why: str) -> Any:
    def refuse(rec: Recording, *args: Any, **options: Any) -> Any:
        raise Unsupported(f"{why}{rec.tape.at()}")

    return refuse


_SEQUENCE = ("draw", "ff_", "initialize_state_", "scramble_")
# what forward mode calls by itself; in the transforms of torch.func torch does not come here
_linearized = _refused(
    "torch.func.linearize and torch.autograd.forward_ad are not recorded: use torch.func.jvp, or tfnb.jvp"
)
_sequence = _refused(
    "torch.quasirandom.SobolEngine goes along a sequence of its own, which is not recorded: draw its points before the "
    "recording, and feed them; what a package draws at its first call and keeps is there after one call before it"
)


def _padded(rec: Recording, x: Any, mask: Any, mask_check: bool = True) -> bool:
    """Whether a transformer may leave out its padding: that would depend on the mask, so it never does."""
    return False


def _number(rec: Recording, x: Any, **options: Any) -> Any:
    """vmap makes a tensor of a varying size in this way."""
    if not isinstance(x, torch.SymInt):
        return NotImplemented
    return torch.scalar_tensor(x, **options)  # type: ignore[arg-type]  # torch's stubs know no symbolic sizes


def _attention(rec: Recording, *args: Any, **kwargs: Any) -> Any:
    """Attention stays whole, but its dropout must be drawn by a node of its own."""
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    if not dropout:
        return NotImplemented
    return aten._scaled_dot_product_attention_math(*args, **kwargs)[0]


def _dropout(rec: Recording, x: Any, p: float, train: bool) -> Any:
    """Where nothing is dropped torch gives back the very tensor, whatever a device's kernel does."""
    return NotImplemented if train and p else x


def _recurrent(op: Any) -> Callable[..., Any]:
    """Recurrent layers stay whole; those that draw dropout between them are recorded one by one, with the draws.

    torch's own decomposition (2.13) leaves the dropout out.
    """

    def row(
        rec: Recording, x: Any, hx: Any, params: Any, biases: bool, layers: int, dropout: float, train: bool,
        both: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        if not (dropout and train and layers > 1):
            return NotImplemented
        several, ways, each = isinstance(hx, (list, tuple)), 1 + both, len(params) // layers
        finals = []
        for i in range(layers):
            start = [h[i * ways : (i + 1) * ways] for h in (hx if several else [hx])]
            own = params[i * each : (i + 1) * each]
            x = x if i == 0 else torch.dropout(x, dropout, True)
            x, *last = op(x, start if several else start[0], own, biases, 1, 0.0, train, both, batch_first)
            finals.append(last)
        return (x, *map(torch.cat, zip(*finals, strict=True)))

    return row


def _checked(op: Any, count: int) -> Callable[..., Any]:
    """A factorization as the op that checks itself: torch's separate check gives no value that a run would need."""

    def row(rec: Recording, *args: Any, **kwargs: Any) -> Any:
        found = op(*args, **kwargs, check_errors=True)
        return found[:count] if count > 1 else found[0]

    return row


def _tensorinv(rec: Recording, x: Any, ind: int = 2) -> Any:
    rows, columns = x.shape[:ind], x.shape[ind:]
    return torch.linalg.inv(x.reshape(math.prod(columns), -1)).reshape(*columns, *rows)


def _ctc_loss(rec: Recording, x: Any, targets: Any, steps: Any, lengths: Any, *args: Any) -> Any:
    """Of lengths that Python knows: torch's composite writes them into memory that a recorded tensor has not."""
    return aten.ctc_loss.Tensor(x, targets, torch.tensor(steps), torch.tensor(lengths), *args)


REPLACED: dict[Any, Callable[..., Any]] = {
    aten.dropout.default: _dropout,
    aten.batch_norm.default: _batch_norm,
    aten.native_batch_norm.default: _native_batch_norm,
    aten._batch_norm_with_update.default: _batch_norm_with_update,
    aten.rrelu_with_noise.default: _rrelu,
    aten._native_batch_norm_legit.default: _native_batch_norm,
    aten.scaled_dot_product_attention.default: _attention,
    aten.ctc_loss.IntList: _ctc_loss,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.unbind.int: _unbind,
    aten.one_hot.default: _one_hot,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze_copy.default: _squeeze,
    aten.squeeze_copy.dim: _squeeze,
    aten.squeeze_copy.dims: _squeeze,
    aten.is_same_size.default: _is_same_size,
    aten._efficientzerotensor.default: _zeros,
    aten._fw_primal.default: _linearized,
    **{getattr(aten, f"_sobol_engine_{name}").default: _sequence for name in _SEQUENCE},
    aten._nested_tensor_from_mask_left_aligned.default: _padded,
    aten._to_copy.default: _number,
    aten.max_pool1d.default: _max_pool1d,
    aten.kron.default: _kron,
    aten.cdist.default: _cdist,
    aten.diff.default: _diff,
    aten.fill_diagonal_.default: _fill_diagonal,
    aten.take_along_dim.default: _take_along_dim,
    aten.linalg_multi_dot.default: _multi_dot,
    aten.linalg_matrix_norm.default: _matrix_norm,
    aten.linalg_cholesky.default: _checked(aten.linalg_cholesky_ex, 1),
    aten.linalg_inv.default: _checked(aten.linalg_inv_ex, 1),
    aten.linalg_tensorinv.default: _tensorinv,
    aten.linalg_solve.default: _checked(aten._linalg_solve_ex, 1),
    aten.linalg_lu_factor.default: _checked(aten.linalg_lu_factor_ex, 2),
    aten.linalg_ldl_factor.default: _checked(aten.linalg_ldl_factor_ex, 2),
    aten.cov.default: _cov,
    aten.combinations.default: _combinations,
    **{op: _recurrent(op) for op in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)},
    **cells.CELLS,
    **packed.PACKED,
    **strided.STRIDED,
}


# torch conjugates and negates lazily, by a bit on the view; a recorded view holds the numbers themselves.
PHYSICAL: dict[Any, Any] = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
