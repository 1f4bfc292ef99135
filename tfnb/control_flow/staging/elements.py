"""What code may do with a list that a loop appended to: an `Appended` in it stands for as many elements as a run has.

What each run can answer is answered with tensors: ``len``, ``[i]``, ``[a:b]``, ``torch.stack``, ``torch.cat``, an
element that is set. Whatever else goes over the list gets the elements of the samples, with a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tfnb.control_flow.staging.lists import Appended, Growing
from tfnb.control_flow.staging.memory import home_of
from tfnb.control_flow.staging.places import user_frame
from tfnb.control_flow.staging.statement import CannotStage, is_number, is_value, tensor_of
from tfnb.control_flow.structure import recorder_if_open
from tfnb.graph import Variable
from tfnb.recording.writes.aliases import linked, overlap, share


def grown(items: Any) -> bool:
    """Whether a list or tuple has elements that a loop appended, or is being appended to."""
    if type(items) not in (list, tuple):
        return False
    if any(type(each) is Growing for each in items):
        raise CannotStage("a list that it appends to is read inside of it")
    return any(type(each) is Appended for each in items)


def length(items: Any) -> Any:
    """``len(items)``."""
    return sum(each.count if type(each) is Appended else 1 for each in items)


def expanded(items: Any) -> list[Any]:
    """The elements that there are for the samples; a run must have as many."""
    found: list[Any] = []
    for each in items:
        found += [each.at(i) for i in range(int(each.count))] if type(each) is Appended else [each]
    return found


def gone_over(items: Any) -> list[Any]:
    """The same for code that is not staged, with a note."""
    recorder = recorder_if_open()
    places = ", ".join(each.place for each in items if type(each) is Appended)
    note = (
        f"line {user_frame().f_lineno}: what goes over the list that the loop of {places} appends to stays Python: it "
        "takes as many elements as there are for the samples"
    )
    if recorder is not None and note not in recorder.notes:
        recorder.notes.append(note)
    return expanded(items)


def plain(found: Any) -> Any:
    """What Python goes over."""
    return gone_over(found) if grown(found) else found


# -- of torch ---------------------------------------------------------------------------------------------------------


def parts(items: Any) -> list[tuple[bool, torch.Tensor]]:
    """Whether it is the rows of many, and the tensor."""
    found = []
    for each in items:
        if type(each) is not Appended:
            found.append((False, each))
        else:
            found.append((True, each.leaves[0]))
    return found


def stack(tensors: Any, dim: int = 0) -> torch.Tensor:
    """``torch.stack`` of them."""
    rows = torch.cat([part if many else part[None] for many, part in parts(tensors)])
    return rows if dim == 0 else rows.movedim(0, dim)


def cat(tensors: Any, dim: int = 0) -> torch.Tensor:
    """``torch.cat`` of them."""

    def joined(rows: torch.Tensor) -> torch.Tensor:
        at = dim if dim >= 0 else rows.dim() - 1 + dim
        return rows.movedim(0, at).flatten(at, at + 1)

    return torch.cat([joined(part) if many else part for many, part in parts(tensors)], dim)


# -- read -------------------------------------------------------------------------------------------------------------


def item(items: Any, index: Any) -> Any:
    """``items[index]``."""
    if len(items) == 1 and _is_place(index):
        return items[0].at(index)
    at = _apart(items, index)
    if at is not None:
        return items[at]
    if type(index) is int and index in (0, -1):
        return items[index].at(index)
    return gone_over(items)[index]


def _is_place(index: Any) -> bool:
    """Whether it says which one, and not something of Python's own."""
    return isinstance(index, (int, torch.SymInt, torch.Tensor)) and not isinstance(index, bool)


def _apart(items: Any, index: Any) -> int | None:
    """Where an element with this number stands that no loop appended; None where that is not known."""
    if type(index) is not int or not -len(items) <= index < len(items):
        return None
    between = items[: index + 1] if index >= 0 else items[index:]
    return None if any(type(each) is Appended for each in between) else index


def part(items: Any, span: slice) -> Any:
    """``items[a:b:c]``."""
    if span.step in (None, 1):
        start, items = _cut(items, span.start)
        span = slice(start, span.stop, None)
        if type(span.stop) is int and span.stop < 0 and _apart(items, span.stop) is not None:
            items, span = items[: span.stop], slice(start, None, None)
        if span.start in (None, 0) and span.stop is None:
            return items[:]
    rows = items[0] if len(items) == 1 and type(items[0]) is Appended else _joined(items)
    backwards = type(span.step) is int and span.step < 0
    if rows is None or (backwards and not span.start is span.stop is None):
        return gone_over(items)[span]
    if backwards:
        rows, span = _flipped(rows), slice(None, None, -span.step)
    return type(items)([replace(rows, leaves=[leaf[span] for leaf in rows.leaves])])


