"""Steps that are recorded once, as the device sees them, and launched whole: CUDA graphs.

For one choice of feed sizes. Only computing is captured; what a step writes is committed after it, as always, from the
memory that the launch left it in, so that an error or an interrupt still leaves Variables at whole steps. Feeds are
copied into buffers that stay, Variables are read where they lie. Knows no device: `cuda_graphs` does.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from tfnb.execution.lowering.checked_calls import Branch, RandomCall, Relation, SeededCall
from tfnb.execution.lowering.control_flow_code import Cond, Loop, RecursiveCall
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.cuda_graphs import CudaGraphs
from tfnb.execution.tiers.graph_split import behind
from tfnb.execution.tiers.interface import Forward, TierRequest
from tfnb.graph.op_facts import facts_of
from tfnb.interrupts import from_signal_handler

WARM = 3  # steps of a choice of sizes before it is captured: by then libraries have chosen their kernels
MOST = 8  # captures of one program that are kept; the one that was launched the longest ago goes
TRIES = 4  # captures of one choice of sizes in all: what is captured again and again costs more than it saves
MOVES = 2  # after so many a Variable is copied like a feed: each run reads it somewhere else
OFF, TINY = 5e-2, 1e-6  # of a value's length, by which a launch may differ from the code
FEWEST = 8  # calls that are worth a launch of their own

Outs = Sequence[Any]
_LOG = logging.getLogger(__name__)


class Device(Protocol):
    """A device that captures calls; captures share memory, so only one may run at a time."""

    def generator(self) -> torch.Generator:
        """A generator for one random op of captured code."""

    def warm(self, call: Callable[[], Outs]) -> Outs:
        """Run ``call()`` where it will be captured."""

    def capture(
        self, call: Callable[[], Outs], generators: Sequence[torch.Generator]
    ) -> tuple[Outs, Callable[[], None]]:
        """Capture ``call``: its results, in memory that stays, and the function that recomputes them."""

    def after(self) -> None:
        """Order this thread's later work on the device after the last launch."""


DEVICES: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaGraphs}
"""By kind of device; on others nothing is captured."""

_DECIDES = (Branch, Relation, RecursiveCall, Cond, Loop)


def device_of(program: Program) -> torch.device:
    """The first device of the program's values that is not the CPU, else the CPU."""
    names = (spec.device for node in program.graph.nodes for spec in node.outputs)
    return torch.device(next((name for name in names if name != "cpu"), "cpu"))


def obstacle(program: Program, device: torch.device) -> str | None:
    """The reason why a program cannot be captured, such as host decisions or reads; None if no reason is known."""
    calls = [node for node in program.module.graph.nodes if node.op == "call_function"]
    if len(calls) < FEWEST:
        return f"it is {len(calls)} calls"
    sized = behind(program)
    for call in calls:
        owner = program.node_of.get(call.name)
        name = call.name if owner is None else owner.name
        if isinstance(call.target, _DECIDES):
            return f"{name} decides what runs next"
        if call in sized:
            return f"data decide the sizes of {name}"
        why = None if owner is None else _on_host(program, owner, str(device))
        if why is not None:
            return f"{name} {why}"
    return None


def _on_host(program: Program, node: Any, device: str) -> str | None:
    """The reason why a node waits for the host or another device; None if it does not."""
    by_id = program.graph.contents.by_id
    given = [by_id[value.node].outputs[value.index] for value in node.inputs if value.node in by_id]
    if any(spec.device != device for spec in node.outputs):
        return f"runs on {next(spec.device for spec in node.outputs if spec.device != device)}"
    for value, spec in zip(node.inputs, given, strict=False):
        if spec.device != device and (spec.shape or by_id[value.node].op != "tfnb.constant"):
            return f"takes {by_id[value.node].name} from {spec.device}"
    own = facts_of(node.op)
    masked = own.reads_mask and any(spec.dtype in (torch.bool, torch.uint8) for spec in given[1:])
    reads = own.reads_host or masked or node.attrs.get("check_errors")
    return "reads on the host" if reads else None


