"""Tensors that a task and a server, or two tasks, of one host lend each other in shared memory, message by message.

A word is an int64 in a segment that both processes map: it says who may read or write the memory.

A server lends values in place, in its slabs. The task copies them at once and acknowledges the copy in the word of a
shared segment; until then the server writes into another generation. If the server has given up that reader meanwhile,
the word of the generation has changed, and the task asks again: a copy is never torn.
A task lends gradients in a region of its own, read in place by the server. The region is written again when its word
says that the server holds no tensor of it any more; regions of a closed stream are never written again.

Both prove first that they share memory: each maps a segment of the other, by `tfnb.state.shared_memory`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from tfnb.cluster.wire.envelope import ALIGN, Borrow, Loan, size
from tfnb.errors import ProtocolError
from tfnb.state.shared_memory import MappedSegment, Maps, Segment, located
from tfnb.state.store import WatchedBytes, memory

REGIONS = 4  # of one stream
ANSWERS = 3  # that lend something, until memory that none of them was copied to is given up
FREE, HELD = 0, 1  # words of a region


class TaskLoans:
    """The task's side of one connection. Raises OSError without shared memory.

    most: regions that are lent at a time; further tensors are sent by the socket.
    """

    def __init__(self, most: int = REGIONS) -> None:
        self._most = most
        self._read = Segment(ALIGN)  # its word: how many answers were read
        self._regions: list[Segment] = []
        self._maps = Maps()
        self._copies: list[tuple[WatchedBytes, int]] = []  # memory for values, and the answer that it was used for last
        self._answer, self._has_borrowed = 0, False

    @property
    def name(self) -> str:
        """Name of the segment for the server to map."""
        return self._read.name

    @property
    def has_let_go(self) -> bool:
        """Whether all regions are free of readers."""
        return all(region.word == FREE for region in self._regions)

    def prove(self, name: str) -> None:
        """Map the server's segment. Raises OSError."""
        self._maps.get(name)

    def lend(self, large: Mapping[int, torch.Tensor]) -> dict[int, Loan]:
        """Copy gradients to a region that the server reads; lends nothing if there is no free region."""
        region = self._region(sum(map(_room, large.values()))) if large else None
        if region is None:
            return {}
        region.word, start, loans = HELD, 0, {}
        for position, tensor in large.items():
            target = region.flat[start : start + size([tensor])].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor.detach())
            loans[position] = region.name, start, HELD
            start += _room(tensor)
        return loans

    def _region(self, nbytes: int) -> Segment | None:
        """A region without readers, of so many bytes; None if there is no room."""
        free = [region for region in self._regions if region.word == FREE]
        fits = [region for region in free if region.flat.numel() >= nbytes]
        if fits:
            return min(fits, key=lambda region: region.flat.numel())
        self._regions = [region for region in self._regions if region not in free]
        if len(self._regions) >= self._most:
            return None
        try:
            made = Segment(nbytes)
        except OSError:
            return None
        self._regions.append(made)
        return made

    def borrow(self, loan: Loan, nbytes: int) -> torch.Tensor:
        """A copy of a value. Raises OSError if the memory is missing, or was written meanwhile."""
        name, start, word = loan
        memory_of = self._maps.get(name)
        copy = self._room_for(nbytes).copy_(_within(memory_of.flat, start, nbytes))
        if memory_of.word != word:
            raise OSError("a value was written while it was copied")
        return copy

    def _room_for(self, nbytes: int) -> torch.Tensor:
        """Memory for a value, reused from an older value without references if possible, so that no page is new."""
        fits = (one for one, _ in self._copies if one.flat.numel() == nbytes and not one.is_read)
        found = next(fits, None) or WatchedBytes(memory(nbytes))
        self._copies = [entry for entry in self._copies if entry[0] is not found] + [(found, self._answer)]
        self._has_borrowed = True
        return found.read()

    def read(self) -> None:
        """Acknowledge an answer that was read whole: the server may write the lent values."""
        self._read.word += 1
        if self._has_borrowed:
            self._copies = [entry for entry in self._copies if entry[1] > self._answer - ANSWERS]
            self._answer, self._has_borrowed = self._answer + 1, False


class ServerLoans:
    """The server's side of one stream. Raises OSError if the task's memory cannot be mapped."""

    def __init__(self, name: str) -> None:
        self._read = MappedSegment(name)
        self._maps = Maps()
        self._lent: list[torch.Tensor] = []
        self._sent = 0  # answers

    def lend(self, large: Mapping[int, torch.Tensor]) -> dict[int, Loan]:
        """Lend values that lie in shared memory; they stay unchanged until the task has copied them."""
        loans: dict[int, Loan] = {}
        self._lent = []
        for position, tensor in large.items():
            found = located(tensor) if tensor.is_contiguous() else None
            if found is not None and found[1] % ALIGN == 0:
                segment, start = found
                loans[position] = segment.name, start, segment.word
                self._lent.append(tensor)
        return loans

    def sent(self) -> None:
        """An answer is on its way."""
        self._sent += 1

    def has_let_go(self) -> bool:
        """Whether nothing is lent any more, as the task has read the last answer."""
        if self._lent and self._read.word >= self._sent:
            self._lent = []
        return not self._lent

    def borrowing(self) -> Borrow:
        """A function that maps the lent tensors of one message in place. Their region is free when all are released."""
        regions: dict[str, torch.Tensor] = {}

        def borrow(loan: Loan, nbytes: int) -> torch.Tensor:
            name, start, _ = loan
            if name not in regions:
                mapped = self._maps.get(name)
                array = mapped.flat.numpy()
                weakref.finalize(array, _free, mapped).atexit = False
                regions[name] = torch.from_numpy(array)  # its storage, and that of its views, holds the array
            return _within(regions[name], start, nbytes)

        return borrow


def _free(region: MappedSegment) -> None:
    if region.word == HELD:
        region.word = FREE


def _room(tensor: torch.Tensor) -> int:
    return size([tensor]) + -size([tensor]) % ALIGN


def _within(flat: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    if start % ALIGN or not 0 <= start <= start + nbytes <= flat.numel():
        raise ProtocolError(f"not a message of tfnb: bytes {start} to {start + nbytes} of {flat.numel()} are lent")
    return flat[start : start + nbytes]
