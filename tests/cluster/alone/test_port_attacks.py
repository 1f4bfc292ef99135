"""A server whose port is attacked goes on: it answers in time, keeps its memory, and no error is raw."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from tests.cluster.alone.port_attacks import (
    ATTACKS,
    EPOCH,
    INCARNATION,
    SECONDS,
    SIZE,
    Attacker,
    Server,
    ServerProcess,
    honest,
    message,
)  # fmt: skip
from tests.cluster.alone.test_wire import in_envelope
from tests.mutations import tries, written
from tfnb.cluster.wire import envelope, streams
from tfnb.cluster.wire.asking import parts
from tfnb.cluster.wire.messages import Failure, OpId, Outcome, Request
from tfnb.cluster.wire.streams import Stream
from tfnb.cluster.wire.transport import read_request
from tfnb.errors import ProtocolError

WAIT, ROOM = 2.0, 64 << 20  # seconds that an honest task waits at most; bytes that the server takes more at most


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines are slow."""
    monkeypatch.setattr(streams, "CONNECT", SECONDS)


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def survives(server: Server | ServerProcess, count: int) -> Counter[str]:
    """Attack a server so many times, and see that it serves a task as before; how often each attack was made."""
    for turn in range(3):
        honest(server, float(turn))
    before, attacker, done = server.facts(), Attacker(server), Counter[str]()
    for seed in range(count):
        name = attacker.attack(seed)
        done[name] += 1
        facts = server.facts()
        assert not facts["log"] and not facts["poisoned"], f"{name} of seed {seed}: {facts}"
    assert honest(server, 5.0) < WAIT, "beside connections that are open still"
    attacker.end()
    assert honest(server, 7.0) < WAIT
    after = server.facts()
    assert after["bytes"] < before["bytes"] + ROOM
    assert after["threads"] == before["threads"]
    return done


def test_a_server_goes_on_after_attacks_on_its_port(server: Server) -> None:
    survives(server, 60)


@pytest.mark.slow
def test_a_process_goes_on_after_many_attacks_on_its_port() -> None:
    with closing(ServerProcess()) as server:
        done = survives(server, tries(200) * 3 // 2)
    assert done.keys() == ATTACKS.keys()


def pushed(server: Server, *tensors: torch.Tensor, plan: str = "descend") -> Outcome:
    """The outcome of a push by a stream."""
    stream, until = Stream.connect(server.offer(), envelope.BUDGET), time.monotonic() + SECONDS
    outcome = stream.send(message("push", tensors, keys=["w"], plan=plan), until) or stream.receive(until)
    stream.end()
    return outcome


@pytest.mark.parametrize("wrong", [
    torch.ones(SIZE, dtype=torch.int32), torch.ones(1, SIZE), torch.ones(SIZE - 1), torch.ones(0), torch.ones(()),
    torch.ones(SIZE, dtype=torch.float64), torch.empty(SIZE, device="meta"),
], ids=lambda wrong: f"{wrong.dtype} {[*wrong.shape]} {wrong.device}")  # fmt: skip
def test_a_gradient_that_does_not_fit_its_plan_is_refused_and_the_server_goes_on(
    server: Server, wrong: torch.Tensor
) -> None:
    outcome = pushed(server, wrong)
    assert isinstance(outcome, Failure) and outcome.tag == "ShapeError", outcome
    assert f"takes float32[{SIZE}]" in outcome.message.replace("['", "[").replace("']", "]")
    assert honest(server, 3.0) < WAIT


WRONG = {
    "seq": [-1, -(1 << 40), 1 << 63, 1.5, math.inf, None, "1", [1]], "client": [None, 5, ["a"], "x" * 10_000],
    "ms_left": [-1, 10**400, math.inf, None, "1"], "epoch": [math.inf, "1", None], "incarnation": [math.inf, None],
    "method": [None, 1, ["push"]],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_request_has_the_types_that_are_asked_for(name: str) -> None:
    right = {
        "method": "push", "client": "a", "seq": 3, "epoch": EPOCH, "incarnation": INCARNATION, "ms_left": 9, "meta": {},
    }  # fmt: skip
    assert read_request(envelope.encode(right), envelope.BUDGET).op == ("a", 3)
    facts = {**right, "v": envelope.VERSION, "numbers": [], "tensors": []}
    for wrong in WRONG[name]:
        with pytest.raises(ProtocolError, match="not a request of tfnb"):
            read_request([in_envelope(written({**facts, name: wrong}))], envelope.BUDGET)


@pytest.mark.parametrize("seq", [-1, -(1 << 40), 1 << 63, "1"])
def test_so_has_a_part_of_a_batch(seq: object) -> None:
    meta = {"parts": [[0, "push", ["a", seq], {"keys": ["w"]}, 1]]}
    with pytest.raises(ProtocolError, match="not a batch"):
        parts(Request("batch", OpId("a", 1), EPOCH, INCARNATION, meta, [torch.ones(3)]))
