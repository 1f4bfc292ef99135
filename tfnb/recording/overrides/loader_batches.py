"""A DataLoader's batches made while a cell records: outside data, not part of the graph.

May import what is below `tfnb.recording.overrides`. A loader, its workers, and the code of its dataset get none of the
recording: they work on plain tensors, as they do in other cells, and a dataset may keep what it made. A batch that the
graph then uses is the same in every run, which is said at the end, with what to write instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tfnb.errors import FailedPrecondition
from tfnb.graph import current
from tfnb.graph.setting import setting
from tfnb.recording.marks.notes import calling_line
from tfnb.recording.overrides.rng_state import drawn_apart
from tfnb.recording.values.outside_calls import RecordedTensor
from tfnb.recording.values.recording import Recording, open_recording


def batch(original: Callable[..., Any]) -> Any:
    """The replacement of a method of a loader, or of its iterator, in `tfnb.recording.torch_patches`."""

    def call(self: object) -> Any:
        rec = open_recording()
        if rec is None:
            return original(self)
        used = deque[Callable[[], RecordedTensor | None]]()
        with (
            setting(current.stack, used_outside=used), drawn_apart(rec), _disable_current_modes(),
            torch._C.DisableTorchFunction(),
        ):  # fmt: skip
            made = original(self)
            recorded = [part for part in tree_leaves(made) if isinstance(part, RecordedTensor)]
            recorded += [each for found in used if (each := found()) is not None]
            _refuse(rec, {id(each): each for each in recorded}.values())
            return tree_map(lambda part: _remembered(rec, part), made)

    return call


def _refuse(rec: Recording, recorded: Collection[RecordedTensor]) -> None:
    """Refuse recorded tensors that are not made of constants and random numbers alone."""
    known = {node.id: node for node in rec.nodes} if recorded else {}
    for each in recorded:
        waiting, seen = [rec.handle(each).value.node], set[int]()
        while waiting:
            node = known.get(waiting.pop())
            if node is None or (node.op.startswith("tfnb.") and node.op not in ("tfnb.constant", "tfnb.guard")):
                raise FailedPrecondition(
                    f"a DataLoader of {each.described()}{calling_line()}\n  a loader gives data of outside, which a "
                    "recorded tensor is not: index it instead, x[first : first + size]"
                )
            seen.add(node.id)
            waiting += [value.node for value in node.inputs if value.node not in seen]


def _remembered(rec: Recording, part: object) -> Any:
    part = part.sample if isinstance(part, RecordedTensor) else part
    if isinstance(part, torch.Tensor):
        part = part if part._base is None else part.detach()  # a view of a recorded tensor would keep that
        rec.tape.batches[id(part)] = part
    return part
