"""Trainings that stop and go on, run in the background, and are put back to one of their steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, ShapeError
from tfnb.session import default_session

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
OPTIONS = {"epochs": 3, "batch_size": 8}  # 7 steps an epoch


class Net:
    """A network with dropout and momentum, recorded as a step; data in one of the forms that `fit` takes."""

    def __init__(self, form: str = "arrays") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))
        with tfnb.record() as self.graph:
            x, y = tfnb.placeholder(X[:8], name="x"), tfnb.placeholder(Y[:8], name="y")
            self.loss = F.cross_entropy(self.model(x), y)
            self.step = tfnb.train.Momentum(0.1, 0.9).minimize(self.loss)
        pairs = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 50, 8)]
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8, shuffle=True)
        self.held = {x: X[:20], y: Y[:20]}
        self.data = {
            "arrays": {x: X, y: Y}, "feeds": [{x: a, y: b} for a, b in pairs],
            "source": tfnb.Source(loader, name="digits"), "iterator": iter([{x: a, y: b} for a, b in pairs * 3]),
        }[form]  # fmt: skip
        self.options = {
            "arrays": OPTIONS, "feeds": {"epochs": 3}, "source": {"epochs": 3, "feeds": (x, y)}, "iterator": {},
        }[form]  # fmt: skip

    def fit(self, **more: object) -> tfnb.RunResult:
        return tfnb.fit(self.step, self.data, watch={"loss": self.loss}, **self.options, **more)

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def stop_at(step: int):
    class Stop:
        def on_step(self, progress):
            if progress.step == step:
                progress.stop()

    return Stop()


@pytest.mark.parametrize("form", ["arrays", "feeds", "source", "iterator"])
@pytest.mark.parametrize("at", [1, 7, 10])
def test_a_stopped_training_goes_on_as_if_it_had_never_stopped(form, at):
    whole, parts = Net(form), Net(form)
    expected = whole.fit()
    first = parts.fit(callbacks=[stop_at(at)])
    second = parts.fit(resume=True)
    assert (first.steps, second.steps) == (at, 21 - at)
    torch.testing.assert_close(parts.values(), whole.values(), rtol=0, atol=0)
    assert second.history[-1]["step"] == 21
    if form != "iterator":  # of which nobody knows the epochs
        assert second.history[-1] == pytest.approx(expected.history[-1]) and second.history[-1]["epoch"] == 3
    with pytest.raises(FailedPrecondition, match=r"no training of graph .* to go on with in this session"):
        parts.fit(resume=True)


class Ends:
    """Notes the ends of epochs; ends a training once, in a step or in the end of an epoch."""

    def __init__(self, how: str = "", at: int = 0) -> None:
        self.how, self.at, self.seen = how, at, []

    def on_step(self, progress):
        if not self.how.startswith("epoch"):
            self.end(progress)

    def on_epoch(self, progress):
        self.end(progress)
        self.seen.append((progress.epoch, progress.step, "val_loss" in progress.values))

    def end(self, progress):
        if progress.step == self.at and (how := self.how.removeprefix("epoch ")):
            self.how = ""
            if how == "stop":
                progress.stop()
            else:
                raise OSError("disk") if how == "error" else KeyboardInterrupt


ENDS = [(1, 7, True), (2, 14, True), (3, 21, True)]


@pytest.mark.parametrize("form", ["arrays", "feeds", "source"])
@pytest.mark.parametrize(
    ("how", "at"),
    [
        ("stop", 6), ("stop", 7), ("interrupt", 8), ("interrupt", 21), ("error", 14), ("epoch stop", 7),
        ("epoch error", 14), ("epoch interrupt", 21),
    ],
)  # fmt: skip
def test_each_epoch_has_its_end_once_wherever_a_training_stops(form, how, at):
    net, ends = Net(form), Ends(how, at)
    options = {"validation": net.held, "callbacks": ends}
    with contextlib.suppress(KeyboardInterrupt, OSError):
        assert net.fit(**options).stopped
    net.fit(resume=True, **options)
    assert ends.seen == ENDS


@pytest.mark.parametrize("at", [6, 7])
def test_a_file_of_the_last_step_of_an_epoch_is_gone_on_with_at_its_end(at, tmp_path: Path):
    class Save:
        def on_step(self, progress):
            if progress.step == at:
                default_session(lost.graph).save(tmp_path / "net.safetensors")

    lost, again, ends = Net(), Net(), Ends()
    lost.fit(callbacks=[Save(), stop_at(14)])
    result = again.fit(resume=tmp_path / "net.safetensors", validation=again.held, callbacks=ends)
    assert ends.seen == ENDS
    assert [(entry["epoch"], entry["step"], "val_loss" in entry) for entry in result.history] == ENDS


def counting():
    """How often a step took each of 20 rows, its feed, and the step."""
    seen = tfnb.Variable(torch.zeros(20), name="seen")
    with tfnb.record():
        i = tfnb.placeholder(torch.arange(4))
        step = seen.assign_add(torch.zeros(20).index_add(0, i, torch.ones_like(i, dtype=torch.float32)))
    return seen, i, step


@pytest.mark.parametrize("how", ["shuffle", "sampler", "batch sampler"])
def test_a_loader_that_shuffles_is_told_in_mid_pass(how):
    rows, (_, i, step) = torch.arange(20), counting()
    data = torch.utils.data
    loader = {
        "shuffle": lambda: data.DataLoader(rows, 4, shuffle=True, generator=torch.Generator().manual_seed(0)),
        "sampler": lambda: data.DataLoader(rows, 4, sampler=data.SubsetRandomSampler(range(20))),
        "batch sampler": lambda: data.DataLoader(
            rows, batch_sampler=data.BatchSampler(data.RandomSampler(rows), 4, drop_last=True)
        ),
    }[how]()
    tfnb.fit(step, loader, feeds=i, epochs=2, callbacks=stop_at(8))
    with pytest.warns(UserWarning, match=r"DataLoader shuffles, .* the 3 batches .* tfnb.Source\(loader\)") as told:
        tfnb.fit(step, loader, feeds=i, epochs=2, resume=True)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("how", ["source", "seeded anew", "in order", "between two passes"])
def test_a_loader_that_goes_on_in_its_order_takes_each_row_once_a_pass(how, recwarn):
    (seen, i, step), generator = counting(), torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.arange(20), 4, shuffle=how != "in order", generator=generator)
    passed = tfnb.Source(loader, name="rows") if how == "source" else loader
    tfnb.fit(step, passed, feeds=i, epochs=2, callbacks=stop_at(5 if how == "between two passes" else 8))
    if how == "seeded anew":
        generator.manual_seed(0)
    tfnb.fit(step, passed, feeds=i, epochs=2, resume=True)
    assert torch.equal(seen.value(), torch.full((20,), 2.0)) and not recwarn.list


def test_an_interrupted_validation_is_done_again():
    net, ends, passes = Net(), Ends(), []

    class Held:
        def __iter__(self):
            passes.append(len(passes))
            if passes == [0]:
                raise KeyboardInterrupt
            return iter([net.held])

    options = {"validation": Held(), "callbacks": ends}
    with pytest.raises(KeyboardInterrupt, match=r"stopped at step 7; .* resume=True goes on"):
        net.fit(**options)
    history = net.fit(resume=True, **options).history
    assert (ends.seen, passes) == (ENDS, [0, 1, 2, 3])
    assert [(entry["epoch"], entry["step"], "val_loss" in entry) for entry in history] == ENDS
    assert math.isnan(history[0]["loss"])  # nobody knows it any more


def test_a_training_that_has_taken_more_steps_than_are_asked_for_has_no_end_of_an_epoch():
    net, ends = Net(), []
    net.fit(callbacks=[stop_at(10)])
    before = net.values()
    net.options = {"epochs": 1, "batch_size": 8}
    assert net.fit(resume=True, callbacks=lambda progress: ends.append(progress.epoch)).steps == 0
    assert ends == [] and all(map(torch.equal, net.values(), before))
    net.options = {"epochs": 4, "batch_size": 8}
    assert net.fit(resume=True).steps > 0, "it is as it was"
    with pytest.raises(InvalidArgument, match="epochs must be an int of at least 1, not None"):
        tfnb.fit(net.step, net.data, epochs=None)


def test_an_older_file_had_the_end_of_its_epoch():
    net, ends = Net(), Ends()
    net.fit(callbacks=stop_at(7))
    state = default_session(net.graph).state
    del (older := state.positions)["training"]["ended"]
    state.go_to(older)
    net.fit(resume=True, callbacks=ends)
    assert [seen[:2] for seen in ends.seen] == [(2, 14), (3, 21)]


def test_an_epoch_whose_loss_nobody_knows_stops_no_training_early():
    net = Net()
    stopping = tfnb.train.EarlyStopping("loss", patience=0)
    net.fit(callbacks=[stop_at(14), stopping])
    assert stopping.best_epoch == 1
    net.fit(resume=True, callbacks=stopping)
    assert stopping.best_epoch == 3


@pytest.mark.parametrize(
    ("form", "session_of"),
    [*((form, default_session) for form in ("arrays", "feeds", "source")), ("source", tfnb.Session)],
)
def test_a_file_of_a_callback_is_gone_on_with_in_another_session(form, session_of, tmp_path: Path):
    whole, lost, again = Net(form), Net(form), Net(form)
    whole.fit()
    path, session = tmp_path / "net.safetensors", session_of(lost.graph)

    def save(progress):
        session.save(path)
        if progress.epoch == 2:
            raise RuntimeError("the machine fails")

    with pytest.raises(RuntimeError, match="the machine fails"):
        lost.fit(callbacks=save)
    assert again.fit(resume=path).steps == 7
    torch.testing.assert_close(again.values(), whole.values(), rtol=0, atol=0)


class StopAtEpoch:
    def on_epoch(self, progress):
        if progress.epoch < 3:
            progress.stop()


def test_a_source_that_is_left_between_two_passes_loses_no_batch():
    whole, parts = Net("source"), Net("source")
    whole.fit()
    found = []
    for resume in (False, True, True):
        found.append((parts.fit(resume=resume, callbacks=[StopAtEpoch()]).steps, parts.data.position))
    assert found == [(7, {"epoch": 0, "count": 7}), (7, {"epoch": 1, "count": 7}), (7, {"epoch": 2, "count": 7})]
    torch.testing.assert_close(parts.values(), whole.values(), rtol=0, atol=0)
    assert parts.fit().steps == 21  # a new training has whole passes, not the empty rest of the last one


def test_a_failed_step_is_taken_again_with_its_batch_and_its_random_numbers():
    whole, parts = Net("source"), Net("source")
    whole.fit()
    fails = [True]

    def once(item):
        if fails and parts.data.position["count"] == 4:
            fails.clear()
            return item[0][:, :2], item[1]  # a step that cannot be computed
        return item

    source, parts.data = parts.data, parts.data.map(once)
    with pytest.raises(ShapeError):
        parts.fit()
    assert source.position == {"epoch": 0, "count": 3}
    assert parts.fit(resume=True).steps == 18
    torch.testing.assert_close(parts.values(), whole.values(), rtol=0, atol=0)


INTERRUPTED = """
import json, os, random, signal, sys, threading, time
import torch, tfnb
from torch.nn import functional as F

