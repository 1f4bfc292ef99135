"""The tracer that keeps each node's time and bytes, the bytes that are alive, and the iterations of loops.

The clock stands still while a probe looks, so that a loop takes as long as without. An accelerator is waited for after
each node, whose time is the device's own: from before its kernels were started until they were done
(``trace="kernels"`` has the kernels alone). Values are dropped where the generated code drops them, so the live bytes
are those of any run of that code, but for what a kernel holds inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tfnb.execution.commit import Pending
from tfnb.execution.lowering.control_flow_code import Cond, Loop, watched
from tfnb.execution.lowering.program import Program
from tfnb.execution.tracing.clocks import Clock, begun
from tfnb.execution.tracing.iterations import (
    OUTPUTS,
    Amount,
    IterationTrace,
    LoopTrace,
    LoopTraces,
    NodeNote,
    Path,
    seen,
)
from tfnb.execution.tracing.kernel_events import kernels
from tfnb.execution.tracing.live_memory import Held, LiveMemory, devices, tensors, wait
from tfnb.execution.tracing.probes import Probe, ProbedCode
from tfnb.execution.tracing.trace import Event, Trace
from tfnb.execution.tracing.tracer import Tracer
from tfnb.graph.collector import frozen
from tfnb.kernels.rows import ITERATIONS

NOTES = 16_000  # of nodes in iterations; then only every n-th iteration is kept


class Everything(Tracer):
    """Looks at each value that the code of a step makes, also inside of loops and branches."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.profiled = torch.autograd._profiler_enabled()  # then torch's own trace shows our names too
        self.clock, self.memory = Clock(true=self.profiled), LiveMemory()
        self.events: list[Event] = []
        self.taken: dict[int, set[bool]] = {}
        self.inside: dict[Path, Amount] = {}
        self.once: dict[Path, NodeNote] = {}  # nodes in branches that are in no loop
        self.loops = LoopTraces(NOTES)
        self.profile: Mapping[str, Any] = {}
        self.last = 0.0  # when a probe looked last
        self.seconds = 0.0  # when the step was over
        self._is_cpu = self.device.type in ("cpu", "meta")
        self._took = begun(self.device)
        self._path: Path = ()
        self._around: list[IterationTrace] = []  # iterations that run, and are kept
        self._running: list[Path] = []  # loops that run
        self._given: Held = []  # memory of a region's results, until somebody takes them
        self._own: dict[Path, float] = {}  # seconds between what runs in a region

    # -- the step ---------------------------------------------------------------------------------------------

    def forward(self, *args: object) -> tuple[Any, ...]:
        """Run the generated code with probes."""
        self.memory.borrow((args, self.code.constants))
        wait(devices(args))
        with watched(self), frozen(), ExitStack() as names:  # a collection would count for the node that is running
            look = self.look(self.code, args, names)
            look.annotate(0)
            look.since = self.resume(self.clock.now())
            outs = self.code.forward(look, *args)
        self.seconds = self.clock.now()
        return outs

    def commit(self, pending: Pending) -> None:
        """Write everything, as a separate event; not called for steps without Variables."""
        storages = [variable.storage for variable in self.program.writes]
        start = self.clock.now()
        super().commit(pending)
        wait(devices(storages))
        if storages:
            size = sum(storage.untyped_storage().nbytes() for storage in storages)
            self.events.append(Event(None, start, self.clock.now(), size, str(storages[0].device), self.thread))
        self.seconds = self.clock.now()

    def end(self, results: Iterable[Any], profile: Mapping[str, Any]) -> None:
        """The step is over: only ``results`` stay."""
        self.memory.keep(results, self.seconds)
        self.loops.settle()
        self.profile = profile

    def trace(self) -> Trace:
        """The recorded trace."""
        program, events = self.program, tuple(self.events)
        return Trace(
            program.whole, program.fetches, events, tuple(self.memory.points), self.seconds, self.began,
            taken={node: frozenset(ways) for node, ways in self.taken.items()},
            inside=self.inside, once=self.once, loops=tuple(self.loops.loops.values()),
            kernels=kernels(self.profile, self.began, events), profile=self.profile, untraced=self.untraced,
        )  # fmt: skip

    # -- the clock --------------------------------------------------------------------------------------------

    def arrived(self, value: object) -> float:
        """The time at which a value was ready."""
        if self._is_cpu:
            return self.clock.now()
        found = devices(value)
        if self.device in found:
            return self.last + self._took()
        wait(found)
        return self.clock.now()

    def resume(self, at: float) -> float:
        """Set the clock back to ``at``; returns the time."""
        self.last = self.clock.back(at)
        if not self._is_cpu:
            self._took = begun(self.device)
        return self.last

    # -- loops and branches -----------------------------------------------------------------------------------

    @contextmanager
    def loop(self, loop: Loop) -> Iterator[tuple[Callable[..., Any] | None, Callable[..., Any]]]:
        """The functions of a loop's condition and body, whose iterations are looked at."""
        with self._within(loop.id):
            path = self._path
            found = self.loops.loops.setdefault(path, LoopTrace(path, self._running[-1] if self._running else None))
            found.runs += 1
            run = LoopRun(self, found, loop)
            self._running.append(path)
            try:
                yield None if loop.cond is None else run.cond, run.body
            finally:
                self._running.pop()
                run.end()

    def side(self, cond: Cond, way: bool) -> Callable[..., Any]:
        """The function of the side that a branch takes."""
        self.taken.setdefault(cond.id, set()).add(way)
        program, _ = cond.branches[way]

        def call(*args: object) -> Any:
            with self._within(cond.id):
                if self.keeps:
                    self._around[-1].sides[self._path] = way
                out, held = self.call(program, args, len(args) - 1)
                self._given += held
                return out

        return call

    @contextmanager
    def _within(self, node: int) -> Iterator[None]:
        before = self._path
        self._path = (*before, node)
        self.resume(self.clock.now())
        try:
            yield
        finally:
            self._path = before

    @property
    def keeps(self) -> bool:
        """Whether every loop that runs is in an iteration that is kept."""
        return bool(self._running) and len(self._around) == len(self._running)

    def call(self, program: Any, args: Sequence[Any], inputs: int) -> tuple[Any, Held]:
        """The result of a program, and its memory; the first ``inputs`` are noted, too."""
        start = self.clock.now()
        self._own[self._path] = self._own.get(self._path, 0.0) + start - self.last
        code = ProbedCode.of(program)
        if self.keeps:
            notes = self._around[-1].notes
            for node, value in zip(code.inputs[:inputs], args, strict=False):
                notes[*self._path, node] = NodeNote(start, math.nan, 0, tuple(map(seen, tensors(value)[:1])))
        look = self.look(code, args)
        look.since = self.resume(start)
        out = code.forward(look, *args)
        at = self.clock.now()
        held = self.memory.hold(out, at)
        look.end(at)
        self.resume(at)
        return out, held

    def look(self, code: ProbedCode, args: Sequence[Any], names: ExitStack | None = None) -> CallProbe:
        """The probes of one call of a program with these arguments."""
        return CallProbe(self, code, names)

    def note(self, look: CallProbe, place: int, value: object, at: float) -> None:
        """A node gave this now."""
        node, owned, found = look.code.nodes[place], look.code.owned[place], tensors(value)
        if node is None or not (owned or (found and not look.path)):
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in found)
        if not look.path:
            device = found[0].device if found else "cpu"
            self.events.append(Event(node, look.since, at, size, str(device), self.thread))
            return
        path = (*look.path, node.id)
        seconds = at - self.last + self._own.pop(path, 0.0)
        amount = self.inside.get(path)
        if amount is None:
            amount = self.inside[path] = Amount(node)
        amount.seconds += seconds
        amount.bytes += size
        amount.calls += 1
        if self.keeps:
            values = tuple(map(seen, found[:OUTPUTS]))
            self._around[-1].notes[path] = NodeNote(at - seconds, seconds, size, values)
        elif not self._running:
            self.once[path] = NodeNote(at - seconds, seconds, size, ())

    def settle(self, at: float) -> None:
        """Somebody has taken the results of the branches that ran."""
        self.memory.free(self._given, at)
        self._given = []

    def give(self, held: Held) -> None:
        """Memory of results, until somebody takes them."""
        self._given += held

    def begin(self, loop: LoopTrace, number: int) -> IterationTrace | None:
        """Begin an iteration; returns it if it is one to keep."""
        if len(self._around) != len(self._running) - 1 or number % loop.every:
            return None
        found = IterationTrace(number, self._around[-1] if self._around else None, self.clock.now())
        self._around.append(found)
        return found

    def done(self, loop: LoopTrace, iteration: IterationTrace | None, at: float, *, whole: bool) -> None:
        """End an iteration; not ``whole``: the condition failed, so there was none."""
        if iteration is not None:
            self._around.remove(iteration)
            iteration.end = at
            if whole:
                self.loops.add(loop, iteration, self._around)


