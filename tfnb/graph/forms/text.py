"""The readable form of a graph: one node per line, values named by position, scopes by indentation.

Placeholders stand in the head, and reads of variables where they are used, unless a write comes between. For people
and golden files; what round-trips is JSON (`tfnb.graph.forms.serial`). Two graphs that differ only in ids have the same
text, so a unified difference of texts is a difference of graphs. Imports graph and torch's types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tfnb.graph.contents import Contents
from tfnb.graph.device_request import readable
from tfnb.graph.node import Node, Ref, Value
from tfnb.graph.ops import IN_PLACE
from tfnb.graph.spec import Dim, Spec, dtype_name
from tfnb.graph.subgraph import Recursion, Subgraph
from tfnb.graph.variable import Variable

SHOWN = 8  # elements of a constant that are written out


def text(name: str, contents: Contents) -> str:
    """The text form of ``contents`` under the graph name ``name``; ends without a newline."""
    inline = _inline_reads(contents)
    names = _value_names(contents, inline)
    inputs = ", ".join(f"{one_line(contents.shown(node))}: {_specs(node)}" for node in contents.placeholders)
    body = [f"  {line}" for line in _body(contents, names, inline)]
    guards = [f"  guard {one_line(str(guard.expr))}{_comment(guard.source)}" for guard in contents.guards]
    results = ", ".join(_result(value, contents, names) for value in _ends(contents))
    end = f"}} -> {results}" if results else "}"
    return "\n".join([f"graph {one_line(name)}({inputs}) {{", *body, *guards, end])


def one_line(string: str) -> str:
    """``string`` with every unprintable character escaped, so that the text stays on its line.

    >>> one_line("a\\nb")
    'a\\\\nb'
    """
    if string.isprintable():
        return string
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in string)


def _inline_reads(contents: Contents) -> dict[int, str]:
    """Texts of variable reads printed at their use, by node id: reads with no write between read and last use."""
    labels = {variable: label for label, variable in contents.variables.items()}
    writes: dict[Variable, list[int]] = {}
    for place, node in enumerate(contents.nodes):
        if node.op == "tfnb.assign":
            writes.setdefault(node.attrs["variable"], []).append(place)
    found = {}
    for node in contents.nodes:
        users = contents.consumers.get(Value(node.id), ()) if node.op == "tfnb.read" else ()
        if users:
            first, last = contents.position[node.id], max(contents.position[user] for user in users)
            variable = node.attrs["variable"]
            if not any(first < write < last for write in writes.get(variable, ())):
                found[node.id] = variable_text(labels[variable], variable)
    return found


def variable_text(label: str, variable: Variable) -> str:
    """``fc.weight: var f32[10, 784]``."""
    return f"{one_line(label)}: var {_spec(variable.spec)}"


def _value_names(contents: Contents, inline: Mapping[int, str]) -> dict[int, str]:
    """``%x`` for placeholders, ``%1``, ``%2`` ... for the nodes that get a line, by node id.

    A part of a graph may take values that are fed and that no node of it makes: ``%fed1``, ``%fed2`` ...
    """
    names = {node.id: f"%{one_line(node.name)}" for node in contents.placeholders} | dict(inline)
    fed = dict.fromkeys(v.node for node in contents.nodes for v in node.inputs if v.node not in contents.by_id)
    names |= {number: f"%fed{place}" for place, number in enumerate(fed, 1)}
    others = (node for node in contents.nodes if node.id not in names)
    return names | {node.id: f"%{number}" for number, node in enumerate(others, 1)}


def _body(contents: Contents, names: Mapping[int, str], inline: Mapping[int, str]) -> Iterator[str]:
    labels = {variable: label for label, variable in contents.variables.items()}
    counts = {node.id: len(node.outputs) for node in contents.nodes}
    write = _Writer(names, labels, counts)
    scope: tuple[str, ...] = ()
    source = None
    for node in contents.nodes:
        if node.op == "tfnb.placeholder" or node.id in inline:
            continue
        comment = _comment(node.source) if node.source != source else ""
        source = node.source
        for depth in range(_shared(scope, node.scope), len(node.scope)):
            yield "  " * depth + one_line(node.scope[depth]) + comment
            comment = ""
        scope = node.scope
        yield "  " * len(scope) + write.node(node) + comment
        for part, subgraph in node.attrs.items():
            if isinstance(subgraph, Subgraph):
                yield from ("  " * (len(scope) + 1) + line for line in _subgraph(part, subgraph))


def _subgraph(part: str, subgraph: Subgraph) -> list[str]:
    """The lines of a subgraph under its node; its values are numbered anew."""
    contents = subgraph.contents
    names = _value_names(contents, {})
    inputs = ", ".join(f"{names[v.node]}: {_specs(contents.by_id[v.node])}" for v in subgraph.inputs)
    write = _Writer(names, {}, {node.id: len(node.outputs) for node in contents.nodes})
    results = ", ".join("absent" if value is None else write.value(value) for value in subgraph.outputs)
    guards = [f"  guard {one_line(guard.expr)}{_comment(guard.source)}" for guard in contents.guards]
    body = [f"  {line}" for line in _body(contents, names, {})]
    return [f"{part}({inputs}) {{", *body, *guards, f"}} -> {results}"]


def _shared(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _comment(source: Any) -> str:
    return f"   # {one_line(source.label)}:{source.line}" if source is not None else ""


def _specs(node: Node) -> str:
    """``f32[B]``, or ``(f32[B], i64[B])`` for several outputs; empty for none."""
    specs = [_spec(spec) for spec in node.outputs]
    return specs[0] if len(specs) == 1 else f"({', '.join(specs)})" if specs else ""


def _spec(spec: Spec) -> str:
    return spec.short() + ("" if spec.device == "cpu" else f" on {spec.device}")


def _ends(contents: Contents) -> Iterator[Value]:
    """Values that no node takes."""
    for node in contents.nodes:
        for index in range(len(node.outputs)):
            if Value(node.id, index) not in contents.consumers:
                yield Value(node.id, index)


def _result(value: Value, contents: Contents, names: Mapping[int, str]) -> str:
    node = contents.by_id[value.node]
    suffix = f":{value.index}" if len(node.outputs) > 1 else ""
    return f"{one_line(contents.shown(node))}{suffix}: {names[node.id]}{suffix}"


class _Writer:
    """Writes nodes and their arguments, with the given names of values and variables."""

    def __init__(self, names: Mapping[int, str], labels: Mapping[Variable, str], counts: Mapping[int, int]) -> None:
        self.names, self.labels, self.counts = names, labels, counts

    def node(self, node: Node) -> str:
        """``%2 = aten.addmm(%1, beta=0.5)   f32[B, 10]``."""
        result = f"{self.names[node.id]} = " if node.outputs else ""
        named = [self.argument(node, key, value) for key, value in node.attrs.items()]
        arguments = ", ".join(named if node.attrs else map(self.value, node.inputs))
        after = f" after {', '.join(self.names[i] for i in node.control)}" if node.control else ""
        also = f" with {', '.join(self.names[i] for i in node.effects)}" if node.effects else ""
        device = f" @{one_line(readable(node.device))}" if node.device else ""
        specs = f"   {_specs(node)}" if node.outputs else ""
        where = f" {IN_PLACE}" if IN_PLACE in node.tags else ""
        return f"{result}{one_line(node.op).removesuffix('.default')}({arguments}){where}{after}{also}{device}{specs}"

    def argument(self, node: Node, key: str, value: object) -> str:
        """Tensors and variables by themselves, other arguments as ``key=value``."""
        shown = self.leaf(node, value)
        return shown if isinstance(value, (Ref, Variable, torch.Tensor)) else f"{one_line(key)}={shown}"

    def value(self, value: Value) -> str:
        """``%3``, or ``%3:1`` where the node has several outputs."""
        several = self.counts.get(value.node, value.index + 1) > 1
        return self.names[value.node] + (f":{value.index}" if several else "")

    def leaf(self, node: Node, leaf: object) -> str:
        """One attribute value, for people."""
        match leaf:
            case Ref(input=index):
                return self.value(node.inputs[index])
            case Variable():
                return variable_text(self.labels[leaf], leaf)
            case torch.Tensor():
                return _tensor(leaf)
            case Recursion():
                return leaf.name
            case Subgraph():
                return "{...}"
            case torch.dtype():
                return dtype_name(leaf)
            case Dim() | torch.device() | torch.layout() | torch.memory_format():
                return str(leaf)
            case list():
                return f"[{', '.join(self.leaf(node, item) for item in leaf)}]"
            case tuple():
                items = [self.leaf(node, item) for item in leaf]
                return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        return one_line(repr(leaf))


def _tensor(tensor: torch.Tensor) -> str:
    """The values of a small constant, the spec of a large one."""
    spec = Spec.of(tensor)
    return f"{_spec(spec)} {tensor.tolist()}" if tensor.numel() <= SHOWN else _spec(spec)
