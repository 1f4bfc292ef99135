"""Shape rules that torch lacks for symbolic sizes.

Of recurrent layers kept whole, whose decomposition unrolls the time axis and so would fix its size, and of kernels that
have none or one that decides by the sizes of the sample. Each is called on fake tensors with the op's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import (
    _constrain_range_for_size,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from tfnb.recording.overrides.override_table import Stage, override

aten = torch.ops.aten
_ALL = (1 << 63) - 1  # how a slice without an end is written
_LENGTHS = ValueRanges(0, int_oo)  # of an axis that varies


@override(Stage.SHAPE, aten.lstm.input)
def _lstm_shape(x: torch.Tensor, hx: Sequence[torch.Tensor], params: object, *rest: object) -> Any:
    return _recurrent_out(x, hx[0], rest), hx[0].clone(), hx[1].clone()


@override(Stage.SHAPE, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def _rnn_shape(x: torch.Tensor, hx: torch.Tensor, params: object, *rest: object) -> Any:
    return _recurrent_out(x, hx, rest), hx.clone()


def _recurrent_out(x: torch.Tensor, hx: torch.Tensor, rest: Sequence[object]) -> Any:
    *_, bidirectional, batch_first = rest
    first, second = (1, 0) if batch_first else (0, 1)
    out = x.new_empty((x.shape[first], x.shape[second], hx.shape[-1] * (2 if bidirectional else 1)))
    return out.transpose(0, 1) if batch_first else out  # as the kernels lay it out: time first


@override(Stage.SHAPE, aten.view.default)
def _view(x: FakeTensor, size: Sequence[int]) -> Any:
    """torch's rule for views, in fake mode; outside, torch would load its distributed tensors."""
    if free_unbacked_symbols([*x.shape, *size]):
        return aten.view.default(x, size)
    with x.fake_mode:
        return torch._refs._reshape_view_helper(x, *size, allow_copy=False)


@override(
    Stage.SHAPE,
    aten._sample_dirichlet.default,
    aten._dirichlet_grad.default,
    aten._standard_gamma_grad.default,
    aten._fake_quantize_learnable_per_tensor_affine.default,
    aten._fake_quantize_learnable_per_channel_affine.default,
)
def _like_first(x: torch.Tensor, *_: object, **__: object) -> Any:
    return torch.empty_like(x)


@override(
    Stage.SHAPE,
    aten.fake_quantize_per_tensor_affine_cachemask.default,
    aten.fake_quantize_per_channel_affine_cachemask.default,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
)
def _rounded_and_mask(x: torch.Tensor, *_: object) -> Any:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@override(
    Stage.SHAPE,
    aten._fake_quantize_learnable_per_tensor_affine_backward.default,
    aten._fake_quantize_learnable_per_channel_affine_backward.default,
)
def _learned_quantization(
    dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *_: object
) -> Any:
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero)


@override(
    Stage.SHAPE,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.multi_margin_loss_backward.default,
    aten.multilabel_margin_loss_backward.default,
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    aten._ctc_loss_backward.default,
    aten._ctc_loss_backward.Tensor,
)
def _like_second(dy: torch.Tensor, x: torch.Tensor, *_: object) -> Any:
    """The gradient with respect to the first argument of an op whose cotangent is the first operand."""
    return torch.empty_like(x)


@override(Stage.SHAPE, aten._upsample_bicubic2d_aa_backward.default)
def _resized_back(dy: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *_: object) -> Any:
    """torch's rule is C++ that takes only sizes that are numbers."""
    return dy.new_empty(input_size)


