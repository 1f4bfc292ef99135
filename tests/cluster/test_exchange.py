"""Values between the tasks of a real cluster, by posts and by calls: bitwise, once, and nothing is left of them."""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from distributed import Client, LocalCluster, get_worker

import tfnb
from tests.cluster.conftest import worker_processes, workers
from tests.cluster.test_streams import SECONDS, break_streams, left_on_a_worker, soon, switch
from tfnb.cluster.tasks import meeting
from tfnb.cluster.tasks.exchange import Exchange
from tfnb.cluster.wire import streams
from tfnb.cluster.wire.messages import Peer
from tfnb.cluster.wire.posting import LEND
from tfnb.errors import InvalidArgument, StepAborted, TfnbError, Unavailable
from tfnb.state.waits import Inbox

LANES = ["posts", "calls"]


def exchange_of(peer: Peer) -> Exchange:
    """On the worker of a task, in a thread: its exchange."""
    return get_worker().state.actors[peer.key].task.exchange  # type: ignore[no-any-return]


def values(seed: int) -> list[tuple[Any, Any]]:
    """What one task sends: 4 B, 100 kB, 10 MB, a meta tensor, plain numbers, nothing, and dead values."""
    source = torch.Generator().manual_seed(seed)
    sizes = (1, 25_000, LEND // 4 + 1, 2_500_000)
    tensors = [torch.randn(size, generator=source) for size in sizes]
    plain = [torch.empty(3, 4, device="meta"), seed, -seed, True, seed / 7, None, torch.empty(0, 5)]
    return [(value, None) for value in [*tensors, tensors[1].to(torch.bfloat16), *plain]] + [(None, (seed, 4))]


def is_same(one: Any, other: Any) -> bool:
    """Whether a value and why it is dead arrived as they were."""
    (a, dead), (b, expected) = one, other
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and (a, dead) == (b, expected)
    return dead is None and a.device == b.device and a.shape == b.shape and (a.is_meta or torch.equal(a, b))


def put(got: queue.SimpleQueue[Any], edge: int, expected: Any, value: Any, dead: Any) -> None:
    """What came, beside what was expected."""
    got.put((edge, (value, dead), expected))


def next_event(peers: Any, inbox: Inbox) -> Any:
    """The next event of a step that waits; it reads the connections itself after a few waits."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(queue.Empty):
            return peers.wait(inbox, 0.1)
    raise AssertionError("nothing came")


def both_ways(parts: dict[int, Peer], me: int, rounds: list[int]) -> list[str]:
    """On a worker, in a thread as a step has one: tell the other part everything, and want as much of it."""
    exchange, wrong = exchange_of(parts[me]), []
    for number in rounds:
        got = Inbox()
        peers = exchange.begin(number, parts, got.put)
        mine, theirs = values(number * 10 + me), values(number * 10 + 1 - me)
        for edge, (value, dead) in enumerate(mine):
            peers.tell(edge, 1 - me, (0, number), value, dead)
        for edge, expected in reversed(list(enumerate(theirs))):
            peers.want(edge, (0, number), partial(put, got, edge, expected))
        for _ in theirs:
            found = next_event(peers, got)
            if isinstance(found, TfnbError):
                raise found
            if not is_same(found[1], found[2]):
                wrong.append(f"round {number}, edge {found[0]}: {found[1]}")
        peers.leave()
        exchange.end(number)
    return wrong


def facts_of(peer: Peer, dask_worker: Any) -> dict[str, int]:
    """On the worker of a task, in its event loop: what its exchange holds."""
    gc.collect()
    return dask_worker.state.actors[peer.key].task.exchange.facts  # type: ignore[no-any-return]


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest, dask: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With streams, and without them."""
    workers(dask, 4)
    dask.run(setattr, streams, "CONNECT", SECONDS)
    dask.run(switch, request.param == "posts")
    yield request.param
    workers(dask, 4)
    dask.run(switch, True)
    dask.run(setattr, streams, "CONNECT", 0.5)


@pytest.fixture
def parts(connect: Any, lane: str) -> dict[int, Peer]:
    """Two tasks by the number of their part."""
    return {number: member.peer for number, member in enumerate(connect(2)._engine.tasks)}


def start(dask: Client, function: Any, parts: dict[int, Peer], me: int, *args: Any) -> Any:
    """Call a function in a thread of the worker of a part."""
    return dask.submit(function, parts, me, *args, workers=[parts[me].addr], pure=False, retries=0)


def facts(dask: Client, peer: Peer) -> dict[str, int]:
    """What the exchange of a task holds, also while its thread waits."""
    return dask.run(facts_of, peer, workers=[peer.addr])[peer.addr]  # type: ignore[no-any-return]


def test_two_tasks_exchange_values_of_every_kind(dask, parts, lane):
    found = [start(dask, both_ways, parts, me, [1, 2, 3]) for me in parts]
    assert [one.result(2 * SECONDS) for one in found] == [[], []]
    for peer in parts.values():
        left = facts(dask, peer)
        assert left == {
            "held": 0,
            "early": 0,
            "rounds": 0,
            "senders": lane == "posts",
            "lent": 0,
            "receivers": lane == "posts",
        }


def hang(parts: dict[int, Peer], me: int, number: int) -> tuple[str, str]:
    """Want what never comes; why the round failed."""
    exchange, got, error = exchange_of(parts[me]), Inbox(), None
    peers = exchange.begin(number, parts, got.put)
    for turn in range(1000):
        peers.tell(0, 1 - me, (turn,), torch.zeros(100), None)
        peers.want(1, (turn,), lambda value, dead: None)
        time.sleep(0.01)
        with suppress(queue.Empty):
            error = peers.wait(got, 0.001)
            break
    error = error or next_event(peers, got)
    peers.leave()
    exchange.end(number, error)
    return type(error).__name__, str(error)


def test_a_task_that_is_killed_in_mid_exchange_aborts_the_round_of_the_other(dask, parts, lane):
    waiting = start(dask, hang, parts, 0, 1)
    start(dask, hang, parts, 1, 1)  # its future may never end
    (pid,) = dask.run(os.getpid, workers=[parts[1].addr]).values()
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    kind, text = waiting.result(SECONDS)
    assert (kind == "Unavailable" and parts[1].addr in text) or "task" in text, (kind, text)
    assert time.monotonic() - begin < 8.0
    assert facts(dask, parts[0])["rounds"] == 0
    workers(dask, 4)


def fill(parts: dict[int, Peer], me: int, rounds: int) -> int:
    """So many short rounds with small, lent and dead values both ways."""
    exchange = exchange_of(parts[me])
    large = torch.ones(LEND // 4 + 1)
    for number in range(1, rounds + 1):
        got: queue.SimpleQueue[Any] = queue.SimpleQueue()
        peers = exchange.begin(number, parts, got.put)
        sent = (
            [(torch.tensor([float(number)]), None), (large, None), (None, (1, 2))]
            if number % 20 == 0
            else [(number, None)]
        )
        for edge, (value, dead) in enumerate(sent):
            peers.tell(edge, 1 - me, (), value, dead)
            peers.want(edge, (), partial(put, got, edge, None))
        for _ in sent:
            found = got.get(timeout=SECONDS)
            if isinstance(found, TfnbError):
                raise found
        del found
        exchange.end(number)
    return len(threading.enumerate())


def read_while(parts: dict[int, Peer], me: int, others: list[int]) -> list[Any]:
    """On a worker: the values of a round whose thread reads the connections, and whether it did, alone and beside
    ``others``, rounds that go on meanwhile.
    """
    exchange, got, found = exchange_of(parts[me]), Inbox(), []
    peers = exchange.begin(1, parts, got.put)
    for turn in range(10):
        peers.tell(0, 1 - me, (turn,), turn, None)
        peers.want(0, (turn,), lambda value, dead: got.put(value))
        found.append(next_event(peers, got))
    found.append(exchange._reader is not None)
    for number in others:
        exchange.begin(number, parts, got.put)
    peers.tell(1, 1 - me, (), 10, None)
    peers.want(1, (), lambda value, dead: got.put(value))
    found += [next_event(peers, got), exchange._reader is not None]
    for number in others:
        exchange.end(number)
    peers.tell(2, 1 - me, (), 11, None)
    peers.want(2, (), lambda value, dead: got.put(value))
    found += [next_event(peers, got), exchange._reader is not None]
    peers.leave()
    found.append(exchange._reader is not None)
    exchange.end(1)
    return found


@pytest.mark.parametrize("others", [[], [2], [2, 3]], ids=str)
def test_a_waiting_thread_reads_its_connections_as_long_as_its_round_is_alone(dask, parts, lane, others):
    start(dask, both_ways, parts, 0, [9]), start(dask, both_ways, parts, 1, [9]).result(SECONDS)  # all are connected
    first, second = (start(dask, read_while, parts, me, others) for me in parts)
    is_read, is_shared = lane == "posts", lane == "posts" and not others
    expected = [*range(10), is_read, 10, is_shared, 11, is_read, False]
    assert [first.result(2 * SECONDS), second.result(2 * SECONDS)] == [expected, expected]


def test_a_thousand_rounds_leave_nothing(dask, parts, lane):
    rounds = 1000 if lane == "posts" else 200
    threads = [one.result(4 * SECONDS) for one in [start(dask, fill, parts, me, 5) for me in parts]]
    for peer in parts.values():
        dask.submit(abort, peer, 5, workers=[peer.addr], pure=False).result(SECONDS)
    found = [start(dask, after, parts, me, rounds) for me in parts]
    assert all(one.result(4 * SECONDS) <= before for one, before in zip(found, threads, strict=True)), "threads"
    for peer in parts.values():
        left = facts(dask, peer)
        assert (left["held"], left["rounds"], left["lent"]) == (0, 0, 0), left


def after(parts: dict[int, Peer], me: int, rounds: int) -> int:
    """`fill` once more, with numbers of rounds that no earlier ones had."""
    exchange = exchange_of(parts[me])
    begin = exchange.begin
    exchange.begin = lambda number, *args: begin(number + 10, *args)  # type: ignore[method-assign]
    end = exchange.end
    exchange.end = lambda number, *args: end(number + 10, *args)  # type: ignore[method-assign]
    try:
        return fill(parts, me, rounds)
    finally:
        del exchange.begin, exchange.end


def abort(peer: Peer, floor: int) -> None:
    exchange_of(peer).abort(floor, floor, StepAborted("enough"))


def one_way(parts: dict[int, Peer], me: int, told: dict[int, Any], wanted: list[int], number: int = 1) -> list[Any]:
    """Tell some values and want others; what came, or why the round failed."""
    exchange, got = exchange_of(parts[me]), queue.SimpleQueue()
    peers = exchange.begin(number, parts, got.put)
    for edge, value in told.items():
        peers.tell(edge, 1 - me, (), value, None)
    for edge in wanted:
        peers.want(edge, (), lambda value, dead, edge=edge: got.put((edge, value)))
    found = [got.get(timeout=SECONDS)]
    while len(found) < len(wanted) and not isinstance(found[0], TfnbError):
        found.append(got.get(timeout=SECONDS))
    return found


def test_a_task_is_quicker_than_the_other_and_its_old_self_is_not_heard(dask, parts, lane):
    old = {**parts, 0: parts[0]._replace(incarnation=5)}  # as if task 0 had been another process

    def told(parts, me):
        peers = exchange_of(parts[me]).begin(1, parts, print)
        peers.tell(0, 1, (), 1.5, None)
        peers.tell(1, 1, (), torch.ones(3), None)

    start(dask, told, parts, 0).result(SECONDS)
    soon(lambda: facts(dask, parts[1])["held"] == 2, "both wait for the round to begin")
    (found, *_) = sorted(start(dask, one_way, parts, 1, {}, [0, 1]).result(SECONDS))
    assert found == (0, 1.5)
    start(
        dask, lambda parts, me: exchange_of(parts[me]).begin(2, parts, print).tell(0, 1, (), 1, None), parts, 0
    ).result()
    soon(lambda: facts(dask, parts[1])["held"] == 1, "it came")

    def begun(parts, me):
        exchange_of(parts[me]).begin(2, parts, print)

    dask.submit(begun, old, 1, workers=[parts[1].addr], pure=False).result(SECONDS)
    left = facts(dask, parts[1])
    assert left["held"] == 0 and left["fenced"] == 1


def crowd(parts: dict[int, Peer], me: int, count: int) -> None:
    """Tell many values of a round that has not begun at the other end."""
    peers = exchange_of(parts[me]).begin(1, parts, print)
    for turn in range(count):
        peers.tell(0, 1 - me, (turn,), torch.full((50_000,), float(turn)), None)


def gather(parts: dict[int, Peer], me: int, count: int) -> list[float] | str:
    """Want all of them; what they hold, or why the round failed."""
    exchange, got = exchange_of(parts[me]), queue.SimpleQueue()
    peers = exchange.begin(1, parts, got.put)
    for turn in range(count):
        peers.want(0, (turn,), partial(put, got, turn, None))
    found = [got.get(timeout=SECONDS)]
    while len(found) < count and not isinstance(found[0], TfnbError):
        found.append(got.get(timeout=SECONDS))
    return (
        str(found[0]) if isinstance(found[0], TfnbError) else sorted(value.mean().item() for _, (value, _), _ in found)
    )


def limit(patience: float, peer: Peer, dask_worker: Any) -> None:
    """On the worker of a task: few early bytes, and so many seconds that their sender waits."""
    meeting.PATIENCE = patience
    dask_worker.state.actors[peer.key].task.exchange._meeting._budget = 1 << 20


@pytest.mark.parametrize("patience", [SECONDS, 0.2], ids=["begins", "too late"])
def test_early_values_beyond_the_budget_wait_at_their_sender(dask, parts, lane, patience):
    count = 200
    dask.run(limit, patience, parts[1], workers=[parts[1].addr])
    try:
        start(dask, crowd, parts, 0, count).result(SECONDS)
        soon(lambda: facts(dask, parts[1])["early"] > 1 << 20, "the budget is used")
        time.sleep(0.5)
        left = facts(dask, parts[1])
        assert lane == "calls" or left["early"] < 2 << 20, "one message and what was read with it"
        found = start(dask, gather, parts, 1, count).result(SECONDS)
        if patience == SECONDS:
            assert found == [float(turn) for turn in range(count)]
        else:
            assert "limit 1048576" in found
        assert facts(dask, parts[1])["early"] == 0
    finally:
        dask.run(limit, 10.0, parts[1], workers=[parts[1].addr])


def test_a_key_that_is_told_twice_aborts_the_round_at_the_receiver(dask, parts):
    def twice(parts, me):
        peers = exchange_of(parts[me]).begin(1, parts, print)
        for value in (1, 2):
            peers.tell(6, 1, (3,), value, None)

    waiting = start(dask, one_way, parts, 1, {}, [9])
    start(dask, twice, parts, 0).result(SECONDS)
    (error,) = waiting.result(SECONDS)
    assert type(error).__name__ == "Internal" and "edge 6" in str(error) and "tag (3,)" in str(error)


def test_what_cannot_travel_is_an_error_of_who_tells_it(dask, parts):
    with pytest.raises(InvalidArgument, match="edge 3"):
        start(dask, one_way, parts, 0, {3: "text"}, []).result(SECONDS)


def test_parts_of_one_task_hand_over_the_value_itself(dask, parts):
    def own(parts, me):
        exchange, got, value = exchange_of(parts[me]), [], torch.ones(3)
        peers = exchange.begin(1, {0: parts[0], 1: parts[0]}, print)
        peers.want(1, (), lambda value, dead: got.append(value))
        peers.tell(1, 1, (), value, None)
        exchange.end(1)
        return got[0] is value

    assert start(dask, own, parts, 0).result(SECONDS)


@pytest.mark.parametrize("lane", ["posts"], indirect=True)
def test_a_connection_that_breaks_aborts_its_rounds_and_the_next_one_opens_another(dask, parts, lane):
    waiting = [start(dask, hang, parts, me, 1) for me in parts]
    soon(lambda: all(facts(dask, peer)["receivers"] for peer in parts.values()), "both are connected")
    dask.run(break_streams, workers=[parts[0].addr])
    for one in waiting:
        kind, text = one.result(SECONDS)
        assert kind == "Unavailable" and "broke" in text
    found = [start(dask, both_ways, parts, me, [2]) for me in parts]
    assert [one.result(2 * SECONDS) for one in found] == [[], []]


def test_closing_leaves_no_thread_and_no_socket(dask, connect, lane):
    soon(lambda: not any(threads for threads, _ in dask.run(left_on_a_worker).values()), "those of earlier tests end")
    before = {addr: ports for addr, (_, ports) in dask.run(left_on_a_worker).items()}
    cluster = connect(2)
    parts = {number: member.peer for number, member in enumerate(cluster._engine.tasks)}
    found = [start(dask, both_ways, parts, me, [1]) for me in parts]
    assert [one.result(2 * SECONDS) for one in found] == [[], []]
    del found
    cluster.close()
    soon(
        lambda: all(left == (0, before[addr]) for addr, left in dask.run(left_on_a_worker).items()),
        "threads and ports are gone with the tasks",
    )
    assert sum(dask.run(break_streams).values()) == 0


@pytest.mark.slow
def test_workers_of_one_process_use_calls():
    with (
        LocalCluster(n_workers=3, threads_per_worker=2, processes=False, dashboard_address=None) as here,
        Client(here, set_as_default=False) as client,
        tfnb.connect(client, ps=1, timeout=180) as cluster,
    ):
        parts = {number: member.peer for number, member in enumerate(cluster._engine.tasks)}
        found = [start(client, both_ways, parts, me, [1, 2]) for me in parts]
        assert [one.result(2 * SECONDS) for one in found] == [[], []]


@pytest.mark.slow
def test_posts_of_an_encrypted_cluster_are_encrypted():
    pytest.importorskip("cryptography", reason="Security.temporary() makes certificates with it")
    from distributed import Security

    security = Security.temporary()
    with worker_processes(3, protocol="tls://", security=security) as client:
        client.run(setattr, streams, "CONNECT", SECONDS)
        for shared in (True, False):
            client.run(share, shared)
            with tfnb.connect(client, ps=1, timeout=180) as cluster:
                parts = {number: member.peer for number, member in enumerate(cluster._engine.tasks)}
                found = [start(client, both_ways, parts, me, [1, 2]) for me in parts]
                assert [one.result(2 * SECONDS) for one in found] == [[], []]
                assert facts(client, parts[0])["senders"] == 1
                assert all(start(client, versions, parts, me).result(SECONDS) for me in parts)


def share(is_on: bool) -> None:
    from tfnb.state import shared_memory

    shared_memory.is_on = is_on


def versions(parts: dict[int, Peer], me: int) -> bool:
    """Whether what this task sends is encrypted."""
    lanes = exchange_of(parts[me])._lanes.values()
    return all(lane.sender.sock.version().startswith("TLS") for lane in lanes)


def test_an_aborted_round_fails_with_the_first_cause(dask, parts):
    def cut(parts, me):
        exchange, got = exchange_of(parts[me]), []
        peers = exchange.begin(1, parts, got.append)
        peers.want(0, (), lambda value, dead: got.append("delivered"))
        exchange.abort(1, 1, Unavailable("first"))
        exchange.abort(1, 1, Unavailable("second"))
        peers.want(1, (), lambda value, dead: got.append("delivered"))
        exchange.end(1, got[0])
        return [str(error) for error in got], exchange.facts["rounds"]

    assert start(dask, cut, parts, 0).result(SECONDS) == (["first"], 0)
