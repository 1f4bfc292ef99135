"""Direct streams between real processes: applied once whatever breaks; nothing that anybody sends harms a server."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from distributed import Security

import tfnb
from tests.cluster.conftest import epoch, stop, worker_processes, workers
from tests.cluster.test_cuts import Counters
from tfnb.cluster.wire import envelope, streams
from tfnb.cluster.wire.encryption import encryption
from tfnb.cluster.wire.messages import Ask, NotSent, Ok, Unknown
from tfnb.cluster.wire.streams import Stream, StreamBroken, StreamOffer, Streams, framed
from tfnb.cluster.wire.transport import write_request

ROWS = torch.ones(400)
SECONDS = 30.0  # that a call may take on a slow machine


def call(link, peer, method, *args, **kwargs):
    """A blocking call by Dask's connections."""

    async def work():
        return await link.call(peer, method, *args, epoch=epoch(), deadline=time.monotonic() + SECONDS, **kwargs)

    return link.wait(link.start(work), SECONDS + 5, method)


class Server:
    """A server with a variable, and who asks it."""

    def __init__(self, cluster):
        self.link, self.member = cluster._link, cluster._engine.servers[0]
        self.peer = self.member.peer
        made = call(self.link, self.peer, "create", {"keys": ["v"]}, [torch.zeros(100_000)])
        assert isinstance(made, Ok) and self.value() == 0.0

    def ask(self, method, *args, **kwargs):
        return call(self.link, self.peer, method, *args, **kwargs)

    def offer(self):
        meta = self.ask("stream").meta
        return StreamOffer(meta["host"], meta["port"], bytes.fromhex(meta["name"]), bytes.fromhex(meta["key"]))

    def stream(self):
        return Stream.connect(self.offer(), envelope.BUDGET)

    def message(self, value, op, method="push", **about):
        tensors = [torch.full((100_000,), value)] if method == "push" else []
        return write_request(
            self.peer,
            method,
            {"keys": ["v"], **about},
            tensors,
            epoch=epoch(),
            op=op,
            seconds=SECONDS,
            budget=envelope.BUDGET,
        )

    def push(self, value, op):
        """The same push, by Dask's connections."""
        return self.ask("push", {"keys": ["v"]}, [torch.full((100_000,), value)], op=op)

    def applied(self):
        return self.ask("stat").meta["applied"]

    def value(self):
        (value,) = self.ask("pull", {"keys": ["v"]}).tensors
        assert bool((value == value[0]).all()), "torn"
        return float(value[0])


@pytest.fixture(autouse=True)
def patient(monkeypatch, dask):
    """Machines are slow."""
    monkeypatch.setattr(streams, "CONNECT", SECONDS)
    workers(dask, 4)
    dask.run(setattr, streams, "CONNECT", SECONDS)
    yield
    workers(dask, 4)
    dask.run(setattr, streams, "CONNECT", 0.5)


@pytest.fixture
def server(connect):
    return Server(connect(3))


def soon(is_so, what):
    """It happens on its own, in another process."""
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def exchanged(stream, message, seconds=SECONDS):
    until = time.monotonic() + seconds
    return stream.send(message, until) or stream.receive(until)


def test_a_push_and_a_pull_by_a_stream(server):
    stream, before = server.stream(), server.applied()
    for value in (1.0, 2.0):
        op = server.link.op()
        assert isinstance(exchanged(stream, server.message(value, op)), Ok)
        again = exchanged(stream, server.message(value, op))
        assert again.dup, "the same identity is applied once"
        pulled = exchanged(stream, server.message(0, server.link.op(), "pull"))
        assert torch.equal(pulled.tensors[0], torch.full((100_000,), value))
        pulled.tensors[0].add_(1.0)  # it is the caller's own
    assert server.applied() == before + 2 and server.value() == 2.0
    assert exchanged(stream, server.message(0, server.link.op(), "stat")).reason == "protocol"
    stream.end()
    assert isinstance(stream.send(server.message(3.0, server.link.op()), time.monotonic() + 1), NotSent)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 0.9999, 1.0], ids=str)
