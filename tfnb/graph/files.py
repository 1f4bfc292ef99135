"""Files that are whole or absent: atomic replacement, reading of untrusted files, and digests.

A file is written under a temporary name, its draft, which the writing process locks: the draft of a process that was
killed is not locked any more, and `sweep` deletes it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

import torch

from tfnb.errors import CheckpointWriteError, InvalidArgument
from tfnb.graph.mapped_files import pieces

if sys.platform != "win32":
    import fcntl

_LINKS = 40  # that a path leads through
_DRAFT = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp", re.DOTALL)  # of which file


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises InvalidArgument for a pipe or a device, where a read might never end."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # the system has words for a folder
        raise InvalidArgument(f"{path} is no regular file: a pipe or a device cannot be checked before it is used")
    return path.open("rb")


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, sync the file and rename it to ``path``: all or nothing.

    A file that is replaced keeps its mode, and a link stays: what it leads to is replaced. Raises CheckpointWriteError
    with the errno where the disk is full or the folder cannot be written.
    """
    draft: Path | None = None
    try:
        path = _led_to(path)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
        with _locked(draft, 0o666 if mode is None else 0o600):  # who cannot read the file cannot read its draft
            write(draft)
            if mode is not None:
                draft.chmod(mode)
            _sync(draft)
            draft.replace(path)
        _sync(path.parent)
    except OSError as error:
        _raise_write_error(path, error)
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


def sweep(folder: Path, names: re.Pattern[str]) -> None:
    """Delete drafts (temporary files) left by killed processes in a folder, if their final names match ``names``."""
    for draft in folder.iterdir():
        found = _DRAFT.fullmatch(draft.name)
        if found and names.fullmatch(found[1]) and not _is_locked(draft):
            draft.unlink(missing_ok=True)


@contextmanager
def _locked(draft: Path, mode: int) -> Iterator[None]:
    """Create a draft and hold its file lock inside the block, so that other processes leave the draft alone."""
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        if sys.platform != "win32":
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_locked(draft: Path) -> bool:
    """Whether a live process holds the lock of a draft; also true where locks cannot be checked, so the draft stays."""
    if sys.platform == "win32":
        return True
    try:
        descriptor = os.open(draft, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _led_to(path: Path) -> Path:
    """Follow symbolic links to the final path, which may be absent."""
    for _ in range(_LINKS):
        if not path.is_symlink():
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_write_error(path: Path, error: OSError) -> NoReturn:
    number = error.errno or errno.EIO
    reason = os.strerror(number) if error.errno else str(error)
    if path.parent.is_dir():
        why = f"{reason}, {shutil.disk_usage(path.parent).free} bytes free; what was there before is unchanged"
    else:
        why = f"{reason}, there is no folder {path.parent}: make it, or write to another one"
    failure = CheckpointWriteError(f"cannot write {path}: {why}")
    failure.errno, failure.filename = number, str(path)
    raise failure from None  # it says all of it


def sha256(tensor: torch.Tensor) -> str:
    """Of the bytes of a dense tensor alone, not of dtype and shape."""
    summed = hashlib.sha256()
    for piece in pieces(tensor):
        summed.update(piece)
    return summed.hexdigest()
