"""What staged code computes and gives with grad mode off passes gradients where autograd's tensors do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tfnb
from tests.control_flow.test_in_place import FED
from tests.control_flow.written import function


@pytest.mark.filterwarnings("ignore:.*Python took the")
def test_a_name_that_python_gives_with_grad_mode_off_passes_the_gradient_of_what_it_holds() -> None:
    body = """
a, b = x.sum(), x.max()
with torch.no_grad():
    if x.sum() > 0:
        state.kind = "taken"
        a = b
return a * 2
"""
    program = function(body, state=SimpleNamespace(kind=None))
    with tfnb.record() as graph:
        x = tfnb.placeholder(FED[0].double(), name="x")
        (slope,) = tfnb.gradients(tfnb.autograph(program)(x), [x])
    assert any("line 4 of f: `if` stays Python" in note for note in graph.notes)
    leaf = FED[3].double().requires_grad_()
    (want,) = torch.autograd.grad(program(leaf), leaf)
    torch.testing.assert_close(tfnb.run(slope, {x: leaf.detach()}), want)


def test_a_view_that_a_branch_takes_with_grad_mode_off_passes_no_gradient_and_its_tensor_does() -> None:
    body = """
m = x * 1
v = x.sum(0)
with torch.no_grad():
    if x.sum() > -99:
        v = m[0]
        m.t()[2].neg_()
        v += 1
return v, m
"""
    program = function(body)
    with tfnb.record():
        x = tfnb.placeholder(FED[0].double(), name="x")
        v, m = tfnb.autograph(program)(x)
        of_view = tfnb.gradients(v.square().sum(), [x], unconnected="zero")
        of_all = tfnb.gradients(m.square().sum(), [x])
    leaf = FED[3].double().requires_grad_()
    want, whole = program(leaf)
    (slope,) = torch.autograd.grad(whole.square().sum(), leaf)
    found = tfnb.run([v, m, *of_view, *of_all], {x: leaf.detach()})
    torch.testing.assert_close(found, [want.detach(), whole.detach(), torch.zeros_like(leaf), slope])
