"""Checkpoints of trainings: what a folder keeps, what faults leave, and that a training goes on from any of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb.errors import CheckpointCorrupt, CheckpointWriteError, FailedPrecondition, InvalidArgument, NotFound
from tfnb.fitting import fit_display, fit_loop
from tfnb.state import checkpoint
from tfnb.state.checkpoint_folder import CheckpointFolder, CheckpointRecord, Retention
from tfnb.train import Saver

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
STEPS = 21  # 7 an epoch


class Net:
    """A network with dropout and Adam, and its data as arrays or a source."""

    def __init__(self, form: str = "arrays") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))
        with tfnb.record("checkpointed") as self.graph:
            x, y = tfnb.placeholder(X[:8], name="x"), tfnb.placeholder(Y[:8], name="y")
            self.loss = F.cross_entropy(self.model(x), y)
            self.step = tfnb.train.Adam(0.02).minimize(self.loss)
        if form == "arrays":
            self.data: Any = {x: X, y: Y}
            self.options: dict[str, Any] = {"epochs": 3, "batch_size": 8}
        else:
            loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8, shuffle=True)
            self.data, self.options = tfnb.Source(loader, name="rows"), {"epochs": 3, "feeds": (x, y)}

    def fit(self, **more: Any) -> tfnb.RunResult:
        return tfnb.fit(self.step, self.data, watch={"loss": self.loss}, **self.options, **more)

    def values(self) -> dict[str, torch.Tensor]:
        return {label: variable.value() for label, variable in self.graph.contents.variables.items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "shards")


def steps_of(saver: Saver) -> list[int]:
    return [int(path.name[5 : -len(".json")]) for path in saver.paths]


# -- what is kept -----------------------------------------------------------------------------------------------------


def history(hours: list[float], losses: list[float] | None = None) -> list[CheckpointRecord]:
    values = [{}] * len(hours) if losses is None else [{"loss": loss} for loss in losses]
    return [
        CheckpointRecord(n, Path(f"{n}"), 3600 * at, value)
        for n, (at, value) in enumerate(zip(hours, values, strict=True), 1)
    ]


@pytest.mark.parametrize(("retention", "hours", "losses", "expected"), [
    (Retention(3), [1, 2, 3, 4, 5], None, [3, 4, 5]),
    (Retention(3), [1, 2], None, [1, 2]),
    (Retention(1, 3600), [0, 0.4, 0.9, 1.1, 1.9, 2.0, 2.2, 2.3], None, [1, 4, 7, 8]),
    (Retention(1, 3600), [5, 5.5, 1, 1.5, 2.5, 2.6], None, [1, 3, 5, 6]),  # a clock that was set back
    (Retention(2, best="loss"), [0] * 5, [3, 1, 2, 1, 4], [2, 4, 5]),  # the first of equal ones
    (Retention(1, best="loss", sign=-1), [0] * 4, [3, 9, 2, 1], [2, 4]),
    (Retention(1, best="loss"), [0] * 3, [float("nan"), 3, float("nan")], [2, 3]),
    (Retention(1, best="accuracy"), [0] * 3, [1, 2, 3], [3]),
])  # fmt: skip
def test_retention(retention: Retention, hours: Any, losses: Any, expected: list[int]) -> None:
    found = history(hours, losses)
    assert [one.step for one in retention.kept(found)] == expected
    left: list[CheckpointRecord] = []
    for one in found:  # what was deleted on the way would not be there at the end
        left = retention.kept([*left, one])
    assert [one.step for one in left] == expected


def test_what_is_best_of_a_watched_name() -> None:
    signs = {name: Saver("folder", best=name).retention.sign for name in ("val_loss", "error", "accuracy", "val_acc")}
    assert signs == {"val_loss": 1, "error": 1, "accuracy": -1, "val_acc": -1}
    assert Saver("folder", best="accuracy", best_mode="min").retention.sign == 1


def test_a_loop_of_ones_own_keeps_the_newest_by_number(tmp_path: Path) -> None:
    net = Net()
    saver = Saver(tmp_path / "deep" / "run", keep=2, session=(session := tfnb.Session(net.graph)))
    for _ in range(3):
        session.run(net.step, {"x": X, "y": Y})
        saver.save()
    assert steps_of(saver) == [2, 3]
    for step in (9, 10, 100):
        saver.save(step)
    assert steps_of(saver) == [10, 100] and saver.latest == saver.paths[-1]
    (tmp_path / "deep" / "run" / "ckpt-10.json").rename(tmp_path / "deep" / "run" / "ckpt-000200.json")
    assert [path.name for path in saver.paths] == ["ckpt-100.json", "ckpt-000200.json"]
    assert saver.save(7).file.exists(), "the one that was just written stays, whatever its number"
    before = net.values()
    session.run(net.step, {"x": X, "y": Y})
    session.restore(saver.latest)
    torch.testing.assert_close(net.values(), before, rtol=0, atol=0)


def test_what_is_no_checkpoint_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    net = Net()
    session = tfnb.Session(net.graph)
    saver = Saver(tmp_path, keep=2, session=session)
    for step in (1, 2, 3, 4):
        saver.save(step)
    flipped = (tmp_path / "ckpt-3.json").read_text().replace('"runs": 0', '"runs": 1')
    (tmp_path / "ckpt-3.json").write_text(flipped)
    whole = (tmp_path / "ckpt-4.json").read_bytes()
    strange = {"ckpt-0.json": b"", "ckpt-2.json": whole[:-1], "ckpt-x.json": whole, "notes": b"n"}
    for name, content in strange.items():
        (tmp_path / name).write_bytes(content)
    for again in (saver, Saver(tmp_path, keep=2, session=session)):
        assert steps_of(again) == [4] and again.latest.name == "ckpt-4.json"
        text = repr(again)
        assert "1 checkpoints" in text and text.count("not counted") == 3 and "sha256" in text
    for step in (5, 6, 7):
        saver.save(step)
    assert steps_of(saver) == [6, 7]
    assert set(names(tmp_path)) == {*strange, "ckpt-3.json", "ckpt-6.json", "ckpt-7.json"}
    assert all((tmp_path / name).read_bytes() == content for name, content in strange.items())


def test_drafts_of_dead_processes_are_swept_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    dead, other = tmp_path / f".ckpt-3.json.{'0' * 12}.tmp", tmp_path / f".mine.{'0' * 12}.tmp"
    alive = tmp_path / f".ckpt-4.json.{'1' * 12}.tmp"
    for path in (dead, other, alive):
        path.write_bytes(b"half")
    with alive.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Saver(tmp_path, session=tfnb.Session(Net().graph)).save(1)
        assert names(tmp_path) == sorted([other.name, alive.name, "ckpt-1.json"])


def test_a_folder_that_cannot_be_made_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    net = Net()
    (tmp_path / "file").write_text("a file where the folder is to be")
    with pytest.raises(CheckpointWriteError, match=r"cannot keep checkpoints in .*file/run"):
        tfnb.fit(net.step, net.data, checkpoint=tmp_path / "file" / "run", **net.options)
    assert tfnb.Session(net.graph).runs.next == 0


def test_a_saver_that_was_told_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"session=tfnb\.Session\(graph\)"):
        Saver(tmp_path / "run").save()
    assert Saver(tmp_path / "run").latest is None and Saver(tmp_path / "run").paths == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="is a file; checkpoints are kept in a folder"):
        Net().fit(checkpoint=tmp_path / "file")
    for wrong in ({"keep": 0}, {"keep_every_hours": 0}, {"best": ""}, {"best_mode": "max"}, {"session": 7}):
        with pytest.raises(InvalidArgument):
            Saver(tmp_path, **wrong)
    with pytest.raises(InvalidArgument, match="checkpoint_every is in seconds"):
        Net().fit(checkpoint=tmp_path, checkpoint_every=0)
    with pytest.raises(InvalidArgument, match="checkpoint is the path of a folder or a"):
        Net().fit(checkpoint=7)


# -- fit --------------------------------------------------------------------------------------------------------------


def test_a_callback_saves_after_each_epoch_and_keeps_the_best(tmp_path: Path) -> None:
    net = Net()
    weight = net.model[3].weight
    saver = Saver(tmp_path, keep=1, best="loss")
    best: dict[int, float] = {}

    def worse(progress: Any) -> None:
        best[progress.step] = progress.values["loss"]
        weight.data *= -50.0  # the first epoch stays the best

    result = net.fit(callbacks=[saver, worse])
    assert best[7] == min(best.values())
    assert steps_of(saver) == [7, 21] and saver.best.name == "ckpt-7.json"
    assert result.checkpoint == saver.latest and "ckpt-7.json: loss 0." in repr(saver)
    again = Saver(tmp_path, keep=1, best="loss", session=tfnb.Session(net.graph))
    again.save(30)
    assert steps_of(again) == [7, 30], "the values stand in the files"
    with pytest.raises(InvalidArgument, match=r"Saver\(best='lost'\): the values of an epoch are 'loss'"):
        Net().fit(callbacks=[Saver(tmp_path / "b", best="lost")])


@pytest.mark.parametrize("form", ["arrays", "source"])
def test_a_training_goes_on_from_each_of_its_checkpoints_bit_for_bit(form: str, tmp_path: Path) -> None:
    whole, saved = Net(form), Net(form)
    whole.fit()
    saver = Saver(tmp_path / "all", keep=100)
    at = {1, 7, 10, 18}

    class Save:
        def on_step(self, progress: Any) -> None:
            if progress.step in at:
                saver.save()

    saved.fit(callbacks=[Save()], checkpoint=saver)
    torch.testing.assert_close(saved.values(), whole.values(), rtol=0, atol=0)
    assert steps_of(saver) == sorted({*at, STEPS})
    for path in saver.paths:
        again = Net(form)
        taken = checkpoint.load(path)[1]["training"]["steps"]
        assert again.fit(resume=path).steps == STEPS - taken
        torch.testing.assert_close(again.values(), whole.values(), rtol=0, atol=0)


def test_one_folder_is_of_one_training_which_goes_on_there(tmp_path: Path) -> None:
    whole, first = Net(), Net()
    whole.fit()

    class Stop:
        def on_step(self, progress: Any) -> None:
            if progress.step == 9:
                progress.stop("enough")

    assert first.fit(checkpoint=tmp_path / "run", callbacks=[Stop()]).checkpoint == tmp_path / "run/ckpt-9.json"
    second = Net()
    with pytest.raises(FailedPrecondition, match=r"holds ckpt-9\.json, and this training begins at step 0"):
        second.fit(checkpoint=tmp_path / "run")
    assert second.fit(checkpoint=tmp_path / "run", resume=tmp_path / "run").steps == STEPS - 9
    torch.testing.assert_close(second.values(), whole.values(), rtol=0, atol=0)
    assert names(tmp_path / "run") == ["ckpt-21.json", "ckpt-9.json"]
    assert Net().fit(resume=Saver(tmp_path / "run"), checkpoint=tmp_path / "run").steps == 0, "it is at its end"
    with pytest.raises(NotFound, match="there is no checkpoint in"):
        Net().fit(resume=tmp_path)


def test_a_damaged_newest_checkpoint_is_named_with_the_one_before(tmp_path: Path) -> None:
    saver, net = Saver(tmp_path), Net()
    net.fit(callbacks=[saver])
    newest = tmp_path / "ckpt-21.json"
    newest.write_bytes(newest.read_bytes()[:-3])
    again = Net()
    before = again.values()
    with pytest.raises(CheckpointCorrupt, match=r"ckpt-21.*the one before is ckpt-14.*move ckpt-21\.json away"):
        again.fit(resume=tmp_path)
    torch.testing.assert_close(again.values(), before, rtol=0, atol=0)
    newest.rename(tmp_path / "damaged")
    assert again.fit(resume=tmp_path).steps == 7
    torch.testing.assert_close(again.values(), net.values(), rtol=0, atol=0)


def test_steps_go_on_while_one_file_at_a_time_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, far, writing, most = Net(), threading.Event(), [], []
    real = CheckpointFolder.write

    def slow(self: Any, step: int, *rest: Any) -> Any:
        writing.append(step)
        most.append(len(writing))
        assert far.wait(60)
        try:
            return real(self, step, *rest)
        finally:
            writing.remove(step)

    class Far:
        def on_step(self, progress: Any) -> None:
            if progress.step == 15:
                assert writing == [1], "the file of the first step is not written yet"
                far.set()

    monkeypatch.setattr(CheckpointFolder, "write", slow)
    result = net.fit(checkpoint=Saver(tmp_path, keep=100), checkpoint_every=1e-6, callbacks=[Far()])
    assert result.steps == STEPS and result.checkpoint == tmp_path / "ckpt-21.json"
    assert set(most) == {1} and writing == []
    whole = Net()
    values, about = checkpoint.load(tmp_path / "ckpt-1.json")
    assert about["training"]["steps"] == 1
    tfnb.fit(whole.step, whole.data, steps=1, batch_size=8)
    torch.testing.assert_close({k: values[k] for k in whole.values()}, whole.values(), rtol=0, atol=0)


def test_progress_says_how_old_the_last_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []

    class Shown(fit_display.Log):
        def update(self, step: int, metrics: Any, rate: float, curve: Any, more: str = "") -> None:
            lines.append(fit_display.line("net", step, 21, {}, 1.0, more))

    monkeypatch.setattr(fit_loop, "front", Shown)
    monkeypatch.setattr(fit_loop, "SHOWN_EVERY", 0)
    saver = Saver(tmp_path)
    Net().fit(callbacks=[saver, lambda progress: saver.settle()], progress_after=0)
    assert lines[6].endswith("14 s left") and re.search(r"step 10/21 .*  checkpoint 7, \d+ s ago$", lines[9])


def test_what_no_file_can_hold_ends_the_training(tmp_path: Path) -> None:
    net = Net()
    gone = tfnb.Variable(torch.zeros(2), name="gone", container="checkpointed")
    with tfnb.record(net.graph):
        gone.read() + 1
    tfnb.reset("checkpointed")
    with pytest.raises(NotFound, match="variable gone has no value any more"):
        net.fit(checkpoint=tmp_path, checkpoint_every=1e-6)
    assert names(tmp_path) == []


# -- faults -----------------------------------------------------------------------------------------------------------

KILLED = """
import json, os, random, signal, sys, time
import torch, tfnb
from tfnb.train import Saver

