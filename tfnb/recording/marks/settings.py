"""Settings: values of Python that a graph was recorded with, and comparable pictures of them.

A name of the program may be bound to a number, a text, a list or dict of such, a function, a module or an optimizer;
an attribute path, such as that of ``args.model.beta``, leads to one, and so does an object whose attributes code reads
by their names. The picture of a setting is equal to a later picture as long as a recording would give the same graph.
Imports torch, `attribute_reads` and `user_code`.
"""

from __future__ import annotations

import array
import enum
import inspect
import itertools
import queue
import threading
import weakref
from argparse import Namespace
from collections import ChainMap, Counter, UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import cached_property, partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)  # fmt: skip
from typing import Any, NamedTuple, cast

import torch

from tfnb.recording.marks.attribute_reads import attribute_reads, names_of_attributes
from tfnb.recording.marks.user_code import is_foreign, is_of_program

FEW = 64  # items of a list, tuple, dict or array that is looked at
_MANY = 4096  # items of a list of numbers that is copied
BIG = 1 << 20  # bytes; a larger array is not copied
MISSING = object()
_NUMBERS = (bool, int, float, complex)
_TEXTS = (str, bytes, torch.dtype, torch.device, torch.Size)
_DEEP = 8  # levels of lists, dicts and objects
_LEAVES = 512  # items of one setting that are looked at
_HOLDERS: tuple[type, ...] = (
    SimpleNamespace, Namespace, queue.Queue, threading.local, torch.optim.lr_scheduler.LRScheduler
)  # fmt: skip
"""Classes of Python and torch whose objects hold settings and state of the program."""
_UNASKED = ("__init__", "__new__", "__repr__", "__str__", "__eq__", "__hash__", "__setattr__", "__init_subclass__")

OPTIMIZERS: list[type] = [torch.optim.Optimizer]
"""Bases of optimizers, of which each one is another setting: `tfnb.train` adds its own."""


REPLACES = "_tfnb_replaces"  # attribute of a function that stands in place of another one while a recording is open


class Picture(NamedTuple):
    """A comparable copy of a setting. Pictures of two kinds are of two purposes, and not compared."""

    kind: str
    of: object

    @property
    def label(self) -> str:
        """The class of the setting, in words."""
        return self.of.name if isinstance(self.of, _Same) else "function"

    @property
    def is_shown(self) -> bool:
        """Whether a message can show the value: a number, a text or short items."""
        return self.kind in ("number", "text", "items")


def picture(value: object, names: frozenset[str] = frozenset(), deep: int = _DEEP) -> Picture | None:
    """The picture of a setting; None for other values, such as tensors and long lists.

    names: the attributes of objects that belong to the setting, since code reads them.

    >>> picture(2.0), picture({"scale": [1, None]}), picture(torch.ones(2))
    (Picture(kind='number', of=2.0), Picture(kind='items', of={'scale': [1, None]}), None)
    >>> picture(lambda x: x + 1) == picture(lambda x: x + 2)
    False
    >>> picture(Namespace(scale=2.0, epoch=7), frozenset({"scale"}))
    Picture(kind='items', of={'scale': 2.0})
    """
    found = _single(value, names, deep)
    if found is not None:
        return found
    items = contents(value, names, _leaf, deep)
    return None if items is OPAQUE else Picture("items", items)


def _single(value: object, names: frozenset[str], deep: int) -> Picture | None:
    """The picture of a number, text, array, module, optimizer or function."""
    kind = type(value)
    if kind in _NUMBERS:
        return Picture("number", value)
    if kind in _TEXTS or isinstance(value, enum.Enum):
        return Picture("text", value)
    if kind.__module__ == "numpy":
        return array_picture(value)
    if isinstance(value, torch.nn.Module):
        return Picture("callable", _Same(weakref.ref(value), kind.__name__))
    if isinstance(value, tuple(OPTIMIZERS)):
        return Picture("optimizer", _Same(weakref.ref(value), kind.__name__))
    if isinstance(value, FunctionType | BuiltinFunctionType | partial) and deep:
        return Picture("callable", _behaviour(value, names, deep - 1))
    return None


