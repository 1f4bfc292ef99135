"""From nodes to JSON objects, for `tfnb.graph.forms.serial`. The inverse is `tfnb.graph.forms.decode`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch

from tfnb.errors import InvalidArgument
from tfnb.graph.contents import Contents, Guard
from tfnb.graph.device_request import map_groups, with_group
from tfnb.graph.node import Node, Owner, Ref, SourceLine, Value
from tfnb.graph.queue import Queue
from tfnb.graph.spec import Dim, Spec, dtype_name
from tfnb.graph.subgraph import Recursion, Subgraph, group_keys
from tfnb.graph.variable import Variable


def variable_json(variable: Variable) -> dict[str, Any]:
    divided = {"partitions": variable.partitions, "partition_bytes": variable.partition_bytes}
    said = {name: value for name, value in divided.items() if value is not None}
    return {**spec_json(variable.spec), "trainable": variable.trainable, **said}


def spec_json(spec: Spec) -> dict[str, Any]:
    shape = [size.expr if isinstance(size, Dim) else size for size in spec.shape]
    device = {} if spec.device == "cpu" else {"device": spec.device}
    return {"dtype": dtype_name(spec.dtype), "shape": shape, **device}


class GraphWriter:
    """Turns nodes into JSON objects and collects their shared sources, owners and constants in tables."""

    def __init__(self, contents: Contents, *, only: tuple[str, ...] = ()) -> None:
        self.position = contents.position
        self.only = only  # fields of a node that are written; none: all
        self.labels = {variable: label for label, variable in contents.variables.items()}
        self.sources: dict[tuple[str, int, str], int] = {}
        self.owners: dict[tuple[str, int], int] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.keys: dict[int, str] = {}
        self.queues: dict[Queue, int] = {}
        self.recursions: dict[Recursion, int] = {}
        self.groups: dict[str, str] = {}  # of colocation groups: what files have for their keys
        for key in (key for node in contents.nodes for key in group_keys(node)):
            self.groups.setdefault(key, str(len(self.groups)))
        places = {label: place for place, label in enumerate(sorted(self.labels.values()))}
        self.groups |= {v.key: f"v{places[label]}" for v, label in self.labels.items() if v.key in self.groups}
        self._tables()

    def _tables(self) -> None:
        # type -> tag and what stands under it; a list is written leaf by leaf. Ref before tuple, bool before int.
        self.kinds: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
            (Subgraph, "$subgraph", self.subgraph),
            (Recursion, "$recursion", self.recursion),
            (Ref, "$ref", lambda ref: ref.input),
            (Dim, "$dim", lambda dim: dim.expr),
            (tuple, "$tuple", list),
            (Mapping, "$map", lambda mapping: [list(pair) for pair in mapping.items()]),
            (float, "", lambda number: float(number) if math.isfinite(number) else {"$float": repr(float(number))}),
            (complex, "$complex", lambda number: [number.real, number.imag]),
            (torch.dtype, "$dtype", dtype_name),
            (torch.layout, "$layout", lambda layout: str(layout).removeprefix("torch.")),
            (torch.memory_format, "$memory_format", lambda form: str(form).removeprefix("torch.")),
            (torch.device, "$device", str),
            (Variable, "$variable", self.labels.__getitem__),
            (Queue, "$queue", self.queue),
            (torch.Tensor, "$tensor", self.tensor),
            (int, "", int),
            (str, "", str),
        )

    def value(self, value: Value) -> list[int]:
        return [self.position[value.node], value.index]

    def source(self, source: SourceLine | None) -> int | None:
        if source is None:
            return None
        return self.sources.setdefault((source.label, source.line, source.text), len(self.sources))

    def owner(self, owner: Owner | None) -> int | None:
        return None if owner is None else self.owners.setdefault((owner.key, owner.index), len(self.owners))

    def guard(self, guard: Guard) -> dict[str, Any]:
        fields = {
            "expr": guard.expr, "source": self.source(guard.source), "owner": self.owner(guard.owner),
            "local": guard.is_local or None,
        }  # fmt: skip
        return {key: value for key, value in fields.items() if value is not None}

    def node(self, node: Node) -> dict[str, Any]:
        """All fields but the empty ones."""
        fields = {
            "name": node.name,
            "op": node.op,
            "in": [self.value(value) for value in node.inputs],
            "out": [spec_json(spec) for spec in node.outputs],
            "attrs": {key: self.leaf(node, key, value) for key, value in node.attrs.items()},
            "control": [self.position[i] for i in node.control],
            "effects": [self.position[i] for i in node.effects],
            "scope": list(node.scope),
            "source": self.source(node.source),
            "owner": self.owner(node.owner),
            "device": self.request(node),
            "tags": sorted(node.tags),
            "stream": node.stream,
            "forward": self.position.get(node.forward) if node.forward is not None else None,
            "fixed": list(node.fixed),
        }
        named = {key: fields[key] for key in self.only} if self.only else fields
        return {key: value for key, value in named.items() if value is not None and value != [] and value != {}}

    def request(self, node: Node) -> str | None:
        """The request of a node; the node that a colocation group is named after says so, ids are not kept."""
        device, own = node.device, str(node.id)
        if own in self.groups:
            group = with_group(node.name, own)
            is_in_another = device is not None and "/with:" in device
            device = (device or "") + (group.replace("/with:", "+") if is_in_another else group)
        return map_groups(device, lambda name, key: f"{name}#{self.groups.get(key, key)}")

    def subgraph(self, subgraph: Subgraph) -> dict[str, Any]:
        """A subgraph, whose nodes are named by position; shared objects stand in this writer's tables."""
        inner = copy(self)
        inner.position = subgraph.contents.position
        inner._tables()
        return {
            "in": [inner.value(value)[0] for value in subgraph.inputs],
            "out": [None if value is None else inner.value(value) for value in subgraph.outputs],
            "guards": [inner.guard(guard) for guard in subgraph.contents.guards],
            "nodes": [inner.node(node) for node in subgraph.contents.nodes],
        }

    def recursion(self, function: Recursion) -> dict[str, Any]:
        """The number of a function, with its definition at the first mention."""
        if function in self.recursions:
            return {"id": self.recursions[function]}
        number = self.recursions[function] = len(self.recursions)
        return {"id": number, "name": function.name, "limit": function.limit, "body": self.subgraph(function.body)}

    def leaf(self, node: Node, key: str, leaf: object) -> Any:
        """One attr in JSON; raises InvalidArgument for a type that files do not hold."""
        if leaf is None or type(leaf) in (bool, int, str):
            return leaf
        if isinstance(leaf, list):
            return [self.leaf(node, key, item) for item in leaf]
        for kind, tag, write in self.kinds:
            if isinstance(leaf, kind):
                body = write(leaf)
                return {tag: self.leaf(node, key, body) if isinstance(body, list) else body} if tag else body
        raise InvalidArgument(
            f"attr {key} of node {node.name} ({node.op}) is a {type(leaf).__name__}, which graph files do not hold",
            node=node.name,
            op=node.op,
        )

    def queue(self, queue: Queue) -> list[Any]:
        """Number, name, capacity (None: no limit), dtype and shape of each component, and kind of a queue."""
        number = self.queues.setdefault(queue, len(self.queues))
        parts = [[dtype_name(dtype), None if shape is None else list(shape)] for dtype, shape in queue.components]
        kind = [] if queue.kind == "fifo" else [queue.kind, [list(option) for option in queue.options.items()]]
        return [number, queue.name, None if queue.capacity == math.inf else queue.capacity, parts, *kind]

    def tensor(self, tensor: torch.Tensor) -> str:
        """Its key; one for a tensor that several nodes share."""
        key = self.keys.setdefault(id(tensor), f"c{len(self.keys)}")
        self.tensors[key] = tensor
        return key
