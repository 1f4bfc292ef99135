"""Containers: shared names, the list of what lives where, and resets."""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import pytest
import torch

import tfnb
from tests.state.test_queues import until
from tfnb.errors import FailedPrecondition, InvalidArgument, NotFound, StepAborted

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


def queue(**where: Any) -> tfnb.FIFOQueue:
    return tfnb.FIFOQueue(3, torch.float32, (), **where)


def test_a_container_is_shared_by_graphs_and_sessions() -> None:
    with tfnb.container("shared"):
        first, line = tfnb.Variable(torch.zeros(2), shared_name="w"), queue(shared_name="line")
    with tfnb.record("one"):
        add, put = first.assign_add(torch.ones(2)), line.enqueue(torch.tensor(7.0))
    again = tfnb.Variable(torch.ones(2), container="shared", shared_name="w")
    with tfnb.record("two") as two:
        value, taken = again * 2, queue(container="shared", shared_name="line").dequeue()
    tfnb.run([add, put])
    with tfnb.Session(two) as session:
        assert session.run(value).tolist() == [2.0, 2.0] and session.run(taken) == 7.0
    assert again is first and queue(container="shared", shared_name="line") is line
    assert tfnb.Session.reset(["shared"]) == 2


def test_a_name_in_another_container_is_another_one() -> None:
    with tfnb.container("a"):
        inside = tfnb.Variable(1.0, shared_name="n")
        with tfnb.container("b"):
            deeper = tfnb.Variable(2.0, shared_name="n")
        explicit = tfnb.Variable(3.0, shared_name="n", container="c")
    outside = tfnb.Variable(4.0, shared_name="n of nobody")
    assert [v.value().item() for v in (inside, deeper, explicit, outside)] == [1.0, 2.0, 3.0, 4.0]
    assert [v.container for v in (inside, deeper, explicit, outside)] == ["a", "b", "c", ""]
    assert tfnb.reset("a", "b", "c") == 3


@pytest.mark.parametrize("make", [
    lambda: queue(shared_name="x"),
    lambda: tfnb.Variable(torch.zeros(3), shared_name="x"),
    lambda: tfnb.Variable(torch.zeros(2, dtype=torch.float64), shared_name="x"),
], ids=["a queue", "another shape", "another dtype"])  # fmt: skip
def test_a_shared_name_is_not_opened_as_something_else(make: Any) -> None:
    with tfnb.container("mixed"):
        held = tfnb.Variable(torch.ones(2), shared_name="x")
        with pytest.raises(InvalidArgument, match=r"'x' of container 'mixed' is a Variable float32\[2\], not a "):
            make()
    assert held.value().tolist() == [1.0, 1.0] and tfnb.reset("mixed") == 1


@pytest.mark.parametrize("make", [
    lambda: tfnb.FIFOQueue(4, torch.float32, (), shared_name="x"),
    lambda: tfnb.FIFOQueue(3, torch.int64, (), shared_name="x"),
    lambda: tfnb.FIFOQueue(3, [torch.float32], [()], shared_name="x"),
    lambda: tfnb.PaddingFIFOQueue(3, torch.float32, (), shared_name="x"),
    lambda: tfnb.ConditionalAccumulator(torch.float32, (), shared_name="x"),
    lambda: tfnb.Variable(0.0, shared_name="x"),
], ids=["capacity", "dtype", "form", "kind", "accumulator", "variable"])  # fmt: skip
def test_a_queue_of_a_shared_name_is_not_opened_as_something_else(make: Any) -> None:
    with tfnb.container("queues"):
        held = queue(shared_name="x")
        with pytest.raises(InvalidArgument, match=r"x.* of (container 'queues' is|this shared name)"):
            make()
        held.enqueue(1.0)
        assert queue(shared_name="x").dequeue().item() == 1.0
    tfnb.reset("queues")


def test_the_list_tells_owner_bytes_and_last_use() -> None:
    with tfnb.container("listed"):
        w, line = tfnb.Variable(torch.zeros(5), name="w"), queue(name="line")
        other = tfnb.SparseConditionalAccumulator(torch.float32, (9, 2), name="rows")
    line.enqueue_many([1.0, 2.0])
    w.assign(torch.ones(5))
    first, second, third = tfnb.containers("listed")
    assert (first.name, first.kind, first.nbytes) == ("line", "FIFOQueue", 8)
    assert (second.name, second.kind, second.nbytes) == ("rows", "SparseConditionalAccumulator", 0)
    assert (third.name, third.kind, third.nbytes) == ("w", "Variable", 20)
    assert first.used is not None and third.used is not None and second.used is None
    assert threading.current_thread().name in first.owner and first.container == "listed" and other.count() == 0
    assert {entry for entry in tfnb.containers() if entry.container == "listed"} == {first, second, third}
    del w, line, other
    gc.collect()
    assert tfnb.containers("listed") == []


def test_what_was_reset_says_who_did_it_until_it_has_a_value_again() -> None:
    with tfnb.container("gone"):
        w, line = tfnb.Variable(torch.ones(2), name="w", shared_name="w"), queue(name="line")
    with tfnb.record() as graph:
        double, take = 2 * w, line.dequeue()
        add = w.assign_add(torch.ones(2))
    session = tfnb.Session(graph)
    for _ in range(3):
        session.run(add)
    assert tfnb.reset("gone") == 2 and tfnb.containers("gone") == []
    why = r"container 'gone' was reset at \d\d:\d\d:\d\d by process \d+, thread "
    why += re.escape(threading.current_thread().name)
    for fetch, name in ((double, "variable w"), (add, "variable w"), (take, "queue line")):
        with pytest.raises(NotFound, match=rf"{name} .*{why}"):
            session.run(fetch)
    with pytest.raises(NotFound, match=why):
        w.value()
    with pytest.raises(NotFound, match=why):
        line.enqueue(1.0)
    with tfnb.container("gone"):
        assert tfnb.Variable(torch.zeros(2), shared_name="w") is not w  # a new one
    w.assign(torch.tensor([5.0, 5.0]))
    assert session.run(double).tolist() == [10.0, 10.0] and session.run(add).tolist() == [6.0, 6.0]
    tfnb.reset("gone")
    with pytest.raises(NotFound, match="container 'gone' has nothing"):
        tfnb.reset("gone")


def test_a_reset_ends_the_steps_that_wait_for_its_queues() -> None:
    with tfnb.container("busy"):
        line = queue(name="line")
    with tfnb.record() as graph:
        take = line.dequeue()
    found: list[BaseException] = []

    def work() -> None:
        try:
            tfnb.Session(graph).run(take, timeout=120)
        except StepAborted as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    until(lambda: line.machine is not None and len(line.machine.lines["dequeue"]) == 8, 120)
    assert tfnb.reset("busy") == 1
    for thread in threads:
        thread.join(60)
    assert len(found) == 8 and all("container 'busy' was reset" in str(error) for error in found)


def test_initial_values_depend_on_other_variables() -> None:
    a = tfnb.Variable(torch.tensor([1.0, 2.0]), name="a")
    b = tfnb.Variable(a, name="b")
    c = tfnb.Variable(lambda: b.value() * 10, name="c")
    a.assign(torch.zeros(2))
    assert b.value().tolist() == [1.0, 2.0] and c.value().tolist() == [10.0, 20.0]
    late = tfnb.Variable(torch.zeros(2), name="late", lazy_init=True)
    with pytest.raises(FailedPrecondition, match="Attempting to use uninitialized value late"):
        late.value()
    d = tfnb.Variable(lambda: late.value() + 1, name="d")  # its value is made first
    assert d.value().tolist() == [1.0, 1.0] and late.initialized
