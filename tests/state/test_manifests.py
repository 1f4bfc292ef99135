"""Checkpoints of shards: what is shared and collected, every kind of damage, and stores of fsspec."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
from tfnb.errors import (
    CheckpointCorrupt,
    CheckpointIncompatible,
    CheckpointWriteError,
    InvalidArgument,
    NotFound,
)
from tfnb.state import checkpoint, manifests
from tfnb.state.checkpoint_stores import LocalStore, store_of
from tfnb.state.manifests import Manifest
from tfnb.train import Saver

LARGE = 300_000  # numbers: more than a MiB


class State:
    """A frozen table of several shards, a large Variable, and small ones; a session of them."""

    def __init__(self) -> None:
        frozen = torch.arange(5_000_000, dtype=torch.float32).reshape(-1, 10)  # 20 MB: two shards
        self.frozen = tfnb.Variable(frozen, name="frozen", trainable=False)
        self.weights = tfnb.Variable(torch.zeros(LARGE), name="weights")
        self.phase = tfnb.Variable(torch.tensor([1 + 2j, 3j]), name="phase")
        self.count = tfnb.Variable(torch.tensor(0), name="count")
        with tfnb.record() as self.graph:
            self.step = self.weights.assign_add(torch.ones(LARGE)), self.count.assign_add(torch.tensor(1))
            self.read = self.frozen.read().sum() + self.phase.read().real.sum()
        self.session = tfnb.Session(self.graph)

    def values(self) -> dict[str, torch.Tensor]:
        return {label: variable.value() for label, variable in self.graph.contents.variables.items()}


def small() -> tfnb.Session:
    """A session of a frozen table alone."""
    table = tfnb.Variable(torch.arange(9.0), name="table", trainable=False)
    with tfnb.record() as graph:
        table.read().sum()
    return tfnb.Session(graph)


def shards(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "shards").iterdir()}


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder of a store that has no rename."""
    yield "memory://checkpoints/run"
    fsspec.filesystem("memory").rm("/checkpoints", recursive=True)


def test_what_did_not_change_is_written_once_and_what_nobody_names_goes(tmp_path: Path) -> None:
    state = State()
    saver = Saver(tmp_path, keep=2, session=state.session)
    saver.save(1)
    first = shards(tmp_path)
    assert len(first) == 4, "two of the table, one of the weights, one of the small ones"
    state.session.run(state.step)
    saver.save(2)
    second = shards(tmp_path)
    assert len(second) == 6 and first.items() <= second.items()
    state.session.run(state.step)
    saver.save(3)
    assert len(shards(tmp_path)) == 6, "the weights and small ones of the first one are gone"
    (tmp_path / "ckpt-4.json").write_text("half")
    saver.save(5)
    assert len(shards(tmp_path)) == 6, "a manifest that cannot be read may name any of them: nothing is deleted"


