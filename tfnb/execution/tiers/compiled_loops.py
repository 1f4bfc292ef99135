"""Loops over numbers and small tensors as compiled C++, in the place of the calls that run them in Python.

`native` gives a program whose loops compile themselves when they are first called, as long as the compiler's permit is
open. Afterwards those that fit run compiled, and anything else as before: other shapes, a division by zero, an index
out of bounds, a branch that was recorded another way. Generated code does what can be done there, or reports it.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from tfnb.errors import Unimplemented
from tfnb.execution.compiling.compiled_packages import NO_COMPILER
from tfnb.execution.compiling.package_cache import cpp_compiler
from tfnb.execution.lowering.control_flow_code import Cond, Loop
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.interface import Forward, TierRequest
from tfnb.interrupts import from_signal_handler
from tfnb.recording.values.interpret import number

MOST = 4  # choices of shapes that one loop is compiled for
FIRST_ROWS = 1024  # that there is room for when nobody knows how many iterations there will be
_FOREVER = 2**62


@dataclass
class Permit:
    """Permission for loops to compile now, and counts of the results."""

    open: bool = True
    compiled: int = 0
    refused: list[str] = field(default_factory=list)


def obstacle() -> str | None:
    """The reason why this machine cannot compile; None if it can."""
    return NO_COMPILER if cpp_compiler() is None else None


class CompiledLoops:
    """The tier: generated code around loops in C++."""

    name = "compiled"

    def made(self, request: TierRequest) -> Forward | str:
        """The code whose loops have compiled for these arguments."""
        if not any(isinstance(node.target, (Loop, Cond)) for node in request.program.module.graph.nodes):
            return "it has no loops"
        if why := obstacle():
            return why
        permit = Permit()
        program = native(request.program.undonated(), permit)
        with torch.no_grad():
            program.forward(*request.args)
        permit.open = False
        why = "; ".join(f"a loop has {why}" for why in permit.refused)
        return program.forward if permit.compiled else why or "it ran no loops"


def native(program: Program, permit: Permit) -> Program:
    """The program with its loops, branches' loops included, in C++ where possible."""
    targets = {
        node: NativeLoop(node.target, permit) if isinstance(node.target, Loop) else _branches(node.target, permit)
        for node in program.module.graph.nodes if isinstance(node.target, (Loop, Cond))
    }  # fmt: skip
    if not targets:
        return program
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    returned: Any = graph.graph_copy(program.module.graph, copies)
    for node, target in targets.items():
        copies[node].target = target
    graph.output(returned)
    return replace(program, module=fx.GraphModule(program.module, graph))


def _branches(cond: Cond, permit: Permit) -> Cond:
    made = copy.copy(cond)
    made.branches = {way: (native(cast(Program, part), permit), lacks) for way, (part, lacks) in cond.branches.items()}
    return made


class NativeLoop:
    """A loop that compiles itself: called as `tfnb.execution.lowering.control_flow_code.Loop` is."""

    def __init__(self, loop: Loop, permit: Permit) -> None:
        self.loop, self.permit = loop, permit
        self._made: dict[Any, _CompiledLoop | None] = {}
        self._inner = False  # whether the loops inside are ones that compile themselves
        self.__name__ = "native_loop"  # for the generated code

    def __call__(
        self, run: int, init: object, xs: Sequence[Any], captures: object, limit: object, rows: Any
    ) -> Sequence[torch.Tensor]:
        shapes = [rows[place] for place in self.loop.rows]
        key = _key(init, xs, captures, shapes)
        if key not in self._made and self.permit.open and len(self._made) < MOST:
            self._made[key] = self._compiled(init, xs, captures, shapes)
        made = self._made.get(key)
        outs = None if made is None else made(init, xs, captures, number(limit))
        return self.loop(run, init, xs, captures, limit, rows) if outs is None else outs

    def _compiled(self, init: object, xs: Sequence[Any], captures: object, shapes: object) -> _CompiledLoop | None:
        try:
            made = _CompiledLoop(self.loop, init, xs, captures, shapes)
        except Exception as error:  # inductor raises anything; it runs as before
            if from_signal_handler(error):
                raise
            said = str(error).strip()
            self.permit.refused.append(said.splitlines()[0] if said else type(error).__name__)
            self._open_inner()
            return None
        self.permit.compiled += 1
        return made

    def _open_inner(self) -> None:
        """Keep the loop as generated code; inner loops may be compiled."""
        if not self._inner:
            self._inner, loop = True, copy.copy(self.loop)
            loop.body = native(cast(Program, loop.body), self.permit)
            loop.cond = None if loop.cond is None else native(cast(Program, loop.cond), self.permit)
            self.loop = loop


