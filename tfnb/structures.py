"""Fetches and feeds as the user nests them: lists, tuples, dictionaries and IndexedSlices of recorded tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tfnb.errors import FeedError, NotFound, ShapeError
from tfnb.gradients import IndexedSlices
from tfnb.graph import Graph, Value
from tfnb.recording import Operation, Tensor
from tfnb.recording import graph as graph_named
from tfnb.recording.variables import known


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


def key_of(item: Any) -> Any:
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
    return item


def structure(item: Any, leaves: list[Any]) -> Callable[[Sequence[Any]], Any]:
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


def places_of(is_variable: list[bool]) -> list[int]:
    """Where each leaf's result stands: fetched values first, variables behind them."""
    values = itertools.count()
    variables = itertools.count(is_variable.count(False))
    return [next(variables) if late else next(values) for late in is_variable]


def graph_of(fetches: Any) -> Graph:
    """The graph that fetches belong to; names are looked up in the current graph."""
    leaves: list[Any] = []
    structure(fetches, leaves)
    for leaf in leaves:
        if isinstance(leaf, (Tensor, Operation)):
            return leaf.graph
    plain = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and known(leaf) is None), None)
    if plain is not None:
        raise FeedError(
            f"cannot fetch a plain tensor of shape {list(plain.shape)}: it was made outside a recording. "
            "Compute it inside a %%tfgraph cell or `with tfnb.record(NAME):`"
        )
    try:
        return graph_named()
    except NotFound:
        raise FeedError(f"nothing to run: {fetches!r} names no graph") from None
