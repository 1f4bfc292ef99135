"""Guards of branches that Python takes below a step, or behind the values among which it chooses."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import BranchChanged

pytestmark = pytest.mark.filterwarnings("ignore:.*Python took the .* branch of a recorded value:UserWarning")
LARGE, SMALL = torch.full((4, 3), 3.0), torch.full((4, 3), 0.01)


class Best(nn.Module):
    """A layer that keeps its weight of the least loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)
        nn.init.constant_(self.layer.weight, 0.5)
        self.register_buffer("least", torch.tensor(0.5))
        self.register_buffer("kept", torch.zeros(1, 3))
        self.optimizer = torch.optim.SGD(self.layer.parameters(), 0.01)

    def step(self, x: torch.Tensor, below: Callable[[Any, torch.Tensor], None]) -> tuple[Any, torch.Tensor]:
        self.optimizer.zero_grad()
        loss = self.layer(x).square().mean()
        loss.backward()
        step = self.optimizer.step()
        below(self, loss.detach())
        return step, loss


def keep(best: Best, loss: torch.Tensor) -> None:
    if loss < best.least:
        best.least.copy_(loss)
        best.kept.copy_(best.layer.weight.detach())


def count_and_keep(best: Best, loss: torch.Tensor) -> None:
    best.least += 1.0
    if best.least > 2.0:
        best.kept.copy_(best.layer.weight.detach())


def ensure_large(best: Best, loss: torch.Tensor) -> None:
    assert loss > 0.05


@pytest.mark.parametrize("how", ["step", "both", "fit"])
@pytest.mark.parametrize("below", [keep, count_and_keep, ensure_large])
def test_a_run_of_a_step_looks_at_the_branches_below_it(how: str, below: Any) -> None:
    best = Best()
    with tfnb.record("best"):
        x = tfnb.placeholder(LARGE)
        step, loss = best.step(x, below)
    runs: dict[str, Callable[[torch.Tensor], object]] = {
        "step": lambda rows: tfnb.run(step, {x: rows}), "both": lambda rows: tfnb.run([step, loss], {x: rows}),
        "fit": lambda rows: tfnb.fit(step, {x: rows}, batch_size=4),
    }  # fmt: skip
    runs[how](LARGE)
    before = [value.clone() for value in best.state_dict().values()]
    with pytest.raises(BranchChanged):
        runs[how](SMALL)
    assert all(map(torch.equal, best.state_dict().values(), before))
    if below is not count_and_keep:
        tfnb.run(loss, {x: LARGE})


def test_a_step_takes_no_named_write_for_a_branch_below_it() -> None:
    """The branch hangs on a write that the user runs by itself: the step does not do it, and does not look."""
    weight = nn.Parameter(torch.ones(3))
    count = tfnb.Variable(torch.tensor(0.0), trainable=False, name="count")
    with tfnb.record("named") as graph:
        x = tfnb.placeholder(torch.ones(2, 3))
        step = tfnb.train.SGD(0.1).minimize((x @ weight).mean())
        counted = count.assign_add(1.0)
        if counted < 3.0:
            more = x * 2
    tfnb.run(step, {x: torch.ones(2, 3)})
    assert count.value() == 0.0
    assert any("does not look at this branch: it needs count" in note for note in graph.notes)
    tfnb.run([counted, more], {x: torch.ones(2, 3)})
    assert count.value() == 1.0


class Early(nn.Module):
    """It leaves early where it is sure."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sure = x * 2
        if sure.sum() > 0:
            return sure
        return x * 3


def largest(x: torch.Tensor) -> torch.Tensor:
    return max([x * 2, x * -3], key=lambda each: each.sum())


def first(x: torch.Tensor) -> torch.Tensor:
    return next(each for each in (x * 2, x * -3) if each.sum() > 0)


@pytest.mark.parametrize("choose", [Early(), largest, first])
def test_a_value_among_which_python_chose_is_refused_in_a_run_that_would_choose_another(choose: Any) -> None:
    with tfnb.record("chosen"):
        x = tfnb.placeholder(torch.ones(2))
        y = choose(x)
    assert torch.equal(tfnb.run(y, {x: torch.full((3,), 2.0)}), torch.full((3,), 4.0))
    with pytest.raises(BranchChanged):
        tfnb.run(y, {x: -torch.ones(2)})


def test_a_name_given_to_an_earlier_value_is_a_choice_and_its_own_name_is_none() -> None:
    with tfnb.record("names"):
        x = tfnb.placeholder(torch.ones(2))
        a, b = x * 2, x * 3
        c = x + 1
        chosen = a if x.sum() > 0 else b
    assert tfnb.run(c, {x: -torch.ones(2)}).tolist() == [0.0, 0.0]
    with pytest.raises(BranchChanged):
        tfnb.run(chosen, {x: -torch.ones(2)})


def test_a_value_takes_no_gradient_and_no_further_feed_for_a_branch_behind_it() -> None:
    weight = nn.Parameter(torch.ones(()))
    with tfnb.record("apart"):
        x, y = tfnb.placeholder(torch.ones(2)), tfnb.placeholder(torch.ones(2))
        values = [x * weight]
        (grad,) = tfnb.gradients(values[0].sum(), [weight])
        if grad.norm() > 0:
            pass
        if y.sum() > 0:
            pass
    assert tfnb.run(values[0], {x: torch.zeros(2)}).tolist() == [0.0, 0.0]


def test_a_name_that_the_branch_would_have_given_away_is_a_choice() -> None:
    with tfnb.record("renamed"):
        x = tfnb.placeholder(torch.ones(2))
        y = x * 2
        if y.sum() > 10:
            y = y / 2
        h = x * 1.0
        while h.norm() > 9:
            h = h / 2
        for out in (x * 2, x * -3):
            if out.sum() > 0:
                break
    assert tfnb.run([y, h, out], {x: torch.ones(2)})[0].tolist() == [2.0, 2.0]
    for value in (y, h):
        with pytest.raises(BranchChanged):
            tfnb.run(value, {x: torch.full((2,), 16.0)})
    with pytest.raises(BranchChanged):
        tfnb.run(out, {x: -torch.ones(2)})


@pytest.mark.parametrize("executor", ["dataflow", "parts"])
def test_other_executors_look_at_the_branches_of_steps_and_values(executor: str) -> None:
    best = Best()
    with tfnb.record("elsewhere") as graph:
        x = tfnb.placeholder(LARGE)
        chosen = largest(x)
        step, _ = best.step(x, keep)
    session = tfnb.Session(graph, executor=executor)
    assert torch.equal(session.run(chosen, {x: LARGE}), LARGE * 2)
    session.run(step, {x: LARGE})
    for fetch in (chosen, step):
        with pytest.raises(BranchChanged):
            session.run(fetch, {x: -SMALL})


def test_a_step_in_pieces_looks_at_the_branches_of_its_values() -> None:
    with tfnb.record("pieces") as graph:
        x = tfnb.placeholder(LARGE)
        chosen = largest(x)
    with tfnb.Session(graph).step([chosen], [x]) as step, pytest.raises(BranchChanged):
        step.fetch(chosen, {x: -LARGE})


CLIPPED = """
import torch, tfnb

