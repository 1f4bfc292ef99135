"""Direct streams: one connection from a compute task to a server process, for resident loops and copies of shards;
posts between tasks begin as one.

A server listens on the interface of its own worker, with the encryption of the cluster if that has one
(`distributed.Security`). A task that wants to connect asks for a key by Dask's connections; the key serves once, and
both ends prove that they know it before anything else is read. Each message is a prefix with the sizes of its frames,
checked before memory is taken, and the frames of the envelope (`tfnb.cluster.wire.envelope`), received
straight into the buffers that the tensors keep. The caller is a thread that blocks, always with a deadline. A stream
that fails in any way is closed: its caller goes on by Dask's connections, under the same operation identity.

``TFNB_STREAMS=off`` in the environment of the workers: no stream is opened.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, cast

from distributed import Security
from distributed.comm.addressing import get_address_host, parse_address

from tfnb.cluster.wire import envelope
from tfnb.cluster.wire.asking import ends, message
from tfnb.cluster.wire.encryption import encrypted, encryption
from tfnb.cluster.wire.lending import ServerLoans, TaskLoans
from tfnb.cluster.wire.messages import Ask, NotSent, Ok, OpId, Outcome, Peer, Unknown
from tfnb.cluster.wire.transport import Link, allowance, read_answer, write_request
from tfnb.errors import ProtocolError, ResourceExhausted, TfnbError
from tfnb.state import shared_memory
from tfnb.state.store import memory

is_on = os.environ.get("TFNB_STREAMS", "on") != "off"

CONNECT = 0.5  # seconds to connect and to prove the key
AGAIN = 5.0  # seconds until a stream that could not be opened is tried again
PROVE = 5.0  # seconds until a server closes a connection that has not proved its key
KEY_LASTS = 10.0  # seconds in which a key can be used
KEYS = 256  # that can be waiting for their connection
GIVE_WAY = 0.05  # seconds after which a call that waits for other tasks looks whether its thread is wanted
STALL = 30.0  # seconds that a message may take, beside its bytes
BYTES_PER_SECOND = 50e6
BUFFERS = 64  # given to the system at once
POSTED = 16  # regions of memory that hold tensors of one connection that carries posts

_MAGIC = b"TFNS\x01\x00\x00\x00"
_NAME, _NONCE, _PROOF = 8, 32, 32  # bytes
_PREFIX = struct.Struct("<8sQQ")  # magic, bytes of the envelope, number of further frames
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()

Filling = Generator["memoryview | list[envelope.Buffer]", None, None]  # the next buffer to fill, or a whole message


class StreamBroken(Exception):
    """The other end is gone, or does not speak the protocol."""


class StreamOffer(NamedTuple):
    """The address of a listening server, and the key for one connection."""

    host: str
    port: int
    name: bytes
    key: bytes


def host_of(address: str) -> str | None:
    """The interface of a worker where streams can listen; None where its connections are no sockets.

    >>> host_of("tcp://127.0.0.1:4000"), host_of("tls://127.0.0.1:4000"), host_of("inproc://127.0.0.1/1/2")
    ('127.0.0.1', '127.0.0.1', None)
    """
    return get_address_host(address) if parse_address(address)[0] in ("tcp", "tls") else None


def kept(sock: socket.socket) -> socket.socket:
    """Register a socket to be closed in forked children, since only the parent owns the connection."""
    _open.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_open):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# -- messages on a stream -------------------------------------------------------------------------------------------


def framed(message: Sequence[envelope.Buffer]) -> list[memoryview]:
    """The buffers of a message of `envelope.encode` with their prefix."""
    views = [memoryview(buffer).cast("B") for buffer in message]
    sizes = struct.pack(f"<{len(views) - 1}Q", *(view.nbytes for view in views[1:]))
    prefix = _PREFIX.pack(_MAGIC, views[0].nbytes, len(views) - 1) + sizes
    return [memoryview(prefix), *(view for view in views if view.nbytes)]


def frames(afford: Callable[[int], None]) -> Filling:
    """One message after the other: buffers to fill, then the whole.

    ``afford`` raises ResourceExhausted for bytes that a message cannot have. Nothing is taken before it was asked, and
    no page of it is the process's own before bytes came for it.
    """
    prefix = bytearray(_PREFIX.size)
    while True:
        yield memoryview(prefix)
        magic, first, count = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            raise ProtocolError("not a stream of tfnb")
        for what, asked, limit in (
            ("frames in a message", count, envelope.FRAMES_CAP), ("bytes of an envelope", first, envelope.FACTS_CAP),
        ):  # fmt: skip
            if asked > limit:
                raise ResourceExhausted(f"{what}: asked {asked}, used 0, limit {limit}")
        lengths = bytearray(8 * count)
        if count:
            yield memoryview(lengths)
        sizes = [first, *struct.unpack(f"<{count}Q", lengths)]
        afford(sum(sizes))
        views = [memory(size).numpy().data for size in sizes]
        for view in views:
            if view.nbytes:
                yield view
        message: list[envelope.Buffer] = list(views)
        del views
        yield message
        del message


def within(asked: int, used: int, budget: int) -> None:
    """Raise ResourceExhausted for a message that is too large."""
    limit = budget + envelope.FACTS_CAP
    if asked + used > limit:
        raise ResourceExhausted(f"bytes of a message: asked {asked}, used {used}, limit {limit}")


# -- who may connect --------------------------------------------------------------------------------------------------


class Keys:
    """Keys that were given out, each for one connection and a few seconds.

    >>> keys, offer = Keys(), StreamOffer("127.0.0.1", 4000, b"name", b"key")
    >>> keys.add(offer, 0.0)
    >>> keys.may_be_used(KEY_LASTS), keys.take(b"name", 1.0), keys.may_be_used(1.0)
    (True, b'key', False)
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    def add(self, offer: StreamOffer, now: float) -> None:
        """A key was given out."""
        self._keys[offer.name] = offer.key, now + KEY_LASTS
        while len(self._keys) > KEYS:
            self._keys.popitem(last=False)

    def may_be_used(self, now: float) -> bool:
        """Whether a connection may still come for one of them."""
        return any(until >= now for _, until in self._keys.values())

    def take(self, name: bytes, now: float) -> bytes:
        """The key of a name, used up; a random key if the name is unknown or its time is over."""
        key, until = self._keys.pop(name, (b"", 0.0))
        return key if now <= until else secrets.token_bytes(32)


