"""Calls between processes: the only module that touches Dask's connections.

`Link.call` reaches the one method of a task (`actor_execute` of its worker) and ends, by its deadline plus 50 ms, in
one of the five outcomes of `messages`. An address that failed once is suspect and is not dialled again until it is
confirmed. `ClientLink` adds the blocking side: the calling thread waits in short turns, so Ctrl-C is seen, and begun
work goes on in the event loop.

``actor_execute`` is not public Dask API (read in distributed 2026.8); tests/cluster/test_transport.py is its contract.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import random
import socket
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from distributed import Client, Worker
from distributed.comm import get_address_host_port, parse_address
from distributed.comm.core import CommClosedError
from distributed.core import send_recv
from distributed.protocol import to_serialize

from tfnb.cluster.wire import envelope
from tfnb.cluster.wire.envelope import Buffer
from tfnb.cluster.wire.messages import (
    GIVEN_UP,
    Failure,
    NotSent,
    Ok,
    OpId,
    Outcome,
    Peer,
    Refusal,
    Request,
    Unknown,
    failed,
)
from tfnb.errors import DeadlineExceeded, ProtocolError, SchedulerLost, TfnbError

_JITTER = random.Random()  # a seed of the user's stays as it is
T = TypeVar("T")

CONNECT = 3.0  # seconds to reach an address
SLACK = 0.05  # seconds a call may end after its deadline
DEADLINES = {"ping": 1.5, "hello": 10.0, "stream": 5.0, "run": 600.0}
BYTES_PER_SECOND = 50e6
SHORTEST = GIVEN_UP  # seconds: a call that is given up while its peer lives would begin anew with its bytes
_TURN = 0.05  # seconds the blocking side sleeps between looks


# -- pure rules -----------------------------------------------------------------------------------------------


class Wait(NamedTuple):
    """Try again after ``seconds``."""

    seconds: float


class Reread(NamedTuple):
    """Find out whether the peer is alive before trying again."""


class GiveUp(NamedTuple):
    """Let the caller decide."""


def retry(outcome: Outcome, attempt: int, now: float, deadline: float, jitter: float = 0.5) -> Wait | Reread | GiveUp:
    """The reaction to the outcome of attempt number ``attempt`` (from 0); ``jitter`` in [0, 1) spreads the waits.

    >>> retry(Unknown(), 0, now=0.0, deadline=1.0)
    Wait(seconds=0.05)
    >>> retry(Unknown(), 9, now=0.0, deadline=0.5), retry(NotSent(), 0, 0.0, 1.0), retry(Ok(), 0, 0.0, 1.0)
    (GiveUp(), Reread(), GiveUp())
    """
    match outcome:
        case Unknown(lost=False):
            seconds = min(1.0, 0.05 * 2**attempt) * (0.5 + jitter)
            return Wait(seconds) if now + seconds < deadline else GiveUp()
        case Refusal("again"):
            return Wait(0.0) if now < deadline else GiveUp()
        case NotSent() | Unknown():
            return Reread()
    return GiveUp()


def allowance(method: str, nbytes: int, seen: Sequence[float] = ()) -> float:
    """Seconds that a call may take by default: by its kind, its size, and four times the slowest recent ones."""
    slow = sorted(seen)[int(0.99 * (len(seen) - 1))] if seen else 0.0
    return max(DEADLINES.get(method, SHORTEST), 4 * slow, nbytes / BYTES_PER_SECOND)


# -- calls ----------------------------------------------------------------------------------------------------


class Link:
    """The calling side of one process, bound to its event loop. ``pool`` is Dask's connection pool.

    ``own``: the incarnation of the task in this process, and what answers calls to that one without a message: tensors
    go and come as they are.
    """

    def __init__(self, pool: Any, *, budget: int = envelope.BUDGET) -> None:
        self.pool, self.budget = pool, budget
        self.client = uuid.uuid4().hex
        self.suspect: set[str] = set()
        self.scheduler: Any = None  # set: calls go through the scheduler, for workers that cannot be reached
        self.latencies: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=128))
        self.heard: dict[str, float] = {}  # when each address answered last
        self.own: tuple[int, Callable[[Request], Awaitable[Ok | Failure | Refusal]]] | None = None
        self._seq = itertools.count()
        self._left: set[asyncio.Task[Any]] = set()  # exchanges whose caller is gone

    def op(self) -> OpId:
        """A fresh operation identity."""
        return OpId(self.client, next(self._seq))

    def confirm(self, addr: str) -> None:
        """An address is alive after all."""
        self.suspect.discard(addr)

    async def refuses(self, addr: str) -> bool:
        """Whether an address refuses connections, as its process is gone: a stopped process still accepts connections.

        False where that cannot be known from here.
        """
        if self.scheduler is not None or parse_address(addr)[0] not in ("tcp", "tls"):
            return False
        try:
            async with asyncio.timeout(CONNECT):
                _, writer = await asyncio.open_connection(*get_address_host_port(addr))
        except ConnectionError:
            return True
        except OSError:
            return False
        writer.close()
        return False

    def deadline(self, method: str, nbytes: int = 0) -> float:
        """The default deadline of a call that starts now."""
        return time.monotonic() + allowance(method, nbytes, self.latencies[method])

    async def call(
        self, peer: Peer, method: str, meta: Mapping[str, Any] | None = None, tensors: Sequence[torch.Tensor] = (), *,
        epoch: int, op: OpId | None = None, deadline: float | None = None,
    ) -> Outcome:  # fmt: skip
        """Call a method of a task; ``deadline`` is an instant of `time.monotonic`. What fails on the way is an outcome,
        not an exception.

        Raises UnsupportedDtype, ResourceExhausted or InvalidArgument if the message cannot be encoded, before sending.
        """
        op = op or self.op()
        if self.own is not None and peer.incarnation == self.own[0]:
            return await self.own[1](Request(method, op, epoch, peer.incarnation, dict(meta or {}), tuple(tensors)))
        deadline = deadline or self.deadline(method, envelope.size(tensors))
        begin = time.monotonic()
        message = write_request(
            peer, method, meta, tensors, epoch=epoch, op=op, seconds=deadline - begin, budget=self.budget
        )
        if peer.addr in self.suspect:
            return NotSent(f"{peer.addr} failed before and is not dialled again")
        outcome = await self._bounded(peer, message, deadline)
        if isinstance(outcome, Ok):
            self.heard[peer.addr] = now = time.monotonic()
            self.latencies[method].append(now - begin)
        if isinstance(outcome, NotSent) or (isinstance(outcome, Unknown) and outcome.lost):
            self.suspect.add(peer.addr)
        return outcome

    async def persist(
        self, peer: Peer, method: str, meta: Mapping[str, Any] | None = None, tensors: Sequence[torch.Tensor] = (), *,
        epoch: int, op: OpId | None = None, deadline: float,
    ) -> Outcome:  # fmt: skip
        """`call`, repeated with the same identity while no answer came by the deadline, or it is ``again``, and time is
        left; not after NotSent or a broken connection.
        """
        op = op or self.op()
        for attempt in itertools.count():
            until = min(deadline, self.deadline(method, envelope.size(tensors)))
            outcome = await self.call(peer, method, meta, tensors, epoch=epoch, op=op, deadline=until)
            match retry(outcome, attempt, time.monotonic(), deadline, _JITTER.random()):
                case Wait(seconds):
                    await asyncio.sleep(seconds)
                case _:
                    return outcome
        raise AssertionError("unreachable")

    async def _bounded(self, peer: Peer, message: Sequence[Buffer], deadline: float) -> Outcome:
        """An exchange that ends by its deadline; a late one is cancelled in the background."""
        sent: list[bool] = []
        task = asyncio.ensure_future(self._exchange(peer, message, deadline, sent))
        try:
            await asyncio.wait({task}, timeout=max(0.0, deadline - time.monotonic()))
        finally:
            if not task.done():
                task.cancel()
                self._left.add(task)
                task.add_done_callback(self._forget)
        if task.done() and not task.cancelled():
            return task.result()
        if not sent:
            return NotSent(f"{peer.addr} was not reached by the deadline")
        return Unknown(f"{peer.addr} did not answer by the deadline")

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller was told "unknown" already

    async def _exchange(self, peer: Peer, message: Sequence[Buffer], deadline: float, sent: list[bool]) -> Outcome:
        call: dict[str, Any] = {
            "actor": peer.key, "function": "handle", "kwargs": {},
            "args": [to_serialize(memoryview(frame)) for frame in message],
        }  # fmt: skip
        try:
            if self.scheduler is not None:
                sent.append(True)
                reply = await self.scheduler.proxy(worker=peer.addr, msg={"op": "actor_execute", **call})
            else:
                reply = await self._direct(peer.addr, call, deadline, sent)
        except (TimeoutError, OSError, CommClosedError, RuntimeError) as error:
            text = f"{peer.addr}: {type(error).__name__}: {error}"
            return Unknown(text, lost=True) if sent else NotSent(text)
        except KeyError:  # the worker lives and knows no such actor
            return Refusal("unknown-task", f"{peer.addr} holds no task {peer.key}")
        except Exception as error:  # raised by Dask's side of the worker: executed or not, nobody knows
            return Unknown(f"{peer.addr}: {type(error).__name__}: {error}")
        return _outcome(reply, self.budget)

    async def _direct(self, addr: str, call: Mapping[str, Any], deadline: float, sent: list[bool]) -> Any:
        left = max(0.001, min(CONNECT, deadline - time.monotonic()))
        async with asyncio.timeout(left + SLACK):
            comm = await self.pool.connect(addr, timeout=left)
        name, comm.name = comm.name, "tfnb"
        sent.append(True)
        try:
            return await send_recv(comm, op="actor_execute", **call)
        finally:
            self.pool.reuse(addr, comm)
            comm.name = name


def _outcome(reply: Any, budget: int) -> Outcome:
    """The outcome of a call, from Dask's reply."""
    if not isinstance(reply, Mapping) or reply.get("status") != "OK":
        cause = reply.get("exception") if isinstance(reply, Mapping) else reply
        return failed(cause) if isinstance(cause, BaseException) else Failure("Internal", f"odd reply {cause!r:.200}")
    return read_answer(reply["result"], budget)


