"""Writes while recording: an op that writes in place becomes its out-of-place twin, and its target means the result.

A write to a view is put back into the base it looks at, so every alias sees it; see `tfnb.recording.views`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import Unsupported
from tfnb.recording.ops import Facts, Op, facts, op_name, twin, unbind
from tfnb.recording.tensor import Tensor
from tfnb.recording.variables import known

if TYPE_CHECKING:
    from tfnb.recording.recorder import Recorder


def record_write(rec: Recorder, func: Op, own: Facts, args: Any, kwargs: Any) -> Any:
    """Record the twin of ``func``, then rebind what it writes; returns what ``func`` would."""
    other = twin(func)
    named = dict(zip(own.names, args, strict=False)) | kwargs
    if other is None:
        raise Unsupported(
            f"{op_name(func)} writes in place and has no out-of-place form{rec.tape.at()}; "
            "use an out-of-place call", op=op_name(func),
        )  # fmt: skip
    targets = [named[name] for name in own.writes]
    known_args = own.defaults | named  # the twin may have other defaults, or none
    passed = {name: known_args[name] for name in facts(other).names if name in known_args}
    # as in torch, a write made with grad mode off leaves the path of gradients through its target as it was
    straight = frozenset() if torch.is_grad_enabled() else frozenset({"in_place"})
    with rec.on(), rec.tagged(straight, rec.tape.marks.forward):
        call_args, call_kwargs = unbind(other, passed)
        results = other(*call_args, **call_kwargs)
        flat = results if isinstance(results, (list, tuple)) else (results,)
        if len(targets) == 1 and isinstance(targets[0], (list, tuple)):
            targets = list(targets[0])  # foreach ops
        if own.is_reshaping and isinstance(targets[0], Tensor) and isinstance(flat[0], Tensor):
            return _reshaped(targets[0], flat[0])
        for target, result in zip(targets, flat[: len(targets)], strict=True):
            rebind(rec, target, result if own.is_reshaping else _fitting(target, result))
    if own.is_reshaping:
        return flat[0]  # a plain tensor keeps the shape it has; what is returned has the new one
    more = iter(flat[len(targets) :])
    returned = tuple(named[name] if name is not None else next(more, None) for name in own.returns_written)
    return returned[0] if len(returned) == 1 else (returned or None)


def _reshaped(target: Tensor, view: Tensor) -> Tensor:
    """``target`` after a call such as squeeze_: the handle becomes the view, other aliases keep their shapes."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        target.data = view  # sizes and strides
    target._entry, target._family = view._entry, view._family
    target._chain, target._seen = view._chain, view._seen
    return target


def _fitting(target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """What a write of ``result`` into ``target`` stores: the target's dtype and shape."""
    if result.dtype != target.dtype:
        result = result.to(target.dtype)
    return result if result.shape == target.shape else result.expand(target.shape)


def rebind(rec: Recorder, target: torch.Tensor, new: torch.Tensor) -> None:
    """What ``target`` (a recorded tensor, a view, a parameter, a buffer) means from here on: ``new``."""
    if not isinstance(target, Tensor):
        entry, base = rec._entry(new), rec._plain_base(target)
        with rec.tagged(_tags(bool(rec.scopes.places(target)))):
            base.write(entry)
        return
    base, chain = target._family, target._chain
    steps: list[torch.Tensor] = [rec._wrap(base.entry, base)]
    for view in chain[:-1]:
        steps.append(view.apply(steps[-1]))
    put = new
    for view, step in zip(reversed(chain), reversed(steps), strict=False):
        put = view.put(step, put)
    var = next((var for var, read in rec._reads.items() if read is base), None)
    if base.written is not None and var is None:
        raise Unsupported(f"a write through a view of a variable of an earlier recording{rec.tape.at()}")
    entry = rec._entry(put)
    with rec.tagged(_tags(any(known(held) is var for held, *_ in rec.scopes.labels.values()) if var else False)):
        base.write(entry)
    target._entry = rec._entry(new) if chain else base.entry
    target._seen = base.version


def _tags(in_module: bool) -> frozenset[str]:
    """A buffer that a module writes belongs to the step of a loss that went through the module."""
    return frozenset({"buffer"}) if in_module else frozenset()
