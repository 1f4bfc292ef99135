"""Items and attributes of outside that loops and branches set: Python runs those, with a guard and a note."""

from __future__ import annotations

import pytest
import torch

import tfnb
from tests.control_flow.entered import Case, checked, recorded
from tests.control_flow.slots import CASES
from tfnb.errors import FailedPrecondition


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_is_right_or_refused(case: Case) -> None:
    """Each input is the sample of one recording and a feed of all: values and gradients are those of Python."""
    for sample in case.inputs:
        found = recorded(case, sample)
        assert any("stays Python" in note for note in found.graph.notes)
        for feed in case.inputs:
            try:
                checked(found, feed, "auto")
            except FailedPrecondition:
                assert not all(map(torch.equal, sample, feed))


def test_a_range_that_stays_python_guards_its_number() -> None:
    def program(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        seen = set()
        for _ in range(n):
            seen.add("a")
            x = x * 2
        return x

    with tfnb.record() as graph:
        x, n = tfnb.placeholder(torch.tensor(1.0)), tfnb.placeholder(torch.tensor(3))
        y = tfnb.autograph(program)(x, n)
    assert any("stays Python: add()" in note for note in graph.notes)
    assert not any(note.startswith("staged") for note in graph.notes)
    assert tfnb.run(y, {x: 1.0, n: 3}) == 8
    with pytest.raises(tfnb.errors.BranchChanged):
        tfnb.run(y, {x: 1.0, n: 2})
