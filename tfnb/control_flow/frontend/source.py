"""A function's source with its control flow as calls: ``if`` becomes ``ag__.if_stmt(test, body, orelse, ...)``.

`diastatic-malt`, which is TensorFlow's AutoGraph as a library, finds what each statement reads and writes, and makes
functions of bodies. Here is what it leaves out: private names, ``super()``, and true lines: every frame of converted
code stands in the user's file, at the user's line, under the user's name.

Knows nothing of graphs. malt is loaded when the first statement is converted.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Container, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.frontend.edited_files import first_line
from tfnb.control_flow.frontend.expressions import Asserts, Expressions, Plain, Walrus, told_names
from tfnb.control_flow.frontend.frame_names import FrameNames
from tfnb.control_flow.frontend.trees import (
    CONTROL,
    HIDDEN,
    definition,
    has_control,
    no_arguments,
    placed,
)
from tfnb.control_flow.frontend.yields import Definitions, is_generator, with_yields

CELL = "<module>"  # what Python calls the code of a cell
_FACTORY, _OUTER, FUNCTION = "ag__made", "ag__outer", "ag__function"
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def function_code(code: CodeType, tree: ast.FunctionDef | ast.Lambda) -> CodeType:
    """The factory of the converted function: takes the operators, has its closure. Raises CannotStage.

    The tree has the lines of the file that ``code`` is of.
    """
    owner, first = code.co_qualname.split(".")[-2:-1], first_line(tree)
    if is_generator(code):
        tree = with_yields(tree)  # type: ignore[arg-type]  # no lambda
    tree = _prepared(tree, owner[0] if owner and owner[0] != "<locals>" else None)
    tree = tree if isinstance(tree, ast.FunctionDef) else _as_function(tree)
    body = told_names(with_operators(tree, is_generator=is_generator(code)))
    place = CodeOrigin(code.co_filename, code.co_name, code.co_qualname, code.co_flags & _FUTURE, first)
    return compiled(body, place, code.co_freevars)


def bound(factory: CodeType, function: FunctionType, operators: object) -> FunctionType:
    """The converted function with the globals, closure, defaults and attributes of the one that was written."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in factory.co_freevars)
    new: FunctionType = FunctionType(factory, function.__globals__, closure=closure)(operators)
    new.__defaults__, new.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    new.__doc__, new.__module__ = function.__doc__, function.__module__
    return new


_WORTH = (
    *CONTROL,
    ast.Match,
    ast.Assert,
    ast.Call,
    ast.IfExp,
    ast.BoolOp,
    ast.Not,
    ast.AugAssign,
    ast.comprehension,
    ast.Nonlocal,
    ast.Global,
)


def worth(tree: ast.AST) -> bool:
    """Whether there is anything that may be staged, or that a staged statement has to know of."""
    return any(
        isinstance(n, _WORTH)
        or (isinstance(n, ast.Compare) and len(n.ops) > 1)
        or (isinstance(n, (ast.Attribute, ast.Subscript)) and not isinstance(n.ctx, ast.Load))
        for n in ast.walk(tree)
    )


# -- preparing ----------------------------------------------------------------------------------------------------


def _as_function(node: ast.Lambda) -> ast.FunctionDef:
    return placed(node, definition(FUNCTION, node.args, [placed(node.body, ast.Return(node.body))]))  # fmt: skip


def _prepared(tree: Any, owner: str | None) -> Any:
    """A definition without decorators, defaults, annotations and private names, which belong to its original scope."""
    given = tree.args
    given.defaults = [placed(tree, ast.Constant(None)) for _ in given.defaults]
    given.kw_defaults = [d and placed(tree, ast.Constant(None)) for d in given.kw_defaults]
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    if isinstance(tree, ast.FunctionDef):
        tree.decorator_list, tree.returns = [], None
        tree.name = FUNCTION  # not to hide a global of its own name
    first = [*given.posonlyargs, *given.args][:1]
    return _OfClass(owner, first[0].arg if first else None).visit(Plain().visit(tree))


class _OfClass(ast.NodeTransformer):
    """Expands the short forms of a method: ``self.__x`` and ``super()``."""

    def __init__(self, owner: str | None, first: str | None) -> None:
        self.prefix = None if owner is None else f"_{owner.lstrip('_')}"
        self.first = first

    def _name(self, name: str) -> str:
        return f"{self.prefix}{name}" if self.prefix and name.startswith("__") and not name.endswith("__") else name

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self._name(node.attr)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._name(node.id)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and self.first:
            node.args = [placed(node, ast.Name(name, ast.Load())) for name in ("__class__", self.first)]
        return node


# -- converting and compiling -------------------------------------------------------------------------------------


