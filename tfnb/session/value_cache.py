"""Values of unchanged nodes, reused by runs: after an edit a run computes only changed nodes (semantics S-31).

A value has a key made of its node's op and attributes and the keys of its inputs; a feed's is its content, a
Variable's is who it is and how often it was written. Values that are there become feeds of a smaller step, so nothing
else knows of the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree

from tfnb.graph import Graph, Value
from tfnb.graph.files import sha256
from tfnb.graph.forms.encode import GraphWriter
from tfnb.passes import StepGraph
from tfnb.passes.rewrite import is_pure
from tfnb.recording import graph as graph_named
from tfnb.session.feeding import Fed
from tfnb.session.prepared import PreparedRun

KEY = "values"  # in `Graph.attached`
LIMIT = 1 << 30  # bytes


class ValueCache:
    """The values that runs of a graph left; the one that was used longest ago goes first when there are too many."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.bytes = limit, 0
        self.reused = self.computed = 0  # nodes, in all runs
        self._store: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()

    def clear(self) -> None:
        """Hold nothing."""
        self._store.clear()
        self.bytes = 0

    def plan(self, prepared: PreparedRun, fed: Fed) -> Smaller | None:
        """The remaining part of a run with these feeds; None for a run that writes, draws, waits or prints."""
        step = prepared.code.step
        if prepared.code.is_dataflow or step.writes or prepared.trailing or prepared.looks:
            return None
        if any(node.stream is not None for node in step.graph.nodes):
            return None
        keys = _keys(step, dict(zip(prepared.feeder.values, fed[0], strict=True)))
        return Smaller(self, step, keys, set(prepared.feeder.values))

    def get(self, key: str, index: int) -> torch.Tensor | None:
        """A cached value, marked as recently used."""
        found = self._store.get((key, index))
        if found is not None:
            self._store.move_to_end((key, index))
        return found

    def put(self, key: str, index: int, value: torch.Tensor) -> None:
        """Store a value, unless too large."""
        if value.nbytes > self.limit or (key, index) in self._store:
            return
        self._store[key, index] = value
        self.bytes += value.nbytes
        while self.bytes > self.limit:
            self.bytes -= self._store.popitem(last=False)[1].nbytes

    def __repr__(self) -> str:
        held = f"{len(self._store)} values, {self.bytes:,} of {self.limit:,} bytes"
        return f"{held}; {self.reused} nodes were reused, {self.computed} computed"


class Smaller:
    """The rest of a step: cached values are its ``feeds``; ``kept`` are values that it computes and that are cached
    afterwards.
    """

    def __init__(self, cache: ValueCache, step: StepGraph, keys: Mapping[int, str], fed: set[Value]) -> None:
        self._cache, self._keys = cache, keys
        self.feeds: dict[Value, torch.Tensor] = {}
        by_id, left = step.graph.contents.by_id, set[int]()
        stack = list(step.fetches)
        while stack:
            value = stack.pop()
            if value in fed or value in self.feeds or value.node in left:
                continue
            node = by_id[value.node]
            there = cache.get(keys[node.id], value.index) if node.id in keys and node.inputs else None
            if there is not None:
                self.feeds[value] = there
                continue
            left.add(node.id)
            stack += [*node.inputs, *(Value(before) for before in node.control)]
        made = [node for node in step.graph.nodes if node.id in left and node.id in keys and node.inputs]
        self.kept = [Value(node.id, index) for node in made for index in range(len(node.outputs))]
        self.kept = [value for value in self.kept if value not in self.feeds]
        cache.computed += len(made)
        cache.reused += sum(bool(node.inputs) for node in step.graph.nodes) - len(made)

    def taken(self, results: object, kept: list[torch.Tensor]) -> Any:
        """Cache the values; returns results that share no memory with cached ones."""
        for value, tensor in zip(self.kept, kept, strict=True):
            self._cache.put(self._keys[value.node], value.index, tensor)
        held = {tensor.untyped_storage().data_ptr() for tensor in (*kept, *self.feeds.values())}

        def own(result: Any) -> Any:
            is_shared = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in held
            return result.clone() if is_shared else result

        return _pytree.tree_map(own, results)


def _keys(step: StepGraph, fed: Mapping[Value, torch.Tensor]) -> dict[int, str]:
    """Keys of the nodes of a step that have one: pure nodes whose operands have keys."""
    writer = GraphWriter(step.whole.contents, only=("op", "out", "attrs", "device"))
    specs = step.whole.contents.by_id
    shapes = [[str(specs[at.node].outputs[at.index]), list(tensor.shape)] for at, tensor in fed.items()]
    found = {at.node: _content(tensor) for at, tensor in fed.items() if tensor.layout == torch.strided}
    outside = {at.node for at in fed}
    for node in step.graph.nodes:
        if node.id in outside:
            continue
        if node.op == "tfnb.read":
            variable = node.attrs["variable"]
            if variable.home is None:
                held = variable.storage
                found[node.id] = f"{variable.key} {variable.version} {held._version} {held.data_ptr()}"
            continue
        if not is_pure(node) or node.control or any(value.node not in found for value in node.inputs):
            continue
        before = len(writer.tensors)
        said: list[Any] = [writer.node(node), [[found[value.node], value.index] for value in node.inputs]]
        said += [_content(tensor) for tensor in [*writer.tensors.values()][before:]]
        said += shapes if node.symbols else []  # sizes that vary are of feeds
        found[node.id] = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    return found


def _content(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {sha256(tensor)}"


def reuse_values(
    on: bool | None = None, *, clear: bool = False, limit: int = LIMIT, graph: Graph | str | None = None
) -> ValueCache | None:
    """Let runs of a graph reuse values of nodes that did not change since, also after an edit of a cell.

    on: begin, with room for ``limit`` bytes, or end and drop the values; None leaves it as it is. clear: drop the
    values. Gives the cache, which tells what it holds and how many nodes were reused; None where it is off. Runs that
    write or draw random numbers, those of `fit` and those on a cluster compute everything. It pays where values take
    long to compute: feeds are read to know whether they changed, and runs are generated code. What torch code writes
    into a parameter is seen, but for writes through ``.data``.

    >>> import tfnb
    >>> with tfnb.record("reused"):
    ...     x = tfnb.placeholder(torch.ones(3), name="x")
    ...     y = x.exp().sum()
    >>> _ = tfnb.reuse_values(True)
    >>> for _ in range(2):
    ...     _ = tfnb.run(y, {x: torch.ones(3)})
    >>> tfnb.reuse_values()
    2 values, 16 of 1,073,741,824 bytes; 2 nodes were reused, 2 computed
    >>> tfnb.reuse_values(False)
    """
    found = graph if isinstance(graph, Graph) else graph_named(graph)
    if on is False:
        found.attached.pop(KEY, None)
    elif on:
        found.attached.setdefault(KEY, ValueCache()).limit = limit
    cache: ValueCache | None = found.attached.get(KEY)
    if clear and cache is not None:
        cache.clear()
    return cache
