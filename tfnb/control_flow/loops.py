"""Loops over recorded tensors: `while_loop`, and `scan`, `fold` and `map_fn` over the rows of sequences.

Semantics S-121, S-130. Outside a recording they are plain Python loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from tfnb.control_flow.structure import (
    flat,
    form_text,
    names,
    recorder_if_open,
    sample_truth,
    spec_of,
    tensors,
    truth,
    written_at,
)
from tfnb.control_flow.tensor_array import arrays, filled, has_blanks, is_array
from tfnb.errors import InvalidArgument, ShapeError, TfnbError
from tfnb.graph import Spec, Variable
from tfnb.graph.spec import tensor_of
from tfnb.recording import Recorder, Tensor
from tfnb.recording.subgraphs.capture import Argument, attempt, bound_outside, record_region
from tfnb.recording.subgraphs.loop_node import LoopRecorder


def while_loop(
    cond: Callable[..., Any], body: Callable[..., Any], init: object, *,
    maximum_iterations: int | torch.SymInt | torch.Tensor | None = None,
    parallel_iterations: int = 10, shape_invariants: object = None, back_prop: bool = True,
    recompute: bool = False, swap_memory: bool | None = None,
) -> Any:  # fmt: skip
    """``init = body(*init)`` as long as ``cond(*init)`` holds; how often is decided in each run.

    init: a list or tuple of loop variables, each a tensor, a number, or nested lists, tuples and dicts of those, or one
    variable alone; body returns the same structure, and so does the loop. maximum_iterations, a number or a tensor with
    one, ends it after so many iterations. shape_invariants: like init, with the shape of each tensor, where None is an
    axis that may change from iteration to iteration. back_prop=False: gradients through the loop are an error.
    parallel_iterations: how many iterations may run at a time; the values never depend on it. Both functions may use
    any tensor and Variable around them; what body writes to those is carried from iteration to iteration and written
    when the loop ends; so is an optimizer's step in the body. A body that writes is called more than once while
    recording. recompute=True: of T iterations the gradient keeps what enters some of them, about the root of 2 T, and
    computes the others again from there, as many at a time; without it, what it needs of every iteration. In a session
    with a ``memory_budget``, what the gradient keeps beyond it is computed again or moves out (of the CPU's memory to a
    file without a name, of an accelerator's to pinned memory) and comes back ahead of use, whichever costs less as
    predicted, with the same bits. swap_memory=True: it moves out; swap_memory=False: neither, and an iteration that
    does not fit raises ResourceExhausted.

    Raises ShapeError for a loop variable that changes its shape, InvalidArgument for one that changes its dtype or for
    another structure, each with its name and both specs.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.tensor(2.0), name="x")
    ...     n, y = tfnb.while_loop(lambda n, y: y < 100, lambda n, y: (n + 1, y * x), (0, x))
    >>> tfnb.run([n, y], {x: 3.0})
    [tensor(4), tensor(243.)]
    """
    if parallel_iterations < 1:
        raise InvalidArgument(f"parallel_iterations is at least 1, not {parallel_iterations}")
    if not isinstance(init, (list, tuple)):
        (end,) = while_loop(
            cond, wraps(body)(lambda alone: (body(alone),)), (init,), maximum_iterations=maximum_iterations,
            parallel_iterations=parallel_iterations,
            shape_invariants=None if shape_invariants is None else (shape_invariants,), back_prop=back_prop,
            recompute=recompute, swap_memory=swap_memory,
        )  # fmt: skip
        return end
    recorder = recorder_if_open()
    if recorder is None:
        return _plain_while(cond, body, init, maximum_iterations)
    if recompute:
        return _in_pieces(
            recorder, cond, body, init, maximum_iterations, shape_invariants, back_prop=back_prop, swap=swap_memory
        )  # fmt: skip
    return _while(
        recorder, cond, body, init, limit=_limit(recorder, maximum_iterations), shape_invariants=shape_invariants,
        back_prop=back_prop, parallel=parallel_iterations, swap=swap_memory,
    )  # fmt: skip


def _while(
    recorder: Recorder, cond: Callable[..., Any], body: Callable[..., Any], init: Any, *, shape_invariants: Any,
    **how: Any,
) -> Any:  # fmt: skip
    init = _known_elements(recorder, lambda state: body(*state), init, (), "while_loop")
    leaves, form = flat(init)
    start = tensors(recorder, leaves, "while_loop")
    labels = names(body, init)
    loop = LoopRecorder(recorder, start, labels, specs=invariants(recorder, start, init, shape_invariants), **how)

    def test(*carried: object) -> list[Any]:
        return [truth(recorder, cond(*tree_unflatten(list(carried), form)), "the condition of while_loop")]

    def iteration(*carried: object) -> list[Any]:
        found = body(*tree_unflatten(list(carried), form))
        return _same_form(recorder, found, form, start, body, "while_loop")

    try:
        result = loop.record(test, iteration)
    except TfnbError:
        if _enters(recorder, test, start, loop.limit):
            raise
        result = replace(loop, entered=False, held=[]).record(test, iteration)
    return tree_unflatten(result.carried, form)


def _enters(recorder: Recorder, test: Callable[..., list[Tensor]], start: Sequence[Tensor], limit: object) -> bool:
    """Whether the samples take an iteration."""
    undo = attempt(recorder)
    try:
        tests = [test(*start)[0], *([limit > 0] if isinstance(limit, Tensor) else [])]
        return all(sample_truth(recorder, each) is not False for each in tests)
    finally:
        undo()


def _in_pieces(
    recorder: Recorder, cond: Callable[..., Any], body: Callable[..., Any], init: Any, most: Any, invariants: Any,
    **how: Any,
) -> Any:  # fmt: skip
    """A loop over pieces of 1, 2, 3, ... iterations, whose gradient recomputes a piece when it reaches it.

    So nobody has to know how many iterations there are: m pieces have m (m + 1) / 2 iterations, the last one m.
    """
    init, form = list(init), type(init)
    most = _limit(recorder, most)

    def goes_on(size: object, iterations: Any, *state: object) -> Any:
        found = truth(recorder, cond(*state), "the condition of while_loop")
        return found if most is None else found & (iterations < most)

    def piece(size: Any, iterations: Any, *state: Any) -> Any:
        done, *state = _while(
            recorder, lambda count, *state: cond(*state), wraps(body)(lambda count, *state: (count + 1, *body(*state))),
            (torch.tensor(0), *state), shape_invariants=None if invariants is None else ((), *invariants),
            limit=size if most is None else torch.minimum(size, most - iterations), recompute=True, **how,
        )  # fmt: skip
        return size + 1, iterations + done, *state

    _, _, *end = _while(
        recorder, goes_on, piece, (torch.tensor(1), torch.tensor(0), *init), **how,
        shape_invariants=None if invariants is None else ((), (), *invariants),
    )  # fmt: skip
    return form(end)


def _limit(recorder: Recorder, most: object) -> int | Tensor | None:
    """At most so many iterations: a number, or a recorded tensor with one."""
    if type(most) is int and most < 0:
        raise InvalidArgument(f"maximum_iterations is at least 0, not {most}{recorder.tape.at()}")
    if most is None or type(most) is int:
        return most
    (found,) = tensors(recorder, [most], "maximum_iterations")
    if spec_of(found).shape or spec_of(found).dtype.is_floating_point or spec_of(found).dtype is torch.bool:
        raise InvalidArgument(f"maximum_iterations is one whole number, not {spec_of(found)}{recorder.tape.at()}")
    return found


def _known_elements(
    recorder: Recorder, iteration: Callable[..., Any], init: Any, rows: Sequence[Spec], what: str
) -> Any:
    """The loop variables, with element specs of arrays inferred from one call of the body, which is undone.

    iteration: the next loop variables, from those and one row of each sequence.
    """
    if not has_blanks(init):
        return init
    leaves, form = flat(init)
    start = tensors(recorder, leaves, what)
    found: list[Spec | None] = []

    def call(*given: Any) -> list[Any]:
        state = iteration(tree_unflatten(list(given[: len(start)]), form), *given[len(start) :])
        found[:] = [array.spec for array in arrays(state)]
        return []

    given = [Argument(spec_of(t), f"variable_{i}", t.sample) for i, t in enumerate(start)]
    given += [Argument(spec, f"row_{i}") for i, spec in enumerate(rows)]
    record_region(recorder, call, given, scope=what, iterations=True).undo()
    return known_elements(recorder, init, found, what)


def known_elements(recorder: Recorder, items: Iterable[Any], specs: Sequence[Spec | None], what: str) -> Any:
    """The structure, with arrays of known element specs, as inferred from the recording of a body."""
    for spec in filter(None, specs):
        if not bound_outside(recorder, spec):
            raise InvalidArgument(
                f"{what}: the elements of a TensorArray are {spec}, whose size only the body knows: give shape=, with "
                f"None for an axis 0 of several sizes{recorder.tape.at()}"
            )
    sizes = [() if spec is None else spec.sizes(recorder.symbols.bindings(spec.shape)) for spec in specs]
    return filled(items, specs, sizes)


def _plain_while(cond: Callable[..., Any], body: Callable[..., Any], init: Any, most: object) -> Any:
    state, iterations, limit = tree_map(_tensor, init), 0, None if most is None else int(_tensor(most))
    while (limit is None or iterations < limit) and cond(*state):
        found = body(*state)
        state, iterations = found if isinstance(found, (list, tuple)) else [found], iterations + 1
    return type(init)(state)


def _tensor(item: object) -> Any:
    if isinstance(item, Variable):
        return item.read()
    return item if isinstance(item, torch.Tensor) else tensor_of(item, None, "a loop")


def _same_form(
    recorder: Recorder,
    found: Sequence[Any],
    form: TreeSpec,
    start: Sequence[Tensor],
    body: Callable[..., Any],
    what: str,
) -> list[Any]:
    """The leaves of a body's result; raises InvalidArgument if its structure differs from the loop variables'."""
    leaves, got = flat(found)
    if got != form and len(start) == 1 and len(leaves) == 1:
        got = form  # one variable, returned without its tuple
    if got != form and not (
        form.type in (list, tuple) and got.type in (list, tuple) and _children(got) == _children(form)
    ):
        raise InvalidArgument(
            f"the body of {what} returns {form_text(got)}, and was given {form_text(form)}\n"
            f"  {written_at(body)}{recorder.tape.at()}"
        )
    fitted = [_number(leaf, s) for leaf, s in zip(leaves, start, strict=True)]
    return list(tensors(recorder, fitted, what))


def _number(leaf: object, like: Tensor) -> Any:
    """A Python number in the dtype of its loop variable if representable, as in ``tensor + number``."""
    if not isinstance(leaf, (bool, int, float, complex)):
        return leaf
    fits = torch.result_type(like, leaf) == like.dtype
    return torch.as_tensor(leaf, dtype=like.dtype if fits else None)


def _children(form: TreeSpec) -> Any:
    return form.children() if hasattr(form, "children") and callable(form.children) else form.children_specs


def invariants(recorder: Recorder, start: Sequence[Tensor], init: Any, wanted: Any = None) -> list[Spec]:
    """The specs of the loop variables inside, with a symbol for each axis that may change.

    An array is one variable, and what varies of it is its own business.
    """
    items, _ = tree_flatten(init, is_leaf=is_array)
    shapes = [None] * len(items) if wanted is None else tree_flatten(wanted, is_leaf=_is_shape)[0]
    if len(shapes) != len(items):
        raise InvalidArgument(
            f"shape_invariants has {len(shapes)} shapes for {len(items)} loop variables{recorder.tape.at()}"
        )
    found, left = [], iter(start)
    for item, shape in zip(items, shapes, strict=True):
        varying = item.varying if is_array(item) else [False]
        for tensor, varies in zip(islice(left, len(varying)), varying, strict=True):
            spec = spec_of(tensor)
            loose = [None, *spec.shape[1:]] if varies else None if is_array(item) else shape
            found.append(_loosened(recorder, spec, tensor, loose))
    return found


def _is_shape(item: object) -> bool:
    if isinstance(item, torch.Size) or item is None:
        return True
    return isinstance(item, (list, tuple)) and all(
        size is None or isinstance(size, (int, torch.SymInt)) for size in item
    )


def _loosened(recorder: Recorder, spec: Spec, tensor: Tensor, shape: Sequence[Any] | None) -> Spec:
    if shape is None:
        return spec
    fits = len(shape) == len(spec.shape) and all(
        wanted is None or not isinstance(wanted, int) or wanted == size
        for wanted, size in zip(shape, spec.shape, strict=True)
    )
    if not fits:
        raise ShapeError(f"a loop variable is {spec}, and its shape invariant {list(shape)}{recorder.tape.at()}")
    entry = recorder._entry(tensor)
    sizes = []
    for axis, (wanted, size) in enumerate(zip(shape, spec.shape, strict=True)):
        hint = None if entry.sample is None or entry.sample.shape[axis] < 2 else entry.sample.shape[axis]
        if wanted is None:
            letter = recorder.symbols.unused("L")
            size = recorder.symbols.size(recorder.symbols.fresh(letter, hint))
        sizes.append(size)
    return replace(spec, shape=tuple(sizes))


# -- over the rows of sequences -----------------------------------------------------------------------------------


def scan(
    fn: Callable[..., Any], init: object, xs: object, *, reverse: bool = False, swap_memory: bool | None = None
) -> tuple[Any, Any]:
    """``carry, y = fn(carry, x)`` for each row x of ``xs``: the last carry, and the ys stacked along a new axis 0.

    init, xs and what fn returns: tensors or nested structures of them; carry keeps its structure, shapes and dtypes.
    reverse: the last row comes first; ys stand in the order of xs.
    swap_memory: see `while_loop`.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     xs = tfnb.placeholder(torch.tensor([1.0, 2.0, 3.0]), name="xs")
    ...     total, sums = tfnb.scan(lambda total, x: (total + x, total + x), 0.0, xs)
    >>> tfnb.run([total, sums], {xs: [1.0, 2.0, 3.0, 4.0]})
    [tensor(10.), tensor([ 1.,  3.,  6., 10.])]
    """
    return _over_rows(fn, init, xs, "scan", reverse, swap_memory)


def fold(
    fn: Callable[..., Any], init: object, xs: object, *, reverse: bool = False, swap_memory: bool | None = None
) -> Any:
    """``carry = fn(carry, x)`` for each row x of ``xs``: the last carry. See `scan`.

    >>> import torch, tfnb
    >>> tfnb.fold(lambda total, x: total * x, 1.0, torch.tensor([1.0, 2.0, 3.0]))
    tensor(6.)
    """
    return _over_rows(wraps(fn)(lambda carry, x: (fn(carry, x), ())), init, xs, "fold", reverse, swap_memory)[0]


def map_fn(fn: Callable[..., Any], xs: object, *, swap_memory: bool | None = None) -> Any:
    """``fn(x)`` for each row x of ``xs``, stacked along a new axis 0. swap_memory: see `while_loop`.

    >>> import torch, tfnb
    >>> tfnb.map_fn(lambda x: x * x, torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 4., 9.])
    """
    return _over_rows(wraps(fn)(lambda carry, x: ((), fn(x))), (), xs, "map_fn", False, swap_memory)[1]


def _over_rows(
    fn: Callable[..., Any], init: object, xs: object, what: str, reverse: bool, swap: bool | None
) -> tuple[Any, Any]:
    recorder = recorder_if_open()
    if recorder is None:
        return _plain_scan(fn, init, xs, reverse, what)
    return _scan(recorder, fn, init, xs, reverse, what, swap)


def _scan(
    recorder: Recorder,
    fn: Callable[..., Any],
    init: object,
    xs: object,
    reverse: bool,
    what: str,
    swap: bool | None = None,
) -> tuple[Any, Any]:
    sequences, row_form = flat(xs)
    rows = tensors(recorder, sequences, what)
    if not rows or any(not spec_of(row).shape for row in rows):
        given = ", ".join(str(spec_of(row)) for row in rows) or "none"
        raise InvalidArgument(f"{what} goes over the rows of tensors, and was given {given}{recorder.tape.at()}")
    _same_length(recorder, rows, what)
    specs = [replace(spec_of(row), shape=spec_of(row).shape[1:]) for row in rows]
    init = _known_elements(
        recorder, lambda carry, *row: fn(carry, tree_unflatten(list(row), row_form))[0], init, specs, what
    )
    start_leaves, form = flat(init)
    start = tensors(recorder, start_leaves, what)
    forms: list[TreeSpec] = []

    def iteration(*given: object) -> list[Any]:
        carry, row = given[: len(start)], given[len(start) :]
        found = fn(tree_unflatten(list(carry), form), tree_unflatten(list(row), row_form))
        if not isinstance(found, tuple) or len(found) != 2:
            raise InvalidArgument(f"the function of {what} returns (carry, y)\n  {written_at(fn)}{recorder.tape.at()}")
        leaves, made = flat(found[1])
        forms.append(made)
        return [*_same_form(recorder, found[0], form, start, fn, what), *tensors(recorder, leaves, what)]

    labels = [f"carry {i}" if len(start) > 1 else "carry" for i in range(len(start))]
    loop = LoopRecorder(
        recorder, start, labels, rows, specs=invariants(recorder, start, init), reverse=reverse, what=what, swap=swap
    )  # fmt: skip
    found = loop.record(None, iteration)
    return tree_unflatten(found.carried, form), tree_unflatten(found.rows, forms[-1])


def _same_length(recorder: Recorder, rows: Sequence[Tensor], what: str) -> None:
    """Raise ShapeError for tensors of different lengths; lengths known only at run time are guarded."""
    for row in rows[1:]:
        same: Any = rows[0].shape[0] == row.shape[0]
        known = same if isinstance(same, bool) else recorder.symbols.truth(same)
        if known is False:
            given = " and ".join(str(spec_of(each)) for each in (rows[0], row))
            raise ShapeError(_LENGTHS.format(what=what, given=given) + recorder.tape.at())
        if free_unbacked_symbols(same):
            lengths = (torch.ops.aten.scalar_tensor(each.shape[0], dtype=torch.int64) for each in (rows[0], row))
            raises = _LENGTHS.format(what=what, given="others")
            recorder.branch(truth(recorder, torch.eq(*lengths), what), True, is_check=True, raises=raises)
        elif not isinstance(same, bool):
            recorder.symbols.decided(same)


_LENGTHS = "{what} goes over the rows of tensors of one length, and was given {given}"


def _plain_scan(fn: Callable[..., Any], init: object, xs: object, reverse: bool, what: str) -> tuple[Any, Any]:
    sequences, row_form = flat(tree_map(_tensor, xs))
    if not sequences or not all(rows.dim() for rows in sequences):
        raise ShapeError(
            f"{what} goes through the rows of tensors, and was given {'one number' if sequences else 'none'}"
        )
    if len({len(rows) for rows in sequences}) > 1:
        raise ShapeError(_LENGTHS.format(what=what, given=" and ".join(str(Spec.of(rows)) for rows in sequences)))
    order = range(len(sequences[0]))
    carry, made, form = tree_map(_tensor, init), [], None
    for at in reversed(order) if reverse else order:
        carry, y = fn(carry, tree_unflatten([x[at] for x in sequences], row_form))
        leaves, form = flat(y)
        made.append([_tensor(leaf) for leaf in leaves])
    if form is None:
        raise InvalidArgument("a scan over no rows outside a recording does not know what its function returns")
    columns = zip(*made, strict=True)
    return carry, tree_unflatten([torch.stack(column[::-1] if reverse else column) for column in columns], form)
