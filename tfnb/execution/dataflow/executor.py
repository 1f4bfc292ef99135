"""Steps run by the dataflow machine: loop iterations overlap, and waiting operations hold no thread.

The thread of the step does cheap work and takes all decisions; long work goes to the `Lanes` of a pool; an operation
that waits for a queue comes back as an event. A step in parts runs all of them here, or one that meets the others by
messages. Semantics S-125, S-134, S-136, S-137, S-152.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import torch

from tfnb.errors import InvalidArgument, ShapeError, TfnbError
from tfnb.execution import heap
from tfnb.execution.commit import Pending, Update, commit
from tfnb.execution.dataflow.flow_calls import UpdateRow, node_of
from tfnb.execution.dataflow.machine import ACKNOWLEDGE, Acknowledgement, Dead, Machine, Peers, Step, Task
from tfnb.execution.dataflow.pool import Lanes
from tfnb.execution.dataflow.templates import MachinePlan, Planner
from tfnb.execution.lowering.lower import lower_step
from tfnb.execution.lowering.program import Program, accesses, ensure_there
from tfnb.execution.running import Stop, unstoppable
from tfnb.execution.tracing.place_tracer import PlaceTracer
from tfnb.graph import Dim, Node, Spec, Value, Variable
from tfnb.graph.subgraph import uses_queues
from tfnb.graph.variable_locks import LOCKS, VariableSnapshot
from tfnb.kernels.row_writes import WRITES as ROWS
from tfnb.memory import LAST
from tfnb.passes import StepGraph
from tfnb.passes.flow.cut import Part
from tfnb.passes.flow.places import Place
from tfnb.passes.flow.step_flow import CutOptions, StepFlow, as_one, in_parts
from tfnb.passes.in_place_commit import IN_PLACE, written
from tfnb.passes.rewrite import Pass
from tfnb.recording.values.workspace import unburden
from tfnb.state.elements import copied
from tfnb.state.queue_machine import Attempt, Kind, QueueHost, StepQueues
from tfnb.state.queue_operations import attempt_on, machine_of, outcome, overdue
from tfnb.state.waits import POLL, WAITS, Inbox, QueueOperation, Runner


class BorrowedMemory:
    """Memory that is not the step's own: that of Variables and constants."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tensors

    @cached_property
    def _at(self) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in self._tensors} - {0}

    def own(self, value: Any) -> Any:
        """The value in memory of the step's own."""
        is_borrowed = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._at
        return copied(value) if is_borrowed else value


class WaitingPeers(Peers, Protocol):
    """`Peers` that a driver waits for."""

    def wait(self, inbox: Inbox, seconds: float) -> Any:
        """The next event of the step's ``inbox``; may read messages of other parts in this thread meanwhile.

        Raises queue.Empty after ``seconds``, or earlier where what came was no event of this step.
        """

    def leave(self) -> None:
        """The step waits no more; in the thread that called `wait`."""


