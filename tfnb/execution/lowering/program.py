"""The lowered form of a graph: a generated function, and the writes of the commit.

Made by `tfnb.execution.lowering.lower`. What may fail of a commit is looked at before it: rows that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from tfnb.execution.commit import Pending, Update, commit
from tfnb.graph import Graph, Node, Spec, Value, Variable
from tfnb.graph.op_facts import facts_of
from tfnb.graph.variable_locks import LOCKS, Access, Use, VariableSnapshot
from tfnb.interrupts import no_interrupt
from tfnb.kernels.row_writes import outside
from tfnb.passes.in_place_commit import IN_PLACE
from tfnb.passes.unordered import unordered


@dataclass(slots=True, eq=False, weakref_slot=True)
class Program:
    """A lowered graph for one choice of fetches and feeds.

    ``compute(feeds, storages, run)`` takes one tensor for each of ``feeds`` and one storage for each of ``variables``
    and returns the fetched values and what is to be written; ``commit`` writes it.
    """

    waits: ClassVar[bool] = False  # for what other steps do

    graph: Graph  # pruned
    whole: Graph  # what it was lowered from
    fetches: tuple[Value, ...]
    feeds: tuple[Value, ...]
    variables: tuple[Variable, ...]
    writes: tuple[Variable, ...]
    module: fx.GraphModule
    node_of: dict[str, Node]  # generated name -> node, for errors
    n_fetches: int
    copies: tuple[int, ...]  # places in `variables` of the plainly written ones
    updates: tuple[tuple[str, dict[str, Any], tuple[int, ...]], ...]  # in-place op, settings, row lengths
    within: tuple[tuple[int, Node], ...]  # numbers of rows that the commit writes, by place; whose
    inner: tuple[Program, ...]  # of the subgraphs that loops and branches run
    written: tuple[int, ...]  # of a loop's body: places of the carried values that it writes in place
    donated: Mapping[fx.Node, Donation]  # what writes into its first argument
    specs: Mapping[str, Spec]  # generated name -> what its value is
    names: Mapping[Value, str]  # the generated name of each value
    made: Callable[..., tuple[Any, ...]] | None = field(init=False, default=None)  # `forward`, once it was asked for
    quick: Any = field(
        init=False, default=None
    )  # the same by `tfnb.execution.tiers.scalarize`, where a session runs that
    probed: Any = field(init=False, default=None)  # the code with probes, by `tracing`
    access: Access | None = field(init=False)  # None of a program without Variables
    use: Use = field(init=False)
    commit_access: Access | None = field(init=False)  # of locks that it takes when it commits, too
    late: tuple[int, ...] = field(init=False)  # places of feeds that the commit takes as they are, or as views

    def __post_init__(self) -> None:
        self.late = self._late() if self.writes else ()
        self.use = LOCKS.use(self.variables)
        self.access, self.commit_access = accesses(self.graph, self.variables, self.writes, self.copies)
        self.module.__dict__.update(self.module.named_buffers())  # constants, found without a call of __getattr__

    @property
    def forward(self) -> Callable[..., tuple[Any, ...]]:
        """The generated code, written at the first access."""
        if self.made is None:
            self.made = written(self.module)
        return self.made

    @property
    def reads(self) -> tuple[Variable, ...]:
        """Variables whose storage the program needs."""
        return self.variables

    def compute(
        self, feeds: Iterable[torch.Tensor], storages: list[torch.Tensor], run: int = 0,
        forward: Callable[..., Sequence[Any]] | None = None, cut: VariableSnapshot | None = None,
    ) -> tuple[list[torch.Tensor | None], Pending]:  # fmt: skip
        """Fetched values, and the writes of the step; nothing is written.

        forward: other code that computes what the generated ``self.forward`` does. cut: what to read in place of the
        storages.
        """
        done = getattr(forward, "done", None)
        read = storages if cut is None else list(map(cut.copies.get, self.variables, storages))
        if self.late:
            feeds = self.apart(dict(enumerate(feeds)), storages).values()
        out = (forward or self.forward)(*feeds, *read, run)  # nothing requires grad: grad mode does not matter
        fetched, rest = list(out[: self.n_fetches]), out[self.n_fetches :]
        if not self.writes:
            if done is not None:
                done()
            return fetched, _NOTHING
        for place, node in self.within:
            ensure_there(node, rest[place])
        targets = [storages[place] for place in self.copies]
        values = list(rest[: len(targets)])
        at, updates = len(targets), []
        for op, kwargs, lengths in self.updates:
            rows = []
            for length in lengths:
                row = rest[at : at + length]
                if row[1] is not None:  # else it is of a branch that was not taken
                    rows.append(row)
                at += length
            if rows:
                updates.append(Update(IN_PLACE[op], rows, kwargs))
        if read is not storages:
            values = _stored(updates, values, dict(zip(map(id, read), storages, strict=True)))
        return fetched, Pending(targets, values, updates, self.writes, done=done)

    def write(
        self, feeds: Iterable[torch.Tensor], storages: list[torch.Tensor], run: int, forward: Callable[..., Any]
    ) -> list[torch.Tensor | None] | None:
        """Run the whole step by code that ``writes``; returns the fetched values, or None if the code declined."""
        with no_interrupt():
            results = forward(feeds, storages, run)
            for variable in self.writes if results is not None else ():
                variable.writes.value += 1
        return results  # type: ignore[no-any-return]

    def _late(self) -> tuple[int, ...]:
        inputs = self.module.graph.find_nodes(op="placeholder")[: len(self.feeds)]
        returned: Any = self.module.graph.output_node().args[0]
        found = set()
        for node in returned[self.n_fetches :]:
            while isinstance(node, fx.Node) and self._is_view(node):
                node = node.args[0]
            found.add(node)
        return tuple(place for place, node in enumerate(inputs) if node in found)

    def _is_view(self, node: fx.Node) -> bool:
        owner = self.node_of.get(node.name) if node.op == "call_function" else None
        return owner is not None and facts_of(owner.op).is_view

    def apart(
        self, feeds: Mapping[int, torch.Tensor], storages: Iterable[torch.Tensor]
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        """Feeds, by position; feeds that share memory with Variables and are read after the writes are copied."""
        kept, memory = dict(feeds), {storage.untyped_storage().data_ptr() for storage in storages}
        for place in kept.keys() & set(self.late):
            if kept[place].untyped_storage().data_ptr() in memory:
                kept[place] = kept[place].clone()
        return kept

    commit = staticmethod(commit)

    @property
    def code(self) -> str:
        """The generated Python."""
        return self.module.code

    def undonated(self) -> Program:
        """The same in code of the same names that writes into nothing, so that its nodes may run in another order."""
        if not self.donated:
            return self
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        returned: Any = graph.graph_copy(self.module.graph, copies)
        for node, donation in self.donated.items():
            copies[node].target = donation.target
            copies[node].kwargs = donation.kwargs(copies[node])
        graph.output(returned)
        return replace(self, module=unwritten(self.module, graph), donated={})


@dataclass(frozen=True, slots=True)
class Donation:
    """A call that writes into its first argument: the out-of-place target, and the keyword of the output argument."""

    target: Callable[..., Any]
    out: str | None

    def kwargs(self, node: fx.Node) -> dict[str, Any]:
        """The keyword arguments of the call without the output argument."""
        return {name: value for name, value in node.kwargs.items() if name != self.out}


def unwritten(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """The module of a graph, whose code is written on demand. Tried with torch 2.13."""
    return _LazyGraphModule(root, graph)


def written(module: fx.GraphModule) -> Callable[..., Any]:
    """The code of a module."""
    if isinstance(module, _LazyGraphModule):
        module.real_recompile()
    return module.forward


def accesses(
    graph: Graph, variables: Sequence[Variable], writes: Iterable[Variable], copies: Iterable[int]
) -> tuple[Access | None, Access | None]:  # fmt: skip
    """The locks of a step from its first read to its commit, and the locks for the commit only.

    copies: places of Variables that the commit overwrites, so that a lock has to hold from the read on.
    """
    if not variables:
        return None, None
    free, copied = unordered(graph), {variables[place] for place in copies}
    late = [v for v, is_locking in free.items() if is_locking and v not in copied]
    left = free.keys() - {v for v, is_locking in free.items() if is_locking and v in copied}
    held = Access([v for v in variables if v not in left], [v for v in writes if v not in left])
    return held, Access(late, late) if late else None


_NOTHING = Pending([], [], [])


def _stored(updates: list[Update], values: list[Any], storages: Mapping[int, torch.Tensor]) -> list[Any]:
    """Copies that the step read are no place to write: updates get the storages, by the id of a copy.

    A value that is what an update writes is read after it: that of another Variable which takes it over.
    """
    updated: dict[int, torch.Tensor] = {}
    for update in updates:
        for row in update.rows:
            updated.update((id(x), storages[id(x)]) for x in row if id(x) in storages)
        update.rows = [tuple([updated.get(id(x), x) for x in row]) for row in update.rows]
    return [updated.get(id(value), value) for value in values]


def ensure_there(node: Node, rows: object) -> None:
    """Raise IndexError for a row index out of bounds before the commit, since a commit may not fail."""
    axis = node.attrs["dim"]
    count = int(node.outputs[0].shape[axis])
    bad = outside(count, rows)
    if bad is not None:
        name = node.op.split(".")[1]
        error = IndexError(f"{name}_(): index {bad} is out of bounds for dimension {axis} with size {count}")
        error.node = node  # type: ignore[attr-defined]
        raise error
