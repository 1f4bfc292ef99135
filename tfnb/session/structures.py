"""Fetches and feeds with the user's names and nesting: their meaning in a graph, and their structure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from operator import is_
from typing import Any

import torch

from tfnb.errors import FeedError, NotFound, ShapeError
from tfnb.gradients import IndexedSlices
from tfnb.graph import Graph, Node, Value, Variable
from tfnb.recording import Operation, Tensor
from tfnb.recording import graph as graph_named
from tfnb.recording.values.tensor import missing
from tfnb.recording.values.variables import known
from tfnb.session.feeding import listing

Fetch = torch.Tensor | Operation | Variable | IndexedSlices | Value | Node | str
Fetches = Fetch | Sequence["Fetches"] | Mapping[Any, "Fetches"]  # one, or any nesting of them
FeedKey = torch.Tensor | Variable | IndexedSlices | Value | str  # strings name tensors, or axes whose size varies
FeedKeys = FeedKey | Sequence[FeedKey] | Mapping[str, FeedKey]  # which part of an item of data is fed to what


def parts_of(keys: Sequence[Any]) -> tuple[Any, ...]:
    """Feed keys with values and indices in place of IndexedSlices."""
    return tuple(p for key in keys for p in ((key.values, key.indices) if isinstance(key, IndexedSlices) else (key,)))


def spread(feeds: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The same for keys with their values.

    Raises FeedError for a value that is no IndexedSlices, ShapeError for one of another shape.
    """
    found: dict[Any, Any] = {}
    for key, value in feeds:
        if not isinstance(key, IndexedSlices):
            found[key] = value
            continue
        if not isinstance(value, IndexedSlices):
            raise FeedError(f"cannot feed {type(value).__name__} for {key!r}: feed tfnb.IndexedSlices")
        if value.dense_shape != key.dense_shape:
            raise ShapeError(f"cannot feed IndexedSlices of {list(value.dense_shape)} for {key!r}")
        found |= {key.values: value.values, key.indices: value.indices}
    return found


def key_of(item: object) -> Any:
    """A hashable key of a fetch structure or feed key."""
    if isinstance(item, Tensor):
        return item.value if item._feed is None else (item.value, item._feed)
    if isinstance(item, (list, tuple)):
        return (type(item), *map(key_of, item))
    if isinstance(item, IndexedSlices):
        return (IndexedSlices, key_of(item.values), key_of(item.indices), item.dense_shape)
    if isinstance(item, Mapping):
        return (type(item), *((k, key_of(v)) for k, v in item.items()))
    if isinstance(item, Operation):
        return item.value
    if isinstance(item, torch.Tensor):
        return id(item)
    if isinstance(item, _SIZES):
        raise _number(item)
    return item


_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _number(item: object, what: str = "fetch") -> FeedError:
    """The error of a fetch or feed key that is a number: a size of a recording, or one of Python's own."""
    if isinstance(item, _SIZES):
        return FeedError(
            f"cannot {what} the size {item}: record torch.tensor(SIZE) in the cell, or `with tfnb.record(...):`, and "
            f"{what} that"
        )
    return FeedError(
        f"cannot {what} {item!r}: it is a number of Python, as the recording left it, and no value of the graph; what "
        "a run shall compute has to come from recorded tensors"
    )


def structure(item: object, leaves: list[Any]) -> Callable[[Sequence[Any]], Any]:
    """Collect the leaves; the result puts values back into the structure."""
    if isinstance(item, IndexedSlices):
        pair = structure((item.values, item.indices), leaves)
        return lambda values: item.like(*pair(values))
    if isinstance(item, Value) or not isinstance(item, (list, tuple, Mapping)):
        leaves.append(item)
        place = len(leaves) - 1
        return lambda values: values[place]
    if isinstance(item, Mapping):
        inner = {key: structure(part, leaves) for key, part in item.items()}
        return lambda values: {key: part(values) for key, part in inner.items()}
    parts = [structure(part, leaves) for part in item]
    if hasattr(item, "_fields"):
        return lambda values: type(item)(*(part(values) for part in parts))
    return lambda values: type(item)(part(values) for part in parts)


def flat(item: Any, leaves: list[Any]) -> bool:
    """Whether these leaves are the items of a list or tuple, so that its type makes the structure of them."""
    return type(item) in (list, tuple) and len(item) == len(leaves) and all(map(is_, item, leaves))


