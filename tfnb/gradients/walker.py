"""Reverse mode over a graph: `gradients` adds the nodes that compute derivatives.

Reached values are found forwards from the xs, cotangents go backwards through them in reverse program order, so every
node is met once, after all its consumers. What rules do not see happens here, once: sums of partial cotangents,
broadcasting, promoted dtypes, missing cotangents, integers. Rules run under the recorder, so the result can be
differentiated again. Imports graph and recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from tfnb.errors import InvalidArgument, NoGradient, ShapeError, Unsupported, ensure_type
from tfnb.gradients.arguments import differentiable, entries_of, listed, seed
from tfnb.gradients.decompose import decomposition
from tfnb.gradients.derived import derived_rule, has_formula
from tfnb.gradients.paths import conducted, has_own_rule, ways
from tfnb.gradients.rule_table import (
    COLUMNS,
    COMPLEX,
    COMPOSITES,
    LOOKUPS,
    PASSES,
    READS,
    RULES,
    Cotangents,
    Forward,
    Rule,
    Tensors,
    gives_one,
)  # fmt: skip
from tfnb.gradients.slices import IndexedSlices, added, densifying
from tfnb.graph import Dim, Node, Spec, Value, Variable
from tfnb.graph.collector import uncollected
from tfnb.graph.node import map_leaves
from tfnb.graph.op_facts import unbind
from tfnb.graph.ops import GRADIENT, WITH_GRADIENT, overload
from tfnb.graph.spec import flows, is_static
from tfnb.recording import Tensor, reopen
from tfnb.recording.subgraphs.recompute import Copies, region_of_tags
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tape import FROZEN, LEAF
from tfnb.recording.values.workspace import Derivative

Hook = Callable[[torch.Tensor], torch.Tensor | None]
_ALIAS = "aten.alias.default"
_GIVEN = frozenset({"tfnb.read", "tfnb.constant"})
_STRAIGHT = frozenset({"no_grad", "in_place"})
_LARGE = 1 << 20  # bytes; below, a dense gradient of some rows is not worth a word


def gradients(
    ys: object, xs: object, grad_ys: object = None, *, stop_gradients: Any = (), unconnected: str = "none"
) -> list[Any]:
    """Add nodes that compute d sum(ys * grad_ys) / dx for each x; also outside a recording.

    ys: recorded tensors. xs: recorded tensors, Variables or Parameters. grad_ys: like ys, None entries mean ones.
    stop_gradients: tensors that count as constants where others depend on them. unconnected: ``"none"`` gives None for
    an x that no y depends on, ``"zero"`` gives zeros. Integer and bool tensors are constants. A Variable or Parameter
    that is only looked up by row (embedding, index_select, ``w[rows]``) gets `IndexedSlices`, the others tensors; a y
    may be slices, too.

    Raises ShapeError or InvalidArgument for a grad_y that does not fit its y, InvalidArgument without xs and for ys and
    xs of several graphs, NoGradient for an op without a rule, Unsupported for values behind an optimizer's step in a
    loop.

    >>> import tfnb
    >>> with tfnb.record() as g:
    ...     x = tfnb.placeholder(torch.tensor([1.0, 2.0]))
    ...     dx, = tfnb.gradients((x * x).sum(), [x])
    >>> dx.sample
    tensor([2., 4.])
    """
    ys, grad_ys = entries_of(listed(ys), grad_ys)
    xs = listed(xs)
    if not xs:
        raise InvalidArgument("gradients needs at least one x: got an empty list")
    if unconnected not in ("none", "zero"):
        raise InvalidArgument(f"unconnected is 'none' or 'zero', not {unconnected!r}")
    graph, wanted = differentiable(ys, xs)
    with uncollected(), reopen(graph) as recorder, torch.enable_grad():
        return differentiate(recorder, ys, wanted, grad_ys, listed(stop_gradients), unconnected, rows=True)


def stop_gradient(x: Any) -> torch.Tensor:
    """The same value, as a constant for gradients. x: a recorded or plain tensor, or a Variable.

    >>> import tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.tensor([3.0, 4.0]))
    ...     dx, = tfnb.gradients(x * tfnb.stop_gradient(x), [x])
    >>> dx.sample
    tensor([3., 4.])
    """
    if isinstance(x, Tensor):
        with reopen(x.graph):
            return x.detach()
    ensure_type(x, (torch.Tensor, Variable), "stop_gradient")
    return x.read().detach() if isinstance(x, Variable) else x.detach()


# -- one derivative --------------------------------------------------------------------------------------------


def differentiate(
    recorder: Recording, ys: list[Any], xs: list[Any], grad_ys: object = None, stops: Iterable[Any] = (),
    unconnected: str = "none", *, rows: bool = False,
) -> list[Any]:  # fmt: skip
    """`gradients` in an open recording, in the current grad mode; ``rows``: tables' gradients may be row-sparse."""
    ys = [recorder.read(y) if isinstance(y, Variable) else y for y in ys]
    given = [None] * len(ys) if grad_ys is None else listed(grad_ys)
    if len(given) != len(ys):
        raise InvalidArgument(f"grad_ys has {len(given)} entries for {len(ys)} ys")
    nodes, own = recorder.nodes, len(recorder.new)
    targets = sources(recorder, xs)
    with recorder.scope("gradients") as scope, recorder.tagged(GRADIENT):
        seeds = [(y.value, seed(y, g, i)) for i, (y, g) in enumerate(zip(ys, given, strict=True)) if flows(y.dtype)]
        stop = {s.value for s in stops if isinstance(s, Tensor)}
        stop |= {node.value() for node in nodes if LEAF in node.tags}
        walk = Walk(recorder, [v for group in targets for v in group], stop)
        walk.scope = scope
        walk.hook()
        if rows:  # a hook takes a tensor
            tables = [v for x, v in zip(xs, targets, strict=True) if isinstance(x, Variable) and not x.hooks]
            walk.tables.update(v for group in tables for v in group if v not in walk.hooks)
        walk.run(nodes, seeds)
        results = [_result(walk, x, group, unconnected) for x, group in zip(xs, targets, strict=True)]
    roots = tuple(x.value if isinstance(x, Tensor) else x for x in xs)
    recorder.tape.derivatives.append(
        Derivative(
            frozenset(n.id for n in recorder.new[own:]),
            tuple(value for value, _ in seeds),
            roots,
            all(each is None for each in given),
        )
    )
    return results


