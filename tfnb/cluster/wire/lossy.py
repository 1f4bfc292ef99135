"""Floating numbers that cross a connection in 16 or 8 bits, by choice (TensorFlow's white paper §5.5).

A class of transfers has a format: gradients on their way to parameter servers, and values that tasks send each other.
The sender narrows, the receiver widens, so who computes sees the dtype of the graph. Other values travel as they are:
integers, booleans, complex numbers, sizes, values of Variables from their servers, checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from tfnb.errors import InvalidArgument, NonFinite, ShapeError
from tfnb.execution.dataflow.executor import WaitingPeers
from tfnb.execution.tracing.health import is_finite
from tfnb.graph import Spec
from tfnb.state.waits import Inbox

Deliver = Callable[[Any, tuple[int, int] | None], None]  # a value, or what is known of one that is dead


class Format(NamedTuple):
    """A format: its dtype, and the functions that narrow a wider tensor, and make it one of a dtype again."""

    dtype: torch.dtype
    narrow: Callable[[torch.Tensor], torch.Tensor]
    widen: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = torch.Tensor.to


def _truncated(tensor: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of each number; of a NaN, whose other bits may be the only ones that are set, a NaN."""
    upper = (tensor.float().contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return upper.masked_fill_(tensor.isnan(), torch.nan)


LEVELS = 126  # of int8, on each side of zero; the next ones are the infinities, and the lowest number is NaN
_INFINITE, _NAN = 127, -128
_FACTS = 9  # bytes of the step and of the number of dimensions


def _in_levels(tensor: torch.Tensor) -> torch.Tensor:
    """Each number as a multiple of one step, which is the largest number over `LEVELS`.

    The tensor has one dimension: behind the numbers are its sizes, the step and the number of sizes, as bytes.
    """
    numbers = tensor.detach().reshape(-1)
    numbers = numbers if numbers.dtype is torch.float64 else numbers.float()
    finite = numbers.nan_to_num(0.0, 0.0, 0.0)
    step = (finite.abs().amax() if finite.numel() else finite.new_zeros(())) / LEVELS
    near = (finite / step).round_().clamp_(-LEVELS, LEVELS) if step > 0 else torch.zeros_like(finite)
    levels = torch.where(numbers.isfinite(), near, numbers)  # the step of tiny numbers is rounded, too
    levels = levels.clamp_(-_INFINITE, _INFINITE).nan_to_num_(_NAN).to(torch.int8)
    facts = (torch.tensor(tensor.shape, dtype=torch.int64), step.double().reshape(1), torch.tensor([tensor.dim()]))
    sizes, step, dim = (each.to(levels.device) for each in facts)
    return torch.cat((levels, sizes.view(torch.int8), step.view(torch.int8), dim.to(torch.int8)))


def _from_levels(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that `_in_levels` packed. Raises ShapeError for other tensors."""
    dim = int(packed[-1]) if packed.dim() == 1 and packed.numel() >= _FACTS else -1
    end = packed.numel() - _FACTS - 8 * dim
    sizes = packed[max(end, 0) : -_FACTS].clone().view(torch.int64).tolist() if dim >= 0 and end >= 0 else [-1]
    if min(sizes, default=0) < 0 or math.prod(sizes) != end:
        raise ShapeError(f"{Spec.of(packed)} is no tensor that was packed as int8: its last bytes are no sizes of it")
    levels, step = packed[:end], packed[-_FACTS:-1].clone().view(torch.float64).item()
    numbers = levels.to(torch.float64 if dtype is torch.float64 else torch.float32).mul_(step)
    most = torch.finfo(numbers.dtype).max  # the step may have been rounded up
    numbers.clamp_(-most, most)
    for level, number in ((_NAN, torch.nan), (_INFINITE, torch.inf), (-_INFINITE, -torch.inf)):
        numbers.masked_fill_(levels == level, number)
    return numbers.reshape(sizes).to(dtype)


FORMATS: Mapping[str, Format] = {
    "bfloat16": Format(torch.bfloat16, lambda tensor: tensor.to(torch.bfloat16)),
    "bfloat16_truncated": Format(torch.bfloat16, _truncated),
    "float16": Format(torch.float16, lambda tensor: tensor.to(torch.float16)),
    "int8": Format(torch.int8, _in_levels, _from_levels),
}
"""By name. The relative error of a number is at most 2**-8, 2**-7 and (from 6.1e-5 to 65,504) 2**-11; the error of an
int8 is at most 1/252 of the largest number of its tensor, where that is a normal one."""


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
    if (
        found.is_floating_point()
        and not is_finite(found)
        and bool((beyond := ~found.isfinite() & tensor.isfinite()).any())
    ):
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

    def tell(self, edge: int, to: int, tag: tuple[int, ...], value: object, dead: tuple[int, int] | None) -> None:
        """Send a value, narrowed. Raises NonFinite."""
        if edge in self.dtypes and isinstance(value, torch.Tensor) and not value.is_meta:
            value = narrowed(value, self.format, "a value for another task")
        self.peers.tell(edge, to, tag, value, dead)

    def want(self, edge: int, tag: tuple[int, ...], deliver: Deliver) -> None:
        """Register the receiver of a value, which gets it in the dtype of the graph."""
        dtype = self.dtypes.get(edge)
        self.peers.want(edge, tag, deliver if dtype is None else partial(self._widened, dtype, deliver))

    def _widened(self, dtype: torch.dtype, deliver: Deliver, value: Any, dead: tuple[int, int] | None) -> None:
        is_narrow = isinstance(value, torch.Tensor) and value.dtype is FORMATS[self.format].dtype
        deliver(FORMATS[self.format].widen(value, dtype) if is_narrow else value, dead)

    def wait(self, inbox: Inbox, seconds: float) -> Any:
        """The next event of a step's inbox."""
        return self.peers.wait(inbox, seconds)

    def leave(self) -> None:
        """The step waits no more."""
        self.peers.leave()
