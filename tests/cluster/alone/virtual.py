"""A cluster of many tasks on a virtual clock: the real machines of a notebook and of a server, without sockets.

Tasks are coroutines: generators that yield seconds to wait, or a `Call` to the server whose answer they are sent. Only
the durations of kernels and of messages are modelled. Who spends processor time in a machine is counted by a `Meter`.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.cluster.alone.test_core import Add
from tests.cluster.alone.virtual_clock import Clock
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes.leases import Give, Leases, Offer, PieceProgress, Report
from tfnb.cluster.modes.rounds import Rounds
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import CoreTick, Reply, RequestArrival
from tfnb.cluster.server.cores import Cores
from tfnb.cluster.tasks.pieces import TaskShare
from tfnb.cluster.wire.messages import Ok, OpId, Refusal, Request
from tfnb.state.store import Store

SECONDS = 1.0  # between two ticks of a server


@dataclass
class Meter:
    """Processor seconds and calls of each machine."""

    seconds: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def __call__(self, who: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call, at the expense of somebody."""
        begin = time.thread_time()
        try:
            return call(*args)
        finally:
            self.seconds[who] += time.thread_time() - begin
            self.calls[who] += 1


@dataclass(frozen=True)
class Call:
    """A request of a task to the server."""

    method: str
    meta: dict[str, Any]
    tensors: Sequence[torch.Tensor] = ()


Loop = Generator["float | Call", Any, None]


