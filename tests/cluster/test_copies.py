"""Copies of the shards held by other processes: a training goes on from them, whoever is killed or stopped, and when.

A strike waits for a copy that the registry names, and that is newer than what the notebook pulled.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client

import tfnb
from tests.cluster.conftest import SOON, WORKERS, stop, until, worker_processes, workers
from tests.cluster.test_cuts import Counters
from tests.cluster.test_recovery import rated
from tests.cluster.test_registry import entry
from tfnb.cluster.engine.engine import Pins
from tfnb.cluster.notebook.recovery_copies import RecoveryCopies
from tfnb.cluster.notebook.steps_there import Steps
from tfnb.errors import ParameterServerLost

AFTER = 20  # steps that a training takes after a strike


@pytest.fixture(autouse=True)
def _all_workers(dask: Client) -> Iterator[None]:
    """Those that tests kill are started again."""
    yield
    workers(dask, WORKERS)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come soon; once there is one, the notebook pulls no more."""
    monkeypatch.setattr("tfnb.cluster.notebook.variables_there.REFRESH", 0.2)
    monkeypatch.setattr("tfnb.cluster.notebook.variables_there.RARER", 1e9)
    for name in ("WITHIN", "FETCHED_WITHIN"):  # on a busy machine all of it takes long
        monkeypatch.setattr(f"tfnb.cluster.notebook.recovery_copies.{name}", SOON)
    monkeypatch.setattr("tfnb.cluster.driver.RECOVERED_WITHIN", SOON)


def kill(*members: Any) -> None:
    """SIGKILL, all at once."""
    for member in members:
        os.kill(member.info["pid"], signal.SIGKILL)


class Strikes:
    """A training of counters in steps without end, until ``strikes`` have come, each once its condition is true.

    A strike is a function of the cluster, given the newest copy, that says whether it has struck.
    """

    def __init__(self, cluster: Any, *strikes: Callable[[Any], bool], shards: int = 2) -> None:
        self.counters, self.cluster, self.left = Counters(shards=shards), cluster, list(strikes)
        self.end, self.after = time.monotonic() + SOON, AFTER

    def rows(self) -> Iterator[Any]:
        while self.left or self.after:
            assert not self.left or time.monotonic() < self.end, "no copy was made in time"
            self.after -= not self.left
            yield {self.counters.x: torch.ones(4)}

    def on_step(self, progress: Any) -> None:
        """`fit` tells of a step."""
        if self.left and self.left[0](newest(self.cluster)):
            self.left.pop(0)

    def fit(self, **options: Any) -> tuple[int, list[float]]:
        """Train; steps and counts."""
        result = tfnb.fit(self.counters.train, self.rows(), callbacks=[self], **options)
        return result.steps, self.counters.counts()


def newest(cluster: Any) -> Any:
    """The copy that the registry names, if it is newer than what was pulled."""
    copy, told = cluster._variables.safety.newest, entry(cluster.client, cluster)["copy"]
    is_told = copy is not None and told.get("id") == f"{cluster._engine.epoch}-{copy.number}"
    return copy if is_told and copy.pins.step > cluster.pulled_step else None


def held(client: Client) -> int:
    """Bytes of copies that all workers hold."""

    def of(dask_worker: Any) -> int:
        return sum(actor.task.copies.nbytes for actor in dask_worker.state.actors.values())

    return sum(client.run(of).values())


