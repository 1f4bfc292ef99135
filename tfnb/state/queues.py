"""Queues as users meet them: recorded in a recording, at work at once outside of one. Semantics S-18, S-68 to S-80."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tfnb.errors import InvalidArgument, OutOfRange
from tfnb.graph import current
from tfnb.recording import Operation, Recorder
from tfnb.state.elements import ensure_batches
from tfnb.state.queue_machine import Attempt, Mark
from tfnb.state.queue_operations import QueueHandle, counted, limited
from tfnb.state.waits import Runner


class TensorQueue(QueueHandle):
    """The base of the queues of tensors, with the operations that all kinds share.

    In a recording its methods are recorded, and act in the order in which they were written when a run needs them; what
    has to wait holds no thread. Outside they act at once. ``timeout``: seconds that an operation may wait.
    """

    is_single: bool  # an element is a tensor, not a tuple of them

    def __init__(
        self, capacity: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: object, name: str, *, kind: str,
        options: Mapping[str, Any] | None = None, **where: Any,
    ) -> None:  # fmt: skip
        is_single = isinstance(dtypes, torch.dtype)
        kinds = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        given = _each(shapes, len(kinds), is_single)
        if not kinds or len(given) != len(kinds) or not _is_number(capacity) or capacity == 0:
            raise InvalidArgument(
                f"a queue has a capacity (below 0: no limit), one dtype or more and a shape for each; {name!r} was "
                f"given capacity {capacity!r}, {len(kinds)} dtypes and shapes {shapes!r}"
            )
        parts = list(zip(kinds, given, strict=True))
        super().__init__(name, math.inf if capacity < 0 else capacity, parts, kind=kind, options=options, **where)
        if self.__dict__.setdefault("is_single", is_single) != is_single:
            raise InvalidArgument(f"queue {self.name} of this shared name gives {self.components} in another form")

    def enqueue(self, element: object, *, timeout: float | None = None) -> Operation | None:
        """Put an element: a tensor, or a tuple of one for each component; waits while the queue is full.

        Raises InvalidArgument or ShapeError for an element that does not fit, QueueClosed, DeadlineExceeded.
        """
        return self._put(self._parts(element), limited(timeout))  # type: ignore[no-any-return]

    def enqueue_many(self, batch: object, *, timeout: float | None = None) -> Operation | None:
        """Put each row of a tensor, or of a tuple of tensors, as an element, one by one as there is room.

        Raises what `enqueue` raises, and InvalidArgument where the queue was made without shapes. The first
        ``error.enqueued`` rows stay where a deadline or a close comes in between.
        """
        ensure_batches(self, "enqueue_many", takes=False)
        return self._put(self._parts(batch), {"many": True, **limited(timeout)})  # type: ignore[no-any-return]

    def dequeue(self, sample: object = None, *, timeout: float | None = None) -> Any:
        """Take the next element: a tensor, or a tuple of them; waits while there is none.

        sample: like an element; while recording its values are used. Without it those of the element that comes next,
        which stays, or none. Raises OutOfRange when the queue is closed and empty, DeadlineExceeded, InvalidArgument
        where shapes were not given and there is no sample.
        """
        return self._one(self._take(sample, limited(timeout)))

    def dequeue_many(self, n: int, sample: object = None, *, timeout: float | None = None) -> Any:
        """Take the next n elements as one batch: a tensor with n rows, or a tuple of them; waits for so many.

        Elements are taken as they come. They are put back, in their order, where a deadline passes or the queue is
        closed before there are n. sample: like a batch. Raises OutOfRange for a closed queue with fewer,
        DeadlineExceeded, InvalidArgument where the shapes of elements were not given.
        """
        attrs = {"count": self._counted("dequeue_many", n), **limited(timeout)}
        return self._one(self._take(sample, attrs))

    def dequeue_up_to(self, n: int, sample: object = None, *, timeout: float | None = None) -> Any:
        """`dequeue_many`, but a closed queue with fewer than n elements gives the rest.

        Raises OutOfRange when the queue is closed and empty.
        """
        attrs = {"count": self._counted("dequeue_up_to", n), "up_to": True, **limited(timeout)}
        return self._one(self._take(sample, attrs))

    def __iter__(self) -> Iterator[Any]:
        """Elements until the queue is closed and empty: ``for element in queue``, outside of recordings.

        Raises the error of the `QueueRunner` that fills the queue, should that have failed.
        """
        if isinstance(current.recording(), Recorder):
            raise InvalidArgument(
                f"queue {self.name} is iterated over outside of recordings; here dequeue() it in a loop"
            )
        return self._elements()

    def _elements(self) -> Iterator[Any]:
        while True:
            try:
                yield self.dequeue()
            except OutOfRange as end:
                if end.__cause__ is not None:  # who fills it failed
                    raise end.__cause__ from None
                return

    def _begin_put(self, element: object, mark: Mark) -> tuple[Attempt, Runner]:
        """Begin to `enqueue` an element of a source outside of a recording; `_wait` ends the operation."""
        parts = self._parts(element)
        kinds = [kind for kind, _ in self.components]
        self._ensure_count(parts, len(kinds))
        return self._begin("enqueue", {}, list(map(self._plain, parts, kinds)), mark)

    def _parts(self, given: object) -> list[Any]:
        return [given] if self.is_single else super()._parts(given)

    def _one(self, parts: Sequence[Any]) -> Any:
        return parts[0] if self.is_single else tuple(parts)

    def _counted(self, what: str, n: object) -> int:
        """Check a number of elements; raises InvalidArgument if invalid, or if batches have no shape."""
        ensure_batches(self, what, takes=True)
        return counted(self, what, n)


def _each(shapes: object, count: int, is_single: bool) -> list[Any]:
    """The shape of each of ``count`` dtypes."""
    if is_single or shapes is None:
        return [shapes] * count
    return list(shapes) if isinstance(shapes, (list, tuple)) else [shapes]


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class FIFOQueue(TensorQueue):
    """A queue of at most ``capacity`` elements, first in, first out.

    An element is a tensor for each of ``dtypes`` (a dtype alone: of one tensor). shapes: of each; None in a shape is an
    axis that may differ from element to element, and None for a shape allows any. capacity below 0: no limit.
    shared_name: every queue of that name in a container is this one; raises InvalidArgument where it is another one.

    In a recording its methods are recorded, and act in the order in which they were written when a run needs them; what
    has to wait holds no thread. Outside they act at once.

    >>> import torch, tfnb
    >>> queue = FIFOQueue(2, torch.float32, (), name="numbers")
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.tensor(1.0), name="x")
    ...     put, doubled = queue.enqueue(x), 2 * queue.dequeue()
    >>> tfnb.run(put, {x: 21.0}), queue.size()
    (None, 1)
    >>> tfnb.run(doubled), queue
    (tensor(42.), <FIFOQueue numbers: 0 of 2 elements, open>)
    >>> queue.enqueue_many([1.0, 2.0]), queue.dequeue_many(2)
    (None, tensor([1., 2.]))
    """

    def __init__(
        self, capacity: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: object = None, *, name: str = "queue",
        container: str = "", shared_name: str | None = None,
    ) -> None:  # fmt: skip
        where: dict[str, Any] = {"container": container, "shared_name": shared_name}
        super().__init__(capacity, dtypes, shapes, name, kind="fifo", **where)


class RandomShuffleQueue(TensorQueue):
    """A queue that gives any of its elements, each as likely as the others. Otherwise like `FIFOQueue`.

    min_after_dequeue: elements that stay, so that there are some to choose from, until the queue is closed. seed: which
    elements come is a function of it and of what is done to the queue; None: another one each time.

    Raises InvalidArgument where min_after_dequeue is not below the capacity.

    >>> import torch
    >>> queue = RandomShuffleQueue(10, 2, torch.int64, (), seed=1, name="pool")
    >>> queue.enqueue_many(torch.arange(6))
    >>> first = queue.dequeue_many(4)
    >>> queue.close(), sorted([*first.tolist(), *queue.dequeue_up_to(4).tolist()])
    (None, [0, 1, 2, 3, 4, 5])
    """

    def __init__(
        self, capacity: int, min_after_dequeue: int, dtypes: torch.dtype | Sequence[torch.dtype],
        shapes: object = None, *, seed: int | None = None, name: str = "random_shuffle_queue", container: str = "",
        shared_name: str | None = None,
    ) -> None:  # fmt: skip
        if (
            not (_is_number(min_after_dequeue) and _is_number(capacity))
            or min_after_dequeue < 0
            or (capacity >= 0 and capacity <= min_after_dequeue)
        ):
            raise InvalidArgument(
                f"queue {name} holds more than min_after_dequeue elements; it was given capacity {capacity} and "
                f"min_after_dequeue {min_after_dequeue}"
            )
        options = {"min_after_dequeue": min_after_dequeue, "seed": seed}
        super().__init__(
            capacity,
            dtypes,
            shapes,
            name,
            kind="shuffle",
            options=options,
            container=container,
            shared_name=shared_name,
        )


class PaddingFIFOQueue(TensorQueue):
    """A `FIFOQueue` whose batches may be of elements of several sizes: axes that are None in a shape vary.

    In a batch each element is filled up with zeros to the longest one. Raises InvalidArgument without a shape for each
    dtype.

    >>> import torch
    >>> queue = PaddingFIFOQueue(10, torch.int64, (None,), name="lines")
    >>> queue.enqueue([1]), queue.enqueue([1, 2, 3])
    (None, None)
    >>> queue.dequeue_many(2)
    tensor([[1, 0, 0],
            [1, 2, 3]])
    """

    def __init__(
        self, capacity: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: Sequence[Any], *,
        name: str = "padding_queue", container: str = "", shared_name: str | None = None,
    ) -> None:  # fmt: skip
        where: dict[str, Any] = {"container": container, "shared_name": shared_name}
        if shapes is None or (not isinstance(dtypes, torch.dtype) and None in shapes):
            raise InvalidArgument(f"queue {name} fills elements up, and needs a shape for each of its dtypes")
        super().__init__(capacity, dtypes, shapes, name, kind="padding", **where)


class PriorityQueue(TensorQueue):
    """A queue whose elements are ``(priority, ...)``: the smallest priority first, equal ones as they came.

    A batch is of the smallest, taken once there are enough, or the queue is full or closed.

    dtypes and shapes are of what follows the priority, which is an int64 number. Otherwise like `FIFOQueue`.

    >>> import torch
    >>> queue = PriorityQueue(10, torch.float32, (), name="urgent")
    >>> queue.enqueue((7, 0.5)), queue.enqueue((2, 1.5))
    (None, None)
    >>> queue.dequeue()
    (tensor(2), tensor(1.5000))
    """

    def __init__(
        self, capacity: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: object = None, *,
        name: str = "priority_queue", container: str = "", shared_name: str | None = None,
    ) -> None:  # fmt: skip
        is_single = isinstance(dtypes, torch.dtype)
        kinds = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        given = _each(shapes, len(kinds), is_single)
        where: dict[str, Any] = {"container": container, "shared_name": shared_name}
        super().__init__(capacity, [torch.int64, *kinds], [(), *given], name, kind="priority", **where)
