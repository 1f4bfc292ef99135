"""Attributes that the code of a class reads before setting them, from its bytecode.

`forward` is followed into the methods that it names, in the order in which it names them. So ``self.n += 1`` reads
``n``, and ``self.attention = w`` followed by a use of it does not: its value before the call has no part in the result.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

_found: weakref.WeakKeyDictionary[type, dict[str, _AttributeUses]] = weakref.WeakKeyDictionary()
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_BY_NAME = ("getattr", "hasattr")  # whose second argument is a text
GROWS = ("append", "extend", "insert", "clear")  # methods of a list that do not read it


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
    return _uses_of(kind, method).reads


def attribute_uses(kind: type, method: str = "forward") -> frozenset[str]:
    """Names of attributes that a method of a class may read or set, on any object."""
    return _uses_of(kind, method).all


class _AttributeUses(NamedTuple):
    """Names of the attributes that a method reads before setting them, and of all that it uses."""

    reads: tuple[str, ...]
    all: frozenset[str]


def _uses_of(kind: type, method: str) -> _AttributeUses:
    of_kind = _found.get(kind)
    if of_kind is None:
        of_kind = _found[kind] = {}
    found = of_kind.get(method)
    if found is None:
        first: dict[str, bool] = {}  # name -> whether it is read before it is set
        for name, is_read in _uses(kind, method, set()):
            first.setdefault(name, is_read)
        reads = tuple(name for name, is_read in first.items() if is_read)
        found = of_kind[method] = _AttributeUses(reads, frozenset(first))
    return found


def _uses(kind: type, name: str, seen: set[CodeType]) -> Iterator[tuple[str, bool]]:
    """(name, whether read or written) of each attribute use in all functions of this name in a class and its bases."""
    for base in kind.__mro__:
        if base is torch.nn.Module or base is object:
            return
        found = vars(base).get(name)
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        function = function.func if isinstance(function, cached_property) else function
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, FunctionType) and function.__code__ not in seen:
            seen.add(function.__code__)
            yield from _in_code(kind, function.__code__, seen)


def _in_code(kind: type, code: CodeType, seen: set[CodeType]) -> Iterator[tuple[str, bool]]:
    by_name = not set(_BY_NAME).isdisjoint(code.co_names)
    steps = list(dis.get_instructions(code))
    for step, after in pairwise([*steps, steps[-1]]):
        value: Any = step.argval
        if step.opname.startswith(_READS) and after.opname.startswith(_READS) and after.argval in GROWS:
            continue  # a log
        if step.opname.startswith(_READS):
            yield value, True
            yield from _uses(kind, value, seen)
        elif step.opname == "STORE_ATTR":
            yield value, False
        elif isinstance(value, CodeType):
            yield from _in_code(kind, value, seen)
        elif by_name and step.opname == "LOAD_CONST" and isinstance(value, str) and value.isidentifier():
            yield value, True


@lru_cache(4096)
def names_of_attributes(code: CodeType) -> frozenset[str]:
    """Names of the attributes that code and its inner functions read, before they set them, of any object; no logs.

    >>> sorted(names_of_attributes((lambda x, log: log.values.append(x * x.options.scale)).__code__))
    ['append', 'options', 'scale']
    """
    steps = list(dis.get_instructions(code))
    first: dict[str, bool] = {}  # name -> whether it is read before it is set
    for step, after in pairwise([*steps, steps[-1]]):
        is_log = after.opname.startswith(_READS) and after.argval in GROWS
        if step.opname == "STORE_ATTR" or (step.opname.startswith(_READS) and not is_log):
            first.setdefault(step.argval, step.opname != "STORE_ATTR")
    found = {name for name, is_read in first.items() if is_read}
    if not set(_BY_NAME).isdisjoint(code.co_names):
        found |= {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= names_of_attributes(each)
    return frozenset(found)
