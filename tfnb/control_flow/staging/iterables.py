"""Iterables of staged loops; and ``range``, ``enumerate``, ``zip`` and ``len`` for varying sizes."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tfnb.control_flow.staging.branching import chosen
from tfnb.control_flow.staging.containers import made
from tfnb.control_flow.staging.generators import Consumer, Generator
from tfnb.control_flow.staging.lists import grown, length, plain
from tfnb.control_flow.staging.looping import Iterations, LoopStaging
from tfnb.control_flow.staging.python_numbers import NUMBERS, recorded, shown
from tfnb.control_flow.staging.statement import OPERATORS, Statement, as_number, recorder_for, status
from tfnb.control_flow.structure import sample_truth
from tfnb.recording import Recorder, Tensor
from tfnb.recording.values.tensor import WholeNumbers


class Range(WholeNumbers):
    """``range`` of recorded numbers and varying sizes."""

    def __init__(self, *args: Any) -> None:
        self.args, self.is_reversed = args, False
        self.start, self.stop, self.step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]

    def __iter__(self) -> Iterator[int]:
        found = range(*map(_of_samples, self.args))
        return iter(found[::-1] if self.is_reversed else found)

    def __len__(self) -> int:
        return len(range(*map(_of_samples, self.args)))

    def tensor(self) -> torch.Tensor:
        found = torch.arange(self.start, self.stop, self.step)
        return found.flip(0) if self.is_reversed else found

    def __reversed__(self) -> Range:
        found = Range(*self.args)
        found.is_reversed = not self.is_reversed
        return found

    def stage(self, st: Statement, more: Any, body: Callable[[Any], None]) -> None:
        by_size = not any(isinstance(arg, torch.Tensor) for arg in self.args)
        start, stop, step = (
            torch.ops.aten.scalar_tensor(arg, dtype=torch.int64) if isinstance(arg, torch.SymInt) else arg
            for arg in (self.start, self.stop, self.step)
        )
        with st.staging():
            span = torch.as_tensor(stop - start)
            iterations = span if isinstance(step, int) and step == 1 else torch.div(span + step - _sign(step), step,
                                                                                rounding_mode="floor")  # fmt: skip
            if self.is_reversed:
                start, step = start + (iterations - 1) * step, -step
            limit = iterations.clamp(min=0)
            entered = sample_truth(st.recorder, limit) is not False
            LoopStaging(st, by_size=by_size, entered=entered).record(Iterations(more, body, (), limit, start, step))

    def parted(self, recorder: Recorder) -> tuple[Any, Range] | None:
        """The first number and the range of the others, with a guard that there is one; None where there is not."""
        if self.is_reversed or not isinstance(self.step, int) or self.step < 1:
            return None
        some = self.start < self.stop
        if isinstance(some, Tensor):
            if sample_truth(recorder, some) is not True:
                return None
            recorder.branch(some, True, is_check=True)
        elif not recorder.symbols.decided(some) if isinstance(some, torch.SymBool) else not some:
            return None
        first = as_number(self.start.clone()) if isinstance(self.start, Tensor) else self.start
        return first, Range(self.start + self.step, self.stop, self.step)


def _of_samples(arg: Any) -> int:
    """The sample's number, guarded for runs."""
    recorder = recorder_for(arg) if isinstance(arg, Tensor) and arg.sample is not None else None
    if recorder is None or recorder.refuse is not None:  # in a loop, it may be another one in each iteration
        return int(arg)
    recorder.branch(arg == int(arg.sample), True, is_check=True)
    return int(arg.sample)


def _sign(step: Any) -> Any:
    return torch.sign(step) if isinstance(step, torch.Tensor) else (1 if step > 0 else -1)


class TensorRows:
    """The rows of tensors of a varying length: of one, of several together, or with their number."""

    def __init__(self, tensors: tuple[Any, ...], shape: Callable[..., Any], plain: Callable[[], Any]) -> None:
        self.tensors, self.shape, self.plain = tensors, shape, plain

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plain())

    def parted(self, recorder: Recorder) -> tuple[Any, TensorRows] | None:
        """The first row and the others, with a guard that there is one; None where the samples have no more."""
        count: Any = self.tensors[0].shape[0]
        are_more: Any = count >= 2
        if not isinstance(are_more, torch.SymBool) or not recorder.symbols.truth(are_more):
            return None
        recorder.symbols.decided(count >= 1)
        first = self.shape(0, *(tensor[0] for tensor in self.tensors))
        others = tuple(tensor[1:] for tensor in self.tensors)
        shape = self.shape
        return first, TensorRows(
            others, lambda index, *rows: shape(index + 1, *rows), lambda: itertools.islice(self, 1, None)
        )

    def stage(self, st: Statement, more: Any, body: Callable[[Any], None]) -> None:
        LoopStaging(st, by_size=True, entered=True).record(
            Iterations(more, lambda index, *rows: body(self.shape(index, *rows)), self.tensors, first=0)
        )


def iterations_of(items: object) -> Range | TensorRows | None:
    """How to stage a loop over these items; None where Python goes over them."""
    if isinstance(items, (Range, TensorRows)):
        return items
    if _varies(items):
        return TensorRows((items,), lambda index, row: row, lambda: items)
    return None


