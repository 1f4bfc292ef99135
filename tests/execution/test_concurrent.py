"""Steps at the same time, in threads: what they share is Variables and queues, and no write is lost."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.threads import at_once
from tfnb.errors import Aborted, Cancelled, DeadlineExceeded, InvalidArgument, OutOfRange
from tfnb.graph import variable_locks
from tfnb.graph.variable_locks import LOCKS
from tfnb.state import checkpoint

STEPS = 60


@pytest.fixture(autouse=True)
def turns() -> Iterator[None]:
    """Threads take turns more often than every 5 ms: more interleavings, less waiting."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def test_steps_of_one_graph_never_exchange_values() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = (x * 2).exp().log() / 2
        drawn = torch.rand(4) + y.sum() * 0
    session = tfnb.Session(graph, compile="off")
    draws: list[torch.Tensor] = []

    def work(k: int) -> Callable[[], None]:
        def steps() -> None:
            for place in range(250):
                rows = 1 + (place + k) % 5
                got, random = session.run([y, drawn], {x: torch.full((rows,), float(k))})
                torch.testing.assert_close(got, torch.full((rows,), float(k)))
                draws.append(random)

        return steps

    at_once(*(work(k) for k in range(4)))
    assert len({tuple(draw.tolist()) for draw in draws}) == 1000  # each run drew its own numbers


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [(tfnb.train.SGD(1.0), 2 * STEPS), (tfnb.train.Momentum(1.0, 1.0), STEPS * (2 * STEPS + 1))],
    ids=["plain", "with a slot"],
)
def test_updates_of_two_trainers_are_all_kept(rule: tfnb.train.Optimizer, wanted: int) -> None:
    weight = tfnb.Variable(torch.zeros(400_000), name="weight")  # long enough for two kernels to meet
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0), name="x", shape=())
        step = rule.minimize((weight * x).sum())  # the gradient is x, whatever the weight is
    sessions = [tfnb.Session(graph, compile="off"), tfnb.Session(graph, compile="off")]
    at_once(*(lambda s=s: [s.run(step, {x: 1.0}) for _ in range(STEPS)] for s in sessions))
    assert torch.equal(weight.value(), torch.full((400_000,), -float(wanted)))


def test_an_input_pipeline_training_and_evaluation_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(STEPS)]
    held = torch.randn(20, 6), torch.randint(3, (20,))
    twin = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    wanted = [F.cross_entropy(twin(held[0]), held[1]).item()]
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(twin(images), labels).backward()
        optimizer.step()
        wanted.append(F.cross_entropy(twin(held[0]), held[1]).item())

    queue = tfnb.FIFOQueue(2, [torch.float32, torch.int64], [(8, 6), (8,)], name="batches")
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(held[0], name="x"), tfnb.placeholder(held[1], name="y")
        one, one_label = tfnb.placeholder(batches[0][0], shape=(8, 6)), tfnb.placeholder(batches[0][1], shape=(8,))
        put, end = queue.enqueue([one, one_label]), queue.close()
        images, labels = queue.dequeue()
        train = tfnb.train.SGD(0.1).minimize(F.cross_entropy(model(images), labels))
        loss = F.cross_entropy(model(x), y)
    session = tfnb.Session(graph, compile="off")
    done, seen, trained = threading.Event(), [], []

    def feed() -> None:
        for image, label in batches:
            session.run(put, {one: image, one_label: label})
        session.run(end)

    def learn() -> None:
        try:
            while True:
                session.run(train)
                trained.append(1)
        except OutOfRange:
            done.set()

    def evaluate() -> None:
        while not done.is_set():
            seen.append(session.run(loss, {x: held[0], y: held[1]}).item())

    at_once(feed, learn, evaluate)
    assert len(trained) == STEPS and len(seen) > 1
    assert session.run(loss, {x: held[0], y: held[1]}).item() == pytest.approx(wanted[-1], rel=1e-4)
    low, high = min(wanted), max(wanted)
    assert all(low - 1e-4 <= value <= high + 1e-4 for value in seen)  # of weights of some step


LARGE = 50_000  # elements: long enough for two kernels to meet


def _sum(v: tfnb.Variable, x: torch.Tensor) -> object:
    return v.assign_add(x)


def _difference(v: tfnb.Variable, x: torch.Tensor) -> object:
    return v.assign_sub(-x)


def _scaled(v: tfnb.Variable, x: torch.Tensor) -> object:
    return v.assign(v - 2 * (-x * 0.5))


