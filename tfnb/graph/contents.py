"""Contents of a graph at one version: nodes in program order and the facts derived from them. Immutable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tfnb.graph.node import Node, Owner, SourceLine, Value
from tfnb.graph.ops import NAMED
from tfnb.graph.spec import Dim
from tfnb.graph.variable import Variable


@dataclass(frozen=True, slots=True)
class Guard:
    """A relation between sizes that a recording relied on: ``expr`` must hold for every feed.

    A local one only where something of its own line runs: it is what a function of torch asks of its arguments.
    """

    expr: str
    source: SourceLine | None = None
    owner: Owner | None = None
    is_local: bool = False

    @property
    def symbols(self) -> tuple[str, ...]:
        """Symbols in the relation."""
        return Dim(self.expr).symbols

    def covers(self, other: Guard) -> bool:
        """Whether ``other`` asks nothing that this one does not."""
        return self.expr == other.expr and (not self.is_local or self == other)

    def concerns(self, nodes: Iterable[Node]) -> bool:
        """Whether a run of ``nodes`` relies on this."""
        return not self.is_local or any(n.source == self.source and n.owner == self.owner for n in nodes)

    def __str__(self) -> str:
        return self.expr + (f"  ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Contents:
    """Nodes in program order, guards on sizes, and the values that cells bound to each Python name, the latest last."""

    nodes: tuple[Node, ...] = ()
    guards: tuple[Guard, ...] = ()
    bindings: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    @cached_property
    def by_id(self) -> dict[int, Node]:
        """Node of each id."""
        return {node.id: node for node in self.nodes}

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Node of each name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def names(self) -> dict[str, Value]:
        """The value that each name means.

        A name that was given by ``name=`` means its node always, another one the value that was bound to it last. A
        node that is shadowed has its name with its cell: ``loss@In[1]``.
        """
        found = self._names(self.nodes)
        shadowed = (node for node in self.nodes if found[node.name].node != node.id)
        return found | {f"{node.name}@{_cell(node)}": Value(node.id) for node in shadowed}

    @cached_property
    def feed_names(self) -> dict[str, Value]:
        """The same for feed keys: a name means the latest placeholder of that name, if there is one."""
        return self.names | self._names(self.placeholders)

    @cached_property
    def assigned(self) -> dict[Value, str]:
        """The first Python name that means each value."""
        meant = ((name, self.names.get(name)) for name in reversed(tuple(self.bindings)))
        return {value: name for name, value in meant if value in self.bindings[name]}

    def _names(self, nodes: tuple[Node, ...]) -> dict[str, Value]:
        """The value of these nodes that each name means."""
        ids = {node.id for node in nodes}
        own = ((name, [value for value in values if value.node in ids]) for name, values in self.bindings.items())
        last = {name: values[-1] for name, values in own if values}
        given = {node.name: Value(node.id) for node in self.nodes if NAMED in node.tags}
        return {node.name: Value(node.id) for node in nodes} | last | given

    def shown(self, node: Node) -> str:
        """The name of a node; of one that is shadowed with its cell."""
        return node.name if self.names[node.name].node == node.id else f"{node.name}@{_cell(node)}"

    @cached_property
    def position(self) -> dict[int, int]:
        """Place in program order of each node id."""
        return {node.id: place for place, node in enumerate(self.nodes)}

    @cached_property
    def variables(self) -> dict[str, Variable]:
        """Label -> Variable in order of first use; labels are the names, made unique."""
        labels: dict[str, Variable] = {}
        seen: set[Variable] = set()
        for node in self.nodes:
            variable = node.attrs.get("variable")
            if isinstance(variable, Variable) and variable not in seen:
                seen.add(variable)
                labels[unique(variable.name, labels)] = variable
        return labels

    @cached_property
    def placeholders(self) -> tuple[Node, ...]:
        """Placeholder nodes in program order."""
        return tuple(node for node in self.nodes if node.op == "tfnb.placeholder")

    @cached_property
    def symbols(self) -> dict[str, tuple[Value, int]]:
        """Where each symbol is bound: the first value with an axis of that size. Placeholders bind before others."""
        bound: dict[str, tuple[Value, int]] = {}
        for node in (*self.placeholders, *self.nodes):
            for index, spec in enumerate(node.outputs):
                for axis, size in enumerate(spec.shape):
                    if isinstance(size, Dim) and size.is_symbol:
                        bound.setdefault(size.expr, (Value(node.id, index), axis))
        return bound

    @cached_property
    def consumers(self) -> dict[Value, tuple[int, ...]]:
        """Ids of the nodes that take each value, in program order."""
        found: dict[Value, list[int]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                found.setdefault(value, []).append(node.id)
        return {value: tuple(ids) for value, ids in found.items()}


def _cell(node: Node) -> str:
    return node.source.label if node.source is not None else "an earlier recording"


def unique(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name_1``, ``name_2`` ... if the name is taken.

    >>> unique("loss", {"loss": 0, "loss_1": 0})
    'loss_2'
    """
    if name not in taken:
        return name
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def distinct(nodes: Iterable[Node]) -> list[Node]:
    """The nodes with a name each: of those alike the first keeps it."""
    taken: set[str] = set()
    found = []
    for node in nodes:
        name = unique(node.name, taken)
        taken.add(name)
        found.append(node if name == node.name else replace(node, name=name))
    return found


class Names:
    """Names that are taken; the next of many that are alike is found at once.

    >>> names = Names(["loss"])
    >>> names.fresh("loss"), names.fresh("loss")
    ('loss_1', 'loss_2')
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}  # name -> the lowest number behind it that may be free

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def __copy__(self) -> Names:
        found = Names(self._taken)
        found._next = dict(self._next)
        return found

    def fresh(self, name: str) -> str:
        """Take ``name``, or the first of ``name_1``, ``name_2`` ... that is free."""
        found = name
        if name in self._taken:
            number = self._next.get(name, 1)
            while (found := f"{name}_{number}") in self._taken:
                number += 1
            self._next[name] = number + 1
        self._taken.add(found)
        return found

    def free(self, name: str) -> None:
        """Nobody has the name any more."""
        self._taken.discard(name)
        self._next.pop(name.rpartition("_")[0], None)
