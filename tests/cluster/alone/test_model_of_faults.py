"""One model of an asynchronous training under faults: real cores, registry, leases, batches that are kept, recovery.

A notebook lends pieces to tasks, whose pushes arrive late, twice, in any order and after their task, their training or
their servers are gone. Tasks die or fall silent and go on; servers are lost, and all begins anew from the last copy,
under another epoch; time jumps. Each step has an entry of the value on each server, so that the value says which steps
were applied, and how often. No socket, no clock. ``TFNB_FUZZ=10000`` tries so many examples.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cluster.alone.test_core import Add
from tests.mutations import tries
from tfnb.cluster.engine.members import StepFeeds
from tfnb.cluster.engine.restarts import Restarts
from tfnb.cluster.members.registry import ClusterTable
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import leases as a
from tfnb.cluster.recovery import BatchReplay, RecoveryBudget
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import Reply, RequestArrival
from tfnb.cluster.wire.messages import Ok, OpId, Refusal, Request
from tfnb.errors import ParameterServerLost
from tfnb.state.steps_taken import AppliedSteps
from tfnb.state.store import Store

TOTAL = 10  # steps of the training
EXAMPLES = tries(5)
reached: Counter[str] = Counter()


class Push(NamedTuple):
    """A push on its way, to whatever server has this number by then."""

    loop: Loop
    shard: int
    epoch: int
    incarnation: int
    op: OpId
    steps: tuple[int, ...]
    training: str


@dataclass
class Loop:
    """What a task does for one epoch: the pieces that it has, and the servers that answered its step."""

    task: int
    is_dead: bool = False
    is_wanted: bool = True  # the notebook listens to it
    is_standing: bool = False
    pieces: deque[Any] = field(default_factory=deque)
    at: int = 0  # push of the first piece
    answered: set[int] = field(default_factory=set)
    is_inside: bool = False  # it has sent its push somewhere

    @property
    def done(self) -> int:
        """Steps of the first piece that are pushed."""
        return self.pieces[0].pushed_by(self.at).start if self.at else 0


class Faults(RuleBasedStateMachine):
    """The notebook, with everything around it."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.table = 0.0, ClusterTable()
        self.numbers, self.incarnations, self.tasks = itertools.count(1), itertools.count(1), itertools.count()
        self.replay = BatchReplay(StepFeeds((), 0, number=number) for number in range(TOTAL))
        self.budget = RecoveryBudget(Restarts(most=3, within=1e9))
        self.copy = torch.zeros(TOTAL)
        self.bag: list[Push] = []
        self.end: e.Finish | None = None
        self.is_lost = False  # no server can be had any more
        self.loops: dict[int, Loop] = {}
        self.recoveries = 0
        self.later = deque[Any]()  # events that are due
        self.stopping: set[int] = set()  # tasks that were told to end their loops
        self.gone: set[int] = set()  # tasks whose loops were lost
        self.asked: Any = None  # operations that servers are to tell of

    @initialize(
        shards=st.integers(1, 3), tasks=st.integers(1, 3), patience=st.sampled_from([0.0, 5.0]),
        n_push=st.integers(1, 3), warm_start=st.sampled_from([0, 0, 4]), measured=st.booleans(),
    )  # fmt: skip
    def begin(
        self, shards: int, tasks: int, patience: float, n_push: int = 1, warm_start: int = 0, measured: bool = False
    ) -> None:  # fmt: skip
        self.is_measured = measured
        self.shards, self.patience, self.n_push, self.warm_start = range(shards), patience, n_push, warm_start
        self.open(tasks)

    def open(self, tasks: int) -> None:
        """An epoch: servers with the values of the copy, and a training over the batches that it has not seen."""
        self.epoch = self.table.open(f"cluster {self.recoveries}", "notebook")["epoch"]
        self.training = f"training {self.recoveries}"
        self.cores = {}
        for shard in self.shards:
            core = Core(
                Store(), lambda meta, tensors: Add(), epoch=self.epoch, incarnation=next(self.incarnations), shard=shard
            )
            self.cores[shard] = core
            self.ask(shard, "create", [self.copy.clone()], keys=["w"])
            self.ask(shard, "register_shard", plan="add")
            self.ask(shard, "open_training", training=self.training)
        self.applied = self.replay.applied.copy()
        self.batches = self.replay.rest()
        self.pieces: dict[int, a.StreamPiece] = {}
        self.streams: set[int] = set()
        names = [next(self.tasks) for _ in range(tasks)]
        self.loops = {name: Loop(name) for name in names}
        self.machine = a.Leases(
            names, list(self.shards), self.numbers, deadline=float("inf"), patience=self.patience, n_push=self.n_push,
            warm_start=max(0, self.warm_start - len(self.applied)), is_warmth_measured=self.is_measured,
        )  # fmt: skip
        self.have_agreed = False
        self.feed(e.Start())

    def ask(self, shard: int, method: str, tensors: Any = (), **meta: Any) -> Any:
        """The notebook asks a server, and is answered."""
        core = self.cores[shard]
        op = OpId("notebook", next(self.numbers))
        request = Request(method, op, core.epoch, core.incarnation, meta, list(tensors))
        (reply,) = (effect for effect in core.on(RequestArrival(0, request), self.now) if isinstance(effect, Reply))
        assert isinstance(reply.answer, Ok), reply.answer
        return reply.answer

    def value(self, shard: int) -> list[float]:
        return self.cores[shard].store.get("w").tolist()

    # -- the notebook -------------------------------------------------------------------------------------------------

    def feed(self, event: Any) -> None:
        for instruction in self.machine.on(event, self.now):
            match instruction:
                case a.Give(task, piece):
                    self.pieces[piece.number] = piece
                    self.streams.add(piece.stream)
                    if len(self.applied) < self.warm_start and not self.have_agreed:
                        assert task == self.machine.tasks[0], "one task begins"
                    self.loops[task].pieces.append(replace(piece))
                case a.Report(number, start, stop):
                    told = [batch.number for batch in self.steps_of(number)[start:stop]]
                    assert not any(step in self.applied for step in told), "a step is told once"
                    self.applied.add(told)
                case a.Standstill():
                    self.take_copy()
                case a.Pause(task):
                    self.loops[task].is_standing = True
                case a.Continue(task):
                    self.loops[task].is_standing = False
                case a.StopLoop(task):
                    self.stop(task)
                case a.Count(pieces):
                    self.count(pieces)
                case e.Finish():
                    self.end = instruction
                    for shard in self.shards:
                        clients = [self.client(stream) for stream in self.streams]
                        self.ask(shard, "end_training", training=self.training, clients=clients)

    def steps_of(self, number: int) -> Any:
        found = [piece for piece in self.counted if piece.number == number] if number not in self.pieces else []
        return found[0].steps if found else self.pieces[number].steps

    counted: tuple[a.StreamPiece, ...] = ()

    def client(self, stream: int) -> str:
        return f"{self.training}-{stream}"

    def take_copy(self) -> None:
        """Nothing is in progress: the copy is of the steps that were told, on all servers."""
        reached["copy"] += 1
        self.check_values()
        self.copy = self.cores[0].store.get("w").clone()
        self.replay.keep(self.applied.copy())
        self.later.append(e.Resume())

    def stop(self, task: int) -> None:
        """A loop ends when its step is sent to all."""
        self.loops[task].is_standing = True
        self.stopping.add(task)

    def count(self, pieces: tuple[a.StreamPiece, ...]) -> None:
        """Which steps the servers applied; the answers come later."""
        self.asked, self.counted = [operation for piece in pieces for operation in piece.operations], pieces

    @property
    def is_on(self) -> bool:
        return self.end is None and not self.is_lost

    # -- what may happen ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.is_on and self.machine.takers)
    @rule(size=st.integers(1, 4))
    def offer(self, size: int) -> None:
        steps = list(itertools.islice(self.batches, size))
        if steps:
            self.feed(a.Offer(steps))
        else:
            self.feed(e.DataEnd())

    @precondition(lambda self: self.loops)
    @rule(which=st.integers(0, 9), shards=st.sets(st.integers(0, 2)))
    def send(self, which: int, shards: set[int]) -> None:
        """A loop sends its push to some servers that have not answered, for the first time or again."""
        loop = [*self.loops.values()][which % len(self.loops)]
        if loop.is_dead or not loop.pieces or (loop.is_standing and not loop.is_inside):
            return
        piece, loop.is_inside = loop.pieces[0], True
        for shard in set(self.shards) & shards - loop.answered:
            op, core = OpId(self.client(piece.stream), piece.first + loop.at), self.cores[shard]
            steps = tuple(piece.steps[at].number for at in piece.pushed_by(loop.at))
            self.bag.append(Push(loop, shard, core.epoch, core.incarnation, op, steps, self.training))

    @precondition(lambda self: self.bag)
    @rule(which=st.integers(0, 99), stays=st.booleans(), is_heard=st.booleans())
    def deliver(self, which: int, stays: bool, is_heard: bool) -> None:
        """A push arrives, and perhaps once more later; its answer may be lost."""
        push = self.bag[which % len(self.bag)]
        if not stays:
            self.bag.remove(push)
        self.arrive(push, is_heard)

    def arrive(self, push: Push, is_heard: bool = True) -> None:
        mark = torch.zeros(TOTAL)
        mark[list(push.steps)] = 1.0
        core = self.cores[push.shard]
        meta = {"plan": "add", "training": push.training, "loop": f"{push.loop.task}"}
        request = Request("push", push.op, push.epoch, push.incarnation, meta, [mark])
        (reply,) = (effect for effect in core.on(RequestArrival(1, request), self.now) if isinstance(effect, Reply))
        if push.epoch != self.epoch:
            assert isinstance(reply.answer, Refusal), "of an epoch that is over"
            reached["fenced"] += 1
        loop = push.loop
        if is_heard and isinstance(reply.answer, Ok) and loop.pieces:
            piece = loop.pieces[0]
            if push.op == OpId(self.client(piece.stream), piece.first + loop.at):
                loop.answered.add(push.shard)
                if loop.answered == set(self.shards):
                    self.step_done(loop)

    def step_done(self, loop: Loop) -> None:
        """All servers have a push of a loop; it tells at once where its piece is done, else when it is asked to."""
        piece = loop.pieces[0]
        loop.at, loop.answered, loop.is_inside = loop.at + 1, set(), False
        if loop.at == len(piece.operations):
            loop.pieces.popleft()
            loop.at = 0
            self.tell(loop, piece.number, piece.count)

    def tell(self, loop: Loop, number: int, done: int) -> None:
        if loop.is_wanted and not loop.is_dead and self.end is None:
            self.feed(a.PieceProgress(loop.task, number, done))

    def wanted(self, which: int) -> Loop | None:
        found = [loop for loop in self.loops.values() if loop.is_wanted]
        return found[which % len(found)] if found else None

    @precondition(lambda self: self.is_on)
    @rule(which=st.integers(0, 9))
    def hear(self, which: int) -> None:
        """A loop says how far it is; that it stands, or has ended, if it was told to."""
        loop = self.wanted(which)
        if loop is None:
            return
        if loop.pieces:
            self.tell(loop, loop.pieces[0].number, loop.done)
        if loop.task in self.stopping and not loop.is_inside:
            self.stopping.discard(loop.task)
            loop.pieces.clear()
            loop.at, loop.is_standing = 0, False
            self.feed(a.LoopEnd(loop.task))
        elif loop.is_standing and not loop.is_inside:
            self.feed(a.TaskPause(loop.task))

    @precondition(lambda self: self.is_on)
    @rule(which=st.integers(0, 9), is_silent=st.booleans())
    def lose(self, which: int, is_silent: bool) -> None:
        """A task dies, or is silent and goes on to send; what it sent is on its way."""
        loop = self.wanted(which)
        if loop is None:
            return
        loop.is_wanted, loop.is_dead = False, not is_silent
        self.gone.add(loop.task)
        loop.is_standing = False
        self.stopping.discard(loop.task)
        reached["silent" if is_silent else "dead"] += 1
        self.feed(e.TaskLoss(loop.task, is_silent))

    @precondition(lambda self: self.is_on and sum(loop.is_wanted for loop in self.loops.values()) < 3)
    @rule()
    def join(self) -> None:
        task = next(self.tasks)
        self.loops[task] = Loop(task)
        self.feed(e.TaskJoin(task))

    @precondition(lambda self: self.is_on)
    @rule()
    def hold(self) -> None:
        if not self.machine.is_hold_wanted:
            self.feed(e.Drain())

    @precondition(lambda self: self.later)
    @rule()
    def resume(self) -> None:
        event = self.later.popleft()
        if self.is_on:
            self.feed(event)

    @precondition(lambda self: self.is_on)
    @rule(seconds=st.sampled_from([0.1, 10.0, 86_400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(e.Tick())

    @precondition(lambda self: self.is_on)
    @rule(share=st.sampled_from([0.0, 0.3, 2.0]))
    def gradients_change(self, share: float) -> None:
        agree = (len(self.machine.tasks) - 1) * share <= a.AGREED
        self.have_agreed |= self.is_measured and agree and self.machine.state == "open"
        self.feed(a.GradientChange(self.machine.tasks[0] if self.machine.tasks else 0, share))

    @precondition(lambda self: self.is_on and self.asked is None)
    @rule()
    def interrupt(self) -> None:
        self.feed(e.Interrupt())

    @precondition(lambda self: self.asked is not None)
    @rule()
    def answer(self) -> None:
        """The servers say which steps they applied."""
        operations, self.asked = self.asked or (), None
        found: dict[tuple[int, int], list[int]] = {}
        for shard, task in itertools.product(self.shards, self.gone):
            self.ask(shard, "depart", training=self.training, loop=f"{task}", gone=True)
        for stream, seq in operations:
            for shard in self.shards:
                about = {"client": self.client(stream), "seqs": [seq]}
                if self.ask(shard, "applied", **about).meta["applied"]:
                    found.setdefault((stream, seq), []).append(shard)
        reached["count"] += 1
        self.feed(a.AppliedCounts(found))

    @precondition(lambda self: self.is_on)
    @rule(tasks=st.integers(1, 3))
    def lose_server(self, tasks: int) -> None:
        """Whatever was not copied is lost: all begins anew, and who lived through it is a stranger."""
        self.asked = None
        self.feed(e.ShardLost(0))
        assert self.end is not None and isinstance(self.end.cause, e.ServerLost)
        kept = self.replay.applied
        try:
            self.budget.spend(ParameterServerLost("lost"), len(kept))
        except ParameterServerLost:
            self.is_lost = True
            reached["budget"] += 1
            return
        self.end, self.recoveries = None, self.recoveries + 1
        self.later.clear()
        self.stopping.clear()
        self.gone.clear()
        for loop in self.loops.values():
            loop.is_dead, loop.is_wanted = True, False
        reached["recovery"] += 1
        self.open(tasks)
        assert AppliedSteps(self.applied.whole, self.applied.beyond) == kept

    # -- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_applied_twice(self) -> None:
        for shard in getattr(self, "cores", {}):
            value = self.value(shard)
            assert set(value) <= {0.0, 1.0}, value
            assert all(value[step] for step in range(TOTAL) if step in self.applied), "what was told is there"

    def check_values(self) -> None:
        """The values are those of the steps that were told."""
        for shard in self.shards:
            assert self.value(shard) == [float(step in self.applied) for step in range(TOTAL)]

    def go_on(self) -> None:
        """All that can be done without a fault."""
        if not any(loop.is_wanted for loop in self.loops.values()):
            self.join()
        if self.asked is not None:
            self.answer()
        while self.later:
            self.resume()
        if self.is_on and self.machine.takers:
            self.offer(3)
        for at in range(len(self.loops)):
            self.send(at, {0, 1, 2})
        bag, self.bag = self.bag, []
        for push in bag:
            self.arrive(push)
        for at in range(3):
            if self.end is None:
                self.hear(at)

    def teardown(self) -> None:
        """Nothing more goes wrong: the training gets to its end, and all that is late arrives then."""
        if not hasattr(self, "cores") or self.is_lost:
            return
        for _ in range(200):
            if self.end is None:
                self.go_on()
        assert self.end is not None, "it ends"
        if not self.end.torn:
            self.check_values()
        late = [self.value(shard) for shard in self.shards]
        for push in self.bag:
            self.arrive(push)
        assert late == [self.value(shard) for shard in self.shards], "nothing counts after the end"
        if self.end.cause is None:
            assert len(self.applied) == TOTAL
        reached[type(self.end.cause).__name__] += 1


def test_a_late_push_of_a_lost_task_is_not_taken_once_servers_were_asked_what_they_applied() -> None:
    """While a step that some servers lack is completed, another one, which none had, arrives."""
    faults = Faults()
    faults.begin(shards=2, tasks=3, patience=0.0)
    for _ in range(3):
        faults.offer(1)
    faults.send(0, {0})
    faults.send(1, {0, 1})
    faults.arrive(faults.bag.pop(0))
    for which in (0, 0):
        faults.lose(which, is_silent=True)
    faults.send(2, {0, 1})
    faults.interrupt()
    for push in [push for push in faults.bag if push.loop.task == 2]:
        faults.bag.remove(push)
        faults.arrive(push)
    faults.hear(0)
    faults.answer()
    assert faults.end is None and faults.loops[2].pieces, "the first step is completed"
    for push in faults.bag:
        faults.arrive(push)
    faults.teardown()
    assert [*sorted(faults.applied.beyond), *range(faults.applied.whole)] == [2, 0] and not faults.end.torn


TestFaults = Faults.TestCase
TestFaults.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=60, deadline=None, phases=[Phase.generate, Phase.shrink]
)
