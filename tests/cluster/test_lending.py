"""Lane M: what two processes of a host lend each other arrives bitwise, is never torn, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import tfnb
from tests.cluster.alone.test_wire import DTYPES
from tests.cluster.conftest import epoch, workers
from tests.cluster.test_cuts import Counters
from tests.cluster.test_streams import ROWS, SECONDS, Server, call, collect, exchanged, soon
from tfnb.cluster.wire import envelope, streams
from tfnb.cluster.wire.lending import FREE, HELD, ServerLoans, TaskLoans
from tfnb.cluster.wire.messages import Ok
from tfnb.cluster.wire.transport import write_request
from tfnb.errors import ProtocolError, UnsupportedDtype
from tfnb.state import shared_memory
from tfnb.state.shared_memory import GONE, MappedSegment, Segment, located
from tfnb.state.store import Store

COUNT = 100_000  # elements: beyond what travels beside a header


@pytest.fixture
def ends():
    task = TaskLoans()
    return task, ServerLoans(task.name)


def words(task):
    return [region.word for region in task._regions]


# -- segments ---------------------------------------------------------------------------------------------------------


def test_only_the_very_memory_that_was_meant_is_mapped():
    one = Segment(100)
    pid, file, token = one.name.split(".")
    with open(os.devnull) as null:  # noqa: PTH123 its number is needed
        for wrong in ("nonsense", f"{pid}.{null.fileno()}.{token}", f"{pid}.{file}.{'0' * 32}", f"1.{file}.{token}"):
            with pytest.raises(OSError):
                MappedSegment(wrong)
    short = os.memfd_create("tfnb", os.MFD_ALLOW_SEALING)
    for nbytes in (0, 8, shared_memory.HEADER - 1):
        os.truncate(short, nbytes)
        if nbytes == shared_memory.HEADER - 1:
            fcntl.fcntl(short, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(OSError):
            MappedSegment(f"{pid}.{short}.{token}")
    os.close(short)
    mapped = MappedSegment(one.name)
    with pytest.raises(OSError):  # its size is sealed: nobody who mapped it can lose a page
        os.truncate(f"/proc/{pid}/fd/{file}", 10)
    assert Path(f"/proc/{pid}/fd/{file}").stat().st_mode & 0o777 == 0o600
    one.flat.fill_(3)
    del one
    gc.collect()
    assert mapped.word == GONE and mapped.flat.sum() == 300, "who has it keeps it"


@pytest.mark.slow
def test_c11_memory_of_another_namespace_of_processes_is_not_found():
    one = Segment(100)
    code = f"""
from tfnb.state.shared_memory import MappedSegment
try: MappedSegment({one.name!r})
except OSError: print('not found')"""
    command = ["unshare", "-rpf", "--mount-proc", sys.executable, "-c", code]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("no unshare here: another namespace cannot be had")
    if ended.returncode and "unshare" in ended.stderr:
        pytest.skip(f"another namespace cannot be had here: {ended.stderr.strip()}")
    assert ended.stdout == "not found\n", ended.stderr


@pytest.mark.slow
def test_a_forked_child_gives_up_nothing_of_its_parent():
    script = """
import os
from tfnb.state.shared_memory import MappedSegment, Segment
one = Segment(8)
pid = os.fork()
if not pid:
    del one
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(one.word, MappedSegment(one.name).word)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "0 0\n", ended.stderr


def test_values_lie_in_shared_memory_where_there_is_some(monkeypatch):
    for is_on in (True, False):
        monkeypatch.setattr(shared_memory, "is_on", is_on)
        store = Store(is_shared=True)
        store.create({"large": torch.ones(COUNT), "small": torch.ones(3, dtype=torch.float64)})
        for _ in range(4):  # also in the other generations
            (held,) = store.read(["large"])
            assert (located(held) is not None) is is_on and located(store.get("small")) is None
            store.assign({"large": held + 1})
        assert held.eq(4).all() and store.get("large").eq(5).all()


# -- both ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_lent_bitwise_in_both_directions(ends, dtype):
    task, server = ends
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (COUNT * dtype.itemsize,), dtype=torch.uint8)
    value = bits.view(dtype).view(4, -1).t()  # strided
    tensors = [value, torch.tensor(1.0), torch.empty(0, 3), value.contiguous()]
    sent = envelope.encode({}, tensors, lend=task.lend)
    assert len(sent) == 1 and len(sent[0]) < 2048, "the values do not travel"
    _, found = envelope.decode(sent, borrow=server.borrowing())
    store = Store(is_shared=True)
    store.create({"v": found[0]})
    back = envelope.encode({}, store.read(["v"]), lend=server.lend)
    _, (copied,) = envelope.decode(back, borrow=task.borrow)
    for got, expected in ((found[0], value), (found[3], value), (copied, value)):
        assert got.dtype is dtype and got.shape == expected.shape
        assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert found[1] == 1.0 and found[2].shape == (0, 3)


