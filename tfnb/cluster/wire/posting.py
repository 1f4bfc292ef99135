"""Posts: one-way messages between the tasks of a step, each with a fixed header, on connections of their own.

``bytes behind u64 | round i64 | edge i32 | kind u8 | numbers of the tag u8 | dtype u8 | dims u8 | tag i64... | body``.
The body is a number, or the sizes of a tensor and then its values; of a meta tensor only the sizes; of a tensor that is
lent in shared memory (`tfnb.cluster.wire.lending`) its sizes and where it lies. A tensor that is not contiguous has its
strides behind the sizes, and its elements in the order of memory: it arrives with the same strides, because sums and
products round otherwise for others. All is little-endian.

`Sender` never waits: bytes that the socket does not take at once are kept, and go out in the thread of
`tfnb.cluster.server.serving`. `PostReader` takes bytes in pieces of any size, and proves every number before it takes
memory.
Both ends of a connection are a `HostedConnection` of that thread.
"""

from __future__ import annotations

import math
import selectors
import socket
import ssl
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch

from tfnb.cluster.wire import envelope
from tfnb.cluster.wire.envelope import DTYPES, MOVED, Borrow, Buffer, bytes_of, check, tensor_of
from tfnb.cluster.wire.lending import ServerLoans, TaskLoans
from tfnb.cluster.wire.messages import Dead, Tag
from tfnb.cluster.wire.streams import BUFFERS, StreamBroken, gone
from tfnb.errors import InvalidArgument, ProtocolError, ResourceExhausted
from tfnb.state.store import memory

TAG_CAP, DIMS_CAP = 64, 16
LEND = 512 << 10  # bytes: larger tensors are lent where both ends share memory; smaller ones are quicker by the socket
TOGETHER = 8 << 10  # bytes: tensors up to here are copied behind their header, larger ones are a buffer of their own
BUFFER = 32 << 10  # bytes that a reader takes at once; longer messages go straight into their tensor
PIECE = 64 << 10  # bytes that an encrypted socket is given at once
GAPS = 16  # times the memory of its elements that a tensor may span to keep its strides; smaller ones than LEND always
TURNS = 64  # reads of one connection until the others have their turn

_HEAD = struct.Struct("<QqiBBBB")
_NUMBER, _FLOAT, _DEAD = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<2q")
_LOAN = struct.Struct("<64sqq")  # segment, from which byte on, its word
_DEADS, _NONE, _INT, _BOOL, _FLOATS, _META, _TENSOR, _LENT = range(8)
_BODY = {_DEADS: _DEAD.size, _NONE: 0, _INT: 8, _BOOL: 8, _FLOATS: 8, _META: 0, _LENT: _LOAN.size}  # beside the sizes
_STRIDED = 8  # beside the kind of a tensor: its strides stand behind the sizes
_HEADS = [struct.Struct(f"{_HEAD.format}{count}q") for count in range(TAG_CAP + DIMS_CAP + 1)]  # and its numbers
_NUMBERS = [struct.Struct(f"<{count}q") for count in range(TAG_CAP + 2 * DIMS_CAP + 1)]
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_LARGEST = 1 << 62
IS_LITTLE = sys.byteorder == "little"


class Post(NamedTuple):
    """One message: the value of an edge for a tag, or the reason of a dead value. ``nbytes``: of its tensor."""

    round: int
    edge: int
    tag: Tag
    value: torch.Tensor | int | float | bool | None
    dead: Dead | None = None
    nbytes: int = 0


# -- writing ----------------------------------------------------------------------------------------------------------


