"""Parts of a step: what one worker pushes or stages, what computes with it, and how several become one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tfnb.cluster.wire.envelope import size
from tfnb.cluster.wire.messages import Ok, Refusal, Request
from tfnb.errors import InvalidArgument, NonFiniteGradient
from tfnb.execution.tracing.health import is_finite


class ServerProgram(Protocol):
    """A compiled server graph.

    ``kinds``: of its feeds, the rows of `tfnb.passes.flow.merges.MERGES` by which the workers' values become one.
    ``nbytes``: of its feeds; None where their number of rows varies.
    """

    kinds: Sequence[str]
    nbytes: int | None
    reads: Sequence[str]
    writes: Sequence[str]

    def ensure_fit(self, feeds: Sequence[torch.Tensor]) -> None:
        """Raise ShapeError for feeds of other dtypes or sizes than it takes."""

    def compute(self, feeds: Sequence[torch.Tensor], storages: Sequence[torch.Tensor], run_index: int) -> Any: ...

    def commit(self, pending: Any) -> None: ...


Compile = Callable[[Mapping[str, Any], Sequence[torch.Tensor]], ServerProgram]


@dataclass(frozen=True, slots=True)
class StagedPart:
    """What one worker staged for a round: feeds of a program, or (``program`` None) new values of ``keys``.

    ``since``: the versions of ``keys`` that those values replace; one that has another version by the time of the write
    keeps what it has. None: whatever is there.
    """

    program: ServerProgram | None
    keys: tuple[str, ...]
    rows: float
    run_index: int
    tensors: tuple[torch.Tensor, ...]
    since: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held by this part."""
        return size(self.tensors)


class Write(NamedTuple):
    """A write with nothing fallible in it: the keys that it writes, and the merged parts that it was computed from."""

    write: Callable[[], None]
    keys: tuple[str, ...]
    feeds: Sequence[torch.Tensor] = ()


class PartWriter(Protocol):
    """What makes writes of parts, and lets them happen: `tfnb.cluster.server.core.Core`."""

    shard: int
    step: int
    version: int

    @property
    def opening(self) -> int:
        """Of the store: a write that was computed for another one is computed again."""

    def part(self, request: Request) -> StagedPart | Refusal:
        """What a request brings, checked."""

    def prepared(self, parts: Sequence[StagedPart]) -> Write:
        """The write that applies parts as one update, fully computed."""

    def writing(self, keys: Sequence[str]) -> AbstractContextManager[Any]:
        """A block that writes these keys."""

    def afford(self, asked: int) -> None:
        """Raise ResourceExhausted where so many bytes are not there."""

    def ack(self) -> Ok:
        """The answer of what has none of its own."""

    def with_values(self, answer: Ok, request: Request) -> Ok:
        """The same, with the values that a request asks for."""


GRADIENTS = ("grad", "rows")  # kinds that must be finite


def check_feeds(program: ServerProgram, tensors: Sequence[torch.Tensor], *, are_finite: bool = False) -> None:
    """Raise where a program cannot take these. are_finite: who sent them has looked at that."""
    same_number(program.kinds, tensors)
    program.ensure_fit(tensors)
    for kind, tensor in zip(program.kinds, tensors, strict=True):
        if kind in GRADIENTS and not are_finite and not is_finite(tensor):
            raise NonFiniteGradient(
                f"a gradient {spec(tensor)} holds NaN or infinity; the step was dropped on every server"
            )


def same_number(a: Sequence[Any], b: Sequence[Any]) -> None:
    """Raise where names and entries do not go together."""
    if len(a) != len(b):
        raise InvalidArgument(f"{len(a)} names, but {len(b)} entries")


def spec(tensor: torch.Tensor) -> str:
    """Dtype and shape, for errors."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
