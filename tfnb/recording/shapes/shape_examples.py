"""Shape rules asked by example: an op's rule on plain sizes, twice, in place of once on symbols.

Sympy makes a rule of torch's slow, and most results have sizes that their arguments have, or none that vary. So each
symbol is given two sizes, a small one and a large prime, so that what is the lesser or the greater of two sizes shows.
A result whose every size is in both cases that of an argument, or in both the same, needs no symbols to be told; all
others are left to the rule on symbols. Symbols go by the order in which they appear in the arguments, so what was told
is told again in another recording: a cell that runs again has new symbols.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_BIG = 20_000  # primes below it, and above any width of a layer, divide none
_SMALL = 3  # of the axes that vary, but for the first, which is mostly the batch: of one row
_KEPT = 8192  # answers
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Fresh(NamedTuple):
    """A result in contiguous memory of its own: int or SymInt sizes."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]


class _Size(NamedTuple):
    """An expression over symbols that are numbered by their first appearance, and the Python type of its value."""

    expr: sympy.Basic
    kind: type


class _Memory(NamedTuple):
    """What a fake tensor is for a rule."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]


class _Other(NamedTuple):
    """An argument without sizes; True, 1 and 1.0 are not the same."""

    kind: type
    value: Any


def ask(args: Any, kwargs: Any, rule: Callable[..., Any]) -> Any:
    """What ``rule`` gives on these fake tensors, each result as Fresh; None where the examples do not tell."""
    described = _Described()
    try:
        question = tuple(map(described.of, args)), tuple((name, described.of(item)) for name, item in kwargs.items())
        told = _told(rule, torch.get_default_dtype(), tuple(described.sizes), *question) if described.sizes else None
    except (LookupError, TypeError, RuntimeError):  # a size that only data tell; what has no hash; what has no strides
        return None
    if told is None or isinstance(told, Fresh):
        return told and described.sized(told)
    return type(told)(each and described.sized(each) for each in told)


class _Described:
    """Arguments in terms that are equal for equal ones of another recording."""

    def __init__(self) -> None:
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}
        self.sizes: dict[_Size, Any] = {}  # of tensors, and numbers: the SymInt of this recording

    def of(self, tree: Any) -> Any:
        """An argument, described."""
        if isinstance(tree, FakeTensor):
            sizes, strides = map(self._counted, tree.shape), map(self._size, tree.stride())
            return _Memory(tree.dtype, tree.device, tuple(sizes), tuple(strides))
        if isinstance(tree, (list, tuple)):
            return _Other(type(tree), tuple(map(self.of, tree)))
        if isinstance(tree, Mapping):
            return _Other(dict, tuple((name, self.of(item)) for name, item in tree.items()))
        size = self._counted(tree)
        return size if isinstance(size, _Size) else _Other(type(tree), tree)

    def _counted(self, size: Any) -> Any:
        found = self._size(size)
        if isinstance(size, torch.SymInt):
            self.sizes.setdefault(found, size)
        return found

    def _size(self, size: Any) -> Any:
        if not isinstance(size, _SYMBOLIC):
            return size
        if size.node.hint is None:
            raise LookupError("a size that only data tell")
        expr = size.node.expr
        for symbol in sorted(expr.free_symbols - self._names.keys(), key=str):
            self._names[symbol] = _symbol(len(self._names))
        return _Size(expr.xreplace(self._names), size.node.pytype)

    def sized(self, told: Fresh) -> Fresh:
        """A result with this recording's sizes."""
        return told._replace(shape=tuple(self.sizes[s] if isinstance(s, _Size) else s for s in told.shape))


class _Own(threading.local):
    """A thread's fake tensors with plain sizes: a mode is entered by one thread at a time."""

    @cached_property
    def mode(self) -> FakeTensorMode:
        """The mode that the rules run in."""
        return FakeTensorMode()

    @cached_property
    def tensor(self) -> Callable[[_Memory, int], torch.Tensor]:
        """The fake tensor for a memory, with its first or second sizes."""
        return lru_cache(_KEPT)(self._made)

    @staticmethod
    def _made(like: _Memory, at: int) -> torch.Tensor:
        sizes, strides = ([_number(s, at) for s in part] for part in (like.shape, like.stride))
        return torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)


_OWN = _Own()


@lru_cache(_KEPT)
def _told(
    rule: Callable[..., Any], _default: torch.dtype, sizes: tuple[_Size, ...], args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
) -> Any:  # fmt: skip
    """The answer to a question: sizes of results are numbers, or of ``sizes``."""
    known = {_examples(size): size for size in sizes}
    if len(known) < len(sizes) or any(first == second for first, second in known):
        return None  # two sizes with the same examples, or one like a number
    try:
        with _OWN.mode:
            one, two = (
                rule(*(_example(item, at) for item in args), **{name: _example(item, at) for name, item in kwargs})
                for at in (0, 1)
            )
    except Exception:  # the rule on symbols says what is wrong, or what has to be equal
        return None
    if not isinstance(one, (list, tuple)):
        return _result(one, two, known)
    if len(one) != len(two):  # as many parts as a size has
        return None
    results = [_result(a, b, known) for a, b in zip(one, two, strict=True)]
    told = all(r is not None or a is None for r, a in zip(results, one, strict=True))
    return type(one)(results) if told and type(one) in (list, tuple) else None


def _example(described: Any, at: int) -> Any:
    """An argument with the first or the second example of each size."""
    match described:
        case _Size():
            return _examples(described)[at]
        case _Memory():
            return _OWN.tensor(described, at)
        case _Other(kind=kind, value=value) if issubclass(kind, (list, tuple)):
            return kind([_example(item, at) for item in value])
        case _Other(kind=kind, value=value) if kind is dict:
            return {name: _example(item, at) for name, item in value}
    return described.value


def _number(size: Any, at: int) -> Any:
    return _examples(size)[at] if isinstance(size, _Size) else size


@cache
def _symbol(place: int) -> sympy.Symbol:
    return sympy.Symbol(f"n{place}", integer=True, positive=True)


@cache
def _values(place: int) -> tuple[sympy.Integer, sympy.Integer]:
    """The examples of a symbol: the smaller the one, the larger the other, so the lesser of two is like neither."""
    small = _SMALL + place - 1 if place else 1
    return sympy.Integer(small), sympy.Integer(sympy.prevprime(_values(place - 1)[1] if place else _BIG))


@lru_cache(_KEPT)
def _examples(size: _Size) -> tuple[Any, Any]:
    """The two examples of an expression."""
    numbers = {symbol: _values(int(str(symbol)[1:])) for symbol in size.expr.free_symbols}
    first, second = (size.expr.xreplace({symbol: pair[at] for symbol, pair in numbers.items()}) for at in (0, 1))
    return size.kind(first), size.kind(second)


def _result(a: Any, b: Any, known: Mapping[tuple[Any, Any], _Size]) -> Fresh | None:
    """One result from those of the two examples."""
    if type(a) is not FakeTensor or a.layout is not torch.strided or a.dtype != b.dtype or a.dim() != b.dim():
        return None
    if a.storage_offset() or not (a.is_contiguous() and b.is_contiguous()):
        return None
    sizes = []
    for pair in zip(a.shape, b.shape, strict=True):
        size = known.get(pair, pair[0] if pair[0] == pair[1] else None)
        if size is None:
            return None
        sizes.append(size)
    return Fresh(a.dtype, a.device, tuple(sizes))
