"""Ops of a step over rows (`exact_rows`) that become several nodes: each task's part, sums of parts, and the rest.

A mean divides each task's sum by the number of all rows; a loss by what its reduction divides by; batch norm takes
the statistics of all rows from sums of each task; dropout takes each task's rows of the mask of all. Each function
emits the nodes of one op, or returns False, and then the op is done by the rules, or by one task. Imports the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from tfnb.graph import Dim, Node, Ref, Spec, Value
from tfnb.graph.graph import new_id
from tfnb.graph.op_facts import facts_of
from tfnb.passes.flow.row_rules import RowCall

if TYPE_CHECKING:
    from tfnb.passes.flow.exact_rows import RowDivision

Form = Literal["rows", "summands", "whole", "own"]


class FormOf(NamedTuple):
    """The form of a value, and its values on the tasks. axis: of rows."""

    form: Form
    values: tuple[Value, ...]
    axis: int = -1


@dataclass
class Emission:
    """One node that becomes several."""

    division: RowDivision
    node: Node

    def argument(self, name: str) -> Any:
        """An argument of the op, or its default by the schema."""
        return self.node.attrs.get(name, facts_of(self.node.op).defaults.get(name))

    def value(self, name: str) -> Value | None:
        """An operand, or None."""
        found = self.node.attrs.get(name)
        return self.node.inputs[found.input] if isinstance(found, Ref) else None

    def axis(self, name: str) -> int | None:
        """The axis of an operand's rows; None for an operand without rows."""
        value = self.value(name)
        return None if value is None else self.division.axis_of(self.spec(value))

    def spec(self, value: Value) -> Spec:
        """The spec of an operand, of all rows."""
        return self.division.spec_at(value)

    @cached_property
    def call(self) -> RowCall | None:
        """The call for a rule."""
        return self.division.call_of(self.node)

    def rows(self, value: Value) -> tuple[Value, ...]:
        """The rows of an operand, on each task."""
        axis = self.division.axis_of(self.spec(value))
        assert axis is not None
        return self.division.rows_of(value, axis)

    def alike(self, value: Value) -> tuple[Value, ...]:
        """A whole operand, on each task."""
        return self.division.alike(value)

    def each(self, op: str, *operands: Sequence[Value], spec: Spec, **arguments: object) -> tuple[Value, ...]:
        """One new node on each task, of ``self`` and perhaps ``other``; ``spec`` of all rows."""
        division, name = self.division, f"{self.node.name}/{op.split('.')[1]}"
        attrs = {key: Ref(at) for at, key in zip(range(len(operands)), ("self", "other"), strict=False)} | arguments
        found = []
        for task in range(len(division.tasks)):
            given, own = [values[task] for values in operands], division.spec_of(spec, task, {})
            found.append(division.new(name, op, given, attrs, own, self.node, task))
        return tuple(found)

    def total(self, summands: Sequence[Value], spec: Spec) -> tuple[Value, ...]:
        """The sum of summands, on each task."""
        division = self.division
        return (division.summed(self.node, summands, spec),) * len(division.tasks)

    def cast(self, values: tuple[Value, ...], old: Spec, new: Spec) -> tuple[Value, ...]:
        """Values of the dtype of ``old``, in that of ``new``, whose shape they have."""
        is_same = old.dtype == new.dtype
        return values if is_same else self.each("aten._to_copy.default", values, spec=new, dtype=new.dtype)

    def give(self, form: Form, values: tuple[Value, ...], index: int = 0, axis: int = -1) -> None:
        """The form of an output, and its values."""
        self.division.states[self.node.value(index)] = FormOf(form, values, axis)
        self.division.ids[self.node.id] = tuple(value.node for value in values)

    def copies(self, **attrs: object) -> list[Node] | None:
        """The node itself on each task, with other arguments."""
        call = self.call
        return None if call is None else self.division.copies(self.node, call, {**self.node.attrs, **attrs})


_PRECISE = (torch.float32, torch.float64)  # numbers of fewer bits are summed in more by one op, and not by several
_NARROW = (torch.float16, torch.bfloat16)


