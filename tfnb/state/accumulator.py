"""Accumulators of gradients: the gradients of several workers become one mean, and stale gradients are dropped.

After the conditional accumulators of TensorFlow. An accumulator is the order of a queue (`tfnb.state.orders`): each put
adds a gradient, and the one element that can be taken is the mean. Pure torch; the owner calls from one thread at a
time. Semantics S-88 to S-90, S-98, S-103.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Spec
from tfnb.recording.marks.notes import user_level
from tfnb.state.orders import Element, Whole


class Sum(Protocol):
    """Gradients that are added up."""

    tensors: list[torch.Tensor]  # what it holds

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def add(self, grad: Element, weight: float) -> None:
        """A gradient more; raises InvalidArgument or ShapeError for one that does not fit, and adds nothing."""

    def merge(self, other: Self) -> None:
        """Add all gradients of another sum of the same class."""

    def mean(self, weight: float) -> Element:
        """The mean of gradients that weigh so much together."""


class DenseSum:
    """Gradients of one shape: that of ``spec``, or that of the first one."""

    def __init__(self, spec: Spec | None = None) -> None:
        self.spec = spec
        self._sum: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._sum is None else self._sum.numel() * self._sum.element_size()

    def add(self, grad: Element, weight: float) -> None:
        """A gradient more."""
        (part,) = grad
        spec = self.spec if self._sum is None else Spec.of(self._sum)
        if spec is not None and (tuple(part.shape) != tuple(spec.shape) or part.dtype != spec.dtype):
            raise ShapeError(f"an accumulator of {spec} was given {Spec.of(part)}")
        if self._sum is None:
            self._sum = part.clone() if weight == 1 else part * weight
        else:
            self._sum.add_(part, alpha=weight)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The current sum."""
        return [] if self._sum is None else [self._sum]

    @tensors.setter
    def tensors(self, tensors: list[torch.Tensor]) -> None:
        (self._sum,) = tensors or (None,)

    def merge(self, other: DenseSum) -> None:
        """Add all gradients of another sum."""
        if other._sum is not None:
            self.add((other._sum,), 1)

    def mean(self, weight: float) -> Element:
        """The mean of gradients that weigh so much together."""
        assert self._sum is not None
        return (self._sum / weight,)


class SparseSum:
    """Gradients as row numbers and rows. Rows that one gradient names twice are added up first.

    per_row: each row is divided by the weight of the gradients that have it, else by that of all.

    >>> sums = SparseSum(rows=5, per_row=True)
    >>> sums.add((torch.tensor([0, 2]), torch.tensor([4.0, 6.0])), 1)
    >>> sums.add((torch.tensor([0]), torch.tensor([8.0])), 1)
    >>> sums.mean(2)
    (tensor([0, 2]), tensor([6., 6.]))
    """

    def __init__(self, rows: int, per_row: bool) -> None:
        self.rows, self.per_row = rows, per_row
        self._indices: torch.Tensor | None = None
        self._values = self._weights = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.numel() * part.element_size() for part in self.tensors)

    def add(self, grad: Element, weight: float) -> None:
        """A gradient more."""
        indices, values = grad
        outside = indices[(indices < 0) | (indices >= self.rows)]
        if outside.numel():
            raise InvalidArgument(f"row {int(outside[0])} is outside of the {self.rows} rows of an accumulator")
        if len(indices) != len(values):
            raise ShapeError(f"a sparse gradient has a row for each index, not {len(values)} rows for {len(indices)}")
        rows, summed = _merged(indices, values)
        self._extend(rows, summed * weight, torch.full((len(rows),), float(weight), dtype=torch.float64))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Row numbers, rows and weights as they stand."""
        return [] if self._indices is None else [self._indices, self._values, self._weights]

    @tensors.setter
    def tensors(self, tensors: list[torch.Tensor]) -> None:
        if tensors:
            indices, values, weights = tensors
            is_one = indices.dim() == 1 and len(indices) == len(values) and weights.shape == indices.shape
            if not is_one or ((indices < 0) | (indices >= self.rows)).any():
                raise ShapeError(
                    f"these are no sums of some of {self.rows} rows: {', '.join(map(str, map(Spec.of, tensors)))}"
                )
        self._indices, self._values, self._weights = tensors or (None, torch.empty(0), torch.empty(0))

    def merge(self, other: SparseSum) -> None:
        """Add all gradients of another sum."""
        if other._indices is not None:
            self._extend(other._indices, other._values, other._weights)

    def _extend(self, indices: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> None:
        if self._indices is None:
            self._indices, self._values, self._weights = indices, values, weights
            return
        both = torch.cat([self._indices, indices])
        self._indices, self._values = _merged(both, torch.cat([self._values, values]))
        _, self._weights = _merged(both, torch.cat([self._weights, weights]))

    def mean(self, weight: float) -> Element:
        """The mean of gradients that weigh so much together."""
        assert self._indices is not None
        divisor = self._weights.reshape(-1, *[1] * (self._values.dim() - 1)) if self.per_row else torch.tensor(weight)
        return self._indices.clone(), self._values / divisor.to(self._values.dtype)


def _merged(indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct indices in their order, and the sum of the values of each."""
    rows, places = torch.unique(indices, return_inverse=True)
    return rows, values.new_zeros((len(rows), *values.shape[1:])).index_add_(0, places, values)


