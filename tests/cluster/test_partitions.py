"""A link that is cut or bad in mid-training: no update is lost, applied twice or torn, and nothing hangs."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cluster.conftest import one_by_one
from tests.cluster.far_worker import Link, far_worker, needs_root
from tests.cluster.test_cuts import Counters
from tfnb.cluster.driver import Cluster, connect
from tfnb.cluster.engine.members import Mode
from tfnb.cluster.notebook.steps_there import batches
from tfnb.cluster.wire.messages import GIVEN_UP
from tfnb.errors import ParameterServerLost
from tfnb.execution import lower

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(600), needs_root,
    pytest.mark.filterwarnings("ignore:.* was lost", "ignore:task"),
]  # fmt: skip

LATE = {False: 40.0, True: GIVEN_UP + 40.0}  # seconds that no step may end for; of a quiet machine 5 and GIVEN_UP
STEPS = 2000
SYNC, ASYNC = Mode(), Mode("async")


def flap(link: Link) -> None:
    for _ in range(3):
        link.cut()
        time.sleep(1.0)
        link.heal()
        time.sleep(1.0)


def is_bad(link: Link) -> None:
    link.delay, link.loss = 0.2, 0.02
    time.sleep(6.0)
    link.delay = link.loss = 0.0


def says_nothing(link: Link) -> None:
    link.cut(goes=True)


def hears_nothing(link: Link) -> None:
    link.cut(comes=True)


FAULTS = {
    False: (Link.cut, says_nothing, flap),
    True: (Link.cut, hears_nothing, is_bad),
}  # of links to a task, to a server


class Trained:
    """A training during which a link fails from the second second on, and what was wrong with it."""

    def __init__(
        self, cluster: Cluster, mode: Mode, fault: Callable[[Link], None], link: Link, late: float
    ) -> None:  # fmt: skip
        self.cluster, self.counters = cluster, Counters()
        self.gap, self.steps, self.is_lost, self.late = 0.0, 0, False, late
        program = lower(self.counters.train.graph, [self.counters.train.value], [self.counters.x.value])
        data = batches(program, (([torch.ones(4)], n) for n in range(STEPS)))
        striker = threading.Timer(1.0, fault, [link])
        striker.start()
        last = time.monotonic()
        try:
            for self.steps, _ in one_by_one(cluster, program, data, mode=mode, timeout=240):
                self.gap, last = max(self.gap, time.monotonic() - last), time.monotonic()
        except ParameterServerLost:
            self.is_lost = True
        self.gap = max(self.gap, time.monotonic() - last)
        striker.join()

    def wrong(self) -> Counter[str]:
        """Updates lost, doubled and torn, and steps that came late."""
        step = self.cluster.pulled_step if self.is_lost else self.cluster.pull()
        counts = [int(count) for count in self.counters.counts()]
        found = Counter(torn=int(len({*counts}) > 1), late=int(self.gap > self.late))
        found["lost"] += sum(max(0, step - count) for count in counts)
        found["doubled"] += sum(max(0, count - step) for count in counts)
        return found


@pytest.mark.parametrize(
    ("fault", "mode", "is_server"),
    [
        *((fault, SYNC, is_server) for is_server, faults in FAULTS.items() for fault in faults),
        *((fault, ASYNC, False) for fault in (says_nothing, flap)),
    ],
    ids=lambda given: getattr(given, "__name__", getattr(given, "name", "server" if given else "task")),
)
def test_c63_rows_7_and_8_nothing_is_lost_doubled_torn_or_late(fault, mode, is_server, tmp_path: Path, capsys) -> None:
    with far_worker(3, is_first=is_server, path=tmp_path) as (client, link):
        cluster = connect(client, ps=2, timeout=120, insecure=True)
        group = cluster._engine.servers if is_server else cluster._engine.tasks
        assert any(link.there in member.peer.addr for member in group)
        trained = Trained(cluster, mode, fault, link, LATE[is_server])
        wrong = trained.wrong()
        link.heal()
        time.sleep(3.0)  # who was cut off goes on now, and may write nothing
        wrong += trained.wrong()
        tasks = len(cluster.tasks)
        cluster.close()
    with capsys.disabled():
        four = ", ".join(str(wrong[name]) for name in ("lost", "doubled", "torn", "late"))
        text = f"lost, doubled, torn, over deadline = {four}; of {trained.steps} steps, {tasks} tasks left, "
        sys.stdout.write(f"\n{text}{'a server lost, ' * trained.is_lost}longest pause {trained.gap:.1f} s\n")
    assert not any(wrong.values())
    assert trained.is_lost or trained.steps == STEPS
    assert not trained.is_lost or is_server
