"""Trainings under faults: ``python -m tests.cluster.chaos [SECONDS] [SEED] [HISTORY]``, or ``make chaos``.

A scheduler, workers and a notebook (`in_notebook`) are processes of their own. The notebook trains in one mode after
the other while faults of a deck that a seed shuffles come at random instants. All events are lines of a file; `history`
checks it afterwards. Prints what was done, what is wrong, what each kind of fault cost, and which share of the
undisturbed rate was kept.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from distributed import Client

from tests.cluster.alone.history import DEADLINE, Verdict, check, kinds
from tests.cluster.chaos import in_notebook
from tests.cluster.chaos.in_notebook import MODES, mode_of
from tests.cluster.far_worker import Link, has_networks
from tests.cluster.test_lost_scheduler import free_port

PAUSE = 5.0  # seconds between two faults, on average
NEAR = 4  # workers on this host; a fifth is behind a link where there is one
DISK = 1 << 20  # bytes of the file system with checkpoints
LOCAL = "127.0.0.1"
LONG, AFTER = 240, 240.0  # seconds: of a run with undisturbed trainings; until all ends after the last fault

# -- what is run ------------------------------------------------------------------------------------------------------


FORKED = get_context("forkserver")  # from one that has imported everything
FORKED.set_forkserver_preload(["tests.cluster.chaos.in_notebook", "tfnb.cluster.driver"])


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of this Python that runs while its block does."""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        try:
            yield started
        finally:
            started.terminate()
            with suppress(subprocess.TimeoutExpired):
                started.wait(20)
            started.kill()


class DaskProcesses(ExitStack):
    """A scheduler, workers under nannies, and one more worker behind a link."""

    def __init__(self, link: Link | None, folder: Path) -> None:
        super().__init__()
        host, port = LOCAL if link is None else link.here, free_port()
        self.address = f"tcp://{host}:{port}"
        words = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", host, "--port", str(port)]
        self.scheduler = self.enter_context(command(*words, "--no-dashboard"))
        workers = [sys.executable, "-m", "tests.cluster.chaos.workers", self.address]
        self.enter_context(command(*workers, host, str(NEAR), str(folder)))
        if link is not None:
            self.enter_context(command("ip", "netns", "exec", link.space, *workers, link.there, "1", str(folder)))
        self.client = self.enter_context(Client(self.address, set_as_default=False, timeout=120))
        self.client.wait_for_workers(NEAR + (link is not None), 400)


def drop_connections(dask_worker: Any) -> int:
    """On a worker: shut all TCP connections down but those that it registered by, without which Dask ends it."""
    kept = {dask_worker.scheduler.address, dask_worker.nanny}
    ports = {int(address.rpartition(":")[2]) for address in kept if address}
    dropped = 0
    for name in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(name.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name.name))) as found:
                if found.family == socket.AF_INET and found.getpeername()[1] not in ports:
                    found.shutdown(socket.SHUT_RDWR)
                    dropped += 1
    return dropped


# -- the history ------------------------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """The events so far, which are lines of a file, too; ``members``: processes as the notebook told them last."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    members: dict[str, list[Any]] = field(default_factory=lambda: {"tasks": [], "servers": []})
    training: int = 0
    is_done: bool = False  # the last training that began has ended
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: dict[str, Any]) -> None:
        """One more."""
        with self._lock, self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")
            self.events.append(event)
            match event["event"]:
                case "members":
                    self.members = event
                case "begin":
                    self.training, self.is_done = event["training"], False
                case "end":
                    self.is_done = True

    def tell(self, event: str, **facts: Any) -> None:
        """An event of this process."""
        self.add({"event": event, "at": time.monotonic(), **facts})

    @property
    def is_in_attempt(self) -> bool:
        """Whether an attempt has begun and not ended."""
        last = next(
            (e["event"] for e in reversed(self.events) if e["event"] in ("begin", "end", "error", "killed")), ""
        )
        return last == "begin"


