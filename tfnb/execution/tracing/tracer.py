"""Running with a clock: the generated program node by node, an accelerator waited for after each node.

Values are dropped where the generated code drops them, so the live bytes are those of any run of that code, but for
what a kernel holds inside. On an accelerator a node takes what events of the device say: from before its kernels were
started until they were done (``trace="kernels"`` has the kernels alone). `loop_trace` looks into loops and
branches.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from tfnb.execution.commit import Pending
from tfnb.execution.lowering.control_flow_code import watched
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.captured_steps import device_of
from tfnb.execution.tracing.clocks import begun
from tfnb.execution.tracing.kernel_events import kernels
from tfnb.execution.tracing.loop_trace import Clock, Held, Memory, Watch, devices, recorded, tensors, wait
from tfnb.execution.tracing.trace import Event, Trace
from tfnb.graph import Node
from tfnb.graph.collector import frozen

_NOTHING = contextlib.nullcontext()


class Tracer(fx.Interpreter):
    """Computes one step of a program; `forward` and `commit` stand in for the program's. Made anew for each step."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.program, self.device = program, device_of(program)
        self.events: list[Event] = []
        self.memory = Memory()
        self.held: dict[fx.Node, Held] = {}
        self.thread = threading.current_thread().name
        self.profiled = torch.autograd._profiler_enabled()  # then torch's own trace shows our names too
        self.began, self.clock = time.time_ns(), Clock(true=self.profiled)
        self.now = self.clock.now
        self.watch = Watch(self.clock, self.memory)

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """What the generated code gives for these feeds, storages and run number."""
        self.args_iter = iter(args)
        self.memory.borrow(args)
        wait(devices(args))
        with watched(self.watch), frozen():  # a collection would count for the node that is running
            for n in self.graph.nodes:
                self.env[n] = self.run_node(n)
                if n.op == "output":
                    break
                unused = [] if n.users or n.op == "placeholder" else [n]
                for last in (*self.user_to_last_uses.get(n, ()), *unused):
                    del self.env[last]
                    self.memory.free(self.held.pop(last, []), self.now())
        return self.env.pop(n)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node of the generated code and note it, if it does anything."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = getattr(self, n.op)
        if n.op != "call_function" or n.target is operator.getitem:
            result = call(n.target, args, kwargs)
            if n.op == "get_attr":
                self.memory.borrow(result)
            elif n.op == "call_function":
                self.held[n] = self.memory.hold(result, self.now())
            return result
        with torch.autograd.profiler.record_function(self._owner(n)[0]) if self.profiled else _NOTHING:
            start, took = self.now(), begun(self.device)
            result = call(n.target, args, kwargs)
            found = devices(result)
            end = start + took() if self.device in found and self.device.type != "cpu" else None
            wait(found)
            end = self.now() if end is None else end
        if found or n.name in self.program.node_of:
            self._note(n, start, end, result, next(iter(found), torch.device("cpu")))
        self.held[n] = self.memory.hold(result, start)
        self.watch.settle(end)
        return result

    def _note(self, n: fx.Node, start: float, end: float, result: Any, device: torch.device) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors(result))
        self.events.append(Event(self._owner(n)[1], start, end, size, str(device), self.thread))

    def _owner(self, n: fx.Node) -> tuple[str, Node | None]:
        """The graph's node that generated code belongs to; a copy or size belongs to the node whose value it takes."""
        at: fx.Node | None = n
        while at is not None and at.name not in self.program.node_of:
            at = next(iter(at.all_input_nodes), None)
        node = recorded(self.program.node_of[at.name], self.program.whole) if at is not None else None
        return (node.name if node else n.name), node

    def commit(self, pending: Pending) -> None:
        """Write everything, as an event of its own."""
        storages = [variable.storage for variable in self.program.writes]
        start = self.now()
        self.program.commit(pending)
        found = devices(storages)
        wait(found)
        if storages:
            size = sum(storage.untyped_storage().nbytes() for storage in storages)
            self.events.append(Event(None, start, self.now(), size, str(next(iter(found))), self.thread))
        self.seconds = self.now()

    def trace(self, results: Iterable[Any], profile: Mapping[str, Any]) -> Trace:
        """What was seen, when everything is done and the caller holds ``results``; profile: of torch's own profiler."""
        seconds, events = self.seconds, tuple(self.events)
        program = self.program
        self.memory.keep(results, seconds)
        watch = self.watch
        watch.kept.settle()
        return Trace(
            program.whole, program.fetches, events, tuple(self.memory.points), seconds, self.began,
            taken={node: frozenset(ways) for node, ways in watch.taken.items()},
            inside=watch.inside, once=watch.once, turns=tuple(watch.kept.loops.values()),
            kernels=kernels(profile, self.began, events), profile=profile,
        )  # fmt: skip
