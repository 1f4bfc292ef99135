"""The tape: all mutable state of one recording, in one record, before the commit.

Nodes in program order with their names, random streams and marks; what stands for Variables and tensors of outside;
guards, notes, and what is known of values. `saved` gives a copy, and `put_back` goes back to it: that is how an attempt
is undone, whatever it did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch

from tfnb.errors import InvalidArgument
from tfnb.graph import Guard, Node, Owner, SourceLine, Spec, Value, Variable, ops
from tfnb.graph.contents import Names
from tfnb.graph.device_request import Scope, map_groups, parse, with_group
from tfnb.graph.graph import new_id
from tfnb.graph.subgraph import Recursion, group_keys, map_nodes

if TYPE_CHECKING:
    from tfnb.recording.values.tensor import Base, Entry, Tensor
    from tfnb.recording.values.workspace import Derivative

_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*\Z")
_VARYING = frozenset({"tfnb.placeholder", "tfnb.read", "tfnb.assign", ops.CALL}) | ops.REGIONS | ops.QUEUES
FROZEN = "frozen"  # tag of a read: gradients to the variable do not come from here
LEAF = "leaf"  # a tag of writes behind steps of optimizers in loops and branches: gradients end there, as at a read
_UNSCOPED = ("tfnb.placeholder", "tfnb.read", "tfnb.constant")


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks that every node recorded now carries."""

    control: tuple[int, ...] = ()
    tags: frozenset[str] = frozenset()
    forward: int | None = None
    device: Scope = None


@dataclass(eq=False)
class TapeState:
    """The state that a tape puts back. Saving copies the containers, so nothing may change their items in place."""

    new: list[Node]
    by_id: dict[int, Node]
    labels: set[str]  # of what was read
    names: Names
    marks: Marks = field(default_factory=Marks)
    streams: int = 0
    regions: int = 0  # of values that are computed again for the backward pass
    # what stands for Variables and for plain tensors of outside
    reads: dict[Variable, Base] = field(default_factory=dict)
    handles: dict[int, tuple[torch.Tensor, Tensor]] = field(default_factory=dict)  # of plain tensors met, by id
    memory: dict[int, tuple[torch.Tensor, Tensor]] = field(default_factory=dict)  # the first of them, by storage
    bindings: dict[tuple[int, str], Any] = field(default_factory=dict)  # see `writes.buffer_assignments`
    borrowed: dict[int, Entry] = field(default_factory=dict)  # constants that share memory with what was captured
    captured: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)  # by constant: with its stamp then
    wanted: set[int] = field(default_factory=set)  # constants that the user asked for
    batches: dict[int, torch.Tensor] = field(default_factory=dict)  # plain tensors that a DataLoader gave, by id
    # what is known of sizes and values
    guards: list[Guard] = field(default_factory=list)
    named_above: dict[int, frozenset[tuple[str, int]]] = field(default_factory=dict)  # by guard node: names, and nodes
    equalities: list[tuple[str, sympy.Eq, str]] = field(default_factory=list)
    letters: set[str] = field(default_factory=set)  # symbols declared in this recording
    chosen: set[str] = field(default_factory=set)  # those of them that the user named
    naturals: set[Value] = field(default_factory=set)  # counters of loops, which are never negative
    numbers: set[Value] = field(default_factory=set)  # that staged code took as Python's, or computed of such
    stands: dict[Variable, tuple[Value, ...]] = field(default_factory=dict)  # given to Variables inside of loops
    # what is said at the end
    notes: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)  # those of them that tell how runs differ from plain PyTorch
    staged: dict[str, int] = field(default_factory=dict)  # statements of the user's code that are staged: their lines
    derivatives: list[Derivative] = field(default_factory=list)
    calls: list[range] = field(default_factory=list)  # ids of the nodes of each outermost call of a module
    everything: list[int] = field(default_factory=list)  # groups that run all writes and steps of the block
    asked: dict[Variable, SourceLine | None] = field(default_factory=dict)  # taken as a Python number or truth: where
    fixed: list[SourceLine | None] = field(default_factory=list)  # where a batch of a DataLoader became a constant
    draws: list[Any] = field(default_factory=list)  # `values.python_draws.Draw`: what Python drew, each way once
    seeded: list[Any] = field(default_factory=list)  # generators that functions of the program made, with their seeds
    heard: set[int] = field(default_factory=set)  # ids of generators of which a draw is among them, or needs no note
    drawn: dict[Any, int] = field(default_factory=dict)  # how often, by the function and its line

    @property
    def said(self) -> tuple[str, ...]:
        """The notes; staged lines come first, in one note."""
        lines = ", ".join(sorted(self.staged, key=self.staged.__getitem__))
        return (f"staged: {lines}", *self.notes) if lines else tuple(self.notes)

    def saved(self) -> TapeState:
        """A copy, for `put_back`."""
        return TapeState(**{each.name: copy(getattr(self, each.name)) for each in fields(TapeState)})

    def put_back(self, saved: TapeState) -> list[Node]:
        """Restore a saved state; returns the removed nodes."""
        gone = [node for node in self.new if node.id not in saved.by_id]
        for each in fields(TapeState):
            setattr(self, each.name, copy(getattr(saved, each.name)))
        return gone


