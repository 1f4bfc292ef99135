"""Items and attributes of outside that staged loops and branches set: carried as names are, or a guard."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.entered import Case, checked, recorded
from tests.control_flow.slots import CASES, STAYS
from tfnb.errors import FailedPrecondition


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_items_and_attributes_are_carried(case: Case, executor: str) -> None:
    """Each input is the sample of one recording and a feed of all: values and gradients are those of Python."""
    for sample in case.inputs:
        found = recorded(case, sample)
        assert not any("stays Python" in note for note in found.graph.notes)
        for feed in case.inputs:
            checked(found, feed, executor)


@pytest.mark.parametrize("case", STAYS, ids=str)
def test_what_cannot_be_carried_is_right_or_refused(case: Case) -> None:
    for sample in case.inputs:
        found = recorded(case, sample)
        for feed in case.inputs:
            try:
                checked(found, feed, "auto")
            except FailedPrecondition:
                assert not all(map(torch.equal, sample, feed))


def test_the_object_stays_the_one_that_it_is() -> None:
    held: dict[str, Any] = {"sum": torch.zeros(()), "other": "text"}

    @tfnb.autograph
    def program(n: Any) -> None:
        for _ in range(n):
            held["sum"] = held["sum"] + 2

    with tfnb.record():
        n = tfnb.placeholder(torch.tensor(2))
        program(n)
    assert held["other"] == "text"
    assert held["sum"].sample == 4
    assert tfnb.run(held["sum"], {n: 5}) == 10


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
