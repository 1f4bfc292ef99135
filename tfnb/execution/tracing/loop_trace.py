"""Looking into loops and branches while they run: their generated code with a look at each value that it makes.

A look notes the time since the one before, and in turns that are kept also the value in brief. The clock stands still
meanwhile, so that a loop takes as long as without.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tfnb.execution.lowering.control_flow_code import Cond, Loop
from tfnb.execution.lowering.program import Program
from tfnb.execution.tracing.iterations import OUTPUTS, Amount, KeptTurns, Note, Path, Turn, Turns, seen
from tfnb.graph import Graph, Node
from tfnb.kernels.rows import TURNS, Kept

NOTES = 16_000  # of nodes in turns; then only every n-th turn is kept
POINTS = 20_000  # of the curve of live bytes; then the higher of two neighbours


class Clock:
    """Seconds since it was made, without those that are taken back."""

    def __init__(self, *, true: bool = False) -> None:
        self._true, self._zero = true, time.perf_counter_ns()

    def now(self) -> float:
        """Seconds since the start."""
        return (time.perf_counter_ns() - self._zero) * 1e-9

    def back(self, to: float) -> None:
        """Now it is this time again; a ``true`` clock, which is compared with others, goes on."""
        if not self._true:
            self._zero = time.perf_counter_ns() - round(to * 1e9)


Held = list[tuple[int, int]]  # key and bytes of memory


class Memory:
    """Bytes of the storages that a step made and still uses; what it was given does not count."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = [(0.0, 0)]
        self._uses: dict[int, int] = {}  # storage -> values that lie in it
        self._given: set[int] = set()

    def borrow(self, values: Any) -> None:
        """Memory of a variable, feed or constant."""
        self._given.update(key for key, _ in _storages(values))

    def hold(self, value: Any, at: float) -> Held:
        """A value was made at this time; gives what `free` takes."""
        held, count = [pair for pair in _storages(value) if pair[0] not in self._given], self.points[-1][1]
        for key, size in held:
            before = self._uses.get(key, 0)
            self._uses[key] = before + 1
            count += 0 if before else size
        self._point(at, count)
        return held

    def free(self, held: Held, at: float) -> None:
        """A value was used for the last time."""
        count = self.points[-1][1]
        for key, size in held:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                count -= size
        self._point(at, count)

    def keep(self, results: Iterable[Any], at: float) -> None:
        """The step is over; only ``results`` stay."""
        stays = {key: size for key, size in _storages(list(results)) if key not in self._given}
        self._point(at, sum(stays.values()))

    def _point(self, at: float, count: int) -> None:
        last, before = self.points[-1]
        if count == before:
            return
        self.points.append((max(at, last), count))
        if len(self.points) > POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [*(max(pair, key=lambda point: point[1]) for pair in pairs), self.points[-1]]


def recorded(node: Node, whole: Graph) -> Node:
    """The node of a graph that a node of a pass came from, and is named after: ``conv`` of ``conv.layout7``."""
    contents, name = whole.contents, node.name
    while node.id not in contents.by_id and name:
        name = name.rpartition(".")[0]
        node = contents.by_name.get(name, node)
    return node


