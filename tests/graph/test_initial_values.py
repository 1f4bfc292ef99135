"""Initial values that depend on each other, Variables without a value, and containers that are dropped during steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tfnb
from tfnb.errors import FailedPrecondition, InvalidArgument, NotFound, ShapeError, StepAborted


def lazy(make: Callable[[], torch.Tensor], name: str, **more: object) -> tfnb.Variable:
    return tfnb.Variable(make, shape=(2,), lazy_init=True, name=name, **more)


def test_a_chain_made_in_reverse_order_is_initialised_in_order() -> None:
    c = lazy(lambda: b.value() + b.value(), "c")
    b = lazy(lambda: a * 10, "b")
    a = tfnb.Variable(torch.tensor([1.0, 2.0]), lazy_init=True, name="a")
    with pytest.raises(FailedPrecondition, match=r"uninitialized value c .*tfnb.initialize\(c\)"):
        c.value()
    assert tfnb.initialize(c) == 1 and a.initialized and b.initialized
    assert c.value().tolist() == [20, 40]
    with tfnb.record() as graph:
        total = (a + b + c).sum()
    assert tfnb.initialize(graph) == 0 and tfnb.run(total) == 93
    a.assign([5.0, 5.0])
    assert tfnb.initialize(b, c) == 2, "anew, from what is there now"
    assert (a.value().tolist(), c.value().tolist()) == ([5, 5], [100, 100])


def test_a_value_of_one_that_waits_for_its_own_makes_it() -> None:
    base = tfnb.Variable(torch.ones(2), lazy_init=True, name="base")
    later = tfnb.Variable(base, lazy_init=True, name="later")
    assert later.spec == base.spec and not base.initialized
    now = tfnb.Variable(lambda: later + 1, name="now")
    assert now.value().tolist() == [2, 2] and base.initialized and later.initialized


def test_a_cycle_is_listed_and_changes_nothing() -> None:
    a = lazy(lambda: b + 1, "a")
    b = lazy(lambda: c + 1, "b")
    c = lazy(lambda: a + 1, "c")
    with pytest.raises(InvalidArgument, match="depend on each other: b -> c -> a -> b"):
        tfnb.initialize(b)
    assert not (a.initialized or b.initialized or c.initialized)


def test_what_cannot_be_initialised_says_why() -> None:
    given = tfnb.Variable(torch.ones(2), name="given")
    with pytest.raises(FailedPrecondition, match="given does not keep its initial value"):
        given.initialize()
    wrong = lazy(lambda: torch.ones(3), "wrong")
    with pytest.raises(ShapeError, match=r"float32\[3\] to variable wrong"):
        wrong.initialize()
    count = tfnb.Variable(3, name="count")
    count.assign_add(4)
    count.initialize()
    assert count.value() == 3 and count.dtype == torch.int64


def test_what_a_partial_restore_leaves_out_is_named(tmp_path: Path) -> None:
    kept, left = tfnb.Variable(torch.ones(2), name="kept"), tfnb.Variable(torch.ones(2), name="left")
    with tfnb.record() as small:
        kept.read()
    tfnb.Session(small).save(tmp_path / "v")
    with tfnb.record() as graph:
        y = tfnb.group(kept + left, name="y")
    graph.save(tmp_path / "g")
    session = tfnb.Session(tfnb.Graph.load(tmp_path / "g")).restore(tmp_path / "v", strict=False)
    with pytest.raises(FailedPrecondition, match="uninitialized value left"):
        session.run(y.name)


def test_a_dropped_variable_has_its_initial_value_again_and_is_listed_again() -> None:
    rate = tfnb.Variable(0.5, container="dropped", name="rate")
    rate.assign(0.1)
    tfnb.reset("dropped")
    with pytest.raises(NotFound, match="was reset at"):
        rate.value()
    tfnb.initialize(rate)
    assert rate.value() == 0.5
    assert [(e.name, e.nbytes) for e in tfnb.containers("dropped")] == [("rate", 4)]


def test_steps_count_as_access() -> None:
    v = tfnb.Variable(torch.zeros(2), container="seen", name="v")
    with tfnb.record():
        y = v * 2
    (entry,) = tfnb.containers("seen")
    assert entry.used is None
    before = time.time()
    tfnb.run(y)
    (entry,) = tfnb.containers("seen")
    assert entry.used is not None and before <= entry.used <= time.time()


def test_a_reset_ends_steps_that_compute_within_a_second_and_nothing_is_written() -> None:
    v = tfnb.Variable(torch.zeros(()), container="busy", name="v")
    with tfnb.record() as graph:
        n = tfnb.placeholder(torch.tensor(1), name="n", shape=())
        start_at = (torch.tensor(0), v.read())
        last = tfnb.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, torch.sin(x) + 1e-9), start_at)
        step = tfnb.group(v.assign(last[1]))
    session = tfnb.Session(graph, compile="off")
    ended: list[tuple[type, float]] = []

    def work() -> None:
        try:
            session.run(step, {n: 10_000_000})
        except BaseException as error:
            ended.append((type(error), time.monotonic()))

    threads = [threading.Thread(target=work) for _ in range(8)]  # one computes, the others wait for it
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    start = time.monotonic()
    tfnb.reset("busy")
    for thread in threads:
        thread.join(60)
    assert len(ended) == 8 and {kind for kind, _ in ended} <= {StepAborted, NotFound}
    assert StepAborted in {kind for kind, _ in ended} and max(at for _, at in ended) - start < 5.0  # alone: < 1 s
    assert v.version == 0
