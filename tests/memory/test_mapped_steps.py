"""Steps in packs whose Variables lie in a mapped file: in the memory of the budget, with the bits of plain steps."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.memory.test_pack_steps import MICROBATCHES, NETS, Training
from tfnb.errors import Cancelled, DataLoss, ResourceExhausted
from tfnb.execution.copy_lanes import CopyLanes, finished
from tfnb.execution.pack_step import PackStep
from tfnb.execution.running import Running
from tfnb.execution.virtual_device import RegionCopy
from tfnb.graph import Variable, mapped_files
from tfnb.graph.mapped_files import region_of
from tfnb.memory.moves import MoveKind, Schedule
from tfnb.memory.pack_tasks import DeviceItem, PackTask, Role

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mappings are replaced in place on Linux")
ROOT = Path(__file__).parent.parent.parent
WEIGHTS = 100_835_328  # bytes, of 12 layers of 512 in float32
ROOM, BUDGET = 120_000_000, 60_000_000


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small nets in float64 whose tensors are large enough for a file."""
    monkeypatch.setattr(mapped_files, "LEAST", 64)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mapped(net: str = "batch norm", rows: int = 16) -> Training:
    with tfnb.mapped_memory():
        made = Training(net, rows)
    assert sum(region_of(v.storage) is not None for v in made.graph.variables) >= 3
    return made


def tight(made: Training) -> tfnb.Session:
    """A session with a quarter of the bytes of weights and state, or what the largest task needs."""
    step = PackStep(made.programs(), (2,) * MICROBATCHES)
    budget = max(step.state_bytes // 4, *map(step.need, step.tasks))
    return tfnb.Session(made.graph, compile="off", memory_budget=budget)


def values(made: Training) -> list[torch.Tensor]:
    return [variable.value().clone() for variable in made.graph.variables]


# -- values and counters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "net", [net if at < 3 else pytest.param(net, marks=pytest.mark.slow) for at, net in enumerate(NETS)]
)
def test_values_are_those_without_a_budget_and_moves_those_of_the_virtual_device(net: str) -> None:
    plain, virtual, made = Training(net), Training(net), mapped(net)
    want = plain.trained(tfnb.Session(plain.graph, compile="off"), 3)
    sessions = [tight(virtual), tight(made)]
    assert all(map(torch.equal, virtual.trained(sessions[0], 3), want))
    assert all(map(torch.equal, made.trained(sessions[1], 3), want))
    found = [plan for session in sessions for _, plan in session.plans()]
    moves = [[(act, at) for act, _, at in plan.schedule.moves] for plan in found]
    assert moves[0] == moves[1] and found[0].schedule.bytes == found[1].schedule.bytes
    for plan in found:
        assert plan.last.loaded + plan.last.stored == plan.schedule.moved and plan.last.most <= plan.schedule.most
    assert "in files of" in sessions[1].status()[0] and "on the host" in sessions[0].status()[0]
    assert all(
        torch.equal(one, other) for one, other in zip(plain.net.parameters(), made.net.parameters(), strict=True)
    )


