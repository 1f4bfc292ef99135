"""Training under kills, stops, interrupts, changes of mode and a second notebook: four integers at the end, all 0.

lost: steps that the notebook was told of and some server has not applied. doubled: the other way round. torn: reads in
mid-training that show two numbers of steps. late: calls that ended after their deadline. Gradients are ones, so that a
Variable is a count of the steps that were applied.
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

import pytest
import torch
from distributed import Client

from tests.cluster.conftest import one_by_one, stop, worker_processes
from tests.cluster.test_cuts import Counters
from tests.cluster.test_faults import Interrupter
from tfnb.cluster.driver import Cluster, connect
from tfnb.cluster.engine.members import Mode
from tfnb.cluster.notebook.steps_there import batches as as_batches
from tfnb.errors import DeadlineExceeded, ParameterServerLost, WorkerLost
from tfnb.execution import lower

SEED = int(os.environ.get("TFNB_SOAK_SEED", "16"))
SECONDS = float(os.environ.get("TFNB_SOAK_SECONDS", "30"))
DEADLINE, GRACE = 60.0, 60.0  # of one training; what a busy machine takes to say that it is over
MODES = [Mode(), Mode(backup=1), Mode("async"), Mode("bounded", staleness=1), Mode(required=1)]
FAULTS = ["none", "none", "kill", "stop", "both", "interrupt", "server"]


class Notebook:
    """One cluster of a notebook, its counts and what went wrong."""

    def __init__(self, client: Client, source: random.Random, ps: int = 2) -> None:
        self.client, self.source, self.ps = client, source, ps
        self.wrong, self.done = Counter(), Counter()
        self.open()

    def open(self) -> None:
        """A cluster, and new counts."""
        self.cluster: Cluster = connect(self.client, ps=self.ps, timeout=180)
        self.counters = Counters()
        graph = self.counters.train.graph
        self.program = lower(graph, [self.counters.train.value], [self.counters.x.value])

    def train(self, mode: Mode, steps: int, patience: float = DEADLINE) -> None:
        """A training, and then the check that what was told is what all servers hold."""
        begin = time.monotonic()
        data = as_batches(self.program, (([torch.ones(4)], n) for n in range(steps)))
        run = one_by_one(self.cluster, self.program, data, mode=mode, timeout=patience, changes=self.changes)
        try:
            with suppress(DeadlineExceeded, WorkerLost):
                for step, _ in run:
                    if step % 50 == 0:
                        self.look()
        finally:
            with suppress(ParameterServerLost):
                run.close()
            self.wrong["late"] += time.monotonic() - begin > patience + GRACE

    def changes(self) -> Mode | None:
        """Now and then another mode in mid-training, that fits however many tasks are left."""
        if self.source.random() > 0.1:
            return None
        self.done["changes"] += 1
        return self.source.choice([Mode(), Mode("async"), Mode("bounded", staleness=1), Mode(required=1)])

    def look(self) -> None:
        """A read in the midst."""
        step = self.cluster.pull()
        with self.cluster._variables.held.showing:
            shown = {step, *map(int, self.counters.counts())}
        self.wrong["torn"] += len(shown) > 1
        self.done["reads"] += 1

    def check(self) -> None:
        """What the servers applied, against what was told."""
        step = self.cluster.pull()
        for count in map(int, self.counters.counts()):
            self.wrong["lost"] += max(0, step - count)
            self.wrong["doubled"] += max(0, count - step)
        self.done["steps"] += step - self.done["before"]
        self.done["before"] = step

    def strike(self, fault: str) -> list[tuple[threading.Timer, int]]:
        """Faults that come at random instants, and the processes that are to go on later."""
        members = {"kill": self.cluster._engine.tasks, "stop": self.cluster._engine.tasks}
        found: list[tuple[threading.Timer, int]] = []
        kinds = {"both": ["kill", "stop"], "server": ["server"]}.get(fault, [fault])
        for kind in kinds:
            group = self.cluster._engine.servers if kind == "server" else members.get(kind, [])
            live = [member for member in group if member.is_there]
            if not live:
                continue
            pid = self.source.choice(live).info["pid"]
            act = stopped if kind == "stop" else killed
            timer = threading.Timer(self.source.uniform(0.05, 1.0), act, [pid])
            timer.start()
            found.append((timer, pid if kind == "stop" else 0))
        return found

    def round(self) -> None:
        """One training with one fault."""
        mode, fault = self.source.choice(MODES), self.source.choice(FAULTS)
        self.done[f"{fault}"] += 1
        if mode.backup >= len(self.cluster.tasks):
            mode = Mode()
        faults = self.strike(fault)
        try:
            if fault == "interrupt":
                with Interrupter() as interrupter:
                    interrupter.stops(lambda: self.train(mode, 2000), self.source.uniform(0.05, 1.0))
            else:
                self.train(mode, self.source.randint(50, 800))
            self.check()
        except ParameterServerLost:
            self.restart()
        finally:
            for timer, pid in faults:
                timer.join()
                if pid:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
        if self.cluster._engine.lost is not None:
            self.restart()

    def restart(self) -> None:
        """After a lost server: what is here is one step on both, and training begins anew on another cluster."""
        counts = {int(count) for count in self.counters.counts()}
        self.wrong["torn"] += len(counts | {self.cluster.pulled_step}) > 1
        self.done["servers lost"] += 1
        self.cluster.close()
        self.done["before"] = 0
        self.open()


def killed(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def stopped(pid: int) -> None:
    """SIGSTOP, for a second or two, or until it is found dead."""
    with suppress(ProcessLookupError, FileNotFoundError):
        stop(pid)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_lost_doubled_torn_late_are_zero(capsys):
    source, wrong, done = random.Random(SEED), Counter(lost=0, doubled=0, torn=0, late=0), Counter()
    with worker_processes(5) as client:
        end, first = time.monotonic() + SECONDS, Notebook(client, source)
        while time.monotonic() < end:
            first.round()
        second = threading.Thread(target=beside, args=(client.scheduler.address, wrong, done))
        second.start()  # another notebook on the same workers: both train
        for _ in range(4):
            first.train(source.choice(MODES[2:]), 200)
            first.check()
        second.join()
        wrong += first.wrong
        done += first.done
        first.cluster.close()
    four = [wrong[name] for name in ("lost", "doubled", "torn", "late")]
    with capsys.disabled():
        text = f"seed {SEED}: lost, doubled, torn, over deadline = {', '.join(map(str, four))}; of {dict(done)}"
        sys.stdout.write(f"\n{text}\n")
    assert four == [0, 0, 0, 0], done
    assert done["steps"] > 0 and done["reads"] > 0


def beside(address: str, wrong: Counter, done: Counter) -> None:
    """What the second notebook does; it shares the workers, and nothing else."""
    with Client(address, set_as_default=False) as client:
        other = Notebook(client, random.Random(SEED + 1), ps=1)
        try:
            for mode in (MODES[0], MODES[2]):
                other.train(mode, 200)
                other.check()
        finally:
            other.cluster.close()
        wrong.update(other.wrong)
        done.update({"steps beside": other.done["steps"]})
