"""fit: the same training as a PyTorch loop, what it reports, what it refuses, and interrupts at random instants."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pandas
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tests.compiling import compile_soon
from tfnb.errors import DeadlineExceeded, FeedError, InvalidArgument, ShapeError
from tfnb.execution.tiers.compiled_loops import obstacle
from tfnb.fitting import fit_display, fit_loop
from tfnb.session import default_session
from tfnb.train.batches import batches

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def recorded(model):
    """Placeholders, loss and one recorded step."""
    with tfnb.record():
        x, y = tfnb.placeholder(X[:8], name="x"), tfnb.placeholder(Y[:8], name="y")
        loss = F.cross_entropy(model(x), y)
        step = tfnb.train.SGD(0.1).minimize(loss)
    return x, y, loss, step


def counter():
    """A variable, and the operation that adds one to it."""
    count = tfnb.Variable(torch.tensor(0.0), name="count")
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(2), name="x")
        value = count.assign_add(torch.ones(()))
        value = value + 0 * x.sum()
    return count, x, value


def test_fit_is_the_pytorch_loop_over_the_same_batches():
    model, twin = network(), network()
    x, y, loss, step = recorded(model)
    result = tfnb.fit(step, {x: X, y: Y}, epochs=3, batch_size=16, watch={"loss": loss})
    optimizer, losses = torch.optim.SGD(twin.parameters(), 0.1), []
    for batch in batches({"x": X, "y": Y}, epochs=3, batch_size=16).each:
        optimizer.zero_grad()
        value = F.cross_entropy(twin(batch.values[0]), batch.values[1])
        value.backward()
        optimizer.step()
        losses.append((batch.epoch, batch.rows, value.item()))
    for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected)
    assert result.steps == len(losses) == 12
    assert [entry["step"] for entry in result.history] == [4, 8, 12]
    for entry in result.history:
        mean = sum(n * v for e, n, v in losses if e == entry["epoch"]) / 50
        assert entry["loss"] == pytest.approx(mean, rel=1e-5)
    assert [point["loss"] for point in result.curve] == pytest.approx([v for _, _, v in losses], rel=1e-4)


def test_result_is_shown_as_text_and_table():
    x, y, loss, step = recorded(network())
    result = tfnb.fit(step, {x: X, y: Y}, epochs=2, watch={"<loss>": loss})
    assert repr(result).startswith("4 steps in ") and "epoch 2  step 4  <loss> 0." in repr(result)
    html = result._repr_html_()
    assert "&lt;loss&gt;" in html and "<loss>" not in html and "<polyline" in html


def test_watched_values_have_their_names():
    x, y, loss, step = recorded(network())
    result = tfnb.fit(step, {x: X, y: Y}, watch=[loss, loss])
    assert list(result.history[0]) == ["epoch", "step", "loss", "loss_1"]
    assert list(tfnb.fit(step, {x: X, y: Y}, watch=loss).history[0]) == ["epoch", "step", "loss"]
    assert "loss" in tfnb.fit(step, {"x": X, "y": Y}, watch="loss").history[0]


def test_the_panel_shows_scalars_among_the_fetches(monkeypatch):
    shown = []

    class Panel(fit_display.Log):
        def finish(self, text, metrics, curve):
            shown.append(dict(metrics))

    x, y, loss, step = recorded(network())
    monkeypatch.setattr(fit_loop, "front", Panel)
    tfnb.fit([step, loss], {x: X, y: Y}, progress_after=0)
    assert shown and all(set(metrics) == {"loss"} for metrics in shown)


def assert_fetched_scalars_are_watched():
    """Of fit, here or on the cluster that is connected: the losses are those of a loop in PyTorch."""
    model, twin = network(), network()
    x, y, loss, step = recorded(model)
    with tfnb.record(loss.graph):
        logits = model(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        turned = torch.complex(loss, loss)
    fetch = {"train": step, "cost": loss, "logits": logits, "more": (accuracy, turned)}
    result = tfnb.fit(fetch, {x: X, y: Y}, epochs=2, batch_size=10, shuffle=False)
    optimizer, losses = torch.optim.SGD(twin.parameters(), 0.1), []
    for start in (*range(0, 50, 10), *range(0, 50, 10)):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(twin(X[start : start + 10]), Y[start : start + 10]))
        losses[-1].backward()
        optimizer.step()
    means = [torch.stack(losses[:5]).mean().item(), torch.stack(losses[5:]).mean().item()]
    assert [entry["cost"] for entry in result.history] == pytest.approx(means, rel=1e-4)
    assert list(result.history[0]) == ["epoch", "step", "cost", "accuracy"]
    for watch in ((), [], {}):
        assert list(tfnb.fit(fetch, {x: X, y: Y}, steps=2, watch=watch).history[0]) == ["epoch", "step"]
    assert list(tfnb.fit(fetch, {x: X, y: Y}, steps=2, watch=accuracy).history[0]) == ["epoch", "step", "accuracy"]
    assert list(tfnb.fit(step, {x: X, y: Y}, steps=2).history[0]) == ["epoch", "step"]
    checked = tfnb.fit([step, loss], {x: X, y: Y}, validation={x: X, y: Y})
    assert list(checked.history[0]) == ["epoch", "step", "loss", "val_loss"]
    with pytest.raises(ShapeError, match="validation data for x, y has no rows"):
        tfnb.fit([step, loss], {x: X, y: Y}, validation={x: X[:0], y: Y[:0]})


def test_feed_dicts_and_generators_are_data():
    count, x, value = counter()
    assert tfnb.fit(value, [{x: X[:, 0]}] * 3, epochs=2).steps == 6
    assert tfnb.fit(value, [{x: X[:, 0]}] * 3, steps=6).stopped == ""
    short = tfnb.fit(value, ({x: X[:n, 0]} for n in (2, 5)), steps=7)
    assert short.steps == 2 and "generator ended after 2 of 7 steps" in short.summary
    assert count.value() == 14


class Rows(torch.utils.data.IterableDataset):
    """The rows of X and Y, without a length."""

    def __iter__(self):
        return zip(X, Y, strict=True)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", ["loader", "iterator"])
def test_a_loader_without_a_length_is_data(monkeypatch, caplog, form, workers):
    loader = torch.utils.data.DataLoader(Rows(), 16, num_workers=workers, timeout=60 if workers else 0)
    model, twin = network(), network()
    x, y, _, step = recorded(model)
    monkeypatch.setattr(fit_loop, "SHOWN_EVERY", 0.0)
    epochs = 2 if form == "loader" else 1
    with caplog.at_level(logging.INFO, "tfnb.fit"):
        data = loader if form == "loader" else iter(loader)
        result = tfnb.fit(step, data, feeds=(x, y), epochs=epochs, progress_after=0)
    assert any("graph: step 1  " in record.message for record in caplog.records)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for rows, labels in list(zip(X.split(16), Y.split(16), strict=True)) * epochs:
        optimizer.zero_grad()
        F.cross_entropy(twin(rows), labels).backward()
        optimizer.step()
    for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected)
    assert [entry["step"] for entry in result.history] == [4, 8][:epochs]
    assert tfnb.fit(step, loader, feeds=(x, y), steps=6).steps == 6


class Passes:
    """Two batches, with a log of when a pass over them begins."""

    def __init__(self, x, name="pass"):
        self.x, self.name, self.log = x, name, []

    def __iter__(self):
        self.log.append(self.name)
        yield from [{self.x: X[:2, 0]}, {self.x: X[2:5, 0]}]


@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 4}, {"steps": 3}])
@pytest.mark.parametrize("form", ["iterable", "source"])
def test_a_pass_begins_when_validation_and_callbacks_of_the_one_before_are_over(form, options):
    count, x, value = counter()
    data, held = Passes(x), Passes(x, "validation")
    held.log = data.log

    def on_epoch(progress):
        data.log.append((progress.epoch, progress.step))

    source = tfnb.Source(data) if form == "source" else data
    tfnb.fit(value, source, watch={"count": count}, validation=held, callbacks=on_epoch, **options)
    last = options.get("steps", 4)
    assert data.log == ["pass", "validation", (1, 2), "pass", "validation", (2, last)]
    assert count.value() == last


def test_a_callback_of_an_epoch_sets_what_the_next_pass_draws():
    model, twin = network(), network()
    x, y, _, step = recorded(model)
    sampler = torch.utils.data.DistributedSampler(range(len(X)), 1, 0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 16, sampler=sampler)
    tfnb.fit(step, loader, feeds=(x, y), epochs=3, callbacks=lambda progress: sampler.set_epoch(progress.epoch))
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for rows, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(twin(rows), labels).backward()
            optimizer.step()
    for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


def test_arrays_that_a_callback_of_an_epoch_changes_are_those_of_the_next_pass():
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(2), name="x")
        total = x.sum()
    rows, seen = torch.ones(4), []

    class Next:
        def on_step(self, progress):
            seen.append(float(progress.values["total"]))

        def on_epoch(self, progress):
            rows.fill_(progress.epoch + 1)

    tfnb.fit(total, {x: rows}, batch_size=2, epochs=3, watch={"total": total}, callbacks=Next())
    assert seen == [2.0, 2.0, 4.0, 4.0, 6.0, 6.0]


def test_one_loader_with_persistent_workers_is_for_training_and_validation():
    loader = torch.utils.data.DataLoader(X[:, 0].clone(), 10, num_workers=1, persistent_workers=True, timeout=60)
    count, x, value = counter()
    result = tfnb.fit(value, loader, feeds=x, epochs=2, watch={"count": count}, validation=loader)
    assert (result.steps, count.value(), result.stopped) == (10, 10, "")
    assert [entry["step"] for entry in result.history] == [5, 10]


def test_steps_bound_the_run():
    count, x, value = counter()
    result = tfnb.fit(value, {x: X[:, 0]}, batch_size=20, steps=7, watch={"count": value})
    assert (result.steps, count.value()) == (7, 7)
    assert [entry["epoch"] for entry in result.history] == [1, 2, 3]
    assert result.history[-1] == {"epoch": 3, "step": 7, "count": 7.0}


def test_value_that_is_not_finite_is_named_with_its_step():
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2), name="x")
        root = x.sum().sqrt()
    with pytest.warns(UserWarning, match='root is nan at step 3; with check="nan"') as caught:
        tfnb.fit(root, [{x: torch.full((2,), value)} for value in (1.0, 2.0, -1.0, -1.0)], watch=[root])
    assert [w.filename for w in caught] == [__file__]


def test_dicts_of_a_loader_without_feeds_are_told_what_to_write():
    x, y, _, step = recorded(network())
    items = [{"image": X[:4], "label": Y[:4]}]
    with pytest.raises(tfnb.errors.NotFound, match=r"say what their parts are fed to, feeds=\{'image': \w+\}"):
        tfnb.fit(step, items)
    assert tfnb.fit(step, items, feeds={"image": x, "label": y}).steps == 1
    assert tfnb.fit(step, [{f"{x.name}:0": X[:4], y.name: Y[:4]}]).steps == 1


@pytest.mark.parametrize("wrong", [-1, "now", True, float("nan")])
def test_when_progress_begins_is_a_number_of_seconds(wrong):
    _, x, value = counter()
    with pytest.raises(tfnb.errors.InvalidArgument, match="progress_after is in seconds"):
        tfnb.fit(value, {x: X[:, 0]}, steps=1, progress_after=wrong)


@pytest.mark.parametrize(
    "options", [{"mode": "sync", "backup": 1}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}]
)
def test_modes_are_one_loop_here(options):
    count, x, value = counter()
    tfnb.fit(value, {x: X[:, 0]}, steps=3, **options)
    assert count.value() == 3


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mode": "sinc"}, InvalidArgument, "near: 'sync'"),
        ({"mode": "sandblaster"}, InvalidArgument, "pipeline, tfnb.train.Downpour, LocalSGD, Sandblaster"),
        ({"allow_plain_collectives": True}, InvalidArgument, "belongs to mode='allreduce' and LocalSGD, not to 'sync'"),
        ({"mode": "allreduce", "backup": 1}, InvalidArgument, "backup=1 belongs to mode='sync', not to 'allreduce'"),
        ({"mode": object()}, InvalidArgument, "there are: sync, async, bounded"),
        ({"backup": -1}, InvalidArgument, "backup"),
        ({"backup": 1, "mode": "async"}, InvalidArgument, "backup=1 belongs to mode='sync', not to 'async'"),
        ({"staleness": 2}, InvalidArgument, "bounded"),
        ({"mode": "bounded"}, InvalidArgument, "staleness.*at least 0, not None"),
        ({"mode": "bounded", "staleness": -1}, InvalidArgument, "at least 0, not -1"),
        ({"mode": "bounded", "staleness": 1, "backup": 1}, InvalidArgument, "backup=1 belongs to mode='sync'"),
        ({"timeout": 0}, InvalidArgument, "seconds"),
        ({"epochs": 0}, InvalidArgument, "epochs"),
        ({"watch": "nothing"}, KeyError, "nothing"),
        ({"watch": 3}, InvalidArgument, "watch is a scalar of the graph, its name, a list .*: got 3"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, error, text):
    count, x, value = counter()
    with pytest.raises(error, match=text):
        tfnb.fit(value, {x: X[:, 0]}, **options)
    assert count.value() == 0


def test_watched_value_that_is_no_scalar_is_refused():
    _, x, value = counter()
    with pytest.raises(ShapeError, match=r"watched.*x is float32\[B\]"):
        tfnb.fit(value, {x: X[:, 0]}, watch=[x])


def test_rows_that_differ_are_named_with_both_counts():
    x, y, _, step = recorded(network())
    with pytest.raises(ShapeError, match="50 rows for x and 49 rows for y"):
        tfnb.fit(step, {x: X, y: Y[:49]})


def test_missing_and_wrong_feeds_are_the_sessions_errors():
    x, y, _, step = recorded(network())
    with pytest.raises(InvalidArgument, match=r"placeholder y.*must be fed"):
        tfnb.fit(step, {x: X})
    with pytest.raises(FeedError, match="complex64 for x"):
        tfnb.fit(step, {x: X.to(torch.complex64), y: Y})
    with pytest.raises(FeedError, match="float32 for y"):
        tfnb.fit(step, {x: X, y: Y.float()})


@pytest.mark.parametrize("data", [
    lambda x, y: {x: X.double().numpy(), y: Y},
    lambda x, y: {x: pandas.DataFrame(X.double().numpy()), y: pandas.Series(Y.numpy())},
    lambda x, y: [{x: X[at : at + 10].double().numpy(), y: Y[at : at + 10]} for at in range(0, 50, 10)],
])  # fmt: skip
def test_float64_data_is_rounded_batch_by_batch_with_one_note(data):
    model, twin = network(), network()
    x, y, _, step = recorded(model)
    with pytest.warns(UserWarning, match="float64 is fed for x, which is float32") as notes:
        given = data(x, y)
        tfnb.fit(step, given, **({"batch_size": 10, "shuffle": False} if isinstance(given, dict) else {}))
    assert len(notes) == 1
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for at in range(0, 50, 10):
        optimizer.zero_grad()
        F.cross_entropy(twin(X[at : at + 10]), Y[at : at + 10]).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_number_that_becomes_infinite_is_refused_before_its_step():
    x, y, _, step = recorded(network())
    rows = X.double()
    rows[47, 3] = -1e39
    with pytest.warns(UserWarning, match="rounded"), pytest.raises(FeedError, match=r"-1e\+39 \(at \[7, 3\]\) for x"):
        tfnb.fit(step, {x: rows, y: Y}, batch_size=10, shuffle=False)


def test_failing_step_is_named_and_leaves_whole_steps():
    count, x, value = counter()
    with pytest.raises(ShapeError) as caught:
        tfnb.fit(value, [{x: X[:, 0]}, {x: X[:, 0]}, {x: X}])
    assert count.value() == 2
    assert caught.value.__notes__ == ["in step 3 of fit; variables are at step 2"]
    assert caught.value.step == 3


def test_timeout_stops_between_steps():
    count, x, value = counter()
    forever = iter(lambda: {x: X[:, 0]}, None)
    with pytest.raises(DeadlineExceeded, match=r"0\.3 s; variables are at step \d+") as caught:
        tfnb.fit(value, forever, timeout=0.3)
    assert count.value() == caught.value.step


# -- progress -------------------------------------------------------------------------------------------------------


class Screen:
    """A terminal that remembers."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_terminal_shows_one_line_after_a_while(monkeypatch):
    _, x, value = counter()
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    tfnb.fit(value, {x: X[:, 0]}, steps=3)
    assert screen.text == ""
    monkeypatch.setattr(fit_loop, "SHOWN_EVERY", 0.0)
    result = tfnb.fit(value, {x: X[:, 0]}, steps=3, watch={"count": value}, progress_after=0)
    lines = screen.text.split("\r")
    assert lines[2].startswith("graph: step 2/3 ") and "count 4.36" in lines[2] and "s left" in lines[2]
    assert lines[-1].startswith(f"graph: {result.summary}") and lines[-1].endswith("\n")
    assert f"count {result.history[-1]['count']:.4g}" in lines[-1]  # one number, wherever it is shown


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_panel_and_the_result_say_the_same_numbers(monkeypatch, epochs):
    shown = []

    class Panel(fit_display.Panel):
        def finish(self, text, metrics, curve):
            shown.append((text, dict(metrics), list(curve())))

    monkeypatch.setattr(fit_loop, "front", Panel)
    x, y, loss, step = recorded(network())
    result = tfnb.fit(step, {x: X, y: Y}, epochs=epochs, watch={"loss": loss})
    assert shown == [(result.summary, {"loss": result.history[-1]["loss"]}, result.curve)]
    assert result.summary == repr(result).split("\n")[0]


