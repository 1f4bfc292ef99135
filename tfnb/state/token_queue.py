"""Token queues as users meet them: recorded in a recording, at work at once outside of one. Semantics S-91, S-93."""

from __future__ import annotations

import math
from typing import Any

import torch

from tfnb.errors import InvalidArgument
from tfnb.graph import current, ops
from tfnb.graph.spec import tensor_of
from tfnb.recording import Operation, Recorder
from tfnb.state.queue_operations import QueueHandle, counted, limited


class TokenQueue(QueueHandle):
    """Tokens for workers: each is of a step, and is held under a lease of some seconds.

    A token that is neither finished nor renewed in that time stands in front of the queue again, and what its holder
    does with it later is refused. In a recording the methods are recorded, outside they act at once. Raises
    InvalidArgument for a lease that is no finite number above 0.

    >>> tokens = TokenQueue(lease=30.0)
    >>> tokens.give(step=7, count=2)
    >>> token, step = tokens.take()
    >>> tokens.renew(token), tokens.finish(token), int(step), tokens.size()
    (None, None, 7, 1)
    >>> tokens.finish(token)
    Traceback (most recent call last):
    tfnb.errors.FailedPrecondition: token 1 is not held any more: it is finished, or its lease of 30 s is over
    """

    def __init__(
        self, lease: float = 30.0, *, name: str = "tokens", container: str = "", shared_name: str | None = None
    ) -> None:
        if isinstance(lease, bool) or not isinstance(lease, int | float) or not 0 < lease < math.inf:
            raise InvalidArgument(f"{name}: a lease is a number of seconds, more than 0, not {lease!r}")
        where: dict[str, Any] = {"container": container, "shared_name": shared_name}
        options = {"lease_ms": max(1, int(1000 * lease))}
        super().__init__(name, math.inf, [(torch.int64, ())], kind="tokens", options=options, **where)

    def give(self, step: object, count: int = 1) -> Operation | None:
        """Put ``count`` tokens of a step."""
        many = counted(self, "give", count)
        steps = tensor_of(step, torch.int64, f"queue {self.name}").reshape(1).expand(many)
        return self._put([steps], {"many": True})  # type: ignore[no-any-return]

    def take(self, *, timeout: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A token's number and its step; waits for a token. Raises OutOfRange if the queue is closed and empty."""
        token, step = self._take(None, limited(timeout))
        return token, step

    def renew(self, token: object) -> Operation | None:
        """Hold a token for another lease; raises FailedPrecondition where that was over."""
        return self._tell("renew", ops.RENEW, token)

    def finish(self, token: object) -> Operation | None:
        """A token is used up; raises FailedPrecondition where its lease was over."""
        return self._tell("finish", ops.FINISH, token)

    def _tell(self, kind: Any, op: str, token: object) -> Operation | None:
        recorder = current.recording()
        if isinstance(recorder, Recorder):
            given = [self._recorded(recorder, token, torch.int64)]
            return self._recorded_with(recorder, op, given, {})  # type: ignore[no-any-return]
        self._act(kind, {}, [self._plain(token, torch.int64)])
        return None
