"""Weights of parts: one process and torch's autograd are the oracles, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tfnb
from tests.weighted_losses import BATCH, LOSSES, ROWS, Trained, assert_same, data
from tfnb.passes import step_graph
from tfnb.passes.flow import merges
from tfnb.passes.flow.row_weights import WeighedStep, weighed


def weights(letters: str, loss: Callable[..., Any]) -> tuple[WeighedStep, Any]:
    """What the structure of a loss says, and the loss's value."""
    model, given_ = nn.Linear(3, 4, dtype=torch.float64), data()
    with tfnb.record("weighted") as graph:
        feeds = [tfnb.placeholder(given_[letter][:4], name=letter) for letter in letters]
        value = loss(model, *feeds)
        train = tfnb.train.SGD(0.1).minimize(value)
    return weighed(step_graph(graph, [train.value, value.value], [f.value for f in feeds])), value.value


def test_a_mean_over_rows_costs_a_step_nothing() -> None:
    found, loss = weights(*LOSSES["rows"])
    assert found.of(loss) == merges.ROWS and not found.totals and set(found.gradients.values()) == {merges.ROWS}
    assert len(found.step.fetches) == 2


def test_a_sum_over_rows_takes_no_total() -> None:
    found, loss = weights(*LOSSES["sum"])
    assert found.of(loss) == merges.SUM and not found.totals


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"rows", "sum", "padding of each"}))
def test_a_weighted_mean_has_one_total(name: str) -> None:
    found, loss = weights(*LOSSES[name])
    assert len(found.totals) == 1 and found.of(loss).total == found.totals[0]
    assert set(found.gradients.values()) == {found.of(loss)} and loss not in found.reasons


def pairs(m: Any, x: Any) -> Any:
    return (m(x)[:, None] - m(x)[None]).square().mean()


