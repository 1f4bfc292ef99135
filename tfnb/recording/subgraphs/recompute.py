"""Regions whose values are computed again for the backward pass: `recompute`, and torch.utils.checkpoint.

A region is recorded once, and its nodes carry the tag ``recompute:PATH`` (outer regions first). Where a gradient rule
asks for a value of a region, it gets a copy of the nodes that compute it, from what enters the region; copies carry the
tag ``recomputed``, and a pass that merges duplicates must leave them. Draws, reads of Variables and writes are kept.
Uses private names of torch.utils.checkpoint (tried with torch 2.11 and 2.13).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import takewhile
from typing import Any

import torch.utils.checkpoint

from tfnb.graph import Node, Value
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import WITH_GRADIENT
from tfnb.recording.marks.notes import user_level
from tfnb.recording.values.recording import Recording, open_recording

RECOMPUTED = "recomputed"
_TAG = "recompute:"

Path = tuple[str, ...]


def recompute(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, with intermediate values recomputed in the backward pass instead of kept.

    In a recording the nodes of a call form a region: gradients through it copy the nodes that they need, from the
    tensors that enter the region. Values, draws and gradients are those of ``fn``. Regions may be nested, and the
    gradients differentiated again. Outside a recording it is `torch.utils.checkpoint.checkpoint`.

    >>> import torch, tfnb
    >>> with tfnb.record() as g:
    ...     x = tfnb.placeholder(torch.ones(3))
    ...     dx, = tfnb.gradients(tfnb.recompute(lambda x: x.exp().sin())(x).sum(), [x])
    >>> [node.op for node in g.select(tag="recomputed")]
    ['aten.exp.default']
    """

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = open_recording()
        if recorder is None:
            return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)
        with region(recorder):
            return fn(*args, **kwargs)

    return call


@contextmanager
def region(recorder: Recording) -> Iterator[None]:
    """Nodes recorded inside form a region, within the regions that are open."""
    outer = region_of_tags(recorder.tape.marks.tags)
    recorder.tape.regions += 1
    path = (*outer, f"{recorder.owner.index}.{recorder.tape.regions}")
    tags = frozenset(t for t in recorder.tape.marks.tags if not t.startswith(_TAG))
    with recorder.tape.marked(tags=tags | {_TAG + "/".join(path)}):
        yield


def region_of_tags(tags: frozenset[str]) -> Path:
    """The path of regions that a node with these tags stands in; empty outside."""
    found = next((tag for tag in tags if tag.startswith(_TAG)), None)
    return tuple(found.removeprefix(_TAG).split("/")) if found else ()


class Copies:
    """The copies of regions' nodes that one backward pass has made.

    A value is had ``deep`` regions deep: 0 is the value itself, 1 its copy made from what enters the outermost region
    it stands in, 2 the copy made from what enters the region inside of that one, and so on.
    """

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self._made: dict[tuple[int, int], int] = {}  # (node, deep) -> its copy

    def seen(self, value: Value, by: Path) -> Value:
        """``value`` as seen by a rule of a node in the regions ``by``."""
        deep = self._deep(value, by)
        return value if deep == 0 else self._copied(value, deep)

    def _deep(self, value: Value, by: Path) -> int:
        node = self.recorder.node(value.node)
        if not by or not repeats(node):
            return 0
        pairs = zip(by, region_of_tags(node.tags), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _copied(self, value: Value, deep: int) -> Value:
        needed: set[tuple[int, int]] = set()
        stack = [(value.node, deep)]
        while stack:
            item = stack.pop()
            if item in needed or item in self._made:
                continue
            needed.add(item)
            stack.extend((v.node, d) for v, d in self._inputs(item) if d)
        for item in sorted(needed):  # in a region, ids rise in program order
            self._made[item] = self._copy(item)
        return Value(self._made[value.node, deep], value.index)

    def _inputs(self, item: tuple[int, int]) -> list[tuple[Value, int]]:
        node = self.recorder.node(item[0])
        by = region_of_tags(node.tags)[: item[1]]
        return [(v, self._deep(v, by)) for v in node.inputs]

    def _copy(self, item: tuple[int, int]) -> int:
        recorder, node = self.recorder, self.recorder.node(item[0])
        inputs = tuple(v if d == 0 else Value(self._made[v.node, d], v.index) for v, d in self._inputs(item))
        tags = frozenset(t for t in node.tags if not t.startswith(_TAG)) | {RECOMPUTED}
        name = f"{node.name}_again"
        scope = recorder.scopes.current()
        with recorder.placed(node.device):
            copy = recorder.tape.append(
                node.op, name, node.outputs, inputs=inputs, attrs=node.attrs, tags=tags, scope=scope
            ).node
        for index in range(len(node.outputs)):
            entry = recorder._entry_of_value(node.value(index))
            recorder.space.fakes[Value(copy, index)] = entry.fake
            recorder.space.samples.keep(Value(copy, index), entry.known())
        if node.id in recorder.space.rules:
            recorder.space.rules[copy] = recorder.space.rules[node.id]
        return copy


def repeats(node: Node) -> bool:
    """Whether running the node a second time gives the same values and does nothing else."""
    is_op = node.op.count(".") > 1 or node.op == WITH_GRADIENT
    return is_op and node.stream is None and "update" not in node.tags


def may_fail(node: Node) -> bool:
    """Whether a node can fail on its operands' values, so that a branch or loop may guard against the failure."""
    own = facts_of(node.op)
    whole = not any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in node.outputs)
    return own.may_fail or (whole and own.may_fail_on_integers)


# -- torch.utils.checkpoint ---------------------------------------------------------------------------------------


def _reentrant(recorder: Recording, function: Callable[..., Any], preserve: bool, *args: object) -> Any:
    if torch.is_grad_enabled() and not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        warnings.warn(
            "no input of checkpoint(use_reentrant=True) requires a gradient: plain PyTorch then gives none to the "
            "parameters inside, and a recording does, as with use_reentrant=False",
            stacklevel=user_level(None),
        )
    start = len(recorder.new)
    with region(recorder):
        found = function(*args)
    _say_statistics(recorder, recorder.new[start:])
    return found


def _say_statistics(recorder: Recording, nodes: Sequence[Node]) -> None:
    """Note writes of buffers in a checkpoint, which plain PyTorch makes twice."""
    names = [node.attrs["variable"].name for node in nodes if node.op == "tfnb.assign" and "buffer" in node.tags]
    if names and torch.is_grad_enabled():
        recorder.warn(
            f"torch.utils.checkpoint around a write of {', '.join(names[:3])}{', ...' if names[3:] else ''}: plain "
            "PyTorch computes it again backwards, and so moves running statistics twice in a step; a run moves them "
            "once, as without the checkpoint"
        )


CHECKPOINTS: dict[Any, Callable[..., Any]] = {torch.utils.checkpoint.CheckpointFunction: _reentrant}


def checkpoint_generator(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """The generator behind ``checkpoint(use_reentrant=False)``, opening a region during a recording."""

    def generator(
        fn: object, preserve: bool = True, context_fn: Any = None, *args: object, **kwargs: object
    ) -> Iterator[None]:
        recorder = open_recording()
        if recorder is None:
            yield from original(fn, preserve, context_fn, *args, **kwargs)
            return
        context = context_fn()[0] if context_fn is not None else nullcontext()
        start = len(recorder.new)
        with context, region(recorder):
            yield
        _say_statistics(recorder, recorder.new[start:])

    return generator