def _wide(spec: Spec) -> Spec:
    """The spec of numbers in which an op of torch sums numbers of a spec."""
    return replace(spec, dtype=torch.float32) if spec.dtype in _NARROW else spec


def _count(sizes: Iterable[int | Dim]) -> Dim:
    """The product of sizes, as one."""
    return Dim("*".join(f"({size})" for size in sizes) or "1")


class _OverRows(NamedTuple):
    """The operand of a reduction over rows: its spec, the axis of its rows, and the axes that are reduced."""

    value: Value
    spec: Spec
    axis: int
    dims: list[int]

    @property
    def kept(self) -> Spec:
        """The spec of the result with ``keepdim=True``."""
        return replace(self.spec, shape=tuple(1 if at in self.dims else s for at, s in enumerate(self.spec.shape)))

    @property
    def numbers(self) -> Dim:
        """How many numbers each number of the result is of."""
        return _count(self.spec.shape[one] for one in self.dims)


def _over_rows(e: Emission) -> _OverRows | None:
    """The operand of a reduction; None of one that leaves rows apart, and of one with further operands."""
    value = e.value("self")
    if value is None or len(e.node.inputs) != 1 or (axis := e.division.axis_of(e.spec(value))) is None:
        return None
    spec, dim = e.spec(value), e.argument("dim")
    rank = len(spec.shape)
    named = [dim] if isinstance(dim, int) else dim
    dims = [one % rank for one in named] if named else list(range(rank))
    return _OverRows(value, spec, axis, dims) if axis in dims else None


def _mean(e: Emission) -> bool:
    """A mean over rows: each task's sum, divided by the number of all."""
    of = _over_rows(e)
    if of is None:
        return False
    out = e.node.outputs[0]
    wide = _wide(out)
    about = {"dim": of.dims, "keepdim": bool(e.argument("keepdim")), "dtype": wide.dtype}
    sums = e.each("aten.sum.dim_IntList", e.rows(of.value), spec=wide, **about)
    e.give("summands", e.cast(e.each("aten.div.Tensor", sums, spec=wide, other=of.numbers), wide, out))
    return True


def _extreme(e: Emission) -> bool:
    """The largest or smallest of rows: the extreme of the tasks' extremes."""
    of = _over_rows(e)
    if of is None:
        return False
    e.give("whole", _shaped(e, _extreme_of(e, of, e.node.op), of.kept, e.node.outputs[0]))
    return True


def _extreme_of(e: Emission, of: _OverRows, op: str) -> tuple[Value, ...]:
    """The extreme of all rows, on each task, with the axes that are reduced of size 1."""
    division, kept = e.division, of.kept
    each = e.each(op, e.rows(of.value), spec=kept, dim=of.dims, keepdim=True)
    count = len(division.tasks)
    many = replace(kept, shape=tuple(count if at == of.axis else size for at, size in enumerate(kept.shape)))
    about = {"tensors": [Ref(at) for at in range(count)], "dim": of.axis}
    joined = division.new(f"{e.node.name}/cat", "aten.cat.default", each, about, many, e.node)
    about = {"self": Ref(0), "dim": [of.axis], "keepdim": True}
    return (division.new(f"{e.node.name}/all", op, (joined,), about, kept, e.node),) * count


def _shaped(e: Emission, values: tuple[Value, ...], spec: Spec, out: Spec) -> tuple[Value, ...]:
    """A whole value with another shape of as many numbers."""
    if out.shape == spec.shape:
        return values
    about = {"self": Ref(0), "shape": list(out.shape)}
    one = e.division.new(f"{e.node.name}/shape", "aten.reshape.default", values[:1], about, out, e.node)
    return (one,) * len(values)


