"""Floating numbers that cross a connection in 16 bits, by choice (TensorFlow's white paper §5.5, semantics S-156).

A class of transfers has a format: gradients on their way to parameter servers, and values that tasks send each other.
The sender narrows, the receiver widens, so who computes sees the dtype of the graph. Other values travel as they are:
integers, booleans, complex numbers, sizes, values of Variables from their servers, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from tfnb.errors import InvalidArgument, NonFinite
from tfnb.execution.dataflow.executor import WaitingPeers
from tfnb.execution.tracing.health import is_finite
from tfnb.state.waits import Inbox


class Format(NamedTuple):
    """A format of 16 bits: its dtype, and the function that narrows a tensor of a wider dtype."""

    dtype: torch.dtype
    narrow: Callable[[torch.Tensor], torch.Tensor]


def _truncated(tensor: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of each number; of a NaN, whose other bits may be the only ones that are set, a NaN."""
    upper = (tensor.float().contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return upper.masked_fill_(tensor.isnan(), torch.nan)


FORMATS: Mapping[str, Format] = {
    "bfloat16": Format(torch.bfloat16, lambda tensor: tensor.to(torch.bfloat16)),
    "bfloat16_truncated": Format(torch.bfloat16, _truncated),
    "float16": Format(torch.float16, lambda tensor: tensor.to(torch.float16)),
}
"""By name. The relative error of a number is at most 2**-8, 2**-7 and (from 6.1e-5 to 65,504) 2**-11."""


class LossyTransfers(NamedTuple):
    """The format of each class of transfers; empty: as it is.

    gradients: from tasks to parameter servers. edges: between tasks, in one step over several of them.
    """

    gradients: str = ""
    edges: str = ""

    @classmethod
    def of(cls, asked: Mapping[str, str | torch.dtype] | None) -> LossyTransfers:
        """The choice in ``connect(lossy=...)``. Raises InvalidArgument for unknown classes and formats.

        >>> LossyTransfers.of({"gradients": torch.bfloat16})
        LossyTransfers(gradients='bfloat16', edges='')
        """
        if asked is not None and not isinstance(asked, Mapping):
            raise InvalidArgument(
                f"lossy={asked!r:.80} is no mapping of {' or '.join(map(repr, cls._fields))} to a format: "
                "lossy={'gradients': 'bfloat16'}"
            )
        found = {name: str(format).removeprefix("torch.") for name, format in (asked or {}).items()}
        for name, format in found.items():
            if name not in cls._fields:
                raise InvalidArgument(f"lossy={{{name!r}: ...}}: the classes are {', '.join(map(repr, cls._fields))}")
            if format not in FORMATS:
                known = ", ".join(map(repr, FORMATS))
                raise InvalidArgument(f"lossy={{{name!r}: {asked[name]!r:.80}}}: the formats are {known}")  # type: ignore[index]
        return cls(**found)

    def __str__(self) -> str:
        """For the status: ``gradients as bfloat16``."""
        return ", ".join(f"{name} as {format}" for name, format in self._asdict().items() if format)


AS_THEY_ARE = LossyTransfers()


def is_lossy(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype can be narrowed.

    >>> [is_lossy(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64)]
    [True, True, False, False, False]
    """
    return dtype.is_floating_point and dtype.itemsize > 2


def narrowed(tensor: torch.Tensor, format: str, whose: str) -> torch.Tensor:
    """A tensor in a format; NaN and infinity stay. Raises NonFinite for a number beyond the range of the format.

    whose: the noun of the values, for the error.

    >>> narrowed(torch.tensor([3.1415927]), "bfloat16_truncated", "a gradient")
    tensor([3.1406], dtype=torch.bfloat16)
    """
    found = FORMATS[format].narrow(tensor)
    if not is_finite(found) and bool((beyond := ~found.isfinite() & tensor.isfinite()).any()):
        most = torch.finfo(found.dtype).max
        other = ": 'bfloat16' has the range of float32" if found.dtype is torch.float16 else ""
        raise NonFinite(
            f"{whose} holds {tensor[beyond].abs().max().item():.4g}, which {format} cannot hold: its largest number is "
            f"{most:.5g}; lossy= of connect chose it{other}"
        )
    return found


@dataclass
class LossyPeers:
    """`WaitingPeers` whose floating values cross in a format. dtypes: of the edges that have one, by number."""

    peers: WaitingPeers
    format: str
    dtypes: Mapping[int, torch.dtype]

    @property
    def round(self) -> int:
        """The number of the round."""
        return self.peers.round

    def tell(self, edge: int, to: int, tag: tuple[int, ...], value: Any, dead: tuple[int, int] | None) -> None:
        """Send a value, narrowed. Raises NonFinite."""
        if edge in self.dtypes and isinstance(value, torch.Tensor) and not value.is_meta:
            value = narrowed(value, self.format, "a value for another task")
        self.peers.tell(edge, to, tag, value, dead)

    def want(self, edge: int, tag: tuple[int, ...], deliver: Callable[[Any, tuple[int, int] | None], None]) -> None:
        """Register the receiver of a value, which gets it in the dtype of the graph."""
        dtype = self.dtypes.get(edge)
        self.peers.want(edge, tag, deliver if dtype is None else partial(_deliver_as, dtype, deliver))

    def wait(self, inbox: Inbox, seconds: float) -> Any:
        """The next event of a step's inbox."""
        return self.peers.wait(inbox, seconds)

    def leave(self) -> None:
        """The step waits no more."""
        self.peers.leave()


def _deliver_as(
    dtype: torch.dtype, deliver: Callable[[Any, tuple[int, int] | None], None], value: Any, dead: tuple[int, int] | None
) -> None:
    deliver(value.to(dtype) if isinstance(value, torch.Tensor) else value, dead)
