"""Shape rules asked by example: an op's rule on plain sizes, twice, in place of once on symbols.

Sympy makes a rule of torch's slow, and most results have sizes that their arguments have, or none that vary. So each
symbol is given two sizes, a small one and a large prime, so that what is the lesser or the greater of two sizes shows.
A result whose every size is in both cases that of an argument, or in both the same, needs no symbols to be told; all
others are left to the rule on symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_BIG = 20_000  # primes below it, and above any width of a layer, divide none
_SMALL = 3  # of the axes that vary, but for the first, which is the batch: of one row


class Fresh(NamedTuple):
    """A result in contiguous memory of its own: int or SymInt sizes."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]


class Examples:
    """Two plain fake tensors for each symbolic one."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self._sizes: dict[Any, tuple[Any, Any]] = {}  # expression -> its two values
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of a fake tensor that stays
        self._small: dict[sympy.Symbol, sympy.Integer] = {}
        self._primes: dict[sympy.Symbol, sympy.Integer] = {}

    def forget(self) -> None:
        """Sizes became equal or fixed."""
        self._sizes.clear()
        self._tensors.clear()

    def ask(self, args: Any, kwargs: Any, rule: Callable[..., Any]) -> Any:
        """What ``rule`` gives on these fake tensors, each result as Fresh; None where the examples do not tell."""
        known: dict[tuple[Any, Any], Any] = {}
        try:
            first, second = ([self._example(tree, known, at) for tree in (args, kwargs)] for at in (0, 1))
            if not known:
                return None
            with self.mode:
                one, two = rule(*first[0], **first[1]), rule(*second[0], **second[1])
        except Exception:  # the rule on symbols says what is wrong, or what has to be equal
            return None
        if not isinstance(one, (list, tuple)):
            return _result(one, two, known)
        if len(one) != len(two):  # as many parts as a size has
            return None
        results = [_result(a, b, known) for a, b in zip(one, two, strict=True)]
        told = all(r is not None or a is None for r, a in zip(results, one, strict=True))
        return type(one)(results) if told and type(one) in (list, tuple) else None

    def _example(self, tree: Any, known: dict[tuple[Any, Any], Any], at: int) -> Any:
        """``tree`` with plain sizes; what they stand for is added to ``known``."""
        if isinstance(tree, FakeTensor):
            for size in tree.shape:
                self._size(size, known, at)
            return self._tensor(tree)[at]
        if isinstance(tree, (list, tuple)):
            return type(tree)([self._example(item, known, at) for item in tree])
        if isinstance(tree, Mapping):
            return {name: self._example(item, known, at) for name, item in tree.items()}
        return self._size(tree, known, at)

    def _size(self, size: Any, known: dict[tuple[Any, Any], Any], at: int) -> Any:
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        pair = self._pair(size)
        if isinstance(size, torch.SymInt):
            if known.setdefault(pair, size) is not size and known[pair].node.expr != size.node.expr:
                raise LookupError("two sizes with the same examples")
            if pair[0] == pair[1]:
                raise LookupError("a size like a number")
        return pair[at]

    def _pair(self, size: Any) -> tuple[Any, Any]:
        expr = size.node.expr
        found = self._sizes.get(expr)
        if found is None:
            if size.node.hint is None:
                raise LookupError("a size that only data tell")
            for symbol in sorted(expr.free_symbols - self._primes.keys(), key=str):
                # the smaller the one, the larger the other: the lesser of two symbols is like neither of them
                count = len(self._primes)
                self._small[symbol] = sympy.Integer(_SMALL + count - 1 if count else 1)
                self._primes[symbol] = sympy.Integer(sympy.prevprime(min(self._primes.values(), default=_BIG)))
            kind = size.node.pytype
            found = self._sizes[expr] = kind(expr.xreplace(self._small)), kind(expr.xreplace(self._primes))
        return found

    def _tensor(self, fake: FakeTensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._tensors.get(id(fake))
        if found is None:
            with self.mode:
                made = [
                    torch.empty_strided(
                        [self._plain(s, at) for s in fake.shape], [self._plain(s, at) for s in fake.stride()],
                        dtype=fake.dtype, device=fake.device,
                    )
                    for at in (0, 1)
                ]  # fmt: skip
            found = self._tensors[id(fake)] = made[0], made[1]
        return found

    def _plain(self, size: Any, at: int) -> int:
        return self._pair(size)[at] if isinstance(size, torch.SymInt) else size


def _result(a: Any, b: Any, known: dict[tuple[Any, Any], Any]) -> Fresh | None:
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