@override(Stage.SHAPE, aten.slice.Tensor)
def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """At most as many rows as there are in a run: torch's rule compares with the rows of the sample."""
    rows, first = x.shape[dim], 0 if start is None else start
    if isinstance(end, torch.SymInt) and statically_known_true(end == rows):
        end = None
    numbers = isinstance(first, int) and (end is None or isinstance(end, int))
    is_open = end is None or (isinstance(end, int) and end >= _ALL)
    if not numbers:
        _same_in_a_run(rows, first, rows if is_open else end)
    if not isinstance(rows, torch.SymInt) or not numbers or (first == 0 and is_open):
        return aten.slice.Tensor(x, dim, start, end, step)

    def place(at: int) -> Any:
        return _least(at, rows) if at >= 0 else _at_least_none(rows + at)

    if is_open and first < 0:
        count = _least(-first, rows)
    else:  # a start behind the end gives nothing
        count = _at_least_none((rows if is_open else place(end)) - (first if first >= 0 else place(first)))
    sizes, strides = list(x.shape), list(x.stride())
    sizes[dim] = count if step == 1 else (count + step - 1) // step
    offset = x.storage_offset() + place(first) * strides[dim]
    strides[dim] = strides[dim] * step
    return x.as_strided(sizes, strides, offset)


def _least(at: int, rows: int | torch.SymInt) -> Any:
    """The lesser of a position and a row count, as a number if there are always enough rows (a ``cat`` with a fixed
    part).
    """
    return at if _never_negative(rows - at) else torch.sym_min(at, rows)


def _at_least_none(count: int | torch.SymInt) -> Any:
    return count if _never_negative(count) else torch.sym_max(count, 0)


def _never_negative(size: int | torch.SymInt) -> bool:
    """Whether a size is nonnegative for all lengths of varying axes, zero included; torch assumes at least two."""
    if not isinstance(size, torch.SymInt):
        return bool(size >= 0)
    expr = size.node.expr
    return bool(bound_sympy(expr, dict.fromkeys(expr.free_symbols, _LENGTHS)).lower >= 0)


def _same_in_a_run(rows: int | torch.SymInt, first: int | torch.SymInt, end: int | torch.SymInt) -> None:
    """Guard that runs slice like the sample: positions before or behind the end, and their order."""
    start, stop = (at if _asked(at >= 0) else rows + at for at in (first, end))
    for relation in (start >= 0, start <= rows, stop <= rows, start <= stop):
        _asked(relation)


def _asked(relation: bool | torch.SymBool) -> bool:
    """The outcome of a relation, as if the user's line had asked; sizes that only data tell are torch's affair."""
    if isinstance(relation, bool):
        return relation
    if relation.node.hint is None or statically_known_true(relation):
        return True
    env = relation.node.shape_env
    before, env.kernel = env.kernel, False
    try:
        return bool(relation)
    finally:
        env.kernel = before


@override(Stage.SHAPE, aten.linalg_vector_norm.default)
def _vector_norm(
    x: torch.Tensor,
    ord: float | str = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """torch's rule for data-dependent sizes; the rule of torch 2.11 compares the size with 1."""
    if not _is_of_data(x):
        return aten.linalg_vector_norm.default(x, ord, dim, keepdim, dtype=dtype)
    lengths = (x if dtype is None else x.to(dtype)).abs()
    return aten.sum.dim_IntList(lengths, dim, keepdim)


def _is_of_data(x: torch.Tensor) -> bool:
    """Whether a size is data-dependent, so that no comparison with 0 can be answered."""
    return any(isinstance(n, torch.SymInt) and n.node.hint is None for n in x.shape)


@override(Stage.SHAPE, aten.logsumexp.default)
def _logsumexp(x: torch.Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Any:
    if not _is_of_data(x):
        return aten.logsumexp.default(x, dim, keepdim)
    return aten.sum.dim_IntList(x if x.dtype.is_floating_point or x.dtype.is_complex else x / 1, dim, keepdim)


def _best_so_far(op: OpOverload) -> Callable[..., Any]:
    def shape(x: torch.Tensor, dim: int) -> Any:
        return (torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)) if _is_of_data(x) else op(x, dim)

    return shape


@override(Stage.SHAPE, aten.roll.default)
def _roll(x: torch.Tensor, shifts: int | Sequence[int], dims: Sequence[int] = ()) -> Any:
    return torch.empty_like(x) if _is_of_data(x) else aten.roll.default(x, shifts, dims)


@override(Stage.SHAPE, aten.copy.default)
def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    """A tensor with the sizes of ``x``, if data-dependent: torch 2.11 would compare them with the source's sizes."""
    if _are_told(x, source):
        return aten.copy.default(x, source, non_blocking)
    return torch.empty_like(x)


def _are_told(*tensors: torch.Tensor) -> bool:
    """Whether no size is one that only data tell."""
    return all(not isinstance(n, torch.SymInt) or n.node.hint is not None for x in tensors for n in x.shape)


@override(Stage.SHAPE, aten.scaled_dot_product_attention.default)
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **options: object) -> Any:
    """Over as many places as only data tell: torch's rule chooses a kernel, and asks whether there are any.

    As new memory in order: another kernel may lay it out otherwise, so that nothing may be viewed as if it did not.
    """
    alike = all(statically_known_true(a == b) for a, b in zip(q.shape[:-2], v.shape[:-2], strict=False))
    if _are_told(q, k, v) or not alike or q.dim() != v.dim():
        return aten.scaled_dot_product_attention.default(q, k, v, *rest, **options)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@override(Stage.SHAPE, aten.geqrf.default)
