"""Tensors in safetensors files with digests, read into memory that no other process can change. No pickle.

A tensor file is plain safetensors; its metadata adds ``tfnb``, a JSON text, and ``digest``, a sha256 over that text
and over dtype, shape and bytes of every tensor, so a flipped bit anywhere is found before a value is used. What is
read is hashed on its way into memory of ours, and the file is not looked at again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from tfnb.errors import CheckpointCorrupt, CheckpointWriteError, InvalidArgument, ResourceExhausted, Unimplemented
from tfnb.graph import lazy_memory, mapped_files, strict_json
from tfnb.graph.files import opened, replace_file, sha256
from tfnb.graph.mapped_files import MappedFile, pieces, region_of, span_of, zeros

HEADER_CAP = 16 * 2**20  # bytes
TENSOR_CAP = 2**17  # tensors of a file: each takes a thousand bytes here, and few in a header
RANK_CAP = 64  # axes of a tensor
SIZE_CAP = 2**63  # elements, also of a tensor that has none: strides are numbers of 64 bits
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"  # the key of a header that is no tensor
_PIECE = 1 << 22  # bytes that are read, hashed and put in their place together


# -- writing ------------------------------------------------------------------------------------------------


class TensorDraft(NamedTuple):
    """A tensor file that is not written yet: its digest, its header, and its tensors in the order of their bytes.

    sums: the sha256 of each tensor. A mapped one is no copy: it is read from its file, and must stand still.
    """

    digest: str
    header: bytes
    tensors: tuple[torch.Tensor, ...]
    sums: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return 8 + len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def write(self, path: Path) -> None:
        """Fill a file; other threads go on meanwhile."""
        with path.open("wb") as file:
            file.write(len(self.header).to_bytes(8, "little") + self.header)
            for tensor, expected in zip(self.tensors, self.sums, strict=True):
                summed = hashlib.sha256() if span_of(tensor) is not None else None
                for piece in pieces(tensor):
                    file.write(piece)
                    if summed is not None:
                        summed.update(piece)
                if summed is not None and summed.hexdigest() != expected:
                    raise CheckpointWriteError(f"cannot write {path}: a mapped tensor changed meanwhile; save again")


def drafted(path: object, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> TensorDraft:
    """The file that `write_tensors` writes to ``path``: equal tensors and facts make equal bytes and equal digests.

    Raises CheckpointWriteError for facts and tensors that are more than `read_tensors` takes.
    """
    stored = {key: _stored(key, tensor) for key, tensor in tensors.items()}
    sums = {key: sha256(tensor) for key, tensor in stored.items()}
    complex = [key for key, tensor in tensors.items() if tensor.is_complex()]
    text = json.dumps({**about, "complex": complex, "sha256": sums})
    digest = _digest(text, {key: TensorEntry(of.dtype, tuple(of.shape)) for key, of in stored.items()})
    ordered = dict(sorted(stored.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))  # all are aligned
    header = _header(ordered, {"tfnb": text, "digest": digest})
    if len(header) > HEADER_CAP:
        raise CheckpointWriteError(
            f"cannot write {path}: {len(stored)} tensors and the facts about them make a header of {len(header)} "
            f"bytes; at most {HEADER_CAP} can be read again. What was there before is unchanged"
        )
    return TensorDraft(digest, header, tuple(ordered.values()), tuple(sums[key] for key in ordered))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> str:
    """Write ``tensors`` and JSON-able facts ``about`` the tensors to ``path``; returns the digest. Raises as
    `drafted`.
    """
    draft = drafted(path, tensors, about)
    replace_file(path, draft.write)
    return draft.digest


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """The JSON of a safetensors file, padded to whole words."""
    records: dict[str, Any] = {_METADATA: metadata}
    stop = 0
    for key, tensor in tensors.items():
        start, stop = stop, stop + tensor.nbytes
        records[key] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, stop]}
    text = json.dumps(records, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _stored(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the form that safetensors takes: dense, real, on the CPU, with its own storage."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Unimplemented(f"{key}: {tensor.layout} tensors cannot be written to a file; convert with to_dense()")
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    if plain.dtype not in _NAMES:
        raise Unimplemented(f"{key}: {plain.dtype} tensors cannot be written to a file; convert it to another dtype")
    if key == _METADATA:
        raise InvalidArgument(f"a file has no tensor named {_METADATA}: safetensors keeps that name for itself")
    if span_of(plain) is not None:  # mapped, and larger than the memory: `TensorDraft.write` looks whether it changed
        return plain
    return torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)  # a copy: digest and file see one value


# -- headers ------------------------------------------------------------------------------------------------


class TensorEntry(NamedTuple):
    """The header's entry of one tensor, whose bytes begin at ``start``, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """Header of a file: entries by key in the order of their bytes, and metadata texts."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, Any]
    begin: int  # of the first tensor, in the file

    @cached_property
    def is_of_others(self) -> bool:
        """Whether another library wrote the file: the header has no facts and no digest of ours."""
        return not self.metadata.keys() & {"tfnb", "digest"}