def _key(init: Any, xs: Sequence[Any], captures: Any, shapes: Sequence[Any]) -> tuple[Any, ...]:
    """The cache key of a compiled loop; the number of rows is no part."""
    fixed = [(t.dtype, t.shape, t.stride(), t.device, t.is_neg()) for t in (*init, *captures)]
    rows = [
        (x.dtype, x.shape[1:], x.stride(), x.device, x.is_neg()) if isinstance(x, torch.Tensor) else None for x in xs
    ]
    return (*fixed, *rows, *(shape if isinstance(shape, int) else tuple(shape) for shape in shapes))


def look() -> None:
    """Called by compiled loops at intervals, so that Python can raise signals and stops."""


class _CompiledLoop:
    """A loop in C++ for tensors of these layouts."""

    def __init__(self, loop: Loop, init: Any, xs: Sequence[Any], captures: Any, shapes: Any) -> None:
        from tfnb.execution.tiers import cpp  # listed exception: inductor takes seconds to load

        if not all(isinstance(x, torch.Tensor) for x in xs) or any(isinstance(shape, int) for shape in shapes):
            raise Unimplemented("rows that are not stacked")
        layouts = [[cpp.TensorLayout.of(tensor) for tensor in tensors] for tensors in (init, xs, captures)]
        self.rows = [((*shape,), dtype) for shape, (dtype, _) in zip(shapes, loop.kinds, strict=True)]
        wanted = [(place, shape) for place, (shape, _) in zip(loop.rows, self.rows, strict=True)]
        source = cpp.source(loop.node, layouts[0], layouts[1], layouts[2], wanted)
        self.constants, self.reverse = source.constants, loop.reverse
        self.function = ctypes.PyDLL(cpp.build(source.text)).loop
        self.function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.py_object
        self.refused, self.ended = cpp.REFUSED, cpp.ENDED

    def __call__(self, init: Any, xs: Sequence[Any], captures: Any, limit: int | None) -> list[torch.Tensor] | None:
        """The results of the loop; None where only generated code can compute the loop."""
        state = [tensor.clone(memory_format=torch.contiguous_format) for tensor in init]
        lengths = [len(x) for x in xs]
        most = min([*lengths, _FOREVER if limit is None else max(limit, 0)])
        last = lengths[0] - 1 if lengths else 0
        iteration, room, made = ctypes.c_int64(0), FIRST_ROWS, list[list[torch.Tensor]]()
        while True:
            first, end = iteration.value, min(most, iteration.value + room) if self.rows else most
            made.append([torch.empty((end - first, *shape), dtype=dtype) for shape, dtype in self.rows])
            given = [tensor.data_ptr() for tensor in (*state, *xs, *captures, *made[-1], *self.constants)]
            data = (ctypes.c_void_p * len(given))(*given)
            result = self.function(data, ctypes.byref(iteration), end, last, look)
            if result == self.refused:
                return None
            made[-1] = [rows[: iteration.value - first] for rows in made[-1]]
            if result == self.ended or iteration.value >= most:
                break
            room *= 2
        stacked = [torch.cat(parts) if len(parts) > 1 else parts[0].clone() for parts in zip(*made, strict=True)]
        return [*state, torch.tensor(iteration.value), *(rows.flip(0) if self.reverse else rows for rows in stacked)]
