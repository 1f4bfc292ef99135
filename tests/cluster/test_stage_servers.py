"""Pipelines whose tasks are the parameter servers of their stages: bits, bytes that travel, homes, and losses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.cluster.conftest import stats, until, workers
from tests.cluster.test_parts_there import assert_nothing_left, exchanges, members
from tests.cluster.test_pipelines import ROWS, Net, assert_same, one_thread
from tests.over_tasks import on
from tfnb.cluster.driver import Cluster
from tfnb.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NonFinite,
    ParameterServerLost,
)

__all__ = ["one_thread"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:task.* no stage of this pipeline")  # there are five workers


@pytest.fixture
def staged(dask: Any, connect: Any) -> Iterator[Callable[[], Cluster]]:
    """``staged()``: a cluster of all workers, whose tasks are servers."""
    made: list[Cluster] = []

    def connected() -> Cluster:
        workers(dask, 3)
        made.append(tfnb.connect(dask, ps="stages", timeout=180))
        return made[-1]

    yield connected
    for cluster in made:
        cluster.close()


def homes(cluster: Cluster, net: Any) -> dict[str, set[int]]:
    """The shards of the pieces of each weight of a model."""
    held = cluster._variables.held
    pieces = {v.kept.data_ptr(): held.homes[v.key] for v in held.variables}
    return {name: {piece.shard for piece in pieces[p.data_ptr()]} for name, p in net.model.named_parameters()}


def moved(dask: Any) -> int:
    """Bytes that the workers have sent and got so far, by whatever lane."""

    def counted() -> int:
        from tfnb.cluster.wire import envelope

        return sum(envelope.MOVED.values())

    return sum(dask.run(counted).values())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_of_servers_has_the_bits_of_one_process_and_each_variable_at_its_stage(
    staged, dask, schedule: str
) -> None:
    here, there = Net(), Net()
    expected = here.fit(validation=here.data)
    cluster = staged()
    assert len(cluster.tasks) == len(cluster.servers)
    found = there.fit(mode="pipeline", schedule=schedule, validation=there.data)
    assert found.history == expected.history
    assert_same(here, there)
    assert {name: {int(name[0])} for name, _ in there.model.named_parameters()} == homes(cluster, there)
    slots = [v for v in cluster._variables.held.variables if "/Adam/" in v.name and v.name.startswith("0.")]
    assert slots and all(cluster._variables.held.homes[v.key][0].shard == 0 for v in slots)
    assert_nothing_left(dask)


WIDTH = 384


class Wide(Net):
    """Weights far larger than the rows of a step: what a step moves says whether weights or gradients travel."""

    def __init__(self, *, clips: bool = False, ties: bool = False) -> None:
        torch.manual_seed(3)
        self.layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.model = nn.ModuleList(self.layers)
        last = self.layers[0] if ties else self.layers[2]
        with tfnb.record() as self.graph:
            x, y = (tfnb.placeholder(torch.ones(2, WIDTH), name=name) for name in "xy")
            h = x
            for at, layer in enumerate([*self.layers[:2], last]):
                with on(at):
                    h = torch.tanh(layer(h))
            with on(2):
                self.loss = self.count = F.mse_loss(h, y)
            optimizer = tfnb.train.SGD(0.5)
            trained = [p for layer in self.layers[: 2 if ties else 3] for p in layer.parameters()]
            gradients = tfnb.gradients(self.loss, trained)
            if clips:
                norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
                gradients = [g * (0.01 / norm.clamp(min=0.01)) for g in gradients]
            self.train = optimizer.apply_gradients(list(zip(gradients, trained, strict=True)))
        self.data = {x: torch.randn(8, WIDTH), y: torch.randn(8, WIDTH)}

    def fit(self, steps: int = 2, **options: Any) -> Any:
        """Steps of one epoch: after each the weights would come home."""
        about = {"data": [self.data] * steps, "batch_size": None, "epochs": 1, "watch": {"loss": self.loss}}
        return super().fit(**{**about, **options})


@pytest.mark.parametrize("clips", [False, True])
def test_no_weight_and_no_gradient_of_a_stage_travels(staged, dask, clips: bool) -> None:
    here, there = Wide(clips=clips), Wide(clips=clips)
    expected = [here.fit(steps).history for steps in (1, 2, 10)]
    staged()
    found, costs = [there.fit(1, mode="pipeline").history], []
    for steps in (2, 10):  # both fetch all weights at their end
        before = moved(dask)
        found.append(there.fit(steps, mode="pipeline").history)
        costs.append(moved(dask) - before)
    assert found == expected
    assert_same(here, there)
    weight, rows = WIDTH * WIDTH * 4, 8 * WIDTH * 4
    assert (costs[1] - costs[0]) / 8 < weight / 2, costs  # a step: feeds, and four borders there and back
    assert 8 * rows < weight


def test_tied_weights_lie_at_one_stage_and_go_to_the_other_one(staged) -> None:
    here, there = Wide(ties=True), Wide(ties=True)
    expected = here.fit(3)
    cluster = staged()
    assert there.fit(3, mode="pipeline").history == expected.history
    assert_same(here, there)
    assert homes(cluster, _Of(there.layers[:2])) == {"0.weight": {0}, "0.bias": {0}, "1.weight": {1}, "1.bias": {1}}


class Tied(Net):
    """A table of words at the first stage, whose rows are the weights of the last one: in each its own read of it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.ModuleList([nn.Embedding(9, 6), nn.Linear(6, 6)]).double()
        table, layer = self.model
        with tfnb.record() as self.graph:
            x, y = (tfnb.placeholder(torch.arange(4), name=name) for name in "xy")
            with on(0):
                h = table(x)
            with on(1):
                h = torch.tanh(layer(h))
            with on(2):
                loss = F.cross_entropy(h @ table.weight.T, y)
            train = tfnb.train.Adam(0.01).minimize(loss)
        self.loss = self.count = loss
        self.train = train
        self.data = {x: torch.randint(0, 9, (ROWS,)), y: torch.randint(0, 9, (ROWS,))}


