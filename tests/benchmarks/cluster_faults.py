"""The faults of a cluster, injected into real processes: what each costs, and whether the promise holds.

`python -m tests.benchmarks.cluster_faults [--times 5] [--rows 1 2] [--tests] [--minutes 30] [--seconds 60] [--pairs 4]`
trains counters on four worker processes. For each row of `tests/cluster/FAULTS.md` that has an injection here the fault
comes so many times, in a training of its own each time, and a line is printed: how often it was injected and survived,
the seconds until the training went on (the longest pause between two new steps from the fault on: median and worst),
the steps that were taken again, and whether the promise was kept: each step counts once on each server, or the error is
the promised one.

The other rows are those of machines or times that are modelled, or that end the training: their line names their
tests, and with ``--tests`` runs them and counts those that pass. What cannot be injected here says why.

Then trainings of eight tasks for so many minutes of a virtual clock, struck every 15 seconds: the steps that they keep,
and what the tasks' time was spent on. Then real ones of four tasks for so many seconds, alone and with a task killed
every 15 seconds; and by turns, in so many pairs, trainings with and without copies and checkpoints: processors'
milliseconds of a step.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from distributed import Client

import tfnb
from tests.benchmarks.cluster_copies import ProcessorTimes, Wide
from tests.cluster.alone import virtual_cluster
from tests.cluster.chaos.moments import die_at
from tests.cluster.conftest import WORKERS, stop, worker_processes, workers
from tests.cluster.far_worker import has_networks
from tests.cluster.test_cuts import Counters
from tfnb.cluster.driver import Cluster
from tfnb.cluster.notebook.recovery_copies import RecoveryCopies
from tfnb.errors import NonFiniteGradient, ShapeError, TfnbError

TESTS = Path(__file__).parents[1]
FIRST, AFTER = 40, 60  # steps before a fault, and from it on
LIMIT = 240.0  # seconds that a training may take
KILL_EVERY, SAVE_EVERY = 15.0, 10.0  # seconds
STEPS = 0.1, 1.0  # seconds of a step of eight tasks
MB = 20  # of the Variables whose checkpoints and copies are measured

# -- a training into which a fault comes ------------------------------------------------------------------------------


@dataclass
class Struck:
    """One training of counters, and the fault that comes at step `FIRST`; later, while ``strike`` returns False."""

    dask: Client
    cluster: Cluster
    folder: Path
    at: int  # the number of this time
    strike: Callable[[Struck], object]
    counters: Counters = field(default_factory=lambda: Counters(pause=1))
    struck: float = 0.0
    _new: list[float] = field(default_factory=list)  # when steps were told for the first time
    _left: int = AFTER

    @property
    def tasks(self) -> list[Any]:
        """The live compute tasks."""
        return [member for member in self.cluster._engine.tasks if member.is_there]

    @property
    def servers(self) -> list[Any]:
        """The parameter servers."""
        return list(self.cluster._engine.servers)

    def on_step(self, progress: Any) -> None:
        """`fit` tells of a step."""
        if not progress.again:
            self._new.append(time.monotonic())
        if not self.struck and progress.step >= FIRST:
            self.struck = time.monotonic()
            if self.strike(self) is False:
                self.struck = 0.0  # not yet

    def rows(self) -> Iterator[Any]:
        """Steps until enough came after the fault."""
        while self._left:
            self._left -= bool(self.struck)
            yield {self.counters.x: torch.ones(4)}

    @property
    def seconds(self) -> float:
        """The longest pause between two new steps, from the fault on."""
        times = [self.struck, *(at for at in self._new if at > self.struck)]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def train(self, **options: Any) -> bool:
        """Train; whether each step counts once on each server."""
        result = tfnb.fit(self.counters.train, self.rows(), callbacks=[self], timeout=LIMIT, restarts=100, **options)
        return bool(self.struck) and self.counters.counts() == [result.steps] * 2


def kill(*members: Any) -> None:
    """SIGKILL."""
    for member in members:
        with suppress(ProcessLookupError):
            os.kill(member.info["pid"], signal.SIGKILL)


def for_seconds(member: Any, seconds: float) -> None:
    """SIGSTOP, and SIGCONT so many seconds later."""
    stop(member.info["pid"])
    threading.Timer(seconds, os.kill, (member.info["pid"], signal.SIGCONT)).start()


def dies_at(struck: Struck, moment: str, is_after: bool) -> None:
    """The first server ends itself at a request."""
    struck.dask.run(die_at, moment, 0, is_after, [], workers=[struck.servers[0].peer.addr])


def kills_with_holder(struck: Struck) -> bool:
    """A server, and who holds the copy of its shard; False while there is no copy."""
    copy = struck.cluster._variables.safety.newest
    if copy is not None:
        kill(copy.holders[0], struck.servers[0])
    return copy is not None


def dies_while_it_saves(struck: Struck) -> None:
    """A server ends itself when it is to write, or has written, its part of a checkpoint."""
    dies_at(struck, "write_shards", is_after=bool(struck.at % 2))


def fills_the_disk(struck: Struck) -> None:
    """No file of the servers may have more than 64 bytes, for two seconds."""
    pids = [member.info["pid"] for member in struck.servers]
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY)) for pid in pids]

    def again() -> None:
        for pid, limits in zip(pids, before, strict=True):
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    threading.Timer(2.0, again).start()


def restarts(struck: Struck) -> None:
    """All workers, by Dask."""
    threading.Thread(target=lambda: struck.dask.restart(wait_for_workers=False)).start()


# -- faults that end in an error --------------------------------------------------------------------------------------


def not_a_number(cluster: Cluster, at: int) -> bool:
    """A row that is NaN is refused by all servers, and the next training counts right."""
    counters = Counters()

    def rows() -> Iterator[Any]:
        for step in range(20):
            yield {counters.x: torch.full((4,), float("nan") if step == 10 else 1.0)}

    with suppress(NonFiniteGradient):
        tfnb.fit(counters.train, rows())
        return False
    before = counters.counts()
    tfnb.fit(counters.train, counters.rows(5))
    return before[0] == before[1] and counters.counts() == [before[0] + 5] * 2


def interrupted(cluster: Cluster, at: int) -> bool:
    """Ctrl-C in a training: whole steps, and the next cell runs."""
    counters = Counters(pause=1)
    timer = threading.Timer(0.5 + 0.1 * at, signal.raise_signal, (signal.SIGINT,))

    def rows() -> Iterator[Any]:
        timer.start()
        while True:
            yield {counters.x: torch.ones(4)}

    with suppress(KeyboardInterrupt):
        tfnb.fit(counters.train, rows())
        return False
    before = counters.counts()
    tfnb.run(counters.train, {counters.x: torch.ones(4)})
    cluster.pull()
    return before[0] == before[1] and counters.counts() == [before[0] + 1] * 2


def of_another_shape(cluster: Cluster, at: int) -> bool:
    """A feed of another shape is a typed error, and no step."""
    counters = Counters()
    before = cluster.step
    with suppress(ShapeError):
        tfnb.run(counters.train, {counters.x: torch.ones(4, 4)})
        return False
    return cluster.step == before


# -- the table --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the table: a fault into a training (``strike``), or one that ends in an error (``ends``).

    ``options``: of `fit`. ``is_saved``: with checkpoints. A fault that kills a server has come if there was a recovery,
    one that ``tells`` something if a warning said so.
    """

    number: int
    name: str
    strike: Callable[[Struck], object] | None = None
    ends: Callable[[Cluster, int], bool] | None = None
    options: dict[str, Any] = {}
    is_saved: bool = False
    tells: str = ""

    @property
    def kills_server(self) -> bool:
        """Whether a server dies of it."""
        return self.number in (2, 3, 4, 27, 32)


