"""Tasks that train on copies, push sums of gradients and fetch now and then: `tfnb.train.Downpour`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.cluster.conftest import KillingCallback
from tests.cluster.test_cuts import Counters, served
from tests.cluster.test_faults import DROPPED, Interrupter
from tests.cluster.test_local_sgd import Each
from tfnb.errors import InvalidArgument, NonFiniteGradient, Unimplemented
from tfnb.train import Downpour

ROWS, BATCH, EPOCHS = 30, 8, 3  # 4 batches in each pass, the last one of 6
RULES: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (lambda: tfnb.train.SGD(0.1), lambda ps: torch.optim.SGD(ps, 0.1)),
    "momentum": (lambda: tfnb.train.Momentum(0.1, 0.9), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)),
    "adagrad": (lambda: tfnb.train.Adagrad(0.1), lambda ps: torch.optim.Adagrad(ps, 0.1)),
    "adam": (lambda: tfnb.train.Adam(0.02), lambda ps: torch.optim.Adam(ps, 0.02)),
}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 3, dtype=torch.float64, generator=gen), torch.randint(0, 2, (ROWS,), generator=gen)


class Server:
    """What servers hold: the model, and the optimizer that counts."""

    def __init__(self, rule: str) -> None:
        self.model = net()
        self.rule = RULES[rule][1](self.model.parameters())

    def push(self, grads: list[torch.Tensor]) -> None:
        for parameter, grad in zip(self.model.parameters(), grads, strict=True):
            parameter.grad = grad
        self.rule.step()


def by_hand(rule: str, n_fetch: int, n_push: int) -> Server:
    """One task in plain torch: a copy of the model, and an optimizer of its own whose slots nobody else sees."""
    server, own = Server(rule), Server(rule)
    x, y = data()
    batches = [(start, min(start + BATCH, ROWS)) for _ in range(EPOCHS) for start in range(0, ROWS, BATCH)]
    owed = [torch.zeros_like(p) for p in own.model.parameters()]
    for step, (start, stop) in enumerate(batches, 1):
        own.model.zero_grad()
        F.cross_entropy(own.model(x[start:stop]), y[start:stop]).backward()
        for total, parameter in zip(owed, own.model.parameters(), strict=True):
            total += parameter.grad
        own.rule.step()
        if step % n_push == 0 or step == len(batches):
            server.push([total.clone() for total in owed])
            for total in owed:
                total.zero_()
        if step % n_fetch == 0:
            own.model.load_state_dict(server.model.state_dict())
    return server


def fitted(name: str, rule: str, mode: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Parameters, and the optimizer with its slots."""
    model, (x, y) = net(), data()
    optimizer = RULES[rule][0]()
    with tfnb.record(name):
        fed, label = tfnb.placeholder(x[:BATCH], name="x"), tfnb.placeholder(y[:BATCH], name="y")
        loss = F.cross_entropy(model(fed), label)
        train = optimizer.minimize(loss)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "timeout": 240, **options}
    done = tfnb.fit(train, {fed: x, label: y}, watch={"loss": loss}, mode=mode, **options)
    assert done.steps == 4 * EPOCHS and len(done.history) == EPOCHS
    return [tensor.detach().clone() for tensor in model.state_dict().values()], train


@pytest.mark.parametrize(
    ("rule", "n_fetch", "n_push"),
    [
        ("sgd", 3, 3), ("sgd", 1, 4), ("sgd", 5, 1), ("momentum", 2, 3), ("adagrad", 3, 2), ("adagrad", 5, 5),
        ("adam", 4, 2), ("adam", 20, 5),
    ],
)  # fmt: skip
def test_one_task_has_the_values_of_the_algorithm_by_hand(
    connect: Callable[..., Any], rule: str, n_fetch: int, n_push: int
) -> None:
    """Also where a fetch finds gradients that are not pushed, and where no fetch is due at all."""
    connect(1)
    found, _ = fitted(f"{rule}_{n_fetch}_{n_push}", rule, Downpour(n_fetch, n_push))
    wanted = [*by_hand(rule, n_fetch, n_push).model.state_dict().values()]
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_a_push_and_a_fetch_in_each_step_are_async(connect: Callable[..., Any], rule: str) -> None:
    connect(1)
    modes = {"async": "async", "each": Downpour(1, 1)}
    one, other = (fitted(f"{rule}_{name}", rule, mode)[0] for name, mode in modes.items())
    assert all(map(torch.equal, one, other))


