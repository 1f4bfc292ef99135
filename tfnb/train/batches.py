"""Batches of training data: rows of arrays in shuffled order, or feed dicts that somebody else makes.

The order depends on the seed alone, so a cluster trains on the same batches as this machine. Imports graph and state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from tfnb.errors import InvalidArgument, ResourceExhausted, ShapeError
from tfnb.graph import Dim, current
from tfnb.interrupts import from_signal_handler
from tfnb.state.batch_order import Arrays, RowOrder, Rows
from tfnb.state.chunks import ChunkedArray, as_rows, as_tensor, is_collection, without_frames
from tfnb.state.input_sources import Position, Source

DEFAULT_BATCH = 32  # rows
MOST = 4 << 30  # bytes of a Dask collection that are computed here

Data = Mapping[Any, Any] | Iterable[Any]  # arrays by placeholder, or batches: feeds, or items such as a DataLoader's


class Batch(NamedTuple):
    """The feeds of one step: ``values`` in the order of ``keys``, ``rows`` of them, in pass ``epoch`` (from 1)."""

    epoch: int
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    rows: int
    position: Position | None = None  # of a `Source`, behind them


class PassEnd(NamedTuple):
    """Between two passes: ``epoch`` is over, and nothing is drawn of the next one."""

    epoch: int


@dataclass(slots=True)
class Batches:
    """Batches to iterate once, ``parts`` with a `PassEnd` between two passes, and their number (None: unknown).

    begun: the pass of the last batch that was taken before, 0 for none; data may have to be drawn to know it.
    """

    parts: Iterator[Batch | PassEnd]
    total: int | None
    rows: Arrays | None = None  # the arrays that they are made from
    keys: tuple[Any, ...] = ()  # of the arrays
    begun: int = 0

    @property
    def each(self) -> Iterator[Batch]:
        """The batches alone."""
        return (part for part in self.parts if isinstance(part, Batch))

    @property
    def is_ours(self) -> bool:
        """Whether they are made from arrays, so that waiting for the next one cannot block."""
        return self.rows is not None


def batches(
    data: Data, *, epochs: int = 1, steps: int | None = None, batch_size: int | None = None, shuffle: bool = True,
    seed: int = 0, feeds: object = None, begin: int = 0,
) -> Batches:  # fmt: skip
    """Batches of ``data``: ``{key: array}`` with rows on axis 0, or an iterable of feed dicts.

    feeds: what the parts of an item are fed to, where items are no feed dicts: one key, several for a tuple or list,
    or a dict from the keys of an item, whose other entries are left out.

    epochs: passes over the data; the last batch of a pass may be short. steps: so many batches in all instead, over
    as many passes as it takes. batch_size: rows of arrays in a batch, 32 unless given. A value without an axis is fed
    whole to every step. begin: steps of the same batches that were taken before; what can be iterated again is drawn
    from its start and they are dropped, a `Source` and an iterator go on where they are. Raises ShapeError for unequal
    numbers of rows or none, ResourceExhausted for a large Dask collection, InvalidArgument for anything else.
    """
    _at_least_one(epochs=epochs, steps=steps, batch_size=batch_size)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise InvalidArgument(f"seed must be an int, not {seed!r}: the order of the rows depends on it alone")
    if is_collection(data):
        raise InvalidArgument(
            f"data is a Dask {type(data).__name__}: say what it feeds, as in {{x: array}} or "
            "{x: frame[['a', 'b']], y: frame['c']}; or feed the batches of tfnb.Source(data).batch(n) with feeds="
        )
    if isinstance(data, Mapping) and feeds is not None:
        raise InvalidArgument("feeds= is for an iterable of batches: {placeholder: array} says what each array feeds")
    if isinstance(data, Mapping):  # plain numbers and a bool: a cluster is told of them
        size, total = int(batch_size or DEFAULT_BATCH), None if steps is None else int(steps)
        return _of_arrays(data, int(epochs), total, size, bool(shuffle), int(seed), begin)
    if batch_size is not None:
        raise InvalidArgument(f"batch_size={batch_size} is for arrays: an iterable of feed dicts is in batches already")
    return _of_feeds(data, feeds, epochs, steps, begin)


def _at_least_one(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is None and name != "epochs":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise InvalidArgument(f"{name} must be an int of at least 1, not {value!r}")


# -- arrays -------------------------------------------------------------------------------------------------------


def _of_arrays(
    data: Mapping[Any, Any], epochs: int, steps: int | None, batch_size: int, shuffle: bool, seed: int, begin: int
) -> Batches:  # fmt: skip
    keys, arrays = tuple(data), tuple(as_array(key, value) for key, value in data.items())
    order = RowOrder(_rows(keys, arrays), batch_size, shuffle, seed)
    total = steps or epochs * order.per_pass

    def each() -> Iterator[Batch | PassEnd]:
        taken = Rows(cast(tuple[torch.Tensor, ...], arrays), order)  # chunks lie on a cluster, which takes the rows
        for step in range(begin, total):
            epoch, start, stop = order.place(step)
            if step and not start:
                yield PassEnd(epoch - 1)
            yield Batch(epoch, keys, taken.part(step, 0, stop - start), stop - start)

    return Batches(each(), total, Arrays(arrays, order), keys, order.place(begin - 1)[0] if begin else 0)


def as_array(key: object, value: object) -> torch.Tensor | ChunkedArray:
    """Data as a tensor, without a copy where that is possible. A Dask collection is computed, up to `MOST` bytes."""
    if isinstance(value, ChunkedArray):
        return value
    value = _computed(key, value) if is_collection(value) else current.plain(value)
    try:
        return as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"data for {name_of(key)} is {type(value).__name__}, no array: {error}") from None


def _computed(key: object, collection: Any) -> Any:
    """All rows of a Dask collection, computed here: in no order of chunks, so all of them are needed at once."""
    collection = without_frames(collection)
    nbytes = getattr(collection, "nbytes", None)
    if isinstance(nbytes, int | float) and nbytes > MOST:
        raise ResourceExhausted(
            f"data for {name_of(key)} has {nbytes / 2**30:.1f} GiB. Without a cluster a Dask collection is computed "
            f"here as a whole, up to {MOST / 2**30:.0f} GiB. Connect a cluster, where its chunks stay on the workers: "
            "tfnb.connect(client), or %tfcluster 4"
        )
    try:
        return as_rows(collection.compute())
    except Exception as error:
        if from_signal_handler(error):
            raise
        raise InvalidArgument(
            f"data for {name_of(key)}: Dask could not compute it: {type(error).__name__}: {error}"
        ) from error


def _rows(keys: tuple[Any, ...], arrays: tuple[torch.Tensor | ChunkedArray, ...]) -> int:
    """How many rows all the arrays have."""
    lengths = {name_of(key): len(array) for key, array in zip(keys, arrays, strict=True) if array.dim()}
    if not lengths:
        raise InvalidArgument("data needs at least one array with rows on axis 0: {placeholder: array}")
    first, *others = lengths
    for other in others:
        if lengths[other] != lengths[first]:
            raise ShapeError(f"data has {lengths[first]} rows for {first} and {lengths[other]} rows for {other}")
    if lengths[first] == 0:
        raise ShapeError(f"data for {', '.join(lengths)} has no rows")
    return lengths[first]


def name_of(key: object) -> str:
    """The name of a feed key or fetch, for messages."""
    return key if isinstance(key, str) else str(getattr(key, "name", key))


# -- feed dicts -----------------------------------------------------------------------------------------------------


def batch_count(data: Any) -> int | None:
    """The number of items in one pass over ``data``, or None where ``len`` raises.

    A DataLoader over an IterableDataset has ``__len__`` and raises TypeError; a stream's own ``__len__`` may raise
    any exception.

    >>> batch_count([{}, {}]), batch_count(iter([{}]))
    (2, None)
    """
    try:
        return len(data)
    except Exception:
        return None


def is_single_pass(data: Data) -> bool:
    """Whether ``data`` is an iterator, and so gives its items once.

    Only an iterator is asked for ``iter``: that of a DataLoader would start its worker processes.
    """
    return isinstance(data, Iterator) and iter(data) is data


def _of_feeds(data: Data, keys: object, epochs: int, steps: int | None, begin: int) -> Batches:
    if not isinstance(data, Iterable):
        by_index = (
            "; it gives items by number: torch.utils.data.DataLoader(data, batch_size=32) makes batches of them, "
            "batch_size=None takes them as batches"
        )
        raise InvalidArgument(
            f"data is {{placeholder: array}} or an iterable of feed dicts, not {type(data).__name__}"
            f"{by_index if hasattr(data, '__getitem__') else ''}"
        )
    is_spent, source = is_single_pass(data), data if isinstance(data, Source) else None
    single_pass = (
        f"epochs={epochs} needs data that can be iterated again, and {type(data).__name__} can be only once: "
        "pass a list or another container, or use epochs=1"
    )
    if is_spent and epochs > 1:
        raise InvalidArgument(single_pass)
    goes_on = begin > 0 and (is_spent or source is not None)
    first = 1 + source.position["epoch"] if goes_on and source is not None else 1
    passes: Iterable[int] = count(first) if steps and not is_spent else range(first, epochs + 1)
    length = batch_count(data)
    if length == 0:
        raise InvalidArgument("data is empty")
    last = None if steps is None else steps - begin if goes_on else steps

    sizes: dict[tuple[Any, ...], str] = {}  # on which rows lie, by the feeds

    def each() -> Iterator[Batch | PassEnd]:
        for epoch in passes:
            if epoch > first:
                yield PassEnd(epoch - 1)
            found = False
            each = _pass_of(source) if source is not None and epoch == first and not goes_on else data
            for number, feeds in enumerate(each):
                found = True
                batch = _fed(epoch, number, feeds if keys is None else _assigned(keys, number, feeds), sizes)
                yield batch if source is None else batch._replace(position=source.position)
            if not found and not (goes_on and epoch == first):  # it may stand at the end of a pass
                if epoch > first and steps is None and source is None:  # iter(data) gave the exhausted iterator again
                    raise InvalidArgument(single_pass)
                return

    parts = each()
    made = Batches(parts, steps or (length and length * epochs), begun=first if goes_on else 0)
    made.parts = _span(made, parts, 0 if goes_on else begin, last)
    return made


def _span(made: Batches, parts: Iterator[Batch | PassEnd], start: int, stop: int | None) -> Iterator[Batch | PassEnd]:
    """What comes behind the first ``start`` batches, up to the batch before ``stop``; nothing is drawn behind that."""
    drawn = 0
    while drawn != stop and (item := next(parts, None)) is not None:
        is_batch = isinstance(item, Batch)
        drawn += is_batch
        if drawn >= start + is_batch:
            yield item
        else:
            made.begun = item.epoch


def _pass_of(source: Source) -> Iterator[Any]:
    """The rest of a pass, or the next pass if none is left."""
    found = False
    for item in source:
        found = True
        yield item
    if not found:
        yield from source


def _assigned(keys: object, number: int, item: object) -> dict[Any, Any]:
    """An item of a DataLoader as a feed dict."""
    if isinstance(keys, Mapping):
        if not isinstance(item, Mapping) or not keys.keys() <= item.keys():
            has = ", ".join(map(repr, item)) if isinstance(item, Mapping) else f"no keys, it is {type(item).__name__}"
            raise InvalidArgument(f"feeds takes {', '.join(map(repr, keys))} of item {number} of data, which has {has}")
        return {key: item[name] for name, key in keys.items()}
    names = tuple(keys) if isinstance(keys, (tuple, list)) else (keys,)
    parts = tuple(item) if isinstance(item, (tuple, list)) else (item,)
    if len(names) != len(parts) or isinstance(item, Mapping):
        shown = f"a dict of {', '.join(map(repr, item))}" if isinstance(item, Mapping) else f"{len(parts)} parts"
        raise InvalidArgument(
            f"item {number} of data is {shown}, and feeds names {len(names)}: "
            "give one key for each part, or a dict such as {'image': x, 'label': y}"
        )
    return dict(zip(names, parts, strict=True))


def _fed(epoch: int, number: int, feeds: object, sizes: dict[tuple[Any, ...], str]) -> Batch:
    if not isinstance(feeds, Mapping):
        raise InvalidArgument(
            f"item {number} of data is {type(feeds).__name__}, not a feed dict such as {{x: images, y: labels}}; "
            "say with feeds=(x, y) what its parts are fed to"
        )
    return Batch(epoch, tuple(feeds), tuple(feeds.values()), _rows_of(feeds, sizes))


def _rows_of(feeds: Mapping[Any, Any], sizes: dict[tuple[Any, ...], str]) -> int:
    """The rows of a batch: the size that varies in most feeds, as axis 0 of most, or is the largest of such.

    Without such a size, as where names are fed, the length of the first feed that has one. Class weights and other
    feeds beside the rows have sizes of their own. sizes: that of each choice of feeds, as the first batch tells it.
    """
    found: dict[str, list[tuple[int, int]]] = {}  # of each size the axes that it is on, and its length there
    for key, value in feeds.items():
        for axis, size in enumerate(getattr(getattr(key, "spec", None), "shape", ())):
            if isinstance(size, Dim) and size.is_symbol and (length := _length(value, axis)) is not None:
                found.setdefault(size.expr, []).append((axis, length))
    if not found:
        return next((length for value in feeds.values() if (length := _length(value, 0)) is not None), 1)
    likely = {size: (sum(not axis for axis, _ in each), len(each), each[0][1]) for size, each in found.items()}
    size = sizes.setdefault(tuple(map(id, feeds)), max(likely, key=lambda size: likely[size]))
    return found.get(size, next(iter(found.values())))[0][1]


def _length(value: Any, axis: int) -> int | None:
    """The length of an axis of an array, or of lists of lists; None where there is no such axis."""
    if hasattr(value, "shape"):
        return value.shape[axis] if axis < len(value.shape) else None
    for _ in range(axis):
        value = value[0] if isinstance(value, (list, tuple)) and value else None
    return len(value) if isinstance(value, (list, tuple)) else None
