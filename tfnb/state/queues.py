"""Queues as users meet them: recorded in a recording, at work at once outside of one. Semantics S-18, S-68 to S-77."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import DeadlineExceeded, InvalidArgument, ShapeError
from tfnb.graph import Dim, Ref, Spec, Variable, current, ops
from tfnb.graph.queue import Queue
from tfnb.graph.spec import Size
from tfnb.recording import Operation, Recorder, Tensor
from tfnb.recording.values.effects import effect
from tfnb.state.fifo import Attempt, Fifo, Kind
from tfnb.state.waits import WAITS, Runner

Shape = tuple[int | None, ...]


class FIFOQueue(Queue):
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
    >>> tfnb.run(doubled), queue.size()
    (tensor(42.), 0)
    """

    def __init__(
        self, capacity: int, dtypes: torch.dtype | Sequence[torch.dtype], shapes: Any = None, *, name: str = "queue"
    ) -> None:
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
        super().__init__(name, math.inf if capacity < 0 else capacity, parts)

    def enqueue(self, element: Any, *, timeout: float | None = None) -> Operation | None:
        """Put an element: a tensor, or a tuple of one for each component; waits while the queue is full.

        Raises InvalidArgument or ShapeError for an element that does not fit, QueueClosed, DeadlineExceeded.
        """
        parts = [element] if self.is_single else list(element) if isinstance(element, (list, tuple)) else [element]
        if len(parts) != len(self.components):
            raise InvalidArgument(f"queue {self.name} takes {len(self.components)} tensors, and was given {len(parts)}")
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            element = tuple(self._plain(part, kind) for part, (kind, _) in zip(parts, self.components, strict=True))
            check_element(self, element)
            self._act("enqueue", timeout, element=element)
            return None
        tensors = [self._recorded(recorder, p, kind) for p, (kind, _) in zip(parts, self.components, strict=True)]
        for place, tensor in enumerate(tensors):
            _check_part(self, place, tensor.node.outputs[tensor.index])
        refs = tuple(map(Ref, range(len(tensors))))
        inputs = [recorder._entry(tensor).value for tensor in tensors]
        return effect(recorder, ops.ENQUEUE, self, inputs=inputs, attrs={"element": refs})  # type: ignore[return-value]

    def dequeue(self, sample: Any = None, *, timeout: float | None = None) -> Any:
        """Take the first element: a tensor, or a tuple of them; waits while the queue is empty.

        sample: like an element; while recording its values are used. Without it those of the element that comes next,
        which stays, or none. Raises OutOfRange when the queue is closed and empty, DeadlineExceeded, InvalidArgument
        where shapes were not given and there is no sample.
        """
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            element = self._act("dequeue", timeout)
            return element[0] if self.is_single else element
        given = self._sample(sample)
        kinds = [
            _part(recorder, self, place, None if given is None else given[place])
            for place in range(len(self.components))
        ]
        found = effect(
            recorder, ops.DEQUEUE, self, outputs=[spec for spec, _ in kinds], samples=[tensor for _, tensor in kinds]
        )
        assert isinstance(found, list)
        return found[0] if self.is_single else tuple(found)

    def close(self, *, cancel_pending_enqueues: bool = False, timeout: float | None = None) -> Operation | None:
        """No more elements: those that are there can be taken. Waits for the enqueues before it, or cancels them.

        Raises QueueClosed if it is closed.
        """
        recorder = current.recording()
        if isinstance(recorder, Recorder):
            attrs = {"cancel_pending_enqueues": cancel_pending_enqueues}
            return effect(recorder, ops.CLOSE, self, attrs=attrs)  # type: ignore[return-value]
        self._act("close", timeout, cancel_pending=cancel_pending_enqueues)
        return None

    def size(self) -> Any:
        """How many elements it holds."""
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            return fifo(self).size
        with _disable_current_modes():
            held = torch.tensor(fifo(self).size)
        found = effect(recorder, ops.SIZE, self, outputs=[Spec(torch.int64, ())], samples=[held])
        assert isinstance(found, list)
        return found[0]

    # -- at once ----------------------------------------------------------------------------------------------

    def _act(self, kind: Kind, timeout: float | None, **more: Any) -> Any:
        queue = fifo(self)
        runner = Runner(attempts=lambda: [attempt])
        attempt = Attempt(queue, kind, runner.inbox.put, **more)
        queue.submit(attempt)
        try:
            if not attempt.is_over:
                with WAITS.running(runner):
                    WAITS.wait(runner, attempt, timeout)
        except BaseException:
            queue.withdraw([attempt])
            raise
        if not attempt.is_over:
            queue.withdraw([attempt])
            raise DeadlineExceeded(f"{kind} on queue {self.name} did not end within {timeout} s: {state(self)}")
        if attempt.error is not None:
            raise attempt.error
        return attempt.result

    def _plain(self, part: Any, dtype: torch.dtype) -> torch.Tensor:
        given = part.value() if isinstance(part, Variable) else torch.as_tensor(current.plain(part))
        return _same_kind(self, given, dtype).detach().clone()

    def _sample(self, sample: Any) -> Sequence[torch.Tensor] | None:
        if sample is None:
            return fifo(self).front()
        parts = [sample] if self.is_single else list(sample)
        if len(parts) != len(self.components):
            raise InvalidArgument(
                f"queue {self.name} gives {len(self.components)} tensors; the sample has {len(parts)}"
            )
        with _disable_current_modes():
            return [self._plain(part, kind) for part, (kind, _) in zip(parts, self.components, strict=True)]

    def _recorded(self, recorder: Recorder, part: Any, dtype: torch.dtype) -> Tensor:
        if not isinstance(part, (torch.Tensor, Variable)):
            with _disable_current_modes():
                part = torch.as_tensor(part, dtype=dtype)
        tensor = recorder.fresh(recorder._as_tensor(part))
        _same_kind(self, tensor, dtype)
        return tensor