def test_who_owns_which_slots(connect: Callable[..., Any]) -> None:
    """Servers' sums of squares are those of pushes, not of the task's local steps; a counter counts pushes."""
    connect(1)
    weight = tfnb.Variable(torch.ones(3, dtype=torch.float64), name="w")
    count = tfnb.Variable(torch.zeros(1, dtype=torch.float64), name="count")
    rows = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rule = tfnb.train.Adagrad(0.1)
    with tfnb.record("slots") as graph:
        x = tfnb.placeholder(rows[:4], name="x")
        loss = (x @ weight).sin().mean()
        train = tfnb.group(rule.minimize(loss), count.assign_add(torch.ones(1, dtype=torch.float64)))
    tfnb.fit(train, {x: rows}, batch_size=4, shuffle=False, mode=Downpour(5, 5), timeout=240)
    slots = {variable.name: variable.value() for variable in graph.variables}
    server, own = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    rules = [torch.optim.Adagrad([p], 0.1) for p in (server, own)]
    owed = torch.zeros(3, dtype=torch.float64)
    for step in range(10):
        own.grad = None
        (rows[4 * step : 4 * step + 4] @ own).sin().mean().backward()
        owed += own.grad
        rules[1].step()
        if step % 5 == 4:
            server.grad, owed = owed, torch.zeros(3, dtype=torch.float64)
            rules[0].step()
            own.data.copy_(server.data)
    torch.testing.assert_close(weight.value(), server.detach(), rtol=1e-12, atol=0)
    sums = rules[0].state[server]["sum"]
    assert any(v.shape == sums.shape and torch.allclose(v, sums, rtol=1e-12, atol=0) for v in slots.values()), slots
    assert float(count.value()) == 2


def test_a_watched_variable_has_the_values_of_the_copy_step_by_step(connect: Callable[..., Any]) -> None:
    """Local steps overwrite the copy; what was watched before stays."""
    connect(1)
    scale = tfnb.Variable(torch.tensor(1.0, dtype=torch.float64), name="scale")
    with tfnb.record("watched"):
        x = tfnb.placeholder(torch.ones(2, dtype=torch.float64), name="x")
        now = scale.read()
        train = tfnb.train.SGD(0.1).minimize((x * now).mean())
    data = {x: torch.ones(12, dtype=torch.float64)}
    done = tfnb.fit(train, data, batch_size=2, watch={"scale": now}, mode=Downpour(6, 6), timeout=240)
    assert done.history[0]["scale"] == pytest.approx(1 - 0.1 * 2.5)  # the mean of 6 steps
    assert float(scale.value()) == pytest.approx(1 - 0.1 * 6)


def test_what_does_not_count_and_sparse_gradients_add_up(connect: Callable[..., Any]) -> None:
    """Rows whose mask is empty add nothing; entries of a table are pushed behind each other."""
    connect(1)
    table = tfnb.Variable(torch.zeros(4, 2, dtype=torch.float64), name="table")
    places = torch.tensor([0, 1, 0, 0, 2, 2])
    masks = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    with tfnb.record("masked"):
        at, mask = tfnb.placeholder(places[:2], name="at"), tfnb.placeholder(masks[:2], name="mask")
        loss = ((F.embedding(at, table, sparse=True) - 1).square().sum(1) * mask).sum() / mask.sum()
        train = tfnb.train.SGD(0.25).minimize(loss)
    tfnb.fit(train, {at: places, mask: masks}, batch_size=2, shuffle=False, mode=Downpour(3, 3), timeout=240)
    # gradients of 2 * (value - 1) / 2 for rows 0 and 1, none, then of 2 * (value - 1) for row 2, of values that are 0
    wanted = torch.tensor([0.25, 0.25, 0.5, 0.0], dtype=torch.float64)
    torch.testing.assert_close(table.value(), wanted[:, None].expand(4, 2))


