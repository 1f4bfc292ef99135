"""The TFN1 envelope: (header, tensors) <-> a few byte buffers. Pure; imports torch, JSON and nothing of Dask.

``TFN1 | text length u32 | text JSON | numbers i64 | padding | small tensors``, then one buffer for each larger tensor.
A tensor travels as its bytes, little-endian, with a dtype tag; nothing is pickled. Between processes that share memory
a larger tensor is lent: only its address travels, `tfnb.cluster.wire.lending`. The decoder checks every size before it
allocates anything, so that bytes from anywhere cost a `ProtocolError`, not memory.

The messages of a training differ in their numbers only: a step, a version. So the numbers of a simple header stand
behind its text, which names them. The text is the same from step to step, and both ends remember it: JSON is written,
read and checked when a text is new.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeGuard

import numpy as np
import torch

from tfnb.errors import InvalidArgument, ProtocolError, ResourceExhausted, UnsupportedDtype

MAGIC = b"TFN1"
VERSION = 2
HEADER_CAP = 1 << 20  # bytes of header JSON
NUMBERS_CAP = HEADER_CAP // 8  # numbers behind it
KEPT = 128  # texts that each end remembers
KEPT_CAP = 64 << 10  # bytes of such a text
KEPT_BYTES = 1 << 20  # of all of them; what is kept beside a text takes up to about 30 times its bytes
FRAMES_CAP = 4096
DIMS_CAP = 64
INLINE = 64 << 10  # bytes: smaller tensors travel beside the header
SMALL_CAP = 64 << 20  # bytes of all of these; further ones have frames of their own
ALIGN = 64
FACTS_CAP = 2 * HEADER_CAP + SMALL_CAP + 2 * ALIGN  # bytes of an envelope: text, numbers and small tensors
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
DTYPES = tuple(_TAGS.values())
"""Those that travel; their places are their codes in posts."""

_TAG_OF = {dtype: tag for tag, dtype in _TAGS.items()}
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16}  # of dtypes that numpy lacks
_OF_NUMPY = frozenset(dtype for tag, dtype in _TAGS.items() if tag != "bf16" and not tag.startswith("f8"))
_KINDS = {dtype: torch.empty(0, dtype=dtype).numpy().dtype for dtype in _OF_NUMPY} if sys.byteorder == "little" else {}
_NOTHING = memoryview(b"")
_WRITTEN = json.JSONEncoder(allow_nan=False, separators=(",", ":"), check_circular=False)

Buffer = bytes | bytearray | memoryview
Loan = tuple[str, int, int]  # the segment where a tensor lies, from which byte on, and the word that it has
Lend = Callable[[Mapping[int, torch.Tensor]], Mapping[int, Loan]]  # of the larger tensors by position: those lent
Borrow = Callable[[Loan, int], torch.Tensor]  # so many bytes; raises ProtocolError


def size(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the values of ``tensors``; a meta tensor has none."""
    return sum(_sizes(tensors))


def _sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if t.is_meta else t.numel() * t.itemsize for t in tensors]


# -- encoding ---------------------------------------------------------------------------------------------


class _Text(NamedTuple):
    """The text of a message, as bytes, and how many bytes of tensors are lent and sent."""

    text: bytes
    lent: int
    sent: int


_texts: dict[Any, _Text] = {}  # by what they say