def _deviation(e: Emission) -> bool:
    """A variance or deviation over rows: the sum of squared distances from the mean of all rows, by their number."""
    of, correction = _over_rows(e), e.argument("correction")
    correction = 1 if correction is None else correction
    if of is None or of.spec.dtype not in _PRECISE or not isinstance(correction, int):
        return False
    rows, kept, out = e.rows(of.value), of.kept, e.node.outputs[0]
    sums = e.each("aten.sum.dim_IntList", rows, spec=kept, dim=of.dims, keepdim=True)
    mean = e.each("aten.div.Tensor", e.total(sums, kept), spec=kept, other=of.numbers)
    away = e.each("aten.sub.Tensor", rows, mean, spec=of.spec)
    squares = e.each("aten.mul.Tensor", away, away, spec=of.spec)
    sums = e.each("aten.sum.dim_IntList", squares, spec=kept, dim=of.dims, keepdim=True)
    less = Dim(f"max(0, ({of.numbers}) - {correction})")
    found = e.each("aten.div.Tensor", e.total(sums, kept), spec=kept, other=less)
    if e.node.op.split(".")[1].startswith("std"):
        found = e.each("aten.sqrt.default", found, spec=kept)
    e.give("whole", _shaped(e, found, kept, out))
    if len(e.node.outputs) == 2:
        e.give("whole", _shaped(e, mean, kept, e.node.outputs[1]), index=1)
    return True


def _logsumexp(e: Emission) -> bool:
    """The logarithm of a sum of exponentials over rows, which are taken of the distances from the largest."""
    of = _over_rows(e)
    if of is None or of.spec.dtype not in _PRECISE:
        return False
    kept, bounds = of.kept, torch.finfo(of.spec.dtype)
    most = _extreme_of(e, of, "aten.amax.default")
    most = e.each("aten.clamp.default", most, spec=kept, min=bounds.min, max=bounds.max)  # inf - inf is no number
    raised = e.each("aten.exp.default", e.each("aten.sub.Tensor", e.rows(of.value), most, spec=of.spec), spec=of.spec)
    sums = e.total(e.each("aten.sum.dim_IntList", raised, spec=kept, dim=of.dims, keepdim=True), kept)
    found = e.each("aten.add.Tensor", e.each("aten.log.default", sums, spec=kept), most, spec=kept)
    e.give("whole", _shaped(e, found, kept, e.node.outputs[0]))
    return True


def _norm(e: Emission) -> bool:
    """The Euclidean norm over rows: the root of the sum of squares."""
    of, out = _over_rows(e), e.node.outputs[0]
    if of is None or e.argument("ord") != 2 or of.spec.dtype not in _PRECISE or out.dtype != of.spec.dtype:
        return False
    kept, rows = of.kept, e.rows(of.value)
    squares = e.each("aten.mul.Tensor", rows, rows, spec=of.spec)
    sums = e.total(e.each("aten.sum.dim_IntList", squares, spec=kept, dim=of.dims, keepdim=True), kept)
    e.give("whole", _shaped(e, e.each("aten.sqrt.default", sums, spec=kept), kept, out))
    return True


def _may_overflow(e: Emission) -> bool:
    """Whether the sum of a task may be beyond the largest number of its dtype, where the mean of all rows is not."""
    return e.argument("reduction") == 1 and e.node.outputs[0].dtype is torch.float16


def _loss(e: Emission) -> bool:
    """A loss with a ``reduction``: of rows, a sum over them, or that by the number of all."""
    call, reduction = e.call, e.argument("reduction")
    if call is None or not call.is_aligned() or _may_overflow(e):
        return False
    rows = tuple(size for size in _broadcast([e.spec(v).shape for v in e.node.inputs]))
    out = e.node.outputs[0]
    copies = e.copies(reduction=min(reduction, 1) * 2)
    assert copies is not None
    values = tuple(copy.value() for copy in copies)
    if reduction == 0:
        axis = e.division.axis_of(out)
        assert axis is not None
        e.give("rows", values, axis=axis)
    elif reduction == 2:
        e.give("summands", values)
    else:
        e.give("summands", e.each("aten.div.Tensor", values, spec=out, other=_count(rows)))
    return True


def _loss_back(e: Emission) -> bool:
    """The gradient of such a loss, of rows."""
    call, reduction, out = e.call, e.argument("reduction"), e.node.outputs[0]
    axis = e.division.axis_of(out)
    if call is None or axis is None or not call.is_aligned():
        return False
    copies = e.copies(reduction=min(reduction, 1) * 2)
    assert copies is not None
    values = tuple(copy.value() for copy in copies)
    if reduction == 1:
        rows = _broadcast([e.spec(v).shape for v in e.node.inputs])
        values = e.each("aten.div.Tensor", values, spec=out, other=_count(rows))
    e.give("rows", values, axis=axis)
    return True


