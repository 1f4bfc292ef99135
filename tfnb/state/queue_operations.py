"""Operations on queues of all kinds: recorded in a recording, at work at once outside of one.

Which operations a kind has is the business of `tfnb.state.queues` and `tfnb.state.conditional_accumulators`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import DeadlineExceeded, InvalidArgument, NotFound
from tfnb.graph import Ref, Spec, Variable, current, ops, resources
from tfnb.graph.queue import QUEUES, Queue
from tfnb.graph.spec import Size, tensor_of
from tfnb.recording import Operation, Recorder, Tensor
from tfnb.recording.values.effects import effect
from tfnb.state.accumulator import ACCUMULATORS
from tfnb.state.elements import (
    batch_of,
    check_batch_part,
    check_lengths,
    check_part,
    component,
    copied,
    elements_of,
)
from tfnb.state.orders import ORDERS, Order
from tfnb.state.queue_machine import Attempt, Kind, Level, Mark, QueueHost, QueueMachine, StepQueues, give_back
from tfnb.state.tokens import Tokens
from tfnb.state.waits import WAITS, Runner, check_timeout

Shape = tuple[int | None, ...]


class QueueHandle(Queue):
    """The base of all queues: records its operations in a recording, and performs them at once outside."""

    def __new__(cls, *args: object, container: str = "", shared_name: str | None = None, **kwargs: object) -> Any:
        found = resources.shared(container, shared_name)
        return found if type(found) is cls else object.__new__(cls)

    def __init__(
        self, name: str, capacity: float, components: Sequence[Any], *, kind: str,
        options: Mapping[str, Any] | None = None, container: str = "", shared_name: str | None = None,
    ) -> None:  # fmt: skip
        checked = [component(shared_name or name, *part) for part in components]
        new = Queue(
            shared_name or name, capacity, checked, kind=kind, options=options,
            container=resources.placed(container), shared_name=shared_name,
        )  # fmt: skip
        if (found := resources.shared(container, shared_name)) is not None:
            resources.ensure_same(found, _defined(type(self), new))
            return
        self.__dict__.update(new.__dict__)
        self.gone = ""  # why it holds nothing any more
        recorder = current.recording()
        asked = recorder.tape.marks.device if isinstance(recorder, Recorder) else None
        self.device = None if callable(asked) else asked  # a function says where nodes are
        resources.enter(self)

    @property
    def definition(self) -> str:
        """The queue's class, components and options, in words."""
        return _defined(type(self), self)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored elements; 0 before the first use."""
        return 0 if self.machine is None else int(self.machine.nbytes)

    @property
    def used(self) -> float | None:
        """The time of the last use; None before the first."""
        return None if self.machine is None else self.machine.used  # type: ignore[no-any-return]

    @property
    def level(self) -> Level:
        """The current fill, and the waiting operations; for a queue on a server, as last reported. Never waits.

        >>> import torch, tfnb
        >>> queue = tfnb.FIFOQueue(5, torch.float32, ())
        >>> queue.enqueue(1.0), queue.level.size, queue.level.capacity, str(queue.level)
        (None, 1, 5, '1 of 5 elements, open')
        """
        return Level(0, self.capacity) if self.machine is None else self.machine.level  # type: ignore[no-any-return]

    def drop(self, why: str) -> None:
        """Destroy the queue: waiting operations end with StepAborted, and no operation can begin."""
        with _MAKING:
            self.gone = why
        if self.machine is not None:
            self.machine.abort(f"queue {self.name} is no more: {why}")

    # -- in a recording or at once ----------------------------------------------------------------------------

    def _put(self, parts: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """Enqueue one element, or many; returns whether the queue kept the element, for kinds that report so."""
        components = self.puts(attrs.get("part"))
        kinds = [kind for kind, _ in components]
        self._ensure_count(parts, len(kinds))
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            tensors = [self._plain(part, kind) for part, kind in zip(parts, kinds, strict=True)]
            told = self._act("enqueue", attrs, tensors)
            return bool(told[0]) if told else None
        recorded = [self._recorded(recorder, part, kind) for part, kind in zip(parts, kinds, strict=True)]
        specs = [tensor.node.outputs[tensor.index] for tensor in recorded]
        for place, (spec, (_, shape)) in enumerate(zip(specs, components, strict=True)):
            (check_batch_part if attrs.get("many") else check_part)(self, place, shape, spec)
        if attrs.get("many"):
            check_lengths(self, specs)
        found = self._recorded_with(recorder, ops.ENQUEUE, recorded, attrs, self._told(recorded))
        return found if isinstance(found, Operation) else found[0]

    def _ensure_count(self, parts: Sequence[Any], count: int) -> None:
        if len(parts) != count:
            raise InvalidArgument(f"queue {self.name} takes {count} tensors, and was given {len(parts)}")

    def _told(self, recorded: Sequence[Tensor]) -> Sequence[tuple[Spec, torch.Tensor | None]]:
        """Specs and samples of the outputs of a recorded enqueue."""
        return ()

    def _take(self, sample: object, attrs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """The tensors of an element, or of a batch."""
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            return self._act("dequeue", attrs)
        outputs, values = _DequeueSpecs(recorder, self, attrs).parts(self._sample(sample, attrs))
        return effect(recorder, ops.DEQUEUE, self, attrs=attrs, outputs=outputs, samples=values)  # type: ignore[return-value]

    def size(self) -> Any:
        """The number of stored elements."""
        return self._counted_by({})

    def _counted_by(self, attrs: Mapping[str, Any]) -> Any:
        """The count that ``attrs`` select: whole elements, incomplete ones, or the step of an accumulator."""
        recorder = current.recording()
        with _disable_current_modes():
            (held,) = self._act("size", attrs)
        if not isinstance(recorder, Recorder):
            return int(held)
        return self._recorded_with(recorder, ops.SIZE, (), attrs, [(Spec(torch.int64, ()), held)])[0]

    def close(self, *, cancel_pending_enqueues: bool = False, timeout: float | None = None) -> Operation | None:
        """Refuse further enqueues; stored elements can still be taken. Waits for earlier enqueues, or cancels them.

        Raises QueueClosed if it is closed, unless it cancels.
        """
        attrs = {"cancel_pending_enqueues": cancel_pending_enqueues, **limited(timeout)}
        recorder = current.recording()
        if isinstance(recorder, Recorder):
            return self._recorded_with(recorder, ops.CLOSE, (), attrs)  # type: ignore[no-any-return]
        self._act("close", attrs)
        return None

    def _recorded_with(
        self, recorder: Recorder, op: str, given: Sequence[Tensor], attrs: Mapping[str, Any],
        told: Sequence[tuple[Spec, torch.Tensor | None]] = (),
    ) -> Any:  # fmt: skip
        """Record a node with recorded tensors as operands; returns its outputs, or an Operation if there are none."""
        attrs = {**attrs, **({"element": tuple(map(Ref, range(len(given))))} if given else {})}
        inputs = [recorder._entry(tensor).value for tensor in given]
        outputs, samples = [spec for spec, _ in told], [sample for _, sample in told]
        return effect(recorder, op, self, inputs=inputs, attrs=attrs, outputs=outputs, samples=samples)

    def _parts(self, given: object) -> list[Any]:
        """The component tensors of an element to enqueue, or of the sample of a dequeue."""
        return list(given) if isinstance(given, (list, tuple)) else [given]

    def _act(
        self, kind: Kind, attrs: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()
    ) -> Sequence[torch.Tensor]:
        """Perform an operation at once, and wait for its end."""
        return self._wait(*self._begin(kind, attrs, tensors), attrs)

    def _begin(
        self, kind: Kind, attrs: Mapping[str, Any], tensors: Sequence[torch.Tensor], mark: Mark | None = None
    ) -> tuple[Attempt, Runner]:
        runner = Runner(attempts=lambda: [attempt])
        attempt = attempt_on(self, kind, runner.inbox.put, attrs, tensors, mark=mark)
        attempt.machine.submit(attempt)
        return attempt, runner

    def _wait(self, attempt: Attempt, runner: Runner, attrs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Wait for the end of an attempt; returns its outputs."""
        timeout = attrs.get("timeout")
        try:
            if not attempt.is_over:
                with runner:
                    WAITS.wait(runner, attempt, timeout)
        except BaseException:
            attempt.machine.withdraw([attempt])
            if attempt.error is None:  # it ended in the last moment
                give_back([attempt])
            raise
        if not attempt.is_over and (late := overdue(attempt, timeout)) is not None:
            raise late
        if attempt.error is not None:
            raise attempt.error
        return outcome(self, attempt, attrs)

    def _plain(self, part: object, dtype: torch.dtype) -> torch.Tensor:
        """A private copy of a component, as a plain tensor of the queue's dtype."""
        if isinstance(part, Variable):
            found = part.value()
        else:
            part = current.plain(part)
            found = tensor_of(part, None if hasattr(part, "dtype") else dtype, f"queue {self.name}")
        return copied(_same_kind(self, found, dtype).detach())

    def _sample(self, sample: object, attrs: Mapping[str, Any]) -> Sequence[torch.Tensor] | None:
        """The tensors of the sample that was given, or of the elements that come next; None where there are too few."""
        with _disable_current_modes():
            if sample is not None:
                parts = self._parts(sample)
                if len(parts) != len(self.gives):
                    raise InvalidArgument(
                        f"queue {self.name} gives {len(self.gives)} tensors, and the sample has {len(parts)}"
                    )
                return [self._plain(part, kind) for part, (kind, _) in zip(parts, self.gives, strict=True)]
            count = attrs.get("count")
            found = machine_of(self).first(1 if count is None else count)
            if count is None:
                return tuple(found[0]) if found else None
            is_enough = len(found) == count or (found and attrs.get("up_to"))
            return batch_of(self, found) if is_enough else None

    def _recorded(self, recorder: Recorder, part: object, dtype: torch.dtype) -> Tensor:
        if not isinstance(part, (torch.Tensor, Variable)):
            with _disable_current_modes():
                part = tensor_of(part, dtype, f"queue {self.name}")
        tensor = recorder.fresh(recorder._as_tensor(part))
        _same_kind(self, tensor, dtype)
        return tensor


