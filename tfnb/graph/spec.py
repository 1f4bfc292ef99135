"""Spec of a value: dtype, shape with symbolic sizes, device.

A size that varies is a :class:`Dim`, an integer expression over named symbols (``B``, ``4*B``, ``B//2 + 1``).
It holds only text, so it travels to files and other processes; it is evaluated with the symbols bound to ints
(a run) or to ``torch.SymInt`` (a recording). Imports torch for its types only.
"""

from __future__ import annotations

import ast
import cmath
import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, TypeGuard

import torch

from tfnb.errors import FeedError, GraphFormatError, InvalidArgument, ShapeError, ensure_type

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, power: base ** _exponent(power),
    ast.Div: operator.truediv,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "max": torch.sym_max,
    "min": torch.sym_min,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "float": torch.sym_float,
    "int": torch.sym_int,
    "abs": abs,
    "round": round,
    "_sym_sqrt": torch.sym_sqrt,
    "sqrt": torch.sym_sqrt,  # as torch 2.11 writes it
}
_NAME = re.compile(r"\b[^\W\d]\w*")
_LESS = re.compile(r"\(-(\d+)\) \+ ([^\W\d]\w*)")
_NOT_NEGATIVE = re.compile(r"max\(0, ([^\W\d]\w*-\d+)\)")
LENGTH_CAP, DEPTH_CAP, POWER_CAP = 4000, 100, 64  # characters, nesting, exponent: a file may hold anything
BIT_CAP = 256  # of a number in a size expression: a size has 63


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    """The syntax tree, if the text is a size expression that may be evaluated; raises GraphFormatError."""
    if len(text) > LENGTH_CAP:
        raise GraphFormatError(f"a size expression of {len(text)} characters; at most {LENGTH_CAP} are allowed")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise GraphFormatError(f"not a size expression: {text[:80]!r}") from error
    level: list[ast.AST] = [tree]
    for _ in range(DEPTH_CAP):
        for node in level:
            if not _allowed(node):
                raise GraphFormatError(f"not allowed in a size expression: {text[:80]!r}")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise GraphFormatError(f"a size expression is nested deeper than {DEPTH_CAP}: {text[:80]!r}")
    return tree