def _proof(key: bytes, who: bytes, mine: bytes, yours: bytes) -> bytes:
    return hmac.digest(key, who + mine + yours, hashlib.sha256)


# -- the server's end -----------------------------------------------------------------------------------------------


class Connection:
    """The server's end of one stream; never blocks. ``until``: the deadline of the work under way."""

    def __init__(self, sock: socket.socket, keys: Keys, afford: Callable[[int], None], now: float) -> None:
        sock.setblocking(False)
        _quick(sock)
        self.socket = kept(sock)
        self.until: float | None = now + PROVE
        self.is_proved = False
        self.is_asked = False  # a request waits for its answer
        self.filling = 0  # bytes of the message that is coming in
        self.loans: ServerLoans | None = None  # where both ends share memory
        self._out: deque[memoryview] = deque()
        self._parts = self._incoming(keys, afford)
        self._want: memoryview | None = None

    @property
    def has_more_to_send(self) -> bool:
        """Whether the other end has to read first."""
        return bool(self._out) and self.is_proved

    def _incoming(self, keys: Keys, afford: Callable[[int], None]) -> Filling:
        mine, claim = secrets.token_bytes(_NONCE), bytearray(_NAME + _NONCE + _PROOF)
        self.send([_MAGIC, mine], time.monotonic())
        yield memoryview(claim)
        name, yours, proof = bytes(claim[:_NAME]), bytes(claim[_NAME:-_PROOF]), bytes(claim[-_PROOF:])
        key = keys.take(name, time.monotonic())
        if not hmac.compare_digest(_proof(key, b"task", mine, yours), proof):
            raise StreamBroken("a key that is not known")
        self.is_proved = True
        self.send([_proof(key, b"server", yours, mine)], time.monotonic())

        def taken(nbytes: int) -> None:
            afford(nbytes)
            self.filling = nbytes

        yield from frames(taken)

    def read(self, now: float) -> list[envelope.Buffer] | None:
        """A whole message, if there is one now. Raises StreamBroken, ProtocolError, ResourceExhausted or OSError."""
        while True:
            if self._want is None:
                part = next(self._parts)
                if isinstance(part, list):
                    self.until, self.filling = None, 0
                    return part
                self._want = part
            try:
                count = self.socket.recv_into(self._want)
            except BlockingIOError:
                if not self.is_proved:
                    self.write()  # after the handshake of an encrypted one
                return None
            if not count:
                raise StreamBroken("closed")
            if self.is_proved and self.until is None:
                self.until = now + STALL
            if self.until is not None and self._want.nbytes > 1 << 20:
                self.until = max(self.until, now + self._want.nbytes / BYTES_PER_SECOND)
            self._want = self._want[count:] if count < self._want.nbytes else None

    def send(self, buffers: Sequence[envelope.Buffer], now: float) -> None:
        """Queue buffers, and write as many as the system takes at once."""
        self._out.extend(memoryview(buffer) for buffer in buffers)
        self.write()
        if self._out and self.is_proved:
            self.until = now + STALL + sum(view.nbytes for view in self._out) / BYTES_PER_SECOND

    def write(self) -> None:
        """Go on sending. Raises OSError."""
        while self._out:
            try:
                gone(self._out, self.socket.sendmsg(list(islice(self._out, BUFFERS))))
            except BlockingIOError:
                return
        if self.is_proved:
            self.until = None

    def close(self) -> None:
        """Close the connection; unsent buffers are dropped."""
        self.socket.close()
        self._out.clear()
        self._parts.close()
        self._want = self.loans = None