REFUSED: dict[str, tuple[str, Callable[..., Any], str]] = {
    "two masks": (
        "xkw", lambda m, x, k, w: (m(x)[:, 0] * k).sum() / k.sum() + (m(x)[:, 0] * w).sum() / w.sum(), "weights",
    ),
    "sum and mean": ("x", lambda m, x: m(x).sum() + m(x).mean(), "weights"),
    "sum and penalty": ("x", lambda m, x: m(x).sum() + m.weight.sum(), "constant"),
    "clamp and penalty": (
        "xk", lambda m, x, k: (m(x)[:, 0] * k).sum() / k.sum().clamp(min=1) + m.weight.sum(), "constant",
    ),
    "learned": ("x", lambda m, x: m(x)[:, 0].sum() / m(x)[:, 1].sum(), "weighted"),
    "columns": ("xw", lambda m, x, w: (m(x).sum(0) / (m(x) * w[:, None]).detach().sum(0)).mean(), "weighted"),
    "root": ("x", lambda m, x: m(x).square().mean().sqrt(), "function"),
    "flood": ("x", lambda m, x: m(x).mean().abs(), "bent"),
    "branch": ("x", lambda m, x: (lambda v: tfnb.cond(v < 9, lambda: v, lambda: v / 2))(m(x).mean()), "bent"),
    "largest": ("x", lambda m, x: m(x).amax(), "extreme"),
    "spread": ("x", lambda m, x: m(x).var(0).mean(), "statistic"),
    "contrast": ("x", lambda m, x: F.cross_entropy(m(x) @ m(x).T, torch.arange(x.shape[0])), "across"),
    "pairs": ("x", pairs, "across"),
    "centered": ("x", lambda m, x: (m(x) - m(x).mean(0)).square().mean(), "across"),
    "over rows": ("x", lambda m, x: m(x).softmax(0).square().mean(), "across"),
    "neighbours": ("x", lambda m, x: (m(x)[1:] - m(x)[:-1]).square().mean(), "across"),
    "product of means": ("x", lambda m, x: m(x).mean() * m(x).square().mean(), "function"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_weighted_mean_is_named_by_its_structure(name: str) -> None:
    letters, loss, kind = REFUSED[name]
    found, value = weights(letters, loss)
    assert found.reasons[value].kind == kind and found.reasons[value].text


def test_equal_totals_are_one_whatever_computes_them() -> None:
    found, _ = weights(
        "xk", lambda m, x, k: (m(x)[:, 0] * k).sum() / k.sum() + (m(x) * k[:, None]).sum() / k.double().sum()
    )
    assert len(found.totals) == 1
    different, value = weights("xk", lambda m, x, k: (m(x)[:, 0] * k).sum() / k.sum() + m(x).sum() / (~k).sum())
    assert different.reasons[value].kind == "weights"


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_train_as_whole_batches(name: str, optimizer: str) -> None:
    assert_same(Trained(*LOSSES[name], optimizer, microbatches=3), Trained(*LOSSES[name], optimizer))


def test_whole_batches_train_as_by_torch() -> None:
    model, rows = nn.Linear(3, 4, dtype=torch.float64), data()
    letters, loss = LOSSES["clamped mask"]
    torch.manual_seed(0)
    model = nn.Linear(3, 4, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(2):
        for at in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            loss(model, *(rows[letter][at : at + BATCH] for letter in letters)).backward()
            optimizer.step()
    found = Trained(letters, loss, "Adam", microbatches=2)
    torch.testing.assert_close(found.state, [p.detach() for p in model.parameters()], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:loss is nan")
@pytest.mark.parametrize(("name", "is_nan"), [("ignored", False), ("mask", True), ("clamped mask", False)])
def test_a_batch_that_counts_nothing_is_that_of_torch(name: str, is_nan: bool) -> None:
    letters, loss = LOSSES[name]
    model, rows = nn.Linear(3, 4, dtype=torch.float64), data()
    rows |= {"z": torch.full((ROWS,), -100), "k": torch.zeros(ROWS, dtype=torch.bool)}
    expected = torch.autograd.grad(loss(model, *(rows[letter][:6] for letter in letters)), [*model.parameters()])
    with tfnb.record("nothing"):
        feeds = [tfnb.placeholder(rows[letter][:4]) for letter in letters]
        value = loss(model, *feeds)
        train = tfnb.train.SGD(1.0).minimize(value)
    before = [p.detach().clone() for p in model.parameters()]
    told = tfnb.fit(train, dict(zip(feeds, (rows[c][:6] for c in letters), strict=True)), batch_size=6, epochs=1,
                    microbatches=3, watch={"loss": value}, exact=False)  # fmt: skip
    assert (told.curve[0]["loss"] != told.curve[0]["loss"]) is (name != "clamped mask")
    for p, old, grad in zip(model.parameters(), before, expected, strict=True):
        assert bool(grad.isnan().all()) is is_nan
        torch.testing.assert_close(p.detach(), old - grad, equal_nan=True, rtol=1e-12, atol=1e-12)


def test_each_of_two_optimizers_has_its_own_weight() -> None:
    """As of two adversaries whose steps are one."""

    def trained(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(2)
        one, other, rows = nn.Linear(3, 1, dtype=torch.float64), nn.Linear(3, 4, dtype=torch.float64), data()
        with tfnb.record("two"):
            x, k, z = (tfnb.placeholder(rows[letter][:4]) for letter in "xkz")
            first = (one(x)[:, 0].square() * k).sum() / k.sum()
            second = F.cross_entropy(other(x), z) + 0 * other.bias.sum()
            steps = tfnb.group(
                tfnb.train.SGD(0.1).minimize(first, variables=[*one.parameters()]),
                tfnb.train.Adam(0.1).minimize(second, variables=[*other.parameters()]),
            )
        fed = {x: rows["x"], k: rows["k"], z: rows["z"]}
        tfnb.fit(steps, fed, batch_size=BATCH, epochs=2, shuffle=False, **options)
        return [p.detach().clone() for p in (*one.parameters(), *other.parameters())]

    torch.testing.assert_close(trained(microbatches=3), trained(), rtol=1e-12, atol=1e-12)


def test_rows_of_a_table_are_weighted_too() -> None:
    def trained(**options: Any) -> torch.Tensor:
        torch.manual_seed(2)
        table, rows = nn.Embedding(5, 4, sparse=True, dtype=torch.float64), data()
        with tfnb.record("table"):
            y, z = tfnb.placeholder(rows["y"][:4]), tfnb.placeholder(rows["z"][:4])
            train = tfnb.train.SGD(0.5).minimize(F.cross_entropy(table(y), z))
        tfnb.fit(train, {y: rows["y"], z: rows["z"]}, batch_size=BATCH, epochs=2, shuffle=False, **options)
        return table.weight.detach().clone()

    torch.testing.assert_close(trained(microbatches=3), trained(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [{"microbatches": 3}, {"microbatches": 3, "exact": False}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW, torch.optim.SparseAdam])
@pytest.mark.parametrize("name", ["ignored", "weights", "masked"])
@pytest.mark.filterwarnings("ignore:.*no mean over rows:UserWarning")
def test_rows_that_an_optimizer_of_torch_takes_of_a_table_are_weighted_too(name: str, kind: Any, how: Any) -> None:
    def trained(**options: Any) -> torch.Tensor:
        torch.manual_seed(2)
        table, rows = nn.Embedding(5, 4, sparse=kind is torch.optim.SparseAdam, dtype=torch.float64), data()
        optimizer = kind(table.parameters(), lr=0.1)
        targets = torch.where(torch.arange(len(rows["z"])) % 3 > 0, -100, rows["z"]) if name == "ignored" else rows["z"]
        with tfnb.record("table"):
            y, z = tfnb.placeholder(rows["y"][:4]), tfnb.placeholder(targets[:4])
            if name == "masked":
                losses = F.cross_entropy(table(y), z, reduction="none")
                loss = (losses * (y > 1)).sum() / (y > 1).sum().clamp(min=1)
            else:
                loss = F.cross_entropy(table(y), z, torch.arange(1.0, 5.0).double() if name == "weights" else None)
            loss.backward()
            step = optimizer.step()
        tfnb.fit(step, {y: rows["y"], z: targets}, batch_size=BATCH, epochs=2, shuffle=False, **options)
        return table.weight.detach().clone()

    torch.testing.assert_close(trained(**how), trained(), rtol=1e-12, atol=1e-12)


PARTS: dict[str, Callable[..., Any]] = {
    "mean": lambda r, k, w: r.mean(), "masked": lambda r, k, w: (r * k).sum() / k.sum(),
    "clamped": lambda r, k, w: (r * k).sum() / k.sum().clamp(min=1), "picked": lambda r, k, w: r[k].mean(),
    "by weight": lambda r, k, w: (r * w).sum() / w.sum(), "sum": lambda r, k, w: r.sum() / 8,
    "largest": lambda r, k, w: r.max(), "where": lambda r, k, w: torch.where(k, r, 0).sum() / k.sum(),
    "both": lambda r, k, w: (r * k * w).sum() / (k * w).sum(),
}  # fmt: skip
OUTER: dict[str, Callable[..., Any]] = {
    "itself": lambda a, b, p: a, "scaled": lambda a, b, p: a / 3, "and": lambda a, b, p: a + 2 * b,
    "less": lambda a, b, p: a - b, "bent": lambda a, b, p: (a - 0.5).abs(), "root": lambda a, b, p: (a + 1).sqrt(),
    "penalised": lambda a, b, p: a + p, "times": lambda a, b, p: a * b, "of itself": lambda a, b, p: a / a.detach(),
}  # fmt: skip
ROW: dict[str, Callable[..., Any]] = {
    "square": lambda h: h.square().mean(1), "norm": lambda h: h.softmax(1)[:, 0],
    "centered": lambda h: (h - h.mean(0))[:, 0],
}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([*PARTS]), st.sampled_from([*PARTS]), st.sampled_from([*OUTER]), st.sampled_from([*ROW]))
def test_a_loss_trains_as_on_one_machine_or_is_named(one: str, other: str, outer: str, row: str) -> None:
    def loss(m: nn.Module, x: Any, k: Any, w: Any) -> Any:
        r = ROW[row](m(x))
        return OUTER[outer](PARTS[one](r, k, w), PARTS[other](r, k, w), m.get_parameter("weight").square().sum())

    whole, parts = Trained("xkw", loss, epochs=1), Trained("xkw", loss, epochs=1, microbatches=3)
    if not parts.notes:
        torch.testing.assert_close(parts.state, whole.state, rtol=1e-12, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(parts.curve, whole.curve, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_a_sum_of_means_over_targets_that_all_count_is_a_mean_over_rows() -> None:
    letters, loss = "xyw", lambda m, x, y, w: F.cross_entropy(m(x), y) + F.mse_loss(m(x)[:, 0], w)
    found, value = weights(letters, loss)
    assert found.of(value) == merges.ROWS and value not in found.reasons
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(Trained(letters, loss, microbatches=3), Trained(letters, loss))