class Notebook:
    """The process that trains: its events go into the history."""

    def __init__(self, address: str, folder: Path, recorded: Recorded) -> None:
        self._told, to = FORKED.Pipe(duplex=False)
        self.recorded = recorded
        number = recorded.training + recorded.is_done
        self.process = FORKED.Process(target=in_notebook.main, args=(to, address, folder, number))
        self.process.start()
        to.close()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(EOFError, OSError):  # it has ended, or was killed while it wrote
            while True:
                self.recorded.add(self._told.recv())

    def ended(self) -> None:
        """It has ended, or is ended now, if it is late."""
        self.process.join(DEADLINE)
        if self.process.is_alive():
            self.recorded.tell("late", message="the notebook did not end")
            self.process.kill()
            self.process.join(20)
        self._thread.join(20)
        if self.recorded.is_in_attempt:
            self.recorded.tell("killed")


# -- faults -----------------------------------------------------------------------------------------------------------


@dataclass
class Faults:
    """What can be done to the processes; ``deck`` has the kinds that come next."""

    rng: random.Random
    dask: DaskProcesses
    notebook: Notebook
    folder: Path
    link: Link | None
    deck: list[str]

    @property
    def kinds(self) -> dict[str, Callable[[], object]]:
        """Each kind with how it is done; common ones are there twice."""
        found: dict[str, Callable[[], object]] = {
            "kill a task": lambda: self._kill(self._one("tasks")),
            "kill a server": lambda: self._kill(self._one("servers")),
            "stop a task": lambda: self._stop(self._one("tasks")),
            "stop a server": lambda: self._stop(self._one("servers")),
            "drop connections of a task": lambda: self._drop(self._one("tasks")),
            "drop connections of a server": lambda: self._drop(self._one("servers")),
            "fill the disk": self._fill,
            "kill the notebook": lambda: self._kill([self.notebook.process.pid]),
            "kill the scheduler": self._kill_scheduler,
        }
        return found if self.link is None else {**found, "cut a link": self._cut}

    def inject(self) -> None:
        """The next fault; servers whose queues a training uses are not killed: that ends it in a typed error."""
        if not self.notebook.process.is_alive():
            return
        if not self.deck:
            self.deck += [*self.kinds, "kill a task", "kill a server"]
            self.rng.shuffle(self.deck)
        recorded, mode = self.recorded, mode_of(self.recorded.training)
        at = next((at for at, kind in enumerate(self.deck) if (kind, mode) != ("kill a server", "queue")), None)
        if at is not None and recorded.is_in_attempt:
            kind = self.deck.pop(at)
            recorded.tell("fault", kind=kind)
            self.kinds[kind]()

    @property
    def recorded(self) -> Recorded:
        """The history."""
        return self.notebook.recorded

    def _one(self, group: str) -> list[Any]:
        return self.rng.choice(self.recorded.members[group] or [[0, ""]])

    def _kill(self, member: list[Any]) -> None:
        if member[0]:
            with suppress(ProcessLookupError):
                os.kill(member[0], signal.SIGKILL)

    def _kill_scheduler(self) -> None:
        self.dask.scheduler.kill()
        self.dask.scheduler.wait(20)

    def _stop(self, member: list[Any]) -> None:
        if member[0]:
            with suppress(ProcessLookupError):
                os.kill(member[0], signal.SIGSTOP)
                time.sleep(self.rng.uniform(0.5, 3.0))
                os.kill(member[0], signal.SIGCONT)

    def _drop(self, member: list[Any]) -> None:
        with suppress(Exception):  # the answer may be lost, too
            self.dask.client.run(drop_connections, workers=[member[1]], on_error="ignore")

    def _fill(self) -> None:
        """No room for checkpoints for a while: no bytes on their file system, or no longer files of the notebook."""
        seconds = self.rng.uniform(1.0, 3.0)
        if not os.path.ismount(self.folder):
            pid = self.notebook.process.pid
            with suppress(ProcessLookupError):
                before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
                time.sleep(seconds)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
            return
        filler = self.folder / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        time.sleep(seconds)
        filler.unlink()

    def _cut(self) -> None:
        assert self.link is not None
        comes = self.rng.choice([True, False])
        self.link.cut(comes=comes, goes=not comes and self.rng.random() < 0.5)
        time.sleep(self.rng.uniform(0.5, 6.0))
        self.link.heal()


