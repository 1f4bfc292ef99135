"""Feeds: from a user's values to tensors that fit the graph, or an error naming the misfit.

dtype changes must be lossless, but for float64 and complex128, which are rounded with a note; every symbol gets one
size; guards of the recording are checked before the run.
"""

from __future__ import annotations

import difflib
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

from tfnb.errors import FeedError, ShapeError
from tfnb.graph import Dim, Graph, Guard, Node, Spec, Value, current
from tfnb.graph.node import where
from tfnb.graph.spec import dtype_name, is_rounded, rounded
from tfnb.recording.marks.notes import user_level
from tfnb.state.chunks import as_tensor

T = TypeVar("T")

Shapes = tuple[torch.Size, ...]
Fed = tuple[list[torch.Tensor], Shapes]
_STRIDED = torch.strided
MOST_FITTING = 64  # shapes of a signature that are known to fit


@dataclass(frozen=True, slots=True)
class _Row:
    """The requirements of one feed key.

    dtype: of CPU tensors that can be taken as they are; None where none can. fixed: see `Node.fixed`.
    """

    name: str
    spec: Spec
    count: int  # how many values it stands for
    source: object
    dtype: torch.dtype | None
    fixed: tuple[str, ...]
    value: Value
    noted: set[Value]  # values of the graph of whose rounded feeds a note was given

    @classmethod
    def of(cls, name: str, spec: Spec, count: int, node: Node, value: Value, noted: set[Value]) -> _Row:
        ready = spec.device == "cpu" and not spec.dtype.is_complex  # a complex one may be conjugate in name only
        return cls(name, spec, count, node.source, spec.dtype if ready else None, node.fixed, value, noted)

    def tensor(self, value: object) -> torch.Tensor:
        """The value as a tensor that may still have a shape that does not fit."""
        if (
            type(value) is torch.Tensor and value.dtype is self.dtype and value.is_cpu and value.layout is _STRIDED
            and not value.is_nested and value.is_contiguous() and not value.requires_grad
        ):  # fmt: skip
            return value
        tensor, wanted = plain(value, self.spec, self.name, self.source), self.spec.dtype
        if tensor.dtype is not wanted and torch.promote_types(tensor.dtype, wanted) is not wanted:
            tensor = self._rounded(tensor)
        return _moved(tensor, self.spec, self.name, self.source).contiguous()

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of more digits than the spec's, in its dtype; one note for each value of a graph."""
        dtype, spec = tensor.dtype, self.spec
        if not is_rounded(dtype, spec.dtype):
            raise FeedError(
                f"cannot feed {dtype_name(dtype)} for {self.name}, which is {spec}: values would be lost; "
                f"convert it with .to(torch.{dtype_name(spec.dtype)}){_at(self.source)}", node=self.name,
            )  # fmt: skip
        found = rounded(tensor, spec.dtype, self.name)
        if self.value not in self.noted:
            self.noted.add(self.value)
            warnings.warn(
                f"{dtype_name(dtype)} is fed for {self.name}, which is {spec}: numbers are rounded at each feed. "
                f"To round them once: torch.as_tensor(data, dtype={spec.dtype}){_at(self.source)}",
                stacklevel=user_level(None),
            )
        return found


