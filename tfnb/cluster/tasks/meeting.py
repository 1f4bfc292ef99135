"""The rendezvous of a task: values sent between the parts of a step meet their receivers, by key.

A pure machine, `Meeting.on(event, now) -> effects`, without clock, thread or socket. A key is (round, edge, tag): the
tag names the iterations of the frames that the value belongs to. Each key is sent once and wanted once.

| Round | Event | Next | Effect |
|---|---|---|---|
| unknown, early | `MessageArrival` | early | kept; `PauseReading` over `EARLY` bytes, poisoned after `PATIENCE` s |
| unknown, early | `Begin` | open | early values from incarnations of no part are dropped |
| open | `Want`, `MessageArrival` | open | `Deliver` once both are there |
| open | `MessageArrival` or `Want` a second time | poisoned | `Fail`: Internal that names edge and tag |
| open | `Abort`, `ConnectionLoss` of a task in it | poisoned | `Fail` with this cause; values and wants are dropped |
| open, poisoned | `PartEnd` | over | `Leftover` where values are left without an error |
| poisoned, over | `MessageArrival`, `Want` | the same | dropped and counted |

A round that was poisoned before it began says so when it begins. What is over stays over: rounds up to the floor,
and the last `TOMBSTONES` above it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from tfnb.cluster.wire.messages import Dead, Tag
from tfnb.errors import Internal, ResourceExhausted, StepAborted, TfnbError

EARLY = 256 << 20  # bytes of values for rounds that have not begun, until who sends them is paused
MESSAGE = 256  # bytes that a message counts beside its value
PATIENCE = 10.0  # seconds that a sender is paused, until the round that holds the most early bytes is aborted
TOMBSTONES = 1024  # rounds above the floor that are known to be over
REMEMBERED = 4096  # keys of a round that were delivered last: a second message or want for one of them is noticed

Receive = Callable[[Any, Dead | None], None]


class MessageArrival(NamedTuple):
    """A message of a part. ``sender``: incarnation of its task; ``nbytes``: of its value."""

    round: int
    edge: int
    tag: Tag
    value: Any
    dead: Dead | None
    sender: int
    nbytes: int = 0


class Want(NamedTuple):
    """A part waits for a value; ``receive`` is called with the value."""

    round: int
    edge: int
    tag: Tag
    receive: Receive


class Begin(NamedTuple):
    """A round begins here. ``senders``: incarnations of the tasks that run its parts."""

    round: int
    senders: frozenset[int]


class Abort(NamedTuple):
    """Give up a round, and all rounds up to ``floor``."""

    round: int
    floor: int
    cause: TfnbError


class ConnectionLoss(NamedTuple):
    """A connection with this incarnation broke: messages may be missing."""

    sender: int
    cause: TfnbError


class PartEnd(NamedTuple):
    """The part of this task has ended, or has failed."""

    round: int
    has_failed: bool = False


class MeetingTick(NamedTuple):
    """Time went by."""


Event = MessageArrival | Want | Begin | Abort | ConnectionLoss | PartEnd | MeetingTick


class Deliver(NamedTuple):
    """The value that was wanted."""

    receive: Receive
    value: Any
    dead: Dead | None


class Fail(NamedTuple):
    """A round that began is poisoned; said once."""

    round: int
    cause: TfnbError


class Leftover(NamedTuple):
    """Values without a receiver, in a round that ended without an error."""

    round: int
    keys: Sequence[tuple[int, Tag]]


class PauseReading(NamedTuple):
    """Read no more of this sender's messages until further notice."""

    sender: int


class ResumeReading(NamedTuple):
    """Go on to read them."""

    sender: int


Effect = Deliver | Fail | Leftover | PauseReading | ResumeReading