torch.set_num_threads(1)
random.seed(int(sys.argv[1]))
w = tfnb.Variable(torch.zeros(20_000), name="w")
with tfnb.record() as graph:
    w.assign_add(torch.ones(20_000))
session, folder = tfnb.Session(graph), sys.argv[3]
acked = 0
for trial in range(int(sys.argv[2])):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        saver = Saver(folder, keep=3, session=session)
        for step in range(acked + 1, acked + 10_000):
            w.set(torch.full((20_000,), float(step)))
            saver.save(step)
            os.write(writes, step.to_bytes(8, "little"))
    os.close(writes)
    os.read(reads, 8)  # it is on its way
    time.sleep(random.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = b""
    while part := os.read(reads, 8192):
        told += part
    os.close(reads)
    acked = int.from_bytes(told[-8:], "little") if told else acked + 1
    saver = Saver(folder, keep=3, session=session)
    found = [int(path.name[5:-5]) for path in saver.paths]
    for path, step in zip(saver.paths, found):
        session.restore(path)
        assert torch.equal(w.value(), torch.full((20_000,), float(step))), path
    drafts = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    damaged = len(saver._folder.others())
    saver.save(found[-1])
    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    print(json.dumps([acked, found, len(drafts), len(left), damaged]), flush=True)
    acked = found[-1]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize("trials", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_after_a_kill_at_any_instant_the_last_acknowledged_checkpoint_loads(tmp_path: Path, trials: int) -> None:
    found = lines(KILLED, "3", str(trials), str(tmp_path / "run"))
    assert len(found) == trials
    for acked, steps, _, left, damaged in found:
        assert steps[-1] in (acked, acked + 1) and len(steps) <= 4 and left == damaged == 0
    assert sum(drafts for _, _, drafts, _, _ in found) > 0, "no kill was within a write"


FULL = """
import json, os, resource, sys, warnings
sys.path.insert(0, sys.argv[1])
from tests.test_checkpoints import Net, names
from pathlib import Path

folder = Path(sys.argv[2])
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

class Disk:
    def on_step(self, progress):
        if progress.step in (5, 15):
            saver.settle()
            if progress.step == 5:
                before.update({name: (folder / name).read_bytes() for name in names(folder)})
            else:
                same.append(all((folder / name).read_bytes() == old for name, old in before.items()))
                same.append(sorted(before) == names(folder))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if progress.step == 5 else most, most))

from tfnb.train import Saver
saver, before, same = Saver(folder), {}, []
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    net = Net()
    result = net.fit(checkpoint=saver, checkpoint_every=1e-6, callbacks=[Disk()])
whole = Net()
whole.fit()
import torch
print(json.dumps([result.steps, [str(one.message) for one in told], same, len(before), result.checkpoint.name,
    all(torch.equal(a, b) for a, b in zip(net.values().values(), whole.values().values()))]))
"""


def test_a_full_disk_is_one_warning_and_the_training_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    ((steps, told, same, before, last, is_equal),) = lines(FULL, str(Path(__file__).parent.parent), str(tmp_path))
    assert steps == STEPS and is_equal and before > 0 and same == [True, True]
    (text,) = told
    assert "File too large" in text and "bytes free" in text and "bytes of tensors were to be written" in text
    assert str(tmp_path) in text and "the last one is ckpt-" in text and "tried again" in text
    assert last == "ckpt-21.json"
    assert CheckpointFolder(tmp_path).others() == {}


INTERRUPTED = """
import json, os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from tests.test_checkpoints import Net, names
from tfnb.state.checkpoint_folder import CheckpointFolder
from pathlib import Path

class Interrupt:
    def on_step(self, progress):
        if progress.step == 10:
            os.kill(os.getpid(), signal.SIGINT)

folder, found = Path(sys.argv[2]), []
try:
    Net().fit(checkpoint=folder / "a", callbacks=[Interrupt()])
except KeyboardInterrupt as error:
    found += [str(error), names(folder / "a")]

begun, go = threading.Event(), threading.Event()
real = CheckpointFolder.write

def slow(*args):  # a disk that does not answer
    begun.set()
    go.wait(60)
    return real(*args)

CheckpointFolder.write = slow

def twice():
    begun.wait(60)
    time.sleep(0.1)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

threading.Thread(target=twice).start()
try:
    Net().fit(checkpoint=folder / "b")
except KeyboardInterrupt as error:
    found += [str(error), names(folder / "b")]
go.set()
print(json.dumps(found))
"""


def test_an_interrupt_writes_a_checkpoint_and_another_one_gives_it_up(tmp_path: Path) -> None:
    ((first, files, second, none),) = lines(INTERRUPTED, str(Path(__file__).parent.parent), str(tmp_path))
    assert "stopped at step 10" in first and files == ["ckpt-10.json"]
    assert "stopped at step 21" in second and none == []


def lines(program: str, *args: str) -> list[Any]:
    """The lines of JSON that a process of its own writes."""
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
