"""Tensors in a mapped file: values of plain ones through any writes, in no more memory, and nothing left behind."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tfnb
from tfnb.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from tfnb.graph import lazy_memory, mapped_files
from tfnb.graph.mapped_files import MappedFile, region_of, span_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mappings are replaced in place on Linux")
ROOT = Path(__file__).parent.parent.parent


class Mixed(nn.Module):
    """Parameters and buffers made in all ways that modules of torch make them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(256, 256), nn.BatchNorm1d(20_000)
        self.table, self.lstm = nn.Embedding(1000, 64, padding_idx=0), nn.LSTM(64, 128)
        self.scaled = nn.Parameter(torch.randn(256, 256) * 0.02)
        self.tied = nn.Linear(256, 256, bias=False)
        self.tied.weight = self.linear.weight
        self.register_buffer("mask", torch.ones(200, 200).tril(), persistent=False)
        self.turned = nn.Parameter(torch.randn(256, 300).t())
        self.apply(lambda module: nn.init.orthogonal_(module.weight) if isinstance(module, nn.Linear) else None)


def made(is_mapped: bool, kind: Any = Mixed) -> Any:
    torch.manual_seed(0)
    if not is_mapped:
        return kind()
    with tfnb.mapped_memory():
        return kind()


def tensors(net: nn.Module) -> list[torch.Tensor]:
    return [*net.parameters(), *net.buffers()]


def test_a_module_has_the_values_that_it_has_anywhere_and_its_large_tensors_lie_in_the_file() -> None:
    plain, mapped = made(False), made(True)
    after = torch.randn(3)
    made(False)
    assert torch.equal(after, torch.randn(3)), "as many random numbers were drawn"
    for one, other in zip(tensors(plain), tensors(mapped), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride() and one.requires_grad == other.requires_grad
        is_large = one.nbytes >= mapped_files.LEAST
        assert (other.untyped_storage().data_ptr() in mapped_files._REGIONS) == is_large
    assert mapped.tied.weight is mapped.linear.weight


def test_the_idiom_of_meta_devices_gives_mapped_parameters() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with tfnb.mapped_memory():
        net.to_empty(device="cpu")
        for layer in net:
            layer.reset_parameters()  # type: ignore[operator]
    assert all(region_of(layer.weight) for layer in net)
    assert net(torch.ones(2, 256)).isfinite().all()
    with tfnb.mapped_memory(), torch.device("meta"):
        assert nn.Linear(256, 256).weight.is_meta


def test_parameters_that_share_memory_share_it_in_the_file() -> None:
    def kind() -> nn.Module:
        net, values = nn.Module(), torch.ones(300, 300)
        net.one, net.other = nn.Parameter(values), nn.Parameter(values[:150])
        net.third = nn.Parameter(net.one.data)
        return net

    net = made(True, kind)
    with torch.no_grad():
        net.one[0, 0] = 7
    assert net.other[0, 0] == net.third[0, 0] == 7
    assert region_of(net.one) is region_of(net.third) is not None


def test_views_and_state_dicts_follow_the_next_generation() -> None:
    net = made(True, lambda: nn.Linear(256, 256))
    view, kept, region = net.weight[3:5], net.state_dict()["weight"], region_of(net.weight)
    region.reserve()
    new = torch.randn(256, 256)
    region.file.write(region.next, memoryview(new.numpy().tobytes()))
    mapped_files.flip([[net.weight]])
    assert torch.equal(net.weight, new) and torch.equal(view, new[3:5]) and torch.equal(kept, new)


def test_all_flip_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    net = made(True, lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))))
    weights = [layer.weight for layer in net]
    before, regions = [w.clone() for w in weights], [region_of(w) for w in weights]
    for region in regions[:2]:
        region.reserve()  # of the third there is no next generation: the system refuses that offset
    with pytest.raises(ResourceExhausted, match="cannot map its new values"):
        mapped_files.flip([weights])
    assert all(map(torch.equal, before, weights))


SIZE = 5 * mapped_files._PIECE // 4  # bytes of a tensor: two pieces
ACT = st.tuples(st.sampled_from(["fill", "rows", "assign", "clone", "flip", "drop", "view"]), st.integers(0, 99))


