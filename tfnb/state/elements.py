"""Elements of queues: whether tensors fit a queue, the rows of a batch, and the batch that several elements make.

Pure; knows the description of a queue, not what it holds. Semantics S-68, S-72, S-79.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Dim, Spec
from tfnb.graph.queue import Queue
from tfnb.state.orders import Element

Shape = tuple[int | None, ...] | None


def check_part(queue: Queue, place: int, shape: Shape, spec: Spec) -> None:
    """Raise ShapeError for a tensor that is no component of this shape."""
    if shape is not None and not (
        len(shape) == len(spec.shape)
        and all(a is None or isinstance(b, Dim) or a == b for a, b in zip(shape, spec.shape, strict=True))
    ):
        raise ShapeError(f"component {place} of queue {queue.name} has shape {list(shape)}, and was given {spec}")


def check_batch_part(queue: Queue, place: int, shape: Shape, spec: Spec) -> None:
    """Raise ShapeError for a tensor whose rows are no such component."""
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
    number = () if part is None else (torch.tensor(part),)
    return [(*number, *row) for row in zip(*(tensor.unbind(0) for tensor in tensors), strict=True)]


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
    return tuple(BATCHES[queue.kind](rows) for rows in zip(*elements, strict=True))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The values in memory of their own."""
    return stacked([tensor])[0] if tensor.numel() > _PARALLEL else tensor.clone()


def stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of one shape."""
    if rows[0].numel() <= _PARALLEL or not all(map(_is_plain, rows)):
        return torch.stack(list(rows))
    batch = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype)
    for target, row in zip(batch, rows, strict=True):
        np.copyto(_bytes(target), _bytes(row))
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
