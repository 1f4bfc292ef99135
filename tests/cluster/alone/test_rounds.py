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
from tfnb.cluster.modes.leases import Give, LoopFailure, Offer, PieceProgress, Report
from tfnb.cluster.modes.rounds import UNTOLD, Cut, CutAt, LatestRound, RoundQuery, Rounds
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import CoreTick, Reply, RequestArrival, Send
from tfnb.cluster.server.cores import Cores
from tfnb.cluster.tasks.pieces import TaskShare
from tfnb.cluster.wire.messages import GIVEN_UP, Failure, Ok, OpId, Refusal, Request
from tfnb.passes.flow.merges import mean
from tfnb.state.store import Store

BAD = Failure("InvalidArgument", "kernel")
BROKEN = LoopFailure(0, BAD, is_fatal=False)  # a cut, with which tasks that joined take part


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
    assert play(machine, PieceProgress(0, number, 2)) == []
    assert play(machine, PieceProgress(1, number, 1)) == [Report(number, 0, 1, (0, 1))]
    told = play(machine, PieceProgress(1, number, 2))
    assert told[0] == Report(number, 1, 2, (0, 1))
    assert [i.piece.steps for i in told[1:]] == ["d", "d"]


def test_a_lost_task_makes_a_cut_after_which_the_rest_is_given_to_the_others():
    machine = rounds(tasks=[0, 1, 2])
    given = play(machine, Offer("abcd"))
    number = given[0].piece.number
    play(machine, *(PieceProgress(task, number, 1) for task in range(3)))
    assert play(machine, e.TaskLoss(1)) == [Cut(4)]
    assert play(machine, PieceProgress(0, number, 2)) == [], "one of them did not tell"
    told = play(machine, CutAt(2))
    assert told[0] == Report(number, 1, 2, (0, 1, 2)), "it was written"
    assert [(i.task, i.piece.first, i.piece.steps) for i in told[1:]] == [(0, 5, "cd"), (2, 5, "cd")]
    assert machine.steps_at(2) == 2 and machine.steps_at(5) == 3


def test_interrupts_and_failures_end_at_a_cut():
    for event, cause in ((e.Interrupt(), e.UserStop()), (LoopFailure(1, BAD, is_fatal=True), BAD)):
        machine = rounds()
        play(machine, Offer("abcd"))
        assert play(machine, event) == [Cut(4)]
        *_, end = play(machine, CutAt(3))
        assert end == e.Finish(cause=cause)


def test_the_end_of_data_is_a_cut_too():
    machine = rounds(tasks=[0])
    (give,) = play(machine, Offer("a"), e.DataEnd())
    *_, cut = play(machine, PieceProgress(0, give.piece.number, 1))
    assert cut == Cut(1) and play(machine, CutAt(1)) == [e.Finish()]


def test_no_task_and_no_server():
    lost = e.TasksLost("no compute task is left")
    assert play(Rounds([], [0], itertools.count()), e.Start()) == [e.Finish(cause=lost)]
    machine = rounds(tasks=[0])
    play(machine, Offer("ab"), e.TaskLoss(0))
    assert play(machine, CutAt(0)) == [e.Finish(cause=e.TasksLost("no compute task is left"))]
    machine = rounds()
    assert play(machine, e.ShardLost(0)) == [e.Finish(cause=e.ServerLost(0))]


def test_tasks_that_are_lost_together_are_one_attempt():
    machine = rounds(tasks=[0, 1, 2, 3])
    play(machine, Offer("abcd"))
    assert play(machine, e.TaskLoss(0), e.TaskLoss(1), e.TaskLoss(2)) == [Cut(4)]
    assert [i.task for i in play(machine, CutAt(0))] == [3]
    for task in (4, 5):
        assert machine.cause is None
        play(machine, e.TaskJoin(task), e.TaskLoss(task - 1), CutAt(0))
    assert machine.cause is not None, "a third attempt lost one"


