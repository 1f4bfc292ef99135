"""From the dataflow form to the machine's templates: unused ops are dropped, nodes become generated code.

Nodes that wait for the same ports become one region, a generated function, so that no node waits for more than its own
inputs. What takes long (products, convolutions, ops of other libraries) is a region of its own, and goes to a pool.
In a part of a step what is there from the start is not waited for, and nothing is split off: a part without receives is
one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from tfnb.execution.dataflow.flow_calls import CALLS, SENDS, ended, guarding, left_to_commit, node_of, nothing, sizes_of
from tfnb.execution.dataflow.machine import (
    CALL,
    EMPTY,
    ENTER,
    EXIT,
    MERGE,
    NEXT,
    RECV,
    SEND,
    SHORT,
    SINK,
    SWITCH,
    WAIT,
    WORK,
    Step,
    Template,
)  # fmt: skip
from tfnb.execution.dataflow.pool import OWN
from tfnb.execution.lowering.lower import subprogram, unfed
from tfnb.execution.lowering.program import Program
from tfnb.graph import Contents, Node, Spec, Subgraph, Value, ops
from tfnb.graph.contents import distinct
from tfnb.graph.graph import new_id
from tfnb.passes import ONCE, stack
from tfnb.passes.flow import frames
from tfnb.passes.flow.cut import RECV as RECEIVES
from tfnb.passes.flow.cut import SEND as SENT
from tfnb.passes.flow.cut import Edge, Part, needed
from tfnb.passes.flow.frames import Op, Port
from tfnb.passes.flow.microbatch_schedules import is_backward, phase

LONG = 2**21  # multiplications that are worth a thread of their own
_NOMINAL = 32  # taken for a size that only a run knows
_OURS = frozenset({"aten", "prims", "tfnb", "tfnb_pure"})  # what other libraries' ops take, nobody knows
_CONTROL = {
    frames.SWITCH: SWITCH, frames.MERGE: MERGE, frames.ENTER: ENTER, frames.EXIT: EXIT, frames.NEXT: NEXT
}  # fmt: skip
_SHORT = frozenset({frames.COUNT, frames.BELOW, frames.TRUTH, frames.LOOPCOND})  # less work than to queue them
_APART = frozenset({"tfnb.read", "tfnb.assign", "tfnb.constant", "tfnb.group", "tfnb.placeholder", "tfnb.guard"})
_UNSTACKED = tuple(run for run in ONCE if run is not stack)  # of parts, whose products were stacked before the cut

Edges = list[tuple[Step, int]]


@dataclass(slots=True)
class MachinePlan:
    """A part's plan for the machine: the template of the root frame, and the edges of its inputs."""

    root: Template
    feeds: list[Edges]
    storages: dict[Any, Edges]  # by Variable
    given: list[tuple[Edges, Any]]  # constants
    run: Edges  # the number of the run
    programs: list[Program]
    waits: list[Step]  # what may wait


