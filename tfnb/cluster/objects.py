"""Queues, accumulators and tokens of a server, by key: the classes of `tfnb.state`, reached by requests. Pure.

A method gives an answer, or None where it has to wait; `Core` then keeps the request in its line. Lines are in order of
arrival, so a close stands behind the puts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tfnb.cluster.hand_outs import HandOuts
from tfnb.cluster.messages import Ok, OpId, Request
from tfnb.errors import InvalidArgument, NotFound
from tfnb.graph import Spec
from tfnb.state.accumulator import Accumulator, DenseSum
from tfnb.state.queue_machine import Attempt, Kind, QueueMachine
from tfnb.state.tokens import Tokens

Thing = QueueMachine | Accumulator | Tokens
Method = Callable[[Request, float], Ok | None]

LINES: Mapping[str, str] = {
    "enqueue": "put", "close": "put", "dequeue": "get", "take_grad": "mean", "token_take": "token",
}  # fmt: skip
"""Methods that can wait, and the line of their object in which they do."""


class Objects:
    """The objects of one server."""

    METHODS = frozenset({
        "make", "enqueue", "dequeue", "taken", "close", "apply_grad", "take_grad", "set_step", "token_give",
        "token_take", "token_renew", "token_end",
    })  # fmt: skip

    def __init__(self) -> None:
        self.things: dict[str, Thing] = {}
        self.outs = HandOuts()
        self._made: dict[str, dict[str, Any]] = {}  # what each was made of
        self.methods: dict[str, Method] = {
            "make": self._make, "enqueue": self._enqueue, "dequeue": self._dequeue, "taken": self._taken,
            "close": self._close,
            "apply_grad": self._apply, "take_grad": self._take, "set_step": self._set_step,
            "token_give": self._give, "token_take": self._token, "token_renew": self._renew, "token_end": self._end,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes held in queues and accumulators."""
        queues = [thing for thing in self.things.values() if isinstance(thing, QueueMachine)]
        queued = (t for queue in queues for element in queue.elements for t in element)
        sums = sum(thing.nbytes for thing in self.things.values() if isinstance(thing, Accumulator))
        return sums + self.outs.nbytes + sum(t.numel() * t.element_size() for t in queued)

    def line(self, request: Request) -> str:
        """Where a request stands that has to wait; empty for what never waits."""
        key, meta = request.meta.get("key", ""), request.meta
        if request.method == "close" and meta.get("cancel_pending"):
            return ""
        return f"{LINES[request.method]}:{key}" if request.method in LINES else ""

    def expire(self, now: float) -> list[OpId]:
        """Tokens and elements whose leases are over go back; the requests that had been given those elements."""
        for thing in self.things.values():
            if isinstance(thing, Tokens):
                thing.expire(now)
        return self.outs.expire(now)

    def _make(self, request: Request, now: float) -> Ok:
        meta = dict(request.meta)
        key = str(meta.pop("key"))
        if key in self.things:
            if self._made[key] != meta:
                raise InvalidArgument(f"{key} was made of {self._made[key]}, not of {meta}")
            return Ok({"key": key})
        match meta:
            case {"kind": "queue", "capacity": float() | int() as capacity}:
                self.things[key] = QueueMachine(key, capacity if capacity > 0 else float("inf"))
            case {"kind": "accumulator"}:
                (like,) = request.tensors  # of its dtype and shape
                spec = Spec.of(like)
                self.things[key] = Accumulator(lambda: DenseSum(spec), int(meta.get("step", 0)))
            case {"kind": "tokens", "lease": float() | int() as lease}:
                self.things[key] = Tokens(lease)
            case _:
                raise InvalidArgument(f"a server makes queues, accumulators and tokens, not {meta}")
        self._made[key] = meta
        return Ok({"key": key})

    # -- queues -----------------------------------------------------------------------------------------------

    def _tried(self, request: Request, kind: Kind, **kwargs: Any) -> Attempt | None:
        """An attempt on a queue, if it is over at once."""
        queue = found(self.things, QueueMachine, request)
        attempt = Attempt(queue, kind, _nobody, **kwargs)
        queue.submit(attempt)
        if not attempt.is_over:
            queue.withdraw([attempt])
            return None
        if attempt.error is not None:
            raise attempt.error
        return attempt

    def _enqueue(self, request: Request, now: float) -> Ok | None:
        done = self._tried(request, "enqueue", elements=[tuple(request.tensors)])
        return None if done is None else Ok({"size": done.machine.size})

    def _dequeue(self, request: Request, now: float) -> Ok | None:
        queue = found(self.things, QueueMachine, request)
        if not queue.size and self.outs.of(queue):
            return None  # what is on its way may come back, also to a queue that is closed
        done = self._tried(request, "dequeue")
        if done is None:
            return None
        (element,) = done.taken
        self.outs.add(request.op, queue, element, now)
        return Ok({"size": queue.size}, element)

    def _taken(self, request: Request, now: float) -> Ok:
        self.outs.end(OpId(str(request.meta["client"]), int(request.meta["seq"])))
        return Ok()

    def _close(self, request: Request, now: float) -> Ok | None:
        done = self._tried(request, "close", cancel_pending=bool(request.meta.get("cancel_pending")))
        return None if done is None else Ok({"size": done.machine.size})

    # -- accumulators -----------------------------------------------------------------------------------------

    def _apply(self, request: Request, now: float) -> Ok:
        sums, (grad,) = found(self.things, Accumulator, request), request.tensors
        step, rows = int(request.meta["step"]), float(request.meta.get("rows", 1))
        is_new = sums.put((grad, torch.tensor(step), torch.tensor(rows, dtype=torch.float64)))
        return Ok({"applied": is_new, "step": sums.step, "count": sums.count})

    def _take(self, request: Request, now: float) -> Ok | None:
        sums = found(self.things, Accumulator, request)
        required = int(request.meta["required"])
        if required < 1:
            raise InvalidArgument(f"a mean is of at least 1 gradient, not {required}")
        mean = sums.take() if sums.spare(False, required) else None
        return None if mean is None else Ok({"step": sums.step}, list(mean))

    def _set_step(self, request: Request, now: float) -> Ok:
        sums = found(self.things, Accumulator, request)
        if (step := int(request.meta["step"])) < sums.step:  # a late message
            raise InvalidArgument(f"the accumulator is at step {sums.step}, it cannot go back to {step}")
        sums.set_step(step)
        return Ok({"step": sums.step})

    # -- tokens -----------------------------------------------------------------------------------------------

    def _give(self, request: Request, now: float) -> Ok:
        tokens = found(self.things, Tokens, request)
        tokens.give(int(request.meta["step"]), int(request.meta.get("count", 1)))
        return Ok({"free": len(tokens.free)})

    def _token(self, request: Request, now: float) -> Ok | None:
        taken = found(self.things, Tokens, request).take(request.op.client, now)
        return None if taken is None else Ok({"token": taken[0], "step": taken[1]})

    def _renew(self, request: Request, now: float) -> Ok:
        found(self.things, Tokens, request).renew(int(request.meta["token"]), now)
        return Ok()

    def _end(self, request: Request, now: float) -> Ok:
        found(self.things, Tokens, request).end(int(request.meta["token"]))
        return Ok()


def found(things: Mapping[str, Thing], kind: type[Any], request: Request) -> Any:
    """The object that a request names; raises NotFound, or InvalidArgument for one of another kind."""
    key = str(request.meta["key"])
    if key not in things:
        raise NotFound(f"this server holds no {kind.__name__.lower()} {key!r}; it has {', '.join(things) or 'none'}")
    if not isinstance(things[key], kind):
        raise InvalidArgument(f"{key!r} is no {kind.__name__.lower()}, it is a {type(things[key]).__name__.lower()}")
    return things[key]


def _nobody(attempt: Attempt) -> None:
    """The request is answered from the attempt itself."""
