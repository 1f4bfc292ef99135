"""Algebra: a table of rewrites that give the same values from fewer or cheaper ops.

Each row says what it does, for which ops, and how: a function of the node and of what produces its inputs that returns
the value that equals its output, a node in its place, or None. Rows never change dtypes, and never the strides of what
a view looks at. What a compiler does better (fusing pointwise ops) is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfnb.graph import Graph, Node, Ref, Value
from tfnb.graph.op_facts import facts_of, ops_of
from tfnb.graph.ops import overload
from tfnb.passes.rewrite import redirected, with_nodes

_NETS = [op.removeprefix("aten.") for op in sorted(ops_of("net"))]
_OPTIONS = ("has_biases", "num_layers", "bidirectional", "batch_first")


class RewriteView:
    """The graph as seen by a rewrite: producers and consumers of values."""

    def __init__(self, graph: Graph, fixed: Collection[int]) -> None:
        self._nodes = {node.id: node for node in graph.nodes}
        self._consumers = graph.contents.consumers
        self._fixed = fixed

    def update(self, node: Node) -> None:
        """Replace a node by its rewritten form."""
        self._nodes[node.id] = node

    def producer(self, value: Value) -> Node | None:
        """The node that produces a value; None for fed values, whose producers must not be looked at."""
        node = self._nodes.get(value.node)
        return None if node is None or node.id in self._fixed else node

    def spec(self, value: Value) -> Any:
        """dtype and shape of a value; None for one that only the feeds know."""
        node = self._nodes.get(value.node)
        return None if node is None else node.outputs[value.index]

    def only_user(self, value: Value) -> bool:
        """Whether exactly one node consumes the value, and no fetch."""
        return len(self._consumers.get(value, ())) == 1 and value.node not in self._fixed

    def users(self, value: Value) -> list[Node]:
        """Nodes that take the value."""
        return [self._nodes[i] for i in self._consumers.get(value, ())]


Rewrite = Callable[[Node, RewriteView], Value | Node | None]


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """One rewrite: its name is its comment."""

    name: str
    ops: frozenset[str]
    rewrite: Rewrite


ROWS: list[RewriteRule] = []


def row(name: str, *ops: str) -> Callable[[Rewrite], Rewrite]:
    """Add a row to the table."""

    def add(rewrite: Rewrite) -> Rewrite:
        ROWS.append(RewriteRule(name, frozenset(f"aten.{op}" for op in ops), rewrite))
        return rewrite

    return add


def simplify(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Apply the table once to every node. Removes nothing: prune drops unused nodes."""
    fixed = {value.node for value in (*fetches, *feeds)}
    look = RewriteView(graph, {value.node for value in feeds})
    same: dict[Value, Value] = {}
    nodes: list[Node] = []
    for old in graph.nodes:
        node = redirected(old, same)
        found = None if node.id in look._fixed else _rewritten(node, look)
        if found is not None and not _is_ordered(node, found, look):
            found = None
        if isinstance(found, Node):
            node = found
        elif found is not None and node.id not in fixed:
            same[node.value()] = found
        look.update(node)
        nodes.append(node)
    return with_nodes(graph, nodes)


def _is_ordered(node: Node, found: Value | Node, look: RewriteView) -> bool:
    """Whether a rewrite keeps the control dependencies of the bypassed nodes."""
    left = found.inputs if isinstance(found, Node) else (found,)
    before = [look._nodes[v.node] for v in node.inputs if v not in left and v.node in look._nodes]
    if any(not set(each.control) <= set(node.control) for each in before):
        return False
    users = look.users(node.value()) if node.control and not isinstance(found, Node) else []
    return all(set(node.control) <= set(user.control) for user in users)


def _rewritten(node: Node, look: RewriteView) -> Value | Node | None:
    return next((r for row in _BY_OP.get(node.op, ()) if (r := row.rewrite(node, look)) is not None), None)


# -- what rows ask ----------------------------------------------------------------------------------------------


def _input(node: Node, name: str = "self") -> Value | None:
    """The value of the argument ``name``, if a tensor."""
    ref = node.attrs.get(name)
    return node.inputs[ref.input] if isinstance(ref, Ref) else None


def _unchanged(node: Node, look: RewriteView) -> Value | None:
    """The input, if its dtype, shape and device equal the output's."""
    source = _input(node)
    return source if source is not None and look.spec(source) == node.outputs[0] else None


