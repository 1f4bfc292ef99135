"""The nodes of one recording, in program order, before they are committed.

Owns ids, names, random streams, and the marks that every node recorded now gets: control inputs, tags, device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from tfnb.errors import InvalidArgument
from tfnb.graph import Node, Owner, Source, Spec, Value, ops
from tfnb.graph.contents import Names
from tfnb.graph.graph import new_id

_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*\Z")
_VARYING = frozenset({"tfnb.placeholder", "tfnb.read", "tfnb.assign", ops.CALL}) | ops.REGIONS | ops.QUEUES
FROZEN = "frozen"  # tag of a read: gradients to the variable do not come from here
_UNSCOPED = ("tfnb.placeholder", "tfnb.read", "tfnb.constant")


@dataclass(frozen=True, slots=True)
class Marks:
    """What every node recorded now carries."""

    control: tuple[int, ...] = ()
    tags: frozenset[str] = frozenset()
    forward: int | None = None
    device: str | None = None


class Tape:
    """Nodes of earlier owners (``kept``) and the new ones of ``owner``."""

    def __init__(self, owner: Owner, where: Callable[[], Source | None], kept: tuple[Node, ...]) -> None:
        self.owner, self.where, self.kept = owner, where, kept
        self.new: list[Node] = []
        self.by_id: dict[int, Node] = {node.id: node for node in kept}
        self._earlier = frozenset(self.by_id)
        self.named: set[int] = set()  # nodes that the user named in the call that made them
        self.marks = Marks()
        self.labels = {node.attrs["variable"].name for node in kept if node.op == "tfnb.read"}  # of what was read
        self._names = Names(node.name for node in kept)
        self._streams = 0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes so far, earlier owners' first."""
        return (*self.kept, *self.new)

    def append(
        self, op: str, name: str, outputs: tuple[Spec, ...], *, scope: tuple[str, ...] = (),
        inputs: tuple[Value, ...] = (), attrs: Mapping[str, Any] | None = None, tags: frozenset[str] = frozenset(),
        is_random: bool = False, chosen: str | None = None,
    ) -> Value:  # fmt: skip
        """Add a node; ``name`` is made unique, a name that the user chose is not. Random nodes get the next stream."""
        if chosen is not None:
            self.allow(name := chosen)
        marks, stream = self.marks, None
        if is_random:
            stream, self._streams = self._streams, self._streams + 1
        if not torch.is_grad_enabled():
            tags = tags | {"no_grad"}
        control = marks.control if op not in ("tfnb.placeholder", "tfnb.constant") else ()
        node = Node(
            id=new_id(), name=self._names.fresh(name), op=op, inputs=inputs, outputs=outputs, attrs=attrs or {},
            control=control, scope=() if op in _UNSCOPED else scope, source=self.where(), owner=self.owner,
            device=marks.device, tags=tags | marks.tags, stream=stream, forward=marks.forward,
        )  # fmt: skip
        if op == "tfnb.read":
            self.labels.add(node.attrs["variable"].name)
        self.by_id[node.id] = node
        self.new.append(node)
        if chosen is not None:
            self.named.add(node.id)
        return Value(node.id)

    def is_earlier(self, value: Value) -> bool:
        """Whether a value is not of this recording."""
        return value.node in self._earlier or value.node not in self.by_id

    def is_fixed(self, value: Value) -> bool:
        """Whether a value is the same in every run: no placeholder, variable, size or random draw leads to it."""
        return next(self._varying(value), None) is None

    def state_behind(self, value: Value) -> str:
        """The names of the variables whose state a value is of; none if it is of anything else as well."""
        names = set()
        for node in self._varying(value):
            if node.op != "tfnb.read":
                return ""
            names.add(node.attrs["variable"].name)
        return ", ".join(sorted(names))

    def _varying(self, value: Value) -> Iterator[Node]:
        """What leads to a value and may be another one in a run."""
        stack, seen = [value.node], {value.node}
        while stack:
            node = self.by_id[stack.pop()]
            if node.op in _VARYING or node.stream is not None or node.symbols:
                yield node
                continue
            ahead = {v.node for v in node.inputs} - seen
            stack.extend(ahead)
            seen |= ahead

    def drop_last(self) -> None:
        """Take back the last node: its op failed."""
        node = self.new.pop()
        del self.by_id[node.id]
        self._names.free(node.name)

    def cut(self, start: int, streams: int | None = None) -> list[Node]:
        """Take the nodes from number ``start`` on out of the recording; ``streams``: of draws, before them."""
        cut = self.new[start:]
        del self.new[start:]
        for node in cut:
            del self.by_id[node.id]
            self._names.free(node.name)
        self._streams = self._streams if streams is None else streams
        return cut

    def put(self, node: Node) -> None:
        """Add a node that was cut."""
        node = replace(node, name=self._names.fresh(node.name))
        self.by_id[node.id] = node
        self.new.append(node)

    def rename(self, node_id: int, name: str) -> str:
        """Give a node of this recording another name (made unique); returns it."""
        place, node = next((i, n) for i, n in enumerate(self.new) if n.id == node_id)
        self._names.free(node.name)
        name = self._names.fresh(name)
        self.new[place] = self.by_id[node_id] = replace(node, name=name)
        return name

    def tag(self, node_id: int, tag: str) -> None:
        """Give a node of this recording one more tag."""
        place, node = next((i, n) for i, n in enumerate(self.new) if n.id == node_id)
        self.new[place] = self.by_id[node_id] = replace(node, tags=node.tags | {tag})

    def allow(self, name: str) -> None:
        """Raise InvalidArgument if a user may not give a node this name: it is not legal, or taken."""
        if not _NAME.match(name):
            raise InvalidArgument(f"{name!r} is not a node name: it must match {_NAME.pattern}{self.at()}")
        if name in self._names:
            other = next(n for n in self.nodes if n.name == name)
            raise InvalidArgument(
                f"the name {name!r} is taken by a node recorded at {other.source or 'another place'}; "
                f"choose another{self.at()}"
            )

    @contextmanager
    def marked(self, **changes: Any) -> Iterator[None]:
        """Nodes recorded inside carry these marks."""
        before = self.marks
        self.marks = replace(before, **changes)
        try:
            yield
        finally:
            self.marks = before

    def at(self) -> str:
        """Where the user's program stands, as the end of an error text."""
        source = self.where()
        return f"\n  at {source}" if source else ""
