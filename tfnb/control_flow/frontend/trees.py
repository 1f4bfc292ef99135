"""Syntax trees: of a function, its bound names, its possibly tensor-dependent parts, and construction of nodes."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.frontend.edited_files import edited_tree, is_edited, is_of

HIDDEN = "ag__"  # what converted code calls the operators
CONTROL = (ast.If, ast.While, ast.For)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_NAMING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
_NEVER_TENSORS = frozenset({"isinstance", "issubclass", "hasattr", "callable"})


def bound_names(body: Iterable[ast.AST]) -> set[str]:
    """The names that statements bind in the scope they stand in."""
    found: set[str] = set()
    for node in walk(body):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, _NAMING) and node.name is not None:
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def walk(nodes: Iterable[ast.AST], *, targets: bool = True) -> Iterable[ast.AST]:
    """The nodes of one scope: without nested functions and classes, and without names bound by comprehensions."""
    for node in nodes:
        if not targets and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            continue
        yield node
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, ast.comprehension):
            yield from walk([node.target], targets=False)
            yield from walk([node.iter, *node.ifs], targets=targets)
        else:
            yield from walk(ast.iter_child_nodes(node), targets=targets)


def has_control(body: Iterable[ast.AST]) -> bool:
    """Whether statements of these bodies branch or loop on a possible tensor."""
    return any(isinstance(node, (*CONTROL, ast.Match, ast.Assert)) and _may_stage(node) for node in walk(body))


def _may_stage(node: ast.AST) -> bool:
    if isinstance(node, ast.For):
        leaves = any(isinstance(n, (ast.Break, ast.Continue, ast.Return)) for n in walk(node.body))
        return leaves or not _is_plain_range(node.iter)
    if isinstance(node, ast.Match):
        return not never_tensor(node.subject)
    return not never_tensor(node.test)  # type: ignore[attr-defined]


def _is_plain_range(node: ast.expr) -> bool:
    """``range(3)``, and a list, tuple or string as written."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        return all(isinstance(arg, ast.Constant) for arg in node.args)
    return isinstance(node, (ast.List, ast.Tuple, ast.Constant, ast.ListComp))


def never_tensor(test: ast.expr) -> bool:
    """Whether a test can never depend on a tensor."""
    if isinstance(test, ast.Constant):
        return True
    if isinstance(test, ast.BoolOp):
        return all(map(never_tensor, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return never_tensor(test.operand)
    if isinstance(test, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in _NEVER_TENSORS


# -- making -------------------------------------------------------------------------------------------------------


def definition(name: str, args: ast.arguments, body: list[ast.stmt]) -> ast.FunctionDef:
    kinds: dict[str, Any] = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
    return ast.FunctionDef(name, args, body, [], returns=None, type_comment=None, **kinds)


def no_arguments() -> ast.arguments:
    return ast.arguments(
        posonlyargs=[], args=[], vararg=None, kwonlyargs=[], kw_defaults=[], kwarg=None, defaults=[]
    )  # fmt: skip


def operator_call(at: ast.AST, name: str, *args: ast.expr) -> ast.Call:
    call = placed(
        at, ast.Call(placed(at, ast.Attribute(placed(at, ast.Name(HIDDEN, ast.Load())), name, ast.Load())), [*args], [])
    )
    for node in (call.func, call.func.value):  # Python takes the last line of a method for that of its call
        node.end_lineno, node.end_col_offset = node.lineno, node.col_offset + 1
    return call  # type: ignore[no-any-return]


def named_handlers(function: ast.FunctionDef) -> ast.FunctionDef:
    """``except X as e: ...`` as ``except X: e = ...``, which malt can analyse; in place."""
    for node in ast.walk(function):
        if isinstance(node, ast.ExceptHandler) and node.name is not None:
            name = placed(node, ast.Name(node.name, ast.Store()))
            node.body.insert(0, placed(node, ast.Assign([name], operator_call(node, "caught"))))
            node.name = None
    return function


def thunk(node: ast.expr) -> ast.Lambda:
    args = no_arguments()
    args.vararg = placed(node, ast.arg(f"{HIDDEN}nothing", None, None))  # by which `_renamed` knows it
    return placed(node, ast.Lambda(args, node))


def placed(old: ast.AST, new: Any) -> Any:
    """``new`` at the place of ``old``."""
    return ast.copy_location(new, old)


# -- of a function, also of a cell, and of lambdas; with the lines of its file ----------------------------------------


def tree_of(code: CodeType) -> ast.FunctionDef | ast.Lambda:
    """The definition that ``code`` was compiled from; raises CannotStage."""
    if is_edited(code.co_filename):
        return edited_tree(code)
    lines = linecache.getlines(code.co_filename)
    if not 0 < code.co_firstlineno <= len(lines):
        raise CannotStage("its source is not there")
    tree = _parsed(lines, code)
    kind = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    found: list[Any] = [n for n in ast.walk(tree) if isinstance(n, kind) and is_of(n, code)]
    if not found:
        raise CannotStage("its source is not there, or is another one by now")
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
        raise CannotStage("its source cannot be read by itself") from None


def _length(node: ast.AST) -> int:
    return len(ast.dump(node))
