"""One step over several tasks under any faults, alone: the machine of the step, the rendezvous of each task and real
cores; messages arrive late, twice and in any order. No socket, no clock.

However it goes, the step ends: all shards wrote it once, with the numbers of one place, or there is one typed error and
no shard wrote anything; nothing of it is left anywhere, and the next step works.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.cluster.alone.test_core import Server
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import plan as p
from tfnb.cluster.tasks import meeting as m
from tfnb.cluster.wire.messages import Failure, Ok
from tfnb.errors import StepAborted, TfnbError, Unavailable

BAD = Failure("InvalidArgument", "kernel")
DEADLINE = 50.0


class Send(NamedTuple):
    """A part sends what it has by an edge to another one."""

    edge: int
    to: int


class Receive(NamedTuple):
    """A part adds what comes by an edge to what it has."""

    edge: int


Program = list[list[Send | Receive]]  # of each part


class Choices:
    """Numbers out of bytes, then zeros: an example of hypothesis that is short and shrinks well."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)
        self.is_over = False

    def below(self, count: int) -> int:
        """A number from 0 to ``count`` - 1."""
        found = next(self._data, None)
        self.is_over = found is None
        return 0 if found is None else found % count


def program(choices: Choices) -> Program:
    """Some edges between two to four parts, each sent and received in one order, so that nobody waits for ever."""
    made: Program = [[] for _ in range(2 + choices.below(3))]
    for edge in range(choices.below(6)):
        source = choices.below(len(made))
        to = (source + 1 + choices.below(len(made) - 1)) % len(made)
        made[source].append(Send(edge, to))
        made[to].append(Receive(edge))
    return made


def numbers_of_one_place(made: Program) -> list[float]:
    """What each part has at its end."""
    has, at, sent = [float(part + 1) for part in range(len(made))], [0] * len(made), dict[int, float]()
    while any(place < len(steps) for place, steps in zip(at, made, strict=True)):
        for part, steps in enumerate(made):
            while at[part] < len(steps) and (isinstance(one := steps[at[part]], Send) or one.edge in sent):
                if isinstance(one, Send):
                    sent[one.edge] = has[part]
                else:
                    has[part] += sent[one.edge]
                at[part] += 1
    return has


class Running:
    """What a process does for a round: ``place`` in its program, and the stages that are not answered."""

    def __init__(self, worker: int, peers: dict[int, int]) -> None:
        self.worker, self.peers = worker, peers
        self.has, self.place, self.waits, self.stages = float(worker + 1), 0, False, 0


class Process:
    """A task: its rendezvous, and the rounds that it runs."""

    def __init__(self, world: World, part: int, incarnation: int) -> None:
        self.world, self.part, self.incarnation = world, part, incarnation
        self.meeting = m.Meeting()
        self.rounds: dict[int, Running] = {}
        self.floor, self.over, self.is_dead = 0, set[int](), False

    def run(self, number: int, peers: dict[int, int]) -> None:
        if number <= self.floor or number in self.over:
            self.world.tell(p.CallFailure(number, self.incarnation, Failure("StepAborted", "over")))
            return
        self.rounds[number] = Running(self.part, peers)
        self.on(m.Begin(number, frozenset(peers.values())))
        self.go_on(number)

    def on(self, event: m.Event) -> None:
        for effect in self.meeting.on(event, self.world.now):
            match effect:
                case m.Deliver(receive, value, _):
                    receive(value, None)
                case m.Fail(number, cause):
                    self.fail(number, cause)
                case m.Leftover():
                    raise AssertionError(effect)

    def go_on(self, number: int) -> None:
        """Run the part until it has to wait."""
        while (running := self.rounds.get(number)) is not None and not running.waits:
            steps = self.world.program[self.part]
            if running.place == len(steps):
                running.waits = True
                self.stage(number, running)
                return
            one, running.place = steps[running.place], running.place + 1
            if isinstance(one, Send):
                message = m.MessageArrival(number, one.edge, (), running.has, None, self.incarnation)
                self.world.send(self.world.arrive, running.peers[one.to], message)
            else:
                running.waits = True
                self.on(m.Want(number, one.edge, (), lambda value, dead: self.receive(number, value)))

    def receive(self, number: int, value: float) -> None:
        running = self.rounds[number]
        running.has, running.waits = running.has + value, False
        self.go_on(number)

    def stage(self, number: int, running: Running) -> None:
        shards = [shard for shard, workers in self.world.senders.items() if self.part in workers]
        running.stages = len(shards)
        for shard in shards:
            self.world.send(self.world.stage, shard, number, self, running.has)
        if not shards:
            self.done(number, running)

    def staged(self, number: int, answer: Any) -> None:
        running = self.rounds.get(number)
        if running is None or self.is_dead:
            return
        running.stages -= 1
        if not isinstance(answer, Ok):
            self.fail(number, StepAborted("a server refused what was staged"))
        elif not running.stages:
            self.done(number, running)

    def done(self, number: int, running: Running) -> None:
        self.end(number)
        self.world.tell(p.TaskAnswer(number, self.incarnation, (number, running.has)))

    def fail(self, number: int, cause: TfnbError) -> None:
        """The part raises, here or because of another one; what that means is the notebook's word."""
        if number not in self.rounds:
            return
        self.end(number, has_failed=True)
        failure = Failure(type(cause).__name__, str(cause))
        if isinstance(cause, Unavailable):
            self.world.send(self.world.judge, p.CallFailure(number, self.incarnation, failure), cause.peers[0])
        else:
            self.world.tell(p.Error(number, self.incarnation, failure))

    def end(self, number: int, has_failed: bool = False) -> None:
        del self.rounds[number]
        self.on(m.PartEnd(number, has_failed))

    def cancel(self, number: int, floor: int) -> None:
        self.floor = max(self.floor, floor)
        self.over.add(number)
        self.on(m.Abort(number, floor, StepAborted(f"round {number} was cancelled")))
        for other in [other for other in self.rounds if other <= floor or other == number]:
            self.fail(other, StepAborted("cancelled"))


