"""Sandblaster L-BFGS on tasks and servers: values, the coordinator's messages, and killed and slow replicas."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tests.train.test_sandblaster import apart, by_torch, data, entropy, linear, masked, net, quadratic
from tfnb.cluster.modes.leases import Leases, StreamPiece
from tfnb.cluster.wire import envelope
from tfnb.session import default_session
from tfnb.train import Sandblaster


def recorded(model: nn.Module, loss: Any) -> tuple[Any, Any, Any]:
    x, y = data()
    with tfnb.record("sandblaster_there"):
        fed, label = tfnb.placeholder(x[:5], name="x"), tfnb.placeholder(y[:5], name="y")
        value = loss(model, fed, label)
    return fed, label, value


@pytest.mark.parametrize(
    ("make", "loss", "history", "tasks"),
    [(linear, quadratic, 3, 3), (linear, entropy, 10, 2), (net, masked, 5, 2)],
    ids=["quadratic", "logistic", "net, what counts of the rows"],
)
def test_twenty_iterations_are_those_of_torch_on_one_machine(
    connect: Callable[..., Any], make: Callable[[], nn.Module], loss: Any, history: int, tasks: int
) -> None:
    """With three tasks one server has all; with two Parameters lie on two servers."""
    model, (x, y) = make(), data()
    fed, label, value = recorded(model, loss)
    connect(tasks)
    result = tfnb.fit(value, {fed: x, label: y}, mode=Sandblaster(history=history), steps=20, batch_size=7)
    wanted, _ = by_torch(make, loss, 20, history_size=history, line_search_fn="strong_wolfe")
    assert apart(model, wanted) < 1e-8
    assert result.history[-1]["value"] == pytest.approx(float(loss(model, x, y).detach()), rel=1e-12)


class Counted:
    """Bytes that this process sends to tasks and servers and gets from them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes, self._encode, self._decode = 0, envelope.encode, envelope.decode
        patch.setattr(envelope, "encode", self._sent)
        patch.setattr(envelope, "decode", self._got)

    def _sent(self, *args: Any, **options: Any) -> Any:
        frames = self._encode(*args, **options)
        self.bytes += sum(memoryview(frame).nbytes for frame in frames)
        return frames

    def _got(self, frames: Any, **options: Any) -> Any:
        self.bytes += sum(memoryview(frame).nbytes for frame in frames)
        return self._decode(frames, **options)


