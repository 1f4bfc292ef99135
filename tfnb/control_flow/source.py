"""A function's source with its control flow as calls: ``if`` becomes ``ag__.if_stmt(test, body, orelse, ...)``.

`diastatic-malt`, which is TensorFlow's AutoGraph as a library, finds what each statement reads and writes, and makes
functions of bodies. Here is what it leaves out: expressions, private names, ``super()``, the body of a cell, and true
lines: every frame of converted code stands in the user's file, at the user's line, under the user's name.

Knows nothing of graphs. malt is loaded when the first statement is converted.
"""

from __future__ import annotations
import __future__

import ast
import copy
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

HIDDEN = "ag__"  # what converted code calls the operators
CELL = "<module>"  # what Python calls the code of a cell
_FACTORY, _OUTER, _FUNCTION = "ag__made", "ag__outer", "ag__function"
_CONTROL = (ast.If, ast.While, ast.For)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
# Calls that look at the frame they stand in, or whose answer never is a tensor.
_AS_WRITTEN = frozenset({
    "super", "locals", "globals", "vars", "dir", "eval", "exec", "breakpoint", "isinstance", "issubclass", "hasattr",
    "callable", "type", "id", "repr", "str", "format",
})  # fmt: skip
_NEVER_TENSORS = frozenset({"isinstance", "issubclass", "hasattr", "callable"})


class NotConvertible(Exception):
    """Source that stays Python, and why."""


_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def function_code(code: CodeType, tree: ast.FunctionDef | ast.Lambda) -> CodeType:
    """The factory of the converted function: takes the operators, has its closure. Raises NotConvertible.

    The tree has the lines of the file that ``code`` is of.
    """
    owner = code.co_qualname.split(".")[-2:-1]
    tree = _prepared(tree, owner[0] if owner and owner[0] != "<locals>" else None)
    body = _converted(tree if isinstance(tree, ast.FunctionDef) else _as_function(tree))
    place = _Place(code.co_filename, code.co_name, code.co_qualname, code.co_flags & _FUTURE, code.co_firstlineno)
    return _compiled(body, place, code.co_freevars)


def bound(factory: CodeType, function: FunctionType, operators: Any) -> FunctionType:
    """The converted function with the globals, closure, defaults and attributes of the one that was written."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in factory.co_freevars)
    new: FunctionType = FunctionType(factory, function.__globals__, closure=closure)(operators)
    new.__defaults__, new.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    new.__doc__, new.__module__ = function.__doc__, function.__module__
    return new


_NAMING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)


def worth(tree: ast.AST) -> bool:
    """Whether there is anything that may be staged."""
    kinds = (*_CONTROL, ast.Call, ast.IfExp, ast.BoolOp, ast.Not)
    return any(isinstance(n, kinds) or (isinstance(n, ast.Compare) and len(n.ops) > 1) for n in ast.walk(tree))


@dataclass(frozen=True, slots=True)
class Part:
    """Statements of a cell: their code, which is a factory unless they stay as they are, and why they do."""

    code: CodeType
    is_factory: bool
    why: str = ""
    names: frozenset[str] = frozenset()  # bound here, and by no statement of the cell above, nor read before
    is_loop: bool = False


def cell_parts(
    body: Sequence[ast.stmt], result: ast.expr | None, filename: str, flags: int = 0
) -> tuple[list[Part], CodeType | None]:
    """The statements of a cell in order, and its final expression; raises NotConvertible if that cannot be converted.

    A factory is, with the namespace as its globals, a function of the operators that gives a function to be called.
    """
    parts = _Parts(_Place(filename, CELL, CELL, flags))
    found = [parts.part(group) for group in _grouped(body)]
    return found, None if result is None else parts.code([_at(result, ast.Return(result))])[0]


class _Parts:
    """The statements of a cell, one group after the other."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.above: set[str] = set()  # names bound so far
        self.unsure: set[str] = set()  # those that a statement with control flow bound

    def part(self, group: list[ast.stmt]) -> Part:
        """The next group."""
        mine, has_control = _bound(group), _has_control(group)
        found, why = None, ""
        if not _stays(group[0]) and (any(map(worth, group)) or self.unsure & _names(group)):
            try:
                code, needed = self.code(copy.deepcopy(group))
                names = frozenset(mine - self.above - needed) if has_control else frozenset()
                found = Part(code, True, "", names, isinstance(group[0], (ast.For, ast.While)))
            except NotConvertible as error:
                why = f"line {group[0].lineno}: {error}"
        self.above |= mine
        if has_control:
            self.unsure |= mine
        if found is not None:
            return found
        whole = ast.Module(group, [])
        return Part(compile(whole, self.place.filename, "exec", self.place.flags, dont_inherit=True), False, why)

    def code(self, body: list[ast.stmt]) -> tuple[CodeType, set[str]]:
        """The factory of statements, and the names that they read before they bind them."""
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, (ast.ImportFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)):
                raise NotConvertible("imports and await stay as they are")
        names = sorted(_bound(body))
        inside: list[ast.stmt] = [_Plain().visit(statement) for statement in body]
        if names:
            inside.insert(0, _at(body[0], ast.Global(names)))
        function = _converted(_at(body[0], _definition(_FUNCTION, _arguments(), inside)), self.unsure)
        read: list[set[str]] = getattr(function, "read", [])  # of each statement with control flow, the outermost last
        needed = set().union(*(read[-1:] if isinstance(body[0], _CONTROL) and not _left(body[0]) else read))
        return _compiled(function, self.place, ()), needed