class Captures:
    """The tier of one program: at most `MOST` captures, in one memory, for the thread that came first.

    A launch overwrites the results of the one before, which only the thread that launches has used up by then: steps
    of other threads run as they are.
    """

    def __init__(self, device: Device, why_not: str | None = None) -> None:
        self.device, self.why_not = device, why_not
        self._thread: int | None = None
        self._kept: OrderedDict[CapturedCode, None] = OrderedDict()

    name = "launched whole"

    @classmethod
    def of(cls, program: Program) -> Captures | None:
        """For a program on a device that captures; None for others."""
        device = device_of(program)
        make = DEVICES.get(device.type)
        return None if make is None else cls(make(device), obstacle(program, device))

    def made(self, request: TierRequest) -> Forward | str:
        """Generated code, captured after a few steps."""
        return self.why_not or CapturedCode(request.program, request.forward, self)

    def claim(self) -> bool:
        """Whether this thread may launch: the first thread to ask owns the captures."""
        if self._thread is None:
            self._thread = threading.get_ident()
        return self.is_mine

    @property
    def is_mine(self) -> bool:
        """Whether this is the thread that launches."""
        return self._thread == threading.get_ident()

    def used(self, captured: CapturedCode) -> None:
        """This one was launched last; one too many goes."""
        self._kept[captured] = None
        self._kept.move_to_end(captured)
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)[0].release()

    def forget(self, captured: CapturedCode) -> None:
        """This one has no capture any more."""
        self._kept.pop(captured, None)


@dataclass(slots=True)
class Launch:
    """One capture.

    buffers: for some places among the arguments, memory that each launch copies them into. bound: for others, the
    tensor and address that was captured. made: results in memory that the next launch overwrites; given: for each
    result, the place of the argument that it is, or None.
    """

    launch: Callable[[], None]
    buffers: dict[int, torch.Tensor]
    bound: tuple[tuple[int, torch.Tensor, int], ...]
    made: Outs
    given: tuple[int | None, ...]
    draws: tuple[SeededCall, ...]

    def moved(self, args: Sequence[Any]) -> list[int]:
        """Places of arguments that are not where they were."""
        return [at for at, tensor, where in self.bound if args[at] is not tensor or tensor.data_ptr() != where]

    def run(self, args: Sequence[Any], fetched: int) -> Outs:
        """The results; the first so many are the caller's for good."""
        if self.buffers:
            torch._foreach_copy_(list(self.buffers.values()), [args[place] for place in self.buffers])
        for draw in self.draws:
            draw.seed(args[-1])
        self.launch()
        found = [made if place is None else args[place] for made, place in zip(self.made, self.given, strict=True)]
        for at in range(fetched):
            if self.given[at] is None and isinstance(found[at], torch.Tensor):
                found[at] = found[at].clone()
        return tuple(found)


