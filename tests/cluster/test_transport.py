"""Calls to a real task: the five outcomes, deadlines, and the waiting side. This is the contract test of the shim."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import tfnb.cluster
from tests.cluster.conftest import epoch, stop
from tfnb.cluster.wire import transport
from tfnb.cluster.wire.messages import Failure, NotSent, Ok, Peer, Refusal, Unknown, failed, raised
from tfnb.cluster.wire.transport import GiveUp, Wait, allowance, is_local, retry
from tfnb.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NonFiniteGradient,
    NotFound,
    ResourceExhausted,
    ShapeError,
    StepAborted,
    UnsupportedDtype,
)  # fmt: skip

ROOM = Path(tfnb.cluster.__file__).parent
BUSY = 60.0  # seconds that a busy machine may add to any call


@pytest.fixture
def link(connect):
    """A link and the two kinds of task behind it."""
    cluster = connect(3)
    return cluster._link, cluster._engine


def call(link, peer, method, *args, seconds=60.0, **kwargs):
    """A blocking call."""
    kwargs.setdefault("epoch", epoch())

    async def work():
        return await link.call(peer, method, *args, deadline=time.monotonic() + seconds, **kwargs)

    return link.wait(link.start(work), seconds + 1, method)


def test_the_outcomes_of_a_live_task(link):
    link, engine = link
    task, server = engine.tasks[0].peer, engine.servers[0].peer
    assert call(link, task, "ping").meta["incarnation"] == task.incarnation
    assert isinstance(call(link, server, "create", {"keys": ["a"]}, [torch.ones(3)]), Ok)
    assert call(link, server, "pull", {"keys": ["a"]}).tensors[0].tolist() == [1, 1, 1]
    assert call(link, server, "pull", {"keys": ["b"]}).tag == "NotFound"
    assert call(link, server, "stat", epoch=0).reason == "fenced"
    assert call(link, server._replace(incarnation=1), "stat").reason == "fenced"
    assert call(link, server, "__class__").reason == "protocol"
    assert call(link, task, "stat").reason == "protocol"
    assert call(link, task._replace(key="nobody"), "ping").reason == "unknown-task"


def test_large_and_odd_tensors_arrive_bitwise(link):
    link, engine = link
    server = engine.servers[0].peer
    tensors = [torch.randn(1 << 20), torch.randn(3, 4).to(torch.bfloat16), torch.ones(2, 0), torch.tensor(7)]
    tensors.append(torch.randn(5).to(torch.float8_e4m3fn))
    keys = [f"t{i}" for i in range(len(tensors))]
    assert isinstance(call(link, server, "create", {"keys": keys}, tensors), Ok)
    for got, sent in zip(call(link, server, "pull", {"keys": keys}).tensors, tensors, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got.to(torch.float64), sent.to(torch.float64))


def test_what_has_no_wire_form_fails_before_it_is_sent(link):
    link, engine = link
    with pytest.raises(UnsupportedDtype):
        call(link, engine.servers[0].peer, "create", {"keys": ["s"]}, [torch.eye(2).to_sparse()])


def test_bytes_that_are_no_message_cost_an_error_and_the_task_lives(link):
    link, engine = link
    peer = engine.tasks[0].peer

    async def nonsense():
        reply = await link.pool(peer.addr).actor_execute(
            actor=peer.key, function="handle", args=[transport.to_serialize(memoryview(b"nonsense"))], kwargs={}
        )
        return transport._outcome(reply, 1 << 20)

    assert link.wait(link.start(nonsense), 60, "nonsense").tag == "ProtocolError"
    assert isinstance(call(link, peer, "ping"), Ok)


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_c2_a_dead_address_is_not_sent_and_ends_by_its_deadline(link, seconds):
    link, _ = link
    nobody = Peer("tcp://127.0.0.1:9", "key", 1)
    begin = time.monotonic()
    assert isinstance(call(link, nobody, "ping", seconds=seconds), NotSent)
    assert time.monotonic() - begin < seconds + BUSY


def test_c4_a_suspect_address_is_not_dialled_again(link):
    link, engine = link
    nobody = Peer("tcp://127.0.0.1:9", "key", 1)
    call(link, nobody, "ping", seconds=0.2)
    begin = time.monotonic()
    assert "not dialled" in call(link, nobody, "ping", seconds=200.0).message
    assert time.monotonic() - begin < BUSY
    peer = engine.tasks[0].peer
    link.suspect.add(peer.addr)
    assert isinstance(call(link, peer, "ping"), NotSent)
    link.confirm(peer.addr)
    assert isinstance(call(link, peer, "ping"), Ok)


@pytest.mark.slow
def test_c3_a_stopped_task_is_unknown_and_answers_late_ones_to_nobody(link):
    link, engine = link
    member = engine.tasks[0]
    assert isinstance(call(link, member.peer, "ping"), Ok)
    stop(member.info["pid"])
    try:
        begin = time.monotonic()
        outcomes = [call(link, member.peer, "ping", seconds=1.5) for _ in range(2)]
        assert time.monotonic() - begin < 2 * 1.5 + BUSY
        assert isinstance(outcomes[0], Unknown)
        assert all(isinstance(outcome, Unknown | NotSent) for outcome in outcomes)
    finally:
        os.kill(member.info["pid"], signal.SIGCONT)
    link.confirm(member.peer.addr)
    assert call(link, member.peer, "ping").meta["incarnation"] == member.peer.incarnation


def test_waiting_sees_a_deadline_and_the_work_goes_on(link):
    link, _ = link
    free, done = threading.Event(), []

    async def slow():
        while not free.is_set():
            await asyncio.sleep(0.01)
        done.append(True)

    handle = link.start(slow)
    with pytest.raises(DeadlineExceeded, match=r"slow work did not end within 0\.1 s"):
        link.wait(handle, 0.1, "slow work")
    free.set()
    link.wait(handle, 60, "slow work")
    assert done == [True]


def test_waiting_sees_ctrl_c_and_the_link_stays_usable(link):
    link, engine = link
    free = threading.Event()

    async def slow():
        while not free.is_set():
            await asyncio.sleep(0.01)

    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            link.wait(link.start(slow), 60, "slow work")
    finally:
        free.set()
    assert isinstance(call(link, engine.tasks[0].peer, "ping"), Ok)


def test_an_error_in_the_work_is_raised_where_it_is_awaited(link):
    link, _ = link

    async def bad():
        raise ShapeError("no")

    with pytest.raises(ShapeError):
        link.wait(link.start(bad), 60, "bad")


# -- pure rules ------------------------------------------------------------------------------------------------


def test_retry_waits_longer_each_time_and_never_beyond_the_deadline():
    waits = [retry(Unknown(), n, 0.0, 100.0) for n in range(8)]
    assert [w.seconds for w in waits] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert retry(Unknown(), 3, 9.9, 10.0) == GiveUp()
    assert isinstance(retry(Unknown(), 0, 0.0, 1.0, 0.0), Wait)
    for final in (Ok(), Failure("Internal", ""), Refusal("fenced")):
        assert retry(final, 0, 0.0, 9.0) == GiveUp()


def test_allowance_grows_with_bytes_and_with_what_was_seen():
    assert allowance("pull", 0) < allowance("pull", 10**10)
    assert allowance("pull", 0, [0.1] * 50 + [9.0]) >= allowance("pull", 0, [0.1] * 50)
    assert allowance("ping", 0, [4.0] * 100) == 16.0


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:8786", True), ("127.0.0.1:8786", True), ("tcp://localhost:1", True), ("tcp://[::1]:1", True),
        ("inproc://x/1", True), ("tcp://192.0.2.7:8786", False), ("ws://192.0.2.7:8786", False),
        ("tcp://0.0.0.0:1", False), ("tcp://no.such.host.invalid:1", False),
    ],
)  # fmt: skip
def test_c67_local_is_decided_on_the_resolved_address(address, local):
    assert is_local(address) is local


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ShapeError("a", node="mm", cell="In[3]", line=2, inputs=("f32[2]",)), ShapeError),
        (NonFiniteGradient("a"), NonFiniteGradient), (ValueError("a"), InvalidArgument), (KeyError("a"), NotFound),
        (MemoryError("a"), ResourceExhausted), (SystemExit("a"), StepAborted), (OSError("a"), tfnb.errors.Internal),
    ],
)  # fmt: skip
def test_errors_cross_a_process_as_data(error, kind):
    back = raised(failed(error, "task:0"))
    assert type(back) is kind and "a" in back.message and back.task == "task:0"
    if kind is ShapeError:
        assert (back.node, back.cell, back.line, back.inputs) == ("mm", "In[3]", 2, ("f32[2]",))


def test_c1_only_the_transport_touches_connections_and_nobody_waits_without_end():
    """No actor handle is called, no future is awaited without a time-out; no socket or submit elsewhere."""
    for path in ROOM.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert not {"mmap", "memfd_create", "multiprocessing.shared_memory"} & set(
            re.findall(r"[\w.]+", path.read_text())
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
                lanes = (
                    "transport.py",
                    "streams.py",
                    "serving.py",
                    "encryption.py",
                    "posting.py",
                    "exchange.py",
                    "waiting_reads.py",
                )
                if path.name not in lanes:
                    assert not names & {"socket", "socketserver", "distributed.comm", "distributed.core", "send_recv"}
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            where, method = f"{path.name}:{node.lineno}", node.func.attr
            submits = path.name in (
                "deploy.py",
                "collections.py",  # to the workers that hold a chunk
                "reading.py",
                "objects.py",
                "queues_there.py",
                "journal.py",
            )  # the last three: to queues
            assert method != "submit" or submits, where
            assert method != "actor_execute", where
            if method == "get":
                continue  # of a dictionary, or of the engine's own queues
            if method == "result" and not node.args and not node.keywords:
                target = ast.unparse(node.func.value)
                assert target in ("task", "asked", "step", "held", "write", "forming", "handle.task[0]"), (
                    f"{where}: asyncio tasks that are done only"
                )
