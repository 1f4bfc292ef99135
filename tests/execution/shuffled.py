"""A step in parts whose steps, tasks and messages come in a random order, and what holds of any cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import tfnb
from tfnb.execution.dataflow import executor
from tfnb.execution.dataflow.executor import Dataflow, Driver
from tfnb.execution.dataflow.machine import Machine, Task
from tfnb.graph.subgraph import nested
from tfnb.passes.flow import frames, step_flow
from tfnb.passes.flow.cut import ELSEWHERE, RECV, Part
from tfnb.passes.flow.places import Place

Message = tuple[int, tuple[int, ...]]
"""An edge, and the iteration that its value is for."""


class ShuffledPeers:
    """Messages that arrive in a random order. Raises AssertionError for one that is sent or wanted twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.flying: dict[Message, tuple[Any, Any]] = {}
        self.wanted: dict[Message, Callable[..., None]] = {}
        self.sent: set[Message] = set()
        self.taken: set[Message] = set()

    def tell(self, edge: int, to: int, tag: tuple[int, ...], value: Any, dead: Any) -> None:
        """See `tfnb.execution.dataflow.machine.Peers`."""
        assert (edge, tag) not in self.sent, f"edge {edge} carried two values for {tag}"
        self.sent.add((edge, tag))
        self.flying[edge, tag] = value, dead

    def want(self, edge: int, tag: tuple[int, ...], deliver: Callable[..., None]) -> None:
        """See `tfnb.execution.dataflow.machine.Peers`."""
        assert (edge, tag) not in self.taken, f"edge {edge} was wanted twice for {tag}"
        self.taken.add((edge, tag))
        self.wanted[edge, tag] = deliver

    def leave(self) -> None:
        """See `tfnb.execution.dataflow.executor.WaitingPeers`."""

    def deliver(self) -> bool:
        """Let one message arrive that somebody waits for; False if there is none."""
        ready = sorted(self.flying.keys() & self.wanted.keys())
        if ready:
            message = self.rng.choice(ready)
            self.wanted.pop(message)(*self.flying.pop(message))
        return bool(ready)


class ShuffledDriver(Driver):
    """One step whose machine does what is ready, tasks and messages in a random order."""

    rng: random.Random
    messages: int

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.peers = self.machine.peers = ShuffledPeers(self.rng)
        self.machine.run = lambda: Machine.run(self.machine, self.rng.randrange)  # type: ignore[method-assign]

    def drive(self, *start: Any) -> list[Any]:
        """See `Driver.drive`; all messages were taken then."""
        found = super().drive(*start)
        assert self.peers.sent == self.peers.taken and not self.peers.flying and not self.peers.wanted
        type(self).messages += len(self.peers.sent)
        return found

    def _advance(self) -> None:
        tasks = self.machine.tasks
        if (not tasks or self.rng.random() < 0.5) and self.peers.deliver():
            return
        if tasks:
            task: Task = tasks.pop(self.rng.randrange(len(tasks)))
            self.machine.finish(task, task.step.call(*task.args))  # type: ignore[misc]
        else:
            assert self.machine.waits, f"nobody sends what is waited for: {sorted(self.peers.wanted)}"
            super()._advance()

    def _arrived(self, task: Task, value: Any, dead: Any) -> None:
        self.machine.came(task, value, dead)


@contextmanager
def shuffled(seed: int) -> Iterator[type[ShuffledDriver]]:
    """Steps in parts take random orders inside; gives a class that counts their ``messages``."""
    found = type("Driver", (ShuffledDriver,), {"rng": random.Random(seed), "messages": 0})
    with patch.object(executor, "Driver", found):
        yield found


def random_requests(seed: int, places: int, share: float) -> Callable[[Any], str | None]:
    """For `tfnb.device`: this share of all nodes ask for one of so many tasks each, softly."""
    rng = random.Random(seed)
    return lambda node: f"/task:{rng.randrange(places)}/soft" if rng.random() < share else None


@contextmanager
def cut_anew(seed: int, places: int, share: float) -> Iterator[None]:
    """Steps are cut by random requests, also those of gradient nodes, and not by those that were recorded."""
    rng = random.Random(seed)

    def requested(nodes: Any, tasks: Any = None) -> dict[int, Place]:
        every = [inner for node in nodes for inner in (node, *nested(node))]
        return {node.id: Place(rng.randrange(places)) for node in every if rng.random() < share}

    with patch.object(step_flow, "requested", requested):
        yield


def program_in_parts(session: tfnb.Session, fetches: Any, feeds: Any) -> Dataflow:
    """The step of a session in parts."""
    found: Dataflow = session._prepare(fetches, tuple(feeds)).code.program
    return found


def assert_cut(program: Dataflow) -> None:
    """Each value crosses once for each destination that takes it, and no part does anything in vain."""
    sent = [edge for part in program.parts for edge in part.sends]
    assert sorted(sent) == sorted(edge for part in program.parts for edge in part.receives)
    assert len({(edge.port, edge.to) for edge in sent}) == len(sent)
    for part in program.parts:
        _assert_wanted(part)


def _assert_wanted(part: Part) -> None:
    """Every op of a part leads to an end, a send or an effect of it, and none takes what is done elsewhere."""
    flow = part.flow
    ends = [port.op for end in part.ends.values() for port in (end.port, *end.after) if port is not None]
    stack = [*ends, *part.effects, *(number for number, op in enumerate(flow.ops) if op.kind == "send")]
    reached: set[int] = set()
    while stack:
        number = stack.pop()
        if number not in reached:
            reached.add(number)
            assert flow.ops[number].kind != ELSEWHERE
            stack += [port.op for port in flow.ops[number].sources]
    done = {number for number, op in enumerate(flow.ops) if op.kind not in (ELSEWHERE, frames.RUN, frames.FEED)}
    assert done <= reached, [flow.ops[number] for number in sorted(done - reached)]
    received = {number for number, op in enumerate(flow.ops) if op.kind == RECV}
    assert len(received) == len(part.receives) and received <= reached