# -- all of it --------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk() -> Iterator[Path]:
    """A folder, with a small file system of its own where that may be mounted."""
    folder = Path(tempfile.mkdtemp(prefix="tfnb-chaos-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


class Run:
    """Trainings under faults for so many seconds; in long runs the first ones, one of each mode, are undisturbed."""

    def __init__(
        self, seconds: float, seed: int, pause: float, recorded: Recorded, say: Callable[[str], object]
    ) -> None:
        self.rng, self.pause, self.recorded, self.say = random.Random(seed), pause, recorded, say
        self.seconds = seconds
        self.quiet = len(MODES) if seconds >= LONG else 0
        self.deck: list[str] = []

    @property
    def end(self) -> float:
        """When the last fault comes; a busy machine may take long before the first training begins."""
        first = next((event["at"] for event in self.recorded.events if event["event"] == "begin"), time.monotonic())
        return float(first + self.seconds)

    @property
    def last(self) -> float:
        """When all has to be at its end."""
        return self.end + AFTER

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be done."""
        now = time.monotonic()
        return now > self.last or (now > self.end and self.recorded.is_done)

    def go(self) -> None:
        """All of it."""
        with ExitStack() as stack:
            link = Link() if has_networks() else None
            if link is None:
                self.say("no links are cut: network namespaces and TUN devices need root on Linux")
            else:
                stack.callback(link.close)
            folder = stack.enter_context(small_disk())
            work = stack.enter_context(tempfile.TemporaryDirectory())
            while not self.is_over:
                with DaskProcesses(link, Path(work)) as dask:
                    while dask.scheduler.poll() is None and not self.is_over:
                        notebook = Notebook(dask.address, folder, self.recorded)
                        self._train(Faults(self.rng, dask, notebook, folder, link, self.deck))

    def _train(self, faults: Faults) -> None:
        """The life of one notebook process."""
        notebook = faults.notebook
        try:
            while notebook.process.is_alive() and faults.dask.scheduler.poll() is None:
                is_time = time.monotonic() < self.end
                notebook.process.join(min(self.rng.expovariate(1 / self.pause), 3 * self.pause) if is_time else 0.5)
                if time.monotonic() > self.end:
                    (faults.folder / "stop").touch()
                elif self.recorded.training >= self.quiet:
                    faults.inject()
                if time.monotonic() > self.last:
                    break
        finally:
            notebook.ended()


def rates(events: list[dict[str, Any]], quiet: int) -> list[str]:
    """How many steps a second each mode took, undisturbed and under faults, and the share that was kept."""
    taken = defaultdict[tuple[str, bool], list[float]](list)
    begun: dict[int, float] = {}
    for event in events:
        if event["event"] == "begin":
            begun.setdefault(event["training"], event["at"])
            training = event
        if event["event"] == "end":
            seconds = event["at"] - begun[training["training"]]
            taken[training["mode"], training["training"] < quiet].append(training["steps"] / seconds)
    found = []
    for mode in MODES:
        under, alone = taken[mode, False], taken[mode, True]
        if under:
            kept = f", {mean(under) / mean(alone):.2f} of the undisturbed rate" if alone else ""
            found.append(f"{mode:8} {len(under):3} trainings under faults, {mean(under):6.1f} steps/s{kept}")
    return found


def chaos(seconds: float, seed: int, path: Path, pause: float = PAUSE, say: Callable[[str], object] = print) -> Verdict:
    """Train for so long under faults, with a history at ``path``; what is wrong with it."""
    path.unlink(missing_ok=True)
    recorded = Recorded(path)
    run = Run(seconds, seed, pause, recorded, say)
    run.go()
    say(f"{'fault':32} {'n':>4} {'median s':>8} {'worst s':>8}   longest pause without a new step")
    for kind in kinds(recorded.events):
        say(str(kind))
    for line in rates(recorded.events, run.quiet):
        say(line)
    redone = sum(event["redone"] for event in recorded.events if event["event"] == "recovered")
    counts = Counter(event["event"] for event in recorded.events)
    errors = Counter(event["type"] for event in recorded.events if event["event"] == "error")
    say(f"{counts['recovered']} recoveries, {redone} steps redone; notebooks ended in {dict(errors)}")
    verdict = check(recorded.events)
    say(str(verdict))
    return verdict


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # it is at a loss about what is killed
    seconds, seed = [*map(int, sys.argv[1:3]), *(600, 1)[len(sys.argv[1:3]) :]]
    history = Path(sys.argv[3] if len(sys.argv) > 3 else "build/chaos.jsonl")
    history.parent.mkdir(parents=True, exist_ok=True)
    print(f"{seconds} seconds, seed {seed}, history in {history}")  # noqa: T201
    sys.exit(not chaos(seconds, seed, history).is_clean)
