"""Packages on disk: folders of compiled code under a key, shared by all processes of one user.

A package is code, so only a folder that nobody else can fill is read, see `private_folder`. An entry is written beside
its place and moved there, so it is whole or absent. Its digests are checked before anything of it is used, and one that
is damaged is removed. The entries that were used longest ago go when there is no room.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from tfnb.errors import InvalidArgument
from tfnb.execution.compiling.private_folder import refusal, spares
from tfnb.recording.marks.notes import user_level

FOLDER, LIMIT = "TFNB_CACHE_DIR", "TFNB_CACHE_MB"  # environment variables
MOST_MB = 1024
ENTRY = "entry.json"  # digests of an entry's files, and facts about it
DRAFT, LOCK = ".draft-", ".lock-"
LOOK = 0.2  # seconds between two looks at a lock
FORGOTTEN = 3600.0  # seconds after which a draft belongs to nobody: its process was killed
SOURCES = (".py", ".c", ".h")
SHAPES_CODE = (
    "errors.py", "execution", "graph", "interrupts.py", "memory", "passes", "recording/marks", "recording/shapes",
    "recording/values", "state",
)  # fmt: skip
"""Our sources that a package depends on, with all of ``tfnb.kernels``: those that its compiler imports, by floors.

What the others do shows in the graph. `tests/test_layers.py` follows the imports."""


class PackageCache:
    """The packages of a folder; an unsafe folder is replaced by a spare one, and ``why`` has the reason.

    limit: bytes. A package larger than that is given to who made it and not kept.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     packages = PackageCache(Path(folder) / "packages")
    ...     draft = packages.draft()
    ...     _ = (draft / "code").write_text("...")
    ...     kept = packages.keep("a1", draft, {"seconds": 3.5})
    ...     packages.find("a1") == kept, packages.find("b2"), packages.facts("a1")
    (True, None, {'seconds': 3.5})
    """

    def __init__(self, folder: Path, limit: int = MOST_MB << 20) -> None:
        self.wanted, self._folder, self.limit = folder, folder, limit
        self.why: str | None = None
        self._moving = threading.Lock()

    @property
    def folder(self) -> Path:
        """The folder of the entries, checked at each access: a folder writable by others is abandoned for a
        spare one.
        """
        if (why := refusal(self._folder)) is not None:
            with self._moving:
                if refusal(self._folder) is not None:  # else another thread has moved
                    self._move(why)
        return self._folder

    def _move(self, why: str) -> None:
        self.why = refusal(self.wanted) or why
        found = [each / "packages" for each in spares() if refusal(each / "packages") is None]
        spare = found[0] if found else self._of_this_process()
        self._folder = spare
        warnings.warn(
            f"compiled steps are code, and {self.why}: they are kept in {spare}. Set {FOLDER} to a folder that only "
            "you can write",
            stacklevel=user_level(None),
        )

    def _of_this_process(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="tfnb-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        if (why := refusal(folder)) is not None:
            raise PermissionError(errno.EPERM, f"code cannot be kept: {self.why}; {why}; set {FOLDER}", str(folder))
        self.why = f"{self.why}, and no other folder was found that lasts longer than this process"
        return folder

    def find(self, key: str) -> Path | None:
        """The folder of an entry whose files match their digests; updates its time of use."""
        try:
            at = self.folder / key
            for name, written in _read(at)["files"].items():
                if digest((at / name).read_bytes()) != written:
                    raise ValueError(f"{name} is damaged")
            os.utime(at)
        except (OSError, ValueError, KeyError, TypeError):  # absent, or damaged
            self.drop(key)
            return None
        return at

    def facts(self, key: str) -> dict[str, Any]:
        """The facts about an entry; none where there is no entry."""
        try:
            return dict(_read(self.folder / key)["facts"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def some_facts(self, most: int) -> list[dict[str, Any]]:
        """The facts about so many entries, in no order; none where the folder cannot be read."""
        with suppress(OSError):
            return [self.facts(at.name) for at in islice(self._entries(), most)]
        return []

    def note(self, key: str, facts: Mapping[str, Any]) -> None:
        """Add facts about an entry, if the entry exists and is writable."""
        try:
            at = self.folder / key
            entry = _read(at)
            _write(at, entry["files"], entry["facts"] | facts)
        except (OSError, ValueError, KeyError, TypeError):
            return  # a fact that is missing is found out again

    def draft(self) -> Path:
        """A new folder to write a package into."""
        return Path(tempfile.mkdtemp(prefix=DRAFT, dir=self.folder))

    def keep(self, key: str, draft: Path, facts: Mapping[str, Any]) -> Path:
        """Move a draft to its final folder; returns the entry's folder, possibly one written first by another process.

        What cannot be kept stays a draft, which this process may use until its end.
        """
        try:
            paths = sorted(path for path in draft.rglob("*") if path.is_file())
            files = {str(path.relative_to(draft)): digest(path.read_bytes()) for path in paths}
            _write(draft, files, facts)
            if _bytes(draft) > self.limit:
                atexit.register(shutil.rmtree, draft, ignore_errors=True)
                return draft
            at = draft.rename(self.folder / key)
        except OSError:  # there is one already, or no room
            found = self.find(key)
            if found is not None:
                shutil.rmtree(draft, ignore_errors=True)
            return found or draft
        self._trim(key)
        return at

    @contextmanager
    def alone(self, key: str, seconds: float, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """A block that one process at a time runs for an entry, so that the tasks of a host do not all compile the
        step.

        Who has waited for so long, or ``is_wanted`` no more, runs it beside the others; so does everybody where files
        cannot be locked.
        """
        lock, end = None, time.monotonic() + seconds
        with suppress(OSError, NotImplementedError):
            lock = FileLock(self.folder / f"{LOCK}{key}")
            while not lock.is_locked and is_wanted() and time.monotonic() < end:
                with suppress(Timeout):
                    lock.acquire(timeout=LOOK, poll_interval=LOOK)
        try:
            yield
        finally:
            if lock is not None and lock.is_locked:
                with suppress(OSError):
                    Path(lock.lock_file).unlink()
                lock.release()

    def drop(self, key: str) -> None:
        """Remove an entry atomically: no process sees a partial entry."""
        try:
            folder = self.folder
            grave = (folder / key).rename(folder / f"{DRAFT}{key}-{os.getpid()}-{time.monotonic_ns()}")
        except OSError:  # another process did, or nobody can
            return
        shutil.rmtree(grave, ignore_errors=True)

    def clear(self) -> int:
        """Remove all entries; gives how many there were."""
        found = list(self._entries())
        for at in found:
            self.drop(at.name)
        return len(found)

    def _entries(self) -> Iterator[Path]:
        with os.scandir(self.folder) as found:
            yield from (Path(each) for each in found if each.is_dir() and not each.name.startswith("."))

    def _trim(self, newest: str) -> None:
        """Make room: drafts that nobody writes, then the entries used longest ago."""
        for draft in self.folder.glob(f"{DRAFT}*"):
            if _used(draft) < time.time() - FORGOTTEN:
                shutil.rmtree(draft, ignore_errors=True)
        for lock in self.folder.glob(f"{LOCK}*"):  # of processes that were killed
            if _used(lock) < time.time() - FORGOTTEN:
                lock.unlink(missing_ok=True)
        entries = sorted((at for at in self._entries() if at.name != newest), key=_used)
        total = sum(map(_bytes, entries)) + _bytes(self.folder / newest)
        for at in entries:
            if total <= self.limit:
                return
            total -= _bytes(at)
            self.drop(at.name)

    def __repr__(self) -> str:
        entries = list(self._entries())
        size = sum(map(_bytes, entries)) / 2**20
        where = f"{self.folder} ({self.why})" if self.why else str(self.folder)
        return f"{len(entries)} packages, {size:,.1f} of {self.limit / 2**20:,.0f} MiB, in {where}"


@cache
def packages() -> PackageCache:
    """The user's cache: TFNB_CACHE_DIR, else the platform's cache folder; at most TFNB_CACHE_MB."""
    given = os.environ.get(LIMIT, str(MOST_MB))
    if not given.isdecimal():
        raise InvalidArgument(f"{LIMIT} is a number of MiB, not {given!r}")
    folder = os.environ.get(FOLDER)
    return PackageCache((Path(folder) if folder else user_cache_path("tfnb")) / "packages", int(given) << 20)


@cache
def surroundings() -> str:
    """A digest of a package's dependencies beside its step: our code (`SHAPES_CODE`, kernels), and the `machine`."""
    home, kernels = _folder("tfnb"), _folder("tfnb.kernels")
    sources = _stamps([*(home / name for name in SHAPES_CODE), kernels])
    return digest(repr([sources, machine()]).encode())