def written(
    round: int, edge: int, tag: Tag, value: object, dead: Dead | None, loans: TaskLoans | None = None
) -> list[Buffer]:  # fmt: skip
    """The bytes of a post: one buffer, or two of them, the second being the memory of the tensor.

    Raises InvalidArgument or UnsupportedDtype for values that cannot travel.

    >>> reader = PostReader()
    >>> reader.feed(b"".join(written(3, 7, (0, 2), torch.tensor([1.5, 2.5]), None)))
    [Post(round=3, edge=7, tag=(0, 2), value=tensor([1.5000, 2.5000]), dead=None, nbytes=8)]
    >>> reader.feed(written(3, 8, (), None, (4, 1))[0])
    [Post(round=3, edge=8, tag=(), value=None, dead=(4, 1), nbytes=0)]
    """
    if dead is None and type(value) is torch.Tensor:
        plain = _plain(round, edge, tag, value, loans)
        if plain is not None:
            return plain
    code, dims, behind = 0, 0, b""
    shape: tuple[int, ...] = ()  # sizes, and strides
    flat: memoryview | None = None
    try:
        kind = type(value)
        if dead is not None:
            kind_code, behind = _DEADS, _DEAD.pack(*dead)
        elif kind is int:
            kind_code, behind = _INT, _NUMBER.pack(value)
        elif kind is bool:
            kind_code, behind = _BOOL, _NUMBER.pack(value)
        elif kind is float:
            kind_code, behind = _FLOATS, _FLOAT.pack(value)
        elif value is None:
            kind_code = _NONE
        elif isinstance(value, torch.Tensor):
            kind_code, shape, behind, flat = _tensor(value, loans)
            code, dims = _CODES[value.dtype], value.dim()
        else:
            raise InvalidArgument(f"round {round}, edge {edge}: a {kind.__name__} cannot travel between tasks")
        if len(tag) > TAG_CAP or dims > DIMS_CAP:
            what = f"a tag of {len(tag)} numbers (limit {TAG_CAP}), or {dims} dimensions (limit {DIMS_CAP})"
            raise InvalidArgument(f"round {round}, edge {edge}: {what} cannot travel between tasks")
        numbers = struct.pack(f"<{len(tag) + len(shape)}q", *tag, *shape)
        whole = len(numbers) + len(behind) + (flat.nbytes if flat is not None else 0)
        head = _HEAD.pack(whole, round, edge, kind_code, len(tag), code, dims) + numbers + behind
    except struct.error as error:
        raise InvalidArgument(f"round {round}, edge {edge}, tag {tag}: {value!r:.60} cannot travel: {error}") from None
    if flat is None or not flat.nbytes:
        return [head]
    return [head + flat] if flat.nbytes <= TOGETHER else [head, flat]


def _plain(round: int, edge: int, tag: Tag, value: torch.Tensor, loans: TaskLoans | None) -> list[Buffer] | None:
    """The bytes of a contiguous tensor by the fast path: a numpy array, not lent. None for other tensors."""
    code = _CODES.get(value.dtype)
    if code is None or len(tag) > TAG_CAP or not IS_LITTLE:
        return None
    try:
        array = value.numpy()
        nbytes, sizes = array.nbytes, array.shape
        is_lent = loans is not None and nbytes > LEND
        may_differ = len(sizes) > 3 and 1 in sizes  # images of one channel are contiguous in more than one order
        if len(sizes) > DIMS_CAP or is_lent or may_differ or not array.flags.c_contiguous:
            return None
        count = len(tag) + len(sizes)
        head = _HEADS[count].pack(8 * count + nbytes, round, edge, _TENSOR, len(tag), code, len(sizes), *tag, *sizes)
    except (TypeError, RuntimeError, struct.error):  # another way takes it, or says why not
        return None
    MOVED["sockets"] += nbytes
    return [head + array.tobytes()] if nbytes <= TOGETHER else [head, array.data.cast("B")]


def _tensor(value: torch.Tensor, loans: TaskLoans | None) -> tuple[int, tuple[int, ...], bytes, memoryview | None]:
    """Kind and sizes of a tensor, with the strides it keeps, its loan if lent, and its values if not."""
    check(value, 0)
    sizes = tuple(value.shape)
    if value.is_meta:
        return _META, sizes, b"", None
    value = value.resolve_conj().resolve_neg()  # as kernels do, which then see the strides of the copy
    strides = _kept_strides(value)
    kind, shape = (_STRIDED, (*sizes, *strides)) if strides else (0, sizes)
    if strides:
        value = _in_memory_order(value, sizes, strides)
    if loans is not None and (nbytes := value.numel() * value.itemsize) > LEND:
        loan = loans.lend({0: value}).get(0)
        if loan is not None:
            MOVED["shared memory"] += nbytes
            return _LENT | kind, shape, _LOAN.pack(loan[0].encode(), *loan[1:]), None
    flat = bytes_of(value, 0)
    MOVED["sockets"] += flat.nbytes
    return _TENSOR | kind, shape, b"", flat


