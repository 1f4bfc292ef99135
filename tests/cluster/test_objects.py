"""Queues of one server, asked as the notebook and tasks ask. No cluster, no thread, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.state.saved_queues import fifo
from tfnb.cluster.messages import Ok, OpId, Request
from tfnb.cluster.objects import Objects, write_queue


class Server:
    """The queues of a server, and one channel to them."""

    def __init__(self, **how: Any) -> None:
        self.objects, self.posts, self.over = Objects(**how), 0, set[int]()
        self.objects.is_over = lambda number: number in self.over

    def __call__(self, method: str, tensors: Sequence[torch.Tensor] = (), **meta: Any) -> Ok:
        request = Request(method, OpId("client", 0), 1, 7, meta, list(tensors))
        answer = self.objects.methods[method](request, 0.0)
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
