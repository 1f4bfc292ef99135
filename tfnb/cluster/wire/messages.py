"""Messages between the parts of a cluster: identities, requests, and the five outcomes of a call.

Plain data without Dask, clock or socket. `transport` produces outcomes, `core` and `plan` reason about them,
and errors cross a process as tagged data (`failed`) that becomes an error class again with `raised`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tfnb import errors
from tfnb.errors import StepAborted, TfnbError

POLL = 10.0  # seconds that a server lets a request wait until it tells the caller to ask again
SILENCE = 4.0  # seconds without an answer after which silence is said, and others compute the rows of a task
NAME_CAP = 256  # characters of a client's name
GIVEN_UP = 60.0  # seconds of silence after which a task or server is dead that Dask lists; no call ends earlier

Tag = tuple[int, ...]  # the iterations of the frames that a value of a step belongs to
Dead = tuple[int, int]  # which branch was not taken, for a value that is dead


class Peer(NamedTuple):
    """A task: worker address, actor key, and the random identity of that actor process."""

    addr: str
    key: str
    incarnation: int


class OpId(NamedTuple):
    """Identity of one call, the same for every repetition, so that a mutation is applied once."""

    client: str
    seq: int

    @classmethod
    def read(cls, client: object, seq: object) -> OpId:
        """The identity named in a message. Raises ValueError for an invalid client name or call number."""
        if isinstance(client, str) and len(client) <= NAME_CAP and isinstance(seq, int) and 0 <= seq < 1 << 63:
            return cls(client, seq)
        raise ValueError(f"a client's name has up to {NAME_CAP} characters, the number of its call is a count")


class Ask(NamedTuple):
    """One call to a shard. ``op``: None where nothing depends on its identity."""

    shard: int
    method: str
    meta: Mapping[str, Any] = {}
    tensors: Sequence[torch.Tensor] = ()
    op: OpId | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A decoded call. ``epoch`` and ``incarnation`` are the sender's view of the callee."""

    method: str
    op: OpId
    epoch: int = 0
    incarnation: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[torch.Tensor] = ()
    seconds_left: float = 60.0


@dataclass(frozen=True, slots=True)
class Ok:
    """Executed; ``dup`` marks the cached answer to a repeated mutation."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[torch.Tensor] = ()
    dup: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Executed and raised: the error as data."""

    tag: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Certainly not executed, but for ``again``. ``reason``: fenced, stale, too-old, unknown-plan, unknown-task,
    poisoned, protocol, given-up (its loop was), again (it waits inside, or was executed and its values come in another
    message: ask again under the same identity).
    """

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class NotSent:
    """Certainly not executed: no connection, or nothing was sent."""

    message: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Sent, and no answer: maybe executed, maybe not. ``lost`` tells a broken connection from silence."""

    message: str = ""
    lost: bool = False


Outcome = Ok | Failure | Refusal | NotSent | Unknown


class NotDone(Exception):
    """A call on the way did not come through; carries its outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


_CLASSES: dict[str, type[TfnbError]] = {
    name: item for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, TfnbError)
}
_BUILTINS: tuple[tuple[type[BaseException], str], ...] = (
    (MemoryError, "ResourceExhausted"),
    (NotImplementedError, "Unimplemented"),
    (TimeoutError, "DeadlineExceeded"),
    (KeyError, "NotFound"),
    (ValueError, "InvalidArgument"),
    (TypeError, "InvalidArgument"),
    (SystemExit, "StepAborted"),
    (KeyboardInterrupt, "StepAborted"),
)
_FIELDS = ("node", "op", "cell", "line", "device", "step", "inputs", "peers", "task")


def failed(error: BaseException, task: str | None = None) -> Failure:
    """The error as data: class by name, message, and place. Never a tensor's values."""
    if isinstance(error, TfnbError):
        details = {name: getattr(error, name) for name in _FIELDS if getattr(error, name) not in (None, ())}
        details.setdefault("task", task)
        notes = list(getattr(error, "__notes__", ()))
        return Failure(type(error).__name__, error.message, details | ({"notes": notes} if notes else {}))
    tag = next((name for kind, name in _BUILTINS if isinstance(error, kind)), "Internal")
    return Failure(tag, f"{type(error).__name__}: {error}", {"task": task, "kind": type(error).__name__})


def aborted(error: BaseException) -> StepAborted:
    """The failure of a step whose kernel raised SystemExit or its like: these must not end the process.

    >>> aborted(SystemExit(3)).message, aborted(KeyboardInterrupt()).message[:33]
    ('a kernel raised SystemExit: 3; nothing was written', 'a kernel raised KeyboardInterrupt')
    """
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return StepAborted(f"a kernel raised {text}; nothing was written")


def raised(failure: Failure) -> TfnbError:
    """The error for a `Failure`; an unknown tag becomes Internal."""
    kind = _CLASSES.get(failure.tag, errors.Internal)
    known = {name: failure.details[name] for name in _FIELDS if failure.details.get(name) is not None}
    for name in ("inputs", "peers"):
        if name in known:
            known[name] = tuple(known[name])
    error = kind(failure.message, **known, details=dict(failure.details))
    for note in failure.details.get("notes", ()):
        error.add_note(str(note))
    return error
