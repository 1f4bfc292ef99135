"""Branches that only raise are checks: recorded without a word, and made by each run.

PYTEST_DONT_REWRITE: the asserts of the programs are to stay what they are.
"""

from __future__ import annotations

import importlib
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import BranchChanged


def _unless(x: Any) -> Any:
    if not (x > 0).all():
        raise ValueError(f"expected numbers above 0, got {x.min()} of {x.shape}")
    return x.log()


def _where(x: Any) -> Any:
    if (x <= 0).any():
        message = "no logarithm" if x.dim() else ""
        raise ValueError(message)
    return x.log()


def _plainly(x: Any) -> Any:
    if (x <= 0).any():
        raise ValueError
    return x.log()


def _asserted(x: Any) -> Any:
    assert (x > 0).all(), f"not above 0: {x}"
    assert torch.isfinite(x).all()
    return x.log()


def _in_a_loop(x: Any) -> Any:
    for k in range(3):
        if not (x > -k).all():
            raise ValueError(k)
    return x.log()


def _both(x: Any) -> Any:
    assert (x > 0).all() and (x < 100).all()
    return x.log()


def _decides(x: Any) -> Any:
    if (x > 0).all():
        return x.log()
    return x


def _otherwise(x: Any) -> Any:
    if (x > 0).all():
        out = x.log()
    else:
        out = x
        raise_later = True
        if raise_later:
            raise ValueError
    return out


def _while(x: Any) -> Any:
    while not (x > 0).all():
        x = x + 1
    return x.log()


CHECKS = _unless, _plainly, _asserted, _in_a_loop, _both
OTHERS = _where, _decides, _otherwise, _while