@pytest.mark.parametrize("make", [Tied, lambda: Wide(ties=True)], ids=["table", "layer"])
def test_stages_are_lent_windows_where_weights_are_tied(staged, dask, make: Callable[[], Any]) -> None:
    here, there = make(), make()
    about = {"epochs": 4} if isinstance(here, Tied) else {"steps": 9}
    expected = here.fit(**about)
    cluster = staged()
    assert there.fit(mode="pipeline", **about).history == expected.history
    assert_same(here, there)
    assert all(
        cluster._engine.windows.may_take(placed) for _, placed in cluster._steps._placed.values() if placed.parts
    )
    # the last large value stays lent to its reader until the next step
    until(lambda: not any(fact["held"] or fact["rounds"] for fact in exchanges(dask)))


class Each:
    """Calls a function after each step."""

    def __init__(self, on_step: Callable[[Any], object]) -> None:
        self.on_step = on_step


class _Of:
    def __init__(self, layers: list[nn.Module]) -> None:
        self.model = nn.ModuleList(layers)


def test_variables_that_lie_elsewhere_move_and_runs_and_other_modes_go_on(staged) -> None:
    here, there = Wide(), Wide()
    before = tfnb.run(there.loss, there.data)
    expected = [here.fit(2).history, here.fit(2).history]
    cluster = staged()
    assert torch.equal(tfnb.run(there.loss, there.data), before)
    packed = homes(cluster, there)
    first = there.fit(2, mode="pipeline").history
    assert packed != homes(cluster, there) == {name: {int(name[0])} for name, _ in there.model.named_parameters()}
    with torch.no_grad():
        assert tfnb.run(there.loss, there.data).item() == tfnb.run(there.loss, there.data).item() < before.item()
    cluster.pull()
    assert [first, there.fit(2, mode="pipeline").history] == expected
    assert_same(here, there)
    tfnb.fit(there.train, there.data, batch_size=8, epochs=1, exact=False, mode="sync")  # ordinary servers


