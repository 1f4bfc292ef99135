"""Gradients that torch.library knows: what ``register_autograd`` was given, or a kernel for the key Autograd.

The backward and setup_context of a ``torch.library.custom_op`` are a rule. Of another library's op torch gives out only
its Autograd kernel: that is run under the recorder, which finds the autograd.Function that it applies. Uses private
names of torch (tried with torch 2.11 and 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_leaves

from tfnb.errors import InvalidArgument
from tfnb.gradients.derived import dispatched_to_autograd
from tfnb.gradients.rule_table import Rule, gives_one
from tfnb.graph.op_facts import facts
from tfnb.graph.ops import overload
from tfnb.recording import Tensor
from tfnb.recording.overrides.autograd_function import Context, run_backward
from tfnb.recording.subgraphs.own_gradient import OwnRule, written_at

_AUTOGRAD = re.compile(r"^Autograd\w*(?:\[alias\])?: registered at", re.MULTILINE)


def library_rule(op: str) -> Rule | None:
    """The rule that the op's library registered with torch, if it did."""
    space, _, rest = op.partition(".")
    found = OPDEFS.get(f"{space}::{rest.rpartition('.')[0]}")
    if found is None or found._backward_fn is None:
        return None
    backward, setup = found._backward_fn, found._setup_context_fn

    def rule(n: Any, dys: Any) -> dict[str, Any]:
        which = overload(op)
        names = facts(which).names
        positional, keywords = names[: facts(which).positional], names[facts(which).positional :]
        args = tuple(n[name] for name in positional)
        ctx = Context(which)
        ctx.needs_input_grad = tuple(_needed(n, name) for name in positional)
        if setup is not None:
            more = {"keyword_only_inputs": {name: n[name] for name in keywords}} if keywords else {}
            setup(ctx=ctx, inputs=args, output=_result(which, n), **more)
        outs = [*n.outs] if not gives_one(op) else [n.out]
        grads = _cotangents(ctx, outs, [dys] if gives_one(op) else dys)
        result = run_backward(backward, f"the custom op {op}", "backward", ctx, _grouped(which, grads))
        entries = list(result) if isinstance(result, tuple) else [result]
        if len(entries) != len(positional):
            raise InvalidArgument(
                f"Num gradients {len(entries)} of {op} do not match num inputs {len(positional)}\n"
                f"  rule: {written_at(backward)}; it returns one entry per positional argument, a tensor or None",
                op=op,
            )
        return {name: dx for name, dx in zip(positional, entries, strict=True) if n.places(name)}

    return Rule(OwnRule(rule, written_at(backward)))


def autograd_kernel(op: str) -> Callable[..., Any] | None:
    """The op as its library's Autograd kernel computes it, or None where it has no such kernel of its own."""
    space, _, rest = op.partition(".")
    which = overload(op)
    if space in ("aten", "prims", "tfnb") or f"{space}::{rest.rpartition('.')[0]}" in OPDEFS or facts(which).is_random:
        return None
    if not _AUTOGRAD.search(torch._C._dispatch_dump(which._name)):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        with _requiring((args, kwargs)), dispatched_to_autograd():
            return which(*args, **kwargs)

    return call


@contextmanager
def _requiring(arguments: Any) -> Iterator[None]:
    """Recorded tensors look to torch's own code as if a gradient were wanted of them."""
    found = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.dtype.is_floating_point]

    def mark(wanted: bool) -> None:
        with torch._C.DisableTorchFunction():  # the flag itself, and not what a recording says of it
            for tensor in found:
                tensor.requires_grad = wanted

    mark(True)
    try:
        yield
    finally:
        mark(False)


def _needed(n: Any, name: str) -> Any:
    """Whether the gradient of an argument is wanted; for a list of tensors one bool each."""
    wanted = [n.needed[place] for place in n.places(name)]
    return wanted if isinstance(n[name], (list, tuple)) and wanted else any(wanted)


def _result(op: Any, n: Any) -> Any:
    """What the op returned."""
    return _grouped(op, list(n.outs)) if len(op._schema.returns) > 1 else _grouped(op, list(n.outs))[0]


def _grouped(op: Any, items: list[Any]) -> tuple[Any, ...]:
    """One entry per return of the op; one that is a list takes all there are."""
    if str(op._schema.returns[0].type) == "List[Tensor]":
        return (items,)
    return tuple(items)


def _cotangents(ctx: Context, outs: list[Any], dys: Any) -> list[Any]:
    """The cotangents that torch would pass: zeros for what is not differentiable."""
    found = []
    for i, out in enumerate(outs):
        if any(out is other for other in ctx.non_differentiable):
            found.append(torch.zeros_like(out) if ctx.materialize_grads else None)
        elif isinstance(dys, list):
            found.append(dys[i])
        else:
            found.append(dys[i] if ctx.materialize_grads else dys.given(i))
    return found
