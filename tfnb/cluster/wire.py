"""The TFN1 envelope: (header, tensors) <-> a few byte buffers. Pure; imports torch, JSON and nothing of Dask.

``TFN1 | header length u32 | header JSON | padding | small tensors``, then one buffer for each larger tensor. A tensor
travels as its bytes, little-endian, with a dtype tag; nothing is pickled. Between processes that share memory a larger
tensor is lent: what travels is where it lies, `tfnb.cluster.lending`. The decoder checks every size before it
allocates anything, so that bytes from anywhere cost a `ProtocolError`, not memory.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

import numpy as np
import torch

from tfnb.errors import InvalidArgument, ProtocolError, ResourceExhausted, UnsupportedDtype

MAGIC = b"TFN1"
VERSION = 1
HEADER_CAP = 1 << 20  # bytes of header JSON
FRAMES_CAP = 4096
DIMS_CAP = 64
INLINE = 64 << 10  # bytes: smaller tensors travel beside the header
ALIGN = 64
BUDGET = 4 << 30  # bytes of tensors in one message, unless the task says otherwise

MOVED = Counter[str]()
"""Bytes of tensors that this process sent and received, by lane; about, as threads count side by side."""

_TAGS: dict[str, torch.dtype] = {
    "bool": torch.bool, "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "c64": torch.complex64, "c128": torch.complex128,
    "f8e4m3fn": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
    "f8e4m3fnuz": torch.float8_e4m3fnuz, "f8e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip
_TAG_OF = {dtype: tag for tag, dtype in _TAGS.items()}
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16}  # of dtypes that numpy lacks
_OF_NUMPY = frozenset(dtype for tag, dtype in _TAGS.items() if tag != "bf16" and not tag.startswith("f8"))
_NOTHING = memoryview(b"")
_WRITTEN = json.JSONEncoder(allow_nan=False, separators=(",", ":"), check_circular=False)

Buffer = bytes | bytearray | memoryview
Loan = tuple[str, int, int]  # the segment where a tensor lies, from which byte on, and the word that it has
Lend = Callable[[Mapping[int, torch.Tensor]], Mapping[int, Loan]]  # of the larger tensors by position: those lent
Borrow = Callable[[Loan, int], torch.Tensor]  # so many bytes; raises ProtocolError


def size(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the values of ``tensors``; a meta tensor has none."""
    return sum(t.numel() * t.itemsize for t in tensors if not t.is_meta)


# -- encoding ---------------------------------------------------------------------------------------------


def encode(
    header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = (), *, budget: int = BUDGET, lend: Lend | None = None
) -> list[Buffer]:  # fmt: skip
    """The envelope and the frames of a message. ``header``: JSON types only. ``lend``: to who gets it.

    Contiguous CPU tensors are not copied, so they must not be written before the message is sent. Raises
    UnsupportedDtype for what cannot travel, ResourceExhausted for a message over a cap.
    """
    _within("bytes of tensors in a message", size(tensors), 0, budget)
    loans = lend(_large(tensors)) if lend is not None else {}
    entries: list[dict[str, Any]] = []
    small: list[Buffer] = []
    frames: list[Buffer] = []
    offset = 0
    for position, tensor in enumerate(tensors):
        lane: str
        ref: int | Loan
        flat = _bytes_of(tensor, position) if position not in loans else _NOTHING
        nbytes = flat.nbytes
        if position in loans:
            lane, ref, nbytes = "s", loans[position], size([tensor])
        elif tensor.is_meta:
            lane, ref = "m", 0
        elif nbytes > INLINE:
            lane, ref = "d", len(frames)
            frames.append(flat)
        else:
            lane, ref = "i", offset
            small += [flat, bytes(-nbytes % ALIGN)]
            offset += nbytes + -nbytes % ALIGN
        dt, shape = _TAG_OF[tensor.dtype], list(tensor.shape)
        entries.append({"dt": dt, "shape": shape, "nbytes": nbytes, "lane": lane, "ref": ref})
    _within("frames in a message", len(frames), 0, FRAMES_CAP)
    _count((entry["lane"], entry["nbytes"]) for entry in entries)
    return [_envelope({**header, "v": VERSION, "tensors": entries}, small), *frames]