def test_without_a_terminal_progress_is_logged(monkeypatch, caplog):
    _, x, value = counter()
    monkeypatch.setattr(fit_loop, "SHOWN_EVERY", 0.0)
    with caplog.at_level(logging.INFO, "tfnb.fit"):
        tfnb.fit(value, {x: X[:, 0]}, steps=20, progress_after=0)
    lines = [record.message for record in caplog.records if record.name == "tfnb.fit"]
    assert len(lines) == 2 and lines[0].startswith("graph: step 1/20  ") and "20 steps in" in lines[1]


# -- interrupts -----------------------------------------------------------------------------------------------------


def test_interrupt_while_waiting_for_data_stops_at_once_and_the_next_fit_works():
    count, x, value = counter()
    before = signal.getsignal(signal.SIGINT)

    def data():
        for number in range(100):
            if number == 5:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            yield {x: X[:, 0]}

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="stopped at step 5; variables are at step 5"):
        tfnb.fit(value, data())
    assert time.monotonic() - start < 30
    assert count.value() == 5
    assert signal.getsignal(signal.SIGINT) is before
    assert tfnb.fit(value, {x: X[:, 0]}, steps=2).steps == 2
    assert count.value() == 7


def test_interrupt_in_another_thread_is_not_ours():
    count, x, value = counter()
    results = []
    thread = threading.Thread(target=lambda: results.append(tfnb.fit(value, {x: X[:, 0]}, steps=3)))
    thread.start()
    thread.join()
    assert results[0].steps == count.value() == 3