@cache
def machine() -> str:
    """A digest of what compiled code depends on beside its source: torch, Python, processor and C++ compiler."""
    found = [sys.version, sys.platform, platform.machine(), _processor(), torch.__version__, torch.version.git_version]
    compiler = cpp_compiler()
    return digest(repr([*found, compiler and _stamp(compiler)]).encode())


def cpp_compiler() -> str | None:
    """The C++ compiler that inductor would call: CXX, else g++."""
    return shutil.which(os.environ.get("CXX", "g++"))


def digest(data: bytes) -> str:
    """The sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, package  # we are running it
    return Path(spec.origin).parent


def _stamps(places: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Of each source in folders, or that is one: a checkout changes without another version."""
    found, folders = list[tuple[str, int, int]](), list[str]()
    for place in map(str, places):
        if place.endswith(SOURCES):
            found.append(_stamp(place))
        else:
            folders.append(place)
    while folders:  # hundreds of files, before the first step
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(SOURCES):
                    found.append(_stamp(entry.path))
                elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)
    return sorted(found)


def _stamp(path: str) -> tuple[str, int, int]:
    found = os.stat(path)  # noqa: PTH116
    return path, found.st_size, found.st_mtime_ns


def _processor() -> str:
    """Its instructions; where the system does not list them, its name."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _read(at: Path) -> dict[str, Any]:
    written, _, text = (at / ENTRY).read_text().partition("\n")
    if digest(text.encode()) != written:
        raise ValueError(f"{at / ENTRY} is damaged")
    return dict(json.loads(text))


def _write(at: Path, files: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    text = json.dumps({"files": dict(files), "facts": dict(facts)})
    new = at / f"{ENTRY}-{secrets.token_hex(4)}"
    new.touch(mode=0o600)
    new.write_text(f"{digest(text.encode())}\n{text}")
    new.replace(at / ENTRY)


def _bytes(at: Path) -> int:
    try:
        return sum(path.stat().st_size for path in at.rglob("*") if path.is_file())
    except OSError:  # another process removed it
        return 0


def _used(at: Path) -> float:
    try:
        return at.stat().st_mtime
    except OSError:
        return 0.0
