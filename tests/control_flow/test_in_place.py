"""What loops and branches write in place, who else sees it, and the state of modules that they change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tests.control_flow.written import blocks, compared, function
from tfnb.errors import BranchChanged, ShapeError

STAGED = r"""
# another name of what a loop adds to
a = x * 1
b = a
for row in x:
    a += row
return b

# a view of it
a = x.sum(0)
b = a[1:]
for row in x:
    a += row
    a *= 0.5
return b

# in a loop in a loop
a = x.sum(0)
b = a
for row in x:
    for other in x:
        a += row * other
return b

# until a break
a = x.sum(0) * 0
b = a
for row in x:
    if row.sum() > 1:
        break
    a += 1
return b

# left as it was by the loop, and written after it
a, found = x.sum(0), True
b = a
for row in x:
    if found or row.sum() > 1:
        break
    a += row
a += 1
return b
"""

STAGED += r"""
# a row of a tensor of numbers
kept = torch.tensor([0, 1])
for row in x:
    if row.sum() > kept[0]:
        kept[0] += 2
return kept

# an element that is looked at below
kept, n = torch.tensor([0.0, 1.0]), 0
while n < x.shape[0]:
    kept[0] = kept[0] * 0.5 + x[n, 0]
    n += 1
return kept, kept[0] * 2
"""

PYTHON = r"""
# rows that a loop takes
y = x * 1
for row in y:
    row += 1
return y

# rows of a tensor that is written under its own name
y = x * 1
s = x.sum(0) * 0
for row in y:
    s = s - row
    y[y > 0] *= 0.5
return s, y
"""
FED = [torch.linspace(-1, 2, 3 * n).reshape(n, 3) for n in (3, 1, 2, 5)]


@pytest.mark.parametrize(("name", "body"), blocks(STAGED), ids=[name for name, _ in blocks(STAGED)])
def test_what_a_staged_loop_writes_in_place_is_seen_by_all_names(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED)
    assert not any("stays Python" in note for note in notes), notes
    assert refused == 0


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the")
@pytest.mark.parametrize(("name", "body"), blocks(PYTHON), ids=[name for name, _ in blocks(PYTHON)])
def test_what_an_iteration_cannot_write_is_left_to_python(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED, (BranchChanged, ShapeError))
    assert any("stays Python" in note and "writes into" in note for note in notes)
    assert 0 < refused < len(FED)


QUIET = r"""
# a view that is made and written with grad mode off
a = x * 1
with torch.no_grad():
    a[:, 1] *= 0.5
return a * a

# a part of a part
a = x * 1
with torch.no_grad():
    part = a[0, 1:]
    part += 2
return a * a

# a branch with grad mode off that leaves a name as it was
a = x * 2
with torch.no_grad():
    if x.sum() > 1:
        a = a * 3
return a * a

# a loop with grad mode off that leaves a name as it was
a, b = x * 2, x.sum()
with torch.no_grad():
    for row in x:
        if row.sum() > b:
            a = a * 3
return a * a
"""


@pytest.mark.parametrize(("name", "body"), blocks(QUIET), ids=[name for name, _ in blocks(QUIET)])
def test_with_grad_mode_off_gradients_pass_where_autograd_has_them(name: str, body: str) -> None:
    program = function(body)
    with tfnb.record() as graph:
        x = tfnb.placeholder(FED[0], name="x")
        y = tfnb.autograph(program)(x)
        (dx,) = tfnb.gradients(y.sum(), [x], unconnected="zero")
    session = tfnb.Session(graph)
    for fed in (*FED, -FED[2]):
        leaf = fed.clone().requires_grad_()
        expected = program(leaf)
        wanted = torch.autograd.grad(expected.sum(), leaf)[0] if expected.requires_grad else torch.zeros_like(fed)
        torch.testing.assert_close(session.run([y, dx], {x: fed}), [expected.detach(), wanted])


class Counting(nn.Module):
    """A net that sums up what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("seen", torch.tensor(0.5))


ADDED = """
x, net = x
for row in x:
    net.seen += (row * net.w).sum()
return net.seen * 2
"""


