"""The parameter server as a pure machine: ``core.on(event, now) -> effects``.

It holds values in a store, applies pushes exactly once, and commits synchronous rounds all or nothing. A request may
have to wait inside: for the values of a later step, an element, a mean of gradients, a token. No Dask, clock, I/O or
thread: the task that hosts it calls ``on`` from one thread, in order, and carries out the effects. Programs of
registered plans are compiled by the function it is given. Imports torch, the message types and the state's objects.

A request is answered in this order: fence, ledger, checks and all computing, then one write, then the ack. An error
before the write leaves the values as they were; one inside the write poisons the core, which then refuses everything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from tfnb.cluster.server.courses import HOLD, Course, Turn
from tfnb.cluster.server.ledger import Ledger
from tfnb.cluster.server.lines import Lines, Waiting
from tfnb.cluster.server.objects import Objects
from tfnb.cluster.wire import envelope, tables
from tfnb.cluster.wire.messages import Failed, Ok, OpId, Refused, Request, failed
from tfnb.errors import (
    AlreadyExists,
    InvalidArgument,
    NonFiniteGradient,
    NotFound,
    ResourceExhausted,
    ShapeError,
    StepAborted,
)
from tfnb.execution.tracing.health import is_finite

PLANS = 64  # registered plans that are kept

Answer = Ok | Failed | Refused


class Arrived(NamedTuple):
    """A request came; ``ticket`` is the host's number for the call that waits for its answer."""

    ticket: int
    request: Request


class Tick(NamedTuple):
    """Time has passed."""


Event = Arrived | Tick


class Reply(NamedTuple):
    """Answer the call of this ticket."""

    ticket: int
    answer: Answer


class Send(NamedTuple):
    """Tell another shard; repeated until it has heard."""

    shard: int
    method: str
    meta: Mapping[str, Any]


Effect = Reply | Send


class Values(Protocol):
    """What holds the tensors: `tfnb.state.store.Store`."""

    budget: int | None

    opening: int

    @property
    def bytes(self) -> int: ...

    @property
    def spare_bytes(self) -> int: ...

    def create(self, values: Mapping[str, torch.Tensor]) -> None: ...

    def get(self, key: str) -> torch.Tensor: ...

    def read(self, keys: Sequence[str]) -> list[torch.Tensor]: ...

    def open(self, keys: Sequence[str], *, keep: bool = True, rows: int = 0) -> Mapping[str, torch.Tensor]: ...

    def is_table(self, key: str) -> bool: ...

    def growth(self, keys: Sequence[str], rows: int) -> int: ...

    def publish(self) -> None: ...

    def assign(self, values: Mapping[str, torch.Tensor]) -> None: ...

    def drop(self, keys: Sequence[str]) -> None: ...

    def release(self) -> None: ...

    def __contains__(self, key: object) -> bool: ...


class ServerProgram(Protocol):
    """A compiled server graph. ``kinds`` of its feeds say how the workers' become one: a row of MERGES."""

    kinds: Sequence[str]
    reads: Sequence[str]
    writes: Sequence[str]

    def compute(self, feeds: Sequence[torch.Tensor], storages: Sequence[torch.Tensor], run_index: int) -> Any: ...

    def commit(self, pending: Any) -> None: ...


Compile = Callable[[Mapping[str, Any], Sequence[torch.Tensor]], ServerProgram]


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker staged for a round: feeds of a program, or (``program`` None) new values of ``keys``."""

    program: ServerProgram | None
    keys: tuple[str, ...]
    rows: float
    run_index: int
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held by this part."""
        return _size(self.tensors)


@dataclass
class Round:
    """One synchronous step in the making."""

    parts: dict[int, Part] = field(default_factory=dict)
    workers: tuple[int, ...] = ()  # the prepared set
    write: Callable[[], None] | None = None  # the prepared write, with nothing fallible in it
    writes: tuple[str, ...] = ()
    opening: int = -1  # of the store, for that write

    @property
    def nbytes(self) -> int:
        """Bytes held by all parts."""
        return sum(part.nbytes for part in self.parts.values())


