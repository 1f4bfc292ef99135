"""A notebook process that trains, one training after the other, and tells each step through a pipe.

It begins with a training of this number, from the newest checkpoint in its folder if there is one, and ends after the
training in which a file ``stop`` is made beside these folders.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import tfnb
from tests.cluster.alone.history import amount, runs
from tfnb.cluster import connected
from tfnb.errors import NotFound
from tfnb.state import checkpoint
from tfnb.state.checkpoint_folder import newest

STEPS, ROWS = 120, 4
WORK = 2  # products of 300 x 300 matrices in a step
EVERY = 0.7  # seconds between two checkpoints
Options = dict[str, Any]
MODES: dict[str, Options] = {
    "sync": {}, "async": {"mode": "async"}, "queue": {}, "bounded": {"mode": "bounded", "staleness": 2},
    "backup": {"backup": 1},
}  # fmt: skip


def mode_of(number: int) -> str:
    """The mode of a training; ``queue``: synchronous, while elements go through a queue on the servers."""
    return list(MODES)[number % len(MODES)]


class Tell:
    """Sends events to whoever started this process."""

    def __init__(self, to: Connection) -> None:
        self._to, self._lock, self.is_training = to, threading.Lock(), False

    def __call__(self, event: str, **facts: Any) -> None:
        with self._lock:
            self.is_training = self.is_training or event == "begin"
            self._to.send({"event": event, "at": time.monotonic(), **facts})


class Marked:
    """A recording each step of which marks itself in the Variables of two shards.

    Entry k of ``seen`` counts how often step k was applied, ``total`` is the sum of the `amount` of the steps. All
    numbers are whole, so that no rounding hides an update.
    """

    def __init__(self) -> None:
        zeros = [torch.zeros(STEPS, dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
        self.seen, self.total = (
            [tfnb.Variable(zeros[i].clone(), name=f"{name}{shard}") for shard in range(2)]
            for i, name in enumerate(("seen", "total"))
        )
        amounts = torch.tensor([amount(step) for step in range(STEPS)], dtype=torch.float64)
        with tfnb.record("marked") as self.graph:
            self.x = tfnb.placeholder(torch.zeros(ROWS, dtype=torch.int64), name="x")
            mark = (self.x.unsqueeze(1) == torch.arange(STEPS)).double().mean(0)
            one = mark.sum()
            for _ in range(WORK):
                ones = torch.ones(300, 300, dtype=torch.float64)
                one = (one * ones).matmul(ones).mean() / 300
            grads = [mark * one, mark.dot(amounts) * one]
            pairs = [
                (grad, shards[at])
                for at in range(2)
                for grad, shards in zip(grads, (self.seen, self.total), strict=True)
            ]
            self.train = tfnb.train.SGD(1.0).apply_gradients(pairs)
        self.rows = {self.x: torch.arange(STEPS).repeat_interleave(ROWS)}

    def values(self, of: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """What the Variables say, those here or those of a checkpoint."""

        def value(variable: Any) -> torch.Tensor:
            return variable.storage if of is None else of[variable.name]

        return {
            "seen": [runs((0.0 - value(one)).tolist()) for one in self.seen],
            "total": [-float(value(one)) for one in self.total],
        }


class Events:
    """The callback of a training: tells steps, recoveries, checkpoints, and who the members of the cluster are."""

    def __init__(self, tell: Tell, cluster: Any, folder: Path) -> None:
        self._tell, self._cluster, self._folder = tell, cluster, folder
        self._logged, self._step, self._members = len(tfnb.recovery_log()), 0, None

    def members(self) -> None:
        """Tell the processes that are there, if others were told last."""
        engine = self._cluster._engine
        found = [
            [[int(one.info["pid"]), one.peer.addr] for one in group if one.is_there]
            for group in (engine.tasks, engine.servers)
        ]
        if found != self._members:
            self._members = found
            self._tell("members", tasks=found[0], servers=found[1])

    def on_step(self, progress: Any) -> None:
        for recovery in tfnb.recovery_log()[self._logged :]:
            self._logged += 1
            self._tell(
                "recovered", step=recovery.step, kept=recovery.kept, redone=recovery.redone, seconds=recovery.seconds
            )
        self._tell("told", step=progress.step, again=progress.again)
        if progress.step % 10 == 0:
            self.members()
            written = max((int(path.stem[5:]) for path in self._folder.glob("ckpt-*.safetensors")), default=0)
            if written > self._step:
                self._step = written
                self._tell("checkpoint", step=written)


class Elements(threading.Thread):
    """Puts numbers into a queue on the servers and takes them out again, until it is over."""

    def __init__(self, tell: Tell, name: str) -> None:
        super().__init__()
        self._tell, self.name = tell, name
        self.queue = tfnb.FIFOQueue(16, torch.int64, (), name=name)
        self.is_over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for item in itertools.count():
                if self.is_over.wait(0.01):
                    return
                self.queue.enqueue(torch.tensor(item), timeout=90)
                self._tell("put", queue=self.name, item=item)
                if item > 3:
                    self._tell("taken", queue=self.name, item=int(self.queue.dequeue(timeout=90)))
        except BaseException as error:  # the training tells it
            self.error = error

    def end(self) -> None:
        """Tell what is left in it; raises what went wrong."""
        self.is_over.set()
        self.join()
        if self.error is not None:
            raise self.error
        items = [int(self.queue.dequeue(timeout=90)) for _ in range(int(self.queue.size()))]
        self._tell("left", queue=self.name, items=items)


def resumed(marked: Marked, folder: Path) -> tuple[Path | None, int, Any, list[str]]:
    """The newest checkpoint that a training can go on from, its steps and values, and those that it cannot.

    Of asynchronous tasks a checkpoint may have gaps: then an older one is taken, and the others are put aside.
    """
    refused: list[str] = []
    while True:
        try:
            path = newest(folder)
        except NotFound:
            return None, 0, None, refused
        tensors, meta = checkpoint.load(path)
        training = meta.get("training", {})
        if not training.get("gaps"):
            return path, training.get("steps", 0), marked.values(tensors), refused
        refused.append(path.name)
        path.rename(path.with_suffix(".gaps"))


def trained(tell: Tell, cluster: Any, folder: Path, number: int) -> None:
    """One training, or the rest of it."""
    mode, marked = mode_of(number), Marked()
    path, first, values, refused = resumed(marked, folder)
    events, elements = Events(tell, cluster, folder), None
    if mode == "queue":
        elements = Elements(tell, f"queue{number}_{os.getpid()}")
    tell("begin", training=number, mode=mode, steps=STEPS, first=first, values=values, refused=refused)
    events.members()
    try:
        if elements is not None:
            elements.start()
        result = tfnb.fit(
            marked.train, marked.rows, batch_size=ROWS, shuffle=False, exact=False, restarts=1000, callbacks=[events],
            checkpoint=folder, checkpoint_every=EVERY, resume=path or False, **MODES[mode],
        )  # fmt: skip
        if elements is not None:
            elements.end()
        tell("end", taken=result.steps, seconds=result.seconds, values=marked.values())
    except BaseException as error:
        tell("error", type=type(error).__name__, message=str(error), values=marked.values())
        raise
    finally:
        if elements is not None:
            elements.is_over.set()


def main(to: Connection, address: str, folder: Path, first: int) -> None:
    """One training after the other. What is printed meanwhile is not shown."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    tell = Tell(to)
    try:
        with tfnb.connect(address, ps=2, timeout=120, insecure=True, workers=4) as cluster:
            for number in itertools.count(first):
                mine = folder / f"{number}"
                mine.mkdir(exist_ok=True)
                trained(tell, cluster, mine, number)
                if (folder / "stop").exists() or connected.connected() is None:
                    return  # a scheduler lost between two trainings ends the cluster: the next one would go on here
    except BaseException:
        if not tell.is_training:
            tell("failed", message=traceback.format_exc())
        raise