def test_a_step_over_which_a_task_and_its_successor_are_lost_stops_and_names_them():
    machine = rounds()
    given = play(machine, Offer("abcd"))
    play(machine, e.TaskLoss(1), CutAt(0), e.TaskJoin(2, follows=1), BROKEN, CutAt(0))
    told = play(machine, e.TaskLoss(2), CutAt(0))
    assert told[-1].cause.tasks == (1,) and "seems to kill" in told[-1].cause.message
    machine = rounds()
    given = play(machine, Offer("abcd"))
    play(machine, e.TaskLoss(1), CutAt(0), e.TaskJoin(2, follows=1), BROKEN)
    given = [i for i in play(machine, CutAt(0)) if isinstance(i, Give)]
    play(machine, *(PieceProgress(task, given[0].piece.number, 1, 0, 2) for task in (0, 2)))
    assert machine.cause is None and play(machine, e.TaskLoss(2)) != []
    assert not any(isinstance(i, e.Finish) for i in play(machine, CutAt(machine.next - 4))), (
        "a step was written between"
    )


def test_a_silent_task_kills_no_step_and_joins_again_under_its_place():
    machine = rounds(tasks=[0, 2, 1])
    play(machine, Offer("abcd"))
    task = 1
    for following in (3, 4):
        assert play(machine, e.TaskLoss(task, is_silent=True)) == [Cut(machine.next - 1)]
        assert {i.task for i in play(machine, CutAt(machine.first - 1)) if isinstance(i, Give)} == {0, 2}
        play(machine, e.TaskJoin(following, follows=task), BROKEN)
        given = [i for i in play(machine, CutAt(machine.first - 1)) if isinstance(i, Give)]
        assert {i.task for i in given} == {0, 2, following} and [i.piece.steps for i in given] == ["abcd"] * 3
        task = following
    assert machine.cause is None and machine.lost == []
    play(machine, e.TaskLoss(task), CutAt(machine.first - 1), e.TaskJoin(9, follows=task), BROKEN)
    play(machine, CutAt(machine.first - 1))
    play(machine, e.TaskLoss(9))
    assert "seems to kill" in machine.cause.message, "it died twice over one step"


def test_training_without_a_task_waits_for_a_silent_one_and_not_for_a_dead_one():
    for is_silent in (True, False):
        machine = rounds(tasks=[0])
        play(machine, Offer("ab"), e.TaskLoss(0, is_silent), now=5.0)
        ends = play(machine, CutAt(0), e.Tick(), now=5.0 + GIVEN_UP - 1)
        if not is_silent:
            assert ends == [e.Finish(cause=e.TasksLost())]
            continue
        assert ends == [] and machine.state == "waiting"
        assert [i.task for i in play(machine, e.TaskJoin(1, follows=0))] == [1]


def test_a_task_that_joins_takes_part_once_the_piece_in_progress_is_done():
    machine = rounds()
    given = play(machine, Offer("ab"), Offer("cd"), Offer("ef"))
    number, late = given[0].piece.number, given[2].piece.number
    assert play(machine, e.TaskJoin(2), PieceProgress(0, number, 2), PieceProgress(1, number, 1)) == [
        Report(number, 0, 1, (0, 1))
    ], "no step is dropped for it"
    assert play(machine, PieceProgress(1, number, 2)) == [Report(number, 1, 2, (0, 1)), Cut(4)]
    begun = play(machine, CutAt(3))
    assert begun[0] == Report(late, 0, 1, (0, 1)), "it was written meanwhile"
    assert [(i.task, i.piece.steps) for i in begun[1:4]] == [(0, "d"), (1, "d"), (2, "d")]
    assert play(machine, *(PieceProgress(task, begun[1].piece.number, 1) for task in range(3)))[1:] == []
    machine = rounds()
    assert play(machine, e.TaskJoin(2)) == [Cut(0)], "nothing is in progress"


def test_tasks_that_are_lost_while_nothing_is_lent_are_no_attempt():
    machine = rounds()
    for task in range(1, 6):
        assert play(machine, e.TaskLoss(task), CutAt(0), e.TaskJoin(task + 1, follows=task), CutAt(0)) != []
    assert machine.state == "open" and machine.cause is None


