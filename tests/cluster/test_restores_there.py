"""A restore on a cluster is of everything or of nothing, whenever a server is killed or refuses."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
import tfnb.cluster.notebook.restoring
from tests.state.saved_queues import fifo
from tfnb.cluster.wire.messages import Failure
from tfnb.errors import ParameterServerLost, ResourceExhausted, Unavailable
from tfnb.state.queue_machine import QueueMachine

pytestmark = pytest.mark.filterwarnings("ignore:still waiting", "ignore:.* was lost")


class Saved:
    """Two Variables and two queues on two servers, a file of what they were, and what they are now."""

    def __init__(self, connect: Any, file: Path) -> None:
        self.queues = [fifo("one"), fifo("two")]
        self.variables = [tfnb.Variable(torch.zeros(100_000), name=name) for name in "vw"]
        with tfnb.record() as self.graph:
            taken = sum(queue.dequeue(sample=torch.tensor(1)) for queue in self.queues)
            self.add = [variable.assign_add(taken + variable) for variable in self.variables]
        self.session, self.file = tfnb.Session(self.graph), file
        self.cluster = connect(2)
        assert len(self.cluster.servers) == 2
        self.fill(1)
        self.session.run(self.add)
        self.session.save(file)
        assert self.now == [[2], [2], 2.0, 2.0]
        self.fill(3)
        self.session.run(self.add)
        self.cluster.pull()
        for queue in self.queues:
            queue.enqueue(5)
        assert self.now == [[3, 4, 5]] * 2 + [8.0, 8.0]

    def fill(self, first: int) -> None:
        for queue in self.queues:
            queue.enqueue_many([first, first + 1])

    @property
    def now(self) -> list[Any]:
        held = [[int(element[0]) for element in queue.machine.first(9)] for queue in self.queues]
        return held + [float(variable.value().max()) for variable in self.variables]

    def when(self, monkeypatch: pytest.MonkeyPatch, method: str, do: Any) -> None:
        """Do something instead of, or before, the second server is asked for the first time."""
        link, victim = self.cluster._engine.link, self.cluster._engine.servers[1]
        call, done = link.call, list[str]()

        async def told(peer: Any, asked: str, *args: Any, **how: Any) -> Any:
            if asked == method and peer == victim.peer and not done:
                done.append(asked)
                if (answer := do(victim)) is not None:
                    return answer
            return await call(peer, asked, *args, **how)

        monkeypatch.setattr(link, "call", told)


@pytest.fixture
def one(connect: Any, tmp_path: Path) -> Saved:
    return Saved(connect, tmp_path / "file")


def kill(server: Any) -> None:
    os.kill(server.info["pid"], signal.SIGKILL)


@pytest.mark.parametrize("method", ["bring", "freeze", "refill"])
def test_a_server_that_is_killed_during_a_restore_leaves_all_or_nothing(
    one: Saved, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    one.when(monkeypatch, method, kill)
    before, lost = one.now, [key[0] for key in one.cluster._queues.places(one.queues).values()]
    if method in ("bring", "freeze"):
        with pytest.raises(ParameterServerLost, match="Nothing was restored"):
            one.session.restore(one.file)
        assert [not held for held in one.now[:2]] == [shard == 1 for shard in lost] and one.now[2:] == before[2:]
        assert all(held == [3, 4, 5] for held, shard in zip(one.now, lost, strict=False) if shard != 1)
        one.session.restore(one.file)
    else:  # it was decided: the rest is done here
        with pytest.warns(UserWarning, match="lost during the restore; all that was restored is here now"):
            one.session.restore(one.file)
    assert one.now == [[2], [2], 2.0, 2.0]
    one.session.run(one.add)
    assert one.now == [[], [], 8.0, 8.0]


def test_a_server_that_fails_half_way_is_as_good_as_lost(one: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    one.when(monkeypatch, "refill", lambda server: Failure("ResourceExhausted", "no memory", {}))
    with pytest.warns(UserWarning, match=r"(?s)all that was restored is here now.*failed to refill: no memory"):
        one.session.restore(one.file)
    assert all(isinstance(queue.machine, QueueMachine) for queue in one.queues), "the cluster ended"
    assert one.now == [[2], [2], 2.0, 2.0]


def test_all_is_restored_before_a_warning_that_raises(one: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    one.when(monkeypatch, "refill", kill)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*lost during the restore")
        with pytest.raises(UserWarning, match="all that was restored is here now"):
            one.session.restore(one.file)
    assert one.now == [[2], [2], 2.0, 2.0]


def test_what_is_here_is_restored_where_a_queue_does_not_come_home(one: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    one.when(monkeypatch, "refill", kill)
    monkeypatch.setattr(tfnb.cluster.notebook.restoring, "HOME", -1.0)
    homes = [queue.machine for queue in one.queues]
    with pytest.raises(Unavailable, match="did not come home"):
        one.session.restore(one.file)
    assert [float(variable.value().max()) for variable in one.variables] == [2.0, 2.0]
    for queue, home in zip(one.queues, homes, strict=True):
        assert not home.is_lost or queue.size() == 1, "what was on the lost server is here"


@pytest.mark.parametrize("method", ["freeze", "bring"])
def test_a_server_that_refuses_what_is_restored_keeps_all_as_it_was(
    one: Saved, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    one.when(monkeypatch, method, lambda server: Failure("ResourceExhausted", "no room", {}))
    before = one.now
    with pytest.raises(ResourceExhausted, match="no room\n  Nothing was restored"):
        one.session.restore(one.file)
    assert one.now == before and not any(isinstance(queue.machine, QueueMachine) for queue in one.queues)
    for queue in one.queues:
        queue.enqueue(6, timeout=5)  # nothing is held still
    one.session.restore(one.file)
    assert one.now == [[2], [2], 2.0, 2.0]