def _before(node: Node, look: RewriteView, *ops: str) -> Node | None:
    """The producer of the input, if its op is among ``ops``."""
    source = _input(node)
    producer = None if source is None else look.producer(source)
    return producer if producer is not None and producer.op in {f"aten.{op}" for op in ops} else None


def _is_number(node: Node, name: str, number: int) -> bool:
    value = node.attrs.get(name)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


# -- the table --------------------------------------------------------------------------------------------------


@row("alias(x) -> x", "alias.default", "detach.default", "lift_fresh.default")
def _(node: Node, look: RewriteView) -> Value | None:
    return _unchanged(node, look)


@row("x * 1 -> x; x / 1 -> x", "mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar")
def _(node: Node, look: RewriteView) -> Value | None:
    return _unchanged(node, look) if _is_number(node, "other", 1) else None


@row("(x.T).T -> x", "t.default", "transpose.int")
def _(node: Node, look: RewriteView) -> Value | None:
    inner = _before(node, look, "t.default", "transpose.int")
    return _input(inner) if inner is not None and _swapped(inner) == _swapped(node) is not None else None


def _swapped(node: Node) -> tuple[int, int] | None:
    """The two axes that a node exchanges, or None."""
    rank = len(node.outputs[0].shape)
    if rank < 2:
        return None
    if node.op == "aten.t.default":
        return 0, 1
    first, second = sorted((node.attrs["dim0"] % rank, node.attrs["dim1"] % rank))
    return first, second


@row("x.permute(p).permute(q) -> x.permute(p[q])", "permute.default")
def _(node: Node, look: RewriteView) -> Value | Node | None:
    inner = _before(node, look, "permute.default")
    if inner is None:
        return None
    rank = len(node.outputs[0].shape)
    first = [dim % rank for dim in inner.attrs["dims"]]
    dims = [first[dim % rank] for dim in node.attrs["dims"]]
    source = inner.inputs[0]
    return source if dims == list(range(rank)) else replace(node, inputs=(source,), attrs={**node.attrs, "dims": dims})


@row("x.view(its shape) -> x", "view.default", "expand.default")
def _(node: Node, look: RewriteView) -> Value | None:
    return _unchanged(node, look)


@row("x.view(a).view(b) -> x.view(b)", "view.default")
def _(node: Node, look: RewriteView) -> Node | None:
    inner = _before(node, look, "view.default", "_unsafe_view.default")
    return None if inner is None else replace(node, inputs=inner.inputs[:1])


@row("x.clone() -> x, where nobody minds the memory", "clone.default")
def _(node: Node, look: RewriteView) -> Value | None:
    """Dropout with p = 0 is such a copy. A view may not be possible on other strides, and a write needs its own."""
    if "memory_format" in node.attrs:
        return None
    return _unchanged(node, look) if _only_for_values(node, look) else None


def _takes_any_memory(node: Node) -> bool:
    """Whether an op allocates its outputs, for all strides of its inputs: true for torch's own kernels."""
    if not node.op.startswith("aten."):
        return False
    op = overload(node.op)
    returns_new = all(r.alias_info is None for r in op._schema.returns)
    return (
        returns_new and not op._schema.is_mutable and node.op not in ("aten._unsafe_view.default", "aten.clone.default")
    )


@row("zeros with row i from each of n values, added up -> stack", "add.Tensor")
def _(node: Node, look: RewriteView) -> Node | None:
    """The cotangent of ``x.unbind(d)``: n copies of x-sized zeros otherwise."""
    parts, dim, count = _summands(node, look, "aten.select_backward.default")
    at = {part.attrs["index"] % count: part.inputs[0] for part in parts}
    if not parts or len(at) != len(parts) or sorted(at) != list(range(count)):
        return None
    return _joined(node, "aten.stack.default", [at[i] for i in range(count)], dim)


@row("zeros with rows a:b from each of n values, added up -> cat", "add.Tensor")
def _(node: Node, look: RewriteView) -> Node | None:
    """The cotangent of ``x.split(sizes, d)``."""
    parts, dim, count = _summands(node, look, "aten.slice_backward.default")
    if not parts or not all(
        p.attrs["step"] == 1 and type(p.attrs["start"]) is type(p.attrs["end"]) is int for p in parts
    ):
        return None
    parts = sorted(parts, key=lambda part: part.attrs["start"])
    ends = [0, *(part.attrs["end"] for part in parts)]
    meets = all(part.attrs["start"] == end for part, end in zip(parts, ends, strict=False))
    whole = ends[-1] >= count and all(end <= count for end in ends[:-1])
    return _joined(node, "aten.cat.default", [part.inputs[0] for part in parts], dim) if meets and whole else None


