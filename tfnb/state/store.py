"""The store of a parameter server: keys to tensors within a byte budget, pure torch.

A local session does not use it: there a Variable shares its module's storage.

Small values that are created together lie in slabs, one flat buffer for each dtype; a large one (`LARGE`) has a slab of
its own. A reader gets the current generation of a slab, or a copy where that must be written meanwhile, and nothing
changes what it reads. A write goes in three steps: `Store.open` gives tensors to write into, the caller writes,
`Store.publish` makes them the current generation. While somebody reads the current generation, what is opened lies in
another buffer; else it is the current one itself. The owner calls from one thread; readers may let go of what they read
in any thread. The store has no lock.

A table (`tfnb.graph.lazy_memory`), of which few rows were written, lies in a slab of its own, in private memory, and
counts with the memory that it takes.
"""

from __future__ import annotations

import difflib
import mmap
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tfnb.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, ShapeError
from tfnb.graph import Spec, lazy_memory
from tfnb.state.shared_memory import Segment

ALIGN = 64  # bytes
GENERATIONS = 3  # buffers of one slab, at most
LEAST = 64 << 10  # bytes of a slab in shared memory: what is smaller travels with the message
NONE: Mapping[str, torch.Tensor] = {}
LARGE = lazy_memory.LARGE  # a value from here on has a slab of its own, and is written in place where rows of it change


def memory(nbytes: int) -> torch.Tensor:
    """Uninitialised, aligned bytes; numpy asks the system for huge pages, so that most page faults are spared.

    >>> memory(3).shape, memory(100).data_ptr() % ALIGN
    (torch.Size([3]), 0)
    """
    raw = torch.from_numpy(np.empty(nbytes + ALIGN, np.uint8))
    start = -raw.data_ptr() % ALIGN
    return raw[start : start + nbytes]


class WatchedBytes:
    """Bytes, and whether a reader holds a tensor of them."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._reader: weakref.ref[Any] | None = None

    @property
    def is_read(self) -> bool:
        """Whether a tensor of `read`, or a view of one, is still held somewhere."""
        return self._reader is not None and self._reader() is not None

    def read(self) -> torch.Tensor:
        """The elements; the buffer counts as read while the tensor or a view of the tensor lives."""
        array = self._reader() if self._reader is not None else None
        if array is None:
            array = self.flat.view(torch.uint8).numpy()
            self._reader = weakref.ref(array)
        return torch.from_numpy(array).view(self.flat.dtype)  # its storage, and that of its views, holds the array


class _Generation(WatchedBytes):
    """One buffer of a slab, with its readers; in shared memory where asked for and available.

    The word of its segment counts how often it was opened for writing: another process that copied it meanwhile, though
    nobody here knew of its reading any more, sees that it has to read again.
    """

    def __init__(self, nbytes: int, dtype: torch.dtype, is_shared: bool, is_lazy: bool = False) -> None:
        self.segment = _segment(nbytes) if is_shared and not is_lazy else None
        unset = lazy_memory.zeros((nbytes,), torch.uint8) if is_lazy else None
        flat = self.segment.flat if self.segment is not None else memory(nbytes) if unset is None else unset
        super().__init__(flat.view(dtype))

    def open(self) -> None:
        """Mark the buffer as being written: the segment's word grows, so that a concurrent copy is read again."""
        if self.segment is not None:
            self.segment.word += 1


@dataclass(frozen=True, slots=True)
class _SlabPlace:
    """The place of a value in a slab, contiguous from element ``start`` on."""

    start: int
    nbytes: int
    shape: torch.Size
    strides: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The value in the elements of a buffer."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start)

    def copied(self, flat: torch.Tensor) -> torch.Tensor:
        """A copy of the value in the elements of a buffer."""
        copy = memory(self.nbytes).view(flat.dtype).view(self.shape)
        return copy.copy_(self.of(flat))