@pytest.mark.parametrize("member", ["task", "server"])
def test_each_step_counts_once_when_a_process_is_killed(connect: Callable[..., Any], member: str) -> None:
    counters, killing = Counters(pause=2), KillingCallback(connect(3), member)
    result = tfnb.fit(
        counters.train, {counters.x: torch.ones(800)}, batch_size=4, mode=Downpour(n_fetch=3, n_push=7),
        callbacks=killing, timeout=240,
    )  # fmt: skip
    assert killing.is_done and result.steps == 200 and counters.counts() == [200, 200]


def test_pushes_are_of_so_many_steps(connect: Callable[..., Any]) -> None:
    """All but the last one of a pass, with which a validation or a callback of epochs has all of it."""
    counters, cluster = Counters(), connect(2)
    tfnb.fit(counters.train, {counters.x: torch.ones(400)}, batch_size=4, mode=Downpour(10, 5), timeout=240)
    assert counters.counts() == [100, 100]
    assert served(cluster) == [20, 20]


@DROPPED
def test_an_interrupt_leaves_whole_pushes(connect: Callable[..., Any]) -> None:
    """Then the training is resumed, and each step counts once."""
    counters, cluster = Counters(pause=2), connect(2)
    fit = {"batch_size": 4, "mode": Downpour(9, 9), "timeout": 240}
    with Interrupter() as interrupter:
        assert interrupter.stops(lambda: tfnb.fit(counters.train, {counters.x: torch.ones(40_000)}, **fit), 1.5)
    before = counters.counts()
    assert before[0] == before[1] == cluster.step > 0 and before[0] % 9 == 0
    tfnb.fit(counters.train, {counters.x: torch.ones(400)}, **fit)
    assert counters.counts() == [before[0] + 100] * 2


