"""Values of unchanged nodes are reused, also after an edit; results are those of a run without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import tfnb
from tfnb.session.value_cache import ValueCache

LAYERS = 10


def recorded(layers: list[nn.Linear], last: float) -> tuple[Any, Any]:
    """A stack of layers recorded as one cell; ``last`` is what an edit of its last line changes."""
    with tfnb.recording.record_cell("deep", owner="cell:1", label="In[1]", filename="", namespace={}):
        x = tfnb.placeholder(torch.ones(4, 8), name="x")
        h = x
        for layer in layers:
            h = torch.tanh(layer(h) + x.shape[0])
        y = h * last
    return x, y


@pytest.fixture
def deep() -> Any:
    torch.manual_seed(0)
    yield [nn.Linear(8, 8) for _ in range(LAYERS)]
    tfnb.recording.forget("deep")


def counted(cache: ValueCache, run: Any) -> tuple[Any, int]:
    before = cache.computed
    return run(), cache.computed - before


def test_an_edit_of_the_last_layer_computes_the_last_layer(deep: list[nn.Linear]) -> None:
    x, y = recorded(deep, 2.0)
    cache = tfnb.reuse_values(True)
    feed = torch.rand(5, 8)
    first, everything = counted(cache, lambda: tfnb.run(y, {x: feed}))
    assert everything > 3 * LAYERS
    x, y = recorded(deep, 3.0)
    again, some = counted(cache, lambda: tfnb.run(y, {x: feed.clone()}))
    assert some == 1 <= 0.1 * everything
    torch.testing.assert_close(again, first * 1.5)
    again.zero_()  # results are the caller's
    torch.testing.assert_close(tfnb.run(y, {x: feed}), first * 1.5)
    assert counted(cache, lambda: tfnb.run(y, {x: feed + 1}))[1] == everything - LAYERS  # not weights
    assert counted(cache, lambda: tfnb.run(y, {x: feed[:3]}))[1] == everything - LAYERS
    deep[-1].weight.requires_grad_(False).mul_(2.0)
    result, some = counted(cache, lambda: tfnb.run(y, {x: feed}))
    tfnb.reuse_values(False)
    torch.testing.assert_close(result, tfnb.run(y, {x: feed}))
    assert some > 1 and tfnb.reuse_values() is None


def test_steps_that_write_or_draw_compute_everything(deep: list[nn.Linear]) -> None:
    with tfnb.record("deep"):
        x = tfnb.placeholder(torch.ones(4, 8), name="x")
        h = deep[0](x)
        noisy = h + torch.rand_like(h)
        loss = h.square().mean()
        train = tfnb.train.SGD(0.1).minimize(loss)
    cache = tfnb.reuse_values(True)
    feed = {x: torch.ones(4, 8)}
    assert not torch.equal(tfnb.run(noisy, feed), tfnb.run(noisy, feed))
    losses = [tfnb.run(loss, feed) for _ in range(3) if tfnb.run(train, feed) is None]
    assert losses[0] > losses[1] > losses[2]  # what a step wrote is seen
    assert cache.reused == 0
    tfnb.run([loss, h], feed)
    assert cache.reused > 0


def test_the_cache_keeps_its_limit(deep: list[nn.Linear]) -> None:
    x, y = recorded(deep, 2.0)
    cache = tfnb.reuse_values(True, limit=1000)
    for rows in (1, 2, 3, 100):
        tfnb.run(y, {x: torch.rand(rows, 8)})
        assert cache.bytes <= 1000
    assert tfnb.reuse_values(clear=True).bytes == 0


@pytest.fixture(scope="module")
def small() -> Any:
    with tfnb.record("small") as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        v = tfnb.Variable(torch.ones(3), name="v")
        y = (x + v).sin()
        z = torch.zeros(x.shape[0]) + y.sum(1)
        views = [y.t(), y.reshape(-1), z.unsqueeze(0)]
    return graph, x, v, [y, z, views, [y, views, v]]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_any_runs_give_what_they_give_without_a_cache(small: Any, runs: list[tuple[int, int, int]]) -> None:
    graph, x, v, fetches = small
    cached, plain = tfnb.Session(graph), tfnb.Session(graph)
    cache = tfnb.reuse_values(True, graph=graph)
    for change, rows, which in runs:
        if change == 2:
            v.assign_add(torch.ones(3))
        feed = {x: torch.full((rows, 3), float(change))}
        got = cached.run(fetches[which], feed)
        tfnb.reuse_values(False, graph=graph)
        torch.testing.assert_close(got, plain.run(fetches[which], feed), rtol=0, atol=0)
        graph.attached["values"] = cache
        for tensor in tree_leaves(got):
            tensor.zero_()
