"""Python's collector of cycles, which waits while thousands of small objects are made that all stay.

Each few hundred of them it would look at all objects of the process: a third of the time of making a long graph.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector waits; for code of our own only, which leaves no cycles that hold much."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
