"""Files of queues while elements move, for queues here and on servers."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tfnb
from tests.state.test_queues import in_thread
from tfnb.errors import Aborted, OutOfRange
from tfnb.state import checkpoint


def fifo(name: str, capacity: int = 100) -> tfnb.FIFOQueue:
    return tfnb.FIFOQueue(capacity, torch.int64, (), name=name)


def queued(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """All elements in the queues of a file, where they are numbers."""
    groups = [key for key in tensors if key.startswith("@") and key.rpartition("/")[2].isdigit()]
    return [int(n) for key in groups for n in tensors[key]]


def positions_of_files_saved_meanwhile(folder: Path, last: int, pause: float, connect: Any = lambda: None) -> set[int]:
    """Threads move numbers from a source through two queues into a sum; each number is once in each file."""
    a, b = fifo("a", 10), fifo("b", 3)
    total, count = tfnb.Variable(0, name="total"), tfnb.Variable(0, name="count")
    source = tfnb.Source(range(1, last + 1), name="numbers")
    with tfnb.record() as graph:
        move = b.enqueue(a.dequeue(sample=torch.tensor(1)))
        add = [total.assign_add(b.dequeue(sample=torch.tensor(1))), count.assign_add(1)]
    session = tfnb.Session(graph)
    connect()
    runner = tfnb.QueueRunner(a, source, session=session)
    mover = tfnb.QueueRunner(b, [move, move], session=session)

    def adds() -> None:
        while True:
            try:
                session.run(add)
            except Aborted:
                pass
            except OutOfRange:
                return

    thread, ended = in_thread(adds)
    files, rng = [], random.Random(0)
    while thread.is_alive():
        files.append(folder / str(len(files)))
        session.save(files[-1])
        time.sleep(pause * rng.random())
    assert ended == [None] and total.value() == last * (last + 1) // 2
    runner.coordinator.join()
    mover.coordinator.join()
    positions = set()
    for path in files:
        tensors, about = checkpoint.load(path)
        held, position = queued(tensors), about["sources"]["numbers"]["count"]
        positions.add(position)
        assert len({*held}) == len(held), path
        assert len(held) + int(tensors["count"]) == position, path
        assert sum(held) + int(tensors["total"]) == position * (position + 1) // 2
    return positions
