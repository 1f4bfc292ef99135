"""Running with a clock: the generated program node by node, an accelerator waited for after each node.

Values are dropped where the generated code drops them, so the live bytes are those of any run of that code, but for
what a kernel holds inside.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tfnb.execution.commit import Pending
from tfnb.execution.lower import Program
from tfnb.execution.regions import watched
from tfnb.execution.trace import Event, Trace
from tfnb.graph import Node

_NOTHING = contextlib.nullcontext()


class Tracer(fx.Interpreter):
    """Computes one step of a program; `forward` and `commit` stand in for the program's. Made anew for each step."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.program = program
        self.events: list[Event] = []
        self.memory = Memory()
        self.taken: dict[int, set[bool]] = {}
        self.thread = threading.current_thread().name
        self.profiled = torch.autograd._profiler_enabled()  # then torch's own trace shows our names too
        self.began, self._zero = time.time_ns(), time.perf_counter_ns()

    def now(self) -> float:
        """Seconds since the start."""
        return (time.perf_counter_ns() - self._zero) * 1e-9

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """What the generated code gives for these feeds, storages and run number."""
        self.args_iter = iter(args)
        self.memory.borrow(args)
        _wait(_devices(args))
        with watched() as self.taken:
            for n in self.graph.nodes:
                self.env[n] = self.run_node(n)
                if n.op == "output":
                    break
                unused = [] if n.users or n.op == "placeholder" else [n]
                for last in (*self.user_to_last_uses.get(n, ()), *unused):
                    self.memory.drop(self.env.pop(last), self.now())
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
                self.memory.hold(result, self.now())
            return result
        with torch.autograd.profiler.record_function(self._owner(n)[0]) if self.profiled else _NOTHING:
            start = self.now()
            result = call(n.target, args, kwargs)
            devices = _devices(result)
            _wait(devices)
            end = self.now()
        if devices or n.name in self.program.node_of:
            self._note(n, start, end, result, next(iter(devices), torch.device("cpu")))
        self.memory.hold(result, start)
        return result

    def _note(self, n: fx.Node, start: float, end: float, result: Any, device: torch.device) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(result))
        self.events.append(Event(self._owner(n)[1], start, end, size, str(device), self.thread))

    def _owner(self, n: fx.Node) -> tuple[str, Node | None]:
        """The graph's node that generated code belongs to; a copy or size belongs to the node whose value it takes."""
        at: fx.Node | None = n
        while at is not None and at.name not in self.program.node_of:
            at = next(iter(at.all_input_nodes), None)
        node = self._recorded(self.program.node_of[at.name]) if at is not None else None
        return (node.name if node else n.name), node

    def _recorded(self, node: Node) -> Node:
        """The node of the graph that a node of a pass came from, and is named after: ``conv`` of ``conv.layout7``."""
        contents, name = self.program.whole.contents, node.name
        while node.id not in contents.by_id and name:
            name = name.rpartition(".")[0]
            node = contents.by_name.get(name, node)
        return node

    def commit(self, pending: Pending) -> None:
        """Write everything, as an event of its own."""
        storages = [variable.storage for variable in self.program.writes]
        start = self.now()
        self.program.commit(pending)
        devices = _devices(storages)
        _wait(devices)
        if storages:
            size = sum(storage.untyped_storage().nbytes() for storage in storages)
            self.events.append(Event(None, start, self.now(), size, str(next(iter(devices))), self.thread))

    def trace(self, results: Iterable[Any]) -> Trace:
        """What was seen, when everything is done and the caller holds ``results``."""
        seconds = self.now()
        program = self.program
        self.memory.keep(results, seconds)
        points, taken = tuple(self.memory.points), {node: frozenset(ways) for node, ways in self.taken.items()}
        return Trace(program.whole, program.fetches, tuple(self.events), points, seconds, self.began, taken=taken)


@dataclass(slots=True)
class Memory:
    """Bytes of the storages that a step made and still uses; what it was given does not count."""

    points: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    _uses: dict[int, int] = field(default_factory=dict)  # storage -> values that lie in it
    _given: set[int] = field(default_factory=set)

    def borrow(self, values: Any) -> None:
        """Memory of a variable, feed or constant."""
        self._given.update(key for key, _ in _storages(values))

    def hold(self, result: Any, at: float) -> None:
        """A value was made at this time."""
        self._change(result, 1, at)

    def drop(self, value: Any, at: float) -> None:
        """A value was used for the last time."""
        self._change(value, -1, at)

    def keep(self, results: Iterable[Any], at: float) -> None:
        """The step is over; only ``results`` stay."""
        stays = {key: size for key, size in _storages(list(results)) if key not in self._given}
        self._point(at, sum(stays.values()))

    def _change(self, value: Any, by: int, at: float) -> None:
        count = self.points[-1][1]
        for key, size in _storages(value):
            if key in self._given:
                continue
            before = self._uses.get(key, 0)
            self._uses[key] = before + by
            if before == 0:
                count += size
            elif before + by == 0:
                del self._uses[key]
                count -= size
        self._point(at, count)

    def _point(self, at: float, count: int) -> None:
        if count != self.points[-1][1]:
            self.points.append((at, count))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    """Key and bytes of the memory of each tensor; sparse layouts have none of one piece."""
    for tensor in _tensors(value):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            yield storage._cdata, storage.nbytes()


def _devices(value: Any) -> dict[torch.device, None]:
    return dict.fromkeys(tensor.device for tensor in _tensors(value))


def _wait(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
