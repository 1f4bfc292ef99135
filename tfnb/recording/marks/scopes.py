"""The module and torch function of a node, shown in drawings and names.

Overrides of torch functions are called from here, too: `Functions` sees each call of one before torch does.

Modules are followed by `tfnb.recording.dispatch.module_hooks`, functions by `tfnb.recording.dispatch.function_mode`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from tfnb.errors import ensure_type
from tfnb.graph.current import is_recorded

_SHORT = 64  # items; a longer list or dict of the program's holds data
_BAD = re.compile(r"[^A-Za-z0-9_.]+")


@lru_cache(maxsize=4096)
def clean(name: str) -> str:
    """A string as a legal part of a node name."""
    part = _BAD.sub("_", name).strip("_")
    return part if part and (part[0].isalnum() or part[0] == ".") else f"n{part}"


class Label(NamedTuple):
    """A place where a parameter or buffer was seen."""

    tensor: torch.Tensor
    path: str
    root: str
    places: list[tuple[torch.nn.Module, str]]


class _Open(NamedTuple):
    """A module whose forward runs: how deep the path was, names of the modules inside, the buffers held before."""

    module: torch.nn.Module
    depth: int
    names: dict[int, str]
    held: object


class Scopes:
    """The stack of open scopes of one recording: name scopes, modules, then the torch function."""

    def __init__(self, names: Callable[[], Mapping[str, Any]]) -> None:
        self._names = names  # of the user's program
        self.path: list[str] = []
        self.function: str | None = None
        self.paused = 0
        self.labels: dict[int, Label] = {}  # by the id of a parameter or buffer
        self._modules: list[_Open] = []
        self._opened: dict[tuple[str, ...], int] = {}
        self._lent: Counter[int] = Counter()  # ids of tensors that modules hold for the time of a functional_call

    def current(self) -> tuple[str, ...]:
        """Scope of a node recorded now."""
        return (*self.path, self.function) if self.function else tuple(self.path)

    @contextmanager
    def name_scope(self, name: str | None) -> Iterator[str]:
        """``"a"`` opens a fresh ``a``, ``a_1``; ``"a/"`` re-enters; ``None`` returns to the root."""
        ensure_type(name, (str, type(None)), "name_scope")
        before, function = self.path, self.function
        if name is None:
            self.path = []
        elif name.endswith("/"):
            self.path = name.strip("/").split("/")
        else:
            key = (*before, name)
            count = self._opened.get(key, 0)
            self._opened[key] = count + 1
            self.path = [*before, f"{name}_{count}" if count else name]
        self.function = None
        try:
            yield "/".join(self.path)
        finally:
            self.path, self.function = before, function

    # -- modules --------------------------------------------------------------------------------------------

    @contextmanager
    def lending(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, modules hold these tensors in the place of their own parameters and buffers."""
        lent = Counter(map(id, tensors))
        self._lent += lent
        try:
            yield
        finally:
            self._lent -= lent

    def enter(self, module: torch.nn.Module, held: object = ()) -> None:
        """A module's forward begins; `exit` returns ``held``."""
        names = self._modules[-1].names if self._modules else {}
        before = len(self.path)
        path = names.get(id(module))
        if path is None:
            path = self.python_name(module) or type(module).__name__
            names = {id(child): child_path for child_path, child in module.named_modules()}
            self._label(module, "" if not self._modules else f"{path}.", path)
            self.path = [*self.path, path]
        else:
            inner = {id(child): child_path for child_path, child in module.named_modules() if child is not module}
            self.path = [*self.path, *path.split(".")]
            names = inner
        self._modules.append(_Open(module, before, names, held))

    @property
    def module(self) -> torch.nn.Module | None:
        """The module whose forward runs."""
        return self._modules[-1].module if self._modules else None

    def exit(self, module: torch.nn.Module) -> Any:
        """End a module's forward, also by an exception; returns the object given to `enter`."""
        while self._modules:
            top = self._modules.pop()
            self.path = self.path[: top.depth]
            if top.module is module:
                return top.held
        return ()

    def _label(self, root: torch.nn.Module, prefix: str, root_name: str) -> None:
        for path, module in root.named_modules(prefix=prefix.rstrip(".")):
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or is_recorded(tensor) or id(tensor) in self._lent:
                    continue
                label = self.labels.get(id(tensor))
                if label is None or label.tensor is not tensor:
                    full = f"{path}.{attribute}" if path else attribute
                    label = self.labels[id(tensor)] = Label(tensor, full, root_name, [])
                if (module, attribute) not in label.places:
                    label.places.append((module, attribute))

    def python_name(self, target: object) -> str | None:
        """The name that the user's program has for an object."""
        found = [n for n, v in self._names().items() if v is target and not n.startswith("_")]
        return found[0] if found else None

    def look_for_buffer(self, tensor: torch.Tensor) -> None:
        """A tensor met before its module was called may be a buffer of a module that the program has a name for."""
        for name, value in list(self._names().items()):
            for module in _modules_of(value):
                if any(tensor is buffer for buffer in module.buffers()):
                    self._label(module, "", name)
                    return

    def know(self, module: torch.nn.Module, attribute: str, tensor: torch.Tensor) -> None:
        """A module holds this tensor under this name."""
        if not self.places(tensor):
            self.look_for_buffer(tensor)
        if (module, attribute) not in self.places(tensor):
            self._label(module, "", self.python_name(module) or type(module).__name__)

    def places(self, tensor: torch.Tensor | None) -> list[tuple[torch.nn.Module, str]]:
        """The (module, name) pairs, among modules met so far, that hold this tensor."""
        found = self.labels.get(id(tensor))
        return found.places if found is not None and found.tensor is tensor else []

    def label(self, tensor: torch.Tensor, taken: Collection[str]) -> str | None:
        """The module path of a parameter or buffer (with the root module's name if that is taken), or a Python name."""
        found = self.labels.get(id(tensor))
        if found is None or found.tensor is not tensor:
            return self.python_name(tensor)
        return f"{found.root}.{found.path}" if found.path in taken else found.path