class Mean(tuple[torch.Tensor, ...]):
    """The tensors of a mean that was taken, and the accumulator's state before, so that the mean can be put back."""

    made_of: tuple[Sum, int, float, int]  # the sum, gradients, their weight, the step before


class Accumulator(Whole):
    """The weighted mean of gradients. ``step``: gradients computed at an earlier one are dropped, and counted in
    ``dropped``.

    An element that is put: the tensors of a gradient, the step at which it was computed, and its weight if that is
    not 1. An element that is taken: the tensors of the mean; taking it begins the next step.

    >>> sums = Accumulator(DenseSum)
    >>> sums.put((torch.tensor([1.0]), torch.tensor(0))), sums.spare(False, 2)
    (True, 0)
    >>> sums.put((torch.tensor([4.0]), torch.tensor(0), torch.tensor(2.0))), sums.spare(False, 2)
    (True, 1)
    >>> sums.take(), sums.step, sums.put((torch.tensor([9.0]), torch.tensor(0)))
    ((tensor([3.]),), 1, False)
    """

    noun = "gradients"

    def __init__(self, make: Callable[[], Sum], step: int = 0, parts: int = 1) -> None:
        self.step, self.count, self.dropped = step, 0, 0
        self._make, self._parts = make, parts
        self._sum, self._weight = make(), 0.0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Element]:
        return iter([self._sum.mean(self._weight)] if self.count else [])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._sum.nbytes

    def spare(self, closed: bool, required: int = 1) -> int:
        """One mean, once there are enough gradients."""
        return int(self.count >= required)

    def put(self, element: Element) -> bool:
        """A gradient more; False for one that is too old."""
        grad, (step, *weights) = element[: self._parts], element[self._parts :]
        weight = float(weights[0]) if weights else 1
        if weight <= 0:
            raise InvalidArgument(f"a gradient is of more than 0 rows, not {weight}")
        if int(step) < self.step:
            self.dropped += 1
            return False
        self._sum.add(grad, weight)
        self._weight += weight
        self.count += 1
        return True

    def take(self) -> Element:
        """Take the mean and begin the next step with an empty sum."""
        mean = Mean(self._sum.mean(self._weight))
        mean.made_of = (self._sum, self.count, self._weight, self.step)
        self.step, self.count, self._weight, self._sum = self.step + 1, 0, 0.0, self._make()
        return mean

    def put_back(self, element: Element, place: int) -> None:
        """The gradients of a mean count again, and its step where nothing came in between."""
        assert isinstance(element, Mean)
        made, count, weight, step = element.made_of
        self._sum.merge(made)
        self.count += count
        self._weight += weight
        self.step = step if self.step == step + 1 else self.step

    def contents(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The sum, with the number of its gradients, their weight and the step."""
        facts = {"step": self.step, "count": self.count, "dropped": self.dropped, "weight": self._weight}
        return facts, self._sum.tensors

    def fill(self, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Restore the `contents` of another accumulator."""
        self.step, self.count, self.dropped = facts["step"], facts["count"], facts["dropped"]
        self._weight, self._sum.tensors = facts["weight"], list(tensors)
        if bool(self.count) != bool(tensors) or (self.count and not self._weight > 0):
            raise InvalidArgument(
                f"{len(tensors)} tensors of weight {self._weight} are no sum of {self.count} gradients"
            )

    def set_step(self, step: int) -> int:
        """Gradients of earlier steps are dropped from here on; the step before. Warns of a step that was."""
        before, self.step = self.step, step
        if step < before:
            warnings.warn(f"an accumulator at step {before} goes back to step {step}", stacklevel=user_level(None))
        return before


ACCUMULATORS: Mapping[str, Callable[[Mapping[str, Any]], Accumulator]] = {
    "mean": lambda options: Accumulator(DenseSum),
    "sparse_mean": lambda options: Accumulator(lambda: SparseSum(options["rows"], bool(options["per_row"])), parts=2),
}
"""The accumulator of each kind of queue that is one, made of the queue's options."""
