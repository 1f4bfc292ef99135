"""The dataflow machine by itself: no graph, no threads, whatever order things are done in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tfnb.execution.dataflow.machine import (
    CALL,
    EMPTY,
    ENTER,
    EXIT,
    MERGE,
    NEXT,
    SINK,
    SWITCH,
    WORK,
    Dead,
    Machine,
    Step,
    Template,
)  # fmt: skip

Port = tuple[Step, int]


class Builder:
    """Templates by hand. A port is a step and one of its outputs."""

    def __init__(self) -> None:
        self.templates: list[Template] = []
        self.root = self.template(1)
        self.results = 0

    def template(self, parallel: int) -> Template:
        self.templates.append(Template(parallel))
        return self.templates[-1]

    def step(
        self, kind: int, inputs: list[Port], call: Callable[..., Any] | None = None, *, frame: Template | None = None,
        outs: int = 1, after: tuple[Port, ...] = (),
    ) -> Step:  # fmt: skip
        template = frame or self.root
        step = Step(kind, template, call)
        step.base, step.count = len(template.slots), len(inputs)
        step.stop = step.base + step.count
        template.slots += [EMPTY if kind == MERGE else None] * step.count
        step.outs = [[] for _ in range(outs)]
        for place, port in enumerate(inputs):
            self.connect(port, step, place)
        for maker, index in after:
            maker.outs[index].append((step, -1))
        step.waits = len(after) + (0 if kind == MERGE else len(inputs))
        return step

    def connect(self, port: Port, step: Step, place: int) -> None:
        port[0].outs[port[1]].append((step, step.base + place))

    def value(self, given: Any) -> Port:
        return self.step(CALL, [], lambda: (given,)), 0

    def call(
        self, function: Callable[..., Any], *inputs: Port, frame: Template | None = None, kind: int = CALL
    ) -> Port:
        return self.step(kind, list(inputs), lambda *args: (function(*args),), frame=frame), 0

    def fetch(self, *ports: Port) -> None:
        for port in ports:
            self.step(SINK, [port], outs=0).number = self.results
            self.results += 1

    def enter(self, port: Port, frame: Template, *, constant: bool = False) -> Port:
        step = self.step(ENTER, [port], frame=port[0].frame)
        step.inner, step.constant = frame, constant
        frame.enters += 1
        return step, 0

    def loop(
        self, init: list[Port], test: Callable[..., Any], body: Callable[..., Any], parallel: int = 10,
        constants: tuple[Port, ...] = (), kind: int = CALL,
    ) -> list[Port]:  # fmt: skip
        """A while over the values; ``body`` gives one function for each, of all values and constants."""
        frame = self.template(parallel)
        merges = []
        for port in init:
            merge = self.step(MERGE, [self.enter(port, frame)], frame=frame)
            merge.count += 1  # the way back
            frame.slots.append(EMPTY)
            merges.append(merge)
        fixed = [self.enter(port, frame, constant=True) for port in constants]
        pred = self.call(test, *((merge, 0) for merge in merges), *fixed, frame=frame)
        switches = [self.step(SWITCH, [(merge, 0), pred], frame=frame, outs=2) for merge in merges]
        inside = [(switch, 1) for switch in switches]
        for merge, function in zip(merges, body, strict=True):  # type: ignore[call-overload]
            after = self.call(function, *inside, *fixed, frame=frame, kind=kind)
            self.connect((self.step(NEXT, [after], frame=frame), 0), merge, 1)
        return [(self.step(EXIT, [(switch, 0)], frame=frame), 0) for switch in switches]

    def machine(self) -> Machine:
        for template in self.templates:
            template.seal()
        return Machine([self.root], self.results)


def carried_out(machine: Machine, seed: int | None = None) -> list[Any]:
    """The results; with a seed, everything is done in a random order."""
    rng = random.Random(seed)
    machine.feed([])
    machine.run(None if seed is None else rng.randrange)
    while machine.tasks:
        task = machine.tasks.pop(0 if seed is None else rng.randrange(len(machine.tasks)))
        machine.finish(task, task.step.call(*task.args))  # type: ignore[misc]
        machine.run(None if seed is None else rng.randrange)
    assert machine.is_over and not machine.roots[0].iterations
    return machine.results


@pytest.mark.parametrize(("value", "expected"), [(True, [300, 1]), (False, [30, 0])])
def test_a_merge_gives_the_live_value_and_its_place(value: bool, expected: list[int]) -> None:
    b = Builder()
    switch = b.step(SWITCH, [b.value(3), b.value(value)], outs=2)
    branches = [b.call(lambda x: x * 10, (switch, 0)), b.call(lambda x: x * 100, (switch, 1))]
    merge = b.step(MERGE, branches, outs=2)
    b.fetch((merge, 0), (merge, 1))
    assert carried_out(b.machine()) == expected


def test_a_step_with_a_dead_input_computes_nothing_and_a_merge_of_dead_values_is_dead() -> None:
    b, called = Builder(), []
    switch = b.step(SWITCH, [b.value(3), b.value(False)], outs=2)
    switch.number = 5
    dead = b.call(lambda x, y: called.append(x), (switch, 1), b.value(2))
    merge = b.step(MERGE, [dead, (switch, 1)])
    after = b.step(CALL, [b.value(1)], lambda x: (called.append(x),), after=(dead,))
    b.fetch(dead, (merge, 0), (after, 0), (switch, 0))
    results = carried_out(b.machine())
    assert all(isinstance(result, Dead) and result.switch == 5 for result in results[:3])
    assert called == [] and results[3] == 3


def test_a_merge_waits_for_its_control_inputs() -> None:
    b, order = Builder(), []
    slow = b.step(WORK, [b.value(1)], lambda x: (order.append("slow"),))
    merge = b.step(MERGE, [b.value(5)], after=((slow, 0),))
    b.fetch(b.call(lambda x: order.append("merged") or x, (merge, 0)))
    assert carried_out(b.machine()) == [5] and order == ["slow", "merged"]


COUNTING = (lambda i, s, k: i + 1, lambda i, s, k: s + i * k)


@pytest.mark.parametrize("parallel", [1, 2, 3, 32])
@pytest.mark.parametrize("seed", range(8))
def test_iterations_do_not_mix_in_any_order(parallel: int, seed: int) -> None:
    b = Builder()
    two = b.value(2)
    outs = b.loop([b.value(0), b.value(0)], lambda i, s, k: i < 20, COUNTING, parallel, (two,), kind=WORK)
    b.fetch(*outs)
    machine = b.machine()
    assert carried_out(machine, seed) == [20, sum(2 * i for i in range(20))]
    assert machine.most <= parallel + 1 and machine.frames == 1


def test_only_so_many_iterations_are_in_flight() -> None:
    b = Builder()  # the second value takes long, and the first does not wait for it
    frame_at = len(b.templates)
    outs = b.loop([b.value(0), b.value(0)], lambda i, s: i < 50, (lambda i, s: i + 1, lambda i, s: s), 4)
    for step in b.templates[frame_at].steps:
        if step.kind == CALL and step.call is not None and step.index > 6:
            step.kind = WORK
            break
    b.fetch(*outs)
    machine = b.machine()
    machine.feed([])
    machine.run()
    assert machine.most <= 4
    while machine.tasks:
        task = machine.tasks.pop()
        machine.finish(task, task.step.call(*task.args))  # type: ignore[misc]
        machine.run()
    assert machine.results == [50, 0] and machine.is_over


def test_no_iteration_gives_the_initial_values_and_a_loop_that_is_not_reached_gives_dead_ones() -> None:
    b = Builder()
    b.fetch(*b.loop([b.value(7)], lambda i: False, (lambda i: i + 1,)))
    switch = b.step(SWITCH, [b.value(3), b.value(False)], outs=2)
    for side in (0, 1):
        b.fetch(*b.loop([(switch, side), (switch, side)], lambda i, s: i < 5, (lambda i, s: i + 1, lambda i, s: s)))
    results = carried_out(b.machine())
    assert results[:3] == [7, 5, 3] and all(isinstance(result, Dead) for result in results[3:])


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_loop_in_a_loop(seed: int | None) -> None:
    b = Builder()
    outer, inner = b.template(3), b.template(2)

    def ring(frame: Template, start: Port, limit: Port) -> tuple[Step, Port]:
        merge = b.step(MERGE, [start], frame=frame)
        merge.count += 1
        frame.slots.append(EMPTY)
        pred = b.call(lambda i, n: i < n, (merge, 0), limit, frame=frame)
        return merge, (b.step(SWITCH, [(merge, 0), pred], frame=frame, outs=2), 1)

    merge, iteration = ring(outer, b.enter(b.value(0), outer), b.enter(b.value(3), outer, constant=True))
    into = b.step(ENTER, [iteration], frame=outer)
    top = b.step(ENTER, [b.call(lambda i: 2 * i, iteration, frame=outer)], frame=outer)
    into.inner = top.inner = inner
    top.constant = True
    inner.enters = 2
    merge2, iteration2 = ring(inner, (into, 0), (top, 0))
    back = b.call(lambda i: i + 1, iteration2, frame=inner)
    b.connect((b.step(NEXT, [back], frame=inner), 0), merge2, 1)
    left = b.step(EXIT, [(iteration2[0], 0)], frame=inner)
    b.connect((b.step(NEXT, [b.call(lambda i: i + 1, (left, 0), frame=outer)], frame=outer), 0), merge, 1)
    b.fetch((b.step(EXIT, [(iteration[0], 0)], frame=outer), 0))
    assert carried_out(b.machine(), seed) == [3]  # 0 -> (no iteration) 1 -> (one iteration) 2 + 1


@pytest.mark.parametrize("length", [20_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_long_chain_needs_no_recursion(length: int) -> None:
    b = Builder()
    port = b.value(0)
    for _ in range(length):
        port = b.call(_add_one, port)
    b.fetch(port)
    assert carried_out(b.machine()) == [length]


def _add_one(x: int) -> int:
    return x + 1


def test_a_value_goes_to_twenty_thousand_steps() -> None:
    b, seen = Builder(), []
    source = b.value(1)
    for _ in range(20_000):
        b.step(CALL, [source], lambda x: (seen.append(x),))
    assert carried_out(b.machine()) == [] and len(seen) == 20_000


def test_the_earlier_iteration_is_the_more_urgent_then_the_longer_way() -> None:
    b = Builder()
    b.loop([b.value(0)], lambda i: i < 3, (lambda i: i + 1,), kind=WORK)
    machine = b.machine()
    machine.feed([])
    machine.run()
    first = machine.tasks.pop()
    machine.finish(first, (1,))
    machine.run()
    second = machine.tasks.pop()
    assert first < second and not second < first
