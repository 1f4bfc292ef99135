"""The machine of synchronous training, alone and with real cores as its servers. No socket, no clock."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.alone.test_core import Add
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes.leases import Broken, Give, Offer, Progress, Report
from tfnb.cluster.modes.rounds import Cut, CutAt, Rounds
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import Arrived, Reply, Send, Tick
from tfnb.cluster.server.cores import Cores
from tfnb.cluster.server.parts import mean
from tfnb.cluster.wire.messages import GIVEN_UP, Failed, Ok, OpId, Refused, Request
from tfnb.state.store import Store

BAD = Failed("InvalidArgument", "kernel")


def rounds(tasks=(0, 1), shards=(0,), **kwargs):
    machine = Rounds(list(tasks), list(shards), itertools.count(1), **kwargs)
    machine.on(e.Start(), 0.0)
    return machine


def play(machine, *events, now=0.0):
    """All instructions of a sequence of events, in order."""
    return [instruction for event in events for instruction in machine.on(event, now)]


def test_every_task_gets_the_same_pieces_and_a_step_counts_when_all_have_heard():
    machine = rounds()
    given = play(machine, Offer("ab"), Offer("c"), Offer("d"))
    assert [(i.task, i.piece.first, i.piece.steps) for i in given] == [
        (0, 1, "ab"), (1, 1, "ab"), (0, 3, "c"), (1, 3, "c"),
    ]  # fmt: skip
    number = given[0].piece.number
    assert play(machine, Progress(0, number, 2)) == []
    assert play(machine, Progress(1, number, 1)) == [Report(number, 0, 1, (0, 1))]
    told = play(machine, Progress(1, number, 2))
    assert told[0] == Report(number, 1, 2, (0, 1))
    assert [i.piece.steps for i in told[1:]] == ["d", "d"]


def test_a_lost_task_makes_a_cut_after_which_the_rest_is_given_to_the_others():
    machine = rounds(tasks=[0, 1, 2])
    given = play(machine, Offer("abcd"))
    number = given[0].piece.number
    play(machine, *(Progress(task, number, 1) for task in range(3)))
    assert play(machine, e.Lost(1)) == [Cut(4)]
    assert play(machine, Progress(0, number, 2)) == [], "one of them did not tell"
    told = play(machine, CutAt(2))
    assert told[0] == Report(number, 1, 2, (0, 1, 2)), "it was written"
    assert [(i.task, i.piece.first, i.piece.steps) for i in told[1:]] == [(0, 5, "cd"), (2, 5, "cd")]
    assert machine.steps_at(2) == 2 and machine.steps_at(5) == 3


def test_interrupts_and_failures_end_at_a_cut():
    for event, cause in ((e.Interrupt(), e.Interrupted()), (Broken(1, BAD, is_fatal=True), BAD)):
        machine = rounds()
        play(machine, Offer("abcd"))
        assert play(machine, event) == [Cut(4)]
        *_, end = play(machine, CutAt(3))
        assert end == e.Finish(cause=cause)


def test_the_end_of_data_is_a_cut_too():
    machine = rounds(tasks=[0])
    (give,) = play(machine, Offer("a"), e.End())
    *_, cut = play(machine, Progress(0, give.piece.number, 1))
    assert cut == Cut(1) and play(machine, CutAt(1)) == [e.Finish()]


def test_no_task_and_no_server():
    lost = e.TasksLost("no compute task is left")
    assert play(Rounds([], [0], itertools.count()), e.Start()) == [e.Finish(cause=lost)]
    machine = rounds(tasks=[0])
    play(machine, Offer("ab"), e.Lost(0))
    assert play(machine, CutAt(0)) == [e.Finish(cause=e.TasksLost("no compute task is left"))]
    machine = rounds()
    assert play(machine, e.ShardLost(0)) == [e.Finish(cause=e.ServerLost(0))]


def test_tasks_that_are_lost_together_are_one_attempt():
    machine = rounds(tasks=[0, 1, 2, 3])
    play(machine, Offer("abcd"))
    assert play(machine, e.Lost(0), e.Lost(1), e.Lost(2)) == [Cut(4)]
    assert [i.task for i in play(machine, CutAt(0))] == [3]
    for task in (4, 5):
        assert machine.cause is None
        play(machine, e.Joined(task), CutAt(0), e.Lost(task))
    assert machine.cause is not None, "a third attempt lost one"


def test_a_step_over_which_a_task_and_its_successor_are_lost_stops_and_names_them():
    machine = rounds()
    given = play(machine, Offer("abcd"))
    play(machine, e.Lost(1), CutAt(0), e.Joined(2, follows=1), CutAt(0))
    told = play(machine, e.Lost(2), CutAt(0))
    assert told[-1].cause.tasks == (1,) and "seems to kill" in told[-1].cause.message
    machine = rounds()
    given = play(machine, Offer("abcd"))
    play(machine, e.Lost(1), CutAt(0), e.Joined(2, follows=1))
    given = [i for i in play(machine, CutAt(0)) if isinstance(i, Give)]
    play(machine, *(Progress(task, given[0].piece.number, 1, 0, 2) for task in (0, 2)))
    assert machine.cause is None and play(machine, e.Lost(2)) != []
    assert not any(isinstance(i, e.Finish) for i in play(machine, CutAt(machine.next - 4))), (
        "a step was written between"
    )


def test_a_silent_task_kills_no_step_and_joins_again_under_its_place():
    machine = rounds(tasks=[0, 2, 1])
    play(machine, Offer("abcd"))
    task = 1
    for following in range(3, 9):
        assert play(machine, e.Lost(task, is_silent=True)) == [Cut(machine.next - 1)]
        assert {i.task for i in play(machine, CutAt(machine.first - 1)) if isinstance(i, Give)} == {0, 2}
        play(machine, e.Joined(following, follows=task))
        given = [i for i in play(machine, CutAt(machine.first - 1)) if isinstance(i, Give)]
        assert {i.task for i in given} == {0, 2, following} and [i.piece.steps for i in given] == ["abcd"] * 3
        task = following
    assert machine.cause is None and machine.lost == []
    play(machine, e.Lost(task), CutAt(machine.first - 1), e.Joined(9, follows=task), CutAt(machine.first - 1))
    play(machine, e.Lost(9))
    assert "seems to kill" in machine.cause.message, "it died twice over one step"


def test_training_without_a_task_waits_for_a_silent_one_and_not_for_a_dead_one():
    for is_silent in (True, False):
        machine = rounds(tasks=[0])
        play(machine, Offer("ab"), e.Lost(0, is_silent), now=5.0)
        ends = play(machine, CutAt(0), e.Tick(), now=5.0 + GIVEN_UP - 1)
        if not is_silent:
            assert ends == [e.Finish(cause=e.TasksLost())]
            continue
        assert ends == [] and machine.state == "waiting"
        assert [i.task for i in play(machine, e.Joined(1, follows=0))] == [1]


def test_tasks_that_are_lost_while_nothing_is_lent_are_no_attempt():
    machine = rounds()
    for task in range(1, 6):
        assert play(machine, e.Lost(task), CutAt(0), e.Joined(task + 1, follows=task), CutAt(0)) != []
    assert machine.state == "open" and machine.cause is None


def test_training_without_a_task_waits_for_one():
    machine = rounds(tasks=[0], patience=5.0)
    play(machine, Offer("ab"), e.Lost(0))
    assert play(machine, CutAt(0), now=1.0) == [] and play(machine, e.Tick(), now=5.9) == []
    assert [(i.task, i.piece.steps) for i in play(machine, e.Joined(1), now=5.9)] == [(1, "ab")]
    play(machine, e.Lost(1), CutAt(0), now=6.0)
    assert play(machine, e.Tick(), now=11.0) == [e.Finish(cause=e.TasksLost())]
    for event, cause in ((e.Interrupt(), e.Interrupted()), (e.ShardLost(0), e.ServerLost(0))):
        machine = rounds(tasks=[0], patience=5.0)
        play(machine, Offer("ab"), e.Lost(0), CutAt(0))
        assert play(machine, event) == [e.Finish(cause=cause)]


def test_without_spare_tasks_a_step_is_made_of_all_that_there_are():
    machine = rounds(tasks=[0])
    play(machine, Offer("ab"), e.Joined(1), CutAt(0))
    assert [machine.part(task) for task in machine.members] == [(0, 2, 2), (1, 2, 2)]
    machine = rounds(tasks=[0, 1, 2], spare=1)
    play(machine, Offer("ab"), e.Lost(1), CutAt(0))
    assert machine.part(0) == (0, 2, 2)
    play(machine, e.Joined(1), CutAt(0))
    assert machine.part(0) == (0, 3, 2)


class World:
    """Real cores, tasks that send one request to each of them and step, and messages that arrive in any order.

    ``processes``: for each shard the number of the one that holds it; those of one get their requests together.
    ``joint``: whether the same workers make a round on all servers.
    """

    def __init__(self, machine, tasks, shards, processes, joint=True):
        self.machine, self.shards, self.joint = machine, shards, joint
        self.now = 0.0
        self.cores = {
            shard: Core(Store(), lambda meta, tensors: Add(), epoch=1, incarnation=7, shard=shard) for shard in shards
        }
        self.hosts = {process: Cores() for process in processes}
        self.process = dict(zip(shards, processes, strict=True))
        for shard, process in self.process.items():
            self.hosts[process].add(self.cores[shard])
        self.watch(self.cores[shards[0]])
        self.came: dict[tuple[int, int], list[int]] = {}  # round and shard -> workers, as their parts came
        self.basis: dict[tuple[int, int], dict[int, float]] = {}  # the values that a part was computed from
        self.tickets, self.ops = itertools.count(), itertools.count()
        self.answers: dict[int, Ok | Failed | Refused] = {}
        self.sends: list[Send] = []
        self.arrived: list[tuple[int, int, int]] = []  # round, worker, shard: as the first server learns of parts
        self.wanted: dict[int, tuple] = {}  # round -> of how many parts it is made, and who has to have them
        self.grads: dict[tuple[int, int], torch.Tensor] = {}  # round and worker
        self.written: list[int] = []  # rounds
        for shard in shards:
            self.ask(shard, "create", [torch.zeros(1, dtype=torch.float64)], keys=["w"])
            self.ask(shard, "register_shard", plan="add")
            self.ask(shard, "open_training", training="t")
        self.tasks = {task: Worker(self, task) for task in tasks}
        self.reported: list[int] = []
        self.cut: Cut | None = None
        self.end: list[e.Finish] = []
        self.steps: dict[int, tuple] = {}

    def ask(self, shard, method, tensors=(), /, **meta):
        return self.ask_all([(shard, method, tensors, meta)])[shard]

    def ask_all(self, asks):
        """Requests to shards, together to those of one process; the ticket of each shard's."""
        tickets, events = {}, {}
        for shard, method, tensors, meta in asks:
            request = Request(method, OpId("c", next(self.ops)), 1, 7, meta, list(tensors))
            tickets[shard] = next(self.tickets)
            if method == "contribute" and "absent" not in meta:
                came = self.came.setdefault((meta["round"], shard), [])
                came += [] if meta["worker"] in came else [meta["worker"]]
            events.setdefault(self.process[shard], []).append((shard, Arrived(tickets[shard], request)))
        for process, mine in events.items():
            self.tell(process, mine)
        return tickets

    def tell(self, process, events):
        for effect in self.hosts[process].on(events, self.now):
            if isinstance(effect, Reply):
                self.answers[effect.ticket] = effect.answer
            else:
                assert self.process[effect.shard] != process, "what is here needs no message"
                self.sends.append(effect)

    def watch(self, first):
        """See what comes to the first server, and which rounds it writes."""
        on = first.on

        def seen(event, now):
            if isinstance(event, Arrived):
                self.record(event.request.method, event.request.meta, first.shard)
            effects = on(event, now)
            if "t" in first.trainings.courses:
                latest = first.trainings.courses["t"].latest
                self.written += [latest] if latest and latest not in self.written else []
            return effects

        first.on = seen

    def record(self, method, meta, first):
        """What the first server learns of parts."""
        if method == "contribute" and "absent" not in meta:
            self.arrived.append((meta["round"], meta["worker"], first))
            self.wanted[meta["round"]] = meta["workers"], set(self.shards if "joint" in meta else [first])
        elif method == "staged" and "worker" in meta:
            self.arrived.append((meta["round"], meta["worker"], meta["by"]))

    def feed(self, event):
        for instruction in self.machine.on(event, self.now):
            match instruction:
                case Give(task, piece):
                    self.steps[piece.number] = piece.steps
                    self.tasks[task].pieces.append((piece.number, piece.first, piece.steps, self.machine.part(task)))
                case Report(number, start, stop):
                    self.reported += self.steps[number][start:stop]
                case Cut():
                    self.cut = instruction
                case e.Finish():
                    self.end.append(instruction)

    def make_cut(self):
        """What the notebook does: the first server says where it stands, the others follow, the loops end."""
        cut, self.cut = self.cut, None
        first, *others = self.shards
        latest = self.answers[self.ask(first, "cut", training="t", upto=cut.upto)].meta["latest"]
        for shard in others:
            answer = self.answers[self.ask(shard, "cut", training="t", upto=cut.upto, decided=latest)]
            assert answer.meta["latest"] == latest, "all servers stand at one round"
        for worker in self.tasks.values():
            worker.hear()
            worker.end()
        self.feed(CutAt(latest))

    def value(self, shard):
        return self.answers[self.ask(shard, "pull", keys=["w"])].tensors[0].item()