def _defined(kind: type[Queue], queue: Queue) -> str:
    parts = ", ".join(f"{dtype} {'any' if shape is None else list(shape)}" for dtype, shape in queue.components)
    options = "".join(f", {name} {value}" for name, value in queue.options.items())
    return f"a {kind.__name__} of {queue.capacity} elements ({parts}{options})"


def machine_of(queue: Queue) -> QueueHost:
    """The machine of a queue, made on first use; raises NotFound if the queue's container was reset."""
    if getattr(queue, "gone", ""):
        raise NotFound(f"queue {queue.name} is no more: {queue.gone}; make it again")  # type: ignore[attr-defined]
    if queue.machine is None:
        with _MAKING:
            if queue.machine is None:
                elsewhere = HOMES[-1] if HOMES else None
                queue.machine = made(queue) if elsewhere is None else elsewhere(queue, None)
    return queue.machine  # type: ignore[no-any-return]


def made(queue: Queue) -> QueueMachine:
    """The machine of a queue here, empty."""
    return QueueMachine(queue.name, queue.capacity, ordered(queue))


def ordered(queue: Queue) -> Order:
    """The order of a queue, empty."""
    return MAKE[queue.kind](queue.options)


MAKE: Mapping[str, Callable[[Mapping[str, Any]], Order]] = {
    **ORDERS, **ACCUMULATORS, "tokens": lambda options: Tokens(options["lease_ms"] / 1000),
}  # fmt: skip
"""The order of each kind of queue, made of the queue's options."""