def test_a_connection_that_breaks_in_the_middle_of_a_push_applies_it_once(server, share):
    stream, before, op = server.stream(), server.applied(), server.link.op()
    whole = b"".join(framed(server.message(5.0, op)))
    stream._socket.sendall(whole[: int(share * len(whole))])
    stream._socket.close()  # before the answer
    assert isinstance(server.push(5.0, op), Ok)
    soon(lambda: server.value() == 5.0, "applied")
    assert server.applied() == before + 1
    assert server.push(5.0, op).dup


@pytest.mark.parametrize("what", ["key", "name", "garbage", "twice", "silence"])
def test_only_who_has_a_fresh_key_is_heard(server, what):
    offer = server.offer()
    if what == "twice":
        Stream.connect(offer, envelope.BUDGET).end()
    if what in ("key", "twice"):
        wrong = offer if what == "twice" else offer._replace(key=secrets.token_bytes(32))
        with pytest.raises((StreamBroken, OSError)):
            Stream.connect(wrong, envelope.BUDGET)
    elif what == "name":
        with pytest.raises((StreamBroken, OSError)):
            Stream.connect(offer._replace(name=secrets.token_bytes(8)), envelope.BUDGET)
    else:
        with socket.create_connection((offer.host, offer.port), timeout=SECONDS) as sock:
            assert len(sock.recv(100)) == 40
            if what == "garbage":
                sock.sendall(secrets.token_bytes(4096))
            with suppress(ConnectionResetError):
                assert sock.recv(100) == b"", "closed, and nothing said"
    assert isinstance(exchanged(server.stream(), server.message(1.0, server.link.op())), Ok), "the server goes on"


PREFIX = struct.Struct("<8sQQ")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        PREFIX.pack(streams._MAGIC, 1 << 60, 0),
        PREFIX.pack(streams._MAGIC, 100, 1 << 40),
        PREFIX.pack(streams._MAGIC, 100, 1) + struct.pack("<Q", (1 << 64) - 1),
        PREFIX.pack(streams._MAGIC, 100, 2) + struct.pack("<QQ", envelope.BUDGET, envelope.BUDGET),
        PREFIX.pack(streams._MAGIC, envelope.FACTS_CAP + 1, 0),
        PREFIX.pack(streams._MAGIC, 100, 1) + struct.pack("<Q", envelope.FACTS_CAP + 1_000_000),
    ],
    ids=["http", "envelope", "frames", "length", "budget", "facts", "more than a push"],
)
def test_sizes_beyond_the_limits_close_the_stream_and_take_no_memory(server, sent, dask):
    stream = server.stream()
    before = memory_of(dask, server)
    stream._socket.sendall(sent)
    stream._socket.settimeout(SECONDS)
    with suppress(ConnectionResetError):
        assert stream._socket.recv(1) == b""
    stream.end()
    assert memory_of(dask, server) < before + (64 << 20)
    assert server.value() == 0.0, "the server goes on"


def test_an_announced_message_takes_memory_as_its_bytes_come(server, dask):
    stream = server.stream()
    before = memory_of(dask, server)
    stream._socket.sendall(PREFIX.pack(streams._MAGIC, envelope.FACTS_CAP, 0) + bytes(1 << 20))
    begin = time.monotonic()
    assert server.value() == 0.0 and time.monotonic() - begin < 1.0 + SECONDS / 10, "nobody waits for it"
    assert memory_of(dask, server) < before + (16 << 20)
    stream.end()


def is_open(offer):
    """Whether a server listens there."""
    with suppress(ConnectionError), socket.create_connection((offer.host, offer.port), timeout=SECONDS):
        return True
    return False


