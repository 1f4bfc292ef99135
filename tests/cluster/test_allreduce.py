"""All-reduce in real processes: equal to what servers make, exact with ranks that are killed, stopped or join."""

from __future__ import annotations

import copy
import os
import signal
import threading

import pytest
import torch

import tfnb
from tests.cluster.conftest import stop, until
from tests.cluster.test_cuts import Counters
from tests.train import test_absent_gradients as branches
from tfnb.cluster.wire import sparse_values
from tfnb.errors import FailedPrecondition, InvalidArgument, NonFinite, Unimplemented

ROWS = torch.ones(400)


class Net:
    """A net with batch norm, its step and its loss.

    A bias before batch norm has gradients of rounding alone, which Adam would make as large as others.
    """

    def __init__(self, dtype):
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        self.net = torch.nn.Sequential(*layers).to(dtype)
        self.rows, self.labels = torch.randn(64, 4, dtype=dtype), torch.randint(0, 3, (64,))
        with tfnb.record("net"):
            x, y = tfnb.placeholder(self.rows[:8], name="x"), tfnb.placeholder(self.labels[:8], name="y")
            self.loss = torch.nn.functional.cross_entropy(self.net(x), y)
            self.train = tfnb.train.Adam(0.01).minimize(self.loss)
        self.data = {x: self.rows, y: self.labels}

    def fit(self, **options):
        """Values of the net after some epochs with a short last batch, and the history."""
        told = tfnb.fit(
            self.train, self.data, batch_size=10, watch={"loss": self.loss}, validation=self.data, timeout=240,
            **{"epochs": 4, **options},
        )  # fmt: skip
        return [value.detach().clone() for value in self.net.state_dict().values()], told


@pytest.mark.filterwarnings("ignore::UserWarning")  # of batch norm, as in sync
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
def test_values_history_and_validation_are_those_of_sync(connect, dtype, near):
    connect(2)
    (expected, of_sync), (found, told) = (Net(dtype).fit(mode=mode) for mode in ("sync", "allreduce"))
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    assert told.steps == of_sync.steps == 28 and len(told.history) == len(of_sync.history)
    for one, other in zip(told.history, of_sync.history, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("mode", ["sync", "allreduce"])
def test_a_parameter_has_a_gradient_where_any_task_has_one(connect, mode):
    """In some batches all tasks take one branch, in others the last one only: as accumulated by hand."""
    model = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(3)).double()
    twin = copy.deepcopy(model)
    optimizer, eager = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, twin))
    batches, k = branches.batches_of_branches(), torch.tensor(1)
    with tfnb.record("branches"):
        x = tfnb.placeholder(batches[0], name="x")
        step = branches.taken(tfnb.autograph(branches.either), model, optimizer, x, k)
    connect(3)
    tfnb.fit(step, [{x: rows} for rows in batches], mode=mode, exact=False, timeout=240)
    for rows in batches:
        branches.accumulated(branches.either, twin, eager, rows, k)
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-9, atol=1e-11)


def test_a_table_that_torch_steps_by_rows_trains_as_one_process(connect):
    """Each task sends the rows that it looked up, with their numbers."""

    def trained():
        torch.manual_seed(0)
        table, head = torch.nn.Embedding(9, 4, padding_idx=2), torch.nn.Linear(4, 2)
        model = torch.nn.ModuleList([table, head]).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        words, labels = torch.randint(0, 9, (42, 3)), torch.randint(0, 2, (42,))
        with tfnb.record("table"):
            x, y = tfnb.placeholder(words[:4], name="x"), tfnb.placeholder(labels[:4], name="y")
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(table(x).mean(1)), y).backward()
            step = optimizer.step()
        tfnb.fit(step, {x: words, y: labels}, batch_size=8, epochs=2, timeout=240)
        return [value.detach().clone() for value in model.parameters()]

    expected = trained()
    connect(3)
    torch.testing.assert_close(trained(), expected, rtol=1e-12, atol=1e-12)


def test_who_reads_or_runs_a_step_in_mid_training_has_whole_steps(connect):
    c = Counters()
    cluster = connect(2)
    seen = []

    def batches():
        for step in range(30):
            if step == 10:
                seen.append((cluster.pull(), *c.counts()))
            if step == 20:
                tfnb.run(c.train, {c.x: torch.ones(4)})
            yield {c.x: torch.ones(4)}

    done = tfnb.fit(c.train, batches(), mode="allreduce", timeout=240)
    assert done.steps == 30 and c.counts() == [31.0, 31.0] and cluster.step == 31
    ((step, *counts),) = seen
    assert counts == [step, step], "what servers hold then is of one step"


@pytest.mark.parametrize("check", [None, "nan"])
def test_what_a_rank_cannot_compute_ends_it_at_the_step_before(connect, check):
    c = Counters()
    connect(2)
    rows = torch.ones(80)
    rows[50] = torch.inf  # of the second rank
    with pytest.raises(NonFinite):
        tfnb.fit(c.train, {c.x: rows}, batch_size=4, shuffle=False, mode="allreduce", check=check, timeout=240)
    assert c.counts() == [12.0, 12.0]
    assert tfnb.fit(c.train, {c.x: torch.ones(8)}, batch_size=4, timeout=240).steps == 2, "another mode goes on"
    assert c.counts() == [14.0, 14.0]


