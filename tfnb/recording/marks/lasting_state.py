"""A journal of Python state that holds for all runs, such as ``requires_grad``, modes of modules and their hooks.

The function of a branch or loop is called once, while recording: what it changes there of objects that were there
before, each run would have. So each change is written down here first, and is taken back where the region ends, which
is refused by name unless it left the state as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Facet:
    """One kind of state of an object: how it is read and set, what is said of a change, and what to do instead."""

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    change: str  # with {names} of the objects
    remedy: str


class LastingChange(NamedTuple):
    """The state of an object before a change."""

    facet: Facet
    owner: object
    before: object


class LastingChanges:
    """The journal of one recording: changes, first to last."""

    def __init__(self) -> None:
        self._changes: list[LastingChange] = []

    def __len__(self) -> int:
        return len(self._changes)

    def keep(self, facet: Facet, owner: object) -> None:
        """Call before a change: the present state can be put back."""
        self._changes.append(LastingChange(facet, owner, facet.get(owner)))

    def put_back(self, start: int, is_outer: Callable[[Any], bool]) -> list[LastingChange]:
        """Restore the state that objects of outside had at ``start``, and forget the changes since. Returns the first
        change of each object that had another state.
        """
        first: dict[tuple[int, int], LastingChange] = {}
        for change in self._changes[start:]:
            first.setdefault((id(change.facet), id(change.owner)), change)
        del self._changes[start:]
        left = [each for each in first.values() if is_outer(each.owner) and each.facet.get(each.owner) != each.before]
        for change in left:
            change.facet.put(change.owner, change.before)
        return left


def flag(tensor: torch.Tensor) -> bool:
    """The tensor's own mark, set by ``requires_grad_`` and by ``torch.randn(3, requires_grad=True)``."""
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


def set_flag(tensor: torch.Tensor, wanted: bool) -> None:
    """Set the tensor's own mark."""
    with torch._C.DisableTorchFunction():
        tensor.requires_grad = wanted


def _set_mode(module: torch.nn.Module, is_training: bool) -> None:
    module.training = is_training


def _set_hooks(hooks: dict[int, Any], before: tuple[tuple[int, Any], ...]) -> None:
    hooks.clear()
    hooks.update(before)


FLAG = Facet(
    flag, set_flag, "requires_grad of {names} is changed",
    "change it between runs, or leave a Parameter as it is in some runs by `p.grad = None` behind backward()",
)  # fmt: skip
MODE = Facet(
    lambda module: module.training, _set_mode, "train() or eval() of {names} changes its mode",
    "set the mode before the branch or loop, or call two modules, one of each mode",
)  # fmt: skip
HOOKS = Facet(
    lambda hooks: tuple(hooks.items()), _set_hooks, "a hook of what lies outside is registered or removed",
    "register and remove it outside, with a hook that asks a tensor, as in `torch.where(test, 2 * y, y)`, or do both "
    "inside",
)  # fmt: skip
