"""Stacking: many small products that share an operand, or a sum, become one product of stacked rows.

An unrolled layer multiplies by one weight at every step. What does not wait for the step before is one product:

    x_1 @ w, x_2 @ w, ...          ->  [x_1; x_2; ...] @ w, in chunks          (also b + x_i @ w)
    x_1.T @ y_1 + x_2.T @ y_2 ...  ->  [x_1; x_2; ...].T @ [y_1; y_2; ...]     the weight's gradient
    x_1.sum(0) + x_2.sum(0) ...    ->  [x_1; x_2; ...].sum(0)                  the bias's gradient
    c + x @ w                      ->  addmm(c, x, w)                          what is left

The sums are the same numbers in another order, equal within rounding; of a long one so many terms at a time as a loop
runs iterations, in the order in which they come. Rows are copied once, so a product is stacked where its rows are fewer
than what copying them saves: see `_few`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from math import prod

from tfnb.graph import Contents, Graph, Node, Ref, Spec, Value
from tfnb.graph.graph import new_id
from tfnb.graph.spec import Dim, Size, flows, is_static
from tfnb.kernels.rows import FEWEST, ITERATIONS
from tfnb.passes.rewrite import is_pure, redirected, with_nodes

ROUNDS = 32  # of stacked layers, one upon the other
LARGE = 256 << 10  # bytes of products that are there at once, of which fewer are made towards the end
_TRANSPOSES = ("aten.t.default", "aten.transpose.int")


def stack(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Apply the table above; prune drops unused nodes."""
    fixed = {value.node for value in (*fetches, *feeds)} | {i for node in graph.nodes for i in node.control}
    done: set[int] = set()
    for _ in range(ROUNDS):
        after = _rows_of_one_weight(graph, fixed, done)
        if after is graph:
            break
        graph = after
    return _accumulated(_sums(graph, fixed), fixed)


def _few(rows: Size, first: Size, second: Size) -> bool:
    """Whether copying an operand of so many rows is cheap beside the computation with it.

    Rows that only a run knows count as few where they are a plain batch, and as many where they are more than that.
    """
    if isinstance(first, Dim) or isinstance(second, Dim):
        return False
    if isinstance(rows, Dim):
        return rows.is_symbol
    return rows * (first + second) <= first * second


def _new(like: Node, suffix: str, op: str, inputs: Sequence[Value], outputs: tuple[Spec, ...], **attrs: object) -> Node:
    """A node in the place, and with the source, of another."""
    new = new_id()
    return replace(
        like, id=new, name=f"{like.name}.{suffix}{new}", op=op, inputs=tuple(inputs), outputs=outputs, attrs=attrs,
        control=(), forward=None,
    )  # fmt: skip


def _cat(like: Node, values: Sequence[Value], specs: Sequence[Spec]) -> Node:
    """The rows of several matrices below one another."""
    rows = [spec.shape[0] for spec in specs]
    whole = sum(rows) if is_static(rows) else Dim(" + ".join(f"({n})" for n in rows))
    spec = replace(specs[0], shape=(whole, *specs[0].shape[1:]))
    refs = [Ref(i) for i in range(len(values))]
    return _new(like, "rows", "aten.cat.default", values, (spec,), tensors=refs, dim=0)


# -- one weight, many rows --------------------------------------------------------------------------------------


def _rows_of_one_weight(graph: Graph, fixed: set[int], done: set[int]) -> Graph:
    """x_i @ w -> chunks of [x_1; x_2; ...] @ w, for the x_i that need none of these products.

    So many at a time as a loop runs iterations, since all of a product's rows are held until the last one is taken.
    done: the products made so, which are not stacked again.
    """
    contents = graph.contents
    groups = [some for group in _groups(graph, fixed | done) for some in _at_a_time(group)]
    members = {node.id for group in groups for node in group}
    before: dict[int, list[Node]] = {}
    same: dict[Value, Value] = {}
    moved: set[int] = set()
    for group in groups:
        first = contents.position[group[0].id]
        needed = _later(contents, group, first)
        if needed is None or moved & {node.id for node in needed} or members & {node.id for node in needed}:
            continue
        moved |= {node.id for node in needed}
        cat, product, chunks = _stacked(group, contents)
        done.add(product.id)
        before.setdefault(group[0].id, []).extend([*needed, cat, product, chunks])
        same |= {node.value(): chunks.value(i) for i, node in enumerate(group)}
    if not same:
        return graph
    gone = moved | {value.node for value in same}  # a product that stayed would be stacked once more
    placed = (n for node in graph.nodes for n in (*before.get(node.id, ()), *([] if node.id in gone else [node])))
    return with_nodes(graph, [redirected(node, same) for node in placed])


