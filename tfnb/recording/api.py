"""Functions for the user inside a recording: placeholders, constants, scopes, order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import FailedPrecondition, InvalidArgument, ShapeError, Unsupported
from tfnb.graph import Node, Spec, Value, Variable, current
from tfnb.graph.device_request import Scope, nested, parse, softened
from tfnb.graph.ops import LOCKING, UNORDERED
from tfnb.graph.spec import Size, device_name
from tfnb.recording.dispatch.recorder import Recorder
from tfnb.recording.marks.notes import dense
from tfnb.recording.shapes.symbols import Symbols
from tfnb.recording.values.tensor import Operation, Tensor


def open_recorder(what: str) -> Recorder:
    """The recorder of the block that is being recorded. Raises FailedPrecondition naming what needs one."""
    recording = current.recording()
    if not isinstance(recording, Recorder):
        raise FailedPrecondition(f"{what} works inside a recording: a %%tfgraph cell or `with tfnb.record(NAME):`")
    return recording


def placeholder(
    sample: object = None, *, shape: Sequence[int | str | None] | None = None, dtype: torch.dtype | None = None,
    device: torch.device | str | None = None, name: str | None = None,
) -> Tensor:  # fmt: skip
    """A tensor that every run must feed.

    sample: tensor, array or number; its values are used while recording. shape: ints are fixed, ``None`` varies, equal
    letters vary together; by default axis 0 varies. Without a sample there are shapes only, of the default dtype unless
    given. Raises FailedPrecondition outside of a recording, ShapeError for a shape that does not fit the sample, and
    for a letter that stands for another size already, InvalidArgument without sample and shape, or for a letter that is
    no name.

    >>> from tfnb.recording import record
    >>> with record():
    ...     print(placeholder(torch.zeros(8, 3)).spec, placeholder(shape=(None, "T", 4)).spec)
    float32[B, 3] float32[B1, T, 4]
    """
    recorder = open_recorder("placeholder")
    if recorder.lazy and isinstance(sample, Tensor):  # made in this block: it has a shape and no values
        shape = shape or ((None, *sample.shape[1:]) if sample.dim() else ())
        dtype, sample = dtype or sample.dtype, None
    with _disable_current_modes():
        plain = None if sample is None else _sample(sample, dtype, device, recorder)
        if plain is None and shape is None:
            raise InvalidArgument(f"placeholder needs a sample or a shape{recorder.tape.at()}")
        axes = _axes(plain, shape, recorder)
        plain = _grown(plain, axes, recorder)
        sizes = tuple(_size(axis, plain, i, recorder.symbols, recorder) for i, axis in enumerate(axes))
        where = device or recorder.default_device or "cpu" if plain is None else plain.device
        spec = Spec(plain.dtype if plain is not None else dtype or torch.get_default_dtype(), sizes, device_name(where))
    return recorder.placeholder(spec, None if recorder.lazy else plain, name)


def _sample(
    sample: object, dtype: torch.dtype | None, device: torch.device | str | None, recorder: Recorder
) -> torch.Tensor:
    if isinstance(sample, Variable):
        sample = sample.value()
    tensor = dense(torch.as_tensor(current.plain(sample)).detach(), recorder.tape.at)
    tensor = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    if isinstance(sample, np.ndarray):
        tensor = tensor.clone()
    # as every feed will be
    return tensor.to(dtype=dtype, device=device or recorder.default_device).contiguous()


def _axes(sample: torch.Tensor | None, shape: Sequence[Any] | None, recorder: Recorder) -> tuple[int | str | None, ...]:
    if shape is None:
        assert sample is not None
        return (None, *sample.shape[1:]) if sample.dim() else ()
    axes = tuple(shape)
    if sample is not None:
        fits = len(axes) == sample.dim() and all(
            not isinstance(a, int) or a == n for a, n in zip(axes, sample.shape, strict=False)
        )
        if not fits:
            found = list(sample.shape)
            raise ShapeError(f"placeholder's shape {list(axes)} does not fit its sample {found}{recorder.tape.at()}")
    return axes


def _grown(sample: torch.Tensor | None, axes: Any, recorder: Recorder) -> torch.Tensor | None:
    """A varying axis of length 0 or 1 would be recorded as a constant: double the row."""
    if sample is None:
        return None
    for axis, wanted in enumerate(axes):
        if isinstance(wanted, int) or sample.shape[axis] > 1:
            continue
        recorder.tape.notes.append(f"the sample's axis {axis} has length {sample.shape[axis]}: recorded with 2 rows")
        row = [*sample.shape]
        row[axis] = 2
        sample = sample.expand(row).clone() if sample.shape[axis] else sample.new_zeros(row)
    return sample


def _size(axis: Any, sample: torch.Tensor | None, place: int, symbols: Symbols, recorder: Recorder) -> Size:
    if isinstance(axis, int):
        return axis
    hint = None if sample is None else sample.shape[place]
    taken = recorder.tape.letters | {
        s for n in recorder.nodes if n.op == "tfnb.placeholder" for s in n.outputs[0].symbols
    }
    if isinstance(axis, str):
        if not axis.isidentifier():
            raise InvalidArgument(f"a varying axis is named by an identifier, not {axis!r}{recorder.tape.at()}")
        if axis in taken:
            known = symbols.hint(symbols.get(axis))
            if hint is not None and known != hint:
                having = (n for n in recorder.nodes if n.op == "tfnb.placeholder" and axis in n.outputs[0].symbols)
                where = next(having, None)
                first = f"in the sample of {where.name}{_recorded_at(where)}" if where else "on an earlier axis"
                raise ShapeError(
                    f"size {axis} is {known} {first} and {hint} in this one"
                    f"{' (one row is recorded as two)' if hint == 2 else ''}: one letter is one size in all cells of a "
                    f"graph, also a letter that an axis got by itself. Take another one, or None{recorder.tape.at()}"
                )
            return symbols.size(symbols.get(axis))
    size = symbols.fresh(axis, hint, taken)
    letter = str(symbols.size(size))
    recorder.tape.letters.add(letter)
    if axis is not None:
        recorder.tape.chosen.add(letter)
    return symbols.size(size)


def _recorded_at(node: Node) -> str:
    return f" ({node.source})" if node.source else ""


def constant(value: object, *, name: str | None = None) -> Tensor:
    """A recorded tensor of a fixed value, copied from any argument of ``torch.as_tensor``. Raises FailedPrecondition
    outside a recording.

    >>> import tfnb
    >>> with tfnb.record():
    ...     y = tfnb.constant([1.0, 2.0]).exp()
    >>> tfnb.run(y)
    tensor([2.7183, 7.3891])
    """
    recorder = open_recorder("constant")
    with _disable_current_modes():
        tensor = torch.as_tensor(current.plain(value)).detach().clone()
    entry = recorder.constant(tensor, name)
    recorder.tape.wanted.add(entry.value.node)
    return recorder._wrap(entry)


@contextmanager
def name_scope(name: str | None) -> Iterator[str]:
    """Nodes recorded inside stand under this scope: ``"a"`` fresh, ``"a/"`` re-entered, ``None`` the root.

    Raises FailedPrecondition outside of a recording.

    >>> import torch, tfnb
    >>> with tfnb.record(), tfnb.name_scope("head"):
    ...     y = tfnb.constant(1.0).exp()
    >>> y.node.scope
    ('head', 'exp')
    """
    with open_recorder("name_scope").scope(name) as path:
        yield path


@contextmanager
def device(spec: Scope, *, soft: bool = False) -> Iterator[None]:
    """Nodes recorded inside ask for this device: a task of a cluster, a kind of device, or both.

    spec: a device string, any part of which may be missing; a function of the node that gives one, or None for what the
    scopes around say; None: nodes inside ask for no place. An inner scope overrides an outer one field by field. The
    nodes of one graph may ask for several tasks: each computes its part of a step, and tensors go from task to task
    (white paper §3.2). Nodes of gradients ask for what their forward nodes ask for. `colocate_with` asks for the place
    of another node or Variable; the requests of both are merged.

    ``ps:1`` asks for a server of a cluster: a Variable that is made, read or written inside lies there, whole, and so
    do those that are updated with it. Of computations a server does updates of Variables only, by optimizers or number
    by number; a run raises Unimplemented for another one, naming it.

    A run raises InvalidArgument where a request cannot be met; with ``soft`` it does not ask for that then. Raises
    InvalidArgument for what is no device. Raises FailedPrecondition outside of a recording.

    >>> import tfnb
    >>> with tfnb.record(), tfnb.device("/job:worker/task:0"):
    ...     y = tfnb.constant(1.0).exp()
    ...     with tfnb.device("/task:1/device:CPU:0"):
    ...         z = y + 1
    >>> y.node.device, z.node.device
    ('/job:worker/task:0', '/job:worker/task:1/device:CPU:0')
    """
    recorder = open_recorder("device")
    if spec is not None and not callable(spec):
        spec = str(parse(spec)._replace(soft=True)) if soft or parse(spec).soft else spec
    elif soft and spec is not None:
        spec = softened(spec)
    with recorder.placed(nested(spec, recorder.tape.marks.device)):
        yield


@contextmanager
def control_dependencies(nodes: Sequence[Any] | None) -> Iterator[None]:
    """Nodes recorded inside run after ``nodes``, and reads of variables inside are fresh. ``None`` clears.

    nodes: recorded tensors, Operations or Variables. Raises FailedPrecondition outside of a recording, InvalidArgument
    for anything else among ``nodes``.

    >>> import torch, tfnb
    >>> count = tfnb.Variable(torch.zeros(()))
    >>> with tfnb.record():
    ...     more = count.assign_add(torch.ones(()))
    ...     with tfnb.control_dependencies([more]):
    ...         after = count.read()
    >>> tfnb.run(after)
    tensor(1.)
    """
    recorder = open_recorder("control_dependencies")
    with recorder.after(None if nodes is None else tuple(value_in(node, recorder).node for node in nodes)):
        yield


@contextmanager
def unordered(*, use_locking: bool = False) -> Iterator[None]:
    """Updates recorded inside the block give up order, as in Hogwild: steps do not wait for each other because of them.

    A step holds the locks of what it writes from its first read to its commit. Of Variables that it writes only inside
    such blocks it holds none. What is promised then: a number is never half written; an optimizer's step and rows of
    ``scatter_add`` are added to the value of the moment, not to the one that was read. What is not: two updates of a
    tensor may mix number by number, a reader may see a tensor half written, one of two ``assign`` or ``assign_add`` at
    the same time may be lost, and a step may read what another one writes meanwhile. A run still writes all or nothing
    of what it computed, and updates are fetched: what is recorded after an update neither sees nor pulls it.

    use_locking: each update takes the lock of its Variable while it writes, or, where it is not made in place, from
    the read on. No update is lost then, and nobody sees a tensor half written.

    On a cluster servers apply one update after the other in any case. `tfnb.races` lists what is in no order. Raises
    FailedPrecondition outside of a recording.

    >>> import torch, tfnb
    >>> w = tfnb.Variable(torch.zeros(2))
    >>> with tfnb.record():
    ...     with tfnb.unordered():
    ...         more = w.assign_add(torch.ones(2))
    ...     now = w.read()
    >>> tfnb.run(now), tfnb.run(more), tfnb.run(now)
    (tensor([0., 0.]), tensor([1., 1.]), tensor([1., 1.]))
    """
    recorder = open_recorder("unordered")
    with recorder.tagged(frozenset({UNORDERED, LOCKING} if use_locking else {UNORDERED})):
        yield


def group(*fetches: object, name: str | None = None) -> Operation:
    """An Operation that runs all of ``fetches``: recorded tensors, Operations or Variables.

    A Parameter or buffer means what was written into it in place. Raises FailedPrecondition outside of a recording,
    InvalidArgument for anything else.

    >>> import torch, tfnb
    >>> a, b = tfnb.Variable(torch.zeros(())), tfnb.Variable(torch.ones(()))
    >>> with tfnb.record():
    ...     both = tfnb.group(a.assign(torch.tensor(5.0)), b.assign(torch.tensor(7.0)))
    >>> tfnb.run(both)
    >>> a.value(), b.value()
    (tensor(5.), tensor(7.))
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> with tfnb.record():
    ...     with torch.no_grad():
    ...         w -= 0.5
    ...     step = tfnb.group(w)
    >>> tfnb.run(step), w.tolist()
    (None, [0.5, 0.5])
    """
    recorder = open_recorder("group")
    return recorder.group(tuple(value_in(f, recorder) for f in fetches), name)


def effects(*, name: str | None = None) -> Operation:
    """An Operation with all effects of the block, as when run eagerly: all its writes and steps, in order, once.

    It runs also the writes and steps that are recorded below this call. Raises FailedPrecondition outside of a
    recording, Unsupported inside of a staged branch or loop.

    >>> import torch, tfnb
    >>> seen = torch.nn.BatchNorm1d(3, affine=False)
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(4, 3))
    ...     y = seen(x)
    ...     everything = tfnb.effects()
    >>> tfnb.run(everything, {x: torch.ones(2, 3)}), int(seen.num_batches_tracked)
    (None, 1)
    """
    recorder = open_recorder("effects")
    if recorder.inside:
        raise Unsupported(
            f"tfnb.effects() runs what a whole block does: call it outside of branches and loops{recorder.tape.at()}"
        )
    made = recorder.group((), name)
    recorder.tape.everything.append(made.value.node)
    return made


def value_in(item: object, recorder: Recorder) -> Value:
    if isinstance(item, torch.Tensor):
        return recorder._entry(item).value
    if isinstance(item, Operation):
        return item.value
    if isinstance(item, Variable):
        return recorder.read(item).value
    raise InvalidArgument(f"a recorded tensor, Operation or Variable was expected, got {type(item).__name__}")