class Feeder:
    """Checks and converts the feeds of one signature."""

    def __init__(self, graph: Graph, keys: Iterable[tuple[Any, tuple[Value, ...]]]) -> None:
        by_id = graph.contents.by_id
        self._rows: list[_Row] = []
        noted: set[Value] = graph.attached.setdefault("rounded feeds", set())
        values: list[Value] = []
        for key, targets in keys:
            node = by_id[targets[0].node]
            if targets[0].index >= len(node.outputs):
                raise FeedError(f"cannot feed {node.name}: it has no value", node=node.name, op=node.op)
            if targets[0] in values:
                raise FeedError(f"{node.name} is fed twice (as {key!r} and under another key)", node=node.name)
            values.extend(targets)
            index = f":{targets[0].index}" if targets[0].index else ""
            spec = node.outputs[targets[0].index]
            self._rows.append(_Row.of(f"{node.name}{index}", spec, len(targets), node, targets[0], noted))
        self.values = tuple(values)
        self.repeats = len(values) != len(self._rows)
        self._fitting: set[Shapes] = set()
        shown = {s for row in self._rows for s in row.spec.symbols}
        self._guards = tuple(g for g in graph.guards if set(g.symbols) <= shown)

    def narrow(self, nodes: Iterable[Node]) -> None:
        """Check only the guards that a run of these nodes relies on."""
        nodes = tuple(nodes)
        self._guards = tuple(guard for guard in self._guards if guard.concerns(nodes))
        self._fitting.clear()

    def fed(self, given: Iterable[Any]) -> Fed:
        """One tensor for each of ``values``, and their shapes; raises FeedError or ShapeError.

        What sizes fit together is looked at once for each choice of shapes.
        """
        __tracebackhide__ = True
        tensors = [row.tensor(value) for row, value in zip(self._rows, given, strict=True)]
        if self.repeats:
            tensors = [tensor for row, tensor in zip(self._rows, tensors, strict=True) for _ in range(row.count)]
        shapes = tuple([tensor.shape for tensor in tensors])
        if shapes not in self._fitting:
            self._ensure_fit(shapes)
        return tensors, shapes

    def converted(self, given: Iterable[Any]) -> list[torch.Tensor]:
        """`fed` without a check of shapes: for arrays from which a step takes some rows."""
        __tracebackhide__ = True
        return self.spread([row.tensor(value) for row, value in zip(self._rows, given, strict=True)])

    def spread(self, given: Iterable[T]) -> list[T]:
        """The value given for each key, repeated for each of its ``values``."""
        return [value for row, value in zip(self._rows, given, strict=True) for _ in range(row.count)]

    def more(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What is fed beside the values of a batch: nothing."""
        return ()

    def _ensure_fit(self, shapes: Shapes) -> None:
        __tracebackhide__ = True
        symbols: dict[str, int] = {}
        places = itertools.accumulate([row.count for row in self._rows], initial=0)
        fed = [(shapes[place], row) for row, place in zip(self._rows, places, strict=False)]
        for shape, row in fed * 2:  # a size may be an expression of one that a later feed shows
            _fit(shape, row, symbols)
        self._check_guards(self._guards, symbols)
        if len(self._fitting) == MOST_FITTING:
            self._fitting.clear()
        self._fitting.add(shapes)

    @property
    def names(self) -> list[str]:
        """The name of each key."""
        return [row.name for row in self._rows]

    def take(self, place: int, value: object, symbols: dict[str, int]) -> dict[int, torch.Tensor]:
        """The feed of key number ``place`` alone: tensors by their place among ``values``.

        ``symbols`` holds the sizes that earlier feeds showed, and gets those of this one.
        """
        row = self._rows[place]
        tensor = row.tensor(value)
        _fit(tensor.shape, row, symbols)
        self._check_guards(tuple(g for g in self._guards if set(g.symbols) <= symbols.keys()), symbols)
        first = sum(row.count for row in self._rows[:place])
        return dict.fromkeys(range(first, first + row.count), tensor)

    def _check_guards(self, guards: Iterable[Guard], symbols: dict[str, int]) -> None:
        for guard in guards:
            if not _holds(guard, symbols):
                sizes = ", ".join(f"{s} = {symbols[s]}{self._axes_of(s)}" for s in guard.symbols)
                raise ShapeError(
                    f"the graph was recorded for {guard.expr}, and these feeds have {sizes}{_at(guard.source)}\n"
                    "  record it again with such a sample, or avoid deciding by the size in that line",
                    **where(guard.source),
                )

    def _axes_of(self, symbol: str) -> str:
        """`` (axis 0 of x)``: the feeds that show a symbol."""
        axes = ((axis, row.name, size) for row in self._rows for axis, size in enumerate(row.spec.shape))
        found = [f"axis {axis} of {name}" for axis, name, size in axes if isinstance(size, Dim) and size.expr == symbol]
        return f" ({', '.join(found)})" if found else ""


def plain(value: object, spec: Spec, name: str, source: object) -> torch.Tensor:
    """The value as a dense tensor without a gradient, of a dtype and on a device that may not be the spec's."""
    if isinstance(value, torch.Tensor):
        tensor = current.plain(value)
        if tensor.layout is not _STRIDED or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").strip("_")
            hint = "torch.nested.to_padded_tensor" if tensor.is_nested else ".to_dense()"
            raise FeedError(
                f"cannot feed a {kind} tensor for {name}, which is {spec}: make it dense with {hint}{_at(source)}",
                node=name,
            )
        if tensor.requires_grad or tensor.is_conj():
            tensor = tensor.detach().resolve_conj()
        return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)
    if isinstance(value, (list, tuple, int, float, complex)):
        return _from_python(value, spec, name)
    try:
        return as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_tensor(value, spec, name, error) from None


def _no_tensor(value: object, spec: Spec, name: str, error: Exception) -> FeedError:
    return FeedError(f"cannot feed {type(value).__name__} for {name}, which is {spec}: {error}", node=name)