def _twice(v: tfnb.Variable, x: torch.Tensor) -> object:
    v.assign_add(x * 0.25)
    return v.assign_add(x * 0.75)


def _rows_added(v: tfnb.Variable, x: torch.Tensor) -> object:
    return v.scatter_add(torch.arange(LARGE), x.expand(LARGE))


def _elements(v: tfnb.Variable, x: torch.Tensor) -> object:
    return v.assign(v.read().index_put((torch.arange(LARGE),), x.expand(LARGE), accumulate=True))


def _in_a_branch(v: tfnb.Variable, x: torch.Tensor) -> object:
    return v.assign(tfnb.cond(x > 0, lambda: v + x, lambda: v - x))


def _in_a_loop(v: tfnb.Variable, x: torch.Tensor) -> object:
    _, total = tfnb.while_loop(lambda i, _: i < 4, lambda i, t: (i + 1, t + x / 4), (torch.tensor(0), v.read()))
    return v.assign(total)


def _optimizer_step_that_is_fetched(v: tfnb.Variable, x: torch.Tensor) -> object:
    step = tfnb.train.SGD(1.0).apply_gradients([(-x.expand(LARGE), v)])
    return step, v.read()  # of after the step, in the same step: no update in place


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
@pytest.mark.parametrize("update", [
    _sum, _difference, _scaled, _twice, _rows_added, _elements, _in_a_branch, _in_a_loop,
    _optimizer_step_that_is_fetched,
])  # fmt: skip
def test_reads_followed_by_writes_of_two_threads_are_all_kept(update: Callable[..., object], executor: str) -> None:
    v = tfnb.Variable(torch.zeros(LARGE), name="v", trainable=False)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0), name="x", shape=())
        step = update(v, x)
    session = tfnb.Session(graph, compile="off", executor=executor)
    session.run(step, {x: 1.0})
    at_once(*([lambda: [session.run(step, {x: 1.0}) for _ in range(STEPS // 2)]] * 2))
    assert torch.equal(v.value(), torch.full((LARGE,), float(STEPS + 1)))


def test_a_counter_gives_each_thread_numbers_of_its_own() -> None:
    counter = tfnb.Variable(torch.tensor(0), name="counter", trainable=False)
    with tfnb.record() as graph:
        before, after = counter.read(), counter.assign_add(1)
    session, seen = tfnb.Session(graph), []
    at_once(*([lambda: seen.extend(session.run([before, after]) for _ in range(300))] * 3))
    assert sorted(int(number) for _, number in seen) == list(range(1, 901))
    assert all(new == old + 1 for old, new in seen)


def test_writes_outside_of_a_recording_are_all_kept() -> None:
    v = tfnb.Variable(torch.zeros(LARGE), name="v")
    at_once(*([lambda: [v.assign_add(torch.ones(LARGE)) for _ in range(STEPS)]] * 2))
    assert torch.equal(v.value(), torch.full((LARGE,), 2.0 * STEPS))


def test_running_statistics_of_two_threads_count_every_batch() -> None:
    norm = nn.BatchNorm1d(64, momentum=0.01)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.zeros(4, 64), name="x")
        norm(x)
        step = tfnb.group(norm.running_mean, norm.running_var, norm.num_batches_tracked)
    session = tfnb.Session(graph, compile="off")
    at_once(*([lambda: [session.run(step, {x: torch.ones(4, 64)}) for _ in range(STEPS)]] * 2))
    assert norm.num_batches_tracked == 2 * STEPS
    torch.testing.assert_close(norm.running_mean, torch.full((64,), 1 - 0.99 ** (2 * STEPS)))
    torch.testing.assert_close(norm.running_var, torch.full((64,), 0.99 ** (2 * STEPS)))


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_a_snapshot_is_of_one_moment(executor: str) -> None:
    first, second = (tfnb.Variable(torch.zeros(LARGE), name=name, trainable=False) for name in "ab")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0), name="x", shape=())
        write = tfnb.group(first.assign(x.expand(LARGE)), second.assign(x.expand(LARGE)))
    with tfnb.record(graph):
        apart = (first.read() - second.read()).abs().max() + (first.max() - first.min())
    session, done = tfnb.Session(graph, compile="off", executor=executor), threading.Event()

    def writes() -> None:
        for number in range(3 * STEPS):
            session.run(write, {x: float(number)})
        done.set()

    def reads() -> None:
        while not done.is_set():
            gap, a, b = session.run([apart, first, second], isolation="snapshot")
            assert gap == 0 and torch.equal(a, b) and a.min() == a.max()

    at_once(writes, reads, reads)


def test_training_from_a_snapshot_writes_the_variables_themselves() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    twin = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    twin.load_state_dict(net.state_dict())
    data = torch.randn(5, 4)
    with tfnb.record() as graph:
        x = tfnb.placeholder(data, name="x")
        loss = net(x).square().mean()
        step = tfnb.train.Momentum(0.1, 0.9).minimize(loss)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    session = tfnb.Session(graph, compile="off")
    for _ in range(3):
        got, weight = session.run([loss, net[0].weight, step], {x: data}, isolation="snapshot")[:2]
        optimizer.zero_grad()
        wanted = twin(data).square().mean()
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(got, wanted.detach())
        torch.testing.assert_close(weight, twin[0].weight.detach())
    torch.testing.assert_close(net.state_dict(), twin.state_dict())


def test_isolation_that_does_not_exist_is_refused() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2))
        y = x + 1
    with pytest.raises(InvalidArgument, match="isolation is None or 'snapshot', not 'serial'"):
        tfnb.run(y, {x: torch.ones(2)}, isolation="serial")


