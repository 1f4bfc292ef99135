"""Names that the code of a cell or block reads before it assigns them, and the numbers that they stand for."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from types import CodeType, FrameType
from typing import Any, NamedTuple

_FEW = 64  # items of a list, tuple or dict of numbers
NUMBERS = (bool, int, float, complex)
_SAMPLES = "placeholder"  # a function whose arguments are samples: what they are made of is no part of the graph


class NameRead(NamedTuple):
    """A name that is read, or an attribute of what the name stands for."""

    name: str
    attribute: str = ""

    def __str__(self) -> str:
        return f"{self.name}.{self.attribute}" if self.attribute else self.name


def names_read(statements: Sequence[ast.stmt]) -> list[NameRead]:
    """The names and attributes that statements read before they assign the names, in order.

    >>> names_read(ast.parse("y = x * scale + model.beta; n = 3; z = y * n").body)
    [NameRead(name='x', attribute=''), NameRead(name='scale', attribute=''), NameRead(name='model', attribute='beta')]
    """
    found: dict[NameRead, None] = {}
    assigned: set[str] = set()
    for statement in statements:
        for read in _reads(statement):
            if read.name not in assigned:
                found[read] = None
        assigned |= {
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            assigned.add(statement.name)
    return list(found)


def _reads(node: ast.AST) -> Iterator[NameRead]:
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == _SAMPLES:
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield NameRead(node.value.id, node.attr)
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield NameRead(node.target.id)
        yield from _reads(node.value)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield NameRead(node.id)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _reads(child)


def block_of(frame: FrameType) -> list[ast.stmt]:
    """The statements of the ``with`` block that a frame begins; none where its text is not known."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[frame.f_lineno - 1 :]
    try:
        block = ast.parse(dedent("".join(inspect.getblock(lines)))).body
    except (SyntaxError, IndentationError, IndexError):
        return []
    return block[0].body if block and isinstance(block[0], ast.With | ast.AsyncWith) else []


@dataclass(frozen=True, slots=True)
class Namespace:
    """The names of a cell, or of a block in a script or function."""

    names: Mapping[str, Any]
    function: CodeType | None = None  # of the block's function, whose names are found while it runs

    @classmethod
    def of(cls, frame: FrameType) -> Namespace:
        """The names of a frame."""
        return cls(frame.f_globals, None if frame.f_locals is frame.f_globals else frame.f_code)

    def get(self, name: str) -> Any:
        """What a name stands for now; None for one that is not there, or whose function does not run any more."""
        frame: FrameType | None = None if self.function is None else sys._getframe(1)
        while frame is not None and frame.f_code is not self.function:
            frame = frame.f_back
        found = self.names.get(name) if frame is None else frame.f_locals.get(name, self)
        return self.names.get(name) if found is self else found


def numbers(value: Any) -> Any:
    """A number, or a copy of a short list, tuple or dict of numbers; None for other values."""
    if type(value) in NUMBERS:
        return value
    if type(value) is dict and len(value) < _FEW and all(type(each) in NUMBERS for each in value.values()):
        return dict(value)
    if type(value) in (list, tuple) and len(value) < _FEW and all(type(each) in NUMBERS for each in value):
        return type(value)(value)
    return None
