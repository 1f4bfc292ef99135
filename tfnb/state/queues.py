"""Queues as users meet them: recorded in a recording, at work at once outside of one. Semantics S-18, S-68 to S-80."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import DeadlineExceeded, InvalidArgument, OutOfRange
from tfnb.graph import Ref, Spec, Variable, current, ops
from tfnb.graph.queue import Queue
from tfnb.graph.spec import Size
from tfnb.recording import Operation, Recorder, Tensor
from tfnb.recording.values.effects import effect
from tfnb.state.elements import (
    batch_of,
    check_batch_part,
    check_lengths,
    check_part,
    copied,
    elements_of,
    ensure_batches,
)
from tfnb.state.orders import ORDERS
from tfnb.state.queue_machine import Attempt, Kind, QueueMachine
from tfnb.state.waits import WAITS, Runner

Shape = tuple[int | None, ...]


class TensorQueue(Queue):
    """A queue of tensors, of whatever kind: what all kinds do.

    In a recording its methods are recorded, and act in the order in which they were written when a run needs them; what
    has to wait holds no thread. Outside they act at once. ``timeout``: seconds that an operation may wait.
    """

    def __init__(
        self, capacity: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: Any, name: str, *, kind: str,
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.is_single = isinstance(dtypes, torch.dtype)
        kinds = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        given = [shapes] if self.is_single or shapes is None else list(shapes)
        if shapes is None:
            given *= len(kinds)
        if not kinds or len(given) != len(kinds) or capacity == 0:
            raise InvalidArgument(
                f"a queue has a capacity, one dtype or more and a shape for each; {name!r} was given capacity "
                f"{capacity}, {len(kinds)} dtypes and {len(given)} shapes"
            )
        parts = [(kind, None if shape is None else tuple(shape)) for kind, shape in zip(kinds, given, strict=True)]
        super().__init__(name, math.inf if capacity < 0 else capacity, parts, kind=kind, options=options)

    def enqueue(self, element: Any, *, timeout: float | None = None) -> Operation | None:
        """Put an element: a tensor, or a tuple of one for each component; waits while the queue is full.

        Raises InvalidArgument or ShapeError for an element that does not fit, QueueClosed, DeadlineExceeded.
        """
        return self._put(element, timeout, many=False)

    def enqueue_many(self, batch: Any, *, timeout: float | None = None) -> Operation | None:
        """Put each row of a tensor, or of a tuple of tensors, as an element, one by one as there is room.

        Raises what `enqueue` raises, and InvalidArgument where the queue was made without shapes. The first
        ``error.enqueued`` rows stay where a deadline or a close comes in between.
        """
        ensure_batches(self, "enqueue_many", takes=False)
        return self._put(batch, timeout, many=True)

    def dequeue(self, sample: Any = None, *, timeout: float | None = None) -> Any:
        """Take the next element: a tensor, or a tuple of them; waits while there is none.

        sample: like an element; while recording its values are used. Without it those of the element that comes next,
        which stays, or none. Raises OutOfRange when the queue is closed and empty, DeadlineExceeded, InvalidArgument
        where shapes were not given and there is no sample.
        """
        return self._take(sample, timeout, {})

    def dequeue_many(self, n: int, sample: Any = None, *, timeout: float | None = None) -> Any:
        """Take the next n elements as one batch: a tensor with n rows, or a tuple of them; waits for so many.

        Elements are taken as they come. They are put back, in their order, where a deadline passes or the queue is
        closed before there are n. sample: like a batch. Raises OutOfRange for a closed queue with fewer,
        DeadlineExceeded, InvalidArgument where the shapes of elements were not given.
        """
        return self._take(sample, timeout, {"count": self._counted("dequeue_many", n)})

    def dequeue_up_to(self, n: int, sample: Any = None, *, timeout: float | None = None) -> Any:
        """`dequeue_many`, which on a closed queue takes the elements that are left, where these are fewer than n.

        Raises OutOfRange when the queue is closed and empty.
        """
        return self._take(sample, timeout, {"count": self._counted("dequeue_up_to", n), "up_to": True})

    def close(self, *, cancel_pending_enqueues: bool = False, timeout: float | None = None) -> Operation | None:
        """No more elements: those that are there can be taken. Waits for the enqueues before it, or cancels them.

        Raises QueueClosed if it is closed, unless it cancels.
        """
        attrs = {"cancel_pending_enqueues": cancel_pending_enqueues, **_limited(timeout)}
        recorder = current.recording()
        if isinstance(recorder, Recorder):
            return effect(recorder, ops.CLOSE, self, attrs=attrs)  # type: ignore[return-value]
        self._act("close", attrs)
        return None

    def size(self) -> Any:
        """How many elements it holds."""
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            return machine_of(self).size
        with _disable_current_modes():
            held = torch.tensor(machine_of(self).size)
        found = effect(recorder, ops.SIZE, self, outputs=[Spec(torch.int64, ())], samples=[held])
        assert isinstance(found, list)
        return found[0]

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

    # -- in a recording or at once ----------------------------------------------------------------------------

    def _put(self, given: Any, timeout: float | None, *, many: bool) -> Operation | None:
        parts = self._parts(given, "takes", "was given")
        kinds = [kind for kind, _ in self.components]
        attrs = {**({"many": True} if many else {}), **_limited(timeout)}
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            tensors = [self._plain(part, kind) for part, kind in zip(parts, kinds, strict=True)]
            self._act("enqueue", attrs, tensors)
            return None
        recorded = [self._recorded(recorder, part, kind) for part, kind in zip(parts, kinds, strict=True)]
        specs = [tensor.node.outputs[tensor.index] for tensor in recorded]
        for place, spec in enumerate(specs):
            (check_batch_part if many else check_part)(self, place, spec)
        if many:
            check_lengths(self, specs)
        attrs["element"] = tuple(map(Ref, range(len(recorded))))
        inputs = [recorder._entry(tensor).value for tensor in recorded]
        return effect(recorder, ops.ENQUEUE, self, inputs=inputs, attrs=attrs)  # type: ignore[return-value]

    def _take(self, sample: Any, timeout: float | None, attrs: Mapping[str, Any]) -> Any:
        attrs = {**attrs, **_limited(timeout)}
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            return self._one(self._act("dequeue", attrs))
        samples = self._sample(sample, attrs)
        outputs, values = _Taken(recorder, self, attrs).parts(samples)
        found = effect(recorder, ops.DEQUEUE, self, attrs=attrs, outputs=outputs, samples=values)
        return self._one(found)

    def _one(self, parts: Any) -> Any:
        return parts[0] if self.is_single else tuple(parts)

    def _counted(self, what: str, n: Any) -> int:
        """A number of elements; raises InvalidArgument for what is none, and where batches have no shape."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise InvalidArgument(f"{what} of queue {self.name} takes a number of elements, at least 0, not {n!r}")
        ensure_batches(self, what, takes=True)
        return n

    def _parts(self, given: Any, does: str, found: str) -> list[Any]:
        """A tensor for each component."""
        parts = [given] if self.is_single else list(given) if isinstance(given, (list, tuple)) else [given]
        if len(parts) != len(self.components):
            raise InvalidArgument(f"queue {self.name} {does} {len(self.components)} tensors, and {found} {len(parts)}")
        return parts

    def _act(
        self, kind: Kind, attrs: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()
    ) -> Sequence[torch.Tensor]:
        """Do it now."""
        runner = Runner(attempts=lambda: [attempt])
        attempt = attempt_on(self, kind, runner.inbox.put, attrs, tensors)
        queue, timeout = attempt.machine, attrs.get("timeout")
        queue.submit(attempt)
        try:
            if not attempt.is_over:
                with WAITS.running(runner):
                    WAITS.wait(runner, attempt, timeout)
        except BaseException:
            queue.withdraw([attempt])
            raise
        if not attempt.is_over:
            raise overdue(attempt, timeout)
        if attempt.error is not None:
            raise attempt.error
        return outcome(self, attempt, attrs)

    def _plain(self, part: Any, dtype: torch.dtype) -> torch.Tensor:
        """The queue's own tensor of what was given."""
        if isinstance(part, Variable):
            found = part.value()
        else:
            part = current.plain(part)
            found = torch.as_tensor(part) if hasattr(part, "dtype") else torch.tensor(part, dtype=dtype)
        return copied(_same_kind(self, found, dtype).detach())

    def _sample(self, sample: Any, attrs: Mapping[str, Any]) -> Sequence[torch.Tensor] | None:
        """The tensors of the sample that was given, or of the elements that come next; None where there are too few."""
        with _disable_current_modes():
            if sample is not None:
                parts = self._parts(sample, "gives", "the sample has")
                return [self._plain(part, kind) for part, (kind, _) in zip(parts, self.components, strict=True)]
            count = attrs.get("count")
            found = machine_of(self).first(1 if count is None else count)
            if count is None:
                return found[0] if found else None
            is_enough = len(found) == count or (found and attrs.get("up_to"))
            return batch_of(self, found) if is_enough else None

    def _recorded(self, recorder: Recorder, part: Any, dtype: torch.dtype) -> Tensor:
        if not isinstance(part, (torch.Tensor, Variable)):
            with _disable_current_modes():
                part = torch.as_tensor(part, dtype=dtype)
        tensor = recorder.fresh(recorder._as_tensor(part))
        _same_kind(self, tensor, dtype)
        return tensor