class Worker:
    """A loop: it contributes a number of its own to each round, and waits for all answers."""

    def __init__(self, world, task):
        self.world, self.task = world, task
        self.alive = True
        self.end()

    def end(self):
        self.pieces, self.at, self.out, self.rounds, self.values = [], 0, {}, {}, {}
        self.is_levelling = False

    def begin(self, shards):
        """Send what is to be sent to some of the servers, once the values of all are there."""
        world = self.world
        _, first, _, (worker, workers, wanted) = self.pieces[0]
        for shard in shards:
            if shard not in self.values:
                self.values[shard] = world.value(shard)
        if set(self.values) != set(world.shards):
            return
        key = first + self.at, worker
        grad = torch.full((1,), 1.0 + worker + 7 * key[0], dtype=torch.float64)
        world.grads[key] = grad
        world.basis[key] = dict(self.values)
        spare = {"joint": True} if wanted < workers and world.joint else {}
        about = {
            "training": "t", "round": key[0], "worker": worker, "workers": wanted, "shards": world.shards,
            "plan": "add", "reads": ["w"], **spare,
        }  # fmt: skip
        self.out |= world.ask_all((shard, "contribute", [grad], about) for shard in shards if shard not in self.out)

    def hear(self):
        """Go on when all servers have answered."""
        answers = {shard: self.world.answers.get(ticket) for shard, ticket in self.out.items()}
        if not self.pieces or not all(isinstance(answer, Ok) for answer in answers.values()):
            return
        if not self.is_levelling and len(answers) < len(self.world.shards):
            return
        number, _, _, (_, _, wanted) = self.pieces[0]
        for shard, answer in answers.items():
            self.rounds[shard], self.values[shard] = answer.meta["latest"], answer.tensors[0].item()
        if self.world.joint and not self.is_levelling and len({a.meta["counts"] for a in answers.values()}) != 1:
            raise AssertionError("a part counts on all servers or on none")
        counts, self.out = not self.is_levelling and answers[self.world.shards[0]].meta["counts"], {}
        if counts:
            self.world.feed(Progress(self.task, number, self.at + 1, self.at, wanted))
        latest = max(self.rounds.values())
        behind = [shard for shard, at in self.rounds.items() if at < latest]
        self.is_levelling = bool(behind)
        for shard in behind:
            self.out[shard] = self.world.ask(
                shard, "contribute", training="t", round=latest, worker=-1, absent=True, reads=["w"]
            )
        while self.pieces and not behind and latest >= self.pieces[0][1] + self.at:
            self.at += 1
            if self.at == len(self.pieces[0][2]):
                self.pieces.pop(0)
                self.at = 0


