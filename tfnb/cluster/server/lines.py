"""Requests waiting inside of a server, a line for each awaited event, in order of arrival. Data only.

A caller is answered ``again`` after `POLL` seconds, and asks again under the same identity, in the same place. A caller
that does not come back for `PATIENCE` seconds, or is reported lost, leaves the line.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tfnb.cluster.wire.messages import POLL, OpId, Request

PATIENCE = 30.0  # seconds that a place is kept for a caller
TURN = "turn:"  # how the line of a request begins that waits for a decision: of a contribution, or of a bounded read
ENDS = "ends:"  # how the line of a channel begins that waits for the end of one of its acts


@dataclass(slots=True)
class Waiting:
    """One request. ``ticket``: of the call that waits for the answer, None between two calls."""

    request: Request
    line: str
    ticket: int | None
    since: float


class Lines:
    """All requests that wait.

    >>> lines = Lines()
    >>> lines.join(Waiting(Request("take", OpId("a", 1)), "sums", 7, 0.0))
    >>> lines.head("sums").ticket, OpId("a", 1) in lines, len(lines)
    (7, True, 1)
    """

    def __init__(self) -> None:
        self._lines: dict[str, OrderedDict[OpId, Waiting]] = {}
        self._turns: dict[str, OrderedDict[OpId, Waiting]] = {}  # those that wait for a decision
        self._ends: dict[str, OrderedDict[OpId, Waiting]] = {}  # those of channels
        self._of: dict[OpId, Waiting] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, op: OpId) -> bool:
        return op in self._of

    def names(self, *, with_turns: bool) -> list[str]:
        """Names of lines with waiting requests, without those of channels, which are named by what they wait for; with
        or without the (possibly many) lines that wait for a decision.
        """
        return [*self._lines, *self._turns] if with_turns else list(self._lines)

    def _with(self, line: str) -> dict[str, OrderedDict[OpId, Waiting]]:
        if line.startswith(ENDS):
            return self._ends
        return self._turns if line.startswith(TURN) else self._lines

    def has(self, line: str) -> bool:
        """Whether a line has waiting requests."""
        return line in self._with(line)

    def head(self, line: str) -> Waiting | None:
        """The first request of a line with an open call. A request between two calls keeps its place, and is not
        answered.
        """
        here = self._with(line).get(line, OrderedDict())
        return next((waiting for waiting in here.values() if waiting.ticket is not None), None)

    def join(self, waiting: Waiting) -> None:
        """Append a request to its line."""
        self._with(waiting.line).setdefault(waiting.line, OrderedDict())[waiting.request.op] = waiting
        self._of[waiting.request.op] = waiting

    def renew(self, op: OpId, ticket: int, now: float) -> tuple[str, int | None]:
        """Continue a request under a new call; returns its line, and the ticket of the earlier call, if still open."""
        waiting = self._of[op]
        before, waiting.ticket, waiting.since = waiting.ticket, ticket, now
        return waiting.line, before

    def leave(self, op: OpId) -> None:
        """Remove a request from its line."""
        waiting = self._of.pop(op)
        lines = self._with(waiting.line)
        del lines[waiting.line][op]
        if not lines[waiting.line]:
            del lines[waiting.line]

    def polled(self, now: float) -> list[int]:
        """Tickets of calls that have waited for `POLL` seconds. Their requests stay; requests whose caller did not come
        back are removed.
        """
        found = []
        for op, waiting in list(self._of.items()):
            if waiting.ticket is not None and now - waiting.since >= POLL:
                found.append(waiting.ticket)
                waiting.ticket, waiting.since = None, now
            elif waiting.ticket is None and now - waiting.since >= PATIENCE:
                self.leave(op)
        return found

    def gone(self, client: str) -> list[int]:
        """Remove the requests of a lost client; returns their open tickets."""
        ops = [op for op in self._of if op.client == client]
        found = [self._of[op].ticket for op in ops]
        for op in ops:
            self.leave(op)
        return [ticket for ticket in found if ticket is not None]

    def all(self) -> list[int]:
        """Remove all requests; returns the open tickets."""
        found = [waiting.ticket for waiting in self._of.values() if waiting.ticket is not None]
        self._lines.clear()
        self._turns.clear()
        self._ends.clear()
        self._of.clear()
        return found
