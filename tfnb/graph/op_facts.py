"""Facts about torch operators, from the schema of an overload or from one table for facts that schemas lack.

`facts` takes an overload, `facts_of` the op of a node. Also here: the out-of-place twin of an op that writes, the
kernel that computes a recorded op, and arguments by name. Tried with torch 2.11 and 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from tfnb.errors import UntrustedOp
from tfnb.graph.ops import STRUCTURAL, TRUSTED, dispatched, overload
from tfnb.graph.pure import pure
from tfnb.kernels import nets, strided

aten = torch.ops.aten
Op = torch._ops.OpOverload

_SAID: Mapping[str, frozenset[str]] = {fact: frozenset(names.split()) for fact, names in {
    # recorded as one device-neutral node; decomposed only when differentiated
    "whole": """
        aten.lstm.input aten.gru.input aten.rnn_tanh.input aten.rnn_relu.input aten.scaled_dot_product_attention.default
    """,
    # views that are pieces of a tensor
    "splits": "aten.split.Tensor aten.split_with_sizes.default aten.chunk.default aten.unbind.int",
    # recurrent nets, of which a kernel of the same name keeps what the backward pass needs
    "net": "aten.lstm.input aten.gru.input aten.rnn_tanh.input aten.rnn_relu.input",
    # composites of which the parts say nothing more
    "undivided": "aten.detach.default aten._local_scalar_dense.default",
    # the result may be the memory of the first operand, which the schema does not say
    "unsaid_alias": """
        aten._unsafe_view aten._reshape_alias aten.lift aten.pin_memory aten.unsafe_split aten.unsafe_split_with_sizes
    """,
    # a view of all that lies in a piece of memory, each element once
    "whole_view": """
        aten.view.default aten._unsafe_view aten._reshape_alias aten.t aten.transpose.int aten.permute aten.alias
        aten.detach aten.unsqueeze aten.squeeze.default aten.squeeze.dim aten.squeeze.dims
    """,
    # sizes and strides decide between a view and a copy
    "view_or_copy": """
        aten.reshape aten.reshape_as aten.contiguous aten.ravel aten.flatten.using_ints
    """,
    # a copy of the first operand
    "copies": "aten.clone",
    # writes of which autograd knows no formula: the path of gradients through what they write stays as it was
    "without_path": "aten.logical_and_ aten.logical_not_ aten.logical_or_ aten.logical_xor_",
    # takes the shape of its input, and no values
    "shape_only": "aten.ones_like aten.zeros_like aten.full_like aten.new_zeros aten.new_ones aten.new_full",
    "zeros": "aten.new_zeros.default aten.zeros.default aten.zeros_like.default",
    # waits for the device, to read values on the host
    "reads_host": """
        aten._ctc_loss.Tensor aten._linalg_check_errors aten._linalg_eigh aten._linalg_svd aten.equal aten.linalg_eig
        aten.linalg_lstsq aten.multinomial tfnb.array_read tfnb.array_write tfnb.log_uniform_draw tfnb.owned tfnb.part
    """,
    # where its indices are a mask
    "reads_mask": "aten.index_put aten._unsafe_index_put",
    # hardly longer than to read and write their memory
    "cheap": """
        aten.native_layer_norm.default aten.add.Tensor aten.mul.Tensor aten.neg.default aten.relu.default
        aten.sub.Tensor
    """,
    # beside element-wise ops those that inductor writes loops for, which it fuses with their neighbours
    "fuses": """
        aten._adaptive_avg_pool2d aten._batch_norm_no_update aten._batch_norm_with_update aten._log_softmax
        aten._log_softmax_backward_data aten._native_batch_norm_legit aten._native_batch_norm_legit_functional
        aten._softmax aten._softmax_backward_data aten._to_copy aten.all aten.amax aten.amin aten.any aten.arange
        aten.avg_pool2d aten.avg_pool2d_backward aten.batch_norm_backward aten.cat aten.clone aten.constant_pad_nd
        aten.empty_like aten.full aten.full_like aten.logsumexp aten.max aten.mean aten.min aten.native_batch_norm
        aten.native_batch_norm_backward aten.native_group_norm aten.native_layer_norm aten.native_layer_norm_backward
        aten.new_full aten.new_ones aten.new_zeros aten.nll_loss_backward aten.nll_loss_forward aten.ones
        aten.ones_like aten.prod aten.select_backward aten.select_scatter aten.slice_backward aten.slice_scatter
        aten.stack aten.std aten.sum aten.var aten.var_mean aten.zeros aten.zeros_like
    """,
    # ``other`` may be a number, with the same result as the tensor of it that ``.Tensor`` takes
    "takes_number": """
        aten.add.Tensor aten.sub.Tensor aten.mul.Tensor aten.div.Tensor aten.eq.Scalar aten.ge.Scalar aten.gt.Scalar
        aten.le.Scalar aten.lt.Scalar aten.ne.Scalar aten.rsub.Scalar
    """,
    # gives the input with some rows written, and has a twin that writes them there
    "writes_rows": "aten.index_add.default aten.index_copy.default aten.index_fill.int_Scalar",
    # gives the maxima of windows and their places; the backward op is named after it
    "pool": """
        aten.max_pool2d_with_indices aten.adaptive_max_pool2d aten.max_pool3d_with_indices aten.adaptive_max_pool3d
    """,
    # runs code or reads files
    "untrusted": "aten.from_file aten._print aten.set_data",
}.items()}  # fmt: skip
"""What is true of which ops; a name without an overload means all of them."""

# Look at values before they compute: places in another tensor, matrices of full rank, classes.
_LOOKS = re.compile(
    r"_?(index|gather|scatter|take|put|embedding|linalg|cholesky|lu_|inverse|multinomial|nll_loss|ctc_loss|bincount"
    r"|repeat_interleave|assert|segment|histc|histogram|array)"
)
_DIVIDES = re.compile(r"div|floor_divide|remainder|fmod|pow")

# Twins whose name does not follow from the op's.
_TWINS = {
    aten.normal_.default: aten.normal_functional.default,
    aten.zero_.default: aten.zeros_like.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.detach_.default: aten.detach.default,
    aten.requires_grad_.default: aten.alias.default,
}


# Values of a graph share no memory, and kernels choose strides by device and size: what was recorded as another view
# of the same memory need not be one when it runs.
_KERNELS: dict[Op, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.as_strided.default: strided.as_strided,
    aten.as_strided_scatter.default: strided.as_strided_scatter,
    aten.lstm.input: nets.lstm,
    aten.native_group_norm.default: strided.gapless(aten.native_group_norm.default, 0),
    aten.native_group_norm_backward.default: strided.gapless(aten.native_group_norm_backward.default, 1),
}
_KERNELS |= {
    op: strided.prepared(op, strided.contiguous)
    for op in (
        aten.native_layer_norm_backward.default, aten.nll_loss2d_backward.default,
        aten._pdist_forward.default, aten._pdist_backward.default,
        aten.adaptive_max_pool3d_backward.default,
        aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default,
        aten._embedding_bag.default, aten._embedding_bag_forward_only.default,
        aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default,
        aten._embedding_bag_per_sample_weights_backward.default,
    )
}  # fmt: skip
_KERNELS |= {
    op: strided.prepared(op, strided.unit_rows)
    for op in (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Known facts of one op."""

    # by the schema
    names: tuple[str, ...] = ()  # argument names in order
    positional: int = 0  # how many of them are positional
    defaults: Mapping[str, Any] = field(default_factory=dict)
    writes: tuple[str, ...] = ()  # names of arguments written in place
    returns_written: tuple[str | None, ...] = ()  # per return: the written argument it is, or None
    is_view: bool = False
    is_view_copy: bool = False
    is_random: bool = False
    is_reshaping: bool = False  # changes the shape of what it writes, not its values
    decomposes: bool = False
    is_pointwise: bool = False
    makes_fractions: bool = False  # may give torch's default dtype of integers alone
    # by its name
    may_fail: bool = False  # on the values that it is given
    may_fail_on_integers: bool = False
    # by the table above
    said: frozenset[str] = frozenset()

    def __getattr__(self, fact: str) -> bool:
        """A fact of the table: ``facts(op).whole_view``."""
        if fact not in _SAID:
            raise AttributeError(fact)
        return fact in self.said

    @property
    def shares_memory(self) -> bool:
        """Whether the result may be the memory of an operand."""
        return self.is_view or "unsaid_alias" in self.said

    @property
    def keeps_elements(self) -> bool:
        """Whether the result is a view of the first operand, or a copy of one. Conjugates and other dtypes count."""
        return self.shares_memory or self.is_view_copy or self.view_or_copy or self.copies


