"""Training goes on by itself after a parameter server was killed: each step counts once, in whatever mode."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tests.cluster.conftest import WORKERS, stop, until, workers
from tests.cluster.test_cuts import Counters, set_hold
from tests.cluster.test_faults import DROPPED, Interrupter
from tfnb.cluster.members import deploy
from tfnb.cluster.members.deploy import start
from tfnb.cluster.notebook.variables_there import VariablesThere
from tfnb.cluster.server.courses import HOLD
from tfnb.cluster.wire.transport import ClientLink
from tfnb.errors import FailedPrecondition, ParameterServerLost
from tfnb.session import default_session

STEPS = 400


@pytest.fixture(autouse=True)
def _all_workers(dask: Any) -> Iterator[None]:
    """Those that tests kill are started again."""
    yield
    workers(dask, WORKERS)


def kill_server(cluster: Any, at: int = -1) -> None:
    """SIGKILL."""
    os.kill(cluster._engine.servers[at].info["pid"], signal.SIGKILL)


class Killer:
    """Kills a server when a step of the training is told."""

    def __init__(self, cluster: Any, *steps: int, at: int = -1) -> None:
        self.cluster, self.left, self.at = cluster, list(steps), at
        self.heard: list[tuple[int, bool]] = []

    def on_step(self, progress: Any) -> None:
        self.heard.append((progress.step, progress.again))
        if self.left and progress.step >= self.left[0]:
            self.left.pop(0)
            kill_server(self.cluster, self.at)


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}, {"backup": 1}, {"mode": "allreduce"}],
    ids=str,
)
def test_no_step_is_lost_or_counted_twice(connect: Any, options: dict[str, Any], capsys: Any) -> None:
    counters = Counters(pause=2)
    cluster = connect(2)
    before = len(tfnb.recovery_log())
    killer = Killer(cluster, 150)
    result = tfnb.fit(counters.train, {counters.x: torch.ones(4 * STEPS)}, batch_size=4, callbacks=[killer], **options)
    assert result.steps == STEPS and counters.counts() == [STEPS, STEPS]
    (recovery,) = tfnb.recovery_log()[before:]
    assert recovery.redone == recovery.step - recovery.kept >= 0 and "was lost" in recovery.lost
    assert str(recovery) in capsys.readouterr().out
    assert killer.heard[-1][0] == STEPS and len(killer.heard) >= STEPS - recovery.kept


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_training_goes_on_though_another_server_stands_still_for_long(connect: Any, mode: str) -> None:
    """Its process is replaced, too: nobody else would be served there."""
    counters = Counters(pause=2)
    cluster = connect(2)
    before = len(tfnb.recovery_log())
    silent, killed = cluster._engine.servers
    struck = []

    def strike(progress: Any) -> None:
        if progress.step == 150 and not struck:  # after the recovery another step may be the 150th that is told
            struck.append(progress.step)
            stop(silent.info["pid"])
            os.kill(killed.info["pid"], signal.SIGKILL)

    try:
        data = {counters.x: torch.ones(4 * STEPS)}
        result = tfnb.fit(counters.train, data, batch_size=4, callbacks=[Each(strike)], mode=mode)
    finally:
        with suppress(ProcessLookupError):
            os.kill(silent.info["pid"], signal.SIGCONT)
    assert result.steps == STEPS and counters.counts() == [STEPS, STEPS]
    assert len(tfnb.recovery_log()) - before == 1


class Net:
    """A net with dropout, batch norm and Adam, and data of which no two rows are alike."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1)).double()
        gen = torch.Generator().manual_seed(1)
        self.rows, self.labels = (
            torch.randn(600, 6, generator=gen).double(),
            torch.randn(600, 1, generator=gen).double(),
        )
        with tfnb.record("net") as self.graph:
            self.x, self.y = tfnb.placeholder(self.rows[:8], name="x"), tfnb.placeholder(self.labels[:8], name="y")
            self.loss = (self.model(self.x) - self.y).square().mean()
            self.train = tfnb.train.Adam(1e-2).minimize(self.loss)

    @property
    def data(self) -> Any:
        return {self.x: self.rows, self.y: self.labels}

    def batches(self, kind: str) -> Any:
        """The same batches, in the same order, as what `fit` takes."""
        cut = [(self.rows[at : at + 20], self.labels[at : at + 20]) for at in range(0, 600, 20)]
        if kind == "list":
            return cut
        return iter(cut) if kind == "iterator" else tfnb.Source(cut, name=f"source{time.monotonic_ns()}")

    def state(self) -> list[torch.Tensor]:
        return [variable.value().clone() for variable in self.graph.variables]