TRIALS = 40

CHILD = """
import json, os, random, signal, sys, threading
import torch, tfnb

torch.set_num_threads(1)
random.seed(int(sys.argv[1]))
variables = [tfnb.Variable(torch.zeros(64), name=f"v{i}") for i in range(12)]
with tfnb.record():
    x = tfnb.placeholder(torch.ones(4), name="x")
    loss = sum((v.read() * x.mean()).sum() for v in variables)
    step = tfnb.train.Momentum(1.0, momentum=0.0 if sys.argv[2] == "sgd" else 0.5).minimize(loss)
    also = [v.read().sum() for v in variables]
tfnb.run(step, {x: torch.ones(4)})
for v in variables:
    v.assign(torch.zeros(64))

def interrupt(times):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        if times > 1:
            threading.Event().wait(random.random() * 0.002)

for trial in range(int(sys.argv[3])):
    times = 1 if trial % 3 else 2
    timer = threading.Timer(random.random() * 0.05, interrupt, [times])
    said = ""
    before = {v.value()[0].item() for v in variables}
    try:
        timer.start()
        tfnb.fit(step, {x: torch.ones(100)}, steps=10**9, batch_size=4)
    except KeyboardInterrupt as stop:
        said = str(stop)
    try:
        timer.join()
    except KeyboardInterrupt:  # the second one came after fit
        timer.join()
    values = [v.value() for v in variables]
    whole = all(torch.equal(v, values[0]) for v in values) and len(set(values[0].tolist())) == 1
    found = {"said": said, "times": times, "whole": whole, "before": before.pop(), "after": values[0][0].item()}
    print(json.dumps(found), flush=True)
print(json.dumps({"next": tfnb.fit(step, {x: torch.ones(8)}, batch_size=4).steps}))
"""


