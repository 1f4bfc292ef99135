"""Batches of elements, and the kinds of queues: at once, and in graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
import tfnb.state.waits
from tests.state.distance import queues_at
from tests.state.test_queues import in_thread, until
from tfnb.errors import Cancelled, DeadlineExceeded, InvalidArgument, OutOfRange, QueueClosed, ShapeError
from tfnb.state.queue_machine import QueueMachine

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


def numbers(capacity: int = 10, name: str = "q", given: Any = ()) -> tfnb.FIFOQueue:
    queue = tfnb.FIFOQueue(capacity, torch.float32, (), name=name)
    if given:
        queue.enqueue_many(given)
    return queue


Machine = Callable[[Any], QueueMachine | None]  # what holds a queue


def waits(queue: Any, line: Any, count: int = 1, machine: Machine = lambda queue: queue.machine) -> None:
    until(lambda: (held := machine(queue)) is not None and len(held.lines[line]) == count, 60)


@pytest.fixture(params=["here", "there"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Queues of the test are here, or on a server."""
    with queues_at(request.param) as found:
        yield found


# -- at once ----------------------------------------------------------------------------------------------------------


def test_rows_of_several_tensors_are_elements_and_become_a_batch_again() -> None:
    queue = tfnb.FIFOQueue(5, [torch.float32, torch.int64], [(2,), ()], name="pairs")
    xs, ys = torch.arange(6.0).reshape(3, 2), torch.tensor([7, 8, 9])
    given = xs.clone()
    queue.enqueue_many((given, ys))
    given.zero_()
    first, label = queue.dequeue()
    torch.testing.assert_close(first, xs[0])
    rest, labels = queue.dequeue_many(2)
    torch.testing.assert_close(rest, xs[1:])
    assert label == 7 and labels.tolist() == [8, 9] and queue.size() == 0


def test_only_the_head_of_a_line_proceeds() -> None:
    queue = numbers()
    many, batch = in_thread(lambda: queue.dequeue_many(3, timeout=60))
    waits(queue, "dequeue", 1)
    one, element = in_thread(lambda: queue.dequeue(timeout=60))
    waits(queue, "dequeue", 2)
    queue.enqueue_many([1, 2])
    assert queue.size() == 0 and "2 more taken for a batch" in repr(queue) and not batch and not element
    queue.enqueue(3), queue.enqueue(4)
    many.join(60), one.join(60)
    assert batch[0].tolist() == [1, 2, 3] and element == [4]


def test_what_a_batch_had_taken_is_put_back_when_its_time_is_over(machine: Machine) -> None:
    queue = numbers(given=[1.0, 2.0, 3.0])
    with pytest.raises(
        DeadlineExceeded, match=r"dequeue of 5 on queue q did not end within 0.3 s: 0 of 10 elements, 3"
    ):
        queue.dequeue_many(5, timeout=0.3)
    waits(queue, "dequeue", 0, machine)
    assert queue.size() == 3 and queue.dequeue_many(3).tolist() == [1, 2, 3]


def test_rows_that_were_put_in_time_stay_and_the_error_counts_them(machine: Machine) -> None:
    queue = numbers(2)
    with pytest.raises(DeadlineExceeded, match=r"on queue q did not end within 0.3 s") as raised:
        queue.enqueue_many([1, 2, 3], timeout=0.3)
    assert raised.value.enqueued == 2 and queue.size() == 2
    thread, found = in_thread(lambda: queue.enqueue_many([4, 5]))
    waits(queue, "enqueue", 1, machine)
    assert queue.dequeue() == 1
    queue.close(cancel_pending_enqueues=True)
    thread.join(60)
    assert isinstance(found[0], Cancelled) and found[0].enqueued == 1
    assert queue.dequeue_up_to(9).tolist() == [2, 4]


def test_a_closed_queue_gives_what_is_left_or_says_how_much_that_is() -> None:
    queue = numbers(given=[1.0, 2.0, 3.0])
    queue.close()
    with pytest.raises(OutOfRange, match=r"q is closed and has insufficient elements \(requested 5, current size 3\)"):
        queue.dequeue_many(5)
    with pytest.raises(QueueClosed, match=r"is closed \(3 of 10 elements\)"):
        queue.enqueue_many([4.0])
    queue.close(cancel_pending_enqueues=True)
    assert queue.dequeue_up_to(5).tolist() == [1, 2, 3]
    with pytest.raises(OutOfRange):
        queue.dequeue_up_to(5)
    assert queue.dequeue_many(0).shape == queue.dequeue_up_to(0).shape == (0,)
    queue.enqueue_many(torch.empty(0))