def test_a_port_is_open_only_while_a_key_may_be_used(server):
    offer = server.offer()
    assert is_open(offer)
    stream = Stream.connect(offer, envelope.BUDGET)
    soon(lambda: not is_open(offer), "the only key was used")
    for turn in range(2):
        assert isinstance(exchanged(stream, server.message(float(turn), server.link.op())), Ok)
        offer = server.offer()  # each opens a port again
        Stream.connect(offer, envelope.BUDGET).end()
        soon(lambda offer=offer: not is_open(offer), "the only key was used")
    lapsed = server.offer()
    assert is_open(lapsed)
    soon(lambda: not is_open(lapsed), "its ten seconds are over")
    stream.end()


def test_silent_connections_keep_nobody_away(server):
    offers = [server.offer() for _ in range(4)]
    silent = [socket.create_connection(offers[0][:2], timeout=SECONDS) for _ in range(80)]
    try:
        for offer in offers:
            stream = Stream.connect(offer, envelope.BUDGET)
            assert isinstance(exchanged(stream, server.message(1.0, server.link.op())), Ok)
            stream.end()
            silent += [socket.create_connection(offers[0][:2], timeout=SECONDS) for _ in range(20)]
    finally:
        for sock in silent:
            sock.close()


def memory_of(dask, server):
    def resident():
        import psutil

        return psutil.Process().memory_info().rss

    return dask.run(resident, workers=[server.peer.addr])[server.peer.addr]


def test_bytes_that_are_no_request_are_answered_and_the_stream_goes_on(server):
    stream = server.stream()
    for junk in (b"", b"TFN1", secrets.token_bytes(300)):
        answer = exchanged(stream, [junk or b"\0", secrets.token_bytes(100)])
        assert answer.tag == "ProtocolError"
    assert isinstance(exchanged(stream, server.message(1.0, server.link.op())), Ok)
    stream.end()


def test_a_stopped_server_is_unknown_by_the_deadline_and_applies_once(server):
    stream, before, op = server.stream(), server.applied(), server.link.op()
    pid = server.member.info["pid"]
    stop(pid)
    try:
        begin = time.monotonic()
        end = exchanged(stream, server.message(7.0, op), seconds=1.0)
        assert isinstance(end, Unknown | NotSent) and time.monotonic() - begin < 1.0 + 10.0
        assert stream.is_over
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(server.push(7.0, op), Ok)
    assert server.value() == 7.0 and server.applied() == before + 1


@pytest.mark.filterwarnings("ignore:closed without the last values")  # of the server that is killed
def test_a_killed_server_ends_the_call_at_once_and_another_thread_can(server, dask):
    for how in ("end", "kill"):
        stream = server.stream()
        if how == "end":
            striker = threading.Timer(0.3, stream.end)
        else:
            striker = threading.Timer(0.3, os.kill, (server.member.info["pid"], signal.SIGKILL))
        striker.start()
        begin = time.monotonic()
        end = exchanged(stream, server.message(0, server.link.op(), "pull", step=1 << 40))  # it would wait
        striker.join()
        assert isinstance(end, NotSent) or (isinstance(end, Unknown) and end.lost)
        assert time.monotonic() - begin < SECONDS
        assert stream.is_over
    workers(dask, 4)


def test_a_caller_that_does_not_read_stands_in_nobodys_way(server):
    slow, quick = server.stream(), server.stream()
    for _ in range(200):  # no answer is read: a second request before the first answer closes the stream
        try:
            slow._socket.sendall(b"".join(framed(server.message(0, server.link.op(), "pull"))))
        except OSError:
            break
    for value in (1.0, 2.0, 3.0):
        assert isinstance(exchanged(quick, server.message(value, server.link.op())), Ok)
    assert server.value() == 3.0
    slow.end(), quick.end()


