"""Events of a core, and effects for its host to carry out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tfnb.cluster.wire.messages import Failure, Ok, Refusal, Request

Answer = Ok | Failure | Refusal


class RequestArrival(NamedTuple):
    """A request came; ``ticket`` is the host's number for the call that waits for its answer."""

    ticket: int
    request: Request


class CoreTick(NamedTuple):
    """Time has passed."""


Event = RequestArrival | CoreTick


class Reply(NamedTuple):
    """Answer the call of this ticket."""

    ticket: int
    answer: Answer


class Send(NamedTuple):
    """Tell another shard; repeated until acknowledged."""

    shard: int
    method: str
    meta: Mapping[str, Any]


Effect = Reply | Send
