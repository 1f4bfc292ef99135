"""The calls of modules in a step, in order of computation: the units of pipeline stages. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from tfnb.graph import Node, Value, Variable
from tfnb.graph.device_request import parse
from tfnb.graph.subgraph import group_keys
from tfnb.passes import StepGraph
from tfnb.passes.liveness import nominal
from tfnb.passes.resolve import resolve
from tfnb.placement.shards import nbytes, together

_GRADIENT = "gradient"
_NOWHERE = frozenset({"tfnb.placeholder", "tfnb.constant", "tfnb.assign", "tfnb.group"})  # no stage computes these


@dataclass(eq=False)
class ModuleCall:
    """A call of an innermost module, or a name scope, with the nodes around it.

    asked: the first node with a request of the user for a task. variables: those that it is the first to read;
    slots: other Variables that are updated with these.
    """

    path: tuple[str, ...]
    nodes: list[Node] = field(default_factory=list)
    asked: Node | None = None
    variables: list[Variable] = field(default_factory=list)
    slots: list[Variable] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The path of the module, or the name of the first node outside of modules."""
        return ".".join(self.path) or self.nodes[0].name

    @property
    def task(self) -> int | None:
        """The task requested by the user."""
        return None if self.asked is None else task_of(self.asked)

    @property
    def bytes(self) -> int:
        """Bytes of Variables and slots."""
        return sum(map(nbytes, (*self.variables, *self.slots)))


class Passage(NamedTuple):
    """A value of one call used by later calls. Calls by number; bytes: of the value, and of its gradient."""

    source: int
    users: tuple[int, ...]
    bytes: tuple[int, ...]


def task_of(node: Node) -> int | None:
    """The number of the task in a node's request."""
    request = None if node.device is None else parse(node.device)
    return None if request is None or request.job == "ps" else request.task


def is_gradient(node: Node) -> bool:
    """Whether a node is of a recorded derivative."""
    return _GRADIENT in node.tags


def forward_nodes(step: StepGraph) -> list[Node]:
    """The nodes of the forward pass: needed by gradients or fetches, or recorded in the same modules."""
    state = resolve(step.graph, step.feeds)
    behind: set[int] = set()
    for node in step.graph.nodes:
        same = state.resolved(Value(node.id)).node
        if (
            is_gradient(node)
            or node.id in state.updated
            or same in behind
            or any(v.node in behind for v in node.inputs)
        ):
            behind.add(node.id)
    ahead = {node.id: node for node in step.graph.nodes if node.id not in behind and node.op not in _NOWHERE}
    roots = {node.forward for node in step.graph.nodes if is_gradient(node)} | {value.node for value in step.fetches}
    needed = _ancestors(ahead, [root for root in roots if root in ahead] or ahead)
    paths = {ahead[i].scope[:-1] for i in needed} - {()}
    needed |= _ancestors(ahead, [node.id for node in ahead.values() if node.scope[:-1] in paths])
    return [node for node in ahead.values() if node.id in needed]


def _ancestors(nodes: Mapping[int, Node], roots: Iterable[int]) -> set[int]:
    """The ids of the roots, and of all nodes before them."""
    needed, stack = set[int](), [*roots]
    while stack:
        node = nodes[stack.pop()]
        if node.id not in needed:
            needed.add(node.id)
            stack += [i for i in (*(v.node for v in node.inputs), *node.control) if i in nodes]
    return needed


def without_writes(step: StepGraph, forward: Sequence[Node]) -> tuple[Value, ...]:
    """Fetches for all forward and backward work of a step, and none of its writes."""
    made, by_id = {node.id for node in forward}, step.graph.contents.by_id
    ends = {node.id: None for node in forward if node.outputs}
    for node in forward:
        for value in node.inputs:
            ends.pop(value.node, None)
    found = [Value(end) for end in ends] + [value for value in step.fetches if value.node in made]
    for node in step.graph.nodes:
        if not is_gradient(node):
            found += [v for v in node.inputs if v.node in by_id and is_gradient(by_id[v.node])]
    found += [v for v in step.fetches if v.node in by_id and is_gradient(by_id[v.node])]
    return tuple(dict.fromkeys(found))