def test_a_close_ends_a_batch_that_waits() -> None:
    for up_to in (True, False):
        queue = numbers(given=[1.0, 2.0])
        take = queue.dequeue_up_to if up_to else queue.dequeue_many
        thread, found = in_thread(lambda take=take: take(3))
        waits(queue, "dequeue")
        queue.close()
        thread.join(60)
        assert found[0].tolist() == [1, 2] if up_to else isinstance(found[0], OutOfRange)
        assert queue.size() == (0 if up_to else 2)


def refused_without_shapes() -> None:
    tfnb.FIFOQueue(3, torch.float32, name="free").enqueue_many(torch.ones(2, 3))


def refused_batch_without_shapes() -> None:
    tfnb.FIFOQueue(3, torch.float32, name="free").dequeue_many(2)


def refused_batch_of_sizes_that_vary() -> None:
    tfnb.FIFOQueue(3, torch.float32, (None,), name="lines").dequeue_up_to(2)


def refused_rows_of_another_shape() -> None:
    tfnb.FIFOQueue(3, torch.float32, (2,)).enqueue_many(torch.ones(2, 3))


def refused_tensors_of_different_lengths() -> None:
    queue = tfnb.FIFOQueue(3, [torch.float32, torch.float32], [(), ()])
    queue.enqueue_many((torch.ones(2), torch.ones(3)))


def refused_batch_without_rows() -> None:
    numbers().enqueue_many(torch.tensor(1.0))


def refused_count() -> None:
    numbers().dequeue_many(-1)


def refused_count_that_is_a_tensor() -> None:
    numbers().dequeue_up_to(torch.tensor(2))  # type: ignore[arg-type]


def refused_dtype_of_a_batch() -> None:
    numbers().enqueue_many(torch.ones(2, dtype=torch.float64))


def refused_minimum() -> None:
    tfnb.RandomShuffleQueue(3, 3, torch.float32)


def refused_padding_without_shapes() -> None:
    tfnb.PaddingFIFOQueue(3, torch.float32, None)


def refused_priority_alone() -> None:
    tfnb.PriorityQueue(3, torch.float32, ()).enqueue(1)


def refused_priority_that_is_a_fraction() -> None:
    tfnb.PriorityQueue(3, torch.float32, ()).enqueue((torch.tensor(0.5), 1.0))


ILL_MADE: list[Callable[[], Any]] = [
    lambda: tfnb.FIFOQueue(2.5, torch.float32),  # type: ignore[arg-type]
    lambda: tfnb.RandomShuffleQueue(None, 1, torch.float32),  # type: ignore[arg-type]
    lambda: tfnb.RandomShuffleQueue(3, "1", torch.float32),  # type: ignore[arg-type]
    lambda: tfnb.FIFOQueue(3, "float32"),  # type: ignore[arg-type]
    lambda: tfnb.FIFOQueue(3, torch.float32, (-1,)),
    lambda: tfnb.FIFOQueue(3, torch.float32, 5),
    lambda: tfnb.FIFOQueue(3, [torch.float32], (2,)),
    lambda: tfnb.PriorityQueue(3, [torch.float32, torch.int64], 5),
    lambda: tfnb.Barrier(torch.float32, 5, name="queue q"),
    lambda: tfnb.SparseConditionalAccumulator(torch.float32, (4.0, 2)),  # type: ignore[arg-type]
    lambda: numbers().enqueue("1"),
    lambda: numbers().dequeue(timeout=float("nan")),
    lambda: numbers().close(timeout="soon"),  # type: ignore[arg-type]
    lambda: tfnb.FIFOQueue(3, torch.int64, (2,)).enqueue([1.5, 2.5]),
    lambda: tfnb.FIFOQueue(3, torch.int64, ()).enqueue_many([2.5]),
]


@pytest.mark.parametrize("number", range(len(ILL_MADE)))
@pytest.mark.parametrize("recorded", [False, True], ids=["at once", "recorded"])
def test_what_makes_no_queue_or_element_is_refused(number: int, recorded: bool) -> None:
    with (
        pytest.raises(InvalidArgument, match=r"queue|timeout is in seconds"),
        tfnb.record() if recorded else nullcontext(),
    ):
        ILL_MADE[number]()


REFUSED = {name: value for name, value in list(globals().items()) if name.startswith("refused_")}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("recorded", [False, True], ids=["at once", "recorded"])
def test_what_does_not_fit_is_refused_and_says_which_queue(name: str, recorded: bool) -> None:
    with pytest.raises(InvalidArgument, match="queue ") as raised:
        if recorded:
            with tfnb.record():
                REFUSED[name]()
        else:
            REFUSED[name]()
    assert isinstance(raised.value, ShapeError) == any(word in name for word in ("shape", "lengths", "rows")) or (
        "without_shapes" in name
    )


