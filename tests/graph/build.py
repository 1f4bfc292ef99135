"""Graphs made by hand, without a recording: a builder, and an evaluator that is the oracle of everything that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tfnb.graph import Contents, Dim, Node, Ref, SourceLine, Spec, Value, Variable
from tfnb.graph.contents import unique
from tfnb.graph.graph import new_id
from tfnb.graph.node import map_leaves
from tfnb.graph.ops import overload


class Builder:
    """Appends nodes; each method returns the new Value.

    >>> b = Builder()
    >>> x = b.placeholder("x", ("B", 3))
    >>> y = b.op("aten.relu.default", b.spec(x), self=x)
    >>> len(b.contents().nodes)
    2
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def node(self, name: str, op: str, outputs: Iterable[Spec] = (), **fields: Any) -> Value:
        """Append a node as it is given, under a unique name."""
        name = unique(name, {node.name for node in self.nodes})
        self.nodes.append(Node(id=new_id(), name=name, op=op, outputs=tuple(outputs), **fields))
        return Value(self.nodes[-1].id)

    def placeholder(self, name: str, shape: Iterable[int | str], dtype: torch.dtype = torch.float32) -> Value:
        """A placeholder; a string in the shape is a size that varies."""
        return self.node(name, "tfnb.placeholder", (Spec(dtype, tuple(map(size, shape))),))

    def constant(self, value: torch.Tensor, name: str = "constant") -> Value:
        """A constant tensor."""
        return self.node(name, "tfnb.constant", (Spec(value.dtype, tuple(value.shape)),), attrs={"value": value})

    def read(self, variable: Variable) -> Value:
        """The value of a variable at this place."""
        return self.node("read", "tfnb.read", (variable.spec,), attrs={"variable": variable})

    def assign(self, variable: Variable, value: Value, **fields: Any) -> Value:
        """A write of a variable."""
        attrs = {"variable": variable, "value": Ref(0)}
        return self.node("assign", "tfnb.assign", (variable.spec,), inputs=(value,), attrs=attrs, **fields)

    def op(self, op: str, /, *outputs: Spec, name: str | None = None, **attrs: Any) -> Value:
        """A torch op; Values among the attrs become inputs."""
        inputs: list[Value] = []

        def leaf(item: Any) -> Any:
            if not isinstance(item, Value):
                return item
            inputs.append(item)
            return Ref(len(inputs) - 1)

        found = {key: map_leaves(leaf, item) for key, item in attrs.items()}
        return self.node(name or op.split(".")[1], op, outputs, inputs=tuple(inputs), attrs=found)

    def spec(self, value: Value) -> Spec:
        """The spec of a value."""
        return next(node for node in self.nodes if node.id == value.node).outputs[value.index]

    def contents(self, **fields: Any) -> Contents:
        """What was built so far."""
        return Contents(tuple(self.nodes), **fields)


def size(size: int | str) -> int | Dim:
    """``Dim("B")`` for ``"B"``."""
    return Dim(size) if isinstance(size, str) else size


def dense() -> Contents:
    """``y = relu(x @ w + b)`` with a symbolic batch, two variables, a scope and sources."""
    b = Builder()
    x = b.placeholder("x", ("B", 4))
    w = b.read(Variable(torch.ones(4, 3), name="fc.weight"))
    bias = b.read(Variable(torch.zeros(3), name="fc.bias"))
    out = Spec(torch.float32, (Dim("B"), 3))
    where = {"scope": ("fc", "linear"), "source": SourceLine("In[3]", 2, "y = fc(x).relu()")}
    linear = {"self": Ref(0), "mat1": Ref(1), "mat2": Ref(2)}
    y = b.node("fc/addmm", "aten.addmm.default", (out,), inputs=(bias, x, w), attrs=linear, **where)
    b.node("y", "aten.relu.default", (out,), inputs=(y,), attrs={"self": Ref(0)}, source=where["source"])
    return b.contents()


def evaluate(contents: Contents, feeds: Mapping[str, torch.Tensor]) -> dict[Value, torch.Tensor]:
    """Every value, computed one node after the other in program order; variables are left as they are."""
    values: dict[Value, Any] = {}
    state = {variable: variable.value() for variable in contents.variables.values()}
    symbols: dict[str, int] = {}
    for node in contents.nodes:
        result = _evaluate_node(node, values, state, symbols, feeds)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for index, spec in enumerate(node.outputs):
            values[Value(node.id, index)] = results[index]
            for want, found in zip(spec.shape, results[index].shape, strict=True):
                if isinstance(want, Dim) and want.is_symbol:
                    symbols.setdefault(want.expr, int(found))
            assert spec.sizes(symbols) == tuple(results[index].shape), f"{node} gave {results[index].shape}"
            assert spec.dtype == results[index].dtype, f"{node} gave {results[index].dtype}"
    return values


def _evaluate_node(
    node: Node, values: Mapping[Value, Any], state: dict[Variable, torch.Tensor], symbols: Mapping[str, int],
    feeds: Mapping[str, torch.Tensor],
) -> Any:  # fmt: skip
    match node.op:
        case "tfnb.placeholder":
            return feeds[node.name]
        case "tfnb.constant":
            return node.attrs["value"]
        case "tfnb.read":
            return state[node.attrs["variable"]]
        case "tfnb.assign":
            state[node.attrs["variable"]] = values[node.inputs[0]]
            return values[node.inputs[0]]
        case "tfnb.group" | "tfnb.guard":
            return ()

    def leaf(item: Any) -> Any:
        if isinstance(item, Ref):
            return values[node.inputs[item.input]]
        return item.evaluate(symbols) if isinstance(item, Dim) else item

    arguments = map_leaves(leaf, dict(node.attrs))
    schema = overload(node.op)._schema
    kwonly = {argument.name for argument in schema.arguments if argument.kwarg_only}
    missing = [a for a in schema.arguments if a.name not in arguments and not a.kwarg_only]
    arguments |= {a.name: a.default_value for a in missing if a.has_default_value()}
    positional = [arguments[a.name] for a in schema.arguments if a.name not in kwonly]
    return overload(node.op)(*positional, **{key: arguments[key] for key in kwonly & arguments.keys()})
