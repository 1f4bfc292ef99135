"""In which runs a gradient is there: a branch that is not taken gives the Parameters that it alone uses none.

torch's optimizers leave a Parameter without gradient as it is, and its state: a gradient of zeros would move it by the
momentum of earlier steps, or by weight decay. Presence is None where no path leads, True where one leads in every run,
else a recorded truth value, made of the predicates of the branches on the way. A loop whose count a run decides may
have no iteration; a branch inside a loop's body counts as taken, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from tfnb.gradients.paths import conducted, ways
from tfnb.gradients.walker import Walk
from tfnb.graph import Node, Ref, Spec, Subgraph, Value
from tfnb.graph.graph import new_id
from tfnb.graph.ops import COND, WHILE
from tfnb.recording.subgraphs.capture import AGAIN, append
from tfnb.recording.values.recording import Recording

Presence = torch.Tensor | bool | None

_SIDES = ("then", "else")


def presences(recorder: Recording, ys: Iterable[Value], groups: Sequence[Sequence[Value]]) -> list[Presence]:
    """For each group of values, such as the reads of one Variable, when a gradient of the ``ys`` reaches it."""
    nodes = recorder.nodes
    if not any(node.op in (COND, WHILE) for node in nodes):
        return [True] * len(groups)
    walk = Walk(recorder, [value for group in groups for value in group])
    walk.reach(nodes)
    with torch.no_grad(), recorder.scope("gradients"):
        found = _Paths(recorder).into(nodes, dict.fromkeys(ys, True), walk.reached)
        return [either([found.get(value) for value in group]) for group in groups]


class _Paths:
    """The paths of one backward pass. Predicates inside of branches are given by copies of the outermost branch."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.known: dict[int, torch.Tensor] = {}  # the predicates, by their branch
        self.outermost: Node | None = None

    def into(self, nodes: Sequence[Node], ends: Mapping[Value, Presence], reached: set[Value]) -> dict[Value, Presence]:
        """The presence of each value among ``reached`` on the way to ``ends``."""
        found = dict(ends)
        for node in reversed(nodes):
            outs = [found.get(node.value(i)) for i in range(len(node.outputs)) if node.value(i) in reached]
            if all(each is None for each in outs):
                continue
            if node.op == COND:
                entries = self._branch(node, found, reached)
            elif node.op == WHILE:
                entries = self._entries(node, found, reached)
                entries |= self._loop(node, entries)
            else:
                entries = dict.fromkeys((value for value in ways(node) if value in reached), either(outs))
            for value, presence in entries.items():
                found[value] = either([found.get(value), presence])
        return found

    def _entries(
        self, node: Node, found: Mapping[Value, Presence], reached: set[Value]
    ) -> dict[Value, Presence]:  # fmt: skip
        """The presence of each input of a loop: of the outputs to which the input conducts."""
        entries: dict[Value, Presence] = {}
        for i, value in enumerate(ways(node)):
            if value in reached:
                outs = [found.get(node.value(out)) for out in sorted(conducted(node, frozenset((i,))))]
                entries[value] = either([entries.get(value), *outs])
        return {value: presence for value, presence in entries.items() if presence is not None}

    def _loop(self, node: Node, entries: Mapping[Value, Presence]) -> dict[Value, Presence]:
        """The captures of a loop that a run may not enter; the values that it carries go past it, too."""
        attrs, body = node.attrs, node.attrs["body"]
        refs = [ref for ref in attrs["captures"] if isinstance(ref, Ref)]
        captured = dict.fromkeys(node.inputs[ref.input] for ref in refs)
        inner = zip(body.inputs[len(body.inputs) - len(attrs["captures"]) :], attrs["captures"], strict=True)
        walk = Walk(
            self.recorder, [v for v, ref in inner if isinstance(ref, Ref) and node.inputs[ref.input] in entries]
        )
        walk.reach(body.contents.nodes)
        if any(_divides(each, walk) for each in body.contents.nodes):
            self.recorder.warn(
                "a branch inside of a loop leaves a Parameter out in some runs: plain PyTorch has no gradient of it "
                "then, and its optimizer leaves it; here the gradient is 0, and momentum or weight decay may move it"
            )
        if self.outermost is not None or (attrs["cond"] is None and not isinstance(attrs.get("limit"), Ref)):
            return {}
        others = {v for i, v in enumerate(node.inputs) if all(ref.input != i for ref in refs)}
        turns = self.recorder.tensor(node.value(len(attrs["init"]))) > 0
        return {v: _both(turns, entries[v]) for v in captured if v in entries and v not in others}

    def _branch(self, node: Node, found: Mapping[Value, Presence], reached: set[Value]) -> dict[Value, Presence]:
        is_outer, self.outermost = self.outermost is None, self.outermost or node
        outer = {i: node.inputs[ref.input] for i, ref in enumerate(node.attrs["operands"]) if isinstance(ref, Ref)}
        sides = [self._side(node, node.attrs[name], found, outer, reached) for name in _SIDES]
        entries: dict[Value, Presence] = {}
        for i, value in outer.items():
            then, other = (side.get(node.attrs[name].inputs[i]) for name, side in zip(_SIDES, sides, strict=True))
            entries[value] = either([entries.get(value), self._where(node, then, other)])
        if is_outer:
            self.outermost = None
        return entries

    def _side(
        self, node: Node, side: Subgraph, found: Mapping[Value, Presence], outer: Mapping[int, Value],
        reached: set[Value],
    ) -> dict[Value, Presence]:  # fmt: skip
        walk = Walk(self.recorder, [side.inputs[i] for i, value in outer.items() if value in reached])
        walk.reach(side.contents.nodes)
        ends: dict[Value, Presence] = {}
        for i, value in enumerate(side.outputs):
            if value is not None and value in walk.reached:
                ends[value] = either([ends.get(value), found.get(node.value(i))])
        return self.into(side.contents.nodes, ends, walk.reached)

    def _where(self, node: Node, then: Presence, other: Presence) -> Presence:
        """``then`` where the branch's predicate holds, else ``other``."""
        return then if then is other else chosen(self._predicate(node), then, other)

    def _predicate(self, node: Node) -> torch.Tensor:
        if node.id not in self.known:
            assert self.outermost is not None
            if node is self.outermost:
                self.known[node.id] = self.recorder.tensor(node.inputs[node.attrs["pred"].input])
            else:
                self._tell(self.outermost)
        return self.known[node.id]

    def _tell(self, node: Node) -> None:
        """Record the branch once more, with the predicates of the branches inside as further outputs."""
        telling, owners = _telling(node)
        with self.recorder.tape.enclosed(control=node.control, device=node.device):
            outs = append(
                self.recorder, node.op, node.inputs, telling.attrs, telling.outputs, frozenset({AGAIN})
            )  # fmt: skip
        self.known |= dict(zip(owners, outs[len(node.outputs) :], strict=True))


