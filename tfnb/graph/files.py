"""Files that are whole or absent: atomic replacement, and tensors in safetensors files with digests. No pickle.

A tensor file is plain safetensors; its metadata adds ``tfnb``, a JSON text, and ``digest``, a sha256 over that text
and over dtype, shape and bytes of every tensor, so a flipped bit anywhere is found before a value is used.
Imports safetensors and torch's types.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tfnb.errors import CheckpointCorrupt, CheckpointWriteError, Unimplemented

HEADER_CAP = 16 * 2**20  # bytes
_FAR = 10**12  # a place in a file that is larger than most


# -- writing ------------------------------------------------------------------------------------------------


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, sync it and move it there: all or nothing.

    Raises CheckpointWriteError with the errno where the disk is full or the folder cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write(draft)
        _sync(draft)
        draft.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        _raise_write_error(path, error)
    finally:
        draft.unlink(missing_ok=True)


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


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> str:
    """Write ``tensors`` and the JSON-able facts ``about`` them to ``path``; returns the digest.

    Raises CheckpointWriteError for facts and tensors that are more than `read_tensors` takes.
    """
    stored = {key: _stored(key, tensor) for key, tensor in tensors.items()}
    text = json.dumps({
        **about,
        "complex": [key for key, tensor in tensors.items() if tensor.is_complex()],
        "sha256": {key: sha256(tensor) for key, tensor in stored.items()},
    })  # fmt: skip
    digest = _digest(text, stored)
    header = {key: {"dtype": "BOOL", "shape": [*of.shape], "data_offsets": [_FAR, _FAR]} for key, of in stored.items()}
    if (size := len(json.dumps({**header, "__metadata__": {"tfnb": text, "digest": digest}}))) > HEADER_CAP:
        raise CheckpointWriteError(
            f"cannot write {path}: {len(stored)} tensors, and what is told of them, make a header of {size} bytes; "
            f"at most {HEADER_CAP} can be read again. What was there before is unchanged"
        )
    replace_file(path, lambda draft: save_file(stored, draft, {"tfnb": text, "digest": digest}))
    return digest


def _stored(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as safetensors takes it: dense, real, on the CPU, with a storage of its own."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Unimplemented(f"{key}: {tensor.layout} tensors cannot be written to a file; convert with to_dense()")
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)  # a copy: digest and file see one value


# -- reading ------------------------------------------------------------------------------------------------


def read_tensors(path: Path, *, of_others: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, Any], str]:
    """Tensors, the facts about them, and the digest; raises CheckpointCorrupt naming file and key.

    of_others: a file that another library wrote is read, too: it has no facts and no digest.
    """
    _check_header_size(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError) as error:  # ValueError: a header that is not text
        raise CheckpointCorrupt(f"{path} is damaged or truncated: {error}") from None
    if of_others and not metadata.keys() & {"tfnb", "digest"}:
        return stored, {}, ""
    about = _checked(path, metadata, stored)
    whole = {key: torch.view_as_complex(t) if key in about["complex"] else t for key, t in stored.items()}
    return whole, about, metadata["digest"]


def read_facts(path: Path) -> tuple[list[str], dict[str, Any]]:
    """The keys of a file's tensors and the facts about them, from its header alone, which no digest vouches for."""
    _check_header_size(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = json.loads((file.metadata() or {}).get("tfnb", "{}"))
            return list(file.keys()), about if isinstance(about, dict) else {}
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is damaged or truncated: {error}") from None


def _check_header_size(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    size = int.from_bytes(start, "little")
    room = path.stat().st_size - 8
    if start.startswith(b"PK"):
        raise CheckpointCorrupt(
            f"{path} is no safetensors file; it looks like one of torch.save: model.load_state_dict(torch.load(path)) "
            "gives it to the module, and so to a graph that was recorded with that"
        )
    if len(start) < 8 or (size > HEADER_CAP and size > room):
        raise CheckpointCorrupt(f"{path} is no safetensors file: it has {room + 8} bytes and no header")
    if size > room:
        raise CheckpointCorrupt(f"{path} is truncated: {room + 8} bytes, header says {size}")
    if size > HEADER_CAP:
        raise CheckpointCorrupt(f"{path} has a header of {size} bytes; at most {HEADER_CAP} are allowed")


def _checked(path: Path, metadata: Mapping[str, str], stored: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The JSON facts, after all digests fit."""
    if "tfnb" not in metadata or "digest" not in metadata:
        raise CheckpointCorrupt(f"{path} was not written by tfnb, or its metadata is damaged")
    text = metadata["tfnb"]
    try:
        about = json.loads(text)
        expected = dict(about["sha256"])
        about["complex"] = frozenset(about["complex"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} has damaged metadata: {error}") from error
    for key in sorted({*expected, *stored}):
        found = sha256(stored[key]) if key in stored else "nothing"
        if found != expected.get(key):
            raise CheckpointCorrupt(f"{path}: {key} has sha256 {found}, expected {expected.get(key)}")
    if _digest(text, stored) != metadata["digest"]:
        raise CheckpointCorrupt(f"{path}: metadata has another digest than expected, {metadata['digest']}")
    return about


def sha256(tensor: torch.Tensor) -> str:
    """Of the bytes of a dense tensor alone, not of dtype and shape."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().data).hexdigest()


def _digest(text: str, stored: Mapping[str, torch.Tensor]) -> str:
    """Of the JSON text, which holds the sha256 of the bytes, and of every dtype and shape."""
    specs = [[key, str(stored[key].dtype), list(stored[key].shape)] for key in sorted(stored)]
    return hashlib.sha256(f"{text}\n{json.dumps(specs)}".encode()).hexdigest()
