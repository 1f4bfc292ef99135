"""Gradients that plain PyTorch carries in ``.grad`` from block to block and from turn to turn, and runs do not.

Every recording begins with each ``.grad`` empty, and so does every run of it. `CarriedGradients` collects which
Parameters a block fills, clears and updates. A block that adds to a gradient, and uses the sum, is noted where that
gradient comes from another block, from outside, or from the block's own run before. In a script, where a block is
written to be run and not executed in turns, that is another block of the same graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.graph import Graph, SourceLine, Variable
from tfnb.graph.current import is_recorded
from tfnb.graph.graph import new_id
from tfnb.recording.marks.open_block import OpenBlock

_ZEROS = frozenset({"aten.zero.default", "aten.zeros_like.default", "aten.zeros.default"})
_SHOWN = 3  # names in a note
_RULE = "Each run begins with every .grad empty"
_CLEAR = "if that is meant, call `opt.zero_grad()` above backward() in this block"
_SUM = (
    "to add up gradients of several runs keep their sum in a tfnb.Variable: `total.assign_add(p.grad)` where they are "
    "computed, and `p.grad = total.read()` above opt.step()"
)


@dataclass(frozen=True, slots=True)
class GradientUse:
    """The part that one block has in the ``.grad`` of one Parameter.

    adds: its first backward() found a ``.grad`` that the block had not cleared. reads: it takes the sum afterwards.
    updates: it updates the Parameter by the sum. leaves: the ``.grad`` is there when it ends.
    """

    graph: weakref.ref[Graph]
    owner: str
    source: SourceLine | None
    adds: bool
    reads: bool
    updates: bool
    leaves: bool

    @property
    def is_recorded(self) -> bool:
        """Whether its block still has nodes in a graph."""
        graph = self.graph()
        return graph is not None and any(n.owner is not None and n.owner.key == self.owner for n in graph.nodes)

    def __str__(self) -> str:
        return "a recording" if self.source is None else f"{self.source.label} line {self.source.line}"


_uses: weakref.WeakKeyDictionary[Variable, list[GradientUse]] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Gradient:
    """The ``.grad`` of one Parameter while a block is recorded; ``first``, ``cleared``: ids between the ids of
    nodes.
    """

    source: SourceLine | None
    adds: bool
    first: int
    cleared: int | None = None
    is_read: bool = False


class CarriedGradients:
    """The gradients of Parameters filled by one block, collected while the block is recorded."""

    def __init__(self, recording: OpenBlock) -> None:
        self._rec = recording
        self._clear = WeakIdKeyDictionary()  # Parameters without a gradient, by the block itself, before it fills them
        self._found: dict[Variable, _Gradient] = {}
        self._outside: set[Variable] = set()  # whose Parameter has a real ``.grad``

    def read(self, holder: torch.Tensor | Variable, grad: torch.Tensor | None) -> None:
        """The block reads a ``.grad``; an absent gradient is noted as cleared by a later `zero_grad`."""
        found = self._gradient(holder)
        if found is None:
            self._see_empty(holder, asked=True)
        elif grad is not None:
            found.is_read = True

    def clear(self, holder: torch.Tensor | Variable) -> None:
        """The block sets a ``.grad``, mostly to None."""
        found = self._gradient(holder)
        if found is None:
            self._see_empty(holder)
        elif found.cleared is None:
            found.cleared = new_id()

    def set(self, holder: torch.Tensor | Variable) -> None:
        """The block sets a ``.grad`` to a tensor: one that was asked for before, and found empty, is added to."""
        parameter = _parameter(holder)
        was_asked = parameter is not None and self._clear.get(parameter) == "asked"
        self.clear(holder)
        if was_asked and isinstance(holder, Variable) and holder not in self._found:
            self._found[holder] = _Gradient(self._rec.where(), True, new_id())

    def fill(self, holder: torch.Tensor | Variable) -> None:
        """A backward pass adds to a ``.grad``."""
        parameter = _parameter(holder)
        if parameter is None or not isinstance(holder, Variable):
            return
        found = self._found.get(holder)
        if found is None:
            found = self._found[holder] = _Gradient(None, parameter not in self._clear, new_id())
            with torch._C.DisableTorchFunction():
                if found.adds and parameter.grad is not None:
                    self._outside.add(holder)
        found.source = self._rec.where()

    def zero(self, parameters: Iterable[torch.Tensor], *, is_kept: bool) -> None:
        """``zero_grad`` of a module or optimizer; ``is_kept``: with ``set_to_none=False``."""
        for parameter in parameters:
            self._clear[parameter] = "zeroed" if is_kept else "cleared"

    def tell_kept(self, variable: Variable) -> None:
        """Note that an update, which only some runs make, is one of a ``.grad`` that the block zeroes and keeps."""
        parameter = _parameter(variable)
        if parameter is not None and self._clear.get(parameter) == "zeroed":
            self._rec.warn(
                f"in plain PyTorch the zeroed .grad of {variable.name} is there from turn to turn, so that each step "
                "updates it, by momentum and weight decay also where the loss does not reach it. Each run begins with "
                "every .grad None, and leaves it as it is there: call opt.zero_grad() without set_to_none=False"
            )

    def saved(self) -> WeakIdKeyDictionary:
        """The Parameters that the block has cleared, for `put_back`."""
        return copy(self._clear)

    def put_back(self, saved: WeakIdKeyDictionary) -> None:
        """At the end of a branch: what it cleared is cleared in some runs only."""
        self._clear = copy(saved)

    def keep(self, holder: torch.Tensor | Variable) -> None:
        """A branch may have cleared a ``.grad``, and some runs still have it."""
        found = self._gradient(holder)
        if found is not None:
            found.cleared = None

    def _gradient(self, holder: object) -> _Gradient | None:
        return self._found.get(holder) if isinstance(holder, Variable) else None

    def _see_empty(self, holder: object, *, asked: bool = False) -> None:
        """Note an empty ``.grad``; ``holder`` is the Parameter itself if the block has not used the Parameter yet.

        asked: the block read the empty gradient, and did not clear it.
        """
        parameter = _parameter(holder) if isinstance(holder, Variable) else holder
        if parameter is not None and not (asked and parameter in self._clear):
            self._clear[parameter] = "asked" if asked else "cleared"

    # -- at the end of the block ------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Keep this block's gradient uses, for blocks recorded later."""
        for variable, use in self._now().items():
            others = (other for other in _uses.get(variable, ()) if not self._is_mine(other) and other.is_recorded)
            _uses[variable] = [*others, use]

    def notes(self) -> Iterator[tuple[SourceLine | None, str]]:
        """One note or none: the line, and the effect of runs on its gradients."""
        now = self._now()
        for told in (self._of_earlier, self._of_outside, self._of_later, self._of_runs):
            found = told(now)
            if found is not None:
                yield found
                return

    def _now(self) -> dict[Variable, GradientUse]:
        """The uses of this block."""
        if not self._found:
            return {}
        writes: dict[Variable, list[int]] = {}
        for node in self._rec.new:
            if node.op == "tfnb.assign":
                writes.setdefault(node.attrs["variable"], []).append(node.id)
        grad: Callable[[Variable], Any] = self._rec.autograd.held
        here = weakref.ref(self._rec.graph), self._rec.owner.key
        uses = {}
        for variable, found in self._found.items():
            ends = float("inf") if found.cleared is None else found.cleared
            updates = found.is_read and any(found.first < at < ends for at in writes.get(variable, ()))
            leaves = self._is_left(grad(variable))
            reads = updates or (found.is_read and found.cleared is None and leaves)
            uses[variable] = GradientUse(*here, found.source, found.adds, reads, updates, leaves)
        return uses

    def _is_left(self, grad: torch.Tensor | None) -> bool:
        """Whether a ``.grad`` at the end of the block was computed by the block, and not cleared."""
        if grad is None or not is_recorded(grad):
            return False
        return self._rec.node(self._rec.look(grad).value.node).op not in _ZEROS

    def _is_mine(self, use: GradientUse) -> bool:
        return use.owner == self._rec.owner.key and use.graph() is self._rec.graph

    def _others(self, variable: Variable) -> list[GradientUse]:
        """Gradient uses of the blocks that plain PyTorch runs with this one: all cells, or in a script blocks of one
        graph.
        """
        found = [use for use in _uses.get(variable, ()) if not self._is_mine(use) and use.is_recorded]
        return found if self._rec.is_cell else [use for use in found if use.graph() is self._rec.graph]

    def _of_earlier(self, now: dict[Variable, GradientUse]) -> tuple[SourceLine | None, str] | None:
        return self._of_blocks(
            now, lambda use, other: use.adds and use.reads and other.leaves,
            f"in plain PyTorch backward() adds here to the .grad that {{other}} leaves ({{names}}). {_RULE}, so this "
            f"block has its own gradients alone: {_CLEAR}. Else call backward() of all losses in one block; {_SUM}",
        )  # fmt: skip

    def _of_later(self, now: dict[Variable, GradientUse]) -> tuple[SourceLine | None, str] | None:
        return self._of_blocks(
            now, lambda use, other: use.leaves and other.adds and other.updates,
            f"in plain PyTorch the .grad that backward() leaves here ({{names}}) goes into the update at {{other}}. "
            f"{_RULE}, so it does not: if that is meant, call `opt.zero_grad()` above backward() in both blocks. Else "
            f"call backward() of all losses in one block; {_SUM}",
        )  # fmt: skip

    def _of_blocks(
        self, now: dict[Variable, GradientUse], carries: Callable[[GradientUse, GradientUse], bool], text: str
    ) -> tuple[SourceLine | None, str] | None:
        """The note on gradients that go from one block to another: one use is of this block, one of another."""
        pairs = [
            (variable, use, other) for variable, use in now.items()
            for other in self._others(variable) if carries(use, other)
        ]  # fmt: skip
        if not pairs:
            return None
        _, use, other = pairs[0]
        return use.source, text.format(other=other, names=_names(variable for variable, *_ in pairs))

    def _of_outside(self, now: dict[Variable, GradientUse]) -> tuple[SourceLine | None, str] | None:
        found = [(variable, use) for variable, use in now.items() if variable in self._outside and use.updates]
        if not found or not self._rec.is_cell:
            return None
        return found[0][1].source, (
            f"in plain PyTorch backward() adds here to the .grad that is there from outside of the recording "
            f"({_names(v for v, _ in found)}). {_RULE}, so this block has its own gradients alone: {_CLEAR}. Else "
            "compute the other gradients in this block, too"
        )

    def _of_runs(self, now: dict[Variable, GradientUse]) -> tuple[SourceLine | None, str] | None:
        found = [(variable, use) for variable, use in now.items() if use.adds and use.updates and use.leaves]
        if not found or not self._rec.is_cell:
            return None
        return found[0][1].source, (
            f"nothing in this block clears .grad ({_names(v for v, _ in found)}), so in plain PyTorch each turn would "
            f"add to the gradients of the turn before. {_RULE}: {_CLEAR}; {_SUM}"
        )


def _parameter(holder: object) -> torch.Tensor | None:
    """The Parameter of a Variable; None for objects without ``.grad`` outside of recordings."""
    return holder.held.tensor() if isinstance(holder, Variable) and holder.held is not None else None


def _names(variables: Iterable[Variable]) -> str:
    names = list(dict.fromkeys(variable.name for variable in variables))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