def fitted(net: Net, kind: str, **options: Any) -> tfnb.RunResult:
    """Two passes over the data; over what can be iterated once, one."""
    data = net.data if kind == "arrays" else net.batches(kind)
    more: dict[str, Any] = {"batch_size": 20} if kind == "arrays" else {"feeds": (net.x, net.y)}
    epochs = 1 if kind == "iterator" else 2
    return tfnb.fit(net.train, data, epochs=epochs, watch={"loss": net.loss}, exact=False, **more, **options)


@pytest.mark.parametrize("kind", ["arrays", "list", "iterator", "source"])
def test_values_and_history_are_those_of_a_training_without_a_fault(connect: Any, kind: str) -> None:
    found = []
    for steps in ((), (10, 25)):
        net = Net()
        with closing(connect(2)) as cluster:
            before = len(tfnb.recovery_log())
            result = fitted(net, kind, callbacks=[Killer(cluster, *steps)])
            assert len(tfnb.recovery_log()) - before == len(steps)
        found.append((result.steps, result.history, net.state()))
    (steps, history, state), (again, told, ended) = found
    assert steps == again and [entry["step"] for entry in told] == [entry["step"] for entry in history]
    torch.testing.assert_close(ended, state, rtol=0, atol=0)


def test_an_epoch_with_validation_is_told_once(connect: Any) -> None:
    net, epochs = Net(), []
    cluster = connect(2)

    def told(progress: Any) -> None:
        epochs.append(progress.epoch)
        if progress.epoch == 2:
            kill_server(cluster)

    result = tfnb.fit(
        net.train, net.data, epochs=3, batch_size=20, watch={"loss": net.loss}, exact=False, validation=net.data,
        callbacks=[told, Killer(cluster, 10)],
    )  # fmt: skip
    assert epochs == [1, 2, 3] and result.steps == 90 and all("val_loss" in entry for entry in result.history)


def test_a_successor_that_joined_before_the_loss_was_noticed_is_waited_for_no_longer(connect: Any) -> None:
    """An evaluation of some seconds, in which a server is killed, and its nanny starts another worker."""
    counters = Counters()
    cluster = connect(WORKERS - 1)

    def on_epoch(progress: Any) -> None:
        if progress.epoch == 1:
            kill_server(cluster)
            until(lambda: len(cluster._engine.places) > WORKERS - 1, 60)

    result = tfnb.fit(counters.train, {counters.x: torch.ones(160)}, batch_size=4, epochs=2, callbacks=[on_epoch])
    assert result.steps == 80 and counters.counts() == [80, 80]
    assert tfnb.recovery_log()[-1].seconds < 10


def test_a_server_lost_at_the_last_step(connect: Any) -> None:
    counters = Counters()
    cluster = connect(2)
    result = tfnb.fit(counters.train, counters.rows(50), callbacks=[Killer(cluster, 50)])
    assert result.steps == 50 and counters.counts() == [50, 50]


@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}], ids=str)
def test_a_copy_made_after_the_last_step_has_seen_all_steps(
    connect: Any, options: dict[str, Any], monkeypatch: Any
) -> None:
    """The training is over, the values have not come here, and holders take a copy: then a server dies."""
    counters = Counters(pause=2)
    cluster = connect(2)
    engine, variables = cluster._engine, cluster._variables
    kills, behind = iter([True]), VariablesThere.sent_but_behind

    def kills_first(there: VariablesThere) -> Any:
        if there is variables and engine.step >= 60 and next(kills, False):
            safety = variables.safety

            def is_copied() -> bool:  # a holder may be about to be replaced
                safety.refresh(0.0)
                engine.link.wait(engine.link.start_aside(safety._copy, 0.0), None, "a copy")
                return safety.newest is not None and safety.newest.pins.step == 60

            until(is_copied)
            kill_server(cluster)
        return behind(there)

    monkeypatch.setattr(VariablesThere, "sent_but_behind", kills_first)
    result = tfnb.fit(counters.train, counters.rows(60), **options)
    assert next(kills, None) is None and result.steps == 60 and counters.counts() == [60, 60]


def test_none_of_the_budget_is_an_error_at_once(connect: Any) -> None:
    counters = Counters(pause=2)
    cluster = connect(2)
    before = len(tfnb.recovery_log())
    with pytest.raises(ParameterServerLost, match="The local variables hold the ") as caught:
        tfnb.fit(counters.train, counters.rows(STEPS), callbacks=[Killer(cluster, 20)], restarts=0)
    assert counters.counts() == [caught.value.details["pulled_step"]] * 2
    assert len(tfnb.recovery_log()) == before