def _geqrf(a: torch.Tensor) -> Any:
    return torch.empty_like(a), a.new_empty((*a.shape[:-2], torch.sym_min(a.shape[-2], a.shape[-1])))


def _fractional(spatial: int) -> Callable[..., Any]:
    def shape(x: torch.Tensor, kernel_size: object, output_size: Sequence[int], random_samples: object) -> Any:
        sizes = (*x.shape[:-spatial], *output_size)
        return x.new_empty(sizes), x.new_empty(sizes, dtype=torch.int64)

    return shape


@override(Stage.SHAPE, aten._histogramdd_from_bin_cts.default)
def _histogramdd(x: torch.Tensor, bins: Sequence[int], **kwargs: object) -> Any:
    return x.new_empty(bins)


@override(Stage.SHAPE, aten.histogram.bin_ct)
def _histogram(x: torch.Tensor, bins: int, **kwargs: object) -> Any:
    return x.new_empty(bins), x.new_empty(bins + 1)


@override(Stage.SHAPE, aten.histogram.bins_tensor)
def _histogram_edges(x: torch.Tensor, bins: torch.Tensor, **kwargs: object) -> Any:
    return x.new_empty(bins.shape[0] - 1), torch.empty_like(bins)


@override(Stage.SHAPE, aten._histogramdd_bin_edges.default)
def _histogramdd_edges(x: torch.Tensor, bins: Sequence[int], **kwargs: object) -> Any:
    return [x.new_empty(count + 1) for count in bins]