def test_training_without_a_task_waits_for_one():
    machine = rounds(tasks=[0], patience=5.0)
    play(machine, Offer("ab"), e.TaskLoss(0))
    assert play(machine, CutAt(0), now=1.0) == [] and play(machine, e.Tick(), now=5.9) == []
    assert [(i.task, i.piece.steps) for i in play(machine, e.TaskJoin(1), now=5.9)] == [(1, "ab")]
    play(machine, e.TaskLoss(1), CutAt(0), now=6.0)
    assert play(machine, e.Tick(), now=11.0) == [e.Finish(cause=e.TasksLost())]
    for event, cause in ((e.Interrupt(), e.UserStop()), (e.ShardLost(0), e.ServerLost(0))):
        machine = rounds(tasks=[0], patience=5.0)
        play(machine, Offer("ab"), e.TaskLoss(0), CutAt(0))
        assert play(machine, event) == [e.Finish(cause=cause)]


def test_without_spare_tasks_a_step_is_made_of_all_that_there_are():
    machine = rounds(tasks=[0])
    play(machine, Offer("ab"), e.TaskJoin(1), BROKEN, CutAt(0))
    assert [machine.part(task) for task in machine.members] == [(0, 2, 2), (1, 2, 2)]
    machine = rounds(tasks=[0, 1, 2], spare=1)
    play(machine, Offer("ab"), e.TaskLoss(1), CutAt(0))
    assert machine.part(0) == (0, 2, 2)
    play(machine, e.TaskJoin(1), BROKEN, CutAt(0))
    assert machine.part(0) == (0, 3, 2)


class World:
    """Real cores, tasks that send one request to each of them and step, and messages that arrive in any order.

    ``processes``: for each shard the number of the one that holds it; those of one get their requests together.
    """

    def __init__(self, machine, tasks, shards, processes):
        self.machine, self.shards = machine, shards
        self.now = 0.0
        self.cores = {
            shard: Core(Store(), lambda meta, tensors: Add(), epoch=1, incarnation=7, shard=shard) for shard in shards
        }
        self.hosts = {process: Cores() for process in processes}
        self.process = dict(zip(shards, processes, strict=True))
        for shard, process in self.process.items():
            self.hosts[process].add(self.cores[shard])
        self.watch(self.cores[shards[0]])
        self.basis: dict[
            tuple[int, int], dict[int, float]
        ] = {}  # round and place -> the values that it is computed from
        self.tickets, self.ops = itertools.count(), itertools.count()
        self.answers: dict[int, Ok | Failure | Refusal] = {}
        self.sends: list[Send] = []
        self.parts: dict[int, int] = {}  # round -> of how many parts it is made
        self.written: list[int] = []  # rounds
        for shard in shards:
            self.ask(shard, "create", [torch.zeros(1, dtype=torch.float64)], keys=["w"])
            self.ask(shard, "register_shard", plan="add")
            self.ask(shard, "open_training", training="t")
        self.tasks = {task: Worker(self, task) for task in tasks}
        self.reported: list[int] = []
        self.cut: Cut | None = None
        self.is_asked = False
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
            events.setdefault(self.process[shard], []).append((shard, RequestArrival(tickets[shard], request)))
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
        """See which rounds the first server writes."""
        on = first.on

        def seen(event, now):
            effects = on(event, now)
            if "t" in first.trainings.courses:
                latest = first.trainings.courses["t"].latest
                self.written += [latest] if latest and self.written[-1:] != [latest] else []
            return effects

        first.on = seen

    def feed(self, event):
        for instruction in self.machine.on(event, self.now):
            match instruction:
                case Give(task, piece):
                    self.steps[piece.number] = piece.steps
                    self.tasks[task].pieces.append((piece.number, piece.first, piece.steps, self.machine.part(task)))
                case Report(number, start, stop):
                    self.reported += self.steps[number][start:stop]
                case RoundQuery():
                    self.is_asked = True
                case Cut():
                    self.cut = instruction
                case e.Finish():
                    self.end.append(instruction)

    def answer(self):
        """What the notebook does: it asks the first server how far training is."""
        self.is_asked = False
        self.feed(LatestRound(self.answers[self.ask(self.shards[0], "standing", training="t")].meta["latest"]))

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


