"""Tensors that share memory in some runs: a branch or a loop gave one name what another one holds, or a view of it.

Both are values of their own in the graph; where one is written, the other is written as well, where it is the same
memory in this run. Below `writes`.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tfnb.errors import Unsupported
from tfnb.graph.node import leaves
from tfnb.graph.op_facts import op_name
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Base, Tensor
from tfnb.recording.values.views import View

aten = torch.ops.aten
STRAIGHT = frozenset({"in_place"})  # with grad mode off: gradients pass to what was there before
Test = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Link:
    """Another tensor with the same memory in some runs.

    other: it keeps what it looks at, over which others may share that memory, and not what looks at it. chain: the
    views by which the one looks at the other. is_seen: whether the other one looks at this one. test: a
    truth value, the same for all links that ask for it, and the outcome without which it is not so; None where nobody
    can say. is_sure: whether it is so wherever the test has this outcome.
    """

    other: Callable[[], Base | None]
    chain: tuple[View, ...]
    is_seen: bool
    test: Test | None
    outcome: bool
    is_sure: bool = True

    @property
    def is_known(self) -> bool:
        """Whether somebody can say where it is so."""
        return self.test is not None and self.is_sure

    def where(self) -> torch.Tensor:
        """One truth value: whether it is so."""
        assert self.test is not None
        test = self.test().reshape(()).to(torch.bool)
        return test if self.outcome else test.logical_not()

    def after(self, rec: Recording, mine: torch.Tensor, old: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """What the other one, which held ``old``, holds once this one has become ``mine``."""
        with torch.enable_grad():
            new = looked(self.chain, mine) if self.is_seen else put(rec, self.chain, old, mine)
            return fitting(old, torch.where(where, new, old))


def share(
    rec: Recording, result: Tensor, base: Base, chain: tuple[View, ...], test: Test | None, outcome: bool = True, *,
    is_sure: bool = True,
) -> None:  # fmt: skip
    """``result`` looks at ``base`` by the chain where the test has this outcome, or else in some of those runs."""
    _link(rec, result._family, base, chain, test, outcome, is_sure)


def _link(
    rec: Recording, mine: Base, base: Base, chain: tuple[View, ...], test: Test | None, outcome: bool = True,
    is_sure: bool = True,
) -> None:  # fmt: skip
    if mine is base:
        return
    # not by a place that only the branch or loop knows
    is_sure = is_sure and all(_is_known(rec, leaf) for view in chain for leaf in leaves(view.attrs))
    rec.changes(mine, base)
    kept = rec._wrap(base.entry, base)  # a handle, for branches and loops know of what somebody holds
    mine.links = (*_living(mine), Link(lambda: kept._family, chain, False, test, outcome, is_sure))
    base.links = (*_living(base), Link(weakref.ref(mine), chain, True, test, outcome, is_sure))


def overlap(rec: Recording, tensor: Tensor) -> None:
    """Places of the tensor may be the same memory: nobody may look at it any more below a write."""
    rec.changes(tensor._family)
    tensor._family.overlaps = True


def copy_of(rec: Recording, tensor: torch.Tensor) -> Tensor:
    """A node of its own, for what is below a guard, with the memory of the tensor."""
    handle = rec.handle(tensor)
    with torch.enable_grad():  # in Python it is the tensor
        found = rec.handle(tensor.clone())
    share(rec, found, handle._family, handle._chain, _always)
    return found


def _always() -> torch.Tensor:
    return torch.ones((), dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Way:
    """From a tensor over links to another one, which may share its memory.

    chain: the views by which the tensor looks at the other one, or where is_seen the other one at it. is_known: whether
    somebody can say where that is so.
    """

    links: tuple[Link, ...]
    chain: tuple[View, ...] = ()
    is_seen: bool = False
    is_known: bool = True

    @property
    def other(self) -> Base | None:
        """Where it leads."""
        return self.links[-1].other()

    def where(self) -> torch.Tensor:
        """One truth value: whether it is so."""
        return functools.reduce(operator.and_, (link.where() for link in self.links))

    def over(self, link: Link) -> Way:
        """The way that goes on over this link."""
        links = (*self.links, link)
        is_known = self.is_known and link.is_known
        if not (self.is_seen and self.chain) and not (link.is_seen and link.chain):
            return Way(links, (*link.chain, *self.chain), False, is_known)
        if not (self.chain and not self.is_seen) and not (link.chain and not link.is_seen):
            return Way(links, (*self.chain, *link.chain), True, is_known)
        return Way(links, is_known=False)  # two parts of the same, of which nobody knows whether they meet


def ways(rec: Recording, base: Base, ends: Container[Base]) -> Iterator[Way]:
    """All that lead to one of the ends, and over no other end."""
    return _ways(rec, (base,), Way(()), ends)


def _ways(rec: Recording, path: tuple[Base, ...], way: Way, ends: Container[Base]) -> Iterator[Way]:
    for link in _living(path[-1]):
        other, step = link.other(), way.over(link)
        if other is None or other in path or other.entry.value.node not in rec.tape.by_id:
            continue
        if other in ends:
            yield step
        else:
            yield from _ways(rec, (*path, other), step, ends)


def share_by(
    rec: Recording, result: Tensor, chain: tuple[View, ...], way: Way, other: Base, looks: tuple[View, ...],
    test: Test | None,
) -> None:  # fmt: skip
    """``result`` looks by ``chain`` at where the way began, and ``other`` by ``looks`` at where it leads."""
    if looks or (way.is_seen and way.chain and chain):
        _link(rec, result._family, other, (), None)
    elif way.is_seen and way.chain:
        _link(rec, other, result._family, way.chain, test)
    else:
        _link(rec, result._family, other, (*way.chain, *chain), test)


def pass_on(rec: Recording, base: Base, become: Callable[[Recording, Base, torch.Tensor], None]) -> None:
    """What was written into a tensor is written into those that share its memory, by ``become``."""
    if base.overlaps:
        _lose(rec, base)
    _pass_on(rec, (base,), {}, None, become)


def _pass_on(
    rec: Recording, path: tuple[Base, ...], asked: Mapping[Test, bool], where: torch.Tensor | None,
    become: Callable[[Recording, Base, torch.Tensor], None],
) -> None:  # fmt: skip
    """By every way that comes to no tensor twice; where: whether all on the way here share memory.

    asked: the tests on the way here, with their outcomes, of which no link asks for the other.
    """
    one = path[-1]
    for link in _living(one):
        other, test = link.other(), link.test
        if other is None or other in path or other.entry.value.node not in rec.tape.by_id:
            continue
        if test is not None and asked.get(test, link.outcome) is not link.outcome:
            continue
        here, more = where, asked if test is None else {**asked, test: link.outcome}
        if not link.is_known or one.entry.lost:
            _lose(rec, other)
        else:
            here = link.where() if where is None else where & link.where()
            become(rec, other, link.after(rec, rec._wrap(one.entry), rec._wrap(other.entry), here))
            if other.overlaps:
                _lose(rec, other)
        _pass_on(rec, (*path, other), more, here, become)


def _lose(rec: Recording, base: Base) -> None:
    """Nobody may look at it any more. Raises Unsupported inside of a region for what is of outside of it."""
    why = (
        f"a tensor is used that shares memory, in some runs, with one that was written{rec.tape.at()}\n  a loop or "
        "branch gave one what the other held (`v = u`, `v = u[0]`), or appended it twice: give it a copy there "
        "(`v = u.clone()`), or make another tensor in place of the write (`u = u + 1`, and not `u += 1`)"
    )
    if rec.inside and base in rec.inside[-1].entries:
        raise Unsupported(why)
    rec.changes(base)
    entry = base.entry.light()
    entry.lost = why
    base.become(entry)


def linked(base: Base) -> Iterator[Base]:
    """All that may share its memory, and itself."""
    seen, left = {base}, [base]
    while left:
        one = left.pop()
        yield one
        more = {link.other() for link in one.links} - seen
        left += (other for other in more if other is not None)
        seen.update(left)


def outer(rec: Recording) -> set[Base]:
    """What is of outside of the region that is being recorded, also what that met first."""
    handles = rec.outside._handles.values()
    return {*rec.inside[-1].entries, *rec._reads.values(), *(handle._family for _, handle in handles)}


def _living(base: Base) -> tuple[Link, ...]:
    return tuple(link for link in base.links if link.other() is not None)


def _is_known(rec: Recording, leaf: Any) -> bool:
    """Whether an argument of a view is there outside of the branch or loop that made the view."""
    if isinstance(leaf, Tensor):
        return leaf.shown.value.node in rec.tape.by_id
    return not isinstance(leaf, torch.SymInt) or bool(leaf.node.expr.is_number)


def looked(chain: tuple[View, ...], base: torch.Tensor) -> torch.Tensor:
    """What the views show of the base."""
    for view in chain:
        base = view.apply(base)
    return base


def put(rec: Recording, chain: tuple[View, ...], base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``base`` with ``new`` where the chain of views looks; gradients take the way that the write gave ``new``."""
    steps = [base]
    for view in chain[:-1]:
        steps.append(view.apply(steps[-1]))
    for view, step in zip(reversed(chain), reversed(steps), strict=False):
        new = _put(rec, view, step, new)
    return fitting(base, new) if chain else new


def _put(rec: Recording, view: View, base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    is_unseen = view.op is aten.detach.default or not view.grad  # autograd knows of no way from the base to the view
    try:
        with torch.set_grad_enabled(not is_unseen):
            whole = view.put(base, new)
    except Unsupported as error:
        raise Unsupported(f"{error}{rec.tape.at()}", op=op_name(view.op)) from None
    if not is_unseen:
        return whole
    with torch.no_grad(), rec.tagged(STRAIGHT, rec.tape.marks.forward):
        return aten.copy(base, whole)


def fitting(target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``result`` as it stands in ``target``: its dtype, shape and strides, on which later views depend."""
    same = result.dtype == target.dtype and result.dim() == target.dim() and all(
        statically_known_true(n == m) and (statically_known_true(n <= 1) or statically_known_true(a == b))
        for n, m, a, b in zip(result.shape, target.shape, result.stride(), target.stride(), strict=True)
    )  # fmt: skip
    if same:
        return result
    with torch.enable_grad():
        return aten.copy(target, result)