def test_a_queue_is_iterated_over_until_it_is_closed_and_empty() -> None:
    queue = numbers(2)

    def produce() -> None:
        for n in range(20):
            queue.enqueue(float(n))
        queue.close()

    thread, _ = in_thread(produce)
    assert [x.item() for x in queue] == list(range(20))
    thread.join(60)


# -- the kinds --------------------------------------------------------------------------------------------------------


def test_shuffled_elements_leave_the_least_until_the_close() -> None:
    queue = tfnb.RandomShuffleQueue(10, 3, torch.int64, (), seed=5)
    queue.enqueue_many(range(4))
    first = queue.dequeue().item()
    with pytest.raises(DeadlineExceeded):
        queue.dequeue(timeout=0.05)
    thread, found = in_thread(lambda: queue.dequeue_many(3))
    waits(queue, "dequeue")
    queue.close()
    thread.join(60)
    assert sorted([first, *found[0].tolist()]) == [0, 1, 2, 3]


def test_the_order_of_shuffled_elements_is_that_of_the_seed() -> None:
    def order(seed: int | None) -> list[int]:
        queue = tfnb.RandomShuffleQueue(100, 0, torch.int64, (), seed=seed)
        queue.enqueue_many(range(50))
        return queue.dequeue_many(50).tolist()  # type: ignore[no-any-return]

    assert order(1) == order(1) and order(1) != order(2) and order(None) != order(None)
    assert sorted(order(1)) == list(range(50)) != order(1)


def test_each_element_is_as_likely_as_the_others() -> None:
    queue, counts = tfnb.RandomShuffleQueue(100, 0, torch.int64, (), seed=7), [0] * 5
    for _ in range(2000):
        queue.enqueue_many(range(5))
        counts[queue.dequeue()] += 1
        queue.dequeue_many(4)
    assert all(abs(count - 400) < 90 for count in counts)  # five standard deviations


def test_batches_of_several_lengths_are_filled_up_along_each_axis() -> None:
    queue = tfnb.PaddingFIFOQueue(10, [torch.int64, torch.float32], [(None, None), ()])
    for rows, columns in ((1, 3), (2, 1), (0, 0)):
        queue.enqueue((torch.full((rows, columns), 5), float(rows)))
    filled, heights = queue.dequeue_up_to(3, timeout=60)
    expected = torch.zeros(3, 2, 3, dtype=torch.int64)
    expected[0, 0, :], expected[1, :, 0] = 5, 5
    torch.testing.assert_close(filled, expected)
    assert heights.tolist() == [1, 2, 0] and queue.dequeue_many(0)[0].shape == (0, 0, 0)
    queue.enqueue((torch.ones(1, 2, dtype=torch.int64), 0.0))
    assert queue.dequeue()[0].shape == (1, 2), "one by itself is as it was"


def test_smaller_priorities_come_first_and_equal_ones_as_they_came() -> None:
    queue = tfnb.PriorityQueue(-1, torch.int64, ())
    priorities = torch.randint(-3, 3, (40,), generator=torch.Generator().manual_seed(1))
    queue.enqueue_many((priorities, torch.arange(40)))
    with pytest.raises(DeadlineExceeded):
        queue.dequeue_many(50, timeout=0.05)
    found = torch.cat([queue.dequeue_many(13)[1], queue.dequeue_many(27)[1]])
    assert found.tolist() == sorted(range(40), key=lambda n: int(priorities[n]))


# -- in graphs --------------------------------------------------------------------------------------------------------


def test_batches_in_a_graph() -> None:
    queue = tfnb.FIFOQueue(20, [torch.float32, torch.int64], [(3,), ()], name="rows")
    with tfnb.record() as g:
        x, y = tfnb.placeholder(torch.ones(4, 3)), tfnb.placeholder(torch.arange(4))
        put = queue.enqueue_many((x, y))
        a, b = queue.dequeue_many(3)
        total = (a * b[:, None]).sum()
        left, labels = queue.dequeue_up_to(5)
        both = (left.sum(1) * labels).sum()  # one symbol for the rows of both
        done = queue.close()
    assert total.shape == () and str(a.spec.shape[0]) == "3"
    session = tfnb.Session(g)
    session.run(put, {x: torch.ones(5, 3), y: torch.arange(5)})
    assert session.run(total) == 9 and queue.size() == 2
    session.run(done)
    assert session.run(both) == 3 * 7 and queue.size() == 0
    with pytest.raises(OutOfRange, match=r"(?s)rows is closed.*requested 3, current size 0.*node .* at .*line"):
        session.run(total)


