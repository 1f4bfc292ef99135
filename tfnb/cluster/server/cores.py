"""The shards of one process as one machine: ``cores.on(events, now) -> effects``. No clock, I/O or thread.

Messages between shards of the same process are delivered in the same call, so that a synchronous step over all of them
commits with the last part that comes; messages for other processes stay effects.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import Effect, Event, Reply, RequestArrival, Send
from tfnb.cluster.server.room import Room
from tfnb.cluster.wire.messages import OpId, Request, aborted, failed

UNHEARD = -1  # the ticket of what a shard is told by another one here: nobody waits for the answer


class Cores:
    """Cores by the number of their shard, with one budget of bytes."""

    def __init__(self) -> None:
        self._of: dict[int, Core] = {}
        self._all: list[Core] = []
        self._room = Room(self._all)
        self._told = itertools.count()

    def __contains__(self, shard: int) -> bool:
        return shard in self._of

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Core]:
        return iter(self._all)

    @property
    def only(self) -> int | None:
        """The number of the shard, where there is one."""
        return self._all[0].shard if len(self._all) == 1 else None

    @property
    def largest_push(self) -> int | None:
        """Bytes of tensors that a message with a push to each shard can have; None: any number."""
        each = [core.largest_push for core in self._all]
        sizes = [nbytes for nbytes in each if nbytes is not None]
        return sum(sizes) if len(sizes) == len(each) else None

    @property
    def waits(self) -> bool:
        """Whether a request waits inside."""
        return any(core.lines for core in self._all)

    def hold(self, nbytes: int) -> None:
        """Count so many bytes beside the shards in the budget: copies of the shards of other processes."""
        self._room.beside(nbytes)

    def add(self, core: Core) -> None:
        """One more shard."""
        self._of[core.shard] = core
        self._all.append(core)
        core.room = self._room

    def on(self, events: Iterable[tuple[int, Event]], now: float) -> list[Effect]:
        """The effects of events, each at its shard."""
        found: list[Effect] = []
        ahead = deque(events)
        while ahead:
            shard, event = ahead.popleft()
            core = self._of[shard]
            for effect in _effects(core, event, now):
                match effect:
                    case Reply(ticket, _) if ticket == UNHEARD:
                        pass
                    case Send(to, method, meta) if to in self._of:
                        op = OpId(f"shard {shard}", next(self._told))
                        request = Request(method, op, core.epoch, core.incarnation, meta)
                        ahead.append((to, RequestArrival(UNHEARD, request)))
                    case _:
                        found.append(effect)
        return found


def _effects(core: Core, event: Event, now: float) -> list[Effect]:
    """The effects of an event. An invalid request is answered with its error, without harm to other requests."""
    try:
        return core.on(event, now)
    except BaseException as error:  # also SystemExit of a kernel: it becomes data at this edge; nothing was written
        if not isinstance(event, RequestArrival):
            raise
        return [Reply(event.ticket, failed(error if isinstance(error, Exception) else aborted(error)))]
