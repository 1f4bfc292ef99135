"""Attacks on the port of a parameter server, before and after a proof of the key, and a server to attack.

``python -m tests.cluster.alone.port_attacks`` is the server in a process of its own, without Dask: each line that it
reads asks for a key or for its facts, and is answered by a line of JSON.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import psutil
import torch

import tfnb
from tests.cluster.alone.test_wire import in_envelope
from tests.mutations import changed, torn, written
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.cores import Cores
from tfnb.cluster.server.serving import Serving
from tfnb.cluster.tasks.programs import Plan, ShardProgram, place
from tfnb.cluster.wire import envelope, streams
from tfnb.cluster.wire.messages import Ok, OpId, Peer, Request
from tfnb.cluster.wire.streams import Stream, StreamBroken, StreamOffer, framed
from tfnb.cluster.wire.transport import write_request
from tfnb.passes import step_graph
from tfnb.placement.partition import split
from tfnb.placement.placement import Piece
from tfnb.state.shared_memory import Segment
from tfnb.state.store import Store

ADDRESS, EPOCH, INCARNATION = "tcp://127.0.0.1:0", 1, 7
SIZE, ROWS = 25_000, 100  # numbers of w, more than travel beside a header; rows of a table
SECONDS = 20.0  # that an honest call may take on a slow machine
PATIENCE = 0.02  # seconds that an attack waits for an answer
OPEN = 60  # connections that attackers leave open


# -- the server -------------------------------------------------------------------------------------------------------


class Log(logging.Handler):
    """Collects logged warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(self.format(record))


def plan(name: str, value: torch.Tensor, sample: torch.Tensor, loss: Callable[[Any, Any], Any]) -> Plan:
    """The server's plan of a gradient descent step on one Variable, with gradients pushed by tasks."""
    variable = tfnb.Variable(value, name=name)
    with tfnb.record(f"port_{name}") as graph:
        x = tfnb.placeholder(sample, name="x")
        train = tfnb.train.SGD(1.0).minimize(loss(variable, x))
    step = step_graph(graph, [train.value], [x.value])
    return place(split(step, {variable.key: (Piece(0, name),)}, parallel=True)).servers[0]


class Server:
    """A server in this process: two Variables, plans that apply dense and row-sparse gradients, and a training."""

    def __init__(self) -> None:
        self._log, self._process, cores = Log(), psutil.Process(), Cores()
        logging.getLogger().addHandler(self._log)
        store = Store(budget=64 << 20, is_shared=True)
        self._core = Core(store, ShardProgram, epoch=EPOCH, incarnation=INCARNATION)
        cores.add(self._core)
        self._serving = Serving(cores, lambda sends: None)
        w, table = torch.zeros(SIZE), torch.zeros(ROWS, 3)
        self._ask("create", [w, table], keys=["w", "table"])
        for name, made in {
            "descend": plan("w", w, torch.ones(2, SIZE), lambda w, x: (x * w).sum()),
            "look up": plan("table", table, torch.tensor([1, 2]), lambda table, rows: table[rows].sum()),
        }.items():
            self._ask("register_shard", made.tensors, **{**made.meta, "plan": name})
        self._ask("open_training", training="t")
        self._ask("enter", training="t", loop="0", clock=0)

    def _ask(self, method: str, tensors: Sequence[torch.Tensor] = (), **meta: Any) -> None:
        """Ask as the notebook does."""
        answers: SimpleQueue[Any] = SimpleQueue()
        request = Request(method, OpId(f"notebook {method}", next(_numbers)), EPOCH, INCARNATION, meta, tensors)
        self._serving.ask(request, answers.put)
        answer = answers.get(timeout=SECONDS)
        assert isinstance(answer, Ok), answer

    def offer(self) -> StreamOffer:
        """A fresh key."""
        return self._serving.offer(ADDRESS, streams.Security())

    def facts(self) -> dict[str, Any]:
        """The state of the server: bytes of memory, open files, threads, log, and the reason if poisoned."""
        return {
            "bytes": self._process.memory_info().rss, "files": self._process.num_fds(), "log": self._log.told,
            "threads": sorted(each.name for each in threading.enumerate()), "poisoned": self._core.poisoned,
        }  # fmt: skip

    def close(self) -> None:
        """End the server."""
        self._serving.close()
        logging.getLogger().removeHandler(self._log)


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.cluster.alone.port_attacks"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _answer(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def offer(self) -> StreamOffer:
        """A fresh key."""
        found = self._answer("offer")
        return StreamOffer(found["host"], found["port"], bytes.fromhex(found["name"]), bytes.fromhex(found["key"]))

    def facts(self) -> dict[str, Any]:
        """The state of the server."""
        return self._answer("facts")

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=SECONDS)
        assert self._process.returncode == 0