def _rows(item: object) -> TensorRows | None:
    """The rows that `enumerate` and `zip` may go over together with others."""
    found = iterations_of(item)
    return found if isinstance(found, TensorRows) else None


def _varies(item: object) -> bool:
    """Whether only a run knows how many rows there are."""
    return isinstance(item, Tensor) and item.dim() > 0 and isinstance(item.shape[0], torch.SymInt)


def _range(*args: Any) -> Any:
    args = tuple(map(recorded, args))
    known = all(not isinstance(arg, (torch.SymInt, Tensor)) for arg in args)
    whole = all(
        isinstance(arg, (int, torch.SymInt)) or (isinstance(arg, Tensor) and not arg.dim() and _is_whole(arg))
        for arg in args
    )
    return range(*args) if known or not whole or not 0 < len(args) < 4 else Range(*args)


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool


def _reversed(items: Sequence[Any]) -> Any:
    return reversed(plain(items))


def _enumerate(items: Any, start: Any = 0) -> Any:
    if isinstance(items, Generator):
        return items.numbered(start)
    rows = _rows(items)
    if rows is None:
        return enumerate(plain(items), start)
    shape = rows.shape
    return TensorRows(
        rows.tensors, lambda index, *each: (index + start, shape(index, *each)), lambda: enumerate(rows, start)
    )


def _as_long(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """As many rows of each tensor as the shortest has."""
    if len({getattr(getattr(x.shape[0], "node", None), "expr", x.shape[0]) for x in tensors}) == 1:
        return tensors
    count = functools.reduce(torch.sym_min, (x.shape[0] for x in tensors))
    return tuple(x.narrow(0, 0, count) for x in tensors)


def _zip(*items: object, strict: bool = False) -> Any:
    if not strict and any(map(_varies, items)) and all(isinstance(i, torch.Tensor) and i.dim() > 0 for i in items):
        items = _as_long(items)
    rows = [each for each in map(_rows, items) if each is not None]
    if not rows or len(rows) < len(items):
        return zip(*map(plain, items), strict=strict)
    if len({each.tensors[0].shape[0].node.expr for each in rows}) > 1:
        return zip(*rows, strict=strict)
    tensors = [each.tensors for each in rows]

    def shape(index: object, *found: object) -> tuple[Any, ...]:
        left = iter(found)
        return tuple(each.shape(index, *itertools.islice(left, len(each.tensors))) for each in rows)

    return TensorRows(tuple(itertools.chain(*tensors)), shape, lambda: zip(*rows, strict=strict))


def _len(item: Any) -> Any:
    if isinstance(item, Range) and len(item.args) == 1 and isinstance(item.stop, torch.SymInt):
        return item.stop
    if grown(item):
        return length(item)
    return item.shape[0] if _varies(item) else len(item)


def _list(*args: object) -> Any:
    """``list``, for a generator by appending in a loop, which may be staged."""
    if not args or not isinstance(args[0], Generator):
        return list(*args)
    found = made([])
    args[0].loop(Consumer(lambda each: OPERATORS.fn(found.append)(each), None, tuple, lambda _: None, ()))
    return found


def _print(*args: Any, **options: Any) -> None:
    if not status.quiet:
        print(*map(shown, args), **options)  # noqa: T201  the user's


def _given(item: object) -> Any:
    return item


def _are_sizes(items: list[Any]) -> bool:
    return all(type(item) in (int, torch.SymInt) for item in items) and torch.SymInt in map(type, items)


def _best(
    name: str, is_better: Callable[[Any, Any], Any], function: Callable[..., Any], of_sizes: Callable[[Any, Any], Any]
) -> Callable[..., Any]:  # fmt: skip
    """``max`` or ``min``: where a recorded number or a varying size is among the items, each run chooses."""

    def best(*items: object, **options: object) -> Any:
        items = tuple(map(plain, items))
        found = list(items[0]) if len(items) == 1 and isinstance(items[0], (list, tuple)) else list(items)
        if not options and len(found) > 1 and _are_sizes(found):
            return functools.reduce(of_sizes, found)
        if options or len(found) < 2 or not any(isinstance(item, Tensor) and not item.dim() for item in found):
            return function(*items, **options)
        first = found[0]
        for item in found[1:]:
            test = is_better(item, first)
            recorder = recorder_for(test)
            if recorder is None:
                first = item if test else first
            else:
                better, now = functools.partial(_given, item), functools.partial(_given, first)
                first = chosen(name, recorder, test, better, now)
        return first

    return best


def _bool(*args: object) -> Any:
    return bool(_len(args[0])) if args and grown(args[0]) else NUMBERS[bool](*args)


BUILTINS: dict[Any, Callable[..., Any]] = {
    **NUMBERS,
    range: _range, list: _list, reversed: _reversed, enumerate: _enumerate, zip: _zip, len: _len, print: _print,
    bool: _bool,
    max: _best("max", operator.gt, max, torch.sym_max), min: _best("min", operator.lt, min, torch.sym_min),
}  # fmt: skip