def grad(number, place):
    """What the part of a place adds in a round, whoever computes it."""
    return torch.full((1,), 1.0 + place + 7 * number, dtype=torch.float64)


class Worker:
    """A loop: it contributes the part of a place to each round, and waits for all answers."""

    def __init__(self, world, task):
        self.world, self.task = world, task
        self.alive = True
        self.end()

    def end(self):
        self.pieces, self.at, self.out, self.rounds, self.values = [], 0, {}, {}, {}
        self.place, self.is_levelling = None, False

    @property
    def about(self):
        """What servers are told of this worker."""
        part = TaskShare(*self.pieces[0][3])
        told = {"training": "t", "worker": part.worker, "shards": self.world.shards, "reads": ["w"]}
        return told | ({"spare": True} if part.has_spare else {})

    def begin(self, shards):
        """Send what is to be sent to some of the servers, once the values of all are there."""
        world = self.world
        _, first, _, mine = self.pieces[0]
        part, number = TaskShare(*mine), first + self.at
        for shard in shards:
            if shard not in self.values:
                self.values[shard] = world.value(shard)
        if set(self.values) != set(world.shards) or self.is_levelling:
            return
        place = part.place if self.place is None else self.place
        if number not in world.written:  # else it comes too late
            assert world.basis.setdefault((number, place), dict(self.values)) == self.values, "copies are equal"
        world.parts[number] = part.places
        about = self.about | {
            "round": number, "place": place, "places": part.places, "parts": part.places, "plan": "add",
        }  # fmt: skip
        new = [shard for shard in shards if shard not in self.out]
        self.out |= world.ask_all((shard, "contribute", [grad(number, place)], about) for shard in new)

    def hear(self):
        """Go on when all servers have answered."""
        world = self.world
        answers = {shard: world.answers.get(ticket) for shard, ticket in self.out.items()}
        if not self.pieces or not all(isinstance(answer, Ok) for answer in answers.values()):
            return
        if not self.is_levelling and len(answers) < len(world.shards):
            return
        number, _, _, mine = self.pieces[0]
        for shard, answer in answers.items():
            self.rounds[shard], self.values[shard] = answer.meta["latest"], answer.tensors[0].item()
        chief = answers.get(world.shards[0])
        if chief is not None:
            self.place = chief.meta.get("place")
        if not self.is_levelling and chief.meta["counts"]:
            world.feed(PieceProgress(self.task, number, self.at + 1, self.at, mine[2]))
        about, self.out = self.about, {}
        latest = max(self.rounds.values())
        behind = [shard for shard, at in self.rounds.items() if at < latest]
        self.is_levelling = bool(behind)
        for shard in behind:
            self.out[shard] = world.ask(shard, "contribute", round=latest, absent=True, **about)
        while self.pieces and not behind and latest >= self.pieces[0][1] + self.at:
            self.at += 1
            if self.at == len(self.pieces[0][2]):
                self.pieces.pop(0)
                self.at = 0


def replayed(world):
    """The values after all rounds that were written: each of them the mean of the parts of all places, once."""
    value = 0.0
    for number in world.written:
        places = range(world.parts[number])
        for place in places:
            assert set(world.basis.get((number, place), {}).values()) == {value}, "from the values of the last round"
        value += mean([grad(number, place) for place in places], [1 / len(places)] * len(places)).item()
    return dict.fromkeys(world.shards, value)


def told(world, shard, worker, place, number=1, places=2):
    """A part is sent; the ticket of its answer. What servers tell each other arrives at once."""
    about = {
        "training": "t", "round": number, "worker": worker, "place": place, "places": places, "parts": places,
        "shards": world.shards, "plan": "add", "spare": True,
    }  # fmt: skip
    ticket = world.ask(shard, "contribute", [grad(number, place)], **about)
    while world.sends:
        send = world.sends.pop(0)
        world.ask(send.shard, send.method, **send.meta)
    return ticket


