"""Chunks of Dask data as a task reads them: from the worker that holds them, directly, when a step needs them."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from distributed import Client, Future, Worker

from tfnb.errors import DeadlineExceeded, InvalidArgument, UnsupportedDtype
from tfnb.graph.spec import dtype_name
from tfnb.state.chunks import as_rows, as_tensor

WITHIN = 600.0  # seconds for one chunk: Dask may have to compute it again


def as_chunk(computed: object) -> torch.Tensor:
    """A chunk computed by Dask, as a tensor. Raises InvalidArgument or UnsupportedDtype."""
    try:
        rows = as_rows(computed)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{type(computed).__name__} has no rows of one shape: {error}") from error
    try:
        return as_tensor(rows)
    except TypeError as error:
        raise UnsupportedDtype(f"torch has no dtype {rows.dtype}: {error}") from error


def described(computed: object) -> tuple[list[int], str]:
    """The shape and dtype of a chunk.

    >>> described([1.5, 2.5])
    ([2], 'float64')
    """
    chunk = as_chunk(computed)
    return list(chunk.shape), dtype_name(chunk.dtype)


def first_rows(computed: object, rows: int) -> torch.Tensor:
    """So many rows of a chunk, at most.

    >>> first_rows([1.5, 2.5, 3.5], 2)
    tensor([1.5000, 2.5000], dtype=torch.float64)
    """
    return as_chunk(computed)[:rows].clone()


class Reader:
    """Reads chunks for a task, through a Dask client of its own that is open while a training needs one."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._client: asyncio.Future[Client] | None = None

    async def read(self, key: Any, what: str) -> torch.Tensor:
        """The chunk of this key. what: the name of the chunk in errors."""
        if self._client is None:
            self._client = asyncio.ensure_future(self._connected())
        client = await asyncio.shield(self._client)
        # as a dependency of a task here Dask brings the chunk itself, and computes it again where its worker is lost
        here = client.submit(as_chunk, Future(key, client), workers=[self._worker.address], pure=False)
        try:
            found: torch.Tensor = await asyncio.wait_for(client.gather(here, direct=True, asynchronous=True), WITHIN)
            return found
        except TimeoutError:
            raise DeadlineExceeded(f"{what} did not come within {WITHIN:.0f} s (key {key})") from None
        except Exception as error:
            raise InvalidArgument(f"{what} was not computed (key {key}): {type(error).__name__}: {error}") from error
        finally:
            here.release()

    async def _connected(self) -> Client:
        return await Client(
            self._worker.scheduler.address, security=self._worker.security, asynchronous=True, direct_to_workers=True,
            set_as_default=False, name="tfnb",
        )  # fmt: skip

    async def close(self) -> None:
        """Close the client: no training reads any more."""
        made, self._client = self._client, None
        if made is not None:
            await (await made).close()
