"""Applied mutations: a sliding window of sequence numbers for each client, with the answers given.

A repeated mutation gets its first answer; one that is too old to tell is refused. Plain data, no imports but types.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tfnb.cluster.wire.messages import Failure, Ok, OpId

WINDOW = 1024

Answer = Ok | Failure


@dataclass
class AppliedWindow:
    """Applied sequence numbers of one client: bit i of ``seen`` is ``highest - i``."""

    highest: int = -1
    seen: int = 0
    acks: dict[int, Answer] = field(default_factory=dict)

    def has(self, seq: int) -> bool:
        """Whether ``seq`` was applied; False below the window."""
        return 0 <= self.highest - seq < WINDOW and bool(self.seen >> (self.highest - seq) & 1)

    def add(self, seq: int, ack: Answer) -> None:
        """Mark ``seq`` as applied."""
        if seq > self.highest:
            for old in range(max(0, self.highest - WINDOW + 1), min(self.highest, seq - WINDOW) + 1):
                self.acks.pop(old, None)
            ahead = min(seq - self.highest, WINDOW)  # who sends any number takes no memory
            self.seen = (self.seen << ahead) & ((1 << WINDOW) - 1)
            self.highest = seq
        self.seen |= 1 << (self.highest - seq)
        self.acks[seq] = ack


class Ledger:
    """Windows of all clients.

    >>> ledger = Ledger()
    >>> ledger.record(OpId("a", 5), Ok({"version": 1}))
    >>> ledger.ack(OpId("a", 5)).meta, ledger.ack(OpId("a", 4)), ledger.is_too_old(OpId("a", 5 - WINDOW))
    ({'version': 1}, None, True)
    """

    def __init__(self) -> None:
        self.clients: dict[str, AppliedWindow] = {}
        self.applied = 0
        self.dups = 0

    def ack(self, op: OpId) -> Answer | None:
        """The answer given to ``op``; None if not applied."""
        window = self.clients.get(op.client)
        if window is None or not window.has(op.seq):
            return None
        self.dups += 1
        return window.acks[op.seq]

    def has(self, op: OpId) -> bool:
        """Whether ``op`` was applied, as far back as the window."""
        window = self.clients.get(op.client)
        return window is not None and window.has(op.seq)

    def is_too_old(self, op: OpId) -> bool:
        """Whether ``op`` lies below the window, where applied operations are forgotten."""
        window = self.clients.get(op.client)
        return window is not None and op.seq <= window.highest - WINDOW

    def record(self, op: OpId, ack: Ok) -> None:
        """``op`` was applied and answered with ``ack``."""
        self.clients.setdefault(op.client, AppliedWindow()).add(op.seq, ack)
        self.applied += 1
