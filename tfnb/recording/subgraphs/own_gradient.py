"""Values with a gradient of their own: the node ``tfnb.with_gradient``.

The node is the identity of its ``values``; a cotangent of them goes to its ``args``, by a Python rule that lives in the
graph's workspace and not in the graph. A step runs the identity alone (`tfnb.passes.prune` drops the args), and a file
holds the node without its rule: differentiating it there is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.graph import Ref, Value
from tfnb.graph.ops import WITH_GRADIENT
from tfnb.graph.setting import setting
from tfnb.graph.spec import flows
from tfnb.recording.values.recording import Recording, open_recording
from tfnb.recording.values.tensor import Base, Entry, Tensor

FILLS = "backward()"  # how a rule hands gradients to Parameters that are no arguments of it


@dataclass(frozen=True, slots=True)
class OwnRule:
    """A gradient rule of one node: ``function(n, dys)``, and its position in the user's code."""

    function: Callable[[Any, Any], Any]
    where: str

    def __call__(self, n: object, dys: Sequence[torch.Tensor | None]) -> Any:
        return self.function(n, dys)


def attach(
    recorder: Recording, outs: Sequence[Any], values: Sequence[Entry], args: Sequence[Entry], rule: OwnRule, name: str
) -> list[Tensor]:
    """Give ``values`` the gradient ``rule``, with one cotangent per arg; returns the replacements of the values.

    Handles among ``outs`` (None where the value has none) mean the new values, wherever they are kept, as torch sets
    the history of the very tensors that a forward returns.
    """
    first = len(args)
    at = recorder.tape.append(
        WITH_GRADIENT, name, tuple(recorder.symbols.spec(e.fake) for e in values),
        inputs=(*(e.value for e in args), *(e.value for e in values)),
        attrs={"values": tuple(map(Ref, range(first, first + len(values)))), "args": tuple(map(Ref, range(first))),
               "rule": name},
        scope=recorder.scopes.current(),
    )  # fmt: skip
    recorder.space.rules[at.node] = rule
    results = []
    for index, (out, old) in enumerate(zip(outs, values, strict=True)):
        entry = old.of(Value(at.node, index))
        recorder.space.fakes[entry.value] = entry.fake
        results.append(_renewed(recorder, out, entry))
    return results


def _renewed(recorder: Recording, out: object, entry: Entry) -> Tensor:
    if not isinstance(out, Tensor) or out._space is not recorder.space:
        return recorder._wrap(entry)
    out._entry, out._family, out._chain, out._seen = entry, Base(entry), (), 0
    return out


def kept(recorder: Recording, tensor: Any) -> Any:
    """A handle of the current value of ``tensor``, unaffected by later writes; captured data stays plain."""
    if not isinstance(tensor, Tensor) and recorder.variable_of(tensor) is None:
        return tensor
    entry = recorder._entry(tensor)
    node = recorder.node(entry.value.node)
    return node.attrs["value"] if node.op == "tfnb.constant" else recorder._wrap(entry)


def floats(value: object) -> bool:
    """Whether a value is a tensor through which gradients flow."""
    return isinstance(value, torch.Tensor) and flows(value.dtype)


def open_recorder() -> Recording:
    """The recorder that a rule runs under."""
    recorder = open_recording()
    assert recorder is not None
    return recorder


def sealed(recorder: Recording, refuse: Callable[[str], None]) -> AbstractContextManager[None]:
    """Inside, ``refuse(how)`` is asked about each value that leaves the graph."""
    return setting(recorder, refuse=refuse)


def written_at(function: Callable[..., Any]) -> str:
    """``Sign.backward, signs.py line 12``: a function and its position."""
    inner = getattr(function, "__wrapped__", function)
    name = getattr(inner, "__qualname__", repr(inner)).replace("<locals>.", "")
    code = getattr(inner, "__code__", None)
    return f"{name}, {code.co_filename} line {code.co_firstlineno}" if code else name
