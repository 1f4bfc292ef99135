"""Expressions as calls of operators, for expressions that malt leaves out."""

from __future__ import annotations

import ast
from collections.abc import Container
from typing import Any

from tfnb.control_flow.frontend.trees import HIDDEN, never_tensor, no_arguments, operator_call, placed, thunk, walk

# Calls that look at the frame they stand in, or whose answer never is a tensor.
_AS_WRITTEN = frozenset({
    "super", "locals", "globals", "vars", "dir", "eval", "exec", "breakpoint", "issubclass", "hasattr", "callable",
    "id", "format",
})  # fmt: skip


class Asserts(ast.NodeTransformer):
    """``assert a, b`` as ``if a: pass; else: raise AssertionError(b)``: a way that only raises becomes a guard."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if not __debug__ or never_tensor(node.test):
            return node
        error: ast.expr = placed(node, ast.Name("AssertionError", ast.Load()))
        if node.msg is not None:
            error = placed(node, ast.Call(error, [node.msg], []))
        ways = [placed(node, ast.Pass())], [placed(node, ast.Raise(error, None))]
        return placed(node, ast.If(node.test, *ways))  # type: ignore[no-any-return]


class Walrus(ast.NodeTransformer):
    """``while (a := b): c`` as ``while True: if not (a := b): break; c``: malt makes a function of a test."""

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        if any(isinstance(n, ast.NamedExpr) for n in walk([node.test])):
            stop = placed(node.test, ast.UnaryOp(ast.Not(), node.test))
            node.body.insert(0, placed(node.test, ast.If(stop, [placed(node.test, ast.Break())], [])))
            node.test = placed(node.test, ast.Constant(True))
        return node


class Plain(ast.NodeTransformer):
    """Annotated assignments as plain ones: a global name cannot be annotated, and malt sees none of them."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        if node.value is None:
            return placed(node, ast.Pass())
        return placed(node, ast.Assign([node.target], node.value, None))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node


def told_names(function: ast.FunctionDef) -> ast.FunctionDef:
    """A function that first declares its nonlocal and global names to the operators."""
    names = [name for n in walk(function.body) if isinstance(n, (ast.Nonlocal, ast.Global)) for name in n.names]
    if names:
        first = function.body[0]
        has_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        told = operator_call(first, "rebinds", *(placed(first, ast.Constant(name)) for name in names))
        function.body.insert(has_text, placed(first, ast.Expr(told)))
    return function


class Expressions(ast.NodeTransformer):
    """Calls, ``and``, ``or``, ``not``, conditional expressions and chained comparisons as operators."""

    def __init__(self, unsure: Container[str]) -> None:
        self.unsure = unsure

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_unsure = isinstance(node.ctx, ast.Load) and node.id in self.unsure
        return operator_call(node, "ld", node) if is_unsure else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _is_operator(node.func):
            self.generic_visit(node)
            return node
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _AS_WRITTEN:
            return node
        if isinstance(node.func, ast.Attribute):  # in a chain over several lines, the line of this method
            node.lineno = node.func.end_lineno or node.lineno
            node.col_offset = max(0, (node.func.end_col_offset or 0) - len(node.func.attr))
        node.func = operator_call(node.func, "fn", node.func)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if _binds(node.body) or _binds(node.orelse) or never_tensor(node.test):
            return self.generic_visit(node)
        self.generic_visit(node)
        return operator_call(node, "if_exp", node.test, thunk(node.body), thunk(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if any(map(_binds, node.values)) or never_tensor(node):
            return self.generic_visit(node)
        self.generic_visit(node)
        name = "and_" if isinstance(node.op, ast.And) else "or_"
        *values, last = node.values
        for value in reversed(values):
            last = operator_call(node, name, value, thunk(last))
        return last

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return operator_call(node, "not_", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """``a < b < c`` as ``(lambda a, b: a < b and b < c)(a, b)``: b is computed once, and c only if a < b."""
        if len(node.ops) == 1 or never_tensor(node) or any(map(_binds, node.comparators[1:])):
            return self._pair(node)
        left, right = f"ag__left_{len(node.ops)}", f"ag__right_{len(node.ops)}"

        def name(text: str) -> ast.Name:
            return placed(node, ast.Name(text, ast.Load()))

        first = placed(node, ast.Compare(name(left), node.ops[:1], [name(right)]))
        rest = self.visit(placed(node, ast.Compare(name(right), node.ops[1:], node.comparators[1:])))
        both = no_arguments()
        both.args = [placed(node, ast.arg(text, None, None)) for text in (left, right)]
        chain = placed(node, ast.Lambda(both, operator_call(node, "and_", first, thunk(rest))))
        return placed(node, ast.Call(chain, [self.visit(node.left), self.visit(node.comparators[0])], []))

    def _pair(self, node: ast.Compare) -> ast.AST:
        """``a in b`` and ``a == []``: Python compares the elements of the list."""
        sides = (node.left, node.comparators[0])
        looks = isinstance(node.ops[0], (ast.In, ast.NotIn)) or any(isinstance(side, ast.List) for side in sides)
        self.generic_visit(node)
        if looks and len(node.ops) == 1 and not never_tensor(node):
            node.left = operator_call(node.left, "plain", node.left)
            node.comparators = [operator_call(side, "plain", side) for side in node.comparators]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """``a, *b = c``."""
        self.generic_visit(node)
        are_parts = any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)
        if are_parts and not isinstance(node.value, ast.Tuple):
            node.value = operator_call(node.value, "plain", node.value)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(each) if isinstance(each, ast.FunctionDef) else each for each in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name.startswith("ag__set_state"):
            return _Attributes().visit(node)
        if node.name.startswith("ag__get_state"):
            return node
        self.generic_visit(node)
        return node if node.name.startswith(HIDDEN) else told_names(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        name = placed(node.target, ast.Name(node.target.id, ast.Load()))
        kind = placed(node, ast.Constant(type(node.op).__name__))
        return placed(node, ast.Assign([node.target], operator_call(node, "augmented", kind, name, node.value), None))

    # What is made and what is written, for a staged body to know the one from the other.

    def _made(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        return (
            node if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)) else operator_call(node, "made", node)
        )

    visit_List = visit_Dict = visit_Set = visit_ListComp = visit_DictComp = visit_SetComp = _made

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            node.value = operator_call(node, "changed", node.value)
        elif isinstance(node.slice, ast.Slice):
            ends = (node.slice.lower, node.slice.upper, node.slice.step)
            return operator_call(node, "part", node.value, *(end or placed(node, ast.Constant(None)) for end in ends))
        elif _is_index(node.slice):
            return operator_call(node, "item", node.value, node.slice)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.iter = operator_call(node.iter, "items", node.iter)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            node.value = operator_call(node, "changed", node.value, placed(node, ast.Constant(node.attr)))
        return node


class _Attributes(ast.NodeTransformer):
    """Attributes that are carried, as `containers.attribute`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.ctx, ast.Load):
            return node
        name = placed(node, ast.Constant(node.attr))
        return placed(node, ast.Attribute(operator_call(node, "attribute", node.value, name), "value", node.ctx))


def _is_index(node: ast.expr) -> bool:
    """Whether an index expression may be the number of an element."""
    return not isinstance(node, (ast.Slice, ast.Tuple)) and not (
        isinstance(node, ast.Constant) and not isinstance(node.value, int)
    )


def _binds(node: ast.AST) -> bool:
    """Whether an expression cannot stand in a function of its own."""
    return any(isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for n in ast.walk(node))


def _is_operator(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (
        node.value.id == HIDDEN or node.value.id.startswith("ag__scope")
    )  # fmt: skip
