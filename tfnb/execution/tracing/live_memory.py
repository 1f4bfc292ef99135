"""The bytes that a traced step holds at each moment, and the tensors and devices of any value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tfnb.kernels.rows import KeptRows

STEPS = 2  # that run beside one that is the user's: compiled code and what it is compared with
POINTS = 20_000  # of the curve of live bytes; then the higher of two neighbours

Held = list[tuple[int, int]]  # key and bytes of memory


class LiveMemory:
    """Live bytes of storages allocated by a step; its operands do not count."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = [(0.0, 0)]
        self._uses: dict[int, int] = {}  # storage -> values that lie in it
        self._given: set[int] = set()

    def borrow(self, values: object) -> None:
        """Memory of a variable, feed or constant."""
        self._given.update(key for key, _ in _storages(values))

    def hold(self, value: object, at: float) -> Held:
        """Count a value made at this time; returns the handle for `free`."""
        held, count = [pair for pair in _storages(value) if pair[0] not in self._given], self.points[-1][1]
        for key, size in held:
            before = self._uses.get(key, 0)
            self._uses[key] = before + 1
            count += 0 if before else size
        self._point(at, count)
        return held

    def free(self, held: Held, at: float) -> None:
        """A value was used for the last time."""
        count = self.points[-1][1]
        for key, size in held:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                count -= size
        self._point(at, count)

    def keep(self, results: Iterable[Any], at: float) -> None:
        """The step is over; only ``results`` stay."""
        stays = {key: size for key, size in _storages(list(results)) if key not in self._given}
        self._point(at, sum(stays.values()))

    def _point(self, at: float, count: int) -> None:
        last, before = self.points[-1]
        if count == before:
            return
        self.points.append((max(at, last), count))
        if len(self.points) > POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [*(max(pair, key=lambda point: point[1]) for pair in pairs), self.points[-1]]


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors of a value."""
    if isinstance(value, torch.Tensor):
        return [value]
    leaves = dict.fromkeys(tree_leaves(value))
    found = (item for leaf in leaves for item in (leaf.rows if isinstance(leaf, KeptRows) else (leaf,)))
    return [item for item in found if isinstance(item, torch.Tensor)]


def wait(found: Iterable[torch.device]) -> bool:
    """Wait for accelerators among the devices; whether there were any."""
    busy = [device for device in found if device.type not in ("cpu", "meta")]
    for device in busy:
        torch.accelerator.synchronize(device)
    return bool(busy)


def devices(value: object) -> dict[torch.device, None]:
    """The devices of the tensors of a value."""
    return dict.fromkeys(tensor.device for tensor in tensors(value))


def _storages(value: object) -> Iterator[tuple[int, int]]:
    """Key and bytes of the memory of each tensor; sparse layouts have none of one piece."""
    for tensor in tensors(value):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            yield storage._cdata, storage.nbytes()


def room(device: torch.device, most: int) -> int:
    """Bytes available for copies beside running steps: on an accelerator the rest beyond `STEPS` more such steps."""
    if device.type != "cuda":
        return most
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free - STEPS * torch.cuda.max_memory_allocated(device)
