"""Groups of pointwise nodes in generated code, each of which a compiler can make one kernel.

An unrolled loop computes the same groups at every iteration: those with equal keys share one kernel, so that a step of
thousands of nodes costs the compiling of a few. Everything here is about one choice of sizes.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_map

from tfnb.execution.lowering.bindings import QUICK
from tfnb.execution.lowering.program import Program
from tfnb.graph.op_facts import facts, kernel
from tfnb.graph.ops import overload

aten = torch.ops.aten
LARGEST = 1024  # nodes of a group: a compiler takes a second for a few hundred
WORTH_A_KERNEL = 8  # calls that a step saves by it
MOST_KERNELS = 16
_BINDINGS = frozenset(QUICK.values())
_NO_MEMBERS = (aten.clone.default,)  # makes memory of one's own, which a compiler may think needless

Kernel = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def _splits(op: Any) -> bool:
    """Whether an op gives pieces of a tensor."""
    return op is not None and facts(op).splits


class Layout(NamedTuple):
    """What a kernel is compiled for."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        """A tensor like it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes that one kernel can stand for. Equal keys: the same computation on values of the same layout."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    key: Hashable
    saves: int  # calls


class Layouts(fx.Interpreter):
    """Runs generated code once and keeps what each value looks like; integers are kept as they are."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.of: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and note its result."""
        result = super().run_node(n)
        self.of[n] = tree_map(_layout, result)
        return result


