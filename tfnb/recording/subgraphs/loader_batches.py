"""What a DataLoader makes of data of outside alone while a cell records is data of outside, and no part of the graph.

May import what is below `tfnb.recording.subgraphs`. Its calls of torch are recorded like others; where they hang on
constants only they are taken back, and the batch is their samples: plain tensors. Workers get none of a recording. A
batch that the graph then uses is the same in every run, which is said at the end, with what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from tfnb.recording.subgraphs.capture import attempt
from tfnb.recording.values.recording import Recording, open_recording
from tfnb.recording.values.tensor import Tensor


def batch(original: Callable[..., Any]) -> Any:
    """The replacement of a method of a loader, or of its iterator, in `tfnb.recording.torch_patches`."""

    def call(self: Any) -> Any:
        rec = open_recording()
        if rec is None or rec.lazy:
            return original(self)
        if getattr(self, "num_workers", 0) or getattr(self, "_num_workers", 0):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return tree_map(lambda part: _remembered(rec, part), original(self))
        undo, start = attempt(rec), len(rec.new)
        made = original(self)
        if not _is_data(rec, start):
            return made
        plain = tree_map(lambda part: part.sample if isinstance(part, Tensor) else part, made)
        drawn = rec.tape.streams
        undo()
        rec.tape.streams = drawn  # the next batch draws other numbers
        return tree_map(lambda part: _remembered(rec, part), plain)

    return call


def _is_data(rec: Recording, start: int) -> bool:
    """Whether the nodes from this one on come from constants and random numbers alone."""
    known = {node.id: node for node in rec.nodes}
    waiting = [node.id for node in rec.new[start:]]
    seen: set[int] = set()
    while waiting:
        node = known[waiting.pop()]
        if node.op.startswith("tfnb.") and node.op not in ("tfnb.constant", "tfnb.guard"):
            return False
        seen.add(node.id)
        waiting += [value.node for value in node.inputs if value.node not in seen]
    return True


def _remembered(rec: Recording, part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        rec.tape.batches[id(part)] = part
    return part
