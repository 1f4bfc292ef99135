"""Imports for the first fake tensor of a process: torch's compiler, which takes as long to load as torch itself.

``%load_ext tfnb`` imports it in the background. A recording that opens earlier waits here.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from threading import Lock

from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tfnb.graph.collector import lasting

_lock = Lock()


def imported() -> None:
    """Import torch's compiler once; other threads wait meanwhile."""
    with _lock:
        _once()


@cache
def _once() -> None:
    with lasting():
        import_module("torch._dynamo")
        # The first event tells torch whether anybody listens; until then each new size has its stack written down, for
        # which the code generator is loaded.
        trace_structured("tfnb", suppress_context=True)
        ShapeEnv()
        FakeTensorMode()