ROWS = [
    Row(1, "task killed, sync", lambda s: kill(s.tasks[0])),
    Row(1, "task killed, async", lambda s: kill(s.tasks[0]), options={"mode": "async"}),
    Row(1, "task killed, all-reduce", lambda s: kill(s.tasks[0]), options={"mode": "allreduce"}),
    Row(2, "server killed, sync", lambda s: kill(s.servers[s.at % 2])),
    Row(2, "server killed, async", lambda s: kill(s.servers[s.at % 2]), options={"mode": "async"}),
    Row(3, "server killed inside of a push", lambda s: dies_at(s, "push", s.at % 2 > 0), options={"mode": "async"}),
    Row(3, "server killed inside of a round", lambda s: dies_at(s, "contribute", s.at % 2 > 0)),
    Row(4, "server killed while it saves", dies_while_it_saves, is_saved=True),
    Row(5, "full disk of the servers", fills_the_disk, is_saved=True, tells="File too large"),
    Row(6, "task stopped for 5 s, a spare one", lambda s: for_seconds(s.tasks[0], 5.0), options={"backup": 1}),
    Row(6, "task stopped for 5 s, async", lambda s: for_seconds(s.tasks[0], 5.0), options={"mode": "async"}),
    Row(6, "server stopped for 3 s", lambda s: for_seconds(s.servers[0], 3.0)),
    Row(10, "NaN in a gradient", ends=not_a_number),
    Row(17, "Ctrl-C", ends=interrupted),
    Row(21, "feed of another shape", ends=of_another_shape),
    Row(27, "client.restart()", restarts),
    Row(32, "server and the holder of its copy", kills_with_holder),
    Row(32, "the same, with checkpoints", kills_with_holder, is_saved=True),
]
NOT_HERE = {
    7: "needs network namespaces, TUN devices and root", 8: "needs network namespaces, TUN devices and root",
}  # fmt: skip


