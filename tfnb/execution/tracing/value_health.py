"""The tracer that looks at the health of each value, and follows NaN and infinite numbers from where they began.

Values that nothing bad comes of do not count: a mask of -inf is no error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tfnb.execution.lowering.program import Program
from tfnb.execution.tracing.everything import CallProbe, Everything
from tfnb.execution.tracing.health import Health, health
from tfnb.execution.tracing.iterations import FEW, LoopTrace, Path
from tfnb.execution.tracing.live_memory import tensors
from tfnb.execution.tracing.origins import KnownValue, Origin
from tfnb.execution.tracing.probes import ProbedCode
from tfnb.execution.tracing.trace import Trace
from tfnb.graph import Node, Spec
from tfnb.graph.ops import REGIONS


class ValueHealth(Everything):
    """Health of each node's values, and the origin of nonfinite ones."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.health: dict[Path, Health] = {}  # of all that a node gave, in all iterations
        self.origins: dict[Path, Origin] = {}  # of the first value of each node that was not finite
        self.results: list[KnownValue] = []  # of the step: fetches, then what is written
        self._known = WeakTensorKeyDictionary()
        self._inside: dict[Path, Origin] = {}  # the first one inside of each loop or branch
        self._number: dict[Path, int] = {}  # of the iteration of each loop

    # -- the step ---------------------------------------------------------------------------------------------

    def forward(self, *args: object) -> tuple[Any, ...]:
        """Run the generated code with checks of its operands and values."""
        program, by_id = self.program, self.program.whole.contents.by_id
        names = [by_id[value.node].name for value in program.feeds]
        for name, arg in zip([*names, *(f"Variable {v.name}" for v in program.variables)], args, strict=False):
            for tensor in tensors(arg):
                self._from_outside(name, tensor)
        outs = super().forward(*args)
        self.results = list(self._results(outs))
        return outs

    def _results(self, outs: Sequence[Any]) -> Iterator[KnownValue]:
        program, by_id = self.program, self.program.whole.contents.by_id
        assigned = program.whole.contents.assigned
        fetched = [assigned.get(value) or by_id[value.node].name for value in program.fetches]
        copied = [program.variables[place].name for place in program.copies]
        for name, out in zip([*fetched, *(f"the new value of {name}" for name in copied)], outs, strict=False):
            for tensor in tensors(out):
                yield replace(self._of(tensor, name), name=name)
        at = len(fetched) + len(copied)
        for _, _, lengths in program.updates:
            for length in lengths:
                row = [self._of(tensor, "an update") for tensor in tensors(list(outs[at : at + length]))]
                for known in row[1:]:
                    yield replace(known, name=f"{known.name}, which updates {row[0].name}")
                at += length

    def trace(self) -> Trace:
        """The recorded trace, with health and origins."""
        return replace(super().trace(), health=self.health, origins=self.origins)

    # -- what is looked at ------------------------------------------------------------------------------------

    def look(self, code: ProbedCode, args: Sequence[Any], names: ExitStack | None = None) -> CallProbe:
        """The probes of one call of a program; its arguments are known from outside, or looked at."""
        look = super().look(code, args, names)
        found = code.program.module.graph.find_nodes(op="placeholder")
        for at, arg in zip(found, args, strict=False):
            look.known[at] = [self._of(tensor, at.name) for tensor in tensors(arg)]
        return look

    def begin(self, loop: LoopTrace, number: int) -> Any:
        """An iteration begins."""
        self._number[loop.path] = number
        return super().begin(loop, number)

    def note(self, look: CallProbe, place: int, value: object, at: float) -> None:
        """A call gave this."""
        super().note(look, place, value, at)
        call, node, code = look.code.calls[place], look.code.nodes[place], look.code
        found = look.known[call] = []
        sources = [known for source in call.all_input_nodes for known in self._source(look, source)]
        for tensor in tensors(value):
            counts = health(tensor)
            if counts is None:
                continue
            known = _known(call.name if node is None else node.name, tensor, counts)
            if counts.bad:
                known = replace(known, origin=self._origin(look, node, known, sources, tensor))
            self._known[tensor] = known
            found.append(known)
        if node is not None and code.owned[place] and found:
            path = (*look.path, node.id)
            self.health[path] = sum((known.health for known in found), self.health.get(path, Health()))
            if bad := next((known.origin for known in found if known.origin), None):
                self.origins.setdefault(path, bad)

    def _source(self, look: CallProbe, at: Any) -> list[KnownValue]:
        """Known facts of an operand; facts of a constant are computed at its first use."""
        if at not in look.known and at.op == "get_attr":
            node = look.code.program.node_of.get(at.name)
            constant = getattr(look.code.program.module, at.target, None)
            look.known[at] = [self._of(tensor, node.name if node else at.name) for tensor in tensors(constant)]
        found: list[KnownValue] = look.known.get(at, [])
        return found

    def _origin(
        self, look: CallProbe, node: Node | None, made: KnownValue, sources: Sequence[KnownValue], tensor: torch.Tensor
    ) -> Origin:
        """The origin of bad numbers in a call's result."""
        is_region = node is not None and node.op in REGIONS
        if is_region:
            before = self._known.get(tensor)  # a result of a branch is that of the inner call
            if before is not None and before.origin is not None:
                return before.origin  # type: ignore[no-any-return]
            if (inside := self._inside.pop((*look.path, node.id), None)) is not None:  # type: ignore[union-attr]
                return inside
        bad = sorted((s.origin for s in sources if s.origin), key=lambda origin: not origin.value.health.nan)
        new_nan = made.health.nan and not any(source.health.nan for source in sources)
        if bad and (node is None or is_region or not new_nan):
            return bad[0]
        inputs = tuple({source.name: source for source in sources}.values())
        path = look.path if node is None else (*look.path, node.id)
        numbers = tuple(self._number[path[:d]] for d in range(1, len(path)) if path[:d] in self._number)
        found = Origin(node, made, inputs, path, numbers, bad[0].first if bad else None)
        for depth in range(1, len(path)):
            self._inside.setdefault(path[:depth], found)
        return found

    def _of(self, tensor: torch.Tensor, name: str) -> KnownValue:
        found: KnownValue | None = self._known.get(tensor)
        return found or self._from_outside(name, tensor)

    def _from_outside(self, name: str, tensor: torch.Tensor) -> KnownValue:
        """A value that no call of this run made."""
        counts = health(tensor) or Health()
        known = _known(name, tensor, counts)
        if counts.bad:
            known = replace(known, origin=Origin(None, known))
        self._known[tensor] = known
        return known


def _known(name: str, tensor: torch.Tensor, counts: Health) -> KnownValue:
    few = tensor.numel() <= FEW and tensor.layout == torch.strided and not tensor.is_complex()
    return KnownValue(name, str(Spec.of(tensor)), counts, tuple(tensor.flatten().tolist()) if few else ())
