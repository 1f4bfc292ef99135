"""From plain dataflow back to structured control flow: the inverse of `frames.lower`. Imports graph only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfnb.control_flow.frames import (
    ABSENT,
    ENTER,
    EXIT,
    LOOPCOND,
    MERGE,
    NEXT,
    NODE,
    PUSH,
    ROWS,
    STACK,
    SWITCH,
    TURNS,
    Flow,
    Op,
    Port,
    _is_pair,
)
from tfnb.graph import Contents, Node, Ref, Subgraph, Value, ops
from tfnb.graph.subgraph import row_places


def structured(flow: Flow) -> Contents:
    """The nodes that `lower` made ``flow`` of: loops and branches are read off their Enters, Switches and Merges."""
    return _Raising(flow).contents(0)[0]


class _Raising:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.of_scope: dict[int, list[int]] = {}
        for number, op in enumerate(flow.ops):
            self.of_scope.setdefault(op.scope, []).append(number)
        self.inner = {(s.parent, s.node.id, s.part): n for n, s in enumerate(flow.scopes) if s.node is not None}

    def contents(self, number: int) -> tuple[Contents, dict[Port, Value]]:
        """The nodes of a scope in program order, its placeholders first; and what each port stands for."""
        scope = self.flow.scopes[number]
        values: dict[Port, Value] = dict(scope.inputs)
        nodes = {node.id: node for node in scope.placeholders}
        for at in self.of_scope.get(number, ()):
            op = self.flow.ops[at]
            if op.node is None or op.node.id in nodes or op.node is scope.node:
                continue
            count = len(op.node.outputs) or 1  # a group takes what has none
            outs = [Port(at, i) for i in range(count)] if op.kind == NODE else self.outs(number, op.node)
            nodes[op.node.id] = self.raised(number, op, values)
            values.update(zip(outs, map(op.node.value, range(len(outs))), strict=True))
        return Contents(tuple(nodes.values()), scope.guards), values

    def parts(self, number: int, node: Node) -> Iterator[tuple[int, Op]]:
        """The ops of a loop or branch that stands in a scope."""
        inner = {self.inner.get((number, node.id, part)) for part in ("body", "cond", "then", "else")}
        for scope in {number, *inner} - {None}:
            for at in self.of_scope.get(scope, ()):  # type: ignore[arg-type]
                if self.flow.ops[at].node is node:
                    yield at, self.flow.ops[at]

    def outs(self, number: int, node: Node) -> list[Port]:
        """The ports of the outputs of a loop or branch."""
        found = {(op.kind, op.part): at for at, op in self.parts(number, node)}
        if node.op == ops.COND:
            return [Port(found[MERGE, place]) for place in range(len(node.outputs))]
        outs = [Port(found[EXIT, ("init", k)]) for k in range(len(node.attrs["init"]))]
        rows = [Port(found[STACK, k], i) for k, at in enumerate(row_places(node.attrs)) for i in range(len(at))]
        return [*outs, Port(found[TURNS, None]), *rows]

    def raised(self, number: int, op: Op, values: Mapping[Port, Value]) -> Node:
        node = op.node
        assert node is not None
        if op.kind == NODE:
            return replace(node, inputs=tuple(values[port] for port in op.inputs[: len(node.inputs)]))
        parts = list(self.parts(number, node))
        return self.cond(number, node, parts, values) if node.op == ops.COND else self.loop(number, node, parts, values)

    def cond(self, number: int, node: Node, parts: list[tuple[int, Op]], values: Mapping[Port, Value]) -> Node:
        attrs, inputs = dict(node.attrs), list(node.inputs)
        merges = {op.part: op for _, op in parts if op.kind == MERGE}
        for _, op in parts:
            if op.kind == SWITCH and op.part == "pred":
                inputs[attrs["pred"].input] = values[self.flow.ops[op.inputs[1].op].inputs[0]]
            elif op.kind == SWITCH and isinstance(op.part, int):
                inputs[attrs["operands"][op.part].input] = values[op.inputs[0]]
        for side, part in enumerate(("else", "then")):
            outs = [merges[place].inputs[side] for place in range(len(node.outputs))]
            attrs[part] = self.subgraph(number, node, part, outs)
        return replace(node, inputs=tuple(inputs), attrs=attrs)

    def loop(self, number: int, node: Node, parts: list[tuple[int, Op]], values: Mapping[Port, Value]) -> Node:
        attrs, inputs = dict(node.attrs), list(node.inputs)
        for _, op in parts:
            for ref, port in zip(_taken(attrs, op), op.inputs, strict=False):
                inputs[ref.input] = values[port]
        backs = {op.part: op.inputs[0] for _, op in parts if op.kind == NEXT}
        pushed = {op.part: op.inputs[1] for _, op in parts if op.kind == PUSH}
        carried = [backs["init", k] for k in range(len(attrs["init"]))]
        rows = [pushed[k] for k in range(len(attrs["rows"]))]
        attrs["body"] = self.subgraph(number, node, "body", [*carried, *rows])
        if attrs["cond"] is not None:
            (test,) = (op.inputs[0] for _, op in parts if op.kind == LOOPCOND)
            while (at := self.flow.ops[test.op]).node is node and at.kind in (MERGE, SWITCH) and _is_test(at.part):
                test = at.inputs[-1] if at.kind == MERGE else at.inputs[0]
            attrs["cond"] = self.subgraph(number, node, "cond", [test])
        return replace(node, inputs=tuple(inputs), attrs=attrs)

    def subgraph(self, number: int, node: Node, part: str, outs: Sequence[Port]) -> Subgraph:
        inner = self.inner[number, node.id, part]
        contents, values = self.contents(inner)
        absent = {Port(at) for at in self.of_scope.get(inner, ()) if self.flow.ops[at].kind == ABSENT}
        results = tuple(None if port in absent else values[port] for port in outs)
        return Subgraph(contents, tuple(self.flow.scopes[inner].inputs.values()), results)


def _taken(attrs: Mapping[str, Any], op: Op) -> tuple[Ref, ...]:
    """The inputs of a loop that an op of it takes in."""
    if op.kind == ROWS:
        x = attrs["xs"][op.part]
        return x if _is_pair(x) else (x,)
    if op.kind != ENTER:
        return ()
    name, place = op.part[0]
    if name == "limit":
        return (attrs["limit"],)
    return (attrs[name][place],) if name in ("init", "captures") else ()


def _is_test(part: Any) -> bool:
    return part in (("test", 0), ("below", -2))
