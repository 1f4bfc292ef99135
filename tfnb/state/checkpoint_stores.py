"""Stores of checkpoints: a local folder, or a folder of any file system that fsspec knows.

A file is put there as a whole under its name: in a local folder it is synced and moved there, in another store it is
uploaded once all of it is known. What is written last, a manifest, says that the files before it are there.
"""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol

import fsspec

from tfnb.errors import CheckpointWriteError, InvalidArgument
from tfnb.graph.files import replace_file, sweep

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
Signature = tuple[Any, ...]  # of a file: another one of its name has another signature


class CheckpointStore(Protocol):
    """Files by name; a name has at most one folder, ``shards/...``."""

    def path_of(self, name: str) -> Path | str:
        """The path or URL of a file."""
        ...

    def make(self, names: re.Pattern[str]) -> None:
        """Create the folder, and delete drafts of files with matching names, left by killed processes."""
        ...

    def listed(self, folder: str = "") -> Mapping[str, Signature]:
        """The files of a folder, by name."""
        ...

    def put(self, name: str, write: Callable[[Path], object]) -> None:
        """Let ``write`` fill a file; all or nothing. Raises CheckpointWriteError."""
        ...

    def got(self, name: str) -> Any:
        """A block with the path of a local file that has the contents; raises OSError."""
        ...

    def drop(self, name: str) -> None:
        """Delete a file, if present."""
        ...


class LocalStore:
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def path_of(self, name: str) -> Path:
        """The path of a file."""
        return self.path / name

    def make(self, names: re.Pattern[str]) -> None:
        """Create the folder, and delete drafts of files with matching names, left by killed processes."""
        if self.path.exists() and not self.path.is_dir():
            raise InvalidArgument(f"{self.path} is a file; checkpoints are kept in a folder")
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, *(one for one in self.path.iterdir() if one.is_dir() and not one.is_symlink())):
            sweep(folder, names)

    def listed(self, folder: str = "") -> dict[str, Signature]:
        """The files of a folder, by name, with their signatures. Broken links and folders are left out."""
        found: dict[str, Signature] = {}
        if (path := self.path / folder).is_dir():
            for one in path.iterdir():
                if one.is_file():
                    now = one.stat()
                    name = f"{folder}/{one.name}" if folder else one.name
                    found[name] = (now.st_ino, now.st_size, now.st_mtime_ns)
        return found

    def put(self, name: str, write: Callable[[Path], object]) -> None:
        """Let ``write`` fill a file; all or nothing. Raises CheckpointWriteError."""
        path = self.path / name
        if path.parent != self.path and self.path.is_dir():
            path.parent.mkdir(exist_ok=True)
            if path.is_symlink():  # a shard is none: what it leads to is not ours
                path.unlink()
        replace_file(path, write)

    @contextmanager
    def got(self, name: str) -> Iterator[Path]:
        """A block with the path of a local file that has the contents; raises OSError."""
        yield self.path / name

    def drop(self, name: str) -> None:
        """Delete a file, if present."""
        (self.path / name).unlink(missing_ok=True)


class RemoteStore:
    """A folder of a file system of fsspec: files are uploaded as a whole, and downloaded to be read."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._system, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:  # an unknown protocol, or one whose package is not installed
            raise InvalidArgument(f"no file system for {url}: {error}") from error

    def __str__(self) -> str:
        return self.url

    def path_of(self, name: str) -> str:
        """The URL of a file."""
        return f"{self.url}/{name}"

    def make(self, names: re.Pattern[str]) -> None:
        """Create the folder."""
        self._system.makedirs(self._root, exist_ok=True)

    def listed(self, folder: str = "") -> dict[str, Signature]:
        """The files of a folder, by name."""
        root = f"{self._root}/{folder}" if folder else self._root
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(root, detail=True)
        except FileNotFoundError:
            return {}
        found = [(one["name"].rpartition("/")[2], one) for one in entries if one["type"] == "file"]
        return {
            f"{folder}/{name}" if folder else name: (one["size"], *(str(one.get(fact)) for fact in _DATES))
            for name, one in found
        }

    def put(self, name: str, write: Callable[[Path], object]) -> None:
        """Let ``write`` fill a file; all or nothing. Raises CheckpointWriteError."""
        try:
            with tempfile.TemporaryDirectory(prefix="tfnb-") as folder:
                draft = Path(folder) / "draft"
                write(draft)
                self._system.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(draft), f"{self._root}/{name}")
        except OSError as error:
            failure = CheckpointWriteError(f"cannot write {self.url}/{name}: {error}; no manifest names it")
            failure.errno, failure.filename = error.errno or errno.EIO, f"{self.url}/{name}"
            raise failure from error

    @contextmanager
    def got(self, name: str) -> Iterator[Path]:
        """A block with the path of a local file that has the contents; raises OSError."""
        with tempfile.TemporaryDirectory(prefix="tfnb-") as folder:
            path = Path(folder) / name.rpartition("/")[2]
            self._system.get_file(f"{self._root}/{name}", str(path))
            yield path

    def drop(self, name: str) -> None:
        """Delete a file, if present."""
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")


_DATES = ("ETag", "etag", "mtime", "created", "LastModified", "updated", "generation")


def store_of(path: str | PathLike[str]) -> CheckpointStore:
    """The store of a folder: a path, or a URL such as ``s3://bucket/run``. Raises InvalidArgument.

    >>> str(store_of("file:///tmp/run")), str(store_of("memory://run"))
    ('/tmp/run', 'memory://run')
    """
    text = fspath(path)
    found = _URL.match(text)
    if found is None:
        return LocalStore(Path(path).absolute())  # the process may change its folder
    if found[1].lower() in ("file", "local"):
        return LocalStore(Path(fsspec.core.url_to_fs(text)[1]))
    return RemoteStore(text)


def located(path: str | PathLike[str]) -> tuple[CheckpointStore, str]:
    """The store that holds a file, and its name there."""
    text = fspath(path)
    if _URL.match(text):
        folder, _, name = text.rpartition("/")
        return store_of(folder if not folder.endswith((":", "/")) else text), name
    return LocalStore(Path(path).parent), Path(path).name