def counter_step() -> tuple[tfnb.Session, torch.Tensor, torch.Tensor, torch.Tensor, tfnb.Variable]:
    counter = tfnb.Variable(torch.tensor(0.0), name="counter", trainable=False)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0), name="x", shape=())
        y, after = x * 2, counter.assign_add(x)
    return tfnb.Session(graph), x, y, after, counter


def test_a_step_in_parts_is_aborted_if_what_it_read_was_written_since() -> None:
    session, x, y, after, counter = counter_step()
    with session.step([y, after], [x]) as step:
        step.fetch(y, {x: 1.0})
        session.run(after, {x: 10.0})
        with pytest.raises(Aborted, match="another step wrote counter after this step read it; nothing was written"):
            step.fetch(after)
    assert counter.value() == 10
    with session.step([y, after], [x]) as step:
        assert step.fetch([y, after], {x: 1.0}) == [2, 11]
    assert counter.value() == 11


def test_training_from_a_snapshot_that_is_too_old_is_aborted() -> None:
    session, x, _, after, counter = counter_step()
    computes = session._steps._compute

    def beside(*args: object) -> object:  # another step writes while this one computes
        counter.assign(torch.tensor(5.0))
        return computes(*args)

    session._steps._compute = beside  # type: ignore[method-assign, assignment]
    with pytest.raises(Aborted, match="another step wrote counter"):
        session.run(after, {x: 1.0}, isolation="snapshot")
    assert counter.value() == 5


def test_a_step_that_waits_inside_is_aborted_if_what_it_read_was_written_since() -> None:
    total = tfnb.Variable(torch.tensor(0.0), name="total", trainable=False)
    queue = tfnb.FIFOQueue(2, [torch.float32], [()], name="numbers")
    with tfnb.record() as graph:
        add = total.assign_add(queue.dequeue()[0])
    session, errors = tfnb.Session(graph), []

    def learn() -> None:
        try:
            session.run(add, timeout=60)
        except Aborted as error:
            errors.append(str(error))

    waiting = threading.Thread(target=learn)
    waiting.start()
    while queue.machine is None or not queue.machine.lines["dequeue"]:  # until it waits, and holds nothing
        time.sleep(0.01)
    total.assign(torch.tensor(7.0))
    queue.enqueue(torch.tensor(1.0))
    queue.enqueue(torch.tensor(2.0))
    waiting.join(60)
    assert errors and "another step wrote total" in errors[0] and total.value() == 7
    assert queue.size() == 2 and session.run(add) == 8 and session.run(add) == 10  # what it took is in front again


def test_steps_of_two_models_do_not_wait_for_each_other_and_steps_of_one_model_do() -> None:
    _, x, _, after, counter = counter_step()
    other, y, _, more, another = counter_step()
    session = tfnb.Session(x.graph)
    with LOCKS.read(counter):
        at_once(lambda: other.run(more, {y: 1.0}, timeout=100))
        at_once(lambda: counter.value())  # readers share
        late = r"Variables that other steps use \(counter\), for"
        with pytest.raises(DeadlineExceeded, match=late):
            at_once(lambda: session.run(after, {x: 1.0}, timeout=1.0))
        closed, error = tfnb.Session(x.graph), list[BaseException]()
        waits = threading.Thread(target=lambda: error.extend(_raised(lambda: closed.run(after, {x: 1.0}))))
        waits.start()
        while not closed._steps.running:
            time.sleep(0.01)
        closed.close()
        waits.join(100)
        assert [type(found) for found in error] == [Cancelled]
    assert another.value() == 1 and counter.value() == 0
    session.run(after, {x: 1.0})
    assert counter.value() == 1