class World:
    """A notebook with the machine of a step, tasks and servers; ``bag`` has the messages on their way."""

    def __init__(self, choices: Choices, reached: Counter[tuple[str, str]]) -> None:
        self.choices, self.reached = choices, reached
        self.program = program(choices)
        parts = range(len(self.program))
        self.senders = {
            shard: tuple(part for part in parts if not choices.below(2)) or (0,) for shard in range(choices.below(3))
        }
        self.servers = {shard: Server() for shard in self.senders}
        self.are_replaced = bool(choices.below(2))
        self.now, self.bag, self.committed = 0.0, list[tuple[Any, ...]](), dict[int, set[int]]()
        self.numbers, self.incarnations = itertools.count(1), itertools.count(1)
        self.processes: dict[int, Process] = {}
        self.first: dict[int, int] = {}  # the first process of a part, by each of its successors
        self.lost, self.ended = list[int](), list[e.Finish]()
        self.members = {part: self.start(part) for part in parts}
        self.absent: dict[int, bool] = {}  # parts without a member, and whether one comes
        self.machine: p.StepMachine | None = None
        self.kinds: dict[str, Any] = {
            "answer": self.deliver, "answer twice": self.deliver_again, "raise": self.raises, "kill": self.kill,
            "silence": self.silence, "break": self.breaks, "refuse": self.refuse, "interrupt": self.interrupt,
            "time": self.passes, "lose a server": self.lose_server,
        }  # fmt: skip

    # -- what travels -----------------------------------------------------------------------------------------------

    def send(self, function: Any, *args: Any) -> None:
        self.bag.append((function, *args))

    def tell(self, event: Any) -> None:
        """An answer to the notebook."""
        self.send(self.on, event)

    def arrive(self, to: int, event: m.Event) -> None:
        if not self.processes[to].is_dead:
            self.processes[to].on(event)

    def deliver(self) -> None:
        if self.bag:
            function, *args = self.bag.pop(self.choices.below(len(self.bag)))
            function(*args)

    def deliver_again(self) -> None:
        """An answer that comes a second time, later."""
        answers = [message for message in self.bag if message[0] == self.on]
        if answers:
            self.bag.append(answers[self.choices.below(len(answers))])

    # -- tasks and servers --------------------------------------------------------------------------------------------

    def start(self, part: int) -> int:
        incarnation = next(self.incarnations)
        self.processes[incarnation] = Process(self, part, incarnation)
        self.first[incarnation] = incarnation
        return incarnation

    def call(self, incarnation: int, number: int, peers: dict[int, int]) -> None:
        process = self.processes[incarnation]
        if process.is_dead:
            self.lose(incarnation)
        else:
            process.run(number, peers)

    def cancel(self, incarnation: int, number: int, floor: int) -> None:
        if not self.processes[incarnation].is_dead:
            self.processes[incarnation].cancel(number, floor)

    def stage(self, shard: int, number: int, process: Process, value: float) -> None:
        answer = self.servers[shard].stage(number, process.part, value)
        self.send(process.staged, number, answer)

    def prepare(self, shard: int, number: int, workers: tuple[int, ...]) -> None:
        answer = self.servers[shard]("prepare", round=number, workers=list(workers))
        self.tell(p.ShardReady(number, shard) if isinstance(answer, Ok) else p.ShardError(number, shard, BAD))

    def commit(self, shard: int, number: int, workers: tuple[int, ...]) -> None:
        answer = self.servers[shard].commit(number, workers)
        assert isinstance(answer, Ok), "what was prepared, and is not over, can be written"
        self.committed.setdefault(number, set()).add(shard)
        self.tell(p.ShardCommit(number, shard))

    def judge(self, event: p.CallFailure, peer: str) -> None:
        """The notebook asks whether a task is alive that another one lost."""
        if self.processes[int(peer)].is_dead:
            self.lose(int(peer))
        else:
            self.on(event)

    # -- faults -----------------------------------------------------------------------------------------------------

    def alive(self) -> list[int]:
        return [one for one in self.members.values() if not self.processes[one].is_dead]

    def chosen(self) -> Process | None:
        found = self.alive()
        return self.processes[found[self.choices.below(len(found))]] if found else None

    def raises(self) -> None:
        """A kernel of a part fails."""
        process = self.chosen()
        if process is not None:
            for number in list(process.rounds):
                process.fail(number, StepAborted("a kernel"))

    def kill(self) -> None:
        """SIGKILL. Its connections break, and the notebook hears of it, all at some later time."""
        process = self.chosen()
        if process is None:
            return
        process.is_dead = True
        for other in self.alive():
            self.reset(self.processes[other], process)
        self.send(self.lose, process.incarnation)

    def breaks(self) -> None:
        """A connection between two tasks that live."""
        one, other = self.chosen(), self.chosen()
        if one is not None and other is not None and one is not other:
            self.reset(one, other)
            self.reset(other, one)

    def reset(self, at: Process, other: Process) -> None:
        """What is on its way from another task does not arrive, and this one will notice."""
        posts = [message for message in self.bag if message[:2] == (self.arrive, at.incarnation)]
        self.bag = [one for one in self.bag if one not in posts or getattr(one[2], "sender", 0) != other.incarnation]
        cause = Unavailable("reset", peers=(str(other.incarnation),))
        self.send(self.arrive, at.incarnation, m.ConnectionLoss(other.incarnation, cause))

    def silence(self) -> None:
        """The notebook hears nothing of a task, which goes on, and may join again."""
        process = self.chosen()
        if process is not None:
            self.lose(process.incarnation, is_silent=True)

    def lose(self, incarnation: int, is_silent: bool = False) -> None:
        """The notebook knows that a task is gone."""
        part = self.processes[incarnation].part
        if self.members.get(part) != incarnation:
            return
        del self.members[part]
        self.absent[part] = self.are_replaced or is_silent
        if self.absent[part]:
            self.send(self.join, incarnation, is_silent)
        self.on(e.TaskLoss(incarnation, is_silent))

    def join(self, incarnation: int, is_silent: bool) -> None:
        """The successor of a task, or one that was silent, after its rounds were ended."""
        process = self.processes[incarnation]
        if is_silent and process.is_dead:
            self.send(self.join, incarnation, False)
            return
        for number in list(process.rounds):
            process.end(number, has_failed=True)
        follows = self.start(process.part)
        self.first[follows] = self.first[incarnation]
        process.is_dead = True  # under this incarnation nothing is asked of it any more
        self.members[process.part] = follows
        del self.absent[process.part]

    def refuse(self) -> None:
        """A shard cannot prepare a round, or commit one that it did not prepare."""
        asked = [message for message in self.bag if message[0] in (self.prepare, self.commit)]
        if asked and not self.is_prepared(*asked[0][1:3]):
            _, shard, number, _ = asked[0]
            self.bag.remove(asked[0])
            self.tell(p.ShardError(number, shard, BAD))

    def lose_server(self) -> None:
        """The notebook gives up a server; once it may have written, nothing is promised."""
        if self.servers and self.machine is not None and self.machine.state != "committing":
            self.on(e.ShardLost(0))

    def is_prepared(self, shard: int, number: int) -> bool:
        """Whether a shard holds the write of a round, computed."""
        held = self.servers[shard].core.rounds.staged.get(number)
        return held is not None and held.write is not None

    def interrupt(self) -> None:
        self.on(e.Interrupt())

    def passes(self) -> None:
        self.now += DEADLINE / 4 * self.choices.below(4)
        self.on(e.Tick())

    # -- the notebook -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The step, or another attempt of it once all of its tasks are there."""
        tasks = [self.members[part] for part in sorted(self.members)] if not self.absent else []
        senders = dict(self.senders)
        self.machine = p.StepMachine(tasks, list(senders), self.numbers, 8, deadline=DEADLINE, senders=senders)
        self.machine.lost, self.machine.places = self.lost, {task: self.first[task] for task in tasks}
        self.on(e.Start())

    def on(self, event: Any) -> None:
        machine = self.machine
        if machine is None:
            return
        self.reached[machine.state, type(event).__name__] += 1
        for instruction in machine.on(event, self.now):
            match instruction:
                case p.Run(number, task):
                    self.send(self.call, task, number, dict(enumerate(machine.ranges)))
                case p.Prepare(number, shard, workers):
                    self.send(self.prepare, shard, number, workers)
                case p.Commit(number, shard, workers):
                    self.send(self.commit, shard, number, workers)
                case p.AbortStep(number):
                    self.send_abort(number)
                case e.Finish():
                    self.machine = None
                    self.finish(instruction)

    def send_abort(self, number: int) -> None:
        for shard in self.servers:
            self.send(lambda shard: self.servers[shard]("abort", round=number, floor=number - 1), shard)
        for incarnation in self.alive() + [one for one in self.processes if one not in self.members.values()]:
            self.send(self.cancel, incarnation, number, number - 1)

    def finish(self, end: e.Finish) -> None:
        """The end of an attempt; without one of its tasks the step waits for the next one."""
        if isinstance(end.cause, e.TasksLost) and end.cause.is_none_left and any(self.absent.values()):
            return
        self.ended.append(end)

    def go(self) -> None:
        """Any events until no choice is left, then all that travels arrives."""
        self.begin()
        while not self.choices.is_over:
            self.deliver()
            kind = self.choices.below(3 * len(self.kinds))
            list(self.kinds.values())[kind if kind < len(self.kinds) else 0]()
            self.try_again()
        self.rest()

    def rest(self) -> None:
        for _ in range(10_000):
            if not self.bag:
                break
            self.deliver()
            self.try_again()
        assert not self.bag

    def try_again(self) -> None:
        if self.machine is None and not self.ended and (not self.absent or not any(self.absent.values())):
            self.begin()