def sources(recorder: Recording, xs: Iterable[Tensor | Variable]) -> list[list[Value]]:
    """The graph values of each of ``xs``, whose cotangents add up to its gradient."""
    reads: dict[Variable, list[Value]] = {}
    for node in recorder.nodes:
        if (node.op == "tfnb.read" and FROZEN not in node.tags) or LEAF in node.tags:
            reads.setdefault(node.attrs["variable"], []).append(node.value())
    return [_values(x, reads, recorder) for x in xs]


def _values(x: Tensor | Variable, reads: Mapping[Variable, list[Value]], recorder: Recording) -> list[Value]:
    """The graph values of ``x``: of a Variable all reads, those that loops and branches with steps of optimizers left,
    and its stand-ins inside loop bodies.
    """
    if isinstance(x, Tensor):
        x.node  # noqa: B018  raises StaleNode for a tensor that is gone
        return [x.value] if flows(x.dtype) else []
    given = [v for v in recorder.tape.stands.get(x, ()) if v.node in recorder.tape.by_id]
    return reads.get(x, []) + given


def _result(
    walk: Walk, x: Tensor | Variable, values: list[Value], unconnected: str
) -> torch.Tensor | IndexedSlices | None:
    found = [dx for dx in map(walk.total, values) if dx is not None]
    if found:
        total = added(found)
        if isinstance(total, IndexedSlices):
            return total.canonical() if isinstance(x, Variable) else total.to_dense()
        return hooked(total, [] if isinstance(x, Tensor) else x.hooks)
    if unconnected == "none":
        return None
    return torch.zeros_like(x) if isinstance(x, Tensor) else torch.zeros_like(x.read())


# -- the walk -------------------------------------------------------------------------------------------------