# -- requests and answers as messages -------------------------------------------------------------------------


def write_request(
    peer: Peer, method: str, meta: Mapping[str, Any] | None, tensors: Sequence[torch.Tensor], *, epoch: int, op: OpId,
    seconds: float, budget: int, lend: envelope.Lend | None = None,
) -> list[Buffer]:  # fmt: skip
    """The caller's side: the request as a message. Raises the errors of `envelope.encode`."""
    header = {
        "method": method, "epoch": epoch, "incarnation": peer.incarnation, "client": op.client, "seq": op.seq,
        "ms_left": max(0, int(seconds * 1000)), "meta": dict(meta or {}),
    }  # fmt: skip
    return envelope.encode(header, tensors, budget=budget, lend=lend)


def read_request(frames: Sequence[Buffer], budget: int, borrow: envelope.Borrow | None = None) -> Request:
    """The callee's side: the request in a message. Raises ProtocolError or ResourceExhausted, and as ``borrow``."""
    header, tensors = envelope.decode(frames, budget=budget, borrow=borrow)
    try:
        match header:
            case {
                "method": str(method), "epoch": int(epoch), "incarnation": int(incarnation), "client": client,
                "seq": seq, "ms_left": int(left), "meta": dict(meta),
            } if 0 <= left < 1 << 63:  # fmt: skip
                return Request(method, OpId.read(client, seq), epoch, incarnation, meta, tensors, left / 1000)
    except ValueError as error:
        raise ProtocolError(f"not a request of tfnb: {error}") from error
    raise ProtocolError("not a request of tfnb: method is a string, meta an object, the others are counts")