def test_several_servers_at_once_and_those_without_a_stream_are_not_asked(connect):
    cluster = connect(2)
    link, peers = cluster._link, [member.peer for member in cluster._engine.servers[:2]]
    here = Streams(link, Security())
    for peer in peers:
        assert isinstance(call(link, peer, "create", {"keys": ["w"]}, [torch.ones(3)]), Ok)
    asks = {peer: [Ask(shard, "pull", {"keys": ["w"]})] for shard, peer in enumerate(peers)}
    assert all(isinstance(end, NotSent) for (end,) in here.call(asks, epoch=epoch()))
    assert here.lacks(peers) == peers

    async def opened():
        await here.open(peers[0], epoch=epoch())

    link.wait(link.start(opened), SECONDS, "stream")
    assert here.lacks(peers) == peers[1:]
    (first,), (second,) = here.call(asks, epoch=epoch())
    assert isinstance(first, Ok) and first.tensors[0].tolist() == [1, 1, 1] and isinstance(second, NotSent)
    about = {"training": "t", "shards": [0]}
    contributions = {
        peer: [Ask(shard, "contribute", {"round": 1, "worker": 0, "place": 0, "places": 2, "parts": 2, **about})]
        for shard, peer in enumerate(peers)
    }
    ends = here.call(contributions, epoch=epoch())
    assert all(isinstance(end, NotSent) for (end,) in ends), "it would wait for one that is not sent"
    assert isinstance(call(link, peers[0], "open_training", {"training": "t"}), Ok)
    alone = {peers[0]: [Ask(0, "contribute", {**contributions[peers[0]][0].meta, "keys": ["w"]}, [torch.ones(3)])]}
    begin = time.monotonic()
    ((end,),) = here.call(alone, epoch=epoch(), is_thread_wanted=lambda: True)
    assert isinstance(end, Unknown) and time.monotonic() - begin < 8, "it gives way to what worker 1 may wait for"
    here.end()
    assert all(isinstance(end, NotSent) for (end,) in here.call(asks, epoch=epoch()))


# -- trainings --------------------------------------------------------------------------------------------------


def break_streams():
    """On a worker: break what is open of direct streams, as a network does; how many were."""
    broken = 0
    for sock in list(streams._open):
        with suppress(OSError):
            if sock.family == socket.AF_UNIX:
                continue  # it wakes the thread of a server
            sock.getpeername()  # fails for what is closed, or listens
            sock.shutdown(socket.SHUT_RDWR)
            broken += 1
    return broken


def collect():
    """On a worker: drop the tasks of earlier tests."""
    gc.collect()


def switch(is_on):
    streams.is_on = is_on


