"""Chooses the function that converted code calls: the converted one, if a function is the user's and has source."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.frontend.source import bound, function_code, worth
from tfnb.control_flow.frontend.trees import HIDDEN, tree_of
from tfnb.control_flow.frontend.yields import is_generator
from tfnb.control_flow.staging.containers import (
    CHANGES,
    CONTAINERS,
    changing,
    is_own,
    made,
    refuse_change,
    refuse_draw,
)
from tfnb.control_flow.staging.generators import generator_function
from tfnb.control_flow.staging.iterables import BUILTINS
from tfnb.control_flow.staging.lists import append_to, cat, grown, plain, stack
from tfnb.control_flow.staging.python_numbers import given, item_of
from tfnb.control_flow.staging.statement import OPERATORS, status
from tfnb.control_flow.structure import recorder_if_open
from tfnb.recording.marks.user_code import is_foreign, is_of_package
from tfnb.recording.values.python_draws import drawing, heard, is_clock

_MARK = "__tfnb_converted__"
_factories: WeakKeyDictionary[CodeType, CodeType | None] = WeakKeyDictionary()


def fn(function: Any) -> Any:
    """The function to call in place of ``function``: converted if it is the user's and its source is available."""
    if status.off or recorder_if_open() is None:
        return function
    if (drawn := drawing(function)) is not None:
        if status.depth and not is_clock(drawn):
            refuse_draw(drawn)
        return heard(function, drawn)
    kind = type(function)
    if status.depth and (found := changing(function)) is not None:
        return found
    if kind is FunctionType:
        found = _function(function)
        if found is function and is_of_package(function.__code__.co_filename):
            return functools.partial(_of_package, function)
        return found
    if kind is MethodType:
        if (found := item_of(function, function.__self__)) is not None:
            return found
        inner = fn(function.__func__)
        return function if inner is function.__func__ else MethodType(inner, function.__self__)
    if kind is BuiltinMethodType:
        return _builtin(function)
    if kind is functools.partial:
        return functools.partial(fn(function.func), *function.args, **function.keywords)
    if isinstance(function, type):
        found = BUILTINS.get(function, function)
        return _noted(found) if status.depth and issubclass(function, CONTAINERS) else found
    own = inspect.getattr_static(kind, "__call__", None)
    if isinstance(own, FunctionType) and not isinstance(function, torch.nn.Module):
        inner = _function(own)
        return function if inner is own else MethodType(inner, function)
    return function


def _builtin(function: Any) -> Any:
    owner, name = function.__self__, function.__name__
    if (found := item_of(function, owner)) is not None:
        return found
    if isinstance(owner, CONTAINERS):
        return _of_container(function, owner, name)
    if status.depth and function is iter:
        return _noted(function)
    if function in _OF_LISTS:
        return functools.partial(_of_list, function)
    return BUILTINS.get(function, function)


def _of_container(function: object, owner: object, name: str) -> Any:
    """A method of a list, dict or set."""
    if name not in ("append", "extend", "copy", "clear") and grown(owner):
        plain(owner)
    if not status.depth or name not in CHANGES:
        return function
    if name == "append" and type(owner) is list and not is_own(owner):
        found = append_to(owner)
        if found is not None:
            return found
    refuse_change(owner, f"{name}()")
    return function


_OF_LISTS: dict[Any, Callable[..., Any]] = {
    torch.stack: stack, torch.cat: cat, torch.concat: cat, torch.concatenate: cat,
}  # fmt: skip


def _of_list(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """A function of torch, of a list that a loop may have appended to."""
    items = args[0] if args else kwargs.get("tensors")
    return (_OF_LISTS[function] if grown(items) else function)(*args, **kwargs)


def _of_package(function: FunctionType, *args: object, **kwargs: object) -> Any:
    """Call a function of an installed package, with staged numbers as plain values; torch accepts tensors."""
    if (function.__module__ or "torch").partition(".")[0] not in ("torch", "tfnb"):  # None: torch.fx wrote it
        args, kwargs = tuple(map(given, args)), {name: given(arg) for name, arg in kwargs.items()}
    return function(*args, **kwargs)


def _noted(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: made(kind(*args, **kwargs))


def _function(function: FunctionType) -> FunctionType:
    code = function.__code__
    if _MARK in function.__dict__ or HIDDEN in code.co_freevars:  # a lambda of converted code has no mark
        return function
    if is_generator(code):
        made = _known_factory(code)
        return function if made is None else marked(generator_function(function, made))
    factory = _known_factory(code)
    if factory is None:
        return _rewrapped(function)
    return marked(bound(factory, function, OPERATORS))


def _known_factory(code: CodeType) -> CodeType | None:
    if code not in _factories:
        _factories[code] = None if is_foreign(code.co_filename) else _factory(code)
    return _factories[code]


def _factory(code: CodeType) -> CodeType | None:
    """None where there is nothing to convert; in the margin, where that fails."""
    try:
        tree = tree_of(code)
        return function_code(code, tree) if worth(tree) else None
    except CannotStage as why:
        recorder = recorder_if_open()
        if recorder is not None:
            recorder.tape.notes.append(f"{code.co_qualname}, line {code.co_firstlineno}, stays Python: {why}")
        return None


def _rewrapped(function: FunctionType) -> FunctionType:
    """A decorator's function around one of the user's: the same, around the converted one."""
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(inner, FunctionType) or not function.__closure__:
        return function
    new = _function(inner)
    cells = [CellType(new) if _content(cell) is inner else cell for cell in function.__closure__]
    if new is inner or all(a is b for a, b in zip(cells, function.__closure__, strict=True)):
        return function
    wrapper = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )  # fmt: skip
    wrapper.__kwdefaults__ = function.__kwdefaults__
    wrapper.__dict__.update(function.__dict__)
    return wrapper


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def marked(function: Callable[..., Any]) -> Any:
    """A function that is converted already."""
    with contextlib.suppress(AttributeError):
        function.__dict__[_MARK] = True
    return function
