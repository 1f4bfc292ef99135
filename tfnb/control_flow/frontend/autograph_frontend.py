"""Passes of `diastatic-malt` that we use: break, continue and return as flags, bodies as functions, undefined names.

Its passes run on trees with the lines of the user's file; each node that they make gets the line of the statement it
was made from, so that the tree is compiled as it is, without another file and a map between the two.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from typing import Any

assert importlib.util  # malt uses it and does not import it

from malt.converters import (  # noqa: E402
    break_statements,
    continue_statements,
    control_flow,
    return_statements,
    variables,
)
from malt.core import converter  # noqa: E402
from malt.pyct import anno, cfg, naming, qual_names, templates, transformer  # noqa: E402
from malt.pyct.errors import PyCTError  # noqa: E402
from malt.pyct.static_analysis import (  # noqa: E402
    activity,
    annos,
    liveness,
    reaching_definitions,
    reaching_fndefs,
)

from tfnb.control_flow.frontend.cannot_stage import CannotStage  # noqa: E402
from tfnb.control_flow.frontend.trees import HIDDEN, named_handlers, walk  # noqa: E402

_PLACE = ("lineno", "col_offset", "end_lineno", "end_col_offset")


def with_calls(function: ast.FunctionDef) -> ast.FunctionDef:
    """The function with its control flow as calls; raises CannotStage."""
    function, late = named_handlers(function), _late(function)
    names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    info = transformer.EntityInfo(function.name, "", "", (), dict.fromkeys(names))
    context = transformer.Context(info, _Namer(info.namespace), converter.ProgramContext(None))
    for node in ast.walk(function):
        if hasattr(node, "lineno"):
            anno.setanno(node, anno.Basic.ORIGIN, _origin(node))
    kinds = {type(node) for node in ast.walk(function)}
    try:
        function = _analysed(function, context)
        anno.dup(function, {anno.Static.DEFINITIONS: anno.Static.ORIG_DEFINITIONS})
        function = _Scopes(context).visit(_resolved(function, context))
        if ast.Break in kinds:
            function = _Breaks(context).visit(_resolved(function, context))
        if kinds & {ast.Break, ast.Continue}:
            function = _Continues(context).visit(_resolved(function, context))
        if ast.Return in kinds:
            function = return_statements.ConditionalReturnRewriter(context).visit(_resolved(function, context))
            function = _Returns(context, True).visit(_resolved(function, context))
        graphs = cfg.build(qual_names.resolve(function))
        function = _resolved(function, context)
        for analysis in (reaching_definitions, reaching_fndefs, liveness):
            function = analysis.resolve(function, context, graphs)
        bodies = _Bodies(context, _read_by_lambdas(function), late)
        function = bodies.visit(function)
        function = variables.transform(function, context)
    except (PyCTError, ValueError, NotImplementedError, AssertionError, KeyError, AttributeError) as error:
        raise CannotStage(f"AutoGraph cannot convert it ({str(error) or type(error).__name__})") from error
    _place(function, None)
    function.read = bodies.read  # type: ignore[attr-defined]  # for the parts of a cell
    return function


def _read_by_lambdas(function: ast.FunctionDef) -> set[str]:
    """Names that lambdas read, whenever they are called; malt takes their parameters for names of the function."""
    found, parameters, bound = set[str](), set[str](), set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Lambda):
            found |= {n.id for n in ast.walk(node.body) if isinstance(n, ast.Name)}
            parameters |= {n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)}
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
    return found - (parameters - bound)


def _late(function: ast.FunctionDef) -> dict[str, int]:
    """Parameters of inner functions that are names of the function, too, by the first line that binds them in it:
    malt takes each for a definition of the name.
    """
    inner = [node for node in ast.walk(function) if isinstance(node, (ast.Lambda, ast.FunctionDef))]
    names = {n.arg for node in inner if node is not function for n in ast.walk(node.args) if isinstance(n, ast.arg)}
    names -= {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}
    found: dict[str, int] = {}
    for node in walk(function.body):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
            found[node.id] = min(node.lineno, found.get(node.id, node.lineno))
    return found


def _origin(node: object) -> tuple[int, int, int, int]:
    """The position of a node; for a statement with a body its beginning, where its operator is called."""
    if hasattr(node, "body") and isinstance(node, ast.stmt):
        return node.lineno, node.col_offset, node.lineno, node.col_offset + 1
    return tuple(getattr(node, name) for name in _PLACE)  # type: ignore[return-value]


class _Namer(naming.Namer):
    """Names that no user has."""

    def new_symbol(self, name_root: str, reserved_locals: object) -> str:
        root = name_root if name_root.startswith(HIDDEN) else f"{HIDDEN}{name_root}"
        return str(super().new_symbol(root, reserved_locals))


def _resolved(node: object, context: object) -> Any:
    return activity.resolve(qual_names.resolve(node), context, None)


def _analysed(node: object, context: object) -> Any:
    graphs = cfg.build(node)
    return reaching_definitions.resolve(_resolved(node, context), context, graphs)


def _place(node: ast.AST, place: Any) -> None:
    """Lines as compile() wants them, from the annotations."""
    place = anno.getanno(node, anno.Basic.ORIGIN, default=place)
    if place is not None and "lineno" in node._attributes:
        for name, value in zip(_PLACE, place, strict=True):
            setattr(node, name, value)
    for child in ast.iter_child_nodes(node):
        _place(child, place)


class _KeepsPosition:
    """A mixin that gives generated statements the position of their original."""

    def visit(self, node: object) -> Any:
        origin = anno.getanno(node, anno.Basic.ORIGIN, default=None) if isinstance(node, ast.AST) else None
        found = super().visit(node)  # type: ignore[misc]
        if origin is not None:
            for made in found if isinstance(found, (list, tuple)) else (found,):
                _stamp(made, origin)
        return found


def _stamp(node: object, origin: object) -> None:
    if isinstance(node, ast.AST) and not anno.hasanno(node, anno.Basic.ORIGIN):
        if node._attributes:
            anno.setanno(node, anno.Basic.ORIGIN, origin)
        for child in ast.iter_child_nodes(node):
            _stamp(child, origin)


class _Function:
    level = 0


class _Scopes(_KeepsPosition, converter.Base):
    """Wraps each function's body in a scope object, whose result is the function's value."""

    def visit_FunctionDef(self, node: Any) -> Any:
        with self.state[_Function] as scope:
            body = anno.getanno(node, annos.NodeAnno.BODY_SCOPE)
            name = self.ctx.namer.new_symbol("ag__scope", body.referenced)
            anno.setanno(node, "function_context_name", name)
            node = self.generic_visit(node)
            if scope.level > 2:
                node.decorator_list.append(templates.replace_as_expression("ag__.marked"))
        first = node.body[0]
        has_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        head, rest = (node.body[:1], node.body[1:]) if has_text else ([], node.body)
        wrapped = templates.replace("with ag__.scope() as name:\n  body", name=name, body=rest or [ast.Pass()])
        node.body = [*head, *wrapped]
        return node


class _Breaks(_KeepsPosition, break_statements.BreakTransformer):
    pass


class _Continues(_KeepsPosition, continue_statements.ContinueCanonicalizationTransformer):
    pass


class _Returns(_KeepsPosition, return_statements.ReturnStatementsTransformer):
    pass


class _Bodies(_KeepsPosition, control_flow.ControlFlowTransformer):
    """Bodies as functions. Names bound in a cell, and outside names bound in a function, count as live afterwards."""

    def __init__(self, context: object, closures: set[str], late: Mapping[str, int]) -> None:
        super().__init__(context)
        self.closures = closures  # names that lambdas read, whenever they are called
        self.late = late  # names that have no value above a line
        self.read: list[set[str]] = []  # of each statement: the names that it reads before it binds them

    def _get_block_basic_vars(self, modified: Any, live_in: object, live_out: object) -> Any:
        found = super()._get_block_basic_vars(modified, live_in, live_out)
        return found | frozenset(filter(self._is_needed, modified))

    def _is_needed(self, name: object) -> bool:
        """Whether a name is global, nonlocal or read by an inner function: malt does not see their readers."""
        scope = self.state[control_flow._Function].scope
        return name in scope.globals or name in scope.nonlocals or str(name) in self.closures

    def _get_block_vars(self, node: object, modified: Any) -> Any:
        names, undefined, count = super()._get_block_vars(node, modified)
        origin = anno.getanno(node, anno.Basic.ORIGIN, default=None)
        if origin is not None and self.state[control_flow._Function].level == 2:  # a root, and the outermost one
            more = (name for name in modified if self.late.get(str(name), 0) >= origin[0] and name not in undefined)
            undefined = (*undefined, *more)
        self.read.append({str(name) for name in anno.getanno(node, anno.Static.LIVE_VARS_IN)})
        needed = [name for place, name in enumerate(names) if place < count or self._is_needed(name)]
        return [*needed, *(name for name in names if name not in needed)], undefined, len(needed)

    def _get_block_composite_vars(self, modified: object, live_in: object) -> Any:
        found = super()._get_block_composite_vars(modified, live_in)
        return frozenset(name for name in found if not name.has_subscript())

    def _create_state_functions(self, block_vars: object, nonlocals: object, getter: object, setter: object) -> Any:
        made = super()._create_state_functions(block_vars, nonlocals, getter, setter)
        taken = {str(name) for name in self.state[control_flow._Function].scope.globals}
        if block_vars:
            (result,) = (node for node in made[0].body if isinstance(node, ast.Return))
            result.value.elts = [  # type: ignore[union-attr]  # a tuple, as malt makes it
                _loaded(each) if _named(each) in taken else _carried(each)
                for each in result.value.elts  # type: ignore[union-attr]
            ]
        return made


def _named(node: object) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _carried(node: object) -> Any:
    """The read of a carried attribute, by itself or in malt's ``ag__.ldu(lambda: owner.name, text)``."""
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Lambda):
        node.args[0].body = _carried(node.args[0].body)
    if not isinstance(node, ast.Attribute):
        return node
    text = ast.Constant(node.attr)
    return templates.replace_as_expression("ag__.attribute(owner, text).carried", owner=node.value, text=text)


def _loaded(node: ast.Name) -> Any:
    return templates.replace_as_expression("ag__.ldu(lambda: name, text)", name=node, text=ast.Constant(node.id))