def encode(
    header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = (), *, budget: int = BUDGET, lend: Lend | None = None
) -> list[Buffer]:  # fmt: skip
    """The envelope and the frames of a message. ``header``: JSON types only. ``lend``: lends larger tensors to the
    receiver.

    Contiguous CPU tensors are not copied, so they must not be written before the message is sent. Raises
    UnsupportedDtype for tensors without a wire form, ResourceExhausted for a message over a cap.
    """
    sizes = _sizes(tensors)
    _within("bytes of tensors in a message", sum(sizes), 0, budget)
    loans = lend(_large(tensors, sizes)) if lend is not None else {}
    entries: list[tuple[Any, ...]] = []
    small: list[Buffer] = []
    frames: list[Buffer] = []
    words: list[int] = []
    offset = 0
    for position, (tensor, nbytes) in enumerate(zip(tensors, sizes, strict=True)):
        lane: str
        ref: int | tuple[str, int]
        flat = bytes_of(tensor, position) if position not in loans else _NOTHING
        if position in loans:
            segment, start, word = loans[position]
            lane, ref = "s", (segment, start)
            words.append(word)
        elif tensor.is_meta:
            lane, ref = "m", 0
        elif nbytes > INLINE or offset + nbytes > SMALL_CAP:
            lane, ref = "d", len(frames)
            frames.append(flat)
        else:
            lane, ref = "i", offset
            small += [flat, bytes(-nbytes % ALIGN)]
            offset += nbytes + -nbytes % ALIGN
        entries.append((_TAG_OF[tensor.dtype], tensor.shape, nbytes, lane, ref))
    _within("frames in a message", len(frames), 0, FRAMES_CAP)
    fixed, names, numbers = _split(header)
    text, lent, sent = _text(header, fixed, names, tuple(entries))
    MOVED["shared memory"] += lent
    MOVED["sockets"] += sent
    numbers += words
    head = b"".join([MAGIC, struct.pack("<I", len(text)), text, struct.pack(f"<{len(numbers)}q", *numbers)])
    return [bytearray(b"".join([head, bytes(-len(head) % ALIGN), *small])), *frames]


_Names = tuple[tuple[bool, str, int], ...]  # whether it is one of `meta`, its name, and of how many numbers; 0: plain


def _split(header: Mapping[str, Any]) -> tuple[Any, _Names, list[int]]:
    """The fixed part of a header, hashable, and names and values of its numbers; none of a header that is not simple.

    >>> _split({"method": "pull", "meta": {"step": 3, "since": [1, 2]}})
    (((False, 'method', 'pull'),), ((True, 'step', 0), (True, 'since', 2)), [3, 1, 2])
    >>> _split({"meta": {"parts": [[1]]}})
    (None, (), [])
    """
    fixed: list[tuple[bool, str, Any]] = []
    names: list[tuple[bool, str, int]] = []
    numbers: list[int] = []
    meta = header.get("meta")
    for is_meta, entries in (False, header), (True, meta if type(meta) is dict else {}):
        for name, value in entries.items():
            kind = type(value)
            if kind is int:
                names.append((is_meta, name, 0))
                numbers.append(value)
            elif kind is list and value and type(value[0]) is int:
                names.append((is_meta, name, len(value)))
                numbers += value
            elif kind is list and all(type(one) is str for one in value):
                fixed.append((is_meta, name, tuple(value)))
            elif kind is str or kind is bool or value is None:
                fixed.append((is_meta, name, value))
            elif is_meta or name != "meta" or kind is not dict:
                return None, (), []
    is_plain = all(type(number) is int and -_HALF <= number < _HALF for number in numbers)
    return (tuple(fixed), tuple(names), numbers) if is_plain else (None, (), [])


_HALF = 1 << 63


def _text(header: Mapping[str, Any], fixed: Any, names: _Names, entries: tuple[tuple[Any, ...], ...]) -> _Text:
    """The text of a message; encoded anew only if its fixed part, names or tensors are new."""
    key = fixed, names, entries
    found = _texts.get(key) if fixed is not None else None
    if found is not None:
        return found
    if not isinstance(header.get("meta", {}), dict):
        raise InvalidArgument(f"meta of a message header is a dict, not {type(header['meta']).__name__}")
    behind = {name for is_meta, name, _ in names if not is_meta}
    whole = {name: value for name, value in header.items() if name not in behind}
    if fixed is not None and "meta" in header:
        whole["meta"] = {name: value for is_meta, name, value in fixed if is_meta}
    tensors = [dict(zip(("dt", "shape", "nbytes", "lane", "ref"), entry, strict=True)) for entry in entries]
    try:
        text = _WRITTEN.encode({**whole, "v": VERSION, "numbers": names, "tensors": tensors}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"a message header holds JSON types only: {error}") from error
    _within("bytes of a message header", len(text), 0, HEADER_CAP)
    loans = [entry[2] for entry in entries if entry[3] == "s"]
    _count(names, len(loans))
    found = _Text(text, sum(loans), sum(entry[2] for entry in entries) - sum(loans))
    if fixed is not None and len(text) <= KEPT_CAP:
        _remember(_texts, key, found)
    return found