class Walk:
    """One backward pass over nodes in program order, towards the values ``targets``."""

    def __init__(self, recorder: Recording, targets: Iterable[Value], stop: Iterable[Value] = ()) -> None:
        self.recorder = recorder
        self.stop = frozenset(stop)
        self.reached: set[Value] = set(targets)
        self.tables: set[Value] = set()  # values whose cotangents may be row-sparse
        self.partials: dict[Value, list[torch.Tensor | IndexedSlices]] = {}
        self.tensors: dict[Value, torch.Tensor] = {}  # recorded tensors of forward values
        self.copies = Copies(recorder)
        self.hooks: dict[Value, list[Hook]] = {}  # called with the whole cotangent of their value, once
        self.scope: str | None = None  # where the gradient nodes stand; None inside a decomposition
        self.inside: tuple[str, ...] = ()  # ops being decomposed

    def run(self, nodes: Sequence[Node], seeds: Iterable[tuple[Value, torch.Tensor]]) -> None:
        """Send the cotangents ``seeds`` backwards through ``nodes``."""
        self.reach(nodes)
        behind = _behind_steps(nodes)
        for value, dy in seeds:
            if value in behind:
                raise _behind_a_step(behind[value])
            self._send(value, dy)
        for node in reversed(nodes):
            dys = [self._through(node, i) for i in range(len(node.outputs))]
            if any(dy is not None for dy in dys):
                self._node(node, dys)

    def hook(self) -> None:
        """Call the hooks that the user registered for values on the way."""
        self.hooks = {value: list(hooks.values()) for value, hooks in self.recorder.autograd.hooks.items()}

    def total(self, value: Value) -> torch.Tensor | IndexedSlices | None:
        """The sum of the partial cotangents of a value, made once."""
        parts = self.partials.get(value)
        if not parts:
            return None
        is_table = value in self.tables
        if len(parts) > 1:
            self.partials[value] = parts = [added(parts, noted=is_table)]
        if isinstance(parts[0], IndexedSlices) and not is_table:
            self.partials[value] = parts = [parts[0].to_dense(noted=False)]
        if value in self.hooks:
            self.partials[value] = parts = [hooked(parts[0], self.hooks.pop(value))]  # type: ignore[arg-type]
        return parts[0]

    def reach(self, nodes: Iterable[Node]) -> None:
        """Mark every value that depends on the targets through ops that conduct."""
        for node in nodes:
            active = frozenset(i for i, value in enumerate(ways(node)) if value in self.reached)
            if active:
                self.reached.update({node.value(i) for i in conducted(node, active)} - self.stop)
                if node.inputs[0] in self.tables and node.value() not in self.hooks and self._keeps_rows(node):
                    self.tables.add(node.value())

    def _send(self, value: Value, dy: torch.Tensor | IndexedSlices) -> None:
        if value in self.reached:
            self.partials.setdefault(value, []).append(dy)

    def _through(self, node: Node, index: int) -> torch.Tensor | IndexedSlices | None:
        """The cotangent of an output that goes on to the node's inputs."""
        value = node.value(index)
        return None if value in self.stop else self.total(value)

    def _node(self, node: Node, dys: list[Any]) -> None:
        count, given = len(ways(node)), {i for i, dy in enumerate(dys) if dy is not None}
        needed = [
            i < count and v in self.reached and not given.isdisjoint(conducted(node, frozenset((i,))))
            for i, v in enumerate(node.inputs)
        ]
        if not any(needed):
            return
        with ExitStack() as stack:
            if self.scope is not None:  # gradient nodes stand in the scope NODE_grad and link to their forward node
                stack.enter_context(self.recorder.scope(f"{self.scope}/{node.name}_grad/"))
                stack.enter_context(self.recorder.tagged(GRADIENT, forward=node.id))
            if node.device is not None:
                stack.enter_context(self.recorder.placed(node.device))
            entries = self._entries(node, dys, needed, stack)
            for value, wanted, entry in zip(node.inputs, needed, entries, strict=True):
                if wanted and entry is not None:
                    self._send(value, self._fitted(node, entry() if callable(entry) else entry, value))

    def _entries(self, node: Node, dys: list[Any], needed: list[bool], stack: ExitStack) -> list[Any]:
        """One cotangent for each input, or a function that makes the cotangent; ``stack`` stays open until all are
        made.
        """
        if "no_grad" in node.tags:
            return [dys[0], *([None] * (len(node.inputs) - 1))]
        is_read = node.op in READS or node.inputs[0] in self.tables
        if needed[0] and is_read and not has_own_rule(node):
            rows = self._rows(node, dys[0], needed)
            if rows is not None:
                return [rows, *([None] * (len(node.inputs) - 1))]
        if needed[0]:
            stack.enter_context(self._said(node))
        dys = [dy.to_dense() if isinstance(dy, IndexedSlices) else dy for dy in dys]
        n = self._forward(node, needed)
        for rule in self._rules(node, dys):
            single = rule.outputs == 1 or gives_one(node.op)
            result = rule.function(n, dys[0] if single else Cotangents(dys, n.outs))
            if result is not NotImplemented:
                return _aligned(n, rule, result)
        return self._decomposed(node, dys)

    def _rules(self, node: Node, dys: list[Any]) -> Iterator[Rule]:
        """The rules to try for a node: its own alone, or its op's, then autograd's formula."""
        if has_own_rule(node):
            yield self._own_rule(node)
            return
        found = RULES.get(node.op)
        if found is not None and found.serves(dys) and (node.op in COMPLEX or not self._complex(node)):
            yield found
        if node.op in COMPOSITES:
            return
        if has_formula(node.op):
            yield derived_rule(node.op, self.recorder)

    def _own_rule(self, node: Node) -> Rule:
        """The rule that the user gave the node."""
        own = self.recorder.space.rules.get(node.id)
        if own is None:
            what = f"the gradient {node.attrs.get('rule', 'override')} of {node.op} is a Python function"
            raise NoGradient(
                _described(node, f"{what} of the session that recorded it, and is not here: run that recording again"),
                node=node.name, op=node.op,
            )  # fmt: skip
        return Rule(own)

    def _keeps_rows(self, node: Node) -> bool:
        """Whether rows of the output are rows of the first input, so that a row-sparse cotangent passes through."""
        if has_own_rule(node):
            return False
        if node.op in LOOKUPS:  # one row alone has no axis of rows
            return len(node.outputs[0].shape) >= len(self._spec(node.inputs[0]).shape)
        if node.op in COLUMNS:
            return _axis(node) != 0
        return node.op in PASSES or node.tags >= _STRAIGHT

    def _rows(self, node: Node, dy: Any, needed: list[bool]) -> IndexedSlices | None:
        """The row-sparse cotangent of a table; None if it is dense."""
        is_rows = isinstance(dy, IndexedSlices)
        if node.op in PASSES:
            return dy if is_rows else None
        if node.op in COLUMNS:
            return self._columns(node, dy, needed) if is_rows else None
        if dy is None or node.op not in LOOKUPS:
            return None
        n, take = self._forward(node, needed), LOOKUPS[node.op]
        pair = (dy.values, lambda i: i.index_select(0, dy.indices)) if is_rows else (dy, lambda i: i)
        found = take(n, *pair)
        if found is None:
            return None
        values, indices = found
        shape = tuple(n.inputs[0].shape)
        name = self.recorder.node(node.inputs[0].node).name
        values, indices = torch.ops.tfnb.slices(values, indices, shape[0])
        return IndexedSlices(values, indices, shape).called(name)

    def _columns(self, node: Node, dy: IndexedSlices, needed: list[bool]) -> IndexedSlices:
        n = self._forward(node, needed)
        return IndexedSlices(COLUMNS[node.op](n, dy.values), dy.indices, tuple(n.inputs[0].shape)).called(dy.name)

    def _said(self, node: Node) -> AbstractContextManager[None]:
        """Where a large Variable was looked up by row and its gradient is dense, a note tells, with the bytes."""
        if node.op not in LOOKUPS:
            return nullcontext()
        table = self.recorder.node(node.inputs[0].node)
        while table.op == "aten.select.int" or table.op in COLUMNS:
            table = self.recorder.node(table.inputs[0].node)
        spec = table.outputs[0]
        is_given = self.scope is None and table.op == "tfnb.placeholder"  # a branch, loop or function is given it
        if not (table.op == "tfnb.read" or is_given) or not is_static(spec.shape):
            return nullcontext()
        if math.prod(spec.shape) * spec.dtype.itemsize < _LARGE:
            return nullcontext()
        way = "tfnb.gradients and index_select(0, rows) keep rows apart"
        return densifying(table.name, spec, f"the gradient of {node.op}; {way}", self.recorder)

    def _forward(self, node: Node, needed: list[bool]) -> Forward:
        region = region_of_tags(node.tags)

        def seen(value: Value) -> torch.Tensor:
            return self._tensor(self.copies.seen(value, region))

        outs = Tensors([node.value(i) for i in range(len(node.outputs))], seen)
        return Forward(node.op, Tensors(node.inputs, seen), outs, self._symbolic(node), needed)

    def _tensor(self, value: Value) -> torch.Tensor:
        found = self.tensors.get(value)
        if found is None:
            found = self.tensors[value] = self.recorder.tensor(value)
        return found

    def _symbolic(self, node: Node) -> Mapping[str, Any]:
        """The node's attrs with sizes as SymInts."""
        if not node.symbols:
            return node.attrs
        symbols = self.recorder.symbols

        def size(leaf: object) -> Any:
            return leaf.evaluate(symbols.bindings([leaf])) if isinstance(leaf, Dim) else leaf

        return map_leaves(size, node.attrs)

    # -- ops without a rule -----------------------------------------------------------------------------------

    def _decomposed(self, node: Node, dys: list[torch.Tensor | None]) -> list[Any]:
        """Record the op's decomposition, and differentiate the recorded nodes."""
        function = None if node.op in self.inside else decomposition(node.op)
        if function is None:
            raise NoGradient(_refused(node, f"no gradient rule for {node.op}"), **node.where)
        n = self._forward(node, [True] * len(node.inputs))
        args, kwargs = unbind(overload(node.op), {name: n[name] for name in node.attrs})
        start = len(self.recorder.new)
        with torch.enable_grad():  # these nodes are walked below, also where the result is not to be differentiated
            outs = function(*args, **kwargs)
        outs = outs if isinstance(outs, (list, tuple)) else [outs]
        inputs: list[Value] = [x.value for x in n.inputs]  # type: ignore[attr-defined]  # of a region that is computed again, its copies
        part = Walk(self.recorder, (x for x, v in zip(inputs, node.inputs, strict=True) if v in self.reached))
        part.inside = (*self.inside, node.op)
        part.tables.update(x for x, v in zip(inputs, node.inputs, strict=True) if v in self.tables)
        pairs = zip(outs, dys, strict=True)
        part.run(self.recorder.new[start:], [(out.value, dy) for out, dy in pairs if dy is not None])
        first = {v: i for i, v in reversed(list(enumerate(inputs)))}  # a value passed twice has one cotangent
        return [part.total(v) if first[v] == i else None for i, v in enumerate(inputs)]

    # -- what rules leave to the walker -----------------------------------------------------------------------

    def _fitted(self, node: Node, dx: Any, value: Value) -> torch.Tensor | IndexedSlices:
        """dx in the shape, dtype and device of the input: broadcasting and promotion undone."""
        spec = self._spec(value)
        if isinstance(dx, IndexedSlices):
            return dx if dx.dtype == spec.dtype else dx.to(spec.dtype)
        if not isinstance(dx, Tensor):
            dx = dx.clone()
        got = self._spec(dx.value)  # type: ignore[attr-defined]
        if got == spec:
            return dx
        if got.dtype.is_complex and not spec.dtype.is_complex:
            dx = dx.real  # what moves a real input is the real part
        rule = self._own_rule(node) if has_own_rule(node) else RULES.get(node.op)
        dims, keep = _broadcast(got.shape, spec.shape, node, rule, self._hint)
        if dims:
            dx = dx.sum(dims)
        if keep:
            dx = dx.sum(keep, keepdim=True)
        if any(isinstance(spec.shape[axis], Dim) for axis in keep):  # one row, or in a run without rows none
            dx = dx.expand(spec.sizes(self.recorder.symbols.bindings(spec.shape)))
        if dx.dtype != spec.dtype or not spec.is_on(dx.device):
            dx = dx.to(device=spec.device, dtype=spec.dtype)
        return dx

    def _complex(self, node: Node) -> bool:
        return any(spec.dtype.is_complex for spec in (*node.outputs, *map(self._spec, node.inputs)))

    def _hint(self, size: Any) -> int | None:
        """A size in the samples; None if unknown."""
        symbols = self.recorder.symbols
        return symbols.hint(size.evaluate(symbols.bindings([size]))) if isinstance(size, Dim) else size

    def _spec(self, value: Value) -> Spec:
        return self.recorder.node(value.node).outputs[value.index]