def test_memory_of_older_copies_is_used_again_when_nobody_holds_them(ends):
    task, server = ends
    store = Store(is_shared=True)
    store.create({"v": torch.zeros(COUNT), "w": torch.zeros(2 * COUNT)})

    def pulled(names):
        message = envelope.encode({}, store.read(names), lend=server.lend)
        _, tensors = envelope.decode(message, borrow=task.borrow)
        task.read(), server.sent()
        return tensors

    held, places = [], set()
    for step in range(20):
        store.assign({"v": torch.full((COUNT,), float(step))})
        (value,) = pulled(["v"])
        places.add(value.data_ptr())
        if step in (3, 7):
            held.append((step, value[5:], value.numpy()[:5]))  # what is left of it are views
    del value
    assert len(places) <= 5, "two take turns; two more are held, and one has just been let go"
    assert all(view.eq(step).all() and (array == step).all() for step, view, array in held)
    for _ in range(4):
        pulled(["w"])
    assert sum(copy.flat.numel() for copy, _ in task._copies) <= 2 * 8 * COUNT, "memory that nobody needs is given up"


def test_what_cannot_travel_is_refused_before_anything_is_lent(ends):
    task, _ = ends
    for tensors in ([torch.eye(300).to_sparse(), torch.ones(COUNT)], [torch.ones(COUNT), torch.eye(300).to_sparse()]):
        with pytest.raises(UnsupportedDtype):
            envelope.encode({}, tensors, lend=task.lend)
    assert words(task) == []


def test_a_region_is_written_again_only_when_nobody_holds_a_tensor_of_it(ends):
    task, server = ends

    def send(value):
        message = envelope.encode({}, [torch.full((COUNT,), value), torch.full((COUNT,), value)], lend=task.lend)
        return envelope.decode(message, borrow=server.borrowing())[1]

    first = send(1.0)
    part = first[1][5:7]
    del first
    assert words(task) == [HELD], "a view of it is held still"
    second = send(2.0)
    assert words(task) == [HELD, HELD] and part.tolist() == [1, 1]
    del second
    assert words(task) == [HELD, FREE]
    third = send(3.0)
    assert len(words(task)) == 2 and part.tolist() == [1, 1] and third[0].eq(3).all()
    many = [send(float(n)) for n in range(10)]
    assert len(words(task)) == 4, "more than that is sent"
    assert all(tensors[0].eq(n).all() for n, tensors in enumerate(many))
    del part, third, many
    gc.collect()
    assert words(task) == [FREE] * 4


def test_a_value_that_is_written_while_it_is_copied_is_not_taken(ends):
    task, server = ends
    store = Store(is_shared=True)
    store.create({"v": torch.zeros(COUNT)})
    answer = envelope.encode({}, store.read(["v"]), lend=server.lend)
    server.sent()
    at = store.get("v").data_ptr()
    store.assign({"v": torch.ones(COUNT)})  # it is lent: another generation
    assert store.get("v").data_ptr() != at and not server.has_let_go()
    _, (seen,) = envelope.decode(answer, borrow=task.borrow)
    assert seen.eq(0).all()
    task.read()
    assert server.has_let_go(), "and now it may be written again"
    answer = envelope.encode({}, store.read(["v"]), lend=server.lend)
    server.sent()
    server._lent = []  # given up: a task that stood still for too long
    store.assign({"v": torch.full((COUNT,), 2.0)})
    with pytest.raises(OSError, match="written while"):
        envelope.decode(answer, borrow=task.borrow)


@pytest.mark.parametrize("loan", [("x", 0, 0), ("x", -64, 0), (1, 0, 0), ("x", None, 0), ("x", 1 << 70, 0)], ids=str)
def test_loans_that_make_no_sense_cost_an_error(ends, loan):
    task, server = ends
    message = envelope.encode({}, [torch.ones(COUNT)], lend=lambda large: {0: loan})
    with pytest.raises((ProtocolError, OSError)):
        envelope.decode(message, borrow=server.borrowing())
    with pytest.raises(ProtocolError):
        envelope.decode(message)  # who shares no memory
    for start in (1, 64, 1 << 40):
        name = task.lend({0: torch.ones(COUNT)})[0][0]
        message = envelope.encode({}, [torch.ones(COUNT)], lend=lambda large, at=start, of=name: {0: (of, at, 1)})
        with pytest.raises(ProtocolError, match="are lent"):
            envelope.decode(message, borrow=server.borrowing())


# -- real processes ---------------------------------------------------------------------------------------------------


def switch(is_on):
    shared_memory.is_on = is_on