def replayed(world):
    """What the arrivals say: of which workers each round was made on each server, and the values after all of them."""
    holders: dict[tuple[int, int], set[int]] = {}
    chosen: dict[int, list[int]] = {}
    for number, worker, shard in world.arrived:
        holders.setdefault((number, worker), set()).add(shard)
        wanted, needed = world.wanted.get(number, (None, set()))
        whole = sorted(w for (n, w), held in holders.items() if n == number and held >= needed)
        if number not in chosen and len(whole) == wanted:
            chosen[number] = whole
    values = dict.fromkeys(world.shards, 0.0)
    for number in world.written:
        before = dict(values)
        for shard in world.shards:
            first = sorted(world.came[number, shard][: world.wanted[number][0]])
            workers = chosen[number] if world.joint else first
            assert all(world.basis[number, worker] == before for worker in workers), "from the values of the last round"
            grads = [world.grads[number, worker] for worker in workers]
            values[shard] += mean(grads, [1.0] * len(grads)).item()
    return values


def test_s95_the_first_of_all_servers_or_the_first_on_each():
    """Gradients 1, 2 and 6 of three workers for W and V; two of them make a step."""
    for joint, expected in ((False, [1.5, 4.0]), (True, [4.0, 4.0])):
        world = World(rounds(), [], (0, 1), (0, 1))
        for worker, shard in [(1, 0), (3, 1), (2, 0), (2, 1), (3, 0), (1, 1)]:
            grad = [torch.full((1,), {1: 1.0, 2: 2.0, 3: 6.0}[worker], dtype=torch.float64)]
            about = {"training": "t", "round": 1, "worker": worker, "workers": 2, "shards": world.shards, "plan": "add"}
            world.ask(shard, "contribute", grad, **about, **({"joint": True} if joint else {}))
            while world.sends:
                send = world.sends.pop(0)
                world.ask(send.shard, send.method, **send.meta)
        assert [world.value(shard) for shard in world.shards] == expected


