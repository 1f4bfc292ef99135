"""Tensors that may share memory, as each run decides: a branch or loop gave a name the memory of another.

Nothing is written into such a tensor while somebody holds another one that may share its memory: the write is an error,
and says which statement decides. Below that, the views of one tensor, which share memory in every run.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tfnb.errors import Unsupported
from tfnb.graph.op_facts import op_name
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Base, Tensor
from tfnb.recording.values.views import View

aten = torch.ops.aten
STRAIGHT = frozenset({"in_place"})  # with grad mode off: gradients pass to what was there before
REFUSED = "refused"  # `details` of an error that no other way of recording it mends
ADVICE = (
    "clone it there (`v = u.clone()`), or make another tensor in place of the write (`u = u + 1`, and not `u += 1`)"
)


def may_share(new: Tensor, others: Iterable[Base], why: str) -> None:
    """Note that ``new`` may share the memory of these bases. why: the deciding statement."""
    mine = new._family
    for other in dict.fromkeys(others):
        if other is not mine:
            mine.shares = (*_living(mine), (weakref.ref(other), why))
            other.shares = (*_living(other), (weakref.ref(mine), why))


def family(base: Base) -> Iterator[Base]:
    """A tensor's base, and the bases that may share its memory."""
    yield base
    yield from (other for ref, _ in base.shares if (other := ref()) is not None)


def _living(base: Base) -> tuple[tuple[weakref.ref[Base], str], ...]:
    return tuple(pair for pair in base.shares if pair[0]() is not None)


def check_write(rec: Recording, base: Base) -> None:
    """Raises Unsupported where somebody holds another tensor that may share the memory."""
    if not _living(base):
        return
    gc.collect()  # what is in a cycle is held by nobody
    for _, why in _living(base):
        text = f"a write to a tensor that may share memory with another: {why}{rec.tape.at()}\n  {ADVICE}"
        raise Unsupported(text, details=REFUSED)


def lose(rec: Recording, base: Base, why: str) -> None:
    """Make every later read of a base an error: only runs know whether the base was written.

    Raises Unsupported for the memory of a Variable, for a tensor of another cell, and for a tensor that the open region
    takes from outside.
    """
    error = f"{why}\n  {ADVICE}"
    is_outside = rec.tape.is_of_another_cell(base.entry.value) or (rec.inside and base in rec.inside[-1].entries)
    if base.variable is not None or is_outside:
        raise Unsupported(error, details=REFUSED)
    entry = base.entry.light()
    entry.lost = error
    base.become(entry)


def copy_of(rec: Recording, tensor: torch.Tensor, why: str) -> Tensor:
    """A new node for values below a guard, sharing the memory of the tensor."""
    handle = rec.handle(tensor)
    with torch.enable_grad():  # in Python it is the tensor
        found = rec.handle(tensor.clone())
    may_share(found, family(handle._family), why)
    return found


def outer(rec: Recording) -> set[Base]:
    """Bases of tensors outside the region being recorded, including tensors the region met first."""
    handles = rec.tape.handles.values()
    return {*rec.inside[-1].entries, *rec.tape.reads.values(), *(handle._family for _, handle in handles)}


def looked(chain: tuple[View, ...], base: torch.Tensor) -> torch.Tensor:
    """The part of the base that the views show."""
    for view in chain:
        base = view.apply(base)
    return base


def put(rec: Recording, chain: tuple[View, ...], base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``base`` with ``new`` where the chain of views looks; gradients take the way that the write gave ``new``."""
    steps = [base]
    for view in chain[:-1]:
        steps.append(view.apply(steps[-1]))
    for view, step in zip(reversed(chain), reversed(steps), strict=False):
        new = _put(rec, view, step, new)
    return fitting(base, new) if chain else new


def _put(rec: Recording, view: View, base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    is_unseen = view.op is aten.detach.default or not view.grad  # autograd knows of no way from the base to the view
    try:
        with torch.set_grad_enabled(not is_unseen):
            whole = view.put(base, new)
    except Unsupported as error:
        raise Unsupported(f"{error}{rec.tape.at()}", op=op_name(view.op)) from None
    if not is_unseen:
        return whole
    with torch.no_grad(), rec.tagged(STRAIGHT, rec.tape.marks.forward):
        return aten.copy(base, whole)


def fitting(target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``result`` converted to the dtype, shape and strides of ``target``, on which later views depend."""
    same = result.dtype == target.dtype and result.dim() == target.dim() and all(
        statically_known_true(n == m) and (statically_known_true(n <= 1) or statically_known_true(a == b))
        for n, m, a, b in zip(result.shape, target.shape, result.stride(), target.stride(), strict=True)
    )  # fmt: skip
    if same:
        return result
    with torch.enable_grad():
        return aten.copy(target, result)