def _raised(call: Callable[[], object]) -> list[BaseException]:
    try:
        call()
    except BaseException as error:
        return [error]
    return []


@contextmanager
def long_step(variable: tfnb.Variable) -> Iterator[None]:
    """Another thread has a step that writes the Variable, for as long as the block takes."""
    held, free = threading.Event(), threading.Event()

    def step() -> None:
        with LOCKS.write(variable):
            held.set()
            free.wait(200)

    thread = threading.Thread(target=step, name="trainer")
    thread.start()
    assert held.wait(100)
    try:
        yield
    finally:
        free.set()
        thread.join(100)


def test_an_interrupt_while_something_waits_leaves_no_lock() -> None:
    session, x, _, after, counter = counter_step()
    for waits in (lambda: session.run(after, {x: 1.0}), counter.value, lambda: counter.assign(torch.tensor(9.0))):
        with long_step(counter), pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
            waits()
    at_once(lambda: session.run(after, {x: 1.0}, timeout=100))
    assert counter.value() == 1


def test_what_waits_for_a_long_step_has_a_deadline_and_says_who_holds_what(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session, x, _, after, counter = counter_step()
    text = r"counter did not become free within 0\.2 s: a step of thread trainer uses it"
    monkeypatch.setattr(variable_locks, "PATIENCE", 0.2)
    waits = [
        lambda: counter.value(timeout=0.2), lambda: session.run(after, {x: 1.0}, isolation="snapshot", timeout=0.2),
        lambda: counter.assign(torch.tensor(9.0)), lambda: session.restore(tmp_path / "saved"),
    ]  # fmt: skip
    session.save(tmp_path / "saved")
    with long_step(counter):
        for wait in waits:
            with pytest.raises(DeadlineExceeded, match=text):
                wait()
    assert counter.value() == 0


def test_threads_that_ask_for_more_inside_of_their_steps_never_wait_for_each_other() -> None:
    first, second = (tfnb.Variable(torch.tensor(0.0), name=name) for name in "ab")
    both, aborted = threading.Barrier(2), []

    def work(mine: tfnb.Variable, others: tfnb.Variable) -> Callable[[], None]:
        def steps() -> None:
            try:
                with LOCKS.write(mine):
                    both.wait(100)
                    mine.assign(torch.tensor(1.0))  # its own, again
                    others.value()
            except Aborted as error:
                aborted.append(str(error))

        return steps

    at_once(work(first, second), work(second, first))
    assert aborted and "waits for what this step holds" in aborted[0]


def test_a_checkpoint_written_while_training_is_of_one_step(tmp_path: Path) -> None:
    first, second = (tfnb.Variable(torch.zeros(LARGE), name=name, trainable=False) for name in "ab")
    with tfnb.record() as graph:
        step = tfnb.group(first.assign_add(1.0), second.assign_add(1.0))
    session, done = tfnb.Session(graph, compile="off"), threading.Event()

    def train() -> None:
        while not done.is_set():
            session.run(step)

    def save() -> None:
        for _ in range(10):
            session.save(tmp_path / "saved")
            a, b = checkpoint.load(tmp_path / "saved")[0].values()
            assert torch.equal(a, b)
        done.set()

    at_once(train, save)


@pytest.mark.parametrize("with_step", [False, True])
@pytest.mark.parametrize("callable_", [False, True])
def test_variables_that_are_fetched_are_of_one_moment(with_step: bool, callable_: bool) -> None:
    v, w = tfnb.Variable(torch.zeros(2000), name="v"), tfnb.Variable(torch.zeros(2000), name="w")
    with tfnb.record() as g:
        step = tfnb.group(v.assign_add(torch.ones(2000)), w.assign_add(torch.ones(2000)))
    session = tfnb.Session(g)
    fetches = [step, v, w] if with_step else [v, w]
    fetch = session.make_callable(fetches) if callable_ else lambda: session.run(fetches)
    torn = []

    def train() -> None:
        for _ in range(STEPS):
            session.run(step)

    def look() -> None:
        for _ in range(STEPS):
            *_, one, two = fetch()
            torn.append(not torch.equal(one, two) or len(one.unique()) > 1)

    at_once(train, train, look)
    assert len(torn) == STEPS and not any(torn)
