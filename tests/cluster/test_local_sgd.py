"""Tasks that take steps on their own and average what they hold: `tfnb.train.LocalSGD`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.cluster.conftest import KillingCallback, until
from tests.cluster.test_cuts import Counters
from tests.cluster.test_faults import DROPPED, Interrupter
from tfnb.errors import InvalidArgument, Unimplemented
from tfnb.passes.microbatches import divide
from tfnb.train import LocalSGD

ROWS, BATCH = 30, 8  # of which the last batch of a pass has 6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 3, dtype=torch.float64, generator=gen), torch.randint(0, 2, (ROWS,), generator=gen)


def by_hand(tasks: int, every: int, epochs: int) -> list[torch.Tensor]:
    """The same in plain torch: copies of the model and the optimizer, and means by rows at meetings."""
    models = [net() for _ in range(tasks)]
    rules = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    x, y = data()
    batches = [(start, min(start + BATCH, ROWS)) for _ in range(epochs) for start in range(0, ROWS, BATCH)]
    for first in range(0, len(batches), every):
        taken = [0] * tasks
        for start, stop in batches[first : first + every]:
            for task, (a, b) in enumerate(divide(stop - start, tasks)):
                rules[task].zero_grad()
                F.cross_entropy(models[task](x[start + a : start + b]), y[start + a : start + b]).backward()
                rules[task].step()
                taken[task] += b - a
        for tensors in zip(*(state_of(model, rule) for model, rule in zip(models, rules, strict=True)), strict=True):
            if tensors[0].dtype.is_floating_point:
                mean = sum(tensor * rows for tensor, rows in zip(tensors, taken, strict=True)) / sum(taken)
                for tensor in tensors:
                    tensor.copy_(mean)
    return [tensor.clone() for tensor in models[0].state_dict().values()]


def state_of(model: nn.Module, rule: torch.optim.Optimizer) -> list[torch.Tensor]:
    slots = [slot["momentum_buffer"] for slot in rule.state.values()]
    return [*model.state_dict().values(), *slots]


def fitted(name: str, **options: Any) -> list[torch.Tensor]:
    model, (x, y) = net(), data()
    with tfnb.record(name):
        fed, label = tfnb.placeholder(x[:BATCH], name="x"), tfnb.placeholder(y[:BATCH], name="y")
        loss = F.cross_entropy(model(fed), label)
        train = tfnb.train.Momentum(0.1, 0.9).minimize(loss)
    done = tfnb.fit(train, {fed: x, label: y}, batch_size=BATCH, shuffle=False, watch={"loss": loss}, **options)
    assert done.steps == 4 * options["epochs"] and len(done.history) == options["epochs"]
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize(("tasks", "every", "epochs"), [(2, 3, 2), (3, 5, 3), (2, 100, 2)])
@pytest.mark.filterwarnings("ignore:.*writes .* itself")
def test_values_are_those_of_copies_that_are_averaged(
    connect: Callable[..., Any], tasks: int, every: int, epochs: int
) -> None:
    """Meetings at every so many steps, over the ends of passes, and one at the end of the data."""
    connect(tasks)
    found = fitted(f"local_{tasks}_{every}", epochs=epochs, mode=LocalSGD(every))
    torch.testing.assert_close(found, by_hand(tasks, every, epochs), rtol=1e-11, atol=1e-12)


def test_meetings_after_each_step_of_plain_sgd_are_sync(connect: Callable[..., Any]) -> None:
    rows, ends = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), []
    connect(2)
    for mode in ("sync", LocalSGD(1)):
        weight = tfnb.Variable(torch.ones(3, dtype=torch.float64), name=f"w{len(ends)}")
        with tfnb.record(f"plain_{len(ends)}"):
            x = tfnb.placeholder(rows[:8], name="x")
            train = tfnb.train.SGD(0.1).minimize((x @ weight).sin().mean())
        tfnb.fit(train, {x: rows}, batch_size=8, epochs=3, mode=mode)
        ends.append(weight.value())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-13, atol=0)


def test_a_task_without_rows_or_without_anything_that_counts_adds_nothing(connect: Callable[..., Any]) -> None:
    """The first task has rows whose mask is empty; of the second batch, of one row, the second has none."""
    connect(2)
    weight = tfnb.Variable(torch.zeros(1, dtype=torch.float64), name="w")
    rows = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 3.0], [1.0, 5.0], [1.0, 2.0]], dtype=torch.float64)
    with tfnb.record("masked"):
        x = tfnb.placeholder(rows[:4], name="x")
        loss = (x[:, 0] * x[:, 1] * weight.read()).sum() / x[:, 0].sum()
        train = tfnb.train.SGD(1.0).minimize(loss)
    tfnb.fit(train, {x: rows}, batch_size=4, shuffle=False, mode=LocalSGD(10))
    # the first task: a gradient of 0 that does not count, then 2; the second one: 4
    torch.testing.assert_close(weight.value(), torch.tensor([-(2 * 3 + 4 * 2) / 5], dtype=torch.float64))


class Each:
    """A callback of each step."""

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self.on_step = on_step


@pytest.mark.parametrize("member", ["task", "server"])
def test_each_step_counts_once_when_a_process_is_killed(connect: Callable[..., Any], member: str) -> None:
    counters, killing = Counters(pause=2), KillingCallback(connect(3), member)
    result = tfnb.fit(
        counters.train, {counters.x: torch.ones(1200)}, batch_size=6, mode=LocalSGD(7), callbacks=killing,
        timeout=240,
    )  # fmt: skip
    assert killing.is_done and result.steps == 200 and counters.counts() == pytest.approx([200, 200], abs=1e-9)


@DROPPED
def test_an_interrupt_leaves_the_values_of_a_meeting(connect: Callable[..., Any]) -> None:
    """Then the training is resumed, and each step counts once."""
    counters, cluster = Counters(pause=2), connect(2)
    fit = {"batch_size": 4, "mode": LocalSGD(9), "timeout": 240}
    with Interrupter() as interrupter:
        assert interrupter.stops(lambda: tfnb.fit(counters.train, {counters.x: torch.ones(40_000)}, **fit), 1.5)
    before = counters.counts()
    assert before[0] == before[1] == cluster.step and before[0] % 9 == 0
    tfnb.fit(counters.train, {counters.x: torch.ones(400)}, **fit)
    assert counters.counts() == [before[0] + 100] * 2


def test_others_see_the_values_of_meetings(connect: Callable[..., Any]) -> None:
    """A run beside the training waits for the next meeting, and the training takes what it wrote."""
    counters = Counters()
    connect(2)

    def batches() -> Iterator[dict[Any, torch.Tensor]]:
        for step in range(30):
            if step == 14:
                tfnb.run(counters.train, {counters.x: torch.ones(4)})
            yield {counters.x: torch.ones(4)}

    assert tfnb.fit(counters.train, batches(), mode=LocalSGD(4), timeout=240).steps == 30
    assert counters.counts() == [31, 31]


def test_whole_numbers_are_those_of_the_first_task_and_the_mode_may_change(connect: Callable[..., Any]) -> None:
    count, weight = tfnb.Variable(torch.zeros(1, dtype=torch.int64), name="count"), tfnb.Variable(torch.ones(3))
    with tfnb.record("counted"):
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        train = tfnb.group(
            tfnb.train.SGD(0.1).minimize((x * weight).mean()), count.assign_add(torch.ones(1, dtype=torch.int64))
        )
    cluster = connect(2)

    def change(progress: Any) -> None:
        if progress.epoch < 3:
            progress.change((LocalSGD(4), "sync")[progress.epoch - 1])

    tfnb.fit(train, {x: torch.ones(40, 3)}, batch_size=4, epochs=3, callbacks=[change], timeout=240)
    assert int(count.value()) == cluster.step == 30
    until(lambda: any("mode=local every=4" in line for line in cluster.news(0)[1]), 10)


def test_a_counter_on_which_tasks_agree_stays_whole(connect: Callable[..., Any]) -> None:
    """Of parts that are no halves: 4 and 3 rows of 7."""
    count, weight = tfnb.Variable(torch.zeros(()), name="count"), tfnb.Variable(torch.ones(3))
    with tfnb.record("whole"):
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        train = tfnb.group(tfnb.train.Adam(0.1).minimize((x * weight).mean()), count.assign_add(torch.ones(())))
    connect(2)
    tfnb.fit(train, {x: torch.ones(105, 3)}, batch_size=7, mode=LocalSGD(1), timeout=240)
    assert count.value() == 15  # in float32 15 * (4 / 7) + 15 * (3 / 7) is not


def test_a_dtype_that_tasks_cannot_average_is_refused_by_name_before_the_first_step(
    connect: Callable[..., Any],
) -> None:
    count, weight = tfnb.Variable(torch.zeros((), dtype=torch.int16), name="count"), tfnb.Variable(torch.ones(3))
    with tfnb.record("short"):
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        step = tfnb.train.SGD(0.1).minimize((x * weight).mean())
        train = tfnb.group(step, count.assign_add(torch.ones((), dtype=torch.int16)))
    connect(2)
    with pytest.raises(Unimplemented, match=r"by gloo, which does not sum count \(torch.int16\)\. Use mode=.sync"):
        tfnb.fit(train, {x: torch.ones(8, 3)}, batch_size=4, mode=LocalSGD(4), timeout=240)
    assert torch.equal(weight.value(), torch.ones(3))


def test_what_local_steps_do_not_take_is_refused(connect: Callable[..., Any]) -> None:
    weight = tfnb.Variable(torch.ones(3), name="w")
    with tfnb.record("late"):
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        train = tfnb.train.SGD(0.1).minimize((x * weight).mean())
        with tfnb.control_dependencies([train]):
            after = weight.read().sum()
    data = {x: torch.ones(8, 3)}
    with pytest.raises(InvalidArgument, match="leave out backup"):
        tfnb.fit(train, data, mode=LocalSGD(2), backup=1)
    with pytest.raises(InvalidArgument, match="int of at least 1, not 0"):
        LocalSGD(0)
    with pytest.raises(InvalidArgument, match="exact=True"):
        tfnb.fit(train, data, mode=LocalSGD(2), exact=True)
    connect(2)
    with pytest.raises(Unimplemented, match="other weights between two meetings"):
        tfnb.fit(train, data, batch_size=4, mode=LocalSGD(2), watch={"after": after})
    assert tfnb.fit(train, data, batch_size=4, mode=LocalSGD(2)).steps == 2
