"""One op as one node: its arguments as attrs, as fakes and as samples, its shapes, its sample.

The samples of gradients and updates wait until somebody looks: most are never looked at, and a run computes them.
Stateless: what is kept lies with the recorder and its workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch

from tfnb.errors import ShapeError
from tfnb.graph import Dim, Node, Ref, Spec, Value
from tfnb.graph.graph import new_id
from tfnb.graph.node import leaves
from tfnb.graph.op_facts import Facts, Op, bind, kernel, op_name
from tfnb.graph.spec import numbered
from tfnb.interrupts import from_signal_handler
from tfnb.kernels.random import seeded
from tfnb.recording.marks.notes import asked_at, dense, explained
from tfnb.recording.marks.scopes import clean
from tfnb.recording.overrides.override_table import OVERRIDES, Stage
from tfnb.recording.overrides.python_answers import with_numbers
from tfnb.recording.shapes.custom_op_shapes import lacks_shapes, shapes
from tfnb.recording.shapes.shape_cache import sized_by_data
from tfnb.recording.values.interpret import stream_seed
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.samples import conjugating, physical
from tfnb.recording.values.tensor import Base, Entry, Tensor
from tfnb.recording.values.views import View

aten = torch.ops.aten
_SHAPES = OVERRIDES[Stage.SHAPE]
_UNTOLD = object()  # a size that only data tell, without samples of them


def absent(device: str) -> Spec:
    """A placeholder spec for an output that an op leaves out according to its mask."""
    return Spec(torch.bool, (0,), device)


def record_call(rec: Recording, func: Op, own: Facts, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record one op: node, fake result, sample result."""
    __tracebackhide__ = True
    if rec.tape.numbers and torch.Tag.pointwise in func.tags:
        args, kwargs = with_numbers(rec, func, args, kwargs)
    inputs: list[Entry] = []
    fake = rec.space.apart if sized_by_data(func) else attrgetter("fake")
    attr_args, fake_args = _arguments(rec, list(args), inputs, fake)
    attr_kwargs, fake_kwargs = _arguments(rec, kwargs, inputs, fake)
    fakes = _fake_call(rec, func, fake_args, fake_kwargs, inputs)
    flat = fakes if isinstance(fakes, (list, tuple)) else (fakes,)
    if not all(f is None or isinstance(f, torch.Tensor) for f in flat) or all(f is None for f in flat):
        return fakes  # sizes and other numbers: symbolic already
    default = torch.get_default_dtype()  # a run may have another one, on another machine
    if not inputs and attr_kwargs.get("dtype") is None and "dtype" in own.names:
        attr_kwargs["dtype"] = flat[0].dtype
    elif default is not torch.float32 and own.makes_fractions and _are_integers(inputs) and flat[0].dtype is default:
        first = next(index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor))
        with rec.on():
            return func(*args[:first], args[first].to(default), *args[first + 1 :], **kwargs)
    node = _appended(rec, func, own, flat, inputs, bind(func, tuple(attr_args), attr_kwargs))
    if inputs and rec.tape.numbers.issuperset(entry.value for entry in inputs):
        rec.tape.numbers |= {Value(node, index) for index in range(len(flat))}
    waits = rec.samples_wait and not sized_by_data(func)
    found = None if waits or rec.lazy else _samples_of(rec, func, (args, kwargs), inputs)
    samples: Sequence[torch.Tensor | None] = found or (None,) * len(flat)
    wrapped: list[Tensor | None] = []
    base, chain, attrs = _viewed(rec, func, own, args, kwargs)
    for index, (fake, sample) in enumerate(zip(flat, samples, strict=True)):
        if fake is None:
            wrapped.append(None)
            continue
        entry = Entry(Value(node, index), fake, sample, rec.space.awaited if waits else None)
        rec.space.fakes[entry.value] = fake
        rec.space.samples.keep(entry.value, sample)
        if sample is not None:
            rec.symbols.observe(fake, sample)
        view = () if base is None else (*chain, View(func, attrs, index, torch.is_grad_enabled()))
        wrapped.append(rec._wrap(entry, base, view))
    for equality in rec.symbols.deferred():
        _rely_on(rec, func, equality)
    if isinstance(fakes, (list, tuple)):
        return type(fakes)(wrapped) if type(fakes) in (list, tuple) else tuple(wrapped)
    return wrapped[0]


