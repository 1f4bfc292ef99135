"""Queues on servers, as seen by a process that uses them: the notebook, or a task.

A `RemoteQueue` stands where a queue's machine would stand here, and takes the same attempts. A `QueueChannel` carries
them to one server: acts go in order, one post at a time, and ends come back with its answer, or with the answer of one
long call. No thread waits. Where asking is no longer possible, all attempts end with the error that says why.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from tfnb.cluster.queues.journal import Journal
from tfnb.cluster.server.objects import BYTES, ENTRIES, write_queue
from tfnb.cluster.wire.envelope import size
from tfnb.cluster.wire.messages import Failure, Ok, raised
from tfnb.errors import Cancelled, OutOfRange, ParameterServerLost, StepAborted, TfnbError, Unavailable
from tfnb.graph.queue import Queue
from tfnb.state.orders import Element, packed, unpacked
from tfnb.state.queue_contents import QueueSnapshot
from tfnb.state.queue_machine import Attempt, Level, QueueHost, QueueMachine
from tfnb.state.queue_operations import made

OTHERS = "a step or call elsewhere on the cluster, if there is one"
ACK = 0.005  # seconds that an acknowledgement waits for another message to go with
CONFIRM = 20.0  # seconds that a server has to take attempts back, or to send a queue home
ATTRS = frozenset({"count", "many", "part", "up_to", "required", "cancel_pending_enqueues", "begun", "step"})
"""Attributes of a node that its server needs."""

Ask = Callable[[str, Mapping[str, Any], Sequence[torch.Tensor]], Awaitable[Ok]]
_round: ContextVar[int | None] = ContextVar("round", default=None)


@contextmanager
def in_round(number: int) -> Iterator[None]:
    """Assign this thread's queue operations to a round, kept or aborted by the notebook."""
    token = _round.set(number)
    try:
        yield
    finally:
        _round.reset(token)


@dataclass(eq=False, slots=True)
class Act:
    """One command to a server's queues. then: called in the event loop with the outcome."""

    verb: str
    key: str
    facts: Mapping[str, Any]
    tensors: Sequence[torch.Tensor]
    then: Callable[[Mapping[str, Any], Sequence[torch.Tensor]], None]
    queue: RemoteQueue | None = None
    attempt: Attempt | None = None
    number: int = -1