def test_a_graph_with_other_stages_is_refused_by_name_and_the_same_graph_moves(staged) -> None:
    one = Wide()
    with tfnb.record("other") as graph:
        x, y = (tfnb.placeholder(torch.ones(2, WIDTH), name=name) for name in "xy")
        h = x
        for at, layer in enumerate(reversed(one.layers)):
            with on(at):
                h = torch.tanh(layer(h))
        train = tfnb.train.SGD(0.1).minimize(F.mse_loss(h, y))
    data = dict(zip((x, y), one.data.values(), strict=True))
    cluster = staged()
    one.fit(1, mode="pipeline")
    about = {"mode": "pipeline", "microbatches": 4, "batch_size": 8, "exact": False}
    before = [p.clone() for p in one.model.parameters()]
    text = r"variable 2\.\w+|variable \S+ lies at task:\d, where a pipeline of graph graph trains it, and graph other"
    with pytest.raises(InvalidArgument, match=text):
        tfnb.fit(train, data, **about)
    assert all(map(torch.equal, before, one.model.parameters())) and graph.name == "other"
    one.fit(1, mode="pipeline")
    cluster.close()

    placed = Placed()
    expected = Placed().fit(2).history
    cluster = staged()
    assert placed.fit(2, mode="pipeline").history == expected
    first = homes(cluster, placed)
    tfnb.place([placed.loss, placed.train], stages=2, soft=True)
    placed.fit(1, mode="pipeline")
    assert set().union(*first.values()) == {0, 1, 2} and set().union(*homes(cluster, placed).values()) == {0, 1}