class Here:
    """Peers in one process: a value sent by one part is at once available to the other. Each message is
    matched once.
    """

    round = 0

    def __init__(self) -> None:
        self._sent: dict[tuple[int, tuple[int, ...]], tuple[Any, tuple[int, int] | None]] = {}
        self._wanted: dict[tuple[int, tuple[int, ...]], Callable[[Any, tuple[int, int] | None], None]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sent that nobody wanted, and nobody waits, but for words on how far loops are."""
        return all(edge == ACKNOWLEDGE for edge, _ in (*self._sent, *self._wanted))

    def tell(self, edge: int, to: int, tag: tuple[int, ...], value: object, dead: tuple[int, int] | None) -> None:
        """See `tfnb.execution.dataflow.machine.Peers`."""
        deliver = self._wanted.pop((edge, tag), None)
        if deliver is not None:
            deliver(value, dead)
            return
        assert (edge, tag) not in self._sent, f"edge {edge} carried two values for {tag}"
        self._sent[edge, tag] = value, dead

    def want(self, edge: int, tag: tuple[int, ...], deliver: Callable[[Any, tuple[int, int] | None], None]) -> None:
        """See `tfnb.execution.dataflow.machine.Peers`."""
        found = self._sent.pop((edge, tag), None)
        if found is None:
            self._wanted[edge, tag] = deliver
        else:
            deliver(*found)

    def wait(self, inbox: Inbox, seconds: float) -> Any:
        """See `WaitingPeers`."""
        return inbox.get(timeout=seconds)

    def leave(self) -> None:
        """See `WaitingPeers`."""


Meet = Callable[[Callable[[BaseException], None]], WaitingPeers]
"""Joins the other parts of a step; what is given is called, from any thread, with the error that ends it."""


class ReceivedValue(NamedTuple):
    """The value of a RECV step."""

    task: Task | Acknowledgement
    value: Any
    dead: tuple[int, int] | None


class Driver:
    """One step: its thread runs the machine's ready work, and waits for tasks, queues and other parts."""

    def __init__(
        self, found: StepFlow, plans: Sequence[MachinePlan], borrowed: BorrowedMemory, meet: Meet | None = None
    ) -> None:
        self.found, self.plans, self.borrowed, self.graph = found, plans, borrowed, found.step.whole.name
        self.machine = Machine([plan.root for plan in plans], len(found.ends), self._submit, None, self._arrived)
        self.runner = Runner(self._may, lambda: list(self.machine.waits), self._later)
        self.inbox = self.runner.inbox
        self.peers = self.machine.peers = None if meet is None else meet(self.inbox.put)
        peers, machine = self.peers, self.machine
        if peers is not None and not isinstance(peers, Here):
            self.runner.part = lambda: (peers.round, machine.sent, machine.got)
        self.lanes = Lanes(self.inbox)
        self.queues = StepQueues()
        self.put: list[torch.Tensor] = []  # what it enqueued, which is not the step's own any more
        self.limited: dict[Attempt, float] = {}  # when the time of those is over that have a time of their own

    def drive(self, *start: Sequence[tuple[Any, Any]]) -> list[Any]:
        """The results; ``start``: the values that each plan starts with.

        The first error ends all work, takes back what waits, and is raised.
        """
        machine = self.machine
        try:
            with self.runner:
                machine.feed(*start)
                machine.run()
                while not machine.is_over:
                    self._advance()
                    machine.run()
        except BaseException as error:
            if isinstance(error, Stop):
                error.waits = [described(attempt) for attempt in machine.waits]
                error.node = self._at()
            self._abandon()
            raise
        finally:
            if self.peers is not None:
                self.peers.leave()
            machine.submit = machine.arrived = machine.peers = None  # which know the driver: all is free now
        return machine.results

    def _advance(self) -> None:
        """Hand out tasks, and wait until one of them or a queue has something for the machine."""
        machine, lanes, inbox = self.machine, self.lanes, self.inbox
        for task in machine.tasks:
            lanes.add(task)
        machine.tasks.clear()
        alone = lanes.own() if inbox.empty() else None
        if alone is None and not (machine.waits or machine.receiving):
            alone = lanes.only()  # nothing else to do: not worth a thread
        if alone is not None:
            machine.at = alone.step
            machine.finish(alone, alone.step.call(*alone.args))  # type: ignore[misc]
            return
        lanes.start()
        if inbox.empty():
            event = None
            while event is None:
                event = self._next()
                if event is None and self.limited:
                    self._ensure_in_time()
            self._take(event)
        while not inbox.empty():
            self._take(inbox.get_nowait())

    def _next(self) -> Any:
        """The next event; None after a poll interval, so that the step can be stopped."""
        is_blocked = not self.lanes.running and (self.machine.receiving > 0 or self.machine.holding > 0)
        if not self.lanes.running and (not is_blocked or isinstance(self.peers, Here)):
            assert self.machine.waits, "parts wait for one another"  # all of them are here
            return WAITS.next(self.runner)
        self.runner.is_blocked = is_blocked
        try:
            if self.peers is None or not self.machine.receiving:
                return self.inbox.get(timeout=POLL)
            return self.peers.wait(self.inbox, POLL)
        except queue.Empty:
            return None
        finally:
            self.runner.is_blocked = False

    def _arrived(self, task: Task | Acknowledgement, value: object, dead: tuple[int, int] | None) -> None:
        """From any thread."""
        self.inbox.put(ReceivedValue(task, value, dead))

    def _take(self, event: Any) -> None:
        if isinstance(event, ReceivedValue):
            self.machine.came(*event)
            return
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Attempt):
            task = self.machine.waits.pop(event)
            self.limited.pop(event, None)
            if event.error is not None:
                raise _placed(event.error, task.step.op.node)
            self.machine.finish(task, _outputs(event, task.step.op.node))
            return
        task, outputs, error = event
        self.lanes.ended(task)
        if error is not None:
            raise error
        self.machine.finish(task, outputs)

    def _submit(self, step: Step, args: list[Any]) -> Attempt:
        """Begin an operation on a queue, in its turn."""
        node = step.op.node
        attrs = node.attrs
        *given, before = args
        tensors = [self._own(given[ref.input]) for ref in attrs.get("element", ())]
        try:
            attempt = attempt_on(
                attrs["queue"], _kind(node), self.inbox.put, attrs, tensors, self._name(node), step=self.queues
            )
        except TfnbError as error:
            raise _placed(error, node) from error
        if "timeout" in attrs:
            self.limited[attempt] = attempt.since + attrs["timeout"]
        with unstoppable():  # a stop in the middle would lose an element
            attempt.machine.submit(attempt, before)
        return attempt

    def _own(self, value: object) -> torch.Tensor:
        """A value to enqueue, in memory of its own; memory enqueued before belongs to its queue."""
        found: torch.Tensor = (BorrowedMemory(self.put) if self.put else self.borrowed).own(self.borrowed.own(value))
        self.put.append(found)
        return found

    def _ensure_in_time(self) -> None:
        """Raise DeadlineExceeded for an operation whose own time is over."""
        now = time.monotonic()
        for attempt, end in self.limited.items():
            if end <= now and not attempt.is_over:
                node = self.machine.waits[attempt].step.op.node
                with unstoppable():
                    late = overdue(attempt, node.attrs["timeout"])
                if late is not None:
                    raise _placed(late, node)

    def _name(self, node: Node) -> str:
        return f"{node.name} of graph {self.graph}" + (f" ({node.source})" if node.source else "")

    def _may(self) -> set[tuple[QueueHost, str]]:
        """The (queue, kind of operation) pairs of the whole step."""
        nodes = (step.op.node for plan in self.plans for step in plan.waits)
        return {(machine_of(node.attrs["queue"]), _kind(node)) for node in nodes}

    def _later(self) -> list[QueueOperation]:
        """Pending queue operations, and the waiting attempts before each."""
        behind: dict[int, list[Attempt]] = {}
        for attempt, task in self.machine.waits.items():
            for number in self.found.queue_uses_behind(task.step.number):
                behind.setdefault(number, []).append(attempt)
        nodes = ((node_of(self.found.flow.ops[number]), attempts) for number, attempts in behind.items())
        return [
            QueueOperation(self._name(node), _kind(node), machine_of(node.attrs["queue"]), attempts)
            for node, attempts in nodes
        ]

    def _at(self) -> Node | None:
        """The node at work: a task in a thread, else the machine's last step."""
        step = next((task.step for task in self.lanes.running), self.machine.at)
        return None if step is None or step.op is None else step.op.node

    def _abandon(self) -> None:
        """Clean up: withdraw attempts from queues, and drop tasks. The owner of the step returns dequeued elements."""
        queues: dict[QueueHost, list[Attempt]] = {}
        for attempt in self.queues.attempts:
            if not attempt.is_over:
                queues.setdefault(attempt.machine, []).append(attempt)
        for held, attempts in queues.items():
            held.withdraw(attempts)
        self.lanes.drop()


