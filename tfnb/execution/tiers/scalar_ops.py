"""What torch's ops compute on tensors of one integer or truth value, as arithmetic of Python: a table.

Only what is exact: int64, which wraps around where a bound is not known, and bool. Floats are moved, never computed.
Each row gives the expression for an op, and between which bounds its result lies; None where it is another one's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

LOW, HIGH = -(2**63), 2**63 - 1
_EXACT = 2**24  # integers up to it are numbers of float32


@dataclass(frozen=True, slots=True)
class Number:
    """A number of Python: ``made`` is one, a node of generated code, or a function and such arguments."""

    made: Any
    dtype: torch.dtype
    low: int = LOW
    high: int = HIGH

    @property
    def is_whole(self) -> bool:
        """Whether it is an integer or a truth value."""
        return self.dtype is torch.int64 or self.dtype is torch.bool


def literal(value: Any, dtype: torch.dtype | None = None) -> Number | None:
    """The number that a literal of the code is.

    >>> literal(3)
    Number(made=3, dtype=torch.int64, low=3, high=3)
    """
    dtype = dtype or _TYPES.get(type(value))
    if dtype is None:
        return None
    return Number(value, dtype) if isinstance(value, float) else Number(value, dtype, int(value), int(value))


def of(made: Any, dtype: torch.dtype) -> Number:
    """A number of which nothing but the type is known."""
    return Number(made, dtype, 0, 1) if dtype is torch.bool else Number(made, dtype)


_TYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}
Rule = Callable[[Sequence[Any], Mapping[str, Any], torch.dtype], Number | None]
RULES: dict[str, Rule] = {}


def expression(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
    """What an op gives, with Numbers and other literals for arguments; None where only torch knows.

    >>> expression("aten.add.Tensor", [of("x", torch.bool), literal(1)], {}, torch.int64)
    Number(made=(<built-in function add>, ('x', 1)), dtype=torch.int64, low=1, high=2)
    """
    rule = RULES.get(op)
    return None if rule is None else rule(args, kwargs, dtype)


def wrapped(x: int) -> int:
    """An integer as int64 has it.

    >>> wrapped(2**63), wrapped(5)
    (-9223372036854775808, 5)
    """
    return x if LOW <= x <= HIGH else (x - LOW) % 2**64 + LOW


def picked(which: bool, first: Any, second: Any) -> Any:
    """The first, or else the second."""
    return first if which else second


def _rule(*ops: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update({f"aten.{op}": rule for op in ops})
        return rule

    return add


def _whole(args: Sequence[Any]) -> bool:
    """Whether all are integers or truth values."""
    return all([isinstance(x, Number) and x.is_whole for x in args])


def _int64(function: Callable[..., int], args: Sequence[Number], ends: Sequence[int]) -> Number:
    """A result that wraps around, if it may lie outside of int64; ``ends``: the least and greatest are among them."""
    made = (function, tuple([x.made for x in args]))
    low, high = min(ends), max(ends)
    if low >= LOW and high <= HIGH:
        return Number(made, torch.int64, low, high)
    return Number((wrapped, (made,)), torch.int64)


def _arithmetic(op: str, function: Callable[..., int]) -> None:
    @_rule(f"{op}.Tensor", f"{op}.Scalar")
    def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
        if kwargs or len(args) != 2 or dtype is not torch.int64 or not _whole(args):
            return None
        if op == "sub" and any(x.dtype is torch.bool for x in args):  # torch takes no truth value from anything
            return None
        a, b = args
        return _int64(function, args, [function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)])


def _comparison(op: str) -> None:
    function = getattr(operator, op)

    @_rule(f"{op}.Tensor", f"{op}.Scalar")
    def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
        return of((function, tuple([x.made for x in args])), torch.bool) if _whole(args) else None


def _bits(ops: str, function: Callable[..., int]) -> None:
    @_rule(*ops.split())
    def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
        truths = all([isinstance(x, Number) and x.dtype is torch.bool for x in args])
        logical = dtype is torch.bool and truths
        return of((function, tuple([x.made for x in args])), torch.bool) if logical else None


for _name, _function in (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul)):
    _arithmetic(_name, _function)
for _name in ("eq", "ge", "gt", "le", "lt", "ne"):
    _comparison(_name)
_bits("bitwise_and.Tensor bitwise_and.Scalar logical_and.default", operator.and_)
_bits("bitwise_or.Tensor bitwise_or.Scalar logical_or.default", operator.or_)
_bits("bitwise_xor.Tensor bitwise_xor.Scalar logical_xor.default", operator.xor)
_bits("bitwise_not.default logical_not.default", operator.not_)


@_rule("neg.default")
def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
    if dtype is not torch.int64 or not _whole(args):
        return None
    return _int64(operator.neg, args, [-args[0].low, -args[0].high])


@_rule("floor_divide.default", "floor_divide.Scalar")
def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
    if dtype is not torch.int64 or not _whole(args) or args[1].low <= 0:  # by zero torch says so itself
        return None
    x, y = args
    return _int64(operator.floordiv, args, [a // b for a in (x.low, x.high) for b in (y.low, y.high)])


@_rule("remainder.Scalar", "remainder.Tensor")
def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
    if dtype is not torch.int64 or not _whole(args) or args[1].low <= 0:
        return None
    return Number((operator.mod, (args[0].made, args[1].made)), torch.int64, 0, args[1].high - 1)


@_rule("clamp.default", "clamp.Tensor")
def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
    x, *bounds = args
    least, most = [*bounds, None, None][:2]
    given = [bound for bound in (least, most) if bound is not None]
    if kwargs or dtype is not torch.int64 or not _whole([x, *given]):
        return None
    found = x
    for function, bound in ((max, least), (min, most)):  # the upper one counts where they cross
        if bound is not None:
            made = (function, (found.made, bound.made))
            found = Number(made, dtype, function(found.low, bound.low), function(found.high, bound.high))
    return cast(Number, found)


@_rule("where.self")
def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
    if not all([isinstance(x, Number) for x in args]):
        return None
    which, a, b = args
    if which.dtype is not torch.bool or not a.dtype is b.dtype is dtype:
        return None
    made = (picked, (which.made, a.made, b.made))
    return Number(made, dtype, min(a.low, b.low), max(a.high, b.high))


@_rule("_to_copy.default")
def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
    if set(kwargs) - {"dtype"} or not _whole(args):
        return None
    (x,) = args
    if dtype is x.dtype:
        return cast(Number, x)
    if dtype.is_floating_point and not (x.low >= -_EXACT and x.high <= _EXACT):
        return None
    function = _CASTS.get(dtype)
    return None if function is None else Number((function, (x.made,)), dtype, *_cast(x, dtype))


_CASTS: dict[torch.dtype, Callable[..., Any]] = {
    torch.bool: bool, torch.int64: int, torch.float32: float, torch.float64: float,
}  # fmt: skip


def _cast(x: Number, dtype: torch.dtype) -> tuple[int, int]:
    return (0, 1) if dtype is torch.bool else (x.low, x.high)


@_rule(
    "clone.default", "alias.default", "detach.default", "lift_fresh.default", "view.default", "_unsafe_view.default",
    "reshape.default", "unsqueeze.default", "squeeze.default",
)  # fmt: skip
def _(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
    x = args[0]
    return x if isinstance(x, Number) and x.dtype is dtype else None


BESIDE: dict[str, int] = {f"aten.{name}.Tensor": 0 for name in ("eq", "ge", "gt", "le", "lt", "ne")} | {
    "aten.where.self": 1
}
"""Ops that give the same for a number as for a tensor of that one number, from which of their tensors on."""