def _count(names: _Names, words: int) -> int:
    """How many numbers stand behind a text; raises ResourceExhausted."""
    count = sum(count or 1 for *_, count in names) + words
    _within("numbers in a message", count, 0, NUMBERS_CAP)
    return count


def _remember(kept: dict[Any, Any], key: Any, value: _Text | _CheckedText) -> None:
    """Keep a text; at most `KEPT` texts of `KEPT_BYTES` in all: beyond these limits all are forgotten first."""
    used = sum(len(one.text) for one in [*kept.values()])  # a copy: other threads remember too
    if len(kept) >= KEPT or used + len(value.text) > KEPT_BYTES:
        kept.clear()
    kept[key] = value


def _large(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> dict[int, torch.Tensor]:
    """The tensors too large to be sent beside the header, by position."""
    found = {}
    for position, (tensor, nbytes) in enumerate(zip(tensors, sizes, strict=True)):
        if nbytes > INLINE:
            check(tensor, position)
            found[position] = tensor
    return found


def bytes_of(tensor: torch.Tensor, position: int) -> memoryview:
    """The values of a tensor as bytes, in the tensor's own memory where that is possible. Raises UnsupportedDtype for
    other tensors.

    position: of the tensor in its message, for the error.
    """
    check(tensor, position)
    if tensor.is_meta or tensor.numel() == 0:
        return _NOTHING
    plain = tensor.detach() if tensor.requires_grad else tensor
    if tensor.dtype not in _OF_NUMPY:
        plain = plain.view(_SAME_WIDTH[tensor.itemsize])
    flat = np.ascontiguousarray(plain.numpy(force=True)).reshape(-1).view(np.uint8)
    if sys.byteorder == "big":
        flat = flat.reshape(-1, tensor.itemsize)[:, ::-1].copy().reshape(-1)
    return flat.data


def check(tensor: torch.Tensor, position: int) -> None:
    """Raise UnsupportedDtype for a tensor without a wire form. position: of the tensor in its message, for the
    error.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        _unsupported(position, f"is a {type(tensor).__name__}, not a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        _unsupported(position, f"is {tensor.layout if not tensor.is_quantized else 'quantised'}: send its parts")
    if tensor.dtype not in _TAG_OF:
        _unsupported(position, f"has dtype {tensor.dtype}, which has no wire form")


def _unsupported(position: int, why: str) -> NoReturn:
    raise UnsupportedDtype(f"tensor {position} of the message {why}; supported: {', '.join(_TAGS)}")


# -- decoding ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CheckedText:
    """A text that was read and checked. ``count``: of the numbers behind the text.

    small: bytes that the small tensors take at least; frames: sizes of the larger ones.
    """

    text: bytes
    header: Mapping[str, Any]
    names: _Names
    count: int
    places: Sequence[_Place]
    small: int
    frames: Sequence[int]
    lent: int
    sent: int


_known: dict[bytes, _CheckedText] = {}  # by text


def decode(
    message: Sequence[Buffer], *, budget: int = BUDGET, borrow: Borrow | None = None
) -> tuple[dict[str, Any], list[torch.Tensor]]:  # fmt: skip
    """Header and tensors of a message. The tensors are private and writable, unless lent by ``borrow``.

    Lists in the header are shared with other messages. Raises ProtocolError for bytes that are no envelope,
    ResourceExhausted for a message over a cap.
    """
    if not message:
        _broken("a message without an envelope")
    _within("frames in a message", len(message) - 1, 0, FRAMES_CAP)
    _within("bytes of an envelope", memoryview(message[0]).nbytes, 0, FACTS_CAP)
    envelope, frames = memoryview(message[0]).cast("B"), [memoryview(f).cast("B") for f in message[1:]]
    text = _text_of(envelope)
    known = _known.get(text)
    if known is None:
        known = _read(text)
        if known.names and len(text) <= KEPT_CAP:
            _remember(_known, text, known)
    end = 8 + len(text) + 8 * known.count
    small = envelope[end + -end % ALIGN :]
    if end > len(envelope) or known.small > len(small):
        _broken(f"its numbers and small tensors end behind {len(envelope)} bytes")
    if [frame.nbytes for frame in frames] != known.frames:
        _broken(f"{len(frames)} frames, but the header names others, or other lengths")
    if borrow is None and known.lent:
        _broken("a tensor is lent on a connection without shared memory")
    _within("bytes of tensors in a message", known.lent + known.sent, 0, budget)
    MOVED["shared memory"] += known.lent
    MOVED["sockets"] += known.sent
    numbers = struct.unpack_from(f"<{known.count}q", envelope, 8 + len(text))
    header, at = _filled(known, numbers)
    words = iter(numbers[at:])
    return header, [_tensor(place, small, frames, borrow, words) for place in known.places]


def _filled(known: _CheckedText, numbers: Sequence[int]) -> tuple[dict[str, Any], int]:
    """The header with its numbers, and the count of these numbers."""
    header, at = dict(known.header), 0
    if known.names and "meta" in header:
        header["meta"] = dict(header["meta"])
    for is_meta, name, count in known.names:
        entries = header["meta"] if is_meta else header
        entries[name] = list(numbers[at : at + count]) if count else numbers[at]
        at += count or 1
    return header, at


def _text_of(envelope: memoryview) -> bytes:
    """The text of an envelope."""
    if len(envelope) < 8 or bytes(envelope[:4]) != MAGIC:
        _broken(f"it starts with {bytes(envelope[:4])!r}, not {MAGIC!r}")
    (length,) = struct.unpack("<I", envelope[4:8])
    _within("bytes of a message header", length, 0, HEADER_CAP)
    if 8 + length > len(envelope):
        _broken(f"a header of {length} bytes in an envelope of {len(envelope)}")
    return bytes(envelope[8 : 8 + length])


def _read(text: bytes) -> _CheckedText:
    """Read a new text, and prove every size in its entries."""
    try:
        header = _READ.decode(str(text, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: its header is no JSON: {type(error).__name__}") from error
    if not isinstance(header, dict) or header.pop("v", None) != VERSION:
        _broken("its header has another version, or none")
    names, entries = header.pop("numbers", None), header.pop("tensors", None)
    if not isinstance(names, list) or not isinstance(entries, list) or not isinstance(header.get("meta", {}), dict):
        _broken("tensors or numbers are not a list, or meta is no object")
    checked = tuple(_name(one, header) for one in names)
    places = [_checked(entry) for entry in entries]
    of = {lane: [place for place in places if place.lane == lane] for lane in "isd"}
    if [place.ref for place in of["d"]] != list(range(len(of["d"]))):
        _broken("its larger tensors are not in the order of the frames")
    ends = [place.ref + place.nbytes + -place.nbytes % ALIGN for place in of["i"]]
    if [place.ref for place in of["i"]] != [0, *ends][: len(ends)]:
        _broken("its small tensors do not follow each other")
    lent = sum(place.nbytes for place in of["s"])
    return _CheckedText(
        text, header, checked, _count(checked, len(of["s"])), places,
        max((place.ref + place.nbytes for place in of["i"]), default=0), [place.nbytes for place in of["d"]],
        lent, sum(place.nbytes for place in places) - lent,
    )  # fmt: skip


def _name(one: Any, header: Mapping[str, Any]) -> tuple[bool, str, int]:
    """The name of numbers in a header."""
    match one:
        case [bool(is_meta), str(name), int(count)] if 0 <= count <= HEADER_CAP:
            if "meta" in header if is_meta else name != "meta":
                return is_meta, name, int(count)
    _broken("numbers without a name")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


_READ = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unique_pairs)


class _Place(NamedTuple):
    """The place of a tensor: offset of a small one, number of a frame, or segment and offset of a lent one."""

    lane: str
    ref: Any
    dtype: torch.dtype
    shape: list[int]
    nbytes: int


def _checked(entry: Any) -> _Place:
    """One tensor entry; its numbers fit each other."""
    if not isinstance(entry, dict):
        _broken("a tensor entry is not an object")
    ref: Any  # a count, or a segment and an offset
    tag, shape, nbytes, lane, ref = (entry.get(key) for key in ("dt", "shape", "nbytes", "lane", "ref"))
    if not isinstance(tag, str) or tag not in _TAGS:
        _broken(f"dtype tag {str(tag)[:20]!r}")
    if not isinstance(shape, list) or len(shape) > DIMS_CAP or not all(_is_count(n) for n in shape):
        _broken("a shape that is no list of sizes")
    if not _is_count(nbytes) or any(n >= 1 << 62 for n in (*shape, nbytes)):
        _broken("sizes that are no counts")
    if lane not in ("i", "d", "m", "s"):
        _broken(f"lane {str(lane)[:20]!r}")
    if not (_is_lent(ref) if lane == "s" else _is_count(ref)):
        _broken("a tensor that is in no place")
    dtype = _TAGS[tag]
    declared = math.prod(shape) * dtype.itemsize
    if math.prod(n or 1 for n in shape) >= 1 << 62 or (lane == "m" and declared >= 1 << 62):
        _broken("a shape over the address space")
    if lane == "m":
        return _Place(lane, 0, dtype, shape, 0)
    if declared != nbytes:
        _broken(f"shape {shape[:8]} of {tag} is {declared} bytes, the entry says {nbytes}")
    return _Place(lane, ref, dtype, shape, nbytes)


def _is_count(number: Any) -> TypeGuard[int]:
    return type(number) is int and number >= 0


def _is_lent(ref: Any) -> bool:
    return isinstance(ref, list) and len(ref) == 2 and isinstance(ref[0], str) and _is_count(ref[1])


def _tensor(
    place: _Place, small: memoryview, frames: Sequence[memoryview], borrow: Borrow | None, words: Iterator[int]
) -> torch.Tensor:
    lane, ref, dtype, shape, nbytes = place
    if lane == "s" and borrow is not None:
        return borrow((ref[0], ref[1], next(words)), nbytes).view(dtype).reshape(shape)
    if lane == "m":
        return torch.empty(shape, dtype=dtype, device="meta")
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    if lane == "i":
        return tensor_of(bytearray(small[ref : ref + nbytes]), dtype, shape)
    frame = frames[ref]
    return tensor_of(bytearray(frame) if frame.readonly else frame, dtype, shape)


def tensor_of(data: bytearray | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor from the bytes of `bytes_of`, one byte at least. Aligned bytes are kept as its memory.

    >>> tensor_of(bytearray(bytes_of(torch.tensor([[1, 2]]), 0)), torch.int64, (1, 2))
    tensor([[1, 2]])
    """
    kind = _KINDS.get(dtype)
    if kind is not None:  # no op of torch, each of which costs as much as all of this
        found = torch.from_numpy(np.ndarray(shape, kind, data))
        if not found.data_ptr() % 16:
            return found
    raw = torch.frombuffer(data, dtype=dtype)
    if raw.data_ptr() % 16:
        raw = raw.clone()
    if sys.byteorder == "big":
        raw = raw.view(torch.uint8).reshape(-1, dtype.itemsize).flip(1).reshape(-1).view(dtype)
    return raw.reshape(shape)


def _broken(why: str) -> NoReturn:
    raise ProtocolError(f"not a message of tfnb: {why}")


def _within(what: str, asked: int, used: int, limit: int) -> None:
    if asked + used > limit:
        raise ResourceExhausted(f"{what}: asked {asked}, used {used}, limit {limit}")