def clip():
    global y
    if y.sum() > 10:
        y = y / 2

with tfnb.record():
    x = tfnb.placeholder(torch.ones(2))
    y = x * 2
    clip()
    z = y + 1
"""


def test_a_name_that_a_function_would_have_given_away_is_a_choice(tmp_path: Path) -> None:
    (tmp_path / "clipped.py").write_text(CLIPPED)
    names = runpy.run_path(str(tmp_path / "clipped.py"), run_name="clipped")
    for value in (names["y"], names["z"]):
        assert tfnb.run(value, {names["x"]: torch.ones(2) * 2})[0] >= 4
        with pytest.raises(BranchChanged):
            tfnb.run(value, {names["x"]: torch.ones(2) * 9})


HELD = """
import functools, sys, torch, tfnb

def give(value):
    global y
    y = value

class Kind:
    @classmethod
    def clip(cls):
        global y
        y = y / 2

    @property
    def clipped(self):
        global y
        y = y / 2

def by_text():
    globals()["y"] = torch.zeros(2)

def by_keyword():
    globals().update(y=torch.zeros(2))

@functools.lru_cache
def kept():
    global y
    y = torch.zeros(2)

calls = {
    "partial": functools.partial(give, torch.zeros(2)), "classmethod": Kind.clip, "cache": kept,
    "property": lambda held=Kind(): held.clipped,
    "text": by_text, "keyword": by_keyword,
}
call = calls[KIND]
del give, Kind, by_text, by_keyword, kept, calls

with tfnb.record():
    x = tfnb.placeholder(torch.ones(2))
    y = x * 2
    if x.sum() > 10:
        call()
    z = y + 1
"""


@pytest.mark.parametrize("kind", ["partial", "classmethod", "property", "cache", "text", "keyword"])
def test_a_name_that_a_held_function_would_have_given_away_is_a_choice(kind: str, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    with pytest.warns(UserWarning, match="took the False branch"):
        names = runpy.run_path(str(tmp_path / "held.py"), {"KIND": kind}, run_name="held")
    assert tfnb.run(names["y"], {names["x"]: torch.ones(2) * 2})[0] == 4
    with pytest.raises(BranchChanged):
        tfnb.run(names["y"], {names["x"]: torch.ones(2) * 9})


def test_a_name_of_the_blocks_function_that_an_inner_one_gives_away_is_a_choice() -> None:
    def clip() -> None:
        nonlocal y
        y = y / 2

    held = [clip]
    with pytest.warns(UserWarning, match="took the False branch"), tfnb.record():
        x = tfnb.placeholder(torch.ones(2))
        y = x * 2
        if x.sum() > 10:
            held[0]()
    assert tfnb.run(y, {x: torch.ones(2) * 2})[0] == 4
    with pytest.raises(BranchChanged):
        tfnb.run(y, {x: torch.ones(2) * 9})


def test_a_name_that_an_inner_function_of_another_one_gives_away_is_no_choice() -> None:
    def other() -> None:
        y = 1

        def inner() -> None:
            nonlocal y
            y = 2

        inner()

    other()
    with pytest.warns(UserWarning, match="took the False branch"), tfnb.record():
        x = tfnb.placeholder(torch.ones(2))
        y = x * 2
        z = y * 1 if x.sum() > 10 else y * 2
    assert tfnb.run(z, {x: torch.ones(2)})[0] == 4
    assert tfnb.run(y, {x: torch.ones(2) * 9})[0] == 18
