"""From a function's code to its source as a tree, with the lines of its file: also of cells, and of lambdas."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Sequence
from types import CodeType
from typing import Any

from tfnb.control_flow.staging.trees import NotConvertible


def tree_of(code: CodeType) -> ast.FunctionDef | ast.Lambda:
    """The definition that ``code`` was compiled from; raises NotConvertible."""
    lines = linecache.getlines(code.co_filename)
    if not 0 < code.co_firstlineno <= len(lines):
        raise NotConvertible("its source is not there")
    tree = _parsed(lines, code)
    kind = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    found: list[Any] = [n for n in ast.walk(tree) if isinstance(n, kind) and _is_of(n, code)]
    if not found:
        raise NotConvertible("its source is not there, or is another one by now")
    return min(found, key=_length)


def _parsed(lines: Sequence[str], code: CodeType) -> ast.AST:
    """The statement that begins at the first line of ``code``, or else the file."""
    first = code.co_firstlineno
    block = "".join(inspect.getblock(list(lines[first - 1 :])))
    head = "if 1:\n" if block[:1].isspace() else "\n"  # an indented one as it stands: its strings keep their lines
    try:
        return ast.increment_lineno(ast.parse(head + block), first - 2)
    except SyntaxError:  # the middle of an expression
        pass
    try:
        return ast.parse("".join(lines))
    except SyntaxError:
        raise NotConvertible("its source cannot be read by itself") from None


def _is_of(node: ast.FunctionDef | ast.Lambda, code: CodeType) -> bool:
    args = node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    if isinstance(node, ast.FunctionDef):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        return first == code.co_firstlineno and node.name == code.co_name and _fits(names, code)
    return _fits(names, code) and all(
        (node.body.lineno, node.body.col_offset) <= (line, column)
        and (end, end_column) <= (node.body.end_lineno, node.body.end_col_offset)
        for line, end, column, end_column in code.co_positions()
        if line and end and column is not None and end_column is not None and end_column > column
    )


def _fits(names: Sequence[str], code: CodeType) -> bool:
    count = code.co_argcount + code.co_kwonlyargcount
    return [n.rpartition("__")[2] for n in names] == [n.rpartition("__")[2] for n in code.co_varnames[:count]]


def _length(node: ast.AST) -> int:
    return len(ast.dump(node))