class _Opaque:
    """The place of a value that is no setting, such as a tensor in a dict: equal to all others."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "..."


OPAQUE = _Opaque()


def _leaf(value: object, names: frozenset[str], deep: int) -> Any:
    """The content of a picture for one item."""
    found = None if value is None else _single(value, names, deep)
    return found.of if found is not None else OPAQUE if value is not None else None


class Attributes(dict[str, Any]):
    """The attributes of an object that code reads, by their names."""


def differences(before: object, now: object, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, former, present) of each part in which the contents of two pictures differ, down to attributes."""
    if isinstance(before, Attributes) and isinstance(now, Attributes):
        for name, item in before.items():
            if name in now:
                yield from differences(item, now[name], f"{path}.{name}")
    elif before != now:
        yield path, before, now


_DATA = (*_NUMBERS, *_TEXTS, type(None), list, dict, tuple, MemberDescriptorType)  # of classes
_SEVERAL = (
    list, tuple, dict, deque, array.array, set, frozenset, bytearray, memoryview, UserDict, ChainMap, MappingProxyType
)  # fmt: skip
Leaf = Callable[[Any, frozenset[str], int], Any]


def contents(value: object, names: frozenset[str], leaf: Leaf, deep: int = _DEEP) -> Any:
    """The items of a list, dict, deque or set, the read attributes of an object, the position of a counter: a copy.

    leaf: gives what stands for any other value, and is told the names and the levels that are left. Long and deep
    values are OPAQUE.
    """
    return _Walk(names, leaf).of(value, deep)


