"""Indices of max pools wait for the backward pass in fewer bytes, with the same gradients to the last bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tfnb.execution import lower
from tfnb.passes import LAYOUTS, peak

LARGE = (2, 16, 64, 64)  # indices of this shape take a megabyte


def _pool(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 3, 1, 1)


def _casts(graph: tfnb.Graph, fetches: Any, feeds: Any, layout: Any = "torch") -> Counter[torch.dtype]:
    program = lower(graph, [f.value for f in fetches], [f.value for f in feeds], LAYOUTS[layout])
    return Counter(node.outputs[0].dtype for node in program.graph.nodes if node.op == "aten._to_copy.default")


@pytest.mark.parametrize(("pool", "shape", "narrow"), [
    (_pool, LARGE, torch.int16),
    (_pool, (1, 2, 260, 260), torch.int32),
    (lambda x: F.max_pool2d(x, (3, 2), (2, 1), ceil_mode=True, dilation=2), (6, 16, 64, 64), torch.int16),
    (lambda x: F.adaptive_max_pool2d(x, 48), (4, 16, 64, 64), torch.int16),
    (lambda x: F.max_pool3d(x, 3, 1, 1), (2, 4, 16, 32, 32), torch.int16),
], ids=["int16", "int32", "window", "adaptive", "3d"])  # fmt: skip
@pytest.mark.parametrize("layout", ["torch", "channels_last"])
def test_gradients_keep_their_bits(pool: Any, shape: tuple[int, ...], narrow: torch.dtype, layout: str) -> None:
    torch.manual_seed(0)
    sample = torch.relu(torch.randn(shape))  # many equal numbers
    with tfnb.record() as graph:
        x = tfnb.placeholder(sample, shape=shape)
        y = pool(x)
        fetches = [y, *tfnb.gradients((y * y).sum(), [x])]
    wanted = sample.clone().requires_grad_()
    out = pool(wanted)
    (out * out).sum().backward()
    got = tfnb.Session(graph, compile="off", layout=layout).run(fetches, {x: sample})
    assert torch.equal(got[0], out) and torch.equal(got[1], wanted.grad)
    assert _casts(graph, fetches, [x], layout) == {narrow: 1, torch.int64: 1}


def test_what_somebody_else_takes_stays_as_it_is() -> None:
    sample = torch.randn(LARGE)
    with tfnb.record() as graph:
        x = tfnb.placeholder(sample, shape=LARGE)
        y, where = F.max_pool2d(x, 3, 1, 1, return_indices=True)
        fetches = [where, *tfnb.gradients(y.sum(), [x])]
        small = F.max_pool2d(x[:, :2], 3, 1, 1)
        few = tfnb.gradients(small.sum(), [x])
    assert not _casts(graph, fetches, [x]) and not _casts(graph, few, [x])
    got = tfnb.run(where, {x: sample})
    assert torch.equal(got, F.max_pool2d(sample, 3, 1, 1, return_indices=True)[1])


def test_a_step_holds_less() -> None:
    with tfnb.record() as graph:
        x = h = tfnb.placeholder(torch.randn(LARGE), shape=LARGE)
        for _ in range(6):
            h = _pool(h * 2)
        fetches = tfnb.gradients(h.sum(), [x])
    values, feeds = [f.value for f in fetches], [x.value]
    held = {bool(last): peak(lower(graph, values, feeds, last).graph, values, feeds) for last in ((), LAYOUTS["torch"])}
    assert held[True] < 0.65 * held[False]
