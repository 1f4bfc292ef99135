"""Queues of one server, asked as the notebook and tasks ask. No cluster, no thread, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import tfnb.cluster.server.objects
from tests.state.saved_queues import fifo
from tfnb.cluster.server.objects import FROZEN, Objects, write_queue
from tfnb.cluster.wire.messages import Ok, OpId, Request
from tfnb.errors import ResourceExhausted


class Server:
    """The queues of a server, and one channel to them."""

    def __init__(self, **how: Any) -> None:
        self.objects, self.posts, self.now, self.over = Objects(**how), 0, 0.0, set[int]()
        self.objects.is_over = lambda number: number in self.over

    def __call__(self, method: str, tensors: Sequence[torch.Tensor] = (), **meta: Any) -> Ok:
        request = Request(method, OpId("client", 0), 1, 7, meta, list(tensors))
        answer = self.objects.methods[method](request, self.now)
        assert isinstance(answer, Ok)
        return answer

    def act(self, verb: str, key: str, facts: Mapping[str, Any], *tensors: torch.Tensor) -> Ok:
        acts = [[verb, self.posts, key, facts, len(tensors)]]
        self.posts += 1
        return self("post", tensors, channel="c", number=self.posts - 1, got=-1, acts=acts)

    def make(self, key: str, capacity: int = 100) -> None:
        self.act("make", key, {"queue": write_queue(fifo(key, capacity))})

    def do(self, kind: str, key: str, *tensors: torch.Tensor, round: int | None = None, **attrs: Any) -> Ok:
        facts = {"kind": kind, "attrs": attrs, "what": "test", "round": round}
        return self.act("do", key, facts, *tensors)

    def held(self, key: str) -> list[int]:
        return [int(part) for part in self("first", key=key, count=100).tensors]

    def abort(self, number: int) -> None:
        self.over.add(number)
        self.objects.abort()


def test_what_a_round_took_comes_back_where_it_put_no_element():
    for rows, back in ((0, [0, 1, 2]), (1, [1, 2]), (9, [1, 2])):  # the last one is stopped half-way
        server = Server()
        server.make("a"), server.make("b", 4)
        server.do("enqueue", "a", torch.arange(3), many=True)
        server.do("dequeue", "a", round=7)
        server.do("enqueue", "b", torch.arange(rows), round=7, many=True)
        assert server("halt", round=7).meta == {"moved": rows > 0, "put": {"b": min(rows, 4)} if rows else {}}
        server.abort(7)
        assert server.held("a") == back, "what halt says and what abort does are one"


def test_what_is_brought_is_counted_once_and_each_time_only_what_is_new(monkeypatch: pytest.MonkeyPatch):
    counted, asked, size = list[int](), list[int](), tfnb.cluster.server.objects.size
    monkeypatch.setattr(tfnb.cluster.server.objects, "size", lambda some: counted.append(len(some)) or size(some))

    def afford(more: int) -> None:
        asked.append(server.objects.nbytes + more)

    server = Server(afford=afford)
    server.make("a")
    found = {"closed": False, "marks": {}, "facts": {}}
    asked.clear(), counted.clear()
    for page in (0, 1, 1, 2, 3, 3):  # two answers were lost
        elements = list(torch.arange(10 * page, 10 * page + 10))
        server("bring", elements, id="x", key="a", found=found, start=10 * page)
    assert asked == [80, 160, 160, 240, 320, 320] and server.objects.nbytes == 320
    assert sum(counted) == 80, "40 tensors, 20 that came again and 20 that those replaced"
    for key in "vwv":
        server("bring", [torch.zeros(4)], id="x", keys=[key])
    assert server.objects.nbytes == 320 + 2 * 16
    server("thaw", id="x")
    assert server.objects.nbytes == 0


def test_what_has_no_room_is_not_brought():
    def afford(more: int) -> None:
        if more > 8:
            raise ResourceExhausted("no room")

    server = Server(afford=afford)
    server("bring", [torch.zeros(2)], id="x", keys=["v"])
    for more in ({"keys": ["w"]}, {"key": "a", "found": {}, "start": 0}):
        with pytest.raises(ResourceExhausted):
            server("bring", [torch.zeros(4)], id="x", **more)
    assert server.objects.nbytes == 8


def test_what_is_decided_happens_also_where_a_queue_is_gone_meanwhile():
    written = list[str]()
    server = Server(assigning=lambda values: lambda: written.extend(values))
    server.make("a"), server.make("b")
    server.do("enqueue", "b", torch.arange(3), many=True)
    facts = server("copy", id="f", keys=["b"], moved=[]) if server("freeze", id="f", keys=["b"]) else None
    assert facts is not None
    for key in "ab":
        server("bring", list(torch.arange(3)), id="x", key=key, found=facts.meta["found"]["b"][0], start=0)
    server("bring", [torch.zeros(1)], id="x", keys=["v"])
    server.do("dequeue", "b")
    server("freeze", id="y", keys=["a", "b"], brought="x")
    server.now = FROZEN + 1
    server.act("drop", "a", {})
    server("refill", id="y", brought="x", void=[])
    assert written == ["v"] and server.held("b") == [0, 1, 2]
