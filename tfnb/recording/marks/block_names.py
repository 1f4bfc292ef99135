"""Names, and paths of their attributes, that the code of a cell or block reads before assigning the names."""

from __future__ import annotations

import ast
import dis
import linecache
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise, takewhile
from textwrap import dedent
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from tfnb.recording.marks.attribute_reads import GROWS, names_of_attributes
from tfnb.recording.marks.settings import MISSING, at_path
from tfnb.recording.marks.user_code import is_foreign

_WITH = re.compile(r"\s*(async )?with\b")
_ITEMS = 20  # lines that the items of a with statement may take
_SCOPES = (
    ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_WRAPPERS = (MethodType, partial, type(lru_cache(len)), staticmethod, classmethod)
_STAGED = "__tfnb_converted__"  # attribute of functions that `tfnb.autograph` made
_ASKING = frozenset({
    "get", "setdefault", "pop", "hasattr", "getattr", "AttributeError", "KeyError", "NameError", "LookupError",
    "Exception", "len",
})  # fmt: skip
_SAMPLES = "placeholder"  # a function whose arguments are samples: what they are made of is no part of the graph


class NameRead(NamedTuple):
    """A name read, or an attribute read of the name's value; the attribute may be a path, as in ``args.model.beta``."""

    name: str
    attribute: str = ""

    def __str__(self) -> str:
        return f"{self.name}.{self.attribute}" if self.attribute else self.name


def names_read(statements: Sequence[ast.stmt]) -> list[NameRead]:
    """The names and attributes that statements read before assigning the names, in order.

    >>> names_read(ast.parse("y = x * model.beta; n = 3; z = y * n").body)
    [NameRead(name='x', attribute=''), NameRead(name='model', attribute='beta'), NameRead(name='model', attribute='')]
    >>> [str(read) for read in names_read(ast.parse("y = args.model.beta").body)]
    ['args.model.beta', 'args.model', 'args']
    """
    found: dict[NameRead, None] = {}
    assigned: set[str] = set()
    for statement in statements:
        for read in _reads(statement):
            if assigned.isdisjoint(accumulate(str(read).split("."), "{}.{}".format)):
                found[read] = None
        stored = [node for node in ast.walk(statement) if isinstance(getattr(node, "ctx", None), ast.Store)]
        assigned |= {node.id for node in stored if isinstance(node, ast.Name)}
        paths = (_path(node) for node in stored if isinstance(node, ast.Attribute))
        assigned |= {str(path) for path in paths if path is not None}
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            assigned.add(statement.name)
    return list(found)


def paths_set(statements: Sequence[ast.stmt]) -> frozenset[NameRead]:
    """The paths of attributes that statements set, and do not read before.

    >>> sorted(map(str, paths_set(ast.parse("net.loss = net.table.loss(x); net.count = net.count + 1").body)))
    ['net.loss']
    """
    nodes = (node for statement in statements for node in ast.walk(statement))
    stored = (_path(node) for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(path for path in stored if path is not None) - frozenset(names_read(statements))


def asks_in(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements ask if something is there, as a cache does: by ``in``, ``get``, ``hasattr``, or an error.

    >>> [asks_in(ast.parse(text).body) for text in ("'a' in kept", "kept.get('a')", "kept['a']")]
    [True, True, False]
    """
    nodes = [node for statement in statements for node in ast.walk(statement)]
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in nodes}
    tests = (op for node in nodes if isinstance(node, ast.Compare) for op in node.ops)
    return not _ASKING.isdisjoint(names) or any(isinstance(op, ast.In | ast.NotIn) for op in tests)


@lru_cache(maxsize=4096)
def asks(code: CodeType) -> bool:
    """Whether a function asks so, or one inside of it.

    >>> asks((lambda kept: kept["a"] if "a" in kept else 0).__code__), asks((lambda kept: kept["a"]).__code__)
    (True, False)
    """
    is_asking = any(each.opname == "CONTAINS_OP" for each in dis.get_instructions(code))
    is_asking = is_asking or not _ASKING.isdisjoint(code.co_names)
    return is_asking or any(asks(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def attributes_read(statements: Sequence[ast.stmt]) -> frozenset[str]:
    """Names of the attributes that statements read, before they set them, of any object; no logs, which only grow.

    >>> sorted(attributes_read(ast.parse("y = x * models[0].scale; log.values.append(y)").body))
    ['append', 'scale']
    """
    first: dict[str, bool] = {}  # name -> whether it is read before it is set
    nodes = [node for statement in statements for node in ast.walk(statement)]
    logs = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in GROWS}
    changed = {id(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
    uses = [node for node in nodes if isinstance(node, ast.Attribute) and id(node) not in logs]
    for node in sorted(uses, key=lambda n: (n.lineno, isinstance(n.ctx, ast.Store) and id(n) not in changed)):
        first.setdefault(node.attr, isinstance(node.ctx, ast.Load) or id(node) in changed)
    texts = {
        node.args[1].value for node in nodes
        if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
        and getattr(node.func, "id", "") in ("getattr", "hasattr") and isinstance(node.args[1].value, str)
    }  # fmt: skip
    return frozenset(texts) | {name for name, is_read in first.items() if is_read}


def keys_read(statements: Sequence[ast.stmt]) -> frozenset[str]:
    """Texts that statements look up in any dict."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    return frozenset(
        node.slice.value for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    )  # fmt: skip


def _reads(node: ast.AST, bound: frozenset[str] = frozenset()) -> Iterator[NameRead]:
    """Names that a statement or expression reads; ``bound``: names bound by enclosing functions and comprehensions."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == _SAMPLES:
        return
    if isinstance(node, _SCOPES):
        bound = bound | _own_names(node)
    if isinstance(node, ast.Call) and _only_grows(node.func):
        for given in (*node.args, *node.keywords):  # the list is a log, which the block does not read
            yield from _reads(given, bound)
        return
    is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
    if isinstance(node, ast.Subscript) and is_stored and isinstance(node.value, ast.Name):  # the same of a dict
        yield from _reads(node.slice, bound)
        return
    read = node.target if isinstance(node, ast.AugAssign) else node
    if isinstance(read, ast.Name) and read.id not in bound and (read is not node or isinstance(read.ctx, ast.Load)):
        yield NameRead(read.id)
    is_path = read is not node or not is_stored
    if isinstance(read, ast.Attribute) and is_path and (found := _path(read)) is not None and found.name not in bound:
        yield found
    if isinstance(read, ast.Subscript) and read is not node:
        yield from _reads(read.value, bound)
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, bound)


def _path(node: ast.expr) -> NameRead | None:
    """The read of an attribute, or of an attribute of an attribute; None for attributes of the results of calls."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return NameRead(node.id, ".".join(reversed(names))) if isinstance(node, ast.Name) else None


def _only_grows(called: ast.expr) -> bool:
    """Whether a method is called that makes a list grow, also one in a dict or an attribute."""
    if not isinstance(called, ast.Attribute) or called.attr not in GROWS:
        return False
    grown = called.value
    while isinstance(grown, ast.Attribute | ast.Subscript):
        grown = grown.value
    return isinstance(grown, ast.Name)


def _own_names(scope: ast.AST) -> set[str]:
    """Parameters and names that a function or comprehension assigns."""
    nodes = list(ast.walk(scope))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


class FunctionReads(NamedTuple):
    """Reads of a function of the program and of those that it names: globals with their tables, and attribute names."""

    globals: list[tuple[NameRead, dict[str, Any]]]
    attributes: frozenset[str]
    functions: list[FunctionType]  # those that are not staged


def function_reads(function: FunctionType) -> FunctionReads:
    """The reads of the user's function, and of user functions that the function names.

    >>> def scaled(x):
    ...     return x * settings.factor
    >>> found = function_reads(lambda x: scaled(x) + offset)
    >>> [str(read) for read, _ in found.globals], found.attributes
    (['scaled', 'settings.factor', 'settings', 'offset'], frozenset({'factor'}))
    """
    found: dict[tuple[NameRead, int], dict[str, Any]] = {}
    seen: dict[CodeType, FunctionType | None] = {}
    _walk(function, found, seen)
    names = frozenset[str]().union(*map(names_of_attributes, seen))
    return FunctionReads(
        [(read, table) for (read, _), table in found.items()], names, list(filter(None, seen.values()))
    )


def behind(value: object) -> FunctionType | None:
    """The Python function behind a function, a method, a partial or a wrapper such as that of ``functools.cache``."""
    while isinstance(value, _WRAPPERS):
        inner = value.func if isinstance(value, partial) else getattr(value, "__func__", None)
        value = inner or getattr(value, "__wrapped__", None)
    return value if isinstance(value, FunctionType) else None


def _walk(
    function: FunctionType, found: dict[tuple[NameRead, int], dict[str, Any]],
    seen: dict[CodeType, FunctionType | None], *, is_staged: bool = False,
) -> None:  # fmt: skip
    """Follow a function; ``is_staged``: by `tfnb.autograph`, as are all functions that such a one calls."""
    if (inner := behind(getattr(function, "__wrapped__", None))) is not None:
        _walk(inner, found, seen, is_staged=is_staged or _STAGED in vars(function))
    code, table = function.__code__, function.__globals__
    if code in seen or is_foreign(code.co_filename):
        return
    seen[code] = None if is_staged else function
    for read in _globals_of(code):
        found.setdefault((read, id(table)), table)
        if not read.attribute and (inner := behind(table.get(read.name))) is not None:
            _walk(inner, found, seen, is_staged=is_staged)
    for cell in function.__closure__ or ():
        if cell != CellType() and (inner := behind(cell.cell_contents)) is not None:
            _walk(inner, found, seen, is_staged=is_staged)


@lru_cache(4096)
def _globals_of(code: CodeType) -> tuple[NameRead, ...]:
    """Names, and paths of their attributes, that code and its inner functions take from the global table."""
    steps = list(dis.get_instructions(code))
    found: dict[NameRead, None] = {}
    for at, step in enumerate(steps):
        if step.opname == "LOAD_GLOBAL":
            path = [each.argval for each in takewhile(lambda s: s.opname in _LOADS, steps[at + 1 :])]
            if path and path[-1] in GROWS:
                continue
            reads = (NameRead(step.argval, ".".join(path[:n])) for n in range(len(path), -1, -1))
            found |= dict.fromkeys(reads)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= dict.fromkeys(_globals_of(each))
    return tuple(found)


@lru_cache(4096)
def enclosed_reads(code: CodeType) -> frozenset[str]:
    """Names of enclosing functions that code reads or sets; no logs, to which the code appends."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        step.argval for step, after in pairwise([*steps, steps[-1]])
        if step.argval in code.co_freevars and step.opname in ("LOAD_DEREF", "LOAD_CLOSURE", "STORE_DEREF")
        and not (after.opname in _LOADS and after.argval in GROWS)
    )  # fmt: skip


def block_of(frame: FrameType) -> list[ast.stmt]:
    """The statements of the ``with`` block that a frame enters, with the lines of the file; none without its text."""
    lines, at = linecache.getlines(frame.f_code.co_filename, frame.f_globals), frame.f_lineno - 1
    start = next((n for n in range(at, max(at - _ITEMS, -1), -1) if n < len(lines) and _WITH.match(lines[n])), None)
    if start is None:
        return []
    column = len(lines[start]) - len(lines[start].lstrip())

    def is_inside(line: str) -> bool:
        text = line.strip()
        return not text or text[0] in ")#" or len(line) - len(line.lstrip()) > column

    block = [lines[start], *takewhile(is_inside, lines[start + 1 :])]
    try:
        found = ast.parse(dedent("".join(block))).body
    except SyntaxError:  # a text of several lines that begins further to the left
        return []
    if not isinstance(found[0], ast.With):
        return []
    return [ast.increment_lineno(statement, start) for statement in found[0].body]


@dataclass(frozen=True, slots=True)
class Namespace:
    """The names of a cell, or of a block in a script or function."""

    names: Mapping[str, Any]
    function: CodeType | None = None  # of the block's function, whose names are found while it runs

    @classmethod
    def of(cls, frame: FrameType) -> Namespace:
        """The names of a frame."""
        return cls(frame.f_globals, None if frame.f_locals is frame.f_globals else frame.f_code)

    def get(self, name: str, missing: object = None) -> Any:
        """The current value of a name; ``missing`` if unbound, or if its function has returned."""
        function = self.function
        if function is None or name not in (*function.co_varnames, *function.co_cellvars, *function.co_freevars):
            return self.names.get(name, missing)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not function:
            frame = frame.f_back
        return missing if frame is None else frame.f_locals.get(name, missing)

    def at(self, read: NameRead) -> Any:
        """The current value of a name, or at the end of a path from one; MISSING if there is none."""
        value = self.get(read.name, MISSING)
        return at_path(value, read.attribute) if read.attribute and value is not MISSING else value