class FIFOQueue(TensorQueue):
    """A queue of at most ``capacity`` elements, first in, first out.

    An element is a tensor for each of ``dtypes`` (a dtype alone: of one tensor). shapes: of each; None in a shape is an
    axis that may differ from element to element, and None for a shape allows any. capacity below 0: no limit.

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
        self, capacity: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: Any = None, *, name: str = "queue"
    ) -> None:
        super().__init__(capacity, dtypes, shapes, name, kind="fifo")


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
        self, capacity: int, min_after_dequeue: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: Any = None, *,
        seed: int | None = None, name: str = "random_shuffle_queue",
    ) -> None:  # fmt: skip
        if min_after_dequeue < 0 or (capacity >= 0 and capacity <= min_after_dequeue):
            raise InvalidArgument(
                f"queue {name} holds more than min_after_dequeue elements; it was given capacity {capacity} and "
                f"min_after_dequeue {min_after_dequeue}"
            )
        options = {"min_after_dequeue": min_after_dequeue, "seed": seed}
        super().__init__(capacity, dtypes, shapes, name, kind="shuffle", options=options)


class PaddingFIFOQueue(TensorQueue):
    """A `FIFOQueue` whose batches may be of elements of several sizes: axes that are None in a shape vary.

    In a batch each element is filled up with zeros to the longest one.

    >>> import torch
    >>> queue = PaddingFIFOQueue(10, torch.int64, (None,), name="lines")
    >>> queue.enqueue([1]), queue.enqueue([1, 2, 3])
    (None, None)
    >>> queue.dequeue_many(2)
    tensor([[1, 0, 0],
            [1, 2, 3]])
    """

    def __init__(
        self, capacity: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: Any, *, name: str = "padding_queue"
    ) -> None:
        super().__init__(capacity, dtypes, shapes, name, kind="padding")
        if any(shape is None for _, shape in self.components):
            raise InvalidArgument(f"queue {name} fills elements up, and needs a shape for each of its dtypes")


class PriorityQueue(TensorQueue):
    """A queue whose elements are ``(priority, ...)``: the smallest priority first, equal ones as they came.

    dtypes and shapes are of what follows the priority, which is an int64 number. Otherwise like `FIFOQueue`.

    >>> import torch
    >>> queue = PriorityQueue(10, torch.float32, (), name="urgent")
    >>> queue.enqueue((7, 0.5)), queue.enqueue((2, 1.5))
    (None, None)
    >>> queue.dequeue()
    (tensor(2), tensor(1.5000))
    """

    def __init__(
        self, capacity: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: Any = None, *,
        name: str = "priority_queue",
    ) -> None:  # fmt: skip
        kinds = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        given = [shapes] if isinstance(dtypes, torch.dtype) else [None] * len(kinds) if shapes is None else list(shapes)
        super().__init__(capacity, [torch.int64, *kinds], [(), *given], name, kind="priority")


def machine_of(queue: Queue) -> QueueMachine:
    """What a queue holds."""
    if queue.machine is None:
        with _MAKING:
            if queue.machine is None:
                queue.machine = QueueMachine(queue.name, queue.capacity, ORDERS[queue.kind](queue.options))
    return queue.machine  # type: ignore[no-any-return]


_MAKING = threading.Lock()


def attempt_on(
    queue: Queue, kind: Kind, then: Callable[[Attempt], None], attrs: Mapping[str, Any],
    tensors: Sequence[torch.Tensor] = (), what: str | None = None,
) -> Attempt:  # fmt: skip
    """An operation on a queue as its node's ``attrs`` say, not begun; raises ShapeError for tensors that do not fit."""
    count = attrs.get("count")
    return Attempt(
        machine_of(queue), kind, then, what=what,
        elements=elements_of(queue, tensors, many=attrs.get("many", False)) if kind == "enqueue" else (),
        count=1 if count is None else count, up_to=attrs.get("up_to", False),
        cancel_pending=attrs.get("cancel_pending_enqueues", False),
    )  # fmt: skip