def places_of(is_variable: list[bool]) -> list[int]:
    """Where each leaf's result stands: fetched values first, variables behind them."""
    values = itertools.count()
    variables = itertools.count(is_variable.count(False))
    return [next(variables) if late else next(values) for late in is_variable]


def graph_of(fetches: object) -> Graph:
    """The graph that fetches belong to; names and Variables are looked up in the current graph."""
    leaves: list[Any] = []
    structure(fetches, leaves)
    for leaf in leaves:
        if isinstance(leaf, (Tensor, Operation)):
            return leaf.graph
    number = next((leaf for leaf in leaves if isinstance(leaf, (*_SIZES, Number))), None)
    if number is not None:
        raise _number(number)
    plain = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and known(leaf) is None), None)
    if plain is not None:
        raise FeedError(
            f"cannot fetch a plain tensor of shape {list(plain.shape)}: it was made outside a recording. "
            "Compute it inside a %%tfgraph cell or `with tfnb.record(NAME):`"
        )
    try:
        return graph_named()
    except NotFound:
        if leaves and all(isinstance(leaf, Variable) for leaf in leaves):
            return Graph()  # a Variable has its value without any
        raise FeedError(
            f"nothing to run: {fetches!r} names no graph, and none has a name yet; record one with %%tfgraph NAME or "
            "`with tfnb.record(NAME):`, or use tfnb.Session(graph).run"
        ) from None


def value_of(graph: Graph, item: object, what: str = "fetch") -> Value:
    """The value of a graph that a fetch or feed key means; raises FeedError, NotFound or StaleNode."""
    if isinstance(item, str):
        named = graph.contents.feed_names.get(item) if what == "feed" else None
        return named or graph.value(item)
    if isinstance(item, (Tensor, Operation)):
        if item.graph is not graph:
            here = f"not in {graph.name}"
            if item.graph.name == graph.name:
                here = (
                    "another graph of the same name, recorded before or after this one: take the name of this recording"
                )
            raise FeedError(f"cannot {what} {item.name}: it is in graph {item.graph.name}, {here}")
        value = item.feed_value if what == "feed" and isinstance(item, Tensor) else item.value
        if value.node not in graph.contents.by_id:
            raise missing(graph, value, f"cannot {what} a tensor that is")
        return value
    if isinstance(item, Value):
        return item
    if isinstance(item, Node):
        return Value(item.id)
    if isinstance(item, torch.Tensor):
        left = _left_in(graph, item) if what == "fetch" else None
        if left is not None:
            return left
        raise FeedError(
            f"cannot {what} a plain tensor of shape {list(item.shape)}: it was made outside a recording and is not "
            f"in graph {graph.name}. Compute it in the %%tfgraph cell, or {what} one of: {listing(graph)}"
        )
    if isinstance(item, (*_SIZES, Number)):
        raise _number(item, what)
    raise FeedError(f"cannot {what} {item!r}: a recorded tensor, Variable, Operation or name was expected")


def variable_of(graph: Graph, item: object) -> Variable | None:
    """The Variable named by a fetch or feed key; None if it names none."""
    if isinstance(item, Variable):
        return item
    if isinstance(item, torch.Tensor) and not isinstance(item, Tensor):
        var = known(item)
        mine = var is not None and any(var is other for other in graph.contents.variables.values())
        return var if mine and _left_in(graph, item) is None else None
    if isinstance(item, str) and item not in graph and item.rpartition(":")[0] not in graph:
        return graph.contents.variables.get(item)
    return None


def fed_by(graph: Graph, key: object) -> tuple[Value, ...]:
    """The values fed by a key: one, or for a Variable all its reads."""
    variable = variable_of(graph, key)
    if variable is None:
        return (value_of(graph, key, "feed"),)
    reads = tuple(Value(n.id) for n in graph.nodes if n.op == "tfnb.read" and n.attrs["variable"] is variable)
    if not reads:
        raise FeedError(f"cannot feed variable {variable.name}: graph {graph.name} does not read it")
    return reads


def _left_in(graph: Graph, tensor: torch.Tensor) -> Value | None:
    """The last write of the recorded code into a Parameter or buffer, so that fetching the tensor runs the write."""
    var = known(tensor)
    writes = (n for n in reversed(graph.nodes) if n.op == "tfnb.assign" and n.attrs["variable"] is var)
    return next((Value(node.id) for node in writes if "step" not in node.tags), None)
