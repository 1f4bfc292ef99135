"""Queues, accumulators, barriers and tokens of a server: the machines of `tfnb.state`, reached by requests. Pure.

Each client process has a `Channel`. The client posts acts in order, each post under the next number, so that a repeated
post does nothing; ends of acts are reported under growing serials, repeatedly until acknowledged. A waiting operation
is an attempt in the line of its queue, as in a local queue. Dequeued elements may come back: until the channel has
acknowledged them, or, if they were dequeued for a round, until the notebook keeps or aborts that round.

The notebook copies or replaces the contents of all servers' queues at one moment: first it freezes all servers, so that
no operation begins or is reported, and then each copies or changes its own queues.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from tfnb.cluster.server.lines import ENDS
from tfnb.cluster.wire.envelope import size
from tfnb.cluster.wire.messages import Ok, Request, failed
from tfnb.errors import Aborted, InvalidArgument, NotFound, StepAborted, TfnbError
from tfnb.graph.queue import QUEUES, Queue
from tfnb.graph.spec import dtype_name
from tfnb.state.orders import unpacked
from tfnb.state.queue_machine import Attempt, Mark, QueueMachine, StepQueues, become, copied
from tfnb.state.queue_operations import attempt_on, made, ordered, outcome

ENTRIES = 1000  # tensors in one message
SHOWN = 20  # queues in statistics
BYTES = 64 << 20  # of them, unless a single one is larger
FROZEN = 10.0  # seconds at most
KEPT = 64  # answers of `_once`

Method = Callable[[Request, float], Ok | None]
Values = dict[str, torch.Tensor]
Contents = tuple[dict[str, Any], list[torch.Tensor]]  # of a queue: facts, and tensors


@dataclass(slots=True)
class HostedQueue:
    """A queue on this server, and the bytes of its elements. ``left``: contents on their way home."""

    key: str
    queue: Queue
    nbytes: int = 0
    left: tuple[dict[str, Any], list[torch.Tensor]] | None = None

    @property
    def machine(self) -> QueueMachine:
        """The machine that holds the elements."""
        assert isinstance(self.queue.machine, QueueMachine)
        return self.queue.machine


@dataclass(eq=False, slots=True)
class Work:
    """An operation of a channel: number, round if any, and the attempt once begun."""

    number: int
    held: HostedQueue
    attrs: Mapping[str, Any]
    round: int | None
    came: int  # bytes
    attempt: Attempt | None = None


class ActResult(NamedTuple):
    """The outcome of an act: facts, tensors, and the operation whose elements may come back."""

    number: int
    about: dict[str, Any]
    tensors: Sequence[torch.Tensor] = ()
    work: Work | None = None


@dataclass(slots=True)
class Channel:
    """The acts of one process. ``posted``: number of the last post; ``serial``: of the last end.

    ``awake``: shared by all channels of the server: names of those with results that no waiting call has been given.
    """

    name: str
    awake: dict[str, None]
    posted: int = -1
    serial: int = 0
    open: dict[int, Work] = field(default_factory=dict)  # operations that are not over
    ends: OrderedDict[int, ActResult] = field(default_factory=OrderedDict)  # that it has not heard of
    held: list[torch.Tensor] = field(default_factory=list)  # for the next act, which needs several messages

    @property
    def unheard(self) -> list[Work]:
        """Ended operations without a round, not acknowledged yet."""
        works = (end.work for end in self.ends.values())
        return [work for work in works if work is not None and work.round is None]

    def seen(self) -> dict[str, Any]:
        """The mark of this instant for a copy: see `tfnb.cluster.queues.journal.ChannelMark`."""
        works = [(work, number in self.open) for number, work in self.open.items()]
        works += [(work, False) for work in self.unheard]
        put = [
            [work.number, work.attempt.enqueued, not is_open] for work, is_open in works
            if work.attempt is not None and work.attempt.kind in ("enqueue", "close")
        ]  # fmt: skip
        return {"ended": self.serial, "heard": min(self.ends, default=self.serial + 1) - 1, "put": put}

    def end(self, end: ActResult) -> None:
        """Record the outcome of an act, under the next serial."""
        self.serial += 1
        self.awake[self.name] = None
        self.ends[self.serial] = end
        self.open.pop(end.number, None)


@dataclass(slots=True)
class Delivery:
    """New contents of queues and values of Variables, staged: by queue and by key, and the machines for `become`."""

    queues: dict[str, Contents] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    nbytes: int = 0  # of all tensors
    held: list[tuple[HostedQueue, int]] = field(default_factory=list)  # the queues, and bytes of their elements
    machines: dict[QueueMachine, QueueMachine] = field(default_factory=dict)
    write: Callable[[], None] = lambda: None


class Objects:
    """The queues of one server. afford: raises ResourceExhausted where so many bytes more have no room.

    assigning: checks values of Variables, and returns their write.
    """

    METHODS = frozenset({
        "post", "ends", "contents", "first", "waiting", "halt", "freeze", "copy", "page", "bring", "refill", "thaw",
    })  # fmt: skip

    def __init__(
        self, afford: Callable[[int], None] = lambda asked: None,
        assigning: Callable[[Values], Callable[[], None]] = lambda values: lambda: None,
    ) -> None:  # fmt: skip
        self.queues: dict[str, HostedQueue] = {}
        self.channels: dict[str, Channel] = {}
        self._awake: dict[str, None] = {}  # channels with ends that nobody looked at
        self.is_over: Callable[[int], bool] = lambda number: False  # of a round
        self._afford, self._assigning = afford, assigning
        self._rounds: dict[int, list[Work]] = {}  # by round, the operations that ended
        self._steps: dict[int, StepQueues] = {}  # by round, also of waiting operations
        self._frozen, self._until = "", 0.0  # id of the last freeze, and its end
        self._copies: dict[str, Contents] = {}  # by queue, of the last freeze
        self._brought: dict[str, Delivery] = {}  # by their id
        self._answers: OrderedDict[tuple[str, str], Ok] = OrderedDict()  # of `_once`, by method and id
        self.methods: dict[str, Method] = {
            "post": self._post, "ends": self._ends, "contents": self._contents,
            "first": self._first, "waiting": self._waiting, "halt": self._halt,
            "freeze": self._once, "copy": self._once,
            "page": self._page, "bring": self._bring, "refill": self._once, "thaw": self._thaw,
        }  # fmt: skip
        self._acts: dict[str, Callable[[Channel, int, str, Mapping[str, Any], list[torch.Tensor]], None]] = {
            "make": self._make, "do": self._do, "withdraw": self._withdraw, "leave": self._leave, "drop": self._drop,
            "front": self._put_front,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes held in queues and accumulators, and in staged deliveries."""
        brought = sum(brought.nbytes for brought in self._brought.values())
        return sum(held.nbytes for held in self.queues.values()) + brought

    @property
    def waiting(self) -> int:
        """Number of pending attempts."""
        return sum(len(channel.open) for channel in self.channels.values())

    @staticmethod
    def line(request: Request) -> str:
        """The line of a request that may wait; empty for other requests."""
        match request.method:
            case "ends":
                return f"{ENDS}{request.meta['channel']}"
            case "post":
                return f"post:{request.meta['channel']}"
        return ""

    def awakened(self, now: float) -> list[str]:
        """Lines of channels with ends since the last call; none while the server is frozen."""
        if now < self._until:
            return []
        found = [f"{ENDS}{name}" for name in self._awake]
        self._awake.clear()
        return found

    # -- requests ---------------------------------------------------------------------------------------------

    def _post(self, request: Request, now: float) -> Ok | None:
        """Execute the acts of a post, once; answers with the ends so far. Waits while the server is frozen."""
        if now < self._until:
            return None
        channel, meta = self._channel(request), request.meta
        acts = list(meta["acts"])
        if int(meta["number"]) == channel.posted + 1:  # else it came before
            channel.posted += 1
            left = iter(request.tensors)
            for verb, number, key, facts, count in acts:
                self._act(channel, str(verb), int(number), str(key), facts, list(islice(left, count)))
        return self._heard_from(channel, [str(key) for _, _, key, _, _ in acts])

    def _act(
        self, channel: Channel, verb: str, number: int, key: str, facts: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        """Execute one act; an error becomes the act's outcome."""
        if verb == "hold":
            channel.held += given
            return
        given, channel.held = channel.held + given, []
        try:
            if verb not in self._acts:
                raise InvalidArgument(f"a server does not {verb[:40]!r}")
            self._acts[verb](channel, number, key, facts, given)
        except Exception as error:
            channel.end(ActResult(number, {"error": _told(error)}))

    def _ends(self, request: Request, now: float) -> Ok | None:
        """Outcomes of ended acts; waits until there is one."""
        channel = self._channel(request)
        if channel.ends and now < self._until:
            self._awake[channel.name] = None  # it is looked at again after the freeze
            return None
        return self._heard_from(channel, ()) if channel.ends else None

    def _channel(self, request: Request) -> Channel:
        """The channel of a request, without the ends that the request acknowledges."""
        name, got = str(request.meta["channel"]), int(request.meta["got"])
        if (channel := self.channels.get(name)) is None:
            channel = self.channels[name] = Channel(name, self._awake)
        for serial in [serial for serial in channel.ends if serial <= got]:
            end = channel.ends.pop(serial)
            if end.work is not None and end.work.round is None:
                _keep([end.work])
        return channel

    def _heard_from(self, channel: Channel, keys: Iterable[str]) -> Ok:
        """Answer with ends in order, as many as fit into a message, and with the levels of their queues."""
        found: list[list[Any]] = []
        tensors: list[torch.Tensor] = []
        names = {work.held.key for work in channel.open.values()}.union(keys)
        for serial, end in channel.ends.items():
            if tensors and (len(tensors) + len(end.tensors) > ENTRIES or size([*tensors, *end.tensors]) > BYTES):
                break
            if len(found) >= ENTRIES:
                break
            found.append([serial, end.number, end.about, len(end.tensors)])
            tensors += end.tensors
            if end.work is not None:
                names.add(end.work.held.key)
        levels = {key: _level(self.queues[key].machine) for key in names if key in self.queues}
        return Ok({"ends": found, "levels": levels}, tensors)

    def look(self) -> None:
        """Check leases of tokens for expiry."""
        for held in self.queues.values():
            if held.left is None:
                held.machine.look()

    def keep(self, number: int) -> None:
        """Commit a round: its dequeued elements do not come back."""
        self._end_steps([number])
        _keep(self._rounds.pop(number, []))

    def _end_steps(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._steps:
                self._steps.pop(number).end()

    def _halt(self, request: Request, now: float) -> Ok:
        """Void a round: pending operations end, and none begins. Answers with the enqueued elements, by queue."""
        step = self._step(int(request.meta["round"]))
        step.is_void = True
        for channel in self.channels.values():
            for work in list(channel.open.values()):
                if work.round == step.number:
                    _withdraw(channel, work)
        put: dict[str, int] = {}
        for attempt in step.attempts:
            if attempt.kind == "enqueue" and attempt.enqueued:
                put[attempt.machine.name] = put.get(attempt.machine.name, 0) + attempt.enqueued
        return Ok({"moved": step.has_put, "put": put})

    def abort(self, moved: Iterable[int] = ()) -> None:
        """Abort rounds that are over and were not committed: pending operations end, dequeued elements return.

        moved: rounds that enqueued elements, maybe on other servers: their dequeued elements do not return.
        """
        for channel in self.channels.values():
            for work in list(channel.open.values()):
                if work.round is not None and self.is_over(work.round):
                    _withdraw(channel, work)
            for serial, end in list(channel.ends.items()):
                if end.work is not None and end.work.round is not None and self.is_over(end.work.round):
                    del channel.ends[serial]
        for number in [number for number in self._rounds if self.is_over(number)]:
            done = self._rounds.pop(number)
            if number in moved or self._step(number).has_put:
                _keep(done)
            else:
                _give_back(done)
        self._end_steps([number for number in self._steps if self.is_over(number)])

    def _contents(self, request: Request, now: float) -> Ok:
        """Some tensors of a moved queue's contents, from number ``start`` on."""
        held = self._held(str(request.meta["key"]))
        if held.left is None:
            raise InvalidArgument(f"queue {held.queue.name} is still in use on this server")
        some = message(held.left[1], int(request.meta["start"]))
        return Ok({"facts": held.left[0], "count": len(held.left[1])}, some)

    # -- contents of all servers' queues ------------------------------------------------------------------------

    def _once(self, request: Request, now: float) -> Ok:
        """Execute a request once; a repetition gets the same answer."""
        method, id = request.method, str(request.meta["id"])
        if (method, id) not in self._answers:
            do = {"freeze": self._freeze, "copy": self._copy, "refill": self._refill}[method]
            self._answers[method, id] = do(request, now)
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        return self._answers[method, id]

    def _freeze(self, request: Request, now: float) -> Ok:
        """Freeze all queues for a while. Answers for each round: whether elements were put, and whether these queues
        were used.

        brought: staged contents of these queues and Variables; everything fallible of their installation happens here.
        """
        keys = list(map(str, request.meta["keys"]))
        machines = {self._held(key).machine for key in keys}
        if "brought" in request.meta:
            self._make_ready(self._brought[str(request.meta["brought"])])
        self._frozen, self._until = str(request.meta["id"]), now + FROZEN
        return Ok({
            "rounds": [
                [number, step.has_put, not machines.isdisjoint(attempt.machine for attempt in step.attempts)]
                for number, step in self._steps.items()
            ]
        })  # fmt: skip

    def _make_ready(self, brought: Delivery) -> None:
        brought.held = [(self._held(key), size(tensors)) for key, (_, tensors) in brought.queues.items()]
        for (held, _), (found, tensors) in zip(brought.held, brought.queues.values(), strict=True):
            brought.machines[held.machine] = other = made(held.queue)
            other.fill(found, tensors)
        brought.write = self._assigning(brought.values) if brought.values else brought.write

    def _ensure_frozen(self, request: Request, now: float) -> None:
        if request.meta["id"] != self._frozen or now >= self._until:
            raise Aborted(f"the queues stay frozen for at most {FROZEN:g} s, and this took longer: do it again")

    def _copy(self, request: Request, now: float) -> Ok:
        """Copy the contents of queues, and end the freeze. ``moved``: rounds whose dequeued elements do not return.

        unheard: include dequeued elements that their channel has not acknowledged. The answer's ``seen`` has the mark
        of each channel.
        """
        self._ensure_frozen(request, now)
        moved, keys = {int(number) for number in request.meta["moved"]}, list(map(str, request.meta["keys"]))
        machines = {self._held(key).machine: ordered(self._held(key).queue) for key in keys}
        unheard = [work.attempt for channel in self.channels.values() for work in channel.unheard]
        back = [attempt for attempt in unheard if attempt is not None] if request.meta.get("unheard") else []
        found = copied(machines, lambda step: step.number in moved, back)
        self._copies = dict(zip(keys, found, strict=True))
        self._until = 0.0
        return Ok({
            "found": {key: [facts, len(tensors)] for key, (facts, tensors) in self._copies.items()},
            "seen": {name: channel.seen() for name, channel in self.channels.items()},
        })  # fmt: skip

    def _page(self, request: Request, now: float) -> Ok:
        """Some tensors of a copy, from number ``start`` on."""
        key = str(request.meta["key"])
        if request.meta["id"] != self._frozen or key not in self._copies:
            raise Aborted("another copy of the queues' contents has begun: do it again")
        return Ok({}, message(self._copies[key][1], int(request.meta["start"])))

    def _bring(self, request: Request, now: float) -> Ok:
        """Stage values of Variables, or tensors of a queue's new contents from number ``start`` on."""
        meta, tensors, id = request.meta, request.tensors, str(request.meta["id"])
        brought = self._brought.get(id, Delivery())
        if "keys" in meta:
            values = dict(zip(map(str, meta["keys"]), tensors, strict=True))
            before = [brought.values[key] for key in values if key in brought.values]
        else:
            key, start = str(meta["key"]), int(meta["start"])
            _, there = brought.queues.get(key, (meta["found"], []))
            before = there[start : start + len(tensors)]  # it came before, and its answer was lost
        more = size(tensors) - size(before)
        self._afford(more)
        self._brought[id] = brought
        brought.nbytes += more
        if "keys" in meta:
            brought.values |= values
        else:
            there[start : start + len(tensors)] = tensors
            brought.queues[key] = meta["found"], there
        return Ok({})

    def _refill(self, request: Request, now: float) -> Ok:
        """Install staged contents in queues and Variables; steps of the ``void`` rounds raise Aborted.

        The change is decided, so it happens even if the freeze has expired. Answers with this server's void rounds.
        """
        brought = self._brought.pop(str(request.meta["brought"]))
        self._until = 0.0
        brought.write()
        for held, nbytes in brought.held:
            held.nbytes = nbytes + sum(_not_put(work) for work in self._open() if work.held is held)
        for number in map(int, request.meta["void"]):
            self._step(number).is_void = True
        void = [
            number for number, step in self._steps.items()
            if not brought.machines.keys().isdisjoint(attempt.machine for attempt in step.attempts)
        ]  # fmt: skip
        become(brought.machines)
        return Ok({"void": void})

    def _thaw(self, request: Request, now: float) -> Ok:
        """End a freeze and drop its copies, or drop staged contents, by their id."""
        if request.meta["id"] == self._frozen:
            self._copies, self._until = {}, 0.0
        self._brought.pop(str(request.meta["id"]), None)
        return Ok({})

    def _open(self) -> Iterator[Work]:
        return (work for channel in self.channels.values() for work in channel.open.values())

    def _step(self, number: int) -> StepQueues:
        if number not in self._steps:
            self._steps[number] = StepQueues(number)
        return self._steps[number]

    def _first(self, request: Request, now: float) -> Ok:
        """The next elements, without dequeuing them."""
        found = self._held(str(request.meta["key"])).machine.first(min(int(request.meta["count"]), ENTRIES))
        return Ok({"lengths": [len(element) for element in found]}, [part for element in found for part in element])

    def _waiting(self, request: Request, now: float) -> Ok:
        """Pending attempts with their followers, and the users of their queues so far; none if more than `ENTRIES`
        wait.
        """
        found: list[list[Any]] = []
        queues: dict[str, list[Any]] = {}
        for name, channel in self.channels.items() if self.waiting <= ENTRIES else ():
            numbers = {work.attempt: work.number for work in channel.open.values()}
            for attempt, number in numbers.items():
                assert attempt is not None
                work = channel.open[number]
                followers = [numbers[one] for one in attempt.followers if one in numbers]
                what, key, machine = attempt.what or "a call", work.held.key, work.held.machine
                found.append([name, number, key, attempt.kind, what, attempt.is_placed, followers, work.round])
                queues[key] = [_level(machine), {kind: sorted(who) for kind, who in machine.past.items()}]
        return Ok({"open": found, "queues": queues})

    # -- acts -------------------------------------------------------------------------------------------------

    def _make(
        self, channel: Channel, number: int, key: str, facts: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        """Create a queue, with its contents from elsewhere if any."""
        if key in self.queues:
            raise InvalidArgument(f"a queue {key} is here already")
        self._afford(size(given))
        queue = read_queue(facts["queue"])
        machine = queue.machine = made(queue)
        if "holds" in facts:
            machine.fill(facts["holds"], given)
        self.queues[key] = HostedQueue(key, queue, size(given))
        channel.end(ActResult(number, {}))

    def _do(self, channel: Channel, number: int, key: str, facts: Mapping[str, Any], given: list[torch.Tensor]) -> None:
        """Begin an operation on a queue, for a round or on its own."""
        held, kind = self._held(key), facts["kind"]
        work = Work(number, held, facts["attrs"], facts.get("round"), size(given))
        if work.round is not None and self.is_over(work.round):
            raise StepAborted(f"round {work.round} is over")
        if kind == "enqueue":
            self._afford(work.came)
        then = partial(self._ended, channel, work)
        work.attempt = attempt_on(
            held.queue, kind, then, work.attrs, given, str(facts["what"]), lends=True, mark=_mark(facts),
            step=None if work.round is None else self._step(work.round),
        )  # fmt: skip
        before = channel.open.get(facts.get("after", -1))
        channel.open[number] = work
        if kind == "enqueue":
            held.nbytes += work.came
        held.machine.submit(work.attempt, None if before is None else before.attempt)

    def _ended(self, channel: Channel, work: Work, attempt: Attempt) -> None:
        """Record the end of an operation: its tensors, or its error."""
        about: dict[str, Any] = {"enqueued": attempt.enqueued}
        tensors: Sequence[torch.Tensor] = ()
        _settle(work)
        error: Exception | None = attempt.error
        if error is None:
            try:
                tensors = outcome(work.held.queue, attempt, work.attrs)
            except Exception as failure:  # elements that make no batch
                error = failure
                attempt.machine.give_back([attempt])
        if error is not None:
            channel.end(ActResult(work.number, about | {"error": _told(error)}))
            return
        if work.round is not None:
            self._rounds.setdefault(work.round, []).append(work)
        channel.end(ActResult(work.number, about, tensors, work))

    def _withdraw(
        self, channel: Channel, number: int, key: str, facts: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        """Withdraw pending operations; elements dequeued by one of them come next again."""
        for other in map(int, facts["numbers"]):
            if other in channel.open:
                _withdraw(channel, channel.open[other])
        channel.end(ActResult(number, {}))

    def _put_front(
        self, channel: Channel, number: int, key: str, facts: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        """Return dequeued, unused elements to the front of a queue."""
        held = self._held(key)
        held.nbytes += size(given)
        held.machine.put_front(unpacked(facts, given))
        channel.end(ActResult(number, {}))

    def _leave(
        self, channel: Channel, number: int, key: str, facts: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        """Begin a queue's move home: pending operations end, and the contents can be fetched."""
        held = self._held(key)
        for other in self.channels.values():
            for work in list(other.open.values()):
                if work.held is held:
                    _withdraw(other, work)
        found, tensors, _ = held.machine.leave()
        held.left = found, tensors
        channel.end(ActResult(number, {}))

    def _drop(
        self, channel: Channel, number: int, key: str, facts: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        """Drop a queue; pending operations end with StepAborted."""
        held = self._held(key)
        if held.left is None:
            held.machine.abort(str(facts.get("why", "")))
        del self.queues[key]
        channel.end(ActResult(number, {}))

    def _held(self, key: str) -> HostedQueue:
        if key not in self.queues:
            raise NotFound(f"this server holds no queue {key!r}; it has {', '.join(self.queues) or 'none'}")
        return self.queues[key]

    def levels(self) -> list[tuple[str, int, int | None]]:
        """Name, elements and capacity of the first queues; None for one without a limit."""
        found = islice(self, SHOWN)
        return [(each.name, each.size, None if each.capacity == math.inf else int(each.capacity)) for each in found]

    def __iter__(self) -> Iterator[QueueMachine]:
        return (held.machine for held in self.queues.values())


def message(tensors: Sequence[torch.Tensor], start: int) -> list[torch.Tensor]:
    """Tensors from number ``start`` on, as many as one message takes."""
    found: list[torch.Tensor] = []
    nbytes = 0
    for tensor in tensors[start : start + ENTRIES]:
        nbytes += size([tensor])
        if found and nbytes > BYTES:
            break
        found.append(tensor)
    return found


def _mark(facts: Mapping[str, Any]) -> Mark | None:
    return (str(facts["mark"][0]), int(facts["mark"][1])) if "mark" in facts else None


def _withdraw(channel: Channel, work: Work) -> None:
    assert work.attempt is not None
    work.attempt.machine.withdraw([work.attempt])
    _settle(work)
    error = work.attempt.error or StepAborted("it was taken back")
    channel.end(ActResult(work.number, {"enqueued": work.attempt.enqueued, "error": _told(error)}))


def _settle(work: Work) -> None:
    """Subtract the bytes of elements that an enqueue did not put."""
    work.held.nbytes -= _not_put(work)


def _not_put(work: Work) -> int:
    """Bytes that an enqueue did not put."""
    attempt = work.attempt
    return sum(map(size, attempt.elements[attempt.enqueued :])) if attempt and attempt.kind == "enqueue" else 0


def _keep(done: Sequence[Work]) -> None:
    for work in done:
        if work.attempt is not None and work.attempt.taken:
            work.held.nbytes -= sum(map(size, work.attempt.taken))
            work.held.machine.keep([work.attempt])


def _give_back(done: Sequence[Work]) -> None:
    for held in {id(work.held): work.held for work in done}.values():
        held.machine.give_back([work.attempt for work in done if work.held is held and work.attempt is not None])


def write_queue(queue: Queue) -> dict[str, Any]:
    """The description of a queue, as JSON."""
    return {
        "name": queue.name, "capacity": None if queue.capacity == math.inf else queue.capacity, "kind": queue.kind,
        "options": dict(queue.options),
        "components": [[dtype_name(kind), None if shape is None else list(shape)] for kind, shape in queue.components],
    }  # fmt: skip


def read_queue(about: Mapping[str, Any]) -> Queue:
    """The empty queue of a description.

    >>> queue = Queue("q", 3, [(torch.float32, (2, None))], options={})
    >>> read_queue(write_queue(queue)).components == queue.components
    True
    """
    parts = [
        (getattr(torch, str(dtype)), None if shape is None else tuple(shape)) for dtype, shape in about["components"]
    ]
    if about["kind"] not in QUEUES or not all(isinstance(dtype, torch.dtype) for dtype, _ in parts):
        raise InvalidArgument(f"a server makes queues of kinds {', '.join(QUEUES)}, not {about['kind']!r:.40}")
    most = math.inf if about["capacity"] is None else about["capacity"]
    return Queue(str(about["name"]), most, parts, kind=about["kind"], options=about["options"])


def _told(error: Exception) -> dict[str, Any]:
    """An error as data, with how many elements an enqueue had put."""
    found = failed(error)
    enqueued = {"enqueued": error.enqueued} if isinstance(error, TfnbError) else {}
    return {"tag": found.tag, "message": found.message, "details": {**found.details, **enqueued}}


def _level(machine: QueueMachine) -> list[Any]:
    size, capacity, *others = machine.level
    return [size, None if capacity == float("inf") else capacity, *others]
