"""Param groups and schedulers of torch optimizers, saved and restored: a resumed training equals torch's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules

import tfnb
from tfnb.errors import CheckpointCorrupt, CheckpointIncompatible, InvalidArgument
from tfnb.graph.tensor_files import read_tensors, write_tensors
from tfnb.session import default_session
from tfnb.state import param_groups

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Make = Callable[[Any], Any]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
    "tensor": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1, dtype=torch.float64)),
    "groups": lambda ps: torch.optim.SGD(
        [{"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(ps)], momentum=0.5
    ),
}
SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda o: schedules.StepLR(o, 3, 0.5),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda epoch: 0.8**epoch),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 6, 6], 0.5),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1), schedules.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler([schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)]),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=20, cycle_momentum=False),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1, threshold=1.0),
}  # fmt: skip


class Run:
    """A network, its optimizer and scheduler; ``theirs``: stepped by torch alone."""

    def __init__(self, optimizer: Make = OPTIMIZERS["sgd"], scheduler: Make | None = None, *, theirs: bool = False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        self.optimizer = optimizer(list(self.model.parameters()))
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.theirs, self.taken = theirs, 0
        if not theirs:
            with tfnb.record() as self.graph:
                self.x, self.y = tfnb.placeholder(X[:4]), tfnb.placeholder(Y[:4])
                loss = F.mse_loss(self.model(self.x), self.y)
                self.step = tfnb.train.from_torch(self.optimizer).minimize(loss)
            self.session = default_session(self.graph)

    def run(self, steps: int) -> Run:
        for _ in range(steps):
            x, y = X[4 * self.taken % 60 :][:4], Y[4 * self.taken % 60 :][:4]
            self.taken += 1
            if self.theirs:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
            else:
                tfnb.run(self.step, {self.x: x, self.y: y})
            if self.scheduler is not None:
                plateau = isinstance(self.scheduler, schedules.ReduceLROnPlateau)
                self.scheduler.step(*([1.0] if plateau else []))
        return self

    def resumed(self, path: Path, taken: int) -> Run:
        self.session.restore(path)
        self.taken = taken
        return self

    def is_like(self, other: Run) -> None:
        found, expected = (list(run.model.parameters()) for run in (self, other))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        found, expected = (param_groups.groups_of(run.optimizer) for run in (self, other))
        assert found == expected


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_learning_rate_that_was_set_is_restored_in_place(tmp_path: Path, optimizer: str) -> None:
    def lower(run: Run) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.25 if optimizer != "tensor" else group["lr"].mul_(0.25)

    whole = Run(OPTIMIZERS[optimizer], theirs=True).run(2)
    first = Run(OPTIMIZERS[optimizer]).run(2)
    for run in (whole, first):
        lower(run)
    first.session.save(tmp_path / "v")
    again = Run(OPTIMIZERS[optimizer])
    groups, rates = again.optimizer.param_groups, [group["lr"] for group in again.optimizer.param_groups]
    kept = list(groups)
    with pytest.warns(UserWarning, match=r"restored the param groups: .*: lr (\(group 0\) )?0.1\d* -> 0.025") as notes:
        again.resumed(tmp_path / "v", 2)
    assert len(notes) == 1 and notes[0].filename == __file__
    assert again.optimizer.param_groups is groups and all(a is b for a, b in zip(groups, kept, strict=True))
    assert optimizer != "tensor" or groups[0]["lr"] is rates[0]
    again.run(4).is_like(whole.run(4))
    again.session.save(tmp_path / "v")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.session.restore(tmp_path / "v")  # nothing to tell


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("order", ["before", "after", "by hand"])
def test_a_scheduler_goes_on_where_it_was(tmp_path: Path, scheduler: str, order: str) -> None:
    make = SCHEDULERS[scheduler]
    whole = Run(scheduler=make, theirs=True).run(9)
    first = Run(scheduler=make)
    if order != "by hand":
        first.session.reads(first.scheduler)
    first.run(5).session.save(tmp_path / "v")
    again = Run(scheduler=None if order == "after" else make)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        if order == "before":
            again.session.reads(again.scheduler)
        again.resumed(tmp_path / "v", 5)
        if order == "after":
            again.scheduler = make(again.optimizer)
            again.session.reads(again.scheduler)
        if order == "by hand":
            again.scheduler.load_state_dict(copy.deepcopy(first.scheduler.state_dict()))
    told = [str(note.message) for note in notes if "but not the state of" in str(note.message)]
    if order == "before":
        assert told == []
    elif order == "by hand":
        assert len(told) == 1 and f"not the state of {scheduler}: load it, scheduler.load_state_dict(state)" in told[0]
    elif scheduler != "ReduceLROnPlateau":  # which leaves no trace in the groups
        assert len(told) == 1 and ".reads(scheduler) gives it the state that the file holds" in told[0]
    assert again.scheduler.state_dict().keys() == first.scheduler.state_dict().keys()
    again.run(4).is_like(whole)
    again.session.save(tmp_path / "v")


def test_a_cycled_momentum_goes_on_where_it_was(tmp_path: Path) -> None:
    def make(optimizer: Any) -> Any:
        return schedules.OneCycleLR(optimizer, 0.2, total_steps=20)

    whole, first, again = Run(scheduler=make, theirs=True).run(9), Run(scheduler=make), Run(scheduler=make)
    for run in (first, again):
        run.session.reads(run.scheduler)
    first.run(5).session.save(tmp_path / "v")
    with pytest.warns(UserWarning, match=r"SGD: lr .* -> .*, momentum 0.95 -> 0.8"):
        again.resumed(tmp_path / "v", 5)
    again.run(4).is_like(whole)


def test_a_mapping_and_not_strict_leave_groups_alone(tmp_path: Path) -> None:
    first = Run(scheduler=SCHEDULERS["StepLR"]).run(4)
    first.session.reads(first.scheduler)
    first.session.save(tmp_path / "v")
    for options in ({"strict": False}, {"mapping": {"0.weight": "0.weight"}}):
        again = Run(scheduler=SCHEDULERS["StepLR"])
        again.session.reads(again.scheduler)
        before, state = param_groups.groups_of(again.optimizer), again.scheduler.state_dict()
        again.session.restore(tmp_path / "v", **options)
        assert param_groups.groups_of(again.optimizer) == before and again.scheduler.state_dict() == state
        assert torch.equal(again.model[0].weight, first.model[0].weight)


def test_fit_resumes_with_the_saved_rate_and_the_cell_keeps_that_of_a_plain_number(tmp_path: Path) -> None:
    def fit(run: Run, **options: Any) -> tfnb.RunResult:
        def lower(progress: Any) -> None:
            run.optimizer.param_groups[0]["lr"] *= 0.5
            if progress.epoch == 2 and not options:
                run.session.save(tmp_path / "v")
                progress.stop()

        data = {run.x: X, run.y: Y}
        return tfnb.fit(run.step, data, epochs=4, batch_size=10, callbacks=[lower], **options)

    whole, first, again = Run(), Run(), Run()
    fit(whole, progress_after=60)
    fit(first)
    with pytest.warns(UserWarning, match=r"SGD: lr 0.1 -> 0.025") as notes:
        assert fit(again, resume=tmp_path / "v").steps == 12
    assert len(notes) == 1 and notes[0].filename == __file__
    again.is_like(whole)
    first.optimizer.param_groups[0]["lr"] = 0.3
    fit(first, resume=True)
    assert first.optimizer.param_groups[0]["lr"] == 0.3 / 4

    layer, values = nn.Linear(4, 2).double(), []
    for rate in (0.1, 0.2):
        with tfnb.record() as graph:
            x = tfnb.placeholder(X[:4])
            step = tfnb.train.SGD(rate).minimize(layer(x).sum())
        if rate == 0.1:
            default_session(graph).save(tmp_path / "plain")
        default_session(graph).restore(tmp_path / "plain")
        before = layer.bias.detach().clone()
        tfnb.run(step, {x: X[:1]})
        values.append(round(float((before - layer.bias).detach()[0]), 6))
    assert values == [0.1, 0.2]


def test_older_files_load_with_the_rate_that_they_hold(tmp_path: Path) -> None:
    first = Run(OPTIMIZERS["groups"]).run(2)
    for number, group in enumerate(first.optimizer.param_groups):
        group["lr"] = 0.01 * (number + 1)
    first.session.save(tmp_path / "v")
    tensors, about, _ = read_tensors(tmp_path / "v")
    about = {name: about[name] for name in ("format", "version", "meta")}
    rates = {f"SGD/lr{f'_{n}' if n else ''}": torch.tensor(0.01 * (n + 1), dtype=torch.float64) for n in range(4)}
    del about["meta"]["optimizers"]
    write_tensors(tmp_path / "v", tensors | rates, about)
    again = Run(OPTIMIZERS["groups"])
    with pytest.warns(UserWarning, match=r"lr \(group 1\) 0.05 -> 0.02, lr \(group 2\)"):
        again.resumed(tmp_path / "v", 2)
    again.run(3).is_like(first.run(3))
    bare = {name: value for name, value in tensors.items() if name not in rates}
    write_tensors(tmp_path / "v", bare, about)
    Run(OPTIMIZERS["groups"]).resumed(tmp_path / "v", 2)


def test_snapshots_have_the_numbers_of_their_step() -> None:
    run = Run(scheduler=SCHEDULERS["StepLR"])
    run.session.reads(run.scheduler)
    snapshots = tfnb.Snapshots(run.step)
    run.run(3)
    snapshots.take(3)
    run.run(4)
    values = [parameter.detach().clone() for parameter in run.model.parameters()]
    with pytest.warns(UserWarning, match=r"SGD: lr 0.025 -> 0.05"):
        snapshots.restore(3)
    run.taken = 3
    run.run(4)
    torch.testing.assert_close([p.detach() for p in run.model.parameters()], values, rtol=0, atol=0)


def test_two_optimizers_and_one_that_has_other_groups(tmp_path: Path) -> None:
    def two() -> tuple[Any, list[Any]]:
        parts = [nn.Linear(4, 2).double() for _ in range(2)]
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.1) for part in parts]
        with tfnb.record() as graph:
            x = tfnb.placeholder(X[:4])
            steps = [
                tfnb.train.from_torch(o).minimize(p(x).square().mean()) for o, p in zip(optimizers, parts, strict=True)
            ]
        tfnb.run(steps, {x: X[:4]})
        return default_session(graph), optimizers

    session, optimizers = two()
    optimizers[1].param_groups[0]["lr"] = 0.5
    session.save(tmp_path / "v")
    session, optimizers = two()
    with pytest.warns(UserWarning, match=r"groups: Adam_1: lr 0.1 -> 0.5$"):
        session.restore(tmp_path / "v")
    assert [one.param_groups[0]["lr"] for one in optimizers] == [0.1, 0.5]

    Run().run(1).session.save(tmp_path / "one")
    run = Run(OPTIMIZERS["groups"])
    before = run.model[0].weight.detach().clone()
    with pytest.raises(CheckpointIncompatible, match=r"1 param groups of SGD, which has 4 here.*strict=False"):
        run.session.restore(tmp_path / "one")
    assert torch.equal(run.model[0].weight, before)
    run.session.restore(tmp_path / "one", strict=False)


def test_a_scheduler_that_no_file_can_hold_is_refused() -> None:
    class Odd(schedules.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.rule = lambda rate: rate
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            return [self.rule(group["lr"]) for group in self.optimizer.param_groups]

    run = Run(scheduler=Odd)
    with pytest.raises(InvalidArgument, match=r"Odd\['rule'\] is a function.*scheduler\.load_state_dict"):
        run.session.reads(run.scheduler)


@pytest.mark.parametrize(
    "facts",
    [
        {"optimizers": 1}, {"optimizers": {"SGD": [{"lr": {}}]}}, {"optimizers": {"SGD": {"lr": 1}}},
        {"schedulers": {"StepLR": {}}}, {"schedulers": {"StepLR": {"groups": [], "state": {"eval": []}}}},
        {"schedulers": {"StepLR": {"groups": [], "state": {"tensor": ["nn", 1]}}}},
    ],
)  # fmt: skip
def test_damaged_facts_are_found_before_anything_changes(tmp_path: Path, facts: dict[str, Any]) -> None:
    run = Run().run(1)
    run.session.save(tmp_path / "v")
    tensors, about, _ = read_tensors(tmp_path / "v")
    about = {"format": about["format"], "version": about["version"], "meta": about["meta"] | facts}
    write_tensors(tmp_path / "v", tensors, about)
    run.optimizer.param_groups[0]["lr"] = 7.0
    with pytest.raises(CheckpointCorrupt, match="damaged facts about optimizers or schedulers"):
        run.session.restore(tmp_path / "v")
    assert run.optimizer.param_groups[0]["lr"] == 7.0