class Core:
    """State of shard number ``shard``, and what each request does to it.

    ``beside``: this core and the others of its process, which share its bytes. ``version`` counts writes, ``step``
    counts committed rounds, ``floor`` is the last round that is over.
    """

    def __init__(self, store: Values, compile: Compile, *, epoch: int, incarnation: int, shard: int = 0) -> None:
        self.store, self.compile, self.shard = store, compile, shard
        self.beside: list[Core] = [self]
        self.epoch, self.incarnation = epoch, incarnation
        self.version = self.step = self.floor = self.requests = 0
        self.over: set[int] = set()  # rounds above the floor
        self.versions: dict[str, int] = {}
        self.ledger = Ledger()
        self.plans: OrderedDict[str, ServerProgram] = OrderedDict()
        self.rounds: dict[int, Round] = {}
        self.courses: dict[str, Course] = {}  # of the trainings that are open
        self.poisoned: str | None = None
        self.lines = Lines()
        self.objects = Objects(self._afford, self._assigning)
        self.objects.is_over = lambda number: number <= self.floor or number in self.over
        self._methods: dict[str, Callable[[Request], Ok | Refused]] = {
            "create": self._create, "drop": self._drop, "assign": self._assign, "push": self._push,
            "commit": self._commit,
            "register_shard": self._register, "pull": self._pull, "stage": self._stage,
            "prepare": self._prepare, "abort": self._abort, "keep": self._keep, "stat": self._stat,
            "applied": self._applied,
            "choose": self._choose, "decided": self._decided, "cut": self._cut,
            "enter": self._enter, "depart": self._depart, "gone": self._gone,
            "open_training": self._open, "end_training": self._end_training,
        }  # fmt: skip
        self._timed: dict[str, Callable[[Request, float], Ok | Refused | None]] = {
            "contribute": self._contribute, "staged": self._staged, "hold": self._hold, "go": self._go,
            **self.objects.methods,
        }  # fmt: skip
        self._effects: list[Effect] = []  # beside the answer to the request in progress

    MUTATIONS = frozenset({"create", "drop", "assign", "push", "commit", "enter", "depart"})
    METHODS = MUTATIONS | Objects.METHODS | {
        "register_shard", "pull", "stage", "prepare", "abort", "keep", "stat", "applied",
        "contribute", "staged", "choose", "decided", "hold", "go", "cut", "open_training", "end_training", "gone",
    }  # fmt: skip

    def on(self, event: Event, now: float) -> list[Effect]:
        """The effects of an event, those on requests that waited for it among them."""
        match event:
            case Arrived(ticket, request):
                self.requests += 1
                effects = self._arrived(ticket, request, now)
            case Tick():
                effects = [Reply(ticket, Refused("again", "it waits still")) for ticket in self.lines.polled(now)]
                for course in self.courses.values():
                    self._commit_decided(course, now)
                self.objects.look()
        if self.lines:
            effects += self._proceed(now)
        more, self._effects = self._effects, []
        return [*effects, *more]

    def _arrived(self, ticket: int, request: Request, now: float) -> list[Effect]:
        """Answer a request, or let it stand in its line."""
        if request.op in self.lines and self._refused(request) is None:
            before = self.lines.renew(request.op, ticket, now)
            return [] if before is None else [Reply(before, Refused("again", "it was asked again"))]
        line = self._line(request)
        answer = None if self.lines.has(line) else self._answer(request, now)
        if self.lines.has(line):  # behind those before it, unless it needs no place
            answer = self._settled(request)
        if answer is not None:
            return [Reply(ticket, answer)]
        self.lines.join(Waiting(request, line, ticket, now))
        return []

    def _line(self, request: Request) -> str:
        """Where a request stands that has to wait."""
        if request.method == "pull" and "step" in request.meta:
            return f"step:{request.meta['step']}"
        if request.method == "pull" and "staleness" in request.meta:
            return "clock:{training}:{loop}".format_map(request.meta)
        if request.method == "contribute":  # nobody stands before anybody
            return "turn:{training}:{round}:{worker}".format_map(request.meta)
        return self.objects.line(request)

    def _proceed(self, now: float) -> list[Effect]:
        """Answer those at the heads of their lines that need not wait any more, until nobody proceeds."""
        effects: list[Effect] = []
        if self.poisoned is not None:
            return [Reply(ticket, Refused("poisoned", self.poisoned)) for ticket in self.lines.all()]
        proceeds = True
        while proceeds:
            proceeds = False
            for line in self.lines.names:
                while (head := self.lines.head(line)) is not None:
                    answer = self._answer(head.request, now)
                    if answer is None:
                        break
                    assert head.ticket is not None  # a head has an open call
                    self.lines.leave(head.request.op)
                    effects.append(Reply(head.ticket, answer))
                    proceeds = True
        return effects

    def _refused(self, request: Request) -> Refused | None:
        """Why it is not for this core as it is."""
        refused = fence(request, self.epoch, self.incarnation)
        if refused is None and self.poisoned is not None:
            refused = Refused("poisoned", self.poisoned)
        if refused is None and request.method != "open_training":
            training = request.meta.get("training")
            if training is not None and training not in self.courses:
                refused = Refused("stale", f"training {training} is over")
            elif "loop" in request.meta and request.method in ("push", "pull"):
                loop = request.meta["loop"]
                if loop not in self._course(request.meta).clocks:
                    refused = Refused("given-up", f"loop {loop} was given up")
        return refused

    def _settled(self, request: Request) -> Answer | None:
        """The answer that needs no work: a refusal, or the one that was given before."""
        refused = self._refused(request)
        if refused is not None or request.method not in self.MUTATIONS:
            return refused
        ack = self.ledger.ack(request.op)
        if ack is not None:
            return replace(self._with_values(ack, request), dup=True) if isinstance(ack, Ok) else ack
        if self.ledger.is_too_old(request.op):
            return Refused("too-old", f"{request.op} lies below the ledger's window")
        return None

    def _answer(self, request: Request, now: float) -> Answer | None:
        """Carry out a request; None where it has to wait."""
        answer = self._settled(request)
        if answer is None:
            answer = self._carried_out(request, now)
        if "clock" in request.meta and request.method == "push" and isinstance(answer, Ok):
            course, loop = self._course(request.meta), str(request.meta["loop"])
            course.tick(loop, int(request.meta["clock"]))
            answer = replace(answer, meta={**answer.meta, "lead": course.lead(loop)})
        return answer

    def _carried_out(self, request: Request, now: float) -> Answer | None:
        answer: Answer | None
        try:
            if request.method in self._timed:
                answer = self._timed[request.method](request, now)
            elif request.method == "pull" and self._is_early(request.meta):
                answer = None
            else:
                answer = self._methods[request.method](request)
        except Exception as error:  # every class of error becomes data at this edge; nothing was written
            return failed(error)
        if request.method in self.MUTATIONS and isinstance(answer, Ok):
            self.ledger.record(request.op, answer)
            answer = self._with_values(answer, request)
        return answer

    # -- variables ------------------------------------------------------------------------------------------

    def _create(self, request: Request) -> Ok:
        keys = _keys(request)
        for key in keys:
            if key in self.store:
                raise AlreadyExists(f"{key} exists on this server")
        self._afford(_size(request.tensors))
        values = _values(keys, request)
        with self._writing(keys):
            self.store.create(values)
        return self._ack()

    def _drop(self, request: Request) -> Ok:
        keys = [key for key in _keys(request) if key in self.store]
        with self._writing(keys):
            self.store.drop(keys)
        return self._ack()

    def _assign(self, request: Request) -> Ok:
        values = _values(_keys(request), request)
        write, keys = self._assignment(list(values), list(values.values()))
        with self._writing(keys):
            write()
        return self._ack()

    def _assignment(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> tuple[Callable[[], None], tuple[str, ...]]:
        """The write of whole values, checked."""
        _same_number(keys, tensors)
        for key, tensor in zip(keys, tensors, strict=True):
            held = self._value(key)
            if held.shape != tensor.shape or held.dtype != tensor.dtype:
                raise ShapeError(f"{key} is {_spec(held)}, the new value is {_spec(tensor)}")

        return lambda: self.store.assign(dict(zip(keys, tensors, strict=True))), tuple(keys)

    def _assigning(self, values: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """What writes these, checked; the memory that it takes is there."""
        write, keys = self._assignment(list(values), list(values.values()))
        self.store.open(keys, keep=False)  # who writes opens it again, and finds this generation

        def written() -> None:
            with self._writing(keys):
                write()

        return written

    def _pull(self, request: Request) -> Ok:
        """Values of ``keys`` that changed after ``since`` (a version for each key; none: all of them).

        With ``step`` it waits until so many rounds are committed, with ``staleness`` until the loop that reads is at
        most so many steps ahead of the slowest one. ``rows_of``: keys of which only rows are wanted: the tensors.
        ``tables``: of large tables the rows that are not zero will do.
        """
        if "decided" in request.meta:
            self._decided(request)
        answer = self._with_values(Ok({"version": self.version, "step": self.step}), request, "keys")
        if "rows_of" in request.meta:
            keys = list(map(str, request.meta["rows_of"]))
            _same_number(keys, request.tensors)
            rows = [self._value(key).index_select(0, at) for key, at in zip(keys, request.tensors, strict=True)]
            answer = replace(answer, tensors=[*answer.tensors, *rows])
        return answer

    def _is_early(self, meta: Mapping[str, Any]) -> bool:
        """Whether a pull has to wait."""
        if "staleness" in meta and self._course(meta).lead(str(meta["loop"])) > int(meta["staleness"]):
            return True
        return int(meta.get("step", 0)) > self.step

    def _enter(self, request: Request) -> Ok | Refused:
        """A loop goes to work: where its clock stands."""
        course, loop = self._course(request.meta), str(request.meta["loop"])
        if loop in course.gone:
            return Refused("given-up", f"loop {loop} was given up")
        return Ok({"clock": course.enter(loop, int(request.meta["clock"]))})

    def _depart(self, request: Request) -> Ok:
        """A loop stands still, or is given up (``gone``): what that one sends later is refused."""
        course, loop = self._course(request.meta), str(request.meta["loop"])
        course.leave(loop)
        if "gone" in request.meta:
            course.gone.add(loop)
        return self._ack()

    def _gone(self, request: Request) -> Ok:
        """A client is lost: it waits for nothing any more. What it did for a round ends with that."""
        client = str(request.meta["client"])
        lost = Refused("fenced", f"{client} is gone")
        self._effects += [Reply(ticket, lost) for ticket in self.lines.gone(client)]
        return self._ack()

    def _with_values(self, answer: Ok, request: Request, names: str = "reads") -> Ok:
        """The answer, with the values of the keys that the request names, as far as they changed."""
        if names not in request.meta:
            return answer
        keys = _keys(request, names)
        since = request.meta.get("since") or [-1] * len(keys)
        _same_number(keys, since)
        versions = [self._version(key) for key in keys]
        fresh = [key for key, old, new in zip(keys, since, versions, strict=True) if old != new]
        meta = {**answer.meta, "versions": versions}
        if "tables" not in request.meta:
            return Ok(meta, self.store.read(fresh))
        dense = [key for key in fresh if not self.store.is_table(key)]
        values = dict(zip(dense, self.store.read(dense), strict=True))
        facts, tensors = tables.written({key: values[key] if key in values else self.store.get(key) for key in fresh})
        return Ok({**meta, **facts}, tensors)

    @property
    def used(self) -> int:
        """Bytes of values, of generations that are read still, of staged parts and objects."""
        return self.store.bytes + self.store.spare_bytes + self.objects.nbytes + self.staged

    @property
    def staged(self) -> int:
        """Bytes of parts of rounds."""
        rounds = sum(held.nbytes for held in self.rounds.values())
        return rounds + sum(course.nbytes for course in self.courses.values())

    def _course(self, meta: Mapping[str, Any]) -> Course:
        """The training that a request is of; what is sent for one that is not open was refused."""
        return self.courses[str(meta["training"])]

    # -- plans ----------------------------------------------------------------------------------------------

    def _register(self, request: Request) -> Ok:
        plan = str(request.meta["plan"])
        if plan not in self.plans:
            self.plans[plan] = self.compile(request.meta, request.tensors)
            while len(self.plans) > PLANS:
                self.plans.popitem(last=False)
        return Ok({"plan": plan})

    def _program(self, plan: str) -> ServerProgram | None:
        if plan in self.plans:
            self.plans.move_to_end(plan)
        return self.plans.get(plan)

    def _push(self, request: Request) -> Ok | Refused:
        """Apply one worker's update at once (asynchronous mode)."""
        part = self._part(request)
        if isinstance(part, Refused):
            return part
        write, keys = self._prepared([part])
        with self._writing(keys):
            write()
        return self._ack()

    # -- synchronous rounds -----------------------------------------------------------------------------------

    def _stage(self, request: Request) -> Ok | Refused:
        """Keep one worker's part until the round is committed or over."""
        number, worker = int(request.meta["round"]), int(request.meta["worker"])
        if (over := self._over(number)) is not None:
            return over
        part = self._part(request)
        if isinstance(part, Refused):
            return part
        held = self.rounds.get(number, Round())
        earlier = held.parts.get(worker)
        self._afford(part.nbytes - (earlier.nbytes if earlier else 0))
        self.rounds[number] = Round({**held.parts, worker: part})
        return Ok({"round": number})

    def _prepare(self, request: Request) -> Ok | Refused:
        """Compute what a commit of these workers will write; writes nothing."""
        number, workers = int(request.meta["round"]), tuple(map(int, request.meta["workers"]))
        if (over := self._over(number)) is not None:
            return over
        self._ready(number, workers)
        return Ok({"round": number})

    def _ready(self, number: int, workers: tuple[int, ...]) -> Round:
        held = self.rounds.get(number, Round())
        missing = [worker for worker in workers if worker not in held.parts]
        if missing or not workers:
            raise StepAborted(f"round {number} lacks what workers {missing} staged")
        if held.write is None or held.workers != workers or held.opening != self.store.opening:
            held.write, held.writes = self._prepared([held.parts[worker] for worker in workers])
            held.workers, held.opening = workers, self.store.opening
        return held

    def _commit(self, request: Request) -> Ok | Refused:
        """Write the round with exactly these workers, in this order."""
        number, workers = int(request.meta["round"]), tuple(map(int, request.meta["workers"]))
        if (over := self._over(number)) is not None:
            return over
        held = self._ready(number, workers)
        assert held.write is not None
        with self._writing(held.writes):
            held.write()
        self.step += 1
        self.objects.keep(number)
        self._end(request.meta)
        return self._ack()

    def _keep(self, request: Request) -> Ok:
        """A round was committed, elsewhere: what it took from queues here does not come back."""
        self.objects.keep(int(request.meta["round"]))
        self._end(request.meta)
        return self._ack()

    def _abort(self, request: Request) -> Ok:
        """End a round, and those up to ``floor`` or else before it; what was committed stays committed."""
        self._end(request.meta)
        self.objects.abort([int(request.meta["round"])] if request.meta.get("moved") else ())
        return self._ack()

    def _over(self, number: int) -> Refused | None:
        """Why nothing is taken for a round."""
        is_over = number <= self.floor or number in self.over
        return Refused("stale", f"round {number} is over; the last one was {self.floor}") if is_over else None

    def _end(self, meta: Mapping[str, Any]) -> None:
        number = int(meta["round"])
        self.floor = max(self.floor, int(meta.get("floor", number)))
        self.over = {other for other in {*self.over, number} if other > self.floor}
        self.rounds = {other: held for other, held in self.rounds.items() if self._over(other) is None}

    def _prepared(self, parts: Sequence[Part]) -> tuple[Callable[[], None], tuple[str, ...]]:
        """The write that applies ``parts`` as one update, fully computed; and the keys it writes."""
        first = parts[0]
        program = first.program
        if any((part.program, part.keys) != (program, first.keys) for part in parts):
            raise InvalidArgument("the workers of one round staged parts of different plans")
        if program is None:
            return self._assignment(first.keys, first.tensors)
        weights = [part.rows for part in parts]
        feeds = [MERGES[kind]([part.tensors[i] for part in parts], weights) for i, kind in enumerate(program.kinds)]
        for key in program.reads:
            self._value(key)
        rows = sum(len(feed) for feed, kind in zip(feeds, program.kinds, strict=True) if kind == "rows")
        if rows:
            self._afford(self.store.growth(program.writes, rows))
        opened = self.store.open(program.writes, rows=max(rows, "rows" in program.kinds))
        storages = [opened[key] if key in opened else self.store.get(key) for key in program.reads]
        pending = program.compute(feeds, storages, first.run_index)
        return (lambda: program.commit(pending)), tuple(program.writes)

    def _part(self, request: Request) -> Part | Refused:
        """What the request stages or pushes, checked."""
        meta, tensors = request.meta, tuple(request.tensors)
        plan, keys = meta.get("plan"), tuple(meta.get("keys", ()))
        program = None
        if plan is None:
            self._assignment(keys, tensors)
        else:
            program = self._program(str(plan))
            if program is None:
                return Refused("unknown-plan", str(plan))
            _check_feeds(program, tensors)
        return Part(program, keys, float(meta.get("rows", 1)), int(meta.get("run_index", 0)), tensors)

    # -- rounds of a training, which commit without the notebook ------------------------------------------------

    def _contribute(self, request: Request, now: float) -> Ok | Refused | None:
        """Keep one worker's part; answered when its round is written, with the values of now and whether it counts."""
        meta, course = request.meta, self._course(request.meta)
        number, worker = int(meta["round"]), int(meta["worker"])
        if number > course.latest:
            if number <= course.floor:
                return Refused("stale", f"round {number} is over; the last one was {course.floor}")
            turn = course.turn(number)
            if worker not in turn.parts and not turn.chosen and "absent" not in meta:
                part = self._part(request)
                if isinstance(part, Refused):
                    return part
                self._afford(part.nbytes)
                turn.add(worker, part, tuple(map(int, meta["shards"])), int(meta["workers"]))
                self._has_part(turn, worker, meta)
                self._commit_decided(course, now)
            if turn.error is not None:
                raise turn.error
            if number > course.latest:
                return None
        counts = course.counted.get(worker) == number
        return self._with_values(Ok({**self._ack().meta, "latest": course.latest, "counts": counts}), request)

    def _has_part(self, turn: Turn, worker: int, meta: Mapping[str, Any]) -> None:
        """A part is there: the first ones here make the round, or (``joint``) those whom the first shard chooses."""
        first = turn.shards[0]
        if "joint" not in meta:
            if len(turn.parts) == turn.wanted:
                self._make(turn, sorted(turn.parts), meta)
        elif self.shard == first:
            self._held(turn, worker, first, meta)
        else:
            self._send(first, "staged", meta, by=self.shard, worker=worker)

    def _held(self, turn: Turn, worker: int, shard: int, meta: Mapping[str, Any]) -> None:
        """On the first shard: a shard has the part of a worker. The first that are everywhere make the round."""
        if chosen := turn.hold(worker, shard):
            self._make(turn, chosen, meta)
            for other in turn.shards[1:]:
                self._send(other, "choose", meta, workers=chosen)

    def _choose(self, request: Request) -> Ok:
        """The first shard has chosen the workers of a round."""
        meta, course = request.meta, self._course(request.meta)
        turn = course.turns.get(int(meta["round"]))
        if turn is not None and not turn.chosen:
            self._make(turn, list(map(int, meta["workers"])), meta)
        return self._ack()

    def _make(self, turn: Turn, chosen: list[int], meta: Mapping[str, Any]) -> None:
        """Compute the write of a round, and tell the first shard; that one lets the others write when all are ready.

        An error is kept for those who contribute.
        """
        turn.chosen = tuple(chosen)
        try:
            self._compute(turn)
        except Exception as error:
            turn.error = error
            return
        first, *others = turn.shards
        if self.shard == first:
            turn.ready.add(first)
            decided = {"training": str(meta["training"]), "decided": int(meta["round"])}
            turn.sends = [Send(other, "decided", decided) for other in others]
        else:
            self._send(first, "staged", meta, by=self.shard)

    def _send(self, to: int, method: str, meta: Mapping[str, Any], **more: Any) -> None:
        """Tell another shard of the round that a request is of."""
        about = {"training": str(meta["training"]), "round": int(meta["round"])}
        self._effects.append(Send(to, method, about | more))

    def _compute(self, turn: Turn) -> None:
        """The write of a round, in the order of its workers."""
        turn.write, turn.writes = self._prepared([turn.parts[worker] for worker in turn.chosen])
        turn.is_computed, turn.opening = True, self.store.opening

    def _staged(self, request: Request, now: float) -> Ok:
        """Another shard has the part of a worker, or has computed its write of a round."""
        meta, course = request.meta, self._course(request.meta)
        number, shard = int(meta["round"]), int(meta["by"])
        if number > max(course.latest, course.floor):
            turn = course.turn(number)
            if "worker" in meta:
                self._held(turn, int(meta["worker"]), shard, meta)
            else:
                turn.ready.add(shard)
            self._commit_decided(course, now)
        return self._ack()

    def _commit_decided(self, course: Course, now: float) -> None:
        """On the first shard: write the round that all shards are ready for, unless it is held."""
        number = min(course.turns, default=0)
        if number and course.turns[number].is_decided and now >= course.held_until:
            self._effects += course.turns[number].sends
            self._write(course, number)

    def _hold(self, request: Request, now: float) -> Ok:
        """On the first shard: commit nothing for a while; the last round that was decided."""
        course = self._course(request.meta)
        course.held_until = now + HOLD
        return Ok({"latest": course.latest})

    def _go(self, request: Request, now: float) -> Ok:
        """The end of a hold."""
        course = self._course(request.meta)
        course.held_until = 0.0
        self._commit_decided(course, now)
        return Ok({"latest": course.latest})

    def _cut(self, request: Request) -> Ok:
        """Rounds up to ``upto`` that are not decided are over; the last one that was written."""
        course = self._course(request.meta)
        if "decided" in request.meta:
            self._decided(request)
        course.end(int(request.meta["upto"]))
        return Ok({"latest": course.latest})

    def _open(self, request: Request) -> Ok:
        """A training begins."""
        self.courses.setdefault(str(request.meta["training"]), Course())
        return self._ack()

    def _end_training(self, request: Request) -> Ok:
        """A training is over: nothing that is sent for it counts, so the ledger need not know its clients."""
        self.courses.pop(str(request.meta["training"]), None)
        for client in request.meta["clients"]:
            self.ledger.clients.pop(str(client), None)
        return self._ack()

    def _decided(self, request: Request) -> Ok:
        """Write every round that the first shard has decided."""
        course, decided = self._course(request.meta), int(request.meta["decided"])
        for number in sorted(course.turns):
            if number <= decided and course.turns[number].is_computed:
                self._write(course, number)
        return self._ack()

    def _write(self, course: Course, number: int) -> None:
        turn = course.turns.pop(number)
        if turn.write is None or turn.opening != self.store.opening:  # somebody else wrote since it was computed
            self._compute(turn)
        assert turn.write is not None
        with self._writing(turn.writes):
            turn.write()
        self.step += 1
        course.latest = number
        course.counted.update(dict.fromkeys(turn.chosen, number))

    # -- shared -----------------------------------------------------------------------------------------------

    def _stat(self, request: Request) -> Ok:
        return Ok({
            "version": self.version, "step": self.step, "bytes": self.store.bytes, "staged": self.staged,
            "spare": self.store.spare_bytes,
            "budget": self.store.budget, "variables": len(self.versions), "plans": len(self.plans),
            "applied": self.ledger.applied, "dups": self.ledger.dups, "waiting": len(self.lines),
            "queued": self.objects.waiting, "requests": self.requests,
            "moved": dict(envelope.MOVED),
        })  # fmt: skip

    def _applied(self, request: Request) -> Ok:
        """Which operations ``seqs`` of ``client`` were applied here."""
        client, seqs = str(request.meta["client"]), list(map(int, request.meta["seqs"]))
        return Ok({"applied": [seq for seq in seqs if self.ledger.has(OpId(client, seq))]})

    def _ack(self) -> Ok:
        return Ok({"version": self.version, "step": self.step})

    def _value(self, key: str) -> torch.Tensor:
        self._version(key)
        return self.store.get(key)

    def _version(self, key: str) -> int:
        found = self.versions.get(key)
        if found is None:
            raise NotFound(f"this server holds no variable {key}")
        return found

    def _afford(self, asked: int) -> None:
        """Bytes of a parameter server, which may hold several shards."""
        budget = self.store.budget
        if budget is None or sum(core.used for core in self.beside) + asked <= budget:
            return
        for core in self.beside:
            core.store.release()  # room for another generation can be had again
        used = sum(core.used for core in self.beside)
        if used + asked > budget:
            raise ResourceExhausted(f"bytes on this parameter server: asked {asked}, used {used}, limit {budget}")

    @contextmanager
    def _writing(self, keys: Iterable[str]) -> Any:
        """The one place where values change; an error inside poisons the core."""
        keys = tuple(keys)
        try:
            yield
            self.store.publish()
        except BaseException as error:
            self.poisoned = f"a write failed half-way: {type(error).__name__}: {error}"
            raise
        self.version += 1
        for key in keys:
            if key in self.store:
                self.versions[key] = self.version
            else:
                self.versions.pop(key, None)


def fence(request: Request, epoch: int, incarnation: int) -> Refused | None:
    """Whether the request is for another process, or of another epoch, than the one that got it."""
    if request.incarnation != incarnation:
        return Refused("fenced", "this address now belongs to another task")
    if request.epoch != epoch:
        return Refused("fenced", f"the request is of epoch {request.epoch}, this task is at {epoch}")
    return None


def mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Weighted mean in the order given; one value is returned as it is, so that one worker is exact.

    >>> mean([torch.tensor([1.0]), torch.tensor([4.0])], [2, 1])
    tensor([2.])
    """
    if len(values) == 1:
        return values[0]
    for value in values:
        if value.shape != values[0].shape or value.dtype != values[0].dtype:
            raise ShapeError(f"workers pushed {_spec(values[0])} and {_spec(value)} for one gradient")
    whole = sum(weights)
    wide = torch.float32 if values[0].dtype in (torch.float16, torch.bfloat16) else values[0].dtype
    total = values[0].to(wide) * (weights[0] / whole)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total.add_(value.to(wide), alpha=weight / whole)
    return total.to(values[0].dtype)


def weighted(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Entries of row-sparse gradients behind each other, which sum to their weighted mean.

    >>> weighted([torch.tensor([[3.0]]), torch.tensor([[3.0], [6.0]])], [2, 1]).flatten()
    tensor([2., 1., 2.])
    """
    if len(values) == 1:
        return values[0]
    whole = sum(weights)
    return torch.cat([value * (weight / whole) for value, weight in zip(values, weights, strict=True)])


MERGES: dict[str, Callable[[Sequence[torch.Tensor], Sequence[float]], torch.Tensor]] = {
    "grad": mean,
    "rows": weighted,
    "entries": lambda values, weights: values[0] if len(values) == 1 else torch.cat(list(values)),
    "value": lambda values, weights: values[0],
}


GRADIENTS = ("grad", "rows")  # kinds that must be finite


def _check_feeds(program: ServerProgram, tensors: Sequence[torch.Tensor]) -> None:
    _same_number(program.kinds, tensors)
    for kind, tensor in zip(program.kinds, tensors, strict=True):
        if kind in GRADIENTS and not is_finite(tensor):
            raise NonFiniteGradient(
                f"a gradient {_spec(tensor)} holds NaN or infinity; the step was dropped on every server"
            )


def _keys(request: Request, names: str = "keys") -> list[str]:
    keys = request.meta.get(names)
    if not isinstance(keys, list) or len(set(keys)) != len(keys):
        raise InvalidArgument(f"{names} is a list of different keys")
    return keys


def _values(keys: Sequence[str], request: Request) -> dict[str, torch.Tensor]:
    return tables.read(keys, request.meta.get("tables", {}), request.tensors)


def _same_number(a: Sequence[Any], b: Sequence[Any]) -> None:
    if len(a) != len(b):
        raise InvalidArgument(f"{len(a)} names, but {len(b)} entries")


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _spec(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