def with_operators(
    function: ast.FunctionDef, unsure: Container[str] | None = None, *, is_generator: bool = False
) -> ast.FunctionDef:  # fmt: skip
    """Control flow and expressions as calls of operators.

    unsure: the names of a cell that may have no value; None for a function. is_generator: the loop over it may be left
    in some runs, so that the end of any loop in it depends on a tensor.
    """
    generators = Definitions()
    function = generators.hide(function)
    for node in ast.walk(function):
        if (why := _left_to_python(node)) is not None:
            raise CannotStage(why)
    if unsure is None:
        function = FrameNames().visit(function)
    else:
        function.body = [FrameNames().visit(each) for each in function.body]
    function = Asserts().visit(function)
    if is_generator or has_control([n for n in ast.walk(function) if isinstance(n, CONTROL)]):
        from tfnb.control_flow.frontend.autograph_frontend import with_calls

        Walrus().visit(function)
        function = with_calls(function)
    return generators.restore(Expressions(unsure or ()).visit(function))


def _left_to_python(node: ast.AST) -> str | None:
    """The reason why a function with this statement is left to Python; None if there is none."""
    if isinstance(node, (ast.Yield, ast.YieldFrom, ast.AsyncFunctionDef)):
        return "a `yield` in a lambda, or an async function, is in it"
    if isinstance(node, ast.Match):
        return f"the `match` of line {node.lineno} is in it: write `if` and `elif`"
    if isinstance(node, (ast.For, ast.While)) and node.orelse:
        return f"the loop of line {node.lineno} has an `else`: set a name before its `break`, and ask for that below it"
    return None


@dataclass(frozen=True, slots=True)
class CodeOrigin:
    """The file, name and first line that converted code belongs to."""

    filename: str
    name: str
    qualname: str
    flags: int
    first: int = 1


def compiled(function: ast.FunctionDef, place: CodeOrigin, free: Sequence[str]) -> CodeType:
    """The code of a factory that takes the operators, with the closure that the function has."""
    factory = definition(_FACTORY, no_arguments(), [function, ast.Return(ast.Name(function.name, ast.Load()))])
    factory.args.args = [ast.arg(HIDDEN, None, None)]
    cells = [ast.Assign([ast.Name(each, ast.Store())], ast.Constant(None), None) for each in free]
    outer = definition(_OUTER, no_arguments(), [*cells, factory])
    for node in (outer, factory):
        ast.copy_location(node, function)
        node.lineno = getattr(function, "lineno", 1)
    module = ast.Module([outer], [])
    ast.fix_missing_locations(module)
    _begin(factory, place.first)
    try:
        whole = compile(module, place.filename, "exec", place.flags, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise CannotStage(str(error)) from None
    code = _inside(_inside(whole, _OUTER), _FACTORY)
    return _renamed(code, function.name, place.name, place.qualname)


def _begin(node: ast.AST, first: int) -> None:
    """Bodies begin where the function begins that they are of: so inspect and IPython find their text."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name.startswith(HIDDEN):
            child.lineno = first
        elif isinstance(child, ast.FunctionDef):
            _begin(child, min([child.lineno, *(d.lineno for d in child.decorator_list)]))
            continue
        elif isinstance(child, ast.Lambda) and child.args.vararg and child.args.vararg.arg.startswith(HIDDEN):
            child.lineno = first
        _begin(child, first)


def _inside(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _renamed(code: CodeType, old: str, name: str, qualname: str) -> CodeType:
    """Bodies under the name of the function that they are of."""

    def consts(code: CodeType, name: str, qualname: str) -> tuple[Any, ...]:
        return tuple(new(c, name, qualname) if isinstance(c, CodeType) else c for c in code.co_consts)

    def new(code: CodeType, name: str, qualname: str) -> CodeType:
        if code.co_name.startswith(HIDDEN) or (
            code.co_name == "<lambda>" and code.co_varnames[:1] and (code.co_varnames[0].startswith(HIDDEN))
        ):
            return code.replace(co_name=name, co_qualname=qualname, co_consts=consts(code, name, qualname))
        if code.co_name != "<lambda>" and not code.co_name.isidentifier():  # a comprehension
            return code.replace(co_consts=consts(code, name, qualname))
        inner = code.co_name if qualname == CELL else f"{qualname}.<locals>.{code.co_name}"
        return code.replace(co_qualname=inner, co_consts=consts(code, code.co_name, inner))

    return code.replace(co_consts=tuple(
        c.replace(co_name=name, co_qualname=qualname, co_consts=consts(c, name, qualname))
        if isinstance(c, CodeType) and c.co_name == old else c for c in code.co_consts
    ))  # fmt: skip
