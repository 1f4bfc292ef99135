"""Losses over sampled classes beside dense code under autograd, and beside all classes (semantics S-164, S-165)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tfnb.errors import InvalidArgument, ShapeError, TfnbError
from tfnb.graph import current
from tfnb.nn import SampledClasses, log_uniform_sampler, nce_loss, sampled_softmax_loss

CLASSES, WIDTH, BATCH, TRUE = 11, 4, 5, 2
DRAWN = torch.tensor([3, 0, 7, 0, 10])  # one of them twice
CHANCE = torch.Generator().manual_seed(5)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=CHANCE)


WEIGHTS, BIASES, INPUTS = randn(CLASSES, WIDTH), randn(CLASSES), randn(BATCH, WIDTH)
LABELS = torch.tensor([[0, 1], [3, 2], [7, 10], [4, 5], [0, 0]])
GIVEN = SampledClasses(DRAWN, randn(BATCH, TRUE).exp().float(), randn(len(DRAWN)).exp().float())


def dense_logits(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, removes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    every = x @ w.T + b
    true = every.gather(1, LABELS) - GIVEN.true_expected_count.double().log()
    others = every[:, DRAWN] - GIVEN.sampled_expected_count.double().log()
    for row, column in itertools.product(range(BATCH), range(len(DRAWN))):
        if removes and int(DRAWN[column]) in LABELS[row].tolist():
            others = others.index_put((torch.tensor(row), torch.tensor(column)), torch.tensor(-math.inf).double())
    return true, others


def dense_softmax(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, removes: bool) -> torch.Tensor:
    true, others = dense_logits(w, b, x, removes)
    shares = torch.cat([true, others], 1).log_softmax(1)
    return -shares[:, :TRUE].mean(1)


def dense_nce(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, removes: bool) -> torch.Tensor:
    true, others = dense_logits(w, b, x, removes)
    right = F.binary_cross_entropy_with_logits(true, torch.full_like(true, 1 / TRUE), reduction="none").sum(1)
    wrong = torch.where(others.isinf(), 0.0, others.clamp(min=-50).exp().log1p())
    return right + wrong.sum(1)


LOSSES: list[tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = [
    (sampled_softmax_loss, dense_softmax), (nce_loss, dense_nce),
]  # fmt: skip


@pytest.mark.parametrize(("shards", "partition"), [(1, "mod"), (3, "mod"), (4, "div")])
@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize(("loss", "dense"), LOSSES)
def test_losses_and_gradients_are_those_of_dense_code(
    loss: Callable[..., torch.Tensor], dense: Callable[..., torch.Tensor], removes: bool, shards: int, partition: str
) -> None:
    def divided(table: torch.Tensor, name: str) -> list[tfnb.Variable]:
        lengths = [CLASSES // shards + (at < CLASSES % shards) for at in range(shards)]
        parts = table.split(lengths) if partition == "div" else [table[at::shards] for at in range(shards)]
        return [tfnb.Variable(part.clone(), name=f"{name}{at}") for at, part in enumerate(parts)]

    weights, biases = divided(WEIGHTS, "w"), [tfnb.Variable(BIASES, name="b")] if shards == 4 else divided(BIASES, "b")
    with tfnb.record():
        x = tfnb.placeholder(INPUTS, shape=INPUTS.shape, name="x")
        labels = tfnb.placeholder(LABELS, shape=LABELS.shape, name="labels")
        found = loss(weights, biases, labels, x, len(DRAWN), CLASSES, TRUE, GIVEN, removes, partition=partition)
        gradients = tfnb.gradients(found.sin().sum(), [x, *weights, *biases])
    values, slices = tfnb.run([found, gradients], {x: INPUTS, labels: LABELS})
    leaves = [each.clone().requires_grad_() for each in (WEIGHTS, BIASES, INPUTS)]
    expected = dense(*leaves, removes)
    torch.testing.assert_close(values, expected.detach(), rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    torch.testing.assert_close(slices[0], wanted[2], rtol=1e-11, atol=1e-12)
    for table, parts in ((wanted[0], slices[1 : 1 + shards]), (wanted[1], slices[1 + shards :])):
        for at, part in enumerate(divided(table, "g") if len(parts) > 1 else [table]):
            part = part.value() if isinstance(part, tfnb.Variable) else part
            torch.testing.assert_close(parts[at].to_dense(), part, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("loss", "dense"), LOSSES)
def test_second_derivatives_are_those_of_dense_code(loss: Any, dense: Any) -> None:
    with tfnb.record():
        x = tfnb.placeholder(INPUTS, shape=INPUTS.shape, name="x")
        found = loss(WEIGHTS, BIASES, LABELS, x, len(DRAWN), CLASSES, TRUE, GIVEN, True)
        (first,) = tfnb.gradients(found.sum(), [x])
        (second,) = tfnb.gradients(first.square().sum(), [x])
    leaf = INPUTS.clone().requires_grad_()
    (once,) = torch.autograd.grad(dense(WEIGHTS, BIASES, leaf, True).sum(), leaf, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), leaf)
    torch.testing.assert_close(tfnb.run(second, {x: INPUTS}), twice, rtol=1e-10, atol=1e-11)


def test_all_classes_sampled_once_give_the_full_softmax_loss() -> None:
    every = SampledClasses(torch.randperm(CLASSES), torch.ones(BATCH, 1), torch.ones(CLASSES))
    labels = LABELS[:, 0]
    found = sampled_softmax_loss(WEIGHTS, BIASES, labels, INPUTS, CLASSES, CLASSES, sampled_values=every)
    wanted = F.cross_entropy(INPUTS @ WEIGHTS.T + BIASES, labels, reduction="none")
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_expected_counts_are_those_of_the_formula() -> None:
    labels = torch.tensor([[0], [1]])
    assert float(log_uniform_sampler(labels, 1, 4, False, 10).true_expected_count[0]) == pytest.approx(1.1562593)
    tried = set()
    for seed in range(40):
        torch.manual_seed(seed)
        drawn = log_uniform_sampler(labels, 1, 4, True, 10)
        p = math.log(3 / 2) / math.log(11)
        tries = math.log1p(-float(drawn.true_expected_count[1])) / math.log1p(-p)
        assert abs(tries - round(tries)) < 1e-3 and round(tries) >= 4
        tried.add(round(tries))
        if round(tries) == 5:
            assert float(drawn.true_expected_count[1]) == pytest.approx(0.6039369, abs=1e-6)
        at = drawn.sampled_candidates.tolist()
        assert len({*at}) == 4 and (
            1 not in at
            or math.isclose(
                float(drawn.sampled_expected_count[at.index(1)]), float(drawn.true_expected_count[1]), rel_tol=1e-6
            )
        )
    assert {4, 5, 6} <= tried


def test_the_mean_of_sampled_gradients_is_their_expectation() -> None:
    """The expectation over all draws with repetition is a sum; the mean of runs lies within 3 sigma of it."""
    classes, count, runs = 4, 2, 3000
    w, x, labels = randn(classes, 2), randn(2, 2), torch.tensor([[1], [2]])

    def gradient(drawn: Any) -> torch.Tensor:
        leaf = w.clone().requires_grad_()
        loss = sampled_softmax_loss(leaf, torch.zeros(classes).double(), labels, x, count, classes, 1, drawn).sum()
        return torch.autograd.grad(loss, leaf)[0]

    p = [math.log((k + 2) / (k + 1)) / math.log(classes + 1) for k in range(classes)]
    expected = torch.zeros_like(w)
    for pair in itertools.product(range(classes), repeat=count):
        counts = SampledClasses(
            torch.tensor(pair),
            torch.tensor([[count * p[1]], [count * p[2]]]),
            torch.tensor([count * p[k] for k in pair]),
        )
        expected += math.prod(p[k] for k in pair) * gradient(counts)
    with tfnb.record():
        table = tfnb.Variable(w, name="w")
        drawn = log_uniform_sampler(tfnb.constant(labels), 1, count, False, classes)
        loss = sampled_softmax_loss(table, torch.zeros(classes).double(), labels, x, count, classes, 1, drawn).sum()
        (slices,) = tfnb.gradients(loss, [table])
        dense = slices.to_dense()
    call = tfnb.Session(dense.graph, compile="off").make_callable(dense)
    found = torch.stack([call() for _ in range(runs)])
    deviation = (found.mean(0) - expected).abs() / (found.std(0) / runs**0.5).clamp(min=1e-12)
    assert float(deviation.max()) < 3


def test_each_run_draws_anew_and_a_seed_repeats_it() -> None:
    def recorded() -> tuple[tfnb.Graph, Any]:
        with tfnb.record() as g:
            labels = tfnb.placeholder(LABELS, shape=LABELS.shape, name="labels")
            found = sampled_softmax_loss(WEIGHTS, BIASES, labels, INPUTS, 3, CLASSES, TRUE)
            drawn = log_uniform_sampler(labels, TRUE, 3, True, CLASSES).sampled_candidates
        return g, [found, drawn]

    runs = []
    for _ in range(2):
        g, fetches = recorded()
        session = tfnb.Session(g)
        runs.append([session.run(fetches, {"labels": LABELS}) for _ in range(6)])
    for first, second in zip(*runs, strict=True):
        assert all(map(torch.equal, first, second))
    assert len({tuple(drawn.tolist()) for _, drawn in runs[0]}) > 1
    whole, parts = (tfnb.Session(g, executor=executor) for executor in ("auto", "parts"))
    assert torch.equal(whole.run(fetches[0], {"labels": LABELS}), parts.run(fetches[0], {"labels": LABELS}))


def test_labels_that_are_not_numbered_by_frequency_are_noted_once() -> None:
    rising = torch.arange(64) + 936

    def notes(labels: torch.Tensor) -> list[str]:
        with tfnb.record():
            shown = tfnb.placeholder(labels, shape=labels.shape, name="labels")
            for _ in range(2):
                sampled_softmax_loss(torch.zeros(1000, 2), torch.zeros(1000), shown, torch.zeros(64, 2), 5, 1000)
            return [note for note in current.recording().tape.notes if "log-uniform" in note]

    (note,) = notes(rising)
    assert "of 64 labels 0 are below 256, and at least 16 would be" in note and "line" in note
    assert not notes(torch.arange(64)) and not notes(torch.arange(64) * 15)


@pytest.mark.parametrize("loss", [sampled_softmax_loss, nce_loss])
@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"labels": torch.tensor([1, 11, 2, 3, 4]), "num_true": 1}, InvalidArgument, "id 11 is not within the 11 rows"),
        ({"labels": LABELS.double()}, InvalidArgument, "labels are integers, and these are torch.float64"),
        ({"labels": LABELS, "num_true": 3}, ShapeError, r"labels are of shape \[batch, 3\].*\[5, 2\]"),
        ({"biases": torch.zeros(3)}, ShapeError, r"11 classes takes.*biases \[11\], and these.*\[11, 4\] and \[3\]"),
        ({"inputs": INPUTS[:, :2]}, ShapeError, r"inputs \[batch, 2\], weights \[11, 2\]"),
        ({"num_sampled": 12, "sampled_values": None}, InvalidArgument, "12 distinct classes.*there are 11"),
        ({"num_sampled": 0}, InvalidArgument, "num_sampled is a number of classes, at least 1, and was given 0"),
        ({"num_sampled": 2.0}, TfnbError, "num_sampled takes int"),
        ({"num_sampled": 4}, ShapeError, r"sampled_values are of shapes \[4\], \[5, 2\] and \[4\].*\[5\], \[5, 2\]"),
        ({"sampled_values": (DRAWN,)}, InvalidArgument, "a triple"),
        ({"sampled_values": (DRAWN, 1, 2)}, TfnbError, "true_expected_count takes Tensor"),
        ({"weights": []}, InvalidArgument, "weights is a table"),
        ({"partition": 3}, InvalidArgument, "'mod' or 'div'"),
        ({"remove_accidental_hits": 1}, TfnbError, "remove_accidental_hits takes bool"),
    ],
)
def test_wrong_arguments_are_named(loss: Any, change: dict[str, Any], kind: type, text: str) -> None:
    right = {
        "weights": WEIGHTS, "biases": BIASES, "labels": LABELS, "inputs": INPUTS, "num_sampled": len(DRAWN),
        "num_classes": CLASSES, "num_true": TRUE, "sampled_values": GIVEN,
    }  # fmt: skip
    right |= {"sampled_values": None} if change.get("num_true") == 1 else {}
    with pytest.raises(kind, match=text):
        loss(**right | change)