def test_a_batch_that_is_recorded_shows_the_elements_that_come_next_and_leaves_them() -> None:
    queue = numbers(given=[1.0, 2.0, 3.0])
    with tfnb.record():
        two, more, enough = queue.dequeue_many(2) * 2, queue.dequeue_many(4), queue.dequeue_up_to(9) + 1
    assert two.sample.tolist() == [2, 4] and enough.sample.tolist() == [2, 3, 4]
    assert more.shape == (4,), "too few elements: no values"
    assert queue.size() == 3 and tfnb.run(two).tolist() == [2, 4]
    queue.close()
    assert tfnb.run(enough).tolist() == [4]


def test_what_was_fed_may_change_after_the_run() -> None:
    queue = tfnb.FIFOQueue(9, torch.float32, (2,), name="rows")
    with tfnb.record() as g:
        x, xs = tfnb.placeholder(torch.zeros(2), shape=(2,)), tfnb.placeholder(torch.zeros(3, 2))
        one, many = queue.enqueue(x), queue.enqueue_many(xs)
    given, rows = torch.ones(2), torch.ones(3, 2)
    session = tfnb.Session(g)
    session.run(one, {x: given}), session.run(many, {xs: rows})
    given.zero_(), rows.zero_()
    assert queue.dequeue_many(4).tolist() == [[1, 1]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
def test_large_elements_of_any_layout_are_copied_as_they_are(dtype: torch.dtype, layout: str) -> None:
    queue = tfnb.FIFOQueue(9, dtype, (200, 300), name="large")
    wide = (torch.randn(300, 600) > 0).to(dtype)
    layouts = {"plain": wide[:200, :300].contiguous(), "transposed": wide[:, :200].T, "strided": wide[:200, ::2]}
    x = layouts[layout]
    wanted = x.clone()
    queue.enqueue(x), queue.enqueue_many(torch.stack([x, x]))
    x.zero_()
    assert torch.equal(queue.dequeue(), wanted) and torch.equal(queue.dequeue_many(2), torch.stack([wanted] * 2))


def test_padded_batches_in_a_graph_have_sizes_that_vary() -> None:
    queue = tfnb.PaddingFIFOQueue(9, torch.float32, (None,), name="lines")
    with tfnb.record():
        sums = queue.dequeue_many(2).sum(1)
    for n in (1, 3, 0, 2):
        queue.enqueue(torch.ones(n))
    assert tfnb.run(sums).tolist() == [1, 3] and tfnb.run(sums).tolist() == [0, 2]


def test_a_recorded_operation_has_a_time_of_its_own() -> None:
    queue = numbers(2, given=[1.0])
    with tfnb.record() as g:
        put = queue.enqueue_many([2.0, 3.0], timeout=0.3)
        many = queue.dequeue_many(5, timeout=0.3)
    session = tfnb.Session(g)
    with pytest.raises(
        DeadlineExceeded, match=r"(?s)enqueue on queue q .*within 0.3 s: 2 of 2 elements.*node put at .*line"
    ) as e:
        session.run(put)
    assert e.value.enqueued == 1
    with pytest.raises(
        DeadlineExceeded, match=r"(?s)dequeue of 5 on queue q.*0 of 2 elements, 2 more taken.*node many at .*line"
    ):
        session.run(many)
    assert queue.dequeue_many(2).tolist() == [1, 2]


def test_a_saved_graph_keeps_the_kind_of_a_queue(tmp_path: Path) -> None:
    queue = tfnb.RandomShuffleQueue(9, 2, torch.float32, (), seed=4, name="pool")
    other = tfnb.PaddingFIFOQueue(9, torch.float32, (None,), name="lines")
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4), name="x")
        put, fill = queue.enqueue_many(x), other.enqueue(x)
        y, z = queue.dequeue_many(3), other.dequeue_many(2)
    g.save(tmp_path / "graph.json")
    again = tfnb.Graph.load(tmp_path / "graph.json")
    runs = [tfnb.Session(graph) for graph in (g, again)]
    given = torch.arange(8.0)
    for run in runs:
        run.run([put.name], {"x": given})
        run.run([fill.name], {"x": given[:1]}), run.run([fill.name], {"x": given[:3]})
    first, second = (run.run([y.name, z.name]) for run in runs)
    torch.testing.assert_close(first, second)
    kept = next(node.attrs["queue"] for node in again.nodes if "queue" in node.attrs)
    assert (kept.kind, kept.options) == ("shuffle", {"min_after_dequeue": 2, "seed": 4})