@pytest.mark.parametrize("rule", ["sgd", pytest.param("momentum", marks=pytest.mark.slow)])
def test_interrupts_at_random_instants_leave_whole_steps(rule):
    child = subprocess.run(
        [sys.executable, "-c", CHILD, "1", rule, str(TRIALS)], capture_output=True, text=True, timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    *trials, last = map(json.loads, child.stdout.splitlines())
    assert len(trials) == TRIALS and last == {"next": 2}
    for trial in trials:
        assert trial["whole"], trial
        if trial["said"] == "":  # it came before the first step, or a second one while the first was being reported
            assert trial["before"] == trial["after"] or trial["times"] == 2, trial
            continue
        assert trial["said"].startswith("stopped at step "), trial
        if rule == "sgd":  # every step subtracts one
            steps = trial["before"] - trial["after"]
            said = [int(word) for word in trial["said"].split(";")[1].split() if word.isdigit()]
            assert steps in said, trial


@pytest.mark.skipif(obstacle() is not None, reason="there is no C++ compiler")
def test_which_code_runs_is_said_once_and_told_by_traces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TFNB_COMPILE", "auto")
    compile_soon(monkeypatch, 1e-4)
    monkeypatch.setattr(fit_loop, "SHOWN_EVERY", 0.0)
    caplog.set_level("INFO", "tfnb.fit")
    layer = torch.nn.Linear(4, 3)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(8, 4), name="x")
        train = tfnb.train.SGD(0.1).minimize(layer(x).square().mean())
    session = default_session(graph)
    try:
        result = tfnb.fit(train, {x: torch.ones(80, 4)}, steps=30, batch_size=8, progress_after=0)
        said = [record.message for record in caplog.records if "compiling in the background" in record.message]
        assert len(said) == 1 and result.code.startswith("generated code; compiling in the background")
        fed = {x: torch.ones(8, 4)}
        session.run((train, ()), fed, trace=True)
        assert session.trace is not None and "untraced it is generated code; compiling in the" in repr(session.trace)
        assert "untraced it is" in session.trace._repr_html_()
    finally:
        session.close()


