"""What comes to a core, and what it lets its host do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tfnb.cluster.wire.messages import Failed, Ok, Refused, Request

Answer = Ok | Failed | Refused


class Arrived(NamedTuple):
    """A request came; ``ticket`` is the host's number for the call that waits for its answer."""

    ticket: int
    request: Request


class Tick(NamedTuple):
    """Time has passed."""


Event = Arrived | Tick


class Reply(NamedTuple):
    """Answer the call of this ticket."""

    ticket: int
    answer: Answer


class Send(NamedTuple):
    """Tell another shard; repeated until it has heard."""

    shard: int
    method: str
    meta: Mapping[str, Any]


Effect = Reply | Send