class Placed(Wide):
    """The same net in stages of `tfnb.place`."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        with tfnb.record() as self.graph:
            x, y = (tfnb.placeholder(torch.ones(2, WIDTH), name=name) for name in "xy")
            self.loss = self.count = F.mse_loss(self.model(x), y)
            self.train = tfnb.train.SGD(0.1).minimize(self.loss)
        self.data = {x: torch.randn(8, WIDTH), y: torch.randn(8, WIDTH)}
        tfnb.place([self.loss, self.train], stages=3, soft=True)


def test_a_training_in_progress_keeps_its_variables(staged) -> None:
    net = Wide()
    staged()
    met: list[BaseException] = []

    def other(progress: Any) -> None:
        try:
            net.fit(1, mode="pipeline")
        except FailedPrecondition as error:
            met.append(error)

    tfnb.fit(net.train, net.data, batch_size=8, epochs=1, exact=False, callbacks=Each(other))
    assert "another training writes it" in str(met[0])


class Two(Net):
    """The net in two stages."""

    def __init__(self) -> None:
        super().__init__(on=lambda at: on(min(at, 1)))


def test_a_checkpoint_goes_on_with_another_number_of_stages(staged, tmp_path) -> None:
    here, there, other = Net(), Net(), Two()
    here.fit(epochs=16)
    cluster = staged()
    stop = Each(lambda progress: progress.step == 3 and progress.stop())
    there.fit(epochs=16, mode="pipeline", checkpoint=tmp_path, callbacks=stop)
    done = cluster.step  # what stages had begun counts, too
    cluster.close()
    assert 3 <= done < 32
    again = staged()
    assert other.fit(epochs=16, mode="pipeline", resume=tmp_path).steps == 32 - done == again.step
    assert_same(here, other)
    assert set().union(*homes(again, other).values()) == {0, 1}


def test_what_stages_need(dask) -> None:
    with pytest.raises(InvalidArgument, match=r"connect\(1\): with ps='stages' each task is a stage .* has two"):
        tfnb.connect(1, ps="stages")
    with pytest.raises(InvalidArgument, match=r"ps='stage': .*ps='stages' makes each task"):
        tfnb.connect(2, ps="stage")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="workers=1: with ps='stages'"):
        tfnb.connect(dask, ps="stages", workers=1)


def test_a_failure_within_a_window_keeps_the_steps_before_it(staged, dask) -> None:
    here, there = Wide(), Wide()
    here.fit(9)
    cluster = staged()
    x = next(iter(there.data))
    bad = {key: value.clone() for key, value in there.data.items()}
    bad[x][3, 2] = torch.nan
    with pytest.raises(NonFinite, match=r"of variable .* holds NaN .* Variables are at step 9") as found:
        there.fit(data=[*[there.data] * 9, bad, *[there.data] * 3], mode="pipeline")
    assert found.value.task is not None and cluster.step == 9
    assert_same(here, there)
    assert all(core["staged"] == 0 for core in stats(cluster))
    assert_nothing_left(dask)


@pytest.mark.parametrize("after", [1, 40])
def test_a_deadline_leaves_whole_steps(staged, dask, after: int) -> None:
    """Tenths of a second: whichever step it meets, all stages have taken the same ones."""
    here, there = Wide(), Wide()
    cluster = staged()
    there.fit(3, mode="pipeline")
    with pytest.raises(DeadlineExceeded):
        there.fit(4000, mode="pipeline", timeout=after / 10)
    there.fit(2, mode="pipeline")
    steps = cluster.step
    cluster.close()
    assert 5 <= steps < 4000
    here.fit(steps)
    assert_same(here, there)


def test_ctrl_c_in_a_window_leaves_whole_steps_and_the_next_fit_goes_on(staged) -> None:
    here, there = Wide(), Wide()
    cluster = staged()
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    begin = Each(lambda progress: progress.step == 20 and interrupt.start())
    with pytest.raises(KeyboardInterrupt):
        there.fit(100_000, mode="pipeline", callbacks=begin)
    steps, state = cluster.step, there.state
    assert all(core["staged"] == 0 for core in stats(cluster))
    there.fit(2, mode="pipeline")
    assert 20 <= steps == cluster.step - 2 < 100_000
    cluster.close()
    here.fit(steps)
    assert all(torch.equal(value, state[name]) for name, value in here.state.items())
    here.fit(2)
    assert_same(here, there)


STATES = [
    (1, "_computed", True), (1, "_stage", True), (1, "_stage", False), (1, "_agree", True), (1, "_agree", False),
    (0, "_agree", False), (2, "_take", False),
]  # fmt: skip


def kill_itself(method: str, is_before: bool, call: int) -> None:
    """On a worker: end the process at a call of a method of a window."""
    from tfnb.cluster.tasks.step_windows import StageWindow

    wrapped, calls = getattr(StageWindow, method), iter(range(1 << 20))

    def called(*args: Any) -> Any:
        is_now = next(calls) == call
        if is_now and is_before:
            os.kill(os.getpid(), signal.SIGKILL)
        found = wrapped(*args)
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(StageWindow, method, called)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "method", "is_before"), STATES)
def test_a_stage_killed_within_a_window_costs_no_step_and_counts_none_twice(
    staged, dask, stage: int, method: str, is_before: bool
) -> None:
    here, there = Wide(), Wide()
    expected = [here.fit(steps).history for steps in (4, 12)]
    cluster = staged()
    first = there.fit(4, mode="pipeline").history
    address = members(cluster)[stage].peer.addr
    dask.run(kill_itself, method, is_before, 5, workers=[address])
    assert [first, there.fit(12, mode="pipeline").history] == expected
    assert members(cluster)[stage].peer.addr != address
    assert_same(here, there)
    assert_nothing_left(dask)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(3))
def test_a_stage_killed_in_mid_training_is_a_lost_server_and_each_step_counts_once(staged, dask, stage: int) -> None:
    here, there = Net(), Net()
    expected = here.fit()
    cluster = staged()
    killed: list[int] = []

    def kill(progress: Any) -> None:
        if progress.step == 2 and not killed:
            killed.append(int(members(cluster)[stage].info["pid"]))
            os.kill(killed[-1], signal.SIGKILL)

    found = there.fit(mode="pipeline", callbacks=Each(kill))
    assert killed and found.steps == expected.steps == 4
    assert found.history == expected.history
    assert_same(here, there)
    assert_nothing_left(dask)


@pytest.mark.slow
def test_a_lost_stage_without_restarts_is_one_typed_error(staged) -> None:
    there, cluster = Net(), staged()
    there.fit(mode="pipeline")
    before = {name: value.detach().clone() for name, value in there.model.named_parameters()}

    def kill(progress: Any) -> None:
        os.kill(int(members(cluster)[1].info["pid"]), signal.SIGKILL)

    with pytest.raises(ParameterServerLost, match=r"parameter server 2 of \d"):
        there.fit(mode="pipeline", callbacks=Each(kill), restarts=0)
    for name, value in there.model.named_parameters():
        assert torch.equal(value, before[name]), name  # as last pulled
    with pytest.warns(UserWarning, match="closed without the last values: parameter server 2 of"):
        cluster.close()