def test_another_process_holds_the_copy_and_registry_and_card_say_so(dask: Client, connect: Any) -> None:
    cluster = connect(2)
    seen: list[Any] = []

    def look(copy: Any) -> bool:
        if copy is not None:
            seen.append((copy, entry(dask, cluster)["copy"], str(cluster.status()), held(dask)))
        return copy is not None

    striking = Strikes(cluster, look)
    steps, counts = striking.fit()
    assert counts == [steps, steps]
    ((copy, told, card, nbytes),) = seen
    serving = {member.process for member in cluster._engine.servers}
    assert copy.holders.keys() == {0, 1} and not serving & {member.process for member in copy.holders.values()}
    assert told["bytes"] == 2 * 200 * 8 and nbytes >= told["bytes"]
    assert told["holders"] == {str(shard): member.name for shard, member in copy.holders.items()}
    assert f"copy for a recovery: step {copy.pins.step}, 3.2 kB held by task:0" in card
    assert "of copies for a recovery" in card
    until(lambda: not held(dask) and not entry(dask, cluster)["copy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}, {"backup": 1}], ids=str
)
def test_a_training_goes_on_from_the_holders_copy(connect: Any, options: dict[str, Any], capsys: Any) -> None:
    cluster = connect(2)
    struck: list[Any] = []

    def strike(copy: Any) -> bool:
        if copy is not None:
            struck.append(copy)
            kill(cluster._engine.servers[-1])
        return copy is not None

    steps, counts = Strikes(cluster, strike).fit(**options)
    assert counts == [steps, steps]
    recovery = tfnb.recovery_log()[-1]
    assert recovery.holder == "task:0 and task:1" and recovery.kept >= struck[0].pins.step
    assert f"Restored from the copy held by task:0 and task:1 of step {recovery.kept}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_killed_while_a_copy_is_on_its_way(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = connect(2)
    hold, struck, made = RecoveryCopies._hold, list[int](), list[Any]()

    async def holds(self: RecoveryCopies, number: int, pins: Pins) -> Any:
        if made and not struck:
            struck.append(number)
            kill(cluster._engine.servers[0])
        return await hold(self, number, pins)

    monkeypatch.setattr(RecoveryCopies, "_hold", holds)

    def strike(copy: Any) -> bool:
        made.extend([copy] if copy is not None else [])
        return bool(struck)

    steps, counts = Strikes(cluster, strike).fit()
    assert counts == [steps, steps] and struck
    assert tfnb.recovery_log()[-1].kept >= made[0].pins.step


@pytest.mark.slow
@pytest.mark.parametrize("order", ["together", "holder first"])
def test_a_server_lost_with_the_holder_leaves_the_notebooks_copy(
    connect: Any, order: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = connect(2)

    def strike(copy: Any) -> bool:
        if copy is None:
            return False
        monkeypatch.setattr(RecoveryCopies, "refresh", lambda self, every: None)  # the next copy does not come before
        holder = copy.holders[0]
        kill(holder)
        if order == "holder first":
            until(lambda: not holder.is_there)
        kill(cluster._engine.servers[0])
        return True

    pulled = cluster.pulled_step
    steps, counts = Strikes(cluster, strike).fit()
    assert counts == [steps, steps]
    assert tfnb.recovery_log()[-1].holder == "" and tfnb.recovery_log()[-1].kept >= pulled
    assert "Restored from the notebook's copy of step" in capsys.readouterr().out


class CheckpointStrikes(Strikes):
    """Strikes that find a checkpoint newer than the copy and than what was pulled; no copy comes after it."""

    def __init__(self, cluster: Any, strike: Callable[[Any], None], folder: Path) -> None:
        super().__init__(cluster, self.saved)
        self.saver, self._strike = tfnb.train.Saver(folder), strike
        self.saved_step = 0

    def saved(self, copy: Any) -> bool:
        """Write a checkpoint beside a copy, and strike."""
        safety = self.cluster._variables.safety
        safety._due = float("inf") if copy is not None else safety._due
        if copy is None or safety._is_copying or self.cluster.step <= copy.pins.step:
            return False
        self.saver.begin()
        self.saver.settle()
        self.saved_step = safety.written.pins.step
        assert self.saved_step > copy.pins.step and Path(safety.written.file) == self.saver.latest
        self._strike(copy)
        return True

    def trained(self, **options: Any) -> Any:
        """Train, see that each step counts once, and return the recovery."""
        steps, counts = self.fit(checkpoint=self.saver, checkpoint_every=1e9, **options)
        assert counts == [steps, steps]
        return tfnb.recovery_log()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}], ids=str)
def test_a_server_and_the_holder_of_its_copy_lost_leave_the_newer_checkpoint(
    connect: Any, tmp_path: Path, options: dict[str, Any], capsys: Any
) -> None:
    cluster = connect(2)
    striking = CheckpointStrikes(
        cluster, lambda copy: kill(copy.holders[0], copy.holders[1], cluster._engine.servers[0]), tmp_path
    )
    recovery = striking.trained(**options)
    assert recovery.kept == striking.saved_step > 0 and not recovery.holder and not recovery.passed_over
    assert f"Restored from the checkpoint {tmp_path}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkpoint_that_is_newer_than_the_copy_is_taken(connect: Any, tmp_path: Path) -> None:
    cluster = connect(2)
    striking = CheckpointStrikes(cluster, lambda copy: kill(cluster._engine.servers[-1]), tmp_path)
    assert striking.trained().source == f"the checkpoint {striking.saver.paths[0]}"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_for_the_copy(connect: Any, tmp_path: Path, capsys: Any) -> None:
    cluster = connect(2)

    def damage(copy: Any) -> None:
        for shard in (tmp_path / "shards").iterdir():
            shard.write_bytes(shard.read_bytes()[:-8])
        kill(cluster._engine.servers[0])

    striking = CheckpointStrikes(cluster, damage, tmp_path)
    recovery = striking.trained()
    assert recovery.holder == "task:0 and task:1" and 0 < recovery.kept < striking.saved_step
    (why,) = recovery.passed_over
    assert why.startswith(f"the checkpoint {tmp_path}") and f"of step {striking.saved_step}: " in why
    assert f"  Passed over: {why}." in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkpoint_without_all_variables_that_steps_wrote_is_no_copy(connect: Any, tmp_path: Path) -> None:
    cluster, other = connect(2), Counters(shards=1)

    def strike(copy: Any) -> None:
        tfnb.run(other.train, {other.x: torch.ones(4)})
        kill(*copy.holders.values(), cluster._engine.servers[0])

    recovery = CheckpointStrikes(cluster, strike, tmp_path).trained()
    assert recovery.source == "the notebook's copy" and recovery.gone == 1 and other.counts() == [0]
    assert "it lacks count0, which was written since" in recovery.passed_over[0]


