"""Files that compilations of this machine share, kept among the packages and checked like them.

An entry is kept under its name and the digest of `package_cache.machine`: another torch, processor or compiler makes
its own. Its files are compared with their digests when a process first uses it. It counts in the limit of the cache,
and goes like a package when it was used longest ago.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tfnb.execution.compiling.package_cache import digest, machine, packages

WAIT = 120.0  # seconds for another process that makes the same
Make = Callable[[Path], Mapping[str, Any]]
"""Fills a folder, and gives facts about it."""

_checked: dict[str, Path] = {}  # folders by key that this process has checked, or made


def machine_files(
    name: str, make: Make, is_current: Callable[[Path, Mapping[str, Any]], bool] = lambda *_: True
) -> Path:  # fmt: skip
    """The folder of an entry; ``make`` fills it where there is none, or one that is not current.

    name: says all that the files depend on beside the machine. is_current: asked when a process first uses an entry.
    """
    key = digest(f"{machine()} {name}".encode())
    found = _checked.get(key)
    if found is None or not found.exists():  # another process may have made room
        found = _checked[key] = _current(key, is_current) or _made(key, make, is_current)
    with suppress(OSError):
        os.utime(found)
    return found


def _current(key: str, is_current: Callable[[Path, Mapping[str, Any]], bool]) -> Path | None:
    found = packages().find(key)
    if found is None or is_current(found, packages().facts(key)):
        return found
    packages().drop(key)
    return None


def _made(key: str, make: Make, is_current: Callable[[Path, Mapping[str, Any]], bool]) -> Path:
    with packages().alone(key, WAIT):
        found = _current(key, is_current)
        if found is not None:
            return found
        draft = packages().draft()
        try:
            facts = make(draft)
        except BaseException:  # also of a build that takes too long
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return packages().keep(key, draft, facts)