def write_outcome(
    outcome: Ok | Failure | Refusal, budget: int, lend: envelope.Lend | None = None
) -> list[Buffer]:  # fmt: skip
    """The answer as a message."""
    tensors = outcome.tensors if isinstance(outcome, Ok) else ()
    return envelope.encode(outcome_header(outcome), tensors, budget=budget, lend=lend)


def outcome_header(outcome: Ok | Failure | Refusal) -> dict[str, Any]:
    """The answer as JSON, but for its tensors."""
    match outcome:
        case Ok(meta, _, dup):
            return {"outcome": "ok", "meta": dict(meta), "dup": dup}
        case Failure(tag, message, details):
            return {"outcome": "failed", "tag": tag, "message": message, "details": dict(details)}
        case Refusal(reason, message):
            return {"outcome": "refused", "reason": reason, "message": message}


def read_answer(message: Sequence[Buffer], budget: int, borrow: envelope.Borrow | None = None) -> Outcome:
    """The caller's side: the outcome in a message; an unreadable message is a failure. Raises the errors of
    ``borrow``.
    """
    try:
        header, tensors = envelope.decode(message, budget=budget, borrow=borrow)
        return read_outcome(header, tensors)
    except TfnbError as error:
        return failed(error)


def read_outcome(header: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Outcome:
    """The caller's side: the outcome in an answer."""
    match header:
        case {"outcome": "ok", "meta": dict(meta), "dup": bool(dup)}:
            return Ok(meta, tensors, dup)
        case {"outcome": "failed", "tag": str(tag), "message": str(message), "details": dict(details)}:
            return Failure(tag, message, details)
        case {"outcome": "refused", "reason": str(reason), "message": str(message)}:
            return Refusal(reason, message)
    raise ProtocolError("not an answer of tfnb")


# -- the two ends ---------------------------------------------------------------------------------------------


def worker_link(worker: Worker, budget: int) -> Link:
    """The link of a task, over its worker's connection pool."""
    return Link(worker.rpc, budget=budget)


class ClientLink(Link):
    """The link of the notebook's process, over its Dask client."""

    def __init__(self, client: Client) -> None:
        super().__init__(client.rpc)
        self.dask = client
        self.begun: set[asyncio.Task[Any]] = set()
        self.loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop  # type: ignore[union-attr]

    async def route(self, peer: Peer) -> str:
        """Find out how the peer's worker is reached: ``direct``, or through the ``scheduler``."""
        try:
            comm = await asyncio.wait_for(self.pool.connect(peer.addr, timeout=CONNECT), CONNECT + SLACK)
        except (TimeoutError, OSError, CommClosedError):
            self.scheduler = self.dask.scheduler
            return "scheduler"
        self.pool.reuse(peer.addr, comm)
        self.scheduler = None  # the worker that was not reached before may have been a dead one
        return "direct"

    def start(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Handle[T]:
        """Begin ``await function(*args)`` in the event loop, independently of the calling thread."""
        return self._start(function, args, is_waited_for=True)

    def start_aside(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Handle[T]:
        """`start` for long work without changes of values: a wait for the end of all calls leaves such work out."""
        return self._start(function, args, is_waited_for=False)

    def _start(
        self, function: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...], is_waited_for: bool
    ) -> Handle[T]:  # fmt: skip
        handle: Handle[T] = Handle()
        if not self.post(self._begin, handle, function, args, is_waited_for):
            raise _no_client("a call")
        return handle

    def post(self, function: Callable[..., Any], *args: Any) -> bool:
        """Let the event loop call ``function(*args)``; False if the loop does not run any more."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)
            return self.loop.is_running()
        return False

    def _begin(
        self, handle: Handle[T], function: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...],
        is_waited_for: bool,
    ) -> None:  # fmt: skip
        task = self.loop.create_task(function(*args))
        if is_waited_for:
            self.begun.add(task)
            task.add_done_callback(self.begun.discard)
        task.add_done_callback(handle.finish)

    def wait(
        self, handle: Handle[T], timeout: float | None, what: str, every: Callable[[], None] | None = None
    ) -> T:  # fmt: skip
        """The result of begun work. Raises DeadlineExceeded after ``timeout`` seconds; the work goes on.

        Raises SchedulerLost if the event loop has ended without the work.
        """

        def look() -> None:
            if not self.loop.is_running() and not handle.task:
                raise _no_client(what)
            if every is not None:
                every()

        return wait(handle, timeout, what, look)


def _no_client(what: str) -> SchedulerLost:
    return SchedulerLost(f"{what} cannot be done: the Dask client is closed")


class Handle(Generic[T]):
    """Work begun in another thread, as seen by the blocking side.

    A bare lock that only one side releases: an interrupt between any two bytecodes leaves nothing locked that
    the other side needs, which a `concurrent.futures.Future` does not promise.
    """

    def __init__(self) -> None:
        self.task: list[asyncio.Task[T] | concurrent.futures.Future[T]] = []
        self.gate = threading.Lock()
        self.gate.acquire()

    def finish(self, task: asyncio.Task[T] | concurrent.futures.Future[T]) -> None:
        """Called at the end of the work, in its own thread."""
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits any more
        self.task.append(task)
        self.gate.release()


def wait(handle: Handle[T], timeout: float | None, what: str, every: Callable[[], None] | None = None) -> T:
    """The result of a handle, waited for in short turns so that Ctrl-C is seen; DeadlineExceeded after ``timeout``.

    every: called in each turn.
    """
    end = float("inf") if timeout is None else time.monotonic() + timeout
    while not handle.task:
        if time.monotonic() >= end:
            raise DeadlineExceeded(f"{what} did not end within {timeout:.1f} s")
        handle.gate.acquire(timeout=_TURN)
        if every is not None:
            every()
    return handle.task[0].result()


def scheduler_of(client: Client) -> Any:
    """The RPC to a client's scheduler; raises ConnectionError if the client was closed meanwhile."""
    if client.scheduler is None:
        raise ConnectionError("the Dask client is closed")
    return client.scheduler


def scheduler_address(client: Client) -> str:
    """Where a client's scheduler listens."""
    return str(getattr(client.scheduler, "address", ""))


# -- addresses ------------------------------------------------------------------------------------------------


def is_local(address: str) -> bool:
    """Whether a Dask address leads to this machine; decided on the resolved address, never on the name."""
    scheme, rest = parse_address(address)
    if scheme in ("inproc", "unix"):
        return True
    host = rest.rpartition(":")[0].strip("[]") or rest
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(map(_is_ours, found))


def _is_ours(host: str | int) -> bool:
    """Whether an address is loopback, or belongs to an interface of this machine (so a socket can be bound)."""
    address = ip_address(str(host).partition("%")[0])
    if address.is_loopback:
        return True
    try:
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return not address.is_unspecified
