"""Breakpoints: a run stops at a node, writes nothing, and hands over the inputs of the node; here and in a shell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import BreakpointReached, InvalidArgument, NotFound, TfnbError, Unimplemented


class Net:
    """A step whose loss is infinite where its feed is zero."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        with tfnb.record("net") as self.graph:
            x = tfnb.placeholder(torch.rand(5, 4), name="x")
            h = self.layer(x)
            bad = torch.log(h.square().sum(1) * x.sum())
            loss = bad.square().mean()
            self.train = tfnb.train.Adam(0.1).minimize(loss)
        self.x, self.h, self.loss = x, h, loss

    @property
    def values(self) -> list[torch.Tensor]:
        """Of all Variables, the state of the optimizer too."""
        return [variable.value() for variable in self.graph.variables]


@pytest.fixture
def net() -> Iterator[Net]:
    yield Net()
    tfnb.recording.forget("net")


def stopped(*args: Any, **kwargs: Any) -> BreakpointReached:
    with pytest.raises(BreakpointReached) as caught:
        tfnb.run(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize("options", [{}, {"trace": True}, {"isolation": "snapshot"}, {"timeout": 60}, {"check": "nan"}])
def test_a_run_stops_where_the_condition_holds_and_writes_nothing(net: Net, options: dict) -> None:
    tfnb.break_at("h", "value.abs().max() > 100")
    tfnb.run(net.train, {net.x: torch.ones(2, 4)}, **options)
    before, feed = net.values, 1000 * torch.rand(7, 4)
    with torch.no_grad():
        expected = net.layer(feed)
    error = stopped([net.loss, net.train, net.layer.weight], {net.x: feed}, **options)
    assert error.line == 25 and error.node == "h"
    names = [*error.details]
    assert names[-1] == "h" and "x" in names and len(names) == len(net.h.node.inputs) + 1
    torch.testing.assert_close(error.details["h"], expected)
    assert torch.equal(error.details["x"], feed)
    assert all(map(torch.equal, before, net.values))
    kept = {name: value.clone() for name, value in error.details.items()}
    assert tfnb.break_at(off=True) == []
    for _ in range(3):
        tfnb.run(net.train, {net.x: feed}, **options)
    assert not any(map(torch.equal, before, net.values))
    assert all(torch.equal(kept[name], value) for name, value in error.details.items())


@pytest.mark.parametrize(
    ("condition", "values", "holds"),
    [
        ("nan", [1.0, math.nan], True), ("nan", [1.0, math.inf], False), ("inf", [1.0, -math.inf], True),
        ("inf", [math.nan], False), ("value > 1", [0.0, 2.0], True), ("y > 1", [0.0, 2.0], True),
        ("any(v < 0 for v in value)", [1.0], False),
        (lambda value: value.sum() == 0, [1.0, -1.0], True), (None, [], True), ("nan", [], False),
    ],
)  # fmt: skip
def test_conditions(condition: Any, values: list[float], holds: bool) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2), name="x")
        y = x.clone()
    tfnb.break_at(y, condition)
    if holds:
        torch.testing.assert_close(stopped(y, {x: values}).details["x"], torch.tensor(values), equal_nan=True)
    else:
        tfnb.run(y, {x: values})


def test_fit_stops_between_steps_and_goes_on_when_it_is_off(net: Net) -> None:
    data = torch.cat([torch.rand(8, 4), torch.zeros(4, 4), torch.rand(4, 4)])
    tfnb.break_at(net.loss, "nan")
    tfnb.break_at(net.loss, "inf")  # in place of the first
    assert repr(tfnb.break_at(graph=net.graph)) == "[loss if inf]"
    how = {"batch_size": 4, "shuffle": False, "watch": [net.loss]}
    with pytest.raises(BreakpointReached) as caught:
        tfnb.fit(net.train, {net.x: data}, **how)
    assert math.isinf(caught.value.details["loss"])
    assert tfnb.session.default_session(net.graph).state.trained == 2
    data[8:12] = 1.0
    assert tfnb.fit(net.train, {net.x: data}, resume=True, **how).steps == 2


def test_elements_of_a_queue_are_back() -> None:
    queue = tfnb.FIFOQueue(4, torch.float32, ())
    with tfnb.record():
        taken = queue.dequeue() * 2
    for value in (1.0, 5.0):
        queue.enqueue(torch.tensor(value))
    tfnb.break_at(taken, "value > 5")
    assert tfnb.run(taken) == 2
    assert stopped(taken).details[taken.name] == 10 and queue.size() == 1
    tfnb.break_at(off=True, graph=taken.graph)
    assert tfnb.run(taken) == 10


def test_what_goes_wrong_says_what_to_do(net: Net) -> None:
    with pytest.raises(NotFound, match="near: loss"):
        tfnb.break_at("lss")
    for condition, text in (("value >", "no expression"), ("vale > 1", "not vale"), (3, "not 3")):
        with pytest.raises(InvalidArgument, match=text):
            tfnb.break_at(net.loss, condition)
    with pytest.raises(InvalidArgument, match="no value to stop at"):
        tfnb.break_at(net.train)
    with pytest.raises(NotFound, match="no breakpoint at loss; there are: none"):
        tfnb.break_at(net.loss, off=True)
    tfnb.run(net.train, {net.x: torch.ones(2, 4)})
    before = net.values
    tfnb.break_at(net.loss, "value.missing > 1")
    with pytest.raises(InvalidArgument, match=r"at loss failed .*missing.*nothing was written.*--off"):
        tfnb.run(net.train, {net.x: torch.ones(2, 4)})
    assert all(map(torch.equal, before, net.values))
    with pytest.raises(Unimplemented, match="off=True"), tfnb.Session(net.graph).step([net.loss], [net.x]):
        pass
    tfnb.run(net.h, {net.x: torch.ones(2, 4)})  # does not compute the loss


def test_a_cell_recorded_again_keeps_its_breakpoint_and_one_that_lost_the_node_runs() -> None:
    for wanted in (True, False):
        with tfnb.recording.record_cell("again", owner="cell:1", label="In[1]", filename="", namespace={}) as graph:
            x = tfnb.placeholder(torch.ones(2), name="x")
            y = (x + 1).exp() if wanted else x.sin()
        if wanted:
            tfnb.break_at("exp")
            with pytest.raises(TfnbError):
                tfnb.run(y, {x: [1.0]})
        else:
            assert tfnb.run(y, {x: [0.0]}) == 0 and len(tfnb.break_at(graph=graph)) == 1
    tfnb.recording.forget("again")


def test_a_name_within_a_loop_says_what_to_write_there() -> None:
    with tfnb.record("looped") as graph:
        start = tfnb.placeholder(torch.ones(2), name="start")
        tfnb.while_loop(lambda h: h.sum() < 9, lambda h: (h * 2,), (start,))
    with pytest.raises(NotFound, match=r"has no name out here: .* tfnb\.assert_"):
        tfnb.break_at("mul", "nan", graph=graph)
