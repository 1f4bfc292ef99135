"""Gradients that the user gives: `custom_gradient` for one function, `gradient_override` for ops within a scope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tfnb.errors import FailedPrecondition, InvalidArgument, NotFound, UnknownOp, Unsupported, ensure_type
from tfnb.gradients.rule_table import RuleFunction, ops_of
from tfnb.graph import Variable, current
from tfnb.graph.op_facts import facts_of
from tfnb.recording import Recorder
from tfnb.recording.marks.scopes import clean
from tfnb.recording.subgraphs.own_gradient import OwnRule, attach, floats, written_at


def custom_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a gradient of its own: ``fn`` returns ``(ys, grad_fn)``, a call returns ``ys``.

    ``grad_fn`` gets one cotangent for each floating or complex tensor in ``ys``, and returns one entry for each such
    tensor among fn's arguments, in order: a tensor, or None where nothing flows. What it computes is recorded, so it
    can be differentiated again, also through values that fn computed. Nothing flows to tensors that fn uses without
    being given them. Outside a recording it is a torch.autograd.Function.

    Raises InvalidArgument when fn does not return a pair or grad_fn a wrong number of entries, ShapeError for an entry
    of a wrong shape. In a recording it raises Unsupported if ``fn`` writes into an argument.

    >>> import torch, tfnb
    >>> @tfnb.custom_gradient
    ... def log1pexp(x):                             # its derivative as written by torch would be nan at 1000
    ...     e = x.exp()
    ...     return (1 + e).log(), lambda dy: dy * (1 - 1 / (1 + e))
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.tensor([1000.0, 0.0]))
    ...     dx, = tfnb.gradients(log1pexp(x), [x])
    >>> dx.sample
    tensor([1.0000, 0.5000])
    """

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = current.recording()
        if isinstance(recorder, Recorder):
            return _recorded(recorder, fn, args, kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        form: list[Any] = []
        outs = _Eager.apply(fn, tree, form, *leaves)
        return tree_unflatten(list(outs), form[0])

    return call


def _recorded(recorder: Recorder, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    leaves, tree = tree_flatten((args, kwargs))
    leaves = [recorder.read(x) if isinstance(x, Variable) else x for x in leaves]
    places = [i for i, x in enumerate(leaves) if floats(x)]
    before = [recorder._entry(leaves[i]) for i in places]
    given = [recorder._wrap(entry) for entry in before]  # what fn writes stays fn's, and is found below
    for i, tensor in zip(places, given, strict=True):
        leaves[i] = tensor
    ys, grad_fn = _pair(fn, tree_unflatten(leaves, tree))
    if any(t._family.version for t in given):
        raise Unsupported(f"{written_at(fn)} writes into its argument; use out-of-place calls{recorder.tape.at()}")
    outs, form = tree_flatten(ys)
    ends = [i for i, y in enumerate(outs) if floats(y)]
    if places and ends:
        rule = OwnRule(_UserRule(grad_fn, written_at(grad_fn), len(places)), written_at(grad_fn))
        name = clean(getattr(fn, "__name__", "custom_gradient"))
        values = [recorder._entry(outs[i]) for i in ends]
        for i, new in zip(ends, attach(recorder, [None] * len(ends), values, before, rule, name), strict=True):
            outs[i] = new
    return tree_unflatten(outs, form)


def _pair(fn: Callable[..., Any], arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> tuple[Any, Callable[..., Any]]:
    args, kwargs = arguments
    result = fn(*args, **kwargs)
    if not (isinstance(result, tuple) and len(result) == 2 and callable(result[1])):
        raise InvalidArgument(f"a custom_gradient function returns (ys, grad_fn); {written_at(fn)} does not")
    return result


class _UserRule:
    """A grad_fn as a rule: one entry for each argument, or an error that names its line."""

    def __init__(self, grad_fn: Callable[..., Any], where: str, count: int) -> None:
        self.grad_fn, self.where, self.count = grad_fn, where, count

    def __call__(self, n: object, dys: Sequence[torch.Tensor | None]) -> list[Any]:
        result = self.grad_fn(*dys)
        entries = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(entries) != self.count:
            raise InvalidArgument(
                f"Num gradients {len(entries)} of a custom gradient do not match num inputs {self.count}\n"
                f"  rule: {self.where}; it returns one entry per floating tensor argument, None where nothing flows"
            )
        return entries


class _Eager(torch.autograd.Function):
    """`custom_gradient` outside of recordings."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], tree: TreeSpec, form: list[TreeSpec], *leaves: object) -> Any:
        ys, grad_fn = _pair(fn, tree_unflatten(list(leaves), tree))
        outs, shape = tree_flatten(ys)
        ctx.ends = [i for i, y in enumerate(outs) if floats(y)]
        ctx.places = [i for i, x in enumerate(leaves) if floats(x)]
        ctx.rule = _UserRule(grad_fn, written_at(grad_fn), len(ctx.places))
        form.append(shape)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        grads: list[Any] = [None] * len(ctx.needs_input_grad)
        for place, dx in zip(ctx.places, ctx.rule(None, [dys[i] for i in ctx.ends]), strict=True):
            grads[place + 3] = dx
        return tuple(grads)


# composites that write buffers without saying so in their schema: kept whole, they would write while recording
_WRITES_BUFFERS = frozenset({"aten.batch_norm.default", "aten.instance_norm.default"})


@contextmanager
def gradient_override(rules: Mapping[Any, RuleFunction]) -> Iterator[None]:
    """Ops recorded inside get these gradients: ``{op: rule}``, with rules as for `register_gradient`.

    An op is torch's function of it (``torch.relu``), an overload, a packet (all its overloads), a custom op or a name
    such as ``"aten::relu"``. A composite op that is overridden is recorded whole. Inner scopes win. What gradients
    themselves record keeps the usual rules, so a second derivative is that of the rule's code.

    Raises NotFound for an unknown op, InvalidArgument for one that writes in place (override its out-of-place twin) or
    writes running statistics, FailedPrecondition outside a recording.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.tensor([-1.2, 3.4]))
    ...     with tfnb.gradient_override({torch.ops.aten.round: lambda n, dy: dy}):
    ...         y = x.round()
    ...     dx, = tfnb.gradients(y, [x])
    >>> dx.sample
    tensor([1., 1.])
    """
    recorder = current.recording()
    if not isinstance(recorder, Recorder):
        raise FailedPrecondition("gradient_override works inside a recording: it is for the ops recorded in it")
    ensure_type(rules, Mapping, "gradient_override")
    named = {name: rule for op, rule in rules.items() for name in _overridable(op, recorder)}
    before, recorder.overrides = recorder.overrides, {**recorder.overrides, **named}
    try:
        yield
    finally:
        recorder.overrides = before


def _overridable(op: OpOverload, recorder: Recorder) -> tuple[str, ...]:
    try:
        names = ops_of(op)
    except UnknownOp as error:
        raise NotFound(f"gradient_override: {error}{recorder.tape.at()}", op=str(op)) from error
    if set(names) & _WRITES_BUFFERS:
        raise InvalidArgument(f"gradient_override: {op} writes running statistics; override what it is made of")
    pure = tuple(name for name in names if not facts_of(name).writes)
    if not pure:
        raise InvalidArgument(f"gradient_override: {op} writes in place; override the op without the underscore")
    return pure


__all__ = ["custom_gradient", "gradient_override"]
