"""Elements of queues: whether tensors fit a queue, the rows of a batch, and the batch that several elements make.

Pure; knows the description of a queue, not what it holds. Semantics S-68, S-72, S-79.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Dim, Spec
from tfnb.graph.queue import Queue
from tfnb.state.orders import Element

Shape = tuple[int | None, ...] | None


def component(name: str, dtype: object, shape: Any) -> tuple[torch.dtype, Shape]:
    """The dtype and shape of a component as they were given for queue ``name``; raises InvalidArgument.

    >>> component("q", torch.float32, [None, 2])
    (torch.float32, (None, 2))
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else shape
    is_shape = sizes is None or (
        isinstance(sizes, tuple) and all(size is None or (type(size) is int and size >= 0) for size in sizes)
    )
    if not isinstance(dtype, torch.dtype) or not is_shape:
        raise InvalidArgument(
            f"a component of queue {name} has a dtype and a shape, such as torch.float32 and (None, 3); "
            f"it was given {dtype!r} and {shape!r}"
        )
    return dtype, sizes


def check_part(queue: Queue, place: int, shape: Shape, spec: Spec) -> None:
    """Raise ShapeError for a tensor that is no component of this shape."""
    if shape is not None and not (
        len(shape) == len(spec.shape)
        and all(a is None or isinstance(b, Dim) or a == b for a, b in zip(shape, spec.shape, strict=True))
    ):
        raise ShapeError(f"component {place} of queue {queue.name} has shape {list(shape)}, and was given {spec}")


def check_batch_part(queue: Queue, place: int, shape: Shape, spec: Spec) -> None:
    """Raise ShapeError for a tensor whose rows do not fit a component of the queue."""
    if not spec.shape:
        raise ShapeError(f"component {place} of a batch for queue {queue.name} has rows, and {spec} has none")
    check_part(queue, place, shape, Spec(spec.dtype, spec.shape[1:], spec.device))


def check_lengths(queue: Queue, specs: Sequence[Spec]) -> None:
    """Raise ShapeError for tensors of a batch that differ in their rows."""
    if len({spec.shape[0] for spec in specs if isinstance(spec.shape[0], int)}) > 1:
        raise ShapeError(
            f"the tensors of a batch have as many rows as one another; queue {queue.name} was given "
            f"{' and '.join(map(str, specs))}"
        )


def elements_of(
    queue: Queue, tensors: Sequence[torch.Tensor], *, many: bool, part: int | None = None
) -> Sequence[Element]:
    """The elements that tensors are, one or ``many`` with a row each, or parts of elements; raises ShapeError."""
    specs = [Spec.of(tensor) for tensor in tensors]
    for place, (spec, (_, shape)) in enumerate(zip(specs, queue.puts(part), strict=True)):
        (check_batch_part if many else check_part)(queue, place, shape, spec)
    if not many:
        return [tuple(tensors)]
    check_lengths(queue, specs)
    if part is not None:
        number = torch.tensor(part)
        return [(number, *row) for row in zip(*(tensor.unbind(0) for tensor in tensors), strict=True)]
    batch = ElementBatch(tensors)
    return [Row(batch, place) for place in range(len(tensors[0]))]


class ElementBatch:
    """Tensors whose rows are elements."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    @cached_property
    def rows(self) -> list[tuple[torch.Tensor, ...]]:
        """The tensors of each element; made where one is looked at by itself."""
        return list(zip(*(tensor.unbind(0) for tensor in self.tensors), strict=True))


class Row(Sequence[torch.Tensor]):
    """An element that is a row of a batch: its tensors are made on access only, not while passing through a queue.

    >>> batch = ElementBatch([torch.tensor([1, 2, 3])])
    >>> spans([Row(batch, 0), Row(batch, 1)]), tuple(Row(batch, 2))
    ([(0, 2)], (tensor(3),))
    """

    __slots__ = ("batch", "place")

    def __init__(self, batch: ElementBatch, place: int) -> None:
        self.batch, self.place = batch, place

    def __len__(self) -> int:
        return len(self.batch.tensors)

    def __getitem__(self, part: Any) -> Any:
        return self.batch.rows[self.place][part]


def spans(elements: Sequence[Element]) -> list[tuple[int, int]]:
    """Spans of ``elements`` that are consecutive rows of one batch; empty if some element is no row of a batch."""
    found, batch, place, start = list[tuple[int, int]](), None, 0, 0
    for at, element in enumerate(elements):
        if type(element) is not Row:
            return []
        if element.batch is not batch or element.place != place:
            if at:
                found.append((start, at))
            batch, start = element.batch, at
        place = element.place + 1
    return [*found, (start, len(elements))]


def ensure_batches(queue: Queue, what: str, *, takes: bool) -> None:
    """Raise InvalidArgument where a queue's shapes do not tell the shape of a batch."""
    shapes = [shape for _, shape in queue.components]
    if any(shape is None for shape in shapes):
        cure = "give shapes= when the queue is made"
    elif takes and BATCHES[queue.kind] is stacked and any(None in shape for shape in shapes if shape is not None):
        cure = "make a tfnb.PaddingFIFOQueue, which fills rows up"
    else:
        return
    text = ", ".join("any" if shape is None else str(list(shape)) for shape in shapes)
    raise InvalidArgument(
        f"{what} needs elements of one shape; queue {queue.name} has elements of shape {text}: {cure}"
    )


