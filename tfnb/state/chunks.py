"""Arrays whose rows lie in chunks on other machines: a description of all chunks, and rows of the local chunks.

`ChunkedArray` is all that a notebook has; `Chunks` stands for the array where some chunks are. Imports torch and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class ChunkedArray:
    """The description of an array in chunks along axis 0, without its values.

    ``lengths``: rows of each chunk; ``tail``: the shape of a row; ``keys``: names of the chunks, for whoever reads
    them; ``homes``: where each one lies; ``held``: what keeps them there.

    >>> array = ChunkedArray("x", (2, 3), (4,), torch.float32)
    >>> len(array), array.dim(), array.nbytes, array.stand_in().shape
    (5, 2, 80, torch.Size([5, 4]))
    """

    name: str
    lengths: tuple[int, ...]
    tail: tuple[int, ...]
    dtype: torch.dtype
    keys: tuple[Any, ...] = ()
    homes: tuple[tuple[str, ...], ...] = ()
    held: Any = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return sum(self.lengths)

    def dim(self) -> int:
        """The number of axes."""
        return 1 + len(self.tail)

    @property
    def groups(self) -> list[int]:
        """For each chunk the number of its worker: chunks of one worker have the same number."""
        first = [min(home, default="") for home in self.homes] or [""] * len(self.lengths)
        numbers = {home: number for number, home in enumerate(sorted(set(first)))}
        return [numbers[home] for home in first]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return len(self) * torch.Size(self.tail).numel() * self.dtype.itemsize

    def stand_in(self) -> torch.Tensor:
        """Zeros of the same shape and dtype that take no memory, for checks of shapes."""
        return torch.zeros((), dtype=self.dtype).expand(len(self), *self.tail)


class Chunks:
    """An array in chunks of which some are ``here``: rows of the local chunks can be taken as from a tensor.

    >>> array = Chunks((2, 3), (), torch.int64)
    >>> array.numbers(torch.tensor([4, 2])), array.numbers(slice(1, 3))
    ([1], [0, 1])
    >>> array.here = {0: torch.tensor([0, 1]), 1: torch.tensor([2, 3, 4])}
    >>> array.index_select(0, torch.tensor([4, 1])), array[1:3]
    (tensor([4, 1]), tensor([1, 2]))
    """

    device = torch.device("cpu")

    def __init__(
        self, lengths: Sequence[int], tail: Sequence[int], dtype: torch.dtype, groups: Sequence[int] = ()
    ) -> None:
        self.lengths, self.tail, self.dtype = tuple(lengths), tuple(tail), dtype
        self.groups = list(groups) or [0] * len(self.lengths)
        self.here: dict[int, torch.Tensor] = {}
        self._starts = list(accumulate(lengths, initial=0))
        self._ends = torch.tensor(self._starts[1:])

    def dim(self) -> int:
        """The number of axes."""
        return 1 + len(self.tail)

    def nbytes(self, number: int) -> int:
        """Bytes of a chunk."""
        return self.lengths[number] * torch.Size(self.tail).numel() * self.dtype.itemsize

    def span(self, number: int) -> tuple[int, int]:
        """The rows of a chunk: the first one, and the one after the last."""
        return self._starts[number], self._starts[number + 1]

    def numbers(self, at: torch.Tensor | slice) -> list[int]:
        """The chunks that hold the given rows, in order."""
        if isinstance(at, slice):
            return [n for n in range(len(self.lengths)) if max(at.start, self._starts[n]) < min(at.stop, self._ends[n])]
        return torch.searchsorted(self._ends, at, right=True).unique().tolist()

    def index_select(self, axis: int, at: torch.Tensor) -> torch.Tensor:
        """Rows ``at``, in that order."""
        assert axis == 0
        chunk_of = torch.searchsorted(self._ends, at, right=True)
        found = chunk_of.unique().tolist()
        if len(found) == 1:
            return self.here[found[0]].index_select(0, at - self._starts[found[0]])
        rows = torch.empty((len(at), *self.tail), dtype=self.dtype)
        for number in found:
            places = (chunk_of == number).nonzero().flatten()
            rows[places] = self.here[number].index_select(0, at[places] - self._starts[number])
        return rows

    def __getitem__(self, rows: slice) -> torch.Tensor:
        parts = [
            self.here[n][max(0, rows.start - self._starts[n]) : rows.stop - self._starts[n]] for n in self.numbers(rows)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty((0, *self.tail), dtype=self.dtype)


def like(array: torch.Tensor | ChunkedArray) -> torch.Tensor:
    """The array itself, or a stand-in of the same shape and dtype."""
    return array.stand_in() if isinstance(array, ChunkedArray) else array


# -- collections of Dask, by its own protocol: nothing of it is imported here ------------------------------------------


def is_collection(value: object) -> bool:
    """Whether a value is a Dask collection: an array, bag, dataframe or the like."""
    return callable(getattr(type(value), "__dask_graph__", None))


def is_partitioned(value: object) -> bool:
    """Whether a value is a Dask collection whose partitions can be computed one by one."""
    return is_collection(value) and callable(getattr(value, "to_delayed", None))


class Partitions:
    """Rows of a Dask collection, one partition after the other: of a dataframe named tuples, of a bag its items."""

    def __init__(self, collection: Any) -> None:
        shape = getattr(collection, "shape", ())
        if callable(getattr(collection, "rechunk", None)):  # an array: whole rows
            collection = collection.rechunk(dict.fromkeys(range(1, len(shape)), -1))
        self._parts = np.ravel(collection.to_delayed()).tolist()

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            rows = part.compute()
            yield from rows.itertuples(index=False) if hasattr(rows, "itertuples") else rows


def without_frames(collection: Any) -> Any:
    """A dataframe, or some of its columns, as a Dask array; any other collection unchanged."""
    return collection.to_dask_array() if callable(getattr(type(collection), "to_dask_array", None)) else collection


def as_tensor(array: object) -> torch.Tensor:
    """A NumPy or pandas array, or anything that `torch.as_tensor` accepts, as a tensor; shares memory where torch can.

    Raises what torch raises for it: TypeError, ValueError or RuntimeError.

    >>> as_tensor(np.arange(3)[::-1])
    tensor([2, 1, 0])
    """
    if hasattr(array, "to_numpy"):  # of pandas
        array = array.to_numpy()
    if isinstance(array, np.ndarray) and not (array.flags.writeable and min(array.strides, default=0) >= 0):
        array = array.copy()  # torch warns of shared memory that must not be written, and knows no negative strides
    tensor = torch.as_tensor(array).detach()
    return tensor if type(tensor) is torch.Tensor or tensor.is_nested else tensor.as_subclass(torch.Tensor)


def as_rows(computed: Any) -> Any:
    """A computed partition of a Dask collection as an array; the items of a bag are the rows.

    >>> as_rows([torch.ones(2), torch.zeros(2)]).shape
    (2, 2)
    """
    if hasattr(computed, "to_numpy"):  # of pandas
        return computed.to_numpy()
    if isinstance(computed, np.ndarray | np.generic | torch.Tensor):
        return computed
    items = [np.asarray(item) for item in computed]
    return np.stack(items) if items else np.empty(0)