def test_a_run_that_writes_nothing_leaves_the_newer_checkpoint_of_a_lost_cluster_ahead(
    connect: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    """Here and on another cluster; what a step, a restore or another training wrote since then is not thrown away."""
    w = tfnb.Variable(torch.zeros(3), name="w")
    with tfnb.record("ahead") as graph:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        loss = (w - x).square().mean()
        train = tfnb.train.SGD(0.1).minimize(loss)
    data, fed, state = {x: torch.ones(400, 3)}, {x: torch.ones(4, 3)}, default_session(graph).state
    cluster, saver = connect(1), tfnb.train.Saver(tmp_path)

    def strike(progress: Any) -> None:
        if saver.written is None:
            saver.begin()
            saver.settle()
            kill_server(cluster)

    monkeypatch.setattr("tfnb.cluster.notebook.variables_there.REFRESH", 1e9)  # no value comes here before the end
    fitted = partial(tfnb.fit, train, data, batch_size=4, checkpoint=saver, checkpoint_every=1e9)
    with pytest.raises(ParameterServerLost, match=r"resume=True goes on from step \d+, of "):
        fitted(callbacks=[Each(strike)], restarts=0)
    assert saver.latest is not None
    with pytest.warns(UserWarning, match="runs are here now"):
        tfnb.run(loss, fed)
    assert tfnb.run(loss, fed) == 1 and state.ahead == saver.latest
    there = state.inputs.ahead
    with closing(connect(2)):
        tfnb.run(loss, fed)
        assert state.ahead == saver.latest
        tfnb.run(train, fed)
        assert state.ahead is None
    for write in (lambda: tfnb.run(train, fed), lambda: w.assign(torch.zeros(3)), lambda: state.restore(saver.latest)):
        state.fell_behind(there.file, state.trained)
        assert state.ahead == there.file
        write()
        assert state.ahead is None
    w.assign(torch.zeros(3))
    state.inputs.trained = there.trained
    state.fell_behind(there.file, there.trained)
    tfnb.run(loss, fed)
    assert fitted(resume=True).steps == 100 - int(Path(there.file).stem.removeprefix("ckpt-"))


@pytest.mark.parametrize("there", [False, True], ids=["begun here", "begun there"])
def test_a_stopped_training_goes_on_there_or_here(connect: Any, there: bool) -> None:
    whole = Net()
    cluster = connect(1)
    fitted(whole, "arrays")
    cluster.close()
    net = Net()
    for is_there in (there, not there):
        cluster = connect(1) if is_there else None
        stop = [lambda progress: progress.stop() if progress.epoch == 1 else None]
        result = fitted(net, "arrays", resume=is_there != there, callbacks=stop)
        if cluster is not None:
            cluster.close()
        assert result.steps == 30
    torch.testing.assert_close(net.state(), whole.state(), rtol=1e-5, atol=1e-8)  # here and there sums differ


@DROPPED
@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}], ids=str)
def test_a_training_interrupted_while_a_task_is_lost_goes_on_with_the_steps_that_are_left(
    connect: Any, dask: Any, mode: dict[str, Any]
) -> None:
    """A step in doubt at the interrupt is in the count of the call, or is taken by the one that resumes; never both.

    Asynchronous tasks may have applied steps before others: then there is nothing to resume, and nothing is written.
    """
    source, hits = random.Random(7), 0
    for _ in range(6):
        counters, struck = Counters(pause=2), list[int]()
        cluster = connect(2)

        def strike(progress: Any, cluster: Any = cluster, struck: Any = struck) -> None:
            if progress.step >= 20 and not struck:
                struck.append(cluster._engine.tasks[-1].info["pid"])
                os.kill(struck[0], signal.SIGKILL)

        fitted = partial(tfnb.fit, counters.train, {counters.x: torch.ones(800)}, batch_size=4, **mode)
        with Interrupter() as interrupter:
            hits += interrupter.stops(partial(fitted, callbacks=[Each(strike)]), source.uniform(0.2, 1.2))
        before = counters.counts()
        assert len(set(before)) == 1, "not a whole number of steps"
        if before[0] < 200:
            try:
                assert fitted(resume=True).steps == 200 - before[0]
                assert counters.counts() == [200, 200]
            except FailedPrecondition:
                assert mode and counters.counts() == before
        cluster.close()
        workers(dask, WORKERS)
    assert hits, "no interrupt came in time"


