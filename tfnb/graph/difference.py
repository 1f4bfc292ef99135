"""The difference of two graphs: nodes that were added, removed or changed.

Nodes belong together that have the same id, as before and after a pass, or else that do the same with the same inputs,
as in two recordings of an edited cell, or else that have the same name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tfnb.graph.contents import Contents
from tfnb.graph.device_request import readable
from tfnb.graph.forms.text import text
from tfnb.graph.node import Node, Ref, Value
from tfnb.graph.ops import IN_PLACE
from tfnb.graph.subgraph import Subgraph
from tfnb.graph.variable import Variable


class Matching(NamedTuple):
    """Pairs of corresponding node ids (before, after), and the nodes that were added, removed or changed."""

    same: Mapping[int, int]
    added: tuple[Node, ...]
    removed: tuple[Node, ...]
    changed: tuple[Node, ...]


def compared(before: Contents, after: Contents) -> Matching:
    """Match the nodes of two graphs, and list the nodes without a counterpart or with a different one."""
    same = _same(before, after)
    kept = set(same.values())
    alike = _Equality(before, after, same)
    pairs = [(before.by_id[old], after.by_id[new]) for old, new in same.items()]
    differ = {new.id for old, new in pairs if not alike.nodes(old, new)}
    return Matching(
        same,
        tuple(node for node in after.nodes if node.id not in kept),
        tuple(node for node in before.nodes if node.id not in same),
        tuple(node for node in after.nodes if node.id in differ),
    )


class Difference(str):
    """The unified difference of the text forms of two graphs; empty if the graphs are equal. A notebook draws it.

    >>> d = Difference.of("a", Contents(), "b", Contents())
    >>> d == "", d.added, d.removed, d.changed
    (True, (), (), ())
    """

    name: str
    before: Contents
    after: Contents
    same: Mapping[int, int]  # ids of the nodes that belong together, as before and as after
    added: tuple[Node, ...]
    removed: tuple[Node, ...]
    changed: tuple[Node, ...]  # as they are after

    @classmethod
    def of(cls, name: str, before: Contents, other: str, after: Contents) -> Difference:
        """Between a graph and another one, with their names."""
        a, b = (text(name, contents).splitlines() for contents in (before, after))  # names are no difference
        made = cls("\n".join(difflib.unified_diff(a, b, name, other, lineterm="", n=1)))
        made.name = name if name == other else f"{name} and {other}"
        made.before, made.after = before, after
        made.same, made.added, made.removed, made.changed = compared(before, after)
        return made

    @property
    def counts(self) -> str:
        """``3 added, 1 removed, 0 changed``."""
        return f"{len(self.added)} added, {len(self.removed)} removed, {len(self.changed)} changed"

    def __repr__(self) -> str:
        return f"<Difference: {self.counts}>" + (f"\n{self}" if self else "")

    def _repr_html_(self) -> str:
        from tfnb.view import difference_html  # listed exception: a repr asks view

        return difference_html(self)

    def _repr_svg_(self) -> str | None:
        from tfnb.view import difference_svg  # listed exception, too

        return difference_svg(self)


def _same(before: Contents, after: Contents) -> dict[int, int]:
    """Match nodes by id, else by op and inputs, else by name. Nodes with different numbers of outputs never match.

    A node that does the same under another name is no twin where a node of that name and op was there before: of equal
    nodes those with equal names belong together.
    """
    found = {node.id: node.id for node in before.nodes if node.id in after.by_id}
    alike, taken = _Equality(before, after, found), set(found)
    free: dict[tuple[str, tuple[Value, ...]], list[Node]] = {}
    for node in after.nodes:
        if node.id not in taken:
            free.setdefault((node.op, node.inputs), []).append(node)
    for node in before.nodes:  # in program order: the inputs are found already
        if node.id in found:
            continue
        doing = [each for each in free.get((node.op, alike.inputs(node)), ()) if each.id not in taken]
        named = [each for each in doing if each.name == node.name]
        others = [each for each in doing if getattr(before.by_name.get(each.name), "op", None) != node.op]
        twin = next((each for each in (*named, *others) if alike.nodes(node, each)), None)
        if twin is not None:
            found[node.id] = twin.id
            taken.add(twin.id)
    for node in before.nodes:
        twin = after.by_name.get(node.name)
        if node.id in found or twin is None or twin.id in taken or len(twin.outputs) != len(node.outputs):
            continue
        found[node.id] = twin.id
        taken.add(twin.id)
    return found


class _Equality:
    """Whether nodes, arguments and values of two graphs are the same."""

    def __init__(self, before: Contents, after: Contents, same: Mapping[int, int]) -> None:
        self._same = same
        self._labels = {v: label for contents in (after, before) for label, v in contents.variables.items()}

    def nodes(self, a: Node, b: Node) -> bool:
        """All but name, place and line."""
        if a is b:
            return True
        facts = [
            (node.op, node.outputs, readable(node.device), IN_PLACE in node.tags, node.attrs.keys()) for node in (a, b)
        ]
        inputs = self.inputs(a) == b.inputs
        control = self._ids(a.control) == b.control and self._ids(a.effects) == b.effects
        return facts[0] == facts[1] and inputs and control and all(self._leaf(a.attrs[k], b.attrs[k]) for k in a.attrs)

    def inputs(self, node: Node) -> tuple[Value, ...]:
        """The inputs of an old node, translated to the matching nodes of the new graph."""
        return tuple(map(self._now, node.inputs))

    def _ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Ids of old nodes, translated to the matching nodes of the new graph."""
        return tuple(self._same.get(i, i) for i in ids)

    def _now(self, value: Value) -> Value:
        return Value(self._same.get(value.node, value.node), value.index)

    def _leaf(self, a: Any, b: Any) -> bool:
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        match a:
            case torch.Tensor():
                return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
            case Variable():
                return self._labels[a] == self._labels[b] and a.spec == b.spec
            case Subgraph():
                return text("", a.contents) == text("", b.contents)
            case Value():
                return self._now(a) == b
            case Ref():
                return bool(a == b)
            case list() | tuple():
                return len(a) == len(b) and all(map(self._leaf, a, b))
        return bool(a == b)


__all__ = ["Difference", "Matching", "compared"]
