"""Recovery of a queue whose server is lost: a copy of the contents, and this process's operations since the copy.

A server numbers the ends of a channel's operations. A copy names the last end that it includes, so that later
operations can be replayed on the copy after the loss of the server. Operations of other processes since the copy are
undone. In the event loop, without waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tfnb.cluster.server.objects import read_queue, write_queue
from tfnb.cluster.wire.envelope import size
from tfnb.errors import TfnbError
from tfnb.graph.queue import Queue
from tfnb.state.orders import Element, packed
from tfnb.state.queue_contents import QueueSnapshot
from tfnb.state.queue_machine import Attempt, QueueMachine
from tfnb.state.queue_operations import attempt_on, made, outcome

EXCHANGEABLE = ("fifo", "padding", "shuffle", "priority")
"""Kinds of queues from whose middle elements may be removed without other effects."""


@dataclass(frozen=True, slots=True)
class ChannelMark:
    """The part of one channel's history that a copy of a queue includes.

    An end is the result of an operation, by the number that the server gave it. ``ended``: the last one; ``heard``: the
    last one that the channel acknowledged: elements dequeued under later ends are in the copy. ``put``: by number of an
    open or unacknowledged enqueue, the elements in the copy; ``over``: numbers of such enqueues, and of closes, that
    had ended well.
    """

    ended: int = 0
    heard: int = 0
    put: Mapping[int, int] = field(default_factory=dict)
    over: frozenset[int] = frozenset()

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ChannelMark:
        """The mark from a server's answer."""
        put = {int(number): int(count) for number, count, _ in told["put"]}
        over = frozenset(int(number) for number, _, is_over in told["put"] if is_over)
        return cls(int(told["ended"]), int(told["heard"]), put, over)

    def has(self, serial: int, kind: str) -> bool:
        """Whether the copy includes the effect of the end with this serial."""
        return serial <= (self.heard if kind == "dequeue" else self.ended)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A completed attempt: serial of the end, number of the act, enqueued elements, and outputs.

    first: number of the act's earlier elements, which the copy includes.
    """

    serial: int
    number: int
    attempt: Attempt
    elements: Sequence[Element]
    outputs: Sequence[torch.Tensor]
    first: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return size(self.outputs) + sum(map(size, self.elements))

    def behind(self, seen: ChannelMark) -> JournalEntry:
        """The entry without the elements that a copy includes."""
        first = max(self.first, seen.put.get(self.number, 0))
        return replace(self, elements=self.elements[first - self.first :], first=first)


class Restoration(NamedTuple):
    """Restored contents of a queue, and by act number the further elements put by unfinished enqueues."""

    held: QueueSnapshot
    put: Mapping[int, int]


@dataclass
class Journal:
    """A copy of a queue, if any, and the operations that ended since the copy."""

    held: QueueSnapshot | None = None
    seen: ChannelMark = ChannelMark()
    done: list[JournalEntry] = field(default_factory=list)
    nbytes: int = 0  # of what ended since
    era: int = 0  # copies of an earlier one are of other contents

    def add(self, serial: int, number: int, attempt: Attempt, begun: int, outputs: Sequence[torch.Tensor]) -> None:
        """Record an ended attempt: its elements from number ``begun`` on, or its ``outputs``."""
        if self.held is None or attempt.kind == "size" or self.seen.has(serial, attempt.kind):
            return
        elements = attempt.elements[begun : attempt.enqueued]
        done = JournalEntry(serial, number, attempt, elements, [tensor.clone() for tensor in outputs]).behind(self.seen)
        if attempt.error is not None and not done.elements:
            return
        self.done.append(done)
        self.nbytes += done.nbytes

    def copied(self, era: int, held: QueueSnapshot, seen: ChannelMark) -> None:
        """Replace the copy by a newer one, if requested in the present era."""
        if era != self.era:
            return
        self.held, self.seen = held, seen
        self.done = [done.behind(seen) for done in self.done if not seen.has(done.serial, done.attempt.kind)]
        self.nbytes = sum(done.nbytes for done in self.done)

    def forget(self) -> None:
        """Discard the copy: the queue was given other contents, or the last training is over."""
        self.era += 1
        self.held, self.seen, self.done, self.nbytes = None, ChannelMark(), [], 0

    def now(self, queue: Queue, begun: Mapping[int, Attempt]) -> Restoration | None:
        """The contents of the queue without other processes' operations since the copy; None if unknown.

        begun: attempts that are not over, by the number of their act.
        """
        if self.held is None:
            return None
        puts = {
            number: attempt.elements[attempt.enqueued + self.seen.put.get(number, 0) :]
            for number, attempt in begun.items()
            if attempt.kind == "enqueue" and number not in self.seen.over
        }
        try:
            return self._again(queue, self.held, puts) or self._exchanged(queue, self.held, puts)
        except TfnbError:
            return None

    def _again(self, queue: Queue, held: QueueSnapshot, puts: Mapping[int, Sequence[Element]]) -> Restoration | None:
        """Replay all operations on the copy, in order; None if an outcome differs from the recorded one."""
        twin, machine = _twin(queue, held)
        acts: dict[int, JournalEntry | None] = {**dict.fromkeys(puts), **{done.number: done for done in self.done}}
        tried: dict[int, Attempt] = {}
        for number, done in sorted(acts.items()):
            if done is None:
                tried[number] = Attempt(machine, "enqueue", _nobody, elements=puts[number])
            elif done.attempt.kind == "enqueue":
                tried[number] = Attempt(machine, "enqueue", _nobody, elements=done.elements, mark=done.attempt.mark)
            else:
                tried[number] = attempt_on(twin, done.attempt.kind, _nobody, *done.attempt.call)
            machine.submit(tried[number])
        for done in self.done:
            attempt, (attrs, _) = tried[done.number], done.attempt.call
            if not attempt.is_over or attempt.error is not None:
                return None
            if done.attempt.error is None and not _same(outcome(twin, attempt, attrs), done.outputs):
                return None
        facts, tensors, _ = machine.leave()
        return Restoration(QueueSnapshot(facts, tensors), {number: tried[number].enqueued for number in puts})

    def _exchanged(
        self, queue: Queue, held: QueueSnapshot, puts: Mapping[int, Sequence[Element]]
    ) -> Restoration | None:
        """The contents regardless of order: copied, enqueued and waiting elements, without the dequeued ones.

        A dequeued element may have been put by another process since the copy.
        """
        kinds = {done.attempt.kind for done in self.done}
        whole = all(done.attempt.call[0].get("count") is None for done in self.done)
        if queue.kind not in EXCHANGEABLE or not kinds <= {"enqueue", "dequeue"} or not whole:
            return None
        _, machine = _twin(queue, held)
        left = machine.first(machine.size)
        for elements in (*(done.elements for done in self.done), *puts.values()):
            left += elements
        for done in self.done:
            if done.attempt.kind == "dequeue":
                at = next((at for at, element in enumerate(left) if _same(element, done.outputs)), None)
                left = left if at is None else [*left[:at], *left[at + 1 :]]
        marks = dict(done.attempt.mark for done in self.done if done.attempt.mark is not None)
        facts, tensors = packed(left)
        order = {**held.found["facts"], **facts}
        found = {**held.found, "marks": {**held.found["marks"], **marks}, "size": len(left), "facts": order}
        return Restoration(QueueSnapshot(found, tensors), {number: len(elements) for number, elements in puts.items()})


def _twin(queue: Queue, held: QueueSnapshot) -> tuple[Queue, QueueMachine]:
    """A queue of the same kind with copies of these contents."""
    twin = read_queue(write_queue(queue))
    machine = twin.machine = made(twin)
    machine.fill(held.found, [tensor.clone() for tensor in held.tensors])
    return twin, machine


def _same(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether two series of tensors are equal, bit by bit."""
    pairs = list(zip(some, others, strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _nobody(attempt: Attempt) -> None:
    """Ignore the end of a replayed attempt."""