def _allowed(node: ast.AST) -> bool:
    """Whether `_evaluate` knows this kind of node."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, (bool, int, float))
        case ast.BinOp(op=op):
            return type(op) in _BINARY
        case ast.UnaryOp(op=op):
            return isinstance(op, (ast.USub, ast.Not))
        case ast.Compare(ops=ops):
            return len(ops) == 1 and type(ops[0]) in _COMPARE
        case ast.Call(func=ast.Name(id=name), keywords=[], args=args):
            many = name in ("max", "min")
            return name in _CALLS and (len(args) >= 2 if many else len(args) == 1)
        case ast.Name() | ast.BoolOp() | ast.IfExp() | ast.expr_context() | ast.operator() | ast.cmpop():
            return True
        case ast.boolop() | ast.unaryop():
            return True
    return False


def _exponent(power: Any) -> Any:
    """Return ``power`` if it is at most the cap: larger powers make numbers that fill the memory."""
    if not isinstance(power, torch.SymInt) and abs(power) > POWER_CAP:
        raise ShapeError(f"a size expression raises to the power {power}; at most {POWER_CAP} is allowed")
    return power


def _bounded(number: object) -> Any:
    """Return ``number`` unless its bits exceed the cap: powers of powers fill the memory."""
    if isinstance(number, int) and number.bit_length() > BIT_CAP:
        raise ShapeError(f"a size expression has a number of {number.bit_length()} bits; at most {BIT_CAP} are allowed")
    return number


def _evaluate(node: ast.expr, symbols: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return _bounded(value)
        case ast.Name(id=name):
            return symbols[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_evaluate(left, symbols), _evaluate(right, symbols)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, symbols)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return torch.sym_not(_evaluate(operand, symbols))
        case ast.BoolOp(op=op, values=values):
            fold = operator.and_ if isinstance(op, ast.And) else operator.or_
            return reduce(fold, [_evaluate(part, symbols) for part in values])
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_evaluate(left, symbols), _evaluate(right, symbols))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            found = _evaluate(test, symbols)
            if isinstance(found, bool):
                return _evaluate(body if found else orelse, symbols)
            return sized_if(found, _evaluate(body, symbols), _evaluate(orelse, symbols))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            found = [_evaluate(arg, symbols) for arg in args]
            call = _CALLS[name]
            if name in ("max", "min") and len(found) > 2:
                return reduce(call, found)
            return call(*found)
    raise GraphFormatError(f"not allowed in a size expression: {ast.unparse(node)!r}")


def sized_if(test: object, body: object, orelse: object) -> Any:
    """``body if test else orelse`` of integers, as one size. test: a SymBool, or an object with a truth value."""
    if isinstance(test, torch.SymBool):
        wrap = test.node.wrap_int
        body, orelse = (side if isinstance(side, torch.SymInt) else torch.SymInt(wrap(side)) for side in (body, orelse))
    return torch.sym_ite(test, body, orelse)


@lru_cache(maxsize=4096)
def _symbols(text: str) -> tuple[str, ...]:
    """Free symbols in order of appearance."""
    tree = _parse(text)
    calls = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    names = (n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in calls)
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Dim:
    """An integer expression over named symbols.

    >>> d = Dim("2*B + 1")
    >>> d.symbols, d.evaluate({"B": 4}), str(d)
    (('B',), 9, '2*B + 1')
    """

    expr: str

    @property
    def symbols(self) -> tuple[str, ...]:
        """The free symbols, in order of appearance."""
        return _symbols(self.expr)

    @property
    def is_symbol(self) -> bool:
        """Whether this is one bare symbol."""
        return self.expr.isidentifier() and not keyword.iskeyword(self.expr)

    def evaluate(self, symbols: Mapping[str, Any]) -> Any:
        """The value with every symbol bound; raises ShapeError for an unbound one, and where there is no value."""
        try:
            return _evaluate(_parse(self.expr), symbols)
        except KeyError as missing:
            raise ShapeError(f"size {self.expr} needs a value for {missing.args[0]}") from None
        except ZeroDivisionError:
            raise ShapeError(f"size {self.expr} divides by zero for {dict(symbols)}") from None
        except (OverflowError, ValueError, TypeError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise ShapeError(f"size {self.expr[:80]} has no value for {dict(symbols)}: {error}") from None

    def checked(self) -> Dim:
        """This Dim, if its text is a size expression; raises GraphFormatError."""
        _parse(self.expr)
        return self

    def rename(self, names: Mapping[str, int | str]) -> Dim:
        """The expression with symbols replaced by other symbols or numbers."""
        return Dim(_NAME.sub(lambda found: str(names.get(found[0], found[0])), self.expr))

    def short(self) -> str:
        """The expression in its usual notation: ``T-1`` for ``max(0, (-1) + T)``.

        >>> Dim("max(0, (-1) + T)").short(), Dim("2*B").short()
        ('T-1', '2*B')
        """
        plain = _LESS.sub(r"\2-\1", self.expr)
        bounded = _NOT_NEGATIVE.fullmatch(plain)
        return bounded[1] if bounded else plain

    def __str__(self) -> str:
        return self.expr

    __repr__ = __str__


Size = int | Dim

_SHORT = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
    torch.complex64: "c64", torch.complex128: "c128", torch.bool: "bool", torch.uint8: "u8",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def flows(dtype: torch.dtype) -> bool:
    """Whether gradients flow through tensors of this dtype: floating and complex ones."""
    return dtype.is_floating_point or dtype.is_complex


def is_rounded(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether values of ``dtype`` may be fed where ``to`` is asked for, though digits are lost.

    float64 and complex128 are what NumPy and pandas make where nobody named a dtype.
    """
    return flows(to) if dtype is torch.float64 else dtype is torch.complex128 and to.is_complex


def rounded(tensor: torch.Tensor, dtype: torch.dtype, owner: str) -> torch.Tensor:
    """The tensor in a dtype of fewer digits; raises FeedError where a finite number would become infinite.

    >>> rounded(torch.tensor([0.1], dtype=torch.float64), torch.float32, "x")
    tensor([0.1000])
    >>> rounded(torch.tensor([0.1, 1e300], dtype=torch.float64), torch.float32, "x")
    Traceback (most recent call last):
    tfnb.errors.FeedError: cannot feed 1e+300 (at [1]) for x: the largest float32 is 3.40282e+38
    """
    if tensor.dtype is dtype:
        return tensor
    found = tensor.to(dtype)
    if found.is_meta or cmath.isfinite(found.sum().item()):  # one quick look at all of them
        return found
    lost = (tensor.isfinite() & ~found.isfinite()).nonzero()
    if not len(lost):
        return found
    at = lost[0].tolist()
    largest = f"the largest {dtype_name(dtype)} is {torch.finfo(dtype).max:g}"
    raise FeedError(f"cannot feed {tensor[tuple(at)].item():g} (at {at}) for {owner}: {largest}")


