"""The thread of a server: its cores see every event here, in order, from calls and streams alike.

The thread waits on a selector, for calls passed on by the task's event loop, for direct streams
(`tfnb.cluster.wire.streams`), for hosted connections, and for the time. A stream whose request is ``post`` becomes the
receiving end of posts between tasks (`tfnb.cluster.wire.posting`), hosted from then on; so the thread serves tasks
without a core, too.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial

from distributed import Security

from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import Answer, CoreTick, Effect, Reply, RequestArrival, Send
from tfnb.cluster.server.cores import Cores
from tfnb.cluster.wire import envelope, streams
from tfnb.cluster.wire.asking import Answers, parts
from tfnb.cluster.wire.encryption import encrypted, encryption
from tfnb.cluster.wire.lending import ServerLoans
from tfnb.cluster.wire.messages import Ok, Refusal, Request, failed
from tfnb.cluster.wire.posting import HostedConnection
from tfnb.cluster.wire.streams import Connection, Keys, StreamBroken, StreamOffer, kept
from tfnb.cluster.wire.transport import read_request, write_outcome
from tfnb.errors import ProtocolError, ResourceExhausted, TfnbError
from tfnb.state.shared_memory import Segment

TICK = 0.5  # seconds between looks at requests that wait inside of the core, and at connections that stall
IDLE = 10.0  # seconds, where nothing waits
UNPROVED = 32  # connections that have not yet proved their key
BACKLOG = 64
ENDS = 10.0  # seconds that the thread may take to end
log = logging.getLogger(__name__)
Receive = Callable[[socket.socket, Request, ServerLoans | None], HostedConnection]  # raises TfnbError
STREAMED = frozenset({"push", "contribute", "pull"})  # methods on a direct stream, also as parts of a batch


class Serving:
    """Cores and their thread. ``carry``: called in the thread with messages for other servers.

    receive: makes the receiving end of a connection of posts, from its socket, its request and the sender's loans.
    """

    def __init__(
        self, cores: Cores, carry: Callable[[Sequence[Send]], None], budget: int = envelope.BUDGET,
        receive: Receive | None = None,
    ) -> None:  # fmt: skip
        self._cores, self._carry, self._budget, self._receive = cores, carry, budget, receive
        self._hosted: dict[HostedConnection, int] = {}  # with their selector events
        self._tickets = itertools.count()
        self._replies: dict[int, Callable[[Answer], None]] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._keys = Keys()
        self._listening = threading.Lock()  # of the next two
        self._listener: socket.socket | None = None  # while a key may be used
        self._offered = 0  # keys on their way to the thread
        self._context: ssl.SSLContext | None = None  # of an encrypted cluster
        self._connections: set[Connection] = set()
        self._lending: set[Connection] = set()  # whose tasks have not copied all loans yet
        self._proof: Segment | None = None  # that tasks of this host can map
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = map(kept, socket.socketpair())
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ, None)
        self._is_over = False
        self._began = 0  # when the cores began with the present events, in nanoseconds
        self._ticked = 0.0
        self._thread = threading.Thread(target=self._run, name="tfnb-server", daemon=True)
        self._thread.start()

    # -- from other threads -----------------------------------------------------------------------------------------

    def ask(self, request: Request, reply: Callable[[Answer], None]) -> None:
        """Let the cores answer a request, or a batch of them; ``reply`` is called in its thread, or never.

        Where something fails, it may be called again: then the first answer counts.
        """
        self._post(lambda: self._asked(request, reply))

    def offer(self, address: str, security: Security) -> StreamOffer:
        """A key for one stream. Raises OSError where the worker at ``address`` cannot listen.

        Called from one thread, the task's event loop.
        """
        host = streams.host_of(address)
        if host is None or not streams.is_on:
            raise OSError(f"no direct streams at {address}")
        with self._listening:
            if self._listener is None:
                self._context = encryption(address, security, listens=True)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listener = kept(socket.create_server((host, 0), family=family, backlog=BACKLOG))
                self._listener.setblocking(False)
                self._post(partial(self._register, self._listener))
            port = self._listener.getsockname()[1]
            self._offered += 1
        offer = StreamOffer(host, port, secrets.token_bytes(8), secrets.token_bytes(32))
        self._post(lambda: self._add(offer))
        return offer

    def host(self, end: HostedConnection) -> None:
        """Serve one end of a connection from now on, until closed."""
        self._hosted.setdefault(end, 0)  # first: a thread that ends drops it
        self._post(partial(self._look, end))
        if not self._thread.is_alive():
            self._drop(end, StreamBroken("the task ends"))

    def look(self, end: HostedConnection) -> None:
        """Register a change of the events that an end waits for."""
        self._post(partial(self._look, end))

    def drop(self, end: HostedConnection, error: Exception) -> None:
        """Close an end, for the reason ``error``."""
        self._post(partial(self._drop, end, error))

    def stop(self) -> threading.Thread:
        """End the thread, and close its sockets; pending callers get no answer. Returns the thread."""
        self._is_over = True
        self._ring()
        return self._thread

    def close(self) -> None:
        """`stop`, and wait for the thread."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(ENDS)

    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.append(work)
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # full: it will be heard; closed: nobody is there
            self._bell.send(b"\0")

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                found = self._selector.select(self._patience())
                if any(key.data is None for key, _ in found):  # before the inbox: who rings after it is heard again
                    self._hear()
                while self._inbox:  # before sockets: a key is here before its connection
                    _logged(self._inbox.popleft())
                for key, events in found:
                    if key.data is not None:
                        _logged(partial(key.data, events))
                _logged(partial(self._keep_time, time.monotonic()))
        finally:
            self._end()

    def _patience(self) -> float:
        is_open = self._listener is not None
        waits = self._cores.waits or is_open or any(one.until is not None for one in self._connections)
        return TICK if waits else IDLE

    def _keep_time(self, now: float) -> None:
        if now - self._ticked < TICK:
            return
        self._ticked = now
        for core in self._cores if self._cores.waits else ():
            try:
                self._carry_out(self._cores.on([(core.shard, CoreTick())], now))
            except BaseException:  # a failed write has poisoned the core, which refuses all requests from now on
                log.exception("a server was told the time")
        for one in [one for one in self._connections if one.until is not None and one.until < now]:
            self._close(one)
        if not self._keys.may_be_used(now):
            self._close_port()

    def _asked(self, request: Request, reply: Callable[[Answer], None]) -> None:
        try:
            self._ask(request, reply, Core.METHODS)
        except Exception as error:
            log.exception("a server was asked for %s", request.method)
            reply(failed(error))

    def _ask(self, request: Request, reply: Callable[[Answer], None], methods: Set[str]) -> None:
        """Let the cores answer a request. ``methods``: accepted methods, also for the parts of a batch."""
        self._lending = {one for one in self._lending if one.loans is not None and not one.loans.has_let_go()}
        if request.method == "batch":
            self._ask_all(request, reply, methods)
        else:
            self._began = time.monotonic_ns()
            self._carry_out(self._cores.on(self._arrived(request, reply, methods), time.monotonic()))

    def _ask_all(self, request: Request, reply: Callable[[Answer], None], methods: Set[str]) -> None:
        try:
            requests = parts(request)
        except ProtocolError as error:
            reply(failed(error))
            return
        answers = Answers(len(requests), reply, self._budget)
        arrived = [
            event
            for place, part in enumerate(requests)
            for event in self._arrived(part, partial(answers.take, place), methods)
        ]  # fmt: skip
        is_traced = any("trace" in part.meta for part in requests)
        for events in [[event] for event in arrived] if is_traced else [arrived]:  # each has its own times
            self._began = time.monotonic_ns()
            self._carry_out(self._cores.on(events, time.monotonic()))
        answers.begun()

    def _arrived(
        self, request: Request, reply: Callable[[Answer], None], methods: Set[str]
    ) -> list[tuple[int, RequestArrival]]:
        """The event of a request for a shard; the shard need not be named if there is only one."""
        shard = request.meta.get("shard", self._cores.only)
        if request.method not in methods:
            reply(Refusal("protocol", f"no {request.method[:40]!r} on this way to a shard"))
            return []
        if not isinstance(shard, int) or shard not in self._cores:
            here = ", ".join(str(core.shard) for core in self._cores)
            reply(Refusal("protocol", f"{request.method!r} names shard {str(shard)[:40]}; here are {here}"))
            return []
        ticket = next(self._tickets)
        self._replies[ticket] = partial(self._timed, reply) if "trace" in request.meta else reply
        return [(shard, RequestArrival(ticket, request))]

    def _timed(self, reply: Callable[[Answer], None], answer: Answer) -> None:
        """Reply to a call of a traced step, with the times of its begin and end. Such a call does not wait inside."""
        if isinstance(answer, Ok):
            answer = replace(answer, meta={**answer.meta, "at": [self._began, time.monotonic_ns()]})
        reply(answer)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self._reply(effect.ticket, effect.answer)
        if sends := [effect for effect in effects if isinstance(effect, Send)]:
            self._carry(sends)

    def _reply(self, ticket: int, answer: Answer) -> None:
        reply = self._replies.pop(ticket, None)
        if reply is not None:
            _logged(partial(reply, answer))

    # -- streams ----------------------------------------------------------------------------------------------------

    def _register(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _add(self, offer: StreamOffer) -> None:
        with self._listening:
            self._offered -= 1
        self._keys.add(offer, time.monotonic())

    def _close_port(self, *, is_full: bool = False) -> None:
        """Stop listening until the next key is given out; connections stay. is_full: no more files can be opened."""
        with self._listening:
            if self._listener is None or (self._offered and not is_full):
                return
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            self._ear.recv(4096)

    def _accept(self, events: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it went away again
        except OSError:  # no more files can be open: connections stay, and no new one is accepted
            self._close_port(is_full=True)
            return
        unproved = [one for one in self._connections if not one.is_proved]
        if len(unproved) >= UNPROVED:  # the oldest one had its time: a task proves its key at once
            self._close(min(unproved, key=lambda one: one.until or 0.0))
        try:
            sock = encrypted(sock, self._context, listens=True)
            one = Connection(sock, self._keys, self._afford, time.monotonic())
        except OSError:  # it went away again
            sock.close()
            return
        self._connections.add(one)
        self._selector.register(one.socket, selectors.EVENT_READ, partial(self._serve, one))
        self._serve(one, selectors.EVENT_READ)

    def _afford(self, nbytes: int) -> None:
        """Raise ResourceExhausted for a message larger than any push, or without room beside other incoming ones."""
        most = self._cores.largest_push if nbytes > envelope.HEADER_CAP else None  # that takes a look at each Variable
        if most is not None:
            streams.within(nbytes, 0, most)
        streams.within(nbytes, sum(one.filling for one in self._connections), self._budget)

    def _serve(self, one: Connection, events: int) -> None:
        if one not in self._connections:
            return  # closed by an event before this one
        try:
            if events & selectors.EVENT_WRITE:
                one.write()
                self._watch(one)
            if events & selectors.EVENT_READ:
                message = one.read(time.monotonic())
                if message is not None:
                    self._request(one, message)
        except (OSError, StreamBroken, ProtocolError, ResourceExhausted, MemoryError):
            self._close(one)  # its caller goes on by Dask's connections
        except Exception:
            log.exception("a direct stream")
            self._close(one)

    def _request(self, one: Connection, message: Sequence[envelope.Buffer]) -> None:
        if one.is_asked:
            raise StreamBroken("a request before the answer to the last one")
        one.is_asked = True
        try:
            request = read_request(message, self._budget, one.loans.borrowing() if one.loans is not None else None)
        except TfnbError as error:
            self._answer(one, failed(error))
            return
        if request.method == "share":
            loans, answer = self._share(str(request.meta.get("memory")))
            self._answer(one, answer)
            one.loans = loans
            return
        if request.method == "post":
            self._turn(one, request)
            return
        self._ask(request, lambda answer: self._answer(one, answer), STREAMED)

    def _turn(self, one: Connection, request: Request) -> None:
        """Turn a stream into the receiving end of posts; the sender awaits the answer before its first post."""
        if self._receive is None:
            self._answer(one, Refusal("protocol", "no posts on this way"))
            return
        name = str(request.meta.get("memory") or "")
        loans, answer = self._share(name) if name else (None, Ok())
        try:
            end = self._receive(one.socket, request, loans)
        except TfnbError as error:
            self._answer(one, failed(error))
            return
        self._answer(one, answer if isinstance(answer, Ok) else Ok({"memory": ""}))
        if one.has_more_to_send:
            self._close(one)
        if one not in self._connections:
            end.over(StreamBroken("its sender went away"))
            return
        self._connections.discard(one)
        self._selector.unregister(one.socket)
        self._hosted[end] = 0
        self._look(end)

    # -- hosted connections -----------------------------------------------------------------------------------------

    def _look(self, end: HostedConnection) -> None:
        """Register the events that an end waits for with the selector."""
        before = self._hosted.get(end)
        if before is None:
            return
        try:
            events = end.events()
            if events == before:
                return
            self._hosted[end] = events
            if not before:
                self._selector.register(end.sock, events, partial(self._ready, end))
            elif not events:
                self._selector.unregister(end.sock)
            else:
                self._selector.modify(end.sock, events, partial(self._ready, end))
        except (OSError, ValueError) as error:
            self._drop(end, error)

    def _ready(self, end: HostedConnection, events: int) -> None:
        if end not in self._hosted:
            return  # closed by an event before this one
        try:
            end.ready(events)
            self._look(end)
        except (OSError, StreamBroken, ProtocolError, ResourceExhausted, MemoryError) as error:
            self._drop(end, error)
        except Exception as error:
            log.exception("posts between tasks")
            self._drop(end, error)

    def _drop(self, end: HostedConnection, error: Exception) -> None:
        if end in self._hosted:
            del self._hosted[end]
            with suppress(KeyError, ValueError):  # it waits for nothing
                self._selector.unregister(end.sock)
        end.over(error)

    def _share(self, name: str) -> tuple[ServerLoans | None, Answer]:
        """Loans to a task, from the next answer on, and a segment of this process that the task maps as a proof."""
        try:
            self._proof = self._proof or Segment(envelope.ALIGN)
            return ServerLoans(name), Ok({"memory": self._proof.name})
        except OSError as error:
            return None, Refusal("protocol", f"no shared memory: {error}")

    def _answer(self, one: Connection, answer: Answer) -> None:
        if one not in self._connections:
            return
        one.is_asked = False
        try:
            try:
                message = write_outcome(answer, self._budget, one.loans.lend if one.loans is not None else None)
            except TfnbError as error:
                message = write_outcome(failed(error), self._budget)
            if one.loans is not None:
                one.loans.sent()
                self._lending.add(one)
            one.send(streams.framed(message), time.monotonic())
            self._watch(one)
        except OSError:
            self._close(one)
        except Exception:
            log.exception("an answer on a direct stream")
            self._close(one)

    def _watch(self, one: Connection) -> None:
        """Wait until the other end reads, as long as buffers are left to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.has_more_to_send else 0)
        if self._selector.get_key(one.socket).events != events:
            self._selector.modify(one.socket, events, partial(self._serve, one))

    def _close(self, one: Connection) -> None:
        if one in self._connections:
            self._connections.discard(one)
            self._selector.unregister(one.socket)
            one.close()

    def _end(self) -> None:
        for one in list(self._connections):
            self._close(one)
        for end in list(self._hosted):
            _logged(partial(self._drop, end, StreamBroken("the task ends")))
        self._selector.close()
        for sock in (self._listener, self._bell, self._ear):
            if sock is not None:
                sock.close()


def _logged(work: Callable[[], None]) -> None:
    """Call ``work``; an exception is logged, and the thread goes on."""
    try:
        work()
    except Exception:
        log.exception("the thread of a server")
