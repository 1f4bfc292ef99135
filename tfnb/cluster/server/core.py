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
from dataclasses import replace
from typing import Any, Protocol

import torch

from tfnb.cluster.server.core_events import Answer, CoreTick, Effect, Event, Reply, RequestArrival
from tfnb.cluster.server.ledger import Ledger
from tfnb.cluster.server.lines import TURN, Lines, Waiting
from tfnb.cluster.server.objects import Objects
from tfnb.cluster.server.parts import (
    Compile,
    ServerProgram,
    StagedPart,
    Write,
    averaged,
    checked,
    same_number,
    spec,
)
from tfnb.cluster.server.room import Room
from tfnb.cluster.server.staged_rounds import StagedRounds
from tfnb.cluster.server.trainings import Trainings
from tfnb.cluster.wire import envelope, sparse_values
from tfnb.cluster.wire.messages import Ok, OpId, Refusal, Request, failed
from tfnb.errors import AlreadyExists, InvalidArgument, NotFound, ShapeError

PLANS = 64  # registered plans that are kept
PINS = 4  # instants whose values one client may be pulling


class Values(Protocol):
    """The store of tensors: `tfnb.state.store.Store`."""

    budget: int | None

    opening: int

    @property
    def bytes(self) -> int: ...

    @property
    def spare_bytes(self) -> int: ...

    def asked(self, values: Mapping[str, torch.Tensor]) -> int: ...

    def create(self, values: Mapping[str, torch.Tensor]) -> None: ...

    def get(self, key: str) -> torch.Tensor: ...

    def read(self, keys: Sequence[str]) -> list[torch.Tensor]: ...

    def open(
        self, keys: Sequence[str], *, keep: bool = True, rows: int = 0, values: Mapping[str, torch.Tensor] = ...
    ) -> Mapping[str, torch.Tensor]: ...

    def is_table(self, key: str) -> bool: ...

    def growth(self, keys: Sequence[str], rows: int = 0, values: Mapping[str, torch.Tensor] = ...) -> int: ...

    def publish(self) -> None: ...

    def assign(self, values: Mapping[str, torch.Tensor]) -> None: ...

    def drop(self, keys: Sequence[str]) -> None: ...

    def release(self) -> None: ...

    def __contains__(self, key: object) -> bool: ...