def serve() -> None:
    """Answer the lines that come."""
    server = Server()
    for line in sys.stdin:
        if line.strip() == "offer":
            host, port, name, key = server.offer()
            found = {"host": host, "port": port, "name": name.hex(), "key": key.hex()}
        else:
            found = server.facts()
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()
    server.close()


_numbers = itertools.count()


def message(
    method: str, tensors: Sequence[torch.Tensor] = (), client: str = "attacker", **meta: Any
) -> list[envelope.Buffer]:  # fmt: skip
    """A request, with an identity of its own."""
    peer, op = Peer(ADDRESS, "server", INCARNATION), OpId(client, next(_numbers))
    return write_request(peer, method, meta, tensors, epoch=EPOCH, op=op, seconds=SECONDS, budget=envelope.BUDGET)


def honest(server: Server | ServerProcess, value: float) -> float:
    """The seconds of an honest task: to connect, push a value, apply a gradient of ones, and check the result."""
    begin = time.monotonic()
    stream = Stream.connect(server.offer(), envelope.BUDGET)
    for method, tensors, about in (
        ("push", [torch.full((SIZE,), value)], {}), ("push", [torch.ones(SIZE)], {"plan": "descend"}), ("pull", [], {}),
    ):  # fmt: skip
        until = time.monotonic() + SECONDS
        outcome = stream.send(message(method, tensors, "task", keys=["w"], **about), until) or stream.receive(until)
        assert isinstance(outcome, Ok), outcome
    stream.end()
    assert torch.equal(outcome.tensors[0], torch.full((SIZE,), value - 1.0))
    return time.monotonic() - begin


# -- the attacks ------------------------------------------------------------------------------------------------------

EXTREMES = [0, 1, 7, 63, 64, 4095, 4096, 4097, 4 * SIZE, 2**20, 2**26, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64 - 1]
OTHERS = [
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"SSH-2.0-x\r\n",
    streams._MAGIC, b"\x00" * 72, b"\xff" * 4096, b"\x80\x05\x95\x0b\x00\x00\x00\x00\x00\x00\x00",
]  # fmt: skip
TENSOR = {"dt": "f32", "shape": [SIZE], "nbytes": 4 * SIZE, "lane": "d", "ref": 0}
METAS: dict[str, dict[str, Any]] = {
    "push": {"keys": ["w"], "plan": "descend", "rows": 1, "reads": ["w"], "since": [0], "run_index": 1, "clock": 1,
             "training": "t", "loop": "0", "finite": True, "tables": {}},
    "pull": {"keys": ["w"], "since": [-1], "step": 0, "staleness": 1, "training": "t", "loop": "0", "rows_of": ["w"],
             "decided": 0, "tables": {}},
    "contribute": {"training": "t", "round": 1, "worker": 0, "place": 0, "places": 1, "parts": 1, "shards": [0],
                   "keys": ["w"], "plan": "descend", "spare": 1, "reads": ["w"], "rows": 2},
    "share": {"memory": "1.2.ab"},
    "batch": {"parts": [[0, "push", ["a", 7], {"keys": ["w"], "plan": "descend"}, 1], [0, "pull", ["a", 8], {}, 0]]},
    "assign": {"keys": ["w"]},
}  # fmt: skip