def _count(tensors: Iterable[tuple[str, int]]) -> None:
    """Keep in `MOVED` what a message carries."""
    for lane, nbytes in tensors:
        MOVED["shared memory" if lane == "s" else "sockets"] += nbytes


def _envelope(header: Mapping[str, Any], small: Sequence[Buffer]) -> bytearray:
    try:
        text = _WRITTEN.encode(header).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"a message header holds JSON types only: {error}") from error
    _within("bytes of a message header", len(text), 0, HEADER_CAP)
    head = MAGIC + struct.pack("<I", len(text)) + text
    return bytearray(b"".join([head, bytes(-len(head) % ALIGN), *small]))


def _large(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Those that are not sent beside the header, by position."""
    found = {}
    for position, tensor in enumerate(tensors):
        if not tensor.is_meta and tensor.numel() * tensor.itemsize > INLINE:
            _check(tensor, position)
            found[position] = tensor
    return found


def _bytes_of(tensor: torch.Tensor, position: int) -> memoryview:
    """The values of a tensor as bytes; shares memory where it can."""
    _check(tensor, position)
    if tensor.is_meta or tensor.numel() == 0:
        return _NOTHING
    plain = tensor.detach() if tensor.requires_grad else tensor
    if tensor.dtype not in _OF_NUMPY:
        plain = plain.view(_SAME_WIDTH[tensor.itemsize])
    flat = np.ascontiguousarray(plain.numpy(force=True)).reshape(-1).view(np.uint8)
    if sys.byteorder == "big":
        flat = flat.reshape(-1, tensor.itemsize)[:, ::-1].copy().reshape(-1)
    return flat.data


def _check(tensor: torch.Tensor, position: int) -> None:
    """Raise UnsupportedDtype for what cannot travel."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        _unsupported(position, f"is a {type(tensor).__name__}, not a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        _unsupported(position, f"is {tensor.layout if not tensor.is_quantized else 'quantised'}: send its parts")
    if tensor.dtype not in _TAG_OF:
        _unsupported(position, f"has dtype {tensor.dtype}, which has no wire form")


def _unsupported(position: int, why: str) -> NoReturn:
    raise UnsupportedDtype(f"tensor {position} of the message {why}; supported: {', '.join(_TAGS)}")


# -- decoding ---------------------------------------------------------------------------------------------


def decode(
    message: Sequence[Buffer], *, budget: int = BUDGET, borrow: Borrow | None = None
) -> tuple[dict[str, Any], list[torch.Tensor]]:  # fmt: skip
    """Header and tensors of a message; the tensors are private and writable, but for those that ``borrow`` gives.

    Raises ProtocolError for bytes that are no envelope, ResourceExhausted for a message over a cap.
    """
    if not message:
        _broken("a message without an envelope")
    _within("frames in a message", len(message) - 1, 0, FRAMES_CAP)
    envelope, frames = memoryview(message[0]).cast("B"), [memoryview(f).cast("B") for f in message[1:]]
    header, start = _header(envelope)
    entries = header.pop("tensors")
    if not isinstance(entries, list):
        _broken("tensors is not a list")
    small = envelope[start:]
    places = [_checked(entry, small, frames, borrow is not None) for entry in entries]
    if [ref for lane, ref, *_ in places if lane == "d"] != list(range(len(frames))):
        _broken(f"{len(frames)} frames, but the header names others")
    _within("bytes of tensors in a message", sum(place[4] for place in places), 0, budget)
    _count((place[0], place[4]) for place in places)
    return header, [_tensor(place, small, frames, borrow) for place in places]


def _header(envelope: memoryview) -> tuple[dict[str, Any], int]:
    """The JSON header, and where the small tensors start."""
    if len(envelope) < 8 or bytes(envelope[:4]) != MAGIC:
        _broken(f"it starts with {bytes(envelope[:4])!r}, not {MAGIC!r}")
    (length,) = struct.unpack("<I", envelope[4:8])
    _within("bytes of a message header", length, 0, HEADER_CAP)
    if 8 + length > len(envelope):
        _broken(f"a header of {length} bytes in an envelope of {len(envelope)}")
    try:
        header = _READ.decode(str(envelope[8 : 8 + length], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: its header is no JSON: {type(error).__name__}") from error
    if not isinstance(header, dict) or header.get("v") != VERSION or "tensors" not in header:
        _broken("its header has no tensors, or another version")
    return header, 8 + length + -(8 + length) % ALIGN


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


_READ = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unique_pairs)
_Place = tuple[str, Any, torch.dtype, list[int], int]  # lane, ref, dtype, shape, bytes


def _checked(entry: Any, small: memoryview, frames: Sequence[memoryview], borrows: bool) -> _Place:
    """One tensor entry, with every size proved against the bytes that are here. ``borrows``: some may be lent."""
    if not isinstance(entry, dict):
        _broken("a tensor entry is not an object")
    ref: Any  # a count, or a loan
    tag, shape, nbytes, lane, ref = (entry.get(key) for key in ("dt", "shape", "nbytes", "lane", "ref"))
    if not isinstance(tag, str) or tag not in _TAGS:
        _broken(f"dtype tag {str(tag)[:20]!r}")
    if not isinstance(shape, list) or len(shape) > DIMS_CAP or not all(_is_count(n) for n in shape):
        _broken("a shape that is no list of sizes")
    if not _is_count(nbytes) or any(n >= 1 << 62 for n in (*shape, nbytes)):
        _broken("sizes that are no counts")
    if not (_is_loan(ref) if lane == "s" and borrows else _is_count(ref)):
        _broken("a tensor that is in no place")
    dtype = _TAGS[tag]
    declared = math.prod(shape) * dtype.itemsize
    if lane == "m":
        if declared >= 1 << 62:
            _broken("a shape over the address space")
        return lane, 0, dtype, shape, 0
    if declared != nbytes:
        _broken(f"shape {shape[:8]} of {tag} is {declared} bytes, the entry says {nbytes}")
    if lane == "i":
        if ref + nbytes > len(small):
            _broken(f"a tensor ends at {ref + nbytes} of {len(small)} bytes")
    elif lane == "d":
        if ref >= len(frames) or frames[ref].nbytes != nbytes:
            _broken(f"frame {ref} is not there, or has another length than {nbytes}")
    elif lane != "s" or not borrows:
        _broken(f"lane {str(lane)[:20]!r}")
    return lane, ref, dtype, shape, nbytes


def _is_count(number: Any) -> TypeGuard[int]:
    return type(number) is int and number >= 0


def _is_loan(ref: Any) -> bool:
    return isinstance(ref, list) and len(ref) == 3 and isinstance(ref[0], str) and all(map(_is_count, ref[1:]))


def _tensor(place: _Place, small: memoryview, frames: Sequence[memoryview], borrow: Borrow | None) -> torch.Tensor:
    lane, ref, dtype, shape, nbytes = place
    if lane == "s" and borrow is not None:
        return borrow((ref[0], ref[1], ref[2]), nbytes).view(dtype).reshape(shape)
    if lane == "m":
        return torch.empty(shape, dtype=dtype, device="meta")
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    if lane == "i":
        raw = torch.frombuffer(bytearray(small[ref : ref + nbytes]), dtype=torch.uint8)
    else:
        frame = frames[ref]
        raw = torch.frombuffer(bytearray(frame) if frame.readonly else frame, dtype=torch.uint8)
    if raw.data_ptr() % 16:
        raw = raw.clone()
    if sys.byteorder == "big":
        raw = raw.reshape(-1, dtype.itemsize).flip(1).reshape(-1)
    return raw.view(dtype).reshape(shape)


def _broken(why: str) -> NoReturn:
    raise ProtocolError(f"not a message of tfnb: {why}")


def _within(what: str, asked: int, used: int, limit: int) -> None:
    if asked + used > limit:
        raise ResourceExhausted(f"{what}: asked {asked}, used {used}, limit {limit}")
