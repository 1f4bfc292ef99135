"""Running with few clocks: generated code in parts, by the scopes of its nodes, with a look at the clock between them.

At most one look for eight nodes, so that it costs next to nothing and may stay on; `tracer` looks at
every node. On an accelerator its own events are recorded, and read when the trace is. Bytes are predicted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tfnb.execution.commit import Pending
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.captured_steps import device_of
from tfnb.execution.tracing.clocks import moment
from tfnb.execution.tracing.trace import Event, Trace
from tfnb.passes import Memory, feed_symbols

NODES_A_LOOK = 8
MOST = 64  # parts, about


@dataclass(frozen=True, slots=True)
class Part:
    """Generated nodes that follow one another, named by the scope of most of them."""

    name: str
    nodes: tuple[fx.Node, ...]


def parts(program: Program) -> list[Part]:
    """The parts of a program: a new one begins where the scope changes, if the one before has enough nodes."""
    calls = [node for node in program.module.graph.nodes if node.op == "call_function"]
    enough = max(NODES_A_LOOK, len(calls) // MOST)
    found: list[tuple[list[tuple[str, ...]], list[fx.Node]]] = []
    scope: tuple[str, ...] = ()
    for call in calls:
        node = program.node_of.get(call.name)
        scope = scope if node is None else node.scope[:-1]  # a copy or size belongs to what is around it
        if not found or (len(found[-1][1]) >= enough and scope != found[-1][0][-1]):
            found.append(([], []))
        found[-1][0].append(scope)
        found[-1][1].append(call)
    return [Part("/".join(Counter(scopes).most_common(1)[0][0]) or "no scope", tuple(n)) for scopes, n in found]


class Clocked:
    """The code of one program with a look at the clock after each part."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parts = parts(program)
        self.device = device_of(program)
        self.is_cpu, self.fed = self.device.type == "cpu", len(program.feeds)
        after = {part.nodes[-1]: part for part in self.parts}
        graph = fx.Graph()
        clock = graph.placeholder("clock")
        new: dict[fx.Node, Any] = {}
        for node in program.module.graph.nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
            if node in after:
                graph.call_function(_look, (clock,))
        self.forward: Callable[..., tuple[Any, ...]] = fx.GraphModule(program.module, graph).forward

    @classmethod
    def of(cls, program: Program, before: Clocked | None) -> Clocked:
        """That of a program, or the one before if it is of the same."""
        return before if before is not None and before.program is program else cls(program)

    def predicted(self, shapes: Sequence[torch.Size]) -> tuple[list[int], list[int]]:
        """Bytes that each part makes, and that are held after it, for feeds of these shapes."""
        program = self.program
        bound = feed_symbols(program.whole.contents, program.feeds)
        sizes = {symbol: shapes[program.feeds.index(value)][axis] for symbol, (value, axis) in bound.items()}
        memory = Memory(program.graph, program.fetches, program.feeds, sizes)
        place = {node.id: i for i, node in enumerate(program.graph.nodes)}
        last = {owner: i for i, owners in enumerate(memory.touched) for owner in owners}
        made, held, alive = [], [], {}
        for part in self.parts:
            places = [place[n.id] for call in part.nodes if (n := program.node_of.get(call.name)) and n.id in place]
            owners = [owner for i in places for owner in memory.made[i]]
            made.append(sum(memory.size[owner] for owner in owners))
            alive.update({owner: last[owner] for owner in owners})
            at = max(places, default=-1)
            alive = {o: until for o, until in alive.items() if until > at or o in memory.kept}
            held.append(sum(memory.size[owner] for owner in alive))
        return made, held


def _look(clock: Callable[[], None]) -> None:
    clock()


class Run:
    """One step of clocked code; `forward` and `commit` stand in for the program's."""

    def __init__(self, clocked: Clocked) -> None:
        self.clocked = clocked
        self.thread = threading.get_ident()
        self.looks: list[Any] = []

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """What the generated code gives for these feeds, storages and run number."""
        clocked, note = self.clocked, self.looks.append
        read = time.perf_counter_ns if clocked.is_cpu else self._event
        self.shapes = [feed.shape for feed in args[: clocked.fed]]
        self.began = time.time_ns()
        note(read())
        try:
            return clocked.forward(lambda: note(read()), *args)
        except Exception:  # nothing was written: the lines of the program's own code tell the node
            return self.clocked.program.forward(*args)

    def _event(self) -> Any:
        return moment(self.clocked.device)

    def commit(self, pending: Pending) -> None:
        """Write everything, as a part of its own."""
        self.clocked.program.commit(pending)
        self.looks.append(time.perf_counter_ns() if self.clocked.is_cpu else self._event())

    def seconds(self) -> list[float]:
        """When each look was, from the first one."""
        if self.clocked.is_cpu:
            return [1e-9 * (look - self.looks[0]) for look in self.looks]
        torch.accelerator.synchronize(self.clocked.device)
        return [1e-3 * self.looks[0].elapsed_time(look) for look in self.looks]

    def trace(self) -> Trace:
        """What was seen."""
        program, at = self.clocked.program, self.seconds()
        thread = next((t.name for t in threading.enumerate() if t.ident == self.thread), str(self.thread))
        made, held = self.clocked.predicted(self.shapes)
        names = [part.name for part in self.clocked.parts]
        if program.writes:
            names.append("commit")
            made.append(sum(variable.storage.untyped_storage().nbytes() for variable in program.writes))
        events = [
            Event(None, start, end, size, str(self.clocked.device), thread, name)
            for name, start, end, size in zip(names, at[:-1], at[1:], made, strict=False)
        ]
        live = [(0.0, 0), *zip(at[1:], held, strict=False)]
        end = at[len(names)]
        return Trace(program.whole, program.fetches, tuple(events), tuple(live), end, self.began)