def test_fewer_tasks_than_a_step_needs_wait_and_then_end():
    machine = rounds(tasks=[0, 1, 2], spare=1, fixed=2, least=2, patience=5.0)
    play(machine, Offer("ab"), e.Lost(1), CutAt(0))
    assert machine.part(0) == (0, 2, 2)
    play(machine, e.Lost(2), CutAt(0))
    assert machine.state == "waiting"
    play(machine, e.Joined(3), e.Joined(4))
    assert machine.part(3) == (1, 2, 2), "the third one is spare again"
    machine = rounds(tasks=[0, 1], fixed=2, least=2, patience=5.0)
    play(machine, Offer("ab"), e.Lost(1), CutAt(0))
    (end,) = play(machine, e.Tick(), now=6.0)
    assert end.cause.tag == "StepAborted" and "1 of 2 required workers live" in end.cause.message
    machine = rounds(tasks=[0, 1], fixed=2, patience=5.0)
    play(machine, Offer("ab"), e.Lost(1), CutAt(0))
    assert machine.part(0) == (0, 1, 1), "elastic"


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_c53_c54_rounds_are_written_once_on_all_servers_or_on_none(data):  # noqa: C901 (one table of events)
    """Kills, failures, interrupts, messages between servers in any order and twice: every step once, in order."""
    shards = data.draw(st.sampled_from([(0,), (0, 1), (2, 0, 1)]))
    processes = data.draw(st.lists(st.sampled_from(shards), min_size=len(shards), max_size=len(shards)))
    tasks = list(range(data.draw(st.integers(1, 3))))
    total = data.draw(st.integers(0, 8))
    spare = data.draw(st.integers(0, len(tasks) - 1))
    patience = data.draw(st.sampled_from([0.0, 5.0]))
    machine = Rounds(list(tasks), shards, itertools.count(1), spare=spare, patience=patience)
    world = World(machine, tasks, shards, processes, joint=data.draw(st.booleans()))
    offered = 0
    world.feed(e.Start())
    for _ in range(500):
        if world.end:
            break
        if world.cut is not None and data.draw(st.booleans()):
            world.make_cut()
            continue
        if machine.wants and offered < total:
            size = data.draw(st.integers(1, total - offered))
            world.feed(Offer(tuple(range(offered + 1, offered + size + 1))))
            offered += size
            continue
        if offered == total and not machine.is_ended:
            world.feed(e.End())
            continue
        kind = data.draw(
            st.sampled_from(["work"] * 10 + ["deliver"] * 6 + ["die", "break", "interrupt", "join", "grow", "time"])
        )
        live = [worker for worker in world.tasks.values() if worker.alive]
        if kind == "interrupt":
            world.feed(e.Interrupt())
        elif kind == "time":
            world.now += data.draw(st.floats(0, 3))
            world.feed(e.Tick())
            for shard in shards:
                world.tell(world.process[shard], [(shard, Tick())])
        elif kind == "deliver" and world.sends:
            send = world.sends[data.draw(st.integers(0, len(world.sends) - 1))]
            if data.draw(st.booleans()):
                world.sends.remove(send)
            world.ask(send.shard, send.method, **send.meta)
        elif kind == "join" and len(live) < len(world.tasks):
            worker = next(worker for worker in world.tasks.values() if not worker.alive)
            worker.alive = True
            worker.end()
            world.feed(e.Joined(worker.task))
        elif kind == "grow" and len(world.tasks) < 6:
            new = len(world.tasks)
            world.tasks[new] = Worker(world, new)
            world.feed(e.Joined(new))
        elif live and kind == "die":
            worker = data.draw(st.sampled_from(live))
            worker.alive = False
            worker.end()
            world.feed(e.Lost(worker.task))
        elif live and kind == "break":
            world.feed(Broken(data.draw(st.sampled_from(live)).task, BAD, is_fatal=data.draw(st.booleans())))
        else:
            for worker in live:
                if worker.pieces:
                    worker.begin(data.draw(st.sets(st.sampled_from(shards))) if kind == "work" else shards)
                    worker.hear()
            if kind != "work":
                for send in world.sends:
                    world.ask(send.shard, send.method, **send.meta)
                world.sends.clear()
    for _ in range(300):  # nothing more happens to it: it gets through
        if world.end:
            break
        if world.cut is not None:
            world.make_cut()
        if machine.wants and offered < total:
            world.feed(Offer(tuple(range(offered + 1, total + 1))))
            offered = total
        if offered == total:
            world.feed(e.End())
        for worker in [worker for worker in world.tasks.values() if worker.alive]:
            if worker.pieces:
                worker.begin(shards)
                worker.hear()
        sends, world.sends = world.sends, []
        for send in sends:
            world.ask(send.shard, send.method, **send.meta)
        world.now += 3.0
        world.feed(e.Tick())
    assert len(world.end) == 1
    assert world.reported == list(range(1, len(world.reported) + 1)), "every step once, in order"
    assert {shard: world.value(shard) for shard in shards} == replayed(world), "the first of each round"
    assert not world.joint or len({world.value(shard) for shard in shards}) == 1, "all servers wrote the same"
    assert {core.step for core in world.cores.values()} == {len(world.reported)}, "what is counted was written"
    if world.end[0].cause is None:
        assert len(world.reported) == total
    assert all(not core.staged for core in world.cores.values()), "nothing is left staged"


