"""Queues: the order of attempts, closing, waiting without threads, cancelling, deadlocks."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.state.distance import queues_at
from tfnb.errors import (
    Cancelled,
    DeadlineExceeded,
    DeadlockError,
    InvalidArgument,
    OutOfRange,
    QueueClosed,
    ShapeError,
)  # fmt: skip
from tfnb.graph.forms.serial import graph_hash
from tfnb.state import waits
from tfnb.state.queue_machine import Attempt, QueueMachine, give_back
from tfnb.state.queue_operations import attempt_on

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")  # on a machine that does much else


def scalars(capacity: int = 2, name: str = "q") -> tfnb.FIFOQueue:
    return tfnb.FIFOQueue(capacity, torch.float32, (), name=name)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """The thread, and what the call returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def recorded(queue: tfnb.FIFOQueue) -> dict[str, Any]:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        ops = {
            "put": queue.enqueue(x), "take": queue.dequeue(), "size": queue.size(), "close": queue.close(), "x": x,
            "cancel": queue.close(cancel_pending_enqueues=True),
        }  # fmt: skip
    return ops | {"graph": g}


# -- the state machine ------------------------------------------------------------------------------------------------


def test_what_a_step_took_stands_in_front_again_unless_it_put_some() -> None:
    queue, done = QueueMachine("q", 3), list[Attempt]()
    for word in "abc":
        queue.submit(Attempt(queue, "enqueue", lambda _: None, elements=[(word,)]))  # type: ignore[arg-type]
    for _ in "ab":
        queue.submit(Attempt(queue, "dequeue", done.append))
    queue.submit(Attempt(queue, "enqueue", done.append, elements=[("d",)]))  # type: ignore[arg-type]
    give_back(done)
    assert [word for (word,) in queue.elements] == ["c", "d"]
    queue.submit(Attempt(queue, "enqueue", done.append, elements=[]))
    give_back([*done[:2], done[-1]])  # the last one put nothing
    assert [word for (word,) in queue.elements] == ["a", "b", "c", "d"]


def test_a_later_attempt_stands_in_line_when_the_one_before_does() -> None:
    queue, told = QueueMachine("q", 1), []
    first, second = (Attempt(queue, "dequeue", told.append) for _ in range(2))
    other = Attempt(queue, "enqueue", told.append, elements=[(1,)])
    queue.submit(first)
    queue.submit(second, first)  # both stand in line
    queue.submit(other, second)  # waits until both are over, and so for ever
    assert first.is_placed and second.is_placed and not other.is_placed
    for _ in range(2):
        queue.submit(Attempt(queue, "enqueue", told.append, elements=[(0,)]))
    assert first.is_over and second.is_over and other.is_over and list(queue.elements) == [(1,)]


def test_a_long_line_of_iterations_needs_no_recursion() -> None:
    queue, told = QueueMachine("q", 1), []
    before = None
    for number in range(20_000):
        attempt = Attempt(queue, "enqueue" if number % 2 else "dequeue", told.append, elements=[(number,)])
        queue.submit(attempt, before)
        before = attempt
    assert not told
    queue.submit(Attempt(queue, "enqueue", told.append, elements=[(-1,)]))
    assert len(told) == 20_001 and told[-1] is before


# -- at once ----------------------------------------------------------------------------------------------------------


def test_elements_come_out_as_they_went_in_and_are_the_queues_own() -> None:
    queue = tfnb.FIFOQueue(5, [torch.float32, torch.int64], [(2,), None], name="pairs")
    given = torch.ones(2)
    for n in range(3):
        queue.enqueue((given * n if n else given, torch.arange(n)))
    given.zero_()
    assert queue.size() == 3
    found = [queue.dequeue() for _ in range(3)]
    torch.testing.assert_close(found[0][0], torch.ones(2))
    assert [pair[1].tolist() for pair in found] == [[], [0], [0, 1]]


