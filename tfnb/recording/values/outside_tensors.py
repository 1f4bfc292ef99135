"""Plain tensors of outside that a recording meets: constants, and views of memory met before.

A tensor met once is one constant; another that lies in the same memory is a view of it, so that writes to either show.
Each recording of a graph starts from what the tensor holds: memory that one of them writes, no other one may use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import InvalidArgument, Unsupported
from tfnb.graph import Node
from tfnb.recording.marks.notes import dense
from tfnb.recording.marks.python_guards import stamp
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Base, Tensor

aten = torch.ops.aten
BIG_CONSTANT = 1 << 20  # bytes; larger captured tensors are announced, and copied only if they stay in the graph


@dataclass(frozen=True, slots=True)
class MetMemory:
    """Memory of outside that a finished recording met."""

    storage: StorageWeakRef
    owner: str
    is_written: bool


class Outside:
    """The recorded stand-ins of the plain tensors that one recording met."""

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
            self._refuse_written(tensor)
            seen = self._seen_memory(tensor)
            handle = self._constant_of(tensor) if seen is None else seen
            self._rec.tape.handles[id(tensor)] = (tensor, handle)
        self._rec.tape.memory.setdefault(_storage(tensor), (tensor, handle))
        return handle

    def _constant_of(self, tensor: torch.Tensor) -> Tensor:
        if id(tensor) in self._rec.tape.batches:
            self._rec.tape.fixed.append(self._rec.where())
        with _disable_current_modes():
            entry = self._rec.constant(self._captured(tensor))
            self._rec.tape.captured[entry.value.node] = tensor, stamp(tensor)
        if entry.sample is not None and _storage(entry.sample) == _storage(tensor):
            self._rec.tape.borrowed[entry.value.node] = entry
        return self._rec._wrap(entry)

    def _seen_memory(self, tensor: torch.Tensor) -> Tensor | None:
        """A plain tensor that shares memory with an earlier one, as a view of the earlier, so that writes to either
        show.
        """
        met, base = self._rec.tape.memory.get(_storage(tensor)), tensor._base
        if met is None and base is not None and self._rec.variable_of(base) is not None:
            met = base, self.handle(base)
        if met is None:
            return None
        first, handle = met
        if not _covers(first, tensor):
            why = "a tensor whose memory another tensor met in this recording shares in part: write to a copy of it"
            if handle._family.version:
                raise Unsupported(f"a read after a write to {why}{self._rec.tape.at()}")
            handle._family.frozen = why
            other = self._constant_of(tensor)
            other._family.frozen = why
            return other
        handle = self.handle(first)
        with self._rec.on():
            offset = tensor.storage_offset() - first.storage_offset() + int(handle.storage_offset())
            return aten.as_strided(handle, tensor.shape, tensor.stride(), offset)

    def _others(self, key: int) -> list[MetMemory]:
        """Encounters of the same memory by other recordings whose nodes are in the graph."""
        met = [each for each in self._rec.space.outside.get(key, ()) if not each.storage.expired()]
        standing = {node.owner.key for node in self._rec.tape.kept if node.owner is not None} if met else set()
        return [each for each in met if each.owner in standing - {self._rec.owner.key}]

    def _refuse_written(self, tensor: torch.Tensor) -> None:
        """Raises Unsupported for memory that another recording writes: a run of this one would not see that."""
        if any(each.is_written for each in self._others(_storage(tensor))):
            raise Unsupported(f"a plain tensor that another cell writes into{self._rec.tape.at()}{_INSTEAD}")

    def remember(self) -> None:
        """At the end of a successful recording: remember the memory of its outside tensors, for later recordings."""
        known, owner = self._rec.space.outside, self._rec.owner.key
        for key, earlier in list(known.items()):
            known[key] = [each for each in earlier if not each.storage.expired() and each.owner != owner]
            if not known[key]:
                del known[key]
        for key, (tensor, handle) in self._rec.tape.memory.items():
            if handle._family.variable is None and tensor.layout is torch.strided:
                met = MetMemory(StorageWeakRef(tensor.untyped_storage()), owner, bool(handle._family.version))
                known.setdefault(key, []).append(met)

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
        key = next((key for key, (_, handle) in self._rec.tape.memory.items() if handle._family is base), None)
        if key is None:
            return
        if self._others(key):
            raise Unsupported(f"a write to a plain tensor that another cell uses{self._rec.tape.at()}{_INSTEAD}")
        self._rec.warn(
            "a run does not write into a plain tensor of outside, and starts each time from what it held; make it a "
            "buffer or a tfnb.Variable to keep it"
        )

    def written(self, tensor: torch.Tensor, how: str = "numpy()") -> torch.Tensor:
        """The program's value of a plain tensor: its memory, or the sample of a write in this recording."""
        if how == "numpy()" and tensor.numel() * tensor.element_size() <= BIG_CONSTANT:
            self._rec.python.shares(tensor)
        if _storage(tensor) not in self._rec.tape.memory or not self._rec.home(tensor).version:
            return tensor
        self._rec.escaped(tensor, how)
        sample = self._rec._entry(tensor).sample
        if sample is None:
            raise InvalidArgument(f"a tensor written here has no value while recording{self._rec.tape.at()}")
        return sample


_INSTEAD = "\n  make it a tfnb.Variable or a buffer of a module, or write to a clone() of it"


def _storage(tensor: torch.Tensor) -> int:
    """The memory of a plain tensor; its own id where that is not one piece."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _covers(first: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether every element of ``tensor`` is an element of ``first``, which has no gaps in memory."""
    start, at = first.storage_offset(), tensor.storage_offset()
    last = at + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    with _disable_current_modes():
        dense = torch.empty_like(first, device="meta").stride() == first.stride()
    return dense and tensor.dtype == first.dtype and start <= at and last < start + first.numel()
