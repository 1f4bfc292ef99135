"""Accumulators of gradients as users meet them: recorded in a recording, at work at once outside of one.

Semantics S-88 to S-90, S-98. Imports the IndexedSlices of gradients; what adds up is `tfnb.state.accumulator`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import InvalidArgument, ShapeError, ensure_type
from tfnb.gradients import IndexedSlices
from tfnb.graph import Spec, current, ops
from tfnb.graph.spec import flows
from tfnb.recording import Recorder, Tensor
from tfnb.state.elements import component
from tfnb.state.queue_operations import QueueHandle, limited


class _Conditional(QueueHandle):
    """The methods that accumulators of all kinds share."""

    def count(self) -> Any:
        """The number of gradients in the current sum."""
        return self.size()

    def set_global_step(self, step: object) -> Any:
        """Set the step: from now on gradients of earlier steps are dropped; gradients already in the sum stay.

        Warns where it goes back to an earlier step.
        """
        recorder = current.recording()
        if isinstance(recorder, Recorder):
            given = [self._recorded(recorder, step, torch.int64)]
            return self._recorded_with(recorder, ops.SET_STEP, given, {})
        self._act("set_step", {}, [self._plain(step, torch.int64)])
        return None

    def _took(self, n: object, sample: object, timeout: float | None) -> Sequence[torch.Tensor]:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidArgument(f"take_grad of {self.name} takes a number of gradients, at least 1, not {n!r}")
        return self._take(sample, {"required": n, **limited(timeout)})

    def _told(self, recorded: Sequence[Tensor]) -> Sequence[tuple[Spec, torch.Tensor | None]]:
        step = recorded[-1].found_sample()
        with _disable_current_modes():
            (now,) = self._act("size", {"step": True})
            return [(Spec(torch.bool, ()), None if step is None else torch.tensor(int(step) >= int(now)))]


def _ensure_flows(name: str, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or not flows(dtype):
        raise InvalidArgument(f"the mean of {name} is of a torch.dtype of numbers with a fraction, not of {dtype!r}")


class ConditionalAccumulator(_Conditional):
    """The mean of gradients of several workers. Stale gradients, computed at an earlier step, are dropped.

    shape: of each gradient; None in it is an axis that may differ from one mean to the next, and None allows any shape.
    Its step begins at 0, and grows by 1 with each mean. Raises InvalidArgument for a dtype of numbers without a
    fraction.

    >>> import torch
    >>> grads = ConditionalAccumulator(torch.float32, (2,))
    >>> grads.apply_grad(torch.tensor([1.0, 2.0])), grads.apply_grad(torch.tensor([3.0, 4.0])), grads.count()
    (True, True, 2)
    >>> grads.take_grad(2), grads.apply_grad(torch.tensor([9.0, 9.0]), local_step=0)
    (tensor([2., 3.]), False)
    """

    def __init__(
        self, dtype: torch.dtype, shape: Sequence[int | None] | None = None, *, name: str = "accumulator",
        container: str = "", shared_name: str | None = None,
    ) -> None:  # fmt: skip
        _ensure_flows(name, dtype)
        parts = [(dtype, shape), (torch.int64, ())]
        super().__init__(name, math.inf, parts, kind="mean", container=container, shared_name=shared_name)

    def apply_grad(self, grad: object, local_step: object = 0) -> Any:
        """Add a gradient that was computed at ``local_step``; False where that is too old. Never waits.

        Raises ShapeError or InvalidArgument for a gradient that does not fit.
        """
        return self._put([grad, local_step], {})

    def take_grad(self, n: int, sample: object = None, *, timeout: float | None = None) -> Any:
        """The mean of all gradients, once there are n or more; waits for them. Taking the mean begins the next step.

        sample: like a gradient; while recording its values are used. Without it those of the mean of now, or none.
        Raises DeadlineExceeded, InvalidArgument where the shape was not given and there is no sample.
        """
        return self._took(n, None if sample is None else [sample], timeout)[0]


class SparseConditionalAccumulator(_Conditional):
    """The mean of gradients that have some rows of a table: `IndexedSlices`. Otherwise like `ConditionalAccumulator`.

    shape: of the whole table. sparse_mean: "per_step" divides each row by the number of gradients, which equals the
    mean of dense gradients; "per_row" divides it by the number of gradients that have the row, as TensorFlow does.
    Raises InvalidArgument for a shape without rows, a dtype of numbers without a fraction, and an unknown
    ``sparse_mean``.

    >>> import torch, tfnb
    >>> grads = SparseConditionalAccumulator(torch.float32, (5, 1), sparse_mean="per_row")
    >>> for rows, at in [([[4.0], [6.0]], [0, 2]), ([[8.0]], [0])]:
    ...     _ = grads.apply_grad(tfnb.IndexedSlices(torch.tensor(rows), torch.tensor(at), (5, 1)))
    >>> mean = grads.take_grad(2)
    >>> mean.indices, mean.values.flatten()
    (tensor([0, 2]), tensor([6., 6.]))
    """

    def __init__(
        self, dtype: torch.dtype, shape: Sequence[int], *, sparse_mean: str = "per_step",
        name: str = "sparse_accumulator", container: str = "", shared_name: str | None = None,
    ) -> None:  # fmt: skip
        _ensure_flows(name, dtype)
        _, sizes = component(name, dtype, shape)
        if not sizes or None in sizes:
            raise InvalidArgument(f"{name} has the shape of a whole table, rows first, not {sizes}")
        if sparse_mean not in ("per_step", "per_row"):
            raise InvalidArgument(f"sparse_mean of {name} is 'per_step' or 'per_row', not {sparse_mean!r}")
        parts = [(torch.int64, (None,)), (dtype, (None, *sizes[1:])), (torch.int64, ())]
        options = {"rows": sizes[0], "per_row": int(sparse_mean == "per_row")}
        where: dict[str, Any] = {"container": container, "shared_name": shared_name}
        super().__init__(name, math.inf, parts, kind="sparse_mean", options=options, **where)
        self.shape = tuple(shape)

    def apply_grad(self, grad: IndexedSlices, local_step: object = 0) -> Any:
        """Add a gradient that was computed at ``local_step``; False where that is too old. Never waits.

        Rows that it names twice are added up. Raises ShapeError or InvalidArgument for one that does not fit.
        """
        if not isinstance(grad, IndexedSlices):
            raise InvalidArgument(f"{self.name} takes IndexedSlices, not a {type(grad).__name__}")
        if grad.dense_shape != self.shape:
            raise ShapeError(f"{self.name} is of shape {list(self.shape)}, the gradient of {list(grad.dense_shape)}")
        return self._put([grad.indices, grad.values, local_step], {})

    def take_grad(self, n: int, sample: IndexedSlices | None = None, *, timeout: float | None = None) -> IndexedSlices:
        """The mean of all gradients, once there are n or more; waits for them. Taking the mean begins the next step.

        Each row is there once. sample: while recording its values are used. Raises DeadlineExceeded.
        """
        ensure_type(sample, (IndexedSlices, NoneType), f"sample of {self.name}")
        given = None if sample is None else [sample.indices, sample.values]
        indices, values = self._took(n, given, timeout)
        made = IndexedSlices(values, indices, self.shape).called(self.name)
        made.is_distinct = True
        return made