def test_gradients_and_border_values_go_to_the_file_and_their_ranges_come_back() -> None:
    """Without grouping they are evicted; the file grows no more after the first step."""
    made = mapped("transformer")
    step = PackStep(made.programs(), (2,) * MICROBATCHES, grouped=False, just_in_time=False)
    plan = step.planned(max(step.state_bytes // 4, *map(step.need, step.tasks)))
    assert plan.of(Role.GRADIENT) and plan.of(Role.BORDER)
    feeds = {made.x.value: made.rows, made.y.value: made.labels}
    file, sizes = region_of(made.net.h[0].up.weight).file, []
    for _ in range(3):
        step.compute(feeds, {v: v.storage for v in step.of.variables}, plan, plan.most)
        sizes.append(os.fstat(file.descriptor).st_size)
    assert sizes[0] == sizes[1] == sizes[2]


def test_fit_validates_in_packs_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    found = []
    for is_mapped in (False, True):
        made = mapped("dense", 22) if is_mapped else Training("dense", 22)
        data = {made.x: made.rows, made.y: made.labels}
        budget, folder = "100KB" if is_mapped else None, tmp_path / str(is_mapped)
        options: dict[str, Any] = {"batch_size": 16, "microbatches": 4, "memory_budget": budget, "exact": False}
        options |= {"watch": {"loss": made.loss}, "validation": data, "checkpoint": folder}
        history = tfnb.fit(made.train, data, epochs=1, **options).history
        half = values(made)
        tfnb.fit(made.train, data, epochs=1, batch_size=16, microbatches=4, memory_budget=budget, exact=False)
        session = tfnb.session.default_session(made.graph)
        session.restore(tfnb.state.checkpoint_folder.newest(folder))
        assert all(map(torch.equal, half, values(made)))
        found.append(([*half], history[0]["loss"], history[0]["val_loss"]))
    assert all(map(torch.equal, found[0][0], found[1][0])) and found[0][1] == found[1][1]
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-12)


def test_a_training_that_is_too_large_to_be_looked_at_is_told() -> None:
    made = mapped("dense")
    with pytest.warns(UserWarning, match="was not looked at: this process has not the memory"):
        tfnb.fit(
            made.train, {made.x: made.rows, made.y: made.labels}, batch_size=16, microbatches=4, memory_budget="100KB"
        )


def first_ahead(plan: Schedule, step: PackStep) -> tuple[DeviceItem, PackTask]:
    """A Variable that is loaded before a task that does not read it, and that task."""
    for at, move in enumerate(plan.moves):
        if move.act is MoveKind.IN and move.item is not None and isinstance(move.item.key, Variable):
            task = step.tasks[next(later.task for later in plan.moves[at:] if later.act is MoveKind.RUN)]
            if move.item not in task.reads and region_of(move.item.key.storage) is not None:
                return move.item, task
    raise AssertionError("nothing is loaded ahead")


def copying() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tfnb-copies")]


def test_a_copy_in_for_a_later_task_goes_on_while_a_task_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its read ends only once that task has begun: a copy that tasks wait for would never end."""
    plain, made = Training("dense"), mapped("dense")
    step = PackStep(made.programs(), (2,) * MICROBATCHES)
    budget = 2 * step.state_bytes
    plan = step.planned(budget)
    item, before = first_ahead(plan, step)
    storages, began = {v: v.storage for v in step.of.variables}, threading.Event()
    read, compute = RegionCopy.read, step._task

    def reads(copy: RegionCopy) -> torch.Tensor:
        assert copy.like is not storages[item.key] or began.wait(60), "the task waits for the copy"  # type: ignore[index]
        return read(copy)

    def computes(task: PackTask, *given: Any) -> None:
        if task is before:
            began.set()
        compute(task, *given)

    monkeypatch.setattr(RegionCopy, "read", reads)
    step._task = computes  # type: ignore[method-assign]
    done, _ = step.compute({made.x.value: made.rows, made.y.value: made.labels}, storages, plan, budget)
    assert began.is_set() and done.loaded + done.stored == plan.moved and done.most <= plan.most and not copying()
    (want,) = plain.trained(tfnb.Session(plain.graph, compile="off"), 1)[:1]
    assert torch.equal(done.fetched[step.of.cut.state.resolved(made.loss.value)], want)


def test_a_step_keeps_its_budget_and_its_bits_however_slow_copies_out_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in wait for the room of copies out, and the device raises if one does not."""
    plain, made = Training("dense"), mapped("dense")
    step = PackStep(made.programs(), (2,) * MICROBATCHES)
    plan, feeds = step.planned(step.least), {made.x.value: made.rows, made.y.value: made.labels}
    assert any(move.act is MoveKind.ROOM for move in plan.moves)
    write = RegionCopy.write

    def slow(copy: RegionCopy, tensor: torch.Tensor) -> None:
        time.sleep(0.01)
        write(copy, tensor)

    monkeypatch.setattr(RegionCopy, "write", slow)
    done, _ = step.compute(feeds, {v: v.storage for v in step.of.variables}, plan, step.least)
    assert done.most <= plan.most <= step.least and done.loaded + done.stored == plan.moved
    (want,) = plain.trained(tfnb.Session(plain.graph, compile="off"), 1)[:1]
    assert torch.equal(done.fetched[step.of.cut.state.resolved(made.loss.value)], want)


def test_a_deadline_cuts_the_wait_for_a_copy() -> None:
    """The step that waits is stopped by another thread, while its copy goes on."""
    goes_on = threading.Event()
    with CopyLanes() as lanes:
        copy = lanes.load(lambda: torch.ones(int(goes_on.wait(60))))
        with pytest.raises(Cancelled, match="late"):
            Running().compute(lambda: finished(copy), until=(0.05, lambda _: Cancelled("late")))
        assert not copy.done()
        goes_on.set()
        assert torch.equal(finished(copy), torch.ones(1))


# -- faults -----------------------------------------------------------------------------------------------------


def _press(after: float, is_over: threading.Event) -> None:
    """Ctrl-C, and again where Python drops one that comes while a weak reference dies, which it only prints."""
    while not is_over.wait(after):
        os.kill(os.getpid(), signal.SIGINT)
        after = 2.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_a_whole_number_of_steps() -> None:
    """Ctrl-C at ten moments of steps: values are those after some step, and later steps go on from there."""
    plain, made = Training("dense"), mapped("dense")
    session, wanted = tight(made), [values(plain)]
    reference = tfnb.Session(plain.graph, compile="off").make_callable(
        [plain.train], [plain.x, plain.y], microbatches=8
    )
    call = session.make_callable([made.train], [made.x, made.y], microbatches=8)
    done = 0
    for moment in range(10):
        is_over = threading.Event()
        presser = threading.Thread(target=_press, args=(0.003 + 0.007 * moment, is_over))
        with pytest.raises(KeyboardInterrupt):
            presser.start()
            while True:
                call(made.rows, made.labels)
                done += 1
        is_over.set()
        presser.join()
        while len(wanted) <= done + 1:
            reference(plain.rows, plain.labels)
            wanted.append(values(plain))
        now = values(made)
        is_committed = [all(map(torch.equal, now, wanted[at])) for at in (done, done + 1)]
        assert any(is_committed)
        done += is_committed[1] and not is_committed[0]


def test_a_disk_that_fails_in_a_step_leaves_it_unwritten_and_the_next_one_goes_on() -> None:
    plain, made = Training("dense"), mapped("dense")
    session = tight(made)
    made.trained(session, 1)
    before, file = values(made), region_of(made.net[0][0].weight).file
    kept, file.descriptor = file.descriptor, os.open("/dev/full", os.O_RDWR)  # every write fails
    broken = file.descriptor
    try:
        with pytest.raises(ResourceExhausted, match=r"cannot write mapped memory in .*No space left"):
            made.trained(session, 1)
    finally:
        file.descriptor = kept
        os.close(broken)
    assert all(map(torch.equal, before, values(made)))
    made.trained(session, 1)
    plain.trained(tfnb.Session(plain.graph, compile="off"), 2)
    assert all(map(torch.equal, values(plain), values(made)))


def test_a_file_that_cannot_be_read_leaves_the_step_unwritten_and_no_thread() -> None:
    made = mapped("dense")
    session = tight(made)
    made.trained(session, 1)
    before, file = values(made), region_of(made.net[0][0].weight).file
    kept, file.descriptor = file.descriptor, os.open("/dev/null", os.O_RDWR)  # it ends at once
    broken = file.descriptor
    try:
        with pytest.raises(DataLoss, match=r"cannot read mapped memory in .*it ends there"):
            made.trained(session, 1)
    finally:
        file.descriptor = kept
        os.close(broken)
    assert not copying() and all(map(torch.equal, before, values(made)))
    made.trained(session, 1)


def test_a_disk_without_room_for_the_next_generation_stops_the_step_before_it_begins() -> None:
    made = mapped("dense")
    session, before = tight(made), values(made)
    file = region_of(made.net[0][0].weight).file
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(file.descriptor).st_size + 8192, hard))
    try:
        with pytest.raises(ResourceExhausted, match=r"no room for .* takes what it writes twice"):
            made.trained(session, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(map(torch.equal, before, values(made)))
    made.trained(session, 1)


def test_a_folder_that_is_removed_meanwhile_is_no_matter(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    with tfnb.mapped_memory(folder):
        made = Training("dense")
    folder.rmdir()
    made.trained(tight(made), 2)


# -- memory -----------------------------------------------------------------------------------------------------


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, "-m", "tests.memory.larger_than_memory", *arguments]
    return subprocess.run(given, capture_output=True, text=True, timeout=500, cwd=ROOT)


def told(*arguments: str) -> dict[str, Any]:
    done = process(*arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_training_of_400_mb_is_made_run_saved_and_restored_in_120(tmp_path: Path) -> None:
    """Weights, gradients, and two slots: four times the weights, and 3.4 times what the process may have.

    The limit is on its data, and all of its resident pages, those of files counted, are within it, too.
    """
    found = told("--room", str(ROOM), "--budget", str(BUDGET), "--folder", str(tmp_path), "--save", str(tmp_path / "v"))
    assert found["weights"] == WEIGHTS and 4 * WEIGHTS > 3.3 * ROOM
    assert found["most"] < ROOM and found["held"] <= BUDGET
    assert found["moved"] == found["planned"] and found["is_restored"]
    assert [file.name for file in tmp_path.iterdir()] == ["v"]


@pytest.mark.slow
def test_plain_torch_ends_in_the_same_memory() -> None:
    done = process("--how", "torch", "--room", str(ROOM))
    assert done.returncode == 1 and "can't allocate memory" in done.stderr


@pytest.mark.slow
def test_weights_and_slots_are_those_of_a_training_that_fits() -> None:
    sizes = ["--width", "256", "--dtype", "float64", "--steps", "3"]
    small = told("--room", "80e6", "--budget", "35e6", *sizes)
    plain = told("--how", "plain", *sizes)
    assert small["digest"] == plain["digest"] and small["losses"] == plain["losses"]
    assert small["most"] < 60e6 < 4 * plain["weights"] < plain["most"] + 60e6
