"""`TensorArray`: an array whose elements are written once, as a value that loops carry and branches return.

It is two tensors, the elements as rows and which of them were written, so that it is nothing special to a graph: a
write gives another array, gradients are those of the rows. Semantics S-46.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import MappingKey, register_pytree_node, tree_flatten, tree_map

from tfnb.control_flow.structure import recorder_if_open, spec_of
from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Spec, Variable
from tfnb.kernels import arrays as _ops  # noqa: F401  defines torch.ops.tfnb
from tfnb.recording import Tensor

ops = torch.ops.tfnb


class TensorArray:
    """``size`` elements of one dtype and shape, each written once and read as often as you like. A value.

    size: a number, or a tensor with one. shape, dtype: of an element; those of the first one that is written, where
    they are not given. dynamic_size: a write behind the end makes the array longer. A write returns the array
    with that element, and leaves this one as it was. It is a loop variable and a branch's result like a tensor is.
    Gradients reach what was written, added up over all reads.

    Raises InvalidArgument for an element that is written twice, read before it is written, or not there; ShapeError
    or InvalidArgument for one of another shape or dtype.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.tensor(2.0), name="x")
    ...     powers = tfnb.TensorArray(4)
    ...     _, _, powers = tfnb.while_loop(
    ...         lambda i, y, powers: i < 4, lambda i, y, powers: (i + 1, y * x, powers.write(i, y)), (0, x, powers)
    ...     )
    ...     y = powers.stack()
    >>> tfnb.run(y, {x: 3.0})
    tensor([ 3.,  9., 27., 81.])
    """

    def __init__(
        self, size: Any = 0, *, shape: Sequence[Any] | None = None, dtype: torch.dtype | None = None,
        dynamic_size: bool = False,
    ) -> None:  # fmt: skip
        self.dynamic_size, self._dtype = dynamic_size, dtype
        self._rows: torch.Tensor | None = None
        size = _count(size)
        is_tensor = isinstance(size, torch.Tensor)
        self._written = ops.array_unwritten(size) if is_tensor else torch.zeros(size, dtype=torch.bool)
        if shape is not None:
            self._learn(shape, dtype or torch.get_default_dtype(), self._written.device)

    def _learn(self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device | str | None) -> None:
        """Nothing is written yet, of elements of this shape."""
        if None in shape:
            raise InvalidArgument(
                f"the elements of a TensorArray have one shape, not {list(shape)}: pad them, or carry what grows by "
                f"tfnb.while_loop with shape_invariants{_at()}"
            )
        self._rows = torch.zeros([self._written.shape[0], *shape], dtype=dtype, device=device)

    @property
    def is_blank(self) -> bool:
        """Whether the spec of elements is still unknown."""
        return self._rows is None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of an element; None while it is unknown."""
        return self._dtype if self._rows is None else self._rows.dtype

    @property
    def element_shape(self) -> tuple[Any, ...] | None:
        """The shape of an element; None while it is unknown."""
        return None if self._rows is None else self._rows.shape[1:]

    @property
    def varying(self) -> list[bool]:
        """For each tensor of the array: whether its axis 0 may change between iterations of a loop."""
        return [self.dynamic_size] * (1 if self._rows is None else 2)

    @property
    def spec(self) -> Spec | None:
        """The spec of an element, in a recording; None while it is unknown."""
        if not isinstance(self._rows, Tensor):
            return None if self._rows is None else Spec.of(self._rows[:0].sum(0))
        rows = spec_of(self._rows)
        return replace(rows, shape=rows.shape[1:])

    def __repr__(self) -> str:
        what = "elements of any kind" if self._rows is None else f"{self.dtype}{list(self.element_shape or ())}"
        return f"<TensorArray of {self._written.shape[0]} {what}>"

    # -- writing ----------------------------------------------------------------------------------------------

    def write(self, index: object, value: object) -> TensorArray:
        """The array with ``value`` as element ``index``."""
        return self._with(_index(index, 0), self._element(value))

    def scatter(self, indices: object, values: object) -> TensorArray:
        """The array with the rows of ``values`` as these elements."""
        values = self._element(values)
        return self._with(_index(indices, 1), values, several=True)

    def unstack(self, values: object) -> TensorArray:
        """An array of the rows of ``values``, as many as there are."""
        values = self._element(values)
        if not values.dim():
            raise ShapeError(f"unstack takes the rows of a tensor, and this is one number{_at()}")
        return self._like(values, torch.ones(values.shape[0], dtype=torch.bool, device=values.device))

    def split(self, values: object, length: int) -> TensorArray:
        """An array of parts of ``values`` with so many rows each; the inverse of `concat`."""
        return self.unstack(self._element(values).unflatten(0, (-1, length)))

    def _element(self, value: object) -> torch.Tensor:
        if isinstance(value, Variable):
            value = value.read()
        if not isinstance(value, torch.Tensor):
            value = torch.as_tensor(value, dtype=self.dtype)
        if self.dtype not in (None, value.dtype):
            raise InvalidArgument(f"an element of a TensorArray of {self.dtype} is written as {value.dtype}{_at()}")
        return value

    def _with(self, index: torch.Tensor, value: torch.Tensor, *, several: bool = False) -> TensorArray:
        shape = value.shape[1:] if several else value.shape
        if self._rows is None:
            blank = self._like(None, self._written)
            blank._learn(shape, value.dtype, value.device)
            return blank._with(index, value, several=several)
        self._fits(shape)
        rows, written = self._rows, self._written
        if recorder_if_open() is None:
            return self._like(*self._plain(rows, index, value))
        if self.dynamic_size:
            rows, written = _done(ops.array_grown, rows, written, index)
        return self._like(*_done(ops.array_write, rows, written, index, value))

    def _fits(self, shape: Sequence[Any]) -> None:
        """Raise ShapeError for an element of another shape."""
        mine = self.element_shape or ()
        if len(shape) != len(mine) or _apart(shape, mine):
            raise ShapeError(f"an element of shape {list(shape)} is written to a TensorArray of {list(mine)}{_at()}")

    def _plain(self, rows: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outside a recording: by ops that autograd knows, after the checks of ours."""
        known, written = rows.detach(), self._written
        if self.dynamic_size:
            known, written = _done(ops.array_grown, known, written, index)
            rows = torch.cat([rows, rows.new_zeros([len(known) - len(rows), *rows.shape[1:]])])
        _, written = _done(ops.array_write, known, written, index, value.detach())
        return rows.index_put((index,), value), written

    def _like(self, rows: torch.Tensor | None, written: torch.Tensor) -> TensorArray:
        made = TensorArray.__new__(TensorArray)
        made.dynamic_size, made._dtype = self.dynamic_size, self._dtype
        made._rows, made._written = rows, written
        return made

    # -- reading ----------------------------------------------------------------------------------------------

    def read(self, index: object) -> torch.Tensor:
        """Element ``index``."""
        return self._read(_index(index, 0))

    def gather(self, indices: object) -> torch.Tensor:
        """These elements, stacked."""
        return self._read(_index(indices, 1))

    def _read(self, index: torch.Tensor) -> torch.Tensor:
        rows = self._known("read")
        found = _done(ops.array_read, rows if recorder_if_open() else rows.detach(), self._written, index)
        return found if recorder_if_open() else rows[index]

    def stack(self) -> torch.Tensor:
        """All elements, [size, ...]; zeros where none was written."""
        rows = self._known("stacked")
        return rows + 0 if recorder_if_open() is None else rows.clone()

    def concat(self) -> torch.Tensor:
        """All elements, each [rows, ...], behind each other: [size * rows, ...]; raises ShapeError for numbers."""
        rows = self._known("concatenated")
        if rows.dim() < 2:
            raise ShapeError(f"concat takes elements that have rows, and these are numbers: use stack{_at()}")
        return rows.flatten(0, 1)

    def size(self) -> torch.Tensor:
        """How many elements there are, int64."""
        return torch.ops.aten.scalar_tensor(self._written.shape[0], dtype=torch.int64)

    def _known(self, how: str) -> torch.Tensor:
        if self._rows is None:
            raise InvalidArgument(
                f"a TensorArray is {how} before anything says what its elements are: write one, or give shape={_at()}"
            )
        return self._rows


def _count(size: object) -> Any:
    """A validated number of elements; the value of a tensor is checked at run time."""
    size = size.read() if isinstance(size, Variable) else size
    if isinstance(size, torch.Tensor):
        is_number = size.numel() == 1 and not (size.is_floating_point() or size.is_complex())
    else:
        is_number = isinstance(size, torch.SymInt) or (type(size) is int and size >= 0)
    if not is_number:
        raise InvalidArgument(f"a TensorArray has a whole number of elements, not {size!r}{_at()}")
    return size


def _index(index: object, rank: int) -> torch.Tensor:
    index = index.read() if isinstance(index, Variable) else torch.as_tensor(index)
    if index.dtype.is_floating_point or index.dtype in (torch.bool, torch.complex64) or index.dim() > rank:
        what = "one whole number" if rank == 0 else "a list of whole numbers"
        raise InvalidArgument(f"the index into a TensorArray is {what}, not {index.dtype}{list(index.shape)}{_at()}")
    return index.reshape([1]) if rank and not index.dim() else index


def _done(op: Callable[..., Any], *args: torch.Tensor) -> Any:
    """Run an op; an element out of range raises the same error as in a run."""
    try:
        return op(*args)
    except IndexError as error:
        raise InvalidArgument(f"{error}{_at()}") from None


def _apart(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    return any(type(a) is int and type(b) is int and a != b for a, b in zip(shape, other, strict=True))


def _at() -> str:
    recorder = recorder_if_open()
    return "" if recorder is None else recorder.tape.at()


# -- as a structure of tensors ------------------------------------------------------------------------------------


def _flatten(array: TensorArray) -> tuple[list[Any], Any]:
    rows = [] if array._rows is None else [array._rows]
    return [*rows, array._written], (array.dynamic_size, None if rows else array._dtype, bool(rows))


def _flatten_with_keys(array: TensorArray) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, context = _flatten(array)
    names = ("elements", "written") if context[-1] else ("written",)
    return [(MappingKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], context


def _unflatten(leaves: Any, context: Any) -> TensorArray:
    array, left = TensorArray.__new__(TensorArray), iter(leaves)
    array.dynamic_size, array._dtype, has_rows = context
    array._rows, array._written = next(left) if has_rows else None, next(left)
    return array


register_pytree_node(
    TensorArray, _flatten, _unflatten, serialized_type_name="tfnb.TensorArray",
    flatten_with_keys_fn=_flatten_with_keys,
)  # fmt: skip


def is_array(item: object) -> bool:
    """For the walks that take an array as one thing."""
    return isinstance(item, TensorArray)


def arrays(items: object) -> list[TensorArray]:
    """The arrays among nested structures."""
    return [item for item in tree_flatten(items, is_leaf=is_array)[0] if is_array(item)]


def has_blanks(items: object) -> bool:
    """Whether some array does not know its elements yet."""
    return any(array.is_blank for array in arrays(items))


def filled(items: object, specs: Sequence[Spec | None], shapes: Sequence[Sequence[Any]]) -> Any:
    """The structure, with blank arrays that know their elements: by the spec and shape of one, for each array."""
    found = iter(zip(specs, shapes, strict=True))

    def one(item: Any) -> Any:
        spec, shape = next(found, (None, ())) if is_array(item) else (None, ())
        if spec is None or not item.is_blank:
            return item
        made = item._like(None, item._written)
        made._learn(shape, spec.dtype, spec.device)
        return made

    return tree_map(one, items, is_leaf=is_array)