def outcome(queue: Queue, attempt: Attempt, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The tensors that an operation gives that ended well."""
    if attempt.kind == "size":
        return (torch.tensor(attempt.size),)
    if attempt.kind != "dequeue":
        return ()
    return attempt.taken[0] if attrs.get("count") is None else batch_of(queue, attempt.taken)


def overdue(attempt: Attempt, timeout: float | None) -> DeadlineExceeded:
    """The error of an operation that did not end in time; it is taken back."""
    text = f"{attempt.act} did not end within {timeout} s: {attempt.machine.state}"
    attempt.machine.withdraw([attempt])
    error = DeadlineExceeded(text)
    error.enqueued = attempt.enqueued
    return error


def _limited(timeout: float | None) -> dict[str, Any]:
    return {} if timeout is None else {"timeout": timeout}


def _same_kind(queue: Queue, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype != dtype:
        raise InvalidArgument(f"queue {queue.name} takes {dtype}, and was given {tensor.dtype}: convert it")
    return tensor


def _doubled(sample: torch.Tensor, axis: int) -> torch.Tensor:
    """A sample of two rows along an axis, made of one or none; nothing of it is recorded."""
    rows = [*sample.shape]
    rows[axis] = 2
    with _disable_current_modes():
        return sample.expand(rows).clone() if sample.shape[axis] else sample.new_zeros(rows)


class _Taken:
    """Specs and samples of what a recorded dequeue gives."""

    def __init__(self, recorder: Recorder, queue: Queue, attrs: Mapping[str, Any]) -> None:
        self.recorder, self.queue = recorder, queue
        self.count, self.up_to = attrs.get("count"), attrs.get("up_to", False)
        self.rows: Size | None = None  # of a batch whose length only a run knows; all components have as many

    def parts(self, samples: Sequence[torch.Tensor] | None) -> tuple[list[Spec], list[torch.Tensor | None]]:
        """Of all components."""
        given = [None] * len(self.queue.components) if samples is None else samples
        pairs = [self._part(place, sample) for place, sample in enumerate(given)]
        return [spec for spec, _ in pairs], [sample for _, sample in pairs]

    def _part(self, place: int, sample: torch.Tensor | None) -> tuple[Spec, torch.Tensor | None]:
        dtype, _ = self.queue.components[place]
        axes, sizes = self._axes(place, sample), list[Size]()
        for axis, size in enumerate(axes):
            if size is not None:
                sizes.append(size)
                continue
            if sample is not None and sample.shape[axis] < 2:  # a one would be recorded as a constant
                sample = _doubled(sample, axis)
            sizes.append(self._fresh(axis, None if sample is None else sample.shape[axis]))
        return Spec(dtype, tuple(sizes), "cpu" if sample is None else str(sample.device)), sample

    def _axes(self, place: int, sample: torch.Tensor | None) -> Shape:
        """The sizes of one component, None for those that vary; raises InvalidArgument where nothing tells them."""
        shape = self.queue.components[place][1]
        if sample is not None:
            spec = Spec.of(sample)
            (check_part if self.count is None else check_batch_part)(self.queue, place, spec)
        if self.count is not None:
            return (None if self.up_to and self.count else self.count, *(shape or ()))
        if shape is not None:
            return shape
        if sample is None:
            raise InvalidArgument(
                f"queue {self.queue.name} was made without shapes and is empty: give shapes= when it is made, or "
                f"sample= to dequeue{self.recorder.tape.at()}"
            )
        return (None, *sample.shape[1:]) if sample.dim() else ()

    def _fresh(self, axis: int, hint: int | None) -> Size:
        """A size that varies."""
        symbols = self.recorder.symbols
        if axis or not self.up_to:
            return symbols.size(symbols.fresh(symbols.unused("B"), hint))
        if self.rows is None:
            self.rows = symbols.size(symbols.fresh(symbols.unused("B"), hint))
        return self.rows
