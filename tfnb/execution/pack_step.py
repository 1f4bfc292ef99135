"""A training step in packs x microbatches, planned on a byte budget and run on a device that holds no more.

Each piece of `tfnb.memory.pack_cut` is lowered to a program of its own, which computes on copies of its Variables; the
moves of `tfnb.memory.moves` say when they come and go. New values of Variables stay in a second generation on the host
until the commit of the step: one that is stopped before has written nothing. The device is virtual: tensors are those
of the CPU, and what it holds is counted and enforced. Where Variables lie in a mapped file (`tfnb.mapped_memory`) that
is all that the process holds of them, and the commit maps the second generation in place of the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil
from typing import Any, ClassVar

import torch

from tfnb.errors import TfnbError, Unimplemented
from tfnb.execution import heap
from tfnb.execution.commit import Pending, Update, commit
from tfnb.execution.copy_lanes import CopyLanes, InlineCopies
from tfnb.execution.explain import explained
from tfnb.execution.lowering.lower import lower_step
from tfnb.execution.lowering.program import Program
from tfnb.execution.virtual_device import HostCopy, ProcessCopy, RangeCopy, RegionCopy, VirtualDevice, host_copy
from tfnb.graph import Contents, Dim, Graph, Node, Spec, Value, Variable, mapped_files
from tfnb.graph.graph import new_id
from tfnb.graph.mapped_files import region_of
from tfnb.graph.variable_locks import LOCKS, Access, Use, VariableSnapshot
from tfnb.interrupts import from_signal_handler
from tfnb.kernels.random import REPLICA
from tfnb.memory import MemoryPlan
from tfnb.memory.byte_counts import told
from tfnb.memory.lane_clock import Bar, LaneTimes, lane_times
from tfnb.memory.machine_rates import CPU, MachineRates
from tfnb.memory.moves import MoveKind, MovePolicy, Schedule, best_schedule, need, schedule
from tfnb.memory.pack_cut import CutPiece, PackCut
from tfnb.memory.pack_search import doubled, fewest, packings, searched, simulated
from tfnb.memory.pack_tasks import DeviceItem, PackPiece, PackTask, Phase, Role, tasks_of
from tfnb.memory.packs import LayerPacks
from tfnb.memory.prices import computing
from tfnb.memory.rematerialize import counted
from tfnb.memory.residency import Victims
from tfnb.memory.scratch import variable_bytes
from tfnb.passes import StepGraph, feed_symbols, step_graph
from tfnb.passes.flow.merges import ROWS, Weight, begin, way_of
from tfnb.passes.flow.row_weights import weighed
from tfnb.passes.liveness import nominal
from tfnb.passes.pipeline import with_fed

BUDGETS = 20  # of which a plan tells what they would do
CUTS = 3  # of packs that are simulated to be quick, before the finest ones are taken
SEARCHED = 1500  # tasks of a step above which packs of one layer are taken: each packing is simulated
DOUBLES = 3  # numbers of microbatches: the fewest that fit, twice and four times as many
_NARROW = (torch.float16, torch.bfloat16)  # summed in float32
Rows = tuple[int, ...]  # of each microbatch


@dataclass
class PackRun:
    """A computed step. most: bytes on the device at once. loaded, stored: bytes copied. seconds: of each task, of the
    processor. bars: of copies and tasks, by the clock.

    told: the fetches of each microbatch that others wait for: totals, and means that are weighted by one.
    """

    fetched: dict[Value, torch.Tensor] = field(default_factory=dict)
    told: dict[Value, list[torch.Tensor]] = field(default_factory=dict)
    most: int = 0
    loaded: int = 0
    stored: int = 0
    seconds: dict[PackTask, float] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)


class PackPrograms:
    """The pieces of a step, each lowered once for all sizes.

    packing: of its layers, by default one pack for each.
    """

    def __init__(self, step: StepGraph, packing: LayerPacks | None = None) -> None:
        about = weighed(step)
        for value in step.fetches:
            self._ensure_mean(step, value)
        self.step, self.cut, self.weigh = about.step, PackCut(about.step, packing), about.of
        self.totals = {total: self.cut.state.resolved(total) for total in about.totals}
        self.by_id = self.cut.graph.contents.by_id
        taken = {value for node in step.graph.nodes for value in node.inputs}
        shown = feed_symbols(step.whole.contents, [value for value in step.feeds if value in taken])
        self.axes = {symbol: axis for symbol, (_, axis) in shown.items()}
        if any(self.axes.values()) or len(self.axes) != 1:
            names = ", ".join(self.axes) or "none"
            raise Unimplemented(f"packs divide the one size, on axis 0, that feeds share, and here sizes vary: {names}")
        self.divided = frozenset(v for v in step.feeds if any(isinstance(size, Dim) for size in self.spec(v).shape))
        self.lowered = [(cut, self._lowered(cut)) for cut in self.cut.pieces]
        self.variables = tuple(dict.fromkeys(v for _, program in self.lowered for v in program.variables))
        self.writes = tuple(dict.fromkeys(v for cut, _ in self.lowered for v in cut.written))
        self._ensure_ordered()
        for variable in self.variables:
            if variable.spec.device != "cpu":
                raise Unimplemented(
                    f"{variable.name} is on {variable.spec.device}: packs keep Variables on the host, and run on a "
                    "virtual device of the CPU only; leave out microbatches or memory_budget"
                )

    def price(self, rows: int, on: MachineRates = CPU) -> float:
        """The price of the step on so many rows, with all that it needs on the device and nothing computed again."""
        return _price(self.step.graph, self.step, dict.fromkeys(self.axes, rows), on)

    def spec(self, value: Value) -> Spec:
        """The spec of a value of the step."""
        return self.by_id[value.node].outputs[value.index]

    @staticmethod
    def _ensure_mean(step: StepGraph, value: Value) -> None:
        node = step.whole.contents.by_id[value.node]
        if node.outputs and way_of(step.whole.contents, value, is_fed=value in step.feeds) != "mean":
            raise Unimplemented(
                f"{node.name} is fetched, and packs give means of real numbers over microbatches: leave it out, or run "
                "without memory_budget"
            )

    def _ensure_ordered(self) -> None:
        """A buffer that microbatches write is used by one pack alone; raises Unimplemented.

        All microbatches pass a pack before the next one, which would read the value of the last of them.
        """
        for writer, _ in self.lowered:
            for variable in writer.written if writer.phase is not Phase.UPDATE else ():
                other = next((cut for cut, of in self.lowered if cut is not writer and variable in of.variables), None)
                if other is not None:
                    raise Unimplemented(
                        f"{variable.name} is written in {writer.phase} of pack {writer.pack} and used in {other.phase} "
                        f"of pack {other.pack}, which would see it after all microbatches: leave out memory_budget"
                    )

    def _lowered(self, cut: CutPiece) -> Program:
        """The program of a piece; a group stands for the Variables that it writes."""
        fetches = (*cut.gives, *(cut.gradients if cut.phase is not Phase.UPDATE else ()), *cut.fetched)
        fetches += tuple(Value(node) for node in sorted(cut.nodes) if self.by_id[node].op == "tfnb.guard")
        graph = self.cut.graph
        if cut.written:
            name, inputs = f"{cut.phase}.{cut.pack}", tuple(cut.written.values())
            group = Node(id=new_id(), name=name, op="tfnb.group", inputs=inputs)
            graph = graph.derive(Contents((*graph.nodes, group), graph.contents.guards))
            fetches = (*fetches, Value(group.id))
        given = (*cut.takes, *(cut.gradients if cut.phase is Phase.UPDATE else ()))
        step = step_graph(graph, fetches, dict.fromkeys((*given, *self.step.feeds)))
        run = {node.id for node in step.graph.nodes if node.id in self.cut.time}
        for strayed in sorted(run ^ (cut.nodes & self.cut.time.keys())):
            node = self.by_id[strayed]
            if "update" not in node.tags:  # an update may be absorbed by its write
                raise Unimplemented(
                    f"{node.name} is a check, or ordered behind another pack: leave out microbatches or memory_budget"
                    + (f"  {node.source}" if node.source else "")
                )
        return lower_step(step)


class PackStep:
    """The tasks and sizes of a step in packs, for microbatches of so many rows."""

    def __init__(self, programs: PackPrograms, rows: Rows, **order: bool) -> None:
        self.of, self.rows = programs, rows
        self.stops = [sum(rows[: at + 1]) for at in range(len(rows))]
        seen = programs.lowered
        read = {v for cut, program in seen if cut.phase is not Phase.UPDATE for v in program.variables}
        self.programs = {self._piece(cut, program, read): (cut, program) for cut, program in seen}
        self.pieces = tuple(self.programs)
        self.tasks = tasks_of(self.pieces, len(rows), **order)
        items = dict.fromkeys(item for task in self.tasks for item in (*task.reads, *task.makes))
        self.sizes = {item: self._bytes(item) for item in items}
        self._seconds: dict[tuple[Phase, int, int, MachineRates], float] = {}

    def _sizes(self, micro: int) -> dict[str, int]:
        return dict.fromkeys(self.of.axes, self.rows[micro])

    def _piece(self, cut: CutPiece, program: Program, read: set[Variable]) -> PackPiece:
        """The piece as the planner sees it: Variables read by updates alone are optimizer state."""
        largest = self.rows.index(max(self.rows))
        graph = with_fed(program.graph, program.whole, program.feeds)
        peak = counted(graph, program.fetches, program.feeds, self._sizes(largest)).peak()
        return PackPiece(
            cut.phase, cut.pack, tuple(v for v in program.variables if v in read),
            tuple(v for v in program.variables if v not in read), frozenset(cut.written), cut.gradients, cut.takes,
            cut.gives, max(0, peak - sum(self._value_bytes(value, largest) for value in cut.gives)),
        )  # fmt: skip

    def _value_bytes(self, value: Value, micro: int, wide: bool = False) -> int:
        spec = self.of.spec(value)
        size = 4 if wide and spec.dtype in _NARROW else spec.dtype.itemsize
        return size * torch.Size(nominal(spec, self._sizes(micro))).numel()

    def _bytes(self, item: DeviceItem) -> int:
        if isinstance(item.key, Variable):
            return variable_bytes(item.key)
        value: Any = item.key
        return self._value_bytes(value, max(item.micro, 0), wide=item.role is Role.GRADIENT)

    def seconds(self, piece: PackPiece, micro: int = 0, on: MachineRates = CPU) -> float:
        """The predicted time of a piece for a microbatch, in the unit of the machine's constants."""
        micro = max(micro, 0)
        key = piece.phase, piece.pack, self.rows[micro], on
        if key not in self._seconds:
            _, program = self.programs[piece]
            self._seconds[key] = _price(program.graph, program, self._sizes(micro), on)
        return self._seconds[key]

    def times(self, plan: Schedule, on: MachineRates = CPU) -> LaneTimes:
        """The predicted bars of a step whose copies go on beside its tasks, in the unit of the machine's constants."""
        return lane_times(plan, self.tasks, self.sizes, on.link, lambda task: self.seconds(task.piece, task.micro, on))

    def simulated(self, packing: LayerPacks, budget: int, on: MachineRates = CPU) -> float:
        """The predicted time of other packs than this step's, one for each layer, in the unit of the constants."""
        return simulated(
            self.pieces, len(self.rows), self.sizes, budget, packing, on.link, lambda piece: self.seconds(piece, on=on)
        )  # fmt: skip

    def packings(self, on: MachineRates = CPU) -> list[tuple[int, ...]]:
        """Candidates for the pack of each layer; this step has one pack for each."""
        of = [[piece for piece in self.pieces if piece.pack == layer] for layer in range(self.of.cut.layers)]
        variables = [{item for piece in each for item in piece.variables} for each in of]
        return packings(
            [sum(self.sizes[item] for item in items) for items in variables],
            [sum(self.seconds(piece, on=on) for piece in each) for each in of],
        )

    @property
    def least(self) -> int:
        """The smallest budget that the step can keep: the need of its largest task."""
        return max(map(self.need, self.tasks))

    def need(self, task: PackTask) -> int:
        """Bytes on the device while a task runs, with nothing beside it."""
        return need(task, self.sizes)

    def planned(self, budget: int) -> Schedule:
        """The moves of a step; raises ResourceExhausted with the smallest budget and its largest task."""
        return best_schedule(self.tasks, self.sizes, budget, lambda plan: self.times(plan).end)

    @property
    def state_bytes(self) -> int:
        """Bytes of all Variables: weights, buffers, and optimizer state."""
        return sum(size for item, size in self.sizes.items() if item.role in (Role.WEIGHT, Role.STATE))

    def compute(
        self, feeds: Mapping[Value, torch.Tensor], storages: Mapping[Variable, torch.Tensor], plan: Schedule,
        budget: int, run: int = 0,
    ) -> tuple[PackRun, dict[Variable, HostCopy]]:  # fmt: skip
        """Carry a plan out on a device of ``budget`` bytes; the new values of Variables. No storage is written."""
        written = set(self.of.writes)
        items = {item: _variable(item) for item in self.sizes if item.role in (Role.WEIGHT, Role.STATE)}
        host: dict[Any, HostCopy] = {item: host_copy(storages[v], v in written) for item, v in items.items()}
        file = next((copy.region.file for copy in host.values() if isinstance(copy, RegionCopy)), None)
        done, spare = PackRun(), ProcessCopy if file is None else partial(RangeCopy, file)
        with (
            nullcontext() if file is None else heap.returned(),
            InlineCopies() if file is None else CopyLanes() as lanes,
        ):
            device = VirtualDevice(budget, host, spare, lanes)
            acts = {
                MoveKind.IN: device.load, MoveKind.OUT: device.store, MoveKind.ROOM: device.room,
                MoveKind.WAIT: device.settle, MoveKind.DROP: device.drop, MoveKind.FREE: device.drop,
            }  # fmt: skip
            start = time.perf_counter()
            for kind, item, at in plan.moves:
                if kind is MoveKind.RUN:
                    self._ran(self.tasks[at], device, feeds, run, done)
                else:
                    acts[kind](item)
            device.close()
        bars = [*done.bars, *(Bar(MoveKind(way), _item(key), *times) for way, key, *times in device.copies)]
        done.bars = [
            bar._replace(start=bar.start - start, end=bar.end - start)
            for bar in sorted(bars, key=lambda bar: bar.start)
        ]
        for value, parts in done.told.items():
            total = done.fetched[value] = _zeros(parts[0])
            for micro, part in enumerate(parts):
                self._add(total, part, micro, self.of.weigh(value), done)
        done.most, done.loaded, done.stored = device.most, device.loaded, device.stored
        return done, {variable: device.host[item] for item, variable in items.items() if variable in written}

    def _ran(
        self, task: PackTask, device: VirtualDevice, feeds: Mapping[Value, torch.Tensor], run: int, done: PackRun
    ) -> None:  # fmt: skip
        """Run one task once its inputs are on the device."""
        device.arrive(task.reads)
        began = time.perf_counter()
        self._task(task, device, feeds, run, done)
        done.bars.append(Bar(MoveKind.RUN, task, began, time.perf_counter()))

    def _task(
        self, task: PackTask, device: VirtualDevice, feeds: Mapping[Value, torch.Tensor], run: int, done: PackRun
    ) -> None:  # fmt: skip
        """Run one task on the device's tensors; what it makes stays there."""
        cut, program = self.programs[task.piece]
        micro = max(task.micro, 0)
        stop, here = self.stops[micro], device.here
        start = stop - self.rows[micro]
        whole = self.of.step.feeds
        given = {value: feeds[value][start:stop] if value in self.of.divided else feeds[value] for value in whole}
        given |= {value: here[DeviceItem(Role.BORDER, value, task.micro)] for value in cut.takes}
        if cut.phase is Phase.UPDATE:
            sums = {value: here[DeviceItem(Role.GRADIENT, value)] for value in cut.gradients}
            given |= {value: total.to(self.of.spec(value).dtype) for value, total in sums.items()}
        roles = {item.key: item for item in task.piece.variables}
        with device.working(task.work + sum(self.sizes[item] for item in task.makes)):
            began = time.thread_time()
            copies = [here[roles[variable]] for variable in program.variables]
            fed = [given[value] for value in program.feeds]
            try:
                fetched, pending = program.compute(fed, copies, run + micro * REPLICA)
            except Exception as error:
                if isinstance(error, TfnbError) or from_signal_handler(error):
                    raise
                raise explained(program, error, fed) from error
            values: dict[Value, Any] = dict(zip(program.fetches, fetched, strict=True))
            pending.variables = ()  # they are written at the end of the step
            commit(pending)
            made = {DeviceItem(Role.BORDER, value, task.micro): _own(values[value]) for value in cut.gives}
            for value in cut.fetched:
                if cut.phase is Phase.UPDATE:  # once for all microbatches
                    done.fetched[value] = _own(values[value])
                elif value in self.of.totals.values() or self.of.weigh(value).total is not None:
                    done.told.setdefault(value, []).append(_own(values[value]))
                else:
                    mean = done.fetched.setdefault(value, _zeros(values[value]))
                    self._add(mean, values[value], micro, self.of.weigh(value), done)
            for value in cut.gradients if cut.phase is Phase.BACKWARD else ():
                item = DeviceItem(Role.GRADIENT, value)
                total = here.get(item)
                if total is None:
                    total = made[item] = _zeros(values[value])
                self._add(total, values[value], micro, self.of.weigh(value), done)
            done.seconds[task] = time.thread_time() - began
        for item, tensor in made.items():
            device.put(item, tensor)

    def _add(self, total: torch.Tensor, value: torch.Tensor, micro: int, weight: Weight, done: PackRun) -> None:
        """Add a microbatch's value to a mean or sum over all of them, with the bits of `tfnb.passes.microbatches`."""
        value = value.to(total.dtype)
        if weight.total is None:
            total.add_(value, alpha=self.rows[micro] / self.stops[-1] if weight == ROWS else 1)
            return
        numbers = [float(number) for number in done.told[self.of.totals[weight.total]]]  # type: ignore[index]
        own = [weight.of(number) for number in numbers]
        if any(own[:micro]):
            if own[micro]:
                total.add_(value, alpha=own[micro])
        else:
            total.copy_(value).mul_(own[micro] or 1.0)
        if micro == len(self.rows) - 1 and any(own):
            total.div_(weight.of(sum(numbers)))


