"""Hears that a Dask client is about to be closed, while its connections still stand. Dask glue.

A client tears down its preloads first of all, in its event loop: this is one of them, so that a user who closes the
client before the cluster loses no values.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from distributed import Client


class Farewell:
    """Awaits ``before`` when the client is closed, unless cancelled earlier."""

    name = "tfnb"

    def __init__(self, client: Client, before: Callable[[], Awaitable[None]]) -> None:
        self._client, self._before = client, before
        client.preloads._preloads.append(self)  # type: ignore[arg-type]

    async def start(self) -> None:
        """The client connects again: nothing is to be done."""

    async def teardown(self) -> None:
        """The client is about to be closed."""
        await self._before()

    def cancel(self) -> None:
        """The cluster is closed already."""
        with suppress(ValueError):
            self._client.preloads._preloads.remove(self)  # type: ignore[arg-type]
