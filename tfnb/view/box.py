"""One box of a drawing: a node, or a group of boxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tfnb.graph import Node
from tfnb.view import facts

Key = tuple[int, ...]  # places from the root downwards: the same graph gives the same keys


@dataclass(slots=True, eq=False)
class Box:
    """``nodes`` in drawing order; a box without children is one node. ``key`` is set by `number`."""

    kind: str  # root cell line pass scope function repeat part; of a leaf: op
    title: str
    nodes: tuple[Node, ...]
    children: tuple[Box, ...] = ()
    detail: str = ""  # the torch function, where the title is a module path
    code: str = ""  # the line of the cell, where the title is not
    where: str = ""  # In[3]:4
    times: int = 1
    is_module: bool = False  # whether the title is a module path, also of a function merged with its module
    key: Key = ()

    @property
    def node(self) -> Node:
        """The node of a leaf; of a group the last one, whose value is the group's."""
        return self.nodes[-1]

    @property
    def is_small(self) -> bool:
        """Whether this is a variable's read or a constant."""
        return not self.children and self.node.op in facts.SMALL

    @property
    def name(self) -> str:
        """The key as text, for pages: ``2.0.1``."""
        return key_name(self.key)

    def number(self, key: Key = ()) -> Box:
        """Give this box and all below their keys."""
        self.key = key
        for place, child in enumerate(self.children):
            child.number((*key, place))
        return self

    def walk(self) -> Iterator[Box]:
        """This box and all below, a parent before its children."""
        yield self
        for child in self.children:
            yield from child.walk()

    def at(self, key: Key) -> Box:
        """The descendant with a key that starts with this box's key."""
        box = self
        for place in key[len(self.key) :]:
            box = box.children[place]
        return box


def common(keys: Iterable[Key]) -> Key:
    """The key of the innermost box that contains all these keys.

    >>> common([(1, 2, 3), (1, 2, 0, 4)])
    (1, 2)
    """
    low, high = min(keys := list(keys), default=()), max(keys, default=())
    return low[
        : next((place for place, pair in enumerate(zip(low, high, strict=False)) if len(set(pair)) > 1), len(low))
    ]


def key_name(key: Key) -> str:
    """A key as text: ``2.0.1``."""
    return ".".join(map(str, key))