def check(world: World) -> None:
    assert len(world.ended) == 1, "the step ended, once"
    (end,) = world.ended
    shards = set(world.senders)
    has = numbers_of_one_place(world.program)
    values = {shard: world.servers[shard].w[0].item() for shard in shards}
    if end.cause is None:
        ((number, found),) = world.committed.items() if shards else [(0, set())]
        assert found == shards
        assert [value for _, value in end.values] == has
        assert len({number for number, _ in end.values} | ({number} if shards else set())) == 1, "of one attempt"
        for shard, workers in world.senders.items():
            assert values[shard] == pytest.approx(sum(has[part] for part in workers) / len(workers), rel=1e-6)
    else:
        assert world.committed == {} and set(values.values()) <= {0.0}, "nothing was written"
    for process in world.processes.values():
        assert process.is_dead or (process.meeting.held, process.rounds) == (0, {})
        assert process.is_dead or process.meeting.rounds == []
    assert all(server.core.rounds.staged == {} for server in world.servers.values())


def check_the_next_step(world: World) -> None:
    before = {shard: server.w[0].item() for shard, server in world.servers.items()}
    if world.absent:
        return
    world.ended, world.now, world.committed = [], 0.0, {}
    world.lost = []
    world.begin()
    world.rest()
    assert [end.cause for end in world.ended] == [None]
    for shard, workers in world.senders.items():
        has = numbers_of_one_place(world.program)
        step = sum(has[part] for part in workers) / len(workers)
        assert world.servers[shard].w[0].item() - before[shard] == pytest.approx(step, rel=1e-5)


STATES = {
    *itertools.product(
        ("running",), ("TaskAnswer", "Error", "CallFailure", "TaskLoss", "Interrupt", "Tick", "ShardLost")
    ),
    *itertools.product(("preparing",), ("ShardReady", "ShardError", "TaskLoss", "Interrupt", "Tick", "ShardLost")),
    *itertools.product(("committing",), ("ShardCommit", "ShardError", "TaskLoss", "Interrupt", "Tick")),
}


@pytest.mark.parametrize("examples", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_step_over_tasks_is_done_once_or_not_at_all_whatever_happens(examples: int) -> None:
    reached = Counter[tuple[str, str]]()
    causes = Counter[str]()

    @settings(max_examples=examples, deadline=None, phases=[Phase.generate, Phase.shrink])
    @given(st.binary(min_size=20, max_size=160))
    def random_events(data: bytes) -> None:
        world = World(Choices(data), reached)
        world.go()
        check(world)
        causes[type(world.ended[0].cause).__name__] += 1
        check_the_next_step(world)

    random_events()
    assert set(reached) >= STATES, "each event came in each state"
    assert set(causes) == {"NoneType", "UserStop", "TimedOut", "TasksLost", "ServerLost", "Failure"}
