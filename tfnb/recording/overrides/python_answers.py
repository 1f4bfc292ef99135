"""What torch and Python ask of recorded values while recording: numbers, truths and sizes.

The samples answer. A number is a constant of the graph and is noted; a truth or a size is guarded: a run where it would
be another one stops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Value
from tfnb.graph.op_facts import Op, op_name
from tfnb.recording.shapes.symbols import is_relation
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Tensor

aten = torch.ops.aten

# Composites in C++ that want numbers: they fix the sizes, which is heard as equalities and warned about.
SIZES: dict[Op, Callable[[torch.Tensor], Any]] = {
    aten.size.default: torch.Tensor.size, aten.stride.default: torch.Tensor.stride,
}  # fmt: skip

# Comparisons that give a Python bool, and what is true of every element where they hold.
ANSWERS: dict[Op, Callable[..., Any]] = {aten.equal.default: torch.eq, aten.allclose.default: torch.isclose}


def item(rec: Recording, tensor: torch.Tensor) -> Any:
    """``.item()`` from inside torch: the sample's number; a truth is what TorchScript, or a kernel, decides by."""
    entry = rec._entry(tensor)
    if not rec.tape.is_fixed(entry.value):
        var = None if isinstance(tensor, Tensor) else rec.variable_of(tensor)
        if var is not None and rec.node(entry.value.node).op == "tfnb.read":  # as it is when the run begins
            rec.asked.setdefault(var, rec.where())
        if tensor.dtype is torch.bool and (isinstance(tensor, Tensor) or entry.sample is not None):
            outcome = bool(tensor.sample if isinstance(tensor, Tensor) else entry.sample)
            with rec.on():
                rec.branch(rec.handle(tensor), outcome, is_state=var is not None)
            return outcome
        rec.escaped(tensor, "item()")
    if isinstance(tensor, Tensor):
        return tensor.sample.item()
    return (tensor if entry.sample is None else entry.sample).item()


def stands_for_number(rec: Recording, value: Value) -> bool:
    """Whether it is a Python number that staged code took of a tensor, or computed from such numbers alone."""
    node = rec.tape.by_id.get(value.node) if rec.numbers and value not in rec.numbers else None
    if node is not None and node.inputs and all(stands_for_number(rec, v) for v in node.inputs):
        rec.numbers.add(value)
    return value in rec.numbers


def guard_number(rec: Recording, tensor: Tensor) -> None:
    """From here on, a run must have the sample's number."""
    number = tensor.sample.item()
    with rec.on(), torch.no_grad():
        rec.branch(tensor.isnan() if number != number else tensor == number, True, is_check=True)


def answer(rec: Recording, func: Op, args: Any, kwargs: Any) -> bool:
    """What a comparison of `ANSWERS` gives for the samples, and a guard that it stays so."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not any(isinstance(t, Tensor) for t in tensors):
        return func(*args, **kwargs)
    samples = [rec._entry(t).sample for t in tensors]
    if any(sample is None for sample in samples):
        raise InvalidArgument(f"{op_name(func)} has no answer without samples{rec.tape.at()}")
    outcome = bool(func(*samples, *args[len(tensors) :], **kwargs))
    with rec.on():
        same = tensors[0].shape == tensors[1].shape
        check = ANSWERS[func](*args, **kwargs).all() if same else None
    if check is not None:
        rec.branch(check, outcome)
    return outcome


def settle_size(rec: Recording, expr: Any) -> Any:
    """What Python asks of a size that only data tell: the samples' answer, and a guard that a run agrees."""
    found = rec.symbols.seen(expr, bool if is_relation(expr) else int)
    if found is None:
        raise ShapeError(
            f"Python asks for {rec.symbols.text(expr)}, which only the data of a run tell, and there are no "
            f"samples to decide by: give every placeholder a sample{rec.tape.at()}"
        )
    with rec.on():
        if isinstance(found, bool):
            rec.branch(aten.scalar_tensor(rec.symbols.env.create_symboolnode(expr), dtype=torch.bool), found)
        else:
            size = rec.symbols.env.create_symintnode(expr, hint=None)
            rec.branch(aten.scalar_tensor(size, dtype=torch.int64) == found, True)
    return found
