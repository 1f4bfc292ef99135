"""The machine of every queue: attempts stand in two lines, and only the head of each may proceed.

Semantics S-68 to S-78, S-83. `tfnb.state.orders` has the order of the elements. No call blocks: an attempt that cannot
proceed stays in its line, and calls its ``then`` at the end. Every method may be called from any thread; ``then`` is
called without the lock being held.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Protocol

import torch

from tfnb.errors import Aborted, Cancelled, OutOfRange, QueueClosed, StepAborted, TfnbError
from tfnb.interrupts import no_interrupt
from tfnb.state.orders import Arrival, Element, Order

Kind = Literal["enqueue", "dequeue", "close", "size", "set_step", "renew", "finish"]
_LINE = {
    "enqueue": "enqueue", "close": "enqueue", "dequeue": "dequeue", "size": "", "set_step": "", "renew": "",
    "finish": "",
}  # fmt: skip


class Level(NamedTuple):
    """The fill of a queue: elements stored of ``capacity``, elements of an incomplete batch, waiting operations."""

    size: int
    capacity: float
    absorbed: int = 0
    enqueues: int = 0
    dequeues: int = 0
    closed: bool = False
    noun: str = "elements"

    def __str__(self) -> str:
        most = "" if self.capacity == math.inf else f" of {self.capacity}"
        waits = [f"{n} {kind}" for n, kind in ((self.enqueues, "enqueue"), (self.dequeues, "dequeue")) if n]
        parts = [f"{self.size}{most} {self.noun}"]
        parts += [f"{self.absorbed} more taken for a batch"] if self.absorbed else []
        parts += ["closed" if self.closed else "open"]
        return ", ".join(parts + ([f"{' and '.join(waits)} waits"] if waits else []))


class Attempt:
    """One operation on a queue. ``then(attempt)`` is called once, at its end, perhaps with an ``error``.

    elements: to enqueue, one by one; ``enqueued``: how many so far; ``kept``: how many the order kept. count: elements
    to dequeue, ``taken`` one by one; ``up_to``: a closed queue may give fewer; required: gradients of a mean. question:
    asks or tells the order something, in no line; ``answer``: the order's answer. An attempt enters its line when
    ``after``, the program's operation before, has ended or stands in the same line. ``call``, ``outputs``: attributes
    and tensors of an operation on a queue of another process, and its results. lends: taken elements may return until
    `keep` is called. step: the step's `StepQueues`. mark: of an element of a source.
    """

    __slots__ = (
        "answer", "call", "cancel_pending", "count", "elements", "enqueued", "error", "followers", "is_over",
        "is_placed", "kept", "kind", "lends", "machine", "mark", "numbers", "outputs", "question", "required", "since",
        "step", "taken", "then", "up_to", "what",
    )  # fmt: skip

    def __init__(
        self, machine: QueueHost, kind: Kind, then: Callable[[Attempt], None], *, elements: Sequence[Element] = (),
        count: int = 1, up_to: bool = False, required: int = 1, cancel_pending: bool = False,
        question: Callable[[Any], int] = len, what: str | None = None,
        call: tuple[Mapping[str, Any], Sequence[torch.Tensor]] = ({}, ()), lends: bool = False,
        step: StepQueues | None = None, mark: Mark | None = None,
    ) -> None:  # fmt: skip
        self.machine, self.kind, self.then, self.what = machine, kind, then, what
        self.step, self.mark = step, mark
        if step is not None:
            step.begin(self)
        self.elements, self.count, self.up_to, self.cancel_pending = elements, count, up_to, cancel_pending
        self.required, self.question = required, question
        self.call, self.lends = call, lends
        self.outputs: tuple[torch.Tensor, ...] | None = None
        self.enqueued = self.kept = self.answer = 0
        self.taken: list[Element] = []
        self.numbers: list[float] = []  # the place of each of those in the order in which elements were taken
        self.error: TfnbError | None = None
        self.is_over = self.is_placed = False
        self.followers: list[Attempt] = []
        self.since = time.monotonic()

    @property
    def line(self) -> str:
        """The line of the attempt: enqueue, dequeue, or empty for questions."""
        return _LINE[self.kind]

    @property
    def asks_nothing(self) -> bool:
        """Whether the attempt enqueues or dequeues zero elements, and so waits for nobody."""
        return (self.kind == "dequeue" and not self.count) or (self.kind == "enqueue" and not self.elements)

    def tell(self) -> None:
        """Call ``then`` once and drop the reference: an inbox that holds the attempt would make a cycle."""
        then, self.then = self.then, _nobody
        then(self)

    @property
    def act(self) -> str:
        """The operation and its queue, in words."""
        many = "" if self.kind != "dequeue" or self.count == 1 else f" of {self.count}"
        return f"{self.kind}{many} on queue {self.machine.name}"


Mark = tuple[str, int]  # who takes elements of a source to queues, and how many those were


class StepQueues:
    """The queue operations of one step, from its first attempt until the step is over."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number  # of the round, on a server
        self.attempts: list[Attempt] = []
        self.is_void = False  # a queue that it used holds something else by now
        if _begun.steps is not None:
            _begun.steps.append(self)

    def begin(self, attempt: Attempt) -> None:
        """The step uses a queue, and is under way from here on."""
        UNDER_WAY[self] = None
        self.attempts.append(attempt)

    def ensure_valid(self) -> None:
        """Raise Aborted if the contents of a queue used by the step were replaced meanwhile."""
        if self.is_void:
            raise Aborted(f"nothing was written: {_RESTORED}")

    def end(self) -> None:
        """Commit: dequeued elements are gone for good."""
        UNDER_WAY.pop(self, None)
        for attempt in self.attempts:
            attempt.step = None  # no cycle holds elements

    def give_back(self) -> None:
        """Abort the step, which wrote nothing: dequeued elements return, unless the step has enqueued some."""
        if not self.has_put:
            give_back([attempt for attempt in self.attempts if attempt.error is None])
        self.end()

    @property
    def has_put(self) -> bool:
        """Whether the step has enqueued elements, so that an abort returns nothing; needs the queues' locks."""
        return any(map(_has_put, self.attempts))


