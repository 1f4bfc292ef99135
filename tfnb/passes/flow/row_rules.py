"""Rules of ops over rows: the results that a task may compute of its own rows of a batch, as of all rows.

A rule looks at one node and at the axis that rows lie on in each operand that has some. It says that each task computes
its rows of the result from its rows of the operands (`ALONG`), that each task computes a summand of the result (`SUM`),
that results with rows are the former and others the latter (`MIXED`), or nothing: then all rows go to one task
(`tfnb.passes.flow.exact_rows`). An op that no table names is never divided. Pure; imports the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tfnb.graph import Dim, Node, Ref, Spec
from tfnb.graph.node import leaves
from tfnb.graph.op_facts import facts_of

ALONG: Literal["along"] = "along"
SUM: Literal["sum"] = "sum"
MIXED: Literal["mixed"] = "mixed"
Outcome = Literal["along", "sum", "mixed"] | None


@dataclass(frozen=True)
class RowCall:
    """A node whose operands lie in rows. ``axes``: of each operand the axis of its rows, None without rows.

    ``specs``: of the operands, of all rows. ``has_rows``: whether a size is one of rows. ``zeros``: places of operands
    that are zero everywhere.
    """

    node: Node
    axes: tuple[int | None, ...]
    specs: tuple[Spec, ...]
    has_rows: Callable[[int | Dim], bool]
    zeros: frozenset[int] = frozenset()

    def argument(self, name: str, default: object = None) -> Any:
        """An argument of the op, or its default by the schema."""
        if name in self.node.attrs:
            return self.node.attrs[name]
        return facts_of(self.node.op).defaults.get(name, default)

    def axis(self, name: str) -> int | None:
        """The axis of the rows of an operand by its name; None for an absent operand, and for one without rows."""
        found = self.node.attrs.get(name)
        return self.axes[found.input] if isinstance(found, Ref) else None

    def shape(self, name: str) -> tuple[int | Dim, ...]:
        """The shape of an operand."""
        return self.specs[self.node.attrs[name].input].shape

    @property
    def first(self) -> int:
        """The place of the first operand that has rows."""
        return next(at for at, axis in enumerate(self.axes) if axis is not None)

    @property
    def rank(self) -> int:
        """The rank of the first operand that has rows."""
        return len(self.specs[self.first].shape)

    @property
    def row_axes(self) -> set[int]:
        """The axes of rows of all operands that have some."""
        return {axis for axis in self.axes if axis is not None}

    def touched(self, name: str, rank: int) -> set[int]:
        """The axes named by an argument such as ``dim``; all axes by an empty one."""
        dim = self.argument(name)
        axes = [dim] if isinstance(dim, int) else list(range(rank)) if dim is None or len(dim) == 0 else dim
        return {axis % max(1, rank) for axis in axes}

    def is_aligned(self, others: Iterable[int] = ()) -> bool:
        """Whether operands broadcast row by row: rows on the same axis from the right, and nobody else has them there.

        others: places of operands that are left out of this.
        """
        left_out = set(others)
        pairs = [
            (axis - len(spec.shape), spec) for at, (axis, spec) in enumerate(zip(self.axes, self.specs, strict=True))
            if axis is not None and at not in left_out
        ]  # fmt: skip
        places = {place for place, _ in pairs}
        if len(places) != 1:
            return False
        (place,) = places
        return all(
            axis is not None or len(spec.shape) < -place or spec.shape[place] == 1
            for at, (axis, spec) in enumerate(zip(self.axes, self.specs, strict=True)) if at not in left_out
        )  # fmt: skip


Rule = Callable[[RowCall], Outcome]
_END = 9223372036854775807  # of a slice that ends where its axis does


def _pointwise(call: RowCall) -> Outcome:
    return ALONG if call.is_aligned() else None


def _off(name: str) -> Rule:
    """The rule of an op along named axes: not the axis of rows, on which all operands of one rank have rows."""

    def rule(call: RowCall) -> Outcome:
        if len(call.row_axes) != 1 or {len(s.shape) for s in call.specs if s.shape} != {call.rank}:
            return None
        (axis,) = call.row_axes
        return None if axis in call.touched(name, call.rank) or not _is_in_all(call, axis) else ALONG

    return rule


def _off_first(name: str) -> Rule:
    """The same, of an op whose other operands, such as an index, have no rows."""

    def rule(call: RowCall) -> Outcome:
        (axis,) = call.row_axes if len(call.row_axes) == 1 else (None,)
        return ALONG if axis is not None and call.axes[0] == axis and _only(call, 0) and axis not in call.touched(
            name, len(call.specs[0].shape)
        ) else None  # fmt: skip

    return rule


def _reduced(call: RowCall) -> Outcome:
    """A sum: of other axes row by row, over rows a summand on each task."""
    if call.axes[0] is None or not _only(call, 0):
        return None
    return SUM if call.axes[0] in call.touched("dim", len(call.specs[0].shape)) else ALONG


def _is_in_all(call: RowCall, axis: int) -> bool:
    """Whether all operands but numbers have rows on this axis."""
    return all(own == axis or not spec.shape for own, spec in zip(call.axes, call.specs, strict=True))


def _only(call: RowCall, *places: int) -> bool:
    """Whether only these operands have rows."""
    return all(axis is None or at in places for at, axis in enumerate(call.axes))


def _trailing(count: int) -> Rule:
    """All operands with rows have them at one axis before the last ``count`` ones, and the others have no such axis."""

    def rule(call: RowCall) -> Outcome:
        is_before = all(
            axis is None or axis < len(spec.shape) - count for axis, spec in zip(call.axes, call.specs, strict=True)
        )
        return ALONG if is_before and call.is_aligned() else None

    return rule


def _item_by_item(*names: str) -> Rule:
    """Items on axis 0 of the operands named here; all others, such as weights, have no rows."""

    def rule(call: RowCall) -> Outcome:
        named = {ref.input for name in names for ref in leaves(call.node.attrs.get(name)) if isinstance(ref, Ref)}
        return ALONG if call.row_axes == {0} and _only(call, *named) and call.rank > 1 else None

    return rule


def _mm(call: RowCall) -> Outcome:
    """A product of two matrices, or of stacks of them: rows of the first, or columns of the second, or the sum."""
    left, right = ("self", "mat2") if "mat2" in call.node.attrs else ("mat1", "mat2")
    a, b = call.axis(left), call.axis(right)
    rank = len(call.shape(left))
    if rank == 3 and 0 in (a, b):
        return ALONG if a == b == 0 else None
    inner_a, inner_b = rank - 1, rank - 2
    if (a, b) == (inner_a, inner_b):
        return SUM
    return ALONG if (a == rank - 2 and b is None) or (a is None and b == rank - 1) else None


def _addmm(call: RowCall) -> Outcome:
    """A product of matrices, and one more summand that has its rows, or is the same for all."""
    names = ("batch1", "batch2") if "batch1" in call.node.attrs else ("mat1", "mat2")
    a, b, rank = call.axis(names[0]), call.axis(names[1]), len(call.shape(names[0]))
    if rank == 3:
        along = 0 if a == b == 0 else None
    else:
        along = 0 if a == 0 and b is None else 1 if a is None and b == 1 else None
    if along is None:
        return None
    place, shape, own = along - rank, call.shape("self"), call.axis("self")
    if own is None:
        return ALONG if len(shape) < -place or shape[place] == 1 else None
    return ALONG if own - len(shape) == place else None


def _mv(call: RowCall) -> Outcome:
    a, b = call.axis("self"), call.axis("vec")
    return ALONG if (a, b) == (0, None) else SUM if (a, b) == (1, 0) else None


def _dot(call: RowCall) -> Outcome:
    return SUM if (call.axis("self"), call.axis("tensor") if "tensor" in call.node.attrs else call.axis("other")) == (
        0, 0,
    ) else None  # fmt: skip


def _viewed(call: RowCall) -> Outcome:
    """A view of the same numbers in their order: as many of them before the rows as before."""
    axis, shape = call.axes[0], call.specs[0].shape
    out = call.node.outputs[0].shape
    new = [at for at, size in enumerate(out) if call.has_rows(size)]
    if axis is None or len(new) != 1:
        return None
    before, after = (_product(sizes) for sizes in (shape[:axis], out[: new[0]]))
    return ALONG if before is not None and before == after else None


def _product(sizes: Iterable[int | Dim]) -> tuple[int, tuple[str, ...]] | None:
    """The product of sizes, as a number and the sorted sizes that vary."""
    number, varying = 1, list[str]()
    for size in sizes:
        if isinstance(size, Dim):
            varying.append(size.expr)
        else:
            number *= size
    return number, tuple(sorted(varying))


def _kept(call: RowCall) -> Outcome:
    """A view whose axes say by their sizes where rows are."""
    return ALONG


def _repeated(call: RowCall) -> Outcome:
    """Repeats of other axes."""
    repeats, axis, rank = call.argument("repeats"), call.axes[0], len(call.specs[0].shape)
    return ALONG if axis is not None and repeats[len(repeats) - rank + axis] == 1 else None


def _padded(call: RowCall) -> Outcome:
    """Pads of other axes: pairs, of the last axis first."""
    axis, rank, pads = call.axes[0], len(call.specs[0].shape), call.argument("pad")
    if axis is None:
        return None
    at = 2 * (rank - 1 - axis)
    return ALONG if all(pad == 0 for pad in pads[at : at + 2]) else None


def _joined(call: RowCall) -> Outcome:
    """Tensors along another axis."""
    stacked = call.node.op.startswith("aten.stack")
    if len(call.row_axes) != 1:
        return None
    (axis,) = call.row_axes
    if not all(own == axis or spec.shape == (0,) for own, spec in zip(call.axes, call.specs, strict=True)):
        return None
    dim = int(call.argument("dim", 0)) % (call.rank + stacked)
    return ALONG if stacked or dim != axis else None


def _normalized(name: str) -> Rule:
    """Items before the axes that are normalized over."""

    def rule(call: RowCall) -> Outcome:
        count = len(call.argument("normalized_shape"))
        axis, rank = call.axis(name), len(call.shape(name))
        return ALONG if axis is not None and len(call.row_axes) == 1 and axis < rank - count else None

    return rule


def _embedded(call: RowCall) -> Outcome:
    return ALONG if call.axis("indices") is not None and call.axis("weight") is None else None


def _embedded_back(call: RowCall) -> Outcome:
    a, b = call.axis("grad_output"), call.axis("indices")
    is_plain = not call.argument("scale_grad_by_freq")
    return SUM if a == b and a is not None and is_plain else None


def _indexed(call: RowCall) -> Outcome:
    """Rows of a tensor that has none of its own by row numbers that have them, all on one axis; no masks."""
    refs = call.argument("indices")
    is_whole = call.axes[0] is None and all(isinstance(ref, Ref) for ref in refs)
    if not is_whole or len(refs) != len(call.specs[0].shape[: len(refs)]):
        return None
    specs = [call.specs[ref.input] for ref in refs]
    if any(spec.dtype.is_floating_point or str(spec.dtype) in ("torch.bool", "torch.uint8") for spec in specs):
        return None
    return ALONG if call.is_aligned(others=(0,)) else None


def _picked(call: RowCall) -> Outcome:
    """Rows of a tensor along other axes than that of its rows, by numbers or masks without rows."""
    refs, axis = call.argument("indices"), call.axes[0]
    if axis is None:
        return _indexed(call)
    return ALONG if _only(call, 0) and (axis >= len(refs) or refs[axis] is None) else None


def _put(call: RowCall) -> Outcome:
    """Values put into rows at places of other axes; or in rows added at places of zeros, and each task adds its own."""
    refs = call.argument("indices")
    named = [ref for ref in refs if isinstance(ref, Ref)]
    specs = [call.specs[ref.input] for ref in named]
    if any(str(spec.dtype) not in ("torch.int64", "torch.int32") for spec in specs):
        return None
    axis, values = call.axes[0], call.axis("values")
    if axis is not None:
        rank = len(call.specs[0].shape) - len(named) + max((len(spec.shape) for spec in specs), default=0)
        is_beside = all(ref is None for ref in refs[: axis + 1]) and _only(call, 0, call.node.attrs["values"].input)
        return ALONG if is_beside and values == axis and len(call.shape("values")) == rank else None
    is_added = call.argument("accumulate") and 0 in call.zeros and len(named) == len(refs)
    return SUM if is_added and values is not None and {call.axes[ref.input] for ref in named} == {values} else None


def _added_at(call: RowCall) -> Outcome:
    """The same by the numbers of one axis."""
    source = call.axis("source") if "source" in call.node.attrs else call.axis("src")
    dim, is_zero = call.argument("dim") % max(1, len(call.specs[0].shape)), 0 in call.zeros and call.axes[0] is None
    index = call.axis("index")
    is_flat = "source" in call.node.attrs and index == 0
    return SUM if is_zero and source == dim and (is_flat or index == dim) else None


def _diagonal(call: RowCall) -> Outcome:
    rank = len(call.specs[0].shape)
    return None if call.axes[0] in {call.argument(name) % rank for name in ("dim1", "dim2")} else ALONG


def _sliced(call: RowCall) -> Outcome:
    """A part of another axis, or all rows."""
    step, start, end = call.argument("step"), call.argument("start"), call.argument("end")
    is_all = step == 1 and start in (None, 0) and (end is None or end == _END)
    return ALONG if is_all else _off_first("dim")(call)


def _class_loss_back(call: RowCall) -> Outcome:
    """The gradient of each row; its divisor is the total of all rows."""
    is_each = call.argument("reduction") == 0
    named = call.axis("self"), call.axis("target"), call.axis("grad_output") if is_each else 0
    return ALONG if named == (0, 0, 0) and call.rank > 1 - is_each else None


def _selected_back(call: RowCall) -> Outcome:
    shape = call.node.outputs[0].shape
    axes = [at for at, size in enumerate(shape) if call.has_rows(size)]
    return ALONG if len(axes) == 1 and call.argument("dim") % len(shape) != axes[0] else None


def _mixed(rule: Rule) -> Rule:
    """The same rule, of an op that gives the gradients of rows, and of weights as sums over rows."""
    return lambda call: MIXED if rule(call) else None


def _attended(call: RowCall) -> Outcome:
    """Attention of items: queries, keys and values have rows on axis 0, and a mask has them there or not at all."""
    named = [call.axis(name) for name in ("query", "key", "value")]
    mask, rank = call.axis("attn_mask"), len(call.shape("query"))
    is_alike = mask is None or (mask == 0 and len(call.shape("attn_mask")) == rank)
    return ALONG if named == [0, 0, 0] and is_alike and rank > 2 else None


def _recurrent(call: RowCall) -> Outcome:
    """A recurrent net over items: rows lie on the axis of items of sequences and states."""
    input_axis = 0 if call.argument("batch_first") else 1
    name = "input" if "input" in call.node.attrs else "x"
    states = [call.axes[ref.input] for ref in leaves(call.argument("hx")) if isinstance(ref, Ref)]
    weights = [call.axes[ref.input] for ref in leaves(call.argument("params")) if isinstance(ref, Ref)]
    is_plain = call.axis(name) == input_axis and not call.argument("dropout", 0.0)
    return ALONG if is_plain and {*states} <= {1} and {*weights} <= {None} and len(call.shape(name)) == 3 else None


RULES: Mapping[str, Rule] = {name: rule for names, rule in (
    ("masked_fill where copy fill dropout contiguous alias detach _to_copy lift_fresh zeros_like ones_like full_like "
     "empty_like hardswish hardsigmoid elu_backward hardtanh_backward hardswish_backward hardsigmoid_backward "
     "mish_backward leaky_relu_backward softplus_backward log_sigmoid_forward log_sigmoid_backward "
     "softshrink_backward hardshrink_backward rrelu_with_noise_backward view_as_real_copy frexp",
     _pointwise),
    ("_softmax _log_softmax softmax log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod "
     "logcumsumexp cummax cummin gather scatter take_along_dim glu glu_backward "
     "slice_scatter", _off("dim")),
    ("mean amax amin prod var std var_mean std_mean logsumexp linalg_vector_norm norm all any argmax argmin max min "
     "median nanmedian mode kthvalue sort argsort topk select split "
     "split_with_sizes chunk unbind index_select diff squeeze _fft_r2c _fft_c2c _fft_c2r count_nonzero",
     _off_first("dim")),
    ("flip roll", _off_first("dims")),
    ("unfold", _off_first("dimension")),
    ("sum nansum", _reduced),
    ("mm bmm", _mm), ("addmm baddbmm", _addmm), ("mv", _mv), ("dot vdot", _dot),
    ("view reshape _unsafe_view", _viewed),
    ("t transpose permute unsqueeze expand view_as_complex view_as_real", _kept), ("repeat", _repeated),
    ("constant_pad_nd", _padded), ("cat stack", _joined),
    ("native_layer_norm", _normalized("input")),
    ("native_layer_norm_backward", _mixed(_normalized("grad_out"))),
    ("embedding", _embedded), ("embedding_dense_backward", _embedded_back), ("index _unsafe_index", _picked),
    ("index_put _unsafe_index_put", _put), ("index_add scatter_add", _added_at),
    ("tril triu linalg_cholesky_ex linalg_inv_ex _linalg_det _linalg_slogdet linalg_matrix_exp", _trailing(2)),
    ("diagonal diagonal_copy", _diagonal),
    ("select_backward", _selected_back), ("slice slice_backward", _sliced),
    ("nll_loss_backward nll_loss2d_backward", _class_loss_back),
    ("convolution native_group_norm", _item_by_item("input")),
    ("convolution_backward", _mixed(_item_by_item("grad_output", "input"))),
    ("native_group_norm_backward", _mixed(_item_by_item("grad_out", "input", "mean", "rstd"))),
    ("max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d "
     "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices_backward "
     "max_pool3d_with_indices_backward avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward "
     "_adaptive_avg_pool3d_backward adaptive_max_pool2d_backward upsample_nearest1d upsample_nearest2d "
     "upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_nearest1d_backward upsample_nearest2d_backward "
     "upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_linear1d_backward reflection_pad1d "
     "reflection_pad2d replication_pad1d replication_pad2d reflection_pad1d_backward reflection_pad2d_backward "
     "replication_pad1d_backward replication_pad2d_backward pixel_shuffle pixel_unshuffle im2col col2im "
     "grid_sampler_2d grid_sampler_2d_backward", _item_by_item(
         "self", "input", "grad_output", "grid", "indices")),
    ("scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu", _attended),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", _item_by_item(
        "grad_out", "query", "key", "value", "out", "logsumexp")),
    ("lstm gru rnn_tanh rnn_relu recurrent_net", _recurrent), ("recurrent_net_backward", _mixed(_recurrent)),
) for name in names.split()}  # fmt: skip
"""The rule of each op, by the op's own name: ``mm`` of ``aten.mm.default``. Element-wise ops need no row."""

