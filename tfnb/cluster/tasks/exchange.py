"""Values exchanged by the parts of a step, each on a task of its own.

An `Exchange` owns the `tfnb.cluster.tasks.meeting` of its task and the connections to others. The first value for a
task opens a connection of posts to it (`tfnb.cluster.wire.posting`), hosted by the thread of
`tfnb.cluster.server.serving`; values wait until it is there. Where none can be had (``TFNB_STREAMS=off``, workers
without sockets), the same bytes travel as calls of Dask's connections, ``deliver``, one at a time for each task.

A connection that breaks aborts the rounds of the task at its other end: posts may be missing, and no round goes on with
another lane. Over ``deliver`` only the sender notices that a task is gone; the notebook tells the receiver.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from socket import socket
from typing import Any

import torch
from distributed import Security

from tfnb.cluster.server.serving import Serving
from tfnb.cluster.tasks import meeting
from tfnb.cluster.tasks.meeting import Effect, Event, Meeting
from tfnb.cluster.tasks.step_notes import Arrivals
from tfnb.cluster.tasks.waiting_reads import WaitingReader
from tfnb.cluster.wire import envelope, streams
from tfnb.cluster.wire.encryption import encryption
from tfnb.cluster.wire.lending import ServerLoans
from tfnb.cluster.wire.messages import Dead, Failure, Ok, Peer, Refusal, Request, Tag
from tfnb.cluster.wire.posting import HostedConnection, Post, PostReader, Receiver, Sender
from tfnb.cluster.wire.streams import AGAIN, Stream, StreamBroken, StreamOffer
from tfnb.cluster.wire.transport import Link
from tfnb.errors import ProtocolError, StepAborted, TfnbError, Unavailable
from tfnb.execution.dataflow.executor import WaitingPeers
from tfnb.state.waits import Inbox

MOST = 64 << 20  # bytes of one call of ``deliver``, but for a single value that is larger
LOOK = 0.05  # seconds between looks whether a paused caller may go on
LEFT = 8  # keys of values left over that are named
WAITS = 4  # of a round, until its thread reads the connections itself: taking them over costs a turn of another thread
log = logging.getLogger(__name__)


class Exchange:
    """The exchange of one task. ``traffic``: bytes of tensors sent so far, by the address of the other task's worker.

    name, incarnation: of the task; serve: its thread, made where there is none yet, in the event loop; epoch: the one
    that it is at now.
    """

    def __init__(
        self, name: str, incarnation: int, link: Link, loop: asyncio.AbstractEventLoop, security: Security,
        serve: Callable[[], Serving], epoch: Callable[[], int],
    ) -> None:  # fmt: skip
        self.name, self.incarnation = name, incarnation
        self.traffic = Counter[str]()
        self._link, self._loop, self._security, self._serve, self._epoch = link, loop, security, serve, epoch
        self._meeting = Meeting()
        self._lock = threading.Lock()  # of the meeting, and of the next three
        self._failed: dict[int, Callable[[TfnbError], None]] = {}  # of rounds that began and have not failed
        self._lanes: dict[Peer, _TaskLane] = {}
        self._receivers: dict[Receiver, int] = {}  # and the incarnation of who sends
        self._reader: WaitingReader | None = None  # of the step that reads the connections itself
        self._tasks: set[asyncio.Task[None]] = set()
        self.arrivals: Arrivals | None = None  # round, edge, tag and time of values, while a step is traced
        self.serving: Serving | None = None  # that hosts its connections
        self._is_over = False

    # -- the task's side --------------------------------------------------------------------------------------------

    def begin(self, round: int, parts: Mapping[int, Peer], failed: Callable[[TfnbError], None]) -> WaitingPeers:
        """Begin a round. ``parts``: the task of each part, this one included.

        failed: called at most once, from any thread, with the first cause when the round is aborted: a connection that
        broke, a key that was used twice, `abort`.
        """
        others = {peer for peer in parts.values() if peer.incarnation != self.incarnation}
        with self._lock:
            self._failed[round] = failed
            if self._reader is not None:
                self._reader.wake()  # it is not alone any more
            calling = [lane for peer in others if (lane := self._lanes.get(peer)) is not None and lane.may_open()]
        for lane in calling:
            self._soon(self._open, lane)
        self._on(meeting.Begin(round, frozenset(peer.incarnation for peer in parts.values())))
        return _RoundPeers(self, round, parts)

    def end(self, round: int, error: BaseException | None = None) -> None:
        """The part of this task has ended: values that still arrive for the round are dropped."""
        with self._lock:
            self._failed.pop(round, None)
        self._on(meeting.PartEnd(round, error is not None))

    def take(self, reader: WaitingReader | None) -> WaitingReader | None:
        """The reader with all connections, for a step that waits; None where other rounds need the connections, too.

        reader: the one that the step had before.
        """
        with self._lock:
            serving = self.serving
            is_alone = len(self._failed) == 1 and not self._meeting.paused
            if is_alone and serving is not None and reader is None and self._reader is None:
                reader = self._reader = WaitingReader(serving.look, serving.drop)
            receivers = list(self._receivers)
        if reader is not None and is_alone:
            reader.take(receivers)
            return reader
        self.leave(reader)
        return None

    def leave(self, reader: WaitingReader | None) -> None:
        """Let the hosting thread read again."""
        if reader is not None:
            with self._lock:
                self._reader = None
            reader.close()

    def abort(self, round: int, floor: int, cause: TfnbError) -> None:
        """Give up a round, and all rounds up to ``floor``."""
        self._on(meeting.Abort(round, floor, cause))

    def close(self) -> None:
        """Abort all rounds, and close all connections. From any thread."""
        with self._lock:
            self._is_over = True
            lanes, self._lanes = list(self._lanes.values()), {}
            receivers, rounds = list(self._receivers), self._meeting.rounds
        cause = StepAborted(f"{self.name} ends")
        for number in rounds:
            self._on(meeting.Abort(number, 0, cause))
        ends: list[HostedConnection] = [*(lane.sender for lane in lanes), *receivers]
        for end in ends:
            if self.serving is not None:
                self.serving.drop(end, StreamBroken("the task ends"))
            else:  # it is not hosted
                end.over(StreamBroken("the task ends"))
        self._soon(self._cancel)

    @property
    def facts(self) -> dict[str, int]:
        """Counts of held values, early bytes, rounds, connections and loans, and of dropped messages by reason."""
        with self._lock:
            lent = sum(not lane.sender.has_let_go for lane in self._lanes.values())
            open_lanes = sum(lane.sender.is_open for lane in self._lanes.values())
            rounds = len(self._meeting.rounds) + len(self._failed)
            here = self._meeting
            found = {"held": here.held, "early": here.early, "rounds": rounds, "senders": open_lanes, "lent": lent}
            return {**found, "receivers": len(self._receivers), **here.counts}

    # -- the machine ------------------------------------------------------------------------------------------------

    def _on(self, *events: Event) -> None:
        """Tell the meeting, and carry out its effects outside of the lock, so that callbacks may tell and want more."""
        now = time.monotonic()
        effects: list[Effect] = []
        failures: list[tuple[Callable[[TfnbError], None], TfnbError]] = []
        with self._lock:
            for event in events:
                effects += self._meeting.on(event, now)
            for effect in effects:
                if type(effect) is meeting.Fail and (failed := self._failed.pop(effect.round, None)) is not None:
                    failures.append((failed, effect.cause))
        for effect in effects:
            if type(effect) is meeting.Deliver:
                try:
                    effect.receive(effect.value, effect.dead)
                except Exception:
                    log.exception("a value from another task")
            else:
                self._do(effect)
        for failed, cause in failures:
            failed(cause)

    def _do(self, effect: Effect) -> None:
        """Carry out a rare effect: a pause, its end, or a warning of leftover values."""
        match effect:
            case meeting.PauseReading(sender):
                self._settle(sender)
                self._soon(self._loop.call_later, meeting.PATIENCE + LOOK, self._on, meeting.MeetingTick())
            case meeting.ResumeReading(sender):
                self._settle(sender)
            case meeting.Leftover(number, keys):
                named = ", ".join(f"edge {edge} tag {tag}" for edge, tag in keys[:LEFT])
                log.warning("%s: round %d left %d values over: %s", self.name, number, len(keys), named)

    def _settle(self, sender: int) -> None:
        """Read the connections of a sender, or pause them, as the meeting says now."""
        with self._lock:
            is_paused = sender in self._meeting.paused
            mine = [receiver for receiver, other in self._receivers.items() if other == sender]
            for receiver in mine:
                receiver.is_paused = is_paused
        for receiver in mine:
            if self.serving is not None:
                self.serving.look(receiver)

    def _came(self, sender: int, posts: Sequence[Post]) -> None:
        """Posts of a task, in the thread that read them."""
        if (arrivals := self.arrivals) is not None:
            now = time.monotonic_ns()
            arrivals.extend((post.round, post.edge, post.tag, now) for post in posts)
        self._on(*(meeting.MessageArrival(p.round, p.edge, p.tag, p.value, p.dead, sender, p.nbytes) for p in posts))

    def _lost(self, peer: int, other: str, error: Exception) -> None:
        text = f"the connection between {self.name} and {other} broke: {error}"
        self._on(meeting.ConnectionLoss(peer, Unavailable(text, task=self.name, peers=(other,))))

    # -- who sends here ---------------------------------------------------------------------------------------------

    def receive(self, sock: socket, request: Request, loans: ServerLoans | None) -> Receiver:
        """The receiving end of a connection, for its hosting thread. Raises TfnbError."""
        sender, other = _sender(request)
        if request.incarnation != self.incarnation or self._is_over:
            raise Unavailable(f"{self.name} is not the task that {other} means, or ends")

        def lost(error: Exception) -> None:
            with self._lock:
                self._receivers.pop(receiver, None)
            self._lost(sender, other, error)

        receiver = Receiver(sock, loans, partial(self._came, sender), lost)
        with self._lock:
            self._receivers[receiver] = sender
            receiver.is_paused = sender in self._meeting.paused
        return receiver

    async def deliver(self, request: Request) -> Ok | Failure | Refusal:
        """Posts that come as a call; answered when more of them may come."""
        sender, _ = _sender(request)
        if len(request.tensors) != 1:
            raise ProtocolError("posts travel as one tensor")
        reader = PostReader()
        posts = reader.feed(request.tensors[0].numpy().data)
        if not reader.is_between:
            raise ProtocolError("not a post of tfnb: it ends in the middle")
        self._came(sender, posts)
        while sender in self._meeting.paused:
            await asyncio.sleep(LOOK)
        return Ok()

    # -- to whom this task sends ------------------------------------------------------------------------------------

    def lane(self, peer: Peer) -> _TaskLane:
        """The way to a task; a new one is opened meanwhile."""
        with self._lock:
            found = self._lanes.get(peer)
            if found is not None and not found.sender.is_over:
                return found
            if self._is_over:
                raise StepAborted(f"{self.name} ends")
            lane = _TaskLane(peer, Sender(partial(self._left, peer)))
            self._lanes[peer] = lane
        self._soon(self._open, lane)
        return lane

    def send(self, lane: _TaskLane, post: Post) -> None:
        """Send a message by this lane."""
        if isinstance(post.value, torch.Tensor):
            self.traffic[lane.peer.addr] += envelope.size([post.value])
        try:
            if not lane.sender.post(post.round, post.edge, post.tag, post.value, post.dead):
                return
        except StreamBroken as error:
            self._lost(lane.peer.incarnation, lane.peer.addr, error)
            return
        if lane.sender.is_open and self.serving is not None:
            self.serving.look(lane.sender)
        elif lane.calls:
            self._soon(self._call, lane)

    def keep(self, post: Post) -> None:
        """Deliver a message to this task's own part: the value itself, not a copy, so no part may write into its
        memory.
        """
        self._came(self.incarnation, [post])

    def _left(self, peer: Peer, error: Exception) -> None:
        """A lane is over; the next value for this task opens another one."""
        with self._lock:
            lane = self._lanes.get(peer)
            if lane is not None and lane.sender.is_over:
                del self._lanes[peer]
        self._lost(peer.incarnation, peer.addr, error)

    def _soon(self, function: Callable[..., Any], *args: object) -> None:
        with suppress(RuntimeError):  # the worker ends
            self._loop.call_soon_threadsafe(function, *args)

    # -- in the event loop ------------------------------------------------------------------------------------------

    def _begun(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _open(self, lane: _TaskLane) -> None:
        if not lane.is_opening and not lane.sender.is_open:
            lane.is_opening = True
            self._begun(self._opened(lane))

    async def _opened(self, lane: _TaskLane) -> None:
        """Open a connection for a lane. On failure the lane sends by calls, and a later round tries again."""
        try:
            found = await self._connected(lane.peer)
        except (OSError, StreamBroken, TfnbError, KeyError, ValueError, RuntimeError) as error:
            log.debug("%s: no connection to %s: %s", self.name, lane.peer.addr, error)
            found = None
        finally:
            lane.is_opening = False
        if found is not None and not self._is_over and not lane.sender.is_over:
            lane.sender.connect(*found)
            self.serving = self._serve()
            self.serving.host(lane.sender)
            lane.calls = False
        elif found is not None:
            found[0].close()
        else:
            lane.calls, lane.not_before = True, time.monotonic() + AGAIN
            self._link.confirm(lane.peer.addr)  # its notebook says that it is alive
            self._call(lane)

    async def _connected(self, peer: Peer) -> tuple[socket, Any] | None:
        if not streams.is_on or streams.host_of(peer.addr) is None:
            return None
        self._link.confirm(peer.addr)
        answer = await self._link.call(peer, "stream", epoch=self._epoch())
        if not isinstance(answer, Ok):
            return None
        meta = answer.meta
        offer = StreamOffer(
            str(meta["host"]), int(meta["port"]), bytes.fromhex(meta["name"]), bytes.fromhex(meta["key"])
        )
        context = encryption(peer.addr, self._security, listens=False)

        def connected() -> tuple[socket, Any]:
            stream = Stream.connect(offer, self._link.budget, context)
            try:
                return stream.turn(peer, self._link.op(), self._about, epoch=self._epoch())
            except BaseException:
                stream.end()
                raise

        return await asyncio.to_thread(connected)

    @property
    def _about(self) -> dict[str, Any]:
        return {"sender": self.incarnation, "task": self.name}

    def _call(self, lane: _TaskLane) -> None:
        if lane.calls and not lane.is_calling:
            lane.is_calling = True
            self._begun(self._calling(lane))

    async def _calling(self, lane: _TaskLane) -> None:
        """Send a lane's pending messages by calls, one after the other."""
        try:
            while lane.calls and (data := lane.sender.take(MOST)):
                tensor = envelope.tensor_of(data, torch.uint8, (len(data),))
                outcome = await self._link.call(lane.peer, "deliver", self._about, [tensor], epoch=self._epoch())
                if not isinstance(outcome, Ok):
                    lane.sender.over(StreamBroken(f"{type(outcome).__name__} {getattr(outcome, 'message', '')}"))
        except TfnbError as error:  # it cannot be sent
            lane.sender.over(error)
        finally:
            lane.is_calling = False