UNDER_WAY: dict[StepQueues, None] = {}
"""The steps of this process that use queues here."""


class _ThreadBlock(threading.local):
    """The current `whole_steps` block of a thread. No ContextVar: an event loop's callbacks would inherit the block."""

    steps: list[StepQueues] | None = None


_begun = _ThreadBlock()


@contextmanager
def whole_steps() -> Iterator[None]:
    """A block of one step: queue operations are committed at its end; an exception returns the dequeued elements."""
    begun: list[StepQueues] = []
    above, _begun.steps = _begun.steps, begun
    try:
        yield
        for step in begun:
            step.end()
    except BaseException:
        with no_interrupt():
            for step in begun:
                if step in UNDER_WAY:
                    step.give_back()
        raise
    finally:
        _begun.steps = above


class QueueHost(Protocol):
    """The target of attempts: a local queue, or the proxy of a queue in another process, reached by messages."""

    name: str
    capacity: float
    starters: list[Callable[[], None]]  # are called when a dequeue has to wait
    cause: BaseException | None  # the error that ended who filled it
    used: float | None  # when somebody last did something, as `time.time` says
    past: Mapping[str, set[str]]  # who did what so far
    others: str  # who else may use it, in words

    @property
    def level(self) -> Level:
        """The fill, and the waiting operations."""

    @property
    def nbytes(self) -> int:
        """Bytes held here."""

    def first(self, count: int = 1) -> list[Element]:
        """Up to ``count`` next elements (in storage order where the order is random), without taking them."""

    def submit(self, attempt: Attempt, after: Attempt | None = None) -> None:
        """Begin an attempt, behind ``after``."""

    def withdraw(self, attempts: Sequence[Attempt]) -> None:
        """Cancel attempts that are not over."""

    def give_back(self, attempts: Sequence[Attempt]) -> None:
        """Return the elements taken by these attempts to the front of the queue."""

    def put_front(self, elements: Sequence[Element]) -> None:
        """Put elements in front of the queue, even if the queue is full or closed."""

    def look(self) -> None:
        """Time has passed."""

    def abort(self, why: str) -> None:
        """Attempts that wait end with StepAborted."""


Waiting = tuple[Attempt, Attempt | None]  # an attempt that waits, and the one behind which it stands


