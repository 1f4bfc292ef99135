"""IndexedSlices: a gradient with values for some rows of a table, and its operations.

A row named twice gets the sum. `CLOSED` is the table of what keeps the form: linear maps act on the entries as they
are; a map f with f(0) = 0 acts on the distinct rows, after `coalesce`. Everything else needs `to_dense`, which no
operator calls by itself: the node is tagged ``densified``, and the recording notes the line and the bytes. Within a
backward pass cotangents of values that are no tables become dense without a note. Works on recorded and on plain
tensors. Imports recording.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from numbers import Real
from operator import add
from typing import Any

import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Graph, Spec, Variable, current
from tfnb.graph.spec import flows, is_static
from tfnb.kernels import sparse_rows as _ops  # noqa: F401  defines torch.ops.tfnb
from tfnb.recording import Recorder, Tensor
from tfnb.recording.marks.notes import user_level
from tfnb.recording.values.recording import Recording

DENSIFIED = frozenset({"densified"})  # tag of a node that makes slices dense
MANY = 100_000_000  # elements; a larger densification warns


class IndexedSlices:
    """A row-sparse tensor: row ``indices[k]`` of a tensor of ``dense_shape`` gets ``values[k]``; other rows are zero.

    values: [n, ...], indices: [n] integers, dense_shape: [rows, ...]. Duplicate indices mean the sum. It is what
    `gradients` gives for a table that is only looked up by row; it can be fetched, fed, scaled, added, cast, clipped,
    concatenated and split. Raises ShapeError or InvalidArgument for parts that do not fit each other.

    >>> g = IndexedSlices(torch.tensor([[3.0], [4.0], [1.0]]), torch.tensor([1, 1, 0]), (3, 1))
    >>> (2 * g).to_dense().flatten()
    tensor([ 2., 14.,  0.])
    >>> g.coalesce().indices
    tensor([0, 1])
    """

    def __init__(self, values: object, indices: object, dense_shape: Sequence[int]) -> None:
        self.values: torch.Tensor = values if isinstance(values, torch.Tensor) else torch.as_tensor(values)
        self.indices: torch.Tensor = indices if isinstance(indices, torch.Tensor) else torch.as_tensor(indices)
        self.dense_shape = tuple(dense_shape)
        self.name = "IndexedSlices"  # of the variable whose gradient it is
        self.is_distinct = False  # no row has two entries
        self._check()

    def _check(self) -> None:
        values, indices = _sizes(self.values), _sizes(self.indices)
        if self.indices.dtype.is_floating_point or self.indices.dtype in (torch.bool, torch.complex64):
            raise InvalidArgument(f"the indices of IndexedSlices are row numbers, not {self.indices.dtype}")
        fits = len(indices) == 1 and len(values) == len(self.dense_shape) > 0
        pairs = [(values[0], indices[0]), *zip(values[1:], self.dense_shape[1:], strict=True)] if fits else []
        if not fits or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
            raise ShapeError(
                f"IndexedSlices of {list(self.dense_shape)} needs values [n, {', '.join(map(str, self.shape[1:]))}] "
                f"and indices [n]: got {list(values)} and {list(indices)}"
            )

    # -- like a tensor ----------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense tensor that is meant."""
        return torch.Size(self.dense_shape)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of ``values``."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes that a dense copy would take."""
        return math.prod(self.dense_shape) * self.dtype.itemsize

    def dim(self) -> int:
        """Number of axes."""
        return len(self.dense_shape)

    @property
    def graph(self) -> Graph:
        """The graph of the recording."""
        return self.values.graph  # type: ignore[attr-defined,no-any-return]

    @property
    def sample(self) -> IndexedSlices:
        """Plain values while recording."""
        return self.like(current.plain(self.values), current.plain(self.indices))

    def eval(self, feed_dict: Mapping[Any, Any] | None = None) -> IndexedSlices:
        """The value in the default session of its graph."""
        from tfnb.session import run  # listed exception: .eval asks the session

        return run(self, feed_dict)

    def __repr__(self) -> str:
        entries = Spec(self.dtype, _sizes(self.values), str(self.device))
        return f"<IndexedSlices {self.name}: {list(self.dense_shape)}, entries {entries}>"

    # -- to other forms ---------------------------------------------------------------------------------------

    def like(self, values: torch.Tensor, indices: torch.Tensor | None = None) -> IndexedSlices:
        """Other values in the same rows, or the same entries elsewhere."""
        made = IndexedSlices(values, self.indices if indices is None else indices, self.dense_shape)
        made.name, made.is_distinct = self.name, self.is_distinct
        return made

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> IndexedSlices:
        """``function`` applied to the values of the distinct rows; must map zero to zero."""
        rows = self.coalesce()
        return rows.like(function(rows.values))

    def called(self, name: str) -> IndexedSlices:
        """The same under another name, for messages."""
        made = self.like(self.values)
        made.name = name
        return made

    def canonical(self) -> IndexedSlices:
        """The same entries with row numbers from 0, as the outputs of one node.

        By that node others know that the two belong together. If data-parallel tasks divide the rows, their entries are
        concatenated, so the result no longer counts as coalesced.
        """
        v, i = self.values, self.indices
        if isinstance(v, Tensor) and isinstance(i, Tensor) and v.node is i.node and v.node.op == "tfnb.slices.default":
            return self
        made = self.like(*torch.ops.tfnb.slices(self.values, self.indices, self.dense_shape[0]))
        made.is_distinct = False
        return made

    def coalesce(self) -> IndexedSlices:
        """Distinct rows in ascending order, duplicates summed in their order. Raises for a row that is not there."""
        if self.is_distinct:
            return self
        rows = self.canonical()
        made = self.like(*torch.ops.tfnb.coalesce(rows.values, rows.indices, self.dense_shape[0])[:2])
        made.is_distinct = True
        return made

    def to_dense(self, why: str = "", *, noted: bool = True) -> torch.Tensor:
        """The dense tensor. A recording notes line, bytes and ``why``, with a warning above 100 000 000 elements."""
        rows = self.canonical()
        with _densifying(self, why) if noted else nullcontext():
            return torch.ops.tfnb.densify(rows.values, rows.indices, self.dense_shape[0])

    # -- the closed algebra -----------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__.removeprefix("linalg_").strip("_")
        if name not in CLOSED:
            raise _needs_dense(name, next(x for x in _flat((args, kwargs)) if isinstance(x, IndexedSlices)))
        return CLOSED[name](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in CLOSED:
            return partial(CLOSED[name], self)
        if name.startswith("_") or not callable(getattr(torch.Tensor, name, None)):
            raise AttributeError(f"IndexedSlices has no attribute {name!r}")

        def refuse(*args: object, **kwargs: object) -> Any:
            raise _needs_dense(name, self)

        return refuse


def _sizes(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.spec.shape) if isinstance(x, Tensor) else tuple(x.shape)


def _flat(tree: object) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    for part in tree:
        yield from _flat(part)


def _needs_dense(name: str, g: IndexedSlices) -> InvalidArgument:
    recording = current.recording()
    at = recording.tape.at() if isinstance(recording, Recorder) else ""
    return InvalidArgument(
        f"{name} does not keep the row-sparse form of {g.name}: a dense {Spec(g.dtype, g.dense_shape)} takes "
        f"{g.nbytes} bytes. Call .to_dense() first if that is meant{at}",
        op=name,
    )


def _densifying(g: IndexedSlices, why: str = "") -> AbstractContextManager[None]:
    recording = current.recording()
    is_recorded = isinstance(recording, Recorder) and isinstance(g.values, Tensor)
    return densifying(g.name, Spec(g.dtype, g.dense_shape), why, recording if is_recorded else None)  # type: ignore[arg-type]


@contextmanager
def densifying(name: str, spec: Spec, why: str, recorder: Recording | None) -> Iterator[None]:
    """Inside, nodes that make the gradient ``name`` dense are tagged and noted; large ones warn."""
    count = math.prod(spec.shape) if is_static(spec.shape) else None  # None: as many rows as a batch looks up
    size = "some rows" if count is None else f"{count * spec.dtype.itemsize} bytes"
    at = (recorder.where() if recorder else None) or "here"
    text = f"{at}: {name} {list(spec.shape)} becomes dense, {size}{why and ': '}{why}"
    if count is not None and count > MANY:
        warnings.warn(text, stacklevel=user_level(None))
    if recorder is None:
        yield
        return
    if count is not None and text not in recorder.tape.notes:
        recorder.tape.notes.append(text)
    with recorder.tagged(DENSIFIED, recorder.tape.marks.forward):
        yield


def added(parts: Iterable[torch.Tensor | IndexedSlices], *, noted: bool = True) -> Any:
    """The sum of partial gradients: slices are put behind each other, slices with dense tensors become dense."""
    parts = list(parts)
    slices = [p for p in parts if isinstance(p, IndexedSlices)]
    dense = [p for p in parts if not isinstance(p, IndexedSlices)]
    if not slices:
        return reduce(add, dense)
    rows = slices[0]
    if len(slices) > 1:
        rows = IndexedSlices(
            torch.cat([g.values for g in slices]), torch.cat([g.indices for g in slices]), rows.dense_shape
        ).called(rows.name)
    if not dense:
        return rows
    total, rows = reduce(add, dense), rows.canonical()
    with (
        _densifying(rows) if noted else nullcontext()
    ):  # no zeros are made: there is a dense tensor of that size already
        return total.index_add(0, rows.indices, rows.values.to(total.dtype))


# -- the table --------------------------------------------------------------------------------------------------

CLOSED: dict[str, Callable[..., Any]] = {}
"""What keeps the form (or gives a scalar), by the name of the torch function."""


def closed(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under names of torch functions."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CLOSED.update(dict.fromkeys(names, function))
        return function

    return register


def _linear(name: str) -> Callable[..., Any]:
    """f(a + b) = f(a) + f(b): entry by entry."""

    def apply(g: IndexedSlices, *args: object, **kwargs: object) -> IndexedSlices:
        values = getattr(torch.Tensor, name)(g.values, *args, **kwargs)
        if not flows(values.dtype):
            raise _needs_dense(f"{name} to {values.dtype}", g)
        return g.like(values, g.indices.to(values.device))

    return apply


def _from_zero(name: str) -> Callable[..., Any]:
    """f(0) = 0: on distinct rows."""

    def apply(g: IndexedSlices) -> IndexedSlices:
        return g.map(getattr(torch.Tensor, name))

    return apply


_LINEAR = "bfloat16 clone contiguous cpu cuda detach double float half neg negative positive to type"
_FROM_ZERO = """
    abs absolute arcsinh arctan asin asinh atan ceil erf expm1 fix floor frac log1p nan_to_num relu round sgn sign sin
    sinh sqrt square tan tanh trunc
"""
CLOSED.update({name: _linear(name) for name in _LINEAR.split()})
CLOSED.update({name: _from_zero(name) for name in _FROM_ZERO.split()})


def _factor(name: str, g: IndexedSlices, factor: Any) -> Any:
    """The factor for the entries of ``g``, given the dense ``factor``: one for all rows, or one for each entry."""
    if isinstance(factor, Variable):
        factor = factor.read()
    if isinstance(factor, Real):
        return factor
    sizes = _sizes(factor) if isinstance(factor, torch.Tensor) else None
    lead = -1 if sizes is None else len(g.dense_shape) - len(sizes)
    if sizes is None or lead < 0 or any(f not in (1, d) for f, d in zip(sizes, g.dense_shape[lead:], strict=True)):
        raise _needs_dense(f"{name} by {type(factor).__name__} {list(sizes or ())}", g)
    has_rows = lead == 0 and sizes[0] != 1
    return factor.index_select(0, g.canonical().indices) if has_rows else factor


@closed("mul", "multiply", "rmul")
def _mul(a: Any, b: Any) -> IndexedSlices:
    g, factor = (a, b) if isinstance(a, IndexedSlices) else (b, a)
    return g.like(g.values * _factor("mul", g, factor))


@closed("div", "divide", "true_divide", "truediv")
def _div(g: object, by: Any) -> IndexedSlices:
    if not isinstance(g, IndexedSlices):
        raise _needs_dense("division by", by)
    return g.like(g.values / _factor("div", g, by))


@closed("add", "radd")
def _add(a: Any, b: Any, *, alpha: float | torch.Tensor = 1) -> Any:
    g = a if isinstance(a, IndexedSlices) else b
    if any(isinstance(x, Real) and x == 0 for x in (a, b)):  # Python's sum starts with 0
        return g
    for x in (a, b):
        if not isinstance(x, (IndexedSlices, torch.Tensor)) or tuple(x.shape) != tuple(g.shape):
            raise _needs_dense(f"add of {type(x).__name__} {list(getattr(x, 'shape', ()))}", g)
    return added([a, b if isinstance(alpha, Real) and alpha == 1 else b * alpha])


@closed("sub", "subtract")
def _sub(a: Any, b: Any, *, alpha: float | torch.Tensor = 1) -> Any:
    return _add(a, b * -alpha)


@closed("rsub")
def _rsub(a: Any, b: Any) -> Any:
    return _add(b, -a)


@closed("pow")
def _pow(g: object, exponent: object) -> IndexedSlices:
    if not isinstance(g, IndexedSlices) or not isinstance(exponent, (int, float)) or exponent <= 0:
        raise _needs_dense("pow with an exponent that is no number above 0", _first(g, exponent))
    return g.map(lambda rows: torch.pow(rows, exponent))


@closed("clamp", "clip", "clamp_min", "clamp_max")
def _clamp(g: IndexedSlices, min: Any = None, max: Any = None) -> IndexedSlices:
    for bound, is_low in ((min, True), (max, False)):
        if bound is not None and not (isinstance(bound, (int, float)) and (bound <= 0 if is_low else bound >= 0)):
            raise _needs_dense(f"clamp between {min} and {max}, which do not enclose 0,", g)
    return g.map(lambda rows: torch.clamp(rows, min, max))


CLOSED["clamp_max"] = lambda g, max: _clamp(g, None, max)


@closed("sum")
def _sum(g: IndexedSlices) -> torch.Tensor:
    return g.values.sum()


@closed("norm", "vector_norm")
def _norm(g: IndexedSlices, ord: object = 2) -> torch.Tensor:
    if not isinstance(ord, Real) or ord <= 0:
        raise _needs_dense(f"norm of order {ord}", g)
    return torch.linalg.vector_norm(g.coalesce().values, ord)


@closed("cat", "concat", "concatenate")
def _cat(parts: Sequence[Any], dim: int = 0, **kwargs: Any) -> IndexedSlices:
    g, axis = _first(*parts), kwargs.get("axis", dim)
    if not all(isinstance(p, IndexedSlices) for p in parts):
        raise _needs_dense("cat with dense tensors", g)
    axis = axis % len(g.dense_shape)
    starts = _starts([p.dense_shape[axis] for p in parts])
    shape = list(g.dense_shape)
    shape[axis] = starts.pop()
    if axis == 0:
        indices = [p.canonical().indices + start for p, start in zip(parts, starts, strict=True)]
        values = [p.values for p in parts]
    else:
        indices = [p.indices for p in parts]
        values = [_padded(p.values, axis, s, shape[axis]) for p, s in zip(parts, starts, strict=True)]
    return IndexedSlices(torch.cat(values), torch.cat(indices), shape).called(g.name)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Start offset of each part, and the end of the last one."""
    return reduce(lambda found, size: [*found, found[-1] + size], sizes, [0])


def _padded(values: torch.Tensor, axis: int, start: int, whole: int) -> torch.Tensor:
    """``values`` padded with zeros to length ``whole``."""
    return torch.constant_pad_nd(
        values, [0, 0] * (values.dim() - 1 - axis) + [start, whole - start - _sizes(values)[axis]]
    )


@closed("split", "split_with_sizes")
def _split(g: IndexedSlices, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[IndexedSlices, ...]:
    axis = dim % len(g.dense_shape)
    whole, sizes = g.dense_shape[axis], split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    starts = _starts(sizes)
    if starts.pop() != whole:
        raise ShapeError(f"split sizes {list(sizes)} do not add up to {whole}, axis {axis} of {g.name}")
    return tuple(_part(g, axis, start, size) for start, size in zip(starts, sizes, strict=True))


@closed("chunk")
def _chunk(g: IndexedSlices, chunks: int, dim: int = 0) -> tuple[IndexedSlices, ...]:
    return _split(g, -(-g.dense_shape[dim] // chunks), dim)


def _part(g: IndexedSlices, axis: int, start: int, size: int) -> IndexedSlices:
    shape = [*g.dense_shape[:axis], size, *g.dense_shape[axis + 1 :]]
    if axis:
        return IndexedSlices(g.values.narrow(axis, start, size), g.indices, shape).called(g.name)
    g = g.canonical()
    inside = (g.indices >= start) & (g.indices < start + size)
    kept = inside.nonzero().reshape(-1)
    values, indices = g.values.index_select(0, kept), g.indices.index_select(0, kept) - start
    return IndexedSlices(values, indices, shape).called(g.name)


def _first(*items: object) -> IndexedSlices:
    return next(x for x in items if isinstance(x, IndexedSlices))


_OPERATORS = """
    abs add floordiv ge getitem gt le lt matmul mod mul neg pow radd rmul rpow rsub rtruediv sub truediv
"""


def _operators() -> None:
    """Install the operators of the table, and errors with a remedy for the others."""

    def install(name: str) -> None:
        def operator(self: IndexedSlices, *args: object) -> Any:
            if name not in CLOSED:
                raise _needs_dense(name, self)
            return CLOSED[name](self, *args)

        setattr(IndexedSlices, f"__{name}__", operator)

    for name in _OPERATORS.split():
        install(name)


_operators()