def test_an_aborted_step_puts_a_batch_back() -> None:
    queue, v = numbers(given=[1.0, 2.0, 3.0]), tfnb.Variable(torch.zeros(()), name="v")
    begun, go = threading.Event(), threading.Event()
    PAUSES.append((begun, go))
    with tfnb.record() as g:
        x = queue.dequeue_many(2).sum()
        put = v.assign(v.read() + torch.ops.tfnb_tests.batch_pause(x))
    begun.clear(), go.clear()
    session = tfnb.Session(g)
    thread, found = in_thread(lambda: session.run(put))
    assert begun.wait(60)
    v.assign_add(torch.ones(()))
    go.set()
    thread.join(60)
    assert isinstance(found[0], tfnb.errors.Aborted) and v.value() == 1
    assert queue.dequeue_many(3).tolist() == [1, 2, 3]


PAUSES: list[tuple[threading.Event, threading.Event]] = []


@torch.library.custom_op("tfnb_tests::batch_pause", mutates_args=())
def batch_pause(x: torch.Tensor) -> torch.Tensor:
    """x, once it may go on; recording does not wait."""
    begun, go = PAUSES[-1]
    if not begun.is_set() and threading.current_thread() is not threading.main_thread():
        begun.set()
        assert go.wait(60)
    return x.clone()


batch_pause.register_fake(torch.empty_like)


def rings_on_a_batch_that_its_own_step_fills_later(queue: Any) -> None:
    with tfnb.record() as g:
        x = queue.dequeue_many(3)
        put = queue.enqueue_many([1.0, 2.0, 3.0])
    tfnb.Session(g).run([x, put], timeout=60)


def rings_on_more_rows_than_there_is_room(queue: Any) -> None:
    with tfnb.record() as g:
        put = queue.enqueue_many(torch.arange(9.0))
        x = queue.dequeue_many(9)
    tfnb.Session(g).run([x, put], timeout=60)


@pytest.mark.parametrize(
    "ring", [rings_on_a_batch_that_its_own_step_fills_later, rings_on_more_rows_than_there_is_room]
)
def test_a_batch_that_nobody_can_fill_is_a_deadlock(
    ring: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfnb.state.waits, "LOOK", 0.05)
    queue = numbers(4)
    with pytest.raises(tfnb.errors.DeadlockError, match=r"(?s)nothing can make progress:.*queue q \(\d of 4 elements"):
        ring(queue)


@pytest.mark.parametrize("many", [False, True])
def test_what_a_step_both_puts_and_gives_is_two_tensors(many: bool) -> None:
    queues = [tfnb.FIFOQueue(10, torch.float32, (2,), name=name) for name in "ab"]
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3, 2)) if many else tfnb.placeholder(torch.ones(2), shape=(2,))
        y = x * 2
        puts = [queue.enqueue_many(y) if many else queue.enqueue(y) for queue in queues]
    given = torch.ones(3, 2) if many else torch.ones(2)
    found, *_ = tfnb.Session(graph).run([y, *puts], {x: given})
    found.add_(5)
    first, second = (queue.dequeue_many(3) if many else queue.dequeue() for queue in queues)
    first.add_(7)
    assert torch.equal(second, given * 2)


@settings(max_examples=60, deadline=None)
@given(
    puts=st.lists(st.integers(1, 9), min_size=1, max_size=6), takes=st.lists(st.integers(1, 9), max_size=9),
    width=st.sampled_from([1, 16, 2**14]), kind=st.sampled_from(["fifo", "padding"]),
)  # fmt: skip
def test_batches_of_any_lengths_are_the_rows_in_order_and_nobody_elses(
    puts: list[int], takes: list[int], width: int, kind: str
) -> None:
    queue = (tfnb.FIFOQueue if kind == "fifo" else tfnb.PaddingFIFOQueue)(-1, torch.float32, (width,))
    rows = torch.arange(float(sum(puts)))[:, None].expand(-1, width)
    for part in rows.split(puts):
        queue.enqueue_many(part)
    queue.close()
    found = [queue.dequeue_up_to(n) for n in takes if queue.size()] + (
        [queue.dequeue_up_to(99)] if queue.size() else []
    )
    assert torch.equal(torch.cat(found), rows)
    for place, batch in enumerate(found):
        batch.fill_(-place)
    assert all(torch.equal(batch, torch.full_like(batch, -place)) for place, batch in enumerate(found))
    assert all(b.untyped_storage().nbytes() <= 2 * b.numel() * 4 for b in found)
