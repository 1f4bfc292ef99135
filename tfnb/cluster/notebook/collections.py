"""Dask collections as training data, as the notebook sees them: where their chunks lie, and their rows only for steps
driven from here.

Dask computes the chunks on the workers and keeps them there, and computes those of a lost worker again. What is asked
of a chunk here is its shape, dtype and place, and its rows by ``head`` and ``read``; `reading` is the side of the
tasks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from dask.core import flatten
from distributed import Client, Future, futures_of, wait

from tfnb.cluster.tasks.reading import described, first_rows
from tfnb.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ShapeError, TfnbError
from tfnb.graph.spec import rounded
from tfnb.state.chunks import ChunkedArray, as_rows, as_tensor, is_collection, without_frames

MOST = 4 << 30  # bytes of chunks that are read into the notebook


def in_chunks(client: Client, data: Mapping[Any, Any], timeout: float | None) -> dict[Any, Any]:
    """``data`` with its Dask collections as `ChunkedArray`, computed and kept on the workers.

    Raises InvalidArgument or ShapeError that name the chunk, DeadlineExceeded after ``timeout`` seconds.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with client.as_current():
        kept = {key: _kept(client, key, value) for key, value in data.items() if is_collection(value)}
        return {key: _chunked(client, key, kept[key], end) if key in kept else value for key, value in data.items()}


def read(client: Client, array: torch.Tensor | ChunkedArray) -> torch.Tensor:
    """All rows of an array, in this process: for a training driven step by step from here."""
    if isinstance(array, torch.Tensor):
        return array
    if array.nbytes > MOST:
        raise ResourceExhausted(
            f"data for {array.name} has {array.nbytes / 2**30:.1f} GiB, and this training reads it into the notebook "
            f"(at most {MOST / 2**30:.0f} GiB): every step of it is led from here, or axis 0 of {array.name} has a "
            "fixed size"
        )
    parts = [as_tensor(as_rows(part)) for part in client.gather(list(array.held))]
    return rounded(torch.cat([part for part in parts if len(part)]), array.dtype, array.name)


def head(client: Client, array: torch.Tensor | ChunkedArray, rows: int) -> torch.Tensor:
    """The first rows of an array, in this process: only these rows of chunks are sent. A scalar is given whole."""
    if isinstance(array, torch.Tensor):
        return array[:rows] if array.dim() else array
    asked: list[Future] = []
    left = rows
    for length, chunk in zip(array.lengths, array.held, strict=True):
        if left > 0 and length:
            asked.append(client.submit(first_rows, chunk, left, pure=False))
            left -= length
    return torch.cat(client.gather(asked)).to(array.dtype)


def _kept(client: Client, key: object, collection: object) -> list[Future]:
    """The chunks along axis 0, in order, as futures; the workers begin to compute them."""
    array = without_frames(collection)
    others = range(1, array.ndim) if hasattr(type(array), "rechunk") else ()  # a Delayed has any attribute
    if any(len(array.chunks[axis]) > 1 for axis in others):
        array = array.rechunk(dict.fromkeys(others, -1))
    try:
        kept = client.persist(array)
    except ValueError as error:  # of another cluster
        raise InvalidArgument(f"data for {_name(key)}: Dask cannot compute it on this cluster: {error}") from error
    futures = {future.key: future for future in futures_of(kept)}
    return [futures[key] for key in flatten(kept.__dask_keys__())]


def _chunked(client: Client, key: object, futures: Sequence[Future], end: float | None) -> ChunkedArray | torch.Tensor:
    """The array of computed chunks; a value without an axis as a tensor. Raises as `in_chunks` does."""
    name = _name(key)
    _computed(name, futures, end)
    looks = client.map(described, futures, pure=False)
    _computed(name, looks, end)
    found = client.gather(looks)
    if len(found) == 1 and not found[0][0]:  # a value without an axis: every step takes it whole
        left = None if end is None else max(0.0, end - time.monotonic())
        try:
            return as_tensor(as_rows(futures[0].result(timeout=left)))
        except TimeoutError:
            raise DeadlineExceeded(f"data for {name} did not come from its worker in time") from None
    lengths = tuple(shape[0] if shape else -1 for shape, _ in found)
    filled = [number for number, length in enumerate(lengths) if length]
    if not filled:
        raise ShapeError(f"data for {name} has no rows")
    first = found[filled[0]]
    for number in filled:
        (_, *tail), dtype = [*found[number][0]] or [None], found[number][1]
        if (tail, dtype) != (list(first[0][1:]), first[1]) or lengths[number] < 0:
            shown = f"chunk {filled[0]} has {_shown(first)}, and chunk {number} has {_shown(found[number])}"
            raise ShapeError(f"data for {name}: {shown}")
    places = client.who_has(futures)
    homes = tuple(tuple(places.get(future.key, ())) for future in futures)
    dtype = getattr(torch, first[1])
    return ChunkedArray(name, lengths, tuple(first[0][1:]), dtype, tuple(f.key for f in futures), homes, tuple(futures))


def _computed(name: str, futures: Sequence[Future], end: float | None) -> None:
    """Wait for chunks; raise the error of a failed computation."""
    left = None if end is None else max(0.0, end - time.monotonic())
    try:
        wait(futures, timeout=left, return_when="ALL_COMPLETED")
    except TimeoutError:
        missing = sum(not future.done() for future in futures)
        raise DeadlineExceeded(f"Dask did not compute {missing} of {len(futures)} chunks of {name} in time") from None
    for number, future in enumerate(futures):
        if future.status != "finished":
            error, which = future.exception(), f"chunk {number} of {len(futures)}"
            if isinstance(error, TfnbError):  # it is no array
                raise type(error)(f"data for {name}: {which}: {error.message}") from error
            raise InvalidArgument(
                f"data for {name}: Dask could not compute {which} ({future.key}): {type(error).__name__}: {error}"
            ) from error


def _shown(found: tuple[Sequence[int], str]) -> str:
    return f"{found[1]}{list(found[0])}"


def _name(key: object) -> str:
    return key if isinstance(key, str) else str(getattr(key, "name", key))