def test_what_does_not_fit_is_refused() -> None:
    queue = tfnb.FIFOQueue(5, torch.float32, (2, None), name="rows")
    with pytest.raises(ShapeError, match=r"component 0 of queue rows has shape \[2, None\]"):
        queue.enqueue(torch.ones(3, 2))
    with pytest.raises(InvalidArgument, match="convert it"):
        queue.enqueue(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(InvalidArgument, match="takes 2 tensors, and was given 1"):
        tfnb.FIFOQueue(5, [torch.float32, torch.float32]).enqueue(torch.ones(2))
    with pytest.raises(InvalidArgument, match="capacity 0"):
        tfnb.FIFOQueue(0, torch.float32)
    with tfnb.record(), pytest.raises(ShapeError):
        queue.enqueue(torch.ones(3, 2))
    with tfnb.record(), pytest.raises(InvalidArgument, match="give shapes="):
        tfnb.FIFOQueue(5, torch.float32).dequeue()


@pytest.mark.parametrize("how", ["recorded", "at once"])
def test_closing(how: str) -> None:
    queue = scalars(2)
    ops = recorded(queue)
    session = tfnb.Session(ops["graph"])

    def do(name: str) -> Any:
        if how == "recorded":
            return session.run(ops[name], {ops["x"]: 5.0} if name == "put" else None, timeout=60)
        return {"put": lambda: queue.enqueue(5.0), "take": queue.dequeue, "close": queue.close}[name]()

    do("put")
    do("close")
    with pytest.raises(QueueClosed, match="is closed"):
        do("put")
    with pytest.raises(QueueClosed, match="already closed"):
        do("close")
    assert do("take") == 5
    with pytest.raises(OutOfRange, match=r"insufficient elements \(requested 1, current size 0\)"):
        do("take")


def test_close_waits_for_the_enqueues_before_it_or_cancels_them() -> None:
    queue = scalars(1)
    queue.enqueue(1.0)
    thread, found = in_thread(lambda: queue.enqueue(2.0))
    until(lambda: bool(queue.machine.lines["enqueue"]))
    closing, closed = in_thread(queue.close)
    time.sleep(0.05)
    assert not closed and queue.dequeue() == 1
    thread.join(60), closing.join(60)
    assert found == [None] and closed == [None] and queue.dequeue() == 2

    queue = scalars(1)
    queue.enqueue(1.0)
    thread, found = in_thread(lambda: queue.enqueue(2.0))
    until(lambda: bool(queue.machine.lines["enqueue"]))
    queue.close(cancel_pending_enqueues=True)
    thread.join(60)
    assert isinstance(found[0], Cancelled) and queue.dequeue() == 1


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


# -- in graphs --------------------------------------------------------------------------------------------------------


def test_recording_does_nothing_and_shows_the_element_that_comes_next() -> None:
    queue = scalars()
    queue.enqueue(3.0)
    with tfnb.record() as g:
        y = queue.dequeue() * 2
        queue.enqueue(9.0)
        shapeless = tfnb.FIFOQueue(2, torch.float32, name="free").dequeue(sample=torch.ones(4, 3))
    assert y.sample == 6 and queue.size() == 1 and str(shapeless.spec.shape[1]) == "3"
    assert tfnb.run(y) == 6 and queue.size() == 0
    assert str(g.nodes[0]) and "tfnb.dequeue" in g.text()


def test_operations_happen_in_the_order_written_and_do_not_pull_one_another() -> None:
    queue = scalars(3)
    with tfnb.record() as g:
        first = queue.enqueue(1.0)
        second = queue.enqueue(2.0)
        a, b = queue.dequeue(), queue.dequeue()
        held = queue.size()
    session = tfnb.Session(g)
    assert session.run([b, held, a, second, first]) == [2, 0, 1, None, None]
    session.run(second)
    assert queue.size() == 1 and session.run(a) == 2


def test_a_queue_between_two_loops_of_two_threads() -> None:
    queue, results = scalars(3, "work"), tfnb.FIFOQueue(-1, torch.float32, (), name="results")
    with tfnb.record() as g:

        def produce(i: Any) -> Any:
            tfnb.cond(i % 2 == 0, lambda: _put(queue, i * 10.0), lambda: _put(queue, i * 1.0))
            return i + 1

        (made,) = tfnb.while_loop(lambda i: i < 40, produce, (0,), parallel_iterations=8)

        def consume(i: Any, total: Any) -> Any:
            x = queue.dequeue()
            results.enqueue(x + 1)
            return i + 1, total + x

        _, total = tfnb.while_loop(lambda i, t: i < 40, consume, (0, 0.0), parallel_iterations=8)
    session = tfnb.Session(g)
    thread, found = in_thread(lambda: session.run(made))
    expected = [i * 10.0 if i % 2 == 0 else i * 1.0 for i in range(40)]
    assert session.run(total) == sum(expected)
    thread.join(10)
    assert found == [40] and [results.dequeue().item() - 1 for _ in range(40)] == expected


def _put(queue: tfnb.FIFOQueue, value: Any) -> Any:
    queue.enqueue(value)
    return value


def test_an_element_keeps_the_value_that_a_variable_had() -> None:
    v, queue = tfnb.Variable(torch.zeros(3), name="v"), tfnb.FIFOQueue(2, torch.float32, (3,))
    with tfnb.record() as g:
        put = queue.enqueue(v.read())
        more = v.assign_add(torch.ones(3))
    tfnb.run([put, more])
    assert queue.dequeue().tolist() == [0, 0, 0] and v.value().tolist() == [1, 1, 1]


def test_sizes_may_differ_from_element_to_element() -> None:
    queue = tfnb.FIFOQueue(9, torch.float32, (None,), name="lines")
    with tfnb.record():
        y = queue.dequeue().sum()
        two = torch.cat([queue.dequeue(), queue.dequeue()])
    for n in (3, 1, 2, 0):
        queue.enqueue(torch.ones(n))
    assert tfnb.run(y) == 3 and tfnb.run(two).shape == (3,)


def test_ten_thousand_waits_hold_no_threads_and_can_be_cancelled() -> None:
    queue, count = tfnb.FIFOQueue(5, torch.float32, (), name="empty"), 10_000
    with tfnb.record() as g:

        def body(i: Any, total: Any) -> Any:
            return i + 1, total + queue.dequeue()

        _, total = tfnb.while_loop(lambda i, t: i < count, body, (0, 0.0), parallel_iterations=count)
    session = tfnb.Session(g)
    before = threading.active_count()
    thread, found = in_thread(lambda: session.run(total))
    until(lambda: queue.machine is not None and len(queue.machine.lines["dequeue"]) == count, 120)
    assert threading.active_count() <= before + 8
    begin = time.process_time()
    session.close()
    thread.join(120)
    assert time.process_time() - begin < 2, "a third of a second alone"
    assert isinstance(found[0], Cancelled) and not queue.machine.lines["dequeue"]
    queue.enqueue(1.0)
    assert queue.size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize("kind", ["enqueue", "dequeue"])
def test_ten_thousand_attempts_in_line_hold_no_thread_and_are_cancelled_at_once(kind: Any, where: str) -> None:
    """Puts by a close of the queue, takes by a step that is cancelled."""
    with queues_at(where) as machine:
        queue, ended = tfnb.FIFOQueue(1, torch.float32, (), name="crowd"), list[Attempt]()
        given = [torch.tensor(2.0)] if kind == "enqueue" else []
        if given:
            queue.enqueue(1.0)
        before = threading.active_count()
        attempts = [attempt_on(queue, kind, ended.append, {}, given) for _ in range(10_000)]
        for attempt in attempts:
            attempt.machine.submit(attempt)
        until(lambda: len(machine(queue).lines[kind]) == 10_000, 60)
        assert threading.active_count() <= before + 8 and not ended
        begin = time.process_time()
        queue.close(cancel_pending_enqueues=True) if given else queue.machine.withdraw(attempts)
        until(lambda: all(attempt.is_over for attempt in attempts), 60)
        assert time.process_time() - begin < 3, "a third of a second to a second where nobody else computes"
        assert not machine(queue).lines[kind]
        if given:
            assert all(isinstance(attempt.error, Cancelled) for attempt in ended) and len(ended) == 10_000
            assert [float(element) for element in queue] == [1.0]
        else:
            queue.enqueue(1.0)
            assert queue.dequeue() == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "there"])