def _kind(node: Node) -> Kind:
    """The kind of operation of a node on its queue."""
    return cast(Kind, node.op.partition(".")[2])


def described(attempt: Attempt) -> str:
    """A description of a waiting attempt, for messages: operation, queue, duration."""
    return f"{attempt.what}: {attempt.act} ({attempt.machine.level}), for {time.monotonic() - attempt.since:.1f} s"


def _outputs(attempt: Attempt, node: Node) -> tuple[Any, ...]:
    """The outputs of a queue operation's node, followed by its control output."""
    found = outcome(node.attrs["queue"], attempt, node.attrs)
    for tensor, spec in zip(found, node.outputs, strict=True):
        fits = tensor.dim() == len(spec.shape) and all(
            isinstance(size, Dim) or size == length for size, length in zip(spec.shape, tensor.shape, strict=True)
        )
        if not fits:
            text = f"{node.name} was recorded for {spec}, and took an element of shape {list(tensor.shape)}"
            raise _placed(ShapeError(text), node)
    return (*found, None)


def _placed(error: TfnbError, node: Node) -> TfnbError:
    """The error, with the node and its line."""
    at = f" at {node.source}" if node.source else ""
    placed = type(error)(f"{error}\n  node {node.name}{at}", **node.where, details=error.details)
    placed.enqueued, placed.__cause__ = error.enqueued, error.__cause__
    return placed


