"""Plain tensors of outside that a recording meets: constants, and views of memory met before.

A tensor met once is one constant; another that lies in the same memory is a view of it, so that writes to either show.
That holds across the recordings of a graph, for memory that was recorded as written, or that a view looks into, and
that still holds what it held when it was met.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import InvalidArgument, Unsupported
from tfnb.graph import Node
from tfnb.recording.marks.notes import dense
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Base, Tensor

aten = torch.ops.aten
BIG_CONSTANT = 1 << 20  # bytes; larger captured tensors are announced, and copied only if they stay in the graph


@dataclass(frozen=True, slots=True)
class Met:
    """Memory of outside that a finished recording met."""

    storage: StorageWeakRef
    first: torch.Tensor  # the tensor that was met, without its memory
    held: torch.Tensor  # what it held
    base: Base


class Outside:
    """What stands in one recording for the plain tensors that it met."""

    def __init__(self, recorder: Recording) -> None:
        self._rec = recorder

    def handle(self, tensor: torch.Tensor) -> Tensor:
        """The recorded tensor that stands for a plain one: a variable's, a constant's, or a view of one met before."""
        found = self._rec.tape.handles.get(id(tensor))
        if found is not None:
            return found[1]
        var = self._rec.variable_of(tensor)
        if var is not None:
            base = self._rec._read_base(var)
            handle = self._rec._wrap(base.entry, base)
        else:
            seen = self._seen_memory(tensor)
            handle = self._constant_of(tensor) if seen is None else seen
            self._rec.tape.handles[id(tensor)] = (tensor, handle)
        self._rec.tape.memory.setdefault(_storage(tensor), (tensor, handle))
        return handle

    def _constant_of(self, tensor: torch.Tensor) -> Tensor:
        with _disable_current_modes():
            entry = self._rec.constant(self._captured(tensor))
        self._rec.tape.constants.setdefault(_storage(tensor), entry)
        if entry.sample is not None and _storage(entry.sample) == _storage(tensor):
            self._rec.tape.borrowed[entry.value.node] = entry
        return self._rec._wrap(entry)

    def _seen_memory(self, tensor: torch.Tensor) -> Tensor | None:
        """A plain tensor that shares memory with one met before: a view of that, so that writes to either show."""
        met, base = self._rec.tape.memory.get(_storage(tensor)) or self._met_before(tensor), tensor._base
        if met is None and base is not None and self._rec.variable_of(base) is not None:
            met = base, self.handle(base)
        if met is None:
            return None
        first, handle = met
        if not _covers(first, tensor):
            why = "a tensor whose memory another tensor met in this recording shares in part: write to a copy of it"
            if handle._family.version:
                raise Unsupported(f"a read after a write to {why}{self._rec.tape.at()}")
            self._rec.changes(handle._family)
            handle._family.frozen = why
            other = self._constant_of(tensor)
            other._family.frozen = why
            return other
        handle = self.handle(first)
        with self._rec.on():
            offset = tensor.storage_offset() - first.storage_offset() + int(handle.storage_offset())
            return aten.as_strided(handle, tensor.shape, tensor.stride(), offset)

    def _met_before(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Tensor] | None:
        """The same for memory that an earlier recording met, where it matters: it was written, or is looked into."""
        met = self._rec.space.outside.get(_storage(tensor))
        if met is None or met.storage.expired() or met.base.entry.value.node not in self._rec.tape.by_id:
            return None
        base, live = met.base, self._rec.space.live
        if not base.version and not any(view._family is base and view._chain for view in list(live)):
            return None
        with _disable_current_modes():
            now = tensor.detach().as_strided(met.first.shape, met.first.stride(), met.first.storage_offset())
            if now.dtype != met.held.dtype or not torch.equal(now, met.held):
                return None
        handle = self._rec._wrap(base.entry, base)
        self._rec.tape.handles[id(met.first)] = self._rec.tape.memory[_storage(tensor)] = met.first, handle
        return met.first, handle

    def remember(self) -> None:
        """At the end of a recording that succeeded: the memory that it met, for those that follow."""
        known = self._rec.space.outside
        for key in [key for key, met in known.items() if met.storage.expired()]:
            del known[key]
        for key, (tensor, handle) in self._rec.tape.memory.items():
            base = handle._family
            entry = self._rec.tape.constants.get(key)
            if entry is not None and entry.sample is not None and base.variable is None:
                known[key] = Met(StorageWeakRef(tensor.untyped_storage()), _geometry(tensor), entry.sample, base)

    def _captured(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain tensor as a constant: copied, so that later changes do not reach the graph; a big one at the end."""
        size = dense(tensor, self._rec.tape.at).numel() * tensor.element_size()
        if size <= BIG_CONSTANT:
            return tensor.detach().clone()
        self._rec.note(
            f"a constant of {size / 1e6:.1f} MB stands in the graph; feed it through a placeholder if it is data"
        )
        return tensor.detach()

    def own(self, node: Node) -> Node:
        """A node that stays in the graph: with a copy of the data that the user may still change."""
        entry = self._rec.tape.borrowed.get(node.id)
        if entry is None:
            return node
        with _disable_current_modes():
            entry.sample = node.attrs["value"].clone()
        self._rec.space.samples.root(entry.value, entry.sample)
        return replace(node, attrs={**node.attrs, "value": entry.sample})

    def lost_write(self, base: Base) -> None:
        """Say once a line that a write into a tensor of outside that is no Variable does not last."""
        if all(handle._family is not base for _, handle in self._rec.tape.memory.values()):
            return
        self._rec.note(
            "a run does not write into a plain tensor of outside, and starts each time from what it held; make it a "
            "buffer or a tfnb.Variable to keep it"
        )

    def written(self, tensor: torch.Tensor, how: str = "numpy()") -> torch.Tensor:
        """What a tensor that was not recorded holds for the program: its memory, or what this recording wrote to it."""
        if _storage(tensor) not in self._rec.tape.memory or not self._rec.home(tensor).version:
            return tensor
        self._rec.escaped(tensor, how)
        sample = self._rec._entry(tensor).sample
        if sample is None:
            raise InvalidArgument(f"a tensor written here has no value while recording{self._rec.tape.at()}")
        return sample


def _storage(tensor: torch.Tensor) -> int:
    """The memory of a plain tensor; its own id where that is not one piece."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _geometry(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies in its memory as this one does, and has none."""
    reach = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(max(reach, 0) + 1, dtype=tensor.dtype, device="meta")  # one without elements reaches nowhere
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _covers(first: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether every element of ``tensor`` is one of ``first``, which lies in memory without gaps."""
    start, at = first.storage_offset(), tensor.storage_offset()
    last = at + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    with _disable_current_modes():
        dense = torch.empty_like(first, device="meta").stride() == first.stride()
    return dense and tensor.dtype == first.dtype and start <= at and last < start + first.numel()
