"""tfnb: a notebook cell becomes a dataflow graph, drawn, differentiated, and run here or on a Dask cluster.

The public names, loaded when first used, so that ``import tfnb`` costs no torch. May import nothing of tfnb here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from threading import Thread, current_thread
from types import ModuleType
from typing import Any

__version__ = "0.1.0"
LOADING = 60.0  # seconds at most that a name waits for what is loaded in the background

if find_spec("tfnb.kernels") is None:
    raise ImportError(
        f"this checkout of tfnb is on the path but not installed: in {__path__[0].removesuffix('tfnb')!r} "
        "run `make demo` or `pip install -e .`"
    )

_HOME = {
    "tfnb.fitting.background": ("RunHandle", "launch"),
    "tfnb.session.breakpoints": ("break_at",),
    "tfnb.cluster": ("Cluster", "connect"),
    "tfnb.cluster.recovery": ("Recovery", "recovery_log"),
    "tfnb.fitting.comparing": ("compare",),
    "tfnb.control_flow": (
        "TensorArray", "autograph", "cond", "fold", "function", "map_fn", "no_autograph", "scan", "while_loop",
    ),
    "tfnb.doctor": ("doctor",),
    "tfnb.fitting": ("RunResult", "fit"),
    "tfnb.gradients": (
        "IndexedSlices", "clip_by_global_norm", "clip_by_norm", "clip_by_value", "custom_gradient",
        "gradient_override", "gradients", "jvp", "register_gradient", "stop_gradient",
    ),
    "tfnb.graph": ("Graph", "Node", "Spec", "Variable"),
    "tfnb.graph.mapped_memory": ("mapped_memory",),
    "tfnb.graph.variable": ("initialize",),
    "tfnb.graph.resources": ("container", "containers", "reset"),
    "tfnb.recording": (
        "Operation", "Tensor", "assert_", "colocate_with", "constant", "control_dependencies", "device", "effects",
        "graph", "graphs", "group", "name_scope", "placeholder", "print", "recompute", "record", "unordered",
        "variable",
    ),
    "tfnb.race_check": ("races",),
    "tfnb.runners": ("Coordinator", "QueueRunner"),
    "tfnb.session": ("Session", "run"),
    "tfnb.session.step_parts": ("place",),
    "tfnb.fitting.snapshots": ("Snapshots",),
    "tfnb.state.barrier": ("Barrier",),
    "tfnb.state.conditional_accumulators": ("ConditionalAccumulator", "SparseConditionalAccumulator"),
    "tfnb.state.lookup_tables": ("HashTable", "MutableHashTable", "string_keys"),
    "tfnb.state.input_sources": ("FixedLengthRecordReader", "Source", "TextLineReader", "WholeFileReader"),
    "tfnb.state.token_queue": ("TokenQueue",),
    "tfnb.session.value_cache": ("reuse_values",),
    "tfnb.watching": ("Watch", "watch"),
    "tfnb.state.queues": ("FIFOQueue", "PaddingFIFOQueue", "PriorityQueue", "RandomShuffleQueue"),
}  # fmt: skip
_ROOMS = (
    "cluster",
    "control_flow",
    "datasets",
    "errors",
    "nn",
    "recording",
    "session",
    "state",
    "summary",
    "train",
    "view",
    "widgets",
)
_FROM = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted({*_FROM, "datasets", "errors", "nn", "summary", "train"})


class _Package(ModuleType):
    """This package: importing the room ``tfnb.graph`` does not hide the public function ``tfnb.graph``."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _FROM and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


_loaders: list[Thread] = []  # that load in the background what the first recording needs


def load_in_background(load: Callable[[], None]) -> None:
    """Run ``load``, which imports, in a thread. A public name that is first used meanwhile waits for it: two threads
    that import rooms of a cycle of packages at once would see modules by half.
    """
    _loaders.append(Thread(target=load, name="tfnb-imports", daemon=True))
    _loaders[-1].start()


def _wait_for_loaders() -> None:
    while _loaders and _loaders[0] is not current_thread():
        loader = _loaders[0]
        loader.join(LOADING)
        if loader in _loaders:
            _loaders.remove(loader)


def __getattr__(name: str) -> Any:
    """Load a public name, or a room, at its first use."""
    if name not in _FROM and name not in _ROOMS:
        raise AttributeError(f"module 'tfnb' has no attribute {name!r}")
    _wait_for_loaders()
    with import_module("tfnb.interrupts").no_interrupt():  # a library loaded by half stays broken in this process
        value = getattr(import_module(_FROM[name]), name) if name in _FROM else import_module(f"tfnb.{name}")
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext tfnb``: register the magics."""
    from tfnb.magics import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """``%unload_ext tfnb``: take the magics away."""
    from tfnb.magics import unload

    unload(ipython)