@row("a + (zeros with v added to row i) -> a with v added to row i", "add.Tensor")
def _(node: Node, look: RewriteView) -> Node | None:
    """Accumulate the cotangent of ``x[:, i]`` in a loop in place, without zeros of the size of x in each iteration.

    Only of one row: of two that are the same the sum would be rounded in another order.
    """
    if "alpha" in node.attrs or len(node.inputs) != 2:
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        rows = look.producer(value)
        if rows is None or rows.op != "aten.index_add.default" or "alpha" in rows.attrs or not look.only_user(value):
            continue
        zeros, index = look.producer(rows.inputs[0]), look.spec(rows.inputs[1])
        is_zeros = zeros is not None and facts_of(zeros.op).zeros
        if is_zeros and index.shape in ((), (1,)) and look.spec(other) == node.outputs[0] == rows.outputs[0]:
            return replace(node, op=rows.op, inputs=(other, *rows.inputs[1:]), attrs=rows.attrs)
    return None


@row("x.copy(v), both alike -> v, where nobody minds the memory", "copy.default")
def _(node: Node, look: RewriteView) -> Value | None:
    source = node.inputs[-1]
    return source if look.spec(source) == node.outputs[0] and _only_for_values(node, look) else None


def _only_for_values(node: Node, look: RewriteView) -> bool:
    users = look.users(node.value())
    return bool(users) and all(map(_takes_any_memory, users))


@row(
    "attention, whose gradient is taken -> attention that keeps its log-sum-exp", "scaled_dot_product_attention.default"
)
def _(node: Node, look: RewriteView) -> Node | None:
    """The gradient's rule computes the forward once more for its log-sum-exp; then both are one."""
    for other in look.users(node.inputs[0]):
        if other.op == "tfnb.attention.default" and other.inputs == node.inputs:
            same = other.attrs["causal"] == node.attrs.get("is_causal", False)
            if same and node.attrs.get("scale", other.attrs["scale"]) == other.attrs["scale"]:
                return replace(node, op=other.op, attrs=other.attrs, outputs=other.outputs)
    return None


@row("a recurrent net, whose gradient is taken -> the net that keeps what it needs", *_NETS)
def _(node: Node, look: RewriteView) -> Node | None:
    """Share the forward that a recurrent net's gradient computes again, unless the region is to be recomputed."""
    if any(tag.startswith("recompute:") for tag in node.tags):
        return None
    for other in look.users(node.inputs[0]):
        if other.op == "tfnb.recurrent_net.default" and other.inputs == node.inputs:
            own = (node.op.split(".")[1], *(node.attrs.get(name) for name in _OPTIONS))
            if own == tuple(other.attrs.get(name) for name in ("kind", "biases", "layers", "both", "batch_first")):
                return replace(node, op=other.op, attrs=other.attrs, outputs=other.outputs)
    return None


def _summands(node: Node, look: RewriteView, op: str) -> tuple[list[Node], int, int]:
    """The summands of a tree of additions, with their ``dim`` and number of rows.

    No node, unless all are ``op``, used only here, and put values into zeros of one shape along one axis.
    """
    none: tuple[list[Node], int, int] = [], 0, 1
    if "alpha" in node.attrs or len(node.inputs) != 2:
        return none
    found: list[Node] = []
    stack: list[Value] = list(node.inputs)
    while stack:
        value = stack.pop()
        part = look.producer(value)
        if part is None or not look.only_user(value) or part.outputs[0].dtype is not node.outputs[0].dtype:
            return none
        if part.op == op:
            found.append(part)
        elif part.op == "aten.add.Tensor" and "alpha" not in part.attrs and len(part.inputs) == 2:
            stack.extend(part.inputs)
        else:
            return none
    dim, sizes = found[0].attrs["dim"], found[0].attrs["input_sizes"]
    alike = all(part.attrs["dim"] == dim and part.attrs["input_sizes"] == sizes for part in found)
    return (found, dim, sizes[dim]) if alike and isinstance(sizes[dim], int) else none


def _joined(node: Node, op: str, values: Sequence[Value], dim: int) -> Node:
    refs: Iterable[Ref] = map(Ref, range(len(values)))
    return replace(node, op=op, inputs=tuple(values), attrs={"tensors": list(refs), "dim": dim})


_BY_OP: dict[str, list[RewriteRule]] = {}
for _row in ROWS:
    for _op in _row.ops:
        _BY_OP.setdefault(_op, []).append(_row)
