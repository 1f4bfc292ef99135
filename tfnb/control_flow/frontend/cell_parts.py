"""The statements of a cell as separate code objects: factories of converted code, or plain code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.frontend.expressions import Plain
from tfnb.control_flow.frontend.source import CELL, FUNCTION, CodeOrigin, compiled, with_operators, worth
from tfnb.control_flow.frontend.tree_copies import copied
from tfnb.control_flow.frontend.trees import (
    CONTROL,
    bound_names,
    definition,
    has_control,
    no_arguments,
    placed,
)

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True, slots=True)
class CellPart:
    """Statements of a cell: their code, either a factory or unchanged Python, and the reason for the latter."""

    code: CodeType
    is_factory: bool
    why: str = ""
    names: frozenset[str] = frozenset()  # bound here, and by no statement of the cell above, nor read before
    is_loop: bool = False


def cell_parts(
    body: Sequence[ast.stmt], result: ast.expr | None, filename: str, flags: int = 0
) -> tuple[list[CellPart], CodeType | None]:
    """The statements of a cell in order, and its final expression; raises CannotStage if that cannot be converted.

    A factory is, with the namespace as its globals, a function of the operators that gives a function to be called.
    """
    parts = _Parts(CodeOrigin(filename, CELL, CELL, flags))
    found = [parts.part(group) for group in _grouped(body)]
    return found, None if result is None else parts.code([placed(result, ast.Return(result))])[0]


def cell_text(body: Sequence[ast.stmt], result: ast.expr | None) -> str:
    """The text of a cell as converted by `cell_parts`: calls of operators, and reasons for unconverted code."""
    found = []
    for group in _grouped([*body, *([] if result is None else [placed(result, ast.Expr(result))])]):
        line = group[0].lineno
        if isinstance(group[0], ast.FunctionDef):
            found += [_text(each.lineno, lambda of=each: _defined(of)) for each in group]  # type: ignore[misc]
        elif _stays(group[0]) or not any(map(worth, group)):
            found.append("\n".join(map(ast.unparse, group)))
        else:
            tree = _Parts(CodeOrigin("", CELL, CELL, 0)).tree
            found.append(_text(line, lambda of=group, tree=tree: tree(copied(of))))  # type: ignore[misc]
    return "\n\n".join(found)


def _defined(tree: ast.stmt) -> ast.AST:
    """A definition in the form it is converted to when called."""
    tree = copied(tree)
    return with_operators(tree) if isinstance(tree, ast.FunctionDef) and worth(tree) else tree


def _text(line: int, tree: Callable[[], ast.AST]) -> str:
    try:
        return ast.unparse(ast.fix_missing_locations(tree()))
    except CannotStage as why:
        return f"# line {line} stays Python: {why}"


class _Parts:
    """The statements of a cell, one group after the other."""

    def __init__(self, place: CodeOrigin) -> None:
        self.place = place
        self.above: set[str] = set()  # names bound so far
        self.unsure: set[str] = set()  # those that a statement with control flow bound

    def part(self, group: list[ast.stmt]) -> CellPart:
        """The next group."""
        mine, is_control = bound_names(group), has_control(group)
        found, why = None, ""
        if not _stays(group[0]) and (any(map(worth, group)) or self.unsure & _names(group)):
            try:
                code, needed = self.code(copied(group))
                names = frozenset(mine - self.above - needed) if is_control else frozenset()
                found = CellPart(code, True, "", names, isinstance(group[0], (ast.For, ast.While)))
            except CannotStage as error:
                why = f"line {group[0].lineno}: {error}"
        self.above |= mine
        if is_control:
            self.unsure |= mine
        if found is not None:
            return found
        whole = ast.Module(group, [])
        return CellPart(compile(whole, self.place.filename, "exec", self.place.flags, dont_inherit=True), False, why)

    def code(self, body: list[ast.stmt]) -> tuple[CodeType, set[str]]:
        """The factory of statements, and the names that they read before they bind them."""
        function = self.tree(body)
        read: list[set[str]] = getattr(function, "read", [])  # of each statement with control flow, the outermost last
        needed = set().union(*(read[-1:] if isinstance(body[0], CONTROL) else read))
        return compiled(function, self.place, ()), needed

    def tree(self, body: list[ast.stmt]) -> ast.FunctionDef:
        """Statements as a function that calls operators."""
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, (ast.ImportFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)):
                raise CannotStage("imports and await stay as they are")
        names = sorted(bound_names(body))
        inside: list[ast.stmt] = [Plain().visit(statement) for statement in body]
        if names:
            inside.insert(0, placed(body[0], ast.Global(names)))
        return with_operators(placed(body[0], definition(FUNCTION, no_arguments(), inside)), self.unsure)


def _names(body: Iterable[ast.AST]) -> set[str]:
    return {node.id for each in body for node in ast.walk(each) if isinstance(node, ast.Name)}


def _stays(statement: ast.stmt) -> bool:
    """Whether a statement of a cell stays unconverted: definitions, converted when called, and magics that use their
    frame.
    """
    is_magic = any(isinstance(n, ast.Name) and n.id == "get_ipython" for n in ast.walk(statement))
    return isinstance(statement, _DEFINITIONS) or is_magic


def _grouped(body: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
    """Statements with control flow each by itself, the others together."""
    groups: list[list[ast.stmt]] = []
    last = ""
    for statement in body:
        kind = "as it is" if _stays(statement) else "control" if has_control([statement]) else "plain"
        if kind != last or kind == "control":
            groups.append([])
        groups[-1].append(statement)
        last = kind
    return groups
