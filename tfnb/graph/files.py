"""Files that are whole or absent: atomic replacement, reading of what may come from strangers, and digests."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

import torch
from safetensors import SafetensorError

from tfnb.errors import CheckpointWriteError, InvalidArgument

_LINKS = 40  # that a path leads through


def opened(path: Path) -> BinaryIO:
    """A regular file to read; raises InvalidArgument for a pipe or a device, which might never end."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # the system has words for a folder
        raise InvalidArgument(f"{path} is no regular file: a pipe or a device cannot be checked before it is used")
    return path.open("rb")


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, sync it and move it there: all or nothing.

    A file that is replaced keeps its mode, and a link stays: what it leads to is replaced. Raises CheckpointWriteError
    with the errno where the disk is full or the folder cannot be written.
    """
    draft: Path | None = None
    try:
        path = _led_to(path)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
        if mode is not None:
            draft.touch(mode=0o600)  # who cannot read the file cannot read it while it is written
        write(draft)
        if mode is not None:
            draft.chmod(mode)
        _sync(draft)
        draft.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        _raise_write_error(path, error)
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


def _led_to(path: Path) -> Path:
    """The file that links lead to, which need not be there."""
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


def _raise_write_error(path: Path, error: OSError | SafetensorError) -> NoReturn:
    found = re.search(r"os error (\d+)", str(error))  # safetensors gives the errno only in its text
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else errno.EIO
    reason = os.strerror(number) if number else str(error)
    if path.parent.is_dir():
        why = f"{reason}, {shutil.disk_usage(path.parent).free} bytes free; what was there before is unchanged"
    else:
        why = f"{reason}, there is no folder {path.parent}: make it, or write to another one"
    failure = CheckpointWriteError(f"cannot write {path}: {why}")
    failure.errno, failure.filename = number, str(path)
    raise failure from None  # it says all of it


def sha256(tensor: torch.Tensor) -> str:
    """Of the bytes of a dense tensor alone, not of dtype and shape."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().data).hexdigest()
