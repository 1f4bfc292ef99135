"""`tfnb.unordered`: what is promised, what is not, Hogwild that trains; `tfnb.races` finds what has no order."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.threads import at_once
from tfnb.graph.variable_locks import LOCKS

LONG = 400_000  # long enough for two kernels to meet
STEPS = 40


def stores(**options: bool) -> tuple[tfnb.Variable, list[tfnb.Operation], tfnb.Tensor]:
    """A Variable, writes of all-k tensors into it, and a read that takes no part in them."""
    v = tfnb.Variable(torch.zeros(LONG), name="v")
    with tfnb.record():
        with tfnb.unordered(**options):
            writes = [tfnb.group(v.assign(torch.full((LONG,), float(k)))) for k in range(2)]
        now = v.read()
    return v, writes, now


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_with_locking_nobody_sees_a_mixed_tensor(executor: str) -> None:
    v, writes, now = stores(use_locking=True)
    session = tfnb.Session(now.graph, executor=executor, compile="off")
    mixed: list[torch.Tensor] = []

    def read() -> None:
        for _ in range(STEPS):
            for seen in (session.run(now), v.value()):
                if seen.min() != seen.max():
                    mixed.append(seen)

    at_once(read, *(lambda w=w: [session.run(w) for _ in range(STEPS)] for w in writes))
    assert not mixed


def test_without_locking_two_writes_may_mix() -> None:
    v, writes, now = stores()
    session = tfnb.Session(now.graph, compile="off")
    end, found = time.monotonic() + 60, threading.Event()

    def write(op: tfnb.Operation) -> None:
        while not found.is_set() and time.monotonic() < end:
            session.run(op)

    def read() -> None:
        while not found.is_set() and time.monotonic() < end:
            seen = v.storage.clone()
            if seen.min() != seen.max():
                found.set()

    at_once(read, *(lambda w=w: write(w) for w in writes))
    assert found.is_set()


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
@pytest.mark.parametrize("kind", ["assign_add", "scatter_add", "SGD"])
def test_updates_under_locks_are_all_kept(kind: str, executor: str) -> None:
    v = tfnb.Variable(torch.zeros(LONG // 4), name="v")
    ones = torch.ones(LONG // 4)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0), name="x", shape=())
        with tfnb.unordered(use_locking=True):
            if kind == "SGD":
                step = tfnb.train.SGD(1.0).minimize(-(v * x).sum())
            else:
                rows = (torch.arange(LONG // 4),) if kind == "scatter_add" else ()
                step = tfnb.group(getattr(v, kind)(*rows, ones * x))
    session = tfnb.Session(graph, executor=executor, compile="off")
    at_once(*([lambda: [session.run(step, {x: 1.0}) for _ in range(STEPS)]] * 3))
    assert torch.equal(v.value(), 3.0 * STEPS * ones)


def test_rows_added_without_locks_to_rows_apart_are_all_kept() -> None:
    table = tfnb.Variable(torch.zeros(8, 50_000), name="table")
    with tfnb.record() as graph:
        row = tfnb.placeholder(torch.tensor([0]), name="row", shape=(1,))
        with tfnb.unordered():
            step = tfnb.group(table.scatter_add(row, torch.ones(1, 50_000)))
    session = tfnb.Session(graph, compile="off")
    at_once(*(lambda k=k: [session.run(step, {row: [k]}) for _ in range(STEPS)] for k in range(4)))
    assert torch.equal(table.value(), torch.cat([torch.full((4, 50_000), float(STEPS)), torch.zeros(4, 50_000)]))


def test_a_free_step_waits_for_nobody_and_an_ordered_one_does() -> None:
    v = tfnb.Variable(torch.zeros(3), name="v")
    with tfnb.record():
        with tfnb.unordered():
            free = tfnb.group(v.assign_add(torch.ones(3)))
        kept = tfnb.group(v.assign_add(torch.ones(3)))
    with LOCKS.write(v):
        at_once(lambda: tfnb.run(free))
        with pytest.raises(tfnb.errors.DeadlineExceeded):
            at_once(lambda: tfnb.run(kept, timeout=0.2))
    assert v.value().tolist() == [1, 1, 1]


@pytest.mark.parametrize("compile", ["off", pytest.param("now", marks=pytest.mark.slow)])
def test_hogwild_trains(compile: str) -> None:
    torch.manual_seed(0)
    table, head = nn.EmbeddingBag(20, 8, mode="sum", sparse=True), nn.Linear(8, 2)
    words = torch.randint(20, (512, 5))
    labels = (words % 2).sum(1).gt(2).long()
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(words[:16], name="x"), tfnb.placeholder(labels[:16], name="y")
        loss = F.cross_entropy(head(table(x)), y)
        with tfnb.unordered():
            train = tfnb.train.SGD(0.1).minimize(loss)
    session = tfnb.Session(graph, compile=compile)

    def work(k: int) -> None:
        for _ in range(15):
            for at in range(k * 128, k * 128 + 128, 16):
                session.run(train, {x: words[at : at + 16], y: labels[at : at + 16]})

    before = session.run(loss, {x: words, y: labels})
    session.run(train, {x: words[:16], y: labels[:16]})  # what is compiled is compiled before the threads wait for it
    at_once(*(lambda k=k: work(k) for k in range(4)))
    after = session.run(loss, {x: words, y: labels})
    assert after < 0.6 * before, (before, after)


def test_what_follows_neither_sees_nor_pulls_an_update() -> None:
    v = tfnb.Variable(torch.zeros(()), name="v")
    with tfnb.record():
        with tfnb.unordered():
            more = v.assign_add(torch.ones(()))
            inside = v * 2
        after = v * 3
    assert (float(inside.sample), float(after.sample), float(more.sample)) == (0, 0, 1)
    assert [float(tfnb.run(x)) for x in (inside, after, more, after)] == [0, 0, 1, 3]


# -- races ----


def test_planted_races_are_found_with_both_lines() -> None:
    v, w = tfnb.Variable(torch.zeros(2), name="v"), tfnb.Variable(torch.zeros(2), name="w")
    with tfnb.record() as graph:
        with tfnb.unordered():
            one = v.assign_add(torch.ones(2))
            two = v.assign(torch.ones(2))
        seen = v.read() * 2
        kept = w.assign_add(torch.ones(2))
        later = w * 2
    shown = [repr(race) for race in tfnb.races(graph)]
    lines = [node.source.line for node in (one.node, two.node, seen.node) if node.source is not None]
    assert len(lines) == 3 and all(text.startswith("v: ") for text in shown)
    assert any(f"line {lines[0]}" in text and f"line {lines[1]}" in text for text in shown)
    assert any(f"line {lines[2]}" in text for text in shown)
    assert tfnb.races([kept, later]) == [] and tfnb.races(kept, later, kept) == []
    assert {(r.first.op, r.second.op) for r in tfnb.races(two, seen)} == {("tfnb.assign", "tfnb.read")}


def test_hogwild_steps_race_and_those_with_locks_do_not() -> None:
    model = nn.Linear(3, 1)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2, 3))
        loss = model(x).sum()
        with tfnb.unordered():
            free = tfnb.train.Momentum(0.1).minimize(loss)
        with tfnb.unordered(use_locking=True):
            locked = tfnb.train.SGD(0.1).minimize(loss)
        ordered = tfnb.train.SGD(0.1).minimize(loss)
    assert tfnb.races(free) == [], "an update depends on what it reads"
    assert {race.variable.name for race in tfnb.races(free, free)} >= {"weight", "bias"}
    assert {race.variable.name for race in tfnb.races(free, ordered)} == {"weight", "bias"}
    assert tfnb.races(locked, locked) == tfnb.races(ordered, ordered, loss) == []


@pytest.mark.parametrize("trial", range(8))  # the two may miss each other
def test_a_commit_that_goes_before_a_waiting_step_is_waited_for(trial: int) -> None:
    """One holds v, a second one waits for it, and a third one takes it within its own step: one after the other."""
    v, w = tfnb.Variable(torch.zeros(()), name="v"), tfnb.Variable(torch.zeros(()), name="w")
    inside, most, held, go = [], [], threading.Event(), threading.Event()

    def first() -> None:
        with LOCKS.write(v):
            held.set()
            assert go.wait(20)

    def use() -> None:
        with LOCKS.write(v):
            inside.append(1)
            time.sleep(0.02)  # the other one would come now
            most.append(len(inside))
            inside.pop()

    def second() -> None:
        assert held.wait(20)
        use()

    def third() -> None:
        with LOCKS.write(w):
            waits_until(2)
            threading.Timer(0.03, go.set).start()
            use()

    def waits_until(count: int) -> None:
        end = time.monotonic() + 20
        while sum(v.key in hold.access.used and hold.token.locked() for hold in LOCKS.holds) < count:
            assert time.monotonic() < end
            time.sleep(0.001)

    at_once(first, second, third)
    assert most == [1, 1]