def _class_loss(e: Emission) -> bool:
    """Cross entropy of rows by their classes: the sum of losses, and the total of weights, of each task."""
    reduction = e.argument("reduction")
    if e.axis("self") != 0 or e.axis("target") != 0 or _may_overflow(e):
        return False
    copies = e.copies(reduction=min(reduction, 1) * 2)
    if copies is None:
        return False
    losses, weights = (tuple(copy.value(at) for copy in copies) for at in (0, 1))
    out, total = e.node.outputs
    if reduction == 1:
        whole = e.total(weights, total)
        losses = e.each("aten.div.Tensor", losses, whole, spec=out)
    e.give("rows" if reduction == 0 else "summands", losses, axis=0 if reduction == 0 else -1)
    e.give("whole" if reduction == 0 else "summands", weights, index=1)
    e.division.ids[e.node.id] = tuple(copy.id for copy in copies)
    return True


def _dropout(e: Emission) -> bool:
    """Dropout: each task draws the mask of all rows, and takes that of its own."""
    value, division = e.value("input"), e.division
    if value is None or not e.argument("train") or (axis := division.axis_of(e.spec(value))) is None:
        return False
    drawn = replace(e.node, id=new_id(), inputs=(division.ones_like(value, e.node),))
    division.drawn[drawn.id] = drawn
    division.do_whole(drawn)
    scaled, mask = (division.rows_of(drawn.value(at), axis) for at in (0, 1))
    out = e.each("aten.mul.Tensor", e.rows(value), scaled, spec=e.node.outputs[0])
    e.give("rows", out, axis=axis)
    e.give("rows", mask, index=1, axis=axis)
    return True


def _batch_norm(e: Emission) -> bool:
    """Batch norm in training, of the statistics of all rows: means of each task's sums, twice."""
    x, training = e.value("input"), e.argument("training")
    if x is None or e.axis("input") != 0 or not training:
        return False
    out, mean_spec = e.node.outputs[:2]
    wide, stats = _wide(out), _wide(mean_spec)
    if stats != mean_spec:  # rounding of statistics to 16 bits moves gradients by a tenth: the kernel's own is taken
        return False
    dims, flat = _of_channels(e.spec(x))
    count, rows = _count(e.spec(x).shape[at] for at in dims), e.cast(e.rows(x), e.spec(x), wide)

    def mean(values: Sequence[Value]) -> tuple[Value, ...]:
        sums = e.each("aten.sum.dim_IntList", values, spec=stats, dim=dims)
        return e.each("aten.div.Tensor", e.total(sums, stats), spec=stats, other=count)

    def spread(values: Sequence[Value]) -> tuple[Value, ...]:
        return e.each("aten.reshape.default", values, spec=replace(stats, shape=tuple(flat)), shape=flat)

    mu = mean(rows)
    away = e.each("aten.sub.Tensor", rows, spread(mu), spec=wide)
    var = mean(e.each("aten.mul.Tensor", away, away, spec=wide))
    shifted = e.each("aten.add.Tensor", var, spec=stats, other=e.argument("eps"))
    scale = e.each("aten.rsqrt.default", shifted, spec=stats)
    y = e.each("aten.mul.Tensor", away, spread(scale), spec=wide)
    for op, name in (("aten.mul.Tensor", "weight"), ("aten.add.Tensor", "bias")):
        if (own := e.value(name)) is not None:
            y = e.each(op, y, spread(e.cast(e.alike(own), e.spec(own), stats)), spec=wide)
    e.give("rows", e.cast(y, wide, out), axis=0)
    e.give("whole", e.cast(mu, stats, mean_spec), index=1)
    e.give("whole", e.cast(scale, stats, mean_spec), index=2)
    momentum = e.argument("momentum")
    less = Dim(f"({count}) - 1")
    total = e.each("aten.mul.Tensor", var, spec=stats, other=count)
    unbiased = e.each("aten.div.Tensor", total, spec=stats, other=less)
    for index, name, new in ((3, "running_mean", mu), (4, "running_var", unbiased)):
        if index < len(e.node.outputs) and (old := e.value(name)) is not None:
            kept = e.each("aten.mul.Tensor", e.cast(e.alike(old), e.spec(old), stats), spec=stats, other=1 - momentum)
            added = e.each("aten.mul.Tensor", new, spec=stats, other=momentum)
            moved = e.each("aten.add.Tensor", kept, added, spec=stats)
            e.give("whole", e.cast(moved, stats, e.node.outputs[index]), index=index)
    return True