def test_the_coordinators_messages_do_not_grow_with_the_model(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the notebook from iteration to iteration, for two sizes of the same model."""
    connect(2)
    counted, found = Counted(monkeypatch), {}
    for width in (8, 4096):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()
        fed, label, value = recorded(model, entropy)
        x, y = data()
        marks = []
        tfnb.fit(
            value, {fed: x, label: y}, mode=Sandblaster(history=4), steps=12, batch_size=20,
            callbacks=lambda progress, marks=marks: marks.append((counted.bytes, time.monotonic())),
        )  # fmt: skip
        assert len(marks) == 12
        each = sorted(later[0] - before[0] for before, later in itertools.pairwise(marks[2:]))
        found[width] = each[len(each) // 2]
        largest = each[-1]
    weights = 8 * sum(parameter.numel() for parameter in model.parameters())
    assert largest < weights / 5, "no vector comes here"
    assert found[4096] < 1.3 * found[8], found


def test_commands_are_carried_out_where_the_vectors_lie(connect: Callable[..., Any]) -> None:
    """Beside their Parameters, on two servers; no task reads a vector, and numbers alone are sent to servers."""
    cluster, (x, y) = connect(2), data()
    fed, label, value = recorded(net(), entropy)
    tfnb.fit(value, {fed: x, label: y}, mode=Sandblaster(history=2), steps=2)
    (vectors,) = value.graph.attached["minimizations"].values()
    homes = cluster._variables.held.homes
    for each in vectors.parameters:
        assert {piece.shard for v in each.vectors for piece in homes[v.key]} == {homes[each.parameter.key][0].shard}
    assert len({homes[each.parameter.key][0].shard for each in vectors.parameters}) == 2
    session = default_session(value.graph)
    numbers = {number: number.sample for number in vectors.numbers.values()}
    for command in ("begin", "measure", "advance", "aim", "move", "restore"):
        step, _ = session.step_of(getattr(vectors, command), numbers)
        placed = cluster._steps.place(step, parallel=False)
        assert placed.undivided is None and not placed.compute.meta["homes"], command
        by_id = step.whole.contents.by_id
        sent = [by_id[one.value.node].outputs[one.value.index].shape for one in placed.placement.transfers]
        assert all(shape in ((), (vectors_in(2),)) for shape in sent), command
    step, _ = session.step_of(vectors.evaluation, {fed: x, label: y})
    read = {*cluster._steps.place(step, parallel=True).compute.meta["homes"]}
    assert read == {*(each.parameter.name for each in vectors.parameters), vectors.stamp.name}


def vectors_in(history: int) -> int:
    return 2 * history + 3


class KilledRows:
    """Portions, of which the drawing of one kills a task."""

    def __init__(self, feeds: list[dict[Any, torch.Tensor]], at: int, strike: Callable[[], None]) -> None:
        self.feeds, self.at, self.strike, self.drawn = feeds, at, strike, 0

    def __len__(self) -> int:
        return len(self.feeds)

    def __iter__(self) -> Iterator[dict[Any, torch.Tensor]]:
        for feed in self.feeds:
            self.drawn += 1
            if self.drawn == self.at:
                self.strike()
            yield feed


@pytest.mark.parametrize("at", [1, 40, 95])
def test_a_killed_replica_changes_nothing_but_time(connect: Callable[..., Any], at: int) -> None:
    cluster, (x, y) = connect(3), data()
    model = net()
    fed, label, value = recorded(model, entropy)
    killed = []

    def strike() -> None:
        member = next(task for task in cluster._engine.tasks if task.name == "task:1")
        killed.append(member.info["pid"])
        os.kill(member.info["pid"], signal.SIGKILL)

    feeds = [{fed: x[i : i + 2], label: y[i : i + 2]} for i in range(0, len(x), 2)]
    result = tfnb.fit(value, KilledRows(feeds, at, strike), mode=Sandblaster(history=5), steps=8)
    wanted, _ = by_torch(net, entropy, 8, history_size=5, line_search_fn="strong_wolfe")
    assert killed and result.steps == 8
    assert apart(model, wanted) < 1e-8


def test_portions_of_a_slow_replica_are_lent_twice_and_count_once(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task stands still for a second and more, again and again."""
    copies, copied = list[StreamPiece](), Leases._copied

    def seen(machine: Leases, task: int, now: float) -> StreamPiece | None:
        found = copied(machine, task, now)
        copies.extend([found] if found is not None else [])
        return found

    monkeypatch.setattr(Leases, "_copied", seen)
    cluster, (x, y) = connect(2), data()
    model = net()
    fed, label, value = recorded(model, entropy)
    pid, is_over = next(task for task in cluster._engine.tasks if task.name == "task:1").info["pid"], threading.Event()

    def slow() -> None:
        while not is_over.wait(0.2):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.2)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        tfnb.fit(value, {fed: x, label: y}, mode=Sandblaster(history=5), steps=6, batch_size=1)
    finally:
        is_over.set()
        thread.join()
    wanted, _ = by_torch(net, entropy, 6, history_size=5, line_search_fn="strong_wolfe")
    assert apart(model, wanted) < 1e-8
    assert copies, "the other task waited for the slow one"


def test_an_error_leaves_the_last_iteration_and_the_cluster_goes_on(connect: Callable[..., Any]) -> None:
    connect(2)
    model, (x, y) = net(), data()
    fed, label, value = recorded(model, entropy)

    def fail(progress: Any) -> None:
        if progress.step == 3:
            raise ZeroDivisionError("a callback's own")

    with pytest.raises(ZeroDivisionError) as caught:
        tfnb.fit(value, {fed: x, label: y}, mode=Sandblaster(), steps=9, callbacks=fail)
    assert "iteration 3" in "".join(caught.value.__notes__)
    wanted, _ = by_torch(net, entropy, 3, history_size=10, line_search_fn="strong_wolfe")
    assert apart(model, wanted) < 1e-8
    assert tfnb.fit(value, {fed: x, label: y}, mode=Sandblaster(), steps=2).steps == 2


def test_a_lost_server_ends_it_at_the_iteration_of_a_copy(connect: Callable[..., Any]) -> None:
    """The notebook holds no values meanwhile: they are those of a copy that tasks hold."""
    cluster = connect(2)
    model, (x, y) = net(), data()
    fed, label, value = recorded(model, entropy)
    start, seen, marks = float(entropy(model, x, y).detach()), list[float](), list[float]()

    def strike(progress: Any) -> None:
        seen.append(progress.values["value"])
        marks.append(time.monotonic())
        newest = cluster._variables.safety.newest
        if len(marks) > 3 and newest is not None and newest.at > marks[2]:
            os.kill(cluster._engine.servers[0].info["pid"], signal.SIGKILL)

    mode = Sandblaster(history=3, tolerance_grad=0.0, tolerance_change=0.0)
    with pytest.raises(tfnb.errors.ParameterServerLost) as caught:
        tfnb.fit(value, {fed: x, label: y}, mode=mode, steps=5000, callbacks=strike, batch_size=1)
    assert "the same call begins there" in "".join(caught.value.__notes__)
    now = float(entropy(model, x, y).detach())
    assert now < start and any(now == pytest.approx(loss, rel=1e-12) for loss in seen)
    assert tfnb.fit(value, {fed: x, label: y}, mode=Sandblaster(), steps=2).steps == 2, "in this process"