@settings(max_examples=15, deadline=None)
@given(acts=st.lists(ACT, max_size=12), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_a_mapped_tensor_is_a_plain_one_through_any_writes(acts: list[tuple[str, int]], dtype: torch.dtype) -> None:
    file, rows = MappedFile(), SIZE // dtype.itemsize // 1000
    mapped, plain = mapped_files.zeros((rows, 1000), dtype, file), torch.zeros(rows, 1000, dtype=dtype)
    clones = []
    for act, number in acts:
        at, value = number * rows // 100, torch.full((rows, 1000), number).to(dtype)
        match act:
            case "fill":
                mapped.fill_(number), plain.fill_(number)
            case "rows":
                mapped[at] += number
                plain[at] += number
            case "assign":
                lazy_memory.assign(mapped[at:], value[at:]), plain[at:].copy_(value[at:])
            case "clone":
                clones.append((lazy_memory.clone(mapped), plain.clone()))
            case "view":
                clones.append((lazy_memory.clone(mapped[at : at + 2]), plain[at : at + 2].clone()))
            case "flip":
                region = region_of(mapped)
                region.reserve()
                file.write(region.next, memoryview(value.view(torch.uint8).numpy()).cast("B"))
                mapped_files.flip([[mapped]])
                plain.copy_(value)
            case "drop":
                file.drop_pages()
    for one, other in [*clones, (mapped, plain)]:
        assert torch.equal(one, other)
        assert b"".join(bytes(piece) for piece in mapped_files.pieces(one)) == other.view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
def test_memory_that_was_used_before_is_zeros_again_and_the_file_does_not_grow() -> None:
    file = MappedFile()
    for _ in range(5):
        values = mapped_files.zeros((SIZE // 4,), torch.float32, file)
        assert not values.any()
        values.fill_(3)
        copy = lazy_memory.clone(values)
        del values, copy
        gc.collect()
    assert os.fstat(file.descriptor).st_size <= 2 * SIZE + (1 << 16)
    assert not len(file.regions)


def test_zeros_and_their_copies_take_no_writing() -> None:
    file = MappedFile()
    table = mapped_files.zeros((256, 1 << 16), torch.float32, file)
    table[7, 5] = 1.0
    copy = lazy_memory.clone(table)
    region = region_of(copy)
    assert sum(stop - start for start, stop in file.extents(region.offset, region.offset + region.length)) < 1 << 24
    assert copy[7, 5] == 1.0 and not copy[8:].any()


def test_slots_lie_beside_their_parameters() -> None:
    layer = made(True, lambda: nn.Linear(256, 256))
    for optimizer in (tfnb.train.Adam(0.1), tfnb.train.Adagrad(0.1, initial_accumulator_value=0.5)):
        for name, slot in optimizer.slots(layer.weight).items():
            like = layer.weight if slot.shape else torch.zeros(())
            assert (region_of(slot.storage) is not None) == bool(slot.shape), name
            assert torch.equal(slot.storage, torch.full_like(like, 0.5 if name == "sum" else 0.0))


# -- bad places -----------------------------------------------------------------------------------------------


def test_a_folder_in_which_no_file_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "none", tmp_path / "file", Path("/proc")):
        with pytest.raises(InvalidArgument, match=r"no file can be made in .*name a folder"):
            tfnb.mapped_memory(folder)
    with pytest.raises(InvalidArgument, match="takes str or PathLike"):
        tfnb.mapped_memory(3)  # type: ignore[arg-type]


def test_a_folder_in_memory_is_told() -> None:
    shared = Path("/dev/shm")
    if mapped_files._file_system(shared) != "tmpfs":
        pytest.skip("this machine has no /dev/shm")
    with pytest.warns(UserWarning, match="lies in memory"):
        tfnb.mapped_memory(shared)


def test_a_full_disk_is_an_error_with_its_numbers_and_what_was_there_stays(tmp_path: Path) -> None:
    file = MappedFile(tmp_path)
    kept = mapped_files.zeros((1 << 20,), torch.uint8, file).fill_(3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, hard))  # as a disk of 3 MiB
    try:
        with pytest.raises(
            ResourceExhausted, match=r"no room for 4,194,304 bytes of mapped memory in .*bytes are free"
        ):
            mapped_files.zeros((4 << 20,), torch.uint8, file)
        more = mapped_files.zeros((1 << 20,), torch.uint8, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept.eq(3).all() and not more.any()


def test_no_block_begins_in_a_recording_and_none_changes_one() -> None:
    with tfnb.record(), pytest.raises(FailedPrecondition, match="make the model above"):
        tfnb.mapped_memory()
    with tfnb.mapped_memory(), tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 256))
        y = x + torch.zeros(256)
        z = torch.empty(300, 300).fill_(2.0)
    assert torch.equal(tfnb.run(y, {x: torch.ones(3, 256)}), torch.ones(3, 256))
    assert span_of(tfnb.run(z)) is None and graph.nodes


def test_other_threads_and_later_modules_are_left_alone() -> None:
    with tfnb.mapped_memory():
        pass
    assert span_of(nn.Linear(256, 256).weight) is None and span_of(torch.zeros(300, 300)) is None


def test_a_forked_process_reads_and_makes_no_more_of_it() -> None:
    file = MappedFile()
    values = mapped_files.zeros((1 << 20,), torch.uint8, file).fill_(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        try:
            mapped_files.zeros((1 << 20,), torch.uint8, file)
        except FailedPrecondition:
            os._exit(3 if int(values[5]) == 3 else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


KILLED = """
import sys, torch, tfnb
with tfnb.mapped_memory(sys.argv[1]):
    net = torch.nn.Linear(1024, 1024)
print("made", flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_process_that_was_killed(tmp_path: Path) -> None:
    held = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "made\n"  # type: ignore[union-attr]
        assert not [*tmp_path.iterdir()], "the file has no name while it is used"
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert not [*tmp_path.iterdir()]