def test_a_buffer_that_a_staged_loop_adds_to_is_written_and_not_trained() -> None:
    program, net, plain = function(ADDED), Counting(), Counting()
    seen = net.seen
    with tfnb.record() as graph:
        x = tfnb.placeholder(FED[0], name="x")
        out = tfnb.autograph(program)((x, net))
        train = tfnb.train.SGD(0.1).minimize(out)
        step = tfnb.group(train, net.seen)
    assert net.seen is seen
    session = tfnb.Session(graph)
    for fed in FED:
        with torch.no_grad():
            expected = program((fed, plain))
            plain.w -= 0.1 * 2 * fed.sum(0)
        torch.testing.assert_close(session.run([out, step], {x: fed})[0], expected)
        torch.testing.assert_close([net.seen, net.w.data], [plain.seen, plain.w.data])


QUIET_STATE = """
# a branch with grad mode off
net.seen.copy_(x.sum())
with torch.no_grad():
    if x.sum() > 1:
        net.seen.copy_(x.prod())
return net.seen.square()

# a loop with grad mode off
net.seen.copy_(x.sum())
with torch.no_grad():
    for row in x:
        net.seen.mul_(0.5).add_(row.sum())
return net.seen.square()

# grad mode off in a branch of a loop
for row in x:
    net.seen.add_(row.prod())
    if row.sum() > 0:
        with torch.no_grad():
            net.seen.copy_(row.sum())
return net.seen.square()
"""


@pytest.mark.parametrize(("name", "body"), blocks(QUIET_STATE), ids=[name for name, _ in blocks(QUIET_STATE)])
def test_with_grad_mode_off_gradients_pass_through_a_buffer_where_autograd_has_them(name: str, body: str) -> None:
    net, program = Counting(), function("x, net = x\n" + body)
    with tfnb.record() as graph:
        x = tfnb.placeholder(FED[0], name="x")
        y = tfnb.autograph(program)((x, net))
        (dx,) = tfnb.gradients(y, [x], unconnected="zero")
    assert not any("stays Python" in note for note in graph.notes), graph.notes
    session = tfnb.Session(graph)
    for fed in (*FED, -FED[2]):
        leaf, plain = fed.clone().requires_grad_(), Counting()
        expected = program((leaf, plain))
        (wanted,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(session.run([y, dx], {x: fed}), [expected.detach(), wanted])


@pytest.mark.parametrize("around", [True, False])
def test_what_a_branch_assigns_with_grad_mode_off_passes_no_gradient(around: bool) -> None:
    var = tfnb.Variable(torch.zeros(3), name="v")

    def program(x: Any) -> Any:
        y = x * 2
        with torch.set_grad_enabled(not around):
            if x.sum() > 0:
                with torch.no_grad():
                    var.assign(y)
        return var * x

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        y = tfnb.autograph(program)(x)
        (dx,) = tfnb.gradients(y.sum(), [x])
    fed = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(tfnb.Session(graph).run([y, dx], {x: fed}), [2 * fed * fed, 2 * fed])


class Choosing(Counting):
    """Writes its buffer in a branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1:
            self.seen += 1
        return (x * self.w).sum()


def test_a_step_runs_what_a_branch_of_the_forward_writes_into_buffers() -> None:
    net = Choosing()
    with tfnb.record() as graph:
        x = tfnb.placeholder(FED[0], name="x")
        step = tfnb.train.SGD(0.1).minimize(tfnb.autograph(net)(x))
    session = tfnb.Session(graph)
    for count, sign in ((1.5, 1), (1.5, -1), (2.5, 1)):
        session.run(step, {x: sign * torch.ones(2, 3)})
        assert net.seen == count


def test_what_is_computed_in_place_of_a_buffer_is_not_trained() -> None:
    net = Counting()
    with tfnb.record() as graph:
        x = tfnb.placeholder(FED[0], name="x")
        net.seen = net.seen + (x * net.w).sum()
        step = tfnb.train.SGD(0.1).minimize(net.seen.square())
    assert step.node and [node.attrs["variable"].shape for node in graph.nodes if "step" in node.tags] == [(3,)]


@pytest.mark.filterwarnings("ignore:.*Python took the")
def test_a_parameter_first_read_below_a_guard_inside_of_a_loop() -> None:
    net = Counting()

    def body(i: Any, y: Any) -> Any:
        if y.sum() > 0:
            return i + 1, y + net.w
        return i + 1, y

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        y = tfnb.while_loop(lambda i, y: i < 2, body, (0, x))[1]
    session = tfnb.Session(graph)
    torch.testing.assert_close(session.run(y, {x: torch.ones(3)}), torch.tensor([3.0, 5.0, 7.0]))
    with pytest.raises(BranchChanged):
        session.run(y, {x: -torch.ones(3)})
