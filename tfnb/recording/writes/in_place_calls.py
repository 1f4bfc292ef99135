"""Writes while recording: an op that writes in place becomes its out-of-place twin, and its target means the result.

A write to a view is put back into the base it looks at, so every alias sees it; see `tfnb.recording.values.views` and
`aliases`. What an alias sees follows torch, also where gradients are concerned: a write made with grad mode off, or
through ``detach()`` or ``.data``, leaves the path of gradients through its target as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import eq
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tfnb.errors import Unsupported
from tfnb.graph.node import leaves
from tfnb.graph.op_facts import Facts, Op, facts, op_name, twin, unbind
from tfnb.recording.values.layout_queries import contiguous
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Base, Entry, Tensor
from tfnb.recording.writes.aliases import STRAIGHT, check_write, fitting, put

aten = torch.ops.aten


def record_write(rec: Recording, func: Op, own: Facts, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record the out-of-place twin of ``func``, then rebind its targets; returns the result of ``func``."""
    named = dict(zip(own.names, args, strict=False)) | kwargs
    other = twin(func)
    if other is None:
        raise _refused(rec, func, "writes in place and has no out-of-place form: use an out-of-place call")
    with rec.on(), torch.set_grad_enabled(torch.is_grad_enabled() and not own.without_path):
        if own.is_reshaping:
            return _look_again(rec, func, other, own, named)
        targets = [named[name] for name in own.writes]
        rest: list[torch.Tensor] = []
        if len(targets) == 1 and isinstance(targets[0], (list, tuple)):
            _write_lists(rec, other, own, named, list(targets[0]))
        else:
            rest = _write(rec, func, other, own, named, targets)
    more = iter(rest)
    returned = tuple(named[name] if name is not None else next(more, None) for name in own.returns_written)
    return returned[0] if len(returned) == 1 else (returned or None)


def _write(
    rec: Recording, func: Op, other: Op, own: Facts, named: Mapping[str, Any], targets: list[torch.Tensor]
) -> list[torch.Tensor]:
    """One call that writes ``targets``; returns its other results."""
    given = {**own.defaults, **named}  # the twin may have other defaults, or none
    passed = {name: given[name] for name in facts(other).names if name in given}
    first = next((leaf for leaf in leaves(passed) if isinstance(leaf, torch.Tensor)), None)
    off = not torch.is_grad_enabled()
    direct = len(targets) == 1 and first is targets[0]  # the result's gradient passes through the target as it is
    with rec.tagged(STRAIGHT if off and direct else frozenset(), rec.tape.marks.forward):
        results = _called(other, passed)
    if any(isinstance(result, (list, tuple)) for result in results):
        raise _refused(rec, func, "writes lists of tensors beside others: use out-of-place calls")
    for target, result in zip(targets, results[: len(targets)], strict=True):
        resized = result.dim() != target.dim() and any(a.is_out for a in func._schema.arguments)
        if resized or not (direct or _broadcasts(result, target)):
            _grow(rec, func, target, result)
            continue
        if off and not (direct and result.dtype == target.dtype):
            with rec.tagged(STRAIGHT, rec.tape.marks.forward):
                result = aten.copy(target, result)
        rebind(rec, target, fitting(target, result))
    return results[len(targets) :]


def _called(op: Op, named: Mapping[str, Any]) -> list[torch.Tensor]:
    args, kwargs = unbind(op, dict(named))
    results = op(*args, **kwargs)
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _write_lists(rec: Recording, other: Op, own: Facts, named: Mapping[str, Any], targets: list[torch.Tensor]) -> None:
    """A foreach call: entry by entry, as in torch, if an entry aliases another operand."""
    given = {**own.defaults, **named}
    passed = {name: given[name] for name in facts(other).names if name in given}
    homes = [id(rec.home(leaf)) for leaf in leaves(passed) if isinstance(leaf, torch.Tensor)]
    off = not torch.is_grad_enabled()
    turns = [targets]
    if off or len(set(homes)) < len(homes):
        turns = [[target] for target in targets]
    for at, turn in enumerate(turns):
        part = passed if turn is targets else {k: _entry_of(v, at, len(targets)) for k, v in passed.items()}
        with rec.tagged(STRAIGHT if off else frozenset(), rec.tape.marks.forward):
            results = _called(other, part)
        for target, result in zip(turn, results, strict=True):
            rebind(rec, target, fitting(target, result))


def _entry_of(argument: object, at: int, count: int) -> Any:
    """The ``at``-th of an argument that has one entry for each target."""
    return [argument[at]] if isinstance(argument, (list, tuple)) and len(argument) == count else argument


def _look_again(rec: Recording, func: Op, other: Op, own: Facts, named: Mapping[str, Any]) -> torch.Tensor:
    """A call that changes the shape of its target and no value: the handle looks through one more view."""
    target = named[own.writes[0]]
    if not facts(other).is_view:
        if func is aten.resize_.default and _is_of_shape(target, named["size"]):
            return target
        raise _refused(
            rec, func, "gives a tensor other memory, which is not recorded: use a new tensor, or, where a package does "
            "it at its first call, call that once before the recording",
        )  # fmt: skip
    if not isinstance(target, Tensor) or target not in rec.live:
        raise _refused(rec, func, "changes the shape of a tensor made outside of the recording: use a view of it")
    look = rec.handle(_called(other, named)[0])
    target.look_as(look)
    return target


