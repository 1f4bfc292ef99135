"""Trainings under a killer: `python -m tests.cluster.chaos [SECONDS] [SEED]`, or `make chaos`.

One training after the other, in each mode, while a killer with a seed ends or stops compute tasks and servers
at random instants. Each step of each training has to count exactly once on every server. Prints what
was done, what it cost, and which share of the undisturbed rate was kept.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

import tfnb
from tests.cluster.conftest import worker_processes
from tests.cluster.test_cuts import Counters

MODES: list[dict[str, Any]] = [
    {"mode": "sync"}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}, {"mode": "sync", "backup": 1},
]  # fmt: skip
STEPS, PAUSE = 300, 15.0  # of a training; seconds between two faults, on average
FAULTS = ("kill a task", "kill a task", "kill a server", "stop a task", "stop a server")


@dataclass
class Killer:
    """Kills and stops members of a cluster at random instants, in a thread of its own."""

    cluster: Any
    rng: random.Random
    pause: float
    done: Counter[str] = field(default_factory=Counter)
    end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Killer:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.end.wait(self.rng.expovariate(1 / self.pause)):
            fault = self.rng.choice(FAULTS)
            engine = self.cluster._engine
            members = engine.servers if fault.endswith("server") else list(engine.places.values())
            member = self.rng.choice([member for member in members if member.is_there] or [None])
            if member is not None:
                self.done[fault] += 1
                self._do(fault.startswith("kill"), int(member.info["pid"]))

    def _do(self, is_killed: bool, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if is_killed else signal.SIGSTOP)
            if not is_killed:
                self.end.wait(self.rng.uniform(0.5, 3.0))
                os.kill(pid, signal.SIGCONT)


def rate(counters: Counters, options: dict[str, Any]) -> float:
    """Steps a second of one training; raises where a step did not count once."""
    before = counters.counts()
    data = {counters.x: torch.ones(4 * STEPS)}
    result = tfnb.fit(counters.train, data, batch_size=4, restarts=1000, **options)
    done = [after - count for after, count in zip(counters.counts(), before, strict=True)]
    assert result.steps == STEPS and set(done) == {float(STEPS)}, f"{options}: {done} of {STEPS} steps counted"
    return result.steps / result.seconds


def chaos(seconds: float, seed: int, pause: float = PAUSE, say: Any = lambda line: None) -> Counter[str]:
    """Train for so long under a killer; the faults that there were."""
    rng = random.Random(seed)
    with worker_processes(4) as client:
        counters = Counters(pause=4)
        cluster = tfnb.connect(client, ps=2, timeout=180)
        quiet = {str(options): rate(counters, options) for options in MODES}
        log, done = len(tfnb.recovery_log()), Counter[str]()
        end, kept = time.monotonic() + seconds, list[float]()
        with Killer(cluster, rng, pause) as killer:
            while time.monotonic() < end:
                options = MODES[done["trainings"] % len(MODES)]
                found = rate(counters, options)
                kept.append(found / quiet[str(options)])
                done["trainings"] += 1
                say(f"{options}: {STEPS} steps counted once, {found:.0f} steps/s ({kept[-1]:.2f} of the quiet rate)")
        done += killer.done
        recoveries = tfnb.recovery_log()[log:]
        done["recoveries"] = len(recoveries)
        if recoveries:
            spent = sorted(recovery.seconds for recovery in recoveries)
            redone = sum(recovery.redone for recovery in recoveries)
            say(
                f"{len(recoveries)} recoveries: {spent[len(spent) // 2]:.1f} s median, {spent[-1]:.1f} s at most, "
                f"{redone} steps redone; a fault every {pause:g} s left {sum(kept) / len(kept):.2f} of the rate"
            )
        cluster.close()
    return done


if __name__ == "__main__":
    arguments = [*map(int, sys.argv[1:3]), *(600, 1)[len(sys.argv) - 1 :]]
    sys.stdout.write(f"seconds and seed: {arguments}\n")
    found = chaos(arguments[0], arguments[1], say=lambda line: sys.stdout.write(line + "\n"))
    sys.stdout.write(", ".join(f"{name}: {count}" for name, count in found.items()) + "\n")