def batch_of(queue: Queue, elements: Sequence[Element]) -> tuple[torch.Tensor, ...]:
    """Elements as one tensor for each component, a row for each element."""
    if not elements:
        return tuple(torch.empty((0, *(size or 0 for size in shape or ())), dtype=d) for d, shape in queue.gives)
    found = spans(elements)
    if found and len(found) * 4 <= len(elements) + 3:  # few rows stand alone
        parts = [_span(elements[start], stop - start) for start, stop in found]  # type: ignore[arg-type]
        columns = list(zip(*parts, strict=True))
        if all(part.shape[1:] == column[0].shape[1:] for column in columns for part in column):
            return tuple(map(joined, columns))
    return tuple(BATCHES[queue.kind](rows) for rows in zip(*elements, strict=True))


def _span(first: Row, length: int) -> list[torch.Tensor]:
    """Rows of a batch."""
    tensors, place = first.batch.tensors, first.place
    if length == len(tensors[0]):
        return list(tensors)
    return [tensor[place : place + length] for tensor in tensors]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of several batches. Rows of one batch are no copy, where a view keeps at most twice their memory alive.

    >>> joined([torch.tensor([1, 2]), torch.tensor([3])])
    tensor([1, 2, 3])
    """
    first = parts[0]
    if len(parts) > 1:
        return _concatenated(parts)
    is_small = 2 * first.numel() * first.element_size() < first.untyped_storage().nbytes()
    return copied(first) if is_small or first.data_ptr() % _ALIGNED else first


_ALIGNED = 64  # bytes, as torch places what it allocates


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The values in memory of their own."""
    return stacked([tensor])[0] if tensor.numel() > _PARALLEL else tensor.clone()


def stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of one shape."""
    if rows[0].numel() <= _PARALLEL:
        return torch.stack(list(rows))
    return _concatenated([row[None] for row in rows])


def _concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Batches of rows of one shape."""
    if sum(part.numel() for part in parts) <= _PARALLEL or not all(map(_is_plain, parts)):
        return torch.cat(list(parts))
    batch = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype)
    for target, part in zip(batch.split([*map(len, parts)]), parts, strict=True):
        np.copyto(_bytes(target), _bytes(part))
    return batch


_PARALLEL = (
    2**15
)  # numbers from which on torch copies with several threads, which wait for one another where cores are busy


def _is_plain(tensor: torch.Tensor) -> bool:
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy and not tensor.is_quantized


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows filled up with zeros to the longest along each axis.

    >>> padded([torch.tensor([1]), torch.tensor([1, 2, 3])])
    tensor([[1, 0, 0],
            [1, 2, 3]])
    """
    if len({row.shape for row in rows}) == 1:
        return stacked(rows)
    longest = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    batch = rows[0].new_zeros((len(rows), *longest))
    for place, row in enumerate(rows):
        part = batch[place]
        for axis, size in enumerate(row.shape):
            part = part.narrow(axis, 0, size)
        part.copy_(row)
    return batch


BATCHES: Mapping[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    "fifo": stacked, "shuffle": stacked, "priority": stacked, "padding": padded,
    "barrier": stacked,
}  # fmt: skip
"""How each kind of queue makes a batch of the rows of one component."""