def _moved(tensor: torch.Tensor, spec: Spec, name: str, source: object) -> torch.Tensor:
    """On the device of the spec, in its dtype. From pinned memory the step does not wait for the copy."""
    if tensor.is_cpu if spec.device == "cpu" else spec.is_on(tensor.device):
        return tensor if tensor.dtype is spec.dtype else tensor.to(spec.dtype)
    if tensor.device.type not in ("cpu", "meta"):
        _say_once(f"each step moves what is fed for {name} from {tensor.device} to {spec.device}{_at(source)}")
    try:
        return tensor.to(device=spec.device, dtype=spec.dtype, non_blocking=tensor.is_cpu and tensor.is_pinned())
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        raise FeedError(
            f"cannot feed {name}, which is {spec}: {str(error).partition('. ')[0]}{_at(source)}", node=name
        ) from None


@lru_cache(maxsize=256)
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=user_level(None))


def _from_python(value: Any, spec: Spec, name: str) -> torch.Tensor:
    """Numbers and nested lists have no dtype of their own: floats fit any float, ints any number."""
    is_float = isinstance(value, float) and spec.dtype.is_floating_point
    if is_float and (abs(value) <= torch.finfo(spec.dtype).max or not math.isfinite(value)):
        return torch.as_tensor(value, dtype=spec.dtype)
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_tensor(value, spec, name, error) from None
    if tensor.dtype.is_floating_point and spec.dtype.is_floating_point:
        return rounded(torch.as_tensor(value, dtype=torch.float64), spec.dtype, name)
    if tensor.dtype is torch.int64 and spec.dtype is not torch.bool:
        return torch.as_tensor(value, dtype=spec.dtype)
    return tensor


def _fit(given: torch.Size, row: _Row, symbols: dict[str, int]) -> None:
    """Bind the symbols of a shape, or raise ShapeError with the misfit."""
    spec, why = row.spec, ""
    if spec.fits(given, symbols):
        return
    if len(given) == len(spec.shape):
        letters = [(size, of.expr) for size, of in zip(given, spec.shape, strict=True) if isinstance(of, Dim)]
        clash = next((letter for size, letter in letters if symbols.get(letter, size) != size), None)
        why = _fixed(given, row) if clash is None else f": {clash} is {symbols[clash]} in another feed"
    raise ShapeError(
        f"Cannot feed value of shape {tuple(given)} for Tensor {row.name}, which has shape {_shape(spec)}{why}"
        f"{_at(row.source)}", node=row.name,
    )  # fmt: skip


def _fixed(given: torch.Size, row: _Row) -> str:
    """Why axes of another length than the recording's do not vary, and how they would."""
    lines = row.fixed or ("",) * len(given)
    axes = [axis for axis, size in enumerate(row.spec.shape) if isinstance(size, int) and size != given[axis]]
    asked = [
        f": axis {axis} varied, and became the constant {row.spec.shape[axis]} at {lines[axis]}\n"
        "  write that line without this size as a Python number (a `for` over it in a cell or @tfnb.autograph "
        "function), or record again with a sample of this size"
        for axis in axes
        if lines[axis]
    ]
    declared = [str(axis) for axis in axes if not lines[axis]]
    if declared:
        names = f"axis {declared[0]} is" if len(declared) == 1 else f"axes {', '.join(declared)} are"
        asked.append(
            f": {names} fixed by its recording; placeholder(sample, shape=(None, ...)) names the axes that vary by None"
        )
    return "".join(asked)


def _holds(guard: Guard, symbols: dict[str, int]) -> bool:
    try:
        return bool(Dim(guard.expr).evaluate(symbols))
    except ShapeError:  # a division by an axis of length 0
        return False


def _shape(spec: Spec) -> str:
    return "(" + ", ".join(map(str, spec.shape)) + ("," if len(spec.shape) == 1 else "") + ")"


def _at(source: object) -> str:
    return f"\n  recorded at {source}" if source else ""


def described(tensor: torch.Tensor) -> str:
    """``float32[3, 4]`` of a plain tensor."""
    return str(Spec.of(tensor))


_GIVEN = ("tfnb.placeholder", "tfnb.read", "tfnb.constant")


def listing(graph: Graph, limit: int = 8) -> str:
    """A few names for suggestions: placeholders, and results of the user's own lines."""
    forward = [n for n in graph.nodes if n.tags.isdisjoint(("gradient", "update"))]
    consumed = {v.node for n in forward for v in n.inputs}
    results = (n for n in forward if n.id not in consumed and n.outputs and n.op not in _GIVEN)
    names = [graph.contents.shown(n) for n in (*graph.placeholders, *results)]
    return ", ".join(names[:limit]) + (" ..." if len(names) > limit else "")


def near(name: str, names: Iterable[str]) -> str:
    """``; did you mean X?`` for a near name, else nothing."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {found[0]}?" if found else ""
