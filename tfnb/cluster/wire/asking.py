"""Calls to several shards of one process as one message, so that a step takes one way there and back.

A single call travels as it is. Several are the parts of a ``batch``, each under its own identity; the answer holds one
outcome for each part, as soon as all are there, or one has failed: the other parts may wait inside for the failed one,
and are to be asked again. The same holds for a part whose values find no room in the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tfnb.cluster.wire.envelope import size
from tfnb.cluster.wire.messages import (
    GIVEN_UP,
    Ask,
    Failure,
    NotSent,
    Ok,
    OpId,
    Outcome,
    Peer,
    Refusal,
    Request,
    Unknown,
)
from tfnb.cluster.wire.transport import outcome_header, read_outcome
from tfnb.errors import ProtocolError

if TYPE_CHECKING:
    from tfnb.cluster.wire.transport import Link

PATIENCE = 2 * GIVEN_UP  # seconds: the notebook gives a silent server up before that
REDIAL = 0.5  # seconds between two tries to reach a process
ENTRIES = 4096  # tensors and names in a message of several calls: its header has a limit

T = TypeVar("T")
Send = Callable[..., Awaitable[Outcome]]  # of (method, meta, tensors, op=...)


# -- who asks ---------------------------------------------------------------------------------------------------


def identified(asks: Sequence[Ask], link: Link) -> list[Ask]:
    """Calls with identities, kept when a call is repeated."""
    return [ask if ask.op is not None else ask._replace(op=link.op()) for ask in asks]


def message(asks: Sequence[Ask]) -> Ask:
    """Calls to shards of one process as one call."""
    return batch(asks) if len(asks) > 1 else asks[0]._replace(meta={**asks[0].meta, "shard": asks[0].shard})


def batch(asks: Sequence[Ask]) -> Ask:
    """Calls as one message, answered as soon as one of them has failed, or has waited for long."""
    parts = [[ask.shard, ask.method, ask.op, dict(ask.meta), len(ask.tensors)] for ask in asks]
    return Ask(asks[0].shard, "batch", {"parts": parts}, [tensor for ask in asks for tensor in ask.tensors])


def ends(asks: Sequence[Ask], outcome: Outcome) -> list[Outcome]:
    """The outcome of each call, from the outcome of their message."""
    return outcomes(outcome) if isinstance(outcome, Ok) and "outcomes" in outcome.meta else [outcome] * len(asks)


async def sent(send: Send, asks: Sequence[Ask], form: Callable[[Sequence[Ask]], Ask] = message) -> list[Outcome]:
    """The outcome of each call, after one message of this form."""
    one = form(asks)
    return ends(asks, await send(one.method, one.meta, one.tensors, op=one.op))


async def persisted(link: Link, peer: Peer, asks: Sequence[Ask], *, epoch: int) -> list[Outcome]:
    """The outcome of each call to the shards of a process, repeated while the outcome is silence or ``again``.

    A silent process is tried for PATIENCE seconds after its last answer: whether it is dead is the notebook's to say.
    Where one call fails the others may stay at ``again``: they may wait inside for the one that failed.
    """
    found: list[Outcome] = [Refusal("again")] * len(asks)
    send, deadline = partial(link.call, peer, epoch=epoch), time.monotonic() + PATIENCE
    asks, left = identified(asks, link), list(range(len(asks)))
    form = message if len(asks) == 1 else batch  # else one alone would wait on for another one that failed
    while left:
        some = messages([asks[place] for place in left], link.budget)
        found_now = await gathered([sent(send, one, form) for one in some], may_leave=False)
        for place, end in zip(left, chain(*found_now), strict=True):
            found[place] = end
        is_silent = all(is_silence(found[place]) for place in left)
        if not is_silent:
            deadline = time.monotonic() + PATIENCE
        left = [place for place, end in enumerate(found) if is_again(end) or is_silence(end)]
        if any(map(is_failure, found)) or time.monotonic() >= deadline:
            break
        if any(is_silence(found[place]) for place in left):
            await asyncio.sleep(REDIAL)
            link.confirm(peer.addr)
    return found


async def gathered(calls: Sequence[Coroutine[Any, Any, T]], *, may_leave: bool) -> list[T]:
    """The results of all calls; the first failure is raised when all have ended.

    may_leave: after a failure the others are left. A server may wait with its answer for the one that failed.
    """
    if len(calls) <= 1:
        return [await call for call in calls]
    asked = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION if may_leave else asyncio.ALL_COMPLETED)
    finally:
        for one in asked:
            one.cancel()
    found = await asyncio.gather(*asked, return_exceptions=True)
    failures = [end for end in found if isinstance(end, BaseException)]
    for end in sorted(failures, key=lambda end: isinstance(end, asyncio.CancelledError)):
        raise end
    return [end for end in found if not isinstance(end, BaseException)]


def is_failure(outcome: Outcome) -> bool:
    """Whether the call has failed for good, neither silent nor waiting."""
    return not isinstance(outcome, Ok) and not is_again(outcome) and not is_silence(outcome)


def is_silence(outcome: Outcome) -> bool:
    """Whether there was no answer: the call may be repeated under its identity."""
    return isinstance(outcome, NotSent | Unknown)


def is_again(outcome: Outcome) -> bool:
    """Whether the call waits inside, or its values come in another message."""
    return isinstance(outcome, Refusal) and outcome.reason == "again"


def messages(asks: Sequence[Ask], most: int) -> list[list[Ask]]:
    """The calls in order, in messages of at most so many bytes of tensors, and ENTRIES.

    >>> one, two = Ask(0, "push", {}, [torch.zeros(4)]), Ask(1, "push", {}, [torch.zeros(8)])
    >>> [len(some) for most in (64, 32) for some in messages([one, two, one], most)]
    [3, 1, 1, 1]
    """
    found: list[list[Ask]] = []
    held = entries = 0
    for ask in asks:
        nbytes, names = size(ask.tensors), _entries(ask)
        if not found or held + nbytes > most or entries + names > ENTRIES:
            found.append([])
            held = entries = 0
        found[-1].append(ask)
        held, entries = held + nbytes, entries + names
    return found


def _entries(ask: Ask) -> int:
    return len(ask.tensors) + sum(len(value) for value in ask.meta.values() if isinstance(value, list))


def outcomes(answer: Ok) -> list[Outcome]:
    """The outcome of each part, from the answer to a batch."""
    tensors = iter(answer.tensors)
    return [read_outcome(header, list(islice(tensors, count))) for header, count in answer.meta["outcomes"]]


# -- who is asked -----------------------------------------------------------------------------------------------


def parts(batch: Request) -> list[Request]:
    """The requests in a batch. Raises ProtocolError."""
    tensors = iter(batch.tensors)
    try:
        return [
            replace(
                batch, method=str(method), op=OpId.read(*op), meta={**meta, "shard": int(shard)},
                tensors=list(islice(tensors, count)),
            )
            for shard, method, op, meta, count in batch.meta["parts"]
        ]  # fmt: skip
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ProtocolError(f"not a batch: {type(error).__name__}: {error}") from error


def answered(answers: Sequence[Ok | Failure | Refusal], most: int) -> Ok:
    """The answer to a batch. Values beyond ``most`` bytes come when their part is asked for again.

    >>> values = Ok({}, [torch.zeros(8)])
    >>> [type(end).__name__ for end in outcomes(answered([values, Failure("Internal", ""), values], 40))]
    ['Ok', 'Failure', 'Refusal']
    """
    found: list[list[Any]] = []
    tensors: list[torch.Tensor] = []
    for answer in answers:
        mine = answer.tensors if isinstance(answer, Ok) else ()
        if tensors and (size(tensors) + size(mine) > most or len(tensors) + len(mine) > ENTRIES):
            answer, mine = Refusal("again", "its values come in another message"), ()
        found.append([outcome_header(answer), len(mine)])
        tensors += mine
    return Ok({"outcomes": found}, tensors)


class Answers:
    """The answers to a batch, in the making. ``reply`` gets them as soon as all are there, or one has failed."""

    def __init__(self, count: int, reply: Callable[[Ok], None], most: int) -> None:
        self._found: list[Ok | Failure | Refusal] = [Refusal("again", "another part failed")] * count
        self._left, self._is_begun, self._has_failed, self._is_over = count, False, False, False
        self._reply, self._most = reply, most

    def take(self, place: int, answer: Ok | Failure | Refusal) -> None:
        """Take the answer of one part."""
        self._found[place] = answer
        self._left -= 1
        self._has_failed |= not isinstance(answer, Ok)
        self._end()

    def begun(self) -> None:
        """Note that every part was begun: parts without an answer wait inside."""
        self._is_begun = True
        self._end()

    def _end(self) -> None:
        if self._is_begun and not self._is_over and (not self._left or self._has_failed):
            self._is_over = True
            self._reply(answered(self._found, self._most))