def test_what_passed_through_a_queue_is_free_without_a_collector(where: str) -> None:
    with queues_at(where):
        queue = tfnb.FIFOQueue(4, torch.float32, (2,), name="free")
        with tfnb.record():
            x = tfnb.placeholder(torch.ones(2), shape=(2,))
            put, taken = queue.enqueue(x), queue.dequeue()

        def pass_some() -> int:
            for _ in range(5):
                queue.enqueue(torch.ones(2)), queue.dequeue()
                tfnb.run(put, {x: torch.ones(2)}), tfnb.run(taken)
            return sum(type(found) is Attempt for found in gc.get_objects())

        pass_some(), gc.collect(), gc.disable()
        before = sum(type(found) is Attempt for found in gc.get_objects())
        after = pass_some()
        gc.enable()
    assert after <= before + 1, "the last one may be in the hands of a thread"


def test_a_deadline_takes_back_what_waits_and_says_what_it_was() -> None:
    queue = scalars(1, "line")
    ops = recorded(queue)
    session = tfnb.Session(ops["graph"])
    with pytest.raises(DeadlineExceeded, match=r"line/dequeue .*dequeue on queue line .0 of 1 elements, open"):
        session.run(ops["take"], timeout=0.5)
    queue.enqueue(7.0)
    with pytest.raises(DeadlineExceeded, match=r"enqueue on queue line .1 of 1 elements"):
        session.run(ops["put"], {ops["x"]: 8.0}, timeout=0.5)
    with pytest.raises(DeadlineExceeded, match="enqueue on queue line did not end within"):
        queue.enqueue(8.0, timeout=0.05)
    assert queue.dequeue() == 7 and queue.size() == 0
    with pytest.raises(DeadlineExceeded):
        queue.dequeue(timeout=0.05)