OPTIONS = [
    pytest.param({"mode": "sync"}, id="sync"),
    pytest.param({"mode": "async"}, id="async"),
    pytest.param({"mode": "sync", "backup": 1}, id="backup", marks=pytest.mark.slow),
    pytest.param({"mode": "bounded", "staleness": 2}, id="bounded", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_streams_that_break_while_a_fit_trains_cost_and_double_no_step(connect, dask, options, monkeypatch):
    c = Counters()
    cluster = connect(2)
    dask.run(setattr, streams, "AGAIN", 0.05)
    tasks = [member.peer.addr for member in cluster._engine.tasks]
    broken, is_over = [], threading.Event()

    def strike():
        while not is_over.wait(0.1):
            broken.append(sum(dask.run(break_streams, workers=tasks).values()))

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        done = tfnb.fit(c.train, {c.x: ROWS}, steps=200, batch_size=4, **options)
    finally:
        is_over.set()
        striker.join()
        dask.run(setattr, streams, "AGAIN", 5.0)
    assert sum(broken) > 0, "streams were in use"
    assert done.steps == 200 and cluster.step == 200
    assert c.counts() == [200.0, 200.0]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_fit_is_the_same_with_streams_and_without_them(connect, problem, dask, mode):
    p = problem()
    x, y = p.feeds
    connect(1)
    dask.run(collect)
    found = []
    for is_on in (True, False):
        p.reset()
        dask.run(switch, is_on)
        try:
            tfnb.fit(p.train, {x: p.data, y: p.labels}, epochs=3, batch_size=13, seed=3, mode=mode)
        finally:
            used = sum(dask.run(break_streams).values())
            dask.run(switch, True)
        found.append(p.values())
        assert (used > 0) is is_on
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def left_on_a_worker():
    """Threads of servers, and ports that are listened on, beside those of Dask."""
    import psutil

    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.name == "tfnb-server"]
    ports = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return len(threads), len(ports)


def test_closing_leaves_no_thread_and_no_socket(connect, dask):
    soon(lambda: not any(threads for threads, _ in dask.run(left_on_a_worker).values()), "those of earlier tests end")
    before = {addr: ports for addr, (_, ports) in dask.run(left_on_a_worker).items()}
    c = Counters()
    cluster = connect(2)
    tfnb.fit(c.train, {c.x: ROWS}, steps=20, batch_size=4)
    assert any(ports > before[addr] for addr, (_, ports) in dask.run(left_on_a_worker).items())
    cluster.close()
    soon(
        lambda: all(left == (0, before[addr]) for addr, left in dask.run(left_on_a_worker).items()),
        "threads and ports are gone with the tasks",
    )
    assert sum(dask.run(break_streams).values()) == 0


@pytest.mark.slow
def test_a_forked_child_holds_nothing_open():
    script = """
import os, socket
from tfnb.cluster.wire.streams import kept
here, there = map(kept, socket.socketpair())
pid = os.fork()
if not pid:
    assert here.fileno() == there.fileno() == -1
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
here.send(b"still ours")
print(there.recv(100).decode())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "still ours" in ended.stdout, ended.stderr


# -- encrypted clusters -----------------------------------------------------------------------------------------------


@pytest.fixture
def encrypted():
    """A cluster whose connections need certificates, and its Client."""
    pytest.importorskip("cryptography", reason="Security.temporary() makes certificates with it")
    security = Security.temporary()
    with worker_processes(3, protocol="tls://", security=security) as client:
        yield client, security


@pytest.mark.slow
def test_c68_streams_of_an_encrypted_cluster_are_encrypted(encrypted, problem):
    client, security = encrypted
    client.run(setattr, streams, "CONNECT", SECONDS)
    with tfnb.connect(client, ps=1, timeout=180) as cluster:
        server = Server(cluster)
        offer = server.offer()
        context = encryption(server.peer.addr, security, listens=False)
        stream = Stream.connect(offer, envelope.BUDGET, context)
        assert stream._socket.version().startswith("TLS")
        for value, share in ((1.0, False), (2.0, True)):
            assert not share or stream.share(server.peer, server.link.op())
            assert isinstance(exchanged(stream, server.message(value, server.link.op())), Ok)
            pulled = exchanged(stream, server.message(0, server.link.op(), "pull"))
            assert torch.equal(pulled.tensors[0], torch.full((100_000,), value))
        stream.end()
        with pytest.raises((OSError, StreamBroken)):  # plain bytes are no handshake
            Stream.connect(server.offer(), envelope.BUDGET)
        stranger = encryption(server.peer.addr, Security.temporary(), listens=False)
        with pytest.raises((OSError, StreamBroken)):  # a certificate that this cluster does not know
            Stream.connect(server.offer(), envelope.BUDGET, stranger)
        last = Stream.connect(server.offer(), envelope.BUDGET, context)
        assert isinstance(exchanged(last, server.message(3.0, server.link.op())), Ok), "the server goes on"
        last.end()
        p = problem(hidden=3000)
        x, y = p.feeds
        for mode in ("sync", "async"):
            found = []
            for is_on in (True, False):
                p.reset()
                client.run(switch, is_on)
                tfnb.fit(p.train, {x: p.data, y: p.labels}, epochs=2, batch_size=13, seed=3, mode=mode)
                used = sum(client.run(break_streams).values())
                assert (used > 0) is is_on
                found.append(p.values())
            client.run(switch, True)
            if mode == "sync":
                assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
