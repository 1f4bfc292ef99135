"""What the engine is told to work with: tasks, the feeds of a step, asynchronous training in progress. Data only."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tfnb.cluster import plan as p
from tfnb.cluster.messages import Peer
from tfnb.cluster.programs import Placed


@dataclass(eq=False)
class Member:
    """A task as the notebook sees it. ``future`` is Dask's word on whether its worker lives."""

    name: str
    peer: Peer
    future: Any
    info: dict[str, Any] = field(default_factory=dict)
    alive: bool = True
    plans: set[str] = field(default_factory=set)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=32))  # that it computed for a step, lately

    @property
    def reported(self) -> bool:
        """Whether the scheduler still knows the task's worker."""
        return self.future.status == "finished"


@dataclass(frozen=True, slots=True)
class Batch:
    """Feeds of one step, in the order of the program's feeds; ``split``: which of them have the batch's ``rows``."""

    tensors: tuple[torch.Tensor, ...]
    run_index: int
    rows: int | None = None
    split: tuple[bool, ...] = ()

    def part(self, start: int, stop: int) -> list[torch.Tensor]:
        """The feeds of the worker that gets rows ``start`` to ``stop``."""
        if self.rows is None:
            return list(self.tensors)
        return [t[start:stop] if cut else t for t, cut in zip(self.tensors, self.split, strict=True)]


@dataclass
class Flow:
    """Asynchronous training in progress."""

    machine: p.Leases
    placed: Placed
    queue: asyncio.Queue[p.Event]
    results: list[tuple[int, list[Any]]] = field(default_factory=list)
    end: p.Finish | None = None
    is_held: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    carried: set[asyncio.Task[None]] = field(default_factory=set)

    async def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so, or asynchronous training is over."""
        while self.end is None and not is_so():
            self.news.clear()
            await self.news.wait()
