"""Answers to torch and Python, when they ask recorded values for numbers, truth values and sizes while recording.

The samples answer. A number is a constant of the graph and is noted; a truth or a size is guarded: a run where it would
be another one stops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Value, Variable
from tfnb.graph.op_facts import Op, op_name
from tfnb.graph.spec import flows
from tfnb.recording.overrides.buffer_updates import batch_count
from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.shapes.symbols import is_relation
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Tensor

aten = torch.ops.aten


@override(Stage.ANSWER, aten.size.default)
def _size(rec: Recording, x: torch.Tensor) -> list[int]:
    """Sizes as numbers for a composite in C++; fixing them is recorded as equalities, with a warning."""
    return [int(size) for size in x.size()]


@override(Stage.ANSWER, aten.stride.default)
def _stride(rec: Recording, x: torch.Tensor) -> list[int]:
    return [int(size) for size in x.stride()]


@override(Stage.ANSWER, aten.is_same_size.default)
def _is_same_size(rec: Recording, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Decided by this line: the kernel's own answer would be nobody's."""
    return a.dim() == b.dim() and all(rec.symbols.decided(m == n) for m, n in zip(a.shape, b.shape, strict=True))


@override(Stage.ANSWER, aten._nested_tensor_from_mask_left_aligned.default)
def _padded(rec: Recording, x: torch.Tensor, mask: torch.Tensor, mask_check: bool = True) -> bool:
    """Whether a transformer may skip its padding: never, since the answer would depend on the mask."""
    return False


@override(Stage.ANSWER, aten._local_scalar_dense.default)
def item(rec: Recording, tensor: torch.Tensor) -> Any:
    """``.item()`` from inside torch: the sample's number. A truth value decides a branch of TorchScript or a kernel."""
    entry = rec._entry(tensor)
    if not rec.tape.is_fixed(entry.value):
        var = None if isinstance(tensor, Tensor) else rec.variable_of(tensor)
        if var is not None and rec.node(entry.value.node).op == "tfnb.read":  # as it is when the run begins
            rec.tape.asked.setdefault(var, rec.where())
        if tensor.dtype is torch.bool and (isinstance(tensor, Tensor) or entry.sample is not None):
            outcome = bool(tensor.sample if isinstance(tensor, Tensor) else entry.sample)
            with rec.on():
                rec.branch(rec.handle(tensor), outcome, is_state=var is not None)
            return outcome
        if tensor is not batch_count(rec.scopes.module):
            rec.escaped(tensor, "item()")
    if isinstance(tensor, Tensor):
        return tensor.sample.item()
    return (tensor if entry.sample is None else entry.sample).item()


@override(Stage.FUNCTION, torch.Tensor.__contains__)
def _contains(rec: Recording, tensor: torch.Tensor, element: object) -> Any:
    """``element in tensor``: a recorded truth, which Python's ``in`` asks for its value, as an ``if`` does."""
    return (tensor == element).any() if isinstance(element, torch.Tensor | int | float | bool) else NotImplemented


def counters_of(rec: Recording, value: Value) -> set[Variable]:
    """The Variables of which a whole number or truth value is computed, by way of such alone."""
    found: set[Variable] = set()
    stack, seen = [value], {value}
    while stack:
        value = stack.pop()
        node = rec.tape.by_id.get(value.node)
        if node is None or flows(node.outputs[value.index].dtype):
            continue
        if node.op == "tfnb.read":
            found.add(node.attrs["variable"])
        new = {*node.inputs} - seen
        seen |= new
        stack.extend(new)
    return found


def stands_for_number(rec: Recording, value: Value) -> bool:
    """Whether a value is a Python number that staged code took from a tensor, or computed from such numbers alone."""
    return value in rec.tape.numbers


@override(Stage.FUNCTION, torch.where)
def _where(rec: Recording, condition: Any, *operands: Any, **out: Any) -> Any:
    """``torch.where`` of two Python numbers, of which staged code took one from a tensor: in the dtype of numbers."""
    taken = [x for x in operands if isinstance(x, Tensor) and stands_for_number(rec, rec._entry(x).value)]
    numbers = [x for x in operands if isinstance(x, bool | int | float | complex)]
    if out or not taken or len(operands) != 2 or len(taken) + len(numbers) != 2:
        return NotImplemented
    is_float = any(isinstance(x, float) for x in numbers) or any(x.is_floating_point() for x in taken)
    is_complex = any(isinstance(x, complex) for x in numbers) or any(x.is_complex() for x in taken)
    if is_complex or not is_float or all(x.dtype is torch.get_default_dtype() for x in taken):
        return NotImplemented
    with rec.on():
        return torch.where(
            condition, *(x.to(torch.get_default_dtype()) if isinstance(x, Tensor) else x for x in operands)
        )