def _appended(
    rec: Recording, func: Op, own: Facts, fakes: Sequence[torch.Tensor | None], inputs: list[Entry],
    attrs: Mapping[str, Any],
) -> int:  # fmt: skip
    """Append the node of a call to the recording; returns its id."""
    override = rec.override(func)
    where = next(str(numbered(fake.device)) for fake in fakes if fake is not None)
    node = rec.tape.append(
        op_name(func), _leaf_name(rec, func),
        tuple(absent(where) if fake is None else rec.space.shapes.spec(fake) for fake in fakes),
        inputs=tuple(entry.value for entry in inputs), attrs=attrs,
        scope=rec.scopes.current(), is_random=own.is_random,
        tags=frozenset() if override is None else frozenset({"override"}),
    ).node  # fmt: skip
    if override is not None:
        rec.space.rules[node] = override
    if (at := asked_at(rec.new[-1].source, rec.stop)) is not None:
        rec.space.asked[node] = at
    return node


def _samples_of(
    rec: Recording, func: Op, called: Any, inputs: list[Entry]
) -> tuple[torch.Tensor | None, ...] | None:  # fmt: skip
    """Results of the last recorded op on samples; None if there are no samples. If the op fails, its node is
    dropped.
    """
    node = rec.new[-1]
    try:
        return _sample_call(rec, func, called, inputs, node)
    except Exception as error:
        if from_signal_handler(error):
            raise
        if rec.entered:
            rec.tape.drop_last()
            rec.warn(
                f"{op_name(func)} failed for the sample's values, and the program caught the error: each run goes on "
                "as this recording did, also where it would not fail"
            )
            raise _failed(rec, func, error, inputs) from _further(func, error)
        rec.space.samples.lacks(node.id)  # what the test around it keeps from failing: it has a shape
        return None


def _rely_on(rec: Recording, func: Op, equality: object) -> None:
    """Guard later nodes by an equality of data-dependent sizes; raises ShapeError if the samples violate the equality.

    The kernel refuses other sizes by itself, but for one row, which it broadcasts: no later shape or gradient expects
    that.
    """
    text = rec.symbols.text(equality)
    if rec.entered and rec.symbols.seen(equality, bool) is False:
        raise ShapeError(f"{op_name(func)} takes {text} for granted, and for the samples it is not so{rec.tape.at()}")
    spec = Spec(torch.bool, (), "cpu")
    attrs = {"s": Dim(text), "dtype": torch.bool}
    value = rec.tape.append("aten.scalar_tensor.default", "scalar_tensor", (spec,), attrs=attrs)
    fake = rec.space.fakes[value] = rec.symbols.fake(spec)
    sample = None if rec.symbols.seen(equality, bool) is None else torch.tensor(True)
    rec.space.samples.keep(value, sample)
    lacks = (
        f"{op_name(func)} was recorded for {text}, and in this run it is not so: to have one row stand for many, "
        "expand it before"
    )
    rec.guard(rec._wrap(Entry(value, fake, sample)), True, lacks=lacks)


def _are_integers(inputs: list[Entry]) -> bool:
    """Whether an op that gives floating numbers has integers alone to take their dtype from."""
    dtypes = {entry.fake.dtype for entry in inputs}
    return not any(d.is_floating_point or d.is_complex for d in dtypes)


def _arguments(
    rec: Recording, tree: object, inputs: list[Entry], fake: Callable[[Entry], torch.Tensor]
) -> tuple[Any, Any]:
    """An argument tree twice: as attrs (Ref, Dim), and on fakes. Tensors are added to ``inputs``."""
    if isinstance(tree, torch.Tensor):
        entry = rec._entry(tree)
        inputs.append(entry)
        return Ref(len(inputs) - 1), fake(entry)
    if isinstance(tree, (list, tuple)):
        parts = [_arguments(rec, item, inputs, fake) for item in tree]
        kind = list if isinstance(tree, list) else tuple
        return kind(attr for attr, _ in parts), kind(item for _, item in parts)
    if isinstance(tree, dict):
        named = {key: _arguments(rec, item, inputs, fake) for key, item in tree.items()}
        return {key: attr for key, (attr, _) in named.items()}, {key: item for key, (_, item) in named.items()}
    if isinstance(tree, torch.Generator):
        rec.streams_differ("generator=")
        return None, None
    if isinstance(tree, torch.device):
        tree = numbered(tree)  # a run may have another current device
    return rec.symbols.leaf(tree), tree