def test_a_training_that_was_stopped_goes_on_with_the_same_bits(connect: Callable[..., Any], tmp_path: Path) -> None:
    """One task, which fetches with each push; it was stopped where it stood still."""

    def stop(progress: Any) -> None:
        progress.stop()

    rows = torch.randn(80, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    connect(1)
    ends = []
    for is_stopped in (False, True):
        weight = tfnb.Variable(torch.ones(3, dtype=torch.float64), name=f"w{is_stopped}")
        with tfnb.record(f"resumed_{is_stopped}"):
            x = tfnb.placeholder(rows[:4], name="x")
            loss = (x @ weight).sin().mean()
            train = tfnb.train.SGD(0.1).minimize(loss)
        options: dict[str, Any] = {"batch_size": 4, "epochs": 3, "seed": 3, "mode": Downpour(4, 4), "timeout": 240}
        options |= {"watch": {"loss": loss}, "validation": {x: rows[:8]}}
        steps = 0
        if is_stopped:
            steps = tfnb.fit(train, {x: rows}, callbacks=[stop], checkpoint=tmp_path, **options).steps
            assert steps == 20
            tfnb.fit(train, {x: rows}, **options)  # of which nothing stays
            options["resume"] = tmp_path
        assert tfnb.fit(train, {x: rows}, **options).steps == 60 - steps
        ends.append(weight.value())
    assert torch.equal(ends[1], ends[0])


def test_one_task_begins(connect: Callable[..., Any]) -> None:
    """All steps are its own here: those of one process, though three tasks are there."""
    connect(3)
    found, _ = fitted("warm", "adam", Downpour(1, 1, warm_start=100))
    torch.testing.assert_close(found, [*by_hand("adam", 1, 1).model.state_dict().values()], rtol=1e-11, atol=1e-12)
    counters = Counters()
    tfnb.fit(counters.train, {counters.x: torch.ones(400)}, batch_size=4, mode=Downpour(2, 3, 30), timeout=240)
    assert counters.counts() == [100, 100]


@pytest.mark.parametrize(("rate", "tasks"), [(0.01, 3), (8.0, 1)], ids=["calm", "wild"])
def test_the_others_begin_where_pushes_change_gradients_little(
    connect: Callable[..., Any], rate: float, tasks: int
) -> None:
    """On a parabola each step multiplies the gradient by 1 - rate / 4: by 0.9975, or by -1, which is a change of 2."""
    cluster, counted = connect(3), tfnb.Variable(torch.zeros((), dtype=torch.float64), name="counted")
    weight = tfnb.Variable(torch.ones(4, dtype=torch.float64), name="w")
    with tfnb.record("calm" if tasks > 1 else "wild"):
        x = tfnb.placeholder(torch.ones(4, dtype=torch.float64), name="x")
        loss = (weight.square().mean() * x).mean() / 2
        train = tfnb.group(tfnb.train.SGD(rate).minimize(loss), counted.assign_add(torch.ones((), dtype=torch.float64)))
    data = {x: torch.ones(1600, dtype=torch.float64)}
    result = tfnb.fit(train, data, batch_size=4, mode=Downpour(1, 1, "auto"), timeout=240)
    assert result.steps == counted.value() == 400
    assert sum(len(member.seconds) > 0 for member in cluster._engine.tasks) == tasks
    if tasks == 1:  # its steps are those of one process
        torch.testing.assert_close(weight.value(), torch.ones(4, dtype=torch.float64) * (1 - rate / 4) ** 400)


def test_others_see_whole_pushes_and_the_mode_may_change(connect: Callable[..., Any]) -> None:
    counters, cluster = Counters(pause=1), connect(2)

    def batches() -> Iterator[dict[Any, torch.Tensor]]:
        for step in range(60):
            if step == 30:
                cluster.pull()
                counts = counters.counts()
                assert counts[0] == counts[1] <= 30
            yield {counters.x: torch.ones(4)}

    def change(progress: Any) -> None:
        if progress.step == 40:
            progress.change("async")

    assert tfnb.fit(counters.train, batches(), mode=Downpour(4, 4), callbacks=[Each(change)], timeout=240).steps == 60
    assert counters.counts() == [60, 60]


def test_a_gradient_that_is_not_finite_is_pushed_nowhere(connect: Callable[..., Any]) -> None:
    connect(1)
    weight = tfnb.Variable(torch.ones(3, dtype=torch.float64), name="w")
    rows = torch.ones(24, 3, dtype=torch.float64)
    rows[13] = torch.inf  # of the fourth step
    with tfnb.record("infinite"):
        x = tfnb.placeholder(rows[:4], name="x")
        train = tfnb.train.SGD(0.1).minimize((x * weight).mean())
    with pytest.raises(NonFiniteGradient, match="w"):
        tfnb.fit(train, {x: rows}, batch_size=4, shuffle=False, mode=Downpour(2, 2), timeout=240)
    torch.testing.assert_close(weight.value(), torch.full((3,), 1 - 2 * 0.1 / 3, dtype=torch.float64))


def test_what_downpour_does_not_take_is_refused(connect: Callable[..., Any]) -> None:
    weight, seen = tfnb.Variable(torch.ones(3), name="w"), tfnb.Variable(torch.zeros(()), name="seen")
    with tfnb.record("late"):
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        train = tfnb.train.SGD(0.1).minimize((x * weight).mean())
        with tfnb.control_dependencies([train]):
            after = weight.read().sum()
        counted = tfnb.group(train, seen.assign_add(x.sum()))
    data = {x: torch.ones(8, 3)}
    for wrong in ({"n_fetch": 0}, {"n_push": True}, {"warm_start": -1}, {"warm_start": "long"}):
        with pytest.raises(InvalidArgument, match=f"{next(iter(wrong))} is .* an int of at least"):
            Downpour(**wrong)
    with pytest.raises(InvalidArgument, match="leave out backup"):
        tfnb.fit(train, data, mode=Downpour(2, 2), backup=1)
    with pytest.raises(InvalidArgument, match="exact=True"):
        tfnb.fit(train, data, mode=Downpour(2, 2), exact=True)
    connect(2)
    with pytest.raises(Unimplemented, match="Use mode='async'"):
        tfnb.fit(train, data, batch_size=4, mode=Downpour(2, 1), watch={"after": after})
    assert tfnb.fit(train, data, batch_size=4, mode=Downpour(1, 1), watch={"after": after}).steps == 2
    with pytest.warns(UserWarning, match="seen itself.*takes what the last step of a push makes"):
        tfnb.fit(counted, data, batch_size=4, mode=Downpour(2, 2))