def test_s95_the_first_part_of_each_place_makes_a_round_on_all_servers():
    world = World(rounds(), [], (0, 1), (0, 1))
    first = [told(world, 0, worker=1, place=0), told(world, 0, worker=2, place=0)]
    copy = world.answers[first[1]].meta
    assert first[0] not in world.answers and copy == copy | {"latest": 0, "counts": False, "place": 1}, (
        "that is missing"
    )
    there = told(world, 1, worker=2, place=0)
    assert world.answers[there].meta["latest"] == 0, "the second server answers at once"
    told(world, 1, worker=1, place=0)
    told(world, 1, worker=2, place=1)
    assert [world.value(shard) for shard in world.shards] == [0.0, 0.0], "the first server lacks one"
    last = told(world, 0, worker=2, place=1)
    assert [world.value(shard) for shard in world.shards] == [mean([grad(1, 0), grad(1, 1)], [0.5, 0.5]).item()] * 2
    assert [world.answers[ticket].meta["counts"] for ticket in (first[0], last)] == [True, True]


def test_places_are_given_away_as_workers_come_for_them():
    world = World(rounds(), [], (0,), (0,))
    tickets = [told(world, 0, worker, place) for worker, place in ((2, 1), (1, 1), (0, 0))]
    places = [world.answers[ticket].meta["place"] for ticket in tickets]
    assert places == [1, 0, 0] and world.answers[tickets[1]].meta["latest"] == 0, "the second one came with a copy"
    tickets = [told(world, 0, worker, place, number=2) for worker, place in ((1, 0), (2, 0))]
    assert world.answers[tickets[1]].meta["place"] == 1, "it computes what is missing, whoever has it"
    tickets = [tickets[0], told(world, 0, 2, 1, number=2), told(world, 0, 0, 0, number=2)]
    assert world.value(0) == sum(mean([grad(number, 0), grad(number, 1)], [0.5, 0.5]).item() for number in (1, 2))
    late = world.answers[tickets[2]].meta
    assert late["latest"] == 2 and not late["counts"], "the others are done"
    assert sorted(world.answers[ticket].meta["place"] for ticket in tickets[:2]) == [0, 1]


def test_a_step_is_told_by_the_word_of_the_first_server_where_a_task_does_not_tell_of_it():
    machine = rounds(tasks=[0, 1, 2], spare=1)
    given = [i.piece.number for i in play(machine, Offer("abcd"), Offer("ef"))][::3]
    play(machine, PieceProgress(0, given[0], 2, 0, 2), PieceProgress(1, given[0], 1, 0, 2), now=10.0)
    assert play(machine, e.Tick(), now=10.0 + UNTOLD - 0.1) == []
    assert (
        play(machine, e.Tick(), now=10.0 + UNTOLD) == [RoundQuery()]
        and play(machine, e.Tick(), now=10.1 + UNTOLD) == []
    )
    assert play(machine, LatestRound(0)) == [] and play(machine, LatestRound(5), now=12.0) == [
        Report(given[0], 1, 4, (0, 1, 2)), Report(given[1], 0, 1, (0, 1, 2)),
    ]  # fmt: skip
    assert play(machine, PieceProgress(2, given[0], 4, 0, 2), e.Tick(), now=99.0) == [], "the last one tells at last"
    assert play(machine, PieceProgress(0, given[1], 2, 0, 2), PieceProgress(1, given[1], 2, 1, 2), now=99.0) == [
        Report(given[1], 1, 2, (0, 1, 2))
    ]
    machine = rounds()
    (give, _) = play(machine, Offer("abcd"))
    assert play(machine, PieceProgress(0, give.piece.number, 2), e.Tick(), now=99.0) == [], "no step goes on without it"