class LoopRun:
    """One run of a loop."""

    def __init__(self, tracer: Everything, found: LoopTrace, loop: Loop) -> None:
        self.tracer, self.found, self.loop = tracer, found, loop
        self.count = 0
        self.iteration: IterationTrace | None = None
        self._begun = False
        self._state: Held = []
        self._rows: Held = []
        self._summands: Held = []  # of sums that are taken so many iterations at a time

    def cond(self, *args: object) -> Any:
        """Run the condition, which begins an iteration."""
        self._begin()
        out, held = self.tracer.call(self.loop.cond, args, self.loop.changing)
        self.tracer.memory.free(held, self.tracer.clock.now())
        return out

    def body(self, *args: object) -> Any:
        """Run the body, which ends an iteration; its carried values are held until the next end, rows until
        the loop's.
        """
        self._begin()
        tracer, memory = self.tracer, self.tracer.memory
        out, held = tracer.call(self.loop.body, args, self.loop.changing)
        at = tracer.clock.now()
        carried = len(self.loop.order)
        rows = carried + len(self.loop.rows)
        before, self._state = self._state, memory.hold(out[:carried], at)
        self._rows += memory.hold(out[carried:rows], at)
        self._summands += memory.hold(out[rows:], at)
        memory.free([*held, *before], at)
        if (self.count + 1) % ITERATIONS == 0:
            memory.free(self._summands, at)
            self._summands = []
        self.count += 1
        self._end(at, whole=True)
        tracer.resume(at)
        return out

    def _begin(self) -> None:
        if not self._begun:
            self.iteration = self.tracer.begin(self.found, self.count)
            self._begun = True

    def _end(self, at: float, *, whole: bool) -> None:
        self.tracer.done(self.found, self.iteration, at, whole=whole)
        self.iteration, self._begun = None, False

    def end(self) -> None:
        """No more iterations."""
        self._end(self.tracer.clock.now(), whole=False)
        self.found.total += self.count
        self.tracer.give([*self._state, *self._rows, *self._summands])


