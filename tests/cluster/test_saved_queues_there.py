"""What queues on servers hold is in the file of `Session.save`, of one moment with the Variables, and goes back."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.state.saved_queues import fifo, positions_of_files_saved_meanwhile
from tests.state.test_queues import in_thread
from tests.state.test_saved_queues import KINDS, Files, Summing
from tfnb.cluster.wire.messages import Failure
from tfnb.errors import Aborted, CheckpointCorrupt
from tfnb.state import checkpoint
from tfnb.state.queue_machine import QueueMachine

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


def until(holds: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_each_kind_gives_there_and_here_what_it_gave_before(connect, tmp_path: Path) -> None:
    kinds = [kind() for kind in KINDS]
    with tfnb.record() as graph:
        for one in kinds:
            one.record()
    session = tfnb.Session(graph)
    cluster = connect(2)
    for one in kinds:
        one.fill()
    session.save(tmp_path / "there")
    expected = [one.rest() for one in kinds]
    assert not any(isinstance(one.queue.machine, QueueMachine) for one in kinds)
    session.restore(tmp_path / "there")
    assert [one.rest() for one in kinds] == expected
    cluster.close()
    session.restore(tmp_path / "there")
    session.save(tmp_path / "here")
    assert [one.rest() for one in kinds] == expected
    session.restore(tmp_path / "here")
    assert [one.rest() for one in kinds] == expected


@pytest.mark.slow
def test_queues_of_many_and_large_elements_go_there_and_back(connect, tmp_path: Path) -> None:
    many, large = (
        tfnb.FIFOQueue(9000, torch.float32, name="many"),
        tfnb.FIFOQueue(9, torch.float32, (5_000_000,), name="large"),
    )
    with tfnb.record() as graph:
        many.dequeue(sample=torch.zeros(3)), large.dequeue(sample=torch.zeros(5_000_000))
    session = tfnb.Session(graph)
    for n in range(2500):
        many.enqueue(torch.full((n,), float(n))[: n % 1500])
    for n in range(5):
        large.enqueue(torch.full((5_000_000,), float(n)))
    connect(3)
    session.save(tmp_path / "file")
    assert many.size() == 2500
    for _ in range(5):
        large.dequeue()
    session.restore(tmp_path / "file")
    assert [float(large.dequeue().sum()) / 5e6 for _ in range(5)] == [0, 1, 2, 3, 4]
    lengths = [len(many.dequeue()) for _ in range(2500)]
    assert lengths == [n % 1500 for n in range(2500)]


def test_a_step_under_way_is_not_in_the_file_and_not_after_a_restore(connect, tmp_path: Path) -> None:
    a, b, c = fifo("a"), fifo("b", 1), fifo("c")
    total = tfnb.Variable(0, name="total")
    a.enqueue_many([1, 2])
    b.enqueue(0)
    with tfnb.record() as graph:
        move = b.enqueue(a.dequeue() * 10)
        add = total.assign_add(a.dequeue() + c.dequeue(sample=torch.tensor(1)))
    session = tfnb.Session(graph)
    connect(2)
    moving, moved = in_thread(lambda: session.run(move, timeout=60))
    until(lambda: a.size() == 1)
    session.save(tmp_path / "file")
    adding, added = in_thread(lambda: session.run(add, timeout=60))
    until(lambda: a.size() == 0)
    session.restore(tmp_path / "file")
    for thread, found in ((moving, moved), (adding, added)):
        thread.join(60)
        assert isinstance(found[0], Aborted), found
    assert [int(n) for n in a.dequeue_many(2)] == [1, 2] and b.dequeue() == 0
    assert total.value() == 0 and a.size() == b.size() == c.size() == 0


def test_a_damaged_file_changes_nothing_there(connect, tmp_path: Path) -> None:
    queue, v = fifo("q"), tfnb.Variable(1.0, name="v")
    with tfnb.record() as graph:
        v.assign_add(1.0)
        queue.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    connect(3)
    queue.enqueue(1)
    tensors, meta = checkpoint.load(session.save(tmp_path / "file"))
    tensors.pop("@q/0")
    checkpoint.save(tmp_path / "file", tensors, meta)
    queue.enqueue(2)
    v.assign(7.0)
    with pytest.raises(CheckpointCorrupt, match="queue q"):
        session.restore(tmp_path / "file")
    assert queue.dequeue_many(2).tolist() == [1, 2] and v.value() == 7


def test_a_queue_that_its_server_refused_is_in_the_file_too(
    connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    refused, there = fifo("refused"), fifo("there")
    with tfnb.record() as graph:
        refused.dequeue(sample=torch.tensor(1)), there.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    connect(3)
    there.enqueue_many([3, 4])
    monkeypatch.setattr("tfnb.cluster.queues.queues_there.write_queue", lambda queue: {})  # the server cannot read it
    session.save(tmp_path / "empty")
    assert isinstance(refused.machine, QueueMachine) and not isinstance(there.machine, QueueMachine)
    refused.enqueue_many([1, 2])
    session.save(tmp_path / "file")
    assert [int(queue.dequeue()) for queue in (refused, refused, there, there)] == [1, 2, 3, 4]
    session.restore(tmp_path / "file")
    assert refused.dequeue_many(2).tolist() == [1, 2] and there.dequeue_many(2).tolist() == [3, 4]
    session.restore(tmp_path / "empty")
    assert refused.size() == 0 and there.size() == 2


def test_servers_keep_no_copies_of_a_file_that_was_not_made(
    connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    queue = fifo("q")
    with tfnb.record() as graph:
        queue.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    link, asked = connect(2)._engine.link, list[str]()
    call = link.call
    queue.enqueue(1)

    async def told(peer: Any, method: str, *args: Any, **how: Any) -> Any:
        asked.append(method)
        return (
            Failure("Aborted", "as if another save came", {})
            if method == "page"
            else await call(peer, method, *args, **how)
        )

    monkeypatch.setattr(link, "call", told)
    with pytest.raises(Aborted, match="another save"):
        session.save(tmp_path / "file")
    assert [method for method in asked if method in ("copy", "page", "thaw")] == ["copy", "page", "thaw"]
    monkeypatch.undo()
    session.save(tmp_path / "file")
    assert queue.dequeue() == 1


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [2, 3])
def test_files_saved_while_tasks_move_elements_have_each_once(connect, tmp_path: Path, tasks: int) -> None:
    assert len(positions_of_files_saved_meanwhile(tmp_path, 120, 0.03, lambda: connect(tasks))) > 5


def test_a_runner_goes_on_there_where_the_file_says(connect, tmp_path: Path) -> None:
    queue = fifo("q", 4)
    with tfnb.record() as graph:
        got = queue.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    connect(3)
    runner = tfnb.QueueRunner(queue, tfnb.Source(range(20), name="numbers"), session=session)
    first = [int(session.run(got)) for _ in range(5)]
    until(lambda: queue.level.enqueues == 1)
    session.save(tmp_path / "file")
    assert checkpoint.load(tmp_path / "file")[1]["sources"]["numbers"]["count"] == 9
    assert first + [int(queue.dequeue()) for _ in range(6)] == [*range(11)]
    session.restore(tmp_path / "file")
    assert [int(n) for n in queue] == [*range(5, 20)]
    session.restore(tmp_path / "file")  # the runner was over, and begins again
    assert [int(n) for n in queue] == [*range(5, 20)]
    runner.coordinator.join()
    assert threading.active_count() < 50


def test_a_runner_that_is_over_goes_on_there_over_a_queue_that_is_empty_again(connect, tmp_path: Path) -> None:
    good, bad = fifo("good"), fifo("bad")
    with tfnb.record() as graph:
        good.dequeue(sample=torch.tensor(1)), bad.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    connect(1)
    tfnb.QueueRunner(good, tfnb.Source(range(3), name="numbers"), session=session)
    runner = tfnb.QueueRunner(bad, tfnb.Source([2, "three"], name="words"), session=session)
    session.save(tmp_path / "file")
    assert [int(n) for n in good] == [0, 1, 2]
    runner.start()
    with pytest.raises(tfnb.errors.TfnbError):
        runner.coordinator.join()
    session.restore(tmp_path / "file")
    assert good.dequeue(timeout=20) == 0 and good.dequeue_many(2).tolist() == [1, 2]
    bad.enqueue(7)
    bad.close()
    assert [int(n) for n in bad] == [7], "it forgot why it was closed"


@pytest.mark.filterwarnings("ignore:the step writes total itself")  # one element a step, so one task adds it
def test_a_training_that_is_broken_off_there_gives_back_what_tasks_did_not_use(connect, tmp_path: Path) -> None:
    one = Summing()
    connect(2)
    one.queue.enqueue_many(torch.arange(1, 201))
    with pytest.raises(RuntimeError, match="mine"):
        one.fit(callbacks=[Files(one.graph, tmp_path, {4, 9})])
    rest = one.rest()
    done = 200 - len(rest)
    assert rest == [*range(done + 1, 201)] and one.total.value() == done * (done + 1) // 2
    tensors, _ = checkpoint.load(tmp_path / "9")
    left = [int(n) for n in tensors["@numbers/0"]]
    done = 200 - len(left)
    assert left == [*range(done + 1, 201)] and int(tensors["total"]) == done * (done + 1) // 2
