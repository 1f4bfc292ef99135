"""Parts of a step: tensors that a worker pushes or stages, the program that takes them, and the merged write. Pure."""

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
from tfnb.passes.flow.merges import Weight, merged, number_of


class ServerProgram(Protocol):
    """A compiled server graph.

    ``kinds``: of its feeds, the rows of `tfnb.passes.flow.merges.MERGES` by which the workers' values become one.
    ``weights``: of each feed, with the places of their totals. ``nbytes``: of the feeds; None where their number of
    rows varies.
    """

    kinds: Sequence[str]
    weights: Sequence[Weight]
    nbytes: int | None
    reads: Sequence[str]
    writes: Sequence[str]

    def fitting(self, feeds: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The feeds in the dtypes of the program, also those that crossed the connection in fewer bits by choice.

        Raises ShapeError for feeds whose dtypes or sizes do not fit the program.
        """

    def compute(self, feeds: Sequence[torch.Tensor], storages: Sequence[torch.Tensor], run_index: int) -> Any: ...

    def commit(self, pending: Any) -> None: ...


Compile = Callable[[Mapping[str, Any], Sequence[torch.Tensor]], ServerProgram]


@dataclass(frozen=True, slots=True)
class StagedPart:
    """One worker's staged part of a round: feeds of a program, or (``program`` None) new values of ``keys``.

    ``since``: versions of ``keys`` to be replaced; a key with another version at the time of the write keeps its value.
    None: all values are replaced.
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
    """A write with nothing fallible inside: the function, its keys, and the merged feeds."""

    write: Callable[[], None]
    keys: tuple[str, ...]
    feeds: Sequence[torch.Tensor] = ()


class PartWriter(Protocol):
    """The maker of writes from parts: `tfnb.cluster.server.core.Core`."""

    shard: int
    step: int
    version: int

    @property
    def opening(self) -> int:
        """The opening of the store: a write computed under another one is computed again."""

    def part(self, request: Request) -> StagedPart | Refusal:
        """The checked part in a request."""

    def prepared(self, parts: Sequence[StagedPart]) -> Write:
        """The write that applies parts as one update, fully computed."""

    def writing(self, keys: Sequence[str]) -> AbstractContextManager[Any]:
        """A block that writes these keys."""

    def afford(self, asked: int) -> None:
        """Raise ResourceExhausted if there is no room for so many more bytes."""

    def ack(self) -> Ok:
        """The plain answer: version and step."""

    def with_values(self, answer: Ok, request: Request) -> Ok:
        """The answer, with the values that a request asks for."""


GRADIENTS = ("grad", "rows")  # kinds that must be finite


def checked(
    program: ServerProgram, tensors: Sequence[torch.Tensor], *, are_finite: bool = False
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The feeds of a program; raises for those it cannot take. are_finite: the sender has checked the gradients."""
    same_number(program.kinds, tensors)
    feeds = program.fitting(tensors)
    for kind, tensor in zip(program.kinds, feeds, strict=True):
        if kind in GRADIENTS and not are_finite and not is_finite(tensor):
            raise NonFiniteGradient(
                f"a gradient {spec(tensor)} holds NaN or infinity; the step was dropped on every server"
            )
    return feeds


def averaged(program: ServerProgram, parts: Sequence[StagedPart]) -> list[torch.Tensor]:
    """The feeds of a program for the whole batch. Raises NonFiniteGradient where a part of weight 0 is there and the
    merged gradients are not finite.
    """
    tensors = [part.tensors for part in parts]
    feeds = merged(program.kinds, program.weights, tensors, [part.rows for part in parts])
    totals = {weight for weight in program.weights if weight.total is not None}
    if any(not weight.of(number_of(weight, part, 1.0)) for weight in totals for part in tensors):
        checked(program, feeds)
    return feeds


def same_number(a: Sequence[Any], b: Sequence[Any]) -> None:
    """Raise where names and entries do not go together."""
    if len(a) != len(b):
        raise InvalidArgument(f"{len(a)} names, but {len(b)} entries")


def spec(tensor: torch.Tensor) -> str:
    """Dtype and shape, for errors."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