def test_fewer_tasks_than_a_step_needs_wait_and_then_end():
    machine = rounds(tasks=[0, 1, 2], spare=1, fixed=2, least=2, patience=5.0)
    play(machine, Offer("ab"), e.TaskLoss(1), CutAt(0))
    assert machine.part(0) == (0, 2, 2)
    play(machine, e.TaskLoss(2), CutAt(0))
    assert machine.state == "waiting"
    play(machine, e.TaskJoin(3), e.TaskJoin(4))
    assert machine.part(3) == (1, 2, 2), "the third one is spare again"
    machine = rounds(tasks=[0, 1], fixed=2, least=2, patience=5.0)
    play(machine, Offer("ab"), e.TaskLoss(1), CutAt(0))
    (end,) = play(machine, e.Tick(), now=6.0)
    assert end.cause.tag == "StepAborted" and "1 of 2 required workers live" in end.cause.message
    machine = rounds(tasks=[0, 1], fixed=2, patience=5.0)
    play(machine, Offer("ab"), e.TaskLoss(1), CutAt(0))
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
    world = World(machine, tasks, shards, processes)
    offered = 0
    world.feed(e.Start())
    for _ in range(500):
        if world.end:
            break
        if world.cut is not None and data.draw(st.booleans()):
            world.make_cut()
            continue
        if world.is_asked and data.draw(st.booleans()):
            world.answer()
            continue
        if machine.wants and offered < total:
            size = data.draw(st.integers(1, total - offered))
            world.feed(Offer(tuple(range(offered + 1, offered + size + 1))))
            offered += size
            continue
        if offered == total and not machine.is_ended:
            world.feed(e.DataEnd())
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
                world.tell(world.process[shard], [(shard, CoreTick())])
        elif kind == "deliver" and world.sends:
            send = world.sends[data.draw(st.integers(0, len(world.sends) - 1))]
            if data.draw(st.booleans()):
                world.sends.remove(send)
            world.ask(send.shard, send.method, **send.meta)
        elif kind == "join" and len(live) < len(world.tasks):
            worker = next(worker for worker in world.tasks.values() if not worker.alive)
            worker.alive = True
            worker.end()
            world.feed(e.TaskJoin(worker.task))
        elif kind == "grow" and len(world.tasks) < 6:
            new = len(world.tasks)
            world.tasks[new] = Worker(world, new)
            world.feed(e.TaskJoin(new))
        elif live and kind == "die":
            worker = data.draw(st.sampled_from(live))
            worker.alive = False
            worker.end()
            world.feed(e.TaskLoss(worker.task))
        elif live and kind == "break":
            world.feed(LoopFailure(data.draw(st.sampled_from(live)).task, BAD, is_fatal=data.draw(st.booleans())))
        else:
            for worker in live:
                if worker.pieces:
                    worker.begin(data.draw(st.sets(st.sampled_from(shards))) if kind == "work" else shards)
                    worker.hear()
            if kind != "work":
                for send in world.sends:
                    world.ask(send.shard, send.method, **send.meta)
                world.sends.clear()
    could_stand = len(machine.tasks) - max(1, machine.wanted, len(machine.tasks) - spare)
    halted = data.draw(st.sets(st.sampled_from(machine.tasks), max_size=could_stand)) if could_stand > 0 else set()
    for _ in range(300):  # nothing more happens to it, though spare tasks may stand still: it gets through
        if world.end:
            break
        if world.is_asked:
            world.answer()
        if world.cut is not None:
            world.make_cut()
        if machine.wants and offered < total:
            world.feed(Offer(tuple(range(offered + 1, total + 1))))
            offered = total
        if offered == total:
            world.feed(e.DataEnd())
        for worker in [worker for worker in world.tasks.values() if worker.alive and worker.task not in halted]:
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
    assert {shard: world.value(shard) for shard in shards} == replayed(world), "each part of each round once"
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
            (s, RequestArrival(worker, Request(method, OpId(f"w{worker}", s), 1, 7, meta, tensors)))
            for s in range(shards)
        ]
        return [effect for effect in cores.on(events, 0.0) if isinstance(effect, Reply)]

    def counted(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    told(-2, "register_shard", {"plan": "add"})
    told(-2, "open_training", {"training": "t"})
    about = {"training": "t", "round": 1, "places": workers, "parts": workers, "plan": "add"}
    about["shards"] = list(range(shards))
    replies = []
    sys.setprofile(counted)
    try:
        for worker in range(workers):
            replies += told(
                worker, "contribute", {**about, "worker": worker, "place": worker, "reads": ["w"]}, [torch.ones(3)]
            )
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