# -- strides ----------------------------------------------------------------------------------------------------------


class _StridedMemory(NamedTuple):
    """The memory of a strided tensor. ``elements``: how many, repeated ones once; ``length``: from first to last.

    ``axes``: those with several elements, from the outermost in memory.
    """

    elements: int
    length: int
    axes: tuple[int, ...]


@lru_cache(1024)
def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> _StridedMemory | None:
    """The memory that these strides span; None where elements share places otherwise than as an expanded axis does.

    >>> _span((2, 3, 5), (1, 4, 0))
    _StridedMemory(elements=6, length=10, axes=(1, 0))
    >>> _span((3, 2), (1, 1)) is None
    True
    """
    if any(size < 1 for size in sizes) or any(stride < 0 for stride in strides):
        return None
    count = length = 1
    axes = sorted((stride, axis) for axis, stride in enumerate(strides) if stride and sizes[axis] > 1)
    for stride, axis in axes:
        if stride < length:
            return None
        count, length = count * sizes[axis], length + (sizes[axis] - 1) * stride
    return _StridedMemory(count, length, tuple(axis for _, axis in reversed(axes)))


@lru_cache(1024)
def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> _row_major((2, 3, 5)), _row_major(())
    ((15, 5, 1), ())
    """
    return tuple(math.prod(sizes[at + 1 :]) for at in range(len(sizes)))


def _kept_strides(value: torch.Tensor) -> tuple[int, ...]:
    """The strides with which a tensor is to arrive; none if it arrives contiguous."""
    sizes, strides = tuple(value.shape), value.stride()
    if len(sizes) > DIMS_CAP or strides == _row_major(sizes):
        return ()
    span = _span(sizes, strides)
    if span is None or span.length > max(GAPS * span.elements, LEND // value.itemsize):
        return ()
    return strides


def _in_memory_order(value: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A view of the elements in the order of memory, repeated ones once."""
    span = _span(sizes, strides)
    assert span is not None
    return value.as_strided([sizes[at] for at in span.axes], [strides[at] for at in span.axes], value.storage_offset())


