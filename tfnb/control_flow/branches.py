"""`cond`: one of two functions, as the value of a tensor decides in each run. Semantics S-120, S-130."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from tfnb.control_flow.structure import flat, form_text, recorder_if_open, sample_truth, tensors, truth, written_at
from tfnb.control_flow.tensor_array import varying
from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Ref, Spec, Value, ops
from tfnb.recording import Operation, Recorder
from tfnb.recording.subgraphs.capture import (
    Region,
    append,
    bound_outside,
    captures,
    now,
    record_region,
    same_shape,
    subgraph,
    write_back,
)
from tfnb.recording.subgraphs.loop_node import DISAGREE
from tfnb.recording.subgraphs.recursive_calls import Unfinished
from tfnb.recording.values.tensor import Base


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any) -> Any:
    """``true_fn(*operands)`` where ``pred`` holds, else ``false_fn(*operands)``; decided in each run.

    pred: one truth value. Both functions are recorded; only the one that is taken runs. They return the same structure
    of tensors and numbers, of the same dtypes and shapes. They may use any tensor and Variable around them, and what
    they write to those is written where that branch is taken. A branch that returns an optimizer's step takes it there;
    the other one returns a step or None, and `cond` an Operation that runs what is taken. Outside a recording the
    function is just called.

    Raises InvalidArgument for branches that return different structures or dtypes, ShapeError for different shapes.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.tensor(3.0), name="x")
    ...     y = tfnb.cond(x > 0, lambda: 2 * x, lambda: x - 1)
    >>> y.sample, tfnb.run(y, {x: 5.0}), tfnb.run(y, {x: -5.0})
    (tensor(6.), tensor(10.), tensor(-6.))
    """
    recorder = recorder_if_open()
    if recorder is None or isinstance(pred, bool):
        return true_fn(*operands) if pred else false_fn(*operands)
    predicate = truth(recorder, pred, "the predicate of cond")
    with recorder.scope("cond") as scope:
        return _recorded(recorder, predicate, true_fn, false_fn, operands, scope)


@dataclass(slots=True)
class _Side:
    """The results of one branch: the region with its tensors, how they nest, and where steps and None stand."""

    region: Region
    form: TreeSpec
    steps: list[Any]  # for each leaf the Operation or None that it is; False for a tensor


def _recorded(
    recorder: Recorder, predicate: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any,
    scope: str,
) -> Any:  # fmt: skip
    taken = sample_truth(recorder, predicate)
    try:
        then = _side(recorder, true_fn, operands, scope, entered=taken is not False)
    except Unfinished:  # a function that calls itself: so far only the other branch tells what it returns
        return false_fn(*operands)
    try:
        other = _side(recorder, false_fn, operands, scope, entered=taken is not True)
    except Unfinished:
        return true_fn(*operands)
    what = f"{written_at(true_fn)} and {written_at(false_fn)}"
    plain = [[step is False for step in side.steps] for side in (then, other)]
    if then.form != other.form or plain[0] != plain[1]:
        raise InvalidArgument(
            f"the branches of cond return different structures: {_text(then)} and {_text(other)}"
            f"\n  {what}{recorder.tape.at()}"
        )
    paths = [keystr(path) for path, _ in tree_flatten_with_path(tree_unflatten(then.steps, then.form))[0]]
    labels = [f"output{path} of cond" for path, is_tensor in zip(paths, plain[0], strict=True) if is_tensor]
    regions = then.region, other.region
    varies = [
        v for v, is_tensor in zip(varying(tree_unflatten(then.steps, then.form)), plain[0], strict=True) if is_tensor
    ]
    loose = {place for place, each in enumerate(varies) if each}
    written = dict.fromkeys(base.variable for region in regions for base in region.written)
    found = joined(recorder, predicate, regions, labels, what, loose)
    step = None
    if any(isinstance(item, Operation) for item in (*then.steps, *other.steps)):
        step = recorder.group(tuple(recorder._read_base(var).entry.value for var in written if var is not None))
    tensors_left = iter(found)
    pairs = zip(then.steps, other.steps, strict=True)
    outs = [next(tensors_left) if a is False else (None if a is b is None else step) for a, b in pairs]
    return tree_unflatten(outs, then.form)


def _side(
    recorder: Recorder, function: Callable[..., Any], operands: Any, scope: str, *, entered: bool
) -> _Side:  # fmt: skip
    kept: list[Any] = []

    def call() -> list[Any]:
        start = len(recorder.new)
        leaves, form = flat(function(*operands))
        own = {node.id for node in recorder.new[start:]}
        steps = [leaf if leaf is None or (isinstance(leaf, Operation) and leaf.value.node in own) else False
                 for leaf in leaves]  # fmt: skip
        kept[:] = form, steps  # it may be called more than once
        plain = [leaf for leaf, step in zip(leaves, steps, strict=True) if step is False]
        return list(tensors(recorder, plain, "a branch of cond"))

    return _Side(record_region(recorder, call, [], scope=scope, iterations=False, entered=entered), *kept)


def _text(side: _Side) -> str:
    if all(step is False for step in side.steps):
        return form_text(side.form)
    words = ["a tensor" if s is False else "None" if s is None else "a step" for s in side.steps]
    return str(tree_unflatten(words, side.form))


def joined(
    recorder: Recorder, predicate: Any, regions: tuple[Region, Region], labels: Sequence[str], what: str,
    loose: Container[int] = (),
) -> list[Any]:  # fmt: skip
    """The values of two branches, of which the predicate takes one; what they wrote is written.

    An output that is None is absent in that branch. labels: what outputs are called in errors. loose: the outputs whose
    axis 0 may be of another size in each branch.
    """
    written = list(dict.fromkeys(base for region in regions for base in region.written))
    outputs = [[*region.outputs, *(_left(base, region) for base in written)] for region in regions]
    for region, outs in zip(regions, outputs, strict=True):
        region.outputs = list(outs)
    captured = captures(recorder, regions)
    then, other = (subgraph(recorder, r, captured, outs) for r, outs in zip(regions, outputs, strict=True))
    names = [*labels, *(f"a tensor that is written ({base.entry.value})" for base in written)]
    specs = [
        _agreed(recorder, name, regions, pair, what, is_loose=place in loose)
        for place, (name, *pair) in enumerate(zip(names, *outputs, strict=True))
    ]
    absent = [None in pair for pair in zip(*outputs, strict=True)]
    attrs = {
        "pred": Ref(0), "operands": tuple(Ref(i + 1) for i in range(len(captured))), "then": then, "else": other,
        "shapes": tuple(spec.shape if lacks else None for spec, lacks in zip(specs, absent, strict=True)),
    }  # fmt: skip
    found = append(recorder, ops.COND, [predicate._entry.value, *captured], attrs, specs)
    count = len(found) - len(written)
    write_back(recorder, written, found[count:], regions)
    return found[:count]


def _left(base: Base, region: Region) -> Value:
    """The value of a tensor of outside after a branch."""
    return region.written.get(base, base.entry.value)


def _agreed(
    recorder: Recorder, name: str, regions: tuple[Region, Region], values: Sequence[Value | None], what: str, *,
    is_loose: bool,
) -> Spec:  # fmt: skip
    """The spec of an output, which both branches give; raises InvalidArgument or ShapeError."""
    kinds = [spec_inside(recorder, r, v) for r, v in zip(regions, values, strict=True) if v is not None]
    a, b = kinds[0], kinds[-1]
    fits = a.dtype == b.dtype and a.device == b.device
    if fits and is_loose and now(recorder, a)[1:] == now(recorder, b)[1:]:
        return a if now(recorder, a) == now(recorder, b) and bound_outside(recorder, a) else _any_size(recorder, a)
    if not fits or not same_shape(recorder, a, b):
        kind = ShapeError if fits else InvalidArgument
        how = "" if a.dtype == b.dtype else ": let both give one dtype (a number as 0.0, not as 0)"
        if fits and len(a.shape) == len(b.shape) and [*map(type, a.shape)] != [*map(type, b.shape)]:
            how = (
                ": take a size that varies from a tensor, as in torch.zeros(x.shape[0]), or fix it where it comes "
                "from: tfnb.placeholder(sample, shape=...)"
            )
        raise kind(
            f"{name} is {a} in one branch and {b} in the other{how}\n  {what}{recorder.tape.at()}", details=DISAGREE
        )
    return a


def _any_size(recorder: Recorder, spec: Spec) -> Spec:
    """With an axis 0 that only a run knows."""
    return replace(spec, shape=(recorder.symbols.size(recorder.symbols.env.create_unbacked_symint()), *spec.shape[1:]))


def spec_inside(recorder: Recorder, region: Region, value: Value) -> Spec:
    """The spec of a value that a region gives."""
    inner = next((node for node in region.nodes if node.id == value.node), None)
    return (inner or recorder.node(value.node)).outputs[value.index]
