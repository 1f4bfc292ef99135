"""`cond`: one of two functions, as the value of a tensor decides in each run. Semantics S-120, S-130."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from tfnb.control_flow.joined_gradients import JoinedGradients
from tfnb.control_flow.structure import flat, form_text, recorder_if_open, sample_truth, tensors, truth, written_at
from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Dim, Ref, Spec, Value, ops
from tfnb.graph.spec import Size
from tfnb.recording import Operation, Recorder
from tfnb.recording.subgraphs.capture import (
    Region,
    append,
    axes,
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


def cond(pred: object, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: object) -> Any:
    """``true_fn(*operands)`` where ``pred`` holds, else ``false_fn(*operands)``; decided in each run.

    pred: one truth value. Both functions are recorded; only the one that is taken runs. They return the same structure
    of tensors and numbers, of the same dtypes and ranks; an axis of two sizes is of a size that varies. They may use
    any tensor and Variable around them, and what they write to those is written where that branch is taken. A branch
    that returns an optimizer's step takes it there; the other one returns a step or None, and `cond` an Operation that
    runs what is taken. Outside a recording, and for a Python bool, the function is just called.

    Raises InvalidArgument for branches that return different structures or dtypes, ShapeError for different ranks.

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
    recorder: Recorder,
    predicate: object,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any],
    scope: str,
) -> Any:
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
    written = dict.fromkeys(base.variable for region in regions for base in region.written)
    found = joined(recorder, predicate, regions, labels, what)
    step = None
    if any(isinstance(item, Operation) for item in (*then.steps, *other.steps)):
        step = recorder.group(tuple(recorder._read_base(var).entry.value for var in written if var is not None))
    tensors_left = iter(found)
    pairs = zip(then.steps, other.steps, strict=True)
    outs = [next(tensors_left) if a is False else (None if a is b is None else step) for a, b in pairs]
    return tree_unflatten(outs, then.form)


def _side(
    recorder: Recorder, function: Callable[..., Any], operands: Sequence[Any], scope: str, *, entered: bool
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

    region = record_region(recorder, call, [], scope=scope, iterations=False, entered=entered, fills=True)
    return _Side(region, *kept)


def _text(side: _Side) -> str:
    if all(step is False for step in side.steps):
        return form_text(side.form)
    words = ["a tensor" if s is False else "None" if s is None else "a step" for s in side.steps]
    return str(tree_unflatten(words, side.form))


def joined(
    recorder: Recorder, predicate: Any, regions: tuple[Region, Region], labels: Sequence[str], what: str
) -> list[Any]:  # fmt: skip
    """The outputs of a conditional over two regions, with the writes of both sides applied.

    An output that is None is absent in that branch. labels: what outputs are called in errors.
    """
    written = list(dict.fromkeys(base for region in regions for base in region.written))
    gradients, own = JoinedGradients(recorder, regions), len(regions[0].outputs)
    columns = zip(*gradients.columns, strict=True) if gradients.columns else ((), ())
    outputs = [
        [*region.outputs, *more, *(_left(base, region) for base in written)]
        for region, more in zip(regions, columns, strict=True)
    ]
    for region, outs in zip(regions, outputs, strict=True):
        region.outputs = list(outs)
    captured = captures(recorder, regions)
    then, other = (subgraph(recorder, r, captured, outs) for r, outs in zip(regions, outputs, strict=True))
    names = [*labels, *gradients.labels, *(f"a tensor that is written ({base.entry.value})" for base in written)]
    sizes = _Sizes(recorder)
    specs = [
        _agreed(recorder, name, regions, pair, what, sizes if place < len(labels) else None)
        for place, (name, *pair) in enumerate(zip(names, *outputs, strict=True))
    ]
    absent = [None in pair for pair in zip(*outputs, strict=True)]
    attrs = {
        "pred": Ref(0), "operands": tuple(Ref(i + 1) for i in range(len(captured))), "then": then, "else": other,
        "shapes": tuple(sizes.stand_in(spec) if lacks else None for spec, lacks in zip(specs, absent, strict=True)),
    }  # fmt: skip
    found = append(recorder, ops.COND, [predicate._entry.value, *captured], attrs, specs)
    count = len(found) - len(written)
    write_back(recorder, written, found[count:], regions)
    gradients.join(predicate, found[own:count])
    return found[:own]


def _left(base: Base, region: Region) -> Value:
    """The value of a tensor of outside after a branch."""
    return region.written.get(base, base.entry.value)


class _Sizes:
    """The sizes of the outputs of a branch statement: a new symbol where the branches give different sizes.

    Outputs whose axes have the same pair of sizes share its symbol, as rows and their labels do.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.fresh: dict[tuple[Size, Size], Size] = {}

    def joined(self, a: Spec, b: Spec) -> Spec:
        """The spec of an output that is ``a`` in one branch and ``b`` in the other."""
        bound = axes(spec for node in self.recorder.tape.nodes for spec in node.outputs)
        pairs = zip(now(self.recorder, a), now(self.recorder, b), strict=True)
        return replace(a, shape=tuple(x if x == y and _symbols(x) <= bound else self._of(x, y) for x, y in pairs))

    def _of(self, a: Size, b: Size) -> Size:
        if (a, b) not in self.fresh:
            symbols = self.recorder.symbols
            self.fresh[a, b] = symbols.size(symbols.env.create_unbacked_symint())
        return self.fresh[a, b]

    def stand_in(self, spec: Spec) -> tuple[Size, ...]:
        """The shape of an absent output in a branch: zero rows for sizes known to the other branch only."""
        made = set(self.fresh.values())
        return tuple(0 if size in made else size for size in spec.shape)


def _symbols(size: Size) -> set[str]:
    return set(size.symbols) if isinstance(size, Dim) else set()


def _agreed(
    recorder: Recorder, name: str, regions: tuple[Region, Region], values: Sequence[Value | None], what: str,
    sizes: _Sizes | None,
) -> Spec:  # fmt: skip
    """The common spec of an output of both branches; raises InvalidArgument or ShapeError.

    sizes: gives symbols to axes that differ; None where the branches have to give one shape.
    """
    kinds = [spec_inside(recorder, r, v) for r, v in zip(regions, values, strict=True) if v is not None]
    a, b = kinds[0], kinds[-1]
    fits = a.dtype == b.dtype and a.device == b.device
    if fits and same_shape(recorder, a, b):
        return a if sizes is None else sizes.joined(a, b)
    if fits and sizes is not None and len(a.shape) == len(b.shape):
        return sizes.joined(a, b)
    how = "" if a.dtype == b.dtype else ": let both give one dtype (a number as 0.0, not as 0)"
    text = f"{name} is {a} in one branch and {b} in the other{how}\n  {what}{recorder.tape.at()}"
    raise (ShapeError if fits else InvalidArgument)(text, details=DISAGREE)


def spec_inside(recorder: Recorder, region: Region, value: Value) -> Spec:
    """The spec of a value that a region gives."""
    inner = next((node for node in region.nodes if node.id == value.node), None)
    return (inner or recorder.node(value.node)).outputs[value.index]
