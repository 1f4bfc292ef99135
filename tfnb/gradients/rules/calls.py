"""Functions that call themselves: the gradient is a function of the same kind.

Its body computes the forward body again, from what the call was given, and goes backwards through it; the calls inside
become calls of the gradient. So nothing of a recursion is kept but its arguments. Semantics S-13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tfnb.gradients.rule_table import COMPLEX, RULES, Cotangents, Forward, Rule
from tfnb.gradients.slices import IndexedSlices
from tfnb.gradients.walker import Walk
from tfnb.graph import Node, Recursion, Value, ops
from tfnb.graph.graph import new_id
from tfnb.recording.subgraphs.own_gradient import open_recorder
from tfnb.recording.subgraphs.recursive_calls import RecursiveDefinition, opened
from tfnb.recording.values.recording import Recording


def _call(n: Forward, dys: Cotangents) -> list[torch.Tensor | None]:
    recorder, node = open_recorder(), n.outs[0].node  # type: ignore[attr-defined]  # recorded
    function: Recursion = node.attrs["function"]
    active = tuple(n.needed)
    given = tuple(i for i in range(len(n.outs)) if dys.given(i) is not None)
    key = (function, active, given)
    args: list[Any] = [*n.inputs, *(dys[i] for i in given)]
    if key in recorder.calls:
        return _entries(active, recorder.calls[key], args, node)
    body = function.body
    outputs = [body.outputs[i] for i in given]
    known = [v for v in (*body.inputs, *outputs) if v is not None]
    inner = {v: body.contents.by_id[v.node] for v in known}
    targets = [v for v, wanted in zip(body.inputs, active, strict=True) if wanted]
    definition = RecursiveDefinition(
        recorder, f"{function.name}_grad", function.limit, [inner[v].outputs[v.index] for v in known],
        [inner[v].outputs[v.index] for v in targets], [inner[v].name for v in known],
    )  # fmt: skip

    def backward(*values: Any) -> Sequence[torch.Tensor]:
        inputs = [recorder._entry(t).value for t in values]
        same = dict(zip(body.inputs, inputs, strict=False))
        nodes = _again(recorder, body.contents.nodes, same)
        walk = Walk(recorder, [same[v] for v in targets])
        walk.tables.update(same[v] for v in targets)
        walk.run(nodes, [(same.get(v, v), dy) for v, dy in zip(outputs, values[len(body.inputs) :], strict=True) if v])
        found = [walk.total(same[v]) for v in targets]
        pairs = zip(found, [values[i] for i, wanted in enumerate(active) if wanted], strict=True)
        return [torch.zeros_like(x) if dx is None else _dense(dx, definition.function.name) for dx, x in pairs]

    with recorder.scope(definition.function.name) as scope:
        with opened(recorder, key, definition):
            definition.define(backward, scope)
        return _entries(active, definition, args, node)


def _dense(dx: torch.Tensor | IndexedSlices, function: str) -> torch.Tensor:
    return dx.to_dense(f"{function} calls itself") if isinstance(dx, IndexedSlices) else dx


def _entries(
    active: Sequence[bool], of: RecursiveDefinition, args: Sequence[Any], node: Node
) -> list[torch.Tensor | None]:
    found = iter(of.call(args, node.stream))
    return [next(found) if wanted else None for wanted in active]


def _again(recorder: Recording, nodes: Sequence[Node], same: dict[Value, Value]) -> list[Node]:
    """Copies of the nodes, on the values in ``same``, to which their outputs are added."""
    made = []
    ids: Mapping[int, int] = {node.id: new_id() for node in nodes}
    for node in nodes:
        if node.op == "tfnb.placeholder":
            continue
        inputs = tuple(same.get(v, v) for v in node.inputs)
        copy = replace(node, id=ids[node.id], inputs=inputs, control=tuple(ids[i] for i in node.control))
        recorder.tape.put(copy)
        made.append(recorder.tape.new[-1])
        same.update({node.value(i): copy.value(i) for i in range(len(node.outputs))})
        if node.id in recorder.space.rules:
            recorder.space.rules[copy.id] = recorder.space.rules[node.id]
    return made


RULES[ops.CALL] = Rule(_call)
COMPLEX.add(ops.CALL)