@cache
def facts(op: Op) -> Facts:
    """The facts of an overload."""
    schema, said = op._schema, _said(str(op))
    aliased = [(a.name, a.alias_info) for a in schema.arguments if a.alias_info is not None]
    is_written = {name: info for name, info in aliased if info.is_write}
    by_set = {alias: name for name, info in is_written.items() for alias in info.before_set}

    def written(value: Any) -> str | None:
        if value.alias_info is None or not value.alias_info.is_write:
            return None
        return next((by_set[alias] for alias in value.alias_info.before_set if alias in by_set), None)

    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    may_fail, may_fail_on_integers = _fails(str(op))
    return Facts(
        names=tuple(a.name for a in schema.arguments),
        positional=sum(not a.kwarg_only for a in schema.arguments),
        defaults={a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        writes=tuple(is_written),
        returns_written=tuple(written(r) for r in schema.returns),
        is_view=is_view and not is_written,
        is_view_copy=torch.Tag.view_copy in op.tags and "_copy" in op.name(),  # not slice_scatter, which has the tag
        is_reshaping=torch.Tag.inplace_view in op.tags,
        # kept whole only where it draws no dropout: see tfnb.recording.overrides.recurrent_cells
        is_random=torch.Tag.nondeterministic_seeded in op.tags and "whole" not in said,
        decomposes=said.isdisjoint(("whole", "undivided")) and op._can_decompose(),
        is_pointwise=torch.Tag.pointwise in op.tags,
        makes_fractions=torch.Tag.pointwise in op.tags or op is aten.logsumexp.default,
        may_fail=may_fail,
        may_fail_on_integers=may_fail_on_integers,
        said=said,
    )


@cache
def facts_of(op: str) -> Facts:
    """The facts of a node's op, ``aten.mm.default``; of one of ours alone (``tfnb.read``) there are none."""
    return Facts() if op.count(".") < 2 else facts(overload(op))


def ops_of(fact: str) -> frozenset[str]:
    """The names in the table that have a fact."""
    return _SAID[fact]


def _said(op: str) -> frozenset[str]:
    """The facts that the table has of ``aten.mm.default``."""
    packet = op.rpartition(".")[0]
    return frozenset(fact for fact, names in _SAID.items() if op in names or packet in names)


def _fails(op: str) -> tuple[bool, bool]:
    """Whether an op can fail on the values of its operands; and whether it can fail on integers."""
    namespace, _, name = op.partition(".")
    always = namespace not in TRUSTED or bool(_LOOKS.match(name))
    return always, always or bool(_DIVIDES.match(name))


def admit(op: str, *, trusted: bool) -> None:
    """Check that a file may name ``op``; raises UnknownOp or UntrustedOp."""
    if op in STRUCTURAL:
        return
    overload(op)
    if not trusted and (op.partition(".")[0] not in TRUSTED or "untrusted" in _said(op)):
        raise UntrustedOp(
            f"op {op} of namespace {op.partition('.')[0]} may run code or read files, and the graph comes from a file; "
            "load it with trusted=True if you trust its origin",
            op=op,
        )


@cache
def twin(op: Op) -> Op | None:
    """The out-of-place overload of an in-place or ``out=`` op."""
    if op in _TWINS:
        return _TWINS[op]
    own = facts(op)
    namespace, _, name = op._schema.name.partition("::")
    outs = {a.name for a in op._schema.arguments if a.is_out}
    wanted = tuple(n for n in own.names if n not in outs)
    base = name.rstrip("_") if name.endswith("_") else name
    packet = getattr(getattr(torch.ops, namespace), base, None)
    for candidate in dispatched(packet) if packet is not None else ():
        found = facts(candidate)
        if not found.writes and found.names == wanted and _types(candidate) == _types(op)[: len(wanted)]:
            return candidate
    return None if namespace in ("aten", "prims") else pure(op)


def _types(op: Op) -> list[str]:
    return [str(a.type) for a in op._schema.arguments]


def written_in_place(op: str) -> Op:
    """The in-place overload of an op: ``aten.index_add.default`` gives ``aten.index_add_.default``."""
    namespace, name, kind = op.split(".")
    return overload(f"{namespace}.{name}_.{kind}")


def kernel(op: Op) -> Callable[..., Any]:
    """The kernel that computes a recorded ``op`` on plain tensors of any strides."""
    return _KERNELS.get(op, op)


def op_name(op: Op) -> str:
    """``aten.mm.default`` for the overload."""
    return str(op)


def bind(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, in schema order; arguments equal to their default are left out."""
    own = facts(op)
    given = dict(zip(own.names, args, strict=False)) | kwargs
    bound = {}
    for name in own.names:
        if name in given and not _is_default(given[name], own, name):
            bound[name] = given[name]
    return bound


def _is_default(value: object, own: Facts, name: str) -> bool:
    if name not in own.defaults or isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    default = own.defaults[name]
    if isinstance(value, (list, tuple)) and any(isinstance(v, (torch.Tensor, torch.SymInt)) for v in value):
        return False
    return type(value) is type(default) and value == default


def unbind(op: Op, attrs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments for calling ``op`` with arguments by name."""
    own = facts(op)
    positional = own.names[: own.positional]
    last = max((i for i, n in enumerate(positional) if n in attrs), default=-1)
    args = [attrs[n] if n in attrs else own.defaults[n] for n in positional[: last + 1]]
    return args, {n: v for n, v in attrs.items() if n in own.names[own.positional :]}