class Dataflow:
    """A step lowered for the machine, with the interface of a `Program` for sessions.

    parts: those that run in this process, all of the step or the one of a place.
    """

    def __init__(self, found: StepFlow, here: Place | None = None) -> None:
        step = found.step
        self.whole, self.fetches, self.feeds = graph, _, _ = step.whole, step.fetches, step.feeds
        heap.settle()
        unburden(graph)
        self.graph, self.found, self.flow = found.graph, found, found.flow
        by_id = graph.contents.by_id

        def spec(value: Value) -> Spec:
            return by_id[value.node].outputs[value.index]

        self.parts: tuple[Part, ...] = tuple(part for part in found.parts if here in (None, part.place))
        self._planned = lambda *function: [
            Planner(part, spec, graph.seed, found.updates, *function).plan(found.feeds) for part in self.parts
        ]
        self.plans: list[MachinePlan] = self._planned()
        self.writes: tuple[Variable, ...] = found.written
        read = (variable for plan in self.plans for variable in plan.storages)
        self.variables: tuple[Variable, ...] = tuple(dict.fromkeys((*read, *self.writes)))
        self.inner: tuple[Program, ...] = tuple(program for plan in self.plans for program in plan.programs)
        self.use = LOCKS.use(self.variables)
        everything = range(len(self.variables))
        self.access, self.commit_access = accesses(self.graph, self.variables, self.writes, everything)
        self.waits = any(map(uses_queues, self.graph.nodes))  # for what other steps do
        self.forward = None  # there is no one function

    @cached_property
    def traced(self) -> tuple[PlaceTracer, list[MachinePlan]]:
        """A tracer, and plans whose regions report to the tracer, for one step at a time."""
        tracer = PlaceTracer()
        return tracer, self._planned(tracer.watching)

    def compute(
        self, feeds: Iterable[torch.Tensor], storages: Sequence[torch.Tensor], run: int = 0, forward: object = None,
        cut: VariableSnapshot | None = None, meet: Meet | None = None, *, is_traced: bool = False,
    ) -> tuple[list[torch.Tensor | None], Pending]:  # fmt: skip
        """Fetched values, and the writes of the step; no Variable is written.

        meet: joins the other parts, if they are not here. Queues are used on the way, inside of a block of
        `tfnb.state.queue_machine.whole_steps`. is_traced: by the tracer of `traced`.
        """
        plans = self.traced[1] if is_traced else self.plans
        fed = list(feeds)
        live = dict(zip(self.variables, storages, strict=True))
        copies = {} if cut is None else cut.copies
        stored = live | {variable: copy for variable, copy in copies.items() if variable in live}
        constants = [value for plan in plans for _, value in plan.given]
        kept = [*stored.values(), *constants]
        here = Here() if len(plans) > 1 else None
        join = meet if here is None else lambda failed: here
        borrowed = BorrowedMemory([*kept, *fed])  # elements outlive what is fed, too
        driver = Driver(self.found, plans, borrowed, join)
        found = driver.drive(*(self._start(plan, fed, stored, run) for plan in plans))
        assert here is None or here.is_empty
        self._ensure_live(found)
        borrowed = BorrowedMemory([*kept, *driver.put])
        count = len(self.fetches)
        pending = self._pending(found[count:], live, borrowed)
        pending.queued = driver.queues
        return [borrowed.own(value) for value in found[:count]], pending

    def _pending(
        self, found: Sequence[Any], live: Mapping[Variable, torch.Tensor], borrowed: BorrowedMemory
    ) -> Pending:
        """The pending writes of the computed values of the written Variables."""
        pending = Pending([], [], [], self.writes)
        rows: dict[UpdateRow, list[Any]] = {}
        kinds: dict[tuple[str, str], Update] = {}
        for end, variable, value in zip(self.found.ends[len(self.fetches) :], self.writes, found, strict=True):
            if not isinstance(value, UpdateRow):
                pending.targets.append(live[variable])
                pending.values.append(borrowed.own(value))
                continue
            node, state = value.node, written(value.node)
            row = rows.get(value)
            if row is None:
                row = [x if at in state else borrowed.own(x) for at, x in enumerate(value.inputs)]
                if node.op in ROWS:
                    ensure_there(node, row[1])
                rows[value] = row
                alike = kinds.setdefault(value.kernel, Update(IN_PLACE[node.op], [], value.settings))
                alike.rows.append(row)
            assert end.port is not None
            row[state[end.port.index]] = live[variable]
        pending.updates += kinds.values()
        return pending

    @staticmethod
    def _start(
        plan: MachinePlan, fed: Sequence[torch.Tensor], stored: Mapping[Variable, torch.Tensor], run: int
    ) -> list[tuple[Any, Any]]:
        """The values that a plan starts with."""
        start = [*zip(plan.feeds, fed, strict=True), *plan.given, (plan.run, run)]
        return [*start, *((edges, stored[variable]) for variable, edges in plan.storages.items())]

    @staticmethod
    def commit(pending: Pending) -> None:
        """Write everything; see `tfnb.execution.commit`."""
        commit(pending)

    def _ensure_live(self, results: Sequence[Any]) -> None:
        """Raise InvalidArgument for a fetch of a branch that was not taken (semantics S-127)."""
        for value, found in zip(self.fetches, results, strict=False):
            if isinstance(found, Dead):
                node, switch = self.whole.contents.by_id[value.node], self.flow.ops[found.switch]
                at = "" if switch.node is None else f" of {switch.node.name}"
                raise InvalidArgument(
                    f"fetch {node.name} was not computed: it is in a branch{at} that was not taken; the predicate "
                    f"was {found.pred}", node=node.name, op=node.op,
                )  # fmt: skip


EXECUTORS = ("auto", "dataflow", "parts")


def needs_dataflow(step: StepGraph, executor: str) -> bool:
    """Whether the step is cut into parts, uses queues, or all loops shall overlap."""
    return executor in ("dataflow", "parts") or any(map(uses_queues, step.graph.nodes))


def lowered(
    step: StepGraph, executor: str, last: Sequence[Pass] = LAST, wanted: CutOptions | None = None
) -> Program | Dataflow:
    """Lower a step for ``executor``: as one function, unless the step needs dataflow. wanted: of its parts."""
    if executor == "parts":
        return Dataflow(in_parts(step, wanted), None if wanted is None else wanted.here)
    if needs_dataflow(step, executor):
        return Dataflow(as_one(step, lambda node: executor != "dataflow" and not uses_queues(node)))
    return lower_step(step, last)
