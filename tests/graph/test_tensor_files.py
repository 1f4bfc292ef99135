"""Tensors that are read from a file are the ones that its digest vouched for, and no other process can change them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tfnb
from tests.graph.build import Builder
from tfnb.errors import CheckpointCorrupt, ResourceExhausted, TfnbError
from tfnb.graph import Graph, lazy_memory, mapped_files, tensor_files
from tfnb.graph.tensor_files import read_tensors, write_tensors
from tfnb.state import checkpoint

VALUE = torch.arange(4096.0)


def of_a_graph(folder: Path) -> tuple[Path, Callable[[], torch.Tensor]]:
    """A graph with a constant: the file that holds the constant, and what loads it."""
    b = Builder()
    b.constant(VALUE)
    Graph("g", b.contents()).save(folder / "g.json")
    return folder / "g.json.safetensors", lambda: Graph.load(folder / "g.json").nodes[0].attrs["value"]


def of_a_checkpoint(folder: Path) -> tuple[Path, Callable[[], torch.Tensor]]:
    """The same of a variable file."""
    checkpoint.save(folder / "v", {"t": VALUE}, {})
    return folder / "v", lambda: checkpoint.load(folder / "v")[0]["t"]


def of_a_queue(folder: Path) -> tuple[Path, Callable[[], torch.Tensor]]:
    """The same of what a queue holds."""
    with tfnb.record("queued") as g:
        queue = tfnb.FIFOQueue(4, [torch.float32], shapes=[VALUE.shape], name="q")
        put = queue.enqueue(VALUE)
    session = tfnb.Session(g)
    session.run(put)
    session.save(folder / "v")

    def load() -> torch.Tensor:
        session.restore(folder / "v")
        (element,) = session.state.moment().queues["q"].tensors
        return element

    return folder / "v", load


KINDS = {"graph": of_a_graph, "checkpoint": of_a_checkpoint, "queue": of_a_queue}


@pytest.fixture(params=KINDS)
def loader(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[], torch.Tensor]]:
    return KINDS[request.param](tmp_path)


def change_in_place(path: Path) -> None:
    """Write the same bytes with the tensors' bytes inverted, as another process would, into the same file."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = bytes(255 - byte for byte in data[start:])
    with path.open("r+b") as file:
        file.write(data)


def test_a_change_of_the_file_after_the_load_is_not_seen(loader: tuple[Path, Callable[[], torch.Tensor]]) -> None:
    path, load = loader
    loaded = load()
    change_in_place(path)
    assert torch.equal(loaded, VALUE)


def test_a_change_of_the_file_after_its_digest_was_taken_is_not_seen(
    loader: tuple[Path, Callable[[], torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, load = loader
    real = tensor_files.checked

    def then_changed(*args: Any) -> Any:
        found = real(*args)
        change_in_place(path)
        return found

    monkeypatch.setattr(tensor_files, "checked", then_changed)
    assert torch.equal(load(), VALUE)


def test_a_truncation_of_the_file_after_the_load_ends_no_process(tmp_path: Path) -> None:
    for kind in ("graph", "checkpoint"):
        path, _ = KINDS[kind](tmp_path)
        program = (
            "import os, sys, torch\n"
            "from pathlib import Path\n"
            "from tests.graph import test_tensor_files as tests\n"
            f"path, load = tests.KINDS[{kind!r}](Path({str(tmp_path)!r}))\n"
            "loaded = load()\n"
            "os.truncate(path, 0)\n"
            "print(torch.equal(loaded, tests.VALUE))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, "True"), f"{path}: {done.stderr}"


def test_a_file_that_shrinks_while_it_is_read_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, load = of_a_checkpoint(tmp_path)
    real = tensor_files.read_header

    def then_cut(*args: Any) -> Any:
        found = real(*args)
        os.truncate(path, path.stat().st_size - 4096)
        return found

    monkeypatch.setattr(tensor_files, "read_header", then_cut)
    with pytest.raises(CheckpointCorrupt, match="t ends after 12288 of 16384 bytes"):
        load()


@pytest.mark.parametrize("free", [None, 0], ids=["in memory", "in a spare file"])
def test_every_dtype_is_as_safetensors_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int | None
) -> None:
    monkeypatch.setattr(lazy_memory, "free", lambda: free)
    monkeypatch.setattr(mapped_files, "LEAST", 1)
    raw = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    dtypes = [*dict.fromkeys(tensor_files.DTYPES.values())]
    tensors = {str(t): raw.clone().view(t) if t.is_floating_point or t.is_complex else raw.to(t) for t in dtypes}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "odd": torch.ones(3, dtype=torch.int8)}
    save_file(tensors, tmp_path / "v")
    found, _, _ = read_tensors(tmp_path / "v", of_others=True)
    wanted = load_file(tmp_path / "v")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert found[key].contiguous().view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8)), key
        found[key].zero_()  # it may be written


def test_a_spare_file_has_no_name_and_is_refused_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_memory, "free", lambda: 0)
    monkeypatch.setattr(mapped_files, "LEAST", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path, load = of_a_checkpoint(tmp_path)
    assert torch.equal(load(), VALUE)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceExhausted, match=r"v takes \d+ bytes; 0 are free in memory, .*No space left"):
        load()


def test_zeros_of_a_large_table_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_memory, "LARGE", 1 << 20)
    table = torch.zeros(1 << 14, 64)
    table[5] = 1
    write_tensors(tmp_path / "v", {"t": table}, {})
    found = read_tensors(tmp_path / "v")[0]["t"]
    assert torch.equal(found[5], table[5]) and lazy_memory.is_table(found)


MEASURED = """
import sys
from pathlib import Path
from tfnb.graph.tensor_files import read_tensors
status = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
import torch; torch.ones(10).sum(); read_tensors(Path(sys.argv[1]))
before = status()
found, _, _ = read_tensors(Path(sys.argv[2]))
print(status() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory was taken")
def test_reading_takes_the_tensors_and_at_most_one_beside_them(tmp_path: Path) -> None:
    mebibyte = 1 << 20
    write_tensors(tmp_path / "small", {"t": torch.ones(1)}, {})
    values = {f"t{i}": torch.full((8 * mebibyte // 8,), i + 1j, dtype=torch.complex64) for i in range(8)}
    write_tensors(tmp_path / "large", values, {})
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (64 + 8 + 4) * mebibyte


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "v"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    for load in (checkpoint.load, Graph.load):
        with pytest.raises(TfnbError, match="no regular file"):
            load(path)