def hooked(dx: torch.Tensor, hooks: Iterable[Hook]) -> torch.Tensor:
    """A whole gradient after the user's hooks: each may return another one in its place."""
    for hook in hooks:
        changed = hook(dx)
        dx = dx if changed is None else changed
    return dx


def _axis(node: Node) -> int:
    """The ``dim`` of a view of one input, from the front."""
    return node.attrs.get("dim", 0) % max(len(node.outputs[0].shape) + (node.op == "aten.select.int"), 1)


def _behind_steps(nodes: Iterable[Node]) -> dict[Value, Node]:
    """The values that are computed from Parameters as an optimizer's step left them, inside of a loop or branch, with
    the step. Elsewhere a Parameter is read anew behind a step.
    """
    nodes = tuple(nodes)
    steps = {node for node in nodes if _leaves(node)}
    found: dict[Value, Node] = {}
    for node in nodes if steps else ():
        step = node if node in steps else next((found[value] for value in ways(node) if value in found), None)
        if step is not None:
            found |= {node.value(i): step for i, spec in enumerate(node.outputs) if flows(spec.dtype)}
    return found


def _leaves(node: Node) -> bool:
    """Whether a node gives what an optimizer's step leaves; values given to a branch stand outside of its step."""
    return ("update" in node.tags and node.op not in _GIVEN) or (node.op == _ALIAS and LEAF in node.tags)