def read_facts(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Keys of a file's tensors and the facts about the tensors, from the header alone and not verified by a digest."""
    with opened(path) as file:
        header = read_header(path, file)
    try:
        about = strict_json.read(header.metadata.get("tfnb", "{}"), finite=False)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path} has damaged metadata: {error}") from None
    return list(header.entries), about if isinstance(about, dict) else {}


def read_header(path: Path, file: BinaryIO) -> Header:
    """Read the header of an open file, leaving the file position behind the header; raises CheckpointCorrupt."""
    text, room = _header_text(path, file)
    try:
        records = strict_json.read(text.decode())
        if not isinstance(records, dict):
            raise TypeError("its header is no object")
        metadata = dict(records.pop(_METADATA, None) or {})
        if len(records) > TENSOR_CAP:
            raise ValueError(f"it has {len(records)} tensors; at most {TENSOR_CAP} are allowed")
        found = sorted((_entry(key, record) for key, record in records.items()), key=lambda each: each[1])
        at = 0
        for key, (start, stop), _ in found:
            if start != at:
                raise ValueError(f"{key} begins at byte {start} of the tensors, where the one before it ends at {at}")
            at = stop
        if at != room:
            raise ValueError(f"its tensors end at byte {at} of {room}")
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # UnicodeDecodeError is a ValueError
        raise CheckpointCorrupt(f"{path} is damaged or truncated: {error}") from None
    return Header({key: entry for key, _, entry in found}, metadata, 8 + len(text))


def _header_text(path: Path, file: BinaryIO) -> tuple[bytes, int]:
    """The bytes of a header, and the number of bytes that follow."""
    whole = os.fstat(file.fileno()).st_size
    start = file.read(8)
    size = int.from_bytes(start, "little")
    room = whole - 8
    if start.startswith(b"PK"):
        raise CheckpointCorrupt(
            f"{path} is no safetensors file; it looks like one of torch.save: model.load_state_dict(torch.load(path)) "
            "gives it to the module, and so to a graph that was recorded with that"
        )
    if len(start) < 8 or (size > HEADER_CAP and size > room):
        raise CheckpointCorrupt(f"{path} is no safetensors file: it has {whole} bytes and no header")
    if size > room:
        raise CheckpointCorrupt(f"{path} is truncated: {room} bytes, header says {size}")
    if size > HEADER_CAP:
        raise CheckpointCorrupt(f"{path} has a header of {size} bytes; at most {HEADER_CAP} are allowed")
    return file.read(size), room - size


def _entry(key: str, record: Any) -> tuple[str, tuple[int, int], TensorEntry]:
    """Key, byte range and entry of a tensor record; malformed records raise whatever their access raises."""
    shape, offsets = record["shape"], record["data_offsets"]
    start, stop = offsets
    if not all(type(number) is int and 0 <= number < SIZE_CAP for number in (*shape, start, stop)):
        raise ValueError(f"{key} has sizes or offsets that are none")
    if len(shape) > RANK_CAP or math.prod(size or 1 for size in shape) >= SIZE_CAP:
        raise ValueError(f"{key} has the shape {shape[:8]}..., which no tensor has")
    entry = TensorEntry(DTYPES[record["dtype"]], tuple(shape), start)
    if entry.nbytes != stop - start:
        raise ValueError(f"{key} takes {entry.nbytes} bytes, and {stop - start} are told")
    return key, (start, stop), entry


# -- reading ------------------------------------------------------------------------------------------------


