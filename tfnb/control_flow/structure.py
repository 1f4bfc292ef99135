"""Arguments and results of loops and branches: nested structures of tensors, flat, with a name for each leaf."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, treespec_pprint

from tfnb.errors import InvalidArgument
from tfnb.graph import Spec, Variable, current
from tfnb.graph.spec import sized_if
from tfnb.recording import Operation, Recorder, Tensor

SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)  # sizes that vary, and what is made of them


def of_size(item: object) -> Any:
    """A varying size, or a relation between sizes, as a recorded tensor; other items unchanged."""
    if isinstance(item, torch.SymBool):
        return torch.ops.aten.scalar_tensor(sized_if(item, 1, 0), dtype=torch.int64) != 0
    if isinstance(item, (torch.SymInt, torch.SymFloat)):
        kind = torch.int64 if isinstance(item, torch.SymInt) else torch.get_default_dtype()
        return torch.ops.aten.scalar_tensor(item, dtype=kind)
    return item


def recorder_if_open() -> Recorder | None:
    """The open recording of this thread."""
    recording = current.recording()
    return recording if isinstance(recording, Recorder) else None


def tensors(recorder: Recorder, items: Sequence[Any], what: str) -> list[Tensor]:
    """Leaves as recorded tensors; raises InvalidArgument for one that is no tensor, number, size or Variable."""
    found = []
    for item in map(of_size, items):
        if isinstance(item, Operation) or not isinstance(item, (torch.Tensor, Variable, bool, int, float, complex)):
            kind = "an Operation" if isinstance(item, Operation) else type(item).__name__
            raise InvalidArgument(f"{what} takes and gives tensors and numbers, not {kind}{recorder.tape.at()}")
        found.append(recorder.fresh(recorder._as_tensor(item)))
    return found


def flat(items: object) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested lists, tuples and dicts, and how they nest."""
    return tree_flatten(items)


def form_text(form: TreeSpec) -> str:
    """How leaves nest, for messages: ``(tensor, {'a': tensor})``."""
    return treespec_pprint(form).replace("*", "tensor")


def names(function: Callable[..., Any], variables: Sequence[Any]) -> list[str]:
    """Names of the leaves of loop variables, from the parameters of the function that takes them."""
    try:
        given = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        given = []
    found = []
    for place, variable in enumerate(variables):
        stem = given[place] if place < len(given) else f"variable {place}"
        found += [f"{stem}{keystr(path)}" for path, _ in tree_flatten_with_path(variable)[0]]
    return found


def spec_of(tensor: Tensor) -> Spec:
    """dtype and shape as the graph has them."""
    return tensor.node.outputs[tensor.index]


def truth(recorder: Recorder, item: object, what: str) -> Tensor:
    """A predicate as a recorded tensor of one element; raises InvalidArgument."""
    (tensor,) = tensors(recorder, [item], what)
    if any(size != 1 for size in spec_of(tensor).shape):
        raise InvalidArgument(f"{what} is one truth value, and was given {spec_of(tensor)}{recorder.tape.at()}")
    return tensor


def sample_truth(recorder: Recorder, test: Any) -> bool | None:
    """The truth while recording; None without samples."""
    if isinstance(test, torch.SymBool):
        return recorder.symbols.truth(test)
    sample = test._entry.sample
    return None if sample is None else bool(sample)


def written_at(function: Callable[..., Any]) -> str:
    """Name and line of a function, for messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", repr(function)).replace("<locals>.", "")
    return f"{name}, line {code.co_firstlineno}" if code else name
