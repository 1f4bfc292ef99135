"""Bounded staleness, with real cores as servers and loops that enter, push, leave and die. No socket, no clock."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.alone.test_core import Add
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import Reply, RequestArrival
from tfnb.cluster.wire.messages import Ok, OpId, Refusal, Request
from tfnb.state.store import Store


class World:
    """Servers, and beside them what a replay in plain Python says of clocks and values."""

    def __init__(self, shards, staleness):
        self.shards, self.staleness = shards, staleness
        self.cores = {
            shard: Core(Store(), lambda meta, tensors: Add(), epoch=1, incarnation=7, shard=shard) for shard in shards
        }
        self.tickets = itertools.count()
        self.answers: dict[int, Ok | Refusal] = {}
        self.waiting: dict[int, tuple[int, str]] = {}  # ticket -> shard and loop
        self.clocks: dict[int, dict[str, int]] = {shard: {} for shard in shards}
        self.values = dict.fromkeys(shards, 0.0)
        self.gone: set[tuple[int, str]] = set()
        for shard in shards:
            self.ask(shard, "create", "c", [torch.zeros(1, dtype=torch.float64)], keys=["w"])
            self.ask(shard, "register_shard", "c", plan="add")
            self.ask(shard, "open_training", "c", training="t")

    def ask(self, shard, method, client, tensors=(), /, op=None, **meta):
        ticket = next(self.tickets)
        request = Request(method, op or OpId(client, ticket), 1, 7, meta, list(tensors))
        for effect in self.cores[shard].on(RequestArrival(ticket, request), 0.0):
            assert isinstance(effect, Reply)
            self.answers[effect.ticket] = effect.answer
            if effect.ticket in self.waiting:
                self.read(*self.waiting.pop(effect.ticket), effect.answer)
        return ticket

    def behind(self, shard, loop):
        """How far the slowest loop is behind this one, by the replay."""
        return self.clocks[shard][loop] - min(self.clocks[shard].values())

    def read(self, shard, loop, answer):
        """A read that was answered: it is fresh enough, and whole."""
        if isinstance(answer, Refusal):
            assert (shard, loop) in self.gone
            return
        assert self.behind(shard, loop) <= self.staleness, "C-55"
        assert answer.tensors[0].item() == self.values[shard] if answer.tensors else True

    def check(self):
        """Nobody waits who need not."""
        for shard, loop in self.waiting.values():
            assert self.behind(shard, loop) > self.staleness


class Loop:
    """One loop of a task: it enters, steps, and leaves as `fit.resident` does."""

    def __init__(self, world, name, steps):
        self.world, self.name, self.left, self.clock = world, name, steps, 0
        self.alive, self.is_in = True, False
        self.todo: list = []
        self.done = 0

    def plan(self):
        """The requests of what it does next, each after the answer to the one before; shards of a step in any order."""
        about = {"training": "t", "loop": self.name}
        if not self.is_in:
            self.is_in = True
            self.todo = [("enter", shard, about) for shard in self.world.shards]
            self.todo += [("read", shard, about) for shard in self.world.shards]
        elif self.left:
            self.left, self.clock = self.left - 1, self.clock + 1
            self.todo = [("push", shard, about) for shard in self.world.shards]
            self.todo += [("read", shard, about) for shard in self.world.shards]
        else:
            self.leave()

    def leave(self):
        """Stand still."""
        for shard in self.world.shards:
            self.world.clocks[shard].pop(self.name, None)
            self.world.ask(shard, "depart", self.name, training="t", loop=self.name)
        self.is_in = False

    @property
    def is_waiting(self):
        return any(loop == self.name for _, loop in self.world.waiting.values())

    def act(self):
        """One request, unless the one before waits."""
        world = self.world
        if self.is_waiting:
            return
        if not self.todo:
            self.plan()
            return
        kind, shard, about = self.todo.pop(0)
        if kind == "enter":
            answer = world.answers[world.ask(shard, "enter", self.name, clock=self.clock, **about)]
            if isinstance(answer, Refusal):
                return self.fail(shard)
            if shard == world.shards[0]:
                assert answer.meta["clock"] >= self.clock
                self.clock = answer.meta["clock"]
            world.clocks[shard][self.name] = answer.meta["clock"]
        elif kind == "push":
            grad = [torch.full((1,), 1.0, dtype=torch.float64)]
            is_in = self.name in world.clocks[shard]
            before = dict(world.clocks[shard])
            world.clocks[shard] |= {self.name: self.clock} if is_in else {}
            world.values[shard] += is_in
            answer = world.answers[
                world.ask(
                    shard, "push", "", grad, op=OpId(f"{self.name} steps", self.clock), plan="add", clock=self.clock,
                    reads=["w"], **about,
                )
            ]  # fmt: skip
            if isinstance(answer, Refusal):
                world.clocks[shard] = before
                return self.fail(shard)
            assert is_in and answer.tensors[0].item() == world.values[shard]
            assert answer.meta["lead"] == world.behind(shard, self.name)
            self.done += shard == world.shards[-1]
            if answer.meta["lead"] <= world.staleness:  # the answer has the values of the next step
                self.todo.remove(("read", shard, about))
        else:
            ticket = world.ask(shard, "pull", self.name, keys=["w"], since=[-1], staleness=world.staleness, **about)
            if ticket in world.answers:
                world.read(shard, self.name, world.answers[ticket])
                if isinstance(world.answers[ticket], Refusal):
                    self.fail(shard)
            else:
                world.waiting[ticket] = shard, self.name

    def fail(self, shard):
        """Only a loop that was given up is refused."""
        assert (shard, self.name) in self.world.gone
        self.alive, self.todo = False, []

    def give_up(self, shard):
        """The notebook takes it for lost, and tells one server."""
        self.world.clocks[shard].pop(self.name, None)
        self.world.gone.add((shard, self.name))
        self.world.ask(shard, "depart", "notebook", training="t", loop=self.name, gone=True)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_c55_c56_reads_are_never_staler_than_asked_and_nobody_waits_for_the_dead(data):
    shards = data.draw(st.sampled_from([(0,), (0, 1), (2, 0, 1)]))
    world = World(shards, data.draw(st.integers(0, 3)))
    loops = [Loop(world, f"loop{i}", data.draw(st.integers(0, 6))) for i in range(data.draw(st.integers(1, 4)))]
    for _ in range(data.draw(st.integers(0, 80))):
        loop = data.draw(st.sampled_from(loops))
        kind = data.draw(st.sampled_from(["act"] * 12 + ["stand", "stop", "lost"]))
        if kind == "lost":  # also one that lives, and goes on to send
            loop.give_up(data.draw(st.sampled_from(shards)))
        elif (
            kind == "stand" and loop.is_in and not loop.todo and loop.name not in {n for _, n in world.waiting.values()}
        ):
            loop.leave()
        elif kind == "stop":
            loop.alive = False
        elif loop.alive:
            loop.act()
        world.check()
    for loop in loops:
        if not loop.alive or any(name == loop.name for _, name in world.gone):
            for shard in shards:
                loop.give_up(shard)
            loop.alive = False
    for _ in range(300):
        for loop in loops:
            if loop.alive and (loop.left or loop.is_in):
                loop.act()
                world.check()
    assert all(not loop.alive or not (loop.left or loop.is_in) for loop in loops), "those that live get to their end"
    assert not world.waiting
    for shard, core in world.cores.items():
        assert core.store.get("w").item() == world.values[shard]
        assert not core.trainings.courses["t"].clocks


def test_a_loop_that_comes_later_begins_where_the_slowest_is():
    world = World((0,), 1)

    def enter(loop, clock):
        ticket = world.ask(0, "enter", loop, training="t", loop=loop, clock=clock)
        return world.answers[ticket].meta["clock"]

    assert enter("first", 0) == 0
    one = [torch.ones(1, dtype=torch.float64)]
    for clock in range(1, 5):
        world.ask(0, "push", "first", one, plan="add", training="t", loop="first", clock=clock)
    assert enter("second", 0) == 4
    for loop in ("first", "second"):
        world.ask(0, "depart", loop, training="t", loop=loop)
    assert enter("third", 2) == 4, "nobody is there, and it is not behind where the slowest one was"
    assert enter("fourth", 9) == 9, "who was ahead stays ahead"


def test_a_push_that_is_repeated_moves_the_clock_once_and_its_loop_on():
    world = World((0,), 0)
    for loop in ("a", "b"):
        world.ask(0, "enter", loop, training="t", loop=loop, clock=0)
    push = {"plan": "add", "training": "t", "loop": "a", "clock": 1, "reads": ["w"]}
    for _ in range(2):
        ticket = world.ask(0, "push", "", [torch.ones(1, dtype=torch.float64)], op=OpId("steps", 0), **push)
        assert world.answers[ticket].meta["lead"] == 1
    assert world.cores[0].store.get("w").item() == 1.0
    ticket = world.ask(0, "pull", "a", keys=["w"], training="t", loop="a", staleness=0)
    assert ticket not in world.answers
    world.ask(0, "depart", "notebook", training="t", loop="b", gone=True)
    assert world.answers[ticket].tensors[0].item() == 1.0
    for method in ("enter", "push", "pull"):
        late = world.ask(0, method, "late", training="t", loop="b", clock=1, keys=["w"], plan="add", staleness=0)
        assert world.answers[late] == Refusal("given-up", "loop b was given up")


@pytest.mark.parametrize("clock", [0, 7])
def test_the_first_loop_keeps_its_clock(clock):
    world = World((0,), 0)
    ticket = world.ask(0, "enter", "a", training="t", loop="a", clock=clock)
    assert world.answers[ticket].meta["clock"] == clock