class Planner:
    """One plan under construction. spec: of the root's values, fed ones included. updates: those deferred to the
    commit.

    function: of a region's program, what computes it.
    """

    def __init__(
        self, part: Part, spec: Callable[[Value], Spec], seed: int, updates: frozenset[int] = frozenset(),
        function: Callable[[Program], Callable[..., Any]] = attrgetter("forward"),
    ) -> None:  # fmt: skip
        self.part, self.flow, self.root_spec, self.seed, self.updates = part, part.flow, spec, seed, updates
        self.function = function
        self.is_cut = bool(part.sends or part.receives)
        self.templates = [
            Template(frame.parallel, number, part.place.number) for number, frame in enumerate(self.flow.frames)
        ]
        self.edges: dict[Port, Edges] = {}
        self.makers: dict[Port, tuple[Step, int]] = {}  # who gives a port, as which output
        self.programs: list[Program] = []
        self.stored = {  # reads of what is stored
            Port(number): node_of(op).attrs["variable"] for number, op in enumerate(self.flow.ops)
            if op.kind == frames.NODE and node_of(op).op == "tfnb.read"
        }  # fmt: skip
        self.specs = dict(self._known())

    def plan(self, feeds: Sequence[Port]) -> MachinePlan:
        """The plan for all ends of the part."""
        ends = {port for end in self.part.ends.values() for port in (end.port, *end.after) if port is not None}
        sends = [number for number, op in enumerate(self.flow.ops) if op.kind == SENT]
        kept = self._kept(ends, (*self.part.effects, *sends))
        regions = self._segments(kept) if self.is_cut else self._regions(kept)
        member = {number: place for place, members in enumerate(regions) for number in members}
        taken: dict[int, dict[Port, None]] = {}  # of each op, what is taken outside of its region
        for number in kept:
            for port in self.sources(self.flow.ops[number]):
                if number not in member or member.get(port.op) != member[number]:
                    taken.setdefault(port.op, {})[port] = None
        for port in ends:
            taken.setdefault(port.op, {})[port] = None
        for members in regions:
            self._region(members, [port for number in members for port in taken.get(number, ())])
        for number in kept:
            if number not in member:
                self._op(number)
        for place, end in self.part.ends.items():
            sink = self._step(SINK, 0, None, [] if end.port is None else [end.port], end.after)
            sink.number = place
        return self._sealed(feeds)

    def _sealed(self, feeds: Sequence[Port]) -> MachinePlan:
        for port, edges in self.edges.items():
            if port in self.makers:
                step, index = self.makers[port]
                step.outs += [[] for _ in range(index + 1 - len(step.outs))]
                step.outs[index] = [*step.outs[index], *edges]  # several ends of a region are one output
        for template in self.templates:
            template.seal()
        _rank(self.templates)
        storages: dict[Any, Edges] = {}
        for port, variable in self.stored.items():
            storages.setdefault(variable, []).extend(self.edges.get(port, ()))
        constants = [
            (self.edges[Port(number)], op.node.attrs["value"]) for number, op in enumerate(self.flow.ops)
            if op.node is not None and op.node.op == "tfnb.constant" and Port(number) in self.edges
        ]  # fmt: skip
        run = next(Port(number) for number, op in enumerate(self.flow.ops) if op.kind == frames.RUN)
        return MachinePlan(
            self.templates[0], [self.edges.get(port, []) for port in feeds], storages, constants,
            self.edges.get(run, []), self.programs,
            [step for template in self.templates for step in template.steps if step.kind == WAIT],
        )  # fmt: skip

    # -- what is there, and what is needed --------------------------------------------------------------------

    def sources(self, op: Op) -> list[Port]:
        """The ports awaited by an op at run time."""
        inputs = op.inputs
        if op.kind == frames.NODE and node_of(op).op == ops.WITH_GRADIENT:
            inputs = tuple(op.inputs[ref.input] for ref in node_of(op).attrs["values"])
        return [*replace(op, inputs=inputs).sources]

    def _kept(self, ends: Iterable[Port], effects: Sequence[int]) -> list[int]:
        """Ops needed for the requested ends and effects."""
        return needed(self.flow, tuple(ends), effects)

    def _known(self) -> Iterator[tuple[tuple[int, Value], Spec]]:
        """The specs of the values of each scope."""
        for number, scope in enumerate(self.flow.scopes):
            yield from (((number, node.value()), node.outputs[0]) for node in scope.placeholders)
        for op in self.flow.ops:
            if op.node is not None:
                yield from (((op.scope, op.node.value(i)), spec) for i, spec in enumerate(op.node.outputs))

    def _spec(self, op: Op, value: Value) -> Spec:
        return self.specs.get((op.scope, value)) or self.root_spec(value)

    # -- regions ----------------------------------------------------------------------------------------------

    def _regions(self, kept: Sequence[int]) -> list[list[int]]:
        """Nodes that become one function: they wait for the same ports, in one scope and on one device.

        A value that comes from another device, or from an op that takes long, is waited for by itself.
        """
        bits: dict[Port, int] = {}
        waits: dict[int, int] = {}  # of each node that is in a larger region: a bit for each port
        groups: dict[Any, list[int]] = {}
        for number in kept:
            op = self.flow.ops[number]
            if not self._is_computed(number):
                continue
            if self._takes_long(op):
                groups[number] = [number]
                continue
            mask = 0
            for port in self.sources(op):
                joins = port.op in waits and node_of(self.flow.ops[port.op]).device == node_of(op).device
                mask |= waits[port.op] if joins else 1 << bits.setdefault(port, len(bits))
            waits[number] = mask
            groups.setdefault((op.scope, node_of(op).device, mask), []).append(number)
        return list(groups.values())

    def _segments(self, kept: Sequence[int]) -> list[list[int]]:
        """Nodes of a part that become one function: they wait for the same receives and control ops.

        What is fed, stored or constant is there from the start.
        """
        bits: dict[Port, int] = {}
        waits: dict[int, int] = {}
        groups: dict[Any, list[int]] = {}
        for number in kept:
            op = self.flow.ops[number]
            if not self._is_computed(number):
                continue
            mask = 0
            for port in self.sources(op):
                if port.op in waits and self.flow.ops[port.op].frame == op.frame:
                    mask |= waits[port.op]
                elif not self._is_given(port):
                    mask |= 1 << bits.setdefault(port, len(bits))
            waits[number] = mask
            groups.setdefault((op.scope, mask), []).append(number)
        return list(groups.values())

    def _is_computed(self, number: int) -> bool:
        """Whether an op is a node that generated code computes."""
        op = self.flow.ops[number]
        is_apart = op.kind != frames.NODE or node_of(op).op in _APART or frames.uses_queue(op)
        return not is_apart and number not in self.updates

    def _is_given(self, port: Port) -> bool:
        """Whether a value is there when the part begins."""
        op = self.flow.ops[port.op]
        is_constant = op.kind == frames.NODE and node_of(op).op == "tfnb.constant"
        return is_constant or op.kind in (frames.FEED, frames.RUN, frames.START) or port in self.stored

    def _takes_long(self, op: Op) -> bool:
        node = node_of(op)
        if node.op in ops.REGIONS or (node.op.count(".") > 1 and node.op.partition(".")[0] not in _OURS):
            return True
        return work(node, [self._spec(op, value) for value in node.inputs]) > LONG

    def _region(self, members: Sequence[int], taken: Sequence[Port]) -> None:
        """The step that computes some nodes with generated code."""
        found = [self.flow.ops[number] for number in members]
        first = found[0]
        ends = [port for port in taken if self._is_end(port)]
        outs = [port for port in taken if port not in ends]
        subgraph, given = self._subgraph(members, outs)
        after = [port for op in found for port in op.after if port.op not in members]
        outputs = [value for value in subgraph.outputs if value is not None]
        program = subprogram(subgraph, outputs, self.seed, once=_UNSTACKED if self.is_cut else ONCE)
        self.programs.append(program)
        schedule = self.flow.frames[first.frame].schedule if self.is_cut else ""
        is_long = len(members) == 1 and not self.is_cut and self._takes_long(first)
        kind = WORK if schedule or is_long else CALL
        run = next((op.run for op in found if op.run is not None), None)
        function = self.function(program)
        forward = function if not ends else ended(function)
        step = self._step(kind, first.frame, forward, [*given, *([] if run is None else [run])], after)
        if run is None:
            self._preset(step, 0)
        step.op, step.lane = first, OWN if schedule else node_of(first).device
        step.phase = phase(schedule, is_backward=all(is_backward(node_of(op)) for op in found))
        self.makers.update({port: (step, index) for index, port in enumerate(outs)})
        self.makers.update({port: (step, len(outs)) for port in ends})

    def _subgraph(self, members: Sequence[int], outs: Sequence[Port]) -> tuple[Subgraph, list[Port]]:
        """The nodes of a region with these outputs, and the ports from outside that its inputs stand for."""
        found = [self.flow.ops[number] for number in members]
        ids = {node_of(op).id for op in found}
        given: dict[Port, Node] = {}

        def value(port: Port, spec: Spec) -> Value:
            if port.op in members:
                return node_of(self.flow.ops[port.op]).value(port.index)
            if port not in given:
                name = f"input_{len(given)}"
                given[port] = Node(id=new_id(), name=name, op="tfnb.placeholder", outputs=(spec,))
            return given[port].value()

        nodes = []
        for op in found:
            node = node_of(op)
            inputs = [value(p, self._spec(op, v)) for p, v in zip(op.inputs, node.inputs, strict=True)]
            for spec, port in op.sizes:
                value(port, spec)
            control, effects = (tuple(i for i in of if i in ids) for of in (node.control, node.effects))
            nodes.append(replace(node, inputs=tuple(inputs), control=control, effects=effects))
        return Subgraph(
            Contents((*given.values(), *distinct(nodes))), tuple(node.value() for node in given.values()),
            tuple(node_of(self.flow.ops[port.op]).value(port.index) for port in outs),
        ), list(given)  # fmt: skip

    def _is_end(self, port: Port) -> bool:
        """Whether a port tells that a node is done, and has no value."""
        return port.index >= len(node_of(self.flow.ops[port.op]).outputs)

    # -- steps ------------------------------------------------------------------------------------------------

    def _step(
        self, kind: int, frame: int, call: Callable[..., Any] | None, inputs: Sequence[Port], after: Sequence[Port] = ()
    ) -> Step:
        """A new step that takes these ports."""
        template = self.templates[frame]
        step = Step(kind, template, call)
        step.base, step.count = len(template.slots), len(inputs)
        step.stop = step.base + step.count
        step.waits = len(after) + (0 if kind == MERGE else step.count)
        template.slots += [EMPTY if kind == MERGE else None] * step.count
        for slot, port in enumerate(inputs, step.base):
            self.edges.setdefault(port, []).append((step, slot))
        for port in after:
            self.edges.setdefault(port, []).append((step, -1))
        return step

    def _preset(self, step: Step, value: object) -> None:
        """A last argument of the step's call that is always the same."""
        step.frame.slots.append(value)
        step.stop += 1

    def _op(self, number: int) -> None:
        """Make the step of an op outside of regions; none for inputs and aliases of other ports."""
        op = self.flow.ops[number]
        if op.kind in (frames.FEED, frames.RUN):
            return
        if op.kind in _CONTROL:
            step, outs = self._control(number, op)
        elif op.kind == frames.NODE:
            node = node_of(op)
            if node.op == "tfnb.placeholder":
                raise unfed(node, node.name)
            if node.op in ("tfnb.read", "tfnb.assign", "tfnb.constant"):
                return
            step, outs = self._node(number, op, node)
        elif op.kind in (SENT, RECEIVES):
            step, outs = self._crossing(op)
        else:
            sizes = [port for _, port in op.sizes]
            call = CALLS[op.kind](op, sizes_of([spec for spec, _ in op.sizes]))
            kind, outs = (SHORT, 1) if op.kind in _SHORT else (CALL, 2)
            step = self._step(kind, op.frame, call, [*op.inputs, *sizes], op.after)
            step.outs = [[] for _ in range(outs)]
        step.op = op
        for index in range(outs):
            self.makers[Port(number, index)] = step, index

    def _control(self, number: int, op: Op) -> tuple[Step, int]:
        """The step of a Switch, Merge, Enter, Exit or NextIteration, and the number of its outputs."""
        frame = self.flow.frames[op.frame].parent if op.kind == frames.ENTER else op.frame
        step = self._step(_CONTROL[op.kind], frame, None, op.inputs, op.after)
        if op.kind == frames.ENTER:
            step.inner, step.constant = self.templates[op.frame], op.part[1]
            step.inner.enters += 1
        step.number = number
        outs = 2 if op.kind == frames.SWITCH else 1
        step.outs = [[] for _ in range(outs)]
        return step, outs

    def _node(self, number: int, op: Op, node: Node) -> tuple[Step, int]:
        """The step of a queue operation, guard, update or node without a kernel, and the number of its outputs."""
        if "queue" in node.attrs:
            step, outs = self._step(WAIT, op.frame, None, op.inputs, op.after), len(node.outputs) + 2
            step.number = number
            step.outs = [[] for _ in range(outs)]
            return step, outs
        if node.op == "tfnb.guard":
            return self._step(CALL, op.frame, guarding(node), op.inputs, op.after), 1
        if number in self.updates:
            return self._step(CALL, op.frame, left_to_commit(node), op.inputs, op.after), len(node.outputs) + 1
        return self._step(CALL, op.frame, nothing, [], [*op.inputs, *op.after]), 1

    def _crossing(self, op: Op) -> tuple[Step, int]:
        """The step of a Send or a Receive, and the number of its outputs."""
        edge: Edge = op.part
        is_sent = op.kind == SENT
        step = self._step(SEND if is_sent else RECV, op.frame, SENDS[edge.kind], op.inputs, op.after)
        step.number, step.to, outs = edge.number, (edge.to if is_sent else edge.source).number, 0 if is_sent else 1
        step.outs = [[] for _ in range(outs)]
        return step, outs


