"""The outer step of `tfnb.train.LocalSGD` beside loops in plain torch: DiLoCo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tests.cluster.conftest import KillingCallback
from tests.cluster.test_cuts import Counters
from tests.cluster.test_local_sgd import BATCH, ROWS, Each, data, fitted, net, state_of
from tfnb.errors import FailedPrecondition, InvalidArgument, Unimplemented
from tfnb.passes.microbatches import divide
from tfnb.train import SGD, LocalSGD, Nesterov


def by_hand(tasks: int, every: int, epochs: int) -> list[torch.Tensor]:
    """Copies of the model and the optimizer; at meetings Nesterov's step along the mean difference of Parameters."""
    models, first = [net() for _ in range(tasks)], net()
    rules = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    outer = torch.optim.SGD(first.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    names = [name for name, _ in first.named_parameters()]
    x, y = data()
    batches = [(start, min(start + BATCH, ROWS)) for _ in range(epochs) for start in range(0, ROWS, BATCH)]
    for begin in range(0, len(batches), every):
        taken = [0] * tasks
        for start, stop in batches[begin : begin + every]:
            for task, (a, b) in enumerate(divide(stop - start, tasks)):
                rules[task].zero_grad()
                F.cross_entropy(models[task](x[start + a : start + b]), y[start + a : start + b]).backward()
                rules[task].step()
                taken[task] += b - a
        states = zip(*(state_of(model, rule) for model, rule in zip(models, rules, strict=True)), strict=True)
        for at, tensors in enumerate(states):
            if not tensors[0].dtype.is_floating_point:
                continue
            mean = sum(tensor * rows for tensor, rows in zip(tensors, taken, strict=True)) / sum(taken)
            keys = [*models[0].state_dict()]
            if at < len(keys) and keys[at] in names:
                parameter = first.get_parameter(keys[at])
                parameter.grad = parameter.detach() - mean
                continue
            for tensor in tensors:
                tensor.copy_(mean)
        outer.step()
        for model in models:
            for name in names:
                model.get_parameter(name).data.copy_(first.get_parameter(name).data)
    return [tensor.clone() for tensor in models[0].state_dict().values()]


@pytest.mark.parametrize(("tasks", "every", "epochs"), [(2, 3, 3), (3, 2, 3), (1, 4, 3)])
@pytest.mark.filterwarnings("ignore:.*writes .* itself")
def test_values_are_those_of_the_loop_by_hand(
    connect: Callable[..., Any], tasks: int, every: int, epochs: int
) -> None:  # fmt: skip
    """Parameters take the outer step; running statistics and the momentum of each step are averaged."""
    connect(tasks)
    found = fitted(f"outer_{tasks}", epochs=epochs, mode=LocalSGD(every, outer=Nesterov(0.7, 0.9)))
    torch.testing.assert_close(found, by_hand(tasks, every, epochs), rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*writes .* itself")
def test_a_rate_of_one_is_the_mean(connect: Callable[..., Any]) -> None:
    """One meeting: up to the rounding of a difference and a sum."""
    connect(2)
    mean = fitted("mean", epochs=1, mode=LocalSGD(100))
    stepped = fitted("stepped", epochs=1, mode=LocalSGD(100, outer=SGD(1.0)))
    torch.testing.assert_close(stepped, mean, rtol=0, atol=1e-15)


@pytest.mark.parametrize("member", ["task", "server"])
def test_each_step_counts_once_when_a_process_is_killed(connect: Callable[..., Any], member: str) -> None:
    """Half of each difference is taken, however often tasks meet."""
    counters, killing = Counters(pause=2), KillingCallback(connect(3), member)
    result = tfnb.fit(
        counters.train, {counters.x: torch.ones(1200)}, batch_size=6, mode=LocalSGD(7, outer=SGD(0.5)),
        callbacks=killing, timeout=240,
    )  # fmt: skip
    assert killing.is_done and result.steps == 200 and counters.counts() == pytest.approx([100, 100], abs=1e-9)


def test_a_training_that_was_stopped_goes_on_with_the_same_bits(connect: Callable[..., Any], tmp_path: Path) -> None:
    """The slots of the outer step are in the checkpoint."""
    rows = torch.randn(320, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    connect(2)
    ends = []
    for is_stopped in (False, True):
        weight = tfnb.Variable(torch.ones(3, dtype=torch.float64), name=f"w{is_stopped}")
        with tfnb.record(f"outer_resumed_{is_stopped}") as graph:
            x = tfnb.placeholder(rows[:8], name="x")
            train = SGD(0.1).minimize((x @ weight).sin().mean())
        mode = LocalSGD(4, outer=Nesterov(0.7, 0.9))
        options: dict[str, Any] = {"batch_size": 8, "seed": 3, "mode": mode, "timeout": 240}
        steps = 0
        if is_stopped:
            stop = Each(lambda progress: progress.stop() if progress.step >= 8 else None)
            folder = {"checkpoint": tmp_path, "checkpoint_every": 0.05}
            steps = tfnb.fit(train, {x: rows}, callbacks=[stop], **folder, **options).steps
            assert 8 <= steps < 40 and steps % 4 == 0
            (slot,) = (v for v in graph.variables if v is not weight)
            kept = slot.value()
            assert kept.abs().max() > 0
            tfnb.fit(train, {x: rows}, **options)  # of which nothing stays
            assert not torch.equal(slot.value(), kept)
            options["resume"] = tmp_path
        assert tfnb.fit(train, {x: rows}, **options).steps == 40 - steps
        ends.append(weight.value())
    assert torch.equal(ends[1], ends[0])


def test_what_an_outer_step_does_not_take_is_refused(connect: Callable[..., Any]) -> None:
    counters = Counters()
    data, mode = {counters.x: torch.ones(64)}, LocalSGD(2, outer=SGD(0.5))
    with pytest.raises(InvalidArgument, match=r"outer is an optimizer of tfnb.train"):
        LocalSGD(2, outer="sgd")  # type: ignore[arg-type]
    with pytest.raises(FailedPrecondition, match="no cluster is connected"):
        tfnb.fit(counters.train, data, mode=mode)
    connect(2)
    with pytest.raises(Unimplemented, match="does not change to LocalSGD"):
        tfnb.fit(counters.train, data, batch_size=4, epochs=2, callbacks=[lambda p: p.change(mode)], timeout=240)
    done = tfnb.fit(
        counters.train, data, batch_size=4, epochs=2, mode=mode, callbacks=[lambda p: p.change(LocalSGD(2))],
        timeout=240,
    )  # fmt: skip
    assert done.steps == 32