def test_an_interrupt_leaves_nothing_in_line() -> None:
    queue = scalars(1, "line")
    ops = recorded(queue)
    session = tfnb.Session(ops["graph"])
    session.run(ops["put"], {ops["x"]: 1.0}), session.run(ops["take"])
    for wait in (lambda: session.run(ops["take"]), queue.dequeue):
        timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            wait()
        timer.join()
        assert not queue.machine.lines["dequeue"]
    queue.enqueue(3.0)
    assert queue.size() == 1


def test_a_saved_graph_has_a_queue_of_its_own(tmp_path: Path) -> None:
    queue = tfnb.FIFOQueue(-1, [torch.float32, torch.int64], [(None, 3), None], name="rows")
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        put = queue.enqueue((x, torch.arange(3)))
        y = queue.dequeue(sample=(torch.ones(4, 3), torch.arange(3)))[0].sum()
    g.save(tmp_path / "graph.json")
    again = tfnb.Graph.load(tmp_path / "graph.json")
    assert graph_hash(again.contents) == graph_hash(g.contents)
    session = tfnb.Session(again)
    assert session.run([put.name, y.name], {"x": torch.ones(2, 3)}) == [None, 6] and queue.size() == 0
    tfnb.Session(g).save(tmp_path / "variables")


# -- deadlocks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for whom is looked at early, and a notice comes late."""
    monkeypatch.setattr(waits, "LOOK", 0.05)
    monkeypatch.setattr(waits, "NOTICE", 600.0)