@pytest.mark.parametrize("damage", ["bit", "half", "link"])
def test_a_damaged_shard_is_written_again(tmp_path: Path, damage: str) -> None:
    """A frozen table lies in the shards of the checkpoint before: one that is damaged ends no later checkpoint."""
    session, folder = small(), tmp_path / "run"
    Saver(folder, session=session).save(1)
    for path in (folder / "shards").iterdir():
        whole = path.read_bytes()
        if damage == "link":
            path.rename(tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
        else:
            path.write_bytes(whole[:-1] + (b"" if damage == "half" else bytes([whole[-1] ^ 1])))
    Saver(folder, keep=1, session=session).save(2)
    found, _ = checkpoint.load(folder / "ckpt-2.json")
    assert torch.equal(found["table"], torch.arange(9.0))
    assert [path.name for path in Saver(folder).paths][-1] == "ckpt-2.json"


def test_a_shard_that_another_training_deletes_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    saver = Saver(tmp_path, keep=1, session=small())
    saver.save(1)
    write = manifests.write

    def late(store: Any, name: str, manifest: Manifest) -> None:
        manifests.collect(store, [])  # what the end of another one's checkpoint does
        write(store, name, manifest)

    monkeypatch.setattr(manifests, "write", late)
    with pytest.raises(CheckpointWriteError, match="a folder of its own"):
        saver.save(2)
    assert not (tmp_path / "ckpt-2.json").exists() and (tmp_path / "ckpt-1.json").exists()


def test_a_relative_folder_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saver = Saver("run", session=small())
    saver.save(1)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    saver.save(2)
    assert saver.paths == [tmp_path / "run" / "ckpt-1.json", tmp_path / "run" / "ckpt-2.json"]


def test_a_manifest_says_all_of_its_files_and_a_checkpoint_loads_bitwise(tmp_path: Path) -> None:
    state = State()
    state.session.run(state.step)
    path = Saver(tmp_path, session=state.session).save(1).file
    facts, before = json.loads(Path(path).read_text()), state.values()
    assert facts["meta"]["streams"]["runs"] == 1 and facts["meta"]["graph_hash"]
    assert sum(one["bytes"] for one in facts["files"]) == sum(p.stat().st_size for p in (tmp_path / "shards").iterdir())
    state.session.run(state.step)
    state.session.restore(path)
    torch.testing.assert_close(state.values(), before, rtol=0, atol=0)
    with pytest.raises(NotFound, match="lacks 1 of 1 variables"):
        other = tfnb.Variable(torch.zeros(1), name="other")
        with tfnb.record() as graph:
            other.read() + 1
        tfnb.Session(graph).restore(path)


def test_any_store_of_fsspec_holds_checkpoints(memory: str, tmp_path: Path) -> None:
    state = State()
    saver = Saver(memory, keep=1, session=state.session)
    for step in (1, 2):
        state.session.run(state.step)
        assert saver.save(step).file == f"{memory}/ckpt-{step}.json"
    before = state.values()
    assert saver.paths == [f"{memory}/ckpt-2.json"] and "ckpt-2.json" in repr(saver)
    assert len(fsspec.filesystem("memory").ls("/checkpoints/run/shards")) == 4
    state.session.run(state.step)
    state.session.restore(saver.latest)
    torch.testing.assert_close(state.values(), before, rtol=0, atol=0)
    fsspec.filesystem("memory").rm_file(
        f"/checkpoints/run/{manifests.read(saver._folder.store, 'ckpt-2.json').shards[0].name}"
    )
    assert saver.paths == [] and "is missing" in repr(saver)
    assert isinstance(store_of(tmp_path.as_uri()), LocalStore), "which renames and syncs"
    for unknown in ("nowhere://bucket/run", "s4://bucket/run"):
        with pytest.raises(InvalidArgument, match="no file system for"):
            Saver(unknown)


def test_a_training_goes_on_from_a_store(memory: str) -> None:
    def trained(**options: Any) -> tuple[int, torch.Tensor]:
        w = torch.nn.Parameter(torch.zeros(3))
        with tfnb.record("stored"):
            x = tfnb.placeholder(torch.ones(2, 3), name="x")
            train = tfnb.train.Adam(0.1).minimize((x * w - 1).square().mean())
        data = torch.arange(60.0).reshape(20, 3)
        return tfnb.fit(train, {x: data}, batch_size=2, **options).steps, w.detach().clone()

    class Stop:
        def on_step(self, progress: Any) -> None:
            if progress.step == 4:
                progress.stop("enough")

    _, whole = trained()
    assert trained(checkpoint=memory, callbacks=[Stop()])[0] == 4
    steps, values = trained(resume=memory, checkpoint=memory)
    assert steps == 6
    torch.testing.assert_close(values, whole, rtol=0, atol=0)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A small checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    tensors = {"a": torch.arange(7.0), "b": torch.tensor([True, False])}
    meta = {"streams": {"seed": 0, "runs": 3}, "training": {"steps": 3}}
    unwritten = checkpoint.Unwritten(tensors, meta, {})
    checkpoint.save_shards(LocalStore(folder), "ckpt-3.json", unwritten, meta)
    return folder, tensors


def load(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / "ckpt-3.json")[0]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_damage_is_a_typed_error_or_harmless(whole: Any, tmp_path_factory: Any, data: st.DataObject) -> None:
    folder, tensors = whole
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(folder, copy)
    (shard,) = (copy / "shards").iterdir()
    path = data.draw(st.sampled_from([copy / "ckpt-3.json", shard]), "file")
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1), "at")
    match data.draw(st.sampled_from(["cut", "flip", "insert", "gone"]), "damage"):
        case "cut":
            del content[at:]
        case "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
        case "insert":
            content.insert(at, data.draw(st.integers(0, 255), "byte"))
        case "gone":
            content = bytearray()
    path.write_bytes(content)
    try:
        found = load(copy)
    except (CheckpointCorrupt, CheckpointIncompatible):
        return
    finally:
        shutil.rmtree(copy.parent)
    assert path.name == "ckpt-3.json", "every byte of a shard counts"
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)  # of a text that says the same