def _at_a_time(group: list[Node]) -> Iterator[list[Node]]:
    """As many as a loop runs iterations; of large products no more than come after them.

    The last ones are held when everything is that the backward pass takes, and what they make is not there before.
    """
    shape, tapers = group[0].outputs[0].shape, False
    if is_static(shape) and shape[0] >= FEWEST:  # a product of fewer rows has other bits than one of many
        tapers = ITERATIONS * prod(shape) * group[0].outputs[0].dtype.itemsize >= LARGE
    left = len(group)
    found: list[list[Node]] = []
    while left:
        after = len(group) - left
        size = min(max(after, 1), ITERATIONS, left) if tapers else (left % ITERATIONS or ITERATIONS)
        found.append(group[left - size : left])
        left -= size
    yield from (some for some in reversed(found) if len(some) >= FEWEST)


def _groups(graph: Graph, fixed: set[int]) -> list[list[Node]]:
    """Products that share a weight, not waiting for one another nor for another group."""
    candidates: dict[Hashable, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        key = None if node.id in fixed else shared(node, graph.contents)
        if key is not None:
            candidates[key].append(node)
    groups = [group for group in candidates.values() if len(group) >= FEWEST]
    of = {node.id: bit for bit, group in enumerate(groups) for node in group}
    behind: dict[int, int] = {}  # node -> the groups, as bits, that it waits for
    for node in graph.nodes if groups else ():
        waits = 0
        for value in node.inputs:
            waits |= behind.get(value.node, 0)
            waits |= 1 << of[value.node] if value.node in of else 0
        behind[node.id] = waits
    free = {bit: [n for n in group if not behind[n.id] >> bit & 1] for bit, group in enumerate(groups)}
    free = {bit: group for bit, group in free.items() if len(group) >= FEWEST}
    every = sum(1 << bit for bit in free)
    ready = [group for group in free.values() if not any(behind[node.id] & every for node in group)]
    return ready or list(free.values())[:1]  # those that wait for one another in a circle: one at a time


def shared(node: Node, contents: Contents) -> Hashable | None:
    """Key of products in one group, ``rows @ weight`` or with a bias; None for other nodes."""
    if node.op not in ("aten.mm.default", "aten.addmm.default") or len(node.attrs) != len(node.inputs) or node.control:
        return None
    *bias, rows, weight = node.inputs
    spec, to = _spec(contents, rows), _spec(contents, weight)
    if spec is None or to is None or (bias and len(getattr(_spec(contents, bias[0]), "shape", (0, 0))) != 1):
        return None
    alike = tuple(node.attrs) == (("self", "mat1", "mat2") if bias else ("self", "mat2"))
    few = _few(spec.shape[0], *to.shape) and flows(spec.dtype)
    return (node.op, *bias, weight, spec, node.device) if alike and few else None


def _spec(contents: Contents, value: Value) -> Spec | None:
    node = contents.by_id.get(value.node)
    return None if node is None else node.outputs[value.index]


def _later(contents: Contents, group: Sequence[Node], first: int) -> list[Node] | None:
    """Nodes behind ``first`` needed by the group, in order; None if they may not move to the front."""
    found: dict[int, Node] = {}
    pending = [value.node for node in group for value in node.inputs]
    while pending:
        place = contents.position.get(pending.pop(), -1)
        node = contents.nodes[place]
        if place < first or node.id in found:
            continue
        if not is_pure(node) or node.control or node.symbols:
            return None
        found[node.id] = node
        pending.extend(value.node for value in node.inputs)
    return sorted(found.values(), key=lambda node: contents.position[node.id])


def _stacked(group: Sequence[Node], contents: Contents) -> tuple[Node, Node, Node]:
    first = group[0]
    *bias, _, weight = first.inputs
    rows = [node.inputs[-2] for node in group]
    cat = _cat(first, rows, [contents.by_id[v.node].outputs[v.index] for v in rows])
    spec = replace(first.outputs[0], shape=(cat.outputs[0].shape[0], first.outputs[0].shape[1]))
    product = _new(first, "stack", first.op, [*bias, cat.value(), weight], (spec,), **first.attrs)
    outputs = tuple(node.outputs[0] for node in group)
    chunks = _new(first, "chunks", "aten.chunk.default", [product.value()], outputs, self=Ref(0), chunks=len(group))
    return cat, product, chunks


# -- sums ---------------------------------------------------------------------------------------------------------


def _sums(graph: Graph, fixed: set[int]) -> Graph:
    """Sums of x_i.T @ y_i, and of x_i.sum(0), as one product or sum over all rows."""
    sums = _Sums(graph, fixed)
    return with_nodes(graph, [new for node in graph.nodes for new in sums.rewritten(node)])


class _Sums:
    """Trees of additions, and the stacked rows that several of them share."""

    def __init__(self, graph: Graph, fixed: set[int]) -> None:
        self.contents, self.fixed = graph.contents, fixed
        self.nodes = self.contents.by_id
        self._rows: dict[tuple[Value, ...], Node] = {}

    def rewritten(self, node: Node) -> Iterator[Node]:
        """The node, or nodes that compute its value by stacked products."""
        if not _is_sum(node, node.outputs) or self._is_inner(node):
            yield node
            return
        kinds: dict[Hashable, list[Node]] = defaultdict(list)
        rest: list[Value] = []
        for value in self._terms(node):
            kind = self._kind(value)
            if kind is None:
                rest.append(value)
            else:
                kinds[kind].append(self.nodes[value.node])
        new: list[Node] = []
        stacked: list[Node] = []
        for terms in kinds.values():
            if len(terms) < FEWEST:
                rest.extend(term.value() for term in terms)
            else:
                terms.sort(key=lambda node: self.contents.position[node.id])
                stacked += [self._stacked(terms[at : at + ITERATIONS], new) for at in range(0, len(terms), ITERATIONS)]
        if not stacked:
            yield node
            return
        yield from new
        yield from _added(node, rest, stacked)

    def _is_inner(self, node: Node) -> bool:
        users = self.contents.consumers.get(node.value(), ())
        return self._alone(node.value()) and _is_sum(self.nodes[users[0]], node.outputs)

    def _alone(self, value: Value) -> bool:
        return len(self.contents.consumers.get(value, ())) == 1 and value.node not in self.fixed

    def _terms(self, root: Node) -> list[Value]:
        """The terms of a tree of additions, in order."""
        found: list[Value] = []
        pending = list(reversed(root.inputs))
        while pending:
            value = pending.pop()
            node = self.nodes.get(value.node)
            if node is not None and self._alone(value) and _is_sum(node, root.outputs):
                pending.extend(reversed(node.inputs))
            else:
                found.append(value)
        return found

    def _kind(self, value: Value) -> Hashable | None:
        """Key of terms that can be stacked together; None for other terms."""
        node = self.nodes.get(value.node)
        if node is None or not self._alone(value) or node.control or not flows(node.outputs[0].dtype):
            return None
        sources = factors(node, self.contents, self.fixed) or ()
        specs = [_spec(self.contents, source) for source in sources]
        columns = [spec.shape[1] for spec in specs if spec is not None]
        return (node.op, node.device, node.attrs.get("keepdim"), node.outputs[0].dtype, *columns) if columns else None

    def _stacked(self, terms: list[Node], new: list[Node]) -> Node:
        columns = list(zip(*(factors(term, self.contents, self.fixed) or () for term in terms), strict=True))
        rows = [self._all_rows(terms[0], column, new) for column in columns]
        last = terms[-1]
        if len(rows) == 1:
            return _new(last, "stack", last.op, [rows[0].value()], last.outputs, **last.attrs)
        left = replace(rows[0].outputs[0], shape=rows[0].outputs[0].shape[::-1])
        new.append(_new(last, "turned", "aten.t.default", [rows[0].value()], (left,), self=Ref(0)))
        inputs = [new[-1].value(), rows[1].value()]
        return _new(last, "stack", "aten.mm.default", inputs, last.outputs, self=Ref(0), mat2=Ref(1))

    def _all_rows(self, like: Node, values: tuple[Value, ...], new: list[Node]) -> Node:
        if values not in self._rows:
            new.append(_cat(like, values, [self.nodes[v.node].outputs[v.index] for v in values]))
            self._rows[values] = new[-1]
        return self._rows[values]


def factors(node: Node, contents: Contents, fixed: Collection[int] = ()) -> list[Value] | None:
    """The matrices whose rows a term sums: a and b of ``a.t() @ b``, or b of ``b.sum(0)``; None unless the rows are
    few.
    """
    found: list[Value] = []
    if node.op == "aten.mm.default":
        left = contents.by_id.get(node.inputs[0].node)
        turned = None if left is None or left.id in fixed else transposed(left)
        found = [] if turned is None else [turned, node.inputs[1]]
    elif node.op == "aten.sum.dim_IntList" and node.attrs["dim"] in ([0], (0,)) and "dtype" not in node.attrs:
        found = [node.inputs[0]]
    specs = [spec for value in found if (spec := _spec(contents, value)) is not None and len(spec.shape) == 2]
    if not specs or len(specs) < len(found) or len({spec.shape[0] for spec in specs}) != 1:
        return None
    columns = [spec.shape[1] for spec in specs]
    return found if flows(specs[0].dtype) and _few(specs[0].shape[0], columns[0], columns[-1]) else None


def transposed(node: Node) -> Value | None:
    """The matrix transposed by the node; None for other nodes."""
    if node.op not in _TRANSPOSES or len(node.outputs[0].shape) != 2:
        return None
    if node.op == "aten.transpose.int" and node.attrs["dim0"] % 2 == node.attrs["dim1"] % 2:
        return None
    return node.inputs[0]


def _is_sum(node: Node, outputs: tuple[Spec, ...]) -> bool:
    """Whether the node adds two values of its own shape."""
    return (
        node.op == "aten.add.Tensor" and len(node.inputs) == 2 and "alpha" not in node.attrs
        and node.outputs == outputs and not node.control and node.stream is None
    )  # fmt: skip


def _added(node: Node, rest: Sequence[Value], stacked: Sequence[Node]) -> Iterator[Node]:
    """``node`` as the sum of the stacked terms, in order, and of the rest."""
    first, *others = stacked
    terms = [*(term.value() for term in others), *rest]
    if not terms:
        yield replace(node, op=first.op, inputs=first.inputs, attrs=first.attrs)
        return
    yield from stacked
    total = first.value()
    for term in terms[:-1]:
        added = _new(node, "sum", node.op, [total, term], node.outputs, **node.attrs)
        yield added
        total = added.value()
    yield replace(node, inputs=(total, terms[-1]))


# -- what is left -------------------------------------------------------------------------------------------------


def _accumulated(graph: Graph, fixed: set[int]) -> Graph:
    """c + x @ w -> addmm(c, x, w): one kernel and one matrix less."""
    contents = graph.contents

    def rewritten(node: Node) -> Node:
        if node.op != "aten.add.Tensor" or len(node.inputs) != 2 or "alpha" in node.attrs:
            return node
        for other, value in (node.inputs, node.inputs[::-1]):
            product, spec = contents.by_id.get(value.node), _spec(contents, other)
            if (
                product is not None and product.op == "aten.mm.default" and product.outputs == node.outputs
                and spec is not None and spec.dtype is node.outputs[0].dtype and flows(spec.dtype)
                and spec.device == node.outputs[0].device and len(spec.shape) in (1, 2)
                and product.device == node.device  # else the operands would go to the place of the sum
                and len(contents.consumers[value]) == 1 and value.node not in fixed and not product.control
            ):  # fmt: skip
                attrs = {"self": Ref(0), "mat1": Ref(1), "mat2": Ref(2)}
                return replace(node, op="aten.addmm.default", inputs=(other, *product.inputs), attrs=attrs)
        return node

    return with_nodes(graph, [rewritten(node) for node in graph.nodes])
