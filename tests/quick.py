"""Parameters of which quick runs take a few, and slow runs the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(count: int, values: Iterable[Any], ids: Collection[str] | None = None) -> list[Any]:
    """For ``parametrize``: all values, of which those behind the first so many are marked slow."""
    found = list(values)
    names: Iterable[Any] = [None] * len(found) if ids is None else ids
    rest = [[] if place < count else [pytest.mark.slow] for place in range(len(found))]
    return [pytest.param(value, id=name, marks=marks) for value, name, marks in zip(found, names, rest, strict=True)]