_MAKING = threading.Lock()
HOMES: list[Callable[[Queue, QueueMachine | None], QueueHost]] = []
"""Who holds queues elsewhere: makes the home of a queue, of what a machine here held; the last one counts."""


def move(queues: Iterable[Queue]) -> None:
    """Move local queues in use to the place given by the last of `HOMES`."""
    for queue in queues:
        with _MAKING:
            if isinstance(queue.machine, QueueMachine):
                queue.machine = HOMES[-1](queue, queue.machine)


def attempt_on(
    queue: Queue, kind: Kind, then: Callable[[Attempt], None], attrs: Mapping[str, Any],
    tensors: Sequence[torch.Tensor] = (), what: str | None = None, lends: bool = False,
    step: StepQueues | None = None, mark: Mark | None = None,
) -> Attempt:  # fmt: skip
    """An operation on a queue as its node's ``attrs`` say, not begun; raises ShapeError for tensors that do not fit."""
    count, many, part = attrs.get("count"), attrs.get("many", False), attrs.get("part")
    return Attempt(
        machine_of(queue), kind, then, what=what, call=(attrs, tensors), lends=lends, step=step, mark=mark,
        elements=elements_of(queue, tensors, many=many, part=part) if kind == "enqueue" else (),
        count=1 if count is None else count, up_to=attrs.get("up_to", False), required=attrs.get("required", 1),
        cancel_pending=attrs.get("cancel_pending_enqueues", False),
        question=partial(TOLD[kind], number=int(tensors[0])) if kind in TOLD else _question(attrs),
    )  # fmt: skip