class Tape(TapeState):
    """Nodes of earlier owners (``kept``) and the new ones of ``owner``, and the rest of the recording's state."""

    def __init__(self, owner: Owner, where: Callable[[], SourceLine | None], kept: tuple[Node, ...]) -> None:
        labels = {node.attrs["variable"].name for node in kept if node.op == "tfnb.read"}
        super().__init__([], {node.id: node for node in kept}, labels, Names(node.name for node in kept))
        self.owner, self.where, self.kept = owner, where, kept
        self._earlier = frozenset(self.by_id)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes so far, earlier owners' first."""
        return (*self.kept, *self.new)

    def append(
        self, op: str, name: str, outputs: tuple[Spec, ...], *, scope: tuple[str, ...] = (),
        inputs: tuple[Value, ...] = (), attrs: Mapping[str, Any] | None = None, tags: frozenset[str] = frozenset(),
        is_random: bool = False, chosen: str | None = None, effects: tuple[int, ...] = (),
    ) -> Value:  # fmt: skip
        """Add a node; ``name`` is made unique, a name that the user chose is not. Random nodes get the next stream."""
        if chosen is not None:
            self.allow(name := chosen)
            tags = tags | {ops.NAMED}
        marks, stream = self.marks, None
        if is_random:
            stream, self.streams = self.streams, self.streams + 1
        if not torch.is_grad_enabled():
            tags = tags | {"no_grad"}
        control = marks.control if op not in ("tfnb.placeholder", "tfnb.constant") else ()
        node = Node(
            id=new_id(), name=self.names.fresh(name), op=op, inputs=inputs, outputs=outputs, attrs=attrs or {},
            control=control, effects=effects, scope=() if op in _UNSCOPED else scope, source=self.where(),
            owner=self.owner, tags=tags | marks.tags, stream=stream, forward=marks.forward,
        )  # fmt: skip
        if marks.device is not None:
            node = replace(node, device=marks.device(node) if callable(marks.device) else marks.device)
        if op == "tfnb.read":
            self.labels.add(node.attrs["variable"].name)
        self.by_id[node.id] = node
        self.new.append(node)
        return Value(node.id)

    def is_earlier(self, value: Value) -> bool:
        """Whether a value is not of this recording."""
        return value.node in self._earlier or value.node not in self.by_id

    def is_of_another_cell(self, value: Value) -> bool:
        """Whether another recording of the graph made the value."""
        return value.node in self._earlier

    def is_fixed(self, value: Value) -> bool:
        """Whether a value is the same in every run: no placeholder, variable, size or random draw among its
        ancestors.
        """
        return next(self._varying(value), None) is None

    def is_computed(self, value: Value) -> bool:
        """Whether a value depends on feeds or Variables, not on draws and constants alone."""
        return any(node.stream is None for node in self._varying(value))

    def is_fed(self, value: Value) -> bool:
        """Whether a value depends on feeds or their sizes, not on constants, Variables and draws alone."""
        return any(node.op != "tfnb.read" and node.stream is None for node in self._varying(value))

    def state_behind(self, value: Value) -> str:
        """Names of the variables on which a value depends; empty if it depends on anything else as well."""
        names = set()
        for node in self._varying(value):
            if node.op != "tfnb.read":
                return ""
            names.add(node.attrs["variable"].name)
        return ", ".join(sorted(names))

    def _varying(self, value: Value) -> Iterator[Node]:
        """The nodes on the way to a value that a run may compute otherwise."""
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
        self.names.free(node.name)

    def cut(self, start: int) -> list[Node]:
        """Take the nodes from number ``start`` on out of the recording."""
        cut = self.new[start:]
        del self.new[start:]
        for node in cut:
            del self.by_id[node.id]
            self.names.free(node.name)
        return cut

    def put(self, node: Node) -> None:
        """Add a node that was cut."""
        node = replace(node, name=self.names.fresh(node.name))
        self.by_id[node.id] = node
        self.new.append(node)

    def rename(self, node_id: int, name: str) -> str:
        """Rename a node of this recording to a name made unique; returns the new name."""
        place, node = next((i, n) for i, n in enumerate(self.new) if n.id == node_id)
        self.names.free(node.name)
        name = self.names.fresh(name)
        self.new[place] = self.by_id[node_id] = replace(node, name=name)
        return name

    def name_groups(self, renamed: Container[int]) -> None:
        """Let colocation groups have the names of the nodes that they are named after, of those that were renamed."""

        def named(node: Node) -> Node:
            return replace(node, device=map_groups(node.device, known))

        def known(name: str, key: str) -> str:
            is_renamed = key.isdecimal() and int(key) in renamed
            return parse(with_group(self.by_id[int(key)].name, key)).groups[0] if is_renamed else f"{name}#{key}"

        made: dict[Recursion, Recursion] = {}
        for place, node in enumerate(self.new):
            if any(key.isdecimal() and int(key) in renamed for key in group_keys(node)):
                self.new[place] = self.by_id[node.id] = map_nodes(named, node, made)

    def tag(self, node_id: int, tag: str) -> None:
        """Give a node of this recording one more tag."""
        place, node = next((i, n) for i, n in enumerate(self.new) if n.id == node_id)
        self.new[place] = self.by_id[node_id] = replace(node, tags=node.tags | {tag})

    def allow(self, name: str) -> None:
        """Raise InvalidArgument if a node name is not legal, or already used."""
        if not _NAME.match(name):
            raise InvalidArgument(f"{name!r} is not a node name: it must match {_NAME.pattern}{self.at()}")
        if name in self.names:
            other = next(n for n in self.nodes if n.name == name)
            raise InvalidArgument(
                f"the name {name!r} is taken by a node recorded at {other.source or 'another place'}; "
                f"choose another{self.at()}"
            )

    @contextmanager
    def marked(self, **changes: Any) -> Iterator[None]:
        """Nodes recorded inside carry these marks; guards made inside hold for nodes behind it, too."""
        before = self.marks
        with self.enclosed(**changes):
            count = len(self.marks.control)
            yield
            guards = self.marks.control[count:]
        self.marks = replace(before, control=(*before.control, *guards))

    @contextmanager
    def enclosed(self, **changes: Any) -> Iterator[None]:
        """Nodes recorded inside carry these marks; guards made inside hold inside alone."""
        before = self.marks
        self.marks = replace(before, **changes)
        try:
            yield
        finally:
            self.marks = before

    def at(self) -> str:
        """The line of the user's program, as the end of an error text."""
        source = self.where()
        return f"\n  at {source}" if source else ""
