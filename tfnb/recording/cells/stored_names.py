"""The names to which the statements of a block, and the functions that they may call, give values.

A Python branch that a run would take the other way may give away any of them.
"""

from __future__ import annotations

import ast
import dis
import gc
import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType

from tfnb.recording.marks.block_names import Namespace

_STORE_GLOBAL, _STORE_CELL = dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"]
_BY_TEXT = {"globals", "modules"}  # what a function that stores by the text of a name asks for


def stored_from(body: Sequence[ast.stmt], line: int | None) -> set[str]:
    """The names that the statement of a block at this line, or one below it, gives to a value."""
    below = [statement for statement in body if line is not None and (statement.end_lineno or 0) >= line]
    nodes = [node for statement in below for node in ast.walk(statement)]
    named = [node for node in nodes if isinstance(node, ast.Name)]
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    by_text = set(texts) if any(node.id == "globals" for node in named) else set()
    return by_text | {node.id for node in named if isinstance(node.ctx, ast.Store)}


def stored_by_functions(space: Namespace) -> set[str]:
    """The names that functions of a namespace give to values: by ``global``, ``nonlocal`` or ``globals()``.

    A function counts wherever it is held: by a class, a ``functools.partial``, a wrapper, a list.
    """
    functions = (each for each in gc.get_referrers(space.names) if isinstance(each, FunctionType))
    codes = (each.__code__ for each in functions if each.__globals__ is space.names)
    waiting = [code for code in codes if code.co_flags & inspect.CO_NEWLOCALS]  # not that of a module
    found = set[str]() if space.function is None else _given_to_cells(space.function)
    while waiting:
        code = waiting.pop()
        waiting += _inner(code)
        found |= _stored(code, _STORE_GLOBAL)
        found |= set(_texts(code.co_consts)) if _BY_TEXT.intersection(code.co_names) else set()
    return found


def _given_to_cells(code: CodeType) -> set[str]:
    """The names of a function, or of functions around it, that functions inside declare ``nonlocal`` and store."""
    found = set[str]()
    for inner in _inner(code):
        found |= _stored(inner, _STORE_CELL) & set(inner.co_freevars)
        found |= _given_to_cells(inner) - set(inner.co_cellvars)
    return found


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _stored(code: CodeType, by: int) -> set[str]:
    """The names that an instruction stores in a code."""
    if by not in code.co_code[::2]:
        return set()
    return {each.argval for each in dis.get_instructions(code) if each.opcode == by}


def _texts(constants: Iterable[object]) -> Iterator[str]:
    """The strings among the constants of a code, also those of tuples: names of keyword arguments."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _texts(constant)
