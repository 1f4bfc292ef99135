"""What a task more costs the machines of the notebook and of a server: counts, on the virtual clock, never times."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.alone.virtual import Call, Meter, VirtualServer, VirtualTraining, made
from tests.cluster.alone.virtual_clock import Clock
from tfnb.cluster.members.deploy import AT_ONCE, overlapping
from tfnb.cluster.members.registered import Registration
from tfnb.cluster.members.registry import ClusterTable
from tfnb.cluster.server.objects import write_queue
from tfnb.cluster.wire.messages import Peer
from tfnb.graph.queue import Queue

FEW, MANY, STEPS = 16, 64, 4


class Lines(Meter):
    """Counts the lines of Python that machines execute, a loop's lines in each iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __call__(self, who: str, call: Any, *args: Any) -> Any:
        def trace(frame: Any, event: str, arg: Any) -> Any:
            self.lines[who] += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return super().__call__(who, call, *args)
        finally:
            sys.settrace(before)


def slow_first(task: int, step: int) -> float:
    """The first task takes three times as long as the others, no two of which take equally long."""
    return (0.1 + 1e-5 * ((7919 * task + 104729 * step) % 1000)) * (1 if task else 3)


def counted(mode: str, tasks: int) -> VirtualTraining:
    training = made(mode, tasks, STEPS, slow_first, meter=Lines())
    training.run()
    assert training.known == training.steps
    return training


@pytest.mark.parametrize("mode", ["sync", "backup", "async", "bounded"])
def test_a_task_more_costs_the_machines_no_more_than_the_ones_before(mode: str) -> None:
    few, many = counted(mode, FEW), counted(mode, MANY)
    for who in ("notebook", "server"):
        each = [training.meter.lines[who] / tasks for training, tasks in ((few, FEW), (many, MANY))]
        assert each[1] < 1.25 * each[0], f"{who}: lines of Python for each task"
        calls = [training.meter.calls[who] / tasks for training, tasks in ((few, FEW), (many, MANY))]
        assert calls[1] < 1.1 * calls[0], f"{who}: messages of each task"


def waiting(tasks: int) -> float:
    """Lines of Python for each token that a server gives to one of so many tasks that wait for it."""
    meter, heard = Lines(), list[Any]()
    server = VirtualServer(Clock(), meter)

    def post(channel: str, number: int, act: list[Any], tensors: Any = ()) -> None:
        meta = {"channel": channel, "number": number, "got": number, "acts": [act]}
        server.ask(channel, Call("post", meta, tensors), lambda answer: None)
        server.clock.run(lambda: not server.is_busy)

    tokens = Queue("tokens", math.inf, [(torch.int64, ())], kind="tokens", options={"lease_ms": 60_000})
    post("chief", 0, ["make", 0, "tokens", {"queue": write_queue(tokens)}, 0])
    for task in range(tasks):
        post(f"task {task}", 0, ["do", 0, "tokens", {"kind": "dequeue", "attrs": {}, "what": "take"}, 0])
        server.ask(f"task {task}", Call("ends", {"channel": f"task {task}", "got": 0}), heard.append)
    before = meter.lines["server"]
    for task in range(tasks):
        act = ["do", task + 1, "tokens", {"kind": "enqueue", "attrs": {}, "what": "give"}, 1]
        post("chief", task + 1, act, [torch.tensor(task)])
    server.clock.run(lambda: len(heard) == tasks)
    assert sorted(int(answer.tensors[1]) for answer in heard) == [*range(tasks)]
    return (meter.lines["server"] - before) / tasks


def test_a_token_is_given_at_the_same_cost_however_many_wait_for_one() -> None:
    assert waiting(MANY) < 1.25 * waiting(FEW)


@pytest.mark.parametrize("tasks", [FEW, MANY])
def test_a_step_has_one_request_of_each_task(tasks: int) -> None:
    training = counted("sync", tasks)
    assert training.server.requests["contribute"] == STEPS * tasks
    training = counted("async", tasks)
    assert training.server.requests["push"] == training.server.requests["pull"] == STEPS * tasks


def test_a_few_workers_are_greeted_at_a_time_and_the_first_error_ends_the_others() -> None:
    busy = most = 0

    async def greeting(number: int) -> int:
        nonlocal busy, most
        busy, most = busy + 1, max(most, busy + 1)
        try:
            await asyncio.sleep(0)
            if number == MANY:
                raise ValueError("another version")
            return number
        finally:
            busy -= 1

    assert asyncio.run(overlapping(map(greeting, range(MANY)))) == [*range(MANY)] and most == AT_ONCE < MANY

    async def waiting(number: int) -> int:
        if number:
            await asyncio.Event().wait()
        return await greeting(MANY)

    with pytest.raises(ValueError, match="another version"):
        asyncio.run(overlapping(map(waiting, range(3))))


class Lossy(Registration):
    """An entry whose messages, or answers to them, get lost."""

    def __init__(self, table: ClusterTable, numbers: random.Random) -> None:
        super().__init__(SimpleNamespace(id="client"))  # type: ignore[arg-type]
        self.table, self.numbers, self.sent = table, numbers, 0

    async def _ask(self, method: str, **arguments: Any) -> Any:
        fate = self.numbers.random()
        if fate < 0.2:
            raise TimeoutError
        self.sent += len(arguments.get("tasks", ()))
        found = getattr(self.table, method)(self.cluster, **arguments)
        if fate > 0.8:
            raise TimeoutError
        return found


def member(name: str, incarnation: int) -> Any:
    return SimpleNamespace(name=name, peer=Peer(f"tcp://{name}", name, incarnation), shards=())


def test_a_task_that_joins_is_one_entry_for_the_registry() -> None:
    table, members = ClusterTable(), []
    entry = Lossy(table, SimpleNamespace(random=lambda: 0.5))  # type: ignore[arg-type]
    table.open(entry.cluster, "client")

    async def join() -> None:
        for number in range(MANY):
            members.append(member(f"task:{number}", number))
            await entry.publish(lambda: members)

    asyncio.run(join())
    assert entry.sent == MANY and table.clusters[entry.cluster]["tasks"].keys() == {m.name for m in members}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_registry_has_the_members_whatever_messages_were_lost(seed: int) -> None:
    numbers, table = random.Random(seed), ClusterTable()
    entry = Lossy(table, numbers)
    table.open(entry.cluster, "client")
    members: dict[str, Any] = {}

    async def live() -> None:
        for turn in range(12):
            name = f"task:{numbers.randrange(4)}"
            if name in members and numbers.random() < 0.5:
                del members[name]
            else:
                members[name] = member(name, turn)
            entry.copy = {"id": str(turn)}
            try:
                await entry.publish(members.values)
            except TimeoutError:
                continue
            found = table.clusters[entry.cluster]
            assert {n: t[2] for n, t in found["tasks"].items()} == {n: m.peer.incarnation for n, m in members.items()}
            assert found["copy"] == entry.copy

    asyncio.run(live())
