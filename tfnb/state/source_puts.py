"""Elements of sources on their way into queues: a position that is saved is behind those that are there.

Who puts an element reads it first, and may have to wait for room. Until it is in its queue the position that counts is
the one before it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tfnb.errors import DeadlineExceeded, QueueClosed
from tfnb.graph.variable_locks import PATIENCE
from tfnb.state.input_sources import Position, Source
from tfnb.state.queue_operations import machine_of
from tfnb.state.queues import TensorQueue
from tfnb.state.waits import POLL


@dataclass(eq=False, slots=True)
class _Hand:
    """Takes elements of one source to a queue, one at a time. count: of those that it took up.

    turn: while an element is on its way; lock: while that begins or ends. before: the position before that element;
    after: where it left the source, the very dict: another one is there as soon as somebody seeks.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    count: int = 0
    before: Position | None = None
    after: Position | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    lock: threading.Lock = field(default_factory=threading.Lock)


_HANDS: WeakKeyDictionary[Source, _Hand] = WeakKeyDictionary()
_MAKING = threading.Lock()


def _hand(source: Source) -> _Hand:
    with _MAKING:
        return _HANDS.setdefault(source._root, _Hand())


@contextmanager
def _turn(hand: _Hand, queue: TensorQueue) -> Iterator[None]:
    """Until no other element of the source is on its way, to whichever queue; not for a queue that is closed."""
    while not hand.turn.acquire(timeout=POLL):
        if machine_of(queue).level.closed:
            raise QueueClosed(f"queue {queue.name} was closed while another element of its source was on its way")
    try:
        yield
    finally:
        hand.turn.release()


def put_next(queue: TensorQueue, source: Source) -> None:
    """Put the next element of a source; where it is not put the source is before it again.

    Raises OutOfRange at the end of the source, and what an enqueue raises.
    """
    hand, root = _hand(source), source._root
    with _turn(hand, queue):
        with hand.lock:
            before, element = source.position, source.read()
            hand.count += 1
            try:
                begun = queue._begin_put(
                    tuple(element) if isinstance(element, list) else element, (hand.id, hand.count)
                )
            except BaseException:
                source.seek(before)
                raise
            hand.before, hand.after = before, root._position
        try:
            queue._wait(*begun, {})
        except BaseException:
            with hand.lock:
                if root._position is hand.after:
                    source.seek(before)
                hand.before = hand.after = None
            raise
        with hand.lock:
            hand.before = hand.after = None


@contextmanager
def standing(sources: Iterable[Source]) -> Iterator[None]:
    """A block in which no further element of these is read on its way to a queue.

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
    """The position of a source that stands behind what is in queues with these marks."""
    hand = _hand(source)
    is_sought = source._root._position is not hand.after
    if hand.before is None or is_sought or any(mark.get(hand.id) == hand.count for mark in marks):
        return source.position
    return dict(hand.before)
