"""Steps placed by a search: what runs equals the step in one place, requests stand, and what a user sees."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tfnb
from tests import over_tasks
from tfnb.errors import InvalidArgument, InvalidType
from tfnb.graph.device_request import parse
from tfnb.graph.ops import LATE
from tfnb.passes.flow.places import Place
from tfnb.placement.costs import StepTimes, op_key
from tfnb.session.auto_placement import AutoPlacement


def take_long(graph: tfnb.Graph, seconds: Callable[[], float], sizes: dict[str, int]) -> None:
    """Let traces say that each node takes so many seconds, beside which messages are quick."""
    times = graph.attached["times"] = StepTimes()
    for node in graph.nodes:
        key = op_key(node, graph.contents, sizes)
        if key is not None:
            times.ops[key].append(seconds())


def two_branches(width: int = 8, where: Callable[[int], Any] | None = None) -> SimpleNamespace:
    """A training step of two branches of layers and a head: graph, feeds, loss and step."""
    torch.manual_seed(2)
    branches = [nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()) for _ in range(2)]
    head = nn.Linear(width, 3)
    with tfnb.record() as graph:
        x, y = (
            tfnb.placeholder(torch.ones(4, 8), name="x"),
            tfnb.placeholder(torch.zeros(4, dtype=torch.long), name="y"),
        )
        outs = []
        for number, branch in enumerate(branches):
            with where(number) if where is not None else tfnb.name_scope(f"branch{number}"):
                outs.append(branch(x))
        loss = F.cross_entropy(head(outs[0] + outs[1]), y)
        train = tfnb.train.Adam(0.01).minimize(loss)
    return SimpleNamespace(graph=graph, x=x, y=y, loss=loss, train=train, outs=outs)


def fed(net: SimpleNamespace, rows: int = 4) -> dict[Any, torch.Tensor]:
    return {net.x: torch.linspace(-1, 1, rows * 8).reshape(rows, 8), net.y: torch.arange(rows) % 3}


def tasks_asked(graph: tfnb.Graph) -> set[int]:
    found = (parse(node.device).task for node in graph.nodes if node.device is not None)
    return {task for task in found if task is not None}


def test_a_training_over_two_tasks_gives_the_bits_of_one_place() -> None:
    nets = [two_branches() for _ in range(3)]
    for net in nets[:2]:
        take_long(net.graph, lambda: 1.0, {"B": 4})
        placement = tfnb.place([net.loss, net.train], "auto", tasks=2, soft=True)
        assert len(placement.parts) == 2 and tasks_asked(net.graph) == {0, 1}
        assert {parse(node.device).task for node in (net.outs[0].node, net.outs[1].node)} == {0, 1}
    sessions = [
        tfnb.Session(nets[0].graph, executor="parts"), *(tfnb.Session(net.graph, compile="off") for net in nets[1:])
    ]  # fmt: skip
    for rows in (4, 7, 1):
        losses = [
            session.run([net.loss, net.train], fed(net, rows))[0] for session, net in zip(sessions, nets, strict=True)
        ]  # fmt: skip
        assert torch.equal(losses[0], losses[1])
        torch.testing.assert_close(losses[0], losses[2], rtol=1e-6, atol=0)
    values = [{v.name: v.value() for v in net.graph.variables} for net in nets]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(over_tasks.MODELS), st.integers(1, 4), st.integers(0, 1000))
def test_any_step_runs_where_it_was_placed(model: over_tasks.Model, tasks: int, seed: int) -> None:
    draws = random.Random(seed)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(4, 8), shape=("B", 8), name="x")
        y = model(x)
        (dx,) = tfnb.gradients(y.sum(), [x])
    take_long(graph, lambda: draws.choice([0.01, 1.0, 2.0]), {"B": 4})
    tfnb.place([y, dx], "auto", tasks=tasks, soft=True)
    value = torch.linspace(-1, 1, 24).reshape(3, 8)
    found, wanted = (
        tfnb.Session(graph, **how).run([y, dx], {x: value}) for how in ({"executor": "parts"}, {"compile": "off"})
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_the_same_step_is_placed_the_same_way() -> None:
    places = []
    for _ in range(2):
        net = two_branches()
        take_long(net.graph, lambda: 1.0, {"B": 4})
        tfnb.place([net.loss, net.train], "auto", tasks=3)
        places.append([node.device for node in net.graph.nodes])
    assert places[0] == places[1]


def three_places() -> SimpleNamespace:
    """A step over three tasks in which task 1 needs a value of task 0 late, said to take seconds."""
    with tfnb.record() as graph:
        x, w = (tfnb.placeholder(torch.ones(size), shape=(size,), name=name) for size, name in ((20, "x"), (25, "w")))
        with tfnb.device("task:1"):
            a = w.exp()
            d = a.sum().tanh()
        with tfnb.device("task:2"):
            t = x.sum()
        with tfnb.device("task:0"):
            h = x.exp()
            u = h + t
        with tfnb.device("task:1"):
            c = h + d
    times = graph.attached["times"] = StepTimes()
    for tensor, seconds in ((h, 1.0), (a, 4.0), (d, 3.0), (t, 2.0), (u, 2.0)):
        times.ops[op_key(tensor.node, graph.contents, {}) or ()].append(seconds)
    fed = {x: torch.linspace(0, 1, 20), w: torch.linspace(0, 1, 25)}
    wanted = [fed[x].exp() + fed[x].sum(), fed[x].exp() + fed[w].exp().sum().tanh()]
    return SimpleNamespace(graph=graph, h=h, u=u, c=c, fed=fed, wanted=wanted)


def test_a_value_that_others_need_later_is_sent_when_it_was_used() -> None:
    step = three_places()
    bare = [node.tags for node in step.graph.nodes]
    placement = tfnb.place([step.u, step.c], "auto", tasks=3)
    late = [node for node in step.graph.nodes if LATE in node.tags]
    assert late == [step.h.node] and placement.timeline.peaks[1] == 4 + 80 + 80
    (send,) = (node for node in placement.parts[0].graph.nodes if node.name == "send h -> task:1")
    assert step.u.node.id in send.control
    found = tfnb.Session(step.graph, executor="parts").run([step.u, step.c], step.fed)
    torch.testing.assert_close(found, step.wanted)
    tfnb.place([step.u, step.c])
    assert LATE in step.h.node.tags, "only looked at"
    tfnb.place(step.u, "auto", tasks=3)
    assert [node.tags for node in step.graph.nodes] == bare


def test_a_chain_stays_on_one_task_and_says_so() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        y = x.exp().tanh().sum()
    placement = tfnb.place(y, "auto", tasks=4)
    assert repr(placement).startswith("one task of 4 is enough: predicted ")
    assert tasks_asked(graph) == set() and len(placement.parts) == 1
    assert torch.equal(tfnb.Session(graph).run(y, {x: torch.zeros(2, 3)}), torch.ones(2, 3).tanh().sum())


def test_requests_of_the_user_stand_and_others_follow() -> None:
    net = two_branches(where=lambda number: tfnb.device(f"task:{2 * number}"))
    take_long(net.graph, lambda: 1.0, {"B": 4})
    before = {node.id: node.device for node in net.graph.nodes if node.device is not None}
    placement = tfnb.place([net.loss, net.train], "auto", tasks=3)
    after = {node.id: node.device for node in net.graph.nodes}
    assert all(after[number] == device for number, device in before.items())
    why = placement.why(net.outs[1])
    assert why.place == Place(2) and why.possible == (Place(2),) and "asks for task:2" in why.rule
    tfnb.place([net.loss, net.train], "auto", tasks=4)
    assert all({node.id: node.device for node in net.graph.nodes}[n] == device for n, device in before.items())


def test_a_second_placement_replaces_the_first_and_stages_replace_both() -> None:
    net = two_branches()
    take_long(net.graph, lambda: 1.0, {"B": 4})
    bare = [node.device for node in net.graph.nodes]
    tfnb.place([net.loss, net.train], "auto", tasks=2)
    assert tasks_asked(net.graph) == {0, 1}
    tfnb.place([net.loss, net.train], "auto", tasks=1)
    assert [node.device for node in net.graph.nodes] == bare
    tfnb.place([net.loss, net.train], "auto", tasks=2)
    tfnb.place([net.loss, net.train], stages=3)
    assert tasks_asked(net.graph) == {0, 1, 2}


def test_a_task_that_is_not_there_is_refused_or_dropped() -> None:
    for soft in (False, True):
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.ones(2), name="x")
            with tfnb.device("task:7", soft=soft):
                y = x.exp()
        if soft:
            assert len(tfnb.place(y, "auto", tasks=2).parts) == 1
        else:
            with pytest.raises(
                InvalidArgument, match=r"device specification 'task:7' of node y: there are task:0, task:1"
            ):
                tfnb.place(y, "auto", tasks=2)
            assert y.node.device == "task:7" and graph.nodes


def test_a_kind_of_device_without_the_values_is_refused() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2), name="x")
        with tfnb.device("task:0/device:CUDA:0"):
            y = x.exp()
    with pytest.raises(InvalidArgument, match=r"explicit device specification .* its value lies on cpu"):
        tfnb.place(y, "auto", tasks=2)


def test_two_places_for_one_queue_are_refused() -> None:
    queue = tfnb.FIFOQueue(2, [torch.float32], shapes=[()], name="q")
    with tfnb.record():
        with tfnb.device("task:0"):
            put = queue.enqueue(tfnb.placeholder(torch.tensor(1.0), name="x"))
        with tfnb.device("task:1"):
            size = queue.size()
    with pytest.raises(
        InvalidArgument, match=r"device specification 'task:1' .*queue q is one group.*asks for 'task:0'"
    ):
        tfnb.place([put, size], "auto", tasks=2)


def test_wrong_arguments_say_what_to_do() -> None:
    net = two_branches()
    with pytest.raises(InvalidArgument, match="no cluster is connected: say how many tasks"):
        tfnb.place(net.loss, "auto")
    with pytest.raises(InvalidArgument, match="a search takes 1 to 64"):
        tfnb.place(net.loss, "auto", tasks=0)
    with pytest.raises(InvalidType, match="tasks"):
        tfnb.place(net.loss, "auto", tasks=2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="what is fed is feeds="):
        tfnb.place(net.loss, {net.x: torch.ones(4, 8)})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="stages=2 cuts modules in order: take one"):
        tfnb.place(net.loss, "auto", stages=2)
    with pytest.raises(InvalidArgument, match="tasks=2 is of a search"):
        tfnb.place(net.loss, tasks=2)


def test_what_a_user_sees_before_and_after_a_traced_run() -> None:
    net = two_branches(width=64)
    take_long(net.graph, lambda: 1.0, {"B": 4})
    placement = tfnb.place([net.loss, net.train], "auto", tasks=2, soft=True)
    assert isinstance(placement, AutoPlacement)
    lines = repr(placement).splitlines()
    assert lines[0].startswith("2 of 2 tasks: predicted ") and lines[1].split()[:3] == ["lane", "items", "busy"]
    assert [line.partition("  ")[0] for line in lines[2:4]] == ["task:0", "task:1"] and "█" in lines[2]
    assert all(" → " in line and "▒" in line for line in lines[4:]) and len(lines) > 4
    assert placement.measured is None and placement._repr_html_().count('aria-label="Timeline') == 1
    predicted = placement.predicted
    assert {event.thread for event in predicted.events} == {"task:0", "task:1"}
    assert predicted.seconds == placement.seconds
    crossing = {(sent.name, sent.to) for sent in predicted.transmissions}
    cut = {(placement.name(edge.port), str(edge.to)) for edge in placement.edges}
    assert cut < crossing, "and gradients go to the server from one task"
    assert all(name.startswith("gradients/") for name, _ in crossing - cut)
    why = placement.why(net.outs[0])
    assert why.possible == (Place(0), Place(1)) and "ms at task:0, " in why.rule and "ms at task:1" in why.rule
    assert why.request is None
    session = tfnb.Session(net.graph, compile="off")
    session.run([net.loss, net.train], fed(net), trace=True)
    assert placement.measured is session.trace and placement.seconds == predicted.seconds
    assert repr(placement).splitlines()[-1].startswith("last traced run ")
    assert placement._repr_html_().count('aria-label="Timeline') == 2
    session.run(net.loss, fed(net), trace=True)
    assert placement.measured is None, "a trace of other fetches"


def test_traces_of_runs_are_the_costs_of_the_next_placement() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3, 4), name="x")
        y = (x @ torch.ones(4, 5)).exp().sum()
    session, value = tfnb.Session(graph, compile="off"), torch.ones(6, 4)
    session.run(y, {x: value}, trace=True)
    ran = sum(event.seconds for event in session.trace.events)
    placement = tfnb.place(y, "auto", feeds={x: value}, tasks=1)
    assert placement.timeline.seconds == pytest.approx(ran, abs=5e-6)
    for _ in range(2):
        session.run(y, {x: value}, trace=True)
    times = graph.attached["times"]
    assert {len(found) for found in times.ops.values()} == {3} and len(times.margins[False]) == 3
