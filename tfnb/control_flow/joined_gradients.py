"""The gradients that two branches leave in ``.grad``, as outputs of the conditional. Semantics S-120."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.graph import Value
from tfnb.graph.ops import GRADIENT
from tfnb.recording import Recorder, Tensor
from tfnb.recording.subgraphs.capture import LeftGradient, Region
from tfnb.recording.values.tensor import Base
from tfnb.recording.writes.aliases import may_share


@dataclass(frozen=True, slots=True)
class JoinedGradient:
    """One ``.grad``, as each branch leaves it, and the places of the outputs with its value and its presence."""

    holder: object
    then: LeftGradient | None
    other: LeftGradient | None
    value: int | None
    present: int | None


def changed_holders(recorder: Recorder, regions: Sequence[Region]) -> list[Any]:
    """The Variables and tensors of outside of which a region leaves another ``.grad`` than there was before."""
    holders = {id(holder): holder for region in regions for holder in region.gradients}
    holders |= {id(holder): holder for holder in recorder.autograd.holders()}
    return [
        holder for holder in holders.values()
        if any(recorder.autograd.differs(holder, region.gradients.get(holder)) for region in regions)
    ]  # fmt: skip


class JoinedGradients:
    """The gradients that two branches leave in ``.grad``: further outputs of the conditional, as what they write is.

    Where one branch alone leaves a gradient, only runs that go there have it; in others the output is absent.
    """

    def __init__(self, recorder: Recorder, regions: tuple[Region, Region]) -> None:
        self.recorder, self.regions = recorder, regions
        self.columns: list[tuple[Value | None, Value | None]] = []
        self.labels: list[str] = []
        self.parts = [self._part(holder) for holder in changed_holders(recorder, regions)]

    def _part(self, holder: object) -> JoinedGradient:
        sides = then, other = [region.gradients.get(holder) for region in self.regions]
        value = self._column(holder, [None if side is None else side.value for side in sides])
        present = self._column(holder, [None if side is None else side.present_value for side in sides])
        return JoinedGradient(holder, then, other, value, present)

    def _column(self, holder: object, values: Sequence[Value | None]) -> int | None:
        """The place of an output, absent in a branch without a value; None if both have none."""
        if all(value is None for value in values):
            return None
        self.columns.append((values[0], values[1]))
        self.labels.append(_named(holder))
        return len(self.columns) - 1

    def join(self, predicate: torch.Tensor, results: Sequence[Tensor]) -> None:
        """Let each ``.grad`` be the one of the branch that is taken; ``results``: the outputs of the columns."""
        autograd = self.recorder.autograd
        for part in self.parts:
            grad = None if part.value is None else results[part.value]
            told = None if part.present is None else results[part.present]
            then, other = (_presence(side, told) for side in (part.then, part.other))
            if grad is not None:
                may_share(grad, self._outer(part), f"a branch leaves {_named(part.holder)} as it was")
            with torch.no_grad(), self.recorder.tagged(GRADIENT):
                autograd.join(part.holder, grad, predicate, (then, other))

    def _outer(self, part: JoinedGradient) -> list[Base]:
        """The memory of outside that the gradient is in one branch."""
        tensors = [side.tensor for side in (part.then, part.other) if side is not None]
        bases = [tensor._family for tensor in tensors if isinstance(tensor, Tensor)]
        return [base for base in bases if base.entry.value.node in self.recorder.tape.by_id]


def _presence(side: LeftGradient | None, told: Tensor | None) -> Any:
    """Whether a run has the gradient of a branch; ``told``: the recorded truth value of gradients that say so."""
    if side is None:
        return None
    return True if side.present is None else told


def _named(holder: object) -> str:
    return f"the .grad of {getattr(holder, 'name', 'a tensor')}"