class QueueChannel:
    """The channel of one process to the queues of one server. ask: calls the server; raises TfnbError."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Ask) -> None:
        self.loop, self.ask = loop, ask
        self.broken: TfnbError | None = None
        self.queues: dict[str, RemoteQueue] = {}
        self.lock = threading.RLock()  # the collector may drop a queue while this thread holds it
        self._numbers, self._posts = itertools.count(), itertools.count()
        self._outbox: deque[Act] = deque()
        self.open: dict[int, Act] = {}  # in the order of their numbers
        self._got = self._said = 0  # serials of ends: received, and told that they were
        self.ending = -1  # the number of the act whose end was received last
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbered: dict[Attempt, int] = {}
        self._posting = self._listening = self._is_ack_due = False
        self.id = uuid.uuid4().hex

    def act(
        self, verb: str, key: str, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor] = (), *,
        then: Callable[[Mapping[str, Any], Sequence[torch.Tensor]], None] = lambda about, tensors: None,
        queue: RemoteQueue | None = None, attempt: Attempt | None = None,
    ) -> Act:  # fmt: skip
        """Send a command to the server, behind all earlier ones."""
        made = Act(verb, key, facts, tensors, then, queue, attempt)
        with self.lock:
            made.number = next(self._numbers)
            self.open[made.number] = made
            if attempt is not None:
                self._numbered[attempt] = made.number
            self._outbox.append(made)
        self._wake(self._begin_posting)
        return made

    async def done(self, verb: str, key: str, facts: Mapping[str, Any], seconds: float) -> None:
        """`act`, and wait for its end; raises its error. In the event loop."""
        ended: asyncio.Future[Mapping[str, Any]] = self.loop.create_future()
        self.act(verb, key, facts, then=lambda about, _: None if ended.done() else ended.set_result(about))
        about = await asyncio.wait_for(ended, seconds)
        if "error" in about:
            raise _error(about["error"])

    @property
    def got(self) -> int:
        """The serial of the end that was received last."""
        return self._got

    def number_of(self, attempt: Attempt | None) -> int | None:
        """The number of an attempt that is not over."""
        return None if attempt is None else self._numbered.get(attempt)

    def close(self, why: TfnbError) -> None:
        """Close the channel; open acts end with ``why``. In the event loop."""
        for task in list(self._tasks):
            task.cancel()
        self._break(why)

    # -- in the event loop --------------------------------------------------------------------------------------

    def _wake(self, function: Callable[[], None]) -> None:
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # it is closed, and the cluster with it
            self._break(Unavailable("the cluster is gone"))

    def _begin_posting(self) -> None:
        if not self._posting and self.broken is None:
            self._posting = True
            self._begin(self._post_all())
        elif self.broken is not None:
            self._break(self.broken)

    def _begin(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post_all(self) -> None:
        try:
            while self._outbox or self._is_ack_due:
                acts, tensors = self._batch()
                got, self._is_ack_due = self._got, False
                about = {"channel": self.id, "number": next(self._posts), "got": got, "acts": acts}
                answer = await self.ask("post", about, tensors)
                self._said = max(self._said, got)
                self._take(answer)
        except TfnbError as error:
            self._break(error)
        finally:
            self._posting = False
        if self._got > self._said:
            self.loop.call_later(ACK, self._acknowledge)
        if self.open and not self._listening:
            self._listening = True
            self._begin(self._listen())

    async def _listen(self) -> None:
        """Await the ends of waiting acts, by one long call after the other."""
        try:
            while self.open and self.broken is None:
                got = self._got
                answer = await self.ask("ends", {"channel": self.id, "got": got}, ())
                self._said = max(self._said, got)
                self._take(answer)
        except TfnbError as error:
            self._break(error)
        finally:
            self._listening = False

    def _batch(self) -> tuple[list[list[Any]], list[torch.Tensor]]:
        """Acts of one message. An act with too many tensors is split over messages, all but the last as ``hold``."""
        acts: list[list[Any]] = []
        tensors: list[torch.Tensor] = []
        with self.lock:
            while self._outbox and len(acts) < ENTRIES:
                act = self._outbox[0]
                if acts and (len(tensors) + len(act.tensors) > ENTRIES or size([*tensors, *act.tensors]) > BYTES):
                    break
                if len(act.tensors) > ENTRIES:
                    some, act.tensors = act.tensors[:ENTRIES], act.tensors[ENTRIES:]
                    return [["hold", act.number, act.key, {}, len(some)]], list(some)
                self._outbox.popleft()
                acts.append([act.verb, act.number, act.key, act.facts, len(act.tensors)])
                tensors += act.tensors
        return acts, tensors

    def _take(self, answer: Ok) -> None:
        """Process the new ends of an answer, in order of their serials."""
        for key, level in answer.meta["levels"].items():
            if key in self.queues:
                self.queues[key].heard(level)
        left = iter(answer.tensors)
        for serial, number, about, count in answer.meta["ends"]:
            tensors = [next(left) for _ in range(count)]
            if serial <= self._got:
                continue
            self._got, self.ending = serial, number
            with self.lock:
                act = self.open.pop(number, None)
                if act is not None and act.attempt is not None:
                    self._numbered.pop(act.attempt, None)
            if act is not None:
                act.then(about, tensors)
        if self._got > self._said and not self._posting:
            self.loop.call_later(ACK, self._acknowledge)

    def _acknowledge(self) -> None:
        """Acknowledge received ends, unless another message did."""
        if self._got > self._said and not self._posting:
            self._is_ack_due = True
            self._begin_posting()

    def _break(self, error: TfnbError) -> None:
        """End all open acts with ``error``: the server answers no more."""
        self.broken = self.broken or error
        with self.lock:
            acts, self.open, self._numbered = list(self.open.values()), {}, {}
            self._outbox.clear()
        failure = {"error": {"tag": type(error).__name__, "message": error.message, "details": {}}}
        for act in acts:
            act.then(failure, ())


@dataclass(eq=False)
class RemoteQueue:
    """A queue that lives on a server, with the interface of a local queue's machine."""

    channel: QueueChannel
    key: str
    name: str
    capacity: float
    level: Level
    starters: list[Callable[[], None]] = field(default_factory=list)
    cause: BaseException | None = None
    used: float | None = None
    heir: QueueHost | None = None  # where it went
    is_dropped: bool = False  # its server has dropped the queue
    is_lost: bool = False  # with its contents
    past: Mapping[str, set[str]] = field(default_factory=lambda: defaultdict(lambda: {OTHERS}))
    others: str = OTHERS
    earlier: Mapping[str, set[str]] = field(default_factory=dict)  # the same, before it went there
    journal: Journal = field(default_factory=Journal)  # of this process, while a training may need it
    _is_made: bool = False  # the server said so
    _coming: list[tuple[Attempt, Attempt | None]] | None = None  # attempts that wait while the queue moves home
    _known: tuple[QueueSnapshot | None, Sequence[tuple[Attempt, int, bool]]] = None, ()
    """Contents restored after the loss of the server; of each attempt the elements put so far, and whether over."""
    _back: list[tuple[Sequence[Element], threading.Event]] = field(default_factory=list)  # elements to return at home

    @property
    def nbytes(self) -> int:
        """Bytes held here: none."""
        return 0

    def heard(self, level: Sequence[Any]) -> None:
        """Take over the server's report of the queue's level: size, capacity, and whether closed."""
        size, capacity, *others = level
        self.level = Level(size, float("inf") if capacity is None else capacity, *others)

    def holds(self, found: Mapping[str, Any]) -> None:
        """Note restored contents, so that producers may go on before the server's next report."""
        self.journal.forget()
        self.cause, self.level = None, self.level._replace(size=found["size"], closed=found["closed"])

    def first(self, count: int = 1) -> list[Element]:
        """Up to ``count`` next elements, without dequeuing them."""
        if self.heir is None:
            try:
                self.ensure_made()
                answer = self._now(self.channel.ask("first", {"key": self.key, "count": count}, ()))
                return unpacked(answer.meta, answer.tensors)
            except TfnbError:
                if self.heir is None:  # else it has gone home meanwhile
                    raise
        return self.heir.first(count)

    def ensure_made(self) -> None:
        """Wait until the server has the queue: tasks and questions go beside the act that makes it, and must not
        overtake it. Raises Unavailable after `CONFIRM` seconds, and the error of the channel for a lost server.
        """
        if self._is_made or self.heir is not None:
            return
        try:
            self._now(self.channel.done("withdraw", "", {"numbers": []}, CONFIRM))  # behind all earlier ones
        except TimeoutError as error:
            raise Unavailable(f"queue {self.name} was not made by its server within {CONFIRM:g} s") from error

    def _now(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.channel.loop).result(CONFIRM)

    def submit(self, attempt: Attempt, after: Attempt | None = None) -> None:
        """Submit an attempt to the server, or to the queue's new machine after a move."""
        if attempt.kind != "size":
            self.used = time.time()
        with self.channel.lock:
            heir = self.heir
            if heir is None and self._coming is not None:
                self._coming.append((attempt, after))
                return
        if heir is not None:
            attempt.machine = heir
            heir.submit(attempt, after)
            return
        attempt.machine, attempt.is_placed = self, True
        self._ask_for(attempt, after)

    def _ask_for(self, attempt: Attempt, after: Attempt | None) -> None:
        attrs, tensors = attempt.call
        tensors = [tensor[attempt.enqueued :] for tensor in tensors] if attrs.get("many") else tensors
        facts: dict[str, Any] = {
            "kind": attempt.kind, "attrs": {name: value for name, value in attrs.items() if name in ATTRS},
            "what": attempt.what or "a call",
        }  # fmt: skip
        if (before := self.channel.number_of(after)) is not None:
            facts["after"] = before
        if (number := _round.get()) is not None:
            facts["round"] = number
        if attempt.mark is not None:
            facts["mark"] = list(attempt.mark)
        base = attempt.enqueued
        self.channel.act(
            "do", self.key, facts, tensors, queue=self, attempt=attempt,
            then=lambda about, found: self._ended(attempt, base, about, found),
        )  # fmt: skip
        if attempt.kind == "dequeue" and self.starters:
            for start in tuple(self.starters):
                start()

    def _ended(self, attempt: Attempt, base: int, about: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        if attempt.is_over:
            return
        attempt.enqueued = base + int(about.get("enqueued", 0))
        if "error" in about:
            if self._coming is not None and about["error"]["tag"] in _GOES_HOME:
                if attempt.enqueued > base:
                    self.journal.add(self.channel.got, self.channel.ending, attempt, base, ())
                return  # with the queue, see `come_home` and `lose`
            attempt.error = _error(about["error"])
            if isinstance(attempt.error, ParameterServerLost):
                attempt.error.message = self._gone(attempt, attempt.error)
            attempt.error.enqueued = attempt.enqueued
            if isinstance(attempt.error, OutOfRange):
                attempt.error.__cause__ = self.cause
        self.journal.add(self.channel.got, self.channel.ending, attempt, base, tensors)
        attempt.outputs, attempt.is_over = tuple(tensors), True
        attempt.tell()

    def _gone(self, attempt: Attempt, why: BaseException) -> str:
        """The text for an attempt whose queue is lost with its server."""
        held = f"{attempt.act}: its server is lost, and with it about {self.level.size} {self.level.noun}"
        return f"{held}.\n  {getattr(why, 'message', None) or 'it gives no answer'}"

    def withdraw(self, attempts: Sequence[Attempt]) -> None:
        """Withdraw attempts that are not over, and wait for the server's confirmation."""
        if self.heir is not None:
            self.heir.withdraw(attempts)
            return
        left = [attempt for attempt in attempts if not attempt.is_over]
        numbers = [number for attempt in left if (number := self.channel.number_of(attempt)) is not None]
        if numbers:
            confirmed = threading.Event()
            self.channel.act("withdraw", self.key, {"numbers": numbers}, then=lambda about, _: confirmed.set())
            confirmed.wait(CONFIRM)
        for attempt in left:
            attempt.then = _nobody
            if not attempt.is_over:
                attempt.error, attempt.is_over = Cancelled(f"an attempt on queue {self.name} was taken back"), True

    def give_back(self, attempts: Sequence[Attempt]) -> None:
        """Do nothing: the notebook returns dequeued elements, with their round."""

    def put_front(self, elements: Sequence[Element]) -> None:
        """Return elements to the front of the queue; waits for the server's confirmation."""
        ended, found = threading.Event(), dict[str, Any]()

        def then(about: Mapping[str, Any], _: Sequence[torch.Tensor]) -> None:
            self.journal.forget()
            found.update(about)
            ended.set()

        lengths, tensors = packed(elements)
        with self.channel.lock:  # the queue begins to go home before this, or behind it
            heir = self.heir
            if heir is None and self._coming is not None:
                self._back.append((elements, ended))
            elif heir is None:
                self.channel.act("front", self.key, lengths, tensors, then=then)
        if heir is None and not ended.wait(CONFIRM):
            raise Unavailable(f"queue {self.name} did not take back {len(elements)} elements within {CONFIRM:g} s")
        if "error" in found and (heir := self.heir) is None:  # else it has gone home meanwhile
            raise _error(found["error"])
        if heir is not None:
            heir.put_front(elements)

    def look(self) -> None:
        """Do nothing: the server checks leases of tokens."""

    def abort(self, why: str) -> None:
        """Drop the queue at its server; pending attempts end with StepAborted."""
        self.is_dropped = True
        self.channel.act("drop", self.key, {"why": why})

    # -- on its way -----------------------------------------------------------------------------------------------

    def make(self, queue: Queue, held: QueueMachine | None) -> None:
        """Create the queue at the server, with the contents and pending attempts of a local machine."""
        facts: dict[str, Any] = {"queue": write_queue(queue)}
        tensors: list[torch.Tensor] = []
        waiting: list[tuple[Attempt, Attempt | None]] = []
        if held is not None:
            self.starters, self.cause, self.level = held.starters, held.cause, held.level
            self.earlier = held.past
            facts["holds"], tensors, waiting = held.leave(self)
        self.channel.queues[self.key] = self

        def made_there(about: Mapping[str, Any], _: Sequence[torch.Tensor]) -> None:
            self._is_made = "error" not in about
            if not self._is_made:  # it stays here
                self._settle(queue, facts.get("holds"), tensors)

        self.channel.act("make", self.key, facts, tensors, then=made_there)
        for attempt, after in waiting:
            self.submit(attempt, after)

    async def come_home(self, queue: Queue) -> None:
        """Move the contents and pending attempts to this process. In the event loop."""
        with self.channel.lock:
            if self.heir is not None:
                return
            self._coming = [
                (act.attempt, None) for act in self.channel.open.values()
                if act.queue is self and act.attempt is not None
            ]  # fmt: skip
        found, tensors, complete = None, list[torch.Tensor](), False
        why: BaseException | None = None
        try:
            await self.channel.done("leave", self.key, {}, CONFIRM)
            while found is None or len(tensors) < found.meta["count"]:
                about = {"key": self.key, "start": len(tensors)}
                found = await asyncio.wait_for(self.channel.ask("contents", about, ()), CONFIRM)
                tensors += found.tensors
            self.channel.act("drop", self.key, {})
            complete = True
        except BaseException as error:
            why = error
            raise
        finally:
            if complete and found is not None:
                self._settle(queue, found.meta["facts"], tensors)
            else:
                self.stay(queue)
                self.lose(queue, why)

    def stay(self, queue: Queue) -> bool:
        """Restore contents and pending attempts from the journal after the loss of the server; False if they are
        unknown.
        """
        with self.channel.lock:
            works = [act for act in self.channel.open.values() if act.queue is self]
            begun = {act.number: act.attempt for act in works if act.attempt is not None and not act.attempt.is_over}
            known = self.journal.now(queue, begun)
            if known is None:
                return False
            self._coming = self._coming or []
            there, seen = {attempt for attempt, _ in self._coming}, self.journal.seen
            self._coming += [(attempt, None) for attempt in begun.values() if attempt not in there]
            put = {n: attempt.enqueued + seen.put.get(n, 0) + known.put.get(n, 0) for n, attempt in begun.items()}
            self._known = known.held, [(attempt, put[n], n in seen.over) for n, attempt in begun.items()]
        return True

    def lose(self, queue: Queue, why: BaseException | None = None) -> None:
        """Replace the queue by a local one after the loss of its server: empty unless the contents are known.

        why: ends the attempts at contents that are not known, which would wait for what nobody puts again.
        """
        if self.heir is not None:
            return
        held, begun = self._known
        if held is None and why is not None:
            self._end_waiting(why)
        for attempt, enqueued, is_over in begun:
            attempt.enqueued, attempt.is_over = enqueued, is_over
            if is_over:
                attempt.outputs = ()
                attempt.tell()
        self.is_lost = held is None
        self._settle(queue, *((None, ()) if held is None else (held.found, held.tensors)))

    def _end_waiting(self, why: BaseException) -> None:
        """End the attempts that wait at contents that are lost."""
        for attempt, _ in self._coming or ():
            if attempt.is_placed and not attempt.is_over:
                attempt.error = ParameterServerLost(self._gone(attempt, why))
                attempt.error.enqueued = attempt.enqueued
                attempt.outputs, attempt.is_over = (), True
                attempt.tell()

    def _settle(self, queue: Queue, holds: Mapping[str, Any] | None, tensors: Sequence[torch.Tensor]) -> None:
        """Replace the queue by a local machine with these contents, and resubmit the pending attempts."""
        home = made(queue)
        home.starters, home.cause = self.starters, self.cause
        if holds is not None:
            home.fill(holds, tensors)
        with self.channel.lock:
            for elements, ended in self._back:
                home.put_front(elements)
                ended.set()
            self._back.clear()
            self.heir = home
            waiting, self._coming = self._coming or [], None
            self.channel.queues.pop(self.key, None)
        if queue.machine is self:
            queue.machine = home
        for attempt, after in waiting:
            if not attempt.is_over:
                attempt.machine, attempt.is_placed = home, False
                home.submit(attempt, after)


_GOES_HOME = ("Cancelled", "StepAborted", "ParameterServerLost", "SchedulerLost")
"""Ends of attempts on a queue that is on its way home."""


def _error(told: Mapping[str, Any]) -> TfnbError:
    error = raised(Failure(told["tag"], told["message"], told["details"]))
    error.enqueued = int(told["details"].get("enqueued", 0))
    return error


def _nobody(attempt: Attempt) -> None:
    pass


class Channels:
    """The channels of one process, by shard."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Callable[[int], Ask]) -> None:
        self._loop, self._ask = loop, ask
        self.all: dict[int, QueueChannel] = {}
        self._lock = threading.Lock()

    def to(self, shard: int) -> QueueChannel:
        """The channel to a shard; a new one if the last one broke."""
        with self._lock:
            if shard not in self.all or self.all[shard].broken is not None:
                self.all[shard] = QueueChannel(self._loop, self._ask(shard))
            return self.all[shard]

    def queue(self, queue: Queue, shard: int, key: str) -> RemoteQueue:
        """A queue of a shard; the same one for the same key."""
        channel = self.to(shard)
        found = channel.queues.get(key)
        if found is None:
            level = Level(0, queue.capacity)
            found = channel.queues[key] = RemoteQueue(channel, key, queue.name, queue.capacity, level)
        return found

    def lose(self, shard: int, why: TfnbError) -> None:
        """End all attempts at a lost shard with ``why``. In the event loop."""
        if shard in self.all:
            self.all[shard].close(why)

    def close(self) -> None:
        """Close all channels. In the event loop."""
        for channel in self.all.values():
            channel.close(StepAborted("the cluster is closed"))