def read_tensors(
    path: Path, *, of_others: bool = False, beside: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> tuple[dict[str, torch.Tensor], dict[str, Any], str]:
    """Tensors, the facts about the tensors, and the digest; raises CheckpointCorrupt naming file and key.

    Nobody else can change the tensors: they are in memory of this process, or, where twice their bytes are not free, in
    a spare file without a name in the system's temp folder. ResourceExhausted is raised where neither has room.
    of_others: a file that another library wrote is read, too: it has no facts and no digest. beside: tensors by key;
    what takes the place of a mapped one is read into its file.
    """
    with opened(path) as file:
        header = read_header(path, file)
        mapped = {key: region.file for key, like in beside.items() if (region := region_of(like)) is not None}
        if of_others and header.is_of_others:
            return {key: tensor for key, tensor, _ in _read(path, file, header, mapped)}, {}, ""
        about = _facts(path, header)
        stored, sums = dict[str, torch.Tensor](), dict[str, str]()
        for key, tensor, summed in _read(path, file, header, mapped):
            stored[key], sums[key] = tensor, summed
    checked(path, header, about, sums)
    whole = {key: torch.view_as_complex(t) if key in about["complex"] else t for key, t in stored.items()}
    return whole, about, header.metadata["digest"]


def _facts(path: Path, header: Header) -> dict[str, Any]:
    """The JSON facts of a file of ours, not checked by a digest yet."""
    metadata = header.metadata
    if not isinstance(metadata.get("tfnb"), str) or "digest" not in metadata:
        raise CheckpointCorrupt(f"{path} was not written by tfnb, or its metadata is damaged")
    try:
        about = dict(strict_json.read(metadata["tfnb"], finite=False))
        about["sha256"] = dict(about["sha256"])
        about["complex"] = frozenset(about["complex"])
        for key in about["complex"] & header.entries.keys():
            entry = header.entries[key]
            if not entry.dtype.is_floating_point or entry.shape[-1:] != (2,):
                raise ValueError(f"{key} is {entry.dtype} {[*entry.shape]}, and no complex numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{path} has damaged metadata: {error}") from error
    return about


def verified_facts(path: Path) -> tuple[dict[str, Any], str]:
    """Facts and digest of a file of ours, after checking the digests of all bytes. Tensors are read in pieces."""
    with opened(path) as file:
        header = read_header(path, file)
        about = _facts(path, header)
        file.seek(header.begin)
        sums = {key: _hashed(path, file, key, entry) for key, entry in header.entries.items()}
    checked(path, header, about, sums)
    return about, header.metadata["digest"]


def _hashed(path: Path, file: BinaryIO, key: str, entry: TensorEntry) -> str:
    """The sha256 of the bytes of the next tensor."""
    summed, left = hashlib.sha256(), entry.nbytes
    while left:
        if not (part := file.read(min(_PIECE, left))):
            raise CheckpointCorrupt(f"{path} is truncated: {key} lacks {left} of {entry.nbytes} bytes")
        summed.update(part)
        left -= len(part)
    return summed.hexdigest()


def checked(path: Path, header: Header, about: Mapping[str, Any], sums: Mapping[str, str]) -> None:
    """Raise CheckpointCorrupt unless the computed digests equal the digests in the header."""
    expected = about["sha256"]
    for key in sorted({*expected, *sums}):
        if (found := sums.get(key, "nothing")) != expected.get(key):
            raise CheckpointCorrupt(f"{path}: {key} has sha256 {found}, expected {expected.get(key)}")
    if _digest(header.metadata["tfnb"], header.entries) != header.metadata["digest"]:
        raise CheckpointCorrupt(f"{path}: metadata has another digest than expected, {header.metadata['digest']}")


def _digest(text: str, entries: Mapping[str, TensorEntry]) -> str:
    """Digest of the JSON text, with the sha256 of all bytes in it, and of every dtype and shape."""
    specs = [[key, str(entries[key].dtype), list(entries[key].shape)] for key in sorted(entries)]
    return hashlib.sha256(f"{text}\n{json.dumps(specs)}".encode()).hexdigest()


def _read(
    path: Path, file: BinaryIO, header: Header, mapped: Mapping[str, MappedFile]
) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Each key, its tensor in memory of ours, and the sha256 of the bytes that were put there."""
    entries = header.entries
    nbytes = sum(entry.nbytes for key, entry in entries.items() if key not in mapped)
    spare = _spare(path, nbytes)
    piece = np.empty(min(_PIECE, max((entry.nbytes for entry in entries.values()), default=0)), np.uint8)
    file.seek(header.begin)
    for key, entry in entries.items():
        try:
            whole = _zeros(entry.nbytes, mapped.get(key, spare))
        except ResourceExhausted as error:
            raise _too_large(path, nbytes, error) from error
        summed, at = hashlib.sha256(), 0
        while at < entry.nbytes:
            part = piece[: entry.nbytes - at]
            part = part[: file.readinto(part.data)]  # type: ignore[attr-defined]
            if not len(part):
                raise CheckpointCorrupt(f"{path} is truncated: {key} ends after {at} of {entry.nbytes} bytes")
            summed.update(part.data)
            if part.any():  # a large table of zeros takes memory only where something is
                lazy_memory.assign(whole[at : at + len(part)], torch.from_numpy(part))
            at += len(part)
        yield key, whole.view(entry.dtype).view(entry.shape), summed.hexdigest()


def _spare(path: Path, nbytes: int) -> MappedFile | None:
    """A file for tensors of so many bytes, where twice as many are not free in memory."""
    free = lazy_memory.free()
    if free is None or 2 * nbytes <= free or not nbytes:
        return None
    try:
        return MappedFile()
    except InvalidArgument as error:
        raise _too_large(path, nbytes, error) from error


def _too_large(path: Path, nbytes: int, error: Exception) -> ResourceExhausted:
    free = lazy_memory.free()
    return ResourceExhausted(f"{path} takes {nbytes} bytes; {free} are free in memory, and {error}")


def _zeros(nbytes: int, file: MappedFile | None) -> torch.Tensor:
    if file is not None and nbytes >= mapped_files.LEAST:
        return zeros((nbytes,), torch.uint8, file)
    if nbytes >= lazy_memory.LARGE:
        return lazy_memory.zeros((nbytes,), torch.uint8)
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