class Slab:
    """Values of one dtype in a flat buffer, in up to `GENERATIONS` generations; only the current one counts."""

    def __init__(self, values: Mapping[str, torch.Tensor], is_shared: bool = False) -> None:
        (dtype,) = {value.dtype for value in values.values()}
        self.places: dict[str, _SlabPlace] = {}
        end = 0
        for key, value in values.items():
            strides = torch.empty(value.shape, device="meta").stride()
            self.places[key] = _SlabPlace(end // dtype.itemsize, _size(value), value.shape, strides)
            end += _size(value) + -_size(value) % ALIGN
        self.nbytes = max(end, ALIGN)
        self.is_lazy = any(map(lazy_memory.is_table, values.values()))  # takes memory where it was written only
        self._is_table = self.is_lazy  # written in place, whoever reads it: readers get copies
        self._is_shared = is_shared
        self._current = _Generation(self.nbytes, dtype, is_shared, self.is_lazy)
        self._next: _Generation | None = None  # opened for writing; it may be the current one
        self._spares: list[_Generation] = []
        self._tensors = {key: place.of(self._current.flat) for key, place in self.places.items()}
        self._bytes = sum(place.nbytes for place in self.places.values())
        self._measured = self._most = 0  # bytes that a lazy one took, and at most takes since
        self._before = self._growing = 0  # those before it was opened, and more since
        self._is_whole = False  # whether it was opened to be written densely
        with torch.no_grad():
            for key, value in values.items():
                lazy_memory.assign(self.get(key), value)
        self._measure()

    @property
    def held(self) -> int:
        """Bytes that its values take, at most."""
        return _held(self._most, self._bytes) if self.is_lazy else self._bytes

    def _measure(self) -> None:
        if self.is_lazy:
            tables = (place.of(self._current.flat) for place in self.places.values())
            self._measured = self._most = min(self.nbytes, sum(map(lazy_memory.taken, tables)))

    def growth(self, rows: int, values: Sequence[torch.Tensor] = ()) -> int:
        """Upper bound of the additional budget for a write of ``rows`` rows or ``values``; by default of everything."""
        return _held(self._grown(rows, values), self._bytes) - self.held if self.is_lazy else 0

    def _grown(self, rows: int, values: Sequence[torch.Tensor]) -> int:
        """Upper bound of a lazy slab's bytes after a write of ``rows`` rows or ``values`` instead of the open write."""
        most = self._most if self._next is None else self._before
        if values:
            return min(self.nbytes, most + sum(map(_taken, values)))
        if not rows:
            return self.nbytes
        (place,) = self.places.values()
        row, page = max(1, place.nbytes // max(1, place.shape[0])), mmap.PAGESIZE
        pages = -(-row // page) + (row % page != 0 and page % row != 0)  # that hold one row, at most
        return min(self.nbytes, most + rows * pages * page)

    @property
    def spare_bytes(self) -> int:
        """Bytes of generations that are not the current one."""
        return self.nbytes * len(self._spares)

    def get(self, key: str) -> torch.Tensor:
        """The current value itself."""
        return self._tensors[key]

    def read(self, keys: Iterable[str]) -> list[torch.Tensor]:
        """Current values, never changed by later writes: views of this generation, or copies if no other buffer can be
        had.

        There can be none while the current one is written, or while readers hold all the others.
        """
        has_room = len(self._spares) < GENERATIONS - 1 or any(not spare.is_read for spare in self._spares)
        if self._is_table or self._next is self._current or not has_room:
            if self.is_lazy:
                return [lazy_memory.copied(self.get(key)) for key in keys]  # room for it was counted
            return [self.places[key].copied(self._current.flat) for key in keys]
        flat = self._current.read()
        return [self.places[key].of(flat) for key in keys]

    def open(
        self, keys: Sequence[str], *, keep: bool, rows: int, values: Sequence[torch.Tensor] = ()
    ) -> dict[str, torch.Tensor]:
        """Tensors to write the next values of ``keys`` into; without ``keep`` all of each will be written."""
        if self.is_lazy:
            if self._most > self._measured + max(LARGE, self._measured // 8):  # it takes a while to count them
                self._measure()
            self._before, self._most = self._most, self._grown(rows, values)
            self._growing = self._most - self._before
            self._is_whole = not rows and not any(map(lazy_memory.is_table, values))
        self._next = self._current
        if self._current.is_read:
            self._next = next((spare for spare in self._spares if not spare.is_read), None)
            if self._next is None:
                self._next = _Generation(self.nbytes, self._current.flat.dtype, self._is_shared)
                self._spares.append(self._next)
            self._next.open()
            if keep or len(keys) < len(self.places):
                self._next.flat.copy_(self._current.flat)
        self._is_table = self._is_table or (rows > 0 and self.nbytes >= LARGE)
        if self._next is self._current:
            self._current.open()
            return {key: self._tensors[key] for key in keys}
        return {key: self.places[key].of(self._next.flat) for key in keys}

    def publish(self) -> None:
        """Make the open generation the current one. A lazy slab whose values were all written is lazy no more."""
        if self.is_lazy and self._next is not None:
            self._most = min(self.nbytes, self._before + self._growing)  # `release` may have looked in between
            self.is_lazy = self._is_table = not self._is_whole
        if self._next is not None and self._next is not self._current:
            self._spares.remove(self._next)
            self._spares.append(self._current)
            self._current = self._next
            self._tensors = {key: place.of(self._current.flat) for key, place in self.places.items()}
        self._next = None

    def close(self) -> None:
        """Abandon the open generation, into which nothing was written."""
        if self._next is not None:
            self._most = self._before
        self._next = None

    def release(self) -> None:
        """Drop the generations without readers, and measure the slab's memory if more was written meanwhile."""
        if self.is_lazy and self._most > self._measured:
            self._measure()
            self._before = self._most
        self._spares = [spare for spare in self._spares if spare.is_read or spare is self._next]


class Store:
    """Tensors by key. budget: bytes that all of them may take together; ``None``: no limit.

    is_shared: values lie in shared memory as far as there is some, so that processes of this host can read them there.

    >>> store = Store(budget=64)
    >>> store.create({"w": torch.zeros(4)})
    >>> seen = store.read(["w"])
    >>> store.assign({"w": torch.ones(4)})
    >>> seen, store.read(["w"]), store.bytes
    ([tensor([0., 0., 0., 0.])], [tensor([1., 1., 1., 1.])], 16)
    """

    def __init__(self, *, budget: int | None = None, is_shared: bool = False) -> None:
        if budget is not None and budget < 0:
            raise InvalidArgument(f"a budget is a number of bytes from 0, not {budget}")
        self.budget, self.is_shared = budget, is_shared
        self.opening = 0  # number of the last `open`: who opened before it has nothing open any more
        self._slabs: dict[str, Slab] = {}  # of each key
        self._open: list[Slab] = []

    @property
    def bytes(self) -> int:
        """Bytes of all values."""
        return sum(slab.held for slab in self._of(self._slabs))

    @property
    def spare_bytes(self) -> int:
        """Bytes of generations other than the current ones: some with readers, some buffers for the next write."""
        return sum(slab.spare_bytes for slab in self._of(self._slabs))

    def __contains__(self, key: object) -> bool:
        return key in self._slabs

    def __iter__(self) -> Iterator[str]:
        return iter(self._slabs)

    def __len__(self) -> int:
        return len(self._slabs)

    def asked(self, values: Mapping[str, torch.Tensor]) -> int:
        """Bytes in the budget of values to be created."""
        return sum(_held(_taken(value), _size(value)) for value in values.values())

    def create(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep copies of ``values``; raises AlreadyExists, or ResourceExhausted before any memory is taken."""
        for key in values:
            if key in self._slabs:
                raise AlreadyExists(f"{key} exists in the store as {Spec.of(self.get(key))}; assign to it, or drop it")
        asked = self.asked(values)
        if self.budget is not None and self.bytes + asked > self.budget:
            names = ", ".join(values)
            raise ResourceExhausted(f"no room for {names}: asked {asked} bytes, used {self.bytes}, limit {self.budget}")
        for together in _grouped(values):
            self._slabs.update(dict.fromkeys(together, Slab(together, self.is_shared)))

    def is_table(self, key: str) -> bool:
        """Whether a value is lazy, taking memory only for written rows."""
        return self._slab(key).is_lazy

    def get(self, key: str) -> torch.Tensor:
        """The current value itself, no copy: not to be written. Raises NotFound with the nearest keys."""
        return self._slab(key).get(key)

    def read(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """Current values; a value does not change as long as a reader holds the tensor or a view of the tensor."""
        found: dict[str, torch.Tensor] = {}
        mine: dict[Slab, list[str]] = {}
        for key in keys:
            mine.setdefault(self._slab(key), []).append(key)
        for slab, some in mine.items():
            found.update(zip(some, slab.read(some), strict=True))
        return [found[key] for key in keys]

    def open(
        self, keys: Sequence[str], *, keep: bool = True, rows: int = 0, values: Mapping[str, torch.Tensor] = NONE
    ) -> dict[str, torch.Tensor]:
        """Tensors to write the next values of ``keys`` into; an unpublished earlier write is abandoned.

        keep: they hold the current values. rows: only so many rows will be written, and no large value is copied.
        values: those that will be written, where they are known.
        """
        self._close()
        self.opening += 1
        found: dict[str, torch.Tensor] = {}
        for slab in self._of(keys):
            self._open.append(slab)
            mine = [key for key in keys if self._slabs[key] is slab]
            found |= slab.open(mine, keep=keep, rows=rows, values=[values[key] for key in mine if key in values])
        return found

    def growth(self, keys: Sequence[str], rows: int = 0, values: Mapping[str, torch.Tensor] = NONE) -> int:
        """Upper bound of the additional budget for a write of ``rows`` rows of each key, or of ``values``."""
        return sum(slab.growth(rows, [values[key] for key in slab.places if key in values]) for slab in self._of(keys))

    def publish(self) -> None:
        """Make the opened and written values current: later reads get them."""
        while self._open:
            self._open.pop().publish()

    def _close(self) -> None:
        while self._open:
            self._open.pop().close()

    def assign(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write whole values; raises ShapeError for another shape or dtype, with nothing written."""
        for key, value in values.items():
            held = self.get(key)
            if value.shape != held.shape or value.dtype != held.dtype:
                raise ShapeError(f"cannot assign {Spec.of(value)} to {key}, which is {Spec.of(held)}")
        targets = self.open(list(values), keep=False, values=values)
        with torch.no_grad():
            for key, target in targets.items():
                lazy_memory.assign(target, values[key])
        self.publish()

    def drop(self, keys: Sequence[str]) -> None:
        """Forget values; raises NotFound. Others of their slabs move together."""
        slabs = [self._slab(key) for key in keys]
        self._close()
        self.opening += 1
        for key in keys:
            del self._slabs[key]
        for slab in set(slabs):
            kept = {key: slab.get(key) for key in slab.places if self._slabs.get(key) is slab}
            if kept:
                self._slabs.update(dict.fromkeys(kept, Slab(kept, self.is_shared)))

    def release(self) -> None:
        """Give up the memory of generations that nobody reads."""
        for slab in self._of(self._slabs):
            slab.release()

    def _slab(self, key: str) -> Slab:
        found = self._slabs.get(key)
        if found is None:
            near = difflib.get_close_matches(key, self._slabs, 3)
            raise NotFound(f"no {key!r} in the store{'; near: ' if near else ''}{', '.join(near)}")
        return found

    def _of(self, keys: Iterable[str]) -> list[Slab]:
        """The slabs of some keys, each once."""
        return list(dict.fromkeys(self._slabs[key] for key in keys))


def _segment(nbytes: int) -> Segment | None:
    """Shared memory, if there is some."""
    try:
        return Segment(nbytes) if nbytes >= LEAST else None
    except OSError:
        return None


def _grouped(values: Mapping[str, torch.Tensor]) -> Iterator[Mapping[str, torch.Tensor]]:
    """Groups of values for one slab each: all small values of one dtype, and each large value by itself."""
    groups: dict[object, dict[str, torch.Tensor]] = {}
    for key, value in values.items():
        groups.setdefault(key if _size(value) >= LARGE else value.dtype, {})[key] = value
    yield from groups.values()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _held(taken: int, whole: int) -> int:
    """Bytes in the budget of a lazy value that takes ``taken``: twice, since reading the whole value makes a copy.

    Never more than a value counts that is no table.
    """
    return min(2 * taken, whole)


def _taken(tensor: torch.Tensor) -> int:
    """Bytes that a copy takes."""
    return lazy_memory.taken(tensor) if lazy_memory.is_table(tensor) else _size(tensor)