def test_validation_writes_nothing():
    """An average of weights that the cell makes below the step is read, and not moved, by validation."""
    found = []
    for validation in (None, {"x": X, "y": Y}):
        torch.manual_seed(0)
        model, averaged = network(), network()
        with tfnb.record():
            x, y = tfnb.placeholder(X[:10]), tfnb.placeholder(Y[:10])
            loss = F.cross_entropy(model(x), y)
            step = tfnb.train.SGD(0.1).minimize(loss)
            for mean, value in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(value.data, 0.1)
            cost = F.cross_entropy(averaged(x), y)
        given = None if validation is None else {x: X, y: Y}
        result = tfnb.fit(step, {x: X, y: Y}, batch_size=10, shuffle=False, watch={"cost": cost}, validation=given)
        found.append(averaged.state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    with torch.no_grad():
        assert result.history[0]["val_cost"] == pytest.approx(float(F.cross_entropy(averaged(X), Y)), rel=1e-5)


@pytest.mark.parametrize("kind", ["arrays", "lists", "weights first", "time first"])
def test_means_are_weighted_by_the_rows_that_vary(kind: str):
    """Batches of 6 and 2 rows: their values 0 and 8 have the mean 2."""
    model = nn.Linear(1, 1)
    wide = torch.tensor([[0.0]] * 6), torch.tensor([[8.0]] * 2)
    with tfnb.record():
        is_late = kind == "time first"
        x = tfnb.placeholder(torch.zeros(3, 6), shape=("T", "B")) if is_late else tfnb.placeholder(wide[0])
        w = tfnb.placeholder(torch.ones(6 if is_late else 3))
        mean = (x * w).mean() if is_late else (x * w.mean()).mean()
        step = tfnb.train.SGD(0.1).minimize(model(mean.reshape(1, 1)).sum() * 0)
    feeds = []
    for rows in wide:
        match kind:
            case "arrays":
                feeds.append({x: rows, w: torch.ones(3)})
            case "lists":
                feeds.append({x: rows.tolist(), w: [1.0] * 3})
            case "weights first":
                feeds.append({w: torch.ones(3), x: rows})
            case _:
                feeds.append({x: rows.T.expand(3, len(rows)), w: torch.ones(len(rows))})
    result = tfnb.fit(step, feeds, watch={"mean": mean})
    assert result.history[0]["mean"] == pytest.approx(2.0)


def test_a_callback_that_raises_stop_iteration_is_told_how_to_stop():
    _, x, value = counter()

    def on_epoch(progress: object) -> None:
        raise StopIteration

    with pytest.raises(InvalidArgument, match=r"progress.stop\(\) ends a training"):
        tfnb.fit(value, [{x: X[:, 0]}] * 3, epochs=2, callbacks=[on_epoch])
