"""torch's own samples of each op that has a rule of rows: over three tasks it gives the values of one machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import tfnb
from tfnb.errors import TfnbError
from tfnb.graph import Dim
from tfnb.passes import step_graph
from tfnb.passes.flow.exact_ops import SPECIAL
from tfnb.passes.flow.exact_rows import over_rows
from tfnb.passes.flow.row_rules import RULES
from tfnb.passes.microbatches import divide

TASKS, SAMPLES, LEAST = 3, 4, 4  # tasks; cases of an op; rows of one
UNSET = {"empty_like", "new_empty", "empty_strided", "new_empty_strided"}  # whose results are whatever memory holds


def _names(entry: Any) -> set[str]:
    """The names by which an op may be known among the rules."""
    found = {entry.name, entry.aten_name, entry.name.rpartition(".")[2], *(alias.name for alias in entry.aliases)}
    return {re.sub(r"^(nn\\.functional|linalg|fft)\\.", "", name).replace(".", "_") for name in found}


ENTRIES = [
    entry for entry in op_db
    if torch.float64 in entry.dtypes and entry.name not in UNSET
    and any(rule.strip("_").startswith(name) for name in _names(entry) for rule in (*RULES, *SPECIAL))
]  # fmt: skip


class Case(NamedTuple):
    """A sample whose operands of one shape have rows on ``axis``; the op is called with the rest of it."""

    entry: Any
    sample: Any
    axis: int

    @property
    def alike(self) -> list[int]:
        """The places of further operands that have the shape of the first, and so have rows, too."""
        shape = self.sample.input.shape
        return [
            at for at, each in enumerate(self.sample.args) if isinstance(each, torch.Tensor) and each.shape == shape
        ]

    @property
    def feeds(self) -> list[torch.Tensor]:
        """The operands, with their rows first."""
        found = [self.sample.input, *(self.sample.args[at] for at in self.alike)]
        return [each.detach().movedim(self.axis, 0).contiguous() for each in found]

    def __call__(self, feeds: Sequence[Any], gradient: Any) -> list[Any]:
        """The results of the op, and the derivative of the sum of their squares."""
        first, *others = [each.movedim(0, self.axis) if self.axis else each for each in feeds]
        args = list(self.sample.args)
        for at, each in zip(self.alike, others, strict=True):
            args[at] = each
        out = tree_leaves(self.entry.op(first, *args, **self.sample.kwargs))
        results = [each for each in out if isinstance(each, torch.Tensor)]
        smooth = [each for each in results if each.dtype.is_floating_point]
        derivative = gradient(sum((each * each).sum() for each in smooth), feeds[0]) if smooth else None
        return [*results, *([] if derivative is None else [derivative])]


def eager(case: Case) -> list[torch.Tensor]:
    """The values of torch."""
    first, *others = case.feeds

    def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor | None:
        return torch.autograd.grad(loss, of, allow_unused=True)[0] if loss.requires_grad else None

    return [each.detach() for each in case([first.requires_grad_(), *others], gradient)]


def divided(case: Case) -> list[torch.Tensor] | None:
    """The values over tasks, in their parts; None of a step that is gathered, draws numbers, or is not recorded."""
    feeds = case.feeds
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(each) for each in feeds]
        try:
            results = case(fed, lambda loss, of: tfnb.gradients(loss, [of])[0])
        except (TfnbError, RuntimeError, TypeError, ValueError):
            return None
    step = step_graph(graph, [each.value for each in results], [each.value for each in fed])
    by_id = step.whole.contents.by_id
    varies = all(isinstance(by_id[each.node].outputs[0].shape[0], Dim) for each in step.feeds)
    if not varies or any(node.stream is not None for node in graph.nodes):
        return None
    over = over_rows(step, range(TASKS))
    assert over is not None
    if over.gathered:
        return None
    by_id = over.step.whole.contents.by_id
    parts = over.fed(feeds, divide(len(feeds[0]), TASKS))
    session = tfnb.Session(over.step.whole, compile="off", executor="parts")
    names = [f"{by_id[value.node].name}:{value.index}" for value in over.step.fetches]
    found: list[torch.Tensor] = session.run(
        names, {by_id[value.node].name: each for value, each in zip(over.step.feeds, parts, strict=True)}
    )
    return found


def cases(entry: Any) -> Iterator[Case]:
    """A few samples, with rows on their first and second axes."""
    found = (
        Case(entry, sample, axis)
        for sample in entry.sample_inputs("cpu", torch.float64, requires_grad=False)
        for axis in range(min(2, sample.input.dim() if isinstance(sample.input, torch.Tensor) else 0))
        if sample.input.shape[axis] >= LEAST
    )
    return islice(found, 0, 3 * SAMPLES, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.name}-{entry.variant_test_name}".strip("-"))
def test_values_and_gradients_are_those_of_one_machine(entry: Any) -> None:
    for case in cases(entry):
        try:
            expected = eager(case)
        except Exception:  # a sample that torch refuses once its rows lie elsewhere
            continue
        found = divided(case)
        for mine, theirs in zip(found or (), expected, strict=False):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_ops_of_the_tables_have_samples_that_are_divided() -> None:
    """A sum over rows, and one over the others."""
    entry = next(entry for entry in ENTRIES if entry.name == "sum")
    assert sum(divided(case) is not None for case in cases(entry)) > 1
