"""Generator functions: a ``yield`` as a call of the loop over them, and definitions inside of a converted function.

A loop over a generator runs the generator's code with the body of the loop at each ``yield``: so both are one program,
in which loops and branches of either can be staged.
"""

from __future__ import annotations

import ast
from types import CodeType

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.frontend.trees import bound_names, operator_call, placed, walk

GENERATOR = 0x20  # inspect.CO_GENERATOR
_ITEM, _STUB = "ag__item", "ag__generator"


def is_generator(code: CodeType) -> bool:
    """Whether calling the code gives a generator."""
    return bool(code.co_flags & GENERATOR)


def with_yields(function: ast.FunctionDef) -> ast.FunctionDef:
    """A generator function that calls ``ag__.yield_``; raises CannotStage for a ``yield`` that takes or keeps more."""
    function.body = [_Yields().visit(each) for each in function.body]
    for node in walk(function.body):
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            raise CannotStage(f"the generator uses the value of the `yield` of line {node.lineno}")
        if isinstance(node, ast.Try) and node.handlers and any(map(_is_yield, walk(node.body))):
            raise CannotStage(f"the generator has a `yield` inside of the `try` of line {node.lineno}")
    return function


def _is_yield(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "yield_"


class _Yields(ast.NodeTransformer):
    """Replaces the yields of one function, where they are statements."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Yield):
            value = node.value.value or placed(node, ast.Constant(None))
            return placed(node, ast.Expr(operator_call(node, "yield_", value)))  # type: ignore[no-any-return]
        if isinstance(node.value, ast.YieldFrom):
            item = placed(node, ast.Name(_ITEM, ast.Load()))
            body = placed(node, ast.Expr(operator_call(node, "yield_", item)))
            target = placed(node, ast.Name(_ITEM, ast.Store()))
            return placed(node, ast.For(target, node.value.value, [body], [], None))  # type: ignore[no-any-return]
        return node

    def _other_scope(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _other_scope


class Definitions(ast.NodeTransformer):
    """Hides generator functions inside a function during its conversion: each is converted at its own call.

    `visit` leaves a stub that reads the same names, for the analysis of the function around it; `restore` undoes that.
    """

    def __init__(self) -> None:
        self.found: list[ast.FunctionDef] = []

    def hide(self, function: ast.FunctionDef) -> ast.FunctionDef:
        """The function with stubs."""
        function.body = [self.visit(each) for each in function.body]
        return function

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in walk(node.body)):
            return self.generic_visit(node)
        if any(isinstance(each, (ast.Nonlocal, ast.Global)) for each in ast.walk(node)):
            raise CannotStage(f"the generator of line {node.lineno} sets names of outside")
        own = bound_names(node.body) | {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        read = {each.id for part in node.body for each in ast.walk(part) if isinstance(each, ast.Name)} - own
        names = [placed(node, ast.Name(name, ast.Load())) for name in sorted(read)]
        marker = placed(node, ast.Constant(f"{_STUB}_{len(self.found)}"))
        self.found.append(node)
        body = placed(node, ast.Return(placed(node, ast.Tuple([marker, *names], ast.Load()))))
        stub = ast.FunctionDef(**{name: getattr(node, name, None) for name in node._fields} | {"body": [body]})
        return placed(node, stub)  # type: ignore[no-any-return]

    def restore(self, function: ast.FunctionDef) -> ast.FunctionDef:
        """The function with its definitions in the place of stubs."""
        marks = {f"{_STUB}_{place}": node for place, node in enumerate(self.found)}
        for node in ast.walk(function) if marks else ():
            if isinstance(node, ast.FunctionDef) and (mark := _mark(node)) in marks:
                node.body, node.decorator_list = marks[mark].body, marks[mark].decorator_list
        return function


def _mark(node: ast.FunctionDef) -> str:
    """The marker of a stub, not of an enclosing function."""
    found = (each.value for each in walk(node.body) if isinstance(each, ast.Constant) and isinstance(each.value, str))
    return next((text for text in found if text.startswith(_STUB)), "")
