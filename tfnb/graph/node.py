"""One node of a graph: an immutable record with identity equality.

``attrs`` holds every argument of the op by its schema name; tensor arguments are ``Ref(i)``, the i-th input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from tfnb.graph.spec import Dim, Spec


class Value(NamedTuple):
    """Output ``index`` of the node with id ``node``. Hashable: the key for values everywhere."""

    node: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a Value


class Ref(NamedTuple):
    """Stands in ``attrs`` for input number ``input`` of the node."""

    input: int


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Position in the user's code: a label (``In[3]``, or a file), the line number from 1, and the line's text."""

    label: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.label} line {self.line}" + (f":  {self.text}" if self.text else "")


def where(source: SourceLine | None) -> dict[str, Any]:
    """The cell and line that an error names: arguments of `TfnbError`."""
    return {} if source is None else {"cell": source.label, "line": source.line}


@dataclass(frozen=True, slots=True)
class Owner:
    """Who recorded a node: a cell (``cell:<id>``) or a ``record()`` block; ``index`` counts owners of a graph."""

    key: str
    index: int


_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """One operation of the graph.

    ``op`` is torch's qualified name (``aten.mm.default``) or one of ours (``tfnb.read``). ``inputs`` are the
    tensor inputs, flat and in order; ``outputs`` one Spec per output. ``control`` names nodes that run first
    and are pulled into a step with this one. ``effects`` names nodes that a run of this one does as well, each at its
    own place in program order, so that they may stand behind it; they are no inputs. ``stream`` is the index among the
    random nodes of the owner.
    """

    id: int
    name: str
    op: str
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Spec, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    control: tuple[int, ...] = ()
    effects: tuple[int, ...] = ()
    scope: tuple[str, ...] = ()
    source: SourceLine | None = None
    owner: Owner | None = None
    device: str | None = None
    tags: frozenset[str] = frozenset()
    stream: int | None = None
    forward: int | None = None  # the forward node this backward node belongs to
    fixed: tuple[str, ...] = ()  # of a placeholder: for each axis the line that made its varying size a constant, or ""
    _symbols: tuple[str, ...] | None = field(default=None, init=False, repr=False)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Symbols that the op's arguments need at run time."""
        found = self._symbols
        if found is None:  # every pass asks every node
            dims = (leaf for leaf in leaves(self.attrs) if isinstance(leaf, Dim))
            found = tuple(dict.fromkeys(s for dim in dims for s in dim.symbols))
            object.__setattr__(self, "_symbols", found)
        return found

    @property
    def where(self) -> dict[str, Any]:
        """Keyword arguments of `TfnbError` that locate the node."""
        return {"node": self.name, "op": self.op, **where(self.source)}

    def value(self, index: int = 0) -> Value:
        """Output number ``index`` as a Value."""
        return Value(self.id, index)

    def __repr__(self) -> str:
        outs = ", ".join(map(str, self.outputs)) or "no output"
        return f"<Node {self.name} = {self.op} -> {outs}>"


_ATOMS = frozenset({int, float, bool, str, type(None), Ref, Value})  # leaves, told without a question to abc


def leaves(tree: object) -> Iterator[Any]:
    """All leaves of nested mappings, lists and tuples; a Ref is a leaf."""
    if type(tree) in _ATOMS:
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


def map_leaves(function: Callable[[Any], Any], tree: object) -> Any:
    """The tree with ``function`` applied to every leaf; sequences become plain lists or tuples."""
    if type(tree) in _ATOMS:
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return (
            type(tree)(map_leaves(function, item) for item in tree)
            if type(tree) in (list, tuple)
            else tuple(map_leaves(function, item) for item in tree)
        )
    return function(tree)