def _on_samples(rec: Recording, tree: object, samples: Iterator[torch.Tensor | None]) -> Any:
    """An argument tree with each tensor replaced by the next sample."""
    if isinstance(tree, torch.Tensor):
        return next(samples)
    if isinstance(tree, (list, tuple)):
        kind = list if isinstance(tree, list) else tuple
        return kind([_on_samples(rec, item, samples) for item in tree])
    if isinstance(tree, dict):
        return {key: _on_samples(rec, item, samples) for key, item in tree.items()}
    if tree is None or isinstance(tree, torch.Generator):
        return None
    found = rec.symbols.concrete(tree)
    return _UNTOLD if found is None else found


def _is_untold(leaf: object) -> bool:
    return leaf is _UNTOLD


def _fake_call(rec: Recording, func: Op, args: object, kwargs: object, inputs: list[Entry]) -> Any:
    __tracebackhide__ = True
    try:
        if lacks_shapes(func):
            with rec.symbols.kernel():
                return shapes(rec.symbols, func, args, kwargs, inputs, rec.tape.at)
        fakes = rec.space.shapes.call(func, args, kwargs, _SHAPES.get(func, func))
        return dense(fakes, rec.tape.at) if isinstance(fakes, torch.Tensor) else fakes
    except Exception as error:
        if from_signal_handler(error):
            raise
        raise _failed(rec, func, error, inputs) from _further(func, error)


def _sample_call(
    rec: Recording, func: Op, called: tuple[Any, Any], inputs: list[Entry], node: Node
) -> tuple[torch.Tensor | None, ...] | None:
    """The op's results on samples; None where an input has no sample."""
    known = [entry.sample for entry in inputs]
    found = None if any(sample is None for sample in known) else _on_samples(rec, called, iter(known))
    if found is None or any(map(_is_untold, leaves(found))):
        rec.space.samples.lacks(node.id)
        return None
    args, kwargs = found
    if node.stream is None:
        dtypes = (*(spec.dtype for spec in node.outputs), *(entry.fake.dtype for entry in inputs))
        with conjugating(any(dtype.is_complex for dtype in dtypes)):
            out = kernel(func)(*args, **kwargs)
    else:
        seed = stream_seed(node, rec.graph.seed, 0)
        out = seeded(func, seed, torch.device(node.outputs[0].device), args, kwargs)
    return tuple(map(physical, out)) if isinstance(out, (list, tuple)) else (physical(out),)


def _viewed(
    rec: Recording, func: Op, own: Facts, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Base | None, tuple[View, ...], dict[str, Any]]:
    """For a view op: the base of the view, the chain of views so far, and the arguments without the viewed tensor."""
    if not own.is_view:
        return None, (), {}
    source = args[0] if args else kwargs["self"]
    named = bind(func, tuple(args), kwargs)
    attrs = {name: arg for name, arg in named.items() if arg is not source}
    handle = rec.handle(source)
    return handle._family, handle._chain, attrs


def _leaf_name(rec: Recording, func: Op) -> str:
    return _joined(tuple(rec.scopes.path), rec.scopes.function, func._schema.name)


@lru_cache(maxsize=4096)
def _joined(path: tuple[str, ...], function: str | None, name: str) -> str:
    own = clean(name.partition("::")[2].strip("_"))
    leaf = [own] if function in (None, own) else [str(function), own]
    return "/".join([*map(clean, path), *leaf])


def _further(func: Op, error: Exception) -> Exception | None:
    """The cause to chain in a traceback: the original error for the user's ops, None for torch's ops."""
    return None if func.namespace == "aten" else error


def _failed(rec: Recording, func: Op, error: Exception, inputs: list[Entry]) -> Exception:
    described = ((rec.tape.by_id[e.value.node].name, str(rec.space.shapes.spec(e.fake))) for e in inputs)
    told = explained(func, error, described, rec.where(), rec.symbols.readable)
    rec.failed = told, Node(
        id=new_id(), name=f"{_leaf_name(rec, func)} failed", op=op_name(func), owner=rec.owner, source=rec.where(),
        inputs=tuple(entry.value for entry in inputs), attrs={"inputs": [*map(Ref, range(len(inputs)))]},
        scope=rec.scopes.current(),
    )  # fmt: skip
    return told