# -- the task's end -------------------------------------------------------------------------------------------------


class Stream:
    """The task's end: a request and its answer at a time, in a thread that blocks for the answer."""

    def __init__(self, sock: socket.socket, budget: int) -> None:
        self._socket = kept(sock)
        self._guard = threading.Lock()  # of the next two, and of closing
        self._is_used, self._is_over = False, False
        self._parts = frames(lambda nbytes: within(nbytes, 0, budget))
        self._budget = budget
        self._loans: TaskLoans | None = None  # where both ends share memory

    @property
    def is_over(self) -> bool:
        """Whether the stream can be used no more."""
        return self._is_over

    @classmethod
    def connect(cls, offer: StreamOffer, budget: int, context: ssl.SSLContext | None = None) -> Stream:
        """Connect and prove the key. Raises OSError (a deadline is one) or StreamBroken."""
        until = time.monotonic() + CONNECT
        sock = socket.create_connection((offer.host, offer.port), timeout=CONNECT)
        try:
            sock = encrypted(sock, context, listens=False)
            _quick(sock)
            mine, hello = secrets.token_bytes(_NONCE), bytearray(len(_MAGIC) + _NONCE)
            _fill(sock, memoryview(hello), until)
            if not hello.startswith(_MAGIC):
                raise StreamBroken("not a server of tfnb")
            theirs = bytes(hello[len(_MAGIC) :])
            claim = offer.name + mine + _proof(offer.key, b"task", theirs, mine)
            _send(sock, [memoryview(claim)], until)
            proof = bytearray(_PROOF)
            _fill(sock, memoryview(proof), until)
            if not hmac.compare_digest(bytes(proof), _proof(offer.key, b"server", mine, theirs)):
                raise StreamBroken("the server does not know the key")
            return cls(sock, budget)
        except BaseException:
            sock.close()
            raise

    def share(self, peer: Peer, op: OpId) -> bool:
        """Agree to lend tensors; False where the server cannot. Raises OSError where this end cannot map its memory."""
        loans, until = TaskLoans(), time.monotonic() + CONNECT
        about: dict[str, Any] = {"epoch": 0, "op": op, "seconds": CONNECT, "budget": self._budget}
        outcome = self.send(write_request(peer, "share", {"memory": loans.name}, (), **about), until)
        outcome = outcome or self.receive(until)
        if isinstance(outcome, Ok):
            loans.prove(str(outcome.meta["memory"]))
            self._loans = loans
        return self._loans is not None

    def turn(
        self, peer: Peer, op: OpId, about: Mapping[str, Any], *, epoch: int
    ) -> tuple[socket.socket, TaskLoans | None]:  # fmt: skip
        """Let the connection carry posts from here on (`tfnb.cluster.wire.posting`); the stream is over.

        Returns its socket, and the loans if both ends share memory. Raises OSError or StreamBroken.
        """
        loans, until = None, time.monotonic() + CONNECT
        with suppress(OSError):
            loans = TaskLoans(POSTED)
        meta = {**about, "memory": loans.name if loans is not None else ""}
        outcome = self.send(
            write_request(peer, "post", meta, (), epoch=epoch, op=op, seconds=CONNECT, budget=self._budget), until
        ) or self.receive(until)  # fmt: skip
        if not isinstance(outcome, Ok):
            raise StreamBroken(f"no posts to {peer.addr}: {outcome}")
        try:
            if loans is not None:
                loans.prove(str(outcome.meta["memory"]))
        except OSError:
            loans = None
        with self._guard:
            self._is_over = True
        return self._socket, loans

    @property
    def lend(self) -> envelope.Lend | None:
        """The function that lends tensors of a request; None without shared memory."""
        return self._loans.lend if self._loans is not None else None

    def send(self, message: Sequence[envelope.Buffer], until: float) -> Outcome | None:
        """Send a request. None if an answer is to be received; NotSent before the first byte, Unknown afterwards."""
        with self._guard:
            if self._is_over:
                return NotSent("the stream is over")
            self._is_used = True
        sent: list[bool] = []
        try:
            _send(self._socket, framed(message), until, lambda: sent.append(True))
        except OSError as error:
            self._leave(is_broken=True)
            return Unknown(f"{error}", lost=True) if sent else NotSent(f"{error}")
        except BaseException:
            self._leave(is_broken=True)
            raise
        return None

    def receive(self, until: float) -> Outcome:
        """The answer to the request that was sent, or Unknown; then the stream is over."""
        is_broken = True
        try:
            while not isinstance(part := next(self._parts), list):
                _fill(self._socket, part, until)
            loans = self._loans
            outcome = read_answer(part, self._budget, loans.borrow if loans is not None else None)
            if loans is not None:
                loans.read()
            is_broken = False
            return outcome
        except (OSError, StreamBroken, ProtocolError, ResourceExhausted) as error:
            return Unknown(f"{type(error).__name__}: {error}", lost=not isinstance(error, TimeoutError))
        finally:
            self._leave(is_broken)

    def leave(self) -> None:
        """Give up the answer, and the stream."""
        self._leave(is_broken=True)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def _leave(self, is_broken: bool) -> None:
        with self._guard:
            self._is_used = False
            self._is_over = self._is_over or is_broken
            if self._is_over:
                self._socket.close()

    def end(self) -> None:
        """From any thread: close the stream, and wake the thread that waits on its answer."""
        with self._guard:
            self._is_over = True
            if not self._is_used:
                self._socket.close()
                return
            with suppress(OSError):  # the other end was quicker
                self._socket.shutdown(socket.SHUT_RDWR)  # its thread closes it


