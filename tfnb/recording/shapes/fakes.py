"""torch's fake tensors without its compiler, which they load for a setting and a few functions of three modules.

To import `torch._dynamo` takes the larger part of a second and 30 MB. So the package waits: those modules are
there, and whoever imports another one, or takes an attribute, has Python's importer load it, into the module that
waited. torch keeps many of its functions from being compiled, and asks the package for that when it calls them first:
until it is loaded nothing compiles, and they run as they are. Where it is loaded already, nothing changes. Private
names of torch were tried with torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from threading import Lock, get_ident
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.graph.collector import lasting

_COMPILER = "torch._dynamo"
_NEEDED = ("config", "exc", "utils")  # by torch._subclasses.fake_tensor and torch.fx.experimental.validator


@cache
def imported() -> None:
    """What the first ShapeEnv and FakeTensorMode of a process import, which is much of torch."""
    with lasting():
        _wait()
        # The first event tells torch whether anybody listens; until then each new size has its stack written down, for
        # which the code generator is loaded.
        trace_structured("tfnb", suppress_context=True)
        ShapeEnv()
        FakeTensorMode()


class _Waiting(ModuleType):
    """The package before it is loaded. It has no path: Python's importer asks for that on the way to other modules."""

    def __getattr__(self, name: str) -> Any:
        later: _Later = self.__dict__["__later__"]
        if name == "disable":
            return later.disable
        if name == "__path__":
            return later.path()
        if name.startswith("__"):
            raise AttributeError(f"module {_COMPILER!r} has no attribute {name!r}")
        later.load()
        return ModuleType.__getattribute__(self, name)


class _Later(MetaPathFinder, Loader):
    """Has Python's importer load the package into the module that waits, of which others hold parts."""

    def __init__(self, spec: ModuleSpec) -> None:
        assert spec.loader is not None
        self.spec, self.loader, spec.loader = spec, spec.loader, self
        self.module = _Waiting(_COMPILER)
        self.module.__dict__["__later__"] = self
        self.preparing: int | None = None  # the thread that imports what is needed
        self._lock, self._waits = Lock(), True
        self._on_the_way: set[int] = set()  # threads that were about to import a module of the package
        self._as_they_are: WeakSet[Any] = WeakSet()

    def load(self) -> None:
        """Python's importer loads the package: one thread does, others wait."""
        with self._lock:  # nothing is imported under it
            if self._waits:
                self._waits = False
                sys.modules.pop(_COMPILER, None)
        import_module(_COMPILER)

    def path(self) -> list[str]:
        """Where the package's modules are, which it imports itself before anybody else does."""
        if self.preparing != get_ident():
            self.load()
            self._on_the_way.add(get_ident())
        return list(self.spec.submodule_search_locations or ())

    def disable(self, function: Any = None, *args: Any, **options: Any) -> Any:
        """The package's function of this name; torch's own question, `torch._compile`, is answered for now."""
        if not self._waits or options != {"wrapping": False}:
            self.load()
            return self.module.disable(function, *args, **options)
        self._as_they_are.add(function)
        return function

    # -- what Python's importer calls ---------------------------------------------------------------------------

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name == _COMPILER:
            return self.spec
        if get_ident() not in self._on_the_way or not name.startswith(f"{_COMPILER}."):
            return None
        self._on_the_way.discard(get_ident())
        there = sys.modules.get(name)
        return PathFinder.find_spec(name, path) if there is None else ModuleSpec(name, _There(there))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.module.__path__ = list(spec.submodule_search_locations or ())  # type: ignore[assignment]
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # a recording may be open
            self.loader.exec_module(module)
        self.spec.loader = module.__loader__ = self.loader
        module.__class__ = ModuleType
        for function in self._as_they_are:
            vars(function).pop("__dynamo_disable", None)  # so that torch asks again


class _There(Loader):
    """Of a module that came with its package while the importer was on the way to it: it stays as it is."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def _wait() -> None:
    """Have the compiler wait until it is used, if it is not there."""
    spec = None if _COMPILER in sys.modules else find_spec(_COMPILER)
    if spec is None:
        return
    later = _Later(spec)
    sys.meta_path.insert(0, later)
    sys.modules[_COMPILER] = torch._dynamo = later.module  # type: ignore[assignment]
    later.module.__spec__ = spec
    later.preparing = get_ident()
    try:
        for name in _NEEDED:
            import_module(f"{_COMPILER}.{name}")
    finally:
        later.preparing = None
