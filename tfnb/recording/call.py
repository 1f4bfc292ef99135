"""One op as one node: its arguments three times over (as attrs, as fakes, as samples), its shapes, its sample.

Stateless: what is kept lies with the recorder and its workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from tfnb.graph import Node, Ref, Spec, Value
from tfnb.kernels.random import seeded
from tfnb.recording.custom_ops import lacks_shapes, shapes
from tfnb.recording.ops import Facts, Op, bind, kernel, op_name
from tfnb.recording.replaced import SHAPES
from tfnb.recording.report import dense, explained
from tfnb.recording.scopes import clean
from tfnb.recording.shapes import sized_by_data
from tfnb.recording.tensor import Base, Entry, Tensor
from tfnb.recording.views import View
from tfnb.recording.workspace import conjugating, physical, stream_seed

if TYPE_CHECKING:
    from tfnb.recording.recorder import Recorder

aten = torch.ops.aten
_ABSENT = Spec(torch.bool, (0,))  # stands for an output that the op leaves out, as its mask says


def record_call(rec: Recorder, func: Op, own: Facts, args: Any, kwargs: Any) -> Any:
    """Record one op: node, fake result, sample result."""
    __tracebackhide__ = True
    inputs: list[Entry] = []
    fake = rec.space.apart if sized_by_data(func) else attrgetter("fake")
    attr_args, fake_args, sample_args = _arguments(rec, list(args), inputs, fake)
    attr_kwargs, fake_kwargs, sample_kwargs = _arguments(rec, kwargs, inputs, fake)
    fakes = _fake_call(rec, func, fake_args, fake_kwargs, inputs)
    flat = fakes if isinstance(fakes, (list, tuple)) else (fakes,)
    if not all(f is None or isinstance(f, torch.Tensor) for f in flat) or all(f is None for f in flat):
        return fakes  # sizes and other numbers: symbolic already
    override = rec.override(func)
    specs = tuple(_ABSENT if f is None else rec.space.shapes.spec(f) for f in flat)
    value = rec.tape.append(
        op_name(func), _leaf_name(rec, func), specs,
        inputs=tuple(entry.value for entry in inputs), attrs=bind(func, tuple(attr_args), attr_kwargs),
        scope=rec.scopes.current(), is_random=own.is_random,
        tags=frozenset() if override is None else frozenset({"override"}),
    )  # fmt: skip
    if override is not None:
        rec.space.rules[value.node] = override
    try:
        samples = _sample_call(rec, func, sample_args, sample_kwargs, inputs, rec.new[-1], len(flat))
    except Exception as error:
        rec.tape.drop_last()
        raise _failed(rec, func, error, inputs) from error
    base, chain, attrs = _viewed(rec, func, own, args, kwargs)
    wrapped: list[Tensor | None] = []
    for index, (fake, sample) in enumerate(zip(flat, samples, strict=True)):
        if fake is None:
            wrapped.append(None)
            continue
        entry = Entry(Value(value.node, index), fake, sample)
        rec.space.fakes[entry.value] = fake
        if rec.new[-1].forward is None:  # in a backward pass, what nobody holds any more is computed again on demand
            rec.space.keep(entry.value, sample)
        if sample is not None:
            rec.symbols.observe(fake, sample)
        view = () if base is None else (*chain, View(func, attrs, index, torch.is_grad_enabled()))
        wrapped.append(rec._wrap(entry, base, view))
    if isinstance(fakes, (list, tuple)):
        return type(fakes)(wrapped) if type(fakes) in (list, tuple) else tuple(wrapped)
    return wrapped[0]


def _arguments(
    rec: Recorder, tree: Any, inputs: list[Entry], fake: Callable[[Entry], torch.Tensor]
) -> tuple[Any, Any, Any]:
    """An argument tree three times: as attrs (Ref, Dim), on fakes, on samples. Tensors are added to ``inputs``."""
    if isinstance(tree, torch.Tensor):
        entry = rec._entry(tree)
        inputs.append(entry)
        return Ref(len(inputs) - 1), fake(entry), entry.sample
    if isinstance(tree, (list, tuple)):
        parts = [_arguments(rec, item, inputs, fake) for item in tree]
        kind = list if isinstance(tree, list) else tuple
        return tuple(kind(part[i] for part in parts) for i in range(3))  # type: ignore[return-value]
    if isinstance(tree, Mapping):
        items = {key: _arguments(rec, item, inputs, fake) for key, item in tree.items()}
        return tuple({key: part[i] for key, part in items.items()} for i in range(3))  # type: ignore[return-value]
    if isinstance(tree, torch.Generator):
        rec.streams_differ("generator=")
        return None, None, None
    return rec.symbols.leaf(tree), tree, rec.symbols.concrete(tree)


def _fake_call(rec: Recorder, func: Op, args: Any, kwargs: Any, inputs: list[Entry]) -> Any:
    __tracebackhide__ = True
    try:
        if lacks_shapes(func):
            with rec.symbols.kernel():
                return shapes(rec, func, args, kwargs, inputs)
        fakes = rec.space.shapes.call(func, args, kwargs, SHAPES.get(func, func))
        return dense(fakes, rec.tape.at()) if isinstance(fakes, torch.Tensor) else fakes
    except Exception as error:
        raise _failed(rec, func, error, inputs) from error


def _sample_call(
    rec: Recorder, func: Op, args: Any, kwargs: Any, inputs: list[Entry], node: Node, count: int
) -> tuple[torch.Tensor | None, ...]:
    if rec.lazy or any(entry.sample is None for entry in inputs):
        return (None,) * count
    if node.stream is None:
        dtypes = (*(spec.dtype for spec in node.outputs), *(entry.fake.dtype for entry in inputs))
        with conjugating(any(dtype.is_complex for dtype in dtypes)):
            out = kernel(func)(*args, **kwargs)
    else:
        seed = stream_seed(node, rec.graph.seed, 0)
        out = seeded(func, seed, torch.device(node.outputs[0].device), args, kwargs)
    return tuple(map(physical, out)) if isinstance(out, (list, tuple)) else (physical(out),)


def _viewed(
    rec: Recorder, func: Op, own: Facts, args: Any, kwargs: Any
) -> tuple[Base | None, tuple[View, ...], dict[str, Any]]:
    """For a view op: the base it looks at, the chain so far, and its arguments without the viewed tensor."""
    if not own.is_view:
        return None, (), {}
    source = args[0] if args else kwargs["self"]
    named = bind(func, tuple(args), kwargs)
    attrs = {name: arg for name, arg in named.items() if arg is not source}
    handle = rec.handle(source)
    return handle._family, handle._chain, attrs


def _leaf_name(rec: Recorder, func: Op) -> str:
    own = clean(func._schema.name.partition("::")[2].strip("_"))
    function = rec.scopes.function
    path = [clean(part) for part in rec.scopes.path]
    leaf = [own] if function in (None, own) else [str(function), own]
    return "/".join([*path, *leaf])


def _failed(rec: Recorder, func: Op, error: Exception, inputs: list[Entry]) -> Exception:
    described = ((rec.tape.by_id[e.value.node].name, str(rec.space.shapes.spec(e.fake))) for e in inputs)
    return explained(func, error, described, rec.where(), rec.symbols.readable)