class Watch:
    """Looks at what runs inside of the loops and branches of one step."""

    def __init__(self, clock: Clock, memory: Memory) -> None:
        self.clock, self.memory = clock, memory
        self.taken: dict[int, set[bool]] = {}
        self.inside: dict[Path, Amount] = {}
        self.once: dict[Path, Note] = {}  # nodes in branches that are in no loop
        self.kept = KeptTurns(NOTES)
        self.last = 0.0  # when somebody looked last
        self._path: Path = ()
        self._around: list[Turn] = []  # turns that run, and are kept
        self._loops: list[Path] = []  # loops that run
        self._codes: dict[int, Code] = {}
        self._given: Held = []  # of a region's results, until somebody takes them
        self._own: dict[Path, float] = {}  # seconds between what runs in a region

    @contextmanager
    def loop(self, loop: Loop) -> Iterator[tuple[Callable[..., Any] | None, Callable[..., Any]]]:
        """The functions of a loop's condition and body, whose turns are looked at."""
        with self._within(loop.id):
            path = self._path
            turns = self.kept.loops.setdefault(path, Turns(path, self._loops[-1] if self._loops else None))
            turns.runs += 1
            run = Run(self, turns, loop)
            self._loops.append(path)
            try:
                yield None if loop.cond is None else run.cond, run.body
            finally:
                self._loops.pop()
                run.end()

    def side(self, cond: Cond, way: bool) -> Callable[..., Any]:
        """The function of the side that a branch takes."""
        self.taken.setdefault(cond.id, set()).add(way)
        program, _ = cond.branches[way]

        def call(*args: Any) -> Any:
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
        self.last = self.clock.now()
        try:
            yield
        finally:
            self._path = before

    @property
    def keeps(self) -> bool:
        """Whether every loop that runs is in a turn that is kept."""
        return bool(self._loops) and len(self._around) == len(self._loops)

    def call(self, program: Any, args: Sequence[Any], inputs: int) -> tuple[Any, Held]:
        """What a program gives, and the memory of that; the first ``inputs`` are noted, too."""
        start = self.clock.now()
        self._own[self._path] = self._own.get(self._path, 0.0) + start - self.last
        if id(program) not in self._codes:
            self._codes[id(program)] = Code(program)
        code = self._codes[id(program)]
        if self.keeps:
            notes = self._around[-1].notes
            for node, value in zip(code.inputs[:inputs], args, strict=False):
                notes[*self._path, node] = Note(start, math.nan, 0, tuple(map(seen, tensors(value)[:1])))
        look = Look(self, code)
        self.clock.back(start)
        self.last = start
        out = code.forward(look, *args)
        at = self.clock.now()
        held = self.memory.hold(out, at)
        look.end(at)
        self.clock.back(at)
        self.last = self.clock.now()
        return out, held

    def note(self, path: Path, node: Node, value: Any, at: float) -> None:
        """A node gave this now."""
        found, seconds = tensors(value), at - self.last + self._own.pop(path, 0.0)
        size = sum(tensor.numel() * tensor.element_size() for tensor in found)
        amount = self.inside.get(path)
        if amount is None:
            amount = self.inside[path] = Amount(node)
        amount.seconds += seconds
        amount.bytes += size
        amount.calls += 1
        if self.keeps:
            values = tuple(map(seen, found[:OUTPUTS]))
            self._around[-1].notes[path] = Note(at - seconds, seconds, size, values)
        elif not self._loops:
            self.once[path] = Note(at - seconds, seconds, size, ())

    def settle(self, at: float) -> None:
        """Somebody has taken the results of the branches that ran."""
        self.memory.free(self._given, at)
        self._given = []

    def begin(self, turns: Turns, number: int) -> Turn | None:
        """A turn begins: it, if it is one to keep."""
        if len(self._around) != len(self._loops) - 1 or number % turns.every:
            return None
        turn = Turn(number, self._around[-1] if self._around else None, self.clock.now())
        self._around.append(turn)
        return turn

    def done(self, turns: Turns, turn: Turn | None, at: float, *, whole: bool) -> None:
        """It ended now; not ``whole``: there was no turn, as the condition did not hold."""
        if turn is not None:
            self._around.remove(turn)
            turn.end = at
            if whole:
                self.kept.add(turns, turn, self._around)


class Run:
    """One run of a loop."""

    def __init__(self, watch: Watch, turns: Turns, loop: Loop) -> None:
        self.watch, self.turns, self.loop = watch, turns, loop
        self.count = 0
        self.turn: Turn | None = None
        self._begun = False
        self._state: Held = []
        self._rows: Held = []
        self._summands: Held = []  # of sums that are taken so many turns at a time

    def cond(self, *args: Any) -> Any:
        """The condition, which begins a turn."""
        self._begin()
        out, held = self.watch.call(self.loop.cond, args, self.loop.changing)
        self.watch.memory.free(held, self.watch.clock.now())
        return out

    def body(self, *args: Any) -> Any:
        """The body, which ends it; what it gives is held until the next turn does, rows until the loop ends."""
        self._begin()
        watch, memory = self.watch, self.watch.memory
        out, held = watch.call(self.loop.body, args, self.loop.changing)
        at = watch.clock.now()
        carried = len(self.loop.order)
        rows = carried + len(self.loop.rows)
        before, self._state = self._state, memory.hold(out[:carried], at)
        self._rows += memory.hold(out[carried:rows], at)
        self._summands += memory.hold(out[rows:], at)
        memory.free([*held, *before], at)
        if (self.count + 1) % TURNS == 0:
            memory.free(self._summands, at)
            self._summands = []
        self.count += 1
        self._end(at, whole=True)
        watch.clock.back(at)
        watch.last = watch.clock.now()
        return out

    def _begin(self) -> None:
        if not self._begun:
            self.turn = self.watch.begin(self.turns, self.count)
            self._begun = True

    def _end(self, at: float, *, whole: bool) -> None:
        self.watch.done(self.turns, self.turn, at, whole=whole)
        self.turn, self._begun = None, False

    def end(self) -> None:
        """No more turns."""
        self._end(self.watch.clock.now(), whole=False)
        self.turns.total += self.count
        self.watch._given += [*self._state, *self._rows, *self._summands]