TOLD: Mapping[str, Callable[..., int]] = {
    "set_step": lambda order, number: order.set_step(number),
    "renew": lambda order, number: order.renew(number),
    "finish": lambda order, number: order.end(number),
}
"""What an operation that stands in no line tells the order of a queue, with its one number."""


def _question(attrs: Mapping[str, Any]) -> Callable[[Any], int]:
    """The question to the order of the queue that a recorded count node stands for."""
    if attrs.get("begun"):
        return lambda order: int(order.coming())
    return (lambda order: int(order.step)) if attrs.get("step") else len


def outcome(queue: Queue, attempt: Attempt, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The tensors that an operation gives that ended well."""
    if attempt.outputs is not None:
        return attempt.outputs
    if attempt.kind == "size":
        return (torch.tensor(attempt.answer),)
    if attempt.kind == "enqueue" and QUEUES[queue.kind].tells:
        return (torch.tensor(attempt.kept == len(attempt.elements)),)
    if attempt.kind != "dequeue":
        return ()
    return tuple(attempt.taken[0]) if attrs.get("count") is None else batch_of(queue, attempt.taken)


def overdue(attempt: Attempt, timeout: float | None) -> DeadlineExceeded | None:
    """Withdraw an operation at its deadline and return its error; None if the operation ended at the last moment."""
    text = f"{attempt.act} did not end within {timeout} s: {attempt.machine.level}"
    attempt.machine.withdraw([attempt])
    if attempt.error is None:
        return None
    error = DeadlineExceeded(text)
    error.enqueued = attempt.enqueued
    return error


def counted(queue: Queue, what: str, n: object) -> int:
    """Check a number of elements; raises InvalidArgument unless an int of at least 0."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise InvalidArgument(f"{what} of queue {queue.name} takes a number of elements, at least 0, not {n!r}")
    return n


def limited(timeout: float | None) -> dict[str, Any]:
    """The ``timeout`` attribute of an operation, none without a timeout; raises InvalidArgument for an invalid time."""
    if timeout is None:
        return {}
    check_timeout(timeout)
    return {"timeout": timeout}


def _same_kind(queue: Queue, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype != dtype:
        raise InvalidArgument(f"queue {queue.name} takes {dtype}, and was given {tensor.dtype}: convert it")
    return tensor


def _doubled(sample: torch.Tensor, axis: int) -> torch.Tensor:
    """A sample with two rows along an axis, expanded from one row or zeros; not recorded."""
    rows = [*sample.shape]
    rows[axis] = 2
    with _disable_current_modes():
        return sample.expand(rows).clone() if sample.shape[axis] else sample.new_zeros(rows)


class _DequeueSpecs:
    """Specs and samples of the outputs of a recorded dequeue."""

    def __init__(self, recorder: Recorder, queue: Queue, attrs: Mapping[str, Any]) -> None:
        self.recorder, self.queue = recorder, queue
        self.count, self.up_to = attrs.get("count"), attrs.get("up_to", False)
        self.is_one_length = self.up_to or QUEUES[queue.kind].one_length
        self.rows: Size | None = None  # where only a run knows how many there are; all components have as many

    def parts(self, samples: Sequence[torch.Tensor] | None) -> tuple[list[Spec], list[torch.Tensor | None]]:
        """Specs and samples of all components."""
        given = [None] * len(self.queue.gives) if samples is None else samples
        pairs = [self._part(place, sample) for place, sample in enumerate(given)]
        return [spec for spec, _ in pairs], [sample for _, sample in pairs]

    def _part(self, place: int, sample: torch.Tensor | None) -> tuple[Spec, torch.Tensor | None]:
        dtype, _ = self.queue.gives[place]
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
        """The sizes of one component, None for varying ones; raises InvalidArgument without shape and sample."""
        shape = self.queue.gives[place][1]
        if sample is not None:
            (check_part if self.count is None else check_batch_part)(self.queue, place, shape, Spec.of(sample))
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
        if axis or not self.is_one_length:
            return symbols.size(symbols.fresh(symbols.unused("B"), hint))
        if self.rows is None:
            self.rows = symbols.size(symbols.fresh(symbols.unused("B"), hint))
        return self.rows