torch.set_num_threads(1)
random.seed(int(sys.argv[1]))
X = torch.randn(56, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()

def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2))
    count = tfnb.Variable(torch.tensor(0.0), name="count", trainable=False)
    with tfnb.record() as graph:
        graph.seed = 5
        x, y = tfnb.placeholder(X[:8], name="x"), tfnb.placeholder(Y[:8], name="y")
        step = tfnb.train.Momentum(0.1, 0.9).minimize(F.cross_entropy(model(x), y))
        steps = [step, count.assign_add(torch.ones(()))]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8, shuffle=True)
    source = tfnb.Source(loader, name="rows").map(lambda item: (time.sleep(0.001), item)[1])
    return model, count, source, lambda **more: tfnb.fit(steps, source, feeds=(x, y), epochs=3, **more)

def ended(timer):  # Thread.join believes in the end of a thread once it was interrupted itself
    while timer in threading.enumerate():
        time.sleep(0.001)
    time.sleep(0.002)

def interrupt():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(random.random() * 0.001)

whole, _, _, fit = made()
fit()
for trial in range(int(sys.argv[2])):
    model, count, source, fit = made()
    stops = 0
    while count.value() < 21:
        timer = threading.Timer(random.random() * 0.03, interrupt)
        try:
            try:
                timer.start()
                fit(resume=bool(count.value()))
            except KeyboardInterrupt:
                stops += 1
            ended(timer)
        except KeyboardInterrupt:  # after fit
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            ended(timer)
            signal.signal(signal.SIGINT, before)
    same = all(map(torch.equal, model.state_dict().values(), whole.state_dict().values()))
    print(json.dumps([same, stops, count.value().item(), source.position]), flush=True)
