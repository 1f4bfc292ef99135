"""Syntax trees of files and cells, and the definitions of functions in them."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from types import FunctionType
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def tree(file: str) -> ast.Module | None:
    """The syntax tree of a file or cell; lines of magics are empty there. None without source."""
    return _tree(file, "".join(linecache.getlines(file)))


@lru_cache(maxsize=64)
def _tree(file: str, text: str) -> ast.Module | None:
    rows = ["" if row.lstrip().startswith(("%", "!")) else row for row in text.splitlines()]
    try:
        return ast.parse("\n".join(rows)) if text else None
    except SyntaxError:
        return None


def around(found: ast.Module, line: int) -> Any:
    """The innermost function that the line stands in the body of."""
    outer = [
        node for node in ast.walk(found)
        if isinstance(node, FUNCTIONS) and node.body[0].lineno <= line <= (node.end_lineno or 0)
    ]  # fmt: skip
    return max(outer, key=lambda node: node.lineno, default=None)


def definition(function: FunctionType) -> Any:
    """The definition of a function by ``def``; None for a lambda, and without source."""
    code = function.__code__
    found = tree(code.co_filename)
    for node in () if found is None else ast.walk(found):
        if isinstance(node, FUNCTIONS) and node.name == code.co_name and code.co_firstlineno == _first_line(node):
            return node
    return None


def only_in_texts(function: ast.AST, name: str) -> bool:
    """Whether a function uses a name in f-strings, ``str`` and ``format`` alone.

    >>> whole = ast.parse("def f(): return f'layer {next(numbers)}'")
    >>> only_in_texts(whole, "numbers"), only_in_texts(whole, "next")
    (True, True)
    >>> only_in_texts(ast.parse("y = x * next(numbers)"), "numbers")
    False
    """
    nodes = list(ast.walk(function))
    texts = [node for node in nodes if isinstance(node, ast.JoinedStr) or _is_text(node)]
    inside = {id(inner) for text in texts for inner in ast.walk(text)}
    return all(id(node) in inside for node in nodes if isinstance(node, ast.Name) and node.id == name)


def _is_text(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "id", getattr(called, "attr", "")) in ("str", "format")


def _first_line(node: Any) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])