def _behind_a_step(node: Node) -> Unsupported:
    """The error of a gradient of Parameters through the values that a step left inside of the same loop or branch."""
    at = f" at {node.source}" if node.source is not None else ""
    return Unsupported(
        f"a gradient is taken of what a loop or branch computes behind the step of an optimizer inside of it{at}: "
        "compute it below the loop or branch, where the Parameters have the values of the step",
        node=node.name,
    )


def _broadcast(
    got: Sequence[Any], wanted: Sequence[Any], node: Node, rule: Rule | None, hint: Callable[[Any], int | None]
) -> tuple[list[int], list[int]]:
    """Axes of a cotangent to sum away, then axes to sum to size one."""

    def known_apart(a: object, b: object) -> bool:
        return hint(a) is not None and hint(b) is not None and hint(a) != hint(b)

    lead = len(got) - len(wanted)
    tail = list(zip(got[max(lead, 0) :], wanted, strict=False))
    if lead < 0 or any(known_apart(g, w) and hint(w) != 1 for g, w in tail):
        raise ShapeError(
            f"the gradient rule of {node.op} returned shape {list(got)} for an input of shape {list(wanted)}\n"
            f"  rule: {rule or 'decomposed'}\n  node {node.name}, {node.source}",
            node=node.name, op=node.op,
        )  # fmt: skip
    ones = [i for i, (g, w) in enumerate(tail) if (w == 1 and g != 1) or (hint(w) == 1 and known_apart(g, w))]
    return list(range(lead)), ones


