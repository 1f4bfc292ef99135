"""Variable files: damaged ones are never used, and nothing is assigned unless everything fits."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.graph.build import Builder
from tfnb.errors import (
    CheckpointCorrupt,
    CheckpointIncompatible,
    CheckpointWriteError,
    DataLoss,
    InvalidArgument,
    NotFound,
    Unimplemented,
)
from tfnb.graph import Graph, Spec, tensor_files
from tfnb.graph.tensor_files import write_tensors
from tfnb.state import checkpoint

TENSORS = {"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.tensor([1, 2])}
META = {"step": 12, "graph": "net", "graph_hash": "ab"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "v.safetensors", TENSORS, META)
    return tmp_path / "v.safetensors"


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# -- round trips --------------------------------------------------------------------------------------------


def test_file_round_trips(path: Path) -> None:
    tensors, meta = checkpoint.load(path)
    assert same(tensors, TENSORS)
    assert meta == META


def test_file_opens_with_plain_safetensors(path: Path) -> None:
    assert same(load_file(path), TENSORS)


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint16, torch.bool,
    torch.complex64, torch.complex128,
], ids=str)  # fmt: skip
def test_every_dtype_round_trips_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    tensor = raw.view(dtype) if dtype.is_complex or dtype.is_floating_point else raw.to(dtype)
    checkpoint.save(tmp_path / "v", {"t": tensor}, {})
    found = checkpoint.load(tmp_path / "v")[0]["t"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("tensor", [
    torch.tensor(1.5), torch.zeros(0, 3), torch.arange(12.0).view(3, 4).T, torch.ones(1).expand(5),
    torch.arange(9.0)[3:5], torch.tensor([1 + 2j]).conj(), torch.ones(2, requires_grad=True),
    torch.tensor([float("nan"), float("inf"), -0.0]),
], ids=lambda t: str(list(t.shape)))  # fmt: skip
def test_every_kind_of_view_round_trips(tmp_path: Path, tensor: torch.Tensor) -> None:
    checkpoint.save(tmp_path / "v", {"t": tensor, "again": tensor}, {})
    found = checkpoint.load(tmp_path / "v")[0]
    for key in ("t", "again"):
        assert torch.equal(found[key].nan_to_num(7), tensor.detach().nan_to_num(7))
        assert not found[key].requires_grad


@pytest.mark.parametrize("label", ["<script>", "a\nb", '"', "näme", "", "__metadata", "../x"])
def test_hostile_labels_round_trip(tmp_path: Path, label: str) -> None:
    checkpoint.save(tmp_path / "v", {label: torch.ones(1)}, {label: label})
    tensors, meta = checkpoint.load(tmp_path / "v")
    assert (list(tensors), meta) == ([label], {label: label})


def test_empty_checkpoint_round_trips(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "v", {}, {})
    assert checkpoint.load(tmp_path / "v") == ({}, {})


def test_loaded_tensors_are_independent_of_the_file(path: Path) -> None:
    tensors, _ = checkpoint.load(path)
    checkpoint.save(path, {"other": torch.zeros(100)}, {})
    tensors["fc.weight"] += 1
    assert torch.equal(tensors["fc.weight"], TENSORS["fc.weight"] + 1)


def test_sparse_tensor_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(Unimplemented, match=r"rows: .*to_dense"):
        checkpoint.save(tmp_path / "v", {"rows": torch.eye(2).to_sparse()}, {})


# -- damage -------------------------------------------------------------------------------------------------


def test_truncation_at_every_byte_is_found(path: Path) -> None:
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointCorrupt, match=r"v\.safetensors"):
            checkpoint.load(path)


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_flipped_bit_is_found_or_harmless(path: Path, bits: int) -> None:
    data = path.read_bytes()
    for place in range(len(data)):
        for bit in range(place % 8, place % 8 + bits):
            path.write_bytes(data[:place] + bytes([data[place] ^ (1 << bit % 8)]) + data[place + 1 :])
            try:
                tensors, meta = checkpoint.load(path)
            except (CheckpointCorrupt, CheckpointIncompatible):
                continue
            assert same(tensors, TENSORS) and meta == META  # white space, or the order of keys


def test_flipped_value_names_file_key_and_both_digests(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CheckpointCorrupt, match=r"v\.safetensors: fc\.(bias|weight) has sha256 \w{64}, expected \w{64}"
    ):
        checkpoint.load(path)
    with pytest.raises(DataLoss):
        checkpoint.load(path)


def test_appended_bytes_are_found(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointCorrupt):
        checkpoint.load(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_of_another_library_gives_its_values(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"t": torch.ones(1)}, tmp_path / "v", metadata)
    tensors, about = checkpoint.load(tmp_path / "v")
    assert same(tensors, {"t": torch.ones(1)}) and about == {}


@pytest.mark.parametrize("left", ["tfnb", "digest"])
def test_a_file_of_ours_that_lost_metadata_is_damaged(tmp_path: Path, left: str) -> None:
    save_file({"t": torch.ones(1)}, tmp_path / "v", {left: "{}"})
    with pytest.raises(CheckpointCorrupt, match="was not written by tfnb"):
        checkpoint.load(tmp_path / "v")


@pytest.mark.parametrize(
    "about", [{"format": "tfnb-constants", "version": 1}, {"format": "tfnb-variables", "version": 2}]
)
def test_other_kind_or_version_is_refused(tmp_path: Path, about: dict[str, object]) -> None:
    write_tensors(tmp_path / "v", {}, about)
    with pytest.raises(CheckpointIncompatible, match="expected tfnb-variables version 1"):
        checkpoint.load(tmp_path / "v")


def header(entries: object, size: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


@pytest.mark.parametrize("data", [
    b"", b"\0" * 7, b"\0" * 8, header({}, 2**63), header({}, 100), header([]), header({"t": 1}),
    header({"t": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}) + b"\0" * 8,
    header({"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}) + b"\0" * 16,
    header({k: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for k in "ab"}) + b"\0" * 8,
    header({"__metadata__": {"tfnb": "[" * 100_000, "digest": ""}}),
    header({"__metadata__": {"tfnb": "[]", "digest": ""}}),
    header({"__metadata__": {"tfnb": "{}", "digest": ""}}),
    header({"__metadata__": {"tfnb": '{"sha256": 1, "complex": []}', "digest": ""}}),
    header({"__metadata__": {"tfnb": '{"sha256": {}, "complex": [[]]}', "digest": ""}}),
    header({"__metadata__": {"tfnb": '{"sha256": {"t": "0"}, "complex": []}', "digest": ""}}),
    header({"__metadata__": {"tfnb": '{"sha256": {}, "complex": ["t"]}', "digest": ""}}),
    b"PK\x03\x04" + b"\0" * 100, b"\x80\x02}q\0." + b"\0" * 100,
])  # fmt: skip
def test_hostile_bytes_are_corrupt(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "v").write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        checkpoint.load(tmp_path / "v")


def test_header_over_the_cap_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "v").open("wb") as file:
        file.write(struct.pack("<Q", 2**25))
        os.truncate(file.fileno(), 2**26)
    with pytest.raises(CheckpointCorrupt, match="at most 16777216"):
        checkpoint.load(tmp_path / "v")


@given(st.binary(max_size=400))
def test_random_bytes_are_corrupt(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random"
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        checkpoint.load(path)


def test_files_of_other_programs_are_said_to_be_none_of_ours(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "notes.txt").write_text("what this folder holds, in words")
    with pytest.raises(CheckpointCorrupt, match=r"no safetensors file; it looks like one of torch\.save"):
        checkpoint.load(tmp_path / "model.pt")
    with pytest.raises(CheckpointCorrupt, match="no safetensors file: it has 32 bytes and no header"):
        checkpoint.load(tmp_path / "notes.txt")


def test_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "nothing")


# -- writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "open", "close"])
def test_failure_at_any_call_leaves_the_older_file(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    before = path.read_bytes()
    real = getattr(os, call)

    def fail(*args: object, **kwargs: object) -> None:
        if call == "close":
            real(*args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CheckpointWriteError, match=r"cannot write .*No space left") as caught:
        checkpoint.save(path, {"t": torch.zeros(1000)}, {})
    monkeypatch.undo()
    assert caught.value.errno == 28 and isinstance(caught.value, OSError)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_failing_rename_leaves_the_older_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CheckpointWriteError):
        checkpoint.save(path, {"t": torch.zeros(1)}, {})
    monkeypatch.undo()
    assert same(checkpoint.load(path)[0], TENSORS)


def test_interrupt_while_writing_leaves_the_older_file_and_no_draft(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, {"t": torch.zeros(1)}, {})
    monkeypatch.undo()
    assert same(checkpoint.load(path)[0], TENSORS)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_missing_folder_is_a_write_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match="No such file or directory") as caught:
        checkpoint.save(tmp_path / "nowhere" / "v", TENSORS, {})
    assert caught.value.errno == 2


def saved_graph(path: Path) -> None:
    b = Builder()
    b.constant(torch.ones(2))
    Graph("g", b.contents()).save(path)


SAVES = {"checkpoint": lambda path: checkpoint.save(path, TENSORS, {}), "graph": saved_graph}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_file_that_is_saved_again_keeps_its_mode(tmp_path: Path, save: Callable[[Path], object]) -> None:
    save(tmp_path / "v")
    for mode in (0o600, 0o640, 0o644, 0o444):
        for path in tmp_path.glob("v*"):
            path.chmod(mode)
        save(tmp_path / "v")
        assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("v*")} == {mode}


def test_nobody_else_can_read_a_private_file_while_it_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o600)
    modes = []
    real = tensor_files.pieces

    def looked_at(tensor: torch.Tensor) -> Iterator[memoryview]:
        modes.extend(draft.stat().st_mode & 0o777 for draft in path.parent.glob(".*.tmp"))
        return real(tensor)

    monkeypatch.setattr(tensor_files, "pieces", looked_at)
    checkpoint.save(path, TENSORS, META)
    assert modes == [0o600, 0o600]


def test_a_name_that_safetensors_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no tensor named __metadata__"):
        checkpoint.save(tmp_path / "v", {"__metadata__": torch.ones(1)}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_save_to_a_link_writes_what_it_leads_to(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "deep").mkdir()
    target, link = tmp_path / "deep" / "v", tmp_path / "link"
    if is_there:
        checkpoint.save(target, {}, {})
        target.chmod(0o600)
    link.symlink_to(target)
    checkpoint.save(link, TENSORS, META)
    assert link.is_symlink() and same(checkpoint.load(target)[0], TENSORS)
    assert not is_there or target.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in target.parent.iterdir()] == ["v"]


def test_a_save_to_links_in_a_circle_is_a_write_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointWriteError, match="Too many levels of symbolic links"):
        checkpoint.save(tmp_path / "a", TENSORS, META)


# -- matching -----------------------------------------------------------------------------------------------

WANT = {"fc.weight": Spec(torch.float32, (2, 3)), "fc.bias": Spec(torch.int64, (2,))}


def test_match_gives_every_wanted_tensor_and_ignores_others() -> None:
    assert same(checkpoint.match({**TENSORS, "slot": torch.zeros(1)}, WANT), TENSORS)


def test_match_names_all_missing_labels_with_the_nearest() -> None:
    with pytest.raises(NotFound) as caught:
        checkpoint.match({"fc.weights": torch.zeros(2, 3)}, WANT)
    assert str(caught.value).splitlines() == [
        "the checkpoint lacks 2 of 2 variables:",
        "  fc.weight (near: fc.weights)",
        "  fc.bias",
        "it has, for no variable here: fc.weights",
    ]


def test_match_names_what_is_left_over_and_other_shapes_beside_what_is_missing() -> None:
    with pytest.raises(NotFound) as caught:
        checkpoint.match({"head.weight": torch.zeros(2, 3), "fc.bias": torch.zeros(3)}, WANT)
    assert str(caught.value).splitlines() == [
        "the checkpoint lacks 1 of 2 variables:",
        "  fc.weight (near: head.weight)",
        "it has, for no variable here: head.weight",
        "of another shape or dtype:",
        "  fc.bias is int64[2], the checkpoint holds float32[3]",
    ]


def test_match_names_all_other_shapes_and_dtypes_with_both() -> None:
    with pytest.raises(CheckpointIncompatible) as caught:
        checkpoint.match({"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(2)}, WANT)
    assert str(caught.value).splitlines()[1:] == [
        "  fc.weight is float32[2, 3], the checkpoint holds float32[3, 2]",
        "  fc.bias is int64[2], the checkpoint holds float32[2]",
    ]


def test_match_on_another_device_fits() -> None:
    assert checkpoint.match(TENSORS, {"fc.bias": Spec(torch.int64, (2,), "cuda")})


def test_partial_match_skips_what_is_missing_but_not_what_differs() -> None:
    assert list(checkpoint.match({"fc.bias": TENSORS["fc.bias"]}, WANT, strict=False)) == ["fc.bias"]
    with pytest.raises(CheckpointIncompatible):
        checkpoint.match({"fc.bias": torch.zeros(3)}, WANT, strict=False)


def test_mapping_renames() -> None:
    have = {"old.weight": TENSORS["fc.weight"], "fc.bias": TENSORS["fc.bias"]}
    assert same(checkpoint.match(have, WANT, mapping={"fc.weight": "old.weight"}), TENSORS)


def test_mapping_from_an_unknown_variable_or_to_a_missing_key_is_an_error() -> None:
    with pytest.raises(
        InvalidArgument, match=r"mapping names 'fc.weigth', which is no variable here \(near: fc.weight"
    ):
        checkpoint.match(TENSORS, WANT, mapping={"fc.weigth": "fc.weight"})
    with pytest.raises(NotFound, match=r"old.weight"):
        checkpoint.match(TENSORS, WANT, mapping={"fc.weight": "old.weight"}, strict=False)
