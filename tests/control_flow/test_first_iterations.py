"""Names that are None before a loop: its first iteration is unrolled, and the others are a loop of the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tfnb
from tests.control_flow.test_autograph import recorded
from tests.control_flow.written import blocks, compared
from tfnb.errors import BranchChanged, FailedPrecondition, ShapeError

PROGRAMS = r"""
# a state that the first iteration makes
hidden = None
for row in x:
    if hidden is None:
        hidden = torch.zeros(3)
    hidden = torch.tanh(row + 0.5 * hidden)
return hidden

# handed to a function, with an index and a list
def cell(row, hidden=None):
    return row.tanh() if hidden is None else (row + hidden).tanh()
hidden, outs = None, []
for i, row in enumerate(x):
    hidden = cell(row, hidden)
    outs.append(hidden * i)
return hidden, i, torch.stack(outs)

# the best so far
best, at = None, None
for i in range(len(x)):
    if best is None or x[i].sum() > best:
        best, at = x[i].sum(), i
return best, at

# one after the other
before, last = None, None
total = 0.0
for row in x:
    if before is not None:
        total = total + (row - 2 * last + before).square().sum()
    before = last
    last = row
return total

# a pair, and a way out
state = None
for row in x:
    if state is None:
        state = (row * 0, row * 0 + 1)
    h, c = state
    c = c * row.sigmoid() + h.tanh()
    state = (c.tanh(), c)
    if c.sum() > 2.5:
        break
return state

# inside of a loop, and by a number that a run has
total = x.sum() * 0
for row in x:
    product = None
    for i in range(row.argmax() + 1):
        product = row[i] if product is None else product * row[i]
    total = total + product
return total

# as long as a test says
best, k = None, 0
while k < x.sum().abs() + 1:
    y = (x * k).sin().sum()
    if best is None or y > best:
        best = y
    k += 1
return best, k
"""
FED = [torch.linspace(-1, 2, 3 * n).reshape(n, 3) * (1.0 if n != 2 else -1.0) for n in (3, 1, 2, 5)]


@pytest.mark.parametrize(("name", "body"), blocks(PROGRAMS), ids=[name for name, _ in blocks(PROGRAMS)])
def test_a_name_that_is_none_before_a_loop(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED, (ShapeError,))
    assert any("is unrolled and always runs" in note for note in notes), notes
    assert not any("stays Python" in note for note in notes), notes
    assert refused == (name == "one after the other")  # of the feed with one row: two iterations are by themselves


def test_a_run_without_an_iteration_is_refused() -> None:
    def last(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        found = None
        for i in range(n):
            found = x * i
        return found

    out, (x, n), _ = recorded(last, torch.ones(2), torch.tensor(3))
    torch.testing.assert_close(tfnb.run(out, {x: torch.ones(2), n: 5}), torch.full((2,), 4.0))
    with pytest.raises(BranchChanged):
        tfnb.run(out, {x: torch.ones(2), n: 0})


def test_gradients_and_training_through_a_state_that_begins_as_none() -> None:
    net, plain = nn.GRUCell(3, 4), nn.GRUCell(3, 4)
    plain.load_state_dict(net.state_dict())

    def last(x: torch.Tensor, cell: nn.Module) -> torch.Tensor:
        hidden = None
        for row in x:
            hidden = cell(row[None], hidden)
        return hidden.square().sum()

    with tfnb.record():
        x = tfnb.placeholder(FED[0])
        step = tfnb.train.SGD(0.1).minimize(tfnb.autograph(last)(x, net))
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for fed in FED:
        optimizer.zero_grad()
        last(fed, plain).backward()
        optimizer.step()
        tfnb.run(step, {x: fed})
        torch.testing.assert_close(list(net.parameters()), list(plain.parameters()))


@pytest.mark.filterwarnings("ignore:.*Python took the")
def test_what_a_while_that_stays_python_leaves_is_below_its_guards() -> None:
    def halved(x: torch.Tensor) -> torch.Tensor:
        word, best = "none", x
        while best.sum() > 1:
            best = best / 2
            word = "some" if word == "none" else best  # of several kinds: nothing that a loop can carry
        return best

    out, (x,), notes = recorded(halved, torch.tensor([3.0, 2.0]))
    assert any("stays Python" in note for note in notes)
    torch.testing.assert_close(tfnb.run(out, {x: torch.tensor([2.0, 3.0])}), torch.tensor([0.25, 0.375]))
    for fed in ([9.0, 9.0], [0.5, 0.0]):
        with pytest.raises((BranchChanged, ShapeError, FailedPrecondition)):
            tfnb.run(out, {x: torch.tensor(fed)})
