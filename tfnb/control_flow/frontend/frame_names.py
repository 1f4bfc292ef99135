"""``locals()``, ``vars()``, ``dir()``, ``eval(text)`` and ``exec(text)``: builtins that use the calling frame.

Converted code has other frames than the code that was written: a call of these is given the names of the scope that it
was written in. In a cell these are the names of the notebook, so what ``exec`` binds there is bound.
"""

from __future__ import annotations

import ast
from typing import Any

from tfnb.control_flow.frontend.trees import bound_names, operator_call, placed, thunk, walk

_ARGUMENTS = {"locals": 0, "vars": 0, "dir": 0, "eval": 1, "exec": 1}  # more of them say which names are meant


class FrameNames(ast.NodeTransformer):
    """Calls that look at their frame as ``ag__.of_frame(function, names, *args)``; names: None where a cell stands."""

    def __init__(self) -> None:
        self.scopes: list[set[str]] = []  # the names of the function around, and of lambdas and comprehensions in it

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        is_plain = not node.keywords and not any(isinstance(each, ast.Starred) for each in node.args)
        if not is_plain or _ARGUMENTS.get(name) != len(node.args):
            return node
        return operator_call(node, "of_frame", node.func, self._names(node), *node.args)

    def _names(self, node: ast.AST) -> ast.expr:
        if not self.scopes:
            return placed(node, ast.Constant(None))  # type: ignore[no-any-return]
        names = sorted(set().union(*self.scopes))
        texts = [placed(node, ast.Constant(name)) for name in names]
        values = [placed(node, ast.Name(name, ast.Load())) for name in names]
        loads: list[ast.expr] = [operator_call(node, "ldu", thunk(v), t) for v, t in zip(values, texts, strict=True)]
        return placed(node, ast.Dict(texts, loads))  # type: ignore[no-any-return]

    def _within(self, node: Any, names: set[str]) -> ast.AST:
        self.scopes.append(names)
        node = self.generic_visit(node)
        self.scopes.pop()
        return node  # type: ignore[no-any-return]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        declared = {name for each in walk(node.body) if isinstance(each, ast.Global) for name in each.names}
        outer, self.scopes = self.scopes, []
        node = self._within(node, (_parameters(node.args) | bound_names(node.body)) - declared)  # type: ignore[assignment]
        self.scopes = outer
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return self._within(node, _parameters(node.args))

    def _comprehension(self, node: Any) -> ast.AST:
        targets = [each for part in node.generators for each in ast.walk(part.target) if isinstance(each, ast.Name)]
        return self._within(node, {each.id for each in targets})

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """The body of a class is no code of ours; its methods are."""
        node.body = [self.visit(each) if isinstance(each, ast.FunctionDef) else each for each in node.body]
        return node


def _parameters(args: ast.arguments) -> set[str]:
    return {each.arg for each in ast.walk(args) if isinstance(each, ast.arg)}
