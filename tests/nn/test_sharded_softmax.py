"""Softmax over all classes on the shards of its weights beside `F.cross_entropy` (semantics S-166)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tests.nn.test_embeddings import shards_of
from tfnb.errors import InvalidArgument, ShapeError, TfnbError
from tfnb.nn import sharded_softmax_loss
from tfnb.passes.flow.cut import Kind

CLASSES, WIDTH, BATCH = 11, 6, 5
CHANCE = torch.Generator().manual_seed(7)
WEIGHTS, BIASES, INPUTS = (
    torch.randn(*shape, dtype=torch.float64, generator=CHANCE)
    for shape in ((CLASSES, WIDTH), (CLASSES,), (BATCH, WIDTH))
)
LABELS = torch.tensor([0, 3, 10, 7, 7])


class Head:
    """A loss over sharded weights, with its gradients and one step."""

    def __init__(
        self, shards: int, partition: str = "mod", *, dtype: torch.dtype = torch.float64, biased: bool = True,
        tasks: int = 0,
    ) -> None:  # fmt: skip
        tables = [shards_of(table.to(dtype), shards, partition) for table in (WEIGHTS, BIASES)]
        weights, biases = [], []
        with tfnb.record() as graph:
            x = tfnb.placeholder(INPUTS.to(dtype), shape=INPUTS.shape, name="x")
            y = tfnb.placeholder(LABELS, shape=LABELS.shape, name="y")
            for at, (weight, bias) in enumerate(zip(*tables, strict=True)):
                with tfnb.device(f"task:{at % tasks}" if tasks else None, soft=bool(tasks)):
                    weights.append(tfnb.Variable(weight, name=f"w{at}"))
                    biases.append(tfnb.Variable(bias, name=f"b{at}"))
            over = [*weights, *(biases if biased else ())]
            with tfnb.device("task:0" if tasks else None, soft=bool(tasks)):
                hidden = torch.tanh(x)
                rows = sharded_softmax_loss(weights, biases if biased else None, y, hidden, partition=partition)
                loss = rows.mean()
            gradients = tfnb.gradients(loss, [x, *over], unconnected="zero")
            step = tfnb.train.SGD(0.1).minimize(loss)
        self.graph, self.x, self.y, self.weights, self.biases = graph, x, y, weights, biases
        self.rows, self.loss, self.gradients, self.step = rows, loss, gradients, step

    def run(self, fetches: Any, **options: Any) -> Any:
        feeds = {self.x: INPUTS.to(self.x.dtype), self.y: LABELS}
        return tfnb.Session(self.graph, **options).run(fetches, feeds)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("partition", ["mod", "div"])
@pytest.mark.parametrize("shards", [1, 3, 20])
def test_losses_and_gradients_are_those_of_cross_entropy(shards: int, partition: str, biased: bool) -> None:
    head = Head(shards, partition, biased=biased)
    leaves = [each.clone().requires_grad_() for each in (INPUTS, WEIGHTS, BIASES)]
    wanted = F.cross_entropy(torch.tanh(leaves[0]) @ leaves[1].T + leaves[2] * biased, LABELS, reduction="none")
    found, gradients = head.run([head.rows, head.gradients])
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-13, atol=1e-13)
    derived = torch.autograd.grad(wanted.mean(), leaves)
    torch.testing.assert_close(gradients[0], derived[0], rtol=1e-12, atol=1e-13)
    for table, parts in zip(derived[1:], (gradients[1 : 1 + shards], gradients[1 + shards :]), strict=True):
        for part, expected in zip(parts, shards_of(table, shards, partition), strict=False):
            torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-13)


def test_single_precision_is_within_a_millionth() -> None:
    head = Head(4, dtype=torch.float32)
    logits = torch.tanh(INPUTS.float()) @ WEIGHTS.float().T + BIASES.float()
    torch.testing.assert_close(
        head.run(head.rows), F.cross_entropy(logits, LABELS, reduction="none"), rtol=1e-6, atol=0
    )


def test_large_logits_stay_finite() -> None:
    w, x = torch.tensor([[1e4], [-1e4], [2e4]]), torch.tensor([[1.0], [-1.0]])
    found = sharded_softmax_loss([w[:2], w[2:]], None, torch.tensor([0, 1]), x, partition="div")
    torch.testing.assert_close(found, F.cross_entropy(x @ w.T, torch.tensor([0, 1]), reduction="none"))


def test_a_shard_whose_classes_are_all_masked_adds_nothing() -> None:
    """Their biases are -inf; a label among them has an infinite loss, as in torch."""
    biases = BIASES.index_fill(0, torch.tensor([1, 6]), -torch.inf)
    labels = torch.tensor([0, 3, 10, 7, 6])
    leaves = [each.clone().requires_grad_() for each in (INPUTS, WEIGHTS)]
    wanted = F.cross_entropy(leaves[0] @ leaves[1].T + biases, labels, reduction="none")
    with tfnb.record() as graph:
        x = tfnb.placeholder(INPUTS, shape=INPUTS.shape)
        weights = [tfnb.Variable(part) for part in shards_of(WEIGHTS, 5, "mod")]
        rows = sharded_softmax_loss(weights, shards_of(biases, 5, "mod"), labels, x)
        gradients = tfnb.gradients(rows[:4].sum(), [x, *weights])
    found, (dx, *dw) = tfnb.Session(graph).run([rows, gradients], {x: INPUTS})
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-13, atol=1e-13)
    derived = torch.autograd.grad(wanted[:4].sum(), leaves)
    torch.testing.assert_close([dx, *dw], [derived[0], *shards_of(derived[1], 5, "mod")], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tasks", [2, 4])
def test_over_tasks_the_closed_form_of_bytes_crosses(tasks: int) -> None:
    here, there = Head(4, dtype=torch.float32), Head(4, dtype=torch.float32, tasks=tasks)
    fetches = [there.loss, there.step]
    expected, found = here.run([here.loss, here.step])[0], there.run(fetches, executor="parts")[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for mine, other in zip((*there.weights, *there.biases), (*here.weights, *here.biases), strict=True):
        torch.testing.assert_close(mine.value(), other.value(), rtol=1e-6, atol=1e-7)
    session = tfnb.Session(there.graph, executor="parts")
    program = session._prepare(fetches, (there.x, there.y)).code.program
    sizes = []
    for part in program.parts:
        for edge in (edge for edge in part.sends if edge.kind == Kind.VALUE):
            spec = program.flow.ops[edge.port.op].node.outputs[edge.port.index]
            sizes.append(math.prod(spec.shape) * spec.dtype.itemsize)
    fed = [part.feeds for part in program.parts if part.place.number]
    assert [[*each.values()] for each in fed] == [[Kind.VALUE]] * (tasks - 1), "labels, once for each task"
    away = 4 - 4 // tasks  # shards on other tasks
    assert max(sizes) == 4 * BATCH * WIDTH, "inputs and their gradient, no logits and no weights"
    assert sum(sizes) + 8 * BATCH * len(fed) <= away * BATCH * (8 * WIDTH + 24)


@pytest.mark.parametrize("bad", [-1, CLASSES])
def test_a_label_that_is_no_class_is_named(bad: int) -> None:
    head = Head(3)
    labels = torch.tensor([0, 1, bad, 2, 3])
    with pytest.raises(
        InvalidArgument, match=rf"id {bad} is not within the 11 rows of a table of 3 shards \(w0, ...\)"
    ):
        tfnb.run([head.loss, head.step], {head.x: INPUTS, head.y: labels})
    with pytest.raises(InvalidArgument, match=f"id {bad} is not within the 11 rows"):
        sharded_softmax_loss(WEIGHTS, BIASES, labels, INPUTS)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"inputs": INPUTS[:, :2]}, ShapeError, r"takes inputs \[batch, 2\], weights \[11, 2\].*\[5, 2\], \[11, 6\]"),
        ({"biases": BIASES[:4]}, ShapeError, r"biases \[11\] in as many shards.*and \[4\] in 1 shards"),
        ({"biases": [BIASES[::2], BIASES[1::2]]}, ShapeError, r"\[11, 6\] in 1 shards and \[11\] in 2 shards"),
        ({"labels": LABELS.unsqueeze(1)}, ShapeError, r"labels are of shape \[batch\].*\[5, 1\]"),
        ({"labels": LABELS.double()}, InvalidArgument, "labels are integers"),
        ({"inputs": 3}, TfnbError, "inputs takes Tensor"),
        ({"weights": []}, InvalidArgument, "weights is a table"),
        ({"partition": "x"}, InvalidArgument, "'mod' or 'div'"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], kind: type, text: str) -> None:
    right = {"weights": WEIGHTS, "biases": BIASES, "labels": LABELS, "inputs": INPUTS}
    with pytest.raises(kind, match=text):
        sharded_softmax_loss(**right | change)
