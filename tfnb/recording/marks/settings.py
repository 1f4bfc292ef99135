"""Settings: values of Python that a graph was recorded with, and comparable pictures of them.

A name of the program may be bound to a number, a text, a list or dict of such, a function, a module or an optimizer;
an attribute path, such as that of ``args.model.beta``, leads to one. The picture of a setting is equal to a later
picture as long as a recording would give the same graph. Imports torch and `user_code`.
"""

from __future__ import annotations

import enum
import inspect
import weakref
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import torch

from tfnb.recording.marks.user_code import is_foreign

FEW = 64  # items of a list, tuple, dict or array that is looked at
MISSING = object()
_NUMBERS = (bool, int, float, complex)
_TEXTS = (str, bytes, torch.dtype, torch.device, torch.Size)
_DEEP = 4  # levels of lists and dicts

OPTIMIZERS: list[type] = [torch.optim.Optimizer]
"""Bases of optimizers, of which each one is another setting: `tfnb.train` adds its own."""


class Picture(NamedTuple):
    """A comparable copy of a setting. Pictures of two kinds are of two purposes, and not compared."""

    kind: str
    of: Any

    @property
    def label(self) -> str:
        """The class of the setting, in words."""
        return self.of.name if isinstance(self.of, _Same) else "function"

    @property
    def is_shown(self) -> bool:
        """Whether a message can show the value: a number, a text or short items."""
        return self.kind in ("number", "text", "items")


def picture(value: object, deep: int = _DEEP) -> Picture | None:
    """The picture of a setting; None for other values, such as tensors and long lists.

    >>> picture(2.0), picture({"scale": [1, None]}), picture(torch.ones(2))
    (Picture(kind='number', of=2.0), Picture(kind='items', of={'scale': [1, None]}), None)
    >>> picture(lambda x: x + 1) == picture(lambda x: x + 2)
    False
    """
    kind = type(value)
    if kind in _NUMBERS:
        return Picture("number", value)
    if kind in _TEXTS or isinstance(value, enum.Enum):
        return Picture("text", value)
    if kind.__module__ == "numpy":
        return _of_array(value)
    if isinstance(value, list | tuple | dict):
        try:
            return Picture("items", _items(value, deep))
        except _NoSetting:
            return None
    if isinstance(value, torch.nn.Module):
        return Picture("callable", _Same(weakref.ref(value), kind.__name__))
    if isinstance(value, tuple(OPTIMIZERS)):
        return Picture("optimizer", _Same(weakref.ref(value), kind.__name__))
    if isinstance(value, FunctionType | BuiltinFunctionType | partial) and deep:
        return Picture("callable", _behaviour(value, deep - 1))
    return None


class _NoSetting(Exception):
    """An item of a list or dict is no setting."""


class _Same(NamedTuple):
    """The identity of an object, and the name of its class."""

    ref: weakref.ref[Any]
    name: str


def _items(value: object, deep: int) -> Any:
    if value is None:
        return None
    if isinstance(value, list | tuple | dict):
        if len(value) >= FEW or not deep:
            raise _NoSetting
        if isinstance(value, dict):
            return {key: _items(each, deep - 1) for key, each in value.items()}
        return (list if isinstance(value, list) else tuple)(_items(each, deep - 1) for each in value)
    found = picture(value, deep)
    if found is None:
        raise _NoSetting
    return found.of


def _of_array(value: Any) -> Picture | None:
    """The picture of a number or a short array of NumPy."""
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "") not in tuple("biufc") or getattr(value, "size", FEW) >= FEW:
        return None
    return Picture("number" if value.shape == () else "items", value.tolist())


# -- functions ------------------------------------------------------------------------------------------------------


class _Behaviour(NamedTuple):
    """Behaviour of a function of the program, without its line: code, defaults and enclosed settings."""

    code: _Code | None
    defaults: dict[Any, Picture | None]
    enclosed: dict[Any, Picture | None]


class _Code:
    """Code of a function, equal to the same code at other lines."""

    __slots__ = ("_code",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, code: CodeType) -> None:
        self._code = code

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Code):
            return NotImplemented
        return self._code is other._code or _at_line_one(self._code) == _at_line_one(other._code)


def _at_line_one(code: CodeType) -> CodeType:
    inner = tuple(_at_line_one(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_firstlineno=1, co_filename="", co_consts=inner)


def _behaviour(value: object, deep: int) -> Any:
    """A comparable copy of a function or partial."""
    if isinstance(value, partial):
        return _Behaviour(None, _each(value.keywords, deep), _each(dict(enumerate((value.func, *value.args))), deep))
    if not isinstance(value, FunctionType) or is_foreign(value.__code__.co_filename):
        return value
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    enclosed = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    defaults = dict(enumerate(value.__defaults__ or ())) | (value.__kwdefaults__ or {})
    return _Behaviour(_Code(value.__code__), _each(defaults, deep), _each(enclosed, deep))


def _each(values: Mapping[Any, Any], deep: int) -> dict[Any, Picture | None]:
    return {name: picture(value, deep) for name, value in values.items()}


# -- attributes -----------------------------------------------------------------------------------------------------


def at_path(value: object, path: str) -> Any:
    """The value at a path of attributes, without running code of properties; MISSING if there is none.

    >>> from argparse import Namespace
    >>> at_path(Namespace(model=Namespace(beta=2.0)), "model.beta")
    2.0
    """
    for name in path.split(".") if path else ():
        if isinstance(value, torch.Tensor) or (isinstance(value, ModuleType) and _is_foreign_module(value)):
            return MISSING
        if isinstance(value, Mapping) and name not in vars(type(value)):
            found = value.get(name, MISSING)
        else:
            found = inspect.getattr_static(value, name, MISSING)
        if isinstance(value, torch.nn.Module) and found is MISSING:
            found = value._modules.get(name, MISSING)
        value = getattr(value, name, MISSING) if isinstance(found, MemberDescriptorType) else found
        if value is MISSING:
            return MISSING
    return value


def _is_foreign_module(module: ModuleType) -> bool:
    return is_foreign(getattr(module, "__file__", None) or "<frozen")