@pytest.mark.slow
def test_a_server_lost_before_any_copy_of_earlier_steps_is_one_typed_error(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, counters = connect(2), Counters()
    for _ in range(3):
        tfnb.run(counters.train, {counters.x: torch.ones(4)})
    show = Steps._show

    def killed(self: Any) -> None:
        kill(*cluster._engine.servers)
        show(self)

    monkeypatch.setattr(Steps, "_show", killed)
    with pytest.raises(ParameterServerLost, match="no process and no checkpoint holds newer ones"):
        tfnb.fit(counters.train, counters.rows(10))
    assert counters.counts() == [0, 0]


@pytest.mark.slow
def test_a_worker_that_joins_takes_the_place_of_a_killed_holder() -> None:
    with worker_processes(2) as client, closing(tfnb.connect(client, ps=1)) as cluster:
        pids: list[int] = []

        def kill_holder(copy: Any) -> bool:
            if copy is not None:
                pids.append(copy.holders[0].info["pid"])
                kill(copy.holders[0])
            return copy is not None

        def kill_server(copy: Any) -> bool:
            if copy is None or copy.holders[0].info["pid"] == pids[0]:
                return False
            kill(cluster._engine.servers[0])
            return True

        steps, counts = Strikes(cluster, kill_holder, kill_server, shards=1).fit(timeout=SOON)
        assert counts == [steps]
        assert tfnb.recovery_log()[-1].holder == "task:0"


@pytest.mark.slow
def test_a_stopped_holder_is_given_up_and_another_one_chosen(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that are not stopped go on meanwhile; the copies of the stopped one are made again by the other."""
    monkeypatch.setattr("tfnb.cluster.notebook.recovery_copies.WITHIN", 1.0)
    cluster = connect(2)
    stopped: list[Any] = []
    began: list[int] = []

    def freeze(copy: Any) -> bool:
        if copy is not None:
            stopped.append(copy.holders[0])
            began.append(cluster.step)
            stop(stopped[0].info["pid"])
        return copy is not None

    def kill_server(copy: Any) -> bool:
        if copy is None or stopped[0] in copy.holders.values():
            return False
        assert cluster.step > began[0] + 5, "the training went on"
        os.kill(stopped[0].info["pid"], signal.SIGCONT)  # else tasks could not begin anew there
        kill(cluster._engine.servers[1])
        return True

    try:
        steps, counts = Strikes(cluster, freeze, kill_server).fit(mode="async")
    finally:
        os.kill(stopped[0].info["pid"], signal.SIGCONT)
    assert counts == [steps, steps]
    assert tfnb.recovery_log()[-1].holder in ("task:0", "task:1") and tfnb.recovery_log()[-1].holder != stopped[0].name


@pytest.mark.slow
def test_a_process_without_room_holds_nothing_and_the_notebook_pulls_as_ever(dask: Client, connect: Any) -> None:
    cluster = connect(2)

    def fill(dask_worker: Any) -> None:
        for actor in dask_worker.state.actors.values():
            actor.task.budget = 100

    dask.run(fill)
    end = time.monotonic() + SOON
    counters = Counters()

    def rows() -> Iterator[Any]:
        while cluster.pulled_step < 5:
            assert time.monotonic() < end
            yield {counters.x: torch.ones(4)}

    result = tfnb.fit(counters.train, rows())
    assert counters.counts() == [result.steps] * 2
    assert not held(dask) and cluster._variables.safety.newest is None
    assert set(cluster._variables.safety._missed) == set(cluster._engine.tasks)


@pytest.mark.slow
def test_without_restarts_the_values_left_are_the_holders(connect: Any) -> None:
    cluster = connect(2)

    def strike(copy: Any) -> bool:
        if copy is not None:
            kill(cluster._engine.servers[-1])
        return copy is not None

    striking = Strikes(cluster, strike)
    with pytest.raises(
        ParameterServerLost,
        match=r"The local variables hold the copy held by task:0 and task:1, of step \d+, \d+\.\d s old",
    ) as caught:
        striking.fit(restarts=0)
    left = caught.value.details["pulled_step"]
    assert left > 0 and striking.counters.counts() == [left, left]
    with pytest.warns(UserWarning, match=f"runs are here now, with the values of its step {left}"):
        tfnb.run(striking.counters.train, {striking.counters.x: torch.ones(4)})
    assert striking.counters.counts() == [left + 1] * 2


@pytest.mark.parametrize("found_by", ["run", "the next run", "connect", "close"])
def test_values_of_a_loop_of_runs_are_the_holders(dask: Client, connect: Any, found_by: str) -> None:
    """The loss is the error of a run; found between two runs, whatever comes next has the newest values."""
    cluster, counters, end = connect(2), Counters(shards=2), time.monotonic() + SOON
    one = {counters.x: torch.ones(4)}
    while (copy := newest(cluster)) is None or copy.pins.step < 10:
        assert time.monotonic() < end, "no copy was made in time"
        tfnb.run(counters.train, one)
    kill(cluster._engine.servers[-1])
    taken = 0
    if found_by == "run":
        with pytest.raises(ParameterServerLost, match=r"hold the copy held by task:[01].*, of step \d+") as caught:
            while True:
                tfnb.run(counters.train, one)
        assert counters.counts() == [caught.value.details["pulled_step"]] * 2
    else:
        with pytest.raises(ParameterServerLost):
            cluster._do("finding the loss", None, cluster._variables.bring_home)
    if found_by == "the next run":
        with pytest.warns(UserWarning, match=r"runs are here now, with the values of its step \d\d"):
            tfnb.run(counters.train, one)
        taken = 1
    if found_by == "connect":
        workers(dask, WORKERS)
        connect(2)
    if found_by == "close":
        cluster.close()
    first, second = counters.counts()
    assert first == second >= copy.pins.step + taken


def test_a_rate_that_a_loop_assigns_in_each_turn_leaves_the_copies_of_the_rest(connect: Any) -> None:
    rate, weight, x, train = rated("assigned_in_a_loop")
    cluster, end = connect(1), time.monotonic() + SOON
    while (copy := newest(cluster)) is None or copy.pins.step < 10:
        assert time.monotonic() < end, "no copy was made in time"
        rate.assign(torch.tensor(1.0, dtype=torch.float64))
        tfnb.run(train, {x: torch.ones(4)})
    kill(cluster._engine.servers[0])
    with pytest.raises(ParameterServerLost, match="hold the copy held by") as caught:
        while True:
            tfnb.run(train, {x: torch.ones(4)})
    assert weight.value().tolist() == [caught.value.details["pulled_step"]] * 2 and weight.value()[0] >= 10
    assert rate.value() == 1.0


@pytest.mark.slow
def test_what_was_assigned_since_the_copy_stays(connect: Any) -> None:
    rate, weight, x, train = rated("assigned_since")
    cluster = connect(1)
    striking = Strikes(cluster, lambda copy: copy is not None and assign(copy))
    striking.counters.train, striking.counters.x = train, x

    def assign(copy: Any) -> bool:
        rate.assign(torch.tensor(3.0, dtype=torch.float64))
        kill(cluster._engine.servers[0])
        return True

    result = tfnb.fit(train, striking.rows(), callbacks=[striking])
    kept = tfnb.recovery_log()[-1].kept
    assert tfnb.recovery_log()[-1].holder and float(rate.value()) == 3.0
    assert weight.value().tolist() == [kept + 3.0 * (result.steps - kept)] * 2


@pytest.mark.slow
def test_the_notebook_holds_the_copy_beside_queues_and_with_one_worker(dask: Client, connect: Any) -> None:
    counters = Counters(shards=1)
    with worker_processes(1) as client, closing(tfnb.connect(client, ps=1)) as alone:
        _steps_until(alone, counters, lambda: alone.pulled_step > 5)
        assert alone._variables.safety.newest is None and not held(client)
    queue = tfnb.FIFOQueue(4, torch.float32)
    cluster = connect(2)
    queue.enqueue(torch.tensor(1.0))
    _steps_until(cluster, counters, lambda: cluster.pulled_step > 5)
    assert cluster._variables.safety.newest is None and not held(dask)
    queue.close()


def _steps_until(cluster: Any, counters: Counters, is_so: Callable[[], bool]) -> None:
    end, before = time.monotonic() + SOON, counters.counts()[0]

    def rows() -> Iterator[Any]:
        while not is_so():
            assert time.monotonic() < end
            yield {counters.x: torch.ones(4)}

    result = tfnb.fit(counters.train, rows())
    assert counters.counts() == [before + result.steps]
