"""Kills at awkward moments of a recovery: ``python -m tests.cluster.chaos.moments [SECONDS] [SEED] [ONLY]``.

The notebook trains in this process, in a mode that a seed draws, on worker processes under nannies. Up to three strikes
come, each at a call of a function: of the notebook (a copy is fetched, servers are made, values move) or of a process
that serves a request there (a server is to commit, a holder gives a copy). A strike kills one or two processes with
SIGKILL, before or after the call, and later strikes wait for the earlier ones, so that they hit a recovery.

Afterwards each step must count once on each server, and where steps have an order the values are those of a replay.
Prints each history, and what is wrong with it: a wrong count, another value, an error, or a hang. With a third word
only the history of SEED is tried.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from distributed import Client

import tfnb
from tests.cluster.conftest import worker_processes, workers
from tests.cluster.test_pipelines import Net
from tfnb.cluster import driver
from tfnb.cluster.driver import Cluster
from tfnb.cluster.engine.engine import Engine
from tfnb.cluster.notebook.recovery_copies import RecoveryCopies
from tfnb.cluster.notebook.variables_there import VariablesThere
from tfnb.cluster.server.core import Core
from tfnb.errors import TfnbError

PROCESSES = 4
ROWS = 4
LEAST, LONGEST = 60, 12.0  # steps of a training; seconds that it waits for its strikes
LIMIT, HUNG = 300.0, 600.0  # seconds that a training may take; that a history may, before all stacks are printed
AFTER = 15  # steps after the last strike
EPOCHS = 40  # of a pipeline
MODES: dict[str, dict[str, Any]] = {
    "sync": {}, "async": {"mode": "async"}, "bounded": {"mode": "bounded", "staleness": 2}, "backup": {"backup": 1},
    "allreduce": {"mode": "allreduce"}, "stages": {"mode": "pipeline"},
}  # fmt: skip
ORDERED = ("sync", "backup", "allreduce")
QUICK = {
    "tfnb.cluster.notebook.variables_there.REFRESH": 0.2,
    "tfnb.cluster.notebook.recovery_copies.COST": 2.0,
}  # copies come soon

# -- moments ----------------------------------------------------------------------------------------------------------

HERE: dict[str, tuple[Any, str]] = {
    "a copy begins": (RecoveryCopies, "_hold"), "a copy is fetched": (RecoveryCopies, "fetched"),
    "a copy is taken": (VariablesThere, "_take"), "values come home": (VariablesThere, "bring_home"),
    "values are pinned": (Engine, "pin"), "all are left": (Cluster, "_leave_lost"),
    "members begin": (driver, "start"), "values move there": (VariablesThere, "_create"),
    "plans are registered": (Engine, "register"), "steps are over": (Engine, "training_error"),
}  # fmt: skip
AT_THE_END = "steps are over"  # of a training whose data go on until its strikes have come
BEGIN = ("configure", "create", "open_training", "register_shard", "register", "load", "shard_copy")  # in a recovery
PINNED = ("pin", "pull", "unpin", "copy_shards", "forget_copies")
JOINT = ("contribute", "staged", "decided", "hold", "go", *PINNED)
THERE = {
    "sync": JOINT, "backup": JOINT, "async": ("push", "lend", "pause", *PINNED),
    "bounded": ("push", "enter", "depart", "lend", "pause", *PINNED),
    "allreduce": ("meet", "save", "stop", "stage", "prepare", "commit", "lend", "watch", *PINNED),
    "stages": ("run_window", "deliver", "stage", "prepare", "commit", *PINNED),
}  # fmt: skip
OFTEN = ("contribute", "staged", "decided", "push")  # in each step
VICTIMS = ("server", "task", "holder", "any", "server and holder", "server and task", "both servers", "newest")


class Strike(NamedTuple):
    """A strike: at a ``call`` of a moment, ``is_after`` it or before; ``victims`` beside the process that is there.

    ``where``: here, there, or neither. ``delay``: seconds from the moment until the kill, of one here.
    """

    where: str
    moment: str
    call: int
    is_after: bool
    victims: str
    delay: float

    @staticmethod
    def drawn(rng: random.Random, mode: str) -> list[Strike]:
        """Any; a process that is to die in a recovery comes with the kill of a server."""
        where = rng.choice(("here", "here", "there", "there", "begin", "at any time"))
        moment = rng.choice({"here": [*HERE], "there": THERE[mode], "begin": BEGIN}.get(where, [""]))
        call = rng.choice((0, 5, 60, 150) if moment in OFTEN else (0, 0, 1, 2)) if moment != AT_THE_END else 0
        delay = rng.choice((0.0, 0.0, rng.uniform(0, 0.05), rng.uniform(0, 1.5)))
        victims = rng.choice(("", "", "server", "task", "holder") if where in ("there", "begin") else VICTIMS)
        found = [Strike(where, moment, call, rng.random() < 0.5, victims, delay)]
        return found + [Strike("at any time", "", 0, False, "server", 0.1)] * (where == "begin")


def die_at(moment: str, call: int, is_after: bool, others: list[int]) -> None:
    """On a worker: end this process, and others, at a call of a request that it serves."""
    from tfnb.cluster.server.core import Core
    from tfnb.cluster.server.core_events import RequestArrival
    from tfnb.cluster.tasks.task import ClusterTask

    calls = iter(range(1 << 30))

    def struck() -> None:
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    on, answer = Core.on, ClusterTask._answer

    @wraps(on)
    def served(self: Any, event: Any, now: float) -> Any:
        is_now = isinstance(event, RequestArrival) and event.request.method == moment and next(calls) == call
        if is_now and not is_after:
            struck()
        effects = on(self, event, now)
        if is_now:
            struck()
        return effects

    @wraps(answer)
    async def answered(self: Any, request: Any) -> Any:
        is_now = request.method == moment and next(calls) == call
        if is_now and not is_after:
            struck()
        found = await answer(self, request)
        if is_now:
            struck()
        return found

    if moment in Core.METHODS:
        Core.on = served  # type: ignore[method-assign]
    else:
        ClusterTask._answer = answered  # type: ignore[method-assign]


def live_on() -> None:
    """On a worker: take back what `die_at` did."""
    from tfnb.cluster.server.core import Core
    from tfnb.cluster.tasks.task import ClusterTask

    while found := getattr(Core.on, "__wrapped__", None):
        Core.on = found  # type: ignore[method-assign]
    while found := getattr(ClusterTask._answer, "__wrapped__", None):
        ClusterTask._answer = found  # type: ignore[method-assign]


@dataclass
class Killer:
    """Carries out the strikes of one history, one after the other, on a cluster of ``dask``."""

    dask: Client
    cluster: Cluster
    left: list[Strike]
    rng: random.Random
    done: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    _calls: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: set[threading.Timer] = field(default_factory=set)

    def pids(self, who: str) -> list[int]:
        """Processes of these victims now."""
        engine, rng = self.cluster._engine, self.rng
        nannies = [nanny.pid for nanny in self.dask.cluster.workers.values() if getattr(nanny, "pid", None)]
        copy = self.cluster._variables.safety.newest
        servers = [m.info["pid"] for m in engine.servers]
        groups = {
            "server": servers, "task": [m.info["pid"] for m in engine.tasks],
            "holder": [] if copy is None else [m.info["pid"] for m in copy.holders.values()], "any": nannies,
        }  # fmt: skip
        if who == "both servers":
            return servers
        if who == "newest":
            return nannies[-1:]
        return [rng.choice(groups[one]) for one in who.split(" and ") if groups.get(one)]

    def kill(self, strike: Strike) -> None:
        """Now."""
        pids = self.pids(strike.victims)
        self.done.append(f"{strike.moment or 'at any time'} -> {strike.victims} {pids}")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def reached(self, moment: str, is_after: bool) -> None:
        """The notebook is at a moment."""
        with self._lock:
            if not self.left or self.left[0][:2] != ("here", moment) or self.left[0].is_after != is_after:
                return
            self._calls += 1
            if self._calls <= self.left[0].call:
                return
            strike = self._next()
        self._begin(strike)

    def _next(self) -> Strike:
        self._calls = 0
        return self.left.pop(0)

    def _begin(self, strike: Strike) -> None:
        if not strike.delay:
            self.kill(strike)
            return
        timer = threading.Timer(strike.delay, self.kill, [strike])
        self._waiting.add(timer)
        timer.start()

    def on_step(self, progress: Any) -> None:
        """Strikes elsewhere are made ready between two steps."""
        with self._lock:
            if not self.left or self.left[0].where == "here" or progress.step < 5:
                return
            strike = self._next()
        if strike.where == "at any time":
            self._begin(strike)
            return
        engine = self.cluster._engine
        of_servers = strike.where == "there" and strike.moment in Core.METHODS
        members = [*engine.servers, *(() if of_servers else engine.tasks)]
        member = self.rng.choice([one for one in members if one.is_there] or members)
        others = [pid for pid in self.pids(strike.victims) if pid != member.info["pid"]] if strike.victims else []
        self.done.append(f"{member.name} {member.info['pid']} at {strike.moment}, call {strike.call}, with {others}")
        about = strike.moment, strike.call, strike.is_after, others
        with suppress(OSError, KeyError):  # it is dead
            self.dask.run(die_at, *about, workers=[member.peer.addr])

    @property
    def is_over(self) -> bool:
        """Whether all have come, or have had their time."""
        is_at_end = self.left[:1] and self.left[0].moment == AT_THE_END
        return not self.left or bool(is_at_end) or time.monotonic() - self.begun > LONGEST

    def watch(self) -> ExitStack:
        """Watch all moments here while this is open."""
        stack = ExitStack()
        for name, (owner, method) in HERE.items():
            stack.enter_context(patch.object(owner, method, self._watched(name, getattr(owner, method))))
        stack.callback(lambda: [timer.cancel() for timer in self._waiting])
        return stack

    def _watched(self, moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
        async def awaited(*args: Any, **more: Any) -> Any:
            self.reached(moment, False)
            found = await function(*args, **more)
            self.reached(moment, True)
            return found

        def called(*args: Any, **more: Any) -> Any:
            self.reached(moment, False)
            found = function(*args, **more)
            self.reached(moment, True)
            return found

        return called if moment == "all are left" else awaited


# -- trainings --------------------------------------------------------------------------------------------------------


class Counted:
    """A count on each of two shards, and a value that depends on the order of the steps: v = v / 2 + number % 16."""

    def __init__(self) -> None:
        zeros = torch.zeros(300, dtype=torch.float64)
        self.counts = [tfnb.Variable(zeros.clone(), name=f"count{at}") for at in range(2)]
        self.order = tfnb.Variable(zeros.clone(), name="order")
        with tfnb.record("counted"):
            self.x = tfnb.placeholder(torch.ones(ROWS, dtype=torch.float64), name="x")
            one, number = (self.x * 0 + 1).mean(), self.x.mean()
            pairs = [(one.expand(300) * 1.0, count) for count in self.counts]
            pairs.append((self.order.read() * 0.5 * one - number, self.order))
            self.train = tfnb.train.SGD(1.0).apply_gradients(pairs)

    def rows(self, killer: Killer) -> Iterator[Any]:
        """Steps until all strikes have come."""
        after, number = AFTER, 0
        while after or number < LEAST:
            after -= killer.is_over and after > 0
            yield {self.x: torch.full((ROWS,), float(number % 16), dtype=torch.float64)}
            number += 1
            if number > LEAST:
                time.sleep(0.005)

    def arrays(self, steps: int) -> dict[Any, torch.Tensor]:
        """The same steps, as an array."""
        return {self.x: (torch.arange(steps) % 16).double().repeat_interleave(ROWS)}

    def wrong(self, steps: int, is_ordered: bool) -> str:
        """What is wrong after so many steps; empty if nothing is."""
        counts = [{*(-count.storage).tolist()} for count in self.counts]
        if counts != [{float(steps)}] * 2:
            return f"{steps} steps, counted {counts}"
        order = 0.0
        for number in range(steps):
            order = order / 2 + number % 16
        found = float(self.order.storage[0])
        return f"order is {found}, a replay has {order}" if is_ordered and abs(found - order) > 1e-9 else ""


class History(NamedTuple):
    """One history: what was wrong with it, and what was done to it."""

    mode: str
    wrong: str
    done: list[str]
    recoveries: int


@cache
def whole() -> dict[str, torch.Tensor]:
    """The weights after the pipeline in one process."""
    net = Net()
    net.fit(epochs=EPOCHS, shuffle=False)
    return net.state


def pipeline(killer: Killer, **options: Any) -> str:
    """Train a pipeline; what is wrong with it."""
    there = Net()
    there.fit(epochs=EPOCHS, shuffle=False, callbacks=[killer], timeout=LIMIT, restarts=1000, **options)
    state = there.state
    return "".join(f"{name} differs; " for name, value in whole().items() if not torch.equal(value, state[name]))


def counted(killer: Killer, rng: random.Random, is_ordered: bool, **options: Any) -> str:
    """Train in another mode; what is wrong with it."""
    net, steps = Counted(), rng.choice((0, 150, 400))
    more = {"batch_size": ROWS, "shuffle": False} if steps else {}
    data = net.arrays(steps) if steps else net.rows(killer)
    result = tfnb.fit(net.train, data, callbacks=[killer], timeout=LIMIT, restarts=1000, exact=False, **options, **more)
    if steps and result.steps != steps:
        return f"{result.steps} of {steps} steps"
    return net.wrong(result.steps, is_ordered)


def history(dask: Client, seed: int) -> History:
    """One history."""
    rng = random.Random(seed)
    mode, is_saved = rng.choice([*MODES]), rng.random() < 0.4
    strikes = [strike for _ in range(rng.choice((1, 2, 2, 3))) for strike in Strike.drawn(rng, mode)]
    workers(dask, PROCESSES)
    before, wrong, done = len(tfnb.recovery_log()), "", list[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = dict(MODES[mode])
        if is_saved:
            options |= {"checkpoint": folder, "checkpoint_every": 0.3}
        try:
            with closing(tfnb.connect(dask, ps="stages" if mode == "stages" else 2, timeout=120)) as cluster:
                killer = Killer(dask, cluster, strikes, rng)
                done = killer.done
                with killer.watch():
                    train = pipeline if mode == "stages" else partial(counted, rng=rng, is_ordered=mode in ORDERED)
                    wrong = train(killer, **options)
        except TfnbError as error:
            wrong = f"{type(error).__name__}: {error}"
        except Exception:
            wrong = f"untyped: {traceback.format_exc()}"
        finally:
            dask.run(live_on, on_error="ignore")
    return History(mode + (" with checkpoints" if is_saved else ""), wrong, done, len(tfnb.recovery_log()) - before)


def main(seconds: float, seed: int, only: bool = False) -> int:
    """Histories for so long, or the one of a seed; how many of them were wrong."""
    end, number, wrongs = time.monotonic() + seconds, seed, Counter[str]()
    tried, recoveries = Counter[str](), 0
    with ExitStack() as stack:
        for name, value in QUICK.items():
            stack.enter_context(patch(name, value))
        whole()  # before a cluster is connected
        dask = stack.enter_context(worker_processes(PROCESSES))
        while time.monotonic() < end:
            faulthandler.dump_traceback_later(HUNG, exit=True)
            begin = time.monotonic()
            found = history(dask, number)
            tried[found.mode] += 1
            recoveries += found.recoveries
            wrongs[found.mode] += bool(found.wrong)
            state = f"WRONG: {found.wrong}" if found.wrong else "right"
            took = f"{found.recoveries} recoveries, {time.monotonic() - begin:.1f} s; {found.done}"
            print(f"{number} {found.mode}: {state}; {took}", flush=True)  # noqa: T201
            number += 1
            if only:
                break
        faulthandler.cancel_dump_traceback_later()
    print(f"{sum(tried.values())} histories {dict(tried)}, {recoveries} recoveries, wrong: {dict(+wrongs)}")  # noqa: T201
    return sum(wrongs.values())


if __name__ == "__main__":
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # it is at a loss about what is killed
    torch.set_num_threads(1)  # as on tasks: bits of a pipeline are compared
    given = [*map(int, sys.argv[1:3])]
    seconds, seed = [*given, *(600, 1)[len(given) :]]
    sys.exit(min(100, main(seconds, seed, only=len(sys.argv) > 3)))
