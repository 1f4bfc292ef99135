"""The family of errors, and the labels of files in their texts.

Every error is a :class:`TfnbError` *and* the builtin a user would expect, carries a ``code``, and names
where it happened: node, op, cell, line, device, step, the inputs, and other nodes involved.
Imports nothing of tfnb.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar


class TfnbError(Exception):
    """Base of all tfnb errors; ``where`` attributes default to ``None`` or empty."""

    code: ClassVar[str] = "UNKNOWN"
    enqueued = 0  # elements that an enqueue of several had put, and that stay in the queue

    def __init__(
        self,
        message: str = "",
        *,
        node: str | None = None,
        op: str | None = None,
        cell: str | None = None,
        line: int | None = None,
        device: str | None = None,
        step: int | None = None,
        inputs: tuple[str, ...] = (),
        peers: tuple[str, ...] = (),
        task: str | None = None,
        details: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.node, self.op, self.cell, self.line = node, op, cell, line
        self.device, self.step, self.inputs, self.peers = device, step, inputs, peers
        self.task, self.details = task, details

    def __str__(self) -> str:  # KeyError would show the repr of its argument
        return self.message


class InvalidArgument(TfnbError, ValueError):
    """A wrong value, count, name or configuration."""

    code = "INVALID_ARGUMENT"


class InvalidType(InvalidArgument, TypeError):
    """A value of another type than is asked for."""


class ShapeError(InvalidArgument):
    """Shapes or sizes that do not fit."""


class FeedError(InvalidArgument, TypeError):
    """A feed or fetch of a wrong dtype, or of something that is not in the graph."""


class UnsupportedDtype(InvalidArgument, TypeError):
    """A dtype that cannot travel between processes."""


class NonFinite(InvalidArgument, FloatingPointError):
    """A step gave NaN or infinity; ``details`` has the origin, on a cluster as a dict from the task."""


class NonFiniteGradient(NonFinite):
    """A pushed gradient holds NaN or infinity."""


class GraphFormatError(InvalidArgument):
    """A graph file that is malformed, truncated or of an unknown version."""


class GraphCycleError(InvalidArgument):
    """A graph whose nodes depend on themselves."""


class FailedPrecondition(TfnbError, RuntimeError):
    """State that is not ready, uninitialised, finalized or closed."""

    code = "FAILED_PRECONDITION"


class StaleNode(FailedPrecondition):
    """A node whose cell was re-run or deleted."""


class BranchChanged(FailedPrecondition):
    """A Python branch taken while recording would go the other way in this run."""


class CheckFailed(BranchChanged, AssertionError):
    """An ``assert`` that the samples passed fails in this run."""


class DeadlockError(FailedPrecondition):
    """Everything waits and nothing can proceed; never retried."""


class VersionMismatch(FailedPrecondition):
    """Processes with different versions of software that must be the same on both."""


class CheckpointIncompatible(FailedPrecondition):
    """A checkpoint of another graph or of other shapes."""


class InsecureAddress(FailedPrecondition, PermissionError):
    """A plain address that is not on this machine, without an opt-in."""


class UntrustedOp(FailedPrecondition):
    """An op that a file of unknown origin may not name."""


class NoGradient(TfnbError, LookupError):
    """An op without a gradient rule."""

    code = "UNIMPLEMENTED"


class Unimplemented(TfnbError, NotImplementedError):
    """A missing kernel or feature."""

    code = "UNIMPLEMENTED"


class Unsupported(Unimplemented):
    """Something that cannot be recorded."""


class UnknownOp(Unimplemented):
    """An op that this version of torch and tfnb does not have."""


class NotFound(TfnbError, KeyError):
    """A name, handle or key that does not exist."""

    code = "NOT_FOUND"


class AlreadyExists(TfnbError):
    """A name that is taken."""

    code = "ALREADY_EXISTS"


class OutOfRange(TfnbError):
    """End of input."""

    code = "OUT_OF_RANGE"


class Cancelled(TfnbError):
    """The step or the attempt was cancelled."""

    code = "CANCELLED"


class BreakpointReached(Cancelled):
    """A run that a breakpoint stopped; ``details`` has the values there, by name."""


class QueueClosed(Cancelled):
    """An element was enqueued into a closed queue, or a queue was closed twice."""


class DeadlineExceeded(TfnbError, TimeoutError):
    """A timeout ran out."""

    code = "DEADLINE_EXCEEDED"


class Aborted(TfnbError):
    """The step was aborted, and may be run again."""

    code = "ABORTED"


class StepAborted(Aborted):
    """A step ended because one of its parts was lost."""


class Fenced(Aborted):
    """A message of an older incarnation or epoch."""


class Unavailable(TfnbError, ConnectionError):
    """A peer cannot be reached; restartable."""

    code = "UNAVAILABLE"


class WorkerLost(Unavailable):
    """A compute task died."""


class ParameterServerLost(Unavailable):
    """A task that held variables died."""


class SchedulerLost(Unavailable):
    """The Dask scheduler died."""


class ResourceExhausted(TfnbError, MemoryError):
    """A budget or cap cannot be met."""

    code = "RESOURCE_EXHAUSTED"


class CheckpointWriteError(ResourceExhausted, OSError):
    """A checkpoint, a graph or a trace could not be written."""


class DataLoss(TfnbError):
    """Data that fails its digest or cannot be read."""

    code = "DATA_LOSS"


class CheckpointCorrupt(DataLoss):
    """A damaged variable file."""


class ProtocolError(DataLoss):
    """Bytes that are not our envelope."""


class Internal(TfnbError):
    """A broken invariant: a bug in tfnb."""

    code = "INTERNAL"


# -- arguments --------------------------------------------------------------------------------------------------------

_SHORT = 60  # characters of a value in a message


def ensure_type(value: object, kind: type | tuple[type, ...], owner: str) -> None:
    """Raise InvalidType unless ``value``, an argument of ``owner``, has this type; a bool is no int.

    >>> ensure_type(3, int, "seed")
    >>> ensure_type("x", (int, float), "timeout")
    Traceback (most recent call last):
    tfnb.errors.InvalidType: timeout takes int or float, and was given 'x', which is str
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return
    shown = repr(value) if isinstance(value, str | bytes | float | bool | None) else f"a {type(value).__name__}"
    wanted = " or ".join(each.__name__ for each in kinds)
    short = shown if len(shown) <= _SHORT else f"{shown[:_SHORT]}..."
    raise InvalidType(f"{owner} takes {wanted}, and was given {short}, which is {type(value).__name__}")


# -- words ------------------------------------------------------------------------------------------------------------

_names: list[Callable[[str], str | None]] = []


def name_cells(by: Callable[[str], str | None]) -> Callable[[], None]:
    """Register ``by``, a front end's labels for files of cells (``In[3]``); returns a function that unregisters it."""
    _names.append(by)
    return lambda: _names.remove(by)


def file_label(filename: str) -> str:
    """The label of a file in messages.

    >>> file_label("/home/me/train.py"), file_label("/tmp/marimo_7/__marimo__cell_Hbol_.py")
    ('train.py', 'cell Hbol')
    """
    known = next((label for by in _names if (label := by(filename))), None)
    name = filename.replace("\\", "/").rpartition("/")[2]
    return known or re.sub(r"^__marimo__cell_(\w+?)_(\.py)?$", r"cell \1", name)