# -- facts of ops -----------------------------------------------------------------------------------------------------


def work(node: Node, inputs: Sequence[Spec]) -> float:
    """About how many multiplications and additions a node takes."""
    made = float(sum(_count(spec.shape) for spec in node.outputs))
    name = node.op.split(".")[1] if node.op.count(".") > 1 else ""
    if not inputs or not any(part in name for part in _PRODUCTS):
        return made
    inner = max(inputs, key=lambda spec: len(spec.shape)).shape if "conv" not in name else inputs[1].shape
    return made * _count(inner[1:] if "conv" in name else inner[-1:])


_PRODUCTS = ("mm", "matmul", "conv", "attention", "linear", "lstm", "gru", "recurrent")


def _count(shape: Sequence[Any]) -> int:
    return math.prod(size if isinstance(size, int) else _NOMINAL for size in shape)


def _rank(templates: Iterable[Template]) -> None:
    """The length of the longest way from each step to the end of its iteration, in steps that go to the pool."""
    for template in templates:
        left = {step: 0 for step in template.steps}
        inside = {
            s: [t for edges in s.outs for t, _ in edges if t.frame is template]
            for s in template.steps
            if s.kind != NEXT
        }
        for targets in inside.values():
            for target in targets:
                left[target] += 1
        order = [step for step in template.steps if not left[step]]
        for step in order:  # grows while it is read
            for target in inside.get(step, ()):
                left[target] -= 1
                if not left[target]:
                    order.append(target)
        for step in reversed(order):
            behind = max((target.rank for target in inside.get(step, ())), default=0.0)
            step.rank = behind + (1.0 if step.kind == WORK else 0.001)