@pytest.fixture
def noticed(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice comes early, too."""
    monkeypatch.setattr(waits, "NOTICE", 0.05)


def rings_on_its_own_later_enqueue(q: Any, p: Any) -> None:
    with tfnb.record() as g:
        x = q.dequeue()
        put = q.enqueue(1.0)
    tfnb.Session(g).run([x, put])


def rings_on_a_value_that_it_makes_of_the_element(q: Any, p: Any) -> None:
    with tfnb.record() as g:
        done = [p.enqueue(q.dequeue() + 1), q.enqueue(p.dequeue() + 1)]
    tfnb.Session(g).run(done)


def rings_with_more_put_than_there_is_room(q: Any, p: Any) -> None:
    with tfnb.record() as g:
        (n,) = tfnb.while_loop(lambda i: i < 5, lambda i: (i + (_put(q, i * 1.0) > -1),), (0,))
        x = q.dequeue()
    tfnb.Session(g).run([n, x])


def rings_in_threads(q: Any, p: Any) -> None:
    with tfnb.record() as g:
        there, back = p.enqueue(q.dequeue()), q.enqueue(p.dequeue())
    session = tfnb.Session(g)
    threads = [in_thread(lambda op=op: session.run(op)) for op in (there, back)]
    for thread, _ in threads:
        thread.join()
    raise next(error for _, found in threads for error in found)


RINGS = [value for name, value in list(globals().items()) if name.startswith("rings_")]


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: ring.__name__)
def test_a_ring_of_steps_says_who_waits_for_whom(ring: Callable[..., None], soon: None) -> None:
    q, p = scalars(2, "q"), scalars(2, "p")
    with pytest.raises(DeadlockError, match=r"(?s)nothing can make progress:.*waits for") as raised:
        ring(q, p)
    assert raised.value.details.edges and raised.value.details.dot().startswith("digraph {")


def open_at_once(q: Any, p: Any) -> None:
    q.dequeue(timeout=1.0)


def open_on_a_full_queue(q: Any, p: Any) -> None:
    for _ in range(3):
        q.enqueue(1.0, timeout=1.0)


def open_in_a_run(q: Any, p: Any) -> None:
    tfnb.run(recorded(q)["take"], timeout=1.0)


def open_in_a_loop(q: Any, p: Any) -> None:
    with tfnb.record() as g:
        _, total = tfnb.while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t + q.dequeue()), (0, 0.0))
    q.enqueue(1.0)
    tfnb.Session(g).run(total, timeout=1.0)


def open_in_a_branch(q: Any, p: Any) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        y = tfnb.cond(x > 0, lambda: q.dequeue(), lambda: x)
    assert tfnb.Session(g).run(y, {x: -1.0}) == -1
    tfnb.Session(g).run(y, {x: 1.0}, timeout=1.0)


def open_with_a_close_behind_it(q: Any, p: Any) -> None:
    with tfnb.record() as g:
        ops = [q.enqueue(1.0), q.enqueue(1.0), q.enqueue(1.0), q.close()]
    tfnb.Session(g).run(ops, timeout=1.0)


def open_where_a_call_put_elements_before(q: Any, p: Any) -> None:
    with tfnb.record() as g:
        x = q.dequeue()
        put = q.enqueue(x + 1)
    q.enqueue(1.0)
    assert tfnb.Session(g).run([x, put]) == [1, None] and q.dequeue() == 2
    tfnb.Session(g).run([x, put], timeout=1.0)


OPEN = [value for name, value in list(globals().items()) if name.startswith("open_")]


@pytest.mark.parametrize("wait", OPEN, ids=lambda wait: wait.__name__)
def test_what_others_may_serve_is_waited_for_with_a_notice(wait: Callable[..., None], noticed: None) -> None:
    q, p = scalars(2, "q"), scalars(2, "p")
    with pytest.raises(DeadlineExceeded), pytest.warns(UserWarning, match=r"(?s)still waiting:.*waits for") as told:
        wait(q, p)
    assert len(told) == 1


def test_all_who_wait_are_told_of_the_cycle(soon: None) -> None:
    q, p = scalars(2, "q"), scalars(2, "p")
    with tfnb.record() as g:
        there, back = p.enqueue(q.dequeue()), q.enqueue(p.dequeue())
    session = tfnb.Session(g)
    threads = [in_thread(lambda op=op: session.run(op)) for op in (there, back)]
    for thread, _ in threads:
        thread.join()
    errors = [found[0] for _, found in threads]
    assert all(isinstance(error, DeadlockError) for error in errors)
    edges = dict(errors[0].details.edges)
    at, seen = next(iter(edges)), []
    while at not in seen:
        seen.append(at)
        at = edges[at]
    assert len(seen) == 6  # two dequeues, two queues, two enqueues: a ring


@pytest.mark.parametrize("recorded", [True, False], ids=["run", "at once"])
def test_whoever_puts_an_element_later_is_waited_for(recorded: bool, noticed: None) -> None:
    q = scalars(2, "q")
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor(0.0))
        put, taken = q.enqueue(x), q.dequeue()
    call = tfnb.Session(g).make_callable(put, [x])
    with pytest.warns(UserWarning, match="still waiting") as told:

        def later() -> None:
            until(lambda: len(told) > 0)
            (call if recorded else q.enqueue)(1.0)

        thread, _ = in_thread(later)
        assert tfnb.run(taken, timeout=60) == 1
        thread.join()


@pytest.mark.slow
def test_a_step_that_computes_may_still_put_an_element(soon: None) -> None:
    q = scalars(2, "q")
    with tfnb.record() as g:
        x, back = q.dequeue(), q.enqueue(1.0)
        seed = tfnb.placeholder(torch.ones(()))
        put = q.enqueue(torch.ops.tfnb_tests.queue_nap(seed))
    session = tfnb.Session(g)
    napping.clear()  # recording ran it
    thread, found = in_thread(lambda: session.run(put, {seed: 1.0}))
    assert napping.wait(60)
    assert session.run([x, back]) == [1, None]
    thread.join()
    assert found == [None]


napping = threading.Event()


@torch.library.custom_op("tfnb_tests::queue_nap", mutates_args=())
def queue_nap(x: torch.Tensor) -> torch.Tensor:
    """x, after a while."""
    napping.set()
    time.sleep(1.0)
    return x.clone()


queue_nap.register_fake(torch.empty_like)


@pytest.mark.parametrize("seed", range(10))
def test_a_live_pipeline_raises_no_alarm(seed: int, soon: None) -> None:
    rng = random.Random(seed)
    queues = [scalars(rng.randint(1, 3), f"q{i}") for i in range(rng.randint(1, 3))]
    count, lazy = rng.randint(1, 6), rng.random() * 0.05

    def feed() -> None:
        for n in range(count):
            time.sleep(lazy * rng.random())
            queues[0].enqueue(float(n))

    def carry(a: tfnb.FIFOQueue, b: tfnb.FIFOQueue) -> None:
        for _ in range(count):
            time.sleep(lazy * rng.random())
            b.enqueue(a.dequeue() + 1)

    threads = [
        in_thread(feed),
        *(in_thread(lambda a=a, b=b: carry(a, b)) for a, b in pairwise(queues)),
    ]
    with tfnb.record() as g:
        x = queues[-1].dequeue()
    session = tfnb.Session(g)
    try:
        got = [session.run(x, timeout=100).item() for _ in range(count)]
    except DeadlineExceeded as error:
        raise AssertionError(f"who feeds it ended with {[found for _, found in threads]}") from error
    assert got == [n + len(queues) - 1 for n in range(count)]
    for thread, found in threads:
        thread.join()
        assert found == [None]