class QueueMachine:
    """A queue of at most ``capacity`` elements, stored in an `Order`.

    >>> queue, done = QueueMachine("q", 1), []
    >>> for word in "ab":
    ...     queue.submit(Attempt(queue, "enqueue", done.append, elements=[word]))
    >>> len(done), queue.size
    (1, 1)
    >>> queue.submit(Attempt(queue, "dequeue", done.append, count=3))
    >>> [attempt.kind for attempt in done], str(queue.level)
    (['enqueue', 'enqueue'], '0 of 1 elements, 2 more taken for a batch, open, 1 dequeue waits')
    >>> queue.submit(Attempt(queue, "enqueue", done.append, elements="cd"))
    >>> done[2].taken, queue.size
    (['a', 'b', 'c'], 1)
    """

    others = "nobody in a run or call that is at work now"

    def __init__(self, name: str, capacity: float, order: Order | None = None) -> None:
        self.name, self.capacity = name, capacity
        self.closed = False
        self.elements: Order = Arrival() if order is None else order
        self.lines: dict[str, OrderedDict[Attempt, None]] = {"enqueue": OrderedDict(), "dequeue": OrderedDict()}
        self.starters: list[Callable[[], None]] = []
        self.cause: BaseException | None = None
        self.used: float | None = None
        self.past: Mapping[str, set[str]] = {kind: set() for kind in _LINE}
        self.lent: set[Attempt] = set()  # whose elements may come back
        self.heir: QueueHost | None = None  # who has the elements now
        self._lock = threading.Lock()
        self._placing: deque[Attempt] = deque()
        self._over: list[Attempt] = []  # to be told
        self._taken = 0  # elements so far
        self._since = 0  # those up to this number are of contents that are gone, and never come back
        self.marks: dict[str, int] = {}  # of the last element of each source
        self._front: list[float] = []  # numbers of those that came back, and are the first ones again

    @property
    def size(self) -> int:
        """Elements stored now."""
        return len(self.elements)

    @property
    def level(self) -> Level:
        """The fill, and the waiting operations."""
        if self.heir is not None:
            return self.heir.level
        with self._lock:
            puts, takes = self.lines["enqueue"], self.lines["dequeue"]
            head = next(iter(takes), None)
            absorbed = 0 if head is None else len(head.taken)
            return Level(
                self.size, self.capacity, absorbed, len(puts), len(takes), self.closed, self.elements.noun
            )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of the stored elements."""
        return sum(part.numel() * part.element_size() for element in self.first(self.size) for part in element)

    def first(self, count: int = 1) -> list[Element]:
        """Up to ``count`` next elements (in storage order where the order is random), without taking them."""
        with self._lock:
            return [element for _, element in zip(range(count), self.elements, strict=False)]

    def submit(self, attempt: Attempt, after: Attempt | None = None) -> None:
        """Begin an attempt; behind ``after``, unless that is over or stands in the same line."""
        if attempt.kind != "size":
            self.used = time.time()
        with self._lock:
            heir = self.heir
            if heir is not None:
                pass
            elif after is None or after.is_over or (after.is_placed and after.line == attempt.line):
                self._placing.append(attempt)
            else:
                after.followers.append(attempt)
            over = self._settled()
        _tell(over)
        if heir is not None:
            attempt.machine = heir
            heir.submit(attempt, after)
        elif self.starters and attempt.kind == "dequeue" and not attempt.is_over:
            for start in tuple(self.starters):
                start()

    def withdraw(self, attempts: Sequence[Attempt]) -> None:
        """Cancel attempts that are not over, without calling ``then``. Elements taken by a cancelled dequeue return.

        Those that an enqueue of several has put stay.
        """
        if self.heir is not None:
            self.heir.withdraw(attempts)
            return
        with self._lock:
            for attempt in attempts:
                attempt.then = _nobody
                self._end(attempt, error=Cancelled(f"an attempt on queue {self.name} was taken back"))
            over = self._settled()
        _tell(over)

    def look(self) -> None:
        """Time has passed: leases may be over."""
        with self._lock:
            over = self._settled()
        _tell(over)

    def abort(self, why: str) -> None:
        """Attempts that wait end with StepAborted."""
        with self._lock:
            for line in self.lines.values():
                for attempt in list(line):
                    self._end(attempt, error=StepAborted(why))
            self.closed = True
            over = self._settled()
        _tell(over)

    def give_back(self, attempts: Sequence[Attempt]) -> None:
        """Return the elements taken by these attempts, in the order of the queue, even beyond its capacity."""
        with self._lock:
            self._restore(attempts)
            self.lent.difference_update(attempts)
            over = self._settled()
        _tell(over)

    def put_front(self, elements: Sequence[Element]) -> None:
        """Put elements in front of the queue, even if the queue is full or closed."""
        if self.heir is not None:
            self.heir.put_front(elements)
            return
        with self._lock:
            end = self._front[0] if self._front else self._taken + 1
            room = (end - self._since) / (len(elements) + 1)
            self._come_back([self._since + room * (place + 1) for place in range(len(elements))], elements)
            over = self._settled()
        _tell(over)

    def keep(self, attempts: Iterable[Attempt]) -> None:
        """Commit lent attempts: the elements taken by these attempts are never returned."""
        with self._lock:
            self.lent.difference_update(attempts)
            over = self._settled()
        _tell(over)

    def leave(self, heir: QueueHost | None = None) -> tuple[dict[str, Any], list[torch.Tensor], list[Waiting]]:
        """Give up all elements: returns their facts and tensors, and the waiting attempts.

        heir: takes up what is submitted here from now on.
        """
        with self._lock:
            waiting: list[Waiting] = []
            for line in self.lines.values():
                self._restore(line)
                waiting += [(attempt, None) for attempt in line]
                line.clear()
            for attempt, _ in waiting:  # grows
                waiting += [(follower, attempt) for follower in attempt.followers]
                attempt.followers = []
            self.heir = heir
            self.lent.clear()
            return *self._contents(), waiting

    def fill(self, found: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Restore the contents of another queue, as `leave` gave them. The queue must be empty."""
        with self._lock:
            self.closed, self.marks = bool(found["closed"]), dict(found["marks"])
            self.elements.fill(found["facts"], tensors)

    # -- with the lock held -----------------------------------------------------------------------------------

    def _contents(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        facts, tensors = self.elements.contents()
        return {"closed": self.closed, "marks": dict(self.marks), "size": self.size, "facts": facts}, tensors

    def _copied(
        self, steps: Iterable[StepQueues], empty: Order, back: Iterable[Attempt] = ()
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:  # fmt: skip
        """The contents as if these steps, all waiting dequeues, and ``back`` had returned their elements: facts,
        tensors.

        empty: an order as its own.
        """
        found, tensors = self._contents()
        twin = QueueMachine(self.name, self.capacity, empty)
        empty.fill(found["facts"], [tensor.clone() for tensor in tensors])
        twin._front, twin._since = [*self._front], self._since
        taken = [attempt for step in steps for attempt in step.attempts if attempt.machine is self]
        taken += [attempt for attempt in back if attempt.machine is self]
        twin._come_back(*_taken(dict.fromkeys([*self.lines["dequeue"], *taken])))
        facts, tensors = empty.contents()
        return {**found, "size": len(empty), "facts": facts}, tensors

    def _become(self, other: QueueMachine) -> None:
        """Replace the contents by those of `other`. Taken elements never return; attempts of steps are aborted."""
        self.elements, self.closed, self.marks = other.elements, other.closed, other.marks
        self._front, self._since = [], self._taken
        self.cause = None  # who fills it may go on
        for attempt in self.lent:
            attempt.numbers, attempt.taken = [], []
        self.lent.clear()
        for line in self.lines.values():
            for attempt in list(line):
                attempt.numbers, attempt.taken = [], []
                if attempt.step is not None or attempt.mark is not None or attempt.kind == "close":
                    self._end(attempt, error=Aborted(f"{attempt.act}: {_RESTORED}"))
                elif self.closed and attempt.line == "enqueue" and not self._comes_late(attempt):
                    self._refuse(attempt)

    @property
    def _fill(self) -> str:
        most = "" if self.capacity == math.inf else f" of {self.capacity}"
        return f"{self.size}{most} {self.elements.noun}"

    def _settled(self) -> list[Attempt]:
        """Do all that can be done; the attempts that are over now."""
        while self._placing or self._proceeds():
            while self._placing:
                self._place(self._placing.popleft())
        over, self._over = self._over, []
        return over

    def _place(self, attempt: Attempt) -> None:
        """Put an attempt into its line, or end the attempt; followers of the same line are placed next."""
        if attempt.is_over:
            return
        if attempt.step is not None and attempt.step.is_void:
            self._end(attempt, error=Aborted(f"{attempt.act}: {_RESTORED}"))
            return
        attempt.is_placed = True
        self._placing.extend(f for f in attempt.followers if f.line == attempt.line)
        attempt.followers = [f for f in attempt.followers if f.line != attempt.line]
        if not attempt.line:
            try:
                attempt.answer = attempt.question(self.elements)
                self._end(attempt)
            except TfnbError as error:
                self._end(attempt, error=error)
        elif attempt.asks_nothing:
            self._end(attempt)
        elif attempt.kind == "close" and attempt.cancel_pending:
            self._cancel_pending()
            self.elements.cancel()
            self.closed = True
            self._end(attempt)
        elif self.closed and attempt.line == "enqueue" and not self._comes_late(attempt):
            self._refuse(attempt)
        else:
            self.lines[attempt.line][attempt] = None

    def _proceeds(self) -> bool:
        """Let the head of a line proceed; False if neither can."""
        puts, takes = self.lines["enqueue"], self.lines["dequeue"]
        put, take = next(iter(puts)) if puts else None, next(iter(takes)) if takes else None
        if take is not None and (spare := self.elements.spare(self.closed, self._required(take))):
            self._take(take, spare)
        elif put is not None and put.kind == "close":
            self.closed = True
            self._end(put)
            for late in list(self.lines["enqueue"]):
                if not self._comes_late(late):
                    self._refuse(late)
        elif put is not None and self.size < self.capacity:
            self._put(put)
        elif take is not None and self.closed and self._gets_no_more(take):
            self._end_short(take)
        else:
            return False
        return True

    def _required(self, take: Attempt) -> int:
        """The number of stored elements that a dequeue needs before taking any, limited by the capacity."""
        return max(take.required, int(min(take.count - len(take.taken), self.capacity)))

    def _comes_late(self, attempt: Attempt) -> bool:
        """Whether an attempt may put something though the queue is closed."""
        return attempt.kind == "enqueue" and self.elements.takes_late(attempt.elements)

    def _gets_no_more(self, attempt: Attempt) -> bool:
        """Whether a dequeue on a closed queue that has taken the last elements would wait in vain."""
        if self.lent:
            return False
        return attempt.up_to or len(attempt.taken) + self.elements.coming() < attempt.count

    def _take(self, attempt: Attempt, spare: int) -> None:
        """Let a dequeue take up to ``spare`` elements; the dequeue ends when all of its elements are taken."""
        count, take = min(spare, attempt.count - len(attempt.taken)), self.elements.take
        attempt.taken += [take() for _ in range(count)]
        back, self._front = self._front[:count], self._front[count:]
        self._taken += count - len(back)
        attempt.numbers += [*back, *range(self._taken - count + len(back) + 1, self._taken + 1)]
        if len(attempt.taken) == attempt.count:
            self._end(attempt)

    def _restore(self, attempts: Iterable[Attempt]) -> None:
        """Return the elements taken by attempts to their places, before elements that were taken later."""
        some = [attempt for attempt in attempts if attempt.taken]  # most that are cancelled took nothing
        self._come_back(*_taken(some))
        for attempt in some:
            attempt.numbers, attempt.taken = [], []

    def _come_back(self, numbers: Sequence[float], elements: Sequence[Element]) -> None:
        """Return elements, the last taken first: each goes before elements taken later, also among equal ranks."""
        for number, element in sorted(zip(numbers, elements, strict=True), key=itemgetter(0), reverse=True):
            if number > self._since:
                place = bisect_left(self._front, number)
                self._front.insert(place, number)
                self.elements.put_back(element, place)

    def _put(self, attempt: Attempt) -> None:
        """Let an enqueue put elements while there is room; the enqueue ends when all are put."""
        held, elements = self.elements, attempt.elements
        try:
            while attempt.enqueued < len(elements) and len(held) < self.capacity:
                attempt.kept += held.put(elements[attempt.enqueued])
                attempt.enqueued += 1
        except TfnbError as error:
            self._end(attempt, error=error)
            return
        if attempt.enqueued == len(attempt.elements):
            self._end(attempt)

    def _end_short(self, attempt: Attempt) -> None:
        """A dequeue on a closed queue that gets no more elements."""
        if attempt.up_to and attempt.taken:
            self._end(attempt)
            return
        text = f"(requested {attempt.count}, current size {self.size + len(attempt.taken)})"
        error = OutOfRange(f"queue {self.name} is closed and has insufficient elements {text}")
        error.__cause__ = self.cause
        self._end(attempt, error=error)

    def _refuse(self, attempt: Attempt) -> None:
        already = " already" if attempt.kind == "close" else ""
        text = f"queue {self.name} is{already} closed ({self._fill})"
        self._end(attempt, error=QueueClosed(text))

    def _cancel_pending(self) -> None:
        for pending in list(self.lines["enqueue"]):
            error = Cancelled(f"queue {self.name} was closed, and its pending enqueues cancelled ({self._fill})")
            self._end(pending, error=error)

    def _end(self, attempt: Attempt, *, error: TfnbError | None = None) -> None:
        if attempt.is_over:
            return
        attempt.error, attempt.is_over = error, True
        if error is None:
            self.past[attempt.kind].add(attempt.what or "a call")
            if attempt.lends and attempt.taken:
                self.lent.add(attempt)
            if attempt.mark is not None:
                self.marks[attempt.mark[0]] = attempt.mark[1]
        else:
            error.enqueued = attempt.enqueued
            if attempt.taken:
                self._restore([attempt])
        if attempt.line in self.lines:
            self.lines[attempt.line].pop(attempt, None)
        self._over.append(attempt)
        self._placing.extend(attempt.followers)
        attempt.followers = []


_RESTORED = "a queue was restored to what it held at another time. Run this step again"


def copied(
    machines: Mapping[QueueMachine, Order], moves: Callable[[StepQueues], bool] = lambda step: step.has_put,
    back: Collection[Attempt] = (),
) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:  # fmt: skip
    """Facts and tensors of several queues at one moment, as if all steps under way were aborted then.

    Of each an empty order as its own. moves: whether what a step took stays taken. back: attempts that would give back
    what they took.
    """
    with _locked(machines):
        stopped = [step for step in [*UNDER_WAY] if not moves(step)]
        return [machine._copied(stopped, empty, back) for machine, empty in machines.items()]


def become(machines: Mapping[QueueMachine, QueueMachine]) -> None:
    """Replace the contents of each queue by another's, all at one moment. Steps that used one of them raise Aborted."""
    with _locked(machines):
        for step in [*UNDER_WAY]:
            step.is_void |= any(attempt.machine in machines for attempt in step.attempts)
        for machine, other in machines.items():
            machine._become(other)
        over = [attempt for machine in machines for attempt in machine._settled()]
    _tell(over)


def _locked(machines: Iterable[QueueMachine]) -> ExitStack:
    """The locks of all, always taken in the same order."""
    stack = ExitStack()
    for machine in sorted(machines, key=id):
        stack.enter_context(machine._lock)
    return stack


def give_back(done: Sequence[Attempt]) -> None:
    """Return the elements dequeued by a step that wrote nothing; none if the step has enqueued elements."""
    if any(map(_has_put, done)):
        return
    for machine in dict.fromkeys(attempt.machine for attempt in done):
        machine.give_back([attempt for attempt in done if attempt.machine is machine])


def _has_put(attempt: Attempt) -> bool:
    return attempt.kind == "enqueue" and attempt.enqueued > 0


def _taken(attempts: Iterable[Attempt]) -> tuple[list[float], list[Element]]:
    """The numbers of all that attempts took, and the elements."""
    some = [attempt for attempt in attempts if attempt.taken]
    return [n for attempt in some for n in attempt.numbers], [e for attempt in some for e in attempt.taken]


def _tell(over: Sequence[Attempt]) -> None:
    for attempt in over:
        attempt.tell()


def _nobody(attempt: Attempt) -> None:
    pass