@dataclass(slots=True)
class _Round:
    """One round. ``senders``: None until the round begins; ``early``: messages that came before."""

    senders: frozenset[int] | None = None
    early: list[MessageArrival] = field(default_factory=list)
    values: dict[tuple[int, Tag], MessageArrival] = field(default_factory=dict)
    wants: dict[tuple[int, Tag], Receive] = field(default_factory=dict)
    delivered: dict[tuple[int, Tag], None] = field(default_factory=dict)
    cause: TfnbError | None = None


class Meeting:
    """Messages and wants of all rounds of one task.

    >>> meeting, got = Meeting(), []
    >>> meeting.on(MessageArrival(1, edge=7, tag=(0, 3), value=2.5, dead=None, sender=11), now=0.0)
    []
    >>> meeting.on(Begin(1, frozenset({11})), now=0.0), meeting.on(Want(1, 7, (0, 3), print), now=0.0)
    ([], [Deliver(receive=<built-in function print>, value=2.5, dead=None)])
    >>> late = MessageArrival(1, 7, (0, 4), 1.0, None, 11)
    >>> meeting.on(PartEnd(1), now=0.0), meeting.on(late, now=0.0), meeting.counts["stale"]
    ([], [], 1)
    """

    def __init__(self, budget: int = EARLY) -> None:
        self.counts = Counter[str]()  # messages that were dropped: fenced, stale, poisoned
        self.early = 0  # bytes of early messages
        self.paused: dict[int, float] = {}  # senders that are not read, and until when
        self.floor = 0
        self._budget = budget
        self._rounds: dict[int, _Round] = {}
        self._over: set[int] = set()  # above the floor

    @property
    def rounds(self) -> list[int]:
        """Numbers of the rounds that are early, open or poisoned."""
        return list(self._rounds)

    @property
    def held(self) -> int:
        """Values and wants that have not met."""
        return sum(len(one.early) + len(one.values) + len(one.wants) for one in self._rounds.values())

    def on(self, event: Event, now: float) -> list[Effect]:
        """The effects of an event."""
        match event:
            case MessageArrival():
                return self._came(event, now)
            case Want():
                return self._want(event)
            case Begin(number, senders):
                return list(self._begin(number, senders, now))
            case Abort():
                return list(self._abort(event))
            case ConnectionLoss(sender, cause):
                return list(self._lost(sender, cause))
            case PartEnd(number, has_failed):
                return list(self._end(number, has_failed))
            case MeetingTick():
                return list(self._tick(now))

    def is_over(self, number: int) -> bool:
        """Whether a round that is not held here has ended."""
        return number <= self.floor or number in self._over

    # -- values -----------------------------------------------------------------------------------------------------

    def _came(self, message: MessageArrival, now: float) -> list[Effect]:
        number = message.round
        one = self._rounds.get(number)
        if one is None:
            if self.is_over(number):
                self.counts["stale"] += 1
                return []
            one = self._rounds[number] = _Round()
        if one.cause is not None:
            self.counts["poisoned"] += 1
        elif one.senders is None:
            one.early.append(message)
            self.early += message.nbytes + MESSAGE
            if self.early > self._budget and message.sender not in self.paused:
                self.paused[message.sender] = now + PATIENCE
                return [PauseReading(message.sender)]
        elif message.sender not in one.senders:
            self.counts["fenced"] += 1
        else:
            return self._meet(number, one, message)
        return []

    def _meet(self, number: int, one: _Round, message: MessageArrival) -> list[Effect]:
        key = message.edge, message.tag
        receive = one.wants.pop(key, None)
        if receive is not None:
            _remember(one, key)
            return [Deliver(receive, message.value, message.dead)]
        if key in one.values or key in one.delivered:
            return list(self._twice(number, one, key, "came"))
        one.values[key] = message
        return []

    def _want(self, want: Want) -> list[Effect]:
        one, key = self._rounds.get(want.round), (want.edge, want.tag)
        if one is None or one.cause is not None:
            self.counts["stale" if one is None else "poisoned"] += 1
            return []
        message = one.values.pop(key, None)
        if message is not None:
            _remember(one, key)
            return [Deliver(want.receive, message.value, message.dead)]
        if key in one.wants or key in one.delivered:
            return list(self._twice(want.round, one, key, "was wanted"))
        one.wants[key] = want.receive
        return []

    def _twice(self, number: int, one: _Round, key: tuple[int, Tag], what: str) -> Iterator[Effect]:
        edge, tag = key
        yield from self._poison(number, one, Internal(f"round {number}: edge {edge} {what} twice with tag {tag}"))

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _begin(self, number: int, senders: frozenset[int], now: float) -> Iterator[Effect]:
        if number not in self._rounds and self.is_over(number):
            yield Fail(number, StepAborted(f"round {number} begins when it is over"))
            return
        one = self._rounds.setdefault(number, _Round())
        if one.senders is not None:
            yield from self._poison(number, one, Internal(f"round {number} begins twice"))
            return
        one.senders = senders
        if one.cause is not None:
            yield Fail(number, one.cause)
            return
        early, one.early = one.early, []
        self._forget(early)
        for message in early:
            yield from self._came(message, now)
        yield from self._resume()

    def _abort(self, event: Abort) -> Iterator[Effect]:
        self.floor = max(self.floor, event.floor)
        self._over = {number for number in {*self._over, event.round} if number > self.floor}
        for number, one in list(self._rounds.items()):
            if number <= self.floor or number == event.round:
                yield from self._poison(number, one, event.cause)
                if one.senders is None:
                    del self._rounds[number]

    def _lost(self, sender: int, cause: TfnbError) -> Iterator[Effect]:
        self.paused.pop(sender, None)
        for number, one in self._rounds.items():
            concerns = one.senders is not None and sender in one.senders
            if concerns or any(message.sender == sender for message in one.early):
                yield from self._poison(number, one, cause)

    def _poison(self, number: int, one: _Round, cause: TfnbError) -> Iterator[Effect]:
        """Poison a round with the first cause, reported at once or when the round begins."""
        if one.cause is not None:
            return
        one.cause = cause
        self._forget(one.early)
        one.early = []
        one.values, one.wants, one.delivered = {}, {}, {}
        if one.senders is not None:
            yield Fail(number, cause)
        yield from self._resume()

    def _end(self, number: int, has_failed: bool) -> Iterator[Effect]:
        one = self._rounds.pop(number, None)
        if number > self.floor:
            self._over.add(number)
        if len(self._over) > 2 * TOMBSTONES:
            self.floor = sorted(self._over)[-TOMBSTONES - 1]
            self._over = {other for other in self._over if other > self.floor}
        if one is None:
            return
        self._forget(one.early)
        left = [key for key in one.values if key[0] >= 0]  # others are words that nobody has to wait for
        if left and not has_failed:
            yield Leftover(number, left)
        yield from self._resume()

    # -- early messages ---------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> Iterator[Effect]:
        while self.early > self._budget and any(until <= now for until in self.paused.values()):
            held = {number: sum(m.nbytes + MESSAGE for m in one.early) for number, one in self._rounds.items()}
            number = max(held, key=lambda number: held[number])
            text = f"bytes of values before round {number} began here: used {self.early}, limit {self._budget}"
            yield from self._poison(number, self._rounds[number], ResourceExhausted(text))

    def _forget(self, early: Sequence[MessageArrival]) -> None:
        self.early -= sum(message.nbytes + MESSAGE for message in early)

    def _resume(self) -> Iterator[Effect]:
        if self.paused and self.early <= self._budget:
            paused, self.paused = self.paused, {}
            yield from map(ResumeReading, paused)


def _remember(one: _Round, key: tuple[int, Tag]) -> None:
    one.delivered[key] = None
    if len(one.delivered) > REMEMBERED:
        for old in list(islice(one.delivered, REMEMBERED // 2)):
            del one.delivered[old]