class Code:
    """The code of a program with a look after each of its calls."""

    def __init__(self, program: Any) -> None:
        self.inputs = [value.node for value in program.feeds]
        self.nodes: list[Node | None] = []
        self.dead: list[tuple[int, ...]] = []  # for each look: those whose values were used for the last time
        graph = fx.Graph()
        look = graph.placeholder("look")
        new: dict[fx.Node, Any] = {}
        places: dict[fx.Node, int] = {}
        last_uses = fx.Interpreter(program.module).user_to_last_uses
        for node in program.module.graph.nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
            if node.op == "call_function":
                place = places[node] = len(self.nodes)
                owner = program.node_of.get(node.name) if node.target is not operator.getitem else None
                self.nodes.append(None if owner is None else recorded(owner, program.whole))
                unused = [] if node.users else [node]
                self.dead.append(tuple(places[n] for n in (*last_uses.get(node, ()), *unused) if n in places))
                graph.call_method("look", (look, place, new[node]))
        module = fx.GraphModule(program.module, graph)
        self.forward: Callable[..., tuple[Any, ...]] = module.forward
        self.code, self.node_of = module.code, {new[n].name: node for n, node in _owners(program)}


def _owners(program: Program) -> Iterator[tuple[fx.Node, Node]]:
    """The generated nodes of a program that stand for nodes of the graph."""
    return ((n, program.node_of[n.name]) for n in program.module.graph.nodes if n.name in program.node_of)


class Look:
    """The looks of one call of a program."""

    __slots__ = ("held", "path", "program", "watch")

    def __init__(self, watch: Watch, code: Code) -> None:
        self.watch, self.program, self.path = watch, code, watch._path
        self.held: dict[int, Held] = {}

    def look(self, place: int, value: Any) -> None:
        """A call of the code gave this."""
        watch, code = self.watch, self.program
        at = watch.clock.now()
        if wait(devices(value)):
            at = watch.clock.now()
        node = code.nodes[place]
        if node is not None:
            watch.note((*self.path, node.id), node, value, at)
        self.held[place] = watch.memory.hold(value, at)
        for dead in code.dead[place]:
            watch.memory.free(self.held.pop(dead, []), at)
        watch.settle(at)
        watch.clock.back(at)
        watch.last = at

    def end(self, at: float) -> None:
        """The call returned."""
        for held in self.held.values():
            self.watch.memory.free(held, at)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a value."""
    if isinstance(value, torch.Tensor):
        return [value]
    leaves = dict.fromkeys(tree_leaves(value))
    found = (item for leaf in leaves for item in (leaf.rows if isinstance(leaf, Kept) else (leaf,)))
    return [item for item in found if isinstance(item, torch.Tensor)]


def wait(found: Iterable[torch.device]) -> bool:
    """Wait for accelerators among the devices; whether there were any."""
    busy = [device for device in found if device.type not in ("cpu", "meta")]
    for device in busy:
        torch.accelerator.synchronize(device)
    return bool(busy)


def devices(value: Any) -> dict[torch.device, None]:
    """The devices of the tensors of a value."""
    return dict.fromkeys(tensor.device for tensor in tensors(value))


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    """Key and bytes of the memory of each tensor; sparse layouts have none of one piece."""
    for tensor in tensors(value):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            yield storage._cdata, storage.nbytes()
