"""Attributes that have another value inside of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def setting(owner: object, **values: object) -> Iterator[None]:
    """Set attributes of an owner inside the block, and restore the previous values afterwards.

    >>> from types import SimpleNamespace
    >>> here = SimpleNamespace(depth=0)
    >>> with setting(here, depth=1):
    ...     here.depth
    1
    >>> here.depth
    0
    """
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