class CallProbe(Probe):
    """The probes of one call of a program; ``names``: where torch's profiler is told of the nodes."""

    __slots__ = ("code", "held", "known", "names", "path", "since", "tracer")

    def __init__(self, tracer: Everything, code: ProbedCode, names: ExitStack | None = None) -> None:
        self.tracer, self.code, self.path = tracer, code, tracer._path
        self.names = names if tracer.profiled else None
        self.held: dict[int, Held] = {}
        self.known: dict[Any, Any] = {}  # of each call of the code: for tracers that look at values
        self.since = 0.0

    def probe(self, place: int, value: object) -> None:
        """A call of the code gave this."""
        tracer, memory = self.tracer, self.tracer.memory
        at = tracer.arrived(value)
        self.annotate(place + 1)
        tracer.note(self, place, value, at)
        self.held[place] = memory.hold(value, self.since)
        for dead in self.code.dead[place]:
            memory.free(self.held.pop(dead, []), at)
        tracer.settle(at)
        self.since = tracer.resume(at)

    def annotate(self, place: int) -> None:
        """The next call is this one."""
        if self.names is None:
            return
        self.names.close()
        node = self.code.nodes[place] if place < len(self.code.nodes) else None
        if node is not None:
            self.names.enter_context(torch.autograd.profiler.record_function(node.name))

    def end(self, at: float) -> None:
        """The call returned."""
        for held in self.held.values():
            self.tracer.memory.free(held, at)