def with_numbers(
    rec: Recording, func: Op, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:  # fmt: skip
    """The arguments of an element-wise op, with recorded numbers in the dtype to which torch promotes Python's.

    A tensor without axes has a say in the result's dtype where a Python number has none: among integers, which a float
    of any width makes the default dtype, and beside another tensor without axes.
    """
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    numbers = [x for x in tensors if isinstance(x, Tensor) and stands_for_number(rec, rec._entry(x).value)]
    others = [_empty(x) for x in tensors if not any(x is number for number in numbers)]
    if numbers and not others:
        return _as_python_computes(rec, func, numbers, args, kwargs), kwargs
    if not numbers:
        return args, kwargs
    dtype = torch.result_type(functools.reduce(_together, others), functools.reduce(_together, map(_empty, numbers)))
    highest = functools.reduce(torch.promote_types, (x.dtype for x in numbers))
    kind = 1j if highest.is_complex else 1.0 if highest.is_floating_point else highest is torch.bool or 2
    wanted = torch.result_type(functools.reduce(_together, others), kind)
    if wanted is dtype:
        return args, kwargs
    with rec.on():
        cast = {id(number): number.to(wanted) for number in numbers}
    return [cast.get(id(arg), arg) for arg in args], {name: cast.get(id(arg), arg) for name, arg in kwargs.items()}


_POWERS = {aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar}
_NEGATING = {"aten.neg.default", "aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Tensor", "aten.rsub.Scalar"}
_ARITHMETIC = _POWERS | {
    getattr(getattr(aten, op), overload)
    for op in ("add", "sub", "rsub", "mul", "neg", "abs", "floor_divide", "remainder")
    for overload in getattr(aten, op).overloads()
}


def _as_python_computes(
    rec: Recording, func: Op, numbers: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Sequence[Any]:  # fmt: skip
    """The arguments of an op of recorded numbers alone, in the dtypes that give the digits of Python's result.

    Truth values count as whole numbers, what becomes a fraction is computed in float64, and so is a power of whole
    numbers by an exponent that may be negative.
    """
    if any(x.is_floating_point() or x.is_complex() for x in numbers) or any(map(torch.is_tensor, kwargs.values())):
        return args
    kinds = [torch.int64 if x.dtype is torch.bool and func in _ARITHMETIC else x.dtype for x in numbers]
    left = iter(kinds)
    alone = [torch.empty((), dtype=next(left), device="meta") if isinstance(x, torch.Tensor) else x for x in args]
    try:
        is_fraction = _may_be_below_one(rec, func, args) or func(*alone, **kwargs).is_floating_point()
    except (RuntimeError, TypeError):
        return args  # the call itself says why, with its line
    if is_fraction:
        kinds = [torch.float64] * len(numbers)
    left = iter(kinds)
    with rec.on():
        return [x.to(next(left)) if isinstance(x, torch.Tensor) else x for x in args]


def _may_be_below_one(rec: Recording, func: Op, args: Sequence[Any]) -> bool:
    """Whether an op is a power of whole numbers whose exponent may be below 0."""
    if func not in _POWERS:
        return False
    exponent = args[1]
    if isinstance(exponent, torch.Tensor):
        return _may_be_negative(rec, rec._entry(exponent).value)
    return isinstance(exponent, int) and exponent < 0


def _may_be_negative(rec: Recording, value: Value) -> bool:
    """Whether a recorded number comes of a difference, or of a negative number in the program."""
    node = rec.tape.by_id.get(value.node)
    if node is None:
        return False
    negative = any(isinstance(x, int | float) and x < 0 for x in node.attrs.values())
    return negative or node.op in _NEGATING or any(_may_be_negative(rec, each) for each in node.inputs)


def _empty(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same say in promotions."""
    return torch.empty((1,) * min(x.dim(), 1), dtype=x.dtype, device="meta")


def _together(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.empty((1,) * max(a.dim(), b.dim()), dtype=torch.result_type(a, b), device="meta")


def guard_number(rec: Recording, tensor: Tensor) -> None:
    """From here on, a run must have the sample's number."""
    number = tensor.sample.item()
    with rec.on(), torch.no_grad():
        lacks = (
            f"Python needs this number while recording: the sample's is {number}, and this run has another one; keep "
            "it in tensors (torch.where, an index of a tensor), or record again with such a sample"
        )
        rec.guard(tensor.isnan() if number != number else tensor == number, True, lacks=lacks)


def _comparison(op: Op, elements: Callable[..., Any]) -> Callable[..., Any]:
    """The row of a comparison that gives a Python bool; ``elements`` gives the element-wise comparison."""

    def row(rec: Recording, *args: object, **kwargs: object) -> bool:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if not any(isinstance(t, Tensor) for t in tensors):
            return op(*args, **kwargs)
        samples = [rec._entry(t).sample for t in tensors]
        if any(sample is None for sample in samples):
            raise InvalidArgument(f"{op_name(op)} has no answer without samples{rec.tape.at()}")
        outcome = bool(op(*samples, *args[len(tensors) :], **kwargs))
        with rec.on():
            same = tensors[0].shape == tensors[1].shape
            check = elements(*args, **kwargs).all() if same else None
        if check is not None:
            rec.branch(check, outcome)
        return outcome

    return row


override(Stage.ANSWER, aten.equal.default)(_comparison(aten.equal.default, torch.eq))
override(Stage.ANSWER, aten.allclose.default)(_comparison(aten.allclose.default, torch.isclose))


def settle_size(rec: Recording, expr: object) -> Any:
    """Answer for a size that only data tell: take the samples' answer, and guard that a run agrees."""
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