def contributed(workers, shards=8):
    """A process of so many shards whose workers contribute to a round: the calls of Python that it took."""
    cores, calls = Cores(), 0
    for shard in range(shards):
        core = Core(Store(budget=1 << 30), lambda meta, tensors: Add(), epoch=1, incarnation=7, shard=shard)
        core.store.create({"w": torch.zeros(3)})
        core.versions["w"] = 0
        cores.add(core)

    def told(worker, method, meta, tensors=()):
        events = [
            (s, Arrived(worker, Request(method, OpId(f"w{worker}", s), 1, 7, meta, tensors))) for s in range(shards)
        ]
        return [effect for effect in cores.on(events, 0.0) if isinstance(effect, Reply)]

    def counted(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    told(-2, "register_shard", {"plan": "add"})
    told(-2, "open_training", {"training": "t"})
    about = {"training": "t", "round": 1, "workers": workers, "shards": list(range(shards)), "plan": "add"}
    replies = []
    sys.setprofile(counted)
    try:
        for worker in range(workers):
            replies += told(worker, "contribute", {**about, "worker": worker, "reads": ["w"]}, [torch.ones(3)])
    finally:
        sys.setprofile(None)
    assert all(
        isinstance(reply.answer, Ok) and torch.allclose(reply.answer.tensors[0], torch.ones(3)) for reply in replies
    )
    assert sorted(reply.ticket for reply in replies) == sorted([*range(workers)] * shards)
    return calls


def test_a_round_of_many_workers_costs_each_of_them_the_same():
    few, many = (contributed(workers) for workers in (20, 80))
    assert many < 4.4 * few, "not as the square of their number"