def _layout(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or value.is_quantized:
        return None
    return Layout(tuple(value.shape), value.stride(), value.dtype, value.device)


def groups(program: Program, layouts: Mapping[fx.Node, Any]) -> list[Group]:
    """The groups of a program that are worth a kernel; no way through the graph leaves a group and comes back to it."""
    finder = _Finder(program, layouts)
    found = [group for nodes in finder.components() for group in finder.made(nodes)]
    counts: Counter[Hashable] = Counter()
    for group in found:
        counts[group.key] += group.saves
    chosen = {key for key, saves in counts.most_common(MOST_KERNELS) if saves >= WORTH_A_KERNEL}
    return [group for group in found if group.key in chosen]


class _Finder:
    """Pointwise nodes, and views and concatenations between them, by the number of other nodes they wait for.

    A node's level grows where a way through the graph enters or leaves the kinds that can be grouped. Connected nodes
    of one level are a group: a way back into it would come from a higher level.
    """

    def __init__(self, program: Program, layouts: Mapping[fx.Node, Any]) -> None:
        self.program, self.layouts = program, layouts
        self.op: dict[fx.Node, torch._ops.OpOverload | None] = {}  # of nodes that can be in a group; None: a getitem
        self.level: dict[fx.Node, int] = {}
        for node in program.module.graph.nodes:
            self._place(node)

    def _place(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        fits = self._fits(node)
        level = max((self.level[s] + ((s in self.op) != fits) for s in sources), default=0)
        if (
            fits
            and self.op[node] is aten.cat.default
            and any(self.level[s] < level or s not in self.op for s in sources)
        ):
            del self.op[node]  # of values from many places: it stays between groups
            level = max(self.level[s] + (s in self.op) for s in sources)
        self.level[node] = level

    def _fits(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not self._is_plain(node):
            return False
        if node.target is operator.getitem:
            if not _splits(self.op.get(node.all_input_nodes[0])):
                return False
            self.op[node] = None
            return True
        op = self._overload(node)
        if op is None or op in _NO_MEMBERS or (_splits(op) and node.args[0] in self.op):
            return False
        if torch.Tag.pointwise in op.tags or facts(op).is_view or op is aten.cat.default:
            self.op[node] = op
            return True
        return False

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether all tensors are dense, of floats, integers or truths, and on one device."""
        values = [self.layouts[n] for n in (node, *node.all_input_nodes)]
        leaves = [leaf for value in values for leaf in (value if type(value) in (list, tuple) else [value])]
        found = [leaf for leaf in leaves if isinstance(leaf, Layout)]
        devices = {leaf.device for leaf in found}
        return len(devices) == 1 and None not in leaves and not any(leaf.dtype.is_complex for leaf in found)

    def _overload(self, node: fx.Node) -> torch._ops.OpOverload | None:
        if isinstance(node.target, torch._ops.OpOverload):
            return node.target
        owner = self.program.node_of.get(node.name) if node.target in _BINDINGS else None
        found = None if owner is None else kernel(overload(owner.op))  # torch's binding has many overloads
        return found if isinstance(found, torch._ops.OpOverload) else None

    def components(self) -> Iterable[list[fx.Node]]:
        """Connected nodes of one level, in order, without views at the edge that others need too."""
        leader: dict[fx.Node, fx.Node] = {}

        def find(node: fx.Node) -> fx.Node:
            while leader[node] is not node:
                leader[node] = leader[leader[node]]
                node = leader[node]
            return node

        for node in self.op:
            leader[node] = node
            for source in node.all_input_nodes:
                if source in self.op and self.level[source] == self.level[node]:
                    leader[find(source)] = find(node)
        found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.op:
            found[find(node)].append(node)
        for nodes in found.values():
            for start in range(0, len(nodes), LARGEST):
                yield self._trimmed(nodes[start : start + LARGEST])

    def _trimmed(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Without views of values from outside that somebody outside takes, and views that only others take."""
        inside = dict.fromkeys(nodes)
        for node in nodes:
            if self._moves(node) and not any(s in inside for s in node.all_input_nodes) and self._escapes(node, inside):
                del inside[node]
        for node in reversed(nodes):
            if node in inside and self._moves(node) and not any(user in inside for user in self._takers(node)):
                del inside[node]
        split = [n for n in inside if self.op[n] is None and n.args[0] not in inside]
        return [node for node in inside if node not in split]

    def _moves(self, node: fx.Node) -> bool:
        op = self.op[node]
        return op is None or facts(op).is_view

    def _takers(self, node: fx.Node) -> list[fx.Node]:
        """Who takes a value, or a part of it."""
        found: list[fx.Node] = []
        for user in node.users:
            found.extend(user.users if user.target is operator.getitem else [user])
        return found

    def _escapes(self, node: fx.Node, inside: Mapping[fx.Node, None]) -> bool:
        return any(user not in inside for user in self._takers(node))

    def made(self, nodes: list[fx.Node]) -> list[Group]:
        """The group of these nodes, if it saves anything."""
        saves = sum(not self._moves(node) for node in nodes) - 1
        if saves < 1:
            return []
        inside = set(nodes)
        sources = [s for node in nodes for s in node.all_input_nodes if s not in inside]
        inputs = tuple(s for s in dict.fromkeys(sources) if isinstance(self.layouts[s], Layout))
        outputs = tuple(n for n in nodes if any(u not in inside for u in n.users) and not _splits(self.op[n]))
        return [Group(tuple(nodes), inputs, outputs, self._key(nodes, inputs, outputs), saves)]

    def _key(self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Hashable:
        number = {node: place for place, node in enumerate((*inputs, *nodes))}

        def named(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return (type(leaf), leaf)
            return f"%{number[leaf]}" if leaf in number else (int, self.layouts[leaf])

        calls = []
        for node in nodes:
            leaves, shape = tree_flatten((node.args, node.kwargs))
            calls.append((self.op[node], tuple(map(named, leaves)), str(shape)))
        layouts = tuple(self.layouts[node] for node in inputs)
        return tuple(calls), layouts, tuple(number[node] for node in outputs)

    def function(self, group: Group) -> fx.GraphModule:
        """The group as a function from its inputs to its outputs; sizes are numbers."""
        graph = fx.Graph()
        new: dict[fx.Node, Any] = {node: graph.placeholder(f"x{i}") for i, node in enumerate(group.inputs)}
        for node in group.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: new[n] if n in new else self.layouts[n])
            new[node] = graph.call_function(self.op[node] or operator.getitem, args, kwargs)
        graph.output(tuple(new[node] for node in group.outputs))
        return fx.GraphModule(torch.nn.Module(), graph)


def function(program: Program, layouts: Mapping[fx.Node, Any], group: Group) -> fx.GraphModule:
    """The group as a function from its inputs to its outputs."""
    return _Finder(program, layouts).function(group)


def with_kernels(program: Program, kernels: Sequence[tuple[Group, Kernel]]) -> fx.GraphModule:
    """The program's code with a call of a kernel in the place of each of these groups."""
    old = program.module.graph
    unit: dict[fx.Node, tuple[Group, Kernel]] = {node: pair for pair in kernels for node in pair[0].nodes}
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in _in_order(old, {node: pair[0] for node, pair in unit.items()}):
        if node not in unit:
            new[node] = graph.node_copy(node, new.__getitem__)
            continue
        group, call = unit[node]
        out = graph.call_function(call, ([new[source] for source in group.inputs],))
        for place, member in enumerate(group.outputs):
            new[member] = graph.call_function(operator.getitem, (out, place))
    return fx.GraphModule(program.module, graph)


def _in_order(graph: fx.Graph, group_of: Mapping[fx.Node, Group]) -> Iterable[fx.Node]:
    """Nodes, and of each group its last one, such that everything comes after what it takes.

    What may come in any order comes in that of the program.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    unit = {node: group_of[node].nodes[-1] if node in group_of else node for node in place}
    waits: Counter[fx.Node] = Counter()
    after: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, own in unit.items():
        for source in {unit[s] for s in node.all_input_nodes} - {own}:
            waits[own] += 1
            after[source].append(own)
    ready = [(place[own], own) for own in dict.fromkeys(unit.values()) if not waits[own]]
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        yield node
        for later in after[node]:
            waits[later] -= 1
            if not waits[later]:
                heapq.heappush(ready, (place[later], later))