class VirtualServer:
    """One shard. Messages take no time."""

    def __init__(self, clock: Clock, meter: Meter) -> None:
        self.clock, self.meter = clock, meter
        self.core = Core(Store(), lambda meta, tensors: Add(), epoch=1, incarnation=7)
        self.cores = Cores()
        self.cores.add(self.core)
        self.requests: Counter[str] = Counter()  # that came, by method
        self.sent = 0
        self._tickets = itertools.count()
        self._operations: dict[str, Iterator[int]] = {}  # by client
        self._waiting: dict[int, tuple[Call, OpId, Callable[[Ok], None]]] = {}
        for method, tensors, meta in (
            ("create", [torch.zeros(3)], {"keys": ["w"]}), ("register_shard", [], {"plan": "add"}),
            ("open_training", [], {"training": "t"}),
        ):  # fmt: skip
            self.ask("notebook", Call(method, meta, tensors), lambda answer: None)
        self.tick()

    def ask(self, client: str, call: Call, then: Callable[[Ok], None]) -> None:
        """Send a request; ``then`` gets the answer."""
        self.sent += 1
        op = OpId(client, next(self._operations.setdefault(client, itertools.count())))
        self.clock.at(self.clock.now, lambda: self._come(call, op, then))

    @property
    def is_busy(self) -> bool:
        """Whether requests are on their way."""
        return self.sent > sum(self.requests.values())

    def tick(self) -> None:
        """Time has passed for the server; calls that wait are answered that they wait, as on a real one."""
        self._carry_out(self.meter("server", self.cores.on, [(0, CoreTick())], self.clock.now))
        self.clock.at(self.clock.now + SECONDS, self.tick)

    def _come(self, call: Call, op: OpId, then: Callable[[Ok], None]) -> None:
        ticket = next(self._tickets)
        self.requests[call.method] += 1
        self._waiting[ticket] = call, op, then
        event = RequestArrival(ticket, Request(call.method, op, 1, 7, call.meta, list(call.tensors)))
        self._carry_out(self.meter("server", self.cores.on, [(0, event)], self.clock.now))

    def _carry_out(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            assert isinstance(effect, Reply), effect
            call, op, then = self._waiting.pop(effect.ticket)
            if isinstance(effect.answer, Refusal) and effect.answer.reason == "again":
                self._come(call, op, then)
                continue
            assert isinstance(effect.answer, Ok), effect.answer
            answer = effect.answer
            self.clock.at(self.clock.now, lambda answer=answer, then=then: then(answer))


class VirtualTraining:
    """A training of many tasks on one server: the machine of a mode on the notebook's side, and a loop for each task.

    seconds: that the kernels of a task take for a step, by the task and the step.
    """

    def __init__(
        self, machine: Rounds | Leases, tasks: int, steps: int, seconds: Callable[[int, int], float],
        staleness: int | None = None, meter: Meter | None = None,
    ) -> None:  # fmt: skip
        self.clock, self.meter = Clock(), meter or Meter()
        self.server = VirtualServer(self.clock, self.meter)
        self.machine, self.steps, self.seconds, self.staleness = machine, steps, seconds, staleness
        self.offered = self.known = 0  # steps
        self.queued: dict[int, list[Any]] = {task: [] for task in range(tasks)}
        self.loops: dict[int, Loop | None] = dict.fromkeys(range(tasks))
        self.end: e.Finish | None = None

    def run(self) -> None:
        """Train until the machine is at its end."""
        self.clock.run(lambda: self.clock.now > 0 or not self.server._waiting)
        self._feed(e.Start())
        self._offer()
        self.clock.run(lambda: self.known == self.steps)

    def _feed(self, event: Any) -> None:
        for instruction in self.meter("notebook", self.machine.on, event, self.clock.now):
            match instruction:
                case Give(task, piece):
                    about = self.machine.part(task) if isinstance(self.machine, Rounds) else None
                    self.queued[task].append((piece, about))
                    if self.loops[task] is None:
                        loop = self.loops[task] = self._synchronous(task) if about else self._asynchronous(task)
                        self._go_on(f"task {task}", loop, None)
                case Report(_, start, stop, _):
                    self.known += stop - start
                case e.Finish():
                    self.end = instruction

    def _offer(self) -> None:
        """Offer steps as long as the machine wants some."""
        if self.offered == self.steps or not self.meter("notebook", lambda: self.machine.wants):
            return
        for task in self.meter("notebook", lambda: self.machine.takers):
            left = self.steps - self.offered
            count = min(left, self.machine.next_size(left))
            if count:
                self.offered += count
                self._feed(Offer(tuple(range(self.offered - count, self.offered)), task))

    def _go_on(self, client: str, loop: Loop, sent: Any) -> None:
        """Let a task go on until it waits."""
        try:
            wanted = loop.send(sent)
        except StopIteration:
            return
        if isinstance(wanted, Call):
            self.server.ask(client, wanted, lambda answer: self._go_on(client, loop, answer))
        else:
            self.clock.at(self.clock.now + wanted, lambda: self._go_on(client, loop, None))

    def _tell(self, progress: PieceProgress) -> None:
        self._feed(progress)
        self._offer()

    def _synchronous(self, task: int) -> Loop:
        """The loop of a task in rounds: compute the part of a place, contribute, hear the next values."""
        place = None
        while self.queued[task]:
            piece, mine = self.queued[task][0]
            share = TaskShare(*mine)
            about = {"training": "t", "worker": share.worker, "shards": (0,), "reads": ["w"], "plan": "add"}
            about |= {"places": share.places, "parts": share.places} | ({"spare": True} if share.has_spare else {})
            at = 0
            while at < piece.count:
                number = piece.first + at
                place = share.place if place is None else place
                yield self.seconds(task, number)
                meta = {**about, "round": number, "place": place}
                answer = yield Call("contribute", meta, [torch.ones(3)])
                place = answer.meta.get("place", place)
                latest = min(answer.meta["latest"], piece.first + piece.count - 1)
                while piece.first + at <= latest:
                    at += 1
                    if answer.meta["counts"] or at == piece.count:
                        parts = share.places if share.has_spare else 0
                        self._tell(PieceProgress(task, piece.number, at, at - 1, parts))
            self.queued[task].pop(0)
        self.loops[task] = None

    def _asynchronous(self, task: int) -> Loop:
        """The loop of a task by itself: read, compute, push."""
        pull: dict[str, Any] = {"keys": ["w"]}
        clock, loop = 0, f"task {task}"
        if self.staleness is not None:
            pull |= {"training": "t", "loop": loop, "staleness": self.staleness}
            yield Call("enter", {"training": "t", "loop": loop, "clock": 0})
        while self.queued[task]:
            piece, _ = self.queued[task][0]
            for at in range(piece.count):
                yield Call("pull", pull)
                yield self.seconds(task, clock)
                clock += 1
                push = {"plan": "add"} | ({"training": "t", "loop": loop, "clock": clock} if "loop" in pull else {})
                yield Call("push", push, [torch.ones(3)])
                if at + 1 == piece.count:
                    self._tell(PieceProgress(task, piece.number, at + 1))
            self.queued[task].pop(0)
        self.loops[task] = None
        if self.staleness is not None:
            yield Call("depart", {"training": "t", "loop": loop})


def made(
    mode: str, tasks: int, steps: int, seconds: Callable[[int, int], float], meter: Meter | None = None
) -> VirtualTraining:  # fmt: skip
    """A training in a mode of `fit`, with so many steps of each task. backup: one spare task; bounded: by one step."""
    everybody, numbers = list(range(tasks)), itertools.count(1)
    if mode in ("sync", "backup"):
        machine: Rounds | Leases = Rounds(everybody, [0], numbers, spare=int(mode == "backup"))
    else:
        machine, steps = Leases(everybody, [0], numbers), steps * tasks
    return VirtualTraining(machine, tasks, steps, seconds, 1 if mode == "bounded" else None, meter)