def changed(folder: Path, change: Any) -> None:
    """Change the facts of a manifest, and give it the digest that it should have."""
    path = folder / "ckpt-3.json"
    facts = json.loads(path.read_text())
    del facts["sha256"]
    change(facts)
    path.write_text(json.dumps({"sha256": manifests._digest(facts), **facts}, indent=1))


def _file(**how: Any) -> Any:
    return lambda facts: facts["files"][0].update(how)


FORGED = {
    "a path above": (_file(name="../secret.safetensors"), CheckpointCorrupt, "unsafe name"),
    "an absolute path": (_file(name="/etc/passwd"), CheckpointCorrupt, "unsafe name"),
    "a zero byte": (_file(name="shards/\0"), CheckpointCorrupt, "unsafe name"),
    "a digest that is a path": (_file(sha256="../x", name="shards/../x.safetensors"), CheckpointCorrupt, "unsafe name"),
    "a missing shard": (
        _file(sha256="0" * 64, name=f"shards/{'0' * 64}.safetensors"), CheckpointCorrupt, "is missing: a manifest"
    ),
    "other bytes": (_file(bytes=1), CheckpointCorrupt, "its manifest says 1"),
    "no bytes": (_file(bytes=True), CheckpointCorrupt, "has no sha256 or number of bytes"),
    "a later version": (lambda facts: facts.update(version=2), CheckpointIncompatible, "install a newer one"),
    "a file that is none": (lambda facts: facts["tensors"].update(a=[-1]), CheckpointCorrupt, "names a file that is"),
    "no file": (lambda facts: facts["tensors"].update(a=[]), CheckpointCorrupt, "a has no files"),
    "another label": (lambda facts: facts["tensors"].update(c=[0]), CheckpointCorrupt, "holds no c"),
    "no facts": (lambda facts: facts.update(meta=[]), CheckpointCorrupt, "not an object"),
    "damaged facts": (
        lambda facts: facts["meta"].update(training={"steps": "3"}), CheckpointCorrupt, "damaged facts about"
    ),
    "other variables": (lambda facts: facts["meta"].update(variables=9), CheckpointIncompatible, "of version 9"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused(whole: Any, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole[0], tmp_path / "run")
    change, error, text = FORGED[name]
    changed(tmp_path / "run", lambda facts: None)
    load(tmp_path / "run")
    changed(tmp_path / "run", change)
    with pytest.raises(error, match=text):
        load(tmp_path / "run")


def test_a_shard_is_no_link_and_no_other_file(whole: Any, tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "run")
    (shard,) = (tmp_path / "run" / "shards").iterdir()
    real = shard.rename(tmp_path / "real")
    shard.symlink_to(real)
    with pytest.raises(CheckpointCorrupt, match="is a link"):
        load(tmp_path / "run")
    shard.unlink()
    store = LocalStore(tmp_path / "other")
    store.path.mkdir()
    other = manifests.write_shards(store, {"a": torch.arange(7.0) + 1, "b": torch.tensor([True, False])})["a"][0]
    shutil.copy(store.path / other.name, shard)
    with pytest.raises(CheckpointCorrupt, match="another file has its name"):
        load(tmp_path / "run")


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (a,) = manifests.write_shards(store, {"a": torch.zeros(2, 3)})["a"]
    (b,) = manifests.write_shards(store, {"a": torch.zeros(2, 4)})["a"]
    with pytest.raises(CheckpointCorrupt, match=r"shards of a do not fit: \(2, 3\), \(2, 4\)"):
        manifests.load(store, Manifest({}, {"a": (a, b)}))
    assert manifests.load(store, Manifest({}, {"a": (a, a)}))["a"].shape == (4, 3)