def test_what_ranks_cannot_take_is_refused_by_name(connect):
    connect(2)
    table = tfnb.Variable(torch.zeros(50, 4), name="table")
    with tfnb.record("sparse"):
        at = tfnb.placeholder(torch.zeros(8, dtype=torch.long), name="at")
        loss = torch.nn.functional.embedding(at, table.read(), sparse=True).square().mean()
        train = tfnb.train.SGD(0.1).minimize(loss)
    with pytest.raises(Unimplemented, match="allreduce"):
        tfnb.fit(train, {at: torch.arange(16)}, batch_size=8, mode="allreduce")
    with pytest.raises(InvalidArgument, match="backup"):
        tfnb.fit(train, {at: torch.arange(16)}, mode="allreduce", backup=1)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_lost_in_mid_training_costs_and_doubles_no_step(connect, how):
    """Another rank takes over its rows; it, or its successor, joins again."""
    c = Counters()
    cluster = connect(2)
    pid, struck = cluster._engine.tasks[1].info["pid"], threading.Event()

    def strike():
        until(lambda: cluster.step > 50)
        os.kill(pid, how) if how == signal.SIGKILL else stop(pid)
        struck.set()

    def batches():
        while not struck.is_set() or len(cluster.tasks) == 2:
            yield {c.x: torch.ones(4)}
        before = cluster.step
        while cluster.step < before + 20:
            yield {c.x: torch.ones(4)}
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        while len(cluster.tasks) < 2:
            yield {c.x: torch.ones(4)}
        for _ in range(20):
            yield {c.x: torch.ones(4)}

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        done = tfnb.fit(c.train, batches(), mode="allreduce", timeout=400)
    finally:
        striker.join()
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    assert c.counts() == [float(done.steps)] * 2 and cluster.step == done.steps


def test_a_value_that_is_written_while_ranks_save_is_kept(connect, monkeypatch):
    c = Counters()
    cluster = connect(2)
    engine, written, value = cluster._engine, [], torch.full((200,), -1000.0).double()
    insist = engine.insist_on

    async def insist_on(asks, is_decided=False):
        asks = list(asks)
        if asks and asks[0].method == "commit" and not written:  # of the first save, which is prepared
            written.append(True)
            (piece,) = cluster._variables.held.homes[c.variables[0].key]
            await engine._mutate(piece.shard, "assign", *sparse_values.written({piece.key: value}))
        return await insist(asks, is_decided)

    monkeypatch.setattr(engine, "insist_on", insist_on)

    def batches():
        for step in range(30):
            if step == 10:
                cluster.pull()
            yield {c.x: torch.ones(4)}

    assert tfnb.fit(c.train, batches(), mode="allreduce", timeout=240).steps == 30
    first, other = c.counts()
    assert written and other == 30.0 and 1000.0 < first < 1030.0, "steps after that go on from it"


def test_another_training_of_the_same_variables_is_refused(connect):
    c, free = Counters(), Counters()
    connect(2)
    refused = []

    def batches():
        for step in range(30):
            if step == 10:
                with pytest.raises(FailedPrecondition, match="allreduce") as caught:
                    tfnb.fit(c.train, [{c.x: torch.ones(4)}], mode="async", timeout=60)
                refused.append(caught.value)
            yield {c.x: torch.ones(4)}

    assert tfnb.fit(c.train, batches(), mode="allreduce", timeout=240).steps == 30 and refused
    assert c.counts() == [30.0, 30.0] and free.counts() == [0.0, 0.0]


def test_a_training_changes_to_ranks_and_back(connect):
    c = Counters()
    cluster = connect(2)
    said = []

    def changed(progress):
        said.append(progress.step)
        if progress.epoch < 5:
            progress.change(("allreduce", "sync", "allreduce", "async")[progress.epoch - 1])

    done = tfnb.fit(c.train, {c.x: torch.ones(160)}, batch_size=4, epochs=5, callbacks=[changed], timeout=240)
    assert done.steps == 200 and c.counts() == [200.0, 200.0] and cluster.step == 200


def test_checkpoints_of_ranks_resume_where_they_were(connect, tmp_path):
    c = Counters()
    connect(2)

    def stop(progress):
        if progress.epoch == 2:
            progress.stop()

    about = {"batch_size": 4, "mode": "allreduce", "timeout": 240}
    tfnb.fit(c.train, {c.x: ROWS}, epochs=4, checkpoint=tmp_path, checkpoint_every=0.2, callbacks=[stop], **about)
    found = c.counts()
    tfnb.run(c.train, {c.x: torch.ones(4)})
    done = tfnb.fit(c.train, {c.x: ROWS}, epochs=4, resume=tmp_path, **about)
    assert found[0] == found[1] >= 200 and c.counts() == [400.0, 400.0] and done.steps == 400 - found[0]


def test_a_traced_step_in_mid_training_and_parts_on_tasks(connect):
    c = Counters()
    connect(2)

    def batches():
        for step in range(20):
            if step == 10:
                tfnb.run(c.train, {c.x: torch.ones(4)}, trace=True)
                assert tfnb.session.default_session(c.train.graph).trace.table(by="place")
            yield {c.x: torch.ones(4)}

    tfnb.fit(c.train, batches(), mode="allreduce", timeout=240)
    assert c.counts() == [21.0, 21.0]
    w = tfnb.Variable(torch.ones(3), name="w")
    with tfnb.record("parts"):
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        with tfnb.device("task:0"):
            h = x * w.read()
        with tfnb.device("task:1"):
            loss = h.square().mean()
        train = tfnb.train.SGD(0.1).minimize(loss)
    with pytest.warns(UserWarning, match="mode=allreduce takes one step after the other"):
        assert tfnb.fit(train, {x: torch.ones(8, 3)}, batch_size=4, mode="allreduce", timeout=240).steps == 2
    with pytest.raises(Unimplemented, match="microbatches=2"):
        tfnb.fit(train, {x: torch.ones(8, 3)}, mode="allreduce", microbatches=2)
