"""Attributes that the code of a class reads before setting them, from its bytecode.

`forward` is followed into the methods that it names, in the order in which it names them. So ``self.n += 1`` reads
``n``, and ``self.attention = w`` followed by a use of it does not: its value before the call has no part in the result.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

_found: weakref.WeakKeyDictionary[type, dict[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_BY_NAME = ("getattr", "hasattr")  # whose second argument is a text


def attribute_reads(kind: type, method: str = "forward") -> tuple[str, ...]:
    """Names of attributes that a method of a class may read before setting them, on any object.

    >>> class Counted(torch.nn.Module):
    ...     def forward(self, x):
    ...         self.n += 1
    ...         self.last = x * self.scale
    ...         return self.last
    >>> attribute_reads(Counted)
    ('n', 'scale')
    """
    of_kind = _found.setdefault(kind, {})
    if method not in of_kind:
        first: dict[str, bool] = {}  # name -> whether it is read before it is set
        for name, is_read in _uses(kind, method, set()):
            first.setdefault(name, is_read)
        of_kind[method] = tuple(name for name, is_read in first.items() if is_read)
    return of_kind[method]


def _uses(kind: type, name: str, seen: set[CodeType]) -> Iterator[tuple[str, bool]]:
    """(name, whether read or written) of each attribute use in all functions of this name in a class and its bases."""
    for base in kind.__mro__:
        if base is torch.nn.Module or base is object:
            return
        found = vars(base).get(name)
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, FunctionType) and function.__code__ not in seen:
            seen.add(function.__code__)
            yield from _in_code(kind, function.__code__, seen)


def _in_code(kind: type, code: CodeType, seen: set[CodeType]) -> Iterator[tuple[str, bool]]:
    by_name = not set(_BY_NAME).isdisjoint(code.co_names)
    for step in dis.get_instructions(code):
        value: Any = step.argval
        if step.opname.startswith(_READS):
            yield value, True
            yield from _uses(kind, value, seen)
        elif step.opname == "STORE_ATTR":
            yield value, False
        elif isinstance(value, CodeType):
            yield from _in_code(kind, value, seen)
        elif by_name and step.opname == "LOAD_CONST" and isinstance(value, str) and value.isidentifier():
            yield value, True