def _batch_norm_back(e: Emission) -> bool:
    """The gradients of batch norm in training, by sums of the tasks' sums over rows."""
    x, grad = e.value("input"), e.value("grad_out")
    if x is None or grad is None or e.axis("input") != 0 or e.axis("grad_out") != 0:
        return False
    if not e.argument("train"):
        return False
    out, wide = e.node.outputs[0], _wide(e.spec(x))
    dims, flat = _of_channels(wide)
    saved = e.value("save_mean"), e.value("save_invstd")
    assert saved[0] is not None and saved[1] is not None
    stats = _wide(e.spec(saved[0]))
    if stats != e.spec(saved[0]):
        return False
    count = _count(wide.shape[at] for at in dims)
    rows, given = (e.cast(e.rows(value), e.spec(value), wide) for value in (x, grad))
    mean, scale = (e.cast(e.alike(value), e.spec(value), stats) for value in saved if value is not None)

    def spread(values: Sequence[Value]) -> tuple[Value, ...]:
        return e.each("aten.reshape.default", values, spec=replace(stats, shape=tuple(flat)), shape=flat)

    def total(values: Sequence[Value]) -> tuple[Value, ...]:
        return e.total(e.each("aten.sum.dim_IntList", values, spec=stats, dim=dims), stats)

    def share(values: Sequence[Value]) -> tuple[Value, ...]:
        return spread(e.each("aten.div.Tensor", values, spec=stats, other=count))

    away = e.each("aten.sub.Tensor", rows, spread(mean), spec=wide)
    normal = e.each("aten.mul.Tensor", away, spread(scale), spec=wide)
    of_weight = total(e.each("aten.mul.Tensor", given, normal, spec=wide))
    of_bias = total(given)
    less = e.each("aten.sub.Tensor", given, share(of_bias), spec=wide)
    along = e.each("aten.mul.Tensor", normal, share(of_weight), spec=wide)
    less = e.each("aten.sub.Tensor", less, along, spec=wide)
    factor = scale
    if (weight := e.value("weight")) is not None:
        factor = e.each("aten.mul.Tensor", factor, e.cast(e.alike(weight), e.spec(weight), stats), spec=stats)
    e.give("rows", e.cast(e.each("aten.mul.Tensor", less, spread(factor), spec=wide), wide, out), axis=0)
    for index, found in ((1, of_weight), (2, of_bias)):
        e.give("whole", e.cast(found, stats, e.node.outputs[index]), index=index)
    return True


def _of_channels(spec: Spec) -> tuple[list[int], list[int | Dim]]:
    """The axes that are no channels, and the shape of one number for each channel."""
    shape = spec.shape
    return [at for at in range(len(shape)) if at != 1], [size if at == 1 else 1 for at, size in enumerate(shape)]


def _broadcast(shapes: Sequence[Sequence[int | Dim]]) -> list[int | Dim]:
    """The shape that others broadcast to."""
    rank = max(map(len, shapes))
    wide: list[list[int | Dim]] = [[*[1] * (rank - len(shape)), *shape] for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*wide, strict=True)]


SPECIAL = {
    "mean": _mean, "amax": _extreme, "amin": _extreme, "logsumexp": _logsumexp, "linalg_vector_norm": _norm,
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _deviation), "native_dropout": _dropout,
    "nll_loss_forward": _class_loss, "nll_loss2d_forward": _class_loss,
    "_native_batch_norm_legit_functional": _batch_norm, "native_batch_norm_backward": _batch_norm_back,
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
                     "soft_margin_loss", "binary_cross_entropy_with_logits"), _loss),
    **dict.fromkeys(("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
                     "binary_cross_entropy_backward", "soft_margin_loss_backward"), _loss_back),
}  # fmt: skip