class Core:
    """State of shard number ``shard``, and the handlers of all requests.

    ``room``: bytes for this core and the others of its process. ``version`` counts writes, ``step`` committed rounds.
    """

    def __init__(self, store: Values, compile: Compile, *, epoch: int, incarnation: int, shard: int = 0) -> None:
        self.store, self.compile, self.shard = store, compile, shard
        self.room = Room([self])
        self.epoch, self.incarnation = epoch, incarnation
        self.version = self.step = self.requests = 0
        self.versions: dict[str, int] = {}
        self.ledger = Ledger()
        self.plans: OrderedDict[str, ServerProgram] = OrderedDict()
        self.poisoned: str | None = None
        self.pins: dict[tuple[str, int], Ok] = {}  # by client and number: values of one instant that it will pull
        self.lines = Lines()
        self.objects = Objects(self.afford, self._assigning)
        self.rounds, self.trainings = StagedRounds(self, self.objects), Trainings(self, self.ledger)
        self._methods: dict[str, Callable[[Request], Ok | Refusal]] = {
            "create": self._create, "drop": self._drop, "assign": self._assign, "push": self._push,
            "register_shard": self._register, "pull": self._pull, "stat": self._stat, "applied": self._applied,
            "pin": self._pin, "unpin": self._unpin, "gone": self._gone, **self.rounds.methods, **self.trainings.methods,
        }  # fmt: skip
        self._timed: dict[str, Callable[[Request, float], Ok | Refusal | None]] = {
            **self.objects.methods, **self.trainings.timed,
        }  # fmt: skip
        self._effects: list[Effect] = []  # beside the answer to the request in progress
        self._seen: tuple[int, ...] = ()  # the value of `_decided` at the last try of requests that wait for a decision
        self._renewed: list[str] = []  # lines with a request that has an open call again: it may be due by now

    MUTATIONS = frozenset({"create", "drop", "assign", "push", "commit", "enter", "depart"})
    METHODS = MUTATIONS | Objects.METHODS | {
        "register_shard", "pull", "pin", "unpin", "stage", "prepare", "abort", "keep", "stat", "applied",
        "contribute", "staged", "decided", "standing", "hold", "go", "cut", "open_training", "end_training", "gone",
    }  # fmt: skip

    @property
    def largest_push(self) -> int | None:
        """Bytes of tensors that a push can have: feeds of a plan, or a value for each Variable; None: any number."""
        plans = [plan.nbytes for plan in self.plans.values()]
        sizes = [nbytes for nbytes in plans if nbytes is not None]
        return max([self.store.bytes, *sizes]) if len(sizes) == len(plans) else None

    def on(self, event: Event, now: float) -> list[Effect]:
        """The effects of an event, with the answers to waiting requests that can proceed now."""
        match event:
            case RequestArrival(ticket, request):
                self.requests += 1
                effects = self._arrived(ticket, request, now)
            case CoreTick():
                effects = [Reply(ticket, Refusal("again", "it waits still")) for ticket in self.lines.polled(now)]
                self.trainings.tick(now)
                self.objects.look()
        if self.lines:
            effects += self._proceed(now)
        more, self._effects = [*self._effects, *self.trainings.told()], []
        return [*effects, *more]

    def _arrived(self, ticket: int, request: Request, now: float) -> list[Effect]:
        """Answer a request, or append the request to its line."""
        if request.op in self.lines and self._refused(request) is None:
            line, before = self.lines.renew(request.op, ticket, now)
            self._renewed.append(line)
            return [] if before is None else [Reply(before, Refusal("again", "the call was repeated"))]
        line = self._line(request)
        answer = None if self.lines.has(line) else self._answer(request, now)
        if self.lines.has(line):  # behind earlier requests, unless answered without a place
            answer = self._settled(request)
        if answer is not None:
            return [Reply(ticket, answer)]
        self.lines.join(Waiting(request, line, ticket, now))
        return []

    def _line(self, request: Request) -> str:
        """The line of a request that has to wait."""
        if request.method == "pull" and "step" in request.meta:
            return f"step:{request.meta['step']}"
        if request.method == "pull" and "staleness" in request.meta:
            return (TURN + "{training}:{loop}").format_map(request.meta)
        if request.method == "contribute":  # a line for each, as contributions do not wait for each other
            return (TURN + "{training}:{round}:{worker}").format_map(request.meta)
        return self.objects.line(request)

    def _proceed(self, now: float) -> list[Effect]:
        """Answer the requests at the heads of their lines, until none can proceed.

        Contributions wait for their round, and bounded reads for the slowest loop: they are tried again when that was
        decided, not as each of them comes. Channels are tried as their acts end.
        """
        effects: list[Effect] = []
        if self.poisoned is not None:
            return [Reply(ticket, Refusal("poisoned", self.poisoned)) for ticket in self.lines.all()]
        proceeds = True
        while proceeds or self._seen != self._decided:
            is_decided, self._seen, proceeds = self._seen != self._decided, self._decided, False
            renewed, self._renewed = self._renewed, []
            for line in [*self.lines.names(with_turns=is_decided), *renewed, *self.objects.awakened(now)]:
                while (head := self.lines.head(line)) is not None:
                    answer = self._answer(head.request, now)
                    if answer is None:
                        break
                    assert head.ticket is not None  # a head has an open call
                    self.lines.leave(head.request.op)
                    effects.append(Reply(head.ticket, answer))
                    proceeds = True
        return effects

    @property
    def _decided(self) -> tuple[int, ...]:
        """The state that contributions and bounded reads wait for: they are tried again when this value changes."""
        return self.trainings.decisions, self.epoch, self.incarnation

    def _refused(self, request: Request) -> Refusal | None:
        """The refusal of a request by fence, by a poisoned core, or by its training; None if accepted."""
        refused = fence(request, self.epoch, self.incarnation)
        if refused is None and self.poisoned is not None:
            refused = Refusal("poisoned", self.poisoned)
        if refused is None and request.method != "open_training":
            refused = self.trainings.given_up(request)
        return refused

    def _settled(self, request: Request) -> Answer | None:
        """The answer without any work: a refusal, or the recorded answer of a repeated mutation."""
        refused = self._refused(request)
        if refused is not None or request.method not in self.MUTATIONS:
            return refused
        ack = self.ledger.ack(request.op)
        if ack is not None:
            return replace(self.with_values(ack, request), dup=True) if isinstance(ack, Ok) else ack
        if self.ledger.is_too_old(request.op):
            return Refusal("too-old", f"{request.op} lies below the ledger's window")
        return None

    def _answer(self, request: Request, now: float) -> Answer | None:
        """Carry out a request; None if the request has to wait."""
        answer = self._settled(request)
        if answer is None:
            answer = self._carried_out(request, now)
        if "clock" in request.meta and request.method == "push" and isinstance(answer, Ok):
            answer = replace(answer, meta={**answer.meta, "lead": self.trainings.ticked(request.meta)})
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
            answer = self.with_values(answer, request)
        return answer

    # -- variables ------------------------------------------------------------------------------------------

    def _create(self, request: Request) -> Ok:
        keys = _keys(request)
        for key in keys:
            if key in self.store:
                raise AlreadyExists(f"{key} exists on this server")
        self.afford(sparse_values.taking(keys, request.meta.get("tables", {}), request.tensors))
        values = _values(keys, request)
        self.afford(self.store.asked(values))
        with self.writing(keys):
            self.store.create(values)
        return self.ack()

    def _drop(self, request: Request) -> Ok:
        keys = [key for key in _keys(request) if key in self.store]
        with self.writing(keys):
            self.store.drop(keys)
        return self.ack()

    def _assign(self, request: Request) -> Ok:
        values = _values(_keys(request), request)
        write, keys = self._assignment(list(values), list(values.values()))
        with self.writing(keys):
            write()
        return self.ack()

    def _assignment(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> tuple[Callable[[], None], tuple[str, ...]]:
        """The write of whole values, checked."""
        same_number(keys, tensors)
        for key, tensor in zip(keys, tensors, strict=True):
            held = self._value(key)
            if held.shape != tensor.shape or held.dtype != tensor.dtype:
                raise ShapeError(f"{key} is {spec(held)}, the new value is {spec(tensor)}")
        values = dict(zip(keys, tensors, strict=True))
        self.afford(lambda: self.store.growth(list(keys), values=values))
        return lambda: self.store.assign(values), tuple(keys)

    def _assigning(self, values: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """The checked write of whole values, with its memory reserved."""
        write, keys = self._assignment(list(values), list(values.values()))
        self._open(keys, keep=False, values=values)  # the write opens again, and finds this generation

        def written() -> None:
            with self.writing(keys):
                write()

        return written

    def _pull(self, request: Request) -> Ok:
        """Values of ``keys`` that changed after ``since`` (a version for each key; none: all of them).

        With ``step`` a pull waits until so many rounds are committed, with ``staleness`` until the reading loop is at
        most so many steps ahead of the slowest one. ``rows_of``: keys whose values are read in part, at the row numbers
        in the tensors. ``tables``: large tables travel as their rows that are not zero. ``pinned``: the number of an
        earlier pin of the client, or of another client ``of``, whose values are returned.
        """
        if "pinned" in request.meta:
            client, number = str(request.meta.get("of", request.op.client)), int(request.meta["pinned"])
            if (pinned := self.pins.get((client, number))) is None:
                raise NotFound(f"the values that {client} pinned here were given up for later pins")
            return pinned
        if "decided" in request.meta:
            self.trainings.decided(request)
        answer = self.with_values(Ok({"version": self.version, "step": self.step}), request, "keys")
        if "rows_of" in request.meta:
            keys = list(map(str, request.meta["rows_of"]))
            same_number(keys, request.tensors)
            rows = [self._value(key).index_select(0, at) for key, at in zip(keys, request.tensors, strict=True)]
            answer = replace(answer, tensors=[*answer.tensors, *rows])
        return answer

    def _pin(self, request: Request) -> Ok:
        """Hold on to the current values of ``keys`` as ``pinned``: steps go on, and write another generation.

        The answer has their bytes.
        """
        self.pins.pop(pin := _pin_of(request), None)  # of a try before: its generation can be written
        for oldest in [held for held in self.pins if held[0] == pin[0]][: 1 - PINS]:
            del self.pins[oldest]
        self.pins[pin] = pinned = self.with_values(self.ack(), request, "keys")
        return Ok({**self.ack().meta, "nbytes": envelope.size(pinned.tensors)})

    def _unpin(self, request: Request) -> Ok:
        """Drop pinned values, pulled by their client."""
        self.pins.pop(_pin_of(request), None)
        return self.ack()

    def _is_early(self, meta: Mapping[str, Any]) -> bool:
        """Whether a pull has to wait."""
        return self.trainings.is_ahead(meta) or int(meta.get("step", 0)) > self.step

    def _gone(self, request: Request) -> Ok:
        """Refuse the waiting requests of a lost client, and drop its pins. Its parts of rounds end with the rounds."""
        client = str(request.meta["client"])
        lost = Refusal("fenced", f"{client} is gone")
        self._effects += [Reply(ticket, lost) for ticket in self.lines.gone(client)]
        self.pins = {pin: answer for pin, answer in self.pins.items() if pin[0] != client}
        return self.ack()

    def with_values(self, answer: Ok, request: Request, names: str = "reads") -> Ok:
        """The answer, with the values of the keys that the request names, as far as they changed."""
        if names not in request.meta:
            return answer
        keys = _keys(request, names)
        since = request.meta.get("since") or [-1] * len(keys)
        same_number(keys, since)
        versions = [self._version(key) for key in keys]
        fresh = [key for key, old, new in zip(keys, since, versions, strict=True) if old != new]
        meta = {**answer.meta, "versions": versions}
        if "tables" not in request.meta:
            return Ok(meta, self.store.read(fresh))
        dense = [key for key in fresh if not self.store.is_table(key)]
        values = dict(zip(dense, self.store.read(dense), strict=True))
        facts, tensors = sparse_values.written(
            {key: values[key] if key in values else self.store.get(key) for key in fresh}, self.store.is_table
        )
        return Ok({**meta, **facts}, tensors)

    @property
    def used(self) -> int:
        """Bytes of values, of older generations with readers, of staged parts, and of objects."""
        return self.store.bytes + self.store.spare_bytes + self.objects.nbytes + self.staged

    def release(self) -> None:
        """Free the memory of generations without readers."""
        self.store.release()

    @property
    def staged(self) -> int:
        """Bytes of parts of rounds."""
        return self.rounds.nbytes + self.trainings.nbytes

    @property
    def opening(self) -> int:
        """The opening of the store: a write computed under another one is computed again."""
        return self.store.opening

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

    def _push(self, request: Request) -> Ok | Refusal:
        """Apply one worker's update at once (asynchronous mode)."""
        part = self.part(request)
        if isinstance(part, Refusal):
            return part
        made = self.prepared([part])
        with self.writing(made.keys):
            made.write()
        return self.ack()

    def prepared(self, parts: Sequence[StagedPart]) -> Write:
        """The write that applies ``parts`` as one update, fully computed."""
        first = parts[0]
        program = first.program
        if any((part.program, part.keys) != (program, first.keys) for part in parts):
            raise InvalidArgument("the workers of one round staged parts of different plans")
        if program is None:
            current = tuple(self.versions.get(key) for key in first.keys)
            pairs = zip(current, first.since or current, strict=True)
            kept = [place for place, (version, since) in enumerate(pairs) if version == since]
            return Write(*self._assignment([first.keys[at] for at in kept], [first.tensors[at] for at in kept]))
        feeds = averaged(program, parts)
        for key in program.reads:
            self._value(key)
        rows = self._rows(program, feeds)
        self.afford(lambda: self.store.growth(program.writes, rows))
        opened = self._open(program.writes, rows=rows)
        storages = [opened[key] if key in opened else self.store.get(key) for key in program.reads]
        pending = program.compute(feeds, storages, first.run_index)
        return Write(lambda: program.commit(pending), tuple(program.writes), feeds)

    def _rows(self, program: ServerProgram, feeds: Sequence[torch.Tensor]) -> int:
        """How many rows of each value a program writes at most; 0: all of them."""
        if "rows" in program.kinds:
            return max(1, sum(len(feed) for feed, kind in zip(feeds, program.kinds, strict=True) if kind == "rows"))
        if not any(map(self.store.is_table, program.writes)):
            return 0
        return sum(feed.numel() for feed in feeds if feed.dtype in (torch.int32, torch.int64))  # numbers of rows

    def part(self, request: Request) -> StagedPart | Refusal:
        """The checked part of a step that a request stages or pushes."""
        meta, tensors = request.meta, tuple(request.tensors)
        plan, keys = meta.get("plan"), tuple(meta.get("keys", ()))
        program, since = None, None if meta.get("since") is None else tuple(map(int, meta["since"]))
        if plan is None:
            self._assignment(keys, tensors)
            same_number(keys, keys if since is None else since)
        else:
            program = self._program(str(plan))
            if program is None:
                return Refusal("unknown-plan", str(plan))
            tensors = checked(program, tensors, are_finite=bool(meta.get("finite")))
        return StagedPart(program, keys, float(meta.get("rows", 1)), int(meta.get("run_index", 0)), tensors, since)

    # -- shared -----------------------------------------------------------------------------------------------

    def _stat(self, request: Request) -> Ok:
        return Ok({
            "version": self.version, "step": self.step, "bytes": self.store.bytes, "staged": self.staged,
            "spare": self.store.spare_bytes,
            "budget": self.store.budget, "variables": len(self.versions), "plans": len(self.plans),
            "applied": self.ledger.applied, "dups": self.ledger.dups, "waiting": len(self.lines),
            "queued": self.objects.waiting, "requests": self.requests,
            "moved": dict(envelope.MOVED), "queues": self.objects.levels(),
        })  # fmt: skip

    def _applied(self, request: Request) -> Ok:
        """The operations among ``seqs`` of ``client`` that were applied on this shard."""
        client, seqs = str(request.meta["client"]), list(map(int, request.meta["seqs"]))
        return Ok({"applied": [seq for seq in seqs if self.ledger.has(OpId(client, seq))]})

    def ack(self) -> Ok:
        return Ok({"version": self.version, "step": self.step})

    def _value(self, key: str) -> torch.Tensor:
        self._version(key)
        return self.store.get(key)

    def _version(self, key: str) -> int:
        found = self.versions.get(key)
        if found is None:
            raise NotFound(f"this server holds no variable {key}")
        return found

    def afford(self, asked: int | Callable[[], int]) -> None:
        """Raise ResourceExhausted if this process has no room for so many more bytes."""
        if self.store.budget is not None:
            self.room.take(asked, self.store.budget)

    def _open(self, keys: Sequence[str], **how: Any) -> Mapping[str, torch.Tensor]:
        """Tensors to write the next values into."""
        before = self.store.spare_bytes
        opened = self.store.open(keys, **how)
        self.room.grew(self.store.spare_bytes - before)
        return opened

    @contextmanager
    def writing(self, keys: Iterable[str]) -> Any:
        """The one place where values change; an error inside poisons the core."""
        keys, before = tuple(keys), self.store.spare_bytes
        try:
            yield
            self.store.publish()
        except BaseException as error:
            self.poisoned = f"a write failed half-way: {type(error).__name__}: {error}"
            raise
        self.room.grew(self.store.spare_bytes - before)
        self.version += 1
        for key in keys:
            if key in self.store:
                self.versions[key] = self.version
            else:
                self.versions.pop(key, None)


def fence(request: Request, epoch: int, incarnation: int) -> Refusal | None:
    """The refusal of a request for another incarnation or epoch; None if both match."""
    if request.incarnation != incarnation:
        return Refusal("fenced", "this address now belongs to another task")
    if request.epoch != epoch:
        return Refusal("fenced", f"the request is of epoch {request.epoch}, this task is at {epoch}")
    return None


def _pin_of(request: Request) -> tuple[str, int]:
    return request.op.client, int(request.meta["pinned"])


def _keys(request: Request, names: str = "keys") -> list[str]:
    keys = request.meta.get(names)
    if not isinstance(keys, list) or len(set(keys)) != len(keys):
        raise InvalidArgument(f"{names} is a list of different keys")
    return keys


def _values(keys: Sequence[str], request: Request) -> dict[str, torch.Tensor]:
    return sparse_values.read(keys, request.meta.get("tables", {}), request.tensors)
