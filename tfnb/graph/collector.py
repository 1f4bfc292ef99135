"""Python's collector of cycles, while many objects are made that stay.

After a certain number of new objects the collector scans all objects of the process: that takes a third of the time of
making a long graph, and is the longest pause of steps that go on while another thread compiles.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the block. For code of our own only, whose cycles hold little memory."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def lasting() -> Iterator[None]:
    """Disable garbage collection inside the block, and move the objects made there to the oldest generation.

    For imports, once in a process: what else was made lately counts as old from here on, too.
    """
    with uncollected():
        yield
        if not gc.get_freeze_count():  # what somebody froze stays so
            gc.freeze()
            gc.unfreeze()


@contextmanager
def frozen() -> Iterator[None]:
    """Exempt existing objects from garbage collection inside, and new ones after a full collection; in all threads."""
    is_ours = not gc.get_freeze_count()  # what somebody else froze stays so
    if is_ours:
        gc.freeze()
        gc.callbacks.append(_seen)
    try:
        yield
    finally:
        if is_ours:
            gc.callbacks.remove(_seen)
            gc.unfreeze()


def _seen(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
