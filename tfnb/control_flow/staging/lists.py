"""Lists that a loop of the graph appends to: after the loop they are stacked tensors, with a row for each element.

While the body of the loop is recorded the list holds a `Growing`: to read it there is an error, which says to use a
TensorArray. After the loop it holds `AppendedRows`. ``torch.stack``, ``torch.cat``, ``len`` and ``[-1]`` of it are part
of the graph; all else is an error, which says to stack it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_flatten

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.staging.alias_analysis import Bases, bases_of
from tfnb.control_flow.staging.statement import kind, status, tensor_of
from tfnb.control_flow.staging.user_frames import user_line
from tfnb.control_flow.structure import recorder_if_open
from tfnb.errors import Unsupported
from tfnb.recording import Recorder
from tfnb.recording.writes.aliases import REFUSED

_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow rpow neg abs lt le gt ge bool float int index iter
    len getitem contains call
"""


class _Stands:
    """A stand-in for elements of a list, whose use raises an error with a remedy."""

    def refuse(self) -> NoReturn:
        """Raise Unsupported."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        self.refuse()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        next(each for each in tree_flatten((args, kwargs))[0] if isinstance(each, cls)).refuse()


for _name in _OPERATORS.split():
    setattr(_Stands, f"__{_name}__", lambda self, *args: self.refuse())


class Growing(_Stands):
    """The last item of a list during the recording of a loop that appends to the list."""

    def refuse(self) -> NoReturn:
        recorder = recorder_if_open()
        raise Unsupported(
            f"a loop reads a list that it appends to{'' if recorder is None else recorder.tape.at()}\n  use a "
            "tfnb.TensorArray in place of the list: `a = tfnb.TensorArray(n)` before the loop, "
            "`a = a.write(i, value)` and `a.read(i - 1)` inside of it, `a.stack()` after it", details=REFUSED,
        )  # fmt: skip


@dataclass(eq=False)
class AppendedRows(_Stands):
    """The elements that the loop of ``place`` appended, as rows."""

    rows: torch.Tensor
    place: str

    def refuse(self) -> NoReturn:
        recorder = recorder_if_open()
        raise Unsupported(
            f"the list that the loop of {self.place} appends to has as many elements as a run has iterations: "
            "torch.stack, torch.cat, len and [-1] take it as it is; for all else stack it first, as in "
            f"`for row in torch.stack(items)`{'' if recorder is None else recorder.tape.at()}", details=REFUSED,
        )  # fmt: skip


# -- while the loop is recorded ---------------------------------------------------------------------------------------


@dataclass
class Growth:
    """Collects the elements that a loop's body appends to outside lists: one tensor to each, in every iteration.

    around: the containers that were made in the body that the loop stands in, if it stands in one.
    """

    around: list[Any] | None
    depth: int = 0
    lists: list[list[Any]] = field(default_factory=list)
    elements: list[list[Any]] = field(default_factory=list)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Around the body: lists that grow in it cannot be read."""
        self.depth = status.depth
        marked = list(self.lists)
        for each in marked:
            each.append(Growing())
        self.elements = [[] for _ in marked]
        outer, status.growth = status.growth, self
        try:
            yield
        finally:
            status.growth = outer
            for each in marked:
                del each[-1]

    def add(self, owner: list[Any], value: Any) -> None:
        """One element; a list that is met for the first time is marked when the body is recorded again."""
        if status.depth > self.depth:
            raise CannotStage(
                f"{user_line()} stands in a branch of it, below a break or continue, or in a loop inside of it: append "
                "once in each iteration, or use a tfnb.TensorArray"
            )
        if not isinstance(value, torch.Tensor):
            raise CannotStage(f"{user_line()} appends {kind(value)}: append one tensor, and to a list for each of them")
        place = self._place(owner)
        if place >= len(self.elements):
            return
        if self.elements[place]:
            raise CannotStage(
                f"{user_line()} is the second append() to its list in one iteration: append both at once, as one "
                "tensor (`torch.stack`, and `flatten(0, 1)` after the loop), or use two lists"
            )
        self.elements[place].append(value)

    def _place(self, owner: list[Any]) -> int:
        found = next((i for i, each in enumerate(self.lists) if each is owner), None)
        if found is not None:
            return found
        if self.around is not None and all(owner is not other for other in self.around):
            raise CannotStage(
                f"append() in a loop inside of another, to a list that was made outside of both, at {user_line()}: "
                "make the list in the outer loop, and append its torch.stack() there"
            )
        self.lists.append(owner)
        return len(self.lists) - 1

    @property
    def is_new(self) -> bool:
        """Whether the body has to be recorded again, with its lists marked."""
        return len(self.elements) < len(self.lists)

    def rows(self, recorder: Recorder, check: Callable[[Bases], None]) -> list[torch.Tensor]:
        """The element of each list in one iteration. check: raises for memory that loops write."""
        if not all(self.elements):
            raise CannotStage("append() is called in some of its iterations only")
        found = [element for (element,) in self.elements]
        self.bases = [bases_of(recorder, element) for element in found]
        for bases in self.bases:
            check(bases)
        return [tensor_of(recorder, element) for element in found]

    def finish(self, rows: Sequence[torch.Tensor], place: str, share: Callable[[Any, Bases], None]) -> None:
        """After the loop: its rows, at the end of the lists. share: says whose memory they may have."""
        for owner, stacked, bases in zip(self.lists, rows, self.bases, strict=True):
            share(stacked, bases)
            owner.append(AppendedRows(stacked, place))


def append_to(owner: list[Any]) -> Callable[[Any], None] | None:
    """How to append to a list of outside in a staged body; None where that cannot be."""
    return None if status.growth is None else partial(status.growth.add, owner)


# -- after the loop ---------------------------------------------------------------------------------------------------


def grown(items: Any) -> bool:
    """Whether a list or tuple has elements that a loop appended. Raises Unsupported inside of that loop."""
    if type(items) not in (list, tuple):
        return False
    for each in items:
        if type(each) is Growing:
            each.refuse()
    return any(type(each) is AppendedRows for each in items)


def length(items: Sequence[Any]) -> Any:
    """``len(items)``."""
    return sum(each.rows.shape[0] if type(each) is AppendedRows else 1 for each in items)


def plain(items: Any) -> Any:
    """The items as they are; raises Unsupported for a list that a loop appended to."""
    if grown(items):
        next(each for each in items if type(each) is AppendedRows).refuse()
    return items


def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """``torch.stack`` of them."""
    rows = torch.cat([each.rows if type(each) is AppendedRows else each[None] for each in tensors])
    return rows if dim == 0 else rows.movedim(0, dim)


def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """``torch.cat`` of them."""

    def joined(rows: torch.Tensor) -> torch.Tensor:
        at = dim if dim >= 0 else rows.dim() - 1 + dim
        return rows.movedim(0, at).flatten(at, at + 1)

    return torch.cat([joined(each.rows) if type(each) is AppendedRows else each for each in tensors], dim)


def item(items: Sequence[Any], index: object) -> Any:
    """``items[-1]``."""
    if type(index) is not int or index != -1:
        plain(items)
    return items[-1].rows[-1] if type(items[-1]) is AppendedRows else items[-1]