def _cut(items: Any, start: Any) -> tuple[Any, Any]:
    """The start and the list without the elements of before it that no loop appended."""
    head = next(place for place, each in enumerate(items) if type(each) is Appended)
    if type(start) is int and 0 <= start <= head:
        return None, items[start:]
    return start, items


def backwards(items: Any) -> Any:
    """``list(reversed(items))``."""
    return part(list(items), slice(None, None, -1))


def _flipped(rows: Appended) -> Appended:
    return replace(rows, leaves=[_copied(leaf.flip(0), [leaf]) for leaf in rows.leaves])


def _joined(items: Any) -> Appended | None:
    """All elements as rows of the same tensors; None where they do not fit each other."""
    first: Appended = next(each for each in items if type(each) is Appended)
    columns: list[list[torch.Tensor]] = []
    for each in items:
        column = each.leaves if type(each) is Appended and _are_alike(each, first) else _as_rows(each, first)
        if column is None:
            return None
        columns.append(column)
    return replace(first, leaves=[_copied(torch.cat(column), column) for column in zip(*columns, strict=True)])


def _are_alike(one: Appended, other: Appended) -> bool:
    """Whether their elements have the same structure, dtypes and shapes."""
    pairs = zip(one.leaves, other.leaves, strict=True)
    return one.form == other.form and one.numbers == other.numbers and all(
        a.dtype == b.dtype and a.shape[1:] == b.shape[1:] for a, b in pairs
    )  # fmt: skip


def _as_rows(element: Any, rows: Appended) -> list[torch.Tensor] | None:
    """An element as one row of each tensor; None where it is not like the elements of the rows."""
    recorder = recorder_if_open()
    leaves, form = tree_flatten(element)
    if recorder is None or form != rows.form or not all(map(is_value, leaves)):
        return None
    if [is_number(leaf) or not isinstance(leaf, (torch.Tensor, Variable)) for leaf in leaves] != rows.numbers:
        return None
    tensors = [tensor_of(recorder, leaf) for leaf in leaves]
    pairs = zip(tensors, rows.leaves, strict=True)
    return [each[None] for each in tensors] if all(
        a.dtype == b.dtype and a.shape == b.shape[1:] for a, b in pairs
    ) else None  # fmt: skip


def _copied(new: torch.Tensor, of: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy that in Python would be the same elements: below a write into one, nobody may look at the others."""
    recorder = recorder_if_open()
    if recorder is None:
        return new
    found, bases = recorder.handle(new), [home[0] for each in of if (home := home_of(recorder, each)) is not None]
    for base in bases:
        share(recorder, found, base, (), None)
    pairs = combinations([set(linked(base)) for base in bases], 2)
    if any(base.overlaps for base in bases) or any(not one.isdisjoint(other) for one, other in pairs):
        overlap(recorder, found)
    return found


# -- written ----------------------------------------------------------------------------------------------------------


class Written:
    """Such a list where an element of it is set, deleted, or changed in place."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.read = items, None

    def __getitem__(self, index: Any) -> Any:
        self.read = part(self.items, index) if isinstance(index, slice) else item(self.items, index)
        return self.read

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value is self.read:
            return  # it was written in place
        at = _apart(self.items, index)
        if at is not None:
            self.items[at] = value
        elif not (len(self.items) == 1 and _is_place(index) and self._set(index, value)):
            self.items[:] = plain(self.items)
            self.items[index] = plain(value)

    def _set(self, index: Any, value: Any) -> bool:
        """Whether an element of the rows could be set: there are others then, for other names may have these."""
        (rows,) = self.items
        new = _as_rows(value, rows)
        if new is None:
            return False
        leaves = []
        for leaf, row in zip(rows.leaves, new, strict=True):
            leaves.append(leaf.clone())
            leaves[-1][index] = row[0]
            _copied(leaves[-1], (leaf, row))
        self.items[0] = replace(rows, leaves=leaves)
        return True

    def __delitem__(self, index: Any) -> None:
        if index in (0, -1):
            self.items[:] = part(self.items, _OTHERS[index])
        else:
            self.items[:] = plain(self.items)
            del self.items[index]


def _reverse(items: list[Any]) -> None:
    items[:] = backwards(items)


def _pop(items: list[Any], index: Any = -1) -> Any:
    if index not in (0, -1):
        items[:] = plain(items)
        return items.pop(index)
    found = item(items, index)
    items[:] = part(items, _OTHERS[index])
    return found


_OTHERS = {0: slice(1, None), -1: slice(None, -1)}  # than the first or last one
METHODS: dict[str, Callable[..., Any]] = {"reverse": _reverse, "pop": _pop}