def _left(statement: ast.stmt) -> bool:
    """Whether it is a loop with an ``else``, which becomes two statements."""
    return isinstance(statement, (ast.For, ast.While)) and bool(statement.orelse)


def _names(body: Iterable[ast.AST]) -> set[str]:
    return {node.id for each in body for node in ast.walk(each) if isinstance(node, ast.Name)}


@dataclass(frozen=True, slots=True)
class _Place:
    """What converted code is of."""

    filename: str
    name: str
    qualname: str
    flags: int
    first: int = 1


def _stays(statement: ast.stmt) -> bool:
    """Whether a statement of a cell stays as it is: definitions are converted when they are called, and IPython's
    magics look at the frame they stand in."""
    is_magic = any(isinstance(n, ast.Name) and n.id == "get_ipython" for n in ast.walk(statement))
    return isinstance(statement, _DEFINITIONS) or is_magic


def _grouped(body: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
    """Statements with control flow each by itself, the others together."""
    groups: list[list[ast.stmt]] = []
    last = ""
    for statement in body:
        kind = "as it is" if _stays(statement) else "control" if _has_control([statement]) else "plain"
        if kind != last or kind == "control":
            groups.append([])
        groups[-1].append(statement)
        last = kind
    return groups


class _Plain(ast.NodeTransformer):
    """Annotated assignments of a cell as plain ones: a global name cannot be annotated."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        if node.value is None:
            return _at(node, ast.Pass())
        return _at(node, ast.Assign([node.target], node.value, None))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # type: ignore[assignment]


def _bound(body: Iterable[ast.AST]) -> set[str]:
    """The names that statements bind in the scope they stand in."""
    found: set[str] = set()
    for node in _walk(body):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, _NAMING) and node.name is not None:
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def _walk(nodes: Iterable[ast.AST], *, targets: bool = True) -> Iterable[ast.AST]:
    """The nodes of one scope: not those inside of functions and classes, nor what comprehensions bind."""
    for node in nodes:
        if not targets and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            continue
        yield node
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, ast.comprehension):
            yield from _walk([node.target], targets=False)
            yield from _walk([node.iter, *node.ifs], targets=targets)
        else:
            yield from _walk(ast.iter_child_nodes(node), targets=targets)


def _has_control(body: Iterable[ast.AST]) -> bool:
    """Whether statements of these bodies choose or repeat by what may be a tensor."""
    return any(isinstance(node, _CONTROL) and _may_stage(node) for node in _walk(body))


def _may_stage(node: ast.AST) -> bool:
    if isinstance(node, ast.For):
        leaves = any(isinstance(n, (ast.Break, ast.Continue, ast.Return)) for n in _walk(node.body))
        return leaves or not _is_plain_range(node.iter)
    return not _never_tensor(node.test)  # type: ignore[attr-defined]


def _is_plain_range(node: ast.expr) -> bool:
    """``range(3)``, and a list, tuple or string as written."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        return all(isinstance(arg, ast.Constant) for arg in node.args)
    return isinstance(node, (ast.List, ast.Tuple, ast.Constant, ast.ListComp))


def _never_tensor(test: ast.expr) -> bool:
    """Whether a test is plain Python whatever its names hold."""
    if isinstance(test, ast.Constant):
        return True
    if isinstance(test, ast.BoolOp):
        return all(map(_never_tensor, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _never_tensor(test.operand)
    if isinstance(test, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in _NEVER_TENSORS


# -- preparing ----------------------------------------------------------------------------------------------------


def _definition(name: str, args: ast.arguments, body: list[ast.stmt]) -> ast.FunctionDef:
    kinds: dict[str, Any] = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
    return ast.FunctionDef(name, args, body, [], returns=None, type_comment=None, **kinds)


def _arguments() -> ast.arguments:
    return ast.arguments(
        posonlyargs=[], args=[], vararg=None, kwonlyargs=[], kw_defaults=[], kwarg=None, defaults=[]
    )  # fmt: skip


def _as_function(node: ast.Lambda) -> ast.FunctionDef:
    return _at(node, _definition(_FUNCTION, node.args, [_at(node.body, ast.Return(node.body))]))  # fmt: skip


def _prepared(tree: Any, owner: str | None) -> Any:
    """Without what belongs to the place of the definition: decorators, defaults, annotations, private names."""
    given = tree.args
    given.defaults = [_at(tree, ast.Constant(None)) for _ in given.defaults]
    given.kw_defaults = [d and _at(tree, ast.Constant(None)) for d in given.kw_defaults]
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    if isinstance(tree, ast.FunctionDef):
        tree.decorator_list, tree.returns = [], None
        tree.name = _FUNCTION  # not to hide a global of its own name
    first = [*given.posonlyargs, *given.args][:1]
    return _OfClass(owner, first[0].arg if first else None).visit(tree)


class _OfClass(ast.NodeTransformer):
    """What a method writes for short: ``self.__x`` and ``super()``."""

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
            node.args = [_at(node, ast.Name(name, ast.Load())) for name in ("__class__", self.first)]
        return node


# -- converting ---------------------------------------------------------------------------------------------------


def _converted(function: ast.FunctionDef, unsure: Container[str] = ()) -> ast.FunctionDef:
    """Control flow and expressions as calls of operators. unsure: global names that may have no value."""
    if any(isinstance(n, (ast.Yield, ast.YieldFrom, ast.AsyncFunctionDef)) for n in ast.walk(function)):
        raise NotConvertible("a generator or async function is in it")
    if _has_control([n for n in ast.walk(function) if isinstance(n, _CONTROL)]):
        from tfnb.control_flow.malting import malted

        _Else().visit(function)
        function = malted(function)
    return _Expressions(unsure).visit(function)


class _Else(ast.NodeTransformer):
    """``for ... else`` as a flag and an ``if``."""

    def __init__(self) -> None:
        self.count = 0

    def _loop(self, node: Any) -> Any:
        self.generic_visit(node)
        if not node.orelse:
            return node
        self.count += 1
        flag = f"{HIDDEN}left_{self.count}"
        _Flagged(flag).visit_body(node)
        orelse, node.orelse = node.orelse, []
        test = _at(orelse[0], ast.UnaryOp(ast.Not(), _at(orelse[0], ast.Name(flag, ast.Load()))))
        return [_flag(node, flag, False), node, _at(orelse[0], ast.If(test, orelse, []))]

    visit_For = visit_While = _loop


class _Flagged(ast.NodeTransformer):
    """A flag that is set before each ``break`` of one loop."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def visit_body(self, loop: Any) -> None:
        """Those of the loop itself."""
        loop.body = [new for old in loop.body for new in _listed(self.visit(old))]

    def visit_Break(self, node: ast.Break) -> Any:
        return [_flag(node, self.flag, True), node]

    def _leave(self, node: Any) -> Any:
        return node

    visit_For = visit_While = visit_FunctionDef = visit_ClassDef = visit_Lambda = _leave


def _flag(at: ast.AST, name: str, value: bool) -> ast.Assign:
    return _at(at, ast.Assign([_at(at, ast.Name(name, ast.Store()))], _at(at, ast.Constant(value)), None))


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


class _Expressions(ast.NodeTransformer):
    """Calls, ``and``, ``or``, ``not``, conditional expressions and chained comparisons as operators."""

    def __init__(self, unsure: Container[str]) -> None:
        self.unsure = unsure

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_unsure = isinstance(node.ctx, ast.Load) and node.id in self.unsure
        return _operator(node, "ld", node) if is_unsure else node

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
        node.func = _operator(node.func, "fn", node.func)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if _binds(node.body) or _binds(node.orelse) or _never_tensor(node.test):
            return self.generic_visit(node)
        self.generic_visit(node)
        return _operator(node, "if_exp", node.test, _thunk(node.body), _thunk(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if any(map(_binds, node.values)) or _never_tensor(node):
            return self.generic_visit(node)
        self.generic_visit(node)
        name = "and_" if isinstance(node.op, ast.And) else "or_"
        *values, last = node.values
        for value in reversed(values):
            last = _operator(node, name, value, _thunk(last))
        return last

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _operator(node, "not_", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """``a < b < c`` as ``(lambda a, b: a < b and b < c)(a, b)``: b is computed once, and c only if a < b."""
        if len(node.ops) == 1 or _never_tensor(node) or any(map(_binds, node.comparators[1:])):
            return self.generic_visit(node)
        left, right = f"ag__left_{len(node.ops)}", f"ag__right_{len(node.ops)}"

        def name(text: str) -> ast.Name:
            return _at(node, ast.Name(text, ast.Load()))

        first = _at(node, ast.Compare(name(left), node.ops[:1], [name(right)]))
        rest = self.visit(_at(node, ast.Compare(name(right), node.ops[1:], node.comparators[1:])))
        both = _arguments()
        both.args = [_at(node, ast.arg(text, None, None)) for text in (left, right)]
        chain = _at(node, ast.Lambda(both, _operator(node, "and_", first, _thunk(rest))))
        return _at(node, ast.Call(chain, [self.visit(node.left), self.visit(node.comparators[0])], []))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if node.name.startswith(("ag__get_state", "ag__set_state")) else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        name = _at(node.target, ast.Name(node.target.id, ast.Load()))
        kind = _at(node, ast.Constant(type(node.op).__name__))
        return _at(node, ast.Assign([node.target], _operator(node, "augmented", kind, name, node.value), None))

    # What is made and what is written, for a staged body to know the one from the other.

    def _made(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        return node if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)) else _operator(node, "made", node)

    visit_List = visit_Dict = visit_Set = visit_ListComp = visit_DictComp = visit_SetComp = _made

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            node.value = _operator(node, "changed", node.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            node.value = _operator(node, "changed", node.value, _at(node, ast.Constant(node.attr)))
        return node


def _binds(node: ast.AST) -> bool:
    """Whether an expression cannot stand in a function of its own."""
    return any(isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for n in ast.walk(node))


def _is_operator(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (
        node.value.id == HIDDEN or node.value.id.startswith("ag__scope")
    )  # fmt: skip


def _operator(at: ast.AST, name: str, *args: ast.expr) -> ast.Call:
    call = _at(
        at, ast.Call(_at(at, ast.Attribute(_at(at, ast.Name(HIDDEN, ast.Load())), name, ast.Load())), [*args], [])
    )
    for node in (call.func, call.func.value):  # Python takes the last line of a method for that of its call
        node.end_lineno, node.end_col_offset = node.lineno, node.col_offset + 1
    return call  # type: ignore[no-any-return]


def _thunk(node: ast.expr) -> ast.Lambda:
    args = _arguments()
    args.vararg = _at(node, ast.arg(f"{HIDDEN}nothing", None, None))  # by which `_renamed` knows it
    return _at(node, ast.Lambda(args, node))


def _at(old: ast.AST, new: Any) -> Any:
    """``new`` at the place of ``old``."""
    return ast.copy_location(new, old)


# -- compiling ----------------------------------------------------------------------------------------------------


def _compiled(function: ast.FunctionDef, place: _Place, free: Sequence[str]) -> CodeType:
    """The code of a factory that takes the operators, with the closure that the function has."""
    factory = _definition(_FACTORY, _arguments(), [function, ast.Return(ast.Name(function.name, ast.Load()))])
    factory.args.args = [ast.arg(HIDDEN, None, None)]
    cells = [ast.Assign([ast.Name(each, ast.Store())], ast.Constant(None), None) for each in free]
    outer = _definition(_OUTER, _arguments(), [*cells, factory])
    for node in (outer, factory):
        ast.copy_location(node, function)
        node.lineno = getattr(function, "lineno", 1)
    module = ast.Module([outer], [])
    ast.fix_missing_locations(module)
    _begin(factory, place.first)
    try:
        whole = compile(module, place.filename, "exec", place.flags, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise NotConvertible(str(error)) from None
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