def _with_strides(found: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides, of its elements in the order of memory."""
    span = _span(sizes, strides)
    assert span is not None
    if span.length > span.elements:
        whole = found.new_empty(span.length)
        inner = [sizes[at] for at in span.axes]
        whole.as_strided(inner, [strides[at] for at in span.axes]).copy_(found.view(inner))
        found = whole
    return found.as_strided(sizes, strides)


# -- reading ----------------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """A checked header. ``strides``: none for a contiguous tensor; ``nbytes``: of the tensor."""

    round: int
    edge: int
    kind: int
    tag: Tag
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int

    def tensor(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, of its elements in the order of memory."""
        return _with_strides(flat, self.sizes, self.strides) if self.strides else flat.view(self.sizes)

    def tensor_of(self, data: bytearray | memoryview) -> torch.Tensor:
        """The tensor from its bytes."""
        sizes = (self.nbytes // self.dtype.itemsize,) if self.strides else self.sizes
        found = tensor_of(data, self.dtype, sizes)
        return self.tensor(found) if self.strides else found


class PostReader:
    """Bytes in pieces of any size -> posts. ``budget``: bytes of one tensor; ``borrow``: for lent ones.

    `room` says where the next bytes are to be written, and `came` how many were.
    """

    def __init__(self, budget: int = envelope.BUDGET, borrow: Callable[[], Borrow] | None = None) -> None:
        self._budget, self._borrow = budget, borrow
        self._buffer = bytearray(BUFFER)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._large: tuple[_Head, memoryview] | None = None  # that is coming in, and what is left of it:
        self._rest = self._view[:0]

    @property
    def is_between(self) -> bool:
        """Whether no message has come in part."""
        return not self._filled and self._large is None

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._rest if self._large is not None else self._view[self._filled :]

    def feed(self, data: Buffer) -> list[Post]:
        """Copy bytes in; returns the posts completed by them."""
        found: list[Post] = []
        view = memoryview(data).cast("B")
        while view.nbytes:
            room = self.room()
            count = min(view.nbytes, room.nbytes)
            room[:count] = view[:count]
            view = view[count:]
            found += self.came(count)
        return found

    def came(self, count: int) -> list[Post]:
        """The posts completed by the next ``count`` bytes. Raises ProtocolError, ResourceExhausted, and the errors of
        ``borrow``.
        """
        if self._large is not None:
            self._rest = self._rest[count:]
            if self._rest.nbytes:
                return []
            (head, whole_tensor), self._large = self._large, None
            MOVED["sockets"] += head.nbytes
            return [_post(head, head.tensor_of(whole_tensor))]
        found: list[Post] = []
        self._filled += count
        at = 0
        while (left := self._filled - at) >= _HEAD.size:
            whole, number, edge, kind, tags, code, dims = _HEAD.unpack_from(self._buffer, at)
            least, body = _least(kind, tags, code, dims), at + _HEAD.size
            self._check(whole, kind, least)
            if left < _HEAD.size + least:
                break
            numbers = _NUMBERS[tags + (2 if kind & _STRIDED else 1) * dims].unpack_from(self._buffer, body)
            body += 8 * len(numbers)
            sizes, strides, dtype = numbers[tags : tags + dims], numbers[tags + dims :], DTYPES[code]
            nbytes = self._nbytes_of(kind, dtype, sizes, strides)
            kind &= ~_STRIDED
            if kind == _TENSOR and nbytes != whole - least:
                _broken(f"sizes {sizes} of {dtype} are {nbytes} bytes, the header says {whole - least}")
            if nbytes > self._budget:
                raise ResourceExhausted(f"bytes of a tensor: asked {nbytes}, used 0, limit {self._budget}")
            head = _Head(number, edge, kind, numbers[:tags], dtype, sizes, strides, nbytes)
            if kind == _TENSOR and _HEAD.size + whole > BUFFER:
                at = self._begin(head, body)
                break
            if left < _HEAD.size + whole:
                break
            found.append(self._small(head, body))
            at += _HEAD.size + whole
        if at:
            left = self._filled - at
            if left:
                self._buffer[:left] = self._buffer[at : self._filled]
            self._filled = left
        return found

    def _check(self, whole: int, kind: int, least: int) -> None:
        """Check the number of bytes behind a header; ``least`` of them are no values."""
        if whole < least or (whole > least and kind & ~_STRIDED != _TENSOR):
            _broken(f"{whole} bytes behind a header of kind {kind}, which has {least}")
        if whole - least > self._budget:
            raise ResourceExhausted(f"bytes of a tensor: asked {whole - least}, used 0, limit {self._budget}")

    def _nbytes_of(self, kind: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
        """The bytes of a tensor. Raises ResourceExhausted where the strides span more than the budget."""
        if not kind & _STRIDED:
            return _nbytes(kind, dtype, sizes)
        _nbytes(kind, dtype, sizes)
        span = _span(sizes, strides)
        if span is None or not strides:
            _broken(f"sizes {sizes} with strides {strides}")
        if span.length * dtype.itemsize > self._budget:
            asked = span.length * dtype.itemsize
            raise ResourceExhausted(f"bytes that a tensor spans: asked {asked}, used 0, limit {self._budget}")
        return span.elements * dtype.itemsize

    def _begin(self, head: _Head, start: int) -> int:
        """Begin a large tensor with the bytes that have come; memory pages of the rest are not touched yet."""
        view = (np.empty(head.nbytes, np.uint8) if head.nbytes <= LEND else memory(head.nbytes).numpy()).data
        have = min(head.nbytes, self._filled - start)
        view[:have] = self._view[start : start + have]
        self._large, self._rest = (head, view), view[have:]
        return self._filled

    def _small(self, head: _Head, at: int) -> Post:
        """The post that lies in the buffer whole."""
        buffer, kind = self._buffer, head.kind
        if kind == _TENSOR:
            if not head.nbytes:
                return _post(head, torch.empty(head.sizes, dtype=head.dtype))
            MOVED["sockets"] += head.nbytes
            return _post(head, head.tensor_of(buffer[at : at + head.nbytes]))
        if kind == _LENT:
            if self._borrow is None:
                _broken("a tensor is lent on a connection without shared memory")
            name, start, word = _LOAN.unpack_from(buffer, at)
            loan = str(name.rstrip(b"\0"), "latin-1"), start, word
            MOVED["shared memory"] += head.nbytes
            return _post(head, head.tensor(self._borrow()(loan, head.nbytes).view(head.dtype)))
        if kind == _META:
            return _post(head, torch.empty(head.sizes, dtype=head.dtype, device="meta"))
        if kind == _DEADS:
            return _post(head, None, _DEAD.unpack_from(buffer, at))
        if kind == _NONE:
            return _post(head, None)
        (number,) = (_FLOAT if kind == _FLOATS else _NUMBER).unpack_from(buffer, at)
        return _post(head, number != 0 if kind == _BOOL else number)


@lru_cache(1024)
def _least(kind: int, tags: int, code: int, dims: int) -> int:
    """The number of bytes behind a header that are no values; proved before these bytes are read."""
    plain = kind & ~_STRIDED
    is_tensor, may_be_strided = plain in (_META, _TENSOR, _LENT), plain in (_TENSOR, _LENT)
    is_wrong = plain > _LENT or (kind & _STRIDED and not may_be_strided) or ((dims or code) and not is_tensor)
    if is_wrong or tags > TAG_CAP or dims > DIMS_CAP or code >= len(DTYPES):
        _broken(f"kind {kind}, {tags} numbers of a tag, dtype {code}, {dims} dimensions")
    return 8 * (tags + (2 if kind & _STRIDED else 1) * dims) + _BODY.get(plain, 0)


@lru_cache(1024)
def _nbytes(kind: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> int:
    """The bytes of a tensor; of a meta tensor none."""
    if any(n < 0 for n in sizes) or math.prod(n or 1 for n in sizes) * dtype.itemsize >= _LARGEST:
        _broken(f"sizes {sizes}")
    return math.prod(sizes) * dtype.itemsize if kind & ~_STRIDED in (_TENSOR, _LENT) else 0


def _post(head: _Head, value: Any, dead: Any = None) -> Post:
    return Post(head.round, head.edge, head.tag, value, dead, head.nbytes)


def _broken(why: str) -> NoReturn:
    raise ProtocolError(f"not a post of tfnb: {why}")


# -- the two ends of a connection -------------------------------------------------------------------------------------


class HostedConnection(Protocol):
    """One end of a connection, as seen by its hosting thread."""

    sock: socket.socket

    def events(self) -> int:
        """The selector events that this end waits for; 0 for none."""

    def ready(self, events: int) -> None:
        """Process the awaited events. An exception closes the connection."""

    def over(self, error: Exception) -> None:
        """Close the connection."""


class Sender:
    """The sending end; from any thread. Until `connect` messages are kept.

    lost: called once, with the error that ended the connection.
    """

    sock: socket.socket

    def __init__(self, lost: Callable[[Exception], None]) -> None:
        self._lost = lost
        self._guard = threading.Lock()
        self._kept: deque[memoryview] = deque()
        self._loans: TaskLoans | None = None
        self._is_open = self._is_over = False
        self._error: OSError | None = None  # met by a thread other than the hosting one

    @property
    def is_open(self) -> bool:
        """Whether the sender has a socket."""
        return self._is_open

    @property
    def is_over(self) -> bool:
        """Whether the sender is closed."""
        return self._is_over

    @property
    def has_let_go(self) -> bool:
        """Whether the other end holds no loans."""
        return self._loans is None or self._loans.has_let_go

    def connect(self, sock: socket.socket, loans: TaskLoans | None) -> None:
        """Continue with a socket, to be hosted from now on; ``loans`` if both ends share memory."""
        sock.setblocking(False)
        with self._guard:
            self.sock, self._loans, self._is_open = sock, loans, True
            if self._is_over:
                sock.close()

    def post(self, round: int, edge: int, tag: Tag, value: object, dead: Dead | None) -> bool:
        """Send a message at once; returns whether the thread has to look, as something is kept, or went wrong.

        Raises the errors of `written`, and StreamBroken when the sender is over.
        """
        with self._guard:
            if self._is_over:
                raise StreamBroken("the connection is over")
            buffers = written(round, edge, tag, value, dead, self._loans)
            if not self._is_open:
                self._kept.append(memoryview(b"".join(buffers)))
                return True
            if isinstance(self.sock, ssl.SSLSocket):  # an unsent rest has to be offered again, whole
                buffers = [piece for buffer in buffers for piece in _pieces(buffer)]
            count = 0
            if not self._kept and self._error is None:
                try:
                    if len(buffers) == 1:
                        count = self.sock.send(buffers[0])
                        if count == len(buffers[0]):
                            return False
                    else:
                        count = self.sock.sendmsg(buffers[:BUFFERS])
                except BlockingIOError:
                    pass
                except OSError as error:
                    self._error = error
            for buffer in buffers:
                nbytes = memoryview(buffer).nbytes
                if count < nbytes:  # a copy: the caller may write into its tensor again
                    self._kept.append(memoryview(bytes(memoryview(buffer)[count:])))
                count = max(0, count - nbytes)
            return bool(self._kept)

    def take(self, most: int) -> bytearray:
        """Pending messages for another transport, in absence of a socket: whole ones of about ``most`` bytes."""
        found: list[memoryview] = []
        nbytes = 0
        with self._guard:
            while self._kept and not self._is_open and (not found or nbytes + self._kept[0].nbytes <= most):
                found.append(self._kept.popleft())
                nbytes += found[-1].nbytes
        return bytearray().join(found)

    def events(self) -> int:
        """The awaited selector events: the other end's close, and room for kept bytes. Raises OSError if sending
        failed.
        """
        if self._error is not None:
            raise self._error
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._kept else 0)

    def ready(self, events: int) -> None:
        """Send kept bytes. Raises OSError, or StreamBroken at the other end's close: the other end sends nothing."""
        with self._guard:
            while self._kept and not self._is_over:
                try:
                    gone(self._kept, self.sock.sendmsg(list(islice(self._kept, BUFFERS))))
                except BlockingIOError:
                    break
            if events & selectors.EVENT_READ:
                with suppress(BlockingIOError):
                    self.sock.recv_into(bytearray(1))
                    raise StreamBroken("the other end closed the connection")

    def over(self, error: Exception) -> None:
        """Close the sender; kept messages are dropped."""
        with self._guard:
            if self._is_over:
                return
            self._is_over = True
            self._kept.clear()
            self._loans = None
            if self._is_open:
                self.sock.close()
        self._lost(error)


class Receiver:
    """The receiving end. ``take``: gets posts; ``lost``: called once, with the error.

    Its hosting thread reads, or, while ``is_taken``, another one.
    """

    def __init__(
        self, sock: socket.socket, loans: ServerLoans | None, take: Callable[[Sequence[Post]], None],
        lost: Callable[[Exception], None], budget: int = envelope.BUDGET,
    ) -> None:  # fmt: skip
        self.sock, self._take, self._lost = sock, take, lost
        self.is_paused = self.is_taken = False
        self._turn = threading.Lock()  # of the thread that reads
        self._reader = PostReader(budget, loans.borrowing if loans is not None else None)
        self._is_over = False

    def events(self) -> int:
        """The awaited selector events: none while paused, or taken."""
        return 0 if self.is_paused or self.is_taken else selectors.EVENT_READ

    def ready(self, events: int) -> None:
        """`read`, in the hosting thread."""
        if not self.is_taken:
            self.read()

    def read(self) -> None:
        """Read the bytes at hand. Raises OSError, StreamBroken, ProtocolError, ResourceExhausted or MemoryError."""
        with self._turn:
            self._read()

    def _read(self) -> None:
        for _ in range(TURNS):
            if self.is_paused:
                return
            room = self._reader.room()
            try:
                count = self.sock.recv_into(room)
            except BlockingIOError:
                return
            if not count:
                raise StreamBroken("the other end closed the connection")
            posts = self._reader.came(count)
            if posts:
                self._take(posts)
            if count < room.nbytes and not _has_more(self.sock):
                return

    def over(self, error: Exception) -> None:
        """Close the receiver."""
        if not self._is_over:
            self._is_over = True
            with self._turn:
                self.sock.close()
            self._lost(error)


def _pieces(buffer: Buffer) -> list[memoryview]:
    view = memoryview(buffer).cast("B")
    return [view[at : at + PIECE] for at in range(0, view.nbytes, PIECE)]


def _has_more(sock: socket.socket) -> bool:
    """Whether bytes wait where no selector sees them."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
