"""The store: what holds values on a parameter server. Keys to tensors within a byte budget, pure torch.

A local session does not use it: there a Variable shares its module's storage.

A tensor stays at its address from ``create`` to ``drop``: ``assign`` writes in place, and generated steps write what
``get`` returns. The owner calls from one thread; the store has no lock.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

import torch

from tfnb.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, ShapeError
from tfnb.graph import Spec


class Store:
    """Tensors by key. budget: bytes that all of them may take together; ``None``: no limit.

    >>> store = Store(budget=64)
    >>> store.create("w", torch.zeros(4))
    >>> store.assign("w", torch.ones(4))
    >>> store.get("w"), store.bytes
    (tensor([1., 1., 1., 1.]), 16)
    """

    def __init__(self, *, budget: int | None = None, device: str | torch.device = "cpu") -> None:
        if budget is not None and budget < 0:
            raise InvalidArgument(f"a budget is a number of bytes from 0, not {budget}")
        self.budget = budget
        self.device = torch.device(device)
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all values."""
        return sum(map(_size, self._tensors.values()))

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def create(self, key: str, value: torch.Tensor) -> None:
        """Keep a copy of ``value``; raises AlreadyExists, or ResourceExhausted before any memory is taken."""
        if key in self._tensors:
            raise AlreadyExists(f"{key} exists in the store as {Spec.of(self._tensors[key])}; assign to it, or drop it")
        asked, used = _size(value), self.bytes
        if self.budget is not None and used + asked > self.budget:
            raise ResourceExhausted(f"no room for {key}: asked {asked} bytes, used {used}, limit {self.budget}")
        with torch.no_grad():
            self._tensors[key] = torch.empty(value.shape, dtype=value.dtype, device=self.device).copy_(value)

    def get(self, key: str) -> torch.Tensor:
        """The value itself, no copy; raises NotFound with the nearest keys."""
        found = self._tensors.get(key)
        if found is None:
            near = difflib.get_close_matches(key, self._tensors, 3)
            raise NotFound(f"no {key!r} in the store{'; near: ' if near else ''}{', '.join(near)}")
        return found

    def assign(self, key: str, value: torch.Tensor) -> None:
        """Write ``value`` in place; raises ShapeError for another shape or dtype, with nothing written."""
        target = self.get(key)
        if value.shape != target.shape or value.dtype != target.dtype:
            raise ShapeError(f"cannot assign {Spec.of(value)} to {key}, which is {Spec.of(target)}")
        with torch.no_grad():
            target.copy_(value)

    def drop(self, key: str) -> None:
        """Forget a value; raises NotFound."""
        self.get(key)
        del self._tensors[key]

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Copies of all values at this moment."""
        return {key: tensor.clone() for key, tensor in self._tensors.items()}


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