class Times(NamedTuple):
    """The outcome of one row. ``injected``: how often the fault came."""

    injected: int
    kept: int
    survived: int
    seconds: list[float]
    redone: int

    def __str__(self) -> str:
        seconds = (
            f"{statistics.median(self.seconds):6.2f} {max(self.seconds):6.2f}" if self.seconds else "     -      -"
        )
        kept = "yes" if self.injected and self.kept >= self.injected else f"in {self.kept} of {self.injected}"
        return f"{self.injected:4} {self.survived:8} {seconds} {self.redone:6}   {kept}"


def injected(dask: Client, row: Row, times: int) -> Times:
    """Inject a fault so many times, each into a cluster of its own."""
    seconds, came, kept, survived, redone = list[float](), 0, 0, 0, 0
    for at in range(times):
        workers(dask, WORKERS)
        before = len(tfnb.recovery_log())
        with (
            tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()),
            warnings.catch_warnings(record=True) as said,
        ):  # fmt: skip
            warnings.simplefilter("always")
            try:
                with closing(tfnb.connect(dask, ps=WORKERS - 2, timeout=120)) as cluster:
                    if row.ends is not None:
                        begin = time.monotonic()
                        kept += row.ends(cluster, at)
                        seconds.append(time.monotonic() - begin)
                    else:
                        assert row.strike is not None
                        struck = Struck(dask, cluster, Path(folder), at, row.strike)
                        saved = {"checkpoint": folder, "checkpoint_every": 0.5} if row.is_saved else {}
                        kept += struck.train(**row.options, **saved)
                        seconds.append(struck.seconds)
                    survived += 1
            except TfnbError as error:
                sys.stderr.write(f"row {row.number}, {row.name}: {type(error).__name__}: {error}\n")
        recoveries = tfnb.recovery_log()[before:]
        is_told = any(row.tells in str(warning.message) for warning in said) or not row.tells
        came += is_told and (bool(recoveries) or not row.kills_server)
        redone += sum(recovery.redone for recovery in recoveries)
    return Times(came, kept, survived, seconds, redone)


def of_tests() -> dict[int, list[str]]:
    """Paths and names of the tests of each row of the table of faults."""
    files = {path.stem: path for path in TESTS.rglob("test_*.py")}
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", (TESTS / "cluster" / "FAULTS.md").read_text(), re.MULTILINE)
    return {
        int(number): [f"{files[file]}::{test}" for file, test in re.findall(r"`(test_\w+)::(test_\w+)`", text)]
        for number, text in rows
    }