def modules_of(names: Mapping[str, Any]) -> list[torch.nn.Module]:
    """The modules that the user's program has names for."""
    return [module for value in list(names.values()) for module in _modules_of(value)]


def _modules_of(value: object) -> list[torch.nn.Module]:
    """A module; or the modules in a short list or dict, among an object's attributes, or that a function, method or
    partial encloses or has as defaults, also in a list, dict or object there, and also of a function that lies there.
    """
    queue, opened, seen = [value], {id(value)}, {id(value)}
    for item in queue:  # which grows
        is_code = isinstance(item, FunctionType | MethodType | partial)
        if (is_code or id(item) in opened) and not isinstance(item, torch.nn.Module):
            new = [inner for inner in _inside(item) if id(inner) not in seen]
            queue += new
            seen.update(map(id, new))
            opened.update(map(id, new if is_code else ()))  # what code holds, and not what lies in that
    return [item for item in queue if isinstance(item, torch.nn.Module)]


def _inside(value: object) -> Iterable[Any]:
    """The objects that a value of the program holds."""
    match value:
        case FunctionType():
            given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            return [*given, *(cell.cell_contents for cell in value.__closure__ or () if _is_bound(cell))]
        case MethodType():
            return [value.__self__, value.__func__]
        case partial():
            return [value.func, *value.args, *value.keywords.values()]
        case list() | tuple():
            return value if len(value) < _SHORT else ()
        case dict():
            return list(value.values()) if len(value) < _SHORT else ()
        case type() | ModuleType():
            return ()
    return list(getattr(value, "__dict__", {}).values())


def _is_bound(cell: CellType) -> bool:
    """Whether an enclosed name has a value by now."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
