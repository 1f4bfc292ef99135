"""Facts about torch operators, read once from their schemas.

What an overload writes, whether it returns a view, draws random numbers or makes tensors from nothing, and the
out-of-place twin of an op that writes. Tried with torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tfnb.graph.ops import dispatched
from tfnb.graph.ops import overload as resolve
from tfnb.graph.pure import pure
from tfnb.kernels import nets, strided

__all__ = ["WHOLE", "Facts", "Op", "bind", "facts", "kernel", "op_name", "resolve", "twin", "unbind"]

aten = torch.ops.aten
Op = torch._ops.OpOverload

# Kept as one device-neutral node; decomposed only when differentiated.
WHOLE = frozenset(
    {
        aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input,
        aten.scaled_dot_product_attention.default,
    }
)  # fmt: skip

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
    """What the schema of one overload says."""

    names: tuple[str, ...]  # argument names in order
    positional: int  # how many of them are positional
    defaults: dict[str, Any]
    writes: tuple[str, ...]  # names of arguments written in place
    returns_written: tuple[str | None, ...]  # per return: the written argument it is, or None
    is_view: bool
    is_random: bool
    is_reshaping: bool  # changes the shape of what it writes, not its values
    decomposes: bool


@cache
def facts(op: Op) -> Facts:
    """The facts of an overload."""
    schema = op._schema
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    by_set = {
        alias: a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        for alias in a.alias_info.before_set
    }  # fmt: skip

    def written(value: Any) -> str | None:
        if value.alias_info is None or not value.alias_info.is_write:
            return None
        return next((by_set[alias] for alias in value.alias_info.before_set if alias in by_set), None)

    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Facts(
        names=tuple(a.name for a in schema.arguments),
        positional=sum(not a.kwarg_only for a in schema.arguments),
        defaults={a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        writes=writes,
        returns_written=tuple(written(r) for r in schema.returns),
        is_view=is_view and not writes,
        is_reshaping=torch.Tag.inplace_view in op.tags,
        # kept whole only where it draws no dropout: see tfnb.recording.overrides.op_overrides
        is_random=torch.Tag.nondeterministic_seeded in op.tags and op not in WHOLE,
        decomposes=op not in WHOLE and op._can_decompose() and not _is_leaf(op),
    )


def _is_leaf(op: Op) -> bool:
    """Composites that stay one node: their own conversions and copies say nothing more when taken apart."""
    return op in (aten.detach.default, aten._local_scalar_dense.default)


@cache
def twin(op: Op) -> Op | None:
    """The overload that computes what ``op`` would write, without writing."""
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


def kernel(op: Op) -> Callable[..., Any]:
    """What computes a recorded ``op`` on plain tensors of any strides."""
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


def _is_default(value: Any, own: Facts, name: str) -> bool:
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