class CapturedCode:
    """Code of one choice of sizes that is captured after a few steps; called as the code is.

    forward: what runs before that, and where it cannot be captured.
    """

    def __init__(self, program: Program, forward: Forward, captures: Captures) -> None:
        self.program, self.forward, self.captures = program, forward, captures
        self.why_not: str | None = None
        self._launch: Launch | None = None
        self._steps, self._tries = 0, 0
        self._moves: Counter[int] = Counter()

    @property
    def status(self) -> str:
        """A few words."""
        if self.why_not is not None:
            return f"not captured: {self.why_not}"
        return "launched whole" if self._launch is not None else "not captured yet"

    @property
    def is_settling(self) -> bool:
        """Whether later steps will be launched whole, and this one is not."""
        return self.why_not is None and self._launch is None and self.captures.is_mine

    def __call__(self, *args: object) -> Outs:
        if self.why_not is not None or not self.captures.claim():
            return self.forward(*args)
        if self._launch is None:
            self._steps += 1
            return self.forward(*args) if self._steps <= WARM else self._capture(args)
        moved = self._launch.moved(args)
        if moved:
            self._moves.update(moved)
            return self._capture(args)
        self.captures.used(self)
        return self._run(self._launch, args)

    def release(self) -> None:
        """Free the memory; the step may be captured again a few steps later."""
        self._launch, self._steps = None, 0
        self.captures.forget(self)

    def _run(self, launch: Launch, args: Sequence[Any]) -> Outs:
        self.captures.device.after()
        return launch.run(args, self.program.n_fetches)

    def _capture(self, args: Sequence[Any]) -> Outs:
        self.release()
        self._tries += 1
        if self._tries > TRIES:
            self.why_not = f"{TRIES} captures did not last"
            return self.forward(*args)
        try:
            launch, outs = self._made(args)
        except Exception as error:  # CUDA raises anything; nothing was written, and the code goes on as it is
            if from_signal_handler(error):
                raise
            first = str(error).strip().splitlines()
            self.why_not = f"{type(error).__name__}: {first[0][:200] if first else ''}"
            _LOG.info("not captured: %s", self.why_not)
            return self.forward(*args)
        self._launch = launch
        self.captures.used(self)
        return outs

    def _made(self, args: Sequence[Any]) -> tuple[Launch, Outs]:
        """Capture and compare with the code itself; returns the launch, and the results for these arguments."""
        device = self.captures.device
        buffers = {at: torch.empty_like(args[at]).copy_(args[at]) for at in self._taken() if self._is_copied(at)}
        static = [buffers.get(at, arg) for at, arg in enumerate(args)]
        wanted = device.warm(lambda: self.forward(*static))
        code, draws = self._with_generators()
        for draw in draws:
            draw.seed(args[-1])
        made, launch = device.capture(lambda: code(*static), [draw.generator for draw in draws])
        owners = {id(arg): at for at, arg in enumerate(static) if isinstance(arg, torch.Tensor)}
        given = tuple(owners.get(id(out)) if isinstance(out, torch.Tensor) else None for out in made)
        bound = tuple((at, args[at], args[at].data_ptr()) for at in self._taken() if at not in buffers)
        found = Launch(launch, buffers, bound, made, given, draws)
        outs = self._run(found, args)
        if differs := [at for at, pair in enumerate(zip(outs, wanted, strict=True)) if not _are_close(*pair)]:
            raise RuntimeError(f"a launch gives another value {differs[0]} than the code")
        return found, outs

    def _taken(self) -> list[int]:
        """Places of the tensors among the arguments that computing takes: others are only handed on to the commit."""
        *tensors, _ = self.program.module.graph.find_nodes(op="placeholder")  # the last one is the run's number
        return [at for at, node in enumerate(tensors) if any(user.op != "output" for user in node.users)]

    def _is_copied(self, at: int) -> bool:
        """Whether an operand is copied for each launch: feeds, and Variables that moved too often."""
        return at < len(self.program.feeds) or self._moves[at] >= MOVES

    def _with_generators(self) -> tuple[Forward, tuple[SeededCall, ...]]:
        """The code with a generator for each random op."""
        module = self.program.module
        if not _drawings(module.graph):
            return self.forward, ()
        graph, copies, draws = fx.Graph(), dict[fx.Node, fx.Node](), list[SeededCall]()
        returned: Any = graph.graph_copy(module.graph, copies)
        for node in _drawings(module.graph):
            draws.append(SeededCall(node.target, self.captures.device.generator()))  # type: ignore[arg-type]
            copies[node].target = draws[-1]
        graph.output(returned)
        return replace(self.program, module=fx.GraphModule(module, graph)).forward, tuple(draws)


def _are_close(found: Any, wanted: Any) -> bool:
    """Whether two runs of the same kernels agree in norm: sums in varying order make single elements differ."""
    if not isinstance(found, torch.Tensor) or not (found.is_floating_point() or found.is_complex()):
        return found is wanted or bool(torch.equal(torch.as_tensor(found), torch.as_tensor(wanted)))
    here, there = (x.detach().nan_to_num().flatten() for x in (found, wanted))
    wide = torch.complex128 if found.is_complex() else torch.float64
    off, size = ((torch.linalg.vector_norm(x, dtype=wide)) for x in (here - there, there))
    return bool(off <= OFF * size + TINY)


def _drawings(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if isinstance(node.target, RandomCall)]
