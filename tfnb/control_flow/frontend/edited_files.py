"""Definitions in files edited after the program began: finds the source that a code object was compiled from.

IPython's autoreload compiles an edited definition by itself, from the text that `ast.unparse` gives, so its lines are
not those of the file; and what was not edited keeps the lines that it had before. So a definition is found by what it
compiles to, and code that no definition gives any more is not converted.
"""

from __future__ import annotations

import ast
import linecache
import textwrap
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.frontend.tree_copies import copied

_BEGAN = time.time()
_CLASS = "__autoreload_class__"  # what autoreload puts around a method
Definition = ast.FunctionDef | ast.Lambda


def is_edited(filename: str) -> bool:
    """Whether a file was written since the program began."""
    try:
        return Path(filename).stat().st_mtime > _BEGAN
    except (OSError, ValueError):  # no file
        return False


def edited_tree(code: CodeType) -> Definition:
    """The definition in the current file, with its lines; raises CannotStage if its code has changed."""
    linecache.checkcache(code.co_filename)
    for other, node in _definitions("".join(linecache.getlines(code.co_filename))):
        if _same(other, code):
            return copied(node)  # a conversion changes it
    raise CannotStage("its source was edited since and not loaded again")


@lru_cache(maxsize=8)
def _definitions(text: str) -> list[tuple[CodeType, Definition]]:
    """Code objects of a file, as Python and as autoreload compile them, with the definitions."""
    try:
        tree = ast.parse(text)
        whole = list(_codes(compile(tree, "<file>", "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        raise CannotStage("its source cannot be read") from None
    nodes = [node for node in ast.walk(tree) if isinstance(node, Definition)]
    found = [(code, node) for code in whole for node in nodes if is_of(node, code)]
    for body, is_class in _bodies(tree):
        for node in body:
            if isinstance(node, ast.FunctionDef):
                own = next(code for code, other in found if other is node)
                inside = {id(code): each for code, each in found}
                pairs = zip(_codes(own), _codes(_compiled_alone(node, is_class=is_class)), strict=True)
                found += [(alone, inside[id(code)]) for code, alone in pairs if id(code) in inside]
    return found


def _bodies(tree: ast.Module) -> Iterator[tuple[list[ast.stmt], bool]]:
    """The bodies of the module and its classes, and whether each is a class body."""
    yield tree.body, False
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for each in classes:
        classes += [node for node in each.body if isinstance(node, ast.ClassDef)]
        yield each.body, True


def _compiled_alone(node: ast.FunctionDef, *, is_class: bool) -> CodeType:
    text = ast.unparse(node)
    if is_class:
        text = f"class {_CLASS}:\n{textwrap.indent(text, '    ')}"
    codes = _codes(compile(text, "<file>", "exec", dont_inherit=True))
    return next(code for code in codes if code.co_name == node.name)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and its nested code objects, in order."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _same(a: CodeType, b: CodeType) -> bool:
    """Whether they do the same, at any lines."""
    return _facts(a) == _facts(b) and all(
        _same(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else type(x) is type(y) and x == y
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


def _facts(code: CodeType) -> tuple[object, ...]:
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_name, code.co_code, len(code.co_consts), *names


def is_of(node: Definition, code: CodeType) -> bool:
    """Whether a code object has the name, arguments and lines of a definition."""
    args = node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    if isinstance(node, ast.FunctionDef):
        return first_line(node) == code.co_firstlineno and node.name == code.co_name and _fits(names, code)
    return code.co_name == "<lambda>" and _fits(names, code) and all(
        (node.body.lineno, node.body.col_offset) <= (line, column)
        and (end, end_column) <= (node.body.end_lineno, node.body.end_col_offset)
        for line, end, column, end_column in code.co_positions()
        if line and end and column is not None and end_column is not None and end_column > column
    )  # fmt: skip


def first_line(node: Definition) -> int:
    """The first line of a function in Python's count: its first decorator, if any."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _fits(names: list[str], code: CodeType) -> bool:
    count = code.co_argcount + code.co_kwonlyargcount
    return [n.rpartition("__")[2] for n in names] == [n.rpartition("__")[2] for n in code.co_varnames[:count]]