def _divides(node: Node, walk: Walk) -> bool:
    """Whether one side of a branch depends on a value among those reached on which the other side does not."""
    if node.op != COND:
        return False
    ends: list[set[int]] = []
    for name in _SIDES:
        side = node.attrs[name]
        refs = [(i, ref) for i, ref in enumerate(node.attrs["operands"]) if isinstance(ref, Ref)]
        active = [i for i, ref in refs if node.inputs[ref.input] in walk.reached]
        own = {i: Walk(walk.recorder, [side.inputs[i]]) for i in active}
        for each in own.values():
            each.reach(side.contents.nodes)
        ends.append({i for i, each in own.items() if not each.reached.isdisjoint(side.outputs)})
        if any(_divides(inner, each) for each in own.values() for inner in side.contents.nodes):
            return True
    return ends[0] != ends[1]


def _telling(node: Node) -> tuple[Node, list[int]]:
    """The branch with the predicates of branches inside as further outputs, and the ids of those branches."""
    sides = [_side_telling(node.attrs[name]) for name in _SIDES]
    counts = [len(owners) for _, owners, _ in sides]
    specs = [spec for *_, found in sides for spec in found]
    absent: list[list[Value | None]] = [[None] * count for count in reversed(counts)]
    attrs = dict(node.attrs)
    for k, (name, (side, owners, _)) in enumerate(zip(_SIDES, sides, strict=True)):
        own = side.outputs[len(side.outputs) - len(owners) :]
        more = (*own, *absent[k]) if k == 0 else (*absent[k], *own)
        attrs[name] = replace(side, outputs=(*side.outputs[: len(side.outputs) - len(owners)], *more))
    attrs["shapes"] = (*attrs["shapes"], *(spec.shape for spec in specs))
    owners = [owner for _, found, _ in sides for owner in found]
    return replace(node, attrs=attrs, outputs=(*node.outputs, *specs)), owners


def _side_telling(side: Subgraph) -> tuple[Subgraph, list[int], list[Spec]]:
    """A side with the predicates of its branches as further outputs; their branches' ids, and their specs."""
    nodes: list[Node] = []
    told: list[tuple[int, Value]] = []
    again: dict[int, int] = {}  # the ids of branches with further outputs, by those of the branches
    for node in side.contents.nodes:
        if again:
            node = _renumbered(node, again)
        if node.op == COND:
            count, owner = len(node.outputs), node.id
            told.append((owner, node.inputs[node.attrs["pred"].input]))
            node, inner = _telling(node)
            if inner:
                again[owner] = new_id()
                node = replace(node, id=again[owner])
            told += [(each, node.value(count + k)) for k, each in enumerate(inner)]
        nodes.append(node)
    by_id = {node.id: node for node in nodes}
    specs = [by_id[value.node].outputs[value.index] for _, value in told]
    found = replace(side.contents, nodes=tuple(nodes))
    outputs = (*(v and _moved(v, again) for v in side.outputs), *(value for _, value in told))
    return replace(side, contents=found, outputs=outputs), [owner for owner, _ in told], specs


def _moved(value: Value, again: Mapping[int, int]) -> Value:
    return Value(again.get(value.node, value.node), value.index)


def _renumbered(node: Node, again: Mapping[int, int]) -> Node:
    """A node that takes the values of other branches."""
    inputs = tuple(_moved(value, again) for value in node.inputs)
    return replace(node, inputs=inputs, control=tuple(again.get(each, each) for each in node.control))


def either(found: Iterable[Presence]) -> Presence:
    """Whether one of several is there."""
    total: Presence = None
    for each in found:
        if each is True or total is True:
            return True
        if each is not None and each is not total:
            total = each if total is None else torch.logical_or(total, each)  # type: ignore[arg-type]  # both tensors
    return total


def chosen(taken: torch.Tensor, then: Presence, other: Presence) -> Presence:
    """``then`` where a recorded truth value holds, else ``other``."""
    return then if then is other else either([_both(taken, then), _both(taken.logical_not(), other)])


def _both(taken: torch.Tensor, presence: Presence) -> Presence:
    if presence is None or presence is True:
        return taken if presence else None
    return taken.logical_and(presence)  # type: ignore[arg-type]  # a tensor