def _aligned(n: Forward, rule: Rule, result: object) -> list[Any]:
    """A rule's result as one entry per input."""
    if isinstance(result, Mapping):
        entries: list[Any] = [None] * len(n.inputs)
        for name, entry in result.items():
            places = n.places(name)
            for place, part in zip(places, listed(entry) if entry is not None else [None] * len(places), strict=False):
                entries[place] = part
        return entries
    entries = list(result) if isinstance(result, (list, tuple)) else [result]
    if n.op == WITH_GRADIENT:  # an entry for each arg; its values have what follows from the args
        entries += [None] * len(n.attrs["values"])
    if len(entries) != len(n.inputs):
        raise InvalidArgument(
            f"Num gradients {len(entries)} generated for op {n.op} do not match num inputs {len(n.inputs)}\n"
            f"  rule: {rule}; it returns one entry per tensor input, None where nothing flows", op=n.op,
        )  # fmt: skip
    return entries


def _described(node: Node, what: str) -> str:
    return f"{what}\n  node {node.name}, {node.source}"


def _refused(node: Node, what: str) -> str:
    outputs = ", ".join(map(str, node.outputs))
    return (
        f"{_described(node, f'{what}, which gives {outputs}')}\n"
        f"  register one with @tfnb.register_gradient({node.op!r}), or stop there with tfnb.stop_gradient(x)"
    )