def passing(tests: list[str]) -> str:
    """Run tests; how many passed."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    return ran.stdout.strip().rpartition("\n")[2].strip("= ")


def table(dask: Client, times: int, rows: list[int], are_run: bool) -> None:
    """Print the rows."""
    print(f"{'row':>3}  {'fault':36} {'n':>4} {'survived':>8} {'median':>6} {'worst':>6} {'redone':>6}   promise kept")
    here = {row.number for row in ROWS}
    for row in ROWS:
        if row.number in rows:
            print(f"{row.number:3}  {row.name:36} {injected(dask, row, times)}", flush=True)
    for number, tests in of_tests().items():
        if number not in rows or number in here:
            continue
        if number in NOT_HERE and not has_networks():
            print(f"{number:3}  not injected here: {NOT_HERE[number]}", flush=True)
        else:
            told = passing(tests) if are_run else ", ".join(test.rpartition("::")[2] for test in tests)
            print(f"{number:3}  by its tests: {told}", flush=True)
    print("several hosts: not injected here, this is one machine")


# -- shares -----------------------------------------------------------------------------------------------------------


@dataclass
class TaskKills:
    """A callback of a training that kills a task every 15 seconds, the first one after half of that."""

    cluster: Cluster
    begun: float = field(default_factory=time.monotonic)
    count: int = 0

    def on_step(self, progress: Any) -> None:
        """`fit` tells of a step."""
        if time.monotonic() - self.begun > KILL_EVERY * (self.count + 0.5):
            kill(*[member for member in self.cluster._engine.tasks if member.is_there][:1])
            self.count += 1


def rate(dask: Client, seconds: float, mode: str, is_struck: bool) -> tuple[float, int]:
    """Steps a second of four tasks and a server, and how many tasks were killed."""
    workers(dask, 5)
    with closing(tfnb.connect(dask, ps=1, timeout=120)) as cluster:
        counters, kills = Counters(pause=3, shards=1), TaskKills(cluster)

        def rows() -> Iterator[Any]:
            while time.monotonic() < kills.begun + seconds:
                yield {counters.x: torch.ones(8)}

        result = tfnb.fit(counters.train, rows(), mode=mode, callbacks=[kills] if is_struck else [])
        assert counters.counts() == [result.steps], "a step was lost or counted twice"
        return result.steps / result.seconds, kills.count


def kept_share(seconds: float, mode: str) -> str:
    """Steps a second of four tasks and a server, alone and with a task killed every 15 seconds."""
    with worker_processes(5) as dask:
        (alone, _), (struck, kills) = (rate(dask, seconds, mode, is_struck) for is_struck in (False, True))
    return (
        f"{mode}: {alone:.1f} steps/s alone, {struck:.1f} with a task killed every {KILL_EVERY:g} s ({kills} kills): "
        f"{struck / alone:.0%} kept"
    )


def kept_virtually(minutes: float) -> Iterator[str]:
    """The shares of their steps that trainings of eight tasks keep, and what the time of the tasks is spent on."""
    yield (
        f"{virtual_cluster.TASKS} tasks on a virtual clock, {minutes:g} minutes, a task struck every {KILL_EVERY:g} s; "
        f"its successor takes part {virtual_cluster.BACK:g} s after a kill"
    )
    for kinds in virtual_cluster.KINDS:
        for mode in virtual_cluster.MODES:
            for step in STEPS:
                share, account = virtual_cluster.kept(mode, kinds, 60 * minutes, every=KILL_EVERY, step=step)
                yield f"{mode}, {kinds}, {step:g} s a step: {share:.1%} kept; {account}"


def costs(pairs: int, mode: str) -> str:
    """Processor time of copies, and of a checkpoint every 10 seconds, as shares of the training's own time."""
    found: dict[str, list[StepCost]] = {name: [] for name in ("neither", "copies", "checkpoints")}
    with (
        worker_processes(3) as dask, tempfile.TemporaryDirectory() as folder,
        closing(tfnb.connect(dask, ps=1, timeout=120)) as cluster,
    ):  # fmt: skip
        net, times = Wide(MB), ProcessorTimes(cluster)
        tfnb.run(net.train, {net.x: torch.zeros(2)})
        for turn in range(pairs):
            for name, taken in found.items():
                where = Path(folder, str(turn)) if name == "checkpoints" else None
                taken.append(step_cost(net, times, mode, name == "copies", where))
    alone, copied, saved = found.values()
    step = statistics.median(one.step for one in alone)
    copies = statistics.median(b.step / a.step - 1 for a, b in zip(alone, copied, strict=True))
    one = statistics.median((b.busy - b.steps * a.step) / b.files for a, b in zip(alone, saved, strict=True))
    share = one / SAVE_EVERY / statistics.median(each.busy / each.seconds for each in alone)
    return (
        f"{MB} MB, {mode}: a step takes {step:.1f} ms of processors; copies every 2 s add {copies:.1%}; a checkpoint "
        f"takes {one:.0f} ms, which every {SAVE_EVERY:g} s is {share:.1%} (of {pairs} pairs)"
    )


class StepCost(NamedTuple):
    """A training: its steps and seconds, milliseconds that all processors took, and checkpoints that were written."""

    steps: int
    seconds: float
    busy: float
    files: int

    @property
    def step(self) -> float:
        """Milliseconds of all processors for a step."""
        return self.busy / self.steps


def step_cost(net: Wide, times: ProcessorTimes, mode: str, is_on: bool, folder: Path | None) -> StepCost:
    """Train for ten seconds. is_on: with copies; folder: of checkpoints, one in the middle and one at the end."""
    end, steps, refresh = time.monotonic() + SAVE_EVERY, list[int](), RecoveryCopies.refresh
    saved = {} if folder is None else {"checkpoint": folder, "checkpoint_every": SAVE_EVERY / 2}

    def rows() -> Iterator[Any]:
        while time.monotonic() < end:
            yield {net.x: torch.tensor([0.5, 0.5])}

    if not is_on:
        RecoveryCopies.refresh = lambda self, every: None  # type: ignore[method-assign]
    try:
        *busy, wall = times.of(lambda: steps.append(tfnb.fit(net.train, rows(), mode=mode, **saved).steps))
    finally:
        RecoveryCopies.refresh = refresh  # type: ignore[method-assign]
    return StepCost(steps[0], wall / 1e3, sum(busy), 0 if folder is None else len([*folder.glob("ckpt-*.json")]))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # it is at a loss about what is killed
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=list(range(1, 33)))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--tests", action="store_true")
    asked = parser.parse_args()
    if asked.rows:
        with worker_processes(WORKERS) as client:
            table(client, asked.times, asked.rows, asked.tests)
    for line in kept_virtually(asked.minutes) if asked.minutes else ():
        print(line, flush=True)
    for name in ("async", "sync"):
        if asked.seconds:
            print(kept_share(asked.seconds, name), flush=True)
        if asked.pairs:
            print(costs(asked.pairs, name), flush=True)