@pytest.mark.parametrize("program", CHECKS)
def test_a_check_is_quiet_and_made_in_each_run(program: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tfnb.record():
            x = tfnb.placeholder(torch.tensor([1.0, 2.0]))
            y = program(x)
    data = torch.tensor([3.0, 4.0, 5.0])
    assert torch.equal(tfnb.run(y, {x: data}), program(data))
    with pytest.raises(BranchChanged, match=r"test_checks\.py line"):
        tfnb.run(y, {x: torch.tensor([1.0, -2.0])})


@pytest.mark.parametrize("program", OTHERS)
def test_a_branch_that_goes_on_warns(program: Callable[[Any], Any]) -> None:
    with pytest.warns(UserWarning, match="branch of a recorded value"), tfnb.record():
        program(tfnb.placeholder(torch.tensor([1.0, 2.0])))


def test_arguments_of_distributions_are_checked_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch._dynamo turns it off
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tfnb.record():
            scale, value = tfnb.placeholder(torch.tensor([1.0, 2.0])), tfnb.placeholder(torch.tensor([0.5, 0.2]))
            normal = torch.distributions.Normal(torch.zeros_like(scale), scale)
            gamma = torch.distributions.Gamma(scale, scale)
            chosen = torch.distributions.Categorical(logits=scale).log_prob(torch.tensor(1))
            out = normal.log_prob(value) + gamma.log_prob(value) + chosen
    good, point = torch.tensor([0.5, 3.0]), torch.tensor([0.3, 2.0])
    want = torch.distributions.Normal(torch.zeros(2), good).log_prob(point)
    want += torch.distributions.Gamma(good, good).log_prob(point)
    want += torch.distributions.Categorical(logits=good).log_prob(torch.tensor(1))
    torch.testing.assert_close(tfnb.run(out, {scale: good, value: point}), want)
    for feeds in ({scale: -good, value: point}, {scale: good, value: -point}):
        with pytest.raises(BranchChanged):
            tfnb.run(out, feeds)


def checked(x: torch.Tensor) -> torch.Tensor:
    assert x.sum() > 0, "the sum is negative"
    for row in x:
        assert row < 100
    if x.max() > 50:
        raise ValueError("too large")
    return x * 2


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_a_run_that_fails_an_assert_says_what_python_would_raise(executor: str) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = tfnb.autograph(checked)(x)
        assert x[0] > -5
        z = x * 3
    session = tfnb.Session(graph, executor=executor)  # type: ignore[arg-type]
    assert session.run(y, {x: torch.ones(2)}).tolist() == [2.0, 2.0]
    for fetch, fed, text in (
        (y, [-1.0, 0.5], r"AssertionError: the sum is negative \(line \d+ of checked\)"),
        (y, [1.0, 200.0], r"AssertionError \(line \d+ of checked\)"),
        (z, [-6.0, 9.0], r"AssertionError\n.*assert x\[0\] > -5"),
    ):
        with pytest.raises(AssertionError, match=text) as failed:
            session.run(fetch, {x: torch.tensor(fed)})
        assert isinstance(failed.value, BranchChanged)
        assert "torch.where" not in str(failed.value)
    with pytest.raises(BranchChanged, match=r"ValueError: too large \(line \d+ of checked\)") as refused:
        session.run(y, {x: torch.tensor([60.0, 1.0])})
    assert not isinstance(refused.value, AssertionError)


def test_a_saved_graph_still_says_what_python_would_raise(tmp_path: Path) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        tfnb.autograph(checked)(x).sum()
    graph.save(tmp_path / "checked.json")
    loaded = tfnb.Graph.load(tmp_path / "checked.json")
    with pytest.raises(AssertionError, match="the sum is negative"):
        tfnb.Session(loaded).run("sum_1", {"x": -torch.ones(2)})


# -- what a buffer says -----------------------------------------------------------------------------------------------


class _Started(torch.nn.Module):
    """Takes its scale from the first batch."""

    def __init__(self, ask: Callable[[torch.Tensor], Any], dtype: torch.dtype = torch.bool) -> None:
        super().__init__()
        self.ask, self.scale = ask, torch.nn.Parameter(torch.ones(3))
        self.register_buffer("ready", torch.zeros((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ask(self.ready):
            with torch.no_grad():
                self.scale.copy_(x.std(0))
                self.ready.fill_(1)
        return x * self.scale


def _stepped(model: torch.nn.Module) -> Any:
    data = torch.randn(6, 3)
    with tfnb.record():
        x = tfnb.placeholder(data)
        step = tfnb.train.SGD(0.1).minimize(model(x).sum())
    return lambda factor: tfnb.run(step, {x: factor * data})


@pytest.mark.parametrize("ask", [bool, torch.Tensor.item, lambda ready: ready == 1], ids=["bool", "item", "relation"])
@pytest.mark.filterwarnings("ignore:.*Python took the True branch")
@pytest.mark.filterwarnings("ignore:.*Python took the False branch")
@pytest.mark.filterwarnings("ignore:.*Python took the value of ready")
def test_what_is_done_at_the_first_call_alone_is_not_done_at_each(ask: Any) -> None:
    run = _stepped(_Started(ask))
    run(1)
    with pytest.raises(BranchChanged, match=r"what ready holds now(.|\n)*call the model once before"):
        run(2)
    model = _Started(ask)
    model(torch.randn(6, 3))
    before, run = model.scale.detach().clone(), _stepped(model)
    run(1), run(2)
    assert not torch.equal(before, model.scale)
    model.ready.fill_(0)
    with pytest.raises(BranchChanged, match="with what ready holds now it is False"):
        run(3)


@pytest.mark.parametrize(("ask", "dtype"), [(bool, torch.bool), (torch.Tensor.item, torch.int64)], ids=["bool", "int"])
def test_a_flag_that_the_recording_writes_is_said(ask: Any, dtype: torch.dtype) -> None:
    with pytest.warns(UserWarning, match=r"line \d+(.|\n)*took the value of ready, which this recording writes"):
        _stepped(_Started(ask, dtype))
    model = _Started(ask, dtype)
    model.ready.fill_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _stepped(model)


# -- where a package asked --------------------------------------------------------------------------------------------


def test_what_a_package_asks_is_said_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        def scaled(x):
            rows = int(x.shape[0])
            if x.sum() > 0:
                x = x / rows
            return x + int(x.max())
    """
    (tmp_path / "asking_package.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("asking_package")
    with pytest.warns(UserWarning) as caught, tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3, 2))
        y = package.scaled(x)
    said = [str(each.message) for each in caught]
    fixed, branch = (next(text for text in said if word in text) for word in ("the constant 3", "True branch"))
    assert "y = package.scaled(x) (asked in asking_package.py line 3: rows = int(x.shape[0])):" in fixed
    assert "(asked in asking_package.py line 4: if x.sum() > 0:)" in branch
    assert any("(asked in asking_package.py line 6: return x + int(x.max()))" in note for note in graph.notes)
    with pytest.raises(BranchChanged, match=r"asked in asking_package.py line 4"):
        tfnb.run(y, {x: -torch.ones(3, 2)})


def test_a_check_of_torch_is_said_with_the_option_that_leaves_it_out() -> None:
    def draw(**options: bool) -> None:
        with tfnb.record():
            covariance = tfnb.placeholder(torch.eye(2), shape=(2, 2))
            torch.distributions.MultivariateNormal(torch.zeros(2), covariance, **options)

    with pytest.warns(UserWarning, match=r"asked by torch\.distributions\.constraints(.|\n)*validate_args=False"):
        draw()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(validate_args=False)