def _price(graph: Graph, of: Program | StepGraph, sizes: Mapping[str, int], on: MachineRates = CPU) -> float:
    """The price of the nodes of a pruned graph; what it was pruned from knows the sizes of what is fed."""
    return computing(with_fed(graph, of.whole, of.feeds).contents, sizes, again=False, nodes=graph.nodes, on=on)


def _variable(item: DeviceItem) -> Variable:
    found: Variable = item.key  # type: ignore[assignment]
    return found


def _item(key: Any) -> DeviceItem:
    found: DeviceItem = key
    return found


def _own(value: torch.Tensor) -> torch.Tensor:
    """The value in memory of its size: a view would keep what it is a part of."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _zeros(value: torch.Tensor) -> torch.Tensor:
    """The sum of no values; adding one to it changes no bit of that."""
    dtype = torch.float32 if value.dtype in _NARROW else value.dtype
    return torch.full_like(value, begin("mean", dtype), dtype=dtype, memory_format=torch.contiguous_format)


class PackProgram:
    """A step in packs as one program: it computes from whole batches and what `DividedFeeder` adds to them."""

    waits: ClassVar[bool] = False  # for what other steps do
    commit = staticmethod(commit)

    def __init__(self, programs: PackPrograms, fetches: tuple[Value, ...], planned: Callable[[Rows], PackPlan]) -> None:
        self.programs, self.fetches, self._planned = programs, fetches, planned
        step = programs.step
        self.graph = self.whole = step.whole
        self.inner = tuple(program for _, program in programs.lowered)  # in which an error or a deadline finds its node
        self.feeds, self.variables, self.writes = step.feeds, programs.variables, programs.writes
        self.access, self.commit_access = (Access(self.variables, self.writes) if self.variables else None), None
        self.use: Use = LOCKS.use(self.variables)

    def compute(
        self, feeds: Sequence[torch.Tensor], storages: Sequence[torch.Tensor], run: int = 0,
        forward: Callable[..., Any] | None = None, cut: VariableSnapshot | None = None,
    ) -> tuple[list[torch.Tensor | None], Pending]:  # fmt: skip
        """Fetched values, and the writes of the step; nothing is written."""
        feeds = list(feeds)
        plan = self._planned(rows_of(self.programs, feeds))
        read = storages if cut is None else map(cut.copies.get, self.variables, storages)
        given = dict(zip(self.feeds, feeds[: len(self.feeds)], strict=True))
        state: Any = dict(zip(self.variables, read, strict=True))
        self.inner = tuple(program for _, program in plan.step.of.lowered)
        plan.last, new = plan.step.compute(given, state, plan.schedule, plan.budget, run)
        values = plan.step.of.cut.state.same
        fetched = [plan.last.fetched.get(values.get(value, value)) for value in self.fetches]
        return fetched, _pending([(storages[self.variables.index(v)], new[v]) for v in self.writes], self.writes)


def _pending(written: Sequence[tuple[torch.Tensor, HostCopy]], variables: tuple[Variable, ...]) -> Pending:
    """The writes of a step: copies within the process, and the next generations of mapped tensors, which go first."""
    here = [(target, copy.tensor) for target, copy in written if isinstance(copy, ProcessCopy)]
    mapped = [target for target, copy in written if isinstance(copy, RegionCopy) and copy.is_written]
    flips = [Update(mapped_files.flip, [mapped], {})] if mapped else []
    return Pending([target for target, _ in here], [value for _, value in here], flips, variables)


def rows_of(programs: PackPrograms, feeds: Sequence[torch.Tensor]) -> Rows:
    """The rows of each microbatch, from the shapes that `DividedFeeder` feeds behind the batch."""
    return tuple(feeds[len(programs.step.feeds)][:, 0].tolist())


@dataclass(eq=False, repr=False)
class PackPlan:
    """The plan of a step in packs, for microbatches of so many rows. last: the last step that was computed."""

    step: PackStep
    schedule: Schedule
    budget: int
    last: PackRun | None = None

    @property
    def where(self) -> str:
        """Where Variables lie outside of the device."""
        kept = [v.kept for v in self.step.of.variables if v.initialized]
        folders = {str(region.file.folder) for tensor in kept if (region := region_of(tensor)) is not None}
        return f"in files of {', '.join(sorted(folders))}" if folders else "on the host"

    @cached_property
    def times(self) -> LaneTimes:
        """The predicted bars of the step."""
        return self.step.times(self.schedule)

    @cached_property
    def slowdown(self) -> float:
        """The predicted time of the step in units of that without a budget."""
        return self.times.end / self.step.of.price(sum(self.step.rows))

    def at(self, budget: int) -> PackPlan:
        """The plan of the same packs, microbatches and policy on another budget; raises ResourceExhausted."""
        step = self.step
        return PackPlan(step, schedule(step.tasks, step.sizes, budget, self.schedule.policy), budget)

    @cached_property
    def others(self) -> tuple[PackPlan, ...]:
        """Plans on budgets in equal steps, from the least to one beyond which nothing changes."""
        least, share = self.step.least, self.schedule.policy.share
        all_at_once = sum(self.step.sizes.values()) + max(task.work for task in self.step.tasks)
        most = least + ceil((self.at(least + ceil(all_at_once / share)).schedule.most - least) / share)
        return tuple(self.at(least + (most - least) * part // (BUDGETS - 1)) for part in range(BUDGETS))

    @cached_property
    def lru(self) -> int:
        """Bytes that swapping the least recently used tensors moves, in program order, written back if clean."""
        program_order = PackStep(self.step.of, self.step.rows, grouped=False, just_in_time=False)
        return schedule(program_order.tasks, program_order.sizes, self.budget, MovePolicy(Victims.LRU, 0, True)).moved

    @property
    def plan(self) -> MemoryPlan:
        """The most bytes that the device holds, and the bytes of all Variables, on the host."""
        return MemoryPlan(self.schedule.most, self.budget - self.schedule.most, self.step.state_bytes)

    def __str__(self) -> str:
        cut, microbatches = self.step.of.cut, len(self.step.rows)
        forward = len({piece.pack for piece in self.step.pieces if piece.phase is Phase.FORWARD})
        packs = _counted(cut.packs, "pack") + ("" if forward == cut.packs - 1 else f" ({forward} forward)")
        return (
            f"kept {told(self.schedule.most)} of {told(self.budget)}: {packs} x "
            f"{_counted(microbatches, 'microbatch')}, "
            f"{told(self.schedule.moved)} a step move, {self.slowdown:.1f} times the time predicted without a budget; "
            f"Variables of {told(self.step.state_bytes)} {self.where}"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from tfnb.view import plan_html

        return plan_html(self)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


class PackCode:
    """The code of a step in packs and microbatches, within a memory budget: as `StepCode` to a session."""

    is_dataflow = is_cut = False

    def __init__(self, step: StepGraph, budget: int) -> None:
        self.step, self.limit = step, budget
        self._plans: dict[Rows, PackPlan] = {}
        self._packed: dict[LayerPacks, PackPrograms] = {}
        self.last: PackPlan | None = None  # of the step that ran last
        self._lock = threading.Lock()

    @cached_property
    def program(self) -> PackProgram:
        """The step, cut and lowered."""
        return PackProgram(PackPrograms(self.step), self.step.fetches, self._planned)

    @property
    def whole(self) -> PackCode:
        """Tracers and checks look at steps as a whole; raises Unimplemented."""
        raise Unimplemented("a step in packs is neither traced nor checked: run it without memory_budget")

    @property
    def budget(self) -> PackBudget:
        """Its plans."""
        return PackBudget(self.limit, self._plans, self.program.programs, self.last)

    def _planned(self, rows: Rows) -> PackPlan:
        found = self._plans.get(rows)
        if found is None:
            with self._lock:
                found = self._plans[rows] = self._quickest([rows])
        self.last = found
        return found

    def _quickest(self, choices: Sequence[Rows]) -> PackPlan:
        """The plan that is predicted quickest, with any packs and one of these choices of microbatches.

        The packs that are simulated to be quickest are cut; if they hold more than was simulated, others follow. Raises
        ResourceExhausted with the smallest budget of the last choice, which has the smallest microbatches.
        """
        finest = self.program.programs
        steps = {rows: PackStep(finest, rows) for rows in choices}
        is_searched = len(steps[choices[0]].tasks) <= SEARCHED
        packings = steps[choices[0]].packings() if is_searched else [finest.cut.packing.forward]
        points = searched(
            [packings, packings, choices],
            lambda forward, backward, rows: steps[rows].simulated(LayerPacks(forward, backward), self.limit),
        )  # fmt: skip
        cut = 0
        for forward, backward, rows in points:
            packing = LayerPacks(forward, backward)
            step: PackStep | None = steps[rows]
            if packing != finest.cut.packing:
                step = self._cut(packing, rows) if cut < CUTS else None
                cut += 1
            if step is not None and step.least <= self.limit:
                return self._plan(step)
        return self._plan(steps[choices[-1]])

    def _plan(self, step: PackStep) -> PackPlan:
        return PackPlan(step, step.planned(self.limit), self.limit)

    def _cut(self, packing: LayerPacks, rows: Rows) -> PackStep | None:
        """The step in other packs; None if these cannot be cut apart."""
        try:
            programs = self._packed.get(packing) or PackPrograms(self.step, packing)
        except Unimplemented:
            return None
        self._packed[packing] = programs
        return PackStep(programs, rows)

    def quickest(self, divide: Callable[[int], Rows]) -> int:
        """The number of microbatches that fits and is predicted quickest: of the fewest that fit, and their doubles.

        divide: the rows of each microbatch of at most so many. Raises ResourceExhausted with the smallest budget that
        microbatches of one row need.
        """
        programs, most = self.program.programs, len(divide(sum(divide(1))))
        first = fewest(lambda count: PackStep(programs, divide(count)).least <= self.limit, most)
        choices = list(dict.fromkeys(divide(count) for count in doubled(first or most, most)[:DOUBLES]))
        plan = self._quickest(choices)
        self._plans.setdefault(plan.step.rows, plan)
        return len(plan.step.rows)

    def at(self, shapes: tuple[torch.Size, ...]) -> tuple[PackProgram, Callable[..., Any] | None]:
        """The program; the rows of its microbatches are fed."""
        return self.program, None

    def code(self, shapes: tuple[torch.Size, ...] | None = None) -> str:
        """The kind of code that runs the step."""
        return "generated code in packs"

    def status(self) -> list[str]:
        """A line for each plan, with the bytes that swapping in program order would move."""
        return [
            f"{at}: {self.code()}; {found} (least recently used: {told(found.lru)})"
            for at, found in self.budget.plans()
        ]

    def close(self) -> None:
        """Nothing waits for this code."""

    @property
    def is_lowered(self) -> bool:
        """Whether the step has run here."""
        return "program" in self.__dict__


@dataclass(frozen=True)
class PackBudget:
    """The plans of a step in packs under one budget. last: of the step that ran last."""

    budget: int
    found: Mapping[Rows, PackPlan]
    programs: PackPrograms
    last: PackPlan | None

    def plans(self) -> Iterator[tuple[str, PackPlan]]:
        """The plans made so far, with the names of the feeds and the rows of their microbatches."""
        names = [self.programs.step.whole.contents.by_id[value.node].name for value in self.programs.divided]
        for rows, plan in tuple(self.found.items()):
            yield f"{', '.join(sorted(names))}, {len(rows)} microbatches of {sum(rows)} rows", plan