def _current(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return None


class _Walk:
    """A walk over the contents of one value, up to a number of leaves."""

    def __init__(self, names: frozenset[str], leaf: Leaf) -> None:
        self._names, self._leaf, self._left = names, leaf, _LEAVES

    def of(self, value: object, deep: int) -> Any:
        """A copy of the contents of a value."""
        self._left -= 1
        if not deep or self._left < 0:
            return OPAQUE
        if isinstance(value, _SEVERAL):
            return self._of_items(value, deep - 1)
        if isinstance(value, ContextVar):
            return self.of(_current(value), deep - 1)
        if isinstance(value, weakref.ref):
            return self.of(value(), deep - 1)
        if isinstance(value, MethodType) and holds_settings(type(value.__self__)):
            return Attributes(self._attributes(value.__self__, self._names | {value.__name__}, deep - 1))
        if isinstance(value, itertools.count):
            return repr(value)
        if isinstance(value, Iterator) and type(value).__module__ == "builtins" and hasattr(value, "__length_hint__"):
            return value.__length_hint__()
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return None if frame is None else self.of({**frame.f_locals, "": frame.f_lasti}, deep - 1)
        if holds_settings(type(value)) or (isinstance(value, type) and is_of_program(value)):
            return Attributes(self._attributes(value, self._names, deep - 1))
        return self._leaf(value, self._names, deep)

    def _attributes(self, value: object, names: frozenset[str], deep: int) -> Iterator[tuple[str, Any]]:
        for name, item in attributes_of(value, names):
            if not isinstance(item, FunctionType | property | staticmethod | classmethod):
                yield name, self.of(item, deep)

    def _of_items(self, value: Any, deep: int) -> Any:
        if isinstance(value, bytearray | memoryview):
            return bytes(value[:_MANY])
        if len(value) >= FEW:
            items = value.values() if isinstance(value, Mapping) else value
            is_copied = len(value) < _MANY and all(type(each) in _NUMBERS for each in items)
            return (dict if isinstance(value, Mapping) else list)(value) if is_copied else OPAQUE
        if isinstance(value, Counter) or getattr(value, "default_factory", None) in _NUMBERS:
            return frozenset(value.items())
        if isinstance(value, Mapping):
            return {key: self.of(value[key], deep) for key in value}
        if isinstance(value, set | frozenset):
            return frozenset(each if type(each) in (*_NUMBERS, *_TEXTS) else id(each) for each in value)
        items = [self.of(each, deep) for each in value]
        return tuple(items) if isinstance(value, tuple) else items


_held: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
_read: weakref.WeakKeyDictionary[type, dict[frozenset[str], Any]] = weakref.WeakKeyDictionary()


def holds_settings(kind: type) -> bool:
    """Whether objects of a class are looked into: those of the program's classes, and configurations of packages."""
    if kind not in _held:
        _held[kind] = _is_holder(kind)
    return _held[kind]


def _is_holder(kind: type) -> bool:
    if issubclass(kind, _HOLDERS):
        return True
    if issubclass(kind, (type, ModuleType, torch.Tensor, torch.nn.Module, BaseException, Iterator, *OPTIMIZERS)):
        return False
    if kind.__module__.partition(".")[0] in ("torch", "tfnb", "numpy", "builtins"):
        return False
    return is_of_program(kind) or kind.__name__.endswith("Config")


def attributes_of(value: object, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, and of its class, that code reads which reads these names of any object."""
    kind = value if isinstance(value, type) else type(value)
    of_kind = _read.setdefault(kind, {})
    if names not in of_kind:
        of_kind[names] = _reads_of(kind, names)
    read, of_class = of_kind[names]
    own = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    for name in own.keys() & read if len(own) < len(read) else read:
        if name in own:
            yield name, own[name]
    for name in of_class:
        if name not in own and (found := getattr(value, name, MISSING)) is not MISSING:
            yield name, found


def _reads_of(kind: type, names: frozenset[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names, with those that methods, properties and operators read, and those that the class has data of."""
    read, of_class = set(names), []
    if is_of_program(kind) or issubclass(kind, _HOLDERS):
        for name in (*names, *_operators(kind)):
            found = inspect.getattr_static(kind, name, None)
            if isinstance(found, FunctionType | property | cached_property | classmethod):
                read.update(attribute_reads(kind, name))
            elif isinstance(get := getattr(type(found), "__get__", None), FunctionType):  # a descriptor of the program
                read |= names_of_attributes(get.__code__)
    for name in read:
        found = inspect.getattr_static(kind, name, MISSING)
        if type(found) in (*_NUMBERS, *_TEXTS, type(None), list, dict, tuple) or isinstance(
            found, MemberDescriptorType
        ):
            of_class.append(name)
    return frozenset(read), tuple(of_class)


def _operators(kind: type) -> list[str]:
    """The methods of a class of the program that Python calls for operators, loops, calls and ``with``."""
    own = (name for base in kind.__mro__ if is_of_program(base) for name, each in vars(base).items()
           if isinstance(each, FunctionType))  # fmt: skip
    return [name for name in own if name.startswith("__") and name not in _UNASKED]


class _Same(NamedTuple):
    """The identity of an object, and the name of its class."""

    ref: weakref.ref[Any]
    name: str


class _Array:
    """A copy of a NumPy array, equal to arrays of another shape or dtype, which have another purpose."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value = value.copy()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Array):
            return NotImplemented
        one, two = self._value, other._value
        if one.shape != two.shape or one.dtype != two.dtype:
            return True
        return bool(((one == two) | ((one != one) & (two != two))).all())

    def __repr__(self) -> str:
        return f"an array {self._value.shape}"


def array_picture(value: Any) -> Picture | None:
    """The picture of a number or an array of NumPy."""
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "") not in tuple("biufc") or value.nbytes > BIG:
        return None
    if value.shape == ():
        return Picture("number", value.tolist())
    return Picture("items", value.tolist() if value.size < FEW else _Array(value))


# -- functions ------------------------------------------------------------------------------------------------------


class _Behaviour(NamedTuple):
    """Behaviour of a function of the program, without its line: code, defaults and enclosed settings."""

    code: _Code | None
    defaults: dict[Any, Picture | None]
    enclosed: dict[Any, Picture | None]

    def __repr__(self) -> str:
        return "a function"


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


def _behaviour(value: object, names: frozenset[str], deep: int) -> Any:
    """A comparable copy of a function or partial; of the step of an optimizer that a scheduler counts, that step."""
    value = getattr(value, REPLACES, value)
    if hasattr(value, "_wrapped_by_lr_sched"):
        value = cast(Any, value).__wrapped__
    if isinstance(value, partial):
        given = dict(enumerate((value.func, *value.args)))
        return _Behaviour(None, _each(value.keywords, names, deep), _each(given, names, deep))
    if not isinstance(value, FunctionType) or is_foreign(value.__code__.co_filename):
        return value
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    enclosed = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    defaults = dict(enumerate(value.__defaults__ or ())) | (value.__kwdefaults__ or {})
    enclosed |= {name: item for name, item in vars(value).items() if name in names and name != "__wrapped__"}
    return _Behaviour(_Code(value.__code__), _each(defaults, names, deep), _each(enclosed, names, deep))


def _each(values: Mapping[Any, Any], names: frozenset[str], deep: int) -> dict[Any, Picture | None]:
    return {name: picture(value, names, deep) for name, value in values.items()}


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