class Streams:
    """The streams of one task, by server; its compute thread calls, its event loop opens and ends them.

    ``traffic``: bytes of tensors sent and received so far, by the address of the server's worker.
    """

    def __init__(self, link: Link, security: Security) -> None:
        self.traffic = Counter[str]()
        self._link, self._security = link, security
        self._streams: dict[Peer, Stream] = {}
        self._not_before: dict[Peer, float] = {}  # where one could not be opened
        self._apart: set[Peer] = set()  # servers that share no memory with this task

    def op(self) -> OpId:
        """A fresh operation identity."""
        return self._link.op()

    def lacks(self, peers: Iterable[Peer]) -> list[Peer]:
        """The peers to whom a stream is to be opened now."""
        if not is_on:
            return []
        now = time.monotonic()
        return [peer for peer in peers if self._found(peer) is None and self._not_before.get(peer, 0.0) <= now]

    async def open(self, peer: Peer, *, epoch: int) -> None:
        """Open a stream, if the server and the network allow one; after a failure another try comes later."""
        if not self.lacks([peer]):
            return  # another loop opens it, or has
        self._not_before[peer] = time.monotonic() + AGAIN
        answer = await self._link.call(peer, "stream", epoch=epoch)
        if not isinstance(answer, Ok):
            return
        meta = answer.meta
        offer = StreamOffer(
            str(meta["host"]), int(meta["port"]), bytes.fromhex(meta["name"]), bytes.fromhex(meta["key"])
        )
        try:
            context = encryption(peer.addr, self._security, listens=False)
            stream = await asyncio.to_thread(Stream.connect, offer, self._link.budget, context)
        except (OSError, StreamBroken):
            return
        if shared_memory.is_on and peer not in self._apart:
            await asyncio.to_thread(self._share, stream, peer)
        self._streams[peer] = stream
        self._not_before.pop(peer, None)

    def _share(self, stream: Stream, peer: Peer) -> None:
        """Agree to lend on both ends; if only this end cannot, the stream ends, and the next one is without."""
        try:
            if not stream.share(peer, self.op()):
                self._apart.add(peer)
        except OSError:
            self._apart.add(peer)
            stream.end()

    def call(
        self, asks: Mapping[Peer, Sequence[Ask]], *, epoch: int, is_thread_wanted: Callable[[], bool] = lambda: False
    ) -> list[list[Outcome]]:
        """Ask several servers, each with one message: all are sent, then all answers are received.

        A contribution is answered when all servers have all contributions to the same round. So it is sent to all
        servers or to none, and waits no longer where this thread is needed for something that others may wait for.

        is_thread_wanted: whether another call waits for this thread.
        """
        methods = {ask.method for mine in asks.values() for ask in mine}
        is_joint, may_leave = "contribute" in methods, "push" not in methods
        found: dict[Peer, list[Outcome]] = {peer: [NotSent("no direct stream")] * len(asks[peer]) for peer in asks}
        streams = {peer: stream for peer in asks if is_on and (stream := self._found(peer)) is not None}
        if is_joint and len(streams) < len(asks):
            return list(found.values())
        waiting: dict[Peer, tuple[Stream, float]] = {}
        for peer, stream in streams.items():
            mine = asks[peer]
            one = message(mine)
            nbytes = envelope.size(one.tensors)
            seconds = allowance(one.method, nbytes)
            until = time.monotonic() + seconds
            try:
                request = write_request(
                    peer, one.method, one.meta, one.tensors, epoch=epoch, op=one.op or self.op(), seconds=seconds,
                    budget=self._link.budget, lend=stream.lend,
                )  # fmt: skip
            except TfnbError as error:
                found[peer] = [NotSent(str(error))] * len(mine)
                continue
            end = stream.send(request, until)
            if end is None:
                self.traffic[peer.addr] += nbytes
                waiting[peer] = stream, until
            else:
                found[peer] = [end] * len(mine)
        goes_on = not is_joint or len(waiting) == len(asks)
        while waiting and goes_on:
            ready = _readable(waiting, is_thread_wanted) if is_joint or len(waiting) > 1 else next(iter(waiting))
            if ready is None:
                goes_on = not is_joint
                continue
            stream, until = waiting.pop(ready)
            answer = stream.receive(until)
            self.traffic[ready.addr] += envelope.size(getattr(answer, "tensors", ()))
            found[ready] = ends(asks[ready], answer)
            goes_on = not may_leave or all(isinstance(end, Ok) for end in found[ready])
        for peer, (stream, _) in waiting.items():
            stream.leave()
            found[peer] = [Unknown("not waited for")] * len(asks[peer])
        return list(found.values())

    def _found(self, peer: Peer) -> Stream | None:
        stream = self._streams.get(peer)
        return stream if stream is not None and not stream.is_over else None

    def end(self) -> None:
        """Close all streams; a call that waits on one ends at once."""
        for peer in list(self._streams):
            self._streams.pop(peer).end()
        self._not_before.clear()
        self._apart.clear()