class Attacker:
    """Attacks a server in sequence, chosen by ``chance``, and leaves some connections open."""

    def __init__(self, server: Server | ServerProcess) -> None:
        self.server, self.chance = server, random.Random(0)
        self._open: deque[socket.socket] = deque()

    def attack(self, seed: int) -> str:
        """Carry out the attack of a seed; returns its name."""
        self.chance = random.Random(seed)
        name = self.chance.choice([*ATTACKS])
        with suppress(OSError, StreamBroken):  # the server closed it first
            ATTACKS[name](self)
        return name

    def end(self) -> None:
        """Leave nothing open."""
        while self._open:
            self._open.popleft().close()

    # -- what attacks are made of --

    def connection(self, offer: StreamOffer | None = None) -> socket.socket:
        """A connection that has proved nothing."""
        host, port, *_ = offer or self.server.offer()
        return self._kept(socket.create_connection((host, port), timeout=SECONDS))

    def proved(self) -> socket.socket:
        """A connection that has proved its key."""
        return self._kept(Stream.connect(self.server.offer(), envelope.BUDGET)._socket)

    def _kept(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(PATIENCE)
        self._open.append(sock)
        while len(self._open) > OPEN:
            self._open.popleft().close()
        return sock

    def claim(self, sock: socket.socket, offer: StreamOffer) -> bytes:
        """The proof of a key, in reply to the server's greeting."""
        hello = b""
        while len(hello) < 40:
            hello += sock.recv(40 - len(hello)) or b"\0" * 40
        mine = secrets.token_bytes(32)
        return offer.name + mine + streams._proof(offer.key, b"task", hello[8:40], mine)

    def request(self, method: str | None = None) -> dict[str, Any]:
        """The facts of a valid request."""
        method = method or self.chance.choice([*METAS])
        return {
            "v": envelope.VERSION, "numbers": [], "method": method, "epoch": EPOCH, "incarnation": INCARNATION,
            "client": "attacker", "seq": next(_numbers), "ms_left": 1000, "meta": METAS[method], "tensors": [TENSOR],
        }  # fmt: skip

    def push(self) -> bytes:
        """A valid push, as bytes."""
        return joined(message("push", [torch.ones(SIZE)], keys=["w"], plan="descend"))

    def say(self, sock: socket.socket, data: bytes) -> None:
        """Send, and end the connection in one of several ways."""
        match self.chance.randrange(6):
            case 0:  # in small pieces
                for piece in range(0, min(len(data), 40)):
                    sock.sendall(data[piece : piece + 1])
                sock.sendall(data[40:])
            case 1:  # the beginning only
                sock.sendall(data[: self.chance.randrange(len(data) + 1)])
            case _:
                sock.sendall(data)
        match self.chance.randrange(5):
            case 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset
                sock.close()
            case 1:
                sock.shutdown(socket.SHUT_WR)
            case 2:
                sock.close()
            case 3:
                sock.recv(1 << 20)
            case _:  # it stays open, and nothing is read
                pass


def joined(message: Sequence[envelope.Buffer]) -> bytes:
    """The bytes of a message on the wire."""
    return b"".join(framed(message))


def silence(a: Attacker) -> None:
    a.connection()


def crowd(a: Attacker) -> None:
    offer = a.server.offer()
    for _ in range(a.chance.choice((5, 20, 40))):
        a.connection(offer)


def noise(a: Attacker) -> None:
    a.say(a.connection(), a.chance.randbytes(a.chance.choice((1, 71, 72, 73, 5000, 300_000))))


def other_protocols(a: Attacker) -> None:
    a.say(a.connection(), a.chance.choice(OTHERS))


def echo(a: Attacker) -> None:
    sock = a.connection()
    a.say(sock, sock.recv(40) * 3)


def wrong_proof(a: Attacker) -> None:
    offer = a.server.offer()
    sock = a.connection(offer)
    a.say(sock, torn(a.claim(sock, offer), a.chance))


def wrong_key(a: Attacker) -> None:
    right = a.server.offer()
    offer = a.chance.choice([
        right._replace(key=secrets.token_bytes(32)), right._replace(key=b""),
        right._replace(name=secrets.token_bytes(8)), right._replace(name=right.name[::-1]),
        right._replace(key=right.key[:31] + bytes([right.key[31] ^ 1])),
    ])  # fmt: skip
    sock = a.connection(right)
    a.say(sock, a.claim(sock, offer) + a.push())


def key_used_twice(a: Attacker) -> None:
    offer = a.server.offer()
    first, second = a.connection(offer), a.connection(offer)
    claim = a.claim(first, offer)
    first.sendall(claim)
    a.say(second, a.chance.choice((claim, a.claim(second, offer))) + a.push())


def early_message(a: Attacker) -> None:
    offer = a.server.offer()
    sock = a.connection(offer)
    a.say(sock, a.claim(sock, offer) + a.push())


def lengths(a: Attacker) -> None:
    first, count = a.chance.choice(EXTREMES), a.chance.choice(EXTREMES)
    sizes = [a.chance.choice(EXTREMES) for _ in range(min(count, 4100))]
    data = streams._PREFIX.pack(streams._MAGIC, first, count) + struct.pack(f"<{len(sizes)}Q", *sizes)
    a.say(a.proved(), data + a.chance.randbytes(a.chance.choice((0, 100, 100_000))))


def wrong_magic(a: Attacker) -> None:
    a.say(a.proved(), a.chance.choice([*OTHERS, a.chance.randbytes(100)]) + bytes(24))


def torn_message(a: Attacker) -> None:
    a.say(a.proved(), torn(a.push(), a.chance))


def torn_envelope(a: Attacker) -> None:
    first, *frames = message("push", [torch.ones(SIZE), torch.ones(3)], keys=["w", "x"])
    a.say(a.proved(), joined([torn(bytes(first), a.chance), *frames]))


def changed_facts(a: Attacker) -> None:
    facts = changed(a.request(), a.chance)
    entries = facts.get("tensors") if isinstance(facts, dict) else None
    count = sum(isinstance(one, dict) and one.get("lane") == "d" for one in entries) if isinstance(entries, list) else 0
    a.say(a.proved(), joined([in_envelope(written(facts), bytes(256)), *[bytes(4 * SIZE)] * count]))


def changed_meta(a: Attacker) -> None:
    facts = a.request()
    facts["meta"] = changed(facts["meta"], a.chance)
    a.say(a.proved(), joined([in_envelope(written(facts)), bytes(4 * SIZE)]))


def changed_numbers(a: Attacker) -> None:
    facts = a.request()
    facts[a.chance.choice(("seq", "epoch", "incarnation", "ms_left", "client", "method"))] = a.chance.choice([
        -1, -(2**40), -(2**62), 2**62, 2**64, 10**400, 1.5, float("inf"), None, "", "x" * 100_000, [], {}, True,
    ])  # fmt: skip
    a.say(a.proved(), joined([in_envelope(written(facts)), bytes(4 * SIZE)]))


def inline_tensors(a: Attacker) -> None:
    nbytes = a.chance.choice((4, 64, 4096, envelope.INLINE))
    count, ends = a.chance.choice((2, 9, 900)), (0, 64, nbytes, nbytes + 64, 2**30, -64, 2**62)
    places = [a.chance.choice(ends) for _ in range(count)]
    one = {"dt": "u8", "shape": [nbytes], "nbytes": nbytes, "lane": "i"}
    facts = {**a.request("push"), "tensors": [{**one, "ref": place} for place in places]}
    a.say(a.proved(), joined([in_envelope(written(facts), bytes(2 * envelope.INLINE))]))


def many_facts(a: Attacker) -> None:
    count = a.chance.choice((1000, 100_000))
    text = a.chance.choice([
        b"[" * count, b"{" + b'"a":{' * count, b'{"x":"' + b"x" * (2 << 20) + b'"}', b'{"v":' + b"9" * count + b"}",
        written({**a.request(), "meta": {str(n): n for n in range(count // 10)}}),
        written({**a.request(), "numbers": [[True, "since", count]] * 3}),
        written({**a.request(), "tensors": [TENSOR] * (count // 100)}),
        written({**a.request(), "client": "x" * count}),
        written({**a.request("pull"), "meta": {"keys": [f"{n}" for n in range(count // 10)]}, "tensors": []}),
    ])  # fmt: skip
    a.say(a.proved(), joined([in_envelope(text, bytes(1000)), *[bytes(4 * SIZE)] * a.chance.randrange(2)]))


def wrong_lengths_of_text(a: Attacker) -> None:
    length = min(a.chance.choice(EXTREMES), 2**32 - 1)
    text = envelope.MAGIC + struct.pack("<I", length) + a.chance.randbytes(a.chance.choice((0, 99)))
    a.say(a.proved(), joined([text]))


def requests_without_reading(a: Attacker) -> None:
    sock = a.proved()
    for _ in range(a.chance.choice((2, 10, 50))):
        sock.sendall(joined(message("pull", keys=["w"])))


def waiting(a: Attacker) -> None:
    sock, client = a.proved(), f"waits{a.chance.randrange(9)}"
    about = a.chance.choice(({"step": 1 << 40}, {"step": -(1 << 40)}, {"staleness": -5, "training": "t", "loop": "0"}))
    a.say(sock, joined(message("pull", client=client, keys=["w"], **about)))


def contributions(a: Attacker) -> None:
    number = a.chance.choice((0, 1, -1, 5, 1 << 40))
    about = {**METAS["contribute"], "round": number, "worker": number, "parts": a.chance.choice((0, 1, 2, -1, 1 << 40))}
    a.say(a.proved(), joined(message("contribute", [torch.ones(SIZE)], **about)))


def wrong_tensors(a: Attacker) -> None:
    tensor = a.chance.choice([
        torch.ones(SIZE - 1), torch.ones(SIZE, dtype=torch.float64)[:9], torch.ones(1), torch.ones(()), torch.ones(0),
        torch.full((SIZE,), float("nan")), torch.ones(SIZE, dtype=torch.int32), torch.ones(1, SIZE), torch.ones(2, 1),
        torch.empty(1 << 40, device="meta"), torch.ones(SIZE, dtype=torch.bool), torch.ones(3, dtype=torch.complex64),
    ])  # fmt: skip
    plan = a.chance.choice(({}, {"plan": "descend"}, {"plan": "no such plan"}))
    a.say(a.proved(), joined(message("push", [tensor] * a.chance.choice((1, 1, 2)), keys=["w"], **plan)))


def wrong_rows(a: Attacker) -> None:
    count, ends = a.chance.choice((1, 2, 50)), (0, 1, ROWS - 1, ROWS, -1, -ROWS, 1 << 40, -(1 << 62))
    rows = torch.tensor([a.chance.choice(ends) for _ in range(count)])
    values = torch.ones(a.chance.choice((len(rows), 0, 1)), a.chance.choice((3, 3, 3, 1, 0)))
    tensors = [values, rows.to(a.chance.choice((torch.int64, torch.int64, torch.int32)))]
    a.chance.shuffle(tensors)
    a.say(a.proved(), joined(message("push", tensors, keys=["table"], plan="look up")))


def memory_that_is_not_there(a: Attacker) -> None:
    mine = Segment(4096)
    pid, file, token = mine.name.split(".")
    name = a.chance.choice([
        mine.name, f"{pid}.{file}.{token[::-1]}", f"1.0.{token}", f"{pid}.-1.{token}", f"{pid}.0.{token}", "", "...",
        "x" * 999, f"{10**30}.{file}.{token}", f"{pid}.{10**30}.{token}", "\ud800.1.ab", f"{pid}.{file}.", "1.2.\x00",
    ])  # fmt: skip
    sock = a.proved()
    sock.sendall(joined(message("share", memory=name)))
    sock.recv(4096)
    start, nbytes = a.chance.choice((0, 64, 3, 4032, 1 << 40, -64)), a.chance.choice((0, 4, 4 * SIZE, 4096, 1 << 40))
    ref = [a.chance.choice((name, mine.name)), start]
    lent = {"dt": "u8", "shape": [nbytes], "nbytes": nbytes, "lane": "s", "ref": ref}
    word = struct.pack("<q", 1)
    head = written({**a.request("push"), "tensors": [lent]})
    text = envelope.MAGIC + struct.pack("<I", len(head)) + head + word
    a.say(sock, joined([text + bytes(-len(text) % envelope.ALIGN)]))


def other_ways(a: Attacker) -> None:
    others = ("create", "drop", "end_training", "open_training", "stat", "gone", "handle", "__init__", "")
    method = a.chance.choice(others)
    a.say(a.proved(), joined(message(method, keys=["w"], training="t", clients=["task"])))


BEFORE: Iterable[Callable[[Attacker], None]] = (
    silence, crowd, noise, other_protocols, echo, wrong_proof, wrong_key, key_used_twice, early_message,
)  # fmt: skip
AFTER: Iterable[Callable[[Attacker], None]] = (
    lengths, wrong_magic, torn_message, torn_envelope, changed_facts, changed_meta, changed_numbers, inline_tensors,
    many_facts, wrong_lengths_of_text, requests_without_reading, waiting, contributions, wrong_tensors,
    wrong_rows,
    memory_that_is_not_there, other_ways,
)  # fmt: skip
ATTACKS: Mapping[str, Callable[[Attacker], None]] = {attack.__name__: attack for attack in (*BEFORE, *AFTER)}


if __name__ == "__main__":
    serve()
