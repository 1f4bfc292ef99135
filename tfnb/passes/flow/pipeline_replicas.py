"""Replicas of a step over microbatches: each has a loop of its own, over every r-th microbatch. Pure.

Of r replicas of a pipeline of S stages, replica j takes the microbatches j, j + r, j + 2 r ..., and its stage s lies at
task j * S + s. The first replica keeps the nodes of the loop of `tfnb.passes.microbatches` and their requests; the
others are copies of the loop, and of the nodes that give it its captured values. Microbatches keep their shares of the
batch and their random numbers, so the results of the loops are parts of those of the one loop: sums are added, extremes
merged, entries of row-sparse gradients concatenated, in the order of the replicas, at the first replica's task. What
stands behind the loop, updates among it, is done once. Variables that microbatches write, such as running statistics,
are the first replica's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tfnb.graph import Contents, Dim, Node, Ref, Spec, Subgraph, Value
from tfnb.graph.contents import distinct, unique
from tfnb.graph.device_request import parse
from tfnb.graph.graph import new_id
from tfnb.graph.node import map_leaves
from tfnb.graph.subgraph import nested
from tfnb.passes.flow.merges import MERGES
from tfnb.passes.flow.places import requested
from tfnb.passes.microbatches import Microbatches, op_node
from tfnb.passes.prune import StepGraph, prune


def replicated(found: Microbatches, replicas: int) -> Microbatches:
    """The step with so many replicas of its loop.

    Feeds: of the original step, then for each replica the rows of its microbatches of each divided feed, the shapes of
    these microbatches for each, and the microbatches' shares of the rows of the whole batch.
    """
    return found if replicas == 1 else _Replication(found, replicas).made()


def stages_of(nodes: Iterable[Node]) -> int:
    """The number of tasks of one replica: the last one that a node asks for, and those before it.

    >>> stages_of([Node(id=1, name="a", op="aten.exp.default", device="task:2")]), stages_of([])
    (3, 0)
    """
    return 1 + max((place.number for place in requested(nodes).values()), default=-1)


@dataclass
class _Replication:
    """The replicas of one loop in the making."""

    found: Microbatches
    replicas: int
    fed: list[Node] = field(default_factory=list)  # placeholders of the replicas
    merging: list[Node] = field(default_factory=list)  # nodes that merge the results of the loops

    def __post_init__(self) -> None:
        contents = self.found.step.whole.contents
        self.by_id, self.loop = contents.by_id, contents.by_id[self.found.loop]
        above = self._above()
        self.own = [node for node in contents.nodes if node.id in above]  # of each replica; the loop is the last one
        self.stages = stages_of(contents.nodes)

    def made(self) -> Microbatches:
        """Build the step."""
        step, before = self.found.step, [*self._divided, *self._of_one_loop]
        given = [dict(zip(before, self._feeds(number, before), strict=True)) for number in range(self.replicas)]
        copies = [[*self._copies(number, feeds)] for number, feeds in enumerate(given)]
        first, *others = copies
        same = self._merged([copy[-1] for copy in copies])
        in_place = {node.id: node for node in first}
        in_place[self.loop.id] = first[-1]
        dropped = {value.node for value in self._of_one_loop}
        loops = tuple(copy[-1].id for copy in others)
        made: list[Node] = []
        for node in step.whole.contents.nodes:
            if node.id in in_place:
                made.append(in_place[node.id])
            elif node.id not in dropped:
                control = (*node.control, *(loops if self.loop.id in node.control else ()))
                made.append(replace(node, inputs=tuple(same.get(v, v) for v in node.inputs), control=control))
            if node.id == self.loop.id:
                made += [*(copy for each in others for copy in each), *self.merging]
        graph = step.whole.derive(Contents(tuple(distinct((*self.fed, *made))), step.graph.contents.guards))
        feeds = (*step.feeds[: len(self.found.divided)], *(value for each in given for value in each.values()))
        fetches = tuple(same.get(value, value) for value in step.fetches)
        apply = step.whole.contents.nodes[-1].id  # the group of all writes
        return replace(self.found, step=StepGraph(graph, prune(graph, fetches, feeds, [apply]), fetches, feeds))

    def _above(self) -> set[int]:
        """Ids of the loop and of the nodes that it needs, without what is fed."""
        fed = {value.node for value in self.found.step.feeds}
        found, stack = set[int](), [self.loop.id]
        while stack:
            number = stack.pop()
            if number not in found and number not in fed:
                found.add(number)
                node = self.by_id[number]
                stack.extend((*(value.node for value in node.inputs), *node.control))
        return found

    # -- feeds --------------------------------------------------------------------------------------------------

    @property
    def _divided(self) -> Iterator[Value]:
        """The divided feeds."""
        feeds = self.found.step.feeds
        return (value for value, is_divided in zip(feeds, self.found.divided, strict=False) if is_divided)

    @property
    def _of_one_loop(self) -> Sequence[Value]:
        """The feeds that the one loop has beside those of the original step: shapes of microbatches, and shares."""
        return self.found.step.feeds[len(self.found.divided) :]

    def _feeds(self, number: int, before: Sequence[Value]) -> Iterator[Value]:
        """Placeholders of a replica in place of feeds; of other sizes on axis 0."""
        names: dict[str, int | str] = {}
        for value in before:
            spec = self._spec(value)
            for symbol in _symbols(spec.shape[:1]):
                names[symbol] = unique(f"{symbol}_{number}", self._known)
        for value in before:
            spec, name = self._spec(value), f"replica_{number}.{self.by_id[value.node].name}"
            shape = tuple(size.rename(names) if isinstance(size, Dim) else size for size in spec.shape)
            self.fed.append(Node(id=new_id(), name=name, op="tfnb.placeholder", outputs=(replace(spec, shape=shape),)))
            yield self.fed[-1].value()

    @cached_property
    def _known(self) -> set[str]:
        """The symbols of the step."""
        return {symbol for node in self.by_id.values() for spec in node.outputs for symbol in _symbols(spec.shape)}

    def _spec(self, value: Value) -> Spec:
        return self.by_id[value.node].outputs[value.index]

    # -- copies -------------------------------------------------------------------------------------------------

    def _copies(self, number: int, given: Mapping[Value, Value]) -> Iterator[Node]:
        """The nodes of a replica, at its tasks; those of the first one keep their ids."""
        inner = (inner for node in self.own for inner in (node, *nested(node)))
        ids = {node.id: new_id() if number else node.id for node in inner}

        def of(value: Value) -> Value:
            return given.get(value) or Value(ids.get(value.node, value.node), value.index)

        def inside(leaf: object) -> object:
            if not isinstance(leaf, Subgraph):
                return leaf
            contents = replace(leaf.contents, nodes=tuple(map(copied, leaf.contents.nodes)))
            outputs = tuple(None if value is None else of(value) for value in leaf.outputs)
            return Subgraph(contents, tuple(map(of, leaf.inputs)), outputs)

        def copied(node: Node) -> Node:
            return replace(
                node, id=ids[node.id], name=_named(node.name, number), device=_at(node.device, number, self.stages),
                inputs=tuple(map(of, node.inputs)), attrs=map_leaves(inside, node.attrs),
                control=tuple(ids.get(i, i) for i in node.control), effects=tuple(ids.get(i, i) for i in node.effects),
                forward=ids.get(node.forward or 0, node.forward),
            )  # fmt: skip

        *above, loop = map(copied, self.own)
        microbatches = number, self.replicas  # the first one, and how many there are until the next one
        yield from (*above, replace(loop, attrs={**loop.attrs, "replicas": microbatches}))

    # -- merges -------------------------------------------------------------------------------------------------

    def _merged(self, loops: Sequence[Node]) -> dict[Value, Value]:
        """The values that stand for the results of the one loop."""
        sums = {at: self._sums(loops, at) for at, result in enumerate(self.found.results) if result.seen is None}
        for at, result in enumerate(self.found.results):
            if result.seen is not None:
                sums[at] = self._weighted(loops, at, result.seen, sums[result.seen])
        return {self.loop.value(at): found[-1] for at, found in sums.items()}

    def _sums(self, loops: Sequence[Node], at: int) -> list[Value]:
        """A result of the first replica, of the first two, and so on; entries at once."""
        way, values = self.found.results[at].way, [loop.value(at) for loop in loops]
        if way == "first":
            return values[:1]
        if way == "entries":
            attrs = {"tensors": tuple(map(Ref, range(len(values)))), "dim": 0}
            node = op_node("replicas.entries", "aten.cat.default", tuple(values), self.loop.outputs[at])
            return [self._put(replace(node, attrs=attrs))]
        op = "aten.add.Tensor" if way == "mean" else MERGES[way].carried  # shares of the batch make a mean a sum
        found = values[:1]
        for value in values[1:]:
            node = op_node(f"replicas.{way}", op, (found[-1], value), self.loop.outputs[at], self_=0, other=1)
            found.append(self._put(node))
        return found

    def _weighted(self, loops: Sequence[Node], at: int, seen: int, seen_before: Sequence[Value]) -> list[Value]:
        """A sum over weights of the first replica, of the first two ...; one without any weight adds nothing.

        seen: which result says whether there was a weight; seen_before: of the first replica, of the first two ...
        """
        found = [loops[0].value(at)]
        for loop, before in zip(loops[1:], seen_before, strict=False):
            spec = self.loop.outputs[seen]
            some = self._put(op_node("replicas.some", "aten.sign.default", (loop.value(seen),), spec, self_=0))
            inputs = found[-1], loop.value(at), some, before
            node = op_node("replicas.sum", "tfnb.add_weighted.default", inputs, self.loop.outputs[at],
                           total=0, value=1, weight=2, seen=3)  # fmt: skip
            found.append(self._put(node))
        return found

    def _put(self, node: Node) -> Value:
        self.merging.append(node)
        return node.value()


def _named(name: str, number: int) -> str:
    """The name of a node of a replica: errors name the task of the node by it."""
    return f"replica_{number}.{name}" if number else name


def _at(device: str | None, number: int, stages: int) -> str | None:
    """The device request of a node in a replica: for a task so many further on, with groups of the replica's own.

    >>> _at("task:1", 1, 3), _at("cpu", 1, 3), _at("/with:h#7", 1, 3), _at(None, 1, 3)
    ('/task:4', '/device:CPU', '/with:h#7_1', None)
    """
    if device is None or not number:
        return device
    request = parse(device)
    if request.task is not None and request.job != "ps":
        request = request._replace(task=request.task + number * stages)
    return str(request._replace(groups=tuple(f"{group}_{number}" for group in request.groups)))


def _symbols(shape: Sequence[int | Dim]) -> Iterator[str]:
    return (symbol for size in shape if isinstance(size, Dim) for symbol in size.symbols)