OWN = frozenset({"recurrent_net"})
"""Ops that give more than rows: what each task keeps for the derivative of its own."""

LINEAR = frozenset({
    "t", "transpose", "permute", "view", "reshape", "_unsafe_view", "expand", "unsqueeze", "squeeze", "clone",
    "contiguous", "alias", "detach", "select", "slice", "select_backward", "slice_backward", "neg", "sum", "mean",
    "flip", "roll", "_to_copy", "lift_fresh", "flatten",
})  # fmt: skip
"""Ops of one operand that give of a sum the sum of their results for its summands."""

BILINEAR = frozenset({"mul", "mm", "bmm", "mv", "dot", "matmul"})
"""Ops of two operands that are linear in each."""


def outcome(call: RowCall) -> Outcome:
    """The results that tasks may compute of their rows; None: all rows go to one task.

    >>> x = Spec(__import__("torch").float32, (Dim("B"), 3))
    >>> node = Node(id=1, name="y", op="aten.exp.default", inputs=(), outputs=(x,), attrs={"self": Ref(0)})
    >>> outcome(RowCall(node, (0,), (x,), lambda size: isinstance(size, Dim)))
    'along'
    """
    name = call.node.op.split(".")[1]
    rule = _pointwise if facts_of(call.node.op).is_pointwise else RULES.get(name)
    found = None if rule is None else rule(call)
    axes = [sum(map(call.has_rows, spec.shape)) for spec in call.node.outputs]
    if found == ALONG and name not in OWN and any(count != 1 for count in axes):
        return None
    return None if (found == SUM and any(axes)) or any(count > 1 for count in axes) else found