@override(Stage.SHAPE, aten._grouped_mm.default)
def _grouped_mm_shape(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """One product for each group; torch's own rule takes bfloat16 alone, and its kernels more."""
    groups = offs.shape[:1] if a.dim() == b.dim() == 2 else a.shape[:-2] if b.dim() == 3 else ()
    return a.new_empty([*groups, a.shape[-2], b.shape[-1]], dtype=out_dtype or a.dtype)


@override(Stage.SHAPE, aten._ctc_loss.default, aten._ctc_loss.Tensor)
def _ctc_shape(
    x: Any, targets: torch.Tensor, steps: object, lengths: torch.Tensor | Sequence[int], *rest: object
) -> Any:  # fmt: skip
    """Shapes of the loss of each sequence and of its alpha table, as wide as the longest target."""
    if isinstance(lengths, torch.Tensor):
        wide = x.fake_mode.shape_env.create_unbacked_symint()
        _constrain_range_for_size(wide)
    else:
        wide = 2 * max(lengths, default=0) + 1
    batch = x.shape[1:-1]
    return x.new_empty(batch), x.new_empty((*batch, x.shape[0], wide))


@override(Stage.SHAPE, aten.linalg_lstsq.default)
def _lstsq_shape(a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Shapes for a matrix of full rank; otherwise torch also omits the residuals, depending on the values."""
    rows, columns = a.shape[-2:]
    driver = driver or ("gels" if a.device.type == "cuda" else "gelsy")
    vector = b.dim() == 1 or b.dim() == a.dim() - 1
    lead, right = a.shape[:-2], [] if vector else b.shape[-1:]
    rank = a.new_empty([0] if driver == "gels" else lead, dtype=torch.int64)
    values = a.real.new_empty([*lead, min(rows, columns)] if driver in ("gelsd", "gelss") else [0])
    squares = a.new_empty([*lead, *right] if rows > columns and driver != "gelsy" else [0], dtype=values.dtype)
    return a.new_empty([*lead, columns, *right]), squares, rank, values


@override(Stage.SHAPE, aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, *rest: object
) -> Any:
    """Shapes by channel, without running the whole decomposition on fake tensors, which takes ten times as long."""
    if not _by_channel(x, w, b, mean, var):
        return aten._native_batch_norm_legit_functional.default(x, w, b, mean, var, *rest)
    return torch.empty_like(x), *(mean.new_empty(mean.shape) for _ in range(4))


@override(Stage.SHAPE, aten.native_batch_norm_backward.default)
def _batch_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    saved: torch.Tensor | None,
    inverse: torch.Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    if dy.dtype is not x.dtype or not _by_channel(x, w, mean, var, saved, inverse):
        return aten.native_batch_norm_backward.default(dy, x, w, mean, var, saved, inverse, train, eps, mask)
    return torch.empty_like(x), *(x.new_empty(x.shape[1:2]) if asked else None for asked in mask[1:])


def _by_channel(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the others have a number for each channel, of the same type: all else torch's rule knows, or refuses."""
    return x.dtype in (torch.float32, torch.float64) and all(
        t is None or (t.dtype is x.dtype and t.dim() == 1 and statically_known_true(t.shape[0] == x.shape[1]))
        for t in others
    )


def _along_an_axis(op: OpOverload) -> Callable[..., Any]:
    """Shape rule of a softmax: a contiguous tensor like the input. torch's rule takes milliseconds, as do
    others below.
    """

    def rule(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        if half_to_float or not x.dtype.is_floating_point or not -x.dim() <= dim < x.dim():
            return op(x, dim, half_to_float)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return rule


def _back_along_an_axis(op: OpOverload) -> Callable[..., Any]:
    def rule(dy: torch.Tensor, y: torch.Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        if not dy.dtype is y.dtype is input_dtype or not _same_sizes(dy, y) or not -y.dim() <= dim < y.dim():
            return op(dy, y, dim, input_dtype)
        return torch.empty_like(dy, memory_format=torch.contiguous_format)

    return rule


@override(Stage.SHAPE, aten.nll_loss_forward.default)
def _nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> Any:
    if x.dim() != 2 or target.dim() != 1 or not _by_channel(x, weight):
        return aten.nll_loss_forward.default(x, target, weight, reduction, ignore_index)
    torch._check(x.shape[0] == target.shape[0], lambda: f"size mismatch (got input: {x.shape}, target: {target.shape})")
    return x.new_empty(() if reduction else x.shape[:1]), x.new_empty(())


@override(Stage.SHAPE, aten.nll_loss_backward.default)
def _nll_loss_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    reduction: int,
    ignore: int,
    total: torch.Tensor,
) -> Any:
    is_usual = x.dim() == 2 and target.dim() == 1 and total.dim() == 0 and _by_channel(x, weight)
    rows = (target,) if reduction else (target, dy)
    fits = is_usual and dy.dim() == (0 if reduction else 1)
    if not fits or not all(statically_known_true(t.shape[0] == x.shape[0]) for t in rows):
        return aten.nll_loss_backward.default(dy, x, target, weight, reduction, ignore, total)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@override(Stage.SHAPE, aten.threshold_backward.default)
def _threshold_backward(dy: torch.Tensor, x: torch.Tensor, threshold: float) -> Any:
    return aten.mul.Tensor(x, dy)


def _same_sizes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(statically_known_true(n == m) for n, m in zip(a.shape, b.shape, strict=True))


for _op in (aten._softmax.default, aten._log_softmax.default):
    override(Stage.SHAPE, _op)(_along_an_axis(_op))
for _op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
    override(Stage.SHAPE, _op)(_back_along_an_axis(_op))
override(Stage.SHAPE, aten.cummax.default)(_best_so_far(aten.cummax.default))
override(Stage.SHAPE, aten.cummin.default)(_best_so_far(aten.cummin.default))
override(Stage.SHAPE, aten.fractional_max_pool3d.default)(_fractional(3))
override(Stage.SHAPE, aten.relu.default)(aten.neg.default)
