"""Servers write their own shards of a checkpoint; what they cannot, the notebook does; files are the same for all."""

from __future__ import annotations

import os
import resource
import signal
import warnings
from pathlib import Path
from threading import Event, Thread
from typing import Any

import fsspec
import pytest
import torch

import tfnb
from tests.cluster.conftest import WORKERS, until, workers
from tests.cluster.test_cuts import Counters
from tfnb.cluster.engine.engine import Engine
from tfnb.cluster.tasks import shard_writes
from tfnb.errors import CheckpointWriteError
from tfnb.state import checkpoint, checkpoint_stores, manifests, queue_contents


class Model:
    """Variables of many kinds: a table over all servers, small ones, bfloat16, complex, a number, and one not used."""

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(3)
        draw = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
        self.variables = [
            tfnb.Variable(draw(1000, 300), name="table", partitions=3),
            tfnb.Variable(draw(7), name="small"),
            tfnb.Variable(draw(5, 2).bfloat16(), name="half"),
            tfnb.Variable(torch.complex(draw(3), draw(3)), name="phase", trainable=False),
            tfnb.Variable(torch.tensor(0.0), name="number"),
        ]
        table, small, half, phase, number = self.variables
        with tfnb.record("shards") as self.graph:
            self.x = tfnb.placeholder(torch.ones(4), name="x")
            mean = self.x.mean()
            loss = ((table * mean).square().mean() + small.square().sum() + half.float().square().sum()) * (number + 1)
            self.step = tfnb.train.Adam(0.1).minimize(loss), number.assign_add(mean), phase.read().real.sum()
        self.session = tfnb.Session(self.graph)

    def run(self, times: int) -> None:
        for _ in range(times):
            self.session.run(self.step, {self.x: torch.ones(4)})

    def values(self) -> dict[str, torch.Tensor]:
        return {label: variable.value().clone() for label, variable in self.graph.contents.variables.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for label, value in expected.items():
        assert found[label].dtype == value.dtype and torch.equal(found[label], value), label


def never(*_: Any) -> Any:
    raise AssertionError("values were fetched")


def whole_files(folder: Path) -> None:
    """Each manifest can be read, and nothing else is there."""
    named = set[str]()
    for path in folder.glob("ckpt-*.json"):
        checkpoint.load(path)
        named |= {shard.name for shard in manifests.read(checkpoint_stores.store_of(folder), path.name).shards}
    assert {f"shards/{path.name}" for path in (folder / "shards").iterdir()} == named
    assert {path.name for path in folder.iterdir()} == {"shards", *(path.name for path in folder.glob("ckpt-*.json"))}


def test_what_servers_wrote_is_bitwise_the_same_on_any_number_of_them_and_on_none(
    connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: dict[str, torch.Tensor] = {}
    for number, tasks in enumerate((3, 1, 2)):  # one server, three, two
        model, folder = Model(), tmp_path / str(number)
        with connect(tasks):
            model.run(1)  # the variables move to the servers
            if expected:
                model.session.restore(tfnb.train.Saver(tmp_path / str(number - 1)).latest)
                assert_same(model.values(), expected)
            model.run(2)
            expected = model.values()
            saver = tfnb.train.Saver(folder, session=model.session)
            with monkeypatch.context() as only:
                only.setattr(Engine, "fetched", never)
                written = saver.save(number)
            assert written.specs.keys() == expected.keys()
            assert_same(checkpoint.load(written)[0], expected)
            before = {path.name: path.stat().st_mtime_ns for path in (folder / "shards").iterdir()}
            model.session.run(model.step[1], {model.x: torch.ones(4)})
            saver.save(number + 1)
            after = {path.name: path.stat().st_mtime_ns for path in (folder / "shards").iterdir()}
            assert before.items() <= after.items() and len(after) == len(before) + 1, "written once: the table"
            expected = model.values()
        whole_files(folder)
        here = Model()
        here.session.restore(saver.latest)
        assert_same(here.values(), expected)


def test_a_store_of_this_process_alone_is_written_by_it(connect: Any) -> None:
    model = Model()
    try:
        with connect(2), warnings.catch_warnings():
            warnings.simplefilter("error")
            model.run(1)
            written = tfnb.train.Saver("memory://alone/run", session=model.session).save(1)
            assert_same(checkpoint.load(written)[0], model.values())
    finally:
        fsspec.filesystem("memory").rm("/alone", recursive=True)


def test_a_folder_that_servers_do_not_see_is_written_here_and_told_once(
    connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that leads elsewhere in each process, as one on the disks of several machines does."""
    monkeypatch.chdir(tmp_path)
    model = Model()
    with connect(2) as cluster:
        model.run(1)
        saver = tfnb.train.Saver("/proc/self/cwd/run", session=model.session)
        with pytest.warns(UserWarning, match=r"ps:0 on .*, ps:1 on .* cannot see /proc/self/cwd/run") as told:
            for step in (1, 2):
                saver.save(step)
                model.run(1)
        assert len(told) == 1
        assert_same(checkpoint.load(saver.save(3))[0], model.values())
        assert cluster.tasks
    whole_files(tmp_path / "run")


def test_a_full_disk_of_a_server_is_told_and_leaves_what_was_there(connect: Any, dask: Any, tmp_path: Path) -> None:
    model = Model()

    def limit(nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    with connect(2) as cluster:
        model.run(1)
        saver = tfnb.train.Saver(tmp_path, session=model.session)
        saver.save(1)
        expected = model.values()
        model.run(1)
        last = [cluster._engine.servers[-1].peer.addr]
        dask.run(limit, 10_000, workers=last)
        try:
            with pytest.raises(CheckpointWriteError, match=r"shards/[0-9a-f]+\.safetensors: File too large"):
                saver.save(2)
        finally:
            dask.run(limit, resource.RLIM_INFINITY, workers=last)
        whole_files(tmp_path)
        assert_same(checkpoint.load(saver.latest)[0], expected)
        saver.save(2)
    whole_files(tmp_path)


def die_in(puts: int) -> None:
    """From now on this process writes so many shards, and then half of one."""
    left, replace = [puts], checkpoint_stores.replace_file

    def put(path: Path, write: Any) -> None:
        def half(draft: Path) -> None:
            write(draft)
            os.truncate(draft, draft.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

        left[0] -= 1
        replace(path, write if left[0] >= 0 else half)

    checkpoint_stores.replace_file = put


@pytest.mark.slow
@pytest.mark.parametrize("puts", [0, 3])
def test_a_server_killed_while_it_writes_leaves_no_manifest_and_the_training_goes_on(
    connect: Any, dask: Any, tmp_path: Path, puts: int
) -> None:
    counters = Counters(pause=2)
    saver = tfnb.train.Saver(tmp_path, keep=2)
    with connect(2) as cluster:
        dask.run(die_in, puts, workers=[cluster._engine.servers[-1].peer.addr])
        with pytest.warns(UserWarning, match=r"no checkpoint of step \d+ .* was lost"):
            result = tfnb.fit(
                counters.train, {counters.x: torch.ones(1200)}, batch_size=4, checkpoint=saver, checkpoint_every=0.02
            )
        assert result.steps == 300 and counters.counts() == [300, 300]
    workers(dask, WORKERS)
    whole_files(tmp_path)
    values, about = checkpoint.load(saver.latest)
    assert about["training"]["steps"] == 300 and [*{float(-value[0]) for value in values.values()}] == [300]


def pins_there(dask_worker: Any) -> int:
    """How many pinned moments the servers of a worker process hold."""
    return sum(len(core.pins) for actor in dask_worker.state.actors.values() for core in actor.task.cores)


def test_pinned_values_that_nobody_will_write_are_given_up(
    connect: Any, dask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails after the pinning, at once: a kept error keeps its frames, and so the values."""
    model, errors = Model(), []

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no more")

    def held() -> int:
        return sum(dask.run(pins_there).values())

    with connect(2):
        model.run(1)
        saver = tfnb.train.Saver(tmp_path, session=model.session)
        for owner, name in (
            (saver._folder, "make"), (saver._folder, "_whole"), (queue_contents, "written"), (Thread, "start"),
        ):  # fmt: skip
            with monkeypatch.context() as broken, pytest.raises(OSError, match="no more") as caught:
                broken.setattr(owner, name, fail)
                saver.begin() if name == "start" else saver.save(1)
            errors.append(caught)
            until(lambda: held() == 0)
        state = model.session.state.unwritten(pins=True)
        assert held() > 0
        del state  # as after an interrupt of the call that pinned them
        until(lambda: held() == 0)
        assert saver.save(1).meta["graph"] == "shards"
        until(lambda: held() == 0)


@pytest.mark.slow
def test_a_server_whose_disk_hangs_fails_its_write_and_the_next_one_works(
    connect: Any, dask: Any, tmp_path: Path
) -> None:
    model = Model()
    with connect(2) as cluster:
        model.run(1)
        saver = tfnb.train.Saver(tmp_path, session=model.session)
        last = [cluster._engine.servers[-1].peer.addr]
        dask.run(hang, workers=last)
        try:
            with pytest.raises(CheckpointWriteError, match="its disk or store hangs"):
                saver.save(1)
        finally:
            dask.run(go_on, workers=last)
        assert saver.latest is None
        saver.save(1)
        assert_same(checkpoint.load(saver.latest)[0], model.values())
    whole_files(tmp_path)


_hanging: list[Any] = []


def hang() -> None:
    """From now on this process waits in each write, and says so soon."""
    gate, (replace, stalled) = Event(), (checkpoint_stores.replace_file, shard_writes.STALLED)
    _hanging[:] = gate, replace, stalled
    shard_writes.STALLED = 0.5

    def put(path: Path, write: Any) -> None:
        gate.wait()
        replace(path, write)

    checkpoint_stores.replace_file = put


def go_on() -> None:
    gate, checkpoint_stores.replace_file, shard_writes.STALLED = _hanging
    gate.set()