"""


@pytest.mark.parametrize("trials", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_interrupts_at_random_instants_neither_lose_nor_double_a_batch(trials):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "1", str(trials)], capture_output=True, text=True, timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one for one in found if not one[0] or one[2] != 21] == [] and len(found) == trials
    assert sum(stops for _, stops, _, _ in found) > trials / 2


def test_what_cannot_be_gone_on_with_is_said_and_changes_nothing(tmp_path: Path):
    net = Net()
    path = tmp_path / "net.safetensors"
    default_session(net.graph).save(path)
    net.fit()
    before = net.values()
    with pytest.raises(FailedPrecondition, match=r"to go on with in .*net\.safetensors"):
        net.fit(resume=path)
    with pytest.raises(InvalidArgument, match="resume is True or the path of a file"):
        net.fit(resume=7)
    with pytest.raises(FileNotFoundError):
        net.fit(resume=tmp_path / "nothing")
    torch.testing.assert_close(net.values(), before, rtol=0, atol=0)


def test_a_training_in_the_background_tells_where_it_is_and_stops_between_two_steps():
    net, go = Net(), threading.Event()
    begun = threading.Event()

    class Wait:
        def on_step(self, progress):
            begun.set()
            assert progress.step < 5 or go.wait(60)

    handle = tfnb.launch(net.step, net.data, watch={"loss": net.loss}, callbacks=[Wait()], epochs=1000, batch_size=8)
    assert begun.wait(60) and not handle.is_done and not handle.wait(0.01)
    with pytest.raises(DeadlineExceeded, match=r"did not end within 0\.01 s: step \d, epoch 1, running"):
        handle.result(timeout=0.01)
    assert tfnb.run(net.loss, {"x": X, "y": Y}).isfinite()  # cells run meanwhile
    handle.stop()
    go.set()
    result = handle.result(timeout=60)
    assert result.stopped == "stopped by its handle" and result.steps == handle.step < 7000
    assert list(handle.metrics) == ["loss"] and "loss 0." in repr(handle) and "stopped" in handle._repr_html_()
    assert tfnb.fit(net.step, net.data, steps=handle.step + 2, batch_size=8, resume=True).steps == 2


def test_a_handle_is_awaited_and_raises_what_failed():
    net = Net()

    async def both() -> int:
        return (await tfnb.launch(net.step, net.data, **OPTIONS)).steps

    assert asyncio.run(both()) == 21
    failed = tfnb.launch(net.step, [{"x": X}])
    assert failed.wait(60) and "InvalidArgument" in failed.progress
    with pytest.raises(InvalidArgument, match="placeholder y"):
        failed.result()


def test_snapshots_put_a_training_back_and_another_branch_begins_there():
    net = Net()
    snapshots = tfnb.Snapshots(net.step, every=4, keep=3)
    net.fit(callbacks=[snapshots])
    last = net.values()
    assert snapshots.steps == [12, 16, 20]
    snapshots.restore(12)
    torch.testing.assert_close(net.values(), [v for k, v in snapshots.values(12).items() if "." in k][:4])
    net.fit(resume=True)
    torch.testing.assert_close(net.values(), last, rtol=0, atol=0)
    snapshots.restore(16)
    tfnb.fit(net.step, net.data, batch_size=4, seed=7)
    assert not torch.equal(net.values()[0], last[0])
    with pytest.raises(NotFound, match="no snapshot of step 4; there are: 12, 16, 20"):
        snapshots.restore(4)
    with pytest.raises(InvalidArgument, match="every is an int"):
        tfnb.Snapshots(net.step, every=0)
