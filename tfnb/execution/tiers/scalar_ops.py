"""A table of torch's ops on single integers and truth values, as arithmetic of Python.

Only what is exact: int64, which wraps around, and bool. Floats are moved, never computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LOW, HIGH = -(2**63), 2**63 - 1
_EXACT = 2**24  # integers up to it are numbers of float32


@dataclass(frozen=True, slots=True)
class Number:
    """A number of Python: ``made`` is one, a node of generated code, or a function and such arguments."""

    made: object
    dtype: torch.dtype

    @property
    def is_whole(self) -> bool:
        """Whether the number is an integer or a truth value."""
        return self.dtype is torch.int64 or self.dtype is torch.bool


def literal(value: object, dtype: torch.dtype | None = None) -> Number | None:
    """The number that a literal of the code is.

    >>> literal(3)
    Number(made=3, dtype=torch.int64)
    """
    dtype = dtype or _TYPES.get(type(value))
    return None if dtype is None else Number(value, dtype)


_TYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}
Rule = Callable[[Sequence[Any], Mapping[str, Any], torch.dtype], Any]


def expression(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Number | None:
    """The value of an op, with Numbers and other literals for arguments; None where only torch knows.

    >>> expression("aten.eq.Tensor", [Number("x", torch.int64), literal(1)], {}, torch.bool)
    Number(made=(<built-in function eq>, ('x', 1)), dtype=torch.bool)
    """
    rule = RULES.get(op.removeprefix("aten."))
    made = None if rule is None else rule(args, kwargs, dtype)
    return None if made is None else Number(made, dtype)


def wrapped(x: int) -> int:
    """An integer wrapped around to int64.

    >>> wrapped(2**63), wrapped(5)
    (-9223372036854775808, 5)
    """
    return x if LOW <= x <= HIGH else (x - LOW) % 2**64 + LOW


def picked(which: bool, first: object, second: object) -> Any:
    """The first, or else the second."""
    return first if which else second


def single(x: int) -> float:
    """An integer rounded to float32."""
    return float(x) if -_EXACT <= x <= _EXACT else torch.tensor(x).to(torch.float32).item()


def _whole(args: Sequence[Any]) -> bool:
    """Whether all are integers or truth values."""
    return all([isinstance(x, Number) and x.is_whole for x in args])


def _call(function: Callable[..., Any], args: Sequence[Number]) -> Any:
    return function, tuple([x.made for x in args])


def _integers(function: Callable[..., int], *, wraps: bool = True, truths: bool = True, divides: bool = False) -> Rule:
    """truths: whether torch takes truth values too; divides: only by a literal above zero, as torch tells of others."""

    def rule(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
        if kwargs or dtype is not torch.int64 or not _whole(args):
            return None
        if not truths and any(x.dtype is torch.bool for x in args):
            return None
        if divides and not (isinstance(args[1].made, int) and args[1].made > 0):
            return None
        made = _call(function, args)
        return (wrapped, (made,)) if wraps else made

    return rule


def _comparison(function: Callable[..., Any]) -> Rule:
    return lambda args, kwargs, dtype: _call(function, args) if _whole(args) else None


def _logic(function: Callable[..., Any]) -> Rule:
    def rule(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
        fits = dtype is torch.bool and all([isinstance(x, Number) and x.dtype is torch.bool for x in args])
        return _call(function, args) if fits else None

    return rule


def _clamp(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    x, *bounds = args
    least, most = [*bounds, None, None][:2]
    if kwargs or dtype is not torch.int64 or not _whole([a for a in (x, least, most) if a is not None]):
        return None
    made = x.made if least is None else (max, (x.made, least.made))
    return made if most is None else (min, (made, most.made))  # the upper one counts where they cross


def _where(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    if not all([isinstance(x, Number) for x in args]):
        return None
    which, a, b = args
    return _call(picked, args) if which.dtype is torch.bool and a.dtype is b.dtype is dtype else None


def _cast(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    if set(kwargs) - {"dtype"} or not _whole(args):
        return None
    if dtype is args[0].dtype:
        return args[0].made
    function = _CASTS.get(dtype)
    return None if function is None else _call(function, args)


def _same(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    return args[0].made if isinstance(args[0], Number) and args[0].dtype is dtype else None


_CASTS: dict[torch.dtype, Callable[..., Any]] = {
    torch.bool: bool, torch.int64: int, torch.float32: single, torch.float64: float,
}  # fmt: skip

RULES: dict[str, Rule] = {
    **{f"{name}.{kind}": rule for kind in ("Tensor", "Scalar") for name, rule in {
        "add": _integers(operator.add), "mul": _integers(operator.mul), "sub": _integers(operator.sub, truths=False),
        "remainder": _integers(operator.mod, wraps=False, divides=True),
        "bitwise_and": _logic(operator.and_), "bitwise_or": _logic(operator.or_), "bitwise_xor": _logic(operator.xor),
        **{name: _comparison(getattr(operator, name)) for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    }.items()},
    **{f"{name}.default": rule for name, rule in {
        "logical_and": _logic(operator.and_), "logical_or": _logic(operator.or_), "logical_xor": _logic(operator.xor),
        "bitwise_not": _logic(operator.not_), "logical_not": _logic(operator.not_), "neg": _integers(operator.neg),
        "floor_divide": _integers(operator.floordiv, divides=True), "clamp": _clamp, "_to_copy": _cast,
        **dict.fromkeys((
            "clone", "alias", "detach", "lift_fresh", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze",
        ), _same),
    }.items()},
    "floor_divide.Scalar": _integers(operator.floordiv, divides=True), "clamp.Tensor": _clamp, "where.self": _where,
}  # fmt: skip

BESIDE: dict[str, int] = {f"aten.{name}.Tensor": 0 for name in ("eq", "ge", "gt", "le", "lt", "ne")} | {
    "aten.where.self": 1
}
"""Ops that give the same for a number as for a tensor of that one number, from which of their tensors on."""
