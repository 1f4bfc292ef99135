"""Errors that public names raise, by the code, beside the errors that their docstrings name.

The code is what a function does itself, and what a function does that it calls in its own module.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType

import tfnb
from tests.syntax import parsed
from tfnb.errors import TfnbError

Functions = dict[str, ast.FunctionDef]


def public() -> Iterator[tuple[str, FunctionType, str]]:
    """Public functions, and public methods and initializers of public classes: name, function, documentation.

    An initializer is documented by its class, and a method also by its class: one sentence may be about all methods.
    "Raises as `insert` does" stands for the documentation of that method.
    """
    for name in tfnb.__all__:
        found = getattr(tfnb, name)
        if inspect.isfunction(found):
            yield name, found, found.__doc__ or ""
        elif inspect.isclass(found):
            for method, value in _methods(found).items():
                value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(value, FunctionType) and (method == "__init__" or not method.startswith("_")):
                    others = re.findall(r"[Rr]aises (?:\w+ )?as `(\w+)` does", value.__doc__ or "")
                    told = [value.__doc__, found.__doc__, *(getattr(found, other).__doc__ for other in others)]
                    yield f"{name}.{method}", value, "\n".join(filter(None, told))


def _methods(kind: type) -> dict[str, object]:
    """The attributes of a class and of its bases that are ours, as the class has them."""
    ours = [base for base in reversed(kind.__mro__) if base.__module__.startswith("tfnb")]
    return {name: value for base in ours for name, value in vars(base).items()}


def undocumented() -> dict[str, list[str]]:
    """The errors of each public name that its documentation names neither itself nor by a base class."""
    found = {}
    for name, function, text in public():
        lacking = {error for error in raised(inspect.unwrap(function)) if not _is_named(error, text)}
        if lacking:
            found[name] = sorted(lacking)
    return found


def raised(function: FunctionType) -> set[str]:
    """Names of the tfnb errors that a function raises itself, or a function or method that it calls in its module."""
    file = Path(function.__code__.co_filename)
    functions = _functions(file) if file.exists() else {}  # methods of named tuples and data classes are generated
    node = functions.get(function.__qualname__.replace(".<locals>", ""))
    if node is None:
        return set()
    scope = function.__qualname__.rpartition(".")[0]
    called = [functions.get(name) for name in _calls(node, scope)]
    return {error for each in (node, *called) if each is not None for error in _raises(each)}


@cache
def _functions(path: Path) -> Functions:
    """Functions and methods of a file by qualified name."""
    found: Functions = {}
    stack: list[tuple[ast.AST, str]] = [(parsed(path), "")]
    while stack:
        node, scope = stack.pop()
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{scope}.{child.name}".lstrip(".")
                if isinstance(child, ast.FunctionDef):
                    found.setdefault(inner, child)
            stack.append((child, inner))
    return found


def _calls(node: ast.FunctionDef, scope: str) -> Iterator[str]:
    """Qualified names of what a function calls in its own module or class."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            if isinstance(inner.func, ast.Name):
                yield inner.func.id
            elif isinstance(inner.func, ast.Attribute) and ast.unparse(inner.func.value) in ("self", "cls"):
                yield f"{scope}.{inner.func.attr}"


def _raises(node: ast.FunctionDef) -> Iterator[str]:
    """Names of the tfnb errors that a function raises itself."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call) and isinstance(inner.exc.func, ast.Name):
            error = getattr(tfnb.errors, inner.exc.func.id, None)
            if isinstance(error, type) and issubclass(error, TfnbError):
                yield inner.exc.func.id


def _is_named(error: str, text: str) -> bool:
    """Whether a documentation names an error, or a base class of it other than `TfnbError`."""
    bases = getattr(tfnb.errors, error).__mro__
    names = {base.__name__ for base in bases if issubclass(base, TfnbError) and base is not TfnbError}
    return any(re.search(rf"\b{name}\b", text) for name in names)