def fifo(queue: Queue) -> Fifo:
    """What a queue holds."""
    if queue.fifo is None:
        queue.fifo = Fifo(queue.name, queue.capacity)
    return queue.fifo


def state(queue: Queue) -> str:
    """How full it is, for messages."""
    held = fifo(queue)
    return f"{held.size} of {held.capacity} elements, {'closed' if held.closed else 'open'}"


def check_element(queue: Queue, element: Sequence[torch.Tensor]) -> None:
    """Raise ShapeError for an element that the queue's shapes do not allow."""
    for place, tensor in enumerate(element):
        _check_part(queue, place, Spec.of(tensor))


def _check_part(queue: Queue, place: int, spec: Spec) -> None:
    shape = queue.components[place][1]
    if shape is not None and not (
        len(shape) == len(spec.shape)
        and all(a is None or isinstance(b, Dim) or a == b for a, b in zip(shape, spec.shape, strict=True))
    ):
        raise ShapeError(f"component {place} of queue {queue.name} has shape {list(shape)}, and was given {spec}")


def _same_kind(queue: Queue, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype != dtype:
        raise InvalidArgument(f"queue {queue.name} takes {dtype}, and was given {tensor.dtype}: convert it")
    return tensor


def _part(
    recorder: Recorder, queue: Queue, place: int, sample: torch.Tensor | None
) -> tuple[Spec, torch.Tensor | None]:
    """Spec and sample of one component of an element that is taken."""
    dtype, shape = queue.components[place]
    if shape is None and sample is None:
        raise InvalidArgument(
            f"queue {queue.name} was made without shapes and is empty: give shapes= when it is made, or sample= to "
            f"dequeue{recorder.tape.at()}"
        )
    if sample is not None:
        check_element(queue, [sample]) if len(queue.components) == 1 else None
    axes: Shape = (
        shape if shape is not None else (None, *sample.shape[1:]) if sample is not None and sample.dim() else ()
    )
    symbols, sizes = recorder.symbols, list[Size]()
    for axis, size in enumerate(axes):
        if size is not None:
            sizes.append(size)
            continue
        if sample is not None and sample.shape[axis] < 2:  # a one would be recorded as a constant
            rows = [*sample.shape]
            rows[axis] = 2
            sample = sample.expand(rows).clone() if sample.shape[axis] else sample.new_zeros(rows)
        hint = None if sample is None else sample.shape[axis]
        sizes.append(symbols.size(symbols.fresh(symbols.unused("B"), hint)))
    return Spec(dtype, tuple(sizes), "cpu" if sample is None else str(sample.device)), sample
