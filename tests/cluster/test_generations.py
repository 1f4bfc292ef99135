"""Readers and writers of large values on a real server: no read is torn, and what was sent is let go."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

import tfnb
from tests.cluster.conftest import epoch, stats

COUNT = 3_000_000  # 12 MB: sending it takes longer than writing it


@pytest.mark.slow
def test_c21_no_read_is_torn_while_updates_are_written(connect):
    w = tfnb.Variable(torch.zeros(COUNT), name="w")
    with tfnb.record("torn"):
        x = tfnb.placeholder(torch.ones(1), name="x", shape=(1,))
        train = tfnb.train.SGD(1.0).apply_gradients([(torch.ones(COUNT) * x, w)])
    cluster = connect(2)
    feed = {x: torch.ones(1)}
    tfnb.run(train, feed)
    (piece,) = cluster._variables.held.homes[w.key]
    link, peer = cluster._link, cluster._engine.servers[piece.shard].peer

    async def ask(method, **meta):
        return await link.persist(peer, method, meta, epoch=epoch(), deadline=time.monotonic() + 60)

    async def read_and_write():
        """Updates one after the other, as a task sends them, and four readers all the time."""
        stop, seen, spare = asyncio.Event(), [], 0

        async def read():
            while not stop.is_set():
                answer = await ask("pull", keys=[piece.key])
                seen.append((answer.meta["version"], answer.tensors[0].aminmax()))

        readers = [asyncio.ensure_future(read()) for _ in range(4)]
        values = [{piece.key: torch.full((COUNT,), float(n))} for n in (1, 2)]
        for n in range(40):
            await cluster._engine.assign({piece.shard: values[n % 2]}, [piece.key])
            spare = max(spare, (await ask("stat")).meta["spare"])
        stop.set()
        await asyncio.gather(*readers)
        return seen, spare

    seen, spare = link.wait(link.start(read_and_write), 120, "reads and writes")
    assert len({version for version, _ in seen}) > 5, "reads and writes took turns"
    assert all(low == high for _, (low, high) in seen)
    assert 0 < spare <= 2 * 4 * (COUNT + 16), "others were written while some were read; never more than three"


def test_what_was_sent_is_let_go_so_that_the_next_write_stays_in_place(connect):
    w = tfnb.Variable(torch.zeros(COUNT), name="w")
    with tfnb.record("let_go"):
        x = tfnb.placeholder(torch.ones(1), name="x", shape=(1,))
        train = tfnb.train.SGD(1.0).apply_gradients([(torch.ones(COUNT) * x, w)])
    cluster = connect(2)
    for _ in range(6):
        tfnb.run(train, {x: torch.ones(1)})
    assert w.value().unique().tolist() == [-6]
    assert [s["spare"] for s in stats(cluster)] == [0, 0], "no step needed another generation"