def mapped():
    """On a worker: how many segments it has mapped, of itself and of others."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:tfnb ")


@pytest.fixture
def only(dask):
    """``only(lane)``: M, S or D in all processes."""

    def set_lane(lane):
        dask.run(setattr, streams, "is_on", lane != "D")
        dask.run(switch, lane == "M")

    yield set_lane
    workers(dask, 4)
    set_lane("M")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_fit_is_bitwise_the_same_on_every_lane_and_no_segment_is_left(connect, problem, dask, only, mode):
    p = problem(hidden=3000)  # its weights have 96 kB
    x, y = p.feeds
    dask.run(collect)
    soon(lambda: sum(dask.run(mapped).values()) == 0, "those of earlier tests are gone")
    found = []
    for lane in "MSD":
        only(lane)
        cluster = connect(1)
        p.reset()
        tfnb.fit(p.train, {x: p.data, y: p.labels}, epochs=3, batch_size=13, seed=3, mode=mode)
        assert (sum(dask.run(mapped).values()) > 0) is (lane == "M")
        found.append(p.values())
        cluster.close()
        soon(lambda: sum(dask.run(mapped).values()) == 0, "nothing is left")
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


class Large(Counters):
    """The same with gradients that are lent."""

    def __init__(self):
        self.variables = [tfnb.Variable(torch.zeros(COUNT), name=f"count{i}") for i in range(2)]
        with tfnb.record("large"):
            self.x = tfnb.placeholder(torch.ones(4), name="x")
            grads = [self.x.mean().expand(COUNT) for _ in self.variables]
            self.train = tfnb.train.SGD(1.0).apply_gradients(list(zip(grads, self.variables, strict=True)))


@pytest.mark.parametrize(
    "options",
    [{"mode": "sync"}, pytest.param({"mode": "async"}, marks=pytest.mark.slow),
     pytest.param({"mode": "sync", "backup": 1}, marks=pytest.mark.slow)], ids=str,
)  # fmt: skip
def test_c12_a_task_that_is_killed_while_it_lends_costs_and_doubles_no_step(connect, dask, options):
    c = Large()
    cluster = connect(2)
    tfnb.run(c.train, {c.x: ROWS[:4]})
    victim = cluster._engine.tasks[1].info["pid"]
    killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
    killer.start()
    done = tfnb.fit(c.train, {c.x: ROWS}, steps=400, batch_size=4, **options)
    killer.join()
    assert done.steps == 400 and cluster.step == 401
    for variable in c.variables:
        assert variable.storage.eq(-401.0).all(), "whole, and each step once"
    cluster.close()
    workers(dask, 4)
    soon(lambda: sum(dask.run(mapped).values()) == 0, "nothing is left")


READS = int(os.environ.get("TFNB_READS", "80"))  # 1,000 of 100 MB take minutes on each lane


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["M", "S", "D"])
def test_c21_no_read_of_100_mb_under_writes_is_torn(connect, only, lane):
    only(lane)
    server, count = Server(connect(3)), 25_000_000
    made = server.ask("create", {"keys": ["big"]}, [torch.zeros(count)])
    assert isinstance(made, Ok)
    over, written = threading.Event(), [0]

    def asks(stream, method, *tensors):
        meta, op = {"keys": ["big"]}, server.link.op()
        if lane == "D":
            return server.ask(method, meta, list(tensors), op=op)
        about = {"epoch": epoch(), "op": op, "seconds": SECONDS, "budget": envelope.BUDGET, "lend": stream.lend}
        return exchanged(stream, write_request(server.peer, method, meta, tensors, **about))

    def opened():
        stream = server.stream() if lane != "D" else None
        assert lane != "M" or stream.share(server.peer, server.link.op())
        return stream

    def write():
        stream, value = opened(), torch.empty(count)
        while not over.is_set():
            written[0] += 1
            assert isinstance(asks(stream, "push", value.fill_(written[0])), Ok)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        stream, torn, seen = opened(), 0, set()
        for _ in range(READS):
            (value,) = asks(stream, "pull").tensors
            torn += bool(value.min() != value.max())
            seen.add(float(value[0]))
    finally:
        over.set()
        writer.join()
    assert torn == 0 and len(seen) > READS // 20, f"{torn} of {READS} torn; {len(seen)} values seen"


def test_a_server_that_cannot_map_the_tasks_memory_goes_on_by_the_socket(connect, monkeypatch):
    server = Server(connect(3))
    stream = server.stream()
    monkeypatch.setattr(TaskLoans, "name", property(lambda self: "1.1.00"))
    assert not stream.share(server.peer, server.link.op()) and stream.lend is None
    assert isinstance(exchanged(stream, server.message(2.0, server.link.op())), Ok) and server.value() == 2.0
    assert isinstance(call(server.link, server.peer, "stat"), Ok)
    stream.end()