def _readable(waiting: Mapping[Peer, tuple[Stream, float]], is_thread_wanted: Callable[[], bool]) -> Peer | None:
    """The first peer with an answer, an error or a missed deadline; None if this thread is wanted meanwhile."""
    first, (_, until) = next(iter(waiting.items()))
    with selectors.PollSelector() as selector:
        for peer, (stream, _) in waiting.items():
            selector.register(stream, selectors.EVENT_READ, peer)
        while not (ready := selector.select(min(GIVE_WAY, max(0.0, until - time.monotonic())))):
            if time.monotonic() >= until:
                return first
            if is_thread_wanted():
                return None
    return cast(Peer, ready[0][0].data)


def _quick(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer by the deadline")
    return left


def _send(
    sock: socket.socket, buffers: Iterable[memoryview], until: float, begun: Callable[[], object] = lambda: None
) -> None:  # fmt: skip
    out = deque(buffers)
    while out:
        sock.settimeout(_left(until))
        gone(out, sock.sendmsg(list(islice(out, BUFFERS))))
        begun()


def gone(out: deque[memoryview], count: int) -> None:
    """Remove so many sent bytes from ``out``."""
    while out and count >= out[0].nbytes:
        count -= out.popleft().nbytes
    if count:
        out[0] = out[0][count:]


def _fill(sock: socket.socket, view: memoryview, until: float) -> None:
    while view.nbytes:
        sock.settimeout(_left(until))
        count = sock.recv_into(view)
        if not count:
            raise StreamBroken("closed")
        view = view[count:]