class _TaskLane:
    """The way to one task: a connection, or calls of Dask's where ``calls``; ``not_before``: when to connect again."""

    def __init__(self, peer: Peer, sender: Sender) -> None:
        self.peer, self.sender = peer, sender
        self.calls = self.is_opening = self.is_calling = False
        self.not_before = 0.0

    def may_open(self) -> bool:
        """Whether a lane that calls tries again to connect."""
        return self.calls and streams.is_on and time.monotonic() >= self.not_before


class _RoundPeers:
    """`WaitingPeers` of one round.

    A value is captured when it is told; a value with a shape is a tensor, or a meta tensor, of which dtype and sizes
    travel. Raises InvalidArgument or UnsupportedDtype for values that cannot travel. In an aborted round no more values
    are delivered, except one that was under way.
    """

    def __init__(self, exchange: Exchange, number: int, parts: Mapping[int, Peer]) -> None:
        self._exchange, self.round, self._parts = exchange, number, parts
        self._lanes: dict[int, _TaskLane] = {}
        self._waits = 0
        self._reader: WaitingReader | None = None

    def tell(self, edge: int, to: int, tag: Tag, value: Any, dead: Dead | None) -> None:
        post = Post(self.round, edge, tag, value, dead)
        lane = self._lanes.get(to)
        if lane is None:
            peer = self._parts[to]
            if peer.incarnation == self._exchange.incarnation:
                self._exchange.keep(post)
                return
            lane = self._lanes[to] = self._exchange.lane(peer)
        self._exchange.send(lane, post)

    def want(self, edge: int, tag: Tag, deliver: Callable[[Any, Dead | None], None]) -> None:
        self._exchange._on(meeting.Want(self.round, edge, tag, deliver))

    def wait(self, inbox: Inbox, seconds: float) -> Any:
        self._waits += 1
        if self._waits > WAITS and (reader := self._exchange.take(self._reader)) is not None:
            self._reader = reader
            reader.read(inbox, seconds)
            return inbox.get_nowait()
        self._reader = None
        return inbox.get(timeout=seconds)

    def leave(self) -> None:
        self._exchange.leave(self._reader)


def _sender(request: Request) -> tuple[int, str]:
    """Incarnation and name of the sender of posts."""
    try:
        return int(request.meta["sender"]), str(request.meta["task"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"who sends posts says who it is: {error}") from error
