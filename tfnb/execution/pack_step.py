"""A training step in packs x microbatches, planned on a byte budget and run on a device that holds no more.

Each piece of `tfnb.memory.pack_cut` is lowered to a program of its own, which computes on copies of its Variables; the
moves of `tfnb.memory.moves` say when they come and go. New values of Variables stay in a second generation on the host
until the last move: a step that is stopped before has written nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tfnb.errors import InvalidArgument, Unimplemented
from tfnb.execution.commit import Pending, commit
from tfnb.execution.lowering.lower import lower
from tfnb.execution.lowering.program import Program
from tfnb.graph import Contents, Dim, Node, Spec, Value, Variable
from tfnb.graph.graph import new_id
from tfnb.graph.variable_locks import LOCKS, Access
from tfnb.kernels.random import REPLICA
from tfnb.kernels.virtual_device import VirtualDevice
from tfnb.memory.moves import MoveKind, Schedule, best_schedule
from tfnb.memory.pack_cut import CutPiece, PackCut
from tfnb.memory.pack_tasks import DeviceItem, PackPiece, PackTask, Phase, Role, tasks_of
from tfnb.memory.rematerialize import counted
from tfnb.passes import StepGraph, feed_symbols
from tfnb.passes.flow.merges import begin, way_of
from tfnb.passes.liveness import nominal
from tfnb.passes.microbatches import divide
from tfnb.passes.pipeline import with_fed

_NARROW = (torch.float16, torch.bfloat16)  # summed in float32


@dataclass
class PackRun:
    """A finished step. most: bytes on the device at once. loaded, stored: bytes copied. seconds: of each task."""

    fetched: dict[Value, torch.Tensor]
    most: int = 0
    loaded: int = 0
    stored: int = 0
    seconds: dict[PackTask, float] = field(default_factory=dict)


class PackStep:
    """The programs, tasks and sizes of one step, cut into packs of layers, for feeds of so many rows.

    rows: of the whole batch, which microbatches divide evenly. pack_of: the pack of each layer, by default one for each.
    """

    def __init__(
        self, step: StepGraph, rows: int, microbatches: int, pack_of: Sequence[int] | None = None, **order: bool
    ) -> None:  # fmt: skip
        self.cut, self.step, self.microbatches = PackCut(step, pack_of), step, microbatches
        self.ranges = divide(rows, microbatches)
        if len({stop - start for start, stop in self.ranges}) > 1 or len(self.ranges) < microbatches:
            raise InvalidArgument(f"a step in packs divides its rows evenly, not {rows} into {microbatches}")
        self.by_id = self.cut.graph.contents.by_id
        shown = feed_symbols(step.whole.contents, step.feeds)
        axes = {symbol: axis for symbol, (_, axis) in shown.items()}
        if any(axes.values()) or len(axes) != 1:
            raise Unimplemented(f"packs divide the one axis 0 that all feeds share; here sizes vary by {sorted(axes)}")
        self.sizes_of = dict.fromkeys(axes, rows // microbatches)
        self.divided = frozenset(
            value for value in step.feeds if any(isinstance(n, Dim) for n in self.spec(value).shape)
        )
        for value in step.fetches:
            self._ensure_mean(value)
        self.programs: dict[PackPiece, tuple[CutPiece, Program]] = {}
        lowered = [(cut, self._lowered(cut)) for cut in self.cut.pieces]
        read = {v for cut, program in lowered if cut.phase is not Phase.UPDATE for v in program.variables}
        for cut, program in lowered:
            self.programs[self._piece(cut, program, read)] = cut, program
        self.tasks = tasks_of([*self.programs], microbatches, **order)
        items = {item for task in self.tasks for item in (*task.reads, *task.makes)}
        self.sizes = {item: self._bytes(item) for item in items}

    def _ensure_mean(self, value: Value) -> None:
        node = self.step.whole.contents.by_id[value.node]
        if node.outputs and way_of(self.step.whole.contents, value, is_fed=value in self.step.feeds) != "mean":
            raise Unimplemented(
                f"{node.name} is fetched, and packs give the mean of real numbers over microbatches only"
            )

    def _lowered(self, cut: CutPiece) -> Program:
        """The program of a piece; a group stands for the Variables that it writes."""
        fetches = (*cut.gives, *(cut.gradients if cut.phase is not Phase.UPDATE else ()), *cut.fetched)
        graph = self.cut.graph
        if cut.written:
            group = Node(
                id=new_id(), name=f"{cut.phase}.{cut.pack}", op="tfnb.group", inputs=tuple(cut.written.values())
            )
            graph = graph.derive(Contents((*graph.nodes, group), graph.contents.guards))
            fetches = (*fetches, Value(group.id))
        given = (*cut.takes, *(cut.gradients if cut.phase is Phase.UPDATE else ()))
        return lower(graph, fetches, dict.fromkeys((*given, *self.step.feeds)))

    def _piece(self, cut: CutPiece, program: Program, read: set[Variable]) -> PackPiece:
        """The piece as the planner sees it: what is read by updates alone is optimizer state."""
        seen = with_fed(program.graph, program.whole, program.feeds)
        peak = counted(seen, program.fetches, program.feeds, self.sizes_of).peak()
        return PackPiece(
            cut.phase, cut.pack, tuple(v for v in program.variables if v in read),
            tuple(v for v in program.variables if v not in read), frozenset(cut.written), cut.gradients, cut.takes,
            cut.gives, max(0, peak - sum(map(self._value_bytes, cut.gives))),
        )  # fmt: skip

    def spec(self, value: Value) -> Spec:
        """The spec of a value of the step."""
        return self.by_id[value.node].outputs[value.index]

    def _value_bytes(self, value: Value, wide: bool = False) -> int:
        spec = self.spec(value)
        size = 4 if wide and spec.dtype in _NARROW else spec.dtype.itemsize
        return size * torch.Size(nominal(spec, self.sizes_of)).numel()

    def _bytes(self, item: DeviceItem) -> int:
        key: Any = item.key
        if isinstance(key, Variable):
            return torch.Size(map(int, key.spec.shape)).numel() * key.spec.dtype.itemsize
        return self._value_bytes(key, wide=item.role is Role.GRADIENT)

    def planned(self, budget: int) -> Schedule:
        """The moves of a step; raises ResourceExhausted with the smallest budget and its largest task."""
        return best_schedule(self.tasks, self.sizes, budget)

    @property
    def state_bytes(self) -> int:
        """Bytes of all Variables: weights, buffers, and optimizer state."""
        return sum(size for item, size in self.sizes.items() if item.role in (Role.WEIGHT, Role.STATE))

    def run(self, feeds: Mapping[Value, torch.Tensor], plan: Schedule, budget: int, run: int = 0) -> PackRun:
        """Carry a plan out on a virtual device of ``budget`` bytes, and write the Variables at its end."""
        variables = [item for item in self.sizes if item.role in (Role.WEIGHT, Role.STATE)]
        written = [item for item in variables if any(item in task.writes for task in self.tasks)]
        with LOCKS.held(Access([_variable(item) for item in variables], [_variable(item) for item in written])):
            storages = {item: _variable(item).storage for item in variables}
            device = VirtualDevice(budget, dict(storages))
            done = PackRun({})
            for kind, item, at in plan.moves:
                match kind:
                    case MoveKind.RUN:
                        self._compute(self.tasks[at], device, feeds, run, done)
                    case MoveKind.IN:
                        device.load(item)
                    case MoveKind.OUT:
                        device.store(item)
                    case MoveKind.WAIT:
                        device.settle(item)
                    case _:
                        device.drop(item)
            device.close()
            targets, values = [storages[item] for item in written], [device.host[item] for item in written]
            commit(Pending(targets, values, [], tuple(_variable(item) for item in written)))
        done.most, done.loaded, done.stored = device.most, device.loaded, device.stored
        return done

    def _compute(
        self, task: PackTask, device: VirtualDevice, feeds: Mapping[Value, torch.Tensor], run: int, done: PackRun
    ) -> None:  # fmt: skip
        """Run one task on the device's tensors; what it makes stays there."""
        cut, program = self.programs[task.piece]
        micro = max(task.micro, 0)
        start, stop = self.ranges[micro]
        share = (stop - start) / self.ranges[-1][1]
        here = device.here
        given = {
            value: feeds[value][start:stop] if value in self.divided else feeds[value] for value in self.step.feeds
        }
        given |= {value: here[DeviceItem(Role.BORDER, value, task.micro)] for value in cut.takes}
        if cut.phase is Phase.UPDATE:
            sums = {value: here[DeviceItem(Role.GRADIENT, value)] for value in cut.gradients}
            given |= {value: total.to(self.spec(value).dtype) for value, total in sums.items()}
        roles = {item.key: item for item in task.piece.variables}
        with device.working(task.work + sum(self.sizes[item] for item in task.makes)):
            began = time.thread_time()
            copies = [here[roles[variable]] for variable in program.variables]
            fetched, pending = program.compute([given[v] for v in program.feeds], copies, run + micro * REPLICA)
            values = dict(zip(program.fetches, fetched, strict=True))
            pending.variables = ()  # they are written at the end of the step
            commit(pending)
            made = {DeviceItem(Role.BORDER, value, task.micro): _own(values[value]) for value in cut.gives}
            for value in cut.gradients if cut.phase is Phase.BACKWARD else ():
                item = DeviceItem(Role.GRADIENT, value)
                total = here.get(item)
                if total is None:
                    total = made[item] = _zeros(values[value])
                total.add_(values[value].to(total.dtype), alpha=share)
            for value in cut.fetched:
                total = done.fetched.setdefault(value, _zeros(values[value]))
                total.add_(values[value].to(total.dtype), alpha=share)
            done.seconds[task] = time.thread_time() - began
        for item, tensor in made.items():
            device.put(item, tensor)


def _variable(item: DeviceItem) -> Variable:
    found: Variable = item.key  # type: ignore[assignment]
    return found


def _own(value: torch.Tensor) -> torch.Tensor:
    """The value in memory of its size: a view would keep what it is a part of."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _zeros(value: torch.Tensor) -> torch.Tensor:
    """The sum of no values; adding one to it changes no bit of that."""
    dtype = torch.float32 if value.dtype in _NARROW else value.dtype
    return torch.full_like(value, begin("mean", dtype), dtype=dtype, memory_format=torch.contiguous_format)