def test_steps_that_the_notebook_takes_one_by_one_count_once(connect: Any) -> None:
    counters = Counters()
    cluster = connect(2)
    killer = Killer(cluster, 30, 60)
    result = tfnb.fit(
        [counters.train, *counters.variables], {counters.x: torch.ones(400)}, batch_size=4, watch=(), callbacks=[killer]
    )  # fmt: skip
    assert result.steps == 100 and counters.counts() == [100, 100]
    assert sorted({step for step, _ in killer.heard}) == list(range(1, 101))


def test_a_stopped_server_is_replaced(connect: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tfnb.cluster.engine.peers.GIVEN_UP", 4.0)
    counters = Counters(pause=2)
    cluster = connect(2)
    stopped = []

    def strike(progress: Any) -> None:
        if progress.step >= 20 and not stopped:
            stopped.append(cluster._engine.servers[-1].info["pid"])
            os.kill(stopped[0], signal.SIGSTOP)

    result = tfnb.fit(
        counters.train, {counters.x: torch.ones(800)}, batch_size=4, callbacks=[Each(strike)], timeout=120
    )
    assert result.steps == 200 and counters.counts() == [200, 200]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_workers_are_restarted_in_mid_training(connect: Any, dask: Any, mode: str) -> None:
    counters = Counters(pause=2, shards=1)
    connect(3)
    restart = threading.Thread(target=lambda: dask.restart(wait_for_workers=False))

    def strike(progress: Any) -> None:
        if progress.step >= 30 and not restart.ident:
            restart.start()

    result = tfnb.fit(
        counters.train, {counters.x: torch.ones(800)}, batch_size=4, mode=mode, callbacks=[Each(strike)], timeout=200
    )
    assert result.steps == 200 and counters.counts() == [200]
    restart.join(60)


class Each:
    """A callback of each step."""

    def __init__(self, on_step: Any) -> None:
        self.on_step = on_step


def test_after_an_error_a_training_goes_on_from_the_values_that_are_here(connect: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tfnb.cluster.notebook.variables_there.REFRESH", 0.01)
    monkeypatch.setattr("tfnb.cluster.notebook.variables_there.STILL", 0.9)
    monkeypatch.setattr("tfnb.cluster.notebook.variables_there.BUSY", 0.9)
    whole, net = Net(), Net()
    cluster = connect(1)
    fitted(whole, "arrays")
    with pytest.raises(ParameterServerLost):
        fitted(net, "arrays", callbacks=[Killer(cluster, 50)], restarts=0)
    seen = default_session(net.graph).state.resumed
    with pytest.warns(UserWarning, match="runs are here now"):
        result = fitted(net, "arrays", resume=seen > 0)
    assert seen > 0 and result.steps == 60 - seen
    torch.testing.assert_close(net.state(), whole.state(), rtol=1e-5, atol=1e-8)


def test_steps_of_run_before_a_training_are_in_the_copy_from_which_it_goes_on(connect: Any) -> None:
    counters = Counters(pause=2)
    cluster = connect(2)
    for _ in range(5):
        tfnb.run(counters.train, {counters.x: torch.ones(4)})
    tfnb.fit(counters.train, counters.rows(60), callbacks=[Killer(cluster, 20)])
    assert counters.counts() == [65, 65]


def test_steps_of_run_beside_a_training_that_no_copy_has_seen_are_told(connect: Any, capsys: Any) -> None:
    counters, other = Counters(pause=2), Counters(shards=1)
    cluster = connect(2)

    def beside(progress: Any) -> None:
        if progress.step == 30 and not progress.again:
            tfnb.run(other.train, {other.x: torch.ones(4)})
            kill_server(cluster)

    tfnb.fit(counters.train, counters.rows(60), callbacks=[Each(beside)])
    assert counters.counts() == [60, 60]
    gone = tfnb.recovery_log()[-1].gone
    assert gone == 1 - other.counts()[0]
    assert ("1 step of tfnb.run" in capsys.readouterr().out) == bool(gone)


def rated(name: str) -> tuple[tfnb.Variable, tfnb.Variable, torch.Tensor, torch.Tensor]:
    """A rate of 1, a weight of two zeros, a feed, and the step that adds rate times the feed's mean to the weight."""
    rate = tfnb.Variable(torch.tensor(1.0, dtype=torch.float64), name="rate", trainable=False)
    weight = tfnb.Variable(torch.zeros(2, dtype=torch.float64), name="weight")
    with tfnb.record(name):
        x = tfnb.placeholder(torch.ones(4), name="x")
        train = weight.assign_add(rate * x.mean().double() * torch.ones(2, dtype=torch.float64))
    return rate, weight, x, train


@pytest.mark.parametrize("which", ["rate", "weight"])
def test_what_a_callback_assigns_outlives_a_server(connect: Any, which: str) -> None:
    rate, weight, x, train = rated("assigned")
    cluster = connect(1)
    seen: list[float] = []

    def told(progress: Any) -> None:
        if progress.epoch == 1:
            (rate if which == "rate" else weight).assign(
                torch.full_like((rate if which == "rate" else weight).value(), 3.0)
            )
            seen.append(float(weight.value()[0]))
            kill_server(cluster)

    tfnb.fit(train, {x: torch.ones(80)}, epochs=2, batch_size=4, callbacks=[told])
    expected = seen[0] + 20 * (3.0 if which == "rate" else 1.0)
    assert weight.value().tolist() == [expected] * 2 and len(seen) == 1


def test_an_interrupt_ends_a_recovery_at_once(connect: Any, monkeypatch: Any) -> None:
    counters = Counters(pause=2)
    cluster = connect(2)
    began: list[float] = []

    def slow(*args: Any) -> Any:
        began.append(time.monotonic())
        signal.raise_signal(signal.SIGINT)
        return start(*args)

    monkeypatch.setattr("tfnb.cluster.driver.start", slow)
    with pytest.raises(KeyboardInterrupt):
        tfnb.fit(counters.train, counters.rows(STEPS), callbacks=[Killer(cluster, 20)])
    assert time.monotonic() - began[0] < 20
    assert len({*counters.counts()}) == 1, "all copies are of one step"


@pytest.mark.slow
@pytest.mark.parametrize("call", ["route", "greet", "configure"])
def test_a_worker_killed_while_a_recovery_starts_its_task_is_left_out(
    connect: Any, monkeypatch: Any, call: str
) -> None:
    """Its successor, or one of the others, takes its place; the training has restarts left."""
    counters = Counters(pause=2)
    cluster = connect(2)
    owner = ClientLink if call == "route" else deploy
    function, killed = getattr(owner, call), list[int]()

    async def kills(*args: Any) -> Any:
        if not killed and len(tfnb.recovery_log()) == before and cluster._engine.lost is not None:
            killed.append(next(nanny.pid for nanny in cluster.client.cluster.workers.values() if is_in(nanny, args)))
            os.kill(killed[0], signal.SIGKILL)
        return await function(*args)

    def is_in(nanny: Any, args: Any) -> bool:
        addrs = {arg if isinstance(arg, str) else getattr(arg, "addr", "") for arg in args}
        members = args[1] if call == "configure" else ()
        return nanny.worker_address in addrs | {member.peer.addr for member in members[:1]}

    before = len(tfnb.recovery_log())
    monkeypatch.setattr(owner, call, kills)
    result = tfnb.fit(counters.train, counters.rows(60), callbacks=[Killer(cluster, 20)])
    assert killed and result.steps == 60 and counters.counts() == [60, 60]
    assert "direct" in str(cluster.status())


def test_a_server_killed_again_in_the_validation_of_an_epoch(connect: Any) -> None:
    net = Net()
    cluster = connect(2)
    before, kills = len(tfnb.recovery_log()), iter([True, True])

    class Rows(list[Any]):
        """Kills a server when the validation begins, and when it begins again."""

        def __iter__(self) -> Iterator[Any]:
            if next(kills, False):
                kill_server(cluster)
            return super().__iter__()

    result = tfnb.fit(
        net.train, net.batches("list"), epochs=1, watch={"loss": net.loss}, exact=False, feeds=(net.x, net.y),
        validation=Rows(net.batches("list")),
    )  # fmt: skip
    assert result.steps == 30 and len(tfnb.recovery_log()) == before + 2
    assert all("val_loss" in entry for entry in result.history)


@pytest.mark.slow
def test_a_checkpoint_that_steps_do_not_let_through_is_tried_again(
    connect: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    """A pin that found no instant between two steps, because holds end too early, is a warning, not the end."""
    monkeypatch.setattr("tfnb.cluster.engine.engine.PULLS", 1)
    counters = Counters()
    cluster = connect(2)
    servers = [member.peer.addr for member in cluster._engine.servers]
    cluster.client.run(set_hold, 0.0, workers=servers)
    saver = tfnb.train.Saver(tmp_path)
    end = time.monotonic() + 120

    def rows() -> Iterator[Any]:
        while not saver.failures:
            assert time.monotonic() < end
            yield {counters.x: torch.ones(4)}

    try:
        with pytest.warns(UserWarning, match=r"steps went on during each of 1 pulls"):
            result = tfnb.fit(counters.train, rows(), checkpoint=saver, checkpoint_every=0.02)
    finally:
        cluster.client.run(set_hold, HOLD, workers=servers)
    assert counters.counts() == [result.steps] * 2
