"""A barrier: elements that come in parts, under keys, and are taken when they are whole. Semantics S-81."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tfnb.errors import InvalidArgument
from tfnb.recording import Operation
from tfnb.state.elements import component
from tfnb.state.queue_operations import QueueHandle, counted, limited


class Barrier(QueueHandle):
    """Tuples of tensors that are collected by key: each part may come by itself, in any order.

    dtypes, shapes: of each part. Keys are int64 numbers. A tuple is whole when all its parts are there; then its key
    may be used again. In a recording its methods are recorded, outside they act at once. Raises InvalidArgument unless
    each part has a dtype and a whole shape.

    >>> import torch
    >>> pairs = Barrier([torch.float32, torch.int64], [(), ()])
    >>> pairs.insert_many(0, [7, 5], [0.7, 0.5]), pairs.insert_many(1, [5], [50])
    (None, None)
    >>> pairs.ready_size(), pairs.incomplete_size(), pairs.take_many(1)
    (1, 1, (tensor([1]), tensor([5]), (tensor([0.5000]), tensor([50]))))
    """

    def __init__(
        self, dtypes: torch.dtype | Sequence[torch.dtype], shapes: Sequence[Any] | None = None, *,
        name: str = "barrier", container: str = "", shared_name: str | None = None,
    ) -> None:  # fmt: skip
        kinds = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        given = [shapes] if isinstance(dtypes, torch.dtype) else list(shapes or ())
        parts = [component(name, *part) for part in zip(kinds, given, strict=False)]
        if not kinds or len(kinds) != len(given) or any(shape is None or None in shape for _, shape in parts):
            raise InvalidArgument(f"a barrier has a dtype and a whole shape for each part; {name} was given {shapes}")
        parts.insert(0, (torch.int64, ()))
        where: dict[str, Any] = {"container": container, "shared_name": shared_name}
        super().__init__(name, math.inf, parts, kind="barrier", options={"parts": len(kinds)}, **where)

    def insert_many(self, part: int, keys: object, values: object, *, timeout: float | None = None) -> Operation | None:
        """Give each key its ``part`` (a number from 0): keys [n], values [n, ...]. Never waits.

        A key that has that part already raises InvalidArgument, with the rows before it inserted. Raises QueueClosed
        for a new key when the barrier is closed, ShapeError.
        """
        parts = len(self.components) - 1
        if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < parts:
            raise InvalidArgument(f"barrier {self.name} has parts 0 to {parts - 1}, not {part!r}")
        return self._put([keys, values], {"many": True, "part": part, **limited(timeout)})  # type: ignore[no-any-return]

    def take_many(
        self, n: int, sample: object = None, *, allow_small_batch: bool = False, timeout: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """The n whole tuples whose keys came first: numbers in that order, keys, and the batch of each part.

        Waits for so many, also after a close, as long as those that were begun may suffice. allow_small_batch: takes
        fewer of a closed barrier. sample: like ``[numbers, keys, *parts]``. Raises OutOfRange, DeadlineExceeded.
        """
        attrs = {"count": counted(self, "take_many", n), **({"up_to": True} if allow_small_batch else {})}
        numbers, keys, *values = self._take(sample, {**attrs, **limited(timeout)})
        return numbers, keys, tuple(values)

    def ready_size(self) -> Any:
        """The number of complete tuples."""
        return self.size()

    def incomplete_size(self) -> Any:
        """The number of keys with some, but not all, of their parts."""
        return self._counted_by({"begun": True})