def _is_of_shape(target: torch.Tensor, shape: Sequence[int]) -> bool:
    known = len(shape) == target.dim() and all(map(statically_known_true, map(eq, target.shape, shape)))
    return known and target.is_contiguous()


def _grow(rec: Recording, func: Op, target: torch.Tensor, result: torch.Tensor) -> None:
    """An ``out=`` without elements takes the shape of the result."""
    grows = result.dtype == target.dtype and statically_known_true(target.numel() == 0)
    if not (grows and isinstance(target, Tensor) and target in rec.live and not target._chain):
        shapes = f"{list(target.shape)} {target.dtype} to {list(result.shape)} {result.dtype}"
        raise _refused(rec, func, f"would change its out= from {shapes}: give it a tensor that fits")
    target.look_as(rec.fresh(result))


def _broadcasts(result: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether ``result`` has the shape of ``target``, or can be broadcast into all of ``target``."""
    if result.dim() != target.dim() and result.numel() != target.numel():
        return False
    return all(
        statically_known_true(a == b) or a == b
        for a, b in zip(reversed(result.shape), reversed(target.shape), strict=False)
    )


def rebind(rec: Recording, target: torch.Tensor, new: torch.Tensor) -> None:
    """From here on ``target`` (a recorded tensor, a view, a parameter, a buffer) means ``new``."""
    handle = rec.handle(target)
    base, chain = handle._family, handle._chain
    refuse_of_another_cell(rec, target, base)
    if base.frozen:
        raise Unsupported(f"a write to {base.frozen}{rec.tape.at()}")
    if any(twin() is not None for twin in base.twins):
        raise Unsupported(
            f"a write to a tensor that shares memory with another by .data = ...: give .data a clone(){rec.tape.at()}"
        )
    if base.shares:
        check_write(rec, base)
    for other, is_view in base.copies:
        if other() is not None:  # somebody would see the write where the copy is a view
            rec.symbols.decided(is_view())
    entry = rec._entry(put(rec, chain, rec._wrap(base.entry, base), new))
    new_entry = rec._entry(new) if chain else None
    become(rec, base, entry)
    handle._entry = new_entry or base.entry
    handle._seen = base.version


def refuse_of_another_cell(rec: Recording, target: torch.Tensor, base: Base) -> None:
    """Raises Unsupported for a write that other cells would see: each cell runs again by itself."""
    is_view_of_another = isinstance(target, Tensor) and target._space is rec.space and target not in rec.live
    if rec.tape.is_of_another_cell(base.entry.value) or (is_view_of_another and base.variable is not None):
        raise Unsupported(
            f"a write to a tensor that another cell recorded{rec.tape.at()}\n  write to a copy of it here, as in "
            "`h = h.clone()`, or move the line into that cell; what cells share and change is a tfnb.Variable"
        )


def become(rec: Recording, base: Base, entry: Entry) -> None:
    """Write a new entry into a base. Raises Unsupported for a view of a Variable of an earlier recording."""
    var = base.variable if base.variable is not None and rec.tape.reads.get(base.variable) is base else None
    if base.written is not None and var is None:
        raise Unsupported(f"a write through a view of a variable of an earlier recording{rec.tape.at()}")
    if var is None:
        rec.outside.lost_write(base)
    in_module = var is not None and var.held is not None and bool(rec.scopes.places(var.held.tensor()))
    tags = frozenset({"buffer"} if in_module else ())  # it belongs to the step of a loss
    with torch.enable_grad(), rec.tagged(tags, rec.tape.marks.forward):
        base.write(entry)


def note_copy(rec: Recording, source: torch.Tensor, result: object) -> None:
    """Remember a copy that is a view for some sizes: a write would show in both."""
    if not isinstance(source, Tensor) or not isinstance(result, Tensor):
        return
    base, other = source._family, result._family
    if base is other or not any(isinstance(size, torch.SymInt) for size in source.shape):
        return
    sizes, strides, env = source.shape, source.stride(), rec.symbols.env

    def is_view() -> Any:
        return contiguous(env, sizes, strides, torch.contiguous_format)

    base.copies += ((weakref.ref(other), is_view),)
    other.copies += ((weakref.ref(base), is_view),)


def take_data(rec: Recording, target: torch.Tensor, new: torch.Tensor) -> None:
    """``target.data = new``: the memory of ``new``, while gradients pass to what ``target`` was; aliases of it stay."""
    base, other = rec.home(target), rec.home(new)
    if base is other and all(view.op is aten.detach.default for view in rec.handle(new)._chain):
        return
    if isinstance(target, Tensor):
        refuse_of_another_cell(rec, target, base)
        with torch.no_grad(), rec.tagged(STRAIGHT, rec.tape.marks.forward):
            look = rec.fresh(aten.copy(target, new))
        target.look_as(look)
        base = look._family
    elif any(view is not new for view in base.held_views):
        raise Unsupported(
            f".data = ... would part a Parameter from a view of it: use copy_(), or make the view later{rec.tape.at()}"
        )
    else:
        with torch.no_grad():
            target.copy_(new)
    base.twins += (weakref.ref(other),)
    other.twins += (weakref.ref(base),)


def _refused(rec: Recording, func: Op, why: str) -> Unsupported:
    return Unsupported(f"{op_name(func)} {why}{rec.tape.at()}", op=op_name(func))


__all__ = ["become", "rebind", "record_write", "take_data"]