def tensor_of(value: object, dtype: torch.dtype | None, owner: str) -> torch.Tensor:
    """A number or nested list as a tensor of this dtype, or of its own where that is None.

    owner: who is given it. Raises InvalidArgument for what is no tensor, and where the dtype would lose a part of it.

    >>> tensor_of([1, 2], torch.float32, "variable w")
    tensor([1., 2.])
    >>> tensor_of(1.5, torch.int64, "queue q")
    Traceback (most recent call last):
    tfnb.errors.InvalidArgument: queue q takes int64, and was given 1.5, which is float32: convert it
    """
    shown = repr(value) if isinstance(value, int | float | complex | str | None) else f"a {type(value).__name__}"
    takes = "a tensor" if dtype is None else dtype_name(dtype)
    try:
        found = torch.as_tensor(value)
        if dtype is None:
            return found
        if torch.can_cast(found.dtype, dtype) or not found.numel():
            return torch.as_tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"{owner} takes {takes}, and was given {shown}: {error}") from None
    raise InvalidArgument(
        f"{owner} takes {takes}, and was given {shown}, which is {dtype_name(found.dtype)}: convert it"
    )


def is_static(sizes: Sequence[Size]) -> TypeGuard[Sequence[int]]:
    """Whether none of the sizes varies."""
    return all(isinstance(size, int) for size in sizes)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def numbered(device: torch.device) -> torch.device:
    """The device with its index: the current index of its kind if none is given. The CPU and ``meta`` have no index.

    >>> numbered(torch.device("cpu", 0)), numbered(torch.device("cuda", 1))
    (device(type='cpu'), device(type='cuda', index=1))
    """
    kind, index = device.type, device.index
    if kind in _NO_NUMBER:
        return device if index is None else torch.device(kind)
    if index is not None:
        return device
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    current = here is not None and here.type == kind
    return torch.device(kind, torch.accelerator.current_device_index() if current else 0)


def device_name(device: torch.device | str) -> str:
    """The canonical text of a device: ``cpu``, ``meta``, ``cuda:1``; raises InvalidArgument for other texts.

    >>> device_name("cpu:0"), device_name(torch.device("cuda", 1))
    ('cpu', 'cuda:1')
    """
    try:
        return str(numbered(torch.device(device)))
    except RuntimeError as error:
        raise InvalidArgument(f"{str(device)[:60]!r} is no device: {str(error).splitlines()[0][:200]}") from None


_NO_NUMBER = ("cpu", "meta")


def _is_size(size: int, wanted: Size, symbols: Mapping[str, int]) -> bool:
    if not isinstance(wanted, Dim):
        return size == wanted
    return not symbols.keys() >= set(wanted.symbols) or bool(size == wanted.evaluate(symbols))


@dataclass(frozen=True, slots=True)
class Spec:
    """dtype, shape (ints and Dims) and device, in the form of `device_name`, of one value.

    >>> str(Spec(torch.float32, (Dim("B"), 784)))
    'float32[B, 784]'
    """

    dtype: torch.dtype
    shape: tuple[Size, ...]
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.device != "cpu":
            object.__setattr__(self, "device", device_name(self.device))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """The Spec of a plain tensor."""
        ensure_type(tensor, torch.Tensor, "Spec.of")
        return cls(tensor.dtype, tuple(tensor.shape), str(tensor.device))

    def is_on(self, device: torch.device) -> bool:
        """Whether that is the device."""
        return torch.device(self.device) == numbered(device)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Symbols of the shape, in order of appearance."""
        return tuple(dict.fromkeys(s for d in self.shape if isinstance(d, Dim) for s in d.symbols))

    def sizes(self, symbols: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape with every symbol bound."""
        return tuple(d.evaluate(symbols) if isinstance(d, Dim) else d for d in self.shape)

    def fits(self, shape: Sequence[int], symbols: dict[str, int]) -> bool:
        """Whether a shape matches this spec. ``symbols`` maps known letters to sizes; new letters are added.

        A size that derives from a letter that is not known yet fits any.

        >>> spec, letters = Spec(torch.float32, (Dim("B"), 3)), {}
        >>> spec.fits((2, 3), letters), spec.fits((4, 3), letters), spec.fits((2,), letters), letters
        (True, False, False, {'B': 2})
        """
        if tuple(shape) == self.shape:
            return True  # without a look at each size: servers ask for each push
        if len(shape) != len(self.shape):
            return False
        for size, wanted in zip(shape, self.shape, strict=True):
            if isinstance(wanted, Dim) and wanted.is_symbol:
                symbols.setdefault(wanted.expr, size)
        return all(_is_size(size, wanted, symbols) for size, wanted in zip(shape, self.shape, strict=True))

    def short(self) -> str:
        """``f32[B, 784]``, for drawings and the text form."""
        return f"{_SHORT.get(self.dtype, dtype_name(self.dtype))}{self._sizes()}"

    def readable(self) -> str:
        """``float32[B, 784] on cuda``, for drawings, with sizes in their usual notation."""
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{dtype_name(self.dtype)}{self._sizes()}{where}"

    def _sizes(self) -> str:
        return f"[{', '.join(size.short() if isinstance(size, Dim) else str(size) for size in self.shape)}]"

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{dtype_name(self.dtype)}{list(self.shape)}{where}"

    def _repr_html_(self) -> str:
        from tfnb.view import spec_html  # listed exception: a repr asks view

        return spec_html(self)
