"""A task of a step over two tasks is killed at each state of the step: it is done once, or there is one typed error.

The process that reaches a state kills the victim there and then: nothing is left to the clock.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from distributed import Client

import tfnb
from tests.cluster.conftest import until
from tests.cluster.test_parts_there import assert_nothing_left, members
from tests.over_tasks import on
from tfnb.cluster.tasks import exchange
from tfnb.cluster.wire.messages import Peer
from tfnb.errors import WorkerLost


class State(NamedTuple):
    """A state of a step: a method of a task, before or after which it is reached there.

    ``owner``: whose method. by_other: the task that is not killed reaches it.
    """

    name: str
    owner: str
    method: str
    is_before: bool
    by_other: bool = False


AT_TASKS = [
    State("called", "task", "_step", is_before=True),
    State("has its values", "task", "_look_up", is_before=False),
    State("began", "exchange", "begin", is_before=False),
    State("wants a value", "round", "want", is_before=True),
    State("waits for a value", "round", "want", is_before=False),
    State("told a value", "round", "tell", is_before=False),
    State("its value came", "meeting", "_meet", is_before=True, by_other=True),
    State("the other has computed", "task", "_stage", is_before=True, by_other=True),
    State("computed", "task", "_stage", is_before=True),
    State("staged", "task", "_stage", is_before=False),
    State("ended", "exchange", "end", is_before=False),
]
MAY_HAVE_ANSWERED = ("the other has computed", "ended")  # then the step needs the victim no more


def kill_at(peer: Peer, state: State, victim: int, dask_worker: Any) -> None:
    """On the worker of a task, in its event loop: kill a process when the task is in a state."""
    task = dask_worker.state.actors[peer.key].task
    mine = {"task": task, "exchange": task.exchange, "meeting": task.exchange._meeting, "round": exchange._RoundPeers}
    owner = mine[state.owner]
    method = getattr(owner, state.method)

    def killed(is_before: bool) -> None:
        if state.is_before == is_before:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    async def awaited(*args: Any, **more: Any) -> Any:
        killed(True)
        found = await method(*args, **more)
        killed(False)
        return found

    def called(*args: Any, **more: Any) -> Any:
        killed(True)
        found = method(*args, **more)
        killed(False)
        return found

    setattr(owner, state.method, awaited if state.method in ("_step", "_look_up", "_stage") else called)


def heal(peer: Peer, dask_worker: Any) -> None:
    """On the worker of a task that was not killed: take `kill_at` away."""
    task = dask_worker.state.actors[peer.key].task
    for owner in (task, task.exchange, task.exchange._meeting):
        for state in AT_TASKS:
            vars(owner).pop(state.method, None)


class Step:
    """A step both of whose tasks wait for each other, and write a Variable each; numbers are whole."""

    def __init__(self) -> None:
        self.a, self.b = (tfnb.Variable(torch.zeros(8, 8), name=name) for name in "ab")
        with tfnb.record():
            self.x = tfnb.placeholder(torch.ones(8, 8), shape=(8, 8), name="x")
            with on(0):
                h = self.x + 1
            with on(1):
                z = h * 2
            with on(0):
                y = z + h
                first = self.a.assign_add(y)
            with on(1):
                second = self.b.assign_add(y + z)
            self.fetches = [y, first, second]

    def run(self) -> float:
        return float(tfnb.run(self.fetches, {self.x: torch.ones(8, 8)}, timeout=90)[0][0, 0])

    @property
    def steps(self) -> float:
        """How often it was written; fails where the Variables are not of one step."""
        a, b = tfnb.run([self.a, self.b], timeout=60)
        assert torch.equal(a, torch.full_like(a, float(a[0, 0]))) and torch.equal(a * 10, b * 6)
        return float(a[0, 0]) / 6


def pid_of(member: Any) -> int:
    return int(member.info["pid"])


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked how."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def arm(dask: Client, cluster: Any, state: State, who: int) -> int:
    """Let a task be killed in a state of the next step; its process."""
    victim, other = members(cluster)[who], members(cluster)[1 - who]
    at = other if state.by_other else victim
    dask.run(kill_at, at.peer, state, pid_of(victim), workers=[at.peer.addr])
    return pid_of(victim)


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "state",
    [pytest.param(one, marks=[pytest.mark.slow] * (one.name != "waits for a value"), id=one.name) for one in AT_TASKS],
)
def test_a_task_killed_in_any_state_is_replaced_and_the_step_is_done_once(connect, dask, state: State, who: int):
    step, cluster = Step(), connect(2)
    assert step.run() == 6.0
    other = members(cluster)[1 - who]
    pid = arm(dask, cluster, state, who)
    assert step.run() == 6.0
    until(lambda: is_gone(pid), 20)
    dask.run(heal, other.peer, workers=[other.peer.addr])
    assert step.steps == 2
    assert step.run() == 6.0 and step.steps == 3
    assert_nothing_left(dask)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("state", AT_TASKS, ids=[one.name for one in AT_TASKS])
def test_without_a_successor_there_is_one_typed_error_and_nothing_is_written(
    connect, dask, nobody_joins, state: State, who: int
):
    step, cluster = Step(), connect(2)
    assert step.run() == 6.0
    other = members(cluster)[1 - who]
    pid = arm(dask, cluster, state, who)
    try:
        assert step.run() == 6.0
        steps = 2
    except WorkerLost as error:
        assert re.search(rf"parts on task:0, task:1, and task:{who} is gone; nothing", str(error))
        steps = 1
    assert steps == 1 or state.name in MAY_HAVE_ANSWERED
    until(lambda: is_gone(pid), 20)
    dask.run(heal, other.peer, workers=[other.peer.addr])
    assert step.steps == steps
    assert_nothing_left(dask)


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("method", "is_before"),
    [
        pytest.param("prepare", True, id="before it is prepared", marks=pytest.mark.slow),
        pytest.param("commit", True, id="prepared"),
        pytest.param("commit", False, id="committed and not told", marks=pytest.mark.slow),
    ],
)
def test_a_task_killed_while_servers_write_loses_nothing_of_the_step(
    connect, dask, nobody_joins, method: str, is_before: bool, who: int
):
    """What the step computed is on the servers by then: it needs no task any more."""
    step, cluster = Step(), connect(2)
    assert step.run() == 6.0
    pid, settled_on = pid_of(members(cluster)[who]), cluster._engine.peers.settled_on
    seen: list[str] = []

    def kill(found: set[str], is_now_before: bool) -> None:
        if method in found and is_now_before == is_before and not seen:
            seen.append(method)
            os.kill(pid, signal.SIGKILL)
            until(lambda: is_gone(pid), 20)

    async def watched(asks: Any) -> Any:
        found = {ask.method for ask in asks}
        kill(found, True)
        answers = await settled_on(asks)
        kill(found, False)
        return answers

    cluster._engine.peers.settled_on = watched
    assert step.run() == 6.0
    cluster._engine.peers.settled_on = settled_on
    assert seen == [method] and step.steps == 2
    assert_nothing_left(dask)
