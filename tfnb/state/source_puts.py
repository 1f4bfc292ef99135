"""Elements of sources on their way into queues: a saved position is behind the elements that have arrived.

Who puts an element reads it first, and may have to wait for room. Until it is in its queue the position that counts is
the one before it. Where several queues share a source, one that has room gets the element that waits for another one.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from tfnb.errors import Cancelled, DeadlineExceeded, QueueClosed
from tfnb.graph.variable_locks import PATIENCE
from tfnb.state.input_sources import Position, Source
from tfnb.state.queue_machine import Attempt, QueueMachine
from tfnb.state.queue_operations import machine_of
from tfnb.state.queues import TensorQueue
from tfnb.state.waits import POLL, Runner


@dataclass(eq=False, slots=True)
class _Hand:
    """Moves the elements of one source into queues, one at a time. count: elements begun so far.

    turn: while an element is on its way; lock: while that begins or ends. before: the position before that element;
    after: where it left the source, the very dict: another one is there as soon as somebody seeks. waiting: where it
    waits for room, until somebody takes it back; kept: it waits no more, and who read it from what. asker: the queue
    that has room, and gets the waiting element.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    count: int = 0
    before: Position | None = None
    after: Position | None = None
    waiting: tuple[TensorQueue, Attempt, Runner] | None = None
    asker: TensorQueue | None = None
    kept: tuple[Source, Any] | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_of(self, source: Source) -> tuple[Position, Any]:
        """The next element, and the position before the element. The caller holds the lock."""
        kept, self.kept = self.kept, None
        if kept is not None and self.before is not None and source._root._position is self.after:
            if kept[0] is source:
                return self.before, kept[1]
            source.seek(self.before)  # it is made in another way there
        return source.position, source.read()

    def give_up(self, source: Source) -> None:
        """Set the source back before the element, unless the source was sought meanwhile. The caller holds the lock."""
        if self.before is not None and source._root._position is self.after:
            source.seek(self.before)
        self.before = self.after = self.waiting = self.kept = None


_HANDS: WeakKeyDictionary[Source, _Hand] = WeakKeyDictionary()
_MAKING = threading.Lock()
_SHORT = 0.005  # seconds between looks at a queue here


def _hand(source: Source) -> _Hand:
    with _MAKING:
        return _HANDS.setdefault(source._root, _Hand())


@contextmanager
def _turn(hand: _Hand, queue: TensorQueue, source: Source) -> Iterator[None]:
    """Wait until no other element of the source is on its way to any queue; raises QueueClosed if the queue closes
    meanwhile.

    One that waits for room elsewhere is taken over where this queue has some.
    """
    if not _is_mine(hand, queue):
        try:
            with Runner(may=lambda: [(machine_of(queue), "enqueue")]):  # who waits for an element sees who will put it
                while not _is_mine(hand, queue):
                    if machine_of(queue).level.closed:
                        raise QueueClosed(
                            f"queue {queue.name} was closed while another element of its source was on its way"
                        )
                    if hand.asker is None and _has_room(queue):
                        _ask(hand, queue)
        except BaseException:
            with hand.lock:
                hand.asker = None if hand.asker is queue else hand.asker
                if hand.kept is not None:
                    hand.give_up(source)
            raise
    try:
        yield
    finally:
        hand.turn.release()


def _is_mine(hand: _Hand, queue: TensorQueue) -> bool:
    """Try to take the turn, unless promised to another queue; waits a while."""
    seconds = _SHORT if isinstance(machine_of(queue), QueueMachine) else POLL
    if hand.asker not in (None, queue):
        time.sleep(seconds)
        return False
    if not hand.turn.acquire(timeout=seconds):
        return False
    with hand.lock:
        if hand.asker not in (None, queue):
            hand.turn.release()
            return False
        hand.asker = None
    return True


def _has_room(queue: TensorQueue) -> bool:
    return int(queue._act("size", {})[0]) < queue.capacity


def _ask(hand: _Hand, queue: TensorQueue) -> None:
    """Take over an element that waits for room in another queue, if there is one."""
    with hand.lock:
        if hand.waiting is None or hand.waiting[0] is queue or hand.asker is not None:
            return
        _, attempt, runner = hand.waiting
        hand.asker, hand.waiting = queue, None
        attempt.machine.withdraw([attempt])
        runner.inbox.put(None)  # it looks


def put_next(queue: TensorQueue, source: Source) -> None:
    """Enqueue the next element of a source; on failure the source stands before the element again.

    Raises OutOfRange at the end of the source, and what an enqueue raises.
    """
    hand = _hand(source)
    while not _is_put(hand, queue, source):
        pass


def _is_put(hand: _Hand, queue: TensorQueue, source: Source) -> bool:
    """Try to enqueue the next element; False if another queue took the element over meanwhile."""
    with _turn(hand, queue, source):
        with hand.lock:
            before, element = hand.next_of(source)
            hand.before, hand.after = before, source._root._position
            hand.count += 1
            try:
                parts = tuple(element) if isinstance(element, list) else element
                begun = queue._begin_put(parts, (hand.id, hand.count))
            except BaseException:
                hand.give_up(source)
                raise
            hand.waiting = (queue, *begun)
        try:
            queue._wait(*begun, {})
        except BaseException as error:
            with hand.lock:
                if isinstance(error, Cancelled) and hand.waiting is None:  # who took it back may have left since
                    hand.kept = source, element
                    return False
                hand.give_up(source)
            raise
        with hand.lock:
            hand.before = hand.after = hand.waiting = None
        return True


@contextmanager
def standing(sources: Iterable[Source]) -> Iterator[None]:
    """A block in which no further element of the sources is read on its way to a queue.

    Raises DeadlineExceeded where somebody reads one for too long.
    """
    hands = {_hand(source): source for source in sources}
    with ExitStack() as stack:
        for hand in sorted(hands, key=id):
            if not hand.lock.acquire(timeout=PATIENCE):
                raise DeadlineExceeded(f"source {hands[hand].name} is being read for more than {PATIENCE:g} s")
            stack.callback(hand.lock.release)
        yield


def position_behind(source: Source, marks: Iterable[Mapping[str, int]]) -> Position:
    """The position of a source behind the elements that have arrived, judged by the marks of its queues."""
    hand = _hand(source)
    is_sought = source._root._position is not hand.after
    if hand.before is None or is_sought or any(mark.get(hand.id) == hand.count for mark in marks):
        return source.position
    return dict(hand.before)