def module_calls(nodes: Sequence[Node]) -> list[ModuleCall]:
    """The calls of modules around forward nodes, in order.

    A node of a module around the last call goes with that call, such as the sum behind a residual branch, and one in
    front of the first call inside of a module with that one. A node that asks for another task than its call begins a
    call of its own, and so does another weight in a module of the same name: the next turn of a loop over layers. What
    reads a Variable goes with its first user.
    """
    reads = {node.id: node.attrs["variable"] for node in nodes if node.op == "tfnb.read"}
    calls: list[ModuleCall] = []
    held: dict[str, Variable] = {}  # of the last call, by the attribute of the module
    for node in nodes:
        if node.id in reads:
            continue
        path, task = node.scope[:-1], task_of(node)  # the torch function stands at the end
        now = calls[-1] if calls else ModuleCall(path)
        mine = {_attribute(reads[v.node]): reads[v.node] for v in node.inputs if v.node in reads}
        is_within = now.path[: len(path)] == path and (path == now.path or not mine)
        is_before = not held and path[: len(now.path)] == now.path
        is_again = any(held.get(name, variable) is not variable for name, variable in mine.items())
        if not calls or task not in (None, now.task) or is_again or not (is_within or is_before):
            calls.append(now := ModuleCall(path))
            held = {}
        elif is_before:
            now.path = path
        held |= mine
        now.nodes.append(node)
        now.asked = now.asked or (node if task is not None else None)
    _take_reads(nodes, calls)
    return calls


def _attribute(variable: Variable) -> str:
    """The attribute of a module that a Variable was: the end of its name, without a number for uniqueness."""
    return re.sub(r"_\d+$", "", variable.name.rpartition(".")[2])


def colocated_calls(calls: Sequence[ModuleCall]) -> list[tuple[int, int]]:
    """The first and last call, by number, of each colocation group with members in several calls."""
    numbers: dict[str, list[int]] = {}
    for number, call in enumerate(calls):
        for key in dict.fromkeys(key for node in call.nodes for key in group_keys(node)):
            numbers.setdefault(key, []).append(number)
    return [(found[0], found[-1]) for found in numbers.values() if len(found) > 1]


def take_slots(step: StepGraph, calls: Sequence[ModuleCall]) -> None:
    """Give each call the Variables updated together with its own."""
    owner = {variable: call for call in calls for variable in call.variables}
    for group in together(step.graph):
        read = [variable for variable in group if variable in owner]
        for variable in group if read else ():
            if variable not in owner:
                beside = next((v for v in read if v.shape == variable.shape), read[0])
                owner[beside].slots.append(variable)


def passages(step: StepGraph, calls: Sequence[ModuleCall], sizes: Mapping[str, int]) -> list[Passage]:
    """All values passed from calls to later calls. sizes: of symbols, by name."""
    made_by = {node.id: number for number, call in enumerate(calls) for node in call.nodes}
    users: dict[Value, set[int]] = {}
    for number, call in enumerate(calls):
        for node in call.nodes:
            for value in node.inputs:
                if made_by.get(value.node, number) != number:
                    users.setdefault(value, set()).add(number)
    is_trained = any(is_gradient(node) for node in step.graph.nodes)
    found = []
    for value, numbers in users.items():
        spec = step.graph.contents.by_id[value.node].outputs[value.index]
        size = prod(nominal(spec, sizes)) * spec.dtype.itemsize
        is_back = is_trained and (spec.dtype.is_floating_point or spec.dtype.is_complex)
        found.append(Passage(made_by[value.node], tuple(sorted(numbers)), (size,) * (2 if is_back else 1)))
    return found


def seconds_of_calls(
    step: StepGraph, calls: Sequence[ModuleCall], seconds: Mapping[int, float]
) -> list[float]:  # fmt: skip
    """Seconds of each call, with those of its gradients. seconds: of nodes, by id."""
    at = {node.id: number for number, call in enumerate(calls) for node in call.nodes}
    found = [0.0] * len(calls)
    for node in step.graph.nodes:
        if node.id not in at and is_gradient(node):
            beside = (node.forward, *(value.node for value in node.inputs))
            number = next((at[i] for i in beside if i is not None and i in at), None)
            if number is not None:
                at[node.id] = number
        if node.id in at:
            found[at[node.id]] += seconds.get(node.id, 0.0)
    return found


def _take_reads(nodes: Sequence[Node], calls: Sequence[ModuleCall]) -> None:
    first: dict[int, ModuleCall] = {}
    for call in calls:
        for node in call.nodes:
            for value in node.inputs:
                first.setdefault(value.node, call)
    for node in nodes:
        if node.op == "tfnb.read" and node.id in first:
            call, variable = first[node.id], node.attrs["variable"]
            call.nodes.append(node)
            if not any(variable in each.variables for each in calls):
                call.variables.append(variable)
